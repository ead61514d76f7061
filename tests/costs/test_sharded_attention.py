"""Attention as heads x batch x sequence, and the FFN behind it, on virtual chips that move arrays: a witness.

One decode step of one layer, without norms. A group's ranks are numbered heads first, the parts of a sequence inside.
Written from what vLLM's decode context parallelism and Helix say they do, ignorant of the planner's counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from helpers import every
from simulation import Array, Fabric, all_to_all, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from test_sharded_transformer import FORMATS, PLAIN, exactly

from planner.costs.collectives import sent_bytes
from planner.costs.counting import count
from planner.costs.layers import Operation, Pass, Transfer
from planner.costs.memory import Budget, room
from planner.costs.rows import structure_of
from planner.costs.weights import Shard, Stages
from planner.plans.plan import Plan
from planner.plans.sharding import Sharding
from planner.specs.catalog import load_engine, load_hardware
from planner.specs.model import Attention, FeedForward, LatentAttention, Model

WIDE, HEADS, DIM, HIDDEN, CONTEXT, REQUESTS = 32, 8, 8, 64, 24, 16
LATENT = LatentAttention(kv_rank=12, query_rank=None, nope_dim=6, rope_dim=4, value_dim=5)
IDEAL = load_engine("ideal")
PARTS = [
    Sharding(8), Sharding(1, 8), Sharding(4, 2), Sharding(2, 1, 4), Sharding(1, 1, 8), Sharding(4, 1, 2),
    Sharding(2, 2, 2), Sharding(1, 2, 4), Sharding(8, 2), Sharding(8, 1, 2), Sharding(4, 1, 4),
]  # fmt: skip


def model_of(kv_heads: int) -> Model:
    """A layer with so many KV heads, 0 = latent attention."""
    latent = None if kv_heads else LATENT
    attention = Attention(HEADS, kv_heads or HEADS, DIM if kv_heads else LATENT.nope_dim + LATENT.rope_dim)
    return PLAIN._replace(
        layers=1, hidden=WIDE, attention=attention._replace(latent=latent), ffn=FeedForward(HIDDEN, True, "silu")
    )


class Layer(NamedTuple):
    """Weights and what was cached; queries and keys are of the space in which they meet."""

    into: Array
    """[heads, d, query]: queries, into the latent space where there is one."""
    keys: Array
    """[KV heads, d, key]"""
    values: Array | None
    """[KV heads, d, value]; none = the first `kv_rank` values of a key, as in latent attention."""
    back: Array
    """[heads, value, d]: outputs, out of the latent space where there is one."""
    up: Array
    down: Array
    cached: tuple[Array, Array]
    """[requests, tokens, KV heads, key or value]"""
    tokens: Array
    """[requests, d]"""

    @classmethod
    def of(cls, kv_heads: int) -> Layer:
        random = np.random.default_rng(3)

        def some(*shape: int) -> Array:
            return random.normal(size=shape) / np.sqrt(shape[-2])

        up, down, tokens = some(WIDE, HIDDEN), some(HIDDEN, WIDE), random.normal(size=(REQUESTS, WIDE))
        if kv_heads:
            cached = random.normal(size=(2, REQUESTS, CONTEXT - 1, kv_heads, DIM))
            heads = some(kv_heads, WIDE, DIM), some(kv_heads, WIDE, DIM)
            return cls(some(HEADS, WIDE, DIM), *heads, some(HEADS, DIM, WIDE), up, down, (cached[0], cached[1]), tokens)
        latent = random.normal(size=(REQUESTS, CONTEXT - 1, 1, LATENT.cached))
        query = some(HEADS, WIDE, LATENT.nope_dim), some(HEADS, WIDE, LATENT.rope_dim)
        key_half, value_half = (some(HEADS, LATENT.kv_rank, wide) for wide in (LATENT.nope_dim, LATENT.value_dim))
        into = np.concatenate([query[0] @ key_half.transpose(0, 2, 1), query[1]], axis=2)
        back = value_half @ some(HEADS, LATENT.value_dim, WIDE)
        whole = latent, latent[..., : LATENT.kv_rank]
        return cls(into, some(1, WIDE, LATENT.cached), None, back, up, down, whole, tokens)

    def written(self, tokens: Array, heads: list[int]) -> tuple[Array, Array]:
        """Keys and values [requests, heads, ...] of new tokens."""
        keys = np.einsum("rd,hdk->rhk", tokens, self.keys[heads])
        if self.values is None:
            return keys, keys[..., : LATENT.kv_rank]
        return keys, np.einsum("rd,hdk->rhk", tokens, self.values[heads])

    def whole(self) -> Array:
        """The layer's output on one chip."""
        kv_heads = len(self.keys)
        new = self.written(self.tokens, list(range(kv_heads)))
        keys, values = (np.concatenate([old, each[:, None]], 1) for old, each in zip(self.cached, new, strict=True))
        owner = [head * kv_heads // HEADS for head in range(HEADS)]
        queries = np.einsum("rd,hdk->rhk", self.tokens, self.into)
        out, _ = attended(queries, keys[:, :, owner], values[:, :, owner])
        mixed = np.einsum("rhv,hvd->rd", out, self.back)
        return ffn(mixed, self.up, self.down)


def attended(queries: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """(outputs, logarithms of the sums of exponentials) of queries [r, h, k] over keys [r, t, h, k]."""
    scores = np.einsum("rhk,rthk->rht", queries, keys)
    most = scores.max(axis=2, keepdims=True)
    sums = np.log(np.exp(scores - most).sum(axis=2, keepdims=True)) + most
    return np.einsum("rht,rthv->rhv", np.exp(scores - sums), values), sums[..., 0]


def ffn(x: Array, up: Array, down: Array) -> Array:
    return np.asarray(np.maximum(x @ up, 0) @ down)


class Run:
    """The layer over heads x batch x sequence chips."""

    def __init__(self, layer: Layer, parts: Sharding) -> None:
        self.layer, self.parts, self.fabric, self.sums = layer, parts, Fabric(2), Fabric(4)
        self.kv_heads, self.over = len(layer.keys), parts.heads * parts.sequence
        self.kept: dict[int, int] = {}  # elements of the cache that a chip holds
        self.rows = REQUESTS // parts.batch
        self.output = self._run()

    def _heads(self, rank: int) -> tuple[list[int], list[int]]:
        """Query heads of a rank of a group, and of all that share its requests' tokens."""
        part = HEADS // self.parts.heads
        block = list(range(rank // self.parts.sequence * part, (rank // self.parts.sequence + 1) * part))
        if part >= self.parts.sequence:
            each = part // self.parts.sequence
            return block[rank % self.parts.sequence * each :][:each], block
        again = self.parts.sequence // part  # ranks that compute the same head
        return [block[rank % self.parts.sequence // again]], block

    def _owners(self, heads: list[int]) -> list[int]:
        return sorted({head * self.kv_heads // HEADS for head in heads})

    def _run(self) -> Array:
        parts, tp = self.parts, self.parts.chips
        groups = [list(range(g * self.over, (g + 1) * self.over)) for g in range(parts.batch)]
        mixed: dict[int, Array] = {}
        for number, chips in enumerate(groups):
            rows = slice(number * self.rows, (number + 1) * self.rows)
            for start in range(0, self.over, parts.sequence):
                mixed |= self._line(chips[start : start + parts.sequence], start, rows)
        reduced: dict[int, Array] = {}
        for group in ring_all_reduce(self.fabric, *({c: mixed[c].ravel() for c in g} for g in groups), name="heads"):
            reduced |= group
        columns = HIDDEN // tp

        def partial(chip: int, tokens: Array) -> Array:
            mine = slice(chip * columns, (chip + 1) * columns)
            return ffn(tokens.reshape(-1, WIDE), self.layer.up[:, mine], self.layer.down[mine])

        if parts.batch == 1:
            outputs = {chip: partial(chip, x).ravel() for chip, x in reduced.items()}
            found = ring_all_reduce(self.fabric, outputs, name="heads")[0]
            return found[0].reshape(-1, WIDE)
        shares = {chip: np.array_split(reduced[chip], self.over)[chip % self.over] for chip in range(tp)}
        everything = ring_all_gather(self.fabric, shares, name="tokens of all groups")[0]
        outputs = {chip: partial(chip, x).ravel() for chip, x in everything.items()}
        (pieces,) = ring_reduce_scatter(self.fabric, outputs, name="tokens to their groups")
        own: dict[int, Array] = {}
        for group in ring_all_gather(
            self.fabric, *({c: pieces[c] for c in g} for g in groups), name="tokens of the group"
        ):
            own |= group
        return np.concatenate([own[chips[-1]].reshape(-1, WIDE) for chips in groups])

    def _line(self, chips: list[int], start: int, rows: slice) -> dict[int, Array]:
        """Attention of the ranks that share the tokens of some heads of some requests: partial sums [rows, d]."""
        layer, ways, tokens = self.layer, len(chips), self.layer.tokens[rows]
        mine = {chip: self._heads(start + at)[0] for at, chip in enumerate(chips)}
        block = self._heads(start)[1]
        kept = self._owners(block)
        cache: dict[int, tuple[list[Array], list[Array]]] = {chip: ([], []) for chip in chips}
        for row in range(self.rows):  # the rank that takes the new token has one less
            held = np.full(ways, CONTEXT // ways) - (np.arange(ways) == row % ways)
            bounds = np.concatenate([[0], np.cumsum(held)])
            for at, chip in enumerate(chips):
                for side, old in zip(cache[chip], layer.cached, strict=True):
                    side.append(old[rows][row, bounds[at] : bounds[at + 1]][:, kept])
        # a new token's keys and values go to one of the ranks, by turns
        written = {chip: layer.written(tokens, self._owners(heads)) for chip, heads in mine.items()}
        turn = [chips[row % ways] for row in range(self.rows)]
        if len(kept) > len(self._owners(mine[chips[0]])):
            blocks = {
                chip: {
                    to: np.concatenate([part[[c == to for c in turn]].ravel() for part in written[chip]])
                    for to in chips
                }
                for chip in chips
            }
            all_to_all(self.fabric, blocks, "keys and values to their tokens' ranks")
        new = layer.written(tokens, kept)  # what arrives, in order
        for row, chip in enumerate(turn):
            for side in (0, 1):
                cache[chip][side][row] = np.concatenate([cache[chip][side][row], new[side][row][None]])
        for chip in chips:
            sides = cache[chip][:1] if layer.values is None else cache[chip]
            self.kept[chip] = sum(each.size for side in sides for each in side)
        queries = {chip: np.einsum("rd,hdk->rhk", tokens, layer.into[heads]) for chip, heads in mine.items()}
        if ways > 1:
            distinct = {chip: queries[chip] for chip in chips}
            again = max(1, ways // len(block))
            for at, chip in enumerate(chips):  # ranks with the same head bring a part of it each
                distinct[chip] = np.array_split(queries[chip].transpose(1, 0, 2).ravel(), again)[at % again]
            gathered = ring_all_gather(self.fabric, distinct, name=f"queries along the sequence {start} {rows.start}")[
                0
            ]
            whole = next(iter(gathered.values())).reshape(len(block), self.rows, -1).transpose(1, 0, 2)
        else:
            whole = queries[chips[0]]
        owner = [kept.index(head * self.kv_heads // HEADS) for head in block]
        outs: dict[int, Array] = {}
        lses: dict[int, Array] = {}
        for chip in chips:
            found = [
                attended(whole[row : row + 1], keys[None][:, :, owner], values[None][:, :, owner])
                for row, (keys, values) in enumerate(zip(*cache[chip], strict=True))
            ]
            outs[chip], lses[chip] = (np.concatenate([each[side] for each in found]) for side in (0, 1))
        if ways == 1:
            chip = chips[0]
            return {chip: np.einsum("rhv,hvd->rd", outs[chip], layer.back[mine[chip]])}
        # of an output that several ranks project, each takes a part of the values
        again = max(1, ways // len(block))
        wide = outs[chips[0]].shape[2]
        shares = {chip: np.array_split(np.arange(wide), again)[at % again] for at, chip in enumerate(chips)}
        place = {chip: [block.index(head) for head in heads] for chip, heads in mine.items()}
        sent = {c: {to: outs[c][:, place[to]][:, :, shares[to]] for to in chips} for c in chips}
        sums = {c: {to: lses[c][:, place[to]] for to in chips} for c in chips}
        came = all_to_all(self.fabric, sent, f"partial outputs {start} {rows.start}")
        came_sums = all_to_all(self.sums, sums, f"partial outputs {start} {rows.start}")
        merged = {}
        for chip in chips:
            lse = np.stack([came_sums[chip][source] for source in chips])
            out = np.stack([came[chip][source] for source in chips])
            total = np.logaddexp.reduce(lse, axis=0)
            joined = (np.exp(lse - total)[..., None] * out).sum(axis=0)
            merged[chip] = np.einsum("rhv,hvd->rd", joined, layer.back[mine[chip]][:, shares[chip]])
        return merged

    def sent(self, chip: int) -> dict[str, float]:
        """Bytes by the name of what was sent."""
        found: dict[str, float] = {}
        for fabric in (self.fabric, self.sums):
            for name, size in fabric.sent_by_name(chip).items():
                plain = name.rstrip("0123456789 ")
                found[plain] = found.get(plain, 0.0) + size
        return found


def counted(kv_heads: int, parts: Sharding) -> tuple[Shard, list[Operation], list[Transfer]]:
    plan, model = Plan(parts.chips, attention=parts.word if parts.chips > parts.heads else "heads"), model_of(kv_heads)
    shard = Shard.of(model, parts.chips, attention_dp=parts.batch, sequence=parts.sequence)
    work = Pass(float(REQUESTS), float(CONTEXT))
    return shard, *count(model, IDEAL, shard, work, FORMATS, structure_of(plan))


@every("parts", PARTS)
@every("kv_heads", [8, 2, 1, 0])
def test_it_is_the_layer_of_one_chip_and_sends_what_is_counted(kv_heads: int, parts: Sharding) -> None:
    layer = Layer.of(kv_heads)
    run = Run(layer, parts)
    np.testing.assert_allclose(run.output, layer.whole(), rtol=0, atol=1e-9)
    _, _, transfers = counted(kv_heads, parts)
    over = {"xyz": parts.chips, "heads": parts.heads * parts.sequence, "sequence": parts.sequence}
    expected: dict[str, float] = {}
    for transfer in transfers:
        size = transfer.times * sent_bytes("ring", transfer.op, over[transfer.axes], transfer.bytes)
        if transfer.place == "layer" and size:
            name = "heads" if transfer.op == "all_reduce" else transfer.name
            expected[name] = expected.get(name, 0.0) + float(size)
    moved = {name: max(run.sent(chip).get(name, 0.0) for chip in range(parts.chips)) for name in run.sent(0)}
    beyond = parts.heads * parts.sequence > HEADS  # LSEs go to each rank that projects a part of the output
    for name in expected.keys() | moved.keys():
        exact = not (beyond and name == "partial outputs")
        if exact and not name.startswith("keys"):
            assert moved[name] == exactly(expected[name]), name
        else:  # copies of a KV head bring a token once: the count has them all
            assert moved.get(name, 0.0) <= expected[name] * (1.2 if not exact else 1 + 1e-12), name


@every("parts", PARTS)
@every("kv_heads", [8, 2, 1, 0])
def test_a_chip_reads_and_holds_the_cache_that_is_counted(kv_heads: int, parts: Sharding) -> None:
    run, model = Run(Layer.of(kv_heads), parts), model_of(kv_heads)
    shard, operations, _ = counted(kv_heads, parts)
    held = 2 * max(run.kept.values())
    (attention,) = (each for each in operations if "attention (decode)" in each.name)
    assert float(attention.kv_bytes) == exactly(held)
    plan = Plan(parts.chips, attention=parts.word)
    budget = Budget.of(load_hardware("h100-sxm"), IDEAL)
    space = room(model, IDEAL, shard, Stages.of(model, np.array(1)), FORMATS, structure_of(plan), budget)
    requests = REQUESTS / float(space.holders)
    assert float(space.kv_token[0]) * requests * CONTEXT == exactly(held)
    assert float(space.holders) == parts.batch
