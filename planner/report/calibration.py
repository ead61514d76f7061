"""`plan calibrate`: errors before and after, constants old and new, and the files that hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from planner._version import __version__
from planner.evidence.calibration import Fit
from planner.evidence.comparison import Summary
from planner.report import tabular
from planner.report.figures import significant
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.specs.catalog import as_yaml
from planner.specs.hardware import Hardware

_STATISTICS = ("bias", "mean", "median", "p90")


def rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """Errors and constants as CSV and JSON have them: one statistic or one constant a row.

    `kind` is `error` (`name` a statistic, figures are shares) or `constant` (`name` its place in the file).
    """
    found: list[dict[str, Any]] = []
    for fit in fits:
        before, after = fit.summaries()
        common = {"group": fit.group, "rows": after.cases}
        for name in _STATISTICS:
            was = None if before is None else getattr(before, name)
            found.append({"kind": "error", **common, "name": name, "before": was, "after": getattr(after, name)})
        for change in fit.changes:
            found.append({"kind": "constant", **common, "name": change.key, "before": change.old, "after": change.new})
    return found


def outputs(
    rows: Sequence[dict[str, Any]], csv: str | None, json: str | None, header: bool
) -> list[tuple[str | None, Callable[[], str]]]:
    """The rows as `tabular.write` takes them, to be written together with other files."""
    names = list(rows[0])
    cells = [[tabular.cell(row[name]) for name in names] for row in rows]
    return [
        (csv, lambda: tabular.csv_text(names if header else None, cells)),
        (json, lambda: tabular.json_text(rows)),
    ]


def print_calibration(fits: Sequence[Fit], sentences: Sequence[str]) -> None:
    """The errors of every group before and after, the constants, and what was written."""
    errors = [line for fit in fits for line in _error_rows(fit)]
    columns = [
        Column("fitted", lambda row: str(row["group"]), right=False),
        Column("rows", lambda row: str(row["rows"])),
        Column("", lambda row: str(row["when"]), right=False),
        *(Column(name, _statistic(name)) for name in _STATISTICS),
    ]
    show(lay_out(columns, errors, width()), ["bold underline"])
    changes = [{"change": change} for fit in fits for change in fit.changes]
    if changes:
        print()
        show(
            lay_out(
                [
                    Column("constant", lambda row: str(row["change"].key), right=False),
                    Column("old", lambda row: _figure(row["change"].old)),
                    Column("new", lambda row: _figure(row["change"].new)),
                ],
                changes,
                width(),
            ),
            ["bold underline"],
        )
    print()
    notes = [note for fit in fits for note in fit.notes]
    show(paragraphs([*notes, *sentences]))


def _statistic(name: str) -> Any:
    pattern = "{:+.1%}" if name == "bias" else "{:.1%}"

    def cell(row: dict[str, Any]) -> str:
        found: Summary | None = row["summary"]
        return "-" if found is None else pattern.format(getattr(found, name))

    return cell


def _error_rows(fit: Fit) -> list[dict[str, Any]]:
    before, after = fit.summaries()
    return [
        {"group": fit.group, "rows": after.cases, "when": "before", "summary": before},
        {"group": "", "rows": "", "when": "after", "summary": after},
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else significant(value, 4)


def file_text(base: str, name: str, keys: dict[str, Any], against: str) -> str:
    """A file of our schema that extends another one and states only what was fitted.

    Args:
        base: what it extends: a name, or a path from where the file will lie.
        name: of what it describes.
        keys: of the file.
        against: the machine, in words, under which the constants were fitted.
    """
    raw = {"extends": base, "name": name, **keys}
    heading = (
        f"# Written by plan calibrate {__version__}: stated is what was fitted, on {against}; all else is {base}'s.\n"
    )
    return heading + as_yaml(cast(Hardware, raw))
