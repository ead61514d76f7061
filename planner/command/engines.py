"""`plan engines`."""

from __future__ import annotations

import typer

from planner.command.listing import Shown, register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(
        app,
        listing.engines,
        "List the engines in the catalogue.",
        (
            Shown("name"),
            Shown("version", 7),
            Shown("prefill", 6),
            Shown("chunk_tokens", 4),
            Shown("max_sequences", 5),
            Shown("attention", 3),
            Shown("description"),
        ),
    )
