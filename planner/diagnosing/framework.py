"""Whether cutting the sequence pays: two frameworks of decision, computed.

* The **compute-memory spectrum**: how much of a pass the arithmetic alone takes, and how much reading memory alone; a
  half is what divides high from low. Memory is high as well where the KV of the requests fills half of what is left.
* The **dependency-granularity matrix**: what share of the sequence a token looks at, against how tokens become known.

The verdict is not read off either: our own engine prices the best plan that cuts the sequence beside the best one that
does not, over a range of lengths, and says from where on the first is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from planner.costs.layers import Operation
from planner.costs.roofline import resources
from planner.specs.dtypes import WEIGHTS
from planner.specs.hardware import Hardware
from planner.units import MS

HALF = 0.5
"""Share of a pass above which compute, or memory, is called high."""
PAYS = 0.05
"""Gain below which cutting the sequence is not worth its trouble: less than the model's error."""
LOCAL, GLOBAL = 0.25, 0.75
"""Share of the sequence that a token looks at, below and above which the range is called local and global."""
ADVICE = {
    (
        "high",
        "low",
    ): "matrix products fill the chip: copies and tensor parallelism do; cutting the sequence shortens one "
    "answer, it does not relieve memory",
    ("high", "high"): "both are short: combine cuts (heads, sequence, stages) and count what each sends",
    ("low", "high"): "the chip waits for memory: fewer bytes first (batches, KV of fewer heads or bits, int4 weights), "
    "then KV over more chips",
    ("low", "low"): "neither is short: fixed time and the network are; the simplest plan does",
}
"""By compute and memory."""


class Spot(NamedTuple):
    """One phase on the roofline of a chip."""

    phase: str
    plan: str
    tokens: float
    """That the pass works on."""
    flops: float
    """Of one chip."""
    bytes: float
    seconds: float
    intensity: float
    """FLOP for each byte moved."""
    ridge: float
    """Of the chip: below it memory bounds, above it arithmetic."""
    compute: float
    """Share of the pass that its arithmetic alone takes."""
    memory: float
    """Share that reading and writing alone take."""
    filled: float
    """Share of the memory beside the weights that the KV of the requests takes; over 1: it does not fit so."""

    @property
    def quadrant(self) -> tuple[str, str]:
        """(compute, memory), each high or low."""
        return (
            "high" if self.compute >= HALF else "low",
            "high" if self.memory >= HALF or self.filled >= HALF else "low",
        )

    @property
    def advice(self) -> str:
        """What the quadrant suggests."""
        return ADVICE[self.quadrant]


class Dependency(NamedTuple):
    """A phase in the matrix."""

    phase: str
    share: float
    """Of the sequence that a token looks at, layers averaged."""
    range: str
    """local, mixed or global."""
    divisible: str
    """natural, possible or hard."""
    why: str


class Length(NamedTuple):
    """The best plans at one length."""

    length: int
    whole: tuple[str, float] | None
    """Without a cut of the sequence: plan and seconds; none = nothing fits."""
    cut: tuple[str, float] | None

    @property
    def gain(self) -> float | None:
        """How many times faster the cut is; none where one of them does not fit."""
        return None if self.whole is None or self.cut is None else self.whole[1] / self.cut[1]

    @property
    def pays(self) -> bool:
        """Whether the cut is faster by more than the trouble, or the only thing that fits."""
        return self.cut is not None and (self.gain is None or self.gain >= 1 + PAYS)


class Verdict(NamedTuple):
    """Whether cutting the sequence pays in a phase, over a range."""

    phase: str
    axis: str
    """What the length is: tokens, pixels, frames, chips."""
    lengths: tuple[Length, ...]
    asked: Length
    """At the length in question."""
    refused: str | None = None
    """Why the engine itself does not run the cut there, as a sentence; none = it does, or there is none."""

    @property
    def crossover(self) -> int | None:
        """The smallest length from which on it pays at every longer one that anything fits; none = nowhere."""
        known = [each for each in self.lengths if each.whole or each.cut]
        found = None
        for each in reversed(known):
            if not each.pays:
                break
            found = each.length
        return found


class Check(NamedTuple):
    """An item of the checklist, with its figure."""

    item: str
    figures: tuple[tuple[str, float, str], ...]
    """(name, value, unit)."""
    says: str


class Diagnosis(NamedTuple):
    """All of it."""

    model: str
    hardware: Hardware
    engine: str
    gpus: int
    what: str
    """The question in words."""
    spots: tuple[Spot, ...]
    dependencies: tuple[Dependency, ...]
    verdicts: tuple[Verdict, ...]
    checks: tuple[Check, ...]


def spot(
    hardware: Hardware, phase: str, plan: str, tokens: float, operations: Iterable[tuple[Operation, float]],
    seconds: float, filled: float,
) -> Spot:  # fmt: skip
    """A phase on the roofline.

    Args:
        hardware: whose peak of 16-bit arithmetic and whose bandwidth make the ridge.
        phase: its name.
        plan: what one chip's share is of.
        tokens: that the pass works on.
        operations: (operation of one rank, how often).
        seconds: of the whole pass.
        filled: share of the memory beside the weights.
    """
    chip = hardware.chip
    flops = moved = compute = memory = 0.0
    for operation, times in operations:
        often = times * float(operation.times)
        flops += often * number(operation.flops)
        moved += often * sum(map(number, (operation.weight_bytes, operation.kv_bytes, operation.activation_bytes)))
        alone, reading, _ = resources(hardware, operation)
        compute, memory = compute + often * number(alone), memory + often * number(reading)
    ridge = chip.peak(chip.native_dtype) / chip.memory_bandwidth
    return Spot(
        phase, plan, tokens, flops, moved, seconds, flops / moved, ridge, compute / seconds, memory / seconds, filled
    )


def number(value: object) -> float:
    """The one number of an array of one."""
    return float(np.ravel(np.asarray(value, dtype=float))[0])


def least_block(hardware: Hardware, level: int, group: float = 1.0) -> float:
    """Tokens of a block from which on a ring hides behind attention: FLOP/s / (bytes/s), less for grouped queries.

    Ring Attention: a hop computes 4 d c^2 FLOPs a head and sends 4 c d bytes, so c >= F / B; with `group` query heads
    to a KV head the same bytes serve so many times the FLOPs. Data sheet rates, one chip's share of a level's cards.
    """
    wire = hardware.network[level]
    below = hardware.network[level - 1].chips or 1 if level else 1
    share = wire.nics_per_node / below if level and wire.nics_per_node else 1.0
    return hardware.chip.peak(hardware.chip.native_dtype) / (wire.link * share) / group


def half_message(send: Callable[[float, int], Any]) -> float:
    """Bytes of a message at which a send on the innermost level reaches half its rate: latency times rate.

    Args:
        send: of a network: seconds of (bytes, level).
    """
    small, large = number(send(1.0, 0)), number(send(1e9, 0))
    return small / (large - small) * 1e9


def precision_check(now: float, others: Mapping[str, float], weights: str, what: str) -> Check:
    """What weights stored in fewer bytes would be worth, computed in the arithmetic that the chip has for them.

    Args:
        now: seconds.
        others: seconds by format.
        weights: the format now.
        what: takes so long.
    """
    figures: list[tuple[str, float, str]] = []
    says = f"{what} takes {now / MS:.4g} ms with {weights} weights"
    for name, seconds in others.items():
        share = WEIGHTS[name].bytes / WEIGHTS[weights].bytes
        figures += [(f"with {name} weights", seconds / MS, "ms"), (f"times, {name}", now / seconds, "x")]
        says += f"; {seconds / MS:.4g} ms with {name} ({now / seconds:.2f}x; {share:.0%} of the bytes)"
    return Check("precision", tuple(figures) or (("now", now / MS, "ms"),), says)


def stored_otherwise(weights: str) -> tuple[str, ...]:
    """Formats that weights might be stored in: 4 bit, and pruned two of four."""
    pruned = (dtype.name for dtype in WEIGHTS.values() if dtype.dense == weights)
    return tuple(name for name in ("int4", *pruned) if WEIGHTS[name].bytes < WEIGHTS[weights].bytes)


def message_check(half: float, size: float, times: int, what: str) -> Check:
    """Whether messages are large enough."""
    enough = "large enough" if size >= half else "small: merge several"
    return Check(
        "messages", (("message", size, "B"), ("half of the bandwidth at", half, "B"), ("messages", times, "")),
        f"{what} is {size / 1024:,.0f} KiB, {times} times; a send reaches half its rate at {half / 1024:,.0f} KiB: "
        f"{enough}",
    )  # fmt: skip


def reach_word(share: float) -> str:
    """local, mixed or global."""
    return "local" if share <= LOCAL else "global" if share >= GLOBAL else "mixed"
