"""Requests as they come: arrival, prompt and answer of each. Made here from a seed, or read by `specs.traces`.

Gaps between arrivals are drawn once at a rate of 1 and divided by the rate that is asked, so that two rates differ in
nothing else: the same requests come in the same order, only closer together. A search for the highest rate then
compares like with like.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.specs.lengths import Population

Array = NDArray[np.float64]
SEED = 1


class Trace(NamedTuple):
    """Requests in the order in which they come; arrays of one length."""

    arrival: Array
    """Seconds from the start."""
    isl: Array
    """Tokens of the prompt, whole numbers of at least 1."""
    osl: Array
    """Tokens of the answer, likewise."""

    @property
    def length(self) -> int:
        """How many requests."""
        return len(self.arrival)

    @property
    def rate(self) -> float:
        """Requests per second, on average over the gaps between them; infinite where all come at once."""
        span = float(self.arrival[-1] - self.arrival[0])
        return (self.length - 1) / span if span > 0 else np.inf

    def faster(self, factor: float) -> Trace:
        """The same requests at a rate that is so many times higher."""
        return self._replace(arrival=self.arrival / factor)

    def part(self, which: NDArray[np.intp]) -> Trace:
        """Some of the requests."""
        return Trace(self.arrival[which], self.isl[which], self.osl[which])


class Stream(NamedTuple):
    """Where requests come from: a log, or a population that they are drawn from."""

    log: Trace | None = None
    population: Population | None = None
    burstiness: float = 1.0
    seed: int = SEED
    rate: float | None = None
    """Requests per second; none = as the log has them, or to be searched."""

    @property
    def searched(self) -> bool:
        """Whether no rate is known."""
        return self.rate is None and self.log is None

    @property
    def longest(self) -> tuple[float, float]:
        """(isl, osl) that the longest request may have."""
        if self.log is not None:
            place = int(np.argmax(self.log.isl + self.log.osl))
            return float(self.log.isl[place]), float(self.log.osl[place])
        return (1.0, 1.0) if self.population is None else self.population.longest_request

    def take(self, count: int) -> Trace:
        """So many requests, drawn anew; of a log all. At their rate, or at 1 a second where it is searched."""
        trace = self.log
        if trace is None:
            assert self.population is not None
            trace = requests(self.population, count, self.burstiness, self.seed)
        return trace if self.rate is None else trace.faster(self.rate / trace.rate)


def requests(population: Population, count: int, burstiness: float = 1.0, seed: int = SEED) -> Trace:
    """Requests at a mean rate of 1 a second, of a population's lengths; `Trace.faster` makes it any other.

    Args:
        population: what prompts and answers there are.
        count: how many requests.
        burstiness: coefficient of variation of the gaps (see `gaps`).
        seed: of everything random; the same seed gives the same requests.
    """
    random = np.random.default_rng(seed)
    isl, osl = population.draw(count, random)
    return Trace(np.cumsum(gaps(count, burstiness, random)), isl, osl)


def gaps(count: int, burstiness: float, random: np.random.Generator) -> Array:
    """[count] gaps with a mean of 1 and this coefficient of variation: a gamma distribution of shape 1 / CV^2.

    1 is a Poisson process, more is burstier, 0 are equal gaps.
    """
    if burstiness == 0:
        return np.ones(count)
    shape = burstiness**-2
    return random.gamma(shape, 1 / shape, count)


def on_off(count: int, on: float, off: float, random: np.random.Generator) -> Array:
    """[count] arrivals, at a mean rate of 1, that come only in some periods: bursts with silence between them.

    Within a period of arrivals they are a Poisson process of rate (on + off) / on; periods are exponential
    (an interrupted Poisson process, Kuczura 1973).

    Args:
        count: how many requests.
        on: mean length of a period with arrivals, in seconds at a mean rate of 1.
        off: mean length of a silence.
        random: what draws.
    """
    busy = np.cumsum(random.exponential(on / (on + off), count))  # arrivals on a clock that stands still in silences
    ends: list[Array] = [np.zeros(0)]
    reached = 0.0
    while reached < busy[-1]:  # the periods that this clock goes through
        ends.append(reached + np.cumsum(random.exponential(on, 1 + int(busy[-1] / on))))
        reached = float(ends[-1][-1])
    ended = np.searchsorted(np.concatenate(ends), busy)  # periods that are over before each arrival
    silences = np.concatenate([[0.0], np.cumsum(random.exponential(off, int(ended[-1])))])
    return np.asarray(busy + silences[ended])


def alike(count: int, isl: int, osl: int, arrival: float = 0.0) -> Trace:
    """Requests of one length that come together."""
    return Trace(np.full(count, arrival), np.full(count, float(isl)), np.full(count, float(osl)))
