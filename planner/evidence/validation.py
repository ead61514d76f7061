"""All that was measured beside what the planner says: the tables of `plan validate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from planner.evidence import blocks, diffusion, memory, picks, primitives, published, rankings, serving, speculated
from planner.evidence.comparison import Comparison, Summary, once, summary
from planner.evidence.hosts import lay, transferred

PEER = "AIConfigurator"
"""Whose predictions stand beside some runs."""
GROUPS = ("check", "hardware", "engine", "model", "part")
"""What errors may be grouped by."""


class Errors(NamedTuple):
    """One table of comparisons."""

    name: str
    title: str
    views: tuple[tuple[str, ...], ...]
    """Groupings that are shown where no other is asked for."""
    found: list[Comparison]


class Choices(NamedTuple):
    """What taking the planner's choice of plan and load costs, over some serving runs."""

    what: str
    ours: picks.Regret
    order: picks.Order
    peer: picks.Regret
    """The same by another planner's predictions, over the runs that it predicts."""
    peer_order: picks.Order


def _kernels() -> Errors:
    found = [*primitives.comparisons(), *blocks.comparisons()]
    return Errors("kernels", "Measured kernels and transfers", (("check", "hardware", "engine"),), found)


def _memory() -> Errors:
    return Errors("memory", "Logged by engines", (("check",),), memory.comparisons())


@cache
def _serving() -> Errors:
    """Serving runs, and those on other chips with constants fitted on one chip's alone."""
    runs = serving.points()
    found = serving.comparisons(runs)
    constants = transferred()
    fitted_on = {host.provenance.source for host in constants.hosts.values()}
    chip = next(iter(fitted_on)).split()[2]
    elsewhere = [run for run in runs if run.hardware != chip]
    carried = [
        each._replace(check=f"TPOT as of {chip}", part="unseen", peer=None)
        for each in serving.comparisons(elsewhere, machine=lay(constants))
        if each.check == "TPOT"
    ]
    return Errors(
        "serving",
        "Serving runs of dense models",
        (("check", "part"), ("check", "part", "engine", "hardware")),
        [*found, *carried],
    )


def _published() -> Errors:
    found = [*published.comparisons(), *speculated.comparisons()]
    return Errors("published", "Published latencies and throughputs", (("check", "part"),), found)


def _diffusion() -> Errors:
    return Errors(
        "diffusion",
        "Published runs of diffusion transformers",
        (("check", "part"), ("check", "hardware", "engine")),
        diffusion.comparisons(),
    )


TABLES: dict[str, Callable[[], Errors]] = {
    "kernels": _kernels,
    "memory": _memory,
    "serving": _serving,
    "published": _published,
    "diffusion": _diffusion,
}
"""The tables of errors, by name."""


def grouped(found: Sequence[Comparison], by: Sequence[str]) -> list[tuple[Summary, float | None]]:
    """(errors of each group, another planner's mean error over the cases it predicts), sorted by group."""
    groups: dict[tuple[str, ...], list[Comparison]] = {}
    for each in found:
        groups.setdefault(tuple(getattr(each, name) for name in by), []).append(each)
    return [(summary(key, [each.error for each in own]), _peer(own)) for key, own in sorted(groups.items())]


def _peer(found: Sequence[Comparison]) -> float | None:
    errors = [abs(each.peer / each.observed - 1) for each in found if each.peer is not None]
    return float(np.mean(errors)) if errors else None


@once
def choices() -> list[Choices]:
    """Choosing among serving runs: in groups on which no constant was fitted, and in all."""
    runs = serving.points()
    tpot = serving.predictions(runs).tpot
    peer = np.array([np.nan if run.peer_tpot_ms is None else run.peer_tpot_ms for run in runs])
    result = []
    for what, kept in (("unseen groups", [run.part == "unseen" for run in runs]), ("all groups", [True] * len(runs))):
        own = np.flatnonzero(kept)
        theirs = own[np.isfinite(peer[own])]
        ours, others = [runs[place] for place in own], [runs[place] for place in theirs]
        result.append(
            Choices(
                what, picks.regret(ours, tpot[own]), picks.order(ours, tpot[own]),
                picks.regret(others, peer[theirs]), picks.order(others, peer[theirs]),
            )
        )  # fmt: skip
    return result


def published_order() -> picks.Order:
    """Pairs of plans in published tables that are in the measured order."""
    found = rankings.pairs()
    return picks.Order(len(found), sum(pair.right for pair in found))


def reports() -> list[rankings.Report]:
    """Reports of which plan was faster, beside the planner's word."""
    return rankings.reports()
