"""CSV and JSON: what scripts read. CSV: LF, six significant digits, empty = not applicable, true/false."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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


def write_rows(rows: Sequence[dict[str, Any]], csv: str | None, json: str | None, header: bool = True) -> None:
    """Writes rows of the same keys as CSV and as JSON, each where it has a target.

    Raises:
        InputError: as `write`.
    """
    names = list(rows[0])
    cells = [[cell(row[name]) for name in names] for row in rows]
    write([(csv, lambda: csv_text(names if header else None, cells)), (json, lambda: json_text(rows))])


def write(outputs: Sequence[tuple[str | None, Callable[[], str]]]) -> None:
    """Writes texts to files, or to stdout for `-`: all of them, or none.

    Args:
        outputs: (target, what makes its text); a target that is none is left out.

    Raises:
        InputError: a file cannot be written. A file is replaced whole or not touched at all.
    """
    texts = [(target, text()) for target, text in outputs if target is not None]
    pending: list[tuple[Path, Path]] = []
    try:
        for target, text in texts:
            if target != STDOUT:
                _prepare(Path(target), text, pending)
        while pending:
            temporary, path = pending[0]
            os.replace(temporary, path)
            pending.pop(0)
    except OSError as error:
        raise _unwritable(pending[0][1], error) from None
    finally:
        for temporary, _ in pending:
            temporary.unlink(missing_ok=True)
    for target, text in texts:
        if target == STDOUT:
            sys.stdout.write(text)


def write_folder(folder: str, texts: Mapping[str, str], replace: bool = False) -> None:
    """Writes files into a folder, which is made if it is not there: all of them, or none.

    Args:
        folder: where.
        texts: by name.
        replace: files of these names may be there already.

    Raises:
        InputError: a file is there already, or the folder or a file cannot be written.
    """
    place = Path(folder)
    there = [name for name in texts if os.path.lexists(place / name)]
    if there and not replace:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise InputError(f"--output {folder}: {there[0]}{more} is there already; --force replaces it, or name another")
    made = not place.exists()
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(place, error) from None
    try:
        write([(str(place / name), partial(str, text)) for name, text in texts.items()])
    except InputError:
        if made:
            place.rmdir()
        raise


def _prepare(path: Path, text: str, pending: list[tuple[Path, Path]]) -> None:
    """Adds (a file beside `path` with the text, what it replaces); a link is followed, a device written at once."""
    import tempfile  # noqa: PLC0415

    path = path.resolve()
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "permission denied")
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8", newline="") as device:
                device.write(text)
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        pending.append((Path(name), path))
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
