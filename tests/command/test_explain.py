"""`plan explain` and `plan compare`: what they print, what scripts read, and what they refuse."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import Completed, run

from planner.costs.roofline import BOUNDS
from planner.report import compare as compare_report
from planner.report import explain as explain_report

WINNER = ("explain", "--model", "llama3-70b", "--gpus", "8")
LOADED = ("explain", "--model", "llama3-8b", "--plan", "TP2xPP2", "--concurrency", "24", "--isl", "600")
PAIR = ("compare", "TP8", "TP4xDP2", "--model", "llama3-70b", "--gpus", "8")


@cache
def good(*words: str) -> Completed:
    """What a command that works prints; each is run once."""
    done = run(*words)
    assert (done.status, done.err) == (0, "")
    return done


def lines_wider(text: str, columns: int) -> list[str]:
    return [line for line in text.splitlines() if len(line) > columns]


@pytest.mark.parametrize(
    "words",
    [
        WINNER,
        LOADED,
        (*WINNER, "--objective", "throughput", "--max-tpot", "40"),
        ("explain", "--model", "llama3-8b", "--hardware", "tpu-v5e", "--gpus", "8", "--objective", "cost"),
        ("explain", "--model", "llama3-8b", "--hardware", "h100-lecture", "--gpus", "2", "--osl", "1"),
        PAIR,
        (*PAIR, "--objective", "throughput", "--isl", "4096"),
        ("compare", "TP8", "TP4xDP2", "TP2xDP4", "TP4xPP2", "-m", "llama3-70b", "--gpus", "8", "--concurrency", "32"),
        ("compare", "--plan", "TP8", "--hardware", "h100,h200", "--engine", "vllm,trtllm", "--model", "llama3-70b"),
    ],
)  # fmt: skip
def test_pages_are_at_most_100_columns_and_every_table_has_its_sum(words: tuple[str, ...]) -> None:
    out = good(*words).out
    assert lines_wider(out, 100) == []
    assert "nan" not in out
    assert "inf " not in out


def test_the_terms_of_a_page_are_those_of_its_ranking() -> None:
    found = good(*WINNER, "--csv", "-").rows
    (ranked,) = run("--model", "llama3-70b", "--gpus", "8", "--top", "1", "--csv", "-").rows
    assert list(found[0]) == list(explain_report.ROW)
    for section in ("ttft", "tpot"):
        items = [row for row in found if row["section"] == section]
        assert {row["plan"] for row in items} == {ranked["plan"]}
        together = sum(float(row["time_ms"]) for row in items)
        assert together == pytest.approx(float(ranked[f"{section}_ms"]), rel=1e-4)
        assert sum(float(row["share"]) for row in items) == pytest.approx(1, rel=1e-4)
        for row in items:
            bounds = {bound: float(row[f"{bound}_ms"]) for bound in BOUNDS}
            assert sum(bounds.values()) == pytest.approx(float(row["time_ms"]), rel=1e-3, abs=1e-9)
            assert row["bound"] == max(bounds, key=lambda bound: abs(bounds[bound])) or not any(bounds.values())
    memory = {row["item"]: float(row["gib"]) for row in found if row["section"] == "memory"}
    assert memory["weights"] == pytest.approx(float(ranked["weights_gib"]), rel=1e-4)
    assert sum(memory.values()) == pytest.approx(float(ranked["memory_limit_gib"]), rel=1e-4)


def test_the_stated_change_and_the_difference_are_those_of_the_rows() -> None:
    found: list[dict[str, Any]] = json.loads(good(*WINNER, "--json", "-").out)
    page = " ".join(good(*WINNER).out.split())
    gains = {row["item"]: row["gain"] for row in found if row["section"] == "change" and row["gain"] is not None}
    best = max(gains, key=lambda name: gains[name])
    assert f"changes tried, {best} would help most" in page
    assert f"{gains[best]:.1%} less" in page
    both = run("--model", "llama3-70b", "--gpus", "8", "--top", "2", "--csv", "-").rows
    rows = [row for row in found if row["section"] == "difference"]
    assert {(row["plan"], row["against"]) for row in rows} == {(both[0]["plan"], both[1]["plan"])}
    gap = float(both[1]["latency_ms"]) - float(both[0]["latency_ms"])
    assert sum(row["difference"] for row in rows) == pytest.approx(gap, rel=1e-3)


def test_a_given_plan_is_held_against_the_first() -> None:
    out = good(*WINNER, "--plan", "TP4xDP2").out
    assert out.startswith("llama3-70b TP4xDP2 (number 2 of ")
    assert re.search(r"TP8, the first, takes [\d.]+ % less", out)
    assert "the best plan of these chips" in good(*WINNER, "--plan", "TP2xPP4").out


def test_engines_that_are_tried_are_those_measured_on_the_chip_and_no_older_versions_of_them() -> None:
    rows = good(*WINNER, "--csv", "-").rows
    assert {row["item"] for row in rows if row["phase"] == "engine"} == {"engine sglang", "engine trtllm"}
    assert "takes as long (" in good(*WINNER[:-1], "16", "--plan", "TP8").out  # as TP8xDP2, for one request


def test_a_pipeline_says_what_its_floor_is_of() -> None:
    out = " ".join(good(*LOADED).out.split())
    assert "one microbatch of 12 requests through all 2 stages" in out
    for name in ("send", "bubble", "host", "all-reduce"):
        assert name in {row["item"] for row in good(*LOADED, "--csv", "-").rows}


def test_comparing_says_where_the_order_flips_and_the_rows_have_it() -> None:
    words = (*PAIR, "--weights", "fp8")
    found: list[dict[str, Any]] = json.loads(good(*words, "--json", "-").out)
    assert list(found[0]) == list(compare_report.ROW)
    flips = [row for row in found if row["section"] == "flip" and row["axis"] == "concurrency"]
    assert [row["leads"] for row in flips] == ["TP8", "TP4xDP2"]
    at = flips[1]["at"]
    assert f"from {at} requests on TP4xDP2" in " ".join(good(*words).out.split())
    for load, first in ((at - 1, "TP8"), (at, "TP4xDP2")):
        ranked = run(
            "--model", "llama3-70b", "--gpus", "8", "--weights", "fp8", "--concurrency", load, "--csv", "-"
        ).rows
        order = [row["plan"] for row in ranked if row["plan"] in ("TP8", "TP4xDP2")]
        assert order[0] == first
    results = {(row["candidate"], row["item"]): row["value"] for row in found if row["section"] == "result"}
    gap = results["TP4xDP2", "latency_ms"] - results["TP8", "latency_ms"]
    terms = [row["difference"] for row in found if row["section"] == "term" and row["candidate"] == "TP4xDP2"]
    assert sum(terms) == pytest.approx(gap, rel=1e-9)


def test_candidates_are_every_combination_and_named_by_what_differs() -> None:
    rows = good(
        "compare", "--model", "llama3-8b", "--hardware", "h100,h200", "--weights", "bf16,fp8", "--csv", "-"
    ).rows
    assert list(dict.fromkeys(row["candidate"] for row in rows if row["section"] == "result")) == [
        "TP8 h100-sxm bf16", "TP8 h100-sxm fp8", "TP8 h200-sxm bf16", "TP8 h200-sxm fp8",
    ]  # fmt: skip
    rows = good("compare", "--plan", "TP4", "--hardware", "h100,h200", "--model", "llama3-8b", "--csv", "-").rows
    assert {row["candidate"] for row in rows} == {"h100-sxm", "h200-sxm"}


@pytest.mark.parametrize(
    ("status", "words", "said"),
    [
        (2, ("explain", "--model", "llama3-70b", "--plan", "eight"), "'eight' is not a plan"),
        (2, ("explain", "--model", "llama3-70b", "--plan", "TP8", "--tp", "8"), "leave out --tp"),
        (2, ("explain", "--model", "llama3-70b", "--max-tpot", "0"), "--max-tpot must be above 0"),
        (2, ("explain", "--model", "llama3-70b", "--csv", "-", "--json", "-"), "both want stdout"),
        (2, ("explain", "--model", "llama3-70b", "--objective", "speed"), "--objective: expected one of"),
        (3, ("explain", "--model", "llama3-70b", "--plan", "TP3"), "tp 3 does not divide the 64 query heads"),
        (3, ("explain", "--model", "llama3-70b", "--plan", "TP1"), "--weights fp8"),
        (3, ("explain", "--model", "llama3-70b", "--plan", "TP8", "--max-tpot", "1"), "tpot"),
        (2, ("compare", "TP8", "--model", "llama3-70b"), "compare takes 2 to 4 candidates, found 1"),
        (2, ("compare", "TP1", "TP2", "TP4", "--hardware", "h100,h200", "-m", "llama3-8b"), "found 6 (3 plan x 2 hard"),
        (2, ("compare", "TP8", "TP8", "--model", "llama3-70b"), "the same candidate twice"),
        (2, ("compare", "TP8", "TP4xDP2"), "no model: give --model"),
        (2, ("compare", "TP8", "TP4", "--model", "llama3-70b", "--pp", "1"), "leave out --tp"),
        (2, ("compare", "TP4", "TP2", "-m", "llama3-8b", "--hardware", "h100,,h200"), "found an empty one"),
        (2, ("compare", "TP1", "TP2", "-m", "llama3-8b", "--objective", "cost", "-H", "t4"), "T4"),
        (3, ("compare", "TP8", "TP1", "--model", "llama3-70b"), "TP1: no plan for llama3-70b on 1 x h100-sxm"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_said(status: int, words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = run(*words)
    if said == "T4":  # has no price in its file, or does not hold the model: either way a sentence
        assert done.status in (2, 3)
    else:
        assert (done.status, done.out) == (status, "")
        assert said in done.err
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "terms.csv"
    assert run(*LOADED, "--csv", target, "--quiet") == Completed(0, "", "")
    assert target.read_text(encoding="utf-8").startswith("section,plan,")
    assert target.read_text(encoding="utf-8") == good(*LOADED, "--csv", "-").out
    headless = good(*PAIR, "--csv", "-", "--no-header").out
    assert headless == good(*PAIR, "--csv", "-").out.split("\n", 1)[1]
    assert run(*LOADED, "--csv", str(tmp_path / "no" / "such")).status == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["terms.csv"]


FOUR = ("compare", "TP8", "TP4xDP2", "--hardware", "h100,h200", "-m", "llama3-70b", "--gpus", "8")


@pytest.mark.parametrize("words", [LOADED, PAIR, FOUR])
def test_a_narrow_terminal_gets_narrow_tables(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*words, terminal=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.out)
    assert done.status == 0
    assert lines_wider(plain, 60) == []
    for name in ("TTFT", "gate_up", "decode step"):
        assert name in plain
