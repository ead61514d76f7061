"""What taking the planner's choice costs: plans and loads that were all measured, chosen by the predictions.

Within a group of runs that differ only in plan and load, the best under a limit on TPOT is the one with most tokens per
second. Choosing by predicted times, one loses throughput, or misses the limit, or finds that nothing keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.evidence.serving import ServingPoint

Array = NDArray[np.float64]
LIMITS_MS = (10.0, 20.0, 30.0, 50.0)
"""Limits on TPOT under which a choice is made."""
APART = 0.10
"""Two measurements nearer than this have no order."""


class Regret(NamedTuple):
    """What choosing by predictions costs; shares."""

    choices: int
    """Groups times limits that some run keeps."""
    lost: float
    """Mean throughput lost where something is chosen that keeps the limit."""
    missed: float
    """Choices that break the limit."""
    none: int
    """Choices where the predictions say that nothing keeps the limit."""

    @property
    def lost_with_none(self) -> float:
        """Mean throughput lost where a choice without anything to choose loses all."""
        kept = self.choices * (1 - self.missed)
        return (self.lost * (kept - self.none) + self.none) / kept


class Order(NamedTuple):
    """Pairs of runs that differ only in plan, more than APART apart in TPOT."""

    pairs: int
    right: int

    @property
    def share(self) -> float:
        """Pairs in the right order."""
        return self.right / self.pairs if self.pairs else float("nan")


def grouped(runs: Iterable[ServingPoint]) -> dict[tuple[str, ...], list[int]]:
    """Indices of the runs of each group that has more than one plan."""
    groups: dict[tuple[str, ...], list[int]] = {}
    runs = list(runs)
    for place, run in enumerate(runs):
        if run.tpot_ms is not None:
            groups.setdefault(run.group, []).append(place)
    return {key: own for key, own in groups.items() if len({_plan(runs[place]) for place in own}) > 1}


def regret(runs: Sequence[ServingPoint], tpot_ms: Array, limits: Sequence[float] = LIMITS_MS) -> Regret:
    """The cost of choosing by these TPOTs.

    Args:
        runs: any; only groups of several plans count.
        tpot_ms: [runs] predicted; NaN = nothing predicted, which is never chosen.
        limits: on TPOT, in ms.
    """
    measured = np.array([np.nan if run.tpot_ms is None else run.tpot_ms for run in runs])
    load = np.array([run.concurrency for run in runs], dtype=float)
    lost, missed, none = [], 0, 0
    for own in grouped(runs).values():
        real, said = measured[own], tpot_ms[own]
        for limit in limits:
            if not (real <= limit).any():
                continue
            best = np.max((load[own] / real)[real <= limit])
            keeps = np.flatnonzero(said <= limit)
            if not len(keeps):
                none += 1
                continue
            choice = keeps[np.argmax((load[own] / said)[keeps])]
            if real[choice] > limit:
                missed += 1
            else:
                lost.append(1 - load[own][choice] / real[choice] / best)
    choices = len(lost) + missed + none
    return Regret(choices, float(np.mean(lost)) if lost else float("nan"), missed / choices, none)


def order(runs: Sequence[ServingPoint], tpot_ms: Array) -> Order:
    """Pairs of plans at the same load whose order in TPOT the predictions have right."""
    pairs = right = 0
    for own in grouped(runs).values():
        for first, second in combinations(own, 2):
            one, other = runs[first], runs[second]
            if one.concurrency != other.concurrency or _plan(one) == _plan(other):
                continue
            assert one.tpot_ms is not None
            assert other.tpot_ms is not None
            if abs(np.log(one.tpot_ms / other.tpot_ms)) <= np.log1p(APART):
                continue
            pairs += 1
            right += bool((one.tpot_ms < other.tpot_ms) == (tpot_ms[first] < tpot_ms[second]))
    return Order(pairs, right)


def _plan(run: ServingPoint) -> tuple[int, int, int]:
    return run.tp, run.pp, run.dp
