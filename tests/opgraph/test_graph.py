"""Operator graphs: what is wrong with a file is said with its key, and a model's graph holds what the model holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from planner.costs.serving import formats_of
from planner.costs.weights import Shard, Stages, layer_elements, stage_weight_bytes
from planner.errors import InputError, SpecError
from planner.opgraph.comparing import graph_problem, model_problem
from planner.opgraph.graph import from_file
from planner.opgraph.machine import Machine
from planner.opgraph.problem import Problem
from planner.opgraph.strategies import splits, template
from planner.opgraph.transformer import Load, from_model
from planner.specs.catalog import load_graph, load_machine, load_model

ROWS = {"name": "rows", "size": 8, "kind": "sample"}
WIDTH = {"name": "width", "size": 12, "kind": "parameter"}


def graph(**changes: Any) -> dict[str, Any]:
    first = {"name": "a", "dims": [dict(ROWS), dict(WIDTH)], "flops": 1e6}
    second = {"name": "b", "dims": [dict(ROWS), dict(WIDTH)], "inputs": [{"operator": "a", "needs": {"rows": "rows"}}]}
    second |= changes
    return {"name": "mine", "operators": [first, second]}


BAD = {
    "is empty": "",
    "operators: is empty": {"name": "mine", "operators": []},
    "operators: missing": {"name": "mine"},
    "operators.1.name: 'a' is there twice": graph(name="a", inputs=[]),
    "operators.1.inputs.0.operator: unknown operator 'c'; expected one of a, b": graph(inputs=[{"operator": "c"}]),
    "go in a circle: b reads b": graph(inputs=[{"operator": "b"}]),
    "operators.1.inputs.0.needs.rows: rows of a has 8, rows here has 12: expected that one divides the other": graph(
        dims=[{**ROWS, "size": 12}, dict(WIDTH)]
    ),
    "operators.1.inputs.0.needs.depth: no dimension of the output of a (rows, width)": graph(
        inputs=[{"operator": "a", "needs": {"depth": "rows"}}]
    ),
    "operators.1.inputs.0.needs.rows: found 'lines', expected one of rows, width": graph(
        inputs=[{"operator": "a", "needs": {"rows": "lines"}}]
    ),
    "operators.1.dims: is empty": graph(dims=[]),
    "operators.1.dims.1.name: 'rows' is there twice": graph(dims=[dict(ROWS), dict(ROWS)]),
    "operators.1.dims.0.size: found 0, expected at least 1": graph(dims=[{**ROWS, "size": 0}]),
    "operators.1.dims.0.kind: found 'batch', expected one of": graph(dims=[{**ROWS, "kind": "batch"}]),
    "operators.1.dims.0.closed_by: stands with kind 'sample'": graph(dims=[{**ROWS, "closed_by": "all_reduce"}]),
    "expected one kind of collective per operator": graph(
        dims=[
            dict(ROWS),
            {**WIDTH, "closed_by": "all_reduce"},
            {**WIDTH, "name": "other", "closed_by": "all_gather"},
        ]
    ),
    "operators.1.flops: found -1": graph(flops=-1),
    "operators.1.speed: unknown key": graph(speed=3),
    "operators.1.kernel: found 'conv'": graph(kernel="conv"),
}


@pytest.mark.parametrize("problem", BAD)
def test_what_is_wrong_with_a_graph_is_said_with_its_key(problem: str, tmp_path: Path) -> None:
    path, content = tmp_path / "mine.yaml", BAD[problem]
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(SpecError) as caught:
        load_graph(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_longer_circle_is_named(tmp_path: Path) -> None:
    content = graph()
    content["operators"][0]["inputs"] = [{"operator": "b"}]
    (tmp_path / "round.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SpecError, match=r"operators\.0\.inputs: go in a circle: a reads b reads a"):
        load_graph(tmp_path / "round.yaml")


def test_operators_may_stand_in_any_order(tmp_path: Path) -> None:
    content = graph()
    content["operators"].reverse()
    (tmp_path / "late.yaml").write_text(yaml.safe_dump(content))
    read = from_file(load_graph(tmp_path / "late.yaml"))
    assert [operator.name for operator in read.operators] == ["a", "b"]
    assert splits(read.operators[0], 4) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1)]


def test_arithmetic_that_the_chip_does_not_have() -> None:
    with pytest.raises(InputError, match="graph lenet: dtype: h100-sxm does not compute in fp32"):
        graph_problem(load_graph("lenet"), *load_machine("h100"), 4, None, "blocks")


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("llama3-8b", 1, 1),
        ("llama3-8b", 8, 1),
        ("mixtral-8x7b", 4, 1),
        ("deepseek-v2-lite", 4, 1),
        ("deepseek-v2-lite", 8, 8),
    ],
)
def test_a_chip_holds_what_the_memory_model_says(name: str, tp: int, ep: int) -> None:
    model = load_model(name)
    hardware, engine = load_machine("h100")
    formats = formats_of(model, hardware, engine, None, None)
    built = from_model(model, engine, formats, Load("decode", 8, 1024, 1280), ranks=8)
    problem = Problem(built, Machine(hardware, engine, 8))
    shard = Shard.for_engine(model, engine, "bf16", tp, ep=ep)
    weights = float(stage_weight_bytes(model, shard, Stages.of(model, 1), formats.weights)[0])
    attention, elements = model.attention, 2.0 * model.attention.kv_heads / tp * model.attention.head_dim
    if attention.latent is not None:  # the same vector for all heads; the expansion is held twice (vLLM)
        elements = attention.latent.kv_rank + attention.latent.rope_dim
        wide = attention.latent.nope_dim + attention.latent.value_dim
        weights += attention.latent.kv_rank * attention.heads / tp * wide * 2 * model.layers
    kv = 8 * 1280 * elements * 2 * model.layers
    held = problem.loads(template(built, problem.machine, tp, 1, 1, ep))[0]
    assert held == pytest.approx(weights + kv, rel=1e-6)


def test_experts_hold_and_read_what_they_are() -> None:
    model = load_model("mixtral-8x7b")
    hardware, engine = load_machine("h100")
    formats = formats_of(model, hardware, engine, None, None)

    def work(requests: int) -> Any:
        built = from_model(model, engine, formats, Load("decode", requests, 1024, 1280), 1, 8)
        return built.operators[2].work

    ones, shard = (1, 1, 1, 1, 1), Shard.of(model, 1)
    (kind,) = set(model.layer_kinds())
    attention = from_model(model, engine, formats, Load("decode", 1, 1024, 1280), 1, 8).operators[1].work
    whole = float(layer_elements(model, shard, kind).bytes(model, formats.weights))
    assert work(1).weight_bytes(ones) + attention.weight_bytes(ones) == pytest.approx(whole)
    matrices = 3 * 4096 * 14336 * 2
    read = [sum(float(each.weight_bytes) for each in work(many).operations(ones)) for many in (1, 1000)]
    assert read[0] == pytest.approx(2 * matrices, rel=0.01)
    assert read[1] == pytest.approx(8 * matrices, rel=0.01)


def test_some_layers_get_their_share_of_the_memory() -> None:
    model = load_model("llama3-70b")
    hardware, engine = load_machine("h100")
    formats = formats_of(model, hardware, engine, None, None)
    load = Load("decode", 16, 1024, 1280)
    few, all_ = (model_problem(model, hardware, engine, 8, formats, load, layers) for layers in (8, None))
    assert 0.09 < few.memory / all_.memory < 0.16
    for tp in (1, 2, 4, 8):
        assert few.fits(template(few.graph, few.machine, tp, 1, 1)) == all_.fits(
            template(all_.graph, all_.machine, tp, 1, 1)
        )


def test_what_is_not_priced_and_what_is_not_there() -> None:
    hardware, engine = load_machine("h100")
    model = load_model("minimax-text-01")
    with pytest.raises(InputError, match="linear attention"):
        from_model(model, engine, formats_of(model, hardware, engine, "bf16", None), Load("decode", 1, 1, 1))
    model = load_model("llama3-8b")
    formats = formats_of(model, hardware, engine, None, None)
    with pytest.raises(InputError, match="--layers 33: llama3-8b has 1 to 32"):
        from_model(model, engine, formats, Load("decode", 1, 1, 1), 33)


def test_parallel_blocks_are_one_operator_a_layer() -> None:
    model = load_model("palm-8b")
    hardware, engine = load_machine("tpu-v4")
    built = from_model(
        model, engine, formats_of(model, hardware, engine, None, None), Load("decode", 4, 64, 64), ranks=4
    )
    assert len(built.operators) == model.layers + 2
    assert np.all([operator.name.endswith("block") for operator in built.operators[1:-1]])
