"""`plan models`."""

from __future__ import annotations

import typer

from planner.command.listing import Shown, register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(
        app,
        listing.models,
        "List the models in the catalogue.",
        (
            Shown("name"),
            Shown("parameters"),
            Shown("kv_bytes_per_token", 8),
            Shown("layers", 6),
            Shown("heads", 4),
            Shown("kv_heads", 5),
            Shown("max_context", 7),
        ),
    )
