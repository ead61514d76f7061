"""A domain of 72 chips against nodes of eight: what stays inside, what crosses, and which term the difference is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import Filters, Hardware, Workload, load_machine, load_model
from planner.plans.placement import Placement
from planner.ranking import rank
from planner.request import Request
from planner.results import Results

WIDE = (16, 18, 24, 32, 36, 64, 72)
LLAMA, DEEPSEEK = load_model("llama3.1-405b"), load_model("deepseek-v3")
PLAIN: dict[str, Any] = {"pp": (1,), "cp": (1,), "attention": ("heads",), "ffn": ("1d",), "prefill_ffn": ("1d",)}


def ranked(hardware: Hardware, engine: Any, tp: tuple[int, ...] = (8, 16, 32, 64), **options: Any) -> Results:
    """Plans on 72 chips for a token's time."""
    filters = Filters(**{**PLAIN, "tp": tp, **options.pop("filters", {})})
    request = Request(LLAMA, hardware, engine, 72, objective="tpot", filters=filters)
    return rank(request._replace(**options)).results


def tpot(results: Results) -> dict[str, float]:
    return dict(zip(results["plan"], results["tpot_ms"].astype(float), strict=True))


def term(results: Results, label: str, bound: str) -> float:
    """ms of TPOT that a plan waits for a resource."""
    return float(results.tpot_parts[bound][list(results["plan"]).index(label)]) * 1e3


def with_outer(hardware: Hardware, factor: float) -> Hardware:
    """The machine with other wires between its domains."""
    inner, outer = hardware.network
    faster = outer._replace(bandwidth_gb_per_s=(outer.bandwidth_gb_per_s or 0.0) * factor)
    return hardware._replace(network=(inner, faster))


def without_outer(hardware: Hardware) -> Hardware:
    """The machine with no wires beyond its first level, nor any kernel for them."""
    inner = hardware.network[0]
    kernels = tuple(row for row in hardware.collectives if row.level == inner.name)
    return hardware._replace(network=(inner,), collectives=kernels)


def test_groups_of_sixteen_to_seventy_two_stay_on_one_level_of_a_rack_and_span_two_of_nodes() -> None:
    (rack, _), (nodes, _) = load_machine("gb200-nvl72"), load_machine("b200-sxm")
    for hardware, level in ((rack, 0), (nodes, 1)):
        place = Placement.of(hardware, 72)
        assert place.span(np.array(WIDE)).tolist() == [level] * len(WIDE)
        assert place.span(np.array([8])).tolist() == [0]
    assert Placement.of(rack, 144).span(np.array([72, 144])).tolist() == [0, 1]


@pytest.mark.parametrize("engine", ["ideal", "trtllm"])
def test_nothing_of_a_wide_group_on_a_rack_takes_the_outer_wires(engine: str) -> None:
    """Taken away, wires and kernels between racks change no digit; on nodes of eight the wide groups need them."""
    rack, software = load_machine("gb200-nvl72", engine)
    assert tpot(ranked(without_outer(rack), software)) == tpot(ranked(rack, software))
    nodes, software = load_machine("b200-sxm", engine)
    given, halved = (tpot(ranked(with_outer(nodes, factor), software)) for factor in (1, 0.5))
    assert halved["TP8xDP9"] == given["TP8xDP9"]
    assert all(halved[label] > given[label] for label in ("TP16xDP4", "TP32xDP2", "TP64"))


def test_the_order_differs_and_the_network_is_why() -> None:
    """TensorRT-LLM, whose kernels over the switch were measured to 16 ranks: TP16 on a rack, TP32 over nodes."""
    rack, nodes = (ranked(*load_machine(name, "trtllm")) for name in ("gb200-nvl72", "b200-sxm"))
    assert (rack["plan"][0], nodes["plan"][0]) == ("TP16xDP4", "TP32xDP2")
    there, here = tpot(rack), tpot(nodes)
    assert there["TP8xDP9"] == pytest.approx(here["TP8xDP9"], rel=0.05)  # nearly the same chip, one node of it
    gap = here["TP16xDP4"] - there["TP16xDP4"]
    assert gap > 4
    by_network = term(nodes, "TP16xDP4", "network") - term(rack, "TP16xDP4", "network")
    assert by_network == pytest.approx(gap, rel=0.1)
    for label in ("TP16xDP4", "TP8xDP9"):
        assert term(nodes, label, "memory") == pytest.approx(term(rack, label, "memory"), rel=0.05)
    # what is gained over TP8 is memory read, on both
    assert term(rack, "TP8xDP9", "memory") > 1.8 * term(rack, "TP16xDP4", "memory")


def test_ranks_gain_until_their_all_reduce_costs_what_they_save() -> None:
    """The cheapest kernels without end: every doubling inside a rack is faster, beyond a node of eight none by half."""
    rack, nodes = (tpot(ranked(*load_machine(name, "ideal"))) for name in ("gb200-nvl72", "b200-sxm"))
    order = ("TP8xDP9", "TP16xDP4", "TP32xDP2", "TP64")
    assert [rack[label] for label in order] == sorted(rack.values(), reverse=True)
    assert rack["TP8xDP9"] > 2.2 * rack["TP64"]
    assert nodes["TP8xDP9"] < 1.4 * min(nodes.values())
    # the all-reduce of vLLM is NCCL's ring from sixteen ranks on: no gain on the same rack
    assert ranked(*load_machine("gb200-nvl72", "vllm"))["plan"][0] == "TP8xDP9"


def test_grids_exist_in_the_domain_only_and_pay_where_bytes_decide() -> None:
    hardware, ideal = load_machine("gb200-nvl72", "ideal")
    assert "4x16" in {mesh.text for mesh in Placement.of(hardware, 72).meshes(64)}
    nodes, _ = load_machine("b200-sxm", "ideal")
    assert [mesh.sizes for mesh in Placement.of(nodes, 72).meshes(64)] == [(1, 64, 1)]
    both: dict[str, Any] = {"filters": {"ffn": ("1d", "2d"), "prefill_ffn": ("1d", "2d")}, "tp": (64,)}
    alone = ranked(hardware, ideal, **both)
    many = ranked(hardware, ideal, workload=Workload(concurrency=512), **both)
    assert alone["plan"][0] == "TP64"
    assert many["plan"][0] == "TP64/2d:4x16"
    assert term(many, "TP64/2d:4x16", "network") < term(many, "TP64", "network")
    assert term(alone, "TP64/2d:4x16", "network") > term(alone, "TP64", "network")  # more collectives, each a latency
    assert {plan.partition("/")[2] for plan in ranked(nodes, ideal, **both)["plan"]} == {""}


def test_experts_spread_over_a_rack_and_stay_in_a_node() -> None:
    """Four experts a chip or 36: weights, room, and an exchange that stays inside or does not."""
    found = {}
    for name in ("gb200-nvl72", "b200-sxm"):
        hardware, engine = load_machine(name, "sglang-ep")
        for tp, attention in ((72, "batch72"), (8, "batch8")):
            filters = Filters(tp=(tp,), pp=(1,), ep=(tp,), attention=(attention,))
            request = Request(DEEPSEEK, hardware, engine, 72, Workload(concurrency=9216), filters=filters)
            found[name, tp] = rank(request).results
    network = {key: float(results.tpot_parts["network"][0]) for key, results in found.items()}
    assert network["gb200-nvl72", 72] < 1.3 * network["gb200-nvl72", 8]
    assert network["b200-sxm", 72] > 10 * network["b200-sxm", 8]
    rack = {tp: found["gb200-nvl72", tp].row(0) for tp in (72, 8)}
    nodes = {tp: found["b200-sxm", tp].row(0) for tp in (72, 8)}
    assert rack[72]["max_concurrency"] > 2 * rack[8]["max_concurrency"]
    assert rack[72]["weights_gib"] < 0.35 * rack[8]["weights_gib"]
    assert rack[72]["tpot_ms"] < 0.7 * rack[8]["tpot_ms"]
    assert nodes[8]["tpot_ms"] < 0.7 * nodes[72]["tpot_ms"]
