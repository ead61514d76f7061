"""A cluster of one or several kinds of chips with a model on it: stage times of its operators, and its best pipeline.

Operators are joined to units (`clusters`), the units cut into stages (`stages`), the bounds then moved operator by
operator. Equal stages, as templates have them, are there to compare with, and to start from where they are better.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, prod
from typing import Literal, NamedTuple

import numpy as np

from planner.costs.weights import stage_sizes
from planner.errors import InputError
from planner.opgraph.graph import Graph
from planner.opgraph.machine import Machine, Prices
from planner.opgraph.sharding import Options, Sharded, View, along_chain, chosen, views
from planner.opgraph.stages import CLOSE, Costs, Form, Pipeline, Shape, partition, shapes, total
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware

Even = Literal["layers", "operators"]
EVEN: tuple[Even, ...] = ("layers", "operators")
UNITS = 16
"""Units that operators are joined to before stages are cut."""


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
    if hardware.torus is not None:
        raise InputError(
            f"--method stages: {hardware.name} is a torus; submeshes are nodes and parts of nodes on switches"
        )
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

    def shardings(self, shape: Shape, first: int, last: int) -> Sharded:
        """The choice for each of these operators behind `stage`."""
        wanted = self.stage(shape, first, last)
        (options,) = [options for options in self._grids(shape) if options.view == wanted.view]
        tries = (chosen(options, first, last, lean) for lean in (False, True))
        return min(tries, key=lambda found: abs(found.seconds - wanted.seconds))

    def stage(self, shape: Shape, first: int, last: int) -> Intra:
        """The cheapest sharding of operators `first` ... `last`, the last one included."""
        return self.rows(shape, [first], last)[first][last - first]


class Placed(NamedTuple):
    """Operators `first` ... `last` (included) on a submesh, with their sharding."""

    first: int
    last: int
    kind: int
    shape: Shape
    intra: Intra


def total_of(stages: Sequence[Placed], form: Form, microbatches: int) -> float:
    """The same of stages of operators."""
    return total([stage.intra.seconds for stage in stages], form, microbatches)


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

    def whole(self, form: Form, microbatches: int) -> float:
        """T of one stage on all chips of one kind, infinite where that does not fit."""
        last = len(self.kinds[0].graph.operators) - 1
        each = [times.stage(times.shapes[-1], 0, last).seconds for times in self.times]
        return total([min(each)], form, microbatches)

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
