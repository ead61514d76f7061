"""A sweep: lists and ranges, the order of its points, what makes a point's row, and which rows belong to it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError
from planner.plans.space import Filters
from planner.request import Limits
from planner.results import COLUMNS, TEXTS, WHOLE
from planner.specs.workload import Workload
from planner.sweeping import ASKED, AXES, COLUMN_OF, COLUMNS_OF_SWEEP, Sweep, finished, whole_numbers, words


def a_sweep(top: int = 1, **axes: tuple[object, ...]) -> Sweep:
    return Sweep.of({"model": ("llama3-8b",), **axes}, workload=Workload(), limits=Limits(), filters=Filters(), top=top)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", (8,)),
        ("8, 16,8", (8, 16)),
        ("8:32:8", (8, 16, 24, 32)),
        ("8:31:8", (8, 16, 24)),
        ("1:64:x4", (1, 4, 16, 64)),
        ("3:50:x2", (3, 6, 12, 24, 48)),
        ("1,2,4:16:4", (1, 2, 4, 8, 12, 16)),
        ("5:5:1", (5,)),
    ],
)
def test_lists_and_ranges_of_whole_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert whole_numbers(text, "--gpus") == numbers


@pytest.mark.parametrize(
    "text",
    ["", "8,", "a", "8.5", "-8", "0", "0:8:1", "8:4:1", "1:8", "1:8:0", "1:8:x1", "1:8:-1", "1:2:3:4", "1e3", "٣",
     "9" * 5000, "1:999999999999:1", "2000000000"],
)  # fmt: skip
def test_what_is_no_list_of_whole_numbers_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="--gpus"):
        whole_numbers(text, "--gpus")


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 50))
def test_a_range_is_what_adding_gives(first: int, more: int, step: int) -> None:
    numbers = whole_numbers(f"{first}:{first + more}:{step}", "--isl")
    assert numbers[0] == first
    assert first + more - step < numbers[-1] <= first + more
    assert {later - earlier for earlier, later in pairwise(numbers)} <= {step}


def test_words_keep_their_order_and_count_once() -> None:
    assert words("b, a,b", "--model") == ("b", "a")


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 4000), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from(["latency", "ttft", "cost"]), min_size=1, max_size=3, unique=True),
)
def test_points_are_the_product_of_the_lists_the_last_running_fastest(
    gpus: list[int], isl: list[int], goals: list[str]
) -> None:
    sweep = a_sweep(gpus=tuple(gpus), isl=tuple(isl), objective=tuple(goals))
    requests = [sweep.point(index).request for index in range(len(sweep))]
    found = [(request.gpus, request.workload.isl, request.objective) for request in requests]
    assert found == [(chips, length, goal) for chips in gpus for length in isl for goal in goals]
    assert len({sweep.point(index).asked for index in range(len(sweep))}) == len(sweep)


def test_what_is_the_default_anyway_makes_no_other_question() -> None:
    said = a_sweep(hardware=("h100",), gpus=(8,), objective=("latency",))
    assert said.point(0).asked == a_sweep().point(0).asked == "plan --model llama3-8b --top 1"
    assert {COLUMN_OF.get(name, name) for name in AXES} <= set(COLUMNS_OF_SWEEP)


def test_a_point_without_a_plan_is_a_row_that_says_what_was_asked_and_why() -> None:
    (row,) = a_sweep(model=("llama3-70b",), gpus=(1,)).rows(0)
    assert tuple(row) == COLUMNS_OF_SWEEP
    assert (row["plan"], row["tpot_ms"], row["gpus"], row["isl"]) == (None, None, 1, 1024)
    assert "fits in memory" in row["error"]
    assert "\n" not in row["error"]


def test_a_point_whose_context_is_too_long_is_a_row_and_not_the_end() -> None:
    sweep = a_sweep(isl=(1024, 10**6))
    assert sweep.rows(0)[0]["plan"]
    assert "more than llama3-8b's context" in sweep.rows(1)[0]["error"]


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"model": ("llama3-8b", "llama9")}, "llama9"),
        ({"hardware": ("h100", "h1000000")}, "h1000000"),
        ({"engine": ("vllm", "wllm")}, "wllm"),
        ({"objective": ("latency", "speed")}, "--objective"),
        ({"weights": ("fp8", "fp7")}, "--weights"),
        ({"kv_cache": ("fp8", "fp7")}, "--kv-cache"),
        ({"gpus": tuple(range(1, 2000)), "isl": tuple(range(1, 2000))}, "3996001 points"),
        ({"isl": (10**6, 10**7)}, "context"),
    ],
)
def test_what_is_wrong_whatever_the_plans_is_said_before_anything_is_ranked(
    axes: dict[str, tuple[object, ...]], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        a_sweep(**axes)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rows_that_were_cut_anywhere_are_continued_at_the_first_point_that_may_lack_some(data: st.DataObject) -> None:
    top = data.draw(st.integers(0, 3))
    sweep = a_sweep(top, gpus=tuple(range(1, 6)))
    counts = data.draw(st.lists(st.integers(1, top or 5), min_size=5, max_size=5))
    rows = [(sweep.point(index).asked, False) for index, count in enumerate(counts) for _ in range(count)]
    cut = data.draw(st.integers(0, len(rows)))
    points, used = finished(sweep, rows[:cut])
    assert used == sum(counts[:points]) <= cut
    whole = sum(cut >= sum(counts[: index + 1]) for index in range(5))
    assert points in (whole, whole - 1, 0)  # of the last one it may not be known
    assert points == whole or top != 1


def test_an_error_is_a_whole_point_however_many_rows_are_asked() -> None:
    sweep = a_sweep(3, gpus=(1, 2))
    assert finished(sweep, [(sweep.point(0).asked, True)]) == (1, 1)
    assert finished(sweep, [(sweep.point(0).asked, False)]) == (0, 0)


def test_rows_of_other_questions_are_refused_with_both() -> None:
    sweep = a_sweep(gpus=(1, 2))
    first, second = (sweep.point(index).asked for index in range(2))
    assert finished(sweep, [(first, False), (second, True)]) == (2, 2)
    with pytest.raises(InputError, match=r"row 1 is of `plan .* --gpus 2 .*`, but this sweep has `plan .* --gpus 1 "):
        finished(sweep, [(second, False)])
    with pytest.raises(InputError, match=r"row 3 .* ends before it"):
        finished(sweep, [(first, False), (second, False), (second, False)])


def test_every_column_is_of_one_kind() -> None:
    rows = [row for name in ("latency", "throughput") for row in a_sweep(0, objective=(name,)).rows(0)]
    for row in rows:
        for name in COLUMNS:
            kind = str if name in TEXTS else int if name in WHOLE else bool if name == "tie" else float
            assert row[name] is None or type(row[name]) is kind, name
        assert isinstance(row[ASKED], str)
