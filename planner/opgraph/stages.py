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
from math import inf, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, NoPlanError

Array = NDArray[np.float64]
Form = Literal["inference", "training"]
FORMS: tuple[Form, ...] = ("inference", "training")
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


class Stage(NamedTuple):
    """Units `first` ... `last` (included) on a submesh of a kind of chips."""

    first: int
    last: int
    kind: int
    shape: int
    """Index of the submesh among those of its kind."""
    seconds: float


class Pipeline(NamedTuple):
    """Stages in their order, and what they take by the form that was asked for."""

    stages: tuple[Stage, ...]
    seconds: float


def total(times: Sequence[float], form: Form, microbatches: int) -> float:
    """T of stage times: sum + (B - 1) max, or stages x max."""
    if form == "inference":
        return len(times) * max(times)
    return sum(times) + (microbatches - 1) * max(times)


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
        raise NoPlanError(
            "stages: nothing fits on these chips; more of them, fewer requests, or a larger --memory-limit"
        )
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
