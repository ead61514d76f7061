"""How long prompts take by how many instances, and how a set of them is best divided over the instances there are.

    T(R) = a + b sum(len) + c sum(len^2)        seconds of one pass over prompts R, a, b, c by degree of parallelism

(Wu et al. 2024, equation 7), fitted here to the cost engine's own passes by least squares of relative errors. Requests
sorted by length and instances in a row are cut into batches of neighbours each: a dynamic program,

    f[i][k] = min over j <= i, l < k of f[j][l] + T(R[j..i], d = k - l) sum over R[j..i] of 1/len

(section 5.3; the weights 1/len, which make of latencies those per token, are those of its code), where the instances
must have room for the batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_RATIO = 1.2  # of two points of a table


class Fitted(NamedTuple):
    """Seconds of a pass over prompts."""

    a: float
    b: float
    c: float
    residual: float
    """Mean absolute relative error where it was fitted."""
    worst: float

    def seconds(self, total: Array | float, squares: Array | float) -> Array | float:
        """a + b sum(len) + c sum(len^2)."""
        return self.a + self.b * total + self.c * squares


def fitted(seconds: Callable[[Array, Array], Array], longest: float) -> Fitted:
    """The constants of one degree of parallelism.

    Args:
        seconds: of passes over `count` prompts of `length` tokens each (arrays).
        longest: tokens of the longest prompt.
    """
    grid = np.meshgrid([1.0, 2.0, 4.0, 8.0, 16.0], np.geomspace(16, max(32.0, longest), 25))
    counts, lengths = grid[0].ravel(), np.round(grid[1].ravel())
    kept = counts * lengths <= max(32.0, longest)
    counts, lengths = counts[kept], lengths[kept]
    known = seconds(counts, lengths)
    design = np.stack([np.ones_like(known), counts * lengths, counts * lengths**2], axis=1) / known[:, None]
    scale = np.abs(design).max(axis=0)
    found = _not_negative(design / scale, np.ones_like(known)) / scale
    off = np.abs(design @ found - 1)
    a, b, c = (float(value) for value in found)
    return Fitted(a, b, c, float(off.mean()), float(off.max()))


def _not_negative(design: Array, target: Array) -> Array:
    """Least squares with no constant below 0: those that would be are left out, the most negative first."""
    kept = list(range(design.shape[1]))
    while True:
        found = np.zeros(design.shape[1])
        found[kept], *_ = np.linalg.lstsq(design[:, kept], target, rcond=None)
        if found.min() >= 0:
            return found
        kept.remove(int(np.argmin(found)))


class PromptTable(NamedTuple):
    """Seconds of passes over prompts, between points in equal ratios: straight lines of logarithms."""

    tokens: list[float]
    """Logarithms of the tokens of a pass."""
    keys: list[float]
    """... of the keys that a token sees on average."""
    values: list[list[float]]
    """[tokens][keys] ... of seconds."""

    @classmethod
    def of(cls, seconds: Callable[[Array, Array], Array], most: float) -> PromptTable:
        """The table of passes of up to `most` tokens; `seconds` of tokens and keys (arrays)."""
        tokens = np.geomspace(1, max(most, 2.0), 2 + int(np.log(max(most, 2.0)) / np.log(_RATIO)))
        keys = np.geomspace(1, max(most, 2.0), 2 + int(np.log(max(most, 2.0)) / np.log(_RATIO)))
        T, K = np.meshgrid(tokens, keys, indexing="ij")
        values = np.log(seconds(T.ravel(), K.ravel())).reshape(T.shape)
        return cls(np.log(tokens).tolist(), np.log(keys).tolist(), values.tolist())

    def seconds(self, tokens: float, keys: float) -> float:
        """One pass."""
        i, u = _cell(self.tokens, math.log(tokens))
        j, v = _cell(self.keys, math.log(keys))
        near, far = self.values[i], self.values[i + 1]
        low, high = near[j] + v * (near[j + 1] - near[j]), far[j] + v * (far[j + 1] - far[j])
        return math.exp(low + u * (high - low))


def _cell(points: list[float], value: float) -> tuple[int, float]:
    index = bisect_right(points, value, 1, len(points) - 1) - 1
    return index, (value - points[index]) / (points[index + 1] - points[index])


class Batch(NamedTuple):
    """Requests that share a pass."""

    requests: tuple[int, ...]
    """Their places in what was asked."""
    instances: tuple[int, ...]


class Division(NamedTuple):
    """Requests divided into batches."""

    batches: tuple[Batch, ...]
    cost: float
    """Sum over requests of the time of their batch, per token of theirs; infinite where there is no room."""


def divide(
    lengths: Sequence[float], needs: Sequence[float], room: Sequence[float], times: Sequence[Fitted]
) -> Division:
    """The best batches of neighbours.

    Args:
        lengths: tokens of the prompts.
        needs: tokens of KV that each must find room for.
        room: [instances] tokens that each has room for, in the order in which neighbours may form a group.
        times: [d - 1] seconds of a pass over d instances.

    Returns:
        Batches whose requests are neighbours by length, longest first, on instances that are neighbours.
    """
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    own = np.array([lengths[place] for place in order], dtype=float)
    sums = [np.concatenate([[0.0], np.cumsum(column)]) for column in (own, own**2, 1 / own)]
    needed = np.concatenate([[0.0], np.cumsum([needs[place] for place in order])])
    spaces = np.concatenate([[0.0], np.cumsum(np.asarray(room, dtype=float))])
    n, m = len(own), len(room)
    best = np.full((n + 1, m + 1), np.inf)
    best[0, :] = 0.0
    before = np.zeros((n + 1, m + 1, 2), dtype=int)
    degree = np.arange(m)  # d - 1
    a, b, c = (np.array([getattr(times[d], name) for d in range(m)]) for name in ("a", "b", "c"))
    for i in range(1, n + 1):
        total, squares, weights = (each[i] - each[:i] for each in sums)  # [j]
        taken = needed[i] - needed[:i]
        every = (a[:, None] + b[:, None] * total + c[:, None] * squares) * weights  # [d - 1, j]
        for k in range(1, m + 1):
            left = k - 1 - degree[:k]  # l, of d = 1, 2, ... k
            cost = best[:i, left].T + every[:k]
            cost = np.where(taken[None, :] <= (spaces[k] - spaces[left])[:, None] * (1 + 1e-12), cost, np.inf)
            place = int(np.argmin(cost))
            d, j = divmod(place, i)
            if cost[d, j] < best[i, k]:
                best[i, k], before[i, k] = cost[d, j], (j, k - 1 - d)
            if best[i, k - 1] <= best[i, k]:  # the last instance stays free
                best[i, k], before[i, k] = best[i, k - 1], (-1, k - 1)
    batches = []
    i, k = n, m
    while i > 0 and np.isfinite(best[n, m]):
        j, left_of = (int(value) for value in before[i, k])
        if j < 0:
            k = left_of
            continue
        batches.append(Batch(tuple(order[j:i]), tuple(range(left_of, k))))
        i, k = j, left_of
    return Division(tuple(reversed(batches)), float(best[n, m]))
