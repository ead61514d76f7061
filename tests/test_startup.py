"""Whether an engine starts: concrete cases that users of such tools reported, and properties that must hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import InputError, estimate, load_engine, load_hardware, load_model
from planner.costs.memory import Budget
from planner.costs.weights import Shard, Stages, layer_elements, layer_weights, parameters, stage_layers, stage_sizes
from planner.plans.plan import Plan
from planner.specs.measurements import measured_model
from planner.specs.model import Model
from planner.startup import Start
from planner.units import GIB


def start(
    model: str | Model, tp: int = 1, pp: int = 1, hardware: str = "h100-sxm", engine: str = "vllm", **more: Any
) -> Start:
    spec = load_model(model) if isinstance(model, str) else model
    software = load_engine(engine)
    chip = load_hardware(hardware).chip.memory_bytes
    fraction = more.pop("fraction", software.memory.fraction)
    plan = Plan(tp, pp, more.pop("dp", 1))
    return Start.of(spec, software, plan, Budget(fraction * chip, chip), **more)


def kv_of(found: Start) -> float:
    """KV bytes of a token on a chip, of all stages together."""
    return sum(float(each) for each in found.room.kv_token)


# --- cases of users (numbers of the list that they come from) ---------------------------------------------------------


def test_1_kv_is_counted_with_kv_heads() -> None:
    assert kv_of(start("llama3-70b")) == 327_680
    assert 1024 * kv_of(start("llama3-70b")) / GIB == pytest.approx(0.3125, abs=1e-12)


@pytest.mark.parametrize(("model", "gib"), [("llama3.1-8b", 0.125), ("llama3.1-70b", 0.3125), ("llama3.1-405b", 0.492)])
def test_2_kv_of_1024_tokens(model: str, gib: float) -> None:
    assert 1024 * kv_of(start(model)) / GIB == pytest.approx(gib, abs=5e-4)


def test_3_a_quantised_checkpoint_as_vllm_loads_it() -> None:
    """67.7 GiB of weights, 4.84 of activations, 53.2 GiB or 174,336 tokens of KV on an H200 at 0.9."""
    found = start("llama3.3-70b", hardware="h200-sxm", engine="vllm-0.11", weights="fp8", kv_cache="bf16")
    assert float(found.room.weights[0]) / GIB == pytest.approx(67.7, abs=0.05)
    assert float(found.room.other[0] - found.room.runtime) / GIB == pytest.approx(4.84, abs=0.1)
    assert found.free[0] / GIB == pytest.approx(53.2, rel=0.01)
    assert found.capacity_tokens == pytest.approx(174_336, rel=0.01)


def test_4_activations_decide_whether_it_starts() -> None:
    """A context of 16,000 beside fp8 weights of a 70B on one 80 GB chip: weights and KV alone would fit."""
    found = start("llama3.3-70b", engine="vllm-0.11", weights="fp8", kv_cache="bf16", context=16_000, fraction=0.95)
    assert float(found.room.weights[0]) + found.request_bytes[0] < found.budget.limit
    assert "a request of 16000 tokens needs 4.88 GiB of KV" in str(found.refusal())


def test_5_a_gated_ffn_has_three_matrices() -> None:
    assert parameters(measured_model("qwen1.5-72b")) / 1e9 == pytest.approx(72.3, abs=0.05)


def test_6_windowed_layers_as_allocated_and_at_least() -> None:
    assert kv_of(start("gpt-oss-120b")) == 36 * 2048
    small = start("gpt-oss-20b", context=8192)
    assert 32 * small.least_request_bytes / GIB == pytest.approx(6.09, abs=0.005)
    assert 32 * small.request_bytes[0] / GIB == pytest.approx(12.0, abs=0.02)


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_7_latent_attention_caches_576_elements_on_every_rank(tp: int) -> None:
    assert kv_of(start("deepseek-v3", tp)) == 576 * 61 * 2


def test_8_kv_heads_are_replicated_beyond_their_number() -> None:
    four, eight = start("qwen3-30b-a3b", 4), start("qwen3-30b-a3b", 8)
    assert kv_of(four) == kv_of(eight) == 2 * 48 * 128 * 2
    assert start("llama3-70b", 16).refusal() is None
    assert kv_of(start("llama3-70b", 16)) == kv_of(start("llama3-70b", 8))


def test_9_a_pool_over_tp_holds_tp_times_the_tokens() -> None:
    """Qwen3-32B at TP4: 834 thousand tokens, not 208."""
    assert start("qwen3-32b", 4).capacity_tokens == pytest.approx(834_000, rel=0.02)


def test_10_replicas_do_not_divide_a_request() -> None:
    assert start("llama3-70b", 4, dp=2).request_bytes == start("llama3-70b", 4).request_bytes


def test_11_every_stage_keeps_its_layers_of_all_requests() -> None:
    """Halving the layers of a chip twice gives it four times the tokens, not the model four times the requests."""
    one, four = start("llama3.1-8b", context=8192), start("llama3.1-8b", pp=4, context=8192)
    assert max(four.request_bytes) == one.request_bytes[0] / 4
    assert four.concurrency == pytest.approx(4 * one.concurrency * max(four.free) / one.free[0], rel=0.05)


def test_12_blocks_are_told() -> None:
    found = start("llama3.1-8b")
    assert found.blocks == found.capacity_tokens // 16 == int(found.free[0] // (131_072 * 16))


def test_13_norms_are_not_sharded() -> None:
    model = load_model("llama3-70b")
    assert layer_weights(model, Shard.of(model, 8)).norms == 2 * 8192


@pytest.mark.parametrize(
    ("model", "tp", "sentence"),
    [
        ("qwen3-14b", 5, "neither divides the 8 KV heads"),
        ("phi-4", 4, "neither divides the 10 KV heads"),
        ("phi-4", 3, "does not divide the 40 query heads"),
        ("falcon-7b", 2, "does not divide the 71 query heads; nearest valid: 1"),
        ("deepseek-v3", 3, "does not divide the 128 query heads; nearest valid: 2 or 4"),
    ],
)
def test_14_a_split_that_the_engine_refuses(model: str, tp: int, sentence: str) -> None:
    assert sentence in str(start(model, tp).refusal())


def test_15_what_does_not_fit_is_not_priced() -> None:
    assert "exceed the 71.28 GiB per chip" in str(start("llama3.1-405b").refusal())
    whole = start("llama3.1-70b", weights="fp8", context=131_072)
    assert "a request of 131072 tokens needs 40.00 GiB of KV" in str(whole.refusal())
    assert start("llama3.1-70b", 4, weights="fp8", context=131_072).refusal() is None


def test_17_the_cache_has_a_dtype_of_its_own() -> None:
    bf16, fp8 = start("llama3.1-8b", kv_cache="bf16"), start("llama3.1-8b", kv_cache="fp8")
    assert fp8.room.weights == bf16.room.weights
    assert fp8.blocks in (2 * bf16.blocks, 2 * bf16.blocks + 1)


# --- layers of several kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "pattern", "padded"),
    [
        ("gemma-2-9b", None, 42),  # 21 + 21: two groups
        ("gemma-3-27b", None, 70),  # 10 + 52: seven groups of ten, eight layers of padding
        ("gpt-oss-20b", None, 24),
        ("gemma-3-27b", ("full", "window"), 62),  # 31 + 31
    ],
)
def test_layers_are_grouped_as_vllm_groups_them(model: str, pattern: tuple[Any, ...] | None, padded: int) -> None:
    spec = load_model(model)
    if pattern:
        spec = spec._replace(attention_pattern=pattern)
    assert kv_of(start(spec)) / (spec.cached_elements * 2) == padded


def test_nearly_equal_kinds_make_groups_of_the_larger() -> None:
    """Nine of one kind and ten of the other (less than 5/4): two groups of ten."""
    spec = load_model("gemma-2-9b")._replace(layers=19, attention_pattern=("window", "full"))
    assert kv_of(start(spec)) / (spec.cached_elements * 2) == 20


def test_a_group_of_windows_keeps_an_iteration_and_a_block_beside_the_window() -> None:
    found = start("gpt-oss-20b", 2, context=131_072)
    layer = 2 * 4 * 64 * 2
    kept = -(-(128 - 1 + 8192) // 16) * 16 + 16
    assert found.request_bytes[0] == 12 * layer * (131_072 + kept)


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-3-27b", "llama4-maverick", "minimax-text-01", "llama3-70b"])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 7, 8])
def test_stages_hold_the_layers_that_are_dealt_to_them(name: str, pp: int) -> None:
    """All depths at once or one alone; the middle is the one with most elements."""
    model = load_model(name)
    sizes = stage_sizes(model.layers, pp)
    assert sum(sizes) == model.layers
    ends = np.cumsum([0, *sizes])
    dealt = [model.layer_kinds()[ends[i] : ends[i + 1]] for i in range(pp)]
    whole = Shard.of(model, 1)
    weigh = [sum(float(layer_elements(model, whole, kind).total) for kind in stage) for stage in dealt]
    together = stage_layers(model, Stages.of(model, np.array([5, pp, 1])))
    alone = stage_layers(model, Stages.of(model, pp))
    for (kind, many), (_, one) in zip(together, alone, strict=True):
        assert [float(np.broadcast_to(each, 3)[1]) for each in many] == [float(each) for each in one]
        assert float(one[0]) == dealt[0].count(kind)
        assert float(one[2]) == (dealt[-1].count(kind) if pp > 1 else 0)
    if pp > 2:
        middle = sum(float(counts[1]) * float(layer_elements(model, whole, kind).total) for kind, counts in alone)
        assert middle == pytest.approx(max(weigh[1:-1]), rel=1e-12)


def test_experts_of_a_shard_are_padded_by_the_engine_for_that_dtype_alone() -> None:
    """2,880 to 3,072: a 120B of 60.6 GiB takes the 64.4 GiB that vLLM logs."""
    assert float(start("gpt-oss-120b").room.weights[0]) / GIB == pytest.approx(64.38, rel=0.005)
    assert float(start("gpt-oss-120b", engine="sglang").room.weights[0]) / GIB == pytest.approx(60.6, rel=0.005)


def test_tables_of_ten_million_positions() -> None:
    found = start("llama4-scout", 4)
    assert float(found.room.tables[0]) / GIB == pytest.approx(2.5, abs=0.01)
    assert float(start("llama4-scout", 4, engine="ideal").room.tables[0]) == 0


def test_latent_projections_are_kept_twice() -> None:
    model = load_model("deepseek-v3")
    tables = 2 * model.max_context * 64
    copies = 61 * 512 * (128 / 8) * (128 + 128) * 2
    assert float(start("deepseek-v3", 8).room.tables[0]) == tables + copies


def test_a_state_does_not_grow_with_the_context() -> None:
    near, far = start("minimax-text-01", 8, context=1024), start("minimax-text-01", 8, context=2048)
    model = near.model
    assert model.linear is not None
    full = sum(kind.attention == "full" for kind in model.layer_kinds())
    assert far.request_bytes[0] - near.request_bytes[0] == 1024 * full * 2 * 128 * 2
    states = (model.layers - full) * model.linear.state_elements * 4 / 8
    assert near.request_bytes[0] == pytest.approx(1024 * full * 2 * 128 * 2 + states, rel=1e-12)


@pytest.mark.parametrize("pp", [1, 2])
def test_prediction_layers_stand_on_the_last_stage(pp: int) -> None:
    """DeepSeek-V3's module: 11.5 B parameters of a layer, a projection on every rank, and KV of one layer more."""
    plain, drafting = start("deepseek-v3", 8, pp), start("deepseek-v3", 8, pp, draft=True)
    last = 2 if pp > 1 else 0
    more = float(drafting.room.weights[last] - plain.room.weights[last]) / GIB
    assert more == pytest.approx((11.5e9 / 8 + 2 * 7168**2 * 2) / GIB, rel=0.02)
    assert float(drafting.room.kv_token[last] - plain.room.kv_token[last]) == 576 * 2
    if pp > 1:
        assert drafting.room.weights[0] == plain.room.weights[0]
    with pytest.raises(InputError, match="llama3-8b has no prediction layers"):
        start("llama3-8b", draft=True)


# --- quantised groups and experts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tp", "weights", "width"),
    [
        ("qwen2.5-72b", 2, "int4", "14784 of the FFN's 29568"),
        ("qwen2.5-72b", 4, "int4", "7392 of the FFN's 29568"),
        ("llama2-7b", 4, "int4", "2752 of the FFN's 11008"),
        ("deepseek-v2-lite", 1, "int4", "10944 of the FFN's 10944"),
        ("qwen3-235b-a22b", 8, "int4", "192 of the expert's 1536"),
    ],
)
def test_groups_must_divide_a_ranks_share(model: str, tp: int, weights: str, width: str) -> None:
    assert f"leaves a rank {width}, no multiple of int4's 128" in str(start(model, tp, weights=weights).refusal())
    whole = start(model, tp, hardware="b200-sxm", weights="bf16", context=64).refusal()
    assert whole is None or "multiple" not in whole


def test_blocks_that_share_a_scale_are_not_cut() -> None:
    """A block scale per 128 x 128: MiniMax's experts of 1,536 do not divide by 8; DeepSeek's of 2,048 do, by 16 too."""
    assert "leaves a rank 192 of the expert's 1536, no multiple of fp8's 128" in str(start("minimax-m2.5", 8).refusal())
    assert start("deepseek-v3", 16, context=4096).refusal() is None
    assert "576 of the FFN's 18432" in str(start("deepseek-v3", 32).refusal())
    assert start("deepseek-v3", 32, weights="bf16", context=4096).refusal() is None


def test_data_parallel_attention_spares_the_copies_of_a_latent_cache() -> None:
    """A request's cache stands on one rank instead of eight: eight times the tokens for as much memory a chip."""
    heads = start("deepseek-v3", 8, hardware="h200-sxm")
    dp = start("deepseek-v3", 8, hardware="h200-sxm", attention_dp=8)
    assert dp.refusal() is None
    assert kv_of(dp) == kv_of(heads)
    assert dp.capacity_tokens / dp.free[0] == pytest.approx(8 * heads.capacity_tokens / heads.free[0], rel=1e-3)
    model = load_model("deepseek-v3")
    one, eight = (Shard.of(model, 8, attention_dp=degree) for degree in (1, 8))
    kind = model.layer_kinds()[-1]
    whole = layer_elements(model, Shard.of(model, 1), kind)
    assert layer_elements(model, eight, kind).attention == whole.attention
    assert layer_elements(model, eight, kind).experts == layer_elements(model, one, kind).experts == whole.experts / 8


def test_data_parallel_attention_shares_out_kv_heads() -> None:
    """Llama-70B at TP8 in two groups: two KV heads on a chip, half of the requests each, as many tokens together."""
    two = start("llama3-70b", 8, attention_dp=2)
    assert kv_of(two) == 2 * kv_of(start("llama3-70b", 8))
    # embedding and head are a group's own, and so twice as large on a chip
    assert two.capacity_tokens == pytest.approx(start("llama3-70b", 8).capacity_tokens, rel=0.08)
    assert start("llama3-70b", 16, attention_dp=2).capacity_tokens > 1.8 * start("llama3-70b", 16).capacity_tokens


@pytest.mark.parametrize(
    ("rule", "degree", "sentence"),
    [
        ("divides", 3, "attention-dp 3 does not divide tp 8; nearest valid: 2 or 4"),
        ("equal", 4, "attention-dp 4 is not tp 8, as engine vllm wants; nearest valid: 8"),
        (None, 2, "engine vllm has no data-parallel attention"),
    ],
)
def test_data_parallel_attention_follows_the_engines_rule(rule: Any, degree: int, sentence: str) -> None:
    engine = load_engine("vllm")._replace(attention_dp=rule)
    found = Start.of(load_model("llama3-8b"), engine, Plan(8), Budget(7e10, 8e10), attention_dp=degree)
    assert sentence in str(found.refusal())


def test_experts_divide_over_expert_parallel_ranks() -> None:
    model, engine = load_model("deepseek-v3"), load_engine("vllm")
    found = Start.of(model, engine, Plan(8, ep=3), Budget(1e12, 1e12))
    assert "engine vllm spreads experts over all 8 ranks of a group; ep 8 or 1" in str(found.refusal())
    other = Start.of(model, load_engine("sglang"), Plan(8, ep=3), Budget(1e12, 1e12))
    assert "ep 3 does not divide the 8 ranks of a stage; nearest valid: 2 or 4" in str(other.refusal())
    assert Start.of(model, engine, Plan(8, ep=8), Budget(9e11, 1e12)).refusal() is None
    dense = Start.of(load_model("llama3-8b"), engine, Plan(8, ep=2), Budget(1e12, 1e12))
    assert "no experts" in str(dense.refusal())


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3-70b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3"])
def test_the_longest_context_fits_and_a_block_more_does_not(name: str) -> None:
    for fraction in (0.5, 0.62, 0.7, 0.95):
        found = start(name, 8, hardware="h200-sxm", fraction=fraction)
        longest = found.longest()
        if longest:
            assert float(found._replace(context=longest).concurrency) >= 1
        if longest < found.model.max_context:
            assert float(found._replace(context=longest + 16).concurrency) < 1


def test_the_budget_leaves_room_for_what_stands_outside_it() -> None:
    assert "leaves no room for the 3.03 GiB" in str(start("llama3-70b", 4, fraction=0.98).refusal())


def test_a_context_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(InputError, match="--context 9000: llama3-8b has 1 to 8192 tokens"):
        start("llama3-8b", context=9000)


def test_chips_there_are_not() -> None:
    assert start("llama3-8b", 2, dp=2).refusal(gpus=2) == "TP2xDP2 takes 4 chips, there are 2"


@pytest.mark.parametrize(
    ("model", "hardware", "label"),
    [
        ("llama3.1-70b", "h100-sxm", "TP16/heads8xseq2"),
        ("llama3.1-70b", "h100-sxm", "TP8/heads4xbatch2"),
        ("llama3.1-8b", "h100-sxm", "TP2xPP2xCP4/heads2xseq4/gather"),
        ("llama3.1-8b", "h100-sxm", "CP8/batch8"),
        ("deepseek-v3", "h200-sxm", "TP8xEP8/batch8"),
        ("gpt-oss-120b", "h100-sxm", "TP2xEP8xCP4/heads2xbatch4"),
        ("mixtral-8x7b", "h100-sxm", "TP4xEP8xCP2"),
    ],
)
def test_a_plan_starts_with_the_memory_that_it_is_ranked_with(model: str, hardware: str, label: str) -> None:
    """However attention and prompts are divided: one count of weights, room and requests."""
    machine, engine = load_hardware(hardware), load_engine("ideal")
    begun = Start.of(load_model(model), engine, Plan.parse(label), Budget.of(machine, engine, None, None), context=7000)
    ranked = estimate(
        model, plan=label, hardware=hardware, engine="ideal", isl=6000, osl=1000, concurrency=8, max_context=7000
    )
    assert begun.refusal() is None
    assert float(begun.room.weights[begun.fullest]) / GIB == pytest.approx(ranked["weights_gib"])
    assert begun.capacity_tokens == ranked["kv_capacity_tokens"]
    assert begun.requests == ranked["max_concurrency"]


def test_groups_are_said_once() -> None:
    with pytest.raises(InputError, match="--attention-dp 2: TP8/heads4xbatch2 says how attention is divided"):
        Start.of(load_model("llama3-8b"), load_engine("ideal"), Plan.parse("TP8/heads4xbatch2"), Budget(7e10, 8e10),
                 attention_dp=2)  # fmt: skip
