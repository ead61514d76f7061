"""What must be computed: the shapes of a decoder-only transformer. Parameter counts are derived, never stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from planner.specs.dtypes import WEIGHTS
from planner.specs.fields import Count, CountOrZero, Tokens


class Attention(NamedTuple):
    """Multi-head (kv_heads = heads), grouped-query or multi-query (kv_heads = 1) attention."""

    heads: Count
    kv_heads: Count
    head_dim: Count
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    """One norm of head_dim for queries and one for keys, shared by the heads."""
    window: Tokens | None = None
    """Sliding window of every layer: a token sees this many, itself included."""


class FeedForward(NamedTuple):
    """gated = three matrices (gate, up, down), else two."""

    hidden: Count
    gated: bool
    activation: str
    bias: bool = False

    @property
    def inputs(self) -> int:
        """Matrices from the residual width to the hidden width."""
        return 2 if self.gated else 1


class Norm(NamedTuple):
    """Normalisation: how many per layer and at the end."""

    kind: Literal["rmsnorm", "layernorm"]
    per_layer: Count
    final: CountOrZero = 1
    bias: bool = False

    @property
    def vectors(self) -> int:
        """Vectors of the model's width in one norm."""
        return 2 if self.bias else 1


class Published(NamedTuple):
    """The count that the maker or the checkpoint states."""

    parameters: Annotated[int, Ge(1)]
    precision: Literal["exact", "rounded"]
    source: str
    digits: Count | None = None
    """Significant digits of a rounded count."""
    includes_lm_head_copy: bool = False
    unverified: bool = False


class Model(NamedTuple):
    """A language model: `configs/models/*.yaml`."""

    name: str
    layers: Count
    hidden: Count
    attention: Attention
    ffn: FeedForward
    norm: Norm
    vocab: Count
    tied_embeddings: bool
    max_context: Tokens
    weights: str
    """Native dtype of the weights."""
    sources: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    hf_ids: tuple[str, ...] = ()
    parallel_block: bool = False
    """Attention and FFN read the same normalised input and are added: one all-reduce a layer instead of two."""
    learned_positions: CountOrZero = 0
    """Rows of a learned position table; 0 = rotary or none."""
    published: Published | None = None
    unverified: tuple[str, ...] = ()
    """Facts of this file that no primary source was read for."""
    notes: tuple[str, ...] = ()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever keys cannot hold together, or a value is none of those that exist."""
        if self.weights not in WEIGHTS:
            yield "weights", f"found {self.weights!r}, expected one of {', '.join(WEIGHTS)}"
        if self.attention.heads % self.attention.kv_heads:
            found = f"found {self.attention.kv_heads}, expected a divisor of attention.heads = {self.attention.heads}"
            yield "attention.kv_heads", found

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the KV cache over all layers and KV heads: 2 L KV dh."""
        return 2 * self.layers * self.attention.kv_heads * self.attention.head_dim
