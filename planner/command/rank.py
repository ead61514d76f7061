"""`plan`: every plan for these chips, ranked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import typer

from planner.command import COMMANDS, diffusion
from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import NoPlanError
from planner.plans.space import Refused
from planner.ranking import NoneLeftError, Ranking, rank
from planner.report import tabular
from planner.request import CHIPS, Request, chips_for
from planner.results import COLUMNS, Results
from planner.sensitivity.flips import Sensitivity, mark

EPILOG = (
    "Commands: "
    + "; ".join(f"plan {name}: {text}" for name, text in COMMANDS.items())
    + (". `plan COMMAND --help` says more. Exit status: 0 done, 2 bad input, 3 no plan satisfies the request.")
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(epilog=EPILOG)(run)


def run(
    context: typer.Context,
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.Gpus = None,
    max_gpus: opt.MaxGpus = None,
    objective: opt.Objective = "latency",
    isl: opt.IslOrSpread = "1024",
    osl: opt.OslOrSpread = "256",
    lengths: opt.Lengths = None,
    concurrency: opt.Concurrency = None,
    arrival_rate: opt.ArrivalRate = None,
    schedule: opt.Schedule = None,
    arrivals: opt.Arrivals = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
    spec_tokens: opt.SearchedSpecTokens = None,
    spec_accept: opt.SpecAccept = None,
    draft: opt.Draft = None,
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
    grid: opt.Grid = None,
    image: opt.Image = None,
    frames: opt.Frames = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    cfg: opt.Cfg = None,
    ulysses: opt.Ulysses = None,
    ring: opt.Ring = None,
    pipefusion: opt.PipeFusion = None,
    patches: opt.Patches = None,
    exact: opt.Exact = False,
    parallel_vae: opt.ParallelVae = False,
    slice_: opt.Slice = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to show or write; 0 = all.")] = 10,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Only plans and loads that none beats in both TPOT and tokens/s per chip.")
    ] = False,
    rejected: Annotated[bool, typer.Option("--rejected", help="Also the refused plans, with the reason.")] = False,
    launch: Annotated[bool, typer.Option("--launch", help="Below the table, the lines that start the first.")] = False,
    placement: opt.Placement = False,
    placement_svg: opt.PlacementSvg = None,
    html: opt.Html = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg|png",
            help="Draw TPOT against tokens/s per chip of every plan and load, the frontier joined.",
        ),
    ] = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
    version: opt.Version = False,
) -> None:
    """Rank every way to split a model over these chips."""
    files = (("--plot", plot), ("--html", html), ("--placement-svg", placement_svg))
    opt.check_targets(csv, json, *files, specs=(model, hardware, engine, lengths))
    opt.check_plot(plot)
    opt.check_pages(html, placement_svg)
    if diffusion.is_asked(context):
        return diffusion.rank(context)
    limits = limits_of(max_ttft, max_tpot, max_latency, memory_limit, memory_fraction)
    if pareto and gpus is None and max_gpus is None:
        gpus = CHIPS  # a frontier is of the plans on some number of chips
    chips = chips_for(gpus, max_gpus, limits, arrival_rate, slice_)
    work = workload_of(
        isl, osl, concurrency, schedule, weights, kv_cache, max_context, arrivals, prefix_hit, arrival_rate, lengths
    )
    request = request_of(
        model,
        hardware,
        engine,
        chips,
        work,
        objective,
        limits,
        filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        price,
        slice_,
        max_num_seqs,
        max_num_batched_tokens,
        (opt.drafted(spec_tokens), spec_accept, draft),
    )._replace(pareto=pareto)
    try:
        ranking = rank(request)
    except NoneLeftError as error:
        if rejected:
            _write(request, None, error.refused, csv, json, no_header)
            if not opt.is_piped(csv, json) and not quiet:
                _tables().print_rejected(error.refused)
            sys.stdout.flush()  # before the sentence on stderr
        raise
    request = ranking.request  # drafted tokens may be searched
    as_table = not opt.is_piped(csv, json) and not quiet
    # it takes as long as ranking: scripts that sweep read CSV; and of the first row there is nothing to say
    firm = mark(ranking) if as_table or html is not None or (json is not None and top != 1) else None
    shown = ranking.results.take(slice(0, top or None))  # type: ignore[arg-type]
    refused = ranking.refused if rejected else []
    pictures: list[tabular.Output] = [
        (plot, lambda: _picture(ranking, plot)),
        (html, lambda: _page(ranking, firm, opt.asked(context, "plan"))),
        (placement_svg, lambda: _placement_file(ranking)),
    ]
    _write(request, shown, refused, csv, json, no_header, pictures)
    if as_table:
        _tables().print_ranking(ranking, shown)
        _print_sensitivity(firm, ranking)
        if rejected:
            print()
            _tables().print_rejected(refused)
        if placement:
            _print_placement(ranking)
        if launch:
            _print_launch(ranking, model)
        return
    if placement:
        opt.warn("--placement draws below a table, and none is printed here", quiet)
    if launch:
        opt.warn("--launch prints below a table; `plan launch` has --csv, --json and --output", quiet)


def _picture(ranking: Ranking, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.plot import tradeoff_plot  # noqa: PLC0415 (needed where it is asked for)

    return tradeoff_plot(ranking, str(plot))


def _page(ranking: Ranking, firm: Sensitivity | None, asked: str) -> str:
    """What --html writes."""
    from planner.report.page.document import ranking_page  # noqa: PLC0415 (needed where it is asked for)

    return ranking_page(ranking, firm, asked)


def _placement_file(ranking: Ranking) -> str:
    """What --placement-svg writes."""
    from planner.plans.plan import Plan  # noqa: PLC0415 (needed where it is asked for)
    from planner.report.page.seating import seating_file  # noqa: PLC0415

    return seating_file(ranking.placement, Plan.parse(ranking.results.row(0)["plan"]))


def _print_placement(ranking: Ranking) -> None:
    """Where the first plan stands."""
    from planner.plans.plan import Plan  # noqa: PLC0415 (needed where it is asked for)
    from planner.report.placement import print_placement  # noqa: PLC0415

    print()
    print_placement(ranking.placement, Plan.parse(ranking.results.row(0)["plan"]))


def _print_launch(ranking: Ranking, model: str) -> None:
    """What starts the first plan, or why nothing does."""
    from planner.launching import deployment  # noqa: PLC0415 (needed where it is asked for)
    from planner.plans.placement import Placement  # noqa: PLC0415
    from planner.plans.plan import Plan  # noqa: PLC0415
    from planner.report.launch import print_deployment, print_none  # noqa: PLC0415

    request, best = ranking.request, ranking.results.row(0)
    print()
    try:
        found = deployment(
            request.model,
            Placement.of(request.hardware, request.gpus, request.slice),
            request.engine,
            Plan.parse(best["plan"]),
            request.workload._replace(concurrency=best["concurrency"], arrival_rate=None),
            limits=request.limits,
            asked=model,
        )
    except NoPlanError as error:
        print_none(str(error))
    else:
        print_deployment(found)


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
    more: Sequence[tabular.Output] = (),
) -> None:
    """The rows shown and those refused, to wherever they are asked for."""
    rows = [_refused_row(request, one) for one in refused]

    def as_csv() -> str:
        header = tabular.csv_text(None if no_header else COLUMNS, [])
        ranked = "" if shown is None else tabular.results_csv(shown, header=False)
        return header + ranked + tabular.csv_text(None, ([tabular.cell(row[name]) for name in COLUMNS] for row in rows))

    def as_json() -> str:
        return tabular.json_text([*(shown.rows() if shown else []), *rows])

    tabular.write([(csv, as_csv), (json, as_json), *more])


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
        "gpus": None if request.fewest else request.gpus,
        "isl": request.workload.isl,
        "osl": request.workload.osl,
        "prefix_hit": request.workload.prefix_hit,
        "spec_tokens": request.workload.speculation and request.workload.speculation.tokens,
        "spec_accept": request.workload.speculation and request.workload.speculation.accept,
        "concurrency": request.workload.concurrency,
        "arrival_rate_per_s": request.workload.arrival_rate,
        "error": refused.reason,
    }
    for name in ("tp", "pp", "dp", "ep", "cp", "attention", "prefill_attention", "ffn", "prefill_ffn", "grid"):
        row[name] = getattr(plan, name) or None
    return row
