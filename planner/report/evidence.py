"""`plan validate`: measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.evidence.memory import Comparison, Summary, Verdict
from planner.report.table import Column, lay_out, show, width


def memory_rows(found: Sequence[Comparison], verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Every comparison and every verdict as CSV and JSON have them."""
    rows: list[dict[str, Any]] = [
        {
            "check": each.check, "case": each.case, "what": each.what, "observed": each.observed,
            "predicted": each.predicted, "error": each.error, "right": None, "planner_says": None,
        }
        for each in found
    ]  # fmt: skip
    rows += [
        {
            "check": "starts", "case": each.case, "what": each.what, "observed": "ran" if each.ran else each.reason,
            "predicted": None, "error": None, "right": each.right if each.decidable else None,
            "planner_says": each.refusal or "starts",
        }
        for each in verdicts
    ]  # fmt: skip
    return rows


def print_memory(found: Sequence[Comparison], summaries: Sequence[Summary], verdicts: Sequence[Verdict]) -> None:
    """The errors of every check, the largest of them, and what starts."""
    columns = [
        Column("logged by engines", lambda row: str(row["each"].check), right=False),
        Column("cases", lambda row: str(row["each"].cases)),
        Column("mean", lambda row: f"{row['each'].mean:.2%}"),
        Column("median", lambda row: f"{row['each'].median:.3%}"),
        Column("worst", lambda row: f"{row['each'].worst:.1%}"),
        Column("worst case", lambda row: _worst(found, row["each"].check), right=False, keep=1),
    ]
    show(lay_out(columns, [{"each": each} for each in summaries], width()), ["bold underline"])
    decided = [each for each in verdicts if each.decidable]
    ran, stopped = [each for each in decided if each.ran], [each for each in decided if not each.ran]
    print()
    print(
        f"Starts: {sum(each.right for each in ran)} of {len(ran)} that ran are not refused; "
        f"{sum(each.right for each in stopped)} of {len(stopped)} that failed are refused for their reason."
    )
    for each in decided:
        if not each.right:
            print(f"wrong: {each.case} {each.what}: {each.refusal or 'starts'}")
    for each in verdicts:
        if not each.decidable:
            print(f"not decided: {each.case} {each.what} ({each.open_question})")


def _worst(found: Sequence[Comparison], check: str) -> str:
    worst = max((each for each in found if each.check == check), key=lambda each: abs(each.error))
    return f"{worst.case} {worst.what.partition(',')[0].rpartition('/')[2]}" if worst.error else ""
