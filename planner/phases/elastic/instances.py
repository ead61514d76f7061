"""What the scheduler of elastic instances (`esp`) has in hand: requests, batches, what passes take, what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.phases.elastic.batching import Fitted
from planner.simulating.iterations import DecodeRow

Array = NDArray[np.float64]
NEVER = float("inf")


class Costs(NamedTuple):
    """What passes take."""

    prefill: Callable[[Sequence[float], int], float]
    """(lengths, d) -> seconds of one pass over these prompts."""
    fits: tuple[Fitted, ...]
    """[d - 1] the form by which the scheduler decides."""
    decoding: Callable[[int, int, int], DecodeRow]
    """(requests, d, masters) -> decode steps over their mean context."""
    move: Callable[[float], float]
    """Seconds in which so many tokens of KV go from one instance to another."""
    enough: float
    """Prompt tokens of an instance from which a pass takes as much longer as it has more."""
    before: float = 0.0
    """Seconds before the scheduler sees a request."""
    scale: float = 0.02
    """Share of a pass that leaving KV on fewer instances takes more (the paper: less than 2 %)."""


class Job:
    """A request on its way."""

    __slots__ = ("arrival", "began", "emitted", "finish", "first", "held", "isl", "key", "osl", "start")

    def __init__(self, key: int, arrival: float, isl: float, osl: float) -> None:
        self.key, self.arrival, self.isl, self.osl = key, arrival, isl, osl
        self.start = self.first = self.finish = float("nan")
        self.began = 0.0  # when it began to decode
        self.emitted = 0
        self.held: dict[int, float] = {}  # tokens that are kept for it, by instance

    @property
    def needs(self) -> float:
        """Tokens of KV."""
        return self.isl + self.osl


class Decodes:
    """Requests that decode together."""

    __slots__ = ("claimed", "context", "end", "instances", "jobs", "lent", "steps")

    def __init__(self, jobs: list[Job], instances: list[int]) -> None:
        self.jobs, self.instances = jobs, instances
        self.context = sum(job.isl + job.emitted for job in jobs)  # tokens that all of them attend to
        self.claimed = 0  # passes over prompts that have its instances
        self.end = NEVER  # of the steps that run; never: none run
        self.steps = 0
        self.lent: list[int] = []  # idle instances that are masters while these steps run

    @property
    def mean(self) -> float:
        """Tokens that each attends to in the next step, on average."""
        return self.context / len(self.jobs) + 1

    @property
    def runs(self) -> bool:
        """Whether steps are under way."""
        return self.end < NEVER


class Prefill(NamedTuple):
    """A pass over prompts that is under way."""

    jobs: list[Job]
    instances: list[int]
    stays: list[int]
    """Instances on which their KV is left."""
    paused: list[Decodes]


class Merge(NamedTuple):
    """A batch that joins another one once both stand and its KV is there."""

    batch: Decodes
    target: Decodes


class Move(NamedTuple):
    """KV that would free an instance."""

    batch: Decodes
    instance: int
    target: Decodes
    """The batch itself, or the one that it joins."""
    tokens: float


class Freed(NamedTuple):
    """An instance that decodes leave."""

    instance: int
    at: float


class Outcome(NamedTuple):
    """What became of requests; arrays in the order of arrival, seconds and tokens."""

    arrival: Array
    start: Array
    first: Array
    finish: Array
    degrees: dict[int, int]
    """Passes over prompts by degree of parallelism."""
    down: int
    """Batches of prompts whose KV was left on fewer instances than computed it."""
    up: int
    """Decode batches that took a further master."""
    paused: int
    """How often decodes stood still for prompts."""
    merged: int
    """Batches of decodes that joined another one to free an instance."""
    moved: float
    """Tokens of KV moved to free instances."""
