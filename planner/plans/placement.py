"""Where the groups of a plan sit on the network: domains, torus slices, what fits and what crosses a boundary."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, NoPlanError
from planner.specs.hardware import Hardware, NetworkLevel, Slice

Num = Any


class TorusGroup(NamedTuple):
    """A box of chips on a torus that one collective runs over.

    Args:
        axes: chips along each axis.
        wires: wires of a chip that carry the collective: two for an axis that closes to a ring, one for a line.
        hops: steps to reach the farthest chip, over all axes.
        exchange: share of what a chip holds that crosses the busiest wire in an all-to-all.
    """

    axes: tuple[int, ...]
    wires: int
    hops: float
    exchange: float


@dataclass(frozen=True, eq=False)
class Placement:
    """The machine that a deployment gets: a number of chips, as a torus slice where the hardware is one.

    A group that fits a domain never straddles two; one that does not is contiguous over as few as hold it.
    """

    hardware: Hardware
    gpus: int
    slice: Slice | None = None

    @classmethod
    def of(cls, hardware: Hardware, gpus: int, wanted_slice: str | None = None) -> Placement:
        """The placement on `gpus` chips: on a torus the largest legal slice that they hold, or the one asked for.

        Raises:
            InputError: a slice that is not legal, or not of this many chips, or on hardware without a torus.
            NoPlanError: fewer chips than the smallest slice.
        """
        torus = hardware.torus
        if torus is None:
            if wanted_slice is not None:
                raise InputError(f"--slice {wanted_slice}: {hardware.name} is not a torus")
            return cls(hardware, gpus)
        legal = torus.legal_slices()
        if wanted_slice is not None:
            chosen = next((shape for shape in legal if str(shape) == wanted_slice.lower()), None)
            if chosen is None:
                raise InputError(
                    f"--slice {wanted_slice}: not a slice of {hardware.name}; legal are {', '.join(map(str, legal))}"
                )
            if chosen.chips != gpus:
                raise InputError(f"--slice {wanted_slice}: has {chosen.chips} chips, but --gpus is {gpus}")
            return cls(hardware, gpus, chosen)
        fitting = [shape for shape in legal if shape.chips <= gpus]
        if not fitting:
            raise NoPlanError(
                f"{hardware.name}: the smallest slice has {min(shape.chips for shape in legal)} chips, --gpus is {gpus}"
            )
        return cls(hardware, gpus, max(fitting, key=lambda shape: shape.chips))

    @property
    def usable(self) -> int:
        """Chips that plans may use."""
        return self.slice.chips if self.slice else self.gpus

    def replicas(self, tp: int, pp: int, cp: int = 1) -> int:
        """How many replicas the chips hold when no tensor-parallel group straddles a boundary it need not."""
        width = tp * cp
        if self.slice:
            return self.usable // (width * pp) if width in self.torus_groups else 0
        domain = self.hardware.domain
        if domain is None or width > domain:
            return self.gpus // (width * pp)
        groups = self.gpus // domain * (domain // width) + self.gpus % domain // width
        return groups // pp

    def fewest(self, tp: int, pp: int, dp: int, cp: int = 1) -> int:
        """The fewest chips for which `replicas` is at least dp; not of a torus, whose slices come in sizes."""
        width, groups, domain = tp * cp, pp * dp, self.hardware.domain
        if domain is None or width > domain:
            return width * groups
        full, rest = divmod(groups - 1, domain // width)
        return full * domain + (rest + 1) * width

    @cached_property
    def torus_groups(self) -> dict[int, TorusGroup]:
        """The best box for each group size that tiles the slice: most wires, then fewest hops."""
        best: dict[int, TorusGroup] = {}
        if self.slice is None:
            return best
        for axes in product(*(_divisors(axis) for axis in self.slice.axes)):
            group = _torus_group(axes, self.slice, self.hardware.network[0])
            size = int(np.prod(axes))
            if size not in best or (-group.wires, group.hops) < (-best[size].wires, best[size].hops):
                best[size] = group
        return best

    def span(self, ranks: NDArray[Any]) -> NDArray[Any]:
        """Index of the innermost network level whose domain holds a group of this many ranks."""
        level = np.zeros(np.shape(ranks), dtype=int)
        for index, domain in enumerate(self.hardware.network[:-1]):
            if domain.chips is not None:
                level = np.where(ranks > domain.chips, index + 1, level)
        return level

    def crossings(self, tp: Num, pp: Num, dp: Num, level: int = 0) -> Num:
        """Stage boundaries of a replica that leave a domain of a level: those of the worst placed replica."""
        domain = self.hardware.network[level].chips
        tp, pp, dp = np.asarray(tp), np.asarray(pp), np.asarray(dp)
        if domain is None or self.slice is not None:
            return np.zeros(np.broadcast_shapes(tp.shape, pp.shape, dp.shape))
        per_domain = self._groups(tp, level)
        worst = (pp - 1) // per_domain  # the first replica starts at a boundary; so do all where one divides the other
        uneven = (per_domain % pp > 0) & (pp % per_domain > 0) & (dp > 1)
        if np.any(uneven):
            for replica in range(1, int(min(np.max(dp), np.max(per_domain)))):
                start = replica * pp
                crossed = (start + pp - 1) // per_domain - start // per_domain
                worst = np.where(uneven & (replica < dp), np.maximum(worst, crossed), worst)
        return worst

    def _groups(self, tp: Num, level: int) -> Num:
        """Tensor-parallel groups that a domain of a level holds; they straddle no domain below that holds them."""
        groups: Num = 1
        below = None
        for domain in (each.chips or 1 for each in self.hardware.network[: level + 1]):
            fits = np.maximum(1, domain // tp)
            groups = fits if below is None else np.where(tp > below, fits, groups * (domain // below))
            below = domain
        return groups


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _torus_group(axes: tuple[int, ...], shape: Slice, level: NetworkLevel) -> TorusGroup:
    wires, hops, exchange = 0, 0.0, 0.0
    closed = [level.wrap_multiple > 0 and whole % level.wrap_multiple == 0 for whole in shape.axes]
    if level.wrap_together and not all(closed):
        closed = [False] * len(closed)
    for length, whole, closes in zip(axes, shape.axes, closed, strict=True):
        if length == 1:
            continue
        ring = closes and length == whole
        wires += 2 if ring else 1
        hops += length / 2 if ring else length - 1
        exchange = max(exchange, length**2 // 4 / length / (2 if ring else 1))
    return TorusGroup(axes, wires, hops, exchange)
