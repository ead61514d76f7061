"""The nearest comparison to Helix's published gains that the planner can make: the table of docs/attention.md.

    python benchmarks/helix.py

A million tokens of context, 64 chips of a rack, no host time; time of a token without any prefill. Every plan with a
cache by tokens against every plan without, at the same batch, and the largest batch of each within the same time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.errors import NoPlanError
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.ranking import rank, tradeoff
from planner.request import Limits, Request
from planner.results import Results
from planner.specs.catalog import load_machine, load_model
from planner.specs.workload import Workload

CONTEXT, CHIPS, RACK = 1_000_000, 64, "gb200-nvl72"
MODELS = ("deepseek-r1", "llama3.1-405b")
BATCHES = (1, 4, 16, 32, 64)
SLACK = (1.001, 1.1, 1.25, 1.5, 2.0)
"""Times of a token as multiples of the least without a cache by tokens."""


class Best(NamedTuple):
    """The best plan of each kind; none = no plan of it does."""

    without: tuple[str, float] | None
    by_tokens: tuple[str, float] | None


def question(model: str, batch: int | None = None, budget: float | None = None, overlap: bool = True) -> Request:
    """The fastest token at a batch, or the largest batch within a time of a token (seconds).

    Weights are 4 bit, as published. There is no 4-bit cache: 8 bit. The model's own end of its context is not looked
    at, since what is asked is how long a token takes.
    """
    hardware, engine = load_machine(RACK, "ideal")
    if not overlap:
        engine = engine._replace(sequence_overlap=None)
    return Request(
        load_model(model)._replace(max_context=2 * CONTEXT),
        hardware,
        engine,
        CHIPS,
        objective="tpot" if budget is None else "throughput",
        workload=Workload(isl=CONTEXT, osl=2, concurrency=batch, schedule="static", weights="int4", kv_cache="fp8"),
        limits=Limits(tpot=budget),
        filters=Filters(pp=(1, 2, 4), cp=(1,), ffn=("1d",), prefill_ffn=("1d",)),
    )


def of_each_kind(results: Results, column: str, sign: int) -> Best:
    """(plan, value) of the plan of each kind with the least value times `sign`."""
    apart = np.array([Plan.parse(label).sharding.sequence > 1 for label in results["plan"]])
    found: list[tuple[str, float] | None] = []
    for kind in (False, True):
        rows = np.flatnonzero(apart == kind)
        row = rows[np.argmin(sign * results[column][rows].astype(float))] if len(rows) else None
        found.append(None if row is None else (str(results["plan"][row]), float(results[column][row])))
    return Best(found[0], found[1])


def fastest(model: str, batch: int, overlap: bool = True) -> Best:
    """ms of a token at a batch."""
    try:
        return of_each_kind(rank(question(model, batch, overlap=overlap)).results, "tpot_ms", 1)
    except NoPlanError:
        return Best(None, None)


def largest(model: str, budget: float, overlap: bool = True) -> Best:
    """Requests in flight within a time of a token (seconds)."""
    every, _ = tradeoff(question(model, budget=budget, overlap=overlap))
    return of_each_kind(every, "concurrency", -1)


def main() -> None:
    """Prints both tables for both models."""
    for model in MODELS:
        print(f"{model}: ms of a token\nbatch  without                     by tokens                   gain")
        for batch in BATCHES:
            _line(f"{batch:>5}", fastest(model, batch), smaller=True)
        alone = fastest(model, 1).without
        assert alone is not None
        print("requests in flight\n   ms  without                     by tokens                   gain")
        for slack in SLACK:
            budget = alone[1] * slack
            _line(f"{budget:>5.1f}", largest(model, budget * 1e-3), smaller=False)


def _line(head: str, best: Best, *, smaller: bool) -> None:
    texts = [f"{pair[1]:>6.4g} {pair[0]:<20}" if pair else f"{'-':>6} {'':<20}" for pair in best]
    gain = ""
    if best.without and best.by_tokens:
        ratio = best.by_tokens[1] / best.without[1]
        gain = f"{1 / ratio if smaller else ratio:.2f}"
    print(head, *texts, gain, sep="  ", flush=True)


if __name__ == "__main__":
    main()
