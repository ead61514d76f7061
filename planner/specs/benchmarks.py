"""A user's own measurements, read into rows: matrix products (CSV) and serving runs (JSON of vLLM or SGLang).

Collectives are read by `nccl_tests`. Every error names the file and the line or key.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, NamedTuple

from planner.errors import SpecError
from planner.specs.dtypes import ACTIVATION_BYTES, WEIGHTS
from planner.specs.nccl_tests import CollectiveRun, parse_collectives
from planner.units import MS, TERA

Kind = Literal["nccl", "gemm", "serving"]
_LARGEST = 64 * 2**20  # bytes; results with the text of every answer are larger, and not needed
_AGREES = 0.05  # by which figures that say the same may differ
_IN_FLIGHT = 1.2  # times the cap that TTFT, TPOT and duration may put in flight: they are means, and rounded

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS = {unit: unit for unit in _SECONDS} | {
    "µs": "us", "nsec": "ns", "usec": "us", "msec": "ms", "sec": "s", "nanoseconds": "ns", "microseconds": "us",
    "milliseconds": "ms", "seconds": "s",
}  # fmt: skip
_TIMES = ("time", "latency", "duration", "mean", "median", "avg")
_DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "f16": "fp16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "f32": "fp32",
    "fp8": "fp8", "float8": "fp8", "e4m3": "fp8", "e4m3fn": "fp8", "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8",
    "float8_e4m3fn": "fp8", "float8_e4m3fnuz": "fp8",
    "int8": "int8", "i8": "int8",
}  # fmt: skip


_COMPUTED = {dtype.compute for dtype in WEIGHTS.values() if dtype.bytes <= ACTIVATION_BYTES}
_PLANNED = [
    name for name in dict.fromkeys(_DTYPES.values()) if WEIGHTS[name].bytes == ACTIVATION_BYTES or name in _COMPUTED
]
"""Those in which some plan computes: int8 is stored only, and nothing is served in fp32."""
_LAYOUTS = "the result of `vllm bench serve --save-result` or sglang.bench_serving"
_TIMES_OF_A_RUN = {"mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms"}


class GemmRow(NamedTuple):
    """One matrix product [m, k] x [k, n]: m tokens, k inputs, n outputs."""

    file: str
    line: int
    m: int
    n: int
    k: int
    dtype: str
    seconds: float
    unit: str
    """What the header called the unit, for errors."""


class ServingRun(NamedTuple):
    """One run of `vllm bench serve` or `sglang.bench_serving`; means over its requests."""

    file: str
    place: str
    """`line 3` of a file of several runs, else empty."""
    model: str | None
    isl: int
    osl: int
    concurrency: int | None
    """Requests in flight that the run allowed; none = not stated."""
    in_flight: float | None
    """Requests in flight on average: sum of their latencies by the duration (Little's law)."""
    ttft_ms: float | None
    tpot_ms: float | None
    latency_ms: float | None
    tokens_per_s: float | None
    """Output tokens of the whole deployment."""
    requests: int
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    version: str | None = None
    server: str | None = None
    """The engine that the client was told it speaks to: `sglang`, `vllm`; `openai` says nothing."""


def read_text(path: str) -> str:
    """The text of a user's file.

    Raises:
        SpecError: it cannot be read, is no text, or larger than 64 MiB.
    """
    file = Path(path)
    try:
        if file.is_file() and file.stat().st_size > _LARGEST:
            raise SpecError(path, "", f"larger than {_LARGEST // 2**20} MiB: expected results without details")
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise SpecError(path, "", f"cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SpecError(path, "", "is not text: expected UTF-8") from None


def read_collectives(path: str) -> list[CollectiveRun]:
    """The runs of nccl-tests in a file.

    Raises:
        SpecError: see `parse_collectives`.
    """
    return parse_collectives(read_text(path), path)


def read_gemm(path: str) -> list[GemmRow]:
    """The matrix products in a CSV file.

    Raises:
        SpecError: see `parse_gemm`.
    """
    return parse_gemm(read_text(path), path)


def read_serving(path: str) -> list[ServingRun]:
    """The serving runs in a JSON or JSONL file.

    Raises:
        SpecError: see `parse_serving`.
    """
    return parse_serving(read_text(path), path)


def kind_of(path: str) -> Kind:
    """What a file holds, by its content.

    Raises:
        SpecError: nothing that is known here.
    """
    text = read_text(path)
    if "busbw" in text or '"bus_bw"' in text:
        return "nccl"
    if text.lstrip().startswith(("{", "[")):
        return "serving"
    first = next((line for line in text.splitlines() if line.strip()), "")
    if {"m", "n", "k"} <= {cell.strip().strip('"').lower() for cell in first.split(",")}:
        return "gemm"
    raise SpecError(
        path, "", "neither output of nccl-tests, nor a CSV with columns m, n, k, dtype and a time, nor the JSON of "
        "`vllm bench serve --save-result` or sglang.bench_serving"
    )  # fmt: skip


# --- matrix products --------------------------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """Where a CSV has what."""

    shape: tuple[int, int, int]
    dtype: int
    time: int | None
    unit: str
    scale: float
    tflops: int | None


def parse_gemm(text: str, path: str) -> list[GemmRow]:
    """The rows of a CSV of m, n, k, dtype and a time whose unit stands in the header, or tflops.

    Raises:
        SpecError: with the line: columns that are missing, a time without a unit, cells that are no numbers above 0,
            an unknown dtype, a time and a rate that do not belong together.
    """
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        lines = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise SpecError(path, f"line {reader.line_num}", f"is not CSV: {error}") from None
    lines = [(number, row) for number, row in lines if not row[0].lstrip().startswith("#")]
    if not lines:
        raise SpecError(path, "", "is empty: expected a header with m, n, k, dtype, time_us, and a row a shape")
    (header_line, header), *body = lines
    if lines[0][1][0].lstrip().startswith(("{", "[")):
        raise SpecError(path, f"line {header_line}", "is JSON: expected CSV of m, n, k, dtype and time_us (--serving?)")
    columns = _gemm_columns(header, path, f"line {header_line}")
    if not body:
        raise SpecError(path, "", "has a header but no rows")
    return [_gemm_row(number, row, len(header), columns, path) for number, row in body]


def _gemm_columns(header: list[str], path: str, place: str) -> _Columns:
    names = [cell.strip().lower() for cell in header]

    def index(wanted: str, *others: str) -> int:
        found = next((names.index(name) for name in (wanted, *others) if name in names), None)
        if found is None:
            have = textwrap.shorten(", ".join(names), 80, placeholder=" ...")
            raise SpecError(path, place, f"no column {wanted!r}; expected m, n, k, dtype and time_us, found {have}")
        return found

    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(path, place, f"column {twice!r} stands twice: which of them counts?")
    shape = (index("m"), index("n"), index("k"))
    dtype = index("dtype", "type", "precision", "gemm_dtype", "datatype")
    letters = [re.sub(r"[^a-z]", "", name) for name in names]
    tflops = next((place for place, name in enumerate(letters) if name in ("tflops", "tflop", "tflopss")), None)
    times = [(place, *found) for place, name in enumerate(names) if (found := _time_unit(name)) is not None]
    if len(times) > 1:
        both = " and ".join(names[place] for place, *_ in times)
        raise SpecError(path, place, f"columns {both}: expected one time; leave out the others")
    if times:
        time, unit, scale = times[0]
        return _Columns(shape, dtype, time, unit, scale, tflops)
    bare = next((name for name in names if name in _TIMES), None)
    if bare is not None and tflops is None:
        raise SpecError(path, place, f"column {bare!r} has no unit; write {bare}_us, {bare}_ms or {bare}_s")
    if tflops is None:
        raise SpecError(path, place, f"no time; expected time_us, time_ms, time_s or tflops, found {', '.join(names)}")
    return _Columns(shape, dtype, None, "TFLOP/s", 1.0, tflops)


def _time_unit(name: str) -> tuple[str, float] | None:
    """(unit, seconds) of a column such as `time_us`, `latency (ms)` or `us`; none where it is no time with a unit."""
    words = [word for word in re.split(r"[\s_()\[\]/.-]+", name) if word]
    if not words or words[-1] not in _UNITS:
        return None
    if len(words) > 1 and not set(words[:-1]) & {*_TIMES, "kernel", "gpu", "cuda", "p50"}:
        return None
    unit = _UNITS[words[-1]]
    return unit, _SECONDS[unit]


def _gemm_row(number: int, row: list[str], width: int, columns: _Columns, path: str) -> GemmRow:
    place = f"line {number}"
    if len(row) != width:
        raise SpecError(path, place, f"has {len(row)} cells, the header {width}")
    m, n, k = (_whole(row[column], name, path, place) for column, name in zip(columns.shape, "mnk", strict=True))
    name = row[columns.dtype].strip().lower().removeprefix("torch.")
    if name not in _DTYPES:
        raise SpecError(path, place, f"unknown dtype {name!r}; expected one of {', '.join(_PLANNED)}")
    flops = 2.0 * m * n * k
    rate = None if columns.tflops is None else _above_zero(row[columns.tflops], "tflops", path, place)
    if columns.time is None:
        assert rate is not None
        return GemmRow(path, number, m, n, k, _DTYPES[name], flops / (rate * TERA), columns.unit)
    seconds = _above_zero(row[columns.time], "time", path, place) * columns.scale
    reached = flops / seconds / TERA
    if rate is not None and abs(reached / rate - 1) > _AGREES:
        raise SpecError(
            path, place, f"{row[columns.time].strip()} {columns.unit} are {reached:.4g} TFLOP/s for this "
            f"shape, the file says {rate:.4g}: is the time in {columns.unit}?"
        )  # fmt: skip
    return GemmRow(path, number, m, n, k, _DTYPES[name], seconds, columns.unit)


def _above_zero(cell: str, name: str, path: str, place: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(path, place, f"{name} is {cell.strip()!r}, expected a number above 0")
    return value


def _whole(cell: str, name: str, path: str, place: str) -> int:
    value = _above_zero(cell, name, path, place)
    if value != int(value):
        raise SpecError(path, place, f"{name} is {cell.strip()!r}, expected a whole number")
    return int(value)


# --- serving runs -----------------------------------------------------------------------------------------------------


def parse_serving(text: str, path: str) -> list[ServingRun]:
    """The runs in the JSON of `vllm bench serve --save-result`, or the JSONL that `sglang.bench_serving` appends to.

    Lengths are means over the requests that were answered: tokens in all by requests.

    Raises:
        SpecError: with the line or key: not JSON, none of the two layouts, requests that failed, figures that are not
            finite and above 0, speculative decoding, which is not modelled.
    """
    found = _objects(text, path)
    if not found:
        raise SpecError(path, "", f"is empty: expected {_LAYOUTS}")
    several = len(found) > 1
    return [_serving_run(raw, path, f"line {line}" if several else "") for line, raw in found]


def _objects(text: str, path: str) -> list[tuple[int, Any]]:
    """(line, value) of every JSON value of the text: one, a list of them, or several one behind the other."""
    decoder, position, found = json.JSONDecoder(), 0, []
    while position < len(text):
        skipped = len(text) - len(text[position:].lstrip())
        line = text.count("\n", 0, skipped) + 1
        if skipped == len(text):
            break
        try:
            value, position = decoder.raw_decode(text, skipped)
        except json.JSONDecodeError as error:
            raise SpecError(path, f"line {error.lineno}", f"is not valid JSON: {error.msg}") from None
        except (RecursionError, ValueError):  # brackets in brackets, or a number of thousands of digits
            raise SpecError(
                path, f"line {line}", "is nested too deeply, or holds too long a number, to be a result"
            ) from None
        found += [(line, each) for each in value] if isinstance(value, list) else [(line, value)]
    return found


def _serving_run(raw: Any, path: str, place: str) -> ServingRun:
    if not isinstance(raw, dict) or not raw.keys() & _TIMES_OF_A_RUN:
        raise SpecError(path, place, f"no mean_ttft_ms or mean_tpot_ms; expected {_LAYOUTS}")
    read = _Reader(raw, path, place)
    completed, asked = read.whole("completed"), read.whole("num_prompts")
    requests = (asked if completed is None else completed) or 0
    if requests < 1:
        lost = read.whole("failed") or asked
        of = f" of {lost} requests" if lost else ""
        raise read.problem("completed", f"found none{of}; expected requests that were answered")
    failed = read.whole("failed") or max(0, (asked or 0) - requests)
    if failed > _AGREES * requests:
        raise read.problem("completed", f"{failed} requests failed beside {requests} that were answered: run it again")
    accepted = read.number("accept_length") or read.number("spec_decode_acceptance_length") or 1.0
    if accepted > 1.0:
        raise read.problem("accept_length", f"found {accepted:g}: speculative decoding is not modelled; run without it")
    isl, osl = (read.tokens(f"total_{way}_tokens", requests) for way in ("input", "output"))
    ttft, tpot = (read.metric(f"{name}_ms") for name in ("ttft", "tpot"))
    latency = read.metric("e2el_ms") or read.metric("e2e_latency_ms")
    if latency is None and ttft is not None and (tpot is not None or osl == 1):
        latency = ttft + (osl - 1) * (tpot or 0.0)
    duration = read.number("duration")
    in_flight = requests * latency * MS / duration if latency is not None and duration else None
    return ServingRun(
        path, place, read.text("model_id", "model", "model_path"), isl, osl, read.concurrency(in_flight), in_flight,
        ttft, tpot if osl > 1 else None, latency,
        read.number("output_throughput") or (requests * osl / duration if duration else None), requests,
        read.degree("tp", "tensor_parallel_size", "tp_size"), read.degree("pp", "pipeline_parallel_size", "pp_size"),
        read.degree("dp", "data_parallel_size", "dp_size"), read.text("version", "engine_version", "vllm_version"),
        read.text("backend"),
    )  # fmt: skip


class _Reader(NamedTuple):
    """A result's keys, each checked; SGLang puts what the server said of itself below `server_info`."""

    raw: dict[str, Any]
    path: str
    place: str

    def problem(self, key: str, sentence: str) -> SpecError:
        return SpecError(self.path, f"{self.place}, {key}" if self.place else key, sentence)

    def number(self, key: str) -> float | None:
        """A number of at least 0."""
        value = self.raw.get(key)
        if value is None:
            return None
        number = math.nan
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except OverflowError:  # JSON has whole numbers of any length
                number = math.inf
        if not 0 <= number < math.inf:
            raise self.problem(key, f"found {_short(value)}, expected a number of at least 0")
        return number

    def whole(self, key: str) -> int | None:
        """A whole number of at least 0."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self.problem(key, f"found {value:g}, expected a whole number")
        return None if value is None else int(value)

    def metric(self, name: str) -> float | None:
        """A mean, or a median where there is none; 0 = not measured."""
        value = self.number(f"mean_{name}")
        return (self.number(f"median_{name}") if value is None else value) or None

    def tokens(self, key: str, requests: int) -> int:
        """Tokens a request, from those in all."""
        total = self.number(key)
        if not total or total < requests / 2:
            raise self.problem(key, f"found {total!r}, expected the tokens of all {requests} requests")
        return max(1, round(total / requests))

    def concurrency(self, in_flight: float | None) -> int | None:
        """The cap on requests in flight, where it was reached; SGLang states the average too."""
        cap = self.whole("max_concurrency")
        if not cap:
            average = self.number("concurrency")
            return max(1, round(average)) if average else None
        if in_flight is not None and in_flight > _IN_FLIGHT * cap:
            raise self.problem(
                "max_concurrency", f"found {cap}, but TTFT, TPOT and duration put {in_flight:.3g} requests in flight "
                "(requests by seconds, times seconds a request): they are not figures of one run"
            )  # fmt: skip
        if in_flight is not None and in_flight < _REACHED * cap:
            return None
        return cap

    def degree(self, *keys: str) -> int | None:
        """A degree of parallelism, as stated by `--metadata tp=8` or by SGLang's server."""
        server = self.raw.get("server_info")
        for place in (self.raw, server if isinstance(server, dict) else {}):
            for key in keys:
                if place.get(key) is None:
                    continue
                if isinstance(place[key], bool) or not re.fullmatch(r"[1-9]\d{0,5}", str(place[key])):
                    raise self.problem(key, f"found {_short(place[key])}, expected a whole number of at least 1")
                return int(str(place[key]))
        return None

    def text(self, *keys: str) -> str | None:
        server = self.raw.get("server_info")
        for place in (self.raw, server if isinstance(server, dict) else {}):
            for key in keys:
                if isinstance(place.get(key), str) and place[key]:
                    return str(place[key])
        return None


def _short(value: Any) -> str:
    """What was found, for an error: a number of thousands of digits is not printed, and could not be."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return textwrap.shorten(repr(value), 60, placeholder=" ...")


_REACHED = 0.6  # share of the cap that must be in flight on average for the cap to be the load


def load_of(run: ServingRun) -> str:
    """What a run says of its load where it states none, for an error."""
    if run.in_flight is None:
        return "max_concurrency is not stated"
    return f"the load is not stated or was never reached (on average {run.in_flight:.1f} requests in flight)"


def where(run: ServingRun) -> str:
    """The file and place of a run."""
    return f"{run.file}: {run.place}" if run.place else run.file
