"""The picture of a phase diagram (see `plot` for what pictures have in common)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from planner.phases.region.diagram import Diagram
from planner.phases.region.surface import Dimension
from planner.report.diagram import GOALS, NAMES, letters
from planner.report.plot import GREY, PALETTE, SIZE, _drawn, _figure, _plain_ticks

FAINT = 0.45
"""Strength of the colour of points at which the lead is within the model's error."""


def diagram_plot(found: Diagram, target: str) -> bytes:
    """Cells in the colours of their leaders, faint where that is a tie; dots where a change was bisected to.

    Args:
        found: the diagram.
        target: the file; its name says the kind.
    """
    marks = letters(found)
    colours = {plan: PALETTE[index % len(PALETTE)] for index, plan in enumerate(marks)}
    rgb = import_module("matplotlib.colors").to_rgb
    cells = np.ones((len(found.up), len(found.across), 3))
    for row, b in enumerate(found.up):
        for column, a in enumerate(found.across):
            cell = found.cells[a, b]
            if cell.plan is not None:
                strength = FAINT if cell.lead <= found.error else 1.0
                cells[row, column] = 1 - strength * (1 - np.array(rgb(colours[cell.plan])))
    first, second = found.dimensions
    with _figure(*SIZE) as figure:
        axes = figure.subplots()
        mesh = axes.pcolormesh(_borders(first, found.across), _borders(second, found.up), cells)
        mesh.set_edgecolor("face")
        spots = [(each.low, each.held) if each.axis == 0 else (each.held, each.low) for each in found.edges]
        if spots:
            axes.plot(*zip(*spots, strict=True), linestyle="", marker="o", markersize=2.5, color="#000000",
                      label="changes here, to one step")  # fmt: skip
        for axis, dimension in (("x", first), ("y", second)):
            if dimension.least > 0:
                getattr(axes, f"set_{axis}scale")("log")
                _plain_ticks(axes, axis)
            getattr(axes, f"set_{axis}label")(NAMES[dimension.name])
        shares = {region.plan: region.share for region in found.regions}
        patch = import_module("matplotlib.patches").Patch
        handles: list[Any] = [
            patch(color=colours[plan], label=f"{mark}: {plan.label}, {_share(shares[plan])}")
            for plan, mark in marks.items()
        ]
        if None in shares:
            handles.append(patch(facecolor="#ffffff", edgecolor=GREY, label=f"no plan runs, {_share(shares[None])}"))
        handles += axes.get_legend_handles_labels()[0]
        request = found.request
        axes.set_title(
            f"{request.model.name} on {request.hardware.name}, {request.engine.name} {request.engine.version}: "
            f"the plan of {GOALS[request.objective]}\nfaint: by less than {found.error:.0%}",
            loc="left",
        )
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        return _drawn(figure, target)


def _share(value: float) -> str:
    return "<1%" if value < 0.005 else f"{value:.0%}"


def _borders(dimension: Dimension, values: tuple[float, ...]) -> Any:
    """Borders of the cells around values: half-way to their neighbours on the scale of the axis."""
    scale = np.asarray(values, dtype=float)
    scale = np.log(scale) if dimension.least > 0 else scale
    inner = (scale[1:] + scale[:-1]) / 2
    whole = np.concatenate([scale[:1], inner, scale[-1:]])
    return np.exp(whole) if dimension.least > 0 else whole
