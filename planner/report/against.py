"""`plan estimate --against`: a user's own runs beside the model's word on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from planner.report.figures import plural, short
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.specs.benchmarks import ServingRun, where

METRICS = ("ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s")
_SHOWN = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "latency_ms": "latency ms", "tokens_per_s": "tok/s"}


def joined(rows: Sequence[dict[str, Any]], runs: Sequence[ServingRun]) -> list[dict[str, Any]]:
    """Result rows with what was measured (`measured_*`) and the relative error of ours (`error_*`) behind them."""
    found = []
    for row, run in zip(rows, runs, strict=True):
        measured = {name: getattr(run, name) for name in METRICS}
        errors = {name: _error(row[name], measured[name]) for name in METRICS}
        found.append(
            row
            | {f"measured_{name}": value for name, value in measured.items()}
            | {f"error_{name.removesuffix('_ms')}": value for name, value in errors.items()}
        )
    return found


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def print_against(rows: Sequence[dict[str, Any]], runs: Sequence[ServingRun]) -> None:
    """Measured, predicted and error of every run, and their means where there are several.

    Args:
        rows: of `joined`.
        runs: where they are from.
    """
    several = len(runs) > 1
    lines = [
        {
            "run": f"{where(run).replace(run.file, Path(run.file).name)}",
            "load": str(row["concurrency"]),
            "what": _SHOWN[name],
            "measured": short(row[f"measured_{name}"]),
            "predicted": short(row[name]),
            "error": f"{error:+.1%}",
        }
        for row, run in zip(rows, runs, strict=True)
        for name in METRICS
        if (error := row[f"error_{name.removesuffix('_ms')}"]) is not None
    ]
    columns = [Column(name, _cell(name), right=name not in ("run", "what")) for name in lines[0]] if lines else []
    print()
    if not lines:
        show(paragraphs(["Nothing to compare: none of the runs could be priced."]))
        return
    show(lay_out(columns, lines, width()), ["bold underline"])
    if not several:
        show(paragraphs([f"Means of {plural(runs[0].requests, 'request')}."]))
        return
    means = []
    for name in METRICS:
        errors = [row[f"error_{name.removesuffix('_ms')}"] for row in rows]
        known = [error for error in errors if error is not None]
        if known:
            means.append(
                f"{_SHOWN[name].removesuffix(' ms')} {np.mean(np.abs(known)):.1%} (bias {np.mean(known):+.1%})"
            )
    show(paragraphs([f"Off on average: {', '.join(means)}."]))


def _cell(name: str) -> Any:
    return lambda row: str(row[name])
