"""Figures for people: about four digits, no exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.specs.speculation import Speculation
from planner.specs.workload import Workload


def short(value: float | None, digits: int = 4) -> str:
    """A figure of `digits` digits, large ones whole, then as k and M; none as a dash."""
    if value is None:
        return "-"
    if value >= 1e7:
        return f"{significant(value / 1e6, 3)}M"
    if value >= 1e5:
        return f"{significant(value / 1e3, 3)}k"
    return significant(value, digits)


def came(rate: float) -> str:
    """How requests come, as `at 40 a second`; an infinite rate is all of them at once."""
    return f"at {short(rate)} a second" if math.isfinite(rate) else "all at once"


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def prompt(work: Workload) -> str:
    """What comes in with a request, and how much of it is cached, and what goes out."""
    cached = f" ({short(100 * work.prefix_hit)}% cached)" if work.prefix_hit else ""
    if work.lengths is None:
        return f"{work.isl} tokens in{cached}, {work.osl} out"
    lengths = work.lengths
    p90 = f" (nine tenths to {short(work.isl * lengths.p90)})" if lengths.p90 != 1 else ""
    longest = f"longest request {short((work.isl + work.osl) * lengths.longest)}"
    return f"{short(work.isl)} tokens in{p90}{cached}, {short(work.osl)} out on average, {longest}"


def load(work: Workload, concurrency: int) -> str:
    """How many requests there are, as `concurrency 8` or `40 requests/s`."""
    return f"concurrency {concurrency}" if work.arrival_rate is None else f"{short(work.arrival_rate)} requests/s"


def drafted(row: Mapping[str, Any], speculation: Speculation | None) -> str:
    """What is drafted a step, and what comes of it; "" where nothing is."""
    if speculation is None or row["spec_tokens"] is None:
        return ""
    return (
        f", {plural(row['spec_tokens'], 'token')} drafted by {speculation.draft.label}, "
        f"{short(row['tokens_per_step'])} tokens a step"
    )


def significant(value: float, digits: int) -> str:
    """A value with this many significant digits, whole ones kept, without an exponent or trailing zeros."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    if decimals == 0:
        return f"{value:.0f}"
    return f"{rounded:.{decimals}f}".rstrip("0").rstrip(".")
