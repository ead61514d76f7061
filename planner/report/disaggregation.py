"""`plan disaggregate`: a line for each pair of pools, the best plan with both phases together among them, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner.phases.disaggregated.colocated import Colocated
from planner.phases.disaggregated.disaggregation import Deployment, Search
from planner.phases.disaggregated.rehearsal import Fared
from planner.phases.disaggregated.standing import standing
from planner.ranking import error_bar
from planner.report.figures import plural, prompt, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.units import GIB, HOUR, MS

COLUMNS = (
    "rank", "kind", "plan", "model", "prefill_hardware", "decode_hardware", "prefill_plan", "decode_plan", "affinity",
    "prefill_gpus", "decode_gpus", "gpus", "idle_gpus", "isl", "osl", "requests_per_s", "highest_requests_per_s",
    "requests_per_s_per_gpu", "tokens_per_s", "usd_per_mtok", "ttft_ms", "queue_ms", "tpot_ms", "latency_ms",
    "decode_step_ms", "stall_ms", "kv_gib", "transfer_ms", "visible_transfer_ms", "decode_batch", "decode_batch_most",
    "prefill_utilisation", "wires_utilisation", "binds", "prefill_memory_gib", "decode_memory_gib",
    "prefill_memory_limit_gib", "decode_memory_limit_gib", "nodes_per_unit", "simulated_requests_per_s",
    "simulated_requests_per_s_per_gpu", "attained", "ttft_p90_ms", "tpot_p90_ms", "tie",
    "extrapolates", "assumed",
)  # fmt: skip
TOGETHER = "colocated"
EQUAL = 5e-4
"""Relative difference of two rates that three digits do not show."""
Each = Deployment | Colocated


def rows(
    search: Search, colocated: Sequence[Colocated], top: int, fared: Mapping[Each, Fared] | None = None
) -> list[Row]:
    """Rows in order: pairs of pools and, among them, plans with both phases together.

    Args:
        search: the pairs.
        colocated: plans with both phases together.
        top: pairs that are shown; 0 = all.
        fared: how simulated requests fared, where they were; those pairs alone are shown then.
    """
    work = search.question.prefill.workload
    listed = search.deployments[:top] if top else search.deployments
    every: list[Each] = [*listed, *colocated]
    if fared:
        every = [each for each in search.deployments if each in fared]
        every += [each for each in colocated if each in fared]
    found = []
    for each in every:
        row = _apart(search, each) if isinstance(each, Deployment) else _together(search, each)
        row["tokens_per_s"] = row["requests_per_s"] * work.osl
        row["requests_per_s_per_gpu"] = row["requests_per_s"] / row["gpus"]
        row["extrapolates"], row["assumed"] = standing(search.question, each)
        if fared and each in fared:
            row |= _simulated(row, fared[each])
        found.append(row)
    if search.question.bounded:
        found.sort(key=_per_dollar if search.question.mixed else _per_chip)
        for above, row in pairwise(found):
            measure = _per_dollar if search.question.mixed else _per_chip
            row["tie"] = abs(measure(row) - measure(above)) <= abs(measure(above)) * error_bar(search.question.prefill)
    for place, row in enumerate(found):
        row["rank"] = place + 1
    return [{name: row[name] for name in COLUMNS} for row in found]


def _simulated(row: Row, fared: Fared) -> Row:
    return {
        "simulated_requests_per_s": fared.rate,
        "simulated_requests_per_s_per_gpu": fared.rate / row["gpus"],
        "attained": fared.attained,
        "ttft_p90_ms": fared.ttft_p90 / MS,
        "tpot_p90_ms": fared.tpot_p90 / MS,
    }


def _served(row: Row) -> float:
    """Requests per second: simulated ones where there are any."""
    simulated = row["simulated_requests_per_s"]
    return float(row["requests_per_s"] if simulated is None else simulated)


def _per_chip(row: Row) -> float:
    return -_served(row) / int(row["gpus"])


def _per_dollar(row: Row) -> float:
    if row["usd_per_mtok"] is None or not _served(row):
        return _per_chip(row)
    return float(row["usd_per_mtok"]) * float(row["requests_per_s"]) / _served(row)


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

    simulated = any(row["attained"] is not None for row in table)
    dear = any(row["usd_per_mtok"] is not None for row in table)
    every = [
        (True, Column("#", lambda row: f"{'~' if row['tie'] else ''}{row['rank']}")),
        (True, Column("prefill -> decode", plans, right=False)),
        (True, Column("chips", _chips, right=False, keep=8)),
        (not rated, Column("req/s", lambda row: short(row["requests_per_s"]), keep=6 if simulated else 8)),
        (rated, Column("of most", lambda row: _share(row["requests_per_s"] / row["highest_requests_per_s"]), keep=3)),
        (simulated and not rated, Column("simulated", lambda row: short(row["simulated_requests_per_s"]), keep=8)),
        (not mixed, Column("/chip", lambda row: short(_served(row) / row["gpus"]))),
        (dear, Column("$/Mtok", lambda row: short(row["usd_per_mtok"], 3), keep=9 if mixed else 2)),
        (simulated, Column("kept", lambda row: _share(row["attained"]), keep=7)),
        (simulated, Column("TTFT p90", lambda row: short(row["ttft_p90_ms"]), keep=7)),
        (simulated, Column("TPOT p90", lambda row: short(row["tpot_p90_ms"]), keep=7)),
        (not simulated, Column("TTFT ms", lambda row: short(row["ttft_ms"]), keep=7)),
        (not simulated, Column("TPOT ms", lambda row: short(row["tpot_ms"]), keep=7)),
        (True, Column("KV ms", _sent, keep=5)),
        (True, Column("batch", lambda row: short(row["decode_batch"], 3), keep=4)),
        (True, Column("busy", lambda row: _share(row["prefill_utilisation"]), keep=3)),
        (True, Column("binds", lambda row: row["binds"], right=False, keep=6)),
    ]
    columns = [column for shown, column in every if shown]
    lines = lay_out(columns, table, width())
    show(lines, ["bold underline", *("green" if row["kind"] == TOGETHER else "" for row in table)])
    show(paragraphs(_caption(search, colocated, table)))


def _chips(row: Row) -> str:
    return str(row["gpus"]) if row["kind"] == TOGETHER else f"{row['prefill_gpus']}+{row['decode_gpus']}"


def _share(value: float) -> str:
    return f"{value:.0%}"


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
        what = "mean TTFT" if question.share is None else f"{question.share:.0%} of the requests with TTFT"
        asked.append(f"{what} <= {short((limits.ttft or 0) / MS)} ms, TPOT <= {short((limits.tpot or 0) / MS)} ms")
    texts = [
        f"{'; '.join(asked)}. {plural(search.pairs, 'pair')} of plans priced, {len(search.deployments)} can serve."
    ]
    texts.append(_why(search, colocated, table))
    first = next((row for row in table if row["kind"] != TOGETHER), None)
    if first is not None:
        texts.append(_transfer(search, first))
    if not question.bounded:
        texts.append(
            "Without limits: pairs that no other beats in both TPOT and rate per chip; prefill replicas work at most "
            "80 % of their time."
        )
    texts.append(_basis(search, table))
    if any(row["tie"] for row in table):
        texts[-1] += f" ~ = within {error_bar(request):.0%} of the row above: a tie."
    texts.append(_standing(table))
    return [text for text in texts if text]


def _standing(table: Sequence[Row]) -> str:
    """What of the rows lies beyond measurements, in how many of them, and what is assumed."""
    counts: dict[str, int] = {}
    for row in table:
        for word in (row["extrapolates"] or "").split(", "):
            counts[word] = counts.get(word, 0) + bool(word)
    words = [word if count == len(table) else f"{word} in {count}" for word, count in counts.items() if word]
    beyond = f"Beyond the measurements behind the engine: {', '.join(words)}. " if words else ""
    assumed = dict.fromkeys(word for row in table for word in (row["assumed"] or "").split(", ") if word)
    return f"{beyond}Assumed, not measured: {', '.join(assumed)}." if assumed else beyond.strip()


def _basis(search: Search, table: Sequence[Row]) -> str:
    if search.question.rate is not None and any(row["attained"] is not None for row in table):
        return (
            "kept: of simulated requests, those that keep both limits. Pools are sized by closed forms; plans with "
            "both phases together by means, with replicas added until enough of the requests keep the limits."
        )
    if any(row["attained"] is not None for row in table):
        return "Rates that count are simulated, request by request; the others are closed forms, which come first."
    return "Means, as queues in steady state have them; --attainment 0.9 simulates requests one by one."


def _transfer(search: Search, row: Row) -> str:
    way = "inside nodes" if row["affinity"] == "low" else "over the wires that span both pools"
    when = "layer by layer" if search.question.overlapped else "when the prompt is done"
    return (
        f"KV of a prompt: {short(row['kv_gib'], 3)} GiB, sent {when} {way} in {short(row['transfer_ms'], 3)} ms, "
        f"of which {short(row['visible_transfer_ms'], 2)} ms show (in TPOT, before the second token)."
    )


def _why(search: Search, colocated: Sequence[Colocated], table: Sequence[Row]) -> str:
    """One sentence: how pools do against the best plan with both phases together, and what holds that back."""
    question = search.question
    apart = [row for row in table if row["kind"] != TOGETHER]
    together = [row for row in table if row["kind"] == TOGETHER]
    if not question.bounded or not apart:
        return ""
    if not colocated or not together or not _served(together[0]):
        return "No plan with both phases on the same chips keeps these limits at any load."
    best = next(each for each in search.deployments if (each.label, each.gpus) == (apart[0]["plan"], apart[0]["gpus"]))
    other = next(each for each in colocated if (each.label, each.hardware) == _key(together[0]))
    dear = question.mixed and apart[0]["usd_per_mtok"] is not None and together[0]["usd_per_mtok"] is not None
    measure = _per_dollar if dear else _per_chip
    ratio = measure(together[0]) / measure(apart[0]) if dear else measure(apart[0]) / measure(together[0])
    on = f" on {other.hardware}" if question.mixed else ""
    against = (
        f"{short(ratio, 3)} times the rate per {'$' if dear else 'chip'} of {other.label}{on}, both phases together"
    )
    if abs(ratio - 1) < EQUAL:
        return f"Apart {best.label} and together {other.label} serve the same per {'$' if dear else 'chip'}."
    share, kept = question.share, together[0]["attained"]
    few = f"; only {kept:.0%} of its requests keep both limits" if share and kept is not None and kept < share else ""
    if ratio > 1:
        return f"Apart: {against}, {_held_back(search, other)}{few}."
    return f"Together is better: apart {best.label} has {against}. {_held_back_apart(best)}"


def _key(row: Row) -> tuple[str, str]:
    return str(row["plan"]), str(row["prefill_hardware"])


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
    texts = {
        "prefill": f"Its prefill replicas are {best.prefill_busy:.0%} busy and can take no more, while its decode "
        f"replicas run {short(best.batch, 3)} of {short(best.most)} requests",
        "decode": f"Its decode replicas stand at the limit with {short(best.batch, 3)} requests each, while its "
        f"prefill replicas are {best.prefill_busy:.0%} busy",
        "memory": f"Its decode replicas have KV room for {short(best.most)} requests each, while its prefill "
        f"replicas are {best.prefill_busy:.0%} busy",
        "wires": f"The wires between its pools are busy {best.wires_busy:.0%} of the time",
    }
    rest = f"; {plural(idle, 'chip')} idle" if idle else ""
    why = ": chips cannot be shared out more finely" if best.binds != "wires" and best.gpus <= 16 else ""
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
