"""`plan crossover`: where the best plan changes along one option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from planner.command import diffusion
from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.crossing import AXES, Axis, crossing
from planner.errors import InputError
from planner.phases.region.surface import Dimension, dimension
from planner.report import crossing as report
from planner.report import tabular
from planner.request import CHIPS, Request
from planner.specs.catalog import load_machine

Vary = Annotated[
    list[str] | None,
    typer.Option(
        "--vary",
        metavar="OPTION",
        help="concurrency (default), isl, gpus, or tokens: the prompt tokens of one static batch, in whole prompts of "
        "--isl; of a diffusion transformer image, frames, steps or gpus. Twice, for a diagram over two options: "
        "concurrency, isl, osl, gpus, arrival-rate, prefix-hit, max-ttft, max-tpot, max-latency.",
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
From = Annotated[
    list[float] | None,
    typer.Option("--from", metavar="N", help="Least value; default: 1, or one prompt. Of two options: twice."),
]
To = Annotated[
    list[float] | None,
    typer.Option(
        "--to",
        metavar="N",
        help="Greatest value; default: what memory or the model allows, --gpus, or the highest rate. Twice likewise.",
    ),
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE.svg|png", help="Draw the diagram over two options.")]


_GIVEN = ("concurrency", "arrival_rate", "max_ttft", "max_tpot", "max_latency")
"""Options without a default, which cannot be given where they vary."""


class _Asked(NamedTuple):
    """What varies, and from where to where, as it was typed."""

    names: list[str]
    lows: list[float]
    highs: list[float]

    @property
    def ends(self) -> dict[str, list[float]]:
        """Values by option."""
        return {"--from": self.lows, "--to": self.highs}

    def check(self, plot: str | None) -> None:
        """Refuses more options than two, more ends than options, and a picture of one option."""
        if len(self.names) > MOST_VARYING:
            raise InputError(f"--vary {self.names[2]}: one option, or two for a diagram")
        for option, values in self.ends.items():
            if len(values) > len(self.names):
                raise InputError(f"{option} {values[-1]:g}: given {len(values)} times, --vary {len(self.names)} times")
        if plot is not None and len(self.names) == 1:
            raise InputError(f"--plot {plot}: draws a diagram over two options; give --vary twice")

    def chips(self) -> int | None:
        """The greatest number of chips, where chips vary and it is said."""
        for name, value in zip(self.names, self.highs, strict=False):
            if name == "gpus":
                return _whole("--to", value)
        return None


MOST_VARYING = 2
"""Options of a diagram."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    context: typer.Context,
    model: opt.Model,
    vary: Vary = None,
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
    plot: Plot = None,
    arrival_rate: opt.ArrivalRate = None,
    debug: opt.Debug = False,
) -> None:
    """Where the best plan changes: the stretches of loads, prompts, batches or chips over which each one leads.

    With --vary twice, the regions of two options in which each one leads, and which one plan loses least in all of
    them. Weight-gathered layouts are looked at for decode steps too, which a ranking leaves out unless they are named.
    """
    opt.check_targets(csv, json, ("--plot", plot), specs=(model, hardware, engine))
    asked = _Asked(vary or ["concurrency"], low or [], high or [])
    asked.check(plot)
    opt.check_plot(plot)
    if diffusion.is_asked(context):
        if len(asked.names) > 1:
            raise InputError("--vary twice: a diffusion transformer has one option at a time")
        return diffusion.crossover(context)
    given: dict[str, Any] = {name: context.params[name] for name in _GIVEN}
    varying = [dimension(name) for name in asked.names] if len(asked.names) > 1 else []
    axis = None if varying else _axis(asked.names[0])
    if axis is not None:
        _check_axis(axis, given, slice_)
    else:
        _check_given(varying, given, slice_)
        given |= {each.name: None for each in varying}
    if ffn is None and axis in ("concurrency", "tokens"):
        ffn = ",".join(load_machine(hardware, engine)[1].ffn)
    request = request_of(
        model,
        hardware,
        engine,
        (asked.chips() or gpus, False),
        workload_of(
            str(isl),
            str(osl),
            given["concurrency"],
            schedule,
            weights,
            kv_cache,
            max_context,
            arrivals,
            prefix_hit,
            given["arrival_rate"],
        ),
        objective or ("ttft" if axis == "tokens" else "latency" if varying else "tpot"),
        limits_of(given["max_ttft"], given["max_tpot"], given["max_latency"], memory_limit, memory_fraction),
        filters_of(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn, grid),
        opt.above_zero(price, "--price"),
        slice_,
        max_num_seqs,
        max_num_batched_tokens,
    )
    if axis is None:
        return _diagram(request, varying, asked, (csv, json, not no_header, plot), quiet)
    ends = [None if not values else _whole(option, values[0]) for option, values in asked.ends.items()]
    found = crossing(request, axis, ends[0], ends[1], lambda: None)
    tabular.write_rows(report.rows(found), csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_crossing(found)


def _diagram(
    request: Request,
    varying: Sequence[Dimension],
    asked: _Asked,
    targets: tuple[str | None, str | None, bool, str | None],
    quiet: bool,
) -> None:
    """Over two options."""
    from planner.phases.region.diagram import diagram  # noqa: PLC0415 (of two options only)
    from planner.report import diagram as report  # noqa: PLC0415
    from planner.report.progress import Progress  # noqa: PLC0415

    csv, json, header, plot = targets
    lows, highs = ((given[0], given[1]) for given in ([*each, None, None] for each in asked.ends.values()))
    progress = Progress("point", 1, quiet=quiet, bar=not opt.is_piped(csv, json))

    def tick(done: int, total: int) -> None:
        progress.total = total
        while progress.done < done:
            progress.advance()

    with progress:
        found = diagram(request, (varying[0], varying[1]), lows, highs, tick)
    pictures: list[tabular.Output] = [(plot, lambda: _picture(found, plot))]
    tabular.write_rows(report.rows(found), csv, json, header, pictures)
    if not opt.is_piped(csv, json) and not quiet:
        report.print_diagram(found)


def _picture(found: Any, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.diagram_plot import diagram_plot  # noqa: PLC0415 (needed where it is asked for)

    return diagram_plot(found, str(plot))


def _check_axis(axis: Axis, given: dict[str, Any], slice_: str | None) -> None:
    """Refuses an option that varies and is given, and a rate, which is not along one option."""
    changed = {"--concurrency": (given["concurrency"], ("concurrency", "tokens")), "--slice": (slice_, ("gpus",))}
    for name, (value, axes) in changed.items():
        if value is not None and axis in axes:
            raise InputError(f"{name} is what --vary {axis} changes; leave it out, or give --from and --to")
    if given["arrival_rate"] is not None:
        raise InputError("--arrival-rate: along one option the load is --concurrency; give --vary twice for a rate")


def _check_given(varying: Sequence[Dimension], given: dict[str, Any], slice_: str | None) -> None:
    """Refuses an option that both varies and is given a value."""
    names = {each.name for each in varying}
    for name, value in given.items():
        if value is not None and name in names:
            option = name.replace("_", "-")
            raise InputError(f"--{option} is what --vary {option} changes; leave it out, or give --from and --to")
    if slice_ is not None and "gpus" in names:
        raise InputError("--slice is what --vary gpus changes; leave it out, or give --from and --to")
    loads = {"concurrency", "arrival_rate"}
    if len(loads & (names | {name for name in loads if given[name] is not None})) > 1:
        raise InputError("concurrency and arrival-rate both say how many requests are in flight; keep one of them")


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise InputError(f"{option} {value:g}: expected a whole number")
    return int(value)


def _axis(word: str) -> Axis:
    for axis in AXES:
        if axis == word:
            return axis
    raise InputError(f"--vary {word}: expected one of {', '.join(AXES)}")
