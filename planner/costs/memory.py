"""Memory: what the fullest chip holds, and how many tokens and requests fit. Decides feasibility before any price."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.layers import Formats, Structure
from planner.costs.layouts import GATHERED, Split, used_elements
from planner.costs.weights import (
    Num,
    Shard,
    Stages,
    Trio,
    layer_weights,
    prediction_elements,
    stage_layers,
    stage_weight_bytes,
)
from planner.errors import InputError
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.units import GIB

PLAIN_BYTES = 2.0
STATE_BYTES = 4.0  # engines keep recurrent states in fp32 where the model does not say otherwise


class Budget(NamedTuple):
    """Bytes a chip gives to weights, KV and the runtime inside the engine's budget."""

    limit: float
    chip: float

    @classmethod
    def of(
        cls, hardware: Hardware, engine: Engine, limit: float | None = None, fraction: float | None = None
    ) -> Budget:
        """The engine's fraction of the chip, another fraction, or a limit in bytes.

        Raises:
            InputError: more than the chip has, or a fraction that is none.
        """
        chip = hardware.chip.memory_bytes
        if fraction is not None and not 0 < fraction <= 1:
            raise InputError(f"memory_fraction must be above 0 and at most 1, found {fraction:g}")
        if limit is not None and limit > chip:
            has = f"{hardware.name} has {hardware.chip.memory_gib:g} GiB per chip"
            raise InputError(f"memory_limit {limit / GIB:.6g}GiB: {has}")
        return cls(limit if limit is not None else chip * (fraction or engine.memory.fraction), chip)


class Pages(NamedTuple):
    """KV of one pipeline stage on a chip that holds it."""

    full: Num
    """Bytes a token takes in the layers that keep all tokens."""
    window: Num
    """Bytes a token takes in the layers with a sliding window."""
    state: Num
    """Bytes a request takes in the layers whose state does not grow."""

    @property
    def token(self) -> Num:
        """Bytes of a token that every layer keeps."""
        return self.full + self.window

    def request(self, tokens: Num, kept: Num) -> Num:
        """Bytes of a request of `tokens` tokens, of which windowed layers keep `kept`."""
        return self.full * tokens + self.window * kept + self.state


class Room(NamedTuple):
    """Memory of a replica's chips before any request runs.

    Tuples hold the first, the fullest middle and the last pipeline stage; a stage that does not exist holds nothing.
    """

    weights: Trio
    """Bytes per chip."""
    tables: Trio
    """Bytes among the weights that are no parameters: rotary tables and copies of latent projections."""
    pages: tuple[Pages, Pages, Pages]
    other: Trio
    """Bytes of activations and runtime inside the budget."""
    runtime: Num
    """... of which the runtime."""
    outside: Num
    """Bytes of context, graphs and buffers outside the budget."""
    holders: Num
    """Groups of chips of a stage that share out the requests: 1 where every chip holds a part of each (attention over
    heads), more with data-parallel attention, each chip by itself over the batch."""
    limit: float
    block: int
    window: float
    """Tokens that the engine keeps in windowed layers, in whole blocks; infinite = all."""
    window_extra: int
    """... and tokens more, whatever the context."""

    @property
    def free(self) -> Trio:
        """Bytes for KV per chip."""
        left = (np.maximum(0.0, self.limit - w - o) for w, o in zip(self.weights, self.other, strict=True))
        first, middle, last = left
        return first, middle, last

    @property
    def kv_token(self) -> Trio:
        """Bytes that a token takes in every layer of a chip that holds it."""
        first, middle, last = (pages.token for pages in self.pages)
        return first, middle, last

    @property
    def chip_tokens(self) -> Num:
        """Tokens that one chip can hold in every layer beside the rest, in whole blocks, the least over the stages."""
        tokens: Num = np.inf
        for free, each in zip(self.free, self.kv_token, strict=True):
            tokens = np.minimum(tokens, _ratio(free, each))
        return np.floor(tokens / self.block * (1 + 1e-12)) * self.block

    @property
    def capacity_tokens(self) -> Num:
        """Distinct tokens that a replica can hold."""
        return self.holders * self.chip_tokens

    def request_bytes(self, tokens: Num) -> Trio:
        """Bytes of KV that a request of `tokens` tokens (whole blocks) takes on a chip that holds it."""
        kept = np.minimum(tokens, self.window) + self.window_extra
        first, middle, last = (pages.request(tokens, kept) for pages in self.pages)
        return first, middle, last

    def concurrency(self, tokens: Num) -> Num:
        """How many times a request of `tokens` tokens fits on a chip: not rounded, as engines log it."""
        times: Num = np.inf
        for free, needed in zip(self.free, self.request_bytes(tokens), strict=True):
            times = np.minimum(times, _ratio(free, needed))
        return times

    def requests(self, tokens: Num) -> Num:
        """Requests of `tokens` tokens each (in whole blocks) that a replica can hold."""
        return self.holders * np.floor(self.concurrency(tokens) * (1 + 1e-12))

    def fullest(self, tokens: Num, requests: Num) -> Trio:
        """(weights, KV, other) bytes of the fullest chip while `requests` hold `tokens` tokens each."""
        on_chip = np.ceil(requests / self.holders)
        kv = [needed * on_chip for needed in self.request_bytes(tokens)]
        parts = list(zip(self.weights, kv, self.other, strict=True))
        stage = np.stack(np.broadcast_arrays(*(sum(part) for part in parts))).argmax(axis=0)
        weights, held, other = (
            np.choose(stage, np.broadcast_arrays(*(part[index] for part in parts))) for index in range(3)
        )
        return weights, held, other


def _ratio(free: Num, each: Num) -> Num:
    """How often `each` goes into `free`; nothing goes in without end."""
    return np.where(each > 0, free / np.where(each > 0, each, 1.0), np.inf)


def room(
    model: Model,
    engine: Engine,
    shard: Shard,
    stages: Stages,
    formats: Formats,
    structure: Structure,
    budget: Budget,
    modules: Num = 0,
) -> Room:
    """Weights, runtime and KV room of a replica's chips, with so many of the model's prediction modules."""
    tables = table_bytes(model, engine, shard, stages)
    drafts: Num = 0.0
    if np.any(modules):
        drafts = modules * prediction_elements(model, shard).bytes(model, formats.weights)
    first, middle, last = (
        held + table + draft
        for held, table, draft in zip(
            stage_weight_bytes(model, shard, stages, formats.weights), tables, _at_end(stages, drafts), strict=True
        )
    )
    by_heads = structure.attention != "batch"
    if structure.context:
        shard = cached_share(model, shard, structure)
    window, extra = kept_window(model, engine)
    return Room(
        weights=(first, middle, last),
        tables=tables,
        pages=_pages(model, engine, shard, stages, formats, by_heads, modules),
        other=_other(model, engine, shard, stages, formats, gathered_bytes(model, shard, formats, structure)),
        runtime=_by_ranks(engine.memory.inside_gib, shard.tp),
        outside=_by_ranks(engine.memory.outside_gib, shard.tp),
        holders=_holders(shard, structure),
        limit=budget.limit,
        block=engine.scheduler.block_tokens,
        window=window,
        window_extra=extra,
    )


def cached_share(model: Model, shard: Shard, structure: Structure) -> Shard:
    """The shard with what a chip keeps of the cache where groups of context parallelism leave it.

    Whole requests of its group; a part of every request's tokens; or some of the heads of all.
    """
    if structure.cached == "sequence":
        return shard._replace(sequence=shard.attention_dp)
    if structure.cached == "heads":
        return shard._replace(cache_heads=np.maximum(1.0, np.ceil(model.attention.kv_heads / shard.tp)))
    return shard


def _holders(shard: Shard, structure: Structure) -> Num:
    """Groups of chips of a stage that share out the requests."""
    if structure.attention == "batch":
        return shard.tp
    if structure.context and structure.cached != "batch":
        return np.ones_like(np.asarray(shard.tp, dtype=float))
    return shard.tp / shard.attention_tp


def _pages(
    model: Model, engine: Engine, shard: Shard, stages: Stages, formats: Formats, by_heads: bool, modules: Num
) -> tuple[Pages, Pages, Pages]:
    """KV of the stages: 2 max(1, KV/tp) dh bytes a layer over heads; the latent vector of MLA whole on every rank.

    Over the batch a chip holds whole tokens of its own requests. An engine that groups layers pads them to groups
    of one size, of full layers or of windowed ones (vLLM's hybrid KV cache manager).
    """
    attention = model.attention
    if attention.latent is not None:
        elements: Num = attention.latent.cached
    else:
        elements = 2 * (shard.cache_heads if by_heads else attention.kv_heads) * attention.head_dim
    elements = elements / shard.sequence
    state = 0.0 if model.linear is None else model.linear.state_elements * STATE_BYTES
    counts = {kind: [0.0, 0.0, 0.0] for kind in ("full", "window", "linear")}
    for kind, layers in stage_layers(model, stages):
        counts[kind.attention] = [held + more for held, more in zip(counts[kind.attention], layers, strict=True)]
    pages = []
    counts["full"] = [held + more for held, more in zip(counts["full"], _at_end(stages, modules), strict=True)]
    grouped = attention.window is not None and engine.memory.window_layers == "grouped"
    each = elements * formats.kv.bytes
    for whole, near, linear in zip(*counts.values(), strict=True):
        full, window = _grouped(whole, near) if grouped else (whole, near)
        pages.append(Pages(full * each, window * each, linear * state / (shard.attention_tp if by_heads else 1.0)))
    return pages[0], pages[1], pages[2]


def _at_end(stages: Stages, value: Num) -> Trio:
    """A value on the last stage, which may be the first."""
    alone = stages.pp == 1
    return np.where(alone, value, 0.0), 0.0, np.where(alone, 0.0, value)


def _grouped(full: Num, window: Num) -> tuple[Num, Num]:
    """Layers of both kinds, each padded to a multiple of the group: the fewer, or the more if less than 5/4 of it."""
    fewer, more = np.minimum(full, window), np.maximum(full, window)
    group = np.maximum(1.0, np.where((fewer == 0) | (more < 1.25 * fewer), more, fewer))
    return np.ceil(full / group) * group, np.ceil(window / group) * group


def kept_window(model: Model, engine: Engine) -> tuple[float, int]:
    """(tokens in whole blocks, tokens more) that the engine keeps of a request in windowed layers.

    capped: the window. grouped: what an iteration may add as well, and a block in which it begins. full: all.
    """
    window, scheduler = model.attention.window, engine.scheduler
    if window is None or engine.memory.window_layers == "full":
        return np.inf, 0
    if engine.memory.window_layers == "capped":
        return float(_blocks(engine, window)), 0
    if scheduler.chunk_tokens is None:
        return np.inf, scheduler.block_tokens
    return float(_blocks(engine, window - 1 + scheduler.chunk_tokens)), scheduler.block_tokens


def table_bytes(model: Model, engine: Engine, shard: Shard, stages: Stages) -> Trio:
    """Bytes per stage that an engine keeps with the weights and that are none.

    Rotary tables (cosine and sine of every position that the model can have, in 16 bit, on every rank) and 16-bit
    copies of the projections that MLA absorbs while decoding.
    """
    attention, memory = model.attention, engine.memory
    latent = attention.latent
    rotary, copies = 0.0, 0.0 * shard.heads
    if memory.rotary_tables and not model.learned_positions:
        rotary = model.max_context * (latent.rope_dim if latent else attention.head_dim) * PLAIN_BYTES
    if memory.latent_copies and latent is not None:
        copies = latent.kv_rank * shard.heads * (latent.nope_dim + latent.value_dim) * PLAIN_BYTES
    layers: list[Num] = [0.0, 0.0, 0.0]
    for kind, counts in stage_layers(model, stages):
        if kind.attention != "linear":
            layers = [held + more for held, more in zip(layers, counts, strict=True)]
    first, middle, last = (count * copies + (count > 0) * rotary for count in layers)
    return first, middle, last


def gathered_bytes(model: Model, shard: Shard, formats: Formats, structure: Structure) -> Num:
    """Bytes of a layer's weights beyond a chip's own, while a weight-gathered pass has them together."""
    own, most = layer_weights(model, shard).matrices, 0.0 * shard.tp
    for layout in {structure.ffn, structure.prefill_ffn}:
        if GATHERED[layout]:
            most = np.maximum(most, used_elements(model, shard, Split.of(layout, shard)) - own)
    return most * formats.weights.bytes


def _other(model: Model, engine: Engine, shard: Shard, stages: Stages, formats: Formats, gathered: Num) -> Trio:
    """Activations, gathered weights and runtime per stage: only the stage with the head warms the sampler up."""
    runtime = _by_ranks(engine.memory.inside_gib, shard.tp) + gathered
    widest = activation_bytes(model, engine, shard, formats.weights.name, head=False)
    with_head = activation_bytes(model, engine, shard, formats.weights.name)
    alone = stages.pp == 1
    return (
        runtime + np.where(alone, with_head, widest),
        np.where(stages.pp > 2, runtime + widest, 0.0),
        np.where(alone, 0.0, runtime + with_head),
    )


def activation_bytes(
    model: Model, engine: Engine, shard: Shard, weights: str | None = None, *, head: bool = True
) -> Num:
    """Peak of activations that the engine reserves: its sampler's warm-up or its widest layer, whichever is more.

    Engines whose kernel for experts takes a workspace (by the dtype of the weights) keep it beside: top_k copies of
    the tokens between the projections.
    """
    memory, experts = engine.memory, model.experts
    peak: Num = memory.logits_rows * model.vocab * 4.0 if head else 0.0
    if memory.activation_tokens is None:
        return peak
    dense = not all(kind.experts for kind in model.layer_kinds())
    widest = ((model.ffn.inputs + 1) * shard.ffn if dense else 0.0) + 6 * model.hidden
    peak = np.maximum(peak, memory.activation_tokens * widest * ACTIVATION_BYTES)
    if experts is not None and (weights or model.weights) in memory.expert_workspace:
        between = np.maximum(model.ffn.inputs * shard.expert, model.hidden) + shard.expert
        peak = peak + memory.activation_tokens * experts.top_k * between * ACTIVATION_BYTES
    return peak


def needed_tokens(engine: Engine, isl: Num, osl: Num, max_context: Num) -> Num:
    """Tokens of KV that a request must find room for, in whole blocks: max(isl + osl, max_context)."""
    return _blocks(engine, np.maximum(isl + osl, max_context))


def cached_tokens(engine: Engine, isl: Num, share: Num) -> Num:
    """Tokens of a prompt that a prefix cache saves: whole blocks, and never the last token, which gives the logits.

    Args:
        engine: its block is the cache's.
        isl: tokens of the prompt.
        share: of it that is cached, 0 to 1.
    """
    block = engine.scheduler.block_tokens
    return np.floor(np.minimum(isl * share * (1 + 1e-12), isl - 1) / block) * block


def held_tokens(engine: Engine, isl: Num, osl: Num, max_context: Num) -> Num:
    """Tokens of KV that a running request holds on average: all of it, or pages as they fill."""
    if engine.scheduler.kv_reservation == "whole":
        return needed_tokens(engine, isl, osl, max_context)
    return _blocks(engine, isl + np.ceil(osl / 2))


def _blocks(engine: Engine, tokens: Num) -> Num:
    block = engine.scheduler.block_tokens
    return np.ceil(tokens / block) * block


def _by_ranks(gib: dict[int, float], ranks: Num) -> Num:
    """Bytes of a table over group sizes, interpolated; the last value goes on."""
    if not gib:
        return 0.0
    sizes, values = zip(*sorted(gib.items()), strict=True)
    return np.interp(ranks, sizes, values) * GIB
