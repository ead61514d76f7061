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

LSE = 4.0
"""Bytes of a head's logarithm of its sum of exponentials."""
Kind = Literal[
    "gemm",
    "grouped_gemm",
    "attention_prefill",
    "attention_decode",
    "attention_latent",
    "attention_latent_prefill",
    "elementwise",
]
Place = Literal["layer", "first", "last"]
Cached = Literal["batch", "sequence", "heads"]
"""What a group of context parallelism keeps of the cache: whole requests, a part of every request's tokens, or some
heads of all."""


class Operation(NamedTuple):
    """Kernels of one kind on one rank; the quantities are those of one kernel, which runs `times` times."""

    name: str
    kind: Kind
    dtype: str
    """The arithmetic it runs in."""
    place: Place = "layer"
    times: Num = 1
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
    times: Num = 1
    axes: str = "xyz"
    """Of the group, those whose chips take part: all, or a plane or a line of its grid (`plans.placement.Mesh`); or
    `heads`, `sequence`, `context`: what divides attention."""
    kernel: str = ""
    """The kernel of hardware files that runs it where they have it; "" = one by the engine's rules."""
    behind: tuple[str, ...] = ()
    """Operations that run at the same time, with `beside` of their time; only what lasts longer is waited for."""
    beside: Num = 0.0
    by_request: bool = False
    """Whether that of one request may go while the next one's attention runs (`Engine.sequence_overlap`)."""


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

    def divided(self, groups: Num) -> Pass:
        """What the fullest of several groups has, between which whole requests are divided."""
        prompts = np.maximum(self.prompts, 1.0)
        share = np.ceil(prompts / groups) / prompts
        requests = np.ceil(self.requests / groups)
        return self._replace(
            decode_rows=self.rows_of(requests),
            unscored=self.unscored / np.maximum(self.requests, 1.0) * requests,
            **{name: getattr(self, name) * share for name in _OF_PROMPTS},
        )


_OF_PROMPTS = ("prefill_tokens", "prefill_pairs", "prefill_prior", "prompts", "prompts_ended", "window_pairs")
"""What of a pass its prompts bring."""


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
    """heads, batch, or data: groups of the ranks with requests and projections of their own (`Shard.attention_tp`)."""
    prefill_attention: str = "heads"
    ffn: str = "1d"
    """Layout of the projections in decode steps; a pass with prompt tokens runs in `prefill_ffn`."""
    prefill_ffn: str = "1d"
    own_ffn: bool = False
    """Whether groups of data-parallel attention run dense FFNs for their own tokens."""
    sequence: bool = False
    """Whether a request's cache lies on several ranks by tokens while it decodes."""
    context: str = ""
    """How groups of context parallelism share a prompt's attention (`plans.sharding.ALONG`); "" = there is one."""
    cached: Cached = "batch"
    """... and where they leave its cache."""


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
    own = work if structure.attention != "data" else work.divided(shard.attention_dp)
    operations = attention_projections(model, shard, own, formats)
    operations += attention_operations(model, shard, own, formats, structure)
    operations += attention_elementwise(model, shard, own, formats)
    operations += ffn_operations(model, shard, work, formats) + end_operations(model, shard, own, formats)
    transfers = attention_transfers(model, shard, work, structure, formats, ffn=True)
    return operations, transfers + end_transfers(model, engine, shard, own, structure)


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


def attention_projections(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    """Into attention and out of it."""
    weights, d, dh = layer_weights(model, shard), model.hidden, model.attention.head_dim
    each, plain, rows, dtype = formats.weights.bytes, formats.weights.plain_bytes, work.tokens, formats.compute
    qkv, heads = (shard.heads + 2 * shard.kv_heads) * dh, shard.heads * dh
    return [
        gemm("qkv", rows, d, qkv, weights.qkv * each + weights.qkv_bias * plain, dtype),
        gemm("out", rows, heads, d, weights.out * each + weights.out_bias * plain, dtype),
    ]


def ffn_operations(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    """A dense FFN: its two products, and its activation between them."""
    weights, d = layer_weights(model, shard), model.hidden
    each, plain, rows, dtype = formats.weights.bytes, formats.weights.plain_bytes, work.tokens, formats.compute
    inputs = model.ffn.inputs * shard.ffn
    between = rows * shard.ffn * (model.ffn.inputs + 1) * ACT
    return [
        gemm("gate_up", rows, d, inputs, weights.gate_up * each + weights.gate_up_bias * plain, dtype),
        gemm("down", rows, shard.ffn, d, weights.down * each + weights.down_bias * plain, dtype),
        Operation("activation", "elementwise", formats.native, activation_bytes=between),
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
    if structure.sequence:  # the heads of all ranks that share the tokens, over a part of these
        heads, kv_heads, context = shard.decode_heads, shard.cache_heads, np.ceil(context / shard.sequence)
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


def attention_elementwise(model: Model, shard: Shard, work: Pass, formats: Formats) -> list[Operation]:
    """Memory-bound kernels: norms with the residual, rotary embedding with the KV write, norms of queries and keys."""
    rows, dh = work.tokens, model.attention.head_dim
    qkv = (shard.heads + shard.kv_heads) * dh
    kv_write = rows * 2 * shard.kv_heads * dh * formats.kv.bytes
    return [
        norm_operation(model, work, formats),
        Operation("rope, KV write", "elementwise", formats.native, activation_bytes=rows * qkv * 2 * ACT + kv_write),
        *qk_norm_operations(model, shard, work, formats),
    ]


def norm_operation(model: Model, work: Pass, formats: Formats) -> Operation:
    """The layer's norms with the residual."""
    return Operation(
        "norm",
        "elementwise",
        formats.native,
        times=model.norm.per_layer,
        weight_bytes=model.norm.vectors * model.hidden * ACT,
        activation_bytes=work.tokens * model.hidden * 4 * ACT,
    )


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


def end_transfers(model: Model, engine: Engine, shard: Shard, work: Pass, structure: Structure) -> list[Transfer]:
    """Behind the embedding and the head; groups of data-parallel attention have both to themselves."""
    axes = "heads" if structure.attention == "data" else "xyz"
    transfers = []
    if engine.embedding_all_reduce:
        reduced = work.tokens * model.hidden * ACT
        transfers.append(Transfer("embedding all-reduce", "all_reduce", reduced, "first", axes=axes))
    logits = work.logits * shard.vocab * shard.attention_tp * ACT
    return [*transfers, Transfer("logits all-gather", "all_gather", logits, "last", axes=axes)]


def attention_transfers(
    model: Model, shard: Shard, work: Pass, structure: Structure, formats: Formats, *, ffn: bool
) -> list[Transfer]:
    """What a layer's attention sends, and with `ffn` its dense FFN too."""
    dh, attention = model.attention.head_dim, model.attention
    if structure.attention == "data":
        transfers = _between_groups(model, shard, work, ffn=ffn)
    else:
        often = 2 if ffn and not model.parallel_block else 1
        transfers = [Transfer("all-reduce", "all_reduce", work.tokens * model.hidden * ACT, times=often)]
    if structure.sequence:
        transfers += _along_sequence(model, shard, work, structure, formats)
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


def _between_groups(model: Model, shard: Shard, work: Pass, *, ffn: bool) -> list[Transfer]:
    """Data-parallel attention: a group reduces its own tokens' attention; the FFN, over all ranks, wants all tokens."""
    own = work.divided(shard.attention_dp).tokens * model.hidden * ACT
    transfers = [Transfer("attention all-reduce", "all_reduce", own, axes="heads")]
    if ffn:
        everything = work.tokens * model.hidden * ACT
        transfers.append(Transfer("tokens of all groups", "all_gather", everything))
        transfers.append(Transfer("tokens to their groups", "reduce_scatter", everything))
        transfers.append(Transfer("tokens of the group", "all_gather", own, axes="heads"))
    return transfers


def _along_sequence(model: Model, shard: Shard, work: Pass, structure: Structure, formats: Formats) -> list[Transfer]:
    """Ranks that hold parts of a request's cache by tokens: queries to all of them, partial outputs back.

    Each computes its part for the heads of all of them; an output comes with the logarithm of its sum of exponentials,
    by which parts are merged (one exchange, as vLLM's decode context parallelism and Helix do).
    """
    own = work if structure.attention != "data" else work.divided(shard.attention_dp)
    rows = np.maximum(own.decode_rows, 0.0)  # a mean load below one request leaves none to ride along
    gathered, attention = shard.decode_heads, model.attention
    latent, dh = attention.latent, attention.head_dim
    query, value = (dh, dh) if latent is None else (latent.cached, latent.kv_rank)
    token = 2 * dh * shard.kv_heads if latent is None else latent.cached
    exchanged: tuple[tuple[str, CollectiveOp, float], ...] = (
        ("queries along the sequence", "all_gather", query * ACT),
        ("partial outputs", "all_to_all", value * ACT + LSE),
    )
    transfers = [
        Transfer(name, op, rows * gathered * size, axes="sequence", by_request=True) for name, op, size in exchanged
    ]
    if latent is None and np.any(shard.cache_heads > shard.kv_heads):
        # ranks that compute different KV heads keep different tokens of them all
        apart = shard.cache_heads > shard.kv_heads
        written = own.tokens * token * ACT * apart
        transfers.append(Transfer("keys and values to their tokens' ranks", "all_to_all", written, axes="sequence"))
    if np.any(own.prefill_prior):  # what is cached of a prompt lies on all of them, and its heads want all tokens
        read = np.maximum(own.prefill_prior, 0.0) * token * formats.kv.bytes  # rows without a full chunk have none
        transfers.append(Transfer("cached prompts from along the sequence", "all_gather", read, axes="sequence"))
    return transfers
