"""`plan shift`: sequence parallelism for large passes, tensor parallelism for small ones, over the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import InputError, NoPlanError
from planner.phases.shift.layout import Base
from planner.report import tabular
from planner.request import CHIPS
from planner.request import check as check_request

if TYPE_CHECKING:
    from planner.simulating.traces import Trace

MOST_REQUESTS = 100_000
ARRIVAL = typer.Option(
    "--arrival-rate", metavar="REQUESTS/S", help="Simulate requests that come at this rate, one by one."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: Annotated[int, typer.Option("--gpus", "--chips", min=1, help="Chips there are.")] = CHIPS,
    replica: Annotated[
        int | None, typer.Option("--replica", min=2, help="Chips of a replica [a node, or --gpus].")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="SP8|SP4xTP2", help="The base [the one that serves most].")
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option("--threshold", min=0, help="Tokens of a pass above which the base runs [where both are equal]."),
    ] = None,
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: opt.Concurrency = None,
    arrival_rate: Annotated[float | None, ARRIVAL] = None,
    trace: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="CSV of requests to simulate: arrival (s), isl, osl."),
    ] = None,
    burstiness: Annotated[
        float, typer.Option("--burstiness", metavar="CV", help="Coefficient of variation of the gaps between them.")
    ] = 1.0,
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many of them.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything random.")] = 1,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Shift parallelism: a replica that changes between sequence and tensor parallelism from pass to pass.

    Beside tensor parallelism of the same chips, data parallelism of all, and the base alone: over the load, or under
    requests that come at a rate. The KV cache stays where it is; the order of ranks that this takes is said.
    """
    from planner.phases.shift.shifting import shifting  # noqa: PLC0415 (imports are part of what may be slow)
    from planner.report import shifting as report  # noqa: PLC0415

    opt.check_targets(csv, json, specs=(model, hardware, engine, trace))
    if (arrival_rate is not None or trace is not None) and concurrency is not None:
        option = "--arrival-rate" if trace is None else "--trace"
        raise InputError(f"{option} and --concurrency both say how many requests are in flight; give one of them")
    rate = opt.above_zero(arrival_rate, "--arrival-rate")
    if not 0 <= burstiness <= 100:
        raise InputError(f"--burstiness must be from 0 (equal gaps) to 100, found {burstiness:g}")
    if requests > MOST_REQUESTS:
        raise InputError(f"--requests must be at most {MOST_REQUESTS}, found {requests}")
    coming = None if trace is None else trace_of(trace, rate)
    if coming is not None:  # tables and thresholds are those of its mean request
        isl, osl = max(1, round(float(coming.isl.mean()))), max(2, round(float(coming.osl.mean())))
    request = request_of(
        model, hardware, engine, (gpus, False),
        workload_of(str(isl), str(osl), concurrency, None, weights, kv_cache, None, None),
        "latency", limits_of(None, None, None, memory_limit, memory_fraction), filters_of(*([None] * 10)), None, None,
        max_num_seqs, max_num_batched_tokens,
    )  # fmt: skip
    check_request(request)
    found = shifting(request, replica, None if base is None else Base.parse(base), threshold)
    if rate is None and coming is None:
        tabular.write_rows(report.rows(found), csv, json, not no_header)
        if not opt.is_piped(csv, json) and not quiet:
            report.print_shifting(found)
        return
    import numpy as np  # noqa: PLC0415

    from planner.phases.shift.load import served  # noqa: PLC0415
    from planner.simulating import traces  # noqa: PLC0415
    from planner.specs.lengths import Population  # noqa: PLC0415

    if coming is None:
        alike = Population(np.array([float(isl)]), np.array([float(osl)]))
        coming = at_rate(traces.requests(alike, requests, burstiness, seed), rate or 1.0)
    try:
        outcomes = served(found, coming)
    except ValueError as error:
        raise NoPlanError(str(error)) from None
    tabular.write_rows(report.served_rows(found, outcomes, coming.rate), csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_served(
            found, outcomes, coming.rate, trace or f"gaps with a coefficient of variation of {burstiness:g}"
        )


def trace_of(file: str, rate: float | None) -> Trace:
    """The requests of a file, at its own rate or at another.

    Raises:
        InputError: as `read_trace`; a rate for requests that come at once.
    """
    import numpy as np  # noqa: PLC0415

    from planner.simulating.traces import Trace  # noqa: PLC0415
    from planner.specs.traces import read_trace  # noqa: PLC0415

    coming = Trace(*read_trace(file))
    if rate is None:
        return coming
    if not np.isfinite(coming.rate):
        raise InputError(f"--trace {file}: all requests come at once; --arrival-rate has nothing to play faster")
    return at_rate(coming, rate)


def at_rate(coming: Trace, rate: float) -> Trace:
    """The same requests at a rate, which they have on average; those that come at once stay so."""
    return coming.faster(rate / coming.rate if coming.rate < float("inf") else 1.0)
