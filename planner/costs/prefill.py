"""Prompts: the passes that process them, and what they keep others from (DESIGN section 2, Definitions)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Pass, causal_pairs
from planner.costs.memory import cached_tokens
from planner.costs.roofline import Parts, plus
from planner.costs.rows import Rows
from planner.costs.scheduling import budget_of, prompts_together
from planner.costs.speculation import answer_steps, decode_rows, decoded, iteration
from planner.costs.step import PassTime, Replica
from planner.costs.weights import Num

Array = NDArray[np.float64]


def continuous_prefill(
    replica: Replica,
    rows: Rows,
    b: Array,
    micro: Array,
    microbatches: Array,
    decode: PassTime,
    context: Array,
    waves: bool,
) -> tuple[Parts, Array, Parts, Parts, Num]:
    """(a prompt's own iterations, rows they process, those of all other prompts, decode steps these replace, occupied).

    Mixed: the prompt's chunks fill the engine's token budget beside the decodes that ride along; each iteration
    replaces a decode step, of which there cannot be more than the others' answers have. Separate: a pass alone.
    Where more prompts come than there are decode steps (b > osl), several share a pass, up to the token budget.
    Groups of data-parallel attention go in step, so a pass of one group's prompt holds up all: where prompts come in
    waves, each group has one in a pass; where they come one by one, as many as fall together (`prompts_together`).
    Occupied is the time until the next prompt can follow, which in a pipeline is less than the way through all stages.
    Cached tokens are a chunk that is done already: none is computed, all are attended to and so read back.
    """
    scheduler, window = replica.engine.scheduler, replica.model.attention.window
    mixed = scheduler.prefill == "mixed"
    cached = _cached(replica, rows)
    fresh = plus(rows.isl, cached * -1.0)
    steps_each = answer_steps(replica, rows.osl)
    groups, waiting = (
        rows.attention_dp,
        np.maximum(1.0, micro / steps_each),
    )  # prompts that come in the time of one pass
    riding = micro - waiting if mixed else np.zeros_like(micro)
    chunk, budget = fresh, budget_of(scheduler, groups)
    if budget is not None:
        budget = np.maximum(1.0, budget - decode_rows(replica, riding) / groups)
        chunk = np.minimum(fresh, budget)
    beside = np.ceil(fresh / chunk) if mixed else 1.0  # passes of a prompt between which there are steps of others
    together = np.minimum(groups, micro) if waves else prompts_together(groups, micro, beside, steps_each)
    waiting = np.maximum(together, waiting)
    riding = micro - waiting if mixed else riding
    if budget is None:
        packed = waiting if mixed else together
    else:
        packed = np.maximum(together, np.minimum(waiting, budget * together / fresh))
    whole_chunks = np.ceil(fresh / chunk) - 1
    done = plus(whole_chunks * chunk, cached)
    tail = (_pairs_between(done, rows.isl, None), _pairs_between(done, rows.isl, window))
    last, prior = packed * (rows.isl - done), packed * done
    final = iteration(
        replica, Pass(riding, context, last, packed * tail[0], prior, packed, packed, window_pairs=packed * tail[1])
    )
    own, slowest = final.whole, final.slowest
    if np.any(whole_chunks > 0):
        several = np.maximum(whole_chunks, 1.0)
        pairs, near = (_pairs_between(cached, done, seen) / several for seen in (None, window))
        prior = plus(chunk * (several - 1) / 2, cached)

        def one(pairs: Num, prior: Num, near: Num) -> PassTime:
            """A pass of full chunks, one of each prompt that goes together."""
            tokens, seen = chunk * together, near * together
            work = Pass(riding, context, tokens, pairs * together, prior * together, together, window_pairs=seen)
            return iteration(replica, work)

        full = longest = one(pairs, prior, near)
        if np.any(rows.pp > 1):  # the last full chunk reads the most context, and all stages see it go by
            start = done - chunk
            pairs, near = _pairs_between(start, done, None), _pairs_between(start, done, window)
            longest = one(pairs, start, near)
        own = _behind(full, longest, whole_chunks, final)
        slowest = slowest + full.slowest * whole_chunks
    iterations = whole_chunks + 1
    processed = packed * fresh + iterations * decoded(replica, riding)
    turns = np.maximum(b - packed, 0.0) / packed  # passes of other prompts while this one is served
    passes = slowest * turns
    if not mixed:
        return own, processed, passes, Parts(), slowest.total
    steps = np.minimum(iterations * turns, (steps_each - 1) * microbatches)
    replaced = decode.slowest * steps
    # prompts of a few tokens can cost less than the decode steps they replace, but no step is gained by them
    return own, processed, passes.where(passes.total > replaced.total, replaced), replaced, slowest.total


def _behind(full: PassTime, longest: PassTime, passes: Array, final: PassTime) -> Parts:
    """Time until `passes` full passes (the last of them `longest`) and a final one have left the pipeline.

    A short final pass waits behind a full one at every stage; a longer one is met by full ones that are gone
    already. The longer of the two paths through the stages counts.
    """
    waits = full.slowest * passes + longest.whole + longest.slowest * -1.0 + final.slowest
    leads = final.whole + full.slowest * passes
    return leads.where((passes < 1) | (leads.total >= waits.total), waits)


def _cached(replica: Replica, rows: Rows) -> Num:
    """Tokens of each prompt that are not computed again; the constant 0 where no row has any."""
    return cached_tokens(replica.engine, rows.isl, rows.prefix_hit) if np.any(rows.prefix_hit) else 0.0


def _pairs_between(start: Num, stop: Num, window: int | None) -> Num:
    """Query-key pairs of a prompt's tokens from `start` to `stop`."""
    return causal_pairs(stop, window) - causal_pairs(start, window)


def static_prefill(replica: Replica, rows: Rows, b: Array, microbatches: Array) -> tuple[Parts, Array]:
    """(prefill of the whole batch, rows it processes): passes of whole microbatches or of the token budget."""
    window = replica.model.attention.window
    cached = _cached(replica, rows)
    fresh = plus(rows.isl, cached * -1.0)
    total = b * fresh
    per_pass = np.ceil(b / microbatches) * fresh
    budget = budget_of(replica.engine.scheduler, rows.attention_dp)
    if budget is not None:
        per_pass = np.minimum(per_pass, budget * np.minimum(rows.attention_dp, np.ceil(b / microbatches)))
    whole_passes = np.ceil(total / per_pass) - 1
    done = whole_passes * per_pass

    def pairs(start: Num, stop: Array, seen: int | None) -> Array:
        """Query-key pairs of the prompts' new tokens from `start` to `stop`, prompts standing one behind the other."""
        prompts = [np.floor(tokens / fresh) for tokens in (start, stop)]
        rests = [cached + tokens - whole * fresh for tokens, whole in zip((start, stop), prompts, strict=True)]
        whole: Array = (prompts[1] - prompts[0]) * _pairs_between(cached, rows.isl, seen)
        return np.asarray(whole + causal_pairs(rests[1], seen) - causal_pairs(rests[0], seen))

    def some(start: Num, stop: Array, passes: Num, prior: Array, ended: Array) -> PassTime:
        tokens = (stop - start) / passes
        prompts = np.maximum(1.0, np.ceil(tokens / fresh))
        full = pairs(start, stop, None) / passes
        near = 0.0 if window is None else pairs(start, stop, window) / passes
        return iteration(
            replica,
            Pass(np.zeros_like(b), rows.isl, tokens, full, prior + prompts * cached, prompts, ended, window_pairs=near),
        )

    ended = np.floor(done / fresh)
    final = some(done, total, 1.0, done - ended * fresh, b - ended)
    time = final.whole
    if np.any(whole_passes > 0):
        several = np.maximum(whole_passes, 1.0)
        cut = np.where(per_pass % fresh == 0, 0.0, np.minimum(fresh, done) / 2)  # an average prompt cut in two
        full = some(0.0, np.maximum(done, 1.0), several, cut, ended / several)
        time = _behind(full, full, whole_passes, final)
    return time, total
