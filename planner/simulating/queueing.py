"""The queue alone: one server, first come first served, by its recursion.

What waits for a replica is a queue of this kind where requests are prompts only; `arriving.queue_wait` has what theory
knows of its mean (M/G/1), and both are held against each other and against the replicas.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def waits(arrival: Array, service: Array | float) -> Array:
    """[requests] seconds that each waits before its service begins (Lindley 1952).

    W' = max(0, W + S - gap), which is how far a random walk is above its lowest point so far: no loop.

    Args:
        arrival: [requests] in order.
        service: seconds of each, or of all.
    """
    served = np.broadcast_to(np.asarray(service, dtype=float), arrival.shape)
    walk = np.concatenate([[0.0], np.cumsum(served[:-1] - np.diff(arrival))])
    return np.asarray(walk - np.minimum.accumulate(walk))


def standard_error(values: Array, batches: int = 30) -> float:
    """Of the mean of values each of which depends on those before it: from the means of so many stretches."""
    means = np.array([part.mean() for part in np.array_split(values, batches)])
    return float(means.std(ddof=1) / np.sqrt(batches))
