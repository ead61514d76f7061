"""The diagnosis of a language model: a prompt, and a decode step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from planner.costs.layers import Operation, Pass, Structure
from planner.costs.roofline import Parts
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit, replica_of
from planner.costs.step import pass_time
from planner.diagnosing.contest import FURTHEST_CHIPS, Entry, Phase, best, contest, plain, prompt, ways
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
    stored_otherwise,
)
from planner.errors import InputError
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal, shape_refusal
from planner.pricing import setting_of
from planner.request import Request, check
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.specs.model import Model
from planner.units import GIB, MS

LENGTHS = (1024, 4096, 16384, 65536, 131072, 262144, 524288, 1048576)
"""Tokens, up to the model's own context, what is asked, or FURTHEST."""
FURTHEST = 131072
"""Tokens up to which a cut is asked for whatever the model was trained on."""


class _Contests(NamedTuple):
    """Both phases at every length."""

    lengths: dict[Phase, list[int]]
    entries: dict[Phase, list[Entry]]
    asked: dict[Phase, int]
    batch: int

    @property
    def context(self) -> int:
        """Of a decode step: the mean over an answer."""
        return self.asked["decode"]


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
    reason = refusal(model, engine, placement, Plan(), work.weights)
    if reason is not None and "not priced" in reason:
        raise InputError(f"plan diagnose: {reason}")
    found = _contests(request, isl, osl, longest)
    spots = (_prefill_spot(request, found), _decode_spot(request, found))
    return Diagnosis(
        model.name, request.hardware, f"{engine.name} {engine.version}", request.gpus,
        f"{isl} tokens in, {osl} out, {found.batch} at once", spots,
        (_reach(request, "prefill", isl), _reach(request, "decode", found.context)),
        (_verdict(request, found, "prefill"), _verdict(request, found, "decode")),
        tuple(_checks(request, spots, found)),
    )  # fmt: skip


def _contests(request: Request, isl: int, osl: int, longest: int) -> _Contests:
    asked: dict[Phase, int] = {"prefill": isl, "decode": isl + osl // 2}
    batch = request.workload.concurrency or 1
    lengths = {
        phase: sorted({*(each for each in LENGTHS if each <= longest), tokens}) for phase, tokens in asked.items()
    }
    entries = {phase: contest(request, phase, values, batch) for phase, values in lengths.items()}
    return _Contests(lengths, entries, asked, batch)


def _smallest(request: Request, found: _Contests, phase: Phase) -> tuple[int, float]:
    """(fewest chips of one tensor-parallel group that hold a phase, share of the memory beside weights that KV takes).

    Where none holds it, the most chips that may be.
    """
    place, tokens = found.lengths[phase].index(found.asked[phase]), found.asked[phase]
    batch = 1 if phase == "prefill" else found.batch
    own = sorted((each for each in found.entries[phase] if plain(each.label)), key=lambda each: each.chips)
    chosen = next((each.chips for each in own if each.fits[place]), own[-1].chips)
    setting = _setting(request)
    rows = Rows.of(tp=chosen, pp=1, dp=1, isl=tokens, osl=1, concurrency=batch)
    room = fit(setting, rows, clip=False)
    left = setting.budget.limit - number(room.weights + room.other)
    most = max(1.0, number(room.by_memory))
    filled = batch / most if number(room.by_memory) >= 1 else np.inf
    return chosen, float(filled) if left > 0 else np.inf


def _prefill_spot(request: Request, found: _Contests) -> Spot:
    tp, filled = _smallest(request, found, "prefill")
    tokens = float(found.asked["prefill"])
    return _spot_of(request, "prefill", tp, prompt(_setting(request), np.array([tokens])), tokens, filled)


def _decode_spot(request: Request, found: _Contests) -> Spot:
    tp, filled = _smallest(request, found, "decode")
    work = Pass(float(found.batch), float(found.context))
    return _spot_of(request, "decode step", tp, work, float(found.batch), filled)


def _spot_of(request: Request, phase: str, tp: int, work: Pass, tokens: float, filled: float) -> Spot:
    replica = replica_of(_setting(request), _group(tp))
    often: list[tuple[Operation, float]] = []
    for index, (experts, counts) in enumerate(replica.layer_counts):
        operations, _ = replica.count(work, experts)
        layers = number(counts[0])
        often += [(each, layers if each.place == "layer" else 1.0) for each in operations
                  if each.place == "layer" or index == 0]  # fmt: skip
    seconds = number(pass_time(replica, work).whole.total)
    return spot(request.hardware, phase, f"TP{tp}", tokens, often, seconds, filled)


def _group(tp: int) -> Rows:
    """One replica over `tp` chips."""
    return Rows.of(tp=tp, pp=1, dp=1, isl=1.0, osl=1.0, concurrency=1.0)


def _step(request: Request, tp: int, batch: int, context: float) -> Parts:
    """A decode step over `tp` chips."""
    return pass_time(replica_of(_setting(request), _group(tp)), Pass(float(batch), context)).whole


def _reach(request: Request, phase: str, tokens: int) -> Dependency:
    """The share of what is before it that a late token looks at, and how the phase's tokens become known."""
    attention, pattern = request.model.attention, request.model.attention_pattern
    window = attention.window or tokens
    near = min(1.0, (window + 1) / 2 / tokens if attention.blocks else window / tokens)  # of a block half, on average
    local = pattern.count("window") / len(pattern)
    share = local * near + pattern.count("full") / len(pattern)
    kind = f"in blocks of {window:,} tokens" if attention.blocks else f"over a sliding window of {window:,} tokens"
    words = f"{local:.0%} of the layers {kind}, the others full" if 0 < local < 1 else kind if local else "full"
    if phase == "decode":
        return Dependency(
            phase, share, reach_word(share), "hard",
            f"causal, {words}; each token needs the one before: only its KV can be cut",
        )  # fmt: skip
    apart = attention.blocks and local == 1
    how = "blocks know nothing of each other" if apart else "so cut in zig-zag"
    return Dependency(
        phase, share, reach_word(share), "natural" if apart else "possible",
        f"causal, {words}; all tokens are known, {how}",
    )  # fmt: skip


def _verdict(request: Request, found: _Contests, phase: Phase) -> Verdict:
    lengths = tuple(
        Length(
            tokens,
            *(
                None if (first := best(found.entries[phase], place, cut)) is None
                else (first.label, float(first.seconds[place]))
                for cut in (False, True)
            ),
        )
        for place, tokens in enumerate(found.lengths[phase])
    )  # fmt: skip
    asked = next(each for each in lengths if each.length == found.asked[phase])
    refused = None
    if asked.cut is not None:
        plan = Plan.parse(asked.cut[0])
        refused = shape_refusal(request.model, request.engine, plan, request.workload.weights)
    return Verdict(phase, "tokens", lengths, asked, refused)


def _checks(request: Request, spots: Sequence[Spot], found: _Contests) -> Iterator[Check]:
    model, hardware, context, batch = request.model, request.hardware, found.context, found.batch
    setting = _setting(request)
    tp = int(spots[1].plan[2:])
    each = model.kv_elements_per_token * setting.formats.kv.bytes
    now, later = (number(_step(request, tp, batch, float(tokens)).total) for tokens in (context, context + 1000))
    held = each * context * batch * _reach(request, "decode", context).share  # windows keep no more
    yield Check(
        "KV cost",
        (("KV of a token", each, "B"), ("a step more for 1,000 tokens", (later - now) / MS, "ms"),
         ("of a step", (later - now) / now, "share"), ("KV held", held / GIB, "GiB")),
        f"a token adds {each / 1024:.3g} KiB; 1,000 tokens of context slow a step by {(later - now) / MS:.3g} ms "
        f"({(later - now) / now:.1%}); {batch} x {context} tokens hold {held / GIB:.3g} GiB, "
        f"{held / hardware.chip.memory_bytes:.2f} chips' worth",
    )  # fmt: skip
    yield _room_check(request, context, batch)
    reach = _reach(request, "prefill", context)
    yield Check(
        "dependencies", (("share of the sequence seen", reach.share, "share"),),
        f"a token looks at {reach.share:.0%} of {context} tokens ({reach.range}): {reach.why}",
    )  # fmt: skip
    blocks = [(level.name, least_block(hardware, place, _reuse(model))) for place, level in enumerate(hardware.network)]
    yield Check(
        "topology", tuple((f"least block over {name}", block, "tokens") for name, block in blocks),
        "a ring hides behind attention in blocks of at least "
        + ", ".join(f"{block:,.0f} tokens over {name}" for name, block in blocks),
    )  # fmt: skip
    weights = setting.formats.weights
    others = {}
    for name in stored_otherwise(weights.name):
        asked = request._replace(workload=request.workload._replace(weights=name))
        others[name] = number(_step(asked, tp, batch, float(context)).total)
    yield precision_check(now, others, weights.name, "a decode step")
    size = model.cached_elements * setting.formats.kv.bytes * int(request.workload.isl) / 2
    send = replica_of(setting, _group(1)).network.send
    yield message_check(half_message(send), size, model.layers, "the KV of half a prompt, a layer")


def _room_check(request: Request, context: int, batch: int) -> Check:
    """Over how many chips the cache has to lie for the requests to fit at all: by heads, by tokens, by layers."""
    attention, found = request.model.attention, ways(request, context, batch)
    what = f"{batch} x {context} tokens and the weights"
    if any(each.plan and each.chips == 1 for each in found):
        says = f"{what} fit on one chip: nothing has to be divided"
    elif not any(each.plan for each in found):
        says = f"{what} fit on no {FURTHEST_CHIPS} chips, however they are divided"
    else:
        can = [f"by {each.by} over {each.chips} ({each.plan})" for each in found if each.plan]
        cannot = [f"by {each.by} on no number" for each in found if not each.plan]
        heads = f"{attention.kv_heads} KV heads go over {attention.kv_heads} chips"
        heads = "one latent serves all heads" if attention.latent else heads
        says = (
            f"{what} fit on no single chip, but divided {', '.join([*can, *cannot])}; {heads}, beyond that only tokens"
        )
        says += " and layers divide the cache further"
    return Check("room", tuple((f"chips, by {each.by}", each.chips, "") for each in found if each.plan), says)


def _reuse(model: Model) -> float:
    """FLOPs on a block against those on as many bytes of plain heads, all pairs: what lets a ring's blocks be shorter.

    A causal mask leaves half of the pairs of each block, dealt in zig-zag (`costs.context`).
    """
    attention = model.attention
    if attention.latent is None:
        return attention.heads / attention.kv_heads / 2
    latent = attention.latent
    flops = 2 * attention.heads * (latent.nope_dim + latent.rope_dim + latent.value_dim)
    return flops / (latent.cached * ACTIVATION_BYTES) / 2


def _setting(request: Request) -> Setting:
    return setting_of(request, Placement.of(request.hardware, request.gpus, request.slice), Structure())
