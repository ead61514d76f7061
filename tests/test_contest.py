"""Contests of plans: the passes of the engine, prompts shared by groups of chips, where a cut can and cannot pay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from asking import request as asked

from planner import load_hardware, rank
from planner.costs.layers import Pass, Structure
from planner.costs.rows import Rows
from planner.costs.serving import replica_of
from planner.costs.step import pass_time
from planner.diagnosing.contest import Entry, along, best, candidates, contest, prompt
from planner.diagnosing.framework import least_block
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.pricing import setting_of
from planner.request import Request as LanguageRequest


def question(model: str, gpus: int = 8, hardware: str = "h100-sxm", **work: Any) -> LanguageRequest:
    return asked(model, gpus, hardware, work={"concurrency": 1, **work})


def of(found: list[Entry], label: str) -> np.ndarray[Any, Any]:
    return next(each.seconds for each in found if each.label == label)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_without_a_cut_the_times_are_those_of_the_passes_of_plans(tp: int) -> None:
    request = question("llama3-8b", gpus=8)
    setting = setting_of(request, Placement.of(request.hardware, 8), Structure())
    replica = replica_of(setting, Rows.of(tp=tp, pp=1, dp=1, isl=1.0, osl=1.0, concurrency=1.0))
    whole = pass_time(replica, prompt(setting, np.array([4096.0]))).whole.total
    assert of(contest(request, "prefill", [4096]), f"TP{tp}")[0] == pytest.approx(float(np.ravel(whole)[0]))
    step = pass_time(replica, Pass(4.0, 4096.0)).whole.total
    assert of(contest(request, "decode", [4096], 4), f"TP{tp}")[0] == pytest.approx(float(np.ravel(step)[0]))


def test_prompts_are_shared_in_every_way_once() -> None:
    found = candidates(question("llama3-70b", gpus=16), "prefill")
    ways = [(each.tp, each.cp, each.prefill_attention) for each in found if each.cp > 1]
    assert len(ways) == len(set(ways))
    assert {(8, 2, "ring"), (1, 16, "gather"), (2, 4, "ulysses")} <= set(ways)
    assert all(along(each) == (each.cp > 1) for each in found)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_long_prompt_goes_over_groups_at_nearly_the_speed_of_all_chips(tp: int) -> None:
    found = contest(question("llama3-8b", gpus=8), "prefill", [65536])
    one = of(found, f"TP{tp}")[0]
    plans = {each.label: Plan.parse(each.label) for each in found}
    shared = min(each.seconds[0] for each in found if (plans[each.label].tp, plans[each.label].cp) == (tp, 8 // tp))
    assert one / (8 // tp) <= shared * 1.001
    assert shared <= 1.25 * one / (8 // tp)


@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b"])
def test_prompts_take_what_the_ranking_says(model: str) -> None:
    """Under an engine that runs a prompt in one pass, TTFT of the best plan with groups and of the best without."""
    work = {"concurrency": 1, "isl": 8000, "osl": 64}
    request = asked(model, 8, "h100-sxm", "ideal", work, filters=Filters(pp=(1,), dp=(1,)))
    found, rows = contest(request, "prefill", [8000]), list(rank(request).results.rows())
    for cut in (False, True):
        chosen = best(found, 0, cut)
        assert chosen is not None
        least = min(row["ttft_ms"] for row in rows if (Plan.parse(row["plan"]).cp > 1) == cut)
        assert float(chosen.seconds[0]) * 1e3 == pytest.approx(least)


def test_decode_gains_nothing_before_the_kv_heads_are_used_up_and_something_beyond() -> None:
    """Eight KV heads: over eight chips cutting positions saves nothing; over sixteen it saves copies."""
    lengths, far = [1024, 131072, 1048576], 2
    few = contest(question("llama3-70b", gpus=8), "decode", lengths)
    plain = of(few, "TP8")
    assert all(np.all(each.seconds > plain) for each in few if each.cut and each.chips == 8)
    many = contest(question("llama3-70b", gpus=16), "decode", lengths, 2)
    cut, whole = (next(each for each in many if each.label == label) for label in ("TP16/heads8xseq2", "TP16"))
    assert cut.seconds[far] < whole.seconds[far]
    assert cut.fits[far]
    assert not whole.fits[far]


def test_the_best_is_the_fastest_that_fits() -> None:
    found = contest(question("llama3-70b", gpus=8), "prefill", [16384])
    whole, cut = best(found, 0, cut=False), best(found, 0, cut=True)
    assert whole is not None
    assert cut is not None
    assert whole.seconds[0] == min(each.seconds[0] for each in found if each.fits[0] and not each.cut)
    assert Plan.parse(cut.label).cp > 1
    assert not next(each for each in found if each.label == "TP1").fits[0]


@pytest.mark.parametrize(
    ("hardware", "tokens"), [("a100", 312e12 / 300e9), ("h100", 989e12 / 450e9), ("h200", 989e12 / 450e9)]
)
def test_the_least_block_of_ring_attention(hardware: str, tokens: float) -> None:
    """Ring Attention, table 2: A100 on NVLink 1.0e3 tokens; six blocks a device are 6.2e3."""
    assert least_block(load_hardware(hardware), 0) == pytest.approx(tokens)
    assert least_block(load_hardware(hardware), 0, group=8.0) == pytest.approx(tokens / 8)
    assert least_block(load_hardware("a100"), 0) == pytest.approx(1040)
    assert 6 * least_block(load_hardware("a100"), 0) == pytest.approx(6.2e3, rel=0.01)
