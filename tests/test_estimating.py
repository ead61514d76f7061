"""Pricing plans that are given: no search, the order kept, and every bad row says what is wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Filters, InputError, NoPlanError, estimate, estimate_points, plan
from planner.points import DEFAULTS, OPTIONS
from planner.results import COLUMNS, Results

PRICED = COLUMNS[COLUMNS.index("ttft_ms") : COLUMNS.index("mfu_decode") + 1]
MEMORY = COLUMNS[COLUMNS.index("weights_gib") : COLUMNS.index("max_concurrency") + 1]


def table(*points: dict[str, Any]) -> Results:
    """Points as rows; an option that only some of them give is empty in the others."""
    names = dict.fromkeys(name for point in points for name in point)
    return estimate_points({name: [point.get(name) for point in points] for name in names}, len(points))


def priced(row: dict[str, Any]) -> bool:
    return row["error"] is None and row["ttft_ms"] is not None


# --- it never searches ----------------------------------------------------------------------------------------------


def test_what_is_missing_is_one_and_the_chips_are_those_of_the_plan() -> None:
    row = estimate("llama3-8b")
    assert [row[name] for name in ("tp", "pp", "dp", "ep", "cp", "gpus", "concurrency")] == [1] * 7
    assert (row["plan"], row["idle_gpus"], row["batch_per_replica"]) == ("TP1", 0, 1)
    assert (row["hardware"], row["engine"], row["isl"], row["osl"]) == ("h100-sxm", "vllm", 1024, 256)
    assert (row["schedule"], row["objective"], row["attention"]) == ("continuous", "latency", "heads")
    assert (row["weights"], row["kv_cache"]) == ("bf16", "bf16")
    assert (row["rank"], row["tie"], row["error"]) == (None, None, None)
    assert tuple(row) == COLUMNS


@pytest.mark.parametrize("objective", ["latency", "throughput", "cost"])
def test_no_goal_makes_it_search_for_a_load(objective: str) -> None:
    row = estimate("llama3-8b", objective=objective, tp=2)
    assert (row["concurrency"], row["objective"], row["plan"]) == (1, objective, "TP2")


def test_chips_beside_the_plan_are_idle_and_paid_for() -> None:
    exact, spare = estimate("llama3-8b", tp=2, pp=2, price=3.6), estimate("llama3-8b", tp=2, pp=2, gpus=7, price=3.6)
    assert (exact["gpus"], exact["idle_gpus"]) == (4, 0)
    assert (spare["gpus"], spare["idle_gpus"]) == (7, 3)
    assert spare["tpot_ms"] == exact["tpot_ms"]
    assert spare["usd_per_mtok"] == pytest.approx(exact["usd_per_mtok"] * 7 / 4, rel=1e-12)


def test_one_point_is_the_same_plan_of_a_ranking() -> None:
    for row in plan("llama3-70b", 16, concurrency=10, isl=777, osl=99):
        again = estimate("llama3-70b", plan=row["plan"], gpus=16, concurrency=10, isl=777, osl=99)
        for name in set(COLUMNS) - {"rank", "tie"}:
            expected = pytest.approx(row[name], rel=1e-12) if isinstance(row[name], float) else row[name]
            assert again[name] == expected, name


# --- what fits ------------------------------------------------------------------------------------------------------


def test_a_load_that_does_not_fit_is_priced_at_the_batch_that_does() -> None:
    options = {"hardware": "h100-lecture", "tp": 2, "dp": 2, "isl": 768}
    full, beyond = (estimate("llama3-70b", **options, concurrency=load) for load in (16, 1000))
    assert full["max_concurrency"] == beyond["max_concurrency"] == 16
    assert (full["batch_per_replica"], beyond["batch_per_replica"]) == (8, 8)
    assert (full["concurrency"], beyond["concurrency"]) == (16, 1000), "what was asked stays in its column"
    for name in (*PRICED, *MEMORY):
        assert beyond[name] == full[name], name
    assert beyond["memory_gib"] <= beyond["memory_limit_gib"]


def test_where_no_request_fits_that_is_the_error() -> None:
    with pytest.raises(NoPlanError, match=r"weights 131\.4 GiB \+ runtime 2\.3 GiB exceed the limit of 71\.3 GiB"):
        estimate("llama3-70b")
    with pytest.raises(NoPlanError, match="KV room for 0 requests of 100256 tokens, 1 asked"):
        estimate("llama3.1-70b", tp=2, isl=100_000)


@pytest.mark.parametrize("options", [{"memory_fraction": 0.98}, {"memory_limit": "78GiB"}])
def test_a_budget_that_leaves_the_engine_no_room_outside_it_is_an_error_as_in_a_ranking(options: Any) -> None:
    """98 % of 79.2 GiB, and 3.0 GiB of context and graphs beside: the plan cannot run, whatever the batch."""
    reason = r"leaves no room for the 3\.0 GiB that the engine takes outside it"
    with pytest.raises(NoPlanError, match=reason):
        plan("llama3-8b", 2, filters=Filters(tp=(2,)), **options)
    with pytest.raises(NoPlanError, match=reason):
        estimate("llama3-8b", tp=2, **options)


@pytest.mark.parametrize("options", [{"memory_limit": "100GiB"}, {"memory_fraction": 1.3}])
@pytest.mark.parametrize("hardware", ["h100-sxm", "h100-lecture"])
def test_more_memory_than_the_chip_has_is_not_priced(options: Any, hardware: str) -> None:
    with pytest.raises((InputError, NoPlanError)):
        estimate("llama3-70b", hardware=hardware, tp=2, **options)


# --- a table --------------------------------------------------------------------------------------------------------


def test_rows_keep_their_order_though_they_are_priced_in_groups() -> None:
    models = ["llama3-8b", "llama2-7b", "llama3-8b", "mistral-7b", "llama2-7b", "llama3-8b"]
    machines = ["h100-sxm", "h200-sxm", "h200-sxm", "h100-sxm", "h200-sxm", "h100-sxm"]
    rows = estimate_points({"model": models, "hardware": machines, "tp": [1, 2, 4, 8, 2, 8]}, 6).rows()
    assert [row["model"] for row in rows] == models
    assert [row["hardware"] for row in rows] == machines
    assert [row["tp"] for row in rows] == [1, 2, 4, 8, 2, 8]
    assert rows[1] == rows[4]
    for row, model, machine in zip(rows, models, machines, strict=True):
        assert row == estimate(model, hardware=machine, tp=row["tp"])


@settings(derandomize=True, deadline=None, max_examples=8)
@given(st.permutations(range(8)))
def test_any_order_of_rows_gives_the_same_rows_in_that_order(order: list[int]) -> None:
    points = [
        {"model": "llama3-8b", "tp": 1},
        {"model": "llama3-8b", "tp": 2, "schedule": "static"},
        {"model": "nosuch-model", "tp": 2},
        {"model": "llama2-7b", "tp": 3},
        {"model": "llama2-7b", "tp": 4, "concurrency": 5},
        {"model": "llama3-8b", "tp": 2, "plan": "TP2xPP2"},
        {"model": "llama2-7b", "tp": 1, "weights": "fp8"},
        {"model": "llama3-8b", "tp": "many"},
    ]
    straight = table(*points).rows()
    assert [priced(row) for row in straight] == [True, True, False, False, True, True, True, False]
    assert table(*(points[index] for index in order)).rows() == [straight[index] for index in order]


def test_a_column_of_one_value_stands_for_all_rows() -> None:
    short = estimate_points({"model": ["llama3-8b"], "tp": [1, 2, 4], "isl": [100], "weights": ["fp8"]}, 3)
    long = estimate_points({"model": ["llama3-8b"] * 3, "tp": [1, 2, 4], "isl": [100] * 3, "weights": ["fp8"] * 3}, 3)
    assert short.rows() == long.rows()


@pytest.mark.parametrize("empty", [None, "", "  ", float("nan")])
def test_an_empty_cell_is_not_given(empty: Any) -> None:
    numbers = {
        "isl": [empty, 100],
        "tp": [empty, 2],
        "concurrency": [empty, 3],
        "gpus": [empty, 2],
        "max_context": [empty, 4096],
    }
    assert estimate_points({"model": ["llama3-8b"], **numbers}, 2).row(0) == estimate("llama3-8b")
    if not isinstance(empty, float):
        words = {
            name: [empty, value]
            for name, value in {"schedule": "static", "weights": "fp8", "plan": "TP2", "hardware": "h200"}.items()
        }
        assert estimate_points({"model": ["llama3-8b"], **words}, 2).row(0) == estimate("llama3-8b")


def test_numbers_may_come_as_text() -> None:
    texts = {"tp": ["2", " 4 "], "isl": ["1e3", "512"], "concurrency": ["8.0", "1"]}
    numbers = {"tp": [2, 4], "isl": [1000, 512], "concurrency": [8, 1]}
    model = {"model": ["llama3-8b", " llama3-8b "]}
    assert estimate_points({**model, **texts}, 2).rows() == estimate_points({**model, **numbers}, 2).rows()


def test_a_column_that_is_no_option_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="unknown column 'tpp'; known are gpus, isl, osl") as stop:
        estimate_points({"model": ["llama3-8b"], "tpp": [2]}, 1)
    assert all(name in str(stop.value) for name in OPTIONS)
    with pytest.raises(InputError, match="unknown option 'batch'; known are gpus"):
        estimate("llama3-8b", batch=4)


@pytest.mark.parametrize(
    ("points", "count", "problem"),
    [
        ({"model": ["llama3-8b"], "tp": [1, 2]}, 3, "column 'tp' has 2 values, expected 3, or 1 for all rows"),
        ({"model": ["llama3-8b"] * 4}, 3, "column 'model' has 4 values, expected 3"),
        ({"model": ["llama3-8b"], "isl": []}, 2, "column 'isl' has 0 values"),
        ({"model": "llama3-8b"}, 9, "column 'model' must be a list of values, found 'llama3-8b'"),
        ({"model": ["llama3-8b"], "tp": 4}, 1, "column 'tp' must be a list of values, found 4"),
        ({"model": ["llama3-8b"]}, 0, "count must be a whole number of at least 1, found 0"),
        ({"model": ["llama3-8b"]}, "2", "count must be a whole number of at least 1, found '2'"),
    ],
)
def test_columns_are_as_long_as_the_table(points: Any, count: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        estimate_points(points, count)


@pytest.mark.parametrize(("name", "cell"), [("tp", [1, 2]), ("isl", {}), ("weights", ["fp8"]), ("model", {"a": 1})])
def test_a_cell_that_holds_a_list_is_said_in_its_row(name: str, cell: Any) -> None:
    good = {"tp": 1, "isl": 1024, "weights": "bf16", "model": "llama3-8b"}
    for cells in ([good[name], cell], [cell, cell]):
        rows = estimate_points({**{key: [value] for key, value in good.items()}, name: cells}, 2).rows()
        assert [row["error"] is not None for row in rows] == [value is cell for value in cells]
        assert str(cell) in rows[1]["error"]
    with pytest.raises(InputError):
        estimate(**{**good, name: cell})


def test_rows_that_are_too_long_each_name_their_own_lengths() -> None:
    errors = estimate_points({"model": ["llama3-8b"], "isl": [9000, 100, 9001, 9000], "tp": [1, 1, 1, 2]}, 4)["error"]
    assert [error and error[:8] for error in errors] == ["isl 9000", None, "isl 9001", "isl 9000"]


def test_a_size_needs_a_unit_in_a_table_of_texts() -> None:
    row = table({"model": "llama3-8b", "memory_limit": "72"}, {"model": "llama3-8b", "memory_limit": "72GiB"}).rows()
    assert row[0]["error"].startswith("'72' is not a size of memory")
    assert priced(row[1])


def test_a_size_and_a_fraction_of_the_same_memory_exclude_each_other() -> None:
    with pytest.raises(InputError, match="--memory-limit and --memory-fraction limit the same memory"):
        estimate("llama3-8b", memory_limit="72GiB", memory_fraction=0.9)


def test_defaults_are_options() -> None:
    assert set(DEFAULTS) <= set(OPTIONS)


# --- rows that cannot be priced -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ({"tp": 0}, "tp must be a whole number of at least 1, found 0"),
        ({"pp": -1}, "pp must be a whole number of at least 1, found -1"),
        ({"isl": 1.5}, "isl must be a whole number of at least 1, found 1.5"),
        ({"isl": 0}, "isl must be a whole number of at least 1, found 0"),
        ({"osl": "abc"}, "osl must be a number, found 'abc'"),
        ({"concurrency": "many"}, "concurrency must be a number, found 'many'"),
        ({"concurrency": float("inf")}, "concurrency must be a whole number of at least 1, found inf"),
        ({"gpus": 1e30}, "gpus must be a whole number of at least 1, found 1e+30"),
        ({"max_context": 0}, "max_context must be a whole number of at least 1, found 0"),
        ({"model": "llama3-80b"}, "unknown model 'llama3-80b': did you mean"),
        ({"model": None}, "no model: give --model or a column `model`"),
        ({"hardware": "h1000"}, "unknown hardware 'h1000': did you mean h100-sxm"),
        ({"engine": "vllmm"}, "unknown engine 'vllmm': did you mean vllm"),
        ({"schedule": "dynamic"}, "schedule must be one of continuous, static, found 'dynamic'"),
        ({"objective": "speed"}, "objective must be one of latency, ttft, tpot, throughput, cost, found 'speed'"),
        ({"arrivals": "poisson"}, "arrivals must be one of steady, waves, found 'poisson'"),
        (
            {"weights": "fp7"},
            "weights must be one of fp32, bf16, fp16, fp8, int8, int4, mxfp4, bf16-2:4, fp16-2:4, "
            "fp8-2:4, int8-2:4, int4-2:4, found 'fp7'",
        ),
        ({"kv_cache": "int4"}, "kv_cache must be one of fp32, bf16, fp16, fp8, int8, found 'int4'"),
        ({"ffn": "3d"}, "ffn must be one of 1d, 2d, wg-x, wg-xy, wg-xyz, found '3d'"),
        ({"prefill_ffn": "wg"}, "prefill_ffn must be one of 1d, 2d, wg-x, wg-xy, wg-xyz, found 'wg'"),
        ({"ffn": "2d", "grid": "4"}, "'4' is not a grid: expected chips as X x YZ or X x Y x Z, as 4x16 or 4x4x4"),
        ({"plan": "TP8/2d:2x4", "grid": "4x2"}, "grid contradicts the plan TP8/2d:2x4"),
        ({"plan": "TP8/2d:2x4", "ffn": "1d"}, "ffn contradicts the plan TP8/2d:2x4"),
        ({"attention": "rows"}, "attention must be one of heads, batch, a product as heads4xbatch2, found 'rows'"),
        ({"price": "cheap"}, "price must be a number, found 'cheap'"),
        ({"price": 0}, "price must be above 0, found 0"),
        ({"memory_limit": "lots"}, "'lots' is not a size of memory: expected a positive number with a unit"),
        ({"memory_fraction": -0.5}, "memory_fraction must be above 0, found -0.5"),
        ({"plan": "TP8,PP2"}, "'TP8,PP2' is not a plan"),
        ({"plan": "TP8", "tp": 4}, "tp contradicts the plan TP8"),
        ({"plan": "TP8", "pp": 2}, "pp contradicts the plan TP8"),
        ({"isl": 8000, "osl": 200}, "isl 8000 + osl 200 = 8200 tokens is more than llama3-8b's context of 8192"),
        ({"slice": "2x2x2"}, "--slice 2x2x2: h100-sxm is not a torus"),
    ],
)
def test_bad_input_is_said_in_its_row_and_raised_for_one_plan(point: dict[str, Any], error: str) -> None:
    point = {"model": "llama3-8b", **point}
    good = {"model": "llama3-8b", "tp": 8}
    bad, beside = table(point, good).rows()
    assert bad["error"] is not None
    assert bad["error"].startswith(error)
    assert beside == estimate("llama3-8b", tp=8), "one bad row leaves the others alone"
    if point["model"] is not None:
        with pytest.raises(InputError) as stop:
            estimate(**point)
        assert str(stop.value) == bad["error"]


@pytest.mark.parametrize(
    ("point", "error"),
    [
        ({"tp": 3}, "tp 3 does not divide the 32 query heads; nearest valid: 2 or 4"),
        ({"pp": 33}, "pp 33 is more than the 32 layers; nearest valid: 32"),
        ({"tp": 8, "gpus": 4}, "TP8 takes 8 chips, there are 4"),
        ({"attention": "batch", "tp": 2}, "engine vllm cannot shard attention over batch; it offers heads"),
        ({"ep": 2, "tp": 2}, "ep 2: llama3-8b has no experts to spread"),
        ({"ffn": "2d", "tp": 8}, "engine vllm has no FFN layout 2d; it offers 1d"),
        ({"ffn": "2d", "tp": 8, "grid": "2x2", "engine": "ideal"}, "grid 2x2 has 4 chips, tp is 8"),
        ({"model": "llama3.1-405b"}, "weights 756.0 GiB + runtime"),
        ({"tp": 8, "hardware": "tpu-v4", "gpus": 4}, "TP8 takes 8 chips, the slice"),
    ],
)
def test_a_plan_that_cannot_run_is_said_in_its_row_and_raised_for_one_plan(point: dict[str, Any], error: str) -> None:
    point = {"model": "llama3-8b", **point}
    bad, beside = table(point, {"model": "llama3-8b", "tp": 8}).rows()
    assert bad["error"].startswith(error)
    assert priced(beside)
    with pytest.raises(NoPlanError) as stop:
        estimate(**point)
    assert str(stop.value) == bad["error"]


def test_a_row_with_an_error_keeps_what_was_asked_and_has_no_figure() -> None:
    points = [
        {"model": "llama3-8b", "tp": 3, "pp": 2, "isl": 500, "osl": 50, "concurrency": 4, "gpus": 8},
        {"model": "nosuch-model", "tp": 3, "pp": 2, "isl": 500, "osl": 50, "concurrency": 4, "gpus": 8},
        {"model": "llama3-8b", "tp": 2, "pp": 2, "isl": 500, "osl": 50, "concurrency": 4, "gpus": 8},
    ]
    ruled_out, unknown, good = table(*points).rows()
    for row, point in ((ruled_out, points[0]), (unknown, points[1])):
        for name, value in point.items():
            assert row[name] == value, name
        assert row["error"]
        for name in (*PRICED, *MEMORY, "plan", "idle_gpus", "batch_per_replica", "bottleneck", "tie", "rank"):
            assert row[name] is None, name
        assert (row["dp"], row["hardware"][:4]) == (None, "h100")
    assert ruled_out["schedule"] == "continuous"  # the engine's; of a model that is unknown there is no engine either
    assert all(good[name] is not None for name in (*PRICED, *MEMORY, "plan", "bottleneck"))


def test_the_first_thing_wrong_with_a_row_is_named() -> None:
    row = table({"model": "nosuch-model", "tp": -1, "isl": "x"}, {"model": "llama3-8b"}).row(0)
    assert row["error"] == "isl must be a number, found 'x'"


def test_every_row_may_fail() -> None:
    rows = table({"model": "nosuch-model"}, {"model": "llama3-8b", "tp": 5}, {"model": "llama3-8b", "isl": 0}).rows()
    assert not any(priced(row) for row in rows)
    assert all(row["error"] for row in rows)


# --- plans by label -------------------------------------------------------------------------------------------------


def test_a_label_gives_every_degree_and_may_be_repeated_by_them() -> None:
    whole = estimate("llama3-8b", plan="TP2xPP2xDP3")
    assert whole == estimate("llama3-8b", tp=2, pp=2, dp=3)
    assert whole == estimate("llama3-8b", plan="TP2xPP2xDP3", tp=2, dp=3)
    assert whole["plan"] == "TP2xPP2xDP3"


def test_labels_of_many_rows_are_read_one_by_one() -> None:
    labels = ["TP2", "PP2", "TP2", None, "TP4/batch", "TP4/batch/batch"]
    rows = estimate_points(
        {"model": ["llama3-8b"], "engine": ["ideal"], "plan": labels, "tp": [2, 1, None, 8, None, 4]}, 6
    )
    assert rows["plan"].tolist() == ["TP2", "PP2", "TP2", "TP8", "TP4/batch", "TP4/batch/batch"]
    assert rows["attention"].tolist() == ["heads", "heads", "heads", "heads", "batch", "batch"]
    assert rows["prefill_attention"].tolist() == ["heads"] * 5 + ["batch"]
    assert set(rows["error"]) == {None}


@pytest.mark.parametrize("options", [{"attention": "batch"}, {"attention": "batch", "prefill_attention": "batch"}])
def test_a_sharding_given_beside_a_label_is_never_dropped(options: dict[str, str]) -> None:
    """Priced as asked, or refused as a contradiction: not silently as something else."""
    row: dict[str, Any] = {}
    refused = ""
    try:
        row = estimate("llama3-8b", engine="ideal", plan="TP8", **options)
    except InputError as error:
        refused = str(error)
    kept = {name: row.get(name) for name in options} == options
    assert kept or "attention contradicts the plan TP8" in refused


def test_a_sharding_that_agrees_with_its_label_is_fine() -> None:
    row = estimate("llama3-8b", engine="ideal", plan="TP8/batch", attention="batch")
    assert (row["plan"], row["attention"], row["prefill_attention"]) == ("TP8/batch", "batch", "heads")


# --- units and options ----------------------------------------------------------------------------------------------


def test_max_context_permits_a_longer_workload_and_takes_room() -> None:
    with pytest.raises(InputError, match="give --max-context if the deployment extends it"):
        estimate("llama3-8b", isl=9000)
    longer = estimate("llama3-8b", isl=9000, max_context=16384)
    assert longer["max_concurrency"] == longer["kv_capacity_tokens"] // 16384


def test_a_price_of_the_users_replaces_the_listed_one() -> None:
    listed, own = estimate("llama3-8b"), estimate("llama3-8b", price=1.0)
    assert listed["usd_per_mtok"] == pytest.approx(6.88 * own["usd_per_mtok"], rel=1e-12)
    assert own["usd_per_mtok"] == pytest.approx(1.0 / 3600 / own["tokens_per_s"] * 1e6, rel=1e-12)
    assert estimate("llama3-8b", hardware="h100-lecture")["usd_per_mtok"] is None
    assert estimate("llama3-8b", hardware="h100-lecture", price=1.0)["usd_per_mtok"] > 0


@pytest.mark.parametrize(
    ("options", "bottleneck"),
    [
        ({"objective": "latency"}, "memory"),
        ({"objective": "ttft", "isl": 7900}, "compute"),
        ({"objective": "tpot", "hardware": "h100-lecture", "tp": 32, "gpus": 32}, "network"),
        ({"objective": "latency", "osl": 1, "isl": 7900}, "compute"),
        ({"objective": "tpot", "tp": 8, "concurrency": 500, "isl": 16, "osl": 100}, "overhead"),
        # 32 stages of a layer each wait for the last one, which has the head
        ({"objective": "tpot", "pp": 32, "concurrency": 32, "schedule": "static", "engine": "ideal"}, "bubble"),
    ],
)
def test_the_bottleneck_is_the_largest_part_of_the_goals_time(options: dict[str, Any], bottleneck: str) -> None:
    results = estimate_points({"model": ["llama3-8b"], **{name: [value] for name, value in options.items()}}, 1)
    assert results["error"][0] is None
    parts = results.ttft_parts if options["objective"] == "ttft" or options.get("osl") == 1 else results.tpot_parts
    assert np.isfinite([column[0] for column in parts.values()]).all()
    assert results["bottleneck"][0] == max(parts, key=lambda bound: parts[bound][0]) == bottleneck


@pytest.mark.parametrize("name", ["Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B", "META-LLAMA/meta-llama-3-8b"])
def test_hugging_face_ids_are_names(name: str) -> None:
    if "/" in name:
        assert estimate(name) == estimate("llama3-8b")
    else:
        with pytest.raises(InputError, match="unknown model"):
            estimate(name)
