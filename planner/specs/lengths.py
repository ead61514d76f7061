"""Lengths of prompts and answers that differ: a distribution, kept as the few numbers that prices depend on.

Everything is relative to the mean lengths, so that a workload with other means has the same shape. Prompts are
represented by the nodes of a Gauss quadrature (Golub and Welsch 1969), which has the first 2 n - 1 moments of the
distribution: sums that are linear and quadratic in a prompt's length, as its passes and its attention are, come out as
over the distribution itself.
"""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError

Array = NDArray[np.float64]
DEFAULT = ("1024", "256")
"""--isl and --osl where they are not given."""
_PAIR = re.compile(r"[0-9]+(,[0-9]+)?/[0-9]+(,[0-9]+)?")
NODES = 6
"""Lengths of prompts that are priced in the place of all of them."""
QUANTILES = 1000
"""Points in equal steps of probability that a log-normal is made of; the longest is the 99.95 % quantile."""
_Z90 = 1.2815515655446004  # of the standard normal, nine tenths lie below
STEEPEST = math.exp(_Z90**2 / 2)
"""The highest ratio of the 90 % quantile to the mean that a log-normal can have: 2.27."""


class Lengths(NamedTuple):
    """How lengths are spread around their means."""

    prompts: tuple[tuple[float, float], ...]
    """(length relative to the mean, weight) of the nodes; weights add up to 1."""
    p90: float
    """The 90 % quantile of prompts, relative to their mean."""
    together: float
    """E[osl isl] / (E[osl] E[isl]): the mean prompt of what is in a batch, where long answers stay longer."""
    spread: float
    """E[osl^2] / E[osl]^2: the same of answers."""
    longest: float
    """The longest request, isl + osl, relative to the mean one."""

    def seen(self, isl: Any, osl: Any) -> tuple[Any, Any]:
        """Mean lengths of the requests that are in a batch at any moment, from those of the requests that come.

        A request is in the batch while it answers, so that each counts by its answer's length (the inspection paradox).
        """
        return isl * self.together, osl * self.spread


class Spread(NamedTuple):
    """Means, and how lengths differ from them: none = not at all."""

    isl: float
    osl: float
    lengths: Lengths | None


class Population(NamedTuple):
    """Lengths that requests are drawn from, where each is looked at by itself (`planner.simulating`)."""

    isl: Array
    """[kinds] tokens of prompts."""
    osl: Array
    """[kinds] tokens of answers; another number of kinds where they have nothing to do with each other."""
    weight: Array | None = None
    """[kinds] how often each pair comes; none = prompts and answers are drawn apart, all equally often."""

    def draw(self, count: int, random: np.random.Generator) -> tuple[Array, Array]:
        """([count] isl, [count] osl), whole tokens."""
        if self.weight is None:
            isl, osl = (
                self.isl[random.integers(0, len(self.isl), count)],
                self.osl[random.integers(0, len(self.osl), count)],
            )
        else:
            which = random.choice(len(self.isl), count, p=self.weight / self.weight.sum())
            isl, osl = self.isl[which], self.osl[which]
        return np.maximum(1.0, np.round(isl)), np.maximum(1.0, np.round(osl))

    @property
    def longest(self) -> float:
        """Tokens of the longest request, prompt and answer."""
        return sum(self.longest_request)

    @property
    def longest_request(self) -> tuple[int, int]:
        """(isl, osl) of the longest request, rounded up."""
        if self.weight is None:
            return math.ceil(self.isl.max()), math.ceil(self.osl.max())
        place = int(np.argmax(self.isl + self.osl))
        return math.ceil(self.isl[place]), math.ceil(self.osl[place])


def population_of(isl: str, osl: str, lengths: str | None) -> Population:
    """What requests are drawn from, as --isl, --osl and --lengths say (see `lengths_of`).

    Raises:
        InputError: as `lengths_of`.
    """
    if lengths is None:
        return Population(mean_and_p90(isl, "--isl"), mean_and_p90(osl, "--osl"))
    if (isl, osl) != DEFAULT:
        raise InputError("--lengths has prompts and answers; leave out --isl and --osl")
    if _PAIR.fullmatch(lengths):
        prompts, answers = lengths.split("/")
        return Population(mean_and_p90(prompts, "--lengths"), mean_and_p90(answers, "--lengths"))
    table = _table(lengths)
    return Population(table[:, 0], table[:, 1], table[:, 2])


def spread_of(isl: Array, osl: Array, weight: Array | None = None) -> Spread:
    """The distribution of requests given one by one.

    Args:
        isl: [requests] tokens of prompts.
        osl: [requests] tokens of answers.
        weight: [requests] how often each comes; none = equally often.
    """
    share = np.ones(len(isl)) if weight is None else np.asarray(weight, dtype=float)
    share = share / share.sum()
    if np.ptp(isl) == 0 and np.ptp(osl) == 0:
        return Spread(_plain(isl[0]), _plain(osl[0]), None)
    prompt, answer = float(share @ isl), float(share @ osl)
    order = np.argsort(isl, kind="stable")
    at90 = min(int(np.searchsorted(np.cumsum(share[order]), 0.9 * (1 - 1e-12))), len(isl) - 1)
    lengths = Lengths(
        _nodes(isl / prompt, share),
        float(isl[order][at90]) / prompt,
        float(share @ (isl * osl)) / (prompt * answer),
        float(share @ osl**2) / answer**2,
        float(np.max(isl + osl)) / (prompt + answer),
    )
    return Spread(_plain(prompt), _plain(answer), lengths)


def log_normal(mean: float, p90: float | None) -> Array:
    """Lengths at equal steps of probability of the log-normal with this mean and 90 % quantile; none = all alike.

    ln x = N(ln mean - s^2/2, s), so that p90 / mean = exp(z s - s^2/2) with z = 1.28: of the two s that do, the less.
    """
    if p90 is None:
        return np.full(QUANTILES, float(mean))
    from statistics import NormalDist  # noqa: PLC0415 (its import takes longer than this needs)

    width = _Z90 - math.sqrt(max(0.0, _Z90**2 - 2 * math.log(p90 / mean)))
    normal = NormalDist()
    steps = np.array([normal.inv_cdf((place + 0.5) / QUANTILES) for place in range(QUANTILES)])
    values = np.exp(width * steps)
    return np.asarray(values * (mean / values.mean()))


def independent(isl: Array, osl: Array) -> Spread:
    """The distribution where prompts and answers of these equally likely lengths have nothing to do with each other."""
    each = spread_of(isl, np.full(len(isl), osl.mean()))
    other = spread_of(np.full(len(osl), isl.mean()), osl)
    if each.lengths is None:
        return other
    if other.lengths is None:
        return each
    longest = (isl.max() + osl.max()) / (isl.mean() + osl.mean())
    lengths = each.lengths._replace(spread=other.lengths.spread, longest=float(longest))
    return Spread(each.isl, other.osl, lengths)


def mean_and_p90(text: str, option: str) -> Array:
    """Lengths of `1024`, or of `1000,3000`: a mean and the 90 % quantile of a log-normal.

    Raises:
        InputError: no numbers, more of them, or two that no log-normal has.
    """
    parts = [part.strip() for part in text.split(",")]
    if Path(text).suffix and not parts[0].replace(".", "").isdigit():
        raise InputError(f"{option}: expected tokens, or MEAN,P90; a file of lengths goes to --lengths {text}")
    if len(parts) > 2:
        raise InputError(f"{option}: expected tokens, or MEAN,P90 as 1000,3000, found {text!r}")
    values = []
    for part in parts:
        try:
            value = int(part)
        except ValueError:
            raise InputError(f"{option} must be a whole number of tokens, or MEAN,P90, found {part!r}") from None
        if value < 1:
            raise InputError(f"{option} must be at least 1, found {value}")
        values.append(value)
    if len(values) == 1:
        return log_normal(values[0], None)
    mean, p90 = values
    if not mean < p90 <= mean * STEEPEST:
        raise InputError(
            f"{option} {text}: the 90 % quantile of a log-normal is above its mean and at most {STEEPEST:.2f} times "
            f"it, from {mean + 1} to {math.floor(mean * STEEPEST)} here; --lengths FILE takes any distribution"
        )
    return log_normal(mean, p90)


def lengths_from(text: str) -> Spread:
    """The distribution of `1000,3000/256`, prompts and answers as `mean_and_p90` has them, or of a file.

    Raises:
        InputError: as `mean_and_p90` and `read_lengths`.
    """
    if _PAIR.fullmatch(text):
        isl, osl = text.split("/")
        return _as_typed(isl, osl, ("--lengths", "--lengths"))
    return read_lengths(text)


def lengths_of(isl: str, osl: str, lengths: str | None) -> Spread:
    """The distribution of what --isl, --osl and --lengths say; one length of each is none.

    Raises:
        InputError: as `lengths_from`, or lengths given twice.
    """
    if lengths is not None:
        if (isl, osl) != DEFAULT:
            raise InputError("--lengths has prompts and answers; leave out --isl and --osl")
        return lengths_from(lengths)
    return _as_typed(isl, osl, ("--isl", "--osl"))


def _as_typed(isl: str, osl: str, options: tuple[str, str]) -> Spread:
    """Independent prompts and answers, with the 90 % quantile that is typed and not the one of the points."""
    spread = independent(mean_and_p90(isl, options[0]), mean_and_p90(osl, options[1]))
    if spread.lengths is None or "," not in isl:
        return spread
    mean, p90 = map(int, isl.split(","))
    return spread._replace(lengths=spread.lengths._replace(p90=p90 / mean))


def read_lengths(path: str) -> Spread:
    """The distribution of a CSV file with columns isl, osl and, if wanted, weight: a request a row.

    Raises:
        InputError: the file, its line and column, what was found and what was expected.
    """
    table = _table(path)
    return spread_of(table[:, 0], table[:, 1], table[:, 2])


def _table(path: str) -> Array:
    """[requests, (isl, osl, weight)] of such a file, those that ever come."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in ("isl", "osl") if name not in names]
            if missing:
                found = ", ".join(names) or "nothing"
                raise InputError(
                    f"--lengths {path}: expected columns isl, osl and, if wanted, weight; no "
                    f"{' and no '.join(missing)} among {found}"
                )
            reader.fieldnames = names
            rows = [_request(path, reader.line_num, row, "weight" in names) for row in reader]
    except OSError as error:
        raise InputError(f"--lengths {path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error):
        raise InputError(f"--lengths {path}: is no CSV text of columns isl, osl and weight") from None
    table = np.array(rows, dtype=float).reshape(-1, 3)
    if not len(table) or not table[:, 2].sum() > 0:
        raise InputError(f"--lengths {path}: has no requests; expected a line for each: isl,osl or isl,osl,weight")
    return np.asarray(table[table[:, 2] > 0])


def _request(path: str, line: int, row: dict[str, Any], weighted: bool) -> tuple[float, float, float]:
    values = []
    for name, least in (("isl", 1.0), ("osl", 1.0), ("weight", 0.0)):
        if name == "weight" and not weighted:
            values.append(1.0)
            continue
        text = row.get(name)
        try:
            value = float(text or "")
        except ValueError:
            raise InputError(f"--lengths {path}: line {line}: {name} must be a number, found {text!r}") from None
        if not least <= value < math.inf or (name != "weight" and value != math.floor(value)):
            kind = "0 or more" if name == "weight" else "a whole number of at least 1"
            raise InputError(f"--lengths {path}: line {line}: {name} must be {kind}, found {text}")
        values.append(value)
    return values[0], values[1], values[2]


def _plain(value: float) -> float:
    """Whole numbers as they are typed, which a mean misses by its rounding."""
    return round(value) if abs(value - round(value)) <= 1e-12 * value else float(value)


def _nodes(values: Array, share: Array) -> tuple[tuple[float, float], ...]:
    """(node, weight) of the Gauss quadrature of a discrete distribution: itself, where it has no more points.

    Lanczos on the diagonal matrix of the values, started at the roots of the weights and orthogonalised twice, gives
    the tridiagonal matrix whose eigenvalues are the nodes.
    """
    points, where = np.unique(values, return_inverse=True)
    weight = np.bincount(where, weights=share)
    if len(points) <= NODES:
        return tuple(zip(points.tolist(), weight.tolist(), strict=True))
    basis = [np.sqrt(weight)]
    diagonal, beside = [], []
    for step in range(NODES):
        last = points * basis[-1]
        diagonal.append(float(last @ basis[-1]))
        for _ in range(2):
            for each in basis:
                last = last - (last @ each) * each
        if step < NODES - 1:
            beside.append(float(np.linalg.norm(last)))
            basis.append(last / beside[-1])
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return tuple(zip(nodes.tolist(), (vectors[0] ** 2).tolist(), strict=True))
