"""Operator graphs: operators with the dimensions that may be split, their work, and what each reads of the others.

An operator is split by its dimensions (FlexFlow's SOAP: Sample, Attribute, Parameter; the O is where its tasks stand).
Its work says which kernels one task runs, and what it holds in memory, by the degree of every dimension; the kernels
are those of `costs.layers`, so that they are counted and priced as everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple, Protocol

from planner.costs.layers import Operation
from planner.specs.opgraph import Closing, DimKind, OperatorGraph, OperatorSpec

Degrees = tuple[int, ...]
"""Ways in which each dimension of an operator is split, in their order."""


class Dim(NamedTuple):
    """A dimension of an operator (see `specs.opgraph.DimSpec`)."""

    name: str
    size: int
    kind: DimKind = "whole"
    closed_by: Closing | None = None
    ways: tuple[int, ...] = ()
    """Degrees in which it may be split; none = every divisor of its size, or 1 where it is whole."""

    def degrees(self, most: int) -> list[int]:
        """The ways to split it into equal parts, at most so many."""
        if self.kind == "whole":
            return [1]
        allowed = self.ways or tuple(ways for ways in range(1, min(self.size, most) + 1) if self.size % ways == 0)
        return [ways for ways in allowed if ways <= most]

    @property
    def of_output(self) -> bool:
        """Whether the output has it; else it is summed over."""
        return self.closed_by not in ("all_reduce", "nothing")


class Edge(NamedTuple):
    """What an operator reads of another one's output."""

    source: int
    """Index of that operator."""
    needs: tuple[int | None, ...]
    """For each dimension of its output, the own dimension that selects a part of it; none = all of it is read."""
    share: float = 1.0
    """Of what is selected, the share that is read: a head needs the last token of a prompt only."""


class Work(Protocol):
    """What the tasks of an operator do and hold; alike for operators that are equal in it."""

    def operations(self, degrees: Degrees) -> Sequence[Operation]:
        """The kernels of one task."""

    def weight_bytes(self, degrees: Degrees) -> float:
        """Bytes of the weights of one task; tasks with the same part of all Parameter dimensions hold the same."""

    def state_bytes(self, degrees: Degrees) -> float:
        """Bytes that a task holds beside them, of its own: the KV cache."""


class Plain(NamedTuple):
    """Work that divides evenly: FLOPs by all degrees, weights by those of Parameter dimensions."""

    kernel: str
    dtype: str
    flops: float
    weights: float
    output: tuple[tuple[int, int], ...]
    """(dimension, size) of the output."""
    reads: tuple[tuple[tuple[int | None, int], ...], ...]
    """The same of everything read: (own dimension that selects a part or none, size)."""
    parameters: tuple[int, ...]
    element_bytes: float

    def operations(self, degrees: Degrees) -> Sequence[Operation]:
        """One kernel, which reads its part of the inputs and writes its part of the output."""
        read = sum(prod(size / (1 if own is None else degrees[own]) for own, size in tensor) for tensor in self.reads)
        written = prod(size / degrees[own] for own, size in self.output)
        ways = prod(degrees)
        return [
            Operation(
                self.kernel,
                self.kernel,  # type: ignore[arg-type]
                self.dtype,
                flops=self.flops / ways,
                weight_bytes=self.weight_bytes(degrees),
                activation_bytes=(read + written) * self.element_bytes,
            )
        ]

    def weight_bytes(self, degrees: Degrees) -> float:
        """The weights by the degrees of Parameter dimensions."""
        return self.weights / prod(degrees[index] for index in self.parameters)

    def state_bytes(self, degrees: Degrees) -> float:
        """Nothing."""
        return 0.0


class Operator(NamedTuple):
    """One operator."""

    name: str
    dims: tuple[Dim, ...]
    inputs: tuple[Edge, ...]
    work: Work
    element_bytes: float = 2.0

    @property
    def output(self) -> tuple[int, ...]:
        """Indices of the dimensions that the output has."""
        return tuple(index for index, dim in enumerate(self.dims) if dim.of_output)

    @property
    def closed(self) -> tuple[int, ...]:
        """Indices of the dimensions that a collective closes."""
        return tuple(index for index, dim in enumerate(self.dims) if dim.closed_by is not None)

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of Parameter dimensions."""
        return tuple(index for index, dim in enumerate(self.dims) if dim.kind == "parameter")

    def first(self, kind: DimKind) -> int | None:
        """The first dimension of a kind."""
        return next((index for index, dim in enumerate(self.dims) if dim.kind == kind), None)


class Graph:
    """Operators in an order in which each reads only of those before it.

    Args:
        name: of the graph.
        operators: in that order.
    """

    def __init__(self, name: str, operators: Sequence[Operator]) -> None:
        self.name, self.operators = name, tuple(operators)
        for index, operator in enumerate(self.operators):
            assert all(edge.source < index for edge in operator.inputs), f"{operator.name} reads of a later operator"

    @cached_property
    def readers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each operator, (operator, which of its inputs) of all that read it."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for place, edge in enumerate(operator.inputs):
                found[edge.source].append((index, place))
        return tuple(map(tuple, found))

    @cached_property
    def types(self) -> tuple[int, ...]:
        """For each operator a number that operators with the same work and dimensions share."""
        numbers: dict[tuple[tuple[Dim, ...], Work, float], int] = {}
        return tuple(
            numbers.setdefault((each.dims, each.work, each.element_bytes), len(numbers)) for each in self.operators
        )

    @cached_property
    def edge_types(self) -> dict[tuple[int, int], int]:
        """For (operator, which of its inputs) a number that alike edges between alike operators share."""
        numbers: dict[tuple[int, int, Edge], int] = {}
        return {
            (index, place): numbers.setdefault(
                (self.types[edge.source], self.types[index], edge._replace(source=0)), len(numbers)
            )
            for index, operator in enumerate(self.operators)
            for place, edge in enumerate(operator.inputs)
        }


def from_file(spec: OperatorGraph) -> Graph:
    """The graph of a file, its operators sorted.

    Args:
        spec: as it was read and validated.
    """
    waiting = {operator.name: operator for operator in spec.operators}
    order: dict[str, OperatorSpec] = {}
    while waiting:
        ready = next(name for name, each in waiting.items() if all(read.operator in order for read in each.inputs))
        order[ready] = waiting.pop(ready)
    places = {name: index for index, name in enumerate(order)}
    return Graph(spec.name, [_operator(each, order, places, spec.element_bytes, spec.dtype) for each in order.values()])


def _operator(
    spec: OperatorSpec, known: dict[str, OperatorSpec], places: dict[str, int], element_bytes: float, dtype: str
) -> Operator:
    dims = tuple(Dim(dim.name, dim.size, dim.kind, dim.closed_by) for dim in spec.dims)
    own = {dim.name: index for index, dim in enumerate(dims)}
    edges, reads = [], []
    for read in spec.inputs:
        output = known[read.operator].output
        needs = tuple(own[read.needs[name]] if name in read.needs else None for name in output)
        edges.append(Edge(places[read.operator], needs))
        reads.append(tuple(zip(needs, output.values(), strict=True)))
    work = Plain(
        spec.kernel,
        dtype,
        spec.flops,
        spec.weight_bytes,
        tuple((index, dim.size) for index, dim in enumerate(dims) if dim.of_output),
        tuple(reads),
        tuple(index for index, dim in enumerate(dims) if dim.kind == "parameter"),
        element_bytes,
    )
    return Operator(spec.name, dims, tuple(edges), work, element_bytes)
