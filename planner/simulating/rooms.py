"""What a simulated replica has: room for KV in blocks, and the rules by which its engine fills iterations."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.costs.memory import cached_tokens, room
from planner.costs.rows import Rows
from planner.costs.scheduling import budget_of, sequences_of
from planner.costs.serving import Setting, replica_of
from planner.plans.plan import Plan
from planner.specs.engine import Engine
from planner.units import US


class KvRoom(NamedTuple):
    """Room for KV in one replica, on the stage that is full first.

    The unit is what `block` tokens take in all layers. Where requests are kept whole by groups of chips (attention
    over the batch or data-parallel), the groups' rooms are taken together: that one of them is full before the others
    is not looked at.
    """

    blocks: float
    """Of the replica; infinite where nothing is kept."""
    block: int = 1
    """Tokens of a block."""
    windowed: float = 0.0
    """Share of a token that layers with a sliding window hold."""
    window: float = math.inf
    """Blocks that such layers keep of a request at most."""
    constant: float = 0.0
    """Blocks that a request takes whatever its length: states of linear layers, an engine's margin in windows."""
    whole: bool = False
    """A request's whole length is held from the start; else pages as they fill."""
    least: float = 0.0
    """Tokens held at least with `whole` (a maximum context that was asked for)."""

    @classmethod
    def of(cls, setting: Setting, plan: Plan, max_context: float = 0.0) -> KvRoom:
        """The room of a plan's replica before any request."""
        replica = replica_of(setting, Rows.of_plans([plan], isl=1, osl=1, concurrency=1))
        space = room(
            setting.model, setting.engine, replica.shard, replica.stages, setting.formats, setting.structure,
            setting.budget,
        )  # fmt: skip
        free, each = ([float(np.max(np.asarray(stage))) for stage in trio] for trio in (space.free, space.kv_token))
        times = [have / need if need > 0 else math.inf for have, need in zip(free, each, strict=True)]
        tightest = times.index(min(times))
        pages, token = space.pages[tightest], each[tightest]
        scheduler = setting.engine.scheduler
        per_block = token * space.block
        if per_block <= 0:
            return cls(math.inf, space.block)
        extra = np.max(np.asarray(pages.window)) * space.window_extra + np.max(np.asarray(pages.state))
        holders = float(np.max(np.asarray(space.holders)))
        return cls(
            math.floor(times[tightest] / space.block * (1 + 1e-12)) * holders,
            space.block,
            float(np.max(np.asarray(pages.window))) / token,
            space.window / space.block,
            float(extra) / per_block,
            scheduler.kv_reservation == "whole",
            max_context,
        )

    def held(self, tokens: float) -> float:
        """Blocks of a request with so many tokens."""
        count = -(-tokens // self.block)
        return count - self.windowed * max(0.0, count - self.window) + self.constant

    def most(self, isl: float, osl: float) -> float:
        """Blocks that a request holds at most, or from the start where it is held whole."""
        return self.held(max(isl + osl, self.least) if self.whole else isl + osl)

    def pace(self, tokens: float) -> float:
        """Blocks that each further block of tokens takes: the windowed layers' share no more where they are full.

        A request that begins below its window and ends above is charged for all of it.
        """
        if self.whole:
            return 0.0
        return 1.0 - self.windowed if tokens / self.block >= self.window else 1.0


class Rules(NamedTuple):
    """How an engine fills its iterations."""

    mixed: bool = True
    """Chunks of prompts ride with decodes, which never wait (stall-free); else prompts run first, and alone."""
    budget: float | None = None
    """Tokens of an iteration, of each group's; none = a prompt is never cut: all that wait ride together, or one runs
    alone."""
    sequences: int = 1024
    """Requests that run at once at most."""
    microbatches: int = 1
    """Parts into which a pipeline's batch is cut."""
    groups: int = 1
    """Groups of data-parallel attention, which go in step; prompts of one iteration are on different ones, if they
    can be."""
    before: float = 0.0
    """Seconds that a request spends before the engine sees it: HTTP, tokenizer."""
    piece: float | None = None
    """Tokens that one prompt has of an iteration at most, so that several go on side by side; none = the one that
    came first takes what it can of the budget."""

    @classmethod
    def of(cls, engine: Engine, plan: Plan) -> Rules:
        """The rules of an engine under a plan."""
        scheduler, groups = engine.scheduler, plan.sharding.batch
        budget = budget_of(scheduler, groups)
        return cls(
            scheduler.prefill == "mixed",
            None if budget is None else float(budget),
            int(sequences_of(scheduler, groups)),
            plan.pp if scheduler.microbatches == "split" else 1,
            groups,
            engine.host.request_us * US,
        )


def cached_prefix(engine: Engine, isl: float, share: float) -> float:
    """Tokens of a prompt that a prefix cache saves."""
    return float(cached_tokens(engine, isl, share)) if share else 0.0
