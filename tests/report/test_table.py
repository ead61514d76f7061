"""Tables for people: figures of four digits, columns that fit, lines that end where the text does."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner import InputError, Plan
from planner.report import table
from planner.report.figures import short
from planner.report.table import Column, lay_out

SUFFIX = {"k": 1e3, "M": 1e6}


def read(text: str) -> float:
    """The number that a figure stands for."""
    return float(text[:-1]) * SUFFIX[text[-1]] if text[-1] in SUFFIX else float(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (2.5, "2.5"),
        (0.123456, "0.1235"),
        (45.6891, "45.69"),
        (2603.6, "2604"),
        (9999.6, "10000"),
        (12345.6, "12346"),
        (123456.0, "123k"),
        (999_999.0, "1000k"),
        (12_345_678.0, "12.3M"),
    ],
)
def test_a_figure_has_about_four_digits(value: float | None, text: str) -> None:
    assert short(value) == text


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-3, 9e8), st.sampled_from([3, 4]))
@example(9999.7, 4)
@example(999.7, 3)
@example(999_999.9, 4)
def test_a_figure_never_has_an_exponent_and_is_rounded_and_no_more(value: float, digits: int) -> None:
    text = short(value, digits)
    assert re.fullmatch(r"\d+(\.\d+)?[kM]?", text)
    assert read(text) == pytest.approx(value, rel=0.5 * 10 ** (1 - min(digits, 3 if value >= 1e5 else digits)) * 1.001)


def test_a_tiny_figure_has_no_exponent_either() -> None:
    assert "e" not in short(1.27e-6)


COLUMNS = [
    Column("name", lambda row: row["name"], right=False),
    Column("first", lambda row: row["first"], keep=1),
    Column("second", lambda row: row["second"], keep=2),
    Column("end", lambda row: row["end"]),
]
ROWS = [
    {"name": "a", "first": "1", "second": "22", "end": "x"},
    {"name": "longer", "first": "333", "second": "4", "end": "y"},
]


def test_columns_are_aligned_and_lines_end_with_their_text() -> None:
    assert lay_out(COLUMNS, ROWS, 100) == [
        "name    first  second  end",
        "a           1      22    x",
        "longer    333       4    y",
    ]


def test_a_narrow_table_leaves_out_the_least_important_columns_first() -> None:
    assert lay_out(COLUMNS, ROWS, 25)[0] == "name    second  end"
    assert lay_out(COLUMNS, ROWS, 18)[0] == "name    end"


def test_columns_that_must_stay_stay_however_narrow_the_table() -> None:
    assert lay_out(COLUMNS, ROWS, 1)[0] == "name    end"


@settings(max_examples=50, deadline=None)
@given(st.integers(13, 60), st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=5))
def test_a_table_fits_wherever_leaving_out_columns_can_make_it_fit(limit: int, names: list[str]) -> None:
    rows = [{"name": name, "first": "1" * index, "second": "2", "end": "3"} for index, name in enumerate(names)]
    lines = lay_out(COLUMNS, rows, limit)
    must = max(len("name"), *map(len, names)) + 2 + 3
    assert len(lines) == len(rows) + 1
    assert max(map(len, lines)) <= max(limit, must)


def test_output_that_is_no_terminal_is_100_columns_wide() -> None:
    assert table.width() == table.WIDTH == 100


def test_paragraphs_keep_plans_and_numbers_whole() -> None:
    text = " ".join(f"TP8xPP{n} takes 1.5e-3 s on --gpus {n}," for n in range(40))
    lines = table.paragraphs([text, "A second."])
    assert max(map(len, lines)) <= 100
    assert " ".join(lines[:-1]) == text
    assert lines[-1] == "A second."


def test_a_list_wraps_its_last_column_below_itself(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(f"word{n}" for n in range(40))
    table.print_rows(["name", "n", "text"], [["a", "1", words], ["bb", "22", ""]], frozenset({"n"}))
    first, *more, last = capsys.readouterr().out.splitlines()[1:]
    indent = len("name  ") + len(" n  ")
    assert first.startswith("a      1  word0 word1")
    assert all(line.startswith(" " * indent + "word") for line in more)
    assert last == "bb    22"
    assert " ".join([first[indent:], *(line.strip() for line in more)]) == words
    assert max(map(len, [first, *more])) <= 100


def test_a_last_column_of_numbers_is_aligned_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_rows(["name", "n"], [["a", "1"], ["bb", "22"]], frozenset({"n"}))
    assert capsys.readouterr().out.splitlines() == ["name   n", "a      1", "bb    22"]


def test_a_list_leaves_out_the_least_important_columns_before_it_is_too_wide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(columns: int, *last: str) -> list[str]:
        monkeypatch.setattr(table, "width", lambda: columns)
        rows = [["a" * 10, "b" * 10, "1" * 10, text] for text in last]
        table.print_rows(["name", "low", "high", "last"], rows, frozenset({"high"}), {"low": 1, "high": 2})
        return capsys.readouterr().out.splitlines()

    assert printed(44, "x" * 8)[0].split() == ["name", "low", "high", "last"]
    assert printed(43, "x" * 8)[0].split() == ["name", "high", "last"]
    assert printed(31, "x" * 8)[0].split() == ["name", "last"]
    assert printed(40, "x" * 25, "y z")[0].split() == ["name", "last"]  # a word is not broken
    assert max(map(len, printed(44, "word " * 30))) <= 44


def test_every_bound_has_a_colour_of_its_own() -> None:
    from planner.costs.roofline import BOUNDS  # noqa: PLC0415

    assert set(table.COLOURS) == set(BOUNDS)
    assert len(set(table.COLOURS.values())) == len(BOUNDS)


def test_a_plan_is_printed_as_it_is_read() -> None:
    assert Plan.parse("TP8xPP2xDP2").label == "TP8xPP2xDP2"
    with pytest.raises(InputError):
        Plan.parse("8x2x2")
