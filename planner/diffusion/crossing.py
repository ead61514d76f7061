"""Where the best split of a diffusion transformer changes: along image size, frames, steps or chips.

Sizes, frames and chips are looked at where they are usual, since what divides a token grid changes from one size to the
next; steps are bisected to the very one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

from planner.diffusion.job import job_of
from planner.diffusion.plan import Split
from planner.diffusion.ranking import NoneLeftError, Request, Row, rank, value_of
from planner.errors import InputError, NoPlanError

Axis = Literal["image", "frames", "steps", "gpus"]
AXES: tuple[Axis, ...] = ("image", "frames", "steps", "gpus")
SIDES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
STEPS = (2, 4, 8, 16, 32, 64, 128)
LATENT_FRAMES = (5, 9, 13, 17, 21, 25, 33)
CHIPS = (1, 2, 4, 8, 16, 32, 64)


class Stretch(NamedTuple):
    """Neighbouring values over which one split leads, its patches and copies aside."""

    low: int
    high: int
    plan: str | None
    """none: no split is left."""
    first: Row | None
    """Its row at `low`."""
    last: Row | None
    next: str | None
    """The split that takes over behind `high`."""
    behind: float | None
    """How much worse that one is at `high`, as a share; none where it does not run there."""


class Crossing(NamedTuple):
    """The stretches of a range, ascending."""

    request: Request
    axis: Axis
    stretches: tuple[Stretch, ...]
    values: tuple[int, ...]
    """Looked at."""


def at(request: Request, axis: Axis, value: int) -> Request:
    """The request at a value.

    Raises:
        InputError: a size, number of frames or of steps that cannot be.
    """
    if axis == "gpus":
        return request._replace(gpus=value)
    job = request.job
    size = (value, value) if axis == "image" else (job.width, job.height)
    frames = value if axis == "frames" else job.frames
    steps = value if axis == "steps" else job.steps
    return request._replace(job=job_of(request.model, size, frames, steps, job.warmup))


def bare(row: Row) -> str:
    """The label of a row without patches and copies."""
    split = Split.parse(str(row["plan"]))
    return split._replace(dp=1, patches=split.pipefusion).label


def crossing(request: Request, axis: Axis, low: int | None, high: int | None) -> Crossing:
    """The stretches over which one split leads.

    Args:
        request: what is asked; what varies is not looked at.
        axis: what varies.
        low: least value; none = the least that is usual.
        high: greatest; none = the greatest that is usual, or the request's chips.

    Raises:
        InputError: a range that is none.
        NoPlanError: no split is left anywhere in it.
    """
    values = _values(request, axis, low, high)
    found = {value: _rows(at(request, axis, value)) for value in values}
    while axis == "steps":
        middles = [
            (left + right) // 2
            for left, right in pairwise(sorted(found))
            if right - left > 1 and _leader(found[left]) != _leader(found[right])
        ]
        if not middles:
            break
        found |= {value: _rows(at(request, axis, value)) for value in middles}
    if not any(found.values()):
        rank(at(request, axis, values[0]))  # says why
        raise NoPlanError(f"no split is left between {axis} {values[0]} and {values[-1]}")
    return Crossing(request, axis, tuple(_stretches(request, found)), tuple(sorted(found)))


def _values(request: Request, axis: Axis, low: int | None, high: int | None) -> list[int]:
    if axis == "frames" and not request.model.is_video:
        raise InputError(f"--vary frames: {request.model.name} makes single images")
    if axis == "image" and request.model.is_video:
        raise InputError(f"--vary image: {request.model.name} makes videos of a shape of their own; vary frames")
    stride = request.model.latent.time_stride
    usual = {
        "image": SIDES,
        "frames": tuple((count - 1) * stride + 1 for count in LATENT_FRAMES),
        "steps": STEPS,
        "gpus": (*(count for count in CHIPS if count < request.gpus), request.gpus),
    }[axis]
    least, most = low or usual[0], high or (max(usual[-1], low or 0))
    kept = [value for value in usual if least < value < most]
    if least >= most:
        raise InputError(f"--from {least} --to {most}: expected a range, from less to more")
    return [least, *kept, most]


def _rows(request: Request) -> list[Row]:
    try:
        return rank(request).rows
    except NoneLeftError:
        return []


def _leader(rows: list[Row]) -> str | None:
    return bare(rows[0]) if rows else None


def _row(rows: list[Row], plan: str) -> Row | None:
    return next((row for row in rows if bare(row) == plan), None)


def _stretches(request: Request, found: dict[int, list[Row]]) -> list[Stretch]:
    runs: list[list[int]] = []
    for value in sorted(found):
        if runs and _leader(found[runs[-1][0]]) == _leader(found[value]):
            runs[-1].append(value)
        else:
            runs.append([value])
    stretches = []
    for index, run in enumerate(runs):
        low, high = run[0], run[-1]
        plan = _leader(found[low])
        after = _leader(found[runs[index + 1][0]]) if index + 1 < len(runs) else None
        other = None if after is None else _row(found[high], after)
        behind = None
        if other is not None and plan is not None:
            behind = value_of(request, other) / value_of(request, found[high][0]) - 1
        first, last = (found[end][0] if plan is not None else None for end in (low, high))
        stretches.append(Stretch(low, high, plan, first, last, after, behind))
    return stretches
