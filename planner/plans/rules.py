"""Why a plan cannot run: divisibility, the engine's limits, the chips there are. One sentence each, with a way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.sharding import ALONG, WORDS, Sharding, implied_prefill
from planner.specs.engine import Engine
from planner.specs.model import Model
from planner.specs.speculation import KINDS, Draft

PADDING = 1.5
"""Query heads after padding, at most so many times those of the model."""


def refusal(model: Model, engine: Engine, placement: Placement, plan: Plan, weights: str | None = None) -> str | None:
    """The first rule that a plan breaks, as a sentence; none if it may run (memory is not looked at here)."""
    return Shapes(model, engine, weights).refusal(plan, placement)


def _near(wanted: int, valid: Iterable[int]) -> str:
    """The valid values around a wanted one."""
    ordered = sorted(valid)
    below = [value for value in ordered if value < wanted][-1:]
    above = [value for value in ordered if value > wanted][:1]
    return " or ".join(map(str, below + above)) or "none"


def tp_allowed(
    model: Model,
    engine: Engine,
    tp: int,
    weights: str | None = None,
    x: int = 1,
    groups: int = 1,
    ep: int = 1,
    sequence: int = 1,
    cp: int = 1,
) -> str | None:
    """Why a model cannot be split tp ways with weights of this dtype (its own where none is named), or none.

    Where the model's width is divided over X of the ranks, the heads' projections are over the other tp / X; groups of
    data-parallel attention have all of them each, and with expert parallelism dense FFNs; ep ranks have whole experts.
    Ranks beyond the heads that share a cache by tokens compute the same heads' projections, as often as they go round.
    With context parallelism `tp` are the ranks of each of cp groups, over all of which experts are divided.
    """
    attention, over, ways = model.attention, tp // groups, max(1, tp // x // groups)
    round_again = sequence > 1 and over > attention.heads and over % attention.heads == 0
    ways_of_heads = max(1, over // sequence) if round_again else ways
    if reason := _heads(model, engine, over) and _heads(model, engine, ways_of_heads):
        return reason
    kept = [over // sequence] if sequence > 1 else []
    for ranks in (over, ways, *kept):  # those of attention, those that divide its projections, or a token's cache
        if attention.latent is None and attention.kv_heads % ranks and ranks % attention.kv_heads:
            return f"neither divides the {attention.kv_heads} KV heads nor is a multiple of them"
    for what, width, over in _widths(model, tp, groups, ep, cp):
        if width % over:
            return f"does not divide the {what}'s {width}"
    multiple = engine.vocabulary_multiple
    padded = -(-model.vocab // multiple) * multiple
    if multiple > 1 and padded % (tp // groups):  # groups of data-parallel attention have all of it each
        return f"does not divide the vocabulary padded to {padded}"
    return _misaligned(model, engine, tp, weights or model.weights, groups, ep, cp)


def _group_parts(plan: Plan) -> tuple[int, int, int]:
    """(groups of data-parallel attention, ep, ranks along a sequence), 1 where they do not divide the ranks."""
    if plan.cp > 1:
        return 1, plan.ep, 1
    _, groups, sequence = plan.sharding
    fit = plan.tp % (groups * sequence) == 0
    return (groups if fit else 1), plan.ep, (sequence if fit else 1)


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


def _widths(model: Model, tp: int, groups: int, ep: int, cp: int = 1) -> list[tuple[str, int, int]]:
    """(what, width between the projections of a layer, ranks that divide it)."""
    own = max(1, tp // groups) if ep > 1 else tp
    experts = model.experts
    dense = experts is None or experts.first_dense > 0 or experts.every > 1
    widths = [("FFN", model.ffn.hidden, own)] if dense else []
    if experts is not None:
        widths.append(("expert", experts.hidden, max(1, tp * cp // ep)))
        widths += [("shared expert", experts.shared_hidden, own)] if experts.shared_hidden else []
    return widths


def _misaligned(
    model: Model, engine: Engine, tp: int, weights: str, groups: int = 1, ep: int = 1, cp: int = 1
) -> str | None:
    """Why the groups or blocks of a quantised format do not divide a rank's share of what projections read."""
    block = model.weight_block if weights == model.weights else 0
    multiple = max(engine.shard_multiple.get(weights, 1), block)
    attention = model.attention
    dim = attention.latent.value_dim if attention.latent else attention.head_dim
    widths = _widths(model, tp, groups, ep, cp)
    if model.quantised == "linears":
        widths.insert(0, ("attention output", attention.heads * dim, max(1, tp // groups)))
    if model.quantised == "experts":
        widths = [each for each in widths if each[0] != "FFN"]
    for what, width, over in widths:
        if width // over % multiple:
            return f"leaves a rank {width // over} of the {what}'s {width}, no multiple of {weights}'s {multiple}"
    return None


def shape_refusal(model: Model, engine: Engine, plan: Plan, weights: str | None = None) -> str | None:
    """Why the engine refuses this split of this model, whatever the chips: one sentence, or none."""
    return Shapes(model, engine, weights).shape_refusal(plan)


class Shapes:
    """The rules of one model under one engine, with weights of one dtype (its own where none is named), for many plans.

    Of the rules on a split whatever the chips only one looks at the depth of the pipeline, and none at the number of
    replicas: the others are asked once for all plans that differ in these alone, as thousands do.
    """

    def __init__(self, model: Model, engine: Engine, weights: str | None = None) -> None:
        self.model, self.engine, self.weights = model, engine, weights
        self._known: dict[Plan, tuple[str | None, str | None]] = {}

    def refusal(self, plan: Plan, placement: Placement) -> str | None:
        """As the function of this name."""
        return _not_yet(self.model, plan) or self.shape_refusal(plan) or chips_refusal(placement, plan)

    def shape_refusal(self, plan: Plan) -> str | None:
        """As the function of this name."""
        shape = plan._replace(pp=1, dp=1)
        if shape not in self._known:
            self._known[shape] = self._before_stages(shape), self._after_stages(shape)
        before, after = self._known[shape]
        return before or _pipeline(self.model, self.engine, plan) or after

    def _before_stages(self, plan: Plan) -> str | None:
        """The first rule that a plan breaks, of those that come before the one on its stages."""
        tensor_parallel = _tensor_parallel(self.model, self.engine, plan, self.weights, lambda: self.degrees)
        return tensor_parallel or _plain_only(self.model, plan) or _experts(self.model, self.engine, plan)

    def _after_stages(self, plan: Plan) -> str | None:
        rules = (_context, sharding_refusal, _attention, _layouts)
        return next((reason for rule in rules if (reason := rule(self.model, self.engine, plan))), None)

    @cached_property
    def degrees(self) -> list[int]:
        """The degrees over which the plain layout of the weights goes."""
        most = most_ranks(self.model, self.engine)
        return [tp for tp in range(1, most + 1) if tp_allowed(self.model, self.engine, tp, self.weights) is None]


def _tensor_parallel(
    model: Model, engine: Engine, plan: Plan, weights: str | None, valid: Callable[[], Iterable[int]]
) -> str | None:
    reason = tp_allowed(model, engine, plan.tp, weights, plan.axes[0], *_group_parts(plan), plan.cp)
    return reason and f"tp {plan.tp} {reason}; nearest valid: {_near(plan.tp, valid())}"


def sharding_refusal(model: Model, engine: Engine, plan: Plan) -> str | None:
    """Why an engine does not divide attention as a plan's product says, or none."""
    if plan.cp > 1:
        return None  # `_context` has looked
    if plan.prefill_attention in ALONG:
        return f"prefill attention {plan.prefill_attention} divides a prompt over --cp groups, of which there is one"
    if plan.attention in WORDS:
        if plan.prefill_attention in WORDS:
            return None
        return f"prefill attention {plan.prefill_attention} wants the same word for decode, which is {plan.attention}"
    parts, wanted = plan.sharding, implied_prefill(plan.attention)
    ill = {
        f"is for {parts.chips} chips, tp is {plan.tp}": parts.chips != plan.tp * plan.cp,
        f"is written {parts.word}": plan.attention != parts.word,
        "is written heads": parts.heads == parts.chips > 1,
        f"keeps its projections so that prefill is {wanted}": plan.prefill_attention != wanted,
        "goes with FFN layout 1d only": (plan.ffn, plan.prefill_ffn) != ("1d", "1d"),
    }
    wrong = next((reason for reason, holds in ill.items() if holds), None)
    if wrong is not None:
        return f"attention {plan.attention} {wrong}"
    return _groups_refusal(model, engine, plan.tp, parts) or _sequence_refusal(model, engine, parts)


def _context(model: Model, engine: Engine, plan: Plan) -> str | None:
    """Why the groups of context parallelism cannot share prompts, or do not find what is in the cache, or none."""
    if plan.cp == 1:
        return None
    word, cp = plan.prefill_attention, plan.cp
    offered = ", ".join(engine.prompt_context)
    if not engine.prompt_context:
        return f"cp {cp}: engine {engine.name} does not divide a prompt's tokens over chips; cp 1, or --engine ideal"
    if word not in ALONG:
        return f"cp {cp}: prefill attention {word} leaves prompts whole; expected one of {offered}"
    if word not in engine.prompt_context:
        return f"engine {engine.name} cannot process prompts by {word}; it offers {offered}"
    if (plan.ffn, plan.prefill_ffn) != ("1d", "1d"):
        return f"cp {cp}: every group has all projections to itself, which goes with FFN layout 1d only"
    return _cached(plan) or (_exchange(model, engine, plan.stage_chips) if word == "ulysses" else None)


def _cached(plan: Plan) -> str | None:
    """Why a cache is not decoded where a prompt leaves it, or none.

    Parts of its tokens stay with the groups that computed them (`seq`), or the group that will decode the request
    keeps all that passes by (`batch`); after an exchange for heads each chip has heads of all tokens (`heads`), which
    a group may also gather to itself (`batch`).
    """
    tp, cp, word = plan.tp, plan.cp, plan.prefill_attention
    apart, shared = Sharding(tp, cp).word, Sharding(tp, 1, cp).word
    if plan.attention not in ("heads", apart, shared):
        each = "a chip" if tp == 1 else f"{tp} chips"
        return f"cp {cp}: attention {plan.attention} is none of heads, {shared} and {apart}, of {cp} groups of {each}"
    if plan.attention == "heads" and word != "ulysses":
        return f"prefill attention {word} leaves the cache by tokens: it is decoded as {shared} or {apart}, not heads"
    if plan.attention == shared and word == "ulysses":
        return f"prefill attention ulysses leaves the cache by heads: it is decoded as heads or {apart}, not {shared}"
    return None


def _exchange(model: Model, engine: Engine, ways: int) -> str | None:
    """Why heads do not go over all chips of a stage, or none."""
    reason, kv_heads = _heads(model, engine, ways), model.attention.kv_heads
    if reason is None and model.attention.latent is None and kv_heads % ways and ways % kv_heads:
        reason = f"neither divides the {kv_heads} KV heads nor is a multiple of them"
    return reason and f"prefill attention ulysses over tp x cp = {ways} {reason}"


def _plain_only(model: Model, plan: Plan) -> str | None:
    """What is not counted for experts and latent attention."""
    kind = "latent attention" if model.attention.latent else "experts" if model.experts else None
    if kind is None:
        return None
    if (plan.ffn, plan.prefill_ffn) != ("1d", "1d"):
        return f"FFN layout {plan.ffn}: a model with {kind} runs in layout 1d only"
    if "batch" in (plan.attention, plan.prefill_attention) and model.attention.latent:
        return "attention batch: latent attention is divided by products, as batch8"
    return None


def _groups_refusal(model: Model, engine: Engine, tp: int, parts: Sharding) -> str | None:
    if parts.batch > 1 and model.experts is None and engine.attention_dp and not engine.attention_dp_dense:
        return f"engine {engine.name} has data-parallel attention for models with experts only; use dp for {model.name}"
    return attention_dp_refusal(engine, tp, parts.batch)


def _sequence_refusal(model: Model, engine: Engine, parts: Sharding) -> str | None:
    if parts.sequence == 1:
        return None
    if engine.decode_context is None:
        return f"attention {parts.word}: engine {engine.name} keeps a request's cache whole on its ranks; leave seq out"
    kv_heads = 1 if model.attention.latent else model.attention.kv_heads
    copies = parts.heads * parts.sequence / kv_heads
    if engine.decode_context == "copies" and copies % parts.sequence:
        return (
            f"attention {parts.word}: engine {engine.name} divides the {max(1.0, copies):g} copies of a KV head by "
            f"tokens, not into {parts.sequence} parts"
        )
    return None


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
    if engine.expert_parallel is None:
        return f"ep {plan.ep}: engine {engine.name} divides every expert over all ranks; ep 1"
    ranks, routed = plan.tp * plan.cp, model.experts.routed
    held = routed + (engine.exchange.redundant if engine.exchange else 0)
    if engine.expert_parallel == "group" and plan.ep != ranks:
        return f"ep {plan.ep}: engine {engine.name} spreads experts over all {ranks} ranks of a group; ep {ranks} or 1"
    for whole, what in ((ranks, "ranks of a stage"), (routed, "experts")):
        if what == "experts" and held % plan.ep == 0:
            continue  # copies of popular experts fill the ranks
        if whole % plan.ep:
            valid = [ep for ep in range(1, whole + 1) if whole % ep == 0]
            return f"ep {plan.ep} does not divide the {whole} {what}; nearest valid: {_near(plan.ep, valid)}"
    return None


def _pipeline(model: Model, engine: Engine, plan: Plan) -> str | None:
    if plan.pp > model.layers:
        return f"pp {plan.pp} is more than the {model.layers} layers; nearest valid: {model.layers}"
    if not engine.uneven_stages and model.layers % plan.pp:
        valid = [pp for pp in range(1, model.layers + 1) if model.layers % pp == 0]
        return f"pp {plan.pp} does not divide the {model.layers} layers; nearest valid: {_near(plan.pp, valid)}"
    return None


def _not_yet(model: Model, plan: Plan) -> str | None:
    unpriced = {"linear attention": model.linear}
    for what, present in unpriced.items():
        if present is not None:
            fits = f"`plan memory --model {model.name}` says what fits"
            return f"{model.name} has {what}, whose time is not priced yet; {fits}"
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
    if plan.cp > 1:
        return f"cp {plan.cp}: drafting is not counted with context parallelism; leave out --cp or --spec-tokens"
    model = draft.model
    if draft.kind != "model" or model is None:
        return None
    reason = (_not_yet(model, plan._replace(cp=1)) if priced else None) or _tensor_parallel(
        model, engine, plan, None, lambda: Shapes(model, engine).degrees
    )
    return reason and f"the draft {model.name} shares the chips of a tensor-parallel group: {reason}"


def _attention(model: Model, engine: Engine, plan: Plan) -> str | None:
    if plan.cp > 1:
        return None
    for wanted in (plan.attention, plan.prefill_attention):
        if wanted in WORDS and wanted not in engine.attention:
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
    groups = placement.torus_groups
    for what, size in (("tp", plan.tp), ("cp", plan.cp), ("tp x cp", plan.stage_chips)):
        if placement.slice and size not in groups and (what == "tp" or plan.cp > 1):
            return f"{what} {size} does not tile the slice {placement.slice}; nearest: {_near(size, groups)}"
    if (plan.cp > 1 or plan.sharding.batch > 1) and placement.slice is None and (domain := _straddled(placement, plan)):
        fitting = [size for size in range(1, domain + 1) if domain % size == 0]
        group = _group(plan)
        return (
            f"{plan.label}: of groups of {group} chips side by side one would straddle two domains of {domain}; "
            f"nearest size that does not: {_near(group, fitting)}"
        )
    if plan.grid and placement.mesh(plan.axes) is None:
        return f"grid {plan.grid}: {_grids(placement, plan.tp)}"
    most = placement.replicas(plan.tp, plan.pp, plan.cp)
    if plan.dp > most:
        return f"dp {plan.dp}: only {most} replicas fit without a tensor-parallel group straddling two domains"
    return None


def _group(plan: Plan) -> int:
    """Chips of each of the groups that a stage is made of: of context parallelism, or of data-parallel attention."""
    return plan.tp if plan.cp > 1 else plan.tp // plan.sharding.batch


def _straddled(placement: Placement, plan: Plan) -> int | None:
    """A domain that holds a group, but not a whole number of them, and not the stage; none if there is none.

    What a group sends is priced inside the domain, so that it has to lie there.
    """
    sizes, group = (level.chips for level in placement.hardware.network[:-1]), _group(plan)
    return next((size for size in sizes if size and group < size < plan.stage_chips and size % group), None)


def _grids(placement: Placement, tp: int) -> str:
    """Which grids a group of chips can be read as."""
    meshes = [mesh.text for mesh in placement.meshes(tp) if mesh.sizes[0] > 1]
    if not meshes:
        return f"the {tp} chips of a tensor-parallel group leave a domain, where there are no axes; use layout 1d"
    what = "" if placement.slice is None else f", a box of {'x'.join(map(str, placement.torus_groups[tp].axes))},"
    return f"{tp} chips{what} can be {', '.join(meshes)}"
