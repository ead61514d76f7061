"""One pass over a group of instances, each a tensor-parallel group with all weights, that share a batch's tokens.

A group of d instances has a degree of parallelism (DoP) of d:

* **prompts** (striped or ring attention): each instance has 1/d of the tokens, balanced; keys and values go round in
  d - 1 hops a layer, each behind 1/d of an instance's attention. What stays of them on which instance is free to
  choose, so that a batch is scaled down to fewer instances on the way, with no transfer of its own (Wu et al. 2024,
  section 4.1);
* **decode steps** (several masters): KV lies on all d, spread by tokens; m of them are masters, each with the
  projections and FFN of 1/m of the requests and their new KV. Queries go to all instances and partial outputs come
  back, behind the masters' own attention (section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.costs import layers
from planner.costs.collectives import Network
from planner.costs.context import sums_of_blocks
from planner.costs.layers import LSE, Operation, Pass, Structure, Transfer
from planner.costs.roofline import Parts
from planner.costs.rows import Rows
from planner.costs.serving import Setting
from planner.costs.step import PassTime, Replica, pass_time, priced
from planner.costs.teams import Groups
from planner.costs.weights import Num
from planner.specs.dtypes import ACTIVATION_BYTES as ACT


@dataclass(frozen=True, eq=False)
class ElasticReplica(Replica):
    """Groups of `degree` instances of `tp` chips each; every instance has all layers."""

    degree: int = 1
    """d."""
    masters: int | None = None
    """m; none = d. More than d where instances without any of the KV take over requests' projections."""

    def _own(self, work: Pass) -> Pass:
        """What an instance has of a pass, as rows of its projections."""
        d, m = self.degree, np.minimum(self.masters or self.degree, np.maximum(1.0, work.requests))
        return work._replace(
            decode_rows=np.ceil(work.decode_rows / m),
            prefill_tokens=np.ceil(np.asarray(work.prefill_tokens) / d),
            prompts_ended=np.ceil(np.asarray(work.prompts_ended) / d),
        )

    def _attended(self, work: Pass) -> Pass:
        """What an instance attends to: all decodes over its part of their tokens, its part of the prompts' pairs."""
        shared = ("prefill_tokens", "prefill_pairs", "prefill_prior", "window_pairs")
        return work._replace(
            context=np.ceil(np.asarray(work.context) / self.degree),
            **{name: np.asarray(getattr(work, name)) / self.degree for name in shared},
        )

    def count(self, work: Pass, experts: bool) -> tuple[list[Operation], list[Transfer]]:
        """Operations and transfers of one pass inside an instance (those between instances: `pass_time`)."""
        assert not experts
        model, formats, shard, own = self.model, self.formats, self.shard, self._own(work)
        structure = Structure()
        operations = layers.attention_projections(model, shard, own, formats)
        operations += self._attention(work)
        if self.degree > 1:
            operations.append(self._sums(own))
        operations += layers.attention_elementwise(model, shard, own, formats)
        operations += layers.ffn_operations(model, shard, own, formats)
        operations += layers.end_operations(model, shard, own, formats)
        transfers = layers.attention_transfers(model, shard, own, structure, formats, ffn=True)
        return operations, transfers + layers.end_transfers(model, self.engine, shard, own, structure)

    def _attention(self, work: Pass) -> list[Operation]:
        """Of prompts in d kernels, one for each hop."""
        found = layers.attention_operations(self.model, self.shard, self._attended(work), self.formats, Structure())
        return [self._in_hops(each) if each.kind == "attention_prefill" else each for each in found]

    def _in_hops(self, operation: Operation) -> Operation:
        """The same work in as many kernels as there are hops, each of which reads the queries again."""
        amounts = ("flops", "kv_bytes")
        shares = {name: getattr(operation, name) / self.degree for name in amounts}
        return operation._replace(times=operation.times * self.degree, **shares)

    def _sums(self, own: Pass) -> Operation:
        """Adding up a prompt's outputs of one hop after the other."""
        width = self.model.attention.head_dim
        return sums_of_blocks(
            "attention (prefill)", own.prefill_tokens * self.shard.heads, width, self.degree - 1, self.formats
        )

    def pass_time(self, work: Pass) -> PassTime:
        """One pass, with what it waits for between instances."""
        alone = pass_time(self, work)
        if max(self.degree, self.masters or 1) == 1:
            return alone
        prompts, decodes = Parts(), Parts()
        for operation in self._attention(work):
            if operation.kind == "attention_prefill":
                prompts = prompts + priced(self, operation)
            else:
                decodes = decodes + priced(self, operation)
        piece = np.asarray(prompts.total) / self.degree
        waits: Num = 0.0
        if self.degree > 1:
            waits = (self.degree - 1) * np.maximum(0.0, self._hop(work) - piece) * (np.asarray(work.prefill_tokens) > 0)
        waits = waits + np.maximum(0.0, self._exchange(work) - np.asarray(decodes.total))
        shown = Parts(network=waits * self.model.layers)
        return PassTime(alone.whole + shown, alone.slowest + shown)

    def _hop(self, work: Pass) -> Num:
        """Seconds in which every chip sends the keys and values of its instance's tokens on."""
        tokens = np.asarray(work.prefill_tokens) / self.degree
        size = tokens * 2 * self.shard.kv_heads * self.model.attention.head_dim * self.formats.kv.bytes
        return self.network.over("send", self._beside(self.degree), size * np.ones_like(self.tp))

    def _beside(self, instances: int) -> Groups:
        """Chips of the same rank in so many instances."""
        return Groups.of(np.full_like(self.tp, instances), self.tp)

    def _exchange(self, work: Pass) -> Num:
        """Seconds in which queries go to all instances and partial outputs come back."""
        rows, heads, dh = np.asarray(work.decode_rows), self.shard.heads, self.model.attention.head_dim
        together = max(self.degree, self.masters or 1)
        groups, every = self._beside(together), np.ones_like(self.tp)
        out = self.network.over("all_gather", groups, rows * heads * dh * ACT * every)
        back = self.network.over("all_to_all", groups, rows * heads * (dh * ACT + LSE) * every)
        return out + back


def elastic_replica(setting: Setting, rows: Rows, degree: int, masters: int | None = None) -> ElasticReplica:
    """What passes of these rows, each over `degree` instances of rows' `tp` chips, are counted and priced for."""
    tp = rows.tp.astype(int)
    one = np.ones_like(tp)
    return ElasticReplica(
        setting.model,
        setting.hardware,
        setting.engine,
        Network(setting.placement, setting.engine),
        setting.formats,
        setting.structure,
        tp,
        one,
        rows.dp.astype(int),
        degree=degree,
        masters=masters,
    )
