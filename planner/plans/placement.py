"""Where the groups of a plan sit on the network: domains, torus slices, what fits and what crosses a boundary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, NoPlanError
from planner.specs.hardware import Hardware, Slice

Num = Any
AXES = "xyz"


class Line(NamedTuple):
    """An axis of a box of chips on a torus."""

    axis: int
    """Which of the slice's."""
    length: int
    ring: bool
    """Whether it closes."""


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
    lines: tuple[Line, ...] = ()
    """Those axes that have more than one chip."""

    @classmethod
    def of(cls, lines: Iterable[Line]) -> TorusGroup:
        """The box with these axes."""
        lines = tuple(lines)
        wires, hops, exchange = 0, 0.0, 0.0
        for _, length, ring in lines:
            if length > 1:
                wires += 2 if ring else 1
                hops += length / 2 if ring else length - 1
                exchange = max(exchange, length**2 // 4 / length / (2 if ring else 1))
        longer = tuple(line for line in lines if line.length > 1)
        return cls(tuple(line.length for line in lines), wires, hops, exchange, longer)


class Mesh(NamedTuple):
    """A tensor-parallel group of X x Y x Z chips, as the layouts of Pope et al. read it (section 3.1)."""

    sizes: tuple[int, int, int]
    lines: tuple[tuple[Line, ...], tuple[Line, ...], tuple[Line, ...]] = ((), (), ())
    """On a torus the axes that X, Y and Z are made of."""

    @property
    def text(self) -> str:
        """`4x4x4`, or `4x16` where Y and Z are not told apart."""
        x, y, z = self.sizes
        return f"{x}x{y}" if z == 1 else f"{x}x{y}x{z}"

    def ranks(self, axes: str) -> int:
        """Chips along some axes, as `yz`."""
        return prod(size for size, name in zip(self.sizes, AXES, strict=True) if name in axes)

    def box(self, axes: str) -> TorusGroup | None:
        """The box of the chips along some axes; none where they sit on no torus."""
        chosen = [line for lines, name in zip(self.lines, AXES, strict=True) if name in axes for line in lines]
        return TorusGroup.of(chosen) if any(self.lines) else None


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
            group = TorusGroup.of(self._lines(axes))
            size = prod(axes)
            if size not in best or (-group.wires, group.hops) < (-best[size].wires, best[size].hops):
                best[size] = group
        return best

    def _lines(self, axes: tuple[int, ...]) -> tuple[Line, ...]:
        """The axes of a box of the slice: one closes to a ring where it is as long as the slice's and that closes."""
        assert self.slice is not None
        level, whole = self.hardware.network[0], self.slice.axes
        closed = [level.wrap_multiple > 0 and axis % level.wrap_multiple == 0 for axis in whole]
        if level.wrap_together and not all(closed):
            closed = [False] * len(closed)
        pairs = enumerate(zip(axes, whole, closed, strict=True))
        return tuple(Line(axis, length, ring and length == full) for axis, (length, full, ring) in pairs)

    def meshes(self, ranks: int) -> tuple[Mesh, ...]:
        """The ways to read a tensor-parallel group as a grid of X x Y x Z chips; the plain line 1 x n x 1 is the first.

        On a torus every axis of the group's box is a part of X, of Y or of Z, whole; of several readings with the
        same sizes the one with most wires for X counts. Where a switch joins all chips any factors do. A group
        that no innermost domain holds is a line only: what crosses between domains has no axes.
        """
        if ranks not in self._meshes:
            self._meshes[ranks] = tuple(self._all_meshes(ranks))
        return self._meshes[ranks]

    @cached_property
    def _meshes(self) -> dict[int, tuple[Mesh, ...]]:
        return {}

    def mesh(self, sizes: tuple[int, int, int]) -> Mesh | None:
        """The grid of these sizes; none where the chips cannot be read so."""
        return next((mesh for mesh in self.meshes(prod(sizes)) if mesh.sizes == sizes), None)

    def _all_meshes(self, ranks: int) -> Iterator[Mesh]:
        domain = self.hardware.domain
        if self.slice is None:
            yield Mesh((1, ranks, 1))
            if domain is not None and ranks > domain:
                return
            for x in _divisors(ranks):
                for y in _divisors(ranks // x):
                    if x > 1 and not (y == 1 and x < ranks):  # no part under another name
                        yield Mesh((x, y, ranks // x // y))
            return
        if ranks not in self.torus_groups:
            return
        lines = [line for line in self._lines(self.torus_groups[ranks].axes) if line.length > 1]
        found: dict[tuple[int, int, int], Mesh] = {}
        for roles in product(range(3), repeat=len(lines)):
            parts = [tuple(line for line, own in zip(lines, roles, strict=True) if own == role) for role in range(3)]
            x, y, z = (prod(line.length for line in part) for part in parts)
            mesh = Mesh((x, y, z), (parts[0], parts[1], parts[2]))
            if (y == 1 and z > 1) or (x == 1 and z > 1):
                continue  # the same again under another name
            if (x, y, z) not in found or _wires(mesh) > _wires(found[x, y, z]):
                found[x, y, z] = mesh
        yield from sorted(found.values(), key=lambda mesh: mesh.sizes)

    def span(self, ranks: NDArray[Any]) -> NDArray[Any]:
        """Index of the innermost network level whose domain holds a group of this many ranks."""
        level = np.zeros(np.shape(ranks), dtype=int)
        for index, domain in enumerate(self.hardware.network[:-1]):
            if domain.chips is not None:
                level = np.where(ranks > domain.chips, index + 1, level)
        return level

    def level_of(self, ranks: int) -> int:
        """`span` of one group."""
        domains = enumerate(self.hardware.network[:-1], start=1)
        return max((level for level, domain in domains if domain.chips is not None and ranks > domain.chips), default=0)

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


def _wires(mesh: Mesh) -> tuple[int, ...]:
    return tuple(TorusGroup.of(part).wires for part in mesh.lines)
