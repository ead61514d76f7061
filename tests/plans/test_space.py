"""Which plans are looked at: all that the rules allow, under the filters, and each refused one with its reason."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Engine, Filters, Model, NoPlanError, Plan, load_engine, load_hardware, load_model
from planner import plan as ranked
from planner.plans.placement import Placement
from planner.plans.rules import refusal, tp_allowed
from planner.plans.sharding import WORDS, implied_prefill
from planner.plans.space import Refused, _grids, enumerate_plans

LLAMA = load_model("llama3-8b")  # 32 query heads, 8 KV heads, 32 layers
IDEAL, VLLM = load_engine("ideal"), load_engine("vllm")
some = settings(derandomize=True, deadline=None, max_examples=25)


def space(
    gpus: int, model: Model = LLAMA, engine: Engine = VLLM, hardware: str = "h100-sxm", **filters: tuple[object, ...]
) -> tuple[list[Plan], list[Refused]]:
    placement = Placement.of(load_hardware(hardware), gpus)
    return enumerate_plans(model, engine, placement, Filters(**filters))  # type: ignore[arg-type]


def labels(plans: list[Plan]) -> list[str]:
    return [choice.label for choice in plans]


def test_eight_chips_of_one_node() -> None:
    allowed, refused = space(8)
    assert labels(allowed) == [
        "DP8", "PP2xDP4", "PP3xDP2", "PP4xDP2", "PP5", "PP6", "PP7", "PP8",
        "TP2xDP4", "TP2xPP2xDP2", "TP2xPP3", "TP2xPP4",
        "TP4xDP2", "TP4xPP2",
        "TP8",
    ]  # fmt: skip
    assert {item.plan.tp for item in refused} == {3, 5, 6, 7}
    assert all(item.reason and item.limit == "rule" for item in refused)


@some
@given(
    st.integers(1, 70),
    st.sampled_from(["llama3-8b", "qwen2.5-7b", "llama2-13b", "palm-540b"]),
    st.sampled_from([VLLM, IDEAL]),
    st.sampled_from(["h100-sxm", "l40s", "tpu-v4-lecture", "tpu-v4"]),
)
def test_everything_the_rules_allow_is_there_once(gpus: int, name: str, engine: Engine, hardware: str) -> None:
    model, placement = load_model(name), Placement.of(load_hardware(hardware), gpus)
    allowed, refused = space(gpus, model, engine, hardware)
    assert len(set(allowed)) == len(allowed)
    assert not set(allowed) & {item.plan for item in refused}
    assert len({choice.label for choice in allowed}) == len(allowed)
    gridded = "2d" in engine.ffn
    sizes = {
        (tp, pp)
        for tp in range(1, placement.usable + 1)
        for pp in range(1, min(model.layers, placement.usable // tp) + 1)
        if placement.replicas(tp, pp) > 0 and any(fits(model, engine, placement, tp, gridded))
    }
    words = [choice for choice in allowed if choice.attention in WORDS and choice.cp == 1]
    assert {(choice.tp, choice.pp) for choice in words} == sizes
    along = [choice for choice in allowed if choice.cp > 1]
    assert bool(along) == (bool(engine.prompt_context) and placement.usable > 1)
    assert all(size & (size - 1) == 0 for choice in along for size in (choice.cp, choice.pp))
    products = [choice for choice in allowed if choice.attention not in WORDS]
    assert all(choice.pp & (choice.pp - 1) == 0 for choice in products)
    assert all(choice.attention == choice.sharding.word for choice in products)
    for choice in allowed:
        assert refusal(model, engine, placement, choice) is None
        assert choice.chips <= gpus
        # as many replicas as the chips hold: one more would be refused
        assert choice.dp == placement.replicas(choice.tp, choice.pp, choice.cp)
        assert refusal(model, engine, placement, choice._replace(dp=choice.dp + 1)) is not None
    for item in refused:
        assert item.reason == refusal(model, engine, placement, item.plan)
    # every degree is accounted for, up to one head a chip, or beyond it on a grid
    degrees = set(range(1, min(placement.usable, model.attention.heads) + 1))
    beyond = {tp for tp in range(1, placement.usable + 1) if gridded and len(placement.meshes(tp)) > 1} - degrees
    if engine.decode_context == "any":  # ranks beyond the heads share caches by tokens
        beyond |= {model.attention.heads * 2**power for power in range(7)}
    found = {choice.tp for choice in allowed} | {item.plan.tp for item in refused}
    assert degrees <= found <= degrees | beyond
    stored = {(choice.tp, choice.grid, {choice.ffn, choice.prefill_ffn} == {"1d"}) for choice in allowed}
    assert all((tp == 1) <= one for tp, _, one in stored)
    if gridded:
        assert {choice.ffn for choice in allowed} <= {
            "1d",
            "2d",
        }  # weights are gathered for decodes where that is named


def fits(model: Model, engine: Engine, placement: Placement, tp: int, gridded: bool) -> Iterator[bool]:
    """Whether a degree is allowed as a line, or as one of the grids that are looked at."""
    yield tp_allowed(model, engine, tp) is None
    for mesh in placement.meshes(tp) if gridded else ():
        x = mesh.sizes[0]
        yield x > 1 and mesh in _grids(model, engine, placement, tp) and tp_allowed(model, engine, tp, x=x) is None


def test_layouts_are_looked_at_for_both_phases_and_the_grids_worth_it() -> None:
    found, _ = space(8, engine=IDEAL, tp=(8,), attention=("heads",))
    assert labels(found) == [
        "TP8", "TP8/1d/wg-xyz", "TP8/2d:2x2x2/wg-xy",
        "TP8/2d:2x4", "TP8/2d:2x4/wg-x", "TP8/2d:2x4/wg-xyz",
    ]  # fmt: skip
    named, _ = space(8, engine=IDEAL, tp=(8,), attention=("heads",), grid=("8x1", "2x4x1", "2x4"), prefill_ffn=("2d",))
    assert labels(named) == ["TP8/2d:8x1", "TP8/2d:2x4"]  # the same grid under two names is one
    decoding, _ = space(8, engine=IDEAL, tp=(8,), attention=("heads",), ffn=("wg-xyz",), prefill_ffn=("wg-xyz",))
    assert {choice.label for choice in decoding} == {"TP8/wg-xyz", "TP8/wg-xyz:2x4"}


def test_only_the_engines_layouts_are_looked_at_unless_named() -> None:
    for engine in (VLLM, IDEAL._replace(ffn=("1d",))):
        allowed, refused = space(8, engine=engine)
        assert {(choice.ffn, choice.prefill_ffn, choice.grid) for choice in allowed} == {("1d", "1d", "")}
        assert {item.plan.ffn for item in refused} == {"1d"}
    some, _ = space(8, engine=IDEAL._replace(ffn=("1d", "2d", "wg-xyz")), tp=(8,))
    assert {choice.prefill_ffn for choice in some} == {"1d", "2d", "wg-xyz"}


@pytest.mark.parametrize("gpus", [4, 8, 64])
def test_every_layout_that_is_found_is_found_again_when_it_is_named(gpus: int) -> None:
    hardware = "tpu-v4" if gpus == 64 else "h100-sxm"
    model, engine = (load_model("palm-62b"), load_engine("pope")) if gpus == 64 else (LLAMA, IDEAL)
    allowed, _ = space(gpus, model, engine, hardware, pp=(1,))
    assert {choice.prefill_ffn for choice in allowed} >= {"1d", "2d", "wg-xyz"}
    for choice in allowed:
        pinned = {name: (value,) for name, value in choice._asdict().items()}
        again, refused = space(gpus, model, engine, hardware, **pinned)
        assert again == [choice], choice.label
        assert refused == []


def test_filters_of_layouts_that_leave_nothing_say_why() -> None:
    with pytest.raises(NoPlanError, match="grid 3x3 has 9 chips, tp is 8"):
        ranked("llama3-8b", 8, engine="ideal", filters=Filters(tp=(8,), grid=("3x3",), ffn=("2d",)))
    with pytest.raises(NoPlanError, match="grid 3x3 has 9 chips, tp is 8"):
        ranked("llama3-8b", 8, engine="ideal", filters=Filters(tp=(8,), grid=("3x3",)))
    with pytest.raises(NoPlanError, match="FFN layout wg-xy: grid 2x4 has no Z"):
        ranked("llama3-8b", 8, engine="ideal", filters=Filters(tp=(8,), grid=("2x4",), prefill_ffn=("wg-xy",)))
    with pytest.raises(NoPlanError, match="engine vllm has no FFN layout 2d; it offers 1d"):
        ranked("llama3-8b", 8, filters=Filters(ffn=("2d",)))


def test_seven_chips_leave_some_idle_which_are_paid_for() -> None:
    allowed, _ = space(7)
    assert {choice.label: 7 - choice.chips for choice in allowed} == {
        "DP7": 0, "PP2xDP3": 1, "PP3xDP2": 1, "PP4": 3, "PP5": 2, "PP6": 1, "PP7": 0,
        "TP2xDP3": 1, "TP2xPP2": 3, "TP2xPP3": 1, "TP4": 3,
    }  # fmt: skip
    rows = {row["plan"]: row for row in ranked("llama3-8b", 7, price=3.6)}
    assert {label: row["idle_gpus"] for label, row in rows.items()} == {
        choice.label: 7 - choice.chips for choice in allowed
    }
    pair = rows["TP2xDP3"]
    assert pair["gpus"] == 7
    assert pair["usd_per_mtok"] == pytest.approx(3.6 * 7 / 3600 / pair["tokens_per_s"] * 1e6, rel=1e-12)
    assert pair["gpu_s_per_token"] == pytest.approx(7 / pair["tokens_per_s"], rel=1e-12)


@pytest.mark.parametrize(
    ("gpus", "tp", "dp"),
    [(16, 5, 2), (16, 4, 4), (12, 8, 1), (12, 4, 3), (20, 8, 2), (24, 10, 2), (15, 5, 2), (13, 5, 2)],
)
def test_replicas_by_default_are_what_fits_without_straddling_nodes(gpus: int, tp: int, dp: int) -> None:
    forty = LLAMA._replace(attention=LLAMA.attention._replace(heads=40), ffn=LLAMA.ffn._replace(hidden=14400))
    model = forty._replace(attention=forty.attention._replace(kv_heads=40), vocab=128000)
    allowed, _ = space(gpus, model, tp=(tp,), pp=(1,))
    assert [(choice.tp, choice.dp) for choice in allowed] == [(tp, dp)]


def test_filters_choose_values_of_every_dimension() -> None:
    allowed, _ = space(16, tp=(2, 8), pp=(2,), dp=(1, 3))
    assert labels(allowed) == ["TP2xPP2", "TP2xPP2xDP3", "TP8xPP2"]
    allowed, refused = space(16, dp=(2,), tp=(8,))
    assert labels(allowed) == ["TP8xDP2"]
    assert [item.reason for item in refused] == ["TP8xPP2xDP2 takes 32 chips, there are 16"]


def test_filtered_values_that_cannot_be_are_refused_with_a_reason() -> None:
    allowed, refused = space(8, tp=(3, 16), pp=(1,))
    assert allowed == []
    assert {item.plan.tp: item.reason for item in refused} == {
        3: "tp 3 does not divide the 32 query heads; nearest valid: 2 or 4",
        16: "TP16 takes 16 chips, there are 8",
    }
    _, refused = space(8, tp=(8,), pp=(2, 100))
    assert [item.reason for item in refused] == [
        "TP8xPP2 takes 16 chips, there are 8",
        "pp 100 is more than the 32 layers; nearest valid: 32",
    ]
    _, refused = space(8, tp=(2,), cp=(2,), pp=(1,))
    assert "engine vllm does not divide a prompt's tokens over chips" in refused[0].reason
    _, refused = space(8, tp=(2,), ep=(2,), pp=(1,))
    assert "no experts" in refused[0].reason
    _, refused = space(8, tp=(2,), pp=(1,), ffn=("2d",))
    assert refused[0].reason == "engine vllm has no FFN layout 2d; it offers 1d"


def test_only_the_engines_kinds_of_attention_are_looked_at() -> None:
    allowed, refused = space(8, engine=VLLM)
    assert {choice.attention for choice in [*allowed, *(item.plan for item in refused)]} == {"heads"}
    allowed, _ = space(8, engine=IDEAL)
    kinds = {(choice.attention, choice.prefill_attention) for choice in allowed if choice.cp == 1}
    products = {kind for kind in kinds if kind[0] not in WORDS}
    assert ("heads4xbatch2", "heads4xbatch2") in products
    assert ("heads2xseq4", "heads") in products
    assert all(implied_prefill(decode) == prefill for decode, prefill in products)
    assert kinds - products == {("heads", "heads"), ("batch", "heads"), ("batch", "batch")}
    along = {(choice.attention, choice.prefill_attention) for choice in allowed if (choice.tp, choice.cp) == (2, 4)}
    assert along == {
        ("heads", "ulysses"), ("heads2xseq4", "ring"), ("heads2xseq4", "gather"), ("heads2xbatch4", "ring"),
        ("heads2xbatch4", "gather"), ("heads2xbatch4", "ulysses"),
    }  # fmt: skip
    # asked for all the same, it is refused for the engine's sake
    allowed, refused = space(8, engine=VLLM, attention=("batch",), tp=(8,))
    assert allowed == []
    assert all("engine vllm cannot shard attention over batch" in item.reason for item in refused)


def test_one_chip_is_one_way_to_shard_attention_unless_asked() -> None:
    """A single chip holds all heads of all its requests, however that is called."""
    allowed, _ = space(4, engine=IDEAL)
    assert {choice.attention for choice in allowed if choice.tp == choice.cp == 1} == {"heads"}
    allowed, _ = space(4, engine=IDEAL, attention=("batch",), tp=(1,), pp=(1,))
    assert labels(allowed) == ["DP4/batch", "DP4/batch/batch"]


def test_a_prefill_sharding_alone_can_be_filtered() -> None:
    allowed, refused = space(8, engine=IDEAL, tp=(8,), prefill_attention=("batch",), prefill_ffn=("1d",))
    assert labels(allowed) == ["TP8/batch/batch"]
    assert [item.plan.label for item in refused] == ["TP8/heads/batch"]  # no product has prompts over the batch
    allowed, refused = space(8, engine=IDEAL, tp=(8,), prefill_attention=("batch",))
    assert {choice.attention for choice in allowed} == {"batch"}
    assert {item.plan.attention for item in refused} == {"heads"}


def test_a_torus_offers_the_degrees_that_tile_its_slice() -> None:
    palm = load_model("palm-540b")
    allowed, refused = space(70, palm, IDEAL, "tpu-v4")
    assert {choice.tp for choice in allowed if not choice.grid and choice.attention in WORDS} == {1, 2, 4, 8, 16}
    # 48 heads over YZ of a grid, whose X divides the model's width: all but boxes of an odd number of chips
    assert {choice.tp for choice in allowed if choice.grid} == {2, 4, 8, 16, 32, 64}
    assert max(choice.chips for choice in allowed) == 64
    assert any("does not tile the slice 4x4x4" in item.reason for item in refused)


@pytest.mark.parametrize(
    ("model", "filters"),
    [("deepseek-v3", {}), ("deepseek-v3", {"ep": (3, 8, 16), "pp": (1, 2, 5, 80)}), ("qwen3-235b-a22b", {})],
)
def test_rules_asked_once_for_many_plans_say_what_each_plan_alone_hears(
    model: str, filters: dict[str, tuple[object, ...]]
) -> None:
    """Every plan of 48 chips against the rules asked anew; those left out are refused on one stage for the same."""
    spec, placement = load_model(model), Placement.of(load_hardware("h200-sxm"), 48)
    allowed, refused = space(48, spec, IDEAL, "h200-sxm", **filters)
    for number, item in enumerate([*(Refused(plan, "") for plan in allowed), *refused]):
        if number % 7 == 0:  # some, spread over all
            assert (refusal(spec, IDEAL, placement, item.plan) or "") == item.reason, item.plan.label
    shapes = {item.plan._replace(pp=1, dp=1): item.reason for item in refused if item.plan.pp == 1}
    for shape, reason in list(shapes.items())[::25]:
        if reason.startswith("tp "):
            assert refusal(spec, IDEAL, placement, shape._replace(pp=3)) == reason


def test_the_largest_space_is_ranked_in_time() -> None:
    """512 chips of DeepSeek-V3: below two seconds for the whole command, of which imports and table are the half."""
    began = time.process_time()
    rows = ranked("deepseek-v3", 512, hardware="h200", engine="ideal")
    assert time.process_time() - began < 2  # 0.4 on a quiet machine
    assert len(rows) > 1000


def test_filters_that_leave_nothing_say_so() -> None:
    with pytest.raises(NoPlanError, match="TP16 takes 16 chips, there are 8"):
        ranked("llama3-8b", 8, filters=Filters(tp=(16,)))


def test_layouts_named_beside_groups_that_share_prompts_are_refused_not_dropped() -> None:
    for named in ({"ffn": ("2d",)}, {"grid": ("2x4",)}, {"prefill_ffn": ("wg-xyz",)}):
        allowed, refused = space(8, engine=IDEAL, tp=(1,), cp=(8,), **named)
        assert not allowed
        assert all("goes with FFN layout 1d only" in item.reason for item in refused)
    allowed, _ = space(8, engine=IDEAL, tp=(1,), cp=(8,), ffn=("1d", "2d"))
    assert {choice.ffn for choice in allowed} == {"1d"}
