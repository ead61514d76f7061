"""Sentences: what makes the first plan win must be true of the figures."""

from __future__ import annotations

import re
from typing import Any

import pytest

from planner import Filters, Limits, Ranking, Request, Workload, load_machine, load_model, rank
from planner.costs.roofline import BOUNDS
from planner.ranking import metric
from planner.report import why

WORDS = {
    "computing": "compute",
    "reading memory": "memory",
    "communication": "network",
    "fixed overhead": "overhead",
    "waiting for other stages": "bubble",
}


def ranking(
    model: str = "llama3-70b", hardware: str = "h100", gpus: int = 8, engine: str | None = None, **options: Any
) -> Ranking:
    machine, software = load_machine(hardware, engine)
    return rank(Request(load_model(model), machine, software, gpus, **options))


def number(text: str) -> float:
    return float(text[:-1]) * {"k": 1e3, "M": 1e6}[text[-1]] if text[-1] in "kM" else float(text)


CASES = [
    {"objective": objective, "gpus": gpus, "engine": engine}
    for objective in ("latency", "ttft", "tpot", "throughput", "cost")
    for gpus in (6, 16)
    for engine in ("vllm", "ideal")
]


@pytest.mark.parametrize("options", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_parts_of_a_goal_add_up_to_what_is_ranked_by(options: dict[str, Any]) -> None:
    found, objective = ranking(**options), options["objective"]
    results = found.results
    for index in range(min(6, len(results))):
        row = results.row(index)
        whole = {
            "latency": row["latency_ms"],
            "ttft": row["ttft_ms"],
            "tpot": row["tpot_ms"],
            "throughput": row["gpus"] / row["tokens_per_s"] * 1e3,
            "cost": row["usd_per_mtok"],
        }[objective]
        parts = why.parts_of(found, index)
        assert set(parts) == set(BOUNDS)
        assert sum(parts.values()) == pytest.approx(whole, rel=1e-9)
        assert min(parts.values()) >= -1e-9 * whole


@pytest.mark.parametrize("options", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_the_sentence_about_the_winner_holds_for_the_figures(options: dict[str, Any]) -> None:
    found = ranking(**options)
    first, second = found.results.row(0), found.results.row(1)
    sentence = why.winner(found)
    values = metric(found.results, options["objective"])
    if values[1] / values[0] < 1.0005:
        assert sentence.startswith(f"{first['plan']} comes first (")
        assert f"as fast as {second['plan']}" in sentence
        return
    pattern = r"(\S+) comes first: .*, ([\d.]+) % ahead of (\S+), for less ([a-z ]+) \((\S+) against (\S+) .*\)\."
    match = re.fullmatch(pattern, sentence)
    assert match
    assert (match[1], match[3]) == (first["plan"], second["plan"])
    assert float(match[2]) == pytest.approx((values[1] / values[0] - 1) * 100, abs=0.06)
    ours, theirs = why.parts_of(found, 0), why.parts_of(found, 1)
    bound = WORDS[match[4]]
    assert theirs[bound] - ours[bound] == max(theirs[name] - ours[name] for name in BOUNDS) > 0
    assert number(match[5]) == pytest.approx(ours[bound], rel=0.006, abs=1e-3)
    assert number(match[6]) == pytest.approx(theirs[bound], rel=0.006, abs=1e-3)


def test_an_only_plan_is_not_compared() -> None:
    found = ranking(filters=Filters(tp=(8,)))
    row = found.results.row(0)
    assert why.winner(found) == f"TP8 is the only plan left: {row['latency_ms']:.4g} ms, most of it reading memory."


def test_equal_plans_are_told_apart_by_what_decides() -> None:
    found = ranking("llama3-8b", gpus=2, filters=Filters(tp=(1,), pp=(1,), dp=(1, 2)))
    assert [row["plan"] for row in found.results.rows()] == ["DP2", "TP1"]
    first, second = (found.results.row(index) for index in (0, 1))
    assert f"holds {first['max_concurrency']} requests against {second['max_concurrency']}" in why.winner(found)


def test_the_caption_says_workload_limits_counts_and_reason() -> None:
    found = ranking(
        gpus=16,
        workload=Workload(isl=3000, osl=77, concurrency=12, schedule="static", weights="fp8"),
        limits=Limits(ttft=5.0, latency=20.0),
        objective="tpot",
    )
    first, second, third, *_ = why.caption(found)
    assert first.startswith("llama3-70b (fp8 weights, bf16 KV) on 16 x h100-sxm, engine vllm")
    assert first.endswith("; 3000 tokens in, 77 out, concurrency 12, static batching; for tpot.")
    assert second.startswith(f"{len(found.results) + len(found.refused)} plans: ")
    assert second.endswith("limits: 71.3 of 79.2 GiB per chip, ttft <= 5000 ms, latency <= 20000 ms.")
    assert third == why.winner(found)


def test_a_search_over_loads_is_called_one() -> None:
    found = ranking(objective="throughput")
    first, second, *_ = why.caption(found)
    assert "concurrency searched" in first
    assert f" plans (priced at {found.points} loads in all): " in second
    assert found.points > found.plans


COUNTS = (
    r"(\d+) plans?(?: \(.*\))?: (\d+) (?:ranked|compared)(?:, (\d+) refused \((.*); --rejected says why\))?; limits"
)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"gpus": 1, "model": "llama3-8b"}, []),
        ({"gpus": 8}, ["rule", "memory"]),
        ({"gpus": 16, "model": "llama3.1-405b"}, ["rule", "memory"]),
        ({"gpus": 16, "limits": Limits(tpot=0.012)}, ["rule", "memory", "limits on time"]),
        ({"gpus": 8, "objective": "throughput", "limits": Limits(tpot=0.03)}, ["rule", "memory", "limits on time"]),
        ({"gpus": 8, "pareto": True}, ["rule", "memory"]),
    ],
)
def test_every_plan_is_counted_once(options: dict[str, Any], kinds: list[str]) -> None:
    found = ranking(**options)
    match = re.match(COUNTS, why.caption(found)[1])
    assert match
    every, left, refused = (int(count or 0) for count in match.groups()[:3])
    assert every == left + refused
    assert refused == len(found.refused)
    by_kind = dict(reversed(part.split(" by ")) for part in (match[4] or "").split(", ") if part)
    assert list(by_kind) == kinds
    assert sum(map(int, by_kind.values())) == refused
    if not found.request.pareto:
        assert left == len(found.results)


@pytest.mark.parametrize(
    ("price", "reached", "unit"),
    [(2.0, r"\$\S+ per million tokens", r"\$/Mtok"), (None, ".* chip-s a token", "chip-ms a token")],
)
def test_cost_is_explained_in_dollars_where_there_is_a_price(price: float | None, reached: str, unit: str) -> None:
    found = ranking(hardware="h100-lecture", objective="cost", usd_per_chip_hour=price)
    assert re.search(rf"comes first: {reached}, .* \(\S+ against \S+ {unit}\)\.$", why.winner(found))


def test_pareto_has_no_winner() -> None:
    text = " ".join(why.caption(ranking(pareto=True)))
    assert "Pareto: no other plan has both a lower TPOT and more tokens/s per chip." in text
    assert "comes first" not in text


def test_pareto_is_its_own_goal_searches_loads_and_has_no_ties() -> None:
    found = ranking("llama3-8b", gpus=1, pareto=True)
    text = " ".join(why.caption(found))
    assert "concurrency searched, continuous batching; for the Pareto frontier." in text
    assert "a tie" not in text
    assert {row["tie"] for row in found.results.rows()} == {None}


TTFT_LIMITS = "TTFT leaves out waiting in a queue and is not calibrated under load."


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "ttft", "workload": Workload(concurrency=8)}, True),
        ({"workload": Workload(concurrency=8), "limits": Limits(ttft=5.0)}, True),
        ({"objective": "throughput", "limits": Limits(ttft=5.0)}, True),
        ({"objective": "ttft"}, False),
        ({"workload": Workload(concurrency=8)}, False),
    ],
)
def test_what_ttft_leaves_out_is_said_where_it_decides_under_load(options: dict[str, Any], said: bool) -> None:
    assert (TTFT_LIMITS in " ".join(why.caption(ranking(**options)))) == said


def test_the_error_of_latency_is_not_claimed_for_ttft() -> None:
    assert "within 10% of the row above: a tie (measured: see plan validate)." in " ".join(why.caption(ranking()))
    assert "see plan validate; TTFT at light load is off by as much)" in " ".join(
        why.caption(ranking(objective="ttft"))
    )


def test_a_torus_is_named_by_its_slice() -> None:
    text = " ".join(why.caption(ranking("llama3-8b", "tpu-v5e", gpus=9)))
    assert "on slice 2x4 of tpu-v5e" in text
    assert "1 of 9 chips idle" in text


def test_a_price_is_named_with_its_offer_and_date() -> None:
    machine = load_machine("h100")[0]
    assert machine.price
    text = " ".join(why.caption(ranking()))
    assert (
        f"$ at {machine.price.usd_per_chip_hour:g} per chip-hour ({machine.price.offer}, {machine.price.date})" in text
    )
    assert "$ at" not in " ".join(why.caption(ranking(usd_per_chip_hour=2.0)))
    assert "$ at" not in " ".join(why.caption(ranking(hardware="h100-lecture")))


def test_cost_without_a_price_says_what_it_ranks_by() -> None:
    text = " ".join(why.caption(ranking(hardware="h100-lecture", objective="cost")))
    assert "No price for h100-lecture: ranked by chip-seconds per token (--price gives one)" in text
    priced = why.caption(ranking(hardware="h100-lecture", objective="cost", usd_per_chip_hour=2.0))
    assert "No price" not in " ".join(priced)


def test_constants_that_nobody_measured_are_named_where_they_count() -> None:
    def said(**options: Any) -> str:
        return " ".join(why.caption(ranking(**options)))

    assert "Assumed, not measured: elementwise." in said(gpus=8)
    assert "collectives over infiniband" in said(gpus=16)
    assert "attention decode" in said(model="llama3-8b", hardware="tpu-v5e", gpus=4)
    assert "Assumed, not measured" not in said(hardware="h100-lecture")
    assert "memory that the engine keeps" in said(engine="sglang")
    assert "host time, memory that the engine keeps" in said(engine="ideal")  # a host that takes no time is assumed too


def test_an_engine_without_host_time_gives_bounds() -> None:
    assert "Engine ideal has no host time: the figures are bounds" in " ".join(why.caption(ranking(engine="ideal")))
    assert "bounds" not in " ".join(why.caption(ranking()))


def test_facts_of_a_model_that_are_unverified_are_pointed_out() -> None:
    unsure = load_model("palm-540b-padded")
    assert unsure.unverified
    text = " ".join(why.caption(ranking("palm-540b-padded", "tpu-v4", gpus=64)))
    assert "Facts of palm-540b-padded marked unverified: see `plan show palm-540b-padded`" in text
    assert "unverified" not in " ".join(why.caption(ranking("llama3-8b", gpus=1)))


@pytest.mark.parametrize(
    ("gpus", "concurrency", "sentence"),
    [
        (7, 1, "TP4 leaves 3 of 7 chips idle, which are paid for: 4 chips suffice for this."),
        (16, 1, "1 request in flight can keep only 1 of 2 replicas busy: 8 chips suffice for this."),
        (8, 1, None),
        (16, 2, None),
    ],
)
def test_idle_chips_are_counted(gpus: int, concurrency: int, sentence: str | None) -> None:
    found = ranking(gpus=gpus, workload=Workload(concurrency=concurrency))
    said = [line for line in why.caption(found) if "suffice" in line]
    assert said == ([] if sentence is None else [sentence])
