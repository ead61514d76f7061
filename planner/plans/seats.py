"""Which chip of which host each rank of a plan gets: what a launch line must say and a picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.plans.placement import Placement
from planner.plans.plan import Plan


class Seat(NamedTuple):
    """One chip."""

    node: int
    """Host, from 0."""
    chip: int
    """Its number on that host, from 0."""


def seats(placement: Placement, plan: Plan) -> tuple[tuple[Seat, ...], ...]:
    """The chips of every replica in the order of its ranks: stage by stage, in each the tensor-parallel ranks.

    Tensor-parallel groups stand as `Placement` prices them: side by side in a domain as many as it holds whole, one
    that is larger over consecutive chips. A domain of several hosts (a rack) is cut into them in order.

    Args:
        placement: the machine, which holds the plan (see `rules.chips_refusal`).
        plan: what is placed.

    Returns:
        dp replicas of tp x cp x pp seats.
    """
    width = plan.tp * plan.cp
    domain = None if placement.slice else placement.hardware.domain
    host = placement.hardware.host_chips
    per_domain = None if domain is None or width > domain else domain // width

    def start(group: int) -> int:
        if per_domain is None or domain is None:
            return group * width
        return group // per_domain * domain + group % per_domain * width

    def seat(chip: int) -> Seat:
        return Seat(0, chip) if host is None else Seat(*divmod(chip, host))

    def replica(copy: int) -> tuple[Seat, ...]:
        groups = range(copy * plan.pp, (copy + 1) * plan.pp)
        return tuple(seat(start(group) + rank) for group in groups for rank in range(width))

    return tuple(replica(copy) for copy in range(plan.dp))


def level_between(placement: Placement, chips: Sequence[Seat]) -> int:
    """Index of the innermost network level of which one domain holds all of these chips; 0 on a torus.

    Args:
        placement: the machine.
        chips: at least one; on hosts of a known size, unless all are on one.
    """
    if placement.slice is not None:
        return 0
    host = placement.hardware.host_chips or 0
    numbers = [seat.node * host + seat.chip for seat in chips]
    levels = placement.hardware.network
    for index, level in enumerate(levels):
        if level.chips is None or min(numbers) // level.chips == max(numbers) // level.chips:
            return index
    return len(levels) - 1
