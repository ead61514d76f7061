"""`plan models`, `plan hardware`, `plan engines`, `plan show`: what the catalogue holds, with its sources."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import CONFIGS, run

from planner import load_engine, load_hardware, load_model

LISTS = {"models": "models", "hardware": "hardware", "engines": "engines"}
HEADERS = {
    "models": "name parameters active_parameters kv_bytes_per_token layers hidden heads kv_heads max_context",
    "hardware": "name tflops_16bit memory_gib memory_gb_per_s network domain_chips link_gb_per_s tdp_w",
    "engines": "name version prefill chunk_tokens max_sequences attention memory_fraction",
}


def objects(*words: object) -> list[dict[str, Any]]:
    done = run(*words, "--json", "-")
    assert (done.status, done.err) == (0, "")
    rows = json.loads(done.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert isinstance(rows, list)
    return rows


def cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@pytest.mark.parametrize(("command", "folder"), LISTS.items())
def test_a_list_names_every_file_of_its_folder(command: str, folder: str) -> None:
    names = [row["name"] for row in objects(command)]
    assert names == sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))
    table = run(command)
    assert (table.status, table.err) == (0, "")
    # a name stands in the first column of its row; lines that go on with a wrapped cell begin with blanks
    assert [line.split()[0] for line in table.out.splitlines()[1:] if not line.startswith(" ")] == names


@pytest.mark.parametrize("command", LISTS)
def test_csv_and_json_of_a_list_say_the_same(command: str) -> None:
    rows, table = objects(command), run(command, "--csv", "-")
    assert table.out.endswith("\n")
    assert "\r" not in table.out
    assert list(rows[0])[: len(HEADERS[command].split())] == HEADERS[command].split()
    assert [list(row.items()) for row in table.rows] == [
        [(name, cell(value)) for name, value in row.items()] for row in rows
    ]
    assert run(command, "--csv", "-", "--no-header").out == table.out.split("\n", 1)[1]
    assert run(command, "--quiet") == (0, "", "")


@pytest.mark.parametrize("command", LISTS)
def test_a_list_goes_to_a_file(command: str, tmp_path: Path) -> None:
    table = run(command, "--csv", tmp_path / "list.csv", "--json", tmp_path / "list.json", "--quiet")
    assert table == (0, "", "")
    assert (tmp_path / "list.csv").read_text() == run(command, "--csv", "-").out
    assert json.loads((tmp_path / "list.json").read_text()) == objects(command)


@pytest.mark.parametrize("command", LISTS)
def test_a_list_is_at_most_100_columns_wide(command: str) -> None:
    assert max(map(len, run(command).out.splitlines())) <= 100


@pytest.mark.parametrize("command", LISTS)
@pytest.mark.parametrize("columns", [60, 72, 80, 100])
def test_a_list_fits_the_terminal(command: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = re.sub(r"\x1b\[[0-9;]*m", "", run(command, terminal=True).out).splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0].split()[0] == "name"


def test_numbers_stand_at_the_right_wherever_their_column_is() -> None:
    heading, *rows = run("models").out.splitlines()
    assert {len(row) for row in rows} == {len(heading)}


def test_the_hardware_table_has_the_names_that_can_be_given_and_the_engine() -> None:
    heading, *rows = run("hardware").out.splitlines()
    (h100,) = (row.split() for row in rows if row.startswith("h100-sxm "))
    assert heading.split() == ["name", "TF/s", "GiB", "GB/s", "link", "GB/s", "$/h", "engine", "aliases"]
    assert h100 == ["h100-sxm", "989", "79.2", "3350", "nvlink", "450", "6.88", "vllm", "h100"]
    shown = " ".join(rows).split()
    assert {alias for row in objects("hardware") for alias in row["aliases"].split()} <= set(shown)


def test_models_are_counted_and_not_quoted() -> None:
    rows = {row["name"]: row for row in objects("models")}
    llama = rows["llama3-70b"]
    assert llama["parameters"] == 70_553_706_496
    assert llama["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2
    assert (llama["layers"], llama["hidden"], llama["heads"], llama["kv_heads"]) == (80, 8192, 64, 8)
    assert all(type(row["parameters"]) is int for row in rows.values())
    assert "70,553,706,496" in run("models").out
    assert "meta-llama/Meta-Llama-3-70B" in llama["aliases"].split()


def test_hardware_shows_what_is_not_known_as_nothing() -> None:
    rows = {row["name"]: row for row in objects("hardware")}
    assert rows["h100-lecture"]["usd_per_chip_hour"] is None
    assert rows["tpu-v4"]["domain_chips"] is None
    h100 = rows["h100-sxm"]
    assert (h100["tflops_16bit"], h100["memory_gb_per_s"], h100["domain_chips"]) == (989, 3350, 8)
    assert h100["aliases"].split() == ["h100"]


# --- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("llama3-70b", "llama3-70b"),
        ("h100", "h100-sxm"),
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("META-LLAMA/meta-llama-3-8b", "llama3-8b"),
        ("vllm", "vllm"),
        ("tpu-v4-lecture", "tpu-v4-lecture"),
    ],
)
def test_show_finds_whatever_family_a_name_belongs_to(name: str, shown: str) -> None:
    done = run("show", name)
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"name: {shown}"
    assert objects("show", name)[0]["name"] == shown


@pytest.mark.parametrize(
    ("folder", "name"),
    [("models", "llama3-70b"), ("hardware", "h100-sxm"), ("hardware", "tpu-v4"), ("engines", "vllm")],
)
def test_show_prints_every_value_and_source_of_the_file(folder: str, name: str) -> None:
    def leaves(value: Any) -> list[Any]:
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        if isinstance(value, list):
            return [leaf for item in value for leaf in leaves(item)]
        return [value]

    out = run("show", name).out
    table = {value for _, value in csv.reader(io.StringIO(run("show", name, "--csv", "-").out))}
    for leaf in leaves(yaml.safe_load((CONFIGS / folder / f"{name}.yaml").read_text())):
        if leaf is None:
            continue
        number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        text = str(leaf).lower() if isinstance(leaf, bool) else str(leaf)
        assert text in out
        assert {text, cell(leaf), cell(float(leaf)) if number else text} & table


def test_show_as_csv_has_a_row_for_each_key_path() -> None:
    rows = {row["key"]: row["value"] for row in run("show", "h100", "--csv", "-").rows}
    assert rows["chip.memory_gib"] == "79.2"
    assert rows["kernels.gemm.bf16.provenance.status"] == "fitted"
    assert rows["network.0.name"] == "nvlink"
    assert run("show", "h100", "--csv", "-", "--no-header").out.startswith("name,h100-sxm\n")


@pytest.mark.parametrize("name", ["h100-lecture", "llama3-8b", "vllm", "lecture", "ideal"])
def test_show_as_json_is_strict_json_even_where_a_value_is_infinite(name: str) -> None:
    (spec,) = objects("show", name)
    assert spec["name"] == name
    if name == "h100-lecture":
        assert spec["kernels"]["gemm"]["bf16"]["p"] == "inf"


def test_show_reads_a_file_of_any_family(tmp_path: Path) -> None:
    for base, noun in (("llama3-8b", "layers"), ("h100-sxm", "chip"), ("vllm", "scheduler")):
        path = tmp_path / f"my-{base}.yaml"
        path.write_text(f"extends: {base}\nname: mine\n")
        (spec,) = objects("show", path)
        assert spec["name"] == "mine"
        assert noun in spec


def test_show_agrees_with_what_is_loaded() -> None:
    (model,), (machine,), (engine,) = objects("show", "qwen3-8b"), objects("show", "mi300x"), objects("show", "sglang")
    assert model["attention"] == load_model("qwen3-8b").attention._asdict()
    assert machine["chip"]["memory_gib"] == load_hardware("mi300x").chip.memory_gib
    assert engine["host"]["step_us"] == load_engine("sglang").host.step_us


def test_the_help_of_model_names_all_that_it_takes() -> None:
    text = " ".join(re.sub(r"[│\s]+", " ", run("--help").out).split())
    assert "a name, a Hugging Face id, a YAML file or a Hugging Face config.json" in text
