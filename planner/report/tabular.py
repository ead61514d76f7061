"""CSV and JSON: what scripts read. CSV: LF, six significant digits, empty = not applicable, true/false."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from planner.errors import InputError
from planner.results import COLUMNS, WHOLE, Results, plain

STDOUT = "-"


def cell(value: Any) -> str:
    """A value as CSV has it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def csv_text(header: Sequence[str] | None, rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as CSV, with a header unless it is none."""
    import csv  # noqa: PLC0415 (each of these imports costs a millisecond that a table does not need)
    import io  # noqa: PLC0415

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    if header is not None:
        writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()


def results_csv(results: Results, header: bool = True) -> str:
    """The result columns of all rows as CSV."""
    return csv_text(COLUMNS if header else None, zip(*(column_cells(results, name) for name in COLUMNS), strict=True))


def column_cells(results: Results, name: str) -> list[str]:
    """One column as cells; formatted as a whole, since tables of points are long."""
    column = results[name]
    if column.dtype == object:
        return [cell(plain(name, value)) for value in column]
    pattern = "%d" if name in WHOLE else "%.6g"
    finite = np.isfinite(column)
    texts = [pattern % value for value in np.where(finite, column, 0.0).tolist()]
    if not finite.all():
        for index in np.flatnonzero(~finite):
            texts[index] = ""
    return texts


def json_text(rows: Sequence[dict[str, Any]]) -> str:
    """One array of objects, a line each; null = not applicable."""
    import json  # noqa: PLC0415

    if not rows:
        return "[]\n"
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows) + "\n]\n"


def write(target: str, text: str, stdout: TextIO | None = None) -> None:
    """Writes to a file, or to stdout for `-`. A file is replaced whole or not touched at all.

    Raises:
        InputError: the file cannot be written.
    """
    if target == STDOUT:
        (stdout or sys.stdout).write(text)
        return
    path = Path(target)
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a directory")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced
            path.write_text(text, encoding="utf-8")
            return
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "permission denied")
        import tempfile  # noqa: PLC0415

        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
                file.write(text)
            os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
