"""What a replica does that has one phase only: prompts through a prefill replica, steps of a decode replica.

Both are the cost engine's own figures: a prefill replica runs one prompt after the other (`serving.price` with one
request in flight), a decode replica steps without any prompt in between (`serving.price` of a static batch, whose TPOT
is a decode step). Replicas stand on nodes from a boundary on, as a deployment of their own would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.rows import Rows
from planner.costs.serving import Fit, Setting, fit, price
from planner.phases.disaggregated.transfer import Cache, cache_of
from planner.plans.placement import Num, Placement
from planner.plans.plan import Plan
from planner.plans.space import Refused, enumerate_plans
from planner.pricing import by_structure, memory_reasons, rows_of, with_draft, with_kernels
from planner.request import Request

Array = NDArray[np.float64]
_POINTS = 33
"""Batches at which a decode step is priced; between them it is interpolated."""


@dataclass(frozen=True, eq=False)
class Segmented(Placement):
    """Chips on which an instance's pipeline is cut into equal segments, one a node (DistServe's algorithm 2)."""

    nodes: int = 1

    def crossings(self, tp: Num, pp: Num, dp: Num, level: int = 0) -> Num:
        """Stage boundaries that leave a domain of a level: those between segments, whatever the degrees."""
        shape = np.broadcast_shapes(np.shape(tp), np.shape(pp), np.shape(dp))
        if level == 0:
            return np.full(shape, float(self.nodes - 1))
        outer, inner = self.hardware.network[level].chips, self.hardware.domain
        if outer is None or inner is None:
            return np.zeros(shape)
        return np.full(shape, float((self.nodes - 1) // max(1, outer // inner)))


class Prompts(NamedTuple):
    """Prefill replicas; arrays over plans, times in seconds."""

    request: Request
    placement: Placement
    plans: list[Plan]
    through: Array
    """[plans, lengths] from a prompt's start to its first token, alone."""
    service: Array
    """[plans, lengths] until the next prompt can follow."""
    weights: Array
    """[lengths]."""
    held: Array
    """Prompts whose KV a replica can hold."""
    memory: Array
    """Bytes of the fullest chip."""
    limit: float
    cache: Cache
    refused: list[Refused]

    @property
    def chips(self) -> Array:
        """Of one replica."""
        return np.array([float(plan.replica_chips) for plan in self.plans])

    @property
    def mean_through(self) -> Array:
        """Mean over lengths of what a prompt takes alone."""
        return np.asarray(self.through @ self.weights)

    @property
    def mean_service(self) -> Array:
        """Mean over lengths of what a prompt keeps the next one waiting."""
        return np.asarray(self.service @ self.weights)

    @property
    def variation(self) -> Array:
        """Squared coefficient of variation of the service over lengths."""
        return np.maximum(0.0, self.service**2 @ self.weights / self.mean_service**2 - 1)

    def take(self, index: NDArray[np.intp]) -> Prompts:
        """Some of the plans."""
        return self._replace(
            plans=[self.plans[place] for place in index],
            cache=Cache(*(column[index] for column in self.cache)),
            **{name: getattr(self, name)[index] for name in ("through", "service", "held", "memory")},
        )


class Answers(NamedTuple):
    """Decode replicas; arrays over plans, times in seconds."""

    request: Request
    placement: Placement
    plans: list[Plan]
    batches: Array
    """[plans, points] requests in flight, ascending from 1 to the most that a replica holds."""
    steps: Array
    """[plans, points] time per output token at that batch."""
    most: Array
    """Requests that a replica holds."""
    weights: Array
    """Bytes of weights of the fullest chip at the largest batch."""
    memory: Array
    """Bytes of the fullest chip at the largest batch."""
    limit: float
    cache: Cache
    answers: float
    """Tokens of an answer behind its first."""
    refused: list[Refused]

    @property
    def chips(self) -> Array:
        """Of one replica."""
        return np.array([float(plan.replica_chips) for plan in self.plans])

    def step(self, index: int, batch: Num) -> Array:
        """Time per output token of a plan at a batch, which need not be whole."""
        return np.asarray(np.interp(batch, self.batches[index], self.steps[index]))

    def rates(self, index: int) -> Array:
        """[points] requests per second that a plan serves at its batches."""
        return np.asarray(self.batches[index] / (self.answers * self.steps[index]))

    def batch_at(self, index: int, rate: Num) -> Array:
        """The mean batch at which a plan serves a rate: Little's law, b = rate x answers x step(b)."""
        batches, steps = self.batches[index], self.steps[index]
        rates, steps_of_answer = self.rates(index), np.asarray(rate) * self.answers
        below = np.asarray(rate) <= rates[0]  # one request in flight or fewer: a step takes what it takes for one
        place = np.clip(np.searchsorted(rates, rate) - 1, 0, len(rates) - 2)
        wide = np.maximum(batches[place + 1] - batches[place], 1e-12)
        slope = (steps[place + 1] - steps[place]) / wide  # between two points a step grows in a straight line
        left = np.maximum(1 - steps_of_answer * slope, 1e-12)
        found = steps_of_answer * (steps[place] - slope * batches[place]) / left
        found = np.clip(found, batches[place], batches[place + 1])
        return np.asarray(np.where(below, steps_of_answer * steps[0], found))

    def take(self, index: NDArray[np.intp]) -> Answers:
        """Some of the plans."""
        names = ("batches", "steps", "most", "weights", "memory")
        return self._replace(
            plans=[self.plans[place] for place in index],
            cache=Cache(*(column[index] for column in self.cache)),
            **{name: getattr(self, name)[index] for name in names},
        )


def _alone(request: Request, placement: Placement, plans: list[Plan] | None) -> tuple[list[Plan], list[Refused]]:
    """One replica of each plan that rules and kernels allow, or of those given; the refused ones."""
    refused: list[Refused] = []
    if plans is None:
        filters = request.filters._replace(dp=(1,))
        plans, refused = enumerate_plans(request.model, request.engine, placement, filters, request.workload.weights)
    plans, undrafted = with_draft(request, plans)
    plans, unpriced = with_kernels(request, placement, plans)
    return plans, [*undrafted, *refused, *unpriced]


def _groups(
    request: Request, placement: Placement, plans: list[Plan], isl: float, osl: float, refused: list[Refused]
) -> Iterator[tuple[Setting, list[Plan], Rows, Fit]]:
    """Plans by structure that hold a request of these lengths, with their memory; the others go to `refused`."""
    for setting, alike in by_structure(request, placement, plans):
        same = setting._replace(lengths=None)
        rows = rows_of(request, alike, np.arange(len(alike)), 1.0)
        rows = rows._replace(isl=np.full(rows.length, isl), osl=np.full(rows.length, osl))
        fitted = fit(same, rows, clip=False)
        reasons = memory_reasons(same, fitted, np.ones(len(alike)))
        refused += [Refused(plan, why, "memory") for plan, why in zip(alike, reasons, strict=True) if why]
        index = np.flatnonzero([why is None for why in reasons])
        if len(index):
            yield (
                same,
                [alike[place] for place in index],
                Rows(*(column[index] for column in rows)),
                Fit(*(column[index] for column in fitted)),
            )


def prompts_of(request: Request, placement: Placement, plans: list[Plan] | None = None) -> Prompts:
    """The prefill replicas of a request; its limits on time and its rate are not looked at.

    Args:
        request: hardware and engine are those of the prefill pool.
        placement: its chips.
        plans: none = all that the rules allow.
    """
    work = request.workload
    plans, refused = _alone(request, placement, plans)
    lengths = ((1.0, 1.0),) if work.lengths is None else work.lengths.prompts
    ratios, weights = (np.array(column) for column in zip(*lengths, strict=True))
    longest = work.isl * float(np.max(ratios))
    parts: list[tuple[list[Plan], Array, Array, Array, Array, Cache]] = []
    limit = 0.0
    for setting, alike, rows, _ in _groups(request, placement, plans, work.isl, 1.0, refused):
        each = setting._replace(schedule="continuous", drafting=None)
        fitted = fit(each, rows._replace(isl=np.full(rows.length, longest)), clip=False)
        index = np.repeat(np.arange(rows.length), len(ratios))
        apart = Rows(*(column[index] for column in rows))
        apart = apart._replace(isl=apart.isl * np.tile(ratios, rows.length), spec_tokens=0.0 * apart.isl)
        found = price(each, apart, fit(each, apart, clip=False)._replace(batch=np.ones(apart.length)))
        shape = (rows.length, len(ratios))
        held = fit(each, rows, clip=False).max_concurrency
        limit = setting.budget.limit
        cache = cache_of(setting, alike, work.isl)
        parts.append((alike, found.ttft.reshape(shape), found.prompt.reshape(shape), held, fitted.memory, cache))
    none = np.zeros((0, len(ratios)))
    every = [plan for part in parts for plan in part[0]]
    through, service, held, memory = (
        np.concatenate([part[column] for part in parts]) if parts else (none if column < 3 else np.zeros(0))
        for column in (1, 2, 3, 4)
    )
    return Prompts(
        request, placement, every, through, service, weights, held, memory, limit,
        _joined([part[5] for part in parts]), refused,
    )  # fmt: skip


def answers_of(request: Request, placement: Placement, plans: list[Plan] | None = None) -> Answers:
    """The decode replicas of a request; its limits on time and its rate are not looked at.

    Args:
        request: hardware and engine are those of the decode pool.
        placement: its chips.
        plans: none = all that the rules allow.
    """
    work = request.workload
    plans, refused = _alone(request, placement, plans)
    isl, osl = (work.isl, work.osl) if work.lengths is None else work.lengths.seen(work.isl, work.osl)
    parts: list[tuple[list[Plan], Array, Array, Array, Array, Array, Cache]] = []
    limit = 0.0
    for setting, alike, rows, fitted in _groups(request, placement, plans, isl, osl, refused):
        most = fitted.max_concurrency
        batches = np.maximum(1.0, most[:, None] ** np.linspace(0.0, 1.0, _POINTS))
        index = np.repeat(np.arange(rows.length), _POINTS)
        apart = Rows(*(column[index] for column in rows))._replace(concurrency=batches.ravel())
        at = Fit(*(column[index] for column in fitted))._replace(batch=batches.ravel(), running=batches.ravel())
        steps = price(setting._replace(schedule="static", mean_load=True), apart, at).tpot
        full = fit(setting, rows._replace(concurrency=most), clip=False)
        limit = setting.budget.limit
        cache = cache_of(setting, alike, work.isl)
        parts.append((alike, batches, steps.reshape(batches.shape), most, full.weights, full.memory, cache))
    none = np.zeros((0, _POINTS))
    every = [plan for part in parts for plan in part[0]]
    batches, steps, most, weights, memory = (
        np.concatenate([part[column] for part in parts]) if parts else (none if column < 3 else np.zeros(0))
        for column in (1, 2, 3, 4, 5)
    )
    return Answers(
        request, placement, every, batches, steps, most, weights, memory, limit,
        _joined([part[6] for part in parts]), work.osl - 1.0, refused,
    )  # fmt: skip


def _joined(caches: list[Cache]) -> Cache:
    none = np.zeros(0)
    found = Cache(none, none, none)
    for cache in caches:
        found = found.join(cache)
    return found


def network_of(pool: Prompts | Answers) -> Network:
    """The wires of a pool, as its engine uses them."""
    return Network(pool.placement, pool.request.engine)
