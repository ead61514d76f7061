"""A layer over P simulated chips, in sequence parallelism and in tensor parallelism, on one KV cache: data is moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.phases.shift.layout import Base, heads_in_base, kv_heads_of

Array = NDArray[np.float64]


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int = 4
    width: int = 24
    ffn: int = 48


class Layer:
    """Weights of one layer, and what one device makes of it."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        random, (heads, kv, dh, d, ffn) = np.random.default_rng(seed), sizes
        self.sizes = sizes
        self.q, self.k, self.v = (random.normal(size=(d, each * dh)) / 3 for each in (heads, kv, kv))
        self.out = random.normal(size=(heads * dh, d)) / 3
        self.up, self.down = random.normal(size=(d, ffn)) / 3, random.normal(size=(ffn, d)) / 3
        self.keys = self.values = np.zeros((0, kv, dh))

    def __call__(self, tokens: Array) -> Array:
        """[tokens, width] -> the same, behind all tokens that came before."""
        n, (heads, kv, dh, *_) = len(tokens), self.sizes
        normed = norm(tokens)
        self.keys = np.concatenate([self.keys, (normed @ self.k).reshape(n, kv, dh)])
        self.values = np.concatenate([self.values, (normed @ self.v).reshape(n, kv, dh)])
        group = heads // kv
        queries = (normed @ self.q).reshape(n, heads, dh)
        outputs = attend(queries, np.repeat(self.keys, group, axis=1), np.repeat(self.values, group, axis=1))
        hidden = tokens + outputs.reshape(n, -1) @ self.out
        return hidden + np.maximum(norm(hidden) @ self.up, 0) @ self.down


def norm(tokens: Array) -> Array:
    return np.asarray(tokens / np.sqrt(np.mean(tokens**2, axis=1, keepdims=True)))


def attend(queries: Array, keys: Array, values: Array) -> Array:
    """[n, heads, dh] of the last n of all tokens, causal; keys and values [tokens, heads, dh]."""
    n, total = len(queries), len(keys)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[2])
    late = np.arange(total)[None, :] > np.arange(total - n, total)[:, None]
    scores = np.where(late, -np.inf, scores)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    return np.asarray(np.einsum("hqk,khd->qhd", shares / shares.sum(axis=2, keepdims=True), values))


class Chips:
    """P chips that share one layer; each keeps the KV of its own heads, and counts what it sends."""

    def __init__(self, layer: Layer, base: Base) -> None:
        self.layer, self.base = layer, base
        heads, kv, dh, *_ = layer.sizes
        self.held = heads_in_base(base, heads)
        self.kv_held = [kv_heads_of(held, heads, kv) for held in self.held]
        self.keys = [np.zeros((0, last - first, dh)) for first, last in self.kv_held]
        self.values = [each.copy() for each in self.keys]
        self.exchanged = np.zeros((base.chips, 2))
        """Elements that each chip sent in the all-to-alls into attention, and out of it."""
        self.reduced = np.zeros(base.chips)
        """... in all-reduces, as rings send them."""

    def columns(self, matrix: Array, first: int, last: int) -> Array:
        dh = self.layer.sizes.head_dim
        return matrix[:, first * dh : last * dh]

    def sequence_pass(self, tokens: Array) -> Array:
        """The base: a part of the tokens and 1 / TP of the weights on each chip; heads for attention alone."""
        base, layer = self.base, self.layer
        heads, _, dh, d, ffn = layer.sizes
        n = len(tokens)
        padded = np.zeros((-(-n // base.sp) * base.sp, d))
        padded[:n] = tokens
        parts = np.split(padded, base.sp)
        wide, slots = heads // base.tp, {}
        for s in range(base.sp):
            for t in range(base.tp):
                normed = norm(parts[s] + (parts[s] == 0).all(axis=1, keepdims=True))  # padding must not divide by 0
                own = len(parts[s])
                q = (normed @ self.columns(layer.q, t * wide, (t + 1) * wide)).reshape(own, wide, dh)
                for other in range(base.sp):  # what goes to the chip that attends with part `other` of these heads
                    to = base.rank(other, t)
                    first, last = self.held[to]
                    k, v = (
                        (normed @ self.columns(m, *self.kv_held[to])).reshape(own, -1, dh) for m in (layer.k, layer.v)
                    )
                    slots[base.rank(s, t), to] = (q[:, first - t * wide : last - t * wide], k, v)
                    if other != s:
                        self.exchanged[base.rank(s, t), 0] += sum(each.size for each in slots[base.rank(s, t), to])
        outputs = []
        for rank in range(base.chips):
            group = base.sp_groups[rank % base.tp]
            q, k, v = (np.concatenate([slots[source, rank][which] for source in group])[:n] for which in range(3))
            outputs.append(self.attention(rank, q, k, v))
        result = []
        for s in range(base.sp):
            own = len(parts[s])
            mine = slice(s * own, (s + 1) * own)
            partial = []
            for t in range(base.tp):
                rank, back = base.rank(s, t), []
                for other in range(base.sp):
                    source = base.rank(other, t)
                    whole = np.zeros((len(padded), *outputs[source].shape[1:]))
                    whole[:n] = outputs[source]
                    back.append(whole[mine])
                    if source != rank:
                        self.exchanged[source, 1] += whole[mine].size
                rows = slice(t * wide * dh, (t + 1) * wide * dh)
                partial.append(np.concatenate(back, axis=1).reshape(own, -1) @ layer.out[rows])
            hidden = parts[s] + self.reduce(partial, [base.rank(s, t) for t in range(base.tp)])
            cut = [slice(t * ffn // base.tp, (t + 1) * ffn // base.tp) for t in range(base.tp)]
            lifted = norm(hidden + (hidden == 0).all(axis=1, keepdims=True))
            deep = [np.maximum(lifted @ layer.up[:, each], 0) @ layer.down[each] for each in cut]
            result.append(hidden + self.reduce(deep, [base.rank(s, t) for t in range(base.tp)]))
        return np.concatenate(result)[:n]

    def tensor_pass(self, tokens: Array, order: Sequence[int]) -> Array:
        """The shift: all tokens and 1 / P of the weights on each chip, block i on the i-th rank of the order."""
        layer, chips = self.layer, self.base.chips
        heads, kv, dh, _, ffn = layer.sizes
        n, narrow, normed, partial = len(tokens), heads // chips, norm(tokens), []
        for index, rank in enumerate(order):
            first, last = index * narrow, (index + 1) * narrow
            kv_first, kv_last = kv_heads_of((first, last), heads, kv)
            q = (normed @ self.columns(layer.q, first, last)).reshape(n, -1, dh)
            k, v = ((normed @ self.columns(m, kv_first, kv_last)).reshape(n, -1, dh) for m in (layer.k, layer.v))
            output = self.attention(rank, q, k, v)
            partial.append(output.reshape(n, -1) @ layer.out[first * dh : last * dh])
        hidden = tokens + self.reduce(partial, order)
        cut = [slice(i * ffn // chips, (i + 1) * ffn // chips) for i in range(chips)]
        deep = [np.maximum(norm(hidden) @ layer.up[:, each], 0) @ layer.down[each] for each in cut]
        return hidden + self.reduce(deep, order)

    def attention(self, rank: int, q: Array, k: Array, v: Array) -> Array:
        """A chip's heads, over its own cache with the new tokens."""
        self.keys[rank] = np.concatenate([self.keys[rank], k])
        self.values[rank] = np.concatenate([self.values[rank], v])
        group = max(1, q.shape[1] // k.shape[1])
        return attend(q, np.repeat(self.keys[rank], group, axis=1), np.repeat(self.values[rank], group, axis=1))

    def reduce(self, partial: list[Array], ranks: Sequence[int]) -> Array:
        count = len(partial)
        for rank in ranks:
            self.reduced[rank] += 2 * (count - 1) / count * partial[0].size
        return np.asarray(sum(partial))
