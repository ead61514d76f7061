"""Sensitivity of a decision: which single constant, within its own uncertainty, would put another plan first.

The first plan and its nearest rivals are priced again by `costs.serving.price`, nothing linearised, with one constant
at the ends of its plausible range (`constants.slack`); where another plan leads there, the value at which the two are
equal is bracketed.

Assumed: which plans fit, and the load that each was ranked at, stay as they are (but for the engine's runtime memory,
with which a searched load that fills the memory grows and shrinks); limits on time are not asked again; constants are
changed one at a time. A rival that leads only between two values at which it does not is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.ranking import Ranking, metric
from planner.results import texts
from planner.sensitivity.constants import (
    Constant,
    collective_constants,
    host_constants,
    kernel_constants,
    memory_constants,
)
from planner.sensitivity.field import Array, Example, Field, Variation
from planner.units import KIB, MIB, US

RIVALS = 4
"""Plans behind the first that are looked at."""
FARTHEST = 0.5
"""How far behind a rival may be, relative to the first. A factor of two closes more only if the constant has more than
half of a plan's time and none of the other's; over the shipped files none was seen to close more than 0.3."""
EQUAL = 1e-9
"""Relative difference of two goals below which they are the same (the order of a ranking keeps 30 bits)."""
_STEPS, _FOUND, _CLOSE = 60, 1e-8, 1e-13  # of the search for equality: how often, and the gap and the width that end it
_CLOSE_STEPS = 1e-4  # the width where the load follows the constant in whole requests, so that there is no equality


class Flip(NamedTuple):
    """A constant and the value at which another plan takes the first place."""

    constant: Constant
    factor: float
    """Of the constant's value; just beyond it the other plan leads."""
    row: int
    """Index of that plan in the ranking's results."""
    plan: str
    example: Example | None
    """For a collective: one of them."""

    @property
    def deviation(self) -> float:
        """How far off the constant must be, 1 = the end of its plausible range."""
        return float(abs(np.log(self.factor)) / np.log(self.constant.slack))

    @property
    def values(self) -> tuple[float, float, str] | None:
        """(now, where the plans are equal, unit): of the constant, or of one collective that it prices; none if there
        is no such collective."""
        if self.constant.value is not None:
            return self.constant.value, self.constant.value * self.factor, self.constant.unit
        return None if self.example is None else (self.example.now / US, self.example.then / US, "us")

    @property
    def text(self) -> str:
        """`NAME xFACTOR (VALUE -> VALUE)`, as in the column `flips_if`; of collectives `(SIZE over RANKS: ...)`."""
        head = f"{self.constant.name} x{self.factor:.3g}"
        if self.values is None:
            return head
        now, then, unit = self.values
        of = "" if self.example is None else f"{buffer(self.example)}: "
        now_text, then_text = (f"{value:.3g} {unit}".rstrip() for value in (now, then))
        return f"{head} ({of}{now_text} -> {then_text})"


class Nearest(NamedTuple):
    """The end of a constant's plausible range at which a rival comes closest to the first place."""

    constant: Constant
    factor: float
    plan: str
    gap: float
    """How far behind it still is, relative to the first."""


class Sensitivity(NamedTuple):
    """What would change the first place of a ranking."""

    flips: tuple[Flip, ...]
    """One for each constant and direction that does, the least deviation first."""
    nearest: Nearest | None
    """Where there are no flips; none if nothing that can be varied makes a difference."""
    constants: int
    """How many were varied."""

    def of_row(self, row: int) -> Flip | None:
        """The flip of the least deviation that puts this row of the ranking first."""
        return next((flip for flip in self.flips if flip.row == row), None)

    def column(self, rows: int) -> NDArray[Any]:
        """The result column `flips_if` of so many rows."""
        flips = [self.of_row(row) for row in range(rows)]
        return texts([None if flip is None else flip.text for flip in flips], rows)


def buffer(example: Example) -> str:
    """`16 KiB over 8 ranks`."""
    units = ((MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    size = next(f"{example.bytes / unit:.4g} {name}" for unit, name in units if example.bytes >= unit or unit == 1)
    return f"{size} over {example.ranks} ranks"


def sensitivity(ranking: Ranking, rivals: int = RIVALS) -> Sensitivity | None:
    """What would change the first place, one constant at a time.

    Args:
        ranking: its order, loads and feasibility are taken as they are.
        rivals: how many plans behind the first are looked at; those equal to it are passed over,
            and those too far off.

    Returns:
        None where there is no first place to lose: on a Pareto frontier, or with no rival; and where the load or the
        number of chips would follow the constant (an arrival rate, the fewest chips), or lengths differ.
    """
    request, goal = ranking.request, metric(ranking.results, ranking.request.objective)
    work = request.workload
    if request.pareto or request.fewest or work.arrival_rate or work.lengths or not np.isfinite(goal[0]):
        return None
    behind = np.flatnonzero(np.isfinite(goal) & (goal > goal[0] * (1 + EQUAL)))[:rivals]
    behind = behind[(goal[behind] < goal[0] * (1 + FARTHEST)) | (np.arange(len(behind)) == 0)]
    if not len(behind):
        return None
    index = np.concatenate([[0], behind])
    field = Field.of(ranking, index)
    ways: list[tuple[Callable[[Sequence[Variation]], Array], list[Variation], float]] = []
    found: list[tuple[Variation, Array]] = []
    together = [*kernel_constants(request.hardware, field.groups[0].setting.formats), *host_constants(request.engine)]
    ways.append((field.together, [(each, end) for each in together for end in each.ends()], _CLOSE))
    wires = list(collective_constants(request.hardware, request.engine, field.calls()))
    ways.append((field.apart, [(each, end) for each in wires for end in field.ends(each)], _CLOSE))
    memory = list(memory_constants(request.engine)) if field.full.any() else []
    ways.append((field.apart, [(each, end) for each in memory for end in each.ends()], _CLOSE_STEPS))
    flips = []
    for evaluate, variations, close in ways:
        if not variations:
            continue
        gaps = evaluate(variations)
        found += zip(variations, gaps, strict=True)
        leads = [(each, own) for each, own in zip(variations, gaps, strict=True) if own.min() < -EQUAL]
        for constant, factor, rival in _equal(evaluate, leads, field.gaps, close):
            row = int(index[rival + 1])
            plan = str(ranking.results["plan"][row])
            flips.append(Flip(constant, factor, row, plan, field.example(constant, factor, rival)))
    flips.sort(key=lambda flip: (round(flip.deviation, 9), flip.constant.path, flip.factor))
    looked = len(together) + len(wires) + len(memory)
    return Sensitivity(tuple(flips), None if flips else _nearest(ranking, field, index, found), looked)


def mark(ranking: Ranking) -> Sensitivity | None:
    """The sensitivity of a ranking, written into its column `flips_if` too."""
    found = sensitivity(ranking)
    if found is not None:
        ranking.results.columns["flips_if"] = found.column(len(ranking.results))
    return found


def _nearest(
    ranking: Ranking, field: Field, index: NDArray[np.intp], found: Sequence[tuple[Variation, Array]]
) -> Nearest | None:
    """Of gaps at the ends of constants, the smallest, if it is smaller than as things are."""
    if not found:
        return None
    (constant, factor), gaps = min(found, key=lambda each: (round(float(each[1].min()), 12), each[0][0].path))
    if gaps.min() > field.gaps.min() - EQUAL:
        return None
    plan = str(ranking.results["plan"][index[int(gaps.argmin()) + 1]])
    return Nearest(constant, factor, plan, float(gaps.min()))


def _equal(
    evaluate: Callable[[Sequence[Variation]], Array],
    leads: Sequence[tuple[Variation, Array]],
    start: Array,
    close: float,
) -> Iterator[tuple[Constant, float, int]]:
    """(constant, factor at which the first plan and a rival are equal, which rival), for each end at which one leads.

    Regula falsi, all constants at once, over what times are next to linear in: the factor, of a share its inverse. An
    end that stays is given less weight each time (Anderson and Bjorck 1973). It stops where the gap is next to
    nothing, or where the two ends are `close` together; should another rival lead there, it goes on with that one.

    Args:
        evaluate: gaps of the rivals for some variations.
        leads: the ends, each with the gaps there, of which some are below 0.
        start: the gaps as things are, all above 0.
        close: the width, relative to the constant.
    """
    constants = [constant for (constant, _), _ in leads]
    near = np.array([_inverse_of_share(*end) for end, _ in leads])  # the newest point
    far = np.ones(len(leads))  # the one on the other side of equality
    rival = np.array([gaps.argmin() for _, gaps in leads], dtype=int)
    at_near, at_far = np.array([gaps.min() for _, gaps in leads]), start[rival]
    beyond, which = near.copy(), np.arange(len(leads))
    for step in range(_STEPS):
        if not len(which):
            break
        weight = (at_near / (at_near - at_far))[which] if step % 4 < 3 else 0.5  # halves what does not converge
        middle = near[which] + weight * (far - near)[which]
        gaps = evaluate(
            [
                (constants[each], _inverse_of_share(constants[each], x))
                for each, x in zip(which, middle.tolist(), strict=True)
            ]
        )
        gap = gaps[np.arange(len(which)), rival[which]]
        other, kept = gap * at_near[which] < 0, 1 - gap / at_near[which]
        at_far[which] = np.where(other, at_near[which], at_far[which] * np.where(kept > 0, kept, 0.5))
        far[which] = np.where(other, near[which], far[which])
        near[which], at_near[which] = middle, gap
        beyond[which] = np.where(gap < _FOUND, middle, beyond[which])
        done = (np.abs(gap) <= _FOUND) | (np.abs(far - near)[which] <= close)
        overtaken = done & (gaps.min(axis=1) < -_FOUND)
        for each, found in zip(which[overtaken], gaps[overtaken], strict=True):
            rival[each], at_near[each], far[each] = found.argmin(), found.min(), 1.0
            at_far[each] = start[rival[each]]
        which = which[~done | overtaken]
    for constant, x, who in zip(constants, beyond.tolist(), rival.tolist(), strict=True):
        yield constant, _inverse_of_share(constant, x), who


def _inverse_of_share(constant: Constant, factor: float) -> float:
    """A factor, or its inverse where the constant is a share or a bandwidth: times are next to linear in it."""
    return 1 / factor if constant.is_rate else factor
