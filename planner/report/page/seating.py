"""The placement picture as SVG: nodes as frames, chips as cells, coloured by replica and stage.

Chips of one tensor-parallel group on a node are one band. A page shows the picture as it is; as a file it brings its
own background.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.seats import Seat, seats
from planner.report.figures import plural
from planner.report.page.markup import Markup, element, joined
from planner.report.placement import captions, hosts, letters

SHADES = (
    ("#a9d6f2", "#6db3e3"), ("#fbd09a", "#f0a84f"), ("#a7dfc2", "#62c096"), ("#ecc0da", "#d98bb9"),
    ("#f4ec9f", "#dccb45"), ("#c3c8f3", "#969fe6"), ("#f5bcb0", "#e58a76"), ("#d6dcb8", "#b0bc7c"),
)  # fmt: skip
"""Two shades for each replica in turn, for its even and odd stages; dark text is read on all of them."""
DARK, BACKGROUND = "#16191d", "#ffffff"
FONT = "font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
ACROSS = 16
"""Chips of a line where no host says how many."""
WIDEST = 980.0
"""Pixels; as many nodes beside each other as fit."""
MOST_LINES, LAST_LINES = 128, 8
"""Lines of chips, and how many of them are at the end where the middle ones are left out."""
HIGH, GAP, PAD, STEP = 28.0, 4.0, 7.0, 10.0
_LETTER = 6.9  # pixels of a letter of 11
_WORD = 6.7  # of one of 12, on average


class _Chips(NamedTuple):
    """A line of chips of a node."""

    node: int
    first: int
    chips: int


class _Cell(NamedTuple):
    """What stands on a chip."""

    replica: int
    stage: int
    rank: int

    @property
    def text(self) -> str:
        return f"{letters(self.replica)}{self.stage}.{self.rank}"

    @property
    def colour(self) -> str:
        return SHADES[self.replica % len(SHADES)][self.stage % 2]


def seating(placement: Placement, plan: Plan) -> Markup:
    """The picture, in the text colour and on the background of what it stands in.

    Args:
        placement: the machine, which holds the plan.
        plan: what stands on it.
    """
    return _picture(placement, plan, standalone=False)


def seating_file(placement: Placement, plan: Plan) -> str:
    """The picture as a file of its own, with a title and what connects the chips below it."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{_picture(placement, plan, standalone=True)}\n'


def title_of(placement: Placement, plan: Plan) -> str:
    """What the picture shows, in a sentence."""
    idle = placement.usable - plan.chips
    spare = f", {plural(idle, 'chip')} of {placement.usable} idle" if idle else ""
    return f"{plan.label} on {plural(len(hosts(placement)), 'node')} of {placement.hardware.name}{spare}"


def _cells(placement: Placement, plan: Plan) -> dict[Seat, _Cell]:
    across = plan.tp * plan.cp
    return {
        seat: _Cell(copy, *divmod(place, across))
        for copy, replica in enumerate(seats(placement, plan))
        for place, seat in enumerate(replica)
    }


def _lines(nodes: Sequence[int]) -> list[_Chips]:
    """Nodes cut into lines."""
    return [
        _Chips(node, first, min(ACROSS, chips - first))
        for node, chips in enumerate(nodes)
        for first in range(0, chips, ACROSS)
    ]


def _picture(placement: Placement, plan: Plan, standalone: bool) -> Markup:
    cells = _cells(placement, plan)
    nodes = hosts(placement)
    lines = _lines(nodes)
    left = max(0, len(lines) - MOST_LINES)
    upper, lower = (lines, []) if not left else (lines[: MOST_LINES - LAST_LINES], lines[-LAST_LINES:])
    pitch = GAP + max(34.0, 12 + _LETTER * max(len(cell.text) for cell in cells.values()))
    stub = 14 + _WORD * len(f"node {len(nodes) - 1}")
    most = max(line.chips for line in lines)
    block = stub + most * pitch + 2 * PAD
    beside = max(1, min(int(WIDEST // (block + STEP)), -(-len(nodes) // 2), 4)) if max(nodes) <= ACROSS else 1
    width = beside * (block + STEP) - STEP + 2
    drawn: list[Markup] = []
    y = 1.0
    if standalone:
        heading = _wrapped(f"Placement of {title_of(placement, plan)}", max(width, 320.0), 1.15)
        width = max(width, 320.0)
        drawn.append(_paragraph(heading, y, 14, weight="600"))
        y += 20 * len(heading) + 6
    if max(nodes) <= ACROSS:
        drawn += [
            _text(str(chip), 1 + column * (block + STEP) + stub + PAD + (chip + 0.5) * pitch - GAP / 2, y + 9, 10, True)
            for column in range(beside)
            for chip in range(most)
        ]
        y += 16
    for part in (upper, lower):
        if part is lower and left:
            drawn.append(_text(f"... {plural(left, 'more line')} like these ...", 12, y + 16, 12))
            y += 30
        made, y = _blocks(part, cells, beside, block, stub, pitch, y)
        drawn += made
    made, y = _legend(plan, placement.usable > plan.chips, width, y + 6)
    drawn += made
    if standalone:
        for sentence in captions(placement, plan, seats(placement, plan)):
            wrapped = _wrapped(sentence, width)
            drawn.append(_paragraph(wrapped, y, 12))
            y += 17 * len(wrapped) + 2
    room = 14.0 if standalone else 0.0
    view = f"{-room:g} {-room:g} {width + 2 * room:.0f} {y + 2 * room:.0f}"
    attributes = {"viewBox": view, "width": f"{width + 2 * room:.0f}", "height": f"{y + 2 * room:.0f}", "role": "img"}
    title = element("title", f"Placement of {title_of(placement, plan)}")
    if not standalone:
        return element("svg", title, *drawn, class_="seating", **attributes)
    back = element("rect", x=-room, y=-room, width=width + 2 * room, height=y + 2 * room, fill=BACKGROUND)
    style = f"color:{DARK};{FONT}"
    return element("svg", title, back, *drawn, xmlns="http://www.w3.org/2000/svg", style=style, **attributes)


def _blocks(
    lines: Sequence[_Chips],
    cells: dict[Seat, _Cell],
    beside: int,
    block: float,
    stub: float,
    pitch: float,
    y: float,
) -> tuple[list[Markup], float]:
    """Lines grouped into nodes, `beside` of them in a row; and where they end."""
    drawn: list[Markup] = []
    groups: dict[int, list[_Chips]] = {}
    for line in lines:
        groups.setdefault(line.node, []).append(line)
    column, deepest = 0, y
    for node, own in groups.items():
        if column == beside:
            column, y = 0, deepest
        x = 1 + column * (block + STEP)
        high = len(own) * (HIGH + GAP) - GAP + 2 * PAD
        drawn.append(
            element(
                "rect", x=x, y=y, width=block, height=high, rx="8", fill="none", stroke="currentColor",
                stroke_opacity=".28",
            )
        )  # fmt: skip
        drawn.append(_text(f"node {node}", x + 10, y + PAD + HIGH / 2 + 4, 12))
        for place, line in enumerate(own):
            drawn += _chips(line, cells, x + stub + PAD, y + PAD + place * (HIGH + GAP), pitch)
        column += 1
        deepest = max(deepest, y + high + STEP)
    return drawn, deepest


def _chips(line: _Chips, cells: dict[Seat, _Cell], x: float, y: float, pitch: float) -> Iterator[Markup]:
    """A band for each tensor-parallel group on the line, and the chips' names."""
    place = 0
    while place < line.chips:
        cell = cells.get(Seat(line.node, line.first + place))
        end = place + 1
        if cell is None:
            yield _idle(x + place * pitch, y, pitch - GAP, f"chip {line.first + place} of node {line.node}: idle")
            place = end
            continue
        while end < line.chips:
            following = cells.get(Seat(line.node, line.first + end))
            if following is None or following[:2] != cell[:2]:
                break
            end += 1
        band = element(
            "rect", x=x + place * pitch, y=y, width=(end - place) * pitch - GAP, height=HIGH, rx="5", fill=cell.colour
        )
        names = []
        for chip in range(place, end):
            own = cells[Seat(line.node, line.first + chip)]
            if chip > place:
                at = x + chip * pitch - GAP / 2
                names.append(
                    element("line", x1=at, x2=at, y1=y + 6, y2=y + HIGH - 6, stroke=DARK, stroke_opacity=".25")
                )
            names.append(_text(own.text, x + chip * pitch + (pitch - GAP) / 2, y + HIGH / 2 + 4, 11, True, DARK))
        about = (
            f"replica {letters(cell.replica)}, stage {cell.stage}: chips {line.first + place} to "
            f"{line.first + end - 1} of node {line.node}"
        )
        yield element("g", element("title", about), band, *names)
        place = end


def _idle(x: float, y: float, width: float, about: str) -> Markup:
    frame = element(
        "rect", x=x + 0.5, y=y + 0.5, width=width - 1, height=HIGH - 1, rx="5", fill="none", stroke="currentColor",
        stroke_opacity=".5", stroke_dasharray="3 3",
    )  # fmt: skip
    return element("g", element("title", about), frame, _text("idle", x + width / 2, y + HIGH / 2 + 4, 10, True))


def _legend(plan: Plan, spare: bool, width: float, y: float) -> tuple[list[Markup], float]:
    """A swatch for each colour, in lines; and where they end."""
    shown = min(plan.dp, len(SHADES))
    entries: list[tuple[str | None, str]] = []
    for copy in range(shown):
        for parity in range(min(2, plan.pp)):
            stages = list(range(parity, plan.pp, 2))
            some = ", ".join(map(str, stages if len(stages) < 4 else [*stages[:2], "...", stages[-1]]))
            stage = "" if plan.pp == 1 else f", stage{'s' if len(stages) > 1 else ''} {some}"
            entries.append((SHADES[copy][parity], f"replica {letters(copy)}{stage}"))
    if plan.dp > shown:
        entries.append(("", f"further replicas have the colours of these in turn, to {letters(plan.dp - 1)}"))
    if spare:
        entries.append((None, "idle"))
    drawn, x = [], 1.0
    for colour, text in entries:
        wide = 22 + _WORD * len(text) + 14
        if x > 1 and x + wide > width:
            x, y = 1.0, y + 22
        if colour is None:
            drawn.append(
                element(
                    "rect", x=x + 0.5, y=y + 0.5, width="15", height="13", rx="3", fill="none", stroke="currentColor",
                    stroke_opacity=".5", stroke_dasharray="3 3",
                )
            )  # fmt: skip
        elif colour:
            drawn.append(element("rect", x=x, y=y, width="16", height="14", rx="3", fill=colour))
        drawn.append(_text(text, x + 22, y + 11, 12))
        x += wide
    return drawn, y + 28


def _text(text: str, x: float, y: float, size: int, middle: bool = False, fill: str = "currentColor") -> Markup:
    anchor = "middle" if middle else None
    return element("text", text, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor)


def _wrapped(text: str, width: float, factor: float = 1.0) -> list[str]:
    import textwrap  # noqa: PLC0415 (files only)

    return textwrap.wrap(text, max(20, int(width / (_WORD * factor))), break_on_hyphens=False)


def _paragraph(lines: Sequence[str], y: float, size: int, weight: str | None = None) -> Markup:
    """Lines of text below each other."""
    spans = [element("tspan", line, x="1", dy=f"{size + 5}" if place else None) for place, line in enumerate(lines)]
    return element("text", joined(spans), y=y + size, font_size=size, font_weight=weight, fill="currentColor")
