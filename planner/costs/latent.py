"""Count multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): compressions, expanded prefill, absorbed decode.

A token leaves one vector of kv_rank + rope_dim values in the cache, for all heads. A prompt's tokens are expanded
from it into keys and values of each head, once, and attended to as in any other model. A decoded token instead takes
its queries into the latent space (the key half of the expansion is absorbed into the query, the value half into the
output), so that all heads of a rank read the same vector of each token, once.

All functions count one layer on the fullest rank. Heads are divided over `shard.attention_tp` ranks; the group of
`shard.tp` ranks holds tp / attention_tp such parts, each with whole requests of its own (data-parallel attention), and
the fullest has the upward rounded share of them. The compressions and the cache stand on every rank of a part.
"""

from __future__ import annotations

import numpy as np

from planner.costs.layers import Formats, Operation, Pass, Structure, gemm
from planner.costs.weights import Num, Shard
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.dtypes import Dtype
from planner.specs.model import LatentAttention, Model


def latent_operations(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, copies: bool = False
) -> list[Operation]:
    """All of one layer's latent attention: projections, attention, element-wise kernels; not the layer's own norm.

    Arguments as of the three functions below.
    """
    return [
        *latent_projections(model, shard, work, formats, structure),
        *latent_attention_operations(model, shard, work, formats, structure, copies),
        *latent_elementwise(model, shard, work, formats, structure),
    ]


def latent_projections(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure
) -> list[Operation]:
    """Compression of queries and KV (one kernel, on every rank), queries of the rank's heads, output.

    Args:
        model: its attention has a `latent`.
        shard: the rank's heads, and how many ranks divide those of a request (`attention_tp`).
        work: of the whole group of `shard.tp` ranks.
        formats: of weights, where the model's quantisation reaches attention, and of the cache.
        structure: not asked: projections follow the weights.
    """
    latent, d, heads = _latent(model), model.hidden, shard.heads
    rows, (each, dtype) = _decoded(shard, work) + _prefilled(shard, work), _quantised(model, formats)
    query, values = heads * (latent.nope_dim + latent.rope_dim), heads * latent.value_dim

    def product(name: str, inner: Num, outer: Num) -> Operation:
        return gemm(name, rows, inner, outer, inner * outer * each, dtype)

    if latent.query_rank is None:
        into = [product("q", d, query), product("kv_a", d, latent.cached)]
    else:
        into = [product("qkv_a", d, latent.query_rank + latent.cached), product("q_b", latent.query_rank, query)]
    return [*into, product("out", values, d)]


def latent_attention_operations(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, copies: bool = False
) -> list[Operation]:
    """Attention of decodes in the latent space, of prompts over expanded heads, each with its half of the expansion.

    What earlier chunks or a prefix cache hold of a prompt is read back from the cache and expanded again.

    Args:
        model: its attention has a `latent`.
        shard: as for `latent_projections`.
        work: of the whole group.
        formats: of weights and cache.
        structure: attention over the batch has all heads of the rank's own requests, whoever holds the projections.
        copies: the engine keeps what decoding absorbs a second time, in 16 bit (`EngineMemory.latent_copies`), and
            reads that; else both read the same weights.
    """
    latent, heads = _latent(model), shard.heads
    decoded, prefilled, prior = _decoded(shard, work), _prefilled(shard, work), _prior(shard, work)
    each, dtype = _quantised(model, formats)
    read = (ACT, formats.native) if copies else (each, dtype)
    expanded = prefilled + prior
    wide = heads * (latent.nope_dim + latent.value_dim)
    decode_heads, decode_rows, context = heads, decoded, work.context
    if structure.sequence:  # the heads of all ranks that share a request's tokens, over a part of these
        decode_heads, context = shard.decode_heads, np.ceil(work.context / shard.sequence)
    if structure.attention == "batch":
        decode_heads, decode_rows = model.attention.heads, _part(work.decode_rows, shard.tp)
    prefill_heads, share = heads, _share(work, shard.tp / shard.attention_tp)
    if structure.prefill_attention == "batch":
        prefill_heads, share = model.attention.heads, _share(work, shard.tp)
    return [
        absorbed("absorb keys", decoded, heads, latent.nope_dim, latent.kv_rank, *read),
        latent_decode(latent, decode_heads, decode_rows, context, formats.kv),
        absorbed("absorb values", decoded, heads, latent.kv_rank, latent.value_dim, *read),
        Operation(
            "latent read back",
            "elementwise",
            formats.native,
            kv_bytes=prior * latent.cached * formats.kv.bytes,
            activation_bytes=prior * latent.cached * ACT,
        ),
        gemm("kv_b", expanded, latent.kv_rank, wide, latent.kv_rank * wide * each * (np.asarray(expanded) > 0), dtype),
        Operation(  # the rotary part, which heads share, behind each head's own
            "expanded keys",
            "elementwise",
            formats.native,
            activation_bytes=expanded * heads * (2 * latent.nope_dim + latent.rope_dim) * ACT,
        ),
        latent_prefill(
            latent,
            prefill_heads,
            share * work.prefill_tokens,
            share * work.prefill_pairs,
            share * work.prefill_prior,
            formats.kv,
        ),
    ]


def latent_elementwise(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure
) -> list[Operation]:
    """Norms of both latents, rotary embedding of the queries and of the shared key, the write to the cache."""
    latent, native, plain = _latent(model), formats.native, formats.weights.plain_bytes
    rows = _decoded(shard, work) + _prefilled(shard, work)
    ranks = {"query norm": latent.query_rank, "KV norm": latent.kv_rank}
    rotated = (shard.heads + 1) * latent.rope_dim * 2 * ACT
    written = latent.kv_rank * ACT + latent.cached * formats.kv.bytes
    return [
        *(
            Operation(name, "elementwise", native, weight_bytes=rank * plain, activation_bytes=rows * rank * 2 * ACT)
            for name, rank in ranks.items()
            if rank is not None
        ),
        Operation("rope, KV write", "elementwise", native, activation_bytes=rows * (rotated + written)),
    ]


def latent_decode(latent: LatentAttention, heads: Num, rows: Num, context: Num, kv: Dtype) -> Operation:
    """Attention of `rows` decoded tokens over `context` tokens of the latent cache: one KV head for all query heads.

    2 (kv_rank + rope_dim) FLOPs for a score, 2 kv_rank for its share of the values, per head and query-key pair.
    """
    return Operation(
        "latent attention (decode)",
        "attention_latent",
        kv.compute,
        flops=(2 * latent.cached + 2 * latent.kv_rank) * heads * rows * context,
        kv_bytes=rows * context * latent.cached * kv.bytes,
        activation_bytes=rows * heads * (latent.cached + latent.kv_rank) * ACT,
        items=rows,
        context=context,
    )


def latent_prefill(latent: LatentAttention, heads: Num, tokens: Num, pairs: Num, prior: Num, kv: Dtype) -> Operation:
    """Attention of `tokens` prompt tokens over themselves and `prior` expanded ones: each head has its own keys.

    2 (nope_dim + rope_dim) FLOPs for a score and 2 value_dim for its share of the values, per head and pair.
    """
    query, value = latent.nope_dim + latent.rope_dim, latent.value_dim
    return Operation(
        "latent attention (prefill)",
        "attention_latent_prefill",
        kv.compute,
        flops=(2 * query + 2 * value) * heads * pairs,
        activation_bytes=(2 * tokens + prior) * heads * (query + value) * ACT,
    )


def absorbed(name: str, rows: Num, heads: Num, inner: int, outer: int, each: float, dtype: str) -> Operation:
    """One kernel that multiplies [rows, inner] of each head with that head's own [inner, outer]."""
    return Operation(
        name,
        "gemm",
        dtype,
        flops=2 * rows * heads * inner * outer,
        weight_bytes=heads * inner * outer * each * (np.asarray(rows) > 0),
        activation_bytes=rows * heads * (inner + outer) * ACT,
    )


def _latent(model: Model) -> LatentAttention:
    assert model.attention.latent is not None
    return model.attention.latent


def _quantised(model: Model, formats: Formats) -> tuple[float, str]:
    """(bytes of an element, arithmetic) of attention's projections, as `weights.Elements.bytes` has them."""
    if model.quantised == "linears":
        return formats.weights.bytes, formats.compute
    return formats.weights.plain_bytes, formats.native


def _part(rows: Num, parts: Num) -> Num:
    """Rows of the fullest of so many parts: whole ones where there are several."""
    return np.where(np.asarray(parts) > 1, np.ceil(rows / parts), rows)


def _share(work: Pass, parts: Num) -> Num:
    """Share of the prompts' tokens that the part with most prompts has."""
    prompts = np.maximum(work.prompts, 1.0)
    return _part(prompts, parts) / prompts


def _decoded(shard: Shard, work: Pass) -> Num:
    return _part(work.decode_rows, shard.tp / shard.attention_tp)


def _prefilled(shard: Shard, work: Pass) -> Num:
    return work.prefill_tokens * _share(work, shard.tp / shard.attention_tp)


def _prior(shard: Shard, work: Pass) -> Num:
    return work.prefill_prior * _share(work, shard.tp / shard.attention_tp)
