"""Seats: the chips of a launch line are those that the planner prices."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.seats import Seat, seats
from planner.specs.catalog import load_hardware

MACHINES = ("h100-sxm", "mi300x", "gb200-nvl72", "rtx-4090", "gaudi3")


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, Plan]:
    """A machine and a plan with as many replicas as it holds, or fewer."""
    hardware = load_hardware(draw(st.sampled_from(MACHINES)))
    tp, pp = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    placement = Placement(hardware, draw(st.integers(1, 40)) * draw(st.sampled_from((1, 4, 8, 72))))
    most = placement.replicas(tp, pp)
    if most < 1:
        placement = Placement(hardware, 80 * 72)
        most = placement.replicas(tp, pp)
    return placement, Plan(tp, pp, draw(st.integers(1, min(most, 12))))


def chip(placement: Placement, seat: Seat) -> int:
    """A chip's number in the whole deployment."""
    return seat.node * (placement.hardware.host_chips or 0) + seat.chip


@given(placed())
def test_every_rank_has_a_chip_of_its_own_among_those_there_are(case: tuple[Placement, Plan]) -> None:
    placement, plan = case
    found = seats(placement, plan)
    assert [len(replica) for replica in found] == [plan.replica_chips] * plan.dp
    chips = [chip(placement, seat) for replica in found for seat in replica]
    assert len(set(chips)) == plan.chips
    assert 0 <= min(chips) <= max(chips) < placement.gpus
    assert all(seat.chip < (placement.hardware.host_chips or placement.gpus) for replica in found for seat in replica)


@given(placed())
def test_a_tensor_parallel_group_straddles_no_domain_that_holds_it(case: tuple[Placement, Plan]) -> None:
    placement, plan = case
    domain = placement.hardware.domain
    for replica in seats(placement, plan):
        for stage in range(plan.pp):
            group = [chip(placement, seat) for seat in replica[stage * plan.tp : (stage + 1) * plan.tp]]
            assert group == list(range(group[0], group[0] + plan.tp))
            if domain is not None and plan.tp <= domain:
                assert group[0] // domain == group[-1] // domain


@given(placed())
def test_stage_boundaries_leave_domains_as_often_as_they_are_priced(case: tuple[Placement, Plan]) -> None:
    placement, plan = case
    domain = placement.hardware.domain
    if domain is None or plan.tp > domain or len(placement.hardware.network) > 2:
        return
    crossed = []
    for replica in seats(placement, plan):
        homes = [chip(placement, seat) // domain for seat in replica[:: plan.tp]]
        crossed.append(sum(before != after for before, after in pairwise(homes)))
    assert max(crossed) == float(placement.crossings(plan.tp, plan.pp, plan.dp))


def test_a_rack_is_cut_into_hosts() -> None:
    ((*chips,),) = seats(Placement(load_hardware("gb200-nvl72"), 8), Plan(8))
    assert chips == [Seat(node, number) for node in (0, 1) for number in range(4)]


@pytest.mark.parametrize(("machine", "hosts"), [("tpu-v5e", 1), ("tpu-v4", 2)])
def test_a_slice_is_cut_into_hosts(machine: str, hosts: int) -> None:
    (replica,) = seats(Placement.of(load_hardware(machine), 8), Plan(8))
    assert len({seat.node for seat in replica}) == hosts
