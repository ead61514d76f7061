"""A prompt of which a part is cached: what is computed, what is read back, and what follows for every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import load_engine, load_machine, load_model
from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure, causal_pairs
from planner.costs.memory import Budget, cached_tokens
from planner.costs.rows import Rows
from planner.costs.serving import Estimates, Fit, Setting, fit, formats_of, price
from planner.costs.step import Replica, pass_time
from planner.plans.placement import Placement


def setting_of(model: str, hardware: str, engine: str, **options: Any) -> Setting:
    shape, (machine, software) = load_model(model), load_machine(hardware, engine)
    formats = formats_of(shape, machine, software, None, None)
    budget = Budget.of(machine, software)
    return Setting(
        shape, machine, software, Placement.of(machine, 64), formats, Structure(), budget, **options
    )  # fmt: skip


SETTINGS = {
    "mixed": setting_of("llama3.1-70b", "h100-sxm", "vllm"),
    "separate": setting_of("llama3.1-70b", "h100-sxm", "sglang"),
    "never cut": setting_of("llama3.1-70b", "h100-lecture", "lecture"),
    "static": setting_of("llama3.1-70b", "h100-sxm", "sglang", schedule="static"),
    "window": setting_of("mistral-7b", "h100-sxm", "vllm"),
}


def served(setting: Setting, **columns: Any) -> tuple[Fit, Estimates]:
    rows = Rows.of(**({"tp": 8, "pp": 1, "dp": 1, "isl": 4096, "osl": 256, "concurrency": 1} | columns))
    fitted = fit(setting, rows, clip=False)
    return fitted, price(setting, rows, fitted)


@given(isl=st.integers(1, 200_000), share=st.floats(0, 1), engine=st.sampled_from(("vllm", "sglang", "trtllm")))
def test_whole_blocks_are_cached_and_never_the_last_token(isl: int, share: float, engine: str) -> None:
    software = load_engine(engine)
    cached, block = float(cached_tokens(software, isl, share)), software.scheduler.block_tokens
    assert cached % block == 0
    assert 0 <= cached <= isl - 1
    assert cached <= isl * share * (1 + 1e-9)
    assert cached + block > min(isl * share, isl - 1)


def test_a_share_that_is_a_whole_number_of_blocks_is_that_many() -> None:
    shares = np.arange(1, 100) / 100
    assert cached_tokens(load_engine("vllm"), 1600, shares) == pytest.approx(16 * np.arange(1, 100), abs=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_lone_prompt_costs_what_a_chunk_behind_its_cached_tokens_costs(name: str) -> None:
    """12,288 tokens of which 8,192 are cached: one pass over 4,096 that reads 8,192 back."""
    setting, tokens, cached = SETTINGS[name], 12288, 8192
    _, priced = served(setting, isl=tokens, osl=2, prefix_hit=2 / 3)
    shared = setting.model, setting.hardware, setting.engine, Network(setting.placement, setting.engine)
    replica = Replica(*shared, setting.formats, setting.structure, *(np.full(1, degree) for degree in (8, 1, 1)))
    window = setting.model.attention.window
    pairs, near = (causal_pairs(float(tokens), seen) - causal_pairs(float(cached), seen) for seen in (None, window))
    chunk = Pass(0, 0, float(tokens - cached), pairs, float(cached), 1.0, 1.0, window_pairs=near)
    alone = pass_time(replica, Pass(*(np.full(1, value) for value in chunk))).whole.total
    host = 0.0 if setting.schedule == "static" else setting.engine.host.request_us * 1e-6
    assert priced.ttft == pytest.approx(alone + host, rel=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=30, deadline=None)
@given(
    isl=st.integers(1, 20_000), osl=st.integers(1, 600), load=st.integers(1, 60), pp=st.sampled_from((1, 2, 4)),
    share=st.floats(0, 1), more=st.floats(0, 1),
)  # fmt: skip
def test_the_more_is_cached_the_less_is_waited_for(
    name: str, isl: int, osl: int, load: int, pp: int, share: float, more: float
) -> None:
    """In no time, where a prompt has a pass of its own.

    Where more prompts come than there are decode steps, several share a pass: cached tokens make room for more of
    them, and a prompt may then take a little longer, as its pass does.
    """
    low, high = sorted((share, more))
    work = {"isl": isl, "osl": osl, "concurrency": load, "pp": pp, "tp": 4}
    _, priced = served(SETTINGS[name], **work, prefix_hit=[0.0, low, high])
    slack = 1 + (1e-12 if load <= osl else 0.05)
    for times in (priced.ttft, priced.latency, 1 / priced.requests_per_s):
        assert times[1] <= times[0] * slack
        assert times[2] <= times[1] * slack
    if osl > 1:
        assert priced.tpot[2] <= priced.tpot[1] * slack <= priced.tpot[0] * slack**2


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=20, deadline=None)
@given(isl=st.integers(2, 20_000), osl=st.integers(1, 600), load=st.integers(1, 60), pp=st.sampled_from((1, 2, 4)))
def test_nothing_cached_changes_nothing_whatever_stands_beside_it(
    name: str, isl: int, osl: int, load: int, pp: int
) -> None:
    """Rows without a cached prompt take the same path as before, alone or beside rows with one."""
    work = {"isl": isl, "osl": osl, "concurrency": load, "pp": pp, "tp": 4}
    _, alone = served(SETTINGS[name], **work)
    _, beside = served(SETTINGS[name], **work, prefix_hit=[0.0, 0.9])
    for column in ("ttft", "tpot", "latency", "requests_per_s", "mfu_prefill"):
        assert getattr(beside, column)[:1] == pytest.approx(getattr(alone, column), rel=1e-12, nan_ok=True), column


@pytest.mark.parametrize("name", SETTINGS)
def test_memory_and_decode_steps_know_nothing_of_it(name: str) -> None:
    """A request holds all of its tokens, cached or not, and every answer attends to all of them."""
    fitted, priced = served(SETTINGS[name], concurrency=[1, 1], prefix_hit=[0.0, 0.8])
    for column in (fitted.kv, fitted.max_concurrency, fitted.needed, priced.tpot):
        assert column[0] == pytest.approx(column[1], rel=1e-12)
    host = 0.0 if SETTINGS[name].schedule == "static" else SETTINGS[name].engine.host.request_us * 1e-6
    assert priced.ttft[1] - host < 0.5 * (priced.ttft[0] - host)
