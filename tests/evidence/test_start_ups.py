"""The memory model and the rules against start-ups of engines that others logged."""

from __future__ import annotations

import re

import pytest
from helpers import Late

from planner.costs.weights import parameters
from planner.evidence.comparison import summarised
from planner.evidence.memory import comparisons, start_of, verdicts
from planner.specs.catalog import MODELS, load_engine, names
from planner.specs.measurements import FOLDER, measured_model, measurements

ROWS = measurements("memory")
CHECKS = Late(lambda: {summary.key[0]: summary for summary in summarised(comparisons(), ["check"])})


def test_all_published_cases_are_carried_with_their_sources() -> None:
    assert len(ROWS) == 95
    assert len({row["case"] for row in ROWS}) == 95
    assert all(re.match(r"https://github\.com/", row["source"]) for row in ROWS)
    assert {row["outcome"] for row in ROWS} == {"ran", "out_of_memory", "refused"}
    assert all(bool(row["reason"]) == (row["outcome"] != "ran") for row in ROWS)


def test_every_model_and_engine_of_a_case_can_be_read() -> None:
    for row in ROWS:
        if row["model"]:
            assert measured_model(row["model"]).vocab > 0
        if row["constants"]:
            assert load_engine(row["constants"]).name == row["constants"]
    beside = {path.stem for path in (FOLDER / "models").glob("*.yaml")}
    tables = ("memory", "published", "diffusion", "diffusion_picks")
    assert beside <= {row["model"] for name in tables for row in measurements(name)}
    assert not beside & set(names(MODELS))


@pytest.mark.parametrize(
    ("check", "least_cases", "mean", "median", "worst"),
    [
        ("weights per chip", 45, 0.005, 0.001, 0.06),
        ("KV tokens from logged memory", 35, 0.01, 0.001, 0.17),
        ("KV memory end to end", 35, 0.01, 0.005, 0.06),
        ("KV needed for the whole context", 1, 0.0, 0.0, 0.0),
    ],
)
def test_errors_stay_within_what_is_promised(
    check: str, least_cases: int, mean: float, median: float, worst: float
) -> None:
    found = CHECKS[check]
    assert found.cases >= least_cases
    assert found.mean <= mean
    assert found.median <= median
    assert found.worst <= worst


def test_whoever_failed_is_refused_for_that_reason_and_whoever_ran_is_not() -> None:
    decided = [verdict for verdict in verdicts() if verdict.decidable]
    assert sum(verdict.ran for verdict in decided) >= 50
    assert sum(not verdict.ran for verdict in decided) >= 23
    assert [verdict for verdict in decided if not verdict.right] == []


def test_what_is_not_decided_is_little_and_has_a_reason() -> None:
    """A case is left out for what its source does not say, not for what the model says of it."""
    undecided = {verdict.case for verdict in verdicts() if not verdict.decidable}
    assert len(undecided) <= 10
    for row in ROWS:
        if row["case"] in undecided:
            assert not row["chip_memory_gib"] or row["reason"] in (
                "two servers on one node", "sampler after start-up", "attention over requests",
            )  # fmt: skip


def test_a_case_without_a_model_or_a_split_is_not_priced() -> None:
    assert start_of({**ROWS[0], "model": ""}) is None
    assert start_of({**ROWS[0], "tp": ""}) is None
    assert start_of({**ROWS[0], "constants": ""}) is None


def test_the_check_can_fail() -> None:
    """A case told wrongly is found out: half the weights, a run on a chip of half the memory."""
    row = next(row for row in ROWS if row["case"] == "C018")
    (weights, *_) = comparisons([{**row, "weights_gib": str(float(row["weights_gib"]) / 2)}])
    assert weights.error == pytest.approx(1.0, abs=0.01)
    (verdict,) = verdicts([{**row, "chip_memory_gib": "16"}])
    assert not verdict.right
    (verdict,) = verdicts([{**row, "outcome": "refused", "reason": "query heads"}])
    assert not verdict.right
    (verdict,) = verdicts([{**row, "outcome": "refused", "reason": "chips", "tp": "3", "gpus": "3"}])
    assert verdict.refusal is not None
    assert not verdict.right  # refused, but for its query heads
    (verdict,) = verdicts([{**row, "outcome": "refused", "reason": "attention over requests", "tp": "3", "gpus": "3"}])
    assert not verdict.right  # a reason of no known words is not found letter by letter


def test_models_beside_the_catalogue_have_about_the_parameters_of_their_names() -> None:
    billions = {
        "dscoder-6.7b": 6.74, "gpt2-xl": 1.56, "granite-2b": 2.53, "granite-8b": 8.17, "llama1-33b": 32.5,
        "opt-125m": 0.125, "phi-2": 2.78, "qwen1.5-32b": 32.5, "qwen1.5-72b": 72.3, "qwen1.5-7b": 7.72,
        "qwen1.5-moe": 14.3, "qwen2.5-14b": 14.8, "qwen3-coder-30b": 30.5,
    }  # fmt: skip
    for name, count in billions.items():
        assert parameters(measured_model(name)) / 1e9 == pytest.approx(count, rel=0.04), name
