"""Pictures in files: they hold what was ranked and itemised, have the same bytes twice, and are whole or not there."""

from __future__ import annotations

import csv
import importlib
import re
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import run

from planner.explaining.breakdown import breakdown
from planner.explaining.difference import Line
from planner.plans.plan import Plan
from planner.pricing import price_all
from planner.ranking import rank, tradeoff
from planner.report import plot
from planner.request import Request
from planner.specs.catalog import load_machine, load_model
from planner.specs.workload import Workload

RANK = ("-m", "llama3-70b", "--gpus", "16", "--objective", "throughput", "--max-tpot", "40")
SWEEP = ("sweep", "-m", "llama3-8b,llama3-70b", "--gpus", "2:8:2")
COMPARE = ("compare", "TP8", "TP4xDP2", "-m", "llama3-70b")
EXPLAIN = ("explain", "-m", "llama3-70b", "--plan", "TP4xPP2", "--concurrency", "16")


def texts(path: Path) -> list[str]:
    """Text nodes of an SVG file."""
    found = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()) for node in found]


def request(**work: Any) -> Request:
    return Request(load_model("llama3-8b"), *load_machine("h100", None), 8, Workload(**work))


def test_rows_of_a_tradeoff_are_those_that_are_priced_and_the_frontier_is_that_of_pareto() -> None:
    rows, best = tradeoff(request())
    priced = price_all(request()._replace(pareto=True)).results
    assert priced is not None
    assert len(rows) == len(priced) > 50
    assert list(best["plan"]) == list(rank(request()._replace(pareto=True)).results["plan"])
    tpot, rate = best["tpot_ms"].astype(float), best["tokens_per_s_per_gpu"].astype(float)
    assert (np.diff(tpot) > 0).all()
    assert (np.diff(rate) > 0).all()


def test_a_load_that_is_named_is_the_only_one() -> None:
    assert set(tradeoff(request(concurrency=12))[0]["concurrency"]) == {12.0}


def test_without_matplotlib_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(plot, "import_module", missing)
    done = run(*RANK, "--plot", tmp_path / "a.svg")
    assert (done.status, done.out) == (2, "")
    assert "needs matplotlib: pip install 'parallel-strategy-planner[plot]'" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [RANK, EXPLAIN, SWEEP, COMPARE])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a.jpg", "expected the name of a file that ends in .svg or .png"),
        ("-", "expected the name of a file that ends in .svg or .png"),
        ("", "expected the name of a file"),
        ("none/a.svg", "no such file or directory"),
    ],
)
def test_files_that_cannot_be_made_are_refused_at_once(
    words: tuple[str, ...], name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words, "--plot", name)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert list(tmp_path.iterdir()) == []


def drawing() -> None:
    """Leaves a test out where the extra is not installed."""
    pytest.importorskip("matplotlib")


def test_the_tradeoff_names_the_plans_of_the_frontier_and_the_first(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    done = run(*RANK, "--plot", target)
    assert (done.status, done.err) == (0, "")
    assert done.out == run(*RANK).out
    found = texts(target)
    frontier = list(dict.fromkeys(row["plan"] for row in run(*RANK, "--pareto", "--csv", "-", "--top", "0").rows))
    assert [text for text in found if text in frontier] == frontier
    first = run(*RANK, "--csv", "-", "--top", "1").rows[0]
    assert f"first for throughput: {first['plan']}, load {first['concurrency']}" in found
    assert {"TPOT, ms", "tokens/s per chip"} <= set(found)


def test_bars_are_the_items_of_the_tables(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    done = run(*EXPLAIN, "--plot", target)
    assert (done.status, done.err) == (0, "")
    found = texts(target)
    for line in ("gate_up", "all-reduce", "host", "request, step in flight", "other prompts' passes", "overhead"):
        assert line in found
        assert line in done.out
    totals = [line for line in done.out.splitlines() if re.fullmatch(r"T\w+ [\d.]+ ms", line)]
    assert len(totals) == 2
    assert set(totals) <= set(found)


def test_the_same_question_gives_the_same_bytes() -> None:
    drawing()
    ranking = rank(request())
    for kind in ("svg", "png"):
        one, other = (plot.tradeoff_plot(ranking, f"{name}.{kind}") for name in "ab")
        assert one == other
        assert b"<dc:date>" not in one


def test_a_png_is_whole(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.PNG"
    assert run(*EXPLAIN, "--quiet", "--plot", target).status == 0
    data = target.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    length, kind = struct.unpack(">I4s", data[8:16])
    assert kind == b"IHDR"
    assert struct.unpack(">I", data[16 + length : 20 + length])[0] == zlib.crc32(data[12 : 16 + length])
    wide, high = struct.unpack(">II", data[16:24])
    assert wide == round(plot.SIZE[0] * plot.DOTS)
    assert high > wide / 2
    assert data.endswith(b"IEND\xaeB`\x82")


def test_the_style_of_the_user_is_neither_used_nor_changed() -> None:
    drawing()
    matplotlib = importlib.import_module("matplotlib")
    found = breakdown(request(), Plan(2), 4)
    first = plot.breakdown_plot(found, "a.svg")
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path"}):
        assert plot.breakdown_plot(found, "a.svg") == first
        assert matplotlib.rcParams["font.size"] == 20


def test_nothing_is_written_where_there_is_nothing_to_draw_or_no_plan(tmp_path: Path) -> None:
    drawing()
    done = run("-m", "llama3-8b", "--osl", "1", "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.svg")
    assert (done.status, done.out) == (2, "")
    assert "have no TPOT" in done.err
    assert run(*RANK, "--max-ttft", "1", "--plot", tmp_path / "a.svg").status == 3
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_tpot_is_drawn_by_its_ttft(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    assert run("explain", "-m", "llama3-8b", "--osl", "1", "--quiet", "--plot", target).status == 0
    assert any(text.startswith("TTFT ") for text in texts(target))
    assert not any(text.startswith("TPOT ") for text in texts(target))


def test_one_file_is_not_two_things(tmp_path: Path) -> None:
    done = run(*RANK, "--csv", tmp_path / "a.svg", "--plot", tmp_path / "a.svg")
    assert done.status == 2
    assert "same file" in done.err


def test_a_sweep_names_its_lines_and_the_plans_on_them(tmp_path: Path) -> None:
    drawing()
    target, table = tmp_path / "a.svg", tmp_path / "a.csv"
    words = ("sweep", "-m", "llama3-8b,llama3-70b", "--gpus", "1:8:x2", "--quiet")
    done = run(*words, "--csv", table, "--plot", target)
    assert done.status == 0
    rows = list(csv.DictReader(table.open(encoding="utf-8")))
    failed = [row for row in rows if row["error"]]
    assert len(failed) == 1  # 70b on one chip
    found = texts(target)
    assert {"llama3-8b", "llama3-70b", "chips", "latency, ms"} <= set(found)
    assert any("no plan at 1 point" in text for text in found)
    plans = {row["plan"] for row in rows if row["plan"]}
    assert len(plans & set(found)) >= 3
    target.unlink()
    assert run(*words, "--csv", table, "--plot", target).status == 0  # the table is whole: only the picture is made
    assert texts(target) == found


def test_goals_have_a_panel_each_and_names_have_their_column(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    words = ("sweep", "-m", "llama3-8b", "--hardware", "h100,h200", "--objective", "latency,cost", "--quiet")
    assert run(*words, "--plot", target).status == 0
    found = texts(target)
    assert {"latency, ms", "$ per million output tokens", "h100-sxm", "h200-sxm", "hardware"} <= set(found)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--gpus", "8"), "one point is no line; give an option several values, as --gpus 8:64:8"),
        (("--objective", "latency,cost"), "one point is no line"),
        (("--gpus", "1:26:1", "--isl", "100:2600:100"), "26 lines cannot be told apart, at most 24"),
    ],
)
def test_sweeps_that_are_no_picture_are_refused_at_once(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawing()
    monkeypatch.chdir(tmp_path)
    done = run("sweep", "-m", "llama3-8b", *words, "--plot", "a.svg", "--csv", "a.csv")
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_without_any_plan_leaves_no_picture(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    done = run("sweep", "-m", "llama3-70b", "--gpus", "1", "--isl", "512,1024", "--plot", target)
    assert done.status == 3
    assert not target.exists()


def test_a_comparison_has_a_bar_for_each_candidate_and_its_total(tmp_path: Path) -> None:
    drawing()
    target = tmp_path / "a.svg"
    done = run(*COMPARE, "--plot", target)
    assert done.status == 0
    found = texts(target)
    assert {"TP8", "TP4xDP2", "latency of a request, ms", "gate_up (decode step)"} <= set(found)
    totals = re.search(r"latency ms +(\d+) +(\d+)", done.out)
    assert totals is not None
    assert set(totals.groups()) <= set(found)


def test_segments_keep_the_sums_and_leave_out_what_is_not_seen() -> None:
    rows = [Line("p", f"i{index}", (2.0**-index, 3.0 * 2.0**-index)) for index in range(20)]
    found = plot.segments(rows)
    assert found[-1].item.endswith("others")
    assert len(found) <= plot.MOST_SEGMENTS + 1
    for place in range(2):
        assert sum(line.values[place] for line in found) == pytest.approx(sum(row.values[place] for row in rows))
    least = plot.LEAST_SEGMENT * 6
    assert all(max(line.values) >= least for line in found[:-1])


@pytest.mark.parametrize(
    ("values", "expected"),
    [((8, 16, 24, 32, 40, 48, 56, 64), False), ((1, 4, 16, 64), True), ((1, 2), False), ((512, 1024, 2048), True)],
)
def test_what_is_multiplied_has_a_logarithmic_axis(values: tuple[int, ...], expected: bool) -> None:
    assert plot._multiplies(values) is expected
