"""What must be computed: the shapes of a decoder-only transformer. Parameter counts are derived, never stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge

from planner.specs.dtypes import WEIGHTS
from planner.specs.fields import Count, CountOrZero, Tokens


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2): the cache holds one compressed vector per token for all heads."""

    kv_rank: Count
    rope_dim: Count
    nope_dim: Count
    value_dim: Count
    query_rank: Count | None = None
    """Width of the compressed query; none = queries are projected directly."""

    @property
    def cached(self) -> int:
        """Elements of the KV cache per token and layer."""
        return self.kv_rank + self.rope_dim


class Attention(NamedTuple):
    """Multi-head (kv_heads = heads), grouped-query, multi-query (kv_heads = 1) or latent attention."""

    heads: Count
    kv_heads: Count
    head_dim: Count
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head_dim", "heads"] | None = None
    """Norms of queries and keys: one of head_dim that the heads share, or one over all heads."""
    output_gate: bool = False
    """The query projection also yields a gate for the output: twice as wide."""
    sinks: bool = False
    """A learned sink per head."""
    window: Tokens | None = None
    """Tokens that a token sees in the layers that `attention_pattern` calls `window`, itself included."""
    blocks: bool = False
    """Whether the window does not slide: a token sees what is before it in its own block of so many tokens. Priced as a
    window that slides, which is up to twice the pairs of those layers."""
    latent: LatentAttention | None = None


class LinearAttention(NamedTuple):
    """Layers whose state does not grow with the context."""

    kind: Literal["gated_deltanet", "lightning"]
    key_heads: Count
    value_heads: Count
    key_dim: Count
    value_dim: Count
    conv_kernel: CountOrZero = 0

    @property
    def state_elements(self) -> int:
        """Elements of state that a request keeps per layer: the recurrent matrix and the convolution's window."""
        recurrent = self.value_heads * self.key_dim * self.value_dim
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return recurrent + channels * max(0, self.conv_kernel - 1)


class Experts(NamedTuple):
    """Mixture of experts in place of the FFN, from layer `first_dense` on in every `every`-th layer."""

    routed: Count
    top_k: Count
    hidden: Count
    """FFN width of one expert."""
    shared_hidden: CountOrZero = 0
    """FFN width of all shared experts together."""
    shared_gate: bool = False
    router_bias: bool = False
    bias: bool = False
    first_dense: CountOrZero = 0
    every: Count = 1
    groups: Count = 1
    """Groups of neighbouring experts that a token first chooses from."""
    top_groups: Count = 1
    """Of those groups, how many it may choose its experts from: with a group to a node, the nodes it goes to."""


class Prediction(NamedTuple):
    """Multi-token prediction: further layers that draft, with a projection of their own."""

    modules: Count
    own_ends: bool = False
    """The checkpoint holds an embedding and a head for them as well."""


class Extra(NamedTuple):
    """Parameters beside the language model."""

    what: str
    parameters: Annotated[int, Ge(1)]
    source: str


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
    includes_prediction: bool = False
    includes_extra: bool = False
    unverified: bool = False


class LayerKind(NamedTuple):
    """What a layer is made of."""

    attention: Literal["full", "window", "linear"]
    experts: bool


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
    attention_pattern: tuple[Literal["full", "window", "linear"], ...] = ("full",)
    """The attention of successive layers, repeated over all of them."""
    linear: LinearAttention | None = None
    experts: Experts | None = None
    prediction: Prediction | None = None
    extra: tuple[Extra, ...] = ()
    quantised: Literal["linears", "ffn", "experts"] = "linears"
    """What a weight dtype below 16 bit applies to (all projections, those of dense FFNs and experts, or experts);
    the rest of the checkpoint stays in 16 bit."""
    weight_block: CountOrZero = 0
    """Side of the blocks that share a scale in the model's own `weights`: a rank's share of a width must be a
    multiple of it; 0 = none."""
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
        if not self.attention_pattern:
            yield "attention_pattern", "is empty, expected full, window or linear for successive layers"
        if "window" in self.attention_pattern and self.attention.window is None:
            yield "attention.window", "missing; expected the tokens that layers called window see"
        if self.attention.blocks and self.attention.window is None:
            yield "attention.blocks", "found true, but there is no attention.window, the tokens of a block"
        if "window" not in self.attention_pattern and self.attention.window is not None:
            yield "attention_pattern", "names no layer `window`, but attention.window is given"
        if "linear" in self.attention_pattern and self.linear is None:
            yield "linear", "missing; expected the shapes of the layers called linear"
        if self.experts is not None and self.experts.top_groups > self.experts.groups:
            found = f"found {self.experts.top_groups}, expected at most experts.groups = {self.experts.groups}"
            yield "experts.top_groups", found
        if self.quantised == "experts" and self.experts is None:
            yield "quantised", "found 'experts', but there are none"

    def layer_kinds(self) -> list[LayerKind]:
        """The kind of every layer, in order."""
        pattern, experts = self.attention_pattern, self.experts
        if experts is None and len(pattern) == 1:  # asked for thousands of times where many plans are enumerated
            return [LayerKind(pattern[0], False)] * self.layers
        return [
            LayerKind(
                pattern[index % len(pattern)],
                experts is not None and index >= experts.first_dense and (index + 1) % experts.every == 0,
            )
            for index in range(self.layers)
        ]

    @property
    def cached_elements(self) -> int:
        """Elements that one token adds to the KV cache in a layer that keeps one: 2 KV dh, or the latent vector."""
        if self.attention.latent is not None:
            return self.attention.latent.cached
        return 2 * self.attention.kv_heads * self.attention.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Elements that one token adds to the KV cache of all layers that keep one."""
        return self.cached_elements * sum(kind.attention != "linear" for kind in self.layer_kinds())
