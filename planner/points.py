"""A table of points: columns of options, read into numbers and codes, each row with the first thing wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError, PlannerError
from planner.plans.plan import Plan
from planner.request import LAYOUTS, OBJECTIVES
from planner.specs.catalog import load_hardware
from planner.specs.dtypes import KV_CACHE, WEIGHTS
from planner.specs.speculation import MOST_TOKENS
from planner.specs.workload import ARRIVALS, SCHEDULES

Array = NDArray[np.float64]

DEGREES = ("tp", "pp", "dp", "ep", "cp")
NUMBERS = ("gpus", "isl", "osl", "concurrency", "max_context", "prefix_hit", "spec_tokens", "spec_accept", *DEGREES)
SHARES = {
    "prefix_hit": "the share of a prompt that is cached",
    "spec_accept": "the share of drafted tokens that are accepted",
}  # fmt: skip
"""Numbers from 0 to 1, with what they are; all others are whole."""
RANGES: dict[str, tuple[int, int | None]] = {"spec_tokens": (0, MOST_TOKENS)}
"""The least and the most of whole numbers where they are not 1 and what a float holds exactly."""
CHOICES: dict[str, Sequence[str]] = {
    "objective": OBJECTIVES,
    "schedule": SCHEDULES,
    "arrivals": ARRIVALS,
    "weights": tuple(WEIGHTS),
    "kv_cache": tuple(KV_CACHE),
    **LAYOUTS,
}
TEXTS = (
    "model", "hardware", "engine", "objective", "schedule", "arrivals", "weights", "kv_cache", "attention",
    "prefill_attention", "ffn", "prefill_ffn", "grid", "plan", "price", "memory_limit", "memory_fraction", "slice",
    "max_num_seqs", "max_num_batched_tokens", "lengths", "draft",
)  # fmt: skip
OPTIONS = (*NUMBERS, *TEXTS)
"""Names of what may be given for a point: the command's options, with underscores."""
DEFAULTS: dict[str, Any] = {
    "hardware": "h100", "objective": "latency", "isl": 1024, "osl": 256, "prefix_hit": 0.0,
    "attention": "heads",
}  # fmt: skip


@dataclass
class Points:
    """The points by column: numbers as floats (NaN = not given), texts as codes into their distinct values."""

    count: int
    numbers: dict[str, Array]
    codes: dict[str, NDArray[np.int64]]
    values: dict[str, list[str | None]]
    errors: list[PlannerError | None]
    """The first thing wrong with each row: bad input, or a plan that cannot run."""

    @classmethod
    def of(cls, points: Mapping[str, Sequence[Any]], count: int) -> Points:
        """The table of columns of OPTIONS; a column of one value stands for all rows.

        Raises:
            InputError: a column that is no option, or has neither one value nor one for each row.
        """
        check_names(points, "column")
        if not isinstance(count, Integral) or count < 1:
            raise InputError(f"count must be a whole number of at least 1, found {count!r}")
        for name in points:
            length = _length(points[name])
            if length is None:
                raise InputError(f"column {name!r} must be a list of values, found {points[name]!r}")
            if length not in (1, count):
                raise InputError(f"column {name!r} has {length} values, expected {count}, or 1 for all rows")
        errors: list[PlannerError | None] = [None] * count
        numbers = {name: _numbers(name, points.get(name), count, errors) for name in NUMBERS}
        codes, values = {}, {}
        for name in TEXTS:
            codes[name], values[name] = _coded(name, points.get(name), count)
        table = cls(count, numbers, codes, values, errors)
        table._read_plans()
        return table

    def _read_plans(self) -> None:
        """Degrees and sharding from `plan` labels, where they are given; a degree given beside one must agree."""
        for code, label in enumerate(self.values["plan"]):
            if label is None:
                continue
            rows = np.flatnonzero(self.codes["plan"] == code)
            try:
                plan = Plan.parse(label)
            except InputError as error:
                self.fail(rows, error)
                continue
            for name in DEGREES:
                given = self.numbers[name][rows]
                clash = np.isfinite(given) & (given != getattr(plan, name))
                if clash.any():
                    self.fail(rows[clash], InputError(f"{name} contradicts the plan {label}"))
                self.numbers[name][rows] = getattr(plan, name)
            for name in ("attention", "prefill_attention", "ffn", "prefill_ffn", "grid"):
                values, wanted = self.values[name], getattr(plan, name)
                if not wanted:
                    continue  # a label without a grid leaves it open
                clash = np.array([values[code] not in (None, wanted) for code in self.codes[name][rows]])
                if clash.any():
                    self.fail(rows[clash], InputError(f"{name} contradicts the plan {label}"))
                if wanted not in values:
                    values.append(wanted)
                self.codes[name][rows] = values.index(wanted)

    def fail(self, rows: NDArray[np.intp], error: PlannerError) -> None:
        """Marks rows with the first thing wrong with them."""
        for row in rows:
            if self.errors[row] is None:
                self.errors[row] = error

    def _by_slice(self, key: NDArray[np.int64]) -> NDArray[np.int64]:
        """Groups divided by chips as well, where some hardware is a torus: each count gets a slice of its own."""
        names = [name or DEFAULTS["hardware"] for name in self.values["hardware"]]
        if not any(_is_torus(name) for name in names):
            return key
        product = np.prod([np.nan_to_num(self.numbers[name], nan=1.0) for name in ("tp", "pp", "dp", "cp")], axis=0)
        chips, codes = np.unique(
            np.where(np.isnan(self.numbers["gpus"]), product, self.numbers["gpus"]), return_inverse=True
        )
        divided: NDArray[np.int64] = np.unique(key * len(chips) + codes, return_inverse=True)[1]
        return divided

    def groups(self) -> list[tuple[dict[str, str | None], NDArray[np.intp]]]:
        """Rows that share every text (and the chips, where a torus makes a slice of them): (texts, row indices)."""
        key = np.zeros(self.count, dtype=np.int64)
        for name in TEXTS:
            if name != "plan" and len(self.values[name]) > 1:
                key = key * len(self.values[name]) + self.codes[name]
                _, key = np.unique(key, return_inverse=True)
        key = self._by_slice(key)
        drafts = self.numbers["spec_tokens"] > 0  # not given is no number above 0
        if drafts.any():
            _, key = np.unique(key * 2 + drafts, return_inverse=True)
        for name in ("ep", "cp"):  # above 1 the list of work is another: dense FFNs for a group's own tokens
            apart = self.numbers[name] > 1
            if apart.any():
                _, key = np.unique(key * 2 + apart, return_inverse=True)
        if not key.any():
            return [({name: self.values[name][self.codes[name][0]] for name in TEXTS}, np.arange(self.count))]
        return [
            ({name: self.values[name][self.codes[name][index[0]]] for name in TEXTS}, index) for index in alike(key)
        ]


def check_names(names: Iterable[str], noun: str) -> None:
    """Refuses a name that is none of OPTIONS.

    Raises:
        InputError: with those there are.
    """
    for name in names:
        if name not in OPTIONS:
            raise InputError(f"unknown {noun} {name!r}; known are {', '.join(OPTIONS)}")


def _length(column: Any) -> int | None:
    """Values of a column; none where it is a single one."""
    try:
        return None if isinstance(column, str) else len(column)
    except TypeError:
        return None


def _is_torus(hardware: str) -> bool:
    try:
        return load_hardware(hardware).torus is not None
    except InputError:
        return False  # its rows will say so


def _numbers(name: str, column: Sequence[Any] | None, count: int, errors: list[PlannerError | None]) -> Array:
    if column is None:
        return np.full(count, float(DEFAULTS.get(name, np.nan)))
    if len(column) == 1 and count != 1:
        column = [column[0]] * count
    try:
        numbers: Array | None = np.array(column, dtype=float)
    except (ValueError, TypeError):
        numbers = None
    if numbers is None or numbers.ndim != 1:  # a text or a list among the cells
        numbers = np.array([_number(name, value, row, errors) for row, value in enumerate(column)])
    for row in np.flatnonzero(np.isnan(numbers)).tolist():
        if errors[row] is None and isinstance(column[row], str) and column[row].strip():
            errors[row] = InputError(f"{name} must be a number, found {column[row]!r}")
    if name in DEFAULTS:
        numbers = np.where(np.isnan(numbers), float(DEFAULTS[name]), numbers)
    if name in SHARES:
        return _shares(name, numbers, errors)
    least, most = RANGES.get(name, (1, None))
    above = 2**53 if most is None else most + 1
    whole = np.isnan(numbers) | ((numbers >= least) & (numbers == np.floor(numbers)) & (numbers < above))
    for row in np.flatnonzero(~whole).tolist():
        if errors[row] is None:
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            errors[row] = InputError(f"{name} must be a whole number {limits}, found {column[row]}")
    return np.where(whole, numbers, np.nan)


def _shares(name: str, numbers: Array, errors: list[PlannerError | None]) -> Array:
    inside = np.isnan(numbers) & (name not in DEFAULTS) | (numbers >= 0) & (numbers <= 1)
    for row in np.flatnonzero(~inside).tolist():
        if errors[row] is None:
            errors[row] = InputError(f"{name} must be from 0 to 1, {SHARES[name]}, found {numbers[row]:g}")
    return np.where(inside, numbers, 0.0)


def _number(name: str, value: Any, row: int, errors: list[PlannerError | None]) -> float:
    if value is None or (isinstance(value, str) and not value.strip()):
        return np.nan
    try:
        return float(value)
    except (ValueError, TypeError):
        if errors[row] is None:
            errors[row] = InputError(f"{name} must be a number, found {value!r}")
        return np.nan


def _coded(name: str, column: Sequence[Any] | None, count: int) -> tuple[NDArray[np.int64], list[str | None]]:
    if column is None:
        return np.zeros(count, dtype=np.int64), [None]
    if len(column) == 1:
        return np.zeros(count, dtype=np.int64), [_text(name, column[0])]
    seen: dict[Any, int] = {}
    try:
        codes = np.array([seen.setdefault(value, len(seen)) for value in column], dtype=np.int64)
    except TypeError:  # a list among the cells: its row says what is wrong with it
        return _coded(name, [_text(name, value) for value in column], count)
    return codes, [_text(name, value) for value in seen]


def _text(name: str, value: Any) -> str | None:
    if name == "memory_limit" and isinstance(value, Real):
        return f"{value}B"  # from Python a number is bytes; a text, as in a file, must name its unit
    return None if value is None else str(value).strip() or None


def alike(codes: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """The rows of each code, in the codes' order."""
    order = np.argsort(codes, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(codes) else []


def distinct(columns: Sequence[Array]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """(a row of each distinct combination of values, index of each row's combination)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        if len(values) > 1:
            _, key = np.unique(key * len(values) + codes, return_inverse=True)
    _, first = np.unique(key, return_index=True)
    return first, key
