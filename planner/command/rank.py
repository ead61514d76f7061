"""`plan`: every plan for these chips, ranked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, cast

import typer

from planner.command import COMMANDS
from planner.command import options as opt
from planner.plans.space import Filters, Refused
from planner.ranking import NoneLeftError, Ranking, rank
from planner.report import tabular
from planner.request import Limits, Objective, Request
from planner.results import COLUMNS, Results
from planner.sensitivity.flips import Sensitivity, mark
from planner.specs.catalog import load_machine, load_model
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.engine import ATTENTION
from planner.specs.workload import Arrivals, Schedule, Workload
from planner.units import MS, parse_bytes

EPILOG = (
    "Commands: "
    + "; ".join(f"plan {name}: {text}" for name, text in COMMANDS.items())
    + (". `plan COMMAND --help` says more. Exit status: 0 done, 2 bad input, 3 no plan satisfies the request.")
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.Gpus = 8,
    objective: opt.Objective = "latency",
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: opt.Concurrency = None,
    schedule: opt.Schedule = "continuous",
    arrivals: opt.Arrivals = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_ttft: opt.MaxTtft = None,
    max_tpot: opt.MaxTpot = None,
    max_latency: opt.MaxLatency = None,
    price: opt.Price = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    dp: opt.Dp = None,
    ep: opt.Ep = None,
    cp: opt.Cp = None,
    attention: opt.Attention = None,
    prefill_attention: opt.PrefillAttention = None,
    ffn: opt.Ffn = None,
    prefill_ffn: opt.PrefillFfn = None,
    slice_: opt.Slice = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to show or write; 0 = all.")] = 10,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Only plans and loads that none beats in both TPOT and tokens/s per chip.")
    ] = False,
    rejected: Annotated[bool, typer.Option("--rejected", help="Also the refused plans, with the reason.")] = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
    version: opt.Version = False,
) -> None:
    """Rank every way to split a model over these chips."""
    opt.check_targets(csv, json)
    machine, software = load_machine(hardware, engine)
    if weights is not None:
        weight_dtype(weights)
    if kv_cache is not None:
        kv_dtype(kv_cache)
    request = Request(
        load_model(model),
        machine,
        software,
        gpus,
        Workload(
            isl,
            osl,
            concurrency,
            cast(Schedule, schedule),
            weights,
            kv_cache,
            max_context,
            cast("Arrivals | None", arrivals),
        ),
        cast(Objective, objective),
        Limits(
            _seconds(max_ttft),
            _seconds(max_tpot),
            _seconds(max_latency),
            None if memory_limit is None else parse_bytes(memory_limit),
            opt.above_zero(memory_fraction, "--memory-fraction"),
        ),
        Filters(
            opt.numbers(tp, "--tp"),
            opt.numbers(pp, "--pp"),
            opt.numbers(dp, "--dp"),
            opt.numbers(ep, "--ep"),
            opt.numbers(cp, "--cp"),
            opt.choices(attention, "--attention", ATTENTION),
            opt.choices(prefill_attention, "--prefill-attention", ATTENTION),
            opt.choices(ffn, "--ffn", ("1d",)),
            opt.choices(prefill_ffn, "--prefill-ffn", ("1d",)),
        ),
        price,
        slice_,
        pareto,
    )
    try:
        ranking = rank(request)
    except NoneLeftError as error:
        if rejected:
            _write(request, None, error.refused, csv, json, no_header)
            if not opt.is_piped(csv, json) and not quiet:
                _tables().print_rejected(error.refused)
            sys.stdout.flush()  # before the sentence on stderr
        raise
    as_table = not opt.is_piped(csv, json) and not quiet
    # it takes as long as ranking: scripts that sweep read CSV; and of the first row there is nothing to say
    firm = mark(ranking) if as_table or (json is not None and top != 1) else None
    shown = ranking.results.take(slice(0, top or None))  # type: ignore[arg-type]
    refused = ranking.refused if rejected else []
    _write(request, shown, refused, csv, json, no_header)
    if as_table:
        _tables().print_ranking(ranking, shown)
        _print_sensitivity(firm, ranking)
        if rejected:
            print()
            _tables().print_rejected(refused)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * MS


def _print_sensitivity(firm: Sensitivity | None, ranking: Ranking) -> None:
    """The last lines of the caption."""
    from planner.report.why import firmness  # noqa: PLC0415 (needed for tables only)

    if firm is not None:
        _tables().show(_tables().paragraphs([firmness(firm, ranking)]))


def _tables() -> ModuleType:
    from planner.report import table  # noqa: PLC0415 (needed for tables only)

    return table


def _write(
    request: Request,
    shown: Results | None,
    refused: Sequence[Refused],
    csv: str | None,
    json: str | None,
    no_header: bool,
) -> None:
    """The rows shown and those refused, to wherever they are asked for."""
    rows = [_refused_row(request, one) for one in refused]

    def as_csv() -> str:
        header = tabular.csv_text(None if no_header else COLUMNS, [])
        ranked = "" if shown is None else tabular.results_csv(shown, header=False)
        return header + ranked + tabular.csv_text(None, ([tabular.cell(row[name]) for name in COLUMNS] for row in rows))

    tabular.write([(csv, as_csv), (json, lambda: tabular.json_text([*(shown.rows() if shown else []), *rows]))])


def _refused_row(request: Request, refused: Refused) -> dict[str, Any]:
    """A refused plan as a result row: what was asked, and the reason in `error`."""
    plan = refused.plan
    row = dict.fromkeys(COLUMNS) | {
        "plan": plan.label,
        "model": request.model.name,
        "hardware": request.hardware.name,
        "engine": request.engine.name,
        "objective": request.objective,
        "schedule": request.workload.schedule,
        "gpus": request.gpus,
        "isl": request.workload.isl,
        "osl": request.workload.osl,
        "concurrency": request.workload.concurrency,
        "error": refused.reason,
    }
    for name in ("tp", "pp", "dp", "ep", "cp", "attention", "prefill_attention", "ffn", "prefill_ffn"):
        row[name] = getattr(plan, name)
    return row
