"""One plan, priced in several ways: where estimate, shift, disaggregate and simulation overlap they have to agree."""

from __future__ import annotations

import pytest
from helpers import run

MODEL = ("-m", "llama3-8b")
LIMITS = ("--max-ttft", "200", "--max-tpot", "12")


def row(*words: str) -> dict[str, str]:
    """The only row of a command."""
    (found,) = run(*words, "--csv", "-", "--quiet").rows
    return found


def test_a_simulated_request_alone_takes_what_the_estimate_says() -> None:
    alone = row("estimate", *MODEL, "--plan", "TP2")
    simulated = row("goodput", *MODEL, "--plan", "TP2", "--arrival-rate", "0.001", "--requests", "40")
    for name in ("ttft", "tpot"):
        assert float(simulated[f"{name}_p50_ms"]) == pytest.approx(float(alone[f"{name}_ms"]), rel=0.005)


@pytest.mark.parametrize("load", ["1", "32"])
def test_tensor_and_data_parallelism_beside_shift_are_the_plans_of_the_estimate(load: str) -> None:
    asked = ("-m", "llama3.1-8b", "--isl", "2000", "--osl", "100", "--concurrency", load, "--gpus", "4")
    systems = run("shift", *asked, "--csv", "-").rows
    for plan in ("TP4", "DP4"):
        found = next(each for each in systems if each["system"] == plan and each["at"] == "load")
        expected = row("estimate", *asked, "--plan", plan)
        for name in ("ttft_ms", "tpot_ms", "latency_ms"):
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-5)


def test_the_plan_that_disaggregation_has_to_beat_serves_as_much_in_the_simulation() -> None:
    """Its closed form is of means in a steady stream, as equal gaps are."""
    rows = run("disaggregate", *MODEL, "--gpus", "2", *LIMITS, "--tp", "1,2", "--pp", "1", "--csv", "-").rows
    together = next(each for each in rows if each["kind"] == "colocated")
    simulated = row("goodput", *MODEL, "--gpus", "2", "--plan", together["plan"], *LIMITS, "--burstiness", "0")
    assert float(simulated["goodput_per_s"]) == pytest.approx(float(together["requests_per_s"]), rel=0.03)
