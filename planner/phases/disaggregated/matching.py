"""Rate matching: how many prefill and decode replicas, within the chips there are, so that neither waits for the other.

x prefill replicas of a chips that serve r requests a second each, y decode replicas of b chips that serve s: together
min(x r, y s). Replicas stand in nodes, and none that fits one straddles two (`packs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int_]
ALMOST = 1e-9
"""Relative difference of rates that is none."""


class Match(NamedTuple):
    """Counts of replicas for every pair of plans; arrays [prefill plans, decode plans]."""

    prefill: Index
    """Replicas; 0 where the pair serves nothing."""
    decode: Index
    rate: Array
    """Requests per second of all of them."""


def within_chips(rates: tuple[Array, Array], chips: tuple[Array, Array], most: int) -> Match:
    """The counts with the highest rate on at most so many chips; of equals the fewest replicas.

    Args:
        rates: requests per second of one replica, prefill and decode, [prefill plans, decode plans] each.
        chips: of one replica, [prefill plans, 1] and [1, decode plans].
        most: chips there are.
    """
    (prompts, answers), (own, other) = rates, chips
    shape = prompts.shape
    best = Match(np.zeros(shape, dtype=int), np.zeros(shape, dtype=int), np.zeros(shape))
    deepest = int((most - np.min(other, initial=most)) // np.min(own, initial=most)) if prompts.size else 0
    for count in range(1, deepest + 1):
        beside = np.maximum(0.0, np.floor((most - count * own) / other))
        rate = np.minimum(count * prompts, beside * answers)
        better = rate > best.rate * (1 + ALMOST)
        best = Match(
            np.where(better, count, best.prefill),
            np.where(better, beside.astype(int), best.decode),
            np.where(better, rate, best.rate),
        )
    return _least(best, prompts, answers)


def for_counts(rates: tuple[Array, Array], counts: tuple[Index, Index]) -> Match:
    """Pools of a given size: [prefill plans, 1] and [1, decode plans] replicas that they hold, no more than needed."""
    (prompts, answers), (own, other) = rates, counts
    rate = np.minimum(own * prompts, other * answers)
    shape = prompts.shape
    return _least(Match(np.broadcast_to(own, shape), np.broadcast_to(other, shape), rate), prompts, answers)


def for_rate(rates: tuple[Array, Array], rate: float) -> Match:
    """The fewest replicas that serve a rate (DistServe's algorithm 1: n = ceil(R / goodput)); 0 where none do."""
    counts = [_needed(rate, each) for each in rates]
    served = np.where((counts[0] > 0) & (counts[1] > 0), rate, 0.0)
    return Match(np.where(served > 0, counts[0], 0), np.where(served > 0, counts[1], 0), served)


def _needed(rate: float | Array, each: Array) -> Index:
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.ceil(np.where(each > 0, rate / each, 0.0) * (1 - ALMOST))
    return np.asarray(count).astype(int)


def _least(match: Match, prompts: Array, answers: Array) -> Match:
    """No more replicas than the rate needs."""
    return Match(_needed(match.rate, prompts), _needed(match.rate, answers), match.rate)


def packs(groups: Sequence[tuple[int, int]], chips: int, domain: int | None) -> bool:
    """Whether tensor-parallel groups find room in nodes without straddling two: the largest first, where it fits first.

    A group that no node holds takes whole nodes and a part of one more.

    Args:
        groups: (chips of a group, how many of them).
        chips: in all.
        domain: chips of a node; none = all are one.
    """
    if domain is None:
        return sum(size * count for size, count in groups) <= chips
    free = [domain] * (chips // domain) + ([chips % domain] if chips % domain else [])
    for size, count in sorted(groups, reverse=True):
        for _ in range(count):
            if not _seat(size, free, domain):
                return False
    return True


def _seat(size: int, free: list[int], domain: int) -> bool:
    whole, rest = divmod(size, domain) if size > domain else (0, size)
    empty = [place for place, left in enumerate(free) if left == domain]
    if len(empty) < whole:
        return False
    for place in empty[:whole]:
        free[place] = 0
    if not rest:
        return True
    for place, left in enumerate(free):
        if left >= rest:
            free[place] -= rest
            return True
    return False
