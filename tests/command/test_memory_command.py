"""`plan memory`: what is printed, written and refused."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from helpers import run


def rows(*words: object, status: int = 0) -> list[dict[str, Any]]:
    done = run("memory", *words, "--json", "-")
    assert done.status == status, done
    return json.loads(done.out)  # type: ignore[no-any-return]


def test_the_parts_of_a_chip_add_up_to_it() -> None:
    for words in (("-m", "llama3-70b", "--tp", "4"), ("-m", "deepseek-v3", "-H", "h200", "--tp", "8", "--draft")):
        (row,) = rows(*words, "--context", 4096, "--concurrency", 3)
        parts = ("weights_gib", "tables_gib", "activations_gib", "runtime_gib", "kv_gib", "free_gib")
        assert sum(row[part] for part in parts) == pytest.approx(row["budget_gib"], rel=1e-12)
        assert row["budget_gib"] + row["outside_gib"] <= row["chip_gib"]
        assert row["kv_gib"] == pytest.approx(3 * row["kv_request_gib"])
        assert row["error"] is None


def test_the_table_says_what_one_looks_for() -> None:
    done = run("memory", "-m", "gpt-oss-20b", "--context", 8192, "--concurrency", 32)
    assert (done.status, done.err) == (0, "")
    bars = re.findall(r"^(\S[\w ]*?) +([\d.]+)  (#*) +([\d.]+)%$", done.out, re.MULTILINE)
    shares = {name: float(share) for name, _, _, share in bars}
    assert shares.keys() >= {"weights", "activations", "KV", "free for more KV", "outside the budget", "not used"}
    assert sum(shares.values()) == pytest.approx(100, abs=0.5)
    assert all(len(bar) == round(float(share) * 0.4) for _, _, bar, share in bars if float(share) % 2.5 > 0.1)
    text = " ".join(done.out.split())
    assert "0.375 GiB a chip as the engine allocates it" in text
    assert "it would be 0.190 GiB" in text
    assert re.search(r"Doubling the context adds [\d.]+ GiB a chip .*; doubling the concurrency adds 12\.01 GiB", text)
    assert max(map(len, done.out.splitlines())) <= 100


def test_what_doubling_adds_is_what_the_doubled_holds() -> None:
    (one,) = rows("-m", "gemma-3-27b", "--tp", 2, "--context", 4096, "--concurrency", 4)
    (longer,) = rows("-m", "gemma-3-27b", "--tp", 2, "--context", 8192, "--concurrency", 4)
    (more,) = rows("-m", "gemma-3-27b", "--tp", 2, "--context", 4096, "--concurrency", 8)
    done = run("memory", "-m", "gemma-3-27b", "--tp", 2, "--context", 4096, "--concurrency", 4)
    text = " ".join(done.out.split())
    sentence = re.search(r"context adds ([\d.]+) GiB a chip and leaves (\d+) requests; .* adds ([\d.]+) GiB", text)
    assert sentence is not None
    assert float(sentence[1]) == pytest.approx(longer["kv_gib"] - one["kv_gib"], abs=0.006)
    assert int(sentence[2]) == longer["max_concurrency"]
    assert float(sentence[3]) == pytest.approx(more["kv_gib"] - one["kv_gib"], abs=0.006)


def test_several_degrees_make_a_line_each_and_one_that_starts_is_enough() -> None:
    done = run("memory", "-m", "llama3-70b", "--tp", "1,2,4", "--context", 8192)
    assert done.status == 0
    assert re.search(r"^TP1 .* no$", done.out, re.MULTILINE)
    assert re.search(r"^TP4 .* yes$", done.out, re.MULTILINE)
    assert re.search(r"\bTP1 does not start: weights 131\.42 GiB .* by 62\.45 GiB\.", " ".join(done.out.split()))


def test_what_is_missing_is_told() -> None:
    done = run("memory", "-m", "llama3-8b", "-H", "t4", "--context", 100)
    (row,) = rows("-m", "llama3-8b", "-H", "t4", "--context", 100, status=3)
    assert re.search(rf"^missing +{-row['free_gib']:.2f} ", done.out, re.MULTILINE)
    assert row["free_gib"] == pytest.approx(row["budget_gib"] - row["weights_gib"] - row["tables_gib"]
                                            - row["activations_gib"] - row["runtime_gib"] - row["kv_gib"])  # fmt: skip
    assert "requests fit" not in done.out


def test_csv_and_json_say_the_same() -> None:
    words = ("-m", "qwen3-next-80b-a3b", "-H", "h200", "--tp", "2,4", "--pp", "1,2", "--context", 65536)
    table = list(csv.DictReader(io.StringIO(run("memory", *words, "--csv", "-").out)))
    for text, row in zip(table, rows(*words), strict=True):
        assert list(text) == list(row)
        assert float(text["kv_gib"]) == pytest.approx(row["kv_gib"], rel=1e-5)


def test_what_does_not_start_is_said_with_status_3() -> None:
    done = run("memory", "-m", "llama3.1-405b", "--tp", 8)
    assert done.status == 3
    assert "does not start on h100-sxm: weights" in done.err
    (row,) = rows("-m", "llama3-70b", "--tp", 4, "--concurrency", 5000, status=3)
    assert "5000 requests of 8192 tokens asked, 55 fit" in row["error"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-m", "llama3-8b", "--context", 9000), "--context 9000: llama3-8b has 1 to 8192 tokens"),
        (("-m", "llama3-8b", "--draft"), "--draft: llama3-8b has no prediction layers"),
        (("-m", "llama3-8b", "--tp", "0"), "--tp"),
        (("-m", "llama3-8b", "--memory-limit", "72"), "expected a positive number with a unit"),
        (("-m", "llama3-8b", "--weights", "int3"), "unknown dtype 'int3'"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[object, ...], sentence: str) -> None:
    done = run("memory", *words)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_an_older_engine_is_a_file_of_its_own() -> None:
    (new,) = rows("-m", "llama3-70b", "--tp", 4)
    (old,) = rows("-m", "llama3-70b", "--tp", 4, "--engine", "vllm-0.11")
    assert old["activations_gib"] == pytest.approx(new["activations_gib"] * 9.73 / 3.86, rel=1e-3)


def test_groups_that_share_prompts_and_experts_are_asked_for_as_in_plans() -> None:
    found = rows("-m", "mixtral-8x7b", "--engine", "ideal", "--tp", 2, "--cp", "2,4", "--ep", 4, "--context", 4096)
    assert [row["plan"] for row in found] == ["TP2xEP4xCP2", "TP2xEP4xCP4"]
    assert found[1]["kv_request_gib"] == pytest.approx(found[0]["kv_request_gib"] / 2)
    assert rows("-m", "llama3-8b", "--cp", 2, status=3)[0]["error"].startswith("cp 2: engine vllm does not divide")
