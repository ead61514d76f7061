"""The best plan with both phases on the same chips, at the same limits: what disaggregation has to beat, and why.

It is the ordinary planner's: with a number of chips the plan that sustains the highest rate (`pricing.Held`), with a
rate the one on the fewest chips (`ranking.rank`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.rows import Rows, structure_of
from planner.costs.serving import fit, price
from planner.errors import NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import Held, by_structure, feasible, rows_of, setting_of
from planner.ranking import rank
from planner.request import Request
from planner.units import MS


class Colocated(NamedTuple):
    """A plan at a rate; times in seconds."""

    plan: Plan
    hardware: str
    gpus: int
    rate: float
    highest: float
    ttft: float
    """With the wait."""
    queue: float
    tpot: float
    latency: float
    batch: float
    """Mean requests in flight of a replica."""
    most: float
    step: float
    """A decode step of that batch without any prompt."""
    busy: float
    """Share of its time that a replica works on prompts."""
    memory: float
    limit: float
    dollars: float
    """Per hour; NaN without a price."""

    @property
    def label(self) -> str:
        """The plan's."""
        return self.plan.label

    @property
    def stall(self) -> float:
        """What the prompts of others add to the time of a token."""
        return self.tpot - self.step


def best_colocated(request: Request, count: int = 1) -> list[Colocated]:
    """The best plans, at most so many; none where none keeps the limits.

    Args:
        request: with limits on TTFT and TPOT; with an arrival rate `gpus` is the most chips there may be.
        count: how many of them.

    Raises:
        InputError: the request makes no sense.
    """
    rate = request.workload.arrival_rate
    if rate is not None:
        try:
            ranked = rank(request._replace(fewest=True)).results
        except NoPlanError:
            return []
        listed = [ranked.row(index) for index in range(min(count, len(ranked)))]
        return [_at(request, Plan.parse(row["plan"]), int(row["gpus"]), rate) for row in listed]
    try:
        placement, plans, _ = feasible(request)
    except NoPlanError:
        return []
    found: list[tuple[float, Plan]] = []
    for setting, alike in by_structure(request, placement, plans):
        held = Held.of(request, setting, alike)
        rates = (held.reach.rate * held.rows.dp).tolist()
        found += [(each, plan) for each, plan in zip(rates, held.plans, strict=True) if each > 0]
    found.sort(key=lambda each: -each[0])
    return [_at(request, plan, request.gpus, each) for each, plan in found[:count]]


def enlarged(request: Request, each: Colocated) -> Colocated | None:
    """The same plan with one replica more; none where there are no chips for it.

    Args:
        request: what was asked; `gpus` is the most chips there may be.
        each: a plan at its rate.
    """
    plan = each.plan._replace(dp=each.plan.dp + 1)
    if request.hardware.torus is not None:
        return None
    gpus = Placement.of(request.hardware, request.gpus).fewest(plan.tp, plan.pp, plan.dp, plan.cp)
    return _at(request, plan, gpus, each.rate) if gpus <= request.gpus else None


def _at(request: Request, plan: Plan, gpus: int, rate: float) -> Colocated:
    """A plan that serves a rate, in steady state."""
    work = request.workload._replace(arrival_rate=rate)
    request = request._replace(gpus=gpus, workload=work)
    setting = setting_of(request, Placement.of(request.hardware, gpus, request.slice), structure_of(plan))
    held = Held.of(request, setting, [plan])
    load = held.loads(setting, rate)
    row = held.at(request, setting, np.array([float(gpus)])).row(0)
    rows = rows_of(request, [plan], np.array([0]), load * plan.dp)
    isl, osl = (work.isl, work.osl) if work.lengths is None else work.lengths.seen(work.isl, work.osl)
    rows = Rows(*rows)._replace(isl=np.array([float(isl)]), osl=np.array([float(osl)]))
    alone = setting._replace(schedule="static", mean_load=True, lengths=None)
    fitted = fit(alone, rows, clip=False)._replace(batch=np.maximum(1.0, load))
    return Colocated(
        plan=plan,
        hardware=request.hardware.name,
        gpus=gpus,
        rate=rate,
        highest=float(held.reach.rate[0] * plan.dp),
        ttft=(row["ttft_ms"] + row["queue_ms"]) * MS,
        queue=row["queue_ms"] * MS,
        tpot=row["tpot_ms"] * MS,
        latency=(row["latency_ms"] + row["queue_ms"]) * MS,
        batch=float(load[0]),
        most=float(row["max_concurrency"]) / plan.dp,
        step=float(price(alone, rows, fitted).tpot[0]),
        busy=float(row["prefill_utilisation"]),
        memory=float(fitted.memory[0]),
        limit=setting.budget.limit,
        dollars=np.nan if setting.usd_per_chip_hour is None else setting.usd_per_chip_hour * gpus,
    )
