"""The diagnosis of a language model: a prompt, and a decode step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.costs.layers import Pass, Structure, count
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit
from planner.costs.step import pass_time
from planner.diagnosing.framework import (
    Check,
    Dependency,
    Diagnosis,
    Length,
    Spot,
    Verdict,
    half_message,
    least_block,
    message_check,
    number,
    precision_check,
    reach_word,
    spot,
)
from planner.errors import InputError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal
from planner.pricing import setting_of
from planner.request import Request, check
from planner.sequence import Phase, Timed, best, cuts, prompt_pass, replica_of, timed
from planner.units import GIB, MS

LENGTHS = (1024, 4096, 16384, 65536, 131072, 262144, 524288, 1048576)
"""Tokens, up to the model's own context, what is asked, or FURTHEST."""
FURTHEST = 131072
"""Tokens up to which a cut is asked for whatever the model was trained on."""


def diagnose(request: Request) -> Diagnosis:
    """The diagnosis of a language model.

    Raises:
        InputError: the request makes no sense, or the model's layers are not priced yet.
        NoPlanError: fewer chips than the smallest slice.
    """
    model, engine, work = request.model, request.engine, request.workload
    isl, osl = int(work.isl), int(work.osl)
    longest = max(model.max_context, FURTHEST, isl + osl)
    request = request._replace(workload=work._replace(max_context=work.max_context or isl + osl))
    check(request)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    for what, present in (("experts", model.experts), ("latent attention", model.attention.latent)):
        if present is not None:  # `planner.sequence` counts dense layers with plain attention
            raise InputError(
                f"plan diagnose: {model.name} has {what}, whose cuts along the sequence are not priced yet"
            )
    reason = refusal(model, engine, placement, Plan(), work.weights)
    if reason is not None and "not priced" in reason:
        raise InputError(f"plan diagnose: {reason}")
    batch = work.concurrency or 1
    context = isl + osl // 2
    spots = (_prefill_spot(request, isl), _decode_spot(request, context, batch))
    return Diagnosis(
        model.name, request.hardware, f"{engine.name} {engine.version}", request.gpus,
        f"{isl} tokens in, {osl} out, {batch} at once", spots,
        (_reach(request, "prefill", isl), _reach(request, "decode", context)),
        tuple(_verdict(request, phase, asked, longest, batch)
              for phase, asked in (("prefill", isl), ("decode", context))),
        tuple(_checks(request, spots, context, batch)),
    )  # fmt: skip


def _smallest(request: Request, tokens: int, batch: int, phase: Phase) -> tuple[int, float]:
    """(fewest chips of one tensor-parallel group that hold a phase, share of the memory beside weights that KV takes).

    Where none holds it, the most chips that may be.
    """
    own = [cut for cut in cuts(request) if cut.cp == 1]
    timings = [timed(request, phase, cut, tokens, batch) for cut in own]
    chosen = next((each.cut.tp for each in timings if each.fits), own[-1].tp)
    setting = _setting(request)
    rows = Rows.of(tp=chosen, pp=1, dp=1, isl=tokens, osl=1, concurrency=batch)
    found = fit(setting, rows, clip=False)
    left = setting.budget.limit - number(found.weights + found.other)
    most = max(1.0, number(found.by_memory))
    filled = batch / most if number(found.by_memory) >= 1 else np.inf
    return chosen, float(filled) if left > 0 else np.inf


def _prefill_spot(request: Request, tokens: int) -> Spot:
    tp, filled = _smallest(request, tokens, 1, "prefill")
    setting = _setting(request)
    return _spot_of(request, "prefill", tp, prompt_pass(setting, float(tokens)), float(tokens), filled)


def _decode_spot(request: Request, context: int, batch: int) -> Spot:
    tp, filled = _smallest(request, context, batch, "decode")
    return _spot_of(request, "decode step", tp, Pass(float(batch), float(context)), float(batch), filled)


def _spot_of(request: Request, phase: str, tp: int, work: Pass, tokens: float, filled: float) -> Spot:
    setting = _setting(request)
    replica = replica_of(setting, tp)
    operations, _ = count(request.model, request.engine, replica.shard, work, setting.formats, setting.structure)
    layers = request.model.layers
    often = [(each, float(layers) if each.place == "layer" else 1.0) for each in operations]
    seconds = number(pass_time(replica, work).whole.total)
    return spot(request.hardware, phase, f"TP{tp}", tokens, often, seconds, filled)


def _reach(request: Request, phase: str, tokens: int) -> Dependency:
    """The share of what is before it that the last token looks at, and how the phase's tokens become known."""
    pattern, window = request.model.attention_pattern, request.model.attention.window
    seen = [
        0.0 if kind == "linear" else min(1.0, window / tokens) if kind == "window" and window else 1.0
        for kind in pattern
    ]
    share = sum(seen) / len(seen)
    if phase == "prefill":
        return Dependency(
            phase, share, reach_word(share), "possible", "all tokens are known; causal, so cut in zig-zag"
        )
    return Dependency(
        phase, share, reach_word(share), "hard", "each token needs the one before; only its KV can be cut"
    )


def _verdict(request: Request, phase: str, asked: int, longest: int, batch: int) -> Verdict:
    own: Phase = "prefill" if phase == "prefill" else "decode"
    values = sorted({*(each for each in LENGTHS if each <= longest), asked})
    every = cuts(request)
    lengths = [_length(tokens, [timed(request, own, cut, tokens, batch) for cut in every]) for tokens in values]
    return Verdict(phase, "tokens", tuple(lengths), next(each for each in lengths if each.length == asked))


def _length(length: int, found: Sequence[Timed]) -> Length:
    whole, cut = best(list(found), False), best(list(found), True)
    return Length(
        length,
        None if whole is None else (whole.cut.label, whole.seconds),
        None if cut is None else (cut.cut.label, cut.seconds),
    )


def _checks(request: Request, spots: Sequence[Spot], context: int, batch: int) -> Iterator[Check]:
    model, hardware = request.model, request.hardware
    setting = _setting(request)
    tp = int(spots[1].plan[2:])
    each = model.kv_elements_per_token * setting.formats.kv.bytes
    now, later = (
        number(pass_time(replica_of(setting, tp), Pass(float(batch), float(tokens))).whole.total)
        for tokens in (context, context + 1000)
    )
    held = each * context * batch * _reach(request, "decode", context).share  # windows keep no more
    yield Check(
        "KV cost",
        (("KV of a token", each, "B"), ("a step more for 1,000 tokens", (later - now) / MS, "ms"),
         ("of a step", (later - now) / now, "share"), ("KV held", held / GIB, "GiB")),
        f"a token adds {each / 1024:.3g} KiB; 1,000 tokens of context slow a step by {(later - now) / MS:.3g} ms "
        f"({(later - now) / now:.1%}); {batch} x {context} tokens hold {held / GIB:.3g} GiB, "
        f"{held / hardware.chip.memory_bytes:.2f} chips' worth",
    )  # fmt: skip
    reach = _reach(request, "prefill", context)
    yield Check(
        "dependencies", (("share of the sequence seen", reach.share, "share"),),
        f"a token looks at {reach.share:.0%} of {context} tokens ({reach.range}): layers are "
        f"{', '.join(dict.fromkeys(model.attention_pattern))}",
    )  # fmt: skip
    group = model.attention.heads / model.attention.kv_heads
    blocks = [(level.name, least_block(hardware, place, group)) for place, level in enumerate(hardware.network)]
    yield Check(
        "topology", tuple((f"least block over {name}", block, "tokens") for name, block in blocks),
        "a ring hides behind attention in blocks of at least "
        + ", ".join(f"{block:,.0f} tokens over {name}" for name, block in blocks),
    )  # fmt: skip
    yield precision_check(now, number(_int4(request, tp, float(context), batch)), model.weights, "a decode step")
    size = (
        2
        * model.attention.kv_heads
        * model.attention.head_dim
        * setting.formats.kv.bytes
        * int(request.workload.isl)
        / 2
    )
    yield message_check(
        half_message(replica_of(setting, 1).network.send), size, model.layers, "the KV of half a prompt, a layer"
    )


def _int4(request: Request, tp: int, context: float, batch: int) -> object:
    work = request.workload._replace(weights="int4")
    changed = request._replace(workload=work)
    setting = _setting(changed)
    return pass_time(replica_of(setting, tp), Pass(float(batch), context)).whole.total


def _setting(request: Request) -> Setting:
    return setting_of(request, Placement.of(request.hardware, request.gpus, request.slice), Structure())
