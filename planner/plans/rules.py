"""Why a plan cannot run: divisibility, the engine's limits, the chips there are. One sentence each, with a way out."""

from __future__ import annotations

from collections.abc import Iterable

from planner.plans.placement import Placement
from planner.plans.plan import FFN, Plan
from planner.specs.engine import Engine
from planner.specs.model import Model
from planner.specs.speculation import KINDS, Draft


def refusal(model: Model, engine: Engine, placement: Placement, plan: Plan, weights: str | None = None) -> str | None:
    """The first rule that a plan breaks, as a sentence; none if it may run (memory is not looked at here)."""
    return _not_yet(model, plan) or shape_refusal(model, engine, plan, weights) or chips_refusal(placement, plan)


def _near(wanted: int, valid: Iterable[int]) -> str:
    """The valid values around a wanted one."""
    ordered = sorted(valid)
    below = [value for value in ordered if value < wanted][-1:]
    above = [value for value in ordered if value > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"


def tp_allowed(model: Model, engine: Engine, tp: int, weights: str | None = None) -> str | None:
    """Why a model cannot be split tp ways with weights of this dtype (its own where none is named), or none."""
    attention = model.attention
    if attention.heads % tp:
        return f"does not divide the {attention.heads} query heads"
    if attention.latent is None and attention.kv_heads % tp and tp % attention.kv_heads:
        return f"neither divides the {attention.kv_heads} KV heads nor is a multiple of them"
    for what, width in _widths(model):
        if width % tp:
            return f"does not divide the {what}'s {width}"
    multiple = engine.vocabulary_multiple
    padded = -(-model.vocab // multiple) * multiple
    if multiple > 1 and padded % tp:
        return f"does not divide the vocabulary padded to {padded}"
    return _misaligned(model, engine, tp, weights or model.weights)


def _widths(model: Model) -> list[tuple[str, int]]:
    """Widths between the projections of a layer that tensor parallelism divides."""
    kinds, experts = model.layer_kinds(), model.experts
    widths = [("FFN", model.ffn.hidden)] if not all(kind.experts for kind in kinds) else []
    if experts is not None:
        widths.append(("expert", experts.hidden))
        widths += [("shared expert", experts.shared_hidden)] if experts.shared_hidden else []
    return widths


def _misaligned(model: Model, engine: Engine, tp: int, weights: str) -> str | None:
    """Why the groups or blocks of a quantised format do not divide a rank's share of what projections read."""
    block = model.weight_block if weights == model.weights else 0
    multiple = max(engine.shard_multiple.get(weights, 1), block)
    attention = model.attention
    dim = attention.latent.value_dim if attention.latent else attention.head_dim
    widths = _widths(model)
    if model.quantised == "linears":
        widths.insert(0, ("attention output", attention.heads * dim))
    if model.quantised == "experts":
        widths = [(what, width) for what, width in widths if what != "FFN"]
    for what, width in widths:
        if width // tp % multiple:
            return f"leaves a rank {width // tp} of the {what}'s {width}, no multiple of {weights}'s {multiple}"
    return None


def shape_refusal(model: Model, engine: Engine, plan: Plan, weights: str | None = None) -> str | None:
    """Why the engine refuses this split of this model, whatever the chips: one sentence, or none."""
    rules = (_experts, _pipeline, _attention)
    reasons = (rule(model, engine, plan) for rule in rules)
    return _tensor_parallel(model, engine, plan, weights) or next((reason for reason in reasons if reason), None)


def _tensor_parallel(model: Model, engine: Engine, plan: Plan, weights: str | None) -> str | None:
    reason = tp_allowed(model, engine, plan.tp, weights)
    if reason is None:
        return None
    valid = [tp for tp in range(1, model.attention.heads + 1) if tp_allowed(model, engine, tp, weights) is None]
    return f"tp {plan.tp} {reason}; nearest valid: {_near(plan.tp, valid)}"


def attention_dp_refusal(engine: Engine, tp: int, attention_dp: int) -> str | None:
    """Why a tensor-parallel group cannot hold so many groups of data-parallel attention, or none."""
    if attention_dp == 1:
        return None
    if engine.attention_dp is None:
        return f"engine {engine.name} has no data-parallel attention: --attention-dp 1"
    if engine.attention_dp == "equal" and attention_dp != tp:
        return f"attention-dp {attention_dp} is not tp {tp}, as engine {engine.name} wants; nearest valid: {tp}"
    if tp % attention_dp:
        valid = [degree for degree in range(1, tp + 1) if tp % degree == 0]
        return f"attention-dp {attention_dp} does not divide tp {tp}; nearest valid: {_near(attention_dp, valid)}"
    return None


def _experts(model: Model, engine: Engine, plan: Plan) -> str | None:
    if plan.ep == 1:
        return None
    if model.experts is None:
        return f"ep {plan.ep}: {model.name} has no experts to spread"
    routed = model.experts.routed
    if routed % plan.ep:
        valid = [ep for ep in range(1, routed + 1) if routed % ep == 0]
        return f"ep {plan.ep} does not divide the {routed} experts; nearest valid: {_near(plan.ep, valid)}"
    return None


def _pipeline(model: Model, engine: Engine, plan: Plan) -> str | None:
    if plan.pp > model.layers:
        return f"pp {plan.pp} is more than the {model.layers} layers; nearest valid: {model.layers}"
    if not engine.uneven_stages and model.layers % plan.pp:
        valid = [pp for pp in range(1, model.layers + 1) if model.layers % pp == 0]
        return f"pp {plan.pp} does not divide the {model.layers} layers; nearest valid: {_near(plan.pp, valid)}"
    return None


def _not_yet(model: Model, plan: Plan) -> str | None:
    unpriced = {"experts": model.experts, "latent attention": model.attention.latent, "linear attention": model.linear}
    for what, present in unpriced.items():
        if present is not None:
            fits = f"`plan memory --model {model.name}` says what fits"
            return f"{model.name} has {what}, whose time is not priced yet; {fits}"
    if plan.cp > 1:
        return f"cp {plan.cp}: context parallelism is not priced yet; use --tp and --pp"
    if plan.ffn not in FFN or plan.prefill_ffn not in FFN:
        return f"FFN layout {plan.ffn}/{plan.prefill_ffn} is not priced yet; there is {', '.join(FFN)}"
    return None


def draft_refusal(draft: Draft, engine: Engine, plan: Plan, *, priced: bool = True) -> str | None:
    """Why the engine does not draft so, or the draft cannot run (or be `priced`) on a plan's tensor-parallel group.

    Prediction modules have the shapes of their model, whose rules are looked at anyway.
    """
    words = None if engine.launch is None else engine.launch.speculation.get(draft.kind)
    if words is not None and words.unsupported is not None:
        return f"engine {engine.name} cannot speculate with {KINDS[draft.kind]}: {words.unsupported}"
    if words is not None and plan.pp > 1 and not words.pipeline:
        return (
            f"engine {engine.name} cannot speculate with {KINDS[draft.kind]} over {plan.pp} pipeline stages: use one, "
            "or no --spec-tokens"
        )
    if draft.kind != "model" or draft.model is None:
        return None
    reason = (_not_yet(draft.model, plan._replace(cp=1)) if priced else None) or _tensor_parallel(
        draft.model, engine, plan, None
    )
    return reason and f"the draft {draft.model.name} shares the chips of a tensor-parallel group: {reason}"


def _attention(model: Model, engine: Engine, plan: Plan) -> str | None:
    for wanted in (plan.attention, plan.prefill_attention):
        if wanted not in engine.attention:
            return f"engine {engine.name} cannot shard attention over {wanted}; it offers {', '.join(engine.attention)}"
    if plan.prefill_attention == "batch" and plan.attention != "batch":
        return (
            "a prefill over the batch writes KV by request, which a decode over heads cannot read: use batch for both"
        )
    return None


def chips_refusal(placement: Placement, plan: Plan) -> str | None:
    """Why a plan does not find its chips on a machine, or none."""
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
