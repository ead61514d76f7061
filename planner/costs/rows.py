"""The rows to price: plans at loads and lengths, an array a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Cached, Structure
from planner.costs.weights import Num
from planner.plans.plan import Plan
from planner.plans.sharding import WORDS, Sharding

Array = NDArray[np.float64]


def structure_of(plan: Plan) -> Structure:
    """What decides a plan's list of operations."""
    parts = plan.sharding
    if plan.cp > 1:
        cached: Cached = "heads" if plan.attention in WORDS else "sequence" if parts.sequence > 1 else "batch"
        return Structure("data", "data", own_ffn=True, context=plan.prefill_attention, cached=cached)
    attention = "data" if parts.batch > 1 else "batch" if plan.attention == "batch" else "heads"
    prefill = plan.prefill_attention if plan.prefill_attention in WORDS else attention
    own = parts.batch > 1 and plan.ep > 1
    return Structure(attention, prefill, plan.ffn, plan.prefill_ffn, own, parts.sequence > 1)


PLAN_COLUMNS = ("tp", "pp", "dp", "x", "y", "attention_dp", "sequence", "ep", "cp")
"""Columns of `Rows` that a plan decides."""


class Rows(NamedTuple):
    """The rows to price: arrays of equal length, whole numbers (but for `prefix_hit`) as floats."""

    tp: Array
    pp: Array
    dp: Array
    isl: Array
    osl: Array
    concurrency: Array
    max_context: Array
    """0 where not given."""
    prefix_hit: Array
    """Share of a prompt that is cached, 0 to 1."""
    x: Array
    y: Array
    """Of the grid that the chips of a tensor-parallel group form, X x Y x Z = tp."""
    attention_dp: Array
    """Groups of its ranks with requests of their own."""
    sequence: Array
    """Ranks that share a request's cache by tokens while it decodes."""
    ep: Array
    """Ranks over which whole experts are divided."""
    cp: Array
    """Groups of tp chips that share the tokens of a pass; 1 = no context parallelism."""
    spec_tokens: Array
    """Tokens drafted a step and request; 0 = none."""
    spec_accept: Array
    """Probability that one of them is accepted, those before it being so."""

    @classmethod
    def of(cls, **columns: Num) -> Rows:
        """Rows of columns that broadcast; those from `max_context` on may be left out (no grid: 1 and tp)."""
        for name in ("max_context", "prefix_hit", "spec_tokens", "spec_accept"):
            columns.setdefault(name, 0.0)
        columns.setdefault("x", 1.0)
        columns.setdefault("attention_dp", 1.0)
        columns.setdefault("sequence", 1.0)
        columns.setdefault("ep", 1.0)
        columns.setdefault("cp", 1.0)
        columns.setdefault("y", columns["tp"])
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(columns[name], dtype=float)) for name in cls._fields))
        return cls(*arrays)

    @classmethod
    def of_plans(cls, plans: Sequence[Plan], **columns: Num) -> Rows:
        """Rows of plans, one each (or one for all), with the other columns of `of`."""
        degrees = {name: np.array([getattr(plan, name) for plan in plans]) for name in ("tp", "pp", "dp", "ep", "cp")}
        x, y = (np.array([plan.axes[axis] for plan in plans]) for axis in (0, 1))
        parts = [plan.sharding if plan.cp == 1 else Sharding(plan.tp) for plan in plans]  # `cp` says the rest
        groups, along = (np.array([getattr(part, name) for part in parts]) for name in ("batch", "sequence"))
        return cls.of(**degrees, x=x, y=y, attention_dp=groups, sequence=along, **columns)

    @property
    def width(self) -> Array:
        """Chips of one pipeline stage."""
        return self.tp * self.cp

    @property
    def length(self) -> int:
        """How many rows."""
        return len(self.tp)

    def part(self, start: int, stop: int) -> Rows:
        """Rows start .. stop."""
        return Rows(*(column[start:stop] for column in self))
