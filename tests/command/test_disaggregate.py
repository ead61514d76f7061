"""`plan disaggregate`: its table, what scripts read, and errors."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from helpers import run

SLO = ("--max-ttft", 500, "--max-tpot", 30)
SMALL = ("disaggregate", "-m", "llama3-70b", "--gpus", 8, "--tp", "2,4", "--pp", "1")


def test_pairs_and_the_plan_with_both_phases_together_are_ranked() -> None:
    done = run(*SMALL, *SLO)
    assert (done.status, done.err) == (0, "")
    assert "TP2xDP2 -> TP4" in done.out
    assert "TP4xDP2, together" in done.out
    assert "times the rate per chip of TP4xDP2" in done.out
    assert max(map(len, done.out.splitlines())) <= 100
    table = run(*SMALL, *SLO, "--csv", "-")
    rows = table.rows
    assert [row["rank"] for row in rows] == [str(place + 1) for place in range(len(rows))]
    rates = [float(row["requests_per_s_per_gpu"]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert {row["kind"] for row in rows} == {"disaggregated", "colocated"}
    assert all("elementwise" in row["assumed"] for row in rows)
    assert all("pp" not in row["extrapolates"] for row in rows)
    for above, row in pairwise(rows):
        gap = 1 - float(row["requests_per_s_per_gpu"]) / float(above["requests_per_s_per_gpu"])
        assert (row["tie"] == "true") == (gap <= 0.1)
    apart = next(row for row in rows if row["kind"] == "disaggregated")
    assert float(apart["ttft_ms"]) <= 500.01
    assert float(apart["tpot_ms"]) <= 30.01
    assert int(apart["prefill_gpus"]) + int(apart["decode_gpus"]) + int(apart["idle_gpus"]) == 8
    assert json.loads(run(*SMALL, *SLO, "--json", "-").out)[0].keys() == rows[0].keys()
    assert run(*SMALL, *SLO, "--csv", "-", "--no-header").out == table.out.split("\n", 1)[1]
    assert run(*SMALL, *SLO, "--quiet").out == ""


def test_a_rate_is_served_by_the_fewest_chips_and_simulated() -> None:
    words = ("disaggregate", "-m", "llama3-8b", "--tp", 1, "--pp", 1, "--arrival-rate", 30, *SLO)
    rows = run(*words, "--csv", "-").rows
    assert all(float(row["requests_per_s"]) == 30 for row in rows)
    done = run(*words, "--attainment", 0.9, "--requests", 100, "--top", 1)
    assert (done.status, done.err) == (0, "")
    assert "TTFT p90" in done.out


def test_limits_for_a_share_of_requests_are_simulated() -> None:
    done = run(*SMALL, *SLO, "--attainment", 0.9, "--requests", 30, "--simulate", 1, "--csv", "-")
    assert (done.status, done.err) == (0, "")
    assert all(float(row["attained"]) >= 0.9 for row in done.rows)
    assert all(float(row["simulated_requests_per_s"]) > 0 for row in done.rows)
    assert sum(row["kind"] == "disaggregated" for row in done.rows) == 1


def test_without_limits_the_frontier() -> None:
    done = run("disaggregate", "-m", "llama3-8b", "--gpus", 2, "--csv", "-", "--top", 0)
    tpot = [float(row["tpot_ms"]) for row in done.rows]
    rate = [float(row["requests_per_s"]) for row in done.rows]
    assert tpot == sorted(tpot)
    assert rate == sorted(rate)
    assert all(float(row["prefill_utilisation"]) <= 0.8 + 1e-6 for row in done.rows)


def test_pools_of_two_machines_and_plans_that_are_given() -> None:
    done = run(
        "disaggregate", "-m", "llama3-70b", "--decode-hardware", "a100", "--prefill-gpus", 4, "--decode-gpus", 8,
        "--prefill-plan", "TP4", "--decode-plan", "TP8", "--max-ttft", 500, "--max-tpot", 40, "--csv", "-",
    )  # fmt: skip
    assert (done.status, done.err) == (0, "")
    (row,) = (row for row in done.rows if row["kind"] == "disaggregated")
    assert (row["prefill_plan"], row["decode_plan"]) == ("TP4", "TP8")
    assert (row["prefill_hardware"], row["decode_hardware"]) == ("h100-sxm", "a100-80gb-sxm")
    assert {row["prefill_hardware"] for row in done.rows if row["kind"] == "colocated"} == {"h100-sxm", "a100-80gb-sxm"}


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("--max-ttft", 500), 2, "give --max-tpot too"),
        (("--max-ttft", 1, "--max-tpot", 1), 3, "the fastest plan takes alone"),
        (("--affinity", "middle"), 2, "expected one of high, low"),
        (("--transfer", "slowly"), 2, "expected one of layers, whole"),
        (("--prefill-plan", "TPX"), 2, "is not a plan"),
        (("--prefill-gpus", -1), 2, "--prefill-gpus must be at least 1"),
        (("--decode-hardware", "h1000"), 2, "h1000"),
        ((*SLO, "--tp", 3), 3, "does not divide"),
        ((*SLO, "--prefill-plan", "TP3"), 3, "1 prefill plan refused, as TP3: tp 3 does not divide"),
        ((*SLO, "--tp", "4", "--pp", "1", "--arrival-rate", 1e6), 3, "on 8 chips, which serve up to 11.91 requests/s"),
        ((*SLO, "--tp", 1, "--pp", 1), 3, "exceed the limit"),
        ((*SLO, "--attainment", 0), 2, "--attainment must be above 0"),
    ],
)
def test_errors_are_for_people(words: tuple[object, ...], status: int, says: str) -> None:
    done = run("disaggregate", "-m", "llama3-70b", "--gpus", 8, *words)
    assert (done.status, done.out) == (status, "")
    assert says in done.err
    assert len(done.err.splitlines()) == 1
