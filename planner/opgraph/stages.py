"""Inter-operator parallelism (Alpa, section 5): a chain of operators cut into stages, each on a submesh.

Submeshes are 1 x 1, 1 x 2, 1 x 4 ... 1 x M chips of a node, or whole nodes 2 x M ... N x M: with M a power of two any
of them that have no more chips than the cluster tile it (Alpa, theorem 1). A cluster may hold chips of several kinds;
a stage is on one. Stage times are of one microbatch, by the cheapest shardings over all logical grids of the submesh
(`sharding`); what is sent from stage to stage is not in them, as in Alpa.

    training form    T = sum t_i + (B - 1) max t_j       all B microbatches through the pipeline, once (equation 2)
    inference form   T = s max t_j                       s stages: a microbatch's latency, the pipeline being full

The first is solved for every bound on the slowest stage, from the least up, until B times the bound is no less than
the best T so far (equations 3 and 4); the second directly, by the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.weights import stage_sizes
from planner.errors import InputError, NoPlanError
from planner.opgraph.graph import Graph
from planner.opgraph.machine import Machine, Prices
from planner.opgraph.sharding import Options, View, along_chain, views
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware

Array = NDArray[np.float64]
Form = Literal["inference", "training"]
Even = Literal["layers", "operators"]
EVEN: tuple[Even, ...] = ("layers", "operators")
FORMS: tuple[Form, ...] = ("inference", "training")
UNITS = 16
"""Units that operators are joined to before stages are cut."""
CLOSE = 1e-9
"""Relative difference of two bounds on the slowest stage that are looked at as one."""


class Shape(NamedTuple):
    """A submesh: nodes x chips of each."""

    nodes: int
    chips: int

    @property
    def total(self) -> int:
        """Chips in all."""
        return self.nodes * self.chips

    def __str__(self) -> str:
        return f"{self.nodes}x{self.chips}"


def shapes(nodes: int, chips: int) -> list[Shape]:
    """The submeshes of a cluster of `nodes` nodes of `chips` chips.

    Raises:
        InputError: chips of a node that are no power of two, of which submeshes need not tile the cluster.
    """
    if chips & (chips - 1):
        raise InputError(f"stages: nodes of {chips} chips; submeshes tile a cluster where that is a power of two")
    inside = [Shape(1, 1 << power) for power in range(chips.bit_length())]
    return inside + [Shape(count, chips) for count in range(2, nodes + 1)]


class Kind(NamedTuple):
    """Chips of one kind in a cluster, and the model on them."""

    graph: Graph
    """A chain; the same operators for every kind, each priced for its own chips."""
    hardware: Hardware
    engine: Engine
    nodes: int
    chips: int
    """Of a node."""
    memory: float
    """Bytes of weights and KV that a chip may hold."""


def kind_of(graph: Graph, hardware: Hardware, engine: Engine, gpus: int, memory: float) -> Kind:
    """So many chips of one hardware, by whole nodes, or within one."""
    domain = hardware.domain or gpus
    if gpus <= domain:
        return Kind(graph, hardware, engine, 1, gpus, memory)
    if gpus % domain:
        raise InputError(f"--gpus {gpus}: stages need whole nodes of {domain} chips of {hardware.name}")
    return Kind(graph, hardware, engine, gpus // domain, domain, memory)


class Intra(NamedTuple):
    """The cheapest sharding of consecutive operators on a submesh."""

    seconds: float
    view: View
    bytes: float


class Times:
    """Stage times of a chain on every submesh of one kind of chips, computed when they are asked for."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.shapes = kind, shapes(kind.nodes, kind.chips)
        self._options: dict[Shape, list[Options]] = {}
        self._rows: dict[tuple[Shape, int], list[Intra]] = {}
        for index, operator in enumerate(kind.graph.operators):
            if [edge.source for edge in operator.inputs] != ([index - 1] if index else []):
                raise InputError(
                    f"{kind.graph.name}: {operator.name}: stages need operators that each read the one before"
                )

    def _grids(self, shape: Shape) -> list[Options]:
        if shape not in self._options:
            kind = self.kind
            machine = Machine(kind.hardware, kind.engine, shape.total)
            prices = Prices(kind.graph, machine)
            self._options[shape] = [Options(kind.graph, machine, view, prices) for view in views(shape.total)]
        return self._options[shape]

    def rows(self, shape: Shape, firsts: Sequence[int], last: int | None = None) -> dict[int, list[Intra]]:
        """For each first operator, by the last one from there on, the cheapest sharding that fits; else infinite.

        Args:
            shape: the submesh.
            firsts: first operators.
            last: the last operator that is asked for; none = the last there is.
        """
        end = len(self.kind.graph.operators) - 1
        last = end if last is None else min(end, last)
        new = [first for first in dict.fromkeys(firsts) if len(self._rows.get((shape, first), ())) <= last - first]
        if new:
            none = Intra(inf, View(1, shape.total), inf)
            best = [[none] * (last + 1 - first) for first in new]
            for options in self._grids(shape):
                for lean in (False, True):
                    seconds, held = along_chain(options, new, last, lean)
                    fits = (held <= self.kind.memory * (1 + 1e-12)) & np.isfinite(seconds)
                    for row, column in np.argwhere(fits).tolist():
                        place = column - new[row]
                        if seconds[row, column] < best[row][place].seconds:
                            best[row][place] = Intra(
                                seconds[row, column].item(), options.view, held[row, column].item()
                            )
                    if np.all(held <= self.kind.memory):
                        break  # the lean choices are for where others do not fit
            self._rows.update({(shape, first): row for first, row in zip(new, best, strict=True)})
        return {first: self._rows[shape, first] for first in firsts}

    def stage(self, shape: Shape, first: int, last: int) -> Intra:
        """The cheapest sharding of operators `first` ... `last`, the last one included."""
        return self.rows(shape, [first], last)[first][last - first]


class Stage(NamedTuple):
    """Units `first` ... `last` (included) on a submesh of a kind of chips."""

    first: int
    last: int
    kind: int
    shape: int
    """Index of the submesh among those of its kind."""
    seconds: float


class Placed(NamedTuple):
    """Operators `first` ... `last` (included) on a submesh, with their sharding."""

    first: int
    last: int
    kind: int
    shape: Shape
    intra: Intra


class Pipeline(NamedTuple):
    """Stages in their order, and what they take by the form that was asked for."""

    stages: tuple[Stage, ...]
    seconds: float


def total(times: Sequence[float], form: Form, microbatches: int) -> float:
    """T of stage times: sum + (B - 1) max, or stages x max."""
    if form == "inference":
        return len(times) * max(times)
    return sum(times) + (microbatches - 1) * max(times)


def total_of(stages: Sequence[Placed], form: Form, microbatches: int) -> float:
    """The same of stages of operators."""
    return total([stage.intra.seconds for stage in stages], form, microbatches)


class Costs(NamedTuple):
    """Times of all stages: for each kind of chips [units, units, submeshes], from a first to a last unit."""

    times: tuple[Array, ...]
    """Infinite where the last unit is before the first, or memory is short."""
    chips: tuple[tuple[int, ...], ...]
    """Chips of each submesh of each kind."""
    there: tuple[int, ...]
    """Chips there are of each kind."""

    @property
    def units(self) -> int:
        """Units of the chain."""
        return len(self.times[0])


def partition(costs: Costs, form: Form = "inference", microbatches: int = 1) -> Pipeline:
    """The cheapest stages and submeshes; chips may be left over.

    Args:
        costs: of all stages.
        form: what is least.
        microbatches: B of the training form.

    Raises:
        NoPlanError: no stages fit.
    """
    found = _by_stages(costs) if form == "inference" else _by_bound(costs, microbatches)
    if found is None:
        raise NoPlanError("stages: nothing fits: no stage of these chips holds what would be its part; more chips")
    return found


def _moves(costs: Costs) -> list[tuple[int, int, int]]:
    """(kind, submesh, step in the index of chips that are left) of every submesh; kinds count in mixed radix."""
    strides = [prod(count + 1 for count in costs.there[kind + 1 :]) for kind in range(len(costs.there))]
    return [
        (kind, shape, chips * strides[kind]) for kind, own in enumerate(costs.chips) for shape, chips in enumerate(own)
    ]


def _allowed(costs: Costs) -> dict[tuple[int, int], NDArray[np.intp]]:
    """For each submesh the states, as indices of chips left of every kind, in which it is there."""
    left = np.indices([count + 1 for count in costs.there]).reshape(len(costs.there), -1)
    return {
        (kind, shape): np.flatnonzero(left[kind] >= chips)
        for kind, own in enumerate(costs.chips)
        for shape, chips in enumerate(own)
    }


def _solve(
    costs: Costs, later: Array, combine: Callable[[Array, Array], Array], bound: float
) -> tuple[Array, NDArray[np.intp]]:
    """One stage in front of what `later` [units + 1, states] says is best behind it.

    Returns:
        (best [units + 1, states], choice: (move x units + last unit), -1 where there is none).
    """
    moves, allowed, units = _moves(costs), _allowed(costs), costs.units
    best = np.full(later.shape, inf)
    choice = np.full(later.shape, -1, dtype=np.intp)
    for first in range(units - 1, -1, -1):
        for number, (kind, shape, step) in enumerate(moves):
            times = costs.times[kind][first, first:, shape]
            times = np.where(times <= bound, times, inf)
            if not np.isfinite(times).any():
                continue
            states = allowed[kind, shape]
            ways = combine(times[:, None], later[first + 1 :, states - step])
            last = np.argmin(ways, axis=0)
            least = ways[last, np.arange(len(states))]
            better = least < best[first, states]
            best[first, states[better]] = least[better]
            choice[first, states[better]] = number * units + first + last[better]
        if combine is _sum:  # stages behind this one are cut by the same rule: filled from the back
            later[first] = best[first]
    return best, choice


def _sum(times: Array, later: Array) -> Array:
    return times + later


def _most(times: Array, later: Array) -> Array:
    return np.maximum(times, later)


def _by_bound(costs: Costs, microbatches: int) -> Pipeline | None:
    """The training form: the least sum under each bound on the slowest stage (Alpa, equations 3 and 4)."""
    states = prod(count + 1 for count in costs.there)
    every = np.unique(np.concatenate([times[np.isfinite(times)] for times in costs.times]))
    best: Pipeline | None = None
    before = -inf
    for bound in every.tolist():
        if best is not None and microbatches * bound >= best.seconds:
            break
        if bound <= before * (1 + CLOSE):
            continue
        before = bound
        later = np.full((costs.units + 1, states), inf)
        later[costs.units] = 0.0
        least, choice = _solve(costs, later, _sum, bound * (1 + CLOSE))
        if np.isfinite(least[0, -1]):
            stages = _trace(costs, [choice])
            seconds = total([stage.seconds for stage in stages], "training", microbatches)
            if best is None or seconds < best.seconds:
                best = Pipeline(stages, seconds)
    return best


def _by_stages(costs: Costs) -> Pipeline | None:
    """The inference form: the least slowest stage for each number of stages."""
    states = prod(count + 1 for count in costs.there)
    later = np.full((costs.units + 1, states), inf)
    later[costs.units] = 0.0
    choices: list[NDArray[np.intp]] = []
    best: Pipeline | None = None
    for count in range(1, min(costs.units, sum(costs.there)) + 1):
        least, choice = _solve(costs, later, _most, inf)
        choices.append(choice)
        later = least
        seconds = count * float(least[0, -1])
        if np.isfinite(seconds) and (best is None or seconds < best.seconds * (1 - CLOSE)):
            best = Pipeline(_trace(costs, choices[::-1]), seconds)
    return best


def _trace(costs: Costs, choices: Sequence[NDArray[np.intp]]) -> tuple[Stage, ...]:
    """The stages behind a solution; of several tables each is for one stage, of one it is for all."""
    moves, unit, state = _moves(costs), 0, choices[0].shape[1] - 1
    stages: list[Stage] = []
    while unit < costs.units:
        table = choices[min(len(stages), len(choices) - 1)]
        number, last = divmod(int(table[unit, state]), costs.units)
        kind, shape, step = moves[number]
        stages.append(Stage(unit, last, kind, shape, float(costs.times[kind][unit, last, shape])))
        unit, state = last + 1, state - step
    return tuple(stages)


def clusters(weights: Sequence[float], crossing: Sequence[float], count: int, slack: float = 0.5) -> list[int]:
    """Operators joined to `count` units before stages are cut (Alpa, equation 6): the first operator of each.

    The largest tensor between two units is as small as it can be where no unit has more than (1 + slack) times the
    average work (one operator alone may); of those the units that are most even.

    Args:
        weights: work of each operator, in any unit.
        crossing: bytes that cross in front of each operator (the first one's does not count).
        count: units.
        slack: how uneven they may be.
    """
    many = len(weights)
    count = min(count, many)
    most = (1 + slack) * sum(weights) / count
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    best = {(0, 0): (0.0, 0.0, -1)}  # (operators done, units): (largest crossing, sum of squares, start of the last)
    for done in range(1, many + 1):
        for units in range(1, min(count, done) + 1):
            for start in range(units - 1, done):
                before = best.get((start, units - 1))
                work = float(sums[done] - sums[start])
                if before is None or (work > most * (1 + CLOSE) and done - start > 1):
                    continue
                way = (max(before[0], crossing[start] if start else 0.0), before[1] + work**2, start)
                if (done, units) not in best or way[:2] < best[done, units][:2]:
                    best[done, units] = way
    if (many, count) not in best:
        return clusters(weights, crossing, count, 2 * slack + 1)
    starts, done = [], many
    for units in range(count, 0, -1):
        done = best[done, units][2]
        starts.append(done)
    return starts[::-1]


class Cluster:
    """Kinds of chips with a model on them, whose operators are joined to units.

    Args:
        kinds: of the chips.
        units: at most so many.
    """

    def __init__(self, kinds: Sequence[Kind], units: int = UNITS) -> None:
        self.kinds = tuple(kinds)
        self.times = [Times(kind) for kind in kinds]
        graph = kinds[0].graph
        alone = [
            self.times[0].stage(self.times[0].shapes[0], index, index).seconds for index in range(len(graph.operators))
        ]
        work = [seconds if np.isfinite(seconds) else 0.0 for seconds in alone]
        crossing = [0.0] + [
            source.element_bytes * prod(source.dims[dim].size for dim in source.output)
            for source in graph.operators[:-1]
        ]
        self.starts = clusters(work, crossing, units)
        self.ends = [*(start - 1 for start in self.starts[1:]), len(graph.operators) - 1]

    def costs(self) -> Costs:
        """Times of all stages of whole units."""
        units = len(self.starts)
        tables = []
        for times in self.times:
            table = np.full((units, units, len(times.shapes)), inf)
            for place, shape in enumerate(times.shapes):
                rows = times.rows(shape, self.starts)
                for first, start in enumerate(self.starts):
                    for last in range(first, units):
                        table[first, last, place] = rows[start][self.ends[last] - start].seconds
            tables.append(table)
        chips = tuple(tuple(shape.total for shape in times.shapes) for times in self.times)
        return Costs(tuple(tables), chips, tuple(kind.nodes * kind.chips for kind in self.kinds))

    def placed(self, pipeline: Pipeline) -> list[Placed]:
        """Stages of units as stages of operators."""
        return [
            self.place(self.starts[stage.first], self.ends[stage.last], stage.kind, stage.shape)
            for stage in pipeline.stages
        ]

    def place(self, first: int, last: int, kind: int, shape: int) -> Placed:
        """Operators on a submesh of a kind of chips, by its index."""
        times = self.times[kind]
        return Placed(first, last, kind, times.shapes[shape], times.stage(times.shapes[shape], first, last))

    def solve(self, form: Form, microbatches: int) -> list[Placed]:
        """The best stages of units, or the best equal ones; bounds moved operator by operator as long as that helps.

        Units are coarser than operators, so that the best stages of units are not always the best of operators.

        Raises:
            NoPlanError: nothing fits.
        """
        starts = [self.placed(partition(self.costs(), form, microbatches))]
        starts += [even for by in EVEN if (even := self.even(by, form, microbatches)) is not None]
        found = [self._refined(stages, form, microbatches) for stages in starts]
        return min(found, key=lambda stages: total_of(stages, form, microbatches))

    def _refined(self, stages: list[Placed], form: Form, microbatches: int) -> list[Placed]:
        best, moved = total_of(stages, form, microbatches), True
        while moved:
            moved = False
            for place, step in [(place, step) for place in range(len(stages) - 1) for step in (-2, -1, 1, 2)]:
                left, right = stages[place : place + 2]
                if not left.first <= left.last + step < right.last:
                    continue
                tried = list(stages)
                tried[place] = self._replaced(left, left.first, left.last + step)
                tried[place + 1] = self._replaced(right, left.last + step + 1, right.last)
                seconds = total_of(tried, form, microbatches)
                if seconds < best * (1 - CLOSE):
                    stages, best, moved = tried, seconds, True
        return stages

    def _replaced(self, stage: Placed, first: int, last: int) -> Placed:
        return stage._replace(first=first, last=last, intra=self.times[stage.kind].stage(stage.shape, first, last))

    def even(self, by: Even, form: Form, microbatches: int) -> list[Placed] | None:
        """The best pipeline of equal stages on equal submeshes, as templates have it; none where none fits.

        Args:
            by: as many layers in each stage, with the ends at the first and the last, or as many operators.
            form: of T.
            microbatches: B of the training form.
        """
        best: list[Placed] | None = None
        chips = [kind.nodes * kind.chips for kind in self.kinds]
        for count in range(1, sum(chips) + 1):
            bounds = self._bounds(count, by)
            if bounds is None or sum(chips) % count:
                continue
            each = sum(chips) // count
            if any(own % each for own in chips):
                continue
            owners = [kind for kind, own in enumerate(chips) for _ in range(own // each)]
            stages = []
            for owner, (first, last) in zip(owners, bounds, strict=True):
                fitting = [index for index, shape in enumerate(self.times[owner].shapes) if shape.total == each]
                if fitting:
                    stages.append(self.place(first, last, owner, fitting[0]))
            seconds = total_of(stages, form, microbatches) if len(stages) == count else inf
            if seconds < (inf if best is None else total_of(best, form, microbatches)):
                best = stages
        return best

    def _bounds(self, count: int, by: str) -> list[tuple[int, int]] | None:
        """First and last operator of each of `count` equal stages; none where there are too few."""
        names = [operator.name.split(" ")[0] for operator in self.kinds[0].graph.operators]
        layers = sorted({int(name) for name in names if name.isdigit()})
        many = len(layers) if by == "layers" and layers else len(names)
        if count > many:
            return None
        edges = np.cumsum([0, *stage_sizes(many, count)]).tolist()
        if by == "layers" and layers:
            edges = [0] + [names.index(str(layers[edge])) for edge in edges[1:-1]] + [len(names)]
        return [(start, stop - 1) for start, stop in pairwise(edges)]
