"""How long one iteration of a plan takes, looked up in tables that the cost engine fills once per plan.

A simulation asks for a million iterations, each another mix of prompt tokens and decodes; `costs.step` answers in
half a millisecond, which is for tables of rows. So it is asked once, for some ten thousand rows, and what it says is
taken apart into

    pure decode      D(B, C)
    with prompts     G(N) + P(T, q, p) + X(T, B, C),      N = T + B rows in all

B decodes at a mean context of C, T prompt tokens of q keys each on average behind p cached ones. G is a prompt whose
tokens see nothing, P what its attention adds, X what decodes beside it add (their attention, the head, the host).
This is exact where operations are priced one by one, each depending on one of these groups of numbers; all the
rest is linear interpolation. D over B and G over N jump where a collective takes another kernel: their grids are
halved until each jump lies between two neighbouring whole numbers. Where a whole step is one roofline (textbook
constants), each resource has tables of its own, and the larger sum counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Pass, causal_pairs
from planner.costs.rows import Rows
from planner.costs.serving import BLOCK_ROWS, Setting, replica_of
from planner.costs.step import pass_time
from planner.errors import InputError
from planner.plans.plan import Plan

Array = NDArray[np.float64]
Index = NDArray[np.intp]
LEAST_CONTEXT = 16.0
"""Tokens that the shortest context of a grid has."""
MOST_PROMPTS = 16
"""Prompts of a pass that are told apart where their number matters; more are priced as so many."""
_CLOSE = 1e-3  # of a value: how far linear interpolation may be off in the middle of a cell of D or G
_WAYS = 8  # parts that a cell is cut into where its middle is off
_SMALL = 16  # numbers of sequences up to this all stand in the grid
_MOST_TOKENS = 65536  # of a pass, where an engine never cuts a prompt; beyond, tables go on in a straight line


class Time(NamedTuple):
    """Seconds of an iteration."""

    whole: float
    """Through all stages, one after the other."""
    slowest: float
    """On the slowest stage: how long until the next iteration can follow it into a pipeline."""


class DecodeRow(NamedTuple):
    """Pure decode steps of a fixed number of sequences, over their mean context; linear between the points."""

    contexts: Array
    whole: Array
    slowest: Array

    def at(self, context: float) -> Time:
        """One step."""
        index, share = _cell(self.contexts, context)
        return Time(_between(self.whole, index, share), _between(self.slowest, index, share))

    def steps(self, context: float, count: int, slowest: bool = False) -> Array:
        """[count] seconds of steps that follow one another, the first at this context, each one token further on."""
        values = self.slowest if slowest else self.whole
        at = context + np.arange(count, dtype=float)
        if at[0] >= self.contexts[0] and at[-1] <= self.contexts[-1]:
            return np.interp(at, self.contexts, values)
        return _line(at, self.contexts, values)


class Clock(Protocol):
    """What a simulated replica asks: how long its iterations take, and how deep its pipeline is."""

    @property
    def stages(self) -> int:
        """Pipeline stages, each of which may work on another iteration."""

    def mixed(self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int = 1) -> Time:
        """An iteration with prompt tokens (see `IterationTime.mixed`)."""

    def decoding(self, sequences: int) -> DecodeRow:
        """Pure decode steps of so many sequences."""


class IterationTime:
    """How long the iterations of one plan take. Building it takes some 20 ms, a look-up some 10 us.

    Args:
        setting: what the plan is priced with.
        plan: the plan; its replicas (dp) are alike, one of them is timed.
        most_context: tokens that a request may have at most; none = the model's own limit. Beyond it, as beyond the
            engine's largest batch, tables go on in a straight line.

    Raises:
        InputError: drafts, whose accepted tokens are a matter of chance.
    """

    def __init__(self, setting: Setting, plan: Plan, most_context: float | None = None) -> None:
        if setting.drafting is not None:
            raise InputError("speculative decoding is not simulated; leave out --spec-tokens")
        self.plan, self.stages = plan, plan.pp
        scheduler = setting.engine.scheduler
        context = max(2 * LEAST_CONTEXT, most_context or setting.model.max_context)
        groups = plan.tp if "batch" in (plan.attention, plan.prefill_attention) else plan.sharding.batch
        window = setting.model.attention.window
        self._told_apart = MOST_PROMPTS if groups > 1 or window is not None else 1
        self._edges = np.array([] if window is None else [float(window)])  # of contexts: where another slope begins
        ways = max(groups, plan.cp)  # that requests are divided, whole
        self._uneven = np.add.outer(ways * np.arange(1.0, 17), [0.0, 1.0]).ravel() if ways > 1 else np.array([])
        self._sequences = float(min(scheduler.max_sequences, 4096))
        self._tokens = float(scheduler.chunk_tokens or min(_MOST_TOKENS, 2 * context))
        self._context = context
        self._parts = [_Counted(each, plan) for each in _resources(setting)]
        if plan.pp > 1:
            self._parts += [part.of_slowest() for part in self._parts]
        self._contexts = _with(_geometric(LEAST_CONTEXT, context, 1.25), self._edges)
        self._batches, self._decodes = self._decode_tables()
        self._decode_rows: dict[int, DecodeRow] = {}
        self._mixed: dict[int, _Mixed] = {}

    @classmethod
    def of(cls, setting: Setting, plan: Plan, most_context: float | None = None) -> IterationTime:
        """The same as the constructor."""
        return cls(setting, plan, most_context)

    def __call__(
        self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int = 1
    ) -> Time:
        """An iteration of any kind: pure decode where there are no new tokens (see `mixed`)."""
        if new <= 0:
            return self.decoding(round(decodes)).at(contexts / decodes)
        return self.mixed(new, pairs, prior, decodes, contexts, prompts)

    def mixed(self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int = 1) -> Time:
        """An iteration with prompt tokens, with or without decodes.

        Args:
            new: prompt tokens of the iteration.
            pairs: their query-key pairs, prior tokens included (`chunk_pairs`).
            prior: tokens of these prompts from earlier iterations, whose KV is read back.
            decodes: sequences that decode beside them.
            contexts: tokens that these attend to, summed over them.
            prompts: how many prompts the new tokens belong to.
        """
        key = min(prompts, self._told_apart)
        tables = self._mixed.get(key)
        if tables is None:
            tables = self._mixed[key] = self._mixed_tables(key)
        found = tables.seconds(new, pairs, prior, decodes, contexts / decodes if decodes else LEAST_CONTEXT)
        return self._time(found)

    def decoding(self, sequences: int) -> DecodeRow:
        """Pure decode steps of so many sequences."""
        row = self._decode_rows.get(sequences)
        if row is None:
            index, share = _cell(self._batches, float(sequences))
            lines = [values[index] + share * (values[index + 1] - values[index]) for values in self._decodes]
            whole, slowest = self._largest(lines)
            row = self._decode_rows[sequences] = DecodeRow(self._contexts, whole, slowest)
        return row

    def _largest(self, found: list[Array]) -> tuple[Array, Array]:
        """(whole, slowest) of values by part: the largest over the resources."""
        half = len(found) if self.stages == 1 else len(found) // 2
        whole = found[0] if half == 1 else np.maximum(found[0], found[1])
        if self.stages == 1:
            return whole, whole
        return whole, found[1] if half == 1 else np.maximum(found[2], found[3])

    def _time(self, found: list[float]) -> Time:
        if self.stages == 1:
            whole = max(found)
            return Time(whole, whole)
        half = len(found) // 2
        return Time(max(found[:half]), max(found[half:]))

    def _decode_tables(self) -> tuple[Array, list[Array]]:
        """(sequences, of each part [sequences, contexts] seconds)."""
        middle = float(self._contexts[len(self._contexts) // 2])

        def at_middle(batches: Array) -> Array:
            return np.stack([part.seconds(Pass(batches, middle)) for part in self._parts])

        small = np.arange(1.0, min(_SMALL, self._sequences) + 2)
        sizes = _with(np.unique(np.concatenate([small, _geometric(2.0, self._sequences + 2, 1.6)])), self._uneven)
        batches = _refined(at_middle, sizes)
        B, C = np.meshgrid(batches, self._contexts, indexing="ij")
        return batches, [part.seconds(Pass(B.ravel(), C.ravel())).reshape(B.shape) for part in self._parts]

    def _mixed_tables(self, prompts: int) -> _Mixed:
        most, context = self._tokens, self._context

        def blind(tokens: Array) -> Array:
            return np.stack([part.seconds(_prompt(tokens, 0.0, 0.0, prompts)) for part in self._parts])

        rows = _refined(blind, np.unique(np.round(_geometric(1.0, most + self._sequences, 1.6))))
        seen = (_geometric(1.0, most, 2.5), _spread(1.0, context, 1.6), _spread(LEAST_CONTEXT, context, 2.0))
        T, Q, P = (axis.ravel() for axis in np.meshgrid(*seen, indexing="ij"))
        beside = (
            np.unique(np.concatenate([[1.0], _geometric(64.0, max(128.0, most), 5.0)])),
            _with(_spread(1.0, self._sequences, 1.6), self._uneven),
            _with(_geometric(LEAST_CONTEXT, context, 1.6), self._edges),
        )
        N, B, C = (axis.ravel() for axis in np.meshgrid(*beside, indexing="ij"))
        ground = blind(rows)
        values = []
        for place, part in enumerate(self._parts):
            short, alone = np.unique(T), part.seconds(_prompt(np.unique(T), 0.0, 0.0, prompts))
            near = _near(T, Q, prompts, part.setting.model.attention.window)
            attends = _prompt(T, T * Q, P, prompts)._replace(window_pairs=near)
            attention = part.seconds(attends) - alone[np.searchsorted(short, T)]
            decodes = part.seconds(_prompt(N, 0.0, 0.0, prompts, B, C)) - _line(N + B, rows, ground[place])
            values.append((ground[place].tolist(), attention.tolist(), decodes.tolist()))
        return _Mixed(rows.tolist(), [axis.tolist() for axis in seen], [axis.tolist() for axis in beside], values)


def chunk_pairs(prior: float, new: float) -> float:
    """Query-key pairs of `new` tokens of a prompt behind `prior` ones."""
    return new * prior + new * (new + 1) / 2


class _Mixed(NamedTuple):
    """Tables of iterations with prompt tokens."""

    rows: list[float]
    seen: list[list[float]]
    beside: list[list[float]]
    values: list[tuple[list[float], list[float], list[float]]]
    """Of each part: over `rows`; over `seen`; over `beside`."""

    def seconds(self, new: float, pairs: float, prior: float, decodes: float, context: float) -> list[float]:
        """Of each part."""
        row, share = _cell(self.rows, new + decodes)
        first, second, third = self.seen
        seen = [_cell(first, new), _cell(second, pairs / new), _cell(third, prior)]
        beside = []
        if decodes:
            first, second, third = self.beside
            beside = [_cell(first, new), _cell(second, decodes), _cell(third, context)]
        found = []
        for ground, attends, decoded in self.values:
            value = ground[row] + share * (ground[row + 1] - ground[row]) + _inside(attends, self.seen, seen)
            found.append(value + _inside(decoded, self.beside, beside) if decodes else value)
        return found


class _Counted(NamedTuple):
    """One quantity of a pass of a plan, as the cost engine has it."""

    setting: Setting
    plan: Plan
    slowest: bool = False

    def of_slowest(self) -> _Counted:
        """The slowest stage in the place of all."""
        return self._replace(slowest=True)

    def seconds(self, work: Pass) -> Array:
        """[rows] of passes, in blocks whose arrays stay in the cache."""
        columns = [np.asarray(value, dtype=float) for value in work]
        count = max(column.size for column in columns)
        found = np.empty(count)
        for start in range(0, count, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, count)
            rows = Rows.of_plans([self.plan], isl=np.zeros(stop - start), osl=1, concurrency=1)
            some = [column[start:stop] if column.size > 1 else np.full(stop - start, column) for column in columns]
            time = pass_time(replica_of(self.setting, rows), Pass(*some))
            found[start:stop] = (time.slowest if self.slowest else time.whole).total
        return found


def _resources(setting: Setting) -> list[Setting]:
    """What is added up: times as they are, or under one roofline per step those of each resource alone."""
    if setting.hardware.roofline == "per_op":
        return [setting]
    chip = setting.hardware.chip
    endless = chip._replace(compute_tflops=dict.fromkeys(chip.compute_tflops, np.inf))
    return [
        setting._replace(hardware=setting.hardware._replace(chip=each))
        for each in (chip._replace(memory_bandwidth_gb_per_s=np.inf), endless)
    ]


def _prompt(
    tokens: Array, pairs: Array | float, prior: Array | float, prompts: int, decodes: Array | float = 0.0,
    context: Array | float = 1.0,
) -> Pass:  # fmt: skip
    """A pass over tokens of so many prompts; windows see what they see where the prompts are alike."""
    return Pass(decodes, context, tokens, pairs, prior, float(prompts), float(prompts))


def _near(tokens: Array, keys: Array, prompts: int, window: int | None) -> Array | float:
    """Query-key pairs within a window: of prompts that are alike, whose tokens see so many keys each on average."""
    if window is None:
        return 0.0
    each = tokens / prompts
    start = np.maximum(0.0, keys - (each + 1) / 2)
    inside = causal_pairs(start + each, window) - causal_pairs(start, window)
    return np.asarray(np.minimum(prompts * inside, tokens * keys))


def _refined(values: Callable[[Array], Array], grid: Array) -> Array:
    """A grid between whose points linear interpolation of all values is next to exact, or that is as fine as can be.

    Cells whose middle is off are cut into _WAYS, until none is, or all that are lie between two whole numbers.
    """
    known, unsure = values(grid), np.arange(len(grid) - 1)
    while True:
        left, right = grid[unsure], grid[unsure + 1]
        middle = np.floor((left + right) / 2)
        some = (middle > left) & (middle < right)
        unsure, left, right, middle = unsure[some], left[some], right[some], middle[some]
        if not len(unsure):
            return grid
        found = values(middle)
        share = (middle - left) / (right - left)
        straight = known[:, unsure] + share * (known[:, unsure + 1] - known[:, unsure])
        off = np.any(np.abs(straight - found) > _CLOSE * np.abs(found), axis=0)
        if not np.any(off):
            return grid
        cuts = np.floor(left[off, None] + (right - left)[off, None] * np.arange(1, _WAYS) / _WAYS)
        new = np.setdiff1d(cuts, grid)
        joined = np.concatenate([grid, new])
        order = np.argsort(joined, kind="stable")
        known = np.concatenate([known, values(new)], axis=1)[:, order]
        inside = np.searchsorted(joined[order], left[off]), np.searchsorted(joined[order], right[off])
        unsure = np.concatenate([np.arange(first, last) for first, last in zip(*inside, strict=True)])
        grid = joined[order]


def _geometric(first: float, last: float, ratio: float) -> Array:
    """Points from `first` to `last` whose ratio is at most so much; at least two."""
    count = max(2, int(np.ceil(np.log(last / first) / np.log(ratio))) + 1) if last > first else 2
    return np.geomspace(first, max(last, first + 1), count)


def _spread(first: float, last: float, ratio: float) -> Array:
    """The same, and 0."""
    return np.concatenate([[0.0], _geometric(first, last, ratio)])


def _with(points: Array, more: Array) -> Array:
    """A grid with points more, where they lie inside it."""
    inside = more[(more > points[0]) & (more < points[-1])]
    return np.unique(np.concatenate([points, inside])) if len(inside) else points


def _cell(points: Array | list[float], value: float) -> tuple[int, float]:
    """(index of the left end, share of the way to the right one); beyond the ends a straight line goes on."""
    index = bisect_right(points, value, 1, len(points) - 1) - 1
    left = points[index]
    return index, (value - left) / (points[index + 1] - left)


def _between(values: Array, index: int, share: float) -> float:
    return float(values[index] + share * (values[index + 1] - values[index]))


def _line(at: Array, points: Array, values: Array) -> Array:
    """Linear interpolation over an array; beyond the ends a straight line goes on."""
    index = np.clip(np.searchsorted(points, at, side="right") - 1, 0, len(points) - 2)
    share = (at - points[index]) / (points[index + 1] - points[index])
    return np.asarray(values[index] + share * (values[index + 1] - values[index]))


def _inside(values: list[float], axes: list[list[float]], cells: list[tuple[int, float]]) -> float:
    """A value between the corners of a cell of a flat table over three axes."""
    (i, u), (j, v), (k, w) = cells
    wide = len(axes[2])
    a = (i * len(axes[1]) + j) * wide + k
    b = a + wide
    c = a + len(axes[1]) * wide
    d = c + wide
    near, far = values[a] + w * (values[a + 1] - values[a]), values[b] + w * (values[b + 1] - values[b])
    low = near + v * (far - near)
    near, far = values[c] + w * (values[c + 1] - values[c]), values[d] + w * (values[d + 1] - values[d])
    return low + u * (near + v * (far - near) - low)
