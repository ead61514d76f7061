"""`plan show NAME`: one specification in full."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import options as opt
from planner.errors import InputError
from planner.report import listing, tabular
from planner.specs.catalog import as_yaml, find, load

Name = Annotated[
    str,
    typer.Argument(metavar="NAME|FILE", help="A model, hardware or engine: name, alias, HF id, file or config.json."),
]
Yaml = Annotated[bool, typer.Option("--yaml", help="Write it as a file of our own schema, and nothing else.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    name: Name,
    yaml: Yaml = False,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Show a model, hardware or engine as it was understood: every figure with its source."""
    opt.check_targets(csv, json)
    if yaml and (csv or json):
        raise InputError("--yaml: stands alone, without --csv and --json")
    family = find(name)
    spec = load(family, name)
    if yaml:
        print(as_yaml(spec), end="")
        return
    rows = [[key, tabular.cell(value)] for key, value in listing.flat(spec).items()]
    tabular.write(
        [
            (csv, lambda: tabular.csv_text(None if no_header else ["key", "value"], rows)),
            (json, lambda: tabular.json_text([listing.nested(spec)])),
        ]
    )
    if not opt.is_piped(csv, json) and not quiet:
        listing.print_outline(spec)
