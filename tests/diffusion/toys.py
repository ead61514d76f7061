"""A diffusion transformer small enough to count by hand, and settings to price it in."""

from __future__ import annotations

from typing import Any

from planner.diffusion.job import Job, job_of
from planner.diffusion.pricing import Setting
from planner.plans.placement import Placement
from planner.specs.catalog import load_diffusion, load_hardware, load_sampler
from planner.specs.diffusion import Diffusion
from planner.specs.structure import validated

TOY: dict[str, Any] = {
    "kind": "diffusion",
    "name": "toy",
    "hidden": 64,
    "heads": 8,
    "head_dim": 8,
    "blocks": [{"kind": "joint", "layers": 8, "ffn": 256}],
    "latent": {"channels": 4, "stride": 8, "patch": 2},
    "text": [],
    "decoder": {
        "parameters": 1000,
        "mflop_per_pixel": 1,
        "kb_per_pixel": 1,
        "bytes_per_pixel": 100,
        "provenance": {"status": "assumed", "source": "a toy"},
    },
    "size": {"width": 128, "height": 256},
    "steps": 10,
    "guidance": False,
    "weights": "bf16",
    "sources": ["a toy"],
}


def toy(**changes: Any) -> Diffusion:
    """The toy with other keys."""
    return validated(Diffusion, {**TOY, **changes}, "toy.yaml")


def setting(
    model: str | Diffusion, hardware: str = "h100", gpus: int = 8, engine: str = "ideal-dit", **job: Any
) -> Setting:
    """What a plan is priced in."""
    shapes = load_diffusion(model) if isinstance(model, str) else model
    sampler = load_sampler(engine)
    machine = load_hardware(hardware, sampler)
    made: Job = job_of(shapes, **{"warmup": sampler.warmup, **job})
    return Setting(shapes, machine, sampler, Placement.of(machine, gpus), made, shapes.weights)
