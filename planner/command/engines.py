"""`plan engines`."""

from __future__ import annotations

import typer

from planner.command.listing import register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(app, listing.engines, "List the engines in the catalogue.", frozenset(("memory_fraction",)))
