"""One question to the planner: what to serve, on what, for which goal, within which limits."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from planner.errors import InputError
from planner.plans.space import Filters
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.workload import ARRIVALS, SCHEDULES, Workload
from planner.units import MS

Objective = Literal["latency", "ttft", "tpot", "throughput", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "ttft", "tpot", "throughput", "cost")
MOST = 10**9
"""Chips, tokens or requests beyond which a number is a slip of the keyboard."""
TIMES = ("ttft", "tpot", "latency")
"""Times that may be limited."""
SEARCHED = ("throughput", "cost")
"""Goals for which the concurrency is searched when none is given."""


class Limits(NamedTuple):
    """What a plan must keep; none = no limit. Seconds and bytes."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    memory: float | None = None
    memory_fraction: float | None = None


class Request(NamedTuple):
    """One question to the planner: what to serve, on what, for which goal, within which limits."""

    model: Model
    hardware: Hardware
    engine: Engine
    gpus: int
    workload: Workload = Workload()
    objective: Objective = "latency"
    limits: Limits = Limits()
    filters: Filters = Filters()
    usd_per_chip_hour: float | None = None
    slice: str | None = None
    pareto: bool = False


def check(request: Request) -> None:
    """Refuses a request that makes no sense, whatever the plans.

    Raises:
        InputError: a number out of range, a word that is none of those that exist, or a context beyond the model's.
    """
    work, limits = request.workload, request.limits
    whole = {"gpus": request.gpus, "isl": work.isl, "osl": work.osl, "concurrency": work.concurrency}
    for name, value in {**whole, "max-context": work.max_context}.items():
        if value is not None and not 1 <= value <= MOST:
            bound = "at least 1" if value < 1 else f"at most {MOST}"
            raise InputError(f"--{name} must be {bound}, found {value}")
    times = {f"max-{name}": None if (limit := getattr(limits, name)) is None else limit / MS for name in TIMES}
    for name, positive in {**times, "price": request.usd_per_chip_hour}.items():
        if positive is not None and not 0 < positive < math.inf:
            raise InputError(f"--{name} must be above 0, found {positive:g}")
    words = {"objective": (request.objective, OBJECTIVES), "schedule": (work.schedule, SCHEDULES)}
    for name, (word, allowed) in {**words, "arrivals": (work.arrivals, ARRIVALS)}.items():
        if word not in allowed:
            raise InputError(f"--{name}: expected one of {', '.join(allowed)}, found {word!r}")
    if work.osl < 2 and (request.objective == "tpot" or request.pareto):
        goal = "--pareto" if request.pareto else "--objective tpot"
        raise InputError(f"{goal} needs answers of at least 2 tokens, --osl is {work.osl}")
    check_context(request.model, work.isl, work.osl, work.max_context)


def check_context(model: Model, isl: float, osl: float, max_context: float | None) -> None:
    """Refuses a workload longer than the model can attend to, unless a context is asked for explicitly.

    Raises:
        InputError: isl + osl above the model's maximum.
    """
    if not max_context and isl + osl > model.max_context:
        raise InputError(
            f"isl {isl:.0f} + osl {osl:.0f} = {isl + osl:.0f} tokens is more than {model.name}'s context of "
            f"{model.max_context}; shorten them, or give --max-context if the deployment extends it"
        )
