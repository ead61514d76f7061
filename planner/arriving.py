"""Requests that come at a rate: the load at which a plan serves as many as come, and how long they wait before it.

In steady state Little's law (Little 1961) ties what is in flight to the rate: N = rate x R(N), R = TTFT + (osl - 1)
TPOT. So the load of a plan is not chosen but found. Requests come to each replica as a Poisson process with an even
share of the rate, and their prompts pass one server that each takes E from (`serving.Estimates.prompt`); a prompt
waits for those before it, as Pollaczek and Khinchine have it for an M/G/1 queue,

    W = rho E (1 + c^2) / (2 (1 - rho)),   rho = rate E,

with c the coefficient of variation of E: 0 where all prompts are equal (M/D/1). Not in it: waiting for KV room while
more than N requests are in flight, and any percentile: `planner.simulating` has both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.rows import Rows
from planner.costs.serving import Estimates, Fit, Setting, price
from planner.request import TIMES, Limits
from planner.results import Results
from planner.units import MS

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

IDLE = 2.0**-30
"""Requests in flight per replica that stand for next to none: nobody waits."""
_GRID = (1.0, 1.25, 1.5, 1.75)  # loads of an octave that are looked at first
_PARTS, _ROUNDS = 8, 6  # the highest load within limits is found to 9^-6 of a step of that grid
_CLOSE, _STEPS = 1e-12, 80  # how near to the rate that is asked for a load must come, and the steps it may take


class Steady(NamedTuple):
    """Plans in steady state at a load each; arrays over rows, times in seconds."""

    load: Array
    """Requests in flight per replica on average, waiting ones left out."""
    rate: Array
    """Requests per second and replica."""
    busy: Array
    """rho: share of the time in which a replica works on prompts."""
    queue: Array
    """Mean wait before a prompt's first iteration; infinite where rho is 1 or more."""
    priced: Estimates

    def keeps(self, limits: Limits) -> Mask:
        """Which rows keep the limits on time: with the wait in TTFT and in latency."""
        kept = np.ones(len(self.load), dtype=bool)
        waits = {"ttft": self.queue, "tpot": 0.0, "latency": self.queue}
        for name in TIMES:
            limit = getattr(limits, name)
            if limit is not None:  # a time that answers do not have (NaN) breaks none
                kept &= ~(getattr(self.priced, name) + waits[name] > limit * (1 + 1e-12))
        return kept


def queue_wait(rate: Array, service: Array, variation: Array | float = 0.0) -> Array:
    """Mean wait in an M/G/1 queue (Pollaczek 1930, Khinchine 1932); seconds, infinite without a steady state.

    Args:
        rate: arrivals per second, a Poisson process.
        service: mean time of one service in seconds.
        variation: squared coefficient of variation of it; 0 = M/D/1.
    """
    busy = rate * service
    left = np.where(busy < 1, 1 - busy, 1.0)
    return np.where(busy < 1, busy * service * (1 + variation) / (2 * left), np.inf)


def steady(setting: Setting, rows: Rows, fitted: Fit, load: Array) -> Steady:
    """Rows at a mean load per replica, which need not be whole; below one request they run one at a time.

    Args:
        setting: what all rows share.
        rows: their concurrency is not looked at.
        fitted: their memory; its batch is not looked at.
        load: requests in flight per replica, above 0.
    """
    at = fitted._replace(batch=np.maximum(1.0, load), running=load * rows.dp)
    priced = price(setting._replace(mean_load=True), rows, at)
    rate = priced.requests_per_s / rows.dp
    return Steady(load, rate, rate * priced.prompt, queue_wait(rate, priced.prompt, priced.prompt_variation), priced)


class Reach(NamedTuple):
    """How far each plan goes: its highest rate within limits and memory, and a grid of loads on the way there."""

    load: Array
    """Requests in flight per replica at that rate; 0 where no load keeps the limits."""
    rate: Array
    """Requests per second and replica; 0 likewise."""
    bounded: Mask
    """Whether a limit on time ends it; else it is memory, the engine's sequences, or the plan itself."""
    grid: Array
    """[plans, points] loads, ascending; NaN behind a plan's last."""
    rates: Array
    """[plans, points]."""

    def take(self, index: NDArray[np.intp]) -> Reach:
        """Some of the plans."""
        return Reach(self.load[index], self.rate[index], self.bounded[index], self.grid[index], self.rates[index])


def reach(setting: Setting, rows: Rows, fitted: Fit, most: Array, limits: Limits) -> Reach:
    """The highest rate that each plan sustains.

    Times are taken to grow with the load, so that the loads that keep the limits are those below one of them.

    Args:
        setting: what all plans share.
        rows: one of each plan.
        fitted: its memory.
        most: [plans] requests that a replica holds at most, 1 or more.
        limits: on time.
    """
    machine = (setting.placement.hardware, setting.placement.gpus, setting.placement.slice)
    numbers = [np.asarray(column).tobytes() for column in (*rows, *fitted, most)]
    key = (limits, numbers, machine, setting._replace(placement=None))  # type: ignore[arg-type]
    for known, found in _REACHED:
        if known == key:
            return found
    found = _reach(setting, rows, fitted, most, limits)
    _REACHED.append((key, found))
    return found


_REACHED: deque[tuple[object, Reach]] = deque(maxlen=32)
"""What was found last, by all that it depends on: a sweep over rates asks for it again at each of them."""


def _reach(setting: Setting, rows: Rows, fitted: Fit, most: Array, limits: Limits) -> Reach:
    octaves = int(np.ceil(np.log2(np.max(most)))) + 1
    steps = np.array([IDLE, *(part * 2.0**power for power in range(octaves) for part in _GRID)])
    grid = np.where(steps < most[:, None], steps, np.nan)
    grid = np.concatenate([grid, np.full((len(most), 1), np.nan)], axis=1)
    ends = np.sum(np.isfinite(grid), axis=1)
    grid[np.arange(len(most)), ends] = most
    hopeless = ~steady(setting, rows, fitted, np.full(len(most), IDLE)).keeps(limits)
    grid[hopeless, 1:], ends[hopeless] = np.nan, 0
    which, point = np.nonzero(np.isfinite(grid))
    found = steady(setting, _at(rows, which), _fit_at(fitted, which), grid[which, point])
    rates, kept = np.full(grid.shape, np.nan), np.zeros(grid.shape, dtype=bool)
    rates[which, point], kept[which, point] = found.rate, found.keeps(limits)
    kept = np.logical_and.accumulate(kept, axis=1)
    best = np.argmax(np.where(kept, rates, -1.0), axis=1)
    every = np.arange(len(most))
    load, rate = grid[every, best], rates[every, best]
    bounded = kept[:, 0] & (best < ends) & ~kept[every, np.minimum(best + 1, ends)]
    index = np.flatnonzero(bounded)
    if len(index):
        own, held = _at(rows, index), _fit_at(fitted, index)

        def keeps(which: NDArray[np.intp], loads: Array) -> Mask:
            return steady(setting, _at(own, which), _fit_at(held, which), loads).keeps(limits)

        load[index] = _last(keeps, load[index], grid[index, best[index] + 1])
        rate[index] = steady(setting, own, held, load[index]).rate
    none = ~kept[:, 0]
    load[none], rate[none] = 0.0, 0.0
    return Reach(load, rate, bounded, grid, rates)


def _last(keeps: Callable[[NDArray[np.intp], Array], Mask], low: Array, high: Array) -> Array:
    """The highest load between `low`, which keeps, and `high`, which does not, by cutting the range into parts."""
    cuts = np.arange(1, _PARTS + 1) / (_PARTS + 1)
    which = np.repeat(np.arange(len(low)), _PARTS)
    for _ in range(_ROUNDS):
        inside = low[:, None] + (high - low)[:, None] * cuts
        kept = keeps(which, inside.ravel()).reshape(inside.shape)
        passed = np.sum(np.logical_and.accumulate(kept, axis=1), axis=1)
        edges = np.concatenate([low[:, None], inside, high[:, None]], axis=1)
        every = np.arange(len(low))
        low, high = edges[every, passed], edges[every, passed + 1]
    return low


def load_at(setting: Setting, rows: Rows, fitted: Fit, found: Reach, rate: Array) -> Array:
    """The lowest load of each plan at which it serves this rate per replica, which must be within its reach.

    Regula falsi (the Illinois variant) between two loads of the grid, with a bisection at every third step.
    """
    count = len(rate)
    loads = np.concatenate([found.grid, np.full((count, 1), np.nan)], axis=1)
    rates = np.concatenate([found.rates, np.full((count, 1), np.nan)], axis=1)
    beyond = ~(loads <= found.load[:, None])
    loads[beyond], rates[beyond] = np.nan, np.nan
    last = np.sum(~beyond, axis=1)
    loads[np.arange(count), last], rates[np.arange(count), last] = found.load, np.maximum(found.rate, rate)
    first = np.argmax(rates >= rate[:, None], axis=1)
    every = np.arange(count)
    high, over = loads[every, first], rates[every, first] - rate
    low = np.where(first > 0, loads[every, np.maximum(first - 1, 0)], 0.0)
    under = np.where(first > 0, rates[every, np.maximum(first - 1, 0)], 0.0) - rate
    weights = np.ones((2, count))  # of the low and of the high end: less for one that stays twice
    rose = np.full(count, -1)
    for step in range(_STEPS):
        open_ = np.flatnonzero((over > _CLOSE * rate) & (high - low > _CLOSE * high))
        if not len(open_):
            break
        a, b = under[open_] * weights[0, open_], over[open_] * weights[1, open_]
        middle = (low[open_] + high[open_]) / 2
        if step % 3 < 2:
            middle = np.clip((low[open_] * b - high[open_] * a) / (b - a), low[open_], high[open_])
        above = steady(setting, _at(rows, open_), _fit_at(fitted, open_), middle).rate - rate[open_]
        up = above >= 0
        for end, stays in enumerate((up, ~up)):
            again = stays & (rose[open_] == 1 - end)
            weights[end, open_] = np.where(again, weights[end, open_] / 2, np.where(stays, weights[end, open_], 1.0))
        rose[open_] = up
        high[open_], over[open_] = np.where(up, middle, high[open_]), np.where(up, above, over[open_])
        low[open_], under[open_] = np.where(up, low[open_], middle), np.where(up, under[open_], above)
    return np.asarray(high)


def _at(rows: Rows, index: NDArray[np.intp]) -> Rows:
    return Rows(*(column[index] for column in rows))


def _fit_at(fitted: Fit, index: NDArray[np.intp]) -> Fit:
    return Fit(*(column[index] for column in fitted))


def mark_arrivals(results: Results, found: Steady, rate: float, highest: Array) -> Results:
    """Fills in the columns that a rate gives meaning to.

    Args:
        results: of these plans, priced at this load.
        found: the state that they are in.
        rate: requests per second of the whole deployment.
        highest: [rows] what each plan sustains at most, likewise.
    """
    flight = found.priced.running
    results.columns |= {
        "concurrency": np.maximum(1.0, np.ceil(flight * (1 - 1e-9))),
        "queue_ms": found.queue / MS,
        "arrival_rate_per_s": np.full(len(flight), rate),
        "in_flight": flight,
        "utilisation": rate / highest,
        "prefill_utilisation": found.busy,
    }
    return results
