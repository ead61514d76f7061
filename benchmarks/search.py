"""How fast the simulator and the searches of `plan search` are: `python benchmarks/search.py`, some ten minutes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.costs.serving import formats_of
from planner.opgraph.chain import Chain
from planner.opgraph.cluster import Cluster, kind_of
from planner.opgraph.comparing import best_template, chip_room, load_of
from planner.opgraph.comparing import model_problem as searched_problem
from planner.opgraph.graph import from_file
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Problem
from planner.opgraph.proposals import MOVES, Moves
from planner.opgraph.searching import exhaustive
from planner.opgraph.sharding import Options, View, ilp
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import template
from planner.opgraph.transformer import Load, Phase, from_model
from planner.specs.catalog import load_graph, load_machine, load_model

MODEL = "llama3-70b"
EDITS = 300
CHAINS = 60
SIZES = ((4, 8), (4, 16), (4, 64), (8, 64), (20, 8), (20, 16), (20, 64), (80, 8), (80, 64))
"""(layers, chips)"""
SEARCHED: tuple[tuple[str, int, Phase, int], ...] = (
    ("llama3-8b", 4, "prefill", 4),
    ("llama3-70b", 16, "decode", 16),
    ("llama3-70b", 16, "prefill", 4),
    ("mixtral-8x7b", 8, "decode", 16),
)
"""(model, chips, phase, requests)"""


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


def small_problems() -> Iterator[tuple[str, Problem]]:
    """Problems whose strategies can all be looked at: the lecture's, two networks, and random graphs.

    The kinds of proposals and the temperature were chosen on the first two and on random graphs of seeds 100 to 105;
    the rest was looked at afterwards.
    """
    pairs = load_machine("h100-pairs")
    for name, gpus, memory in (("two-towers", 4, 64e6), ("lenet", 4, np.inf), ("rnn", 2, np.inf)):
        yield f"{name} on {gpus}", Problem(from_file(load_graph(name)), Machine(*pairs, gpus), memory)
    sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
    random_graph = import_module("opgraph.problems").random_graph
    for seed in range(200, 212, 2):
        graph = random_graph(np.random.default_rng(seed), 4)
        yield f"random {seed} on 4", Problem(graph, Machine(*pairs, 4))


def chains() -> Iterator[str]:
    """Chains from random strategies against the optimum: which find it within 1,000 evaluations, or proposals."""
    yield "problem          strategies moves   found within 1000  proposals  median at  worst"
    for name, problem in small_problems():
        best = exhaustive(problem)
        settings: list[tuple[str, Moves, float | None]] = [(moves, moves, None) for moves in MOVES]
        if problem.memory < np.inf:  # the lecture's temperature
            settings += [(f"{moves}, 1/0.1ms", moves, 1 / 1e-4) for moves in MOVES]
        for label, moves, beta in settings:
            found, early, worst = [], 0, 1.0
            for seed in range(CHAINS):
                start = problem.random(np.random.default_rng([seed, 2]))
                chain = Chain(start, (seed, 1), 10**6, beta, moves=moves)
                while chain.evaluations < 1000 and chain.proposals < 10_000:
                    chain.advance(problem, min(20, 1000 - chain.evaluations))
                    if chain.best_cost < best.cost * (1 + 1e-9):
                        found.append(chain.found_at)
                        early += chain.found_after <= 1000
                        break
                worst = max(worst, chain.best_cost / best.cost)
            yield (
                f"{name:<16} {best.feasible:>10} {label:<15} {len(found):>3} of {CHAINS} {early:>10} "
                f"{np.median(found) if found else 0:>10.0f} {worst:>6.3f}"
            )


def models() -> Iterator[str]:
    """Chains of 1,000 evaluations from random strategies of models, against the best template."""
    hardware, engine = load_machine("h100")
    for name, gpus, phase, requests in SEARCHED:
        model = load_model(name)
        formats = formats_of(model, hardware, engine, None, None)
        load = load_of(engine, phase, requests, 1024, 256)
        problem = searched_problem(model, hardware, engine, gpus, formats, load, 4)
        template, _ = best_template(problem)
        assert template is not None
        for moves in MOVES:
            ends = []
            for seed in range(10):
                chain = Chain(problem.random(np.random.default_rng([9, seed])), (seed,), 1000, moves=moves)
                ends.append(chain.advance(problem, 10**6).best_cost / template.cost)
            yield (
                f"{name}, {phase}, {gpus} chips, {moves}: {min(ends):.3f}, {np.median(ends):.3f}, {max(ends):.3f} "
                f"times {template.label} (the best, the middle and the worst of 10 chains)"
            )


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
    for part in (simulations, chains, models, levels):
        for line in part():
            print(line, flush=True)
        print()
