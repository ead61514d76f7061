"""Phase diagrams against rankings at single points, and one plan for all against losses counted by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from asking import request

from planner import NoPlanError, Request
from planner.explaining.breakdown import pinned
from planner.phases.region import diagram as module
from planner.phases.region.diagram import Diagram, diagram
from planner.phases.region.surface import dimension
from planner.plans.plan import Plan
from planner.ranking import rank
from planner.units import MS

TIMES = ("latency", "ttft", "tpot")


def found(asked: Request, names: tuple[str, str], lows: Any = (None, None), highs: Any = (None, None)) -> Diagram:
    first, second = map(dimension, names)
    return diagram(asked, (first, second), lows, highs)


def small(**options: Any) -> Request:
    return request("llama3-8b", 2, **options)


def at(result: Diagram, point: tuple[float, float]) -> Request:
    asked = result.request
    for each, value in zip(result.dimensions, point, strict=True):
        asked = each.put(asked, value)
    return asked


def goal(asked: Request, plan: Plan | None = None) -> float:
    """Of the best plan, or of one, by a ranking; infinite where there is none."""
    try:
        results = rank(asked if plan is None else pinned(asked, plan)).results
    except NoPlanError:
        return float("inf")
    if asked.objective in TIMES:
        return float(results[f"{asked.objective}_ms"][0]) * MS
    return 1 / float(results["tokens_per_s"][0])


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ACROSS", 6), ("UP", 4), ("SLOW_ACROSS", 4), ("SLOW_UP", 3)):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    ("names", "objective", "work", "lows", "highs"),
    [
        (("concurrency", "isl"), "latency", {}, (None, None), (900, 7000)),
        (("osl", "concurrency"), "tpot", {"isl": 500}, (2, None), (2000, 300)),
        (("isl", "gpus"), "ttft", {"concurrency": 8}, (None, None), (4000, 2)),
        (("arrival_rate", "isl"), "latency", {}, (3, 512), (6, 600)),
        (("prefix_hit", "arrival_rate"), "tpot", {"isl": 2000}, (0, 2), (0.2, 3)),
        (("isl", "osl"), "throughput", {}, (400, 60), (440, 66)),
        (("concurrency", "max_latency"), "throughput", {}, (None, 2000), (60, 4000)),
    ],
)
def test_leaders_are_those_of_rankings(
    names: tuple[str, str], objective: Any, work: dict[str, Any], lows: Any, highs: Any
) -> None:
    result = found(small(objective=objective, work=work), names, lows, highs)
    points = list(result.cells)
    rng = np.random.default_rng(1)
    for index in rng.choice(len(points), 4, replace=False):
        cell = result.cells[points[index]]
        best = goal(at(result, cell.point))
        assert cell.goal == pytest.approx(best, rel=1e-8)
        if cell.plan is not None and "gpus" not in names:
            assert goal(at(result, cell.point), cell.plan) == pytest.approx(best, rel=1e-8)
    assert sum(region.share for region in result.regions) == pytest.approx(1)


def test_changes_are_where_rankings_have_them_to_one_step() -> None:
    result = found(request("llama3-8b", 4, objective="tpot"), ("concurrency", "isl"), highs=(900, 7000))
    assert result.edges
    assert {edge.axis for edge in result.edges} == {0, 1}
    for edge in result.edges:
        assert edge.high - edge.low == 1
        for value, plan in ((edge.low, edge.before), (edge.high, edge.after)):
            point = (value, edge.held) if edge.axis == 0 else (edge.held, value)
            assert result.cells[point].plan == plan
    for axis, others in ((0, result.up), (1, result.across)):
        for held in others:
            spans = result.stretches(axis, held)
            assert all(before.end == after.low for before, after in pairwise(spans))


def test_the_options_may_change_places() -> None:
    one = found(small(), ("concurrency", "isl"), highs=(64, 4000))
    other = found(small(), ("isl", "concurrency"), highs=(4000, 64))
    for a in set(one.across) & set(other.up):
        for b in set(one.up) & set(other.across):
            assert one.cells[a, b].plan == other.cells[b, a].plan
    shares = [{region.plan: region.share for region in each.regions} for each in (one, other)]
    assert shares[0].keys() == shares[1].keys()


def test_one_plan_for_all_loses_least_at_its_worst() -> None:
    """Every plan ranked alone at every point of the grid."""
    result = found(small(), ("concurrency", "isl"), highs=(60, 4000))
    plans = list(result.goals)
    grid = [(a, b) for a in result.across for b in result.up]
    goals = np.array([[goal(at(result, point), plan) for point in grid] for plan in plans])
    losses = goals / goals.min(axis=0) - 1
    runs = np.isfinite(goals.min(axis=0))
    for plan, own in zip(plans, losses, strict=True):
        fixed = next(each for each in result.fixed if each.plan == plan)
        there = np.isfinite(own) & runs
        assert fixed.covers == pytest.approx(there.sum() / runs.sum())
        assert fixed.mean == pytest.approx(own[there].mean(), abs=1e-9)
        assert fixed.worst >= own[there].max() - 1e-9  # of the refined points too
    roomy = [each for each in result.fixed if each.covers >= 0.95]
    assert result.once in roomy
    assert result.once.worst == min(each.worst for each in roomy)


def test_an_interrupt_keeps_what_is_found() -> None:
    first, second = dimension("concurrency"), dimension("isl")
    rounds: list[int] = []

    def stop(done: int, total: int) -> None:
        rounds.append(total)
        if done:
            raise KeyboardInterrupt

    result = diagram(small(), (first, second), (None, None), (200, 4000), stop)
    assert not result.whole
    assert len(result.cells) == len(result.across) * len(result.up) == rounds[0]
    assert sum(region.share for region in result.regions) == pytest.approx(1)
