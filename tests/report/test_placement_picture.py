"""The picture of a placement: every rank once, on its seat, within the columns there are."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from helpers import run
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import chips_refusal
from planner.plans.seats import Seat, level_between, seats
from planner.report.placement import IDLE, MOST_LINES, captions, letters, picture
from planner.specs.catalog import load_hardware

MACHINES = ("h100-sxm", "mi300x", "gb200-nvl72", "rtx-4090", "h100-nvl")
CELL = re.compile(r"([A-Z]+)(\d+)\.(\d+)")


@st.composite
def small(draw: st.DrawFn) -> tuple[Placement, Plan]:
    """A machine of which no line of a picture is left out, and a plan that it holds."""
    placement = Placement(load_hardware(draw(st.sampled_from(MACHINES))), draw(st.integers(1, 16)))
    plan = Plan(draw(st.integers(1, 8)), draw(st.integers(1, 4)))
    most = placement.replicas(plan.tp, plan.pp)
    return (placement, plan._replace(dp=draw(st.integers(1, most)))) if most else (placement, Plan())


def texts(placement: Placement, plan: Plan, limit: int = 100) -> list[str]:
    return ["".join(piece.text for piece in line).rstrip() for line in picture(placement, plan, limit)]


def drawn(lines: list[str]) -> dict[Seat, str]:
    """Cells by seat, read back from the picture."""
    found: dict[Seat, str] = {}
    node = chip = 0
    for line in lines:
        match = re.match(r"node (\d+)", line)
        cells = line[match.end() if match else 0 :].split()
        if cells[0] == "chip":
            continue
        if match:
            node, chip = int(match[1]), 0
        for cell in cells:
            found[Seat(node, chip)] = cell
            chip += 1
    return found


@given(small(), st.integers(24, 100))
def test_every_rank_is_drawn_once_on_its_seat(case: tuple[Placement, Plan], limit: int) -> None:
    placement, plan = case
    lines = texts(placement, plan, limit)
    cells = drawn(lines)
    assert len(cells) == placement.gpus
    for copy, replica in enumerate(seats(placement, plan)):
        for place, seat in enumerate(replica):
            stage, rank = divmod(place, plan.tp)
            assert cells.pop(seat) == f"{letters(copy)}{stage}.{rank}"
    assert set(cells.values()) <= {IDLE}
    assert max(map(len, lines)) <= limit


@given(small())
def test_a_colour_is_one_tensor_parallel_group_and_its_neighbours_have_others(case: tuple[Placement, Plan]) -> None:
    styles: dict[tuple[str, str], set[str]] = {}
    for line in picture(*case, 100):
        for piece in line:
            if match := CELL.match(piece.text):
                styles.setdefault((match[1], match[2]), set()).add(piece.style)
    assert all(len(found) == 1 for found in styles.values())
    assert all(before != after for before, after in pairwise(styles.values()))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("h100-sxm", "gb200-nvl72")), st.integers(1, 16), st.integers(1, 6), st.integers(1, 6))
def test_levels_that_carry_something_are_those_that_are_priced(machine: str, tp: int, pp: int, dp: int) -> None:
    placement = Placement(load_hardware(machine), 40 * 72)
    plan = Plan(tp, pp, dp)
    crossed = []
    for replica in seats(placement, plan):
        groups = [replica[start : start + tp] for start in range(0, len(replica), tp)]
        assert {level_between(placement, group) for group in groups} == {int(placement.span(plan.tp))}
        crossed.append(sum(level_between(placement, [one[0], other[0]]) > 0 for one, other in pairwise(groups)))
    if tp <= (placement.hardware.domain or tp):
        assert max(crossed) == float(placement.crossings(tp, pp, dp))


def test_replicas_are_named_as_columns_of_a_spreadsheet() -> None:
    assert [letters(number) for number in (0, 25, 26, 51, 52, 701, 702)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


def test_of_many_nodes_the_middle_is_left_out_and_counted() -> None:
    lines = texts(Placement(load_hardware("h100-sxm"), 640), Plan(8, 1, 80))
    assert len(lines) == 1 + MOST_LINES
    left = next(int(match[1]) for line in lines if (match := re.fullmatch(r"\.\.\. (\d+) more lines", line)))
    assert left + sum(line.startswith("node") for line in lines) == 80
    assert lines[-1].startswith("node 79  CB0.0")


def test_the_winner_is_drawn_below_its_table() -> None:
    out = run("-m", "llama3-70b", "--gpus", "16", "--tp", "8", "--pp", "2", "--placement").out
    assert "Placement of TP8xPP2: 2 nodes of h100-sxm." in out
    assert re.search(r"^node 1  A1\.0  A1\.1 .* A1\.7$", out, re.MULTILINE)
    assert "Tensor-parallel groups: 2 over nvlink." in out
    assert "Boundaries between stages: 1 over infiniband." in out
    assert out.startswith(run("-m", "llama3-70b", "--gpus", "16", "--tp", "8", "--pp", "2").out)


def test_idle_chips_are_drawn_and_counted() -> None:
    out = run("estimate", "-m", "llama3-70b", "--plan", "TP4xDP2", "--gpus", "12", "--placement").out
    assert "4 chips of 12 idle (-)" in out
    assert out.count("  -") >= 4


def test_a_slice_says_which_box_a_group_is() -> None:
    out = run("explain", "-m", "llama3-8b", "-H", "tpu-v5e", "--plan", "TP8").out
    assert "a group is a box of 2x4 of them" in out


def test_a_terminal_gets_colours_and_the_same_text() -> None:
    words = ("estimate", "-m", "llama3-70b", "--plan", "TP4xPP2xDP2", "--placement")
    coloured = run(*words, terminal=True).out
    assert "\x1b[30;42mA0.0" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == run(*words).out


@pytest.mark.parametrize("words", [("--placement",), ("estimate", "--plan", "TP8", "--placement")])
def test_where_no_table_is_printed_none_is_drawn_and_that_is_said(words: tuple[str, ...]) -> None:
    done = run(*words, "-m", "llama3-70b", "--csv", "-")
    assert done.status == 0
    assert "node" not in done.out
    assert "--placement draws below a table" in done.err


def test_many_plans_have_no_one_placement() -> None:
    done = run("estimate", "--points", "points.csv", "--placement")
    assert (done.status, done.out) == (2, "")
    assert "--placement draws one plan" in done.err


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(("h100-sxm", "gb200-nvl72")),
    st.integers(1, 16),
    st.integers(2, 12),
    st.integers(1, 3),
    st.booleans(),
)
def test_groups_inside_a_stage_lie_where_they_are_priced(
    machine: str, size: int, count: int, dp: int, prompts: bool
) -> None:
    """Each group spans what `span` says of its size, wherever it stands in its stage, or the plan is refused."""
    placement = Placement(load_hardware(machine), 20 * 72)
    plan = Plan(size * count, 1, dp, attention=f"heads{size}xbatch{count}")
    if prompts:
        plan = Plan(size, 1, dp, cp=count, attention=f"heads{size}xseq{count}")
    found = seats(placement, plan)
    groups = [replica[start : start + size] for replica in found for start in range(0, len(replica), size)]
    apart = {level_between(placement, group) for group in groups} != {int(placement.span(size))}
    reason = chips_refusal(placement, plan)
    assert not apart or "would straddle two domains" in str(reason)
    text = " ".join(captions(placement, plan, found))
    assert (f"one stage: {count} groups of {size} chip" in text) == prompts
    assert ("Tensor-parallel groups" in text) == (plan.tp > 1)
