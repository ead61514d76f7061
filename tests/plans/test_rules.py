"""Why a plan cannot run: one sentence each, with what it was held against and a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner import (
    Engine,
    Filters,
    Hardware,
    InputError,
    Model,
    NoPlanError,
    Plan,
    estimate,
    load_engine,
    load_hardware,
    load_model,
)
from planner import plan as ranked
from planner.plans.placement import Placement
from planner.plans.rules import refusal, tp_allowed

LLAMA = load_model("llama3-70b")  # 64 query heads, 8 KV heads, 80 layers
IDEAL, VLLM = load_engine("ideal"), load_engine("vllm")
H100 = load_hardware("h100-sxm")


def refused(
    choice: Plan, model: Model = LLAMA, engine: Engine = IDEAL, gpus: int = 64, hardware: Hardware = H100
) -> str | None:
    return refusal(model, engine, Placement.of(hardware, gpus), choice)


def heads(query: int, kv: int, **changes: Any) -> Model:
    """A model with other heads; its FFN and vocabulary divide by everything small."""
    model = LLAMA._replace(attention=LLAMA.attention._replace(heads=query, kv_heads=kv), vocab=120120)
    return model._replace(ffn=model.ffn._replace(hidden=720720), **changes)


@pytest.mark.parametrize(
    "choice", [Plan(), Plan(8), Plan(64), Plan(8, 8), Plan(1, 64), Plan(8, 2, 4), Plan(16, attention="batch")]
)
def test_plans_that_break_no_rule_are_not_refused(choice: Plan) -> None:
    assert refused(choice) is None


@pytest.mark.parametrize(
    ("model", "tp", "reason"),
    [
        (LLAMA, 3, "tp 3 does not divide the 64 query heads; nearest valid: 2 or 4"),
        (LLAMA, 48, "tp 48 does not divide the 64 query heads; nearest valid: 32 or 64"),
        (LLAMA, 65, "tp 65 does not divide the 64 query heads; nearest valid: 64"),
        (load_model("qwen2.5-7b"), 8, "tp 8 does not divide the 28 query heads; nearest valid: 4"),
        (load_model("llama2-13b"), 16, "tp 16 does not divide the 40 query heads; nearest valid: 8"),
        (heads(40, 10), 4, "tp 4 neither divides the 10 KV heads nor is a multiple of them; nearest valid: 2 or 5"),
        (heads(24, 6), 4, "tp 4 neither divides the 6 KV heads nor is a multiple of them; nearest valid: 3 or 6"),
        (
            LLAMA._replace(ffn=LLAMA.ffn._replace(hidden=28676)),
            8,
            "tp 8 does not divide the FFN's 28676; nearest valid: 4",
        ),
    ],
)
def test_tensor_parallelism_must_divide_heads_and_ffn(model: Model, tp: int, reason: str) -> None:
    assert refused(Plan(tp), model) == reason


@pytest.mark.parametrize(("query", "kv"), [(64, 8), (28, 4), (40, 40), (48, 1), (232, 8), (40, 10), (71, 71)])
def test_degrees_that_are_allowed_divide_or_replicate_evenly(query: int, kv: int) -> None:
    model = heads(query, kv)
    for tp in range(1, query + 2):
        fits = query % tp == 0 and (kv % tp == 0 or tp % kv == 0) and model.ffn.hidden % tp == 0
        assert (tp_allowed(model, IDEAL, tp) is None) == fits


def test_a_vocabulary_is_padded_before_it_must_divide() -> None:
    """vLLM pads to 64 rows: Qwen's 151,936 divide by 64 but not by 5 x 64."""
    model = heads(40, 8, vocab=151936)._replace(attention=LLAMA.attention._replace(heads=40, kv_heads=5))
    assert tp_allowed(model, VLLM, 5) == "does not divide the vocabulary padded to 151936"
    assert tp_allowed(model, IDEAL, 5) is None, "an engine that pads to the ranks takes any"
    # GPT-2's 50,257 rows are padded to 50,304, which divides by 2 though 50,257 does not
    assert tp_allowed(model._replace(vocab=50257), VLLM, 2) != "does not divide the vocabulary padded to 50257"


def test_the_nearest_valid_degrees_are_valid_themselves() -> None:
    for model in (LLAMA, load_model("qwen2.5-7b"), load_model("falcon-180b"), load_model("palm-540b"), heads(40, 10)):
        for tp in range(1, 70):
            reason = refused(Plan(tp), model, VLLM)
            if reason is not None and "nearest valid" in reason:
                near = [int(number) for number in re.findall(r"\d+", reason.split("nearest valid: ")[1])]
                assert near
                assert all(tp_allowed(model, VLLM, other) is None for other in near)
                between = range(min([*near, tp]) + 1, max([*near, tp]))
                assert not [other for other in between if tp_allowed(model, VLLM, other) is None]


def test_a_stage_needs_a_layer() -> None:
    shallow = LLAMA._replace(layers=5)
    assert refused(Plan(1, 6), shallow) == "pp 6 is more than the 5 layers; nearest valid: 5"
    assert refused(Plan(1, 5), shallow) is None
    assert refused(Plan(1, 3), shallow) is None


def test_an_engine_may_insist_on_even_stages() -> None:
    strict = IDEAL._replace(uneven_stages=False)
    assert refused(Plan(1, 3), LLAMA, strict) == "pp 3 does not divide the 80 layers; nearest valid: 2 or 4"
    assert refused(Plan(1, 33), LLAMA, strict) == "pp 33 does not divide the 80 layers; nearest valid: 20 or 40"
    assert refused(Plan(1, 5), LLAMA, strict) is None


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Plan(2, ep=2), "ep 2: llama3-70b has no experts to spread"),
        (Plan(2, cp=2), "cp 2: prefill attention heads leaves prompts whole; expected one of ring, gather, ulysses"),
        (
            Plan(2, cp=2, prefill_attention="ring"),
            "prefill attention ring leaves the cache by tokens: it is decoded as heads2xseq2 or heads2xbatch2, "
            "not heads",
        ),
        (
            Plan(2, cp=2, attention="heads2xseq2", prefill_attention="ulysses"),
            "prefill attention ulysses leaves the cache by heads: it is decoded as heads or heads2xbatch2, "
            "not heads2xseq2",
        ),
        (
            Plan(2, cp=2, attention="seq4", prefill_attention="ring"),
            "cp 2: attention seq4 is none of heads, heads2xseq2 and heads2xbatch2, of 2 groups of 2 chips",
        ),
        (
            Plan(2, cp=3, prefill_attention="ulysses"),
            "prefill attention ulysses over tp x cp = 6 does not divide the 64 query heads",
        ),
        (
            Plan(2, cp=2, ffn="2d", prefill_ffn="2d", grid="2x1", prefill_attention="ulysses"),
            "cp 2: every group has all projections to itself, which goes with FFN layout 1d only",
        ),
        (
            Plan(2, prefill_attention="ring"),
            "prefill attention ring divides a prompt over --cp groups, of which there is one",
        ),
        (Plan(2, cp=2, prefill_attention="ulysses"), None),
        (Plan(2, cp=2, attention="heads2xbatch2", prefill_attention="ulysses"), None),
        (
            Plan(3, cp=2, attention="heads3xseq2", prefill_attention="gather"),
            "tp 3 does not divide the 64 query heads; nearest valid: 2 or 4",
        ),
        (Plan(2, cp=5, attention="heads2xseq5", prefill_attention="gather"), None),  # a ring may have any length
    ],
)
def test_a_cache_is_decoded_where_prompts_leave_it(choice: Plan, reason: str | None) -> None:
    assert refused(choice) == reason


def test_an_engine_without_context_parallelism_says_so() -> None:
    assert refused(Plan(2, cp=2, prefill_attention="ulysses"), engine=VLLM) == (
        "cp 2: engine vllm does not divide a prompt's tokens over chips; cp 1, or --engine ideal"
    )
    some = IDEAL._replace(prompt_context=("gather",))
    assert refused(Plan(2, cp=2, attention="heads2xseq2", prefill_attention="ring"), engine=some) == (
        "engine ideal cannot process prompts by ring; it offers gather"
    )


def test_attention_is_sharded_only_as_the_engine_can() -> None:
    assert refused(Plan(8, attention="batch"), engine=VLLM) == (
        "engine vllm cannot shard attention over batch; it offers heads"
    )
    with pytest.raises(InputError, match="'sequence' is no sharding of attention: expected heads, batch, or a product"):
        refused(Plan(8, attention="sequence"))
    assert refused(Plan(8, attention="batch", prefill_attention="batch")) is None


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("TP8/2d:2x4", None),
        ("TP8/2d:2x4/wg-xyz", None),
        ("TP8/2d:2x2x2/wg-xy", None),
        ("TP8/1d/wg-xyz", None),
        ("TP8/2d:8x1", None),
        (
            "TP8/1d:2x4",
            "grid 2x4: layout 1d keeps slices of the FFN's width alone; leave the grid out, or use layout 2d",
        ),
        (
            "TP8/2d:2x4/1d",
            "FFN layouts 2d and 1d on a grid of 2x4: 1d keeps slices of the FFN's width alone, 2d in X x YZ pieces, "
            "and switching would move all weights; use 2d for 1d",
        ),
        ("TP8/2d", "FFN layout 2d: without a grid there is no X to divide the model's width over; give one, as 2x4"),
        ("TP8/1d/2d", "FFN layout 2d: without a grid there is no X to divide the model's width over; give one, as 2x4"),
        ("TP8/2d:1x8", "FFN layout 2d: grid 1x8 has no X to divide the model's width over; give one, as 2x4"),
        ("TP8/2d:2x4/wg-xy", "FFN layout wg-xy: grid 2x4 has no Z; with X and Y alone it is wg-xyz"),
        ("TP8/2d:2x2", "grid 2x2 has 4 chips, tp is 8"),
        ("TP1/2d", "FFN layout 2d: one chip has nothing to divide; use 1d"),
        ("TP4xPP2/2d:2x2", None),
    ],
)
def test_layouts_and_their_grid_go_together(label: str, reason: str | None) -> None:
    assert refused(Plan.parse(label), gpus=8) == reason


def test_an_engine_runs_only_the_layouts_that_it_names() -> None:
    two = Plan.parse("TP8/2d:2x4")
    assert refused(two, engine=VLLM) == "engine vllm has no FFN layout 2d; it offers 1d"
    some = IDEAL._replace(ffn=("1d", "2d"))
    assert refused(two, engine=some) is None
    assert refused(Plan.parse("TP8/2d:2x4/wg-x"), engine=some) == (
        "engine ideal has no FFN layout wg-x; it offers 1d, 2d"
    )


def test_x_divides_the_models_width() -> None:
    odd = LLAMA._replace(hidden=8194)
    assert refused(Plan.parse("TP8/2d:4x2"), odd) == "X = 4 of grid 4x2 does not divide the model's width of 8194"
    assert refused(Plan.parse("TP8/2d:2x4"), odd) is None


def test_a_grid_lies_within_a_domain_or_on_the_axes_of_a_slice() -> None:
    assert refused(Plan.parse("TP16/2d:4x4"), gpus=16) == (
        "grid 4x4: the 16 chips of a tensor-parallel group leave a domain, where there are no axes; use layout 1d"
    )
    assert refused(Plan.parse("TP16/2d:4x4"), gpus=16, hardware=load_hardware("gb200-nvl72")) is None
    tpu, palm, pope = load_hardware("tpu-v4"), load_model("palm-540b"), load_engine("pope")
    assert refused(Plan.parse("TP64/2d:4x16"), palm, pope, 64, tpu) is None
    assert refused(Plan.parse("TP64/2d:2x32"), palm, pope, 64, tpu) == (
        "grid 2x32: 64 chips, a box of 4x4x4, can be 4x4x4, 4x16, 16x4, 64x1"
    )


def test_heads_are_padded_up_to_half_as_many_again_where_the_engine_pads() -> None:
    palm, pope = load_model("palm-540b"), load_engine("pope")  # 48 heads
    assert tp_allowed(palm, pope, 64) is None
    assert tp_allowed(palm, IDEAL, 64) == "does not divide the 48 query heads"
    assert tp_allowed(palm, pope, 128) == "does not divide the 48 query heads, which would be padded to 128"
    assert tp_allowed(palm, pope, 128, x=8) is None  # over the other 16
    assert tp_allowed(palm, IDEAL, 64, x=4) is None


def test_query_heads_of_a_rank_belong_to_whole_groups_on_a_grid_too() -> None:
    """24 heads of 6 KV heads over 2 x 4: three heads of a rank would need the keys of two."""
    assert refused(Plan.parse("TP8/2d:4x2"), heads(24, 6, hidden=1024)) == (
        "tp 8 neither divides the 6 KV heads nor is a multiple of them; nearest valid: 6 or 12"
    )


def test_a_prefill_over_the_batch_needs_a_decode_over_the_batch() -> None:
    reason = refused(Plan(8, attention="heads", prefill_attention="batch"))
    assert reason is not None
    assert reason.endswith("use batch for both")


@pytest.mark.parametrize(
    ("choice", "gpus", "reason"),
    [
        (Plan(16), 8, "TP16 takes 16 chips, there are 8"),
        (Plan(8, 2, 3), 40, "TP8xPP2xDP3 takes 48 chips, there are 40"),
        (Plan(1, 9), 8, "PP9 takes 9 chips, there are 8"),
    ],
)
def test_a_plan_needs_its_chips(choice: Plan, gpus: int, reason: str) -> None:
    assert refused(choice, gpus=gpus) == reason


def test_groups_that_fit_a_domain_do_not_straddle_two() -> None:
    """A node of eight holds one group of five: sixteen chips have two of them though 16 // 5 is three."""
    model = heads(40, 5)
    assert refused(Plan(5, dp=2), model, gpus=16) is None
    assert refused(Plan(5, dp=3), model, gpus=16) == (
        "dp 3: only 2 replicas fit without a tensor-parallel group straddling two domains"
    )
    # a group wider than a domain has to
    assert refused(Plan(10, dp=1), model, gpus=16) is None
    # and where there is no boundary nothing straddles
    assert refused(Plan(5, dp=3), model, gpus=16, hardware=load_hardware("tpu-v4-lecture")) is None


def test_on_a_torus_a_group_tiles_the_slice() -> None:
    tpu, palm = load_hardware("tpu-v4"), load_model("palm-540b")  # 48 heads on 4x4x4 chips
    assert refused(Plan(16, dp=4), palm, gpus=64, hardware=tpu) is None
    assert refused(Plan(12), palm, gpus=64, hardware=tpu) == "tp 12 does not tile the slice 4x4x4; nearest: 8 or 16"
    assert refused(Plan(16, dp=5), palm, gpus=70, hardware=tpu) == "TP16xDP5 takes 80 chips, the slice 4x4x4 has 64"


def test_the_first_broken_rule_is_named() -> None:
    both = refused(Plan(3, 100, attention="batch"), engine=VLLM)
    assert both is not None
    assert both.startswith("tp 3 does not divide")


def test_rules_reach_the_user_with_their_sentence() -> None:
    with pytest.raises(NoPlanError, match="tp 3 does not divide the 64 query heads; nearest valid: 2 or 4") as stop:
        ranked("llama3-70b", 8, filters=Filters(tp=(3,)))
    assert "llama3-70b on 8 x h100-sxm" in str(stop.value)
    assert stop.value.exit_status == 3
    with pytest.raises(NoPlanError, match="tp 3 does not divide the 64 query heads; nearest valid: 2 or 4"):
        estimate("llama3-70b", tp=3)
    assert ranked("llama3-70b", 8, filters=Filters(tp=(3, 4)))[0]["tp"] == 4
