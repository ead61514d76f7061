"""Memory of one chip: weights, keys and values that stale methods keep, activations or the VAE at its peak."""

from __future__ import annotations

from typing import NamedTuple

from planner.diffusion.counting import rows_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Setting, stages_of
from planner.diffusion.weights import block_parameters, end_parameters
from planner.specs.diffusion import Block
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.units import GIB


class Memory(NamedTuple):
    """Bytes on the fullest chip."""

    weights: float
    """Of the backbone."""
    encoders: float
    """Text encoders and the VAE, whole on each chip, in 16 bit."""
    kv: float
    """Buffers of keys and values of all tokens, which stale methods keep from step to step."""
    activations: float
    """At the peak of a pass, in the widest block."""
    vae: float
    """At the peak of decoding, when the activations are gone."""
    other: float

    @property
    def total(self) -> float:
        """The fullest moment: a pass, or the decoder after the last."""
        return self.weights + self.encoders + self.kv + max(self.activations, self.vae) + self.other


def memory_of(setting: Setting, split: Split) -> Memory:
    """What the fullest chip holds under a plan.

    A pipeline stage keeps the KV of its own blocks over the whole image, however the ring cuts a patch; Ulysses and
    tensor parallelism keep a share of the heads. DistriFusion keeps all blocks' KV on every chip, and a second set that
    is being gathered while the first is read.
    """
    model, job, formats = setting.model, setting.job, setting.formats
    stages = stages_of(model, split.pipefusion)
    each = formats.weights.bytes

    def of(blocks: list[tuple[Block, int]]) -> float:
        return sum(block_parameters(model, block) * count / block.layers for block, count in blocks)

    weights = max(map(of, stages)) / split.tp * each
    weights += end_parameters(model) * formats.weights.plain_bytes
    encoders = (sum(encoder.parameters for encoder in model.text) + model.decoder.parameters) * ACT
    first = rows_of(model, job, split, patches=1)  # of the warm-up, which takes the image whole
    whole = first.passes * first.keys
    kv = 0.0
    if split.pipefusion > 1:
        depth = max(sum(count for _, count in blocks) for blocks in stages)
        kv = 2 * whole * model.hidden * ACT * depth / (split.tp * split.ulysses)
    if split.distrifusion > 1:
        kv = 2 * 2 * whole * model.hidden * ACT * model.depth  # one set is read while the next one lands
    widest = max(block.ffn * (2 if block.gated else 1) / model.hidden for block in model.blocks)
    activations = first.all * model.hidden * ACT * (2 + (4 + 2 * widest) / split.tp)
    decoder = model.decoder
    pixels = job.width * job.height * min(job.frames, decoder.frames) * job.batch
    vae = decoder.bytes_per_pixel * pixels / (split.replica_chips if setting.parallel_vae else 1)
    return Memory(weights, encoders, kv, activations, vae, setting.sampler.memory.context_gib * GIB)
