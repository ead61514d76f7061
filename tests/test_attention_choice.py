"""What data-parallel attention, expert parallelism and caches divided by tokens must do to a ranking."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from planner import Filters, NoPlanError, Plan, Request, Workload, estimate, load_machine, load_model
from planner import plan as ranked
from planner.costs.experts import Spread
from planner.costs.layers import Pass
from planner.explaining.breakdown import breakdown
from planner.request import Objective
from planner.units import GIB, MS

LWM_CACHE = 524_288 * 1_000_000  # bytes of a million tokens: 488 GiB
MILLION: dict[str, Any] = {"isl": 999_744, "osl": 256, "hardware": "h100", "engine": "ideal"}


@cache
def node(model: str, concurrency: int) -> dict[str, dict[str, Any]]:
    goal: Objective = "throughput" if concurrency > 1 else "latency"
    filters = Filters(tp=(8,), pp=(1,))
    found = ranked(
        model, gpus=8, hardware="h200", engine="sglang", objective=goal, isl=1024, osl=256,
        concurrency=concurrency, filters=filters,
    )  # fmt: skip
    return {row["plan"]: row for row in found}


def test_latent_attention_by_groups_holds_several_times_the_cache() -> None:
    rows = node("deepseek-v3", 1)
    more = rows["TP8xEP8/batch8"]["kv_capacity_tokens"] / rows["TP8"]["kv_capacity_tokens"]
    assert 4 < more < 8  # eight copies become eight parts, less the room of attention's weights in full
    plain = node("qwen3-235b-a22b", 1)
    assert plain["TP8xEP8/batch8"]["kv_capacity_tokens"] < 2 * plain["TP8"]["kv_capacity_tokens"]  # two copies


def test_groups_win_under_load_and_lose_without() -> None:
    assert next(iter(node("deepseek-v3", 1))) == "TP8"
    assert next(iter(node("deepseek-v3", 448))) == "TP8xEP8/batch8"
    gains = {}
    for model in ("deepseek-v3", "qwen3-235b-a22b"):
        low, high = node(model, 1), node(model, 448)
        assert low["TP8xEP8/batch8"]["tpot_ms"] > low["TP8"]["tpot_ms"]
        gains[model] = high["TP8xEP8/batch8"]["tokens_per_s"] / high["TP8"]["tokens_per_s"]
    assert gains["deepseek-v3"] > max(1.2, gains["qwen3-235b-a22b"])


def test_a_million_tokens_of_lwm_want_many_chips() -> None:
    assert round(LWM_CACHE / 2**30, 2) == 488.28
    with pytest.raises(NoPlanError):
        ranked("lwm-7b", gpus=1, **MILLION)
    needed = next(
        tp
        for tp in (1, 2, 4, 8, 16)
        if any(
            Plan.parse(row["plan"]).sharding.sequence == tp
            for row in _ranked_or_none("lwm-7b", gpus=tp, filters=Filters(tp=(tp,), pp=(1,)))
        )
    )
    assert needed == 8  # 488 GiB and a copy of half the weights' slices: 62 of the 75 GiB of a chip
    (row,) = ranked("lwm-7b", gpus=8, filters=Filters(tp=(8,), pp=(1,), attention=("seq8",), dp=(1,)), **MILLION)
    assert row["kv_gib"] == pytest.approx(LWM_CACHE / 8 / 2**30, rel=0.01)


def _ranked_or_none(model: str, **options: Any) -> list[dict[str, Any]]:
    try:
        return ranked(model, **MILLION, **options)
    except NoPlanError:
        return []


def test_ranks_beyond_the_heads_hold_parts_of_the_cache() -> None:
    rows = {row["plan"]: row for row in ranked("lwm-7b", gpus=64, filters=Filters(tp=(32, 64), pp=(1,)), **MILLION)}
    half, whole = rows["TP64/heads32xseq2"], rows["TP32xDP2"]
    assert half["kv_gib"] == pytest.approx(whole["kv_gib"] / 2, rel=0.01)
    assert half["tpot_ms"] < whole["tpot_ms"]
    assert "TP64" not in rows


def test_experts_read_follow_the_tokens_of_a_step() -> None:
    experts = load_model("deepseek-v3").experts
    assert experts is not None
    read = []
    for tokens in (1, 8, 64, 512, 4096):
        work = Pass(np.array([float(tokens)]), np.array([1000.0]))
        whole = Spread(ep=1.0, expert_tp=8.0).touched(experts, work)
        assert float(whole[0]) == pytest.approx(256 * (1 - (1 - 8 / 256) ** tokens), rel=1e-9)
        read.append(float(Spread(ep=8.0).touched(experts, work)[0]))
    assert read == sorted(read)
    assert read[0] < 4
    assert read[-1] == pytest.approx(256 / 8, rel=1e-6)


PLANS = ["TP8xEP8/batch8", "TP8/heads4xbatch2", "TP8xEP8/heads2xbatch2xseq2", "TP8/seq8", "TP4xPP2xEP4/batch4"]


@pytest.mark.parametrize("label", PLANS)
def test_terms_add_up(label: str) -> None:
    wanted = Plan.parse(label)
    machine, engine = load_machine("h200", "ideal")
    request = Request(load_model("deepseek-v3"), machine, engine, wanted.chips, Workload(isl=2000, osl=64))
    found = breakdown(request, wanted, 64)
    alone = estimate("deepseek-v3", plan=label, hardware="h200", engine="ideal", isl=2000, osl=64, concurrency=64)
    for times, column in ((found.ttft, "ttft_ms"), (found.tpot, "tpot_ms")):
        together = sum(item.seconds for item in times.items)
        assert together == pytest.approx(times.total, rel=1e-9)
        assert together == pytest.approx(alone[column] * MS, rel=1e-9)
    assert sum(found.memory.values()) == pytest.approx(found.row["memory_limit_gib"] * GIB, rel=1e-9)


@pytest.mark.parametrize("label", PLANS)
def test_longer_contexts_take_longer(label: str) -> None:
    times = [
        estimate("deepseek-v3", plan=label, hardware="h200", engine="ideal", isl=isl, osl=16, concurrency=16)
        for isl in (500, 2000, 8000, 32000)
    ]
    for name in ("ttft_ms", "tpot_ms"):
        values = [row[name] for row in times]
        assert values == sorted(values)
