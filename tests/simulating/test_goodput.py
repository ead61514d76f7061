"""The highest rate within limits: against the plainest simulation with the cost engine itself, and its properties."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from simulating import naive
from simulating.problems import problem

from planner.costs.layers import Pass
from planner.costs.rows import Rows
from planner.costs.serving import replica_of
from planner.costs.step import pass_time
from planner.evidence import serving
from planner.simulating.fleets import Outcome, closed_loop
from planner.simulating.goodput import Deployment, Found, Goal, fares, highest, judge
from planner.simulating.traces import Stream, Trace, requests
from planner.specs.lengths import population_of

SMALL = ("llama3-8b", "h100", "vllm", "TP1")
GOAL = Goal(ttft=0.12, tpot=0.0105)
SCENARIO = requests(population_of("700,1400", "12,20", None), 100, seed=2)


def deployment(*case: Any, **changes: Any) -> Deployment:
    known = problem(*case)
    return Deployment.of(known.setting, known.plan, 16384)._replace(**changes)


@cache
def scenario() -> Found:
    return highest(deployment(*SMALL), SCENARIO, GOAL)


def by_hand(trace: Trace) -> float:
    """The share of requests that keep both limits, every iteration priced by the cost engine as it comes."""
    known = problem(*SMALL)
    rows = Rows.of_plans([known.plan], isl=0, osl=1, concurrency=1)
    replica = replica_of(known.setting, rows)

    def seconds(new: int, pairs: float, prior: float, decodes: int, contexts: float, prompts: int) -> float:
        context = contexts / decodes if decodes else 1.0
        work = Pass(*(np.array([float(x)]) for x in (decodes, context, new, pairs, prior, prompts, prompts)))
        return float(np.ravel(pass_time(replica, work).whole.total)[0])

    scheduler = known.setting.engine.scheduler
    before = known.setting.engine.host.request_us * 1e-6
    engine = naive.Engine(seconds, True, scheduler.chunk_tokens, scheduler.max_sequences, int(known.kv.blocks), 16)
    coming = zip(trace.arrival + before, trace.isl.astype(int), trace.osl.astype(int), strict=True)
    done = naive.simulate(engine, [(float(at), int(isl), int(osl)) for at, isl, osl in coming])
    latency = sum(each.finish - each.arrival + before for each in done) / len(done)
    edge = min(latency, 0.25 * (done[-1].arrival - done[0].arrival))
    counted = [each for each in done if done[0].arrival + edge < each.arrival <= done[-1].arrival - edge]
    kept = [
        each.first - each.arrival + before <= GOAL.ttft
        and (each.osl == 1 or (each.finish - each.first) / (each.osl - 1) <= GOAL.tpot)
        for each in counted
    ]
    return sum(kept) / len(kept)


def test_the_highest_rate_is_that_of_the_plainest_simulation_with_the_cost_engine_itself() -> None:
    """Within 3 %: the promise is kept 3 % below, and broken 3 % above."""
    found = scenario()
    assert found.best is not None
    unit = SCENARIO.faster(1 / SCENARIO.rate)
    assert by_hand(unit.faster(0.97 * found.best.rate)) >= GOAL.attainment
    assert by_hand(unit.faster(1.03 * found.best.rate)) < GOAL.attainment


def test_both_limits_are_kept_by_the_same_requests() -> None:
    found = scenario()
    best, beyond = found.best, found.beyond
    assert best is not None
    assert beyond is not None
    assert best.rate < beyond.rate <= 1.0101 * best.rate
    assert best.good
    assert not beyond.good
    outcome = best.outcome
    both = (outcome.ttft <= GOAL.ttft) & (outcome.tpot <= GOAL.tpot)
    assert best.attained == pytest.approx(both[best.counted].mean())
    assert best.attained <= min(best.kept.values())
    assert found.bound


def test_the_same_seed_gives_the_same_numbers() -> None:
    again = highest(deployment(*SMALL), SCENARIO, GOAL)
    best = scenario().best
    assert best is not None
    assert again.best is not None
    assert again.best.rate == best.rate
    for mine, theirs in zip(again.best.outcome[:6], best.outcome[:6], strict=True):
        assert np.array_equal(mine, theirs)


def test_looser_limits_fewer_requests_and_more_chips_allow_no_lower_rate() -> None:
    def rate(goal: Goal, **changes: Any) -> float:
        best = highest(deployment(*SMALL, **changes), SCENARIO, goal, precision=0.05).best
        return 0.0 if best is None else best.rate

    base = rate(GOAL)
    assert rate(GOAL._replace(attainment=0.99)) <= base
    assert rate(GOAL._replace(ttft=0.15)) >= base
    assert rate(GOAL._replace(tpot=0.0125)) >= base
    assert rate(GOAL, replicas=2) > 1.6 * base
    assert rate(GOAL._replace(percentile=90.0)) >= base  # each limit by itself asks less than both at once


@pytest.mark.parametrize("off", [1 / 30, 0.9, 1.0, 1.15, 30.0])
def test_a_rate_that_is_near_saves_simulations_and_one_that_is_not_does_no_harm(off: float) -> None:
    found = scenario()
    assert found.best is not None
    again = highest(deployment(*SMALL), SCENARIO, GOAL, near=off * found.best.rate)
    assert again.best is not None
    assert again.best.rate == pytest.approx(found.best.rate, rel=0.02)
    if 0.85 < off < 1.2:
        assert again.tried < found.tried


def test_burstier_arrivals_allow_less() -> None:
    rates = []
    for burstiness in (0.0, 2.0):
        coming = requests(population_of("1024", "32", None), 80, burstiness)
        best = highest(deployment(*SMALL), coming, GOAL, precision=0.05).best
        assert best is not None
        rates.append(best.rate)
    assert rates == sorted(rates, reverse=True)


def test_a_limit_that_no_load_keeps_is_known_from_requests_alone() -> None:
    found = highest(deployment(*SMALL), SCENARIO, Goal(ttft=0.001))
    assert found.best is None
    assert found.tried == 1
    assert found.bound == ("ttft",)
    assert found.idle.kept == {"ttft": 0.0}


def test_a_limit_that_only_single_requests_keep_is_no_rate() -> None:
    coming = requests(population_of("1024", "8", None), 60, burstiness=20.0)  # next to all at the same moment
    found = highest(deployment(*SMALL), coming, Goal(ttft=0.075))
    assert found.best is None
    assert found.idle.good
    assert found.bound == ("ttft",)


def test_without_a_tight_limit_the_queue_ends_it() -> None:
    found = highest(deployment(*SMALL), SCENARIO, Goal(ttft=1e5))
    assert found.best is not None
    assert found.bound == ("load",)


def test_as_many_requests_are_drawn_as_a_steady_state_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.simulating.goodput.FEWEST", 30)
    made = deployment(*SMALL)
    stream = Stream(population=population_of("500", "100", None), rate=20.0)
    fared = fares(made, stream, GOAL)
    assert fared.requests > 30
    assert fared.requests >= fared.needed
    assert fares(made, stream, GOAL, 30).requests == 30
    log = Stream(log=SCENARIO)
    assert fares(made, log, GOAL).requests == SCENARIO.length
    assert fares(made, log, GOAL).judged.rate == pytest.approx(SCENARIO.rate)
    assert fares(made, stream._replace(rate=500.0), GOAL).judged.broken


def test_an_interrupt_keeps_what_was_found() -> None:
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    found = highest(deployment(*SMALL), SCENARIO, GOAL, stop)
    assert not found.complete
    assert found.best is not None
    assert found.best.good


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_of_the_search_over_more_requests_keeps_what_fewer_said(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.simulating.goodput.FEWEST", 30)
    made, stream = deployment(*SMALL), Stream(population=population_of("500", "100", None))
    first = fares(made, stream, GOAL, 30)
    assert first.found is not None
    assert first.needed > 30
    tried = first.found.tried
    calls = 0

    def stop() -> None:
        nonlocal calls
        calls += 1
        if calls > tried + after:
            raise KeyboardInterrupt

    stopped = fares(made, stream, GOAL, progress=stop)
    assert not stopped.complete
    assert (stopped.requests, stopped.judged.rate) == (30, first.judged.rate)


def test_requests_that_come_first_and_last_do_not_count() -> None:
    made = deployment(*SMALL)
    coming = SCENARIO.faster(20.0)
    outcome: Outcome = made.run(coming)
    judged, every = judge(outcome, GOAL, 20.0), judge(outcome, GOAL, 20.0, edges=True)
    assert 0.5 * coming.length - 1 <= len(outcome.arrival[judged.counted]) < coming.length
    assert len(outcome.arrival[every.counted]) == coming.length


# --- Sarathi-Serve --------------------------------------------------------------------------------------------------

CHAT = population_of("2000,4400", "400,830", None)


@pytest.fixture(scope="module")
def mistral() -> dict[str, Deployment]:
    """Mistral-7B on one A100: prompts first, and chunks of 512 tokens beside decodes."""
    found = {}
    for name, tokens in (("first", 8192), ("chunks", 512)):
        made = deployment("mistral-7b", "a100-80gb-sxm", "vllm", "TP1", tokens)
        found[name] = made._replace(rules=made.rules._replace(mixed=name == "chunks", sequences=128))
    return found


def test_chunks_beside_decodes_keep_gaps_short_where_prompts_first_do_not(mistral: dict[str, Deployment]) -> None:
    coming = requests(CHAT, 120).faster(2.5)
    first, chunks = (mistral[name].run(coming) for name in ("first", "chunks"))
    assert chunks.gaps.quantile(0.99) < 0.1
    assert first.gaps.quantile(0.99) > 0.2
    assert np.quantile(chunks.tpot, 0.99) < np.quantile(first.tpot, 0.99)


def test_capacity_under_a_strict_limit_on_gaps_is_a_multiple(mistral: dict[str, Deployment]) -> None:
    """Published: 2.6 times on Mistral-7B; lengths are assumed here, so that the factor is no check but its size is."""
    coming = requests(CHAT, 80)
    first, chunks = (highest(mistral[name], coming, Goal(gap=0.1), precision=0.05).best for name in ("first", "chunks"))
    assert first is not None
    assert chunks is not None
    assert 1.8 < chunks.rate / first.rate < 4


def test_chunks_of_512_cost_a_prompt_less_than_a_quarter() -> None:
    """Published: at most some 25 % on Yi-34B, TP2 on A100."""
    clock = problem("yi-34b", "a100-80gb-sxm", "vllm", "TP2").clock
    for prompt in (2048, 4096):
        whole = clock.mixed(prompt, prompt * (prompt + 1) / 2, 0, 0, 0).whole
        cut = sum(clock.mixed(512, 512 * done + 512 * 513 / 2, done, 0, 0).whole for done in range(0, prompt, 512))
        assert 1.02 < cut / whole < 1.25


# --- measured -------------------------------------------------------------------------------------------------------


def test_requests_that_came_together_wait_as_long_as_was_measured() -> None:
    """SGLang 0.5.1 under load, which `arrivals: waves` was introduced for: here nothing says so, the queue does."""
    runs = [run for run in serving.points() if run.engine == "sglang" and run.concurrency in (16, 64)][::5]
    errors = []
    for run in runs:
        known = problem(run.model, run.hardware, run.engine, f"TP{run.tp}", weights=run.weights)
        found = closed_loop(known.clock, known.kv, known.rules, run.concurrency, run.isl, run.osl, 5, spread=0.0)
        errors.append([found.ttft.mean() / 1e-3 / run.ttft_ms - 1, found.tpot.mean() / 1e-3 / run.tpot_ms - 1])
    off = np.abs(errors).mean(axis=0)
    assert len(runs) >= 8
    assert off[0] < 0.14
    assert off[1] < 0.06
