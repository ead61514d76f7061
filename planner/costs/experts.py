"""Mixture of experts, counted: what one layer's experts compute on the fullest rank and what ranks exchange for them.

A group of ranks holds the experts whole (`ep` ranks hold different ones) and by width (`expert_tp` ranks hold each):
ep x expert_tp = ranks of the group; ep = 1 divides every expert over all of them. Attention in front of them runs in
`attention_dp` smaller groups, each with tokens of its own; 1 = one tensor-parallel group whose ranks all have every
token. Which experts tokens choose is `costs.routing`; no time, no file, no branch on a name.

Sources: DeepSeek-V3 (arXiv 2412.19437) section 3, "Insights into DeepSeek-V3" (arXiv 2505.09343) section 2.3.2 for what
an exchange sends, DeepEP's README for its two kinds of kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.layers import Formats, Operation, Pass, Transfer, gemm
from planner.costs.routing import destinations, distinct, fullest, limited_destinations, touched
from planner.costs.weights import Num, Shard
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.dtypes import WEIGHTS
from planner.specs.engine import Engine, Exchange
from planner.specs.model import Experts, Model

__all__ = ["Spread", "distinct", "expert_operations", "expert_transfers", "fullest", "touched", "with_expert_width"]

_LOGITS = 4.0
"""Bytes of a router's logit, softmax and top k in 32 bit."""
_CHOICE = 8.0
"""Bytes of a chosen expert: its number and its weight."""
_SCALE = 4.0
"""Bytes of the scale of a block of dispatched values."""


class Spread(NamedTuple):
    """How a group's ranks share the routed experts and the tokens that go to them; numbers or arrays over plans."""

    ep: Num = 1.0
    """Ranks over which whole experts are divided."""
    expert_tp: Num = 1.0
    """Ranks that divide the width of each expert."""
    attention_dp: Num = 1.0
    """Groups of ranks that run attention for different tokens: a divisor of ep x expert_tp."""
    redundant: Num = 0.0
    """Copies of popular experts beside the logical ones."""
    imbalance: Num = 1.0
    """Load of the fullest rank against the mean over many tokens; 1 = uniform routing."""
    total: Num | None = None
    """Tokens of the whole group; none = every attention group has as many as the one that is counted."""
    padded: Num | bool = False
    """Where tokens are not sent to the ranks of their experts, kernels run on the rows of all pairs of the group, a
    rank's own and zeros for the others (`Engine.expert_rows`)."""

    @property
    def ranks(self) -> Num:
        """Of the group."""
        return self.ep * self.expert_tp

    @property
    def attention_tp(self) -> Num:
        """Ranks that share the tokens of one attention group."""
        return self.ranks / self.attention_dp

    def tokens(self, work: Pass) -> Num:
        """Tokens of all attention groups."""
        return work.tokens * self.attention_dp if self.total is None else self.total

    def assignments(self, experts: Experts, work: Pass) -> Num:
        """(token, expert) pairs on the fullest rank."""
        tokens = self.tokens(work)
        return fullest(tokens, experts.top_k, experts.routed, self.ep, self.imbalance, self.redundant)

    def rows(self, experts: Experts, work: Pass) -> Num:
        """Rows that stand between the grouped products of the fullest rank, those of zeros included."""
        own = self.assignments(experts, work)
        return np.where(self.padded, np.maximum(own, self.tokens(work) * experts.top_k), own)

    def touched(self, experts: Experts, work: Pass) -> Num:
        """Experts of the fullest rank whose weights a pass reads."""
        rows = self.assignments(experts, work)
        return touched(rows, self.tokens(work), experts.top_k, experts.routed + self.redundant, self.ep)

    def held(self, experts: Experts) -> Num:
        """Routed experts in the memory of a rank, with redundant ones."""
        return np.ceil((experts.routed + self.redundant) / self.ep)


def with_expert_width(shard: Shard, model: Model, expert_tp: Num, multiple: int = 1) -> Shard:
    """The shard with the width of one expert on a rank where `expert_tp` ranks divide it, padded to `multiple`."""
    assert model.experts is not None
    width = np.ceil(np.ceil(model.experts.hidden / np.asarray(expert_tp, dtype=float)) / multiple) * multiple
    return shard._replace(expert=width)


def expert_operations(model: Model, shard: Shard, work: Pass, formats: Formats, spread: Spread) -> list[Operation]:
    """Operations of one layer's experts on the fullest rank, in place of a dense FFN's.

    The router runs in 16 bit on a rank's own tokens, the grouped products on what is sent to the rank (rows: its
    assignments; weights: its experts that have any). Ordering rows by expert, activation and weighted sum are
    memory-bound kernels. Shared experts are a dense FFN on the attention group's own tokens, divided over its ranks.
    Where rows are `padded`, only numbers are ordered (the product reads a token where it lies), and activation and
    weighted sum run on the pairs of all ranks, after the products have written zeros into those of others.

    Args:
        model: with experts.
        shard: `expert` is the width of a routed expert on a rank (`with_expert_width`).
        work: of one attention group.
        formats: experts are in `weights` and computed in `compute`.
        spread: of the group.
    """
    experts, d, native = _experts(model), model.hidden, formats.native
    own = work.tokens
    rows, every = spread.assignments(experts, work), spread.rows(experts, work)
    read = touched(rows, spread.tokens(work), experts.top_k, experts.routed + spread.redundant, spread.ep)
    inputs = model.ffn.inputs * shard.expert
    router = (d * experts.routed + experts.routed * experts.router_bias) * formats.weights.plain_bytes
    choosing = own * (2 * experts.routed * _LOGITS + experts.top_k * _CHOICE)
    ordering = np.where(spread.padded, every * 2 * _CHOICE, rows * d * 2 * ACT)
    operations = [
        gemm("router", own, d, experts.routed, router, native),
        Operation("top-k", "elementwise", native, activation_bytes=choosing),
        Operation("rows by expert", "elementwise", native, activation_bytes=ordering),
        _grouped("expert gate_up", rows, read, d, inputs, formats, inputs * experts.bias, every),
        Operation(
            "expert activation",
            "elementwise",
            native,
            activation_bytes=every * shard.expert * (model.ffn.inputs + 1) * ACT,
        ),
        _grouped("expert down", rows, read, shard.expert, d, formats, d * experts.bias, every),
        Operation("weighted sum", "elementwise", native, activation_bytes=(every + own) * d * ACT),
    ]
    return operations + _shared(model, own, formats, spread)


def _experts(model: Model) -> Experts:
    if model.experts is None:
        raise AssertionError(f"{model.name} has no experts to count")
    return model.experts


def _grouped(
    name: str, rows: Num, read: Num, inner: Num, outer: Num, formats: Formats, bias: Num, every: Num
) -> Operation:
    """Products [rows of an expert, inner] x [inner, outer] for all experts with rows, as one kernel.

    It writes `every` row, zeros into those that are not the rank's.
    """
    return Operation(
        name,
        "grouped_gemm",
        formats.compute,
        flops=2 * rows * inner * outer,
        weight_bytes=read * (inner * outer * formats.weights.bytes + bias * formats.weights.plain_bytes),
        activation_bytes=(rows * inner + every * outer) * ACT,
    )


def _shared(model: Model, rows: Num, formats: Formats, spread: Spread) -> list[Operation]:
    experts, d = _experts(model), model.hidden
    if not experts.shared_hidden:
        return []
    width = np.ceil(experts.shared_hidden / np.asarray(spread.attention_tp, dtype=float))
    inputs, each = model.ffn.inputs * width, formats.weights.bytes
    found = [
        gemm("shared gate_up", rows, d, inputs, d * inputs * each, formats.compute),
        Operation(
            "shared activation",
            "elementwise",
            formats.native,
            activation_bytes=rows * width * (model.ffn.inputs + 1) * ACT,
        ),
        gemm("shared down", rows, width, d, width * d * each, formats.compute),
    ]
    if experts.shared_gate:
        gate = gemm("shared gate", rows, d, 1, d * formats.weights.plain_bytes, formats.native)
        found.append(gate)
    return found


def expert_transfers(model: Model, engine: Engine, work: Pass, spread: Spread, nodes: Num = 1.0) -> list[Transfer]:
    """Transfers of one layer's experts over all ranks of the group; those that do not apply have no bytes.

    * One attention group (`attention_dp` = 1): every rank has all tokens, the partial outputs of its experts (whole or
      by width) and of shared ones are one all-reduce, as a dense FFN's; none where attention stands beside (its own
      all-reduce carries both).
    * Several, exchanging: each rank dispatches its share of its group's tokens and gets their outputs back, two
      all-to-alls. The normal kernel sends a copy to each rank that holds experts of the token, across nodes to each
      node (which hands it on inside); the low-latency one, in passes of decode rows, to each expert. Times
      `expert_tp`, since each of those ranks needs the token.
    * Several, where the engine gathers, or ep = 1 (every rank needs every token): all-gather and reduce-scatter.

    Where `attention_tp` > 1 the outputs are still to be gathered inside each attention group; that is attention's.

    Args:
        model: with experts; `groups` and `top_groups` limit how many nodes a token goes to.
        engine: its `exchange`, or a gather in 16 bit where it says nothing.
        work: of one attention group.
        spread: of the group.
        nodes: innermost domains of the network that the group spans.

    Returns:
        In the order in which they run; `bytes` of an all-to-all is what the fullest rank holds for all ranks, itself
        included, as `collectives.sent_bytes` takes it.
    """
    experts, exchange = _experts(model), engine.exchange or Exchange()
    apart = np.asarray(spread.attention_dp, dtype=float) > 1
    sends = apart & (np.asarray(spread.ep) > 1) & (exchange.kind == "all_to_all")
    gathers = apart & ~sends
    out, back = exchange_bytes(model, exchange)
    everything = spread.tokens(work)
    transfers = []
    if not model.parallel_block:
        size = work.tokens * model.hidden * ACT * ~apart
        transfers.append(Transfer("experts all-reduce", "all_reduce", size))
    if np.any(gathers):
        transfers.append(Transfer("tokens to experts", "all_gather", everything * out * gathers))
        transfers.append(Transfer("expert outputs", "reduce_scatter", everything * back * gathers))
    if np.any(sends):
        own = np.ceil(work.tokens / spread.attention_tp)
        quick = (own <= exchange.low_latency_tokens) & ~(np.asarray(work.prefill_tokens) > 0)
        each = copies(experts, spread, nodes)
        for suffix, kernel, mask, count in (
            ("", exchange.kernel, sends & ~quick, each),
            (", low latency", exchange.low_latency_kernel, sends & quick, experts.top_k * spread.expert_tp),
        ):
            if np.any(mask):
                held = own * count * mask
                transfers.append(Transfer(f"dispatch{suffix}", "all_to_all", held * out, kernel=kernel))
                transfers.append(Transfer(f"combine{suffix}", "all_to_all", held * back, kernel=kernel))
    return transfers


def exchange_bytes(model: Model, exchange: Exchange) -> tuple[float, float]:
    """(bytes of a token that is dispatched, with its scales; of an output that comes back)."""
    scales = _SCALE / exchange.scale_block if exchange.scale_block and WEIGHTS[exchange.dispatch].bytes < ACT else 0.0
    out = WEIGHTS[exchange.dispatch].bytes + scales
    return model.hidden * out, model.hidden * WEIGHTS[exchange.combine].bytes


def copies(experts: Experts, spread: Spread, nodes: Num) -> Num:
    """Copies of a token that the normal kernel sends, expected, one to itself included.

    One for each rank with its experts inside a node, one for each node with any of them across.
    """
    physical = experts.routed + spread.redundant
    inside = destinations(physical, experts.top_k, spread.ep) * spread.expert_tp
    if np.all(np.asarray(nodes) <= 1):
        return inside
    # ranks that divide an expert stand side by side: they fill nodes of their own beyond a node's size
    places = np.minimum(nodes, spread.ep)
    across = limited_destinations(physical, experts.top_k, places, experts.groups, experts.top_groups)
    return np.where(np.asarray(nodes) > 1, across * nodes / places, inside)
