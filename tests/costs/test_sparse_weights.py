"""Weights of which two of every four are left out: bytes as real arrays pack them, arithmetic only where chips skip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import run

from planner import estimate
from planner.costs.layers import Formats, Operation, Pass, Structure, gemm
from planner.costs.layers import count as count_dense
from planner.costs.layouts import count as count_layout
from planner.costs.memory import gathered_bytes
from planner.costs.roofline import price_operation, resources
from planner.costs.weights import Shard, matmul_parameters
from planner.diffusion.job import job_of
from planner.diffusion.memory import memory_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import latency_of
from planner.diffusion.ranking import Request, setting_of
from planner.diffusion.weights import parameters
from planner.errors import InputError
from planner.specs.catalog import load_diffusion, load_engine, load_hardware, load_model, load_sampler
from planner.specs.dtypes import WEIGHTS, sparse_bytes
from planner.specs.hardware import SPARSE_SHARE, Hardware
from planner.units import GIB

H100, LLAMA, VLLM = load_hardware("h100"), load_model("llama3-8b"), load_engine("vllm")
LINEAR = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336
"""Elements of a layer of llama3-8b: q and out, k and v, the FFN."""
SPARSE = [name for name, dtype in WEIGHTS.items() if dtype.dense is not None]


def formats(name: str, hardware: Hardware = H100) -> Formats:
    dtype = WEIGHTS[name]
    return Formats(dtype, WEIGHTS["bf16"], hardware.chip.compute_dtype(dtype.compute), "bf16")


# --- storage ----------------------------------------------------------------------------------------------------------


def packed(weights: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(values of the larger two of every four, their places at 2 bits, four of them to a byte)."""
    groups = weights.reshape(-1, 4)
    places = np.sort(np.argsort(-np.abs(groups.astype(float)), axis=1, kind="stable")[:, :2], axis=1)
    four = places.astype(np.uint8).reshape(-1, 4)
    index = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return np.take_along_axis(groups, places, axis=1), index


def unpacked(values: np.ndarray[Any, Any], index: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    places = np.stack([index >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1, 2)
    whole = np.zeros((len(places), 4), dtype=values.dtype)
    np.put_along_axis(whole, places.astype(int), values, axis=1)
    return whole


@pytest.mark.parametrize(("name", "stored"), [("bf16-2:4", np.float16), ("int8-2:4", np.int8)])
def test_bytes_are_those_of_a_matrix_that_is_packed(name: str, stored: Any) -> None:
    whole = np.random.default_rng(0).integers(-100, 100, (64, 256)).astype(stored)
    values, index = packed(whole)
    kept = unpacked(values, index).reshape(whole.shape)
    assert np.count_nonzero(kept) <= whole.size / 2
    assert np.all((kept == whole) | (kept == 0))
    assert np.sum(np.abs(kept.astype(float))) > 0.6 * np.sum(np.abs(whole.astype(float)))
    assert values.nbytes + index.nbytes == WEIGHTS[name].bytes * whole.size


def test_bytes_by_hand() -> None:
    assert WEIGHTS["bf16-2:4"].bytes / WEIGHTS["bf16"].bytes == 0.5625
    assert WEIGHTS["fp8-2:4"].bytes == WEIGHTS["int8-2:4"].bytes == 5 / 8
    assert WEIGHTS["int4-2:4"].bytes == (2 + 1 + 1 / 8) / 8
    assert sparse_bytes(16, kept=1, of=4) == (4 + 0.5) / 8
    for name in SPARSE:
        assert WEIGHTS[name].bytes < WEIGHTS[str(WEIGHTS[name].dense)].bytes
        assert WEIGHTS[name].plain_bytes == 2  # embeddings and head are not pruned


def test_bytes_of_published_checkpoints() -> None:
    """torchao, Llama-3-8B without its embedding: 15.01 GB in 16 bit, 4.22 in 4 bit by groups of 64, 3.05 at 2:4."""
    elements = matmul_parameters(LLAMA) / 1e9
    assert 2 * elements == pytest.approx(15.01, abs=0.01)
    assert (4 + 32 / 64) / 8 * elements == pytest.approx(4.22, abs=0.01)
    assert sparse_bytes(4, 16 / 64) * elements == pytest.approx(3.05, abs=0.01)


# --- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "stored", "computed"),
    [
        ("h100", "bf16-2:4", "bf16-2:4"), ("h100", "fp16-2:4", "bf16-2:4"), ("h100", "fp8-2:4", "fp8-2:4"),
        ("h100", "int8-2:4", "bf16-2:4"), ("h100", "int4-2:4", "bf16-2:4"), ("a100", "fp8-2:4", "bf16-2:4"),
        ("h800", "bf16-2:4", "bf16-2:4"), ("mi300x", "bf16-2:4", "bf16"), ("mi300x", "fp8-2:4", "fp8"),
        ("v100-sxm2", "int4-2:4", "fp16"), ("tpu-v5e", "bf16-2:4", "bf16"), ("h100-lecture", "fp8-2:4", "bf16"),
    ],
)  # fmt: skip
def test_zeros_are_skipped_only_where_the_chips_file_says_so(hardware: str, stored: str, computed: str) -> None:
    chip = load_hardware(hardware).chip
    assert chip.compute_dtype(WEIGHTS[stored].compute) == computed
    assert chip.computes(computed)


def test_sparse_products_take_the_peak_of_the_chip_and_the_share_that_is_reported() -> None:
    product = gemm("x", 4096.0, 4096.0, 4096.0, 0.0, "bf16")
    dense, _, _ = resources(H100, product)
    sparse, _, constants = resources(H100, product._replace(dtype="bf16-2:4"))
    assert H100.chip.peak("bf16-2:4") == 2 * H100.chip.peak("bf16")
    assert dense / sparse == pytest.approx(2 * SPARSE_SHARE) == pytest.approx(1.7)
    assert constants.provenance.status == "assumed"
    unable = load_hardware("mi300x")
    same, own = (resources(unable, product._replace(dtype=unable.chip.compute_dtype(x))) for x in ("bf16", "bf16-2:4"))
    assert same == own


@pytest.mark.parametrize("kind", ["attention_prefill", "attention_decode", "elementwise"])
def test_only_products_with_weights_are_sparse(kind: str) -> None:
    assert H100.constants(kind, "bf16-2:4") == H100.constants(kind, "bf16")


def test_experts_take_their_own_kernels_measurement() -> None:
    name, constants = H100.constants("grouped_gemm", "fp8-2:4")
    _, dense = H100.constants("grouped_gemm", "fp8")
    assert name == "fp8-2:4"
    assert constants.compute_fraction == pytest.approx(SPARSE_SHARE * float(dense.compute_fraction or 0))


# --- language models --------------------------------------------------------------------------------------------------


def layer_products(name: str, work: Pass) -> list[Operation]:
    operations, _ = count_dense(LLAMA, VLLM, Shard.of(LLAMA, 1), work, formats(name), Structure())
    return [each for each in operations if each.kind == "gemm" and each.place == "layer"]


@pytest.mark.parametrize("name", ["bf16", "int4", *SPARSE])
def test_a_step_reads_the_stored_bytes_and_counts_all_flops(name: str) -> None:
    products = layer_products(name, Pass(3.0, 100.0))
    assert sum(float(each.weight_bytes) for each in products) == pytest.approx(LINEAR * WEIGHTS[name].bytes)
    assert sum(float(each.flops) for each in products) == 2 * 3 * LINEAR  # zeros counted: the peak skips them


def test_memory_holds_the_stored_bytes() -> None:
    held = {name: float(estimate("llama3-8b", plan="TP1", weights=name)["weights_gib"]) for name in ("bf16", *SPARSE)}
    for name in SPARSE:
        saved = 32 * LINEAR * (2 - WEIGHTS[name].bytes) / GIB
        assert held["bf16"] - held[name] == pytest.approx(saved, rel=1e-6)


@pytest.mark.parametrize("layout", ["wg-x", "wg-xyz"])
def test_gathered_weights_travel_and_lie_as_they_are_stored(layout: str) -> None:
    """Pope et al.'s weight-gathered layouts over a grid of 2 x 2 x 2."""
    structure = Structure(ffn=layout, prefill_ffn=layout)
    shard = Shard.for_engine(LLAMA, VLLM, "bf16", 8, 1, 2, 2)
    sent, held = {}, {}
    for name in ("bf16", "bf16-2:4", "int4", "int4-2:4"):
        _, transfers = count_layout(LLAMA, VLLM, shard, Pass(0.0, 0.0, 4096.0, 8e6, 0.0, 1.0), formats(name), structure)
        sent[name] = sum(float(each.bytes) * each.times for each in transfers if each.name == "weights")
        held[name] = float(gathered_bytes(LLAMA, shard, formats(name), structure))
    for name in ("bf16-2:4", "int4", "int4-2:4"):
        assert sent[name] / sent["bf16"] == pytest.approx(WEIGHTS[name].bytes / 2)
        assert held[name] / held["bf16"] == pytest.approx(WEIGHTS[name].bytes / 2)
    assert sent["bf16"] > 0


def test_decode_gains_by_reading_and_prompts_by_skipping() -> None:
    """A chip that skips nothing still reads less; only one that skips has shorter long prompts."""
    for hardware, skips in (("h100", True), ("mi300x", False)):
        each = {
            name: estimate("llama3-8b", plan="TP1", hardware=hardware, weights=name, isl=7000, concurrency=1)
            for name in ("bf16", "bf16-2:4")
        }
        dense, sparse = each["bf16"], each["bf16-2:4"]
        assert 1.25 < dense["tpot_ms"] / sparse["tpot_ms"] < 2 / 1.125
        gain = dense["ttft_ms"] / sparse["ttft_ms"]
        assert (gain > 1.15) == skips
        assert gain >= 1.0


def test_int4_on_a100_gains_what_torchao_reports() -> None:
    """180.8 to 226.0 tokens/s (1.25 times) on A100; plain kernels that reach their share of the bandwidth gain more."""
    rates = [
        estimate("llama3-8b", plan="TP1", hardware="a100", weights=name, isl=16, osl=200, concurrency=1)["tokens_per_s"]
        for name in ("int4", "int4-2:4")
    ]
    assert 1.05 < rates[1] / rates[0] < 1.33


# --- diffusion transformers -------------------------------------------------------------------------------------------


def asked(hardware: str, weights: str) -> Request:
    sampler, model = load_sampler("xdit"), load_diffusion("flux.1-dev")
    return Request(model, load_hardware(hardware, sampler), sampler, 8, job_of(model), weights=weights)


@pytest.mark.parametrize("plan", ["U1", "PF8"])
def test_diffusion_transformers_hold_the_stored_bytes(plan: str) -> None:
    split = Split.parse(plan)
    held = {name: memory_of(setting_of(asked("h100", name)), split).weights for name in ("bf16", "int4", "bf16-2:4")}
    assert held["bf16-2:4"] < held["bf16"]
    if plan == "U1":
        ends = 2 * parameters(load_diffusion("flux.1-dev")) - held["bf16"]
        assert ends == pytest.approx(0, abs=1)
        ratio = (held["bf16"] - held["bf16-2:4"]) / (held["bf16"] - held["int4"])
        assert ratio == pytest.approx(0.875 / (2 - WEIGHTS["int4"].bytes))


def test_denoising_steps_skip_zeros_where_the_chip_does() -> None:
    for hardware, least, most in (("h100", 1.25, 1.7), ("h20", 1.0, 1.05)):
        dense, sparse = (
            latency_of(setting_of(asked(hardware, name)), Split()).step for name in ("bf16", "bf16-2:4")
        )  # fmt: skip
        assert least < dense / sparse < most


# --- people -----------------------------------------------------------------------------------------------------------


def test_a_rate_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: h100-sxm\nname: mine\nchip: {sparse_factor: 3}\n")
    found = run("--model", "llama3-8b", "--hardware", file)
    assert found.status == 2
    assert "chip.sparse_factor" in found.err
    assert "from 1 to 2" in found.err


def test_words_on_the_command_line() -> None:
    found = run("--model", "llama3-8b", "--gpus", 1, "--weights", "bf16-2:4", "--csv", "-")
    assert found.status == 0
    assert {row["weights"] for row in found.rows} == {"bf16-2:4"}
    wrong = run("--model", "llama3-8b", "--gpus", 1, "--weights", "bf16-1:4")
    assert wrong.status == 2
    assert "bf16-2:4" in wrong.err
    launched = run("launch", "--model", "llama3-8b", "--plan", "TP1", "--weights", "bf16-2:4")
    assert launched.status == 3
    assert "cannot load bf16-2:4 weights" in launched.err
    images = run("launch", "--model", "flux.1-dev", "--plan", "U8", "--weights", "int4")
    assert images.status == 3
    assert "cannot load int4 weights" in images.err


def test_the_cache_is_that_of_the_dense_format() -> None:
    engine = load_engine("trtllm")
    assert engine.kv_dtype("fp8-2:4") == engine.kv_dtype("fp8") == "fp8"
    assert engine.kv_dtype("bf16-2:4") == engine.kv_dtype("bf16")


def test_fp32_stays_what_only_some_chips_compute() -> None:
    with pytest.raises(InputError, match="fp32"):
        H100.chip.compute_dtype("fp32")


def test_the_roofline_of_a_sparse_product_is_never_slower() -> None:
    for rows in (1.0, 64.0, 4096.0):
        dense = gemm("x", rows, 4096.0, 4096.0, 2.0 * 4096**2, "bf16")
        sparse = dense._replace(dtype="bf16-2:4", weight_bytes=1.125 * 4096**2)
        assert price_operation(H100, sparse).total < price_operation(H100, dense).total
