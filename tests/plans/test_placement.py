"""Where groups sit: packing and crossings against an explicit layout of chips, network levels, torus slices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InputError, NoPlanError
from planner.plans.placement import Placement
from planner.specs.catalog import load_hardware
from planner.specs.hardware import Hardware, NetworkLevel

few = settings(max_examples=200, deadline=None)


def on(gpus: int, *domains: int | None, wanted_slice: str | None = None) -> Placement:
    """Chips on a network of switches with these domains, innermost first; the last may be as large as one likes."""
    levels = tuple(NetworkLevel(f"level{index}", "switch", 100.0, chips=chips) for index, chips in enumerate(domains))
    return Placement.of(load_hardware("h100-lecture")._replace(network=levels), gpus, wanted_slice)


def torus(*slices: str, wrap_multiple: int = 4, wrap_together: bool = False) -> Hardware:
    level = NetworkLevel("ici", "torus", 45.0, slices=slices, wrap_multiple=wrap_multiple, wrap_together=wrap_together)
    return load_hardware("h100-lecture")._replace(network=(level,))


# --------------------------------------------------------------------------------------------------- explicit layout


def laid_out(gpus: int, width: int, domain: int | None) -> list[range]:
    """The chips of every group that the machine holds, one after the other; one that would straddle moves on."""
    groups, chip = [], 0
    while chip + width <= gpus:
        last = chip + width - 1
        if domain is not None and width <= domain and chip // domain != last // domain:
            chip = (chip // domain + 1) * domain
            continue
        groups.append(range(chip, chip + width))
        chip += width
    return groups


def crossings(groups: list[range], pp: int, domain: int) -> int:
    """Stage boundaries of a replica (that takes these groups in turn) whose ends lie in different domains.

    Rank i of a stage sends to rank i of the next.
    """
    return sum(
        any(a // domain != b // domain for a, b in zip(here, there, strict=True))
        for here, there in pairwise(groups[:pp])
    )


@few
@given(
    gpus=st.integers(1, 70),
    tp=st.integers(1, 24),
    pp=st.integers(1, 12),
    domain=st.sampled_from([None, 1, 4, 8, 72]),
)
def test_replicas_are_those_of_an_explicit_layout(gpus: int, tp: int, pp: int, domain: int | None) -> None:
    held = on(gpus, domain, None) if domain else on(gpus, None)
    assert held.replicas(tp, pp) == len(laid_out(gpus, tp, domain)) // pp


@pytest.mark.parametrize("domain", [4, 8])
def test_crossings_are_those_of_the_worst_replica_of_an_explicit_layout(domain: int) -> None:
    wrong = []
    for tp in (1, 2, 3, 4, 6, 8, 16):
        for pp in range(1, 13):
            for dp in range(1, 9):
                gpus = 64 * domain  # room for all; how many are asked for beyond them changes nothing
                groups = laid_out(gpus, tp, domain)[: pp * dp]
                expected = max(crossings(groups[replica * pp :], pp, domain) for replica in range(dp))
                found = int(on(gpus, domain, None).crossings(tp, pp, dp))
                if found != expected:
                    wrong.append((f"TP{tp}xPP{pp}xDP{dp}", f"found {found}, laid out {expected}"))
    assert not wrong, f"{len(wrong)} of {7 * 12 * 8} plans, e.g. {wrong[:6]}"


def test_two_pipelines_inside_one_node_never_leave_it() -> None:
    assert on(6, 8, None).crossings(1, 3, 2) == 0
    assert on(8, 8, None).crossings(2, 2, 2) == 0
    assert on(8, 8, None).crossings(1, 8, 1) == 0


def test_crossings_of_arrays_are_those_of_their_elements() -> None:
    place = on(512, 8, None)
    tp, pp, dp = (grid.ravel() for grid in np.meshgrid([1, 2, 4, 8, 16], [1, 2, 3, 4, 8], [1, 2, 5]))
    alone = [int(place.crossings(*degrees)) for degrees in zip(tp, pp, dp, strict=True)]
    np.testing.assert_array_equal(place.crossings(tp, pp, dp), alone)


# ----------------------------------------------------------------------------------------------------------- packing


def test_groups_of_three_leave_two_chips_of_a_node_idle_rather_than_straddle() -> None:
    assert on(8, 8, None).replicas(3, 1) == 2
    assert on(16, 8, None).replicas(3, 1) == 4  # five groups of three would have 15 of the 16 chips, one astride
    assert on(16, 8, None).replicas(3, 2) == 2
    assert on(24, 8, None).replicas(3, 4) == 1


def test_seven_chips_hold_what_fits_them() -> None:
    seven = on(7, 8, None)
    assert seven.usable == 7
    held = {
        (tp, pp): seven.replicas(tp, pp) for tp, pp in ((1, 1), (2, 1), (3, 1), (4, 1), (2, 3), (1, 7), (7, 1), (8, 1))
    }
    assert held == {(1, 1): 7, (2, 1): 3, (3, 1): 2, (4, 1): 1, (2, 3): 1, (1, 7): 1, (7, 1): 1, (8, 1): 0}


def test_the_last_node_may_be_part_full() -> None:
    assert on(12, 8, None).replicas(8, 1) == 1
    assert on(12, 8, None).replicas(4, 1) == 3
    assert on(14, 8, None).replicas(6, 1) == 2


def test_a_group_larger_than_a_node_is_contiguous_over_nodes() -> None:
    assert on(16, 8, None).replicas(16, 1) == 1
    assert on(32, 8, None).replicas(16, 1) == 2
    assert on(24, 8, None).replicas(12, 1) == 2
    assert on(40, 8, None).replicas(16, 2) == 1
    assert on(15, 8, None).replicas(16, 1) == 0


def test_context_parallel_ranks_widen_a_group() -> None:
    place = on(16, 8, None)
    assert place.replicas(2, 1, cp=4) == place.replicas(8, 1) == 2
    assert place.replicas(3, 1, cp=2) == place.replicas(6, 1) == 2


def test_without_a_domain_there_is_no_boundary() -> None:
    place = on(64, None)
    assert place.replicas(3, 1) == 21
    assert place.replicas(3, 7) == 3
    for pp in (1, 2, 3, 8, 13):
        assert place.crossings(8, pp, 3) == 0
    np.testing.assert_array_equal(place.crossings(np.array([1, 8]), np.array([64, 8]), 1), [0, 0])
    np.testing.assert_array_equal(place.span(np.array([1, 2, 64, 4096])), 0)


def test_shipped_hardware_has_the_boundaries_of_its_nodes() -> None:
    node = Placement.of(load_hardware("h100"), 16)
    assert [int(node.span(np.array(ranks))) for ranks in (1, 8, 9, 16)] == [0, 0, 1, 1]
    assert node.crossings(8, 2, 1) == 1
    assert Placement.of(load_hardware("tpu-v4"), 64).crossings(8, 8, 1) == 0


def test_span_is_the_innermost_level_that_holds_a_group() -> None:
    place = on(512, 8, 64, None)
    np.testing.assert_array_equal(place.span(np.array([1, 2, 8, 9, 64, 65, 512])), [0, 0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(place.span(np.array([[8, 16], [64, 128]])), [[0, 1], [1, 2]])
    assert int(on(8, None).span(np.array(8))) == 0


# ------------------------------------------------------------------------------------------------------------- torus


LARGEST = {1: "1x1x1", 2: "1x1x2", 3: "1x1x2", 8: "2x2x2", 15: "2x2x2", 16: "2x2x4", 63: "2x4x4", 64: "4x4x4",
           100: "4x4x4", 4096: "16x16x16", 5000: "16x16x16"}  # fmt: skip


@pytest.mark.parametrize(("gpus", "shape"), LARGEST.items())
def test_the_largest_legal_slice_that_the_chips_hold_is_taken(gpus: int, shape: str) -> None:
    place = Placement.of(load_hardware("tpu-v4"), gpus)
    assert str(place.slice) == shape
    assert place.usable == np.prod([int(axis) for axis in shape.split("x")]) <= gpus
    assert place.gpus == gpus  # all of them are paid for


def test_of_equally_large_slices_the_one_that_the_file_lists_first_is_taken() -> None:
    assert str(Placement.of(torus("4x4", "2x8", "2x2"), 17).slice) == "4x4"
    assert str(Placement.of(torus("2x2", "2x8", "4x4"), 17).slice) == "2x8"


def test_a_slice_that_is_asked_for_is_taken() -> None:
    assert str(Placement.of(torus("4x4", "2x8"), 16, "2x8").slice) == "2x8"
    assert str(Placement.of(torus("4x4", "2x8"), 16, "2X8").slice) == "2x8"


@pytest.mark.parametrize(
    ("shape", "gpus", "said"),
    [
        ("4x4x5", 80, r"--slice 4x4x5: not a slice of tpu-v4; legal are 1x1x1, .*16x16x16"),
        ("4x4", 16, "not a slice of tpu-v4"),
        ("cube", 64, "not a slice of tpu-v4"),
        ("4x4x4", 128, r"--slice 4x4x4: has 64 chips, but --gpus is 128"),
        ("4x4x4", 32, "has 64 chips, but --gpus is 32"),
    ],
)
def test_a_slice_that_does_not_match_is_bad_input(shape: str, gpus: int, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Placement.of(load_hardware("tpu-v4"), gpus, shape)
    assert caught.value.exit_status == 2


def test_hardware_without_a_torus_has_no_slices() -> None:
    with pytest.raises(InputError, match="--slice 4x4x4: h100-sxm is not a torus"):
        Placement.of(load_hardware("h100"), 64, "4x4x4")
    assert Placement.of(load_hardware("h100"), 64).slice is None
    assert Placement.of(load_hardware("h100"), 64).torus_groups == {}


def test_fewer_chips_than_the_smallest_slice_hold_no_plan() -> None:
    with pytest.raises(NoPlanError, match="smallest slice has 4 chips, --gpus is 3") as caught:
        Placement.of(torus("2x2", "4x4"), 3)
    assert caught.value.exit_status == 3


@pytest.mark.parametrize("shape", ["4x4x4", "2x2x4", "4x4x8", "12x12x24"])
def test_torus_groups_tile_their_slice(shape: str) -> None:
    whole = tuple(int(axis) for axis in shape.split("x"))
    groups = Placement.of(torus(shape), int(np.prod(whole))).torus_groups
    assert groups.keys() >= {1, 2, 4, int(np.prod(whole))}
    for size, group in groups.items():
        assert np.prod(group.axes) == size
        assert all(length % axis == 0 for axis, length in zip(group.axes, whole, strict=True))


def test_replicas_of_a_torus_are_those_whose_groups_tile_it() -> None:
    place = Placement.of(load_hardware("tpu-v4"), 70)
    assert [place.replicas(tp, 1) for tp in (1, 2, 4, 8, 16, 32, 64)] == [64, 32, 16, 8, 4, 2, 1]
    assert place.replicas(3, 1) == place.replicas(48, 1) == place.replicas(128, 1) == 0
    assert place.replicas(8, 3) == 2


def test_a_cube_closes_to_rings() -> None:
    groups = Placement.of(load_hardware("tpu-v4"), 64).torus_groups
    assert (groups[64].wires, groups[64].hops) == (6, 6)  # two wires an axis; two hops to the far side of a ring of 4
    assert (groups[16].wires, groups[16].hops) == (4, 4)
    assert (groups[4].wires, groups[4].hops) == (2, 2)
    assert (groups[2].wires, groups[2].hops) == (1, 1)  # half an axis does not close
    assert (groups[1].wires, groups[1].hops) == (0, 0)


def test_a_slice_smaller_than_a_cube_is_a_mesh() -> None:
    small = Placement.of(load_hardware("tpu-v4"), 8).torus_groups
    assert (small[8].wires, small[8].hops) == (3, 3)
    flat = Placement.of(load_hardware("tpu-v4"), 16).torus_groups  # 2x2x4: its axis of 4 has no wire back either
    assert (flat[16].wires, flat[16].hops) == (3, 5)


def test_axes_close_together_or_each_for_itself_as_the_file_says() -> None:
    each = Placement.of(torus("2x4x8"), 64).torus_groups[64]
    assert (each.wires, each.hops) == (1 + 2 + 2, 1 + 2 + 4)
    together = Placement.of(torus("2x4x8", wrap_together=True), 64).torus_groups[64]
    assert (together.wires, together.hops) == (3, 1 + 3 + 7)
    assert Placement.of(torus("4x4x8", wrap_together=True), 128).torus_groups[128].wires == 6
    assert Placement.of(torus("4x8", wrap_multiple=0), 32).torus_groups[32].wires == 2


def test_the_box_with_most_wires_is_taken_and_of_equals_the_one_with_fewest_hops() -> None:
    groups = Placement.of(torus("8x8"), 64).torus_groups
    assert (sorted(groups[16].axes), groups[16].wires, groups[16].hops) == ([2, 8], 3, 5)  # 4x4 has two lines
    groups = Placement.of(torus("16x16"), 256).torus_groups
    assert (groups[16].axes, groups[16].wires, groups[16].hops) == ((4, 4), 2, 6)  # a ring of 16 has 2 wires, 8 hops


def test_part_of_an_axis_is_a_line() -> None:
    groups = Placement.of(load_hardware("tpu-v4"), 128).torus_groups  # 4x4x8
    assert groups[128].wires == 6
    assert groups[128].hops == 2 + 2 + 4
    assert (groups[64].wires, groups[64].hops) == (5, 2 + 2 + 3)  # half of the long axis: a line of 4


def test_only_axes_of_sixteen_close_on_tpu_v5e() -> None:
    eight = Placement.of(load_hardware("tpu-v5e"), 64).torus_groups[64]  # 8x8
    assert (eight.wires, eight.hops) == (2, 14)
    mixed = Placement.of(load_hardware("tpu-v5e"), 128).torus_groups[128]  # 8x16
    assert (mixed.wires, mixed.hops) == (3, 7 + 8)
    pod = Placement.of(load_hardware("tpu-v5e"), 256).torus_groups[256]  # 16x16
    assert (pod.wires, pod.hops) == (4, 16)


# ---------------------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize(
    ("hardware", "gpus"),
    [("tpu-v4", 1), ("tpu-v4", 8), ("tpu-v4", 16), ("tpu-v4", 64), ("tpu-v4", 128), ("tpu-v4", 512),
     ("tpu-v5e", 8), ("tpu-v5e", 64), ("tpu-v5e", 128), ("tpu-v5e", 256)],
)  # fmt: skip
def test_axes_of_grids_on_a_torus_are_whole_axes_of_the_box_each_in_one_place(hardware: str, gpus: int) -> None:
    place = Placement.of(load_hardware(hardware), gpus)
    for ranks, group in place.torus_groups.items():
        meshes = place.meshes(ranks)
        assert meshes[0].sizes == (1, ranks, 1)
        assert len({mesh.sizes for mesh in meshes}) == len(meshes)
        for mesh in meshes:
            x, y, z = mesh.sizes
            assert x * y * z == ranks
            assert x > 1 or (y, z) == (ranks, 1)
            assert y > 1 or z == 1  # no part under another name
            lines = [line for part in mesh.lines for line in part]
            assert sorted(lines) == sorted(group.lines)  # disjoint, all of them, and rings stay rings
            for part, size in zip(mesh.lines, mesh.sizes, strict=True):
                assert np.prod([line.length for line in part]) == size
            box = mesh.box("xyz")
            assert (ranks == 1 and box is None) or (box is not None and box.wires == group.wires)
            assert place.mesh(mesh.sizes) is mesh
            for axes in ("x", "y", "z", "xy", "yz", "xz", "xyz"):
                part_box = mesh.box(axes)
                assert part_box is None or np.prod(part_box.axes) == mesh.ranks(axes)


def test_grids_of_a_cube() -> None:
    place = Placement.of(load_hardware("tpu-v4"), 64)
    assert [mesh.text for mesh in place.meshes(64)] == ["1x64", "4x4x4", "4x16", "16x4", "64x1"]
    cube = place.mesh((4, 4, 4))
    assert cube is not None
    assert [(box.wires, box.hops) for axes in ("x", "yz", "xyz") if (box := cube.box(axes))] == [(2, 2), (4, 4), (6, 6)]
    assert [mesh.text for mesh in place.meshes(16)] == ["1x16", "4x4", "16x1"]
    assert place.meshes(12) == ()
    assert place.mesh((2, 32, 1)) is None
    assert place.mesh((4, 3, 1)) is None


def test_of_readings_with_the_same_sizes_the_one_with_most_wires_for_x_counts() -> None:
    """2x2x4 chips without a way back, as 4 x 4: X may be the axis of 4, which has one wire, or both of 2."""
    grid = Placement.of(torus("2x2x4", wrap_multiple=0), 16).mesh((4, 4, 1))
    assert grid is not None
    across, along = grid.box("x"), grid.box("y")
    assert across is not None
    assert along is not None
    assert (across.axes, across.wires, across.hops) == ((2, 2), 2, 2)
    assert (along.axes, along.wires, along.hops) == ((4,), 1, 3)


def test_grids_of_a_flat_torus_have_no_third_axis() -> None:
    for gpus, texts in ((256, ["1x256", "16x16", "256x1"]), (128, ["1x128", "8x16", "16x8", "128x1"])):
        place = Placement.of(load_hardware("tpu-v5e"), gpus)
        assert [mesh.text for mesh in place.meshes(gpus)] == texts
        assert all(mesh.sizes[2] == 1 for mesh in place.meshes(gpus))


def test_where_a_switch_joins_all_chips_any_factors_do() -> None:
    place = Placement.of(load_hardware("gb200-nvl72"), 72)
    sizes = [mesh.sizes for mesh in place.meshes(72)]
    factors = {
        (x, y, 72 // x // y)
        for x in range(2, 73)
        if 72 % x == 0
        for y in range(1, 72 // x + 1)
        if 72 // x % y == 0 and (y > 1 or x == 72)
    }
    assert set(sizes) == {(1, 72, 1)} | factors
    assert len(sizes) == len(set(sizes))
    assert all(mesh.box("x") is None for mesh in place.meshes(72))
    assert [mesh.text for mesh in place.meshes(4)] == ["1x4", "2x2", "4x1"]
    assert [mesh.sizes for mesh in place.meshes(1)] == [(1, 1, 1)]


def test_a_group_that_leaves_its_domain_is_a_line() -> None:
    place = Placement.of(load_hardware("h100-sxm"), 32)
    assert [mesh.sizes for mesh in place.meshes(16)] == [(1, 16, 1)]
    assert [mesh.sizes for mesh in place.meshes(7)] == [(1, 7, 1), (7, 1, 1)]
    assert {mesh.sizes for mesh in place.meshes(8)} == {(1, 8, 1), (2, 2, 2), (2, 4, 1), (4, 2, 1), (8, 1, 1)}
