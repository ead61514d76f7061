"""Which plans are simulated: those that are named, or the first ones of the ranking by steady state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.costs.rows import structure_of
from planner.costs.serving import Setting, fit
from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal
from planner.plans.space import Refused
from planner.pricing import memory_reasons, rows_of, setting_of, with_kernels
from planner.ranking import NoneLeftError, rank
from planner.request import Request, check
from planner.simulating.fleets import Routing
from planner.simulating.goodput import Deployment


class Candidate(NamedTuple):
    """A plan to simulate."""

    plan: Plan
    setting: Setting


def check_simulated(request: Request) -> None:
    """Refuses what no simulation is there for.

    Raises:
        InputError: static batches, or anything that makes no sense whatever the plans.
    """
    check(request)
    if (request.workload.schedule or request.engine.scheduler.schedule) == "static":
        raise InputError(
            f"engine {request.engine.name} runs static batches, whose requests do not come one by one; "
            "use --schedule continuous, or another --engine"
        )


def named(request: Request, labels: Sequence[str]) -> list[Candidate]:
    """Plans by their labels.

    Raises:
        InputError: no plan, or one that stands twice.
        NoPlanError: one that cannot run on these chips, or does not fit them.
    """
    plans = [Plan.parse(label) for label in labels]
    twice = next((plan for plan in plans if plans.count(plan) > 1), None)
    if twice is not None:
        raise InputError(f"--plan: {twice.label} stands twice")
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    found = []
    for plan in plans:
        weights = request.workload.weights or request.model.weights
        reason = refusal(request.model, request.engine, placement, plan, weights)
        _, unpriced = with_kernels(request, placement, [plan])
        reason = reason or next((each.reason for each in unpriced), None)
        setting = None if reason else setting_of(request, placement, structure_of(plan))
        if setting is not None:
            fitted = fit(setting, rows_of(request, [plan], np.zeros(1, dtype=int), 1.0), clip=False)
            (reason,) = memory_reasons(setting, fitted, np.ones(1))
        if reason or setting is None:
            raise NoPlanError(f"{plan.label} cannot run: {reason}")
        found.append(Candidate(plan, setting))
    return found


def ranked(request: Request, most: int) -> list[Candidate]:
    """The first plans by throughput in steady state, within the limits on time if any are.

    Where no plan keeps the limits in steady state, those that answer a request alone the fastest: what is reachable.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: no plan is left.
    """
    asked = request._replace(objective="throughput")
    try:
        ranking = rank(asked)
    except NoneLeftError:
        limits = request.limits._replace(ttft=None, tpot=None, latency=None)
        alone = request.workload._replace(concurrency=1)
        ranking = rank(asked._replace(objective="latency", limits=limits, workload=alone))
    labels = list(dict.fromkeys(ranking.results["plan"].tolist()))[:most]
    plans = [Plan.parse(label) for label in labels]
    return [Candidate(plan, setting_of(request, ranking.placement, structure_of(plan))) for plan in plans]


def deployments(
    request: Request, candidates: Sequence[Candidate], longest: tuple[float, float], routing: Routing = "least"
) -> tuple[list[tuple[Plan, Deployment]], list[Refused]]:
    """(plans ready to be simulated, those that cannot hold the longest request).

    Args:
        request: what is asked.
        candidates: the plans.
        longest: isl and osl of the longest request.
        routing: which replica a request goes to.

    Raises:
        InputError: drafts, which are not simulated.
    """
    work = request.workload
    ready, refused = [], []
    for plan, setting in candidates:
        made = Deployment.of(setting, plan, sum(longest), float(work.max_context or 0), work.prefix_hit, routing)
        needed = made.kv.most(*longest)
        if needed > made.kv.blocks:
            block = made.kv.block
            reason = f"KV room for {made.kv.blocks * block:.0f} tokens, the longest request takes {needed * block:.0f}"
            refused.append(Refused(plan, reason, "memory"))
        else:
            ready.append((plan, made))
    return ready, refused
