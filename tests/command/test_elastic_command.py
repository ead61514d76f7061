"""`plan elastic`: its table, its files, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers import ROOT, run

from planner.phases.elastic import comparison as elastic

ASKED = ("elastic", "-m", "lwm-7b", "-H", "a100-80gb-sxm", "--long", "20000", "--requests", "8")


def test_systems_and_the_form_as_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*ASKED)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1].split()[0] == "elastic"
    text = " ".join(done.out.split())
    assert "DoP a, ms b, us/token" in text
    assert "8 requests" in text


def test_csv_and_json_say_the_same() -> None:
    first = run(*ASKED, "--csv", "-")
    objects = json.loads(run(*ASKED, "--json", "-").out)  # the same seed
    assert [row["per_token_ms"] for row in first.rows] == [f"{each['per_token_ms']:.6g}" for each in objects]
    assert [row["system"] for row in first.rows] == [each["system"] for each in objects]
    for row in first.rows:
        assert float(row["per_token_ms"]) > 0
        assert not row["error"]


def test_a_system_that_cannot_hold_a_request_says_so() -> None:
    """All chips together hold 800,000 tokens, those for answers alone do not."""
    words = ("elastic", "-m", "lwm-7b", "-H", "a100-80gb-sxm", "--long", "400000", "--long-share", "0.5")
    rows = run(*words, "--arrival-rate", "0.01", "--requests", "12", "--csv", "-").rows
    assert {row["system"]: row["error"] for row in rows} == {
        "elastic": "", "whole prompts": "", "chunked prompts": "", "disaggregated": "a request does not fit",
        "fixed ring": "", "replicas": "a request does not fit",
    }  # fmt: skip
    assert {row["highest_rate_per_s"] for row in rows if row["error"]} == {"0"}


def test_a_limit_that_no_system_keeps_ends_with_what_one_would() -> None:
    done = run(*ASKED, "--slo-scale", "0.5", "--csv", "-")
    assert done.status == 3
    assert {row["highest_rate_per_s"] for row in done.rows} == {"0"}
    needed = re.search(r"would with --slo-scale ([0-9.]+)", " ".join(done.err.split()))
    assert needed is not None
    assert 0.5 < float(needed[1]) < 1.5  # it is alone there, on the plan that sets the limit
    done = run(*ASKED, "--slo-scale", needed[1], "--csv", "-")
    assert done.status == 0
    assert any(float(row["highest_rate_per_s"]) > 0 for row in done.rows)


def test_an_interrupt_keeps_the_systems_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    score = elastic.score

    def stopping(found: Any, system: Any, *rest: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(system.name)
        return score(found, system, *rest)

    monkeypatch.setattr(elastic, "score", stopping)
    stopped = run(*ASKED, "--csv", "-")
    assert stopped.status == 0
    assert [row["system"] for row in stopped.rows] == ["elastic", "whole prompts"]
    assert "interrupted: 2 of 6 systems" in stopped.err


def test_requests_of_a_file() -> None:
    trace = ROOT / "tests" / "data" / "trace.csv"
    rows = run("elastic", "-m", "llama3-8b", "--gpus", "2", "--tp", "1", "--trace", trace, "--csv", "-").rows
    assert {row["requests"] for row in rows} == {"80"}
    assert rows[0]["system"] == "elastic"


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("--trace", "missing.csv"), 2, "--trace missing.csv"),
        (("--long-share", "1.5"), 2, "--long-share must be from 0 to 1, found 1.5"),
        (("--attainment", "-1"), 2, "--attainment must be above 0 and at most 1"),
        (("--engine", "fastertransformer"), 2, "engine fastertransformer runs static batches"),
        (("--requests", "100000"), 2, "--requests must be at most 5000"),
        (("--arrival-rate", "0"), 2, "--arrival-rate must be above 0"),
        (("--slo-scale", "0"), 2, "--slo-scale must be above 0"),
        (("--long", "1000000"), 2, "more than lwm-7b's context"),
        (("--tp", "3"), 2, "no two or more instances of 3"),
        (("--memory-limit", "9GiB"), 3, "the longest request has"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], status: int, sentence: str) -> None:
    done = run(*ASKED, *words)
    assert done.status == status
    assert sentence in " ".join(done.err.split())
    assert not done.out
