"""Terms add up to what pricing says, by the same path; the floor is one."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem

from planner import NoPlanError, Request, Workload, load_machine, load_model, rank
from planner.costs.layers import Structure
from planner.costs.roofline import BOUNDS
from planner.costs.rows import Rows, structure_of
from planner.costs.serving import OTHERS, OWN, STEP, fit, itemise, price
from planner.costs.terms import Terms
from planner.costs.weights import matmul_parameters
from planner.estimating import estimate_one
from planner.explaining.breakdown import Breakdown, breakdown, floored, plan_of
from planner.explaining.difference import brought_together, lines
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import price_all, setting_of
from planner.units import GIB, MS

EXACT = 1e-9


def explained(
    model: str, hardware: str, engine: str | None, plan: str, concurrency: int = 1, **work: object
) -> Breakdown:
    machine, software = load_machine(hardware, engine)
    wanted = Plan.parse(plan)
    request = Request(load_model(model), machine, software, wanted.chips, Workload(**work))  # type: ignore[arg-type]
    return breakdown(request, wanted, concurrency)


@pytest.mark.parametrize("block", range(4))
def test_terms_of_every_plan_add_up_to_its_times(block: int) -> None:
    for seed in range(block * 8, block * 8 + 8):
        request = problem(seed, chips=(4, 8, 16))
        try:
            priced = price_all(request)
        except NoPlanError:
            continue
        if priced.results is None:
            continue
        plans = [plan_of(priced.results, index) for index in range(len(priced.results))]
        for structure in {Structure(plan.attention, plan.prefill_attention) for plan in plans}:
            setting = setting_of(request, priced.placement, structure)
            own = [plan for plan in plans if Structure(plan.attention, plan.prefill_attention) == structure]
            degrees = {name: [getattr(plan, name) for plan in own] for name in ("tp", "pp", "dp")}
            work = request.workload
            rows = Rows.of(**degrees, isl=work.isl, osl=work.osl, concurrency=work.concurrency or 30)
            fitted = fit(setting, rows, clip=False)
            said, itemised = price(setting, rows, fitted), itemise(setting, rows, fitted)
            assert np.array_equal(said.latency, itemised.latency)
            for parts, terms in ((said.ttft_parts, itemised.ttft_parts), (said.tpot_parts, itemised.tpot_parts)):
                assert isinstance(terms, Terms)
                for place, bound in enumerate(BOUNDS):
                    together = sum(term.parts[place] for term in terms.items.values())
                    off = np.abs(together - getattr(parts, bound)) / np.maximum(parts.total, 1e-30)
                    assert np.max(off) < EXACT, (seed, bound)


@pytest.mark.parametrize("hidden", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("parallel", [True, False])
def test_terms_of_every_layout_add_up_to_its_times(hidden: float, parallel: bool) -> None:
    """... whatever part of its collectives runs while its products do."""
    machine, engine = load_machine("tpu-v4", None)
    assert engine.overlap is not None
    engine = engine._replace(overlap=engine.overlap._replace(fraction=hidden) if hidden else None)
    palm = load_model("palm-540b")
    model = palm._replace(parallel_block=parallel, norm=palm.norm._replace(per_layer=1 if parallel else 2))
    work = Workload(isl=1984, osl=64, concurrency=100, weights="int8", schedule="static")
    request = Request(model, machine, engine, 64, work)
    seen = set()
    labels = (
        "TP64/2d:4x16", "TP64/2d:4x16/wg-x", "TP64/batch/2d:4x4x4/wg-xy", "TP32xPP2/batch/batch/2d:4x8/wg-xyz",
        "TP64/batch/1d/wg-xyz", "TP32xDP2/batch/2d:4x8", "TP64",
    )  # fmt: skip
    for label in labels:
        plan = Plan.parse(label)
        setting = setting_of(request, Placement.of(machine, 64), structure_of(plan))
        rows = Rows.of_plans([plan], isl=work.isl, osl=work.osl, concurrency=[1, 100, 512])
        fitted = fit(setting, rows, clip=False)
        said, itemised = price(setting, rows, fitted), itemise(setting, rows, fitted)
        assert np.array_equal(said.latency, itemised.latency)
        for parts, terms in ((said.ttft_parts, itemised.ttft_parts), (said.tpot_parts, itemised.tpot_parts)):
            assert isinstance(terms, Terms)
            for place, bound in enumerate(BOUNDS):
                together = sum(term.parts[place] for term in terms.items.values())
                off = np.abs(together - getattr(parts, bound)) / np.maximum(parts.total, 1e-30)
                assert np.max(off) < EXACT, (label, bound)
        found = breakdown(request, plan, 60)
        for times in (found.ttft, found.tpot):
            assert sum(item.seconds for item in times.items) == pytest.approx(times.total, rel=EXACT)
            seen |= {item.name for item in times.items}
    assert {"weights", "inputs", "outputs", "norm sums", "heads to batch", "KV to all heads", "last rows"} <= seen


def test_collectives_are_hidden_as_far_as_products_are_long_enough() -> None:
    machine, engine = load_machine("tpu-v4", None)
    assert engine.overlap is not None
    work = Workload(isl=1984, osl=64, concurrency=64, weights="int8", schedule="static")
    plan = Plan.parse("TP64/batch/2d:4x16")
    times = {}
    for hidden in (None, 0.5, 1.0):
        software = engine._replace(overlap=hidden and engine.overlap._replace(fraction=hidden))
        found = breakdown(Request(load_model("palm-540b"), machine, software, 64, work), plan, 64)
        times[hidden] = {bound: sum(item.parts[bound] for item in found.tpot.items) for bound in BOUNDS}
    whole, busy = times[None]["network"], times[None]["compute"] + times[None]["memory"]
    assert times[1.0]["memory"] == pytest.approx(times[None]["memory"])
    # what the ends of the model wait for is not hidden
    assert whole - busy * 1.001 <= times[1.0]["network"] < times[0.5]["network"] < whole
    assert whole - times[1.0]["network"] == pytest.approx(2 * (whole - times[0.5]["network"]))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_explained_is_what_is_ranked(seed: int) -> None:
    request = problem(seed)
    try:
        ranking = rank(request)
    except NoPlanError:
        return
    row = ranking.results.row(0)
    found = breakdown(request, plan_of(ranking.results, 0), row["concurrency"])
    assert {name: value for name, value in found.row.items() if name not in ("rank", "tie", "flips_if")} == {
        name: value for name, value in row.items() if name not in ("rank", "tie", "flips_if")
    }
    for times, column in ((found.ttft, "ttft_ms"), (found.tpot, "tpot_ms")):
        together = sum(item.seconds for item in times.items)
        assert together == pytest.approx(row[column] * MS, rel=EXACT)
        assert times.total == pytest.approx(together, rel=EXACT)
    assert sum(found.goal_items().values()) == pytest.approx(found.goal_value(), rel=EXACT)
    goals = {
        "latency": row["latency_ms"], "ttft": row["ttft_ms"], "tpot": row["tpot_ms"],
        "throughput": row["gpu_s_per_token"] / MS,
        "cost": row["gpu_s_per_token"] / MS if row["usd_per_mtok"] is None else row["usd_per_mtok"],
    }  # fmt: skip
    assert found.goal_value() == pytest.approx(goals[request.objective], rel=EXACT)
    assert sum(found.memory.values()) == pytest.approx(row["memory_limit_gib"] * GIB, rel=EXACT)
    assert found.memory["weights"] == pytest.approx(row["weights_gib"] * GIB)
    assert min(found.memory.values()) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_faster_than_its_floor(seed: int) -> None:
    request = problem(seed)
    try:
        row = (ranking := rank(request)).results.row(0)
    except NoPlanError:
        return
    found = breakdown(request, plan_of(ranking.results, 0), row["concurrency"])
    for times in (found.ttft, found.tpot):
        own = floored(times)
        assert 0 < own.whole.floor <= own.total * (1 + EXACT)
        if request.hardware.roofline == "per_op":
            for item in own.items:
                assert item.floor <= item.seconds * (1 + EXACT), item


def test_a_decode_step_is_the_same_whatever_the_schedule() -> None:
    for plan in ("TP4", "TP2xPP2", "PP3"):
        continuous, static = (
            explained("llama3-8b", "h100", "vllm", plan, 24, isl=900, osl=100, schedule=schedule)
            for schedule in ("continuous", "static")
        )
        assert continuous.tpot.phase(STEP).total == pytest.approx(static.tpot.total, rel=EXACT)
        assert static.tpot.phases == [STEP]


def test_a_prefill_that_runs_alone_stalls_others_for_as_long_as_it_takes() -> None:
    """E = the prompt's own pass; TPOT = D + (b - 1) E / (osl - 1)."""
    found = explained("llama3-8b", "h100", "sglang", "TP2", 16, isl=700, osl=100, arrivals="steady")
    own = found.ttft.phase(OWN).total
    assert found.tpot.phase(OTHERS).total == pytest.approx(15 * own / 99, rel=EXACT)
    assert found.tpot.phase(STEP).total + found.tpot.phase(OTHERS).total == pytest.approx(found.tpot.total, rel=EXACT)


def test_waves_move_half_of_the_stall_into_ttft() -> None:
    steady, waves = (
        explained("llama3-8b", "h100", "vllm", "TP2", 16, isl=700, osl=100, arrivals=arrivals)
        for arrivals in ("steady", "waves")
    )
    assert waves.tpot.phase(OTHERS).total == pytest.approx(steady.tpot.phase(OTHERS).total / 2)
    assert waves.ttft.phase(OTHERS).total == pytest.approx(99 * steady.tpot.phase(OTHERS).total / 2)


def test_a_decode_step_reads_every_weight_but_the_embedding_once() -> None:
    found = explained("llama3-8b", "h100", "vllm", "TP1", 7, isl=1000, osl=200)
    model = found.request.model
    step = found.tpot.phase(STEP)
    read = sum(item.work["weight_bytes"] for item in step.items)
    parameters = read / 2
    assert parameters == model.vocab * model.hidden * -1 + 8030261248  # as published, less the embedding
    dense = sum(item.work["flops"] for item in step.items if "attention" not in item.name)
    assert dense == pytest.approx(2 * 7 * matmul_parameters(model), rel=EXACT)
    (attention,) = (item for item in step.items if item.name == "attention (decode)")
    assert attention.work["kv_bytes"] == 32 * 7 * 1100 * 2 * 1024 * 2  # layers, requests, context, K and V, width, bf16
    assert attention.work["flops"] == 32 * 7 * 1100 * 4 * 4096
    chip = found.request.hardware.chip
    assert attention.floor == pytest.approx(attention.work["kv_bytes"] / chip.memory_bandwidth)


def test_the_floor_of_a_collective_is_its_bytes_over_the_wires() -> None:
    """A100: 300 GB/s a port and direction, no reducing switch, so that 2 (K-1)/K of the buffer leave each rank."""
    found = explained("llama3-8b", "a100-80gb-sxm", "vllm", "TP4", 3)
    (item,) = (item for item in found.tpot.phase(STEP).items if item.name == "all-reduce")
    size = 3 * 4096 * 2.0
    assert item.work["sent_bytes"] == 2 * 32 * size
    assert item.floor == pytest.approx(2 * 32 * 2 * 3 / 4 * size / found.request.hardware.network[0].link)
    assert item.floor_bound == "network"
    assert item.bound == "network"


def test_a_pipeline_names_its_sends_and_its_bubble() -> None:
    found = explained("llama3-70b", "h100", "vllm", "TP4xPP4", 64)
    names = {item.name for item in found.tpot.phase(STEP).items}
    assert {"send", "bubble", "host", "all-reduce"} <= names
    tokens = 64 / 4
    (send,) = (item for item in found.tpot.phase(STEP).items if item.name == "send")
    assert send.work["sent_bytes"] == 3 * tokens * 8192 * 2


def test_a_plan_without_room_is_refused_with_the_reason() -> None:
    with pytest.raises(NoPlanError, match=r"TP2: KV room for \d+ requests"):
        explained("llama3-70b", "h100", "vllm", "TP2", 1000)


def test_the_difference_of_two_plans_is_that_of_their_terms() -> None:
    for seed in range(10):
        request = problem(seed)
        try:
            results = rank(request).results
        except NoPlanError:
            continue
        loads = results["concurrency"].astype(int).tolist()
        plans = [breakdown(request, plan_of(results, index), load) for index, load in enumerate(loads[:3])]
        goals = [plan.goal_value() for plan in plans]
        for rows in (lines(plans), brought_together(lines(plans), goals[0] * 0.02)):
            for place, goal in enumerate(goals):
                assert sum(row.values[place] for row in rows) == pytest.approx(goal, rel=EXACT)
                together = sum(row.differences[place] for row in rows)
                assert together == pytest.approx(goal - goals[0], abs=EXACT * goals[0])


def test_an_answer_of_one_token_has_no_tpot() -> None:
    found = explained("llama3-8b", "h100", "vllm", "TP1", osl=1)
    assert found.tpot.items == ()
    priced = estimate_one({"model": "llama3-8b", "plan": "TP1", "osl": 1}).row(0)
    assert found.goal_value() == pytest.approx(priced["latency_ms"])
