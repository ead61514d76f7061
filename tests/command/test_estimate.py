"""`plan estimate`: one given plan, or every row of a file. Nothing is searched, and the order of a file is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import Completed, run

import planner

FIGURES = planner.COLUMNS[planner.COLUMNS.index("ttft_ms") : planner.COLUMNS.index("bottleneck") + 1]


def one(*words: object) -> dict[str, Any]:
    """The only row of a single estimate."""
    done = run("estimate", *words, "--json", "-")
    assert (done.status, done.err) == (0, "")
    (row,) = json.loads(done.out)
    return row  # type: ignore[no-any-return]


def points(text: str, *words: object) -> Completed:
    """An estimate of points from stdin."""
    return run("estimate", "--points", "-", *words, stdin=text)


def many(text: str, *words: object) -> list[dict[str, Any]]:
    done = points(text, *words, "--json", "-")
    assert done.status == 0
    rows = json.loads(done.out)
    assert isinstance(rows, list)
    return rows


# --- one plan ---------------------------------------------------------------------------------------------------------


def test_a_missing_degree_is_one_and_the_chips_are_those_of_the_plan() -> None:
    row = one("-m", "llama3-70b", "--tp", 4, "--pp", 2, "--dp", 3)
    assert row["plan"] == "TP4xPP2xDP3"
    assert (row["gpus"], row["idle_gpus"], row["concurrency"], row["ep"], row["cp"]) == (24, 0, 1, 1, 1)
    alone = one("-m", "llama3-8b")
    assert (alone["plan"], alone["gpus"], alone["concurrency"]) == ("TP1", 1, 1)


def test_chips_beside_the_plan_are_idle_and_paid_for() -> None:
    row, all_used = one("-m", "llama3-8b", "--plan", "TP4", "--gpus", 8), one("-m", "llama3-8b", "--plan", "TP4")
    assert (row["gpus"], row["idle_gpus"]) == (8, 4)
    assert row["usd_per_mtok"] == pytest.approx(2 * all_used["usd_per_mtok"], rel=1e-12)
    assert row["tpot_ms"] == all_used["tpot_ms"]


def test_a_label_means_the_same_as_its_degrees() -> None:
    label = one("-m", "llama3-8b", "--engine", "ideal", "--plan", "TP4xDP2/batch/batch", "--concurrency", 64)
    apart = one(
        "-m", "llama3-8b", "--engine", "ideal", "--tp", 4, "--dp", 2, "--attention", "batch",
        "--prefill-attention", "batch", "--concurrency", 64,
    )  # fmt: skip
    assert label == apart
    assert (label["attention"], label["prefill_attention"]) == ("batch", "batch")


def test_a_degree_that_agrees_with_the_label_may_stand_beside_it() -> None:
    assert one("-m", "llama3-8b", "--plan", "TP4", "--tp", 4) == one("-m", "llama3-8b", "--plan", "TP4")


def test_an_estimate_has_neither_rank_nor_tie() -> None:
    row = one("-m", "llama3-8b")
    assert list(row) == list(planner.COLUMNS)
    assert (row["rank"], row["tie"], row["error"]) == (None, None, None)


def test_a_load_above_the_capacity_is_cut_to_what_fits() -> None:
    row = one("-m", "llama3-8b", "--plan", "TP2xDP2", "--concurrency", 100_000)
    assert row["concurrency"] == 100_000
    assert row["batch_per_replica"] * 2 == row["max_concurrency"] < 100_000
    at_most = one("-m", "llama3-8b", "--plan", "TP2xDP2", "--concurrency", row["max_concurrency"])
    same = [name for name in FIGURES if name != "concurrency"]
    assert {name: row[name] for name in same} == {name: at_most[name] for name in same}
    out = run("estimate", "-m", "llama3-8b", "--plan", "TP2xDP2", "--concurrency", 100_000).out
    assert f"Only {row['max_concurrency']} of 100000 requests fit; the figures are for those." in out


def test_a_load_that_the_engine_cuts_is_not_laid_to_memory() -> None:
    words = ("estimate", "-m", "llama3-70b", "-H", "b200", "--plan", "TP8", "--concurrency")
    most = planner.load_machine("b200")[1].scheduler.max_sequences
    out = " ".join(run(*words, 3000).out.split())
    assert f"Only {most} of 3000 requests run: vllm takes at most {most} sequences a replica; the" in out
    assert "Only" not in run(*words, most).out


def test_a_context_above_the_models_is_priced_when_it_is_asked_for() -> None:
    row = one("-m", "llama3-8b", "--isl", 9000, "--max-context", 16384)
    assert row["isl"] == 9000
    short = one("-m", "llama3-8b", "--isl", 4000)
    long = one("-m", "llama3-8b", "--isl", 4000, "--max-context", 8192)
    assert long["max_concurrency"] < short["max_concurrency"]
    assert long["latency_ms"] == short["latency_ms"]


def test_the_table_says_where_a_tokens_time_and_a_chips_memory_go() -> None:
    words = ("-m", "llama3-70b", "--plan", "TP4", "--concurrency", 32)
    row, text = one(*words), " ".join(run("estimate", *words).out.split())
    parts = re.search(r"TPOT: ((?:\w+ [0-9.e-]+ ms(?:, )?)+)\.", text)
    assert parts
    assert sum(map(float, re.findall(r"([0-9.e-]+) ms", parts[1]))) == pytest.approx(row["tpot_ms"], rel=0.01)
    memory = re.search(r"weights ([\d.]+) \+ KV ([\d.]+) \+ other ([\d.]+) = ([\d.]+) of ([\d.]+) GiB", text)
    assert memory
    columns = ("weights_gib", "kv_gib", "other_gib", "memory_gib", "memory_limit_gib")
    assert [float(figure) for figure in memory.groups()] == pytest.approx([row[name] for name in columns], abs=0.006)
    assert f"a replica holds {row['kv_capacity_tokens']} tokens" in text


def test_parts_of_a_time_have_no_exponents_and_none_that_do_not_count() -> None:
    words = ("-m", "llama3-8b", "--engine", "ideal", "--isl", "8000", "--osl", "100")
    parts = re.search(r"TPOT: (.*)\.\n", run("estimate", *words).out)
    assert parts
    assert "compute" not in parts[1]
    slow = run("estimate", "-m", "llama3-70b", "--plan", "TP8", "--concurrency", "1000", "--osl", "10").out
    assert not re.search(r"\de[+-]\d", slow)


@pytest.mark.parametrize("name", ["ttft", "tpot", "latency"])
def test_a_limit_on_time_that_is_broken_is_refused_with_the_figure(name: str) -> None:
    words = ("estimate", "-m", "llama3-70b", "--plan", "TP4", "--concurrency", "32")
    row = one(*words[1:])
    option, time = f"--max-{name}", row[f"{name}_ms"]
    done = run(*words, option, time * 0.9, "--csv", "-")
    assert (done.status, done.out) == (3, "")
    assert re.fullmatch(rf"plan: TP4: {name} [\d.]+ ms is above {option} [\d.]+\n", done.err)
    assert run(*words, option, time * 1.1, "--csv", "-") == run(*words, "--csv", "-")


def test_a_time_that_does_not_exist_breaks_no_limit() -> None:
    assert run("estimate", "-m", "llama3-8b", "--osl", "1", "--max-tpot", "0.1").status == 0


def test_points_that_break_a_limit_keep_their_figures_beside_the_error() -> None:
    text = "model,tp\nllama3-8b,1\nllama3-8b,8\nllama3-8b,3\n"
    free, held = points(text, "--csv", "-"), points(text, "--max-tpot", "5", "--csv", "-")
    assert held.status == 0
    assert float(held.rows[1]["tpot_ms"]) < 5 < float(held.rows[0]["tpot_ms"])
    assert "--max-tpot 5" in held.rows[0]["error"]
    assert [{**row, "error": ""} for row in held.rows] == [{**row, "error": ""} for row in free.rows]
    assert [row["error"] for row in held.rows[1:]] == [row["error"] for row in free.rows[1:]]
    assert "2 of 3 rows could not be priced within the limits; the first: TP1: tpot" in held.err


def test_csv_files_and_quiet_work_as_they_do_in_plan(tmp_path: Path) -> None:
    words = ("estimate", "-m", "llama3-8b", "--plan", "TP2")
    stdout = run(*words, "--csv", "-")
    assert stdout.out.splitlines()[0] == ",".join(planner.COLUMNS)
    assert len(stdout.out.splitlines()) == 2
    done = run(*words, "--quiet", "--csv", tmp_path / "one.csv")
    assert (done.status, done.out, done.err) == (0, "", "")
    assert (tmp_path / "one.csv").read_text() == stdout.out
    assert run(*words, "--csv", "-", "--no-header").out == stdout.out.split("\n", 1)[1]


# --- a table of points ------------------------------------------------------------------------------------------------


def test_every_point_is_priced_as_it_would_be_alone() -> None:
    rows = many(
        "model,hardware,engine,plan,concurrency,isl,osl,weights,schedule\n"
        "llama3-8b,h100,vllm,TP2,16,512,128,fp8,static\n"
        "llama3-70b,h200,sglang,TP4xPP2,8,1024,256,bf16,continuous\n"
        "qwen3-8b,a100,trtllm,DP2,5,2048,64,int8,continuous\n"
        "llama3-8b,h100,vllm,TP4,16,512,128,fp8,static\n"
    )
    for row in rows:
        given = ("model", "hardware", "engine", "plan", "concurrency", "isl", "osl", "weights", "schedule")
        alone = one(*(word for name in given for word in (f"--{name}", row[name])))
        # texts of the file stay as they were written; the figures are the same to the last bit
        assert {name: row[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}


def test_the_order_of_the_file_is_kept_whatever_rows_have_in_common() -> None:
    text = "model,tp,isl\n" + "".join(
        f"{model},{tp},{isl}\n" for isl in (100, 200, 300) for tp in (4, 1, 2) for model in ("qwen3-8b", "llama3-8b")
    )
    done = points(text, "--csv", "-")
    given = [line.split(",") for line in text.splitlines()]
    assert [line.split(",")[:3] for line in done.out.splitlines()] == given
    assert [row["plan"] for row in done.rows] == [f"TP{tp}" for _, tp, _ in given[1:]]
    assert len({row["ttft_ms"] for row in done.rows}) == len(given) - 1


def test_output_is_the_columns_of_the_file_and_then_the_result_columns_it_lacks() -> None:
    done = points("tp,note,model\n2,first,llama3-8b\n", "--csv", "-")
    added = [name for name in planner.COLUMNS if name not in ("tp", "model")]
    assert done.out.splitlines()[0].split(",") == ["tp", "note", "model", *added]
    assert list(many("tp,note,model\n2,first,llama3-8b\n")[0]) == ["tp", "note", "model", *added]


def test_a_csv_of_points_goes_to_stdout_when_no_target_is_named() -> None:
    text = "model\nllama3-8b\n"
    assert points(text).out == points(text, "--csv", "-").out
    assert points(text, "--quiet").out == ""


def test_unknown_columns_pass_through_unchanged_with_a_warning() -> None:
    text = 'id,model,tp,remark\n007,llama3-8b,1,"a, ""b"""\n 8 ,llama3-8b,2,\n'
    done = points(text, "--csv", "-")
    assert done.status == 0
    assert [(row["id"], row["remark"]) for row in done.rows] == [("007", 'a, "b"'), (" 8 ", "")]
    assert "columns that are no option are passed through: id, remark" in done.err
    assert len(done.err.splitlines()) == 1
    assert points(text, "--csv", "-", "--quiet").err == ""


@pytest.mark.parametrize("remark", ["two\nlines", "a\u2028b", "a\x0bb", "a\x1cb", "tab\tand, comma"])
def test_whatever_a_cell_holds_passes_through(remark: str) -> None:
    rows = many(f'model,remark,tp\nllama3-8b,"{remark}",2\nllama3-8b,next,1\n')
    assert [row["remark"] for row in rows] == [remark, "next"]
    assert [row["plan"] for row in rows] == ["TP2", "TP1"]


def test_a_result_column_in_the_file_does_not_hide_the_result() -> None:
    """A file that `plan --csv` wrote, given back with another length: its old figures must not pass for new ones."""
    text = "model,tp,ttft_ms,error\nllama3-8b,1,77,old\nllama3-8b,3,77,old\n"
    done = points(text, "--csv", "-")
    if done.status == 2:  # refusing such a column is as good
        assert "ttft_ms" in done.err
        return
    rows = [line.split(",") for line in done.out.splitlines()]
    last = {name: place for place, name in enumerate(rows[0])}
    assert float(rows[1][last["ttft_ms"]]) == pytest.approx(one("-m", "llama3-8b")["ttft_ms"], rel=1e-5)
    assert rows[1][last["error"]] == ""
    assert "32 query heads" in rows[2][last["error"]]


def test_options_fill_columns_that_are_missing_and_cells_that_are_empty() -> None:
    rows = many("tp,isl\n1,\n2,100\n", "-m", "llama3-8b", "--isl", 333, "--osl", 44, "--concurrency", 3)
    assert [row["isl"] for row in rows] == ["", "100"]  # as the file has it
    for row, isl in zip(rows, (333, 100), strict=True):
        alone = one("-m", "llama3-8b", "--tp", row["tp"], "--isl", isl, "--osl", 44, "--concurrency", 3)
        assert {name: row[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}


def test_defaults_fill_cells_that_are_empty_when_no_option_does() -> None:
    (row,) = many("model,hardware,engine,tp,isl,osl,concurrency,gpus\nllama3-8b,,,,,,,\n")
    alone = one("-m", "llama3-8b")
    assert {name: row[name] for name in FIGURES} == {name: alone[name] for name in FIGURES}


def test_column_names_are_option_names_with_dashes_or_underscores() -> None:
    underscored, dashed = many("model,kv_cache\nllama3-8b,fp8\n"), many("--model,--kv-cache\nllama3-8b,fp8\n")
    assert underscored[0]["kv_gib"] == dashed[0]["kv_gib"] < one("-m", "llama3-8b")["kv_gib"]
    assert dashed[0]["--kv-cache"] == "fp8"


def test_points_come_from_a_file_as_from_stdin(tmp_path: Path) -> None:
    text = "model,tp\nllama3-8b,2\n"
    path = tmp_path / "points.csv"
    path.write_text(text)
    assert run("estimate", "--points", path, "--csv", "-").out == points(text, "--csv", "-").out


def test_points_of_a_spreadsheet_may_have_its_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_bytes(b"\xef\xbb\xbfmodel,tp\r\nllama3-8b,2\r\n")
    done = run("estimate", "--points", path, "--csv", "-")
    assert (done.status, done.err) == (0, "")
    assert done.out == points("model,tp\nllama3-8b,2\n", "--csv", "-").out


def test_points_are_written_to_files_and_without_a_header_where_asked(tmp_path: Path) -> None:
    text = "model,tp\nllama3-8b,2\nllama3-8b,1\n"
    table, objects = tmp_path / "out.csv", tmp_path / "out.json"
    done = points(text, "--csv", table, "--json", objects)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert table.read_text() == points(text, "--csv", "-").out
    assert json.loads(objects.read_text()) == many(text)
    assert points(text, "--csv", "-", "--no-header").out == table.read_text().split("\n", 1)[1]


def test_many_points_are_priced_together_as_each_alone() -> None:
    text = "plan,concurrency,isl\n" + "".join(
        f"TP{tp}xDP{dp},{load},{isl}\n" for tp in (1, 2, 4) for dp in (1, 2) for load in (1, 7, 33) for isl in (16, 999)
    )
    rows = many(text, "-m", "llama3-8b")
    for row in rows[:: len(rows) // 6]:
        (alone,) = many(f"plan,concurrency,isl\n{row['plan']},{row['concurrency']},{row['isl']}\n", "-m", "llama3-8b")
        assert alone == row


BAD_ROWS = [
    ("tp=3", "32 query heads"),
    ("tp=x", "tp must be a number"),
    ("tp=0", "tp must be a whole number of at least 1"),
    ("tp=nan", "tp"),
    ("tp=2.5", "tp must be a whole number"),
    ("isl=0", "isl must be a whole number of at least 1"),
    ("isl=-5", "isl must be a whole number of at least 1"),
    ("isl=inf", "isl must be a whole number"),
    ("isl=9000", "context of 8192"),
    ("model=nope", "unknown model 'nope'"),
    ("hardware=h10", "h100"),
    ("engine=vlm", "vllm"),
    ("weights=int2", "int4"),
    ("kv_cache=int4", "kv_cache"),
    ("objective=speed", "latency, ttft"),
    ("schedule=never", "continuous"),
    ("plan=TP0", "not a plan"),
    ("gpus=1", "takes 2 chips"),
    ("memory_limit=lots", "not a size of memory"),
    ("memory_limit=1GiB", "exceed the limit of 1.0 GiB"),
    ("memory_fraction=0", "memory_fraction"),
    ("memory_fraction=2", "memory_fraction"),
    ("price=-1", "price"),
    ("pp=33", "32 layers"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS, ids=[bad for bad, _ in BAD_ROWS])
def test_a_row_that_cannot_be_priced_gets_its_error_and_the_others_their_figures(bad: str, reason: str) -> None:
    name, value = bad.split("=")
    defaults = {"model": "llama3-8b", "tp": "2"} if name != "plan" else {"model": "llama3-8b"}
    sound = ",".join(defaults.get(column, "") for column in dict.fromkeys((*defaults, name)))
    wrong = ",".join(value if column == name else defaults[column] for column in dict.fromkeys((*defaults, name)))
    text = f"{','.join(dict.fromkeys((*defaults, name)))}\n{sound}\n{wrong}\n{sound}\n"
    done = points(text, "--csv", "-")
    assert done.status == 0
    first, failed, last = done.rows
    assert reason in failed["error"]
    assert {name: failed[name] for name in FIGURES if name in failed} == dict.fromkeys(FIGURES, "")
    assert first == last
    assert first["error"] == ""
    assert float(first["latency_ms"]) > 0
    assert done.err.startswith("plan: 1 of 3 rows could not be priced; the first: ")
    assert len(done.err.splitlines()) == 1


def test_the_exit_is_3_only_where_every_row_fails() -> None:
    done = points("model,tp\nllama3-8b,3\nnope,1\n", "--csv", "-")
    assert done.status == 3
    assert "none of the 2 rows can be priced" in done.err
    assert "Traceback" not in done.err
    assert [bool(row["error"]) for row in done.rows] == [True, True]
    assert points("model,tp\nllama3-8b,3\nllama3-8b,1\n", "--csv", "-").status == 0
