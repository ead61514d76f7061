"""Speculative decoding: what a step yields, what it costs, what it holds, and where it stops to help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import forget_files
from hypothesis import given, settings
from hypothesis import strategies as st

import planner
from planner import load_engine, load_machine, load_model
from planner.costs.layers import Pass, Structure, count
from planner.costs.memory import Budget
from planner.costs.rows import Rows
from planner.costs.serving import Estimates, Fit, Setting, fit, formats_of, itemise, price
from planner.costs.speculation import DRAFT, Drafting, tokens_per_step
from planner.costs.terms import Terms
from planner.costs.weights import Shard
from planner.explaining.breakdown import breakdown
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.request import Request
from planner.specs.drafts import draft_of
from planner.specs.model import Prediction
from planner.specs.speculation import Draft, Speculation
from planner.specs.workload import Workload

NAMES = {
    "mixed": ("llama3.1-70b", "h100-sxm", "vllm"),
    "separate": ("llama3.1-70b", "h100-sxm", "sglang"),
    "never cut": ("llama3.1-70b", "h100-lecture", "lecture"),
    "window": ("mistral-7b", "h100-sxm", "vllm"),
}


def setting_of(names: tuple[str, str, str], draft: Draft | None = None, **options: Any) -> Setting:
    model, (machine, software) = load_model(names[0]), load_machine(*names[1:])
    formats = formats_of(model, machine, software, None, None)
    drafting = None
    if draft is not None:
        drafting = Drafting.of(draft, formats, lambda own, kv: formats_of(own, machine, software, None, kv))
    return Setting(
        model, machine, software, Placement.of(machine, 64), formats, Structure(), Budget.of(machine, software),
        drafting=drafting, **options,
    )  # fmt: skip


def served(setting: Setting, **columns: Any) -> tuple[Fit, Estimates]:
    rows = Rows.of(**({"tp": 4, "pp": 1, "dp": 1, "isl": 1024, "osl": 256, "concurrency": 1} | columns))
    fitted = fit(setting, rows, clip=False)
    return fitted, price(setting, rows, fitted)


def beside(names: tuple[str, str, str], kind: str) -> Draft:
    """A draft of a kind; for prediction modules one layer like the target's."""
    model = load_model(names[0])
    if kind == "mtp":
        model = model._replace(prediction=Prediction(1))
        return draft_of("mtp", model)
    if kind == "ngram":
        return draft_of("ngram", model)
    return draft_of({"llama3.1-70b": "llama3.2-1b", "mistral-7b": "mistral-7b"}[names[0]], model)


@given(st.integers(0, 64), st.floats(0, 1))
def test_tokens_of_a_step_are_the_sum_of_the_chances_to_get_so_far(k: int, a: float) -> None:
    expected = sum(a**place for place in range(k + 1))
    assert float(tokens_per_step(k, a)) == pytest.approx(expected, rel=1e-9)
    assert float(tokens_per_step(k, a)) * (1 + 1e-12) >= 1
    assert float(tokens_per_step(0, a)) == 1.0


@pytest.mark.parametrize(("k", "a"), [(1, 0.5), (3, 0.7), (5, 0.9), (8, 0.3), (4, 0.0), (4, 1.0)])
def test_tokens_of_a_step_are_those_of_a_simulation(k: int, a: float) -> None:
    """Drafted tokens count up to the first that is rejected; the target adds one of its own."""
    accepted = np.random.default_rng(1).random((200_000, k)) < a
    emitted = np.cumprod(accepted, axis=1).sum(axis=1) + 1
    assert float(tokens_per_step(k, a)) == pytest.approx(emitted.mean(), rel=0.01)


def test_a_verification_counts_every_row_and_reads_the_cache_once() -> None:
    model, engine = load_model("llama3-70b"), load_engine("vllm")
    formats = formats_of(model, *load_machine("h100", "vllm"), None, None)
    shard, k, batch, context = Shard.of(model, 8), 3, 16.0, 2000.0

    def counted(work: Pass) -> tuple[dict[str, Any], dict[str, Any]]:
        operations, transfers = count(model, engine, shard, work, formats, Structure())
        return {each.name: each for each in operations}, {each.name: each for each in transfers}

    plain, verify = counted(Pass(batch, context)), counted(Pass(batch * (k + 1), context, queries=k + 1.0))
    for name, operation in verify[0].items():
        assert operation.flops == pytest.approx((k + 1) * plain[0][name].flops), name
        assert operation.weight_bytes == pytest.approx(plain[0][name].weight_bytes), name
        assert operation.kv_bytes == pytest.approx(plain[0][name].kv_bytes), name
    for name, transfer in verify[1].items():
        assert transfer.bytes == pytest.approx((k + 1) * plain[1][name].bytes), name
    attention = verify[0]["attention (decode)"]
    assert attention.flops == pytest.approx(4 * 128 * 8 * batch * 4 * context)  # 8 query heads a rank, 4 rows
    assert attention.kv_bytes == pytest.approx(batch * context * 1 * 2 * 128 * 2)  # one KV head a rank
    assert attention.items == pytest.approx(batch)


def test_golden_free_drafts_that_are_all_accepted_divide_a_memory_bound_step() -> None:
    """Lecture constants: a step is weights and KV over the bandwidth, whatever the rows; k + 1 tokens come of it."""
    names = ("llama3-8b", "h100-lecture", "lecture")
    _, plain = served(setting_of(names), tp=1)
    draft = setting_of(names, draft_of("ngram", load_model("llama3-8b")))
    for k in (1, 3, 7):
        _, drafted = served(draft, tp=1, spec_tokens=k, spec_accept=1.0)
        assert drafted.tpot == pytest.approx(plain.tpot / (k + 1), rel=1e-9)
    _, half = served(draft, tp=1, spec_tokens=3, spec_accept=0.5)
    assert half.tpot == pytest.approx(plain.tpot / 1.875, rel=1e-9)  # 1 + 1/2 + 1/4 + 1/8


def test_golden_a_draft_model_costs_its_own_decode_steps() -> None:
    """Lecture constants on one chip: a draft's step is its weights and KV over the bandwidth, and no host time."""
    pair = ("llama3-70b", "h100-lecture", "lecture")
    setting = setting_of(pair, draft_of("llama3-8b", load_model("llama3-70b")))
    _, drafted = served(setting, tp=1, spec_tokens=4, spec_accept=1.0)
    _, target = served(setting_of(pair), tp=1)
    _, draft = served(setting_of(("llama3-8b", *pair[1:])), tp=1)
    host = setting.engine.host.step_us * 1e-6
    assert drafted.tpot * 5 == pytest.approx(target.tpot + 4 * (draft.tpot - host), rel=1e-9)
    weights, context = 2 * (8_030_261_248 - 128_256 * 4096), 1024 + 128  # the embedding is only looked up
    by_hand = (weights + context * 131_072) / (0.8 * setting.hardware.chip.memory_bandwidth)
    assert draft.tpot - host == pytest.approx(by_hand, rel=1e-3)
    assert drafted.ttft == pytest.approx(target.ttft + draft.ttft - host, rel=1e-4)


def test_nothing_accepted_costs_more_than_nothing_drafted() -> None:
    for kind in ("ngram", "model", "mtp"):
        setting = setting_of(NAMES["mixed"], beside(NAMES["mixed"], kind))
        for load in (1, 64):
            _, drafted = served(setting, spec_tokens=3, spec_accept=0.0, concurrency=load)
            _, plain = served(setting_of(NAMES["mixed"]), concurrency=load)
            assert drafted.tpot[0] > plain.tpot[0]
            assert drafted.mfu_decode[0] < plain.mfu_decode[0], "work for rejected tokens is no use"


@pytest.mark.parametrize("kind", ["ngram", "model", "mtp"])
@pytest.mark.parametrize("schedule", ["continuous", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_draft_nothing_are_what_they_were_bit_for_bit(name: str, schedule: Any, kind: str) -> None:
    work = {"isl": [100, 3000], "osl": [40, 500], "concurrency": [3, 40], "pp": [1, 2]}
    plain = served(setting_of(NAMES[name], schedule=schedule), **work)
    both = setting_of(NAMES[name], beside(NAMES[name], kind), schedule=schedule)
    alone = served(both, **work)
    drafting = {key: [*values, *values] for key, values in work.items()}
    mixed = served(both, **drafting, spec_tokens=[0, 0, 3, 3], spec_accept=[0.3, 0.9, 0.5, 0.5])
    for expected, one, beside_others in zip(plain, alone, mixed, strict=True):
        for column in expected._fields:
            values = [getattr(each, column) for each in (expected, one, beside_others)]
            parts = values if isinstance(values[0], tuple) else [(value,) for value in values]
            for these in zip(*parts, strict=True):
                assert np.array_equal(these[0], these[1], equal_nan=True), column
                assert np.array_equal(these[0], np.broadcast_to(these[2], (4,))[:2], equal_nan=True), column


@pytest.mark.parametrize("kind", ["ngram", "model", "mtp"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(
    isl=st.integers(1, 8000), osl=st.integers(2, 800), load=st.integers(1, 64), pp=st.sampled_from((1, 2, 4)),
    k=st.integers(1, 8), shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip
def test_the_more_is_accepted_the_sooner_a_request_ends(
    name: str, kind: str, isl: int, osl: int, load: int, pp: int, k: int, shares: tuple[float, float]
) -> None:
    setting = setting_of(NAMES[name], beside(NAMES[name], kind))
    work = {"isl": isl, "osl": osl, "concurrency": load, "pp": pp}
    _, priced = served(setting, **work, spec_tokens=k, spec_accept=sorted(shares))
    # where more prompts come than there are steps, several share a pass, which takes a little longer
    slack = 1 + (1e-9 if load <= 1 + (osl - 1) / (k + 1) else 0.05)
    assert priced.latency[1] <= priced.latency[0] * slack
    assert priced.requests_per_s[1] * slack >= priced.requests_per_s[0]


@pytest.mark.parametrize("kind", ["ngram", "model", "mtp"])
@pytest.mark.parametrize("plan", [Plan(8), Plan(4, 2), Plan(2, 2, 2)])
def test_terms_add_up_to_the_totals(kind: str, plan: Plan) -> None:
    model, (machine, engine) = load_model("llama3.1-70b"), load_machine("h100", "vllm")
    draft = beside(NAMES["mixed"], kind)
    work = Workload(concurrency=48, speculation=Speculation(3, 0.7, draft))
    found = breakdown(Request(model, machine, engine, 8, work), plan, 48)
    for times, column in ((found.ttft, "ttft_ms"), (found.tpot, "tpot_ms")):
        assert sum(item.seconds for item in times.items) == pytest.approx(times.total, rel=1e-9)
        assert times.total * 1e3 == pytest.approx(found.row[column], rel=1e-9)
        drafted = [item.name for item in times.items if item.name.startswith(DRAFT)]
        assert bool(drafted) == (kind != "ngram")
    assert found.row["spec_tokens"] == 3
    assert found.row["tokens_per_step"] == pytest.approx(1 + 0.7 + 0.49 + 0.343)


def test_a_draft_in_a_pipeline_runs_on_the_last_stage() -> None:
    """One request: stages one after the other, then the draft, which no other stage waits for less."""
    setting = setting_of(NAMES["mixed"], beside(NAMES["mixed"], "model"))
    free = setting_of(NAMES["mixed"], beside(NAMES["mixed"], "ngram"))
    columns = {"spec_tokens": 3, "spec_accept": 0.5, "osl": 400}
    _, (one, two) = (None, [served(each, pp=[1, 2], **columns)[1].tpot for each in (setting, free)])
    assert one[0] - two[0] == pytest.approx(one[1] - two[1], rel=1e-9), "the same passes on as many chips"
    loaded = [served(each, pp=4, concurrency=128, **columns)[1].tpot[0] for each in (setting, free)]
    assert loaded[0] > loaded[1]


def test_memory_with_a_draft_is_the_sum_of_both() -> None:
    both = planner.estimate(
        "llama3.1-70b", tp=8, concurrency=32, spec_tokens=8, spec_accept=0.7, draft="llama3.1-8b"
    )  # fmt: skip
    target, draft = (planner.estimate(name, tp=8, concurrency=32) for name in ("llama3.1-70b", "llama3.1-8b"))
    assert both["weights_gib"] == pytest.approx(target["weights_gib"] + draft["weights_gib"], rel=1e-9)
    tokens = 1024 + 128  # held on average, in blocks of 16; with 8 more tokens one block more
    held = (target["kv_gib"] + draft["kv_gib"]) * (tokens + 16) / tokens
    assert both["kv_gib"] == pytest.approx(held, rel=1e-9)
    assert both["max_concurrency"] < target["max_concurrency"]
    looked_up = planner.estimate("llama3.1-70b", tp=8, concurrency=32, spec_tokens=8, spec_accept=0.7, draft="ngram")
    assert looked_up["weights_gib"] == target["weights_gib"]


def test_with_stages_the_draft_is_held_by_the_last() -> None:
    one, draft = (planner.estimate(name, tp=4, **more) for name, more in (
        ("llama3.1-70b", {"pp": 2}), ("llama3.2-1b", {})
    ))  # fmt: skip
    both = planner.estimate("llama3.1-70b", tp=4, pp=2, spec_tokens=4, spec_accept=0.7, draft="llama3.2-1b")
    assert both["weights_gib"] == pytest.approx(one["weights_gib"] + draft["weights_gib"], rel=0.02)


def test_each_request_takes_its_drafted_tokens_of_an_iteration() -> None:
    plain = planner.estimate("llama3.2-1b", tp=8, isl=64, osl=64, max_num_batched_tokens=2048)
    assert plain["max_concurrency"] == 1024
    drafted = planner.estimate(
        "llama3.2-1b", tp=8, isl=64, osl=64, max_num_batched_tokens=2048, spec_tokens=4, spec_accept=0.5, draft="ngram"
    )  # fmt: skip
    assert drafted["max_concurrency"] == 2048 // 5


def with_module(folder: Path) -> str:
    path = folder / "predicting.yaml"
    path.write_text("extends: llama3.1-8b\nname: predicting\nprediction: {modules: 1}\n", encoding="utf-8")
    forget_files()
    return str(path)


def test_a_prediction_module_is_a_layer_and_a_projection(tmp_path: Path) -> None:
    name = with_module(tmp_path)
    plain = planner.estimate(name, tp=2)
    assert plain["weights_gib"] == planner.estimate("llama3.1-8b", tp=2)["weights_gib"], "held where it drafts only"
    drafted = planner.estimate(name, tp=2, spec_tokens=2, spec_accept=0.8)
    layer = (4096 * (32 + 16) * 128 + 4096 * 4096 + 3 * 4096 * 14336) / 2 + 2 * 4096  # its norms on every rank
    elements = layer + 2 * 4096 * 4096 + 3 * 4096
    assert (drafted["weights_gib"] - plain["weights_gib"]) * 2**30 == pytest.approx(2 * elements, rel=1e-9)
    setting = setting_of((name, "h100-sxm", "vllm"), draft_of(None, load_model(name)))
    rows = Rows.of(tp=2, pp=1, dp=1, isl=1000, osl=101, concurrency=10, spec_tokens=2, spec_accept=1.0)
    terms = itemise(setting._replace(schedule="static"), rows, fit(setting, rows, clip=False)).tpot_parts
    assert isinstance(terms, Terms)
    flops = {item: float(np.ravel(term.work.flops)[0]) * 3 for (_, item), term in terms.items.items()}
    rows_of_both = 10 * 3 + 10  # the first pass sees the verified rows, the second one row a request
    assert flops[f"{DRAFT}joining projection"] == pytest.approx(2 * rows_of_both * 2 * 4096 * 4096)
    assert flops[f"{DRAFT}down"] == pytest.approx(2 * rows_of_both * 7168 * 4096)
    assert flops[f"{DRAFT}head"] == pytest.approx(2 * 20 * 4096 * 128256 / 2)
    assert flops["head"] == pytest.approx(2 * 30 * 4096 * 128256 / 2)


@pytest.mark.parametrize("draft", ["llama3.2-1b", "llama3-8b", "ngram"])
def test_it_helps_few_requests_and_hurts_many(draft: str) -> None:
    """TensorRT-LLM's and vLLM's documentation: gains at low batch, none once the chips are busy."""

    def gain(load: int) -> float:
        work: dict[str, Any] = {"tp": 8, "concurrency": load, "isl": 128, "osl": 1024}
        plain = planner.estimate("llama3-70b", **work)
        drafted = planner.estimate("llama3-70b", **work, spec_tokens=5, spec_accept=0.6, draft=draft)
        return float(drafted["tokens_per_s"] / plain["tokens_per_s"])

    gains = [gain(load) for load in (1, 16, 128, 1024)]
    assert gains[0] > 1.1
    assert gains[-1] < 1
    assert gains == sorted(gains, reverse=True)


def test_gains_at_one_request_are_of_the_size_that_was_published() -> None:
    """Direction only: 1.5 to 3 times (Leviathan et al. 2023: 2 to 3 on T5-XXL; SGLang's documentation: 1.5 with EAGLE-2
    and 2.4 with EAGLE-3 on one H100). Acceptance differs with text and draft."""
    plain = planner.estimate("llama3.1-70b", tp=4)
    for accept, low, high in ((0.6, 1.3, 2.2), (0.8, 1.8, 3.2)):
        drafted = planner.estimate("llama3.1-70b", tp=4, spec_tokens=4, spec_accept=accept, draft="llama3.2-1b")
        assert low < plain["tpot_ms"] / drafted["tpot_ms"] < high
