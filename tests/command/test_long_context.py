"""A context that no chip holds: refused with figures, held by enough chips, and the command says how many."""

from __future__ import annotations

import re

import pytest
from helpers import run

from planner import Plan, load_hardware, load_model
from planner.units import GIB

LWM = ("--model", "lwm-7b", "--hardware", "h100", "--isl", 1_000_000, "--osl", 100)
TOKEN = 2 * 32 * 32 * 128 * 2  # keys and values of 32 heads of 128 in 32 layers, 16 bit
WEIGHTS = 6.74e9 * 2  # LLaMA-7B's parameters


def test_one_chip_refuses_a_million_tokens_and_says_how_many_would_do() -> None:
    assert load_model("lwm-7b").attention.kv_heads * 128 * 2 * 2 * 32 == TOKEN
    done = run(*LWM, "--gpus", 1, "--engine", "ideal")
    assert done.status == 3
    assert not done.out
    figures = re.search(r"1 asked \(([\d.]+) GiB on the fullest chip, ([\d.]+) GiB free\)", done.err)
    assert figures is not None, done.err
    assert float(figures[1]) == pytest.approx(1_000_050 * TOKEN / GIB, abs=0.06)  # 488.3
    limit = load_hardware("h100-sxm").chip.memory_gib * 0.95
    assert float(figures[2]) == pytest.approx(limit - WEIGHTS / GIB, abs=0.2)
    assert "lwm-7b on 1 x h100-sxm" in done.err
    assert done.err.rstrip().endswith("The smallest change that would do: --gpus 8")


def test_the_number_of_chips_that_it_says_is_the_smallest() -> None:
    """Seven chips have the room (526 GiB, 501 needed), but 32 heads or layers are not that even over seven."""
    assert run(*LWM, "--gpus", 7, "--engine", "ideal", "--quiet").status == 3
    rows = run(*LWM, "--gpus", 8, "--engine", "ideal", "--csv", "-", "--top", 0).rows
    plans = [Plan.parse(row["plan"]) for row in rows]
    assert all(plan.replica_chips == 8 for plan in plans)
    by_tokens = {plan.sharding.sequence for plan in plans}
    assert by_tokens >= {1, 2, 4, 8}
    for row in rows:
        assert float(row["kv_gib"]) == pytest.approx(1_000_050 * TOKEN / GIB / 8, rel=0.01)  # no copies: 32 KV heads


def test_a_sequence_that_is_named_gets_its_chips() -> None:
    """Cut by tokens eight ways: asked on one chip, the answer is how many; asked for the fewest, the plan is there."""
    named = (*LWM, "--engine", "ideal", "--attention", "seq8")
    refused = run(*named, "--gpus", 1)
    assert refused.status == 3
    assert refused.err.rstrip().endswith("The smallest change that would do: --gpus 8")
    sized = run(*named, "--max-gpus", 64, "--pp", 1, "--cp", 1, "--csv", "-").rows
    assert (sized[0]["plan"], sized[0]["gpus"]) == ("TP8/seq8", "8")
    wide = run(*LWM, "--engine", "ideal", "--attention", "seq4", "--gpus", 4)  # four chips are too few whatever is cut
    assert wide.status == 3
    assert "--gpus 8" in wide.err


def test_the_caption_says_how_many_plans_were_looked_at_and_scripts_get_rows_alone() -> None:
    question = ("--model", "deepseek-v3", "--hardware", "h200", "--gpus", 8, "--engine", "ideal")
    table = " ".join(run(*question).out.split())
    counts = re.search(r"(\d+) plans: (\d+) ranked, (\d+) refused \((\d+) by rule, (\d+) by memory", table)
    assert counts is not None, table
    looked_at, ranked, refused, by_rule, by_memory = map(int, counts.groups())
    assert looked_at == ranked + refused
    assert refused == by_rule + by_memory
    done = run(*question, "--csv", "-", "--top", 0, "--rejected")
    assert len(done.rows) == looked_at
    quiet = run(*question, "--json", "-")
    assert quiet.out.startswith("[")
    assert not quiet.err
    assert not run(*question, "--quiet").out
