"""Choosing: every plan priced, those that break a limit refused with the reason, the rest ranked for a goal."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Structure
from planner.costs.memory import Budget
from planner.costs.serving import Fit, Rows, Setting, fit, formats_of, price
from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.space import Filters, Refused, enumerate_plans
from planner.results import Results, results_of
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.workload import Workload
from planner.units import GIB, MS

Objective = Literal["latency", "ttft", "tpot", "throughput", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "ttft", "tpot", "throughput", "cost")
SEARCHED = ("throughput", "cost")
"""Goals for which the concurrency is searched when none is given."""
PUBLISHED_ERROR = 0.10
"""Error of the model within which two plans are a tie; assumed until it is measured."""
Array = NDArray[np.float64]


class Limits(NamedTuple):
    """What a plan must keep; none = no limit. Seconds and bytes."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    memory: float | None = None
    memory_fraction: float | None = None


class Request(NamedTuple):
    """One question to the planner: what to serve, on what, for which goal, within which limits."""

    model: Model
    hardware: Hardware
    engine: Engine
    gpus: int
    workload: Workload = Workload()
    objective: Objective = "latency"
    limits: Limits = Limits()
    filters: Filters = Filters()
    usd_per_chip_hour: float | None = None
    slice: str | None = None
    pareto: bool = False


class Ranking(NamedTuple):
    """Plans in order, the refused ones, and how many were looked at."""

    request: Request
    placement: Placement
    results: Results
    refused: list[Refused]
    plans: int
    points: int
    """Plans times batch sizes that were priced."""


def check(request: Request) -> None:
    """Refuses a request that makes no sense, whatever the plans.

    Raises:
        InputError: a number that must be above zero is not, or a context beyond the model's.
    """
    work = request.workload
    for option, value in (
        ("--gpus", request.gpus),
        ("--isl", work.isl),
        ("--osl", work.osl),
        ("--concurrency", work.concurrency),
    ):
        if value is not None and value < 1:
            raise InputError(f"{option} must be at least 1, found {value}")
    if request.objective == "tpot" and work.osl < 2:
        raise InputError(f"--objective tpot needs answers of at least 2 tokens, --osl is {work.osl}")
    check_context(request.model, work.isl, work.osl, work.max_context)


def check_context(model: Model, isl: float, osl: float, max_context: float | None) -> None:
    """Refuses a workload longer than the model can attend to, unless a context is asked for explicitly.

    Raises:
        InputError: isl + osl above the model's maximum.
    """
    if not max_context and isl + osl > model.max_context:
        raise InputError(
            f"isl {isl:.0f} + osl {osl:.0f} = {isl + osl:.0f} tokens is more than {model.name}'s context of "
            f"{model.max_context}; shorten them, or give --max-context if the deployment extends it"
        )


def rank(request: Request) -> Ranking:
    """All plans of a request, ranked.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: no plan satisfies it; says which limit, the numbers and what would do.
    """
    ranking = _ranked(request)
    if len(ranking.results) == 0:
        raise NoPlanError(why_none(request, ranking.refused))
    return ranking


def _ranked(request: Request) -> Ranking:
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    plans, refused = enumerate_plans(request.model, request.engine, placement, request.filters)
    found: list[Results] = []
    points = 0
    for structure in dict.fromkeys(Structure(plan.attention, plan.prefill_attention) for plan in plans):
        alike = [plan for plan in plans if Structure(plan.attention, plan.prefill_attention) == structure]
        results, dropped = _price_alike(request, placement, structure, alike)
        refused += dropped
        if results is not None:
            points += len(results)
            found.append(results)
    if not found:
        return Ranking(request, placement, _nothing(), refused, len(plans), 0)
    results, dropped = _within(Results.joined(found), request.limits)
    refused += dropped
    results = (
        _pareto(results) if request.pareto else _ordered(_best_of_each(results, request.objective), request.objective)
    )
    results.columns["rank"] = np.arange(1, len(results) + 1, dtype=float)
    results.columns["tie"] = _ties(results, request.objective)
    return Ranking(request, placement, results, refused, len(plans), points)


def _nothing() -> Results:
    return Results({"plan": np.empty(0, dtype=object)})


def setting_of(request: Request, placement: Placement, structure: Structure) -> Setting:
    """What all rows of a request with this structure share."""
    work, price_given = request.workload, request.usd_per_chip_hour
    listed = request.hardware.price
    return Setting(
        request.model,
        request.hardware,
        request.engine,
        placement,
        formats_of(request.model, request.hardware, request.engine, work.weights, work.kv_cache),
        structure,
        Budget.of(request.hardware, request.engine, request.limits.memory, request.limits.memory_fraction),
        work.schedule,
        work.arrivals,
        price_given if price_given is not None else (listed.usd_per_chip_hour if listed else None),
    )


def _price_alike(
    request: Request, placement: Placement, structure: Structure, plans: list[Plan]
) -> tuple[Results | None, list[Refused]]:
    """Plans of one structure, each at every concurrency that is looked at."""
    setting, work = setting_of(request, placement, structure), request.workload

    def rows_of(which: NDArray[np.intp], concurrency: Array | float) -> Rows:
        degrees = {name: np.array([getattr(plan, name) for plan in plans])[which] for name in ("tp", "pp", "dp")}
        return Rows.of(
            **degrees, isl=work.isl, osl=work.osl, concurrency=concurrency, max_context=work.max_context or 0
        )

    asked = work.concurrency
    if asked is None and request.objective not in SEARCHED and not request.pareto:
        asked = 1
    first = fit(setting, rows_of(np.arange(len(plans)), asked or 1), clip=False)
    reasons = memory_reasons(setting, first, np.full(len(plans), asked or 1.0))
    refused = [Refused(plan, reason, "memory") for plan, reason in zip(plans, reasons, strict=True) if reason]
    which = np.flatnonzero([reason is None for reason in reasons])
    if not len(which):
        return None, refused
    concurrency = np.full(len(which), float(asked or 1))
    if asked is None:
        which, concurrency = _loads(which, first.max_concurrency[which])
    rows = rows_of(which, concurrency)
    fitted = fit(setting, rows, clip=False)
    gpus = np.full(rows.length, float(request.gpus))
    priced = price(setting, rows, fitted)
    return results_of(setting, plans, which, gpus, request.objective, rows, fitted, priced), refused


def _loads(which: NDArray[np.intp], most: Array) -> tuple[NDArray[np.intp], Array]:
    """Every plan at powers of two, the halves between them, and its exact capacity: (plans, concurrencies)."""
    top = int(np.ceil(np.log2(np.max(most)))) + 1
    steps = np.unique([step for power in range(top + 1) for step in (2.0**power, np.floor(1.5 * 2.0**power))])
    loads = [np.append(steps[steps < limit], limit) for limit in most]
    return np.repeat(which, [len(load) for load in loads]), np.concatenate(loads)


def memory_reasons(setting: Setting, fitted: Fit, concurrency: Array) -> list[str | None]:
    """Why each row does not fit, as a sentence, or none."""
    limit = setting.budget.limit
    over = fitted.weights + fitted.other >= limit
    beyond = limit + fitted.outside > setting.budget.chip * (1 + 1e-9)
    short = concurrency > fitted.max_concurrency
    reasons: list[str | None] = [None] * len(over)
    for index in np.flatnonzero(over | beyond | short):
        if over[index]:
            reasons[index] = (
                f"weights {fitted.weights[index] / GIB:.1f} GiB + runtime {fitted.other[index] / GIB:.1f} GiB "
                f"exceed the limit of {limit / GIB:.1f} GiB per chip"
            )
        elif beyond[index]:
            reasons[index] = (
                f"the budget of {limit / GIB:.1f} GiB leaves no room for the {fitted.outside[index] / GIB:.1f} GiB "
                f"that the engine takes outside it on a chip of {setting.budget.chip / GIB:.1f} GiB"
            )
        else:
            reasons[index] = (
                f"KV room for {fitted.max_concurrency[index]:.0f} requests of {fitted.needed[index]:.0f} tokens, "
                f"{concurrency[index]:.0f} asked"
            )
    return reasons


def _within(results: Results, limits: Limits) -> tuple[Results, list[Refused]]:
    """Rows that keep the limits on time; plans of which no row does, with how close they come."""
    keeps = np.ones(len(results), dtype=bool)
    wanted = {"ttft_ms": limits.ttft, "tpot_ms": limits.tpot, "latency_ms": limits.latency}
    for column, limit in wanted.items():
        if limit is not None:
            keeps &= ~(results[column] > limit / MS)
    refused = []
    labels = results["plan"]
    for label in dict.fromkeys(labels):
        own = labels == label
        if not (keeps & own).any():
            closest = results.take(np.flatnonzero(own))
            parts = [
                f"{column.removesuffix('_ms')} {np.nanmin(closest[column]):.4g} ms > {limit / MS:g} ms"
                for column, limit in wanted.items()
                if limit is not None and np.nanmin(closest[column]) > limit / MS
            ]
            reason = ", ".join(parts) or "no batch size keeps all limits at once"
            refused.append(Refused(Plan.parse(label), reason, "slo"))
    return results.take(np.flatnonzero(keeps)), refused


def metric(results: Results, objective: str) -> Array:
    """What is minimised: a time in ms, or the inverse of a throughput."""
    if objective == "throughput":
        return np.asarray(1.0 / results["tokens_per_s"].astype(float))
    if objective == "cost":
        dollars = results["usd_per_mtok"].astype(float)
        return dollars if np.isfinite(dollars).all() else results["gpu_s_per_token"].astype(float)
    column = results[f"{objective}_ms"].astype(float)
    return np.where(np.isfinite(column), column, np.inf)


def _order(results: Results, objective: str) -> NDArray[np.intp]:
    """Best first; equals by higher max_concurrency, fewer used chips, smaller tp, then the plan's text.

    Values are compared to 30 bits, so that two ways of adding the same numbers stay equal.
    """
    mantissa, exponent = np.frexp(metric(results, objective))
    value = np.ldexp(np.round(mantissa * 2**30), exponent)
    used = results["gpus"] - results["idle_gpus"]
    text = results["plan"].astype(str)
    return np.lexsort((text, results["tp"], used, -results["max_concurrency"], value))


def _best_of_each(results: Results, objective: str) -> Results:
    """The best row of every plan: its best batch size."""
    order = _order(results, objective)
    first: dict[str, int] = {}
    for row in order.tolist():
        first.setdefault(results["plan"][row], row)
    return results.take(np.array(list(first.values())))


def _ordered(results: Results, objective: str) -> Results:
    return results.take(_order(results, objective))


def _pareto(results: Results) -> Results:
    """Rows that no other beats in both TPOT and tokens per second and chip, fastest answers first."""
    tpot, rate = results["tpot_ms"].astype(float), results["tokens_per_s_per_gpu"].astype(float)
    order = np.lexsort((results["plan"].astype(str), -rate, tpot))
    best = np.maximum.accumulate(np.concatenate([[-np.inf], rate[order][:-1]]))
    return results.take(order[(rate[order] > best) & np.isfinite(tpot[order])])


def _ties(results: Results, objective: str) -> NDArray[np.object_]:
    """Whether a row is within the published error of the row above; none for the first."""
    value = metric(results, objective)
    ties = np.empty(len(value), dtype=object)
    for index in range(1, len(value)):
        ties[index] = bool(value[index] <= value[index - 1] * (1 + PUBLISHED_ERROR))
    return ties


def why_none(request: Request, refused: list[Refused]) -> str:
    """The sentence for exit 3: which limit, the numbers, what the best plan reaches, what change would do."""
    slo = [item for item in refused if item.limit == "slo"]
    memory = [item for item in refused if item.limit == "memory"]
    where = f"{request.model.name} on {request.gpus} x {request.hardware.name}"
    if slo:
        return f"no plan for {where} keeps the limits on time. {_reachable(request)}"
    if memory:
        closest = memory[-1] if request.filters.tp else min(memory, key=_shortage)
        return (
            f"no plan for {where} fits in memory. Closest: {closest.plan.label}: {closest.reason}. {_roomier(request)}"
        )
    if refused:
        return f"no plan for {where} is valid. {refused[-1].plan.label}: {refused[-1].reason}"
    return f"no plan for {where} is left by the filters"


def _shortage(refused: Refused) -> tuple[bool, float]:
    """Orders memory refusals: those that miss only KV room first, then by weights per chip."""
    plan = refused.plan
    return refused.reason.startswith("weights"), 1.0 / (plan.tp * plan.pp)


def _reachable(request: Request) -> str:
    """What is reached without the limits, each alone and what all of them need."""
    free = _ranked(
        request._replace(limits=request.limits._replace(ttft=None, tpot=None, latency=None), objective="latency")
    )
    sentences = []
    for name in ("ttft", "tpot", "latency"):
        limit = getattr(request.limits, name)
        if limit is None:
            continue
        column = free.results[f"{name}_ms"].astype(float)
        best = int(np.nanargmin(column))
        if column[best] > limit / MS:
            sentences.append(
                f"--max-{name} {limit / MS:g}: the best is {column[best]:.4g} ms by {free.results['plan'][best]}"
            )
    if not sentences:
        return "Each is reachable alone, but no plan keeps all of them; the fastest is " + str(free.results["plan"][0])
    reach = "; ".join(sentences)
    return (
        f"{reach}. The smallest change that would do: raise the limit to that, or try fewer requests at once, "
        f"other chips or --weights fp8"
    )


def _roomier(request: Request) -> str:
    """The fewest chips and the weight formats with which some plan would fit."""
    bare = request._replace(limits=request.limits._replace(ttft=None, tpot=None, latency=None), slice=None)
    changes = []
    if not any((request.filters.tp, request.filters.pp, request.filters.dp)):
        sizes = (
            list(range(request.gpus + 1, 4 * request.gpus + 17))
            if request.gpus <= 16
            else [2 * request.gpus, 4 * request.gpus, 8 * request.gpus]
        )
        enough = next((n for n in sizes if _has_plan(bare._replace(gpus=n))), None)
        if enough:
            changes.append(f"--gpus {enough}")
    stored = request.workload.weights or request.model.weights
    for dtype in ("fp8", "int4"):
        if dtype != stored and _has_plan(bare._replace(workload=request.workload._replace(weights=dtype))):
            changes.append(f"--weights {dtype}")
            break
    concurrency = request.workload.concurrency or 1
    while concurrency > 1 and not changes:
        concurrency //= 2
        if _has_plan(bare._replace(workload=request.workload._replace(concurrency=concurrency))):
            changes.append(f"--concurrency {concurrency}")
    return (
        f"The smallest change that would do: {' or '.join(changes)}"
        if changes
        else "No number of chips or weight format within reach would do"
    )


def _has_plan(request: Request) -> bool:
    try:
        return len(_ranked(request).results) > 0
    except (InputError, NoPlanError):
        return False
