"""What starts a plan: every degree is said, every chip used once, memory is what was planned."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import forget_files
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.memory import Budget
from planner.errors import InputError, NoPlanError, SpecError
from planner.launching import Deployment, Process, deployment
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.request import Limits
from planner.specs import catalog
from planner.specs.catalog import load_engine, load_machine, load_model
from planner.specs.launch import Launch, filled, flag_of
from planner.specs.workload import Workload
from planner.startup import Start

SERVING = [name for name in catalog.names(catalog.ENGINES) if load_engine(name).launch is not None]
MACHINES = ("h100-sxm", "a100-80gb-sxm", "mi300x", "gb200-nvl72", "b200-sxm", "tpu-v5e", "gaudi3")
MODELS = ("llama3-8b", "llama3-70b", "qwen3-32b", "llama3.1-405b", "gpt-oss-120b", "deepseek-v3", "gemma-3-27b")


PLANS = st.tuples(st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 4), st.integers(1, 4)).map(lambda each: Plan(*each))


def deployed(
    model: str,
    plan: Plan,
    hardware: str = "h100-sxm",
    engine: str = "vllm",
    workload: Workload | None = None,
    gpus: int | None = None,
    limits: Limits | None = None,
) -> Deployment:
    machine, software = load_machine(hardware, engine)
    placement = Placement.of(machine, gpus or plan.chips)
    return deployment(load_model(model), placement, software, plan, workload or Workload(), limits=limits)


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(SERVING),
    st.sampled_from(MACHINES),
    st.tuples(st.sampled_from((1, 2, 4, 8, 16)), st.integers(1, 4), st.integers(1, 4)).map(
        lambda degrees: Plan(*degrees)
    ),
    st.sampled_from((None, "bf16", "fp8", "int8", "int4")),
    st.sampled_from((None, "bf16", "fp8", "int8")),
    st.integers(1, 4000),
)
def test_lines_say_the_whole_plan_or_nothing(
    model: str, engine: str, hardware: str, plan: Plan, weights: str | None, kv_cache: str | None, isl: int
) -> None:
    workload = Workload(isl, 96, 8, weights=weights, kv_cache=kv_cache)
    try:
        found = deployed(model, plan, hardware, engine, workload)
    except (NoPlanError, InputError):
        return
    servers = [process for process in found.processes if process.role == "server"]
    assert {process.replica for process in servers} == set(range(plan.dp))
    launch = found.launch
    for process in servers:
        values = [word.partition("=")[2] or word for word in process.argv]
        for name in ("tp", "pp"):
            template = launch.arguments.get(name, ())
            degree = getattr(plan, name)
            assert (template[0] in process.argv) == (degree > 1) if template else degree == 1 or name in launch.implied
            if template and degree > 1:
                assert process.argv[process.argv.index(template[0]) + 1] == str(degree)
        assert str(isl + 96) in values or {str(isl), "96"} <= set(values)
        assert not any("{" in word or "}" in word or word in ("", "None") for word in process.argv)
        assert all(launch.flags[flag] for word in process.argv if (flag := flag_of(word)))
        assert set(process.files) <= set(process.argv)
    used = [(each.node, chip) for each in servers for chip in each.chips]
    assert len(set(used)) == len(used)
    if launch.nodes is None or launch.nodes.everywhere:
        assert len(used) == plan.chips
    first = {each.replica: each for each in reversed(servers)}
    assert len({_port(each, launch) for each in first.values()}) == plan.dp


def _port(process: Process, launch: Launch) -> str:
    flag = launch.arguments["port"][0].partition("=")[0]
    place = next(index for index, word in enumerate(process.argv) if flag_of(word) == flag)
    return process.argv[place].partition("=")[2] or process.argv[place + 1]


@pytest.mark.parametrize("fraction", [0.5, 0.75, 0.9, 0.95])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_memory_fraction_gives_the_engine_what_was_planned(engine: str, fraction: float) -> None:
    machine, software = load_machine("h100-sxm", engine)
    limits = Limits(memory_fraction=fraction)
    found = deployed("llama3-70b", Plan(8), engine=engine, limits=limits)
    start = Start.of(load_model("llama3-70b"), software, Plan(8), Budget.of(machine, software, None, fraction))
    (process,) = found.processes
    if found.launch.memory == "chip":
        flag = found.launch.arguments["memory_fraction"][0]
        assert float(process.argv[process.argv.index(flag) + 1]) == fraction
        return
    ((_, content),) = process.files.items()
    share = content["kv_cache_config"]["free_gpu_memory_fraction"]
    taken = float(start.room.weights[start.fullest] + start.room.other[start.fullest])
    free = start.budget.chip - taken - float(start.room.outside)
    assert share * free == pytest.approx(start.budget.limit - taken, rel=1e-3)
    assert share * free <= start.budget.limit - taken, "rounded down"


def test_a_limit_in_bytes_becomes_a_fraction() -> None:
    found = deployed("llama3-8b", Plan(1), limits=Limits(memory=40 * 2**30))
    (process,) = found.processes
    share = float(process.argv[process.argv.index("--gpu-memory-utilization") + 1])
    chip = found.hardware.chip.memory_gib
    assert 40 / chip - 1e-4 < share <= 40 / chip


def test_a_checkpoint_that_is_quantised_needs_no_flag() -> None:
    (process,) = deployed("gpt-oss-120b", Plan(2)).processes
    assert not {"--quantization", "--dtype"} & set(process.argv)
    found = deployed("gpt-oss-120b", Plan(4), workload=Workload(weights="bf16"))
    assert any("checkpoint of gpt-oss-120b in bf16" in note for note in found.notes)


def test_more_requests_than_fit_are_said() -> None:
    found = deployed("llama3-70b", Plan(2), workload=Workload(2000, 2000, 5000))
    assert any("5000 are asked: the others wait" in note for note in found.notes)


def test_versions_override_what_was_named_otherwise() -> None:
    new, old = load_engine("vllm").launch, load_engine("vllm-0.8").launch
    assert new is not None
    assert old is not None
    assert old.arguments == new.arguments
    assert old.flags["--nnodes"] is None
    assert new.flags["--nnodes"]
    assert (new.nodes and new.nodes.everywhere, old.nodes and old.nodes.everywhere) == (True, False)
    assert old.documentation != new.documentation


def test_every_list_of_flags_names_its_version_and_source() -> None:
    for name in SERVING:
        launch = load_engine(name).launch
        assert launch is not None
        assert launch.documentation.version
        assert "github:" in launch.documentation.source or "https://" in launch.documentation.source
        assert all(meaning is None or len(meaning) > 5 for meaning in launch.flags.values())
    for name in set(catalog.names(catalog.ENGINES)) - set(SERVING):
        assert load_engine(name).unlaunched


def own(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    forget_files()
    return path


def test_a_file_of_ones_own_changes_a_flag(tmp_path: Path) -> None:
    path = own(
        tmp_path,
        "extends: vllm\nlaunch:\n  command: [podman, run, vllm, '{model}']\n  arguments:\n"
        "    block: []\n    swap: [--swap-space, '16']\n  flags: {--swap-space: GiB of memory of the host}\n",
    )
    (process,) = deployed("llama3-8b", Plan(2), engine=str(path)).processes
    assert process.argv[:3] == ("podman", "run", "vllm")
    assert process.argv[-2:] == ("--swap-space", "16")
    assert "--block-size" not in process.argv


def test_a_platform_has_arguments_of_its_own() -> None:
    for hardware, has in (("h100-sxm", True), ("mi300x", True), ("gaudi3", False), ("tpu-v6e", False)):
        tp = 8 if hardware == "tpu-v6e" else 2
        (process,) = deployed("llama3-8b", Plan(tp), hardware).processes
        assert ("--block-size" in process.argv) == has
    variables = {name: load_machine(name, "ideal")[0].devices for name in ("mi325x", "gb300-nvl72", "tpu-v6e")}
    assert [each.platform for each in variables.values()] == ["rocm", "cuda", "tpu"]
    assert [each.per_host for each in variables.values()] == [None, 4, 8]


def test_a_file_without_launch_lines_says_so(tmp_path: Path) -> None:
    path = own(tmp_path, "extends: vllm\nlaunch: null\n")
    with pytest.raises(NoPlanError, match="no key `launch`"):
        deployed("llama3-8b", Plan(1), engine=str(path))


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("arguments: {tp: [--tensors, '{tp}']}", "launch.arguments.tp.0", "flag --tensors"),
        ("arguments: {tp: [--tensor-parallel-size, '{t}']}", "launch.arguments.tp.1", "{t}, expected one of model"),
        ("flags: {--block-size: null}", "launch.arguments.block.0", "flag --block-size"),
        ("weights: {nf5: {name: x}}", "launch.weights.nf5", "unknown dtype"),
        ("kv_cache: {nf5: x}", "launch.kv_cache.nf5", "unknown dtype"),
        ("implied: [dp]", "launch.implied.0", "expected one of tp, pp"),
        ("command: []", "launch.command", "is empty"),
        ("command: vllm", "launch.command", "expected a list"),
        ("memory: half", "launch.memory", "expected one of"),
        ("port: 0", "launch.port", "at least 1"),
        ("nodes: {others: [--head-less]}", "launch.nodes.others.0", "flag --head-less"),
        ("nodes: [a]", "launch.nodes", "a mapping"),
        ("router: [x, '{urls}']", "launch.router.1", "{urls}"),
        ("files: {.yaml: {a: {b: '{nothing}'}}}", "launch.files..yaml.a.b", "{nothing}"),
        ("platforms: {cuda: {block: [--blocks]}}", "launch.platforms.cuda.block.0", "flag --blocks"),
        ("words: 1", "launch.words", "unknown key"),
    ],
)
def test_mistakes_in_a_file_are_named_by_their_key(tmp_path: Path, text: str, key: str, problem: str) -> None:
    path = own(tmp_path, f"extends: vllm\nlaunch:\n  {text}\n")
    with pytest.raises(SpecError) as found:
        load_engine(path)
    assert (found.value.key, str(path)) == (key, found.value.path)
    assert problem in found.value.problem


def test_a_placeholder_alone_keeps_its_type() -> None:
    assert filled("{tp}", {"tp": 8}) == 8
    assert filled("--x={tp},{pp}", {"tp": 8, "pp": 2}) == "--x=8,2"
    assert filled("{tp}", {}) is None
    assert filled("plain", {}) == "plain"
