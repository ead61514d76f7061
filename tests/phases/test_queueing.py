"""Waiting for a prefill instance: the three forms of the paper, a simulated queue, and how a batch varies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.phases.disaggregated.queueing import (
    batch_quantile,
    inter_op_ttft,
    intra_op_ttft,
    mean_ttft,
    rate_of_share,
    rate_within,
    share_within,
)
from planner.simulating.queueing import standard_error, waits

TIMES = st.floats(0.01, 10.0)


def test_the_papers_three_forms() -> None:
    """DistServe's equations 1 to 3 at D = 1 s, R = 0.5 / s, and K = 1.5."""
    assert float(inter_op_ttft(1.0, 0.5, 1)) == pytest.approx(1.5, abs=1e-9)
    assert float(inter_op_ttft(1.0, 0.5, 2)) == pytest.approx(1.083333, abs=1e-6)
    assert float(intra_op_ttft(1.0, 0.5, 1.5)) == pytest.approx(0.833333, abs=1e-6)
    assert np.isinf(mean_ttft(1.0, 1.0, 1.0))


@settings(max_examples=30)
@given(alone=TIMES, busy=st.floats(0.01, 0.95), speed_up=st.floats(1.0, 2.0))
def test_they_are_the_papers_for_any_numbers(alone: float, busy: float, speed_up: float) -> None:
    rate = busy / alone
    single = alone + rate * alone**2 / (2 * (1 - rate * alone))
    assert float(inter_op_ttft(alone, rate, 1)) == pytest.approx(single)
    two = alone + rate * alone**2 / (4 * (2 - rate * alone))
    assert float(inter_op_ttft(alone, rate, 2)) == pytest.approx(two)
    wide = alone / speed_up + rate * alone**2 / (2 * speed_up * (speed_up - rate * alone))
    assert float(intra_op_ttft(alone, rate, speed_up)) == pytest.approx(wide)


@pytest.mark.parametrize(("stages", "busy"), [(1, 0.5), (1, 0.8), (2, 0.8), (4, 0.6)])
def test_a_simulated_pipeline_waits_as_long(stages: int, busy: float) -> None:
    """A tandem of stages, each prompt after the other in each: within three standard errors of the mean."""
    random = np.random.default_rng(7)
    alone, count = 1.0, 40_000
    rate = busy * stages / alone
    arrival = np.cumsum(random.exponential(1 / rate, count))
    done = arrival
    for _ in range(stages):
        done = done + waits(done, alone / stages) + alone / stages
    ttft = done - arrival
    assert abs(ttft.mean() - float(inter_op_ttft(alone, rate, stages))) < 3 * standard_error(ttft)


@settings(max_examples=30)
@given(slack=st.floats(0.0, 50.0), service=TIMES, variation=st.floats(0.0, 3.0))
def test_the_highest_rate_waits_just_as_long_as_it_may(slack: float, service: float, variation: float) -> None:
    rate = rate_within(slack, service, variation)
    assert 0 <= rate * service < 1 or slack > 1e3
    assert float(mean_ttft(0.0, service, rate, variation)) == pytest.approx(slack, rel=1e-6, abs=1e-9)
    assert rate_within(slack * 2, service, variation) >= rate


@pytest.mark.parametrize("busy", [0.5, 0.7, 0.85])
def test_the_share_of_prompts_in_time_is_that_of_a_simulated_queue(busy: float) -> None:
    """The exponential tail is an approximation for M/D/1: within three points of a hundred at any limit."""
    random = np.random.default_rng(3)
    arrival = np.cumsum(random.exponential(1 / busy, 40_000))
    ttft = waits(arrival, 1.0) + 1.0
    for limit in (1.2, 2.0, 3.0, 5.0):
        found = share_within(np.array(limit), np.ones(1), np.ones(1), np.ones(1), np.array(busy))
        assert abs(float(found) - float(np.mean(ttft <= limit))) < 0.1 * (limit < 2) + 0.03


def test_lengths_that_differ_keep_a_limit_by_their_weights() -> None:
    through, weights = np.array([[0.1, 0.5]]), np.array([0.8, 0.2])
    assert share_within(np.array([0.3]), through, through, weights, np.array([1e-6]))[0] == pytest.approx(0.8, abs=1e-5)
    assert rate_of_share(np.array([0.3]), through, through, weights, 0.9)[0] == 0
    rate = rate_of_share(np.array([1.0]), through, through, weights, 0.9)
    assert share_within(np.array([1.0]), through, through, weights, rate)[0] == pytest.approx(0.9, abs=1e-6)


@settings(max_examples=25)
@given(rate=st.floats(0.5, 4.0), slope=st.floats(0.0, 0.02))
def test_the_batch_varies_as_the_exact_birth_and_death_process_does(rate: float, slope: float) -> None:
    """Stationary weights of n in flight, rate^n times the product of L D(k) / k: exact for any lengths (Kelly 1979)."""
    answers, step = 200.0, lambda n: 0.02 * (1 + slope * n)
    n = np.arange(1, 4000)
    logs = np.cumsum(np.log(rate * answers * step(n)) - np.log(n))
    if not logs[-1] < logs.max() - 50:
        return  # no steady state
    weight = np.exp(np.append(0.0, logs) - logs.max())
    weight /= weight.sum()
    every = np.append(0, n)
    mean = float(weight @ every)
    spread = float(np.sqrt(weight @ every**2 - mean**2))
    elasticity = slope * mean / (1 + slope * mean)
    assert mean == pytest.approx(rate * answers * step(mean), rel=0.12)
    if elasticity < 0.6:
        assert spread == pytest.approx(np.sqrt(mean / (1 - elasticity)), rel=0.12)
    seen = float(batch_quantile(mean, elasticity, 1.28)) - mean  # the mean over a stay varies less than the batch
    assert 0.8 * 1.28 * np.sqrt(mean / (1 - elasticity)) < seen <= 1.28 * np.sqrt(mean / (1 - elasticity)) * (1 + 1e-9)
