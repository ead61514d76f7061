"""The rows to price: plans at loads and lengths, an array a column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Structure
from planner.costs.weights import Num
from planner.plans.plan import Plan

Array = NDArray[np.float64]


def structure_of(plan: Plan) -> Structure:
    """What decides a plan's list of operations."""
    return Structure(plan.attention, plan.prefill_attention, plan.ffn, plan.prefill_ffn)


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
        columns.setdefault("y", columns["tp"])
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(columns[name], dtype=float)) for name in cls._fields))
        return cls(*arrays)

    @classmethod
    def of_plans(cls, plans: Sequence[Plan], **columns: Num) -> Rows:
        """Rows of plans, one each (or one for all), with the other columns of `of`."""
        degrees = {name: np.array([getattr(plan, name) for plan in plans]) for name in ("tp", "pp", "dp")}
        x, y = (np.array([plan.axes[axis] for plan in plans]) for axis in (0, 1))
        return cls.of(**degrees, x=x, y=y, **columns)

    @property
    def length(self) -> int:
        """How many rows."""
        return len(self.tp)

    def part(self, start: int, stop: int) -> Rows:
        """Rows start .. stop."""
        return Rows(*(column[start:stop] for column in self))
