"""Markov chains of strategies (FlexFlow, section 6.2).

A chain proposes another strategy (`proposals`) and takes it with probability min(1, exp(beta (cost - new cost))), with
Hastings' correction where the way back is more or less likely, so that with a fixed beta it visits strategies in
proportion to exp(-beta cost). What does not fit in memory costs infinity.

What counts is simulations: a proposal that does not fit, or that the chain has looked at before, takes none. A chain
stops when its budget of them is spent, or when half of it went by without a better strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp, exp2, inf

import numpy as np

from planner.opgraph.problem import Problem
from planner.opgraph.proposals import Moves
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import Config, Strategy

START = 0.06
"""Of the plain chain, where beta is not given, 1 / beta as a share of the cost that it starts with."""
COLD, WARMING, HOT = 0.05, 25, 8
"""Of mixed proposals, where beta is not given: 1 / beta is this share of an operator's part of the least cost since the
chain began (or began anew), the more operators the smaller, since one changes that much less of it. Without a better
strategy it doubles with every so many proposals for each operator, up to so many times as much."""
PATIENCE = 10
"""Proposals for each evaluation of its budget after which a chain stops: where strategies are few, it knows them."""
REMEMBERED = 50_000
"""Strategies whose cost a chain remembers; it is sent to and fro with them."""


class Chain:
    """One Markov chain. It goes on for as many proposals as it is told to, and can be sent to another process.

    Args:
        start: the strategy it begins with, which fits.
        seed: of its random numbers.
        budget: evaluations (simulated strategies) at most.
        beta: 1 / seconds; none = as `_temperature`.
        restart: proposals without a better strategy since it began anew, after which it begins anew from a random one;
            none = never, as in the paper.
        name: what its start is called.
        moves: which proposals it makes.
    """

    def __init__(
        self,
        start: Strategy,
        seed: Sequence[int],
        budget: int,
        beta: float | None = None,
        restart: int | None = None,
        name: str = "",
        moves: Moves = "mixed",
    ) -> None:
        self.name, self.budget, self.restart, self.moves = name, budget, restart, moves
        self.rng = np.random.default_rng(list(seed))
        self.strategy = self.best = start
        self.cost = self.best_cost = self.start_cost = inf
        self.beta = beta
        self.proposals = self.evaluations = self.accepted = 0
        self.found_at = self.found_after = 0
        """Evaluations and proposals until the best one was found."""
        self.known: dict[int, float] = {}
        """Costs of strategies that were looked at, by `_mark`."""
        self._since, self._run_best, self._begun = 0, inf, False

    @property
    def done(self) -> bool:
        """Whether the budget is spent, or half of it without a better strategy, or there is little left to look at."""
        spent = self.evaluations >= self.budget or self.proposals >= PATIENCE * self.budget
        return spent or self.evaluations - self.found_at >= max(1, self.budget // 2)

    def advance(self, problem: Problem, proposals: int, watch: Callable[[Chain], None] | None = None) -> Chain:
        """Goes on; itself.

        Args:
            problem: what is searched, the same every time.
            proposals: how many, as far as it is not done.
            watch: called after every one.
        """
        walk = _Walk(problem, self.strategy)
        if not self._begun:
            self.cost = self.best_cost = self.start_cost = self._run_best = walk.simulation.cost
            self.known[walk.mark] = self.cost
            self._begun = True
        last = self.proposals + proposals
        while self.proposals < last and not self.done:
            if self.restart and self._since >= self.restart:
                self.strategy, self._since = problem.random(self.rng), 0
                walk = _Walk(problem, self.strategy)
                self.cost = self._run_best = walk.simulation.cost
                self.evaluations += self._learned(walk.mark, self.cost)
                self._better(self.strategy, self.cost)
            self._step(problem, walk)
            if watch is not None:
                watch(self)
        return self

    def _step(self, problem: Problem, walk: _Walk) -> None:
        (changes, back), chance = problem.proposed(self.strategy, self.moves, self.rng), self.rng.random()
        self.proposals += 1
        self._since += 1
        if not changes:
            self.accepted += 1
            return
        more = walk.more(changes, self.strategy)
        if more is None:
            return  # infinite cost
        mark = walk.marked(changes, self.strategy)
        cost = self.known.get(mark)
        simulated = cost is None
        if cost is None:
            cost = walk.simulated(changes)
            self._learned(mark, cost)
            self.evaluations += 1
        if chance >= acceptance(self.cost, cost, self.beta or 1.0 / (self._temperature or 1.0), back):
            if simulated:
                walk.simulation.undo()
            return
        self.accepted += 1
        self.strategy = tuple(changes.get(place, own) for place, own in enumerate(self.strategy))
        self.cost = cost
        walk.moved(changes, mark, more, simulated)
        if cost < self._run_best * (1 - 1e-12):
            self._run_best, self._since = cost, 0
        self._better(self.strategy, cost)

    @property
    def _temperature(self) -> float:
        """1 / beta where it is not given, in seconds."""
        if self.moves == "single":
            return START * self.start_cost
        operators = len(self.strategy)
        warmed = min(float(HOT), exp2(self._since / (WARMING * operators)))
        return self._run_best / operators * COLD * warmed

    def _learned(self, mark: int, cost: float) -> bool:
        """Remembers a cost as long as there is room; whether it is a new one."""
        new = mark not in self.known
        if new and len(self.known) < REMEMBERED:
            self.known[mark] = cost
        return new

    def _better(self, strategy: Strategy, cost: float) -> None:
        if cost < self.best_cost * (1 - 1e-12):
            self.best, self.best_cost = strategy, cost
            self.found_at, self.found_after = self.evaluations, self.proposals


class _Walk:
    """Where a chain is: its timeline, what devices hold, and a mark by which the strategy is known again.

    A proposal whose cost is known is taken without a simulation; the timeline follows when the next one is simulated.
    """

    def __init__(self, problem: Problem, strategy: Strategy) -> None:
        self.problem, self.loads = problem, problem.loads(strategy)
        self.simulation = Simulation(problem.templates, strategy)
        self.mark = 0
        for pair in enumerate(strategy):
            self.mark ^= hash(pair)
        self._behind: dict[int, Config] = {}

    def more(self, changes: Mapping[int, Config], strategy: Strategy) -> dict[int, float] | None:
        """Bytes that changes add on each device that they touch; none where that is more than it may hold."""
        found: dict[int, float] = {}
        for operator, config in changes.items():
            for device, size in self.problem.held(operator, config).items():
                found[device] = found.get(device, 0.0) + size
            for device, size in self.problem.held(operator, strategy[operator]).items():
                found[device] = found.get(device, 0.0) - size
        limit = self.problem.memory * (1 + 1e-12)
        return None if any(self.loads[device] + size > limit for device, size in found.items() if size > 0) else found

    def marked(self, changes: Mapping[int, Config], strategy: Strategy) -> int:
        """The mark of the strategy with changes: operators and their configurations, in any order."""
        mark = self.mark
        for operator, config in changes.items():
            mark ^= hash((operator, strategy[operator])) ^ hash((operator, config))
        return mark

    def simulated(self, changes: Mapping[int, Config]) -> float:
        """Seconds of the strategy with changes, made in the timeline."""
        if self._behind:
            self.simulation.change_all(self._behind)
            self._behind = {}
        return self.simulation.change_all(changes)

    def moved(self, changes: Mapping[int, Config], mark: int, more: Mapping[int, float], simulated: bool) -> None:
        """Makes changes part of the strategy."""
        self.mark = mark
        if not simulated:
            self._behind.update(changes)
        for device, size in more.items():
            self.loads[device] += size


def acceptance(cost: float, new: float, beta: float, back: float = 0.0) -> float:
    """The probability with which a chain goes from one cost to another: min(1, exp(beta (cost - new) + back)).

    `back` is `Drawn.back` (Hastings): 0 for proposals that are as likely back as forth.
    """
    exponent = beta * (cost - new) + back
    return 1.0 if exponent >= 0 else exp(exponent)
