"""The law that prices kernels: p-norm, roofline, and the parts they divide into."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import load_hardware
from planner.costs.layers import Operation
from planner.costs.pnorm import pnorm, pnorm_shares
from planner.costs.roofline import BOUNDS, Parts, plus, price_operation, resources
from planner.specs.fields import Provenance
from planner.specs.hardware import Hardware, KernelConstants

US = 1e-6
some = settings(derandomize=True, deadline=None, max_examples=60)
seconds = st.floats(1e-9, 10.0)
# zero is what an operation without work needs of a resource
terms_of = st.lists(seconds | st.just(0.0), min_size=2, max_size=4)
exponents = st.sampled_from([0.3, 0.58, 1.0, 1.9, 2.73, math.inf])


# --- p-norm ---------------------------------------------------------------------------------------------------------


@some
@given(terms_of)
def test_p_one_is_the_sum_and_p_infinity_the_maximum(terms: list[float]) -> None:
    assert pnorm(terms, 1.0) == pytest.approx(sum(terms), rel=1e-14)
    assert pnorm(terms, math.inf) == max(terms)


@pytest.mark.parametrize(
    ("terms", "p", "norm"),
    [
        ([3.0, 4.0], 2.0, 5.0),
        ([1.0, 1.0], 0.5, 4.0),
        ([1.0, 2.0, 2.0], 2.0, 3.0),
        ([7.0], 2.0, 7.0),
        ([0.0, 5.0], 2.5, 5.0),
    ],
)
def test_the_norm_is_the_power_mean_without_the_mean(terms: list[float], p: float, norm: float) -> None:
    assert pnorm(terms, p) == pytest.approx(norm, rel=1e-14)


@some
@given(terms_of, exponents, st.integers(0, 3), st.floats(1.0, 5.0))
def test_the_norm_never_falls_when_a_term_grows(terms: list[float], p: float, index: int, factor: float) -> None:
    grown = [term * factor if place == index % len(terms) else term for place, term in enumerate(terms)]
    assert pnorm(grown, p) >= pnorm(terms, p) * (1 - 1e-12)


@some
@given(terms_of, exponents, st.floats(1e-6, 1e3))
def test_the_norm_scales_with_its_terms_and_ignores_their_order(terms: list[float], p: float, factor: float) -> None:
    assert pnorm([term * factor for term in terms], p) == pytest.approx(pnorm(terms, p) * factor, rel=1e-9)
    assert pnorm(terms[::-1], p) == pytest.approx(pnorm(terms, p), rel=1e-12)


@some
@given(terms_of, st.sampled_from([(1.0, 1.9), (1.9, 2.73), (0.3, 1.0), (2.73, math.inf)]))
def test_a_higher_p_is_never_dearer_and_the_maximum_is_the_floor(terms: list[float], pair: tuple[float, float]) -> None:
    lower, higher = pair
    assert max(terms) * (1 - 1e-12) <= pnorm(terms, higher) <= pnorm(terms, lower) * (1 + 1e-12)


@some
@given(terms_of, exponents)
def test_shares_add_up_to_the_norm_in_proportion_to_the_powers(terms: list[float], p: float) -> None:
    shares, norm = [float(share) for share in pnorm_shares(terms, p)], float(pnorm(terms, p))
    assert sum(shares) == pytest.approx(norm, rel=1e-12)
    assert all(share >= 0 for share in shares)
    if math.isinf(p):
        assert shares[terms.index(max(terms))] == max(terms)
    elif max(terms) > 0:
        powers = [(term / max(terms)) ** p for term in terms]
        assert shares == pytest.approx([norm * power / sum(powers) for power in powers], rel=1e-9, abs=1e-15 * norm)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.5, math.inf])
@pytest.mark.parametrize("count", [2, 3])
def test_nothing_to_do_takes_no_time(p: float, count: int) -> None:
    with np.errstate(all="raise"):
        assert pnorm([np.zeros(2)] * count, p) == pytest.approx([0.0, 0.0], abs=0)
        assert np.sum(pnorm_shares([np.zeros(2)] * count, p)) == 0.0


@pytest.mark.parametrize("p", [0.5, 1.0, 2.5, math.inf])
def test_arrays_are_priced_element_by_element(p: float) -> None:
    first, second = np.array([1.0, 5.0, 0.0, 2.0]), np.array([3.0, 2.0, 0.0, 2.0])
    norm, shares = pnorm([first, second], p), pnorm_shares([first, second], p)
    for index in range(4):
        alone = [first[index], second[index]]
        assert norm[index] == pytest.approx(pnorm(alone, p), rel=1e-14)
        assert [share[index] for share in shares] == pytest.approx(
            [float(s) for s in pnorm_shares(alone, p)], rel=1e-12
        )


# --- parts ----------------------------------------------------------------------------------------------------------


def test_parts_are_named_as_the_bottlenecks_and_add_up() -> None:
    assert Parts._fields == BOUNDS
    assert Parts(1.0, 2.0, 3.0, 4.0, 5.0).total == 15.0
    assert Parts().total == 0.0
    assert (Parts(1.0, 2.0) + Parts(memory=0.5, bubble=1.0)) == Parts(1.0, 2.5, 0.0, 0.0, 1.0)
    assert Parts(1.0, 2.0) * 3.0 == Parts(3.0, 6.0)


def test_parts_choose_row_by_row() -> None:
    one, other = Parts(compute=np.array([1.0, 2.0])), Parts(network=np.array([5.0, 6.0]))
    chosen = one.where(np.array([True, False]), other)
    assert chosen.compute.tolist() == [1.0, 0.0]
    assert chosen.network.tolist() == [0.0, 6.0]
    assert chosen.total.tolist() == [1.0, 6.0]


def test_adding_the_constant_zero_keeps_the_array_itself() -> None:
    array = np.array([1.0])
    assert plus(array, 0.0) is array
    assert plus(0.0, array) is array
    assert plus(array, array).tolist() == [2.0]


# --- roofline -------------------------------------------------------------------------------------------------------


def machine(**kernel: object) -> Hardware:
    """A chip of 100 TFLOP/s and 1 TB/s with one set of constants for every kind of operation."""
    constants = KernelConstants(Provenance("assumed", "test"), **kernel)  # type: ignore[arg-type]
    lecture = load_hardware("h100-lecture")
    chip = lecture.chip._replace(compute_tflops={"bf16": 100.0}, memory_bandwidth_gb_per_s=1000.0)
    kinds = {kind: {"bf16": constants} for kind in lecture.kernels}
    return lecture._replace(chip=chip, kernels=kinds, roofline="per_op")


GEMM = Operation(
    "test", "gemm", "bf16", flops=8e9, weight_bytes=1e7, activation_bytes=2e7, kv_bytes=3e7, items=100.0, context=960.0
)


def test_a_kernel_costs_its_start_its_depth_and_the_norm_of_its_needs() -> None:
    hardware = machine(fixed_us=3.0, compute_fraction=0.8, memory_fraction=0.5, item_us=0.5, depth_us=2.0, p=2.0)
    compute, memory, items = 8e9 / 80e12, 6e7 / 0.5e12, 100 * 0.5 * US  # 100, 120 and 50 us
    norm = math.sqrt(compute**2 + memory**2 + items**2)
    depth = 2 * US * math.log2(1 + 960 / 64)
    assert depth == pytest.approx(8 * US)
    parts = price_operation(hardware, GEMM)
    assert parts.total == pytest.approx(3 * US + depth + norm, rel=1e-12)
    assert parts.compute == pytest.approx(compute**2 / norm, rel=1e-12)
    assert parts.memory == pytest.approx(memory**2 / norm, rel=1e-12)
    assert parts.overhead == pytest.approx(3 * US + depth + items**2 / norm, rel=1e-12)
    assert (parts.network, parts.bubble) == (0.0, 0.0)


def test_the_textbook_roofline_is_p_infinity() -> None:
    hardware = machine(compute_fraction=0.8, memory_fraction=0.5, p=math.inf)
    assert price_operation(hardware, GEMM) == Parts(compute=0.0, memory=pytest.approx(120 * US))
    busier = GEMM._replace(flops=2 * GEMM.flops)
    assert price_operation(hardware, busier) == Parts(compute=pytest.approx(200 * US), memory=0.0)


def test_a_kind_without_a_compute_fraction_waits_for_memory_only() -> None:
    parts = price_operation(machine(memory_fraction=0.5, p=2.5), GEMM)
    assert (parts.compute, parts.memory) == (0.0, pytest.approx(120 * US))


def test_times_multiplies_everything() -> None:
    hardware = machine(fixed_us=3.0, compute_fraction=0.8, memory_fraction=0.5, p=2.0)
    once, thrice = price_operation(hardware, GEMM), price_operation(hardware, GEMM._replace(times=3))
    assert thrice.total == pytest.approx(3 * once.total, rel=1e-14)
    assert thrice.overhead == pytest.approx(9 * US)


def test_the_start_is_paid_where_there_is_work_and_only_there() -> None:
    hardware = machine(fixed_us=3.0, compute_fraction=0.8, memory_fraction=0.5, depth_us=1.0, p=2.0)
    rows = np.array([1.0, 0.0, 2.0])
    operation = Operation("test", "gemm", "bf16", flops=8e9 * rows, activation_bytes=6e7 * rows, context=64.0)
    with np.errstate(all="raise"):
        total = price_operation(hardware, operation).total
    assert total[1] == 0.0
    assert total[0] == pytest.approx(4 * US + math.hypot(100, 120) * US, rel=1e-12)
    assert total[2] == pytest.approx(4 * US + 2 * math.hypot(100, 120) * US, rel=1e-12)


def test_under_per_step_weights_and_kv_are_the_only_traffic() -> None:
    hardware = machine(compute_fraction=0.8, memory_fraction=0.5)
    _, everything, _ = resources(hardware, GEMM)
    _, textbook, _ = resources(hardware._replace(roofline="per_step"), GEMM)
    assert everything == pytest.approx(6e7 / 0.5e12, rel=1e-14)
    assert textbook == pytest.approx(4e7 / 0.5e12, rel=1e-14)


def test_an_arithmetic_without_constants_of_its_own_runs_as_16_bit() -> None:
    hopper, ampere = load_hardware("h100-sxm"), load_hardware("a100-80gb-sxm")
    fast = GEMM._replace(dtype="fp8")
    own = hopper.kernels["gemm"]["fp8"]
    seconds_of_compute, _, constants = resources(hopper, fast)
    assert constants is own
    assert own.compute_fraction is not None
    assert seconds_of_compute == pytest.approx(GEMM.flops / (own.compute_fraction * 1979e12), rel=1e-12)
    # no fp8 units on A100: the same kernel as in bf16
    assert resources(ampere, fast) == resources(ampere, GEMM)
    # Hopper computes in fp8, but element-wise kernels have no constants for it
    _, constants = hopper.constants("elementwise", "fp8")
    assert constants is hopper.kernels["elementwise"]["bf16"]
    assert hopper.constants("elementwise", "fp8")[0] == "bf16"


def test_a_gemm_of_one_token_is_bound_by_memory_and_one_of_thousands_by_compute() -> None:
    hopper = load_hardware("h100-sxm")
    inner, outer = 8192, 28672

    def gemm(rows: int) -> Operation:
        moved = 2.0 * rows * (inner + outer)
        flops, weights = 2.0 * rows * inner * outer, 2.0 * inner * outer
        return Operation("test", "gemm", "bf16", flops=flops, weight_bytes=weights, activation_bytes=moved)

    small, large = price_operation(hopper, gemm(1)), price_operation(hopper, gemm(8192))
    assert small.memory > 10 * small.compute
    assert large.compute > 10 * large.memory
    # around the ridge neither waits wholly for the other: dearer than the ideal roofline
    compute, memory, constants = resources(hopper, gemm(280))
    assert price_operation(hopper, gemm(280)).total - constants.fixed > 1.15 * max(compute, memory)
