"""Several replicas under one stream of requests, and what became of every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulating.iterations import Clock
from planner.simulating.jobs import Gaps, Job
from planner.simulating.replicas import Replica
from planner.simulating.rooms import KvRoom, Rules
from planner.simulating.traces import Trace

Array = NDArray[np.float64]
Routing = Literal["least", "robin"]
ROUTINGS: tuple[Routing, ...] = ("least", "robin")
"""To the replica with the fewest requests, or to each in turn."""


class Outcome(NamedTuple):
    """What became of requests; arrays in the order of arrival, seconds and tokens."""

    arrival: Array
    start: Array
    """When the first of its tokens was computed."""
    first: Array
    """When its first token was there."""
    finish: Array
    isl: Array
    osl: Array
    replica: NDArray[np.int_]
    """Which one served it."""
    preempted: NDArray[np.int_]
    """How often it lost its KV and was computed again."""
    gaps: Gaps
    """Times between tokens."""
    busy: float
    """Seconds that the first stages worked, added up over the replicas."""
    iterations: int
    prefilled: float
    """Prompt tokens computed, those computed again included."""
    decoded: int
    """Tokens of decode steps."""
    peak: float
    """The largest share of KV in use on any replica; 0 where there is no end to it."""
    replicas: int

    @property
    def ttft(self) -> Array:
        """Time to first token, with the wait."""
        return self.first - self.arrival

    @property
    def tpot(self) -> Array:
        """Mean time per token after the first; NaN where there is none."""
        after = self.osl - 1
        return np.where(after > 0, (self.finish - self.first) / np.maximum(after, 1), np.nan)

    @property
    def latency(self) -> Array:
        """From arrival to the last token."""
        return self.finish - self.arrival

    @property
    def wait(self) -> Array:
        """From arrival until its first iteration starts."""
        return self.start - self.arrival

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last token."""
        return float(self.finish.max() - self.arrival[0])

    @property
    def utilisation(self) -> float:
        """Share of the span that a replica's first stage works, on average."""
        return self.busy / (self.span * self.replicas)


def simulate(
    trace: Trace,
    clock: Clock,
    kv: KvRoom,
    rules: Rules,
    replicas: int = 1,
    routing: Routing = "least",
    cached: Callable[[float], float] | None = None,
) -> Outcome:
    """Every request of a trace through a deployment, until the last one is done.

    Args:
        trace: the requests.
        clock: how long iterations of a replica take.
        kv: a replica's room.
        rules: how its engine fills iterations.
        replicas: how many there are.
        routing: which of them a request goes to.
        cached: tokens of a prompt of this length that are cached; none = none.

    Raises:
        ValueError: a request that no replica can hold.
    """
    fleet = [Replica(clock, kv, rules) for _ in range(replicas)]
    jobs, served = [], np.zeros(trace.length, dtype=int)
    lists = (trace.arrival.tolist(), trace.isl.tolist(), trace.osl.tolist())
    for key, (arrival, isl, osl) in enumerate(zip(*lists, strict=True)):
        job = Job(key, arrival, isl, osl, cached(isl) if cached is not None else 0.0)
        if routing == "robin" or replicas == 1:
            served[key] = key % replicas
        else:
            for replica in fleet:
                replica.advance(arrival)
            served[key] = min(range(replicas), key=lambda place: fleet[place].outstanding)
        fleet[served[key]].submit(job)
        jobs.append(job)
    for replica in fleet:
        replica.advance()
    return outcome(jobs, fleet, served)


def outcome(jobs: Sequence[Job], fleet: Sequence[Replica], served: NDArray[np.int_]) -> Outcome:
    """What became of jobs that these replicas served."""
    names = ("arrival", "start", "first", "finish", "isl", "osl")
    columns = {name: np.array([getattr(job, name) for job in jobs]) for name in names}
    parts = [replica.gaps() for replica in fleet]
    return Outcome(
        **columns,
        replica=served,
        preempted=np.array([job.preempted for job in jobs], dtype=int),
        gaps=Gaps(*(np.concatenate(column) for column in zip(*parts, strict=True))),
        busy=sum(replica.busy for replica in fleet),
        iterations=sum(replica.iterations for replica in fleet),
        prefilled=sum(replica.prefilled for replica in fleet),
        decoded=sum(replica.decoded for replica in fleet),
        peak=max(replica.peak / replica.kv.blocks for replica in fleet),
        replicas=len(fleet),
    )


def closed_loop(
    clock: Clock, kv: KvRoom, rules: Rules, concurrency: int, isl: int, osl: int, rounds: int, spread: float
) -> Outcome:
    """Requests of one length on one replica, each followed by another as soon as it ends.

    Args:
        clock: how long iterations take.
        kv: the replica's room.
        rules: how iterations are filled.
        concurrency: requests in flight.
        isl: tokens of each prompt.
        osl: tokens of each answer.
        rounds: requests, one after the other, of each that are in flight.
        spread: seconds over which the first ones begin, so that they do not go in step.
    """
    jobs: list[Job] = []

    def another(last: Job) -> None:
        if len(jobs) < concurrency * rounds:
            jobs.append(Job(len(jobs), last.finish, isl, osl))
            replica.submit(jobs[-1])

    replica = Replica(clock, kv, rules, on_finish=another)
    for place in range(concurrency):
        start = spread * place / concurrency
        replica.advance(start)
        jobs.append(Job(len(jobs), start, isl, osl))
        replica.submit(jobs[-1])
    replica.advance()
    return outcome(jobs, [replica], np.zeros(len(jobs), dtype=int))
