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
from planner.simulating.traces import Trace

Array = NDArray[np.float64]
WARM = 0.1
"""Share of the requests of a drawn trace that come while the deployment fills, and do not count."""
GROWTH = 0.05
"""A rate is not sustained where the time to the first token grows by more than this with every second: then requests
come that much faster than they are served, and a longer run would break any limit."""
PRECISION = 0.01
"""How close the highest rate is found."""
IDLE = 1e-5
"""Requests per second that stand for next to none: nobody meets another."""
_MOST = 2.0**24  # requests per second at which a search gives up


class Goal(NamedTuple):
    """What users are promised. Seconds; none = no limit."""

    ttft: float | None = None
    tpot: float | None = None
    attainment: float = 0.9
    """Share of the requests that must keep both limits."""
    percentile: float | None = None
    """In the place of attainment: this percentile (0 to 100) of each time must keep its limit."""


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
    good: bool

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
    """With next to no load: times that no lower rate makes shorter."""
    beyond: Judged | None
    """At the lowest rate that was tried and is not good; none where no rate was too high."""
    tried: int
    complete: bool = True
    """False where it was stopped: the best so far."""

    @property
    def bound(self) -> str:
        """What ends it: ttft, tpot, both, or load (more comes than is served)."""
        judged = self.beyond if self.best is not None else self.idle
        if judged is None:
            return "-"
        broken = {name: 1 - share for name, share in judged.kept.items()}
        worst = max(broken.values(), default=0.0)
        if worst <= 0:
            return "load"
        names = [name for name, share in broken.items() if share >= 0.5 * worst]
        return names[0] if len(names) == 1 else "both"


def judge(outcome: Outcome, goal: Goal, rate: float, warm: float = WARM) -> Judged:
    """How requests fared.

    Args:
        outcome: of a simulation.
        goal: what they are held against.
        rate: at which they came.
        warm: share of them, the first ones, that do not count.
    """
    counted = slice(int(warm * len(outcome.arrival)), None)
    times = {name: getattr(outcome, name)[counted] for name in ("ttft", "tpot")}
    every = np.ones(len(times["ttft"]), dtype=bool)
    kept, good = {}, True
    for name, limit in (("ttft", goal.ttft), ("tpot", goal.tpot)):
        if limit is None:
            continue
        keeps = ~(times[name] > limit)  # a time that a request does not have (NaN) breaks no limit
        kept[name] = float(keeps.mean())
        every &= keeps
        good &= goal.percentile is None or kept[name] >= goal.percentile / 100 - 1e-12
    attained = float(every.mean())
    if goal.percentile is None:
        good = attained >= goal.attainment - 1e-12
    sustained = _growth(outcome.arrival[counted], times["ttft"]) <= GROWTH
    return Judged(rate, outcome, counted, attained, kept, sustained, good and sustained)


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
) -> Found:
    """The highest rate at which a deployment keeps its promise.

    Args:
        deployment: what serves.
        trace: the requests, at any rate.
        goal: the promise.
        progress: told after each simulation.
        precision: how close, relative.

    Raises:
        ValueError: a request that does not fit.
    """
    unit = trace.faster(1 / trace.rate)
    tried = 0

    def at(rate: float) -> Judged:
        nonlocal tried
        judged = judge(deployment.run(unit.faster(rate)), goal, rate)
        tried += 1
        progress()
        return judged

    idle = at(IDLE)
    if not idle.good:
        return Found(None, idle, None, tried)
    low, high = idle, None
    rate = deployment.replicas / float(np.mean(idle.outcome.latency))
    try:
        while high is None and rate < _MOST:
            judged = at(rate)
            low, high, rate = (judged, None, rate * 2) if judged.good else (low, judged, rate)
        while high is not None and high.rate > low.rate * (1 + precision):
            middle = (low.rate + high.rate) / 2 if low.rate > high.rate / 16 else high.rate / 4
            judged = at(middle)
            low, high = (judged, high) if judged.good else (low, judged)
    except KeyboardInterrupt:
        return Found(low, idle, high, tried, complete=False)
    return Found(low, idle, high, tried)
