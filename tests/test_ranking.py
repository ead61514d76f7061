"""Ranking: the order for every goal, limits, and refusals with reasons."""

from __future__ import annotations

import re
import warnings
from ast import literal_eval
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from asking import by_plan, request, works

from planner import (
    Filters,
    InputError,
    Limits,
    NoPlanError,
    Ranking,
    Request,
    Results,
    Workload,
    estimate,
    load_machine,
    load_model,
    plan,
    rank,
)
from planner.estimating import estimate_points
from planner.pricing import price_all
from planner.ranking import ASSUMED_ERROR, MEASURED_ERROR, _order, error_bar, metric
from planner.request import OBJECTIVES
from planner.results import COLUMNS

MS = 1e-3
TIMES = ("ttft", "tpot", "latency")


# --- order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("concurrency", [None, 24])
def test_rows_are_in_the_order_of_the_goal(objective: Any, concurrency: int | None) -> None:
    results = rank(request(objective=objective, work={"concurrency": concurrency})).results
    column = {"throughput": "tokens_per_s", "cost": "usd_per_mtok"}.get(objective, f"{objective}_ms")
    values = results[column].astype(float)
    values = -values if objective == "throughput" else values
    assert len(values) > 10
    assert np.all(np.diff(values) >= -1e-8 * np.abs(values[1:]))
    assert results["rank"].tolist() == list(range(1, len(values) + 1))
    assert set(results["objective"]) == {objective}
    assert len(set(results["plan"])) == len(results), "a plan has one row: its best load"


def test_cost_without_a_price_is_chip_seconds() -> None:
    machine, engine = load_machine("h100-sxm")
    free = machine._replace(price=None)
    asked = Request(load_model("llama3-70b"), free, engine, 16, Workload(concurrency=8), "cost")
    results = rank(asked).results
    assert np.all(np.isnan(results["usd_per_mtok"]))
    assert np.all(np.diff(results["gpu_s_per_token"].astype(float)) >= -1e-12)
    priced = rank(asked._replace(usd_per_chip_hour=2.0)).results
    assert priced["plan"].tolist() == results["plan"].tolist()
    expected = 2.0 / 3600 * results["gpu_s_per_token"].astype(float) * 1e6
    assert priced["usd_per_mtok"].astype(float) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_tie_is_a_row_within_the_published_error_of_the_row_above(objective: Any) -> None:
    rows = rank(request(objective=objective, gpus=24)).results.rows()
    assert MEASURED_ERROR == 0.10
    assert rows[0]["tie"] is None
    key = {"throughput": "tokens_per_s", "cost": "usd_per_mtok"}.get(objective, f"{objective}_ms")
    for above, row in pairwise(rows):
        ratio = above[key] / row[key] if objective == "throughput" else row[key] / above[key]
        assert row["tie"] is (ratio <= 1.10)
    assert {row["tie"] for row in rows[1:]} == {True, False}


@pytest.mark.parametrize(
    ("hardware", "engine", "bar"),
    [
        ("h100-sxm", "vllm", MEASURED_ERROR),
        ("b200-sxm", "trtllm", MEASURED_ERROR),
        ("b200-sxm", "sglang", ASSUMED_ERROR),  # whose runs were on H100 and H200
        ("l40s", "vllm", ASSUMED_ERROR),
        ("h100-sxm", "vllm-0.8", ASSUMED_ERROR),
        ("mi300x", "vllm-rocm", ASSUMED_ERROR),  # in 16 bit; its runs were in fp8
        ("l40s", "ideal", ASSUMED_ERROR),
        ("h100-sxm", "ideal", MEASURED_ERROR),
        ("h100-lecture", "lecture", MEASURED_ERROR),
    ],
)
def test_the_error_bar_is_wider_where_nothing_of_the_kind_was_measured(hardware: str, engine: str, bar: float) -> None:
    machine, software = load_machine(hardware, engine)
    assert error_bar(request()._replace(hardware=machine, engine=software)) == bar


def made_up(**columns: list[Any]) -> Results:
    """Results with the columns that decide an order; `used` chips of 16."""
    used = np.array(columns.pop("used"), dtype=float)
    gpus = np.full(len(used), 16.0)
    made = {name: np.array(values, dtype=object if name == "plan" else float) for name, values in columns.items()}
    return Results({**made, "gpus": gpus, "idle_gpus": gpus - used})


def ordered(results: Results) -> list[str]:
    """Labels in the order of a ranking for latency."""
    labels: list[str] = results.take(_order(results, "latency"))["plan"].tolist()
    return labels


def test_equals_are_ordered_by_room_then_chips_then_tp_then_text() -> None:
    results = made_up(
        plan=["slow", "b", "a", "tp4", "tp2", "small", "roomy", "fast"],
        latency_ms=[101.0, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 99.0],
        max_concurrency=[900, 10, 10, 10, 10, 10, 20, 1],
        used=[2, 16, 16, 8, 8, 4, 16, 16],
        tp=[1, 8, 8, 4, 2, 4, 8, 16],
    )
    assert ordered(results) == ["fast", "roomy", "small", "tp2", "tp4", "a", "b", "slow"]


def test_two_ways_of_adding_the_same_numbers_are_equal() -> None:
    results = made_up(
        plan=["roomy", "small"],
        latency_ms=[0.1 + 0.2, 0.3],
        max_concurrency=[20, 10],
        used=[8, 8],
        tp=[1, 1],
    )
    assert ordered(results) == ["roomy", "small"]
    apart = made_up(
        plan=["a", "b"], latency_ms=[0.3 * (1 + 1e-7), 0.3], max_concurrency=[20, 10], used=[8, 8], tp=[1, 1]
    )
    assert ordered(apart) == ["b", "a"]


def test_of_two_plans_as_fast_the_one_with_more_replicas_comes_first() -> None:
    """One request is as fast on one replica of TP8 as on two; the second holds others."""
    results = rank(request(filters=Filters(tp=(8,), pp=(1,), dp=(1, 2)))).results
    assert results["plan"].tolist() == ["TP8xDP2", "TP8"]
    assert results["latency_ms"][0] == results["latency_ms"][1]
    assert results["tie"].tolist() == [None, True]


def test_answers_of_one_token_are_ranked_without_a_time_between_tokens() -> None:
    """As a goal that time makes no sense then."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for objective in ("latency", "ttft", "throughput"):
            results = rank(request(objective=objective, work={"osl": 1})).results  # type: ignore[arg-type]
            assert all(row["tpot_ms"] is None for row in results.rows())
            assert np.all(results["latency_ms"] == results["ttft_ms"])
    with pytest.raises(InputError, match="--objective tpot needs answers of at least 2 tokens"):
        rank(request(objective="tpot", work={"osl": 1}))


def test_metric_is_what_is_minimised() -> None:
    results = rank(request(gpus=8, objective="throughput")).results
    assert metric(results, "throughput") == pytest.approx(1 / results["tokens_per_s"], rel=1e-15)
    assert metric(results, "tpot") == pytest.approx(results["tpot_ms"], rel=1e-15)
    assert metric(results, "cost") == pytest.approx(results["usd_per_mtok"], rel=1e-15)


# --- loads ----------------------------------------------------------------------------------------------------------


def loads_up_to(most: int) -> list[int]:
    """Powers of two, the halves between them, and the exact capacity."""
    steps = {step for power in range(25) for step in (2**power, 3 * 2**power // 2) if step < most}
    return [*sorted(steps), most]


def test_loads_that_are_looked_at() -> None:
    assert loads_up_to(1) == [1]
    assert loads_up_to(8) == [1, 2, 3, 4, 6, 8]
    assert loads_up_to(70) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 70]


def keeping(results: Results, limits: Limits) -> Any:
    """Which rows keep the limits on time."""
    keeps = np.ones(len(results), dtype=bool)
    for name in TIMES:
        limit = getattr(limits, name)
        keeps &= results[f"{name}_ms"] <= (np.inf if limit is None else limit / MS)
    return keeps


def priced_loads(asked: Request) -> dict[str, list[int]]:
    """The loads at which every plan is priced, ascending."""
    results = price_all(asked).results
    assert results is not None
    loads: dict[str, list[int]] = {}
    for label, load in zip(results["plan"], results["concurrency"], strict=True):
        loads.setdefault(label, []).append(int(load))
    return {label: sorted(own) for label, own in loads.items()}


@cache
def rooms() -> dict[str, int]:
    """The most requests of every plan."""
    return {row["plan"]: row["max_concurrency"] for row in rank(request()).results.rows()}


@pytest.mark.parametrize("objective", ["throughput", "cost"])
@pytest.mark.parametrize("limits", [Limits(), Limits(tpot=40 * MS), Limits(ttft=90 * MS, latency=9.0)])
def test_the_load_of_every_plan_is_the_best_that_keeps_the_limits(objective: Any, limits: Limits) -> None:
    """Of the loads of the grid, of the one that the limits add, and of one request more than that."""
    asked = request(objective=objective, limits=limits)
    ranking, looked_at = rank(asked), priced_loads(asked)
    rows = by_plan(ranking.results)
    most = rooms()
    assert ranking.points == sum(map(len, looked_at.values()))
    assert ranking.points > ranking.plans > len(most) * 0.9
    for label, room in most.items():
        more = set(looked_at[label]) - set(loads_up_to(room))
        assert len(more) <= (limits != Limits())
        loads = sorted({*loads_up_to(room), *more, *(load + 1 for load in more)})
        points = {"model": ["llama3-70b"], "plan": [label], "gpus": [16], "concurrency": loads}
        results = estimate_points(points, len(loads))
        keeps = keeping(results, limits)
        if not keeps.any():
            assert label not in rows
            continue
        best = np.max(results["tokens_per_s"][keeps])
        assert rows[label]["tokens_per_s"] == pytest.approx(best, rel=1e-12)
        assert rows[label]["concurrency"] in loads


def test_a_plan_is_ranked_at_the_most_requests_that_keep_a_limit() -> None:
    """TP8xPP2 answers 49 requests within 5 s, where powers of two and their halves stop at 48."""
    rows = by_plan(rank(request(objective="throughput", limits=Limits(latency=5.0))).results)
    for label, most in {"TP8xPP2": 49, "TP8xDP2": 66}.items():
        assert rows[label]["concurrency"] == most
        these, more = (estimate("llama3-70b", plan=label, gpus=16, concurrency=load) for load in (most, most + 1))
        assert these["latency_ms"] <= 5000 < more["latency_ms"]
        assert rows[label]["latency_ms"] == pytest.approx(these["latency_ms"], rel=1e-12)
        assert rows[label]["tokens_per_s"] == pytest.approx(these["tokens_per_s"], rel=1e-12)


@cache
def median_times(model: str, gpus: int, hardware: str, options: str) -> dict[str, float]:
    """Medians over every plan and load, without limits, in ms; the options as they print."""
    free = price_all(request(model, gpus, hardware, **literal_eval(options))).results
    assert free is not None
    return {name: float(np.median(free[f"{name}_ms"])) for name in TIMES}


@pytest.mark.parametrize("limits", [{"ttft": 1.0}, {"tpot": 1.0}, {"latency": 1.0}, {"ttft": 1.5, "tpot": 1.2}])
@pytest.mark.parametrize(
    ("model", "gpus", "hardware", "options"),
    [
        ("llama3-70b", 16, "h100-sxm", {"objective": "throughput"}),
        ("llama3-70b", 12, "h100-sxm", {"objective": "throughput", "work": {"schedule": "static"}}),
        ("llama3-8b", 8, "h100-lecture", {"objective": "cost", "work": {"schedule": "static", "isl": 300}}),
        ("llama3-8b", 8, "tpu-v5e", {"pareto": True, "work": {"arrivals": "waves"}}),
    ],
)
def test_one_request_more_than_the_most_breaks_a_limit_or_does_not_fit(
    model: str, gpus: int, hardware: str, options: dict[str, Any], limits: dict[str, float]
) -> None:
    """Limits are medians over every plan and load without them, times a factor."""
    medians = median_times(model, gpus, hardware, repr(options))
    times = {name: medians[name] * factor for name, factor in limits.items()}
    asked = request(model, gpus, hardware, limits=Limits(**{name: ms * MS for name, ms in times.items()}), **options)
    results = price_all(asked).results
    assert results is not None
    kept = results.take(np.flatnonzero(keeping(results, asked.limits)))
    most: dict[str, int] = {}
    for row in kept.rows():
        most[row["plan"]] = max(most.get(row["plan"], 0), row["concurrency"])
    rooms = {row["plan"]: row["max_concurrency"] for row in kept.rows()}
    short = [label for label, load in most.items() if load < rooms[label]]
    assert short, "no limit bites"
    points: dict[str, list[Any]] = {"model": [model], "hardware": [hardware], "gpus": [gpus], "plan": short}
    points |= {name: [value] for name, value in options.get("work", {}).items()}
    beyond = estimate_points({**points, "concurrency": [most[label] + 1 for label in short]}, len(short))
    assert not keeping(beyond, asked.limits).any()
    assert any(most[label] not in loads_up_to(rooms[label]) for label in short)
    assert len(set(zip(results["plan"], results["concurrency"], strict=True))) == len(results), "priced twice"


@pytest.mark.parametrize("options", [{"objective": "throughput"}, {"objective": "cost"}, {"pareto": True}])
def test_limits_only_add_a_load_and_without_them_there_is_none(options: dict[str, Any]) -> None:
    rooms = {row["plan"]: row["max_concurrency"] for row in rank(request()).results.rows()}
    free = priced_loads(request(**options))
    assert free == {label: loads_up_to(room) for label, room in rooms.items()}
    assert priced_loads(request(**options, limits=Limits(memory_fraction=0.9))) == free, "memory is no time"
    for limit in (0.001, 5.0, 1e6):  # nobody keeps it, some do, everybody does
        within = priced_loads(request(**options, limits=Limits(latency=limit)))
        added = {label: set(loads) - set(free[label]) for label, loads in within.items()}
        assert all(len(within[label]) == len(free[label]) + len(more) for label, more in added.items())
        assert max(map(len, added.values())) == (limit == 5.0)


def test_a_load_that_is_given_is_the_only_one_whatever_the_limits() -> None:
    asked = request(objective="throughput", work={"concurrency": 40}, limits=Limits(latency=5.0))
    assert set(map(tuple, priced_loads(asked).values())) == {(40,)}
    asked = request(objective="latency", limits=Limits(latency=5.0))
    assert set(map(tuple, priced_loads(asked).values())) == {(1,)}


def test_the_exact_capacity_is_among_the_loads() -> None:
    rows = plan("llama3-8b", 8, hardware="h100-lecture", objective="throughput", schedule="static", isl=1, osl=2047)
    assert rows[0]["plan"] == "TP2xDP4"
    assert rows[0]["concurrency"] == rows[0]["max_concurrency"] == 4 * 476


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_load_that_is_given_is_kept_and_one_request_is_the_default_of_times(objective: Any) -> None:
    given = rank(request(objective=objective, work={"concurrency": 5})).results
    assert set(given["concurrency"]) == {5.0}
    searched = set(rank(request(objective=objective)).results["concurrency"])
    assert (searched == {1.0}) == (objective in TIMES)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_rows_keep_the_limit_and_the_others_say_how_close_they_come(name: str, objective: Any) -> None:
    free = rank(request(objective=objective, work={"concurrency": 16})).results
    limit = float(np.median(free[f"{name}_ms"].astype(float)))
    ranking = rank(request(objective=objective, work={"concurrency": 16}, limits=Limits(**{name: limit * MS})))
    kept, refused = by_plan(ranking.results), {item.plan.label: item for item in ranking.refused if item.limit == "slo"}
    assert all(row[f"{name}_ms"] <= limit for row in kept.values())
    assert len(kept) > 3
    assert len(refused) > 3
    for row in free.rows():
        if row[f"{name}_ms"] <= limit:
            assert row["plan"] in kept
        else:
            assert refused[row["plan"]].reason == f"{name} {row[f'{name}_ms']:.4g} ms > {limit:g} ms"


def test_a_memory_limit_is_the_budget() -> None:
    ranking = rank(request(limits=Limits(memory=40 * 2.0**30)))
    assert set(ranking.results["memory_limit_gib"]) == {40.0}
    assert np.all(ranking.results["memory_gib"] <= 40)
    assert {row["tp"] * row["pp"] for row in ranking.results.rows()} == {
        row["tp"] * row["pp"] for row in rank(request()).results.rows() if row["memory_gib"] <= 40
    }
    half = rank(request(limits=Limits(memory_fraction=0.5))).results
    assert half["memory_limit_gib"] == pytest.approx(np.full(len(half), 39.6))


# --- Pareto ---------------------------------------------------------------------------------------------------------


def every_point(asked: Request) -> Results:
    """Every plan at every load, priced one table at a time."""
    rooms = rank(asked._replace(pareto=False, objective="latency")).results.rows()
    pairs = [(row["plan"], load) for row in rooms for load in loads_up_to(row["max_concurrency"])]
    points = {
        "model": [asked.model.name], "hardware": [asked.hardware.name], "engine": [asked.engine.name],
        "gpus": [asked.gpus], "plan": [label for label, _ in pairs], "concurrency": [load for _, load in pairs],
    }  # fmt: skip
    return estimate_points(points, len(pairs))


@pytest.mark.parametrize(("hardware", "engine"), [("h100-sxm", "vllm"), ("h100-lecture", "lecture")])
def test_the_frontier_is_undominated_and_complete(hardware: str, engine: str) -> None:
    asked = request("llama3-8b", 8, hardware, engine, pareto=True)
    front, everything = rank(asked).results, every_point(asked)
    tpot, rate = everything["tpot_ms"].astype(float), everything["tokens_per_s_per_gpu"].astype(float)
    kept = {(row["tpot_ms"], row["tokens_per_s_per_gpu"]) for row in front.rows()}
    assert len(front) > 5
    slack = 1e-12
    for low, high in kept:
        better = (tpot <= low * (1 + slack)) & (rate > high * (1 + slack))
        better |= (tpot < low * (1 - slack)) & (rate >= high * (1 - slack))
        assert not better.any(), "a row of the frontier is beaten by another point"
    for low, high in zip(tpot, rate, strict=True):
        as_good = [a <= low * (1 + slack) and b >= high * (1 - slack) for a, b in kept]
        assert any(as_good), "a point is beaten by no row of the frontier"
    assert np.all(np.diff(front["tpot_ms"].astype(float)) > 0)
    assert np.all(np.diff(front["tokens_per_s_per_gpu"].astype(float)) > 0)


def test_the_frontier_keeps_the_limits() -> None:
    free = rank(request("llama3-8b", 8, pareto=True)).results
    limit = float(np.median(free["tpot_ms"].astype(float)))
    within = rank(request("llama3-8b", 8, pareto=True, limits=Limits(tpot=limit * MS))).results
    assert np.all(within["tpot_ms"] <= limit)
    between = ~np.isin(within["concurrency"], loads_up_to(2**20)) & (within["concurrency"] < within["max_concurrency"])
    assert between.any(), "the most requests that keep the limit are no power of two"
    kept = free["tpot_ms"] <= limit
    for tpot, rate in zip(free["tpot_ms"][kept], free["tokens_per_s_per_gpu"][kept], strict=True):
        as_good = (within["tpot_ms"] <= tpot) & (within["tokens_per_s_per_gpu"] >= rate)
        assert as_good.any(), "a row that keeps the limit is lost"


# --- refused plans --------------------------------------------------------------------------------------------------


def test_every_plan_is_ranked_or_refused_with_its_reason() -> None:
    ranking = rank(request(limits=Limits(tpot=20 * MS), work={"isl": 4096, "osl": 512, "concurrency": 40}))
    refused = {item.plan.label: item for item in ranking.refused}
    assert not set(refused) & set(ranking.results["plan"])
    kinds: dict[str, list[str]] = {"rule": [], "memory": [], "slo": []}
    for item in ranking.refused:
        assert item.reason
        kinds[item.limit].append(item.reason)
    assert all("tp" in reason for reason in kinds["rule"])
    assert any("query heads" in reason for reason in kinds["rule"])
    assert any(re.fullmatch(r"weights \d+\.\d GiB \+ runtime \d+\.\d GiB exceed the limit of 71\.3 GiB per chip", r)
               for r in kinds["memory"])  # fmt: skip
    room = r"KV room for \d+ requests of 4608 tokens, 40 asked( \([\d.]+ GiB on the fullest chip, [\d.]+ GiB free\))?"
    assert any(re.fullmatch(room, reason) for reason in kinds["memory"])
    assert all(re.fullmatch(r"tpot [\d.]+ ms > 20 ms", reason) for reason in kinds["slo"])
    assert len(kinds["slo"]) > 3
    # plans that rules allow are ranked, or refused for memory or time
    assert ranking.plans == len(ranking.results) + len(kinds["memory"]) + len(kinds["slo"])


def test_a_plan_that_memory_refuses_is_refused_for_the_figures_that_estimate_shows() -> None:
    ranking = rank(request("llama3-70b", 2, work={"concurrency": 5}))
    kept = by_plan(ranking.results)
    for label in ("TP2", "PP2"):
        row = estimate_points({"model": ["llama3-70b"], "plan": [label], "concurrency": [5]}, 1).row(0)
        if row["max_concurrency"] is not None and row["max_concurrency"] >= 5:
            assert label in kept
        else:
            reason = next(item.reason for item in ranking.refused if item.plan.label == label)
            assert reason.startswith(f"KV room for {row['max_concurrency']} requests of 1280 tokens, 5 asked")


def test_a_budget_without_room_for_what_lies_outside_it_refuses_plans() -> None:
    """98 % of the chip and 3 GiB of context and graphs do not fit on it."""
    with pytest.raises(NoPlanError, match=r"leaves no room for the 3\.0 GiB that the engine takes outside it"):
        rank(request("llama3-8b", 2, limits=Limits(memory_fraction=0.98), filters=Filters(tp=(2,))))


# --- requests that make no sense ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (request(gpus=0), "--gpus must be at least 1, found 0"),
        (request(gpus=-4), "--gpus must be at least 1, found -4"),
        (request(work={"isl": 0}), "--isl must be at least 1, found 0"),
        (request(work={"osl": 0}), "--osl must be at least 1, found 0"),
        (request(work={"concurrency": 0}), "--concurrency must be at least 1, found 0"),
        (
            request(work={"isl": 8000, "osl": 193}),
            "isl 8000 + osl 193 = 8193 tokens is more than llama3-70b's context of 8192; shorten them, or give "
            "--max-context if the deployment extends it",
        ),
        (request(work={"weights": "int3"}), "--weights: unknown dtype 'int3'"),
        (request(work={"kv_cache": "int4"}), "--kv-cache: unknown dtype 'int4'"),
    ],
)
def test_a_request_that_makes_no_sense_is_bad_input(asked: Request, text: str) -> None:
    with pytest.raises(InputError) as stop:
        rank(asked)
    assert stop.value.exit_status == 2
    assert text in str(stop.value)


def test_the_whole_context_may_be_used_and_exceeded_when_asked() -> None:
    assert works(request(work={"isl": 8000, "osl": 192}))
    assert works(request(work={"isl": 8000, "osl": 193, "max_context": 8193}))


# --- the call by keyword --------------------------------------------------------------------------------------------


def test_plan_by_keyword_is_the_ranking_of_the_same_request() -> None:
    rows = plan(
        "llama3-70b", 16, objective="cost", isl=2000, osl=100, max_ttft_ms=500, max_tpot_ms=60, max_latency_ms=9000,
        memory_limit="70GiB", price=3.0, filters=Filters(tp=(4, 8)), arrivals="waves", weights="fp8", kv_cache="fp8",
    )  # fmt: skip
    limits = Limits(0.5, 0.06, 9.0, 70 * 2.0**30)
    work = {"isl": 2000, "osl": 100, "arrivals": "waves", "weights": "fp8", "kv_cache": "fp8"}
    same: Ranking = rank(
        request(objective="cost", work=work, limits=limits, filters=Filters(tp=(4, 8)), usd_per_chip_hour=3.0)
    )
    assert rows == same.results.rows()
    assert tuple(rows[0]) == COLUMNS
    assert {row["tp"] for row in rows} == {4, 8}


def test_a_frontier_over_chips_is_that_of_all_its_frontiers_together() -> None:
    chip, engine = load_machine("h100", None)
    asked = Request(load_model("llama3-8b"), chip, engine, 4, Workload(), pareto=True, fewest=True)
    whole = rank(asked).results
    apart = [rank(asked._replace(gpus=chips, fewest=False)).results for chips in (1, 2, 4)]
    points = [(row["tpot_ms"], row["tokens_per_s_per_gpu"]) for one in apart for row in one.rows()]
    kept = {one for one in points if not any(o[0] <= one[0] and o[1] >= one[1] and o != one for o in points)}
    assert {(row["tpot_ms"], row["tokens_per_s_per_gpu"]) for row in whole.rows()} == kept
    assert len({row["gpus"] for row in whole.rows()}) > 1
    assert list(whole["rank"]) == list(range(1, len(whole) + 1))


def test_the_frontier_of_palm_over_chips_trades_latency_for_cost() -> None:
    """Pope et al. 2022, figure 1: more chips and small batches are fast, fewer and large ones cheap."""
    chip, engine = load_machine("tpu-v4", None)
    filters, work = Filters(pp=(1,)), Workload(isl=1984, osl=64)
    asked = Request(load_model("palm-62b"), chip, engine, 32, work, filters=filters, pareto=True, fewest=True)
    rows = rank(asked).results.rows()
    assert rows[0]["concurrency"] < rows[-1]["concurrency"]
    assert rows[0]["tp"] > rows[-1]["tp"]
    cost = [row["gpu_s_per_token"] for row in rows]
    assert cost == sorted(cost, reverse=True)
