"""A strategy's timeline and placement as a picture (see `plot` for what pictures have in common)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.opgraph.comparing import Comparison
from planner.opgraph.strategies import coordinates
from planner.report.figures import short
from planner.report.plot import PALETTE, SIZE, _drawn, _figure
from planner.units import MS

NUMBERED = 16
"""Chips up to which a picture of a placement says the part that each has."""


def timeline_plot(found: Comparison, target: str) -> bytes:
    """A strategy's step on its lanes: a bar for each task, and below which chips each kind of operator is on.

    Args:
        found: the strategy.
        target: the file; its name says the kind.
    """
    simulation = found.simulation()
    operators, names = found.problem.graph.operators, found.problem.machine.lanes
    kinds = list(dict.fromkeys(_kind_of(operator.name) for operator in operators))
    colours = {kind: PALETTE[index % len(PALETTE)] for index, kind in enumerate(kinds)}
    spans = simulation.spans()
    devices = found.problem.machine.devices

    def order(lane: int) -> tuple[bool, str, list[int]]:
        words = names[lane].replace(",", " ").replace("-", " ").replace(".", " ").split()
        return lane >= devices, words[0], [int(word) for word in words if word.isdigit()]

    lanes = sorted({span.lane for span in spans}, key=order)
    rows = {lane: place for place, lane in enumerate(lanes)}
    with _figure(SIZE[0], max(4.0, 0.2 * len(lanes) + 0.2 * len(kinds) + 2.4)) as figure:
        axes, below = figure.subplots(2, height_ratios=[max(4, len(lanes)), max(2, len(kinds))])
        for kind in kinds:
            own = [span for span in spans if _kind_of(operators[span.operator].name) == kind and span.end > span.start]
            axes.barh(
                [rows[span.lane] for span in own], [(span.end - span.start) / MS for span in own],
                left=[span.start / MS for span in own], height=0.8, color=colours[kind], label=kind,
                edgecolor="white", linewidth=0.2,
            )  # fmt: skip
        axes.set_yticks(range(len(lanes)), [names[lane] for lane in lanes])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{found.problem.graph.name}: {short(simulation.cost / MS)} ms a step")
        _placement(below, found, kinds)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        return _drawn(figure, target)


def _placement(axes: Any, found: Comparison, kinds: Sequence[str]) -> None:
    """Kinds of operators by chips: how many of them have a task there, and which part that is where it is one."""
    devices = found.problem.machine.devices
    parts: list[list[list[str]]] = [[[] for _ in range(devices)] for _ in kinds]
    counts = dict.fromkeys(kinds, 0)
    for operator, config in zip(found.problem.graph.operators, found.found.strategy, strict=True):
        kind = _kind_of(operator.name)
        counts[kind] += 1
        for device, part in zip(config.devices, coordinates(config.degrees), strict=True):
            own = [str(place) for place, ways in zip(part, config.degrees, strict=True) if ways > 1]
            parts[kinds.index(kind)][device].append(".".join(own) or "all")
    shares = [[len(cell) / counts[kind] for cell in row] for row, kind in zip(parts, kinds, strict=True)]
    axes.imshow(shares, aspect="auto", cmap="Greys", vmin=0, vmax=2 * max(1.0, *map(max, shares)))
    for row, cells in enumerate(parts):
        for device, cell in enumerate(cells):
            if devices <= NUMBERED and len(set(cell)) == 1:
                axes.text(device, row, cell[0], ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xticks(range(devices) if devices <= NUMBERED else range(0, devices, 8))
    axes.set_xticks([device + 0.5 for device in range(devices - 1)], minor=True)
    axes.set_yticks([row + 0.5 for row in range(len(kinds) - 1)], minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.set_xlabel("chip; darker: more of such operators have a task there; number: the part of each split dimension")


def _kind_of(name: str) -> str:
    """An operator's name without the layer before it."""
    first, _, rest = name.partition(" ")
    return rest if first.isdigit() and rest else name
