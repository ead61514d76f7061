"""CSV and JSON: the form of a cell, and files that are replaced whole or not touched at all."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import COLUMNS, InputError, estimate_points
from planner.report import tabular


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (70_553_706_496, "70553706496"),  # whole numbers are not rounded
        (1.0, "1"),
        (1234567.0, "1.23457e+06"),
        (0.000123456789, "0.000123457"),
        (2603.4567891, "2603.46"),
        ("text, as it is", "text, as it is"),
    ],
)
def test_a_cell_is_empty_true_false_or_six_significant_digits(value: object, text: str) -> None:
    assert tabular.cell(value) == text


def test_csv_ends_lines_in_a_line_feed_and_quotes_where_it_must() -> None:
    text = tabular.csv_text(["a", "b"], [["1", 'x,"y"'], ["two\nlines", ""]])
    assert text == 'a,b\n1,"x,""y"""\n"two\nlines",\n'
    assert tabular.csv_text(None, [["1", "2"]]) == "1,2\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(st.characters(exclude_characters="\x00\r", codec="utf-8")), min_size=2, max_size=2)))
def test_csv_reads_back_as_it_was(rows: list[list[str]]) -> None:
    text = tabular.csv_text(["a", "b"], rows)
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], *rows]


def test_columns_are_formatted_as_their_rows_would_be_one_by_one() -> None:
    points = {"model": ["llama3-8b"], "tp": [1, 2, 3, 8], "osl": [1, 256, 256, 256], "concurrency": [1, 1, 1, 7]}
    results = estimate_points(points, 4)
    by_column = tabular.results_csv(results).splitlines()
    assert by_column[0] == ",".join(COLUMNS)
    by_row = tabular.csv_text(None, ([tabular.cell(row[name]) for name in COLUMNS] for row in results.rows()))
    assert by_column[1:] == by_row.splitlines()
    assert tabular.results_csv(results, header=False).splitlines() == by_column[1:]


def test_numbers_that_are_not_finite_are_empty_and_null() -> None:
    results = estimate_points({"model": ["llama3-8b"], "tp": [1, 2]}, 2)
    results.columns["ttft_ms"] = np.array([np.inf, np.nan])
    results.columns["max_concurrency"] = np.array([np.nan, 5.0])
    assert tabular.column_cells(results, "ttft_ms") == ["", ""]
    assert tabular.column_cells(results, "max_concurrency") == ["", "5"]
    assert [row["ttft_ms"] for row in results.rows()] == [None, None]
    assert json.loads(tabular.json_text(results.rows()))[1]["max_concurrency"] == 5


def test_json_is_one_array_with_an_object_a_line() -> None:
    text = tabular.json_text([{"a": 1, "b": None}, {"a": 2.5, "b": "ü"}])
    assert text == '[\n{"a": 1, "b": null},\n{"a": 2.5, "b": "ü"}\n]\n'
    assert tabular.json_text([]) == "[]\n"
    with pytest.raises(ValueError, match="JSON"):
        tabular.json_text([{"a": float("nan")}])


# --- writing ----------------------------------------------------------------------------------------------------------


def write(target: str | Path, text: str) -> None:
    """One text to one target."""
    tabular.write([(str(target), lambda: text)])


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_dash_is_stdout_and_no_target_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    tabular.write([("-", lambda: "text\n"), (None, lambda: pytest.fail("a text that nobody asked for was made"))])
    assert capsys.readouterr().out == "text\n"


def test_a_file_is_written_in_utf_8_with_the_line_ends_it_is_given(tmp_path: Path) -> None:
    write(tmp_path / "out.csv", "ü\n")
    assert (tmp_path / "out.csv").read_bytes() == "ü\n".encode()


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("step", ["replace", "chmod", "fdopen"])
def test_a_failure_while_writing_leaves_the_old_content_and_no_remains(
    step: str, existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.csv"
    if existed:
        path.write_text("old\n")
    monkeypatch.setattr(os, step, full)
    with pytest.raises(InputError, match=r"out\.csv cannot be written: no space left on device"):
        write(path, "new\n")
    assert entries(tmp_path) == (["out.csv"] if existed else [])
    assert not existed or path.read_text() == "old\n"


def test_of_several_targets_all_are_written_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first.csv").write_text("old\n")
    with pytest.raises(InputError, match=r"absent/second\.csv cannot be written"):
        tabular.write(
            [
                ("-", lambda: "stdout\n"),
                (str(tmp_path / "first.csv"), lambda: "new\n"),
                (str(tmp_path / "absent" / "second.csv"), lambda: "new\n"),
            ]
        )
    assert capsys.readouterr().out == ""
    assert entries(tmp_path) == ["first.csv"]
    assert (tmp_path / "first.csv").read_text() == "old\n"
    tabular.write([(str(tmp_path / name), lambda: "new\n") for name in ("first.csv", "second.csv")])
    assert [(tmp_path / name).read_text() for name in entries(tmp_path)] == ["new\n", "new\n"]


def test_a_fault_while_a_text_is_made_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "first.csv").write_text("old\n")

    def broken() -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tabular.write([(str(tmp_path / "first.csv"), lambda: "new\n"), (str(tmp_path / "second.csv"), broken)])
    assert entries(tmp_path) == ["first.csv"]
    assert (tmp_path / "first.csv").read_text() == "old\n"


@pytest.mark.parametrize("target", ["", ".", "absent/out.csv", "file/out.csv"])
def test_what_cannot_be_written_is_an_input_error(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        write(target, "text\n")
    assert entries(tmp_path) == ["file"]


def test_a_new_file_has_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "out.csv", "text\n")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.csv").stat().st_mode) == 0o640


def test_a_file_that_is_replaced_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("old\n")
    path.chmod(0o604)
    write(path, "new\n")
    assert path.read_text() == "new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("old\n")
    link.symlink_to(target)
    write(link, "new\n")
    assert link.is_symlink()
    assert target.read_text() == "new\n"


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    write(os.devnull, "text\n")
    assert not Path(os.devnull).is_file()
    assert entries(tmp_path) == []
