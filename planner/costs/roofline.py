"""Price operations: which resource a kernel waits for, and how long (DESIGN section 4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.layers import Operation
from planner.costs.pnorm import pnorm_shares
from planner.costs.weights import Num
from planner.specs.hardware import Hardware, KernelConstants
from planner.units import US

BOUNDS = ("compute", "memory", "network", "overhead", "bubble")


class Parts(NamedTuple):
    """Seconds by what is waited for; they add up to the whole."""

    compute: Num = 0.0
    memory: Num = 0.0
    network: Num = 0.0
    overhead: Num = 0.0
    bubble: Num = 0.0

    @property
    def total(self) -> Num:
        """Seconds in all."""
        present = [value for value in self if not _absent(value)]
        return sum(present[1:], present[0]) if present else 0.0

    def __add__(self, other: Parts) -> Parts:  # type: ignore[override]
        return Parts(
            plus(self.compute, other.compute),
            plus(self.memory, other.memory),
            plus(self.network, other.network),
            plus(self.overhead, other.overhead),
            plus(self.bubble, other.bubble),
        )

    def __mul__(self, factor: Num) -> Parts:
        return Parts(*(0.0 if _absent(value) else value * factor for value in self))

    def where(self, mask: Num, other: Parts) -> Parts:
        """Self where the mask holds, other elsewhere."""
        pairs = zip(self, other, strict=True)
        return Parts(
            *(0.0 if _absent(mine) and _absent(theirs) else np.where(mask, mine, theirs) for mine, theirs in pairs)
        )

    def settled(self) -> Parts:
        """One roofline over what these parts are the sum of: the larger of compute and memory alone counts."""
        return self.of_bound(self.compute > self.memory)

    def of_bound(self, computes: Num) -> Parts:
        """Without the memory's part where compute bounds, without the compute's elsewhere."""
        compute, memory = np.where(computes, self.compute, 0.0), np.where(computes, 0.0, self.memory)
        return Parts(compute, memory, self.network, self.overhead, self.bubble)

    def overlapped(self, fraction: float) -> Parts:
        """With a share of the network's part hidden behind compute and memory, as far as these are long enough."""
        return self._replace(network=self.network * self.seen(fraction))

    def seen(self, fraction: float) -> Num:
        """Share of the network's part that is not hidden (see `overlapped`)."""
        busy = self.compute + self.memory
        with np.errstate(invalid="ignore", divide="ignore"):
            longer = np.where(np.asarray(self.network) > 0, np.minimum(1.0, busy / self.network), 1.0)
        return 1.0 - fraction * longer

    def adding(self, name: str, more: Parts) -> Parts:
        """The sum; parts have no use for the name (`costs.terms` does)."""
        return self + more

    def within(self, phase: str) -> Parts:
        """The same: parts know no phase (`costs.terms` does)."""
        return self

    def averaged(self, weights: Num) -> Parts:
        """Weighted means over groups of rows that stand together, as many as there are weights."""
        return Parts(*(averaged(part, weights) for part in self))

    def over(self, rows: int) -> Parts:
        """Every part as an array over so many rows."""
        return Parts(*(np.broadcast_to(np.asarray(part, dtype=float), (rows,)) for part in self))


def _absent(value: Num) -> bool:
    """Whether a part is the constant 0: arrays are not touched for it."""
    return isinstance(value, float) and value == 0.0


def averaged(values: Num, weights: Num) -> Num:
    """Weighted means over groups of rows that stand together: [rows x weights] -> [rows]."""
    return np.asarray(values, dtype=float).reshape(-1, len(weights)) @ weights


def plus(left: Num, right: Num) -> Num:
    """The sum, without a pass over an array for a constant 0."""
    if _absent(right):
        return left
    return right if _absent(left) else left + right


assert Parts._fields == BOUNDS


def resources(hardware: Hardware, operation: Operation) -> tuple[Num, Num, KernelConstants]:
    """(seconds of compute, seconds of memory traffic, the constants used) of one kernel, each on its own.

    Under `roofline: per_step` weights and KV are the only traffic, as in the textbook.
    """
    dtype, constants = hardware.constants(operation.kind, operation.dtype)
    compute: Num = 0.0
    if constants.compute_fraction is not None:
        compute = operation.flops / (constants.compute_fraction * hardware.chip.peak(dtype))
    traffic = plus(operation.weight_bytes, operation.kv_bytes)
    if hardware.roofline == "per_op":
        traffic = plus(traffic, operation.activation_bytes)
    share: Num = constants.memory_fraction or 1.0
    if constants.in_step is not None:  # faster than alone, but not than the memory
        share = np.minimum(share * constants.in_step.speed, np.maximum(share, 1.0))
    return compute, traffic / (share * hardware.chip.memory_bandwidth), constants


def price_operation(hardware: Hardware, operation: Operation) -> Parts:
    """Seconds of an operation's kernels, `times` of them, by what they wait for.

    t = t0 + c log2(1 + context/64) + || compute, memory, items ||_p, charged where there is work.
    """
    compute, memory, constants = resources(hardware, operation)
    terms = [memory]
    if constants.compute_fraction is not None:
        terms.append(compute)
    if constants.item_us:
        terms.append(operation.items * (constants.item_us * US))
    shares = pnorm_shares(terms, constants.p)
    overhead: Num = constants.fixed
    if constants.depth_us:
        overhead = overhead + constants.depth_us * US * np.log2(1 + operation.context / 64)
    working = memory > 0
    if not np.all(working):
        overhead = overhead * working
    if constants.item_us:
        overhead = overhead + shares[-1]
    parts = Parts(
        compute=shares[1] if constants.compute_fraction is not None else 0.0, memory=shares[0], overhead=overhead
    )
    alone = isinstance(operation.times, (int, float)) and operation.times == 1
    return parts if alone else parts * operation.times
