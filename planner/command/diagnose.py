"""`plan diagnose`: whether cutting the sequence pays."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import diffusion
from planner.command import options as opt
from planner.command.question import filters_of, limits_of, request_of, workload_of
from planner.diagnosing.framework import Diagnosis
from planner.report import diagnosis as report
from planner.report import tabular
from planner.request import CHIPS


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    context: typer.Context,
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.Gpus = CHIPS,
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: opt.Concurrency = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    slice_: opt.Slice = None,
    image: opt.Image = None,
    frames: opt.Frames = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE.svg|png", help="Draw the chip's roofline with the phases on it."),
    ] = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Whether cutting the sequence over chips pays: prompt, decode step or denoising step, priced and explained.

    Each phase on the chip's roofline and in the compute-memory spectrum, its place between dependency and
    divisibility, the best plan with the sequence cut beside the best without over all lengths, and a checklist.
    """
    opt.check_targets(csv, json, ("--plot", plot), specs=(model, hardware, engine))
    opt.check_plot(plot)
    if diffusion.is_asked(context):
        from planner.diagnosing import denoising  # noqa: PLC0415 (of one kind of model only)

        found = denoising.diagnose(diffusion.request_of(context.params))
    else:
        from planner.diagnosing import language  # noqa: PLC0415

        found = language.diagnose(
            request_of(
                model,
                hardware,
                engine,
                (gpus or CHIPS, False),
                workload_of(str(isl), str(osl), concurrency, None, weights, kv_cache, None, None),
                "latency",
                limits_of(None, None, None, memory_limit, memory_fraction),
                filters_of(*([None] * 10)),
                None,
                slice_,
            )
        )
    tabular.write_rows(report.rows(found), csv, json, not no_header, [(plot, lambda: _picture(found, plot))])
    if not opt.is_piped(csv, json) and not quiet:
        report.print_diagnosis(found)


def _picture(found: Diagnosis, plot: str | None) -> bytes:
    """What --plot draws."""
    from planner.report.roofline import roofline_plot  # noqa: PLC0415 (needed where it is asked for)

    return roofline_plot(found, str(plot))
