"""`plan crossover`: its table, its files, and what it refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from helpers import run

ASKED = ("crossover", "-m", "llama3-8b", "--gpus", "8", "--to", "256")


def test_stretches_as_a_table() -> None:
    done = run(*ASKED)
    assert (done.status, done.err) == (0, "")
    head, first, *_ = done.out.splitlines()
    assert head.split()[:3] == ["from", "to", "plan"]
    assert first.split()[0] == "1"
    assert "by requests in flight" in " ".join(done.out.split())


def test_csv_and_json_say_the_same_and_join() -> None:
    rows = list(csv.DictReader(io.StringIO(run(*ASKED, "--csv", "-").out)))
    objects = json.loads(run(*ASKED, "--json", "-").out)
    assert [row["plan"] for row in rows] == [each["plan"] for each in objects]
    assert list(rows[0])[:9] == [
        "vary", "from", "to", "goal_from", "goal_to", "next_plan", "next_goal_to", "bottleneck_to", "rank",
    ]  # fmt: skip
    assert [int(row["from"]) for row in rows[1:]] == [int(row["to"]) + 1 for row in rows[:-1]]
    assert [row["next_plan"] for row in rows] == [*(row["plan"] for row in rows[1:]), ""]
    assert float(rows[0]["goal_from"]) == pytest.approx(float(rows[0]["tpot_ms"]), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--vary", "tp"), "--vary tp: expected one of concurrency, isl, tokens, gpus"),
        (("--concurrency", "4"), "--concurrency is what --vary concurrency changes"),
        (("--vary", "gpus", "--slice", "4x4x4"), "--slice is what --vary gpus changes"),
        (("--from", "0"), "--from"),
    ],
)
def test_what_is_no_question(words: tuple[str, ...], sentence: str) -> None:
    done = run("crossover", "-m", "llama3-8b", *words)
    assert done.status == 2
    assert sentence in " ".join(done.err.split())
    assert not done.out


def test_sixty_columns_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*ASKED)
    assert max(map(len, done.out.splitlines())) <= 60


DIAGRAM = ("crossover", "-m", "llama3-8b", "--gpus", "2", "--vary", "concurrency", "--vary", "isl")


def test_a_diagram_of_two_options_in_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*DIAGRAM, "--to", "300", "--to", "4000")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "tokens of a prompt (up), requests in flight (across)"
    assert lines[1].split(" | ")[0].strip() == "4000"
    assert set(lines[13].split(" | ")[1].split()) <= set("AaBbCcDdEe.")
    assert "One plan for all of it: TP" in " ".join(done.out.split())


def test_a_diagram_as_csv_has_a_row_a_cell_and_as_a_picture_the_same_plans(tmp_path: Path) -> None:
    done = run(*DIAGRAM, "--to", "300", "--to", "4000", "--csv", "-", "--plot", tmp_path / "map.svg")
    rows = done.rows
    assert len(rows) == len({(row["a"], row["b"]) for row in rows})
    assert {row["vary_a"] for row in rows} == {"concurrency"}
    for row in rows:
        assert int(row["a_from"]) <= int(row["a"]) <= int(row["a_to"])
        assert int(row["b_from"]) <= int(row["b"]) <= int(row["b_to"])
        if row["plan"]:
            assert float(row["goal"]) == pytest.approx(float(row["latency_ms"]))
            assert float(row["once_loss"] or "inf") >= -1e-6
    drawn = (tmp_path / "map.svg").read_text(encoding="utf-8")
    for plan in {row["plan"] for row in rows if row["plan"]}:
        assert f": {plan}, " in drawn


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--vary", "isl", "--vary", "tp"), "--vary tp: expected two of concurrency, isl"),
        (("--vary", "isl", "--vary", "osl", "--vary", "gpus"), "--vary gpus: one option, or two"),
        (("--vary", "isl", "--vary", "isl"), "two different options"),
        (("--vary", "isl", "--vary", "osl"), "say how far with --to"),
        (("--vary", "isl", "--vary", "max-ttft"), "--vary max-ttft: say how far with --from and --to, in ms"),
        (("--vary", "isl", "--vary", "concurrency", "--concurrency", "4"), "--concurrency is what --vary concurrency"),
        (("--vary", "isl", "--vary", "concurrency", "--arrival-rate", "4"), "both say how many requests"),
        (("--vary", "isl", "--vary", "concurrency", "--to", "2.5"), "--vary isl takes whole numbers"),
        (("--vary", "isl", "--vary", "gpus", "--from", "9", "--to", "9"), "expected a range of isl"),
        (("--vary", "isl", "--to", "4", "--to", "5"), "given 2 times, --vary 1 times"),
        (("--plot", "a.svg"), "give --vary twice"),
    ],
)
def test_what_is_no_diagram(words: tuple[str, ...], sentence: str) -> None:
    done = run("crossover", "-m", "llama3-8b", *words)
    assert done.status == 2
    assert sentence in " ".join(done.err.split())
    assert not done.out


def test_a_region_where_nothing_runs_says_why() -> None:
    done = run("crossover", "-m", "llama3-70b", "--gpus", "1", "--vary", "concurrency", "--vary", "isl", "--to", "9")
    assert done.status == 3
    assert "weights" in done.err
