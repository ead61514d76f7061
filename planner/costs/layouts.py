"""Layouts of the projections over a grid of X x Y x Z chips: weight-stationary and weight-gathered (Pope et al. 2022).

Section 3.2 and appendix A.2, with exact (K-1)/K factors (they are the collectives'). Every matrix of a layer is stored
in X x YZ pieces, E_x F_yz: the model's width over X, the FFN's width and the heads over Y and Z. A pass leaves its
weights where they are (`1d`, `2d`) or gathers them along N = X, XY or all chips (`wg-x`, `wg-xy`, `wg-xyz`), which then
have different requests. Switching between layouts of one grid moves no weights. `1d` is X = 1, and `layers.count`
counts it as Megatron does, with all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from planner.costs import layers
from planner.costs.layers import (
    Formats,
    Operation,
    Pass,
    Structure,
    Transfer,
    attention_operations,
    end_operations,
    gemm,
    qk_norm_operations,
)
from planner.costs.weights import Num, Shard, layer_weights
from planner.plans.placement import AXES
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.engine import Engine
from planner.specs.model import Model

GATHERED = {"1d": "", "2d": "", "wg-x": "x", "wg-xy": "xy", "wg-xyz": "xyz"}
"""Axes along which a layout gathers the weights of a layer before it uses them."""
_STATISTICS = 4.0
"""Bytes of a sum of squares, or of a mean."""


class Split(NamedTuple):
    """What a chip works on in a pass, numbers or arrays over plans."""

    gathered: str
    """Axes along which weights are gathered and requests are divided."""
    rest: str
    """Axes over which the FFN's width and the heads are still divided."""
    across: str
    """Axes over which a chip's tokens are divided no further: all that are not gathered."""
    copies: Num
    """N: chips along the gathered axes."""
    x: Num
    """Ranks that the model's width is still divided over: X, or 1 once it is gathered."""
    ways: Num
    """Ranks along `rest`."""

    @classmethod
    def of(cls, layout: str, shard: Shard) -> Split:
        """How a layout divides a pass over the grid of a shard."""
        gathered = GATHERED[layout]
        rest = "".join(axis for axis in "yz" if axis not in gathered)
        sizes = {"x": shard.x, "y": shard.y, "z": shard.z}
        copies = _product(sizes[axis] for axis in gathered)
        return cls(
            gathered,
            rest,
            "".join(axis for axis in AXES if axis not in gathered),
            copies,
            shard.x if "x" not in gathered else 1.0,
            _product(sizes[axis] for axis in rest),
        )

    def rows(self, work: Pass) -> Num:
        """Tokens on the chips with most of them: whole requests are divided over N, each with its tokens."""
        if not self.gathered:
            return work.tokens
        decoded, prefilled = fullest(work, self.copies)
        return (decoded + prefilled) / self.copies


def fullest(work: Pass, ranks: Num) -> tuple[Num, Num]:
    """(decode rows, prefill tokens) as if all of so many ranks had the whole requests that the fullest one has."""
    prompts = np.maximum(work.prompts, 1.0)
    prefilled = work.prefill_tokens * (np.ceil(prompts / ranks) * ranks / prompts)
    return np.ceil(work.decode_rows / ranks) * ranks, prefilled


def _product(values: Iterable[Num]) -> Num:
    result: Num = 1.0
    for value in values:
        result = result * value
    return result


def count(
    model: Model, engine: Engine, shard: Shard, work: Pass, formats: Formats, structure: Structure
) -> tuple[list[Operation], list[Transfer]]:
    """Operations and transfers of one pass on the fullest rank of a tensor-parallel group, in its layout.

    A pass with prompt tokens runs in the prefill's layout, decodes that ride along too.
    """
    layout = layout_of(work, structure)
    if layout == "1d":
        return layers.count(model, engine, shard, work, formats, structure)
    split = Split.of(layout, shard)
    operations = _projections(model, engine, shard, work, formats, split)
    operations += attention_operations(model, shard, work, formats, structure)
    operations += _elementwise(model, shard, work, formats, structure, split)
    operations += end_operations(model, shard, work, formats, normed=work.decode_rows + work.prompts_ended)
    return operations, _transfers(model, engine, shard, work, formats, structure, split)


def layout_of(work: Pass, structure: Structure) -> str:
    """The layout of a pass."""
    return structure.prefill_ffn if np.any(np.asarray(work.prefill_tokens) > 0) else structure.ffn


class _Widths(NamedTuple):
    """Columns on a chip, once what is gathered has been gathered."""

    queries: Num
    keys: Num
    """Of keys and values together; of those heads that a rank has whole where there are fewer than ranks."""
    hidden: Num
    """Of the FFN."""

    @property
    def qkv(self) -> Num:
        """Columns of the input projection of attention."""
        return self.queries + self.keys


def _widths(model: Model, shard: Shard, split: Split) -> _Widths:
    attention, stored = model.attention, shard.tp / shard.x
    return _Widths(
        shard.stored_heads * stored / split.ways * attention.head_dim,
        2 * np.maximum(1.0, np.ceil(attention.kv_heads / split.ways)) * attention.head_dim,
        shard.ffn * shard.tp / split.ways,
    )


def used_elements(model: Model, shard: Shard, split: Split) -> Num:
    """Elements of a layer's matrices that a chip multiplies with: its own, or what it has gathered.

    Projections of KV heads that several chips store are gathered once, each of them sending a share.
    """
    wide = _widths(model, shard, split)
    return model.hidden / split.x * (wide.qkv + wide.queries + (model.ffn.inputs + 1) * wide.hidden)


def resting_bytes(model: Model, tp: Num, work: Pass, structure: Structure, cp: Num = 1.0) -> Num:
    """Bytes of a pass's tokens on a rank between two layers: in layout 1d every rank has all of them, else a part.

    Of context parallelism's groups each has its own.
    """
    every = work.tokens / cp * model.hidden * ACT
    return every if layout_of(work, structure) == "1d" else every / tp


def _side_by_side(model: Model, engine: Engine) -> bool:
    return model.parallel_block and engine.fused_block


def _projections(
    model: Model, engine: Engine, shard: Shard, work: Pass, formats: Formats, split: Split
) -> list[Operation]:
    """Products with [d / X, columns] and back; in a fused block those of attention and FFN are one kernel."""
    wide, rows, inner = _widths(model, shard, split), split.rows(work), model.hidden / split.x
    each, plain, dtype, own = (
        formats.weights.bytes,
        formats.weights.plain_bytes,
        formats.compute,
        layer_weights(model, shard),
    )
    into = {"qkv": (wide.qkv, own.qkv_bias), "gate_up": (model.ffn.inputs * wide.hidden, own.gate_up_bias)}
    out = {"out": (wide.queries, own.out_bias), "down": (wide.hidden, own.down_bias)}
    if _side_by_side(model, engine):
        into, out = ({", ".join(side): _sums(side.values())} for side in (into, out))
    return [
        *(gemm(k, rows, inner, n, inner * n * each + bias * plain, dtype) for k, (n, bias) in into.items()),
        *(gemm(k, rows, n, inner, inner * n * each + bias * plain, dtype) for k, (n, bias) in out.items()),
    ]


def _sums(pairs: Iterable[tuple[Num, Num]]) -> tuple[Num, Num]:
    first, second = (sum(values) for values in zip(*pairs, strict=True))
    return first, second


def _elementwise(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, split: Split
) -> list[Operation]:
    """Norms and residual on a chip's part of each token, rotary embedding with the KV write, the FFN's activation."""
    rows, d, dh, native = split.rows(work), model.hidden, model.attention.head_dim, formats.native
    keys = work.tokens * shard.kv_heads * dh
    if structure.attention == "batch":  # each rank keeps those of its own requests, whole
        keys = sum(fullest(work, shard.tp)) / shard.tp * model.attention.kv_heads * dh
    turned, kv_write = work.tokens * shard.heads * dh + keys, 2 * keys * formats.kv.bytes
    part, hidden = rows * d / split.x, rows * shard.ffn * split.copies
    return [
        Operation(
            "norm",
            "elementwise",
            native,
            times=model.norm.per_layer,
            weight_bytes=model.norm.vectors * d / split.x * ACT,
            activation_bytes=part * 4 * ACT,
        ),
        Operation("rope, KV write", "elementwise", native, activation_bytes=turned * 2 * ACT + kv_write),
        Operation("activation", "elementwise", native, activation_bytes=hidden * (model.ffn.inputs + 1) * ACT),
        *qk_norm_operations(model, shard, work, formats),
    ]


def _transfers(
    model: Model, engine: Engine, shard: Shard, work: Pass, formats: Formats, structure: Structure, split: Split
) -> list[Transfer]:
    """Collectives of a layer, then those of the ends; where an axis has one chip nothing is sent along it."""
    wide, rows, d = _widths(model, shard, split), split.rows(work), model.hidden
    blocks = 1 if model.parallel_block else 2
    transfers: list[Transfer] = []
    if split.gathered:
        weights = used_elements(model, shard, split) * formats.weights.bytes
        transfers.append(Transfer("weights", "all_gather", weights / blocks, times=blocks, axes=split.gathered))
    if split.rest:
        part = rows * d / split.x * ACT
        transfers.append(Transfer("inputs", "all_gather", part, times=blocks, axes=split.rest))
        transfers.append(Transfer("outputs", "reduce_scatter", part, times=blocks, axes=split.rest))
    if "x" not in split.gathered:
        transfers += _along_x(model, rows, wide)
    transfers += _resharded(model, shard, work, structure, split)
    if engine.embedding_all_reduce:
        transfers.append(Transfer("embedding", "reduce_scatter", work.tokens * d * ACT, "first"))
    logits = work.decode_rows + work.prompts_ended
    transfers.append(Transfer("last rows", "all_gather", logits * d * ACT, "last"))  # for the head, over all chips
    transfers.append(Transfer("logits all-gather", "all_gather", logits * shard.vocab * shard.tp * ACT, "last"))
    return transfers


def _along_x(model: Model, rows: Num, wide: _Widths) -> list[Transfer]:
    """Along X a chip has a part of each token's width: its norm, its products into the layer and out of it are partial.

    What leaves the input projections are sums to be scattered, what enters the output projections was divided so.
    """
    sums = rows * _STATISTICS * (2 if model.norm.kind == "layernorm" else 1)
    into = {"qkv sums": rows * wide.qkv * ACT, "gate_up sums": rows * model.ffn.inputs * wide.hidden * ACT}
    out = {"heads": rows * wide.queries * ACT, "hidden": rows * wide.hidden * ACT}
    if model.parallel_block:
        into, out = {"qkv, gate_up sums": sum(into.values())}, {"heads, hidden": sum(out.values())}
    return [
        Transfer("norm sums", "all_reduce", sums, times=model.norm.per_layer, axes="x"),
        *(Transfer(name, "reduce_scatter", size, axes="x") for name, size in into.items()),
        *(Transfer(name, "all_gather", size, axes="x") for name, size in out.items()),
    ]


def _resharded(model: Model, shard: Shard, work: Pass, structure: Structure, split: Split) -> list[Transfer]:
    """From how the projections leave queries, keys and values to how attention wants them, and back.

    The projections leave each request's heads divided over the chips that share it (`across`), requests over N.
    Attention over the batch wants whole requests: an all-to-all among those chips. Over heads it wants every request
    with its own heads: an all-to-all along the gathered axes; keys and values that several ranks need are gathered.
    Requests that do not divide fill the fullest chip, which paces an all-to-all.
    """
    dh, tp = model.attention.head_dim, shard.tp
    query, kv = shard.stored_heads / shard.x * dh * ACT, 2 * model.attention.kv_heads * dh * ACT / tp
    found: list[Transfer] = []
    decodes, prefills = fullest(work, tp)
    for suffix, sharding, tokens, whole in (
        ("", structure.attention, work.decode_rows, decodes),
        (" (prefill)", structure.prefill_attention, work.prefill_tokens, prefills),
    ):
        if not np.any(tokens):
            continue
        if sharding == "heads":
            found += _to_heads(model, shard, work, split, suffix)
        elif split.across:
            found += [
                Transfer(f"heads to batch{suffix}", "all_to_all", whole * (query + kv), axes=split.across),
                Transfer(f"batch to heads{suffix}", "all_to_all", whole * query, axes=split.across),
            ]
        if suffix and sharding == "heads" and structure.attention == "batch" and split.across:
            # the prompt's KV moves to the rank that decodes it, which is one of those that share the request
            found.append(Transfer("KV to batch (prefill)", "all_to_all", whole * kv, axes=split.across))
    return found


def _to_heads(model: Model, shard: Shard, work: Pass, split: Split, suffix: str) -> list[Transfer]:
    """To attention over heads and back, of a pass's decode rows or (with a suffix) its prefill tokens."""
    dh, tokens = model.attention.head_dim, work.prefill_tokens if suffix else work.decode_rows
    needed = tokens * 2 * shard.kv_heads * dh * ACT  # keys and values for a rank's own heads
    if not split.gathered:
        # the sums of KV heads are scattered over those ranks along X that need them, which gather them again
        alike, x = shard.x * shard.kv_heads / shard.stored_kv_heads, np.maximum(shard.x, 2.0)
        return [Transfer(f"KV to all heads{suffix}", "all_gather", needed * (1 - 1 / alike) * x / (x - 1), axes="x")]
    copied = np.asarray(shard.kv_heads * shard.tp > model.attention.kv_heads)  # several ranks need the same ones
    whole = fullest(work, split.copies)[1 if suffix else 0]
    query, kv = whole * shard.heads * dh * ACT, whole * 2 * shard.kv_heads * dh * ACT
    return [
        Transfer(f"requests to heads{suffix}", "all_to_all", query, axes=split.gathered),
        Transfer(f"heads to requests{suffix}", "all_to_all", query, axes=split.gathered),
        Transfer(f"KV to heads{suffix}", "all_to_all", kv * ~copied, axes=split.gathered),
        Transfer(f"KV to all heads{suffix}", "all_gather", needed * copied, axes=split.gathered),
    ]
