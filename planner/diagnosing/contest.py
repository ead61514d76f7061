"""The contest: plans whose chips share a sequence beside plans that keep it whole, priced by the passes of the engine.

Every plan of one replica on at most the request's chips, on one pipeline stage: its prompt, or its decode step, at all
lengths at once. Chips may share a prompt (`cp`), and a request's cache may lie by tokens on any ranks here, whether or
not the engine can: what is asked is what that would be worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Pass, causal_pairs
from planner.costs.rows import Rows
from planner.costs.serving import Fit, Setting, fit, replica_of
from planner.costs.step import pass_time
from planner.errors import NoPlanError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.sharding import WORDS
from planner.plans.space import Filters, enumerate_plans
from planner.pricing import by_structure, with_kernels
from planner.request import Request
from planner.specs.engine import PROMPT_CONTEXT

Phase = Literal["prefill", "decode"]
Array = NDArray[np.float64]
WAYS = {"heads": "heads", "tokens": "tokens", "layers": "layers"}
FURTHEST_CHIPS = 1024
"""Chips up to which a way to make a request fit is looked for."""


class Entry(NamedTuple):
    """A plan at several lengths."""

    label: str
    cut: bool
    """Whether its chips share the sequence of a request."""
    chips: int
    seconds: Array
    """[lengths] of the prompt, or of one decode step."""
    fits: NDArray[np.bool_]
    """[lengths] whether weights, the cache of the batch and what the engine keeps find room."""


def contest(request: Request, phase: Phase, lengths: Sequence[int], batch: int = 1) -> list[Entry]:
    """Every plan at every length.

    Args:
        request: model, machine, engine, formats.
        phase: a prompt alone, or one decode step of `batch` requests.
        lengths: tokens of the prompt, or of each request's context.
        batch: requests that decode together.
    """
    found = []
    for setting, plans in _grouped(request, phase):
        rows = _rows(plans, lengths, 1 if phase == "prefill" else batch)
        replica, work = replica_of(setting, rows), prompt(setting, rows.isl)
        if phase == "decode":
            work = Pass(rows.concurrency, rows.isl)
        seconds = np.broadcast_to(pass_time(replica, work).whole.total, rows.tp.shape).reshape(len(plans), -1)
        fits = holds(setting, rows).reshape(len(plans), -1)
        found += [
            Entry(plan.label, along(plan), plan.chips, seconds[place], fits[place]) for place, plan in enumerate(plans)
        ]
    return found


def plain(label: str) -> bool:
    """Whether a label is tensor parallelism alone."""
    return Plan.parse(label) == Plan(Plan.parse(label).tp)


def along(plan: Plan) -> bool:
    """Whether a plan's chips share the sequence of a request, its prompt or its cache."""
    return plan.cp > 1 or plan.sharding.sequence > 1


def best(found: Sequence[Entry], place: int, cut: bool) -> Entry | None:
    """The fastest that fits at a length, of those that cut the sequence or of those that do not."""
    kept = [each for each in found if each.fits[place] and each.cut == cut]
    return min(kept, key=lambda each: (float(each.seconds[place]), each.chips, each.label), default=None)


def prompt(setting: Setting, tokens: Array) -> Pass:
    """The pass of one prompt alone, whole."""
    window = setting.model.attention.window
    near = causal_pairs(tokens, window) if window is not None else 0.0
    none = np.zeros_like(tokens)
    return Pass(
        none, none, prefill_tokens=tokens, prefill_pairs=causal_pairs(tokens), prompts=1.0, prompts_ended=1.0,
        window_pairs=near,
    )  # fmt: skip


def holds(setting: Setting, rows: Rows) -> NDArray[np.bool_]:
    """Whether each row's requests find room."""
    return _room(setting, fit(setting, rows, clip=False), rows.concurrency)


def _room(setting: Setting, found: Fit, batch: Array) -> NDArray[np.bool_]:
    beyond = setting.budget.limit + found.outside > setting.budget.chip * (1 + 1e-9)
    return np.asarray((found.by_memory >= batch) & ~beyond)


def _rows(plans: Sequence[Plan], lengths: Sequence[int], batch: int) -> Rows:
    """[plans x lengths] rows, those of a plan together."""
    each = [plan for plan in plans for _ in lengths]
    return Rows.of_plans(each, isl=np.tile(np.array(lengths, dtype=float), len(plans)), osl=1.0, concurrency=batch)


def able(request: Request) -> Request:
    """The request under an engine that can share a prompt, and leave a cache by tokens on any ranks."""
    return request._replace(engine=request.engine._replace(decode_context="any", prompt_context=PROMPT_CONTEXT))


def candidates(request: Request, phase: Phase) -> list[Plan]:
    """Plans of one replica and stage on at most the request's chips.

    Of prompts those that keep requests together, one for each way to process them: where a cache lies afterwards is a
    matter of decoding, which is looked at with all weights over all chips.
    """
    asked, placement = able(request), _placement(request)
    filters = Filters(pp=(1,), dp=(1,), cp=() if phase == "prefill" else (1,))
    plans, _ = enumerate_plans(asked.model, asked.engine, placement, filters, asked.workload.weights)
    plans, _ = with_kernels(asked, placement, plans)
    if phase == "decode":
        return plans
    kept = [plan for plan in plans if plan.sharding.batch == 1 and (plan.cp > 1 or plan.attention in WORDS)]
    kept.sort(key=lambda plan: len(plan.label), reverse=True)
    return list({plan._replace(attention=plan.attention if plan.cp == 1 else ""): plan for plan in kept}.values())


def _grouped(request: Request, phase: Phase) -> Iterator[tuple[Setting, list[Plan]]]:
    yield from by_structure(able(request), _placement(request), candidates(request, phase))


def _placement(request: Request) -> Placement:
    return Placement.of(request.hardware, request.gpus, request.slice)


class Way(NamedTuple):
    """The fewest chips on which a request fits if its cache is divided so."""

    by: str
    """heads, tokens or layers."""
    plan: str | None
    """none = not on FURTHEST_CHIPS either."""
    chips: int


def ways(request: Request, tokens: int, batch: int) -> list[Way]:
    """How many chips have to share the cache of `batch` requests of so many tokens: by heads, by tokens, by layers.

    Weights go with it: over the same chips by heads (and by tokens), or by stages. Looked at are 1, 2, 4, 8, ... chips.
    """
    found: dict[str, Way] = {}
    chips = 1
    while chips <= FURTHEST_CHIPS and len(found) < len(WAYS):
        for by, plan in _of_ways(request, chips, tokens, batch, found):
            found.setdefault(by, Way(by, plan.label, plan.chips))
        chips *= 2
    return [found.get(by, Way(by, None, FURTHEST_CHIPS)) for by in WAYS]


def _of_ways(
    request: Request, chips: int, tokens: int, batch: int, found: dict[str, Way]
) -> Iterator[tuple[str, Plan]]:
    """(way, plan) of those not yet found that fit on exactly so many chips."""
    asked = able(request)._replace(gpus=chips, slice=None)
    try:
        placement = Placement.of(asked.hardware, chips, None)
    except NoPlanError:
        return
    model, engine, weights = asked.model, asked.engine, asked.workload.weights
    for by in WAYS:
        if by in found:
            continue
        tp, pp = (1, chips) if by == "layers" else (chips, 1)
        shape = Filters(tp=(tp,), pp=(pp,), dp=(1,), cp=(1,))
        plans, _ = enumerate_plans(model, engine, placement, shape, weights)
        plans = [plan for plan in plans if plan.sharding.batch == 1 and (by == "tokens") == along(plan)]
        for setting, alike in by_structure(asked, placement, plans):
            rows = _rows(alike, [tokens], batch)
            good = [plan for plan, fits in zip(alike, holds(setting, rows), strict=True) if fits]
            if good:
                yield by, good[0]
                break
