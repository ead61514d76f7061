"""Diffusion transformers: shapes of the backbone that is run once a denoising step, and what runs before and after it.

Parameter counts are derived, never stored, as for language models. Widths are elements, strides pixels or frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Le

from planner.specs.dtypes import WEIGHTS
from planner.specs.fields import Count, CountOrZero, Provenance, Tokens
from planner.specs.model import Published

BLOCKS = ("double", "single", "joint", "cross")
"""How text and image meet in a block:

* `double`: weights of their own for text and image, one attention over both (MM-DiT);
* `single`: one stream of both, attention and FFN side by side with one input and one output projection (Flux);
* `joint`: one stream of both, attention then FFN (CogVideoX);
* `cross`: the image alone, which attends to itself, then to the text (PixArt, Wan).
"""


class Block(NamedTuple):
    """Successive blocks of one kind, with a bias on every projection."""

    kind: Literal["double", "single", "joint", "cross"]
    layers: Count
    ffn: Count
    """Hidden width of the FFN, two matrices (three where `gated`)."""
    gated: bool = False
    modulation: CountOrZero = 0
    """Vectors of the model's width that each stream of a block projects from the conditioning (adaLN)."""
    conditioning: Count | None = None
    """Width that they are projected from; none = the model's."""
    elements: CountOrZero = 0
    """Further parameters of a stream: learned norms, norms of queries and keys, tables of modulation."""
    second_attention: bool = False
    """The image stream attends to itself a second time, without the text."""
    text_ends: bool = False
    """double: the last of these blocks has no output for the text, hence neither its projection nor an FFN."""
    skips: CountOrZero = 0
    """Of these blocks, how many take in an earlier one's output besides (U-ViT): a projection of twice the width."""
    text_width: Count | None = None
    """cross: width of what keys and values of the text are projected from; none = the model's."""
    linear: bool = False
    """cross: the attention of the image to itself is linear, its cost does not grow with the square of the tokens."""


class Embedder(NamedTuple):
    """Projections with bias one after another, outside the blocks: [64, 3072] is one of 64 x 3072."""

    what: str
    widths: tuple[Count, ...]
    times: Count = 1
    bias: bool = True


class Latent(NamedTuple):
    """From pixels and frames to tokens."""

    channels: Count
    stride: Count
    """Pixels of a latent pixel's side (the VAE's factor)."""
    patch: Count
    """Latent pixels of a token's side."""
    time_stride: Count = 1
    """Frames of a latent frame; the first frame has one of its own (causal VAE)."""
    time_patch: Count = 1

    @property
    def multiple(self) -> int:
        """Pixels of a token's side."""
        return self.stride * self.patch


class TextEncoder(NamedTuple):
    """A network that runs once before the first step."""

    name: str
    parameters: Annotated[int, Ge(1)]
    tokens: CountOrZero
    """Tokens that it hands to the backbone; 0 = a pooled vector only."""
    runs: Tokens | None = None
    """Tokens that it computes; none = those it hands over, or 77."""


class Decoder(NamedTuple):
    """The VAE's decoder, which runs once after the last step."""

    parameters: Annotated[int, Ge(1)]
    mflop_per_pixel: Annotated[float, Gt(0), Le(1e4), "MFLOP for each pixel of each frame"]
    kb_per_pixel: Annotated[float, Gt(0), Le(1e5), "kB (10^3 B) read and written for each pixel of each frame"]
    bytes_per_pixel: Annotated[float, Gt(0), Le(1e6), "bytes at its peak for each pixel"]
    """Of all frames that are decoded at once."""
    provenance: Provenance
    frames: Count = 1
    """Frames that are decoded at once (tiles in time)."""


class Size(NamedTuple):
    """What is made when it is not said."""

    width: Count
    height: Count
    frames: Count = 1
    fps: Annotated[float, Gt(0), Le(240), "frames per second"] | None = None
    """none = images."""


class Diffusion(NamedTuple):
    """A diffusion transformer: those of `configs/models/*.yaml` that say `kind: diffusion`."""

    kind: Literal["diffusion"]
    name: str
    hidden: Count
    heads: Count
    head_dim: Count
    blocks: tuple[Block, ...]
    latent: Latent
    text: tuple[TextEncoder, ...]
    decoder: Decoder
    size: Size
    steps: Count
    guidance: bool
    """Classifier-free guidance: each step runs the backbone twice, with the prompt and without."""
    weights: str
    """Native dtype of the weights."""
    sources: tuple[str, ...]
    embedders: tuple[Embedder, ...] = ()
    elements: CountOrZero = 0
    """Parameters of the backbone that belong neither to a block nor to an embedder."""
    aliases: tuple[str, ...] = ()
    hf_ids: tuple[str, ...] = ()
    published: Published | None = None
    stale_limit: str | None = None
    """What was published of the quality of stale methods with this model; none = nothing that we know."""
    unverified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever keys cannot hold together, or a value is none of those that exist."""
        if self.weights not in WEIGHTS:
            yield "weights", f"found {self.weights!r}, expected one of {', '.join(WEIGHTS)}"
        if not self.blocks:
            yield "blocks", "is empty, expected at least one kind of block"
        if self.heads * self.head_dim != self.hidden:
            yield "head_dim", f"found {self.head_dim}, expected hidden / heads = {self.hidden / self.heads:g}"
        for index, block in enumerate(self.blocks):
            if block.skips > block.layers:
                yield f"blocks.{index}.skips", f"found {block.skips}, expected at most layers = {block.layers}"
            if block.text_ends and block.kind != "double":
                yield f"blocks.{index}.text_ends", f"a block of kind {block.kind} has one stream, which does not end"
            for key in ("linear", "text_width"):
                if getattr(block, key) and block.kind != "cross":
                    yield f"blocks.{index}.{key}", f"belongs to blocks of kind cross, this one is {block.kind}"
        if self.size.fps is None and self.size.frames > 1:
            yield "size.fps", "missing; expected the frames per second of a video"
        for index, embedder in enumerate(self.embedders):
            if len(embedder.widths) < 2:
                yield f"embedders.{index}.widths", "expected at least two widths, as [64, 3072]"

    @property
    def is_video(self) -> bool:
        """Whether it makes moving pictures."""
        return self.size.fps is not None

    @property
    def depth(self) -> int:
        """Blocks in all."""
        return sum(block.layers for block in self.blocks)

    @property
    def text_tokens(self) -> int:
        """Tokens of text that the backbone takes in."""
        return sum(encoder.tokens for encoder in self.text)

    @property
    def in_stream(self) -> bool:
        """Whether the text's tokens run through the blocks beside those of the image."""
        return any(block.kind != "cross" for block in self.blocks)
