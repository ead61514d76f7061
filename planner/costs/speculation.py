"""Speculative decoding priced: a step drafts k tokens a request, verifies k + 1, and yields some of them.

With each drafted token accepted with probability a, as long as those before it were, a step yields

    (1 - a^(k+1)) / (1 - a)    tokens a request on average, k + 1 where a = 1

(Leviathan et al. 2023, equation 1). The target processes k + 1 rows a request: matrix products, collectives and logits
of k + 1 rows, attention of k + 1 queries over a KV cache that is read once. The draft runs k passes one after the other
on the chips of the last stage, in the same tensor-parallel group. The host pays a step once; a draft's passes pay what
their launches cost, no step of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Formats, Operation, Pass, Structure
from planner.costs.memory import Budget, Pages, Room, room
from planner.costs.roofline import Parts
from planner.costs.step import PassTime, Replica, pass_time, priced
from planner.costs.terms import Work
from planner.costs.weights import Num, Shard, Stages
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.engine import Engine
from planner.specs.model import Model
from planner.specs.speculation import Draft, Speculation

Array = NDArray[np.float64]
DRAFT = "draft: "
"""In front of the names of a draft's items."""


def tokens_per_step(tokens: Num, accept: Num) -> Num:
    """Tokens that a step yields a request on average: 1 where none is drafted, exactly.

    Args:
        tokens: k, drafted a step.
        accept: a, the probability that a drafted token is accepted, those before it being so.
    """
    k, a = np.asarray(tokens, dtype=float), np.asarray(accept, dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 is -inf, and exp of that 0
        some = -np.expm1((k + 1) * np.log(a)) / (1 - a)
    return np.where(k == 0, 1.0, np.where(a == 1, k + 1, some))


class Drafting(NamedTuple):
    """What drafts for all rows of a setting, and its number formats."""

    draft: Draft
    formats: Formats | None
    """None where nothing runs on the chips."""

    @classmethod
    def of(cls, draft: Draft, target: Formats, own: Callable[[Model, str], Formats]) -> Drafting:
        """A draft beside a target of these formats: modules have the target's, a model of its own its own weights.

        Args:
            draft: what proposes tokens.
            target: the target's formats; the dtype of its KV cache holds for the draft too.
            own: the formats of a model with a dtype of the KV cache.
        """
        if draft.model is None:
            return cls(draft, None)
        return cls(draft, own(draft.model, target.kv.name) if draft.kind == "model" else target)


def columns_of(speculation: Speculation | None) -> dict[str, float]:
    """The columns of `Rows` that say what is drafted."""
    if speculation is None:
        return {"spec_tokens": 0.0, "spec_accept": 0.0}
    return {"spec_tokens": float(speculation.tokens), "spec_accept": float(speculation.accept or 0.0)}


@dataclass(frozen=True, eq=False)
class _Drafter(Replica):
    """A draft's passes: their items are named so."""

    joins: bool = False
    """Whether each row's embedding is joined to the target's hidden state first (a prediction module)."""

    def term(self, name: str, parts: Parts, work: Callable[[], Work] = Work) -> Parts:
        """Parts that are one item of the draft."""
        return super().term(f"{DRAFT}{name}", parts, work)

    def seconds(self, work: Pass) -> Parts:
        """Of one pass."""
        time = pass_time(self, work).whole
        return time + self._joining(work) if self.joins else time

    def _joining(self, work: Pass) -> Parts:
        """Two norms, and the product [rows, 2 d] x [2 d, d] whole on every rank, as engines have it (in 16 bit)."""
        d, rows, native = self.model.hidden, work.tokens, self.formats.native
        plain = self.formats.weights.plain_bytes
        norms = Operation(
            "joining norms",
            "elementwise",
            native,
            times=2,
            weight_bytes=d * ACT,
            activation_bytes=rows * d * 2 * ACT,
        )
        product = Operation(
            "joining projection",
            "gemm",
            native,
            "first",
            flops=2 * rows * 2 * d * d,
            weight_bytes=2 * d * d * plain,
            activation_bytes=rows * 3 * d * ACT,
        )
        both = priced(self, norms) + priced(self, product)
        return both if self.hardware.roofline == "per_op" else both.settled()


@dataclass(frozen=True, eq=False)
class Speculating(Replica):
    """Replicas whose decode steps draft and verify."""

    tokens: Num = 0.0
    accept: Num = 0.0
    drafting: Drafting | None = None

    @classmethod
    def of(cls, replica: Replica, drafting: Drafting, tokens: Num, accept: Num) -> Speculating:
        """Replicas that draft so many tokens by row."""
        shared: dict[str, Any] = {each.name: getattr(replica, each.name) for each in fields(Replica)}
        return cls(**shared, tokens=tokens, accept=accept, drafting=drafting)

    @property
    def queries(self) -> Num:
        """Rows of a request in a step."""
        return self.tokens + 1.0

    @cached_property
    def emitted(self) -> Num:
        """Tokens of a request that a step yields."""
        return tokens_per_step(self.tokens, self.accept)

    @cached_property
    def drafter(self) -> _Drafter | None:
        """What runs the draft's passes: one stage on the same tensor-parallel group; none where nothing runs."""
        drafting = self.drafting
        if drafting is None or drafting.draft.model is None or drafting.formats is None:
            return None
        host = self.engine.host._replace(step_us=0.0, per_sequence_us=0.0)
        shared: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Replica)}
        return _Drafter(
            **shared
            | {
                "model": drafting.draft.model,
                "engine": self.engine._replace(host=host),
                "formats": drafting.formats,
                "pp": np.ones_like(self.pp),
                "structure": self.structure._replace(ffn="1d", prefill_ffn="1d"),  # a draft has no grid
                "x": None,
                "y": None,
            },
            joins=drafting.draft.kind == "mtp",
        )

    def pass_time(self, work: Pass) -> PassTime:
        """One pass of which each decoding request verifies its drafted tokens, and the draft behind it."""
        rows = work.decode_rows * self.queries
        verify = pass_time(self, work._replace(decode_rows=rows, queries=self.queries))
        if self.drafter is None:
            return verify
        draft = self._draft(self.drafter, work)
        last = verify.slowest.where(self.pp == 1, verify.last) + draft
        slowest = verify.slowest.where(verify.slowest.total >= last.total, last)
        return PassTime(verify.whole + draft, slowest, last)

    def _draft(self, drafter: _Drafter, work: Pass) -> Parts:
        """k passes, the first with the prompt tokens of this iteration too.

        A prediction module needs the target's hidden state of every token, and so its first pass has the rows that
        were verified; a model of its own has one row a request in each. Of a request's rows one is sampled from.
        """
        rows = self.queries if drafter.joins else 1.0
        first = work._replace(
            decode_rows=work.decode_rows * rows,
            queries=rows,
            unscored=work.decode_rows * (rows - 1.0),
            prompts_ended=0.0,  # the first draft behind a prompt is that of its first step
            window_pairs=work.prefill_pairs if _other_window(self.model, drafter.model) else work.window_pairs,
        )
        time = drafter.seconds(first) * (np.asarray(self.tokens) > 0)
        further = np.maximum(0.0, self.tokens - 1.0) * (np.asarray(work.decode_rows) > 0)
        if np.any(further):
            time = time + drafter.seconds(Pass(work.decode_rows, work.context)) * further
        return time


def _other_window(model: Model, draft: Model) -> bool:
    """Whether the pairs counted for the target's windows are not the draft's: it is then priced without its own."""
    return draft.attention.window not in (None, model.attention.window)


def iteration(replica: Replica, work: Pass) -> PassTime:
    """Seconds of one pass; of a replica that speculates, with its rows to verify and its drafts."""
    return replica.pass_time(work)


def per_token(replica: Replica, step: Parts) -> Parts:
    """A decode step's share of one token of each request."""
    return step * (1.0 / replica.emitted) if isinstance(replica, Speculating) else step


def answer_steps(replica: Replica, osl: Num) -> Num:
    """Passes that an answer takes: the one that ends the prompt, then decode steps."""
    return (osl - 1) / replica.emitted + 1 if isinstance(replica, Speculating) else osl


def decode_rows(replica: Replica, requests: Num) -> Num:
    """Tokens of an iteration's budget that decoding requests take."""
    return requests * replica.queries if isinstance(replica, Speculating) else requests


def decoded(replica: Replica, requests: Num) -> Num:
    """Tokens that decoding requests yield in one iteration."""
    return requests * replica.emitted if isinstance(replica, Speculating) else requests


def room_with_draft(
    space: Room,
    drafting: Drafting | None,
    tokens: Num,
    engine: Engine,
    structure: Structure,
    budget: Budget,
    tp: Num,
    pp: Num,
) -> Room:
    """Memory with a draft model beside the target: its weights and its KV on the chips of the last stage.

    Prediction modules are the target's own and counted by `costs.memory.room`. The engine's reserve for activations
    serves both models in turn.

    Args:
        space: the target's.
        drafting: what drafts.
        tokens: k by row; a row that drafts none loads no draft.
        engine: of both.
        structure: likewise.
        budget: of a chip.
        tp: ranks of the group that both share, by row.
        pp: stages of the target by row.
    """
    if drafting is None or drafting.draft.kind != "model" or drafting.draft.model is None or drafting.formats is None:
        return space
    model = drafting.draft.model
    shard = Shard.for_engine(model, engine, drafting.formats.weights.name, tp)
    one = Stages.of(model, np.ones_like(pp))
    own = room(model, engine, shard, one, drafting.formats, structure, budget)
    loaded, alone = np.asarray(tokens) > 0, np.asarray(pp) == 1
    ends = (loaded & alone, None, loaded & ~alone)

    def beside(values: tuple[Num, Num, Num], more: Num) -> tuple[Num, Num, Num]:
        first, middle, last = (
            value if end is None else value + more * end for value, end in zip(values, ends, strict=True)
        )
        return first, middle, last

    pages = own.pages[0]
    held = pages.full + pages.window  # a draft's windows are not cut: engines keep one table of blocks for both
    full = beside((space.pages[0].full, space.pages[1].full, space.pages[2].full), held)
    state = beside((space.pages[0].state, space.pages[1].state, space.pages[2].state), pages.state)
    each = [Pages(f, page.window, s) for f, page, s in zip(full, space.pages, state, strict=True)]
    return space._replace(
        weights=beside(space.weights, own.weights[0]),
        tables=beside(space.tables, own.tables[0]),
        pages=(each[0], each[1], each[2]),
    )
