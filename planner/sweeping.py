"""A sweep: lists of values for the scalar options, every combination of which is a point that is ranked on its own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

from planner.errors import InputError, PlannerError
from planner.plans.space import Filters
from planner.ranking import rank
from planner.request import MOST, OBJECTIVES, Limits, Request, check, chips_for
from planner.results import COLUMNS
from planner.specs.catalog import load_machine, load_model
from planner.specs.drafts import speculation_of
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.workload import Workload

Value = TypeVar("Value", str, int)

AXES: dict[str, Any] = {
    "model": None, "hardware": "h100", "engine": None, "gpus": None, "isl": 1024, "osl": 256, "concurrency": None,
    "arrival_rate": None, "weights": None, "kv_cache": None, "objective": "latency", "spec_tokens": None,
    "spec_accept": None,
}  # fmt: skip
"""Options that a sweep takes lists for, outermost first, with what `plan` takes where they are not given."""
NUMBERS = frozenset(("gpus", "isl", "osl", "concurrency", "spec_tokens"))
LEAST = {"spec_tokens": 0}
"""The least of whole numbers where it is not 1."""
RATES = frozenset(("arrival_rate",))
"""Axes of numbers that need not be whole."""
COLUMN_OF = {"arrival_rate": "arrival_rate_per_s"}
"""The result column of an axis, where it is not called the same."""
ASKED = "asked"
COLUMNS_OF_SWEEP = (*COLUMNS, ASKED)
"""The result columns, and behind them the command that gives a row's point alone."""
MOST_POINTS = 1_000_000
_RANGE = re.compile(r"(?P<first>[0-9]{1,12}):(?P<last>[0-9]{1,12}):(?P<times>x?)(?P<step>[0-9]{1,12})")
_NUMBER = re.compile(r"[0-9]{1,12}")


def words(text: str, option: str) -> tuple[str, ...]:
    """The words of a comma list; one that stands twice counts once.

    Raises:
        InputError: an empty word.
    """
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InputError(f"{option}: expected values joined by commas, found an empty one in {text!r}")
    return tuple(dict.fromkeys(found))


def shares(text: str, option: str) -> tuple[float, ...]:
    """The numbers of a comma list.

    Raises:
        InputError: something that is no number.
    """
    found = []
    for word in words(text, option):
        try:
            found.append(float(word))
        except ValueError:
            raise InputError(f"{option}: expected numbers joined by commas, found {word!r}") from None
    return tuple(dict.fromkeys(found))


def whole_numbers(text: str, option: str, least: int = 1) -> tuple[int, ...]:
    """The numbers of a comma list: whole ones, or ranges `8:64:8` (by adding) and `1:256:x2` (by multiplying).

    The end of a range belongs to it if a step meets it. A number that stands twice counts once.

    Raises:
        InputError: neither of these, a number outside `least` ... MOST, or more than MOST_POINTS of them.
    """
    found: dict[int, None] = {}
    for part in words(text, option):
        match = _RANGE.fullmatch(part)
        if match is None and not _NUMBER.fullmatch(part):
            raise InputError(
                f"{option}: expected whole numbers joined by commas, or ranges as 8:64:8 or 1:256:x2, found {part!r}"
            )
        numbers = range(int(part), int(part) + 1) if match is None else _range(match, option)
        if len(numbers) > MOST_POINTS:
            raise InputError(f"{option}: {part} are {len(numbers)} numbers; a sweep has at most {MOST_POINTS} points")
        if not numbers or numbers[0] < least or numbers[-1] > MOST:
            raise InputError(f"{option}: expected numbers from {least} to {MOST}, the first the lowest, found {part!r}")
        found.update(dict.fromkeys(numbers))
    return tuple(found)


def rates(text: str, option: str) -> tuple[float, ...]:
    """The numbers of a comma list, whole or not, and ranges of whole ones as `whole_numbers` has them.

    Raises:
        InputError: no number, or none above 0.
    """
    found: dict[float, None] = {}
    for part in words(text, option):
        if ":" in part:
            found.update(dict.fromkeys(map(float, whole_numbers(part, option))))
            continue
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= MOST:
            raise InputError(
                f"{option}: expected numbers above 0 joined by commas, or ranges as 8:64:8 or 1:256:x2, found {part!r}"
            )
        found[value] = None
    return tuple(found)


def _range(match: re.Match[str], option: str) -> Sequence[int]:
    first, last, step = (int(match[name]) for name in ("first", "last", "step"))
    least = 2 if match["times"] else 1
    if step < least:
        raise InputError(f"{option}: the step of {match[0]!r} must be at least {match['times']}{least}")
    if not match["times"]:
        return range(first, last + 1, step)
    numbers = []
    while 1 <= first <= last:
        numbers.append(first)
        first *= step
    return numbers


class Point(NamedTuple):
    """One combination: the request, and the command that asks it."""

    request: Request
    asked: str


class Sweep(NamedTuple):
    """Every combination of some lists of values, in a fixed order: the last axis runs fastest."""

    axes: Mapping[str, tuple[Any, ...]]
    """Values by name of AXES, in its order; (None,) = not given."""
    base: Request
    """What all points share; the values of the axes are put into it."""
    models: Mapping[str, Model]
    machines: Mapping[tuple[str, str | None], tuple[Hardware, Engine]]
    shared: str
    """The options that all points share, as they are typed; "" = none."""
    top: int
    """Rows of each point; 0 = all."""
    max_gpus: int | None = None
    """Where the fewest chips are sought, how many are looked at; none = MOST_CHIPS, if they are sought at all."""
    draft: str | None = None
    """What drafts, as it is named."""

    @classmethod
    def of(
        cls,
        axes: Mapping[str, tuple[Any, ...]],
        *,
        workload: Workload,
        limits: Limits,
        filters: Filters,
        price: float | None = None,
        slice: str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        draft: str | None = None,
        shared: str = "",
        top: int = 1,
        max_gpus: int | None = None,
    ) -> Sweep:
        """A sweep whose every file is read and whose every value is known, so that nothing is left to fail but plans.

        Args:
            axes: values by name of AXES; what is left out is as `plan` has it.
            workload: what of it is no axis.
            limits: of every point.
            filters: of every point.
            price: dollars per chip and hour.
            slice: shape of a torus slice.
            max_num_seqs: of every engine (`Engine.limited`).
            max_num_batched_tokens: likewise.
            draft: what drafts in points that draft (`specs.drafts`).
            shared: all of these, as they are typed.
            top: rows of each point; 0 = all.
            max_gpus: where `gpus` is no axis and the fewest chips are sought, how many are looked at.

        Raises:
            InputError: an unknown name or word, no model, too many points, or a request that makes no sense at any.
        """
        lists = {name: tuple(axes.get(name, ())) or (default,) for name, default in AXES.items()}
        count = prod(map(len, lists.values()))
        if count > MOST_POINTS:
            raise InputError(f"the lists combine to {count} points; a sweep has at most {MOST_POINTS}: shorten one")
        for name, known in (("weights", weight_dtype), ("kv_cache", kv_dtype), ("objective", _known_objective)):
            _each(lists[name], known)
        models = {name: load_model(name) for name in lists["model"]}
        machines = {
            (hardware, engine): _limited(load_machine(hardware, engine), max_num_seqs, max_num_batched_tokens)
            for hardware in lists["hardware"]
            for engine in lists["engine"]
        }
        machine, software = machines[lists["hardware"][0], lists["engine"][0]]
        base = Request(
            models[lists["model"][0]], machine, software, 1, workload, lists["objective"][0],
            limits, filters, price, slice,
        )  # fmt: skip
        sweep = cls(lists, base, models, machines, shared, top, max_gpus, draft)
        for name in lists["model"]:
            for tokens, accept in product(lists["spec_tokens"], lists["spec_accept"]):
                speculation_of(tokens, accept, draft, models[name])
        sweep._check()
        return sweep

    def _check(self) -> None:
        """Raises the first point's complaint if no point at all makes sense."""
        first: InputError | None = None
        for index in range(len(self)):
            try:
                check(self.point(index).request)
                return
            except InputError as error:
                first = first or error
        assert first is not None
        raise first

    def __len__(self) -> int:
        return prod(map(len, self.axes.values()))

    def point(self, index: int) -> Point:
        """The point of a number from 0 on."""
        chosen: dict[str, Any] = {}
        for name in reversed(tuple(self.axes)):
            index, place = divmod(index, len(self.axes[name]))
            chosen[name] = self.axes[name][place]
        hardware, engine = self.machines[chosen["hardware"], chosen["engine"]]
        work = {name: chosen[name] for name in ("isl", "osl", "concurrency", "arrival_rate", "weights", "kv_cache")}
        base = self.base.workload
        if base.lengths is not None:  # which has the means, too
            work |= {"isl": base.isl, "osl": base.osl}
        target = self.models[chosen["model"]]
        speculation = speculation_of(chosen["spec_tokens"], chosen["spec_accept"], self.draft, target)
        workload = base._replace(**work, speculation=speculation)
        gpus, fewest = chips_for(
            chosen["gpus"], self.max_gpus, self.base.limits, workload.arrival_rate, self.base.slice
        )
        request = self.base._replace(
            model=target,
            hardware=hardware,
            engine=engine,
            gpus=gpus,
            objective=chosen["objective"],
            workload=workload,
            fewest=fewest,
        )
        return Point(request, self._asked({name: chosen[name] for name in AXES}))

    def _asked(self, chosen: Mapping[str, Any]) -> str:
        """The command of a point: what `plan` takes anyway is left out, so that equal questions are equal texts."""
        rate, base = chosen["arrival_rate"], self.base
        if chosen["gpus"] is not None and chips_for(None, None, base.limits, rate, base.slice) == (
            chosen["gpus"],
            False,
        ):
            chosen = {**chosen, "gpus": None}
        given = [
            f"--{name.replace('_', '-')} {shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}"
            for name, value in chosen.items()
            if value != AXES[name]
        ]
        text = " ".join(["plan", *given, *([self.shared] if self.shared else []), f"--top {self.top}"])
        return text.replace("\n", " ")  # a row is a line

    def rows(self, index: int) -> list[dict[str, Any]]:
        """A point's first plans, with the keys of COLUMNS_OF_SWEEP; where there is none, one row with `error`."""
        point = self.point(index)
        try:
            results = rank(point.request).results
        except PlannerError as error:
            return [_failed(point, " ".join(str(error).split()))]
        shown = results.take(slice(0, self.top or None))  # type: ignore[arg-type]
        return [row | {ASKED: point.asked} for row in shown.rows()]


def _failed(point: Point, reason: str) -> dict[str, Any]:
    """A row that says what was asked and why there is no plan."""
    request = point.request
    work = request.workload
    return dict.fromkeys(COLUMNS) | {
        "model": request.model.name,
        "hardware": request.hardware.name,
        "engine": request.engine.name,
        "engine_version": request.engine.version,
        "objective": request.objective,
        "schedule": work.schedule,
        "weights": work.weights,
        "kv_cache": work.kv_cache,
        "gpus": None if request.fewest else request.gpus,
        "isl": work.isl,
        "osl": work.osl,
        "prefix_hit": work.prefix_hit,
        "spec_tokens": work.speculation and work.speculation.tokens,
        "spec_accept": work.speculation and work.speculation.accept,
        "concurrency": work.concurrency,
        "arrival_rate_per_s": work.arrival_rate,
        "error": reason,
        ASKED: point.asked,
    }


def _limited(machine: tuple[Hardware, Engine], sequences: int | None, tokens: int | None) -> tuple[Hardware, Engine]:
    hardware, engine = machine
    return hardware, engine.limited(sequences, tokens)


def _each(values: Sequence[Any], known: Callable[[str], object]) -> None:
    for value in values:
        if value is not None:
            known(value)


def _known_objective(word: str) -> None:
    if word not in OBJECTIVES:
        raise InputError(f"--objective: expected one of {', '.join(OBJECTIVES)}, found {word!r}")


def finished(sweep: Sweep, rows: Sequence[tuple[str, bool]]) -> tuple[int, int]:
    """How much of a sweep some rows hold: (points, rows that belong to them).

    Points of which rows may be missing do not count: with several rows a point, the last one.

    Args:
        sweep: whose rows these should be.
        rows: (`asked`, whether it is an error) of each.

    Raises:
        InputError: rows of something else; says which and what was expected.
    """
    points = used = 0
    while used < len(rows):
        asked, failed = rows[used]
        wanted = sweep.point(points).asked if points < len(sweep) else None
        if asked != wanted:
            there = "ends before it" if wanted is None else f"has `{wanted}` there"
            raise InputError(f"row {used + 1} is of `{asked}`, but this sweep {there}")
        last = used
        while last < len(rows) and rows[last][0] == asked and last - used < (sweep.top or MOST):
            last += 1
        whole = failed or last - used == sweep.top or last < len(rows)
        if not whole:
            break
        points, used = points + 1, last
    return points, used
