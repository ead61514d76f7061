"""From passes to requests: schedules, chunks, pipelines, what memory cuts off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import Engine, Hardware, InputError, Model, load_engine, load_hardware, load_machine, load_model
from planner.costs import serving
from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure, causal_pairs
from planner.costs.memory import Budget
from planner.costs.rows import Rows
from planner.costs.serving import Estimates, Fit, Setting, fit, formats_of, price
from planner.costs.step import PassTime, Replica, pass_time
from planner.plans.placement import Placement

MS, GIB = 1e-3, 2.0**30


def setting_of(model: Model, hardware: Hardware, engine: Engine, **options: Any) -> Setting:
    placement = Placement.of(hardware, 512)
    formats = formats_of(model, hardware, engine, None, None)
    return Setting(model, hardware, engine, placement, formats, Structure(), Budget.of(hardware, engine), **options)


def served(setting: Setting, clip: bool = False, **columns: Any) -> tuple[Fit, Estimates]:
    """Memory and times of rows; a degree that is not given is 1."""
    rows = Rows.of(**({"tp": 1, "pp": 1, "dp": 1, "isl": 1024, "osl": 256, "concurrency": 1} | columns))
    fitted = fit(setting, rows, clip)
    return fitted, price(setting, rows, fitted)


def one_pass(setting: Setting, work: Pass, tp: int = 1, pp: int = 1) -> PassTime:
    """Seconds of one pass on one replica."""
    degrees = (np.full(1, tp), np.full(1, pp), np.ones(1, dtype=int))
    network = Network(setting.placement, setting.engine)
    shared = setting.model, setting.hardware, setting.engine, network, setting.formats, setting.structure
    return pass_time(Replica(*shared, *degrees), Pass(*(np.full(1, float(value)) for value in work)))


def prompt(tokens: int, riding: int = 0, context: float = 0.0, prior: int = 0, ended: bool = True) -> Pass:
    """A pass over the tokens of one prompt behind `prior` ones, with decodes riding along."""
    pairs = causal_pairs(float(prior + tokens)) - causal_pairs(float(prior))
    return Pass(riding, context, tokens, pairs, prior, 1.0, float(ended))


LECTURE_8B = setting_of(load_model("llama3-8b"), *load_machine("h100-lecture"))
VLLM_8B = setting_of(load_model("llama3.1-8b"), *load_machine("h100-sxm", "vllm"))
SGLANG_8B = setting_of(load_model("llama3.1-8b"), *load_machine("h100-sxm", "sglang"))


def waited(setting: Setting, step: Any, batch: int) -> Any:
    """What a request waits beside its prefill: the host before its first token, and the step in flight."""
    engine = setting.engine
    return engine.host.request_us * 1e-6 + (engine.scheduler.join_steps * step if batch > 1 else 0.0)


def chunked(setting: Setting, tokens: int | None) -> Setting:
    engine = setting.engine
    return setting._replace(engine=engine._replace(scheduler=engine.scheduler._replace(chunk_tokens=tokens)))


# --- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "engine", "weights", "kv_cache", "expected"),
    [
        ("h100-sxm", "vllm", None, None, ("bf16", "bf16", "bf16")),
        ("h100-sxm", "vllm", "fp8", None, ("fp8", "bf16", "fp8")),
        ("h100-sxm", "trtllm", "fp8", None, ("fp8", "fp8", "fp8")),  # the engine's rule
        ("h100-sxm", "trtllm", "int4", None, ("int4", "bf16", "bf16")),  # weight-only: 16-bit arithmetic
        ("h100-sxm", "trtllm", "fp8", "bf16", ("fp8", "bf16", "fp8")),
        ("h100-sxm", "vllm", "int8", "fp8", ("int8", "fp8", "bf16")),
        ("a100-80gb-sxm", "vllm", "fp8", None, ("fp8", "bf16", "bf16")),  # no fp8 units on this chip
    ],
)
def test_formats_follow_the_request_then_the_engine_then_the_chip(
    hardware: str, engine: str, weights: str | None, kv_cache: str | None, expected: tuple[str, str, str]
) -> None:
    formats = formats_of(load_model("llama3-8b"), load_hardware(hardware), load_engine(engine), weights, kv_cache)
    assert (formats.weights.name, formats.kv.name, formats.compute) == expected
    assert formats.native == "bf16"


@pytest.mark.parametrize(("weights", "kv_cache"), [("bf17", None), (None, "int4")])
def test_an_unknown_dtype_is_bad_input(weights: str | None, kv_cache: str | None) -> None:
    with pytest.raises(InputError, match=f"unknown dtype '{weights or kv_cache}'; expected one of"):
        formats_of(load_model("llama3-8b"), *load_machine("h100-sxm"), weights, kv_cache)


# --- static batches -------------------------------------------------------------------------------------------------


def test_a_static_batch_is_prefilled_together_and_decodes_together() -> None:
    static = LECTURE_8B._replace(schedule="static")
    _, priced = served(static, isl=512, osl=101, concurrency=16)
    together = one_pass(static, Pass(0, 512, 16 * 512, 16 * 512 * 513 / 2, 0, 16, 16)).whole.total
    step = one_pass(static, Pass(16, 512 + 101 / 2)).whole.total
    assert priced.ttft == pytest.approx(together, rel=1e-12)
    assert priced.tpot == pytest.approx(step, rel=1e-12)
    assert priced.latency == pytest.approx(together + 100 * step, rel=1e-12)
    assert priced.requests_per_s == pytest.approx(16 / priced.latency, rel=1e-12)


def test_the_lectures_prefill_of_a_batch_by_hand() -> None:
    """Compute-bound: layers for every token, T(T+1)/2 pairs a prompt, the head for the last row of each."""
    _, priced = served(LECTURE_8B._replace(schedule="static"), isl=2048, osl=2, concurrency=4)
    layers = 32 * 218103808
    flops = 2 * layers * 4 * 2048 + 4 * 32 * 32 * 128 * 4 * 2048 * 2049 / 2 + 2 * 4096 * 128256 * 4
    assert priced.ttft == pytest.approx(flops / (0.7 * 989e12) + 0.5e-3, rel=1e-12)


def test_a_static_prefill_keeps_to_the_engines_token_budget() -> None:
    """8 prompts of 3,000 tokens in passes of 8,192: two full ones and one of 7,616."""
    static = SGLANG_8B._replace(schedule="static")
    _, priced = served(static, isl=3000, osl=2, concurrency=8)
    # the passes do all the work of one pass, and pay three times what a pass costs by itself
    whole = one_pass(static, Pass(0, 3000, 24000, 8 * 3000 * 3001 / 2, 0, 8, 8)).whole
    assert priced.ttft > whole.total
    assert priced.ttft == pytest.approx(whole.total, rel=0.15)
    assert priced.ttft_parts.compute == pytest.approx(whole.compute, rel=0.03)
    host = static.engine.host.step_us * 1e-6
    starts = whole.overhead - host
    assert priced.ttft_parts.overhead == pytest.approx(3 * (host + starts), rel=0.02)


# --- continuous batching --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [LECTURE_8B, SGLANG_8B], ids=["lecture", "sglang"])
@pytest.mark.parametrize("batch", [1, 2, 33, 100])
def test_separate_prefills_hold_up_every_decode_in_flight(setting: Setting, batch: int) -> None:
    """tpot = D(b) + (b - 1) E / (osl - 1), ttft = E and what the request waits beside it."""
    _, priced = served(setting, isl=1500, osl=200, concurrency=batch)
    prefill = one_pass(setting, prompt(1500)).whole.total
    step = one_pass(setting, Pass(batch, 1600)).whole.total
    assert priced.ttft == pytest.approx(prefill + waited(setting, step, batch), rel=1e-12)
    assert priced.tpot == pytest.approx(step + (batch - 1) * prefill / 199, rel=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 33, 150])
def test_mixed_prefills_replace_the_decode_steps_they_ride_in(batch: int) -> None:
    """E = an iteration of the prompt with b - 1 decodes riding, less the decode step that it replaces."""
    _, priced = served(VLLM_8B, isl=1500, osl=200, concurrency=batch)
    iteration = one_pass(VLLM_8B, prompt(1500, batch - 1, 1600)).whole.total
    step = one_pass(VLLM_8B, Pass(batch, 1600)).whole.total
    assert priced.ttft == pytest.approx(iteration + waited(VLLM_8B, step, batch), rel=1e-12)
    assert priced.tpot == pytest.approx(step + (batch - 1) * (iteration - step) / 199, rel=1e-12)
    assert np.all(priced.tpot >= step)


@pytest.mark.parametrize("setting", [LECTURE_8B, SGLANG_8B, VLLM_8B], ids=["lecture", "sglang", "vllm"])
def test_waves_move_half_of_the_stall_from_tpot_to_ttft(setting: Setting) -> None:
    columns = {"isl": 1500, "osl": 200, "concurrency": 40}
    _, steady = served(setting, **columns)
    _, waves = served(setting._replace(arrivals="waves"), **columns)
    step = one_pass(setting, Pass(40, 1600)).whole.total
    stall = (steady.tpot - step) * 199
    assert waves.ttft - steady.ttft == pytest.approx(stall / 2, rel=1e-9)
    assert waves.tpot - step == pytest.approx((steady.tpot - step) / 2, rel=1e-9)


@pytest.mark.parametrize("setting", [LECTURE_8B, SGLANG_8B, VLLM_8B], ids=["lecture", "sglang", "vllm"])
@pytest.mark.parametrize("batch", [2, 40, 300])
def test_arrivals_only_divide_the_stall(setting: Setting, batch: int) -> None:
    columns = {"isl": 500, "osl": 200, "concurrency": batch}
    _, steady = served(setting, **columns)
    _, waves = served(setting._replace(arrivals="waves"), **columns)
    assert waves.ttft > steady.ttft
    assert waves.tpot < steady.tpot
    assert waves.latency == pytest.approx(steady.latency, rel=1e-12)
    assert waves.requests_per_s == pytest.approx(steady.requests_per_s, rel=1e-12)


@pytest.mark.parametrize("setting", [LECTURE_8B, SGLANG_8B, VLLM_8B], ids=["lecture", "sglang", "vllm"])
def test_an_answer_of_one_token_has_no_time_between_tokens(setting: Setting) -> None:
    for schedule in ("continuous", "static"):
        _, priced = served(setting._replace(schedule=schedule), isl=700, osl=1, concurrency=[1, 8])  # type: ignore[arg-type]
        assert np.all(np.isnan(priced.tpot))
        assert np.all(np.isnan(priced.mfu_decode))
        assert priced.latency == pytest.approx(priced.ttft, rel=1e-15)
        assert priced.requests_per_s[0] == pytest.approx(1 / priced.ttft[0], rel=1e-12)


@pytest.mark.parametrize("setting", [LECTURE_8B, SGLANG_8B, VLLM_8B], ids=["lecture", "sglang", "vllm"])
@pytest.mark.parametrize("arrivals", ["steady", "waves"])
def test_an_answer_of_one_token_waits_for_all_prefills_in_ttft(setting: Setting, arrivals: str) -> None:
    """Little's law: requests in flight = rate x residence, and there is nothing but TTFT to reside in."""
    alone = served(setting._replace(arrivals=arrivals), isl=700, osl=1)[1]  # type: ignore[arg-type]
    _, priced = served(setting._replace(arrivals=arrivals), isl=700, osl=1, concurrency=8)  # type: ignore[arg-type]
    assert priced.requests_per_s * priced.ttft == pytest.approx(8, rel=1e-12)
    assert priced.ttft > 2 * (alone.ttft - setting.engine.host.request_us * 1e-6)


@pytest.mark.parametrize("name", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("isl", [16, 128, 1500])
def test_no_token_comes_faster_than_a_decode_step(name: str, isl: int) -> None:
    for arrivals in ("steady", "waves"):
        setting = setting_of(load_model("llama3.1-8b"), *load_machine("h100-sxm", name), arrivals=arrivals)
        _, priced = served(setting, isl=isl, osl=128, concurrency=[1, 8, 128, 256])
        _, static = served(setting._replace(schedule="static"), isl=isl, osl=128, concurrency=[1, 8, 128, 256])
        assert np.all(priced.tpot >= static.tpot * (1 - 1e-12)), arrivals


@pytest.mark.parametrize(("tp", "pp"), [(1, 8), (2, 4), (1, 3), (1, 1)])
def test_a_longer_prompt_never_answers_sooner(tp: int, pp: int) -> None:
    """A last chunk of a few tokens still waits behind the full one before it, at every stage."""
    lengths = np.array([8000, 8191, 8192, 8193, 8200, 9000, 16384, 16385, 20000, 98304, 98305, 98400, 106496, 106500])
    _, priced = served(VLLM_8B, tp=tp, pp=pp, isl=lengths, osl=200)
    assert np.all(np.diff(priced.ttft) > 0)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
def test_a_larger_static_batch_never_starts_sooner(pp: int) -> None:
    batches = np.arange(1, 130)
    _, priced = served(VLLM_8B._replace(schedule="static"), pp=pp, isl=1024, osl=200, concurrency=batches)
    whole = batches[batches % pp == 0] - 1  # full microbatches
    assert np.all(np.diff(priced.ttft[whole]) > 0)


def test_chunks_of_equal_cost_take_c_plus_p_minus_1_stage_times() -> None:
    """The pipeline's textbook count, and a last chunk of 8 tokens adds less than one more stage."""
    setting = chunked(VLLM_8B, 1024)
    _, priced = served(setting, pp=4, isl=[4096, 4104], osl=200)
    stage = one_pass(setting, prompt(1024, prior=1536, ended=False), pp=4).slowest.total
    first = priced.ttft[0] - waited(setting, 0.0, 1)
    assert first == pytest.approx((4 + 4 - 1) * stage[0], rel=0.05)
    assert priced.ttft[0] < priced.ttft[1] < priced.ttft[0] + stage[0]


def test_a_loop_is_never_dearer_for_one_request_than_a_static_batch_of_one() -> None:
    for setting in (LECTURE_8B, SGLANG_8B, VLLM_8B):
        _, loop = served(setting)
        _, static = served(setting._replace(schedule="static"))
        assert loop.ttft == pytest.approx(static.ttft + waited(setting, 0.0, 1), rel=1e-12)
        assert loop.tpot == pytest.approx(static.tpot, rel=1e-12)


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_chunks_do_the_same_work_and_pay_for_every_pass() -> None:
    """2,048 tokens of the lecture's 70B in four chunks: FLOPs as before, 0.5 ms and the collectives four times."""
    whole = setting_of(load_model("llama3-70b"), *load_machine("h100-lecture"))
    _, once = served(whole, tp=8, isl=2048)
    _, cut = served(chunked(whole, 512), tp=8, isl=2048)
    assert cut.ttft_parts.compute == pytest.approx(once.ttft_parts.compute, rel=1e-12)
    assert cut.ttft_parts.overhead == pytest.approx(4 * once.ttft_parts.overhead, rel=1e-12)
    # 160 all-reduces of 14 steps of 2 us each come three times more; only the last chunk gathers logits
    assert cut.ttft_parts.network - once.ttft_parts.network == pytest.approx(3 * 160 * 14 * 2e-6, rel=1e-9)


@pytest.mark.parametrize(("isl", "chunk", "passes"), [(2048, 512, 4), (2049, 512, 5), (2047, 512, 4), (511, 512, 1)])
def test_c_chunks_flow_through_the_stages_in_c_plus_pp_minus_1_stage_times(isl: int, chunk: int, passes: int) -> None:
    setting = chunked(LECTURE_8B, chunk)
    for pp in (1, 2, 4):
        _, priced = served(setting, pp=pp, isl=isl)
        assert priced.ttft_parts.overhead / 0.5e-3 == pytest.approx(passes + pp - 1, rel=1e-12)


def test_chunks_of_one_prompt_read_back_what_came_before() -> None:
    """Three passes of 1,000, 1,000 and 500 tokens, each on its own."""
    setting = chunked(SGLANG_8B, 1000)
    _, priced = served(setting, isl=2500)
    passes = [
        one_pass(setting, prompt(1000, ended=False)),
        one_pass(setting, prompt(1000, prior=1000, ended=False)),
        one_pass(setting, prompt(500, prior=2000)),
    ]
    # the full chunks are priced at their average, which a norm that is not linear moves a little
    whole = sum(time.whole.total for time in passes) + waited(setting, 0.0, 1)
    assert priced.ttft == pytest.approx(whole, rel=1e-3)


def test_riding_decodes_leave_less_of_the_token_budget() -> None:
    """8,192 tokens an iteration: beside 64 decodes a prompt of 8,128 still fits, one token more needs a second."""
    engine = VLLM_8B.engine
    slow = VLLM_8B._replace(engine=engine._replace(host=engine.host._replace(step_us=1e5, per_sequence_us=0.0)))
    _, priced = served(slow, isl=[8128, 8129], osl=200, concurrency=65)
    assert priced.ttft[1] - priced.ttft[0] > 0.09
    _, alone = served(slow, isl=[8128, 8129, 8192, 8193], osl=200, concurrency=1)
    assert alone.ttft[2] - alone.ttft[0] < 0.01
    assert alone.ttft[3] - alone.ttft[2] > 0.09


def test_a_window_shortens_attention_of_prompt_and_answer() -> None:
    """Mistral's 4,096 tokens: beyond them a decode step stays as it is and a prefill grows by w a token."""
    model = load_model("mistral-7b")
    machine = load_machine("h100-lecture")
    windowed, full = (
        setting_of(model._replace(attention=model.attention._replace(window=window)), *machine)
        for window in (4096, None)
    )
    _, near = served(windowed, isl=[4000, 16000], osl=101)
    _, far = served(full, isl=[4000, 16000], osl=101)
    assert near.tpot[0] == pytest.approx(far.tpot[0], rel=1e-12)
    assert near.tpot[1] < far.tpot[1]
    pairs = 4096 * 4097 / 2 + (16000 - 4096) * 4096
    fewer = 16000 * 16001 / 2 - pairs
    assert far.ttft[1] - near.ttft[1] == pytest.approx(4 * 32 * 32 * 128 * fewer / (0.7 * 989e12), rel=1e-9)
    _, cut = served(chunked(windowed, 1000), isl=16000, osl=101)
    assert cut.ttft_parts.compute == pytest.approx(near.ttft_parts.compute[1], rel=1e-12)


# --- pipelines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "batch", "microbatches", "each"),
    [(4, 1, 1, 1), (4, 3, 3, 1), (4, 4, 4, 1), (4, 5, 4, 2), (4, 64, 4, 16), (1, 9, 1, 9)],
)
def test_a_decode_step_is_the_sum_of_stages_or_the_slowest_for_every_microbatch(
    pp: int, batch: int, microbatches: int, each: int
) -> None:
    for setting in (LECTURE_8B, VLLM_8B):
        static = setting._replace(schedule="static")
        _, priced = served(static, pp=pp, concurrency=batch, isl=1000, osl=48)
        time = one_pass(static, Pass(each, 1024), pp=pp)
        longest = np.maximum(time.whole.total, microbatches * time.slowest.total)
        assert priced.tpot == pytest.approx(longest, rel=1e-12)
        waiting = longest - time.whole.total
        assert priced.tpot_parts.bubble == pytest.approx(waiting, rel=1e-9, abs=1e-12)


def test_a_pipeline_never_shortens_a_token_but_serves_more_of_them() -> None:
    setting = setting_of(load_model("llama3-70b"), *load_machine("h100-sxm"), schedule="static")
    _, priced = served(setting, tp=4, pp=[1, 2, 4], concurrency=[1, 1, 1])
    assert np.all(np.diff(priced.tpot) > 0)
    _, loaded = served(setting, tp=4, pp=[1, 2], concurrency=[256, 512])
    assert loaded.requests_per_s[1] > 1.3 * loaded.requests_per_s[0]


# --- what fits ------------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_is_cut_when_asked_to() -> None:
    """208 requests of 2,048 tokens on one chip of the lecture."""
    columns = {"isl": 1024, "osl": 1024, "dp": 2, "concurrency": [100, 416, 417, 5000]}
    cut, priced = served(LECTURE_8B, clip=True, **columns)
    assert cut.batch.tolist() == [50, 208, 208, 208]
    assert cut.running.tolist() == [100, 416, 416, 416]
    assert cut.max_concurrency.tolist() == [416] * 4
    assert priced.requests_per_s[3] == priced.requests_per_s[1]
    asked, _ = served(LECTURE_8B, clip=False, **columns)
    assert asked.batch.tolist() == [50, 208, 209, 2500]
    assert asked.max_concurrency.tolist() == [416] * 4


def test_the_fullest_replica_sets_the_pace_and_only_real_requests_count() -> None:
    """9 requests on 4 replicas: three on one of them."""
    fitted, priced = served(LECTURE_8B, dp=4, concurrency=9)
    assert fitted.batch == 3
    _, three = served(LECTURE_8B, concurrency=3)
    assert priced.tpot == three.tpot
    assert priced.requests_per_s == pytest.approx(9 / 3 * three.requests_per_s, rel=1e-12)
    surplus, _ = served(LECTURE_8B, dp=4, concurrency=2)
    assert surplus.batch == 1
    assert surplus.running == 2


def test_a_replica_with_no_room_is_priced_as_not_applicable() -> None:
    setting = setting_of(load_model("llama3-70b"), *load_machine("h100-lecture"))
    fitted, priced = served(setting, clip=True, tp=[1, 2])
    assert fitted.batch.tolist() == [0, 1]
    for column in (priced.ttft, priced.tpot, priced.latency, priced.requests_per_s, priced.mfu_prefill):
        assert np.isnan(column[0])
        assert np.isfinite(column[1])


def test_the_engines_maximum_of_sequences_holds_per_replica() -> None:
    fitted, _ = served(LECTURE_8B, clip=True, tp=8, dp=[1, 3], isl=10, osl=10, concurrency=10_000)
    assert fitted.batch.tolist() == [512, 512]
    assert fitted.max_concurrency.tolist() == [512, 1536]


# --- rows and blocks ------------------------------------------------------------------------------------------------


def test_rows_are_columns_of_one_length() -> None:
    rows = Rows.of(tp=[1, 2, 4], pp=1, dp=1, isl=100, osl=[10], concurrency=1)
    assert rows.length == 3
    assert rows.isl.tolist() == [100.0] * 3
    assert rows.max_context.tolist() == [0.0] * 3
    assert rows.part(1, 3).tp.tolist() == [2.0, 4.0]


def test_blocks_join_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"tp": [1, 2, 4, 8, 1, 2, 4], "concurrency": [1, 5, 9, 3, 7, 2, 64]}
    _, whole = served(VLLM_8B, **columns)
    monkeypatch.setattr(serving, "BLOCK_ROWS", 3)
    _, joined = served(VLLM_8B, **columns)
    assert len(joined.ttft) == 7
    for name in ("ttft", "tpot", "latency", "requests_per_s", "mfu_prefill", "mfu_decode"):
        assert getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    for parts, others in zip(joined.tpot_parts, whole.tpot_parts, strict=True):
        assert parts == pytest.approx(others, rel=1e-12)
