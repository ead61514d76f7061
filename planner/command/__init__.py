"""The `plan` command: finds the command word, runs it, and turns errors into sentences and exit statuses.

Each command is a program of its own with its own imports, so that `plan` starts fast. Arguments without a command
word belong to `rank`, so that options before a command word are never dropped silently.
"""

from __future__ import annotations

import errno
import gc
import io
import sys
import traceback
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

COMMANDS = {
    "rank": "every plan for these chips, ranked for a goal (the default)",
    "explain": "where the time and memory of a plan go, what would help, what the next one does",
    "compare": "plans, hardware, engines or models side by side, and where their order flips",
    "crossover": "where the best plan changes along the load, the prompt or the chips",
    "shift": "sequence parallelism for large passes, tensor parallelism for small ones, over the load",
    "elastic": "sequence parallelism that follows each batch, against deployments that stand still",
    "disaggregate": "prefill and decode on chips of their own, against both on the same ones",
    "search": "strategies beyond TP x PP x DP, operator by operator, against the best template",
    "diagnose": "whether cutting the sequence pays: roofline, dependencies, crossover, checklist",
    "estimate": "price one given plan, or every row of a file",
    "sweep": "a ranking for every combination of models, chips, lengths and loads",
    "goodput": "the rate that a plan serves within limits on time, request by request",
    "memory": "what each chip holds, and how much context and concurrency fit",
    "launch": "the lines that start a plan",
    "validate": "the model against published measurements",
    "calibrate": "fit the constants to measurements of your own cluster",
    "models": "the models in the catalogue",
    "hardware": "the hardware in the catalogue",
    "engines": "the engines in the catalogue",
    "show": "one model, hardware or engine in full, with its sources",
    "completion": "a script that completes words and names in your shell",
}


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0 done, 1 a fault of our own, 2 bad input, 3 no plan satisfies it."""
    gc.disable()  # a run is short and its data small; collecting while importing costs more than it frees
    for name in ("stdout", "stderr"):  # closed by whoever started us: what is written goes nowhere
        if getattr(sys, name) is None:
            setattr(sys, name, io.StringIO())
    words = list(sys.argv[1:] if arguments is None else arguments)
    status = _run(words)
    try:
        sys.stdout.flush()
    except OSError as error:
        status = _unwritten(error) or status
    sys.exit(status)


def _run(words: list[str]) -> int:
    from planner.errors import PlannerError  # noqa: PLC0415 (imports are part of what may be slow)
    from planner.report.stderr import say  # noqa: PLC0415

    debug = "--debug" in words
    try:
        name, rest = _command(words)
        return _call(name, rest)
    except PlannerError as error:
        if debug:
            traceback.print_exc()
        say(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OUTPUT:
            return _unwritten(error)
        if debug:
            traceback.print_exc()
        say(f"internal error, {type(error).__name__}: {error}; --debug shows where")
        return 1


_OUTPUT = frozenset((errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))
"""Why a stream takes nothing more; files say their name."""


def _unwritten(error: OSError) -> int:
    """The exit status where stdout takes nothing more: 0 where whoever read it has read enough."""
    from planner.report.stderr import say, silence  # noqa: PLC0415

    silence(sys.stdout)
    if error.errno == errno.EPIPE:
        return 0
    say(f"stdout cannot be written: {(error.strerror or str(error)).lower()}")
    return 2


def _command(words: list[str]) -> tuple[str, list[str]]:
    from planner.errors import InputError  # noqa: PLC0415

    if not words or words[0].startswith("-"):
        return "rank", words
    if words[0] in COMMANDS:
        return words[0], words[1:]
    import difflib  # noqa: PLC0415

    near = difflib.get_close_matches(words[0], COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(COMMANDS)}"
    raise InputError(f"unknown command {words[0]!r}: {hint}")


_PHRASES = (
    (r"^Invalid value for '(--?[\w-]+)'[^:]*: ", r"\1: "),
    (r"is not a valid int(eger)?( range)?\b", "is not a whole number"),
    (r"is not a valid float( range)?\b", "is not a number"),
    (r"is not in the range x>=(\d+)", r"is not at least \1"),
)
"""Usage errors of click and what they are here; what is not in here keeps its words."""


def _usage(text: str) -> str:
    """The sentence for a usage error, from click's."""
    import re  # noqa: PLC0415

    text = text.strip().rstrip(".")
    extra = re.search(r"unexpected extra argument.*? \((.*)\)$", text)
    if extra:
        word = next((word for word in extra[1].split() if word in COMMANDS), None)
        return f"the command word comes first: plan {word} ..." if word else f"unexpected word: {extra[1]!r}"
    for pattern, phrase in _PHRASES:
        text = re.sub(pattern, phrase, text)
    return text[:1].lower() + text[1:]


def program(name: str) -> str:
    """What is typed to run a command."""
    return "plan" if name == "rank" else f"plan {name}"


@cache
def command_of(name: str) -> Any:
    """A command of COMMANDS as click has it: its parameters, its help, `main`. Built once; not to be changed."""
    import typer  # noqa: PLC0415

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    import_module(f"planner.command.{name}").register(app)
    return typer.main.get_command(app)


def _call(name: str, words: list[str]) -> int:
    from planner.errors import InputError  # noqa: PLC0415

    command = command_of(name)
    if "--help" in words:
        from planner.command.examples import with_examples  # noqa: PLC0415 (who asks for help is not in a hurry)

        command = copy(command)
        command.epilog = with_examples(name, command.epilog)
    try:
        status = command.main(words, prog_name=program(name), standalone_mode=False)
    except SystemExit:
        return 0  # click's own end where whoever read the output has read enough
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise InputError(_usage(error.format_message())) from error  # typer may bring a click of its own: no class
    if status == 130:  # typer makes a number of an interrupt
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0
