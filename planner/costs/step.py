"""One forward pass of a replica: its operations and transfers, priced and laid over the pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.counting import count
from planner.costs.experts import Spread
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer
from planner.costs.layouts import resting_bytes
from planner.costs.roofline import Parts, price_operation, resources
from planner.costs.teams import Groups
from planner.costs.terms import Terms, Work
from planner.costs.weights import Num, Shard, Stages, Trio, stage_layers
from planner.specs.engine import Engine, Exchange
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.units import US


@dataclass(frozen=True, eq=False)
class Replica:
    """Replicas of one structure, over arrays of degrees: what a pass is counted and priced for."""

    model: Model
    hardware: Hardware
    engine: Engine
    network: Network
    formats: Formats
    structure: Structure
    tp: NDArray[np.int_]
    pp: NDArray[np.int_]
    dp: NDArray[np.int_]
    itemised: bool = False
    """Whether times remember what they are made of (`costs.terms`)."""
    x: NDArray[np.int_] | None = None
    y: NDArray[np.int_] | None = None
    """Of the grids of X x Y x Z = tp chips; none = 1 and tp."""
    attention_dp: NDArray[np.int_] | None = None
    sequence: NDArray[np.int_] | None = None
    """Groups with requests of their own, and ranks that share a request's cache by tokens; none = 1."""
    ep: NDArray[np.int_] | None = None
    """Ranks over which whole experts are divided; none = 1."""
    cp: NDArray[np.int_] | None = None
    """Groups that share the tokens of a pass, of `tp` ranks in all; none = 1."""

    def term(self, name: str, parts: Parts, work: Callable[[], Work] = Work) -> Parts:
        """Parts that are one item, with its work where anybody asks."""
        return Terms.single(name, parts, work()) if self.itemised else parts

    @cached_property
    def _groups(self) -> dict[str, Groups]:
        return {"xyz": Groups.of(self.tp)}

    def groups(self, axes: str) -> Groups:
        """Rows by the chips along these axes of their tensor-parallel group; xyz is the whole of it."""
        if axes == "heads" and axes not in self._groups:
            self._groups[axes] = Groups.of(self.tp // self.own_groups)
        if axes == "context" and axes not in self._groups:
            ways = np.ones_like(self.tp) if self.cp is None else self.cp
            self._groups[axes] = Groups.of(ways, self.tp // ways)
        if axes == "sequence" and axes not in self._groups:
            self._groups[axes] = Groups.of(np.ones_like(self.tp) if self.sequence is None else self.sequence)
        if axes not in self._groups:
            self._groups[axes] = Groups.along(self.network.placement, axes, self._grids)
        return self._groups[axes]

    @cached_property
    def _grids(self) -> tuple[NDArray[np.int_], NDArray[np.int_], NDArray[np.int_]]:
        x = np.ones_like(self.tp) if self.x is None else self.x
        y = self.tp if self.y is None else self.y
        return x, y, self.tp // (x * y)

    @cached_property
    def shard(self) -> Shard:
        """The fullest rank's share of the tensors."""
        x, y, _ = self._grids
        all_ways = (self.attention_dp, self.sequence, self.ep, self.cp)
        dp, parts, ep, cp = (1 if ways is None else ways for ways in all_ways)
        stored = self.formats.weights.name
        return Shard.for_engine(self.model, self.engine, stored, self.tp, dp, x, y, parts, ep, cp)

    @property
    def own_groups(self) -> NDArray[np.int_]:
        """Groups of ranks with projections of their own."""
        one = np.ones_like(self.tp)
        return one * (1 if self.attention_dp is None else self.attention_dp) * (1 if self.cp is None else self.cp)

    @cached_property
    def spread(self) -> Spread:
        """How the group's ranks share the experts."""
        ep, exchange = (1 if self.ep is None else self.ep), self.engine.exchange or Exchange()
        sent = (self.own_groups > 1) & (np.asarray(ep) > 1) & (exchange.kind == "all_to_all")
        padded = ~sent & (self.engine.expert_rows == "all")
        return Spread(ep, self.tp / ep, self.own_groups, exchange.redundant, exchange.imbalance, padded=padded)

    @cached_property
    def nodes(self) -> NDArray[np.int_]:
        """Innermost domains that a group spans."""
        domain = self.network.placement.hardware.domain
        return np.ones_like(self.tp) if domain is None else -(-self.tp // domain)

    @cached_property
    def layer_counts(self) -> list[tuple[bool, Trio]]:
        """(whether it has experts, how many on the first, a middle and the last stage) of each kind of layer."""
        stages = self.stages
        if self.model.experts is None:
            return [(False, (stages.first, stages.middle, stages.last))]
        found: dict[bool, list[Num]] = {}
        for kind, counts in stage_layers(self.model, stages):
            held = found.get(kind.experts, [0.0, 0.0, 0.0])
            found[kind.experts] = [own + more for own, more in zip(held, counts, strict=True)]
        return [(experts, (first, middle, last)) for experts, (first, middle, last) in found.items()]

    def count(self, work: Pass, experts: bool) -> tuple[list[Operation], list[Transfer]]:
        """Operations and transfers of one pass through a layer with a dense FFN, or with experts, and at the ends."""
        spread = self.spread if experts else None
        shard, nodes = self.shard, self.nodes if experts else 1
        return count(self.model, self.engine, shard, work, self.formats, self.structure, spread, nodes)

    @cached_property
    def stages(self) -> Stages:
        """Layers per pipeline stage."""
        return Stages.of(self.model, self.pp)


_DECODING = ("attention_decode", "attention_latent")
"""Kinds of kernels that attend for requests that decode."""


class PassTime(NamedTuple):
    """Seconds of one pass: through all stages one after the other, and on one stage alone."""

    whole: Parts
    slowest: Parts
    last: Parts = Parts()
    """The last stage, of several."""


def pass_time(replica: Replica, work: Pass) -> PassTime:
    """Seconds of one pass of a replica, by what is waited for.

    A stage's time is its layers, what its end adds, and the host's share; `whole` adds the sends between stages.
    """
    stages = replica.stages
    layer, first, last = _segments(replica, work)
    own = replica.engine.host
    groups = 1 if replica.attention_dp is None else replica.attention_dp  # each schedules for itself
    seconds = (own.step_us + own.per_sequence_us * work.requests / groups) * US
    host = replica.term("host", Parts(overhead=seconds * np.ones_like(stages.pp)))
    alone = stages.pp == 1
    stage_first = _settle(replica.hardware, layer.first + first + last * alone) + host
    if np.all(alone):
        return PassTime(stage_first, stage_first)
    stage_last = _settle(replica.hardware, layer.last + last) + host
    stage_middle = _settle(replica.hardware, layer.middle) + host
    between = np.maximum(0, stages.pp - 2)
    middles = _settle(replica.hardware, layer.rest * ~alone) + host * between
    whole = stage_first + stage_last * ~alone + middles * ~alone + _sends(replica, work) * ~alone
    slowest = stage_first.where(alone | (stage_first.total >= stage_last.total), stage_last)
    slowest = stage_middle.where((stages.pp > 2) & (stage_middle.total > slowest.total), slowest)
    return PassTime(whole, slowest, stage_last)


class _Layers(NamedTuple):
    """Seconds of the layers of the first stage, of the fullest middle one, of the last, and of all middle ones."""

    first: Parts
    middle: Parts
    last: Parts
    rest: Parts


def _segments(replica: Replica, work: Pass) -> tuple[_Layers, Parts, Parts]:
    """Seconds of the layers by stage, of what only the first stage does beside them, and of what only the last does."""
    held, alone = _Layers(Parts(), Parts(), Parts(), Parts()), np.all(replica.stages.pp == 1)
    ends = {"first": Parts(), "last": Parts()}
    totals = {True: sum(kind.experts for kind in replica.model.layer_kinds())} if replica.model.experts else {}
    for index, (experts, counts) in enumerate(replica.layer_counts):
        operations, transfers = replica.count(work, experts)
        layer, attending = Parts(), Parts()
        hiding = {name for transfer in transfers for name in transfer.behind}
        lasting: dict[str, Num] = {}
        for operation in operations:
            if operation.place == "layer":
                parts = priced(replica, operation)
                layer += parts
                attending += parts if operation.kind in _DECODING else Parts()
                if operation.name in hiding:
                    lasting[operation.name] = parts.total
            elif index == 0:  # the ends are counted with each kind of layer, and are there once
                ends[operation.place] += priced(replica, operation)
        timed = [
            (transfer, replica.network.price(transfer, replica.groups(transfer.axes)))
            for transfer in transfers
            if transfer.place == "layer" or index == 0
        ]
        seen = _by_request(replica, work, timed, attending)
        for transfer, alone_for in timed:
            seconds = alone_for * seen if transfer.by_request else alone_for
            if transfer.behind:
                meanwhile: Num = sum(lasting[name] for name in transfer.behind)
                seconds = np.maximum(0.0, seconds - transfer.beside * meanwhile)
            parts = Parts(network=seconds)
            parts = replica.term(transfer.name, parts, partial(_traffic, replica, transfer))
            if transfer.place == "layer":
                layer += parts
            else:
                ends[transfer.place] += parts
        layer = _launched(replica, work, layer)
        first, middle, last = counts
        every = totals.get(True, 0) if experts else replica.model.layers - totals.get(True, 0)
        if alone:
            held = held._replace(first=held.first + layer * first)
            continue
        held = _Layers(
            held.first + layer * first,
            held.middle + layer * middle,
            held.last + layer * last,
            held.rest + layer * np.maximum(0.0, every - first - last),
        )
    return held, ends["first"], ends["last"]


def _by_request(replica: Replica, work: Pass, timed: list[tuple[Transfer, Num]], attending: Parts) -> Num:
    """Share of the exchanges along a sequence that is waited for, where one request's go beside another's attention.

    B requests take a for attention and c for the exchange each: B (a + c) one after the other, but in turn
    a + (B - 1) max(a, c) + c (Helix, arXiv 2507.07120, batch-wise overlap): (1 - 1/B) min(A, C) of the sums is hidden.
    """
    overlap = replica.engine.sequence_overlap
    if overlap is None or not replica.structure.sequence:
        return 1.0
    exchanged = sum((seconds for transfer, seconds in timed if transfer.by_request), np.zeros(1))
    groups = 1 if replica.attention_dp is None else replica.attention_dp
    requests = np.maximum(1.0, np.ceil(work.requests / groups))
    hidden = (1 - 1 / requests) * np.minimum(exchanged, attending.compute + attending.memory)
    return 1.0 - overlap.fraction * hidden / np.where(exchanged > 0, exchanged, 1.0)


def _launched(replica: Replica, work: Pass, layer: Parts) -> Parts:
    """A layer with what its launches cost, and its collectives where the engine hides a share of them."""
    own = replica.engine.host
    if own.layer_us or own.prefill_layer_us:
        launches = own.layer_us + own.prefill_layer_us * (np.asarray(work.prefill_tokens) > 0)
        layer = layer + replica.term("launches", Parts(overhead=launches * US))
    return layer if replica.engine.overlap is None else layer.overlapped(replica.engine.overlap.fraction)


def priced(replica: Replica, operation: Operation) -> Parts:
    """Seconds of an operation's kernels as the engine runs them, by what they wait for."""
    parts = _operation(replica.hardware, as_run(replica.model, replica.engine, replica.formats, operation))
    return replica.term(operation.name, parts, partial(_work, replica.hardware, operation))


def _work(hardware: Hardware, operation: Operation) -> Work:
    """What an operation computes and moves as it is counted, whatever detours the engine's kernels make."""
    chip, (dtype, _) = hardware.chip, hardware.constants(operation.kind, operation.dtype)
    amounts = (operation.flops, operation.weight_bytes, operation.kv_bytes, operation.activation_bytes)
    flops, weights, kv, activations = (amount * operation.times for amount in amounts)
    return Work(
        flops,
        weights,
        kv,
        activations,
        least_compute=flops / chip.peak(dtype),
        least_memory=(weights + kv) / chip.memory_bandwidth,
    )


def _traffic(replica: Replica, transfer: Transfer) -> Work:
    """The buffers of a transfer, none where a rank is alone, and the least time on the wires."""
    groups = replica.groups(transfer.axes)
    return Work(
        sent_bytes=transfer.times * transfer.bytes * (groups.ranks > 1),
        least_network=transfer.times * replica.network.least(transfer.op, groups, transfer.bytes),
    )


def as_run(model: Model, engine: Engine, formats: Formats, operation: Operation) -> Operation:
    """The operation as the engine's kernels run it: weights that are converted on the fly, attention by groups."""
    attention = model.attention
    traffic = engine.weight_traffic.get(formats.weights.name)
    layered = operation.kind in ("gemm", "grouped_gemm") and operation.place == "layer"  # the head is not quantised
    if traffic is not None and layered:
        return operation._replace(weight_bytes=operation.weight_bytes * traffic)
    if engine.tensor_core_groups and operation.kind == "attention_decode" and attention.window is None:
        group = attention.heads / attention.kv_heads
        return operation._replace(flops=0.0) if group in engine.tensor_core_groups else operation
    return operation


def _operation(hardware: Hardware, operation: Operation) -> Parts:
    if hardware.roofline == "per_op":
        return price_operation(hardware, operation)
    compute, memory, _ = resources(hardware, operation)
    return Parts(compute=compute * operation.times, memory=memory * operation.times)


def _settle(hardware: Hardware, stage: Parts) -> Parts:
    """A stage's parts: as they are, or under `per_step` one roofline over all its operations."""
    return stage if hardware.roofline == "per_op" else stage.settled()


def _sends(replica: Replica, work: Pass) -> Parts:
    """Seconds of handing the activations on, from stage to stage."""
    ways: Num = 1 if replica.cp is None else replica.cp
    size, network = resting_bytes(replica.model, replica.tp, work, replica.structure, ways), replica.network
    boundaries = list(_boundaries(replica))
    time: Num = 0.0
    for count_here, level in boundaries:
        time = time + count_here * network.send(size, level)

    def traffic() -> Work:
        least = (count_here * network.least_send(size, level) for count_here, level in boundaries)
        return Work(sent_bytes=size * (replica.pp - 1), least_network=sum(least, np.zeros(1)))

    return replica.term("send", Parts(network=time), traffic)


def _boundaries(replica: Replica) -> Iterator[tuple[Num, int]]:
    """(stage boundaries whose outermost wires are a level's, the level) of a replica."""
    place = replica.network.placement
    outer = range(len(place.hardware.network) - 1)
    crossed = [place.crossings(replica.tp, replica.pp, replica.dp, level) for level in outer]
    for level, (this, further) in enumerate(zip([replica.pp - 1, *crossed], [*crossed, 0], strict=True)):
        if np.any(this > further):
            yield this - further, level
