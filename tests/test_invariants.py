"""What must hold whatever is asked: over random machines, models, plans and loads."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import every
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner import Filters, NoPlanError, Request, Workload, load_engine, load_machine, load_model, rank
from planner.costs import serving
from planner.costs.weights import Shard, Stages, matmul_parameters, stage_weight_bytes
from planner.estimating import estimate_points
from planner.plans.rules import tp_allowed
from planner.results import COLUMNS, Results
from planner.specs.catalog import MODELS, names
from planner.specs.dtypes import ACTIVATION_BYTES, weight_dtype
from planner.specs.hardware import Hardware

GIB, MS, HOUR = 2.0**30, 1e-3, 3600.0

MACHINES = (
    ("h100-lecture", None), ("h100-sxm", "vllm"), ("h100-sxm", "sglang"), ("h100-sxm", "trtllm"), ("h100-sxm", "ideal"),
    ("h200-sxm", "vllm"), ("a100-80gb-sxm", "sglang"), ("b200-sxm", "trtllm"), ("l40s", "vllm"), ("mi300x", "vllm"),
    ("tpu-v4", None), ("tpu-v5e", "vllm"), ("tpu-v4-lecture", None),
)  # fmt: skip
# one of each kind: grouped heads, many of them, a window, biases and 28 heads, tied ends with positions, parallel
# blocks with one KV head, a tied head with 8 KV heads of 232, norms of queries and keys, 40 heads
SHAPES = (
    "llama3-8b", "llama3-70b", "mistral-7b", "qwen2.5-7b", "opt-13b", "palm-62b", "falcon-180b", "qwen3-8b",
    "llama2-13b",
)  # fmt: skip

some = settings(derandomize=True, deadline=None, max_examples=20, suppress_health_check=[HealthCheck.filter_too_much])

machines = st.sampled_from(MACHINES)
shapes = st.sampled_from(SHAPES)


class Case(NamedTuple):
    """Points of one machine, model and load: options of `estimate_points` beside the degrees."""

    model: str
    hardware: str
    engine: str | None
    isl: int
    osl: int
    schedule: str
    arrivals: str
    weights: str | None

    def price(self, count: int = 1, **columns: Any) -> Results:
        """Results of `count` plans given as columns."""
        return estimate_points({**{name: [value] for name, value in self._asdict().items()}, **columns}, count)


@st.composite
def lengths(draw: st.DrawFn, longest: int) -> tuple[int, int]:
    osl = draw(st.integers(1, 300) | st.just(1) | st.just(2))
    isl = draw(st.integers(1, 1500) | st.integers(1, max(1, min(20_000, longest - osl))))
    return min(isl, longest - osl), osl


@st.composite
def cases(draw: st.DrawFn, machine: st.SearchStrategy[tuple[str, str | None]] = machines) -> Case:
    model = draw(shapes)
    isl, osl = draw(lengths(load_model(model).max_context))
    return Case(
        model,
        *draw(machine),
        isl,
        osl,
        draw(st.sampled_from(["continuous", "static"])),
        draw(st.sampled_from(["steady", "waves"])),
        draw(st.sampled_from([None, None, "fp8", "int4"])),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    case = draw(cases())
    machine, engine = load_machine(case.hardware, case.engine)
    work = Workload(
        case.isl, case.osl, draw(st.none() | st.integers(1, 300)), case.schedule, case.weights, arrivals=case.arrivals
    )  # type: ignore[arg-type]
    objective = draw(st.sampled_from(["latency", "throughput", "cost", "tpot" if case.osl > 1 else "ttft"]))
    gpus = draw(st.integers(1, 24))
    return Request(load_model(case.model), machine, engine, gpus, work, objective)  # type: ignore[arg-type]


def ranked(request: Request) -> Results:
    """The plans of a request; cases that have none say nothing here."""
    try:
        return rank(request).results
    except NoPlanError:
        assume(False)
        raise


def degrees(case: Case, tp: int) -> bool:
    """Whether the rules allow a degree."""
    return tp_allowed(load_model(case.model), load_machine(case.hardware, case.engine)[1], tp) is None


# --- memory ---------------------------------------------------------------------------------------------------------


@some
@given(requests())
def test_no_ranked_plan_is_over_its_memory(request: Request) -> None:
    results, chip = ranked(request), request.hardware.chip.memory_gib
    memory, limit = results["memory_gib"], results["memory_limit_gib"]
    assert np.all(memory <= limit * (1 + 1e-12))
    parts = results["weights_gib"] + results["kv_gib"] + results["other_gib"]
    assert memory == pytest.approx(parts, rel=1e-9)
    outside = request.engine.memory.outside_gib
    if outside:
        beside = np.interp(results["tp"].astype(float), sorted(outside), [outside[size] for size in sorted(outside)])
        assert np.all(limit + beside <= chip * (1 + 1e-9))
    assert np.all(limit <= chip)
    assert np.all(results["concurrency"] <= results["max_concurrency"])


# --- more of the machine is never slower ----------------------------------------------------------------------------


def faster(hardware: Hardware, compute: float = 1.0, memory: float = 1.0, network: float = 1.0) -> Hardware:
    """The same machine with more FLOP/s, memory bandwidth or network bandwidth."""
    chip = hardware.chip._replace(
        compute_tflops={dtype: peak * compute for dtype, peak in hardware.chip.compute_tflops.items()},
        memory_bandwidth_gb_per_s=hardware.chip.memory_bandwidth_gb_per_s * memory,
    )
    levels = tuple(level._replace(bandwidth_gb_per_s=level.bandwidth_gb_per_s * network) for level in hardware.network)
    return hardware._replace(chip=chip, network=levels)


def times(request: Request) -> dict[str, dict[str, float]]:
    results = ranked(request)
    columns = {name: results[name].astype(float) for name in ("ttft_ms", "tpot_ms", "latency_ms")}
    return {plan: {name: column[row] for name, column in columns.items()} for row, plan in enumerate(results["plan"])}


@some
@given(
    requests(),
    st.sampled_from(["compute", "memory", "network"]),
    st.sampled_from([1.001, 1.5, 2.0, 30.0]),
)
def test_more_bandwidth_or_flops_never_makes_a_plan_slower(request: Request, what: str, factor: float) -> None:
    request = request._replace(workload=request.workload._replace(concurrency=request.workload.concurrency or 7))
    before = times(request)
    after = times(request._replace(hardware=faster(request.hardware, **{what: factor})))
    assert before.keys() == after.keys()
    for plan, columns in before.items():
        for name, value in columns.items():
            assert not after[plan][name] > value * (1 + 1e-9), f"{plan}: {name} {value} -> {after[plan][name]}"


@pytest.mark.parametrize(
    ("machine", "model", "pp", "work", "more"),
    [
        # the decode steps of a pipeline that prefills replace are no more than there are
        (("h100-sxm", "vllm"), "llama3-70b", 4, Workload(256, 2, 20), {"memory": 2.0}),
        (("h100-sxm", "vllm"), "llama3-70b", 3, Workload(16, 2, 200), {"memory": 2.0}),
        # a shorter decode step does not make the wait for other prompts longer
        (("h100-sxm", "vllm"), "llama3-8b", 1, Workload(1024, 256, 64, arrivals="waves"), {"memory": 2.0}),
        # prompts of a few tokens, which cost about as much as the decode that they replace
        (("h100-sxm", "vllm"), "llama3-8b", 1, Workload(4, 10, 200, arrivals="waves"), {"compute": 1.1}),
        (("tpu-v5e", "vllm"), "llama3-8b", 3, Workload(4, 100, 200, arrivals="waves"), {"memory": 2.0}),
    ],
    ids=[
        "few answers in a pipeline",
        "many prompts in a pipeline",
        "a wave",
        "short prompts",
        "short prompts in stages",
    ],
)
def test_a_faster_machine_slows_nothing_that_waits_for_prefills(
    machine: tuple[str, str], model: str, pp: int, work: Workload, more: dict[str, float]
) -> None:
    asked = Request(load_model(model), *load_machine(*machine), 4, work, filters=Filters(tp=(1,), pp=(pp,), dp=(1,)))
    before, after = times(asked), times(asked._replace(hardware=faster(asked.hardware, **more)))
    assert len(before) == 1
    for plan, columns in before.items():
        for name, value in columns.items():
            if name == "ttft_ms" and work.arrivals == "waves":
                continue  # half of (b - 1) E by definition, and E is less where the step it replaces is slow
            assert after[plan][name] <= value * (1 + 1e-9), f"{plan}: {name} {value} -> {after[plan][name]}"


@settings(some, max_examples=8)
@given(requests())
def test_twice_the_machine_is_faster_for_every_plan(request: Request) -> None:
    """The other side of the test above, which a constant would pass."""
    request = request._replace(workload=request.workload._replace(concurrency=request.workload.concurrency or 7))
    before, after = times(request), times(request._replace(hardware=faster(request.hardware, 2.0, 2.0, 2.0)))
    assert all(after[plan]["ttft_ms"] < columns["ttft_ms"] for plan, columns in before.items())


# --- data parallelism -----------------------------------------------------------------------------------------------


def alike(hardware: Hardware, tp: int, pp: int, dp: int) -> bool:
    """Whether all replicas lie alike on the domains: their pipelines cross the same number of boundaries."""
    domain = hardware.domain
    if domain is None or hardware.torus or dp == 1 or pp == 1:
        return True
    per_domain = max(1, domain // tp)
    return per_domain % pp == 0 or pp % per_domain == 0


@some
@given(cases(), st.sampled_from([1, 2, 4, 5, 8]), st.integers(1, 5), st.integers(2, 6), st.integers(1, 70))
def test_replicas_change_no_requests_latency(case: Case, tp: int, pp: int, dp: int, batch: int) -> None:
    """At equal requests per replica; where replicas lie differently on the domains the slowest one counts."""
    assume(degrees(case, tp))
    one, many = case.price(2, tp=[tp], pp=[pp], dp=[1, dp], concurrency=[batch, batch * dp], gpus=[512]).rows()
    assume(one["error"] is None)
    if many["error"] is not None:
        assert "replicas fit" in many["error"]
        return
    assert one["batch_per_replica"] == many["batch_per_replica"]
    for name in ("ttft_ms", "tpot_ms", "latency_ms"):
        if one[name] is None:
            assert many[name] is None
        elif alike(load_machine(case.hardware, case.engine)[0], tp, pp, dp):
            assert many[name] == pytest.approx(one[name], rel=1e-12)
        else:
            assert many[name] >= one[name] * (1 - 1e-12)
    if alike(load_machine(case.hardware, case.engine)[0], tp, pp, dp):
        # a batch that does not fit is cut alike on every replica
        assert many["tokens_per_s"] == pytest.approx(dp * one["tokens_per_s"], rel=1e-9)
    assert many["max_concurrency"] == dp * one["max_concurrency"]
    assert many["memory_gib"] == pytest.approx(one["memory_gib"], rel=1e-12)


# --- tensor parallelism and weights ---------------------------------------------------------------------------------


def replicated_bytes(model: Any, tp: int, multiple: int, matrix_bytes: float) -> float:
    """What tp ranks hold together beyond one copy of the model, written down tensor by tensor."""
    d, dh, attention = model.hidden, model.attention.head_dim, model.attention
    vectors = model.norm.vectors * d
    row_biases = d * attention.out_bias + d * model.ffn.bias
    head_norms = 2 * dh * (attention.qk_norm is not None)
    copies = (tp - 1) * (model.norm.per_layer * vectors + row_biases + head_norms)
    kv_heads_more = max(attention.kv_heads, tp) - attention.kv_heads
    kv_projections = 2 * kv_heads_more * dh * d
    kv_biases = 2 * kv_heads_more * dh * attention.qkv_bias
    padded = -(-model.vocab // multiple) * multiple
    padding = -(-padded // tp) * tp - padded
    tables = 1 if model.tied_embeddings else 2
    once = model.learned_positions * d + model.norm.final * vectors
    ends = tables * padding * d + (tp - 1) * once
    return (
        model.layers * (kv_projections * matrix_bytes + (copies + kv_biases) * ACTIVATION_BYTES)
        + ends * ACTIVATION_BYTES
    )


def is_plain(name: str) -> bool:
    """Whether all layers are dense, with heads that are projected one by one and divide."""
    model = load_model(name)
    odd = (model.experts, model.attention.latent, model.linear)
    return odd == (None,) * 3 and model.attention.qk_norm != "heads" and name != "falcon-7b"


@every("name", [name for name in names(MODELS) if is_plain(name)])
@every("weights", ["bf16", "int4"])
def test_tp_adds_only_replicated_weights(name: str, weights: str) -> None:
    model, dtype = load_model(name), weight_dtype(weights)
    tested = 0
    for engine in (load_engine("vllm"), load_engine("lecture")):
        multiple = engine.vocabulary_multiple
        whole = sum(stage_weight_bytes(model, Shard.of(model, 1, multiple), Stages.of(model, 1), dtype))
        for tp in range(2, model.attention.heads + 1):
            if tp_allowed(model, engine, tp) is None:
                rank_bytes = sum(stage_weight_bytes(model, Shard.of(model, tp, multiple), Stages.of(model, 1), dtype))
                extra = replicated_bytes(model, tp, multiple, dtype.bytes)
                assert tp * rank_bytes == pytest.approx(whole + extra, rel=1e-14), f"{name} at tp {tp}"
                tested += 1
    assert tested >= 4


@some
@given(cases(), st.sampled_from([1, 2, 4, 7, 8]))
def test_weights_of_the_results_are_those_of_the_tensors(case: Case, tp: int) -> None:
    assume(degrees(case, tp))
    row = case.price(tp=[tp]).row(0)
    assume(row["error"] is None)
    model, engine = load_model(case.model), load_machine(case.hardware, case.engine)[1]
    dtype = weight_dtype(case.weights or model.weights)
    multiple = engine.vocabulary_multiple
    shard = Shard.of(model, tp, multiple)
    expected = sum(stage_weight_bytes(model, shard, Stages.of(model, 1), dtype)) / GIB
    if engine.memory.rotary_tables and not model.learned_positions:
        expected += 2 * model.max_context * model.attention.head_dim / GIB
    assert row["weights_gib"] == pytest.approx(expected, rel=1e-12)


# --- one plan or thousands ------------------------------------------------------------------------------------------


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in COLUMNS:
        if isinstance(one[name], float) and isinstance(other[name], float):
            assert other[name] == pytest.approx(one[name], rel=1e-12), name
        else:
            assert other[name] == one[name], f"{name}: {one['error']} / {other['error']}"


def mixed_points(count: int, seed: int) -> list[dict[str, Any]]:
    """Points of every machine, model and schedule; some of them cannot be priced."""
    rng = np.random.default_rng(seed)

    def pick(values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    points = []
    for _ in range(count):
        hardware, engine = pick(MACHINES)
        points.append(
            {
                "model": pick(SHAPES), "hardware": hardware, "engine": engine, "isl": int(rng.integers(1, 1500)),
                "osl": int(rng.integers(1, 300)), "schedule": pick(["continuous", "static"]),
                "arrivals": pick(["steady", "waves"]), "weights": pick([None, "fp8"]), "tp": pick([1, 2, 4, 8, 16]),
                "pp": pick([1, 1, 2, 3]), "dp": pick([1, 1, 2, 3]), "concurrency": pick([1, 3, 17, 64, 500]),
                "gpus": pick([None, 16, 32, 48, 128]), "attention": pick([None, None, "batch"]),
            }
        )  # fmt: skip
    return points


def table_of(points: list[dict[str, Any]]) -> Results:
    return estimate_points({name: [point[name] for point in points] for name in points[0]}, len(points))


def test_a_plan_alone_equals_the_same_plan_in_a_mixed_table() -> None:
    points = mixed_points(240, seed=1)
    together = table_of(points)
    assert sum(error is None for error in together["error"]) > 60
    for row in range(0, len(points), 4):
        assert_same(table_of([points[row]]).row(0), together.row(row))


@pytest.mark.parametrize("hardware", ["tpu-v4", "tpu-v5e"])
def test_a_plan_keeps_its_own_slice_of_a_torus_in_a_table(hardware: str) -> None:
    """Rows that ask for different numbers of chips sit on different slices, whose axes may close to rings or not."""
    points = [
        {"model": "palm-62b", "hardware": hardware, "tp": tp, "gpus": gpus, "isl": 512, "osl": 64}
        for tp in (8, 16, 32)
        for gpus in (32, 64, 128, 256)
    ]
    together = table_of(points)
    for row, point in enumerate(points):
        assert_same(table_of([point]).row(0), together.row(row))


def test_a_degree_that_tiles_one_slice_and_not_another_stays_valid_in_a_table() -> None:
    """TP12 tiles the slice of 768 chips (8x8x12) but not that of 1024."""
    columns = {"model": ["palm-540b"], "hardware": ["tpu-v4"], "weights": ["int4"], "tp": [12, 16]}
    first, second = estimate_points({**columns, "gpus": [768, 1024]}, 2).rows()
    alone = estimate_points({**columns, "tp": [12], "gpus": [768]}, 1).row(0)
    assert alone["error"] is None
    assert_same(alone, first)
    assert second["error"] is None


def many_points(count: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    return {
        "model": ["llama3-70b"],
        "tp": rng.choice([2, 4, 8, 16], count),
        "pp": rng.choice([1, 2, 3], count),
        "isl": rng.integers(100, 3000, count),
        "osl": rng.integers(1, 500, count),
        "concurrency": rng.integers(1, 300, count),
    }


def test_a_plan_alone_equals_the_same_plan_on_both_sides_of_a_block_boundary() -> None:
    count, block = serving.BLOCK_ROWS + 500, serving.BLOCK_ROWS
    columns = many_points(count)
    together = estimate_points(columns, count)
    for row in (0, 1, block - 2, block - 1, block, block + 1, count - 1):
        own = {name: [column[row % len(column)]] for name, column in columns.items()}
        assert_same(estimate_points(own, 1).row(0), together.row(row))


def test_the_size_of_a_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = many_points(50)
    whole = estimate_points(columns, 50)
    monkeypatch.setattr(serving, "BLOCK_ROWS", 7)
    cut = estimate_points(columns, 50)
    for row in range(50):
        assert_same(whole.row(row), cut.row(row))
    for parts, others in ((whole.ttft_parts, cut.ttft_parts), (whole.tpot_parts, cut.tpot_parts)):
        for bound, column in parts.items():
            assert others[bound] == pytest.approx(column, rel=1e-12)


@some
@given(cases(), st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)), min_size=2, max_size=8))
def test_the_order_of_a_table_is_kept(case: Case, plans: list[tuple[int, int]]) -> None:
    columns = {"tp": [tp for tp, _ in plans], "pp": [pp for _, pp in plans], "gpus": [64]}
    forward = case.price(len(plans), **columns)
    backward = case.price(len(plans), **{name: column[::-1] for name, column in columns.items()})
    for row in range(len(plans)):
        assert_same(forward.row(row), backward.row(len(plans) - 1 - row))


# --- figures that follow from one another ---------------------------------------------------------------------------


@some
@given(requests())
def test_parts_add_up_and_identities_hold(request: Request) -> None:
    results = ranked(request)
    ttft, tpot = results["ttft_ms"].astype(float), results["tpot_ms"].astype(float)
    assert sum(results.ttft_parts.values()) == pytest.approx(ttft * MS, rel=1e-9)
    answers = np.isfinite(tpot)
    assert np.all(answers) == (request.workload.osl > 1)
    osl, isl, gpus = request.workload.osl, request.workload.isl, request.gpus
    if osl > 1:
        assert sum(results.tpot_parts.values()) == pytest.approx(tpot * MS, rel=1e-9)
    assert results["latency_ms"] == pytest.approx(ttft + (osl - 1) * np.where(answers, tpot, 0.0), rel=1e-12)

    rate = results["tokens_per_s"]
    assert results["requests_per_s"] * osl == pytest.approx(rate, rel=1e-12)
    if osl > 1:  # requests in flight over their residence
        assert rate == pytest.approx(results["concurrency"] * osl / (results["latency_ms"] * MS), rel=1e-9)
    assert results["total_tokens_per_s"] == pytest.approx(rate * (isl + osl) / osl, rel=1e-12)
    assert results["tokens_per_s_per_gpu"] * gpus == pytest.approx(rate, rel=1e-12)
    assert results["gpu_s_per_token"] * rate == pytest.approx(np.full(len(rate), float(gpus)), rel=1e-12)
    price, watts = request.hardware.price, request.hardware.chip.tdp_w
    if price is None:
        assert np.all(np.isnan(results["usd_per_mtok"]))
    else:
        dollars = price.usd_per_chip_hour * gpus / HOUR
        assert rate * results["usd_per_mtok"] / 1e6 == pytest.approx(np.full(len(rate), dollars), rel=1e-12)
    if watts is None:
        assert np.all(np.isnan(results["wh_per_mtok"]))
    else:
        assert rate * results["wh_per_mtok"] / 1e6 == pytest.approx(np.full(len(rate), watts * gpus / HOUR), rel=1e-12)
    used = results["tp"] * results["pp"] * results["dp"]
    assert np.all(results["idle_gpus"] == gpus - used)
    assert np.all(results["idle_gpus"] >= 0)
    assert np.all(results["batch_per_replica"] == np.ceil(results["concurrency"] / results["dp"]))
    assert np.all(results["queue_ms"] == 0)


@some
@given(cases(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 200))
def test_steady_arrivals_and_waves_give_the_same_throughput(case: Case, tp: int, pp: int, batch: int) -> None:
    assume(degrees(case, tp))
    continuous = case._replace(schedule="continuous")
    steady, waves = (
        continuous._replace(arrivals=arrivals).price(tp=[tp], pp=[pp], concurrency=[batch]).row(0)
        for arrivals in ("steady", "waves")
    )
    assume(steady["error"] is None)
    assert waves["tokens_per_s"] == pytest.approx(steady["tokens_per_s"], rel=1e-12)
    if batch > 1 and steady["batch_per_replica"] > 1:
        assert waves["ttft_ms"] > steady["ttft_ms"] * (1 - 1e-12)
        if steady["tpot_ms"] is not None:
            assert waves["tpot_ms"] <= steady["tpot_ms"] * (1 + 1e-12)


separate = st.sampled_from([("h100-lecture", None), ("h100-sxm", "sglang"), ("tpu-v4-lecture", None)])


@some
@given(cases(separate), st.sampled_from([1, 2, 4, 8]), st.integers(1, 200))
def test_a_closed_loop_conserves_residence_where_prefills_run_alone(case: Case, tp: int, batch: int) -> None:
    """R = b E + (osl - 1) D(b): E is the prefill of a request that is alone, D(b) the step of a static batch.

    Beside these a request waits for the host before its first token, and for the step in flight.
    """
    assume(degrees(case, tp))
    continuous, static = (case._replace(schedule=schedule) for schedule in ("continuous", "static"))
    loaded = continuous.price(tp=[tp], concurrency=[batch]).row(0)
    assume(loaded["error"] is None)
    b, osl = loaded["batch_per_replica"], case.osl
    assume(b - 1 <= osl - 1)  # otherwise several prompts share a pass, which is cheaper than one by one
    alone = continuous.price(tp=[tp], concurrency=[1]).row(0)
    step = static.price(tp=[tp], concurrency=[b]).row(0)["tpot_ms"] if osl > 1 else 0.0
    engine = load_machine(case.hardware, case.engine)[1]
    request = engine.host.request_us / 1000
    joining = engine.scheduler.join_steps * static.price(tp=[tp], concurrency=[b]).row(0)["tpot_ms"] if osl > 1 else 0.0
    assume(osl > 1 or b == 1)
    residence = b * (alone["ttft_ms"] - request) + request + (joining if b > 1 else 0.0) + (osl - 1) * step
    assert loaded["tokens_per_s"] == pytest.approx(b * osl / (residence * MS), rel=1e-9)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "ideal"])
@pytest.mark.parametrize(("isl", "batch"), [(128, 64), (64, 128), (256, 32), (1024, 64), (8192, 4)])
def test_prompts_that_share_passes_are_worth_as_much_in_flight_as_in_a_batch(engine: str, isl: int, batch: int) -> None:
    """Answers of one token: a closed loop fills the same passes of prompt tokens as a static batch.

    R = b E holds there too, E being a prompt's share of its pass: the prompts beside it in its own pass do not hold
    it up a second time. Decodes riding along take a little of a mixed engine's budget.
    """
    case = Case("llama3.1-8b", "h100-sxm", engine, isl, 1, "continuous", "steady", None)
    loop = case.price(tp=[1], concurrency=[batch]).row(0)
    static = case._replace(schedule="static").price(tp=[1], concurrency=[batch]).row(0)
    assert static["batch_per_replica"] == loop["batch_per_replica"] == batch
    request_ms = load_engine(engine).host.request_us / 1000  # a batch that is handed over whole does not pay it
    assert 1000 * batch / (loop["latency_ms"] - request_ms) == pytest.approx(static["tokens_per_s"], rel=0.1)


@some
@given(cases(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 100), st.integers(1, 200))
def test_a_static_batch_decodes_in_steps_of_its_context_alone(
    case: Case, tp: int, pp: int, batch: int, shift: int
) -> None:
    """tpot = D(b) at context isl + osl/2, however that divides; for one request a loop decodes the same."""
    assume(degrees(case, tp) and case.isl > shift and case.osl > 1)
    static = case._replace(schedule="static")
    other = static._replace(isl=case.isl - shift, osl=case.osl + 2 * shift)
    assume(other.isl + other.osl <= load_model(case.model).max_context)
    first = static.price(tp=[tp], pp=[pp], concurrency=[batch]).row(0)
    second = other.price(tp=[tp], pp=[pp], concurrency=[batch]).row(0)
    assume(first["error"] is None and first["batch_per_replica"] == second["batch_per_replica"])
    assert second["tpot_ms"] == pytest.approx(first["tpot_ms"], rel=1e-12)
    alone = [case._replace(schedule=s).price(tp=[tp], pp=[pp]).row(0)["tpot_ms"] for s in ("static", "continuous")]
    assert alone[0] == pytest.approx(alone[1], rel=1e-12)


@some
@given(cases(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.integers(1, 100))
def test_mfu_is_useful_flops_over_peak_and_time(case: Case, tp: int, pp: int, batch: int) -> None:
    """2 x matmul parameters x tokens / (used chips x peak of the compute dtype x time), of a static batch."""
    assume(degrees(case, tp))
    row = case._replace(schedule="static").price(tp=[tp], pp=[pp], concurrency=[batch]).row(0)
    assume(row["error"] is None)
    model, chip = load_model(case.model), load_machine(case.hardware, case.engine)[0].chip
    attention, ffn = model.attention, model.ffn
    layer = model.hidden * attention.head_dim * (2 * attention.heads + 2 * attention.kv_heads)
    layer += model.hidden * ffn.hidden * (ffn.inputs + 1)
    matrices = model.layers * layer + model.vocab * model.hidden
    assert matmul_parameters(model) == matrices
    computes_in_fp8 = row["weights"] == "fp8" and "fp8" in chip.compute_tflops
    peak = chip.compute_tflops["fp8" if computes_in_fp8 else "bf16"] * 1e12
    b = row["batch_per_replica"]
    prefill = 2 * matrices * b * case.isl / (tp * pp * peak * row["ttft_ms"] * MS)
    assert row["mfu_prefill"] == pytest.approx(prefill, rel=1e-9)
    if case.osl > 1:
        decode = 2 * matrices * b / (tp * pp * peak * row["tpot_ms"] * MS)
        assert row["mfu_decode"] == pytest.approx(decode, rel=1e-9)
        assert row["mfu_decode"] < 1
    else:
        assert row["mfu_decode"] is None
    assert row["mfu_prefill"] < 1
