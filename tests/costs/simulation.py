"""Virtual devices that really move numpy arrays: an independent witness for the bytes and steps that are counted.

Every algorithm is written step by step as its textbook has it (Thakur et al. 2005 for rings and trees, Pope et al.
2022 for all-to-all, the scaling book for the torus) and knows nothing of the planner. A step is what happens at
once: all messages of a step leave before any of them arrives. Devices are numbers; a buffer is a flat array.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Buffers = dict[int, Array]
"""One array per device, in the order in which the devices stand in the collective."""


class Move(NamedTuple):
    """An array on its way from one device to another."""

    source: int
    target: int
    array: Array
    tag: Any = None
    """What the array is, for tests that follow it."""


class Message(NamedTuple):
    """What the log keeps of a move."""

    call: int
    step: int
    source: int
    target: int
    elements: int
    tag: Any


class Fabric:
    """Delivers arrays and logs who sent how much, in which step of which collective."""

    def __init__(self, element_bytes: float = 2.0) -> None:
        self.element_bytes = element_bytes  # arrays hold floats of 8 bytes for exactness; they stand for this many
        self.messages: list[Message] = []
        self.calls: list[str] = []
        self.steps: list[int] = []

    def begin(self, name: str) -> None:
        """The moves that follow belong to a new collective."""
        self.calls.append(name)
        self.steps.append(0)

    def step(self, moves: Iterable[Move]) -> list[Array]:
        """All moves at once: copies of the arrays, in the order of the moves."""
        moves = list(moves)
        call = len(self.calls) - 1
        self.messages += [Message(call, self.steps[call], m.source, m.target, m.array.size, m.tag) for m in moves]
        self.steps[call] += 1
        return [move.array.copy() for move in moves]

    def sent(self, device: int, name: str | None = None) -> float:
        """Bytes that a device sent in all collectives, or in those of a name."""
        return self.element_bytes * sum(m.elements for m in self._of(name) if m.source == device)

    def received(self, device: int, name: str | None = None) -> float:
        """Bytes that a device was sent in all collectives, or in those of a name."""
        return self.element_bytes * sum(m.elements for m in self._of(name) if m.target == device)

    def _of(self, name: str | None) -> Iterator[Message]:
        return (message for message in self.messages if name in (None, self.calls[message.call]))

    def sent_by_name(self, device: int) -> dict[str, float]:
        """Bytes that a device sent, by the name of the collective; those that move nothing are left out."""
        names: dict[str, float] = defaultdict(float)
        for message in self.messages:
            if message.source == device:
                names[self.calls[message.call]] += message.elements * self.element_bytes
        return dict(names)

    def times(self, name: str) -> int:
        """How often a collective of this name ran."""
        return self.calls.count(name)

    def seconds(self, hop: Callable[[Message], float], bandwidth: Callable[[Message], float], wires: bool) -> float:
        """What a clock would show: steps follow one another, each as long as its slowest port (or wire).

        Args:
            hop: latency that a message pays.
            bandwidth: bytes per second of the port or wire that a message takes.
            wires: every pair of devices has a wire of its own; else all that a device sends shares its port.
        """
        loads: dict[tuple[int, int], dict[Any, float]] = defaultdict(lambda: defaultdict(float))
        latency: dict[tuple[int, int], float] = defaultdict(float)
        for message in self.messages:
            moment = message.call, message.step
            port = (message.source, message.target) if wires else message.source
            loads[moment][port] += message.elements * self.element_bytes / bandwidth(message)
            latency[moment] = max(latency[moment], hop(message))
        return sum(latency[moment] + max(ports.values()) for moment, ports in loads.items())


def _chunks(array: Array, count: int) -> list[Array]:
    return [chunk.copy() for chunk in np.array_split(array, count)]


def ring_reduce_scatter(fabric: Fabric, *groups: Buffers, name: str = "reduce_scatter") -> list[Buffers]:
    """Every device ends with the sum of the chunk of its place. Groups of equal size run side by side."""
    fabric.begin(name)
    return _ring_reduce_scatter(fabric, groups)


def _ring_reduce_scatter(fabric: Fabric, groups: Sequence[Buffers]) -> list[Buffers]:
    ranks = len(groups[0])
    held = [{device: dict(enumerate(_chunks(array, ranks))) for device, array in group.items()} for group in groups]
    for step in range(ranks - 1):
        moves = _round_the_ring(held, step + 1)
        for move, array in zip(moves, fabric.step(moves), strict=True):
            index, chunk = move.tag
            held[index][move.target][chunk] += array
    return [{device: own[place] for place, (device, own) in enumerate(group.items())} for group in held]


def _round_the_ring(held: list[dict[int, dict[int, Array]]], behind: int) -> list[Move]:
    """Each device passes on the piece that belongs `behind` places before its own; tags are (group, piece)."""
    moves = []
    for index, group in enumerate(held):
        devices = list(group)
        for place, device in enumerate(devices):
            piece = (place - behind) % len(devices)
            moves.append(Move(device, devices[(place + 1) % len(devices)], group[device][piece], (index, piece)))
    return moves


def ring_all_gather(fabric: Fabric, *groups: Buffers, name: str = "all_gather") -> list[Buffers]:
    """Every device ends with the parts of all, in the order of their places."""
    fabric.begin(name)
    return _ring_all_gather(fabric, groups)


def _ring_all_gather(fabric: Fabric, groups: Sequence[Buffers]) -> list[Buffers]:
    ranks = len(groups[0])
    held = [{device: {place: group[device]} for place, device in enumerate(group)} for group in groups]
    for step in range(ranks - 1):
        moves = _round_the_ring(held, step)
        for move, array in zip(moves, fabric.step(moves), strict=True):
            index, part = move.tag
            held[index][move.target][part] = array
    return [
        {device: np.concatenate([own[place] for place in range(ranks)]) for device, own in group.items()}
        for group in held
    ]


def ring_all_reduce(fabric: Fabric, *groups: Buffers, name: str = "all_reduce") -> list[Buffers]:
    """Reduce-scatter, then all-gather, around the ring."""
    fabric.begin(name)
    return _ring_all_gather(fabric, _ring_reduce_scatter(fabric, groups))


def one_shot_all_reduce(fabric: Fabric, buffers: Buffers, name: str = "all_reduce") -> Buffers:
    """Every device reads the whole buffer of every other and adds for itself."""
    fabric.begin(name)
    moves = [Move(source, target, buffers[source]) for target in buffers for source in buffers if source != target]
    sums = {device: array.copy() for device, array in buffers.items()}
    for move, array in zip(moves, fabric.step(moves), strict=True):
        sums[move.target] += array
    return sums


def direct_reduce_scatter(fabric: Fabric, buffers: Buffers, name: str = "reduce_scatter") -> Buffers:
    """Every device reads its chunk from every other."""
    fabric.begin(name)
    return _direct_reduce_scatter(fabric, buffers)


def _direct_reduce_scatter(fabric: Fabric, buffers: Buffers) -> Buffers:
    chunks = {device: _chunks(array, len(buffers)) for device, array in buffers.items()}
    sums = {device: chunks[device][place] for place, device in enumerate(buffers)}
    moves = [
        Move(source, target, chunks[source][place])
        for place, target in enumerate(buffers)
        for source in buffers
        if source != target
    ]
    for move, array in zip(moves, fabric.step(moves), strict=True):
        sums[move.target] = sums[move.target] + array
    return sums


def direct_all_gather(fabric: Fabric, buffers: Buffers, name: str = "all_gather") -> Buffers:
    """Every device reads the part of every other."""
    fabric.begin(name)
    return _direct_all_gather(fabric, buffers)


def _direct_all_gather(fabric: Fabric, buffers: Buffers) -> Buffers:
    parts = {target: {target: buffers[target]} for target in buffers}
    moves = [Move(source, target, buffers[source]) for target in buffers for source in buffers if source != target]
    for move, array in zip(moves, fabric.step(moves), strict=True):
        parts[move.target][move.source] = array
    return {target: np.concatenate([own[source] for source in buffers]) for target, own in parts.items()}


def two_shot_all_reduce(fabric: Fabric, buffers: Buffers, name: str = "all_reduce") -> Buffers:
    """A direct reduce-scatter, then a direct all-gather."""
    fabric.begin(name)
    return _direct_all_gather(fabric, _direct_reduce_scatter(fabric, buffers))


def in_switch_all_reduce(fabric: Fabric, buffers: Buffers, name: str = "all_reduce") -> Buffers:
    """Devices send to the switch, which adds and sends the sum to all of them (the switch is device -1)."""
    fabric.begin(name)
    total = np.sum(fabric.step([Move(device, -1, array) for device, array in buffers.items()]), axis=0)
    return dict(zip(buffers, fabric.step([Move(-1, device, total) for device in buffers]), strict=True))


def tree_all_reduce(fabric: Fabric, nodes: Sequence[Sequence[int]], buffers: Buffers) -> Buffers:
    """Chains inside nodes to their first devices, a binomial tree over those (2^k nodes), and all the way back."""
    fabric.begin("all_reduce")
    heads = [node[0] for node in nodes]
    pairs = [
        [(node[place], node[place - 1]) for node in nodes] for place in range(len(nodes[0]) - 1, 0, -1)
    ]  # (child, parent) of each step on the way up
    distance = 1
    while distance < len(heads):
        pairs.append([(heads[at + distance], heads[at]) for at in range(0, len(heads), 2 * distance)])
        distance *= 2
    held = {device: array.copy() for device, array in buffers.items()}
    for step in pairs:
        for (_, parent), array in zip(step, fabric.step(Move(c, p, held[c]) for c, p in step), strict=True):
            held[parent] += array
    for step in reversed(pairs):
        for (child, _), array in zip(step, fabric.step(Move(p, c, held[p]) for c, p in step), strict=True):
            held[child] = array
    return held


def hierarchical_all_reduce(fabric: Fabric, nodes: Sequence[Sequence[int]], buffers: Buffers) -> Buffers:
    """Reduce-scatter inside nodes, all-reduce of the shards across them, all-gather inside; rings all three."""
    inside = [{device: buffers[device] for device in node} for node in nodes]
    shards = ring_reduce_scatter(fabric, *inside)
    across = [
        {node[place]: shard[node[place]] for node, shard in zip(nodes, shards, strict=True)}
        for place in range(len(nodes[0]))
    ]
    sums = {device: shard for group in ring_all_reduce(fabric, *across) for device, shard in group.items()}
    gathered = ring_all_gather(fabric, *({device: sums[device] for device in node} for node in nodes))
    return {device: array for group in gathered for device, array in group.items()}


def all_to_all(
    fabric: Fabric, blocks: dict[int, dict[int, Array]], name: str = "all_to_all"
) -> dict[int, dict[int, Array]]:
    """`blocks[source][target]` goes straight to its target: `result[target][source]`."""
    fabric.begin(name)
    moves = [
        Move(source, target, own[target])
        for source, own in blocks.items()
        for target in own
        if target != source and own[target].size
    ]
    result = {
        target: {source: own[target] if source == target else own[target][:0] for source, own in blocks.items()}
        for target in blocks
    }
    for move, array in zip(moves, fabric.step(moves), strict=True):
        result[move.target][move.source] = array
    return result


def send(fabric: Fabric, pairs: dict[tuple[int, int], Array], name: str = "send") -> list[Array]:
    """Arrays from devices to devices, side by side: those that arrive."""
    fabric.begin(name)
    return fabric.step(Move(source, target, array) for (source, target), array in pairs.items())


class Torus(NamedTuple):
    """A box of chips along axes; an axis that wraps is a ring, else a line."""

    axes: tuple[int, ...]
    wraps: tuple[bool, ...]

    @property
    def places(self) -> list[tuple[int, ...]]:
        """Coordinates of all chips, in the order of their numbers."""
        return list(product(*(range(axis) for axis in self.axes)))

    def number(self, place: tuple[int, ...]) -> int:
        """The chip at a place."""
        return int(np.ravel_multi_index(place, self.axes))

    def neighbour(self, chip: int, axis: int, direction: int) -> int | None:
        """The chip at the other end of a wire, or none at the end of a line."""
        place = list(self.places[chip])
        place[axis] += direction
        if not self.wraps[axis] and not 0 <= place[axis] < self.axes[axis]:
            return None
        place[axis] %= self.axes[axis]
        return self.number(tuple(place))


def torus_all_gather(fabric: Fabric, torus: Torus, buffers: Buffers) -> Buffers:
    """All axes at once: a part of the data for each axis, which it takes first, and the other axes after it.

    Tags of the messages are wires: (axis, direction).
    """
    fabric.begin("all_gather")
    axes = [axis for axis, length in enumerate(torus.axes) if length > 1]
    held: list[list[dict[Any, Array]]] = []  # by part, then chip: halves of parts by (origin, half)
    for part in range(len(axes)):
        held.append([{} for _ in buffers])
        for chip, array in buffers.items():
            for half, piece in enumerate(np.array_split(np.array_split(array, len(axes))[part], 2)):
                held[part][chip][chip, half] = piece
    for phase in range(len(axes)):
        runs = [
            _axis_all_gather(fabric, torus, axes[(part + phase) % len(axes)], chips) for part, chips in enumerate(held)
        ]
        for steps in zip_longest(*runs, fillvalue=[]):
            moves = [(chips, move) for chips, moves in zip(held, steps, strict=True) for move in moves]
            for (chips, move), array in zip(moves, fabric.step(move for _, move in moves), strict=True):
                keys, lengths = move.tag[1]
                chips[move.target].update(zip(keys, np.split(array, np.cumsum(lengths)[:-1]), strict=True))
    return {
        chip: np.concatenate([chips[chip][origin, half] for origin in buffers for chips in held for half in (0, 1)])
        for chip in buffers
    }


def torus_all_gather_by_axis(fabric: Fabric, torus: Torus, order: Sequence[int], buffers: Buffers) -> Buffers:
    """One axis after the other, each a collective of its own; tags of the messages are wires, as above."""
    chips: list[dict[Any, Array]] = [
        {(chip, half): piece for half, piece in enumerate(np.array_split(array, 2))} for chip, array in buffers.items()
    ]
    for axis in order:
        fabric.begin(f"all_gather along {axis}")
        for moves in _axis_all_gather(fabric, torus, axis, chips):
            for move, array in zip(moves, fabric.step(moves), strict=True):
                keys, lengths = move.tag[1]
                chips[move.target].update(zip(keys, np.split(array, np.cumsum(lengths)[:-1]), strict=True))
    return {
        chip: np.concatenate([chips[chip][origin, half] for origin in buffers for half in (0, 1)]) for chip in buffers
    }


def _axis_all_gather(fabric: Fabric, torus: Torus, axis: int, chips: list[dict[Any, Array]]) -> Iterator[list[Move]]:
    """Moves of each step along one axis, both ways. At half a ring the two ways meet and share the last piece."""
    length, wraps = torus.axes[axis], torus.wraps[axis]
    bundles = [dict(chip) for chip in chips]
    carried: dict[tuple[int, int], int | None] = {(c, way): c for c in range(len(chips)) for way in (1, -1)}
    for step in range(1, (length // 2 if wraps else length - 1) + 1):
        meeting = wraps and length % 2 == 0 and step == length // 2
        moves, following = [], dict.fromkeys(carried)
        for (chip, way), origin in carried.items():
            target = torus.neighbour(chip, axis, way)
            if origin is None or target is None:
                continue
            keys = [key for key in bundles[origin] if not meeting or key[1] == (0 if way == 1 else 1)]
            arrays = [bundles[origin][key] for key in keys]
            lengths = [array.size for array in arrays]
            moves.append(Move(chip, target, np.concatenate(arrays), ((axis, way), (keys, lengths))))
            following[target, way] = origin
        carried = following
        yield moves


def torus_all_to_all_loads(torus: Torus, elements: float) -> Counter[tuple[int, int, int]]:
    """Elements over each wire (chip, axis, direction) when every chip sends `elements` to each, axis after axis.

    The shorter way round a ring; half of the data each way where both are equal.
    """
    loads: Counter[tuple[int, int, int]] = Counter()
    for source, target in product(torus.places, repeat=2):
        at = source
        for axis, length in enumerate(torus.axes):
            forward = (target[axis] - at[axis]) % length
            ways = [(forward, 1, 1.0)] if target[axis] >= at[axis] else [(length - forward, -1, 1.0)]
            if torus.wraps[axis]:
                share = 0.5 if 2 * forward == length else float(2 * forward < length)
                ways = [(forward, 1, share), (length - forward, -1, 1.0 - share)]
            for hops, way, share in ways:
                chip = torus.number(at)
                for _ in range(hops if share else 0):
                    loads[chip, axis, way] += elements * share  # type: ignore[assignment]
                    following = torus.neighbour(chip, axis, way)
                    assert following is not None
                    chip = following
            at = (*at[:axis], target[axis], *at[axis + 1 :])
        assert at == target
    return loads
