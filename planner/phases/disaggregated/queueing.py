"""Waiting for a prefill instance, in closed form (Zhong et al., DistServe, OSDI 2024, section 3.1; Kleinrock 1975).

Prompts of equal length arrive as a Poisson process at a rate R and take D seconds each, one after the other: an
M/D/1 queue, whose mean time in the system is

    single          D + R D^2 / (2 (1 - R D))
    inter-op, p     D + R (D/p)^2 / (2 (1 - R D/p))           p stages of D/p each: only the first one makes wait
    intra-op        D/K + R (D/K)^2 / (2 (1 - R D/K))         K = the speed-up of p chips, less than p

The paper's equations 1 to 3 are these with p = 2. All are one formula, `mean_ttft`, with two times: what a prompt takes
through all stages, and what it keeps the next one waiting. Where lengths differ the queue is M/G/1 (Pollaczek,
Khinchine), with the squared coefficient of variation of the service time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.arriving import queue_wait

Num = Any
Array = NDArray[np.float64]
_HALVINGS = 50


def mean_ttft(through: Num, service: Num, rate: Num, variation: Num = 0.0) -> Array:
    """Mean seconds from a prompt's arrival to its first token; infinite without a steady state.

    Args:
        through: seconds of a prompt through all stages, alone.
        service: seconds until the next prompt can follow: those of the slowest stage.
        rate: arrivals per second, a Poisson process.
        variation: squared coefficient of variation of the service; 0 = M/D/1.
    """
    return np.asarray(through + queue_wait(np.asarray(rate), np.asarray(service), variation))


def inter_op_ttft(alone: Num, rate: Num, stages: int) -> Array:
    """Mean TTFT of a pipeline of equal stages, none of whose hand-overs costs anything.

    Args:
        alone: seconds of a prompt on one chip.
        rate: arrivals per second.
        stages: of the pipeline; 1 = DistServe's equation 1, 2 = its equation 2.
    """
    return mean_ttft(alone, alone / stages, rate)


def intra_op_ttft(alone: Num, rate: Num, speed_up: Num) -> Array:
    """Mean TTFT of a tensor-parallel instance, `speed_up` times as fast as one chip (DistServe's equation 3)."""
    return mean_ttft(alone / speed_up, alone / speed_up, rate)


def rate_within(slack: Num, service: Num, variation: Num = 0.0) -> Array:
    """The highest rate at which the mean wait of an M/G/1 queue is at most `slack` seconds; 0 where slack is below 0.

    W = R E^2 (1 + c^2) / (2 (1 - R E)) solved for R.
    """
    slack = np.asarray(slack, dtype=float)
    half = service**2 * (1 + np.asarray(variation)) / 2
    with np.errstate(invalid="ignore"):
        found = np.where(np.isinf(slack), 1 / service, slack / (half + slack * service))
    return np.where(slack > 0, found, 0.0)


def share_within(limit: Num, through: Array, service: Array, weights: Array, rate: Num) -> Array:
    """[...] share of prompts whose time to first token is at most a limit.

    The wait is taken as an atom at 0 of 1 - rho and an exponential tail with the mean of Pollaczek and Khinchine, as it
    is in heavy traffic (Kingman 1961); exact for M/M/1.

    Args:
        limit: seconds, [...].
        through: [..., lengths] seconds of a prompt of each length through all stages, alone.
        service: [..., lengths] seconds until the next can follow.
        weights: [lengths] how often each comes; their sum is 1.
        rate: arrivals per second, [...].
    """
    mean = service @ weights
    variation = np.maximum(0.0, service**2 @ weights / mean**2 - 1)
    busy = np.asarray(rate) * mean
    wait = queue_wait(np.asarray(rate), mean, variation)
    left = np.asarray(limit)[..., None] - through
    with np.errstate(invalid="ignore", divide="ignore"):
        tail = np.where((busy > 0) & (busy < 1), wait / busy, 1.0)
        late = busy[..., None] * np.exp(-np.maximum(left, 0.0) / tail[..., None])
    kept = np.where(left >= 0, 1 - late, 0.0) @ weights
    return np.where(busy < 1, kept, 0.0)


def rate_of_share(limit: Num, through: Array, service: Array, weights: Array, share: float) -> Array:
    """[...] the highest rate at which a share of the prompts keeps a limit (`share_within`); 0 where none does."""
    mean = service @ weights
    low, high = np.zeros(mean.shape), 1 / mean
    possible = share_within(limit, through, service, weights, low) >= share
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        keeps = share_within(limit, through, service, weights, middle) >= share
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    return np.where(possible, low, 0.0)


def batch_quantile(batch: Num, elasticity: Num, deviations: float) -> Array:
    """What the mean batch over a request's stay is at most, for all but the highest requests of a normal distribution.

    Decode is processor sharing: n requests in flight leave at the rate g(n) = n / (L D(n)), D(n) a step and L steps of
    an answer. Around the mean batch b the linear noise approximation has the variance b / (1 - e), e = b D'(b) / D(b)
    (exactly Poisson's b where a step takes as long for any batch), and a memory that fades with exp(-(1 - e) t / stay),
    so that a request, whose TPOT is the mean over its stay, sees 2 (x - 1 + exp(-x)) / x^2 of it, x = 1 - e.

    Args:
        batch: the mean number in flight.
        elasticity: e, from 0 to 1.
        deviations: standard deviations: 1.28 for nine tenths of the requests.
    """
    left = np.clip(1 - np.asarray(elasticity, dtype=float), 1e-3, 1.0)
    seen = 2 * (left - 1 + np.exp(-left)) / left**2
    return np.asarray(batch + deviations * np.sqrt(batch / left * seen))
