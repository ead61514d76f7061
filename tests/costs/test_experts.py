"""Experts: what tokens choose against simulations, what ranks compute and exchange against arrays that move."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from simulation import Fabric, Move, ring_all_gather, ring_reduce_scatter

from planner.costs.collectives import Network
from planner.costs.experts import (
    Spread,
    copies,
    distinct,
    exchange_bytes,
    expert_operations,
    expert_transfers,
    fullest,
    touched,
    with_expert_width,
)
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer
from planner.costs.roofline import price_operation
from planner.costs.routing import destinations, limited_destinations, missed
from planner.costs.step import Replica
from planner.costs.teams import Groups
from planner.costs.weights import Shard, layer_elements
from planner.plans.placement import Placement
from planner.specs.catalog import load_engine, load_hardware, load_machine, load_model
from planner.specs.dtypes import WEIGHTS
from planner.specs.engine import Engine, Exchange
from planner.specs.model import LayerKind, Model

Array = NDArray[Any]
FP8 = Formats(WEIGHTS["fp8"], WEIGHTS["bf16"], "fp8", "bf16")
BF16 = Formats(WEIGHTS["bf16"], WEIGHTS["bf16"], "bf16", "bf16")
MODEL = load_model("deepseek-v3")
IDEAL = load_engine("ideal")


# --- which experts tokens choose --------------------------------------------------------------------------------------


def choices(random: np.random.Generator, samples: int, tokens: int, top_k: int, experts: int) -> Array:
    """Experts [samples, tokens, top_k], different ones of each token, uniformly."""
    draws = random.random((samples, tokens, experts), dtype=np.float32)
    return np.argpartition(draws, top_k - 1, axis=2)[:, :, :top_k] if top_k < experts else np.argsort(draws, axis=2)


def counts(chosen: Array, experts: int) -> Array:
    """Assignments of every expert [samples, experts]."""
    return np.stack([np.bincount(each.ravel(), minlength=experts) for each in chosen])


SIMULATED = [  # tokens, top_k, experts, ranks, samples
    *[(1, k, e, r, 4000) for k, e, r in ((1, 8, 8), (2, 8, 2), (8, 64, 16), (8, 64, 32), (8, 256, 32))],
    *[(2, k, e, r, 4000) for k, e, r in ((1, 8, 2), (2, 8, 4), (8, 256, 256))],
    *[(t, k, e, r, 2000) for t in (3, 8, 20) for k, e, r in ((2, 8, 8), (4, 32, 4), (6, 160, 16))],
    *[(t, 8, 256, r, 400) for t in (16, 64) for r in (8, 64, 256)],
    *[(512, 8, 256, 32, 60), (512, 8, 128, 128, 100), (2048, 2, 8, 8, 200), (2000, 8, 256, 144, 12)],
]


@pytest.mark.parametrize(("tokens", "top_k", "experts", "ranks", "samples"), SIMULATED)
def test_the_fullest_rank_is_that_of_a_simulation(
    tokens: int, top_k: int, experts: int, ranks: int, samples: int
) -> None:
    if experts % ranks:  # redundant ones fill up
        experts += ranks - experts % ranks
    chosen = counts(choices(np.random.default_rng(7), samples, tokens, top_k, experts), experts)
    by_rank = chosen.reshape(samples, ranks, -1)
    loads = by_rank.sum(axis=2)
    largest = loads.max(axis=1)
    noise = 3 * largest.std() / np.sqrt(samples) / largest.mean()
    expected = fullest(tokens, top_k, experts, ranks)
    assert expected == pytest.approx(largest.mean(), rel=0.03 + noise)
    assert distinct(experts, top_k, tokens) == pytest.approx((chosen > 0).sum(axis=1).mean(), rel=0.02)
    there = (by_rank[np.arange(samples), loads.argmax(axis=1)] > 0).sum(axis=1)
    assert touched(expected, tokens, top_k, experts, ranks) == pytest.approx(there.mean(), rel=0.05 + noise)


@pytest.mark.parametrize(
    ("tokens", "ranks"), [(100, 320), (3000, 320), (100_000, 320), (100_000, 2), (40, 3), (2, 320)]
)
def test_the_fullest_of_many_ranks_is_that_of_a_multinomial(tokens: int, ranks: int) -> None:
    samples = np.random.default_rng(3).multinomial(tokens, np.full(ranks, 1 / ranks), 3000).max(axis=1)
    assert fullest(tokens, 1, ranks, ranks) == pytest.approx(samples.mean(), rel=0.02)


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "tokens"), [(6, 2, 3, 1), (6, 2, 2, 2), (4, 1, 4, 4), (8, 3, 4, 1)]
)
def test_few_tokens_are_exact(experts: int, top_k: int, ranks: int, tokens: int) -> None:
    """Against every possible outcome: exact for one token and for one expert a token, nearly so else."""
    held = experts // ranks
    sets = list(combinations(range(experts), top_k))
    outcomes = list(product(sets, repeat=tokens))
    loads = [max(np.bincount([each // held for one in all_of for each in one])) for all_of in outcomes]
    exact = tokens == 1 or top_k == 1
    assert fullest(tokens, top_k, experts, ranks) == pytest.approx(np.mean(loads), rel=1e-9 if exact else 0.02)
    alive = [len({each for one in all_of for each in one}) for all_of in outcomes]
    assert distinct(experts, top_k, tokens) == pytest.approx(np.mean(alive))
    if tokens == 1:
        assert destinations(experts, top_k, ranks) == pytest.approx(
            np.mean([len({e // held for e in s}) for s in sets])
        )
        assert missed(experts, held, top_k) == pytest.approx(np.mean([min(s) >= held for s in sets]))


def test_load_is_far_above_the_mean_in_decode_and_near_it_in_prefill() -> None:
    tokens = np.array([1.0, 8, 64, 512, 4096, 32768, 262144])
    ratio = fullest(tokens, 8, 256, 64) / (tokens * 8 / 64)
    assert np.all(np.diff(ratio) < 0)
    assert ratio[0] > 8
    assert ratio[3] == pytest.approx(1.3, abs=0.1)
    assert 1 < ratio[-1] < 1.02


def test_more_tokens_never_make_anything_smaller() -> None:
    tokens = np.unique(np.concatenate([np.arange(0, 400), np.geomspace(400, 1e5, 200)]))
    for top_k, experts, ranks in ((1, 8, 8), (2, 8, 2), (8, 256, 32), (8, 256, 256), (10, 512, 8), (6, 160, 40)):
        load = fullest(tokens, top_k, experts, ranks)
        assert np.all(np.diff(load) > -0.004 * load[1:])  # where one formula takes over from another
        assert np.all(load >= tokens * top_k / ranks - 1e-9)
        assert np.all(load <= tokens * top_k)
        there = touched(load, tokens, top_k, experts, ranks)
        assert np.all(np.diff(there) > -0.01)
        assert there[-1] == pytest.approx(experts / ranks)
        assert np.all(there <= load + 1e-9)
        assert np.all(np.diff(distinct(experts, top_k, tokens)) >= 0)


def test_more_ranks_have_less_each_but_lie_further_from_the_mean() -> None:
    ranks = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
    for tokens in (1, 16, 300, 5000):
        load = fullest(tokens, 8, 256, ranks)
        assert np.all(np.diff(load) <= 1e-9)
        assert np.all(np.diff(load * ranks / (tokens * 8)) >= -1e-9)
        assert load[0] == tokens * 8


def test_numbers_and_arrays_take_the_same_path() -> None:
    tokens, ranks = np.array([[1.0], [30.0], [5000.0]]), np.array([2, 8, 64])
    together = fullest(tokens, 8, 256, ranks)
    assert together.shape == (3, 3)
    for i, j in product(range(3), range(3)):
        assert together[i, j] == fullest(tokens[i, 0], 8, 256, int(ranks[j]))
    assert fullest(0, 8, 256, 8) == 0
    assert fullest(2.5, 8, 256, 8) == pytest.approx((fullest(2, 8, 256, 8) + fullest(3, 8, 256, 8)) / 2, rel=0.03)


def test_skewed_popularity_and_redundant_experts() -> None:
    even, skewed = fullest(4096, 8, 256, 32), fullest(4096, 8, 256, 32, imbalance=1.5)
    assert skewed - even == pytest.approx(0.5 * 4096 * 8 / 32)
    assert fullest(1, 8, 256, 256, imbalance=3.0) == pytest.approx(1.0, abs=0.1)  # an expert gets a token once
    # DeepSeek-V3's units: 256 experts and 32 copies on 144 ranks, two each; ranks and experts as many as possible
    assert fullest(10_000, 8, 256, 144, redundant=32) == pytest.approx(10_000 * 8 / 144, rel=0.13)
    spread = Spread(ep=144.0, redundant=32)
    assert spread.held(MODEL.experts) == 2  # type: ignore[arg-type]
    assert Spread(ep=32.0, redundant=32).held(MODEL.experts) == 9  # type: ignore[arg-type]


def test_a_token_goes_to_few_nodes_where_its_groups_are_limited() -> None:
    random = np.random.default_rng(5)
    groups = np.argsort(random.random((5000, 8)), axis=1)[:, :4]
    scores = random.random((5000, 8, 32))
    mask = np.zeros((5000, 8, 1))
    np.put_along_axis(mask, groups[:, :, None], 1.0, axis=1)
    chosen = np.argsort(-(scores * mask).reshape(5000, 256), axis=1)[:, :8]
    for nodes in (1, 2, 4, 8, 16, 32):
        seen = np.mean([len(set(row)) for row in (chosen // (256 // nodes)).tolist()])
        assert limited_destinations(256, 8, nodes, 8, 4) == pytest.approx(seen, rel=0.01), nodes
    assert limited_destinations(256, 8, 8, 8, 8) == destinations(256, 8, 8)
    assert limited_destinations(256, 8, 8, 8, 4) < destinations(256, 8, 8)


# --- what a rank computes ---------------------------------------------------------------------------------------------


def by_name(operations: list[Operation]) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}


def total(operations: list[Operation], name: str) -> float:
    return float(sum(getattr(operation, name) * operation.times for operation in operations))


@pytest.mark.parametrize("name", ["deepseek-v3", "mixtral-8x7b", "qwen3-235b-a22b", "gpt-oss-120b", "llama4-scout"])
def test_one_rank_reads_every_expert_and_computes_what_a_token_meets(name: str) -> None:
    model = load_model(name)
    experts, ffn, d = model.experts, model.ffn, model.hidden
    assert experts is not None
    shard = with_expert_width(Shard.of(model, 1.0), model, 1.0)
    tokens = 1e5
    operations = expert_operations(model, shard, Pass(tokens, 100.0), BF16, Spread())
    products = [each for each in operations if each.kind in ("gemm", "grouped_gemm")]
    elements = layer_elements(model, shard, LayerKind("full", True))
    attention = layer_elements(model, shard, LayerKind("full", False))
    own = elements.experts + elements.plain - attention.plain
    own += ffn.hidden * (ffn.inputs + 1) * ffn.bias + d * ffn.bias  # of the dense FFN
    assert total(products, "weight_bytes") == pytest.approx(2 * own, rel=0.001)
    met = (experts.top_k * experts.hidden + experts.shared_hidden) * (ffn.inputs + 1) * d
    met += d * experts.routed + d * experts.shared_gate
    assert total(products, "flops") == pytest.approx(2 * tokens * met)
    assert {each.kind for each in operations} == {"gemm", "grouped_gemm", "elementwise"}


def test_few_tokens_read_few_experts() -> None:
    shard = with_expert_width(Shard.of(MODEL, 1.0), MODEL, 1.0)
    one, many = (by_name(expert_operations(MODEL, shard, Pass(rows, 1.0), FP8, Spread())) for rows in (1.0, 1e4))
    assert one["expert down"].weight_bytes == pytest.approx(8 * 2048 * 7168)
    assert many["expert down"].weight_bytes == pytest.approx(256 * 2048 * 7168)
    assert one["router"].dtype == "bf16"
    assert one["expert gate_up"].dtype == "fp8"


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 8), (2, 4), (8, 1)])
@pytest.mark.parametrize("attention_dp", [1, 2, 8])
def test_ranks_together_do_the_work_once(ep: int, expert_tp: int, attention_dp: int) -> None:
    """At so many tokens that ranks are alike, up to the fullest's lead; routers on every rank of an attention group."""
    spread = Spread(ep, expert_tp, attention_dp)
    whole = with_expert_width(Shard.of(MODEL, 1.0), MODEL, 1.0)
    part = with_expert_width(Shard.of(MODEL, 8.0), MODEL, expert_tp)
    tokens = 1e6
    alone = by_name(expert_operations(MODEL, whole, Pass(tokens, 1.0), FP8, Spread()))
    rank = by_name(expert_operations(MODEL, part, Pass(tokens / attention_dp, 1.0), FP8, spread))
    for name in ("expert gate_up", "expert down", "shared gate_up", "shared down"):
        assert 8 * rank[name].flops == pytest.approx(alone[name].flops, rel=0.01), name
    for name in ("expert gate_up", "expert down"):
        assert 8 * rank[name].weight_bytes == pytest.approx(alone[name].weight_bytes), name
    assert rank["shared down"].weight_bytes == alone["shared down"].weight_bytes / (8 / attention_dp)
    assert rank["router"].flops == alone["router"].flops / attention_dp
    assert rank["router"].weight_bytes == alone["router"].weight_bytes


def test_spreading_experts_saves_weights_in_decode_and_dividing_them_evens_the_load() -> None:
    work = Pass(64.0, 1000.0)
    by_expert, by_width = Spread(8.0, 1.0), Spread(1.0, 8.0)

    def down(each: Spread) -> Operation:
        shard = with_expert_width(Shard.of(MODEL, 8.0), MODEL, each.expert_tp)
        return by_name(expert_operations(MODEL, shard, work, FP8, each))["expert down"]

    spread, divided = down(by_expert), down(by_width)
    assert spread.flops > 1.1 * divided.flops
    assert spread.weight_bytes == pytest.approx(divided.weight_bytes, rel=0.05)
    assert (
        price_operation(load_hardware("h100-sxm"), spread).total
        < price_operation(load_hardware("h100-sxm"), divided._replace(kind="gemm", times=26)).total
    )  # a kernel for all experts, not one each


def test_a_rank_that_keeps_rows_of_all_pairs_writes_and_reads_what_a_naive_one_does() -> None:
    """A rank of experts as vLLM's kernels have it: caches of every pair, zeros for other ranks' experts, then a sum."""
    random, ranks, tokens, experts, top_k, d, width = np.random.default_rng(3), 4, 512, 16, 2, 8, 6
    chosen = choices(random, 1, tokens, top_k, experts)[0]
    mine = chosen < experts // ranks
    written = {"gate_up": 0, "activation": 0, "down": 0}
    first = np.full((tokens * top_k, 2 * width), np.nan)
    for row, held in enumerate(mine.ravel()):
        first[row] = random.random(2 * width) if held else 0.0
        written["gate_up"] += 2 * width
    second = first[:, :width] * first[:, width:]
    written["activation"] = first.size + second.size
    third = np.where(mine.reshape(-1, 1), second @ random.random((width, d)), 0.0)
    written["down"] = third.size
    summed = third.reshape(tokens, top_k, d).sum(axis=1)
    assert np.isfinite(summed).all()
    model = MODEL._replace(
        hidden=d,
        experts=MODEL.experts._replace(routed=experts, top_k=top_k, hidden=width, shared_hidden=0),  # type: ignore[union-attr]
    )
    shard = with_expert_width(Shard.of(model, 1.0), model, 1.0)
    spread = Spread(float(ranks), padded=True)
    found = by_name(expert_operations(model, shard, Pass(float(tokens), 1.0), BF16, spread))
    own = float(np.asarray(spread.assignments(model.experts, Pass(float(tokens), 1.0))))  # type: ignore[arg-type]
    assert own == pytest.approx(mine.sum(), rel=0.2)  # the fullest of four
    assert found["expert activation"].activation_bytes == 2 * written["activation"]
    assert found["weighted sum"].activation_bytes == 2 * (third.size + summed.size)
    assert found["expert gate_up"].activation_bytes == pytest.approx(2 * (own * d + written["gate_up"]))
    assert found["expert down"].activation_bytes == pytest.approx(2 * (own * width + written["down"]))


@pytest.mark.parametrize("tokens", [1.0, 64.0, 8192.0])
def test_padded_rows_cost_only_where_experts_are_whole_on_different_ranks(tokens: float) -> None:
    work, names = Pass(tokens, 1.0), ("expert gate_up", "expert activation", "expert down", "weighted sum")

    def traffic(ep: float, padded: bool) -> list[float]:
        shard = with_expert_width(Shard.of(MODEL, 8.0), MODEL, 8.0 / ep)
        spread = Spread(ep, 8.0 / ep, padded=padded)
        found = by_name(expert_operations(MODEL, shard, work, FP8, spread))
        return [float(np.asarray(found[name].activation_bytes)) for name in names]

    assert traffic(1.0, True) == traffic(1.0, False)
    whole, own = traffic(8.0, True), traffic(8.0, False)
    assert all(more > less for more, less in zip(whole, own, strict=True))
    summed = [traffic(ep, True)[-1] for ep in (1.0, 2.0, 8.0)]
    assert summed[0] == summed[1] == summed[2]  # of all pairs on every rank, however experts are divided


def test_padding_is_where_an_engine_says_so_and_tokens_are_not_sent() -> None:
    assert load_engine("vllm").expert_rows == "all"
    assert {load_engine(name).expert_rows for name in ("sglang", "sglang-ep", "trtllm", "gpt-fast", "ideal")} == {"own"}
    one = np.array([8])

    def padded(engine: Engine, groups: int) -> bool:
        hardware = load_hardware("h200-sxm")
        replica = Replica(
            MODEL, hardware, engine, Network(Placement.of(hardware, 8), engine), FP8, Structure(), one, one // 8,
            one // 8, attention_dp=np.array([groups]), ep=one,
        )  # fmt: skip
        return bool(np.all(replica.spread.padded))

    sending = load_engine("sglang")._replace(expert_rows="all")
    assert padded(load_engine("vllm"), 1)
    assert padded(load_engine("vllm"), 8)  # gathers
    assert padded(sending, 1)
    assert not padded(sending, 8)


# --- what ranks exchange ----------------------------------------------------------------------------------------------


class Layer:
    """A layer of experts on real data: ranks with tokens of their own, experts as small gated FFNs."""

    def __init__(self, ranks: int, tokens: int, experts: int, top_k: int, d: int = 8, width: int = 6) -> None:
        random = np.random.default_rng(11)
        self.ranks, self.experts, self.top_k = ranks, experts, top_k
        self.inputs = random.normal(size=(ranks, tokens, d))
        self.gate, self.up = random.normal(size=(2, experts, d, width))
        self.down = random.normal(size=(experts, width, d))
        self.chosen = choices(random, ranks, tokens, top_k, experts)
        self.weight = random.random(self.chosen.shape)

    def expert(self, which: int, rows: Array, columns: slice = slice(None)) -> Array:
        """The expert's output, or what some columns of its width add to it."""
        gate = rows @ self.gate[which][:, columns]
        return gate / (1 + np.exp(-gate)) * (rows @ self.up[which][:, columns]) @ self.down[which][columns]

    def undivided(self) -> Array:
        """Outputs [ranks, tokens, d] as one device has them."""
        outputs = np.zeros_like(self.inputs)
        for rank, token, place in np.ndindex(self.chosen.shape):
            row = self.inputs[rank, token]
            outputs[rank, token] += self.weight[rank, token, place] * self.expert(self.chosen[rank, token, place], row)
        return outputs

    def exchanged(self, fabric: Fabric, ep: int, once: bool) -> Array:
        """Outputs by dispatch and combine over ep x (ranks / ep) ranks.

        once: a copy of a token to each rank that holds experts of it, which sums their outputs, instead of one to each
        expert; an expert's width is divided over ranks / ep neighbours, each of which gets the token.
        """
        split, held, width = self.ranks // ep, self.experts // ep, self.gate.shape[2]
        outputs, wanted = np.zeros_like(self.inputs), []
        for rank, token in np.ndindex(self.chosen.shape[:2]):
            by_place: dict[tuple[int, int], list[int]] = {}
            for place, expert in enumerate(self.chosen[rank, token]):
                by_place.setdefault((expert // held, 0 if once else place), []).append(place)
            for (group, _), places in by_place.items():
                for part in range(split):
                    wanted.append((rank, token, group * split + part, part, places))
        fabric.begin("dispatch")
        arrived = fabric.step([Move(rank, to, self.inputs[rank, token]) for rank, token, to, _, _ in wanted])
        back = []
        for row, (rank, token, to, part, places) in zip(arrived, wanted, strict=True):
            columns = slice(part * width // split, (part + 1) * width // split)
            partial = sum(
                self.weight[rank, token, place] * self.expert(self.chosen[rank, token, place], row, columns)
                for place in places
            )
            back.append(Move(to, rank, np.asarray(partial)))
        fabric.begin("combine")
        for output, (rank, token, *_) in zip(fabric.step(back), wanted, strict=True):
            outputs[rank, token] += output
        return outputs


def engine_that(kind: str, **more: Any) -> Engine:
    return IDEAL._replace(exchange=Exchange(kind, **more))  # type: ignore[arg-type]


def model_of(layer: Layer) -> Model:
    base = load_model("mixtral-8x7b")
    assert base.experts is not None
    experts = base.experts._replace(routed=layer.experts, top_k=layer.top_k, hidden=layer.gate.shape[2])
    return base._replace(hidden=layer.inputs.shape[2], experts=experts)


def sent(transfers: list[Transfer], ranks: int) -> dict[str, float]:
    """Bytes that a rank sends to others, by name."""
    return {each.name: float(each.bytes) * (ranks - 1) / ranks for each in transfers if np.any(each.bytes)}


def left(fabric: Fabric, name: str) -> float:
    """Bytes of a collective that went to another rank."""
    moved = [m.elements for m in fabric.messages if fabric.calls[m.call] == name and m.source != m.target]
    return fabric.element_bytes * sum(moved)


@pytest.mark.parametrize(("ranks", "ep"), [(8, 8), (4, 4), (8, 4), (8, 2)])
@pytest.mark.parametrize("once", [True, False])
def test_dispatch_and_combine_reproduce_the_layer_and_send_what_is_counted(ranks: int, ep: int, once: bool) -> None:
    layer, fabric = Layer(ranks, 40, 16, 4), Fabric(2.0)
    assert layer.exchanged(fabric, ep, once) == pytest.approx(layer.undivided(), abs=1e-9)
    work = Pass(40.0, 100.0) if not once else Pass(0.0, 0.0, 40.0, 40.0, prompts=1.0)
    engine = engine_that("all_to_all", low_latency_tokens=64)
    counted = expert_transfers(model_of(layer), engine, work, Spread(ep, ranks // ep, ranks))
    names = ("dispatch", "combine") if once else ("dispatch, low latency", "combine, low latency")
    assert tuple(sent(counted, ranks)) == names
    for name, mine in zip(names, ("dispatch", "combine"), strict=True):
        simulated = left(fabric, mine) / ranks
        assert sent(counted, ranks)[name] == pytest.approx(simulated, rel=0.03), name


def test_gathering_reproduces_the_layer_and_sends_what_is_counted() -> None:
    layer, fabric = Layer(4, 6, 8, 2), Fabric(2.0)
    (everything,) = ring_all_gather(fabric, {rank: layer.inputs[rank].ravel() for rank in range(4)})
    partial = {}
    for rank in range(4):
        rows = everything[rank].reshape(layer.inputs.shape)
        mine = np.zeros_like(rows)
        for where in np.ndindex(layer.chosen.shape):
            if layer.chosen[where] // 2 == rank:
                mine[where[:2]] += layer.weight[where] * layer.expert(layer.chosen[where], rows[where[:2]])
        partial[rank] = mine.ravel()
    (outputs,) = ring_reduce_scatter(fabric, partial)
    assert np.concatenate([outputs[rank] for rank in range(4)]) == pytest.approx(layer.undivided().ravel())
    counted = expert_transfers(model_of(layer), engine_that("gather"), Pass(6.0, 9.0), Spread(4.0, 1.0, 4.0))
    assert {each.op: sent([each], 4)[each.name] for each in counted if np.any(each.bytes)} == pytest.approx(
        {"all_gather": fabric.sent(0, "all_gather"), "reduce_scatter": fabric.sent(0, "reduce_scatter")}
    )


def test_one_attention_group_reduces_and_exchanges_nothing() -> None:
    for spread in (Spread(8.0, 1.0), Spread(1.0, 8.0), Spread(2.0, 4.0)):
        (only,) = expert_transfers(MODEL, IDEAL, Pass(32.0, 100.0), spread)
        assert (only.op, only.bytes) == ("all_reduce", 32 * 7168 * 2)
    beside = MODEL._replace(parallel_block=True)
    assert expert_transfers(beside, IDEAL, Pass(32.0, 100.0), Spread(8.0)) == []


def test_plans_of_all_kinds_are_counted_at_once() -> None:
    spread = Spread(np.array([8.0, 8.0, 1.0]), np.array([1.0, 1.0, 8.0]), np.array([1.0, 8.0, 8.0]))
    found = expert_transfers(MODEL, IDEAL, Pass(np.array([64.0, 8.0, 8.0]), 10.0), spread)
    used = {each.name: np.broadcast_to(each.bytes, (3,)) > 0 for each in found}
    assert used["experts all-reduce"].tolist() == [True, False, False]
    assert used["dispatch, low latency"].tolist() == used["combine, low latency"].tolist() == [False, True, False]
    assert used["tokens to experts"].tolist() == used["expert outputs"].tolist() == [False, False, True]


def test_the_normal_kernel_runs_where_prompts_are_or_too_many_rows() -> None:
    spread = Spread(32.0, 1.0, 32.0)
    few, many, prompt = Pass(128.0, 1.0), Pass(512.0, 1.0), Pass(0.0, 0.0, 128.0, 1.0, prompts=1.0)
    kernels = [{t.kernel for t in expert_transfers(MODEL, IDEAL, work, spread, 4.0) if np.any(t.bytes)}
               for work in (few, many, prompt)]  # fmt: skip
    assert kernels == [{"deepep_low_latency"}, {"deepep"}, {"deepep"}]


def test_copies_to_nodes_are_limited_by_the_models_groups() -> None:
    experts = MODEL.experts
    assert experts is not None
    assert copies(experts, Spread(64.0), 8.0) == limited_destinations(256, 8, 8, 8, 4)
    assert 3.5 < copies(experts, Spread(64.0), 8.0) < 4
    free = experts._replace(top_groups=8)
    assert copies(free, Spread(64.0), 8.0) == destinations(256, 8, 8)
    assert copies(experts, Spread(8.0), 1.0) == destinations(256, 8, 8)
    assert copies(experts, Spread(8.0, 8.0), 8.0) == pytest.approx(limited_destinations(256, 8, 8, 8, 4))


# --- published bounds and measured exchanges --------------------------------------------------------------------------


def test_bounds_of_insights_into_deepseek_v3() -> None:
    """Section 2.3.2: 32 tokens a device, 9 experts, 7000 values, fp8 out and 16 bit back, at 50 and at 900 GB/s."""
    assert MODEL.experts is not None
    model = MODEL._replace(hidden=7000, experts=MODEL.experts._replace(top_k=9))
    engine = engine_that("all_to_all", dispatch="fp8", scale_block=0, low_latency_tokens=128)
    counted = expert_transfers(model, engine, Pass(32.0, 1.0), Spread(288.0, 1.0, 288.0, redundant=32.0), 36.0)
    both = sum(each.bytes for each in counted)
    assert both / 50e9 == pytest.approx(120.96e-6)
    assert 2 * 61 * both / 50e9 == pytest.approx(14.76e-3, rel=1e-3)  # two batches that overlap
    assert 2 * 61 * both / 900e9 == pytest.approx(0.82e-3, rel=1e-2)


def test_a_dispatched_token_has_its_scales() -> None:
    out, back = exchange_bytes(MODEL, Exchange("all_to_all", dispatch="fp8"))
    assert (out, back) == (7168 + 7168 / 128 * 4, 2 * 7168)
    assert exchange_bytes(MODEL, Exchange("gather")) == (2 * 7168, 2 * 7168)


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"), [(8, 40, 72), (16, 118, 195), (64, 173, 314), (256, 194, 360)]
)
def test_low_latency_exchanges_take_what_deepep_measured(ranks: int, dispatch: float, combine: float) -> None:
    """128 tokens; AIConfigurator's table for 8 ranks, DeepEP's own for more."""
    hardware, engine = load_machine("h100-sxm", "ideal")
    network = Network(Placement.of(hardware, ranks), engine)
    found = expert_transfers(MODEL, engine, Pass(128.0, 1.0), Spread(ranks, 1.0, ranks), np.ceil(ranks / 8))
    times = [network.price(each, Groups.of(np.array([ranks]))).item() * 1e6 for each in found if np.any(each.bytes)]
    assert times == pytest.approx([dispatch, combine], rel=0.13)


def test_hardware_without_the_kernel_runs_the_engines_own() -> None:
    hardware, engine = load_machine("b200-sxm", "ideal")
    network = Network(Placement.of(hardware, 8), engine)
    found = expert_transfers(MODEL, engine, Pass(128.0, 1.0), Spread(8.0, 1.0, 8.0))
    (dispatch, _) = [each for each in found if np.any(each.bytes)]
    groups = Groups.of(np.array([8]))
    assert network.price(dispatch, groups) == network.over("all_to_all", groups, dispatch.bytes)


def test_files_that_contradict_themselves_are_told() -> None:
    ((key, problem),) = Exchange("all_to_all", dispatch="fp7").contradictions()
    assert key == "exchange.dispatch"
    assert "'fp7', expected one of" in problem
    assert MODEL.experts is not None
    wrong = MODEL._replace(experts=MODEL.experts._replace(top_groups=9))
    assert ("experts.top_groups", "found 9, expected at most experts.groups = 8") in list(wrong.contradictions())
    assert list(MODEL.contradictions()) == []
    with pytest.raises(AssertionError, match="has no experts"):
        expert_operations(load_model("llama3-8b"), Shard.of(MODEL, 1.0), Pass(1.0, 1.0), BF16, Spread())
