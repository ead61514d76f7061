"""Finding files: names, aliases, ids, paths, directories of the user's own, and what `extends` lays over what."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import CONFIGS, run

from planner import InputError, SpecError, load_engine, load_hardware, load_machine, load_model
from planner.specs import catalog
from planner.specs.catalog import DIFFUSION, ENGINES, HARDWARE, MODELS
from planner.specs.fields import Provenance
from planner.specs.hardware import Price
from planner.specs.merging import merge

pytestmark = pytest.mark.usefixtures("fresh_catalog")


def put(path: Path, **keys: Any) -> Path:
    """A YAML file of these keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(keys))
    return path


# --- by name ----------------------------------------------------------------------------------------------------------


def test_a_name_an_alias_an_id_and_a_path_lead_to_the_same_file() -> None:
    path = CONFIGS / "models" / "llama3-8b.yaml"
    expected = load_model("llama3-8b")
    assert load_model("meta-llama/Meta-Llama-3-8B") == expected
    assert load_model("META-LLAMA/META-LLAMA-3-8B") == expected
    assert load_model(path) == load_model(str(path)) == expected
    assert load_hardware("h100") == load_hardware("H100") == load_hardware(CONFIGS / "hardware" / "h100-sxm.yaml")
    assert load_engine(CONFIGS / "engines" / "vllm.yaml") == load_engine("vllm")


def test_names_are_found_in_any_case() -> None:
    assert load_model("Llama3-8B") == load_model("llama3-8b")
    assert load_engine("vLLM") == load_engine("vllm")


@pytest.mark.parametrize(
    "name", ["lama3-8b", "", "  ", "../models/llama3-8b", "models/llama3-8b", "llama3-8b.yml2", "*"]
)
def test_what_is_no_name_is_an_input_error(name: str) -> None:
    with pytest.raises(InputError, match="unknown model"):
        load_model(name)


def test_an_unknown_name_is_answered_with_names_and_not_with_aliases() -> None:
    with pytest.raises(InputError, match=r"did you mean (.*)\?") as caught:
        load_model("Meta-Llama-3-70B")
    assert "llama3-70b" in str(caught.value).split("did you mean ")[1].split("?")[0].split(", ")


def test_a_word_inside_a_file_is_not_a_name_of_it() -> None:
    """`silu` stands in many a model file, but names none."""
    for word in ("silu", "rmsnorm", "bf16", "true"):
        with pytest.raises(InputError, match="unknown model"):
            load_model(word)


def test_find_tells_the_family_of_a_name() -> None:
    assert catalog.find("llama3-8b") is MODELS
    assert catalog.find("h100") is HARDWARE
    assert catalog.find("vllm") is ENGINES
    with pytest.raises(InputError, match="model or hardware or engine"):
        catalog.find("xyzzy")


def test_names_are_sorted_and_complete() -> None:
    both = [*catalog.names(MODELS), *catalog.names(DIFFUSION)]
    assert sorted(both) == sorted(path.stem for path in (CONFIGS / "models").glob("*.yaml"))
    assert catalog.names(MODELS) == sorted(catalog.names(MODELS))


def test_a_specification_is_read_once() -> None:
    assert load_model("llama3-8b") is load_model("llama3-8b")


# --- directories of the user's own ------------------------------------------------------------------------------------


def test_config_path_is_searched_first_in_folders_and_in_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    put(first / "models" / "mine.yaml", extends="llama3-8b", name="mine", layers=7)
    put(first / "flat.yaml", extends="h100-sxm", name="flat", aliases=["flatter"])
    put(second / "models" / "mine.yaml", extends="llama3-8b", name="mine", layers=9)
    put(second / "models" / "llama3-8b.yaml", extends="llama2-7b", name="llama3-8b", layers=5)
    monkeypatch.setenv("PLAN_CONFIG_PATH", f"{first}{os.pathsep}{os.pathsep}{second}{os.pathsep}{tmp_path / 'absent'}")
    assert load_model("mine").layers == 7  # the first directory wins
    assert load_model("llama3-8b").layers == 5  # and both win over what is shipped
    assert load_model("llama3-70b").layers == 80
    assert load_hardware("flat").name == load_hardware("FLATTER").name == "flat"
    assert "mine" in catalog.names(MODELS)


def test_files_of_several_families_may_lie_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "my-model.yaml", extends="llama3-8b", name="my-model")
    put(tmp_path / "my-chip.yaml", extends="h100-sxm", name="my-chip")
    put(tmp_path / "my-engine.yaml", extends="vllm", name="my-engine")
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(tmp_path))
    done = run("-m", "my-model", "-H", "my-chip", "--engine", "my-engine", "--csv", "-")
    assert (done.status, done.err) == (0, "")
    for family, own in (("models", "my-model"), ("hardware", "my-chip"), ("engines", "my-engine")):
        listed = [row["name"] for row in run(family, "--csv", "-").rows]
        assert [name for name in listed if name.startswith("my-")] == [own]
        shown = run("show", own)
        assert (shown.status, shown.out.splitlines()[:1]) == (0, [f"name: {own}"])


def test_config_path_serves_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(
        tmp_path / "hardware" / "twice.yaml",
        extends="h100-sxm",
        name="twice",
        aliases=["double"],
        chip={"memory_gib": 158.4},
    )
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(tmp_path))
    done = run("-m", "llama3-70b", "-H", "double", "--gpus", "1", "--csv", "-")
    assert (done.status, done.rows[0]["hardware"], done.rows[0]["plan"]) == (0, "twice", "TP1")


def test_a_file_of_the_users_in_the_config_path_is_validated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "models" / "mine.yaml", extends="llama3-8b", name="mine", laers=7)
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(tmp_path))
    with pytest.raises(SpecError, match=r"mine\.yaml: laers: unknown key"):
        load_model("mine")


@pytest.mark.parametrize(
    "content",
    [b"\x00\xff\xfe", b"name: [1, 2\n", b"", b"- a\n", b"aliases: 3\n", b"aliases:\n  a: b\n", b"aliases: [1, null]\n"],
)
def test_a_broken_file_beside_does_not_hide_the_others(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "aaa.yaml").write_bytes(content + b"# h100 lama3-8b meta-llama/meta-llama-3-8b\n")
    monkeypatch.setenv("PLAN_CONFIG_PATH", str(tmp_path))
    assert load_model("meta-llama/Meta-Llama-3-8B").name == "llama3-8b"
    with pytest.raises(InputError, match=r"did you mean .*llama3-8b"):
        load_model("lama3-8b")


# --- extends ----------------------------------------------------------------------------------------------------------


def test_extends_merges_mappings_and_replaces_everything_else(tmp_path: Path) -> None:
    path = put(
        tmp_path / "mine.yaml",
        extends="h100-sxm",
        name="mine",
        chip={"memory_gib": 50, "compute_tflops": {"bf16": 500}},
        network=[
            {"name": "nvlink", "kind": "switch", "chips": 4, "bandwidth_gb_per_s": 100},
            {"name": "infiniband", "kind": "switch", "bandwidth_gb_per_s": 25},
        ],
        notes=["a note"],
    )
    base, mine = load_hardware("h100-sxm"), load_hardware(path)
    kept = {key: base.chip.sources[key] for key in base.chip.sources.keys() - {"memory_gib", "compute_tflops"}}
    assert mine.chip == base.chip._replace(
        memory_gib=50.0, compute_tflops={**base.chip.compute_tflops, "bf16": 500.0}, sources=kept
    )
    assert [(level.chips, level.nics_per_node) for level in mine.network] == [(4, None), (None, None)]
    assert mine.notes == ("a note",)
    assert (mine.kernels, mine.collectives, mine.price, mine.engine) == (
        base.kernels, base.collectives, base.price, base.engine,
    )  # fmt: skip


def test_a_file_that_extends_another_has_a_name_of_its_own(tmp_path: Path) -> None:
    path = put(tmp_path / "faster.yaml", extends="h100", chip={"memory_bandwidth_gb_per_s": 8000})
    faster = load_hardware(path)
    assert (faster.name, faster.aliases) == ("faster", ())
    assert load_model(put(tmp_path / "deeper.yaml", extends="llama3-8b", layers=40)).name == "deeper"
    assert load_engine(put(tmp_path / "slower.yaml", extends="vllm", host={"step_us": 900})).name == "slower"
    assert load_engine(put(tmp_path / "file.yaml", extends="vllm", name="given")).name == "given"
    shown = run("show", path).out
    assert shown.startswith("name: faster\n")


def test_a_source_goes_with_the_value_that_it_stood_for(tmp_path: Path) -> None:
    base = load_hardware("h100").chip.sources
    replaced = put(tmp_path / "a.yaml", extends="h100", chip={"memory_bandwidth_gb_per_s": 8000})
    rest = {key: source for key, source in base.items() if key != "memory_bandwidth_gb_per_s"}
    assert load_hardware(replaced).chip.sources == rest
    chip = {"memory_bandwidth_gb_per_s": 8000, "sources": {"memory_bandwidth_gb_per_s": "my stopwatch"}}
    sourced = put(tmp_path / "b.yaml", extends="h100", chip=chip)
    assert load_hardware(sourced).chip.sources == {**rest, "memory_bandwidth_gb_per_s": "my stopwatch"}
    assert load_hardware(put(tmp_path / "c.yaml", extends="h100", engine="sglang")).chip.sources == base


def test_constants_that_a_file_changes_without_a_provenance_are_assumed_and_its_own(tmp_path: Path) -> None:
    own = Provenance("assumed", "set in mine.yaml")
    gemm, base = {"bf16": {"memory_fraction": 0.5}}, load_hardware("h100")
    mine = load_hardware(put(tmp_path / "mine.yaml", extends="h100", kernels={"gemm": gemm}))
    assert base.kernels["gemm"]["bf16"].provenance.status == "fitted"
    assert mine.kernels["gemm"]["bf16"] == base.kernels["gemm"]["bf16"]._replace(memory_fraction=0.5, provenance=own)
    assert mine.kernels["gemm"]["fp8"] == base.kernels["gemm"]["fp8"]  # and nothing else changes
    assert mine.price == base.price

    engine = load_engine(put(tmp_path / "e" / "mine.yaml", extends="vllm", memory={"inside_gib": {1: 5}}))
    assert engine.memory.provenance == own
    assert engine.memory.inside_gib[1] == 5
    assert engine.host == load_engine("vllm").host
    child = load_engine(put(tmp_path / "e" / "child.yaml", extends="mine.yaml", description="no other constants"))
    assert child.memory == engine.memory
    host = load_engine("vllm").host
    same = load_engine(put(tmp_path / "same.yaml", extends="vllm", host={"step_us": host.step_us}))
    assert same.host == host  # the number is still the one that was fitted


def test_a_provenance_that_a_file_gives_with_its_constants_is_kept(tmp_path: Path) -> None:
    provenance = {"status": "measured", "source": "my stopwatch", "version": "1", "residual": 0.1}
    path = put(tmp_path / "mine.yaml", extends="vllm", host={"step_us": 7, "provenance": provenance})
    assert load_engine(path).host.provenance == Provenance("measured", "my stopwatch", "1", 0.1)


def test_constants_that_an_engine_lays_over_hardware_without_a_provenance_are_its_own(tmp_path: Path) -> None:
    under = {"kernels": {"gemm": {"bf16": {"fixed_us": 55}}}}
    engine = put(tmp_path / "engine.yaml", extends="vllm", chips={"h100-sxm": under})
    expected = Provenance("assumed", "set in engine.yaml")
    assert load_machine("h100", engine)[0].kernels["gemm"]["bf16"].provenance == expected
    child = put(tmp_path / "child.yaml", extends="h100")
    assert load_machine(child, engine)[0].kernels["gemm"]["bf16"].provenance == expected


def test_a_price_that_a_file_changes_is_not_the_offer_of_another(tmp_path: Path) -> None:
    base = load_hardware("h100").price
    assert base
    path = put(tmp_path / "mine.yaml", extends="h100", price={"usd_per_chip_hour": 2})
    assert load_hardware(path).price == Price(2.0, "set in mine.yaml", "undated", "set in mine.yaml")
    dated = put(
        tmp_path / "dated.yaml", extends="h100", price={"usd_per_chip_hour": 2, "offer": "a lease", "date": "2026"}
    )
    assert load_hardware(dated).price == Price(2.0, "a lease", "2026", "set in dated.yaml")
    noted = put(tmp_path / "noted.yaml", extends="h100", price={"source": "seen again"})
    assert load_hardware(noted).price == base._replace(source="seen again")


def test_what_shipped_files_lay_over_each_other_says_where_it_is_from() -> None:
    def own(value: Any) -> list[str]:
        parts = value if isinstance(value, tuple) else value.values() if isinstance(value, dict) else ()
        found = [source for part in parts for source in own(part)]
        return [*found, value] if isinstance(value, str) and value.startswith("set in ") else found

    engines = [load_engine(name) for name in catalog.names(ENGINES)]
    assert not own(tuple(engines))
    for name in catalog.names(HARDWARE):
        assert not own(load_hardware(name))
        assert not [found for engine in engines for found in own(load_hardware(name, engine))]


@pytest.mark.parametrize("fraction", [1.01, 2])
def test_an_engine_cannot_take_more_than_all_of_the_memory(fraction: float, tmp_path: Path) -> None:
    path = put(tmp_path / "greedy.yaml", extends="vllm", memory={"fraction": fraction})
    with pytest.raises(SpecError, match=rf"memory\.fraction: found {fraction}, expected at most 1 \(in a share"):
        load_engine(path)
    assert load_engine(put(tmp_path / "all.yaml", extends="vllm", memory={"fraction": 1})).memory.fraction == 1


def test_rows_of_collectives_replace_their_like_and_join_the_rest(tmp_path: Path) -> None:
    base = load_hardware("h100-sxm")
    like = base.collectives[0]
    provenance = {"status": "assumed", "source": "a test"}
    changed = {"kernel": like.kernel, "op": like.op, "level": like.level, "algorithm": like.algorithm, "hop_us": 3.0}
    new = {"kernel": "mine", "op": "all_reduce", "level": "nvlink", "algorithm": "one_shot", "hop_us": 4.0}
    path = put(
        tmp_path / "mine.yaml",
        extends="h100-sxm",
        name="mine",
        collectives=[{**changed, "provenance": provenance}, {**new, "provenance": provenance}],
    )
    rows = load_hardware(path).collectives
    assert len(rows) == len(base.collectives) + 1
    assert rows[0].hop_us == 3.0
    assert rows[0].ranks == {}  # the row as a whole, not key by key
    assert rows[1:-1] == base.collectives[1:]
    assert (rows[-1].kernel, rows[-1].hop_us) == ("mine", 4.0)


def test_the_rules_of_an_engine_are_an_order_and_replaced_whole(tmp_path: Path) -> None:
    rules = [
        {"op": op, "kernels": ["nccl"]} for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ]
    path = put(tmp_path / "mine.yaml", extends="vllm", name="mine", collectives=rules, host={"step_us": 7})
    mine, base = load_engine(path), load_engine("vllm")
    assert [(rule.op, rule.kernels) for rule in mine.collectives] == [(rule["op"], ("nccl",)) for rule in rules]
    provenance = Provenance("assumed", "set in mine.yaml")
    assert mine.host == base.host._replace(step_us=7.0, provenance=provenance)


def test_names_and_published_counts_are_not_inherited(tmp_path: Path) -> None:
    base = load_model("llama3-8b")
    mine = load_model(put(tmp_path / "mine.yaml", extends="llama3-8b", name="mine", layers=16))
    assert base.hf_ids
    assert base.published
    assert (mine.aliases, mine.hf_ids, mine.published) == ((), (), None)
    assert mine == base._replace(name="mine", layers=16, hf_ids=(), published=None)
    machine = load_hardware(put(tmp_path / "machine.yaml", extends="h100", name="machine"))
    assert machine.aliases == ()


def test_a_chain_of_extends_lays_the_nearest_on_top(tmp_path: Path) -> None:
    put(tmp_path / "one.yaml", extends="llama3-8b", name="one", layers=10, hidden=1024)
    put(tmp_path / "two.yaml", extends="one.yaml", name="two", layers=20, attention={"heads": 16})
    model = load_model(put(tmp_path / "three.yaml", extends="two.yaml", name="three", attention={"kv_heads": 4}))
    base = load_model("llama3-8b")
    assert (model.name, model.layers, model.hidden) == ("three", 20, 1024)
    assert model.attention == base.attention._replace(heads=16, kv_heads=4)


def test_extends_takes_names_aliases_and_files_beside_or_by_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)  # a file beside is looked for beside, not where the command was started
    base = put(tmp_path / "base.yaml", extends="meta-llama/Meta-Llama-3-8B", name="base", layers=3)
    assert load_model(put(tmp_path / "one.yaml", extends="base.yaml", name="one")).layers == 3
    assert load_model(put(tmp_path / "sub" / "two.yaml", extends=str(base), name="two")).layers == 3
    assert load_model(put(tmp_path / "sub" / "three.yaml", extends="../base.yaml", name="three")).layers == 3


def test_json_files_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"extends": "llama3-8b", "name": "mine", "layers": 12}))
    assert load_model(path).layers == 12


def test_a_file_without_a_suffix_is_a_file(tmp_path: Path) -> None:
    path = put(tmp_path / "mine", extends="llama3-8b", name="mine", layers=12)
    assert load_model(path).layers == 12


def test_merge_changes_neither_of_its_sides() -> None:
    base, over = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "e": 4}
    assert merge(base, over) == {"a": {"b": 1, "c": 3}, "d": [1], "e": 4}
    assert (base, over) == ({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "e": 4})


# --- hardware under an engine -----------------------------------------------------------------------------------------


def test_an_engine_lays_its_constants_over_the_hardware_it_names() -> None:
    plain, (under, engine) = load_hardware("h100"), load_machine("h100", "vllm")
    added = {row["kernel"] for row in engine.chips["h100-sxm"]["collectives"]}
    assert added
    assert added <= {row.kernel for row in under.collectives}
    assert len(under.collectives) == len(plain.collectives)  # its rows take the place of the file's own
    assert under.collectives != plain.collectives == load_machine("h100", "ideal")[0].collectives
    assert load_hardware("h100") == plain  # and leaves the file itself as it was


def test_the_default_engine_is_the_hardware_files() -> None:
    assert load_machine("h100")[1].name == load_hardware("h100").engine == "vllm"
    assert load_machine("h100-lecture")[1].name == "lecture"


def test_the_engine_of_a_hardware_file_may_be_a_file(tmp_path: Path) -> None:
    engine = put(tmp_path / "engine.yaml", extends="vllm", name="mine", host={"step_us": 7})
    path = put(tmp_path / "machine.yaml", extends="h100-sxm", name="machine", engine=str(engine))
    assert load_machine(path)[1].name == "mine"
    assert load_machine(path)[1].host.step_us == 7


def test_hardware_that_extends_a_named_one_keeps_what_the_engine_measured_there(tmp_path: Path) -> None:
    path = put(tmp_path / "mine.yaml", extends="h100-sxm", name="mine", chip={"memory_gib": 50})
    mine, engine = load_machine(path, "vllm")
    assert mine.collectives == load_machine("h100", "vllm")[0].collectives
    assert mine.chip.memory_gib == 50
    assert engine.name == "vllm"


def test_a_file_named_like_the_one_it_extends_has_the_last_word(tmp_path: Path) -> None:
    kernels = {"gemm": {"bf16": {"fixed_us": 77}}}
    under = {"kernels": {"gemm": {"bf16": {"fixed_us": 55}}}}
    engine = put(tmp_path / "engine.yaml", extends="vllm", chips={"h100-sxm": under})
    path = put(tmp_path / "h100-sxm.yaml", extends="h100", kernels=kernels)
    assert load_machine("h100", engine)[0].kernels["gemm"]["bf16"].fixed_us == 55
    assert load_machine(path, engine)[0].kernels["gemm"]["bf16"].fixed_us == 77


def test_an_override_of_a_users_engine_counts(tmp_path: Path) -> None:
    path = put(tmp_path / "mine.yaml", extends="vllm", name="mine", chips={"h100-sxm": {"chip": {"tdp_w": 350}}})
    assert load_machine("h100", path)[0].chip.tdp_w == 350
    assert load_machine("h200", path)[0].chip.tdp_w == load_hardware("h200").chip.tdp_w


@pytest.mark.parametrize(
    ("asked", "covering"),
    [
        ("vllm-0.19.1", "vllm"), ("vllm-0.17", "vllm"), ("vllm-0.16.9", "vllm-0.11"), ("vllm-0.12.0", "vllm-0.11"),
        ("vllm-0.9.2", "vllm-0.8"), ("vllm-v0.6.3.post2", "vllm-0.6"), ("vllm-0.2.1", "vllm-0.6"),
        ("vllm-1.0.0", "vllm"), ("trtllm-0.14.0", "trtllm-0.9"), ("trtllm-0.5.0", "trtllm-0.5"),
        ("trtllm-1.2.0rc6.post1", "trtllm"), ("sglang-0.5.6.post2", "sglang-0.5.6"), ("SGLang-0.5.1", "sglang"),
    ],
)  # fmt: skip
def test_a_version_of_an_engine_is_covered_by_the_file_that_begins_last_before_it(asked: str, covering: str) -> None:
    assert load_engine(asked).name == covering


@pytest.mark.parametrize("name", ["vllm-0", "vllm-rocm-0.10", "ideal-1.0", "nothing-1.2.3", "llama3-0.1"])
def test_a_version_that_no_file_covers_is_unknown(name: str) -> None:
    with pytest.raises(InputError, match="unknown engine"):
        load_engine(name)
