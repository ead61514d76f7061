"""Which rate a deployment sustains within limits on time: the goodput (Zhong et al. 2024, DistServe).

A request attains the goal where it keeps every limit, so that both TTFT and TPOT are its own; a rate is good where
enough requests do. Alternatively a percentile of each time is held against its limit. The highest good rate is
bracketed by doubling and then found by bisection. Every rate is tried with the same requests in the same order,
closer together or further apart (`traces.requests`), so that little but the rate differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.serving import Setting
from planner.plans.plan import Plan
from planner.simulating.fleets import Outcome, Routing, simulate
from planner.simulating.iterations import Clock, IterationTime
from planner.simulating.rooms import KvRoom, Rules, cached_prefix
from planner.simulating.traces import Stream, Trace

Array = NDArray[np.float64]
FEWEST, MOST = 1000, 20_000
"""Requests that are drawn where it is not said how many."""
FILLS = 4.0
"""How often a deployment must have been filled anew until percentiles stand still."""
EDGE = 0.25
"""Share of the time in which requests come that is left out at either end at most (see `judge`)."""
GROWTH = 0.05
"""A rate is not sustained where the time to the first token grows by more than this with every second: then requests
come that much faster than they are served, and a longer run would break any limit."""
PRECISION = 0.01
"""How close the highest rate is found."""
GAPS = 0.99
"""Share of the gaps between tokens that must keep their limit."""
IDLE = 1e-5
"""Requests per second at which nobody meets another."""
_BESIDE = 1.1  # first step away from a rate that is known to be near; each further one is the square of the last
_MOST = 2.0**24  # requests per second at which a search gives up
_LEAST = 4.0**5  # times less than one request in flight: where it gives up on the other side


class Goal(NamedTuple):
    """What users are promised. Seconds; none = no limit."""

    ttft: float | None = None
    tpot: float | None = None
    attainment: float = 0.9
    """Share of the requests that must keep both limits."""
    percentile: float | None = None
    """In the place of attainment: this percentile (0 to 100) of each time must keep its limit."""
    gap: float | None = None
    """On the time between two tokens: of all gaps, not request by request, 99 in 100 must keep it."""

    @property
    def limits(self) -> dict[str, float]:
        """The limits that there are, by name: ttft, tpot, gap."""
        given = {"ttft": self.ttft, "tpot": self.tpot, "gap": self.gap}
        return {name: limit for name, limit in given.items() if limit is not None}


class Deployment(NamedTuple):
    """Replicas of a plan, ready to be simulated."""

    clock: Clock
    kv: KvRoom
    rules: Rules
    replicas: int = 1
    routing: Routing = "least"
    cached: Callable[[float], float] | None = None

    @classmethod
    def of(
        cls, setting: Setting, plan: Plan, longest: float | None = None, max_context: float = 0.0,
        prefix_hit: float = 0.0, routing: Routing = "least",
    ) -> Deployment:  # fmt: skip
        """All replicas of a plan.

        Args:
            setting: what it is priced with.
            plan: the plan; its dp is how many replicas there are.
            longest: tokens of the longest request; none = the model's limit. Shorter tables are made sooner.
            max_context: tokens a request must be able to hold, where the engine reserves all of it.
            prefix_hit: share of a prompt that is cached.
            routing: which replica a request goes to.

        Raises:
            InputError: as `IterationTime`.
        """

        def cached(isl: float) -> float:
            return cached_prefix(setting.engine, isl, prefix_hit)

        return cls(
            IterationTime.of(setting, plan, longest),
            KvRoom.of(setting, plan, max_context),
            Rules.of(setting.engine, plan),
            plan.dp,
            routing,
            cached if prefix_hit else None,
        )

    def run(self, trace: Trace) -> Outcome:
        """What becomes of requests.

        Raises:
            ValueError: one that no replica can hold.
        """
        return simulate(trace, self.clock, self.kv, self.rules, self.replicas, self.routing, self.cached)


class Judged(NamedTuple):
    """How requests at one rate fared."""

    rate: float
    """Requests per second."""
    outcome: Outcome
    counted: slice
    """Which requests count."""
    attained: float
    """Share that keeps every limit."""
    kept: dict[str, float]
    """Share that keeps each limit, by name."""
    sustained: bool
    """Whether requests are served as fast as they come."""
    broken: tuple[str, ...]
    """What is not kept: ttft, tpot (those that most requests break), gap; load where only the queue grows."""

    @property
    def good(self) -> bool:
        """Whether the goal is kept."""
        return self.sustained and not self.broken

    def quantiles(self, name: str, shares: tuple[float, ...] = (0.5, 0.9, 0.99)) -> Array:
        """Quantiles of `ttft`, `tpot`, `latency` or `wait`; NaN where no request has it."""
        values = getattr(self.outcome, name)[self.counted]
        values = values[np.isfinite(values)]
        return np.quantile(values, shares) if len(values) else np.full(len(shares), np.nan)


class Found(NamedTuple):
    """The highest rate of a deployment."""

    best: Judged | None
    """At the highest good rate; none = no rate is good."""
    idle: Judged
    """Each request alone: times that no rate makes shorter."""
    beyond: Judged | None
    """At the lowest rate that was tried and is not good; none where no rate was too high."""
    tried: int
    complete: bool = True
    """False where it was stopped: the best so far."""

    @property
    def bound(self) -> tuple[str, ...]:
        """What is the first to break: ttft, tpot, gap, or load (more comes than is served); () where nothing is."""
        judged = self.idle if not self.idle.good else self.beyond
        return () if judged is None else judged.broken


class Fared(NamedTuple):
    """A deployment under a stream of requests: at its rate, or at the highest that is good."""

    judged: Judged
    """Where no rate is good: each request alone."""
    found: Found | None
    """Where the rate was searched."""
    requests: int

    @property
    def needed(self) -> int:
        """Requests after which percentiles stand still: FILLS times as many as are in flight."""
        flight = self.judged.rate * float(self.judged.outcome.latency.mean())
        return int(np.ceil(FILLS * flight)) if np.isfinite(flight) else 0

    @property
    def complete(self) -> bool:
        """Whether nothing was cut short."""
        return self.found is None or self.found.complete


def fares(
    deployment: Deployment,
    stream: Stream,
    goal: Goal,
    count: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Fared:
    """How a deployment fares.

    Args:
        deployment: what serves.
        stream: the requests.
        goal: what they are promised.
        count: how many are drawn; none = FEWEST, and more (to MOST) where so few are over too soon.
        progress: told after each simulation.

    Raises:
        ValueError: a request that does not fit.
    """
    known = count or FEWEST
    last: Fared | None = None
    near: float | None = None
    while True:
        trace = stream.take(known)
        if stream.searched:
            try:
                found = highest(deployment, trace, goal, progress, near=near)
            except KeyboardInterrupt:
                if last is None:
                    raise
                return _stopped(last)
            if last is not None and not found.complete and found.best is None:
                return _stopped(last)
            fared = Fared(found.best or found.idle, found, trace.length)
        else:
            rate = trace.rate
            fared = Fared(judge(deployment.run(trace), goal, rate, edges=stream.log is not None), None, trace.length)
            progress()
        enough = count is not None or stream.log is not None or known >= min(fared.needed, MOST)
        if enough or not fared.complete or not fared.judged.sustained:  # a queue that grows never stands still
            return fared
        known, last = min(MOST, int(1.2 * fared.needed)), fared
        near = fared.judged.rate if fared.judged.good else None


def _stopped(last: Fared) -> Fared:
    """What fewer requests said, where the search over more was interrupted before it found anything."""
    return last if last.found is None else last._replace(found=last.found._replace(complete=False))


def judge(outcome: Outcome, goal: Goal, rate: float, edges: bool = False) -> Judged:
    """How requests fared.

    A deployment begins empty and ends empty, which flatters those that come first and last. Those that come within a
    mean latency of either end do not count, unless that were more than a quarter of the time.

    Args:
        outcome: of a simulation.
        goal: what they are held against.
        rate: at which they came.
        edges: all requests count.
    """
    span = float(outcome.arrival[-1] - outcome.arrival[0])
    edge = 0.0 if edges else min(float(outcome.latency.mean()), EDGE * span)
    ends = outcome.arrival[0] + edge, outcome.arrival[-1] - edge
    first, last = np.searchsorted(outcome.arrival, ends[0]), np.searchsorted(outcome.arrival, ends[1], side="right")
    counted = slice(int(first), int(last))
    times = {name: getattr(outcome, name)[counted] for name in ("ttft", "tpot")}
    every, kept = np.ones(len(times["ttft"]), dtype=bool), {}
    for name, limit in (("ttft", goal.ttft), ("tpot", goal.tpot)):
        if limit is not None:
            keeps = ~(times[name] > limit)  # a time that a request does not have (NaN) breaks no limit
            kept[name] = float(keeps.mean())
            every &= keeps
    attained = float(every.mean())
    if goal.percentile is not None:
        broken = [name for name, share in kept.items() if share < goal.percentile / 100 - 1e-12]
    elif attained < goal.attainment - 1e-12:
        worst = min(kept.values())
        broken = [name for name, share in kept.items() if 1 - share >= 0.5 * (1 - worst)]
    else:
        broken = []
    if goal.gap is not None:
        kept["gap"] = outcome.gaps.share_within(goal.gap)
        broken += ["gap"] if kept["gap"] < GAPS else []
    sustained = _growth(outcome.arrival[counted], times["ttft"]) <= GROWTH
    return Judged(rate, outcome, counted, attained, kept, sustained, tuple(broken or ([] if sustained else ["load"])))


def _growth(arrival: Array, ttft: Array) -> float:
    """Slope of the time to first token over the arrival, by least squares; 0 where all come at once."""
    apart = arrival - arrival.mean()
    spread = float(apart @ apart)
    return float(apart @ (ttft - ttft.mean())) / spread if spread > 0 else 0.0


def highest(
    deployment: Deployment,
    trace: Trace,
    goal: Goal,
    progress: Callable[[], None] = lambda: None,
    precision: float = PRECISION,
    near: float | None = None,
) -> Found:
    """The highest rate at which a deployment keeps its promise.

    Args:
        deployment: what serves.
        trace: the requests, at any rate.
        goal: the promise.
        progress: told after each simulation.
        precision: how close, relative.
        near: a rate that it is probably near to, as that of fewer requests: half of the simulations are saved.

    Raises:
        ValueError: a request that does not fit.
    """
    unit = trace.faster(1 / trace.rate)
    tried = 1

    def at(rate: float) -> Judged:
        nonlocal tried
        judged = judge(deployment.run(unit.faster(rate)), goal, rate)
        tried += 1
        progress()
        return judged

    alone = unit._replace(arrival=np.arange(unit.length) / IDLE)
    idle = judge(deployment.run(alone), goal, IDLE, edges=True)
    progress()
    if not idle.good:
        return Found(None, idle, None, tried)
    low, high = None, None
    start = deployment.replicas / float(np.mean(idle.outcome.latency))
    rate, up, down = (start, 2.0, 4.0) if near is None else (near, _BESIDE, _BESIDE)
    try:
        while high is None and rate < _MOST:
            judged = at(rate)
            low, high, rate = (judged, None, rate * up) if judged.good else (low, judged, rate)
            up = min(2.0, up * up)
        while high is not None and high.rate > (start / _LEAST if low is None else low.rate * (1 + precision)):
            judged = at(high.rate / down if low is None else (low.rate + high.rate) / 2)
            low, high = (judged, high) if judged.good else (low, judged)
            down = min(4.0, down * down)
    except KeyboardInterrupt:
        return Found(low, idle, high, tried, complete=False)
    return Found(low, idle, high, tried)
