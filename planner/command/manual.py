"""docs/cli.md, made of what `--help` is made of: `python -m planner.command.manual > docs/cli.md`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from planner.command import COMMANDS, command_of, program
from planner.command.examples import EXAMPLES

_WIDTH = 120
_HEAD = """\
# plan: every command and option

Made of the commands themselves by `python -m planner.command.manual > docs/cli.md`; a test keeps the two the same.
`plan` without a command word is `plan rank`. A command word comes first, options follow in any order, as `--gpus 8` or
`--gpus=8`. [sweep.md](sweep.md) and [calibrate.md](calibrate.md) say more on these two.
"""
_TAIL = """\
## Output

A table is at most 100 columns wide, and narrower on a narrow terminal, or where `COLUMNS` says so: columns of lesser
interest are left out first. On a terminal, colours say what bounds a plan; `NO_COLOR=1` switches them off. With
`--csv -` or `--json -` nothing but that goes to stdout. CSV: one header line, LF, six significant digits, an empty
cell where a column does not apply, `true` and `false`. JSON: one array of objects, `null` where a key does not apply.
Progress and warnings go to stderr. A file that is written is replaced whole or not touched, but for `plan sweep --csv
FILE`, which grows by whole rows.

## Exit status

| status | meaning |
|---|---|
| 0 | done; also where whoever read the output stopped reading |
| 1 | a fault of ours (`--debug` shows where) |
| 2 | bad input: an option, a name or a file that cannot be used; stderr says which, and what was expected |
| 3 | no plan satisfies the request; stderr says which limit, and the smallest change that would do |
| 130 | interrupted |

## Environment

| variable | meaning |
|---|---|
| `PLAN_CONFIG_PATH` | directories with models, hardware and engines of your own, joined by `:`; searched first |
| `COLUMNS` | width of tables and of help |
| `NO_COLOR` | not empty: no colours |

## Completion

`plan completion bash` (or `zsh`, `fish`) prints a script that completes commands, options and their values, and the
names of models, hardware and engines, your own included. Once, in `~/.bashrc`, or in `~/.zshrc`, after `compinit`,
with `zsh`:

```sh
eval "$(plan completion bash)"
```

and for fish, in `~/.config/fish/config.fish`: `plan completion fish | source`.
"""


def text() -> str:
    """The whole page."""
    contents = "\n".join(f"* [`{program(name)}`](#{_anchor(name)}): {about}" for name, about in COMMANDS.items())
    return "\n".join([_HEAD, contents, "", *(_command(name) for name in COMMANDS), _TAIL])


def _anchor(name: str) -> str:
    return program(name).replace(" ", "-")


def _command(name: str) -> str:
    """The section of a command."""
    command = command_of(name)
    options = [each for each in command.params if each.param_type_name == "option"]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    parts = [f"## {program(name)}", *_paragraphs(command.help or "")]
    parts.append(f"```\n{_usage(name, arguments)}\n```")
    if name in EXAMPLES:
        lines = [line for each in EXAMPLES[name] for line in (f"# {each.about}", *each.lines)]
        parts.append("\n".join(["```sh", *lines, "```"]))
    parts.append("\n".join(_item([_shown(each)], each) for each in [*arguments, *options]))
    parts += _paragraphs(command.epilog or "")
    return "\n\n".join(parts) + "\n"


def _usage(name: str, arguments: Sequence[Any]) -> str:
    shown = (_shown(each) if each.required else f"[{_shown(each).strip('[]')}]" for each in arguments)
    return " ".join([program(name), "[OPTION]...", *shown])


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.strip():
            yield _wrapped(paragraph)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        " ".join(text.split()), _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )


def _shown(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _item(words: Sequence[str], parameter: Any) -> str:
    """``* `--model NAME`, `-m`: what it is (default: this).``"""
    if parameter.param_type_name == "option":
        first, *others = sorted(parameter.opts, key=lambda word: not word.startswith("--"))
        value = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
        words = [first + value, *others]
    notes = []
    if parameter.required:
        notes.append("required")
    elif parameter.default not in (None, False, ()) and not callable(parameter.default):
        notes.append(f"default: {parameter.default}")
    about = (parameter.help or "").rstrip(".")
    named = ", ".join(f"`{word}`" for word in words)
    return _wrapped(f"* {named}: {about}{f' ({notes[0]})' if notes else ''}.", "  ")


def _kind(parameter: Any) -> str:
    """What a value is where the option does not say: a whole number, a number, or text."""
    return {"int": "N", "integer": "N", "float": "X"}.get(parameter.type.name.split()[0], "TEXT")


if __name__ == "__main__":
    print(text(), end="")
