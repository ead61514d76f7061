"""Where the best plan changes along one option: stretches of loads, prompts, tokens or chips, by bisection.

All plans are priced by our own model over a grid of values in equal ratios; where the first place changes between two
neighbours, the place is bisected down to one unit, every plan priced again each time, so that a third one which leads
in between is found too. A plan that leads only between two points of the grid where the same plan leads is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.rows import PLAN_COLUMNS, Rows
from planner.costs.serving import fit, price
from planner.costs.speculation import columns_of
from planner.errors import InputError, NoPlanError
from planner.explaining.breakdown import pinned, plan_of
from planner.explaining.goal import goal_value
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import by_structure, feasible, memory_reasons, within
from planner.ranking import rank
from planner.request import MOST, SEARCHED, TIMES, Request
from planner.results import Results
from planner.units import MS

Array = NDArray[np.float64]
Axis = Literal["concurrency", "isl", "tokens", "gpus"]
AXES: tuple[Axis, ...] = ("concurrency", "isl", "tokens", "gpus")
POINTS = 33
"""Values of the grid where all plans are priced together."""
SEARCHED_POINTS = 13
"""The same where each value is a ranking of its own."""
AHEAD = 3
"""Halvings whose values are priced together where that is one call: it takes hardly longer than for one of them."""
EQUAL = 1e-9
"""Relative difference below which a plan does not take the lead from another."""
Winner = tuple[Plan | None, float]
"""The plan that leads at a value with its goal; none where no plan runs."""


class Stretch(NamedTuple):
    """Neighbouring values over which one plan leads."""

    low: int
    high: int
    plan: Plan | None
    """none: no plan runs."""
    first: Results | None
    """The plan's row at `low`."""
    last: Results | None
    """The same at `high`."""
    next: str | None
    """Label of the plan that takes over behind `high`."""
    next_goal: float
    """Its goal at `high`: how far it was behind there; NaN where there is none."""


class Crossing(NamedTuple):
    """The stretches of a range, ascending and without gaps."""

    request: Request
    axis: Axis
    unit: int
    """What one step of the axis is: the tokens of a prompt where `tokens` vary, else 1."""
    stretches: tuple[Stretch, ...]
    plans: int
    """Plans that were priced at every value, on the chips of the highest one."""


def at(request: Request, axis: Axis, value: int) -> Request:
    """The request at a value of the axis: of `tokens`, so many prompts in one static batch."""
    work = request.workload
    if axis == "gpus":
        return request._replace(gpus=value)
    if axis == "isl":
        return request._replace(workload=work._replace(isl=value))
    if axis == "tokens":
        return request._replace(workload=work._replace(concurrency=value, schedule="static"))
    return request._replace(workload=work._replace(concurrency=value))


def crossing(request: Request, axis: Axis, low: int | None, high: int | None, tick: Callable[[], None]) -> Crossing:
    """The stretches over which one plan leads.

    Args:
        request: what is asked; the option that varies is not looked at.
        axis: that option.
        low: its least value; none = 1 (of gpus, what the smallest slice has).
        high: its greatest; none = what memory holds, the model attends to, or the request's chips.
        tick: called after every pricing.

    Raises:
        InputError: a range that is none, or a load to be searched where the load varies.
        NoPlanError: no plan runs anywhere in the range.
    """
    unit = round(request.workload.isl) if axis == "tokens" else 1
    request = at(request, axis, 1) if axis == "tokens" else request
    low, high = _range(request, axis, unit, low, high)
    winners = _ranked(request, axis, tick) if _is_ranked(request, axis) else _together(request, axis, tick)
    values = _grid(request, axis, low, high)
    found = dict(zip(values, winners(values), strict=True))
    if axis != "gpus" or request.hardware.torus is None:  # chips of a torus are slices, and all of them were looked at
        _bisect(found, winners, ahead=1 if _is_ranked(request, axis) else AHEAD)
    if all(plan is None for plan, _ in found.values()):
        rank(at(request, axis, low))  # says why
        raise NoPlanError(f"no plan runs between {axis} {low} and {high}")
    return Crossing(request, axis, unit, tuple(_stretches(request, axis, found)), _count(request, axis, high))


def _is_ranked(request: Request, axis: Axis) -> bool:
    searched = request.workload.concurrency is None and request.objective in SEARCHED
    return axis == "gpus" or (axis == "isl" and searched)


def _range(request: Request, axis: Axis, unit: int, low: int | None, high: int | None) -> tuple[int, int]:
    for name, value in (("--from", low), ("--to", high)):
        if value is not None and not unit <= value <= MOST:
            raise InputError(f"{name} {value}: expected {unit} to {MOST} {axis}")
    first, last = max(1, (low or unit) // unit), None if high is None else high // unit
    if axis == "isl":
        longest = max(request.model.max_context, request.workload.max_context or 0) - round(request.workload.osl)
        if last is not None and last > longest:
            raise InputError(
                f"--to {last}: with {request.workload.osl} tokens out, {request.model.name} takes prompts up to "
                f"{longest}; give --max-context if the deployment extends it"
            )
        last = last or longest
    if last is None:
        last = request.gpus if axis == "gpus" else _capacity(request)
    if first >= last:
        raise InputError(f"--from {low or unit} --to {high or last * unit}: expected a range, from less to more")
    return first, last


def _capacity(request: Request) -> int:
    """Requests that the roomiest plan holds."""
    _, plans, _ = feasible(request)
    most = 0.0
    for setting, alike in by_structure(request, Placement.of(request.hardware, request.gpus, request.slice), plans):
        rows = _rows(request, alike, np.ones(1), np.array([float(request.workload.isl)]))
        most = max(most, float(np.max(fit(setting, rows, clip=False).max_concurrency)))
    return max(2, int(most))


def _grid(request: Request, axis: Axis, low: int, high: int) -> list[int]:
    torus = request.hardware.torus
    if axis == "gpus" and torus is not None:
        sizes = sorted({shape.chips for shape in torus.legal_slices() if low <= shape.chips <= high})
        if len(sizes) < 2:
            raise InputError(f"--vary gpus: {request.hardware.name} has fewer than two slices of {low} to {high} chips")
        return sizes
    points = SEARCHED_POINTS if _is_ranked(request, axis) else POINTS
    grid = np.unique(np.round(np.geomspace(low, high, points)).astype(int))
    return [int(value) for value in grid]


def _together(request: Request, axis: Axis, tick: Callable[[], None]) -> Callable[[Sequence[int]], list[Winner]]:
    """Prices all plans at several values at once."""
    placement, plans, _ = feasible(request)
    groups = list(by_structure(request, placement, plans))

    def winners(values: Sequence[int]) -> list[Winner]:
        steps = np.array(values, dtype=float)
        work = request.workload
        loads = steps if axis in ("concurrency", "tokens") else np.full(len(steps), float(work.concurrency or 1))
        prompts = steps if axis == "isl" else np.full(len(steps), float(work.isl))
        best: list[Winner] = [(None, np.inf)] * len(values)

        def leads(plan: Plan, goal: float, other: Winner) -> bool:
            """Equals by fewer chips, then by the label, as rankings have it."""
            if other[0] is None or goal < other[1] * (1 - EQUAL):
                return bool(np.isfinite(goal))
            return goal <= other[1] * (1 + EQUAL) and (plan.chips, plan.tp, plan.label) < (
                other[0].chips,
                other[0].tp,
                other[0].label,
            )

        for setting, alike in groups:
            rows = _rows(request, alike, loads, prompts)
            fitted = fit(setting, rows, clip=False)
            fits = np.array([reason is None for reason in memory_reasons(setting, fitted, rows.concurrency)])
            priced = price(setting, rows, fitted)
            fits &= within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
            own = request.objective
            goal = np.asarray(getattr(priced, own) if own in TIMES else 1.0 / priced.requests_per_s)
            goal = np.where(fits & np.isfinite(goal), goal, np.inf).reshape(len(alike), len(values))
            near = goal <= goal.min(axis=0) * (1 + EQUAL)
            for row, column in np.argwhere(near & np.isfinite(goal)).tolist():
                if leads(alike[row], float(goal[row, column]), best[column]):
                    best[column] = alike[row], float(goal[row, column])
        tick()
        return best

    return winners


def _rows(request: Request, plans: Sequence[Plan], loads: Array, prompts: Array) -> Rows:
    """Every plan at every value, plan by plan."""
    many, work = len(loads), request.workload
    each = Rows.of_plans(plans, isl=0, osl=0, concurrency=0)
    degrees = {name: np.repeat(getattr(each, name), many) for name in PLAN_COLUMNS}
    return Rows.of(
        **degrees,
        isl=np.tile(prompts, len(plans)),
        osl=work.osl,
        concurrency=np.tile(loads, len(plans)),
        max_context=work.max_context or 0,
        prefix_hit=work.prefix_hit,
        **columns_of(work.speculation),
    )


def _ranked(request: Request, axis: Axis, tick: Callable[[], None]) -> Callable[[Sequence[int]], list[Winner]]:
    """Ranks at each value on its own; plans that differ in their replicas alone are one where chips vary."""

    def winner(value: int) -> Winner:
        changed = at(request, axis, value)
        try:
            results = rank(changed).results
        except NoPlanError:
            tick()
            return None, np.inf
        tick()
        plan = plan_of(results, 0)
        return plan._replace(dp=1) if axis == "gpus" else plan, goal_value(results, 0, request.objective)

    return lambda values: [winner(value) for value in values]


def _bisect(found: dict[int, Winner], winners: Callable[[Sequence[int]], list[Winner]], ahead: int) -> None:
    """Adds values between neighbours with different leaders until they are one unit apart.

    Args:
        found: leaders by value.
        winners: prices values.
        ahead: so many halvings of a gap are priced at once, whichever halves turn out to be wanted.
    """
    known: dict[int, Winner] = {}
    while True:
        gaps = [
            (left, right)
            for left, right in pairwise(sorted(found))
            if found[left][0] != found[right][0] and right - left > 1
        ]
        if not gaps:
            return
        middles = [(left + right) // 2 for left, right in gaps]
        if not all(middle in known for middle in middles):
            missing = [value for gap in gaps for value in _halvings(*gap, ahead) if value not in known]
            known.update(zip(missing, winners(missing), strict=True))
        found.update((middle, known[middle]) for middle in middles)


def _halvings(left: int, right: int, times: int) -> list[int]:
    """The middle between two values, and of its halves, and so on."""
    middle = (left + right) // 2
    if not times or middle == left:
        return []
    return [middle, *_halvings(left, middle, times - 1), *_halvings(middle, right, times - 1)]


def _stretches(request: Request, axis: Axis, found: dict[int, Winner]) -> list[Stretch]:
    values = sorted(found)
    runs: list[list[int]] = []
    for value in values:
        if runs and found[runs[-1][0]][0] == found[value][0]:
            runs[-1].append(value)
        else:
            runs.append([value])
    stretches = []
    for index, run in enumerate(runs):
        plan, low, high = found[run[0]][0], run[0], run[-1]
        after = found[runs[index + 1][0]][0] if index + 1 < len(runs) else None
        next_rows = None if after is None else _row(request, axis, high, after)
        stretches.append(
            Stretch(
                low,
                high,
                plan,
                None if plan is None else _row(request, axis, low, plan),
                None if plan is None else _row(request, axis, high, plan),
                None if after is None else after.label,
                float("nan") if next_rows is None else goal_value(next_rows, 0, request.objective),
            )
        )
    return stretches


def _row(request: Request, axis: Axis, value: int, plan: Plan) -> Results | None:
    """The result row of a plan at a value; none where it does not run there."""
    changed = at(request, axis, value)
    if axis == "gpus":
        placement = Placement.of(request.hardware, value, request.slice)
        plan = plan._replace(dp=max(1, placement.replicas(plan.tp, plan.pp, plan.cp)))
    try:
        return rank(pinned(changed, plan)).results
    except NoPlanError:
        return None


def _count(request: Request, axis: Axis, high: int) -> int:
    return len(feasible(at(request, axis, high))[1])
