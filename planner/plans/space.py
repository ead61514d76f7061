"""The space of plans: every combination the rules allow, each refused one with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from planner.plans.placement import Mesh, Placement
from planner.plans.plan import Plan, grid_axes, grid_text, layouts_of
from planner.plans.rules import Shapes, most_ranks, sharding_refusal, tp_allowed
from planner.plans.sharding import WORDS, Sharding, implied_along, implied_prefill
from planner.specs.engine import Engine
from planner.specs.model import Model

SLACK = 1.5
"""Grids that move more than so many times the bytes of the best one are not looked at."""


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
    grid: tuple[str, ...] = ()

    def distinct(self) -> Filters:
        """The same filters, a value named twice counted once."""
        named = self._replace(grid=tuple(grid and grid_text(grid) for grid in self.grid))
        return self._replace(**{name: tuple(dict.fromkeys(getattr(named, name))) for name in self._fields})


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
    of the chips; without a dp filter, as many replicas as the chips hold. Products of attention are looked at with
    pipelines of 1, 2, 4, 8, ... stages (others where --pp names them), expert parallelism as `_spreads` says.
    """
    allowed: list[Plan] = []
    refused: list[Refused] = []
    shapes = Shapes(model, engine, weights)
    for plan in _candidates(model, engine, placement, filters, shapes):
        reason = shapes.refusal(plan, placement)
        if reason is None:
            allowed.append(plan)
        else:
            refused.append(Refused(plan, reason))
    return allowed, refused


def _candidates(model: Model, engine: Engine, placement: Placement, filters: Filters, shapes: Shapes) -> Iterator[Plan]:
    filters = filters.distinct()
    for tp in filters.tp or _degrees(model, engine, placement):
        products = list(_products(model, engine, tp)) if tp <= placement.usable else []
        sharding = list(_sharding(engine, filters, products))
        too_wide = tp > placement.usable
        deepest = max(1, min(model.layers, placement.usable // tp))
        layouts = list(_layouts(model, engine, placement, filters, tp))
        spreads = filters.ep or _spreads(model, engine, placement, tp)
        for pp in filters.pp or range(1, 1 + deepest):
            for cp, ep in product((1,) if 1 in (filters.cp or (1,)) else (), spreads):
                most = max(1, placement.replicas(tp, pp))
                for dp, (attention, prefill_attention), layout in product(filters.dp or (most,), sharding, layouts):
                    if tp == 1 and attention == "batch" and not filters.attention:
                        continue  # one chip holds all heads of all its requests: the same plan twice
                    if attention not in WORDS and not filters.attention:
                        if layout[:2] != ("1d", "1d"):
                            continue  # products go with 1d only
                        if pp & (pp - 1) and not filters.pp:
                            continue  # and are looked at on one stage and on powers of two
                    plan = Plan(tp, pp, dp, ep, cp, attention, prefill_attention, *layout)
                    if pp > 1 and not filters.pp and (too_wide or shapes.shape_refusal(plan._replace(pp=1))):
                        continue  # refused on one stage for what stages do not change
                    yield plan
    if any(cp > 1 for cp in filters.cp) or (engine.prompt_context and not filters.cp):
        yield from _contexts(model, engine, placement, filters, shapes)


def _contexts(model: Model, engine: Engine, placement: Placement, filters: Filters, rules: Shapes) -> Iterator[Plan]:
    """Plans that divide prompts over groups: where nothing is named, 2, 4, 8, ... of them on 1, 2, 4, ... stages."""
    named = filters.ffn or filters.prefill_ffn or filters.grid
    if not filters.cp and named and {*filters.ffn, *filters.prefill_ffn} != {"1d"}:
        return
    decode = filters.ffn or (("2d",) if filters.grid else (None,))  # other layouts are refused with the reason
    for tp in filters.tp or range(1, 1 + min(placement.usable // 2, most_ranks(model, engine))):
        if not filters.tp and tp_allowed(model, engine, tp, rules.weights, ep=tp if model.experts else 1):
            continue
        room = max(1, placement.usable // tp)
        deepest = [2**power for power in range(room.bit_length()) if 2**power <= model.layers]
        for cp in filters.cp or [2**power for power in range(1, room.bit_length())]:
            if cp == 1:
                continue
            spreads = filters.ep or _spreads(model, engine, placement, tp * cp)
            words = list(_context_words(engine, filters, tp, cp))
            shapes = [
                Plan(tp, 1, 1, ep, cp, attention, along, *layouts_of(ffn, prefill_ffn))
                for ep, (attention, along), ffn, prefill_ffn in product(
                    spreads, words, decode, filters.prefill_ffn or (None,)
                )
            ]
            if not filters.cp:  # none is named: those that one stage refuses are not looked at
                shapes = [shape for shape in shapes if rules.shape_refusal(shape) is None]
            for pp in filters.pp or deepest:
                most = placement.replicas(tp, pp, cp)
                if most or filters.cp:
                    yield from (
                        shape._replace(pp=pp, dp=dp) for shape in shapes for dp in filters.dp or (max(1, most),)
                    )


def _context_words(engine: Engine, filters: Filters, tp: int, cp: int) -> Iterator[tuple[str, str]]:
    """(where the cache lies, how prompts are processed) over cp groups of tp chips."""
    lying = ("heads", Sharding(tp, 1, cp).word, Sharding(tp, cp).word)
    for attention in filters.attention or lying:
        implied = implied_along(attention)
        for along in filters.prefill_attention or engine.prompt_context or (implied,):
            fits = along == "ulysses" if attention == lying[0] else along != "ulysses" or attention == lying[2]
            if fits or filters.attention or filters.prefill_attention:
                yield attention, along


def _degrees(model: Model, engine: Engine, placement: Placement) -> Iterator[int]:
    """Degrees of tensor parallelism: up to one head a rank, and beyond where a grid or groups want fewer parts."""
    most = min(placement.usable, most_ranks(model, engine))
    yield from range(1, most + 1)
    beyond: set[int] = set()
    if "2d" in engine.ffn:
        beyond.update(placement.torus_groups or range(1, (placement.hardware.domain or 0) + 1))
    if engine.attention_dp and model.experts is not None:
        beyond.update(2**power for power in range(1, placement.usable.bit_length()))
        beyond.add(placement.usable)
    if engine.decode_context == "any" and model.attention.heads <= placement.usable:
        rounds = placement.usable // model.attention.heads
        beyond.update(model.attention.heads * 2**power for power in range(rounds.bit_length()))
    yield from sorted(size for size in beyond if most < size <= placement.usable)


def _sharding(engine: Engine, filters: Filters, products: list[str]) -> list[tuple[str, str]]:
    """(attention in decode, in prefill): the engine's words, and the products that it can run over a group's ranks."""
    found = []
    for attention in filters.attention or (*engine.attention, *products):
        implied = implied_prefill(attention)
        if attention in products and not filters.attention and implied not in (filters.prefill_attention or (implied,)):
            continue  # a product says how prompts are processed
        prefills = filters.prefill_attention or ((implied, "batch") if attention == "batch" else (implied,))
        found += list(product((attention,), prefills))
    return found


def _products(model: Model, engine: Engine, tp: int) -> Iterator[str]:
    sizes = [size for size in range(1, tp + 1) if tp % size == 0]
    for batch, sequence in product(sizes, sizes):
        if batch * sequence > 1 and tp % (batch * sequence) == 0:
            parts = Sharding(tp // batch // sequence, batch, sequence)
            plan = Plan(tp, attention=parts.word, prefill_attention=implied_prefill(parts.word))
            if sharding_refusal(model, engine, plan) is None:
                yield parts.word


def _spreads(model: Model, engine: Engine, placement: Placement, tp: int) -> list[int]:
    """Degrees of expert parallelism that are worth a look over tp ranks.

    None, the largest that the experts allow, and one domain's ranks where a group spans several; others are looked at
    where they are named.
    """
    experts = model.experts
    if experts is None or engine.expert_parallel is None:
        return [1]
    held = experts.routed + (engine.exchange.redundant if engine.exchange else 0)

    def divides(ep: int) -> bool:
        return experts.routed % ep == 0 or held % ep == 0

    if engine.expert_parallel == "group":
        return [ep for ep in dict.fromkeys((1, tp)) if divides(ep)]
    domain = placement.hardware.domain or tp
    fitting = [ep for ep in range(1, tp + 1) if tp % ep == 0 and divides(ep)]
    inside = [ep for ep in fitting if ep <= domain]
    return list(dict.fromkeys((1, inside[-1], fitting[-1])))


def _layouts(
    model: Model, engine: Engine, placement: Placement, filters: Filters, tp: int
) -> Iterator[tuple[str, str, str]]:
    """(layout in decode, in prefill, grid) that store weights alike, of those that the engine runs or that are named.

    Weights are gathered for decode steps only where that is named: a step has one token a request, and a layer's
    weights cost what the activations of thousands of tokens do. Grids that move more than `SLACK` times the bytes of
    the best one are left out unless they are named.
    """
    named = filters.ffn or filters.prefill_ffn or filters.grid
    if not named and (model.experts is not None or model.attention.latent is not None):
        yield "1d", "1d", ""  # others are not counted for experts and latent attention (`rules`)
        return
    own = filters.ffn or tuple(name for name in engine.ffn if name in ("1d", "2d"))
    prefills = filters.prefill_ffn or engine.ffn
    found = False
    for grid in filters.grid or ("", *(mesh.text for mesh in _grids(model, engine, placement, tp))):
        for ffn, prefill_ffn in product(own, prefills):
            if _stored_alike(ffn, prefill_ffn, grid, tp, named=bool(filters.grid)):
                found = True
                yield ffn, prefill_ffn, grid
    if not found:  # to be refused with the reason
        wanted, then = (values[0] if values else None for values in (filters.ffn, filters.prefill_ffn))
        if filters.grid and not (wanted or then) and "2d" in engine.ffn:
            wanted = "2d"
        yield *layouts_of(wanted, then), filters.grid[0] if filters.grid else ""


def _stored_alike(ffn: str, prefill_ffn: str, grid: str, tp: int, named: bool) -> bool:
    """Whether two layouts belong to a grid: to its storage, and to no grid with fewer parts."""
    pair = {ffn, prefill_ffn}
    if pair == {"1d"} or tp == 1:
        return pair == {"1d"} and not grid
    x, _, z = grid_axes(grid) if grid else (1, tp, 1)
    if x == 1:
        return pair <= {"1d", "wg-xyz"} and not grid
    return "1d" not in pair and ("wg-xy" in pair) <= (z > 1) and (z == 1 or "wg-xy" in pair or named)


def _grids(model: Model, engine: Engine, placement: Placement, tp: int) -> list[Mesh]:
    """The grids of a group with X > 1 that are worth a look (see `_layouts`)."""
    if "2d" not in engine.ffn:
        return []
    meshes = [mesh for mesh in placement.meshes(tp) if mesh.sizes[0] > 1]
    moved = {mesh: wire_elements(model, mesh) for mesh in meshes}
    least = min(moved.values(), default=0.0)
    return [mesh for mesh in meshes if moved[mesh] <= SLACK * least]


def default_grid(model: Model, placement: Placement, tp: int) -> str:
    """The grid that moves the least in layout 2d; "" where a group has none with X > 1."""
    meshes = [mesh for mesh in placement.meshes(tp) if mesh.sizes[0] > 1 and mesh.sizes[2] == 1]
    return min(meshes, key=lambda mesh: wire_elements(model, mesh)).text if meshes else ""


def wire_elements(model: Model, mesh: Mesh) -> float:
    """Elements a token sends over each wire of a chip in one layer of layout 2d (Pope et al. 2022, section 3.2.2).

    Exact: 2 E/X (YZ-1)/YZ along YZ, and the columns of all projections over YZ, (X-1)/X of them, along X.
    """
    x, y, z = mesh.sizes
    ways, attention = y * z, model.attention
    heads = 2 * (attention.heads + attention.kv_heads)
    columns = (model.ffn.inputs + 1) * model.ffn.hidden + heads * attention.head_dim
    sent = {"yz": 2 * model.hidden / x * (ways - 1) / ways, "x": columns / ways * (x - 1) / x}
    boxes = {axes: mesh.box(axes) for axes in sent}
    return sum(elements / (box.wires if (box := boxes[axes]) and box.wires else 1) for axes, elements in sent.items())
