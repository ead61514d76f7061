"""Measurements of a user's own: every layout of the tools, and what is wrong with a file said by line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT

from planner.errors import SpecError
from planner.specs.benchmarks import kind_of, parse_gemm, parse_serving, read_collectives, read_gemm, read_serving
from planner.specs.nccl_tests import CollectiveRun, factor, parse_collectives

DATA = ROOT / "tests" / "data"
HEAD = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n# (B) (elements) (us) (GB/s)\n"


def devices(*hosts: int, device: str = "NVIDIA H100 80GB HBM3") -> str:
    """The lines that name ranks: so many on each host."""
    places = [(host, chip) for host, count in enumerate(hosts) for chip in range(count)]
    return "".join(
        f"#  Rank {rank:2d} Group  0 Pid {77 + rank} on host-{host} device {chip} [0000:1b:00] {device}\n"
        for rank, (host, chip) in enumerate(places)
    )


def rows(op: str, ranks: int, *pairs: tuple[int, float], redop: str = "sum", share: bool = False) -> str:
    """Lines of (size, us) as the tests print them; `share`: the count is that of one rank."""
    found = ""
    for size, us in pairs:
        rate = size / us / 1e3
        bus = rate * factor(op, ranks)  # type: ignore[arg-type]
        half = f"{us:.2f} {rate:.2f} {bus:.2f}"
        found += f"{size} {size // 4 // (ranks if share else 1)} float {redop} -1 {half} 0 {half} 0\n"
    return found


def one(text: str, path: str = "run.txt") -> CollectiveRun:
    (run,) = parse_collectives(text, path)
    return run


SIZES = ((1024, 20.0), (1048576, 30.0), (1073741824, 4000.0))
SOUND = "$ all_reduce_perf -g 8\n" + devices(8) + HEAD + rows("all_reduce", 8, *SIZES)


# --- nccl-tests -------------------------------------------------------------------------------------------------------


def test_a_log_of_two_tests_gives_two_runs() -> None:
    reduce, gather = read_collectives(str(DATA / "nccl_node.txt"))
    assert (reduce.op, gather.op) == ("all_reduce", "all_gather")
    for run in (reduce, gather):
        assert (run.hosts, run.ranks, run.version, run.device) == ((8,), 8, "2.27.3", "NVIDIA H100 80GB HBM3")
        assert [row.size for row in run.rows] == [2.0**power for power in range(10, 31)]
    first = reduce.rows[0]
    assert (first.seconds, first.place) == (pytest.approx(19.41e-6), "line 19")
    line = (DATA / "nccl_node.txt").read_text().splitlines()[18]
    assert line.split()[:6] == ["1024", "256", "float", "sum", "-1", "19.41"]


def test_ranks_on_several_hosts_are_counted_by_host_behind_a_launchers_prefix() -> None:
    runs = read_collectives(str(DATA / "nccl_nodes.txt"))
    assert [run.hosts for run in runs] == [(8, 8), (8, 8, 8, 8)]
    assert [run.op for run in runs] == ["all_reduce", "all_reduce"]


def test_an_old_layout_without_root_and_with_an_error_for_the_wrong_elements() -> None:
    (run,) = read_collectives(str(DATA / "rccl_alltoall.txt"))
    assert (run.op, run.hosts, len(run.rows)) == ("all_to_all", (8,), 19)
    assert run.rows[0].seconds == pytest.approx(22.48e-6)
    assert run.device == "AMD Instinct MI300X"


def test_json_names_only_the_first_device_of_a_process_and_all_are_counted() -> None:
    (run,) = read_collectives(str(DATA / "nccl_reduce_scatter.json"))
    assert (run.op, run.hosts, run.version, len(run.rows)) == ("reduce_scatter", (4,), "2.27.3", 19)
    assert run.rows[3].place == "results.3"


def test_json_of_a_process_for_each_rank_counts_each_once() -> None:
    raw = json.loads((DATA / "nccl_reduce_scatter.json").read_text())
    (device,) = raw["config"]["devices"]
    raw["config"]["ngpus"] = 1
    raw["config"]["devices"] = [{**device, "rank": rank, "hostname": f"node-{rank // 2}"} for rank in range(4)]
    assert one(json.dumps(raw)).hosts == (2, 2)


@pytest.mark.parametrize("prefix", ["", "0: ", " 3: ", "[1,0]<stdout>:", "[1,12]<stdout>: ", "node-0: ", "[worker-0] ",
                                    "[pod/run-worker-0/main] ", "2026-03-01T10:15:00.123Z ",
                                    "2026-03-01 10:15:00,123 [launcher]: "])  # fmt: skip
def test_what_a_launcher_puts_before_a_line_is_passed_over(prefix: str) -> None:
    text = "".join(prefix + line + "\n" for line in SOUND.splitlines())
    assert one(text).rows == one(SOUND).rows


def test_columns_of_single_iterations_and_of_the_clock_are_passed_over() -> None:
    lines = SOUND.splitlines()
    head = next(index for index, line in enumerate(lines) if "busbw" in line)
    lines[head] = "# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong"
    for index in range(head + 2, len(lines)):
        cells = lines[index].split()
        spread = ["18.9", "22.1", "21.9", "1.2"]
        lines[index] = " ".join([*cells[:9], *spread, *cells[9:], *spread, "2026-03-01 10:15:00"])
    assert one("\n".join(lines)).rows == one(SOUND).rows


@pytest.mark.parametrize(
    ("op", "redop", "share", "in_place", "expected"),
    [
        ("all_reduce", "sum", False, "0", "all_reduce"),
        ("reduce_scatter", "sum", True, "0", "reduce_scatter"),
        ("all_gather", "none", True, "0", "all_gather"),
        ("all_to_all", "none", True, "N/A", "all_to_all"),
        ("send", "none", False, "N/A", "send"),
    ],
)
def test_without_a_name_the_columns_say_which_test_it_is(
    op: str, redop: str, share: bool, in_place: str, expected: str
) -> None:
    body = rows(op, 8, *SIZES, redop=redop, share=share).replace(" 0\n", f" {in_place}\n")
    assert one(devices(8) + HEAD + body).op == expected


def test_a_name_of_the_file_counts_where_the_text_has_none() -> None:
    body = rows("all_gather", 8, *SIZES, redop="none", share=True).replace(" 0 ", " N/A ").replace(" 0\n", " N/A\n")
    with pytest.raises(SpecError, match="which test is this"):
        one(devices(8) + HEAD + body)
    assert one(devices(8) + HEAD + body, "node1/AllGather-8.log").op == "all_gather"


@pytest.mark.parametrize(
    "line", ["$ /opt/build/all_reduce_perf_mpi -g 1", "{'NPER_NODE': 8}\n# all_reduce_perf", "+ all_reduce_perf"]
)
def test_whatever_stands_above_a_run_its_test_is_found(line: str) -> None:
    assert one(SOUND.replace("$ all_reduce_perf -g 8", line)).op == "all_reduce"


def test_large_counts_may_be_written_short() -> None:
    assert one(SOUND.replace(" 268435456 ", " 2.68e+8 ")).rows == one(SOUND).rows


def test_the_group_of_a_split_communicator_is_one_of_its_groups() -> None:
    text = devices(8).splitlines()
    split = "\n".join(line.replace("Group  0", f"Group  {rank % 2}") for rank, line in enumerate(text)) + "\n"
    assert one("all_reduce_perf\n" + split + HEAD + rows("all_reduce", 4, *SIZES)).hosts == (4,)


def test_buffers_too_small_to_divide_are_left_out() -> None:
    assert one(SOUND + "0 0 float sum -1 5.70 0.00 0.00 0 5.54 0.00 0.00 0\n").rows == one(SOUND).rows


def without_ranks(count: int) -> str:
    return "all_reduce_perf\n" + devices(count) + HEAD + rows("all_reduce", 8, *SIZES)


BAD_RUNS: dict[str, tuple[str, str, str]] = {
    "empty": ("", "", "no results of nccl-tests"),
    "no ranks": (without_ranks(0), "line 4", "keep them"),
    "one rank": (without_ranks(1), "line 5", "a single rank sends nothing"),
    "half of the ranks lost": (SOUND.replace(devices(8), devices(4)), "line 10", "is that of 8 ranks, but the lines"),
    "first ranks lost": (
        SOUND.replace(devices(8), "".join(devices(8).splitlines(keepends=True)[4:])), "line 8",
        "4 `# Rank` lines before the results, but the run had at least 8 ranks",
    ),
    "a process of eight names four": (
        "# nThread 1 nGpus 8\n" + SOUND.replace(devices(8), "".join(
            line.replace(f"Pid {77 + rank}", "Pid 77")
            for rank, line in enumerate(devices(8).splitlines(keepends=True)[:4])
        )), "line 9", "at least 8 ranks",
    ),
    "failed": (SOUND + "node-0: Test NCCL failure common.cu:1005 'remote process exited'\n", "line 15",
               "the test failed here (Test NCCL failure common.cu:1005"),
    "count": (SOUND.replace(" 262144 ", " 26x144 "), "line 13", "count of 1048576 B is '26x144'"),
    "size": (SOUND.replace("1048576 262144", "1048x576 262144"), "line 13", "size is '1048x576', expected bytes"),
    "endless size": (SOUND.replace("1048576 262144", "1" * 400 + " 262144"), "line 13", "expected bytes"),
    "us below (ms)": (SOUND.replace("(us)", "(ms)"), "line 13", "30 ms and a bus bandwidth of 61.17 GB/s"),
    "us below (ms), hint": (SOUND.replace("(us)", "(ms)"), "line 13", "is the time in us?"),
    "no MPI": (SOUND.replace("Rank  1", "Rank  0"), "line 12", "MPI=1"),
    "other test": (SOUND.replace("all_reduce_perf", "broadcast_perf"), "", "broadcast_perf: no such operation"),
    "wrong elements": (SOUND.replace(" 0 20.00", " 3 20.00"), "line 12", "1024 B have 3 wrong elements"),
    "out of bounds": (SOUND + "# Out of bounds values : 2 FAILED\n", "line 15", "2 values were out of bounds"),
    "negative": (SOUND.replace("-1 20.00", "-1 -20.00"), "line 12", "time of 1024 B is '-20.00'"),
    "nan": (SOUND.replace("-1 20.00", "-1 nan"), "line 12", "time of 1024 B is 'nan'"),
    "zero": (SOUND.replace("-1 20.00", "-1 0.00"), "line 12", "expected a number above 0"),
    "text": (SOUND.replace("-1 20.00", "-1 fast"), "line 12", "'fast'"),
    "cut": (SOUND + "2147483648 536870912 float sum -1 8000.0\n", "line 15", "expected a time, algbw and busbw"),
    "CPU time": (SOUND.replace(" time ", " cputime "), "line 10", "-C 1"),
    "in ms": (
        SOUND.replace("-1 4000.00", "-1 4.00"),
        "line 14",
        "all_reduce of 1073741824 B over 8 ranks in that time is 4.7e+05 GB/s; is the time in ms?",
    ),
    "in s": (SOUND.replace("-1 4000.00", "-1 0.004"), "line 14", "is the time in s?"),
    "ranks": (SOUND.replace(devices(8), devices(2)), "line 7", "is this all_reduce over 2 ranks?"),
    "another test": (SOUND.replace("all_reduce_perf", "all_gather_perf"), "line 13", "is this all_gather over 8"),
    "noise": (
        SOUND.replace("-1 30.00 34.95 61.17", "-1 90000.00 0.01 0.02"),
        "line 13",
        "1048576 B took 90000 us, but 1073741824 B (line 14) only 4000 us",
    ),
    "JSON": ('{"results": [', "line 1", "is not valid JSON"),
    "other JSON": ('{"mean_ttft_ms": 1}', "results", "missing"),
    "JSON types": ('{"results": [{"size": "x", "out_of_place": {}}], "config": {}}', "", "is not what nccl-tests"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_run_that_times_nothing_is_refused_with_the_line(case: str) -> None:
    text, place, sentence = BAD_RUNS[case]
    with pytest.raises(SpecError) as error:
        parse_collectives(text, "run.txt")
    assert (error.value.path, error.value.key) == ("run.txt", place)
    assert sentence in error.value.problem


def test_wrong_elements_and_cpu_times_of_json_are_refused() -> None:
    raw = json.loads((DATA / "nccl_reduce_scatter.json").read_text())
    raw["results"][2]["out_of_place"]["nwrong"] = 4.0
    with pytest.raises(SpecError, match=r"results\.2: 4096 B have 4 wrong"):
        one(json.dumps(raw))
    raw["results"][2]["out_of_place"] = {"cpu_time": 3.0}
    with pytest.raises(SpecError, match=r"results\.2: the times are those of the CPU"):
        one(json.dumps(raw))


# --- matrix products --------------------------------------------------------------------------------------------------


def test_products_are_read_with_their_dtype_and_line() -> None:
    found = read_gemm(str(DATA / "gemm.csv"))
    assert len(found) == 56
    assert {row.dtype for row in found} == {"bf16", "fp8"}
    first = found[0]
    assert (first.m, first.n, first.k, first.line, first.unit) == (1, 6144, 4096, 2, "us")


@pytest.mark.parametrize(
    ("header", "cell", "seconds"),
    [
        ("time_us", "25", 25e-6), ("us", "25", 25e-6), ("Latency (us)", "25", 25e-6), ("time [ms]", "0.025", 25e-6),
        ("median_ms", "0.025", 25e-6), ("duration_s", "2.5e-5", 25e-6),
        ("kernel time ns", "25000", 25e-6),
        ("Time (µs)", "25", 25e-6), ("gpu_time_msec", "0.025", 25e-6),
        ("TFLOPS", "343.5973836800", 400e-6), ("tflops/s", "343.5973836800", 400e-6),
        ("tflop/s", "343.5973836800", 400e-6),
    ],
)  # fmt: skip
def test_the_unit_of_a_time_stands_in_the_header(header: str, cell: str, seconds: float) -> None:
    text = f"K,M,N,DType,{header}\n4096,4096,4096,torch.bfloat16,{cell}\n"
    (row,) = parse_gemm(text, "gemm.csv")
    assert (row.m, row.n, row.k, row.dtype) == (4096, 4096, 4096, "bf16")
    assert row.seconds == pytest.approx(seconds)


def test_comments_blank_lines_and_other_columns_are_passed_over() -> None:
    text = "# H100, 700 W\nm,n,k,dtype,time_us,remark\n\n8,16,32,half,2.5,first\n"
    (row,) = parse_gemm(text, "gemm.csv")
    assert (row.dtype, row.line, row.seconds) == ("fp16", 4, pytest.approx(2.5e-6))


BAD_PRODUCTS = {
    "": ("", "is empty"),
    "m,n,k,dtype,time_us": ("", "has a header but no rows"),
    "m,n,dtype,time_us\n1,2,bf16,3": ("line 1", "no column 'k'"),
    "m,n,k,time_us\n1,2,3,4": ("line 1", "no column 'dtype'"),
    "m,n,k,dtype,time\n1,2,3,bf16,4": ("line 1", "column 'time' has no unit; write time_us"),
    "m,n,k,dtype\n1,2,3,bf16": ("line 1", "no time"),
    "m,n,k,dtype,time_us,time_ms\n1,2,3,bf16,4,5": ("line 1", "columns time_us and time_ms"),
    "m,n,k,dtype,time_us\n1,2,3,bf16": ("line 2", "has 4 cells, the header 5"),
    "m,n,k,dtype,time_us\n1,2,3,bf16,4\n1,2,3,int3,4": (
        "line 3", "unknown dtype 'int3'; expected one of bf16, fp16, fp8",  # never what is refused next
    ),
    "m,n,k,dtype,time_us,Time_us\n1,2,3,bf16,4,5": ("line 1", "column 'time_us' stands twice"),
    '{"mean_ttft_ms": 1, "mean_tpot_ms": 2}': ("line 1", "is JSON: expected CSV"),
    "m;n;k;" + "x" * 900 + "\n1,2,3": ("line 1", "found ..."),
    "m,n,k,dtype,time_us\n1,2,3,bf16,-4": ("line 2", "time is '-4', expected a number above 0"),
    "m,n,k,dtype,time_us\n1,2,3,bf16,nan": ("line 2", "time is 'nan'"),
    "m,n,k,dtype,time_us\n1,2,3,bf16,": ("line 2", "time is ''"),
    "m,n,k,dtype,time_us\n1.5,2,3,bf16,4": ("line 2", "m is '1.5', expected a whole number"),
    "m,n,k,dtype,time_ms,tflops\n4096,4096,4096,bf16,200,687": (
        "line 2", "200 ms are 0.6872 TFLOP/s for this shape, the file says 687: is the time in ms?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_PRODUCTS, ids=range(len(BAD_PRODUCTS)))
def test_a_product_that_cannot_be_read_is_refused_with_the_line(text: str) -> None:
    place, sentence = BAD_PRODUCTS[text]
    with pytest.raises(SpecError) as error:
        parse_gemm(text, "gemm.csv")
    assert error.value.key == place
    assert sentence in error.value.problem


# --- serving runs -----------------------------------------------------------------------------------------------------


def result(**changes: Any) -> dict[str, Any]:
    """A result of vllm bench serve; a change to None takes the key away."""
    found = json.loads((DATA / "vllm_run.json").read_text()) | changes
    return {key: value for key, value in found.items() if value is not None or key not in changes}


def test_results_that_were_appended_to_one_file_are_several_runs() -> None:
    runs = read_serving(str(DATA / "vllm_serving.json"))
    assert [run.concurrency for run in runs] == [1, 4, 16, 32, 64, 128]
    assert [run.place for run in runs] == [f"line {line}" for line in range(1, 7)]
    assert {(run.isl, run.osl, run.model) for run in runs} == {(1024, 256, "meta-llama/Llama-3.1-8B-Instruct")}
    for run in runs:
        assert run.ttft_ms is not None
        assert run.tpot_ms is not None
        assert run.latency_ms == pytest.approx(run.ttft_ms + 255 * run.tpot_ms)
        assert run.in_flight == pytest.approx(run.concurrency, rel=0.05)


def test_a_result_of_sglang_says_what_the_server_was() -> None:
    runs = read_serving(str(DATA / "sglang_serving.jsonl"))
    assert [(run.tp, run.pp, run.dp, run.version) for run in runs] == [(4, 1, 1, "0.5.6")] * 4
    assert runs[0].model == "meta-llama/Meta-Llama-3-70B-Instruct"
    assert [(run.isl, run.osl, run.concurrency) for run in runs] == [(2048, 512, load) for load in (2, 8, 32, 96)]


def test_lengths_are_the_mean_of_what_was_answered_and_degrees_may_be_metadata() -> None:
    raw = result(total_input_tokens=320 * 999 + 10, total_output_tokens=320 * 101, tp="8", tensor_parallel_size="2")
    (run,) = parse_serving(json.dumps(raw), "bench.json")
    assert (run.isl, run.osl, run.tp, run.place) == (999, 101, 8, "")


def test_a_median_stands_for_a_mean_that_is_missing_and_one_token_has_no_tpot() -> None:
    raw = result(mean_ttft_ms=None, total_output_tokens=320, mean_tpot_ms=0.0, median_tpot_ms=0.0)
    (run,) = parse_serving(json.dumps(raw), "bench.json")
    assert (run.ttft_ms, run.tpot_ms, run.osl) == (raw["median_ttft_ms"], None, 1)
    assert run.latency_ms == run.ttft_ms


def test_a_load_that_is_not_stated_or_was_never_reached_is_none() -> None:
    (run,) = parse_serving(json.dumps(result(max_concurrency=None)), "bench.json")
    assert run.concurrency is None
    (run,) = parse_serving(json.dumps(result(max_concurrency=None, concurrency=30.7)), "bench.json")
    assert run.concurrency == 31
    (run,) = parse_serving(json.dumps(result(max_concurrency=256)), "bench.json")  # the rate kept it at about 31
    assert run.concurrency is None
    assert run.in_flight is not None
    assert math.isclose(run.in_flight, 31, rel_tol=0.03)


BAD_RESULTS: list[tuple[str, str, str]] = [
    ("", "", "is empty"),
    ("{", "line 1", "is not valid JSON"),
    ('{"a": 1}', "", "no mean_ttft_ms or mean_tpot_ms"),
    ("3", "", "no mean_ttft_ms"),
    (json.dumps(result(completed=0, num_prompts=0)), "completed", "found none"),
    (json.dumps(result(completed=0, failed=320)), "completed", "found none of 320 requests"),
    (json.dumps(result()).replace("11.688", "1" + "0" * 400), "mean_tpot_ms", "found a number of more than 20 digits"),
    (json.dumps(result()).replace("11.688", "1" + "0" * 5000), "line 1", "too long a number"),
    (json.dumps(result(tp="x")), "tp", "found 'x', expected a whole number of at least 1"),
    (json.dumps(result(tp=0)), "tp", "found 0"),
    (json.dumps(result(max_concurrency=3.5)), "max_concurrency", "found 3.5, expected a whole number"),
    (json.dumps(result(mean_tpot_ms=23.4)), "max_concurrency", "put 61.6 requests in flight"),
    (json.dumps(result(completed=200)), "completed", "120 requests failed beside 200"),
    (json.dumps(result(failed=40)), "completed", "40 requests failed"),
    (json.dumps(result(mean_tpot_ms=-1)), "mean_tpot_ms", "found -1, expected a number of at least 0"),
    (json.dumps(result(mean_tpot_ms="fast")), "mean_tpot_ms", "found 'fast'"),
    (json.dumps(result(mean_ttft_ms=float("nan"))), "mean_ttft_ms", "found nan"),
    (json.dumps(result(total_input_tokens=None)), "total_input_tokens", "found None"),
    (json.dumps(result(accept_length=2.4)), "accept_length", "speculative decoding is not modelled"),
    (json.dumps(result()) + "\n\n" + json.dumps(result(mean_tpot_ms=-1)), "line 3, mean_tpot_ms", "found -1"),
]


@pytest.mark.parametrize(("text", "key", "sentence"), BAD_RESULTS)
def test_a_result_that_says_nothing_is_refused_with_its_key(text: str, key: str, sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_serving(text, "bench.json")
    assert error.value.key == key
    assert sentence in error.value.problem


# --- files ------------------------------------------------------------------------------------------------------------


def test_what_a_file_holds_is_seen_in_it(tmp_path: Path) -> None:
    files = [path for path in DATA.iterdir() if path.suffix != ".md" and path.name != "trace.csv"]
    kinds = {path.name: kind_of(str(path)) for path in files}
    assert {name for name, kind in kinds.items() if kind == "nccl"} == {name for name in kinds if "ccl_" in name}
    assert {name for name, kind in kinds.items() if kind == "gemm"} == {"gemm.csv"}
    assert {name for name, kind in kinds.items() if kind == "serving"} == {
        name for name in kinds if "serving" in name
    } | {"vllm_run.json"}
    other = tmp_path / "notes.txt"
    other.write_text("hello")
    for unknown in (other, DATA / "trace.csv"):  # requests are no measurement
        with pytest.raises(SpecError, match="neither output of nccl-tests"):
            kind_of(str(unknown))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"nope\.csv: cannot be read: no such file"):
        read_gemm("nope.csv")
    with pytest.raises(SpecError, match="cannot be read: is a directory"):
        read_serving(str(tmp_path))
    binary = tmp_path / "x.txt"
    binary.write_bytes(b"\xff\xfe\x00busbw")
    with pytest.raises(SpecError, match="is not text"):
        read_collectives(str(binary))
