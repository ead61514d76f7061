"""`plan validate`: the model against published measurements that come with the package."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import options as opt
from planner.errors import InputError
from planner.evidence.memory import comparisons, summaries, verdicts
from planner.report import evidence as report
from planner.report import tabular

Memory = Annotated[bool, typer.Option("--memory", help="Memory and start-ups, against logs of engines.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    memory: Memory = False,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Holds the model against published measurements and prints how far off it is."""
    opt.check_targets(csv, json)
    if not memory:
        raise InputError("say what to validate: --memory")
    found, started = comparisons(), verdicts()
    rows = report.memory_rows(found, started)
    tabular.write_rows(rows, csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_memory(found, summaries(found), started)
