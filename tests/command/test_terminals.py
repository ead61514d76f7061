"""Every command in a narrow terminal, in pipes that close, on full disks, without colours: as real processes."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, Completed, run, started

fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")

GEMM = str(ROOT / "tests" / "data" / "gemm.csv")
COMMANDS: dict[str, tuple[str, ...]] = {
    "rank": ("-m", "llama3-70b", "--gpus", "16", "--objective", "throughput"),
    "pareto": ("-m", "llama3-70b", "--pareto", "--top", "5"),
    "rejected": ("-m", "llama3-70b", "--rejected", "--top", "2"),
    "estimate": ("estimate", "-m", "llama3-70b", "--plan", "TP8"),
    "placement": ("estimate", "-m", "llama3-70b", "--plan", "TP4xPP2xDP3", "--gpus", "28", "--placement"),
    "sweep": ("sweep", "-m", "llama3-8b,llama3-70b", "--gpus", "1,8", "--objective", "latency,cost", "-H", "h100,a100"),
    "memory": ("memory", "-m", "gpt-oss-120b", "--tp", "2"),
    "memories": ("memory", "-m", "gpt-oss-120b", "--tp", "1,2,4"),
    "serving": ("validate", "--serving"),
    "starts": ("validate", "--memory"),
    "choices": ("validate", "--ranking"),
    "worst": ("validate", "--kernels", "--worst", "3"),
    "calibrate": ("calibrate", "-H", "h100", GEMM),
    "models": ("models",),
    "hardware": ("hardware",),
    "engines": ("engines",),
    "show": ("show", "h100"),
    "help": ("sweep", "--help"),
}
PLAIN = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
PLAIN["TERM"] = "xterm-256color"
CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def program(*words: object) -> list[str]:
    return [sys.executable, str(ROOT / "cli.py"), *map(str, words)]


def terminal(*words: object, columns: int = 60, env: Mapping[str, str] = PLAIN, err: bool = False) -> Completed:
    """The command in a pseudo-terminal of so many columns; stderr goes there too where `err`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with started(
        *program(*words), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs if err else subprocess.PIPE, env=env
    ) as process:
        os.close(theirs)
        out = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            out += piece
        said = b"" if process.stderr is None else process.stderr.read()
        status = process.wait(timeout=60)
    os.close(ours)
    return Completed(status, out.decode().replace("\r\n", "\n"), said.decode())


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_wider_than_columns_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*COMMANDS[name])
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) > 2
    wide = [line for line in lines if len(line) > 60]
    assert all(re.search(r"\S{28}$", line) for line in wide)  # addresses are not broken, a table never ends in one


@pytest.mark.parametrize("name", ["memory", "show"])
def test_a_terminal_of_60_columns_is_as_columns_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = terminal(*COMMANDS[name])
    monkeypatch.setenv("COLUMNS", "60")
    assert done == run(*COMMANDS[name])._replace(out=done.out)
    assert CODES.sub("", done.out) == run(*COMMANDS[name]).out


@pytest.mark.parametrize(
    "name", [name for name in COMMANDS if name not in ("show", "choices", "calibrate", "starts", "help")]
)
def test_nothing_is_wider_than_100_columns_in_a_pipe_and_nothing_is_coloured(name: str) -> None:
    out = run(*COMMANDS[name]).out
    assert "\x1b" not in out
    assert [line for line in out.splitlines() if len(line) > 100 and not re.search(r"\S{28}$", line)] == []


def test_a_file_that_is_shown_in_a_pipe_keeps_its_lines() -> None:
    """They are searched with grep."""
    assert max(map(len, run("show", "h100").out.splitlines())) > 100


def test_colours_are_there_in_a_terminal_and_gone_where_they_are_not_wanted() -> None:
    colour = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38;\S+?)m")
    with_colours = terminal(*COMMANDS["rank"]).out
    assert colour.search(with_colours)
    plain = terminal(*COMMANDS["rank"], env=PLAIN | {"NO_COLOR": "1"}).out
    assert not colour.search(plain)
    assert CODES.sub("", plain) == CODES.sub("", with_colours)


# --- streams that take nothing more ----------------------------------------------------------------------------------


def until_closed(words: tuple[str, ...], lines: int) -> tuple[int, str]:
    """(status, stderr) of a command whose reader stops after some lines."""
    with started(*program(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(lines):
            assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        return process.wait(timeout=60), said


@pytest.mark.parametrize(
    "words",
    [
        (*COMMANDS["rank"], "--csv", "-", "--top", "0"),
        COMMANDS["sweep"],
        COMMANDS["help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_stops_is_no_error(words: tuple[str, ...]) -> None:
    assert until_closed(words, 1) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        words = (*COMMANDS["rank"], "--csv", "-", "--top", "0")
        done = subprocess.run(program(*words), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "plan: stdout cannot be written: no space left on device\n")


@pytest.mark.parametrize(("words", "status", "closed"), [(("-m", "llama3-8b"), 0, 1), (("-m", "llama9"), 2, 2)])
def test_streams_that_are_closed_from_the_start_change_no_status(
    words: tuple[str, ...], status: int, closed: int
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *program(*words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert "Traceback" not in done.stdout + done.stderr


def test_progress_that_nobody_reads_does_not_end_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    with started(
        *program(*COMMANDS["sweep"], "--csv", path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    assert path.read_text().count("\n") == 17


# --- interrupts and progress -----------------------------------------------------------------------------------------


def test_an_interrupt_of_any_command_is_a_sentence() -> None:
    script = (  # at a moment that does not depend on how fast the machine is
        "import os, signal, sys\n"
        "from planner.command import main, rank\n"
        "rank.rank = lambda request: os.kill(os.getpid(), signal.SIGINT)\n"
        "main(['-m', 'llama3-8b'])"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(sys.executable, "-c", script, cwd=ROOT, text=True, **pipes) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "plan: interrupted\n")


def test_a_bar_on_a_terminal_leaves_nothing_behind(tmp_path: Path) -> None:
    words: tuple[Any, ...] = ("sweep", "-m", "llama3-8b", "--gpus", "1:8:1")
    done = terminal(*words, "--csv", tmp_path / "a.csv", err=True, columns=80)
    assert done.status == 0
    assert "8/8" in done.out
    assert done.out.count("\x1b[?25l") == done.out.count("\x1b[?25h")  # the cursor is hidden and shown again
    assert "8/8" not in done.out.rpartition("\x1b[?25h")[2]
    stream = terminal(*words, "--csv", "-", err=True)  # rows and a bar would overwrite each other
    assert "\x1b" not in stream.out
    assert stream.out.count("\n") == 9


def test_progress_elsewhere_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from planner.report import progress  # noqa: PLC0415 (its clock is turned)

    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress("point", 12, done=2) as shown:
        for step in range(10):
            now[0] += 4.0
            shown.advance(failed=step == 0)
    assert capsys.readouterr().err.splitlines() == [
        "plan: 5 of 12 points, 1 without a plan, about 28 s left",
        "plan: 8 of 12 points, 1 without a plan, about 16 s left",
        "plan: 11 of 12 points, 1 without a plan, about 4 s left",
    ]
    with progress.Progress("point", 12, quiet=True) as shown:
        now[0] += 100
        shown.advance()
    assert capsys.readouterr().err == ""
