"""Measured beside predicted, and what many of them say together."""

from __future__ import annotations

import pytest

from planner.evidence.comparison import Comparison, summarised, summary


def test_a_summary_is_of_absolute_errors_but_for_its_bias() -> None:
    found = summary(("x",), [-0.1, 0.3, 0.2, -0.2, 0.0])
    assert found.cases == 5
    assert found.bias == pytest.approx(0.04)
    assert (found.mean, found.median, found.worst) == (pytest.approx(0.16), pytest.approx(0.2), pytest.approx(0.3))
    assert found.p90 == pytest.approx(0.26)  # numpy's linear rule: a tenth short of the last


def test_errors_are_relative_and_groups_keep_their_order() -> None:
    rows = [
        Comparison("b", "1", "", 10.0, 11.0, engine="x"),
        Comparison("a", "2", "", 10.0, 8.0, engine="y"),
        Comparison("b", "3", "", 5.0, 5.0, engine="y"),
    ]
    assert [each.error for each in rows] == [pytest.approx(0.1), pytest.approx(-0.2), 0.0]
    assert [(each.key, each.cases) for each in summarised(rows, ["check"])] == [(("b",), 2), (("a",), 1)]
    assert [each.key for each in summarised(rows, ["engine", "check"])] == [("x", "b"), ("y", "a"), ("y", "b")]
