"""Runs the `plan` command for tests: inside this process, which is fast, or as a process of its own."""

from __future__ import annotations

import gc
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from csv import DictReader
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from planner.command import main
from planner.specs import catalog

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"


def every(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: object = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, but one test for all cases: for checks so short that a test each costs more.

    Every case runs whatever became of the others; a failure holds the errors of all that failed, each with its case
    (all of its values: `ids` are not needed). Fixtures are those of one test, shared by all cases.
    """
    keys = [key.strip() for key in names.split(",")] if isinstance(names, str) else list(names)
    table = list(cases)
    assert table, "no cases"

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        def all_cases(**fixtures: Any) -> None:
            failed: list[Exception] = []
            for case in table:
                values = dict(zip(keys, case if len(keys) > 1 or isinstance(names, tuple) else (case,), strict=True))
                try:
                    test(**values, **fixtures)
                except Exception as error:
                    error.add_note(f"case: {', '.join(f'{key}={value!r:.200}' for key, value in values.items())}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(table)} cases of {test.__name__} failed", failed[:20])

        own = inspect.signature(test)
        left = [parameter for name, parameter in own.parameters.items() if name not in keys]
        all_cases.__name__, all_cases.__doc__, all_cases.__module__ = test.__name__, test.__doc__, test.__module__
        all_cases.__dict__.update(test.__dict__)  # marks
        all_cases.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
        return all_cases

    return decorated


class Late:
    """What `make` makes, made when it is first used: every worker collects every module."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Any:
        return self._make()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)

    def __getitem__(self, key: Any) -> Any:
        return self._made[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


class Completed(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """Stdout read as CSV with a header."""
        return list(DictReader(io.StringIO(self.out)))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(*words: object, stdin: str = "", terminal: bool = False) -> Completed:
    """The command in this process, with streams of its own; `terminal` makes stdout look like one.

    Exceptions that escape it become what Python makes of them: a traceback and status 1. Numpy's warnings would
    stand on a user's stderr, so they are errors here.
    """
    out, err = Terminal() if terminal else io.StringIO(), io.StringIO()
    collecting = gc.isenabled()
    with redirect_stdout(out), redirect_stderr(err), _input(stdin), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            traceback.print_exc()
            status = 1
        finally:
            if collecting:  # the command switches the collector off, which suits a short process but not this one
                gc.enable()
    return Completed(status, out.getvalue(), err.getvalue())


def run_process(*words: object, timeout: float = 60, env: Mapping[str, str] | None = None, **options: Any) -> Completed:
    """The command as a process of its own, from the checkout."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
        **options,
    )
    return Completed(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(*command: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process at the head of a group of its own; whatever becomes of the test, the group is gone afterwards.

    It heeds interrupts, which those who start tests in the background have it ignore.
    """
    with heeding_interrupts():  # a process ignores what its parent ignored
        process = subprocess.Popen(list(map(str, command)), start_new_session=True, **options)
    try:
        with process:
            try:
                yield process
            except BaseException:
                _end(process)
                raise
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """An interrupt is one in this process, even where whoever started it had it ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forget_files() -> None:
    """Makes the catalogue read files anew, as a new process would."""
    catalog._LOADED.clear()
    catalog._parsed.cache_clear()
    catalog._path_of.cache_clear()


@contextmanager
def _input(text: str) -> Iterator[None]:
    before = sys.stdin
    sys.stdin = io.StringIO(text)
    try:
        yield
    finally:
        sys.stdin = before


def without_progress(text: str) -> str:
    """What stands on stderr but for how far a long run has come, which a slow machine says now and then."""
    return re.sub(r"(?m)^plan: [0-9]+ of [0-9]+ .*\n", "", text)
