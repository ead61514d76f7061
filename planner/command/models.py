"""`plan models`."""

from __future__ import annotations

import typer

from planner.command.listing import register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(
        app,
        listing.models,
        "List the models in the catalogue.",
        frozenset(("active_parameters", "hidden", "weights", "aliases")),
    )
