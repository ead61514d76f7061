"""A picture of where a plan stands: a line for each node, a cell for each chip, coloured on a terminal.

A cell such as `B1.3` is replica B, stage 1, rank 3. Chips that share what stands before the dot are one tensor-parallel
group, and have one colour: a hue for each replica, two shades of it for its stages in turn.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.seats import Seat, level_between, seats
from planner.report.figures import plural
from planner.report.table import paragraphs, show, width

HUES = ("green", "cyan", "magenta", "yellow", "blue", "red")
IDLE = "-"
MOST_LINES = 32
"""Lines of a picture; of more the middle ones are left out."""
LAST_LINES = 2
MOST_CELLS = 16
"""Chips of a line where no host says how many."""
LETTERS = 26


class Piece(NamedTuple):
    """A part of a line in one style."""

    text: str
    style: str = ""


Line = list[Piece]


def letters(number: int) -> str:
    """A replica's name by its number from 0: A to Z, then AA, AB, ..., as columns of a spreadsheet."""
    name = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, LETTERS)
        name = chr(ord("A") + digit) + name
    return name


def print_placement(placement: Placement, plan: Plan) -> None:
    """A title, the picture, and what connects the chips.

    Args:
        placement: the machine, which holds the plan.
        plan: what stands on it.
    """
    found = seats(placement, plan)
    nodes = hosts(placement)
    title = f"Placement of {plan.label}: {plural(len(nodes), 'node')} of {placement.hardware.name}"
    if idle := placement.usable - plan.chips:
        title += f", {plural(idle, 'chip')} of {placement.usable} idle ({IDLE})"
    show(paragraphs([f"{title}."]))
    _show_pieces(picture(placement, plan, width()))
    show(paragraphs(list(captions(placement, plan, found))))


def picture(placement: Placement, plan: Plan, limit: int) -> list[Line]:
    """The lines of the picture, headings of the chips first.

    Args:
        placement: the machine, which holds the plan.
        plan: what stands on it.
        limit: columns; a node whose chips need more takes several lines.
    """
    cells = _cells(placement, plan)
    nodes = hosts(placement)
    name_width = len(f"node {len(nodes) - 1}")
    cell_width = max(len(str(max(nodes) - 1)), *(len(piece.text) for piece in cells.values()))
    most = max(nodes)
    across = most if placement.hardware.host_chips else min(most, MOST_CELLS)
    while across > 1 and name_width + across * (cell_width + 2) > limit:
        across = -(-across // 2)
    lines: list[Line] = []
    for node, chips in enumerate(nodes):
        for start in range(0, chips, across):
            row = [cells.get(Seat(node, chip), Piece(IDLE, "dim")) for chip in range(start, min(start + across, chips))]
            lines.append(_line(f"node {node}" if start == 0 else "", name_width, row, cell_width))
    left = len(lines) - MOST_LINES
    if left > 0:
        lines[MOST_LINES - LAST_LINES - 1 : -LAST_LINES] = [[Piece(f"... {left + 1} more lines")]]
    if across < most:  # a heading would number the chips of a node's first line only
        return lines
    heading = [Piece(str(chip), "bold") for chip in range(most)]
    return [_line("chip", name_width, heading, cell_width), *lines]


def _line(name: str, name_width: int, row: Sequence[Piece], cell_width: int) -> Line:
    """A line of cells with a gap of two before each; the gap has no colour, so that groups stay apart."""
    line = [Piece(name.ljust(name_width), "bold")]
    for piece in row:
        line += [Piece("  "), Piece(piece.text.ljust(cell_width), piece.style)]
    return line


def _cells(placement: Placement, plan: Plan) -> dict[Seat, Piece]:
    """What stands on each chip that is used."""
    found: dict[Seat, Piece] = {}
    across = plan.tp * plan.cp
    for copy, replica in enumerate(seats(placement, plan)):
        hue = HUES[copy % len(HUES)]
        for place, seat in enumerate(replica):
            stage, rank = divmod(place, across)
            style = f"black on {'bright_' if stage % 2 else ''}{hue}"
            found[seat] = Piece(f"{letters(copy)}{stage}.{rank}", style)
    return found


def hosts(placement: Placement) -> list[int]:
    """Chips of each node; the last has what is left of them."""
    chips, host = placement.usable, placement.hardware.host_chips
    if host is None:
        return [chips]
    return [min(host, chips - start) for start in range(0, chips, host)]


def captions(placement: Placement, plan: Plan, found: Sequence[Sequence[Seat]]) -> Iterator[str]:
    """How to read a cell, and which network carries what."""
    across = plan.stage_chips
    copy, stage, rank = plan.dp - 1, plan.pp - 1, across - 1
    together = "tensor-parallel group"
    if plan.cp > 1:
        together = f"stage: {plan.cp} groups of {plural(plan.tp, 'chip')}, in the order of ranks, that share prompts"
    yield (
        f"{letters(copy)}{stage}.{rank} is rank {rank} of stage {stage} of replica {letters(copy)}; cells that share "
        f"what stands before the dot are one {together}."
    )
    replicas = [[replica[at : at + across] for at in range(0, len(replica), across)] for replica in found]
    if plan.tp > 1:
        parts = (
            group[at : at + plan.tp] for groups in replicas for group in groups for at in range(0, across, plan.tp)
        )
        within = Counter(level_between(placement, part) for part in parts)
        yield f"Tensor-parallel groups: {_by_level(placement, within)}."
    if plan.cp > 1:
        whole = Counter(level_between(placement, group) for groups in replicas for group in groups)
        yield f"Stages whose groups share prompts: {_by_level(placement, whole)}."
    if plan.pp > 1:
        between = Counter(
            level_between(placement, [before[0], after[0]]) for groups in replicas for before, after in pairwise(groups)
        )
        yield f"Boundaries between stages: {_by_level(placement, between)}."
    if placement.slice is not None:
        box = placement.torus_groups[across].axes
        yield (
            f"Chips of the {placement.slice} slice are numbered in the order of ranks; a group is a box of "
            f"{'x'.join(map(str, box))} of them."
        )


def _by_level(placement: Placement, counts: Counter[int]) -> str:
    levels = placement.hardware.network
    return ", ".join(f"{count} over {levels[level].name}" for level, count in sorted(counts.items()))


def _show_pieces(lines: Sequence[Line]) -> None:
    """Prints lines of pieces, styled where stdout is a terminal."""
    if not sys.stdout.isatty():
        show(["".join(piece.text for piece in line).rstrip() for line in lines])
        return
    from rich.console import Console  # noqa: PLC0415 (needed on terminals only, and slow)
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        text = Text.assemble(*line)
        text.rstrip()
        console.print(text)
