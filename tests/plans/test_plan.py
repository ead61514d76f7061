"""A plan prints as its label and is read back from it."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Filters, InputError, Plan, estimate, plan
from planner.specs.engine import FFN

some = settings(derandomize=True, deadline=None, max_examples=60)
degrees = st.integers(1, 300)
shardings = st.sampled_from(["heads", "batch"])


@pytest.mark.parametrize(
    ("choice", "label"),
    [
        (Plan(), "TP1"),
        (Plan(tp=8), "TP8"),
        (Plan(pp=4), "PP4"),
        (Plan(dp=2), "DP2"),
        (Plan(8, 2, 3), "TP8xPP2xDP3"),
        (Plan(8, 1, 2), "TP8xDP2"),
        (Plan(2, 3, 4, 5, 6, prefill_attention="ulysses"), "TP2xPP3xDP4xEP5xCP6"),
        (Plan(2, cp=4, attention="heads2xseq4", prefill_attention="ring"), "TP2xCP4/heads2xseq4"),
        (Plan(2, cp=4, attention="heads2xbatch4", prefill_attention="gather"), "TP2xCP4/heads2xbatch4/gather"),
        (Plan(1, cp=4, attention="seq4", prefill_attention="ring"), "CP4/seq4"),
        (Plan(8, attention="batch"), "TP8/batch"),
        (Plan(8, 2, attention="batch", prefill_attention="batch"), "TP8xPP2/batch/batch"),
        (Plan(8, attention="heads", prefill_attention="batch"), "TP8/heads/batch"),
        (Plan(attention="batch"), "TP1/batch"),
        (Plan(64, ffn="2d", prefill_ffn="2d", grid="4x16"), "TP64/2d:4x16"),
        (Plan(64, ffn="2d", prefill_ffn="wg-xyz", grid="4x16"), "TP64/2d:4x16/wg-xyz"),
        (Plan(64, ffn="2d", prefill_ffn="wg-xy", grid="4x4x4"), "TP64/2d:4x4x4/wg-xy"),
        (Plan(64, attention="batch", ffn="2d", prefill_ffn="2d", grid="4x16"), "TP64/batch/2d:4x16"),
        (Plan(8, ffn="1d", prefill_ffn="wg-xyz"), "TP8/1d/wg-xyz"),
        (Plan(8, ffn="wg-xyz", prefill_ffn="wg-xyz"), "TP8/wg-xyz"),
        (Plan(8, 2, 3, ffn="2d", prefill_ffn="2d", grid="2x4"), "TP8xPP2xDP3/2d:2x4"),
    ],
)
def test_labels_leave_ones_out_and_put_sharding_behind(choice: Plan, label: str) -> None:
    assert choice.label == label
    assert str(choice) == label
    assert Plan.parse(label) == choice


@some
@given(degrees, degrees, degrees, degrees, degrees, shardings, shardings)
def test_every_plan_is_read_back_from_its_label(
    tp: int, pp: int, dp: int, ep: int, cp: int, attention: str, prefill: str
) -> None:
    choice = Plan(tp, pp, dp, ep, cp, attention, prefill)
    assert Plan.parse(choice.label) == choice
    assert Plan.parse(f"  {choice.label.lower()} ") == choice


@some
@given(
    st.tuples(degrees, degrees, degrees, degrees, degrees),
    st.tuples(shardings, shardings),
    st.tuples(st.sampled_from(FFN), st.sampled_from(FFN)),
    st.one_of(
        st.just(""),
        st.builds("{}x{}".format, st.integers(1, 300), st.integers(1, 300)),
        st.builds("{}x{}x{}".format, st.integers(1, 300), st.integers(1, 300), st.integers(2, 300)),
    ),
)
def test_every_layout_is_read_back_from_its_label(
    sizes: tuple[int, ...], attention: tuple[str, str], layouts: tuple[str, str], grid: str
) -> None:
    if layouts == ("1d", "1d"):
        grid = ""  # it has none, and says so where it is given one
    choice = Plan(*sizes, *attention, *layouts, grid)
    assert Plan.parse(choice.label) == choice
    assert Plan.parse(f" {choice.label.lower()} ") == choice
    assert choice.axes[0] * choice.axes[1] * choice.axes[2] == (prod(map(int, grid.split("x"))) if grid else choice.tp)


def test_different_plans_have_different_labels() -> None:
    plans = [
        Plan(tp, pp, dp, attention=attention, prefill_attention=prefill)
        for tp in (1, 2, 12)
        for pp in (1, 2)
        for dp in (1, 21)
        for attention in ("heads", "batch")
        for prefill in ("heads", "batch")
    ]
    assert len({choice.label for choice in plans}) == len(plans)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("tp8xpp2", Plan(8, 2)),
        ("PP2xTP8", Plan(8, 2)),
        ("TP1xPP1xDP4", Plan(dp=4)),
        ("TP8/heads", Plan(8)),
        ("TP8/batch/heads", Plan(8, attention="batch")),
        ("TP8/1d", Plan(8)),
        ("TP8/heads/1d/1d", Plan(8)),
        ("TP8/2d", Plan(8, ffn="2d", prefill_ffn="2d")),
        ("TP8/2d:2X4", Plan(8, ffn="2d", prefill_ffn="2d", grid="2x4")),
        ("TP8/2d:2x4x1", Plan(8, ffn="2d", prefill_ffn="2d", grid="2x4")),
        ("TP8/2d/wg-xyz:2x4", Plan(8, ffn="2d", prefill_ffn="wg-xyz", grid="2x4")),
    ],
)
def test_labels_that_a_person_writes_are_read_too(text: str, choice: Plan) -> None:
    assert Plan.parse(text) == choice


@pytest.mark.parametrize(
    "text",
    ["", "TP", "TP0", "TP-1", "TP8,PP2", "TP8xTP4", "TP8x", "xTP8", "8", "TP8.5", "TP08", "TP8 x PP2", "AP4", "TP8PP2"],
)
def test_what_is_no_label_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="is not a plan: expected degrees joined by x, each once, as in TP8xPP2xDP2"):
        Plan.parse(text)


@pytest.mark.parametrize("text", ["TP8/2d:", "TP8/2d:8", "TP8/2d:0x8", "TP8/2d:2x2x2x1", "TP8/2d:x4", "TP8/2d:-2x4"])
def test_what_is_no_grid_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match="is not a grid: expected chips as X x YZ or X x Y x Z, as 4x16 or 4x4x4"):
        Plan.parse(text)


@pytest.mark.parametrize(
    "text",
    ["TP8/", "TP8/rows", "TP8/batch/batch/batch", "TP8/batch/x", "TP8//batch", "TP8/2d/batch", "TP8/2d/2d/2d",
     "TP8/batch:2x4", "TP8/2d:2x4/wg-xyz:2x4", "TP8/3d:2x4"],
)  # fmt: skip
def test_what_is_no_sharding_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(InputError, match="behind the degrees expected /heads, /batch or a product"):
        Plan.parse(text)


def test_a_way_to_process_prompts_says_not_where_the_cache_lies() -> None:
    with pytest.raises(InputError, match="ring says how prompts are processed; before it goes where the cache lies"):
        Plan.parse("TP4xCP2/ring")


def test_chips_are_the_product_and_experts_take_none_of_their_own() -> None:
    choice = Plan(tp=2, pp=3, dp=5, ep=7, cp=11)
    assert choice.replica_chips == 2 * 3 * 11
    assert choice.chips == 2 * 3 * 5 * 11


def test_labels_that_are_printed_can_be_priced() -> None:
    """Every label of a ranking, given back to `estimate`, is the same plan at the same price."""
    rows = plan("llama3-8b", 12, hardware="h100-sxm", engine="ideal")
    assert {"/batch" in row["plan"] for row in rows} == {True, False}
    assert any("/2d:" in row["plan"] for row in rows)
    for row in rows:
        again = estimate("llama3-8b", plan=row["plan"], gpus=12, engine="ideal")
        layout = ("attention", "prefill_attention", "ffn", "prefill_ffn", "grid")
        for name in ("plan", "tp", "pp", "dp", *layout, "idle_gpus"):
            assert again[name] == row[name]
        assert again["latency_ms"] == pytest.approx(row["latency_ms"], rel=1e-12)


def test_a_layout_without_a_grid_gets_the_one_that_sends_least() -> None:
    """Pope et al. section 3.2.2: X = sqrt(E / F n), which is 4 for 64 chips and F = 4 E."""
    shared = {"hardware": "tpu-v4", "gpus": 64, "weights": "int8", "schedule": "static"}
    found = estimate("palm-540b", tp=64, ffn="2d", **shared)
    assert (found["plan"], found["prefill_ffn"], found["grid"]) == ("TP64/2d:4x16", "2d", "4x16")
    grids = plan("palm-540b", 64, hardware="tpu-v4", filters=Filters(tp=(64,), ffn=("2d",), prefill_ffn=("2d",),
                 attention=("heads",), grid=("4x16", "16x4", "64x1")))  # fmt: skip
    assert grids[0]["grid"] == "4x16"
    prefilled = estimate("palm-540b", tp=64, prefill_ffn="wg-xyz", **shared)
    assert prefilled["plan"] == "TP64/2d:4x16/wg-xyz"  # decode gathers nothing
    same = estimate("palm-540b", plan="TP64/2d:4x16", **shared)
    assert same["latency_ms"] == found["latency_ms"]
