"""`plan crossover`: its table, its files, and what it refuses."""

from __future__ import annotations

import csv
import io
import json

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
