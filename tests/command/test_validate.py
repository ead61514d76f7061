"""`plan validate`: what is printed and written of what was measured."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest
from helpers import run

from planner.evidence import memory, rankings, validation


def test_memory_prints_every_check_and_every_wrong_verdict() -> None:
    done = run("validate", "--memory")
    assert (done.status, done.err) == (0, "")
    decided = [verdict for verdict in memory.verdicts() if verdict.decidable]
    ran = sum(verdict.ran for verdict in decided)
    assert f"{ran} of {ran} that ran are not refused" in done.out
    assert f"{len(decided) - ran} of {len(decided) - ran} that failed are refused for their reason" in done.out
    assert re.search(r"^weights per chip +\d+ +[+-]0\.\d+% +0\.\d+% +0\.\d+%", done.out, re.MULTILINE)
    assert "wrong:" not in done.out


OTHERS = ("starts", "fastest split")
"""Checks that compare no figures."""


@pytest.mark.parametrize("name", list(validation.TABLES))
def test_every_comparison_of_a_table_is_written(name: str) -> None:
    table = validation.TABLES[name]()
    rows = [row for row in json.loads(run("validate", f"--{name}", "--json", "-").out) if row["check"] not in OTHERS]
    assert len(rows) == len(table.found) > 0
    assert {row["table"] for row in rows} == {name}
    for row, each in zip(rows, table.found, strict=True):
        assert row["error"] == pytest.approx(each.error, rel=1e-4, abs=1e-9)
        assert row["source"]


def test_csv_holds_what_json_holds() -> None:
    written = list(csv.DictReader(io.StringIO(run("validate", "--memory", "--csv", "-").out)))
    rows = json.loads(run("validate", "--memory", "--json", "-").out)
    assert [row["case"] for row in written] == [row["case"] for row in rows]


def test_the_split_is_printed_and_can_be_grouped_otherwise() -> None:
    done = run("validate", "--serving")
    assert re.search(r"^TPOT +unseen +\d{3} ", done.out, re.MULTILINE)
    by_model = run("validate", "--serving", "--by", "model,check")
    assert re.search(r"^qwen3-32b +TPOT +\d+ ", by_model.out, re.MULTILINE)


def test_the_worst_are_listed_with_their_sources_largest_first() -> None:
    done = run("validate", "--serving", "--worst", 5)
    errors = [float(text) for text in re.findall(r"^ *([+-][\d.]+)%", done.out, re.MULTILINE)]
    assert len(errors) == 5
    assert [abs(error) for error in errors] == sorted(map(abs, errors), reverse=True)
    assert done.out.count("[serving measurements") == 5


def test_ranking_says_what_a_choice_costs_and_which_reports_differ() -> None:
    done = run("validate", "--ranking")
    assert (done.status, done.err) == (0, "")
    assert re.search(r"^unseen groups +\d+ +\d+\.\d% ", done.out, re.MULTILINE)
    pairs = re.search(r"^Published tables: (\d+) of (\d+) pairs", done.out, re.MULTILINE)
    assert pairs is not None
    assert int(pairs[1]) / int(pairs[2]) > 0.97  # all but a few of models with experts
    said = rankings.reports()
    assert f"{sum(each.agrees for each in said)} of {len(said)} ordered as reported" in done.out
    assert done.out.count("differs: ") == sum(not each.agrees for each in said)


def test_without_a_table_named_all_are_printed() -> None:
    done = run("validate")
    for make in validation.TABLES.values():
        assert f"{make().title}: " in done.out
    assert "Choosing plan and load" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--worst", "0"), "--worst must be at least 1"),
        (("--by", "colour"), "--by: expected check or hardware or engine or model or part"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = run("validate", *words)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
