"""`plan validate`: the model against published measurements that come with the package."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import options as opt
from planner.errors import InputError
from planner.evidence import diffusion as splits
from planner.evidence import memory as starts
from planner.evidence import rankings, validation
from planner.report import evidence as report
from planner.report import tabular

Kernels = Annotated[bool, typer.Option("--kernels", help="Kernels and collectives, against their measured times.")]
Memory = Annotated[bool, typer.Option("--memory", help="Memory and start-ups, against logs of engines.")]
Serving = Annotated[bool, typer.Option("--serving", help="TPOT, TTFT and residence time, against serving runs.")]
Published = Annotated[bool, typer.Option("--published", help="Latency and throughput tables that others published.")]
Diffusion = Annotated[
    bool, typer.Option("--diffusion", help="Speed-ups of diffusion transformers, and which split was the fastest.")
]
Ranking = Annotated[bool, typer.Option("--ranking", help="What taking the planner's choice costs; reports of plans.")]
Worst = Annotated[
    int | None,
    typer.Option("--worst", metavar="N", help="List the N largest errors of each table, with their sources."),
]
By = Annotated[
    str | None,
    typer.Option("--by", metavar="LIST", help="Group errors by check, hardware, engine, model, part."),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    kernels: Kernels = False,
    memory: Memory = False,
    serving: Serving = False,
    published: Published = False,
    diffusion: Diffusion = False,
    ranking: Ranking = False,
    worst: Worst = None,
    by: By = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Holds the model against published measurements and prints how far off it is: all tables, or those named.

    Engine constants are fitted on half of the serving groups (part `fitted`); the other half is only reported.
    """
    opt.check_targets(csv, json)
    if worst is not None and worst < 1:
        raise InputError(f"--worst must be at least 1, found {worst}")
    groups = None if by is None else opt.choices(by, "--by", validation.GROUPS)
    if groups is not None:  # TPOT and TTFT, ms and tokens/s do not belong into one mean
        groups = tuple(dict.fromkeys(groups if "check" in groups else ("check", *groups)))
    asked = {"kernels": kernels, "memory": memory, "serving": serving, "published": published, "diffusion": diffusion}
    everything = not (ranking or any(asked.values()))
    tables = [make() for name, make in validation.TABLES.items() if everything or asked[name]]
    started = starts.verdicts() if everything or memory else []
    said = validation.reports() if everything or ranking else []
    chosen = validation.choices() if said else []
    fastest = splits.picks() if everything or diffusion else []
    tabular.write_rows(report.error_rows(tables, started, said, chosen, fastest), csv, json, not no_header)
    if opt.is_piped(csv, json) or quiet:
        return
    for place, table in enumerate(tables):
        if place:
            print()
        if worst is not None:
            report.print_worst(table, worst)
            continue
        print(f"{table.title}: {len(table.found)} cases")
        for view in [groups] if groups else table.views:
            report.print_errors(table, view)
        if table.name == "memory":
            report.print_starts(started)
        if table.name == "diffusion":
            report.print_picks(fastest)
    if said:
        if tables:
            print()
        report.print_ranking(chosen, validation.published_order(), said, len(rankings.unpriced()))
