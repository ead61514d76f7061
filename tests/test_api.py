"""The public surface of the package: what it is, and that it does what its texts say."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ROOT, run

import planner
from planner import (
    COLUMNS,
    Filters,
    InputError,
    Limits,
    NoPlanError,
    Plan,
    PlannerError,
    Request,
    SpecError,
    Workload,
    estimate,
    estimate_points,
    load_machine,
    load_model,
    plan,
    rank,
)

PUBLIC = [
    "COLUMNS", "Engine", "Filters", "Hardware", "InputError", "Limits", "Model", "NoPlanError", "Plan",
    "PlannerError", "Ranking", "Request", "Results", "SpecError", "Workload", "__version__", "estimate",
    "estimate_points", "load_engine", "load_hardware", "load_machine", "load_model", "plan", "rank",
]  # fmt: skip


def test_the_public_surface_is_this() -> None:
    assert sorted(planner.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_can_be_imported(name: str) -> None:
    value = getattr(planner, name)
    assert value is getattr(importlib.import_module("planner"), name)
    if callable(value) and not name.startswith("__"):
        assert value.__doc__
        assert value.__doc__.strip()[0].isupper()


def test_a_star_import_takes_all_of_it() -> None:
    space: dict[str, Any] = {}
    exec("from planner import *", space)
    assert set(PUBLIC) <= set(space)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'planner' has no attribute 'plans_of_mine'"):
        planner.plans_of_mine  # type: ignore[attr-defined]  # noqa: B018


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(planner.__file__).parent / "py.typed").is_file()


def code_in(text: str) -> str:
    """The indented lines of a docstring: its example."""
    lines = inspect.cleandoc(text).splitlines()
    return textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))


def test_the_example_of_the_package_runs() -> None:
    example = code_in(planner.__doc__ or "")
    assert "plan(" in example
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(example, {})
    label, tpot = out.getvalue().split()
    assert Plan.parse(label)
    assert float(tpot) == plan("llama3-70b", gpus=16)[0]["tpot_ms"]


@pytest.mark.parametrize("function", [plan, estimate, rank, estimate_points, load_model, Plan.parse])
def test_doctests_of_the_public_functions_hold(function: Any) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(verbose=False)
    for test in finder.find(function, globs={"planner": planner, **{name: getattr(planner, name) for name in PUBLIC}}):
        assert runner.run(test).failed == 0


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_returns_rows_of_the_result_columns_best_first() -> None:
    rows = plan("llama3-70b", gpus=16, objective="latency")
    assert all(tuple(row) == COLUMNS for row in rows)
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["latency_ms"] for row in rows] == sorted(row["latency_ms"] for row in rows)
    for row in rows:
        for value in row.values():
            assert value is None or type(value) in (int, float, str, bool)
            assert not isinstance(value, float) or math.isfinite(value)


def test_plan_says_what_the_command_says() -> None:
    options: dict[str, Any] = {
        "hardware": "h200", "engine": "sglang", "objective": "throughput", "isl": 2000, "osl": 100, "concurrency": 40,
        "schedule": "static", "arrivals": "waves", "weights": "fp8", "kv_cache": "fp8", "max_context": 4096,
        "max_ttft_ms": 9000.0, "max_tpot_ms": 80.0, "max_latency_ms": 20000.0, "memory_limit": "100GiB", "price": 3.5,
    }  # fmt: skip
    words = [
        word for name, value in options.items() for word in (f"--{name.removesuffix('_ms').replace('_', '-')}", value)
    ]
    done = run("-m", "llama3.1-70b", "--gpus", 8, *words, "--tp", "2,4,8", "--csv", "-", "--top", 0)
    rows = plan("llama3.1-70b", gpus=8, filters=Filters(tp=(2, 4, 8)), **options)
    assert (done.status, done.err) == (0, "")
    assert [row["plan"] for row in done.rows] == [row["plan"] for row in rows]
    for line, row in zip(done.rows, rows, strict=True):
        for name, value in row.items():
            if isinstance(value, float):
                assert line[name] == f"{value:.6g}"
            else:
                assert line[name] == (
                    "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
                )


def test_plan_takes_every_option_of_the_command_by_the_same_name() -> None:
    from planner.command import diffusion  # noqa: PLC0415 (typer is not needed for the rest)
    from planner.command.rank import run as command  # noqa: PLC0415

    output = {"top", "csv", "json", "no_header", "rejected", "launch", "placement", "plot", "quiet", "debug", "version"}
    output |= {"html", "placement_svg", "context"}
    output |= diffusion.OURS  # of the other kind of model, which `plan` here does not take
    filters = set(Filters._fields)
    options = {name.removesuffix("_") for name in inspect.signature(command).parameters} - output - filters
    keywords = {name.removesuffix("_ms") for name in inspect.signature(plan).parameters} - {"filters"}
    assert keywords == options


def test_paths_serve_as_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: h100-sxm\nname: mine\nchip: {memory_gib: 160}\n")
    assert plan("llama3-70b", gpus=1, hardware=path)[0]["hardware"] == "mine"
    assert estimate("llama3-70b", hardware=str(path))["plan"] == "TP1"
    assert estimate("llama3-70b", hardware=path)["plan"] == "TP1"


def test_plan_raises_what_the_command_exits_with() -> None:
    for options in ({"gpus": 0}, {"gpus": 8, "isl": 0}, {"gpus": 8, "osl": -1}, {"gpus": 8, "concurrency": 0}):
        with pytest.raises(InputError, match="at least 1"):
            plan("llama3-8b", **options)  # type: ignore[arg-type]
    for wrong in ({"weights": "int2"}, {"hardware": "h10"}, {"memory_limit": "lots"}, {"slice": "4x4"}):
        with pytest.raises(InputError):
            plan("llama3-8b", gpus=8, **wrong)  # type: ignore[arg-type]
    with pytest.raises(NoPlanError, match="smallest change that would do"):
        plan("llama3-70b", gpus=1)
    with pytest.raises(NoPlanError, match="the best is"):
        plan("llama3-70b", gpus=8, max_tpot_ms=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "speed"},
        {"schedule": "never"},
        {"arrivals": "tidal"},
        {"memory_fraction": 2.0},
        {"memory_fraction": 0.0},
        {"memory_limit": "90GiB"},
        {"price": -1.0},
        {"max_tpot_ms": 0.0},
    ],
    ids=str,
)
def test_plan_checks_what_the_command_checks(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        plan("llama3-8b", gpus=8, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"gpus": "8"}, "--gpus must be a whole number, found '8'"),
        ({"gpus": 8.0}, "--gpus must be a whole number, found 8.0"),
        ({"gpus": 8, "max_gpus": 16}, "max_gpus how many to look at; give one of them"),
        ({"gpus": None, "max_gpus": "16"}, "--gpus must be a whole number, found '16'"),
        ({"arrival_rate": "40"}, "--arrival-rate must be a number, found '40'"),
        ({"arrival_rate": 40, "concurrency": 8}, "--arrival-rate and --concurrency both say"),
        ({"arrival_rate": 40, "schedule": "static"}, "--arrival-rate: a static batch"),
        ({"gpus": None, "pareto": True, "arrival_rate": 4.0}, "--pareto over several numbers of chips has no arrival"),
        ({"isl": "1k"}, "--isl must be a whole number, found '1k'"),
        ({"concurrency": [1, 2]}, r"--concurrency must be a whole number, found \[1, 2\]"),
        ({"max_tpot_ms": "50"}, "--max-tpot must be a number, found '50'"),
        ({"price": "3"}, "--price must be a number, found '3'"),
        ({"memory_limit": [72]}, r"--memory-limit must be a number, found \[72\]"),
        ({"memory_limit": "72"}, "'72' is not a size of memory"),
        ({"memory_limit": math.nan}, "--memory-limit must be above 0, found nan"),
        ({"memory_fraction": "0.9"}, "--memory-fraction must be a number, found '0.9'"),
        ({"memory_limit": "70GiB", "memory_fraction": 0.9}, "limit the same memory; give one"),
        ({"weights": 8}, "--weights must be a text, found 8"),
        ({"kv_cache": ["fp8"]}, "--kv-cache must be a text"),
        ({"hardware": "tpu-v4", "slice": 4}, "--slice must be a text, found 4"),
        ({"filters": {"tp": (8,)}}, "filters must be Filters"),
        ({"filters": Filters(tp=8)}, "filter tp: expected a tuple of whole numbers of at least 1, found 8"),  # type: ignore[arg-type]
        ({"filters": Filters(pp=("2",))}, "filter pp: expected a tuple of whole numbers"),  # type: ignore[arg-type]
        ({"filters": Filters(dp=(0,))}, "filter dp: expected a tuple of whole numbers"),
        ({"filters": Filters(attention="batch")}, "filter attention: expected a tuple of words out of heads, batch"),  # type: ignore[arg-type]
        ({"filters": Filters(attention=("rows",))}, "filter attention: expected a tuple of words"),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_an_input_error_and_not_one_of_pythons(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        plan("llama3-8b", **{"gpus": 8, **options})


def test_a_number_is_bytes_of_memory_in_all_three() -> None:
    limit = pytest.approx(72e9 / 2**30)
    assert plan("llama3-8b", gpus=1, memory_limit=72e9)[0]["memory_limit_gib"] == limit
    assert estimate("llama3-8b", memory_limit=72e9)["memory_limit_gib"] == limit
    sizes = np.array([72_000_000_000, 36_000_000_000])
    both = estimate_points({"model": ["llama3-8b"], "memory_limit": sizes}, 2)
    assert list(both["memory_limit_gib"]) == pytest.approx([72e9 / 2**30, 36e9 / 2**30])


# --- estimate ---------------------------------------------------------------------------------------------------------


def test_estimate_prices_one_plan_by_option() -> None:
    row = estimate("llama3-70b", plan="TP8xPP2", concurrency=64)
    assert tuple(row) == COLUMNS
    assert (row["plan"], row["gpus"], row["concurrency"], row["rank"]) == ("TP8xPP2", 16, 64, None)
    assert row == estimate("llama3-70b", tp=8, pp=2, concurrency=64)
    ranked = {row["plan"]: row for row in plan("llama3-70b", gpus=16, concurrency=64)}
    assert {**row, "rank": None, "tie": None} == {**ranked["TP8xPP2"], "rank": None, "tie": None}


def test_estimate_raises_what_the_command_exits_with() -> None:
    with pytest.raises(NoPlanError, match="64 query heads"):
        estimate("llama3-70b", tp=3)
    with pytest.raises(NoPlanError, match="exceed the limit"):
        estimate("llama3-70b")
    for options in ({"tpp": 3}, {"tp": 0}, {"plan": "nonsense"}, {"plan": "TP8", "tp": 4}, {"hardware": "h10"}):
        with pytest.raises(InputError):
            estimate("llama3-70b", **options)
    with pytest.raises(InputError, match="unknown model"):
        estimate("lama3-70b")


def test_estimate_points_prices_a_table_and_keeps_its_order() -> None:
    results = estimate_points({"model": ["llama3-8b"], "tp": [4, 3, 1], "concurrency": [1, 1, 5]}, 3)
    assert len(results) == 3
    assert list(results["plan"]) == ["TP4", None, "TP1"]
    assert results.row(0) == estimate("llama3-8b", tp=4)
    assert "32 query heads" in results.row(1)["error"]
    assert results.row(2) == estimate("llama3-8b", concurrency=5)
    with pytest.raises(InputError, match="unknown column 'tpp'"):
        estimate_points({"model": ["llama3-8b"], "tpp": [1]}, 1)


def test_rank_says_more_than_plan() -> None:
    machine, engine = load_machine("h100")
    ranking = rank(Request(load_model("llama3-70b"), machine, engine, 8, Workload(osl=64), limits=Limits(tpot=0.02)))
    assert ranking.results.rows() == plan("llama3-70b", gpus=8, osl=64, max_tpot_ms=20)
    assert {refused.limit for refused in ranking.refused} == {"rule", "memory", "slo"}
    assert all(refused.reason for refused in ranking.refused)
    assert ranking.plans >= len(ranking.results)


# --- errors and imports -----------------------------------------------------------------------------------------------


def test_errors_are_a_family_with_an_exit_status_each() -> None:
    assert (PlannerError.exit_status, InputError.exit_status, SpecError.exit_status, NoPlanError.exit_status) == (
        1,
        2,
        2,
        3,
    )
    assert issubclass(InputError, PlannerError)
    assert issubclass(NoPlanError, PlannerError)
    assert issubclass(SpecError, InputError)
    error = SpecError("file.yaml", "a.b", "is wrong")
    assert (str(error), error.path, error.key, error.problem) == (
        "file.yaml: a.b: is wrong",
        "file.yaml",
        "a.b",
        "is wrong",
    )
    assert str(SpecError("file.yaml", "", "is empty")) == "file.yaml: is empty"


def loaded_by(code: str) -> set[str]:
    """The modules that a new process has loaded after some code."""
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_the_package_alone_loads_none_of_its_dependencies() -> None:
    assert not loaded_by("import planner; planner.__version__") & {"pydantic", "rich", "typer", "numpy", "yaml"}


def test_planning_with_shipped_files_does_not_load_the_validator_or_the_painter() -> None:
    assert not loaded_by("from planner import plan; plan('llama3-8b', gpus=8)") & {"pydantic", "rich", "typer"}
