"""One forward pass of a replica: its operations and transfers, priced and laid over the pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Groups, Network
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer
from planner.costs.layouts import count, resting_bytes
from planner.costs.roofline import Parts, price_operation, resources
from planner.costs.terms import Terms, Work
from planner.costs.weights import Num, Shard, Stages
from planner.specs.engine import Engine
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

    def term(self, name: str, parts: Parts, work: Callable[[], Work] = Work) -> Parts:
        """Parts that are one item, with its work where anybody asks."""
        return Terms.single(name, parts, work()) if self.itemised else parts

    @cached_property
    def _groups(self) -> dict[str, Groups]:
        return {"xyz": Groups.of(self.tp)}

    def groups(self, axes: str) -> Groups:
        """Rows by the chips along these axes of their tensor-parallel group; xyz is the whole of it."""
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
        return Shard.for_engine(self.model, self.engine, self.formats.weights.name, self.tp, x=x, y=y)

    @cached_property
    def stages(self) -> Stages:
        """Layers per pipeline stage."""
        return Stages.of(self.model, self.pp)


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
    layer, first, last = _segments(replica, replica.shard, work)
    own = replica.engine.host
    host = replica.term(
        "host", Parts(overhead=(own.step_us + own.per_sequence_us * work.requests) * US * np.ones_like(stages.pp))
    )
    if own.layer_us or own.prefill_layer_us:
        launches = own.layer_us + own.prefill_layer_us * (np.asarray(work.prefill_tokens) > 0)
        layer = layer + replica.term("launches", Parts(overhead=launches * US))
    if replica.engine.overlap is not None:
        layer = layer.overlapped(replica.engine.overlap.fraction)
    alone = stages.pp == 1
    stage_first = _settle(replica.hardware, layer * stages.first + first + last * alone) + host
    if np.all(alone):
        return PassTime(stage_first, stage_first)
    stage_last = _settle(replica.hardware, layer * stages.last + last) + host
    stage_middle = _settle(replica.hardware, layer * stages.middle) + host
    between = np.maximum(0, stages.pp - 2)
    rest = replica.model.layers - stages.first - stages.last
    middles = _settle(replica.hardware, layer * np.where(alone, 0.0, rest)) + host * between
    whole = stage_first + stage_last * ~alone + middles * ~alone + _sends(replica, work) * ~alone
    slowest = stage_first.where(alone | (stage_first.total >= stage_last.total), stage_last)
    slowest = stage_middle.where((stages.pp > 2) & (stage_middle.total > slowest.total), slowest)
    return PassTime(whole, slowest, stage_last)


def _segments(replica: Replica, shard: Shard, work: Pass) -> tuple[Parts, Parts, Parts]:
    """Seconds of one layer, of what only the first stage does, and of what only the last does."""
    operations, transfers = count(replica.model, replica.engine, shard, work, replica.formats, replica.structure)
    segments = {"layer": Parts(), "first": Parts(), "last": Parts()}
    for operation in operations:
        segments[operation.place] += priced(replica, operation)
    for transfer in transfers:
        parts = Parts(network=replica.network.price(transfer, replica.groups(transfer.axes)))
        segments[transfer.place] += replica.term(transfer.name, parts, partial(_traffic, replica, transfer))
    return segments["layer"], segments["first"], segments["last"]


def priced(replica: Replica, operation: Operation) -> Parts:
    """Seconds of an operation's kernels as the engine runs them, by what they wait for."""
    parts = _operation(replica.hardware, _as_run(replica, operation))
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


def _as_run(replica: Replica, operation: Operation) -> Operation:
    """The operation as the engine's kernels run it: weights that are converted on the fly, attention by groups."""
    engine, attention = replica.engine, replica.model.attention
    traffic = engine.weight_traffic.get(replica.formats.weights.name)
    if traffic is not None and operation.kind == "gemm" and operation.place == "layer":  # the head is not quantised
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
    size, network = resting_bytes(replica.model, replica.tp, work, replica.structure), replica.network
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
