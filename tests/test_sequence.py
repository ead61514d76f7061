"""The sequence split of language models: the same passes as plans without it, and where it can and cannot pay."""

from __future__ import annotations

from typing import Any

import pytest
from asking import request as asked

from planner import load_hardware
from planner.costs.layers import Pass, Structure
from planner.costs.step import pass_time
from planner.diagnosing.framework import least_block
from planner.plans.placement import Placement
from planner.pricing import setting_of
from planner.request import Request as LanguageRequest
from planner.sequence import Cut, best, cuts, prompt_pass, replica_of, timed


def question(model: str, gpus: int = 8, hardware: str = "h100-sxm", **work: Any) -> LanguageRequest:
    return asked(model, gpus, hardware, work={"concurrency": 1, **work})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_without_a_cut_the_times_are_those_of_the_passes_of_plans(tp: int) -> None:
    request = question("llama3-8b", gpus=8)
    setting = setting_of(request, Placement.of(request.hardware, 8), Structure())
    whole = pass_time(replica_of(setting, tp), prompt_pass(setting, 4096.0)).whole.total
    assert timed(request, "prefill", Cut(tp), 4096).seconds == pytest.approx(float(whole[0]))
    step = pass_time(replica_of(setting, tp), Pass(4.0, 4096.0)).whole.total
    assert timed(request, "decode", Cut(tp), 4096, 4).seconds == pytest.approx(float(step[0]))


def test_every_cut_fits_the_chips_once() -> None:
    request = question("llama3-70b", gpus=16)
    found = cuts(request)
    assert len(found) == len(set(found))
    assert all(each.chips <= 16 for each in found)
    assert {Cut(8, 2), Cut(1, 16), Cut(16, 1)} <= set(found)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_long_prompt_goes_over_a_ring_at_nearly_the_speed_of_all_chips(tp: int) -> None:
    request = question("llama3-8b", gpus=8)
    one, all_ = (timed(request, "prefill", Cut(tp, cp), 65536).seconds for cp in (1, 8 // tp))
    assert one / (8 // tp) <= all_ * 1.001
    assert all_ <= 1.15 * one / (8 // tp)


def test_decode_gains_nothing_before_the_kv_heads_are_used_up_and_something_beyond() -> None:
    """Eight KV heads: over eight chips cutting positions saves nothing; over sixteen it saves copies."""
    few, many = question("llama3-70b", gpus=8), question("llama3-70b", gpus=16)
    for tokens in (1024, 131072, 1048576):
        plain = timed(few, "decode", Cut(8), tokens).seconds
        assert all(timed(few, "decode", Cut(8 // cp, cp), tokens).seconds > plain for cp in (2, 4, 8))
    assert timed(many, "decode", Cut(8, 2), 1048576).seconds < timed(many, "decode", Cut(16), 1048576).seconds
    batch = 2
    assert timed(many, "decode", Cut(8, 2), 1048576, batch).fits
    assert not timed(many, "decode", Cut(16), 1048576, batch).fits


def test_a_window_needs_only_its_neighbours() -> None:
    """With Ethernet between chips a ring of full attention waits; one of a window sends no more than the window."""
    request = question("mistral-7b", hardware="l40s", gpus=8)
    window = timed(request, "prefill", Cut(1, 8), 131072).seconds
    full = timed(
        request._replace(
            model=request.model._replace(
                attention_pattern=("full",), attention=request.model.attention._replace(window=None)
            )
        ),
        "prefill", Cut(1, 8), 131072,
    ).seconds  # fmt: skip
    assert window < full / 2


def test_the_best_is_the_fastest_that_fits() -> None:
    request = question("llama3-70b", gpus=8)
    found = [timed(request, "prefill", cut, 16384) for cut in cuts(request)]
    whole, cut = best(found, False), best(found, True)
    assert whole is not None
    assert cut is not None
    assert whole.seconds == min(each.seconds for each in found if each.fits and each.cut.cp == 1)
    assert cut.cut.cp > 1
    assert not timed(request, "prefill", Cut(1), 16384).fits


@pytest.mark.parametrize(
    ("hardware", "tokens"), [("a100", 312e12 / 300e9), ("h100", 989e12 / 450e9), ("h200", 989e12 / 450e9)]
)
def test_the_least_block_of_ring_attention(hardware: str, tokens: float) -> None:
    """Ring Attention, table 2: A100 on NVLink 1.0e3 tokens; six blocks a device are 6.2e3."""
    assert least_block(load_hardware(hardware), 0) == pytest.approx(tokens)
    assert least_block(load_hardware(hardware), 0, group=8.0) == pytest.approx(tokens / 8)
    assert least_block(load_hardware("a100"), 0) == pytest.approx(1040)
    assert 6 * least_block(load_hardware("a100"), 0) == pytest.approx(6.2e3, rel=0.01)
