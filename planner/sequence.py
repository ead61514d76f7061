"""Cutting the sequence of a language model over chips: prompts in a ring, the KV of decodes by position.

Plans do not hold this dimension yet; the diagnosis asks what it would be worth. Both phases are priced by the passes of
`costs.step`, with the engine's and the hardware's constants:

* **prefill** (context parallelism, Ring Attention): each of c groups of t chips has all weights over its t chips and
  1/c of the prompt, balanced (zig-zag); keys and values go round, c - 1 hops a layer, behind 1/c of the attention each;
* **decode** (as vLLM's decode context parallelism, Helix): n = t c chips share the weights as under tensor parallelism;
  KV lies over t ways of its heads and c ways of its positions; queries are gathered over the c, outputs merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure, attention_operations, causal_pairs
from planner.costs.roofline import price_operation
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit
from planner.costs.step import Replica, pass_time
from planner.plans.placement import Placement
from planner.plans.rules import tp_allowed
from planner.pricing import setting_of
from planner.request import Request
from planner.specs.dtypes import ACTIVATION_BYTES

Phase = Literal["prefill", "decode"]


class Cut(NamedTuple):
    """Heads and weights over `tp` chips, the sequence over `cp` such groups (in decode the weights over all)."""

    tp: int
    cp: int = 1

    @property
    def chips(self) -> int:
        """In all."""
        return self.tp * self.cp

    @property
    def label(self) -> str:
        """`TP4xCP2`."""
        return f"TP{self.tp}" + (f"xCP{self.cp}" if self.cp > 1 else "")


class Timed(NamedTuple):
    """A cut at a length."""

    cut: Cut
    seconds: float
    """Of the prompt, or of one decode step."""
    fits: bool


def cuts(request: Request) -> list[Cut]:
    """Every cut of at most the request's chips that the engine's rules allow for the heads."""
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    weights = request.workload.weights
    allowed = [
        tp for tp in range(1, placement.usable + 1)
        if tp_allowed(request.model, request.engine, tp, weights) is None and placement.replicas(tp, 1)
    ]  # fmt: skip
    return [Cut(tp, cp) for tp in allowed for cp in _powers(placement.usable // tp)]


def _powers(most: int) -> Iterator[int]:
    cp = 1
    while cp <= most:
        yield cp
        cp *= 2


def replica_of(setting: Setting, tp: int) -> Replica:
    """One replica over `tp` chips, for the passes of `costs.step`."""
    one = np.ones(1, dtype=int)
    network = Network(setting.placement, setting.engine)
    return Replica(
        setting.model, setting.hardware, setting.engine, network, setting.formats, setting.structure, one * tp, one, one
    )


def prompt_pass(setting: Setting, tokens: float, cp: int = 1) -> Pass:
    """The pass of one prompt, or of a group's 1/cp of it."""
    window = setting.model.attention.window
    pairs = causal_pairs(tokens, window)
    return Pass(
        0.0, 0.0, prefill_tokens=tokens / cp, prefill_pairs=causal_pairs(tokens) / cp, prompts=1.0, prompts_ended=1.0,
        window_pairs=float(pairs) / cp if window is not None else 0.0,
    )  # fmt: skip


def timed(request: Request, phase: Phase, cut: Cut, tokens: int, batch: int = 1) -> Timed:
    """Seconds of a phase under a cut, and whether it fits: weights, KV of the batch, runtime.

    Args:
        request: model, machine, engine, formats.
        phase: prefill of one prompt, or one decode step of `batch` requests.
        cut: which.
        tokens: of the prompt, or of each request's context.
        batch: requests that decode together.
    """
    setting = setting_of(request, Placement.of(request.hardware, request.gpus, request.slice), Structure())
    if phase == "prefill":
        seconds = _prefill(setting, cut, float(tokens))
        return Timed(cut, seconds, _fits(setting, cut.tp, tokens / cut.cp, 1))
    held = tokens * _kept(setting, cut)
    return Timed(cut, _decode(setting, cut, held, batch), _fits(setting, cut.chips, held, batch))


def best(found: list[Timed], cut: bool) -> Timed | None:
    """The fastest that fits, of those that cut the sequence or of those that do not; none where none fits."""
    kept = [each for each in found if each.fits and (each.cut.cp > 1) == cut]
    return min(kept, key=lambda each: (each.seconds, each.cut.chips), default=None)


def _fits(setting: Setting, tp: int, tokens: float, batch: int) -> bool:
    """Whether a chip's share fits: as requests of so many tokens under tensor parallelism of this degree."""
    rows = Rows.of(tp=tp, pp=1, dp=1, isl=max(1.0, np.ceil(tokens)), osl=1, concurrency=batch)
    found = fit(setting, rows, clip=False)
    beyond = setting.budget.limit + found.outside > setting.budget.chip * (1 + 1e-9)
    return bool((found.by_memory[0] >= batch) & ~beyond[0])


def _kept(setting: Setting, cut: Cut) -> float:
    """Share of a context that a chip keeps, in units of what it keeps under tensor parallelism of all its chips.

    Beyond the KV heads tensor parallelism keeps copies: there cutting positions saves, and nowhere else.
    """
    kv = setting.model.attention.kv_heads
    return max(kv / cut.tp, 1.0) / cut.cp / max(kv / cut.chips, 1.0)


def _prefill(setting: Setting, cut: Cut, tokens: float) -> float:
    replica, work = replica_of(setting, cut.tp), prompt_pass(setting, tokens, cut.cp)
    seconds = float(pass_time(replica, work).whole.total[0])
    if cut.cp == 1:
        return seconds
    model, formats = setting.model, setting.formats
    kv_heads, dim = float(np.ravel(replica.shard.kv_heads)[0]), model.attention.head_dim
    operations = attention_operations(model, replica.shard, work, formats, setting.structure)
    pattern, exposed = model.attention_pattern, 0.0
    for kind in dict.fromkeys(pattern):
        share = pattern.count(kind) / len(pattern)
        window = model.attention.window if kind == "window" else None
        chunk = tokens / cut.cp
        hops = cut.cp - 1 if window is None else min(cut.cp - 1, int(np.ceil((window - 1) / chunk)))
        moved = 2 * kv_heads * dim * formats.kv.bytes * (chunk if window is None else min(chunk, window - 1.0))
        hop = replica.network.neighbours(moved, cut.tp, cut.cp)
        name = "attention (prefill)" if window is None else "window attention (prefill)"
        whole = next(each for each in operations if each.name == name)
        piece = price_operation(setting.hardware, whole._replace(times=1, flops=whole.flops / cut.cp))
        behind = float(np.ravel(piece.total)[0])
        exposed += share * hops * max(0.0, hop - behind)
    return seconds + model.layers * exposed


def _decode(setting: Setting, cut: Cut, held: float, batch: int) -> float:
    replica = replica_of(setting, cut.chips)
    seconds = float(pass_time(replica, Pass(float(batch), held)).whole.total[0])
    if cut.cp == 1:
        return seconds
    heads = -(-setting.model.attention.heads // cut.tp)
    query = batch * heads * setting.model.attention.head_dim * ACTIVATION_BYTES
    scales = batch * heads * cut.cp * 4.0
    network = replica.network
    gathered = float(network.seconds("all_gather", cut.cp, query + scales))
    merged = float(network.seconds("reduce_scatter", cut.cp, query))
    return seconds + setting.model.layers * (gathered + merged)
