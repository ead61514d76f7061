"""Advice taken: what a refusal says would do works when it is asked for, and less does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from asking import by_plan, request, works

from planner import (
    Filters,
    Limits,
    NoPlanError,
    Request,
    Workload,
    rank,
)

MS = 1e-3
TIMES = ("ttft", "tpot", "latency")


def refusal(asked: Request) -> str:
    with pytest.raises(NoPlanError) as stop:
        rank(asked)
    assert stop.value.exit_status == 3
    return str(stop.value)


def advised(text: str) -> dict[str, str]:
    """The options that a refusal offers, each on its own."""
    _, found, tail = text.partition("The smallest change that would do: ")
    assert found, text
    return dict(re.findall(r"--(gpus|weights|concurrency) (\w+)", tail))


def taking(asked: Request, option: str, value: str) -> Request:
    if option == "gpus":
        return asked._replace(gpus=int(value))
    changed = value if option == "weights" else int(value)
    return asked._replace(workload=asked.workload._replace(**{option: changed}))


TOO_LARGE = {
    "405b on a node": request("llama3.1-405b", 8),
    "70b on one chip": request("llama3-70b", 1),
    "a prompt too long for two chips": request("llama3.1-70b", 2, work={"isl": 100_000}),
    "many requests on few chips": request("llama3-70b", 3, work={"concurrency": 800}),
    "many requests on more than a few chips": request("llama3-70b", 20, work={"concurrency": 3000}),
    "more than one replica may run": request("llama3-8b", 1, work={"concurrency": 2000}),
    "a small budget": request("llama3-70b", 8, limits=Limits(memory=16 * 2.0**30)),
    "on a torus": request("palm-62b", 2, "tpu-v4"),
    "on small chips": request("falcon-180b", 8, "l40s"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_advice_on_memory_works_and_less_does_not(name: str) -> None:
    asked = TOO_LARGE[name]
    text = refusal(asked)
    assert text.startswith(
        f"no plan for {asked.model.name} on {asked.gpus} x {asked.hardware.name} fits in memory. Closest:"
    )
    options = advised(text)
    assert options, text
    failing = [option for option, value in options.items() if not works(taking(asked, option, value))]
    assert not failing, text
    if "gpus" in options:
        fewer = range(asked.gpus + 1, int(options["gpus"]))
        enough = [gpus for gpus in fewer if works(asked._replace(gpus=gpus))]
        assert not enough, f"{enough[0]} chips would do: {text}"


@pytest.mark.parametrize(
    "asked",
    [
        request("llama3-70b", 2, filters=Filters(tp=(2,)), work={"concurrency": 9}),
        request("llama3-70b", 2, filters=Filters(tp=(2,)), work={"concurrency": 900}),
        request("llama3-8b", 1, filters=Filters(tp=(1,)), work={"concurrency": 2000}),
        request("llama3-8b", 4, filters=Filters(tp=(4,)), work={"concurrency": 1500, "weights": "int4"}),
    ],
    ids=["9 of 8", "900 of 8", "2000 on one chip", "1500 of an engine's 1024"],
)
def test_advice_on_the_load_is_the_most_that_fits(asked: Request) -> None:
    text = refusal(asked)
    options = advised(text)
    if "concurrency" not in options:
        assert options, text  # something else was smaller
        return
    most = int(options["concurrency"])
    these, more = (works(taking(asked, "concurrency", str(load))) for load in (most, most + 1))
    assert (these, more) == (True, False), text


def test_the_closest_plan_is_the_one_that_holds_most() -> None:
    """What the best plan reaches: of those that fit but for KV, the one with room for most requests."""
    asked = request("llama3.1-405b", 24, work={"concurrency": 2000})
    text = refusal(asked)
    rooms = by_plan(rank(asked._replace(workload=Workload(concurrency=1))).results)
    best = max(row["max_concurrency"] for row in rooms.values())
    named = re.search(r"Closest: (\S+): KV room for (\d+) requests of 1280 tokens, 2000 asked", text)
    assert named is not None, text
    assert int(named[2]) == rooms[named[1]]["max_concurrency"]
    assert int(named[2]) == best, f"{best} fit on another plan: {text}"


def test_weights_alone_too_large_are_named_with_their_figures() -> None:
    text = refusal(request("llama3.1-405b", 8))
    assert re.search(r"weights [\d.]+ GiB \+ runtime [\d.]+ GiB exceed the limit of 71\.3 GiB per chip", text)


def test_where_nothing_within_reach_would_do_that_is_said() -> None:
    text = refusal(request("llama3.1-405b", 1, limits=Limits(memory=2.0**30)))
    assert text.endswith("No number of chips or weight format within reach would do")


def assert_does(asked: Request, text: str) -> None:
    does = works(asked)
    assert does, f"the change that is named does not do: {text}"


def relaxed(asked: Request, text: str) -> Request:
    """The limits as a refusal says they would have to be."""
    _, found, tail = text.partition("The smallest change that would do: ")
    assert found, f"no change is named: {text}"
    needed = dict(re.findall(r"--max-(ttft|tpot|latency) (\d[\d.]*)", tail))
    if not needed:  # raise each limit that cannot be kept to the best that it names
        needed = dict(re.findall(r"--max-(ttft|tpot|latency) [\d.]+: the best is (\d[\d.]*) ms", text))
    assert needed, f"no figure is named: {text}"
    limits = {name: float(value.rstrip(".")) * MS for name, value in needed.items()}
    return asked._replace(limits=asked.limits._replace(**limits))


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("hardware", ["h100-sxm", "h100-lecture", "b200-sxm", "tpu-v5e"])
@pytest.mark.parametrize("load", [1, 7])
def test_a_limit_that_none_keeps_names_what_is_reached_and_that_works(name: str, hardware: str, load: int) -> None:
    asked = request("llama3-8b", 16, hardware, work={"concurrency": load})
    free = rank(asked._replace(objective="latency")).results
    best = float(np.min(free[f"{name}_ms"].astype(float)))
    impossible = asked._replace(limits=Limits(**{name: best / 2 * MS}))
    text = refusal(impossible)
    assert text.startswith(f"no plan for llama3-8b on 16 x {hardware} keeps the limits on time.")
    assert f"--max-{name} {best / 2:g}" in text
    reached = re.search(r"the best is ([\d.]+) ms by (\S+)", text)
    assert reached is not None, text
    assert float(reached[1]) == pytest.approx(best, rel=1e-3)
    row = by_plan(free)[reached[2].rstrip(".;,")]
    assert row[f"{name}_ms"] == pytest.approx(best, rel=1e-9)
    assert_does(relaxed(impossible, text), text)


@pytest.mark.parametrize("objective", ["throughput", "cost"])
def test_an_impossible_limit_is_said_for_goals_that_search_the_load_too(objective: Any) -> None:
    asked = request("llama3-8b", 8, objective=objective, limits=Limits(tpot=0.1 * MS))
    text = refusal(asked)
    assert "--max-tpot 0.1" in text
    assert_does(relaxed(asked, text), text)


def test_a_limit_on_a_time_that_answers_do_not_have_is_left_out_of_the_sentence() -> None:
    """One token has no time between tokens, so only the first limit can fail."""
    asked = request("llama3-8b", 8, work={"osl": 1}, limits=Limits(ttft=0.1 * MS, tpot=0.1 * MS))
    text = refusal(asked)
    assert "--max-ttft 0.1" in text
    assert_does(relaxed(asked, text), text)


def test_limits_that_none_keeps_together_are_relaxed_together() -> None:
    """The first token comes soonest from TP8, the others from TP4: neither best is kept by the other."""
    asked = request("llama3-8b", 8, "h100-lecture", work={"isl": 2048})
    rows = rank(asked).results.rows()
    ttft, tpot = (min(row[f"{name}_ms"] for row in rows) for name in ("ttft", "tpot"))
    assert not any(row["ttft_ms"] == ttft and row["tpot_ms"] == tpot for row in rows)
    impossible = asked._replace(limits=Limits(ttft=ttft / 2 * MS, tpot=tpot / 2 * MS))
    text = refusal(impossible)
    assert_does(relaxed(impossible, text), text)


def test_limits_that_are_kept_one_by_one_but_not_together_say_what_would_do() -> None:
    asked = request("llama3-8b", 8, "h100-lecture", work={"isl": 2048})
    rows = rank(asked).results.rows()
    ttft, tpot = (min(row[f"{name}_ms"] for row in rows) for name in ("ttft", "tpot"))
    impossible = asked._replace(limits=Limits(ttft=ttft * 1.001 * MS, tpot=tpot * 1.001 * MS))
    text = refusal(impossible)
    assert_does(relaxed(impossible, text), text)


def test_filters_that_leave_only_what_rules_refuse_say_which_rule() -> None:
    text = refusal(request("llama3-70b", 8, filters=Filters(tp=(3,))))
    assert text.startswith("no plan for llama3-70b on 8 x h100-sxm is valid.")
    assert "nearest valid: 2 or 4" in text
