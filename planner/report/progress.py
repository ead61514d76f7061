"""How far a long run has come, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any

from planner.report.figures import plural
from planner.report.stderr import say

EVERY = 10.0
"""Seconds between two lines where there is no terminal."""


class Progress:
    """Counts what is done; a context that leaves the terminal as it was.

    Args:
        what: what is counted, in the singular.
        total: how many there are.
        done: how many there are already.
        quiet: say nothing.
        bar: a bar may be drawn: not where rows are printed to the same terminal.
    """

    def __init__(self, what: str, total: int, done: int = 0, quiet: bool = False, bar: bool = True) -> None:
        self.what, self.total, self.done, self.failed, self.quiet = what, total, done, 0, quiet
        self._start, self._said, self._before = time.monotonic(), time.monotonic(), done
        terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bar: Any = _bar() if terminal and bar and not quiet else None

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(f"{self.what}s", total=self.total, completed=self.done)
            self._bar.refresh()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, failed: bool = False) -> None:
        """One more is done."""
        self.done += 1
        self.failed += failed
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
            if now - self._said > 0.1 or self.done == self.total:  # it draws when told: a thread of its own would be
                self._said = now  # copied into worker processes
                self._bar.refresh()
        elif not self.quiet and now - self._said >= EVERY:
            self._said = now
            say(self.line(now))

    def line(self, now: float) -> str:
        """`120 of 400 points, 3 without a plan, about 25 s left`."""
        left = (now - self._start) / max(1, self.done - self._before) * (self.total - self.done)
        failed = f", {self.failed} without a plan" if self.failed else ""
        rest = f", about {_duration(left)} left" if self.done < self.total else ""
        return f"{self.done} of {plural(self.total, self.what)}{failed}{rest}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _bar() -> Any:
    """A bar on stderr that is wiped when it is done."""
    from rich.console import Console  # noqa: PLC0415 (needed on terminals only)
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
