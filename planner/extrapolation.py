"""What lies beyond the measurements that an engine's constants were fitted on, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.serving import Rows
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware

BEYOND = ("hardware", "version", "tp", "pp", "batch", "isl")
"""What may lie beyond: machine, version of the engine, a degree, requests per replica, length of a prompt."""


def beyond(engine: Engine, hardware: Hardware, rows: Rows, batch: NDArray[np.float64]) -> NDArray[Any]:
    """What of each row lies beyond the engine's calibration, as `tp, batch`; none = nothing, or there is none.

    Args:
        engine: with what its constants were `calibrated` on; none for a bound or a textbook.
        hardware: is within it by its name or by that of what it is `like`; any other file that extends one is a
            machine of its own.
        rows: to look at.
        batch: [rows] requests per replica.
    """
    texts: NDArray[Any] = np.full(rows.length, None, dtype=object)
    within = engine.calibrated
    if within is None:
        return texts
    other = np.full(rows.length, not hardware.within(within.hardware))
    version = np.full(rows.length, not within.same_version)
    masks = (other, version, rows.tp > within.tp, rows.pp > within.pp, batch > within.batch,
             rows.isl > within.isl)  # fmt: skip
    code = sum(mask.astype(int) << place for place, mask in enumerate(masks))
    words = [
        ", ".join(name for place, name in enumerate(BEYOND) if number >> place & 1) or None
        for number in range(1 << len(BEYOND))
    ]
    texts[:] = np.array(words, dtype=object)[code]
    return texts
