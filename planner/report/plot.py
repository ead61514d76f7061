"""Pictures in files, SVG or PNG, by matplotlib, an optional extra that is imported when one is asked for.

Their bytes are the same for the same figures: no date, identifiers with a salt of their own, and none of the user's
styles. In SVG, texts stay texts.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from planner.costs.roofline import BOUNDS
from planner.errors import InputError
from planner.explaining.breakdown import Breakdown, Item
from planner.explaining.difference import Line, lines
from planner.ranking import Ranking, tradeoff
from planner.report.explain import PHASES, floor_of, shown_items, signed
from planner.report.figures import plural, short
from planner.report.tabular import check_writable
from planner.sweeping import AXES, NUMBERS
from planner.units import MS

KINDS = ("svg", "png")
SIZE = (9.0, 5.5)
"""Inches."""
DOTS = 150
"""Per inch, in PNG."""
BAR_HEIGHT = 0.28
"""Inches of a bar of a breakdown with the gap to the next."""
MANY = 3000
"""Points above which the cloud behind the frontier becomes one image within an SVG, which would grow too large."""
GREY = "#b8b8b8"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
"""Colours that colour-blind readers tell apart: of Okabe and Ito, and of Tol."""
MARKERS = "osD^v"
MOST_LINES = 24
"""Lines of a sweep that can be told apart."""
MOST_LABELS = 40
"""Points of a sweep beside which their plans are named."""
MOST_SEGMENTS = 12
"""Items of a comparison that have a colour of their own."""
LEAST_SEGMENT = 0.02
"""Share of the longest bar below which an item is put to the others."""
TITLE = 52
"""Characters of a line above a picture that has its key beside it."""
WIDE = 16.0
"""Ratio of the ends of an axis from which on it is logarithmic."""
GOALS = {
    "latency": ("latency_ms", "latency, ms"),
    "ttft": ("ttft_ms", "TTFT, ms"),
    "tpot": ("tpot_ms", "TPOT, ms"),
    "throughput": ("tokens_per_s", "tokens/s"),
    "cost": ("usd_per_mtok", "$ per million output tokens"),
}
"""(result column, what it is) by goal."""
_UNPRICED = ("gpu_s_per_token", "chip-seconds per output token")
_AXIS_NAMES = {
    "gpus": "chips", "isl": "tokens of a prompt", "osl": "tokens of an answer", "concurrency": "requests in flight",
    "kv_cache": "KV cache",
}  # fmt: skip
BOUND_COLOURS = {
    "compute": "#009e73", "memory": "#56b4e9", "network": "#cc79a7", "overhead": "#e69f00", "bubble": "#d55e00",
}  # fmt: skip


def check_plot(target: str | None) -> None:
    """Refuses a picture that could not be made, before the work that it would show.

    Args:
        target: of --plot; none is passed over.

    Raises:
        InputError: another kind of file, one that cannot be written, or matplotlib is not installed.
    """
    if target is None:
        return
    if _kind(target) not in KINDS:
        raise InputError(f"--plot {target}: expected the name of a file that ends in .svg or .png")
    check_writable(target)
    try:
        import_module("matplotlib.figure")
    except ImportError:
        raise InputError(f"--plot {target}: needs matplotlib: pip install 'parallel-strategy-planner[plot]'") from None


def tradeoff_plot(ranking: Ranking, target: str) -> bytes:
    """TPOT against tokens per second and chip: every plan at every load, the frontier joined, the winner named.

    Args:
        ranking: its request says which plans and, where it has a concurrency, which load.
        target: the file; its name says the kind.

    Raises:
        InputError: answers of one token, which have no TPOT.
    """
    request = ranking.request
    if request.workload.osl == 1:
        raise InputError(f"--plot {target}: answers of one token have no TPOT; give --osl of at least 2")
    rows, best = tradeoff(request)
    with _figure(*SIZE) as figure:
        axes = figure.subplots()
        crowd = axes.scatter(
            rows["tpot_ms"].astype(float), rows["tokens_per_s_per_gpu"].astype(float), s=9, color=GREY, linewidths=0,
            label=f"{plural(len(set(rows['plan'])), 'plan')}, {plural(len(rows), 'point')}",
        )  # fmt: skip
        crowd.set_rasterized(len(rows) > MANY)
        tpot, rate = best["tpot_ms"].astype(float), best["tokens_per_s_per_gpu"].astype(float)
        axes.plot(tpot, rate, color="#444444", linewidth=1, zorder=2)
        for index, label in enumerate(dict.fromkeys(best["plan"])):
            own = best["plan"] == label
            style = {"color": PALETTE[index % len(PALETTE)], "marker": MARKERS[index // len(PALETTE) % len(MARKERS)]}
            axes.plot(tpot[own], rate[own], linestyle="", markersize=6, zorder=3, label=label, **style)
        first = ranking.results.row(0)
        if not request.pareto:
            axes.plot(
                [first["tpot_ms"]], [first["tokens_per_s_per_gpu"]], linestyle="", marker="*", markersize=15, zorder=4,
                color="#000000", markerfacecolor="none",
                label=f"first for {request.objective}: {first['plan']}, load {first['concurrency']}",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="TPOT, ms", ylabel="tokens/s per chip")
        work = request.workload
        axes.set_title(
            f"{request.model.name} on {request.gpus} x {request.hardware.name}, {request.engine.name} "
            f"{request.engine.version}; {work.isl} tokens in, {work.osl} out"
        )
        _plain_ticks(axes, "xy")
        axes.grid(which="both", color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside right upper", frameon=False, title="frontier, fastest answers first")
        return _drawn(figure, target)


def breakdown_plot(found: Breakdown, target: str) -> bytes:
    """TTFT and TPOT of a plan as bars, one for each item of the tables, by bound; a stroke where its floor is.

    Args:
        found: the plan.
        target: the file; its name says the kind.
    """
    panels = [
        (name, times, shown_items(times)) for name, times in (("TTFT", found.ttft), ("TPOT", found.tpot)) if times.items
    ]
    heights = [len(items) for _, _, items in panels]
    bounds = [bound for bound in BOUNDS if any(item.parts[bound] for _, _, items in panels for item in items)]
    with _figure(SIZE[0], BAR_HEIGHT * sum(heights) + 1.2 * len(panels) + 0.6) as figure:
        grid = figure.subplots(len(panels), height_ratios=heights, squeeze=False)
        for axes, (name, times, items) in zip(grid[:, 0], panels, strict=True):
            _bars(axes, items, bounds)
            axes.set_title(f"{name} {short(times.total / MS)} ms", loc="left")
            axes.set_xlabel("ms")
        row = found.row
        figure.suptitle(
            f"{found.request.model.name} {found.plan.label} on {found.request.gpus} x {found.request.hardware.name}, "
            f"{found.request.engine.name} {found.request.engine.version}, concurrency {row['concurrency']}"
        )
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        return _drawn(figure, target)


def check_lines(axes: Mapping[str, Sequence[Any]], target: str) -> None:
    """Refuses a sweep of more lines than a picture can show, before it is run.

    Args:
        axes: values by option, as `sweeping.Sweep` has them.
        target: of --plot.

    Raises:
        InputError: no option has several values, or they make too many lines.
    """
    several = {name: values for name, values in axes.items() if len(values) > 1}
    if not several.keys() - {"objective"}:
        raise InputError(f"--plot {target}: one point is no line; give an option several values, as --gpus 8:64:8")
    across = _across(several)
    count = 1
    for name, values in several.items():
        count *= 1 if name in (across, "objective") else len(values)
    if count > MOST_LINES:
        options = [f"--{name.replace('_', '-')}" for name in several if name not in (across, "objective")]
        raise InputError(
            f"--plot {target}: {count} lines cannot be told apart, at most {MOST_LINES}: give fewer values of "
            f"{' or '.join(options)}"
        )


def _across(several: Mapping[str, Sequence[Any]]) -> str:
    """The option on the horizontal axis: of those in numbers, else of all, the one of most values, the inner first."""
    names = [name for name in several if name in NUMBERS] or [name for name in several if name != "objective"]
    return max(reversed(names), key=lambda name: len(several[name]))


def sweep_plot(rows: Sequence[Mapping[str, Any]], axes: Mapping[str, Sequence[Any]], target: str) -> bytes:
    """The goal's figure of the best plan over the option that is swept, a line for each combination of the others.

    Args:
        rows: of the sweep, with the keys of COLUMNS_OF_SWEEP; a point without a plan is a gap.
        axes: values by option, of which some have several; see `check_lines`.
        target: the file; its name says the kind.
    """
    several = {name: values for name, values in axes.items() if len(values) > 1}
    across = _across(several)
    best = [row for row in rows if row["error"] is None and row["rank"] == 1]
    goals = list(dict.fromkeys(row["objective"] for row in best))
    others = [name for name in AXES if name in several and name not in (across, "objective")]
    fixed = [name for name in ("model", "hardware", "engine") if name not in several]
    failed = sum(row["error"] is not None for row in rows)
    with _figure(SIZE[0], 1.0 + 4.3 * len(goals)) as figure:
        grid = figure.subplots(len(goals), squeeze=False)
        named = [
            _curves(each, [row for row in best if row["objective"] == goal], goal, across, others)
            for each, goal in zip(grid[:, 0], goals, strict=True)
        ]
        texts = [", ".join(str(best[0][name]) for name in fixed)] if fixed else []
        if failed:
            texts.append(f"no plan at {plural(failed, 'point')}")
        figure.suptitle("; ".join(["the best plan of each point", *texts]))
        handles: dict[str, Any] = {}
        for each in grid[:, 0]:
            handles |= dict(zip(*reversed(each.get_legend_handles_labels()), strict=True))
        if others:
            title = ", ".join(_AXIS_NAMES.get(name, name) for name in others)
            figure.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False, title=title)
        figure.draw_without_rendering()  # places everything, so that names can keep clear of each other
        for each, points in zip(grid[:, 0], named, strict=True):
            _name(each, points)
        return _drawn(figure, target)


def _curves(
    axes: Any, rows: Sequence[Mapping[str, Any]], goal: str, across: str, others: Sequence[str]
) -> list[tuple[str, float, float, str]]:
    """The lines of one goal.

    Returns:
        (plan, x, y, colour) of the points where the plan changes along a line.
    """
    column, what = GOALS[goal]
    if goal == "cost" and any(row[column] is None for row in rows):
        column, what = _UNPRICED
    numbers = across in NUMBERS
    places: list[Any] = (
        sorted({row[across] for row in rows}) if numbers else list(dict.fromkeys(str(row[across]) for row in rows))
    )
    found: dict[tuple[Any, ...], dict[Any, Mapping[str, Any]]] = {}
    for row in rows:
        key = row[across] if numbers else str(row[across])
        found.setdefault(tuple(row[name] for name in others), {})[key] = row
    named = []
    values = [row[column] for row in rows]
    for index, (names, points) in enumerate(found.items()):
        xs = places if numbers else list(range(len(places)))
        ys = [points[place][column] if place in points else np.nan for place in places]
        colour, marker = PALETTE[index % len(PALETTE)], MARKERS[index // len(PALETTE) % len(MARKERS)]
        style = "-" if numbers else ""
        label = ", ".join(map(_said, names))
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, linestyle=style, linewidth=1.4, label=label)
        before = None
        for x, place in zip(xs, places, strict=True):
            plan = points[place]["plan"] if place in points else None
            if plan is not None and (plan != before or not numbers):
                named.append((plan, float(x), float(points[place][column]), colour))
            before = plan
    if numbers:
        if _multiplies(places):
            axes.set_xscale("log")
        axes.set_xticks(places if len(places) <= 12 else places[:: -(-len(places) // 12)])
        axes.set_xticklabels([short(place, 3) for place in axes.get_xticks()])
        axes.minorticks_off()
    else:
        axes.set_xticks(range(len(places)), places)
        axes.set_xlim(-0.5, len(places) - 0.5)
    if max(values) >= WIDE * min(values):
        axes.set_yscale("log")
        _plain_ticks(axes, "y")
    else:
        axes.set_ylim(0, 1.12 * max(values))
    axes.set(xlabel=_AXIS_NAMES.get(across, across), ylabel=what)
    axes.grid(which="major", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    return named


def _multiplies(values: Sequence[float]) -> bool:
    """Whether numbers grow by a factor rather than by steps: then their axis is logarithmic."""
    if len(values) < 3 or values[-1] < 4 * values[0]:
        return False
    return bool(values[1] / values[0] < 1.5 * values[-1] / values[-2])


def _name(axes: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Writes plans beside their points, where they fit: within the axes, clear of lines and of each other."""
    drawn = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    steps = np.linspace(0, 1, 33)[:, None]
    strokes = np.concatenate(
        [each for line in drawn for each in (line, *(a + steps * (b - a) for a, b in pairwise(line)))]
    )
    taken: list[tuple[float, float, float, float]] = []
    frame = axes.get_window_extent()
    dots = axes.figure.dpi / 72  # pixels of a point
    high = 8.5 * dots
    for text, x, y, colour in points[:MOST_LABELS]:
        at_x, at_y = axes.transData.transform((x, y))
        wide = 4.4 * len(text) * dots
        for right, above in ((False, True), (True, False), (True, True), (False, False)):
            left = at_x + (5 * dots if right else -5 * dots - wide)
            low = at_y + (4 * dots if above else -4 * dots - high)
            box = (left, low, left + wide, low + high)
            inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
            x_in = (strokes[:, 0] > box[0]) & (strokes[:, 0] < box[2])
            crossed = bool((x_in & (strokes[:, 1] > box[1]) & (strokes[:, 1] < box[3])).any())
            if inside and not crossed and not any(_meet(box, other) for other in taken):
                taken.append(box)
                axes.annotate(
                    text, (x, y), xytext=(5 if right else -5, 4 if above else -4), textcoords="offset points",
                    fontsize=7, color=colour, ha="left" if right else "right", va="bottom" if above else "top",
                )  # fmt: skip
                break


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes (left, low, right, high) overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _said(value: Any) -> str:
    return "-" if value is None else str(value)


def comparison_plot(plans: Sequence[Breakdown], labels: Sequence[str], target: str) -> bytes:
    """The goal of every candidate as a bar of its items, each item in one colour, the largest first.

    Args:
        plans: the candidates, itemised.
        labels: what they are called.
        target: the file; its name says the kind.
    """
    goal = plans[0].goal
    found = segments(lines(plans))
    bars, key = 0.6 * len(plans), 0.19 * len(found)  # inches
    thick = 0.62 * min(1.0, bars / max(bars, key))
    with _figure(SIZE[0], 1.2 + max(bars, key)) as figure:
        axes = figure.subplots()
        places = np.arange(len(plans))
        ends = {True: np.zeros(len(plans)), False: np.zeros(len(plans))}
        for index, line in enumerate(found):
            values = np.array(line.values)
            start = np.where(values < 0, ends[False], ends[True])
            last = line.item.endswith(OTHERS_ITEM) and index == len(found) - 1
            colour = GREY if last else PALETTE[index % len(PALETTE)]
            hatch = None if last or index < len(PALETTE) else "///"
            name = f"{line.item} ({PHASES.get(line.phase, line.phase)})" if line.phase else line.item
            axes.barh(
                places, values, left=start, height=thick, color=colour, hatch=hatch, edgecolor="#ffffff", linewidth=0.6,
                label=name,
            )  # fmt: skip
            ends[True] = ends[True] + np.maximum(values, 0)
            ends[False] = ends[False] + np.minimum(values, 0)
        for place, plan in zip(places, plans, strict=True):
            axes.annotate(
                signed(plan.goal_value()), (ends[True][place], place), xytext=(4, 0),
                textcoords="offset points", va="center", fontweight="bold",
            )  # fmt: skip
        room = 1.03 + 0.022 * max(len(signed(plan.goal_value())) for plan in plans)
        axes.set_xlim(1.02 * np.min(ends[False]), room * np.max(ends[True]))
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel(f"{goal.what}, {goal.unit}")
        axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        work = plans[0].request.workload
        models, machines = (
            ", ".join(dict.fromkeys(names))
            for names in (
                [plan.request.model.name for plan in plans],
                [f"{plan.request.gpus} x {plan.request.hardware.name}" for plan in plans],
            )
        )
        title = f"{models} on {machines}; {work.isl} tokens in, {work.osl} out"
        axes.set_title("\n".join(textwrap.wrap(title, TITLE, break_on_hyphens=False)), loc="left")
        figure.legend(loc="outside right upper", frameon=False)
        return _drawn(figure, target)


OTHERS_ITEM = "others"


def segments(found: Sequence[Line]) -> list[Line]:
    """Items that are seen in a bar, the largest first, and the rest as one line; the columns keep their sums."""
    longest = max(sum(values) for values in zip(*(line.values for line in found), strict=True))

    def most(line: Line) -> float:
        return max(map(abs, line.values))

    order = sorted(found, key=lambda line: -most(line))
    kept = [line for line in order[:MOST_SEGMENTS] if most(line) >= LEAST_SEGMENT * longest]
    rest = order[len(kept) :]
    if not rest:
        return kept
    sums = tuple(sum(values) for values in zip(*(line.values for line in rest), strict=True))
    return [*kept, Line("", f"{len(rest)} {OTHERS_ITEM}", sums)]


def _bars(axes: Any, items: Sequence[Item], bounds: Sequence[str]) -> None:
    """A bar for each item, its parts side by side; what is below 0 (a saving) goes to the left."""
    places = np.arange(len(items))
    ends = {True: np.zeros(len(items)), False: np.zeros(len(items))}
    for bound in bounds:
        values = np.array([item.parts[bound] / MS for item in items])
        start = np.where(values < 0, ends[False], ends[True])
        axes.barh(places, values, left=start, height=0.75, color=BOUND_COLOURS[bound], label=bound)
        ends[True] = ends[True] + np.maximum(values, 0)
        ends[False] = ends[False] + np.minimum(values, 0)
    floors = [
        (place, item.floor / MS)
        for place, item in zip(places, items, strict=True)
        if 0 < floor_of(item) <= item.seconds
    ]
    axes.plot(
        [floor for _, floor in floors], [place for place, _ in floors], linestyle="", marker="|", markersize=13,
        markeredgewidth=2, color="#000000", label="floor of physics",
    )  # fmt: skip
    axes.set_xlim(1.05 * np.min(ends[False]), 1.05 * np.max(ends[True]))
    axes.set_yticks(places, [item.name for item in items])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)


def _kind(target: str) -> str:
    return Path(target).suffix.removeprefix(".").lower()


@contextmanager
def _figure(width: float, height: float) -> Iterator[Any]:
    """A figure of so many inches with matplotlib's own style, whatever the user's is."""
    matplotlib = import_module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {"svg.fonttype": "none", "svg.hashsalt": "plan", "font.size": 9, "axes.titlesize": 10}
        )
        figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        yield figure


def _plain_ticks(axes: Any, which: str) -> None:
    """Ticks of logarithmic axes as plain numbers: 20, not 2 x 10^1."""
    ticker = import_module("matplotlib.ticker")
    for name in which:
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: short(value, 3)))
        axis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.5, 0.6), labelOnlyBase=False))


def _drawn(figure: Any, target: str) -> bytes:
    """The figure as the bytes of its file."""
    kind = _kind(target)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DOTS, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()
