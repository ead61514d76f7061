"""How many chips: for each way to build a replica the fewest copies that carry the load within the limits.

A replica's times do not depend on how many there are, so that the highest load (or rate) of one replica within the
limits says how many are needed. What does depend on it, the stages that cross a node where replicas do not tile the
nodes, is asked again for the number found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.costs.serving import Setting, fit
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.space import Refused, enumerate_plans
from planner.pricing import (
    Held,
    Priced,
    at_every_load,
    at_load,
    by_structure,
    memory_reasons,
    most_within,
    over_limits,
    rows_of,
    with_draft,
    with_kernels,
)
from planner.request import Request, check
from planner.results import Results

Array = NDArray[np.float64]
_ROUNDS = 16  # of counting replicas: each can only add some, and few plans need a second


class _Sized(NamedTuple):
    """Plans of one structure; as in `Priced`."""

    results: Results | None
    refused: list[Refused]
    unmet: Results | None
    needed: tuple[Plan, int] | None


def size_all(request: Request) -> Priced:
    """Every replica that up to `gpus` chips hold, as often as the load needs it; `gpus` of a row is what that takes.

    With an arrival rate this is what serves it; else what runs the requests in flight that are given, or one. Of
    chips in nodes, not of a torus.

    Raises:
        InputError: the request makes no sense.
    """
    check(request)
    placement = Placement.of(request.hardware, request.gpus)
    filters, allowed = request.filters._replace(dp=(1,)), request.filters.dp
    plans, refused = enumerate_plans(request.model, request.engine, placement, filters, request.workload.weights)
    plans, undrafted = with_draft(request, plans)
    plans, unpriced = with_kernels(request, placement, plans)
    refused = [*undrafted, *refused, *unpriced]
    parts = [
        _sized(request, placement, setting, alike, allowed)
        for setting, alike in by_structure(request, placement, plans)
    ]
    found = [part.results for part in parts if part.results is not None]
    unmet = [part.unmet for part in parts if part.unmet is not None]
    needed = [part.needed for part in parts if part.needed is not None]
    return Priced(
        placement,
        len(plans),
        Results.joined(found) if found else None,
        refused + [each for part in parts for each in part.refused],
        Results.joined(unmet) if unmet else None,
        needed=min(needed, key=lambda each: each[1]) if needed else None,
    )


def _sized(
    request: Request, placement: Placement, setting: Setting, plans: list[Plan], allowed: tuple[int, ...]
) -> _Sized:
    fitted = fit(setting, rows_of(request, plans, np.arange(len(plans)), 1.0), clip=False)
    reasons = memory_reasons(setting, fitted, np.ones(len(plans)))
    refused = [Refused(plan, reason, "memory") for plan, reason in zip(plans, reasons, strict=True) if reason]
    plans = [plan for plan, reason in zip(plans, reasons, strict=True) if not reason]
    if not plans:
        return _Sized(None, refused, None, None)
    if request.workload.arrival_rate is None:
        load: _Load = _InFlight(request, setting)
    else:
        load = _Arriving(request, setting, plans)
    dp = _settled(placement, plans, lambda plans: _next(load.replicas(plans), allowed))
    never = np.flatnonzero(~np.isfinite(dp))
    unmet = None
    if len(never):
        failing = [plans[place] for place in never]
        unmet = load.alone(failing, _chips(placement, failing))
        refused += [
            Refused(plan, over_limits(request.limits, unmet, place), "slo") for place, plan in enumerate(failing)
        ]
    plans = [plan._replace(dp=int(count)) for plan, count in zip(plans, dp, strict=True) if np.isfinite(count)]
    chips = _chips(placement, plans)
    least = int(np.argmin(chips)) if plans else 0
    needed = (plans[least], int(chips[least])) if plans else None
    refused += [
        Refused(plan, f"takes {count:.0f} chips for this load, --max-gpus is {request.gpus}", "chips")
        for plan, count in zip(plans, chips, strict=True)
        if count > request.gpus
    ]
    plans = [plan for plan, count in zip(plans, chips, strict=True) if count <= request.gpus]
    chips = chips[chips <= request.gpus]
    return _Sized(load.results(plans, chips) if plans else None, refused, unmet, needed)


def _chips(placement: Placement, plans: list[Plan]) -> Array:
    return np.array([float(placement.fewest(plan.tp, plan.pp, plan.dp, plan.cp)) for plan in plans])


class _Load(Protocol):
    """What the chips have to carry."""

    def replicas(self, plans: list[Plan]) -> Array:
        """Replicas that it needs of each plan, asked with those that stand beside it; infinite where none suffice."""

    def alone(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows with one request in flight: the times that more replicas do not make shorter."""

    def results(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows of plans that carry it."""


class _InFlight(NamedTuple):
    """Requests in flight, as many as are asked for or one."""

    request: Request
    setting: Setting

    def replicas(self, plans: list[Plan]) -> Array:
        """Replicas that it needs of each plan."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.ceil(self.asked / most_within(self.request, self.setting, plans)))

    def alone(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows with one request in flight."""
        return at_load(self.request, self.setting, plans, np.arange(len(plans)), np.ones(len(plans)), chips)

    def results(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows at the load that is asked; at every load of one replica where that is sought."""
        if self.request.searches:
            results, _ = at_every_load(self.request, self.setting, plans, chips)
            assert results is not None  # each holds one request
            return results
        asked = np.full(len(plans), self.asked)
        return at_load(self.request, self.setting, plans, np.arange(len(plans)), asked, chips)

    @property
    def asked(self) -> float:
        """Requests in flight."""
        return float(self.request.workload.concurrency or 1)


class _Arriving:
    """Requests that come at a rate.

    Args:
        request: has the rate.
        setting: what all plans share.
        plans: all of which replicas are counted, one of each; what one of them sustains is found once.
    """

    def __init__(self, request: Request, setting: Setting, plans: list[Plan]) -> None:
        self.request, self.setting = request, setting
        self.held = Held.of(request, setting, plans)

    def _of(self, plans: list[Plan]) -> Held:
        """Of these, what is known: of one replica each, unless stages cross where those of the first do not."""
        places = {plan: place for place, plan in enumerate(self.held.plans)}
        first = self.held.take(np.array([places[plan._replace(dp=1)] for plan in plans], dtype=int))
        crossings = self.setting.placement.crossings
        dp = np.array([float(plan.dp) for plan in plans])
        levels = range(len(self.setting.placement.hardware.network))
        rows = first.rows
        width = rows.width
        if any(np.any(crossings(width, rows.pp, dp, n) != crossings(width, rows.pp, rows.dp, n)) for n in levels):
            return Held.of(self.request, self.setting, plans)
        return first.times(dp)

    def replicas(self, plans: list[Plan]) -> Array:
        """Replicas that it needs of each plan."""
        with np.errstate(divide="ignore"):
            wanted = (self.request.workload.arrival_rate or 0.0) * (1 - 1e-9)
            return np.asarray(np.maximum(1.0, np.ceil(wanted / self._of(plans).reach.rate)))

    def alone(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows with next to nothing in flight."""
        return self._of(plans).idle(self.request, self.setting, chips)

    def results(self, plans: list[Plan], chips: Array) -> Results:
        """Result rows at the load at which the rate is served."""
        return self._of(plans).at(self.request, self.setting, chips)


def _settled(placement: Placement, plans: list[Plan], replicas: Callable[[list[Plan]], Array]) -> Array:
    """The fewest replicas of each plan that are enough when all of them stand: infinite where none are."""

    def crossings(dp: Array) -> list[list[float]]:
        tp, pp = (np.array([getattr(plan, name) for plan in plans]) for name in ("tp", "pp"))
        levels = range(len(placement.hardware.network))
        return [np.ravel(placement.crossings(tp, pp, dp, level)).tolist() for level in levels]

    used = np.ones(len(plans))
    dp = replicas(plans)
    for _ in range(_ROUNDS):
        now = np.where(np.isfinite(dp), dp, 1.0)
        if crossings(now) == crossings(used):
            break
        used = now
        dp = np.maximum(dp, replicas([plan._replace(dp=int(count)) for plan, count in zip(plans, now, strict=True)]))
    return dp


def _next(counts: Array, allowed: tuple[int, ...]) -> Array:
    """The next higher count of those allowed; all are where none is named."""
    if not allowed:
        return counts
    ordered = np.append(np.sort(np.array(allowed, dtype=float)), np.inf)
    return np.asarray(ordered[np.searchsorted(ordered, counts)])
