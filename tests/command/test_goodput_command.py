"""`plan goodput`: percentiles at a rate, the highest rate within limits, traces, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import run

from planner.errors import InputError
from planner.simulating import goodput

ONE = ("goodput", "-m", "llama3-8b", "--plan", "TP1", "--osl", 32)
QUICK = (*ONE, "--requests", 40)


def text_of(words: str) -> str:
    return " ".join(words.split())


def test_the_highest_rate_within_limits_as_a_table_and_as_rows() -> None:
    done = run(*QUICK, "--max-ttft", 150, "--max-tpot", 12)
    text = text_of(done.out)
    assert done.status == 0
    assert "TP1 keeps TTFT <= 150 ms and TPOT <= 12 ms for 90 % of the requests up to" in text
    assert "is the first to break" in text or "are the first to break" in text
    assert all(len(line) <= 100 for line in done.out.splitlines())
    (row,) = run(*QUICK, "--max-ttft", 150, "--max-tpot", 12, "--csv", "-", "--quiet").rows
    assert float(row["goodput_per_s"]) == float(row["arrival_rate_per_s"]) == float(row["goodput_per_s_per_gpu"])
    assert float(row["attainment"]) >= 0.9
    assert float(row["ttft_p50_ms"]) <= float(row["ttft_p90_ms"]) <= float(row["ttft_p99_ms"])
    assert row["bound"] in ("ttft", "tpot", "ttft tpot")
    assert (row["seed"], row["requests"], row["trace"]) == ("1", "40", "")


def test_plans_are_ranked_by_what_they_serve() -> None:
    done = run(
        "goodput", "-m", "llama3-8b", "--gpus", 2, "--osl", 32, "--requests", 40, "--max-tpot", 12, "--json", "-"
    )
    rows = json.loads(done.out)
    assert len(rows) == 3
    assert {row["gpus"] for row in rows} == {2}
    rates = [row["goodput_per_s"] for row in rows]
    assert rates == sorted(rates, reverse=True)


def test_plans_by_name_are_paid_by_their_own_chips() -> None:
    words = ("goodput", "-m", "llama3-8b", "--plan", "TP2,TP1", "--osl", 32, "--requests", 40, "--max-tpot", 12)
    rows = run(*words, "--csv", "-").rows
    assert {(row["plan"], row["gpus"]) for row in rows} == {("TP1", "1"), ("TP2", "2")}
    assert [float(row["goodput_per_s_per_gpu"]) for row in rows] == sorted(
        (float(row["goodput_per_s_per_gpu"]) for row in rows), reverse=True
    )
    assert "on 1 to 2 x h100-sxm" in run(*words).out
    assert {row["gpus"] for row in run(*words, "--gpus", 2, "--csv", "-").rows} == {"2"}


def test_percentiles_at_a_rate_grow_with_it_and_with_bursts() -> None:
    def waits(*words: object) -> float:
        (row,) = run(*ONE, "--requests", 200, *words, "--csv", "-").rows
        assert row["goodput_per_s"] == row["bound"] == ""
        return float(row["ttft_p99_ms"])

    calm, busy = waits("--arrival-rate", 2), waits("--arrival-rate", 25)
    assert calm < busy < waits("--arrival-rate", 25, "--burstiness", 3)


def test_the_same_seed_gives_the_same_bytes() -> None:
    words = (*QUICK, "--arrival-rate", 5, "--json", "-")
    assert run(*words).out == run(*words).out
    assert run(*words).out != run(*words, "--seed", 2).out


def test_a_trace_is_played_as_it_was_and_faster(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("arrival,isl,osl\n" + "".join(f"{100 + at / 2},{500 + 10 * at},20\n" for at in range(40)))
    words = ("goodput", "-m", "llama3-8b", "--plan", "TP1", "--trace", file)
    (row,) = run(*words, "--csv", "-").rows
    assert (row["requests"], row["isl"], row["osl"], row["seed"]) == ("40", "695", "20", "")
    assert float(row["arrival_rate_per_s"]) == pytest.approx(2.0)
    (fast,) = run(*words, "--arrival-rate", 20, "--csv", "-").rows
    assert float(fast["ttft_p90_ms"]) > float(row["ttft_p90_ms"])
    assert f"40 requests of {file}" in text_of(run(*words).out)


def test_limits_that_no_load_keeps_end_with_what_is_reachable() -> None:
    done = run(*QUICK, "--max-ttft", 20, "--max-tpot", 3)
    assert (done.status, done.out) == (3, "")
    assert "no plan keeps TTFT <= 20 ms and TPOT <= 3 ms" in done.err
    assert "the shortest TTFT is" in done.err
    ttft, tpot = (done.err.split(f"--max-{name} ")[1].split()[0] for name in ("ttft", "tpot"))
    assert run(*QUICK, "--max-ttft", ttft, "--max-tpot", tpot, "--quiet").status == 0  # as it says
    gap = run(*QUICK, "--max-gap", 1)
    assert "the shortest gap is" in gap.err
    assert run(*QUICK, "--max-gap", gap.err.split("--max-gap ")[1].split()[0], "--quiet").status == 0


def test_a_rate_that_is_too_high_shows_its_table_and_ends_with_status_3() -> None:
    done = run(*QUICK, "--arrival-rate", 30, "--max-ttft", 70)
    assert done.status == 3
    assert done.out.startswith("plan")
    assert "at 30 requests/s no plan keeps TTFT <= 70 ms" in done.err
    assert run(*QUICK, "--arrival-rate", 1, "--max-ttft", 90, "--quiet").status == 0


def test_prompts_first_let_answers_wait() -> None:
    words = (*ONE, "--isl", 4000, "--requests", 60, "--arrival-rate", 4, "--csv", "-")
    (mixed,) = run(*words, "--max-num-batched-tokens", 512).rows
    (first,) = run(*words, "--prefill", "separate").rows
    assert float(first["gap_p99_ms"]) > 2 * float(mixed["gap_p99_ms"])


def test_too_few_requests_are_said_to_be_too_few() -> None:
    done = run("goodput", "-m", "llama3-8b", "--plan", "TP1", "--requests", 50, "--arrival-rate", 20)
    assert done.status == 0
    assert "50 requests at 20 a second are over too soon for a steady state; --requests" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "give limits, --max-ttft or --max-tpot, to search the highest rate"),
        (("--max-ttft", 0), "--max-ttft must be above 0"),
        (("--max-gap", -1), "--max-gap must be above 0"),
        (("--arrival-rate", 0), "--arrival-rate must be above 0"),
        (("--max-tpot", 20, "--attainment", 90), "--attainment must be above 0 and at most 1"),
        (("--max-tpot", 20, "--percentile", 100), "--percentile must be between 0 and 100"),
        (("--max-tpot", 20, "--percentile", 90, "--attainment", 0.9), "give one of them"),
        (("--max-tpot", 20, "--burstiness", -1), "--burstiness must be from 0"),
        (("--max-tpot", 20, "--requests", 3), "--requests"),
        (("--max-tpot", 20, "--routing", "random"), "--routing: expected one of least, robin"),
        (("--max-tpot", 20, "--prefill", "none"), "--prefill: expected one of mixed, separate"),
        (("--max-tpot", 20, "--plan", "TP1,TP1"), "TP1 stands twice"),
        (("--max-tpot", 20, "--plan", "TQ1"), "TQ1"),
        (("--max-tpot", 20, "--engine", "gpt-fast"), "runs static batches"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[object, ...], says: str) -> None:
    done = run(*QUICK, *words)
    assert (done.status, done.out) == (InputError.exit_status, "")
    assert says in done.err


def test_what_contradicts_a_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("arrival,isl,osl\n" + "5,100,20\n" * 30)
    words = ("goodput", "-m", "llama3-8b", "--plan", "TP1", "--trace", file)
    assert "--trace none.csv: cannot be read" in run(*words[:5], "--trace", "none.csv").err
    assert "leave out --isl" in run(*words, "--isl", 100).err
    assert "leave out --isl" in run(*words, "--burstiness", 2).err
    assert "all requests come at once" in run(*words, "--arrival-rate", 2).err
    (row,) = run(*words, "--csv", "-").rows
    assert row["arrival_rate_per_s"] == ""
    assert "is read by this very command" in run(*words, "--csv", file).err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "TP8", "--gpus", 4), "TP8 cannot run"),
        (("--plan", "TP3"), "TP3 cannot run"),
        (("--plan", "TP1", "--memory-limit", "10GiB"), "TP1 cannot run: weights"),
        (("--plan", "TP1", "--isl", 6000, "--memory-limit", "16.5GiB", "--weights", "bf16"), "TP1"),
    ],
)
def test_plans_that_cannot_run_end_with_status_3(words: tuple[object, ...], says: str) -> None:
    done = run("goodput", "-m", "llama3-8b", "--max-tpot", 20, *words)
    assert (done.status, done.out) == (3, "")
    assert says in done.err


@pytest.mark.parametrize(("at", "status"), [(5, 0), (2, 130)])
def test_an_interrupted_search_shows_the_best_so_far(at: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = goodput.Deployment.run, 0

    def some(made: goodput.Deployment, coming: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return real(made, coming)  # type: ignore[arg-type]

    monkeypatch.setattr(goodput.Deployment, "run", some)
    done = run(*QUICK, "--max-tpot", 12)
    assert done.status == status
    assert "interrupted" in done.err
    assert done.out.startswith("plan") == (status == 0)
