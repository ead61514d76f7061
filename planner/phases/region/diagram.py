"""Phase diagrams: which plan leads where, over a region of two options, and what one plan for all of it would lose.

All plans are priced on a grid in equal ratios (of shares in equal steps). Between neighbours with different leaders,
along rows and along columns, the place of the change is bisected to one unit, or to a hundredth of a value that is not
whole, every plan priced again each time. What leads only between points of the grid where the same plan leads is not
seen.

**One plan for all of it.** A plan's loss at a point is its goal there over the best one, less 1. Of the plans that run
at nearly as many points as the roomiest one, that of the least worst loss is what minimax regret (Savage 1951) deploys
where nothing is known of which point will come; its mean loss is that of points that are all as likely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, NoPlanError
from planner.phases.region.surface import FIGURES, Dimension, Surface
from planner.plans.plan import Plan
from planner.pricing import most_requests, price_all
from planner.ranking import error_bar, rank
from planner.request import Request, check

Array = NDArray[np.float64]
Point = tuple[float, float]
ACROSS, UP = 25, 13
"""Values of the first option, and of the second, that are looked at first."""
SLOW_ACROSS, SLOW_UP = 9, 7
"""The same where each point is a search of its own."""
EQUAL = 1e-9
"""Relative difference below which a plan does not take the lead from another."""
COVERS = 0.95
"""Of the share of the region that the roomiest plan runs at: plans below it are no choice for all of the region."""
FINE = 1.01
"""Ratio of two values, not whole, between which a change is not looked for."""


class Cell(NamedTuple):
    """A point of the region, and the two plans that do best there."""

    point: Point
    plan: Plan | None
    """none: no plan runs."""
    goal: float
    """What is minimised: seconds, or seconds per output token."""
    figures: tuple[float, ...]
    next: Plan | None
    """The second; none where there is no other."""
    next_goal: float

    @property
    def lead(self) -> float:
        """By how much the second is behind, as a share of the first's goal; infinite without a second."""
        return self.next_goal / self.goal - 1 if self.next is not None else np.inf


class Edge(NamedTuple):
    """A change of the leader along one of the options, the other held."""

    axis: int
    """0: the first option changes."""
    held: float
    """Value of the other."""
    low: float
    """The last value with the plan before it."""
    high: float
    """The first with the one after it: one unit on, or less than a hundredth."""
    before: Plan | None
    after: Plan | None


class Span(NamedTuple):
    """Neighbouring values of an option over which one plan leads, the other option held."""

    plan: Plan | None
    low: float
    high: float
    """The last value at which it leads."""
    end: float
    """The first of the next one, or `high`."""


class Region(NamedTuple):
    """Where one plan leads."""

    plan: Plan | None
    share: float
    """Of the area of the diagram, in the scale of its axes."""
    least: float
    """Least, mean and greatest lead over the second at points of the grid; NaN without any."""
    mean: float
    most: float
    tied: float
    """Share of its points at which the lead is within the model's error."""


class Fixed(NamedTuple):
    """One plan for the whole region."""

    plan: Plan
    covers: float
    """Share of the grid's points, of those at which any plan runs, at which it does."""
    worst: float
    """Its loss where that is greatest, of the points at which it runs: (its goal - the best one's) / the best one's."""
    where: Point
    best: Plan
    """Which plan leads there."""
    mean: float
    """Its loss on average over the grid, likewise."""


class Diagram(NamedTuple):
    """Leaders over a region of two options."""

    request: Request
    dimensions: tuple[Dimension, Dimension]
    across: tuple[float, ...]
    """Values of the first option on the grid, ascending."""
    up: tuple[float, ...]
    cells: dict[Point, Cell]
    """Of the grid and of the refinement."""
    edges: tuple[Edge, ...]
    fixed: tuple[Fixed, ...]
    """Every plan as the only one: those that cover about as much as any, least worst loss first; then the others."""
    goals: dict[Plan, dict[Point, float]]
    """Of every plan, where it runs."""
    error: float
    """Share within which two plans are not told apart."""
    points: int
    """At which all plans were priced."""
    whole: bool
    """Whether every edge was bisected to the end; not where somebody interrupted."""

    @property
    def once(self) -> Fixed:
        """What to deploy where nothing is known of which point will come."""
        return self.fixed[0]

    @property
    def regions(self) -> tuple[Region, ...]:
        """By share, the largest first; where no plan runs last."""
        shares = self._shares()
        grid = [self.cells[a, b] for b in self.up for a in self.across]
        found = []
        for plan, share in shares.items():
            leads = np.array([cell.lead for cell in grid if cell.plan == plan and plan is not None])
            known = leads[np.isfinite(leads)]
            nothing = (float("nan"),) * 3
            spread = (float(known.min()), float(known.mean()), float(known.max())) if len(known) else nothing
            tied = float(np.mean(leads <= self.error)) if len(leads) else 0.0
            found.append(Region(plan, share, *spread, tied))
        return tuple(sorted(found, key=lambda each: (each.plan is None, -each.share)))

    def _shares(self) -> dict[Plan | None, float]:
        """Area of each plan: lengths along rows between their edges, rows weighted by the trapezoidal rule, and along
        columns likewise; the mean of both."""
        found: dict[Plan | None, float] = {}
        for axis, (values, others) in enumerate(((self.across, self.up), (self.up, self.across))):
            dimension, other = self.dimensions[axis], self.dimensions[1 - axis]
            weights = _weights(scaled(other, others))
            for held, weight in zip(others, weights, strict=True):
                for each in self.stretches(axis, held):
                    ends = scaled(dimension, (each.low, each.end, values[0], values[-1]))
                    share = float((ends[1] - ends[0]) / (ends[3] - ends[2]))
                    found[each.plan] = found.get(each.plan, 0.0) + weight * share / 2
        return found

    def stretches(self, axis: int, held: float) -> list[Span]:
        """What leads along an axis, the other option at a value of the grid; ascending, without gaps."""
        values = self.across if axis == 0 else self.up
        edges = sorted((edge for edge in self.edges if edge.axis == axis and edge.held == held), key=lambda e: e.low)
        plans = [self.cells[_point(axis, values[0], held)].plan, *(edge.after for edge in edges)]
        lows = [values[0], *(edge.high for edge in edges)]
        highs, ends = [*(edge.low for edge in edges), values[-1]], [*(edge.high for edge in edges), values[-1]]
        return [Span(*each) for each in zip(plans, lows, highs, ends, strict=True)]


def _point(axis: int, value: float, held: float) -> Point:
    return (value, held) if axis == 0 else (held, value)


def scaled(dimension: Dimension, values: Sequence[float]) -> Array:
    """Values on the scale of their axis: logarithms, or as they are where 0 is one of them."""
    array = np.asarray(values, dtype=float)
    return array if dimension.least == 0 else np.log(array)


def _weights(places: Array) -> list[float]:
    """Of the trapezoidal rule, adding up to 1."""
    widths = np.diff(places)
    halves = np.concatenate([[0.0], widths]) + np.concatenate([widths, [0.0]])
    return [float(each) for each in halves / halves.sum()]


def diagram(
    request: Request,
    dimensions: tuple[Dimension, Dimension],
    lows: tuple[float | None, float | None],
    highs: tuple[float | None, float | None],
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Diagram:
    """Which plan leads over a region.

    Args:
        request: what is asked; the options that vary are not looked at.
        dimensions: those options.
        lows: their least values; none = 1, for a rate 1/64 of the greatest.
        highs: their greatest; none = what memory holds, what the model attends to, the request's chips, or the
            highest rate that any plan sustains.
        tick: called with the points that are priced, and how many are known of, before each round.

    Raises:
        InputError: a range that is none, or an option that both varies and is given.
        NoPlanError: no plan runs anywhere.
    """
    if dimensions[0].name == dimensions[1].name:
        raise InputError(f"--vary {dimensions[0].option} twice: a diagram has two different options")
    names = {each.name for each in dimensions}
    if names >= {"concurrency", "arrival_rate"}:
        raise InputError("--vary concurrency and --vary arrival-rate both say how many requests are in flight")
    ranges = _ranges(request, dimensions, lows, highs)
    request = _settled(request, dimensions, ranges)
    surface = Surface(request, dimensions)
    for corner in ((ranges[0][1], ranges[1][1]), (ranges[0][0], ranges[1][0])):
        check(surface.at(corner))
    counts = (SLOW_ACROSS, SLOW_UP) if surface.is_slow else (ACROSS, UP)
    across, up = (_grid(*each) for each in zip(dimensions, ranges, counts, strict=True))
    book = _Book(surface)
    grid = [(a, b) for b in up for a in across]
    tick(0, len(grid))
    book.add(grid)
    if all(book.cells[point].plan is None for point in grid):
        rank(surface.at((ranges[0][0], ranges[1][0])))  # says why
        raise NoPlanError("no plan runs anywhere in this region")
    lines = [*((0, b, list(across)) for b in up), *((1, a, list(up)) for a in across)]
    whole = True
    try:
        _bisect(book, dimensions, lines, tick)
    except KeyboardInterrupt:
        whole = False
    edges = tuple(_edges(book, lines))
    return Diagram(
        request, dimensions, across, up, book.cells, edges, tuple(_fixed(book, grid)), book.goals,
        error_bar(request), len(book.cells), whole,
    )  # fmt: skip


def _settled(request: Request, dimensions: Sequence[Dimension], ranges: Sequence[tuple[float, float]]) -> Request:
    """The request with its varying options at their least, so that it makes sense by itself."""
    for dimension, (low, _) in zip(dimensions, ranges, strict=True):
        request = dimension.put(request, low)
    return request


def _ranges(
    request: Request,
    dimensions: Sequence[Dimension],
    lows: Sequence[float | None],
    highs: Sequence[float | None],
) -> list[tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    rates = [each for each in dimensions if each.name == "arrival_rate"]
    order = [*(each for each in dimensions if each not in rates), *rates]  # a rate's range follows from the others
    for dimension in order:
        place = dimensions.index(dimension)
        low, high = lows[place], highs[place]
        for name, value in (("--from", low), ("--to", high)):
            if value is not None and not dimension.least <= value <= dimension.most:
                expected = f"expected {dimension.least:.10g} to {dimension.most:.10g}"
                raise InputError(f"{name} {value:g}: {expected} for --vary {dimension.option}")
            if value is not None and dimension.whole and value != int(value):
                raise InputError(f"{name} {value:g}: --vary {dimension.option} takes whole numbers")
        other = dimensions[1 - place]
        if high is None:
            high = _highest(request, dimension, other, lows[1 - place], highs[1 - place], found.get(other.name))
        if low is None:
            low = high / 64 if dimension.name == "arrival_rate" else dimension.least
            if dimension.name == "osl" and request.objective == "tpot":
                low = 2
        if low >= high:
            raise InputError(f"--from {low:g} --to {high:g}: expected a range of {dimension.option}, from less to more")
        found[dimension.name] = float(low), float(high)
    return [found[each.name] for each in dimensions]


def _highest(
    request: Request,
    dimension: Dimension,
    other: Dimension,
    low: float | None,
    high: float | None,
    known: tuple[float, float] | None,
) -> float:
    """The greatest value that makes sense with the least of the other option (of lengths: with its greatest)."""
    work = request.workload
    if dimension.name in ("isl", "osl"):
        beside = (
            float(high or low or 1)
            if other.name in ("isl", "osl")
            else float(work.osl if dimension.name == "isl" else work.isl)
        )
        if other.name in ("isl", "osl") and high is None:
            raise InputError(f"--vary {dimension.option} and {other.option}: say how far with --to, once for each")
        longest = max(request.model.max_context, work.max_context or 0) - beside
        if longest < 2:
            raise InputError(
                f"{request.model.name} attends to {request.model.max_context} tokens: no room for {beside:g}"
            )
        return longest
    if dimension.name == "gpus":
        return float(request.gpus)
    if dimension.name == "prefix_hit":
        return 0.95
    least = known[0] if known else (low or other.least)
    asked = other.put(request, least)
    if dimension.name == "concurrency":
        found = most_requests(asked._replace(workload=asked.workload._replace(concurrency=None, arrival_rate=None)))
        return max(2.0, *(float(each[3]) for each in found)) if found else 2.0
    if dimension.name == "arrival_rate":
        asked = asked._replace(workload=asked.workload._replace(arrival_rate=1e-6, concurrency=None))
        highest = price_all(asked).highest
        if highest is None:
            rank(asked)  # says why
            raise NoPlanError("no plan serves any rate")
        return float(f"{highest[1]:.3g}")
    raise InputError(f"--vary {dimension.option}: say how far with --from and --to, in ms")


def _grid(dimension: Dimension, ends: tuple[float, float], count: int) -> tuple[float, ...]:
    low, high = ends
    values = np.linspace(low, high, count) if dimension.least == 0 else np.geomspace(low, high, count)
    if dimension.whole:
        return tuple(float(value) for value in np.unique(np.round(values)))
    inner = [float(f"{value:.4g}") for value in values[1:-1]]
    return tuple(dict.fromkeys([low, *(value for value in inner if low < value < high), high]))


class _Book:
    """What is known of points: cells, and every plan's goal.

    Args:
        surface: prices them.
    """

    def __init__(self, surface: Surface) -> None:
        self.surface = surface
        self.cells: dict[Point, Cell] = {}
        self.goals: dict[Plan, dict[Point, float]] = {}

    def add(self, points: Sequence[Point]) -> None:
        """Prices all plans at these points."""
        sheet = self.surface.sheet(np.array(points, dtype=float))
        order = sorted(range(len(sheet.plans)), key=lambda i: _simpler(sheet.plans[i]))
        plans = [sheet.plans[place] for place in order]
        goals, figures = sheet.goals[order], sheet.figures[order]
        for column, point in enumerate(points):
            self.cells[point] = _cell(point, plans, goals[:, column], figures[:, column])
        for plan, own in zip(plans, goals, strict=True):
            if np.isfinite(own).any():
                self.goals.setdefault(plan, {}).update(zip(points, own.tolist(), strict=True))


def _simpler(plan: Plan) -> tuple[int, int, str]:
    """Of equals the one of fewer chips leads, then of less tensor parallelism, as rankings have it."""
    return plan.chips, plan.tp, plan.label


def _cell(point: Point, plans: Sequence[Plan], goals: Array, figures: Array) -> Cell:
    """`plans` in the order in which equals lead."""
    nothing = tuple([float("nan")] * len(FIGURES))
    if not len(goals) or not np.isfinite(goals).any():
        return Cell(point, None, np.inf, nothing, None, np.inf)
    first = int(np.argmax(goals <= goals.min() * (1 + EQUAL)))
    others = np.where(np.arange(len(goals)) == first, np.inf, goals)
    second = int(np.argmin(others))
    behind = float(others[second])
    other = plans[second] if np.isfinite(behind) else None
    own = tuple(float(value) for value in figures[first])
    return Cell(point, plans[first], float(goals[first]), own, other, behind)


Line = tuple[int, float, list[float]]
"""(axis along which it runs, value of the other option, values known on it, ascending)."""


def _bisect(
    book: _Book, dimensions: Sequence[Dimension], lines: Sequence[Line], tick: Callable[[int, int], None]
) -> None:
    """Adds points to the lines until leaders change only between values that are one unit apart."""
    while True:
        wanted: list[tuple[int, Point, float]] = []
        for index, (axis, held, values) in enumerate(lines):
            for left, right in pairwise(values):
                plans = {book.cells[_point(axis, value, held)].plan for value in (left, right)}
                middle = _middle(dimensions[axis], left, right) if len(plans) > 1 else None
                if middle is not None:
                    wanted.append((index, _point(axis, middle, held), middle))
        if not wanted:
            return
        new = list(dict.fromkeys(point for _, point, _ in wanted if point not in book.cells))
        tick(len(book.cells), len(book.cells) + len(new))
        if new:
            book.add(new)
        for index, _, middle in wanted:
            lines[index][2].append(middle)
            lines[index][2].sort()


def _middle(dimension: Dimension, left: float, right: float) -> float | None:
    """A value between two; none where they are as near as is looked at."""
    if dimension.whole:
        return float((int(left) + int(right)) // 2) if right - left > 1 else None
    if dimension.least == 0:
        return (left + right) / 2 if right - left > (FINE - 1) else None
    return float(np.sqrt(left * right)) if right / left > FINE else None


def _edges(book: _Book, lines: Sequence[Line]) -> list[Edge]:
    found = []
    for axis, held, values in lines:
        for left, right in pairwise(values):
            before, after = (book.cells[_point(axis, value, held)].plan for value in (left, right))
            if before != after:
                found.append(Edge(axis, held, left, right, before, after))
    return found


def _fixed(book: _Book, grid: Sequence[Point]) -> list[Fixed]:
    """Every plan as the only one of the region."""
    runs = [point for point, cell in book.cells.items() if cell.plan is not None]
    best = np.array([book.cells[point].goal for point in runs])
    there = set(grid)
    on_grid = np.array([point in there for point in runs])
    found = []
    for plan in sorted(book.goals, key=_simpler):
        own = np.array([book.goals[plan].get(point, np.inf) for point in runs])
        losses = np.maximum(own / best - 1, 0.0)
        kept = np.isfinite(losses)
        place = int(np.argmax(np.where(kept, losses, -1.0)))
        leader = book.cells[runs[place]].plan
        assert leader is not None
        mean = float(losses[kept & on_grid].mean()) if np.any(kept & on_grid) else float("nan")
        covers = float(kept[on_grid].mean())
        found.append(Fixed(plan, covers, float(losses[place]), runs[place], leader, mean))
    enough = COVERS * max(each.covers for each in found)
    return sorted(found, key=lambda each: (each.covers < enough, each.worst if each.covers >= enough else -each.covers))
