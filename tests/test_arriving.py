"""Requests that come at a rate: Little's law at the load found, the wait against a simulated queue, what refuses."""

from __future__ import annotations

import numpy as np
import pytest
from asking import request
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Filters, InputError, Limits, NoPlanError, Request, Workload, estimate, rank
from planner.arriving import queue_wait

MS = 1e-3


def at_rate(rate: float, gpus: int = 8, limits: Limits | None = None, model: str = "llama3-8b", **work: int) -> Request:
    return request(model, gpus, work={"arrival_rate": rate, **work}, limits=limits or Limits())


def waits(rng: np.random.Generator, service: np.ndarray, rate: float) -> np.ndarray:
    """Waits in a queue of one server, one customer after the other: max(0, wait + service - time to the next)."""
    gaps = rng.exponential(1 / rate, len(service))
    walk = np.concatenate([[0.0], np.cumsum(service - gaps)])[:-1]
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8, 0.9])
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_the_wait_is_that_of_a_simulated_queue(busy: float, spread: float) -> None:
    rng = np.random.default_rng(7)
    count, service = 600_000, 0.04
    times = service * (1 + spread * rng.choice([-1.0, 1.0], count))
    found = waits(rng, times, busy / service)[10_000:]
    means = found[: len(found) // 59 * 59].reshape(59, -1).mean(axis=1)  # batches far longer than a busy period
    error = means.std(ddof=1) / np.sqrt(len(means))
    expected = queue_wait(np.array([busy / service]), np.array([service]), spread**2)[0]
    assert abs(means.mean() - expected) < 3 * error
    assert error < 0.1 * expected


def test_the_wait_grows_with_what_the_server_has_to_do_and_has_no_end_at_all_of_its_time() -> None:
    rates = np.linspace(0.0, 30.0, 61)
    found = queue_wait(rates, np.full(61, 0.04))
    assert found[0] == 0
    assert np.all(np.diff(found[rates * 0.04 < 1]) > 0)
    assert np.all(np.isinf(found[rates * 0.04 >= 1]))
    assert queue_wait(np.array([12.5]), np.array([0.04]))[0] == pytest.approx(0.02)  # half of E at half of the time


@settings(max_examples=15, deadline=None)
@given(
    rate=st.floats(0.01, 30.0),
    gpus=st.sampled_from((2, 8)),
    isl=st.sampled_from((128, 1024, 6000)),
    osl=st.sampled_from((1, 32, 400)),
)
def test_what_is_in_flight_is_the_rate_times_the_time_that_each_takes(
    rate: float, gpus: int, isl: int, osl: int
) -> None:
    try:
        ranking = rank(at_rate(rate, gpus, isl=isl, osl=osl))
    except NoPlanError:
        return
    for row in ranking.results.rows():
        residence = (row["ttft_ms"] + (osl - 1) * (row["tpot_ms"] or 0)) * MS
        assert row["in_flight"] == pytest.approx(rate * residence, rel=1e-9)
        assert row["requests_per_s"] == pytest.approx(rate, rel=1e-9)
        assert row["tokens_per_s"] == pytest.approx(rate * osl, rel=1e-9)
        assert row["latency_ms"] == pytest.approx(residence / MS)  # the wait is not in it
        assert row["concurrency"] == max(1, np.ceil(row["in_flight"] * (1 - 1e-9)))
        assert 0 < row["utilisation"] <= 1 + 1e-9
        assert 0 < row["prefill_utilisation"] < 1
        assert row["in_flight"] <= row["max_concurrency"] * (1 + 1e-9)


def test_at_a_low_rate_requests_are_alone_and_everything_follows_by_hand() -> None:
    row = rank(at_rate(0.5)._replace(filters=Filters(tp=(8,), pp=(1,)))).results.row(0)
    alone = estimate("llama3-8b", plan="TP8")
    assert (row["ttft_ms"], row["tpot_ms"]) == (alone["ttft_ms"], alone["tpot_ms"])
    assert row["in_flight"] == pytest.approx(0.5 * alone["latency_ms"] * MS)
    busy = row["prefill_utilisation"]
    service = busy / 0.5  # E
    assert service < alone["ttft_ms"] * MS  # which has what a request pays for itself, too
    assert row["queue_ms"] == pytest.approx(busy * service / (2 * (1 - busy)) / MS)


def test_a_stage_of_a_pipeline_takes_the_next_prompt_when_it_is_done_and_not_when_the_last_is() -> None:
    asked = at_rate(0.5, 2, model="llama3.1-8b", osl=1)
    row = rank(asked._replace(filters=Filters(tp=(1,), pp=(2,)))).results.row(0)
    own = row["ttft_ms"] * MS - asked.engine.host.request_us * 1e-6
    assert row["prefill_utilisation"] / 0.5 == pytest.approx(own / 2, rel=0.1)


def test_twice_the_replicas_serve_twice_the_rate_with_the_same_times() -> None:
    one = rank(at_rate(7.0, 4)._replace(filters=Filters(tp=(4,), pp=(1,)))).results.row(0)
    two = rank(at_rate(14.0, 8)._replace(filters=Filters(tp=(4,), pp=(1,)))).results.row(0)
    assert (one["plan"], two["plan"]) == ("TP4", "TP4xDP2")
    for name in ("ttft_ms", "queue_ms", "tpot_ms", "utilisation", "prefill_utilisation"):
        assert one[name] == pytest.approx(two[name], rel=1e-6), name


def test_a_whole_load_takes_as_long_as_the_same_concurrency() -> None:
    row = rank(at_rate(15.0, 1)._replace(filters=Filters(tp=(1,)))).results.row(0)
    below, above = (estimate("llama3-8b", plan="TP1", concurrency=int(load)) for load in
                    (np.floor(row["in_flight"]), np.ceil(row["in_flight"])))  # fmt: skip
    assert below["requests_per_s"] <= 15.0 <= above["requests_per_s"]
    assert below["tpot_ms"] <= row["tpot_ms"] <= above["tpot_ms"]


def test_the_limit_on_ttft_holds_with_the_wait() -> None:
    free = rank(at_rate(100.0)).results.row(0)
    assert free["queue_ms"] > 1
    limit = (free["ttft_ms"] + free["queue_ms"] / 2) * MS
    for name in ("ttft", "latency"):
        limited = Limits(**{name: limit if name == "ttft" else (free["latency_ms"] + free["queue_ms"] / 2) * MS})
        ranking = None
        try:
            ranking = rank(at_rate(100.0, limits=limited))
        except NoPlanError:
            continue
        rows = ranking.results.rows()
        assert free["plan"] not in [row["plan"] for row in rows]
        assert all(row[f"{name}_ms"] + row["queue_ms"] <= getattr(limited, name) / MS * (1 + 1e-9) for row in rows)


def test_a_plan_that_cannot_says_what_it_sustains_and_can_do_that() -> None:
    limits = Limits(tpot=25 * MS)
    asked = request("llama3-70b", 16, work={"arrival_rate": 15.0}, limits=limits)
    refused = {each.plan.label: each for each in rank(asked).refused}
    slow = refused["TP4xPP2xDP2"]
    assert slow.limit == "rate"
    most = float(slow.reason.split("at most ")[1].split()[0])
    assert slow.reason == f"sustains at most {most:g} requests/s within the limits, 15 asked"
    filters = Filters(tp=(4,), pp=(2,), dp=(2,))
    held = asked._replace(filters=filters, workload=Workload(arrival_rate=most))
    assert rank(held).results.row(0)["utilisation"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(NoPlanError, match="sustains most"):
        rank(held._replace(workload=Workload(arrival_rate=most * 1.002)))


def test_advice_on_a_rate_works_and_more_does_not() -> None:
    asked = request("llama3-70b", 8, work={"arrival_rate": 40.0}, limits=Limits(ttft=500 * MS, tpot=25 * MS))
    with pytest.raises(NoPlanError) as stop:
        rank(asked)
    text = str(stop.value)
    gpus, rate = int(text.split("--gpus ")[1].split(maxsplit=1)[0]), float(text.split("--arrival-rate ")[1])
    assert rank(asked._replace(gpus=gpus)).results.row(0)["utilisation"] <= 1
    assert rank(asked._replace(workload=Workload(arrival_rate=rate))).results.row(0)["utilisation"] > 0.999
    for worse in (asked._replace(gpus=gpus - 1), asked._replace(workload=Workload(arrival_rate=rate * 1.002))):
        with pytest.raises(NoPlanError):
            rank(worse)


def test_limits_that_no_load_keeps_are_said_with_what_is_reachable() -> None:
    asked = request("llama3-70b", 8, work={"arrival_rate": 0.1}, limits=Limits(tpot=MS))
    with pytest.raises(NoPlanError, match=r"even with one request in flight.*--max-tpot 1: the best is 10.* by TP8"):
        rank(asked)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        ({"arrival_rate": 0.0}, "--arrival-rate must be above 0"),
        ({"arrival_rate": float("nan")}, "--arrival-rate must be above 0"),
        ({"arrival_rate": 4, "concurrency": 4}, "both say how many"),
        ({"arrival_rate": 4, "schedule": "static"}, "static batch"),
    ],
)
def test_a_rate_that_makes_no_sense_is_refused(work: dict[str, object], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        rank(request("llama3-8b", 8, work=work))
