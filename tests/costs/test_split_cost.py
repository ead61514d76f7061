"""Dollars for prompts and for answers: two parts of one bill."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import estimate, plan
from planner.estimating import estimate_points

FIGURES = ("usd_per_mtok", "usd_per_mtok_input", "usd_per_mtok_output")


@settings(max_examples=40, deadline=None)
@given(
    isl=st.integers(1, 20_000), osl=st.integers(1, 800), load=st.integers(1, 300), share=st.floats(0, 1),
    pp=st.sampled_from((1, 2)), engine=st.sampled_from(("vllm", "sglang", "trtllm")),
    schedule=st.sampled_from(("continuous", "static")), arrivals=st.sampled_from(("steady", "waves")),
)  # fmt: skip
def test_the_two_parts_are_the_whole_bill(isl: int, osl: int, load: int, **options: Any) -> None:
    options["prefix_hit"] = options.pop("share")
    row = estimate("llama3.1-70b", tp=8, isl=isl, osl=osl, concurrency=load, price=2.0, **options)
    whole, prompts, answers = (row[name] for name in FIGURES)
    assert isl * prompts + osl * answers == pytest.approx(osl * whole, rel=1e-9)
    assert prompts > 0
    assert answers >= 0
    assert (answers == pytest.approx(0, abs=1e-9 * whole)) == (osl == 1)


def test_a_static_batch_by_hand() -> None:
    """The bill of the prefill is that of TTFT, which a static batch waits for together."""
    row = estimate("llama3-8b", isl=2000, osl=101, concurrency=16, schedule="static", price=3.6)
    seconds = row["ttft_ms"] / 1e3
    assert row["usd_per_mtok_input"] == pytest.approx(3.6 / 3600 * seconds / (16 * 2000) * 1e6, rel=1e-9)
    steps = 100 * row["tpot_ms"] / 1e3
    assert row["usd_per_mtok_output"] == pytest.approx(3.6 / 3600 * steps / (16 * 101) * 1e6, rel=1e-9)


def test_what_is_cached_makes_input_cheaper_and_arrivals_change_nothing() -> None:
    options: dict[str, Any] = {"tp": 8, "isl": 4000, "concurrency": 64, "price": 2.0}
    plain, cached, waves = (
        estimate("llama3.1-70b", **options, **more) for more in ({}, {"prefix_hit": 0.8}, {"arrivals": "waves"})
    )
    assert cached["usd_per_mtok_input"] < 0.5 * plain["usd_per_mtok_input"]
    for name in FIGURES:
        assert waves[name] == pytest.approx(plain[name], rel=1e-9)
    assert (plain["prefix_hit"], cached["prefix_hit"]) == (0.0, 0.8)


def test_without_a_price_or_a_figure_there_is_none() -> None:
    for row in plan("llama3-8b", 8, hardware="h100-lecture", concurrency=8):
        if row["usd_per_mtok"] is None:
            assert row["usd_per_mtok_input"] is row["usd_per_mtok_output"] is None
    found = estimate_points({"model": ["llama3-8b"], "isl": [1000, 100_000], "price": [1.0]}, 2)
    assert found["error"][1] is not None
    assert found.row(1)["usd_per_mtok_input"] is found.row(1)["usd_per_mtok_output"] is None
