"""A transformer that runs sharded on virtual devices: the same logits as unsharded, and the bytes that are counted.

Two layers in numpy, split as `planner.costs.layers` says: Megatron's columns and rows, KV heads copied where there
are fewer of them than ranks, embedding and head by vocabulary, layers by pipeline stage, attention over heads or
over requests. What the devices hold, send and multiply must be what the planner counts, to the byte.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import every
from simulation import Array, Fabric, all_to_all, ring_all_gather, ring_all_reduce, send

from planner.costs.collectives import Network, sent_bytes
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer, causal_pairs, count
from planner.costs.memory import Budget, Room, room
from planner.costs.step import Replica, pass_time
from planner.costs.weights import (
    LayerWeights,
    Shard,
    Stages,
    embedding_elements,
    final_norm_elements,
    head_elements,
    layer_weights,
    parameters,
    stage_weight_bytes,
)
from planner.plans.placement import Placement
from planner.specs.catalog import load_engine, load_hardware
from planner.specs.dtypes import ACTIVATION_BYTES, WEIGHTS, Dtype
from planner.specs.engine import Engine
from planner.specs.hardware import NetworkLevel
from planner.specs.model import Attention, FeedForward, Model, Norm
from planner.units import GB

ELEMENT = 2  # the devices compute in fp64 for the sake of comparison; an element stands for one of 16 bits
BATCH, PROMPT = 4, 6
FORMATS = Formats(WEIGHTS["bf16"], WEIGHTS["bf16"], "bf16", "bf16")
OVER_HEADS = Structure("heads", "heads")
OVER_BATCH = Structure("batch", "heads")
ALL_OVER_BATCH = Structure("batch", "batch")

PLAIN = Model(
    name="gated GQA",
    layers=2,
    hidden=64,
    attention=Attention(heads=8, kv_heads=4, head_dim=8),
    ffn=FeedForward(hidden=96, gated=True, activation="silu"),
    norm=Norm(kind="rmsnorm", per_layer=2),
    vocab=128,
    tied_embeddings=False,
    max_context=64,
    weights="bf16",
    sources=("made up for a test",),
)
MODELS = {
    model.name: model
    for model in (
        PLAIN,
        PLAIN._replace(name="two KV heads", attention=PLAIN.attention._replace(kv_heads=2)),
        PLAIN._replace(
            name="biases, tied, learned positions",
            attention=PLAIN.attention._replace(kv_heads=8, qkv_bias=True, out_bias=True),
            ffn=FeedForward(hidden=96, gated=False, activation="relu", bias=True),
            norm=Norm(kind="layernorm", per_layer=2, bias=True),
            tied_embeddings=True,
            learned_positions=16,
        ),
        PLAIN._replace(
            name="parallel block, one KV head, biases",
            attention=PLAIN.attention._replace(kv_heads=1, out_bias=True),
            ffn=FeedForward(hidden=96, gated=False, activation="relu", bias=True),
            norm=Norm(kind="layernorm", per_layer=1),
            tied_embeddings=True,
            parallel_block=True,
        ),
        PLAIN._replace(
            name="window, QK norm, padded vocabulary",
            attention=Attention(heads=8, kv_heads=2, head_dim=8, qkv_bias=True, qk_norm="head_dim", window=4),
            attention_pattern=("window",),
            vocab=120,
        ),
    )
}
IDEAL = load_engine("ideal")._replace(vocabulary_multiple=64)
LECTURE = load_engine("lecture")
assert IDEAL.embedding_all_reduce
assert not LECTURE.embedding_all_reduce


def words(structure: Structure) -> str:
    """What a structure is called in the name of a test."""
    return "/".join(structure[:4])


def exactly(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=0)


# --------------------------------------------------------------------------------------------------------- unsharded


class Weights(NamedTuple):
    """All parameters. Layers map names to arrays: q, k, v [d, heads, dh], out [heads, dh, d], gate, up, down, ..."""

    embedding: Array  # [vocab, d]
    positions: Array  # [learned positions, d]
    layers: tuple[dict[str, Array], ...]
    final_norm: Array  # [vectors, d]
    head: Array  # [d, vocab]

    @classmethod
    def of(cls, model: Model) -> Weights:
        """Random weights of a model; whatever it has none of has no elements."""
        random = np.random.default_rng(7)

        def matrix(*shape: int, inner: int) -> Array:
            return random.normal(size=shape) / np.sqrt(inner)

        def norm(count: int, width: int, vectors: int) -> Array:
            gains = 1 + 0.3 * random.normal(size=(count, vectors, width))
            gains[:, 1:] -= 1  # the second vector is the bias
            return gains

        d, attention, ffn = model.hidden, model.attention, model.ffn
        heads, kv_heads, dh = attention.heads, attention.kv_heads, attention.head_dim
        layers = []
        for _ in range(model.layers):
            layer = {
                "q": matrix(d, heads, dh, inner=d),
                "k": matrix(d, kv_heads, dh, inner=d),
                "v": matrix(d, kv_heads, dh, inner=d),
                "out": matrix(heads, dh, d, inner=d),
                "up": matrix(d, ffn.hidden, inner=d),
                "down": matrix(ffn.hidden, d, inner=ffn.hidden),
                "norms": norm(model.norm.per_layer, d, model.norm.vectors),
            }
            if ffn.gated:
                layer["gate"] = matrix(d, ffn.hidden, inner=d)
            if attention.qkv_bias:
                layer |= {"q_bias": matrix(heads, dh, inner=4)}
                layer |= {"k_bias": matrix(kv_heads, dh, inner=4), "v_bias": matrix(kv_heads, dh, inner=4)}
            if attention.out_bias:
                layer["out_bias"] = matrix(d, inner=4)
            if ffn.bias:
                layer |= {"up_bias": matrix(ffn.hidden, inner=4), "down_bias": matrix(d, inner=4)}
            if attention.qk_norm:
                layer["qk_norm"] = norm(2, dh, 1)[:, 0]
            layers.append(layer)
        embedding = matrix(model.vocab, d, inner=1)
        head = embedding.T if model.tied_embeddings else matrix(d, model.vocab, inner=d)
        positions = matrix(model.learned_positions, d, inner=1)
        return cls(embedding, positions, tuple(layers), norm(1, d, model.norm.vectors)[0], head)

    def parameters(self, model: Model) -> int:
        """Elements; a tied head is the embedding."""
        layers = sum(array.size for layer in self.layers for array in layer.values())
        head = 0 if model.tied_embeddings else self.head.size
        return self.embedding.size + self.positions.size + layers + self.final_norm.size + head


def normalised(model: Model, x: Array, vectors: Array) -> Array:
    """RMSNorm or LayerNorm over the last axis."""
    if model.norm.kind == "layernorm":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * vectors[0]
    return x + vectors[1] if len(vectors) > 1 else x


def activated(model: Model, up: Array, gate: Array | None) -> Array:
    if gate is None:
        return np.maximum(up, 0) if model.ffn.activation == "relu" else up / (1 + np.exp(-up))
    return gate / (1 + np.exp(-gate)) * up


def visible(queries: Array, keys: Array, window: int | None) -> Array:
    """Which keys a query may see, by their positions: itself and what is before it, as far as the window reaches."""
    back = queries[:, None] - keys[None, :]
    return (back >= 0) & (back < (window or np.inf))


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def whole_logits(model: Model, weights: Weights, tokens: Array) -> Array:
    """Logits of every position: the whole model in one piece, without a cache. [B, T, vocab]."""
    length = tokens.shape[1]
    x = weights.embedding[tokens]
    if model.learned_positions:
        x = x + weights.positions[:length]
    for layer in weights.layers:
        h = normalised(model, x, layer["norms"][0])
        q, k, v = (np.einsum("btd,dhe->bhte", h, layer[n]) for n in "qkv")
        if model.attention.qkv_bias:
            q, k, v = (y + layer[f"{n}_bias"][:, None] for y, n in zip((q, k, v), "qkv", strict=True))
        if model.attention.qk_norm:
            q, k = (normalised(model, y, layer["qk_norm"][i : i + 1]) for i, y in enumerate((q, k)))
        shared = model.attention.heads // model.attention.kv_heads
        k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
        scores = np.einsum("bhte,bhse->bhts", q, k) / np.sqrt(model.attention.head_dim)
        mask = visible(np.arange(length), np.arange(length), model.attention.window)
        mixed = np.einsum("bhts,bhse->bthe", softmax(np.where(mask, scores, -np.inf)), v)
        attention = np.einsum("bthe,hed->btd", mixed, layer["out"]) + layer.get("out_bias", 0.0)
        if not model.parallel_block:
            x = x + attention
            h = normalised(model, x, layer["norms"][1])
        gate = h @ layer["gate"] if model.ffn.gated else None
        up = h @ layer["up"] + layer.get("up_bias", 0.0)
        ffn = activated(model, up, gate) @ layer["down"] + layer.get("down_bias", 0.0)
        x = x + ffn + (attention if model.parallel_block else 0.0)
    return normalised(model, x, weights.final_norm) @ weights.head


# ----------------------------------------------------------------------------------------------------------- sharded


class Device:
    """A rank of a pipeline stage: the weights and the KV it holds, and a log of what it multiplied."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.weights: dict[str, Array] = {}
        self.cache: dict[int, tuple[Array, Array]] = {}  # by layer: keys and values [requests, tokens, heads, dh]
        self.work: dict[str, Counter[str]] = defaultdict(Counter)

    @property
    def weight_bytes(self) -> float:
        return sum(array.size for array in self.weights.values()) * ELEMENT

    @property
    def kv_bytes(self) -> float:
        return sum(keys.size + values.size for keys, values in self.cache.values()) * ELEMENT

    def of_layer(self, layer: int, *names: str) -> list[Array | None]:
        """A layer's weights; none for one that the model does not have."""
        return [self.weights.get(f"{layer}.{name}") for name in names]

    def elements(self, *names: str) -> int:
        """Elements of the weights of these names; absent ones have none."""
        return sum(self.weights[name].size for name in names if name in self.weights)

    def product(self, name: str, x: Array, matrix: Array, bias: Array | None = None) -> Array:
        """x [..., inner] times a matrix [inner, outer], plus a bias if there is one."""
        rows, (inner, outer) = x.size // x.shape[-1], matrix.shape
        self.work[name]["flops"] += 2 * rows * inner * outer
        self.work[name]["weight_bytes"] += (matrix.size + (0 if bias is None else bias.size)) * ELEMENT
        self.work[name]["activation_bytes"] += rows * (inner + outer) * ELEMENT
        return x @ matrix + (0.0 if bias is None else bias)

    def attend(self, name: str, q: Array, k: Array, v: Array, start: int, window: int | None) -> Array:
        """Queries [b, t, h, e] from position `start` on, keys and values [b, s, g, e] from 0 on: [b, t, h, e].

        Every query head reads the KV head of its group; only visible pairs count as work. What comes out of the cache
        is what a decoded token sees (itself included), or what a chunk of a prompt sees of the chunks before it.
        """
        requests, length, heads, dh = q.shape
        tokens, kv_heads = k.shape[1:3]
        mask = visible(np.arange(start, start + length), np.arange(tokens), window)
        decoding = name.endswith("(decode)")
        read = int(mask.sum() if decoding else mask[:, :start].any(axis=0).sum())
        self.work[name]["flops"] += 4 * dh * heads * requests * int(mask.sum())
        self.work[name]["kv_bytes"] += 2 * requests * read * kv_heads * dh * ELEMENT
        grouped = q.reshape(requests, length, kv_heads, heads // kv_heads, dh)
        scores = np.einsum("btgre,bsge->bgrts", grouped, k) / np.sqrt(dh)
        probabilities = softmax(np.where(mask, scores, -np.inf))
        return np.einsum("bgrts,bsge->btgre", probabilities, v).reshape(q.shape)


class Sharded:
    """The model on tp x pp devices. `Structure` says over what attention and its KV are sharded."""

    def __init__(
        self, model: Model, engine: Engine, weights: Weights, tp: int, pp: int, structure: Structure, requests: int
    ) -> None:
        self.model, self.engine, self.tp, self.structure = model, engine, tp, structure
        self.stages = [[Device(stage * tp + rank) for rank in range(tp)] for stage in range(pp)]
        self.owned = np.array_split(np.arange(requests), tp)  # whose requests a rank attends to, over the batch
        self.copies = max(1, tp // model.attention.kv_heads)  # ranks that hold the same KV head
        self.layers = np.array_split(np.arange(model.layers), pp)
        self.fabric = Fabric(ELEMENT)
        for layers, stage in zip(self.layers, self.stages, strict=True):
            for rank, device in enumerate(stage):
                for layer in layers:
                    self._place_layer(device, rank, layer, weights.layers[layer])
        for rank in range(tp):
            self._place_ends(self.stages[0][rank], self.stages[-1][rank], rank, weights)

    def heads(self, rank: int) -> slice:
        each = self.model.attention.heads // self.tp
        return slice(rank * each, (rank + 1) * each)

    def kv_heads(self, rank: int) -> slice:
        """A rank's KV heads: those that its query heads need."""
        first = rank * self.model.attention.kv_heads // self.tp
        return slice(first, first + max(1, self.model.attention.kv_heads // self.tp))

    def _place_layer(self, device: Device, rank: int, number: int, layer: dict[str, Array]) -> None:
        d = self.model.hidden
        ffn = slice(rank * self.model.ffn.hidden // self.tp, (rank + 1) * self.model.ffn.hidden // self.tp)
        own = {"q": self.heads(rank), "k": self.kv_heads(rank), "v": self.kv_heads(rank)}
        inputs = ["gate", "up"] if self.model.ffn.gated else ["up"]
        held = {
            "qkv": np.concatenate([layer[n][:, part].reshape(d, -1) for n, part in own.items()], axis=1),
            "out": layer["out"][self.heads(rank)].reshape(-1, d),
            "gate_up": np.concatenate([layer[n][:, ffn] for n in inputs], axis=1),
            "down": layer["down"][ffn],
            "norms": layer["norms"],
        }
        if self.model.attention.qkv_bias:
            held["qkv_bias"] = np.concatenate([layer[f"{n}_bias"][part].ravel() for n, part in own.items()])
        if self.model.ffn.bias:
            held["gate_up_bias"] = layer["up_bias"][ffn]
        held |= {name: layer[name] for name in ("out_bias", "down_bias", "qk_norm") if name in layer}
        device.weights |= {f"{number}.{name}": array for name, array in held.items()}

    def _place_ends(self, first: Device, last: Device, rank: int, weights: Weights) -> None:
        multiple = self.engine.vocabulary_multiple
        padded = -(-self.model.vocab // multiple) * multiple
        each = padded // self.tp
        rows = slice(rank * each, (rank + 1) * each)
        table = np.pad(weights.embedding, ((0, padded - self.model.vocab), (0, 0)))
        head = np.pad(weights.head, ((0, 0), (0, padded - self.model.vocab)))
        first.weights["embedding"] = table[rows] if self.engine.embedding_all_reduce else table
        if self.model.learned_positions:
            first.weights["positions"] = weights.positions
        last.weights["final_norm"] = weights.final_norm
        if not self.model.tied_embeddings or first is not last:
            last.weights["head"] = head[:, rows]

    def forward(self, tokens: Array, start: int, decoding: bool = False, ended: bool = True) -> Array | None:
        """Logits of the last position of each request; [B, T] tokens stand from `start` on. None if no prompt ends."""
        self.fabric = Fabric(ELEMENT)
        for stage in self.stages:
            for device in stage:
                device.work.clear()
        x = self._embed(tokens, start)
        for number, (stage, layers) in enumerate(zip(self.stages, self.layers, strict=True)):
            if number:
                hop = {
                    (here.number, there.number): rows.ravel()
                    for here, there, rows in zip(self.stages[number - 1], stage, x, strict=True)
                }
                x = [rows.reshape(x[0].shape) for rows in send(self.fabric, hop)]
            for layer in layers:
                x = self._layer(stage, layer, x, start, decoding)
        return self._logits([rows[:, -1] for rows in x]) if ended else None

    def _all_reduce(self, name: str, stage: list[Device], partial: list[Array]) -> list[Array]:
        """The sum on every rank."""
        flat = {device.number: array.ravel() for device, array in zip(stage, partial, strict=True)}
        (result,) = ring_all_reduce(self.fabric, flat, name=name)
        return [array.reshape(partial[0].shape) for array in result.values()]

    def _embed(self, tokens: Array, start: int) -> list[Array]:
        stage, found = self.stages[0], []
        for rank, device in enumerate(stage):
            table = device.weights["embedding"]
            local = tokens - (rank * len(table) if self.engine.embedding_all_reduce else 0)
            mine = (local >= 0) & (local < len(table))
            found.append(np.where(mine[..., None], table[np.where(mine, local, 0)], 0.0))
        if self.engine.embedding_all_reduce:
            found = self._all_reduce("embedding all-reduce", stage, found)
        if self.model.learned_positions:
            places = slice(start, start + tokens.shape[1])
            found = [x + device.weights["positions"][places] for x, device in zip(found, stage, strict=True)]
        return found

    def _layer(self, stage: list[Device], layer: int, x: list[Array], start: int, decoding: bool) -> list[Array]:
        def norm(index: int, rows: list[Array]) -> list[Array]:
            vectors = [device.weights[f"{layer}.norms"][index] for device in stage]
            return [normalised(self.model, y, v) for y, v in zip(rows, vectors, strict=True)]

        def plus(rows: list[Array], name: str) -> list[Array]:
            biases = [device.weights.get(f"{layer}.{name}", 0.0) for device in stage]
            for device in stage:  # added behind the all-reduce, on every rank
                product = "out" if name == "out_bias" else "down"
                device.work[product]["weight_bytes"] += device.elements(f"{layer}.{name}") * ELEMENT
            return [y + bias for y, bias in zip(rows, biases, strict=True)]

        h = norm(0, x)
        attention = self._attention(stage, layer, h, start, decoding)
        if self.model.parallel_block:
            both = [a + self._ffn(device, layer, y) for device, a, y in zip(stage, attention, h, strict=True)]
            both = plus(plus(self._all_reduce("all-reduce", stage, both), "out_bias"), "down_bias")
            return [y + z for y, z in zip(x, both, strict=True)]
        attention = plus(self._all_reduce("all-reduce", stage, attention), "out_bias")
        x = [y + z for y, z in zip(x, attention, strict=True)]
        ffn = [self._ffn(device, layer, y) for device, y in zip(stage, norm(1, x), strict=True)]
        ffn = plus(self._all_reduce("all-reduce", stage, ffn), "down_bias")
        return [y + z for y, z in zip(x, ffn, strict=True)]

    def _ffn(self, device: Device, layer: int, x: Array) -> Array:
        """Partial sums of the down projection."""
        inputs = device.product("gate_up", x, *device.of_layer(layer, "gate_up", "gate_up_bias"))
        gate, up = np.split(inputs, 2, axis=-1) if self.model.ffn.gated else (None, inputs)
        return device.product("down", activated(self.model, up, gate), *device.of_layer(layer, "down"))

    def _attention(self, stage: list[Device], layer: int, x: list[Array], start: int, decoding: bool) -> list[Array]:
        """Partial sums of the output projection."""
        q, k, v = zip(*(self._qkv(device, layer, rows) for device, rows in zip(stage, x, strict=True)), strict=True)
        suffix = "" if decoding else " (prefill)"
        name = "attention (decode)" if decoding else "attention (prefill)"
        name = f"window {name}" if self.model.attention.window else name
        over = self.structure.attention if decoding else self.structure.prefill_attention
        window = self.model.attention.window
        if over == "batch":
            q, k, v = zip(*self._to_batch(f"heads to batch{suffix}", stage, q, k, v), strict=True)
        if over == self.structure.attention:
            k, v = zip(
                *(self._remember(device, layer, *kv) for device, *kv in zip(stage, k, v, strict=True)), strict=True
            )
        mixed = [device.attend(name, *qkv, start, window) for device, *qkv in zip(stage, q, k, v, strict=True)]
        if over == "batch":
            mixed = self._to_heads(f"batch to heads{suffix}", stage, mixed)
        elif self.structure.attention == "batch":
            assert start == 0  # chunks of a prompt would have to leave only when it is complete
            for device, (_, *kv) in zip(stage, self._to_batch("KV to batch (prefill)", stage, None, k, v), strict=True):
                self._remember(device, layer, *kv)
        return [
            device.product("out", y.reshape(*y.shape[:2], -1), *device.of_layer(layer, "out"))
            for device, y in zip(stage, mixed, strict=True)
        ]

    def _qkv(self, device: Device, layer: int, x: Array) -> list[Array]:
        """Queries, keys and values of a rank's heads, [B, T, heads, dh] each."""
        heads, dh = self.model.attention.heads // self.tp, self.model.attention.head_dim
        both = device.product("qkv", x, *device.of_layer(layer, "qkv", "qkv_bias"))
        both = both.reshape(*x.shape[:2], -1, dh)
        kv_heads = (both.shape[2] - heads) // 2
        q, k, v = np.split(both, [heads, heads + kv_heads], axis=2)
        if self.model.attention.qk_norm:
            vectors = device.weights[f"{layer}.qk_norm"]
            q, k = normalised(self.model, q, vectors[:1]), normalised(self.model, k, vectors[1:])
        return [q, k, v]

    def _remember(self, device: Device, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of all tokens so far, after these."""
        if layer in device.cache:
            k, v = (np.concatenate([old, new], axis=1) for old, new in zip(device.cache[layer], (k, v), strict=True))
        device.cache[layer] = k, v
        return k, v

    def _to_batch(
        self, name: str, stage: list[Device], q: Any, k: Any, v: Any
    ) -> list[tuple[Array | None, Array, Array]]:
        """From a rank's heads of all requests to all heads of a rank's requests.

        Ranks with the same KV head each compute it for all requests, but send only their share of its dh columns.
        """
        dh, length = self.model.attention.head_dim, k[0].shape[1]
        columns = [
            slice(r % self.copies * dh // self.copies, (r % self.copies + 1) * dh // self.copies)
            for r in range(self.tp)
        ]
        blocks: dict[int, dict[int, Array]] = {}
        for rank, device in enumerate(stage):
            parts = [k[rank][..., columns[rank]], v[rank][..., columns[rank]], *([q[rank]] if q is not None else [])]
            blocks[device.number] = {
                target.number: np.concatenate([part[own].ravel() for part in parts])
                for target, own in zip(stage, self.owned, strict=True)
            }
        received = all_to_all(self.fabric, blocks, name=name)
        result = []
        for device, own in zip(stage, self.owned, strict=True):
            keys, values = (np.full((len(own), length, self.model.attention.kv_heads, dh), np.nan) for _ in "kv")
            queries = np.full((len(own), length, self.model.attention.heads, dh), np.nan) if q is not None else None
            for rank, source in enumerate(stage):
                each = keys[:, :, self.kv_heads(rank), columns[rank]].shape
                flat = received[device.number][source.number]
                ends = [int(np.prod(each)), 2 * int(np.prod(each))]
                key, value, query = np.split(flat, ends)
                keys[:, :, self.kv_heads(rank), columns[rank]] = key.reshape(each)
                values[:, :, self.kv_heads(rank), columns[rank]] = value.reshape(each)
                if queries is not None:
                    queries[:, :, self.heads(rank)] = query.reshape(queries[:, :, self.heads(rank)].shape)
            result.append((queries, keys, values))
        return result

    def _to_heads(self, name: str, stage: list[Device], mixed: list[Array]) -> list[Array]:
        """From all heads of a rank's requests back to a rank's heads of all requests."""
        blocks = {
            device.number: {target.number: y[:, :, self.heads(rank)].ravel() for rank, target in enumerate(stage)}
            for device, y in zip(stage, mixed, strict=True)
        }
        received = all_to_all(self.fabric, blocks, name=name)
        shape = mixed[0].shape[1], self.model.attention.heads // self.tp, self.model.attention.head_dim
        return [
            np.concatenate([received[device.number][source.number].reshape(-1, *shape) for source in stage])
            for device in stage
        ]

    def _logits(self, x: list[Array]) -> Array:
        parts = {}
        for device, rows in zip(self.stages[-1], x, strict=True):
            head = device.weights["head"] if "head" in device.weights else device.weights["embedding"].T
            part = device.product("head", normalised(self.model, rows, device.weights["final_norm"]), head)
            parts[device.number] = part.ravel()
        (gathered,) = ring_all_gather(self.fabric, parts, name="logits all-gather")
        requests = len(x[0])
        for logits in gathered.values():
            whole = np.concatenate([part.reshape(requests, -1) for part in np.split(logits, self.tp)], axis=1)
        return whole[:, : self.model.vocab]


class PassLog(NamedTuple):
    """One pass: its logits, what moved, and what each device multiplied."""

    logits: Array | None
    fabric: Fabric
    work: dict[int, dict[str, Counter[str]]]
    counted: Pass


class Run(NamedTuple):
    """A prefill and a decode step of all requests, on the same devices."""

    sharded: Sharded
    prefill: PassLog
    decode: PassLog

    @property
    def passes(self) -> tuple[PassLog, PassLog]:
        return self.prefill, self.decode


def logged(sharded: Sharded, tokens: Array, start: int, work: Pass, **options: bool) -> PassLog:
    logits = sharded.forward(tokens, start, **options)
    devices = [device for stage in sharded.stages for device in stage]
    done = {device.number: {name: Counter(log) for name, log in device.work.items()} for device in devices}
    return PassLog(logits, sharded.fabric, done, work)


def bytes_of(layer: LayerWeights, dtype: Dtype) -> float:
    return float(layer.matrices * dtype.bytes + layer.vectors * dtype.plain_bytes)


def prompts(requests: int, tokens: int, start: int = 0, window: int | None = None, ended: bool = True) -> Pass:
    """The pass of `requests` prompts that go on from `start` for some tokens."""
    pairs, near = (causal_pairs(start + tokens, seen) - causal_pairs(start, seen) for seen in (None, window))
    ends = requests if ended else 0
    prior = start if window is None else min(start, window - 1)  # only what the chunk sees is read back
    return Pass(0.0, 1.0, requests * tokens, requests * pairs, requests * prior, requests, ends, requests * near)


def tokens_of(model: Model, requests: int) -> Array:
    return np.random.default_rng(3).integers(0, model.vocab, (requests, PROMPT + 1))


@cache
def ran(name: str, tp: int, pp: int, structure: Structure, lecture: bool = False, requests: int = BATCH) -> Run:
    model = MODELS[name]
    sharded = Sharded(model, LECTURE if lecture else IDEAL, Weights.of(model), tp, pp, structure, requests)
    tokens = tokens_of(model, requests)
    prefill = logged(sharded, tokens[:, :PROMPT], 0, prompts(requests, PROMPT, window=model.attention.window))
    decode = logged(sharded, tokens[:, PROMPT:], PROMPT, Pass(requests, PROMPT + 1), decoding=True)
    return Run(sharded, prefill, decode)


every_split = every(
    ("name", "tp", "pp", "structure"),
    [
        (name, tp, pp, structure)
        for name in MODELS
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for structure in (OVER_HEADS, OVER_BATCH, ALL_OVER_BATCH)
    ],
)


def counts(run: Run, work: Pass) -> tuple[list[Operation], list[Transfer]]:
    sharded = run.sharded
    shard = Shard.of(sharded.model, sharded.tp, sharded.engine.vocabulary_multiple)
    return count(sharded.model, sharded.engine, shard, work, FORMATS, sharded.structure)


def times_on(sharded: Sharded, stage: int, counted: Operation | Transfer) -> float:
    """How often an operation or transfer runs on a stage."""
    here = {
        "layer": len(sharded.layers[stage]),
        "first": stage == 0,
        "last": stage == len(sharded.stages) - 1,
    }
    return counted.times * here[counted.place]


def by_stage(sharded: Sharded) -> list[tuple[int, Device]]:
    return [(number, device) for number, stage in enumerate(sharded.stages) for device in stage]


# ------------------------------------------------------------------------------------------------------------- tests


@every_split
def test_sharded_logits_equal_the_unsharded_ones(name: str, tp: int, pp: int, structure: Structure) -> None:
    run, model = ran(name, tp, pp, structure), MODELS[name]
    expected = whole_logits(model, Weights.of(model), tokens_of(model, BATCH))
    np.testing.assert_allclose(run.prefill.logits, expected[:, PROMPT - 1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run.decode.logits, expected[:, PROMPT], rtol=1e-5, atol=1e-5)


@every_split
def test_every_device_sends_the_counted_bytes(name: str, tp: int, pp: int, structure: Structure) -> None:
    check_bytes_sent(ran(name, tp, pp, structure))


@every("structure", [OVER_HEADS, OVER_BATCH, ALL_OVER_BATCH])
@every("tp", [1, 2, 4])
def test_an_engine_without_an_embedding_all_reduce_sends_none(tp: int, structure: Structure) -> None:
    run = ran(PLAIN.name, tp, 2, structure, lecture=True)
    check_bytes_sent(run)
    assert run.prefill.fabric.times("embedding all-reduce") == 0
    expected = whole_logits(PLAIN, Weights.of(PLAIN), tokens_of(PLAIN, BATCH))
    np.testing.assert_allclose(run.decode.logits, expected[:, PROMPT], rtol=1e-5, atol=1e-5)


def check_bytes_sent(run: Run) -> None:
    sharded = run.sharded
    for log in run.passes:
        _, transfers = counts(run, log.counted)
        for stage, device in by_stage(sharded):
            expected: Counter[str] = Counter()
            for transfer in transfers:
                each = sent_bytes("ring", transfer.op, sharded.tp, transfer.bytes)
                expected[transfer.name] += times_on(sharded, stage, transfer) * each
            if stage < len(sharded.stages) - 1:
                expected["send"] += log.counted.tokens * sharded.model.hidden * ACTIVATION_BYTES
            sent = log.fabric.sent_by_name(device.number)
            assert sent == exactly({name: size for name, size in expected.items() if size}), (stage, device.number)


@every_split
def test_collectives_run_as_often_as_counted(name: str, tp: int, pp: int, structure: Structure) -> None:
    run = ran(name, tp, pp, structure)
    for log in run.passes:
        _, transfers = counts(run, log.counted)
        for transfer in transfers:
            if transfer.bytes:
                times = sum(times_on(run.sharded, stage, transfer) for stage in range(pp))
                assert log.fabric.times(transfer.name) == times, transfer.name
        assert set(log.fabric.calls) <= {transfer.name for transfer in transfers if transfer.bytes} | {"send"}


@every_split
def test_every_device_multiplies_what_is_counted(name: str, tp: int, pp: int, structure: Structure) -> None:
    run = ran(name, tp, pp, structure)
    for log in run.passes:
        operations, _ = counts(run, log.counted)
        for stage, device in by_stage(run.sharded):
            expected = {
                operation.name: (operation, times_on(run.sharded, stage, operation))
                for operation in operations
                if operation.kind != "elementwise" and operation.flops and times_on(run.sharded, stage, operation)
            }
            done = log.work[device.number]
            assert done.keys() == expected.keys()
            for operation, times in expected.values():
                work = done[operation.name]
                assert work["flops"] == exactly(times * operation.flops), operation.name
                if operation.kind == "gemm":
                    assert work["weight_bytes"] == exactly(times * operation.weight_bytes), operation.name
                    assert work["activation_bytes"] == exactly(times * operation.activation_bytes), operation.name
                else:
                    assert work["kv_bytes"] == exactly(times * operation.kv_bytes), operation.name


@every_split
def test_every_device_holds_the_counted_weights(name: str, tp: int, pp: int, structure: Structure) -> None:
    sharded, model = ran(name, tp, pp, structure).sharded, MODELS[name]
    shard = Shard.of(model, tp, IDEAL.vocabulary_multiple)
    first, _, last = stage_weight_bytes(model, shard, Stages.of(model, pp), FORMATS.weights)
    layer = layer_weights(model, shard)
    for stage, device in by_stage(sharded):
        assert device.weight_bytes == exactly(float(last if stage else first))
        for number in sharded.layers[stage]:
            names = [key for key in device.weights if key.startswith(f"{number}.")]
            assert device.elements(*names) * ELEMENT == exactly(bytes_of(layer, FORMATS.weights))
            vectors = [key for key in names if key.endswith(("norms", "_norm", "_bias"))]
            assert device.elements(*vectors) == layer.vectors
        if stage == 0:
            assert device.elements("embedding", "positions") == embedding_elements(model, shard)
        if stage == pp - 1:
            assert device.elements("final_norm") == final_norm_elements(model)
            alone_and_tied = model.tied_embeddings and pp == 1
            assert device.elements("head") == (0 if alone_and_tied else head_elements(model, shard))


@every_split
def test_a_pass_reads_every_weight_but_the_embedding_once(name: str, tp: int, pp: int, structure: Structure) -> None:
    run, model = ran(name, tp, pp, structure), MODELS[name]
    operations, _ = counts(run, run.decode.counted)
    for stage, device in by_stage(run.sharded):
        read = sum(times_on(run.sharded, stage, operation) * operation.weight_bytes for operation in operations)
        only_looked_up = ("embedding", "positions") if not model.tied_embeddings or pp > 1 else ("positions",)
        assert read == exactly(device.weight_bytes - device.elements(*only_looked_up) * ELEMENT)


@every("name", MODELS)
def test_the_model_has_the_counted_parameters(name: str) -> None:
    assert parameters(MODELS[name]) == Weights.of(MODELS[name]).parameters(MODELS[name])


def test_the_lecture_divides_the_embedding_though_it_sums_nothing() -> None:
    # A rank that looks tokens up without an all-reduce holds the whole table; the lecture counts weights / tp.
    sharded = ran(PLAIN.name, 4, 1, OVER_HEADS, lecture=True).sharded
    counted, _, _ = stage_weight_bytes(PLAIN, Shard.of(PLAIN, 4), Stages.of(PLAIN, 1), FORMATS.weights)
    rest_of_the_table = (128 - 128 / 4) * 64 * ELEMENT
    for _, device in by_stage(sharded):
        assert device.weight_bytes == float(counted) + rest_of_the_table


def room_of(model: Model, tp: int, pp: int, structure: Structure) -> Room:
    shard = Shard.of(model, tp, IDEAL.vocabulary_multiple)
    budget = Budget.of(load_hardware("h100-lecture"), IDEAL)
    keeps_all = IDEAL._replace(memory=IDEAL.memory._replace(window_layers="full"))  # the devices drop no token
    return room(model, keeps_all, shard, Stages.of(model, pp), FORMATS, structure, budget)


@every_split
def test_every_device_holds_the_counted_kv(name: str, tp: int, pp: int, structure: Structure) -> None:
    sharded, space = ran(name, tp, pp, structure).sharded, room_of(MODELS[name], tp, pp, structure)
    tokens = PROMPT + 1
    for stage, device in by_stage(sharded):
        per_token = float(space.kv_token[2 if stage else 0])
        assert device.kv_bytes == exactly(per_token * BATCH * tokens / space.holders)
        assert len(device.cache) == len(sharded.layers[stage])
    weights, kv, _ = space.fullest(tokens, BATCH)
    fullest = max((device.weight_bytes + device.kv_bytes, device.kv_bytes) for _, device in by_stage(sharded))
    assert (float(weights + kv), float(kv)) == exactly(fullest)


@every_split
def test_seconds_of_a_pass_on_bare_wires_are_the_bytes_sent(name: str, tp: int, pp: int, structure: Structure) -> None:
    run, model = ran(name, tp, pp, structure), MODELS[name]
    lecture = load_hardware("h100-lecture")
    rows = tuple(row._replace(level="wire", hop_us=0.0, bandwidth_fraction=1.0) for row in lecture.collectives[:5])
    hardware = lecture._replace(network=(NetworkLevel("wire", "switch", 1.0),), collectives=rows)
    network = Network(Placement.of(hardware, tp * pp), IDEAL)
    degrees = (np.array([degree]) for degree in (tp, pp, 1))
    replica = Replica(model, hardware, IDEAL, network, FORMATS, structure, *degrees)
    for log in run.passes:
        sent = sum(log.fabric.sent(stage[0].number) for stage in run.sharded.stages)
        time = pass_time(replica, log.counted)
        assert np.broadcast_to(time.whole.network, 1) == pytest.approx([sent / GB], rel=1e-12, abs=0)


# -------------------------------------------------------------------------------------------------- chunks, remainders


@every("structure", [OVER_HEADS, ALL_OVER_BATCH])
@every("name", MODELS)
@every("tp", [1, 2, 4])
def test_a_prompt_in_two_chunks_reads_its_kv_back_as_counted(name: str, tp: int, structure: Structure) -> None:
    model, tokens = MODELS[name], tokens_of(MODELS[name], BATCH)
    window, cut = model.attention.window, 4
    sharded = Sharded(model, IDEAL, Weights.of(model), tp, 1, structure, BATCH)
    head = logged(sharded, tokens[:, :cut], 0, prompts(BATCH, cut, 0, window, ended=False), ended=False)
    tail = logged(sharded, tokens[:, cut:PROMPT], cut, prompts(BATCH, PROMPT - cut, cut, window))
    expected = whole_logits(model, Weights.of(model), tokens)
    np.testing.assert_allclose(tail.logits, expected[:, PROMPT - 1], rtol=1e-5, atol=1e-5)
    run = Run(sharded, head, tail)
    check_bytes_sent(run)
    for log in run.passes:
        operations, _ = counts(run, log.counted)
        attention = next(operation for operation in operations if operation.kind == "attention_prefill")
        for _, device in by_stage(sharded):
            done = log.work[device.number]
            assert done[attention.name]["flops"] == exactly(model.layers * attention.flops)
            assert done[attention.name]["kv_bytes"] == model.layers * attention.kv_bytes
            assert ("head" in done) == bool(log.counted.prompts_ended)


@every("requests", [1, 3, 5, 6])
@every("structure", [OVER_BATCH, ALL_OVER_BATCH])
def test_requests_that_do_not_divide_fill_the_fullest_rank(requests: int, structure: Structure) -> None:
    tp, model = 4, MODELS["two KV heads"]
    run = ran(model.name, tp, 1, structure, requests=requests)
    expected = whole_logits(model, Weights.of(model), tokens_of(model, requests))
    np.testing.assert_allclose(run.decode.logits, expected[:, PROMPT], rtol=1e-5, atol=1e-5)
    most = -(-requests // tp)
    assert max(len(own) for own in run.sharded.owned) == most

    for log, kind in ((run.prefill, "attention_prefill"), (run.decode, "attention_decode")):
        operations, _ = counts(run, log.counted)
        counted = next(operation for operation in operations if operation.kind == kind)
        done = [work[counted.name] for work in log.work.values()]
        assert max(work["flops"] for work in done) == exactly(model.layers * counted.flops)
        assert max(work["kv_bytes"] for work in done) == exactly(model.layers * counted.kv_bytes)
    _, kv, _ = room_of(model, tp, 1, structure).fullest(PROMPT + 1, requests)
    assert max(device.kv_bytes for _, device in by_stage(run.sharded)) == float(kv)


@every("requests", [1, 3, 5, 6])
@every("structure", [OVER_BATCH, ALL_OVER_BATCH])
def test_requests_that_do_not_divide_fill_the_port_of_the_fullest_rank(requests: int, structure: Structure) -> None:
    # An all-to-all ends when the rank with the most requests has received (or sent back) all of theirs.
    model = MODELS["two KV heads"]
    run = ran(model.name, 4, 1, structure, requests=requests)
    devices = [device.number for _, device in by_stage(run.sharded)]
    found, counted = {}, {}
    for log in run.passes:
        _, transfers = counts(run, log.counted)
        for transfer in transfers:
            if transfer.op == "all_to_all" and transfer.bytes:
                ports = [(log.fabric.sent(d, transfer.name), log.fabric.received(d, transfer.name)) for d in devices]
                found[transfer.name] = max(map(max, ports))
                counted[transfer.name] = model.layers * float(sent_bytes("direct", "all_to_all", 4, transfer.bytes))
    assert found
    assert counted == exactly(found)


def test_the_fullest_rank_rounds_up_what_does_not_divide() -> None:
    model = PLAIN._replace(vocab=130, ffn=PLAIN.ffn._replace(hidden=98))
    shard = Shard.of(model, 4)
    assert (shard.vocab, shard.ffn, shard.heads, shard.kv_heads) == (33, 25, 2, 1)
    assert Shard.of(model, 4, vocabulary_multiple=64).vocab == 48  # 192 / 4
    assert Shard.of(model, 8).kv_heads == 1  # four KV heads, each on two ranks
    assert Shard.of(model._replace(attention=PLAIN.attention._replace(kv_heads=6, heads=12)), 4).kv_heads == 2
    assert head_elements(model, shard) == 33 * 64
    _, transfers = count(model, IDEAL, shard, Pass(3.0, 10.0), FORMATS, OVER_HEADS)
    assert {transfer.name: float(transfer.bytes) for transfer in transfers} == {
        "all-reduce": 3 * 64 * 2,
        "embedding all-reduce": 3 * 64 * 2,
        "logits all-gather": 3 * 33 * 4 * 2,  # padding travels too
    }


def test_layers_that_do_not_divide_go_to_the_stages_before_the_last() -> None:
    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            dealt = [layers // pp] * pp
            for back in range(2, 2 + layers % pp):
                dealt[-back] += 1
            found = Stages.of(PLAIN._replace(layers=layers), pp)
            assert sum(dealt) == layers
            assert (int(found.first), int(found.last)) == (dealt[0], dealt[-1]), (layers, pp)
            if pp > 2:
                assert int(found.middle) == max(dealt[1:-1]), (layers, pp)


def test_the_weights_of_three_stages_are_their_layers_and_ends() -> None:
    model, dtype = PLAIN._replace(layers=5), FORMATS.weights  # 1 + 2 + ... backwards: 2, 2, 1
    shard = Shard.of(model, 2)
    layer = bytes_of(layer_weights(model, shard), dtype)
    table = 64 * 64 * ELEMENT
    first, middle, last = stage_weight_bytes(model, shard, Stages.of(model, 3), dtype)
    assert (float(first), float(middle), float(last)) == (2 * layer + table, 2 * layer, layer + table + 64 * ELEMENT)


def test_a_mixed_pass_moves_what_its_two_halves_move() -> None:
    shard = Shard.of(PLAIN, 4)

    def moved(work: Pass) -> Counter[str]:
        _, transfers = count(PLAIN, IDEAL, shard, work, FORMATS, OVER_BATCH)
        return Counter({transfer.name: float(transfer.bytes) for transfer in transfers})

    decode, prefill = Pass(8.0, 100.0), prompts(2, 50)
    mixed = prefill._replace(decode_rows=8.0, context=100.0)
    assert moved(mixed) == moved(decode) + moved(prefill)
    assert all(size > 0 for size in moved(mixed).values())


def test_counts_of_arrays_are_those_of_their_elements() -> None:
    tp, rows = np.array([1, 2, 4, 8]), np.array([3.0, 8.0, 5.0, 1.0])
    for structure in (OVER_HEADS, OVER_BATCH, ALL_OVER_BATCH):
        together = count(PLAIN, IDEAL, Shard.of(PLAIN, tp), Pass(rows, 9 * rows), FORMATS, structure)
        for index, (degree, requests) in enumerate(zip(tp, rows, strict=True)):
            alone = count(PLAIN, IDEAL, Shard.of(PLAIN, degree), Pass(requests, 9 * requests), FORMATS, structure)
            for many, one in zip([*together[0], *together[1]], [*alone[0], *alone[1]], strict=True):
                assert many.name == one.name
                for field, value in zip(many._fields, many, strict=True):
                    if isinstance(value, np.ndarray):
                        assert value.ravel()[index % value.size] == exactly(float(getattr(one, field)))
