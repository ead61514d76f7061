"""`plan crossover` over two options: the region in letters, what each plan is worth, and one plan for all of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.phases.region.diagram import Cell, Diagram, Fixed, Point, Region
from planner.phases.region.surface import FIGURES, Dimension
from planner.plans.plan import Plan
from planner.report.figures import plural, prompt, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.units import MS

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NOTHING, BEYOND = ".", "?"
"""Of points at which no plan runs, and of plans beyond the letters."""
NAMES = {
    "concurrency": "requests in flight", "isl": "tokens of a prompt", "osl": "tokens of an answer", "gpus": "chips",
    "arrival_rate": "requests/s", "prefix_hit": "cached share of a prompt", "max_ttft": "limit on TTFT, ms",
    "max_tpot": "limit on TPOT, ms", "max_latency": "limit on latency, ms",
}  # fmt: skip
GOALS = {
    "latency": "the least latency of a request", "ttft": "the least time to the first token",
    "tpot": "the least time of an output token", "throughput": "the most tokens/s", "cost": "the least cost of a token",
}  # fmt: skip


def letters(found: Diagram) -> dict[Plan, str]:
    """A letter for each plan that leads somewhere, by the size of its region."""
    plans = [region.plan for region in found.regions if region.plan is not None]
    return {plan: LETTERS[index] if index < len(LETTERS) else BEYOND for index, plan in enumerate(plans)}


def rows(found: Diagram) -> list[dict[str, Any]]:
    """A row for each point of the grid: its leader, how far that leads along both options, the second, one for all."""
    spans = [{other: found.stretches(axis, other) for other in (found.up, found.across)[axis]} for axis in (0, 1)]
    table = []
    for b in found.up:
        for a in found.across:
            cell = found.cells[a, b]
            own = [_span(spans[0][b], a), _span(spans[1][a], b)]
            table.append(_row(found, cell, own))
    return table


def _span(spans: list[Any], value: float) -> Any:
    return next(each for each in spans if each.low <= value <= each.high)


def _row(found: Diagram, cell: Cell, spans: list[Any]) -> dict[str, Any]:
    first, second = found.dimensions
    once = found.goals[found.once.plan].get(cell.point, np.inf)
    figures = dict(zip(FIGURES, cell.figures, strict=True))
    return {
        "vary_a": first.option,
        "a": _number(first, cell.point[0]),
        "vary_b": second.option,
        "b": _number(second, cell.point[1]),
        "objective": found.request.objective,
        "plan": _label(cell.plan),
        "goal": _shown(found, cell.goal),
        "next_plan": _label(cell.next),
        "next_goal": _shown(found, cell.next_goal),
        "lead": _finite(cell.lead) if cell.plan is not None else None,
        "tie": None if cell.plan is None else bool(cell.lead <= found.error),
        "a_from": _number(first, spans[0].low),
        "a_to": _number(first, spans[0].high),
        "b_from": _number(second, spans[1].low),
        "b_to": _number(second, spans[1].high),
        **{f"{name}_ms": _finite(figures[name] / MS) for name in FIGURES[:3]},
        "tokens_per_s": _finite(figures["tokens_per_s"]),
        "once_plan": found.once.plan.label,
        "once_goal": _shown(found, once),
        "once_loss": _finite(once / cell.goal - 1) if cell.plan is not None else None,
    }


def _label(plan: Plan | None) -> str | None:
    return None if plan is None else plan.label


def _number(dimension: Dimension, value: float) -> int | float:
    return int(value) if dimension.whole else value


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _shown(found: Diagram, goal: float) -> float | None:
    """The goal in ms, or in tokens per second."""
    if not np.isfinite(goal):
        return None
    return 1 / goal if found.request.objective in ("throughput", "cost") else goal / MS


def print_diagram(found: Diagram) -> None:
    """The region in letters with the greatest value of the second option on top, its plans, and what they mean."""
    show(picture(found, width()))
    show([""])
    table = [_legend(found, region) for region in found.regions if region.plan is not None]
    if all(row["plan"] != found.once.plan.label for row in table):
        table.append({"letter": "", "plan": found.once.plan.label, "region": None, **_alone(found.once)})
    columns = [
        Column("", lambda row: row["letter"], right=False),
        Column("plan", lambda row: row["plan"], right=False),
        Column("area", lambda row: _percent(row["region"], "share")),
        Column("leads by", lambda row: _percent(row["region"], "mean"), keep=6),
        Column("at most", lambda row: _percent(row["region"], "most"), keep=5),
        Column("tied", lambda row: _percent(row["region"], "tied"), keep=4),
        Column("alone: runs at", lambda row: f"{row['covers']:.0%}", keep=7),
        Column("worst loss", lambda row: f"{short(100 * row['worst'], 2)}%", keep=8),
        Column("mean", lambda row: f"{short(100 * row['mean'], 2)}%", keep=7),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    show(paragraphs(_caption(found)))


def _legend(found: Diagram, region: Region) -> Row:
    alone = next(each for each in found.fixed if each.plan == region.plan)
    assert region.plan is not None
    return {"letter": letters(found)[region.plan], "plan": region.plan.label, "region": region, **_alone(alone)}


def _alone(fixed: Fixed) -> Row:
    return {"covers": fixed.covers, "worst": fixed.worst, "mean": fixed.mean}


def _percent(region: Region | None, name: str) -> str:
    value = float("nan") if region is None else getattr(region, name)
    if not np.isfinite(value):
        return "-"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def picture(found: Diagram, limit: int) -> list[str]:
    """The region as lines of at most `limit` characters where that can be done."""
    marks = letters(found)
    first, second = found.dimensions
    heads = [_text(second, value) for value in found.up]
    margin = max(map(len, heads))
    wide = 2 if margin + 3 + 2 * len(found.across) <= limit else 1
    lines = [f"{NAMES[second.name]} (up), {NAMES[first.name]} (across)"]
    for head, b in zip(reversed(heads), reversed(found.up), strict=True):
        row = (_mark(found, found.cells[a, b], marks).ljust(wide) for a in found.across)
        lines.append(f"{head.rjust(margin)} | {''.join(row)}".rstrip())
    texts = [_text(first, value) for value in found.across]
    ticks, free = "", 0
    for index, text in enumerate(texts):
        place = index * wide
        if place >= free and (margin + 3 + place + len(text) <= limit):
            ticks = ticks.ljust(place) + text
            free = len(ticks) + 2
    lines += [f"{' ' * margin} +{'-' * (wide * len(texts))}", f"{' ' * margin}   {ticks}".rstrip()]
    return lines


def _mark(found: Diagram, cell: Cell, marks: dict[Plan, str]) -> str:
    if cell.plan is None:
        return NOTHING
    mark = marks[cell.plan]
    return mark.lower() if cell.lead <= found.error else mark


def _text(dimension: Dimension, value: float) -> str:
    return str(int(value)) if dimension.whole else short(value, 3)


def _caption(found: Diagram) -> list[str]:
    request, names = found.request, [each.name for each in found.dimensions]
    work = request.workload
    fixed = [f"{request.model.name} on {request.hardware.name}, engine {request.engine.name}"]
    if "gpus" not in names:
        fixed.append(plural(request.gpus, "chip"))
    if not {"isl", "osl"} & set(names):
        fixed.append(prompt(work))
    elif not {"isl", "osl"} <= set(names):
        fixed.append(f"{work.osl} tokens out" if "isl" in names else f"{work.isl} tokens in")
    if work.concurrency and "concurrency" not in names:
        fixed.append(f"concurrency {work.concurrency}")
    if work.arrival_rate and "arrival_rate" not in names:
        fixed.append(f"{short(work.arrival_rate)} requests/s")
    texts = [
        f"{'; '.join(fixed)}: which plan has {GOALS[request.objective]}. {plural(len(found.goals), 'plan')} priced at "
        f"{plural(found.points, 'point')}: {len(found.across)} by {len(found.up)} "
        f"{'in equal ratios' if all(each.least for each in found.dimensions) else 'over the region'}, and between them "
        f"{plural(len(found.edges), 'change')} bisected along either option.",
        f"A capital leads by more than {found.error:.0%}, the model's error (plan validate); a small letter leads by "
        "less: a tie. Area is that of the diagram, leads are of its points.",
    ]
    if "gpus" not in names:  # chips are not deployed once for any number of them
        texts.append(_one(found))
    if any(cell.plan is None for cell in found.cells.values()):
        texts.append(f"{NOTHING} = no plan runs; `plan` at such a point says what the limit is.")
    if not found.whole:
        texts.append("Interrupted before every change was bisected: areas and boundaries are those found so far.")
    return texts


def _one(found: Diagram) -> str:
    once = found.once
    if once.worst < 1e-9:
        return f"One plan for all of it: {once.plan.label}, which leads wherever it runs."
    what = {"throughput": "serves less than the best by", "cost": "costs more by"}.get(found.request.objective)
    where = f"{_place(found, once.where)}, where {once.best.label} leads"
    least = f"the least of the plans that run nearly everywhere (it at {once.covers:.0%} of the points where any does)"
    if what is None:
        return (
            f"One plan for all of it: {once.plan.label} takes at most {short(100 * once.worst, 2)}% more than the best "
            f"one ({where}), {short(100 * once.mean, 2)}% on average: {least}."
        )
    lost = once.worst / (1 + once.worst) if found.request.objective == "throughput" else once.worst
    return (
        f"One plan for all of it: {once.plan.label} {what} at most {short(100 * lost, 2)}% ({where}), "
        f"{least}; losses in the table are of time for a token."
    )


def _place(found: Diagram, point: Point) -> str:
    """`1 requests in flight, 16384 tokens of a prompt`."""
    texts = (
        f"{NAMES[dimension.name]} {_text(dimension, value)}"
        for dimension, value in zip(found.dimensions, point, strict=True)
    )
    return ", ".join(texts)
