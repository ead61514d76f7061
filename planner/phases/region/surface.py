"""Every plan at many points of two options at once: what each takes there, and which leads.

Options that are columns of `Rows` (load, lengths, cached share) vary inside one call of the pricing; of the others
(chips, limits, a rate, or any where each point is a search for the best load) every value is priced for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arriving import load_at, reach, steady
from planner.costs.rows import PLAN_COLUMNS, Rows
from planner.costs.serving import Estimates, Fit, Setting, fit, price
from planner.costs.speculation import columns_of
from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import at_every_load, by_structure, feasible, memory_reasons, within
from planner.ranking import metric
from planner.request import MOST, TIMES, Request
from planner.units import MS

Array = NDArray[np.float64]
_BLOCK = 200_000  # rows priced at once
FIGURES = ("ttft", "tpot", "latency", "tokens_per_s")
"""What is known of a plan at a point, beside its goal: seconds, and output tokens per second of the deployment."""


class Dimension(NamedTuple):
    """An option that may vary over a region."""

    name: str
    """Of the option, and of the column."""
    put: Callable[[Request, float], Request]
    """The request at a value, in the option's unit."""
    whole: bool = True
    """Whether values are whole numbers."""
    least: float = 1
    most: float = MOST
    column: bool = False
    """Whether it is a column of the rows that are priced."""

    @property
    def option(self) -> str:
        """As it is typed: `arrival-rate`."""
        return self.name.replace("_", "-")


def _work(name: str) -> Callable[[Request, float], Request]:
    def put(request: Request, value: float) -> Request:
        given: Any = int(value) if name not in ("arrival_rate", "prefix_hit") else float(value)
        return request._replace(workload=request.workload._replace(**{name: given}))

    return put


def _limit(name: str) -> Callable[[Request, float], Request]:
    def put(request: Request, value: float) -> Request:
        return request._replace(limits=request.limits._replace(**{name: value * MS}))

    return put


DIMENSIONS = {
    each.name: each
    for each in (
        Dimension("concurrency", _work("concurrency"), column=True),
        Dimension("isl", _work("isl"), column=True),
        Dimension("osl", _work("osl"), column=True),
        Dimension("prefix_hit", _work("prefix_hit"), whole=False, least=0, most=1, column=True),
        Dimension("gpus", lambda request, value: request._replace(gpus=int(value))),
        Dimension("arrival_rate", _work("arrival_rate"), whole=False, least=1e-6, column=True),
        *(Dimension(f"max_{name}", _limit(name), whole=False, least=1e-6) for name in TIMES),
    )
}


class Sheet(NamedTuple):
    """Plans at points: arrays over [plans, points]; infinite goals where a plan does not run or breaks a limit."""

    plans: list[Plan]
    goals: Array
    """What is minimised: seconds, or seconds per output token (throughput, cost)."""
    figures: Array
    """[plans, points, FIGURES]."""


class Surface:
    """Prices points of a request, and remembers which plans the rules allow.

    Args:
        request: what is asked; options that vary are not looked at.
        dimensions: those options.
    """

    def __init__(self, request: Request, dimensions: Sequence[Dimension]) -> None:
        self.request, self.dimensions = request, tuple(dimensions)
        names = [each.name for each in dimensions]
        work = request.workload
        self.arrives = "arrival_rate" in names or work.arrival_rate is not None
        loaded = "concurrency" in names or self.arrives
        self.searches = request.searches and not loaded
        self.alike = "gpus" in names and not request.filters.dp
        """Whether plans that differ in their replicas alone are one."""
        self._allowed: dict[int, tuple[Placement, list[Plan]]] = {}

    @property
    def is_slow(self) -> bool:
        """Whether points are priced one by one, so that fewer of them are looked at."""
        return self.searches

    def at(self, point: Sequence[float]) -> Request:
        """The request at a point."""
        request = self.request
        for dimension, value in zip(self.dimensions, point, strict=True):
            request = dimension.put(request, value)
        return request

    def sheet(self, points: Array) -> Sheet:
        """All plans at [points, 2] values."""
        together = [self._together(dimension) for dimension in self.dimensions]
        apart = points[:, [not each for each in together]]
        keys, which = np.unique(apart, axis=0, return_inverse=True)
        found: dict[Plan, tuple[Array, Array]] = {}
        for index in range(len(keys)):
            own = np.flatnonzero(which.ravel() == index)
            request = self.at(points[own[0]])
            columns = {
                dimension.name: points[own, place] for place, dimension in enumerate(self.dimensions) if together[place]
            }
            for plan, goals, figures in self._priced(request, columns, len(own)):
                key = plan._replace(dp=1) if self.alike else plan
                if key not in found:
                    empty = np.full(len(points), np.inf), np.full((len(points), len(FIGURES)), np.nan)
                    found[key] = empty
                found[key][0][own], found[key][1][own] = goals, figures
        plans = list(found)
        if not plans:
            return Sheet([], np.zeros((0, len(points))), np.zeros((0, len(points), len(FIGURES))))
        return Sheet(plans, *(np.stack([found[plan][part] for plan in plans]) for part in (0, 1)))

    def _together(self, dimension: Dimension) -> bool:
        """Whether all its values are priced in one call."""
        return dimension.column and not self.searches

    def _plans(self, request: Request) -> tuple[Placement, list[Plan]]:
        """The machine and what the rules allow there, asked once for each number of chips: nothing else matters."""
        if request.gpus not in self._allowed:
            placement, plans, _ = feasible(request)
            self._allowed[request.gpus] = placement, plans
        return self._allowed[request.gpus]

    def _priced(self, request: Request, columns: dict[str, Array], points: int) -> Iterator[tuple[Plan, Array, Array]]:
        """(plan, goals, figures) of every plan at points that differ in these columns alone."""
        try:
            placement, plans = self._plans(request)
        except NoPlanError:  # fewer chips than the smallest slice has
            return
        for setting, alike in by_structure(request, placement, plans):
            if self.searches:
                yield from _searched(request, setting, alike)
            elif self.arrives:
                yield from _arriving(request, setting, alike, columns, points)
            else:
                step = max(1, _BLOCK // points)
                for start in range(0, len(alike), step):
                    yield from _at_loads(request, setting, alike[start : start + step], columns, points)


def rows_at(request: Request, plans: Sequence[Plan], columns: dict[str, Array], points: int) -> Rows:
    """Every plan at every point, plan by plan."""
    each, work = Rows.of_plans(plans, isl=0, osl=0, concurrency=0), request.workload
    given: dict[str, Array | float] = {
        "isl": work.isl, "osl": work.osl, "concurrency": work.concurrency or 1, "prefix_hit": work.prefix_hit,
        **{name: column for name, column in columns.items() if name != "arrival_rate"},
    }  # fmt: skip
    return Rows.of(
        **{name: np.repeat(getattr(each, name), points) for name in PLAN_COLUMNS},
        **{name: np.tile(np.broadcast_to(value, (points,)), len(plans)) for name, value in given.items()},
        max_context=work.max_context or 0,
        **columns_of(work.speculation),
    )


def _at_loads(
    request: Request, setting: Setting, plans: Sequence[Plan], columns: dict[str, Array], points: int
) -> Iterator[tuple[Plan, Array, Array]]:
    rows = rows_at(request, plans, columns, points)
    fitted = fit(setting, rows, clip=False)
    fits = np.array([reason is None for reason in memory_reasons(setting, fitted, rows.concurrency)])
    priced = price(setting, rows, fitted)
    fits &= within(request.limits, {name: getattr(priced, name) / MS for name in TIMES})
    goals = np.where(fits, _goal(request, priced, rows.osl), np.inf)
    yield from _by_plan(plans, goals, _figures(priced, rows.osl), points)


def _arriving(
    request: Request, setting: Setting, plans: list[Plan], columns: dict[str, Array], points: int
) -> Iterator[tuple[Plan, Array, Array]]:
    """At rates: each plan at the load at which it serves what comes, if it does.

    How far a plan goes is found once for all rates at the same lengths.
    """
    rates = np.broadcast_to(columns.get("arrival_rate", request.workload.arrival_rate or 0.0), (points,))
    names = [name for name in columns if name != "arrival_rate"]
    others = np.stack([columns[name] for name in names], axis=1) if names else np.zeros((points, 0))
    kinds, kind = np.unique(others, axis=0, return_inverse=True)
    kind = kind.ravel()
    rows = rows_at(request, plans, {name: kinds[:, place] for place, name in enumerate(names)}, len(kinds))
    rows = rows._replace(concurrency=np.ones(rows.length))
    fitted = fit(setting, rows, clip=False)
    known = np.flatnonzero([reason is None for reason in memory_reasons(setting, fitted, rows.concurrency)])
    place_of = np.full(rows.length, -1)
    place_of[known] = np.arange(len(known))
    goals = np.full((len(plans), points), np.inf)
    figures = np.full((len(plans), points, len(FIGURES)), np.nan)
    if len(known):
        rows, fitted = Rows(*(column[known] for column in rows)), Fit(*(column[known] for column in fitted))
        far = reach(setting, rows, fitted, fitted.max_concurrency / rows.dp, request.limits)
        held = place_of[np.arange(len(plans))[:, None] * len(kinds) + kind[None, :]]  # -1: does not fit
        most = np.where(held >= 0, far.rate[held] * rows.dp[held], 0.0)
        which, point = np.nonzero((most > 0) & (most >= rates * (1 - 1e-9)))
        index = held[which, point]
        if len(index):
            rows, fitted = Rows(*(column[index] for column in rows)), Fit(*(column[index] for column in fitted))
            far = far.take(index)
            loads = load_at(setting, rows, fitted, far, np.minimum(rates[point] / rows.dp, far.rate))
            priced = steady(setting, rows, fitted, loads).priced
            goals[which, point] = _goal(request, priced, rows.osl)
            figures[which, point] = _figures(priced, rows.osl)
    yield from zip(plans, goals, figures, strict=True)


def _searched(request: Request, setting: Setting, plans: list[Plan]) -> Iterator[tuple[Plan, Array, Array]]:
    """Each plan at its best load."""
    results, _ = at_every_load(request, setting, plans)
    if results is None:
        return
    kept = within(request.limits, {name: results[f"{name}_ms"] for name in TIMES})
    results = results.take(np.flatnonzero(kept))
    goals, labels = 1 / results["tokens_per_s"].astype(float), results["plan"]
    order = np.lexsort((metric(results, request.objective), labels.astype(str)))
    known = {plan.label: plan for plan in plans}
    seen: set[str] = set()
    for row in order.tolist():
        if labels[row] not in seen:
            seen.add(labels[row])
            times = [results[f"{name}_ms"][row] * MS for name in TIMES] + [results["tokens_per_s"][row]]
            yield known[labels[row]], np.array([goals[row]]), np.array([times], dtype=float)


def _goal(request: Request, priced: Estimates, osl: Array) -> Array:
    own = request.objective
    goal = np.asarray(getattr(priced, own) if own in TIMES else 1.0 / (priced.requests_per_s * osl))
    return np.where(np.isfinite(goal), goal, np.inf)


def _figures(priced: Estimates, osl: Array) -> Array:
    return np.stack([priced.ttft, priced.tpot, priced.latency, priced.requests_per_s * osl], axis=1)


def _by_plan(plans: Sequence[Plan], goals: Array, figures: Array, points: int) -> Iterator[tuple[Plan, Array, Array]]:
    for place, plan in enumerate(plans):
        own = slice(place * points, (place + 1) * points)
        yield plan, goals[own], figures[own]


def dimension(word: str) -> Dimension:
    """The option of that name.

    Raises:
        InputError: none that may vary.
    """
    found = DIMENSIONS.get(word.strip().lower().removeprefix("--").replace("-", "_"))
    if found is None:
        names = ", ".join(each.option for each in DIMENSIONS.values())
        raise InputError(f"--vary {word}: expected two of {names}")
    return found
