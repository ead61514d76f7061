"""The change that is said to help most is the best of all that were tried, each asked as a request of its own."""

from __future__ import annotations

from typing import Any

import pytest
from problems import problem

from planner import NoPlanError, Request, Workload, load_machine, load_model, rank
from planner.explaining import changes as room
from planner.explaining.breakdown import breakdown, pinned, plan_of
from planner.explaining.changes import Change, changes, effects
from planner.explaining.goal import goal_value
from planner.plans.plan import Plan
from planner.ranking import Ranking
from planner.report.explain import best_change

BETTER_MACHINES = (
    "twice the memory bandwidth", "twice the compute", "links inside a node twice as fast, at half the latency",
    "no host time", "no launch time of kernels",
)  # fmt: skip


def goal_of(results: Any, objective: str) -> float:
    """The goal of the first row from its columns alone."""
    row = results.row(0)
    if objective in ("throughput", "cost"):
        dollars = row["usd_per_mtok"] if objective == "cost" else None
        return float(row["gpu_s_per_token"] * 1e3 if dollars is None else dollars)
    return float(row[f"{objective}_ms"])


@pytest.mark.parametrize("seed", range(53))
def test_the_stated_change_is_the_best_of_the_perturbed_runs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = problem(seed, chips=(1, 2), few=True)
    try:
        ranking = rank(request)
    except NoPlanError:
        return
    runs: list[float] = []

    def watched(changed: Request) -> Ranking:
        assert changed != request
        done = rank(changed)
        runs.append(goal_of(done.results, changed.objective))
        return done

    monkeypatch.setattr(room, "rank", watched)
    now = goal_value(ranking.results, 0, request.objective)
    assert now == pytest.approx(goal_of(ranking.results, request.objective), rel=1e-9)
    found = effects(request, now, changes())
    known = [effect for effect in found if effect.value is not None]
    assert len(known) == len(runs) >= 5
    best = known[0]
    assert best.value == pytest.approx(min(runs), rel=1e-9)
    assert best.gain == pytest.approx(1 - min(runs) / now, abs=1e-9)
    plan = breakdown(request, plan_of(ranking.results, 0), ranking.results.row(0)["concurrency"])
    said = best_change(plan, found)
    assert best.change.name in said or best.gain <= 0
    if request.workload.concurrency is not None:
        for effect in known:
            if effect.change.name in BETTER_MACHINES:
                assert effect.gain >= -1e-9, effect


def llama(plan: str | None = None, **work: Any) -> Request:
    machine, software = load_machine("h100", "vllm")
    gpus = 8 if plan is None else Plan.parse(plan).chips
    return Request(load_model("llama3-70b"), machine, software, gpus, Workload(**work))


def named(request: Request, name: str) -> Request:
    (change,) = (change for change in changes() if change.name == name)
    changed = change.apply(request)
    assert changed is not None
    return changed


def test_a_plan_that_is_pinned_stays_unless_the_change_is_another_plan_or_other_chips() -> None:
    request, plan = llama("TP4xDP2", concurrency=2), Plan.parse("TP4xDP2")
    now = goal_value(rank(pinned(request, plan)).results, 0, "latency")
    found = {effect.change.name: effect for effect in effects(request, now, changes(), plan)}
    for name, effect in found.items():
        if effect.change.kind not in ("chips", "plan"):
            assert effect.plan == "TP4xDP2", name
    assert found["the best plan of these chips"].plan == "TP8"
    assert found["twice the chips"].plan != "TP4xDP2"
    assert found["the best plan of these chips"].gain > 0


def test_the_winner_is_not_told_to_be_the_winner() -> None:
    request = llama()
    now = goal_value(rank(request).results, 0, "latency")
    assert "plan" not in {effect.change.kind for effect in effects(request, now, changes())}


def test_a_change_changes_one_input_and_nothing_else() -> None:
    request = llama()
    bandwidth = named(request, "twice the memory bandwidth")
    chip = request.hardware.chip
    assert bandwidth.hardware.chip == chip._replace(memory_bandwidth_gb_per_s=2 * chip.memory_bandwidth_gb_per_s)
    assert bandwidth._replace(hardware=request.hardware) == request
    links = named(request, "links inside a node twice as fast, at half the latency")
    assert links.hardware.network[0].link == 2 * request.hardware.network[0].link
    assert links.hardware.network[1:] == request.hardware.network[1:]
    here = request.hardware.network[0].name
    for before, after in zip(request.hardware.collectives, links.hardware.collectives, strict=True):
        assert (before == after) == (before.level != here)
        for ranks, row in after.ranks.items():
            assert row.latency_us == before.ranks[ranks].latency_us * (0.5 if before.level == here else 1)
    idle = named(request, "no host time").engine.host
    assert (idle.step_us, idle.per_sequence_us, idle.request_us, idle.provenance) == (
        0, 0, 0, request.engine.host.provenance,
    )  # fmt: skip
    assert named(request, "fp8 weights").workload == request.workload._replace(weights="fp8", kv_cache="bf16")
    assert named(request, "half the prompt").workload.isl == 512


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("fp8 weights", llama(weights="fp8")),
        ("int4 weights", llama(weights="int4")),
        ("fp8 KV cache", llama(kv_cache="fp8")),
        ("half the prompt", llama(isl=1)),
        ("half the chips", llama("TP1")),
        ("links between nodes twice as fast, at half the latency", llama()),
    ],
)
def test_what_is_so_already_is_not_tried(name: str, request_: Request) -> None:
    (change,) = (change for change in changes() if change.name == name)
    assert change.apply(request_) is None


def test_a_change_that_leaves_no_plan_says_why() -> None:
    request = llama("TP2", concurrency=1)
    now = goal_value(rank(request).results, 0, "latency")
    found = effects(request, now, changes())
    (halved,) = (effect for effect in found if effect.change.name == "half the chips")
    assert halved.value is None
    assert "fits in memory" in (halved.error or "")
    assert found[-1] is halved


def test_other_engines_are_changes_of_machine() -> None:
    request = llama(concurrency=8)
    now = goal_value(rank(request).results, 0, "latency")
    machines = [load_machine("h100", name) for name in ("vllm", "sglang", "trtllm")]
    engines = [effect for effect in effects(request, now, changes(machines)) if effect.change.kind == "engine"]
    assert {effect.change.name for effect in engines} == {"engine sglang", "engine trtllm"}
    other = load_machine("h100", "trtllm")
    alone = rank(request._replace(hardware=other[0], engine=other[1]))
    (effect,) = (effect for effect in engines if effect.change.name == "engine trtllm")
    assert effect.value == pytest.approx(alone.results["latency_ms"][0])


def test_changes_are_data() -> None:
    assert all(isinstance(change, Change) for change in changes())
    assert len({change.name for change in changes()}) == len(changes())
