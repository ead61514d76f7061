"""One pass with the sequence cut over chips for everything but attention (Ulysses), for prompts and decodes alike.

Of P = SP x TP chips each has 1/TP of the projections and 1/SP of a pass's tokens. For attention an all-to-all in each
group of SP chips turns that into all tokens of 1/P of the heads, and a second one turns it back; the outputs are then
projected and reduced over the TP group alone (Rajbhandari et al. 2025, algorithm 1; Jacobs et al. 2023). Tokens are
padded to a multiple of SP. Where P is more than the KV heads, each is sent to all chips whose queries need it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.costs import layers
from planner.costs.collectives import Network
from planner.costs.layers import Operation, Pass, Structure, Transfer
from planner.costs.rows import Rows
from planner.costs.serving import Setting
from planner.costs.step import Replica
from planner.costs.teams import Groups
from planner.costs.weights import Num, Shard
from planner.specs.dtypes import ACTIVATION_BYTES as ACT

_SP = "sequence parallel"


@dataclass(frozen=True, eq=False)
class SequenceReplica(Replica):
    """Replicas whose tensor-parallel groups of `tp` chips stand `sp` times side by side, each with its own tokens."""

    sp: NDArray[np.int_] | None = None
    """none = 1."""

    @property
    def ways(self) -> NDArray[np.int_]:
        """Groups that a pass's tokens are divided over."""
        return np.ones_like(self.tp) if self.sp is None else self.sp

    def groups(self, axes: str) -> Groups:
        """Those of the whole replica, or of the chips that hold other tokens of the same weights."""
        return Groups.of(self.ways) if axes == _SP else super().groups(axes)

    def count(self, work: Pass, experts: bool) -> tuple[list[Operation], list[Transfer]]:
        """Operations and transfers of one pass through a dense layer, and at the ends of the model."""
        assert not experts
        model, formats, shard = self.model, self.formats, self.shard
        narrow = self.attention_shard
        own = Pass(np.ceil(work.tokens / self.ways), 1.0)  # as so many rows: projections do not tell rows apart
        operations = layers.attention_projections(model, shard, own, formats)
        operations += layers.attention_operations(model, narrow, work, formats, Structure())
        _, *attended = layers.attention_elementwise(model, narrow, work, formats)
        operations += [layers.norm_operation(model, own, formats), *attended]
        operations += layers.ffn_operations(model, shard, own, formats)
        embedding, *ends = layers.end_operations(model, shard, work, formats, normed=own.tokens)
        operations += [embedding._replace(activation_bytes=own.tokens * model.hidden * 2 * ACT), *ends]
        return operations, self._transfers(work, own, narrow)

    @property
    def attention_shard(self) -> Shard:
        """What of attention a chip has: 1/P of the heads."""
        stored = self.formats.weights.name
        return Shard.for_engine(self.model, self.engine, stored, self.tp * self.ways)

    def _transfers(self, work: Pass, own: Pass, narrow: Shard) -> list[Transfer]:
        model, shard, tokens = self.model, self.shard, own.tokens
        reduced = tokens * model.hidden * ACT
        out, back = exchanged(tokens, shard.heads, narrow.kv_heads * self.ways, model.attention.head_dim)
        transfers = [
            Transfer("all-reduce", "all_reduce", reduced, times=1 if model.parallel_block else 2),
            Transfer("tokens to heads", "all_to_all", out, axes=_SP),
            Transfer("heads to tokens", "all_to_all", back, axes=_SP),
        ]
        if self.engine.embedding_all_reduce:
            transfers.append(Transfer("embedding all-reduce", "all_reduce", reduced, "first"))
        gathered = tokens * self.ways * model.hidden * ACT
        transfers.append(Transfer("tokens of all groups", "all_gather", gathered, "last", axes=_SP))
        logits = work.logits * shard.vocab * shard.attention_tp * ACT
        return [*transfers, Transfer("logits all-gather", "all_gather", logits, "last")]


def exchanged(tokens: Num, heads: Num, kv_heads: Num, head_dim: int) -> tuple[Num, Num]:
    """Bytes that a chip holds before the all-to-all into attention and before the one out of it.

    Args:
        tokens: that it has.
        heads: query heads of its part of the projections.
        kv_heads: KV heads of it, a head that several chips attend with once for each.
        head_dim: of a head.
    """
    return tokens * (heads + 2 * kv_heads) * head_dim * ACT, tokens * heads * head_dim * ACT


def sequence_replica(setting: Setting, rows: Rows, sp: int) -> SequenceReplica:
    """What passes of these rows, `sp` groups of rows' `tp` chips each, are counted and priced for."""
    tp = rows.tp.astype(int)
    return SequenceReplica(
        setting.model,
        setting.hardware,
        setting.engine,
        Network(setting.placement, setting.engine),
        setting.formats,
        setting.structure,
        tp,
        np.ones_like(tp),
        rows.dp.astype(int),
        sp=np.full_like(tp, sp),
    )
