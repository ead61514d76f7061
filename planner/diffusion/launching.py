"""The lines that start a plan under an engine of diffusion transformers, a line a node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from planner.diffusion.job import Job
from planner.diffusion.plan import Split
from planner.errors import NoPlanError
from planner.specs.diffusion import Diffusion
from planner.specs.hardware import Hardware
from planner.specs.sampler import METHODS, Sampler


def lines(
    model: Diffusion, hardware: Hardware, sampler: Sampler, split: Split, job: Job, weights: str | None = None
) -> list[str]:
    """One shell line for each node of one replica; copies run the same with other chips.

    Raises:
        NoPlanError: the engine is not started so, has no script for the model or word for a method, or the weights are
            not the model's own.
    """
    if weights not in (None, model.weights):
        raise NoPlanError(
            f"engine {sampler.name} cannot load {weights} weights; its scripts load the model's own, {model.weights}"
        )
    launch = sampler.launch
    if launch is None:
        raise NoPlanError(f"engine {sampler.name} has no command: {sampler.unlaunched or 'it is a bound'}")
    script = launch.scripts.get(model.name)
    if script is None:
        raise NoPlanError(f"engine {sampler.name} has no script for {model.name} that we know of")
    for method in METHODS:
        if getattr(split, method) > 1 and method not in launch.degrees:
            raise NoPlanError(f"engine {sampler.name} has no option for {method} that we know of: {split.label}")
    chips, host = split.replica_chips, hardware.host_chips or split.replica_chips
    nodes = -(-chips // host)
    values = {
        **split._asdict(), "model": (model.hf_ids or (model.name,))[0], "script": script, "width": job.width,
        "height": job.height, "frames": job.frames, "steps": job.steps, "warmup": job.warmup,
        "chips": -(-chips // nodes),
    }  # fmt: skip
    words = [*launch.command, *(launch.video if model.is_video else ())]
    for method, arguments in launch.degrees.items():
        if getattr(split, method) > 1:
            words += arguments
    filled = [word.format(**values) for word in words]
    if nodes == 1:
        return [_line(filled)]
    first, *rest = filled
    return [
        _line([first, f"--nnodes={nodes}", f"--node_rank={node}", "--master_addr=$HEAD", *rest])
        for node in range(nodes)
    ]


def _line(words: Sequence[str]) -> str:
    """Words as a shell reads them; `$HEAD` stays the address of the first node."""
    return " ".join(word if word.endswith("$HEAD") else shlex.quote(word) for word in words)
