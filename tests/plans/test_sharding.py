"""Attention as a product of heads, batch and sequence: its words, the rules, and which products are looked at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Engine, Filters, InputError, Plan, estimate, load_engine, load_hardware, load_model
from planner import plan as ranked
from planner.plans.placement import Placement
from planner.plans.rules import refusal, tp_allowed
from planner.plans.sharding import KNOWN, WORDS, Sharding, implied_prefill, is_sharding, sharding_of
from planner.plans.space import enumerate_plans

IDEAL, VLLM, SGLANG = load_engine("ideal"), load_engine("vllm"), load_engine("sglang")
DEEPSEEK, QWEN, LLAMA, LWM = (load_model(name) for name in ("deepseek-v3", "qwen3-235b-a22b", "llama3-70b", "lwm-7b"))
some = settings(derandomize=True, deadline=None, max_examples=60)
sizes = st.integers(1, 64)
products = st.builds(Sharding, sizes, sizes, sizes)


@some
@given(products)
def test_a_product_is_read_back_as_it_is_printed(parts: Sharding) -> None:
    assert sharding_of(parts.word, parts.chips) == parts
    assert is_sharding(parts.word)
    assert parts.word in KNOWN
    # prompts keep the projections: as many groups, and all other ranks share the heads
    assert parts.prefill.chips == parts.chips
    assert (parts.prefill.batch, parts.prefill.sequence) == (parts.batch, 1)
    assert implied_prefill(parts.word) == (parts.prefill.word if parts.batch > 1 else "heads")


@some
@given(products, st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 8]))
def test_labels_with_products_are_read_back(parts: Sharding, pp: int, dp: int, ep: int) -> None:
    choice = Plan(parts.chips, pp, dp, ep, attention=parts.word, prefill_attention=implied_prefill(parts.word))
    assert choice.label.count("/") == 1  # prefill is implied, and so not said
    assert Plan.parse(choice.label) == choice
    assert choice.sharding == parts


@pytest.mark.parametrize("word", ["heads0", "heads04", "head4", "heads4x", "xheads4", "batch4xrows2", "heads-2", "seq"])
def test_what_is_no_product_is_refused(word: str) -> None:
    assert not is_sharding(word)
    with pytest.raises(InputError, match="is no sharding of attention: expected heads, batch, or a product"):
        sharding_of(word, 8)


def test_a_dimension_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'heads2xheads4' is no sharding"):
        Plan.parse("TP8/heads2xheads4")


def refused(label: str, engine: Engine = IDEAL, model: str = "deepseek-v3", gpus: int = 64) -> str | None:
    return refusal(load_model(model), engine, Placement.of(load_hardware("h100-sxm"), gpus), Plan.parse(label))


@pytest.mark.parametrize(
    ("label", "engine", "model", "reason"),
    [
        ("TP8/heads4xbatch4", IDEAL, "deepseek-v3", "attention heads4xbatch4 is for 16 chips, tp is 8"),
        ("TP8/batch2xheads4", IDEAL, "deepseek-v3", "attention batch2xheads4 is written heads4xbatch2"),
        ("TP8/heads8", IDEAL, "deepseek-v3", "attention heads8 is written heads"),
        ("TP8/heads4xbatch2/heads", IDEAL, "deepseek-v3", "so that prefill is heads4xbatch2"),
        ("TP8/seq8/heads", IDEAL, "deepseek-v3", None),
        ("TP8/heads/heads4xbatch2", IDEAL, "deepseek-v3", "wants the same word for decode, which is heads"),
        ("TP8/heads4xbatch2/2d:2x4", IDEAL, "llama3-70b", "goes with FFN layout 1d only"),
        ("TP8/batch8", load_engine("trtllm-0.9"), "deepseek-v3", "has no data-parallel attention"),
        ("TP8/batch8", VLLM, "llama3-70b", "has data-parallel attention for models with experts only"),
        ("TP8/batch8", IDEAL, "llama3-70b", None),
        ("TP8/seq8", SGLANG, "deepseek-v3", "keeps a request's cache whole on its ranks"),
        # copies: tp / KV heads of them, a divisor of which may divide the tokens
        ("TP8/heads4xseq2", VLLM, "qwen3-235b-a22b", None),
        ("TP8/heads2xseq4", VLLM, "qwen3-235b-a22b", "divides the 2 copies of a KV head by tokens, not into 4 parts"),
        ("TP8/seq8", VLLM, "deepseek-v3", None),
        ("TP16/seq16", VLLM, "deepseek-v3", None),
        ("TP16/heads2xseq8", VLLM, "kimi-k2", None),
        ("TP8/heads4xseq2", VLLM, "llama3-70b", "divides the 1 copies of a KV head by tokens, not into 2 parts"),
        ("TP8/heads4xseq2", IDEAL, "llama3-70b", None),
        ("TP8/batch", IDEAL, "deepseek-v3", "latent attention is divided by products, as batch8"),
        # ranks beyond the heads share caches by tokens, and only then
        ("TP64/heads32xseq2", IDEAL, "lwm-7b", None),
        ("TP64", IDEAL, "lwm-7b", "does not divide the 32 query heads"),
        ("TP48/heads24xseq2", IDEAL, "lwm-7b", "does not divide the 32 query heads"),
    ],
)
def test_rules_of_products(label: str, engine: Engine, model: str, reason: str | None) -> None:
    found = refused(label, engine, model)
    assert found is None if reason is None else found is not None and reason in found, found


def test_the_largest_decode_context_is_the_published_one() -> None:
    """vLLM's documentation: 2 for Qwen3-235B (4 KV heads) and 8 for DeepSeek-R1 on TP8."""
    for model, most in ((QWEN, 2), (DEEPSEEK, 8)):
        placement = Placement.of(load_hardware("h200-sxm"), 8)
        allowed, _ = enumerate_plans(model, VLLM, placement, Filters(tp=(8,)))
        assert max(choice.sharding.sequence for choice in allowed if choice.sharding.batch == 1) == most


def test_groups_of_fewer_heads_than_ranks_are_asked_for_their_own() -> None:
    """24 ranks divide no 16 KV heads; three groups of eight have them all."""
    model = LLAMA._replace(
        attention=LLAMA.attention._replace(heads=48, kv_heads=16), ffn=LLAMA.ffn._replace(hidden=24 * 1024)
    )
    assert "KV heads" in str(tp_allowed(model, IDEAL._replace(vocabulary_multiple=24), 24))
    assert tp_allowed(model, IDEAL, 24, groups=3) is None


@pytest.mark.parametrize("engine", [IDEAL, VLLM, SGLANG], ids=lambda engine: engine.name)
@pytest.mark.parametrize("model", [DEEPSEEK, QWEN, LLAMA], ids=lambda model: model.name)
def test_every_plan_is_there_once_and_found_again_when_pinned(engine: Engine, model: object) -> None:
    placement = Placement.of(load_hardware("h200-sxm"), 16)
    allowed, refusals = enumerate_plans(model, engine, placement, Filters())  # type: ignore[arg-type]
    found = [*allowed, *(item.plan for item in refusals)]
    assert len({choice.label for choice in found}) == len(found)
    seen = [choice for choice in allowed if choice.attention not in WORDS]
    for choice in seen[:: max(1, len(seen) // 12)]:
        pinned = {name: (value,) for name, value in choice._asdict().items()}
        again, none = enumerate_plans(model, engine, placement, Filters(**pinned))  # type: ignore[arg-type]
        assert (again, none) == ([choice], []), choice.label
    named, _ = enumerate_plans(model, engine, placement, Filters(attention=("heads",)))  # type: ignore[arg-type]
    assert {choice.attention for choice in named} == {"heads"}


def test_other_depths_and_degrees_are_there_when_they_are_named() -> None:
    placement = Placement.of(load_hardware("h100-sxm"), 512)
    model = DEEPSEEK
    allowed, _ = enumerate_plans(model, IDEAL, placement, Filters(tp=(16,), attention=("batch16",)))
    assert {choice.pp for choice in allowed} == set(range(1, 33))  # a word that is named has all depths
    allowed, _ = enumerate_plans(model, IDEAL, placement, Filters(tp=(16,)))
    assert {choice.pp for choice in allowed if choice.attention == "batch16"} == {1, 2, 4, 8, 16, 32}
    assert {choice.ep for choice in allowed if choice.cp == 1} == {1, 8, 16}  # none, a node's, all
    allowed, _ = enumerate_plans(model, IDEAL, placement, Filters(tp=(16,), pp=(3,), ep=(4,), attention=("batch16",)))
    assert [choice.label for choice in allowed] == ["TP16xPP3xDP10xEP4/batch16"]


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-235b-a22b", "llama3-70b"])
def test_a_plan_estimated_alone_is_as_it_was_ranked(model: str) -> None:
    found = ranked(model, gpus=8, hardware="h200", engine="ideal", concurrency=64, isl=2048, osl=64)
    rows = [row for row in found if Plan.parse(row["plan"]).attention not in WORDS]
    for row in rows[:: max(1, len(rows) // 5)]:
        alone = estimate(
            model, plan=row["plan"], hardware="h200", engine="ideal", concurrency=64, isl=2048, osl=64, gpus=8
        )
        for name in ("ttft_ms", "tpot_ms", "tokens_per_s", "kv_capacity_tokens"):
            assert alone[name] == pytest.approx(row[name], rel=1e-9), (row["plan"], name)


@pytest.mark.parametrize(("engine", "most"), [(VLLM, 3500), (SGLANG, 2500), (IDEAL, 20000)])
def test_many_chips_are_not_looked_at_in_every_shape(engine: Engine, most: int) -> None:
    """Of 512 chips 100,000 shapes and more could be made."""
    allowed, refusals = enumerate_plans(DEEPSEEK, engine, Placement.of(load_hardware("h100-sxm"), 512), Filters())
    assert 500 < len(allowed) + len(refusals) < most
    assert len({item.plan.label for item in refusals}) == len(refusals)
