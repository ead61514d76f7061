"""Prices, memory and rules of splits: what must hold whatever the constants, and what the methods are known for."""

from __future__ import annotations

import math

import pytest
from helpers import every
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import setting, toy

from planner.costs.roofline import BOUNDS
from planner.diffusion.counting import pipeline_efficiency
from planner.diffusion.job import job_of
from planner.diffusion.memory import memory_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Setting, latency_of
from planner.diffusion.ranking import Limits, NoneLeftError, Request, rank, setting_of
from planner.diffusion.rules import Filters, refusal, splits
from planner.errors import InputError
from planner.specs.catalog import load_diffusion, load_hardware, load_sampler

FLUX = setting("flux.1-dev")
PIXART = setting("pixart-alpha-xl2-1024")
SPLITS = [split for split in splits(PIXART, 8, Filters()) if refusal(PIXART, split) is None]


def request(model: str, hardware: str = "h100", gpus: int = 8, engine: str = "xdit", **more: object) -> Request:
    sampler, shapes = load_sampler(engine), load_diffusion(model)
    job = job_of(shapes, **{"warmup": sampler.warmup, **more.pop("job", {})})  # type: ignore[arg-type, dict-item]
    return Request(shapes, load_hardware(hardware, sampler), sampler, gpus, job, **more)  # type: ignore[arg-type]


@every("split", SPLITS)
def test_parts_add_up_and_items_make_the_whole(split: Split) -> None:
    found = latency_of(PIXART, split)
    assert all(float(getattr(found.parts, bound)) >= 0 for bound in BOUNDS)
    assert sum(float(part.total) for part in found.items.values()) == pytest.approx(found.total, rel=1e-9)
    assert found.step * PIXART.job.steps <= found.total * 1.2 or split.is_stale
    assert 0 < found.efficiency <= 1
    assert found.hidden >= 0


@every("split", SPLITS)
def test_no_split_is_faster_than_its_chips_allow(split: Split) -> None:
    one, found = latency_of(PIXART, Split()), latency_of(PIXART, split)
    fixed = one.text + one.vae
    assert found.total - fixed >= 0.95 * (one.total - fixed) / split.replica_chips


def test_a_pipeline_takes_the_serial_step_and_the_formula() -> None:
    split = Split(pipefusion=4, patches=4)
    with_warmup, without = (latency_of(setting("flux.1-dev", steps=50, warmup=warmup), split) for warmup in (1, 0))
    assert with_warmup.efficiency == pytest.approx(pipeline_efficiency(4, 49, 4))
    assert without.efficiency == pytest.approx(pipeline_efficiency(4, 50, 4))
    one = latency_of(FLUX, Split())
    assert with_warmup.warmup == pytest.approx((one.total - one.text - one.vae) / 50, rel=0.02)
    assert without.warmup == 0
    assert float(without.parts.bubble) == pytest.approx(3 * without.step / 4)


@given(st.sampled_from([2, 4, 8]), st.integers(4, 100))
@settings(max_examples=25, deadline=None)
def test_more_steps_make_a_pipeline_more_worth(stages: int, steps: int) -> None:
    split = Split(pipefusion=stages, patches=stages)
    few, many = (latency_of(setting("flux.1-dev", steps=count), split) for count in (steps, 2 * steps))
    assert many.efficiency > few.efficiency
    assert many.total / (2 * steps) < few.total / steps


def test_a_ring_hides_where_wires_are_fast_and_shows_where_they_are_not() -> None:
    split = Split(ring=4)
    nvlink = latency_of(setting("pixart-alpha-xl2-1024", "a100"), split)
    pcie = latency_of(setting("pixart-alpha-xl2-1024", "l40"), split)
    assert "ring" not in nvlink.items
    assert pcie.items["ring"].network > 0
    large = latency_of(setting("pixart-alpha-xl2-1024", "l40", size=(4096, 4096)), split)
    assert "ring" not in large.items  # attention grows with the square of the tokens, what is sent does not


def test_nvlink_and_pcie_differ_as_measured() -> None:
    """Flux: Ulysses on NVLink; PipeFusion on PCIe, where all-to-alls over two sockets are the slowest (PipeFusion)."""
    for hardware, best in (("a100", "U8"), ("l40", "PF8")):
        found = {
            label: latency_of(setting("flux.1-dev", hardware, engine="xdit-eager", steps=28), Split.parse(label)).total
            for label in ("U8", "R8", "U4xR2", "PF8")
        }
        assert min(found, key=lambda label: found[label]) == best
    assert found["U8"] == max(found.values())


def test_streams_that_cross_a_boundary_share_it() -> None:
    network = setting("flux.1-dev", "l40", gpus=8).network
    assert network.neighbours(1e8, 4, 2) > network.neighbours(1e8, 1, 8) > network.neighbours(1e8, 1, 4)


@every(("weights", "bytes_"), [("bf16", 2), ("fp8", 1), ("int4", (4 + 20 / 128) / 8)])
def test_weights_are_stored_and_read_as_stored_and_computed_in_their_arithmetic(weights: str, bytes_: float) -> None:
    here = Setting(FLUX.model, FLUX.hardware, FLUX.sampler, FLUX.placement, FLUX.job, weights)
    ends = memory_of(FLUX, Split()).weights - 2 * 11_821_000_000
    assert memory_of(here, Split()).weights == pytest.approx(11_821_000_000 * bytes_ + ends, rel=0.01)
    plain, stored = latency_of(FLUX, Split()), latency_of(here, Split())
    if weights == "int4":  # 16-bit arithmetic: no faster where that bounds, never slower
        assert plain.total * 0.9 < stored.total <= plain.total
    if weights == "fp8":
        assert stored.total < 0.9 * plain.total


def test_memory_of_the_methods_is_the_tables() -> None:
    """arXiv 2405.14430, table 1: weights and KV of PipeFusion shrink with the chips, DistriFusion's KV does not."""
    here = setting(toy())
    one, whole = memory_of(here, Split()), 128 * 64 * 2 * 2
    for stages in (2, 4, 8):
        piped = memory_of(here, Split(pipefusion=stages, patches=stages))
        assert piped.weights == pytest.approx(one.weights / stages)
        assert piped.kv == pytest.approx(whole * 8 / stages)
        assert memory_of(here, Split(distrifusion=stages)).kv == pytest.approx(2 * whole * 8)
        assert memory_of(here, Split(ulysses=stages)).weights == one.weights
        assert memory_of(here, Split(tp=stages)).weights == pytest.approx(one.weights / stages)
    assert (
        memory_of(here, Split(ring=2, pipefusion=4, patches=4)).kv == memory_of(here, Split(pipefusion=4, patches=4)).kv
    )  # each rank keeps the whole fresh KV
    assert memory_of(here, Split(ulysses=2, pipefusion=4, patches=4)).kv == pytest.approx(whole * 8 / 4 / 2)


def test_flux_holds_a_third_of_sequence_parallelism_under_pipefusion() -> None:
    """The paper's 32 % and 36 % count parameters and activations of the backbone and encoders on 8 cards."""
    for size, share in (((1024, 1024), 0.32), ((2048, 2048), 0.36)):
        here = setting("flux.1-dev", "l40", engine="xdit", size=size)
        piped, cut = (memory_of(here, split) for split in (Split(pipefusion=8, patches=8), Split(ulysses=4, ring=2)))
        ratio = (piped.weights + piped.kv + piped.activations) / (cut.weights + cut.kv + cut.activations)
        assert ratio == pytest.approx(share, abs=0.2)


@every(
    ("model", "label", "says"),
    [
        ("flux.1-dev", "CFG2", "nothing to split"),
        ("flux.1-dev", "TP2", "xdit has no tensor parallelism for flux.1-dev"),
        ("hunyuanvideo", "PF2", "xdit has no PipeFusion"),
        ("cogvideox-2b", "U4", "does not divide 30 heads"),
        ("flux.1-dev", "PF4:3", "do not divide 64 rows"),
        ("flux.1-dev", "R7", "neither the 64 rows nor the 64 columns"),
        ("flux.1-dev", "PF60:64", "60 stages, but flux.1-dev has 57 blocks"),
        ("hunyuanvideo", "U6", "neither the 45 rows nor the 80 columns"),
    ],
)
def test_rules_refuse_with_a_sentence(model: str, label: str, says: str) -> None:
    broken = refusal(setting(model, gpus=64, engine="xdit"), Split.parse(label))
    assert broken is not None
    assert says in broken[1]


@every(("ulysses", "ring"), [(8, 1), (4, 2), (2, 4), (1, 8), (1, 5), (3, 1), (1, 3), (2, 1)])
def test_degrees_that_hunyuanvideos_readme_lists_are_legal(ulysses: int, ring: int) -> None:
    here = setting("hunyuanvideo", engine="xdit")
    assert refusal(here, Split(ulysses=ulysses, ring=ring)) is None


def test_all_steps_warm_up_leaves_no_stale_plan() -> None:
    here = setting("flux.1-schnell", steps=4, warmup=4)
    assert refusal(here, Split(pipefusion=2, patches=2)) == ("steps", "all 4 steps are warm-up (--warmup 4)")


def test_a_ranking_is_ordered_complete_and_within_the_chips() -> None:
    found = rank(request("sd3-medium"))
    times = [row["latency_ms"] for row in found.rows]
    assert times == sorted(times)
    assert [row["rank"] for row in found.rows] == list(range(1, len(times) + 1))
    assert all(each.split.chips <= 8 for each in found.priced)
    labels = [each.split.label for each in found.priced] + [each.plan.label for each in found.refused]
    assert len(labels) == len(set(labels)) == found.plans
    assert {"CFG2xU4", "CFG2xU2xR2", "CFG2xU2xPF2", "U8", "R8", "PF8", "CFG2xDP4", "DP8"} <= set(labels)
    assert all(row["stale"] for row in found.rows if row["pipefusion"] > 1)
    assert not any(row["stale"] for row in found.rows if row["pipefusion"] == row["distrifusion"] == 1)


def test_filters_and_exact_keep_what_they_say() -> None:
    exact = rank(request("sd3-medium", filters=Filters(exact=True)))
    assert not any(row["stale"] for row in exact.rows)
    two = rank(request("sd3-medium", filters=Filters(cfg=(2,), pipefusion=(2,), patches=(4,))))
    assert {(row["cfg"], row["pipefusion"], row["patches"]) for row in two.rows} == {(2, 2, 4)}


def test_throughput_prefers_copies_and_cost_follows() -> None:
    for objective in ("throughput", "cost"):
        first = rank(request("pixart-sigma-xl2", objective=objective)).rows[0]
        assert first["dp"] * first["cfg"] >= 4
        assert first["images_per_s"] == pytest.approx(first["dp"] * 1e3 / first["latency_ms"])
        assert first["usd_per_image"] == pytest.approx(6.88 * 8 / 3600 / first["images_per_s"])


def test_a_video_counts_seconds_of_it() -> None:
    row = rank(request("wan2.1-t2v-1.3b", objective="throughput")).rows[0]
    assert row["video_s_per_s"] == pytest.approx(row["images_per_s"] * 81 / 16)


def test_where_nothing_fits_the_error_says_what_would_do() -> None:
    with pytest.raises(NoneLeftError, match=r"no split of flux.1-dev fits: .* GiB would do"):
        rank(request("flux.1-dev", "t4"))
    with pytest.raises(NoneLeftError, match=r"--parallel-vae shares the decoder"):
        rank(request("flux.1-dev", "l40", job={"size": (4096, 4096)}))
    assert rank(request("flux.1-dev", "l40", job={"size": (4096, 4096)}, parallel_vae=True)).rows
    with pytest.raises(NoneLeftError, match=r"closest is .* > 1 ms"):
        rank(request("flux.1-dev", limits=Limits(latency=1e-3)))


@every("more", [{"objective": "tpot"}, {"gpus": 0}, {"gpus": 10**7}, {"weights": "int3"}])
def test_requests_that_make_no_sense_are_refused(more: dict[str, object]) -> None:
    with pytest.raises(InputError):
        setting_of(request("flux.1-dev", **more))  # type: ignore[arg-type]


def test_figures_are_finite_on_every_kind_of_machine() -> None:
    for hardware, gpus in (("h100", 3), ("tpu-v5e", 4), ("mi300x", 2), ("l20", 5), ("gb200-nvl72", 2)):
        for row in rank(request("sd3-medium", hardware, gpus, engine="ideal-dit")).rows:
            assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
