"""Count: the operations and transfers of one pass through a layer of any kind, and what the ends of the model add.

A layer is attention (plain or latent) and an FFN (dense or of experts), each counted in its own module; here they are
put together, with the collectives that stand between them.
"""

from __future__ import annotations

from planner.costs import layers, layouts
from planner.costs.context import context_operations, context_transfers, part_of
from planner.costs.experts import Spread, expert_operations, expert_transfers, with_expert_width
from planner.costs.latent import latent_operations
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer
from planner.costs.weights import Num, Shard
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.engine import Engine
from planner.specs.model import Model


def count(
    model: Model,
    engine: Engine,
    shard: Shard,
    work: Pass,
    formats: Formats,
    structure: Structure,
    spread: Spread | None = None,
    nodes: Num = 1.0,
) -> tuple[list[Operation], list[Transfer]]:
    """Operations and transfers of one pass on the fullest rank of a tensor-parallel group.

    Args:
        model: what is computed.
        engine: whose collectives and kernels run.
        shard: the rank's share.
        work: of the whole group.
        formats: of weights and cache.
        structure: how attention and the projections are divided.
        spread: of the experts, in a layer that has them; none = a layer with a dense FFN.
        nodes: innermost domains of the network that the group spans.
    """
    if structure.context:
        own = part_of(work, shard.attention_dp)
        operations = context_operations(model, shard, work, formats, structure, engine.memory.latent_copies)
        transfers = context_transfers(model, shard, work, formats, structure)
        return _with_ffn(model, engine, shard, work, own, formats, structure, spread, nodes, operations, transfers)
    if spread is None and model.attention.latent is None and not structure.own_ffn:
        return layouts.count(model, engine, shard, work, formats, structure)
    own = work.divided(shard.attention_dp) if structure.attention == "data" else work
    if model.attention.latent is None:
        operations = layers.attention_projections(model, shard, own, formats)
        operations += layers.attention_operations(model, shard, own, formats, structure)
        operations += layers.attention_elementwise(model, shard, own, formats)
    else:
        copies = engine.memory.latent_copies
        operations = latent_operations(model, shard, work, formats, structure, copies)
        operations.append(layers.norm_operation(model, own, formats))
    together = spread is None and not structure.own_ffn
    transfers = layers.attention_transfers(model, shard, work, structure, formats, ffn=together)
    return _with_ffn(model, engine, shard, work, own, formats, structure, spread, nodes, operations, transfers)


def _with_ffn(
    model: Model,
    engine: Engine,
    shard: Shard,
    work: Pass,
    own: Pass,
    formats: Formats,
    structure: Structure,
    spread: Spread | None,
    nodes: Num,
    operations: list[Operation],
    transfers: list[Transfer],
) -> tuple[list[Operation], list[Transfer]]:
    """Attention's operations and transfers with those of the FFN and of the ends; `own` is what a group has of all."""
    if spread is None and structure.own_ffn:
        operations += layers.ffn_operations(model, shard, own, formats)
        reduced = own.tokens * model.hidden * ACT
        transfers.append(Transfer("all-reduce in the group", "all_reduce", reduced, axes="heads"))
    elif spread is None:
        operations += layers.ffn_operations(model, shard, work, formats)
    else:
        experts = model.experts
        assert experts is not None
        multiple = engine.memory.expert_multiple.get(formats.weights.name, 1)
        wide = with_expert_width(shard, model, spread.expert_tp, multiple)
        spread = spread._replace(total=work.tokens)
        operations += expert_operations(model, wide, own, formats, spread)
        transfers += expert_transfers(model, engine, own, spread, nodes)
        if structure.attention == "data":  # outputs come to one rank of a group, of which all want them
            size = own.tokens * model.hidden * ACT
            transfers.append(Transfer("expert outputs of the group", "all_gather", size, axes="heads"))
    operations += layers.end_operations(model, shard, own, formats)
    return operations, transfers + layers.end_transfers(model, engine, shard, own, structure)
