"""Pools: what a replica of one phase does, what never gets worse, what has to hold for every pair."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from asking import request
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Filters, InputError, Limits, Request, estimate, rank
from planner.phases.disaggregated.colocated import best_colocated
from planner.phases.disaggregated.disaggregation import Search, disaggregate, frontier, site_anywhere, sites
from planner.phases.disaggregated.matching import packs
from planner.phases.disaggregated.pairing import pairs_of
from planner.phases.disaggregated.pools import answers_of, prompts_of
from planner.phases.disaggregated.question import Question, check_question
from planner.plans.placement import Placement
from planner.plans.plan import Plan

MS = 1e-3
FEW = Filters(tp=(2, 4, 8), pp=(1, 2))
SLO = Limits(ttft=500 * MS, tpot=30 * MS)
A100 = {"hardware": "a100"}


def asked(
    model: str = "llama3-70b", gpus: int = 16, limits: Limits = SLO, filters: Filters = FEW, **work: Any
) -> Request:
    hardware = work.pop("hardware", "h100-sxm")
    work = {"isl": 1024, "osl": 256, "schedule": "continuous", **work}
    return request(model, gpus, hardware, work=work, limits=limits, filters=filters)


def question(**options: Any) -> Question:
    own = {name: options.pop(name) for name in list(options) if name in Question._fields}
    each = asked(**options)
    return Question(**{"prefill": each, "decode": each, **own})


def search(**options: Any) -> Search:
    wanted = question(**options)
    check_question(wanted)
    return disaggregate(wanted)


def rate(**options: Any) -> float:
    """The highest rate that is found."""
    found = search(**options).deployments
    return found[0].rate if found else 0.0


def test_a_prefill_replica_is_the_plan_with_one_prompt_and_a_decode_replica_its_steps() -> None:
    each = asked()
    place = Placement.of(each.hardware, 16)
    plans = [Plan.parse(label) for label in ("TP2", "TP4", "TP8xPP2")]
    prompts, answers = prompts_of(each, place, plans), answers_of(each, place, plans)
    for index, plan in enumerate(plans):
        alone = estimate("llama3-70b", plan=plan.label, isl=1024, osl=256)
        assert prompts.mean_through[index] / MS == pytest.approx(alone["ttft_ms"])
        for batch in (1, 2, 7, 8):
            static = estimate("llama3-70b", plan=plan.label, isl=1024, osl=256, concurrency=batch, schedule="static")
            if plan.pp == 1 or batch % 2 == 0:  # means need not be whole microbatches
                assert float(answers.step(index, batch)) / MS == pytest.approx(static["tpot_ms"], rel=0.01)
        assert np.all(np.diff(answers.rates(index)) > 0)
        for wanted in answers.rates(index)[-1] * np.array([0.001, 0.3, 0.77, 1.0]):
            batch = float(answers.batch_at(index, wanted))
            assert batch == pytest.approx(wanted * 255 * float(answers.step(index, max(1.0, batch))))


@pytest.mark.parametrize(
    "options", [{}, {"gpus": 8}, {"gpus": 13}, {"arrival_rate": 30.0, "gpus": 128}, {"share": 0.9}]
)
def test_every_pair_keeps_its_promises(options: dict[str, Any]) -> None:
    found = search(**options)
    assert found.deployments
    for each in found.deployments:
        assert each.used <= each.gpus <= found.question.chips
        assert each.prefill.dp >= 1
        assert each.decode.dp >= 1
        groups = [(plan.tp, plan.pp * plan.dp) for plan in (each.prefill, each.decode)]
        assert packs(groups, each.gpus, 8)
        assert each.rate <= each.highest * (1 + 1e-9)
        assert each.ttft <= 0.5 * (1 + 1e-9)
        assert each.tpot <= 0.03 * (1 + 1e-6)
        assert each.prefill_busy < 1
        assert each.wires_busy <= 0.8 * (1 + 1e-9)
        assert each.batch <= each.most * (1 + 1e-9)
        assert 0 < each.visible <= each.transfer
        assert each.batch == pytest.approx(each.rate / each.decode.dp * 255 * each.step, rel=1e-6)
        assert each.prefill_memory <= each.prefill_limit
        assert each.decode_memory <= each.decode_limit
    if "arrival_rate" in options:
        assert all(each.rate == 30.0 for each in found.deployments)
        assert [each.gpus for each in found.deployments] == sorted(each.gpus for each in found.deployments)


def test_no_pair_of_replicas_serves_more_than_its_parts() -> None:
    """No limit to speak of: the busiest part alone decides, and each pool has its own work."""
    found = search(limits=Limits(ttft=1e9, tpot=1e9), gpus=8)
    for each in found.deployments:
        alone = 1 / (each.prefill_busy / each.rate * each.prefill.dp)  # prompts of one replica a second
        assert each.rate <= each.prefill.dp * alone
        assert each.rate <= each.decode.dp * each.most / (255 * each.step) * (1 + 1e-9)


def test_faster_wires_looser_limits_and_more_chips_never_serve_less() -> None:
    few = Filters(tp=(4, 8), pp=(1,))
    base = asked(filters=few)
    levels = tuple(each._replace(bandwidth_gb_per_s=each.bandwidth_gb_per_s * 10) for each in base.hardware.network)
    faster = base._replace(hardware=base.hardware._replace(network=levels))
    for affinity in (("high",), ("low",)):
        here = Question(base, base, affinity=affinity)
        slow, fast = (
            disaggregate(here._replace(prefill=each, decode=each)).deployments[0].rate for each in (base, faster)
        )
        assert fast >= slow * (1 - 1e-9)
    usual = rate(filters=few)
    for better in ({"limits": Limits(600 * MS, 30 * MS)}, {"limits": Limits(500 * MS, 33 * MS)}, {"gpus": 24}):
        assert rate(filters=few, **better) >= usual
    for worse in ({"overlapped": False}, {"share": 0.9}, {"affinity": ("high",)}, {"affinity": ("low",)}):
        assert rate(filters=few, **worse) <= usual


def test_slow_wires_bind_and_sharing_nodes_helps() -> None:
    """At 25 Gb/s for a node DistServe keeps KV inside (its algorithm 2); over the wires far less is served."""
    slow = request("opt-66b", 16, "a100-25gbps", "distserve", work={"isl": 512, "osl": 128}, limits=Limits(2.5, 0.15))
    here = Question(slow, slow, affinity=("high",))
    far = disaggregate(here).deployments[0]
    near = disaggregate(here._replace(affinity=("low",))).deployments[0]
    assert near.rate > 1.5 * far.rate
    assert far.binds == "wires"
    assert near.binds != "wires"
    assert near.transfer < 0.02 < far.transfer


@settings(max_examples=4, deadline=None)
@given(wanted=st.floats(1.0, 40.0))
def test_the_fewest_chips_serve_a_rate_and_as_many_more_serve_more(wanted: float) -> None:
    found = search(model="llama3-8b", gpus=64, arrival_rate=wanted, filters=Filters(tp=(1, 2), pp=(1,))).deployments
    chips = found[0].gpus
    same = rate(model="llama3-8b", gpus=chips, filters=Filters(tp=(1, 2), pp=(1,)))
    assert same >= wanted * (1 - 1e-6)
    if chips > 2:
        assert rate(model="llama3-8b", gpus=chips - 1, filters=Filters(tp=(1, 2), pp=(1,))) < wanted


def test_the_plan_to_beat_is_the_ordinary_planners() -> None:
    each = asked()
    best = best_colocated(each)[0]
    at = rank(each._replace(workload=each.workload._replace(arrival_rate=best.rate * 0.999)))
    assert best.label in at.results["plan"]
    over = each._replace(workload=each.workload._replace(arrival_rate=best.rate * 1.02))
    with pytest.raises(Exception, match="requests/s"):
        rank(over)
    assert best.tpot == pytest.approx(30 * MS, rel=1e-3)
    assert 0 < best.stall < best.tpot
    assert rate() > best.rate  # a third of its TPOT is other prompts


def test_the_frontier_has_no_row_that_another_beats() -> None:
    found = frontier(question(limits=Limits(), gpus=8)).deployments
    assert len(found) > 3
    for one, other in itertools.pairwise(found):
        assert other.tpot > one.tpot
        assert other.rate > one.rate
    assert all(each.prefill_busy <= 0.8 + 1e-9 for each in found)


def test_batch_one_prefill_feeds_batch_64_decode() -> None:
    """Pope et al. 2022, section 4.4 and table 2: 540B on 64 chips, weight-stationary 2D, heads then batch.

    A prompt of 2048 tokens takes 0.29 s, a step at batch 64 28.5 ms: 64 chips of each are in balance where an answer is
    some 64 / (28.5 ms x rate) tokens long.
    """
    limits = Limits(ttft=0.6, tpot=32 * MS)
    each = request(
        "palm-540b-padded", 128, "tpu-v4", "pope",
        work={"isl": 2048, "osl": 960, "weights": "int8", "max_context": 4096, "schedule": "continuous"}, limits=limits,
        filters=Filters(tp=(64,), pp=(1,), ffn=("1d", "2d"), prefill_ffn=("1d", "2d"), grid=("4x16", "")),
    )  # fmt: skip
    found = disaggregate(Question(each, each, 64, 64)).deployments[0]
    assert (found.prefill.tp, found.prefill.dp, found.prefill.prefill_attention, found.prefill.prefill_ffn) == (
        64, 1, "heads", "2d",
    )  # fmt: skip
    assert (found.decode.tp, found.decode.dp, found.decode.attention, found.decode.ffn) == (64, 1, "batch", "2d")
    assert found.first == pytest.approx(0.29, rel=0.1)
    assert found.batch == pytest.approx(64, rel=0.1)
    assert found.step == pytest.approx(28.5 * MS, rel=0.1)
    together = best_colocated(each)[0]
    assert found.rate > 1.3 * together.rate


def test_another_generation_decodes_for_less() -> None:
    """Splitwise (ISCA 2024): decode on A100 behind H100 serves more per $ than H100 for both phases together; with
    Llama-2-70B and its coding mix 1.4 times the rate at 20 % less, which is 1.75 times per $."""
    filters, limits = Filters(tp=(4, 8), pp=(1,)), Limits(500 * MS, 22 * MS)
    for (isl, osl), least in (((1020, 129), 1.0), ((1500, 13), 1.4)):
        work = {"isl": isl, "osl": osl}
        new, old = (
            asked("llama2-70b", 32, limits, filters, hardware=name, **work) for name in ("h100-sxm", "a100-80gb-sxm")
        )
        mixed = disaggregate(Question(new, old)).deployments[0]
        both = best_colocated(new)[0]
        gain = mixed.rate / mixed.dollars / (both.rate / both.dollars)
        assert least < gain < 2.2
        same = disaggregate(Question(old, old)).deployments[0]
        assert 1.2 < same.rate / best_colocated(old)[0].rate < 2.5  # published: up to 2.35 at the same cost and power


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limits": Limits(ttft=0.5)}, "give --max-tpot too"),
        ({"prefill_chips": 0}, "a pool without chips"),
        ({"prefill_chips": 16}, "each pool needs one"),
        ({"decode_chips": 4, "arrival_rate": 3.0}, "no --prefill-gpus"),
        ({"osl": 1}, "nothing is left to decode"),
        ({"gpus": 1}, "at least 2"),
        ({"hardware": "tpu-v6e"}, "is a torus"),
        ({"affinity": ("low",), "decode_chips": 4}, "share no node"),
        ({"share": 1.0}, "--attainment"),
        ({"limits": Limits(), "arrival_rate": 3.0}, "fewest chips within limits"),
        ({"concurrency": 4}, "--concurrency"),
    ],
)
def test_questions_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_question(question(**options))


def test_sites_of_one_node_are_looked_at_once() -> None:
    assert len(list(sites(question(gpus=8)))) == 1
    assert len(list(sites(question(gpus=16)))) == 3  # one node, two nodes, anywhere
    site = site_anywhere(question(gpus=16))
    pairs = pairs_of(question(gpus=16), site)
    assert pairs.prefill_rate.shape == pairs.transfer.shape == (len(pairs.prompts.plans), len(pairs.answers.plans))
