"""Advice on a limit on memory: the nearest limit that works, on whichever side of the one asked for it lies."""

from __future__ import annotations

import re

import pytest
from helpers import run

from planner import Plan, advice

MODEL = ("--model", "llama3-70b", "--gpus", "8")
ADVISED = re.compile(r"(--memory-(?:limit|fraction)) ([0-9.]+)(GiB|)")


def advised(*words: str) -> tuple[str, float, str]:
    """(option, value, unit) that a refusal names."""
    done = run(*words)
    assert done.status == 3
    found = ADVISED.search(done.err.partition("The smallest change that would do: ")[2])
    assert found, done.err
    return found[1], float(found[2]), found[3]


def status(option: str, value: float, unit: str, words: tuple[str, ...] = MODEL) -> int:
    return run(*words, option, f"{value:g}{unit}", "--quiet").status


@pytest.mark.parametrize(
    ("option", "asked", "step"),
    [("--memory-limit", "78GiB", 1.0), ("--memory-limit", "79GiB", 1.0), ("--memory-fraction", "0.99", 0.01)],
)
def test_where_the_memory_outside_the_budget_binds_a_little_less_is_advised(
    option: str, asked: str, step: float
) -> None:
    named, value, unit = advised(*MODEL, option, asked)
    assert named == option
    assert value < float(asked.removesuffix("GiB"))
    assert status(option, value, unit) == 0
    assert status(option, value + step, unit) == 3


@pytest.mark.parametrize(
    ("option", "asked", "step"), [("--memory-limit", "16GiB", 1.0), ("--memory-fraction", "0.2", 0.01)]
)
def test_where_weights_bind_a_little_more_is_advised(option: str, asked: str, step: float) -> None:
    named, value, unit = advised(*MODEL, option, asked)
    assert named == option
    assert value > float(asked.removesuffix("GiB"))
    assert status(option, value, unit) == 0
    assert status(option, value - step, unit) == 3


def test_no_limit_on_memory_is_advised_where_none_was_asked_for_or_none_would_do() -> None:
    for words in (
        ("-m", "llama3.1-405b", "--gpus", "8"),
        ("-m", "llama3.1-405b", "--gpus", "8", "--memory-limit", "60GiB"),
    ):
        done = run(*words)
        assert done.status == 3
        assert "--memory" not in done.err


@pytest.mark.parametrize(
    ("plan", "reason"),
    [("TP8xDP3", "TP8xDP3 takes 24 chips, there are 16"), ("TP8", "some other reason"), ("TP8", "TP8xDP3 is another")],
)
def test_a_reason_that_names_its_plan_is_not_labelled_again(plan: str, reason: str) -> None:
    said = advice._labelled(Plan.parse(plan), reason)
    assert said == (reason if reason.startswith(f"{plan} ") else f"{plan}: {reason}")


def test_too_many_chips_are_said_once() -> None:
    done = run("--model", "llama3-8b", "--gpus", "16", "--tp", "8", "--dp", "3")
    assert done.status != 0
    assert done.err.count("TP8xDP3") == 1, done.err


def test_where_chips_are_counted_and_no_replica_fits_the_closest_says_why() -> None:
    done = run(
        "-m",
        "llama3-8b",
        "-H",
        "t4",
        "--arrival-rate",
        5,
        "--max-ttft",
        3000,
        "--max-tpot",
        200,
        "--tp",
        "1,2",
        "--pp",
        1,
    )
    assert (done.status, done.out) == (3, "")
    assert "fits in memory. Closest: TP2" in done.err
