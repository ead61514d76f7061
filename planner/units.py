"""Units: SI base units inside (s, B, FLOP, W, $), converted only here and at the edges."""

from __future__ import annotations

import math
import re

from planner.errors import InputError

KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
GB = 1e9
TERA = 1e12
US, MS = 1e-6, 1e-3
HOUR = 3600.0

_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2.0**40,
}


def parse_bytes(text: str) -> float:
    """Bytes in a size such as `72GiB` (2^30) or `80GB` (10^9).

    A number without a unit is refused: whoever writes 72 means GiB, not bytes.

    Raises:
        InputError: not a size, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    factor = _BYTES.get(match[2].lower()) if match else None
    if match is None or factor is None or not 0 < float(match[1]) < math.inf:
        raise InputError(
            f"{text!r} is not a size of memory: expected a positive number with a unit, as in 72GiB or 80GB"
        )
    return float(match[1]) * factor
