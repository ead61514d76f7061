"""`plan disaggregate`: a line for each pair of pools, the best plan with both phases together among them, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.phases.colocated import Colocated
from planner.phases.disaggregation import Deployment, Search
from planner.report.figures import plural, prompt, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.units import GIB, HOUR, MS

COLUMNS = (
    "rank", "kind", "plan", "model", "prefill_hardware", "decode_hardware", "prefill_plan", "decode_plan", "affinity",
    "prefill_gpus", "decode_gpus", "gpus", "idle_gpus", "isl", "osl", "requests_per_s", "highest_requests_per_s",
    "requests_per_s_per_gpu", "tokens_per_s", "usd_per_mtok", "ttft_ms", "queue_ms", "tpot_ms", "latency_ms",
    "decode_step_ms", "stall_ms", "kv_gib", "transfer_ms", "visible_transfer_ms", "decode_batch", "decode_batch_most",
    "prefill_utilisation", "wires_utilisation", "binds", "prefill_memory_gib", "decode_memory_gib",
    "prefill_memory_limit_gib", "decode_memory_limit_gib", "nodes_per_unit",
)  # fmt: skip
TOGETHER = "colocated"


def rows(search: Search, colocated: Sequence[Colocated], top: int) -> list[Row]:
    """Rows in order: pairs of pools and, among them, plans with both phases together; `top` of the pairs, 0 = all."""
    work = search.question.prefill.workload
    listed = search.deployments[:top] if top else search.deployments
    found = [_apart(search, each) for each in listed] + [_together(search, each) for each in colocated]
    for row in found:
        row["tokens_per_s"] = row["requests_per_s"] * work.osl
        row["requests_per_s_per_gpu"] = row["requests_per_s"] / row["gpus"]
    if search.question.bounded:
        found.sort(key=_per_dollar if search.question.mixed else _per_chip)
    for place, row in enumerate(found):
        row["rank"] = place + 1
    return [{name: row[name] for name in COLUMNS} for row in found]


def _per_chip(row: Row) -> float:
    return -float(row["requests_per_s_per_gpu"])


def _per_dollar(row: Row) -> float:
    return _per_chip(row) if row["usd_per_mtok"] is None else float(row["usd_per_mtok"])


def _row(search: Search) -> Row:
    work = search.question.prefill.workload
    model = search.question.prefill.model.name
    return dict.fromkeys(COLUMNS) | {"model": model, "isl": round(work.isl), "osl": round(work.osl)}


def _apart(search: Search, each: Deployment) -> Row:
    work = search.question.prefill.workload
    cost = each.dollars / HOUR / (each.rate * work.osl) * 1e6
    return _row(search) | {
        "kind": "disaggregated",
        "plan": each.label,
        "prefill_hardware": each.prefill_hardware,
        "decode_hardware": each.decode_hardware,
        "prefill_plan": each.prefill.label,
        "decode_plan": each.decode.label,
        "affinity": each.affinity,
        "prefill_gpus": each.prefill_chips,
        "decode_gpus": each.decode_chips,
        "gpus": each.gpus,
        "idle_gpus": each.gpus - each.used,
        "requests_per_s": each.rate,
        "highest_requests_per_s": each.highest,
        "usd_per_mtok": cost if np.isfinite(cost) else None,
        "ttft_ms": each.ttft / MS,
        "queue_ms": each.queue / MS,
        "tpot_ms": each.tpot / MS,
        "latency_ms": each.latency / MS,
        "decode_step_ms": each.step / MS,
        "stall_ms": (each.tpot - each.step) / MS,
        "kv_gib": each.kv_bytes / GIB,
        "transfer_ms": each.transfer / MS,
        "visible_transfer_ms": each.visible / MS,
        "decode_batch": each.batch,
        "decode_batch_most": each.most,
        "prefill_utilisation": each.prefill_busy,
        "wires_utilisation": each.wires_busy,
        "binds": each.binds,
        "prefill_memory_gib": each.prefill_memory / GIB,
        "decode_memory_gib": each.decode_memory / GIB,
        "prefill_memory_limit_gib": each.prefill_limit / GIB,
        "decode_memory_limit_gib": each.decode_limit / GIB,
        "nodes_per_unit": each.nodes or None,
    }


def _together(search: Search, each: Colocated) -> Row:
    cost = each.dollars / HOUR / (each.rate * search.question.prefill.workload.osl) * 1e6
    return _row(search) | {
        "kind": TOGETHER,
        "plan": each.plan.label,
        "prefill_hardware": each.hardware,
        "decode_hardware": each.hardware,
        "prefill_plan": each.plan.label,
        "decode_plan": each.plan.label,
        "gpus": each.gpus,
        "idle_gpus": each.gpus - each.plan.chips,
        "requests_per_s": each.rate,
        "highest_requests_per_s": each.highest,
        "usd_per_mtok": cost if np.isfinite(cost) else None,
        "ttft_ms": each.ttft / MS,
        "queue_ms": each.queue / MS,
        "tpot_ms": each.tpot / MS,
        "latency_ms": each.latency / MS,
        "decode_step_ms": each.step / MS,
        "stall_ms": each.stall / MS,
        "decode_batch": each.batch,
        "decode_batch_most": each.most,
        "prefill_utilisation": each.busy,
        "binds": binding(search, each),
        "decode_memory_gib": each.memory / GIB,
        "decode_memory_limit_gib": each.limit / GIB,
    }


def binding(search: Search, each: Colocated) -> str:
    """What a plan with both phases together cannot go beyond: ttft, tpot or memory."""
    limits = search.question.prefill.limits
    shares = {"ttft": each.ttft / (limits.ttft or np.inf), "tpot": each.tpot / (limits.tpot or np.inf)}
    shares["memory"] = each.batch / each.most
    return max(shares, key=lambda name: shares[name])


def print_disaggregation(search: Search, colocated: Sequence[Colocated], table: Sequence[Row]) -> None:
    """The table, and what it says."""
    mixed, rated = search.question.mixed, search.question.rate is not None

    def plans(row: Row) -> str:
        where = f" on {row['prefill_hardware']}" if mixed else ""
        return f"{row['plan']}, together{where}" if row["kind"] == TOGETHER else str(row["plan"])

    columns = [
        Column("#", lambda row: str(row["rank"])),
        Column("prefill -> decode", plans, right=False),
        Column("chips", _chips, right=False, keep=8),
        Column("req/s", lambda row: short(row["requests_per_s"]), keep=7) if not rated else None,
        Column("of most", lambda row: f"{row['requests_per_s'] / row['highest_requests_per_s']:.0%}", keep=3)
        if rated
        else None,
        Column("/chip", lambda row: short(row["requests_per_s_per_gpu"])) if not mixed else None,
        Column("$/Mtok", lambda row: short(row["usd_per_mtok"], 3), keep=9 if mixed else 2)
        if any(row["usd_per_mtok"] is not None for row in table)
        else None,
        Column("TTFT ms", lambda row: short(row["ttft_ms"]), keep=7),
        Column("TPOT ms", lambda row: short(row["tpot_ms"]), keep=7),
        Column("KV ms", _sent, keep=5),
        Column("batch", lambda row: short(row["decode_batch"], 3), keep=4),
        Column("busy", lambda row: f"{row['prefill_utilisation']:.0%}", keep=3),
        Column("binds", lambda row: row["binds"], right=False, keep=6),
    ]
    lines = lay_out([column for column in columns if column is not None], table, width())
    show(lines, ["bold underline", *("green" if row["kind"] == TOGETHER else "" for row in table)])
    show(paragraphs(_caption(search, colocated, table)))


def _chips(row: Row) -> str:
    return str(row["gpus"]) if row["kind"] == TOGETHER else f"{row['prefill_gpus']}+{row['decode_gpus']}"


def _sent(row: Row) -> str:
    if row["transfer_ms"] is None:
        return "-"
    return f"{short(row['visible_transfer_ms'], 2)} of {short(row['transfer_ms'], 3)}"


def _caption(search: Search, colocated: Sequence[Colocated], table: Sequence[Row]) -> list[str]:
    question = search.question
    request, limits = question.prefill, question.prefill.limits
    machines = request.hardware.name
    if question.mixed:
        machines = f"{request.hardware.name} for prefill and {question.decode.hardware.name} for decode"
    asked = [f"{request.model.name} on {machines}, engine {request.engine.name}; {prompt(request.workload)}"]
    if question.rate is not None:
        asked.append(f"{short(question.rate)} requests/s")
    else:
        pools = question.pools
        asked.append(f"{pools[0]} + {pools[1]} chips" if pools else f"up to {plural(question.chips, 'chip')}")
    if question.bounded:
        asked.append(f"mean TTFT <= {short((limits.ttft or 0) / MS)} ms, TPOT <= {short((limits.tpot or 0) / MS)} ms")
    texts = ["; ".join(asked) + f". {search.pairs} pairs of plans priced, {len(search.deployments)} can serve."]
    texts.append(_why(search, colocated))
    first = next((row for row in table if row["kind"] != TOGETHER), None)
    if first is not None:
        texts.append(_transfer(search, first))
    if not question.bounded:
        texts.append(
            "Without limits: pairs that no other beats in both TPOT and rate per chip; prefill replicas work at most "
            "80 % of their time."
        )
    texts.append(
        "Means, as queues in steady state have them; the KV's wait for wires that other prompts use is not in them."
    )
    return [text for text in texts if text]


def _transfer(search: Search, row: Row) -> str:
    way = "inside nodes" if row["affinity"] == "low" else "over the wires that span both pools"
    when = "layer by layer" if search.question.overlapped else "when the prompt is done"
    return (
        f"KV of a prompt: {short(row['kv_gib'], 3)} GiB, sent {when} {way} in {short(row['transfer_ms'], 3)} ms, "
        f"of which {short(row['visible_transfer_ms'], 2)} ms show (in TPOT, before the second token)."
    )


def _why(search: Search, colocated: Sequence[Colocated]) -> str:
    """One sentence: how pools do against the best plan with both phases together, and what holds that back."""
    question = search.question
    if not question.bounded or not search.deployments:
        return ""
    best = search.deployments[0]
    if not colocated:
        return "No plan with both phases on the same chips keeps these limits at any load."
    other = colocated[0]
    ratio = (best.rate / best.gpus) / (other.rate / other.gpus)
    unit = "chip"
    if question.mixed and np.isfinite(best.dollars) and np.isfinite(other.dollars):
        ratio, unit = (best.rate / best.dollars) / (other.rate / other.dollars), "$"
    on = f" on {other.hardware}" if question.mixed else ""
    against = f"{short(ratio, 3)} times the rate per {unit} of {other.plan.label}{on}, both phases together"
    held = _held_back(search, other)
    if ratio > 1:
        return f"Apart: {against}, {held}."
    gain = _held_back_apart(best)
    return f"Together is better: apart {best.label} has {against}. {gain}"


def _held_back(search: Search, other: Colocated) -> str:
    what = binding(search, other)
    share = other.stall / other.tpot
    if what == "tpot":
        return (
            f"whose {short(other.tpot / MS)} ms a token are {short(other.step / MS)} ms of decoding and "
            f"{short(other.stall / MS)} ms ({share:.0%}) of waiting for other prompts"
        )
    if what == "ttft":
        return (
            f"whose prompts take {short((other.ttft - other.queue) / MS)} ms beside the decodes of "
            f"{short(other.batch, 3)} requests and wait {short(other.queue / MS)} ms"
        )
    return f"whose KV room ends at {short(other.batch, 3)} requests a replica"


def _held_back_apart(best: Deployment) -> str:
    idle = best.gpus - best.used
    spare = {"prefill": "decode", "decode": "prefill"}.get(best.binds, "")
    texts = {
        "prefill": f"Its prefill replicas are {best.prefill_busy:.0%} busy and can take no more, while its decode "
        f"replicas run {short(best.batch, 3)} of {short(best.most)} requests",
        "decode": f"Its decode replicas stand at the limit with {short(best.batch, 3)} requests each, while its "
        f"prefill replicas are {best.prefill_busy:.0%} busy",
        "wires": f"The wires between its pools are busy {best.wires_busy:.0%} of the time",
    }
    rest = f"; {plural(idle, 'chip')} idle" if idle else ""
    why = ": chips cannot be shared out more finely" if spare and best.gpus <= 16 else ""
    return texts[best.binds] + rest + why + "."


def reachable(search: Search) -> str:
    """What is the best that can be reached, where no pair keeps the limits."""
    limits, best = search.question.prefill.limits, []
    for name, value in (("ttft", search.best_ttft), ("tpot", search.best_tpot)):
        limit = getattr(limits, name)
        if np.isfinite(value) and limit is not None and value > limit:
            alone = f"the {short(value / MS)} ms that the fastest plan takes alone"
            best.append(f"--max-{name} {short(limit / MS)} is below {alone}")
    return "; ".join(best)
