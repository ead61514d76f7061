"""Lengths that differ: few points stand for all, long answers count longer, equal lengths change nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from asking import request
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import InputError, NoPlanError, Workload, estimate, plan, rank
from planner.costs.layers import Structure
from planner.costs.rows import Rows
from planner.costs.serving import fit, price
from planner.explaining.breakdown import breakdown, plan_of
from planner.plans.placement import Placement
from planner.pricing import setting_of
from planner.specs.lengths import NODES, STEEPEST, Spread, independent, lengths_from, log_normal, spread_of

LLAMA = "llama3.1-70b"
RNG = np.random.default_rng(11)


def mixture(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Chats and long documents, whose answers are longer."""
    long = RNG.random(count) < 0.2
    isl = np.where(long, RNG.integers(4000, 20000, count), RNG.lognormal(5.5, 0.8, count).astype(int) + 1)
    osl = np.where(long, RNG.integers(300, 900, count), RNG.integers(1, 400, count))
    return isl.astype(float), osl.astype(float)


def priced(spread: Spread, **degrees: float) -> dict[str, float]:
    """TP8 on eight H100 with 32 requests, by the arrays that everything else uses."""
    work = Workload(spread.isl, spread.osl, lengths=spread.lengths)
    asked = request(LLAMA, 8, work=work._asdict())
    setting = setting_of(asked, Placement.of(asked.hardware, 8), Structure("heads", "heads"))
    rows = Rows.of(**{"tp": 8, "pp": 1, "dp": 1, "isl": spread.isl, "osl": spread.osl, "concurrency": 32, **degrees})
    fitted = fit(setting, rows, clip=False)
    found = price(setting, rows, fitted)
    return {name: float(getattr(found, name)[0]) for name in ("ttft", "tpot", "requests_per_s", "prompt", "ttft_p90")}


@pytest.mark.parametrize(("kind", "pp"), [("log-normal", 1), ("mixture", 1), ("mixture", 2)])
def test_few_lengths_price_as_a_hundred_thousand_do(kind: str, pp: int) -> None:
    count = 100_000
    isl, osl = mixture(count) if kind == "mixture" else (np.ceil(RNG.lognormal(7.0, 0.6, count)), np.full(count, 200.0))
    few = spread_of(isl, osl)
    assert few.lengths is not None
    assert len(few.lengths.prompts) == NODES
    ratios = isl / isl.mean()
    every = few._replace(lengths=few.lengths._replace(prompts=tuple((ratio, 1 / count) for ratio in ratios.tolist())))
    ours, theirs = priced(few, tp=8 / pp, pp=pp), priced(every, tp=8 / pp, pp=pp)
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], rel=0.01), name


def test_the_mean_of_prefills_is_more_than_the_prefill_of_the_mean() -> None:
    isl, osl = mixture(2000)
    spread = spread_of(isl, osl)
    assert priced(spread)["prompt"] > priced(spread._replace(lengths=None))["prompt"] * 1.02


def test_a_batch_sees_longer_answers_and_their_prompts_longer() -> None:
    isl, osl = mixture(2000)
    spread = spread_of(isl, osl)
    assert spread.lengths is not None
    seen_isl, seen_osl = spread.lengths.seen(spread.isl, spread.osl)
    # who is met in a batch: a request for each of its tokens, anywhere in its answer
    met = RNG.choice(len(isl), 400_000, p=osl / osl.sum())
    context = isl[met] + RNG.random(len(met)) * osl[met]
    assert seen_isl + seen_osl / 2 == pytest.approx(context.mean(), rel=0.01)
    assert seen_isl + seen_osl == pytest.approx((isl + osl)[met].mean(), rel=0.01)
    by_hand = (osl * (isl + osl / 2)).mean() / osl.mean()
    assert seen_isl + seen_osl / 2 == pytest.approx(by_hand, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 5000), st.floats(0.01, 100.0)), min_size=2, max_size=60)
)
def test_the_points_have_the_moments_of_the_distribution_and_lie_within_it(
    rows: list[tuple[int, int, float]],
) -> None:
    isl, osl, weight = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    spread = spread_of(isl, osl, weight)
    share = weight / weight.sum()
    assert spread.isl == pytest.approx(share @ isl)
    assert spread.osl == pytest.approx(share @ osl)
    if spread.lengths is None:
        assert np.ptp(isl) == np.ptp(osl) == 0
        return
    nodes, weights = (np.array(column) for column in zip(*spread.lengths.prompts, strict=True))
    assert weights.sum() == pytest.approx(1)
    assert np.all(weights >= 0)
    ratios = isl / (share @ isl)
    assert nodes.min() >= ratios.min() * (1 - 1e-9)
    assert nodes.max() <= ratios.max() * (1 + 1e-9)
    for power in (1, 2, 3):
        assert weights @ nodes**power == pytest.approx(share @ ratios**power, rel=1e-7)


def test_equal_lengths_change_nothing_at_all(tmp_path: Path) -> None:
    path = tmp_path / "same.csv"
    path.write_text("isl,osl\n1500,300\n1500,300\n")
    options = {"gpus": 8, "concurrency": 20}
    same = plan(LLAMA, lengths=str(path), **options)  # type: ignore[arg-type]
    assert same == plan(LLAMA, isl=1500, osl=300, **options)  # type: ignore[arg-type]
    assert estimate(LLAMA, plan="TP8", lengths=str(path)) == estimate(LLAMA, plan="TP8", isl=1500, osl=300)


@pytest.mark.parametrize("ratio", [1.01, 1.5, 2.0, 2.27])
def test_the_log_normal_goes_through_its_mean_and_its_p90(ratio: float) -> None:
    values = log_normal(1000, 1000 * ratio)
    assert values.mean() == pytest.approx(1000)
    assert np.quantile(values, 0.9) == pytest.approx(1000 * ratio, rel=0.02)
    assert pytest.approx(2.2736, abs=1e-3) == STEEPEST


def test_prompts_and_answers_of_their_own_are_independent() -> None:
    spread = independent(log_normal(1000, 2000), log_normal(200, 400))
    assert spread.lengths is not None
    assert spread.lengths.together == pytest.approx(1)
    assert spread.lengths.spread > 1.5
    assert (spread.isl, spread.osl) == (1000, 200)


def test_more_spread_is_never_cheaper_and_waits_longer() -> None:
    rows = []
    for lengths in ("1000/200", "1000,1300/200", "1000,2000/200"):
        rows.append(plan("llama3.1-8b", 1, lengths=lengths, arrival_rate=12.0, filters=None)[0])
    assert rows[0]["ttft_p90_ms"] is None
    for less, more in pairwise(rows):
        assert more["queue_ms"] > less["queue_ms"]
        assert more["in_flight"] > less["in_flight"]
        assert more["ttft_p90_ms"] > more["ttft_ms"]


def test_longer_answers_leave_room_for_fewer() -> None:
    same = estimate(LLAMA, plan="TP8", isl=1000, osl=400)
    spread = estimate(LLAMA, plan="TP8", lengths="1000/400,900")
    assert spread["max_concurrency"] <= same["max_concurrency"]
    tight = {"plan": "TP4", "max_num_seqs": 8192}
    assert estimate(LLAMA, **tight, lengths="1000/400,900")["max_concurrency"] < (
        0.95 * estimate(LLAMA, **tight, isl=1000, osl=400)["max_concurrency"]
    )


def test_every_command_takes_them_and_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("isl,osl,weight\n100,50,3\n4000,20,1\n900,800,1\n")
    words = ("-m", LLAMA, "--gpus", "8", "--concurrency", "16", "--lengths", path)
    (row,) = run(*words, "--tp", "8", "--csv", "-").rows
    assert (row["isl"], row["osl"]) == ("1040", "194")
    estimated = run("estimate", *words, "--plan", "TP8", "--csv", "-").rows[0]
    swept = run("sweep", *words, "--tp", "8", "--csv", "-").rows[0]
    for name in ("ttft_ms", "ttft_p90_ms", "tpot_ms", "requests_per_s", "kv_gib", "max_concurrency"):
        assert row[name] == estimated[name] == swept[name], name
    explained = run("explain", *words, "--plan", "TP8")
    assert explained.status == 0
    assert "longest request 4020" in " ".join(explained.out.split())
    assert run("compare", "TP8", "TP4xDP2", *words).status == 0
    table = " ".join(run(*words).out.split())
    assert "1040 tokens in (nine tenths to 4000), 194 out on average" in table
    pair = run("-m", LLAMA, "--gpus", "8", "--isl", "1000,2000", "--osl", "200,300", "--csv", "-", "--top", "1").rows[0]
    text = run("-m", LLAMA, "--gpus", "8", "--lengths", "1000,2000/200,300", "--csv", "-", "--top", "1").rows[0]
    assert pair == text


def test_terms_of_explain_add_up_where_lengths_differ() -> None:
    spread = lengths_from("1000,2000/200,300")
    asked = request(LLAMA, 8, work=Workload(spread.isl, spread.osl, 16, lengths=spread.lengths)._asdict())
    results = rank(asked).results
    one = breakdown(asked, plan_of(results, 0), 16)
    assert one.ttft.total / 1e-3 == pytest.approx(results["ttft_ms"][0], rel=1e-9)
    for times in (one.ttft, one.tpot):
        assert sum(item.seconds for item in times.items) == pytest.approx(times.total, rel=1e-9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("isl,answers\n1,2\n", "no osl among isl, answers"),
        ("", "no isl and no osl among nothing"),
        ("isl,osl\n", "has no requests"),
        ("isl,osl,weight\n10,10,0\n", "has no requests"),
        ("isl,osl\n10,10\n-5,10\n", "line 3: isl must be a whole number of at least 1, found -5"),
        ("isl,osl\n10,x\n", "line 2: osl must be a number, found 'x'"),
        ("isl,osl\n10\n", "line 2: osl must be a number"),
        ("isl,osl,weight\n10,10,-1\n", "line 2: weight must be 0 or more"),
        ("isl,osl\n10,nan\n", "line 2: osl must be"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    done = run("-m", LLAMA, "--lengths", path)
    assert done.status == 2
    assert said in done.err
    assert str(path) in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--isl", "1000,1000"), "above its mean"),
        (("--isl", "1000,900"), "above its mean"),
        (("--osl", "100,300"), "at most 2.27 times it, from 101 to 227 here"),
        (("--isl", "1,2,3"), "expected tokens, or MEAN,P90"),
        (("--isl", "requests.csv"), "goes to --lengths requests.csv"),
        (("--isl", "100,-200"), "--isl must be at least 1"),
        (("--lengths", "nowhere.csv"), "cannot be read: No such file"),
        (("--lengths", "1000,2000/200", "--isl", "7"), "leave out --isl and --osl"),
        (("--isl", "20000,40000"), "the longest request has"),
        (("--isl", "1000,2000", "--schedule", "static"), "a static batch waits for its longest answer"),
    ],
)
def test_lengths_that_cannot_be_are_refused(words: tuple[str, ...], said: str) -> None:
    model = "llama3-70b" if "20000,40000" in words else LLAMA
    done = run("-m", model, *words)
    assert done.status == 2
    assert said in " ".join(done.err.split())


def test_python_raises_what_the_command_says() -> None:
    with pytest.raises(InputError, match=r"log-normal"):
        plan(LLAMA, 8, lengths="1000,5000/200")
    with pytest.raises((InputError, NoPlanError)):
        estimate("llama3-8b", plan="TP1", lengths="7000,9000/200")
