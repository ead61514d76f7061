"""Flips really flip, by a pricing that knows nothing of the search; rooms end where they are said to."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from problems import problem

from planner import NoPlanError, Request, Workload, load_machine, load_model, rank
from planner.estimating import estimate_points
from planner.explaining.breakdown import pinned, plan_of
from planner.explaining.comparison import Candidate, candidate, contest, evaluate, goals, ranges, room
from planner.plans.plan import Plan


def llama(*plans: str, model: str = "llama3-70b", gpus: int = 8, goal: Any = "latency", **work: Any) -> list[Candidate]:
    machine, software = load_machine("h100", "vllm")
    request = Request(load_model(model), machine, software, gpus, Workload(**work), goal)
    return [candidate("", request, Plan.parse(plan)) for plan in plans]


def latency(one: Candidate, concurrency: int, isl: int) -> float:
    """By the table of points, which has no search in it; infinite where not all requests fit."""
    work = one.request.workload
    options = {
        "model": one.request.model.name, "hardware": one.request.hardware.name, "engine": one.request.engine.name,
        "plan": one.plan.label, "gpus": one.request.gpus, "isl": isl, "osl": work.osl, "concurrency": concurrency,
        "schedule": work.schedule, "arrivals": work.arrivals, "weights": work.weights, "kv_cache": work.kv_cache,
    }  # fmt: skip
    row = estimate_points({name: [value] for name, value in options.items()}, 1).row(0)
    short = row["error"] is not None or concurrency > row["max_concurrency"]
    return float("inf") if short else float(row["latency_ms"])


@pytest.mark.parametrize("seed", range(12))
def test_a_flip_flips(seed: int) -> None:
    draw = Random(seed)
    request = problem(seed, chips=(4,))._replace(objective="latency")
    if request.workload.concurrency is None:
        request = request._replace(workload=request.workload._replace(concurrency=4))
    try:
        results = rank(request).results
    except NoPlanError:
        return
    if len(results) < 2:
        return
    picked = draw.sample(range(len(results)), 2)
    pair = [candidate("", request, plan_of(results, index)) for index in picked]
    ends = ranges(pair, [room(one) for one in pair])
    for axis, high in ends.items():
        found = contest(pair, (0, 1), axis, high)
        load, isl = pair[0].concurrency, request.workload.isl
        for flip in found.flips:
            points = [(value, isl) if axis == "concurrency" else (load, value) for value in (flip.at - 1, flip.at)]
            before, after = ([latency(one, *point) for one in pair] for point in points)
            assert after[flip.after] < after[flip.before]
            assert before[flip.before] <= before[flip.after] * (1 + 2e-9)
            assert flip.refused == np.isinf(after[flip.before])
        for one, other in pairwise(found.flips):
            assert one.at < other.at
            assert one.after == other.before


def test_the_leader_is_the_one_that_takes_less() -> None:
    pair = llama("TP8", "TP4xDP2", weights="fp8")
    found = contest(pair, (0, 1), "concurrency", 200)
    (flip,) = found.flips
    assert (found.leader, flip.before, flip.after, flip.refused) == (0, 0, 1, False)
    assert latency(pair[0], 1, 1024) < latency(pair[1], 1, 1024)
    assert latency(pair[0], 200, 1024) > latency(pair[1], 200, 1024)
    assert found.ahead[0] == pytest.approx(latency(pair[1], 1, 1024) / latency(pair[0], 1, 1024) - 1)


def test_a_plan_that_runs_out_of_memory_leaves_the_lead() -> None:
    pair = llama("TP4xDP2", "TP8", model="llama3.1-70b", isl=32768, goal="throughput", concurrency=2)
    rooms = [room(one) for one in pair]
    assert rooms[0].requests < rooms[1].requests
    found = contest(pair, (0, 1), "concurrency", rooms[1].requests)
    last = found.flips[-1]
    assert (last.at, last.after, last.refused) == (rooms[0].requests + 1, 1, True)


def test_a_searched_load_is_searched_at_every_prompt() -> None:
    (one,) = llama("TP4xDP2", goal="throughput")
    values = evaluate(one, "isl", np.array([500, 4000]))
    for value, isl in zip(values, (500, 4000), strict=True):
        changed = one.request._replace(workload=one.request.workload._replace(isl=isl))
        assert value == pytest.approx(1e3 * rank(changed).results["gpu_s_per_token"][0])


def test_goals_are_those_of_the_ranking() -> None:
    for seed in range(10):
        request = problem(seed)
        try:
            results = rank(request).results
        except NoPlanError:
            continue
        row, one = results.row(0), candidate("", request, plan_of(results, 0))
        columns = {"throughput": row["gpu_s_per_token"] * 1e3, "cost": row["usd_per_mtok"]}
        said = columns.get(request.objective, row.get(f"{request.objective}_ms"))
        if said is not None:
            assert goals(one, row["concurrency"], row["isl"])[0] == pytest.approx(said, rel=1e-9)


def test_a_limit_on_time_that_breaks_is_no_lead() -> None:
    (one,) = llama("TP8", concurrency=1)
    limited = one._replace(request=one.request._replace(limits=one.request.limits._replace(tpot=0.012)))
    assert np.isfinite(goals(one, [1, 64], 1024)).all()
    assert np.isfinite(goals(limited, [1, 64], 1024)).tolist() == [True, False]


def test_the_room_is_what_fits_and_no_more() -> None:
    (one,) = llama("TP2", concurrency=2, isl=2000)
    found = room(one)
    assert np.isfinite(goals(one, [found.requests, found.requests + 1], 2000)).tolist() == [True, False]
    assert found.ends == "memory"
    assert np.isfinite(goals(one, 2, [found.isl, found.isl + 1])).tolist() == [True, False]
    roomy = room(llama("TP8")[0])
    assert (roomy.isl, roomy.ends) == (8192 - 256, "context")


def test_a_candidate_without_a_plan_is_the_winner() -> None:
    machine, software = load_machine("h100", "vllm")
    request = Request(load_model("llama3-70b"), machine, software, 8)
    one = candidate("", request, None)
    assert one.plan.label == rank(request).results["plan"][0] == one.label
    assert one.request == pinned(request, one.plan)
