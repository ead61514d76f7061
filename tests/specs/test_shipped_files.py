"""Every file under `configs`: valid, sourced, honest about what is assumed, and usable with every other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml
from helpers import CONFIGS, every

from planner import Hardware, Model, estimate_points, load_engine, load_hardware, load_machine, load_model
from planner.costs.collectives import Network
from planner.plans.placement import Placement
from planner.specs import catalog
from planner.specs.catalog import ENGINES, FAMILIES, GRAPHS, HARDWARE, MODELS, Family, names
from planner.specs.dtypes import KV_CACHE, WEIGHTS
from planner.specs.fields import Provenance
from planner.specs.hardware import KINDS, LATENT_KINDS, STAND_INS
from planner.specs.merging import merge
from planner.specs.structure import trusted, validated

FILES = [(family, name) for family in (*FAMILIES, GRAPHS) for name in names(family)]
PAIRS = list(product(names(HARDWARE), names(ENGINES)))
of_every_file = every("family, name", FILES)
of_every_model = every("name", names(MODELS))
of_every_hardware = every("name", names(HARDWARE))
of_every_engine = every("name", names(ENGINES))
of_every_pair = every("hardware, engine", PAIRS)

REQUIRED = {
    "models": """
        llama3-8b llama3-70b llama3.1-8b llama3.1-70b llama3.1-405b llama2-7b llama2-13b llama2-70b
        qwen2.5-7b qwen2.5-32b qwen2.5-72b qwen3-8b qwen3-32b mistral-7b opt-13b opt-66b opt-175b
        palm-8b palm-62b palm-540b palm-540b-padded palm-540b-multihead falcon-180b mt-nlg-530b
    """,
    "hardware": """
        h100-sxm h200-sxm a100-80gb-sxm b200-sxm l40s mi300x tpu-v4 tpu-v5e h100-lecture tpu-v4-lecture
    """,
    "engines": "vllm sglang trtllm ideal lecture",
}
ALIASES = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-80gb-sxm", "b200": "b200-sxm"}
HF_IDS = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-70B-Instruct": "llama3-70b",
    "meta-llama/Llama-3.1-405B": "llama3.1-405b",
    "meta-llama/Llama-2-13b-hf": "llama2-13b",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b",
    "Qwen/Qwen3-8B": "qwen3-8b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "facebook/opt-66b": "opt-66b",
    "tiiuae/falcon-180B": "falcon-180b",
}


@cache
def written(folder: str, name: str) -> dict[str, Any]:
    """The keys of a shipped file, laid over those of the file that it extends."""
    raw = yaml.safe_load((CONFIGS / folder / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(raw, dict)
    base = raw.pop("extends", None)
    if base is None:
        return raw
    below = {
        key: value for key, value in written(folder, base).items() if key not in ("aliases", "hf_ids", "published")
    }
    return merge(below, raw)


def provenances(value: Any, path: str = "") -> Iterator[tuple[str, Provenance]]:
    """Every provenance inside a specification, with the path of its key."""
    if isinstance(value, Provenance):
        yield path, value
        return
    if hasattr(value, "_fields"):
        items: Any = zip(value._fields, value, strict=True)
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return
    for key, item in items:
        yield from provenances(item, f"{path}.{key}" if path else str(key))


# --- validity ---------------------------------------------------------------------------------------------------------


@of_every_file
def test_a_shipped_file_is_valid_and_the_quick_way_builds_what_validation_does(family: Family[Any], name: str) -> None:
    raw = written(family.folder, name)
    quick, checked = trusted(family.kind, raw), validated(family.kind, raw, name)
    assert quick == checked == catalog.load(family, name)
    assert repr(quick) == repr(checked)  # 1 and 1.0, or a list and a tuple, are equal but do not behave alike


@of_every_file
def test_a_shipped_file_is_named_as_it_calls_itself(family: Family[Any], name: str) -> None:
    assert catalog.load(family, name).name == name


def test_every_file_under_configs_belongs_to_a_family() -> None:
    found = {(path.parent.name, path.stem) for path in CONFIGS.rglob("*") if path.is_file()}
    assert found == {(family.folder, name) for family, name in FILES}
    assert all(path.suffix == ".yaml" for path in CONFIGS.rglob("*") if path.is_file())


def test_no_two_files_of_a_family_answer_to_the_same_name() -> None:
    for folder in {family.folder for family in FAMILIES}:
        taken: dict[str, str] = {}
        for family, name in [(family, name) for family, name in FILES if family.folder == folder]:
            spec = catalog.load(family, name)
            for other in (name, *spec.aliases, *getattr(spec, "hf_ids", ())):
                assert taken.setdefault(other.lower(), name) == name


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [MODELS, HARDWARE, ENGINES], ids=lambda family: family.folder)
def test_the_names_that_were_promised_exist(family: Family[Any]) -> None:
    assert set(REQUIRED[family.folder].split()) <= set(names(family))


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_short_aliases_name_the_hardware(alias: str, name: str) -> None:
    assert load_hardware(alias) == load_hardware(name) == load_hardware(alias.upper())


@pytest.mark.parametrize(("hf_id", "name"), HF_IDS.items())
def test_hugging_face_ids_name_the_model_in_any_case(hf_id: str, name: str) -> None:
    assert load_model(hf_id) == load_model(hf_id.lower()) == load_model(hf_id.upper()) == load_model(name)


def test_the_serving_variants_of_palm_differ_from_it_as_the_paper_says() -> None:
    """Pope et al. 2022, Table 1: 48 heads padded to 64; the multihead variant has as many KV heads as heads."""
    palm, padded, multihead = (load_model(name) for name in ("palm-540b", "palm-540b-padded", "palm-540b-multihead"))
    assert (palm.attention.heads, palm.attention.kv_heads, palm.attention.head_dim) == (48, 1, 256)
    assert padded.attention == palm.attention._replace(heads=64)
    assert multihead.attention.kv_heads == multihead.attention.heads
    assert multihead.attention.head_dim == 128


# --- sources ----------------------------------------------------------------------------------------------------------


@of_every_model
def test_a_model_says_where_its_shapes_are_from(name: str) -> None:
    model: Model = load_model(name)
    assert model.sources
    assert all(source.strip() for source in model.sources)
    assert model.published is None or model.published.source.strip()
    assert model.weights in WEIGHTS


@of_every_hardware
def test_every_figure_of_the_silicon_and_the_wires_has_a_source(name: str) -> None:
    machine: Hardware = load_hardware(name)
    chip = {"compute_tflops", "memory_gib", "memory_bandwidth_gb_per_s"}
    if machine.chip.tdp_w is not None:
        chip.add("tdp_w")
    assert chip <= {figure for figure, source in machine.chip.sources.items() if source.strip()}
    for level in machine.network:
        assert level.sources["bandwidth_gb_per_s"].strip()
    if machine.price is not None:
        assert machine.price.source.strip()
        assert machine.price.offer.strip()
        assert machine.price.date[:2] == "20"


@of_every_hardware
def test_every_group_of_constants_of_a_hardware_file_says_where_it_is_from(name: str) -> None:
    machine = load_hardware(name)
    expected = {f"kernels.{kind}.{dtype}.provenance" for kind, rows in machine.kernels.items() for dtype in rows}
    expected |= {
        f"kernels.{kind}.{dtype}.in_step.provenance"
        for kind, rows in machine.kernels.items()
        for dtype, constants in rows.items()
        if constants.in_step
    }
    expected |= {f"collectives.{place}.provenance" for place in range(len(machine.collectives))}
    found = dict(provenances(machine))
    assert set(found) == expected
    assert all(provenance.source.strip() for provenance in found.values())


@of_every_engine
def test_every_group_of_constants_of_an_engine_file_says_where_it_is_from(name: str) -> None:
    engine = load_engine(name)
    found = dict(provenances(engine))
    overlap = {f"{key}.provenance" for key in ("overlap", "sequence_overlap") if getattr(engine, key)}
    assert set(found) == {"host.provenance", "memory.provenance", *overlap}
    assert all(provenance.source.strip() for provenance in found.values())
    overrides = [value for chip in engine.chips.values() for value in chip.get("collectives", ())]
    overrides += [
        row for chip in engine.chips.values() for rows in chip.get("kernels", {}).values() for row in rows.values()
    ]
    assert all(row["provenance"]["source"].strip() for row in overrides)


@of_every_pair
def test_what_is_assumed_never_looks_measured(hardware: str, engine: str) -> None:
    for spec in load_machine(hardware, engine):
        for path, provenance in provenances(spec):
            if provenance.status in ("assumed", "textbook", "datasheet"):
                assert provenance.residual is None, path
            if provenance.status == "fitted":
                assert provenance.residual is not None, path


# --- use --------------------------------------------------------------------------------------------------------------


@of_every_hardware
def test_a_hardware_file_is_complete(name: str) -> None:
    machine = load_hardware(name)
    assert machine.engine in names(ENGINES)
    assert set(machine.kernels) - {*LATENT_KINDS, *STAND_INS} == set(KINDS)
    native = [kind for kind in machine.kernels if kind not in STAND_INS]
    assert all(machine.chip.native_dtype in machine.kernels[kind] for kind in native)
    for kind in STAND_INS:  # measured, or those of the kind that stands in for it, as an assumption
        for dtype in machine.chip.compute_tflops:
            constants = machine.constants(kind, dtype)[1]
            assert dtype in machine.kernels.get(kind, {}) or constants.provenance.status == "assumed"
    assert all(level.chips for level in machine.network[:-1])
    levels = {level.name for level in machine.network}
    assert {row.level for row in machine.collectives} == levels


@of_every_engine
def test_an_engine_file_refers_to_what_exists(name: str) -> None:
    engine = load_engine(name)
    kernels = {row.kernel for machine in names(HARDWARE) for row in load_machine(machine, name)[0].collectives}
    assert {kernel for rule in engine.collectives for kernel in rule.kernels} <= kernels
    assert set(engine.chips) <= set(names(HARDWARE))
    assert {engine.kv_cache.default, *engine.kv_cache.by_weights.values()} <= set(KV_CACHE)
    assert set(engine.kv_cache.by_weights) <= set(WEIGHTS)
    assert set(engine.attention) <= {"heads", "batch"}
    assert engine.attention
    assert set(engine.ffn) <= {"1d", "2d", "wg-x", "wg-xy", "wg-xyz"}
    assert engine.ffn[0] == "1d"


def group_sizes(machine: Hardware) -> list[int]:
    """Group sizes that reach every level: the smallest group inside the innermost one, and one that spans each next."""
    return [2, *(2 * level.chips for level in machine.network[:-1] if level.chips)]


@of_every_pair
def test_every_engine_has_a_kernel_for_every_collective_on_every_level(hardware: str, engine: str) -> None:
    machine, software = load_machine(hardware, engine)
    slices = [shape.chips for shape in machine.torus.legal_slices()] if machine.torus else [64]
    network = Network(Placement.of(machine, max(slices)), software)
    for ranks in group_sizes(machine):
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            small, large = network.seconds(op, ranks, np.array([16.0, 64e6]))
            assert 0 < small < large < np.inf, (op, ranks)
    for crossing in (False, True):
        assert 0 < network.send(16.0, crossing).item() < 1


def priced(hardware: str, engine: str, attention: str, degrees: list[int]) -> list[dict[str, Any]]:
    """Plans of these degrees, two stages and two replicas where it is 2: together, since they share all names."""
    twice = [2 if tp == 2 else 1 for tp in degrees]
    points = {
        "model": ["llama3-8b"],
        "hardware": [hardware],
        "engine": [engine],
        "attention": [attention],
        "concurrency": [4],
        "isl": [64],
        "osl": [8],
        "memory_fraction": [0.6],  # leaves room for what a GPU's engine takes outside its budget on the smallest chip
    }
    results = estimate_points(points | {"tp": degrees, "pp": twice, "dp": twice}, len(degrees))
    assert [error for error in results.columns["error"] if error is not None] == []
    return results.rows()


@of_every_pair
def test_every_engine_prices_plans_on_every_hardware(hardware: str, engine: str) -> None:
    sharding = load_engine(engine).attention[-1]  # batch where the engine can, since that takes all-to-alls
    plans = [("heads", {4: "TP4", 16: "TP16"}), (sharding, {2: "TP2xPP2xDP2"})]
    rows = [
        (label if attention == "heads" else f"{label}/{attention}", row)
        for attention, labels in (plans if sharding != "heads" else [("heads", plans[0][1] | plans[1][1])])
        for label, row in zip(labels.values(), priced(hardware, engine, attention, list(labels)), strict=True)
    ]
    assert len(rows) == 3
    for plan, row in rows:
        assert row["plan"] == plan
        assert 0 < row["tpot_ms"] < row["latency_ms"] < 60_000
        assert 0 < row["memory_gib"] <= row["memory_limit_gib"]
