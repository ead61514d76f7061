"""`plan crossover`: where the best plan changes along one option."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import diffusion
from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.crossing import AXES, Axis, crossing
from planner.errors import InputError
from planner.report import crossing as report
from planner.report import tabular
from planner.request import CHIPS
from planner.specs.catalog import load_machine

Vary = Annotated[
    str,
    typer.Option(
        "--vary",
        metavar="OPTION",
        help="concurrency, isl, gpus, or tokens: the prompt tokens of one static batch, in whole prompts of --isl; "
        "of a diffusion transformer image, frames, steps or gpus.",
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="GOAL",
        help="latency, ttft, tpot, throughput or cost; default: ttft for tokens, else tpot.",
    ),
]
Chips = Annotated[
    int, typer.Option("--gpus", "--chips", min=1, help="Chips there are (and are paid for); of --vary gpus the most.")
]
From = Annotated[int | None, typer.Option("--from", min=1, help="Least value; default: 1, or one prompt.")]
To = Annotated[
    int | None, typer.Option("--to", min=1, help="Greatest value; default: what memory or the model allows, or --gpus.")
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    context: typer.Context,
    model: opt.Model,
    vary: Vary = "concurrency",
    low: From = None,
    high: To = None,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: Chips = CHIPS,
    objective: Goal = None,
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: opt.Concurrency = None,
    schedule: opt.Schedule = None,
    arrivals: opt.Arrivals = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
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
    slice_: opt.Slice = None,
    image: opt.Image = None,
    frames: opt.Frames = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    exact: opt.Exact = False,
    parallel_vae: opt.ParallelVae = False,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Where the best plan changes: the stretches of loads, prompts, batches or chips over which each one leads.

    Weight-gathered layouts are looked at for decode steps too, which a ranking leaves out unless they are named.
    """
    opt.check_targets(csv, json, specs=(model, hardware, engine))
    if diffusion.is_asked(context):
        return diffusion.crossover(context)
    axis = _axis(vary)
    changed = {"--concurrency": (concurrency, ("concurrency", "tokens")), "--slice": (slice_, ("gpus",))}
    for name, (value, axes) in changed.items():
        if value is not None and axis in axes:
            raise InputError(f"{name} is what --vary {axis} changes; leave it out, or give --from and --to")
    if ffn is None and axis in ("concurrency", "tokens"):
        ffn = ",".join(load_machine(hardware, engine)[1].ffn)
    request = request_of(
        model,
        hardware,
        engine,
        ((high if axis == "gpus" else None) or gpus, False),
        workload_of(str(isl), str(osl), concurrency, schedule, weights, kv_cache, max_context, arrivals, prefix_hit),
        objective or ("ttft" if axis == "tokens" else "tpot"),
        limits_of(max_ttft, max_tpot, max_latency, memory_limit, memory_fraction),
        filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        opt.above_zero(price, "--price"),
        slice_,
        max_num_seqs,
        max_num_batched_tokens,
    )
    found = crossing(request, axis, low, high, lambda: None)
    tabular.write_rows(report.rows(found), csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_crossing(found)


def _axis(word: str) -> Axis:
    for axis in AXES:
        if axis == word:
            return axis
    raise InputError(f"--vary {word}: expected one of {', '.join(AXES)}")
