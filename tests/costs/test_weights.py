"""Parameter counts equal the published ones, and every rank holds the share that Megatron's partition gives it."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from helpers import every

from planner import Model, load_engine, load_model
from planner.costs.weights import (
    Shard,
    Stages,
    embedding_elements,
    head_elements,
    layer_weights,
    matmul_parameters,
    parameters,
    published_parameters,
    stage_weight_bytes,
)
from planner.plans.rules import tp_allowed
from planner.specs.catalog import MODELS, names
from planner.specs.dtypes import WEIGHTS

PUBLISHED = [name for name in names(MODELS) if load_model(name).published is not None]


def tensors(model: Model) -> int:
    """Parameters written down tensor by tensor, as a checkpoint lists them; a tied head is not listed."""
    d, norm = model.hidden, [(model.hidden,)] * (2 if model.norm.bias else 1)
    listed = [(model.vocab, d), *norm * model.norm.final]
    listed += [] if model.tied_embeddings else [(model.vocab, d)]
    listed += [(model.learned_positions, d)] if model.learned_positions else []
    for index in range(model.layers):
        pattern, experts = model.attention_pattern, model.experts
        listed += linear_tensors(model) if pattern[index % len(pattern)] == "linear" else attention_tensors(model)
        sparse = experts is not None and index >= experts.first_dense and (index + 1) % experts.every == 0
        listed += expert_tensors(model) if sparse else ffn_tensors(model, model.ffn.hidden, model.ffn.bias)
        listed += norm * model.norm.per_layer
    return sum(prod(shape) for shape in listed)


def attention_tensors(model: Model) -> list[tuple[int, ...]]:
    d, attention = model.hidden, model.attention
    dh, heads, kv_heads, latent = attention.head_dim, attention.heads, attention.kv_heads, attention.latent
    if latent is not None:
        query = latent.nope_dim + latent.rope_dim
        wide, small = (heads * query, d), [(d, latent.query_rank or 0), (latent.query_rank or 0,)]
        found = [wide] if latent.query_rank is None else [*small, (heads * query, latent.query_rank)]
        found += [(latent.kv_rank + latent.rope_dim, d), (latent.kv_rank,)]
        return [*found, (heads * (latent.nope_dim + latent.value_dim), latent.kv_rank), (d, heads * latent.value_dim)]
    width = heads * dh * (2 if attention.output_gate else 1)
    found = [(width, d), (kv_heads * dh, d), (kv_heads * dh, d), (d, heads * dh)]
    found += [(width,), (kv_heads * dh,), (kv_heads * dh,)] if attention.qkv_bias else []
    found += [(d,)] if attention.out_bias else []
    found += {None: [], "head_dim": [(dh,), (dh,)], "heads": [(heads, dh), (kv_heads, dh)]}[attention.qk_norm]
    return found + ([(heads,)] if attention.sinks else [])


def linear_tensors(model: Model) -> list[tuple[int, ...]]:
    d, linear = model.hidden, model.linear
    assert linear is not None
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    if linear.kind == "lightning":  # Q, K, V as one, its norm, the output's gate, the output
        return [(2 * keys + values, d), (values,), (values, d), (d, values)]
    scalars = [(2 * linear.value_heads, d), (linear.value_heads,), (linear.value_heads,)]
    convolution = (2 * keys + values, 1, linear.conv_kernel)
    return [(2 * keys + 2 * values, d), *scalars, convolution, (linear.value_dim,), (d, values)]


def ffn_tensors(model: Model, hidden: int, bias: bool) -> list[tuple[int, ...]]:
    inputs = 2 if model.ffn.gated else 1
    biases = [*[(hidden,)] * inputs, (model.hidden,)] if bias else []
    return [*[(hidden, model.hidden)] * inputs, (model.hidden, hidden), *biases]


def expert_tensors(model: Model) -> list[tuple[int, ...]]:
    experts = model.experts
    assert experts is not None
    found = ffn_tensors(model, experts.hidden, experts.bias) * experts.routed + [(experts.routed, model.hidden)]
    found += ffn_tensors(model, experts.shared_hidden, False) if experts.shared_hidden else []
    return found + [(experts.routed,)] * experts.router_bias + [(model.hidden,)] * experts.shared_gate


def plain(name: str) -> bool:
    """Whether a model's layers are all dense, with heads that are projected one by one."""
    model = load_model(name)
    odd = (model.experts, model.attention.latent, model.linear)
    return odd == (None,) * 3 and model.attention.qk_norm != "heads" and name != "falcon-7b"  # 71 heads: no degrees


DENSE = [name for name in names(MODELS) if plain(name)]


@every("name", names(MODELS))
def test_the_derived_count_is_that_of_the_tensors(name: str) -> None:
    assert parameters(load_model(name)) == tensors(load_model(name))


@every("name", PUBLISHED)
def test_the_derived_count_is_the_published_one(name: str) -> None:
    model = load_model(name)
    stated, count = model.published, published_parameters(model)
    assert stated is not None
    if stated.includes_lm_head_copy:
        assert model.tied_embeddings
    if name == "kimi-k2":  # 3,416 of the published count are unexplained
        assert stated.parameters - count == 3416
    elif stated.precision == "exact":
        assert count == stated.parameters
    else:
        assert stated.digits is not None
        unit = 10 ** (len(str(stated.parameters)) - stated.digits)
        assert abs(count - stated.parameters) <= unit / 2


def test_every_model_with_a_maker_states_a_count() -> None:
    without = set(names(MODELS)) - set(PUBLISHED)
    # serving variants of another model, which nobody published as such
    assert without == {"palm-540b-padded", "palm-540b-multihead"}
    exact = [name for name in PUBLISHED if load_model(name).published.precision == "exact"]  # type: ignore[union-attr]
    assert len(exact) >= 48


@every(
    ("name", "count"),
    [
        ("llama3-70b", 70_553_706_496),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-405b", 405_853_388_800),
        ("llama2-7b", 6_738_415_616),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-32b", 32_762_123_264),
        ("palm-540b-padded", 558_173_878_272),
    ],
)
def test_known_counts(name: str, count: int) -> None:
    assert parameters(load_model(name)) == count


def test_padding_palm_to_64_heads_adds_three_percent() -> None:
    plain, padded = parameters(load_model("palm-540b")), parameters(load_model("palm-540b-padded"))
    assert padded - plain == 118 * 2 * 16 * 256 * 18432  # 16 more heads in the query and output projections
    assert (padded - plain) / plain == pytest.approx(0.033, abs=0.001)


def test_matmul_parameters_are_the_matrices_a_token_meets() -> None:
    """No embedding, no norm, no bias; the head even where it is tied."""
    model = load_model("llama3-70b")
    norms = (2 * model.layers + 1) * model.hidden
    assert matmul_parameters(model) == parameters(model) - model.vocab * model.hidden - norms
    tied = load_model("palm-540b")
    assert matmul_parameters(tied) == parameters(tied) - (tied.layers + 1) * tied.hidden


# --- a rank's share -------------------------------------------------------------------------------------------------


@every("name", DENSE)
def test_shards_put_together_are_the_layer_and_what_is_replicated(name: str) -> None:
    model, engine = load_model(name), load_engine("lecture")
    whole = layer_weights(model, Shard.of(model, 1))
    d, dh, kv_heads = model.hidden, model.attention.head_dim, model.attention.kv_heads
    degrees = [tp for tp in range(1, model.attention.heads + 1) if tp_allowed(model, engine, tp) is None]
    assert len(degrees) > 2
    for tp in degrees:
        one = layer_weights(model, Shard.of(model, tp))
        copies = 2 * (max(kv_heads, tp) - kv_heads) * dh  # width of the KV projections held more than once
        assert tp * one.qkv == whole.qkv + copies * d
        assert tp * one.qkv_bias == whole.qkv_bias + copies * model.attention.qkv_bias
        for sharded in ("out", "gate_up", "down", "gate_up_bias"):
            assert tp * getattr(one, sharded) == getattr(whole, sharded), sharded
        for everywhere in ("out_bias", "down_bias", "norms"):
            assert getattr(one, everywhere) == getattr(whole, everywhere), everywhere


def test_shards_of_many_degrees_are_those_of_each() -> None:
    model = load_model("qwen2.5-7b")
    degrees = np.array([1, 2, 4, 7, 14, 28])
    together = layer_weights(model, Shard.of(model, degrees, 64))
    for index, tp in enumerate(degrees):
        alone = layer_weights(model, Shard.of(model, int(tp), 64))
        assert np.broadcast_to(together.matrices, 6)[index] == alone.matrices
        assert np.broadcast_to(together.vectors, 6)[index] == alone.vectors


def test_kv_heads_are_copied_beyond_their_number() -> None:
    model = load_model("llama3-70b")
    held = [float(Shard.of(model, tp).kv_heads) for tp in (1, 2, 4, 8, 16, 32, 64)]
    assert held == [8, 4, 2, 1, 1, 1, 1]
    assert [float(Shard.of(model, tp).heads) for tp in (1, 8, 64)] == [64, 8, 1]


@every(
    ("vocab", "multiple", "tp", "rows"),
    [(50272, 1, 8, 6284), (50257, 1, 2, 25129), (50257, 64, 2, 25152), (50257, 64, 1, 50304), (128256, 64, 8, 16032)],
)
def test_the_vocabulary_is_padded_to_the_engines_multiple_and_divided(
    vocab: int, multiple: int, tp: int, rows: int
) -> None:
    model = load_model("opt-13b")._replace(vocab=vocab)
    shard = Shard.of(model, tp, multiple)
    assert shard.vocab == rows
    assert head_elements(model, shard) == rows * model.hidden
    assert embedding_elements(model, shard) == (rows + 2050) * model.hidden, "learned positions are on every rank"


# --- stages ---------------------------------------------------------------------------------------------------------


def layers_of(layers: int, pp: int) -> list[int]:
    """Layers per stage as vLLM deals them: the remainder one by one to the stages before the last, backwards."""
    stages = [layers // pp] * pp
    for extra in range(layers % pp):
        stages[-2 - extra] += 1
    return stages


def test_the_remainder_goes_before_the_last_stage_backwards() -> None:
    assert layers_of(61, 4) == [15, 15, 16, 15]
    assert layers_of(94, 4) == [23, 24, 24, 23]
    assert layers_of(80, 3) == [27, 27, 26]


@every("layers", [1, 2, 7, 32, 61, 94, 118])
def test_first_last_and_the_fullest_between_are_those_of_the_dealt_layers(layers: int) -> None:
    model = load_model("llama3-8b")._replace(layers=layers)
    depths = np.arange(1, layers + 1)
    together = Stages.of(model, depths)
    for index, pp in enumerate(depths.tolist()):
        dealt = layers_of(layers, pp)
        assert sum(dealt) == layers
        assert together.first[index] == dealt[0]
        assert together.last[index] == dealt[-1]
        if pp > 2:
            assert together.middle[index] == max(dealt[1:-1])


@every("name", ["llama3-8b", "opt-13b", "falcon-180b"])
def test_stages_together_hold_the_model_and_a_tied_matrix_at_both_ends(name: str) -> None:
    model, dtype = load_model(name), WEIGHTS["bf16"]
    shard = Shard.of(model, 1)
    alone, no_middle, no_last = stage_weight_bytes(model, shard, Stages.of(model, 1), dtype)
    assert alone == 2 * parameters(model)
    assert (no_middle, no_last) == (0.0, 0.0)
    first, middle, last = stage_weight_bytes(model, shard, Stages.of(model, 4), dtype)
    assert model.layers % 4 == 0
    second_copy = model.tied_embeddings * head_elements(model, shard)
    assert first + 2 * middle + last == 2 * (parameters(model) + second_copy)
    assert first - middle == 2 * embedding_elements(model, shard)
    assert last - middle == 2 * (head_elements(model, shard) + model.norm.final * model.norm.vectors * model.hidden)
    _, between, _ = stage_weight_bytes(model, shard, Stages.of(model, 2), dtype)
    assert between == 0.0


def test_quantised_weights_leave_ends_norms_and_biases_in_16_bit() -> None:
    model = load_model("qwen2.5-7b")
    shard, one = Shard.of(model, 1), Stages.of(model, 1)
    layer = layer_weights(model, shard)
    matrices = model.layers * layer.matrices
    plain = parameters(model) - matrices
    assert layer.matrices == parameters(model._replace(layers=1)) - parameters(model._replace(layers=0)) - layer.vectors
    quantised = {"fp8": 1.0, "int8": 1.0, "int4": 0.51953125, "mxfp4": 0.53125, "bf16": 2.0, "fp16": 2.0}
    for name, each in quantised.items():
        assert sum(stage_weight_bytes(model, shard, one, WEIGHTS[name])) == 2 * plain + each * matrices, name
    assert sum(stage_weight_bytes(model, shard, one, WEIGHTS["fp32"])) == 4 * parameters(model)
