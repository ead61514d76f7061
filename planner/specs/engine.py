"""What the software does with the hardware: scheduling, collective kernels, memory it keeps, rules it enforces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from planner.specs.dtypes import KV_CACHE
from planner.specs.fields import (
    Count,
    GibOrZero,
    Kib,
    Micros,
    Provenance,
    Share,
    Tokens,
)
from planner.specs.hardware import CollectiveOp

ATTENTION = ("heads", "batch")
"""Ways to shard attention and its KV cache."""


class Scheduler(NamedTuple):
    """How requests share steps."""

    prefill: Literal["mixed", "separate"]
    """mixed: a prefill's chunks ride in iterations with decodes; separate: a prefill runs alone."""
    chunk_tokens: Tokens | None
    """Token budget of one iteration; none = a prompt is never cut."""
    max_sequences: Count
    kv_reservation: Literal["whole", "paged"]
    """whole: isl + osl are held from the start; paged: pages as they fill, isl + osl/2 on average."""
    block_tokens: Count = 16
    sources: dict[str, str] = {}


class Host(NamedTuple):
    """Time of one step that no kernel hides: step_us + per_sequence_us x sequences; each pipeline stage pays it."""

    provenance: Provenance
    step_us: Micros
    per_sequence_us: Micros = 0.0


class EngineMemory(NamedTuple):
    """Memory beside weights and KV."""

    provenance: Provenance
    fraction: Share
    """Share of the chip's memory that weights, KV and what is `inside` may take."""
    logits_rows: float = 0.0
    """The activation peak is at least this many rows of fp32 logits (the sampler's warm-up)."""
    activation_tokens: Tokens | None = None
    """... and at least this many tokens through the widest layer; none = no activations are reserved."""
    inside_gib: dict[int, GibOrZero] = {}
    """Runtime inside the budget by ranks of a replica's tensor group (interpolated)."""
    rotary_tables: bool = False
    """Tables of rotary angles for every position of the model stand on each rank."""
    latent_copies: bool = False
    """The projections that latent attention absorbs are kept a second time, in 16 bit."""
    expert_multiple: dict[str, Count] = {}
    """By weight dtype: a rank's width of one expert is padded to a multiple of this."""
    expert_workspace: tuple[str, ...] = ()
    """Weight dtypes whose kernel for experts keeps a workspace of `activation_tokens`."""
    window_layers: Literal["capped", "grouped", "full"] = "capped"
    """KV in layers with a sliding window: the window; groups of layers of one size, each with the window, an
    iteration's tokens and a block; or all tokens."""
    outside_gib: dict[int, GibOrZero] = {}
    """Context, graphs and buffers outside the budget: checked against the whole chip."""


class CollectiveRule(NamedTuple):
    """Which kernel runs a collective; the first rule that fits counts."""

    op: CollectiveOp
    kernels: tuple[str, ...]
    """Names in the hardware file; of several, the cheapest."""
    span: Literal["inside", "across", "any"] = "any"
    """inside one innermost domain, or across several."""
    ranks: tuple[int, ...] = ()
    """Group sizes it serves; () = all."""
    max_kib: Kib | None = None
    """Largest buffer, inclusive."""


class KvDtype(NamedTuple):
    """The dtype of the KV cache when none is asked for, by the dtype of the weights."""

    default: str = "bf16"
    by_weights: dict[str, str] = {}


class Engine(NamedTuple):
    """Serving software: `configs/engines/*.yaml`."""

    name: str
    version: str
    description: str
    scheduler: Scheduler
    host: Host
    memory: EngineMemory
    collectives: tuple[CollectiveRule, ...]
    attention: tuple[str, ...]
    """Ways to shard attention that it can run: heads, batch."""
    attention_dp: Literal["divides", "equal"] | None = None
    """Data-parallel attention inside a tensor-parallel group: any divisor of it, the group itself, or none."""
    aliases: tuple[str, ...] = ()
    kv_cache: KvDtype = KvDtype()
    embedding_all_reduce: bool = True
    """The vocabulary is sharded in the embedding too, so its output is all-reduced."""
    vocabulary_multiple: Count = 1
    """The vocabulary is padded to a multiple of this, then divided over the ranks."""
    shard_multiple: dict[str, Count] = {}
    """By weight dtype: a rank's share of what a row-parallel projection reads must be a multiple of this."""
    uneven_stages: bool = True
    """Pipeline stages may differ by a layer."""
    chips: dict[str, dict[str, Any]] = {}
    """Overrides of a hardware file's keys under this engine, by the hardware's name."""
    notes: tuple[str, ...] = ()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever a value is none of those that exist."""
        for index, kind in enumerate(self.attention):
            if kind not in ATTENTION:
                yield f"attention.{index}", f"found {kind!r}, expected one of {', '.join(ATTENTION)}"
        if not self.attention:
            yield "attention", f"is empty, expected at least one of {', '.join(ATTENTION)}"
        for key, dtype in (("default", self.kv_cache.default), *self.kv_cache.by_weights.items()):
            if dtype not in KV_CACHE:
                yield f"kv_cache.{key}", f"found {dtype!r}, expected one of {', '.join(KV_CACHE)}"
