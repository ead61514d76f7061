"""What a request minimises, as one number that is linear in TTFT and TPOT, so that its terms add up to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from planner.results import Results
from planner.units import MS


class Goal(NamedTuple):
    """goal = first x TTFT + later x TPOT, both in seconds."""

    first: float
    later: float
    unit: str
    """`ms`, `chip-ms/token`, `$/Mtok`."""
    what: str
    """In words, as `latency of a request`."""

    @classmethod
    def of(cls, row: Mapping[str, Any], objective: str) -> Goal:
        """The goal of a result row; throughput and cost are taken per output token and chip that is paid for.

        R = TTFT + (osl - 1) TPOT is what a request takes; `running` requests share the chips, so that a token takes
        gpus R / (running osl) chip-seconds, and $ in proportion.
        """
        if objective == "ttft":
            return cls(1 / MS, 0.0, "ms", "time to the first token")
        if objective == "tpot":
            return cls(0.0, 1 / MS, "ms", "time of an output token")
        answers = max(0, row["osl"] - 1)
        if objective == "latency":
            return cls(1 / MS, answers / MS, "ms", "latency of a request")
        running = row["in_flight"] or min(row["concurrency"], row["batch_per_replica"] * row["dp"])
        tokens = running * row["osl"]
        dollars = row["usd_per_mtok"]
        if objective == "cost" and dollars is not None:
            each = dollars / row["gpu_s_per_token"]  # $ of a chip's second, times a million
            return cls(each * row["gpus"] / tokens, each * row["gpus"] * answers / tokens, "$/Mtok", "cost of tokens")
        scale = row["gpus"] / tokens / MS
        return cls(scale, scale * answers, "chip-ms/token", "time of the chips for a token")

    def value(self, ttft: Any, tpot: Any) -> Any:
        """The goal at these times, in seconds; a TPOT that there is none of (NaN) counts nothing."""
        return self.first * ttft + self.later * np.nan_to_num(tpot)


def goal_value(results: Results, index: int, objective: str) -> float:
    """The goal of one row, from its columns."""
    row = results.row(index)
    found = Goal.of(row, objective).value(
        row["ttft_ms"] * MS, np.nan if row["tpot_ms"] is None else row["tpot_ms"] * MS
    )
    return float(found)
