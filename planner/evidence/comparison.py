"""One measured quantity beside the model's word on it, and what many of them say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")


def once(function: Callable[Arguments, list[Item]]) -> Callable[Arguments, list[Item]]:
    """A function whose answer without arguments is kept: the measurements that come with the package do not change.

    Every caller gets a list of its own.
    """
    kept: list[list[Item]] = []

    @wraps(function)
    def asked(*args: Arguments.args, **options: Arguments.kwargs) -> list[Item]:
        if args or options:
            return function(*args, **options)
        if not kept:
            kept.append(function(*args, **options))
        return list(kept[0])

    return asked


class Comparison(NamedTuple):
    """One quantity of one measured case."""

    check: str
    """What is compared: `GEMM bf16`, `TPOT`, `weights per chip`."""
    case: str
    what: str
    """The case in words: shape or plan, load, version."""
    observed: float
    predicted: float
    hardware: str = ""
    engine: str = ""
    model: str = ""
    unit: str = ""
    part: str = ""
    """`fitted` where constants were fitted on this very row, `unseen` where they were not; "" = no such split."""
    source: str = ""
    peer: float | None = None
    """Another planner's prediction of the same, where it published one."""

    @property
    def error(self) -> float:
        """Relative error, signed."""
        return self.predicted / self.observed - 1


class Summary(NamedTuple):
    """Errors of a group of comparisons, as shares; `bias` is signed, the others absolute."""

    key: tuple[str, ...]
    cases: int
    bias: float
    mean: float
    median: float
    p90: float
    worst: float


def summarised(found: Iterable[Comparison], by: Sequence[str]) -> list[Summary]:
    """A summary of each group of comparisons that agree in these fields, in the order in which they first stand."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for each in found:
        groups.setdefault(tuple(getattr(each, name) for name in by), []).append(each.error)
    return [summary(key, errors) for key, errors in groups.items()]


def summary(key: tuple[str, ...], errors: Sequence[float]) -> Summary:
    """Bias, mean, median, 90th percentile and largest of some errors (at least one)."""
    size = np.abs(errors)
    return Summary(
        key,
        len(size),
        float(np.mean(errors)),
        float(size.mean()),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.max()),
    )
