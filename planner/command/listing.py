"""What `plan models`, `plan hardware` and `plan engines` share: a list as table, CSV or JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from planner.command import options as opt
from planner.report import tabular

Rows = Callable[[], list[dict[str, Any]]]


def register_list(app: typer.Typer, rows: Rows, text: str, hidden: frozenset[str]) -> None:
    """Adds a command that prints `rows()`; a table, being narrow, leaves out the `hidden` columns."""

    def run(
        csv: opt.Csv = None,
        json: opt.Json = None,
        no_header: opt.NoHeader = False,
        quiet: opt.Quiet = False,
        debug: opt.Debug = False,
    ) -> None:
        opt.check_targets(csv, json)
        listed = rows()
        header = list(listed[0])
        cells = [[tabular.cell(row[name]) for name in header] for row in listed]
        tabular.write(
            [
                (csv, lambda: tabular.csv_text(None if no_header else header, cells)),
                (json, lambda: tabular.json_text(listed)),
            ]
        )
        if not opt.is_piped(csv, json) and not quiet:
            from planner.report.table import print_rows  # noqa: PLC0415 (needed for tables only)

            shown = [name for name in header if name not in hidden]
            numeric = frozenset(name for name in shown if all(isinstance(r[name], int | float | None) for r in listed))
            print_rows(shown, [[_shown(row[name]) for name in shown] for row in listed], numeric)

    run.__doc__ = text
    app.command()(run)


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else tabular.cell(value)
