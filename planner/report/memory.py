"""`plan memory`: what a chip holds as a table and bars, and what still fits."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from planner.report.figures import plural, short
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.specs.hardware import Hardware
from planner.startup import Start
from planner.units import GIB

BAR = 40
STAGES = ("first", "middle", "last")


def row(start: Start, hardware: Hardware, concurrency: int) -> dict[str, Any]:
    """One plan as CSV and JSON have it; GiB are those of the chip with least room for KV."""
    stage, space = start.fullest, start.room
    tables, runtime = float(space.tables[stage]), float(space.runtime)
    held = start.request_bytes[stage] * -(-concurrency // int(space.holders))
    refusal = start.refusal()
    if refusal is None and concurrency > start.requests:
        refusal = f"{concurrency} requests of {start.context} tokens asked, {start.requests} fit"
    return {
        "plan": start.plan.label,
        "model": start.model.name,
        "hardware": hardware.name,
        "engine": start.engine.name,
        "engine_version": start.engine.version,
        "weights": start.formats.weights.name,
        "kv_cache": start.formats.kv.name,
        "stage": STAGES[stage] if start.plan.pp > 1 else "only",
        "attention_dp": start.attention_dp,
        "context": start.context,
        "concurrency": concurrency,
        "weights_gib": (float(space.weights[stage]) - tables) / GIB,
        "tables_gib": tables / GIB,
        "activations_gib": (float(space.other[stage]) - runtime) / GIB,
        "runtime_gib": runtime / GIB,
        "kv_gib": held / GIB,
        "free_gib": (start.budget.limit - float(space.weights[stage] + space.other[stage]) - held) / GIB,
        "budget_gib": start.budget.limit / GIB,
        "outside_gib": float(space.outside) / GIB,
        "chip_gib": start.budget.chip / GIB,
        "kv_bytes_per_token": float(space.kv_token[stage]),
        "kv_request_gib": start.request_bytes[stage] / GIB,
        "kv_request_least_gib": start.least_request_bytes / GIB,
        "kv_blocks": start.blocks,
        "block_tokens": start.engine.scheduler.block_tokens,
        "kv_capacity_tokens": start.capacity_tokens,
        "max_concurrency": start.requests,
        "max_context": start.longest(),
        "error": refusal,
    }


_PARTS = (
    ("weights_gib", "weights"),
    ("tables_gib", "tables beside weights"),
    ("activations_gib", "activations"),
    ("runtime_gib", "runtime"),
    ("kv_gib", "KV"),
    ("free_gib", "free for more KV"),
)


def print_one(start: Start, found: dict[str, Any]) -> None:
    """The breakdown of one plan."""
    chip, stage = found["chip_gib"], found["stage"]
    attention = f", attention DP{found['attention_dp']}" if found["attention_dp"] > 1 and start.said_apart else ""
    where = "" if stage == "only" else f" of the {stage} stage"
    title = (
        f"{found['model']} {found['plan']}{attention} on {found['hardware']}, "
        f"{found['engine']} {found['engine_version']}, {found['weights']} weights, "
        f"{found['kv_cache']} KV: GiB per chip{where}"
    )
    show(paragraphs([title]))
    print()
    rows = [{"what": what, "gib": found[name]} for name, what in _PARTS if found[name] >= 0.0005]
    if found["free_gib"] < 0:
        rows.append({"what": "missing", "gib": -found["free_gib"]})
    rows.append({"what": "outside the budget", "gib": found["outside_gib"]})
    unused = chip - found["budget_gib"] - found["outside_gib"]
    rows.append({"what": "not used", "gib": unused})
    columns = [
        Column("part", lambda part: str(part["what"]), right=False),
        Column("GiB", lambda part: f"{part['gib']:.2f}"),
        Column("share of the chip", lambda part: _bar(part["gib"], chip), right=False, keep=1),
    ]
    show(lay_out(columns, rows, width()), ["bold underline"])
    print()
    for sentence in _sentences(start, found):
        print(textwrap.fill(sentence, width(), break_on_hyphens=False))


def _bar(gib: float, chip: float) -> str:
    return f"{'#' * max(0, round(gib / chip * BAR)):<{BAR}} {gib / chip:6.1%}"


def _sentences(start: Start, found: dict[str, Any]) -> list[str]:
    context, concurrency = found["context"], found["concurrency"]
    lines = []
    if found["error"]:
        lines.append(f"It does not start: {found['error']}.")
        if start.refusal() and not found["max_context"]:
            return lines
    lines.append(
        f"KV: {found['kv_bytes_per_token']:,.0f} B a token and chip, {found['kv_blocks']:,} blocks of "
        f"{plural(found['block_tokens'], 'token')}; a replica holds {found['kv_capacity_tokens']:,} tokens."
    )
    if found["kv_request_gib"] > found["kv_request_least_gib"] * 1.0001:
        lines.append(
            f"A request of {context} tokens takes {found['kv_request_gib']:.3f} GiB a chip as the engine allocates it; "
            f"with windows alone and no padding it would be {found['kv_request_least_gib']:.3f} GiB."
        )
    lines.append(
        f"At {context} tokens {plural(found['max_concurrency'], 'request')} fit (memory alone: "
        f"{short(start.concurrency)}); the longest context of one request is {found['max_context']} tokens."
    )
    double = found["kv_gib"]
    stage = start.fullest
    longer = start._replace(context=2 * context)
    more = (longer.request_bytes[stage] - start.request_bytes[stage]) / GIB * -(-concurrency // int(start.room.holders))
    if 2 * context <= start.model.max_context:
        lines.append(
            f"Doubling the context adds {more:.2f} GiB a chip and leaves {plural(longer.requests, 'request')}; "
            f"doubling the concurrency adds {double:.2f} GiB."
        )
    else:
        lines.append(
            f"Doubling the concurrency adds {double:.2f} GiB a chip; the context cannot double, the model has "
            f"{start.model.max_context} tokens."
        )
    return lines


def print_several(rows: Sequence[dict[str, Any]]) -> None:
    """Several plans, one a line."""
    columns = [
        Column("plan", lambda found: str(found["plan"]), right=False),
        Column("weights", lambda found: f"{found['weights_gib'] + found['tables_gib']:.2f}"),
        Column("act. + runtime", lambda found: f"{found['activations_gib'] + found['runtime_gib']:.2f}", keep=2),
        Column("KV", lambda found: f"{found['kv_gib']:.2f}"),
        Column("free", lambda found: f"{found['free_gib']:.2f}"),
        Column("KV tokens", lambda found: short(found["kv_capacity_tokens"]), keep=3),
        Column("requests", lambda found: str(found["max_concurrency"])),
        Column("max context", lambda found: str(found["max_context"]), keep=4),
        Column("starts", lambda found: "no" if found["error"] else "yes", right=False),
    ]
    print("GiB per chip with least room for KV")
    show(lay_out(columns, rows, width()), ["bold underline"])
    for found in rows:
        if found["error"]:
            show(paragraphs([f"{found['plan']} does not start: {found['error']}."]))
