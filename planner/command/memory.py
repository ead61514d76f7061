"""`plan memory`: what each chip holds, and what still fits. No times: every kind of model has a memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated

import typer

from planner.command import options as opt
from planner.costs.memory import Budget
from planner.errors import NoPlanError
from planner.plans.plan import Plan
from planner.report import memory as report
from planner.report import tabular
from planner.specs.catalog import load_machine, load_model
from planner.startup import Start
from planner.units import parse_bytes

Context = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Tokens of a request, prompt and answer; default: the model's longest."),
]
Held = Annotated[int, typer.Option("--concurrency", min=1, help="Requests of that length on a replica at once.")]

AttentionDp = Annotated[
    int, typer.Option("--attention-dp", min=1, help="Groups of data-parallel attention inside the ranks of --tp.")
]
Draft = Annotated[bool, typer.Option("--draft", help="Load the model's own prediction layers (MTP) too.")]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(run)


def run(
    model: opt.Model,
    hardware: opt.Hardware = "h100",
    engine: opt.Engine = None,
    tp: opt.Tp = None,
    pp: opt.Pp = None,
    ep: opt.Ep = None,
    cp: opt.Cp = None,
    attention: opt.Attention = None,
    context: Context = None,
    concurrency: Held = 1,
    attention_dp: AttentionDp = 1,
    draft: Draft = False,
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
    """What each chip of a replica holds, what one more request or a longer one adds, and how much fits.

    Several degrees (--tp 1,2,4,8) give a line for each.
    """
    opt.check_targets(csv, json, specs=(model, hardware, engine))
    shape = load_model(model)
    machine, software = load_machine(hardware, engine)
    software = software.limited(max_num_seqs, max_num_batched_tokens)
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    budget = Budget.of(machine, software, limit, memory_fraction)
    starts = [
        Start.of(
            shape, software, plan, budget,
            weights=weights, kv_cache=kv_cache, context=context, draft=draft, attention_dp=attention_dp,
            hardware=machine,
        )
        for plan in _plans(tp, pp, ep, cp, attention or "heads")
    ]  # fmt: skip
    found = [report.row(start, machine, concurrency) for start in starts]
    tabular.write_rows(found, csv, json, not no_header)
    if not opt.is_piped(csv, json) and not quiet:
        if len(found) == 1:
            report.print_one(starts[0], found[0])
        else:
            report.print_several(found)
    if all(row["error"] for row in found):
        raise NoPlanError(f"{shape.name} does not start on {machine.name}: {found[0]['error']}")


def _plans(tp: str | None, pp: str | None, ep: str | None, cp: str | None, attention: str) -> Iterator[Plan]:
    """One replica of each combination of degrees, prompts processed as the word for the cache implies."""
    named = {"--tp": tp, "--pp": pp, "--ep": ep, "--cp": cp}
    for degrees in product(*(opt.numbers(text, name) or (1,) for name, text in named.items())):
        plan = Plan(degrees[0], degrees[1], 1, degrees[2], degrees[3], attention)
        yield plan._replace(prefill_attention=plan.implied)
