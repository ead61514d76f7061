"""`plan calibrate` from files to files, and `plan estimate --against`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, Completed, forget_files, run

import planner
from planner.report.against import METRICS
from planner.specs.engine import Calibrated

DATA = ROOT / "tests" / "data"
NODE, NODES, GEMM = DATA / "nccl_node.txt", DATA / "nccl_nodes.txt", DATA / "gemm.csv"
SERVING, BENCH, SGLANG = DATA / "vllm_serving.json", DATA / "vllm_run.json", DATA / "sglang_serving.jsonl"
H100 = ("calibrate", "-H", "h100")


def changed(path: Path, target: Path, **changes: Any) -> Path:
    """A result with some keys changed; None takes one away."""
    raw = json.loads(path.read_text()) | changes
    target.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return target


# --- files ------------------------------------------------------------------------------------------------------------


def test_both_files_are_written_and_used(tmp_path: Path, fresh_catalog: None) -> None:
    mine, host = tmp_path / "my-cluster.yaml", tmp_path / "my-engine.yaml"
    done = run(
        *H100, "--nccl", NODE, "--nccl", NODES, "--gemm", GEMM, "--serving", SERVING, "--output", mine,
        "--engine-output", host,
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    assert f"Wrote {mine} and {host}; use them together with --hardware {mine} --engine {host}." in " ".join(
        done.out.split()
    )
    text = mine.read_text()
    assert text.startswith("# Written by plan calibrate")
    assert "status: fitted" in text
    assert "'gemm.csv, 28 rows'" in text
    for untouched in ("chip:", "network:", "attention_decode", "custom_one_shot", "price"):
        assert untouched not in text
    assert "\nextends: vllm\nname: my-engine\nhost:\n" in host.read_text()
    assert "\nextends: h100-sxm\nname: my-cluster\nlike: h100-sxm\n" in text

    hardware, engine = planner.load_machine(mine, host)
    shipped, software = planner.load_machine("h100", "vllm")
    assert (hardware.name, engine.name) == ("my-cluster", "my-engine")
    assert hardware.kernels["gemm"]["bf16"].provenance.source == "gemm.csv, 28 rows"
    assert hardware.kernels["gemm"]["bf16"].provenance.version is None  # not that of whose constants stood there
    assert hardware.kernels["attention_decode"] == shipped.kernels["attention_decode"]
    assert hardware.collective("custom_one_shot", "all_reduce", "nvlink") == shipped.collective(
        "custom_one_shot", "all_reduce", "nvlink"
    )  # the engine's own, under the file that extends
    assert engine.host.provenance.source == "vllm_serving.json, 6 runs"
    assert engine._replace(name=software.name, host=software.host, calibrated=software.calibrated) == software
    assert engine.calibrated == Calibrated(("my-cluster",), tp=1, batch=128, isl=1024)
    assert (hardware.like, shipped.like) == ("h100-sxm", None)

    words = ("-m", "llama3-70b", "--gpus", 16, "--csv", "-")
    new, old = run(*words, "-H", mine, "--engine", host), run(*words, "-H", "h100")
    assert (new.status, new.err) == (0, "")
    assert {row["hardware"] for row in new.rows} == {"my-cluster"}
    assert {row["tpot_ms"] for row in new.rows}.isdisjoint(row["tpot_ms"] for row in old.rows)
    row = json.loads(run("estimate", "--against", BENCH, "-H", mine, "--engine", host, "--json", "-").out)[0]
    assert abs(row["error_tpot"]) < 0.02


def test_positional_files_are_taken_for_what_they_hold() -> None:
    named = run(*H100, "--nccl", NODE, "--gemm", GEMM, "--serving", SERVING, "--csv", "-")
    assert (named.status, named.err) == (0, "")
    assert run("calibrate", SERVING, GEMM, NODE, "-H", "h100", "--csv", "-") == named


def test_a_file_may_start_from_one_of_the_users_own(tmp_path: Path, fresh_catalog: None) -> None:
    first, second = tmp_path / "a" / "first.yaml", tmp_path / "b" / "second.yaml"
    for path in (first, second):
        path.parent.mkdir()
    assert run(*H100, "--gemm", GEMM, "--output", first, "--name", "rack-1").status == 0
    done = run("calibrate", "-H", first, "--nccl", NODES, "--output", second, "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")
    assert "extends: ../a/first.yaml\nname: second\n" in second.read_text()
    hardware = planner.load_hardware(second)
    assert hardware.kernels == planner.load_hardware(first).kernels
    assert planner.load_hardware(first).name == "rack-1"
    assert any(row.provenance.source.startswith("nccl_nodes.txt, 42 rows") for row in hardware.collectives)
    again = run("calibrate", "-H", first, "--gemm", GEMM, "--output", first, "--force")
    assert again.status == 2
    assert "is the file to start from" in again.err


def test_a_file_of_the_search_path_is_extended_as_the_file_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_catalog: None
) -> None:
    """Not as what it calls itself: that may be a shipped file, or nothing that can be found."""
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(folder))
    chips = {"rack": "h100-sxm", "other": "'rack: no. 2'"}
    for stem, name in chips.items():
        (folder / f"{stem}.yaml").write_text(f"extends: h100-sxm\nname: {name}\nnotes: [of {stem}]\n")
    software = folder / "tuned.yaml"
    software.write_text("extends: vllm\nname: vllm\nnotes: [of tuned]\n")
    text = software.read_text()
    for stem in chips:
        target = tmp_path / f"new-{stem}.yaml"
        assert run("calibrate", "-H", stem, GEMM, "-o", target, "--quiet").status == 0
        assert f"extends: mine/{stem}.yaml\n" in target.read_text()
        assert planner.load_hardware(target).notes == (f"of {stem}",)
    for option in ("--engine-output", "--csv"):
        done = run(*H100, "--engine", "tuned", SERVING, option, software, "--force")
        assert (done.status, done.out) == (2, "")
        assert software.read_text() == text
    done = run("calibrate", "-H", "rack", SERVING, "--engine-output", folder / "rack.yaml", "--force")
    assert "is the file to start from" in done.err
    assert (folder / "rack.yaml").read_text().startswith("extends: h100-sxm\n")


def test_what_was_fitted_here_is_trusted_here(tmp_path: Path, fresh_catalog: None) -> None:
    """A file of one's own constants must not make the planner less sure than the shipped ones do."""
    mine, host = tmp_path / "mine.yaml", tmp_path / "host.yaml"
    files = ("--nccl", NODES, "--gemm", GEMM, "--serving", SERVING)
    assert run(*H100, *files, "-o", mine, "--engine-output", host, "--quiet").status == 0

    def said(*words: object) -> str:
        return " ".join(run("-m", "llama3-8b", "--gpus", 16, "--tp", "1,8,16", "--pp", 1, *words).out.split())

    shipped, own, both = said("-H", "h100"), said("-H", mine), said("-H", mine, "--engine", host)
    for text in (shipped, own, both):
        assert "within 10% of the row above" in text
        assert "hardware in" not in text
    assert "Assumed, not measured: elementwise, collectives over infiniband." in shipped
    assert "Assumed, not measured: elementwise. $" in own
    assert "constants were measured on mine; TP to 1, one stage, batches to 128, prompts to 1024" in both
    child = tmp_path / "child.yaml"  # whoever changes it further has a machine that nobody measured
    child.write_text("extends: mine.yaml\nchip: {memory_bandwidth_gb_per_s: 4000}\n")
    assert planner.load_hardware(child).like is None
    assert "within 25% of the row above" in said("-H", child)
    again = tmp_path / "again.yaml"
    assert run("calibrate", "-H", mine, GEMM, "-o", again, "--quiet").status == 0
    assert planner.load_hardware(again).like == "h100-sxm"
    child.write_text("extends: mine.yaml\nlike: child\n")
    forget_files()
    with pytest.raises(planner.SpecError, match="like: found 'child', expected the name of another"):
        planner.load_hardware(child)


def test_a_file_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("keep me")
    done = run(*H100, "--gemm", GEMM, "--output", mine)
    assert (done.status, done.out) == (2, "")
    assert f"--output {mine}: exists; --force replaces it" in done.err
    assert mine.read_text() == "keep me"
    assert run(*H100, "--gemm", GEMM, "--output", mine, "--force").status == 0
    assert "extends: h100-sxm" in mine.read_text()


def test_nothing_is_written_where_one_of_the_targets_cannot_be(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    done = run(*H100, "--gemm", GEMM, "--output", mine, "--csv", tmp_path / "no" / "such.csv")
    assert (done.status, done.out) == (2, "")
    assert "cannot be written" in done.err
    assert list(tmp_path.iterdir()) == []


# --- what is printed --------------------------------------------------------------------------------------------------


def test_the_table_has_errors_before_and_after_and_constants_old_and_new() -> None:
    out = run(*H100, "--gemm", GEMM).out
    assert max(map(len, out.splitlines())) <= 100
    head, before, after = (line.split() for line in out.splitlines()[:3])
    assert head == ["fitted", "rows", "bias", "mean", "median", "p90"]
    assert before[:4] == ["GEMM", "bf16", "28", "before"]
    assert after[0] == "after"
    assert float(after[2].rstrip("%")) < float(before[5].rstrip("%")) / 2
    assert "kernels.gemm.bf16.fixed_us" in out
    assert "Nothing written of these hardware constants: --output FILE.yaml does." in out


def test_rows_for_scripts_say_the_same(tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    done = run(*H100, "--gemm", GEMM, "--csv", "-", "--json", target)
    assert done.out.splitlines()[0] == "kind,group,rows,name,before,after"
    rows = json.loads(target.read_text())
    assert [(row["kind"], row["name"]) for row in rows[:8]] == [
        *(("error", name) for name in ("bias", "mean", "median", "p90")),
        *(
            ("constant", f"kernels.gemm.bf16.{name}")
            for name in ("fixed_us", "memory_fraction", "compute_fraction", "p")
        ),
    ]
    assert rows[1]["after"] < rows[1]["before"] / 2
    old = planner.load_hardware("h100").kernels["gemm"]["bf16"]
    assert rows[4]["before"] == old.fixed_us
    assert [row["name"] for row in done.rows] == [row["name"] for row in rows]
    assert run(*H100, "--gemm", GEMM, "--csv", "-", "--no-header").out == done.out.split("\n", 1)[1]


def test_a_sweep_of_sglang_needs_no_options_but_the_engine() -> None:
    done = run(*H100, "--engine", "sglang", SGLANG, "--json", "-")
    assert (done.status, done.err) == (0, "")
    rows = {(row["group"], row["name"]): row for row in json.loads(done.out)}
    assert rows["serving TPOT", "mean"]["after"] < 0.02
    assert ("serving TPOT", "host.step_us") in rows


def test_a_log_of_another_machine_is_doubted() -> None:
    done = run("calibrate", "--nccl", DATA / "rccl_alltoall.txt", "-H", "a100", "--csv", "-")
    assert (done.status, len(done.rows) > 4) == (0, True)
    assert "measured on AMD Instinct MI300X, but --hardware is a100-80gb-sxm" in done.err
    assert run("calibrate", "--nccl", DATA / "rccl_alltoall.txt", "-H", "mi300x", "--csv", "-").err == ""
    done = run("calibrate", SGLANG, "--csv", "-")
    assert "is a run of sglang, but the engine is vllm: --engine sglang?" in done.err
    done = run("estimate", "--against", SGLANG, "--csv", "-")
    assert (done.status, len(done.err.splitlines())) == (0, 1)
    assert "--engine sglang?" in done.err
    assert run("estimate", "--against", SGLANG, "--csv", "-", "--quiet").err == ""


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED: list[tuple[tuple[object, ...], str]] = [
    (H100, "nothing to fit"),
    ((*H100, GEMM, "--gemm", GEMM), "stands twice"),
    ((*H100, "--gemm", "nope.csv"), "nope.csv: cannot be read: no such file"),
    ((*H100, "--gemm", NODE), "nccl_node.txt: line 1: no column 'm'"),
    ((*H100, "--nccl", GEMM), "gemm.csv: no results of nccl-tests"),
    ((*H100, "--serving", GEMM), "gemm.csv: line 1: is not valid JSON"),
    ((*H100, DATA / "README.md"), "README.md: neither output of nccl-tests"),
    (("calibrate", "-H", "h10", "--gemm", GEMM), "unknown hardware 'h10'"),
    ((*H100, "--gemm", GEMM, "--output", "mine.txt"), "expected the name of a YAML file"),
    ((*H100, "--gemm", GEMM, "--engine-output", "e.yaml"), "nothing of the engine is fitted"),
    ((*H100, "--serving", SERVING, "--output", "h.yaml"), "nothing of the hardware is fitted"),
    ((*H100, GEMM, SERVING, "--output", "x.yaml", "--engine-output", "x.yaml"), "the same file"),
    ((*H100, GEMM, SERVING, "--engine-output", "e.yaml"), "on top of the kernels of this very call"),
    ((*H100, GEMM, "--output", "h100-sxm.yaml"), "it would extend itself; choose another name"),
    ((*H100, SERVING, SGLANG), "is a run of vllm and"),
    ((*H100, SERVING, "-m", "llama3-70b", "--tp", 8), "% on average, more than 30%"),
    ((*H100, SERVING, "-m", "llama3-70b", "--tp", 8), "furthest off: vllm_serving.json: line"),
    (
        (*H100, SERVING, "-m", "llama3-70b"),
        "line 1: TP1, 1024 in, 256 out, 1 in flight, does not fit on h100-sxm: ",
    ),
    (
        ("calibrate", SERVING, "-H", "a100", "--engine", "gpt-fast"),
        "takes at most 1 sequence; of 6 runs 1 remain",
    ),
    ((*H100, "--serving", BENCH), "1 with a TPOT are too few"),
    ((*H100, "--serving", SERVING, "--tp", "1,2"), "is not a whole number"),
    ((*H100, "--serving", SERVING, "--isl", 512), "--isl 512 contradicts"),
    ((*H100, "--serving", SERVING, "--concurrency", 8), "--concurrency 8 contradicts"),
    ((*H100, "--serving", SERVING, "--plan", "TP2", "--tp", 4), "--tp 4 contradicts --plan TP2"),
    ((*H100, "--serving", SERVING, "--tp", 3), "32 query heads"),
    ((*H100, "--serving", SERVING, "--plan", "TP2/batch"), "--plan TP2/batch: a host is fitted to plans of TP, PP and"),
    ((*H100, "--serving", SERVING, "--model", "nope"), "unknown model 'nope'"),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_fitted_is_refused_and_nothing_written(
    words: tuple[object, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_rows_in_another_unit_are_refused_with_the_unit_that_was_meant(tmp_path: Path) -> None:
    wrong = tmp_path / "gemm.csv"
    wrong.write_text(GEMM.read_text().replace("time_us", "time_ns"))
    done = run(*H100, "--gemm", wrong, "--output", tmp_path / "mine.yaml")
    assert done.status == 2
    assert "gemm.csv: line 2: 1 x 4096 x 6144 at" in done.err
    assert "are the times in us, not ns?" in done.err
    assert not (tmp_path / "mine.yaml").exists()


def test_loads_above_what_the_engine_takes_are_left_out_with_a_word(tmp_path: Path, fresh_catalog: None) -> None:
    small = tmp_path / "small.yaml"
    small.write_text("extends: vllm\nscheduler: {max_sequences: 64}\n")
    host = tmp_path / "host.yaml"
    done = run(*H100, SERVING, "--engine", small, "--engine-output", host)
    assert done.status == 0
    assert done.err == (
        "plan: vllm_serving.json: line 6: left out: 128 requests a replica, but small takes at most 64 sequences\n"
    )
    assert planner.load_engine(host).calibrated == Calibrated(("h100-sxm",), tp=1, batch=64, isl=1024)


def test_times_that_no_such_chip_takes_are_refused_and_a_poor_fit_is_warned_of(tmp_path: Path) -> None:
    head, *lines = GEMM.read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in lines if ",bfloat16," in line]

    def timed(name: str, factor: Callable[[int], float]) -> Completed:
        file = tmp_path / f"{name}.csv"
        scaled = [f"{start},{float(time) * factor(index):.6g}" for index, (start, time) in enumerate(rows)]
        file.write_text("\n".join([head, *scaled]))
        return run(*H100, file, "--csv", "-")

    slow = timed("slow", lambda _: 50.0)
    assert (slow.status, slow.out) == (2, "")
    assert "times what h100-sxm is said to need: are the unit, the dtype and --hardware right?" in slow.err
    endless = timed("endless", lambda index: 1e300 if index == 3 else 1.0)
    assert (endless.status, endless.out) == (2, "")
    assert "endless.csv: line 5: " in endless.err
    noise = timed("noise", lambda index: (3.0, 9.0)[index % 2])
    assert (noise.status, noise.out) == (2, "")
    assert "more than 30%: these rows are not of one machine" in noise.err
    assert noise.err.count("noise.csv: line ") == 3
    rough = timed("rough", lambda index: (2.0, 3.0)[index % 2])
    assert (rough.status, len(rough.err.splitlines())) == (0, 1)
    assert "more than 15%; do not lean on it" in rough.err


def test_a_worse_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever makes a fit fail: here a search that comes back with a floor of 50 us."""
    from planner.evidence import calibration  # noqa: PLC0415

    def bad(hardware: Any, operation: Any, seconds: Any, **_: Any) -> Any:
        return hardware.kernels["gemm"][operation.dtype]._replace(fixed_us=50.0)

    monkeypatch.setattr(calibration, "fit_kernel", bad)
    done = run(*H100, "--gemm", GEMM, "--output", tmp_path / "mine.yaml")
    assert (done.status, done.out) == (2, "")
    assert "they stay, and nothing is written" in done.err
    assert not (tmp_path / "mine.yaml").exists()


def test_without_scipy_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    for file in (GEMM, NODES, SERVING):
        done = run(*H100, file)
        assert (done.status, done.out) == (2, "")
        assert "needs scipy: pip install 'parallel-strategy-planner[calibrate]'" in done.err


# --- estimate --against -----------------------------------------------------------------------------------------------


def test_a_run_is_priced_as_it_was_and_its_error_stands_behind_the_result_columns() -> None:
    done = run("estimate", "--against", BENCH, "--csv", "-")
    assert (done.status, done.err) == (0, "")
    added = [f"measured_{name}" for name in METRICS] + [f"error_{name.removesuffix('_ms')}" for name in METRICS]
    assert done.out.splitlines()[0].split(",") == [*planner.COLUMNS, *added]
    (row,) = json.loads(run("estimate", "--against", BENCH, "--json", "-").out)
    alone = run(
        "estimate", "-m", "llama3.1-8b", "--isl", 1024, "--osl", 256, "--concurrency", 32, "--json", "-"
    )  # fmt: skip
    assert {name: row[name] for name in planner.COLUMNS} == json.loads(alone.out)[0]
    raw = json.loads(BENCH.read_text())
    assert row["measured_tpot_ms"] == raw["mean_tpot_ms"]
    assert row["measured_tokens_per_s"] == raw["output_throughput"]
    for name in METRICS:
        assert row[f"error_{name.removesuffix('_ms')}"] == pytest.approx(row[name] / row[f"measured_{name}"] - 1)


def test_measured_stands_beside_predicted(tmp_path: Path) -> None:
    out = run("estimate", "--against", BENCH).out
    lines = [line.split() for line in out.splitlines()]
    table = lines[lines.index(["run", "load", "what", "measured", "predicted", "error"]) + 1 :]
    assert [line[2] for line in table[:4]] == ["TTFT", "TPOT", "latency", "tok/s"]
    raw, row = json.loads(BENCH.read_text()), json.loads(run("estimate", "--against", BENCH, "--json", "-").out)[0]
    assert float(table[1][4]) == pytest.approx(raw["mean_tpot_ms"], rel=1e-3)
    assert table[1][6] == f"{row['error_tpot']:+.1%}"
    assert "TPOT: compute" in out
    assert "Means of 320 requests." in out


def test_several_runs_are_a_row_each() -> None:
    words = ("estimate", "--against", SGLANG, "--engine", "sglang")
    rows = json.loads(run(*words, "--json", "-").out)
    assert [(row["plan"], row["concurrency"], row["model"]) for row in rows] == [
        ("TP4", load, "llama3-70b") for load in (2, 8, 32, 96)
    ]
    done = run(*words)
    assert (done.status, done.err) == (0, "")
    assert done.out.count("sglang_serving.jsonl: line ") == 16
    assert "Off on average: TTFT " in done.out


def test_what_the_result_does_not_say_is_asked_for(tmp_path: Path) -> None:
    bare = changed(BENCH, tmp_path / "bare.json", max_concurrency=None, model_id=None)
    words = ("estimate", "--against", bare)
    assert "no model: the result names none; give --model" in run(*words).err
    done = run(*words, "-m", "llama3.1-8b")
    assert done.status == 2
    assert "on average 31.1 requests in flight); give --concurrency" in done.err
    full = run(*words, "-m", "llama3.1-8b", "--concurrency", 32, "--csv", "-")
    assert full == run("estimate", "--against", BENCH, "--csv", "-")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--isl", 512), "--isl 512 contradicts"),
        (("--isl", 1024, "--osl", 999), "--osl 999 contradicts"),
        (("--concurrency", 8), "--concurrency 8 contradicts"),
        (("--points", "x.csv"), "--against and --points"),
        (("--tp", 3), "32 query heads"),
        (("--model", "nope"), "unknown model 'nope'"),
        (("--max-tpot", 1), "above --max-tpot 1"),
    ],
)
def test_what_contradicts_a_result_is_refused(words: tuple[object, ...], sentence: str) -> None:
    done = run("estimate", "--against", BENCH, *words)
    assert done.status in (2, 3)
    assert done.out == ""
    assert sentence in done.err


def test_lengths_of_the_command_line_stand_where_they_agree() -> None:
    rows = json.loads(run("estimate", "--against", BENCH, "--isl", 1000, "--json", "-").out)
    assert rows[0]["isl"] == 1000


def test_a_run_that_cannot_be_priced_is_warned_of_beside_the_others(tmp_path: Path) -> None:
    odd = changed(BENCH, tmp_path / "odd.json", tp=3)
    both = tmp_path / "both.json"
    both.write_text(BENCH.read_text().rstrip() + "\n" + odd.read_text() + "\n")
    done = run("estimate", "--against", both)
    assert done.status == 0
    assert (
        done.err
        == f"plan: {both}: line 2: not priced: tp 3 does not divide the 32 query heads; nearest valid: 2 or 4\n"
    )
    assert done.out.count("both.json: line 1") == 4
    assert "both.json: line 2" not in done.out
    rows = json.loads(run("estimate", "--against", both, "--json", "-").out)
    assert [(row["error"] is None, row["tpot_ms"] is None) for row in rows] == [(True, False), (False, True)]
    alone = run("estimate", "--against", odd)
    assert (alone.status, alone.out) == (3, "")


def test_several_results_are_priced_together(tmp_path: Path) -> None:
    other = changed(BENCH, tmp_path / "other.json", mean_tpot_ms=12.0)
    rows = json.loads(run("estimate", "--against", BENCH, "--against", other, "--json", "-").out)
    assert [row["measured_tpot_ms"] for row in rows] == [11.688, 12.0]
    assert "stands twice" in run("estimate", "--against", other, "--against", other).err


def test_what_a_result_says_wrongly_is_bad_input_with_its_place(tmp_path: Path) -> None:
    far = changed(BENCH, tmp_path / "far.json", total_input_tokens=10**30)
    done = run("estimate", "--against", far)
    assert (done.status, done.out) == (2, "")
    assert "far.json: isl must be" in done.err
    local = changed(BENCH, tmp_path / "local.json", model_id="RedHatAI/Meta-Llama-3.1-8B-FP8")
    for words in (("estimate", "--against", local), ("calibrate", local)):
        done = run(*words)
        assert (done.status, done.out) == (2, "")
        assert "local.json: unknown model 'RedHatAI/" in done.err
        assert "--model says which" in done.err


@pytest.mark.parametrize("option", ["--csv", "--json"])
def test_nothing_is_written_over_what_is_read(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_catalog: None
) -> None:
    monkeypatch.chdir(tmp_path)
    result, products, points = Path("run.json"), Path("gemm.csv"), Path("points.csv")
    result.write_text(BENCH.read_text())
    products.write_text(GEMM.read_text())
    points.write_text("model,tp\nllama3-8b,1\n")
    machine = Path("machine.yaml")
    machine.write_text("extends: h100-sxm\n")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    for words in (
        ("estimate", "--against", result, option, tmp_path / "run.json"),
        ("estimate", "--points", points, option, "./points.csv"),
        ("estimate", "-m", "llama3-8b", "-H", machine, option, "machine.yaml"),
        ("calibrate", products, option, tmp_path / ".." / tmp_path.name / "gemm.csv"),
        ("calibrate", products, "-H", machine, option, machine),
    ):
        done = run(*words)
        assert (done.status, done.out) == (2, ""), words
        assert "is read by this very command" in done.err
    for words, sentence in (
        ((option, "new.yaml", "-o", "new.yaml"), "are the same file"),
        ((option, ""), f"{option}: expected the name of a file, found ''"),
        (("-o", ""), "--output: expected the name of a file, found ''"),
        (("-o", machine, "--force", "-H", machine), "is the file to start from"),
    ):
        done = run("calibrate", products, *words)
        assert (done.status, done.out) == (2, ""), words
        assert sentence in done.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_file_is_read_anew_in_every_process(tmp_path: Path, fresh_catalog: None) -> None:
    """What is written is what a later command reads, not what an earlier one remembers."""
    mine = tmp_path / "mine.yaml"
    run(*H100, "--gemm", GEMM, "--output", mine)
    first = planner.load_hardware(mine).kernels["gemm"]["bf16"].fixed_us
    half = tmp_path / "half.csv"
    lines = GEMM.read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in lines[1:]]
    half.write_text("\n".join([lines[0], *(f"{start},{float(time) * 1.5:.2f}" for start, time in rows)]))
    assert run(*H100, "--gemm", half, "--output", mine, "--force").status == 0
    forget_files()
    assert planner.load_hardware(mine).kernels["gemm"]["bf16"].fixed_us > 1.2 * first
