"""`plan disaggregate`: prefill and decode on chips of their own, against both on the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, cast

import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import NoPlanError
from planner.phases.disaggregated.colocated import Colocated, best_colocated
from planner.phases.disaggregated.disaggregation import Search, disaggregate, frontier
from planner.phases.disaggregated.question import AFFINITIES, Affinity, Question, check_question
from planner.phases.disaggregated.rehearsal import Fared, rehearse, rehearse_together
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.report import disaggregation as report
from planner.report import tabular
from planner.report.figures import plural, short
from planner.report.progress import Progress
from planner.request import CHIPS, MOST_CHIPS, Request
from planner.simulating.traces import SEED, Stream
from planner.specs.lengths import population_of

PrefillHardware = Annotated[
    str | None, typer.Option("--prefill-hardware", metavar="NAME|FILE", help="Of the prefill pool [--hardware].")
]
DecodeHardware = Annotated[
    str | None, typer.Option("--decode-hardware", metavar="NAME|FILE", help="Of the decode pool [--hardware].")
]
Chips = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        "--chips",
        min=1,
        help="Chips of both pools, and of a plan that they are compared with [8]; with --arrival-rate the most [1024].",
    ),
]
PrefillChips = Annotated[
    int | None, typer.Option("--prefill-gpus", help="Chips of the prefill pool; default: as many as serve best.")
]
DecodeChips = Annotated[int | None, typer.Option("--decode-gpus", help="The same of the decode pool.")]
PrefillPlan = Annotated[
    str | None, typer.Option("--prefill-plan", metavar="PLAN", help="One replica of the prefill pool, as TP2xPP2.")
]
DecodePlan = Annotated[str | None, typer.Option("--decode-plan", metavar="PLAN", help="The same of the decode pool.")]
Near = Annotated[
    str | None,
    typer.Option(
        "--affinity",
        metavar="high|low",
        help="high: KV crosses nodes; low: both phases of an instance share its nodes; default: the better of them.",
    ),
]
Transfer = Annotated[
    str,
    typer.Option("--transfer", metavar="layers|whole", help="KV leaves layer by layer, or when the prompt is done."),
]
Attainment = Annotated[
    float | None,
    typer.Option(
        "--attainment",
        metavar="SHARE",
        help="Limits hold for this share of the requests, as 0.9, instead of means: the best pairs are simulated.",
    ),
]
Simulated = Annotated[int, typer.Option("--simulate", metavar="N", min=1, help="Pairs that --attainment simulates.")]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests",
        min=20,
        max=1_000_000,
        help="Requests of a simulation; default: as many as show a steady state.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of their random arrivals and lengths.")]
TOGETHER = 2
"""Plans with both phases together that are simulated."""
STEPS = 14
"""Simulations that a search for the highest rate takes, about."""
Top = Annotated[int, typer.Option("--top", min=0, help="Pairs of plans to show; 0 = all.")]
MaxTtft = Annotated[
    float | None, typer.Option("--max-ttft", metavar="MS", help="Highest mean time to first token, with the wait.")
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    prefill_hardware: PrefillHardware = None,
    decode_hardware: DecodeHardware = None,
    engine: opt.Engine = None,
    gpus: Chips = None,
    prefill_gpus: PrefillChips = None,
    decode_gpus: DecodeChips = None,
    max_ttft: MaxTtft = None,
    max_tpot: opt.MaxTpot = None,
    arrival_rate: opt.ArrivalRate = None,
    isl: opt.IslOrSpread = "1024",
    osl: opt.OslOrSpread = "256",
    lengths: opt.Lengths = None,
    prefill_plan: PrefillPlan = None,
    decode_plan: DecodePlan = None,
    affinity: Near = None,
    transfer: Transfer = "layers",
    attainment: Attainment = None,
    simulate: Simulated = 2,
    count_of_requests: Requests = None,
    seed: Seed = SEED,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
    price: opt.Price = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    ep: opt.Ep = None,
    cp: opt.Cp = None,
    attention: opt.Attention = None,
    prefill_attention: opt.PrefillAttention = None,
    ffn: opt.Ffn = None,
    prefill_ffn: opt.PrefillFfn = None,
    grid: opt.Grid = None,
    top: Top = 5,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Prefill and decode on chips of their own: plans and sizes of both pools, against both phases together.

    The rate that chips serve within --max-ttft and --max-tpot, the fewest chips for --arrival-rate, or, without limits,
    the frontier of TPOT against the rate per chip.
    """
    opt.check_targets(csv, json, specs=(model, hardware, prefill_hardware, decode_hardware, engine))
    near = AFFINITIES if affinity is None else (cast(Affinity, opt.choice(affinity, "--affinity", AFFINITIES)),)
    overlapped = opt.choice(transfer, "--transfer", ("layers", "whole")) == "layers"
    given = (prefill_gpus or 0) + (decode_gpus or 0) if prefill_gpus and decode_gpus else None
    chips = gpus or given or (CHIPS if arrival_rate is None else MOST_CHIPS)
    workload = workload_of(
        isl, osl, None, "continuous", weights, kv_cache, max_context, None, prefix_hit, arrival_rate, lengths
    )  # fmt: skip
    limits = limits_of(max_ttft, max_tpot, None, memory_limit, memory_fraction)
    filters = filters_of(tp, pp, None, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid)

    def asked(name: str | None, own: str | None) -> Request:
        only = filters if own is None else _only(filters, own)
        return request_of(
            model, name or hardware, engine, (chips, False), workload, "throughput", limits, only,
            opt.above_zero(price, "--price"), None, max_num_seqs, max_num_batched_tokens,
        )  # fmt: skip

    question = Question(
        asked(prefill_hardware, prefill_plan),
        asked(decode_hardware, decode_plan),
        prefill_gpus,
        decode_gpus,
        near,
        overlapped,
        attainment,
    )
    check_question(question)
    search = disaggregate(question) if question.bounded else frontier(question)
    machines = {each.hardware.name: each for each in (question.prefill, question.decode)}
    together = [each._replace(filters=filters) for each in machines.values()] if question.bounded else []
    count = 1 if attainment is None else TOGETHER
    found = [each for request in together for each in best_colocated(request, count)]
    refused = search.pairs == 0 and (prefill_plan or decode_plan)  # a pair was asked for: another answer is none
    if not search.deployments and (not found or refused):
        raise NoPlanError(_none(search))
    if not search.deployments:
        opt.warn(_none(search), quiet)
    fared: dict[report.Each, Fared] = {}
    if attainment is not None:
        stream = Stream(population=population_of(isl, osl, lengths), seed=seed, rate=arrival_rate)
        fared = _fared(search, [*search.deployments[:simulate], *found], stream, count_of_requests, quiet)
        found = [each for each in fared if isinstance(each, Colocated)] or found
    table = report.rows(search, found, top, fared)
    tabular.write_rows(table, csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_disaggregation(search, found, table)


def _fared(
    search: Search, every: Sequence[report.Each], stream: Stream, count: int | None, quiet: bool
) -> dict[report.Each, Fared]:
    """How simulated requests fare under each; those before an interrupt where there is one."""
    fared: dict[report.Each, Fared] = {}
    steps = 1 if search.question.rate is not None else STEPS
    with Progress("simulation", steps * len(every), quiet=quiet) as progress:
        for place, each in enumerate(every):
            told = progress.advance
            try:
                if isinstance(each, Colocated):
                    larger, found = rehearse_together(search.question, each, stream, told, count)
                    fared[larger] = found
                else:
                    fared[each] = found = rehearse(search.question, each, stream, told, count)
            except KeyboardInterrupt:
                break
            progress.total = progress.done + steps * (len(every) - place - 1)
            if not found.complete:
                break
    if len(fared) < len(every) or not all(each.complete for each in fared.values()):
        opt.warn(f"stopped: {len(fared)} of {len(every)} deployments simulated, the last one perhaps in part", quiet)
    return fared


def _only(filters: Filters, label: str) -> Filters:
    """The filters that leave one plan of a replica."""
    plan = Plan.parse(label)
    return filters._replace(
        tp=(plan.tp,), pp=(plan.pp,), ep=(plan.ep,), cp=(plan.cp,), attention=(plan.attention,),
        prefill_attention=(plan.prefill_attention,), ffn=(plan.ffn,), prefill_ffn=(plan.prefill_ffn,),
        grid=(plan.grid,) if plan.grid else (),
    )  # fmt: skip


def _none(search: Search) -> str:
    """Why no pair of pools serves anything."""
    start, chips = "no pair of pools", search.question.chips
    reachable = report.reachable(search)
    if reachable:
        return f"{start} keeps the limits: {reachable}"
    for phase in ("prefill", "decode"):
        own = [each for which, each in search.refused if which == phase]
        if own and search.pairs == 0:
            told = next((each for each in reversed(own) if each.limit == "memory"), own[0])
            refused = f"{plural(len(own), f'{phase} plan')} refused, as {told.plan}: {told.reason}"
            return f"{start} fits {plural(chips, 'chip')}: {refused}"
    text = f"{start} serves this on {chips} chips"
    if search.question.rate is not None:
        most = disaggregate(_without_rate(search.question)).deployments
        text += f", which serve up to {short(most[0].rate)} requests/s" if most else ""
    return f"{text}; give more with --gpus, or wider limits"


def _without_rate(question: Question) -> Question:
    """What all of the chips serve at most."""
    each = (question.prefill, question.decode)
    prefill, decode = (one._replace(workload=one.workload._replace(arrival_rate=None)) for one in each)
    return question._replace(prefill=prefill, decode=decode)
