"""What `plan models`, `plan hardware` and `plan engines` share: a list as table, CSV or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import typer

from planner.command import options as opt
from planner.report import tabular
from planner.report.figures import significant

Rows = Callable[[], list[dict[str, Any]]]


class Shown(NamedTuple):
    """A column of the table: a key of the rows; those of a low `keep` are left out first where room is short."""

    key: str
    keep: int = 9
    heading: str = ""
    prefix: Callable[[dict[str, Any]], str] | None = None
    """What stands before the value in its cell."""


def register_list(app: typer.Typer, rows: Rows, text: str, columns: Sequence[Shown]) -> None:
    """Adds a command that prints `rows()`; a table, being narrow, has these `columns` only."""

    def run(
        csv: opt.Csv = None,
        json: opt.Json = None,
        no_header: opt.NoHeader = False,
        quiet: opt.Quiet = False,
        debug: opt.Debug = False,
    ) -> None:
        opt.check_targets(csv, json)
        listed = rows()
        tabular.write_rows(listed, csv, json, not no_header)
        if not opt.is_piped(csv, json) and not quiet:
            _print(listed, columns)

    run.__doc__ = text
    app.command()(run)


def _print(listed: list[dict[str, Any]], columns: Sequence[Shown]) -> None:
    from planner.report.table import print_rows  # noqa: PLC0415 (needed for tables only)

    header = [column.heading or column.key for column in columns]
    numeric = [all(isinstance(row[column.key], int | float | None) for row in listed) for column in columns]

    def cell(row: dict[str, Any], column: Shown) -> str:
        value = _shown(row[column.key])
        return f"{column.prefix(row)} {value}" if column.prefix else value

    print_rows(
        header,
        [[cell(row, column) for column in columns] for row in listed],
        frozenset(name for name, number in zip(header, numeric, strict=True) if number),
        {name: column.keep for name, column in zip(header, columns, strict=True)},
    )


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return significant(value, 4)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else tabular.cell(value)
