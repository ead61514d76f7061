"""Commands whose model is a diffusion transformer: `plan`, `plan explain`, `plan launch` hand over to this.

The options are those of the command; here it is decided which of them mean something for such a model.
"""

from __future__ import annotations

import sys
from typing import Any

import typer

from planner.command import options as opt
from planner.errors import InputError
from planner.specs.catalog import is_diffusion

OURS = frozenset((
    "image", "frames", "steps", "warmup", "cfg", "ulysses", "ring", "pipefusion", "patches", "exact", "parallel_vae",
))  # fmt: skip
"""Options of diffusion transformers only."""
SHARED = frozenset((
    "model", "plan", "hardware", "engine", "gpus", "objective", "weights", "price", "memory_limit", "memory_fraction",
    "max_latency", "tp", "dp", "slice_", "top", "plot", "csv", "json", "no_header", "rejected", "launch", "quiet",
    "debug", "version", "vary", "low", "high",
))  # fmt: skip
"""Options that mean the same for both kinds of model."""
ENGINE = "xdit"
"""What runs them where no engine is named."""


def is_asked(context: typer.Context) -> bool:
    """Whether the command's model is a diffusion transformer.

    Raises:
        InputError: an option was given that belongs to the other kind of model.
    """
    model = context.params["model"]
    given = {
        name: parameter.opts[0]
        for parameter in context.command.params
        if (name := parameter.name or "") and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    if is_diffusion(model):
        for name, flag in given.items():
            if name == "plot" and context.info_name != "plan diagnose":
                raise InputError(
                    f"--plot draws language models here; of {model} `plan diagnose --plot` draws the roofline"
                )
            if name not in OURS | SHARED:
                raise InputError(
                    f"{flag} belongs to language models; {model} is a diffusion transformer, which takes --image, "
                    "--frames and --steps"
                )
        return True
    for name, flag in given.items():
        if name in OURS:
            raise InputError(f"{flag} belongs to diffusion transformers; {model} is a language model")
    return False


def request_of(options: dict[str, Any]) -> Any:
    """The request of a command's options.

    Raises:
        InputError: an unknown name or dtype, a size, number of frames or steps that cannot be.
    """
    from planner.diffusion.job import job_of, parse_size  # noqa: PLC0415 (of no use to language models)
    from planner.diffusion.ranking import Limits, Request  # noqa: PLC0415
    from planner.diffusion.rules import Filters  # noqa: PLC0415
    from planner.request import CHIPS, check_memory  # noqa: PLC0415
    from planner.request import Limits as Checked  # noqa: PLC0415
    from planner.specs.catalog import load_diffusion, load_hardware, load_sampler  # noqa: PLC0415
    from planner.units import MS, parse_bytes  # noqa: PLC0415

    model = load_diffusion(options["model"])
    sampler = load_sampler(options["engine"] or ENGINE)
    hardware = load_hardware(options["hardware"], sampler)
    image = options.get("image")
    warmup = options.get("warmup")
    job = job_of(
        model, None if image is None else parse_size(image), options.get("frames"), options.get("steps"),
        sampler.warmup if warmup is None else warmup,
    )  # fmt: skip
    latency = opt.above_zero(options.get("max_latency"), "--max-latency")
    memory = options.get("memory_limit")
    limits = Limits(
        None if latency is None else latency * MS,
        None if memory is None else parse_bytes(memory),
        opt.above_zero(options.get("memory_fraction"), "--memory-fraction"),
    )
    check_memory(Checked(memory=limits.memory, memory_fraction=limits.memory_fraction))
    degrees = {
        name: opt.numbers(options.get(name), f"--{name}")
        for name in ("cfg", "tp", "ulysses", "ring", "pipefusion", "patches", "dp")
    }
    return Request(
        model, hardware, sampler, options.get("gpus") or CHIPS, job, options.get("objective") or "latency",
        options.get("weights"), limits, Filters(**degrees, exact=bool(options.get("exact"))),
        opt.above_zero(options.get("price"), "--price"), bool(options.get("parallel_vae")), options.get("slice_"),
    )  # fmt: skip


def rank(context: typer.Context) -> None:
    """`plan` for a diffusion transformer: every split of these chips, ranked.

    Raises:
        InputError, NoPlanError: as `diffusion.ranking.rank`.
    """
    from planner.diffusion.ranking import COLUMNS, NoneLeftError  # noqa: PLC0415
    from planner.diffusion.ranking import rank as ranked  # noqa: PLC0415
    from planner.report import diffusion as report  # noqa: PLC0415
    from planner.report import tabular  # noqa: PLC0415

    options = context.params
    request = request_of(options)
    csv, json, quiet = options["csv"], options["json"], options["quiet"]
    as_table = not opt.is_piped(csv, json) and not quiet

    def write(rows: list[dict[str, Any]], refused: list[Any]) -> None:
        more = [
            dict.fromkeys(COLUMNS)
            | {"plan": one.plan.label, "model": request.model.name, "hardware": request.hardware.name,
               "engine": request.sampler.name, "gpus": request.gpus, **one.plan._asdict(), "error": one.reason}
            for one in refused
        ]  # fmt: skip
        cells = [[tabular.cell(row[name]) for name in COLUMNS] for row in [*rows, *more]]
        header = None if options["no_header"] else COLUMNS
        tabular.write(
            [(csv, lambda: tabular.csv_text(header, cells)), (json, lambda: tabular.json_text([*rows, *more]))]
        )

    try:
        ranking = ranked(request)
    except NoneLeftError as error:
        if options["rejected"]:
            write([], error.refused)
            if as_table:
                report.print_rejected(error.refused)
            sys.stdout.flush()
        raise
    shown = ranking.rows[: options["top"] or None]
    write(shown, ranking.refused if options["rejected"] else [])
    if not as_table:
        return
    report.print_ranking(ranking, shown)
    if options["rejected"]:
        print()
        report.print_rejected(ranking.refused)
    if options["launch"]:
        print()
        _print_launch(request, ranking.priced[0].split)


def explain(context: typer.Context) -> None:
    """`plan explain` for a diffusion transformer: where the time and memory of a plan go.

    Raises:
        InputError, NoPlanError: a plan that cannot be, or none left.
    """
    from planner.diffusion.plan import Split  # noqa: PLC0415
    from planner.diffusion.ranking import NoneLeftError, Refused, priced_or_refused, setting_of  # noqa: PLC0415
    from planner.diffusion.ranking import rank as ranked  # noqa: PLC0415
    from planner.errors import NoPlanError  # noqa: PLC0415
    from planner.report import diffusion as report  # noqa: PLC0415
    from planner.report import tabular  # noqa: PLC0415

    options = context.params
    wanted = None if options["plan"] is None else Split.parse(options["plan"])
    request = request_of({**options, "gpus": options["gpus"] or (8 if wanted is None else wanted.chips)})
    setting = setting_of(request)
    ranking = None
    try:
        ranking = ranked(request)
    except NoneLeftError:
        if wanted is None:
            raise
    if wanted is None:
        assert ranking is not None
        priced = ranking.priced[0]
    else:
        if wanted.chips > setting.placement.usable:
            raise InputError(f"--plan {wanted.label}: uses {wanted.chips} chips, --gpus is {request.gpus}")
        found = priced_or_refused(request, setting, wanted)
        if isinstance(found, Refused):
            raise NoPlanError(f"{wanted.label}: {found.reason}")
        priced = found
    tabular.write_rows(report.item_rows(request, priced), options["csv"], options["json"], not options["no_header"])
    if not opt.is_piped(options["csv"], options["json"]) and not options["quiet"]:
        report.print_explanation(request, ranking, priced, setting.weights)


def crossover(context: typer.Context) -> None:
    """`plan crossover` for a diffusion transformer: where the best split changes.

    Raises:
        InputError, NoPlanError: as `diffusion.crossing.crossing`.
    """
    from planner.diffusion.crossing import AXES, crossing  # noqa: PLC0415
    from planner.report import diffusion as report  # noqa: PLC0415
    from planner.report import tabular  # noqa: PLC0415

    options = context.params
    given = getattr(context.get_parameter_source("vary"), "name", "") == "COMMANDLINE"
    word = options["vary"] if given else ""
    request = request_of(options)
    word = word or ("frames" if request.model.is_video else "image")
    axis = next((each for each in AXES if each == word), None)
    if axis is None:
        raise InputError(f"--vary {word}: expected one of {', '.join(AXES)} for a diffusion transformer")
    found = crossing(request, axis, options["low"], options["high"])
    tabular.write_rows(report.crossing_rows(found), options["csv"], options["json"], not options["no_header"])
    if not opt.is_piped(options["csv"], options["json"]) and not options["quiet"]:
        report.print_crossing(found)


def launch(context: typer.Context) -> None:
    """`plan launch` for a diffusion transformer: the line that starts a plan, one a node.

    Raises:
        InputError, NoPlanError: as `explain`, or an engine without a command.
    """
    from planner.diffusion.plan import Split  # noqa: PLC0415
    from planner.diffusion.ranking import Refused, priced_or_refused, setting_of  # noqa: PLC0415
    from planner.diffusion.ranking import rank as ranked  # noqa: PLC0415
    from planner.errors import NoPlanError  # noqa: PLC0415
    from planner.report import tabular  # noqa: PLC0415

    options = context.params
    wanted = None if options["plan"] is None else Split.parse(options["plan"])
    request = request_of({**options, "gpus": options["gpus"] or (8 if wanted is None else wanted.chips)})
    split = ranked(request).priced[0].split if wanted is None else wanted
    found = priced_or_refused(request, setting_of(request), split)
    if isinstance(found, Refused):
        raise NoPlanError(f"{split.label}: {found.reason}")
    from planner.diffusion.launching import lines  # noqa: PLC0415

    rows = [
        {"plan": split.label, "engine": request.sampler.name, "node": node, "command": line}
        for node, line in enumerate(
            lines(request.model, request.hardware, request.sampler, split, request.job, request.weights)
        )
    ]
    tabular.write_rows(rows, options["csv"], options["json"], not options["no_header"])
    if not opt.is_piped(options["csv"], options["json"]) and not options["quiet"]:
        _print_launch(request, split)


def _print_launch(request: Any, split: Any) -> None:
    """The lines that start a plan, as a shell script; or why nothing does."""
    from planner.diffusion.launching import lines  # noqa: PLC0415
    from planner.errors import NoPlanError  # noqa: PLC0415

    try:
        found = lines(request.model, request.hardware, request.sampler, split, request.job, request.weights)
    except NoPlanError as error:
        print(f"# {error}")
        return
    source = request.sampler.launch.source
    copies = "" if split.dp == 1 else f"; {split.dp} copies, each on its own chips"
    print(f"# {split.label} under {request.sampler.name}{copies}\n# options from {source}")
    for line in found:
        print(line)
