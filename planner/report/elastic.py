"""`plan elastic`: systems on the same requests, what the elastic one did, and the form by which it decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.phases.elastic.comparison import NEAR, Elastic, Score
from planner.phases.elastic.instances import Outcome
from planner.report.figures import came, plural, short
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.simulating.traces import Trace
from planner.units import MS, US


def rows(found: Elastic, scores: Sequence[Score], trace: Trace) -> list[dict[str, Any]]:
    """A row for each system."""
    request = found.request
    own = scores[0].rate
    return [
        {
            "system": system.name,
            "plan": system.label,
            "model": request.model.name,
            "hardware": request.hardware.name,
            "engine": request.engine.name,
            "gpus": request.gpus,
            "kv_capacity_tokens": int(system.tokens),
            "requests": trace.length,
            "highest_rate_per_s": _finite(score.rate),
            "elastic_gain": own / score.rate if score.rate and np.isfinite([own, score.rate]).all() else None,
            "arrival_rate_per_s": _finite(trace.rate),
            "attained": score.attained,
            "per_token_ms": _finite(score.per_token / MS),
            "per_input_token_ms": _finite(score.per_input / MS),
            "per_output_token_ms": _finite(score.per_output / MS),
            "error": None if np.isfinite(score.per_token) else "a request does not fit",
        }
        for system, score in zip(found.systems, scores, strict=True)
    ]


def unreachable(found: Elastic, scores: Sequence[Score], limit: tuple[float, float]) -> str:
    """What would do where no system keeps the limit at any rate."""
    scale, share = limit
    start = f"no system keeps {short(scale)} times the time alone for {share:.0%} of the requests at any rate"
    least = min(zip(scores, found.systems, strict=True), key=lambda each: np.nan_to_num(each[0].least, nan=np.inf))
    if not np.isfinite(least[0].least):
        return f"{start}: none holds the requests; give more chips, or shorter prompts"
    needed = np.ceil(least[0].least * 100) / 100
    return f"{start}: {least[1].name} would with --slo-scale {needed:g} and hardly any load; give more than that"


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def print_elastic(
    found: Elastic, scores: Sequence[Score], trace: Trace, did: Outcome, limit: tuple[float, float]
) -> None:
    """The table and what it means; `limit` is a multiple of the time alone, and the share of requests that keep it."""
    table = rows(found, scores, trace)
    columns = [
        Column("system", lambda row: row["system"], right=False),
        Column("chips as", lambda row: row["plan"], right=False, keep=5),
        Column(
            "most req/s",
            lambda row: "any" if row["highest_rate_per_s"] is None else short(row["highest_rate_per_s"], 3),
        ),
        Column(
            "elastic gains", lambda row: "-" if row["elastic_gain"] is None else f"x {short(row['elastic_gain'], 3)}"
        ),
        Column("ms/token", lambda row: short(row["per_token_ms"], 3)),
        Column("ms/token in", lambda row: short(row["per_input_token_ms"], 3), keep=6),
        Column("ms/token out", lambda row: short(row["per_output_token_ms"], 3), keep=6),
        Column("in limit", lambda row: f"{row['attained']:.0%}", keep=7),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    show([""])
    forms = [
        {"d": str(degree), "a": form.a / MS, "b": form.b / US, "c": form.c / 1e-12, "residual": form.residual}
        for degree, form in enumerate(found.fits, 1)
    ]
    fitted = [
        Column("DoP", lambda row: row["d"]),
        Column("a, ms", lambda row: short(row["a"], 3)),
        Column("b, us/token", lambda row: short(row["b"], 3)),
        Column("c, ps/token^2", lambda row: short(row["c"], 3)),
        Column("residual", lambda row: f"{row['residual']:.1%}"),
    ]
    show(lay_out(fitted, forms, width()), ["bold underline"])
    show(paragraphs(_caption(found, trace, did, limit)))


def _caption(found: Elastic, trace: Trace, did: Outcome, limit: tuple[float, float]) -> list[str]:
    request = found.request
    scale, share = limit
    degrees = ", ".join(f"{count} on {degree}" for degree, count in sorted(did.degrees.items()))
    return [
        f"{request.model.name} on {request.gpus} x {request.hardware.name}, {request.engine.name} "
        f"{request.engine.version}; {plural(trace.length, 'request')}, {short(float(np.mean(trace.isl)))} tokens in on "
        f"average (half of them to {short(float(np.median(trace.isl)))}, the longest "
        f"{short(float(trace.isl.max()))}), {short(float(np.mean(trace.osl)))} out.",
        f"most req/s: the rate at which {share:.0%} of the requests take at most {short(scale)} times what they take "
        f"alone on TP{request.gpus}, to {NEAR - 1:.0%} (any: even if all come at once). The other columns are of "
        f"them {came(trace.rate)}: time by tokens in and out, time to the first token by tokens in, time "
        "after it by tokens out; means over requests.",
        f"Elastic there: passes over prompts by degree of parallelism: {degrees} of {found.instances} instances; KV "
        f"left on fewer instances {plural(did.down, 'time')}, further masters taken {plural(did.up, 'time')}, decodes "
        f"stood still {plural(did.paused, 'time')}, batches of decodes put "
        f"together {plural(did.merged, 'time')}, {short(did.moved)} tokens of KV moved.",
        "Form: seconds of a pass over prompts = a + b sum(len) + c sum(len^2), fitted to the cost engine's passes by "
        "DoP; residual: mean error.",
    ]
