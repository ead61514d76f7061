"""Rate matching and seating, against every possibility looked at one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.phases.disaggregated.matching import for_counts, for_rate, packs, within_chips

RATES = st.floats(0.1, 20.0)
SIZES = st.integers(1, 5)


def arrays(first: float, second: float) -> tuple[np.ndarray, np.ndarray]:
    return np.array([[first]]), np.array([[second]])


@settings(max_examples=30)
@given(rates=st.tuples(RATES, RATES), sizes=st.tuples(SIZES, SIZES), most=st.integers(2, 24))
def test_no_counts_serve_more_on_so_many_chips(rates: tuple[float, float], sizes: tuple[int, int], most: int) -> None:
    found = within_chips(arrays(*rates), arrays(*map(float, sizes)), most)
    x, y, rate = int(found.prefill[0, 0]), int(found.decode[0, 0]), float(found.rate[0, 0])
    every = [
        min(one * rates[0], other * rates[1])
        for one in range(1, most + 1)
        for other in range(1, most + 1)
        if one * sizes[0] + other * sizes[1] <= most
    ]
    assert rate == pytest.approx(max(every, default=0.0))
    if rate:
        assert x * sizes[0] + y * sizes[1] <= most
        assert min(x * rates[0], y * rates[1]) == pytest.approx(rate)
        assert min((x - 1) * rates[0], y * rates[1]) < rate
        assert min(x * rates[0], (y - 1) * rates[1]) < rate


@settings(max_examples=30)
@given(rates=st.tuples(RATES, RATES), asked=st.floats(0.1, 500.0))
def test_the_fewest_replicas_serve_a_rate(rates: tuple[float, float], asked: float) -> None:
    found = for_rate(arrays(*rates), asked)
    for count, each in zip((int(found.prefill[0, 0]), int(found.decode[0, 0])), rates, strict=True):
        assert count * each >= asked * (1 - 1e-6)
        assert (count - 1) * each < asked
    assert for_rate(arrays(0.0, rates[1]), asked).rate == 0


def test_pools_of_a_given_size_use_no_more_replicas_than_they_need() -> None:
    found = for_counts(arrays(2.0, 10.0), (np.array([[3]]), np.array([[4]])))
    assert (found.prefill[0, 0], found.decode[0, 0], found.rate[0, 0]) == (3, 1, 6.0)


def seatings(groups: tuple[int, ...], free: tuple[int, ...]) -> Iterator[bool]:
    if not groups:
        yield True
        return
    for place, left in enumerate(free):
        if left >= groups[0]:
            rest = tuple(sorted((*free[:place], left - groups[0], *free[place + 1 :])))
            yield seatable(groups[1:], rest)


@cache
def seatable(groups: tuple[int, ...], free: tuple[int, ...]) -> bool:
    """Whether groups fit nodes, by trying all."""
    return any(seatings(groups, free))


@settings(max_examples=30)
@given(first=st.integers(1, 8), second=st.integers(1, 8), counts=st.tuples(SIZES, SIZES), chips=st.integers(1, 24))
def test_what_is_seated_fits(first: int, second: int, counts: tuple[int, int], chips: int) -> None:
    """First fit never seats what cannot be; and misses nothing where sizes divide the node."""
    groups = tuple(sorted([first] * counts[0] + [second] * counts[1], reverse=True))
    free = tuple(sorted([8] * (chips // 8) + ([chips % 8] if chips % 8 else [])))
    possible = seatable(groups, free)
    seated = packs([(first, counts[0]), (second, counts[1])], chips, 8)
    assert not (seated and not possible)
    if {first, second} <= {1, 2, 4, 8}:
        assert seated == possible


def test_groups_beyond_a_node_take_whole_ones() -> None:
    assert packs([(16, 1), (8, 1)], 24, 8)
    assert not packs([(16, 2), (8, 1)], 32, 8)
    assert packs([(12, 1), (4, 1)], 16, 8)
    assert packs([(5, 3)], 15, None)
