"""`plan hardware`."""

from __future__ import annotations

import typer

from planner.command.listing import Shown, register_list
from planner.report import listing


def register(app: typer.Typer) -> None:
    """Adds the command."""
    register_list(
        app,
        listing.hardware,
        "List the hardware in the catalogue.",
        (
            Shown("name"),
            Shown("tflops_16bit", 6, "TF/s"),
            Shown("memory_gib", 8, "GiB"),
            Shown("memory_gb_per_s", 7, "GB/s"),
            Shown("link_gb_per_s", 3, "link GB/s", lambda row: str(row["network"]).split()[-1]),
            Shown("usd_per_chip_hour", 4, "$/h"),
            Shown("engine", 5),
            Shown("aliases"),
        ),
    )
