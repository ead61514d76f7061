"""`plan search`: strategies, their comparison with the best template, and stages."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from helpers import heeding_interrupts, run

from planner.report.progress import Progress

LECTURE = ("search", "--graph", "two-towers", "-H", "h100-pairs", "--gpus", 4, "--memory-limit", "64MB")
SMALL = ("search", "-m", "llama3-8b", "--gpus", 4, "--layers", 2, "--budget", 200)


def test_the_small_problem_of_the_lecture() -> None:
    done = run(*LECTURE)
    text = " ".join(done.out.split())
    assert (done.status, done.err) == (0, "")
    assert "All 14641 strategies looked at: 3307 fit; this one is the best of them." in text
    assert "shorter than the best of 12 templates, TP2xDP2" in text
    assert "because the busiest link sends" in text


def test_a_model_against_its_best_template() -> None:
    done = run(*SMALL)
    text = " ".join(done.out.split())
    assert done.status == 0
    assert "llama3-8b, 2 of 32 layers (bf16) on 4 x h100-sxm" in text
    assert "4 Markov chains" in text
    assert "templates, TP4: the template is not beaten here." in text
    assert all(len(line) <= 100 for line in done.out.splitlines())


def test_prefill_finds_a_head_that_is_split_by_words() -> None:
    done = run("search", "-m", "llama3-8b", "--gpus", 4, "--phase", "prefill", "--concurrency", 4, "--budget", 200)
    text = " ".join(done.out.split())
    assert "shorter than the best of 11 templates, DP4" in text
    assert "because the busiest chip computes" in text


def test_rows_and_the_same_result_with_any_number_of_processes(tmp_path: Path) -> None:
    one, two = tmp_path / "one.csv", tmp_path / "two.json"
    assert run(*SMALL, "--csv", one, "--quiet").out == ""
    assert run(*SMALL, "--json", two, "--jobs", 2, "--quiet").status == 0
    rows = json.loads(two.read_text())
    lines = one.read_text().splitlines()
    assert [row["operator"] for row in rows] == ["embedding", "0 attention", "0 ffn", "1 attention", "1 ffn", "head"]
    assert lines[0].split(",")[:4] == ["operator", "split", "tasks", "devices"]
    assert f"{rows[0]['step_ms']:.6g}" in lines[1]
    assert rows[-1]["end_ms"] == pytest.approx(rows[0]["step_ms"])
    assert rows[0]["step_ms"] <= rows[0]["template_step_ms"] * (1 + 1e-12)
    assert run(*SMALL, "--csv", "-", "--no-header").out.count("\n") == 6


def test_a_picture_of_the_timeline(tmp_path: Path) -> None:
    target = tmp_path / "timeline.svg"
    assert run(*LECTURE, "--plot", target, "--quiet").status == 0
    text = target.read_text()
    assert "chip 3" in text
    assert "tower a" in text
    assert "two-towers: 0.9991 ms a step" in text


def test_stages_of_a_model_and_of_two_kinds_of_chips() -> None:
    words = ("search", "-m", "llama3.2-1b", "--gpus", 4, "--method", "stages", "--microbatches", 16)
    done = run(*words, "--concurrency", 128)
    text = " ".join(done.out.split())
    assert done.status == 0
    assert "T = sum + (16 - 1) x slowest stage" in text
    assert "% longer; as many layers in each of 4 stages takes" in text
    mixed = run(*words, "--beside", "a100-80gb-sxm:2", "--csv", "-", "--concurrency", 128)
    assert {row["hardware"] for row in mixed.rows} == {"h100-sxm", "a100-80gb-sxm"}
    assert all(len(row["shardings"].split()) == int(row["operators"]) for row in mixed.rows)
    latency = run(*words, "--form", "inference")
    assert "T = 1 stages x the slowest" in latency.out


def test_shardings_on_all_grids_of_a_mesh() -> None:
    done = run("search", "--graph", "two-towers", "-H", "h100-pairs", "--gpus", 4, "--method", "sharding")
    assert "By grid, in ms: 1x4 0.97" in " ".join(done.out.split())
    assert [row["sharding"] for row in run(*LECTURE, "--method", "sharding", "--csv", "-").rows].count("S0P1") >= 2
    model = run("search", "-m", "llama3-8b", "--gpus", 4, "--layers", 2, "--method", "sharding", "--json", "-")
    assert {row["sharding"] for row in json.loads(model.out)} == {"P1", "R"}  # the embedding is not worth an all-reduce


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ((), 2, "give either --model or --graph"),
        (("-m", "llama3-8b", "--graph", "lenet"), 2, "give either --model or --graph"),
        (("--graph", "lennet"), 2, "unknown graph 'lennet': did you mean lenet?"),
        (("-m", "llama3-8b", "--phase", "both"), 2, "--phase both: expected one of decode, prefill"),
        (("-m", "llama3-8b", "--layers", "some"), 2, "--layers: expected a whole number of at least 1, or all"),
        (
            ("-m", "llama3-8b", "--method", "guess"),
            2,
            "--method: expected one of auto, exhaustive, mcmc, stages, sharding",
        ),
        (("-m", "llama3-8b", "--devices", "few"), 2, "--devices: expected one of blocks, any"),
        (("-m", "llama3-8b", "--beta", "0"), 2, "--beta must be above 0"),
        (("-m", "llama3-8b", "--beside", "a100:8"), 2, "--beside: chips of several kinds are for --method stages"),
        (("-m", "llama3-8b", "--method", "stages", "--beside", "a100"), 2, "expected hardware and chips"),
        (("-m", "llama3-8b", "--method", "stages", "--form", "best"), 2, "--form best: expected one of"),
        (("-m", "llama3-8b", "--method", "stages", "--plot", "a.svg"), 2, "not there for --method stages"),
        (("-m", "llama3-8b", "--method", "exhaustive", "--devices", "any"), 2, "looks at blocks of devices"),
        (("-m", "llama3-8b", "--isl", "9000"), 2, "9128 tokens: llama3-8b attends to at most 8192"),
        (("--graph", "lenet", "--layers", "2"), 2, "--layers 2: is for --model"),
        (("-m", "minimax-text-01"), 2, "linear attention is not priced yet"),
        (("-m", "llama3-8b", "--moves", "all"), 2, "--moves: expected one of mixed, single"),
        (("-m", "llama3.1-405b", "--gpus", "4"), 3, "no strategy fits"),
        ((*LECTURE[1:-1], "20MB"), 3, "no strategy fits: weights and KV take 0.112 GiB when nothing is held twice"),
    ],
)
def test_what_cannot_be_searched(words: tuple[str, ...], status: int, said: str) -> None:
    done = run("search", *words)
    assert done.status == status
    assert said in done.err
    assert not done.out


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_a_search_with_the_best_so_far(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(progress: Progress, failed: bool = False) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Progress, "advance", interrupt)
    with heeding_interrupts():
        done = run(*SMALL[:-1], 100_000_000, "--chains", 2, "--jobs", jobs)
    assert done.status == 0
    assert done.err == "plan: interrupted: this is the best so far\n"
    assert "Stopped early." in done.out
    assert "Step: " in done.out
