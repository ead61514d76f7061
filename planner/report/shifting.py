"""`plan shift`: systems over the load, where they change, why, and what requests in bursts see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.phases.shift.layout import moved
from planner.phases.shift.load import Served
from planner.phases.shift.shifting import Shifting, System
from planner.report.figures import came, plural, short
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.units import GIB, MS


def rows(found: Shifting) -> list[dict[str, Any]]:
    """A row for each load and system, the load of most throughput of each at the end (`at` says which)."""
    table = []
    for place, load in enumerate(found.loads):
        for system, estimates in zip(found.systems, found.estimates, strict=True):
            table.append(_row(found, "load", load, system, estimates, place))
    for system, peak in zip(found.systems, found.peak, strict=True):
        table.append(_row(found, "peak", int(peak.running[0]), system, peak, 0))
    return table


def _row(found: Shifting, at: str, load: int, system: System, estimates: Any, place: int) -> dict[str, Any]:
    work, request = found.request.workload, found.request
    rate = float(estimates.requests_per_s[place])
    each = -(-load // system.replicas)
    fits = np.isfinite(rate)
    return {
        "at": at,
        "concurrency": load,
        "system": system.name,
        "model": request.model.name,
        "hardware": request.hardware.name,
        "engine": request.engine.name,
        "weights": system.setting.formats.weights.name,
        "gpus": request.gpus,
        "replicas": system.replicas,
        "base": found.base.label if system.name == "shift" else None,
        "threshold": found.thresholds.chosen if system.name == "shift" else None,
        "decodes_run_in": _mode(found, system, each) if fits else None,
        "isl": work.isl,
        "osl": work.osl,
        "ttft_ms": _finite(estimates.ttft[place] / MS),
        "tpot_ms": _finite(estimates.tpot[place] / MS),
        "latency_ms": _finite(estimates.latency[place] / MS),
        "tokens_per_s": _finite(rate * work.osl),
        "total_tokens_per_s": _finite(rate * (work.isl + work.osl)),
        "weights_gib": system.memory.weights / GIB,
        "kv_capacity_tokens": int(system.memory.tokens),
        "max_concurrency": system.most(work.isl, work.osl),
    }


def _mode(found: Shifting, system: System, sequences: int) -> str:
    if system.name == "shift":
        return "base" if sequences > found.thresholds.chosen else "shift"
    return "base" if system.name == found.base.label else "tensor parallelism" if system.tp > 1 else "replicas"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def served_rows(found: Shifting, outcomes: Sequence[Served], rate: float) -> list[dict[str, Any]]:
    """A row for each system under requests that come at a rate."""
    return [
        {
            "arrival_rate_per_s": _finite(rate),
            "system": each.system.name,
            "base": found.base.label,
            "threshold": found.thresholds.chosen,
            "requests": len(each.outcome.arrival),
            **{
                f"{what}_p{share}_ms": each.quantile(what, share / 100) / MS
                for what in ("ttft", "tpot", "latency")
                for share in (50, 90, 99)
            },
            "total_tokens_per_s": each.total_tokens_per_s,
            "utilisation": each.outcome.utilisation,
            "preemptions": int(each.outcome.preempted.sum()),
        }
        for each in outcomes
    ]


def print_shifting(found: Shifting) -> None:
    """The table over loads, and what it means."""
    table = rows(found)
    best: dict[tuple[str, int], float] = {}
    for row in table:
        key = row["at"], row["concurrency"] if row["at"] == "load" else 0
        value = row["latency_ms"] if row["at"] == "load" else 1 / row["total_tokens_per_s"]
        if value is not None:
            best[key] = min(best.get(key, np.inf), value)
    for row in table:
        key = row["at"], row["concurrency"] if row["at"] == "load" else 0
        value = row["latency_ms"] if row["at"] == "load" else 1 / row["total_tokens_per_s"]
        row["behind"] = None if value is None else value / best[key] - 1
    columns = [
        Column("load", lambda row: str(row["concurrency"])),
        Column("", lambda row: "most tok/s" if row["at"] == "peak" else "", right=False, keep=6),
        Column("system", lambda row: row["system"], right=False),
        Column("TTFT ms", lambda row: short(row["ttft_ms"])),
        Column("TPOT ms", lambda row: short(row["tpot_ms"])),
        Column("latency ms", lambda row: short(row["latency_ms"])),
        Column("in+out tok/s", lambda row: short(row["total_tokens_per_s"])),
        Column("behind", _behind, keep=5),
        Column("decodes in", lambda row: _short_mode(row["decodes_run_in"]), right=False, keep=3),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    show(paragraphs(_caption(found)))


def _behind(row: dict[str, Any]) -> str:
    if row["behind"] is None:
        return "-"
    return "best" if row["behind"] <= 0 else f"+{short(100 * row['behind'], 2)}%"


def _short_mode(mode: str | None) -> str:
    return {"tensor parallelism": "TP", None: "does not fit"}.get(mode, mode or "")


def print_served(found: Shifting, outcomes: Sequence[Served], rate: float, how: str) -> None:
    """The same under requests that come at a rate; `how` says where they are from."""
    table = served_rows(found, outcomes, rate)
    columns = [
        Column("system", lambda row: row["system"], right=False),
        *(
            Column(f"{what.upper()} p{share}", lambda row, name=f"{what}_p{share}_ms": short(row[name]), keep=keep)  # type: ignore[misc]
            for what in ("ttft", "tpot")
            for share, keep in ((50, 9), (90, 7), (99, 6))
        ),
        Column("in+out tok/s", lambda row: short(row["total_tokens_per_s"])),
        Column("busy", lambda row: f"{row['utilisation']:.0%}", keep=5),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    show(
        paragraphs([
            f"{plural(len(outcomes[0].outcome.arrival), 'request')} {came(rate)}, {how}, one by one "
                "through each system (ms; TTFT with the wait).",
            *_caption(found, loads=False),
        ])
    )  # fmt: skip


def _caption(found: Shifting, loads: bool = True) -> list[str]:
    request, work, base = found.request, found.request.workload, found.base
    system = found.systems[0]
    texts = [
        f"{request.model.name} ({system.setting.formats.weights.name} weights) on {request.gpus} x "
        f"{request.hardware.name}, {request.engine.name} {request.engine.version}; {work.isl} tokens in, "
        f"{work.osl} out. shift = base {base.label}, over TP{base.chips} for passes of at most "
        f"{found.thresholds.chosen} tokens"
        f"{f'; {found.replicas} replicas' if found.replicas > 1 else ''}."
    ]
    idle = request.gpus - found.replicas * base.chips
    if idle:
        texts.append(f"{plural(idle, 'chip')} of {request.gpus} left over by replicas of {base.chips}, in all systems.")
    if loads:
        texts.append("behind: in latency of the best at that load; in tokens/s of the best at most tok/s.")
        texts.append(_worst(found))
    texts += [_crossing(found), _layout(found), _memory(system)]
    texts = [text for text in texts if text]
    texts += [f"Not {'shown' if loads else 'run'}: {name}: {reason}." for name, reason in found.left_out.items()]
    return texts


def worst(found: Shifting) -> dict[str, float]:
    """How far each system is behind the best in latency at the worst of the loads that all of them hold."""
    latencies = np.array([[float(value) for value in each.latency] for each in found.estimates])
    held = np.isfinite(latencies).all(axis=0)
    losses = latencies[:, held] / latencies[:, held].min(axis=0) - 1
    most = losses.max(axis=1) if held.any() else np.full(len(losses), np.nan)
    return {system.name: float(loss) for system, loss in zip(found.systems, most, strict=True)}


def _worst(found: Shifting) -> str:
    parts = [f"{name} {short(100 * loss, 2)}%" for name, loss in worst(found).items() if np.isfinite(loss)]
    return f"At the worst of the loads that all hold, behind the best: {', '.join(parts)}." if parts else ""


def _crossing(found: Shifting) -> str:
    base, limits, work = found.base, found.thresholds, found.request.workload
    share = "all" if base.tp == 1 else f"1/{base.tp}"

    def at(tokens: int | None, what: str) -> str:
        if tokens is None:
            return f"{what} of any size are no slower over TP{base.chips}"
        return f"{what} of more than {tokens} tokens" if tokens else f"{what} of any size"

    return (
        f"{base.label} is the faster for {at(limits.prompts, 'prompts')}, and for "
        f"{at(limits.decodes, 'decode steps')} (at {work.isl + work.osl // 2:.0f} tokens of "
        f"context): below, each of its chips reads {share} of the weights where "
        f"TP{base.chips} reads 1/{base.chips}; above, TP{base.chips} reduces all tokens on every chip where "
        f"{base.label} sends 1/{base.sp} of them to and fro."
    )


def _layout(found: Shifting) -> str:
    base, attention = found.base, found.request.model.attention
    order, naive = base.shift_order, tuple(range(base.chips))
    ranks = ", ".join(map(str, order))
    text = f"Ranks of TP{base.chips} in the order {ranks}: each attends to the heads that it has in the base"
    out = moved(base, naive, attention.heads, attention.kv_heads)
    if out:
        text += f"; in the order 0 to {base.chips - 1} the KV of ranks {', '.join(map(str, out))} would be elsewhere"
    return text + "."


def _memory(system: System) -> str:
    memory = system.memory
    return (
        f"Weights of a chip: {memory.base / GIB:.2f} GiB of the base and {memory.shift / GIB:.2f} of the shift, "
        f"{memory.shift / memory.base:.1%} more; a replica holds {memory.tokens:.0f} tokens."
    )
