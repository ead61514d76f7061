"""`plan`: the columns, the formats, the table, and what decides the order."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import subprocess
import sys
from csv import reader
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import ROOT, Completed, run, run_process

import planner

# Written out, and not taken from the code: scripts address these columns by name and by position.
CONTRACT = [
    "rank", "plan", "model", "hardware", "engine", "objective", "schedule", "weights", "kv_cache", "gpus", "tp",
    "pp", "dp", "ep", "cp", "attention", "prefill_attention", "ffn", "prefill_ffn", "idle_gpus", "concurrency",
    "batch_per_replica", "isl", "osl", "ttft_ms", "queue_ms", "tpot_ms", "latency_ms", "tokens_per_s",
    "total_tokens_per_s", "tokens_per_s_per_gpu", "requests_per_s", "usd_per_mtok", "wh_per_mtok",
    "gpu_s_per_token", "mfu_prefill", "mfu_decode", "weights_gib", "kv_gib", "other_gib", "memory_gib",
    "memory_limit_gib", "kv_capacity_tokens", "max_concurrency", "bottleneck", "tie", "error",
]  # fmt: skip
WHOLE = [
    "rank", "gpus", "tp", "pp", "dp", "ep", "cp", "idle_gpus", "concurrency", "batch_per_replica", "isl", "osl",
    "kv_capacity_tokens", "max_concurrency",
]  # fmt: skip
SMALL = ("--model", "llama3-8b", "--gpus", "4")


def cell(value: object) -> str:
    """What CSV must show for a value of the JSON output."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def good(*words: object) -> Completed:
    """The outcome of a command that must succeed, and say nothing on stderr."""
    done = run(*words)
    assert (done.status, done.err) == (0, "")
    return done


def as_json(*words: object) -> list[dict[str, object]]:
    rows = json.loads(good(*words, "--json", "-").out)
    assert isinstance(rows, list)
    return rows


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


# --- formats ---------------------------------------------------------------------------------------------------------


def test_csv_header_is_the_public_columns_in_the_order_of_the_contract() -> None:
    header = good(*SMALL, "--csv", "-").out.splitlines()[0].split(",")
    assert header == list(planner.COLUMNS)
    assert header[: len(CONTRACT)] == CONTRACT  # new columns go to the end


def test_csv_stdout_holds_nothing_but_rows() -> None:
    done = good(*SMALL, "--csv", "-", "--top", "5")
    lines = list(reader(io.StringIO(done.out)))
    assert [len(line) for line in lines] == [len(planner.COLUMNS)] * 6


@pytest.mark.parametrize("target", ["-", "file"])
def test_csv_lines_end_in_a_line_feed_alone(target: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    done = good(*SMALL, "--csv", "-" if target == "-" else path)
    written = done.out.encode() if target == "-" else path.read_bytes()
    assert written.endswith(b"\n")
    assert b"\r" not in written
    assert b"\n\n" not in written


def test_a_csv_file_holds_what_stdout_would_and_the_table_is_still_printed(tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    done = good(*SMALL, "--csv", path)
    assert path.read_text() == good(*SMALL, "--csv", "-").out
    assert done.out == good(*SMALL).out


@pytest.mark.parametrize(
    "options", [(), ("--objective", "throughput"), ("--osl", "1"), ("-H", "h100-lecture"), ("--rejected",)]
)
def test_csv_and_json_say_the_same_csv_in_six_significant_digits(options: tuple[str, ...]) -> None:
    rows = as_json(*SMALL, "--top", "0", *options)
    table = good(*SMALL, "--top", "0", *options, "--csv", "-").rows
    assert len(rows) == len(table) > 3
    for row, line in zip(rows, table, strict=True):
        assert list(row) == list(line) == list(planner.COLUMNS)
        assert line == {name: cell(value) for name, value in row.items()}


def test_some_csv_figure_needs_the_rounding_to_six_digits() -> None:
    row = as_json(*SMALL, "--top", "1")[0]
    assert any(isinstance(value, float) and float(f"{value:.6g}") != value for value in row.values())


ABSENT = (
    "arrival_rate_per_s", "in_flight", "utilisation", "prefill_utilisation", "ttft_p90_ms",
)  # fmt: skip
"""Columns of a rate, and of lengths that differ."""


def test_json_has_null_where_nothing_applies_and_whole_numbers_whole() -> None:
    row, second, *_ = as_json(*SMALL, "--osl", "1", "-H", "h100-lecture")
    absent = {name for name, value in row.items() if value is None}
    assert absent == {
        "tpot_ms",
        "mfu_decode",
        "gpu_s_per_token_decode",
        "grid",
        "usd_per_mtok",
        "usd_per_mtok_input",
        "usd_per_mtok_output",
        "wh_per_mtok",
        "tie",
        "error",
        "flips_if",
        "extrapolates",
        "assumed",
        *ABSENT,
        "spec_tokens",
        "spec_accept",
        "tokens_per_step",
    }
    assert {name for name, value in row.items() if type(value) is int} == set(WHOLE) - {"spec_tokens"}
    assert type(second["tie"]) is bool


def test_json_file_is_one_array_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    good(*SMALL, "--json", path, "--quiet")
    assert json.loads(path.read_text()) == as_json(*SMALL)


def test_csv_and_json_may_be_asked_for_at_once(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    done = good(*SMALL, "--csv", "-", "--json", path)
    assert done.out == good(*SMALL, "--csv", "-").out
    assert json.loads(path.read_text()) == as_json(*SMALL)


def test_no_header_drops_the_header_alone() -> None:
    header, *lines = good(*SMALL, "--csv", "-").out.splitlines()
    assert header.startswith("rank,plan,")
    assert good(*SMALL, "--csv", "-", "--no-header").out.splitlines() == lines


def test_top_cuts_the_list_and_zero_shows_all() -> None:
    every = good(*SMALL, "--csv", "-", "--top", "0").rows
    assert len(every) > 3
    assert [row["rank"] for row in every] == [str(place) for place in range(1, len(every) + 1)]
    assert good(*SMALL, "--csv", "-", "--top", "3").rows == every[:3]
    sixteen = ("--model", "llama3-8b", "--gpus", "16")
    assert len(good(*sixteen, "--csv", "-").rows) == 10
    assert len(good(*sixteen, "--csv", "-", "--top", "0").rows) > 10


def test_quiet_prints_nothing_and_still_writes_files(tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    assert good(*SMALL, "--quiet", "--csv", path).out == ""
    assert path.read_text() == good(*SMALL, "--csv", "-").out


def test_writing_over_a_file_replaces_it_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    path.write_text("old\n" * 10_000)
    good(*SMALL, "--quiet", "--csv", path)
    assert path.read_text() == good(*SMALL, "--csv", "-").out
    assert list(tmp_path.iterdir()) == [path]


# --- what is ranked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "column", "sign"),
    [
        ("latency", "latency_ms", 1),
        ("ttft", "ttft_ms", 1),
        ("tpot", "tpot_ms", 1),
        ("throughput", "tokens_per_s", -1),
        ("cost", "usd_per_mtok", 1),
    ],
)
def test_each_objective_orders_by_its_own_figure(objective: str, column: str, sign: int) -> None:
    rows = as_json("--model", "llama3-8b", "--gpus", "6", "--objective", objective, "--top", "0")
    values = [sign * row[column] for row in rows]  # type: ignore[operator]
    assert len(values) > 5
    assert all(later >= value * (1 - sign * 1e-8) for value, later in pairwise(values))
    assert {row["objective"] for row in rows} == {objective}
    assert len({row["plan"] for row in rows}) == len(rows)


def test_cost_without_a_price_ranks_by_chip_seconds_and_says_so() -> None:
    options = ("--model", "llama3-8b", "--gpus", "4", "-H", "h100-lecture", "--objective", "cost")
    rows = as_json(*options, "--top", "0")
    assert {row["usd_per_mtok"] for row in rows} == {None}
    values = [row["gpu_s_per_token"] for row in rows]
    assert values == sorted(values)  # type: ignore[type-var]
    assert "No price for h100-lecture: ranked by chip-seconds per token" in " ".join(good(*options).out.split())


def test_a_price_given_counts_for_every_chip_idle_ones_too() -> None:
    row = as_json("--model", "llama3-70b", "--gpus", "7", "--price", "2", "--top", "1")[0]
    assert row["idle_gpus"] == 3
    assert row["usd_per_mtok"] == pytest.approx(2 * 7 / 3600 / row["tokens_per_s"] * 1e6, rel=1e-12)  # type: ignore[operator]


def test_a_tie_is_a_row_within_ten_percent_of_the_row_above() -> None:
    rows = as_json("--model", "llama3-70b", "--gpus", "16", "--top", "0")
    assert rows[0]["tie"] is None
    for above, row in pairwise(rows):
        assert row["tie"] == (row["latency_ms"] <= 1.1 * above["latency_ms"])  # type: ignore[operator]
    assert {row["tie"] for row in rows[1:]} == {True, False}


@pytest.mark.parametrize("options", [("--max-tpot", "20"), ("--max-ttft", "100"), ("--max-latency", "5000")])
def test_every_plan_shown_keeps_the_limits_and_those_that_do_not_are_refused(options: tuple[str, str]) -> None:
    name, limit = options
    column = name.removeprefix("--max-") + "_ms"
    words = ("--model", "llama3-70b", "--gpus", "8", "--top", "0")
    free, kept = as_json(*words), as_json(*words, *options)
    assert 0 < len(kept) < len(free)
    assert all(row[column] <= float(limit) for row in kept)  # type: ignore[operator]
    dropped = {row["plan"] for row in free} - {row["plan"] for row in kept}
    refused = {row["plan"]: str(row["error"]) for row in as_json(*words, *options, "--rejected") if row["error"]}
    assert all(f"> {limit} ms" in refused[plan] for plan in dropped)  # type: ignore[index]


@pytest.mark.parametrize(("limit", "gib"), [("40GiB", 40.0), ("40GB", 40e9 / 2**30)])
def test_memory_stays_under_the_limit_that_is_given(limit: str, gib: float) -> None:
    rows = as_json("--model", "llama3-70b", "--gpus", "8", "--memory-limit", limit, "--top", "0")
    assert [row["memory_limit_gib"] for row in rows] == pytest.approx([gib] * len(rows), rel=1e-12)
    assert all(row["memory_gib"] <= gib for row in rows)  # type: ignore[operator]


def test_a_memory_fraction_is_a_share_of_the_memory_that_the_driver_reports() -> None:
    row = as_json("--model", "llama3-8b", "--gpus", "1", "--memory-fraction", "0.5")[0]
    assert row["memory_limit_gib"] == pytest.approx(0.5 * planner.load_hardware("h100").chip.memory_gib, rel=1e-12)


def test_filters_leave_only_what_they_name() -> None:
    rows = as_json("--model", "llama3-8b", "--gpus", "8", "--tp", "2,4", "--pp", "1,2", "--top", "0")
    assert {(row["tp"], row["pp"]) for row in rows} == {(2, 1), (2, 2), (4, 1), (4, 2)}
    assert {row["dp"] for row in as_json("--model", "llama3-8b", "--gpus", "8", "--dp", "2", "--top", "0")} == {2}


def test_a_value_that_a_filter_names_twice_counts_once() -> None:
    words = ("--model", "llama3-8b", "--gpus", "8", "--engine", "ideal", "--rejected")
    once = good(*words, "--tp", "2,3", "--attention", "heads").out
    assert good(*words, "--tp", "2,3,2,3", "--attention", "heads,heads").out == once


def test_attention_filters_choose_how_attention_is_sharded() -> None:
    words = ("--model", "llama3-8b", "--gpus", "4", "--engine", "ideal", "--tp", "4", "--top", "0")
    assert {row["attention"] for row in as_json(*words)} == {"heads", "batch"}
    rows = as_json(*words, "--attention", "batch", "--prefill-attention", "heads")
    assert {(row["attention"], row["prefill_attention"]) for row in rows} == {("batch", "heads")}


def test_every_printed_plan_is_read_back_by_plan() -> None:
    for row in as_json("--model", "llama3-8b", "--gpus", "6", "--engine", "ideal", "--top", "0"):
        again = run(
            "estimate", "-m", "llama3-8b", "--engine", "ideal", "--plan", row["plan"], "--gpus", 6, "--json", "-"
        )
        figures = json.loads(again.out)[0]
        assert {**figures, "rank": None, "tie": None} == {**row, "rank": None, "tie": None}


def test_concurrency_is_one_for_times_and_searched_for_throughput() -> None:
    assert {row["concurrency"] for row in as_json(*SMALL, "--objective", "tpot")} == {1}
    assert len({row["concurrency"] for row in as_json(*SMALL, "--objective", "throughput")}) > 1
    assert {row["concurrency"] for row in as_json(*SMALL, "--objective", "throughput", "--concurrency", "24")} == {24}


def test_rejected_rows_stand_behind_the_ranked_ones_with_the_reason() -> None:
    words = ("--model", "llama3-70b", "--gpus", "4", "--top", "0")
    ranked, rows = as_json(*words), as_json(*words, "--rejected")
    refused = rows[len(ranked) :]
    assert rows[: len(ranked)] == ranked
    assert all(row["error"] is None for row in ranked)
    assert all(row["error"] and row["rank"] is None and row["latency_ms"] is None for row in refused)
    assert not {row["plan"] for row in refused} & {row["plan"] for row in ranked}
    reasons = {row["plan"]: str(row["error"]) for row in refused}
    assert "64 query heads" in reasons["TP3"]
    assert "exceed the limit of 71.3 GiB" in reasons["DP4"]


def test_rejected_plans_follow_the_table_with_their_reasons() -> None:
    out = good("--model", "llama3-70b", "--gpus", "4", "--rejected").out
    assert out.startswith(good("--model", "llama3-70b", "--gpus", "4").out)
    assert widest(out) <= 100
    assert re.search(r"^TP3 +rule +tp 3 does not divide the 64 query heads; nearest valid: 2 or 4$", out, re.MULTILINE)
    assert re.search(r"^DP4 +memory +weights .* exceed the limit", out, re.MULTILINE)


TOO_LARGE = ("--model", "llama3-70b", "--gpus", "1", "--rejected")


def test_refused_plans_are_shown_where_no_plan_is_left() -> None:
    done = run(*TOO_LARGE)
    assert done.status == 3
    assert re.fullmatch(r"refused  by      reason\nTP1      memory  weights .* exceed the limit of .*\n", done.out)
    assert done.err == run(*TOO_LARGE[:-1]).err
    assert run(*TOO_LARGE, "--quiet").out == run(*TOO_LARGE[:-1]).out == ""


def test_refused_plans_are_written_where_no_plan_is_left(tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    done = run(*TOO_LARGE, "--csv", "-", "--json", path)
    assert done.status == 3
    (line,) = done.rows
    (row,) = json.loads(path.read_text())
    assert list(line) == list(row) == list(planner.COLUMNS)
    assert line == {name: cell(value) for name, value in row.items()}
    assert (row["plan"], row["rank"]) == ("TP1", None)
    assert "exceed the limit" in row["error"]
    assert run(*TOO_LARGE, "--csv", "-", "--no-header").out.splitlines() == done.out.splitlines()[1:]


def test_plans_that_break_a_limit_on_time_are_refused_rows_too() -> None:
    words = ("--model", "llama3-8b", "--gpus", "4", "--max-tpot", "0.001", "--rejected", "--csv", "-")
    done = run(*words)
    assert done.status == 3
    assert any("> 0.001 ms" in row["error"] for row in done.rows)
    assert any("query heads" in row["error"] for row in done.rows)


def test_pareto_shows_points_that_no_plan_at_no_load_beats() -> None:
    words = ("--model", "llama3-8b", "--gpus", "4", "--top", "0")
    front = as_json(*words, "--pareto")
    assert len(front) > 5
    speed = [row["tpot_ms"] for row in front]
    rate = [row["tokens_per_s_per_gpu"] for row in front]
    assert speed == sorted(speed)  # type: ignore[type-var]
    assert rate == sorted(rate)  # type: ignore[type-var]
    loads = sorted({row["concurrency"] for row in front})  # type: ignore[type-var]
    plans = sorted({row["plan"] for row in as_json(*words)})  # type: ignore[type-var]
    points = "plan,concurrency\n" + "".join(f"{plan},{load}\n" for plan in plans for load in loads)
    priced = run("estimate", "-m", "llama3-8b", "--gpus", "4", "--points", "-", "--json", "-", stdin=points)
    for row in json.loads(priced.out):
        if int(row["concurrency"]) <= row["max_concurrency"]:
            beaten = [
                better["tpot_ms"] <= row["tpot_ms"] * (1 + 1e-9)
                and better["tokens_per_s_per_gpu"] >= row["tokens_per_s_per_gpu"] * (1 - 1e-9)
                for better in front
            ]
            assert any(beaten), row


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ("--gpus", "16", "--objective", "latency"),
        ("--gpus", "16", "--objective", "throughput"),
        ("--gpus", "32", "--objective", "cost", "--max-tpot", "50", "--max-ttft", "2000"),
        ("--gpus", "64", "--objective", "throughput", "--engine", "ideal", "--top", "0", "--rejected"),
        ("--gpus", "16", "--pareto"),
        ("--gpus", "16", "-H", "tpu-v5e", "--model", "llama3-8b"),
    ],
)
def test_the_table_and_its_caption_are_at_most_100_columns_wide(options: tuple[str, ...]) -> None:
    out = good("--model", "llama3-70b", *options).out
    assert widest(out) <= 100
    assert "\x1b" not in out


def test_the_table_shows_the_best_plan_first_and_marks_ties() -> None:
    header, first, second, *_ = good("--model", "llama3-70b", "--gpus", "16").out.splitlines()
    rows = as_json("--model", "llama3-70b", "--gpus", "16")
    assert header.split()[:4] == ["#", "plan", "TTFT", "ms"]
    assert first.split()[:3] == ["1", rows[0]["plan"], f"{rows[0]['ttft_ms']:.4g}"]
    assert second.split()[:2] == ["~2" if rows[1]["tie"] else "2", rows[1]["plan"]]


def test_the_caption_names_workload_limits_counts_and_why_the_first_wins() -> None:
    words = ("--model", "llama3-70b", "--gpus", "16", "--isl", "2000", "--osl", "300", "--max-tpot", "40")
    rows = as_json(*words, "--top", "0", "--rejected")
    ranked = [row for row in rows if row["error"] is None]
    text = " ".join(good(*words).out.split())
    for part in (
        "llama3-70b (bf16 weights, bf16 KV) on 16 x h100-sxm, engine vllm",
        "2000 tokens in, 300 out, concurrency 1, continuous batching; for latency",
        "limits: 71.3 of 79.2 GiB per chip, tpot <= 40 ms",
        f"{len(rows)} plans: {len(ranked)} ranked, {len(rows) - len(ranked)} refused (",
        f"{ranked[0]['plan']} comes first: {ranked[0]['latency_ms']:.4g} ms",
        f"ahead of {ranked[1]['plan']}, for less ",
    ):
        assert part in text


def test_rows_that_are_cut_off_are_counted() -> None:
    words = ("--model", "llama3-8b", "--gpus", "8")
    every = len(good(*words, "--csv", "-", "--top", "0").rows)
    assert f"... {every - 2} more plans (--top 0 shows all)." in good(*words, "--top", "2").out
    assert "more plans" not in good(*words, "--top", "0").out
    assert "... 1 more plan (" in good(*words, "--top", every - 1).out


def test_rows_of_a_frontier_that_are_cut_off_are_not_called_plans() -> None:
    words = (*SMALL, "--pareto")
    every = len(good(*words, "--csv", "-", "--top", "0").rows)
    out = good(*words, "--top", "2").out
    assert f"... {every - 2} more rows (--top 0 shows all)." in out
    assert "~" not in out


def test_idle_chips_are_shown_and_paid_for() -> None:
    text = " ".join(good("--model", "llama3-70b", "--gpus", "7").out.split())
    row = as_json("--model", "llama3-70b", "--gpus", "7")[0]
    assert (row["plan"], row["gpus"], row["idle_gpus"]) == ("TP4", 7, 3)
    assert "TP4 leaves 3 of 7 chips idle, which are paid for: 4 chips suffice" in text
    assert row["tokens_per_s_per_gpu"] == pytest.approx(row["tokens_per_s"] / 7, rel=1e-12)  # type: ignore[operator]


def test_surplus_replicas_stand_idle_and_the_caption_says_how_many_chips_suffice() -> None:
    row = as_json("--model", "llama3-70b", "--gpus", "16")[0]
    assert (row["plan"], row["dp"], row["concurrency"]) == ("TP8xDP2", 2, 1)
    text = " ".join(good("--model", "llama3-70b", "--gpus", "16").out.split())
    assert "1 request in flight can keep only 1 of 2 replicas busy: 8 chips suffice" in text


def test_no_chip_is_called_idle_where_all_work() -> None:
    text = good("--model", "llama3-70b", "--gpus", "8").out
    assert "idle" not in text
    assert "suffice" not in text


# --- arguments --------------------------------------------------------------------------------------------------------


def test_version_is_printed_alone() -> None:
    assert good("--version").out == f"plan {planner.__version__}\n"


def test_arguments_without_a_command_word_belong_to_rank() -> None:
    assert good("rank", *SMALL).out == good(*SMALL).out == good("-m", "llama3-8b", "--chips", "4").out


@pytest.mark.parametrize("words", [("--gpus", "8", "models"), ("-m", "llama3-8b", "--gpus", "8", "estimate")])
def test_options_before_a_command_word_are_refused_and_never_dropped(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.status, done.out) == (2, "")
    assert done.err


def test_lists_and_estimates_do_not_take_options_of_rank() -> None:
    for words in (("models", "--gpus", "8"), ("estimate", "-m", "llama3-8b", "--top", "3")):
        done = run(*words)
        assert (done.status, done.out) == (2, "")
        assert words[-2] in done.err


# --- pipes and terminals ----------------------------------------------------------------------------------------------


def test_a_pipe_that_closes_early_is_no_error() -> None:
    command = f"'{sys.executable}' '{ROOT / 'cli.py'}' --model llama3-8b --gpus 8 --csv - --top 0 | head -1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ",".join(planner.COLUMNS) + "\n"


def test_a_reader_that_is_gone_ends_the_command_in_silence() -> None:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), "--model", "llama3-8b", "--gpus", "8", "--top", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (0, b"")


def on_terminal(columns: int, *words: str, **env: str) -> tuple[int, str]:
    """(status, output) of the command on a pseudo-terminal of this width."""
    pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), *words],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm-256color", **env},
    )
    os.close(its)
    output = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # how Linux says that the other end was closed
            break
        if not piece:
            break
        output += piece
    os.close(ours)
    return process.wait(timeout=60), output.decode().replace("\r\n", "\n")


STYLE = re.compile(r"\x1b\[[0-9;]*m")
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3|9)[0-7]m")


def test_a_narrow_terminal_gets_a_narrow_coloured_table() -> None:
    status, text = on_terminal(60, "--model", "llama3-70b", "--gpus", "8")
    assert status == 0
    assert COLOUR.search(text)
    plain = STYLE.sub("", text)
    assert "\x1b" not in plain
    assert widest(plain) <= 60
    header, first, *_ = plain.splitlines()
    assert header.split()[:2] == ["#", "plan"]
    assert {"TPOT", "bound"} <= set(header.split())
    assert first.split()[:2] == ["1", "TP8"]


def test_a_wide_terminal_still_gets_at_most_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "180")
    monkeypatch.setenv("TERM", "xterm-256color")
    done = run("--model", "llama3-70b", "--gpus", "8", terminal=True)
    assert COLOUR.search(done.out)
    assert STYLE.sub("", done.out) == good("--model", "llama3-70b", "--gpus", "8").out


def test_no_color_switches_colours_off() -> None:
    status, text = on_terminal(60, "--model", "llama3-70b", "--gpus", "8", NO_COLOR="1")
    assert status == 0
    assert not COLOUR.search(text)
    assert widest(STYLE.sub("", text)) <= 60


def test_csv_on_a_terminal_has_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(*SMALL, "--csv", "-", terminal=True) == good(*SMALL, "--csv", "-")


# --- a process of its own ---------------------------------------------------------------------------------------------


def test_a_process_from_another_directory_prints_the_same(tmp_path: Path) -> None:
    assert run_process(*SMALL, cwd=tmp_path) == good(*SMALL)


def test_the_sweep_of_the_readme_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    sweep = next(block for block in blocks if "plan sweep" in block)
    shim = tmp_path / "plan"
    shim.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{ROOT / 'cli.py'}' \"$@\"\n")
    shim.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", sweep],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = Completed(0, (tmp_path / "sweep.csv").read_text(encoding="utf-8"), "").rows
    assert list(rows[0]) == [*planner.COLUMNS, "asked"]
    assert [(row["rank"], row["gpus"], row["objective"]) for row in rows] == [
        ("1", str(gpus), "throughput") for gpus in range(8, 65, 8)
    ]
    rates = [float(row["tokens_per_s"]) for row in rows]
    assert rates[0] < rates[1] < rates[2]
