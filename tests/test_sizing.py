"""How many chips: no fewer do, one replica less does not, more load or tighter limits never need less."""

from __future__ import annotations

import numpy as np
import pytest
from asking import request
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Filters, Limits, NoPlanError, Request, load_hardware, plan, rank
from planner.plans.placement import Placement
from planner.plans.plan import Plan

MS = 1e-3
FEW = Filters(tp=(1, 2, 4, 8), pp=(1, 2))
"""Replicas that are looked at where many rankings are made."""
SLO = Limits(ttft=500 * MS, tpot=25 * MS)


def fewest(model: str, limits: Limits = SLO, most: int = 256, hardware: str = "h100", **work: float) -> Request:
    return request(model, most, hardware, work=work, limits=limits)._replace(fewest=True)


def chips(asked: Request) -> float:
    """The number found; infinite where there is none."""
    try:
        return float(rank(asked).results["gpus"][0])
    except NoPlanError:
        return np.inf


@pytest.mark.parametrize("hardware", ["h100", "rtx-4090", "gb200-nvl72", "l4"])
@pytest.mark.parametrize("tp", [1, 2, 3, 5, 6, 8, 12, 16])
def test_the_chips_of_so_many_replicas_are_the_fewest_that_hold_them(hardware: str, tp: int) -> None:
    machine = load_hardware(hardware)
    for pp, dp in ((1, 1), (1, 7), (2, 3), (3, 5)):
        count = Placement.of(machine, 1).fewest(tp, pp, dp)
        assert Placement.of(machine, count).replicas(tp, pp) >= dp
        assert all(Placement.of(machine, less).replicas(tp, pp) < dp for less in range(max(1, count - 20), count))


@pytest.mark.parametrize(
    ("model", "work"),
    [
        ("llama3-70b", {"arrival_rate": 6.0}),
        ("llama3-8b", {"arrival_rate": 50.0}),
        ("llama3-8b", {"arrival_rate": 120.0, "isl": 300, "osl": 40}),
        ("llama3-70b", {"concurrency": 90}),
        ("llama3-70b", {}),
        ("llama3-8b", {"concurrency": 333}),
    ],
)
def test_no_fewer_chips_have_a_plan(model: str, work: dict[str, float]) -> None:
    asked = fewest(model, **work)._replace(filters=FEW)
    found = rank(asked)
    count = found.request.gpus
    assert count == found.results["gpus"][0] == found.placement.gpus
    given_so_many = rank(asked._replace(gpus=count, fewest=False))
    shown = [row["plan"] for row in found.results.rows() if row["gpus"] == count]
    assert set(shown) <= {row["plan"] for row in given_so_many.results.rows()}
    for less in {1, count // 2, count - 1} - {0, count}:
        with pytest.raises(NoPlanError):
            rank(asked._replace(gpus=less, fewest=False))


@settings(max_examples=3, deadline=None)
@given(rate=st.floats(0.5, 60.0), tpot=st.floats(14.0, 60.0), isl=st.sampled_from((256, 2000)))
def test_every_row_sustains_the_rate_and_one_replica_less_does_not(rate: float, tpot: float, isl: int) -> None:
    asked = fewest("llama3-70b", Limits(ttft=0.6, tpot=tpot * MS), 512, arrival_rate=rate, isl=isl)._replace(
        filters=FEW
    )
    rows = rank(asked).results.rows()
    assert [row["gpus"] for row in rows] == sorted(row["gpus"] for row in rows)
    for row in rows[:2]:
        own = Plan.parse(row["plan"])
        again = asked._replace(
            fewest=False, gpus=row["gpus"], filters=Filters(tp=(own.tp,), pp=(own.pp,), dp=(own.dp,))
        )
        same = rank(again).results.row(0)
        for name in ("ttft_ms", "queue_ms", "tpot_ms", "in_flight"):
            assert same[name] == pytest.approx(row[name], rel=1e-6), name
        assert row["ttft_ms"] + row["queue_ms"] <= 600 * (1 + 1e-9)
        assert row["tpot_ms"] <= tpot * (1 + 1e-9)
        if own.dp > 1:
            with pytest.raises(NoPlanError, match="sustains"):
                rank(again._replace(filters=again.filters._replace(dp=(own.dp - 1,))))


@settings(max_examples=4, deadline=None)
@given(
    rate=st.floats(0.1, 80.0),
    more=st.floats(1.0, 3.0),
    tpot=st.floats(4.0, 60.0),
    looser=st.floats(1.0, 2.0),
    model=st.sampled_from(("llama3-8b", "llama3-70b")),
)
def test_more_requests_never_need_fewer_chips_and_looser_limits_never_more(
    rate: float, more: float, tpot: float, looser: float, model: str
) -> None:
    def asked(rate: float, tpot: float) -> Request:
        return fewest(model, Limits(ttft=0.5, tpot=tpot * MS), 512, arrival_rate=rate)._replace(filters=FEW)

    now = chips(asked(rate, tpot))
    assert chips(asked(rate * more, tpot)) >= now
    assert chips(asked(rate, tpot * looser)) <= now


def test_one_request_is_the_smallest_deployment_and_a_load_given_needs_more() -> None:
    alone = chips(fewest("llama3-70b"))
    counts = [chips(fewest("llama3-70b", concurrency=load)) for load in (1, 10, 100, 300)]
    assert counts[0] == alone
    assert counts == sorted(counts)
    assert counts[-1] > alone


def test_where_the_goal_is_throughput_the_smallest_deployment_has_its_best_load() -> None:
    ranking = rank(fewest("llama3-70b")._replace(objective="throughput"))
    row = ranking.results.row(0)
    assert row["gpus"] == chips(fewest("llama3-70b"))
    same = rank(ranking.request._replace(fewest=False, filters=Filters(tp=(row["tp"],), pp=(row["pp"],))))
    assert same.results.row(0)["concurrency"] == row["concurrency"] > 1


def test_replicas_of_a_filter_are_the_only_ones() -> None:
    free = rank(fewest("llama3-8b", arrival_rate=200.0)).results
    asked = fewest("llama3-8b", arrival_rate=200.0)._replace(filters=Filters(dp=(4, 32)))
    rows = rank(asked).results.rows()
    assert {row["dp"] for row in rows} <= {4, 32}
    assert rows[0]["gpus"] >= free["gpus"][0]


def test_of_a_torus_the_smallest_slice_is_found() -> None:
    asked = fewest("llama3-8b", Limits(tpot=30 * MS), 256, "tpu-v5e", arrival_rate=20.0)
    ranking = rank(asked)
    count = ranking.request.gpus
    assert str(ranking.placement.slice).count("x") == 1
    assert ranking.results.row(0)["utilisation"] <= 1
    with pytest.raises(NoPlanError):
        rank(asked._replace(gpus=count - 1, fewest=False))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            fewest("llama3-70b", Limits(tpot=MS), arrival_rate=4.0),
            ("--max-tpot 1: the best is", "more replicas make none"),
        ),
        (fewest("llama3-70b", Limits(ttft=0.01)), ("--max-ttft 10: the best is", "smallest change", "TP")),
        (fewest("llama3-70b", most=16, arrival_rate=40.0), ("up to 16 x h100-sxm", "--max-gpus 40")),
        (fewest("llama3.1-405b", most=4), ("fits in memory",)),
    ],
)
def test_what_no_number_of_chips_does_is_said_with_what_would_do(asked: Request, said: tuple[str, ...]) -> None:
    with pytest.raises(NoPlanError) as stop:
        rank(asked)
    for text in said:
        assert text in str(stop.value)


def test_the_bound_that_advice_names_is_enough_and_less_is_not() -> None:
    asked = fewest("llama3-70b", most=16, arrival_rate=40.0)
    with pytest.raises(NoPlanError) as stop:
        rank(asked)
    count = int(str(stop.value).split("--max-gpus ")[1])
    assert chips(asked._replace(gpus=count)) == count
    assert chips(asked._replace(gpus=count - 1)) == np.inf


QUESTION = ("-m", "llama3-70b", "--max-ttft", "500", "--max-tpot", "25", "--arrival-rate", "40")


def test_the_command_says_how_many_chips_and_nodes_and_what_the_next_needs() -> None:
    done = run(*QUESTION, "--top", "2")
    assert done.status == 0
    text = " ".join(done.out.split())
    assert "40 chips serve 40 requests/s, as TP8xDP5; TP4xDP11 needs 44." in text
    assert "on 40 x h100-sxm (5 nodes of 8)" in text
    assert "Percentiles" in text
    assert max(map(len, done.out.splitlines())) <= 100
    (row,) = run(*QUESTION, "--top", "1", "--csv", "-").rows
    assert (row["gpus"], row["arrival_rate_per_s"], row["requests_per_s"]) == ("40", "40", "40")
    assert plan("llama3-70b", arrival_rate=40.0, max_ttft_ms=500, max_tpot_ms=25)[0]["plan"] == row["plan"]


def test_without_a_limit_or_a_rate_there_are_eight_chips_as_before() -> None:
    assert run("-m", "llama3-70b", "--top", "1", "--csv", "-").rows[0]["gpus"] == "8"
    assert run("-m", "llama3-70b", "--pareto", "--max-tpot", "25", "--top", "1", "--csv", "-").rows[0]["gpus"] == "8"
    assert int(run("-m", "llama3-70b", "--max-gpus", "16", "--top", "1", "--csv", "-").rows[0]["gpus"]) == 2


def test_what_explains_compares_launches_and_sweeps_takes_the_same_question() -> None:
    explained = run("explain", *QUESTION, "--tp", "4,8", "--pp", "1")  # what it changes is sized anew each time
    assert explained.status == 0
    assert "TP8xDP5" in explained.out
    assert "40 requests/s" in explained.out
    compared = run("compare", "-H", "h100,h200", *QUESTION)
    assert compared.status == 0
    assert "40 x h100-sxm, 32 x h200-sxm" in " ".join(compared.out.split())
    assert "--tensor-parallel-size 8" in run(*QUESTION, "--launch").out
    few = ("--tp", "2,4,8", "--pp", "1,2")
    done = run("sweep", "-m", "llama3-70b", "--arrival-rate", "5,10,20,40.5", "--max-tpot", "25", *few, "--csv", "-")
    counts = [int(row["gpus"]) for row in done.rows]
    assert counts == sorted(counts)
    assert [row["arrival_rate_per_s"] for row in done.rows] == ["5", "10", "20", "40.5"]
    assert "--arrival-rate 40.5" in done.rows[-1]["asked"]
    again = run(*done.rows[0]["asked"].split()[1:], "--csv", "-").rows[0]
    assert {name: done.rows[0][name] for name in again} == again


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "8", "--max-gpus", "16"), "--gpus says how many chips there are"),
        (("--arrival-rate", "4", "--concurrency", "4"), "both say how many"),
        (("--arrival-rate", "0"), "--arrival-rate must be above 0"),
        (
            ("--arrival-rate", "4", "--max-gpus", "64", "--pareto"),
            "--pareto over several numbers of chips has no arrival rate",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(words: tuple[str, ...], said: str) -> None:
    done = run("-m", "llama3-70b", *words)
    assert done.status == 2
    assert said in done.err
