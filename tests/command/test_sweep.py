"""`plan sweep`: rows, files that are continued, several processes, interrupts."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from csv import DictReader, reader
from pathlib import Path
from typing import IO, cast

import pytest
from helpers import ROOT, run, run_process, started

from planner.report import tabular
from planner.sweeping import COLUMNS_OF_SWEEP, Sweep

SMALL = ("sweep", "-m", "llama3-8b,llama3-70b", "--gpus", "1,2,4", "--max-tpot", "100")


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_rows_are_those_of_plan_for_what_was_asked() -> None:
    rows = run("sweep", "-m", "llama3-8b", "--gpus", "2,4", "--objective", "latency,throughput", "--isl", "128,4096",
               "--max-tpot", "30", "--tp", "1,2", "--csv", "-").rows  # fmt: skip
    assert len(rows) == 8
    assert [(row["gpus"], row["isl"], row["objective"]) for row in rows[:3]] == [
        ("2", "128", "latency"), ("2", "128", "throughput"), ("2", "4096", "latency"),
    ]  # fmt: skip
    for row in rows:
        assert "--max-tpot 30 --tp 1,2 --top 1" in row["asked"]
        (again,) = run(*shlex.split(row.pop("asked"))[1:], "--csv", "-").rows
        assert row == again


def test_top_gives_several_plans_a_point_and_json_has_the_same_rows() -> None:
    words = (*SMALL, "--top", "2")
    from_csv = run(*words, "--csv", "-").rows
    from_json = json.loads(run(*words, "--json", "-").out)
    assert [row["asked"] for row in from_csv] == [row["asked"] for row in from_json]
    assert [row["rank"] for row in from_csv] == ["1", "1", "2", "1", "2", "", "1", "2", "1", "2"]
    for texts, values in zip(from_csv, from_json, strict=True):
        assert texts == {name: tabular.cell(value) for name, value in values.items()}


def test_a_point_without_a_plan_does_not_stop_the_others_and_all_of_them_are_status_3() -> None:
    done = run(*SMALL, "--csv", "-")
    assert done.status == 0
    assert [bool(row["error"]) for row in done.rows] == [False, False, False, True, False, False]
    assert "1 of 6 points have no plan" in done.err
    assert run(*SMALL, "--csv", "-", "--quiet").err == ""
    done = run("sweep", "-m", "llama3-70b", "--gpus", "1", "--objective", "latency,cost", "--csv", "-")
    assert (done.status, len(done.rows)) == (3, 2)
    assert "none of 2 points has a plan; the first: no plan for llama3-70b" in done.err


def test_a_table_shows_what_varies_and_why_a_point_has_no_plan() -> None:
    done = run(*SMALL)
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split()[:3] == ["model", "gpus", "plan"]
    assert len(lines[0].split("  ")) > 8
    assert max(map(len, lines)) <= 100
    text = " ".join(done.out.split())
    assert "6 points, each ranked on its own: hardware h100-sxm" in text
    assert "model llama3-70b, gpus 1: no plan" in text


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What SMALL writes in one go."""
    path = tmp_path_factory.mktemp("whole") / "sweep.csv"
    assert run(*SMALL, "--csv", path, "--quiet").status == 0
    return path.read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.5, 0.7, 0.999, 1.0])
def test_a_file_that_was_cut_anywhere_is_continued_to_the_same_bytes(
    share: float, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep.csv"
    head = whole[: int(len(whole) * share)]
    path.write_bytes(head)
    ranked = []
    rows = Sweep.rows
    monkeypatch.setattr(Sweep, "rows", lambda sweep, index: (ranked.append(index), rows(sweep, index))[1])
    done = run(*SMALL, "--csv", path, "--quiet")
    assert (done.status, done.err) == (0, "")
    assert path.read_bytes() == whole
    assert ranked == list(range(max(0, head.count(b"\n") - 1), 6))  # complete points are not ranked again


def test_a_point_of_several_rows_that_was_cut_is_ranked_again(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    words = (*SMALL, "--top", "0", "--csv", path, "--quiet")
    run(*words)
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    for count in range(1, len(lines), 2):
        path.write_bytes(b"".join(lines[:count]))
        assert run(*words).status == 0
        assert path.read_bytes() == text


def test_a_longer_list_in_front_continues_and_json_has_the_old_rows_too(whole: bytes, tmp_path: Path) -> None:
    path, other = tmp_path / "sweep.csv", tmp_path / "sweep.json"
    path.write_bytes(whole)
    words = [word if word != "llama3-8b,llama3-70b" else word + ",mistral-7b" for word in SMALL]
    assert run(*words, "--csv", path, "--json", other, "--quiet").status == 0
    assert path.read_bytes().startswith(whole)
    found = json.loads(other.read_text(encoding="utf-8"))
    assert [row["model"] for row in found] == [row["model"] for row in rows_of(path)]
    assert len(found) == 9
    for texts, values in zip(rows_of(path), found, strict=True):
        assert texts == {name: tabular.cell(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: b"a,b\n1,2\n", "first line is not the header"),
        (lambda text: b"notes, no newline", "first line is not the header"),
        (lambda text: text.replace(b"--max-tpot 100", b"--max-tpot 90"), "--max-tpot 90"),
        (lambda text: text + text.split(b"\n", 1)[1], "ends before it"),
        (lambda text: text + b"1,2\n", "2 cells"),
        (lambda text: text + text.split(b"\n", 1)[0] + b"\n", "is a header"),
        (lambda text: text + b"\xff\xfe\n", "cannot be continued"),
        (lambda text: text.replace(b"\n", b"\r\n"), "header"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_alone(
    change: object, named: str, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.csv"
    text = change(whole)  # type: ignore[operator]
    path.write_bytes(text)
    done = run(*SMALL, "--csv", path)
    assert (done.status, done.out) == (2, "")
    assert named in done.err
    assert "give another file, or remove this one" in done.err
    assert path.read_bytes() == text


def test_no_header_is_continued_without_one(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    body = whole.split(b"\n", 1)[1]
    path.write_bytes(body[: len(body) // 2])
    assert run(*SMALL, "--csv", path, "--no-header", "--quiet").status == 0
    assert path.read_bytes() == body
    assert "is a header" in run(*SMALL, "--csv", _written(path, whole), "--no-header").err


def _written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("option", ["--csv", "--json"])
@pytest.mark.parametrize("target", ["missing/sweep.out", "."])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_ranked(
    option: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "rows", lambda *_: pytest.fail("ranked"))
    done = run(*SMALL, option, tmp_path / target)
    assert (done.status, done.out) == (2, "")
    assert "cannot be written" in done.err


def test_bad_input_leaves_no_file(tmp_path: Path) -> None:
    for words in (("-m", "llama9"), ("-m", "llama3-8b", "--gpus", "x"), ("-m", "llama3-8b", "--weights", "fp7")):
        assert run("sweep", *words, "--csv", tmp_path / "sweep.csv").status == 2
    assert list(tmp_path.iterdir()) == []


def test_two_writers_do_not_share_a_file(tmp_path: Path) -> None:
    first = tabular.GrowingFile(str(tmp_path / "sweep.csv"), COLUMNS_OF_SWEEP, True)
    first.start(0)
    done = run(*SMALL, "--csv", tmp_path / "sweep.csv")
    first.close()
    assert done.status == 2
    assert "is being written by another process" in done.err


def test_a_disk_that_fills_up_leaves_whole_rows(tmp_path: Path) -> None:
    file = tabular.GrowingFile(str(tmp_path / "some.csv"), ["a", "b"], True)
    file.start(0)
    file.add([{"a": 1, "b": 2}])

    class Full:
        """Takes half of what it is given, and then no more."""

        def __init__(self, real: IO[bytes]) -> None:
            self.real, self.taken = real, 0

        def write(self, data: bytes) -> int:
            if self.taken:
                raise OSError(28, "No space left on device")
            self.taken = self.real.write(data[: len(data) // 2])
            return self.taken

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    file._file = cast("io.FileIO", Full(file._file))
    with pytest.raises(Exception, match="no space left on device"):
        file.add([{"a": 3, "b": 4}])
    file.close()
    assert (tmp_path / "some.csv").read_text() == "a,b\n1,2\n"


# --- processes -------------------------------------------------------------------------------------------------------


def test_several_processes_write_the_same_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    done = run_process(*SMALL, "--csv", path, "--jobs", "3", "--quiet")
    assert (done.status, done.err) == (0, "")
    assert path.read_bytes() == whole


LONG = ("sweep", "-m", "llama3-70b", "--isl", "1:4000:1", "--gpus", "64", "--objective", "throughput")


def sweeping(*words: object) -> AbstractContextManager[subprocess.Popen[str]]:
    return started(sys.executable, ROOT / "cli.py", *words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(lines: int, path: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") > lines:
            return
        time.sleep(0.02)
    pytest.fail("no rows came")


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_leaves_whole_rows_and_says_how_to_continue(jobs: int, tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    with sweeping(*LONG, "--csv", path, "--json", tmp_path / "sweep.json", "--jobs", jobs) as process:
        wait_for(3, path)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        if jobs > 1:  # and once more, by somebody who is impatient
            time.sleep(0.02)
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    rows = rows_of(path)
    assert path.read_bytes().endswith(b"\n")
    assert err == (
        f"plan: interrupted after {len(rows)} of 4000 points; {path} has them, and the same command continues it\n"
    )
    assert [int(row["isl"]) for row in rows] == list(range(1, len(rows) + 1))
    assert not (tmp_path / "sweep.json").exists()


def test_workers_do_not_outlive_a_sweep_that_is_killed_and_its_file_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    with sweeping(*LONG, "--csv", path, "--jobs", "2") as process:
        wait_for(1, path)
        process.kill()
        process.communicate(timeout=20)  # ends when the last worker has closed its end of the pipes
    cells = {len(row) for row in reader(io.StringIO(path.read_text().rpartition("\n")[0]))}
    assert cells == {len(COLUMNS_OF_SWEEP)}


def test_rows_come_as_they_are_found_and_a_reader_may_stop(tmp_path: Path) -> None:
    with sweeping(*LONG, "--csv", "-", "--jobs", "2") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("rank,plan,")
        assert process.stdout.readline().startswith("1,")
        process.stdout.close()  # as `| head -2` does
        assert process.stderr.read() == ""
        assert process.wait(timeout=20) == 0


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no names for open files")
@pytest.mark.parametrize("words", [SMALL, ("-m", "llama3-8b")])
def test_a_pipe_of_the_shell_is_a_file_to_write_to(words: tuple[str, ...]) -> None:
    """`--csv >(gzip > a.gz)` names one that no path leads to."""
    reading, writing = os.pipe()
    try:
        assert run(*words, "--csv", f"/dev/fd/{writing}", "--quiet").status == 0
        assert os.read(reading, 65536).startswith(b"rank,plan,model")
    finally:
        os.close(reading)
        os.close(writing)


def test_a_long_table_is_cut_where_a_file_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner.command import sweep  # noqa: PLC0415 (the package imports it when the command runs)

    monkeypatch.setattr(sweep, "MOST_ROWS", 2)
    whole_table = run(*SMALL).out.splitlines()
    for _ in range(2):  # written, and then read back
        lines = run(*SMALL, "--csv", tmp_path / "sweep.csv").out.splitlines()
        assert lines[1].split() == whole_table[1].split()
        assert "... 4 more rows in" in " ".join(lines[3:5])
        assert "No plan at 1 of them" in "\n".join(lines)
    assert not any("more row" in line for line in whole_table)
