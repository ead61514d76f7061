"""The diagnosis of a diffusion transformer: one denoising step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from planner.costs.layers import Operation
from planner.diagnosing.framework import (
    Check,
    Dependency,
    Diagnosis,
    Length,
    Spot,
    Verdict,
    half_message,
    least_block,
    message_check,
    precision_check,
    reach_word,
    spot,
    stored_otherwise,
)
from planner.diffusion.counting import count_block, count_ends, patch_bytes, rows_of
from planner.diffusion.job import Job, grid_of, job_of
from planner.diffusion.memory import memory_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Setting, pass_of, stages_of
from planner.diffusion.ranking import NoneLeftError, Request, Row, limit_of, rank, setting_of
from planner.diffusion.rules import PATCHES
from planner.errors import InputError
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.units import GIB, MS

SIDES = (512, 1024, 2048, 4096)
"""Pixels of square images."""
LATENT_FRAMES = (5, 9, 17, 33)
"""Latent frames of a video."""


def diagnose(request: Request) -> Diagnosis:
    """The diagnosis of a diffusion transformer.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: fewer chips than the smallest slice.
    """
    model, job = request.model, request.job
    request = request._replace(objective="latency", parallel_vae=True)
    setting, known = setting_of(request), _Ranked({})
    size = f"{job.width}x{job.height}" + (f"x{job.frames}" if model.is_video else "")
    return Diagnosis(
        model.name, request.hardware, f"{request.sampler.name} {request.sampler.version}", request.gpus,
        f"{size}, {job.steps} steps", (_spot(request, setting),), (_reach(setting),),
        (_over_sizes(request, known), _over_chips(request, known)), tuple(_checks(request, setting, known)),
    )  # fmt: skip


def _alone(setting: Setting) -> tuple[list[tuple[Operation, float]], float]:
    """(operations of one step on one chip, its seconds)."""
    model, split = setting.model, Split()
    rows = rows_of(model, setting.job, split)
    found: list[tuple[Operation, float]] = [(each, 1.0) for each in count_ends(model, rows, setting.formats)]
    (blocks,) = stages_of(model, 1)
    for block, layers in blocks:
        counted = count_block(model, block, rows, split, setting.formats, setting.sampler.passes)
        found += [(each, float(layers)) for each in (*counted.operations, *counted.attention)]
    return found, float(pass_of(setting, split, blocks, rows).parts.total)


def _spot(request: Request, setting: Setting) -> Spot:
    operations, seconds = _alone(setting)
    memory = memory_of(setting, Split())
    left = limit_of(request) - memory.weights - memory.encoders - memory.other
    filled = memory.activations / left if left > 0 else float("inf")
    tokens = float(grid_of(request.model, request.job).tokens)
    return spot(request.hardware, "denoising step", "one chip", tokens, operations, seconds, filled)


def _reach(setting: Setting) -> Dependency:
    """What a patch needs fresh: itself. It looks at all others, but those of the step before do."""
    rows = grid_of(setting.model, setting.job).rows
    patches = max(count for count in range(1, max(PATCHES) + 1) if rows % count == 0)
    share = 1.0 / patches
    why = (
        f"bidirectional over patches, all of which are known; only the patch itself (1 of {patches}) must be of this "
        "step, the rest may be one step old"
    )
    return Dependency("denoising step", share, reach_word(share), "natural", why)


class _Ranked(NamedTuple):
    """Rankings by chips and job: both verdicts and the checklist ask for that of the request itself."""

    known: dict[tuple[int, Job], list[Row]]

    def rows(self, request: Request) -> list[Row]:
        """Plans, best first; () where none is left."""
        key = request.gpus, request.job
        if key not in self.known:
            try:
                self.known[key] = rank(request).rows
            except NoneLeftError:
                self.known[key] = []
        return self.known[key]


def _length(request: Request, length: int, known: _Ranked) -> Length:
    """The best plan with a cut of the sequence beside the best one without."""
    rows = known.rows(request)

    def first(cut: bool) -> tuple[str, float] | None:
        found = next((row for row in rows if _cuts(row) == cut), None)
        return None if found is None else (str(found["plan"]), float(found["latency_ms"]) * MS)

    return Length(length, first(False), first(True))


def _cuts(row: Row) -> bool:
    return bool(row["ulysses"] * row["ring"] * row["pipefusion"] * row["distrifusion"] > 1)


def _over_sizes(request: Request, known: _Ranked) -> Verdict:
    model, job = request.model, request.job
    if model.is_video:
        stride = model.latent.time_stride
        values = sorted({job.frames, *((count - 1) * stride + 1 for count in LATENT_FRAMES)})
        jobs = [(frames, job._replace(frames=frames)) for frames in values]
        asked, axis = job.frames, "frames"
    else:
        jobs = [(side, made) for side in SIDES if (made := _square(request, side)) is not None]
        if job.width != job.height or job.width not in SIDES:
            jobs.append((job.height, job))
        asked, axis = job.height, "pixels of a side"
    lengths = tuple(
        _length(request._replace(job=made), value, known) for value, made in sorted(jobs, key=lambda each: each[0])
    )
    return Verdict("denoising step", axis, lengths, next(each for each in lengths if each.length == asked))


def _square(request: Request, side: int) -> Job | None:
    job = request.job
    try:
        return job_of(request.model, (side, side), job.frames, job.steps, job.warmup)
    except InputError:
        return None


def _over_chips(request: Request, known: _Ranked) -> Verdict:
    values, chips = [], 2
    while chips < request.gpus:
        values.append(chips)
        chips *= 2
    values.append(request.gpus)
    lengths = tuple(_length(request._replace(gpus=count), count, known) for count in values)
    return Verdict("denoising step", "chips", lengths, lengths[-1])


def _checks(request: Request, setting: Setting, known: _Ranked) -> Iterator[Check]:
    model, hardware, job = request.model, request.hardware, request.job
    _, now = _alone(setting)
    taller = job._replace(height=job.height + model.latent.multiple)
    more = grid_of(model, taller).tokens - grid_of(model, job).tokens
    _, later = _alone(replace(setting, job=taller))
    slower = (later - now) * 1000 / more
    kept = 2 * model.hidden * model.depth * ACTIVATION_BYTES
    tokens = grid_of(model, job).tokens + (model.text_tokens if model.in_stream else 0)
    yield Check(
        "KV cost",
        (("KV of a token, stale methods", kept, "B"), ("a step more for 1,000 tokens", slower / MS, "ms"),
         ("of a step", slower / now, "share"), ("KV of all tokens", kept * tokens / GIB, "GiB")),
        f"nothing is kept from step to step but by stale methods: {kept / 1024:.4g} KiB a token, "
        f"{kept * tokens / GIB:.3g} GiB for {tokens} tokens, divided over the stages; 1,000 tokens slow a step on one "
        f"chip by {slower / MS:.3g} ms ({slower / now:.1%})",
    )  # fmt: skip
    reach = _reach(setting)
    yield Check("dependencies", (("share that must be fresh", reach.share, "share"),), reach.why)
    blocks = [(level.name, least_block(hardware, place)) for place, level in enumerate(hardware.network)]
    yield Check(
        "topology", tuple((f"least block over {name}", block, "tokens") for name, block in blocks),
        "a ring hides behind attention in blocks of at least "
        + ", ".join(f"{block:,.0f} tokens over {name}" for name, block in blocks)
        + f"; {request.gpus} chips leave {tokens // request.gpus} each",
    )  # fmt: skip
    others = {name: _alone(setting_of(request._replace(weights=name)))[1] for name in stored_otherwise(setting.weights)}
    yield precision_check(now, others, setting.weights, "a step on one chip")
    stages = max(2, min(request.gpus, model.depth))
    split = Split(pipefusion=stages, patches=stages)
    size = patch_bytes(model, rows_of(model, job, split, repeated=setting.sampler.text_with_patches))
    yield message_check(
        half_message(setting.network.send), size, stages,
        f"a patch of PipeFusion over {stages} chips (sequence parallelism sends {4 * model.depth} times a step)",
    )  # fmt: skip
    best = next(iter(known.rows(request)), None) or rank(request).rows[0]
    yield Check(
        "the engine's choice", (("latency", best["latency_ms"], "ms"), ("speed-up", best["speedup"], "x")),
        f"{best['plan']} comes first over {request.gpus} chips: {best['speedup']:.2f} times one chip",
    )  # fmt: skip
