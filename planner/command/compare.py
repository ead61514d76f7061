"""`plan compare`: plans, hardware, engines, models or formats side by side, and where their order flips."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Annotated

import typer

from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.errors import InputError, NoPlanError
from planner.explaining.comparison import Candidate, candidate, contest, ranges, room
from planner.plans.plan import Plan
from planner.report import compare as report
from planner.report import tabular
from planner.request import chips_for

MOST = 4
Labels = Annotated[
    list[str] | None, typer.Argument(metavar="[PLAN]...", help="Plans, as TP8 TP4xDP2; none = the winner of each.")
]
PlanLabels = Annotated[
    str | None, typer.Option("--plan", metavar="PLAN,...", help="Plans, the same as without the option.")
]
Models = Annotated[str, typer.Option("--model", "-m", metavar="NAME,...", help="Model, or several.")]
Chips = Annotated[str, typer.Option("--hardware", "-H", metavar="NAME,...", help="Hardware, or several.")]
Engines = Annotated[
    str | None, typer.Option("--engine", metavar="NAME,...", help="Engine, or several; default: the hardware file's.")
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus", "--chips", min=1, help="Chips paid for; default: those of each plan; else 8, or the fewest that do."
    ),
]
Weights = Annotated[
    str | None, typer.Option("--weights", metavar="DTYPE,...", help="Dtype of the weights, or several.")
]
SpecTokens = Annotated[
    str | None, typer.Option("--spec-tokens", metavar="N,...", help="Tokens drafted a step, or several; 0 = none.")
]
KvCache = Annotated[str | None, typer.Option("--kv-cache", metavar="DTYPE,...", help="Dtype of the KV, or several.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    plans: Labels = None,
    model: Models = "",
    plan: PlanLabels = None,
    hardware: Chips = "h100",
    engine: Engines = None,
    gpus: Gpus = None,
    objective: opt.Objective = "latency",
    isl: opt.IslOrSpread = "1024",
    osl: opt.OslOrSpread = "256",
    lengths: opt.Lengths = None,
    concurrency: opt.Concurrency = None,
    arrival_rate: opt.ArrivalRate = None,
    schedule: opt.Schedule = None,
    arrivals: opt.Arrivals = None,
    weights: Weights = None,
    kv_cache: KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    prefix_hit: opt.PrefixHit = 0.0,
    spec_tokens: SpecTokens = None,
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
    slice_: opt.Slice = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE.svg|png", help="Draw what each takes as a bar of its operations."),
    ] = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Two to four candidates side by side: every combination of the plans, models, hardware, engines and dtypes named.

    Says what each takes, by operation, who runs out of memory first, and from which load and which prompt on another
    one leads. Examples: plan compare TP8 TP4xDP2 --model llama3-70b --gpus 8;
    plan compare --plan TP8 --hardware h100,h200 --model llama3-70b
    """
    opt.check_targets(csv, json, ("--plot", plot), specs=(model, hardware, engine, lengths))
    opt.check_plot(plot)
    if not model:
        raise InputError("no model: give --model")
    labels = [*(plans or []), *_split(plan, "--plan")]
    named: dict[str, Sequence[str | None]] = {
        "plan": labels or [None],
        "model": _split(model, "--model"),
        "hardware": _split(hardware, "--hardware"),
        "engine": _split(engine, "--engine") or [None],
        "weights": _split(weights, "--weights") or [None],
        "kv": _split(kv_cache, "--kv-cache") or [None],
        "drafted": _split(spec_tokens, "--spec-tokens") or [None],
    }
    chosen = filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid)
    if labels and any(chosen):
        raise InputError("plans are named; leave out --tp, --pp and the like, which choose among several")
    combined = list(product(*named.values()))
    if not 2 <= len(combined) <= MOST:
        several = (
            " x ".join(f"{len(values)} {what}" for what, values in named.items() if len(values) > 1) or "one of all"
        )
        raise InputError(
            f"compare takes 2 to {MOST} candidates, found {len(combined)} ({several}): name several plans, or give a "
            "comma list to --hardware, --engine, --model, --weights, --kv-cache or --spec-tokens"
        )
    limits = limits_of(max_ttft, max_tpot, max_latency, memory_limit, memory_fraction)
    found: list[Candidate] = []
    for text, name, chip, software, stored, cache, tokens in combined:
        wanted = None if text is None else Plan.parse(text)
        request = request_of(
            name or "",
            chip or "",
            software,
            chips_for(gpus if wanted is None else gpus or wanted.chips, None, limits, arrival_rate, slice_),
            workload_of(
                isl, osl, concurrency, schedule, stored, cache, max_context, arrivals, prefix_hit, arrival_rate, lengths
            ),
            objective,
            limits,
            chosen,
            opt.above_zero(price, "--price"),
            slice_,
            max_num_seqs,
            max_num_batched_tokens,
            (None if tokens is None else _whole(tokens), spec_accept, draft),
        )
        if objective == "cost" and request.usd_per_chip_hour is None and request.hardware.price is None:
            raise InputError(
                f"--objective cost: {request.hardware.name} has no price to compare by; give --price, or "
                "--objective throughput, which compares chip-seconds"
            )
        own = {"hardware": request.hardware.name, "model": request.model.name, "engine": request.engine.name}
        own |= {"weights": f"{stored or request.model.weights}", "kv": f"{cache or 'own'} KV"}
        own |= {"drafted": f"{tokens or 'none'} drafted"}
        varied = [own[what] for what, values in named.items() if len(values) > 1 and what in own]
        try:
            one = candidate("", request, wanted)
        except NoPlanError as error:
            raise NoPlanError(
                f"{' '.join([*([text] if text else []), *varied]) or request.model.name}: {error}"
            ) from None
        shown = [one.plan.label] if len(labels) != 1 else []
        found.append(one._replace(label=" ".join([*shown, *varied])))
    if len({one.label for one in found}) < len(found):
        raise InputError("compare: the same candidate twice; name each plan, model and machine once")
    rooms = [room(one) for one in found]
    ends = ranges(found, rooms)
    priced = [one.breakdown() for one in found]
    first = min(range(len(found)), key=lambda index: priced[index].goal_value())
    others = (index for index in range(len(found)) if index != first)
    contests = [contest(found, (first, other), axis, high) for other in others for axis, high in ends.items()]
    compared = report.Comparison(found, priced, rooms, contests)
    tabular.write_rows(report.rows(compared), csv, json, not no_header, [(plot, lambda: _picture(compared, plot))])
    if not opt.is_piped(csv, json) and not quiet:
        report.print_comparison(compared)


def _picture(found: report.Comparison, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.plot import comparison_plot  # noqa: PLC0415 (needed where it is asked for)

    return comparison_plot(found.plans, [one.label for one in found.candidates], str(plot))


def _whole(word: str) -> int:
    """One of --spec-tokens.

    Raises:
        InputError: no whole number.
    """
    if not word.isdecimal():
        raise InputError(f"--spec-tokens: expected whole numbers joined by commas, found {word!r}")
    return int(word)


def _split(text: str | None, option: str) -> list[str]:
    """The words of a comma list.

    Raises:
        InputError: one of them is empty.
    """
    words = [] if text is None else [word.strip() for word in text.split(",")]
    if not all(words):
        raise InputError(f"{option} {text!r}: expected names joined by commas, found an empty one")
    return words
