"""What is searched: strategies of a graph on a machine, which of them fit, where to begin and what to propose next."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Literal

import numpy as np

from planner.errors import NoPlanError
from planner.opgraph.graph import Graph
from planner.opgraph.machine import Machine
from planner.opgraph.proposals import ALIKE, COPIED, SINGLE, Drawn, Layouts, Moves, back_and_forth
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
        sets = {kind: frozenset(configs) for kind, configs in by_type.items()}
        self._known = [sets[kind] for kind in graph.types]
        self.layouts = Layouts(graph, machine)
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

    def other(self, operator: int, config: Config, rng: np.random.Generator) -> Config | None:
        """Another configuration of an operator, drawn evenly; none where there is no other."""
        if self.devices == "any":
            drawn = anywhere(self.graph.operators[operator], self.machine, rng)
            return None if drawn == config else drawn
        space = self.space[operator]
        if len(space) == 1:
            return None if space[0] == config else space[0]
        while (drawn := space[int(rng.integers(len(space)))]) == config:
            pass
        return drawn

    def proposed(self, strategy: Sequence[Config], moves: Moves, rng: np.random.Generator) -> Drawn:
        """What a chain would change next (see `proposals`).

        Args:
            strategy: as it is.
            moves: single = one operator, drawn evenly; mixed = all kinds of proposals.
            rng: random numbers.
        """
        operator, kind = int(rng.integers(len(strategy))), 0.0 if moves == "single" else rng.random()
        own = strategy[operator]
        beside: list[Config] = []
        if moves == "mixed" and kind < SINGLE and self.devices == "blocks":
            beside = [config for config in self.layouts.beside(operator, strategy) if config in self._known[operator]]
        copies = bool(beside) and rng.random() < COPIED
        drawn = beside[int(rng.integers(len(beside)))] if copies else self.other(operator, own, rng)
        if drawn is None or drawn == own:
            return Drawn({})
        if kind < SINGLE:
            return Drawn({operator: drawn}, back_and_forth(own, drawn, beside, len(self.space[operator]) - 1))
        layouts = self.layouts
        before, after = layouts.of(operator, own), layouts.of(operator, drawn)
        if before is None or after is None:
            return Drawn({operator: drawn})
        chosen = layouts.alike[operator] if kind < ALIKE else layouts.together(operator, rng)
        return Drawn(layouts.exchanged(strategy, chosen, before, after))

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
