"""The simulator: full and delta give one timeline, which is what a schedule must be and what the cost engine says."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from opgraph.problems import machine, random_graph, shipped

from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure
from planner.costs.serving import formats_of
from planner.costs.step import Replica, pass_time
from planner.opgraph.graph import Dim, Edge
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Problem
from planner.opgraph.simulator import Simulation
from planner.opgraph.strategies import Config, blocks, coordinates, pieces, template, tensor_parallel
from planner.opgraph.transformer import Load, from_model
from planner.specs.catalog import load_machine, load_model
from planner.specs.engine import Host


def timeline(simulation: Simulation) -> dict[tuple[object, ...], tuple[float, float]]:
    return {span[:4]: (span.ready, span.end) for span in simulation.spans()}


SHAPES = ((0, 4, 4, 6000), (1, 4, 5, 1500), (2, 8, 4, 1900), (3, 4, 24, 400), (5, 8, 10, 200))
"""(seed, chips, operators, edits); odd seeds put tasks anywhere."""


@pytest.mark.parametrize(("seed", "gpus", "operators", "edits"), SHAPES)
def test_delta_equals_full_over_ten_thousand_random_edits(seed: int, gpus: int, operators: int, edits: int) -> None:
    rng = np.random.default_rng(seed)
    problem = Problem(random_graph(rng, operators), machine(gpus), devices="any" if seed % 2 else "blocks")
    simulation = Simulation(problem.templates, problem.random(rng))
    most = 0
    for _ in range(edits):
        several = rng.permutation(operators)[: 1 if rng.random() < 0.7 else 3].tolist()
        before = simulation.cost
        simulation.change_all({operator: problem.draw(operator, rng) for operator in several})
        if rng.random() < 0.5:
            simulation.undo()
            assert simulation.cost == before
        full = Simulation(problem.templates, tuple(simulation.strategy))
        assert simulation.cost == full.cost
        times = [simulation._ready[task] for task in simulation._order[0]]
        assert sorted(times) == times
        most = max(most, full.tasks)
        if rng.random() < 0.2:
            assert timeline(simulation) == timeline(full)
            assert simulation.busy() == pytest.approx(full.busy(), rel=1e-12)
    assert most >= 40


def test_delta_redoes_what_lies_behind_a_change_only() -> None:
    """On 64 chips less than two thirds of the tasks, for a change anywhere; the benchmark has the times."""
    hardware, engine = load_machine("h100")
    model = load_model("llama3-8b")
    formats = formats_of(model, hardware, engine, None, None)
    problem = Problem(
        from_model(model, engine, formats, Load("decode", 64, 1024, 1280), 6, 64), Machine(hardware, engine, 64)
    )
    simulation = Simulation(problem.templates, template(problem.graph, problem.machine, 8, 1, 8))
    rng, tasks = np.random.default_rng(0), simulation.tasks
    redone = []
    for operator in range(len(problem.space)):
        for config in (problem.draw(operator, rng) for _ in range(3)):
            simulation.change(operator, config)
            assert simulation._undo is not None
            redone.append(len(simulation._undo.redone) / tasks)
            simulation.undo()
    assert simulation.tasks == tasks
    assert np.mean(redone) < 0.66
    assert min(redone) < 0.1  # the head


def test_a_timeline_is_a_schedule() -> None:
    """Tasks wait for those that they read, no lane runs two at once, and a lane never idles while a task is ready."""
    rng = np.random.default_rng(5)
    problem = Problem(random_graph(rng, 12), machine(8))
    for _ in range(20):
        simulation = Simulation(problem.templates, problem.random(rng))
        lanes: dict[int, list[tuple[float, float, float]]] = {}
        for span in simulation.spans():
            lanes.setdefault(span.lane, []).append((span.ready, span.start, span.end))
        for spans in lanes.values():
            spans.sort(key=lambda span: span[2])
            free = 0.0
            for ready, start, end in spans:
                assert start == pytest.approx(max(ready, free), rel=1e-9, abs=1e-15)
                free = end
        for task, before in enumerate(simulation._before):
            if task not in simulation._free:
                assert simulation._ready[task] == max((simulation._end[other] for other in before), default=0.0)


def test_pieces_are_the_intersections_of_sub_tensors() -> None:
    """Every task receives exactly what it needs, counted element by element."""
    rng = np.random.default_rng(3)
    problem = shipped("two-towers", 4)
    source, reader = problem.graph.operators[0], problem.graph.operators[1]
    edge = reader.inputs[0]
    for _ in range(100):
        have, want = problem.draw(0, rng), problem.draw(1, rng)
        found = pieces(source, reader, edge, have, want, problem.machine)
        for task, part in enumerate(coordinates(want.degrees)):
            device = want.devices[task]
            rows = set(range(4096 * part[0] // want.degrees[0], 4096 * (part[0] + 1) // want.degrees[0]))
            expected = {}
            for holder, own in enumerate(coordinates(have.degrees)):
                theirs = set(range(4096 * own[0] // have.degrees[0], 4096 * (own[0] + 1) // have.degrees[0]))
                size = len(rows & theirs) * 1000 // have.degrees[1] * 4
                if size:
                    expected[holder] = 0 if have.devices[holder] == device else size
            assert {piece.holder: piece.size for piece in found if piece.reader == task} == pytest.approx(expected)


def test_a_copy_that_a_collective_left_is_read_where_it_is() -> None:
    problem = shipped("two-towers", 4)
    source, reader = problem.graph.operators[0], problem.graph.operators[1]
    dims = (source.dims[0], Dim("inner", 8, "parameter", "all_reduce"), Dim("width", 1000))
    summed = source._replace(dims=dims)
    have, want = Config((1, 4, 1), (0, 1, 2, 3)), Config((4, 1), (0, 1, 2, 3))
    assert all(piece.size == 0 for piece in pieces(summed, reader, Edge(0, (0, None)), have, want, problem.machine))
    partly = Config((1, 2, 1), (0, 1))
    found = pieces(summed, reader, Edge(0, (0, None)), partly, want, problem.machine)
    assert [piece.size for piece in found] == [0, 0, 1024 * 4000, 1024 * 4000]


def test_links_and_shared_cards() -> None:
    """Pairs have ports of their own; what leaves a pair waits for its one card, at the card's whole rate."""
    four = machine(4)
    fast, slow = four.transfer(0, 1, 36e6), four.transfer(0, 2, 36e6)
    assert fast[1] == pytest.approx(2e-6 + 36e6 / 360e9)
    assert slow[1] == pytest.approx(5e-6 + 36e6 / 40e9)
    assert four.transfer(1, 3, 1.0)[0] == slow[0] != four.transfer(2, 0, 1.0)[0]
    assert four.transfer(1, 0, 1.0)[0] != fast[0]


DENSE = ((1, 1, 1, 1), (4, 2, 2, 1), (2, 4, 2, 1), (1, 1, 4, 1))
SPREAD = ((2, 1, 1, 1), (4, 2, 2, 4), (8, 1, 2, 8))
MODELS = (
    ("llama3-8b", "h100", DENSE),
    ("palm-62b", "h200", DENSE),
    ("qwen2.5-7b", "b200", DENSE),
    ("mixtral-8x7b", "h100", SPREAD),
    ("deepseek-v3", "h200", SPREAD),  # latent attention, three dense layers before those with experts
)


@pytest.mark.parametrize(("model", "hardware", "plans"), MODELS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_template_takes_what_the_analytic_engine_says(
    model: str, hardware: str, plans: tuple[tuple[int, int, int, int], ...], phase: str
) -> None:
    """TP x PP x DP x EP of one pass, host time left out of both: within 1 %."""
    machine_, engine = load_machine(hardware)
    engine = engine._replace(
        host=Host(provenance=engine.host.provenance, step_us=0.0, per_sequence_us=0.0), overlap=None
    )
    spec = load_model(model)
    formats = formats_of(spec, machine_, engine, None, None)
    load = Load("prefill", 4, 512, 768) if phase == "prefill" else Load("decode", 16, 1024, 1280)
    chips = Machine(machine_, engine, 16)
    problem = Problem(from_model(spec, engine, formats, load, ranks=16), chips)
    for tp, pp, dp, ep in plans:
        if any(dim.ways and tp not in dim.ways for dim in problem.graph.operators[1].dims):
            continue
        simulated = Simulation(problem.templates, template(problem.graph, chips, tp, pp, dp, ep)).cost
        degrees = [np.array([each]) for each in (tp, pp, dp)]
        network = Network(chips.placement, engine)
        replica = Replica(spec, machine_, engine, network, formats, Structure(), *degrees, ep=np.array([ep]))
        each = load.requests / dp
        work = load.work(each, float(load.context)) if phase == "prefill" else Pass(each, 1024.0)
        analytic = float(np.squeeze(pass_time(replica, work).whole.total))
        assert simulated == pytest.approx(analytic, rel=0.01), (tp, pp, dp, ep)


def test_tensor_parallel_splits_what_it_can() -> None:
    problem = shipped("rnn", 4)
    for operator, config in zip(problem.graph.operators, tensor_parallel(problem.graph, problem.machine), strict=True):
        assert prod(config.degrees) == config.degrees[1] == 4, operator.name
        assert config in blocks(operator, problem.machine)
