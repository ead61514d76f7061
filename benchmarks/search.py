"""How fast the simulator and the searches of `plan search` are: `python benchmarks/search.py`, two or three minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.costs.serving import formats_of
from planner.opgraph.cluster import Cluster, kind_of
from planner.opgraph.comparing import chip_room
from planner.opgraph.graph import from_file
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Problem
from planner.opgraph.searching import chains_of, exhaustive
from planner.opgraph.sharding import Options, View, ilp
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import template
from planner.opgraph.transformer import Load, from_model
from planner.specs.catalog import load_graph, load_machine, load_model

MODEL = "llama3-70b"
EDITS = 300
SIZES = ((4, 8), (4, 16), (4, 64), (20, 8), (20, 16), (20, 64), (80, 8), (80, 64))
"""(layers, chips)"""


def model_problem(layers: int, gpus: int) -> Problem:
    model = load_model(MODEL)
    hardware, engine = load_machine("h100")
    formats = formats_of(model, hardware, engine, None, None)
    return Problem(
        from_model(model, engine, formats, Load("decode", 64, 1024, 1280), layers, gpus),
        Machine(hardware, engine, gpus),
    )


def simulations() -> Iterator[str]:
    """Edits of one operator from the template of tensor parallelism in nodes, nine of ten taken back as a chain does.

    Templates of tasks and transfers are made in a first round that is not timed: a search meets each a few times only.
    """
    yield "layers chips  tasks  full ms delta ms ratio  full/s delta/s"
    for layers, gpus in SIZES:
        problem = model_problem(layers, gpus)
        start = template(problem.graph, problem.machine, 8, 1, gpus // 8)
        edits = EDITS if layers < 80 else EDITS // 5
        full = delta = tasks = 0.0
        for timed in (False, True):
            rng = np.random.default_rng(0)
            simulation = Simulation(problem.templates, start)
            for _ in range(edits):
                operator = int(rng.integers(len(problem.space)))
                config = problem.draw(operator, rng)
                begin = time.process_time()
                simulation.change(operator, config)
                middle = time.process_time()
                if timed:
                    tasks += Simulation(problem.templates, tuple(simulation.strategy)).tasks
                    full += time.process_time() - middle
                    delta += middle - begin
                begin = time.process_time()
                if rng.random() < 0.9:
                    simulation.undo()
                delta += (time.process_time() - begin) * timed
        full, delta = full / edits, delta / edits
        yield (
            f"{layers:>6} {gpus:>5} {tasks / edits:>6.0f} {1e3 * full:>8.2f} {1e3 * delta:>8.2f} {full / delta:>5.1f} "
            f"{1 / full:>7.0f} {1 / delta:>7.0f}"
        )


def chains() -> Iterator[str]:
    """The lecture's small problem: chains that find the optimum within 1,000 evaluations."""
    problem = Problem(from_file(load_graph("two-towers")), Machine(*load_machine("h100-pairs"), 4), 64e6)
    begin = time.perf_counter()
    best = exhaustive(problem)
    yield f"exhaustive: {best.feasible} of {problem.size} simulated in {time.perf_counter() - begin:.1f} s"
    for share in (0.1, 0.2, 0.3):
        hits, found, distinct = 0, [], []
        for seed in range(10):
            for chain in chains_of(problem, 6, 2000, seed, 1 / (share * 1e-3)):
                chain.advance(problem, 1000)
                if chain.best_cost < best.cost * (1 + 1e-9):
                    hits += 1
                    found.append(chain.found_at)
                    distinct.append(len(chain.known))
        yield (
            f"beta = 1 / {share} ms: {hits} of 60 chains within 1000 evaluations, half of them by "
            f"{np.median(found):.0f}, the last at {max(found)}; {min(distinct)} to {max(distinct)} strategies seen"
        )


def network() -> Iterator[str]:
    """LeNet on four chips, every strategy against chains."""
    problem = Problem(from_file(load_graph("lenet")), Machine(*load_machine("h100-pairs"), 4))
    begin = time.perf_counter()
    best = exhaustive(problem)
    yield f"lenet: {problem.size} strategies in {time.perf_counter() - begin:.0f} s"
    for chain in chains_of(problem, 6, 2000, 0):
        chain.advance(problem, 2000)
        yield f"{chain.name}: {chain.best_cost / best.cost:.3f} times the optimum, at {chain.found_at} evaluations"


def levels() -> Iterator[str]:
    """Stages of whole models, and the integer programme by layers."""
    hardware, engine = load_machine("h100")
    for name, gpus in ((MODEL, 16), (MODEL, 64), ("llama3.1-405b", 16)):
        model = load_model(name)
        formats = formats_of(model, hardware, engine, None, None)
        graph = from_model(model, engine, formats, Load("decode", 8, 1024, 8 * 1280), None, gpus)
        begin = time.perf_counter()
        free = chip_room(model, hardware, engine, gpus, formats, None)
        stages = Cluster([kind_of(graph, hardware, engine, gpus, free)]).solve("training", 8)
        yield f"stages: {name} on {gpus} chips: {len(stages)} stages in {time.perf_counter() - begin:.1f} s"
    for layers in (4, 20, 80):
        problem = model_problem(layers, 16)
        options = Options(problem.graph, problem.machine, View(2, 8))
        options.cost((8,) * len(problem.graph.operators))
        begin = time.perf_counter()
        ilp(options)
        yield f"integer programme: {layers} layers on a grid of 2 x 8 in {time.perf_counter() - begin:.2f} s"


if __name__ == "__main__":
    for part in (simulations, chains, network, levels):
        for line in part():
            print(line, flush=True)
        print()
