"""docs/cli.md against the commands' own help, and the examples that both show."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from helpers import ROOT, run, without_progress

from planner.command import COMMANDS, command_of, examples, manual, program

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def test_the_page_is_what_the_script_prints() -> None:
    assert manual.text() == PAGE, "python -m planner.command.manual > docs/cli.md"


def section(name: str) -> str:
    found = re.search(rf"^## {program(name)}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_says_everything_that_help_says(name: str) -> None:
    text = re.sub(r"[\s*`.]+", " ", section(name))
    command = command_of(name)
    for parameter in command.params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"`{option}[ `]", section(name)), option
        assert re.sub(r"[\s*`.]+", " ", parameter.help or "").strip() in text
    printed = run(name, "--help").out
    listed = set(re.findall(r"^  +(-[\w-]+)(?:, (--[\w-]+))?", printed, re.MULTILINE))
    for option in {word for pair in listed for word in pair if word and word != "--help"}:
        assert f"`{option}" in section(name)
    for part in (command.help, command.epilog):
        for sentence in re.split(r"(?<=\.)\s+", " ".join((part or "").split())):
            assert re.sub(r"[\s*`.]+", " ", sentence).strip() in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_examples_and_fits_a_narrow_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = run(name, "--help").out
    assert re.search(r"^ +Examples?:", text, re.MULTILINE)
    wide = [line for line in text.splitlines() if len(line) > 60]
    assert wide == []


ALL = [(name, example) for name, found in examples.EXAMPLES.items() for example in found]


@pytest.mark.parametrize(("name", "example"), ALL, ids=[example.words.split("\n")[0] for _, example in ALL])
def test_examples_run(name: str, example: examples.Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *words = shlex.split("\n".join(example.lines).replace("\\\n", ""))  # as a shell joins them
    assert first == "plan"
    files = [word for word in words if re.search(r"\.(csv|txt|json|yaml)$", word) and word != "sweep.csv"]
    if files:  # of the reader's own: what stands there must be options that exist
        words = words[1:] if words[0] in COMMANDS else words
        command_of(name if name != "calibrate" or "--output" in words else "rank").make_context(program(name), words)
        return
    if "--plot" in words:
        pytest.importorskip("matplotlib")
    done = run(*words)
    assert (done.status, without_progress(done.err)) == (0, "")
    assert done.out


def test_the_script_prints_the_page_whatever_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
        runpy.run_module("planner.command.manual", run_name="__main__")
    assert capsys.readouterr().out == PAGE


def test_help_is_not_slower_for_those_who_do_not_ask_for_it() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        "from planner.command import main\n"
        "main(['-m', 'llama3-8b', '--csv', '-'])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stderr
    assert sorted(re.findall(r"planner\.command\.(\w+)", said)) == ["diffusion", "options", "question", "rank"]
