"""Count: the operations and transfers of one forward pass on one rank. No time, no file, no branch on a name.

A pass holds decode rows (one token of each of B requests, attending to C tokens) and prefill tokens, either of
which may be none. The layers are alike, so each is counted once and multiplied; what only the first or last
pipeline stage does carries its place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from planner.costs.weights import Num, Shard, final_norm_elements, head_elements, layer_weights
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.dtypes import Dtype
from planner.specs.engine import Engine
from planner.specs.hardware import CollectiveOp
from planner.specs.model import Model

Kind = Literal["gemm", "attention_prefill", "attention_decode", "elementwise"]
Place = Literal["layer", "first", "last"]


class Operation(NamedTuple):
    """Kernels of one kind on one rank; the quantities are those of one kernel, which runs `times` times."""

    name: str
    kind: Kind
    dtype: str
    """The arithmetic it runs in."""
    place: Place = "layer"
    times: float = 1
    flops: Num = 0.0
    weight_bytes: Num = 0.0
    activation_bytes: Num = 0.0
    kv_bytes: Num = 0.0
    items: Num = 0.0
    """Work items that are scheduled one by one: KV heads x requests in decode attention, heads x tokens in the norm of
    queries and keys."""
    context: Num = 0.0
    """Tokens a decode row attends to."""


class Transfer(NamedTuple):
    """Collectives of one kind in the tensor-parallel group, or along some axes of it.

    `bytes` is the whole buffer: the tensor that is reduced, the gathered output, or what a rank holds before an
    all-to-all (DESIGN section 4; reference for the factors: nccl-tests doc/PERFORMANCE.md).
    """

    name: str
    op: CollectiveOp
    bytes: Num
    place: Place = "layer"
    times: float = 1
    axes: str = "xyz"
    """Of the group, those whose chips take part: all, or a plane or a line of its grid (`plans.placement.Mesh`)."""


class Pass(NamedTuple):
    """What one forward pass processes on one replica (or one microbatch of it): at least one token."""

    decode_rows: Num
    """Rows of requests that decode: one each (B), or `queries` each."""
    context: Num
    """Tokens that each of them attends to (C)."""
    prefill_tokens: Num = 0.0
    prefill_pairs: Num = 0.0
    """Query-key pairs of the prefill tokens under the causal mask."""
    prefill_prior: Num = 0.0
    """Tokens of earlier chunks whose KV is read back where there is no window."""
    prompts: Num = 0.0
    """Prompts that the prefill tokens belong to (at least 1 where there are any)."""
    prompts_ended: Num = 0.0
    """Prompts that end here and so need a row of logits."""
    window_pairs: Num = 0.0
    """Query-key pairs in the layers with a sliding window."""
    queries: Num = 1.0
    """Decode rows of a request: more where drafted tokens are verified. All attend to its C tokens, read once."""
    unscored: Num = 0.0
    """Decode rows that need no logits."""

    @property
    def requests(self) -> Num:
        """Requests that the decode rows belong to."""
        return self.decode_rows if self._alone else self.decode_rows / self.queries

    @property
    def logits(self) -> Num:
        """Rows that need logits."""
        rows = self.decode_rows + self.prompts_ended
        return rows if isinstance(self.unscored, float) and self.unscored == 0.0 else rows - self.unscored

    def rows_of(self, requests: Num) -> Num:
        """Decode rows of so many requests."""
        return requests if self._alone else requests * self.queries

    @property
    def _alone(self) -> bool:
        """Whether each request has one row: no array is touched for it."""
        return isinstance(self.queries, float) and self.queries == 1.0

    @property
    def tokens(self) -> Num:
        """Rows through every projection."""
        return self.decode_rows + self.prefill_tokens


class Formats(NamedTuple):
    """Number formats of a run and the arithmetic they lead to on a chip."""

    weights: Dtype
    kv: Dtype
    compute: str
    """Arithmetic of the quantised projections."""
    native: str
    """16-bit arithmetic of the chip."""


class Structure(NamedTuple):
    """What decides which operations and transfers there are at all."""

    attention: str = "heads"
    prefill_attention: str = "heads"
    ffn: str = "1d"
    """Layout of the projections in decode steps; a pass with prompt tokens runs in `prefill_ffn`."""
    prefill_ffn: str = "1d"


def causal_pairs(tokens: Num, window: int | None = None) -> Num:
    """Query-key pairs of a prompt under a causal mask: T(T+1)/2, or w(w+1)/2 + (T-w) w with a window w < T."""
    if window is None:
        return tokens * (tokens + 1) / 2
    inside = np.minimum(tokens, window)
    return inside * (inside + 1) / 2 + (tokens - inside) * window


def count(
    model: Model, engine: Engine, shard: Shard, work: Pass, formats: Formats, structure: Structure
) -> tuple[list[Operation], list[Transfer]]:
    """Operations and transfers of one pass on the fullest rank of a tensor-parallel group.

    Megatron's partition (`costs.layouts` has the others): columns of QKV and of the FFN's inputs, rows of the outputs,
    one all-reduce after each (one for both where attention and FFN stand side by side).
    """
    operations = _projections(model, shard, work, formats)
    operations += attention_operations(model, shard, work, formats, structure)
    operations += _elementwise(model, shard, work, formats) + end_operations(model, shard, work, formats)
    return operations, _transfers(model, engine, shard, work, structure)


def gemm(
    name: str, rows: Num, inner: Num, outer: Num, weight_bytes: Num, dtype: str, place: Place = "layer"
) -> Operation:
    """A product [rows, inner] x [inner, outer]."""
    return Operation(
        name,
        "gemm",
        dtype,
        place,
        flops=2 * rows * inner * outer,
        weight_bytes=weight_bytes,
        activation_bytes=rows * (inner + outer) * ACT,
    )


def _projections(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    weights, d, dh = layer_weights(model, shard), model.hidden, model.attention.head_dim
    each, plain, rows, dtype = formats.weights.bytes, formats.weights.plain_bytes, work.tokens, formats.compute
    qkv, heads, inputs = (shard.heads + 2 * shard.kv_heads) * dh, shard.heads * dh, model.ffn.inputs * shard.ffn
    return [
        gemm("qkv", rows, d, qkv, weights.qkv * each + weights.qkv_bias * plain, dtype),
        gemm("out", rows, heads, d, weights.out * each + weights.out_bias * plain, dtype),
        gemm("gate_up", rows, d, inputs, weights.gate_up * each + weights.gate_up_bias * plain, dtype),
        gemm("down", rows, shard.ffn, d, weights.down * each + weights.down_bias * plain, dtype),
    ]


def attention_operations(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure
) -> list[Operation]:
    """Scores and their products with the values: 4 dh FLOPs per query head and query-key pair.

    Layers with a sliding window and layers without are counted apart, each in its share of all layers.
    """
    pattern = model.attention_pattern
    operations = []
    for kind in dict.fromkeys(pattern):
        window = model.attention.window if kind == "window" else None
        share = pattern.count(kind) / len(pattern)
        operations += [
            _decode_attention(model, shard, work, formats, structure, window, share),
            _prefill_attention(model, shard, work, formats, structure, window, share),
        ]
    return operations


def _decode_attention(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, window: int | None, share: float
) -> Operation:
    attention, dh = model.attention, model.attention.head_dim
    context = work.context if window is None else np.minimum(work.context, window)
    heads, kv_heads, requests = shard.heads, shard.kv_heads, work.requests
    if structure.attention == "batch":  # all heads of the fullest rank's share of the requests
        heads, kv_heads, requests = attention.heads, attention.kv_heads, np.ceil(work.requests / shard.tp)
    rows = work.rows_of(requests)
    return Operation(
        "attention (decode)" if window is None else "window attention (decode)",
        "attention_decode",
        formats.kv.compute,
        times=share,
        flops=4 * dh * heads * rows * context,
        kv_bytes=requests * context * kv_heads * 2 * dh * formats.kv.bytes,
        activation_bytes=rows * heads * dh * 2 * ACT,
        items=requests * kv_heads,
        context=context,
    )


def _prefill_attention(
    model: Model, shard: Shard, work: Pass, formats: Formats, structure: Structure, window: int | None, times: float
) -> Operation:
    attention, dh = model.attention, model.attention.head_dim
    pairs = work.prefill_pairs if window is None else work.window_pairs
    prior = work.prefill_prior
    if window is not None:  # a chunk reads back what its first token sees
        prior = np.minimum(prior, (window - 1.0) * np.maximum(work.prompts, 1.0))
    heads, kv_heads, share = shard.heads, shard.kv_heads, 1.0
    if structure.prefill_attention == "batch":
        heads, kv_heads = attention.heads, attention.kv_heads
        share = np.ceil(work.prompts / shard.tp) / np.maximum(work.prompts, 1.0)
    return Operation(
        "attention (prefill)" if window is None else "window attention (prefill)",
        "attention_prefill",
        formats.kv.compute,
        times=times,
        flops=4 * dh * heads * share * pairs,
        kv_bytes=share * prior * kv_heads * 2 * dh * formats.kv.bytes,
        activation_bytes=share * work.prefill_tokens * 2 * (heads + kv_heads) * dh * ACT,
    )


def _elementwise(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    """Memory-bound kernels: norms with the residual, rotary embedding with the KV write, the FFN's activation."""
    rows, d, dh, native = work.tokens, model.hidden, model.attention.head_dim, formats.native
    norm_bytes = model.norm.vectors * d * ACT
    qkv = (shard.heads + shard.kv_heads) * dh
    kv_write = rows * 2 * shard.kv_heads * dh * formats.kv.bytes
    operations = [
        Operation(
            "norm",
            "elementwise",
            native,
            times=model.norm.per_layer,
            weight_bytes=norm_bytes,
            activation_bytes=rows * d * 4 * ACT,
        ),
        Operation("rope, KV write", "elementwise", native, activation_bytes=rows * qkv * 2 * ACT + kv_write),
        Operation(
            "activation", "elementwise", native, activation_bytes=rows * shard.ffn * (model.ffn.inputs + 1) * ACT
        ),
    ]
    return operations + qk_norm_operations(model, shard, work, formats)


def qk_norm_operations(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    """The norm of queries and keys, where a model has one."""
    if not model.attention.qk_norm:
        return []
    heads, dh = shard.heads + shard.kv_heads, model.attention.head_dim
    return [
        Operation(
            "qk norm",
            "elementwise",
            formats.native,
            weight_bytes=2 * dh * ACT,
            activation_bytes=work.tokens * heads * dh * 2 * ACT,
            items=work.tokens * heads,
        )
    ]


def end_operations(
    model: Model, shard: Shard, work: Pass, formats: Formats, normed: Num | None = None
) -> list[Operation]:
    """Embedding before the first layer; behind the last its norm, and for rows that need logits head and sampling.

    `normed` is the number of tokens that the last norm sees where it is not all of them.
    """
    d, native = model.hidden, formats.native
    logits = work.logits
    head = head_elements(model, shard) * formats.weights.plain_bytes * (logits > 0)
    return [
        Operation("embedding", "elementwise", native, "first", activation_bytes=work.tokens * d * 2 * ACT),
        Operation(
            "final norm",
            "elementwise",
            native,
            "last",
            times=model.norm.final,
            weight_bytes=final_norm_elements(model) * ACT,
            activation_bytes=(work.tokens if normed is None else normed) * d * 4 * ACT,
        ),
        gemm("head", logits, d, shard.vocab, head, native, "last"),
        Operation("sampling", "elementwise", native, "last", activation_bytes=logits * model.vocab * 6.0),
    ]


def _transfers(model: Model, engine: Engine, shard: Shard, work: Pass, structure: Structure) -> list[Transfer]:
    d, dh, attention, rows = model.hidden, model.attention.head_dim, model.attention, work.tokens
    residual = rows * d * ACT
    transfers = [Transfer("all-reduce", "all_reduce", residual, times=1 if model.parallel_block else 2)]
    if engine.embedding_all_reduce:
        transfers.append(Transfer("embedding all-reduce", "all_reduce", residual, "first"))
    logits = work.logits * shard.vocab * shard.tp * ACT
    transfers.append(Transfer("logits all-gather", "all_gather", logits, "last"))
    query, kv = attention.heads * dh * ACT / shard.tp, 2 * attention.kv_heads * dh * ACT / shard.tp
    prompts = np.maximum(work.prompts, 1.0)  # the rank with most requests sends and receives for all its places
    decoded = work.rows_of(np.ceil(work.requests / shard.tp) * shard.tp)
    prefilled = work.prefill_tokens * (np.ceil(prompts / shard.tp) * shard.tp / prompts)
    if structure.attention == "batch":  # Pope et al. section 3.3: Q, K, V from heads to requests, the output back
        transfers.append(Transfer("heads to batch", "all_to_all", decoded * (query + kv)))
        transfers.append(Transfer("batch to heads", "all_to_all", decoded * query))
    if structure.prefill_attention == "batch":
        transfers.append(Transfer("heads to batch (prefill)", "all_to_all", prefilled * (query + kv)))
        transfers.append(Transfer("batch to heads (prefill)", "all_to_all", prefilled * query))
    elif structure.attention == "batch":  # the prompt's KV moves to the rank that decodes it
        transfers.append(Transfer("KV to batch (prefill)", "all_to_all", prefilled * kv))
    return transfers
