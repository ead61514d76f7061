"""Searching for the strategy with the shortest step: all of them where they are few, else Markov chains (FlexFlow, 6).

A chain proposes a random configuration for a random operator, which is symmetric, and takes it with probability
min(1, exp(beta (cost - new cost))), so that it visits strategies in proportion to exp(-beta cost). What does not fit
in memory costs infinity. A chain stops when its budget is spent, or when half of it went by without a better strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import exp, inf, prod
from typing import Any, Literal, NamedTuple

import numpy as np

from planner.errors import NoPlanError
from planner.opgraph.graph import Graph
from planner.opgraph.machine import Machine
from planner.opgraph.simulator import Simulation, Templates
from planner.opgraph.strategies import (
    Config,
    Strategy,
    anywhere,
    blocks,
    data_parallel,
    expert_designed,
    held_bytes,
    tensor_parallel,
)
from planner.units import GIB

Devices = Literal["blocks", "any"]
SLICE = 200
"""Evaluations that a chain goes on for at a time."""
TEMPERATURE = 0.06
"""1 / beta as a share of the cost that a chain starts with, where beta is not given."""
SMALL = 20_000
"""Strategies that are all simulated rather than searched."""
REMEMBERED = 50_000
"""Strategies of a chain that are told apart; it is sent to and fro with them."""
_DRAWS = 200


class Problem:
    """A graph on a machine with so much memory for each device; what is searched.

    Args:
        graph: the operators.
        machine: the devices.
        memory: bytes of weights and KV that each device may hold; infinite = no limit.
        devices: `blocks`: tasks stand on neighbours (`strategies.blocks`); `any`: anywhere.
    """

    def __init__(self, graph: Graph, machine: Machine, memory: float = inf, devices: Devices = "blocks") -> None:
        self.graph, self.machine, self.memory, self.devices = graph, machine, memory, devices
        self.templates = Templates(graph, machine)
        by_type: dict[int, list[Config]] = {}
        for kind, operator in zip(graph.types, graph.operators, strict=True):
            if kind not in by_type:
                by_type[kind] = blocks(operator, machine)
        self.space = [by_type[kind] for kind in graph.types]
        """Configurations of every operator on blocks of devices."""
        self._held: dict[tuple[int, Config], dict[int, float]] = {}

    @property
    def size(self) -> int:
        """Strategies on blocks of devices."""
        return prod(map(len, self.space))

    def held(self, operator: int, config: Config) -> dict[int, float]:
        """Bytes that an operator takes on each of its devices."""
        key = (self.graph.types[operator], config)
        if key not in self._held:
            self._held[key] = held_bytes(self.graph.operators[operator], config)
        return self._held[key]

    def loads(self, strategy: Sequence[Config]) -> list[float]:
        """Bytes on every device."""
        total = [0.0] * self.machine.devices
        for operator, config in enumerate(strategy):
            for device, size in self.held(operator, config).items():
                total[device] += size
        return total

    def fits(self, strategy: Sequence[Config]) -> bool:
        """Whether every device holds what it must."""
        return max(self.loads(strategy)) <= self.memory * (1 + 1e-12)

    def cost(self, strategy: Strategy) -> float:
        """Seconds of a step, infinite where it does not fit."""
        return Simulation(self.templates, strategy).cost if self.fits(strategy) else inf

    def draw(self, operator: int, rng: np.random.Generator) -> Config:
        """A configuration of an operator, drawn evenly."""
        if self.devices == "any":
            return anywhere(self.graph.operators[operator], self.machine, rng)
        space = self.space[operator]
        return space[int(rng.integers(len(space)))]

    def random(self, rng: np.random.Generator) -> Strategy:
        """A random strategy that fits; drawn evenly, or where few do, one changed until it does.

        Raises:
            NoPlanError: none was found.
        """
        operators = range(len(self.graph.operators))
        for _ in range(_DRAWS):
            strategy = [self.draw(operator, rng) for operator in operators]
            if self.fits(strategy):
                return tuple(strategy)
        over = self._over(strategy)
        for _ in range(50 * _DRAWS):
            operator = int(rng.integers(len(strategy)))
            before, strategy[operator] = strategy[operator], self.draw(operator, rng)
            now = self._over(strategy)
            if now > over:
                strategy[operator] = before
            elif now == 0:
                return tuple(strategy)
            else:
                over = now
        raise self.nothing_fits()

    def _over(self, strategy: Sequence[Config]) -> float:
        return sum(max(0.0, load - self.memory * (1 + 1e-12)) for load in self.loads(strategy))

    def nothing_fits(self) -> NoPlanError:
        """The error where no strategy was found that fits, with what the least full devices would hold."""
        graph = self.graph
        least = sum(
            min(sum(self.held(index, config).values()) for config in self.space[index])
            for index in range(len(graph.operators))
        )
        each, there = least / self.machine.devices, self.memory
        return NoPlanError(
            f"{graph.name}: no strategy fits: weights and KV take {_size(least)} when nothing is held twice, "
            f"{_size(each)} on each of {self.machine.devices} chips, and {_size(there)} are free there; more chips, "
            "fewer requests or a larger --memory-limit"
        )

    def starts(self, seed: int, chains: int) -> list[tuple[str, Strategy]]:
        """Where chains begin: data-parallel, expert-designed, tensor-parallel where they fit, the rest at random.

        Raises:
            NoPlanError: nothing was found that fits.
        """
        named = [
            (name, make(self.graph, self.machine))
            for name, make in (
                ("data-parallel", data_parallel),
                ("expert-designed", expert_designed),
                ("tensor-parallel", tensor_parallel),
            )
        ]
        found = [(name, strategy) for name, strategy in named if self.fits(strategy)]
        found = [pair for index, pair in enumerate(found) if pair[1] not in [each for _, each in found[:index]]][
            :chains
        ]
        while len(found) < chains:
            found.append(("random", self.random(np.random.default_rng([seed, len(found)]))))
        return found


def _size(value: float) -> str:
    return f"{value / GIB:.3g} GiB" if value >= GIB / 10 else f"{value / 1e6:.3g} MB"


class Chain:
    """One Markov chain. It goes on for as many evaluations as it is told to, and can be sent to another process.

    Args:
        start: the strategy it begins with, which fits.
        seed: of its random numbers.
        budget: evaluations at most.
        beta: 1 / seconds; none = 1 / (TEMPERATURE x the cost of the start).
        restart: evaluations without a better strategy since it began anew, after which it begins anew from a random
            one; none = never, as in the paper.
        name: what its start is called.
    """

    def __init__(
        self,
        start: Strategy,
        seed: Sequence[int],
        budget: int,
        beta: float | None = None,
        restart: int | None = None,
        name: str = "",
    ) -> None:
        self.name, self.budget, self.restart = name, budget, restart
        self.rng = np.random.default_rng(list(seed))
        self.strategy = self.best = start
        self.cost = self.best_cost = self.start_cost = inf
        self.beta = beta
        self.evaluations = self.accepted = self.found_at = 0
        self._since, self._run_best, self._begun = 0, inf, False
        self.distinct: set[int] = {hash(start)}
        """Hashes of the strategies that were looked at."""

    @property
    def done(self) -> bool:
        """Whether the budget is spent, or half of it without a better strategy."""
        return self.evaluations >= self.budget or self.evaluations - self.found_at >= max(1, self.budget // 2)

    def advance(self, problem: Problem, evaluations: int, watch: Callable[[Chain], None] | None = None) -> Chain:
        """Goes on; itself.

        Args:
            problem: what is searched, the same every time.
            evaluations: how long, as far as it is not done.
            watch: called after every evaluation.
        """
        simulation = Simulation(problem.templates, self.strategy)
        loads = problem.loads(self.strategy)
        if not self._begun:
            self.cost = self.best_cost = self.start_cost = self._run_best = simulation.cost
            self._begun = True
        if self.beta is None and 0 < self.cost < inf:
            self.beta = 1.0 / (TEMPERATURE * self.cost)
        last = self.evaluations + evaluations
        while self.evaluations < last and not self.done:
            if self.restart and self._since >= self.restart:
                self.strategy, self._since = problem.random(self.rng), 0
                simulation, loads = Simulation(problem.templates, self.strategy), problem.loads(self.strategy)
                self.cost = self._run_best = simulation.cost
                self._better(self.strategy, self.cost)
            self._step(problem, simulation, loads)
            if watch is not None:
                watch(self)
        return self

    def _step(self, problem: Problem, simulation: Simulation, loads: list[float]) -> None:
        operator = int(self.rng.integers(len(self.strategy)))
        config, chance = problem.draw(operator, self.rng), self.rng.random()
        self.evaluations += 1
        self._since += 1
        before = self.strategy[operator]
        if config == before:
            self.accepted += 1
            return
        proposed = (*self.strategy[:operator], config, *self.strategy[operator + 1 :])
        if len(self.distinct) < REMEMBERED:
            self.distinct.add(hash(proposed))
        new = dict(problem.held(operator, config))
        for device, size in problem.held(operator, before).items():
            new[device] = new.get(device, 0.0) - size
        if any(loads[device] + more > problem.memory * (1 + 1e-12) for device, more in new.items() if more > 0):
            return  # infinite cost
        cost = simulation.change(operator, config)
        if chance >= acceptance(self.cost, cost, self.beta or 1.0):
            simulation.undo()
            return
        self.accepted += 1
        self.strategy, self.cost = proposed, cost
        for device, more in new.items():
            loads[device] += more
        if cost < self._run_best * (1 - 1e-12):
            self._run_best, self._since = cost, 0
        self._better(proposed, cost)

    def _better(self, strategy: Strategy, cost: float) -> None:
        if cost < self.best_cost * (1 - 1e-12):
            self.best, self.best_cost, self.found_at = strategy, cost, self.evaluations


def acceptance(cost: float, new: float, beta: float) -> float:
    """The probability with which a chain goes from one cost to another: min(1, exp(beta (cost - new)))."""
    return 1.0 if new <= cost else exp(beta * (cost - new))


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
) -> list[Chain]:
    """The chains of a search, from `more` starts where they fit, then from those of `Problem.starts`.

    Raises:
        NoPlanError: no start fits.
    """
    given = [(name, strategy) for name, strategy in more if problem.fits(strategy)][:chains]
    known = [strategy for _, strategy in given]
    own = [pair for pair in problem.starts(seed, chains) if pair[1] not in known] if len(given) < chains else []
    starts = (given + own)[:chains]
    return [Chain(start, (seed, index, 1), budget, beta, restart, name) for index, (name, start) in enumerate(starts)]


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
