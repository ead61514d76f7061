"""Parameters of a model and of one rank's share of it. One table serves counts, memory and the bytes a step reads."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from planner.plans.rules import PADDING
from planner.specs.dtypes import Dtype
from planner.specs.engine import Engine
from planner.specs.model import LayerKind, Model

Num = Any
"""A number or an array of numbers; arrays broadcast."""


class Shard(NamedTuple):
    """One rank's share of a tensor-parallel group: local sizes, numbers or arrays over plans."""

    tp: Num
    heads: Num
    kv_heads: Num
    ffn: Num
    vocab: Num
    expert: Num = 0.0
    """Width of one routed expert."""
    attention_tp: Num = 1.0
    """Ranks that divide the heads of a request: tp, or fewer where attention is data-parallel inside the group."""
    layer: LayerWeights | None = None
    """Elements of one layer, counted once for all passes that read them."""
    x: Num = 1.0
    """Ranks that the model's width is divided over in storage (X of `plans.placement.Mesh`); the FFN's width and the
    heads over the other tp / x."""
    y: Num = 1.0
    ffn_tp: Num = 1.0
    """Ranks that divide a dense FFN, and shared experts: tp, or those of one group that keeps its own."""
    sequence: Num = 1.0
    """Ranks that a request's cache is divided over by tokens while it decodes."""
    cache_heads: Num = 0.0
    """KV heads whose tokens a rank keeps: `kv_heads`, or more where ranks divide the tokens."""
    decode_heads: Num = 0.0
    """Query heads that a rank attends for while decoding: those of all ranks that share its requests' tokens."""
    stored_heads: Num = 0.0
    """Query heads, whole or padded, whose columns a rank stores (in d / x rows): `heads` where x is 1."""
    stored_kv_heads: Num = 0.0

    @property
    def attention_dp(self) -> Num:
        """Groups of ranks with projections of their own: for their own requests, or (cp) for parts of all."""
        return self.tp / self.attention_tp

    @property
    def z(self) -> Num:
        """Ranks along Z."""
        return self.tp / (self.x * self.y)

    @classmethod
    def of(
        cls,
        model: Model,
        tp: Num,
        vocabulary_multiple: int = 1,
        expert_multiple: int = 1,
        attention_dp: Num = 1,
        x: Num = 1.0,
        y: Num = 1.0,
        head_padding: bool = False,
        sequence: Num = 1.0,
        ep: Num = 1.0,
        cp: Num = 1.0,
    ) -> Shard:
        """The fullest rank's share under tensor parallelism of degree `tp`.

        KV heads and their projections are replicated once tp exceeds their number; the vocabulary is padded to
        `vocabulary_multiple` and then to the ranks, an expert's width on a rank to `expert_multiple`. Query heads
        and the hidden width divide by rule (`plans.rules`). With `attention_dp` the group's ranks form so many
        smaller ones, each with all heads of its own requests and the whole vocabulary. With context parallelism `tp`
        are all ranks of a stage, of which each of cp groups has all projections and the whole vocabulary.

        Where X divides the model's width the heads' columns are stored over the other YZ ranks; attention over heads
        divides them over all. With `head_padding` they are padded to all ranks if no more than half as many again are
        empty then; else to those YZ, where X then divides a head's columns.
        """
        tp = np.asarray(tp, dtype=float)
        over = tp / attention_dp / cp
        heads = np.ceil(model.attention.heads / over)
        stored, stored_kv = heads, np.maximum(1.0, np.ceil(model.attention.kv_heads / over))
        if np.any(np.asarray(x) > 1):
            ways = over / x
            fits = head_padding & (heads * over <= PADDING * model.attention.heads)
            stored = np.where(fits, heads * x, np.ceil(model.attention.heads / ways))
            heads = np.ceil(stored / x)
            stored_kv = np.maximum(1.0, np.ceil(model.attention.kv_heads / ways))
        own = (np.asarray(ep) > 1) & (np.asarray(attention_dp) > 1) | (np.asarray(cp) > 1)
        ffn_tp = np.where(own, over, tp)
        expert = 0.0 if model.experts is None else np.ceil(model.experts.hidden / tp)
        padded = -(-model.vocab // vocabulary_multiple) * vocabulary_multiple
        sizes = cls(
            tp=tp,
            heads=heads,
            kv_heads=np.maximum(1.0, np.ceil(model.attention.kv_heads / over)),
            attention_tp=over,
            ffn=np.ceil(model.ffn.hidden / ffn_tp),
            ffn_tp=ffn_tp,
            vocab=np.ceil(padded / over),
            expert=np.ceil(expert / expert_multiple) * expert_multiple,
            x=x,
            y=y,
            sequence=sequence,
            cache_heads=np.maximum(1.0, np.ceil(model.attention.kv_heads / (over / sequence))),
            decode_heads=np.where(
                over > model.attention.heads, np.ceil(model.attention.heads / (over / sequence)), heads * sequence
            ),
            stored_heads=stored,
            stored_kv_heads=stored_kv,
        )
        return sizes._replace(layer=layer_weights(model, sizes))

    @classmethod
    def for_engine(
        cls,
        model: Model,
        engine: Engine,
        weights: str,
        tp: Num,
        attention_dp: Num = 1,
        x: Num = 1.0,
        y: Num = 1.0,
        sequence: Num = 1.0,
        ep: Num = 1.0,
        cp: Num = 1.0,
    ) -> Shard:
        """A rank's share with the padding that an engine adds for weights of this dtype."""
        expert_multiple = engine.memory.expert_multiple.get(weights, 1)
        return cls.of(
            model,
            tp,
            engine.vocabulary_multiple,
            expert_multiple,
            attention_dp,
            x,
            y,
            engine.head_padding,
            sequence,
            ep,
            cp,
        )


class LayerWeights(NamedTuple):
    """Elements of one dense layer on one rank: matrices (which may be quantised) and vectors (which are not)."""

    qkv: Num
    out: Num
    gate_up: Num
    down: Num
    qkv_bias: Num
    out_bias: Num
    gate_up_bias: Num
    down_bias: Num
    norms: Num

    @property
    def matrices(self) -> Num:
        """Elements of the four projections."""
        return self.qkv + self.out + self.gate_up + self.down

    @property
    def vectors(self) -> Num:
        """Elements of biases and norms."""
        return self.qkv_bias + self.out_bias + self.gate_up_bias + self.down_bias + self.norms


def layer_weights(model: Model, shard: Shard) -> LayerWeights:
    """Elements of one dense layer on one rank (Megatron: columns then rows; norms and row biases on every rank)."""
    if shard.layer is not None:
        return shard.layer
    d, attention, ffn = model.hidden, model.attention, model.ffn
    heads, kv_heads = shard.stored_heads, shard.stored_kv_heads
    qkv_width = (heads * (2 if attention.output_gate else 1) + 2 * kv_heads) * attention.head_dim
    return LayerWeights(
        qkv=d / shard.x * qkv_width,
        out=heads * attention.head_dim * (d / shard.x),
        gate_up=ffn.inputs * d * shard.ffn,
        down=shard.ffn * d,
        qkv_bias=qkv_width * attention.qkv_bias,
        out_bias=d * attention.out_bias,
        gate_up_bias=ffn.inputs * shard.ffn * ffn.bias,
        down_bias=d * ffn.bias,
        norms=model.norm.per_layer * model.norm.vectors * d + _small_elements(model, shard),
    )


def _small_elements(model: Model, shard: Shard) -> Num:
    """Elements of the norms of queries and keys, and of the heads' sinks."""
    attention = model.attention
    norms: Num = 2 * attention.head_dim if attention.qk_norm else 0
    if attention.qk_norm == "heads":
        norms = (shard.heads + shard.kv_heads) * attention.head_dim
    return norms + shard.heads * attention.sinks


class Elements(NamedTuple):
    """Elements by what a weight dtype does to them."""

    attention: Num = 0.0
    """Projections of attention."""
    ffn: Num = 0.0
    """Projections of dense FFNs."""
    experts: Num = 0.0
    """Matrices of routed and shared experts."""
    plain: Num = 0.0
    """Embedding, head, norms, biases, routers: in 16 bit (or 32) always."""

    @property
    def total(self) -> Num:
        """All elements."""
        return self.attention + self.ffn + self.experts + self.plain

    def plus(self, other: Elements, times: Num = 1.0) -> Elements:
        """Self and `times` others."""
        return Elements(*(mine + theirs * times for mine, theirs in zip(self, other, strict=True)))

    def bytes(self, model: Model, dtype: Dtype) -> Num:
        """Bytes in memory: what the dtype applies to takes it, the rest its plain bytes."""
        attention = dtype.bytes if model.quantised == "linears" else dtype.plain_bytes
        ffn = dtype.plain_bytes if model.quantised == "experts" else dtype.bytes
        return self.attention * attention + self.ffn * ffn + self.experts * dtype.bytes + self.plain * dtype.plain_bytes


def layer_elements(model: Model, shard: Shard, kind: LayerKind) -> Elements:
    """Elements of a layer of this kind on one rank; each expert is split like an FFN (expert-TP)."""
    norms = model.norm.per_layer * model.norm.vectors * model.hidden
    if kind.attention == "linear":
        attention = _linear_attention_elements(model, shard)
    elif model.attention.latent is not None:
        attention = _latent_attention_elements(model, shard)
    else:
        dense = layer_weights(model, shard)
        small = dense.qkv_bias + dense.out_bias + _small_elements(model, shard)
        attention = Elements(attention=dense.qkv + dense.out, plain=small)
    if kind.experts:
        ffn = _expert_elements(model, shard)
    else:
        dense = layer_weights(model, shard)
        ffn = Elements(ffn=dense.gate_up + dense.down, plain=dense.gate_up_bias + dense.down_bias)
    return attention.plus(ffn).plus(Elements(plain=norms))


def _latent_attention_elements(model: Model, shard: Shard) -> Elements:
    """DeepSeek-V2: compressions of query and KV stand on every rank, what expands them per head is divided."""
    d, latent = model.hidden, model.attention.latent
    assert latent is not None
    query = latent.nope_dim + latent.rope_dim
    if latent.query_rank is None:
        linears = d * shard.heads * query
    else:
        linears = d * latent.query_rank + latent.query_rank * shard.heads * query
    linears = linears + d * latent.cached + latent.kv_rank * shard.heads * (latent.nope_dim + latent.value_dim)
    return Elements(linears + shard.heads * latent.value_dim * d, plain=(latent.query_rank or 0) + latent.kv_rank)


def _linear_attention_elements(model: Model, shard: Shard) -> Elements:
    """Gated DeltaNet (queries, keys, values, gate, two scalars a head, convolution) or lightning attention."""
    d, linear = model.hidden, model.linear
    assert linear is not None
    keys = linear.key_heads * linear.key_dim / shard.attention_tp
    values = linear.value_heads * linear.value_dim / shard.attention_tp
    if linear.kind == "lightning":
        return Elements(d * (2 * keys + values) + 2 * d * values, plain=values)
    heads = linear.value_heads / shard.attention_tp
    convolution = (2 * keys + values) * linear.conv_kernel
    return Elements(
        d * (2 * keys + 2 * values) + d * 2 * heads + values * d, plain=convolution + 2 * heads + linear.value_dim
    )


def _expert_elements(model: Model, shard: Shard) -> Elements:
    """Routed and shared experts divided over the ranks; router, its bias and the shared expert's gate on each."""
    d, ffn, experts = model.hidden, model.ffn, model.experts
    assert experts is not None
    matrices = ffn.inputs + 1
    routed = experts.routed * matrices * d * shard.expert
    shared = matrices * d * np.ceil(experts.shared_hidden / shard.ffn_tp)
    biases = experts.routed * (ffn.inputs * shard.expert + d) * experts.bias
    router = d * experts.routed + experts.routed * experts.router_bias + d * experts.shared_gate
    return Elements(experts=routed + shared, plain=router + biases)


def embedding_elements(model: Model, shard: Shard) -> Num:
    """Elements of the input embedding and of learned positions on one rank."""
    return shard.vocab * model.hidden + model.learned_positions * model.hidden


def head_elements(model: Model, shard: Shard) -> Num:
    """Elements of the output matrix on one rank."""
    return shard.vocab * model.hidden


def final_norm_elements(model: Model) -> int:
    """Elements of the last norm, on every rank."""
    return model.norm.final * model.norm.vectors * model.hidden


def parameters(model: Model) -> int:
    """Parameters of the language model; tied embeddings count once."""
    whole = Shard.of(model, 1)
    layers = sum(layer_elements(model, whole, kind).total * count for kind, count in _kinds(model))
    return int(layers + _ends(model, whole))


def active_parameters(model: Model) -> int:
    """Parameters that one token meets: of the routed experts only the top k; embedding and head included."""
    experts = model.experts
    if experts is None:
        return parameters(model)
    idle = (experts.routed - experts.top_k) * (model.ffn.inputs + 1) * model.hidden * experts.hidden
    idle += (experts.routed - experts.top_k) * (model.ffn.inputs * experts.hidden + model.hidden) * experts.bias
    return parameters(model) - sum(count for kind, count in _kinds(model) if kind.experts) * idle


def published_parameters(model: Model) -> int:
    """Parameters counted as the published figure counts them: with what its `includes_...` say."""
    total, published = parameters(model), model.published
    if published is None:
        return total
    if published.includes_lm_head_copy:
        total += model.vocab * model.hidden
    if published.includes_prediction:
        total += prediction_parameters(model)
    if published.includes_extra:
        total += sum(extra.parameters for extra in model.extra)
    return total


def prediction_parameters(model: Model) -> int:
    """Parameters of the multi-token prediction modules: a layer, its joining projection and three norms each."""
    if model.prediction is None:
        return 0
    ends = 2 * model.vocab * model.hidden if model.prediction.own_ends else 0
    return int(model.prediction.modules * (prediction_elements(model, Shard.of(model, 1)).total + ends))


def prediction_elements(model: Model, shard: Shard) -> Elements:
    """Elements of one prediction module on a rank; engines share its embedding and head with the model."""
    d, kind = model.hidden, LayerKind("full", model.experts is not None)
    return layer_elements(model, shard, kind).plus(Elements(plain=2 * d * d + 3 * d))


def _ends(model: Model, whole: Shard) -> Num:
    head = 0 if model.tied_embeddings else head_elements(model, whole)
    return embedding_elements(model, whole) + final_norm_elements(model) + head


def _kinds(model: Model) -> list[tuple[LayerKind, int]]:
    """(kind of layer, how many) of a model."""
    kinds = model.layer_kinds()
    return [(kind, kinds.count(kind)) for kind in dict.fromkeys(kinds)]


def matmul_parameters(model: Model) -> float:
    """Parameters that a token is multiplied with: all matrices of the layers and the output matrix.

    Of routed experts those that a token goes to, with the router.
    """
    whole = Shard.of(model, 1)
    if model.experts is not None or model.attention.latent is not None:
        idle = 0.0
        if model.experts is not None:
            unused = model.experts.routed - model.experts.top_k
            idle = unused * (model.ffn.inputs + 1) * model.hidden * model.experts.hidden
        kinds = _kinds(model)
        layers = sum(count * layer_elements(model, whole, kind).total for kind, count in kinds)
        layers -= sum(count * idle for kind, count in kinds if kind.experts)
        vectors = model.layers * model.norm.per_layer * model.norm.vectors * model.hidden
        return float(layers - vectors + head_elements(model, whole))
    return float(model.layers * layer_weights(model, whole).matrices + head_elements(model, whole))


class Stages(NamedTuple):
    """How the layers divide over pipeline stages: first, last and the fullest of those between."""

    pp: Num
    first: Num
    middle: Num
    last: Num

    @classmethod
    def of(cls, model: Model, pp: Num) -> Stages:
        """Layers per stage, as `stage_sizes`."""
        pp = np.asarray(pp, dtype=float)
        base = np.floor(model.layers / pp)
        rest = model.layers - base * pp
        first = base + (rest == pp - 1) * (pp > 1)
        return cls(pp=pp, first=first, middle=base + (rest > 0), last=base)


def stage_sizes(layers: int, pp: int) -> list[int]:
    """Layers of every stage: a remainder goes to the stages before the last, backwards (vLLM PR 13839)."""
    base, rest = divmod(layers, pp)
    return [base + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]


Trio = tuple[Num, Num, Num]
"""Values of the first, the fullest middle and the last stage; 0 where there is no such stage."""


def stage_layers(model: Model, stages: Stages) -> list[tuple[LayerKind, Trio]]:
    """How many layers of each kind the first, the fullest middle (most elements) and the last stage hold."""
    kinds = _kinds(model)
    if len(kinds) == 1:
        middle, last = np.where(stages.pp > 2, stages.middle, 0.0), np.where(stages.pp > 1, stages.last, 0.0)
        return [(kinds[0][0], (stages.first, middle, last))]
    whole, every = Shard.of(model, 1), model.layer_kinds()
    size = {kind: float(layer_elements(model, whole, kind).total) for kind, _ in kinds}
    depths, which = np.unique(stages.pp, return_inverse=True)
    table = np.zeros((len(kinds), 3, len(depths)))
    for column, depth in enumerate(depths):
        ends = list(accumulate(stage_sizes(model.layers, int(depth)), initial=0))
        held = [every[start:stop] for start, stop in pairwise(ends)]
        chosen = [held[0], max(held[1:-1], key=lambda stage: sum(map(size.__getitem__, stage)), default=[]), []]
        if len(held) > 1:
            chosen[2] = held[-1]
        for row, (kind, _) in enumerate(kinds):
            table[row, :, column] = [stage.count(kind) for stage in chosen]
    table = table[:, :, which.reshape(np.shape(stages.pp))]
    return [(kind, (row[0], row[1], row[2])) for (kind, _), row in zip(kinds, table, strict=True)]


def stage_weight_bytes(model: Model, shard: Shard, stages: Stages, dtype: Dtype) -> Trio:
    """Bytes of weights per rank on the first, a middle and the last stage.

    A single stage holds both ends; tied embeddings count once there, and at both ends when they are apart. What
    stands beside the language model (a vision tower) is divided over the ranks of the first stage, in 16 bit.
    """
    layers: list[Num] = [0.0, 0.0, 0.0]
    for kind, counts in stage_layers(model, stages):
        each = layer_elements(model, shard, kind).bytes(model, dtype)
        layers = [held + each * count for held, count in zip(layers, counts, strict=True)]
    embedding = embedding_elements(model, shard) * dtype.plain_bytes
    head = head_elements(model, shard) * dtype.plain_bytes
    norm = final_norm_elements(model) * dtype.plain_bytes
    extra = sum(extra.parameters for extra in model.extra) * dtype.plain_bytes / shard.tp
    alone = stages.pp == 1
    first = layers[0] + embedding + extra + alone * ((0.0 if model.tied_embeddings else head) + norm)
    return first, layers[1], np.where(alone, 0.0, layers[2] + head + norm)
