"""Two plans term by term: what the goal of each is made of, and what the one takes more than the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.explaining.breakdown import Breakdown


class Line(NamedTuple):
    """One item of the goal in every plan that is compared, in the goal's unit; 0 where a plan has none of it."""

    phase: str
    item: str
    values: tuple[float, ...]

    @property
    def differences(self) -> tuple[float, ...]:
        """What each plan takes more than the first."""
        return tuple(value - self.values[0] for value in self.values)

    @property
    def weight(self) -> float:
        """The largest difference, whatever its sign."""
        return max(abs(each) for each in self.differences)


def lines(plans: Sequence[Breakdown]) -> list[Line]:
    """Every item that a plan has, the largest difference first; each column adds up to the plan's goal."""
    found = [plan.goal_items() for plan in plans]
    keys = dict.fromkeys(key for items in found for key in items)
    rows = [Line(*key, tuple(items.get(key, 0.0) for items in found)) for key in keys]
    return sorted(rows, key=lambda line: -line.weight)


def brought_together(rows: Sequence[Line], least: float) -> list[Line]:
    """The lines whose difference is at least `least`, and the rest as one; the columns keep their sums."""
    kept = [line for line in rows if line.weight >= least]
    rest = [line for line in rows if line.weight < least]
    if not rest:
        return kept
    sums = tuple(sum(values) for values in zip(*(line.values for line in rest), strict=True))
    return [*kept, Line("", f"{len(rest)} others", sums)]
