"""Where the time and the memory of one plan go: every operation and transfer of its TTFT and TPOT, beside its floor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from planner.arriving import Steady, mark_arrivals, queue_wait
from planner.costs.memory import room
from planner.costs.roofline import BOUNDS, Parts
from planner.costs.rows import Rows, structure_of
from planner.costs.serving import OWN, STEP, Setting, fit, itemise, replica_of
from planner.costs.speculation import columns_of
from planner.costs.terms import Key, Term, Terms, Work
from planner.errors import NoPlanError
from planner.explaining.goal import Goal
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.pricing import memory_reasons, setting_of
from planner.request import Request
from planner.results import Results, results_of

FLOORS = ("compute", "memory", "network")
"""What can set a floor."""
_LAYOUTS = ("attention", "prefill_attention", "ffn", "prefill_ffn")


class Item(NamedTuple):
    """One operation or transfer in one phase of a time."""

    phase: str
    name: str
    parts: dict[str, float]
    """Seconds by bound."""
    work: dict[str, float]
    """Of `terms.Work`: FLOPs, bytes, and the seconds of the floor by what sets it."""

    @property
    def seconds(self) -> float:
        """Its time."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """The largest of its parts."""
        return max(BOUNDS, key=lambda bound: abs(self.parts[bound]))

    @property
    def floor(self) -> float:
        """Seconds below which no kernel gets, were all that can overlap to overlap."""
        return max(0.0, *(self.work[f"least_{what}"] for what in FLOORS))

    @property
    def floor_bound(self) -> str:
        """What sets the floor."""
        return max(FLOORS, key=lambda what: self.work[f"least_{what}"])

    def times(self, factor: float) -> Item:
        """The same, so many times over."""
        scaled = ({name: value * factor for name, value in each.items()} for each in (self.parts, self.work))
        return Item(self.phase, self.name, *scaled)


class Times(NamedTuple):
    """TTFT or TPOT as its items; `total` is what pricing says, which they add up to."""

    items: tuple[Item, ...]
    total: float

    def phase(self, name: str) -> Times:
        """The items of one phase, with their sum."""
        found = tuple(item for item in self.items if item.phase == name)
        return Times(found, sum(item.seconds for item in found))

    @property
    def phases(self) -> list[str]:
        """Phases in their order."""
        return list(dict.fromkeys(item.phase for item in self.items))

    @property
    def whole(self) -> Item:
        """All items as one: its floor is that of the sums, since different items can overlap."""
        return summed("", "all", self.items)


class Breakdown(NamedTuple):
    """One plan of a request, priced and itemised."""

    request: Request
    plan: Plan
    setting: Setting
    results: Results
    """One row."""
    ttft: Times
    tpot: Times
    memory: dict[str, float]
    """Bytes of the fullest chip: weights, KV, activations, runtime, free; they add up to the budget."""

    @property
    def row(self) -> dict[str, Any]:
        """The result row."""
        return self.results.row(0)

    @property
    def goal(self) -> Goal:
        """What the request minimises, of this plan."""
        return Goal.of(self.row, self.request.objective)

    def goal_items(self) -> dict[Key, float]:
        """The goal by item, in its unit; the values add up to it."""
        goal = self.goal
        found: dict[Key, float] = {}
        for times, weight in ((self.ttft, goal.first), (self.tpot, goal.later)):
            for item in times.items if weight else ():
                key = (item.phase, item.name)
                found[key] = found.get(key, 0.0) + weight * item.seconds
        return found

    def goal_value(self) -> float:
        """The goal, in its unit."""
        return float(self.goal.value(self.ttft.total, self.tpot.total))


def summed(phase: str, name: str, items: tuple[Item, ...]) -> Item:
    """Several items as one."""
    return Item(
        phase,
        name,
        {bound: sum(item.parts[bound] for item in items) for bound in BOUNDS},
        {what: sum(item.work[what] for item in items) for what in Work._fields},
    )


def pinned(request: Request, plan: Plan) -> Request:
    """The request with this plan as the only one looked at."""
    return request._replace(filters=Filters(**{name: (getattr(plan, name),) for name in Filters._fields}))


def plan_of(results: Results, index: int) -> Plan:
    """The plan of a result row."""
    row = results.row(index)
    chosen = {name: row[name] for name in ("tp", "pp", "dp", "ep", "cp", *_LAYOUTS)}
    return Plan(**chosen, grid=row["grid"] or "")


def load_of(results: Results, index: int) -> float:
    """Requests in flight of a result row: the mean under an arrival rate."""
    row = results.row(index)
    return float(row["in_flight"] or row["concurrency"])


def breakdown(request: Request, plan: Plan, concurrency: float) -> Breakdown:
    """A plan of a request at a load, priced and itemised.

    Args:
        request: what is asked; its filters and its concurrency are not looked at.
        plan: one that the rules allow.
        concurrency: requests in flight in the whole deployment; with an arrival rate the mean, which need not be whole.

    Raises:
        NoPlanError: it does not fit.
    """
    work = request.workload
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    setting = setting_of(request, placement, structure_of(plan))
    rows = Rows.of_plans(
        [plan], isl=work.isl, osl=work.osl, concurrency=concurrency,
        max_context=work.max_context or 0, prefix_hit=work.prefix_hit, **columns_of(work.speculation),
    )  # fmt: skip
    fitted = fit(setting, rows, clip=False)
    reason = memory_reasons(setting, fitted, rows.concurrency)[0]
    if reason is not None:
        raise NoPlanError(f"{plan.label}: {reason}")
    arrives = work.arrival_rate is not None
    if arrives:
        fitted = fitted._replace(batch=np.maximum(1.0, rows.concurrency / rows.dp))
    priced = itemise(setting._replace(mean_load=arrives), rows, fitted)
    gpus = np.full(1, float(request.gpus))
    results = results_of(setting, [plan], np.zeros(1, dtype=int), gpus, request.objective, rows, fitted, priced)
    if arrives:
        rate = priced.requests_per_s / rows.dp
        wait = queue_wait(rate, priced.prompt, priced.prompt_variation)
        state = Steady(
            rows.concurrency / rows.dp,
            rate,
            rate * priced.prompt,
            wait,
            priced,
        )
        results = mark_arrivals(results, state, float(work.arrival_rate or 0), np.full(1, np.nan))
    ttft, tpot = (_times(parts) for parts in (priced.ttft_parts, priced.tpot_parts))
    if work.osl == 1:
        tpot = Times((), 0.0)
    replica = replica_of(setting, rows)
    space = room(
        request.model, request.engine, replica.shard, replica.stages, setting.formats, setting.structure, setting.budget
    )
    runtime = float(np.max(space.runtime))
    weights, kv, other = (float(column[0]) for column in (fitted.weights, fitted.kv, fitted.other))
    memory = {
        "weights": weights,
        "KV": kv,
        "activations": other - runtime,
        "runtime": runtime,
        "free": setting.budget.limit - weights - kv - other,
    }
    return Breakdown(request, plan, setting, results, ttft, tpot, memory)


def _times(parts: Parts) -> Times:
    assert isinstance(parts, Terms)
    return Times(tuple(_items(parts)), float(parts.total[0]))


def _items(terms: Terms) -> Iterator[Item]:
    """The items of the only row; those that take and do nothing are left out."""
    for (phase, name), term in terms.items.items():
        item = _item(phase, name, term)
        if any(item.parts.values()) or any(item.work.values()):
            yield item


def _item(phase: str, name: str, term: Term) -> Item:
    parts = {bound: float(np.ravel(value)[0]) for bound, value in zip(BOUNDS, term.parts, strict=True)}
    work = {what: float(np.ravel(value)[0]) for what, value in term.work._asdict().items()}
    return Item(phase, name, parts, work)


def floored(times: Times) -> Times:
    """The phase of a time whose floor means something: the prompt's own passes, or the decode step."""
    return times.phase(STEP if STEP in times.phases else OWN)
