"""What `nccl-tests` and `rccl-tests` print, read into rows: the text of any version, or the JSON of `-J`.

The layout is that of NVIDIA/nccl-tests src/util.cu and src/common.cu: one line a size with an out-of-place and an
in-place half, of which the first is read. Versions differ: `redop` and `root` may be missing, `#wrong` was once an
`error`, and launchers put a rank before each line. `size` is the whole buffer as `costs.collectives` counts it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.errors import SpecError
from planner.specs.hardware import CollectiveOp
from planner.units import GB, US

TESTS: dict[str, CollectiveOp] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send",
}
"""Operations by the name of their test, without `_perf`."""
_UNITS = {"ns": 1e-9, "us": US, "ms": 1e-3, "s": 1.0}
_FALLS_TO = 1 / 3  # a larger buffer may take this share of a smaller one's time: protocols change with the size
_AGREES = 0.25  # by which a printed bandwidth may differ from what size, time and ranks give; another test is 2 x off
_LEAST_GB_PER_S = 0.1  # below it the two decimals of a bandwidth say too little
_PRINTED = 1e-4  # by which two bandwidths of one row may differ beside the last digit of each
_MOST_RANKS = 1025  # that are tried for a hint
_ROUNDING = 0.02  # by which floating-point sums may differ where a version prints the difference and not a count

_PREFIX = re.compile(
    r"^\s*(?:\d+:\s|\[\d+,\d+\]<std\w+>:"  # srun -l, mpirun --tag-output
    r"|(?:(?:\[[\w./:-]+\]:?|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*|[A-Za-z][\w.-]*:)\s+)+(?=[#$\d]))"
)
"""What launchers put before a line: a rank, and before lines of a test a host, a container or a moment in time."""
_START = re.compile(r"\bnThreads?\s+(\d+)\s+nGpus\s+(\d+)")
_PROGRAM = re.compile(
    r"(?<![a-z])(all_reduce|all_gather|reduce_scatter|alltoallv?|sendrecv|broadcast|reduce|gather|scatter|hypercube)_perf"
)
_RANK = re.compile(r"Rank\s+(\d+)(?:\s+Group\s+(\d+))?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)")
_ROW = re.compile(r"^\s*(\d\S*)\s+(\S+)\s+(u?int\d*|u?char|half|b?float\w*|double|fp?\d+\w*)\s+(\S.*)$")
_VERSION = re.compile(r"nccl-library=(\d+)|\b[NR]CCL version[ :]+(\d+(?:\.\d+)+)")
_FAILED = re.compile(r"\bTest (?:[NR]CCL |CUDA |HIP )?failure\b.*")
_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)\s*FAILED")


class CollectiveRow(NamedTuple):
    """One size of a test."""

    size: float
    """Bytes of the whole buffer."""
    seconds: float
    place: str
    """Where in the file: `line 12`, or `results.12` of JSON."""


class CollectiveRun(NamedTuple):
    """One run of a test."""

    file: str
    op: CollectiveOp
    hosts: tuple[int, ...]
    """Ranks of each host, in the order in which the hosts are named."""
    rows: tuple[CollectiveRow, ...]
    device: str = ""
    version: str | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the group."""
        return sum(self.hosts)


class _Line(NamedTuple):
    """A row as printed."""

    row: CollectiveRow
    algbw: str
    """As printed, since its digits say how well it is known; so for `busbw`."""
    busbw: str
    wrong: tuple[str, str]
    """Of the out-of-place and of the in-place half."""
    per_element: float
    """Bytes of the buffer by elements of `count`."""
    redop: str


class _Block:
    """What is known of the run that is being read."""

    def __init__(self) -> None:
        self.program: str | None = None
        self.each = 1
        """Ranks of a process."""
        self.processes: set[tuple[str, str]] = set()
        self.devices: list[tuple[int, int, str, str]] = []
        self.columns: list[str] = []
        self.unit = US
        self.lines: list[_Line] = []
        self.version: str | None = None


def parse_collectives(text: str, path: str) -> list[CollectiveRun]:
    """The runs in an output of nccl-tests, one after another where a file holds several.

    Args:
        text: what a test printed, with whatever stands around it, or the JSON file of `-J`.
        path: the file, for errors; its name may say the test where the text does not.

    Raises:
        SpecError: with the line: no results, an unknown test, wrong elements, times that are not positive or do not
            belong to the bandwidth beside them, a larger buffer that takes a third of a smaller one's time.
    """
    if text.lstrip().startswith("{") and "algbw" not in text:  # a log may begin with a brace too
        return [_of_json(text, path)]
    blocks = [_Block()]
    for number, raw in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", raw)
        _read_line(line, f"line {number}", path, blocks)
    runs = [_run(block, path) for block in blocks if block.lines]
    if not runs:
        raise SpecError(path, "", "no results of nccl-tests: expected lines of size, count, type, time, algbw, busbw")
    return runs


def _read_line(line: str, place: str, path: str, blocks: list[_Block]) -> None:
    block = blocks[-1]
    if match := _ROW.match(line):
        _read_row(match, place, path, block)
    elif match := _RANK.search(line):
        block.devices.append((int(match[1]), int(match[2] or 0), match[4], match[5].strip()))
        block.processes.add((match[4], match[3]))
    elif "algbw" in line and "busbw" in line:
        block.columns = line.lstrip(" #").split()
        if "cputime" in block.columns:
            raise SpecError(path, place, "the times are those of the CPU (-C 1); run the test without it")
    elif "(elements)" in line:
        units = re.findall(r"\((ns|us|ms|s)\)", line)
        block.unit = _UNITS[units[0]] if units else US
    elif match := _BOUNDS.search(line):
        raise SpecError(path, place, f"{match[1]} values were out of bounds: results that are wrong time nothing")
    elif block.lines and (match := _FAILED.search(line)):
        raise SpecError(path, place, f"the test failed here ({match[0][:60].strip()}): run it again, or take it out")
    else:
        _read_heading(line, blocks)


def _read_heading(line: str, blocks: list[_Block]) -> None:
    """Lines around a table: which program, which version, where a run starts."""
    block = blocks[-1]
    program = _PROGRAM.search(line)
    if program and "concluded" in line:
        block.program = block.program or program[1]
        return
    starts = _START.search(line)
    if (program or starts) and block.lines:
        version = block.version
        block = _Block()
        block.version = version
        blocks.append(block)
    if program:
        block.program = program[1]
    if starts:
        block.each = int(starts[1]) * int(starts[2])
    if match := _VERSION.search(line):
        block.version = _dotted(match[1]) if match[1] else match[2]


def _read_row(match: re.Match[str], place: str, path: str, block: _Block) -> None:
    if not re.fullmatch(r"\d{1,18}", match[1]):
        raise SpecError(path, place, f"size is {match[1][:30]!r}, expected bytes")
    size, rest = int(match[1]), match[4].split()
    count = _number(match[2], "count", size, path, place)
    redop = rest.pop(0) if re.fullmatch(r"[a-z]+", rest[0]) and rest[0] != "nan" else ""
    if rest and (("root" in block.columns) or (not block.columns and rest[0] == "-1")):
        rest.pop(0)
    if len(rest) < 3:
        raise SpecError(path, place, f"expected a time, algbw and busbw behind {size} B, found {' '.join(rest)!r}")
    if not (size and count):
        return  # a buffer too small to divide over the ranks: nothing was sent
    seconds, _ = (_number(rest[at], name, size, path, place) for at, name in ((0, "time"), (2, "busbw")))
    half = len(rest) // 2 if len(rest) > 4 else len(rest)
    wrong = (rest[3] if len(rest) > 3 else "N/A", rest[half + 3] if len(rest) > half + 3 else "N/A")
    _refuse_wrong(wrong[0], size, path, place)
    _number(rest[1], "algbw", size, path, place)
    row = CollectiveRow(float(size), seconds * block.unit, place)
    block.lines.append(_Line(row, rest[1], rest[2], wrong, size / count / _bytes(match[3]), redop))


def _number(cell: str, name: str, size: int, path: str, place: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (name == "time" and value == 0):
        raise SpecError(path, place, f"{name} of {size} B is {cell!r}, expected a number above 0")
    return value


def _refuse_wrong(cell: str, size: int, path: str, place: str) -> None:
    try:
        wrong = float(cell)
    except ValueError:
        return  # N/A: not checked
    if not wrong <= (_ROUNDING if "e" in cell.lower() or "." in cell else 0):
        raise SpecError(path, place, f"{size} B have {cell} wrong elements: results that are wrong time nothing")


def _bytes(kind: str) -> int:
    """Bytes of an element of a type."""
    known = {"half": 2, "bfloat16": 2, "float": 4, "double": 8, "int": 4, "uint": 4, "char": 1, "uchar": 1}
    if kind in known:
        return known[kind]
    bits = re.search(r"\d+", kind)
    return max(1, int(bits[0]) // 8) if bits else 4


def _dotted(code: str) -> str:
    """22703 -> 2.27.3; 2708 -> 2.7.8 (before 2.9 the code had one digit less)."""
    value = int(code)
    major, minor, patch = (10000, 100, 1) if value >= 10000 else (1000, 100, 1)
    return f"{value // major}.{value % major // minor}.{value % minor // patch}"


def _run(block: _Block, path: str) -> CollectiveRun:
    """A block's rows, checked."""
    hosts, device = _hosts(block, path)
    ranks = sum(hosts)
    op = _operation(block, ranks, path)
    run = CollectiveRun(path, op, hosts, tuple(line.row for line in block.lines), device, block.version)
    for line in block.lines:
        _check_bandwidth(run, line.row, float(line.busbw), block.unit)
    for line in sorted(block.lines, key=lambda each: -float(each.busbw)):  # the most digits first
        _check_ranks(run, line)
    _check_order(run)
    return run


def _hosts(block: _Block, path: str) -> tuple[tuple[int, ...], str]:
    """(ranks of each host, the device's name) of the first group; groups that run side by side are alike."""
    place = block.lines[0].row.place
    if not block.devices:
        raise SpecError(
            path, place, "no `# Rank ... on HOST device ...` lines before the results: keep them, they say which ranks "
            "share a node"
        )  # fmt: skip
    _check_complete(block, path, place)
    groups: dict[int, list[tuple[int, str]]] = {}
    for rank, group, host, _ in block.devices:
        groups.setdefault(group, []).append((rank, host))
    shapes = set()
    for members in groups.values():
        if len({rank for rank, _ in members}) < len(members):
            raise SpecError(
                path, place, f"rank {members[0][0]} stands {len(members)} times: these are several runs side by side, "
                "of which none is the whole; was nccl-tests built with MPI=1?"
            )  # fmt: skip
        shapes.add(tuple(Counter(host for _, host in members).values()))
    if len(shapes) > 1:
        raise SpecError(path, place, "the groups that run side by side differ in ranks or hosts: run each alone")
    (shape,) = shapes
    if sum(shape) < 2:
        raise SpecError(path, place, "a single rank sends nothing: run with at least 2 (-g 8, or mpirun -np 8)")
    return shape, block.devices[0][3]


def _check_complete(block: _Block, path: str, place: str) -> None:
    """Refuses a log of which lines that name ranks were lost: its groups would be too small."""
    ranks = [rank for rank, *_ in block.devices]
    expected = block.each * len(block.processes)
    if len(set(ranks)) == len(ranks):  # else these are several runs, or groups with numbers of their own
        expected = max(expected, max(ranks) + 1)
    if len(ranks) < expected:
        raise SpecError(
            path, place, f"{len(ranks)} `# Rank` lines before the results, but the run had at least {expected} ranks: "
            "lines were lost; keep all of them"
        )  # fmt: skip


def _operation(block: _Block, ranks: int, path: str) -> CollectiveOp:
    """The operation: by the program's name in the text or of the file, else by what only one test prints."""
    for name in (block.program, _in_file_name(path)):
        if name in TESTS:
            return TESTS[name]
        if name is not None:
            known = ", ".join(f"{test}_perf" for test in TESTS)
            raise SpecError(path, "", f"{name}_perf: no such operation in a plan; expected one of {known}")
    line = block.lines[-1]
    whole, checked = line.per_element < 1.5, line.wrong[0] != "N/A"
    if whole and line.redop not in ("none", ""):
        return "all_reduce"
    if not whole and line.redop not in ("none", ""):
        return "reduce_scatter"
    if checked and line.wrong[1] == "N/A":  # tests without an in-place form
        return "send" if whole else "all_to_all"
    if checked and not whole and abs(line.per_element / ranks - 1) < _AGREES:
        return "all_gather"
    raise SpecError(
        path, line.row.place, "which test is this? Keep the command line or `# Collective test starting` above the "
        f"results, or put one of {', '.join(TESTS)} into the file's name"
    )  # fmt: skip


def _in_file_name(path: str) -> str | None:
    name = re.sub(r"[^a-z]", "", re.split(r"[/\\]", path)[-1].lower())
    return next((test for test in TESTS if test.replace("_", "") in name), None)


def factor(op: CollectiveOp, ranks: int) -> float:
    """Bus bandwidth by algorithm bandwidth (nccl-tests doc/PERFORMANCE.md)."""
    if op == "send":
        return 1.0
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def _check_bandwidth(run: CollectiveRun, row: CollectiveRow, busbw: float, unit_s: float) -> None:
    """Refuses a time that does not give the bandwidth beside it; `unit_s` is what the times were read in, seconds."""
    if busbw < _LEAST_GB_PER_S:
        return
    implied = row.size * factor(run.op, run.ranks) / row.seconds / GB
    if abs(implied / busbw - 1) <= _AGREES:
        return
    units = (
        unit for unit, scale in _UNITS.items()
        if scale != unit_s and abs(implied * unit_s / scale / busbw - 1) < _AGREES
    )  # fmt: skip
    unit = next(units, None)
    read_in = next(name for name, scale in _UNITS.items() if scale == unit_s)
    hint = f"is the time in {unit}?" if unit else f"is this {run.op} over {run.ranks} ranks?"
    raise SpecError(
        run.file, row.place, f"{row.seconds / unit_s:g} {read_in} and a bus bandwidth of {busbw:g} GB/s do not belong "
        f"together: {run.op} of {row.size:.0f} B over {run.ranks} ranks in that time is {implied:.3g} GB/s; {hint}"
    )  # fmt: skip


def _check_ranks(run: CollectiveRun, line: _Line) -> None:
    """Refuses bandwidths whose ratio, which operation and ranks alone decide, is not that of the ranks named above."""
    algbw, busbw = float(line.algbw), float(line.busbw)
    if not algbw:
        return
    slack = [_last_digit(cell) for cell in (line.algbw, line.busbw)]

    def fits(ranks: int) -> bool:
        own = factor(run.op, ranks)
        return abs(own * algbw - busbw) <= own * slack[0] + slack[1] + _PRINTED * busbw

    if fits(run.ranks):
        return
    meant = next((f"that of {ranks} ranks" for ranks in range(2, _MOST_RANKS) if fits(ranks)), "of no number of ranks")
    raise SpecError(
        run.file, line.row.place, f"a bus bandwidth of {line.busbw} at an algorithm's of {line.algbw} GB/s is {meant}, "
        f"but the lines above name {run.ranks} of this {run.op}: keep all `# Rank` lines"
    )  # fmt: skip


def _last_digit(cell: str) -> float:
    """By how much a printed number may differ from the one that was rounded to it."""
    digits, _, exponent = cell.lower().partition("e")
    return float(0.6 * 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2])))


def _check_order(run: CollectiveRun) -> None:
    """Refuses a row that takes far less than a smaller one: one of the two is noise."""
    slowest: CollectiveRow | None = None
    for row in sorted(run.rows, key=lambda each: each.size):
        if slowest is not None and row.size > slowest.size and row.seconds < slowest.seconds * _FALLS_TO:
            raise SpecError(
                run.file, slowest.place, f"{slowest.size:.0f} B took {slowest.seconds / US:g} us, but {row.size:.0f} B "
                f"({row.place}) only {row.seconds / US:g} us: one of them is noise; measure again or remove it"
            )  # fmt: skip
        if slowest is None or row.seconds > slowest.seconds:
            slowest = row


def _of_json(text: str, path: str) -> CollectiveRun:
    """The run in a file of `-J` (format version 2 of nccl-tests 2.17)."""
    try:
        return _read_json(json.loads(text), path)
    except json.JSONDecodeError as error:
        raise SpecError(path, f"line {error.lineno}", f"is not valid JSON: {error.msg}") from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SpecError(path, "", f"is not what nccl-tests writes with -J: {error}") from None


def _read_json(raw: dict[str, Any], path: str) -> CollectiveRun:
    results, config = raw.get("results"), raw.get("config", {})
    if not isinstance(results, list) or not isinstance(config, dict) or not results:
        raise SpecError(path, "results", "missing; expected the rows that nccl-tests writes with -J")
    block = _Block()
    block.program = next(iter(_programs(raw)), None)
    block.version = _dotted(str(raw["nccl_version"])) if isinstance(raw.get("nccl_version"), int) else None
    for index, result in enumerate(results):
        _json_row(result, f"results.{index}", path, block)
    if not block.lines:
        raise SpecError(path, "results", "no row has an out-of-place time above 0")
    block.devices = list(_json_devices(config, path))
    return _run(block, path)


def _programs(raw: dict[str, Any]) -> Iterator[str]:
    for argument in raw.get("args") or []:
        if match := _PROGRAM.search(str(argument)):
            yield match[1]


def _json_row(result: Any, place: str, path: str, block: _Block) -> None:
    half = result.get("out_of_place") if isinstance(result, dict) else None
    if not isinstance(half, dict) or "size" not in result:
        raise SpecError(path, place, "expected a size and an out_of_place result")
    if "cpu_time" in half:
        raise SpecError(path, place, "the times are those of the CPU (-C 1); run the test without it")
    size, count = int(result["size"]), int(result.get("count") or 0)
    if not size or not count:
        return
    seconds = _number(str(half.get("time")), "time", size, path, place) * US
    rates = [str(half.get(key, 0.0)) for key in ("alg_bw", "bus_bw")]
    for name, cell in zip(("algbw", "busbw"), rates, strict=True):
        _number(cell, name, size, path, place)
    other = result.get("in_place") or {}
    wrong = tuple("N/A" if each.get("nwrong") is None else f"{float(each['nwrong']):g}" for each in (half, other))
    _refuse_wrong(wrong[0], size, path, place)
    row = CollectiveRow(float(size), seconds, place)
    per_element = size / count / _bytes(str(result.get("type", "float")))
    block.lines.append(_Line(row, rates[0], rates[1], (wrong[0], wrong[1]), per_element, str(result.get("redop", ""))))


def _json_devices(config: dict[str, Any], path: str) -> Iterator[tuple[int, int, str, str]]:
    """A device a rank. A process writes only the first of its own, so that the others are counted up."""
    each = int(config.get("nthreads", 1)) * int(config.get("ngpus", 1))
    devices = config.get("devices")
    if not isinstance(devices, list) or not devices:
        raise SpecError(path, "config.devices", "missing; expected the devices that nccl-tests writes with -J")
    whole = len({device.get("rank") for device in devices}) == len(devices)
    firsts = all(int(device.get("rank", 0)) % each == 0 for device in devices)
    for device in devices:
        for more in range(each if whole and firsts else 1):
            yield (
                int(device.get("rank", 0)) + more,
                int(device.get("group", 0)),
                str(device.get("hostname", "")),
                str(device.get("device_info", "")),
            )
