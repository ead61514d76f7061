"""Results: the columns that every table, CSV and JSON of the planner has, in their order (stable; new ones go last)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.roofline import BOUNDS, Parts
from planner.costs.rows import Rows
from planner.costs.serving import Estimates, Fit, Setting
from planner.costs.speculation import tokens_per_step
from planner.costs.weights import matmul_parameters
from planner.extrapolation import beyond, unmeasured
from planner.plans.plan import Plan
from planner.units import GIB, HOUR, MS

COLUMNS = (
    "rank", "plan", "model", "hardware", "engine", "objective", "schedule", "weights", "kv_cache", "gpus",
    "tp", "pp", "dp", "ep", "cp", "attention", "prefill_attention", "ffn", "prefill_ffn", "idle_gpus",
    "concurrency", "batch_per_replica", "isl", "osl", "ttft_ms", "queue_ms", "tpot_ms", "latency_ms",
    "tokens_per_s", "total_tokens_per_s", "tokens_per_s_per_gpu", "requests_per_s", "usd_per_mtok", "wh_per_mtok",
    "gpu_s_per_token", "mfu_prefill", "mfu_decode", "weights_gib", "kv_gib", "other_gib", "memory_gib",
    "memory_limit_gib", "kv_capacity_tokens", "max_concurrency", "bottleneck", "tie", "error", "flips_if",
    "engine_version", "extrapolates", "assumed", "arrivals", "usd_per_mtok_input", "usd_per_mtok_output", "prefix_hit",
    "grid", "gpu_s_per_token_prefill", "gpu_s_per_token_decode",
    "arrival_rate_per_s", "in_flight", "utilisation", "prefill_utilisation", "ttft_p90_ms",
    "spec_tokens", "spec_accept", "tokens_per_step",
)  # fmt: skip
WHOLE = frozenset((
    "rank", "gpus", "tp", "pp", "dp", "ep", "cp", "idle_gpus", "concurrency", "batch_per_replica", "isl", "osl",
    "kv_capacity_tokens", "max_concurrency", "spec_tokens",
))  # fmt: skip
"""Columns of whole numbers."""
TEXTS = frozenset((
    "plan", "model", "hardware", "engine", "objective", "schedule", "weights", "kv_cache", "attention",
    "prefill_attention", "ffn", "prefill_ffn", "bottleneck", "error", "flips_if", "engine_version", "extrapolates",
    "assumed", "arrivals", "grid",
))  # fmt: skip
"""Columns of texts; `tie` is true or false, and all others are figures."""

Column = NDArray[Any]


@dataclass
class Results:
    """Rows of results by column: arrays of numbers (NaN = not applicable) or of texts (None = not applicable)."""

    columns: dict[str, Column]
    ttft_parts: dict[str, Column] = field(default_factory=dict)
    """Seconds of TTFT by bound."""
    tpot_parts: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["plan"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def row(self, index: int) -> dict[str, Any]:
        """One row as plain values, in the order of COLUMNS; None = not applicable."""
        return {name: plain(name, self.columns[name][index]) for name in COLUMNS}

    def rows(self) -> list[dict[str, Any]]:
        """All rows as plain values."""
        return [self.row(index) for index in range(len(self))]

    def take(self, index: Column) -> Results:
        """The rows of an index array, in its order."""

        def taken(columns: dict[str, Column]) -> dict[str, Column]:
            return {name: column[index] for name, column in columns.items()}

        return Results(taken(self.columns), taken(self.ttft_parts), taken(self.tpot_parts))

    @classmethod
    def joined(cls, parts: list[Results]) -> Results:
        """Rows of several results, one after the other."""

        def joined(tables: list[dict[str, Column]]) -> dict[str, Column]:
            return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

        return cls(
            joined([part.columns for part in parts]),
            joined([part.ttft_parts for part in parts]),
            joined([part.tpot_parts for part in parts]),
        )


def plain(name: str, value: Any) -> Any:
    """A cell as a Python value: None where not applicable, whole numbers as int."""
    if value is None:
        return None
    if isinstance(value, (float, np.floating)):
        if not np.isfinite(value):
            return None
        return int(value) if name in WHOLE else float(value)
    return value.item() if isinstance(value, np.generic) else value


def texts(value: Any, count: int) -> Column:
    """A column of one text, or of a sequence of them."""
    column = np.empty(count, dtype=object)
    column[:] = value
    return column


def results_of(
    setting: Setting,
    plans: Sequence[Plan],
    which: Column,
    gpus: Column,
    objective: str,
    rows: Rows,
    fitted: Fit,
    priced: Estimates,
) -> Results:
    """The result columns of priced rows (rank, tie, error and flips_if are left empty).

    Args:
        setting: what all rows share.
        plans: the distinct plans.
        which: index of each row's plan in them.
        gpus: chips that were asked for.
        objective: decides which time the bottleneck is of.
        rows: what was priced.
        fitted: its memory.
        priced: its times.
    """
    count = rows.length
    none, nan = texts(None, count), np.full(count, np.nan)
    chip, formats = setting.hardware.chip, setting.formats
    tokens = priced.requests_per_s * rows.osl
    price = setting.usd_per_chip_hour if setting.usd_per_chip_hour is not None else np.nan
    watts = chip.tdp_w if chip.tdp_w is not None else np.nan

    def of_plan(name: str) -> Column:
        return texts([getattr(plan, name) for plan in plans], len(plans))[which]

    dollars = price * gpus / HOUR / tokens * 1e6  # for a million output tokens, their prompts' share included
    for_prompts = dollars * priced.prefill_share

    peak = chip.peak(formats.compute)  # at an MFU of 1 a token takes so long on all chips, idle ones too
    chip_seconds = 2 * matmul_parameters(setting.model) / peak * gpus / (rows.width * rows.pp * rows.dp)

    columns: dict[str, Column] = {
        "rank": nan,
        "plan": of_plan("label"),
        "model": texts(setting.model.name, count),
        "hardware": texts(setting.hardware.name, count),
        "engine": texts(setting.engine.name, count),
        "objective": texts(objective, count),
        "schedule": texts(setting.schedule, count),
        "weights": texts(formats.weights.name, count),
        "kv_cache": texts(formats.kv.name, count),
        "gpus": gpus,
        "tp": rows.tp,
        "pp": rows.pp,
        "dp": rows.dp,
        "ep": of_plan("ep").astype(float),
        "cp": rows.cp,
        "attention": of_plan("attention"),
        "prefill_attention": of_plan("prefill_attention"),
        "ffn": of_plan("ffn"),
        "prefill_ffn": of_plan("prefill_ffn"),
        "idle_gpus": gpus - rows.width * rows.pp * rows.dp,
        "concurrency": rows.concurrency,
        "batch_per_replica": fitted.batch,
        "isl": np.round(rows.isl),
        "osl": np.round(rows.osl),
        "ttft_ms": priced.ttft / MS,
        "queue_ms": priced.ttft * 0.0,
        "tpot_ms": priced.tpot / MS,
        "latency_ms": priced.latency / MS,
        "tokens_per_s": tokens,
        "total_tokens_per_s": priced.requests_per_s * (rows.isl + rows.osl),
        "tokens_per_s_per_gpu": tokens / gpus,
        "requests_per_s": priced.requests_per_s,
        "usd_per_mtok": dollars,
        "wh_per_mtok": watts * gpus / HOUR / tokens * 1e6,
        "gpu_s_per_token": gpus / tokens,
        "mfu_prefill": priced.mfu_prefill,
        "mfu_decode": priced.mfu_decode,
        "weights_gib": fitted.weights / GIB,
        "kv_gib": fitted.kv / GIB,
        "other_gib": fitted.other / GIB,
        "memory_gib": fitted.memory / GIB,
        "memory_limit_gib": np.full(count, setting.budget.limit / GIB),
        "kv_capacity_tokens": fitted.capacity_tokens,
        "max_concurrency": fitted.max_concurrency,
        "bottleneck": bottleneck(priced, objective),
        "tie": none,
        "error": none,
        "flips_if": none,
        "engine_version": texts(setting.engine.version, count),
        "extrapolates": beyond(setting, rows, fitted.batch),
        "assumed": unmeasured(setting, rows),
        "arrivals": texts(None if setting.schedule == "static" else setting.arrivals, count),
        "usd_per_mtok_input": for_prompts * rows.osl / rows.isl,
        "usd_per_mtok_output": dollars - for_prompts,
        "prefix_hit": rows.prefix_hit,
        "grid": texts([plan.grid or None for plan in plans], len(plans))[which],
        "gpu_s_per_token_prefill": chip_seconds / priced.mfu_prefill,
        "gpu_s_per_token_decode": chip_seconds / priced.mfu_decode,
        **dict.fromkeys(("arrival_rate_per_s", "in_flight", "utilisation", "prefill_utilisation"), nan),
        "ttft_p90_ms": priced.ttft_p90 / MS,
        **_speculation(setting, rows),
    }
    return Results(columns, _by_bound(priced.ttft_parts), _by_bound(priced.tpot_parts))


def _speculation(setting: Setting, rows: Rows) -> dict[str, Column]:
    """Drafted tokens, the share accepted, and tokens that a step yields; not applicable where nothing is drafted."""
    if setting.drafting is None:
        nothing = np.full(rows.length, np.nan)
        return {"spec_tokens": nothing, "spec_accept": nothing, "tokens_per_step": nothing}
    drafts = rows.spec_tokens > 0
    return {
        "spec_tokens": np.where(drafts, rows.spec_tokens, np.nan),
        "spec_accept": np.where(drafts, rows.spec_accept, np.nan),
        "tokens_per_step": np.where(drafts, tokens_per_step(rows.spec_tokens, rows.spec_accept), np.nan),
    }


def _by_bound(parts: Parts) -> dict[str, Column]:
    return dict(zip(BOUNDS, parts, strict=True))


def bottleneck(priced: Estimates, objective: str) -> Column:
    """The largest part of TPOT (of TTFT for that objective, or where there is no TPOT)."""
    ttft = np.stack(priced.ttft_parts).argmax(axis=0)
    tpot = np.stack(priced.tpot_parts).argmax(axis=0)
    largest = ttft if objective == "ttft" else np.where(np.isfinite(priced.tpot), tpot, ttft)
    names: Column = np.array(BOUNDS, dtype=object)[largest]
    names[~np.isfinite(priced.latency)] = None
    return names
