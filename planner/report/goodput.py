"""`plan goodput`: percentiles of what users wait for, and the rate at which a promise still holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.plans.plan import Plan
from planner.report.figures import plural, prompt, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.request import Request
from planner.simulating.goodput import GAPS, Fared, Found, Goal, Judged
from planner.units import MS

PERCENTILES = (50, 90, 99)
_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "gap": "gap", "load": "load"}


class Entry(NamedTuple):
    """A plan, and how it fared."""

    plan: Plan
    gpus: int
    fared: Fared

    @property
    def judged(self) -> Judged:
        """At the rate that is asked, or at the highest that is good."""
        return self.fared.judged

    @property
    def rate(self) -> float:
        """The highest good rate; 0 where there is none, or none was searched."""
        found = self.fared.found
        return 0.0 if found is None or found.best is None else found.best.rate


def row(entry: Entry, request: Request, goal: Goal, drawn: dict[str, Any]) -> Row:
    """The figures of a plan, for CSV and JSON.

    Args:
        entry: the plan, simulated.
        request: what is asked.
        goal: the limits.
        drawn: how requests were made: `seed`, `burstiness`, `trace`.
    """
    judged, found = entry.judged, entry.fared.found
    outcome, work = judged.outcome, request.workload
    times = {
        f"{name}_p{percent}_ms": _number(value / MS)
        for name in ("ttft", "tpot", "wait", "latency")
        for percent, value in zip(PERCENTILES, judged.quantiles(name), strict=True)
    }
    good = entry.rate or None
    return {
        "plan": entry.plan.label,
        "gpus": entry.gpus,
        "model": request.model.name,
        "hardware": request.hardware.name,
        "engine": request.engine.name,
        "isl": round(work.isl),
        "osl": round(work.osl),
        "arrival_rate_per_s": _number(judged.rate),
        "goodput_per_s": good,
        "goodput_per_s_per_gpu": None if good is None else good / entry.gpus,
        "attainment": judged.attained,
        "ttft_attainment": judged.kept.get("ttft"),
        "tpot_attainment": judged.kept.get("tpot"),
        "good": judged.good if goal.limits else None,
        "sustained": judged.sustained,
        "bound": " ".join(found.bound) if found is not None else None,
        **times,
        "gap_p99_ms": _number(outcome.gaps.quantile(0.99) / MS),
        "utilisation": outcome.utilisation,
        "kv_peak": outcome.peak,
        "preempted": int(outcome.preempted.sum()),
        "tokens_per_s": float(outcome.osl.sum() / outcome.span),
        "requests": entry.fared.requests,
        **drawn,
        "max_ttft_ms": None if goal.ttft is None else goal.ttft / MS,
        "max_tpot_ms": None if goal.tpot is None else goal.tpot / MS,
        "max_gap_ms": None if goal.gap is None else goal.gap / MS,
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _columns(rows: Sequence[Row]) -> list[Column]:
    limited = any(row[name] is not None for row in rows for name in ("ttft_attainment", "tpot_attainment"))
    searched = any(row["bound"] is not None for row in rows)
    columns: list[Column | None] = [
        Column("plan", lambda row: str(row["plan"]), right=False),
        Column("chips", lambda row: str(row["gpus"])) if len({row["gpus"] for row in rows}) > 1 else None,
        Column("req/s", lambda row: short(row["arrival_rate_per_s"])),
        Column("/chip", lambda row: short(row["goodput_per_s_per_gpu"], 3)) if searched else None,
        Column("kept", lambda row: f"{row['attainment']:.1%}", keep=7) if limited else None,
    ]
    for name, keep in (("TTFT", (5, 8, 6)), ("TPOT", (4, 8, 6))):
        for percent, importance in zip(PERCENTILES, keep, strict=True):
            columns.append(Column(f"{name} p{percent}", _time(f"{name.lower()}_p{percent}_ms"), keep=importance))
    columns += [
        Column("gap p99", _time("gap_p99_ms"), keep=1),
        Column("busy", lambda row: f"{row['utilisation']:.0%}", keep=3),
        Column("ends by", lambda row: row["bound"], right=False, keep=2) if searched else None,
    ]
    return [column for column in columns if column is not None]


def _time(name: str) -> Any:
    return lambda row: short(row[name])


def print_goodput(
    entries: Sequence[Entry], rows: Sequence[Row], request: Request, goal: Goal, notes: Sequence[str]
) -> None:
    """The table and what it stands for."""
    lines = lay_out(_columns(rows), rows, width())
    show(lines, ["bold underline"])
    first = entries[0]
    drawn = rows[0]
    counts = sorted({row["requests"] for row in rows})
    count = plural(counts[0], "request") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} requests"
    if drawn["trace"]:
        source = f"{count} of {drawn['trace']}"
    else:
        process = "Poisson" if drawn["burstiness"] == 1 else f"gamma, CV {short(drawn['burstiness'])}"
        source = f"{count} drawn with seed {drawn['seed']} ({process}), those while it fills and empties not counted"
    formats = f"{request.workload.weights or request.model.weights} weights"
    texts = [
        f"{request.model.name} ({formats}) on {_chips(rows)} x {request.hardware.name}, engine {request.engine.name} "
        f"{request.engine.version}; {prompt(request.workload)}; {source}. Times in ms, TTFT with the wait."
    ]
    found = first.fared.found
    if found is not None:
        texts.append(
            f"{first.plan.label} keeps {promise(goal)} up to {short(first.judged.rate)} requests/s, "
            f"{short(first.judged.rate / first.gpus, 3)} a chip; {_beyond(found)}."
        )
    elif goal.limits:
        texts.append(f"Asked: {promise(goal)}.")
    if any(not row["sustained"] for row in rows):
        unsustained = ", ".join(row["plan"] for row in rows if not row["sustained"])
        texts.append(f"Requests come faster than they are served: {unsustained}; percentiles grow with --requests.")
    if any(row["preempted"] for row in rows):
        some = ", ".join(f"{row['plan']} {row['preempted']}" for row in rows if row["preempted"])
        texts.append(f"Out of KV, and computed again: {some} times.")
    show(paragraphs([*texts, *notes]))


def _chips(rows: Sequence[Row]) -> str:
    """How many chips the plans are on."""
    counts = sorted({row["gpus"] for row in rows})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _beyond(found: Found) -> str:
    """What comes with a higher rate."""
    if not found.bound:
        return "no rate that was tried is too high"
    if found.bound == ("load",):
        return "beyond, requests come faster than they are served"
    names = " and ".join("gaps" if name == "gap" else _WORDS[name] for name in found.bound)
    return f"beyond, {names} {'are' if len(found.bound) > 1 or 'gap' in found.bound else 'is'} the first to break"


def limits(goal: Goal, names: Sequence[str] = ("ttft", "tpot")) -> str:
    """`TTFT <= 500 ms and TPOT <= 30 ms`."""
    given = {name: limit for name, limit in goal.limits.items() if name in names}
    return " and ".join(f"{_WORDS[name]} <= {short(limit / MS)} ms" for name, limit in given.items())


def promise(goal: Goal) -> str:
    """The limits, and for whom."""
    parts = []
    if (times := limits(goal)) and goal.percentile is not None:
        parts.append(f"{times} at the {short(goal.percentile)}th percentile{' each' if ' and ' in times else ''}")
    elif times:
        parts.append(f"{times} for {short(100 * goal.attainment)} % of the requests")
    if goal.gap is not None:
        parts.append(f"{short(100 * GAPS)} % of the gaps between tokens <= {short(goal.gap / MS)} ms")
    return ", and ".join(parts)


def kept(judged: Judged) -> str:
    """Which share keeps what."""
    shares = [f"{_WORDS[name]} in {share:.1%}" for name, share in judged.kept.items()]
    return ", ".join(shares + ([] if judged.sustained else ["and more comes than is served"]))


def unreachable(entries: Sequence[Entry], goal: Goal) -> str:
    """What is within reach where no plan keeps its promise even with next to no load."""
    given = goal.limits
    for entry in entries:
        found = entry.fared.found
        if found is not None and found.idle.good and found.beyond is not None:
            return (
                f"no plan keeps {promise(goal)}: one request at a time does with {entry.plan.label}, but those that "
                f"come together do not, even at {short(found.beyond.rate)} requests/s ({kept(found.beyond)})"
            )
    idle = {entry.plan.label: {name: _reached(entry.judged, name, goal) for name in given} for entry in entries}
    excess = {label: sum(_excess(times[name], given[name]) for name in given) for label, times in idle.items()}
    nearest = min(excess, key=lambda label: excess[label])
    shortest, would = [], []
    for name, limit in given.items():
        label = min((times[name], label) for label, times in idle.items())[1]
        shortest.append(f"the shortest {_WORDS[name]} is {short(idle[label][name] / MS)} ms ({label})")
        if idle[nearest][name] > limit:
            would.append(f"--max-{name} {_above(idle[nearest][name] / MS)}")
    way = f"; {nearest} would do with {' '.join(would)}" if would else ", but not for the same requests"
    return f"no plan keeps {promise(goal)}, even with one request at a time: {' and '.join(shortest)}{way}"


def _reached(judged: Judged, name: str, goal: Goal) -> float:
    """The limit that would have been kept."""
    if name == "gap":
        return judged.outcome.gaps.quantile(GAPS)
    share = goal.attainment if goal.percentile is None else goal.percentile / 100
    return float(judged.quantiles(name, (share,))[0])


def _excess(value: float, limit: float) -> float:
    return float(np.log(value / limit)) if value > limit else 0.0


def _above(value: float) -> str:
    """Three digits, not below the value, so that it can be asked for."""
    scale = 10.0 ** (2 - int(np.floor(np.log10(value))))
    return f"{np.ceil(value * scale * (1 - 1e-12)) / scale:.12g}"
