"""What is said beside the output: on stderr, where nobody may be listening."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """A line on stderr. Where that is closed or full it is lost, which must not end a run that does its work."""
    try:
        print(f"plan: {text}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def silence(stream: object) -> None:
    """Leads a stream that takes nothing more to nowhere, so that what is in its buffer is not tried again at exit."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[attr-defined]
