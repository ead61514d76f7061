"""`plan goodput`: what users wait for at a rate, or the highest rate that keeps limits on it, by simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import InputError, NoPlanError
from planner.plans.plan import Plan
from planner.report import goodput as report
from planner.report import tabular
from planner.report.goodput import Entry
from planner.report.progress import Progress
from planner.request import CHIPS, Request
from planner.simulating.candidates import check_simulated, deployments, named, ranked
from planner.simulating.fleets import ROUTINGS, Routing
from planner.simulating.goodput import Deployment, Goal, fares
from planner.simulating.traces import SEED, Stream, Trace
from planner.specs.lengths import DEFAULT, population_of, spread_of
from planner.specs.traces import read_trace
from planner.units import MS

PlanLabels = Annotated[
    str | None,
    typer.Option(
        "--plan", metavar="TP8,TP4xDP2", help="Plans as `plan` prints them; default: the best few by ranking."
    ),
]
ArrivalRate = Annotated[
    float | None,
    typer.Option(
        "--arrival-rate",
        metavar="REQUESTS/S",
        help="What comes to the whole deployment; default: the highest rate that keeps the limits is searched.",
    ),
]
TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="CSV of requests: arrival (s), isl, osl; --arrival-rate plays them faster or slower.",
    ),
]
MaxGap = Annotated[
    float | None,
    typer.Option("--max-gap", metavar="MS", help="Highest time between two tokens, kept by 99 in 100 of them all."),
]
Attainment = Annotated[
    float | None,
    typer.Option("--attainment", metavar="SHARE", help="Share of the requests that must keep both limits [0.9]."),
]
Percentile = Annotated[
    float | None,
    typer.Option("--percentile", metavar="P", help="In its place: this percentile of each time must keep its limit."),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=20, help="Requests that are simulated [1000, or as many as a steady state takes]."),
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness", metavar="CV", help="Coefficient of variation of the gaps: 1 Poisson, more is burstier, 0 equal."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of the random numbers.")]
Prefill = Annotated[
    str | None,
    typer.Option(
        "--prefill", metavar="mixed|separate", help="Chunks of prompts beside decodes, or prompts first [the engine's]."
    ),
]
Route = Annotated[
    str, typer.Option("--routing", metavar="least|robin", help="Requests go to the least loaded replica, or in turn.")
]
_TRIED = 14  # rates that a search tries, about
MOST_REQUESTS = 1_000_000
"""Requests that are drawn at most."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.Gpus = None,
    plan: PlanLabels = None,
    max_ttft: opt.MaxTtft = None,
    max_tpot: opt.MaxTpot = None,
    max_gap: MaxGap = None,
    attainment: Attainment = None,
    percentile: Percentile = None,
    arrival_rate: ArrivalRate = None,
    trace: TraceFile = None,
    burstiness: Burstiness = 1.0,
    requests: Requests = None,
    seed: Seed = SEED,
    isl: opt.IslOrSpread = "1024",
    osl: opt.OslOrSpread = "256",
    lengths: opt.Lengths = None,
    prefill: Prefill = None,
    routing: Route = "least",
    schedule: opt.Schedule = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
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
    slice_: opt.Slice = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Plans of the ranking that are simulated.")] = 3,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """How many requests per second a plan serves within limits on time: simulated, request by request.

    With --arrival-rate or --trace: the percentiles at that load. Otherwise the highest rate at which enough requests
    keep --max-ttft and --max-tpot (goodput), by bisection. Ctrl-C ends a search with the best so far.
    """
    opt.check_targets(csv, json, specs=(model, hardware, engine, lengths, trace))
    opt.choice(routing, "--routing", ROUTINGS)
    goal = _goal(max_ttft, max_tpot, max_gap, attainment, percentile)
    rate = opt.above_zero(arrival_rate, "--arrival-rate")
    if rate is None and trace is None and not goal.limits:
        raise InputError(
            "give limits, --max-ttft or --max-tpot, to search the highest rate; or --arrival-rate, --trace"
        )
    _check_drawn(trace, burstiness, requests, (isl, osl, lengths))
    stream = _stream(trace, rate, burstiness, seed, (isl, osl, lengths))
    request = request_of(
        model,
        hardware,
        engine,
        (_chips(gpus, plan), False),
        workload_of(isl, osl, None, schedule, weights, kv_cache, max_context, None, prefix_hit, None, lengths),
        "throughput",
        limits_of(max_ttft, max_tpot, None, memory_limit, memory_fraction),
        filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        None,
        slice_,
        max_num_seqs,
        max_num_batched_tokens,
    )
    request = _as_asked(request, stream.log, prefill)
    check_simulated(request)
    found = named(request, _labels(plan)) if plan is not None else ranked(request, top)
    ready, refused = deployments(request, found, stream.longest, cast(Routing, routing))
    if not ready:
        raise NoPlanError(f"{refused[0].plan.label}: {refused[0].reason}; no plan that was looked at has more")
    paid = {each: each.chips if gpus is None and plan is not None else request.gpus for each, _ in ready}
    entries, complete = _simulated(paid, ready, stream, goal, requests, quiet)
    if not complete:
        opt.warn("interrupted: this is the best so far", quiet)
    own = trace is None
    drawn = {"seed": seed if own else None, "burstiness": burstiness if own else None, "trace": trace}
    notes = [f"{each.plan.label} left out: {each.reason}." for each in refused]
    _show(entries, request, goal, drawn, notes, (csv, json, no_header, quiet))


def _goal(
    ttft: float | None, tpot: float | None, gap: float | None, attainment: float | None, percentile: float | None
) -> Goal:
    limits = limits_of(ttft, tpot, None, None, None)
    if attainment is not None and percentile is not None:
        raise InputError("--attainment and --percentile both say for whom the limits hold; give one of them")
    if attainment is not None and not 0 < attainment <= 1:
        raise InputError(f"--attainment must be above 0 and at most 1, the share of the requests, found {attainment:g}")
    if percentile is not None and not 0 < percentile < 100:
        raise InputError(f"--percentile must be between 0 and 100, found {percentile:g}")
    pause = opt.above_zero(gap, "--max-gap")
    share = 0.9 if attainment is None else attainment
    return Goal(limits.ttft, limits.tpot, share, percentile, None if pause is None else pause * MS)


def _check_drawn(trace: str | None, burstiness: float, count: int | None, lengths: tuple[str, str, str | None]) -> None:
    """Refuses what contradicts a trace, and what cannot be drawn."""
    if not 0 <= burstiness <= 20:
        raise InputError(f"--burstiness must be from 0 (equal gaps) to 20, found {burstiness:g}")
    if count is not None and count > MOST_REQUESTS:
        raise InputError(f"--requests must be at most {MOST_REQUESTS}, found {count}")
    if trace is not None and (lengths != (*DEFAULT, None) or burstiness != 1):
        raise InputError("--trace has arrivals and lengths of its own; leave out --isl, --osl, --lengths, --burstiness")


def _stream(
    file: str | None, rate: float | None, burstiness: float, seed: int, lengths: tuple[str, str, str | None]
) -> Stream:
    """Where requests come from."""
    if file is None:
        return Stream(None, population_of(*lengths), burstiness, seed, rate)
    log = Trace(*read_trace(file))
    if rate is not None and not np.isfinite(log.rate):
        raise InputError(f"--trace {file}: all requests come at once; --arrival-rate has nothing to play faster")
    return Stream(log, None, 1.0, seed, rate)


def _chips(gpus: int | None, plan: str | None) -> int:
    """Those given, else as many as the largest of the named plans takes."""
    if gpus is not None or plan is None:
        return gpus or CHIPS
    return max(Plan.parse(label).chips for label in _labels(plan))


def _labels(text: str | None) -> list[str]:
    return [label.strip() for label in (text or "").split(",")]


def _as_asked(request: Request, log: Trace | None, prefill: str | None) -> Request:
    """With the lengths of a log, and prompts that run as they are asked to."""
    if log is not None:
        spread = spread_of(log.isl, log.osl)
        work = request.workload._replace(isl=spread.isl, osl=spread.osl, lengths=spread.lengths)
        request = request._replace(workload=work)
    if prefill is not None:
        how = cast(Any, opt.choice(prefill, "--prefill", ("mixed", "separate")))
        engine = request.engine
        scheduler = engine.scheduler._replace(prefill=how)
        request = request._replace(engine=engine._replace(scheduler=scheduler))
    return request


def _simulated(
    chips: Mapping[Plan, int], ready: Sequence[tuple[Plan, Deployment]], stream: Stream, goal: Goal,
    count: int | None, quiet: bool,
) -> tuple[list[Entry], bool]:  # fmt: skip
    """(plans as they fared, the best first; whether none was cut short)."""
    entries: list[Entry] = []
    complete = True
    each = _TRIED if stream.searched else 1
    with Progress("simulation", each * len(ready), quiet=quiet) as progress:

        def told() -> None:
            if progress.done < each * (len(entries) + 1):  # how many it takes is not known before
                progress.advance()

        try:
            for plan, made in ready:
                fared = fares(made, stream, goal, count, told)
                if not fared.complete and fared.found is not None and fared.found.best is None:
                    raise KeyboardInterrupt  # before anything was found
                entries.append(Entry(plan, chips[plan], fared))
                complete = complete and fared.complete
                if not complete:
                    break
                while progress.done < each * len(entries):
                    progress.advance()
        except KeyboardInterrupt:
            if not entries:
                raise
            complete = False
    if stream.searched:
        return sorted(entries, key=lambda entry: -entry.rate / entry.gpus), complete
    return sorted(entries, key=lambda entry: (-entry.judged.good, -entry.judged.attained)), complete


def _show(
    entries: list[Entry], request: Request, goal: Goal, drawn: dict[str, Any], notes: list[str],
    output: tuple[str | None, str | None, bool, bool],
) -> None:  # fmt: skip
    """Writes and prints what was found.

    Raises:
        NoPlanError: no plan keeps the limits.
    """
    csv, json, no_header, quiet = output
    searched = entries[0].fared.found
    if searched is not None and searched.best is None:
        raise NoPlanError(report.unreachable(entries, goal))
    _warn_short(entries, drawn, quiet)
    rows = [report.row(entry, request, goal, drawn) for entry in entries]
    tabular.write_rows(rows, csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_goodput(entries, rows, request, goal, notes)
    if goal.limits and not any(entry.judged.good for entry in entries):
        best = entries[0]
        raise NoPlanError(
            f"at {best.judged.rate:.4g} requests/s no plan keeps {report.promise(goal)}; {best.plan.label} comes "
            f"nearest: {report.kept(best.judged)}. Without --arrival-rate and --trace the highest rate is searched"
        )


def _warn_short(entries: list[Entry], drawn: dict[str, Any], quiet: bool) -> None:
    """Says where requests come for too short a time to be in steady state."""
    steady = [entry.fared for entry in entries if entry.judged.sustained]
    short = max(steady, key=lambda fared: fared.needed - fared.requests, default=None)
    if short is not None and drawn["trace"] is None and short.requests < short.needed:
        opt.warn(
            f"{short.requests} requests at {short.judged.rate:.4g} a second are over too soon for a steady state; "
            f"--requests {-(-short.needed // 100) * 100} would do",
            quiet,
        )
