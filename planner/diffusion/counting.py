"""Count: what a rank computes in one block for one patch, and what it sends. No time and no branch on a name.

A rank's rows are B (T_image + T_text) / (M sp): B passes at once (two with guidance that is not split), M patches,
sp = Ulysses x ring. Attention sees every token of the image, fresh or stale: 4 dh FLOPs a head and query-key pair.
Text tokens move with the first patch, so that over a step they count once; or, as the engine has it, run through the
blocks again with every patch, whose queries they are joined to.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.costs.layers import Formats, Operation, Transfer, gemm
from planner.diffusion.job import Job, grid_of
from planner.diffusion.plan import Split
from planner.specs.diffusion import Block, Diffusion
from planner.specs.dtypes import ACTIVATION_BYTES as ACT

NORM, QK, GATE = 2, 4, 3
"""Passes of a row's width over memory: a norm with its modulation reads and writes; the norms and rotation of queries
and keys read and write both; a gated residual reads two and writes one."""
EXCHANGE, MERGE = 16, 6
"""Passes that reorder Q, K, V and the output before and after an exchange of heads (read and write each); that merge
a hop's partial output, in 32 bit, into the sum."""


class Rows(NamedTuple):
    """Tokens of one pass over one patch on one rank, all passes that run at once counted."""

    image: float
    text: float
    """0 where the text does not run through the blocks."""
    keys: float
    """Tokens that a query attends to, for one of the passes."""
    condition: float
    """Tokens of text that blocks of kind `cross` attend to."""
    passes: float
    """Passes at once: the images of a batch, twice with guidance that is not split (B)."""
    patches: int = 1
    """Of the image."""
    repeated: bool = False
    """Whether `text` is all of the text, again with each patch; else a patch's share of it."""

    @property
    def all(self) -> float:
        """Rows through every projection of the blocks."""
        return self.image + self.text

    @property
    def handed(self) -> float:
        """Rows that go to the next stage, patches averaged: text goes once a step."""
        return self.image + (self.text / self.patches if self.repeated else self.text)

    @property
    def texts(self) -> tuple[float, float]:
        """(rows of text where it runs, in which share of the passes it does)."""
        return (self.text, 1.0) if self.repeated else (self.text * self.patches, 1.0 / self.patches)


def rows_of(model: Diffusion, job: Job, split: Split, patches: int | None = None, repeated: bool = False) -> Rows:
    """The rows of a patch.

    Args:
        model: the shapes.
        job: how large, how many.
        split: degrees.
        patches: 1 for the warm-up, whose pass takes the image whole; none = those of the split.
        repeated: whether text runs through the blocks with each patch.
    """
    passes = float(job.batch * (2 if model.guidance and split.cfg == 1 else 1))
    patches, cut = split.patches if patches is None else patches, split.sequence * split.distrifusion
    image, text = grid_of(model, job).tokens, model.text_tokens
    stream = text if model.in_stream else 0
    with_image, with_text = cut * patches, cut * (1 if repeated else patches)
    own = passes * image / with_image, passes * stream / with_text
    return Rows(*own, float(image + stream), float(text), passes, patches, repeated)


class Counted(NamedTuple):
    """One block: its operations, attention apart (a ring overlaps it), and the collectives that nothing hides."""

    operations: list[Operation]
    attention: list[Operation]
    transfers: list[tuple[str, Transfer]]
    """(`tp` or `ulysses`, what its group does)."""


def count_block(model: Diffusion, block: Block, rows: Rows, split: Split, formats: Formats, passes: float) -> Counted:
    """What one rank does in one block for one patch.

    Args:
        model: the shapes.
        block: which kind of block.
        rows: tokens of the patch.
        split: degrees.
        formats: number formats; weights are read as they are stored.
        passes: the engine's traffic between the projections, against fused kernels.
    """
    operations = _projections(model, block, rows, split, formats)
    operations += _elementwise(model, block, rows, split, formats, passes)
    width = model.hidden
    attention = _attention(model, block, rows, split, formats)
    local = rows.all * width * ACT / split.tp
    transfers = []
    reduces = {"single": 1, "cross": 3}.get(block.kind, 2) + block.second_attention
    if split.tp > 1:
        transfers.append(("tp", Transfer("all-reduce", "all_reduce", rows.all * width * ACT, times=reduces)))
    if split.ulysses > 1:
        times = 4 * (2 if block.second_attention else 1)
        transfers.append(("ulysses", Transfer("heads for tokens", "all_to_all", local, times=times)))
    return Counted(operations, attention, transfers)


def _projections(model: Diffusion, block: Block, rows: Rows, split: Split, formats: Formats) -> list[Operation]:
    """Products with the weights. Text rows of `double` blocks have weights of their own, read as often as text runs."""
    width, tp, each = model.hidden, split.tp, formats.weights.bytes
    ffn, inputs = block.ffn / tp, (2 if block.gated else 1) * block.ffn / tp
    local = width / tp

    def product(name: str, count: float, inner: float, outer: float, times: float = 1) -> Operation:
        made = gemm(name, count, inner, outer, inner * outer * each, formats.compute)
        return made if times == 1 else made._replace(times=times)

    streams = [("", rows.all if block.kind in ("single", "joint") else rows.image, 1.0)]
    if block.kind == "double" and rows.text:
        streams.append(("text ", *rows.texts))
    found = []
    for prefix, count, times in streams:
        if block.kind == "single":
            found += [product("qkv, up", count, width, 3 * local + ffn, times)]
            found += [product("out, down", count, local + ffn, width, times)]
            continue
        found += [
            product(f"{prefix}qkv", count, width, 3 * local, times),
            product(f"{prefix}out", count, local, width, times),
            product(f"{prefix}up", count, width, inputs, times),
            product(f"{prefix}down", count, ffn, width, times),
        ]
    if block.second_attention:
        found += [product("second qkv", rows.image, width, 3 * local), product("second out", rows.image, local, width)]
    if block.kind == "cross":
        text = rows.passes * rows.condition
        found += [
            product("cross q", rows.image, width, local),
            product("cross kv", text, block.text_width or width, 2 * local),
            product("cross out", rows.image, local, width),
        ]
    if block.modulation:
        vectors = block.modulation * (2 if block.kind == "double" else 1)
        found.append(product("modulation", rows.passes, block.conditioning or width, vectors * width))
    if block.skips:
        found.append(product("skip", rows.image, 2 * width, width, block.skips / block.layers))
    return found


def _attention(model: Diffusion, block: Block, rows: Rows, split: Split, formats: Formats) -> list[Operation]:
    """Attention of the patch over all tokens; Ulysses gives a rank all of its ring's rows and a share of the heads."""
    width = model.hidden / (split.tp * split.ulysses)
    queries, dtype = rows.all * split.ulysses, formats.native

    def over(name: str, count: float, keys: float, held: float, wide: float) -> Operation:
        moved = (2 * count + 2 * held) * wide * ACT
        return Operation(name, "attention_prefill", dtype, flops=4 * count * keys * wide, activation_bytes=moved)

    keys = rows.passes * rows.keys
    if block.linear:  # each head keeps a state of dh x dh: as dh keys to a query, twice
        found = [over("linear attention", queries, 2.0 * model.head_dim, 0.0, width)]
    else:
        found = [over("attention", queries, rows.keys, keys, width)]
    if block.second_attention:
        image = rows.image * split.ulysses
        found.append(over("second attention", image, rows.keys - rows.condition, keys, width))
    if block.kind == "cross":
        text = rows.passes * rows.condition
        found.append(over("cross attention", rows.image, rows.condition, text, model.hidden / split.tp))
    return found


def _elementwise(
    model: Diffusion, block: Block, rows: Rows, split: Split, formats: Formats, passes: float
) -> list[Operation]:
    """Memory-bound kernels between the projections; `passes` rows of the model's width each."""
    width, ffn = model.hidden, (2 if block.gated else 1) * block.ffn + block.ffn
    times = QK / split.tp + ffn / width / split.tp + 2 * GATE + 2 * NORM
    if block.kind == "double":
        times += 6.0 / split.tp  # Q, K and V of text and image are joined
    if block.kind == "single":
        times += 2 * (1 + block.ffn / width) / split.tp - GATE - NORM  # outputs of attention and FFN are joined
    if block.kind == "cross":
        times += GATE + 2.0 / split.tp
    if block.second_attention:
        times += NORM + QK / split.tp + GATE
    kernels = 8.0
    made = [
        Operation(
            "between", "elementwise", formats.native, times=kernels,
            activation_bytes=rows.all * width * ACT * times * passes / kernels,
        )
    ]  # fmt: skip
    if split.ulysses > 1:
        moved = EXCHANGE * rows.all * width / split.tp * ACT
        made.append(Operation("reorder", "elementwise", formats.native, times=4, activation_bytes=moved / 4))
    if split.ring > 1:
        moved = MERGE * rows.all * split.ulysses * width / (split.tp * split.ulysses) * 4.0
        made.append(Operation("merge", "elementwise", formats.native, times=split.ring - 1, activation_bytes=moved))
    return made


def count_ends(model: Diffusion, rows: Rows, formats: Formats) -> list[Operation]:
    """What a pass does outside the blocks: embedding of patches, text and time, the last projection."""
    each, found = formats.weights.plain_bytes, []
    patch = model.latent.channels * model.latent.patch**2 * model.latent.time_patch
    for embedder in model.embedders:
        count = rows.passes
        if patch in (embedder.widths[0], embedder.widths[-1]) and len(embedder.widths) == 2:
            count = rows.image
        for inner, outer in zip(embedder.widths, embedder.widths[1:], strict=False):
            found.append(gemm(embedder.what, count, inner, outer, inner * outer * each, formats.native))
    return found


def ring_bytes(model: Diffusion, rows: Rows, split: Split) -> float:
    """Bytes of keys and values that a rank hands on in one hop of a block's ring."""
    return 2 * rows.all * split.ulysses * model.hidden / (split.tp * split.ulysses) * ACT


def patch_bytes(model: Diffusion, rows: Rows) -> float:
    """Bytes of a patch's activations, which a rank of a stage hands to its like in the next."""
    return rows.handed * model.hidden * ACT


def latent_bytes(model: Diffusion, job: Job) -> float:
    """Bytes of a predicted noise, which the halves of CFG exchange each step."""
    latent = model.latent
    patch = latent.channels * latent.patch**2 * latent.time_patch
    return job.batch * grid_of(model, job).tokens * patch * ACT


class Volume(NamedTuple):
    """A row of table 1 of the PipeFusion paper, elements and shares; A and KV are those of one block, whole image."""

    communication: float
    """Elements times algorithm bandwidth factor of one chip in one step, (n - 1) / n taken as 1."""
    overlaps: str
    """What it hides behind: nothing, attention, or the whole forward pass."""
    parameters: float
    """Share of the parameters on a chip."""
    buffers: float
    """KV that a chip keeps, in units of one block's KV."""
    fresh: bool


def volumes(tokens: float, width: float, layers: int, chips: int) -> dict[str, Volume]:
    """Communication and memory of each method alone over `chips` chips (arXiv 2405.14430, table 1).

    PipeFusion counts what a stage takes in and hands on. It sends less than Ulysses exactly where chips < 2 layers.
    """
    whole = tokens * width
    return {
        "tp": Volume(4 * whole * layers, "nothing", 1 / chips, 1 / chips, True),
        "distrifusion": Volume(2 * whole * layers, "forward", 1.0, float(layers), False),
        "ring": Volume(2 * whole * layers, "attention", 1.0, 1 / chips, True),
        "ulysses": Volume(4 / chips * whole * layers, "nothing", 1.0, 1 / chips, True),
        "pipefusion": Volume(2 * whole, "forward", 1 / chips, layers / chips, False),
    }


def pipeline_efficiency(patches: int, steps: int, stages: int) -> float:
    """Share of the time in which a stage works: M S / (M S + N - 1), where M is at least N.

    With fewer patches than stages each step waits until its first patch is through: N in place of M below.
    """
    return patches * steps / (max(patches, stages) * steps + stages - 1)
