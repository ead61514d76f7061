"""Choosing among the splits of a diffusion transformer: each priced, those that do not fit refused, the rest ranked."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from planner.diffusion.job import Job, grid_of
from planner.diffusion.memory import Memory, memory_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Latency, Setting, latency_of
from planner.diffusion.rules import Filters, refusal, splits
from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.specs.diffusion import Diffusion
from planner.specs.dtypes import weight_dtype
from planner.specs.hardware import Hardware
from planner.specs.sampler import Sampler
from planner.units import GIB, HOUR, MS

OBJECTIVES = ("latency", "throughput", "cost")
ERROR = 0.10
"""Within which two plans are a tie: about the median error of latency ratios on published runs (`plan validate`)."""
MOST_CHIPS = 10**6
COLUMNS = (
    "rank", "plan", "model", "hardware", "engine", "objective", "weights", "gpus", "idle_gpus",
    "cfg", "tp", "ulysses", "ring", "pipefusion", "patches", "distrifusion", "dp",
    "width", "height", "frames", "steps", "warmup", "batch", "tokens", "text_tokens",
    "latency_ms", "step_ms", "text_ms", "vae_ms", "warmup_ms", "compute_ms", "memory_ms", "network_ms", "overhead_ms",
    "bubble_ms", "hidden_network_ms", "efficiency", "sent_gb_per_step", "speedup",
    "images_per_s", "video_s_per_s", "usd_per_image", "gpu_s_per_image",
    "weights_gib", "encoders_gib", "kv_gib", "activations_gib", "vae_gib", "other_gib", "memory_gib",
    "memory_limit_gib", "stale", "bottleneck", "tie", "error", "engine_version",
)  # fmt: skip
Row = dict[str, Any]


class Limits(NamedTuple):
    """What a plan must keep; seconds and bytes, none = no limit."""

    latency: float | None = None
    memory: float | None = None
    memory_fraction: float | None = None


class Request(NamedTuple):
    """One question: what to make, with what, for which goal, within which limits."""

    model: Diffusion
    hardware: Hardware
    sampler: Sampler
    gpus: int
    job: Job
    objective: str = "latency"
    weights: str | None = None
    limits: Limits = Limits()
    filters: Filters = Filters()
    usd_per_chip_hour: float | None = None
    parallel_vae: bool = False
    slice: str | None = None

    @property
    def price(self) -> float | None:
        """Dollars per chip and hour; none = unknown."""
        if self.usd_per_chip_hour is not None:
            return self.usd_per_chip_hour
        return None if self.hardware.price is None else self.hardware.price.usd_per_chip_hour


class Refused(NamedTuple):
    """A split that cannot be, with the rule that it breaks."""

    plan: Split
    rule: str
    reason: str


class Priced(NamedTuple):
    """A split with its seconds and bytes."""

    split: Split
    latency: Latency
    memory: Memory


class Ranking(NamedTuple):
    """Plans in order, the refused ones, and how many were looked at."""

    request: Request
    setting: Setting
    priced: list[Priced]
    rows: list[Row]
    refused: list[Refused]

    @property
    def plans(self) -> int:
        """Looked at."""
        return len(self.rows) + len(self.refused)


class NoneLeftError(NoPlanError):
    """No split is left; `refused` has all of them."""

    def __init__(self, text: str, refused: list[Refused]) -> None:
        self.refused = refused
        super().__init__(text)


def setting_of(request: Request) -> Setting:
    """What all plans of a request share.

    Raises:
        InputError: a goal, dtype or number of chips that cannot be.
        NoPlanError: fewer chips than the smallest slice.
    """
    if request.objective not in OBJECTIVES:
        raise InputError(
            f"--objective: expected one of {', '.join(OBJECTIVES)} for a diffusion transformer, "
            f"found {request.objective!r}"
        )
    if not 1 <= request.gpus <= MOST_CHIPS:
        raise InputError(f"--gpus must be from 1 to {MOST_CHIPS} for a diffusion transformer, found {request.gpus}")
    weights = request.weights or request.model.weights
    weight_dtype(weights)
    request.hardware.chip.compute_dtype(weight_dtype(weights).compute)
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    return Setting(
        request.model, request.hardware, request.sampler, placement, request.job, weights, request.parallel_vae
    )


def limit_of(request: Request) -> float:
    """Bytes that may be used on a chip."""
    chip, memory = request.hardware.chip.memory_bytes, request.sampler.memory
    if request.limits.memory is not None:
        return min(request.limits.memory, chip)
    return chip * (request.limits.memory_fraction or memory.fraction)


def priced_or_refused(request: Request, setting: Setting, split: Split) -> Priced | Refused:
    """A split's seconds and bytes, or why it cannot be."""
    broken = refusal(setting, split)
    if broken is not None:
        return Refused(split, *broken)
    memory, limit = memory_of(setting, split), limit_of(request)
    if memory.total > limit:
        return Refused(split, "memory", _too_large(memory, limit))
    found = latency_of(setting, split)
    most = request.limits.latency
    if most is not None and found.total > most:
        return Refused(split, "slo", f"latency {found.total / MS:.4g} ms > {most / MS:g} ms")
    return Priced(split, found, memory)


def _too_large(memory: Memory, limit: float) -> str:
    parts = {
        "weights": memory.weights, "text encoders and VAE": memory.encoders, "KV buffers": memory.kv,
        "the VAE's peak" if memory.vae > memory.activations else "activations": max(memory.vae, memory.activations),
        "context": memory.other,
    }  # fmt: skip
    named = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    return f"{named} = {memory.total / GIB:.1f} GiB exceed the limit of {limit / GIB:.1f} GiB per chip"


def rank(request: Request) -> Ranking:
    """All splits of a request, ranked.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: no split is left (as NoneLeftError, with the reasons).
    """
    setting = setting_of(request)
    kept: list[Priced] = []
    refused: list[Refused] = []
    for split in splits(setting, setting.placement.usable, request.filters):
        found = priced_or_refused(request, setting, split)
        if isinstance(found, Priced):
            kept.append(found)
        else:
            refused.append(found)
    if not kept:
        raise NoneLeftError(_why_none(request, refused), refused)
    one = _one_chip(setting)
    rows = [row_of(request, setting, each, one) for each in kept]
    order = sorted(range(len(kept)), key=lambda place: _order(request, kept[place], rows[place]))
    kept, rows = [kept[place] for place in order], [rows[place] for place in order]
    for place, row in enumerate(rows):
        row["rank"] = place + 1
        if place:
            row["tie"] = value_of(request, row) <= value_of(request, rows[place - 1]) * (1 + ERROR)
    return Ranking(request, setting, kept, rows, refused)


def _one_chip(setting: Setting) -> float:
    """Seconds on one chip, were its memory large enough: what speed-ups are against."""
    return latency_of(setting, Split()).total


def value_of(request: Request, row: Row) -> float:
    """What is minimised."""
    if request.objective == "latency":
        return float(row["latency_ms"])
    if request.objective == "throughput":
        return 1.0 / float(row["images_per_s"])
    cost = row["usd_per_image"]
    return float(row["gpu_s_per_image"] if cost is None else cost)


def _order(request: Request, priced: Priced, row: Row) -> tuple[Any, ...]:
    """Best first; equals exact before stale, then by throughput, fewer chips, the plan's text."""
    value = float(f"{value_of(request, row):.9e}")
    return value, priced.split.is_stale, -row["images_per_s"], priced.split.chips, priced.split.label


def row_of(request: Request, setting: Setting, priced: Priced, one: float | None = None) -> Row:
    """A plan as the row that every table, CSV and JSON has (COLUMNS)."""
    split, latency, memory, job = priced.split, priced.latency, priced.memory, setting.job
    total = latency.total
    rate = split.dp * job.batch / total
    busy = {name: float(value) for name, value in zip(latency.parts._fields, latency.parts, strict=True)}
    gpu_s = request.gpus / rate
    fps = request.model.size.fps
    row: Row = dict.fromkeys(COLUMNS) | {
        "plan": split.label, "model": request.model.name, "hardware": request.hardware.name,
        "engine": request.sampler.name, "objective": request.objective, "weights": setting.weights,
        "gpus": request.gpus, "idle_gpus": request.gpus - split.chips, **split._asdict(),
        "width": job.width, "height": job.height, "frames": job.frames, "steps": job.steps,
        "warmup": job.warmup if split.is_stale else 0, "batch": job.batch,
        "tokens": grid_of(request.model, job).tokens, "text_tokens": request.model.text_tokens,
        "latency_ms": total / MS, "step_ms": latency.step / MS, "text_ms": latency.text / MS,
        "vae_ms": latency.vae / MS, "warmup_ms": latency.warmup / MS,
        **{f"{name}_ms": value / MS for name, value in busy.items()},
        "hidden_network_ms": latency.hidden / MS, "efficiency": latency.efficiency,
        "sent_gb_per_step": latency.sent / 1e9, "speedup": None if one is None else one / total,
        "images_per_s": rate, "video_s_per_s": None if fps is None else rate * job.frames / fps,
        "usd_per_image": None if request.price is None else request.price * gpu_s / HOUR, "gpu_s_per_image": gpu_s,
        "weights_gib": memory.weights / GIB, "encoders_gib": memory.encoders / GIB, "kv_gib": memory.kv / GIB,
        "activations_gib": memory.activations / GIB, "vae_gib": memory.vae / GIB, "other_gib": memory.other / GIB,
        "memory_gib": memory.total / GIB, "memory_limit_gib": limit_of(request) / GIB,
        "stale": stale_words(split), "bottleneck": max(busy, key=lambda name: busy[name]),
        "engine_version": request.sampler.version,
    }  # fmt: skip
    return row


def stale_words(split: Split) -> str | None:
    """What a method takes from the step before, in words; none where the image is the model's own."""
    if split.pipefusion > 1:
        share = (split.patches - 1) / 2 / split.patches
        return f"KV one step old: {share:.0%} of the patches on average"
    if split.distrifusion > 1:
        return f"KV one step old: {(split.distrifusion - 1) / split.distrifusion:.0%} of the image"
    return None


def _why_none(request: Request, refused: list[Refused]) -> str:
    """The sentence when no split is left."""
    if not refused:
        return "no split of this kind uses these chips: widen --tp, --ulysses, --ring, --pipefusion and the like"
    by = {rule: [one for one in refused if one.rule == rule] for rule in {one.rule for one in refused}}
    if "slo" in by:
        best = min(by["slo"], key=lambda one: float(one.reason.split()[1]))
        return f"no split keeps the limit: closest is {best.plan.label}, {best.reason}"
    if "memory" in by:
        least = min(by["memory"], key=lambda one: float(one.reason.split(" = ")[1].split()[0]))
        need = math.ceil(float(least.reason.split(" = ")[1].split()[0]))
        hint = "" if request.parallel_vae or "VAE's peak" not in least.reason else "; --parallel-vae shares the decoder"
        return (
            f"no split of {request.model.name} fits: {least.plan.label} needs least, {least.reason} "
            f"({need} GiB would do){hint}"
        )
    first = refused[0]
    return f"no split is left: {first.plan.label}: {first.reason}"
