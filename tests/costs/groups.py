"""Prompts and decodes over groups of chips that share their tokens, on virtual chips that move arrays: a witness.

One layer's attention: c groups of t chips. The reference is the layer on one chip, which knows no groups. Each way is
written as its paper describes it (Ring Attention with blocks dealt in zig-zag, DeepSpeed-Ulysses, keys and values
gathered), and knows nothing of the planner's counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from simulation import Array, Fabric, all_to_all, ring_all_gather, ring_all_reduce, send

from planner.specs.model import LatentAttention

WIDE, HEADS, DIM, NEW, PRIOR, REQUESTS = 16, 8, 4, 32, 16, 64
LATENT = LatentAttention(kv_rank=6, query_rank=None, nope_dim=4, rope_dim=3, value_dim=5)


class Layer(NamedTuple):
    """Projections; what is cached of a token is a row of `cached` values for each KV head (one for latent attention).

    A head's keys and values are linear in what is cached of its KV head: the two halves, or expanded from the latent.
    """

    queries: Array
    """[heads, d, key]"""
    into: Array
    """[KV heads, d, cached]"""
    keys: Array
    """[heads, cached, key]"""
    values: Array
    """[heads, cached, value]"""
    out: Array
    """[heads, value, d]"""

    @classmethod
    def of(cls, kv_heads: int) -> Layer:
        random = np.random.default_rng(5)

        def some(*shape: int) -> Array:
            return random.normal(size=shape) / np.sqrt(shape[-2])

        if kv_heads:
            halves = np.eye(2 * DIM)
            keys, values = (np.repeat(each[None], HEADS, 0) for each in (halves[:, :DIM], halves[:, DIM:]))
            return cls(some(HEADS, WIDE, DIM), some(kv_heads, WIDE, 2 * DIM), keys, values, some(HEADS, DIM, WIDE))
        query, cached = LATENT.nope_dim + LATENT.rope_dim, LATENT.cached
        keys = np.zeros((HEADS, cached, query))
        keys[:, : LATENT.kv_rank, : LATENT.nope_dim] = some(HEADS, LATENT.kv_rank, LATENT.nope_dim)
        keys[:, LATENT.kv_rank :, LATENT.nope_dim :] = np.eye(LATENT.rope_dim)  # the rotary part is shared
        values = np.zeros((HEADS, cached, LATENT.value_dim))
        values[:, : LATENT.kv_rank] = some(HEADS, LATENT.kv_rank, LATENT.value_dim)
        return cls(some(HEADS, WIDE, query), some(1, WIDE, cached), keys, values, some(HEADS, LATENT.value_dim, WIDE))

    @property
    def kv_heads(self) -> int:
        return len(self.into)

    def owner(self, head: int) -> int:
        """The KV head of a head."""
        return head * self.kv_heads // HEADS

    def cache(self, tokens: Array, kv_heads: list[int]) -> Array:
        """[tokens, KV heads, cached]"""
        return np.einsum("td,hdc->thc", tokens, self.into[kv_heads])

    def attend(self, head: int, queries: Array, held: Array, seen: Array) -> tuple[Array, Array]:
        """(outputs [rows, value], logarithms of sums of exponentials [rows]) of one head.

        Args:
            head: which.
            queries: [rows, key].
            held: [tokens, cached] of its KV head.
            seen: [rows, tokens] which of them a row may look at.
        """
        scores = np.where(seen, queries @ (held @ self.keys[head]).T, -np.inf)
        most = np.max(scores, axis=1, initial=-1e30)
        weights = np.exp(scores - most[:, None])
        sums = weights.sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.nan_to_num(weights @ (held @ self.values[head]) / sums[:, None])
            return out, np.where(sums > 0, np.log(sums) + most, -np.inf)

    def whole(self, tokens: Array, prior: Array) -> Array:
        """[new tokens, d]: on one chip, behind prior tokens."""
        every = np.concatenate([prior, tokens])
        held = self.cache(every, list(range(self.kv_heads)))
        seen = np.arange(len(every))[None] <= len(prior) + np.arange(len(tokens))[:, None]
        mixed = 0.0
        for head in range(HEADS):
            out, _ = self.attend(head, tokens @ self.queries[head], held[:, self.owner(head)], seen)
            mixed = mixed + out @ self.out[head]
        return np.asarray(mixed)


def merged(parts: list[tuple[Array, Array]]) -> Array:
    """Outputs over parts of the tokens put together by the logarithms of their sums."""
    sums = np.stack([each[1] for each in parts])
    total = np.logaddexp.reduce(sums, axis=0)
    return np.asarray(sum(np.exp(lse - total)[:, None] * out for out, lse in parts))


class Run:
    """A prompt's attention over c groups of t chips; chip g t + r is rank r of group g."""

    def __init__(self, layer: Layer, t: int, c: int, way: str) -> None:
        random = np.random.default_rng(7)
        self.layer, self.t, self.c, self.way = layer, t, c, way
        self.fabric, self.pairs = Fabric(2), np.zeros(t * c)
        self.tokens, self.prior = random.normal(size=(NEW, WIDE)), random.normal(size=(PRIOR, WIDE))
        part = np.arange(NEW).reshape(2 * c, -1)
        self.mine = [np.concatenate([part[g], part[2 * c - 1 - g]]) for g in range(c)]  # zig-zag
        self.kept = np.array_split(np.arange(PRIOR), c)
        rows = {"ring": self._ring, "gather": self._gathered, "ulysses": self._exchanged}[way]()
        partial: dict[int, Array] = {}
        for chip, outputs in rows.items():
            heads = self.heads(chip)
            partial[chip] = np.asarray(sum(outputs[h] @ layer.out[h] for h in heads)).ravel()
        groups = [{g * t + r: partial[g * t + r] for r in range(t)} for g in range(c)]
        summed = ring_all_reduce(self.fabric, *groups, name="attention all-reduce")
        self.output = np.zeros((NEW, WIDE))
        for g, group in enumerate(summed):
            self.output[self.mine[g]] = group[g * t].reshape(-1, WIDE)

    def heads(self, chip: int) -> list[int]:
        """Of a chip in its group."""
        each = HEADS // self.t
        return list(range(chip % self.t * each, (chip % self.t + 1) * each))

    def owners(self, heads: list[int]) -> list[int]:
        return sorted({self.layer.owner(head) for head in heads})

    def across(self) -> list[list[int]]:
        """Chips of the same rank in all groups."""
        return [[g * self.t + r for g in range(self.c)] for r in range(self.t)]

    def _cached(self, chip: int) -> tuple[Array, Array, Array]:
        """(new, prior) vectors of a chip's KV heads and (positions): of its group's tokens."""
        g, owners = chip // self.t, self.owners(self.heads(chip))
        new, old = (self.layer.cache(each, owners) for each in (self.tokens[self.mine[g]], self.prior[self.kept[g]]))
        return new, old, np.concatenate([PRIOR + self.mine[g], self.kept[g]])

    def _attend(
        self, chip: int, rows: Array, held: Array, positions: Array, heads: list[int]
    ) -> dict[int, tuple[Array, Array]]:
        owners, found = self.owners(heads), {}
        seen = positions[None] <= PRIOR + rows[:, None]
        for head in heads:
            queries = self.tokens[rows] @ self.layer.queries[head]
            found[head] = self.layer.attend(head, queries, held[:, owners.index(self.layer.owner(head))], seen)
            self.pairs[chip] += seen.sum()
        return found

    def _ring(self) -> dict[int, dict[int, Array]]:
        blocks = {chip: self._cached(chip) for chip in range(self.t * self.c)}
        parts: dict[int, list[dict[int, tuple[Array, Array]]]] = {chip: [] for chip in blocks}
        for hop in range(self.c):
            for chip, (new, old, positions) in blocks.items():
                held = np.concatenate([new, old])
                parts[chip].append(self._attend(chip, self.mine[chip // self.t], held, positions, self.heads(chip)))
            if hop == self.c - 1:
                break
            to = {chip: (chip + self.t) % (self.t * self.c) for chip in blocks}
            moves = {(chip, to[chip]): np.concatenate([new, old]) for chip, (new, old, _) in blocks.items()}
            came = dict(zip((target for _, target in moves), send(self.fabric, moves, "ring"), strict=True))
            source = {target: chip for chip, target in to.items()}
            blocks = {
                chip: (came[chip][: NEW // self.c], came[chip][NEW // self.c :], blocks[source[chip]][2])
                for chip in blocks
            }
        return {chip: {h: merged([part[h] for part in each]) for h in self.heads(chip)} for chip, each in parts.items()}

    def _gathered(self) -> dict[int, dict[int, Array]]:
        mine = {chip: self._cached(chip) for chip in range(self.t * self.c)}
        lines = [{chip: np.concatenate(mine[chip][:2]).ravel() for chip in line} for line in self.across()]
        result = {}
        for line in ring_all_gather(self.fabric, *lines, name="gathered"):
            for chip, everything in line.items():
                shape = (-1, *mine[chip][0].shape[1:])
                positions = np.concatenate([mine[each][2] for each in line])
                held = everything.reshape(shape)
                found = self._attend(chip, self.mine[chip // self.t], held, positions, self.heads(chip))
                result[chip] = {head: out for head, (out, _) in found.items()}
        return result

    def _exchanged(self) -> dict[int, dict[int, Array]]:
        result: dict[int, dict[int, Array]] = {}
        for line in self.across():
            heads = self.heads(line[0])
            own = {
                chip: heads[i * len(heads) // self.c :][: max(1, len(heads) // self.c)] for i, chip in enumerate(line)
            }
            queries = {
                chip: {
                    to: np.stack([self.tokens[self.mine[chip // self.t]] @ self.layer.queries[h] for h in own[to]])
                    for to in line
                }
                for chip in line
            }
            all_to_all(self.fabric, queries, "tokens to heads")
            latent = self.layer.keys.shape[1] == LATENT.cached
            if latent:
                vectors = {chip: self._cached(chip)[0].ravel() for chip in line}  # all chips hold the cached ones
                ring_all_gather(self.fabric, vectors, name="gathered")
            else:
                needed = {
                    chip: {
                        to: self.layer.cache(self.tokens[self.mine[chip // self.t]], self.owners(own[to]))
                        for to in line
                    }
                    for chip in line
                }
                all_to_all(self.fabric, needed, "tokens to heads")
            every, rows = np.concatenate([self.tokens, self.prior]), np.arange(NEW)
            positions = np.concatenate([PRIOR + np.arange(NEW), np.arange(PRIOR)])
            back: dict[int, dict[int, Array]] = {}
            for chip in line:  # the cache holds this chip's heads of all prior tokens already
                found = self._attend(chip, rows, self.layer.cache(every, self.owners(own[chip])), positions, own[chip])
                back[chip] = {to: np.stack([found[h][0][self.mine[to // self.t]] for h in own[chip]]) for to in line}
            came = all_to_all(self.fabric, back, "heads to tokens")
            for chip in line:
                result[chip] = {h: came[chip][source][i] for source in line for i, h in enumerate(own[source])}
        return result

    def sent(self, name: str) -> float:
        return max(self.fabric.sent_by_name(chip).get(name, 0.0) for chip in range(self.t * self.c))


class Decoded:
    """One step of REQUESTS requests whose cache lies by tokens or by heads over c groups of one chip."""

    def __init__(self, layer: Layer, c: int, cached: str) -> None:
        random = np.random.default_rng(11)
        self.fabric, self.sums, own = Fabric(2), Fabric(4), REQUESTS // c
        self.tokens = random.normal(size=(REQUESTS, WIDE))
        self.old = random.normal(size=(REQUESTS, 4 * c - 1, WIDE))
        chips, every = list(range(c)), list(range(layer.kv_heads))
        mine = [slice(g * own, (g + 1) * own) for g in chips]
        queries = np.stack([self.tokens @ layer.queries[h] for h in range(HEADS)])  # [heads, requests, key]
        held = [
            np.concatenate([layer.cache(self.old[r], every), layer.cache(self.tokens[r : r + 1], every)])
            for r in range(REQUESTS)
        ]
        rows = np.zeros((REQUESTS, HEADS, layer.values.shape[2]))
        seen = np.ones((1, 4), dtype=bool)
        if cached == "sequence":
            parts = {g: queries[:, mine[g]].ravel() for g in chips}
            ring_all_gather(self.fabric, parts, name="queries to all groups")
            # the cache's parts: four tokens each, a new one in the part whose turn it is
            new = {
                g: {
                    to: np.stack([held[r][-1] for r in range(*mine[g].indices(REQUESTS)) if r % c == to])
                    for to in chips
                }
                for g in chips
            }
            all_to_all(self.fabric, new, "keys and values to their tokens' groups")
            found = {
                g: [
                    [
                        layer.attend(h, queries[h, r][None], held[r][4 * g : 4 * g + 4, layer.owner(h)], seen)
                        for h in range(HEADS)
                    ]
                    for r in range(REQUESTS)
                ]
                for g in chips
            }
            outs = {
                g: {
                    to: np.array(
                        [[found[g][r][h][0][0] for h in range(HEADS)] for r in range(*mine[to].indices(REQUESTS))]
                    )
                    for to in chips
                }
                for g in chips
            }
            lses = {
                g: {
                    to: np.array(
                        [[found[g][r][h][1][0] for h in range(HEADS)] for r in range(*mine[to].indices(REQUESTS))]
                    )
                    for to in chips
                }
                for g in chips
            }
            came, sums = (
                all_to_all(self.fabric, outs, "partial outputs"),
                all_to_all(self.sums, lses, "partial outputs"),
            )
            for g in chips:
                lse, out = (np.stack([side[g][source] for source in chips]) for side in (sums, came))
                total = np.logaddexp.reduce(lse, axis=0)
                rows[mine[g]] = (np.exp(lse - total)[..., None] * out).sum(axis=0)
        else:
            each = HEADS // c
            sent = {g: {to: queries[to * each : (to + 1) * each, mine[g]] for to in chips} for g in chips}
            all_to_all(self.fabric, sent, "tokens to heads")
            need = {to: sorted({layer.owner(h) for h in range(to * each, (to + 1) * each)}) for to in chips}
            new = {
                g: {to: np.stack([held[r][-1, need[to]] for r in range(*mine[g].indices(REQUESTS))]) for to in chips}
                for g in chips
            }
            all_to_all(self.fabric, new, "tokens to heads")
            every_token = np.ones((1, 4 * c), dtype=bool)
            for h in range(HEADS):
                for r in range(REQUESTS):
                    rows[r, h] = layer.attend(h, queries[h, r][None], held[r][:, layer.owner(h)], every_token)[0][0]
            back = {g: {to: rows[mine[to], g * each : (g + 1) * each] for to in chips} for g in chips}
            all_to_all(self.fabric, back, "heads to tokens")
        self.output = np.einsum("rhv,hvd->rd", rows, layer.out)

    def sent(self, name: str) -> float:
        return sum(fabric.sent_by_name(0).get(name, 0.0) for fabric in (self.fabric, self.sums))
