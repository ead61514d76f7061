"""Plans against each other: what each takes and holds, and the load and the context at which their order flips.

A flip is found by our own pricing: both plans are priced over a range, and where the leader changes between two points
the place is bisected down to one request or one token. Several flips between two points of the grid that cancel are
not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.rows import Rows, structure_of
from planner.costs.serving import Fit, Setting, fit, price
from planner.costs.speculation import columns_of
from planner.errors import NoPlanError
from planner.explaining.breakdown import Breakdown, breakdown, load_of, pinned, plan_of
from planner.explaining.goal import goal_value
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import memory_reasons, setting_of, within
from planner.ranking import rank
from planner.request import TIMES, Request
from planner.units import HOUR, MS

Array = NDArray[np.float64]
Axis = Literal["concurrency", "isl"]
GRID = {"concurrency": 64, "isl": 64}
"""Points of a range that are looked at, in equal ratios."""
SEARCHED_GRID = 24
"""The same where each point is a search for the best load."""
EQUAL = 1e-9
"""Relative difference below which neither leads."""


class Candidate(NamedTuple):
    """One plan on one machine, with the load that it is compared at."""

    label: str
    request: Request
    """Its filters leave only this plan."""
    plan: Plan
    concurrency: int
    load: float
    """The same; under an arrival rate the mean, which need not be whole."""

    @property
    def searches(self) -> bool:
        """Whether its load is chosen for it."""
        return self.request.searches

    def setting(self) -> Setting:
        """What prices it."""
        placement = Placement.of(self.request.hardware, self.request.gpus, self.request.slice)
        return setting_of(self.request, placement, structure_of(self.plan))

    def breakdown(self) -> Breakdown:
        """It, itemised.

        Raises:
            NoPlanError: it does not fit.
        """
        return breakdown(self.request, self.plan, self.load)


class Room(NamedTuple):
    """What a candidate's memory holds."""

    requests: int
    """Of isl + osl tokens, in the whole deployment."""
    memory_ends: bool
    """Whether it is memory that holds no more; else the engine runs no more sequences."""
    isl: int
    """The longest prompt at the load that is compared, 1 where it is searched: what ends it is memory or the model."""
    ends: str
    """Which of the two: `memory` or `context`."""


class Flip(NamedTuple):
    """A value from which on another candidate leads."""

    at: int
    """At `at` the other leads, at `at` - 1 it does not."""
    before: int
    after: int
    """Indices of the candidates that lead."""
    refused: bool
    """The one behind cannot run there at all: no room, or a limit on time."""


class Contest(NamedTuple):
    """Two candidates over a range of loads or prompts."""

    axis: Axis
    low: int
    high: int
    pair: tuple[int, int]
    flips: tuple[Flip, ...]
    leader: int | None
    """Who leads at the low end; none where neither does."""
    ahead: tuple[float, float]
    """How far the first is ahead of the second at either end: goal of the second / goal of the first - 1."""


def candidate(label: str, request: Request, plan: Plan | None) -> Candidate:
    """A candidate; without a plan it is the winner of the request's ranking.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: the plan cannot run, or no plan can.
    """
    ranking = rank(request if plan is None else pinned(request, plan))
    # on as many chips as were found, with as many drafted tokens
    request = ranking.request._replace(filters=request.filters, fewest=False)
    chosen = plan_of(ranking.results, 0)
    concurrency, load = ranking.results.row(0)["concurrency"], load_of(ranking.results, 0)
    return Candidate(label or chosen.label, pinned(request, chosen), chosen, concurrency, load)


def goals(one: Candidate, concurrency: Any, isl: Any) -> Array:
    """The goal at given loads and prompts, in its unit; infinite where a plan cannot run or breaks a limit on time.

    Args:
        one: a candidate.
        concurrency: requests in flight in the whole deployment, a number or an array.
        isl: tokens of a prompt, likewise.
    """
    request, plan, setting = one.request, one.plan, one.setting()
    work = request.workload
    rows = Rows.of_plans(
        [plan], isl=isl, osl=work.osl, concurrency=concurrency,
        max_context=work.max_context or 0, prefix_hit=work.prefix_hit, **columns_of(work.speculation),
    )  # fmt: skip
    fitted = fit(setting, rows, clip=False)
    fits = np.array([reason is None for reason in memory_reasons(setting, fitted, rows.concurrency)])
    priced = price(setting, rows, fitted)
    fits &= within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
    if request.objective in TIMES:
        value = np.asarray(getattr(priced, request.objective)) / MS
    else:
        chip_seconds = request.gpus / (priced.requests_per_s * work.osl)
        dollars = setting.usd_per_chip_hour if request.objective == "cost" else None
        value = chip_seconds / MS if dollars is None else chip_seconds * dollars / HOUR * 1e6
    return np.where(fits & np.isfinite(value), value, np.inf)


def _best(one: Candidate, isl: int) -> float:
    """The goal at the best load for prompts of a length."""
    changed = one.request._replace(workload=one.request.workload._replace(isl=isl))
    try:
        return goal_value(rank(changed).results, 0, changed.objective)
    except NoPlanError:
        return float("inf")


def evaluate(one: Candidate, axis: Axis, values: NDArray[np.int_]) -> Array:
    """The goal along an axis: over loads at the prompt that is asked, or over prompts at the load that is compared."""
    if axis == "concurrency":
        return goals(one, values, one.request.workload.isl)
    if one.searches:
        return np.array([_best(one, int(value)) for value in values])
    return goals(one, float(one.concurrency), values)


def contest(candidates: Sequence[Candidate], pair: tuple[int, int], axis: Axis, high: int) -> Contest:
    """Two candidates over whole numbers from 1 to `high`, with every flip that the grid shows."""
    first, second = (candidates[index] for index in pair)
    points = SEARCHED_GRID if axis == "isl" and (first.searches or second.searches) else GRID[axis]
    grid = np.unique(np.round(np.geomspace(1, high, points)).astype(int))

    def priced(values: NDArray[np.int_]) -> tuple[Array, Array]:
        return evaluate(first, axis, values), evaluate(second, axis, values)

    ours, theirs = priced(grid)
    leads = _leads(ours, theirs)
    known = np.flatnonzero(leads)
    turns = known[1:][leads[known][1:] != leads[known][:-1]]
    before = known[:-1][leads[known][1:] != leads[known][:-1]]
    low, top, then = grid[before], grid[turns], leads[turns]
    while len(low) and np.any(top - low > 1):
        middle = (low + top) // 2
        new = _leads(*priced(middle)) == then
        low, top = np.where(new, low, middle), np.where(new, middle, top)
    flips = []
    if len(top):
        at_ours, at_theirs = priced(top)
        for at, leader, goal, other in zip(top, then, at_ours, at_theirs, strict=True):
            after = pair[0] if leader > 0 else pair[1]
            flips.append(
                Flip(int(at), pair[1] if after == pair[0] else pair[0], after, bool(np.isinf(max(goal, other))))
            )
    leader = None if not len(known) else pair[0] if leads[known[0]] > 0 else pair[1]
    with np.errstate(invalid="ignore"):
        ahead = theirs / ours - 1
    return Contest(axis, 1, high, pair, tuple(flips), leader, (float(ahead[0]), float(ahead[-1])))


def _leads(ours: Array, theirs: Array) -> NDArray[np.int_]:
    """1 where the first leads, -1 where the second does, 0 where neither."""
    first = ours < np.where(np.isfinite(theirs), theirs * (1 - EQUAL), theirs)
    second = theirs < np.where(np.isfinite(ours), ours * (1 - EQUAL), ours)
    leads: NDArray[np.int_] = first.astype(int) - second.astype(int)
    return leads


def room(one: Candidate) -> Room:
    """How many requests fit, and how long a prompt may get."""
    work, model, setting = one.request.workload, one.request.model, one.setting()
    longest = max(1, max(model.max_context, work.max_context or 0) - int(np.ceil(work.osl)))

    def fitted(isl: int) -> Fit:
        rows = Rows.of_plans(
            [one.plan], isl=isl, osl=work.osl, concurrency=1.0,
            max_context=work.max_context or 0, prefix_hit=work.prefix_hit, **columns_of(work.speculation),
        )  # fmt: skip
        return fit(setting, rows, clip=False)

    load = 1 if one.searches else one.concurrency  # a load that is searched shrinks as the prompt grows
    now = fitted(int(work.isl))
    low, high = int(work.isl), longest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fitted(middle).max_concurrency[0] >= load else (low, middle)
    requests = int(now.max_concurrency[0])
    return Room(requests, bool(now.by_memory[0] <= requests), low, "context" if low >= longest else "memory")


def ranges(candidates: Sequence[Candidate], rooms: Sequence[Room]) -> dict[Axis, int]:
    """The ends of the ranges in which flips are looked for: what the roomiest holds, what every model can attend to."""
    longest = min(
        max(one.request.model.max_context, one.request.workload.max_context or 0)
        - int(np.ceil(one.request.workload.osl))
        for one in candidates
    )
    return {"concurrency": max(2, *(each.requests for each in rooms)), "isl": max(2, longest)}
