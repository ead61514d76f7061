"""Why a plan cannot run: divisibility, the engine's limits, the chips there are. One sentence each, with a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.plans.placement import Placement
from planner.plans.plan import FFN, Plan
from planner.specs.engine import Engine
from planner.specs.model import Model

Rule = Callable[[Model, Engine, Placement, Plan], str | None]


def refusal(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    """The first rule that a plan breaks, as a sentence; none if it may run (memory is not looked at here)."""
    return next((reason for rule in RULES if (reason := rule(model, engine, placement, plan))), None)


def _near(wanted: int, valid: Iterable[int]) -> str:
    """The valid values around a wanted one."""
    ordered = sorted(valid)
    below = [value for value in ordered if value < wanted][-1:]
    above = [value for value in ordered if value > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"


def tp_allowed(model: Model, engine: Engine, tp: int) -> str | None:
    """Why a model cannot be split tp ways, or none."""
    attention = model.attention
    if attention.heads % tp:
        return f"does not divide the {attention.heads} query heads"
    if attention.kv_heads % tp and tp % attention.kv_heads:
        return f"neither divides the {attention.kv_heads} KV heads nor is a multiple of them"
    if model.ffn.hidden % tp:
        return f"does not divide the FFN's {model.ffn.hidden}"
    multiple = engine.vocabulary_multiple
    padded = -(-model.vocab // multiple) * multiple
    if multiple > 1 and padded % tp:
        return f"does not divide the vocabulary padded to {padded}"
    return None


def _tensor_parallel(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    reason = tp_allowed(model, engine, plan.tp)
    if reason is None:
        return None
    valid = [tp for tp in range(1, model.attention.heads + 1) if tp_allowed(model, engine, tp) is None]
    return f"tp {plan.tp} {reason}; nearest valid: {_near(plan.tp, valid)}"


def _pipeline(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    if plan.pp > model.layers:
        return f"pp {plan.pp} is more than the {model.layers} layers"
    if not engine.uneven_stages and model.layers % plan.pp:
        valid = [pp for pp in range(1, model.layers + 1) if model.layers % pp == 0]
        return f"pp {plan.pp} does not divide the {model.layers} layers; nearest valid: {_near(plan.pp, valid)}"
    return None


def _not_yet(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    unpriced = {"experts": model.experts, "latent attention": model.attention.latent, "linear attention": model.linear}
    for what, present in unpriced.items():
        if present is not None:
            return f"{model.name} has {what}, whose time is not priced yet; `plan show {model.name}` has its shapes"
    if plan.ep > 1:
        return f"ep {plan.ep}: {model.name} has no experts to spread"
    if plan.cp > 1:
        return f"cp {plan.cp}: context parallelism is not priced yet; use --tp and --pp"
    if plan.ffn not in FFN or plan.prefill_ffn not in FFN:
        return f"FFN layout {plan.ffn}/{plan.prefill_ffn} is not priced yet; there is {', '.join(FFN)}"
    return None


def _attention(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    for wanted in (plan.attention, plan.prefill_attention):
        if wanted not in engine.attention:
            return f"engine {engine.name} cannot shard attention over {wanted}; it offers {', '.join(engine.attention)}"
    if plan.prefill_attention == "batch" and plan.attention != "batch":
        return (
            "a prefill over the batch writes KV by request, which a decode over heads cannot read: use batch for both"
        )
    return None


def _chips(model: Model, engine: Engine, placement: Placement, plan: Plan) -> str | None:
    if plan.chips > placement.usable:
        where = f"the slice {placement.slice} has" if placement.slice else "there are"
        return f"{plan.label} takes {plan.chips} chips, {where} {placement.usable}"
    if placement.slice and plan.tp * plan.cp not in placement.torus_groups:
        return (
            f"tp {plan.tp} does not tile the slice {placement.slice}; nearest: {_near(plan.tp, placement.torus_groups)}"
        )
    most = placement.replicas(plan.tp, plan.pp, plan.cp)
    if plan.dp > most:
        return f"dp {plan.dp}: only {most} replicas fit without a tensor-parallel group straddling two domains"
    return None


RULES: tuple[Rule, ...] = (_not_yet, _tensor_parallel, _pipeline, _attention, _chips)
