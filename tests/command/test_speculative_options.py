"""`--spec-tokens`, `--spec-accept` and `--draft` in every command that takes them, and what is wrong with them."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from helpers import run

import planner
from planner import Filters

MODEL = "--model llama3-70b --isl 500 --osl 200"
ASKED = "--spec-tokens 3 --spec-accept 0.7 --draft llama3-8b"
OPTIONS: dict[str, Any] = {"isl": 500, "osl": 200, "spec_tokens": 3, "spec_accept": 0.7, "draft": "llama3-8b"}


def rows(words: str) -> list[dict[str, Any]]:
    done = run(*shlex.split(words), "--json", "-")
    assert done.status == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def text(words: str) -> str:
    done = run(*shlex.split(words))
    assert done.status == 0, done.err
    return " ".join(done.out.split())


def test_all_commands_and_python_give_the_same_figures() -> None:
    priced = planner.estimate("llama3-70b", tp=8, concurrency=24, **OPTIONS)
    ranked = planner.plan("llama3-70b", 8, concurrency=24, filters=Filters(tp=(8,)), **OPTIONS)
    (by_plan,) = (row for row in ranked if row["plan"] == "TP8")
    found = [
        rows(f"estimate {MODEL} {ASKED} --tp 8 --concurrency 24")[0],
        rows(f"{MODEL} {ASKED} --gpus 8 --tp 8 --concurrency 24")[0],
        rows(f"sweep {MODEL} {ASKED} --gpus 8 --tp 8 --concurrency 24")[0],
        by_plan,
    ]
    plain = planner.estimate("llama3-70b", tp=8, concurrency=24, isl=500, osl=200)
    assert (plain["spec_tokens"], plain["tokens_per_step"]) == (None, None)
    for name in ("ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s", "memory_gib", "tokens_per_step"):
        assert [row[name] for row in found] == pytest.approx([priced[name]] * 4, rel=1e-12), name
        assert plain[name] is None or priced[name] != pytest.approx(plain[name], rel=1e-6), name
    explained = rows(f"explain {MODEL} {ASKED} --gpus 8 --tp 8 --concurrency 24")
    for section in ("ttft", "tpot"):
        items = [row["time_ms"] for row in explained if row["section"] == section and row["against"] is None]
        assert sum(items) == pytest.approx(priced[f"{section}_ms"], rel=1e-9)


def test_the_caption_says_what_is_drafted_and_what_a_step_yields() -> None:
    said = "3 tokens drafted by llama3-8b, 2.533 tokens a step"
    assert said in text(f"{MODEL} {ASKED} --gpus 8")
    explained = text(f"explain {MODEL} {ASKED} --gpus 8 --tp 8")
    assert said in explained
    assert "A step yields 2.533 tokens of a request" in explained
    assert "to draft 3 tokens and" in explained
    assert "ms to verify 4" in explained


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_auto_drafts_as_many_tokens_as_suit_the_goal_best(objective: Any) -> None:
    work: dict[str, Any] = {"isl": 128, "osl": 512, "concurrency": 200, "objective": objective}
    more: dict[str, Any] = {"spec_accept": 0.8, "draft": "llama3.2-1b"}
    (best, *_) = planner.plan("llama3-70b", 8, spec_tokens="auto", filters=Filters(tp=(8,)), **work, **more)
    each = {
        k: planner.plan("llama3-70b", 8, spec_tokens=k, filters=Filters(tp=(8,)), **work, **more)[0]
        for k in range(1, 9)
    }
    column, sign = ("latency_ms", 1) if objective == "latency" else ("tokens_per_s", -1)
    assert best["spec_tokens"] == min(each, key=lambda k: sign * each[k][column])
    assert best == each[best["spec_tokens"]]
    assert best["spec_tokens"] not in (1, 8)


def test_auto_is_a_number_wherever_a_plan_is_shown() -> None:
    words = "-m llama3-8b --gpus 1 --isl 128 --osl 512 --spec-tokens auto --spec-accept 0.8 --draft llama3.2-1b"
    tokens = rows(words)[0]["spec_tokens"]
    assert tokens in range(2, 8)
    assert f"{tokens} tokens drafted by llama3.2-1b" in text(words)
    assert f"{tokens} tokens drafted by llama3.2-1b" in text(f"explain {words}")
    rejected = rows(f"{words.replace('--gpus 1', '--gpus 3')} --rejected --top 1")
    assert len(rejected) > 1
    assert {row["spec_tokens"] for row in rejected} == {tokens}


def test_points_have_their_own(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text(
        "spec-tokens,spec_accept,draft,concurrency\n3,0.7,ngram,8\n,,,8\n0,,,8\n2,0.5,llama3-8b,8\n"
        "2,,ngram,8\n,0.5,,8\n2,0.5,,8\n99,0.5,ngram,8\n2,1.5,ngram,8\n2,0.5,qwen3-8b,8\n"
    )
    done = run("estimate", *shlex.split(f"{MODEL} --tp 8"), "--points", file)
    assert done.status == 0
    found = list(csv.DictReader(io.StringIO(done.out)))
    plain = planner.estimate("llama3-70b", tp=8, isl=500, osl=200, concurrency=8)
    assert [row["tpot_ms"] for row in found[1:3]] == [f"{plain['tpot_ms']:.6g}"] * 2
    for row, more in ((found[0], {"spec_tokens": 3, "spec_accept": 0.7, "draft": "ngram"}),
                      (found[3], {"spec_tokens": 2, "spec_accept": 0.5, "draft": "llama3-8b"})):  # fmt: skip
        expected = planner.estimate("llama3-70b", tp=8, isl=500, osl=200, concurrency=8, **more)
        assert row["tpot_ms"] == f"{expected['tpot_ms']:.6g}"
        assert row["memory_gib"] == f"{expected['memory_gib']:.6g}"
    problems = ("spec_accept is missing", "says nothing without spec_tokens", "no prediction modules",
                "from 0 to 64, found 99", "from 0 to 1", "same tokenizer")  # fmt: skip
    for row, problem in zip(found[4:], problems, strict=True):
        assert problem in row["error"]
        assert not row["tpot_ms"]


def test_a_sweep_takes_lists_of_both() -> None:
    found = rows(f"sweep {MODEL} --gpus 8 --tp 8 --draft ngram --spec-tokens 0,2,4 --spec-accept 0.5,0.9")
    asked = [(row["spec_tokens"], row["spec_accept"]) for row in found]
    assert asked == [(None, None)] * 2 + [(2, 0.5), (2, 0.9), (4, 0.5), (4, 0.9)]
    for row in found[2:]:
        again = rows(row["asked"].removeprefix("plan "))[0]
        assert again["tpot_ms"] == pytest.approx(row["tpot_ms"], rel=1e-12)


def test_compare_says_from_which_load_on_drafting_does_not_pay() -> None:
    said = text("compare TP8 -m llama3-70b --spec-tokens 0,4 --spec-accept 0.6 --draft llama3-8b --isl 128 --osl 512")
    assert "4 drafted leads first; from" in said
    flip = int(said.split("4 drafted leads first; from ")[1].split()[0])
    work: dict[str, Any] = {"tp": 8, "isl": 128, "osl": 512}
    more: dict[str, Any] = {"spec_tokens": 4, "spec_accept": 0.6, "draft": "llama3-8b"}
    for load, helps in ((flip - 1, True), (flip, False)):
        plain, drafted = (planner.estimate("llama3-70b", concurrency=load, **work, **own) for own in ({}, more))
        assert (drafted["latency_ms"] < plain["latency_ms"]) == helps


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--spec-tokens 3", "--spec-accept is missing"),
        ("--spec-tokens 3 --spec-accept 0.7", "no prediction modules of its own; give --draft"),
        ("--spec-tokens 3 --spec-accept 0.7 --draft mtp", "--draft mtp: llama3-70b has no prediction modules"),
        ("--spec-tokens some --spec-accept 0.7 --draft ngram", "expected"),
        ("--spec-tokens 3 --spec-accept 1.2 --draft ngram", "from 0 to 1"),
        ("--spec-tokens 65 --spec-accept 0.7 --draft ngram", "from 0 to 64, found 65"),
        ("--spec-tokens -1 --spec-accept 0.7 --draft ngram", "-1"),
        ("--spec-accept 0.7", "says nothing without --spec-tokens"),
        ("--draft ngram", "says nothing without --spec-tokens"),
        ("--spec-tokens 3 --spec-accept 0.7 --draft qwen3-0.6b", "needs the same tokenizer"),
        ("--spec-tokens 3 --spec-accept 0.7 --draft llama9", "llama9"),
    ],
)
@pytest.mark.parametrize("command", ["", "sweep"])
def test_what_cannot_be_used_is_named(command: str, words: str, problem: str) -> None:
    done = run(*shlex.split(f"{command} {MODEL} --gpus 8 {words}"))
    assert done.status == 2
    assert problem in " ".join(done.err.split())
    assert "Traceback" not in done.err


def test_a_frontier_has_no_best_number() -> None:
    done = run(*shlex.split(f"{MODEL} --gpus 8 --pareto --spec-tokens auto --spec-accept 0.7 --draft ngram"))
    assert (done.status, "--pareto" in done.err) == (2, True)


def test_a_draft_that_does_not_divide_over_the_group_is_refused_with_the_reason() -> None:
    done = run(*shlex.split("-m llama3.1-405b -H h200 --gpus 64 --tp 64 --weights fp8"))
    assert done.status == 0, done.err
    words = (
        "-m llama3.1-405b -H h200 --gpus 64 --tp 64 --attention heads --weights fp8 --spec-tokens 2 --spec-accept 0.7"
    )
    done = run(*shlex.split(f"{words} --spec-accept 0.7 --draft llama3.1-8b"))
    assert done.status == 3
    assert "the draft llama3.1-8b shares the chips" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--engine sglang --plan TP4xPP2 --spec-tokens 2 --draft ngram", "over 2 pipeline stages"),
        ("--engine sglang --plan TP4 -H mi300x --spec-tokens 2 --draft ngram", "on rocm: it does on cuda"),
        ("--engine vllm-0.11 --plan TP4 --spec-tokens 2 --draft llama3-8b", "draft models are not supported"),
        ("--engine jetstream -H tpu-v6e --plan TP8 --spec-tokens 2 --draft ngram", "its file has no words for it"),
    ],
)
def test_an_engine_that_cannot_is_refused(words: str, problem: str) -> None:
    done = run("launch", *shlex.split(f"-m llama3-70b {words}"))
    assert done.status == 3
    assert problem in " ".join(done.err.split())


def test_what_the_engine_cannot_is_not_ranked_either() -> None:
    words = f"{MODEL} --gpus 8 --spec-tokens 2 --spec-accept 0.7"
    found = rows(f"{words} --engine sglang --draft ngram --rejected --top 0")
    assert {row["pp"] for row in found if row["error"] is None} == {1}
    assert any("cannot speculate with look-up in the prompt over 2" in (row["error"] or "") for row in found)
    done = run(*shlex.split(f"{words} --engine vllm-0.11 --draft llama3-8b"))
    assert done.status == 3
    assert "draft models are not supported" in " ".join(done.err.split())


def test_the_words_of_vllm_are_json() -> None:
    (row,) = rows("launch -m llama3-70b --plan TP8 --spec-tokens 3 --draft meta-llama/Meta-Llama-3-8B-Instruct")
    argv = row["argv"]
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "draft_model",
        "model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 8,
    }
    below = run(*shlex.split(f"{MODEL} {ASKED} --gpus 8 --launch"))
    assert "--speculative-config" in below.out


def test_the_memory_fraction_leaves_room_for_the_draft() -> None:
    """TensorRT-LLM's is KV's share of what is free once all else, the draft's weights too, is loaded."""
    free = []
    for more in ("", " --spec-tokens 3 --draft llama3-8b"):
        (row,) = rows(f"launch -m llama3-70b --plan TP4 --engine trtllm{more}")
        ((_, content),) = row["files"].items()
        free.append(float(content.split("free_gpu_memory_fraction: ")[1].split()[0]))
    assert free[1] < free[0]
