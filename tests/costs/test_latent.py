"""Latent attention run on virtual devices: expanded and absorbed give the same, and what they do is what is counted.

Numpy in fp64: heads divided over ranks, requests over groups of them, a prompt in two chunks of which the second
expands what the first left in the cache, then decoding in the latent space. The reference knows no cache and no
absorption: every key and value of every head, from the whole sequence at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Array

from planner import Hardware, load_engine, load_hardware, load_machine, load_model
from planner.costs.latent import (
    latent_attention_operations,
    latent_decode,
    latent_elementwise,
    latent_operations,
    latent_prefill,
    latent_projections,
)
from planner.costs.layers import Formats, Operation, Pass, Structure, causal_pairs
from planner.costs.memory import Budget, room, table_bytes
from planner.costs.roofline import price_operation
from planner.costs.weights import Shard, Stages, layer_elements
from planner.sensitivity.constants import kernel_constants, scaled
from planner.specs.dtypes import WEIGHTS
from planner.specs.hardware import LATENT_KINDS
from planner.specs.model import Attention, FeedForward, LatentAttention, LayerKind, Model, Norm

ELEMENT = 2  # an fp64 of the simulation stands for one of 16 bits
BATCH, FIRST, SECOND = 5, 4, 3
PROMPT = FIRST + SECOND
LATENT = LatentAttention(kv_rank=16, rope_dim=4, nope_dim=8, value_dim=6, query_rank=12)
COMPRESSED = Model(
    name="compressed queries",
    layers=1,
    hidden=48,
    attention=Attention(heads=8, kv_heads=8, head_dim=12, latent=LATENT),
    ffn=FeedForward(hidden=96, gated=True, activation="silu"),
    norm=Norm(kind="rmsnorm", per_layer=2),
    vocab=128,
    tied_embeddings=False,
    max_context=64,
    weights="bf16",
    sources=("made up for a test",),
)
PLAIN_QUERIES = COMPRESSED._replace(
    name="plain queries", attention=COMPRESSED.attention._replace(latent=LATENT._replace(query_rank=None))
)
WHOLE = Structure()
SHIPPED = ("deepseek-v3", "deepseek-r1", "deepseek-v2-lite", "kimi-k2")
GROUPS = [(1, 1), (4, 1), (8, 1), (2, 2), (8, 2), (8, 4), (8, 8)]
"""(ranks, parts of them with requests of their own)."""


def formats(weights: str = "bf16", kv: str = "bf16") -> Formats:
    return Formats(WEIGHTS[weights], WEIGHTS[kv], WEIGHTS[weights].compute, "bf16")


# ---------------------------------------------------------------------------------------------------------- reference


class Weights(NamedTuple):
    """Of one layer, by the names of DeepSeek's code; heads stand in an axis of their own."""

    q_a: Array | None  # [d, query_rank]
    q_norm: Array | None
    q_b: Array  # [query_rank or d, heads, nope + rope]
    kv_a: Array  # [d, kv_rank + rope]
    kv_norm: Array
    keys: Array  # [kv_rank, heads, nope]
    values: Array  # [kv_rank, heads, value]
    out: Array  # [heads, value, d]


def weights_of(model: Model) -> Weights:
    random, d, heads = np.random.default_rng(3), model.hidden, model.attention.heads
    latent = model.attention.latent
    assert latent is not None
    rank = latent.query_rank

    def matrix(*shape: int) -> Array:
        return random.normal(size=shape) / np.sqrt(shape[0])

    return Weights(
        q_a=None if rank is None else matrix(d, rank),
        q_norm=None if rank is None else 1 + 0.3 * random.normal(size=rank),
        q_b=matrix(rank or d, heads, latent.nope_dim + latent.rope_dim),
        kv_a=matrix(d, latent.cached),
        kv_norm=1 + 0.3 * random.normal(size=latent.kv_rank),
        keys=matrix(latent.kv_rank, heads, latent.nope_dim),
        values=matrix(latent.kv_rank, heads, latent.value_dim),
        out=matrix(heads, latent.value_dim, d),
    )


def normalised(x: Array, gain: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * gain)


def rotated(x: Array, positions: Array) -> Array:
    """Rotary embedding of the last axis; positions run along the second."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** (-np.arange(half) / half)
    angle = angle.reshape(1, len(positions), *[1] * (x.ndim - 3), half)
    left, right = x[..., :half], x[..., half:]
    return np.concatenate(
        [left * np.cos(angle) - right * np.sin(angle), left * np.sin(angle) + right * np.cos(angle)], axis=-1
    )


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def reference(model: Model, weights: Weights, x: Array) -> Array:
    """[B, T, d] of causal attention with every head's keys and values written out."""
    latent, length = model.attention.latent, x.shape[1]
    assert latent is not None
    positions = np.arange(length)
    queries = x if weights.q_a is None or weights.q_norm is None else normalised(x @ weights.q_a, weights.q_norm)
    q = np.einsum("btr,rhe->bthe", queries, weights.q_b)
    compressed = x @ weights.kv_a
    c = normalised(compressed[..., : latent.kv_rank], weights.kv_norm)
    rope = rotated(compressed[..., latent.kv_rank :], positions)
    k = np.einsum("btr,rhe->bthe", c, weights.keys)
    k = np.concatenate([k, np.broadcast_to(rope[:, :, None], (*k.shape[:3], latent.rope_dim))], axis=-1)
    v = np.einsum("btr,rhe->bthe", c, weights.values)
    q = np.concatenate([q[..., : latent.nope_dim], rotated(q[..., latent.nope_dim :], positions)], axis=-1)
    scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(positions[:, None] >= positions, scores, -np.inf)
    return np.asarray(np.einsum("bhts,bshe,hed->btd", softmax(scores), v, weights.out))


# -------------------------------------------------------------------------------------------------------------- ranks


class Rank:
    """One chip: its heads' weights, the cache of its part's requests, and a log of what it did."""

    def __init__(self, model: Model, weights: Weights, heads: slice, kv_bytes: float) -> None:
        latent = model.attention.latent
        assert latent is not None
        self.latent, self.weights, self.kv_bytes = latent, weights, kv_bytes
        self.own = weights._replace(
            q_b=weights.q_b[:, heads],
            keys=weights.keys[:, heads],
            values=weights.values[:, heads],
            out=weights.out[heads],
        )
        self.cache = np.zeros((0, 0, latent.cached))  # [requests, tokens, kv_rank + rope]
        self.work: dict[str, Counter[str]] = defaultdict(Counter)

    def log(self, name: str, **amounts: float) -> None:
        self.work[name].update({key: value for key, value in amounts.items() if value})  # type: ignore[arg-type]

    def product(self, name: str, x: Array, matrix: Array) -> Array:
        """x [..., inner] times [inner, ...outer]."""
        flat = matrix.reshape(matrix.shape[0], -1)
        rows = x.size // x.shape[-1]
        self.log(
            name,
            flops=2 * rows * flat.size,
            weight_bytes=flat.size * ELEMENT,
            activation_bytes=rows * sum(flat.shape) * ELEMENT,
        )
        return np.asarray(x @ flat).reshape(*x.shape[:-1], *matrix.shape[1:])

    def by_head(self, name: str, x: Array, matrix: Array) -> Array:
        """x [B, T, heads, inner] times each head's [inner, outer] (matrix [inner, heads, outer])."""
        result = np.einsum("bthi,iho->btho", x, matrix)
        self.log(
            name,
            flops=2 * x.size * matrix.shape[-1],
            weight_bytes=matrix.size * ELEMENT,
            activation_bytes=(x.size + result.size) * ELEMENT,
        )
        return np.asarray(result)

    def norm(self, name: str, x: Array, gain: Array) -> Array:
        self.log(name, weight_bytes=gain.size * ELEMENT, activation_bytes=2 * x.size * ELEMENT)
        return normalised(x, gain)

    def compress(self, x: Array) -> tuple[Array, Array]:
        """Queries [B, T, heads, nope + rope] of new tokens, which then stand in the cache, and their positions."""
        own, latent, before = self.own, self.latent, self.cache.shape[1]
        positions = np.arange(before, before + x.shape[1])
        if own.q_a is None or own.q_norm is None:
            q, compressed = self.product("q", x, own.q_b), self.product("kv_a", x, own.kv_a)
        else:
            both = self.product("qkv_a", x, np.concatenate([own.q_a, own.kv_a], axis=1))
            rank = own.q_a.shape[1]
            compressed = both[..., rank:]
            q = self.product("q_b", self.norm("query norm", both[..., :rank], own.q_norm), own.q_b)
        c = self.norm("KV norm", compressed[..., : latent.kv_rank], own.kv_norm)
        q_rope, k_rope = q[..., latent.nope_dim :], compressed[..., latent.kv_rank :]
        new = np.concatenate([c, rotated(k_rope, positions)], axis=-1)
        self.cache = np.concatenate([self.cache.reshape(len(x), before, latent.cached), new], axis=1)
        self.log(
            "rope, KV write",
            activation_bytes=2 * (q_rope.size + k_rope.size) * ELEMENT + c.size * ELEMENT + new.size * self.kv_bytes,
        )
        return np.concatenate([q[..., : latent.nope_dim], rotated(q_rope, positions)], axis=-1), positions

    def output(self, mixed: Array) -> Array:
        """The rank's part of the sum: [B, T, heads, value] through its rows of the output matrix."""
        flat = self.own.out.reshape(-1, self.own.out.shape[-1])
        return self.product("out", mixed.reshape(*mixed.shape[:2], -1), flat)

    def prefill(self, x: Array) -> Array:
        own, latent, before = self.own, self.latent, self.cache.shape[1]
        read = self.cache.size  # earlier chunks
        q, positions = self.compress(x)
        if read:
            self.log("latent read back", kv_bytes=read * self.kv_bytes, activation_bytes=read * ELEMENT)
        c, rope = self.cache[..., : latent.kv_rank], self.cache[..., latent.kv_rank :]
        both = self.product("kv_b", c, np.concatenate([own.keys, own.values], axis=-1))
        nope, v = both[..., : latent.nope_dim], both[..., latent.nope_dim :]
        k = np.concatenate([nope, np.broadcast_to(rope[:, :, None], (*nope.shape[:3], latent.rope_dim))], axis=-1)
        self.log("expanded keys", activation_bytes=(nope.size + k.size) * ELEMENT)
        seen = positions[:, None] >= np.arange(before + x.shape[1])
        scores = np.einsum("bthe,bshe->bhts", q, k) / np.sqrt(q.shape[-1])
        mixed = np.einsum("bhts,bshe->bthe", softmax(np.where(seen, scores, -np.inf)), v)
        heads, pairs = q.shape[2], len(x) * int(seen.sum())
        self.log(
            "latent attention (prefill)",
            flops=2 * heads * pairs * (q.shape[-1] + v.shape[-1]),
            activation_bytes=(q.size + k.size + v.size + mixed.size) * ELEMENT,
        )
        return self.output(mixed)

    def decode(self, x: Array) -> Array:
        own, latent = self.own, self.latent
        q, _ = self.compress(x)
        absorbed = self.by_head("absorb keys", q[..., : latent.nope_dim], own.keys.transpose(2, 1, 0))
        long = np.concatenate([absorbed, q[..., latent.nope_dim :]], axis=-1)  # [B, 1, heads, kv_rank + rope]
        cache = self.cache
        powers = softmax(np.einsum("bthe,bse->bhts", long, cache) / np.sqrt(q.shape[-1]))
        mixed = np.einsum("bhts,bsr->bthr", powers, cache[..., : latent.kv_rank])
        self.log(
            "latent attention (decode)",
            flops=2 * powers.size * (latent.cached + latent.kv_rank),
            kv_bytes=cache.size * self.kv_bytes,
            activation_bytes=(long.size + mixed.size) * ELEMENT,
        )
        return self.output(self.by_head("absorb values", mixed, own.values))


class Group:
    """`tp` ranks in `dp` parts; a part holds whole requests, its ranks their share of the heads."""

    def __init__(self, model: Model, weights: Weights, tp: int, dp: int, kv_bytes: float) -> None:
        over = tp // dp
        each = model.attention.heads // over
        self.dp = dp
        self.parts = [
            [Rank(model, weights, slice(rank * each, (rank + 1) * each), kv_bytes) for rank in range(over)]
            for _ in range(dp)
        ]

    def run(self, phase: str, x: Array) -> Array:
        """[B, T, d]: every part its own requests, the sum over its ranks."""
        result = np.zeros_like(x)
        for index, part in enumerate(self.parts):
            if len(x[index :: self.dp]):
                result[index :: self.dp] = sum(getattr(rank, phase)(x[index :: self.dp]) for rank in part)
        return result

    def taken(self) -> dict[str, dict[str, float]]:
        """What the first rank of the first part did since it was last asked; it has most requests."""
        done = {name: dict(amounts) for name, amounts in self.parts[0][0].work.items()}
        self.parts[0][0].work.clear()
        return done


def counted(operations: list[Operation]) -> dict[str, dict[str, float]]:
    """Amounts that are not 0, by operation."""
    keys = ("flops", "weight_bytes", "kv_bytes", "activation_bytes")
    amounts = {o.name: {key: float(getattr(o, key)) for key in keys if getattr(o, key)} for o in operations}
    assert all(operation.times == 1 for operation in operations)
    return {name: found for name, found in amounts.items() if set(found) - {"weight_bytes"}}


@pytest.mark.parametrize(("tp", "dp"), GROUPS)
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("model", [COMPRESSED, PLAIN_QUERIES], ids=lambda model: model.name)
def test_sharded_latent_attention_gives_the_reference_and_does_what_is_counted(
    model: Model, kv: str, tp: int, dp: int
) -> None:
    weights, shard, held = weights_of(model), Shard.of(model, tp, attention_dp=dp), formats(kv=kv)
    x = np.random.default_rng(5).normal(size=(BATCH, PROMPT + 2, model.hidden))
    expected = reference(model, weights, x)
    group = Group(model, weights, tp, dp, held.kv.bytes)

    def of_pass(work: Pass) -> dict[str, dict[str, float]]:
        return counted(latent_operations(model, shard, work, held, WHOLE))

    got = group.run("prefill", x[:, :FIRST])
    np.testing.assert_allclose(got, expected[:, :FIRST], rtol=0, atol=1e-9)
    work = Pass(0.0, 0.0, BATCH * FIRST, BATCH * causal_pairs(FIRST), 0.0, BATCH)
    agree(of_pass(work), group.taken())

    got = group.run("prefill", x[:, FIRST:PROMPT])
    np.testing.assert_allclose(got, expected[:, FIRST:PROMPT], rtol=0, atol=1e-9)
    pairs = BATCH * (causal_pairs(PROMPT) - causal_pairs(FIRST))
    agree(of_pass(Pass(0.0, 0.0, BATCH * SECOND, pairs, BATCH * FIRST, BATCH, BATCH)), group.taken())

    for step in (1, 2):
        at = slice(PROMPT + step - 1, PROMPT + step)
        np.testing.assert_allclose(group.run("decode", x[:, at]), expected[:, at], rtol=0, atol=1e-9)
        agree(of_pass(Pass(BATCH, PROMPT + step)), group.taken())


def agree(counts: dict[str, dict[str, float]], done: dict[str, dict[str, float]]) -> None:
    assert counts.keys() == done.keys()
    for name, amounts in counts.items():
        assert amounts == pytest.approx(done[name], rel=1e-12), name


# ------------------------------------------------------------------------------------------------------------- shares


def by_name(operations: list[Operation]) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}


def test_tensor_parallelism_divides_heads_and_not_the_cache_data_parallel_attention_the_requests() -> None:
    model, work = load_model("deepseek-v3"), Pass(256.0, 4096.0)
    whole = by_name(latent_attention_operations(model, Shard.of(model, 1), work, formats(), WHOLE))
    for tp in (2, 8, 32):
        shard = Shard.of(model, tp)
        part = by_name(latent_attention_operations(model, shard, work, formats(), WHOLE))["latent attention (decode)"]
        assert part.flops * tp == whole["latent attention (decode)"].flops
        assert part.kv_bytes == whole["latent attention (decode)"].kv_bytes
        own = Shard.of(model, tp, attention_dp=tp)
        part = by_name(latent_attention_operations(model, own, work, formats(), WHOLE))["latent attention (decode)"]
        assert part.flops * tp == whole["latent attention (decode)"].flops
        assert part.kv_bytes * tp == whole["latent attention (decode)"].kv_bytes
        assert part.items * tp == 256


def test_attention_over_the_batch_has_all_heads_of_its_own_requests_whoever_holds_the_weights() -> None:
    model, work = load_model("deepseek-v3"), Pass(60.0, 4096.0, 900.0, 1e6, 300.0, 3.0)
    over = Structure("batch", "batch")
    stored = by_name(latent_attention_operations(model, Shard.of(model, 8), work, formats(), over))
    own = by_name(latent_attention_operations(model, Shard.of(model, 8, attention_dp=8), work, formats(), WHOLE))
    for name in ("latent attention (decode)", "latent attention (prefill)"):
        assert stored[name] == own[name]
    assert stored["kv_b"].weight_bytes * 8 == own["kv_b"].weight_bytes
    assert stored["latent attention (decode)"].items == 8  # 60 requests over 8 ranks


def test_ranks_may_be_arrays_and_an_empty_phase_does_nothing() -> None:
    model, tp = load_model("kimi-k2"), np.array([1.0, 4.0, 16.0])
    for work in (Pass(32.0, 2048.0), Pass(0.0, 0.0, 512.0, 1e5, prompts=1.0)):
        together = latent_operations(model, Shard.of(model, tp), work, formats(), WHOLE)
        for index, ranks in enumerate(tp):
            alone = latent_operations(model, Shard.of(model, ranks), work, formats(), WHOLE)
            for many, one in zip(together, alone, strict=True):
                for key in ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "items"):
                    assert np.broadcast_to(getattr(many, key), tp.shape)[index] == getattr(one, key), (one.name, key)
    idle = by_name(latent_attention_operations(model, Shard.of(model, 8), Pass(32.0, 2048.0), formats(), WHOLE))
    for name in ("kv_b", "latent read back", "expanded keys", "latent attention (prefill)"):
        assert not any((idle[name].flops, idle[name].weight_bytes, idle[name].kv_bytes, idle[name].activation_bytes))


# ------------------------------------------------------------------------------------------------------ bytes, by hand


def test_a_token_of_deepseek_v3_takes_70272_bytes_on_every_rank() -> None:
    """61 layers of 512 + 64 values of 16 bits ("Insights into DeepSeek-V3", table 1: 70.272 KB), however shared."""
    model, engine, hardware = load_model("deepseek-v3"), load_engine("ideal"), load_hardware("h200-sxm")
    budget = Budget.of(hardware, engine)
    for tp, attention_dp, holders in ((8, 1, 1), (16, 1, 1), (16, 4, 4), (16, 16, 16)):
        shard = Shard.of(model, tp, attention_dp=attention_dp)
        found = room(model, engine, shard, Stages.of(model, 1), formats("fp8"), WHOLE, budget)
        assert found.kv_token[0] == 70_272
        assert found.holders == holders
        read = by_name(latent_attention_operations(model, shard, Pass(holders, 1.0), formats("fp8"), WHOLE))
        assert 61 * read["latent attention (decode)"].kv_bytes == found.kv_token[0]
        half = room(model, engine, shard, Stages.of(model, 1), formats("fp8", "fp8"), WHOLE, budget)
        assert half.kv_token[0] == 61 * 576  # no kernel of a dense latent cache keeps scales or a wider rotary part


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_pass_reads_the_attention_weights_that_memory_holds(name: str, weights: str) -> None:
    model, held = load_model(name), formats(weights)
    norms = model.norm.per_layer * model.norm.vectors * model.hidden
    for tp, attention_dp in ((1, 1), (8, 1), (8, 2), (8, 8)):
        shard = Shard.of(model, tp, attention_dp=attention_dp)
        elements = layer_elements(model, shard, LayerKind("full", experts=False))
        stored = elements._replace(ffn=0.0, plain=elements.plain - norms).bytes(model, held.weights)
        for work in (Pass(8.0, 100.0), Pass(0.0, 0.0, 64.0, 2080.0, prompts=8.0)):
            operations = latent_operations(model, shard, work, held, WHOLE)
            assert sum(o.weight_bytes for o in operations) == pytest.approx(stored, rel=1e-12)


def test_attention_that_a_checkpoint_leaves_in_16_bit_is_read_and_computed_so() -> None:
    model = load_model("kimi-k2")._replace(quantised="experts")
    shard, work = Shard.of(model, 8), Pass(8.0, 100.0, 64.0, 2080.0, prompts=1.0)
    wide, narrow = (latent_operations(model, shard, work, formats(weights), WHOLE) for weights in ("bf16", "int4"))
    assert narrow == wide


def test_copies_in_16_bit_are_what_an_engine_that_keeps_them_reads() -> None:
    model, engine, held = load_model("deepseek-v3"), load_engine("vllm"), formats("fp8")
    assert engine.memory.latent_copies
    shard, stages = Shard.of(model, 8), Stages.of(model, 1)
    copies = table_bytes(model, engine._replace(memory=engine.memory._replace(rotary_tables=False)), shard, stages)[0]
    found = by_name(latent_attention_operations(model, shard, Pass(8.0, 100.0), held, WHOLE, copies=True))
    assert 61 * sum(found[name].weight_bytes for name in ("absorb keys", "absorb values")) == copies
    assert found["absorb keys"].dtype == "bf16"
    own = by_name(latent_attention_operations(model, shard, Pass(8.0, 100.0), held, WHOLE))
    assert own["absorb keys"].weight_bytes * 2 == found["absorb keys"].weight_bytes
    assert own["absorb keys"].dtype == "fp8"


def test_arithmetic_of_deepseek_v3() -> None:
    """242 FLOPs a byte of cache for 128 heads; absorbed attention computes 3.4 times what expanded heads do."""
    latent = load_model("deepseek-v3").attention.latent
    assert latent is not None
    decode = latent_decode(latent, 128.0, 1.0, 4096.0, WEIGHTS["bf16"])
    assert decode.flops / decode.kv_bytes == pytest.approx(241.8, abs=0.05)
    expanded = latent_prefill(latent, 128.0, 1.0, 4096.0, 4095.0, WEIGHTS["bf16"])
    assert decode.flops / expanded.flops == pytest.approx((2 * 576 + 2 * 512) / (2 * 192 + 2 * 128))
    projections = by_name(
        latent_projections(
            load_model("deepseek-v3"), Shard.of(load_model("deepseek-v3"), 1), Pass(1.0, 1.0), formats(), WHOLE
        )
    )
    assert projections["qkv_a"].flops == 2 * 7168 * (1536 + 576)
    assert projections["q_b"].flops == 2 * 1536 * 128 * 192
    assert projections["out"].flops == 2 * 128 * 128 * 7168


# -------------------------------------------------------------------------------------------------------------- prices


CHIPS = ("h100-sxm", "h200-sxm", "b200-sxm", "gb200-nvl72", "gb300-nvl72", "h20", "a100-80gb-sxm", "mi300x")
sizes = st.sampled_from((1.0, 3.0, 16.0, 64.0, 200.0))


def seconds(hardware: Hardware, operations: list[Operation]) -> float:
    return sum(float(price_operation(hardware, operation).total) for operation in operations)


@settings(max_examples=60, deadline=None)
@given(
    chip=st.sampled_from(CHIPS),
    kv=st.sampled_from(("bf16", "fp8")),
    rows=sizes,
    more=sizes,
    tp=st.sampled_from((1, 2, 8)),
)
def test_more_work_never_takes_less_time_and_no_kernel_beats_the_chip(
    chip: str, kv: str, rows: float, more: float, tp: int
) -> None:
    model, hardware, held = load_model("deepseek-v3"), load_hardware(chip), formats(kv=kv)

    def price(work: Pass, tp: int, attention_dp: int = 1) -> float:
        shard = Shard.of(model, tp, attention_dp=attention_dp)
        return seconds(hardware, latent_operations(model, shard, work, held, WHOLE))

    at = price(Pass(rows, 64.0 * rows), tp)
    assert price(Pass(rows + more, 64.0 * rows), tp) >= at
    assert price(Pass(rows, 64.0 * (rows + more)), tp) >= at
    assert price(Pass(rows, 64.0 * rows), 2 * tp) <= at
    assert price(Pass(rows, 64.0 * rows), 8, 2) <= price(Pass(rows, 64.0 * rows), 4)
    prompt = Pass(0.0, 0.0, 64 * rows, causal_pairs(64 * rows), 0.0, 1.0)
    longer = prompt._replace(prefill_prior=64 * more, prefill_pairs=prompt.prefill_pairs + 64 * more * 64 * rows)
    assert price(longer, tp) >= price(prompt, tp)
    for operation in latent_operations(model, Shard.of(model, tp), Pass(rows, 64.0 * rows), held, WHOLE):
        if operation.kind == "attention_latent":
            dtype, _ = hardware.constants(operation.kind, operation.dtype)
            assert price_operation(hardware, operation).total >= operation.flops / (1.5 * hardware.chip.peak(dtype))
            assert price_operation(hardware, operation).total >= operation.kv_bytes / (
                1.5 * hardware.chip.memory_bandwidth
            )


def test_chips_without_measurements_of_their_own_say_that_they_assume() -> None:
    hardware = load_hardware("a100-80gb-sxm")
    assert not LATENT_KINDS.keys() & hardware.kernels.keys()
    _, prefill = hardware.constants("attention_prefill", "bf16")
    for kind, like in LATENT_KINDS.items():
        dtype, found = hardware.constants(kind, "bf16")
        _, known = hardware.constants(like, "bf16")
        assert found.provenance.status == "assumed"
        assert found.provenance.residual is None
        assert like in found.provenance.source
        assert (dtype, found.compute_fraction) == ("bf16", prefill.compute_fraction)
        assert (found.fixed_us, found.memory_fraction) == (known.fixed_us, known.memory_fraction)
    assert hardware.constants("attention_latent", "fp8")[0] == "bf16"  # this chip does not compute in it


@pytest.mark.parametrize("chip", ["a100-80gb-sxm", "h100-sxm"])
def test_sensitivity_varies_the_constants_that_latent_attention_runs_with(chip: str) -> None:
    hardware, held = load_hardware(chip), formats()
    found = {constant.path[1:]: constant for constant in kernel_constants(hardware, held, latent=True)}
    assert {path[0] for path in found} == {"gemm", "elementwise", *LATENT_KINDS}
    operation = latent_decode(LATENT, 128.0, 64.0, 4096.0, held.kv)
    slower, _ = scaled(hardware, load_engine("ideal"), ("kernels", "attention_latent", "bf16", "memory_fraction"), 0.5)
    assert price_operation(slower, operation).total > price_operation(hardware, operation).total
    kinds = {constant.path[1] for constant in kernel_constants(hardware, held)}
    assert kinds == {"gemm", "elementwise", "attention_decode", "attention_prefill"}


def test_a_file_with_latent_kernels_needs_those_of_its_16_bit_type() -> None:
    hardware = load_hardware("h100-sxm")
    kernels = hardware.kernels | {"attention_latent": {"fp8": hardware.kernels["attention_latent"]["fp8"]}}
    assert dict(hardware._replace(kernels=kernels).contradictions()).keys() == {"kernels.attention_latent.bf16"}


def test_every_engine_prices_latent_attention_on_every_chip_that_was_measured() -> None:
    model, work = load_model("deepseek-v3"), Pass(64.0, 4096.0, 512.0, 1e6, 512.0, 1.0)
    for chip in CHIPS:
        for engine in ("vllm", "sglang", "trtllm", "ideal"):
            hardware, _ = load_machine(chip, engine)
            for kv in ("bf16", "fp8"):
                total = seconds(hardware, latent_operations(model, Shard.of(model, 8), work, formats("fp8", kv), WHOLE))
                assert 1e-5 < total < 1e-1, (chip, engine, kv)


def test_norms_and_the_write_are_counted_for_new_tokens_alone() -> None:
    model = load_model("deepseek-v3")
    new = Pass(0.0, 0.0, 512.0, 1e6, 0.0, 1.0)
    shard = Shard.of(model, 8)
    assert latent_elementwise(model, shard, new, formats(), WHOLE) == latent_elementwise(
        model, shard, new._replace(prefill_prior=4096.0, prefill_pairs=3e6), formats(), WHOLE
    )
    assert {o.name for o in latent_elementwise(load_model("deepseek-v2-lite"), shard, new, formats(), WHOLE)} == {
        "KV norm",
        "rope, KV write",
    }
