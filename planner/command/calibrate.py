"""`plan calibrate`: fits the constants of a user's own cluster to what was measured on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from planner.command import options as opt
from planner.command.served import DEGREES, doubt, options_of, server_of
from planner.errors import InputError
from planner.evidence import fabric
from planner.evidence.calibration import calibrated_hardware, calibrated_host, doubtful, reach, taken
from planner.evidence.serving import ServingPoint
from planner.plans.plan import Plan
from planner.report import calibration as report
from planner.report import tabular
from planner.specs.benchmarks import ServingRun, kind_of, read_collectives, read_gemm, read_serving, where
from planner.specs.catalog import ENGINES, HARDWARE, files_of, load_hardware, load_machine, plain
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.merging import merge
from planner.specs.structure import validated

Files = Annotated[
    list[str] | None, typer.Argument(metavar="FILE...", help="Measurements of any kind; what they are is seen in them.")
]
Nccl = Annotated[
    list[str] | None,
    typer.Option("--nccl", metavar="FILE", help="Output of nccl-tests or rccl-tests, text or -J; may be repeated."),
]
Gemm = Annotated[
    list[str] | None,
    typer.Option("--gemm", metavar="FILE", help="CSV of m, n, k, dtype and time_us, time_ms or tflops; repeatable."),
]
Serving = Annotated[
    list[str] | None,
    typer.Option("--serving", metavar="FILE", help="Results of vllm bench serve or sglang.bench_serving; repeatable."),
]
OneModel = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="NAME|HF-ID|FILE", help="Model that was served; default: as the result says."
    ),
]
SomeIsl = Annotated[int | None, typer.Option("--isl", min=1, help="Tokens of a prompt, instead of the result's mean.")]
SomeOsl = Annotated[int | None, typer.Option("--osl", min=1, help="Tokens of an answer, likewise.")]
PlanLabel = Annotated[str | None, typer.Option("--plan", metavar="TP8xPP2", help="The plan that served.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks of a replica; default 1.")]
Pp = Annotated[int | None, typer.Option("--pp", min=1, help="Pipeline stages of a replica; default 1.")]
Dp = Annotated[int | None, typer.Option("--dp", min=1, help="Replicas; default 1.")]
Load = Annotated[
    int | None, typer.Option("--concurrency", min=1, help="Requests in flight, where the result does not say.")
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the new files' machine; default: the file's name.")]
Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE.yaml", help="Write what was fitted of the hardware.")
]
EngineOutput = Annotated[
    str | None, typer.Option("--engine-output", metavar="FILE.yaml", help="Write what was fitted of the engine.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    files: Files = None,
    hardware: opt.Hardware = "h100",
    nccl: Nccl = None,
    gemm: Gemm = None,
    serving: Serving = None,
    engine: opt.Engine = None,
    model: OneModel = None,
    plan: PlanLabel = None,
    tp: Tp = None,
    pp: Pp = None,
    dp: Dp = None,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    isl: SomeIsl = None,
    osl: SomeOsl = None,
    concurrency: Load = None,
    name: Name = None,
    output: Output = None,
    engine_output: EngineOutput = None,
    force: Force = False,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Fit kernels, collectives and host time to measurements of your own, and write files that plans can use."""
    opt.check_targets(csv, json, ("--output", output), ("--engine-output", engine_output))
    sorted_files = _by_kind(files or [], {"nccl": nccl or [], "gemm": gemm or [], "serving": serving or []})
    _check_outputs(output, engine_output, force, sorted_files)
    machine, software = load_machine(hardware, engine)
    starts = files_of(HARDWARE, hardware), files_of(ENGINES, engine or load_hardware(hardware).engine)
    opt.check_apart(
        (("--csv", csv), ("--json", json), ("--output", output), ("--engine-output", engine_output)),
        [*(file for kind in sorted_files.values() for file in kind), model if opt.is_file(model) else None],
    )
    spec_files = [path for files in starts for path, _ in files]
    opt.check_apart((("--csv", csv), ("--json", json)), spec_files)
    for option, target in (("--output", output), ("--engine-output", engine_output)):
        if target is not None and Path(target).resolve() in {path.resolve() for path in spec_files}:
            raise InputError(f"{option} {target}: is the file to start from; choose another name")
    runs = [run for file in sorted_files["nccl"] for run in read_collectives(file)]
    products = [row for file in sorted_files["gemm"] for row in read_gemm(file)]
    served = [run for file in sorted_files["serving"] for run in read_serving(file)]
    _check_servers(served, software.name)
    doubts = [fabric.doubt(machine, run) for run in runs] + [doubt(run, software.name) for run in served]
    for text in dict.fromkeys(text for text in doubts if text is not None):
        opt.warn(text, quiet)
    given = {
        "model": model, "plan": plan, "tp": tp, "pp": pp, "dp": dp,
        "weights": weights, "kv_cache": kv_cache, "isl": isl, "osl": osl, "concurrency": concurrency,
    }  # fmt: skip
    points = [_point(run, given, machine, software) for run in served]
    points, texts_left = taken(software, points)
    for text in texts_left:
        opt.warn(text, quiet)
    fitted, fits, keys = calibrated_hardware(machine, software, runs, products)
    engine_keys: dict[str, Any] = {}
    if points:
        found, engine_keys = calibrated_host(machine, fitted, software, points)
        fits += found
    own = machine.name if output is None else name or Path(output).stem
    if keys and own != (like := machine.like or machine.name):  # what was measured of engines there holds here
        keys = {"like": like, **keys}
    if engine_keys:
        engine_keys["calibrated"] = reach(own, points)
    new = (
        _File("--output", output, starts[0][0], machine, keys),
        _File("--engine-output", engine_output, starts[1][0], software, engine_keys),
    )
    texts = _written(new, name, f"{machine.name} under {software.name} {software.version}")
    for text in doubtful(fits):
        opt.warn(text, quiet)
    rows = report.rows(fits)
    files_out: list[tuple[str | None, Callable[[], str]]] = [(target, partial(str, text)) for target, text in texts]
    tabular.write([*files_out, *report.outputs(rows, csv, json, not no_header)])
    if not opt.is_piped(csv, json) and not quiet:
        report.print_calibration(fits, _sentences(new))


def _by_kind(files: Sequence[str], named: dict[str, list[str]]) -> dict[str, list[str]]:
    """Every file by what it holds; those without an option say so themselves.

    Raises:
        InputError: no file at all, or one that stands twice.
    """
    for file in files:
        named[kind_of(file)].append(file)
    every = [str(Path(file).resolve()) for kind in named.values() for file in kind]
    if not every:
        raise InputError("nothing to fit: give measurements, as --nccl FILE, --gemm FILE.csv or --serving FILE.json")
    twice = next((file for file in every if every.count(file) > 1), None)
    if twice is not None:
        raise InputError(f"{twice}: stands twice; its rows would count twice")
    return named


def _check_outputs(output: str | None, engine_output: str | None, force: bool, files: dict[str, list[str]]) -> None:
    """Refuses before anything is fitted what could not be written after it."""
    kernels = bool(files["nccl"] or files["gemm"])
    if output is not None and not kernels:
        raise InputError(f"--output {output}: nothing of the hardware is fitted; give --nccl or --gemm")
    if engine_output is not None and not files["serving"]:
        raise InputError(f"--engine-output {engine_output}: nothing of the engine is fitted; give --serving")
    for option, target in (("--output", output), ("--engine-output", engine_output)):
        if target is None:
            continue
        if Path(target).suffix not in (".yaml", ".yml"):
            raise InputError(f"{option} {target}: expected the name of a YAML file, as mine.yaml")
        if Path(target).exists() and not force:
            raise InputError(f"{option} {target}: exists; --force replaces it")
    if engine_output is not None and kernels and output is None:
        raise InputError(
            f"--engine-output {engine_output}: its host is fitted on top of the kernels of this very call, "
            "without which it is too fast or too slow: give --output FILE.yaml for them, or leave --nccl and --gemm out"
        )


def _check_servers(runs: Sequence[ServingRun], engine: str) -> None:
    """Refuses runs of several engines, of which no host is that of all; those that name none are the engine's."""
    known = {server_of(run) or engine.partition("-")[0]: run.file for run in runs}
    if len(known) > 1:
        found = " and ".join(f"{file} is a run of {server}" for server, file in known.items())
        raise InputError(f"{found} (where a result names none, that of --engine): fit each engine alone")


def _point(run: ServingRun, given: dict[str, Any], machine: Hardware, software: Engine) -> ServingPoint:
    """A run as the model sees it."""
    asked = options_of(run, given)
    plan = Plan(tp=asked["tp"] or 1, pp=asked["pp"] or 1, dp=asked["dp"] or 1)
    if asked["plan"] is not None:
        plan = Plan.parse(asked["plan"])
        clash = next((name for name in DEGREES if given[name] not in (None, getattr(plan, name))), None)
        if clash is not None:
            raise InputError(f"--{clash} {given[clash]} contradicts --plan {plan.label}")
        if plan != Plan(plan.tp, plan.pp, plan.dp):
            raise InputError(
                f"--plan {plan.label}: a host is fitted to plans of TP, PP and DP with attention over heads"
            )
    return ServingPoint(
        asked["model"], machine.name, software.name, asked["isl"], asked["osl"], asked["concurrency"],
        plan.tp, plan.pp, plan.dp, asked["weights"], asked["kv_cache"], ttft_ms=run.ttft_ms, tpot_ms=run.tpot_ms,
        version=run.version or "", case=where(run).replace(run.file, Path(run.file).name),
    )  # fmt: skip


class _File(NamedTuple):
    """A file to write: what it changes of what."""

    option: str
    target: str | None
    start: tuple[Path, bool]
    """The file that it starts from, and whether that is a shipped one."""
    spec: Hardware | Engine
    keys: dict[str, Any]

    def base(self) -> str:
        """What the file extends: a shipped one by its name, any other by the way to it from where this one will lie.

        Raises:
            InputError: it would extend itself.
        """
        assert self.target is not None
        target, (path, shipped) = Path(self.target).resolve(), self.start
        if not shipped:
            return os.path.relpath(path.resolve(), target.parent)
        if target.stem == path.stem:
            raise InputError(
                f"{self.option} {self.target}: {path.stem} is what it extends, and found under that name it would "
                "extend itself; choose another name"
            )
        return path.stem

    def text(self, name: str, against: str) -> str:
        """The file, validated as it will be when it is used."""
        assert self.target is not None
        validated(type(self.spec), merge(plain(self.spec), {"name": name, **self.keys}), self.target)
        return report.file_text(self.base(), name, self.keys, against)


def _written(files: Sequence[_File], name: str | None, against: str) -> list[tuple[str, str]]:
    """(target, text) of the files that are asked for."""
    return [
        (file.target, file.text(name or Path(file.target).stem, against)) for file in files if file.target is not None
    ]


def _sentences(files: Sequence[_File]) -> list[str]:
    """What was written and how it is used, or how to write it."""
    found, use = [], []
    for file, option in zip(files, ("--hardware", "--engine"), strict=True):
        if file.target is not None:
            use.append((file.target, f"{option} {file.target}"))
        elif file.keys:
            found.append(f"Nothing written of these {option[2:]} constants: {file.option} FILE.yaml does.")
    if use:
        targets, options = (list(texts) for texts in zip(*use, strict=True))
        together = "them together" if len(use) > 1 else "it"
        found.insert(0, f"Wrote {' and '.join(targets)}; use {together} with {' '.join(options)}.")
    return found
