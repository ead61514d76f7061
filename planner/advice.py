"""What to say when no plan satisfies a request: which limit, how close the best comes, what change would do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planner.errors import InputError, NoPlanError
from planner.plans.plan import Plan
from planner.plans.sharding import WORDS, sharding_of
from planner.plans.space import Refused
from planner.pricing import Priced, floored, most_requests
from planner.request import MOST_CHIPS, TIMES, Request
from planner.results import Results
from planner.sizing import size_all
from planner.specs.dtypes import WEIGHTS
from planner.units import GIB, MS

SMALLEST = "The smallest change that would do: "


def why_none(request: Request, priced: Priced) -> str:
    """The sentences for exit 3."""
    upto = "up to " if request.fewest else ""
    where = f"{request.model.name} on {upto}{request.gpus} x {request.hardware.name}"
    if priced.results is not None:
        return f"no plan for {where} keeps the limits on time. {_times(request, priced.results)}"
    if priced.needed is not None:
        plan, chips = priced.needed
        least = f"{plan.label} needs the fewest, {chips}"
        return f"no plan for {where} carries the load: {least}. {SMALLEST}--max-gpus {chips}"
    if priced.highest is not None:
        return _too_many(request, where, *priced.highest)
    if priced.unmet is not None:
        alone = "even with one request in flight, and more replicas make none faster"
        return f"no plan for {where} keeps the limits on time, {alone}. {_times(request, priced.unmet)}"
    return _none_fits(request, where, priced.refused)


def _none_fits(request: Request, where: str, plans: Sequence[Refused]) -> str:
    """The sentences where no plan is valid or fits in memory."""
    memory = [refused for refused in plans if refused.limit == "memory"]
    if memory:
        closest = _closest(request)
        alone = closest._replace(dp=1)  # where chips are counted, replicas were looked at one by one
        reason = next(refused.reason for refused in memory if refused.plan._replace(dp=1) == alone)
        what = "runs so many requests" if reason.startswith("the engine runs at most") else "fits in memory"
        return f"no plan for {where} {what}. Closest: {_labelled(closest, reason)}. {_roomier(request)}"
    if plans:
        first = plans[0]
        wider = any(
            word not in WORDS and sharding_of(word, 0).chips > request.gpus for word in request.filters.attention
        )
        enough = _fewest_chips(request) if wider and not request.filters.tp else None
        change = f". {SMALLEST}--gpus {enough}" if enough else ""
        return f"no plan for {where} is valid. {_labelled(first.plan, first.reason)}{change}"
    return f"no plan for {where} is left by the filters"


def _too_many(request: Request, where: str, plan: Plan, rate: float) -> str:
    """What can be sustained, and how many chips would sustain what is asked."""
    limits = " within the limits" if any(getattr(request.limits, name) is not None for name in TIMES) else ""
    changes = [f"--arrival-rate {floored(rate)}"]
    if request.slice is None and request.hardware.torus is None:
        most = max(MOST_CHIPS, request.gpus)
        sized = size_all(request._replace(gpus=most, fewest=True, filters=request.filters._replace(dp=())))
        if sized.results is not None:
            changes.insert(0, f"--gpus {int(sized.results['gpus'].min())}")
    return (
        f"no plan for {where} sustains {request.workload.arrival_rate:g} requests/s{limits}; {plan.label} sustains "
        f"most, {floored(rate)}. {SMALLEST}{' or '.join(changes)}"
    )


def _labelled(plan: Plan, reason: str) -> str:
    """A reason with its plan, which some reasons begin with already."""
    return reason if reason.startswith(f"{plan.label} ") else f"{plan.label}: {reason}"


def _times(request: Request, results: Results) -> str:
    """The best that each broken limit could be, and limits that some plan keeps together."""
    limits = {name: limit / MS for name in TIMES if (limit := getattr(request.limits, name)) is not None}
    reached = {name: np.nan_to_num(results[f"{name}_ms"].astype(float)) for name in limits}
    best = {name: _first_least(results, reached[name]) for name in limits}
    nearest = _first_least(results, np.max([reached[name] / limits[name] for name in limits], axis=0))
    plan = results["plan"][nearest]
    sentences = [
        f"--max-{name} {limits[name]:g}: the best is {_rounded_up(reached[name][row])} ms by {results['plan'][row]}"
        for name, row in best.items()
        if reached[name][row] > limits[name]
    ]
    if not sentences:
        closest = " and ".join(f"{name} {_rounded_up(reached[name][nearest])} ms" for name in limits)
        sentences = [f"each limit is reachable alone, but not together; {plan} comes closest with {closest}"]
    over = [name for name in limits if reached[name][nearest] > limits[name]]
    needed = " ".join(f"--max-{name} {_rounded_up(reached[name][nearest])}" for name in over)
    return f"{'; '.join(sentences)}. {SMALLEST}{needed}, which {plan} keeps"


def _first_least(results: Results, values: np.ndarray) -> int:
    """Index of the least value; of equals the plan that a ranking names first."""
    used = results["gpus"] - results["idle_gpus"]
    text = results["plan"].astype(str)
    return int(np.lexsort((text, results["tp"], used, -results["max_concurrency"], values))[0])


def _rounded_up(value: float) -> str:
    """Four digits, not below the value, so that it can be used as a limit."""
    if value <= 0:
        return "0"
    digits = 3 - int(np.floor(np.log10(value)))
    step = 10.0**-digits
    rounded = np.ceil(value / step * (1 - 1e-12)) * step
    return f"{rounded:.{max(0, digits)}f}"


def _closest(request: Request) -> Plan:
    """Of the plans that fit but for KV the one that holds most requests, else the one that is least too large."""
    plans = most_requests(request)
    holding = [(requests, -index) for index, (*_, requests) in enumerate(plans) if requests > 0]
    if holding:
        return plans[-max(holding)[1]][0]
    return min(plans, key=lambda found: found[2])[0]


def _roomier(request: Request) -> str:
    """The smallest changes with which some plan would fit."""
    changes = list(_changes(request))
    if changes:
        return SMALLEST + " or ".join(changes)
    return "No number of chips or weight format within reach would do"


def _changes(request: Request) -> Iterator[str]:
    filters = request.filters
    if not any((filters.tp, filters.pp, filters.dp, request.slice)):
        enough = _fewest_chips(request)
        if enough:
            yield f"--gpus {enough}"
    stored = request.workload.weights or request.model.weights
    for dtype in ("fp8", "int4"):
        smaller = request._replace(workload=request.workload._replace(weights=dtype))
        if WEIGHTS[dtype].bytes < WEIGHTS[stored].bytes and _holds(smaller):
            yield f"--weights {dtype}"
            break
    most = int(max((requests for *_, requests in most_requests(request)), default=0))
    if most >= 1:
        yield f"--concurrency {most}"
        return
    yield from _other_memory(request)


def _fewest_chips(request: Request) -> int | None:
    """The smallest number of chips with which some plan fits: more chips only add plans."""

    def holds(gpus: int) -> bool:
        return _holds(request._replace(gpus=gpus))

    torus = request.hardware.torus
    if torus is not None:
        sizes = sorted(shape.chips for shape in torus.legal_slices() if shape.chips > request.gpus)
        return next((size for size in sizes if holds(size)), None)
    low, high = request.gpus, 2 * request.gpus
    while not holds(high):
        if high >= MOST_CHIPS:
            return None
        low, high = high, min(2 * high, MOST_CHIPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _other_memory(request: Request) -> Iterator[str]:
    """The limit nearest to the one asked for with which some plan fits, in whole GiB or hundredths of the chip.

    It may lie on either side: weights that do not fit want more, what an engine takes outside its budget wants less.
    """
    limits = request.limits
    if limits.memory is not None:
        asked = limits.memory / GIB
        steps = {
            gib: (limits._replace(memory=gib * GIB), f"--memory-limit {gib}GiB")
            for gib in range(1, int(request.hardware.chip.memory_gib) + 1)
        }
    elif limits.memory_fraction is not None:
        asked = limits.memory_fraction * 100
        steps = {
            percent: (limits._replace(memory_fraction=percent / 100), f"--memory-fraction {percent / 100:g}")
            for percent in range(1, 101)
        }
    else:
        return
    for step in sorted(steps, key=lambda step: abs(step - asked)):
        changed, text = steps[step]
        if _holds(request._replace(limits=changed)):
            yield text
            return


def _holds(request: Request) -> bool:
    """Whether some plan holds the requests that are asked for."""
    asked = request.workload.concurrency or 1
    try:
        return any(requests >= asked for *_, requests in most_requests(request))
    except (InputError, NoPlanError):
        return False
