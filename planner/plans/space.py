"""The space of plans: every combination the rules allow, each refused one with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal, tp_allowed
from planner.specs.engine import Engine
from planner.specs.model import Model


class Filters(NamedTuple):
    """Which plans to look at: values per dimension, () = all that the rules allow."""

    tp: tuple[int, ...] = ()
    pp: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    cp: tuple[int, ...] = ()
    attention: tuple[str, ...] = ()
    prefill_attention: tuple[str, ...] = ()
    ffn: tuple[str, ...] = ()
    prefill_ffn: tuple[str, ...] = ()

    def distinct(self) -> Filters:
        """The same filters, a value named twice counted once."""
        return self._replace(**{name: tuple(dict.fromkeys(getattr(self, name))) for name in self._fields})


class Refused(NamedTuple):
    """A plan that cannot run, or cannot do what is asked, and why. `limit` says which kind: rule, memory or slo."""

    plan: Plan
    reason: str
    limit: str = "rule"


def enumerate_plans(
    model: Model, engine: Engine, placement: Placement, filters: Filters, weights: str | None = None
) -> tuple[list[Plan], list[Refused]]:
    """All plans under the filters that the rules allow, and those that were refused.

    Every tensor-parallel degree the model divides into and every pipeline depth up to its layers, not only divisors
    of the chips; without a dp filter, as many replicas as the chips hold.
    """
    allowed: list[Plan] = []
    refused: list[Refused] = []
    for plan in _candidates(model, engine, placement, filters, weights):
        reason = refusal(model, engine, placement, plan, weights)
        if reason is None:
            allowed.append(plan)
        else:
            refused.append(Refused(plan, reason))
    return allowed, refused


def _candidates(
    model: Model, engine: Engine, placement: Placement, filters: Filters, weights: str | None
) -> Iterator[Plan]:
    filters = filters.distinct()
    layouts = list(_layouts(engine, filters))
    for tp in filters.tp or range(1, min(placement.usable, model.attention.heads) + 1):
        deepest = max(1, min(model.layers, placement.usable // tp))
        bare = tp_allowed(model, engine, tp, weights) is not None or tp > placement.usable
        for pp in filters.pp or range(1, 1 + (1 if bare else deepest)):
            for cp, ep in product(filters.cp or (1,), filters.ep or (1,)):
                most = max(1, placement.replicas(tp, pp, cp))
                for dp, layout in product(filters.dp or (most,), layouts):
                    attention, prefill_attention, ffn, prefill_ffn = layout
                    if tp == 1 and attention == "batch" and not filters.attention:
                        continue  # one chip holds all heads of all its requests: the same plan twice
                    yield Plan(tp, pp, dp, ep, cp, attention, prefill_attention, ffn, prefill_ffn)


def _layouts(engine: Engine, filters: Filters) -> Iterator[tuple[str, str, str, str]]:
    for attention in filters.attention or engine.attention:
        prefills = filters.prefill_attention or (("heads", "batch") if attention == "batch" else ("heads",))
        yield from product((attention,), prefills, filters.ffn or ("1d",), filters.prefill_ffn or ("1d",))
