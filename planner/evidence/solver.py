"""The solver behind every fit: scipy's, an optional extra, imported when something is fitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.errors import InputError


def least_squares() -> Callable[..., Any]:
    """`scipy.optimize.least_squares`.

    Raises:
        InputError: scipy is not installed.
    """
    try:
        from scipy.optimize import least_squares as solve  # noqa: PLC0415 (an optional extra, slow to import)
    except ImportError:
        raise InputError("fitting needs scipy: pip install 'parallel-strategy-planner[calibrate]'") from None
    return solve
