"""Parameters of a diffusion transformer, derived from its shapes. Formulas: the modules of diffusers and of the makers.

With D the width, f the FFN's, m the modulation's vectors, each from a conditioning vector of width c, every projection
with a bias: a stream has m (c D + D) + 4 (D^2 + D) + (D f + f) + (f D + D), and f in place of D once more where gated.
"""

from __future__ import annotations

from planner.specs.diffusion import Block, Diffusion


def parameters(model: Diffusion) -> int:
    """Parameters of the whole backbone."""
    return sum(block_parameters(model, block) for block in model.blocks) + end_parameters(model)


def end_parameters(model: Diffusion) -> int:
    """Parameters outside the blocks: embedders of patches, time, text; the last modulation and projection."""
    total = model.elements
    for embedder in model.embedders:
        pairs = zip(embedder.widths, embedder.widths[1:], strict=False)
        total += embedder.times * sum(a * b + (b if embedder.bias else 0) for a, b in pairs)
    return total


def block_parameters(model: Diffusion, block: Block) -> int:
    """Parameters of all blocks of one kind."""
    width, ffn = model.hidden, block.ffn
    square = width * width + width
    modulation = block.modulation * ((block.conditioning or width) * width + width)
    attention = 4 * square
    inner = (2 if block.gated else 1) * (width * ffn + ffn) + ffn * width + width
    stream = modulation + attention + inner + block.elements
    if block.kind == "double":
        each = 2 * stream
    elif block.kind == "single":
        each = modulation + 3 * square + (width * ffn + ffn) + (width + ffn) * width + width + block.elements
    elif block.kind == "joint":
        each = stream
    else:
        text = block.text_width or width
        each = stream + 2 * square + 2 * (text * width + width)
    total = block.layers * each + block.skips * (2 * width * width + width)
    if block.second_attention:  # three more vectors of modulation, and norms of its own
        total += block.layers * (3 * (width * width + width) + attention + block.elements)
    if block.text_ends:  # the last block's text has keys, values and queries only, and two vectors of modulation
        total -= (block.modulation - 2) * square + square + inner
    return total
