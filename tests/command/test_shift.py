"""`plan shift`: its table, its files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import ROOT, run

ASKED = ("shift", "-m", "llama3-8b", "--gpus", "4", "--isl", "2000")


def test_systems_over_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    done = run(*ASKED)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[1].split()[:2] == ["1", "shift"]
    text = " ".join(done.out.split())
    assert "Ranks of TP4 in the order 0, 1, 2, 3" in text
    assert "25.0% more" in text


def test_csv_and_json_say_the_same() -> None:
    rows, objects = run(*ASKED, "--csv", "-").rows, json.loads(run(*ASKED, "--json", "-").out)
    assert [row["system"] for row in rows] == [each["system"] for each in objects]
    assert {row["at"] for row in rows} == {"load", "peak"}
    for row in rows:
        if row["tpot_ms"]:
            latency = float(row["ttft_ms"]) + 255 * float(row["tpot_ms"])
            assert float(row["latency_ms"]) == pytest.approx(latency, rel=1e-4)


def test_requests_one_by_one_come_out_the_same_again() -> None:
    words = ("shift", "-m", "llama3-8b", "--gpus", "2", "--isl", "200", "--arrival-rate", "8", "--requests", "40")
    first, again = (run(*words, "--burstiness", "2", "--csv", "-") for _ in range(2))
    assert first.out == again.out
    assert {row["system"] for row in first.rows} == {"shift", "TP2", "DP2", "SP2"}
    for row in first.rows:
        assert float(row["ttft_p50_ms"]) <= float(row["ttft_p90_ms"]) <= float(row["ttft_p99_ms"])


def test_requests_of_a_file_at_their_own_rate_or_another(tmp_path: Path) -> None:
    trace = ROOT / "tests" / "data" / "trace.csv"
    words = ("shift", "-m", "llama3-8b", "--gpus", "2", "--base", "SP2", "--csv", "-")
    own, slow = run(*words, "--trace", trace).rows, run(*words, "--trace", trace, "--arrival-rate", "0.5").rows
    assert {row["requests"] for row in own} == {"80"}
    assert float(slow[0]["arrival_rate_per_s"]) == pytest.approx(0.5)
    assert float(slow[0]["ttft_p99_ms"]) < float(own[0]["ttft_p99_ms"])
    (tmp_path / "once.csv").write_text("arrival,isl,osl\n0,900,20\n0,700,30\n", encoding="utf-8")
    both = run(*words[:-2], "--trace", tmp_path / "once.csv", "--json", tmp_path / "once.json")
    assert "all at once" in both.out
    assert {row["arrival_rate_per_s"] for row in json.loads((tmp_path / "once.json").read_text())} == {None}
    done = run(*words, "--trace", tmp_path / "once.csv", "--arrival-rate", "1")
    assert (done.status, "all requests come at once" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (("--trace", "missing.csv"), 2, "--trace missing.csv"),
        (("--trace", "missing.csv", "--concurrency", "2"), 2, "--trace and --concurrency both say"),
        (("--base", "SP"), 2, "'SP' is no base: expected sequence and tensor parallelism, as SP8 or SP4xTP2"),
        (("--base", "SP8"), 2, "a replica of 8 chips: --gpus is 4"),
        (("--arrival-rate", "1", "--concurrency", "2"), 2, "give one of them"),
        (("--arrival-rate", "1", "--burstiness", "-1"), 2, "--burstiness must be from 0"),
        (("--arrival-rate", "1", "--requests", "1000000"), 2, "--requests must be at most 100000"),
        (("--engine", "fastertransformer"), 2, "engine fastertransformer runs static batches; give another --engine"),
        (
            ("--replica", "3"),
            3,
            "no base of 3 chips can shift: SP3: 32 query heads do not divide over 3 chips; --replica 2",
        ),
        (("--memory-limit", "12GiB"), 3, "no base of 4 chips can shift: SP4: weights"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], status: int, sentence: str) -> None:
    done = run(*ASKED, *words)
    assert done.status == status
    assert sentence in " ".join(done.err.split())
    assert not done.out
