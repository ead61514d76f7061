"""Where the best plan changes: the ends of the stretches against rankings, and what was published of layouts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from planner import Filters, InputError, NoPlanError, Request, Workload, load_model
from planner.crossing import Crossing, at, crossing
from planner.explaining.goal import goal_value
from planner.ranking import rank
from planner.specs.catalog import load_machine


def question(
    model: str, hardware: str, gpus: int, objective: str, engine: str | None = None, **filters: object
) -> Request:
    chip, software = load_machine(hardware, engine)
    workload = Workload(isl=1984, osl=64, weights="bf16")
    return Request(
        load_model(model),
        chip,
        software,
        gpus,
        workload,
        filters=Filters(**filters),
        objective=objective,  # type: ignore[arg-type]
    )


def found(request: Request, axis: str, low: int | None = None, high: int | None = None) -> Crossing:
    return crossing(request, axis, low, high, lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("axis", "objective", "high"),
    [("concurrency", "tpot", 512), ("concurrency", "throughput", 512), ("isl", "ttft", 6000), ("gpus", "latency", 8)],
)
def test_rankings_at_both_sides_of_every_change_have_those_plans_in_front(axis: str, objective: str, high: int) -> None:
    request = question("llama3-8b", "h100", 8, objective)
    result = found(request, axis, None, high)
    assert (result.stretches[0].low, result.stretches[-1].high) == (1, high)
    for before, after in pairwise(result.stretches):
        assert after.low == before.high + 1
        assert before.plan != after.plan
    for stretch in result.stretches:
        for value, own in ((stretch.low, stretch.first), (stretch.high, stretch.last)):
            best = rank(at(request, result.axis, value)).results  # type: ignore[arg-type]
            assert own is not None
            assert goal_value(own, 0, objective) == pytest.approx(goal_value(best, 0, objective), rel=1e-8)


def test_what_takes_over_was_behind_one_step_before() -> None:
    result = found(question("llama3-8b", "h100", 8, "tpot"), "concurrency", None, 512)
    assert len(result.stretches) > 1
    for stretch in result.stretches[:-1]:
        assert stretch.last is not None
        assert stretch.next_goal >= goal_value(stretch.last, 0, "tpot") * (1 - 1e-9)


def test_layouts_of_a_prefill_follow_the_order_of_the_paper() -> None:
    """Pope et al. 2022, section 3.2.3 and figure 7: weight-stationary, then gathered over X, over XY, over all."""
    request = question("palm-540b", "tpu-v4", 64, "ttft", tp=(64,), pp=(1,))
    result = found(request, "tokens", None, 2_500_000)
    order = ["2d", "wg-x", "wg-xy", "wg-xyz"]
    layouts = [stretch.plan.prefill_ffn for stretch in result.stretches if stretch.plan]
    first = {layout: layouts.index(layout) for layout in order}
    assert list(first) == sorted(first, key=first.__getitem__)
    starts = {layout: result.stretches[index].low * result.unit for layout, index in first.items()}
    assert starts["2d"] == 1984
    assert 10_000 < starts["wg-x"] < 60_000 < starts["wg-xy"] < 400_000 < starts["wg-xyz"] < 2_500_000
    sharding = [stretch.plan.prefill_attention for stretch in result.stretches if stretch.plan]
    assert sharding[0] == "heads"
    assert sharding[-1] == "batch"


def test_attention_of_a_decode_step_goes_from_heads_to_the_batch() -> None:
    request = question("palm-540b", "tpu-v4", 64, "tpot", tp=(64,), pp=(1,), ffn=("1d", "2d", "wg-x", "wg-xyz"))
    plans = [stretch.plan for stretch in found(request, "concurrency").stretches if stretch.plan]
    assert [plan.attention for plan in plans] == sorted((plan.attention for plan in plans), reverse=True)
    assert (plans[0].attention, plans[-1].attention) == ("heads", "batch")
    assert {plan.ffn for plan in plans} <= {"1d", "2d"}  # nothing is gathered for a decode step
    assert plans[-1].ffn == "2d"


def test_chips_of_a_torus_are_its_slices() -> None:
    request = question("palm-62b", "tpu-v4", 32, "latency", pp=(1,))
    values = {stretch.low for stretch in found(request, "gpus").stretches}
    assert values <= {1, 2, 4, 8, 16, 32}


def test_a_limit_cuts_the_range_short_and_says_so_by_a_stretch_without_a_plan() -> None:
    request = question("llama3-8b", "h100", 1, "tpot")
    limited = request._replace(limits=request.limits._replace(tpot=0.02))
    result = found(limited, "concurrency", 1, 400)
    assert result.stretches[-1].plan is None
    edge = result.stretches[-1].low
    with pytest.raises(NoPlanError):
        rank(at(limited, "concurrency", edge))
    assert len(rank(at(limited, "concurrency", edge - 1)).results)


def test_a_range_without_any_plan_says_why() -> None:
    with pytest.raises(NoPlanError, match="weights"):
        found(question("llama3-70b", "h100", 1, "tpot"), "isl", 1, 100)


@pytest.mark.parametrize(
    ("axis", "low", "high", "sentence"),
    [
        ("concurrency", 8, 8, "expected a range"),
        ("isl", 1, 10**6, "takes prompts up to 8128"),
        ("tokens", 5, 10**6, "--from 5: expected 1984"),
        ("gpus", 1, 10**10, "--to 10000000000"),
    ],
)
def test_a_range_that_is_none_is_refused(axis: str, low: int, high: int, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        found(question("llama3-8b", "h100", 8, "tpot"), axis, low, high)
