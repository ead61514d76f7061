"""What the software does with the hardware: scheduling, collective kernels, memory it keeps, rules it enforces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from planner.errors import InputError
from planner.specs.dtypes import KV_CACHE, WEIGHTS
from planner.specs.fields import (
    Count,
    CountOrZero,
    Factor,
    GibOrZero,
    Kib,
    Micros,
    Provenance,
    Ratio,
    Share,
    Tokens,
)
from planner.specs.hardware import CollectiveOp, Hardware
from planner.specs.launch import Launch
from planner.specs.workload import Arrivals, Schedule

_SEQUENCES, _TOKENS = "--max-num-seqs", "--max-num-batched-tokens"
_MOST = 10**9  # beyond, a number is a slip of the keyboard
ATTENTION = ("heads", "batch")
PROMPT_CONTEXT = ("ring", "gather", "ulysses")
"""Ways to shard attention and its KV cache."""
FFN = ("1d", "2d", "wg-x", "wg-xy", "wg-xyz")
"""Layouts of the projections over a tensor-parallel group (Pope et al. 2022, section 3.2)."""


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
    microbatches: Literal["split", "whole"] = "split"
    """split: a pipeline cuts its batch into as many microbatches as it has stages; whole: its stages hand on whole
    batches, and only `chunk_tokens` cuts a prefill."""
    schedule: Schedule = "continuous"
    """How requests are batched when it is not said: static for engines that run one batch at a time."""
    arrivals: Arrivals = "steady"
    """How requests in a closed loop arrive when it is not said (see `workload.Workload`)."""
    join_steps: Ratio = 0.0
    """Decode steps that a prompt waits for on average, until the one in flight ends, where others are running."""
    group_sequences: Literal["each", "shared"] = "each"
    """Groups of data-parallel attention run `max_sequences` each, as where each has a scheduler of its own, or share
    them out."""
    group_tokens: Literal["each", "shared"] = "each"
    """The same of `chunk_tokens`."""
    group_option: Literal["each", "shared"] = "each"
    """The same of requests that the engine's own option names in the place of `max_sequences`."""
    sources: dict[str, str] = {}


class Host(NamedTuple):
    """Time that no kernel hides. A pass costs each pipeline stage step_us + per_sequence_us x sequences + layer_us x
    its layers, and prefill_layer_us x layers more where it holds prompt tokens.
    """

    provenance: Provenance
    step_us: Micros
    per_sequence_us: Micros = 0.0
    layer_us: Micros = 0.0
    """Launching a layer's kernels one by one, where no graph replays them."""
    prefill_layer_us: Micros = 0.0
    """The same in passes with prompt tokens only: graphs are captured for decoding."""
    request_us: Micros = 0.0
    """Before a request's first token: HTTP, tokenizer, queues between processes. It delays that request alone, and is
    not there where a batch is handed over whole (static)."""


class Calibrated(NamedTuple):
    """What the measurements reached that the constants were fitted on and held against; beyond, all is extrapolated."""

    hardware: tuple[str, ...]
    tp: Count
    batch: Count
    """Requests per replica."""
    isl: Tokens
    pp: Count = 1
    least_batch: Count = 1
    """Requests per replica below which nothing was measured."""
    weights: tuple[str, ...] = ("bf16", "fp16", "fp8")
    """Dtypes of the weights."""
    schedule: Schedule | None = None
    """none = any."""
    same_version: bool = True
    """false = another version of the engine was measured."""


class Overlap(NamedTuple):
    """Collectives that run while the products which make or use their data do (a looped collective einsum)."""

    provenance: Provenance
    fraction: Share
    """Of a layer's collectives, as far as its products are long enough."""


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


class Exchange(NamedTuple):
    """How tokens reach the experts of other ranks, where ranks run attention for tokens of their own, and come back."""

    kind: Literal["all_to_all", "gather"] = "gather"
    """all_to_all: each token to the ranks of its experts; gather: all tokens to all ranks, outputs reduce-scattered."""
    dispatch: str = "bf16"
    """Dtype of a token on its way to experts."""
    combine: str = "bf16"
    """Dtype of an expert's output on its way back."""
    scale_block: CountOrZero = 128
    """Values that share a 32-bit scale where `dispatch` is below 16 bit; 0 = no scales."""
    kernel: str = ""
    """Kernel of an all-to-all in hardware files that have it; elsewhere, and where it is "", by `collectives`."""
    low_latency_kernel: str = ""
    """The same for passes of decode rows with at most `low_latency_tokens` tokens on a rank: a copy to each expert."""
    low_latency_tokens: CountOrZero = 0
    """0 = never."""
    imbalance: Factor = 1.0
    """Load of the rank with the most popular experts against the mean, over many tokens; 1 = uniform routing."""
    redundant: CountOrZero = 0
    """Copies of popular experts when it is not said."""
    sources: dict[str, str] = {}

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) of dtypes that do not exist."""
        for key, dtype in (("dispatch", self.dispatch), ("combine", self.combine)):
            if dtype not in WEIGHTS:
                yield f"exchange.{key}", f"found {dtype!r}, expected one of {', '.join(WEIGHTS)}"


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
    ffn: tuple[str, ...] = ("1d",)
    """Layouts of the projections that it can run: 1d, 2d, wg-x, wg-xy, wg-xyz."""
    head_padding: bool = False
    """Query heads that a degree does not divide are padded with empty ones, up to half as many again."""
    fused_block: bool = False
    """Where attention and FFN stand side by side, their input projections are one product, and their outputs too."""
    overlap: Overlap | None = None
    sequence_overlap: Overlap | None = None
    """Of what ranks that share a request's cache by tokens exchange, the share that goes while the next request's
    attention runs; none = attention of all requests ends first."""
    expert_parallel: Literal["group", "divides"] | None = None
    """Whole experts on different ranks: over a whole tensor-parallel group, over any divisor of it, or never."""
    expert_rows: Literal["own", "all"] = "own"
    """With whole experts on different ranks and no all-to-all: kernels for experts run on a rank's own (token, expert)
    pairs, or write and read rows for all of them, zeros in those of other ranks."""
    exchange: Exchange | None = None
    """none = a gather in 16 bit."""
    attention_dp: Literal["divides", "equal"] | None = None
    """Data-parallel attention inside a tensor-parallel group: any divisor of it, the group itself, or none."""
    attention_dp_dense: bool = False
    """... of models without experts too."""
    decode_context: Literal["copies", "any"] | None = None
    """Whether a request's cache can lie on several ranks by tokens while it decodes (as `heads2xseq4`): on those that
    else hold copies of a KV head, on any, or not at all."""
    prompt_context: tuple[str, ...] = ()
    """How it divides the tokens of a prompt over groups of chips (`cp`): ring, gather, ulysses; none = not at all."""
    aliases: tuple[str, ...] = ()
    since: str | None = None
    """The first version that this file stands for; it ends where the next file of this engine begins."""
    calibrated: Calibrated | None = None
    """none = a bound or a textbook, which stands for no measurement."""
    kv_cache: KvDtype = KvDtype()
    tensor_core_groups: tuple[Count, ...] = ()
    """Query heads to a KV head for which decode attention runs on tensor cores (in layers without a window): there
    what the query heads compute costs nothing beside reading the cache. It matters where the chip's constants of decode
    attention have a `compute_fraction`, which is then that of the plain kernel."""
    weight_traffic: dict[str, Factor] = {}
    """By weight dtype: memory traffic of a projection as a multiple of its stored bytes, where kernels that convert on
    the fly read slower than plain ones; 1 if not given."""
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
    launch: Launch | None = None
    """How it is started; none = it has no command that serves."""
    unlaunched: str | None = None
    """Why there is no `launch`."""

    def kv_dtype(self, weights: str, hardware: Hardware | None = None) -> str:
        """Dtype of the KV cache when none is asked for: on this hardware, else for these weights, else always."""
        own, stored = {} if hardware is None else hardware.kv_cache, WEIGHTS.get(weights)
        if stored is not None and stored.dense is not None and weights not in {**own, **self.kv_cache.by_weights}:
            weights = stored.dense  # pruned weights change nothing about the cache
        return own.get(weights, self.kv_cache.by_weights.get(weights, self.kv_cache.default))

    def limited(self, sequences: int | None = None, tokens: int | None = None) -> Engine:
        """The engine with other limits of an iteration, as its own options set them; none = as its file has it.

        What it warms up with and so keeps free for activations follows: rows of logits by `sequences`, tokens through
        the widest layer by `tokens`. Where decodes ride in the same iterations as prompts, each running request takes
        one of the tokens: fewer tokens than the file's `max_sequences` lower that too, as in vLLM.

        Args:
            sequences: requests that a replica runs at once at most (`scheduler.max_sequences`); of each group of
                data-parallel attention or of all together, as `scheduler.group_option` says.
            tokens: of an iteration at most (`scheduler.chunk_tokens`).

        Raises:
            InputError: out of range, fewer tokens than requests that decode, or an engine that never cuts a prompt.
        """
        if sequences is None and tokens is None:
            return self
        for option, value in ((_SEQUENCES, sequences), (_TOKENS, tokens)):
            if value is not None and not 1 <= value <= _MOST:
                raise InputError(f"{option} must be a whole number from 1 to {_MOST}, found {value}")
        scheduler, memory = self.scheduler, self.memory
        if tokens is not None and scheduler.chunk_tokens is None:
            raise InputError(
                f"{_TOKENS}: engine {self.name} never cuts a prompt (chunk_tokens of its file is none); leave it out, "
                "or name another engine"
            )
        most, budget = sequences or scheduler.max_sequences, tokens or scheduler.chunk_tokens
        if scheduler.prefill == "mixed" and budget is not None and most > budget:
            if sequences is not None:
                raise InputError(
                    f"{_SEQUENCES} {most}: {self.name} decodes one token of each in an iteration of at most {budget} "
                    f"tokens; expected at most {budget}, or a {_TOKENS} of at least {most}"
                )
            most = budget
        wider = 1.0 if budget is None or scheduler.chunk_tokens is None else budget / scheduler.chunk_tokens
        reserved = memory.activation_tokens
        return self._replace(
            scheduler=scheduler._replace(
                max_sequences=most,
                chunk_tokens=budget,
                group_sequences=scheduler.group_sequences if sequences is None else scheduler.group_option,
            ),
            memory=memory._replace(
                logits_rows=memory.logits_rows * (most / scheduler.max_sequences),
                activation_tokens=None if reserved is None else max(1, round(reserved * wider)),
            ),
        )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever a value is none of those that exist."""
        yield from () if self.exchange is None else self.exchange.contradictions()
        lists = (
            ("attention", self.attention, ATTENTION),
            ("ffn", self.ffn, FFN),
            ("prompt_context", self.prompt_context, PROMPT_CONTEXT),
        )
        for key, kinds, known in lists:
            for index, kind in enumerate(kinds):
                if kind not in known:
                    yield f"{key}.{index}", f"found {kind!r}, expected one of {', '.join(known)}"
            if not kinds and key != "prompt_context":
                yield key, f"is empty, expected at least one of {', '.join(known)}"
        for key, dtype in (("default", self.kv_cache.default), *self.kv_cache.by_weights.items()):
            if dtype not in KV_CACHE:
                yield f"kv_cache.{key}", f"found {dtype!r}, expected one of {', '.join(KV_CACHE)}"
        weights: dict[str, Mapping[str, Any]] = {
            "weight_traffic": self.weight_traffic,
            "kv_cache.by_weights": self.kv_cache.by_weights,
        }
        weights |= {f"chips.{chip}.kv_cache": over.get("kv_cache") or {} for chip, over in self.chips.items()}
        if self.calibrated is not None:
            weights["calibrated.weights"] = dict.fromkeys(self.calibrated.weights)
        for key, names in weights.items():
            for name in names:
                if name not in WEIGHTS:
                    yield f"{key}.{name}", f"unknown dtype of weights; expected one of {', '.join(WEIGHTS)}"
        if self.launch is not None:
            yield from ((f"launch.{key}", problem) for key, problem in self.launch.contradictions())
