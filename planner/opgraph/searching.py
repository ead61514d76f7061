"""Searching for the strategy with the shortest step: all of them where they are few, else Markov chains (`chain`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from planner.opgraph.chain import Chain
from planner.opgraph.problem import Problem
from planner.opgraph.proposals import Moves
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import Strategy

SLICE = 200
"""Proposals that a chain makes at a time."""
SMALL = 20_000
"""Strategies that are all simulated rather than searched."""


class Outcome(NamedTuple):
    """What a search has found."""

    strategy: Strategy
    cost: float
    method: str
    """exhaustive or mcmc."""
    evaluations: int
    chains: tuple[Chain, ...] = ()
    feasible: int | None = None
    """Strategies that fit, where all were looked at."""
    complete: bool = True
    """Not stopped by the user."""
    costs: Any = None
    """Seconds of all strategies that fit, where all were looked at: an array."""


def exhaustive(problem: Problem, tick: Callable[[int], None] = lambda _: None) -> Outcome:
    """Simulates every strategy on blocks of devices that fits.

    Args:
        problem: one with few strategies.
        tick: called with the number of strategies that were looked at since the last call.

    Raises:
        NoPlanError: none fits.
    """
    best, least, costs, looked = None, inf, [], 0
    held = [[problem.held(index, config) for config in space] for index, space in enumerate(problem.space)]
    limit, devices = problem.memory * (1 + 1e-12), problem.machine.devices
    simulation: Simulation | None = None
    complete = True
    try:
        for indices in product(*(range(len(space)) for space in problem.space)):
            looked += 1
            if looked % SLICE == 0:
                tick(SLICE)
            loads = [0.0] * devices
            for operator, index in enumerate(indices):
                for device, size in held[operator][index].items():
                    loads[device] += size
            if max(loads) > limit:
                continue
            strategy = tuple(space[index] for space, index in zip(problem.space, indices, strict=True))
            simulation, cost = _moved(problem, simulation, strategy)
            costs.append(cost)
            if cost < least:
                best, least = strategy, cost
    except KeyboardInterrupt:
        complete = False
    if best is None:
        raise problem.nothing_fits()
    return Outcome(best, least, "exhaustive", len(costs), (), len(costs), complete, np.array(costs))


def _moved(problem: Problem, simulation: Simulation | None, strategy: Strategy) -> tuple[Simulation, float]:
    """The simulation of a strategy: changed from the last one where they differ in one operator."""
    if simulation is not None:
        differing = [index for index, own in enumerate(simulation.strategy) if own != strategy[index]]
        if len(differing) == 1:
            return simulation, simulation.change(differing[0], strategy[differing[0]])
    simulation = Simulation(problem.templates, strategy)
    return simulation, simulation.cost


def chains_of(
    problem: Problem,
    chains: int,
    budget: int,
    seed: int = 0,
    beta: float | None = None,
    restart: int | None = None,
    more: Sequence[tuple[str, Strategy]] = (),
    moves: Moves = "mixed",
) -> list[Chain]:
    """The chains of a search, from `more` starts where they fit, then from those of `Problem.starts`.

    Raises:
        NoPlanError: no start fits.
    """
    given = [(name, strategy) for name, strategy in more if problem.fits(strategy)][:chains]
    known = [strategy for _, strategy in given]
    own = [pair for pair in problem.starts(seed, chains) if pair[1] not in known] if len(given) < chains else []
    starts = (given + own)[:chains]
    return [
        Chain(start, (seed, index, 1), budget, beta, restart, name, moves) for index, (name, start) in enumerate(starts)
    ]


def mcmc(problem: Problem, chains: list[Chain], tick: Callable[[int], None] = lambda _: None) -> Outcome:
    """Runs chains one after the other; an interrupt ends the search with the best so far.

    Args:
        problem: what is searched.
        chains: as `chains_of` makes them.
        tick: called with the evaluations since the last call.
    """
    complete = True
    try:
        for chain in chains:
            while not chain.done:
                before = chain.evaluations
                chain.advance(problem, SLICE)
                tick(chain.evaluations - before)
    except KeyboardInterrupt:
        complete = False
    return outcome(chains, complete)


def outcome(chains: Sequence[Chain], complete: bool = True) -> Outcome:
    """The best that chains have found; equals by the first."""
    best = min(chains, key=lambda chain: chain.best_cost)
    evaluations = sum(chain.evaluations for chain in chains)
    return Outcome(best.best, best.best_cost, "mcmc", evaluations, tuple(chains), None, complete)
