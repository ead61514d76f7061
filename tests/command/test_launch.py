"""`plan launch` and `plan --launch`: what a shell gets, what programs read, what is written, what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, run

from planner.specs import catalog
from planner.specs.launch import flag_of

GOLDEN = ROOT / "tests" / "golden" / "launch"
TWO_NODES = "-m llama3-70b --plan TP8xPP2"
REPLICAS = "-m llama3-70b --plan TP4xDP3 --gpus 16"
FP8 = "-m llama3.1-70b --plan TP4 --weights fp8 --kv-cache fp8"
LONG = "-m llama3.1-8b --plan TP2 --isl 100000 --osl 2000 --max-context 131072"
CASES = {
    f"{engine}-{name}": f"{words} --engine {engine}"
    for engine in ("vllm", "sglang", "trtllm")
    for name, words in {
        "one-node": "-m llama3-70b --plan TP8",
        "two-nodes": TWO_NODES,
        "replicas": REPLICAS,
        "fp8": FP8,
        "long": LONG,
    }.items()
} | {
    "vllm-0.11-two-nodes": f"{TWO_NODES} --engine vllm-0.11",
    "vllm-0.8-two-nodes": f"{TWO_NODES} --engine vllm-0.8",
    "vllm-0.6-one-node": "-m llama3-8b --plan TP1 --engine vllm-0.6",
    "vllm-rocm-eager-one-node": "-m llama3.1-405b --plan TP8 -H mi300x --engine vllm-rocm-eager",
    "vllm-rack": "-m llama3-70b --plan TP8 -H gb200-nvl72 --hosts 10.0.0.1,10.0.0.2",
    "vllm-draft": "-m llama3.1-70b --plan TP4 --spec-tokens 3 --draft llama3.2-1b",
    "vllm-mtp": "-m glm-4.5-air --plan TP4 --spec-tokens 1",
    "vllm-0.6-ngram": "-m llama3-8b --plan TP1 --engine vllm-0.6 --spec-tokens 4 --draft ngram",
    "sglang-draft": "-m llama3.1-70b --plan TP4 --engine sglang --spec-tokens 3 --draft llama3.2-1b",
    "sglang-mtp": "-m glm-4.5-air --plan TP4 --engine sglang --spec-tokens 1",
    "sglang-ngram": "-m llama3-8b --plan TP1 --engine sglang --spec-tokens 4 --draft ngram",
    "trtllm-draft": "-m llama3.1-70b --plan TP4 --engine trtllm --spec-tokens 3 --draft llama3.2-1b",
    "trtllm-mtp": "-m deepseek-v3 --plan TP8 -H b200 --weights fp8 --engine trtllm --spec-tokens 1",
    "trtllm-ngram": "-m llama3-8b --plan TP1 --engine trtllm --spec-tokens 4 --draft ngram",
    "jetstream-one-node": "-m llama3-8b --plan TP8 -H tpu-v5e --engine jetstream --concurrency 64",
    "jetstream-int8": "-m llama3-70b --plan TP8 -H tpu-v5e --engine jetstream --weights int8 --max-context 4096",
}
"""Words of `plan launch` by the golden file that holds what it prints."""


def launch(words: str, *more: object) -> Any:
    return run("launch", *shlex.split(words), *more)


def rows(words: str) -> list[dict[str, Any]]:
    done = launch(words, "--json", "-")
    assert (done.status, done.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


@pytest.mark.parametrize("name", CASES)
def test_lines_are_those_of_the_golden_file(name: str) -> None:
    done = launch(CASES[name])
    assert (done.status, done.err) == (0, "")
    assert done.out == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sh")} == set(CASES)


STUB = """#!{python} -S
import json, os, sys
devices = [value for name, value in os.environ.items() if name.endswith("VISIBLE_DEVICES")]
with open("called", "a") as record:
    record.write(json.dumps([devices, {program!r}, *sys.argv[1:]]) + "\\n")
"""
"""A program in an engine's place that writes down how it was called."""


@pytest.mark.parametrize("name", CASES)
def test_a_shell_that_runs_the_lines_calls_what_json_has(name: str, tmp_path: Path) -> None:
    wanted = rows(CASES[name])
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in {row["argv"][0] for row in wanted}:
        (programs / program).write_text(STUB.format(python=sys.executable, program=program))
        (programs / program).chmod(0o755)
    clean = {key: value for key, value in os.environ.items() if not key.endswith("VISIBLE_DEVICES")}
    env = clean | {"PATH": f"{programs}:/usr/bin:/bin"}
    printed = launch(CASES[name]).out
    subprocess.run(["sh", "-eu"], input=printed, cwd=tmp_path, env=env, text=True, check=True, timeout=20)
    calls = [json.loads(line) for line in (tmp_path / "called").read_text().splitlines()]
    assert calls == [[list(row["environment"].values()), *row["argv"]] for row in wanted]
    for row in wanted:
        words = [*(f"{name}={value}" for name, value in row["environment"].items()), *row["argv"]]
        assert shlex.split(row["line"]) == words
        for file, text in row["files"].items():
            assert (tmp_path / file).read_text() == text


@pytest.mark.parametrize("name", CASES)
def test_every_flag_stands_in_the_list_of_the_engine(name: str) -> None:
    for row in rows(CASES[name]):
        flags = catalog.load_engine(row["engine"]).launch.flags  # type: ignore[union-attr]
        used = [flag for word in row["argv"] if (flag := flag_of(word))]
        assert used or row["role"] == "cluster"
        assert all(flags[flag] for flag in used)
        assert len(set(used)) == len(used), "no flag twice"


def test_lines_are_at_most_a_hundred_columns_wide() -> None:
    """But for a flag whose value alone is wider: JSON is one word."""
    for path in GOLDEN.glob("*.sh"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert len(line) <= 100 or len(shlex.split(line.removesuffix("\\"))) == 2, line


def test_replicas_take_the_chips_of_the_placement() -> None:
    found = [row for row in rows(f"{REPLICAS} --engine vllm") if row["role"] == "server"]
    assert [(row["node"], row["chips"]) for row in found] == [(0, [0, 1, 2, 3]), (0, [4, 5, 6, 7]), (1, [0, 1, 2, 3])]
    assert len({word for row in found for word in row["argv"][-1:]}) == 3  # ports


def test_the_router_knows_every_server() -> None:
    *servers, router = rows(f"{REPLICAS} --engine sglang --hosts a,b --port 9000")
    ports = [row["argv"][row["argv"].index("--port") + 1] for row in servers]
    urls = [f"http://{row['host']}:{port}" for row, port in zip(servers, ports, strict=True)]
    assert (router["role"], router["replica"]) == ("router", None)
    place = router["argv"].index("--worker-urls") + 1
    assert router["argv"][place : place + 3] == urls
    assert router["argv"][-2:] == ["--port", "9000"]


def test_csv_has_a_row_for_each_process() -> None:
    done = launch(f"{TWO_NODES} --engine trtllm", "--csv", "-")
    (row,) = done.rows
    assert json.loads(row["argv"]) == shlex.split(row["line"])
    assert (row["role"], row["files"], row["environment"]) == ("server", "replica0.yaml", "")
    done = launch(TWO_NODES, "--csv", "-", "--no-header")
    assert len(done.out.splitlines()) == 2


def test_the_file_of_tensorrt_llm_says_what_its_line_cannot() -> None:
    (row,) = rows(f"{FP8} --engine trtllm")
    ((name, text),) = row["files"].items()
    assert row["argv"][-2:] == ["--extra_llm_api_options", name]
    content = yaml.safe_load(text)
    assert content["kv_cache_config"]["dtype"] == "fp8"
    assert content["kv_cache_config"]["tokens_per_block"] == 32
    assert 0.85 < content["kv_cache_config"]["free_gpu_memory_fraction"] < 1


def test_a_context_becomes_a_limit_and_one_beyond_the_model_is_said() -> None:
    (row,) = rows("-m llama3-8b --plan TP1 --isl 1000 --osl 24")
    assert row["argv"][row["argv"].index("--max-model-len") + 1] == "1024"
    done = launch("-m llama3-8b --plan TP1 --max-context 16384")
    assert "--max-model-len 16384" in done.out
    assert "16384 tokens are more than the model's 8192" in done.out


def test_what_is_loaded_may_be_said() -> None:
    assert rows("-m meta-llama/Meta-Llama-3-8B-Instruct --plan TP1")[0]["argv"][2].endswith("-Instruct")
    done = launch("-m llama3-8b --plan TP1 --weights int4")
    assert "vllm serve INT4-CHECKPOINT" in done.out
    assert "AWQ or GPTQ" in done.out
    done = launch("-m llama3-8b --plan TP1 --weights int4 --checkpoint '/models/llama 3'")
    assert "vllm serve '/models/llama 3'" in done.out
    assert "INT4-CHECKPOINT" not in done.out
    done = launch("-m llama3-8b --plan TP1 --weights fp8 --checkpoint /models/mine")
    assert "leave it out if /models/mine is in fp8 already" in " ".join(done.out.replace("#", "").split())
    done = launch("-m gpt3-175b --plan TP8")
    assert "vllm serve MODEL" in done.out
    assert "# * MODEL stands for" in done.out


def test_output_writes_scripts_that_run_what_is_printed(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    done = launch(f"{TWO_NODES} --engine trtllm", "--output", folder, "--quiet")
    assert (done.status, done.out) == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == ["00-server-replica0-node0.sh", "replica0.yaml"]
    script = (folder / "00-server-replica0-node0.sh").read_text()
    (row,) = rows(f"{TWO_NODES} --engine trtllm")
    command = script[script.index("exit 1\n") + len("exit 1\n") :]
    assert shlex.split(command.replace("\\\n", " ")) == row["argv"]
    assert (folder / "replica0.yaml").read_text() == row["files"]["replica0.yaml"]


def test_output_never_replaces_a_file_unless_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "replica0.yaml").write_text("mine")
    done = launch(f"{TWO_NODES} --engine trtllm", "--output", tmp_path)
    assert (done.status, done.out) == (2, "")
    assert "replica0.yaml is there already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["replica0.yaml"]
    assert launch(f"{TWO_NODES} --engine trtllm", "--output", tmp_path, "--force").status == 0
    assert "kv_cache_config" in (tmp_path / "replica0.yaml").read_text()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "below", tmp_path / "a" / "b", tmp_path / "file"):
        done = launch(TWO_NODES, "--output", place)
        assert (done.status, done.out) == (2, "")
        assert "cannot be written" in done.err


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        ("-m llama3-8b --engine ideal", 3, "ideal has no launch line: it is a bound"),
        ("-m llama3-8b --engine lecture", 3, "textbook"),
        ("-m llama3-8b --engine trtllm-0.9", 3, "benchmark of built engines"),
        ("-m llama3-8b --engine gpt-fast", 3, "serves nobody"),
        ("-m llama3-8b -H mi300x --engine trtllm", 3, "trtllm runs on cuda; mi300x is rocm"),
        ("-m llama3-8b -H h100 --engine jetstream", 3, "jetstream runs on tpu; h100-sxm is cuda"),
        ("-m llama3-8b --attention batch", 3, "cannot shard attention over batch"),
        ("-m llama3-8b --tp 3", 3, "tp 3 does not divide"),
        ("-m llama3-70b", 3, "exceed"),
        ("-m llama3-8b --kv-cache int8", 3, "cannot keep KV in int8"),
        ("-m llama3-8b --weights fp32 -H a100-80gb-sxm --engine trtllm", 3, "cannot load fp32"),
        ("-m gpt-oss-120b --plan TP2xEP2", 3, "no flag for ep 2"),
        ("-m llama3-70b --plan TP4xPP3", 3, "4 and 8 chips on its nodes"),
        ("-m llama3-8b --plan TP8xDP2 --gpus 8", 3, "takes 16 chips"),
        ("-m llama3-8b --plan TP4 -H tpu-v5e --engine jetstream", 3, "sees all 8 chips"),
        ("-m llama3-8b --plan TP8xDP2 -H tpu-v5e --engine jetstream", 3, "starts one replica"),
        ("-m llama3-8b --plan TP8 -H tpu-v5e --engine jetstream --kv-cache int8", 3, "only with weights in int8"),
        ("-m llama3-8b --plan TP8 -H tpu-v4 --engine jetstream", 3, "spans 2 nodes"),
        ("-m llama3-8b --plan TP2 --tp 4", 2, "--tp 4 contradicts"),
        ("-m llama3-8b --plan TP2 --attention batch", 2, "--attention batch contradicts"),
        ("-m llama3-8b --tp 2,4", 2, "starts one plan"),
        ("-m llama3-8b --plan nonsense", 2, "is not a plan"),
        ("-m llama3-8b --plan TP8xDP2 --hosts one", 2, "--hosts: 1 given"),
        ("-m llama3-8b --hosts 'a, ,b'", 2, "--hosts"),
        ("-m llama3-8b --port 0", 2, "--port 0"),
        ("-m llama3-8b --port 65535", 2, "--port 65535"),
        ("-m llama3-8b --isl 9000", 2, "more than llama3-8b's context"),
        ("-m llama3-8b --weights nf5", 2, "--weights"),
        ("-m llama3-8b --memory-fraction 2", 2, "memory_fraction"),
        ("-m llama3-8b --memory-fraction 0.5 --memory-limit 40GiB", 2, "limit the same memory"),
        ("-m llama3-8b --force", 2, "--output"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_reason(words: str, status: int, reason: str) -> None:
    done = launch(words)
    assert (done.status, done.out) == (status, "")
    assert reason in done.err
    assert "Traceback" not in done.err


def test_the_ranking_prints_the_lines_of_its_first_plan() -> None:
    done = run("-m", "llama3-70b", "--gpus", "16", "--top", "1", "--launch")
    assert done.status == 0
    table, script = done.out.split("\n\n# ", 1)
    assert "TP8xDP2" in table.splitlines()[1]
    assert f"# {script}" == launch("-m llama3-70b --plan TP8xDP2 --gpus 16").out
    done = run("-m", "llama3-8b", "--hardware", "h100-lecture", "--launch")
    assert (done.status, done.err) == (0, "")
    assert "No launch line: engine lecture has no launch line" in done.out
    done = run("-m", "llama3-8b", "--csv", "-", "--launch")
    assert "vllm" not in done.out.splitlines()[0]
    assert "`plan launch` has --csv" in done.err


def test_a_narrow_terminal_gets_narrow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run("launch", *shlex.split(TWO_NODES), terminal=True)
    assert done.status == 0
    assert max(map(len, done.out.splitlines())) <= 60
