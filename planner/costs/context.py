"""Count context parallelism: a pass whose tokens are divided over groups of chips, each of which has all projections.

A stage is c groups of t chips. A group computes projections, FFN (or its share of the experts) and the ends for 1/c of
a prompt's tokens and of the decoding requests. Attention is what reaches across the groups:

* **ring** (Ring Attention, arXiv 2310.01889): each group attends with its own queries to one block of keys and values
  after the other, which go round meanwhile; c - 1 hops a layer, each behind the attention to a block. Blocks are dealt
  in zig-zag (the i-th and the (2c - 1 - i)-th of 2c parts), so that all groups have the same part of a causal mask.
* **gather**: keys and values of all groups first, then one kernel.
* **ulysses** (DeepSpeed-Ulysses, arXiv 2309.14509): an exchange of tokens for heads, so that each chip attends with
  1/c of its group's heads to all tokens, and an exchange back.

Where the cache lies then (`Structure.cached`) decides what a decode step exchanges: **batch**, the request's group has
all of it (in a ring and by a gather all tokens pass by anyway) and nothing is exchanged; **sequence**, each group keeps
the tokens that it computed: queries to all groups, partial outputs back, merged by the logarithms of their sums of
exponentials; **heads**, the exchanges of ulysses for decoded tokens too. Latent attention sends the latent vector,
which every chip expands for its own heads.
"""

from __future__ import annotations

import numpy as np

from planner.costs.latent import absorbed, latent_decode, latent_elementwise, latent_prefill, latent_projections
from planner.costs.layers import (
    LSE,
    Formats,
    Operation,
    Pass,
    Structure,
    Transfer,
    attention_elementwise,
    attention_operations,
    attention_projections,
    gemm,
    norm_operation,
)
from planner.costs.weights import Num, Shard
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.model import LatentAttention, Model

_SUM = 4.0
"""Bytes of a value of an output that is still being added up."""


def part_of(work: Pass, groups: Num) -> Pass:
    """What the fullest of the groups has of a pass: a part of every prompt's tokens, whole requests that decode."""
    requests = np.ceil(work.requests / groups)
    return work._replace(
        decode_rows=work.rows_of(requests),
        unscored=work.unscored / np.maximum(work.requests, 1.0) * requests,
        prefill_tokens=np.ceil(work.prefill_tokens / groups),
        prefill_pairs=work.prefill_pairs / groups,
        window_pairs=work.window_pairs / groups,
        prompts_ended=np.ceil(work.prompts_ended / groups),
    )


def context_operations(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, copies: bool = False
) -> list[Operation]:
    """Operations of one layer's attention on the fullest chip.

    Args:
        model: dense or latent attention.
        shard: of `tp` chips in all, `attention_tp` of which are a group.
        work: of all groups.
        formats: of weights and cache.
        structure: `context` and `cached` say what reaches across.
        copies: as for `latent.latent_attention_operations`.
    """
    own = part_of(work, shard.attention_dp)
    if model.attention.latent is not None:
        alone = shard._replace(tp=shard.attention_tp)
        return [
            *latent_projections(model, alone, own, formats, structure),
            *_latent_operations(model, shard, work, own, formats, structure, copies),
            *latent_elementwise(model, alone, own, formats, structure),
            norm_operation(model, own, formats),
        ]
    return [
        *attention_projections(model, shard, own, formats),
        *_decode_operations(model, shard, work, own, formats, structure),
        *_prompt_operations(model, shard, work, own, formats, structure),
        *attention_elementwise(model, shard, own, formats),
    ]


def _whole(structure: Structure) -> Structure:
    """The structure of a group for itself."""
    return structure._replace(attention="heads", prefill_attention="heads")


def _by_heads(model: Model, shard: Shard) -> Shard:
    """The shard of a chip that attends with heads of its own to all tokens of all groups."""
    heads = np.ceil(model.attention.heads / shard.tp)
    return shard._replace(heads=heads, kv_heads=np.maximum(1.0, np.ceil(model.attention.kv_heads / shard.tp)))


def _decoding(work: Pass) -> Pass:
    nothing = dict.fromkeys(("prefill_tokens", "prefill_pairs", "prefill_prior", "prompts", "window_pairs"), 0.0)
    return work._replace(**nothing)


def _decode_operations(
    model: Model, shard: Shard, work: Pass, own: Pass, formats: Formats, structure: Structure
) -> list[Operation]:
    """Attention of decoded tokens to the cache."""
    whole, alone = _whole(structure), shard
    if structure.cached == "heads":
        rows, alone = work, _by_heads(model, shard)
    elif structure.cached == "sequence":
        rows, whole = work, whole._replace(sequence=True)
        alone = shard._replace(sequence=shard.attention_dp, decode_heads=shard.heads, cache_heads=shard.kv_heads)
    else:
        rows = own
    found = attention_operations(model, alone, _decoding(rows), formats, whole)
    return [each for each in found if each.kind == "attention_decode"]


def _prompt_operations(
    model: Model, shard: Shard, work: Pass, own: Pass, formats: Formats, structure: Structure
) -> list[Operation]:
    """Attention of a prompt's tokens, block after block in a ring, with what adds the blocks' outputs up."""
    alone, rows = (_by_heads(model, shard), work) if structure.context == "ulysses" else (shard, own)
    every = attention_operations(model, alone, rows._replace(decode_rows=0.0), formats, _whole(structure))
    found = [each for each in every if each.kind == "attention_prefill"]
    if structure.context == "ulysses":
        return found
    token = 2 * shard.kv_heads * model.attention.head_dim * ACT
    others = np.maximum(0.0, work.prefill_tokens - own.prefill_tokens)
    if structure.context == "gather":
        return [each._replace(activation_bytes=each.activation_bytes + others * token) for each in found]
    merged: list[Operation] = []
    outputs, width = own.prefill_tokens * shard.heads, model.attention.head_dim
    for place, each in enumerate(found):
        hops = ring_hops(model, shard, work, windowed=each.name.startswith("window"))
        blocks, often = hops + 1, each.times
        found[place] = each._replace(times=often * blocks, flops=each.flops / blocks, kv_bytes=each.kv_bytes / blocks)
        merged.append(sums_of_blocks(each.name, outputs, width, often * hops, formats))
    return found + merged


def sums_of_blocks(name: str, outputs: Num, width: int, times: Num, formats: Formats) -> Operation:
    """Adding a block's outputs to those of the blocks before it, in 32 bit, by the logarithms of their sums.

    Args:
        name: of the attention whose outputs they are.
        outputs: tokens x heads of the chip.
        width: values of a head's output.
        times: blocks that are added to others.
        formats: of the run.
    """
    moved = outputs * (width * (ACT + 2 * _SUM) + 3 * LSE)
    return Operation(f"sums of blocks, {name}", "elementwise", formats.native, times=times, activation_bytes=moved)


def ring_hops(model: Model, shard: Shard, work: Pass, *, windowed: bool) -> Num:
    """Times that blocks are handed on in a layer: to all other groups, with a window as far as it reaches.

    In zig-zag a group has two halves of a block, with neighbours of their own: a window over k halves wants up to 2 k
    of others, c - 1 + k // 2 where those of the two overlap or end (exact: the tests look at every group).
    """
    hops = shard.attention_dp - 1
    if not windowed:
        return hops
    assert model.attention.window is not None
    half = np.maximum(1.0, work.prefill_tokens / np.maximum(work.prompts, 1.0) / shard.attention_dp / 2)
    reach = np.ceil((model.attention.window - 1) / half)
    return np.minimum(np.minimum(2 * reach, hops + reach // 2), 2 * hops) / 2


def _handed_on(work: Pass, structure: Structure, groups: Num) -> Num:
    """Cached tokens of prompts that a group hands on, of those that each of the others does.

    Where all groups hold a part of each, that. A whole prompt (`batch`) passes all groups but its own, and what does
    not start on the next one passes the wire to it: everything, of one prompt.
    """
    prior = np.maximum(work.prefill_prior, 0.0)
    if structure.cached == "heads":  # only of latent vectors, which every chip holds
        return prior * 0.0
    if structure.cached == "sequence":
        return prior / groups
    prompts = np.maximum(work.prompts, 1.0)
    return prior * (1 - np.floor(prompts / groups) / prompts) / np.maximum(1.0, groups - 1)


def _held(work: Pass, structure: Structure, groups: Num) -> Num:
    """Share of the prompts' cached tokens that the fullest group holds."""
    if structure.cached != "batch":
        return 1.0 if structure.cached == "heads" else 1.0 / groups
    prompts = np.maximum(work.prompts, 1.0)
    return np.ceil(prompts / groups) / prompts


def _latent(model: Model) -> LatentAttention:
    assert model.attention.latent is not None
    return model.attention.latent


def _latent_operations(
    model: Model, shard: Shard, work: Pass, own: Pass, formats: Formats, structure: Structure, copies: bool
) -> list[Operation]:
    """Latent attention, decodes absorbed and prompts expanded, as `latent.latent_attention_operations` has them."""
    latent, heads, groups = _latent(model), shard.heads, shard.attention_dp
    quantised = model.quantised == "linears"
    each = formats.weights.bytes if quantised else formats.weights.plain_bytes
    dtype = formats.compute if quantised else formats.native
    read = (ACT, formats.native) if copies else (each, dtype)
    decode_heads, rows, context = heads, own.decode_rows, own.context
    if structure.cached == "sequence":
        rows, context = work.decode_rows, np.ceil(work.context / groups)
    elif structure.cached == "heads":
        decode_heads, rows = np.ceil(model.attention.heads / shard.tp), work.decode_rows
    by_heads = structure.context == "ulysses"
    wide_heads = np.ceil(model.attention.heads / shard.tp) if by_heads else heads
    tokens = work.prefill_tokens if by_heads else own.prefill_tokens
    pairs = work.prefill_pairs if by_heads else own.prefill_pairs
    expanded = work.prefill_tokens + work.prefill_prior  # of all groups: each chip expands them for its own heads
    wide = wide_heads * (latent.nope_dim + latent.value_dim)
    attention = latent_prefill(latent, wide_heads, tokens, pairs, expanded - tokens, formats.kv)
    merged: list[Operation] = []
    if structure.context == "ring":
        outputs = own.prefill_tokens * heads
        merged = [sums_of_blocks(attention.name, outputs, latent.value_dim, groups - 1, formats)]
        moved = tokens * heads * (latent.nope_dim + latent.rope_dim + latent.value_dim) * ACT  # queries again and again
        share = (attention.activation_bytes + moved * (groups - 1)) / groups
        attention = attention._replace(times=groups, flops=attention.flops / groups, activation_bytes=share)
    return [
        absorbed("absorb keys", own.decode_rows, heads, latent.nope_dim, latent.kv_rank, *read),
        latent_decode(latent, decode_heads, rows, context, formats.kv),
        absorbed("absorb values", own.decode_rows, heads, latent.kv_rank, latent.value_dim, *read),
        Operation(
            "latent read back",
            "elementwise",
            formats.native,
            kv_bytes=work.prefill_prior * _held(work, structure, groups) * latent.cached * formats.kv.bytes,
            activation_bytes=work.prefill_prior * latent.cached * ACT,
        ),
        gemm("kv_b", expanded, latent.kv_rank, wide, latent.kv_rank * wide * each * (np.asarray(expanded) > 0), dtype),
        Operation(
            "expanded keys",
            "elementwise",
            formats.native,
            activation_bytes=expanded * wide_heads * (2 * latent.nope_dim + latent.rope_dim) * ACT,
        ),
        attention,
        *merged,
    ]


def context_transfers(model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure) -> list[Transfer]:
    """What one layer's attention sends: inside the group its sum, between the groups what this module's head says."""
    own = part_of(work, shard.attention_dp)
    reduced = own.tokens * model.hidden * ACT * (not model.parallel_block or model.experts is not None)
    return [
        Transfer(
            "attention all-reduce", "all_reduce", reduced, axes="heads"
        ),  # with the FFN's where they stand abreast
        *_prompt_transfers(model, shard, work, own, formats, structure),
        *_decode_transfers(model, shard, work, own, structure),
    ]


def _prompt_transfers(
    model: Model, shard: Shard, work: Pass, own: Pass, formats: Formats, structure: Structure
) -> list[Transfer]:
    if not np.any(work.prefill_tokens):
        return []
    attention, groups = model.attention, shard.attention_dp
    fresh, prior = own.prefill_tokens, _handed_on(work, structure, groups)
    if attention.latent is not None:
        return _latent_prompt(attention.latent, shard, structure, fresh, prior, formats)
    kv = 2 * shard.kv_heads * attention.head_dim
    if structure.context == "ulysses":
        found = _exchanged(model, shard, fresh, " (prefill)")
        if structure.cached == "batch":  # heads of all tokens lie everywhere: the request's group gathers them
            held = work.prefill_tokens * kv * formats.kv.bytes
            found.append(Transfer("KV to the group that decodes", "all_gather", held, axes="context"))
            mine = np.maximum(work.prefill_prior, 0.0) * _held(work, structure, groups)
            cached = mine * 2 * _keys(model, shard) * attention.head_dim * formats.kv.bytes
            found.append(Transfer("cached prompts to their heads", "all_to_all", cached, axes="context"))
        return found
    if structure.context == "gather":
        every = groups * (fresh * ACT + prior * formats.kv.bytes) * kv
        return [Transfer("keys and values of all groups", "all_gather", every, axes="context")]
    pattern = model.attention_pattern
    hops = []
    for kind in dict.fromkeys(pattern):
        windowed = kind == "window"
        steps, share, block = (
            ring_hops(model, shard, work, windowed=windowed),
            pattern.count(kind) / len(pattern),
            prior,
        )
        if windowed:  # a window reaches no further back than itself
            assert attention.window is not None
            block = np.minimum(prior, (attention.window - 1.0) * np.maximum(work.prompts, 1.0))
        name = "window attention (prefill)" if windowed else "attention (prefill)"
        size = (fresh * ACT + block * formats.kv.bytes) * kv
        hops.append(
            Transfer(
                f"ring, {name}", "send", size, times=share * steps, axes="context", behind=(name,),
                beside=steps / (steps + 1),
            )
        )  # fmt: skip
    return hops


def _exchanged(model: Model, shard: Shard, tokens: Num, suffix: str) -> list[Transfer]:
    """Tokens for heads and back (2 H + 2 KV heads of a token): a chip's own tokens, of its group's heads.

    Where there are more chips than KV heads each of them still needs one.
    """
    dh, keys = model.attention.head_dim, _keys(model, shard)
    into, back = tokens * (shard.heads + 2 * keys) * dh * ACT, tokens * shard.heads * dh * ACT
    return [
        Transfer(f"tokens to heads{suffix}", "all_to_all", into, axes="context"),
        Transfer(f"heads to tokens{suffix}", "all_to_all", back, axes="context"),
    ]


def _keys(model: Model, shard: Shard) -> Num:
    """KV heads of a token that a chip sends to all chips of its line, itself among them: one at least to each."""
    return shard.attention_dp * np.maximum(1.0, np.ceil(model.attention.kv_heads / shard.tp))


def _latent_prompt(
    latent: LatentAttention, shard: Shard, structure: Structure, fresh: Num, prior: Num, formats: Formats
) -> list[Transfer]:
    groups = shard.attention_dp
    block = latent.cached * (fresh * ACT + prior * formats.kv.bytes)
    gathered = Transfer("latent vectors of all groups", "all_gather", groups * block, axes="context")
    if structure.context == "gather":
        return [gathered]
    if structure.context == "ring":
        behind, beside = ("latent attention (prefill)",), (groups - 1) / groups
        return [
            Transfer(
                "ring, latent vectors", "send", block, times=groups - 1, axes="context", behind=behind, beside=beside
            )
        ]
    query, value = fresh * shard.heads * (latent.nope_dim + latent.rope_dim), fresh * shard.heads * latent.value_dim
    return [
        gathered,
        Transfer("tokens to heads (prefill)", "all_to_all", query * ACT, axes="context"),
        Transfer("heads to tokens (prefill)", "all_to_all", value * ACT, axes="context"),
    ]


def _decode_transfers(model: Model, shard: Shard, work: Pass, own: Pass, structure: Structure) -> list[Transfer]:
    if structure.cached == "batch" or not np.any(work.decode_rows):
        return []
    attention, latent, heads = model.attention, model.attention.latent, shard.heads
    dh = attention.head_dim
    query, value = (dh, dh) if latent is None else (latent.cached, latent.kv_rank)
    token = 2 * dh * shard.kv_heads if latent is None else latent.cached
    if structure.cached == "heads":
        if latent is None:
            return _exchanged(model, shard, own.decode_rows, "")
        every = own.decode_rows * shard.attention_dp * latent.cached * ACT
        return [
            Transfer("tokens to heads", "all_to_all", own.decode_rows * heads * query * ACT, axes="context"),
            Transfer("new latent vectors", "all_gather", every, axes="context"),
            Transfer("heads to tokens", "all_to_all", own.decode_rows * heads * value * ACT, axes="context"),
        ]
    rows = own.decode_rows * shard.attention_dp  # as many of each group as the fullest has
    return [
        Transfer("queries to all groups", "all_gather", rows * heads * query * ACT, axes="context"),
        Transfer("partial outputs", "all_to_all", rows * heads * (value * ACT + LSE), axes="context"),
        # new keys and values are dealt out in turn, so that parts of the cache stay equal
        Transfer(
            "keys and values to their tokens' groups", "all_to_all", own.decode_rows * token * ACT, axes="context"
        ),
    ]
