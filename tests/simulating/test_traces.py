"""Requests that are drawn, and those that are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planner.errors import InputError
from planner.simulating.traces import gaps, on_off, requests
from planner.specs.lengths import population_of
from planner.specs.traces import MOST_TOKENS, read_trace

CHAT = population_of("1000,2000", "200,400", None)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_variation_that_is_asked(burstiness: float) -> None:
    drawn = gaps(200_000, burstiness, np.random.default_rng(5))
    assert drawn.mean() == pytest.approx(1.0, rel=0.03)
    assert drawn.std() == pytest.approx(burstiness, rel=0.03, abs=1e-12)


def test_gaps_of_a_variation_of_1_are_a_poisson_process() -> None:
    drawn = gaps(100_000, 1.0, np.random.default_rng(5))
    for at in (0.1, 1.0, 3.0):
        assert np.mean(drawn > at) == pytest.approx(np.exp(-at), abs=0.005)


def test_bursts_with_silence_between_them() -> None:
    arrival = on_off(100_000, 20.0, 60.0, np.random.default_rng(5))
    assert np.all(np.diff(arrival) >= 0)
    assert len(arrival) / arrival[-1] == pytest.approx(1.0, rel=0.05)
    within = np.diff(arrival)
    assert np.median(within) == pytest.approx(np.log(2) * 0.25, rel=0.05)  # four times as fast while they come
    assert within.std() > 3
    # an interrupted Poisson process has hyper-exponential gaps: their second moment by its two rates (Kuczura 1973)
    on, off, rate = 1 / 20, 1 / 60, 4.0
    second = 2 * ((on + off) ** 2 + on * rate) / (off * rate) ** 2
    assert np.mean(within**2) == pytest.approx(second, rel=0.1)


def test_the_same_seed_gives_the_same_requests_and_another_gives_others() -> None:
    first, again, other = requests(CHAT, 500, seed=3), requests(CHAT, 500, seed=3), requests(CHAT, 500, seed=4)
    for mine, theirs in zip(first, again, strict=True):
        assert np.array_equal(mine, theirs)
    assert not np.array_equal(first.isl, other.isl)


def test_another_rate_is_the_same_requests_closer_together() -> None:
    slow = requests(CHAT, 300)
    fast = slow.faster(7.0)
    assert np.array_equal(slow.isl, fast.isl)
    assert fast.rate == pytest.approx(7 * slow.rate)


def test_lengths_are_those_of_the_options(tmp_path: Path) -> None:
    isl, osl = CHAT.draw(50_000, np.random.default_rng(2))
    assert isl.mean() == pytest.approx(1000, rel=0.02)
    assert np.quantile(isl, 0.9) == pytest.approx(2000, rel=0.03)
    assert np.quantile(osl, 0.9) == pytest.approx(400, rel=0.03)
    assert abs(np.corrcoef(isl, osl)[0, 1]) < 0.02
    file = tmp_path / "lengths.csv"
    file.write_text("isl,osl,weight\n100,10,3\n2000,50,1\n")
    pairs = population_of("1024", "256", str(file))
    isl, osl = pairs.draw(20_000, np.random.default_rng(2))
    assert set(zip(isl, osl, strict=True)) == {(100, 10), (2000, 50)}
    assert np.mean(isl == 100) == pytest.approx(0.75, abs=0.01)
    assert pairs.longest_request == (2000, 50)
    assert pairs.longest == 2050


def test_a_trace_is_read_from_its_first_arrival_on(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("\ufeffIsl, arrival ,osl,user\n100,17.5,10,a\n200,17.5,20,b\n300,19,30,c\n", encoding="utf-8")
    arrival, isl, osl = read_trace(str(file))
    assert arrival.tolist() == [0, 0, 1.5]
    assert isl.tolist() == [100, 200, 300]
    assert osl.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("arrival;isl;osl\n0;10;10\n", "columns are divided by commas, not by ';'"),
        ("arrival,isl,osl\n0,5,10,10\n", "line 2: has more values than there are columns; decimals take a point"),
        ("arrival,isl\n1,2\n", "no osl among arrival, isl"),
        ("arrival,isl,osl\n", "has no requests"),
        ("arrival,isl,osl\n0,10,10\n2,10,10\n1,10,10\n", "line 4: arrival 1 comes before"),
        ("arrival,isl,osl\n-1,10,10\n", "line 2: arrival must be 0 or more"),
        ("arrival,isl,osl\n0,10,10\n1,-5,10\n", "line 3: isl must be a whole number from 1"),
        ("arrival,isl,osl\n0,10,0\n", "line 2: osl must be a whole number from 1"),
        ("arrival,isl,osl\n0,1.5,10\n", "line 2: isl must be a whole number"),
        ("arrival,isl,osl\nnow,10,10\n", "line 2: arrival must be a number, found 'now'"),
        ("arrival,isl,osl\nnan,10,10\n", "line 2: arrival must be a number"),
        ("arrival,isl,osl\ninf,10,10\n", "line 2: arrival must be 0 or more"),
        ("arrival,isl,osl\n0,10\n", "line 2: osl must be a number, found nothing"),
        (f"arrival,isl,osl\n0,{MOST_TOKENS + 1},10\n", f"from 1 to {MOST_TOKENS}"),
        ("arrival,isl,osl\n0,10,10\n99999999,10,10\n", "line 3: arrival is 99999999 s behind the first"),
    ],
)
def test_a_bad_trace_says_where_and_what(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_trace(str(file))
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_trace_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.specs.traces.MOST_REQUESTS", 3)
    file = tmp_path / "trace.csv"
    file.write_text("arrival,isl,osl\n" + "1,2,3\n" * 4)
    with pytest.raises(InputError, match="more than 3 requests"):
        read_trace(str(file))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00bad", b"arrival,isl,osl\n1,\x00,2\n"])
def test_what_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match="--trace"):
        read_trace(str(file))
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(str(tmp_path / "none.csv"))
