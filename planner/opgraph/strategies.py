"""SOAP strategies: for each operator how its dimensions are split, and on which device each task runs.

The configurations of an operator are all products of degrees; its tasks stand on neighbours (`blocks`), or anywhere.
Data, tensor, pipeline and expert-designed parallelism are named strategies of this space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from planner.errors import InputError
from planner.opgraph.graph import Degrees, Edge, Graph, Operator
from planner.opgraph.machine import Machine


class Config(NamedTuple):
    """How one operator is split: a part for every combination of its dimensions' parts, the last dimension fastest."""

    degrees: Degrees
    devices: tuple[int, ...]
    """The device of each task."""

    @property
    def text(self) -> str:
        """`2x1x4 on 0-7`."""
        return f"{'x'.join(map(str, self.degrees))} on {shown(self.devices)}"


Strategy = tuple[Config, ...]
"""A configuration for each operator of a graph."""


def shown(devices: Sequence[int]) -> str:
    """Devices, runs of neighbours joined: `0-3,6`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


@lru_cache(maxsize=4096)
def coordinates(degrees: Degrees) -> tuple[tuple[int, ...], ...]:
    """The part of each dimension that each task has, in the order of tasks."""
    return tuple(product(*(range(ways) for ways in degrees)))


def splits(operator: Operator, most: int) -> list[Degrees]:
    """All ways to split an operator into at most so many tasks."""
    found = product(*(dim.degrees(most) for dim in operator.dims))
    return [degrees for degrees in found if prod(degrees) <= most]


def blocks(operator: Operator, machine: Machine) -> list[Config]:
    """The configurations whose tasks stand on neighbours and whose number divides that of the devices.

    Of n tasks the first may stand on every n-th device.
    The last dimension is on the nearest neighbours, so that what is split by weights talks over the fastest links.
    """
    found = []
    for degrees in splits(operator, machine.devices):
        tasks = prod(degrees)
        if machine.devices % tasks or not has_collective(operator, degrees, machine):
            continue
        for first in range(0, machine.devices - tasks + 1, tasks):
            found.append(Config(degrees, tuple(range(first, first + tasks))))
    return found


def has_collective(operator: Operator, degrees: Degrees, machine: Machine) -> bool:
    """Whether the groups that close what is split so can run their collective: on a torus they must form boxes."""
    ways = prod(degrees[index] for index in operator.closed)
    torus = machine.placement.torus_groups
    return ways == 1 or not torus or ways in torus


def anywhere(operator: Operator, machine: Machine, rng: np.random.Generator) -> Config:
    """A configuration drawn evenly from all splits, its tasks on different devices drawn evenly."""
    possible = [degrees for degrees in splits(operator, machine.devices) if has_collective(operator, degrees, machine)]
    degrees = possible[int(rng.integers(len(possible)))]
    return Config(degrees, tuple(int(device) for device in rng.permutation(machine.devices)[: prod(degrees)]))


class Piece(NamedTuple):
    """What a task of a reader needs of a task of the operator that it reads."""

    holder: int
    """Index of the task that has it."""
    reader: int
    size: float
    """Bytes; 0 where both are on one device."""


def pieces(source: Operator, reader: Operator, edge: Edge, have: Config, want: Config, machine: Machine) -> list[Piece]:
    """The intersections of what the tasks of one operator have with what those of another need.

    Where a collective has left copies, a task takes the one on its own device, else one of the nearest ones,
    readers in turn.
    """
    output, closed = source.output, set(source.closed)
    copies: dict[tuple[int, ...], list[int]] = {}
    for task, part in enumerate(coordinates(have.degrees)):
        copies.setdefault(tuple(part[dim] for dim in output if dim not in closed), []).append(task)
    open_dims = [(place, dim) for place, dim in enumerate(output) if dim not in closed]
    whole = prod(source.dims[dim].size for dim in output) * source.element_bytes * edge.share
    found = []
    for task, part in enumerate(coordinates(want.degrees)):
        for own, holders in copies.items():
            share = 1.0
            for (place, dim), mine in zip(open_dims, own, strict=True):
                selects = edge.needs[place]
                index, ways = (0, 1) if selects is None else (part[selects], want.degrees[selects])
                share *= _overlap(mine, have.degrees[dim], index, ways)
                if not share:
                    break
            if not share:
                continue
            device = want.devices[task]
            local = [holder for holder in holders if have.devices[holder] == device]
            if local:
                found.append(Piece(local[0], task, 0.0))
                continue
            levels = [machine.level(have.devices[holder], device) for holder in holders]
            near = [holder for holder, level in zip(holders, levels, strict=True) if level == min(levels)]
            found.append(Piece(near[task % len(near)], task, whole * share))
    return found


def _overlap(first: int, ways: int, second: int, others: int) -> float:
    """The share of a dimension that part `first` of `ways` and part `second` of `others` have in common."""
    low, high = max(first * others, second * ways), min((first + 1) * others, (second + 1) * ways)
    return max(0, high - low) / (ways * others)


def held_bytes(operator: Operator, config: Config) -> dict[int, float]:
    """Bytes of weights and state of an operator on each of its devices; tasks that share weights hold them once."""
    weights, state = operator.work.weight_bytes(config.degrees), operator.work.state_bytes(config.degrees)
    parameters = operator.parameters
    seen: set[tuple[int, ...]] = set()
    held: dict[int, float] = {}
    for device, part in zip(config.devices, coordinates(config.degrees), strict=True):
        key = (device, *(part[index] for index in parameters))
        held[device] = held.get(device, 0.0) + state + (0.0 if key in seen else weights)
        seen.add(key)
    return held


def _widest(operator: Operator, index: int | None, most: int) -> int:
    return 1 if index is None else max(operator.dims[index].degrees(most))


def _with(operator: Operator, ways: dict[int | None, int], devices: Sequence[int]) -> Config:
    degrees = tuple(ways.get(index, 1) for index in range(len(operator.dims)))
    return Config(degrees, tuple(devices[: prod(degrees)]))


def data_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Every operator split over samples, over as many devices as that goes."""
    return template(graph, machine, 1, 1, machine.devices)


def tensor_parallel(graph: Graph, machine: Machine) -> Strategy:
    """Every operator split by its parameters."""
    return template(graph, machine, machine.devices, 1, 1)


def pipeline(graph: Graph, machine: Machine, stages: int) -> Strategy:
    """Whole operators, as many as are alike in number on each of so many devices, in their order."""
    return template(graph, machine, 1, stages, 1)


def template(graph: Graph, machine: Machine, tp: int, pp: int, dp: int, ep: int = 1) -> Strategy:
    """The strategy of TP x PP x DP x EP: stages of consecutive operators, samples over replicas, parameters over ranks.

    Stage s of replica r stands on devices (r pp + s) tp and on, as `plan` places it. An operator that does not go
    over so many ranks or replicas goes over the most it can that divide them. Of an operator with experts, its second
    Parameter dimension, ep of the tp ranks have different ones.

    Raises:
        InputError: more devices than there are.
    """
    if tp * pp * dp > machine.devices:
        raise InputError(f"TP{tp}xPP{pp}xDP{dp} takes {tp * pp * dp} devices, there are {machine.devices}")
    stage_of = _stages(graph, pp)
    found = []
    for operator, stage in zip(graph.operators, stage_of, strict=True):
        sample, parameter = operator.first("sample"), operator.first("parameter")
        replicas, ranks = _dividing(operator, sample, dp), _dividing(operator, parameter, tp)
        ways: dict[int | None, int] = {sample: replicas, parameter: ranks}
        if ep > 1 and len(operator.parameters) > 1:
            experts = operator.parameters[1]
            apart = _dividing(operator, experts, ep)
            ranks = _dividing(operator, parameter, tp // apart)
            ways |= {parameter: ranks, experts: apart}
            ranks *= apart
        devices = [
            (replica * (dp // replicas) * pp + stage) * tp + rank * (tp // ranks)
            for replica in range(replicas)
            for rank in range(ranks)
        ]
        if sample is not None and parameter is not None and sample > parameter:  # the last dimension is fastest
            devices = [devices[replica * ranks + rank] for rank in range(ranks) for replica in range(replicas)]
        found.append(_with(operator, ways, devices))
    return tuple(found)


def _dividing(operator: Operator, index: int | None, wanted: int) -> int:
    return 1 if index is None else max(ways for ways in operator.dims[index].degrees(wanted) if wanted % ways == 0)


def _stages(graph: Graph, pp: int) -> list[int]:
    """The stage of each operator: layers as `costs.weights.stage_sizes` has them, where names begin with a layer."""
    from planner.costs.weights import stage_sizes  # noqa: PLC0415

    layers = [operator.name.split(" ")[0] for operator in graph.operators]
    numbers = sorted({int(layer) for layer in layers if layer.isdigit()})
    if not numbers:
        sizes = stage_sizes(len(layers), pp)
        return [stage for stage, size in enumerate(sizes) for _ in range(size)]
    if pp > len(numbers):
        raise InputError(f"{pp} stages: {graph.name} has {len(numbers)} layers")
    by_layer = [stage for stage, size in enumerate(stage_sizes(len(numbers), pp)) for _ in range(size)]
    places = {number: by_layer[index] for index, number in enumerate(numbers)}
    first_layer = next(index for index, layer in enumerate(layers) if layer.isdigit())
    return [
        places[int(layer)] if layer.isdigit() else (0 if index < first_layer else pp - 1)
        for index, layer in enumerate(layers)
    ]


def expert_designed(graph: Graph, machine: Machine) -> Strategy:
    """What experts did by hand ("one weird trick", Krizhevsky 2014): operators with more bytes of weights than of
    output are split by their parameters, the others over samples."""
    whole, data = tensor_parallel(graph, machine), data_parallel(graph, machine)
    chosen = []
    for operator, by_weights, by_samples in zip(graph.operators, whole, data, strict=True):
        ones = (1,) * len(operator.dims)
        output = prod(operator.dims[index].size for index in operator.output) * operator.element_bytes
        chosen.append(by_weights if operator.work.weight_bytes(ones) > output else by_samples)
    return tuple(chosen)


def templates(graph: Graph, machine: Machine) -> Iterator[tuple[str, Strategy]]:
    """Every TP x PP x DP that fits the devices, with its label, experts divided or whole on ranks of their own; those
    that come out alike once."""
    seen: set[Strategy] = set()
    for tp in range(1, machine.devices + 1):
        for pp in range(1, machine.devices // tp + 1):
            for dp in range(1, machine.devices // (tp * pp) + 1):
                if not _goes(graph, tp, dp):
                    continue
                for ep in (1, tp) if tp > 1 else (1,):
                    try:
                        strategy = template(graph, machine, tp, pp, dp, ep)
                    except InputError:
                        continue
                    if strategy not in seen:
                        seen.add(strategy)
                        degrees = (("TP", tp), ("PP", pp), ("DP", dp), ("EP", ep))
                        yield "x".join(f"{name}{ways}" for name, ways in degrees if ways > 1) or "TP1", strategy


def _goes(graph: Graph, tp: int, dp: int) -> bool:
    """Whether some operator goes over exactly so many ranks, and some over so many replicas."""
    ranks = any(_dividing(operator, operator.first("parameter"), tp) == tp for operator in graph.operators)
    return ranks and any(_dividing(operator, operator.first("sample"), dp) == dp for operator in graph.operators)
