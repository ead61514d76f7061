"""What tests use of one another: a check of many cases runs them all and says which failed."""

from __future__ import annotations

import pytest
from helpers import Late, every


def test_every_case_runs_and_those_that_fail_are_named() -> None:
    ran = []

    @every("left, right", [(1, 1), (1, 2), (3, 3), (3, 4)])
    @every(("more",), [(0,)])
    def equal(left: int, right: int, more: int) -> None:
        ran.append(left)
        assert left == right + more

    with pytest.raises(ExceptionGroup, match=r"2 of 4 cases of equal failed") as caught:
        equal()
    assert ran == [1, 1, 3, 3]
    assert caught.group_contains(ExceptionGroup, match="1 of 1 cases")
    assert [error.__notes__ for error in caught.value.exceptions] == [
        ["case: left=1, right=2"],
        ["case: left=3, right=4"],
    ]


@every("value", [1, 2])
def test_fixtures_and_lone_values_are_passed(value: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_fixtures_and_lone_values_are_passed"
    assert value in (1, 2)


def test_what_is_late_is_made_once_when_it_is_used() -> None:
    made = []
    late = Late(lambda: made.append(1) or [4, 5])
    assert made == []
    assert (late[0], len(late), list(late), late.index(5)) == (4, 2, [4, 5], 1)
    assert made == [1]
