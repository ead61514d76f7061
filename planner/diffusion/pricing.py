"""Price: seconds of a step under a plan, and of the whole image with what runs once; with the network where it hides.

The rooflines and collectives are those of language models (`costs`), with the hardware's constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from planner.costs.collectives import Network
from planner.costs.layers import Formats, Operation
from planner.costs.roofline import Parts, price_operation
from planner.diffusion.counting import (
    Counted,
    Rows,
    count_block,
    count_ends,
    latent_bytes,
    patch_bytes,
    ring_bytes,
    rows_of,
)
from planner.diffusion.job import Job
from planner.diffusion.plan import Split
from planner.plans.placement import Placement
from planner.specs.diffusion import Block, Diffusion
from planner.specs.dtypes import ACTIVATION_BYTES, weight_dtype
from planner.specs.hardware import Hardware
from planner.specs.sampler import Sampler
from planner.units import US

CONVOLUTION = 0.35
"""Share of the 16-bit peak that the decoder's convolutions reach (assumed)."""
STREAMING = 0.8
"""Share of the memory bandwidth that its kernels reach (assumed, as other element-wise kernels)."""


@dataclass(frozen=True)
class Setting:
    """What all plans of a request share."""

    model: Diffusion
    hardware: Hardware
    sampler: Sampler
    placement: Placement
    job: Job
    weights: str
    parallel_vae: bool = False

    @cached_property
    def formats(self) -> Formats:
        """Number formats: weights as stored, attention and what lies between in 16 bit."""
        dtype, chip = weight_dtype(self.weights), self.hardware.chip
        return Formats(dtype, weight_dtype("bf16"), chip.compute_dtype(dtype.compute), chip.native_dtype)

    @cached_property
    def known(self) -> dict[Any, Any]:
        """Blocks that have been priced, by what decides their cost."""
        return {}

    @cached_property
    def network(self) -> Network:
        """What prices collectives."""
        return Network(self.placement, self.sampler)


class Pass(NamedTuple):
    """One pass of the slowest stage over one patch."""

    parts: Parts
    """What is waited for, without what hides."""
    hidden: float
    """Seconds of network behind compute."""
    sent: float
    """Bytes that a rank sends to others of its stage."""
    items: dict[str, Parts]
    """The same by operation, before hidden time of the host is set off."""


class Latency(NamedTuple):
    """Seconds of one image (or batch) by what is waited for, and its phases."""

    parts: Parts
    hidden: float
    step: float
    """Of one step after the warm-up."""
    text: float
    vae: float
    warmup: float
    efficiency: float
    """Share of the pipeline's time after the warm-up in which a stage works; 1 where there is none."""
    sent: float
    """Bytes that the busiest rank sends in a step after the warm-up."""
    items: dict[str, Parts]

    @property
    def total(self) -> float:
        """Seconds from the prompt to the pixels."""
        return float(self.parts.total)


def stages_of(model: Diffusion, stages: int) -> list[list[tuple[Block, int]]]:
    """Blocks of each pipeline stage, contiguous, as evenly as they divide: (kind of block, how many)."""
    whole, more = divmod(model.depth, stages)
    found: list[list[tuple[Block, int]]] = []
    queue = [(block, block.layers) for block in model.blocks]
    for stage in range(stages):
        wanted, own = whole + (stage < more), []
        while wanted:
            block, left = queue[0]
            taken = min(left, wanted)
            own.append((block, taken))
            wanted -= taken
            queue[0] = (block, left - taken)
            if not queue[0][1]:
                queue.pop(0)
        found.append(own)
    return found


def transfer_seconds(setting: Setting, op: str, ranks: int, stride: int, size: float) -> float:
    """Seconds of a collective over ranks that lie `stride` chips apart.

    A group whose chips all lie in one domain is as one of neighbours; one that leaves it is priced as the group of all
    chips that it spans, whose every member sends: the boundary is shared with the other groups between them.
    """
    extent = ranks * stride
    inside = setting.placement.span(np.asarray(extent)) == 0
    return float(setting.network.seconds(op, ranks if inside else extent, size))


class _Block(NamedTuple):
    """One block of a kind on one rank."""

    items: dict[str, Parts]
    hidden: float
    sent: float
    host_us: float


def _block(setting: Setting, split: Split, block: Block, rows: Rows) -> _Block:
    """What a block costs; the same block of the same rows stands in many plans and stages, and is priced once."""
    key = (block, rows, split._replace(cfg=1, pipefusion=1, dp=1))
    if key not in setting.known:
        setting.known[key] = _price_block(setting, split, block, rows)
    known: _Block = setting.known[key]
    return known


def _price_block(setting: Setting, split: Split, block: Block, rows: Rows) -> _Block:
    counted = count_block(setting.model, block, rows, split, setting.formats, setting.sampler.passes)
    items: dict[str, Parts] = {}
    for operation in counted.operations:
        _add(items, operation.name, _price(setting, operation))
    seen, hidden, sent = _attend(setting, counted, rows, split)
    for name, parts in seen.items():
        _add(items, name, parts)
    for group, transfer in counted.transfers:
        ranks, stride = (split.tp, 1) if group == "tp" else (split.ulysses, split.tp)
        seconds = transfer.times * transfer_seconds(setting, transfer.op, ranks, stride, float(transfer.bytes))
        _add(items, transfer.name, Parts(network=seconds))
        factor = 2.0 if transfer.op == "all_reduce" else 1.0
        sent += factor * (ranks - 1) / ranks * float(transfer.bytes) * transfer.times
    return _Block(items, hidden, sent, _launches(setting.sampler, block, split))


def _add(items: dict[str, Parts], name: str, parts: Parts) -> None:
    items[name] = items[name] + parts if name in items else parts


def pass_of(setting: Setting, split: Split, blocks: list[tuple[Block, int]], rows: Rows, ends: bool = True) -> Pass:
    """One pass of one stage over one patch, with the ring hidden behind attention as far as that is long enough."""
    key = (tuple(blocks), rows, split._replace(cfg=1, dp=1), ends)  # stages of a pipeline are mostly alike
    if key not in setting.known:
        setting.known[key] = _price_pass(setting, split, blocks, rows, ends)
    known: Pass = setting.known[key]
    return known


def _price_pass(setting: Setting, split: Split, blocks: list[tuple[Block, int]], rows: Rows, ends: bool) -> Pass:
    items: dict[str, Parts] = {}
    hidden = sent = 0.0
    host = setting.sampler.host.step_us
    for block, count in blocks:
        one = _block(setting, split, block, rows)
        for name, parts in one.items.items():
            _add(items, name, parts * count)
        hidden, sent, host = hidden + one.hidden * count, sent + one.sent * count, host + one.host_us * count
    if ends:
        _add(items, "embedding, output", _ends(setting, rows))
    total = sum(items.values(), Parts())
    waits = max(0.0, host * US - float(total.total))
    if waits:
        items["host"] = Parts(overhead=waits)
        total = total + items["host"]
    return Pass(total, hidden, sent, items)


def _ends(setting: Setting, rows: Rows) -> Parts:
    """What a pass does outside the blocks."""
    if rows not in setting.known:
        priced = (_price(setting, operation) for operation in count_ends(setting.model, rows, setting.formats))
        setting.known[rows] = sum(priced, Parts())
    known: Parts = setting.known[rows]
    return known


def _launches(sampler: Sampler, block: Block, split: Split) -> float:
    """Microseconds in which the host launches one block."""
    host = sampler.host
    streams = (2 if block.kind == "double" else 1) + (1 if block.second_attention else 0)
    found = host.stream_us * streams
    own = [host.ulysses_us] if split.ulysses * split.distrifusion > 1 else []
    own += [host.ring_us] if split.ring > 1 else []
    return found + max(own, default=0.0)


def _attend(setting: Setting, counted: Counted, rows: Rows, split: Split) -> tuple[dict[str, Parts], float, float]:
    """(attention and the seen part of the ring by item, hidden seconds, bytes sent) of one block.

    A ring of r ranks computes on one share of keys while the next comes in: r shares, r - 1 hops (Ring Attention).
    """
    items: dict[str, Parts] = {}
    padded = _padding(setting)
    for operation in counted.attention:
        parts = _price(setting, operation._replace(flops=operation.flops * padded))
        items[operation.name] = items[operation.name] + parts if operation.name in items else parts
    if split.ring == 1:
        return items, 0.0, 0.0
    first = counted.attention[0]
    ring = split.ring
    piece = _price(setting, first._replace(flops=first.flops * padded / ring))
    each = ring_bytes(setting.model, rows, split)
    hop = setting.network.neighbours(each, split.tp * split.ulysses, ring)
    items[first.name] = piece * ring
    exposed = max(0.0, hop - float(piece.total))
    items["ring"] = Parts(network=exposed * (ring - 1), overhead=setting.sampler.host.hop_us * US * (ring - 1))
    return items, (hop - exposed) * (ring - 1), each * (ring - 1)


def _padding(setting: Setting) -> float:
    """FLOPs of the attention kernel against those of the heads themselves."""
    multiple, dim = setting.sampler.head_multiple, setting.model.head_dim
    return -(-dim // multiple) * multiple / dim


def _price(setting: Setting, operation: Operation) -> Parts:
    """An operation's seconds, as plain numbers."""
    return Parts(*(float(value) for value in price_operation(setting.hardware, operation)))


def latency_of(setting: Setting, split: Split) -> Latency:
    """Seconds of one image under a plan that its rules allow."""
    model, job = setting.model, setting.job
    stages = stages_of(model, split.pipefusion)
    warm = min(job.warmup, job.steps) if split.is_stale else 0
    patch = rows_of(model, job, split, repeated=setting.sampler.text_with_patches)
    passes = [pass_of(setting, split, blocks, patch, ends=index == 0) for index, blocks in enumerate(stages)]
    slowest = max(passes, key=lambda each: float(each.parts.total))
    hidden, sent, parts, items = slowest.hidden, slowest.sent, slowest.parts, dict(slowest.items)
    stride = split.tp * split.sequence
    if split.pipefusion > 1:
        move = setting.network.neighbours(patch_bytes(model, patch) * _handed(model, split), stride, split.pipefusion)
        seen = max(0.0, move - float(parts.total))
        items["patches"] = Parts(network=seen)
        parts, hidden = parts + Parts(network=seen), hidden + move - seen
        sent += patch_bytes(model, patch) * _handed(model, split)
    if split.distrifusion > 1:
        ranks = split.distrifusion
        size = 2 * patch.all * ranks * model.hidden * ACTIVATION_BYTES
        gather = model.depth * transfer_seconds(setting, "all_gather", ranks, 1, size)
        seen = max(0.0, gather - float(parts.total))
        items["all-gather of KV"] = Parts(network=seen)
        parts, hidden = parts + Parts(network=seen), hidden + gather - seen
        sent += model.depth * size * (ranks - 1) / ranks
    micro = max(split.patches, split.pipefusion) if split.pipefusion > 1 else 1
    busy = split.patches if split.pipefusion > 1 else 1
    after = job.steps - warm
    whole = parts * float(busy * after)
    items = {name: each * float(busy * after) for name, each in items.items()}
    bubbles = ((micro - busy) * after + (split.pipefusion - 1) * (after > 0)) * float(parts.total)
    hidden, sent = hidden * busy * after, sent * busy
    items["bubbles"] = Parts(bubble=bubbles)
    efficiency = 1.0 if split.pipefusion == 1 or not after else busy * after / (micro * after + split.pipefusion - 1)
    warmup = Parts()
    if warm:
        warmup = _warmup(setting, split, stages) * float(warm)
        items["warm-up"] = warmup
    exchange = 0.0
    if split.cfg == 2:
        chips = split.replica_chips // 2
        exchange = job.steps * setting.network.neighbours(latent_bytes(model, job), chips, 2)
        items["CFG exchange"] = Parts(network=exchange)
        sent += latent_bytes(model, job)
    text, vae = _text(setting), _decode(setting, split)
    items |= {"text encoders": text, "VAE": vae}
    total = whole + warmup + text + vae + Parts(network=exchange, bubble=bubbles)
    step = (float(parts.total) * micro) + exchange / job.steps
    return Latency(
        total, hidden, step, float(text.total), float(vae.total), float(warmup.total), efficiency, sent,
        {name: each for name, each in items.items() if float(each.total) > 0},
    )  # fmt: skip


def _handed(model: Diffusion, split: Split) -> float:
    """Patches' worth that the busiest stage hands on: its own output, and those of its blocks that skip ahead."""
    skips = sum(block.skips for block in model.blocks)
    return 1.0 + skips / max(1.0, split.pipefusion / 2) if split.pipefusion > 1 else 0.0


def _warmup(setting: Setting, split: Split, stages: list[list[tuple[Block, int]]]) -> Parts:
    """One step without stale activations: PipeFusion's stages take the whole image one after the other; DistriFusion
    gathers keys and values before each attention."""
    rows = rows_of(setting.model, setting.job, split, patches=1)
    serial = split._replace(patches=1)
    total = Parts()
    for index, blocks in enumerate(stages):
        total = total + pass_of(setting, serial, blocks, rows, ends=index == 0).parts
    if split.pipefusion > 1:
        move = setting.network.neighbours(patch_bytes(setting.model, rows), split.tp * split.sequence, split.pipefusion)
        total = total + Parts(network=move * (split.pipefusion - 1))
    if split.distrifusion > 1:
        size = 2 * rows.all * split.distrifusion * setting.model.hidden * ACTIVATION_BYTES
        gather = transfer_seconds(setting, "all_gather", split.distrifusion, 1, size)
        total = total + Parts(network=setting.model.depth * gather)
    return total


def _text(setting: Setting) -> Parts:
    """The text encoders, on every chip alike: 2 FLOPs a parameter and token, weights read once."""
    total = Parts()
    passes = setting.job.batch * (2 if setting.model.guidance else 1)
    for encoder in setting.model.text:
        tokens = passes * (encoder.runs or encoder.tokens or 77)
        operation = Operation(
            "text", "gemm", setting.formats.native,
            flops=2.0 * encoder.parameters * tokens, weight_bytes=encoder.parameters * ACTIVATION_BYTES,
        )  # fmt: skip
        total = total + _price(setting, operation)
    return total


def _decode(setting: Setting, split: Split) -> Parts:
    """The VAE's decoder: on one chip while the others wait, or over all of a replica."""
    chip, decoder = setting.hardware.chip, setting.model.decoder
    flops = decoder.mflop_per_pixel * 1e6 * setting.job.pixels * setting.job.batch
    traffic = decoder.kb_per_pixel * 1e3 * setting.job.pixels * setting.job.batch
    share = split.replica_chips if setting.parallel_vae else 1
    compute = flops / share / (CONVOLUTION * chip.peak(chip.native_dtype))
    memory = traffic / share / (STREAMING * chip.memory_bandwidth)
    return Parts(compute=compute) if compute > memory else Parts(memory=memory)
