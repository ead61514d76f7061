"""CSV and JSON: what scripts read. CSV: LF, six significant digits, empty = not applicable, true/false.

The only module that writes files: whole (`write`), or row by row (`GrowingFile`), which is also why it reads one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import InputError
from planner.results import COLUMNS, TEXTS, WHOLE, Results, plain

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


Output = tuple[str | None, Callable[[], str | bytes]]
"""(target, what makes its content): a text, or the bytes of a picture; a target that is none is left out."""


def write_rows(
    rows: Sequence[dict[str, Any]], csv: str | None, json: str | None, header: bool = True, more: Sequence[Output] = ()
) -> None:
    """Writes rows of the same keys as CSV and as JSON, each where it has a target, and `more` with them.

    Raises:
        InputError: as `write`.
    """
    names = list(rows[0])
    cells = [[cell(row[name]) for name in names] for row in rows]
    write([(csv, lambda: csv_text(names if header else None, cells)), (json, lambda: json_text(rows)), *more])


def write(outputs: Sequence[Output]) -> None:
    """Writes texts and pictures to files, texts to stdout for `-`: all of them, or none.

    Args:
        outputs: what goes where; bytes never to stdout.

    Raises:
        InputError: a file cannot be written. A file is replaced whole or not touched at all.
    """
    texts = [(target, text()) for target, text in outputs if target is not None]
    pending: list[tuple[Path, Path]] = []
    try:
        for target, text in texts:
            if target != STDOUT:
                _prepare(Path(target), text.encode() if isinstance(text, str) else text, pending)
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
        if target == STDOUT and isinstance(text, str):
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


def _prepare(path: Path, data: bytes, pending: list[tuple[Path, Path]]) -> None:
    """Adds (a file beside `path` with the data, what it replaces); a link is followed, a device written at once."""
    import tempfile  # noqa: PLC0415

    path = _real(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(13, "permission denied")
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                device.write(data)
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        pending.append((Path(name), path))
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, path.stat().st_mode if path.exists() else 0o666 & ~_umask())
    except OSError as error:
        raise _unwritable(path, error) from None


def check_writable(target: str | None) -> None:
    """Refuses a file that `write` could not write, before the work whose result goes there.

    Raises:
        InputError: it cannot be written.
    """
    if target is None or target == STDOUT:
        return
    path = _real(Path(target))
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        if not path.parent.is_dir():
            raise FileNotFoundError(2, "no such file or directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(13, "permission denied")
    except OSError as error:
        raise _unwritable(path, error) from None


class GrowingFile:
    """A CSV file to which whole rows are added, at once on the disk; one that exists is continued.

    Nothing is changed before `start`. A row is a line; a last line without its end, which an interrupted writer
    leaves, does not count as a row.

    Args:
        target: the file. What is no regular file (a device, a pipe) is written from the start.
        header: names of the columns.
        head: whether the header is the first line.

    Raises:
        InputError: the file cannot be opened, is being written by somebody else, or holds something else than such
            rows.
    """

    def __init__(self, target: str, header: Sequence[str], head: bool) -> None:
        self.path = _real(Path(target))
        self.header = header
        self.rows: list[list[str]] = []
        """Rows that the file had when it was opened."""
        self._head = csv_text(header, []).encode() if head else b""
        self._ends = [len(self._head)]  # where the header and each row end
        check_writable(target)
        try:
            self._new = not self.path.exists()
            regular = self._new or self.path.is_file()
            self._file = self.path.open("a+b" if regular else "wb", buffering=0)
            if regular:
                self._lock()
                self._file.seek(0)
                self._read(self._file.read())
        except OSError as error:
            raise _unwritable(self.path, error) from None
        except InputError:
            self.close()
            raise

    def _lock(self) -> None:
        """Keeps a second writer out, where the system can; its rows would stand between ours."""
        try:
            import fcntl  # noqa: PLC0415
        except ImportError:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._new = False  # somebody else's by now
            raise InputError(
                f"{self.path} is being written by another process; wait for it, or give another file"
            ) from None
        except OSError:  # a file system without locks
            return

    def _read(self, data: bytes) -> None:
        import csv  # noqa: PLC0415

        if not data.startswith(self._head):
            if self._head.startswith(data):  # stopped within its first line
                return
            raise self._strange("its first line is not the header that is written here")
        start = len(self._head)
        while (end := data.find(b"\n", start) + 1) > 0:
            try:
                cells = next(csv.reader([data[start:end].decode("utf-8")], strict=True), [])
            except (UnicodeDecodeError, csv.Error):
                cells = []
            number = len(self.rows) + 1
            if cells == list(self.header):
                raise self._strange(f"row {number} is a header")
            if len(cells) != len(self.header):
                raise self._strange(f"row {number} has {len(cells)} cells, not {len(self.header)}")
            self.rows.append(cells)
            self._ends.append(end)
            start = end

    def _strange(self, why: str) -> InputError:
        return InputError(f"{self.path} exists and cannot be continued: {why}; give another file, or remove this one")

    def start(self, keep: int) -> None:
        """Cuts off what follows the first `keep` rows, and writes the header where there is none.

        Raises:
            InputError: it cannot be written.
        """
        try:
            if self._file.seekable():
                size = self._file.seek(0, os.SEEK_END)
                wanted = self._ends[keep] if size >= len(self._head) else 0
                if size > wanted:
                    self._file.truncate(wanted)
                self._size = wanted
            else:
                self._size = 0
        except OSError as error:
            raise _unwritable(self.path, error) from None
        if not self._size:
            self._write(self._head)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds rows, all of them or none.

        Raises:
            InputError: they cannot be written.
        """
        self._write(csv_text(None, [[cell(row[name]) for name in self.header] for row in rows]).encode())

    def _write(self, data: bytes) -> None:
        try:
            left = data
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            if self._file.seekable():
                self._file.truncate(self._size)  # a full disk takes the first half of a row
            raise _unwritable(self.path, error) from None
        self._size += len(data)

    def close(self) -> None:
        """Closes the file; one that was opened but never written is as it was."""
        if hasattr(self, "_file"):
            self._file.close()
            if self._new and not hasattr(self, "_size"):
                self.path.unlink(missing_ok=True)


def value(name: str, text: str) -> Any:
    """A cell read back, to the six digits that it has; what is no result column is a text."""
    if not text:
        return None
    if name in WHOLE:
        return int(text)
    if name in TEXTS or name not in COLUMNS:
        return text
    return text == "true" if text in ("true", "false") else float(text)


def _real(path: Path) -> Path:
    """Where a link leads; that of a pipe, as `>(gzip)` in a shell, leads to no path."""
    return path if path.exists() and not path.is_file() and not path.is_dir() else path.resolve()


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
