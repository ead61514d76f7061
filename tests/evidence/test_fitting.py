"""Fitting: known constants come back from noisy rows, and what cannot be fitted says so."""

from __future__ import annotations

import builtins
import math
from typing import Any

import numpy as np
import pytest

from planner.costs.collectives import Network
from planner.costs.layers import Operation
from planner.costs.roofline import price_operation
from planner.errors import InputError
from planner.evidence.fitting import FEWEST, fit_kernel, fit_ranks, on_edge
from planner.plans.placement import Placement
from planner.specs.catalog import load_hardware, load_machine
from planner.specs.engine import CollectiveRule
from planner.specs.fields import Provenance
from planner.specs.hardware import Hardware, KernelConstants, RankRow

MADE_UP = Provenance("assumed", "made up")
H100 = load_hardware("h100-sxm")


def shapes(count: int, seed: int = 7) -> tuple[np.ndarray[Any, Any], ...]:
    """(m, n, k) of products, log-uniform over what engines run."""
    random = np.random.default_rng(seed)
    return tuple(np.round(2 ** random.uniform(low, high, count)) for low, high in ((0, 14), (10, 15), (10, 14)))


def gemm(count: int, dtype: str = "bf16") -> Operation:
    m, n, k = shapes(count)
    return Operation(
        "made up", "gemm", dtype, flops=2 * m * n * k, weight_bytes=2 * n * k, activation_bytes=2 * m * (n + k)
    )


def decode(count: int) -> Operation:
    random = np.random.default_rng(3)
    batch, context = (np.round(2 ** random.uniform(low, high, count)) for low, high in ((0, 8), (7, 16)))
    heads = random.choice([1, 2, 8], count)
    return Operation(
        "made up",
        "attention_decode",
        "bf16",
        kv_bytes=batch * context * heads * 512,
        activation_bytes=batch * heads * 4 * 512,
        items=batch * heads,
        context=context,
    )


def prefill(count: int) -> Operation:
    tokens = np.round(2 ** np.random.default_rng(5).uniform(7, 14, count))
    return Operation(
        "made up",
        "attention_prefill",
        "bf16",
        flops=4 * 128 * 32 * tokens * (tokens + 1) / 2,
        activation_bytes=tokens * 80 * 128 * 2,
    )


def seconds(hardware: Hardware, operation: Operation, truth: KernelConstants, noise: float = 0.0) -> Any:
    """What kernels with these constants would take, with some noise."""
    dtype = hardware.constants(operation.kind, operation.dtype)[0]
    kernels = {**hardware.kernels, operation.kind: {**hardware.kernels[operation.kind], dtype: truth}}
    exact = np.asarray(price_operation(hardware._replace(kernels=kernels), operation).total)
    return exact * np.exp(noise * np.random.default_rng(11).standard_normal(exact.shape))


CASES = [
    (gemm(160), KernelConstants(MADE_UP, 4.4, 0.71, 0.83, p=2.2)),
    (decode(200), KernelConstants(MADE_UP, 9.5, None, 0.88, 0.03, 0.6, 1.6)),
    (prefill(60), KernelConstants(MADE_UP, 12.0, 0.6, 0.45)),
    (
        Operation("made up", "elementwise", "bf16", activation_bytes=np.logspace(4, 9, 40)),
        KernelConstants(MADE_UP, 1.9, None, 0.77),
    ),
]


@pytest.mark.parametrize(("operation", "truth"), CASES, ids=lambda value: getattr(value, "kind", ""))
def test_known_constants_come_back(operation: Operation, truth: KernelConstants) -> None:
    plain = KernelConstants(MADE_UP)
    exact = fit_kernel(H100, operation, seconds(H100, operation, truth), source="a test", start=plain)
    for name, found, value in zip(KernelConstants._fields[1:], exact[1:], truth[1:], strict=True):
        assert found == (value if value is None else pytest.approx(value, rel=0.01)), name
    assert exact.provenance[:3] == ("fitted", "a test", None)
    assert exact.provenance.residual == pytest.approx(0, abs=1e-3)
    noisy = fit_kernel(H100, operation, seconds(H100, operation, truth, 0.05), source="a test", version="2")
    for name in ("fixed_us", "compute_fraction", "memory_fraction"):
        value = getattr(truth, name)
        assert getattr(noisy, name) == (value if value is None else pytest.approx(value, rel=0.06)), name
    assert noisy.provenance.version == "2"
    assert noisy.provenance.residual == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.25)
    assert on_edge(noisy) == ()


def test_a_few_wild_rows_do_not_move_the_rest() -> None:
    operation, truth = CASES[0]
    times = seconds(H100, operation, truth, 0.02)
    times[::20] *= 4
    found = fit_kernel(H100, operation, times, source="a test")
    assert found.compute_fraction == pytest.approx(truth.compute_fraction, rel=0.05)
    assert found.fixed_us == pytest.approx(truth.fixed_us, rel=0.05)


def test_a_floor_that_is_given_is_kept() -> None:
    operation, truth = CASES[0]
    found = fit_kernel(H100, operation, seconds(H100, operation, truth), source="a test", fixed_us=5.2)
    assert found.fixed_us == 5.2
    assert found.provenance.residual > 0.01
    assert found.compute_fraction == pytest.approx(truth.compute_fraction, rel=0.1)


def test_a_dtype_without_arithmetic_of_its_own_is_fitted_as_it_is_priced() -> None:
    a100 = load_hardware("a100")
    operation = gemm(80, "fp8")  # priced in the chip's 16-bit arithmetic
    truth = KernelConstants(MADE_UP, 6.0, 0.7, 0.8, p=2.0)
    found = fit_kernel(a100, operation, seconds(a100, operation, truth), source="a test")
    assert found.compute_fraction == pytest.approx(0.7, rel=0.01)


def test_what_the_rows_do_not_show_stays_as_it_was() -> None:
    flops = np.logspace(12, 14, 9)
    operation = Operation("made up", "gemm", "bf16", flops=flops, weight_bytes=flops / 1e5)
    found = fit_kernel(H100, operation, flops / (0.7 * H100.chip.peak("bf16")), source="a test")
    known = H100.alone.constants("gemm", "bf16")[1]
    assert found.compute_fraction == pytest.approx(0.7, rel=0.01)
    assert (found.memory_fraction, found.p) == (known.memory_fraction, known.p)


def test_a_constant_beyond_its_range_ends_on_the_edge() -> None:
    operation, truth = CASES[0]
    found = fit_kernel(H100, operation, seconds(H100, operation, truth) / 2, source="a test")
    assert "memory_fraction" in on_edge(found)
    assert on_edge(truth) == ()


@pytest.mark.parametrize(("algorithm", "ranks"), [("ring", 2), ("ring", 8), ("one_shot", 4), ("two_shot", 8)])
def test_a_collective_comes_back_as_the_network_prices_it(algorithm: str, ranks: int) -> None:
    hardware, engine = load_machine("h100-sxm")
    truth = RankRow(7.5, 0.7, 0.65)
    kernel = hardware.collective("nccl", "all_reduce", "nvlink")[0]
    made = kernel._replace(kernel="made up", algorithm=algorithm, ranks={ranks: truth})  # type: ignore[arg-type]
    network = Network(
        Placement.of(hardware._replace(collectives=(made,)), ranks),
        engine._replace(collectives=(CollectiveRule("all_reduce", ("made up",)),)),
    )
    sizes = np.logspace(3, 9, 25)
    times = network.seconds("all_reduce", ranks, sizes)
    found, error = fit_ranks("all_reduce", algorithm, ranks, sizes, times, hardware.network[0].link)
    assert found == pytest.approx(truth, rel=0.005)
    assert error < 1e-3
    noise = np.exp(0.04 * np.random.default_rng(2).standard_normal(sizes.shape))
    found, error = fit_ranks("all_reduce", algorithm, ranks, sizes, times * noise, hardware.network[0].link)
    assert found == pytest.approx(truth, rel=0.1)
    assert error == pytest.approx(0.032, rel=0.4)


def test_a_share_that_is_given_is_kept() -> None:
    sizes = np.logspace(3, 5, 8)
    found, _ = fit_ranks("send", "direct", 2, sizes, 5e-6 + sizes / 1e11, 1e11, bandwidth_fraction=1.0)
    assert found == pytest.approx((5.0, 1.0, 1.0), rel=0.01)


SIZES = np.logspace(3, 8, 8)
LARGE, SMALL = np.logspace(8, 9, 8), np.logspace(2, 3, 8)
BAD: list[tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = [
    ("different sizes", np.full(8, 1e6), np.full(8, 1e-5)),
    ("above 0; row 3", SIZES, np.where(np.arange(8) == 2, 0.0, 1e-5)),
    ("above 0; row 8 has nan", SIZES, np.where(np.arange(8) == 7, np.nan, 1e-5)),
    ("sizes must be finite and above 0; row 1", -SIZES, np.full(8, 1e-5)),
    ("8 sizes and 3 times", SIZES, np.full(3, 1e-5)),
    ("do not show the latency: measure smaller ones", LARGE, LARGE / 1e11),
    ("do not show the bandwidth: measure larger ones", SMALL, 1e-5 + SMALL / 1e11),
]


@pytest.mark.parametrize(("message", "sizes", "times"), BAD)
def test_transfers_that_cannot_be_fitted_say_so(message: str, sizes: Any, times: Any) -> None:
    with pytest.raises(InputError, match=message):
        fit_ranks("all_reduce", "ring", 4, sizes, times, 4.5e11)


def test_kernels_that_cannot_be_fitted_say_so() -> None:
    operation, truth = CASES[0]
    times = seconds(H100, operation, truth)
    few = gemm(FEWEST - 1)
    with pytest.raises(InputError, match=r"gemm bf16: 3 different shapes are too few to fit 4 constants \(fixed_us"):
        fit_kernel(H100, few, seconds(H100, few, truth), source="a test")
    with pytest.raises(InputError, match="times must be finite and above 0; row 1 has inf"):
        fit_kernel(H100, operation, np.where(np.arange(len(times)) == 0, np.inf, times), source="a test")
    with pytest.raises(InputError, match="another number of rows"):
        fit_kernel(H100, operation, times[:-1], source="a test")
    with pytest.raises(InputError, match="bytes must be finite and above 0"):
        fit_kernel(H100, operation._replace(weight_bytes=0.0, activation_bytes=0.0), times, source="a test")


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    operation, truth = CASES[0]
    with pytest.raises(InputError, match=r"pip install 'parallel-strategy-planner\[calibrate\]'"):
        fit_kernel(H100, operation, seconds(H100, operation, truth), source="a test")
