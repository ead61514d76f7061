"""Memory: what the fullest chip holds, and how many tokens and requests fit. Decides feasibility before any price."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.layers import Formats, Structure
from planner.costs.weights import Num, Shard, Stages, stage_weight_bytes
from planner.errors import InputError
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.units import GIB


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


class Room(NamedTuple):
    """Memory of a replica's chips before any request runs.

    Tuples hold the first, a middle and the last pipeline stage; a stage that does not exist has no layers.
    """

    weights: tuple[Num, Num, Num]
    """Bytes per chip."""
    kv_token: tuple[Num, Num, Num]
    """Bytes of KV that one token takes on a chip that holds it."""
    other: Num
    """Bytes of activations and runtime inside the budget."""
    outside: Num
    """Bytes of context, graphs and buffers outside the budget."""
    holders: Num
    """Chips of a stage that share out the requests: 1 where every chip holds a part of each (attention over heads)."""
    chip_tokens: Num
    """Tokens of KV that one chip can hold beside the rest, in whole blocks, the least over the stages."""

    @property
    def capacity_tokens(self) -> Num:
        """Distinct tokens that a replica can hold."""
        return self.holders * self.chip_tokens

    def requests(self, tokens: Num) -> Num:
        """Requests of `tokens` tokens each (in whole blocks) that a replica can hold."""
        return self.holders * np.floor(self.chip_tokens / tokens)

    def fullest(self, tokens: Num, requests: Num) -> tuple[Num, Num]:
        """(weights, KV) bytes of the fullest chip while `requests` hold `tokens` tokens each."""
        on_chip = np.ceil(requests / self.holders) * tokens
        kv = [per_token * on_chip for per_token in self.kv_token]
        total = np.stack(np.broadcast_arrays(*(w + k for w, k in zip(self.weights, kv, strict=True))))
        stage = total.argmax(axis=0)
        return np.choose(stage, np.broadcast_arrays(*self.weights)), np.choose(stage, np.broadcast_arrays(*kv))


def room(
    model: Model, engine: Engine, shard: Shard, stages: Stages, formats: Formats, structure: Structure, budget: Budget
) -> Room:
    """Weights, runtime and KV room of a replica's chips.

    KV per token and chip is 2 L_stage max(1, KV/tp) dh bytes when attention is sharded over heads; over the batch a
    chip holds whole tokens of its own requests.
    """
    attention = model.attention
    by_heads = structure.attention == "heads"
    kv_heads = shard.kv_heads if by_heads else float(attention.kv_heads)
    kv_layer = 2 * kv_heads * attention.head_dim * formats.kv.bytes
    weights = stage_weight_bytes(model, shard, stages, formats.weights)
    layers = (stages.first, np.where(stages.pp > 2, stages.middle, 0.0), np.where(stages.pp > 1, stages.last, 0.0))
    kv_token = tuple(count * kv_layer for count in layers)
    other = activation_bytes(model, engine, shard) + _by_ranks(engine.memory.inside_gib, shard.tp)
    tokens: Num = np.inf
    for held, per_token in zip(weights, kv_token, strict=True):
        free = np.maximum(0.0, budget.limit - held - other)
        tokens = np.minimum(tokens, np.where(per_token > 0, free / np.where(per_token > 0, per_token, 1.0), np.inf))
    block = engine.scheduler.block_tokens
    return Room(
        weights=weights,
        kv_token=(kv_token[0], kv_token[1], kv_token[2]),
        other=other,
        outside=_by_ranks(engine.memory.outside_gib, shard.tp),
        holders=1.0 if by_heads else shard.tp,
        chip_tokens=np.floor(tokens / block) * block,
    )


def activation_bytes(model: Model, engine: Engine, shard: Shard) -> Num:
    """Peak of activations that the engine reserves: its sampler's warm-up or its widest layer, whichever is more."""
    memory = engine.memory
    peak: Num = memory.logits_rows * model.vocab * 4.0
    if memory.activation_tokens is not None:
        widest = (model.ffn.inputs + 1) * shard.ffn + 6 * model.hidden
        peak = np.maximum(peak, memory.activation_tokens * widest * ACTIVATION_BYTES)
    return peak


def needed_tokens(engine: Engine, isl: Num, osl: Num, max_context: Num) -> Num:
    """Tokens of KV that a request must find room for, in whole blocks: max(isl + osl, max_context)."""
    return _blocks(engine, np.maximum(isl + osl, max_context))


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
