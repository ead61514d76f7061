"""`plan hardware`."""

from __future__ import annotations

import typer

from planner.command.listing import register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(
        app,
        listing.hardware,
        "List the hardware in the catalogue.",
        frozenset(("domain_chips", "link_gb_per_s", "tdp_w", "engine", "aliases")),
    )
