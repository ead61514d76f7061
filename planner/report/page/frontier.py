"""Latency against throughput per chip as an inline SVG, with what a pointer over a point shows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.ranking import Ranking, tradeoff
from planner.report.figures import plural, short
from planner.report.page.markup import Markup, element, escaped, joined, number
from planner.results import Results

WIDTH, HIGH = 860.0, 470.0
LEFT, RIGHT, TOP, BOTTOM = 66.0, 16.0, 14.0, 48.0
CELL = 2.0
"""Pixels: of points of the cloud that fall together only the first is kept, so that a page stays small."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#aa4499", "#999933")
"""Of Okabe and Ito, and of Tol: told apart by colour-blind readers; beyond them the shape differs."""
SHAPES = 4
STEPS = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0))
MOST_TICKS = 9


class Axis(NamedTuple):
    """A logarithmic axis: values `low` to `high` on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """One that holds all values, with some air."""
        low, high = min(values), max(values)
        air = max((high / low) ** 0.04, 1.03)
        return cls(low / air, high * air, start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, at most MOST_TICKS of them."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        best: list[float] = []
        for steps in STEPS:
            found = [step * 10.0**power for power in powers for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) > MOST_TICKS:
                break
            best = found
        if len(best) > 2:
            return best
        width = (self.high - self.low) / 5  # less than half a decade: equal steps are next to equal here too
        step = min((s * 10.0 ** math.floor(math.log10(width)) for s in (1, 2, 5, 10)), key=lambda s: abs(s - width))
        return [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def frontier(ranking: Ranking) -> Markup:
    """The picture, a key of the plans on the frontier, and their rows as a table.

    Args:
        ranking: answers of at least two tokens; its request says which load, if it has one.
    """
    rows, best = tradeoff(ranking.request)
    tpot = rows["tpot_ms"].astype(float).tolist()
    rate = rows["tokens_per_s_per_gpu"].astype(float).tolist()
    x, y = Axis.of(tpot, LEFT, WIDTH - RIGHT), Axis.of(rate, HIGH - BOTTOM, TOP)
    labels = list(dict.fromkeys(best["plan"]))
    names = [*labels, *(label for label in dict.fromkeys(rows["plan"]) if label not in labels)]
    index = {label: place for place, label in enumerate(names)}
    on = [_point(best, row, x, y, index) for row in range(len(best))]
    cloud = _thinned([_point(rows, row, x, y, index) for row in range(len(rows))], on)
    first = None if ranking.request.pareto else _point(ranking.results, 0, x, y, index)
    about = (
        f"TPOT in ms against tokens per second and chip, both logarithmic: {plural(len(names), 'plan')} at "
        f"{plural(len(rows), 'point')}; {plural(len(on), 'point')} of {plural(len(labels), 'plan')} on the frontier."
    )
    dots = "".join(f"M{number(point[0])} {number(point[1])}h0" for point in cloud)
    line = " ".join(f"{number(point[0])},{number(point[1])}" for point in on)
    svg = element(
        "svg",
        element("title", about),
        *_axes(x, y),
        element("path", d=dots, class_="cloud"),
        element("polyline", points=line, class_="frontier"),
        *(_marker(int(point[2]), point[0], point[1]) for point in on),
        None if first is None else element("path", d=_star(first[0], first[1], 11), class_="first"),
        element("path", d="", class_="same"),
        element("circle", r="9", cx="-99", cy="-99", class_="halo"),
        element("rect", x=LEFT, y=TOP, width=WIDTH - LEFT - RIGHT, height=HIGH - TOP - BOTTOM, class_="glass"),
        viewBox=f"0 0 {WIDTH:.0f} {HIGH:.0f}",
        role="img",
        id="frontier",
        tabindex="0",
        aria_label=f"{about} Arrow keys walk along the frontier.",
    )
    points = json.dumps({"plans": names, "on": on, "cloud": cloud, "first": first}, separators=(",", ":"))
    data = Markup(points.replace("<", "\\u003c").replace("&", "\\u0026"))  # no end of the element within a name
    key = element(
        "ul",
        *(
            element("li", element("button", _swatch(place), escaped(label), type="button", data_plan=place))
            for place, label in enumerate(labels)
        ),
        class_="key",
    )
    star = "" if first is None else " The star is the plan that comes first here, at its load."
    note = (
        f"{about} The line joins the points that none beats in both, fastest answers first.{star} "
        "Point at a dot, or use the arrow keys, for its figures; a name shows all points of its plan."
    )
    return joined(
        (
            element("figure", element("div", svg, class_="scroll"), key, element("figcaption", note)),
            element("div", class_="tip", id="tip", role="status", hidden=True),
            element("script", data, type="application/json", id="points"),
            _table(best),
        )
    )


def _point(rows: Results, row: int, x: Axis, y: Axis, index: dict[str, int]) -> list[Any]:
    """[x, y, plan, load, TPOT, TTFT, latency, tokens/s, per chip, $/Mtok]: pixels, then texts as they are shown."""
    tpot, rate = float(rows["tpot_ms"][row]), float(rows["tokens_per_s_per_gpu"][row])
    figures = [short(tpot)]
    for name in ("ttft_ms", "latency_ms", "tokens_per_s", "tokens_per_s_per_gpu", "usd_per_mtok"):
        value = float(rows[name][row])
        figures.append(short(value) if math.isfinite(value) else "")
    place = index[str(rows["plan"][row])]
    return [round(x.at(tpot), 1), round(y.at(rate), 1), place, int(rows["concurrency"][row]), *figures]


def _thinned(points: Sequence[list[Any]], kept: Sequence[list[Any]]) -> list[list[Any]]:
    """Points that do not lie on top of each other or of those that are kept anyway."""

    def cell(point: list[Any]) -> tuple[int, int, int]:
        return round(point[0] / CELL), round(point[1] / CELL), point[2]

    seen = {cell(point) for point in kept}
    found = []
    for point in points:
        if cell(point) not in seen:
            seen.add(cell(point))
            found.append(point)
    return found


def _axes(x: Axis, y: Axis) -> list[Markup]:
    """Grid, ticks and what the axes are."""
    drawn = []
    for value in x.ticks():
        at = x.at(value)
        drawn.append(element("line", x1=at, x2=at, y1=TOP, y2=HIGH - BOTTOM, class_="grid"))
        drawn.append(element("text", short(value, 3), x=at, y=HIGH - BOTTOM + 17, text_anchor="middle"))
    for value in y.ticks():
        at = y.at(value)
        drawn.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, class_="grid"))
        drawn.append(element("text", short(value, 3), x=LEFT - 8, y=at + 4, text_anchor="end"))
    middle = (TOP + HIGH - BOTTOM) / 2
    turned = f"rotate(-90 14 {middle:g})"
    drawn.append(
        element("text", "TPOT, ms", x=(LEFT + WIDTH - RIGHT) / 2, y=HIGH - 10, text_anchor="middle", class_="axis")
    )
    drawn.append(
        element(
            "text", "tokens/s per chip", x="14", y=middle, transform=turned, text_anchor="middle", class_="axis"
        )
    )  # fmt: skip
    return drawn


def _marker(place: int, x: float, y: float, size: float = 5.0) -> Markup:
    """A point of the frontier: colour, and in turn shape, say which plan."""
    colour, shape = COLOURS[place % len(COLOURS)], place // len(COLOURS) % SHAPES
    if shape == 0:
        return element("circle", cx=x, cy=y, r=size, fill=colour, class_="mark", data_plan=place)
    corners = {
        1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        2: ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
        3: ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }[shape]
    path = "M" + "L".join(f"{number(x + size * dx)} {number(y + size * dy)}" for dx, dy in corners) + "z"
    return element("path", d=path, fill=colour, class_="mark", data_plan=place)


def _swatch(place: int) -> Markup:
    return element(
        "svg", _marker(place, 8.0, 8.0), viewBox="0 0 16 16", width="16", height="16", aria_hidden="true"
    )  # fmt: skip


def _star(x: float, y: float, size: float) -> str:
    """The outline of a star of five points."""
    corners = []
    for corner in range(10):
        radius = size if corner % 2 == 0 else size * 0.42
        angle = math.pi * (corner / 5 - 0.5)
        corners.append(f"{number(x + radius * math.cos(angle))} {number(y + radius * math.sin(angle))}")
    return f"M{'L'.join(corners)}z"


def _table(best: Results) -> Markup:
    """The frontier as rows, for readers without the picture."""
    heads = ("plan", "load", "TPOT, ms", "TTFT, ms", "tokens/s", "tokens/s per chip")
    columns = ("concurrency", "tpot_ms", "ttft_ms", "tokens_per_s", "tokens_per_s_per_gpu")
    rows = [
        element(
            "tr",
            element("th", best["plan"][row], scope="row"),
            *(element("td", short(float(best[name][row])), class_="n") for name in columns),
        )
        for row in range(len(best))
    ]
    head = element(
        "tr", *(element("th", name, scope="col", class_=None if not at else "n") for at, name in enumerate(heads))
    )
    table = element(
        "table", element("caption", "The frontier, fastest answers first"), element("thead", head),
        element("tbody", *rows),
    )  # fmt: skip
    return element(
        "details", element("summary", "The frontier as a table"), element("div", table, class_="scroll"),
    )  # fmt: skip
