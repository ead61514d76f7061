"""Context parallelism, counted and priced: against chips that move arrays (`groups`), and against published figures."""

from __future__ import annotations

import numpy as np
import pytest
from groups import DIM, HEADS, LATENT, NEW, PRIOR, REQUESTS, WIDE, Decoded, Layer, Run
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
from planner.specs.model import Attention, FeedForward, Model

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
