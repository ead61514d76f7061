"""Which of two plans is better: what others measured or said, and what the model says.

Two sources. `rankings.csv` holds reports from issue threads, one a row: the two options as reported, the figures given,
and the deployment they are priced as, with the stand-ins that a note names; or the `reason` why they are not priced. A
report that the model is known to contradict carries the reason as its `miss`. Beside them stand the groups of
`published.csv`, whose rows differ in nothing but the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from planner.costs.roofline import BOUNDS
from planner.errors import InputError
from planner.estimating import estimate_points
from planner.evidence.comparison import Comparison, once
from planner.evidence.published import LOWER_IS_BETTER, Row, comparisons, model_option
from planner.results import Results
from planner.specs.measurements import measurements

APART = 0.10
"""Two plans are told apart where one is at least this much better; closer ones are a tie in any measurement."""
_OPTIONS = (
    "hardware", "engine", "weights", "kv_cache", "schedule", "isl", "osl", "concurrency", "memory_fraction",
)  # fmt: skip


class Report(NamedTuple):
    """One report beside the model's word."""

    report: str
    what: str
    metric: str
    """The result column that decides."""
    better: str
    """The plan that the report found better."""
    other: str
    observed: float | None
    """How many times better, as reported; none = no figures."""
    predicted: float | None
    """The same of the model: below 1 it prefers the other; none = one of the two cannot run."""
    agrees: bool
    why: str
    """What the model's figures consist of, or why a plan cannot run."""
    miss: str
    """Why the model is known to disagree; empty = it should agree."""
    source: str


class Unpriced(NamedTuple):
    """A report that is not priced."""

    report: str
    what: str
    reason: str
    source: str


class Pair(NamedTuple):
    """Two plans of one condition, the better first."""

    group: str
    better: Comparison
    other: Comparison
    observed: float
    """How many times better, at least 1."""
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the model prefers the same plan."""
        return self.predicted > 1


@once
def reports(rows: Iterable[Row] | None = None) -> list[Report]:
    """Every report that is priced, in the order of the table.

    Raises:
        InputError: a report of which neither plan can be priced.
    """
    table = [row for row in (measurements("rankings") if rows is None else rows) if not row["reason"]]
    if not table:
        return []
    twice = [row for row in table for _ in range(2)]
    columns: dict[str, Sequence[str]] = {name: [row[name] for row in twice] for name in _OPTIONS}
    plans = [row[f"plan_{side}"] for row in table for side in "ab"]
    models = [model_option(row["model"]) for row in twice]
    results = estimate_points({**columns, "model": models, "plan": plans}, len(twice))
    return [_report(row, results, 2 * index) for index, row in enumerate(table)]


def unpriced(rows: Iterable[Row] | None = None) -> list[Unpriced]:
    """Every report that is not priced, and why."""
    table = measurements("rankings") if rows is None else rows
    return [Unpriced(row["report"], _what(row), row["reason"], row["source"]) for row in table if row["reason"]]


@once
def pairs(apart: float = APART, rows: Iterable[Row] | None = None) -> list[Pair]:
    """Every two plans of one published condition whose figures differ by more than a share of `apart`."""
    table = list(measurements("published") if rows is None else rows)
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for row, found in zip(table, comparisons() if rows is None else comparisons(table), strict=True):
        if row["ranking_group"]:
            groups.setdefault((row["ranking_group"], row["engine"], row["metric"]), []).append(found)
    result = []
    for (group, _, metric), members in groups.items():
        sign = -1 if metric in LOWER_IS_BETTER else 1
        for one, two in combinations(members, 2):
            better, other = (one, two) if (one.observed / two.observed) ** sign >= 1 else (two, one)
            observed = (better.observed / other.observed) ** sign
            if observed > 1 + apart:
                result.append(Pair(group, better, other, observed, (better.predicted / other.predicted) ** sign))
    return result


def share_right(found: Sequence[Pair]) -> float:
    """Share of pairs that the model orders as measured; NaN of none."""
    return sum(pair.right for pair in found) / len(found) if found else float("nan")


def _report(row: Row, results: Results, first: int) -> Report:
    best = first + (row["better"] == "b")
    worst = 2 * first + 1 - best
    errors, figures = results.columns["error"], results.columns[row["column"]]
    if errors[best] is not None and errors[worst] is not None:
        raise InputError(f"rankings.csv, report {row['report']}: neither plan can be priced: {errors[best]}")
    sign = -1 if row["column"].endswith("_ms") else 1
    predicted = None
    if errors[best] is None and errors[worst] is None:
        predicted = float((figures[best] / figures[worst]) ** sign)
    agrees = errors[best] is None if predicted is None else predicted > 1
    sides = ("a", "b") if row["better"] == "a" else ("b", "a")
    plans = [row[f"plan_{side}"] for side in sides]
    return Report(
        report=row["report"],
        what=_what(row),
        metric=row["column"],
        better=plans[0],
        other=plans[1],
        observed=_observed(row),
        predicted=predicted,
        agrees=agrees,
        why="; ".join(_why(plan, results, index) for plan, index in zip(plans, (best, worst), strict=True)),
        miss=row["miss"],
        source=row["source"],
    )


def _observed(row: Row) -> float | None:
    """How many times the better option is better; the reports give rates, and the better one's is the higher."""
    try:
        values = float(row["value_a"]), float(row["value_b"])
    except ValueError:
        return None
    return max(values) / min(values)


def _why(plan: str, results: Results, index: int) -> str:
    """Parts of the time that decides: of a token, or of the first one where there is no other."""
    error = results.columns["error"][index]
    if error is not None:
        return f"{plan}: {error}"
    later = not np.isnan(results.columns["tpot_ms"][index])
    name, parts = ("TPOT", results.tpot_parts) if later else ("TTFT", results.ttft_parts)
    terms = [(bound, 1e3 * float(parts[bound][index])) for bound in BOUNDS]
    return f"{plan} {name} ms: " + ", ".join(f"{bound} {value:.1f}" for bound, value in terms if value >= 0.05)


def _what(row: Row) -> str:
    subject = " ".join(row[name] for name in ("engine_reported", "version_reported", "model_reported") if row[name])
    return f"{subject}, {row['chips_reported'] or 'chips not stated'}: {row['option_a']} or {row['option_b']}"
