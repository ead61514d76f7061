"""`--max-num-seqs`, `--max-num-batched-tokens` and `--prefix-hit` in every command that takes them."""

from __future__ import annotations

import csv
import io
import json
import shlex
from typing import Any

import pytest
from helpers import run

import planner


def rows(words: str) -> list[dict[str, Any]]:
    done = run(*shlex.split(words), "--json", "-")
    assert done.status == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


ASKED = "--max-num-seqs 32 --max-num-batched-tokens 2048 --prefix-hit 0.6"
MODEL = "--model llama3-8b --isl 3000 --osl 200"


def test_all_commands_and_python_give_the_same_figures() -> None:
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "prefix_hit": 0.6, "isl": 3000, "osl": 200}
    priced = planner.estimate("llama3-8b", tp=2, concurrency=24, **options)
    ranked = planner.plan("llama3-8b", 2, concurrency=24, **options)  # type: ignore[arg-type]
    (by_plan,) = (row for row in ranked if row["plan"] == "TP2")
    found = [
        rows(f"estimate {MODEL} {ASKED} --tp 2 --concurrency 24")[0],
        rows(f"{MODEL} {ASKED} --gpus 2 --tp 2 --concurrency 24")[0],
        rows(f"sweep {MODEL} {ASKED} --gpus 2 --tp 2 --concurrency 24")[0],
        by_plan,
    ]
    plain = planner.estimate("llama3-8b", tp=2, concurrency=24, isl=3000, osl=200)
    for name in ("ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s", "memory_gib", "max_concurrency"):
        assert [row[name] for row in found] == pytest.approx([priced[name]] * 4, rel=1e-12), name
        assert priced[name] != pytest.approx(plain[name], rel=1e-6), name
    explained = rows(f"explain {MODEL} {ASKED} --plan TP2 --concurrency 24")
    items = [row["time_ms"] for row in explained if row["section"] == "ttft" and row["against"] is None]
    assert sum(items) == pytest.approx(priced["ttft_ms"], rel=1e-9)


def test_points_have_their_own(tmp_path: Any) -> None:
    file = tmp_path / "points.csv"
    file.write_text(
        "prefix-hit,max_num_seqs,--max-num-batched-tokens,concurrency\n0.5,,,1\n,16,,64\n,,1024,1\n2,,,1\n,x,,1\n"
    )
    done = run("estimate", *shlex.split(MODEL), "--points", file)
    assert done.status == 0
    found = list(csv.DictReader(io.StringIO(done.out)))
    for row, options in zip(
        found, ({"prefix_hit": 0.5}, {"max_num_seqs": 16, "concurrency": 64}, {"max_num_batched_tokens": 1024}),
        strict=False,
    ):  # fmt: skip
        expected = planner.estimate("llama3-8b", isl=3000, osl=200, **options)
        assert float(row["latency_ms"]) == pytest.approx(expected["latency_ms"], rel=1e-5)
    assert "prefix_hit must be from 0 to 1" in found[3]["error"]
    assert "max_num_seqs must be a whole number" in found[4]["error"]


def test_a_load_beyond_the_limit_names_it() -> None:
    done = run("estimate", *shlex.split(f"{MODEL} --max-num-seqs 32 --concurrency 64"))
    assert "vllm takes at most 32 sequences a replica" in " ".join(done.out.split())
    done = run(*shlex.split(f"{MODEL} --gpus 1 --max-num-seqs 32 --concurrency 64"))
    assert done.status == 3
    assert "32" in done.err


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("vllm", ("--max-num-seqs 64", "--max-num-batched-tokens 2048")),
        ("sglang", ("--max-running-requests 64", "--chunked-prefill-size 2048")),
        ("trtllm", ("--max_batch_size 64", "--max_num_tokens 2048")),
    ],
)
def test_launch_lines_carry_the_limits(engine: str, words: tuple[str, str]) -> None:
    (row,) = rows(f"launch -m llama3-8b --engine {engine} --max-num-seqs 64 --max-num-batched-tokens 2048")
    assert all(word in row["line"] for word in words)
    ranked = run(*shlex.split(f"-m llama3-8b --gpus 1 --engine {engine} --launch"), *shlex.split(ASKED))
    assert words[0].replace("64", "32") in " ".join(ranked.out.replace("\\\n", " ").split())


def test_memory_follows_the_limits() -> None:
    """Fewer sequences: fewer rows of logits to warm up with, and so more room for KV; but no more requests."""
    own, less = (rows(f"memory -m llama3-8b --context 4096{more}")[0] for more in ("", " --max-num-seqs 64"))
    assert less["kv_capacity_tokens"] > own["kv_capacity_tokens"]
    assert less["activations_gib"] < own["activations_gib"]
    assert (less["max_concurrency"], own["max_concurrency"]) == (64, 108)


def test_what_is_cached_stands_in_the_caption() -> None:
    done = run(*shlex.split(f"{MODEL} --gpus 1 --prefix-hit 0.6"))
    assert "3000 tokens in (60% cached), 200 out" in " ".join(done.out.split())


def test_an_engine_that_never_cuts_a_prompt_says_so() -> None:
    done = run(*shlex.split(f"{MODEL} --hardware h100-lecture --max-num-batched-tokens 512"))
    assert done.status == 2
    assert "never cuts a prompt" in done.err
