"""Software that runs diffusion transformers: which ways to split it has, what its host costs, how it is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from planner.specs.engine import CollectiveRule
from planner.specs.fields import Count, CountOrZero, Factor, GibOrZero, Micros, Provenance, Share

METHODS = ("cfg", "tp", "ulysses", "ring", "pipefusion", "distrifusion")
"""Ways to split one image over chips; copies (dp) any engine has."""
PLACEHOLDERS = ("model", "script", "width", "height", "frames", "steps", "warmup", "chips", "ulysses", "ring",
                "pipefusion", "patches", "tp")  # fmt: skip


class SamplerHost(NamedTuple):
    """Time in which the host launches a pass's kernels; the pass takes the longer of this and the chip's time."""

    provenance: Provenance
    stream_us: Micros = 0.0
    """A stream of a block: one for `single`, `joint` and `cross`, two for `double`."""
    ulysses_us: Micros = 0.0
    """What a block's exchange of heads for tokens adds."""
    ring_us: Micros = 0.0
    """What a block's ring adds, in place of `ulysses_us` where both are there."""
    hop_us: Micros = 0.0
    """What each hop of a ring costs on the chip beside its share of attention: sends that start, streams that wait."""
    step_us: Micros = 0.0
    """A pass besides: embedders, sampler, and in a pipeline taking in and handing on a patch."""


class SamplerMemory(NamedTuple):
    """Memory beside weights, buffers and activations."""

    provenance: Provenance
    fraction: Share
    """Share of the chip's memory that may be used."""
    context_gib: GibOrZero = 0.0
    """The driver's context, communicators, workspaces."""


class SamplerLaunch(NamedTuple):
    """How it is started; words such as `{ulysses}` stand for values of the plan."""

    source: str
    command: tuple[str, ...]
    degrees: dict[str, tuple[str, ...]] = {}
    """Arguments for a degree above 1, by method."""
    scripts: dict[str, str] = {}
    """By model."""
    video: tuple[str, ...] = ()
    """Further arguments for a video."""


class Sampler(NamedTuple):
    """An engine of diffusion transformers: those of `configs/engines/*.yaml` that say `kind: diffusion`."""

    kind: Literal["diffusion"]
    name: str
    version: str
    description: str
    methods: tuple[str, ...]
    host: SamplerHost
    memory: SamplerMemory
    collectives: tuple[CollectiveRule, ...]
    passes: Factor = 1.0
    """Traffic of kernels between the projections, against kernels that fuse all they can."""
    head_multiple: Count = 1
    """Elements to whose multiple the attention kernel pads a head: one of 72 costs as one of 96 where this is 32."""
    text_with_patches: bool = False
    """Under PipeFusion: whether the text runs through the blocks again with every patch, rather than once a step."""
    warmup: CountOrZero = 1
    """Steps without stale activations before a stale method begins."""
    without: dict[str, tuple[str, ...]] = {}
    """By model: methods that it has not for it."""
    aliases: tuple[str, ...] = ()
    chips: dict[str, dict[str, Any]] = {}
    """Overrides of a hardware file's keys under this engine, by the hardware's name."""
    notes: tuple[str, ...] = ()
    launch: SamplerLaunch | None = None
    unlaunched: str | None = None
    """Why there is no `launch`."""

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever a value is none of those that exist."""
        for key, methods in (("methods", self.methods), *((f"without.{n}", m) for n, m in self.without.items())):
            for index, method in enumerate(methods):
                if method not in METHODS:
                    yield f"{key}.{index}", f"found {method!r}, expected one of {', '.join(METHODS)}"
        if self.launch is not None:
            words = [*self.launch.command, *self.launch.video]
            words += [word for degree in self.launch.degrees.values() for word in degree]
            for word in words:
                if word.startswith("{") and word.strip("{}") not in PLACEHOLDERS:
                    yield "launch", f"{word} stands for nothing; expected one of {', '.join(PLACEHOLDERS)}"

    def has(self, method: str, model: str) -> bool:
        """Whether it can split a model so."""
        return method in self.methods and method not in self.without.get(model, ())
