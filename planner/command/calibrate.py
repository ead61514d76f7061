"""`plan calibrate`: fits the constants of a user's own cluster to what was measured on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from planner.command import options as opt
from planner.command.served import DEGREES, doubt, options_of
from planner.errors import InputError
from planner.evidence import fabric
from planner.evidence.calibration import calibrated_hardware, calibrated_host
from planner.evidence.serving import ServingPoint
from planner.plans.plan import Plan
from planner.report import calibration as report
from planner.report import tabular
from planner.specs.benchmarks import ServingRun, kind_of, read_collectives, read_gemm, read_serving, where
from planner.specs.catalog import load_machine, merge, plain
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
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
    opt.check_targets(csv, json)
    sorted_files = _by_kind(files or [], {"nccl": nccl or [], "gemm": gemm or [], "serving": serving or []})
    _check_outputs(output, engine_output, force, sorted_files)
    machine, software = load_machine(hardware, engine)
    runs = [run for file in sorted_files["nccl"] for run in read_collectives(file)]
    products = [row for file in sorted_files["gemm"] for row in read_gemm(file)]
    served = [run for file in sorted_files["serving"] for run in read_serving(file)]
    doubts = [fabric.doubt(machine, run) for run in runs] + [doubt(run, software.name) for run in served]
    for text in dict.fromkeys(text for text in doubts if text is not None):
        opt.warn(text, quiet)
    given = {
        "model": model, "plan": plan, "tp": tp, "pp": pp, "dp": dp,
        "weights": weights, "kv_cache": kv_cache, "isl": isl, "osl": osl, "concurrency": concurrency,
    }  # fmt: skip
    points = [_point(run, given, machine, software) for run in served]
    fitted, fits, keys = calibrated_hardware(machine, software, runs, products)
    engine_keys: dict[str, Any] = {}
    if points:
        found, engine_keys = calibrated_host(machine, fitted, software, points)
        fits += found
    new = (
        _File("--output", output, hardware, machine, keys),
        _File("--engine-output", engine_output, engine, software, engine_keys),
    )
    texts = _written(new, name, f"{machine.name} under {software.name} {software.version}")
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
    if output is not None and engine_output is not None and Path(output).resolve() == Path(engine_output).resolve():
        raise InputError(f"--output and --engine-output are the same file, {output}; give each its own")


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
    given: str | None
    """What it starts from, as the command line names it; none = the hardware file's engine."""
    spec: Hardware | Engine
    keys: dict[str, Any]

    def base(self) -> str:
        """What the file extends: a name, or the way to a file from where this one will lie.

        Raises:
            InputError: it would extend itself.
        """
        assert self.target is not None
        if self.given is None or not Path(self.given).is_file():
            return self.spec.name
        if Path(self.given).resolve() == Path(self.target).resolve():
            raise InputError(f"{self.option} {self.target}: is the file to start from; choose another name")
        return os.path.relpath(Path(self.given).resolve(), Path(self.target).resolve().parent)

    def text(self, name: str, against: str) -> str:
        """The file, validated as it will be when it is used."""
        assert self.target is not None
        validated(type(self.spec), merge(plain(self.spec), self.keys), self.target)
        return report.file_text(self.base(), name, self.keys, against)


def _written(files: Sequence[_File], name: str | None, against: str) -> list[tuple[str, str]]:
    """(target, text) of the files that are asked for."""
    return [
        (file.target, file.text(name or Path(file.target).stem, against)) for file in files if file.target is not None
    ]


def _sentences(files: Sequence[_File]) -> list[str]:
    """What was written and how it is used, or how to write it."""
    found = []
    for file, use in zip(files, ("--hardware", "--engine"), strict=True):
        if file.target is not None:
            found.append(f"Wrote {file.target}; use it with {use} {file.target}.")
        elif file.keys:
            found.append(f"Nothing written of these {use[2:]} constants: {file.option} FILE.yaml does.")
    return found
