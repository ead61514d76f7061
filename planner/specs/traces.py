"""Reads a trace: a CSV file of requests with their arrival, prompt and answer, as a server's log has them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError

Array = NDArray[np.float64]
COLUMNS = ("arrival", "isl", "osl")
MOST_REQUESTS = 1_000_000
"""Requests of a trace at most: a simulation of more takes minutes."""
MOST_TOKENS = 10_000_000
"""Tokens of a prompt or an answer at most; more is a slip of the keyboard."""
LONGEST = 366 * 86400.0
"""Seconds that a trace lasts at most."""
_ABOUT = "expected columns arrival (seconds), isl, osl"


def read_trace(path: str) -> tuple[Array, Array, Array]:
    """(arrival in seconds from the first request on, isl, osl) of the requests of a CSV file, a request a row.

    Raises:
        InputError: the file, its line and column, what was found and what was expected: no such columns, no requests,
            no number, a negative one, arrivals that are not in order, more than is simulated.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            missing = [name for name in COLUMNS if name not in names]
            if missing:
                found = f"no {' and no '.join(missing)} among {', '.join(names)}" if names else "the file is empty"
                other = next(
                    (f"; columns are divided by commas, not by {mark!r}" for mark in ";\t" if mark in found), ""
                )
                raise InputError(f"--trace {path}: {_ABOUT}; {found}{other}")
            reader.fieldnames = names
            rows: list[tuple[float, float, float]] = []
            for row in reader:
                rows.append(_request(path, reader.line_num, row))
                if len(rows) > 1 and rows[-1][0] < rows[-2][0]:
                    raise InputError(
                        f"--trace {path}: line {reader.line_num}: arrival {rows[-1][0]:.12g} comes before that of the "
                        f"request above it, {rows[-2][0]:.12g}; sort the rows by arrival"
                    )
                if rows[-1][0] - rows[0][0] > LONGEST:
                    raise InputError(
                        f"--trace {path}: line {reader.line_num}: arrival is {rows[-1][0] - rows[0][0]:.12g} s behind "
                        f"the first, expected at most {LONGEST:.0f} (a year); arrivals are in seconds"
                    )
                if len(rows) > MOST_REQUESTS:
                    raise InputError(
                        f"--trace {path}: has more than {MOST_REQUESTS} requests; give a part of it, of some hours say"
                    )
    except OSError as error:
        raise InputError(f"--trace {path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"--trace {path}: is no CSV text: {_ABOUT}") from None
    if not rows:
        raise InputError(f"--trace {path}: has no requests; expected a line for each: arrival,isl,osl")
    table = np.array(rows)
    return table[:, 0] - table[0, 0], table[:, 1], table[:, 2]


def _request(path: str, line: int, row: dict[str, Any]) -> tuple[float, float, float]:
    """One row. The first arrival may be any: a log's clock need not begin at 0."""
    if None in row:  # as csv.DictReader keeps what has no column
        raise InputError(
            f"--trace {path}: line {line}: has more values than there are columns; decimals take a point, not a comma"
        )
    values = []
    for name in COLUMNS:
        text = row.get(name)
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if math.isnan(value):
            found = "nothing" if not text else repr(text)
            raise InputError(f"--trace {path}: line {line}: {name} must be a number, found {found}")
        if name == "arrival":
            if not 0 <= value < math.inf:
                raise InputError(f"--trace {path}: line {line}: arrival must be 0 or more, in seconds, found {text}")
        elif value != math.floor(value) or not 1 <= value <= MOST_TOKENS:
            raise InputError(
                f"--trace {path}: line {line}: {name} must be a whole number from 1 to {MOST_TOKENS}, found {text}"
            )
        values.append(value)
    return values[0], values[1], values[2]
