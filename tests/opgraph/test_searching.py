"""The search: the lecture's small problem, exercise 7, and a chain that does what the formula says."""

from __future__ import annotations

import operator
import pickle
from collections import Counter
from functools import cache
from itertools import product
from math import exp, inf

import numpy as np
import pytest
from opgraph.problems import machine, random_graph, shipped

from planner.errors import NoPlanError
from planner.opgraph.chain import Chain, acceptance
from planner.opgraph.graph import Graph
from planner.opgraph.problem import Problem
from planner.opgraph.proposals import MOVES, Moves
from planner.opgraph.searching import SLICE, Outcome, chains_of, exhaustive, mcmc, outcome
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import Config, data_parallel, expert_designed, templates, tensor_parallel
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


@pytest.mark.parametrize("beta", [None, 1 / (0.1 * MS)])
def test_every_chain_finds_the_optimum_within_a_thousand_evaluations(beta: float | None) -> None:
    """At the temperature that falls and rises and at the lecture's; the benchmark has many seeds."""
    problem, found = lecture(64 * MB)
    chains = chains_of(problem, chains=6, budget=2000, seed=3, beta=beta)
    assert [chain.name for chain in chains] == ["tensor-parallel", *["random"] * 5]
    for chain in chains:
        chain.advance(problem, 1000)
        assert chain.best_cost == pytest.approx(found.cost, rel=1e-12)
        assert chain.found_at <= chain.found_after <= chain.proposals == 1000
        assert chain.evaluations == len(chain.known) - 1 < 600  # what was looked at before is not simulated again


def test_a_chain_ends_when_half_its_budget_brings_nothing_or_everything_is_known() -> None:
    problem, _ = lecture(64 * MB)
    (chain,) = chains_of(problem, 1, budget=300, seed=3, beta=1 / MS)
    chain.advance(problem, 10**9)
    assert chain.evaluations == min(300, chain.found_at + 150)
    few = tiny()
    (chain,) = chains_of(few, 1, budget=300, seed=3)
    chain.advance(few, 10**9)
    assert chain.proposals == 3000
    assert chain.evaluations <= few.size


def test_exercise_7_without_the_limit_data_parallelism_wins_and_sends_nothing() -> None:
    """All strategies fit; where the busiest chip alone computes as long none is shorter, the others are simulated."""
    problem = shipped("two-towers", 4, 200 * MB)
    held, computed = np.zeros((11,) * 4 + (4,)), np.zeros((11,) * 4 + (4,))
    for place, space in enumerate(problem.space):
        for index, config in enumerate(space):
            where = (*(slice(None),) * place, index)
            seconds = problem.templates.prices.task(place, config.degrees)
            for device in config.devices:
                computed[where][..., device] += seconds
            for device, size in problem.held(place, config).items():
                held[where][..., device] += size
    assert held.max() <= problem.memory
    best = data_parallel(problem.graph, problem.machine)
    simulation = Simulation(problem.templates, best)
    candidates = np.argwhere(computed.max(axis=-1) < simulation.cost)
    assert 10 < len(candidates) < 2000
    for indices in candidates:
        strategy = tuple(space[index] for space, index in zip(problem.space, indices, strict=True))
        assert problem.cost(strategy) > simulation.cost or strategy == best
    assert [problem.machine.lanes[lane] for lane in simulation.busy()] == [f"chip {device}" for device in range(4)]


@pytest.mark.parametrize(("name", "memory"), [("lenet", inf), ("rnn", 520 * MB)])
def test_chains_find_the_optimum_of_enumerable_networks(name: str, memory: float) -> None:
    """On two chips; the benchmark has four and many seeds."""
    problem = shipped(name, 2, memory)
    best = exhaustive(problem)
    found = mcmc(problem, chains_of(problem, chains=3, budget=600, seed=1))
    assert found.cost == pytest.approx(best.cost, rel=1e-12)
    assert found.evaluations < 3 * 600 + 1 < best.evaluations * 3
    assert all(chain.best_cost < 1.02 * best.cost for chain in found.chains)


def test_single_changes_end_where_all_operators_would_have_to_move_at_once() -> None:
    """LeNet on four chips: latencies are all there is, so that one operator alone gains nothing by leaving."""
    problem = shipped("lenet", 4)
    best = problem.cost(data_parallel(problem.graph, problem.machine))
    starts = [problem.random(np.random.default_rng(seed)) for seed in range(3)]
    ends = {
        moves: [Chain(start, (1,), 500, moves=moves).advance(problem, 700).best_cost / best for start in starts]
        for moves in MOVES
    }
    assert ends["mixed"] == pytest.approx([1.0] * 3)
    assert min(ends["single"]) > 1.5


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


def test_acceptance_is_metropolis_and_is_measured_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain goes up as often as the formula says, at a beta that is given."""
    assert acceptance(1.0, 1.1, 10.0) == pytest.approx(exp(-1.0))
    assert acceptance(1.1, 1.0, 10.0) == acceptance(1.0, 1.0, 10.0) == 1.0
    assert acceptance(1.0, 1.0, 10.0, -2.0) == pytest.approx(exp(-2.0))
    assert acceptance(1.0, 1.1, 10.0, 3.0) == 1.0
    problem, beta = shipped("two-towers", 4, 200 * MB), 1 / (1.5 * MS)
    expected: list[float] = []
    asked: list[float] = []

    def watched(cost: float, new: float, beta: float, back: float) -> float:
        asked.append(min(1.0, exp(beta * (cost - new)) * exp(back)))
        return acceptance(cost, new, beta, back)

    monkeypatch.setattr("planner.opgraph.chain.acceptance", watched)
    chain = Chain(data_parallel(problem.graph, problem.machine), (7,), 10**9, beta)
    taken, last = 0, [0]

    def watch(chain: Chain) -> None:
        nonlocal taken
        if asked and asked[-1] < 1:
            expected.append(asked[-1])
            taken += chain.accepted > last[0]
        asked.clear()
        last[0] = chain.accepted

    chain.advance(problem, 4000, watch)
    assert len(expected) > 500
    assert abs(taken - sum(expected)) < 4 * sum(chance * (1 - chance) for chance in expected) ** 0.5


def tiny() -> Problem:
    """Three operators with three layouts each, the same ones: 27 strategies."""
    problem = shipped("two-towers", 4, 200 * MB)
    few = Problem(Graph("tiny", problem.graph.operators[:3]), problem.machine, problem.memory)
    every = tuple(range(4))
    few.space = [[Config((4, 1), every), Config((2, 2), every), Config((1, 2), (0, 1))] for _ in range(3)]
    few._known = [frozenset(space) for space in few.space]
    return few


@pytest.mark.parametrize("moves", MOVES)
def test_detailed_balance_on_a_tiny_space(moves: Moves) -> None:
    """Strategies are visited in proportion to exp(-beta cost), and as often one way as the other."""
    problem, beta, steps = tiny(), 1 / (0.1 * MS), 15_000
    visits, flows = Counter[object](), Counter[tuple[object, object]]()
    last = tuple(space[0] for space in problem.space)
    chain = Chain(last, (11,), 10**9, beta, moves=moves)

    def watch(chain: Chain) -> None:
        nonlocal last
        visits[chain.strategy] += 1
        if chain.strategy != last:
            flows[last, chain.strategy] += 1
        last = chain.strategy

    chain.advance(problem, steps, watch)
    weights = {strategy: exp(-beta * problem.cost(strategy)) for strategy in product(*problem.space)}
    assert len(weights) == 27
    assert max(weights.values()) < 0.5 * sum(weights.values())
    for strategy, weight in weights.items():
        assert visits[strategy] / steps == pytest.approx(weight / sum(weights.values()), abs=0.015)
    for (left, right), there in flows.items():
        back = flows[right, left]
        assert abs(there - back) < 5 * (there + back) ** 0.5 + 1
    together = [pair for pair in flows if sum(map(operator.ne, *pair)) > 1]  # type: ignore[call-overload]
    assert bool(together) == (moves == "mixed")


def test_layouts_are_exchanged_back() -> None:
    """Doing it again takes it back, whatever the operators; a configuration has one layout and the other way about."""
    rng = np.random.default_rng(4)
    problem = Problem(random_graph(rng, 9), machine(4))
    layouts, changed = problem.layouts, 0
    for place, space in enumerate(problem.space):
        for config in space:
            layout = layouts.of(place, config)
            assert layout is not None
            assert layouts.configured(place, layout) == config
    for _ in range(300):
        strategy = problem.random(rng)
        first = int(rng.integers(len(strategy)))
        before, after = layouts.of(first, strategy[first]), layouts.of(first, problem.draw(first, rng))
        assert before is not None
        assert after is not None
        chosen = layouts.together(first, rng)
        assert len(set(chosen)) == len(chosen) >= 2
        new = layouts.exchanged(strategy, chosen, before, after)
        assert all(config in problem.space[place] for place, config in new.items())
        there = tuple(new.get(place, own) for place, own in enumerate(strategy))
        assert {**dict(enumerate(there)), **layouts.exchanged(there, chosen, before, after)} == dict(
            enumerate(strategy)
        )
        changed += len(new) > 1
    assert changed > 30


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
    assert 0 < found.evaluations <= SLICE
    assert found.cost == outcome(chains).cost < inf
    assert not exhaustive(problem, tick).complete


def test_nothing_fits() -> None:
    problem = shipped("two-towers", 4, 20 * MB)
    with pytest.raises(NoPlanError, match=r"no strategy fits: weights and KV take 0\.112 GiB.*20 MB are free"):
        exhaustive(problem)
    with pytest.raises(NoPlanError, match="no strategy fits"):
        chains_of(problem, 2, 100)


def test_any_devices_are_a_larger_space() -> None:
    problem, best = lecture(64 * MB)
    wider = Problem(problem.graph, problem.machine, problem.memory, "any")
    found = mcmc(wider, chains_of(wider, 2, 300, seed=0))
    assert wider.fits(found.strategy)
    assert 0.9 * best.cost <= found.cost <= 1.5 * best.cost
