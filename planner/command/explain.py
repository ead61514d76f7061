"""`plan explain`: where the time and the memory of a plan go, what would help, and what the runner-up does."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from planner.command import diffusion
from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import InputError, NoPlanError
from planner.explaining.breakdown import Breakdown, breakdown, load_of, pinned, plan_of
from planner.explaining.changes import Machine, changes, effects
from planner.explaining.goal import goal_value
from planner.plans.plan import Plan
from planner.ranking import rank
from planner.report import explain as report
from planner.report import tabular
from planner.request import Request, chips_for
from planner.specs.catalog import ENGINES, load_engine, load_machine, names

PlanLabel = Annotated[
    str | None,
    typer.Option("--plan", metavar="TP8xPP2", help="The plan to explain; default: the one that comes first."),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        "--chips",
        min=1,
        help="Chips there are; default: those of --plan, else 8, or the fewest that keep a limit or an arrival rate.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    context: typer.Context,
    model: opt.Model,
    plan: PlanLabel = None,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: Count = None,
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
    parallel_vae: opt.ParallelVae = False,
    slice_: opt.Slice = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE.svg|png", help="Draw TTFT and TPOT as bars, an item each, by bound."),
    ] = None,
    placement_svg: opt.PlacementSvg = None,
    html: opt.Html = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Where the time and the memory of a plan go, by operation; the one change that would help most; the runner-up."""
    files = (("--plot", plot), ("--html", html), ("--placement-svg", placement_svg))
    opt.check_targets(csv, json, *files, specs=(model, hardware, engine, lengths))
    opt.check_plot(plot)
    opt.check_pages(html, placement_svg)
    if diffusion.is_asked(context):
        return diffusion.explain(context)
    only = None if plan is None else Plan.parse(plan)
    limits = limits_of(max_ttft, max_tpot, max_latency, memory_limit, memory_fraction)
    given = gpus if only is None or max_gpus is not None else gpus or only.chips
    request = request_of(
        model,
        hardware,
        engine,
        chips_for(given, max_gpus, limits, arrival_rate, slice_),
        workload_of(
            isl, osl, concurrency, schedule, weights, kv_cache, max_context, arrivals, prefix_hit, arrival_rate, lengths
        ),
        objective,
        limits,
        filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        opt.above_zero(price, "--price"),
        slice_,
        max_num_seqs,
        max_num_batched_tokens,
        (opt.drafted(spec_tokens), spec_accept, draft),
    )
    if only is not None and any(request.filters):
        raise InputError("--plan names one plan; leave out --tp, --pp and the like, which choose among several")
    if only is not None and request.fewest:
        raise InputError("--plan says how many chips there are; leave out --max-gpus")
    if request.fewest:
        request = rank(request).request._replace(fewest=False)  # what follows is about that many
    found = _explained(request, only, _machines(request, hardware, max_num_seqs, max_num_batched_tokens))
    pictures: list[tabular.Output] = [
        (plot, lambda: _picture(found.plan, plot)),
        (html, lambda: _page(found, opt.asked(context, "plan explain"))),
        (placement_svg, lambda: _placement_file(found.plan)),
    ]
    tabular.write_rows(report.rows(found), csv, json, not no_header, pictures)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_explanation(found)


def _picture(found: Breakdown, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.plot import breakdown_plot  # noqa: PLC0415 (needed where it is asked for)

    return breakdown_plot(found, str(plot))


def _page(found: report.Explanation, asked: str) -> str:
    """What --html writes."""
    from planner.report.page.document import explanation_page  # noqa: PLC0415 (needed where it is asked for)

    return explanation_page(found, asked)


def _placement_file(found: Breakdown) -> str:
    """What --placement-svg writes."""
    from planner.report.page.seating import seating_file  # noqa: PLC0415 (needed where it is asked for)

    return seating_file(found.setting.placement, found.plan)


def _explained(request: Request, only: Plan | None, machines: list[Machine]) -> report.Explanation:
    chosen = rank(request if only is None else pinned(request, only))
    plan = plan_of(chosen.results, 0)
    request = request._replace(workload=chosen.request.workload)  # drafted tokens may be searched
    one = breakdown(request, plan, load_of(chosen.results, 0))
    now = goal_value(chosen.results, 0, request.objective)
    tried = effects(request, now, changes(machines), only)
    try:
        all_plans = chosen if only is None else rank(request)
    except NoPlanError:  # the plan's own limits were kept above: nothing else is left beside it
        all_plans = chosen
    places = [plan_of(all_plans.results, index) for index in range(min(2, len(all_plans.results)))]
    rival = next((index for index, other in enumerate(places) if other != plan), None)
    other = None
    if rival is not None:
        other = breakdown(request, places[rival], load_of(all_plans.results, rival))
    labels = list(all_plans.results["plan"])
    place = labels.index(plan.label) + 1 if plan.label in labels else None
    return report.Explanation(one, place, len(labels), tried, other)


def _machines(request: Request, hardware: str, sequences: int | None, tokens: int | None) -> list[Machine]:
    """The chip under every engine whose constants were measured on it, in the version that they stand for.

    Of an engine's versions and variants (`NAME-...` beside `NAME`) only the first: nobody changes to an older one.
    Each under the limits on requests and tokens that are asked for; one that cannot have them is left out.
    """
    measured = []
    for name in names(ENGINES):
        found = load_engine(name).calibrated
        if found is not None and found.same_version and request.hardware.name in found.hardware:
            measured.append(name)
    variants = {name for name in measured for other in measured if name.startswith(f"{other}-")}
    machines = []
    for name in measured:
        if name not in variants:
            machine, engine = load_machine(hardware, name)
            with suppress(InputError):
                machines.append((machine, engine.limited(sequences, tokens)))
    return machines
