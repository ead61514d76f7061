"""Where the time and the memory of a plan go: tables whose last column is a bar."""

from __future__ import annotations

from collections.abc import Sequence

from planner.costs.roofline import BOUNDS
from planner.explaining.breakdown import Breakdown, Item, Times, floored
from planner.explaining.difference import brought_together, lines
from planner.report.explain import LEAST, PHASES, floor_of, floor_sentence, shown_items, signed
from planner.report.figures import short
from planner.report.page.markup import Markup, element, joined
from planner.report.page.ranked import plain
from planner.units import GIB, MS

LONG = 1000.0
"""Units of a bar of full length; it stretches to its cell."""
MEMORY_COLOURS = {"weights": "m1", "KV": "m2", "activations": "m3", "runtime": "m4", "free": "m0"}


def times(plan: Breakdown) -> Markup:
    """TTFT and TPOT of a plan, an item a row, and their floors in a sentence each."""
    parts: list[object] = [_key()]
    for name, words, found in (
        ("TTFT", "the prompt's way to its first token", plan.ttft),
        ("TPOT", "a step that gives every request a token", plan.tpot),
    ):
        if found.items:
            parts.append(_table(name, f"{name} {short(found.total / MS)} ms: {words}", found))
            parts.append(element("p", floor_sentence(plan, floored(found))))
    return joined(parts)


def _key() -> Markup:
    """What the colours of the bars mean."""
    swatches = [element("li", element("i", class_=f"swatch {bound}"), bound) for bound in BOUNDS]
    return element(
        "ul", *swatches, element("li", element("i", class_="swatch floor"), "floor of physics"), class_="key"
    )


def _table(name: str, caption: str, found: Times) -> Markup:
    items = shown_items(found)
    reach = max(sum(max(0.0, value) for value in item.parts.values()) for item in items)
    rows = []
    for item in items:
        floor = floor_of(item)
        share = item.seconds / found.total if found.total else 0.0
        rows.append(
            (
                item.name,
                (item.seconds, signed(item.seconds / MS, 3)),
                (share, f"{share:.1%}"),
                _bar(item, floor, reach),
                item.bound,
                (floor / MS, short(floor / MS, 3)) if floor else "",
            )
        )
    heads = (
        ("item", False), ("ms", True), ("share", True), ("by what bounds it", None), ("bound", False),
        ("floor, ms", True),
    )  # fmt: skip
    return plain(caption, heads, rows, f"times-{name.lower()}")


def _bar(item: Item, floor: float, reach: float) -> Markup:
    """An item's parts side by side, a stroke where its floor is; what is below 0 (a saving) has no length."""
    drawn, at = [], 0.0
    for bound in BOUNDS:
        wide = max(0.0, item.parts[bound]) / reach * LONG if reach else 0.0
        if wide > 0:
            title = element("title", f"{bound} {short(item.parts[bound] / MS, 3)} ms")
            drawn.append(element("rect", title, x=at, y="1", width=max(wide, 1.0), height="12", class_=bound))
            at += wide
    if 0 < floor <= item.seconds:
        place = floor / reach * LONG
        drawn.append(element("line", x1=place, x2=place, y1="0", y2="14", class_="floor"))
    return _stretched(drawn)


def _stretched(drawn: Sequence[Markup]) -> Markup:
    return element(
        "svg", *drawn, viewBox=f"0 0 {LONG:.0f} 14", preserveAspectRatio="none", class_="bar", aria_hidden="true"
    )  # fmt: skip


def memory(plan: Breakdown) -> Markup:
    """What the fullest chip holds."""
    budget = plan.setting.budget.limit
    rows, at = [], 0.0
    for what, held in plan.memory.items():
        wide = max(0.0, held / budget * LONG)
        bar = element("rect", x=at, y="1", width=wide, height="12", class_=MEMORY_COLOURS.get(what, "m4"))
        rows.append((what, (held, f"{held / GIB:.2f}"), (held / budget, f"{held / budget:.1%}"), _stretched([bar])))
        at += wide
    heads = (("part", False), ("GiB", True), ("share", True), (f"of the budget of {budget / GIB:.1f} GiB", False))
    return plain("Memory of the fullest chip", heads, rows, "memory-table", sorts=False)


def difference(plan: Breakdown, rival: Breakdown) -> Markup:
    """Two plans term by term."""
    found = brought_together(lines([plan, rival]), LEAST * plan.goal_value())
    rows = [
        (
            line.item,
            PHASES.get(line.phase, line.phase),
            *((value, signed(value)) for value in line.values),
            (line.differences[1], f"{'+' if line.differences[1] > 0 else ''}{signed(line.differences[1])}"),
        )
        for line in found
    ]
    unit = plan.goal.unit
    heads = (
        ("item", False), ("phase", False), (f"{plan.plan.label}, {unit}", True), (f"{rival.plan.label}, {unit}", True),
        ("difference", True),
    )  # fmt: skip
    return plain(f"{plan.plan.label} and {rival.plan.label}, term by term", heads, rows, "difference")
