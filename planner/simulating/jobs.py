"""A request on its way through a replica, and those that decode in step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_EXACT = 500_000
_BINS = 25_000  # from 1 us to a day


class Job:
    """A request on its way through a replica; times in seconds, not yet known: NaN.

    Args:
        key: whatever the caller knows it by.
        arrival: when it comes.
        isl: tokens of its prompt.
        osl: tokens of its answer, the first of which ends the prompt.
        cached: prompt tokens whose KV is there already: a cached prefix, or all of a prompt that was computed
            elsewhere, whose first token then has been emitted too (`emitted`).
        emitted: tokens of the answer that it has already.
    """

    __slots__ = (
        "arrival", "cached", "done", "emitted", "entered", "epoch", "finish", "first", "held", "isl", "joined", "key",
        "osl", "preempted", "slot", "start", "target",
    )  # fmt: skip

    def __init__(
        self, key: int, arrival: float, isl: float, osl: float, cached: float = 0.0, emitted: float = 0.0
    ) -> None:
        self.key, self.arrival, self.isl, self.osl, self.cached = key, arrival, isl, osl, cached
        self.start = self.first = self.finish = float("nan")
        self.emitted = emitted
        self.target, self.done = isl, cached  # tokens to have KV of before it decodes, and those that have
        self.held = 0.0  # blocks when it was admitted
        self.entered = 0.0  # when the engine sees it
        self.joined, self.epoch, self.preempted = 0, 0, 0
        self.slot: Slot | None = None


class Slot:
    """Requests that decode in step: all of a replica's, or a microbatch of a pipeline."""

    __slots__ = ("context", "count", "ends", "fresh", "last", "pages", "ready", "size", "weight")

    def __init__(self, block: int) -> None:
        self.ready = 0.0  # when its next iteration may start
        self.last = 0.0  # when its last one ended
        self.count = 0  # iterations so far
        self.size = 0  # requests
        self.context = 0.0  # tokens of all of them that have KV
        self.ends: list[tuple[int, int, int, Job]] = []  # (number of the iteration that ends it, admitted, epoch, job)
        self.pages = [0.0] * block  # blocks taken in iterations whose number leaves this rest
        self.weight = 0.0  # their sum
        self.fresh: list[float] = []  # when those that have not decoded yet got their first token


class Gaps(NamedTuple):
    """Times between two tokens of a request, over all requests and tokens."""

    seconds: Array
    weight: Array
    """How many gaps had this length."""

    def share_within(self, limit: float) -> float:
        """Share of all gaps that are no longer than a limit; 1 where there is none."""
        total = float(self.weight.sum())
        return float(self.weight[self.seconds <= limit].sum()) / total if total > 0 else 1.0

    def quantile(self, share: float) -> float:
        """The gap that this share of all are no longer than; NaN where there is none."""
        if not len(self.seconds):
            return float("nan")
        order = np.argsort(self.seconds)
        reached = np.cumsum(self.weight[order])
        return float(self.seconds[order][np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))])


class GapLog:
    """Gaps as they come. Beyond _EXACT of them they are kept as means of bins that are a thousandth wide."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._weight: list[float] = []
        self._runs: list[tuple[Array, int]] = []
        self._size = 0
        self._binned = np.zeros((2, 0))  # of each bin: how many gaps, and their seconds in all

    def note(self, seconds: float, weight: float) -> None:
        """So many gaps of this length."""
        self._seconds.append(seconds)
        self._weight.append(weight)

    def note_run(self, seconds: Array, weight: int) -> None:
        """So many gaps of each of these lengths."""
        self._runs.append((seconds, weight))
        self._size += len(seconds)
        if self._size + len(self._seconds) > _EXACT:
            self._fold()

    def gaps(self) -> Gaps:
        """All of them."""
        recent = self._recent()
        if not self._binned.size:
            return recent
        count, spent = self._binned[:, self._binned[0] > 0]
        return Gaps(np.concatenate([spent / count, recent.seconds]), np.concatenate([count, recent.weight]))

    def _recent(self) -> Gaps:
        seconds, weights = [np.array(self._seconds)], [np.array(self._weight)]
        for run, size in self._runs:
            seconds.append(run)
            weights.append(np.full(len(run), float(size)))
        return Gaps(np.concatenate(seconds), np.concatenate(weights))

    def _fold(self) -> None:
        recent = self._recent()
        if not self._binned.size:
            self._binned = np.zeros((2, _BINS))
        place = np.clip(1000 * np.log(np.maximum(recent.seconds, 1e-9) / 1e-6), 0, _BINS - 1).astype(int)
        self._binned[0] += np.bincount(place, recent.weight, _BINS)
        self._binned[1] += np.bincount(place, recent.weight * recent.seconds, _BINS)
        self._seconds, self._weight, self._runs, self._size = [], [], [], 0
