"""Prompts and decodes over groups of chips that share their tokens, on virtual chips that move arrays: a witness.

One layer's attention: c groups of t chips. The reference is the layer on one chip, which knows no groups. Each way is
written as its paper describes it (Ring Attention with blocks dealt in zig-zag, DeepSpeed-Ulysses, keys and values
gathered), and knows nothing of the planner's counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from simulation import Array, Fabric, all_to_all, ring_all_gather, ring_all_reduce, send
from test_sharded_transformer import FORMATS, PLAIN, exactly

from planner import load_engine, load_hardware, load_model
from planner.costs.collectives import Network, sent_bytes
from planner.costs.context import part_of, ring_hops
from planner.costs.counting import count
from planner.costs.layers import Operation, Pass, Transfer, causal_pairs
from planner.costs.memory import Budget, room
from planner.costs.rows import structure_of
from planner.costs.step import Replica, pass_time
from planner.costs.teams import Groups, Team
from planner.costs.weights import Shard, Stages
from planner.diagnosing.framework import least_block
from planner.diagnosing.language import _reuse
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.specs.model import Attention, FeedForward, LatentAttention, Model

WIDE, HEADS, DIM, NEW, PRIOR, REQUESTS = 16, 8, 4, 32, 16, 64
LATENT = LatentAttention(kv_rank=6, query_rank=None, nope_dim=4, rope_dim=3, value_dim=5)
IDEAL = load_engine("ideal")
SHAPES = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (1, 8)]
"""(chips of a group, groups)."""
WAYS = ("ring", "gather", "ulysses")


def model_of(kv_heads: int) -> Model:
    """A layer with so many KV heads, 0 = latent attention."""
    latent = None if kv_heads else LATENT
    attention = Attention(HEADS, kv_heads or HEADS, DIM if kv_heads else LATENT.nope_dim + LATENT.rope_dim)
    return PLAIN._replace(
        layers=1, hidden=WIDE, attention=attention._replace(latent=latent), ffn=FeedForward(8 * HEADS, True, "silu")
    )


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


def plan_of(t: int, c: int, way: str, cached: str = "") -> Plan:
    bare = Plan(t, cp=c)
    words = {"heads": "heads", "sequence": f"heads{t}xseq{c}", "batch": f"heads{t}xbatch{c}"}
    word = words[cached or ("heads" if way == "ulysses" else "sequence")]
    return bare._replace(attention=word.removeprefix("heads1x"), prefill_attention=way)


def counted(model: Model, plan: Plan, work: Pass) -> tuple[Shard, list[Operation], list[Transfer]]:
    shard = Shard.of(model, plan.stage_chips, cp=plan.cp)
    return shard, *count(model, IDEAL, shard, work, FORMATS, structure_of(plan))


def prompt() -> Pass:
    pairs = causal_pairs(float(PRIOR + NEW)) - causal_pairs(float(PRIOR))
    return Pass(0.0, 1.0, float(NEW), pairs, float(PRIOR), 1.0, 1.0)


NAMES = {
    "ring, attention (prefill)": "ring",
    "ring, latent vectors": "ring",
    "keys and values of all groups": "gathered",
    "latent vectors of all groups": "gathered",
    "tokens to heads (prefill)": "tokens to heads",
    "heads to tokens (prefill)": "heads to tokens",
    "attention all-reduce": "attention all-reduce",
}


def over(transfer: Transfer, plan: Plan) -> int:
    return {"heads": plan.tp, "context": plan.cp}[transfer.axes]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("t", "c"), SHAPES)
@pytest.mark.parametrize("kv_heads", [8, 2, 1, 0])
def test_a_prompt_over_groups_is_that_of_one_chip_and_sends_what_is_counted(
    kv_heads: int, t: int, c: int, way: str
) -> None:
    layer = Layer.of(kv_heads)
    run = Run(layer, t, c, way)
    np.testing.assert_allclose(run.output, layer.whole(run.tokens, run.prior), rtol=0, atol=1e-9)
    plan = plan_of(t, c, way)
    _, operations, transfers = counted(model_of(kv_heads), plan, prompt())
    expected: dict[str, float] = {}
    for transfer in transfers:
        if transfer.name in NAMES and np.any(transfer.bytes):
            size = transfer.times * sent_bytes("ring", transfer.op, over(transfer, plan), transfer.bytes)
            name = NAMES[transfer.name]
            expected[name] = expected.get(name, 0.0) + float(size)
    names = {name for name in run.fabric.calls if run.sent(name)}
    assert names == {name for name, size in expected.items() if size}
    for name in names:
        assert run.sent(name) == exactly(expected[name]), name
    scores = [each for each in operations if each.kind in ("attention_prefill", "attention_latent_prefill")]
    widths = 2 * DIM if kv_heads else LATENT.nope_dim + LATENT.rope_dim + LATENT.value_dim
    flops = sum(float(each.flops * each.times) for each in scores)
    assert flops == exactly(2 * widths * max(run.pairs))
    assert max(run.pairs) == exactly(min(run.pairs))  # zig-zag: all have the same


@pytest.mark.parametrize("cached", ["sequence", "heads", "batch"])
@pytest.mark.parametrize(("t", "c"), SHAPES)
@pytest.mark.parametrize("kv_heads", [8, 2, 0])
def test_decodes_read_and_hold_their_part_of_the_cache(kv_heads: int, t: int, c: int, cached: str) -> None:
    """Every token of every request is held, and read by a step, as often as there are chips that need its heads."""
    model, way = model_of(kv_heads), "ulysses" if cached == "heads" else "ring"
    plan = plan_of(t, c, way, cached)
    context = 64
    shard, operations, _ = counted(model, plan, Pass(float(REQUESTS), float(context)))
    read = sum(float(each.kv_bytes) for each in operations) * t * c
    one_token = 2.0 * (LATENT.cached if not kv_heads else 2 * kv_heads * DIM)
    ways = t * c if cached == "heads" else t  # chips that divide the heads of a token
    copies = ways if not kv_heads else max(1, ways / kv_heads)
    assert read == exactly(REQUESTS * context * one_token * copies)
    space = room(
        model, IDEAL, shard, Stages.of(model, np.array(1)), FORMATS, structure_of(plan),
        Budget.of(load_hardware("h100-sxm"), IDEAL),
    )  # fmt: skip
    held = float(space.kv_token[0]) * context * REQUESTS / float(space.holders) * t * c
    assert held == exactly(REQUESTS * context * one_token * copies)


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


@pytest.mark.parametrize("cached", ["sequence", "heads"])
@pytest.mark.parametrize("c", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_decodes_over_groups_are_those_of_one_chip_and_send_what_is_counted(kv_heads: int, c: int, cached: str) -> None:
    layer = Layer.of(kv_heads)
    run = Decoded(layer, c, cached)
    alone = np.concatenate([layer.whole(run.tokens[r : r + 1], run.old[r]) for r in range(REQUESTS)])
    np.testing.assert_allclose(run.output, alone, rtol=0, atol=1e-9)
    plan = plan_of(1, c, "ulysses" if cached == "heads" else "ring", cached)
    _, _, transfers = counted(model_of(kv_heads), plan, Pass(float(REQUESTS), 4.0 * c))
    found = {each.name: each for each in transfers if each.axes == "context" and np.any(each.bytes)}
    assert set(found) == set(run.fabric.calls)
    for name, transfer in found.items():
        assert run.sent(name) == exactly(float(sent_bytes("ring", transfer.op, c, transfer.bytes))), name


@pytest.mark.parametrize(("prompts", "c"), [(1, 2), (1, 4), (3, 4), (4, 4), (6, 4)])
@pytest.mark.parametrize("kv_heads", [2, 0])
def test_cached_prompts_of_whole_groups_pass_all_others(kv_heads: int, prompts: int, c: int) -> None:
    """Each group holds whole prompts: a ring's wire into a group carries all that does not start there."""
    model, tokens = model_of(kv_heads), 24.0
    started = [tokens * sum(prompt % c == group for prompt in range(prompts)) for group in range(c)]
    wires = [sum(started) - started[group] for group in range(c)]
    token = 2.0 * (2 * kv_heads * DIM if kv_heads else LATENT.cached)
    for way in ("ring", "gather"):
        sent = []
        for prior in (0.0, prompts * tokens):
            work = Pass(0.0, 1.0, prompts * 32.0, 1e4, prior, float(prompts), float(prompts))
            transfers = [
                each for each in counted(model, plan_of(1, c, way, "batch"), work)[2] if each.axes == "context"
            ]
            moved = (each.times * sent_bytes("ring", each.op, c, each.bytes) for each in transfers)
            sent.append(sum(map(float, moved)))
        assert sent[1] - sent[0] == exactly(max(wires) * token)


def test_cached_prompts_of_whole_groups_go_to_their_heads() -> None:
    """Ulysses: the group that holds a prompt keeps a part of its heads, and sends every other group its part."""
    c, work = 4, prompt()
    _, _, transfers = counted(model_of(8), plan_of(1, c, "ulysses", "batch"), work)
    (out,) = (each for each in transfers if each.name == "cached prompts to their heads")
    assert float(sent_bytes("ring", out.op, c, out.bytes)) == exactly((c - 1) / c * PRIOR * 2 * 8 * DIM * 2.0)


@pytest.mark.parametrize("c", [2, 3, 4, 8])
def test_a_window_wants_what_its_two_halves_look_back_to(c: int) -> None:
    """Of every group in a zig-zag: the parts of others that its two parts reach, the group with most deciding."""
    part = 8
    for window in range(1, 2 * c * part + 9):
        reach, wanted = -(-(window - 1) // part), 0
        for group in range(c):
            own = {group, 2 * c - 1 - group}
            seen = {before for each in own for before in range(max(0, each - reach), each)} - own
            wanted = max(wanted, len(seen))
        model = model_of(2)
        model = model._replace(attention=model.attention._replace(window=window))
        work = Pass(0.0, 1.0, 3 * 2.0 * c * part, 1e4, 0.0, 3.0, 3.0)
        assert float(ring_hops(model, Shard.of(model, c, cp=c), work, windowed=True)) == wanted / 2


def test_published_volumes() -> None:
    """DeepSpeed-Ulysses: 4 N h / P elements over each link; a ring: (P - 1)/P 2 N KV dh that each sends."""
    n, wide, ranks = 131072, 8192, 64
    model = PLAIN._replace(
        layers=1, hidden=wide, attention=Attention(64, 64, 128), ffn=FeedForward(4 * wide, True, "silu")
    )
    work = Pass(0.0, 1.0, float(n), causal_pairs(float(n)), 0.0, 1.0, 1.0)
    _, _, transfers = counted(model, plan_of(1, ranks, "ulysses"), work)
    exchanged = sum(each.bytes for each in transfers if each.axes == "context") / 2
    assert float(exchanged) == 4 * n * wide / ranks == 67108864
    _, _, transfers = counted(model, plan_of(1, ranks, "ring"), work)
    (ring,) = (each for each in transfers if each.axes == "context")
    assert float(ring.bytes * ring.times) / 2 == pytest.approx((ranks - 1) / ranks * 2 * n * 64 * 128, rel=1e-12)


def test_a_ring_hides_behind_blocks_of_at_least_f_over_b() -> None:
    """Ring Attention, table 2: a block of c >= F / B tokens, with one query head to a KV head and no mask.

    An A100's 312 TFLOP/s and 300 GB/s want 1,040; here a causal mask halves the work, so twice as much.
    """
    flops, bandwidth = 312e12, 300e9
    model = PLAIN._replace(
        layers=1, hidden=4096, attention=Attention(32, 32, 128), ffn=FeedForward(11008, True, "silu")
    )
    for block, hides in ((1030, False), (1050, True)):
        ways = 16
        work = Pass(0.0, 1.0, float(ways * block), 2 * (ways * block) ** 2 / 2, 0.0, 1.0, 1.0)
        _, operations, transfers = counted(model, plan_of(1, ways, "ring"), work)
        (scores,) = (each for each in operations if each.kind == "attention_prefill")
        (ring,) = (each for each in transfers if each.axes == "context")
        hop = float(ring.bytes) / bandwidth
        behind = float(scores.flops) / flops
        assert (hop <= behind) == hides
        assert ring.behind == (scores.name,)
        assert ring.beside * float(scores.times) == pytest.approx(float(ring.times))  # one block of work for each hop


@pytest.mark.parametrize("way", WAYS)
def test_only_what_attention_does_not_hide_of_a_ring_is_waited_for(way: str) -> None:
    """On two nodes: long blocks of a ring cost nothing but their sums; short ones wait. The others always do."""
    model, hardware = load_model("llama3.1-8b"), load_hardware("h100-sxm")
    network = {}
    for tokens in (2048.0, 262144.0):
        placement = Placement.of(hardware, 16)
        plan = plan_of(1, 16, way)
        one = np.ones(1, dtype=int)
        replica = Replica(
            model,
            hardware,
            IDEAL,
            Network(placement, IDEAL),
            FORMATS,
            structure_of(plan),
            one * 16,
            one,
            one,
            cp=one * 16,
        )
        work = Pass(0.0, 1.0, tokens, causal_pairs(tokens), 0.0, 1.0, 1.0)
        found = pass_time(replica, work).whole
        network[tokens] = float(found.network[0]) / float(found.total[0])
    if way == "ring":
        assert network[262144.0] < 0.001 < network[2048.0]
    else:
        assert network[262144.0] > 0.003


def test_groups_far_apart_use_the_wires_between_nodes() -> None:
    """A rank's partners are a group's chips away: those of eight-chip groups sit on other nodes, on any number."""
    engine = load_engine("vllm")
    network = Network(Placement.of(load_hardware("h100-sxm"), 32), engine)
    size = np.array([64e6])
    near, far = (network.over("all_gather", Groups.of(np.array([2]), np.array([stride])), size) for stride in (1, 8))
    assert far[0] > 4 * near[0]
    # each node's eight cards carry one team each: as a ring of nodes with one card per member
    whole = network.over("all_gather", Groups.of(np.array([16])), size)
    assert far[0] > whole[0] / 2
    hop = network.hops(size, Team(2, stride=8))
    assert hop[0] > network.hops(size, Team(2, stride=1))[0]
    assert network.least("all_gather", Groups.of(np.array([2]), np.array([8])), size)[0] <= far[0]
    assert network.least("send", Groups.of(np.array([2]), np.array([8])), size)[0] <= hop[0]


def test_a_part_of_a_pass_is_a_part_of_every_prompt_and_whole_requests() -> None:
    work = Pass(10.0, 100.0, 1001.0, 5000.0, 300.0, 2.0, 2.0)
    own = part_of(work, 4.0)
    assert (own.decode_rows, own.prefill_tokens, own.prefill_pairs) == (3.0, 251.0, 1250.0)
    assert (own.prompts, own.prompts_ended, own.context) == (2.0, 1.0, 100.0)


@pytest.mark.parametrize("name", ["llama3-70b", "deepseek-v3", "lwm-7b"])
def test_the_least_block_that_is_told_hides_a_hop_and_no_shorter_one(name: str) -> None:
    """`plan diagnose` says from which block on: with the counts of a plan, at the rates of the data sheet."""
    model, hardware, ways = load_model(name), load_hardware("h100-sxm"), 8
    block = least_block(hardware, 0, _reuse(model))
    for tokens, hides in ((0.99 * block * ways, False), (1.01 * block * ways, True)):
        work = Pass(0.0, 1.0, tokens, tokens**2 / 2, 0.0, 1.0, 1.0)
        _, operations, transfers = counted(model, plan_of(1, ways, "ring"), work)
        (scores,) = (each for each in operations if each.kind in ("attention_prefill", "attention_latent_prefill"))
        (ring,) = (each for each in transfers if each.op == "send")
        behind = float(scores.flops) / hardware.chip.peak("bf16")
        assert (float(ring.bytes) / hardware.network[0].link <= behind) == hides
