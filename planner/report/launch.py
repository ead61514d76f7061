"""Launch lines: commands that a shell takes as they are printed, scripts and files, and rows for programs.

What is printed is a shell script: sentences are comments, files are made by here-documents before they are read.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from planner.launching import Deployment, Process
from planner.report.figures import plural
from planner.report.table import show, width
from planner.report.tabular import cell, csv_text, json_text
from planner.specs.catalog import file_text

END = "END_OF_FILE"
"""The line that ends a here-document."""
COMMENT = "# "


def line(process: Process) -> str:
    """The command as one line for a shell, with its environment."""
    return shlex.join(_shell_words(process))


def folded(process: Process, limit: int) -> list[str]:
    """The command in lines of at most `limit` columns, where no word is longer; a flag stays with its values."""
    texts: list[str] = []
    for word in _shell_words(process):
        before = texts[-1] if texts else ""
        if before.startswith("-") and not word.startswith("-") and not {" ", "="} & set(before):
            texts[-1] += f" {shlex.quote(word)}"
        else:
            texts.append(shlex.quote(word))
    lines = [texts[0]]
    for text in texts[1:]:
        if len(lines[-1]) + 1 + len(text) + len(" \\") > limit:
            lines[-1] += " \\"
            lines.append(f"  {text}")
        else:
            lines[-1] += f" {text}"
    return lines


def _shell_words(process: Process) -> list[str]:
    return [*(f"{name}={value}" for name, value in process.environment.items()), *process.argv]


def print_deployment(deployment: Deployment) -> None:
    """What to run where, as a shell script."""
    show(_lines(deployment))


def print_none(reason: str) -> None:
    """Why there is no line, as a paragraph below a table."""
    show(textwrap.wrap(f"No launch line: {reason}.", width(), break_on_hyphens=False))


def _lines(deployment: Deployment) -> list[str]:
    found = _comment(_title(deployment))
    for note in deployment.notes:
        found += _comment(f"{_capital(note)}.", "# * ")
    for process in deployment.processes:
        found += ["", *_comment(_heading(process, deployment))]
        for name, content in process.files.items():
            found += [f"cat > {shlex.quote(name)} <<'{END}'", *file_text(content).splitlines(), END]
        found += folded(process, width())
    return found


def _title(deployment: Deployment) -> str:
    plan, engine, hardware = deployment.plan, deployment.engine, deployment.hardware
    return (
        f"{deployment.model.name} {plan.label} on {plural(plan.chips, 'chip')} of {hardware.name}: {engine.name} "
        f"{engine.version}, flags as in its documentation of {deployment.launch.documentation.version}."
    )


def _heading(process: Process, deployment: Deployment) -> str:
    """Which part of a plan a command is, and where it runs."""
    where = f"on {process.host}"
    if process.role == "router":
        return f"all replicas, {where}: once the servers answer"
    several = deployment.plan.dp > 1
    what = f"replica {process.replica}, " if several else ""
    chips = f"chip{'' if len(process.chips) == 1 else 's'} {_ranges(process.chips)}"
    return f"{what}{process.role} {where}, {chips}" + (" of each node" if _starts_all(process, deployment) else "")


def _capital(sentence: str) -> str:
    """With a capital where it begins with a plain word, no name such as `node0`."""
    first, _, rest = sentence.partition(" ")
    return f"{first.capitalize()} {rest}" if first.isalpha() and first.islower() else sentence


def _starts_all(process: Process, deployment: Deployment) -> bool:
    """Whether the command starts its ranks on other nodes too."""
    nodes = deployment.launch.nodes
    return nodes is not None and nodes.hands_out_chips and len(process.chips) < deployment.plan.replica_chips


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,6` of 0, 1, 2, 3, 6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _comment(text: str, first: str = COMMENT) -> list[str]:
    rest = COMMENT + " " * (len(first) - len(COMMENT))
    return textwrap.wrap(
        text, width(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def scripts(deployment: Deployment) -> dict[str, str]:
    """Files by name: a script for each process, numbered in the order of starting, and what the servers read."""
    found: dict[str, str] = {}
    for number, process in enumerate(deployment.processes):
        found |= {name: file_text(content) for name, content in process.files.items()}
        replica = "" if process.replica is None else f"-replica{process.replica}"
        name = f"{number:02d}-{process.role}{replica}-{_safe(process.host)}.sh"
        head = ["#!/bin/sh", *_comment(_title(deployment)), *_comment(_heading(process, deployment))]
        enter = 'cd "$(dirname "$0")" || exit 1'
        found[name] = "\n".join([*head, enter, *folded(process, width())]) + "\n"
    return found


def _safe(host: str) -> str:
    """A host's address as part of a file's name."""
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in host)


def rows(deployment: Deployment) -> list[dict[str, Any]]:
    """A row for each process; `argv` is a list, `environment` and `files` are by name."""
    return list(_rows(deployment))


def _rows(deployment: Deployment) -> Iterator[dict[str, Any]]:
    for number, process in enumerate(deployment.processes):
        yield {
            "process": number,
            "role": process.role,
            "replica": process.replica,
            "node": process.node,
            "host": process.host,
            "chips": list(process.chips),
            "model": deployment.model.name,
            "plan": deployment.plan.label,
            "hardware": deployment.hardware.name,
            "engine": deployment.engine.name,
            "engine_version": deployment.engine.version,
            "environment": process.environment,
            "argv": list(process.argv),
            "line": line(process),
            "files": {name: file_text(content) for name, content in process.files.items()},
        }


def rows_csv(found: Sequence[dict[str, Any]], header: bool = True) -> str:
    """Rows as CSV: chips joined by spaces, environment as a shell has it, argv as JSON, files by their names."""
    made = [
        row
        | {
            "chips": " ".join(map(str, row["chips"])),
            "environment": " ".join(f"{name}={value}" for name, value in row["environment"].items()),
            "argv": json.dumps(row["argv"], ensure_ascii=False),
            "files": " ".join(row["files"]),
        }
        for row in found
    ]
    cells = [[cell(value) for value in row.values()] for row in made]
    return csv_text(list(found[0]) if header else None, cells)


def rows_json(found: Sequence[dict[str, Any]]) -> str:
    """Rows as JSON."""
    return json_text(found)
