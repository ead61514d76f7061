"""All plans of a request, priced at every load that is looked at; those that do not fit refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arriving import IDLE, Reach, load_at, mark_arrivals, reach, steady
from planner.costs.collectives import Network
from planner.costs.layers import Formats, Structure
from planner.costs.memory import Budget
from planner.costs.rows import PLAN_COLUMNS, Rows, structure_of
from planner.costs.serving import Fit, Setting, fit, formats_of, price
from planner.costs.speculation import Drafting, columns_of
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import draft_refusal
from planner.plans.space import Refused, enumerate_plans
from planner.request import TIMES, Limits, Request, check
from planner.results import Results, results_of
from planner.specs.engine import Scheduler
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
    unmet: Results | None = None
    """With an arrival rate, of plans that fit: each as it would be with one request in flight, if none is left."""
    highest: tuple[Plan, float] | None = None
    """With an arrival rate, the plan that sustains most within the limits, and how many requests per second."""
    needed: tuple[Plan, int] | None = None
    """Where chips are counted, the plan that does with the fewest, however many there may be, and how many."""


def price_all(request: Request) -> Priced:
    """Every plan of a request, priced.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: fewer chips than the smallest slice of a torus.
    """
    placement, plans, refused = feasible(request)
    found: list[Results] = []
    unmet: list[Results] = []
    highest: list[tuple[Plan, float]] = []
    for setting, alike in by_structure(request, placement, plans):
        if request.workload.arrival_rate is not None:
            served = _served(request, setting, alike, request.workload.arrival_rate)
            results, dropped = served.results, served.refused
            unmet += [served.unmet] if served.unmet is not None else []
            highest += [served.highest] if served.highest is not None else []
        else:
            results, dropped = at_every_load(request, setting, alike)
        refused += dropped
        if results is not None:
            found.append(results)
    return Priced(
        placement,
        len(plans),
        Results.joined(found) if found else None,
        refused,
        Results.joined(unmet) if unmet else None,
        max(highest, key=lambda each: each[1]) if highest else None,
    )


def feasible(request: Request) -> tuple[Placement, list[Plan], list[Refused]]:
    """(the machine, plans that rules and kernels allow, the refused ones), before memory and any price.

    Raises:
        InputError, NoPlanError: as `price_all`.
    """
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    plans, refused = enumerate_plans(
        request.model, request.engine, placement, request.filters, request.workload.weights
    )
    plans, undrafted = with_draft(request, plans)
    plans, unpriced = with_kernels(request, placement, plans)
    return placement, plans, [*undrafted, *refused, *unpriced]  # what holds for all plans first


def with_draft(request: Request, plans: list[Plan]) -> tuple[list[Plan], list[Refused]]:
    """The plans over whose tensor-parallel group the draft divides, and the others refused."""
    speculation = request.workload.speculation
    if speculation is None:
        return plans, []
    reasons = {plan: draft_refusal(speculation.draft, request.engine, plan) for plan in plans}
    refused = [Refused(plan, reason) for plan, reason in reasons.items() if reason]
    return [plan for plan in plans if not reasons[plan]], refused


class _Served(NamedTuple):
    """Plans of one structure under an arrival rate; as in `Priced`."""

    results: Results | None
    refused: list[Refused]
    unmet: Results | None
    highest: tuple[Plan, float] | None


def _served(request: Request, setting: Setting, plans: list[Plan], rate: float) -> _Served:
    """Plans at the load at which they serve as many requests as come; those that cannot are refused."""
    known = Held.of(request, setting, plans)
    if not known.plans:
        return _Served(None, known.refused, None, None)
    plans, rows, found = known.plans, known.rows, known.reach
    highest = found.rate * rows.dp
    serves = highest >= rate * (1 - 1e-9)
    refused = list(known.refused)
    for plan, place in zip(plans, range(len(plans)), strict=True):
        if not serves[place] and found.rate[place] > 0:
            within_limits = " within the limits" if found.bounded[place] else ""
            reason = f"sustains at most {floored(highest[place])} requests/s{within_limits}, {rate:g} asked"
            refused.append(Refused(plan, reason, "rate"))
    unmet = known.idle(request, setting, np.full(len(plans), float(request.gpus)))
    refused += [
        Refused(plans[place], over_limits(request.limits, unmet, place), "slo")
        for place in np.flatnonzero(found.rate == 0).tolist()
    ]
    best = int(np.argmax(highest))
    top = (plans[best], float(highest[best])) if highest[best] > 0 else None
    index = np.flatnonzero(serves)
    if not len(index):
        return _Served(None, refused, unmet, top)
    chips = np.full(len(index), float(request.gpus))
    return _Served(known.take(index).at(request, setting, chips), refused, None, top)


class Held(NamedTuple):
    """Plans that fit, with how far each goes under an arrival rate; those that do not fit are refused."""

    plans: list[Plan]
    rows: Rows
    fitted: Fit
    reach: Reach
    refused: list[Refused]

    @classmethod
    def of(cls, request: Request, setting: Setting, plans: list[Plan]) -> Held:
        """Plans of one structure."""
        rows = rows_of(request, plans, np.arange(len(plans)), 1.0)
        fitted = fit(setting, rows, clip=False)
        reasons = memory_reasons(setting, fitted, np.ones(len(plans)))
        refused = [Refused(plan, reason, "memory") for plan, reason in zip(plans, reasons, strict=True) if reason]
        index = np.flatnonzero([reason is None for reason in reasons])
        rows, fitted = Rows(*(column[index] for column in rows)), Fit(*(column[index] for column in fitted))
        none = np.zeros(0)
        found = Reach(none, none, none > 0, none[:, None], none[:, None])
        if len(index):
            found = reach(setting, rows, fitted, fitted.max_concurrency / rows.dp, request.limits)
        return cls([plans[place] for place in index], rows, fitted, found, refused)

    def take(self, index: NDArray[np.intp]) -> Held:
        """Some of the plans."""
        rows, fitted = (Rows(*(column[index] for column in self.rows)), Fit(*(column[index] for column in self.fitted)))
        return Held([self.plans[place] for place in index], rows, fitted, self.reach.take(index), self.refused)

    def times(self, dp: Array) -> Held:
        """So many replicas of each, none of whose stages cross a boundary that those now do not."""
        plans = [plan._replace(dp=int(count)) for plan, count in zip(self.plans, dp, strict=True)]
        ratio = dp / self.rows.dp
        fitted = self.fitted._replace(
            max_concurrency=self.fitted.max_concurrency * ratio, by_memory=self.fitted.by_memory * ratio
        )
        return self._replace(plans=plans, rows=self.rows._replace(dp=dp), fitted=fitted)

    def loads(self, setting: Setting, rate: float) -> Array:
        """[plans] requests in flight per replica at which they serve this rate, which must be within their reach."""
        shares = np.minimum(rate / self.rows.dp, self.reach.rate)
        return load_at(setting, self.rows, self.fitted, self.reach, shares)

    def at(self, request: Request, setting: Setting, chips: Array) -> Results:
        """Their result rows where they serve the rate that is asked."""
        rate = request.workload.arrival_rate or 0.0
        return self._results(request, setting, chips, self.loads(setting, rate), rate)

    def idle(self, request: Request, setting: Setting, chips: Array) -> Results:
        """Their result rows with next to nothing in flight: the times that no rate makes shorter."""
        return self._results(
            request, setting, chips, np.full(len(self.plans), IDLE), request.workload.arrival_rate or 0
        )

    def _results(self, request: Request, setting: Setting, chips: Array, loads: Array, rate: float) -> Results:
        rows = self.rows._replace(concurrency=loads * self.rows.dp)
        fitted = fit(setting, rows, clip=False)
        found = steady(setting, rows, fitted, loads)
        fitted = fitted._replace(batch=np.maximum(1.0, np.ceil(loads * (1 - 1e-9))))
        which = np.arange(len(self.plans))
        results = results_of(setting, self.plans, which, chips, request.objective, rows, fitted, found.priced)
        with np.errstate(divide="ignore"):
            return mark_arrivals(results, found, rate, self.reach.rate * self.rows.dp)


def floored(value: float) -> str:
    """Four digits, not above the value, so that it can be asked for."""
    scale = 10.0 ** (3 - int(np.floor(np.log10(value))))
    return f"{np.floor(value * scale * (1 + 1e-12)) / scale:.12g}"


def over_limits(limits: Limits, results: Results, index: int) -> str:
    """Which limits on time a row breaks, and by how much."""
    parts = []
    for name in TIMES:
        limit, value = getattr(limits, name), results[f"{name}_ms"][index]
        if limit is not None and value > limit / MS:
            parts.append(f"{name} {value:.4g} ms > {limit / MS:g} ms")
    return ", ".join(parts) or "no load keeps all limits at once"


def with_kernels(request: Request, placement: Placement, plans: list[Plan]) -> tuple[list[Plan], list[Refused]]:
    """The plans whose collectives the engine has kernels for, and the others refused; an error if none is left."""
    network = Network(placement, request.engine)
    reasons: dict[tuple[str, int], str | None] = {}

    def reason(plan: Plan) -> str | None:
        needed = [("all_reduce", plan.tp), ("all_gather", plan.tp), ("send", plan.pp if plan.pp == 1 else 2)]
        needed += [("all_to_all", plan.tp)] if "batch" in (plan.attention, plan.prefill_attention) else []
        needed += [(op, plan.cp) for op in ("all_gather", "all_to_all") if plan.cp > 1]
        needed += [("send", 2)] if plan.cp > 1 else []
        needed += [(op, ranks) for ranks in _parts(plan) for op in ("all_gather", "reduce_scatter", "all_to_all")]
        for op, ranks in needed:
            if (op, ranks) not in reasons:
                reasons[op, ranks] = network.refusal(op, ranks)
        return next((found for need in needed if (found := reasons[need])), None)

    refused = [Refused(plan, found) for plan in plans if (found := reason(plan))]
    without = {each.plan for each in refused}
    return [plan for plan in plans if plan not in without], refused


def _parts(plan: Plan) -> list[int]:
    """Sizes of the groups along the axes of a plan's grid."""
    if (plan.ffn, plan.prefill_ffn) == ("1d", "1d"):
        return []
    x, y, z = plan.axes
    return [size for size in dict.fromkeys((x, y, z, x * y, y * z, x * y * z)) if size > 1]


def most_requests(request: Request) -> list[tuple[Plan, Setting, float, float]]:
    """(plan, setting, bytes of the fullest chip before any KV, requests that fit) of every plan that the rules allow.

    Raises:
        InputError, NoPlanError: as `price_all`.
    """
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    plans, _ = enumerate_plans(request.model, request.engine, placement, request.filters, request.workload.weights)
    plans, _ = with_draft(request, plans)
    found = []
    for setting, alike in by_structure(request, placement, plans):
        fitted = fit(setting, rows_of(request, alike, np.arange(len(alike)), 1.0), clip=False)
        fits = fitted.outside + setting.budget.limit <= setting.budget.chip * (1 + 1e-9)
        requests = np.where(fits, fitted.max_concurrency, 0.0)
        found += list(zip(alike, [setting] * len(alike), fitted.weights + fitted.other, requests, strict=True))
    return found


def by_structure(request: Request, placement: Placement, plans: list[Plan]) -> Iterator[tuple[Setting, list[Plan]]]:
    """Plans by what decides their lists of operations, each group with what prices it."""
    structures = [structure_of(plan) for plan in plans]
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
        lengths=work.lengths,
        drafting=drafting_of(request, formats),
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


def rows_of(request: Request, plans: list[Plan], which: NDArray[np.intp], concurrency: Array | float) -> Rows:
    """Rows of plans at loads: `which` is the index of each row's plan."""
    work = request.workload
    each = Rows.of_plans(plans, isl=0, osl=0, concurrency=0)
    degrees = {name: getattr(each, name)[which] for name in PLAN_COLUMNS}
    return Rows.of(
        **degrees,
        isl=work.isl,
        osl=work.osl,
        concurrency=concurrency,
        max_context=work.max_context or 0,
        prefix_hit=work.prefix_hit,
        **columns_of(work.speculation),
    )


def at_every_load(
    request: Request, setting: Setting, plans: list[Plan], chips: Array | None = None
) -> tuple[Results | None, list[Refused]]:
    """Plans of one structure, each at every concurrency that is looked at.

    Args:
        request: what is asked.
        setting: what all plans share.
        plans: of one structure.
        chips: [plans] that are paid for; none = those of the request.
    """
    asked = request.workload.concurrency
    if asked is None and not request.searches:
        asked = 1
    first = fit(setting, rows_of(request, plans, np.arange(len(plans)), asked or 1), clip=False)
    reasons = memory_reasons(setting, first, np.full(len(plans), asked or 1.0))
    refused = [Refused(plan, reason, "memory") for plan, reason in zip(plans, reasons, strict=True) if reason]
    which = np.flatnonzero([reason is None for reason in reasons])
    if not len(which):
        return None, refused
    concurrency = np.full(len(which), float(asked or 1))
    if asked is None:
        which, concurrency = _loads(which, first.max_concurrency[which])
    results = at_load(request, setting, plans, which, concurrency, chips)
    if asked is None and any(getattr(request.limits, name) is not None for name in TIMES):
        kept = within(request.limits, {name: results[f"{name}_ms"] for name in TIMES})
        which, most = _most_in_time(request, setting, plans, which, concurrency, kept)
        if len(which):
            results = Results.joined([results, at_load(request, setting, plans, which, most, chips)])
    return results, refused


def at_load(
    request: Request,
    setting: Setting,
    plans: list[Plan],
    which: NDArray[np.intp],
    concurrency: Array,
    chips: Array | None = None,
) -> Results:
    """Result rows of plans at loads: `which` is the index of each row's plan, `chips` as in `at_every_load`."""
    rows = rows_of(request, plans, which, concurrency)
    fitted = fit(setting, rows, clip=False)
    gpus = np.full(rows.length, float(request.gpus)) if chips is None else chips[which]
    return results_of(setting, plans, which, gpus, request.objective, rows, fitted, price(setting, rows, fitted))


def _loads(which: NDArray[np.intp], most: Array) -> tuple[NDArray[np.intp], Array]:
    """Every plan at powers of two, the halves between them, and its exact capacity: (plans, concurrencies).

    Rows of a plan stand together, loads ascending.
    """
    top = int(np.ceil(np.log2(np.max(most)))) + 1
    steps = np.array(sorted({step for power in range(top + 1) for step in (2.0**power, np.floor(1.5 * 2.0**power))}))
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
        rows = rows_of(request, plans, which, middle)
        priced = price(setting, rows, fit(setting, rows, clip=False))
        keeps = within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    return which[low > start], low[low > start]


def most_within(request: Request, setting: Setting, plans: list[Plan]) -> Array:
    """[plans] the most requests in flight that each holds within the limits on time, up to those asked; 0 = none.

    Args:
        request: what is asked.
        setting: what all plans share.
        plans: each holds one request.
    """
    every = np.arange(len(plans))
    room = fit(setting, rows_of(request, plans, every, 1.0), clip=False).max_concurrency
    asked = float(request.workload.concurrency or 1) * np.array([plan.dp for plan in plans])
    which, loads = _loads(every, np.minimum(room, asked))
    rows = rows_of(request, plans, which, loads)
    priced = price(setting, rows, fit(setting, rows, clip=False))
    kept = within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
    most = np.zeros(len(plans))
    np.maximum.at(most, which[kept], loads[kept])
    index, between = _most_in_time(request, setting, plans, which, loads, kept)
    most[index] = np.maximum(most[index], between)
    return np.asarray(np.floor(most / np.array([plan.dp for plan in plans])))


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
    grouped = setting.structure.attention == "data"
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
                f"the engine runs at most {_sequences(setting.engine.scheduler, grouped)} a replica"
                f"{', and as many as its tokens of an iteration leave for drafts' if setting.drafting else ''}, "
                f"{fitted.max_concurrency[index]:.0f} in all, {concurrency[index]:.0f} asked; "
                f"there is KV room for {fitted.by_memory[index]:.0f}"
            )
        else:
            held, free = fitted.kv[index], limit - fitted.weights[index] - fitted.other[index]
            # else it is pages still empty that would overflow, or another stage
            figures = f" ({held / GIB:.1f} GiB on the fullest chip, {free / GIB:.1f} GiB free)" if held > free else ""
            reasons[index] = (
                f"KV room for {fitted.max_concurrency[index]:.0f} requests of {fitted.needed[index]:.0f} tokens, "
                f"{concurrency[index]:.0f} asked{figures}"
            )
    return reasons


def _sequences(scheduler: Scheduler, grouped: bool) -> str:
    count = scheduler.max_sequences
    which = {"each": " in each group of", "shared": " shared out to the groups of"}[scheduler.group_sequences]
    return f"{count} sequence{'' if count == 1 else 's'}{which if grouped else ''}"
