"""Whether an engine starts: the rules it enforces, then its memory. What each chip holds, and what still fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.layers import Formats
from planner.costs.memory import Budget, Room, needed_tokens, room
from planner.costs.rows import Rows, structure_of
from planner.costs.scheduling import sequences_of
from planner.costs.speculation import Drafting, room_with_draft
from planner.costs.weights import Shard, Stages
from planner.errors import InputError
from planner.plans.plan import Plan
from planner.plans.rules import attention_dp_refusal, shape_refusal
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.speculation import Draft
from planner.units import GIB


class Start(NamedTuple):
    """One replica of a plan as the engine starts it, before any request."""

    model: Model
    engine: Engine
    plan: Plan
    formats: Formats
    budget: Budget
    room: Room
    context: int
    """Tokens of the longest request."""
    draft: bool = False
    attention_dp: int = 1

    @classmethod
    def of(
        cls,
        model: Model,
        engine: Engine,
        plan: Plan,
        budget: Budget,
        *,
        weights: str | None = None,
        kv_cache: str | None = None,
        context: int | None = None,
        draft: bool = False,
        attention_dp: int = 1,
        hardware: Hardware | None = None,
        drafts: Draft | None = None,
    ) -> Start:
        """The memory of a plan; `context` is the model's longest where none is given.

        `hardware` decides the KV cache's dtype where the engine chooses it by chip.

        With `draft` the model's own prediction modules are loaded beside it; with `attention_dp` the ranks of a
        tensor-parallel group form so many groups, each with the attention of its own requests, as a product in the
        plan (`batch8`) says too. `drafts` is what speculates, a model of its own among it.

        Raises:
            InputError: a dtype that there is not, a context or prediction modules that the model has not, groups of
                data-parallel attention beside a plan that says how attention is divided.
        """
        if attention_dp > 1 and (plan.attention != "heads" or plan.cp > 1):
            raise InputError(
                f"--attention-dp {attention_dp}: {plan.label} says how attention is divided; leave --attention-dp out"
            )
        stored = weight_dtype(weights or model.weights)
        cache = kv_dtype(kv_cache or engine.kv_dtype(stored.name, hardware))
        if context is not None and not 1 <= context <= model.max_context:
            raise InputError(f"--context {context}: {model.name} has 1 to {model.max_context} tokens")
        if draft and model.prediction is None:
            raise InputError(f"--draft: {model.name} has no prediction layers")
        formats = Formats(stored, cache, "", "")
        degrees = Rows.of_plans([plan], isl=1, osl=1, concurrency=1)
        wide, x, y, parts, ep, cp = (
            float(column[0])
            for column in (degrees.width, degrees.x, degrees.y, degrees.sequence, degrees.ep, degrees.cp)
        )
        attention_dp = max(attention_dp, int(degrees.attention_dp[0]))
        shard = Shard.for_engine(model, engine, stored.name, wide, attention_dp, x, y, parts, ep, cp)
        structure = structure_of(plan)
        modules = model.prediction.modules if draft and model.prediction else 0
        modules = max(modules, drafts.modules if drafts else 0)
        space = room(model, engine, shard, Stages.of(model, plan.pp), formats, structure, budget, modules)
        if drafts is not None:
            drafting = Drafting.of(
                drafts, formats, lambda own, kv: Formats(weight_dtype(own.weights), kv_dtype(kv), "", "")
            )
            space = room_with_draft(
                space, drafting, 1, engine, structure, budget, np.asarray(plan.stage_chips), np.asarray(plan.pp)
            )
        return cls(model, engine, plan, formats, budget, space, context or model.max_context, draft, attention_dp)

    @property
    def said_apart(self) -> bool:
        """Whether groups of data-parallel attention stand beside the plan, whose own word is heads."""
        return self.plan.attention == "heads"

    @property
    def fullest(self) -> int:
        """The stage with least room for a request of the longest context: 0 first, 1 middle, 2 last."""
        needed, free = self.request_bytes, self.free
        ratios = [left / need if need else np.inf for left, need in zip(free, needed, strict=True)]
        return int(np.argmin(ratios))

    @property
    def request_tokens(self) -> int:
        """Tokens in whole blocks that a request of the longest context takes."""
        return int(needed_tokens(self.engine, self.context, 0, 0))

    @property
    def request_bytes(self) -> tuple[float, float, float]:
        """Bytes of KV that it takes on a chip of each stage."""
        first, middle, last = self.room.request_bytes(self.request_tokens)
        return float(first), float(middle), float(last)

    @property
    def least_request_bytes(self) -> float:
        """Bytes on the fullest chip if windowed layers kept their window alone and no layer were padded."""
        memory = self.engine.memory._replace(window_layers="capped")
        engine = self.engine._replace(memory=memory)
        least = Start.of(self.model, engine, self.plan, self.budget, weights=self.formats.weights.name,
                         kv_cache=self.formats.kv.name, context=self.context, draft=self.draft,
                         attention_dp=self.attention_dp if self.said_apart else 1)  # fmt: skip
        return least.request_bytes[self.fullest]

    @property
    def concurrency(self) -> float:
        """How many requests of the longest context a replica holds, not rounded."""
        return float(self.room.holders * self.room.concurrency(self.request_tokens))

    @property
    def capacity_tokens(self) -> int:
        """Distinct tokens that a replica holds where every layer keeps all of them."""
        return int(self.room.capacity_tokens)

    @property
    def blocks(self) -> int:
        """Blocks of KV on a chip."""
        return int(self.room.chip_tokens) // self.engine.scheduler.block_tokens

    @property
    def requests(self) -> int:
        """Requests of the longest context that run at once: what memory holds, up to the engine's own limit."""
        held = float(self.room.requests(self.request_tokens))
        return int(min(held, float(sequences_of(self.engine.scheduler, self.attention_dp))))

    def longest(self) -> int:
        """The longest context of which one request fits: whole blocks, or the model's own where that fits."""
        whole = self.model.max_context
        if float(self.room.concurrency(needed_tokens(self.engine, whole, 0, 0))) >= 1:
            return whole
        block = self.engine.scheduler.block_tokens
        low, high = 0, -(-whole // block)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if float(self.room.concurrency(middle * block)) >= 1 else (low, middle)
        return low * block

    def refusal(self, gpus: int | None = None) -> str | None:
        """Why the engine does not start (on so many chips, where given), as one sentence; none if it does."""
        if gpus is not None and self.plan.chips > gpus:
            return f"{self.plan.label} takes {self.plan.chips} chips, there are {gpus}"
        return (
            attention_dp_refusal(self.engine, self.plan.tp, self.attention_dp if self.said_apart else 1)
            or shape_refusal(self.model, self.engine, self.plan, self.formats.weights.name)
            or self._memory_refusal()
        )

    def _memory_refusal(self) -> str | None:
        stage = max(range(3), key=lambda index: float(self.room.weights[index] + self.room.other[index]))
        held, other = float(self.room.weights[stage]), float(self.room.other[stage])
        limit, outside = self.budget.limit, float(self.room.outside)
        if held + other >= limit:
            return (
                f"weights {held / GIB:.2f} GiB + activations and runtime {other / GIB:.2f} GiB exceed the "
                f"{limit / GIB:.2f} GiB per chip by {(held + other - limit) / GIB:.2f} GiB"
            )
        if limit + outside > self.budget.chip * (1 + 1e-9):
            return (
                f"the budget of {limit / GIB:.2f} GiB leaves no room for the {outside / GIB:.2f} GiB that the engine "
                f"takes outside it on a chip of {self.budget.chip / GIB:.2f} GiB"
            )
        if self.concurrency < 1:
            stage = self.fullest
            return (
                f"a request of {self.context} tokens needs {self.request_bytes[stage] / GIB:.2f} GiB of KV, "
                f"{self.free[stage] / GIB:.2f} GiB are free; the longest that fits is {self.longest()} tokens"
            )
        return None

    @property
    def free(self) -> tuple[float, float, float]:
        """Bytes left for KV on a chip of each stage."""
        first, middle, last = self.room.free
        return float(first), float(middle), float(last)
