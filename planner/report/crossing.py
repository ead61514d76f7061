"""`plan crossover`: a line for each stretch of values over which one plan leads, and how far the next one is behind."""

from __future__ import annotations

from typing import Any

import numpy as np

from planner.crossing import Crossing, Stretch
from planner.explaining.goal import Goal, goal_value
from planner.report.figures import plural, prompt, short
from planner.report.table import COLOURS, Column, Row, lay_out, paragraphs, show, width
from planner.results import COLUMNS

_WHAT = {
    "concurrency": "requests in flight", "isl": "tokens of a prompt", "tokens": "prompt tokens in a batch",
    "gpus": "chips",
}  # fmt: skip


def rows(found: Crossing) -> list[dict[str, Any]]:
    """A row for each stretch: what varies, its ends, the plan's goal at both, the next plan, then the plan's figures.

    The result columns are those at the lower end.
    """
    return [_row(found, stretch) for stretch in found.stretches]


def _row(found: Crossing, stretch: Stretch) -> dict[str, Any]:
    objective = found.request.objective
    first = dict.fromkeys(COLUMNS) if stretch.first is None else stretch.first.row(0)
    first["plan"] = None if stretch.plan is None else stretch.plan.label
    return {
        "vary": found.axis,
        "from": stretch.low * found.unit,
        "to": stretch.high * found.unit,
        "goal_from": None if stretch.first is None else goal_value(stretch.first, 0, objective),
        "goal_to": None if stretch.last is None else goal_value(stretch.last, 0, objective),
        "next_plan": stretch.next,
        "next_goal_to": stretch.next_goal if np.isfinite(stretch.next_goal) else None,
        "bottleneck_to": None if stretch.last is None else stretch.last.row(0)["bottleneck"],
        **first,
    }


def print_crossing(found: Crossing) -> None:
    """The stretches as a table and a caption."""
    table = rows(found)
    goal = next((Goal.of(row, found.request.objective) for row in table if row["goal_from"] is not None), None)
    unit = "" if goal is None else goal.unit
    columns = [
        Column("from", lambda row: str(row["from"])),
        Column("to", lambda row: str(row["to"])),
        Column("plan", lambda row: row["plan"] or "no plan runs", right=False),
        Column(f"{unit} at from", lambda row: short(row["goal_from"])),
        Column("at to", lambda row: short(row["goal_to"])),
        Column("next at to", _behind, keep=5),
        Column("bound", _bound, right=False, keep=3),
    ]
    lines = lay_out(columns, table, width())
    show(lines, ["bold underline", *(COLOURS.get(row["bottleneck"] or "", "") for row in table)])
    show(paragraphs(_caption(found, table, goal)))


def _behind(row: Row) -> str:
    """How far the plan that takes over is behind at the upper end."""
    if row["next_goal_to"] is None or not row["goal_to"]:
        return "-"
    return f"+{short(100 * (row['next_goal_to'] / row['goal_to'] - 1), 2)}%"


def _bound(row: Row) -> str:
    ends = [row["bottleneck"], row["bottleneck_to"]]
    return " - ".join(dict.fromkeys(end for end in ends if end)) or "-"


def _caption(found: Crossing, table: list[Row], goal: Goal | None) -> list[str]:
    request, work = found.request, found.request.workload
    fixed = [f"{request.model.name} on {request.hardware.name}, engine {request.engine.name}"]
    if found.axis != "gpus":
        fixed.append(plural(request.gpus, "chip"))
    fixed.append(f"{work.osl} tokens out" if found.axis == "isl" else prompt(work))
    if found.axis not in ("concurrency", "tokens") and work.concurrency:
        fixed.append(f"concurrency {work.concurrency}")
    leading = [row for row in table if row["plan"]]
    changes = len(leading) - 1
    texts = [
        f"{'; '.join(fixed)}: which plan has the least {goal.what if goal else request.objective}, by "
        f"{_WHAT[found.axis]}. {plural(found.plans, 'plan')} priced at every value, "
        f"{plural(changes, 'change')} found."
    ]
    if found.axis == "tokens":
        texts.append(f"Prompts of {work.isl} tokens come as one static batch; a whole one is the least that can vary.")
    if any(row["plan"] is None for row in table):
        texts.append("Where no plan runs, `plan` at that value says what the limit is.")
    texts.append("A plan that leads only between two values of the grid where the same one leads is not seen.")
    return texts
