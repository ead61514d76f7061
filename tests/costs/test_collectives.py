"""Collectives: bytes and steps against a simulation that moves the data, then their price on hand-made networks."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import (
    Array,
    Buffers,
    Fabric,
    Message,
    Torus,
    all_to_all,
    direct_all_gather,
    direct_reduce_scatter,
    hierarchical_all_reduce,
    in_switch_all_reduce,
    one_shot_all_reduce,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    send,
    torus_all_gather,
    torus_all_gather_by_axis,
    torus_all_to_all_loads,
    tree_all_reduce,
    two_shot_all_reduce,
)

import planner
from planner.costs.collectives import Network, sent_bytes, steps
from planner.costs.layers import Transfer
from planner.costs.teams import Groups
from planner.errors import InputError
from planner.plans.placement import Placement
from planner.specs.catalog import load_engine, load_hardware, load_machine
from planner.specs.engine import CollectiveRule, Engine
from planner.specs.fields import Provenance
from planner.specs.hardware import CollectiveKernel, Hardware, NetworkLevel, RankRow
from planner.units import GB, KIB, US

ASSUMED = Provenance("textbook", "made up for a test")
ELEMENT = 2  # bytes an element of the simulation stands for
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ranks_of = st.integers(2, 9)
few = settings(max_examples=25, deadline=None)


# ------------------------------------------------------------------------------------------------ hand-made machines


def exactly(seconds_or_bytes: Any) -> Any:
    """The same number but for the order of additions (approx alone takes any 1e-12 s for equal)."""
    return pytest.approx(seconds_or_bytes, rel=1e-12, abs=0)


def row(op: str, level: str, algorithm: str, kernel: str = "kernel", **constants: Any) -> CollectiveKernel:
    return CollectiveKernel(kernel, op, level, algorithm, ASSUMED, **constants)  # type: ignore[arg-type]


def machine(levels: list[NetworkLevel], rows: list[CollectiveKernel]) -> Hardware:
    return load_hardware("h100-lecture")._replace(name="made-up", network=tuple(levels), collectives=tuple(rows))


def engine(*rules: CollectiveRule) -> Engine:
    plain = tuple(CollectiveRule(op, ("kernel",)) for op in (*OPS, "send"))  # type: ignore[arg-type]
    return load_engine("lecture")._replace(name="made-up", collectives=rules or plain)


def network(levels: list[NetworkLevel], rows: list[CollectiveKernel], gpus: int = 64, software: Engine | None = None):
    return Network(Placement.of(machine(levels, rows), gpus), software or engine())


def one_level(algorithm: str, op: str = "all_reduce", kind: str = "switch", **constants: Any) -> Network:
    """A network of one level of 100 GB/s where `op` has one kernel; 2 us a hop unless said otherwise."""
    constants.setdefault("hop_us", None if "ranks" in constants else 2.0)
    level = NetworkLevel("all", kind, 100.0)  # type: ignore[arg-type]
    return network([level], [row(op, "all", algorithm, **constants)])


def nodes_of(gpus: int, per_node: int) -> list[list[int]]:
    return [list(range(start, start + per_node)) for start in range(0, gpus, per_node)]


def two_levels(per_node: int, *rows: CollectiveKernel, nics: int | None = None, kind: str = "switch") -> Network:
    """Nodes on 100 GB/s (2 us a hop) joined by 10 GB/s (5 us a hop); rings unless rows are given."""
    levels = [
        NetworkLevel("inside", kind, 100.0, chips=per_node),  # type: ignore[arg-type]
        NetworkLevel("across", "switch", 10.0, nics_per_node=nics),
    ]
    plain = [row(op, "inside", "ring", hop_us=2.0) for op in ("all_reduce", "all_gather", "reduce_scatter")]
    return network(levels, [*plain, *(rows or (row("all_reduce", "across", "ring", hop_us=5.0),))])


def buffers(ranks: int, elements: int, seed: int = 0) -> Buffers:
    """Whole numbers, so that sums are exact in any order."""
    generator = np.random.default_rng(seed)
    return {device: generator.integers(-50, 50, elements).astype(float) for device in range(ranks)}


def total(given: Buffers) -> Array:
    return np.sum(list(given.values()), axis=0)


def joined(given: Buffers) -> Array:
    return np.concatenate(list(given.values()))


def holds_everywhere(result: Buffers, expected: Array) -> None:
    for array in result.values():
        np.testing.assert_array_equal(array, expected)


def sent_equally(fabric: Fabric, ranks: int) -> float:
    """Bytes that every rank sent; it must be the same for all of them."""
    sent = {fabric.sent(device) for device in range(ranks)}
    assert len(sent) == 1
    return sent.pop()


# ------------------------------------------------------------------------------------------ count against simulation


@few
@given(ranks=ranks_of, per_rank=st.integers(1, 7))
def test_ring_all_reduce_sums_and_sends_what_is_counted(ranks: int, per_rank: int) -> None:
    fabric, given = Fabric(ELEMENT), buffers(ranks, ranks * per_rank)
    (result,) = ring_all_reduce(fabric, given)
    holds_everywhere(result, total(given))
    size = ranks * per_rank * ELEMENT
    assert sent_equally(fabric, ranks) == exactly(sent_bytes("ring", "all_reduce", ranks, size))
    assert fabric.steps == [sum(steps("ring", "all_reduce", ranks, ranks))] == [2 * (ranks - 1)]


@few
@given(ranks=ranks_of, per_rank=st.integers(1, 7), direct=st.booleans())
def test_reduce_scatter_and_all_gather_send_what_is_counted(ranks: int, per_rank: int, direct: bool) -> None:
    given, size = buffers(ranks, ranks * per_rank), ranks * per_rank * ELEMENT
    algorithm = "direct" if direct else "ring"

    scattering = Fabric(ELEMENT)
    shards = direct_reduce_scatter(scattering, given) if direct else ring_reduce_scatter(scattering, given)[0]
    np.testing.assert_array_equal(joined(shards), total(given))

    gathering = Fabric(ELEMENT)
    result = direct_all_gather(gathering, shards) if direct else ring_all_gather(gathering, shards)[0]
    holds_everywhere(result, total(given))

    for fabric, op in ((scattering, "reduce_scatter"), (gathering, "all_gather")):
        assert sent_equally(fabric, ranks) == exactly(sent_bytes(algorithm, op, ranks, size))
        assert fabric.steps == [sum(steps(algorithm, op, ranks, ranks))]


@few
@given(ranks=ranks_of, elements=st.integers(1, 60))
def test_a_buffer_that_does_not_divide_sends_the_counted_bytes_to_within_a_chunk(ranks: int, elements: int) -> None:
    fabric, given = Fabric(ELEMENT), buffers(ranks, elements)
    (result,) = ring_all_reduce(fabric, given)
    holds_everywhere(result, total(given))
    counted = sent_bytes("ring", "all_reduce", ranks, elements * ELEMENT)
    sent = [fabric.sent(device) for device in range(ranks)]
    assert np.mean(sent) == exactly(counted)
    assert max(abs(one - counted) for one in sent) < 2 * ELEMENT  # each way leaves out one chunk, off by < 1 element


@few
@given(ranks=ranks_of, per_rank=st.integers(1, 7))
def test_shots_send_what_is_counted(ranks: int, per_rank: int) -> None:
    given, size = buffers(ranks, ranks * per_rank), ranks * per_rank * ELEMENT
    for algorithm, run in (("one_shot", one_shot_all_reduce), ("two_shot", two_shot_all_reduce)):
        fabric = Fabric(ELEMENT)
        holds_everywhere(run(fabric, given), total(given))
        counted = sent_bytes(algorithm, "all_reduce", ranks, size)
        assert sent_equally(fabric, ranks) == exactly(counted)
        assert fabric.steps == [sum(steps(algorithm, "all_reduce", ranks, ranks))]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_in_switch_all_reduce_sends_the_buffer_once(ranks: int) -> None:
    fabric, given = Fabric(ELEMENT), buffers(ranks, 12)
    holds_everywhere(in_switch_all_reduce(fabric, given), total(given))
    assert sent_equally(fabric, ranks) == sent_bytes("in_switch", "all_reduce", ranks, 12 * ELEMENT) == 24


@few
@given(ranks=ranks_of, per_pair=st.integers(1, 7))
def test_all_to_all_transposes_and_sends_what_is_counted(ranks: int, per_pair: int) -> None:
    blocks = {
        source: {target: np.full(per_pair, 100.0 * source + target) for target in range(ranks)}
        for source in range(ranks)
    }
    fabric = Fabric(ELEMENT)
    result = all_to_all(fabric, blocks)
    for source in range(ranks):
        for target in range(ranks):
            np.testing.assert_array_equal(result[target][source], blocks[source][target])
    held = ranks * per_pair * ELEMENT
    assert sent_equally(fabric, ranks) == exactly(sent_bytes("direct", "all_to_all", ranks, held))
    assert fabric.steps == [sum(steps("direct", "all_to_all", ranks, ranks))] == [1]


def test_a_send_moves_its_bytes_in_one_step() -> None:
    fabric = Fabric(ELEMENT)
    arrived = send(fabric, {(0, 4): np.arange(6.0), (1, 5): np.arange(6.0) + 1})
    np.testing.assert_array_equal(arrived, [np.arange(6.0), np.arange(6.0) + 1])
    assert fabric.sent(0) == fabric.sent(1) == sent_bytes("direct", "send", 2, 12) == 12
    assert fabric.steps == [sum(steps("direct", "send", 2, 2))]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 4), (4, 2), (8, 1)])
def test_tree_all_reduce_takes_the_counted_steps_and_on_average_the_counted_bytes(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    fabric, given = Fabric(ELEMENT), buffers(ranks, 24)
    holds_everywhere(tree_all_reduce(fabric, nodes_of(ranks, per_node), given), total(given))
    inside, across = steps("tree", "all_reduce", ranks, nodes)
    crossing = {m.step for m in fabric.messages if m.source // per_node != m.target // per_node}
    assert (fabric.steps[0] - len(crossing), len(crossing)) == (inside, across)
    # inner devices of one tree send more than leaves; two trees with the roles exchanged send this each
    mean = np.mean([fabric.sent(device) for device in range(ranks)])
    assert mean == exactly(sent_bytes("tree", "all_reduce", ranks, 24 * ELEMENT))


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (2, 8), (3, 2), (8, 1)])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_flat_ring_over_nodes_crosses_once_between_neighbouring_nodes(nodes: int, per_node: int, op: str) -> None:
    ranks = nodes * per_node
    fabric, given = Fabric(ELEMENT), buffers(ranks, 2 * ranks)
    (ring_all_gather if op == "all_gather" else ring_reduce_scatter)(fabric, given)
    inside, across = steps("ring", op, ranks, nodes)
    assert fabric.steps == [inside + across]
    # A piece takes ranks - 1 of the ring's hops. The piece that ends behind the wire back to the first node never
    # takes that one: its way is the counted one. Others cross it too, so no way is shorter.
    ways: Counter[int] = Counter()
    for message in fabric.messages:
        ways[message.tag[1]] += message.source // per_node != message.target // per_node
    assert min(ways.values()) == across == nodes - 1
    assert max(ways.values()) <= nodes


def test_flat_ring_all_reduce_counts_both_ways_round() -> None:
    assert steps("ring", "all_reduce", 16, 2) == (28, 2)
    assert steps("ring", "all_reduce", 8, 8) == (0, 14)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (2, 8), (3, 4), (1, 4), (4, 1)])
def test_hierarchical_all_reduce_splits_its_bytes_over_the_levels(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    fabric, given = Fabric(ELEMENT), buffers(ranks, 2 * ranks)
    holds_everywhere(hierarchical_all_reduce(fabric, nodes_of(ranks, per_node), given), total(given))
    size = 2 * ranks * ELEMENT
    inside: Counter[int] = Counter()
    across: Counter[int] = Counter()
    for message in fabric.messages:
        crosses = message.source // per_node != message.target // per_node
        (across if crosses else inside)[message.source] += message.elements * ELEMENT
    for device in range(ranks):
        assert inside[device] == exactly(2 * (per_node - 1) / per_node * size)
        assert across[device] == exactly(2 * (nodes - 1) / nodes * size / per_node)
    assert sent_equally(fabric, ranks) == exactly(sent_bytes("hierarchical", "all_reduce", ranks, size))
    assert fabric.steps == [per_node - 1, sum(steps("ring", "all_reduce", nodes, nodes)), per_node - 1]


@few
@given(ranks=st.integers(1, 512), size=st.floats(1, 1e12))
def test_bytes_formulas_hold_for_any_group_and_size(ranks: int, size: float) -> None:
    share = (ranks - 1) / ranks
    ring = sent_bytes("ring", "all_reduce", ranks, size)
    assert ring == exactly(2 * share * size)
    assert ring == sent_bytes("two_shot", "all_reduce", ranks, size) == sent_bytes("tree", "all_reduce", ranks, size)
    assert sent_bytes("one_shot", "all_reduce", ranks, size) == (ranks - 1) * size
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert sent_bytes("direct", op, ranks, size) == exactly(share * size)
    gathered = sent_bytes("ring", "reduce_scatter", ranks, size) + sent_bytes("ring", "all_gather", ranks, size)
    assert ring == exactly(gathered)


@pytest.mark.parametrize("algorithm", ["ring", "one_shot", "two_shot", "tree", "in_switch", "hierarchical"])
def test_one_rank_sends_nothing(algorithm: str) -> None:
    assert sent_bytes(algorithm, "all_reduce", 1, 1e6) == 0


def test_bytes_of_arrays_are_those_of_their_elements() -> None:
    ranks, size = np.array([1, 2, 8, 3]), np.array([8.0, 16.0, 24.0, 30.0])
    for algorithm in ("ring", "one_shot", "two_shot", "tree", "in_switch", "direct"):
        for op in (*OPS, "send"):
            expected = [float(sent_bytes(algorithm, op, k, d)) for k, d in zip(ranks, size, strict=True)]
            np.testing.assert_allclose(sent_bytes(algorithm, op, ranks, size), expected, rtol=1e-12)


# ------------------------------------------------------------------------------------------- price against simulation


def on_one_level(fabric: Fabric, wires: bool = False) -> float:
    return fabric.seconds(hop=lambda _: 2 * US, bandwidth=lambda _: 100 * GB, wires=wires)


@few
@given(ranks=ranks_of, per_rank=st.integers(1, 5))
def test_textbook_price_on_a_switch_is_the_clock_of_the_simulation(ranks: int, per_rank: int) -> None:
    given, size = buffers(ranks, ranks * per_rank), ranks * per_rank * ELEMENT
    blocks = {source: dict(enumerate(np.array_split(array, ranks))) for source, array in given.items()}
    shards = {device: array[:per_rank] for device, array in given.items()}
    runs: dict[tuple[str, str], Any] = {
        ("ring", "all_reduce"): lambda fabric: ring_all_reduce(fabric, given),
        ("ring", "reduce_scatter"): lambda fabric: ring_reduce_scatter(fabric, given),
        ("ring", "all_gather"): lambda fabric: ring_all_gather(fabric, shards),
        ("one_shot", "all_reduce"): lambda fabric: one_shot_all_reduce(fabric, given),
        ("two_shot", "all_reduce"): lambda fabric: two_shot_all_reduce(fabric, given),
        ("direct", "all_to_all"): lambda fabric: all_to_all(fabric, blocks),
        ("direct", "all_gather"): lambda fabric: direct_all_gather(fabric, shards),
    }
    for (algorithm, op), run in runs.items():
        fabric = Fabric(ELEMENT)
        run(fabric)
        priced = one_level(algorithm, op).seconds(op, ranks, size)
        assert float(priced) == exactly(on_one_level(fabric)), (algorithm, op)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_mesh_has_a_wire_for_every_other_rank(ranks: int) -> None:
    given, size = buffers(ranks, 6 * ranks), 6 * ranks * ELEMENT
    for algorithm, run in (("one_shot", one_shot_all_reduce), ("two_shot", two_shot_all_reduce)):
        fabric = Fabric(ELEMENT)
        run(fabric, given)
        priced = one_level(algorithm, kind="mesh").seconds("all_reduce", ranks, size)
        assert float(priced) == exactly(on_one_level(fabric, wires=True))
    bare = one_level("ring", kind="mesh", hop_us=0.0).seconds("all_reduce", ranks, size)
    port = one_level("ring", kind="switch", hop_us=0.0).seconds("all_reduce", ranks, size)
    assert float(bare) == exactly(float(port) / (ranks - 1))


def test_a_send_takes_one_wire_of_a_mesh() -> None:
    levels = [NetworkLevel("inside", "mesh", 100.0, chips=8), NetworkLevel("across", "switch", 10.0)]
    rows = [row("send", level, "direct", hop_us=2.0) for level in ("inside", "across")]
    net = network(levels, rows)
    assert float(net.send(1e6, crossing=False)[0]) == exactly(2 * US + 1e6 / (100 * GB))
    assert float(net.send(1e6, crossing=True)[0]) == exactly(2 * US + 1e6 / (10 * GB))


def test_a_send_across_stays_on_the_only_level_where_there_is_one() -> None:
    net = one_level("direct", "send")
    assert net.send(1e6, crossing=True) == net.send(1e6, crossing=False) == exactly(2 * US + 1e6 / (100 * GB))


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (2, 8), (3, 4)])
def test_a_flat_ring_over_nodes_is_paced_by_its_slowest_link(nodes: int, per_node: int) -> None:
    ranks = nodes * per_node
    fabric, given = Fabric(ELEMENT), buffers(ranks, 3 * ranks)
    ring_all_reduce(fabric, given)

    def crosses(message: Message) -> bool:
        return message.source // per_node != message.target // per_node

    clock = fabric.seconds(
        hop=lambda m: (5 if crosses(m) else 2) * US, bandwidth=lambda m: (10 if crosses(m) else 100) * GB, wires=False
    )
    priced = two_levels(per_node).seconds("all_reduce", ranks, 3 * ranks * ELEMENT)
    assert float(priced) == exactly(clock)


def test_steps_inside_and_across_pay_their_own_latency_where_a_row_gives_both() -> None:
    ring = row("all_reduce", "across", "ring", base_us=7.0, hop_us=5.0, inner_hop_us=0.5)
    tree = row("all_reduce", "across", "tree", base_us=7.0, hop_us=5.0, inner_hop_us=0.5)
    size = 1e6
    sent = 2 * 31 / 32 * size / (10 * GB)  # 32 ranks on 4 nodes of 8
    assert float(two_levels(8, ring).seconds("all_reduce", 32, size)) == exactly((7 + 56 * 0.5 + 6 * 5) * US + sent)
    assert float(two_levels(8, tree).seconds("all_reduce", 32, size)) == exactly((7 + 14 * 0.5 + 4 * 5) * US + sent)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2), (2, 8), (3, 4)])
@pytest.mark.parametrize("nics", [None, 1, 4])
def test_hierarchical_price_is_the_sum_of_its_phases(nodes: int, per_node: int, nics: int | None) -> None:
    ranks = nodes * per_node
    net = two_levels(per_node, row("all_reduce", "across", "hierarchical", base_us=3.0, hop_us=5.0), nics=nics)
    fabric, given = Fabric(ELEMENT), buffers(ranks, 3 * ranks)
    hierarchical_all_reduce(fabric, nodes_of(ranks, per_node), given)
    nic = 10 * GB * (1.0 if nics is None else nics / per_node)  # all chips of a node send at once

    def crosses(message: Message) -> bool:
        return message.source // per_node != message.target // per_node

    clock = fabric.seconds(
        hop=lambda m: (5 if crosses(m) else 2) * US, bandwidth=lambda m: nic if crosses(m) else 100 * GB, wires=False
    )
    size = 3 * ranks * ELEMENT
    by_hand = (
        2 * ((per_node - 1) * 2 * US + (per_node - 1) / per_node * size / (100 * GB))
        + 2 * (nodes - 1) * 5 * US
        + 2 * (nodes - 1) / nodes * size / per_node / nic
    )
    assert clock == exactly(by_hand)
    assert float(net.seconds("all_reduce", ranks, size)) == exactly(3 * US + by_hand)


def test_hierarchical_phases_use_the_kernels_that_the_engine_chooses_below() -> None:
    rows = [
        row("reduce_scatter", "inside", "ring", kernel="slow", hop_us=50.0),
        row("all_gather", "inside", "ring", kernel="slow", hop_us=70.0),
        row("all_reduce", "across", "hierarchical", kernel="slow", hop_us=5.0),
    ]
    levels = [NetworkLevel("inside", "switch", 100.0, chips=4), NetworkLevel("across", "switch", 10.0)]
    plain = [row(op, "inside", "ring", hop_us=2.0) for op in ("all_gather", "reduce_scatter")]
    rules = [
        CollectiveRule("reduce_scatter", ("slow",)),
        CollectiveRule("all_gather", ("kernel",)),
        CollectiveRule("all_reduce", ("slow",)),
    ]
    net = network(levels, [*rows, *plain], software=engine(*rules))
    wires = 2 * 3 / 4 * 1e6 / (100 * GB) + 2 * 1 / 2 * 1e6 / 4 / (10 * GB)
    assert float(net.seconds("all_reduce", 8, 1e6)) == exactly((3 * 50 + 3 * 2 + 2 * 5) * US + wires)


def test_hierarchical_over_three_levels_prices_level_by_level() -> None:
    levels = [
        NetworkLevel("node", "switch", 100.0, chips=4),
        NetworkLevel("rack", "switch", 20.0, chips=16),
        NetworkLevel("hall", "switch", 5.0),
    ]
    rows = [row(op, level.name, "ring", hop_us=1.0) for op in OPS[1:3] for level in levels[:2]]
    net = network(levels, [*rows, row("all_reduce", "hall", "hierarchical", hop_us=9.0)])
    size = 1e6
    in_rack = 15 * 1 * US + 15 / 16 * size / (20 * GB)  # a flat ring over the rack's four nodes
    across = 2 * 9 * US + size / 16 / (5 * GB)
    assert float(net.seconds("all_reduce", 32, size)) == exactly(2 * in_rack + across)


@pytest.mark.parametrize("ranks", [9, 12, 20])
def test_a_group_that_leaves_a_domain_part_full_cannot_run_hierarchically(ranks: int) -> None:
    # contiguous over domains of 8: 8 + 1, 8 + 4, 8 + 8 + 4
    hierarchical = row("all_reduce", "across", "hierarchical", hop_us=5.0)
    ring = row("all_reduce", "across", "ring", hop_us=5.0)
    assert np.isinf(two_levels(8, hierarchical).seconds("all_reduce", ranks, 1e6))
    both = two_levels(8, hierarchical, ring).seconds("all_reduce", ranks, 1e6)
    assert float(both) == float(two_levels(8, ring).seconds("all_reduce", ranks, 1e6))


@pytest.mark.parametrize(("nics", "rate"), [(1, 10), (4, 40), (8, 80), (16, 100)])
def test_rings_run_over_all_cards_of_a_node_up_to_the_port_of_a_chip(nics: int, rate: float) -> None:
    ring = row("all_reduce", "across", "ring", hop_us=0.0)
    net = two_levels(8, ring, nics=nics)
    assert float(net.seconds("all_reduce", 16, 1e6)) == exactly(2 * 15 / 16 * 1e6 / (rate * GB))
    assert float(net.seconds("all_reduce", 8, 1e6)) == float(two_levels(8, ring).seconds("all_reduce", 8, 1e6))


@pytest.mark.parametrize(("ranks", "fewest"), [(9, 1), (12, 4), (15, 7), (16, 8), (20, 4), (24, 8)])
@pytest.mark.parametrize("nics", [2, 4, 8])
def test_the_node_with_the_fewest_members_paces_a_ring(ranks: int, fewest: int, nics: int) -> None:
    rows = [row(op, "across", "ring", hop_us=0.0) for op in ("all_reduce", "all_gather", "reduce_scatter")]
    net = two_levels(8, *rows, row("all_reduce", "across", "tree", hop_us=0.0), nics=nics)
    cards = fewest * nics / 8 * 10 * GB
    for op, rounds in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)):
        assert float(net.seconds(op, ranks, 1e9)) == exactly(rounds * (ranks - 1) / ranks * 1e9 / cards)


def test_a_ring_is_no_faster_than_the_same_kernel_inside_a_node() -> None:
    levels = [NetworkLevel("in", "switch", 100.0, chips=8), NetworkLevel("out", "switch", 50.0, nics_per_node=8)]
    rows = [
        row("all_gather", "in", "ring", hop_us=0.0, bandwidth_fraction=0.3),
        row("all_gather", "out", "ring", hop_us=0.0, bandwidth_fraction=0.9),
    ]
    net = network(levels, rows)
    for ranks in (8, 16, 24):
        assert float(net.seconds("all_gather", ranks, 1e9)) == exactly((ranks - 1) / ranks * 1e9 / (30 * GB))


@pytest.mark.parametrize(("ranks", "fewest"), [(12, 4), (16, 8), (20, 4), (32, 8)])
@pytest.mark.parametrize("nics", [2, 8])
def test_in_an_all_to_all_only_what_leaves_a_node_takes_the_ranks_own_card(ranks: int, fewest: int, nics: int) -> None:
    net = two_levels(8, row("all_to_all", "across", "direct", hop_us=0.0), nics=nics)
    blocks = {source: {target: np.full(3, 1.0) for target in range(ranks)} for source in range(ranks)}
    fabric = Fabric(ELEMENT)
    all_to_all(fabric, blocks)
    leaving: Counter[int] = Counter()
    for message in fabric.messages:
        leaving[message.source] += (message.source // 8 != message.target // 8) * message.elements * ELEMENT
    assert max(leaving.values()) == (ranks - fewest) * 3 * ELEMENT
    seconds = max(leaving.values()) / (nics / 8 * 10 * GB)
    assert float(net.seconds("all_to_all", ranks, ranks * 3 * ELEMENT)) == exactly(seconds)


def test_a_pipelined_hierarchy_takes_its_slower_part() -> None:
    def net(nics: int, **constants: Any) -> Network:
        return two_levels(8, row("all_reduce", "across", "hierarchical", hop_us=0.0, **constants), nics=nics)

    inside, across = 2 * (7 * 2 * US + 7 / 8 * 1e8 / (100 * GB)), 1e8 / 8 / (10 * GB)
    assert float(net(8).seconds("all_reduce", 16, 1e8)) == exactly(inside + across)
    assert float(net(8, pipelined=True).seconds("all_reduce", 16, 1e8)) == exactly(inside)
    assert float(net(1, pipelined=True).seconds("all_reduce", 16, 1e8)) == exactly(8 * across)


def test_a_send_takes_the_outermost_level_that_it_crosses() -> None:
    levels = [
        NetworkLevel("node", "switch", 100.0, chips=4),
        NetworkLevel("rack", "switch", 20.0, chips=16),
        NetworkLevel("hall", "switch", 5.0),
    ]
    net = network(levels, [row("send", level.name, "direct", hop_us=1.0) for level in levels])
    for crossing, rate in enumerate((100, 20, 5, 5)):
        assert float(net.send(1e6, crossing)[0]) == exactly(1 * US + 1e6 / (rate * GB))
    place = net.placement
    np.testing.assert_array_equal([int(place.crossings(4, 8, 1, level)) for level in (0, 1)], [7, 1])
    np.testing.assert_array_equal([int(place.crossings(3, 8, 1, level)) for level in (0, 1)], [7, 1])
    np.testing.assert_array_equal([int(place.crossings(8, 8, 1, level)) for level in (0, 1)], [7, 3])


def test_a_collective_without_a_kernel_is_refused_in_a_sentence() -> None:
    net = two_levels(8, row("all_reduce", "across", "hierarchical", hop_us=5.0))
    assert net.refusal("all_reduce", 1) is net.refusal("all_reduce", 8) is net.refusal("all_reduce", 16) is None
    assert "12 ranks leave a domain part full" in str(net.refusal("all_reduce", 12))
    assert "names no kernel for all_to_all" in str(net.refusal("all_to_all", 16))
    assert "names no kernel" in str(custom(ONE).refusal("all_reduce", 8))  # its only rule ends at 64 KiB
    assert "do not tile" in str(torus("4x4x4").refusal("all_reduce", 12))


# nccl-tests, 8 x H100 a node with 400 GB/s of EFA: GB/s of bus bandwidth by nodes and MiB
# (github:crazyguitar/aws-gpu-communication-benchmark@fd167f9 data/*.csv)
MEASURED_ACROSS: dict[str, dict[int, dict[int, float]]] = {
    "all_reduce": {
        2: {32: 147.32, 128: 305.13, 512: 395.99, 2048: 445.05, 8192: 477.71},
        4: {32: 95.38, 128: 229.48, 512: 278.41, 2048: 347.57, 8192: 356.99},
        8: {32: 86.74, 128: 156.33, 512: 272.62, 2048: 278.15, 8192: 355.36},
    },
    "all_gather": {
        2: {32: 131.3, 128: 234.54, 512: 275.52, 2048: 328.58},
        4: {32: 83.56, 128: 211.73, 512: 220.57, 2048: 330.92},
        8: {32: 46.29, 128: 143.66, 512: 261.26, 2048: 293.71},
    },
    "all_to_all": {
        2: {32: 44.79, 128: 68.79, 512: 75.82, 2048: 79.25},
        4: {32: 34.45, 128: 52.56, 512: 53.84, 2048: 54.07},
        8: {32: 28.67, 128: 36.2, 512: 46.57, 2048: 49.63},
    },
}


@pytest.mark.parametrize(("op", "error"), [("all_reduce", 0.10), ("all_gather", 0.16), ("all_to_all", 0.08)])
def test_h100_across_nodes_is_near_what_was_measured(op: str, error: float) -> None:
    hardware, software = load_machine("h100", "vllm")
    net = Network(Placement.of(hardware, 64), software)
    errors = []
    for nodes, measured in MEASURED_ACROSS[op].items():
        for mib, bus in measured.items():
            size = mib * KIB * KIB
            seconds = float(sent_bytes("ring", op, 8 * nodes, size)) / (bus * GB)
            errors.append(abs(float(net.seconds(op, 8 * nodes, size)) / seconds - 1))
    assert np.mean(errors) < error
    assert max(errors) < 0.5


@pytest.mark.parametrize("chip", ["h100", "h200", "a100", "b200", "mi300x"])
def test_a_group_that_leaves_a_node_part_full_costs_at_most_what_its_share_of_cards_explains(chip: str) -> None:
    hardware, software = load_machine(chip, "vllm")
    net = Network(Placement.of(hardware, 64), software)
    part, whole = (float(net.seconds("all_reduce", ranks, 16 * KIB * KIB)) for ranks in (12, 16))
    assert part < 2.5 * whole


@pytest.mark.parametrize("chip", ["h100", "h200", "a100", "b200"])
@pytest.mark.parametrize("other", ["vllm", "sglang", "trtllm"])
def test_the_ideal_engine_is_no_slower_than_any_other(chip: str, other: str) -> None:
    bound, real = (
        Network(Placement.of(hardware, 64), software)
        for hardware, software in (load_machine(chip, "ideal"), load_machine(chip, other))
    )
    sizes = np.logspace(0, 10, 81)
    for op in OPS:
        for ranks in (2, 3, 4, 5, 6, 7, 8, 12, 16, 32):
            assert (bound.seconds(op, ranks, sizes) <= real.seconds(op, ranks, sizes) * (1 + 1e-12)).all(), (op, ranks)


@pytest.mark.parametrize("chip", ["h100", "h200", "a100", "b200"])
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_the_ideal_engine_answers_no_slower_than_any_other(chip: str, kv_cache: str) -> None:
    tpot = {}
    for name in ("ideal", "vllm", "sglang", "trtllm"):
        answer = planner.estimate("llama3-70b", hardware=chip, engine=name, plan="TP8", kv_cache=kv_cache)
        tpot[name] = answer["tpot_ms"]
    assert tpot["ideal"] == min(tpot.values())


# ---------------------------------------------------------------------------------------------------- measured rows


MEASURED = {2: RankRow(10.0, 0.5, 1.0), 4: RankRow(20.0, 0.7, 1.0), 8: RankRow(40.0, 0.9, 1.0)}


@pytest.mark.parametrize(
    ("ranks", "latency_us", "fraction"),
    [(2, 10, 0.5), (3, 15, 0.6), (4, 20, 0.7), (6, 30, 0.8), (8, 40, 0.9), (10, 50, 0.9), (16, 80, 0.9)],
)
def test_measured_rows_interpolate_and_go_on_at_their_last_slope(
    ranks: int, latency_us: float, fraction: float
) -> None:
    net = one_level("ring", ranks=MEASURED)
    expected = latency_us * US + 2 * (ranks - 1) / ranks * 1e6 / (fraction * 100 * GB)
    assert float(net.seconds("all_reduce", ranks, 1e6)) == exactly(expected)


def test_below_the_smallest_measured_group_its_constants_count() -> None:
    net = one_level("ring", ranks={4: MEASURED[4], 8: MEASURED[8]})
    assert float(net.seconds("all_reduce", 2, 1e6)) == exactly(20 * US + 1e6 / (0.7 * 100 * GB))


def test_a_latency_that_falls_with_the_group_does_not_go_on_falling() -> None:
    net = one_level("ring", ranks={4: RankRow(20.0, 1.0), 8: RankRow(10.0, 1.0)})
    sent = 2 * 63 / 64 * 1e6 / (100 * GB)
    assert float(net.seconds("all_reduce", 64, 1e6)) == exactly(10 * US + sent)


def test_a_single_measured_group_serves_all() -> None:
    net = one_level("ring", ranks={8: RankRow(40.0, 1.0)})
    for ranks in (2, 8, 32):
        sent = 2 * (ranks - 1) / ranks * 1e6 / (100 * GB)
        assert float(net.seconds("all_reduce", ranks, 1e6)) == exactly(40 * US + sent)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, np.inf])
def test_latency_and_wire_add_by_their_norm(p: float) -> None:
    net = one_level("ring", ranks={4: RankRow(20.0, 1.0, p), 8: RankRow(20.0, 1.0, p)})
    sent = 2 * 5 / 6 * 1e6 / (100 * GB)
    expected = max(20 * US, sent) if np.isinf(p) else ((20 * US) ** p + sent**p) ** (1 / p)
    assert float(net.seconds("all_reduce", 6, 1e6)) == exactly(expected)


# ----------------------------------------------------------------------------------------------------- engine's rules


def custom(*rules: CollectiveRule) -> Network:
    """Two custom kernels and a ring with latencies that tell them apart; bandwidth as good as free."""
    levels = [NetworkLevel("inside", "switch", 1e5, chips=8), NetworkLevel("across", "switch", 1e5)]
    rows = [
        row("all_reduce", "inside", "one_shot", kernel="one", ranks={8: RankRow(1.0, 1.0)}),
        row("all_reduce", "inside", "two_shot", kernel="two", ranks={8: RankRow(20.0, 1.0)}),
        row("all_reduce", "inside", "ring", kernel="ring", ranks={8: RankRow(300.0, 1.0)}),
        row("all_reduce", "across", "ring", kernel="ring", ranks={8: RankRow(4000.0, 1.0)}),
    ]
    return network(levels, rows, software=engine(*rules))


def latency_us(net: Network, ranks: int, size: float) -> int:
    """Which kernel ran, told by its latency."""
    return round(float(net.seconds("all_reduce", ranks, size)) / US)


ONE = CollectiveRule("all_reduce", ("one",), span="inside", ranks=(2, 8), max_kib=64)
TWO = CollectiveRule("all_reduce", ("two",), span="inside", ranks=(4, 8))
RING = CollectiveRule("all_reduce", ("ring",))


def test_a_custom_kernel_runs_up_to_its_size_and_the_next_rule_above_it() -> None:
    net = custom(ONE, TWO, RING)
    size = np.array([1.0, 64 * KIB, 64 * KIB + 1, 200 * KIB, 1.0])
    once = [1 * US + 7 * s / (1e5 * GB) for s in size]
    twice = [20 * US + 2 * 7 / 8 * s / (1e5 * GB) for s in size]
    expected = [once[0], once[1], twice[2], twice[3], once[4]]
    np.testing.assert_allclose(net.seconds("all_reduce", 8, size), expected, rtol=1e-12)


def test_rules_look_at_group_size_and_span() -> None:
    net = custom(ONE, TWO, RING)
    assert latency_us(net, 2, KIB) == 1
    assert latency_us(net, 4, KIB) == 20
    assert latency_us(net, 6, KIB) == 300
    assert latency_us(net, 2, 100 * KIB) == 300
    assert latency_us(net, 16, KIB) == 4000


def test_the_first_rule_counts_even_where_a_later_one_is_cheaper() -> None:
    assert latency_us(custom(RING, ONE, TWO), 8, KIB) == 300


def test_of_several_kernels_in_a_rule_the_cheapest_counts_for_each_size() -> None:
    net = custom(CollectiveRule("all_reduce", ("one", "two", "ring")))
    size = np.array([1e3, 1e12])
    once, twice = 1 * US + 7 * size / (1e5 * GB), 20 * US + 2 * 7 / 8 * size / (1e5 * GB)
    np.testing.assert_allclose(net.seconds("all_reduce", 8, size), [once[0], twice[1]], rtol=1e-12)


def test_a_rule_whose_kernel_the_hardware_lacks_is_passed_over() -> None:
    net = custom(
        CollectiveRule("all_reduce", ("elsewhere",)), CollectiveRule("all_reduce", ("one",), span="across"), RING
    )
    assert latency_us(net, 8, KIB) == 300
    assert latency_us(net, 16, KIB) == 4000  # `one` is named for this span but has no row on this level


def test_no_kernel_for_the_hardware_is_a_sentence_with_both_names() -> None:
    for net in (custom(CollectiveRule("all_reduce", ("elsewhere",))), custom(ONE._replace(ranks=()))):
        with pytest.raises(
            InputError, match=r"engine made-up names no kernel for all_reduce .*made-up has on level in"
        ):
            net.seconds("all_reduce", 8, 65 * KIB)
    with pytest.raises(InputError, match="all_to_all"):
        custom(ONE, TWO, RING).seconds("all_to_all", 8, KIB)


def test_shipped_vllm_switches_kernels_where_its_source_does() -> None:
    hardware, software = load_machine("h100", "vllm")
    net = Network(Placement.of(hardware, 8), software)

    def only(kernel: str) -> Network:
        return net._replace(engine=software._replace(collectives=(CollectiveRule("all_reduce", (kernel,)),)))

    for ranks, kib, kernel in (
        (2, 4096, "custom_one_shot"),
        (4, 511, "custom_one_shot"),
        (4, 512, "custom_two_shot"),
        (8, 255, "custom_one_shot"),
        (8, 256, "custom_two_shot"),
    ):
        assert net.seconds("all_reduce", ranks, kib * KIB) == only(kernel).seconds("all_reduce", ranks, kib * KIB)


# ---------------------------------------------------------------------------------------------------- whole networks


SHIPPED = [
    ("h100", "vllm"),
    ("h200", "trtllm"),
    ("l40s", "vllm"),
    ("mi300x", "vllm"),
    ("h100", "ideal"),
    ("tpu-v4", "ideal"),
]


def shipped(name: str, software: str, faster: float = 1.0) -> Network:
    hardware, running = load_machine(name, software)
    levels = tuple(level._replace(bandwidth_gb_per_s=level.bandwidth_gb_per_s * faster) for level in hardware.network)
    return Network(Placement.of(hardware._replace(network=levels), 64), running)


@pytest.mark.parametrize(("name", "software"), SHIPPED)
@pytest.mark.parametrize("op", OPS)
def test_more_bandwidth_never_slows_a_collective(name: str, software: str, op: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(ranks=st.sampled_from([2, 4, 8, 16, 32]), size=st.floats(1, 1e10), faster=st.floats(1.0, 20.0))
    def check(ranks: int, size: float, faster: float) -> None:
        slow = float(shipped(name, software).seconds(op, ranks, size))
        fast = float(shipped(name, software, faster).seconds(op, ranks, size))
        assert 0 < fast <= slow * (1 + 1e-12)

    check()


@pytest.mark.parametrize(
    ("algorithm", "op"),
    [(name, "all_reduce") for name in ("ring", "one_shot", "two_shot", "tree", "in_switch", "hierarchical")]
    + [("ring", "all_gather"), ("ring", "reduce_scatter"), ("direct", "all_to_all")],
)
def test_a_larger_buffer_is_never_faster(algorithm: str, op: str) -> None:
    @few
    @given(
        ranks=st.sampled_from([2, 4, 8, 16, 32]),
        sizes=st.tuples(st.floats(1, 1e10), st.floats(1, 1e10)),
        p=st.sampled_from([0.5, 1.0, 2.5, np.inf]),
    )
    def check(ranks: int, sizes: tuple[float, float], p: float) -> None:
        inside = [row(op, "inside", "ring" if algorithm == "hierarchical" else algorithm, hop_us=2.0, p=p)]
        net = two_levels(8, *inside, row(op, "across", algorithm, hop_us=5.0, p=p))
        small, large = net.seconds(op, ranks, np.array(sorted(sizes)))
        assert small <= large * (1 + 1e-12)

    check()


@pytest.mark.parametrize(("name", "software"), SHIPPED)
@pytest.mark.parametrize("op", OPS)
def test_arrays_are_priced_as_their_elements_are(name: str, software: str, op: str) -> None:
    net = shipped(name, software)
    generator = np.random.default_rng(1)
    ranks = generator.choice([1, 2, 4, 8, 16, 32], 60)
    size = np.where(generator.random(60) < 0.1, 0.0, 10.0 ** generator.uniform(0, 9, 60))
    together = net.seconds(op, ranks, size)
    alone = [float(net.seconds(op, int(k), float(d))) for k, d in zip(ranks, size, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12, atol=0)
    assert together.shape == (60,)
    np.testing.assert_array_equal(net.seconds(op, ranks.reshape(6, 10), size.reshape(6, 10)).ravel(), together)


def test_one_rank_or_an_empty_buffer_costs_nothing() -> None:
    net = one_level("ring")
    assert net.seconds("all_reduce", 1, 1e9) == 0
    assert net.seconds("all_reduce", 8, 0.0) == 0
    np.testing.assert_array_equal(net.seconds("all_reduce", np.array([1, 4, 8]), 0.0), [0, 0, 0])


def test_a_transfer_costs_its_collective_as_often_as_it_runs() -> None:
    net = two_levels(4)
    groups = Groups.of(np.array([1, 2, 4, 8, 2]))
    transfer = Transfer("all-reduce", "all_reduce", np.array([1e3, 1e4, 1e5, 1e6, 1e7]), times=2)
    once = [float(net.seconds("all_reduce", k, d)) for k, d in zip((1, 2, 4, 8, 2), transfer.bytes, strict=True)]
    np.testing.assert_allclose(net.price(transfer, groups), 2 * np.array(once), rtol=1e-12)


# --------------------------------------------------------------------------------------------------------------- torus


def torus(
    *slices: str,
    wrap_multiple: int = 4,
    hop_us: float = 0.0,
    gpus: int | None = None,
    algorithm: str = "torus",
    base_us: float = 0.0,
) -> Network:
    """A torus of 45 GB/s a wire and direction, on the largest of the slices."""
    level = NetworkLevel("ici", "torus", 45.0, slices=slices, wrap_multiple=wrap_multiple)
    rows = [row(op, "ici", algorithm, hop_us=hop_us, base_us=base_us) for op in OPS]
    hardware = machine([level], rows)
    most = max(shape.chips for shape in level.legal_slices())
    return Network(Placement.of(hardware, gpus or most), engine())


LINK = 45 * GB


def wires(fabric: Fabric) -> Counter[Any]:
    """Elements over every wire, by (chip, axis and direction)."""
    loads: Counter[Any] = Counter()
    for message in fabric.messages:
        loads[message.source, message.tag[0]] += message.elements
    return loads


@pytest.mark.parametrize(
    ("shape", "wraps"),
    [
        ("8", True),
        ("4", False),
        ("5", False),
        ("4x4", True),
        ("8x8", True),
        ("3x3", False),
        ("4x4x4", True),
        ("2x2x2", False),
    ],
)
def test_torus_all_gather_is_bound_by_the_wires_of_the_simulation(shape: str, wraps: bool) -> None:
    axes = tuple(int(axis) for axis in shape.split("x"))
    box = Torus(axes, (wraps,) * len(axes))
    chips = len(box.places)
    fabric, parts = Fabric(ELEMENT), buffers(chips, 2 * len(axes))
    holds_everywhere(torus_all_gather(fabric, box, parts), joined(parts))
    busiest = max(wires(fabric).values()) * ELEMENT
    size = joined(parts).size * ELEMENT
    net = torus(shape, wrap_multiple=4 if wraps else 0)
    assert float(net.seconds("all_gather", chips, size)) == exactly(busiest / LINK)
    assert float(net.seconds("reduce_scatter", chips, size)) == exactly(busiest / LINK)
    assert float(net.seconds("all_reduce", chips, size)) == exactly(2 * busiest / LINK)
    assert fabric.steps == [net.placement.torus_groups[chips].hops]
    pure_latency = torus(shape, wrap_multiple=4 if wraps else 0, hop_us=1.0).seconds("all_gather", chips, 1e-9)
    assert float(pure_latency) == pytest.approx(fabric.steps[0] * US, rel=1e-9, abs=0)


@pytest.mark.parametrize("chips", [4, 8, 16])
def test_torus_all_to_all_on_a_ring_is_a_quarter_of_an_all_gather(chips: int) -> None:
    net, held = torus(str(chips)), 1e6
    gather = float(net.seconds("all_gather", chips, chips * held)) * chips / (chips - 1)  # the book leaves out (K-1)/K
    assert float(net.seconds("all_to_all", chips, held)) == exactly(gather / 4)


@pytest.mark.parametrize(("shape", "wraps"), [("4", True), ("8", True), ("16", True)])
def test_torus_all_to_all_on_a_ring_takes_the_busiest_wire_of_the_simulation(shape: str, wraps: bool) -> None:
    check_all_to_all(shape, wraps)


@pytest.mark.parametrize(("shape", "wraps"), [("2", False), ("3", False), ("4", False), ("5", False), ("8", False)])
def test_torus_all_to_all_on_a_line_takes_the_busiest_wire_of_the_simulation(shape: str, wraps: bool) -> None:
    check_all_to_all(shape, wraps)


@pytest.mark.parametrize(
    ("shape", "wraps"),
    [("4x4", True), ("4x8", True), ("4x4x4", True), ("2x2x2", False), ("2x4", False), ("3x3", False)],
)
def test_torus_all_to_all_over_several_axes_takes_the_busiest_wire_of_the_simulation(shape: str, wraps: bool) -> None:
    # Every byte crosses each axis; the wires of one axis do not help another: V max(axes) / (4 N W) in the book.
    check_all_to_all(shape, wraps)


def check_all_to_all(shape: str, wraps: bool) -> None:
    axes = tuple(int(axis) for axis in shape.split("x"))
    box = Torus(axes, (wraps,) * len(axes))
    chips = len(box.places)
    busiest = max(torus_all_to_all_loads(box, 1000.0).values()) * ELEMENT
    priced = torus(shape, wrap_multiple=4 if wraps else 0).seconds("all_to_all", chips, 1000.0 * ELEMENT * chips)
    assert float(priced) == exactly(busiest / LINK)


def test_a_line_gathers_half_as_fast_as_a_ring() -> None:
    ring, line = torus("8"), torus("8", wrap_multiple=0)
    assert float(line.seconds("all_gather", 8, 1e6)) == exactly(2 * float(ring.seconds("all_gather", 8, 1e6)))


def test_torus_latency_is_the_way_to_the_farthest_chip() -> None:
    net = torus("4x4x4", hop_us=1.0)
    assert float(net.seconds("all_gather", 64, 1e-6)) == pytest.approx(6 * US, rel=1e-6, abs=0)
    assert float(net.seconds("all_reduce", 64, 1e-6)) == pytest.approx(12 * US, rel=1e-6, abs=0)
    assert float(net.seconds("all_to_all", 64, 1e-6)) == pytest.approx(6 * US, rel=1e-6, abs=0)


# ----------------------------------------------------------------------------------------------- one axis after another

BOXES = [
    ("8", 4),
    ("4x4", 4),
    ("4x4x4", 4),
    ("2x4", 4),
    ("2x2x4", 4),
    ("2x4x8", 4),
    ("2x2x2", 0),
    ("3x5", 0),
    ("2x3x4", 4),
]


def box_of(shape: str, wrap_multiple: int) -> Torus:
    axes = tuple(int(axis) for axis in shape.split("x"))
    return Torus(axes, tuple(wrap_multiple > 0 and axis % wrap_multiple == 0 for axis in axes))


@pytest.mark.parametrize(("shape", "wrap_multiple"), BOXES)
def test_axis_after_axis_takes_the_busiest_wire_of_every_phase(shape: str, wrap_multiple: int) -> None:
    """... in the order of axes in which that is least, which the order of the phases must be."""
    box, found = box_of(shape, wrap_multiple), []
    chips = len(box.places)
    parts = buffers(chips, 4)
    size = joined(parts).size * ELEMENT
    for order in permutations(range(len(box.axes))):
        fabric = Fabric(ELEMENT)
        holds_everywhere(torus_all_gather_by_axis(fabric, box, order, parts), joined(parts))
        phases: dict[int, Counter[Any]] = {call: Counter() for call in range(len(order))}
        for message in fabric.messages:
            phases[message.call][message.source, message.tag[0]] += message.elements
        found.append(sum(max(loads.values()) for loads in phases.values()) * ELEMENT / LINK)
        steps = fabric.steps
    net = torus(shape, wrap_multiple=wrap_multiple, algorithm="torus_by_axis")
    assert float(net.seconds("all_gather", chips, size)) == exactly(min(found))
    assert float(net.seconds("reduce_scatter", chips, size)) == exactly(min(found))
    assert float(net.seconds("all_reduce", chips, size)) == exactly(2 * min(found))
    slow = torus(shape, wrap_multiple=wrap_multiple, algorithm="torus_by_axis", hop_us=1.0, base_us=5.0)
    starts = 5.0 * len(box.axes) + sum(steps)
    assert float(slow.seconds("all_gather", chips, 1e-9)) == pytest.approx(starts * US, rel=1e-6, abs=0)
    assert float(slow.seconds("all_reduce", chips, 1e-9)) == pytest.approx(2 * starts * US, rel=1e-6, abs=0)
    at_once = torus(shape, wrap_multiple=wrap_multiple, hop_us=1.0, base_us=5.0)
    assert float(at_once.seconds("all_gather", chips, 1e-9)) == pytest.approx((5 + sum(steps)) * US, rel=1e-6, abs=0)


@pytest.mark.parametrize(("shape", "wrap_multiple"), BOXES)
def test_an_exchange_axis_after_axis_takes_the_busiest_wire_of_each(shape: str, wrap_multiple: int) -> None:
    box = box_of(shape, wrap_multiple)
    chips, loads = len(box.places), torus_all_to_all_loads(box, 1000.0)
    busiest = [max(load for (_, here, _), load in loads.items() if here == axis) for axis in range(len(box.axes))]
    net = torus(shape, wrap_multiple=wrap_multiple, algorithm="torus_by_axis")
    priced = net.seconds("all_to_all", chips, 1000.0 * ELEMENT * chips)
    assert float(priced) == exactly(sum(busiest) * ELEMENT / LINK)


@pytest.mark.parametrize("algorithm", ["torus", "torus_by_axis"])
@pytest.mark.parametrize("axes", ["x", "y", "z", "xy", "yz", "xz", "xyz"])
def test_a_collective_along_axes_of_a_grid_has_their_wires_only(algorithm: str, axes: str) -> None:
    net = torus("4x8x12", algorithm=algorithm)
    sizes = {"x": 4, "y": 8, "z": 12}
    whole = tuple(np.array([size]) for size in sizes.values())
    groups = Groups.along(net.placement, axes, whole)
    shape = "x".join(str(sizes[axis]) for axis in axes)
    alone = torus(shape, algorithm=algorithm)
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        chips = int(np.prod([sizes[axis] for axis in axes]))
        assert float(net.over(op, groups, 1e6)[0]) == exactly(float(alone.seconds(op, chips, 1e6)))
        assert float(net.least(op, groups, 1e6)[0]) <= float(net.over(op, groups, 1e6)[0]) * (1 + 1e-12)
    assert groups.ranks.tolist() == [chips]


def test_groups_along_axes_of_several_grids_are_those_of_each() -> None:
    net = torus("4x4x4", algorithm="torus_by_axis")
    grids = [(4, 4, 4), (1, 64, 1), (4, 16, 1), (4, 4, 4), (16, 4, 1)]
    for axes in ("x", "yz", "xyz"):
        together = net.over(
            "all_gather",
            Groups.along(net.placement, axes, [np.array(column) for column in zip(*grids, strict=True)]),
            1e6,
        )
        for index, grid in enumerate(grids):
            alone = Groups.along(net.placement, axes, [np.array([size]) for size in grid])
            assert together[index] == float(net.over("all_gather", alone, 1e6)[0])
    with pytest.raises(InputError, match=r"grid 2x32x1: 64 chips of .* cannot be read so"):
        Groups.along(net.placement, "x", [np.array([2]), np.array([32]), np.array([1])])
