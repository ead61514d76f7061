"""Alpa's two levels: shardings by integer programme and stages by dynamic programme, against every possibility."""

from __future__ import annotations

import sys
from itertools import product
from math import inf

import numpy as np
import pytest
from opgraph.problems import machine, random_graph, shipped

from planner.costs.serving import formats_of
from planner.errors import InputError, NoPlanError
from planner.opgraph.cluster import Cluster, Kind, clusters, kind_of, total_of
from planner.opgraph.comparing import chip_room
from planner.opgraph.sharding import CHOICES, Choice, Options, View, along_chain, ilp, views
from planner.opgraph.stages import FORMS, Costs, Form, Shape, partition, shapes, total
from planner.opgraph.transformer import Load, from_model
from planner.specs.catalog import load_machine, load_model


def kind(model: str, hardware: str, gpus: int, load: Load, layers: int | None = None) -> Kind:
    spec = load_model(model)
    chips, engine = load_machine(hardware)
    formats = formats_of(spec, chips, engine, None, None)
    graph = from_model(spec, engine, formats, load, layers, gpus)
    return kind_of(graph, chips, engine, gpus, chip_room(spec, chips, engine, gpus, formats, None))


def test_submeshes_of_eight_by_eight_are_eleven() -> None:
    found = shapes(8, 8)
    assert len(found) == 11
    assert [str(shape) for shape in found[:5]] == ["1x1", "1x2", "1x4", "1x8", "2x8"]
    assert shapes(1, 1) == [Shape(1, 1)]
    with pytest.raises(InputError, match="power of two"):
        shapes(2, 6)


def every_pipeline(costs: Costs, form: Form, microbatches: int) -> float:
    """The least T over all cuts and all submeshes for each part."""
    best = inf
    meshes = [(kind, shape) for kind, own in enumerate(costs.chips) for shape in range(len(own))]
    for cuts in product((False, True), repeat=costs.units - 1):
        edges = [0, *(index + 1 for index, cut in enumerate(cuts) if cut), costs.units]
        parts = list(zip(edges[:-1], (edge - 1 for edge in edges[1:]), strict=True))
        for chosen in product(meshes, repeat=len(parts)):
            used = [0] * len(costs.there)
            for own, shape in chosen:
                used[own] += costs.chips[own][shape]
            if any(taken > there for taken, there in zip(used, costs.there, strict=True)):
                continue
            times = [float(costs.times[own][part][shape]) for part, (own, shape) in zip(parts, chosen, strict=True)]
            if max(times) < inf:
                best = min(best, total(times, form, microbatches))
    return best


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kinds", [1, 2])
def test_the_dynamic_programme_equals_every_possibility(form: Form, kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    for case in range(25):
        units, sizes = int(rng.integers(2, 6 - kinds)), [shapes(2, 2), shapes(1, 2)][:kinds]
        tables = []
        for own in sizes:
            work = rng.uniform(0.5, 2.0, units)
            table = np.full((units, units, len(own)), inf)
            for first in range(units):
                for last in range(first, units):
                    for place, shape in enumerate(own):
                        time = work[first : last + 1].sum() / shape.total ** rng.uniform(0.3, 1.0)
                        table[first, last, place] = inf if rng.random() < 0.15 else time
            tables.append(table)
        chips = tuple(tuple(shape.total for shape in own) for own in sizes)
        costs = Costs(tuple(tables), chips, (4, 2)[:kinds])
        microbatches = int(rng.integers(1, 9))
        expected = every_pipeline(costs, form, microbatches)
        if expected == inf:
            with pytest.raises(NoPlanError, match="nothing fits"):
                partition(costs, form, microbatches)
            continue
        found = partition(costs, form, microbatches)
        assert found.seconds == pytest.approx(expected, rel=1e-9), case
        assert total([stage.seconds for stage in found.stages], form, microbatches) == pytest.approx(found.seconds)
        assert [stage.first for stage in found.stages] == [0, *(stage.last + 1 for stage in found.stages[:-1])]


def test_forms_of_the_pipelines_time() -> None:
    assert total((1.0, 2.0, 1.5), "training", 8) == 18.5  # Alpa, equation 2
    assert total((1.0, 2.0, 1.5), "inference", 8) == 6.0


def test_clusters_are_even_where_crossings_are_alike_and_avoid_large_ones() -> None:
    assert clusters([1.0] * 12, [1.0] * 12, 4) == [0, 3, 6, 9]
    assert clusters([1.0] * 4, [1.0] * 4, 9) == [0, 1, 2, 3]
    crossing = [0.0, 1.0, 9.0, 9.0, 1.0, 9.0]
    assert set(clusters([1.0] * 6, crossing, 3)) == {0, 1, 4}
    assert clusters([1.0, 1.0, 1.0, 20.0], [1.0] * 4, 2) == [0, 3]


@pytest.mark.parametrize("seed", range(6))
def test_the_integer_programme_equals_every_possibility(seed: int) -> None:
    """On graphs of three or four operators that branch and join, with and without a limit on memory."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 3 + seed % 2)
    options = Options(graph, machine(4), View(2, 2) if seed % 3 else View(1, 4))
    places = [np.flatnonzero(np.isfinite(options.node(index)[0])).tolist() for index in range(len(graph.operators))]
    every = {choices: options.cost(choices) for choices in product(*places)}
    held = {choices: sum(float(options.node(index)[1][own]) for index, own in enumerate(choices)) for choices in every}
    found = ilp(options)
    assert found.seconds == pytest.approx(min(every.values()), rel=1e-9)
    memory = (min(held.values()) + found.bytes) / 2
    tight = ilp(options, memory)
    expected = min(seconds for choices, seconds in every.items() if held[choices] <= memory)
    assert tight.seconds == pytest.approx(expected, rel=1e-9)
    assert tight.bytes <= memory * (1 + 1e-6)
    with pytest.raises(NoPlanError, match="the least that they hold"):
        ilp(options, min(held.values()) * 0.9)


def test_without_scipy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    problem = shipped("lenet", 4)
    with pytest.raises(InputError, match=r"needs scipy: pip install 'parallel-strategy-planner\[search\]'"):
        ilp(Options(problem.graph, problem.machine, View(2, 2)))


def test_along_a_chain_the_programmes_agree() -> None:
    problem = shipped("lenet", 4)
    for view in views(4):
        options = Options(problem.graph, problem.machine, view)
        seconds, held = along_chain(options, [0], len(problem.graph.operators) - 1)
        whole = ilp(options)
        assert float(seconds[0, -1]) == pytest.approx(whole.seconds, rel=1e-9)
        assert np.all(np.diff(held[0]) >= 0)


def test_choices_are_named_as_alpa_names_them() -> None:
    assert {choice.text for choice in CHOICES} == {"S01", "S0P1", "S0", "S1P0", "P01", "P0", "S1", "P1", "R"}
    assert Choice((0,), (1,)).text == "S0P1"


def test_a_uniform_transformer_on_two_nodes_is_tensor_parallel_inside_and_a_pipeline_across() -> None:
    """Because an all-reduce across nodes costs more than a stage boundary, whose bytes are sent once a microbatch."""
    load = Load("decode", 8, 1024, 8 * 1280)
    cluster = Cluster([kind("llama3.1-405b", "h100", 16, load, 30)])
    stages = cluster.solve("training", 8)
    assert [str(stage.shape) for stage in stages] == ["1x8", "1x8"]
    assert all(stage.intra.view == View(1, 8) for stage in stages)
    last = len(cluster.kinds[0].graph.operators) - 1
    alone = cluster.times[0].stage(Shape(2, 8), 0, last).seconds
    assert total([alone], "training", 8) > 1.2 * total_of(stages, "training", 8)
    across, inside = (Options(cluster.kinds[0].graph, machine(16, "h100"), view) for view in (View(1, 16), View(2, 8)))
    all_sixteen = across.node(1)[0][CHOICES.index(Choice((), (1,)))]
    eight = inside.node(1)[0][CHOICES.index(Choice((), (1,)))]
    assert all_sixteen > eight  # sixteen ways a layer is slower than eight: the all-reduce leaves the node


@pytest.mark.parametrize(
    ("model", "chips", "layers", "least"),
    [
        ("llama3.2-1b", (("h100", 4),), None, 0.10),  # a head as heavy as five layers
        ("llama4-maverick", (("h100", 8),), 8, 0.02),  # experts in every second layer
        ("llama3-8b", (("h100", 4), ("a100-80gb-sxm", 4)), None, 0.15),  # two kinds of chips
    ],
)
def test_where_layers_or_chips_differ_uneven_stages_win(
    model: str, chips: tuple[tuple[str, int], ...], layers: int | None, least: float
) -> None:
    load = Load("decode", 8, 1024, 16 * 1280)
    cluster = Cluster([kind(model, name, gpus, load, layers) for name, gpus in chips])
    best = total_of(cluster.solve("training", 16), "training", 16)
    for by in ("layers", "operators"):
        even = cluster.even(by, "training", 16)  # type: ignore[arg-type]
        assert even is not None
        gain = total_of(even, "training", 16) / best - 1
        print(f"{model}: {100 * gain:.1f} % over equal {by}")
        assert gain >= least


def test_stages_need_a_chain_and_memory() -> None:
    problem = shipped("two-towers", 4)
    with pytest.raises(InputError, match="tower b: stages need operators that each read the one before"):
        Cluster([kind_of(problem.graph, *load_machine("h100-pairs"), 4, inf)])
    load = Load("decode", 8, 1024, 8 * 1280)
    with pytest.raises(NoPlanError, match="nothing fits"):
        Cluster([kind("llama3.1-405b", "h100", 8, load)]).solve("inference", 1)
    with pytest.raises(InputError, match="whole nodes of 8"):
        kind("llama3-8b", "h100", 12, load)
