"""The law that prices kernels and transfers alike: the p-norm of the times that each resource needs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Num = Any
_TINY = 1e-300  # keeps 0 / 0 at 0 and is lost beside any real time


def pnorm(terms: list[Num], p: float) -> Num:
    """|| terms ||_p of seconds, none negative.

    p = inf is the textbook maximum, p = 1 the sum. On measured kernels p lies between: neither resource waits
    wholly for the other.
    """
    if len(terms) == 1:
        return terms[0]
    if p == 1.0:
        return sum(terms[1:], terms[0])
    largest = _largest(terms)
    if math.isinf(p):
        return largest
    scale = largest + _TINY
    powers = [(term / scale) ** p for term in terms]
    return largest * sum(powers[1:], powers[0]) ** (1 / p)


def pnorm_shares(terms: list[Num], p: float) -> list[Num]:
    """Each term's share of || terms ||_p, in proportion to term^p; they add up to the norm.

    With p = inf the whole goes to the largest term, the first of equals.
    """
    if len(terms) == 1 or p == 1.0:
        return terms
    if len(terms) == 2:
        first, second = terms
        largest = np.maximum(first, second)
        if math.isinf(p):
            of_first = np.where(first >= second, largest, 0.0)
            return [of_first, largest - of_first]
        power = (np.minimum(first, second) / (largest + _TINY)) ** p
        norm = largest * (1 + power) ** (1 / p)
        of_largest = norm / (1 + power)
        of_first = np.where(first >= second, of_largest, norm - of_largest)
        return [of_first, norm - of_first]
    largest = _largest(terms)
    scale = largest + _TINY
    if math.isinf(p):
        winner = np.stack(np.broadcast_arrays(*terms)).argmax(axis=0)
        return [np.where(winner == index, largest, 0.0) for index in range(len(terms))]
    powers = [(term / scale) ** p for term in terms]
    total = sum(powers[1:], powers[0])
    factor = scale * np.where(total > 0, total, 1.0) ** (1 / p - 1)
    return [power * factor for power in powers]


def _largest(terms: list[Num]) -> Num:
    largest = terms[0]
    for term in terms[1:]:
        largest = np.maximum(largest, term)
    return largest
