"""Why a plan cannot run: divisibility, the engine's limits, the chips there are. One sentence each, with a way out."""

from __future__ import annotations

from collections.abc import Iterable

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.specs.engine import Engine
from planner.specs.model import Model
from planner.specs.speculation import KINDS, Draft

PADDING = 1.5
"""Query heads after padding, at most so many times those of the model."""


def refusal(model: Model, engine: Engine, placement: Placement, plan: Plan, weights: str | None = None) -> str | None:
    """The first rule that a plan breaks, as a sentence; none if it may run (memory is not looked at here)."""
    return _not_yet(model, plan) or shape_refusal(model, engine, plan, weights) or chips_refusal(placement, plan)


def _near(wanted: int, valid: Iterable[int]) -> str:
    """The valid values around a wanted one."""
    ordered = sorted(valid)
    below = [value for value in ordered if value < wanted][-1:]
    above = [value for value in ordered if value > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"


def tp_allowed(model: Model, engine: Engine, tp: int, weights: str | None = None, x: int = 1) -> str | None:
    """Why a model cannot be split tp ways with weights of this dtype (its own where none is named), or none.

    Where the model's width is divided over X of the ranks, the heads' projections are over the other tp / X.
    """
    attention, ways = model.attention, tp // x
    if reason := _heads(model, engine, tp) and _heads(model, engine, ways):
        return reason
    for ranks in (tp, ways):  # those of attention, and those that its projections are divided over
        if attention.latent is None and attention.kv_heads % ranks and ranks % attention.kv_heads:
            return f"neither divides the {attention.kv_heads} KV heads nor is a multiple of them"
    for what, width in _widths(model):
        if width % tp:
            return f"does not divide the {what}'s {width}"
    multiple = engine.vocabulary_multiple
    padded = -(-model.vocab // multiple) * multiple
    if multiple > 1 and padded % tp:
        return f"does not divide the vocabulary padded to {padded}"
    return _misaligned(model, engine, tp, weights or model.weights)


def _heads(model: Model, engine: Engine, ways: int) -> str | None:
    """Why the query heads do not go over so many ranks, with padding where the engine pads; none if they do."""
    heads = model.attention.heads
    padded = -(-heads // ways) * ways
    if padded == heads or (engine.head_padding and padded <= PADDING * heads):
        return None
    reason = f"does not divide the {heads} query heads"
    return f"{reason}, which would be padded to {padded}" if engine.head_padding else reason


def most_ranks(model: Model, engine: Engine) -> int:
    """The largest degree over which query heads alone may go."""
    return int(model.attention.heads * (PADDING if engine.head_padding else 1))


def _widths(model: Model) -> list[tuple[str, int]]:
    """Widths between the projections of a layer that tensor parallelism divides."""
    experts = model.experts
    dense = experts is None or not all(kind.experts for kind in model.layer_kinds())
    widths = [("FFN", model.ffn.hidden)] if dense else []
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
    rules = (_experts, _pipeline, _attention, _layouts)
    reasons = (rule(model, engine, plan) for rule in rules)
    return _tensor_parallel(model, engine, plan, weights) or next((reason for reason in reasons if reason), None)


def _tensor_parallel(model: Model, engine: Engine, plan: Plan, weights: str | None) -> str | None:
    reason = tp_allowed(model, engine, plan.tp, weights, plan.axes[0])
    if reason is None:
        return None
    valid = [tp for tp in range(1, most_ranks(model, engine) + 1) if tp_allowed(model, engine, tp, weights) is None]
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


_STORED = {"1d": "slices of the FFN's width alone", "2d": "X x YZ pieces"}


def _layouts(model: Model, engine: Engine, plan: Plan) -> str | None:
    """Why the engine does not run two layouts, or they and the grid do not go together."""
    pair = (plan.ffn, plan.prefill_ffn)
    for wanted in pair:
        if wanted not in engine.ffn:
            return f"engine {engine.name} has no FFN layout {wanted}; it offers {', '.join(engine.ffn)}"
    if pair == ("1d", "1d"):
        if plan.grid:
            return f"grid {plan.grid}: layout 1d keeps {_STORED['1d']}; leave the grid out, or use layout 2d"
        return None
    if plan.tp == 1:
        return f"FFN layout {next(word for word in pair if word != '1d')}: one chip has nothing to divide; use 1d"
    return _grid(model, plan)


def _grid(model: Model, plan: Plan) -> str | None:
    pair, (x, y, z) = (plan.ffn, plan.prefill_ffn), plan.axes
    if x * y * z != plan.tp:
        return f"grid {plan.grid} has {x * y * z} chips, tp is {plan.tp}"
    if "1d" in pair and x > 1:
        return (
            f"FFN layouts {plan.ffn} and {plan.prefill_ffn} on a grid of {plan.grid}: 1d keeps {_STORED['1d']}, "
            f"{next(word for word in pair if word != '1d')} in {_STORED['2d']}, and switching would move all weights; "
            "use 2d for 1d"
        )
    for wanted in pair:
        if wanted in ("2d", "wg-x", "wg-xy") and x == 1:
            grid = f"grid {plan.grid} has" if plan.grid else "without a grid there is"
            least = next(x for x in range(2, plan.tp + 1) if plan.tp % x == 0)
            as_this = f"{least}x{plan.tp // least}"
            return f"FFN layout {wanted}: {grid} no X to divide the model's width over; give one, as {as_this}"
        if wanted == "wg-xy" and z == 1:
            return f"FFN layout wg-xy: grid {plan.grid} has no Z; with X and Y alone it is wg-xyz"
    if model.hidden % x:
        return f"X = {x} of grid {plan.grid} does not divide the model's width of {model.hidden}"
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
    if plan.grid and placement.mesh(plan.axes) is None:
        return f"grid {plan.grid}: {_grids(placement, plan.tp)}"
    most = placement.replicas(plan.tp, plan.pp, plan.cp)
    if plan.dp > most:
        return f"dp {plan.dp}: only {most} replicas fit without a tensor-parallel group straddling two domains"
    return None


def _grids(placement: Placement, tp: int) -> str:
    """Which grids a group of chips can be read as."""
    meshes = [mesh.text for mesh in placement.meshes(tp) if mesh.sizes[0] > 1]
    if not meshes:
        return f"the {tp} chips of a tensor-parallel group leave a domain, where there are no axes; use layout 1d"
    what = "" if placement.slice is None else f", a box of {'x'.join(map(str, placement.torus_groups[tp].axes))},"
    return f"{tp} chips{what} can be {', '.join(meshes)}"
