"""Documentation that shows output shows the real one, and examples run as they are written."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import ROOT, run, without_progress

from planner.specs import catalog

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A command in a block of a page, and the output that the page claims."""

    place: str
    command: str
    lines: list[str]


def blocks(kind: str) -> list[tuple[str, str]]:
    """(page and line, text) of every fenced block of a kind."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match["kind"] == kind:
                found.append((f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", match["text"]))
    return found


def examples() -> list[Example]:
    """Every `$ command` of the console blocks with the lines below it."""
    found: list[Example] = []
    for place, text in blocks("console"):
        assert text.startswith("$ "), f"{place}: a console block starts with a command"
        for line in text.splitlines():
            if line.startswith("$ "):
                found.append(Example(place, line.removeprefix("$ "), []))
            else:
                found[-1].lines.append(line)
    return found


HELPS = (
    "estimate",
    "sweep",
    "explain",
    "compare",
    "crossover",
    "shift",
    "elastic",
    "disaggregate",
    "search",
    "diagnose",
    "show",
    "goodput",
    "memory",
    "launch",
    "validate",
    "calibrate",
    "completion",
)
EXAMPLES = [example for example in examples() if example.command.startswith("plan ")]


def matches(claimed: list[str], printed: list[str]) -> bool:
    """Whether the printed lines are the claimed ones; a claimed line `...` stands for any number of them."""
    if not claimed:
        return not printed
    first, *rest = claimed
    if first == "...":
        return any(matches(rest, printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and first.rstrip() == printed[0].rstrip() and matches(rest, printed[1:])


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{e.place} {e.command}" for e in EXAMPLES])
def test_a_page_shows_what_the_command_prints(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # sample files, as in the repository's root
    done = run(*shlex.split(example.command)[1:])
    claimed, printed = (list(lines) for lines in (example.lines, (done.out + without_progress(done.err)).splitlines()))
    while claimed and not claimed[-1].strip():
        claimed.pop()
    while printed and not printed[-1].strip():
        printed.pop()
    if not matches(claimed, printed):  # for the difference to be shown
        assert [line.rstrip() for line in printed] == [line.rstrip() for line in claimed]


def test_the_readme_shows_output_and_examples() -> None:
    assert any(example.place.startswith("README.md") and example.lines for example in EXAMPLES)


def test_lines_that_are_left_out_may_be_any() -> None:
    assert matches(["a", "...", "d"], ["a", "b", "c", "d  "])
    assert matches(["a", "..."], ["a"])
    assert not matches(["a", "...", "d"], ["a", "b"])
    assert not matches(["a", "d"], ["a", "b", "d"])


PYTHON = blocks("python")


@pytest.mark.parametrize(("place", "code"), PYTHON, ids=[place for place, _ in PYTHON])
def test_python_examples_run(place: str, code: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, place, "exec"), {})
    assert out.getvalue().strip() or "print" not in code


def test_options_that_the_pages_name_exist() -> None:
    """Flags of `plan` in running text and shell blocks; other programs' flags stand in lines that name them."""
    helps = [run("--help").out, *(run(command, "--help").out for command in HELPS)]
    offered = set(re.findall(r"--[a-z][\w-]*", "".join(helps)))
    for engine in catalog.names(catalog.ENGINES):  # what launch lines have
        offered |= set(launch.flags if (launch := catalog.load_engine(engine).launch) else ())
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.search(r"\b(ruff|mypy|pip|pytest|vllm bench|torchrun)\b", line):
                continue
            unknown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line)) - offered
            assert not unknown, f"{page.relative_to(ROOT)}: {line}"


def test_links_between_the_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
