"""Which chips a collective runs over: one team of them, and the teams of many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError
from planner.plans.placement import Placement, TorusGroup


class Team(NamedTuple):
    """The chips of one collective."""

    ranks: int
    box: TorusGroup | None = None
    """On a torus, where they are a part of a tensor-parallel group; none = the best box of so many chips."""
    stride: int = 1
    """Chips from one to the next; those between them form teams of their own, which communicate at the same time."""


class Groups(NamedTuple):
    """Rows by the chips of their group: (team, indices of the rows)."""

    total: int
    rows: tuple[tuple[Team, NDArray[np.intp]], ...]

    @classmethod
    def of(cls, ranks: NDArray[np.int_], stride: NDArray[np.int_] | None = None) -> Groups:
        """The groups of an array of sizes, of chips side by side or so many apart."""
        if stride is None:
            sizes = np.flatnonzero(np.bincount(ranks))
            return cls(len(ranks), tuple((Team(int(size)), np.flatnonzero(ranks == size)) for size in sizes))
        pairs, which = np.unique(np.stack([ranks, stride]), axis=1, return_inverse=True)
        teams = (Team(size, stride=apart) for size, apart in pairs.T.tolist())
        return cls(len(ranks), tuple((team, np.flatnonzero(which.ravel() == i)) for i, team in enumerate(teams)))

    @classmethod
    def along(cls, placement: Placement, axes: str, sizes: Sequence[NDArray[np.int_]]) -> Groups:
        """The groups along some axes of grids.

        Args:
            placement: the machine.
            axes: some of x, y and z.
            sizes: X, Y and Z of each row's grid, which the machine has.

        Raises:
            InputError: a grid that its chips cannot be read as.
        """
        grids, which = np.unique(np.stack(sizes), axis=1, return_inverse=True)
        rows = []
        for index, (x, y, z) in enumerate(grids.T.tolist()):
            mesh = placement.mesh((x, y, z))
            if mesh is None:
                raise InputError(f"grid {x}x{y}x{z}: {x * y * z} chips of {placement.hardware.name} cannot be read so")
            rows.append((Team(mesh.ranks(axes), mesh.box(axes)), np.flatnonzero(which.ravel() == index)))
        return cls(len(sizes[0]), tuple(rows))

    @property
    def ranks(self) -> NDArray[np.int_]:
        """Chips of each row's group."""
        found = np.ones(self.total, dtype=int)
        for team, rows in self.rows:
            found[rows] = team.ranks
        return found

    @property
    def spread(self) -> NDArray[np.int_]:
        """Chips from the first of each row's group to the last, with those between them."""
        found = np.ones(self.total, dtype=int)
        for team, rows in self.rows:
            found[rows] = team.ranks * team.stride
        return found
