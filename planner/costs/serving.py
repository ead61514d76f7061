"""Step times become what a user sees: TTFT, TPOT, throughput, cost (DESIGN section 2, Definitions).

b requests per replica, M = min(pp, b) microbatches of ceil(b / M); D(b) one decode step of all of them, E what one
prefill adds. static: the batch is prefilled, then decoded. continuous: while a request answers, the b - 1 others
are prefilled once each, so that tpot = D(b) + (b - 1) E / (osl - 1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.layers import Formats, Pass, Structure
from planner.costs.memory import Budget, Room, held_tokens, needed_tokens, room
from planner.costs.prefill import continuous_prefill, static_prefill
from planner.costs.roofline import Parts, averaged, plus
from planner.costs.rows import Rows
from planner.costs.scheduling import sequences_of
from planner.costs.speculation import (
    Drafting,
    Speculating,
    iteration,
    per_token,
    room_with_draft,
)
from planner.costs.step import PassTime, Replica
from planner.costs.weights import matmul_parameters
from planner.plans.placement import Placement
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.lengths import Lengths
from planner.specs.model import Model
from planner.specs.workload import Arrivals, Schedule
from planner.units import US

Array = NDArray[np.float64]
BLOCK_ROWS = 16384  # rows priced at once: their arrays stay in the cache
OWN, STEP, OTHERS, JOIN = "prefill", "decode step", "other prompts", "join"
"""Phases of a request's time (see `itemise`)."""
WAVE_SHARE = 0.5  # share of the prefill stall that lands in TPOT when requests arrive in waves


class Setting(NamedTuple):
    """Everything that is the same for all rows of one call of `price`."""

    model: Model
    hardware: Hardware
    engine: Engine
    placement: Placement
    formats: Formats
    structure: Structure
    budget: Budget
    schedule: Schedule = "continuous"
    arrivals: Arrivals = "steady"
    usd_per_chip_hour: float | None = None
    lengths: Lengths | None = None
    mean_load: bool = False
    """Batches are means over time, which need not be whole: so are microbatches then."""
    drafting: Drafting | None = None
    """What drafts where `Rows.spec_tokens` says so; none = no row speculates."""


def formats_of(model: Model, hardware: Hardware, engine: Engine, weights: str | None, kv_cache: str | None) -> Formats:
    """Number formats of a run: the model's own weights and the engine's rule for the KV cache where none are named.

    Raises:
        InputError: an unknown dtype.
    """
    stored = weight_dtype(weights or model.weights)
    cache = kv_cache or engine.kv_dtype(stored.name, hardware)
    return Formats(stored, kv_dtype(cache), hardware.chip.compute_dtype(stored.compute), hardware.chip.native_dtype)


class Fit(NamedTuple):
    """What memory allows: bytes of the fullest chip and how many requests run."""

    batch: Array
    """Requests per replica that run."""
    running: Array
    """Requests of the deployment that run."""
    weights: Array
    kv: Array
    other: Array
    outside: Array
    capacity_tokens: Array
    max_concurrency: Array
    by_memory: Array
    """Requests of the deployment that memory alone would hold: more where the engine's own limit is lower."""
    needed: Array
    """Tokens one request needs room for."""

    @property
    def memory(self) -> Array:
        """Bytes of the fullest chip inside the budget."""
        return self.weights + self.kv + self.other


def fit(setting: Setting, rows: Rows, clip: bool) -> Fit:
    """Memory of every row; with `clip` a batch that does not fit is cut to the one that does."""
    replica = replica_of(setting, rows)
    space = _room(setting, replica, rows)
    isl, osl = (rows.isl, rows.osl) if setting.lengths is None else setting.lengths.seen(rows.isl, rows.osl)
    drafted_at_all = None if setting.drafting is None else rows.spec_tokens
    drafted = 0.0 if drafted_at_all is None else drafted_at_all  # KV of tokens that may yet be rejected
    asked = plus(isl, drafted), osl, plus(rows.max_context, drafted)
    needed = needed_tokens(setting.engine, *asked)
    held_at_most = space.requests(needed)
    most = np.minimum(held_at_most, sequences_of(setting.engine.scheduler, rows.attention_dp, drafted_at_all))
    batch = np.ceil(rows.concurrency / rows.dp)
    running = rows.concurrency
    if clip:
        batch = np.minimum(batch, np.maximum(most, 0.0))
        running = np.minimum(running, batch * rows.dp)
    held = held_tokens(setting.engine, *asked)
    weights, kv, other = space.fullest(held, batch)
    every = np.ones_like(rows.tp)
    return Fit(
        batch=batch,
        running=running,
        weights=weights * every,
        kv=kv * every,
        other=other * every,
        outside=space.outside * every,
        capacity_tokens=space.capacity_tokens * every,
        max_concurrency=most * rows.dp,
        by_memory=held_at_most * rows.dp,
        needed=needed,
    )


def _room(setting: Setting, replica: Replica, rows: Rows) -> Room:
    """Memory before any request, with what drafts."""
    drafting = setting.drafting
    modules = 0 if drafting is None else drafting.draft.modules * (rows.spec_tokens > 0)
    space = room(
        setting.model, setting.engine, replica.shard, replica.stages, setting.formats, setting.structure,
        setting.budget, modules,
    )  # fmt: skip
    return room_with_draft(
        space, drafting, rows.spec_tokens, setting.engine, setting.structure, setting.budget, replica.tp, replica.pp
    )


class Estimates(NamedTuple):
    """Results, arrays over rows; seconds, bytes, tokens, dollars. NaN = not applicable."""

    batch: Array
    running: Array
    ttft: Array
    tpot: Array
    latency: Array
    requests_per_s: Array
    mfu_prefill: Array
    mfu_decode: Array
    ttft_parts: Parts
    tpot_parts: Parts
    prefill_share: Array
    """Of the time in which requests are served, what prompts take (b E); decode steps take the rest."""
    prompt: Array
    """Seconds that one prompt takes of its replica (E), of the slowest stage in a pipeline."""
    prompt_variation: Array
    """Squared coefficient of variation of E over the lengths of prompts."""
    ttft_p90: Array
    """TTFT of the prompt that nine tenths are no longer than; NaN where lengths do not differ, or more than lengths
    decide."""


def price(setting: Setting, rows: Rows, fitted: Fit) -> Estimates:
    """Latency and throughput of every row, in blocks; rows whose batch is 0 come out as NaN."""
    if setting.lengths is not None:
        return _price_lengths(setting, rows, fitted, setting.lengths)
    blocks = []
    for start in range(0, rows.length, BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, rows.length)
        blocks.append(
            _price_block(setting, rows.part(start, stop), fitted.batch[start:stop], fitted.running[start:stop])
        )
    return blocks[0] if len(blocks) == 1 else _joined(blocks)


def itemise(setting: Setting, rows: Rows, fitted: Fit) -> Estimates:
    """`price` with `Terms` in the place of parts: by the same code, with a ledger of every operation and transfer.

    Items of the decode step itself (D) are in the phase STEP, a request's own iterations in OWN, what other prompts
    add to TTFT or TPOT in OTHERS, what a prompt waits for before its first iteration in JOIN. All rows are one block.
    """
    if setting.lengths is not None:
        return _price_lengths(setting, rows, fitted, setting.lengths, itemised=True)
    return _price_block(setting, rows, fitted.batch, fitted.running, itemised=True)


def _price_lengths(setting: Setting, rows: Rows, fitted: Fit, lengths: Lengths, itemised: bool = False) -> Estimates:
    """Rows whose requests differ in length: the mean over some lengths of prompts, all beside the same decodes.

    A request waits for prompts of any length and answers at the context that a batch has on average, so that all that
    depends on its own prompt is linear in what that takes.
    """
    ratios, weights = (np.array(column) for column in zip(*lengths.prompts, (lengths.p90, 0.0), strict=True))
    seen_isl, seen_osl = lengths.seen(rows.isl, rows.osl)
    context = seen_isl + seen_osl / 2
    several, each = [], max(1, BLOCK_ROWS // len(ratios))
    for start in range(0, rows.length, rows.length if itemised else each):
        stop = rows.length if itemised else min(start + each, rows.length)
        index = np.repeat(np.arange(start, stop), len(ratios))
        apart = Rows(*(column[index] for column in rows))
        apart = apart._replace(isl=apart.isl * np.tile(ratios, stop - start))
        found = _price_block(setting, apart, fitted.batch[index], fitted.running[index], itemised, context[index])
        several.append(_averaged(setting, found, rows.part(start, stop), weights))
    return several[0] if len(several) == 1 else _joined(several)


def _averaged(setting: Setting, found: Estimates, rows: Rows, weights: Array) -> Estimates:
    """Means over the lengths of prompts: of what divides by a time the mean time counts."""

    def mean(values: Array) -> Array:
        return np.asarray(averaged(values, weights))

    prompt = mean(found.prompt)
    left = np.where(found.prefill_share < 1, 1 - found.prefill_share, 1.0)
    against = mean(found.prefill_share / left)  # prompts, in times of the decode steps, which all lengths share
    by_length = setting.arrivals == "steady"  # in waves the stall of others is in TTFT too
    longer = found.ttft.reshape(-1, len(weights))[:, -1]
    return Estimates(
        batch=mean(found.batch),
        running=mean(found.running),
        ttft=mean(found.ttft),
        tpot=mean(found.tpot),
        latency=mean(found.latency),
        requests_per_s=1 / mean(1 / found.requests_per_s),
        mfu_prefill=mean(found.mfu_prefill * found.ttft) / mean(found.ttft),
        mfu_decode=mean(found.mfu_decode),
        ttft_parts=found.ttft_parts.averaged(weights),
        tpot_parts=found.tpot_parts.averaged(weights),
        prefill_share=np.where(rows.osl > 1, against / (1 + against), mean(found.prefill_share)),
        prompt=prompt,
        prompt_variation=np.maximum(0.0, mean(found.prompt**2) / prompt**2 - 1),
        ttft_p90=np.where((rows.osl > 1) & by_length, longer, np.nan),
    )


def _joined(blocks: list[Estimates]) -> Estimates:
    columns: dict[str, Array | Parts] = {}
    for name, *values in zip(Estimates._fields, *blocks, strict=True):
        if isinstance(values[0], Parts):
            columns[name] = Parts(*(np.concatenate(parts) for parts in zip(*values, strict=True)))
        else:
            columns[name] = np.concatenate(values)
    return Estimates(**columns)  # type: ignore[arg-type]


def replica_of(setting: Setting, rows: Rows, itemised: bool = False) -> Replica:
    """What passes of these rows are counted and priced for."""
    replica = Replica(
        setting.model,
        setting.hardware,
        setting.engine,
        Network(setting.placement, setting.engine),
        setting.formats,
        setting.structure,
        rows.width.astype(int),
        rows.pp.astype(int),
        rows.dp.astype(int),
        itemised,
        rows.x.astype(int),
        rows.y.astype(int),
        rows.attention_dp.astype(int),
        rows.sequence.astype(int),
        rows.ep.astype(int),
        rows.cp.astype(int),
    )
    if setting.drafting is None:
        return replica
    return Speculating.of(replica, setting.drafting, rows.spec_tokens, rows.spec_accept)


def _price_block(
    setting: Setting,
    rows: Rows,
    batch: Array,
    running: Array,
    itemised: bool = False,
    context: Array | None = None,
) -> Estimates:
    """Rows of one length each, decodes at a context: none = that of requests half through their answers."""
    replica = replica_of(setting, rows, itemised)
    runs = batch >= 1
    b = np.where(runs, batch, 1.0)
    whole = setting.engine.scheduler.microbatches == "whole"
    microbatches = np.ones_like(b) if whole else np.minimum(rows.pp, b)
    micro = _microbatch(setting.mean_load, b, microbatches)
    context = rows.isl + rows.osl / 2 if context is None else context
    decode = iteration(replica, Pass(micro, context))
    step = _pipelined(decode, microbatches).within(STEP)
    token = per_token(replica, step)
    answers = rows.osl > 1
    after = np.where(answers, rows.osl - 1, 1.0)
    if setting.schedule == "static":
        ttft, prefill_rows = static_prefill(replica, rows, b, microbatches)
        ttft = ttft.within(OWN)
        own, tpot, stalled, occupied = ttft, token, 0.0, ttft.total
    else:
        own, prefill_rows, passes, replaced, occupied = continuous_prefill(
            replica, rows, b, micro, microbatches, decode, context, setting.arrivals == "waves"
        )
        own, stall = own.within(OWN), (passes + replaced * -1.0).within(OTHERS)
        stalled = stall.total
        seen = answers * (1.0 if setting.arrivals == "steady" else WAVE_SHARE)  # one token has no gap to stall in
        arriving = replica.term("request", Parts(overhead=setting.engine.host.request_us * US))
        ttft = own + stall * (1.0 - seen) + arriving.within(JOIN)
        if setting.engine.scheduler.join_steps:
            ttft = ttft + step.within(JOIN) * (setting.engine.scheduler.join_steps * (b > 1))
        tpot = token + stall * (seen / after)
    residence = ttft.total + (rows.osl - 1) * tpot.total
    latency = ttft.total + (rows.osl - 1) * np.where(answers, tpot.total, 0.0)

    chips = rows.width * rows.pp
    peak = setting.hardware.chip.peak(setting.formats.compute)
    useful = 2 * matmul_parameters(setting.model)
    empty = np.where(runs, 1.0, np.nan)
    no_answer = np.where(answers, empty, np.nan)
    own_total = own.total
    prompts = plus(own_total, stalled)
    return Estimates(
        batch=batch,
        running=running,
        ttft=ttft.total * empty,
        tpot=tpot.total * no_answer,
        latency=latency * empty,
        requests_per_s=running / residence * empty,
        mfu_prefill=useful * prefill_rows / (chips * peak * own_total) * empty,
        mfu_decode=useful * b / (chips * peak * token.total) * no_answer,
        ttft_parts=ttft.over(rows.length),
        tpot_parts=tpot.over(rows.length),
        prefill_share=prompts / (prompts + (rows.osl - 1) * token.total) * empty,
        prompt=plus(occupied, stalled) / b * empty,
        prompt_variation=np.zeros(rows.length),
        ttft_p90=np.full(rows.length, np.nan),
    )


def _microbatch(mean_load: bool, batch: Array, microbatches: Array) -> Array:
    """Requests of a microbatch: the fullest one of a batch, or the mean where the batch is a mean."""
    each = batch / microbatches
    return each if mean_load else np.ceil(each)


def _pipelined(time: PassTime, microbatches: Array) -> Parts:
    """One decode step of all microbatches: max(sum of stages and sends, M x the slowest stage)."""
    waiting = np.maximum(0.0, microbatches * time.slowest.total - time.whole.total)
    return time.whole.adding("bubble", Parts(bubble=waiting))
