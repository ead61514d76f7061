"""Replicas against the plainest simulation there is, against theory, and against the cost engine's steady state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulating import naive
from simulating.problems import problem

from planner.arriving import queue_wait
from planner.costs.rows import Rows
from planner.costs.serving import fit, price
from planner.simulating.fleets import Outcome, closed_loop, simulate
from planner.simulating.iterations import DecodeRow, Time
from planner.simulating.jobs import Job
from planner.simulating.queueing import standard_error, waits
from planner.simulating.replicas import Replica
from planner.simulating.rooms import KvRoom, Rules
from planner.simulating.traces import Trace, alike, requests
from planner.specs.lengths import population_of

ENDLESS = KvRoom(math.inf, 16)


class Line:
    """Iterations whose time is linear in everything, so that nothing is interpolated."""

    def __init__(self, stages: int = 1, attention: float = 1e-6) -> None:
        self.stages, self.attention = stages, attention

    def seconds(self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int) -> float:
        """Through one stage."""
        return 0.01 + 1e-4 * (new + decodes) + 1e-8 * pairs + 1e-9 * prior + self.attention * contexts + 1e-4 * prompts

    def mixed(self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int = 1) -> Time:
        each = self.seconds(new, pairs, prior, decodes, contexts, prompts)
        return Time(each * self.stages, each)

    def decoding(self, sequences: int) -> DecodeRow:
        points = np.array([1.0, 1e6])
        each = np.array([self.seconds(0, 0, 0, sequences, sequences * point, 0) for point in points])
        return DecodeRow(points, each * self.stages, each)


class Fixed:
    """Prompts that take the same time whatever they are: a queue of theory."""

    stages = 1

    def mixed(self, new: float, *rest: Any, **more: Any) -> Time:
        return Time(1.0, 1.0)

    def decoding(self, sequences: int) -> DecodeRow:
        return DecodeRow(np.array([1.0, 2.0]), np.ones(2), np.ones(2))


def trace_of(rows: list[tuple[float, int, int]]) -> Trace:
    return Trace(*(np.array(column, dtype=float) for column in zip(*rows, strict=True)))


def conserved(outcome: Outcome) -> None:
    """Nothing lost, nothing before its cause, no token more or less than asked."""
    assert np.all(np.isfinite(outcome.finish))
    assert np.all(outcome.start >= outcome.arrival)
    assert np.all(outcome.first > outcome.start)
    assert np.all((outcome.finish > outcome.first) | (outcome.osl == 1))
    assert outcome.gaps.weight.sum() == (outcome.osl - 1).sum()
    assert outcome.gaps.seconds @ outcome.gaps.weight == pytest.approx((outcome.finish - outcome.first).sum())
    if not outcome.preempted.any():
        assert outcome.prefilled == outcome.isl.sum()
        assert outcome.decoded == (outcome.osl - 1).sum()


ROWS = st.lists(st.tuples(st.floats(0, 0.6), st.integers(1, 70), st.integers(1, 40)), min_size=1, max_size=25).map(
    lambda rows: [
        (float(at), isl, osl) for at, (_, isl, osl) in zip(np.cumsum([row[0] for row in rows]), rows, strict=True)
    ]
)


@settings(max_examples=25, deadline=None)
@given(
    rows=ROWS, mixed=st.booleans(), budget=st.sampled_from([None, 7, 30, 200]), sequences=st.sampled_from([1, 3, 30]),
    spare=st.integers(0, 12), block=st.sampled_from([1, 4, 16]), whole=st.booleans(),
    piece=st.sampled_from([10**9, 10**9, 5, 20]),
)  # fmt: skip
def test_a_replica_does_what_the_plainest_simulation_does(
    rows: list[tuple[float, int, int]], mixed: bool, budget: int | None, sequences: int, spare: int, block: int,
    whole: bool, piece: int,
) -> None:  # fmt: skip
    if budget is not None and mixed:
        sequences = min(sequences, budget)
    clock = Line()
    blocks = max(math.ceil((isl + osl) / block) for _, isl, osl in rows) + spare
    engine = naive.Engine(clock.seconds, mixed, budget, sequences, blocks, block, whole, piece)
    expected = naive.simulate(engine, rows)
    found = simulate(
        trace_of(rows), clock, KvRoom(blocks, block, whole=whole), Rules(mixed, budget, sequences, piece=piece)
    )
    conserved(found)
    for name in ("start", "first", "finish", "preempted"):
        assert getattr(found, name) == pytest.approx([getattr(each, name) for each in expected], rel=1e-9), name
    assert found.peak <= 1 + 1e-9
    assert found.busy <= found.span + 1e-9


# --- theory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [0.3, 0.5, 0.8])
def test_the_queue_alone_is_m_d_1(busy: float) -> None:
    """The mean wait of Poisson arrivals at one server with a fixed service, within three standard errors."""
    arrival = requests(population_of("1", "1", None), 200_000, seed=7).faster(busy).arrival
    waited = waits(arrival, 1.0)
    expected = float(queue_wait(np.array(busy), np.array(1.0)))
    assert expected == pytest.approx(busy / (2 * (1 - busy)))
    assert abs(waited.mean() - expected) < 3 * standard_error(waited)


def test_a_queue_of_services_that_differ_is_m_g_1() -> None:
    random = np.random.default_rng(11)
    service = random.choice([0.2, 2.0], 200_000, p=[0.75, 0.25])
    arrival = np.cumsum(random.exponential(1.0, len(service)))
    expected = float(queue_wait(np.array(1.0), service.mean(), service.var() / service.mean() ** 2))
    waited = waits(arrival, service)
    assert abs(waited.mean() - expected) < 3 * standard_error(waited)


def test_replicas_that_run_prompts_one_by_one_are_that_queue() -> None:
    trace = requests(population_of("50", "1", None), 3000).faster(0.8)
    found = simulate(trace, Fixed(), ENDLESS, Rules(mixed=False, budget=None))
    assert found.wait == pytest.approx(waits(trace.arrival, 1.0), abs=1e-6)
    assert found.busy == pytest.approx(trace.length)
    assert found.utilisation == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize(
    ("case", "isl", "osl", "batch"),
    [
        (("llama3-8b", "h100", "vllm", "TP1"), 1024, 256, 48),
        (("llama3-8b", "h100", "vllm", "TP1"), 4096, 64, 24),
        (("llama3-70b", "h100", "trtllm", "TP8"), 1024, 128, 16),
        (("llama3-8b", "h100", "sglang", "TP1"), 1024, 256, 16),
        (("llama3-70b", "h100-lecture", "lecture", "TP8"), 1024, 128, 40),
    ],
)
def test_a_constant_load_is_the_steady_state_of_the_formulas(
    case: tuple[str, str, str, str], isl: int, osl: int, batch: int
) -> None:
    """R = b E + (osl - 1) D(b): requests follow one another at a rate of b / R, and each takes R."""
    known = problem(*case)
    rows = Rows.of_plans([known.plan], isl=isl, osl=osl, concurrency=batch)
    priced = price(known.setting, rows, fit(known.setting, rows, clip=False))
    residence = float(priced.ttft[0] + (osl - 1) * priced.tpot[0])
    found = closed_loop(known.clock, known.kv, known.rules, batch, isl, osl, 7, residence)
    conserved(found)
    first, last = 2 * batch, 5 * batch
    ends = np.sort(found.finish)
    assert (last - first) / (ends[last] - ends[first]) == pytest.approx(batch / residence, rel=0.01)
    assert found.latency[first:last].mean() == pytest.approx(residence, rel=0.01)


# --- pipelines ------------------------------------------------------------------------------------------------------


def test_prompts_follow_one_another_through_a_pipeline_at_the_pace_of_a_stage() -> None:
    clock = Line(stages=3)
    found = simulate(alike(20, 100, 1), clock, ENDLESS, Rules(mixed=True, budget=100, microbatches=3))
    each = clock.mixed(100, 5050, 0, 0, 0)
    assert np.diff(found.finish) == pytest.approx(np.full(19, each.slowest))
    assert found.finish[0] == pytest.approx(each.whole)


@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_decode_steps_of_a_pipeline_take_the_longer_of_its_depth_and_its_microbatches(size: int) -> None:
    """max(sum of stages, M x slowest stage), M = min(stages, requests): docs/model.md, section 4."""
    clock = Line(stages=3, attention=0.0)
    found = simulate(alike(size, 1, 400), clock, ENDLESS, Rules(True, 4096, microbatches=3))
    step = clock.decoding(math.ceil(size / 3)).at(1)
    assert found.tpot.mean() == pytest.approx(max(step.whole, min(3, size) * step.slowest), rel=0.01)
    assert found.utilisation == pytest.approx(min(size, 3) / 3, rel=0.01)
    conserved(found)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("blocks", [math.inf, 40])
def test_rounds_of_a_pipeline_are_its_iterations_one_by_one(
    stages: int, blocks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = requests(population_of("60,100", "30,50", None), 80).faster(4.0)
    rules = Rules(True, 64, microbatches=stages)
    together = simulate(trace, Line(stages), KvRoom(blocks, 16), rules)
    conserved(together)
    monkeypatch.setattr(Replica, "_run_rounds", lambda *_: False)
    apart = simulate(trace, Line(stages), KvRoom(blocks, 16), rules)
    assert together.finish == pytest.approx(apart.finish, rel=0.01)
    assert together.iterations == pytest.approx(apart.iterations, rel=0.02)


# --- rules ----------------------------------------------------------------------------------------------------------


def test_prompts_that_run_first_hold_up_answers_and_chunks_do_not() -> None:
    """Sarathi-Serve's point: the longest gap between two tokens is a prompt's pass, or an iteration of the budget."""
    trace = trace_of([(0.0, 16, 200), (0.5, 2000, 2)])
    clock = Line()
    first, chunked = (simulate(trace, clock, ENDLESS, Rules(*rule)) for rule in ((False, None), (True, 128)))
    whole = clock.mixed(2000, 2000 * 2001 / 2, 0, 0, 0).whole
    assert first.gaps.seconds.max() > whole
    assert chunked.gaps.seconds.max() < 0.2 * whole
    assert chunked.ttft[1] > first.ttft[1]  # what it costs the prompt itself


def test_requests_whose_prompts_were_computed_elsewhere_only_decode() -> None:
    replica = Replica(Line(), KvRoom(100, 16), Rules(True, 256))
    jobs = [Job(key, 0.1 * key, 40, 20, cached=40, emitted=1) for key in range(5)]
    for job in jobs:
        replica.submit(job)
    replica.advance()
    assert replica.prefilled == 0
    assert replica.decoded == 5 * 19
    assert all(job.finish > job.start >= job.arrival for job in jobs)
    assert replica.used == pytest.approx(0)


def test_what_cannot_fit_is_refused_and_does_not_wait_for_ever() -> None:
    replica = Replica(Line(), KvRoom(10, 16), Rules())
    with pytest.raises(ValueError, match="does not fit"):
        replica.submit(Job(0, 0.0, 150, 20))


def test_a_cached_prefix_is_not_computed() -> None:
    trace = alike(4, 100, 3)
    found = simulate(trace, Line(), ENDLESS, Rules(True, 64), cached=lambda isl: 0.5 * isl)
    assert found.prefilled == 200
    assert np.all(found.ttft < simulate(trace, Line(), ENDLESS, Rules(True, 64)).ttft)


@pytest.mark.parametrize("routing", ["least", "robin"])
def test_replicas_share_the_load_and_more_of_them_wait_less(routing: Any) -> None:
    trace = requests(population_of("60,100", "30,50", None), 150, burstiness=2.0).faster(6.0)
    found = [simulate(trace, Line(), ENDLESS, Rules(True, 128), count, routing) for count in (1, 2, 4)]
    for outcome in found:
        conserved(outcome)
        assert np.bincount(outcome.replica, minlength=outcome.replicas).min() > 0
    assert found[0].latency.mean() > found[1].latency.mean() > found[2].latency.mean()
    assert found[0].busy < found[1].busy  # smaller batches read the weights more often


def test_the_least_loaded_replica_is_better_than_turns_where_requests_differ() -> None:
    trace = requests(population_of("60,100", "80,180", None), 300, burstiness=2.0).faster(9.0)
    least, turns = (simulate(trace, Line(), ENDLESS, Rules(True, 128), 3, routing) for routing in ("least", "robin"))
    assert least.latency.mean() < turns.latency.mean()


def test_room_of_a_plan_is_what_the_cost_engine_says() -> None:
    for case in (("llama3-8b", "h100", "vllm", "TP1"), ("llama3-70b", "h100", "trtllm", "TP4xPP2")):
        known = problem(*case)
        rows = Rows.of_plans([known.plan], isl=1024, osl=256, concurrency=1)
        fitted = fit(known.setting, rows, clip=False)
        assert known.kv.blocks * known.kv.block == pytest.approx(float(fitted.capacity_tokens[0]))
    windowed = problem("gemma-2-27b", "h100", "vllm", "TP2")
    rows = Rows.of_plans([windowed.plan], isl=7000, osl=1000, concurrency=1)
    held = fit(windowed.setting, rows, clip=False).by_memory[0]
    assert windowed.kv.blocks / windowed.kv.most(7000, 1000) == pytest.approx(held, abs=1)


def test_many_gaps_are_kept_in_bins_that_lose_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = requests(population_of("60,100", "80,180", None), 200).faster(8.0)
    exact = simulate(trace, Line(), ENDLESS, Rules(True, 128)).gaps
    monkeypatch.setattr("planner.simulating.jobs._EXACT", 50)
    binned = simulate(trace, Line(), ENDLESS, Rules(True, 128)).gaps
    assert binned.weight.sum() == exact.weight.sum()
    assert binned.seconds @ binned.weight == pytest.approx(exact.seconds @ exact.weight)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert binned.quantile(share) == pytest.approx(exact.quantile(share), rel=2e-3)
    assert len(binned.seconds) < len(exact.seconds)


def test_a_pipeline_is_never_faster_than_its_formulas() -> None:
    """What a long prompt leaves idle behind it the formulas do not have: bubbles of up to a quarter."""
    known = problem("llama3-70b", "h100", "vllm", "TP4xPP2")
    rows = Rows.of_plans([known.plan], isl=2048, osl=64, concurrency=8)
    priced = price(known.setting, rows, fit(known.setting, rows, clip=False))
    residence = float(priced.ttft[0] + 63 * priced.tpot[0])
    found = closed_loop(known.clock, known.kv, known.rules, 8, 2048, 64, 8, residence)
    conserved(found)
    assert 0.99 * residence < found.latency[16:48].mean() < 1.3 * residence
