"""`plan elastic`: sequence parallelism whose degree follows each batch, against deployments that stand still."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.command.shift import at_rate, trace_of
from planner.errors import InputError, NoPlanError
from planner.report import tabular
from planner.request import CHIPS
from planner.request import check as check_request

MOST_REQUESTS = 5000
MOST_TOKENS = 10_000_000


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: Annotated[int, typer.Option("--gpus", "--chips", min=2, help="Chips there are.")] = CHIPS,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Chips of an instance, a tensor-parallel group.")] = 2,
    short: Annotated[int, typer.Option("--short", min=1, help="Tokens of a short prompt (half to twice that).")] = 500,
    long: Annotated[int, typer.Option("--long", min=1, help="Tokens of a long prompt, likewise.")] = 50_000,
    long_share: Annotated[float, typer.Option("--long-share", help="Share of requests whose prompt is long.")] = 0.1,
    osl: opt.Osl = 200,
    arrival_rate: Annotated[
        float | None,
        typer.Option(
            "--arrival-rate", metavar="REQUESTS/S", help="At which the systems are compared [1; the trace's]."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="CSV of requests: arrival (s), isl, osl, in the place of a mix."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many requests.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything random.")] = 1,
    chunk: Annotated[
        int,
        typer.Option(
            "--chunk", min=1, help="Tokens of each prompt in an iteration, in the system with chunked prompts."
        ),
    ] = 512,
    scale: Annotated[
        float, typer.Option("--slo-scale", help="A request's limit: so many times what it takes alone.")
    ] = 25.0,
    attainment: Annotated[float, typer.Option("--attainment", help="Share of requests that must keep it.")] = 0.9,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Elastic sequence parallelism (LoongServe): each batch on as many instances as it is worth, pass by pass.

    Short and long prompts come one by one to it, to static tensor parallelism with whole and with chunked prompts, and
    to a deployment with chips for prompts and chips for answers; the highest rate of each, and why.
    """
    from planner.phases.elastic import comparison as phases  # noqa: PLC0415 (imports are part of what may be slow)
    from planner.report import elastic as report  # noqa: PLC0415
    from planner.report.progress import Progress  # noqa: PLC0415
    from planner.report.stderr import say  # noqa: PLC0415
    from planner.simulating import traces  # noqa: PLC0415

    opt.check_targets(csv, json, specs=(model, hardware, engine, trace))
    _check_numbers(long_share, attainment, requests, max(short, long))
    opt.above_zero(scale, "--slo-scale")
    rate = opt.above_zero(arrival_rate, "--arrival-rate")
    if trace is None:
        population = phases.mixed(short, long, long_share, osl)
        coming = at_rate(traces.requests(population, requests, seed=seed), rate or 1.0)
        longest = population.longest  # whether it is drawn or not: what is refused does not hang on the seed
    else:
        coming = trace_of(trace, rate)
        if coming.length > MOST_REQUESTS:
            raise InputError(f"--trace {trace}: {coming.length} requests; at most {MOST_REQUESTS} are looked at here")
        longest = float((coming.isl + coming.osl).max())
    request = request_of(
        model, hardware, engine, (gpus, False),
        workload_of("1", "2", None, None, weights, kv_cache, None, None),
        "latency", limits_of(None, None, None, memory_limit, memory_fraction), filters_of(*([None] * 10)), None, None,
    )  # fmt: skip
    check_request(request)
    if longest > request.model.max_context:
        raise InputError(
            f"the longest request has {longest:.0f} tokens, more than {request.model.name}'s context of "
            f"{request.model.max_context}: give "
            + ("another trace" if trace else "a smaller --long (prompts are up to twice as long) or --osl")
        )
    found = phases.elastic(request, tp, chunk, longest)
    scores = []
    with Progress("system", len(found.systems), quiet=quiet, bar=not opt.is_piped(csv, json)) as progress:
        try:
            for system in found.systems:
                scores.append(phases.score(found, system, coming, scale, attainment))
                progress.advance(failed=scores[-1].rate == 0)
        except KeyboardInterrupt:
            if not scores:
                raise
            say(f"interrupted: {len(scores)} of {len(found.systems)} systems")
            found = found._replace(systems=found.systems[: len(scores)])
    tabular.write_rows(report.rows(found, scores, coming), csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_elastic(found, scores, coming, found.esp(coming), (scale, attainment))
    if len(scores) == len(phases.NAMES) and all(each.rate == 0 for each in scores):
        raise NoPlanError(report.unreachable(found, scores, (scale, attainment)))


def _check_numbers(long_share: float, attainment: float, requests: int, longest: int) -> None:
    if not 0 <= long_share <= 1:
        raise InputError(f"--long-share must be from 0 to 1, found {long_share:g}")
    if not 0 < attainment <= 1:
        raise InputError(f"--attainment must be above 0 and at most 1, the share of the requests, found {attainment:g}")
    if requests > MOST_REQUESTS:
        raise InputError(f"--requests must be at most {MOST_REQUESTS}, found {requests}")
    if longest > MOST_TOKENS:
        raise InputError(f"--long must be at most {MOST_TOKENS}, found {longest}")
