"""KV on its way: bytes against a count of every layer, head and token, and what shows against a simulated wire."""

from __future__ import annotations

import math

import numpy as np
import pytest
from asking import request
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import load_machine, load_model
from planner.costs.collectives import Network
from planner.costs.rows import structure_of
from planner.phases.disaggregated.transfer import Cache, cache_of, visible_seconds, wire_seconds
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.units import GB, GIB


def cache(model: str, label: str, isl: int, hardware: str = "h100", engine: str | None = None) -> Cache:
    asked = request(model, 16, hardware, engine)
    plan = Plan.parse(label)
    return cache_of(setting_of(asked, Placement.of(asked.hardware, 16), structure_of(plan)), [plan], isl)


@pytest.mark.parametrize("label", ["TP1", "TP2", "TP8", "TP16", "TP4xPP2", "TP2xPP3", "PP5"])
def test_bytes_are_those_of_every_layer_head_and_token(label: str) -> None:
    """Moved one by one: which chips of the replica hold a key and a value of each layer and KV head."""
    model, plan, isl = load_model("llama3-70b"), Plan.parse(label), 1000
    tokens = math.ceil(isl / 16) * 16
    heads, ways = model.attention.kv_heads, plan.tp
    stages = np.array_split(np.arange(model.layers), plan.pp)
    held = np.zeros((plan.pp, plan.tp))
    for stage, layers in enumerate(stages):
        for rank in range(ways):
            own = {head for head in range(heads) if head * ways // heads == rank or head == rank * heads // ways}
            if ways <= heads:
                own = set(range(rank * heads // ways, (rank + 1) * heads // ways))
            held[stage, rank] = len(layers) * len(own) * 2 * model.attention.head_dim * 2 * tokens
    found = cache("llama3-70b", label, isl)
    assert found.chip[0] == held.max()
    assert found.total[0] == held.sum()
    assert found.layers[0] == max(map(len, stages))


def test_published_sizes() -> None:
    """OPT-66B's 512 tokens are 1.13 GiB, ten a second 90 Gb/s (DistServe 3.3); latent attention's token 70,272 B."""
    opt = cache("opt-66b", "TP4", 512, "a100", "distserve")
    assert opt.total[0] / GIB == pytest.approx(1.125)
    assert opt.total[0] / GIB * 8 * 10 == pytest.approx(90)
    latent = cache("deepseek-v3", "TP1", 1024)
    assert latent.total[0] == 70_272 * 1024
    assert cache("deepseek-v3", "TP8", 1024).total[0] == 8 * latent.total[0]  # whole on every rank


@settings(max_examples=30)
@given(
    layers=st.integers(1, 80),
    compute=st.floats(1e-3, 2.0),
    whole=st.floats(1e-4, 4.0),
)
def test_what_shows_is_what_a_wire_has_left(layers: int, compute: float, whole: float) -> None:
    """A wire that takes one layer's KV after the other, each as soon as it is computed."""
    piece, free = whole / layers, 0.0
    for layer in range(layers):
        free = max(free, (layer + 1) * compute / layers) + piece
    found = float(visible_seconds(np.array(whole), np.array(piece), np.array(compute), np.array(layers)))
    assert found == pytest.approx(free - compute, rel=1e-9, abs=1e-12)
    assert piece - 1e-12 <= found <= whole + 1e-12
    at_once = float(visible_seconds(np.array(whole), np.array(whole), np.array(compute), np.array(1)))
    assert found <= at_once == whole


@settings(max_examples=30)
@given(scale=st.floats(1.0, 100.0), size=st.floats(1e5, 1e10))
def test_faster_wires_never_take_longer(scale: float, size: float) -> None:
    hardware, engine = load_machine("h100")
    levels = tuple(level._replace(bandwidth_gb_per_s=level.bandwidth_gb_per_s * scale) for level in hardware.network)
    share, total = np.array([size / 8]), np.array([size])
    for level in (0, 1):
        slow, fast = (
            wire_seconds(Network(Placement.of(machine, 16), engine), share, total, level)
            for machine in (hardware, hardware._replace(network=levels))
        )
        assert fast <= slow * (1 + 1e-12)
        least = size / 8 / (hardware.network[level].bandwidth_gb_per_s * GB)
        assert slow >= least * (1 - 1e-12)


def test_a_slice_sends_over_its_face() -> None:
    """Sixteen chips of a 4x4x4 slice have a wire to the neighbouring one, whatever the plan."""
    hardware, engine = load_machine("tpu-v4")
    network = Network(Placement.of(hardware, 64), engine)
    spread = wire_seconds(network, np.array([1e9 / 64]), np.array([1e9]), 0)
    assert spread == pytest.approx(1e9 / 16 / 45e9, rel=0.3)
    assert wire_seconds(network, np.array([1e9 / 4]), np.array([1e9]), 0) > spread
