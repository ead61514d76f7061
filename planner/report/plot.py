"""Pictures in files, SVG or PNG, by matplotlib, an optional extra that is imported when one is asked for.

Their bytes are the same for the same figures: no date, identifiers with a salt of their own, and none of the user's
styles. In SVG, texts stay texts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from planner.costs.roofline import BOUNDS
from planner.costs.serving import OWN, STEP
from planner.diagnosing.framework import Diagnosis
from planner.errors import InputError
from planner.explaining.breakdown import Breakdown, Item
from planner.ranking import Ranking, tradeoff
from planner.report.explain import FAR, shown_items
from planner.report.figures import plural, short
from planner.report.tabular import check_writable
from planner.units import GB, MS, TERA

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


def roofline_plot(found: Diagnosis, target: str) -> bytes:
    """A chip's roofline with the phases of a diagnosis on it: what they reach at their intensity.

    Args:
        found: the diagnosis.
        target: the file; its name says the kind.
    """
    chip = found.hardware.chip
    peak, bandwidth = chip.peak(chip.native_dtype), chip.memory_bandwidth
    ridge = peak / bandwidth
    spots = [spot.intensity for spot in found.spots]
    low, high = min(0.5, *spots) / 2, max(4 * ridge, *spots) * 2
    with _figure(*SIZE) as figure:
        axes = figure.subplots()
        axes.plot(
            [low, ridge, high], [low * bandwidth / TERA, peak / TERA, peak / TERA], color="#444444", linewidth=1.2,
            label=f"{found.hardware.name}: {short(peak / TERA)} TFLOP/s, {short(bandwidth / GB)} GB/s",
        )  # fmt: skip
        axes.axvline(ridge, color=GREY, linewidth=0.8, linestyle="--", label=f"ridge {short(ridge, 3)} FLOP/B")
        for index, spot in enumerate(found.spots):
            axes.plot(
                [spot.intensity], [spot.flops / spot.seconds / TERA], linestyle="", marker=MARKERS[index],
                markersize=8, color=PALETTE[index],
                label=f"{spot.phase} ({spot.plan}): {short(spot.intensity, 3)} FLOP/B",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte moved", ylabel="TFLOP/s of a chip")
        axes.set_title(f"{found.model} on {found.hardware.name}, {found.engine}; {found.what}")
        _plain_ticks(axes, "xy")
        axes.grid(which="both", color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", frameon=False)
        return _drawn(figure, target)


def _floor(item: Item) -> float:
    """Seconds of the floor where it says something, as in the tables: else 0."""
    own = item.phase in ("", OWN, STEP)
    return item.floor if own and item.seconds < FAR * item.floor else 0.0


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
        (place, item.floor / MS) for place, item in zip(places, items, strict=True) if 0 < _floor(item) <= item.seconds
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
