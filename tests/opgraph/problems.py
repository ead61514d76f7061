"""Small graphs and machines that tests of the search share."""

from __future__ import annotations

from functools import cache

import numpy as np

from planner.opgraph.graph import Dim, Edge, Graph, Operator, Plain, from_file
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Problem
from planner.specs.catalog import load_graph, load_machine


@cache
def machine(gpus: int, hardware: str = "h100-pairs") -> Machine:
    return Machine(*load_machine(hardware), gpus)


def shipped(name: str, gpus: int, memory: float = float("inf")) -> Problem:
    return Problem(from_file(load_graph(name)), machine(gpus), memory)


def plain(
    flops: float, weights: float, dims: tuple[Dim, ...], reads: tuple[tuple[tuple[int | None, int], ...], ...]
) -> Plain:
    output = tuple((index, dim.size) for index, dim in enumerate(dims) if dim.of_output)
    parameters = tuple(index for index, dim in enumerate(dims) if dim.kind == "parameter")
    return Plain("gemm", "fp32", flops, weights, output, reads, parameters, 4.0)


def random_graph(rng: np.random.Generator, operators: int) -> Graph:
    """Operators of random work that each read one or two earlier ones, some closed by an all-reduce."""
    made: list[Operator] = []
    for index in range(operators):
        closing = (None, "all_reduce", "all_gather", "nothing")[int(rng.integers(4))]
        dims = (
            Dim("rows", 64, "sample"),
            Dim("columns", 8, "attribute" if rng.random() < 0.5 else "whole"),
            Dim("width", 48, "parameter", closing),  # type: ignore[arg-type]
        )
        if closing in ("all_reduce", "nothing"):
            dims = (*dims, Dim("hidden", 48))
        edges = []
        for source in {int(rng.integers(index)) for _ in range(int(rng.integers(1, 3)))} if index else ():
            output = made[source].output
            needs = tuple((0, None if rng.random() < 0.5 else 1, None)[place] for place in range(len(output)))
            edges.append(Edge(source, needs))
        reads = tuple(
            tuple(
                (own, made[edge.source].dims[dim].size)
                for own, dim in zip(edge.needs, made[edge.source].output, strict=True)
            )
            for edge in edges
        )
        work = plain(float(rng.integers(1, 9)) * 1e9, float(rng.integers(1, 9)) * 1e6, dims, reads)
        made.append(Operator(f"op {index}", dims, tuple(edges), work, 4.0))
    return Graph("random", made)
