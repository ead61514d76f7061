"""`plan launch`: the lines that start a plan, for the engine's own command."""

from __future__ import annotations

from typing import Annotated

import typer

from planner.command import diffusion
from planner.command import options as opt
from planner.errors import InputError
from planner.launching import deployment
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.sharding import KNOWN
from planner.report import launch as report
from planner.report import tabular
from planner.request import Limits
from planner.specs.catalog import load_machine, load_model
from planner.specs.drafts import speculation_of
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.workload import Workload
from planner.units import parse_bytes

PlanLabel = Annotated[str | None, typer.Option("--plan", metavar="TP8xPP2", help="The plan as `plan` prints it.")]
Requests = Annotated[
    int, typer.Option("--concurrency", min=1, help="Requests in flight in the whole deployment, where slots are fixed.")
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="ID|PATH", help="What to load; default: the model's first id.")
]
Hosts = Annotated[str | None, typer.Option("--hosts", metavar="ADDRESS,...", help="Addresses of the nodes, in order.")]
Port = Annotated[
    int | None, typer.Option("--port", help="First port; each server takes the next. Default: the engine's.")
]
Output = Annotated[
    str | None, typer.Option("--output", metavar="DIR", help="Write a script for each process, and files, there.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files in --output that are there already.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    context: typer.Context,
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    gpus: opt.SomeGpus = None,
    plan: PlanLabel = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    dp: opt.Dp = None,
    attention: opt.Attention = None,
    isl: opt.Isl = 1024,
    osl: opt.Osl = 256,
    concurrency: Requests = 1,
    weights: opt.Weights = None,
    kv_cache: opt.KvCache = None,
    max_context: opt.MaxContext = None,
    max_num_seqs: opt.MaxNumSeqs = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    spec_tokens: opt.SpecTokens = None,
    draft: opt.Draft = None,
    memory_limit: opt.MemoryLimit = None,
    memory_fraction: opt.MemoryFraction = None,
    slice_: opt.Slice = None,
    image: opt.Image = None,
    frames: opt.Frames = None,
    steps: opt.Steps = None,
    warmup: opt.Warmup = None,
    checkpoint: Checkpoint = None,
    hosts: Hosts = None,
    port: Port = None,
    output: Output = None,
    force: Force = False,
    csv: opt.Csv = None,
    json: opt.Json = None,
    no_header: opt.NoHeader = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """The lines that start a plan: one a server and node, with its chips and limits.

    What is printed is a shell script. Flags are those of the engine's documentation (`plan show vllm`).
    """
    opt.check_targets(csv, json, specs=(model, hardware, engine))
    if diffusion.is_asked(context):
        return diffusion.launch(context)
    if force and output is None:
        raise InputError("--force replaces files of --output DIR; give that too")
    chosen = _plan(plan, {"tp": tp, "pp": pp, "dp": dp}, attention)
    shape = load_model(model)
    machine, software = load_machine(hardware, engine)
    software = software.limited(max_num_seqs, max_num_batched_tokens)
    if weights is not None:
        weight_dtype(weights)
    if kv_cache is not None:
        kv_dtype(kv_cache)
    limits = Limits(
        memory=None if memory_limit is None else parse_bytes(memory_limit),
        memory_fraction=opt.above_zero(memory_fraction, "--memory-fraction"),
    )
    found = deployment(
        shape,
        Placement.of(machine, gpus or chosen.chips, slice_),
        software,
        chosen,
        Workload(
            isl,
            osl,
            concurrency,
            "continuous",
            weights,
            kv_cache,
            max_context,
            speculation=speculation_of(spec_tokens, None, draft, shape, priced=False),
        ),
        limits=limits,
        asked=model,
        checkpoint=checkpoint,
        hosts=_addresses(hosts),
        port=port,
    )
    if output is not None:
        tabular.write_folder(output, report.scripts(found), force)
    rows = report.rows(found)
    tabular.write([(csv, lambda: report.rows_csv(rows, not no_header)), (json, lambda: report.rows_json(rows))])
    if not opt.is_piped(csv, json) and not quiet:
        report.print_deployment(found)


def _plan(label: str | None, degrees: dict[str, str | None], attention: str | None) -> Plan:
    """The plan of a label or of degrees, which must not contradict each other."""
    given = {name: opt.numbers(text, f"--{name}") for name, text in degrees.items()}
    for name, values in given.items():
        if len(values) > 1:
            raise InputError(f"--{name} {degrees[name]}: `plan launch` starts one plan")
    wanted = {name: values[0] for name, values in given.items() if values}
    plan = Plan(wanted.get("tp", 1), wanted.get("pp", 1), wanted.get("dp", 1)) if label is None else Plan.parse(label)
    for name, degree in wanted.items():
        if getattr(plan, name) != degree:
            raise InputError(f"--{name} {degree} contradicts --plan {label}")
    if attention is None:
        return plan
    if opt.choice(attention, "--attention", KNOWN) != plan.attention and label is not None:
        raise InputError(f"--attention {attention} contradicts --plan {label}; write /{attention} behind its degrees")
    return plan._replace(attention=attention)


def _addresses(hosts: str | None) -> tuple[str, ...]:
    if hosts is None:
        return ()
    names = tuple(name.strip() for name in hosts.split(","))
    if not all(names) or any(" " in name for name in names):
        raise InputError(f"--hosts {hosts!r}: expected addresses joined by commas, as 10.0.0.1,10.0.0.2")
    return names
