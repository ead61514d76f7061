"""What is to be made: an image or video of a size, in steps; and how many tokens the backbone sees."""

from __future__ import annotations

from typing import NamedTuple

from planner.errors import InputError
from planner.specs.diffusion import Diffusion

LONGEST_SIDE = 65_536
MOST_STEPS = 10_000


class Grid(NamedTuple):
    """Tokens along time, height and width."""

    frames: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """In all."""
        return self.frames * self.rows * self.columns


class Job(NamedTuple):
    """One image or video."""

    width: int
    height: int
    frames: int
    steps: int
    warmup: int
    """Steps without stale activations, where a method uses such."""
    batch: int = 1
    """Of them that a replica makes at once."""

    @property
    def pixels(self) -> int:
        """Of all frames."""
        return self.width * self.height * self.frames


def grid_of(model: Diffusion, job: Job) -> Grid:
    """Tokens of the image or video; (frames - 1) / stride + 1 latent frames, since the first stands alone."""
    latent = model.latent
    frames = ((job.frames - 1) // latent.time_stride + 1) // latent.time_patch
    return Grid(frames, job.height // latent.multiple, job.width // latent.multiple)


def job_of(
    model: Diffusion,
    size: tuple[int, int] | None = None,
    frames: int | None = None,
    steps: int | None = None,
    warmup: int = 1,
    batch: int = 1,
) -> Job:
    """A job with what is not said taken from the model's file.

    Raises:
        InputError: a size that does not divide into tokens, frames of an image, steps or warm-up that cannot be.
    """
    width, height = size or (model.size.width, model.size.height)
    frames = model.size.frames if frames is None else frames
    steps = model.steps if steps is None else steps
    multiple, stride = model.latent.multiple, model.latent.time_stride
    for side in (width, height):
        if side < multiple or side % multiple or side > LONGEST_SIDE:
            below, above = max(multiple, side // multiple * multiple), (side // multiple + 1) * multiple
            raise InputError(
                f"--image: {model.name} needs sides that are multiples of {multiple} pixels, up to {LONGEST_SIDE}; "
                f"found {width}x{height}" + (f", try {below} or {above}" if side <= LONGEST_SIDE else "")
            )
    if frames < 1:
        raise InputError(f"--frames must be at least 1, found {frames}")
    if frames > 1 and not model.is_video:
        raise InputError(f"--frames {frames}: {model.name} makes single images; leave it out")
    if (frames - 1) % stride:
        near = (frames - 1) // stride * stride + 1
        raise InputError(
            f"--frames {frames}: {model.name} packs {stride} frames into one after the first; expected {stride} n + 1, "
            f"try {near} or {near + stride}"
        )
    if not 1 <= steps <= MOST_STEPS:
        raise InputError(f"--steps must be a whole number from 1 to {MOST_STEPS}, found {steps}")
    if warmup < 0:
        raise InputError(f"--warmup must be at least 0, found {warmup}")
    if not 1 <= batch <= 4096:
        raise InputError(f"images at once on a replica must be from 1 to 4096, found {batch}")
    return Job(width, height, frames, steps, warmup, batch)


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of `1024` or `1280x720`.

    Raises:
        InputError: not a size.
    """
    parts = text.lower().split("x")
    if len(parts) in (1, 2) and all(part.strip().isdecimal() and len(part.strip()) < 9 for part in parts):
        width, height = int(parts[0]), int(parts[-1])
        if width and height:
            return width, height
    raise InputError(f"--image: expected pixels, as 1024 or 1280x720, found {text!r}")
