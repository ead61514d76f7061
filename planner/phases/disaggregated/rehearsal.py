"""Two pools request by request: prompts through prefill replicas, KV over the wires, answers in decode replicas.

Closed forms have means of queues and take the phases apart; here every request goes its way (`planner.simulating`).
Prefill replicas run one prompt a pass, as the closed forms have it (a full chip gains nothing by more, and a pipeline
waits longer for them); where the engine's token budget is below the longest prompt, they fill passes by that. A prefill
replica sends one prompt's KV after the other; a decode replica then has a request whose KV is there and whose first
token is out. Replicas are chosen by how few requests they have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.costs.rows import structure_of
from planner.errors import InputError
from planner.phases.disaggregated.colocated import Colocated, enlarged
from planner.phases.disaggregated.disaggregation import Deployment
from planner.phases.disaggregated.question import Question
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.request import Request
from planner.simulating import goodput
from planner.simulating.fleets import Outcome, outcome
from planner.simulating.goodput import Goal, Judged
from planner.simulating.jobs import Job
from planner.simulating.replicas import Replica
from planner.simulating.traces import Stream, Trace

Array = NDArray[np.float64]
MOST_REPLICAS = 16
"""Replicas that are added at most to a plan with both phases together."""
SHARE = 0.9
"""Of the requests, those that must keep both limits when it is not said (DistServe's)."""


class Pools(NamedTuple):
    """Both pools, ready to be simulated."""

    prefill: goodput.Deployment
    decode: goodput.Deployment
    transfer: float
    """Seconds of a mean prompt's KV on the wires."""
    visible: float
    """... that are left when the prompt is done."""
    isl: float
    """Tokens of the mean prompt: KV of another one takes as many times longer."""

    @property
    def replicas(self) -> int:
        """Of both pools, by which a search for the highest rate begins."""
        return min(self.prefill.replicas, self.decode.replicas)

    def run(self, trace: Trace) -> Outcome:
        """What becomes of requests.

        Raises:
            ValueError: one that no replica can hold.
        """
        prompts = self.prefill.run(trace._replace(osl=np.ones(trace.length)))
        ready = self._arrivals(prompts)
        order = np.argsort(ready, kind="stable")
        fleet = [Replica(self.decode.clock, self.decode.kv, self.decode.rules) for _ in range(self.decode.replicas)]
        jobs: list[Job] = []
        served = np.zeros(trace.length, dtype=int)
        for key in order.tolist():
            job = Job(key, float(ready[key]), float(trace.isl[key]), float(trace.osl[key]), float(trace.isl[key]), 1.0)
            if len(fleet) > 1:
                for replica in fleet:
                    replica.advance(job.arrival)
                served[key] = min(range(len(fleet)), key=lambda place: fleet[place].outstanding)
            fleet[served[key]].submit(job)
            jobs.append(job)
        for replica in fleet:
            replica.advance()
        answers = outcome(sorted(jobs, key=lambda job: job.key), fleet, served)
        answered = trace.osl > 1
        return answers._replace(
            arrival=prompts.arrival,
            start=prompts.start,
            first=prompts.first,
            finish=np.where(answered, answers.finish, prompts.first),
            replica=prompts.replica,
        )

    def _arrivals(self, prompts: Outcome) -> Array:
        """When each prompt's KV has arrived: a prefill replica sends one after the other."""
        scale = prompts.isl / self.isl
        ready = prompts.first + self.visible * scale
        free = np.full(prompts.replicas, -np.inf)
        for key in np.argsort(prompts.first, kind="stable").tolist():
            replica = prompts.replica[key]
            ready[key] = max(ready[key], free[replica] + self.transfer * scale[key])
            free[replica] = ready[key]
        return ready


def pools_of(question: Question, pair: Deployment, longest: float) -> Pools:
    """A pair of plans, ready to be simulated.

    Args:
        question: which machines they are on.
        pair: the plans with their replicas.
        longest: tokens of the longest request.

    Raises:
        InputError: drafts, which are not simulated.
    """
    prefill = _deployment(question.prefill, pair.prefill, pair.prefill_chips, longest)
    budget = prefill.rules.budget
    if budget is None or budget >= longest:
        prefill = prefill._replace(rules=prefill.rules._replace(mixed=False, budget=None))
    decode = _deployment(question.decode, pair.decode, pair.decode_chips, longest)
    return Pools(prefill, decode, pair.transfer, pair.visible, question.prefill.workload.isl)


def _deployment(request: Request, plan: Plan, chips: int, longest: float) -> goodput.Deployment:
    work = request.workload
    setting = setting_of(request, Placement.of(request.hardware, chips, request.slice), structure_of(plan))
    return goodput.Deployment.of(setting, plan, longest, float(work.max_context or 0), work.prefix_hit)


class Fared(NamedTuple):
    """How simulated requests fared under a deployment."""

    rate: float
    """Requests per second: the highest at which enough of them keep both limits, or the one that is asked; 0 where
    none will do."""
    attained: float
    """Share that keeps both."""
    ttft_p90: float
    """Seconds that nine tenths are no longer than."""
    tpot_p90: float
    complete: bool = True
    """False where the search was stopped."""

    @classmethod
    def of(cls, judged: Judged, rate: float, complete: bool = True) -> Fared:
        """What a simulation at a rate showed."""
        ttft, tpot = (float(judged.quantiles(name, (0.9,))[0]) for name in ("ttft", "tpot"))
        return cls(rate, judged.attained, ttft, tpot, complete)


def rehearse(
    question: Question,
    each: Deployment | Colocated,
    stream: Stream,
    told: Callable[[], None] = lambda: None,
    count: int | None = None,
) -> Fared:
    """How simulated requests fare: at the rate that is asked, else at the highest that keeps both limits.

    Args:
        question: has limits and a share of requests that keeps them.
        each: a pair of pools, or a plan with both phases together.
        stream: the requests, at the rate that is asked or at any.
        told: called after each simulation.
        count: requests; none = as many as a steady state takes (`simulating.goodput.fares`).

    Raises:
        InputError: drafts, which are not simulated, or a request that does not fit.
    """
    longest, limits = sum(stream.longest), question.prefill.limits
    serving = pools_of(question, each, longest) if isinstance(each, Deployment) else _together(question, each, longest)
    goal = Goal(limits.ttft, limits.tpot, question.share or SHARE)
    try:
        found = goodput.fares(cast(goodput.Deployment, serving), stream, goal, count, told)
    except ValueError as error:
        raise InputError(f"--attainment: {each.label}: {error}") from None
    served = question.rate is not None or (found.found is not None and found.found.best is not None)
    return Fared.of(found.judged, found.judged.rate if served else 0.0, found.complete)


def rehearse_together(
    question: Question,
    each: Colocated,
    stream: Stream,
    told: Callable[[], None] = lambda: None,
    count: int | None = None,
) -> tuple[Colocated, Fared]:
    """The same of a plan with both phases together, with as many replicas as a rate that is asked turns out to take.

    Means, by which it was sized, promise nothing to a share of the requests.

    Raises:
        InputError: as `rehearse`.
    """
    fared = rehearse(question, each, stream, told, count)
    for _ in range(MOST_REPLICAS):
        larger = None
        if question.rate is not None and fared.attained < (question.share or SHARE):
            larger = enlarged(_request(question, each), each)
        if larger is None:
            break
        each, fared = larger, rehearse(question, larger, stream, told, count)
    return each, fared


def _request(question: Question, each: Colocated) -> Request:
    return question.prefill if question.prefill.hardware.name == each.hardware else question.decode


def _together(question: Question, each: Colocated, longest: float) -> goodput.Deployment:
    return _deployment(_request(question, each), each.plan, each.gpus, longest)
