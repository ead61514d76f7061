"""Start-ups of engines, as logged and reported, against the memory model and the rules.

Each case is priced as it was run: its model, engine version, formats, split and budget; nothing is taken from its log
but what a check names. A case that lacks what a check needs is not part of that check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.costs.memory import Budget
from planner.evidence.comparison import Comparison, once
from planner.plans.plan import Plan
from planner.specs.catalog import load_engine
from planner.specs.measurements import measured_model, measurements
from planner.startup import Start
from planner.units import GIB

Row = dict[str, str]
ANY_CHIP = 1024.0
"""GiB taken where no chip is named and none is needed."""


class Verdict(NamedTuple):
    """Whether one case starts."""

    case: str
    what: str
    ran: bool
    reason: str
    """What stopped it; empty if it ran."""
    refusal: str | None
    """What the planner says."""
    decidable: bool
    """Whether the memory model and the rules of one plan decide it at all."""

    @property
    def right(self) -> bool:
        """Refused where it did not start, for that reason, and not where it did."""
        if self.ran:
            return self.refusal is None
        words = _WORDS.get(self.reason, (self.reason,))
        return self.refusal is not None and any(word in self.refusal for word in words)

    @property
    def open_question(self) -> str:
        """What keeps the case from being decided."""
        return self.reason if self.reason in _OUTSIDE else "the chip's memory is not stated"


_WORDS = {
    "weights": ("exceed the", "a request of"),  # either way there is no room beside them
    "context": ("a request of", "exceed the"),
    "query heads": ("query heads",),
    "KV heads": ("KV heads",),
    "vocabulary": ("vocabulary", "KV heads"),  # where both break, either is a true reason
    "quantisation": ("no multiple of",),
    "experts": ("experts",),
    "chips": ("takes",),
}
_OUTSIDE = ("two servers on one node", "sampler after start-up", "attention over requests")
"""Reasons that neither the memory of one server nor the shape of a plan decides."""


def start_of(row: Row) -> Start | None:
    """The start of a case, or none where its model, split or engine is not stated or not modelled."""
    if not (row["model"] and row["tp"] and row["constants"]):
        return None
    model = measured_model(row["model"])
    engine = load_engine(row["constants"])
    chip = float(row["chip_memory_gib"] or ANY_CHIP) * GIB
    fraction = float(row["memory_fraction"] or engine.memory.fraction)
    plan = Plan(int(row["tp"]), int(row["pp"]), int(row["dp"]))
    context = int(row["context"]) if row["context"] else None
    if row["block_tokens"]:
        engine = engine._replace(scheduler=engine.scheduler._replace(block_tokens=int(row["block_tokens"])))
    if context is not None and context > model.max_context:  # overridden by who ran it
        model = model._replace(max_context=context)
    weights, kv_cache = row["weights"] or None, row["kv_cache"] or None
    return Start.of(model, engine, plan, Budget(fraction * chip, chip), weights=weights, kv_cache=kv_cache,
                    context=context)  # fmt: skip


@once
def comparisons(rows: Iterable[Row] | None = None) -> list[Comparison]:
    """Every quantity that a case states and the model predicts."""
    found = []
    for row in measurements("memory") if rows is None else rows:
        start = start_of(row)
        if start is None:
            continue
        for check, observe in _CHECKS.items():
            if row["confidence"] != "read" and observe is not _needed:
                continue  # the model itself was inferred from its figures
            pair = observe(row, start)
            if pair is not None:
                found.append(
                    Comparison(
                        check, row["case"], _what(row), *pair, hardware=row["chip"], engine=row["engine"],
                        model=row["model"], source=row["source"],
                    )
                )  # fmt: skip
    return found


@once
def verdicts(rows: Iterable[Row] | None = None) -> list[Verdict]:
    """Every case whose model and split are known: does it start?"""
    found = []
    for row in measurements("memory") if rows is None else rows:
        start = start_of(row)
        if start is None:
            continue
        ran = row["outcome"] == "ran"
        known = bool(row["chip_memory_gib"]) or row["outcome"] == "refused"
        gpus = int(row["gpus"]) if row["gpus"] else None
        decidable = known and row["reason"] not in _OUTSIDE
        if ran and not row["context"]:  # that it started says that some context fits
            start = start._replace(context=start.engine.scheduler.block_tokens)
        found.append(Verdict(row["case"], _what(row), ran, row["reason"], start.refusal(gpus), decidable))
    return found


def _what(row: Row) -> str:
    degrees = Plan(int(row["tp"]), int(row["pp"]), int(row["dp"])).label
    return f"{row['repository']} {degrees}, {row['engine']} {row['engine_version']}".strip()


Pair = tuple[float, float] | None


def _weights(row: Row, start: Start) -> Pair:
    if not row["weights_gib"] or not row["weights"]:
        return None
    return float(row["weights_gib"]), float(start.room.weights[0]) / GIB  # rank 0 logs: the first stage


def _tokens(row: Row, start: Start) -> Pair:
    """Tokens that the logged KV memory holds."""
    if not (row["kv_gib"] and float(row["kv_gib"]) > 0 and (row["kv_tokens"] or row["kv_blocks"])):
        return None
    if int(row["pp"]) > 1:  # the log's memory is rank 0's, its tokens those of the fullest stage
        return None
    grouped = start.model.attention.window is not None
    if row["kv_tokens"]:
        observed = float(row["kv_tokens"])
    elif grouped:
        return None  # blocks of groups, not of tokens
    else:
        observed = float(row["kv_blocks"]) * int(row["block_tokens"] or 16)
    block = start.engine.scheduler.block_tokens
    if not row["block_tokens"]:
        block = 1
    tokens = float(row["kv_gib"]) * GIB / float(start.room.kv_token[0])
    return observed, tokens // block * block


def _kv(row: Row, start: Start) -> Pair:
    """KV memory of the chip with least room, end to end."""
    stated = row["chip_memory_gib"] and row["memory_fraction"] and row["kv_gib"]
    fitted = start.engine.memory.provenance.status == "fitted"
    if not (stated and fitted and float(row["kv_gib"]) > 0 and row["outcome"] == "ran"):
        return None
    free = start.room.free
    return float(row["kv_gib"]), float(free[2] if int(row["pp"]) > 1 else free[0]) / GIB


def _needed(row: Row, start: Start) -> Pair:
    """KV that the engine says one request of the whole context needs: of all stages together."""
    if not row["needed_gib"]:
        return None
    return float(row["needed_gib"]), round(sum(start.request_bytes) / GIB, 2)


_CHECKS: dict[str, Callable[[Row, Start], Pair]] = {
    "weights per chip": _weights,
    "KV tokens from logged memory": _tokens,
    "KV memory end to end": _kv,
    "KV needed for the whole context": _needed,
}
