"""All plans of a request, priced at every load that is looked at; those that do not fit refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.layers import Formats, Structure
from planner.costs.memory import Budget
from planner.costs.serving import Fit, Rows, Setting, fit, formats_of, price
from planner.costs.speculation import Drafting, columns_of
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import draft_refusal
from planner.plans.space import Refused, enumerate_plans
from planner.request import SEARCHED, TIMES, Limits, Request, check
from planner.results import Results, results_of
from planner.units import GIB, MS

Array = NDArray[np.float64]


class Priced(NamedTuple):
    """Every plan at every load, before limits on time and before any order."""

    placement: Placement
    plans: int
    """Plans that the rules allow."""
    results: Results | None
    """None where nothing fits."""
    refused: list[Refused]


def price_all(request: Request) -> Priced:
    """Every plan of a request, priced.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: fewer chips than the smallest slice of a torus.
    """
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    plans, refused = enumerate_plans(
        request.model, request.engine, placement, request.filters, request.workload.weights
    )
    plans, undrafted = _with_draft(request, plans)
    plans, unpriced = _with_kernels(request, placement, plans)
    refused = [*undrafted, *refused, *unpriced]  # what holds for all plans first
    found: list[Results] = []
    for setting, alike in _by_structure(request, placement, plans):
        results, dropped = _alike(request, setting, alike)
        refused += dropped
        if results is not None:
            found.append(results)
    return Priced(placement, len(plans), Results.joined(found) if found else None, refused)


def _with_draft(request: Request, plans: list[Plan]) -> tuple[list[Plan], list[Refused]]:
    """The plans over whose tensor-parallel group the draft divides, and the others refused."""
    speculation = request.workload.speculation
    if speculation is None:
        return plans, []
    reasons = {plan: draft_refusal(speculation.draft, request.engine, plan) for plan in plans}
    refused = [Refused(plan, reason) for plan, reason in reasons.items() if reason]
    return [plan for plan in plans if not reasons[plan]], refused


def _with_kernels(request: Request, placement: Placement, plans: list[Plan]) -> tuple[list[Plan], list[Refused]]:
    """The plans whose collectives the engine has kernels for, and the others refused; an error if none is left."""
    network = Network(placement, request.engine)
    reasons: dict[tuple[str, int], str | None] = {}

    def reason(plan: Plan) -> str | None:
        needed = [("all_reduce", plan.tp), ("all_gather", plan.tp), ("send", plan.pp if plan.pp == 1 else 2)]
        needed += [("all_to_all", plan.tp)] if "batch" in (plan.attention, plan.prefill_attention) else []
        for op, ranks in needed:
            if (op, ranks) not in reasons:
                reasons[op, ranks] = network.refusal(op, ranks)
        return next((found for need in needed if (found := reasons[need])), None)

    refused = [Refused(plan, found) for plan in plans if (found := reason(plan))]
    without = {each.plan for each in refused}
    return [plan for plan in plans if plan not in without], refused


def most_requests(request: Request) -> list[tuple[Plan, Setting, float, float]]:
    """(plan, setting, bytes of the fullest chip before any KV, requests that fit) of every plan that the rules allow.

    Raises:
        InputError, NoPlanError: as `price_all`.
    """
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    plans, _ = enumerate_plans(request.model, request.engine, placement, request.filters, request.workload.weights)
    plans, _ = _with_draft(request, plans)
    found = []
    for setting, alike in _by_structure(request, placement, plans):
        fitted = fit(setting, _rows(request, alike, np.arange(len(alike)), 1.0), clip=False)
        fits = fitted.outside + setting.budget.limit <= setting.budget.chip * (1 + 1e-9)
        requests = np.where(fits, fitted.max_concurrency, 0.0)
        found += list(zip(alike, [setting] * len(alike), fitted.weights + fitted.other, requests, strict=True))
    return found


def _by_structure(request: Request, placement: Placement, plans: list[Plan]) -> Iterator[tuple[Setting, list[Plan]]]:
    structures = [Structure(plan.attention, plan.prefill_attention) for plan in plans]
    for structure in dict.fromkeys(structures):
        alike = [plan for plan, own in zip(plans, structures, strict=True) if own == structure]
        yield setting_of(request, placement, structure), alike


def setting_of(request: Request, placement: Placement, structure: Structure) -> Setting:
    """What all rows of a request with this structure share."""
    work, price_given = request.workload, request.usd_per_chip_hour
    formats = formats_of(request.model, request.hardware, request.engine, work.weights, work.kv_cache)
    listed = request.hardware.price
    return Setting(
        request.model,
        request.hardware,
        request.engine,
        placement,
        formats,
        structure,
        Budget.of(request.hardware, request.engine, request.limits.memory, request.limits.memory_fraction),
        work.schedule or request.engine.scheduler.schedule,
        work.arrivals or request.engine.scheduler.arrivals,
        price_given if price_given is not None else (listed.usd_per_chip_hour if listed else None),
        drafting_of(request, formats),
    )


def drafting_of(request: Request, target: Formats) -> Drafting | None:
    """What drafts beside a target of these formats, if anything does."""
    speculation = request.workload.speculation
    if speculation is None or not speculation.tokens:
        return None
    return Drafting.of(
        speculation.draft,
        target,
        lambda model, cache: formats_of(model, request.hardware, request.engine, None, cache),
    )


def _rows(request: Request, plans: list[Plan], which: NDArray[np.intp], concurrency: Array | float) -> Rows:
    work = request.workload
    degrees = {name: np.array([getattr(plan, name) for plan in plans])[which] for name in ("tp", "pp", "dp")}
    return Rows.of(
        **degrees,
        isl=work.isl,
        osl=work.osl,
        concurrency=concurrency,
        max_context=work.max_context or 0,
        prefix_hit=work.prefix_hit,
        **columns_of(work.speculation),
    )


def _alike(request: Request, setting: Setting, plans: list[Plan]) -> tuple[Results | None, list[Refused]]:
    """Plans of one structure, each at every concurrency that is looked at."""
    asked = request.workload.concurrency
    if asked is None and request.objective not in SEARCHED and not request.pareto:
        asked = 1
    first = fit(setting, _rows(request, plans, np.arange(len(plans)), asked or 1), clip=False)
    reasons = memory_reasons(setting, first, np.full(len(plans), asked or 1.0))
    refused = [Refused(plan, reason, "memory") for plan, reason in zip(plans, reasons, strict=True) if reason]
    which = np.flatnonzero([reason is None for reason in reasons])
    if not len(which):
        return None, refused
    concurrency = np.full(len(which), float(asked or 1))
    if asked is None:
        which, concurrency = _loads(which, first.max_concurrency[which])
    results = _results(request, setting, plans, which, concurrency)
    if asked is None and any(getattr(request.limits, name) is not None for name in TIMES):
        kept = within(request.limits, {name: results[f"{name}_ms"] for name in TIMES})
        which, most = _most_in_time(request, setting, plans, which, concurrency, kept)
        if len(which):
            results = Results.joined([results, _results(request, setting, plans, which, most)])
    return results, refused


def _results(
    request: Request, setting: Setting, plans: list[Plan], which: NDArray[np.intp], concurrency: Array
) -> Results:
    rows = _rows(request, plans, which, concurrency)
    fitted = fit(setting, rows, clip=False)
    gpus = np.full(rows.length, float(request.gpus))
    return results_of(setting, plans, which, gpus, request.objective, rows, fitted, price(setting, rows, fitted))


def _loads(which: NDArray[np.intp], most: Array) -> tuple[NDArray[np.intp], Array]:
    """Every plan at powers of two, the halves between them, and its exact capacity: (plans, concurrencies).

    Rows of a plan stand together, loads ascending.
    """
    top = int(np.ceil(np.log2(np.max(most)))) + 1
    steps = np.unique([step for power in range(top + 1) for step in (2.0**power, np.floor(1.5 * 2.0**power))])
    loads = [np.append(steps[steps < limit], limit) for limit in most]
    return np.repeat(which, [len(load) for load in loads]), np.concatenate(loads)


def _most_in_time(
    request: Request,
    setting: Setting,
    plans: list[Plan],
    which: NDArray[np.intp],
    concurrency: Array,
    kept: NDArray[np.bool_],
) -> tuple[NDArray[np.intp], Array]:
    """The largest load between two of `_loads` that keeps the limits on time, of every plan that has one.

    A limit on time is a capacity, as memory is one: with the grid's loads alone, plans would be ranked by how near to
    their capacity one of these happens to lie. Times are taken to grow from the largest load of the grid that keeps
    the limits to the next one; what is found keeps them in any case, and one request more does not.

    Args:
        request: has the limits.
        setting: what all plans share.
        plans: the distinct plans.
        which: index of each row's plan in them; rows of a plan stand together, its loads ascending.
        concurrency: each row's load.
        kept: whether it keeps the limits.
    """
    keeping = np.flatnonzero(kept)
    last = keeping[np.diff(which[keeping], append=-1) != 0]
    last = last[np.diff(which, append=-1)[last] == 0]  # a load of the same plan follows, and breaks a limit
    which, start, high = which[last], concurrency[last], concurrency[last + 1]
    low = start
    while np.any(high - low > 1):
        middle = np.floor((low + high) / 2)
        rows = _rows(request, plans, which, middle)
        priced = price(setting, rows, fit(setting, rows, clip=False))
        keeps = within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    return which[low > start], low[low > start]


def within(limits: Limits, times: Mapping[str, Array]) -> NDArray[np.bool_]:
    """Whether rows keep the limits on time, given in ms by name; a time that answers do not have breaks none."""
    kept = np.ones(len(times["latency"]), dtype=bool)
    for name in TIMES:
        limit = getattr(limits, name)
        if limit is not None:
            kept &= ~(times[name] > limit / MS)
    return kept


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
        elif fitted.by_memory[index] >= concurrency[index]:
            reasons[index] = (
                f"the engine runs at most {_sequences(setting.engine.scheduler.max_sequences)} a replica"
                f"{', and as many as its tokens of an iteration leave for drafts' if setting.drafting else ''}, "
                f"{fitted.max_concurrency[index]:.0f} in all, {concurrency[index]:.0f} asked; "
                f"there is KV room for {fitted.by_memory[index]:.0f}"
            )
        else:
            reasons[index] = (
                f"KV room for {fitted.max_concurrency[index]:.0f} requests of {fitted.needed[index]:.0f} tokens, "
                f"{concurrency[index]:.0f} asked"
            )
    return reasons


def _sequences(count: int) -> str:
    return f"{count} sequence{'' if count == 1 else 's'}"
