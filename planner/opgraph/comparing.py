"""What is searched for a model or a graph of one's own, and how the strategy found stands beside the best template."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from planner.costs.layers import Formats, Structure
from planner.costs.memory import Budget, held_tokens, room
from planner.costs.weights import Shard, Stages
from planner.errors import InputError
from planner.opgraph.graph import Graph, from_file
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Devices, Problem
from planner.opgraph.searching import Outcome
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import Strategy, templates
from planner.opgraph.transformer import Load, Phase, from_model
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.opgraph import OperatorGraph

ROUNDS = 4


def load_of(engine: Engine, phase: Phase, requests: int, isl: int, osl: int) -> Load:
    """One pass: a decode step half way through the answers, or the prefill of that many prompts."""
    context = isl if phase == "prefill" else isl + osl // 2
    return Load(phase, requests, context, int(np.max(held_tokens(engine, float(isl), float(osl), 0.0))))


def model_problem(
    model: Model,
    hardware: Hardware,
    engine: Engine,
    gpus: int,
    formats: Formats,
    load: Load,
    layers: int | None,
    memory: float | None = None,
    devices: Devices = "blocks",
) -> Problem:
    """The problem of a model.

    What chips may hold is the engine's budget less what it keeps for activations and its runtime. Where only some
    layers are looked at, they get their share of that, so that memory binds as it does for the whole model.

    Args:
        model: dense or with experts.
        hardware: of the chips.
        engine: whose kernels run.
        gpus: chips.
        formats: of the numbers.
        load: the pass.
        layers: how many; none = all.
        memory: bytes of a chip's budget; none = the engine's share of the chip.
        devices: where tasks may stand.

    Raises:
        InputError: as `from_model`, or more memory than there is.
        NoPlanError: fewer chips than the smallest slice of a torus.
    """
    machine = Machine(hardware, engine, gpus)
    graph = from_model(model, engine, formats, load, layers, machine.devices)
    free = chip_room(model, hardware, engine, machine.devices, formats, memory)
    if layers is not None and layers < model.layers:
        whole = from_model(model, engine, formats, load, None, machine.devices)
        free *= _bytes(graph) / _bytes(whole)
    return Problem(graph, machine, free, devices)


def chip_room(
    model: Model, hardware: Hardware, engine: Engine, gpus: int, formats: Formats, memory: float | None
) -> float:
    """Bytes of a chip for weights and KV: its budget less activations and runtime, those of one rank or of all."""
    ranks = np.array([1, gpus])
    shard = Shard.for_engine(model, engine, formats.weights.name, ranks)
    budget = Budget.of(hardware, engine, memory)
    space = room(model, engine, shard, Stages.of(model, np.ones(2)), formats, Structure(), budget)
    return float(budget.limit - np.max(space.other[0]))


def _bytes(graph: Graph) -> float:
    ones = [(each, (1,) * len(each.dims)) for each in graph.operators]
    return sum(each.work.weight_bytes(degrees) + each.work.state_bytes(degrees) for each, degrees in ones)


def graph_problem(
    spec: OperatorGraph, hardware: Hardware, engine: Engine, gpus: int, memory: float | None, devices: Devices
) -> Problem:
    """The problem of a graph of one's own.

    Raises:
        InputError: arithmetic that the chip does not have, or more memory than it has.
        NoPlanError: as `model_problem`.
    """
    if spec.dtype not in hardware.chip.compute_tflops:
        has = ", ".join(hardware.chip.compute_tflops)
        raise InputError(f"graph {spec.name}: dtype: {hardware.name} does not compute in {spec.dtype}; it has {has}")
    budget = Budget.of(hardware, engine, memory)
    return Problem(from_file(spec), Machine(hardware, engine, gpus), budget.limit, devices)


class Named(NamedTuple):
    """A template with its cost."""

    label: str
    strategy: Strategy
    cost: float


def best_template(problem: Problem) -> tuple[Named | None, int]:
    """(the TP x PP x DP with the shortest step of those that fit, none where none does; how many there are)."""
    best, total = None, 0
    for label, strategy in templates(problem.graph, problem.machine):
        total += 1
        cost = problem.cost(strategy)
        if cost < (inf if best is None else best.cost):
            best = Named(label, strategy, cost)
    return best, total


def tied(problem: Problem, start: Strategy) -> Strategy:
    """The strategy that comes of changing all alike operators together, kind by kind, as long as that helps.

    A single operator of a chain seldom gains by a configuration that its neighbours do not have, so that chains of
    single changes take long to change a layer; this is where one of them begins.
    """
    kinds = dict.fromkeys(problem.graph.types)
    best, least = start, problem.cost(start)
    for _ in range(ROUNDS):
        before = least
        for kind in kinds:
            places = [place for place, own in enumerate(problem.graph.types) if own == kind]
            for config in problem.space[places[0]]:
                changed = list(best)
                for place in places:
                    changed[place] = config
                cost = problem.cost(tuple(changed))
                if cost < least * (1 - 1e-12):
                    best, least = tuple(changed), cost
        if least == before:
            break
    return best


class Spent(NamedTuple):
    """Where a step's time goes, in seconds: the busiest chip, group and link, and how long the step is."""

    step: float
    compute: float
    collectives: float
    transfers: float

    @classmethod
    def of(cls, simulation: Simulation) -> Spent:
        """Of a simulated strategy."""
        most = {"chip": 0.0, "group": 0.0, "": 0.0}
        names = simulation.templates.machine.lanes
        for lane, busy in simulation.busy().items():
            kind = names[lane].split(" ")[0]
            kind = kind if kind in most else ""
            most[kind] = max(most[kind], busy)
        return cls(simulation.cost, most["chip"], most["group"], most[""])


class Comparison(NamedTuple):
    """What was found, beside the best template."""

    problem: Problem
    found: Outcome
    template: Named | None
    templates: int
    """How many templates there are."""

    @property
    def gain(self) -> float | None:
        """By what share the step is shorter than the best template's."""
        return None if self.template is None else 1 - self.found.cost / self.template.cost

    def simulation(self) -> Simulation:
        """The timeline of what was found."""
        return Simulation(self.problem.templates, self.found.strategy)

    def spent(self) -> tuple[Spent, Spent | None]:
        """(of what was found, of the best template)."""
        own = Spent.of(self.simulation())
        if self.template is None:
            return own, None
        return own, Spent.of(Simulation(self.problem.templates, self.template.strategy))

    def changed(self) -> list[int]:
        """Operators that are split or placed differently from the best template."""
        if self.template is None:
            return []
        pairs = zip(self.found.strategy, self.template.strategy, strict=True)
        return [index for index, (own, theirs) in enumerate(pairs) if own != theirs]
