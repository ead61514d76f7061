"""The search: the lecture's small problem, exercise 7, and a chain that does what the formula says."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import cache
from math import exp, inf

import numpy as np
import pytest
from opgraph.problems import shipped

from planner.errors import NoPlanError
from planner.opgraph.searching import Chain, Outcome, Problem, acceptance, chains_of, exhaustive, mcmc, outcome
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import data_parallel, expert_designed, templates, tensor_parallel
from planner.units import MS

MB = 1e6


@cache
def lecture(memory: float) -> tuple[Problem, Outcome]:
    problem = shipped("two-towers", 4, memory)
    return problem, exhaustive(problem)


def test_the_lectures_small_problem() -> None:
    """4 operators x 11 configurations; the optimum splits rows between the pairs and parameters inside them."""
    problem, found = lecture(64 * MB)
    assert [len(space) for space in problem.space] == [11] * 4
    assert problem.size == 14_641
    assert found.feasible == 3_307  # as in the lecture
    assert problem.cost(data_parallel(problem.graph, problem.machine)) == inf
    split = tensor_parallel(problem.graph, problem.machine)
    assert problem.cost(split) > 3 * found.cost
    by_split = {problem.machine.lanes[lane]: busy for lane, busy in Simulation(problem.templates, split).busy().items()}
    assert by_split["infiniband of 0.0"] > 2 * by_split["chip 0"]
    best = {problem.machine.lanes[lane] for lane in Simulation(problem.templates, found.strategy).busy()}
    assert not any("infiniband" in lane for lane in best)
    assert {config.degrees for config in found.strategy} == {(2, 2), (4, 1)}
    assert max(problem.loads(found.strategy)) <= 64 * MB


def test_every_chain_finds_the_optimum_within_a_thousand_evaluations() -> None:
    problem, found = lecture(64 * MB)
    chains = chains_of(problem, chains=6, budget=2000, seed=3, beta=1 / (0.2 * MS))
    assert [chain.name for chain in chains] == ["tensor-parallel", *["random"] * 5]
    mcmc(problem, chains)
    for chain in chains:
        assert chain.best_cost == pytest.approx(found.cost, rel=1e-12)
        assert chain.found_at <= 1000
        assert len(chain.distinct) < 600
        assert chain.evaluations - chain.found_at == 1000  # half the budget without a better one


def test_exercise_7_without_the_limit_data_parallelism_wins_and_sends_nothing() -> None:
    problem, found = lecture(200 * MB)
    assert found.feasible == 14_641
    assert found.strategy == data_parallel(problem.graph, problem.machine)
    lanes = Simulation(problem.templates, found.strategy).busy()
    assert [problem.machine.lanes[lane] for lane in lanes] == [f"chip {device}" for device in range(4)]


@pytest.mark.parametrize(("name", "gpus"), [("lenet", 2), ("rnn", 2)])
def test_chains_find_the_optimum_of_enumerable_networks(name: str, gpus: int) -> None:
    problem = shipped(name, gpus)
    best = exhaustive(problem)
    found = mcmc(problem, chains_of(problem, chains=3, budget=1200, seed=1))
    assert found.cost == pytest.approx(best.cost, rel=1e-12)
    assert found.evaluations < 3 * 1200 + 1 < best.evaluations * 3


def test_named_strategies_are_points_of_the_space() -> None:
    problem = shipped("rnn", 4)
    named = dict(templates(problem.graph, problem.machine))
    assert {"TP1", "TP2", "TP4", "DP2", "DP4", "PP2", "PP4", "TP2xDP2", "TP2xPP2"} <= set(named)
    named["expert"] = expert_designed(problem.graph, problem.machine)
    for label, strategy in named.items():
        if "PP" in label and "DP" in label:  # a replica's stages lie between those of an operator's tasks
            continue
        for config, space in zip(strategy, problem.space, strict=True):
            assert config in space
    assert {config.devices for config in named["PP4"]} == {(0,), (1,), (2,), (3,)}


def test_acceptance_is_metropolis_and_is_measured_so() -> None:
    """A chain of one operator with two costs goes up as often as the formula says."""
    assert acceptance(1.0, 1.1, 10.0) == pytest.approx(exp(-1.0))
    assert acceptance(1.1, 1.0, 10.0) == acceptance(1.0, 1.0, 10.0) == 1.0
    problem = shipped("two-towers", 4, 200 * MB)
    beta, moves = 1 / (1.5 * MS), Counter[tuple[str, bool]]()
    expected: list[float] = []
    state: dict[str, float] = {}
    original = acceptance

    def watched(cost: float, new: float, beta: float) -> float:
        state["chance"] = original(cost, new, beta)
        return state["chance"]

    patch = pytest.MonkeyPatch()
    patch.setattr("planner.opgraph.searching.acceptance", watched)
    chain = Chain(data_parallel(problem.graph, problem.machine), (7,), 10**9, beta)
    before = {"accepted": 0}

    def watch(chain: Chain) -> None:
        chance = state.pop("chance", 1.0)
        if chance < 1:
            expected.append(chance)
            moves["up", chain.accepted > before["accepted"]] += 1
        before["accepted"] = chain.accepted

    chain.advance(problem, 4000, watch)
    patch.undo()
    tried = sum(moves.values())
    spread = sum(chance * (1 - chance) for chance in expected) ** 0.5
    assert tried > 500
    assert abs(moves["up", True] - sum(expected)) < 4 * spread


def test_detailed_balance_on_a_tiny_space() -> None:
    """Strategies are visited in proportion to exp(-beta cost), and as often one way as the other."""
    problem = shipped("two-towers", 4, 200 * MB)
    problem.space = [[space[0], space[5], space[-1]] for space in problem.space[:2]] + [
        [space[-1]] for space in problem.space[2:]
    ]
    start = tuple(space[0] for space in problem.space)
    beta = 1 / (2.0 * MS)
    visits, flows, last = Counter[object](), Counter[tuple[object, object]](), [start]
    chain = Chain(start, (11,), 10**9, beta)

    def watch(chain: Chain) -> None:
        visits[chain.strategy] += 1
        if chain.strategy != last[0]:
            flows[last[0], chain.strategy] += 1
        last[0] = chain.strategy

    chain.advance(problem, 15_000, watch)
    assert len(visits) == 9
    weights = {strategy: exp(-beta * problem.cost(strategy)) for strategy in visits}  # type: ignore[arg-type]
    for strategy, seen in visits.items():
        share = weights[strategy] / sum(weights.values())
        assert seen / 15_000 == pytest.approx(share, abs=0.03)
    for (left, right), there in flows.items():
        back = flows[right, left]
        assert abs(there - back) < 5 * (there + back) ** 0.5 + 1


def test_a_chain_goes_on_after_being_sent_elsewhere() -> None:
    problem = shipped("two-towers", 4, 64 * MB)
    (whole,) = chains_of(problem, 1, 600, seed=2)
    (cut,) = chains_of(problem, 1, 600, seed=2)
    whole.advance(problem, 600)
    for _ in range(3):
        cut = pickle.loads(pickle.dumps(cut)).advance(problem, 200)
    assert (cut.best, cut.strategy, cut.evaluations, cut.accepted) == (
        whole.best,
        whole.strategy,
        whole.evaluations,
        whole.accepted,
    )


def test_restarts_begin_anew_and_keep_the_best() -> None:
    problem = shipped("two-towers", 4, 64 * MB)
    (chain,) = chains_of(problem, 1, 4000, seed=5, beta=1 / (0.01 * MS), restart=100)
    costs: list[float] = []
    chain.advance(problem, 1500, lambda chain: costs.append(chain.cost))
    assert max(np.diff(costs)) > 0.5 * chain.best_cost  # no step of so cold a chain goes up so far
    assert chain.best_cost <= min(costs)


def test_an_interrupt_leaves_the_best_so_far() -> None:
    problem = shipped("two-towers", 4, 64 * MB)
    chains = chains_of(problem, 3, 5000, seed=1)

    def tick(_: int) -> None:
        raise KeyboardInterrupt

    found = mcmc(problem, chains, tick)
    assert not found.complete
    assert found.evaluations == 200
    assert found.cost == outcome(chains).cost < inf
    assert not exhaustive(problem, tick).complete


def test_nothing_fits() -> None:
    problem = shipped("two-towers", 4, 20 * MB)
    with pytest.raises(NoPlanError, match=r"no strategy fits: weights and KV take 0\.112 GiB.*20 MB are free"):
        exhaustive(problem)
    with pytest.raises(NoPlanError, match="no strategy fits"):
        chains_of(problem, 2, 100)


def test_any_devices_are_a_larger_space() -> None:
    problem = shipped("two-towers", 4, 64 * MB)
    wider = Problem(problem.graph, problem.machine, problem.memory, "any")
    found = mcmc(wider, chains_of(wider, 2, 600, seed=0))
    assert wider.fits(found.strategy)
    assert found.cost >= exhaustive(problem).cost * 0.9
