"""Parameters of a model and of one rank's share of it. One table serves counts, memory and the bytes a step reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from planner.specs.dtypes import Dtype
from planner.specs.engine import Engine
from planner.specs.model import Model

Num = Any
"""A number or an array of numbers; arrays broadcast."""


class Shard(NamedTuple):
    """One rank's share of a tensor-parallel group: local sizes, numbers or arrays over plans."""

    tp: Num
    heads: Num
    kv_heads: Num
    ffn: Num
    vocab: Num
    layer: LayerWeights | None = None
    """Elements of one layer, counted once for all passes that read them."""

    @classmethod
    def of(cls, model: Model, tp: Num, vocabulary_multiple: int = 1) -> Shard:
        """The fullest rank's share under tensor parallelism of degree `tp`.

        KV heads and their projections are replicated once tp exceeds their number; the vocabulary is padded to
        `vocabulary_multiple` and then to the ranks. Query heads and the hidden width divide by rule (`plans.rules`).
        """
        tp = np.asarray(tp, dtype=float)
        padded = -(-model.vocab // vocabulary_multiple) * vocabulary_multiple
        sizes = cls(
            tp=tp,
            heads=np.ceil(model.attention.heads / tp),
            kv_heads=np.maximum(1.0, np.ceil(model.attention.kv_heads / tp)),
            ffn=np.ceil(model.ffn.hidden / tp),
            vocab=np.ceil(padded / tp),
        )
        return sizes._replace(layer=layer_weights(model, sizes))


class LayerWeights(NamedTuple):
    """Elements of one layer on one rank: matrices (which may be quantised) and vectors (which are not)."""

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

    def bytes(self, dtype: Dtype) -> Num:
        """Bytes of the layer."""
        return self.matrices * dtype.bytes + self.vectors * dtype.plain_bytes


def layer_weights(model: Model, shard: Shard) -> LayerWeights:
    """Elements of one layer on one rank (Megatron: columns then rows; norms and row biases on every rank)."""
    if shard.layer is not None:
        return shard.layer
    d, attention, ffn = model.hidden, model.attention, model.ffn
    qkv_width = (shard.heads + 2 * shard.kv_heads) * attention.head_dim
    norms = model.norm.per_layer * model.norm.vectors * d + (2 * attention.head_dim if attention.qk_norm else 0)
    return LayerWeights(
        qkv=d * qkv_width,
        out=shard.heads * attention.head_dim * d,
        gate_up=ffn.inputs * d * shard.ffn,
        down=shard.ffn * d,
        qkv_bias=qkv_width * attention.qkv_bias,
        out_bias=d * attention.out_bias,
        gate_up_bias=ffn.inputs * shard.ffn * ffn.bias,
        down_bias=d * ffn.bias,
        norms=norms,
    )


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
    """Parameters of the model; tied embeddings count once."""
    whole = Shard.of(model, 1)
    layer = layer_weights(model, whole)
    total = (
        model.layers * (layer.matrices + layer.vectors) + embedding_elements(model, whole) + final_norm_elements(model)
    )
    return int(total + (0 if model.tied_embeddings else head_elements(model, whole)))


def matmul_parameters(model: Model) -> float:
    """Parameters that a token is multiplied with: all matrices of the layers and the output matrix."""
    whole = Shard.of(model, 1)
    return float(model.layers * layer_weights(model, whole).matrices + head_elements(model, whole))


class Stages(NamedTuple):
    """How the layers divide over pipeline stages: first, last and the fullest of those between."""

    pp: Num
    first: Num
    middle: Num
    last: Num

    @classmethod
    def of(cls, model: Model, pp: Num, engine: Engine | None = None) -> Stages:
        """Layers per stage; a remainder goes to the stages before the last, backwards (vLLM PR 13839)."""
        del engine
        pp = np.asarray(pp, dtype=float)
        base = np.floor(model.layers / pp)
        rest = model.layers - base * pp
        first = base + (rest == pp - 1) * (pp > 1)
        return cls(pp=pp, first=first, middle=base + (rest > 0), last=base)


def stage_weight_bytes(model: Model, shard: Shard, stages: Stages, dtype: Dtype) -> tuple[Num, Num, Num]:
    """Bytes of weights per rank on the first, a middle and the last stage.

    A single stage holds both ends; tied embeddings count once there, and at both ends when they are apart.
    """
    layer = layer_weights(model, shard).bytes(dtype)
    embedding = embedding_elements(model, shard) * dtype.plain_bytes
    head = head_elements(model, shard) * dtype.plain_bytes
    norm = final_norm_elements(model) * dtype.plain_bytes
    alone = stages.pp == 1
    first = stages.first * layer + embedding + alone * ((0.0 if model.tied_embeddings else head) + norm)
    last = np.where(alone, 0.0, stages.last * layer + head + norm)
    middle = np.where(stages.pp > 2, stages.middle * layer, 0.0)
    return first, middle, last
