"""Intra-operator parallelism on a mesh of chips (Alpa, section 4): a sharding for each operator, by an integer
linear programme, or along a chain by dynamic programming.

A mesh of n x m chips is read as a logical grid a x b. An operator's samples and its parameters are each divided over
none, one or both axes of the grid; chips along an axis that divides neither do the same work. Its cost is that of one
task and of the collective that closes divided parameters; between two operators the samples that the reader does not
have are gathered:

    min  sum_v s_v (c_v + d_v)  +  sum_(u, v) s_u R_uv s_v        s_v one-hot           (Alpa, equation 1)

with e_uv for the products s_u s_v, whose rows and columns add up to s_u and s_v. Alpa leaves the work d out, since all
its choices divide it alike; ours may not, and tasks are priced by the cost engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, NoPlanError
from planner.opgraph.graph import Degrees, Graph
from planner.opgraph.machine import Machine, Prices

Array = NDArray[np.float64]
Axes = tuple[int, ...]


class Choice(NamedTuple):
    """The axes of the logical grid that divide an operator's samples, and those that divide its parameters."""

    sample: Axes = ()
    parameter: Axes = ()

    @property
    def text(self) -> str:
        """`S0P1` as Alpa writes specs: S for samples, P for parameters, R where nothing is divided."""
        parts = [
            f"{name}{''.join(map(str, axes))}" for name, axes in (("S", self.sample), ("P", self.parameter)) if axes
        ]
        return "".join(parts) or "R"


CHOICES = tuple(
    Choice(tuple(axis for axis in (0, 1) if owner[axis] == "S"), tuple(axis for axis in (0, 1) if owner[axis] == "P"))
    for owner in product("SPR", repeat=2)
)


class View(NamedTuple):
    """A mesh read as a grid of a x b chips, the second axis on neighbours."""

    first: int
    second: int

    @property
    def chips(self) -> int:
        """Chips of the mesh."""
        return self.first * self.second

    def size(self, axes: Axes) -> int:
        """Chips along some axes."""
        return prod(self[axis] for axis in axes)

    def group(self, axes: Axes) -> tuple[int, ...]:
        """The chips along some axes through the first one."""
        ranges = [range(self[axis]) if axis in axes else range(1) for axis in (0, 1)]
        return tuple(row * self.second + column for row, column in product(*ranges))


def views(chips: int) -> list[View]:
    """All grids of a number of chips."""
    return [View(ways, chips // ways) for ways in range(1, chips + 1) if chips % ways == 0]


class Sharded(NamedTuple):
    """A choice for every operator."""

    choices: tuple[Choice, ...]
    seconds: float
    bytes: float
    """Of weights and KV on each chip."""


class Options:
    """Costs of the choices of every operator of a graph on a logical grid.

    Args:
        graph: the operators.
        machine: of as many chips as the grid has, or more.
        view: the grid.
        prices: of tasks on that machine.
    """

    def __init__(self, graph: Graph, machine: Machine, view: View, prices: Prices | None = None) -> None:
        self.graph, self.machine, self.view = graph, machine, view
        self.prices = Prices(graph, machine) if prices is None else prices
        self._nodes: dict[int, tuple[Array, Array]] = {}
        self._edges: dict[int, Array] = {}

    def _degrees(self, index: int, choice: Choice) -> Degrees | None:
        """How the operator is split; none where it does not go, or where an axis of one chip is named."""
        operator, view = self.graph.operators[index], self.view
        if any(view[axis] == 1 for axis in (*choice.sample, *choice.parameter)):
            return None
        degrees = [1] * len(operator.dims)
        for axes, kind in ((choice.sample, "sample"), (choice.parameter, "parameter")):
            ways, dim = view.size(axes), operator.first(kind)  # type: ignore[arg-type]
            if ways == 1:
                continue
            if dim is None or ways not in operator.dims[dim].degrees(ways):
                return None
            degrees[dim] = ways
        return tuple(degrees)

    def node(self, index: int) -> tuple[Array, Array]:
        """(seconds, bytes per chip) of every choice of an operator; infinite where it does not go."""
        kind = self.graph.types[index]
        if kind not in self._nodes:
            operator = self.graph.operators[index]
            seconds, held = np.full(len(CHOICES), inf), np.full(len(CHOICES), inf)
            for place, choice in enumerate(CHOICES):
                degrees = self._degrees(index, choice)
                if degrees is None:
                    continue
                seconds[place] = self.prices.task(index, degrees) + self._closing(index, choice, degrees)
                held[place] = operator.work.weight_bytes(degrees) + operator.work.state_bytes(degrees)
            self._nodes[kind] = seconds, held
        return self._nodes[kind]

    def _closing(self, index: int, choice: Choice, degrees: Degrees) -> float:
        operator = self.graph.operators[index]
        closed = [dim for dim in operator.closed if degrees[dim] > 1]
        if not closed or operator.dims[closed[0]].closed_by == "nothing":
            return 0.0
        size = operator.element_bytes * prod(
            operator.dims[dim].size / (1 if dim in closed else degrees[dim]) for dim in operator.output
        )
        group = self.view.group(choice.parameter)
        return self.machine.collective(str(operator.dims[closed[0]].closed_by), group, size)[1]

    def edge(self, reader: int, place: int) -> Array:
        """Seconds of resharding from each choice of the source (rows) to each of the reader (columns).

        What the source has divided and the reader wants whole, or divided over other axes, is gathered. Parameters of
        an output that no collective has closed count as divided too, and are always wanted whole.
        """
        kind = self.graph.edge_types[reader, place]
        if kind not in self._edges:
            edge = self.graph.operators[reader].inputs[place]
            source, operator = self.graph.operators[edge.source], self.graph.operators[reader]
            output = source.output
            sample = source.first("sample")
            follows = sample in output and edge.needs[output.index(sample)] == operator.first("sample")
            parameter = source.first("parameter")
            left = parameter is not None and source.dims[parameter].closed_by is None
            whole = edge.share * source.element_bytes * prod(source.dims[dim].size for dim in output)
            costs = np.zeros((len(CHOICES), len(CHOICES)))
            for row, have in enumerate(CHOICES):
                split = have.sample + (have.parameter if left else ())
                for column, want in enumerate(CHOICES):
                    kept = tuple(axis for axis in have.sample if follows and axis in want.sample)
                    gathered = tuple(axis for axis in split if axis not in kept)
                    if self.view.size(gathered) > 1:
                        size = whole / self.view.size(kept)
                        group = self.view.group(tuple(sorted(gathered)))
                        costs[row, column] = self.machine.collective("all_gather", group, size)[1]
            self._edges[kind] = costs
        return self._edges[kind]

    def cost(self, choices: tuple[int, ...]) -> float:
        """Seconds of a choice for every operator, by their places in CHOICES."""
        nodes = sum(float(self.node(index)[0][own]) for index, own in enumerate(choices))
        return nodes + sum(
            float(self.edge(index, place)[choices[edge.source], choices[index]])
            for index, operator in enumerate(self.graph.operators)
            for place, edge in enumerate(operator.inputs)
        )


def along_chain(options: Options, firsts: Sequence[int], last: int, lean: bool = False) -> tuple[Array, Array]:
    """(seconds, bytes per chip) of the cheapest choices for operators i ... j, [i of `firsts`, j up to `last`].

    Each operator must read the one before it alone. By dynamic programming over the choices of the last operator;
    infinite seconds where j lies before i.

    Args:
        options: costs on a grid.
        firsts: indices of first operators.
        last: of the last one, included.
        lean: only the choices with the fewest bytes of each operator, for where memory is short.
    """
    shape = len(firsts), last + 1
    seconds, held = np.full(shape, inf), np.zeros(shape)
    best, weight = np.full((len(firsts), len(CHOICES)), inf), np.zeros((len(firsts), len(CHOICES)))
    rows, columns, begins = np.arange(len(firsts)), np.arange(len(CHOICES)), np.asarray(firsts)
    for index in range(int(begins.min()), last + 1):
        node, size = options.node(index)
        if lean:
            node = np.where(size <= np.min(size) * (1 + 1e-9), node, inf)
        known = np.where(np.isfinite(size), size, 0.0)
        if index and options.graph.operators[index].inputs:
            ways = best[:, :, None] + options.edge(index, 0)
            chosen = np.argmin(ways, axis=1)
            best = ways[rows[:, None], chosen, columns] + node
            weight = weight[rows[:, None], chosen] + known
        starting = begins == index
        best[starting], weight[starting] = node, known
        place = np.argmin(best, axis=1)
        seconds[:, index], held[:, index] = best[rows, place], weight[rows, place]
    return seconds, held


def chosen(options: Options, first: int, last: int, lean: bool = False) -> Sharded:
    """The choices behind the last entry of `along_chain`; the arguments are its own."""
    node, size = options.node(first)
    best, back = node, []
    for index in range(first, last + 1):
        node, size = options.node(index)
        if lean:
            node = np.where(size <= np.min(size) * (1 + 1e-9), node, inf)
        if index == first:
            best = node
            continue
        ways = best[:, None] + options.edge(index, 0)
        back.append(np.argmin(ways, axis=0))
        best = np.min(ways, axis=0) + node
    picked = [int(np.argmin(best))]
    for before in reversed(back):
        picked.append(int(before[picked[-1]]))
    picked.reverse()
    held = sum(float(options.node(first + place)[1][own]) for place, own in enumerate(picked))
    return Sharded(tuple(CHOICES[own] for own in picked), float(np.min(best)), held)


def ilp(options: Options, memory: float = inf) -> Sharded:
    """The cheapest choices for all operators of a graph, by an integer linear programme (HiGHS, through scipy).

    Args:
        options: costs on a grid.
        memory: bytes that a chip holds at most.

    Raises:
        InputError: scipy is not installed.
        NoPlanError: no choices fit.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 (an extra, needed here only)
        from scipy.sparse import coo_array  # noqa: PLC0415
    except ImportError:
        raise InputError("sharding: needs scipy: pip install 'parallel-strategy-planner[search]'") from None
    graph = options.graph
    allowed = [np.flatnonzero(np.isfinite(options.node(index)[0])) for index in range(len(graph.operators))]
    starts = np.cumsum([0, *(len(own) for own in allowed)])
    costs: list[Array] = [options.node(index)[0][own] for index, own in enumerate(allowed)]
    sizes = [options.node(index)[1][own] for index, own in enumerate(allowed)]
    rows: list[tuple[list[int], list[float], float]] = []  # (variables, factors, right-hand side), equalities
    for index, own in enumerate(allowed):
        rows.append((list(range(starts[index], starts[index] + len(own))), [1.0] * len(own), 1.0))
    total = int(starts[-1])
    for index, operator in enumerate(graph.operators):
        for place, edge in enumerate(operator.inputs):
            have, want = allowed[edge.source], allowed[index]
            table = options.edge(index, place)[np.ix_(have, want)]
            numbers = total + np.arange(table.size).reshape(table.shape)
            costs.append(table.ravel())
            for row in range(len(have)):
                rows.append(([*numbers[row].tolist(), int(starts[edge.source]) + row], [1.0] * len(want) + [-1.0], 0.0))
            for column in range(len(want)):
                rows.append(
                    ([*numbers[:, column].tolist(), int(starts[index]) + column], [1.0] * len(have) + [-1.0], 0.0)
                )
            total += table.size
    matrix = coo_array(
        (
            np.concatenate([factors for _, factors, _ in rows]),
            (
                np.concatenate([[number] * len(columns) for number, (columns, _, _) in enumerate(rows)]),
                np.concatenate([columns for columns, _, _ in rows]),
            ),
        ),
        shape=(len(rows), total),
    ).tocsr()
    right = np.array([side for _, _, side in rows])
    constraints: list[Any] = [LinearConstraint(matrix, right, right)]
    if memory < inf:
        held = np.concatenate([*sizes, np.zeros(total - int(starts[-1]))])
        constraints.append(LinearConstraint(held[None, :] / memory, -inf, 1.0))
    objective = np.concatenate(costs)
    scale = float(np.max(objective)) or 1.0  # HiGHS works to absolute tolerances
    kinds = np.concatenate([np.ones(int(starts[-1])), np.zeros(total - int(starts[-1]))])  # e follow from s
    found = milp(
        objective / scale, integrality=kinds, bounds=Bounds(0, 1), constraints=constraints, options={"mip_rel_gap": 0.0}
    )
    if found.x is None:
        least = sum(float(np.min(size)) for size in sizes)
        raise NoPlanError(f"sharding: no choices fit {memory:.4g} B a chip; the least that they hold is {least:.4g} B")
    picked = [int(own[np.argmax(found.x[starts[index] : starts[index + 1]])]) for index, own in enumerate(allowed)]
    held_bytes = sum(float(options.node(index)[1][own]) for index, own in enumerate(picked))
    return Sharded(tuple(CHOICES[own] for own in picked), options.cost(tuple(picked)), held_bytes)


class OnMesh(NamedTuple):
    """The best sharding over all grids of a machine."""

    view: View
    sharded: Sharded
    options: Options
    others: tuple[tuple[View, float], ...]
    """Seconds of the best sharding on every grid; infinite where nothing fits."""


def best_grid(graph: Graph, machine: Machine, memory: float = inf) -> OnMesh:
    """The cheapest shardings by `ilp` over all grids of a machine's chips.

    Raises:
        InputError, NoPlanError: as `ilp`; the latter where nothing fits on any grid.
    """
    prices, found, others = Prices(graph, machine), [], []
    refused: NoPlanError | None = None
    boxes = machine.placement.torus_groups
    for view in views(machine.devices):
        if boxes and not {view.first, view.second} <= boxes.keys() | {1}:
            continue  # on a torus, rows and columns must be boxes
        options = Options(graph, machine, view, prices)
        try:
            found.append((ilp(options, memory), options))
            others.append((view, found[-1][0].seconds))
        except NoPlanError as error:
            refused = error
            others.append((view, inf))
    if not found:
        assert refused is not None
        raise refused
    sharded, options = min(found, key=lambda pair: pair[0].seconds)
    return OnMesh(options.view, sharded, options, tuple(others))
