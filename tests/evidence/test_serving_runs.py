"""Serving runs against the planner: the errors promised, and what they are computed from."""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
from helpers import Late

from planner import estimate, load_engine, load_machine
from planner.evidence.comparison import Summary, summarised
from planner.evidence.hosts import lay, transferred
from planner.evidence.serving import LIGHT, ServingPoint, comparisons, lightly_loaded, points, predictions
from planner.specs.catalog import load_model
from planner.specs.measurements import measurements

ROWS = measurements("serving")
RUNS = points()
SERVED = Late(lambda: predictions(RUNS))
FOUND = Late(lambda: comparisons(RUNS, SERVED))


def errors(check: str, part: str = "unseen") -> Summary:
    (found,) = summarised([each for each in FOUND if (each.check, each.part) == (check, part)], ["check"])
    return found


def test_rows_are_carried_whole_and_name_what_exists() -> None:
    assert len(ROWS) == 517
    assert len({row["case"] for row in ROWS}) == 517
    assert {row["part"] for row in ROWS} == {"fitted", "unseen"}
    for name in {row["model"] for row in ROWS}:
        assert load_model(name).name == name
    for hardware, engine in {(row["hardware"], row["engine"]) for row in ROWS}:
        assert [spec.name for spec in load_machine(hardware, engine)] == [hardware, engine]


def test_only_rows_that_the_notes_on_the_data_name_are_excluded() -> None:
    excluded = [row for row in ROWS if row["excluded"]]
    assert len(ROWS) - len(excluded) == len(RUNS) == 506
    reasons = {row["excluded"] for row in excluded}
    assert len(reasons) <= 3
    assert all(float(row["ttft_ms"]) > 15000 for row in excluded if row["excluded"].startswith("queued"))


def test_a_group_lies_in_one_part_whole() -> None:
    """Model, weights, machine, engine, lengths: constants fitted on one plan of a group would know the others."""
    parts: dict[tuple[str, ...], set[str]] = {}
    for run in RUNS:
        parts.setdefault((*run.group[:4], *run.group[5:]), set()).add(run.part)
    assert all(len(found) == 1 for found in parts.values())
    share = sum(run.part == "unseen" for run in RUNS) / len(RUNS)
    assert 0.4 < share < 0.6


@pytest.mark.parametrize(
    ("check", "mean", "median", "p90"),
    [("TPOT", 0.08, 0.055, 0.16), ("residence", 0.09, 0.065, 0.16), ("TTFT, light load", 0.2, 0.2, 0.35)],
)
def test_errors_on_groups_that_nothing_was_fitted_on(check: str, mean: float, median: float, p90: float) -> None:
    found = errors(check)
    assert found.cases >= 10
    assert found.mean <= mean
    assert found.median <= median
    assert found.p90 <= p90


def test_no_engine_on_any_chip_is_worse_than_the_other_planner() -> None:
    compared: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for each in FOUND:
        if each.check == "TPOT" and each.peer is not None:
            pair = abs(each.error), abs(each.peer / each.observed - 1)
            compared.setdefault((each.engine, each.hardware), []).append(pair)
    assert len(compared) == 8
    for key, pairs in compared.items():
        ours, theirs = np.mean(pairs, axis=0)
        assert ours <= theirs, key


def test_constants_fitted_on_one_chip_carry_to_the_others() -> None:
    others = [run for run in RUNS if run.hardware != "h100-sxm"]
    found = [each for each in comparisons(others, machine=lay(transferred())) if each.check == "TPOT"]
    assert len(found) == 173
    assert {each.hardware for each in found} == {"h200-sxm", "b200-sxm"}
    assert float(np.mean([abs(each.error) for each in found])) <= 0.09


def test_a_prediction_is_what_estimate_says() -> None:
    for place in range(0, len(RUNS), 97):
        run = RUNS[place]
        row = estimate(
            run.model, hardware=run.hardware, engine=run.engine, weights=run.weights, tp=run.tp, isl=run.isl,
            osl=run.osl, concurrency=run.concurrency, arrivals=run.arrivals,
        )  # fmt: skip
        assert SERVED.tpot[place] == pytest.approx(row["tpot_ms"], rel=1e-9)
        assert SERVED.ttft[place] == pytest.approx(row["ttft_ms"], rel=1e-9)


def test_residence_is_batch_prefills_and_the_decodes() -> None:
    """R = b E + (osl - 1) D, by which E is told."""
    again = SERVED.batch * SERVED.prefill + (SERVED.osl - 1) * SERVED.decode
    assert again == pytest.approx(SERVED.residence, rel=1e-12)
    assert np.all(SERVED.prefill > 0)


def test_light_load_is_few_requests_that_did_not_come_together() -> None:
    light = lightly_loaded(RUNS, SERVED)
    for place in np.flatnonzero(light):
        run = RUNS[place]
        assert run.concurrency <= LIGHT
        assert run.ttft_ms is not None
        assert run.ttft_ms < SERVED.ttft[place] + 1.5 * SERVED.prefill[place]
    few = np.array([run.concurrency <= LIGHT for run in RUNS])
    assert 0 < (few & ~light).sum() < light.sum()  # some did come together, and are not counted


def test_the_engine_says_how_requests_arrive_where_nobody_else_does() -> None:
    said = load_engine("sglang").scheduler.arrivals
    run = ServingPoint("llama3.1-8b", "h100-sxm", "sglang", 1024, 256, 32)
    assert said == "waves"
    assert predictions([run]).tpot == pytest.approx(predictions([run._replace(arrivals=said)]).tpot, rel=1e-12)
    assert predictions([run]).tpot < predictions([run._replace(arrivals="steady")]).tpot


def test_the_split_is_fixed() -> None:
    """Moving a row from one part to the other would change this number."""
    listed = ",".join(f"{run.case}{run.part[0]}" for run in RUNS)
    assert crc32(listed.encode()) == 321258050
