"""One question to the planner: what to serve, on what, for which goal, within which limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple

from planner.errors import InputError
from planner.plans.plan import grid_axes
from planner.plans.space import Filters
from planner.specs.engine import ATTENTION, FFN, Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.speculation import check_accept, check_tokens
from planner.specs.workload import ARRIVALS, SCHEDULES, Workload
from planner.units import MS

Objective = Literal["latency", "ttft", "tpot", "throughput", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("latency", "ttft", "tpot", "throughput", "cost")
MOST = 10**9
"""Chips, tokens or requests beyond which a number is a slip of the keyboard."""
CHIPS = 8
"""Chips there are, where nothing says how many and nothing asks."""
MOST_CHIPS = 1024
"""How many chips are looked at where their number is sought, unless another bound is given."""
TIMES = ("ttft", "tpot", "latency")
"""Times that may be limited."""
SEARCHED = ("throughput", "cost")
"""Goals for which the concurrency is searched when none is given."""
LAYOUTS: dict[str, Sequence[str]] = {
    "attention": ATTENTION, "prefill_attention": ATTENTION, "ffn": FFN, "prefill_ffn": FFN,
}  # fmt: skip
"""Dimensions of a plan that are words, with those that exist; its others are degrees."""


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
    fewest: bool = False
    """`gpus` is the most chips there may be, and the fewest that do are looked for."""

    @property
    def searches(self) -> bool:
        """Whether the load of each plan is searched for, since none is given and the goal depends on it."""
        work = self.workload
        given = work.concurrency is not None or work.arrival_rate is not None
        return not given and (self.pareto or self.objective in SEARCHED)


def chips_for(
    given: int | None, most: int | None, limits: Limits, rate: float | None, slice_: str | None = None
) -> tuple[int, bool]:
    """(how many chips there are, or may be; whether the fewest are sought).

    Those given; else the fewest where a limit on time, an arrival rate or a bound asks how many; else 8.

    Raises:
        InputError: a number and a bound on it.
    """
    if given is not None:
        if most is not None:
            raise InputError("--gpus says how many chips there are, --max-gpus how many to look at; give one of them")
        return given, False
    asks = rate is not None or any(getattr(limits, name) is not None for name in TIMES)
    if most is None and (slice_ is not None or not asks):
        return CHIPS, False
    return most or MOST_CHIPS, True


def check(request: Request) -> None:
    """Refuses a request that makes no sense, whatever the plans.

    Raises:
        InputError: a value of another kind or out of range, a word that is none of those that exist, or a context
            beyond the model's.
    """
    work, limits = request.workload, request.limits
    optional = {"concurrency": work.concurrency, "max-context": work.max_context}
    given = {name: value for name, value in optional.items() if value is not None}
    lengths = {} if work.lengths else {"isl": work.isl, "osl": work.osl}
    for name, value in {"gpus": request.gpus, **lengths, **given}.items():
        if not _is_whole(value):
            raise InputError(f"--{name} must be a whole number, found {value!r}")
        if not 1 <= value <= MOST:
            bound = "at least 1" if value < 1 else f"at most {MOST}"
            raise InputError(f"--{name} must be {bound}, found {value}")
    for name in TIMES:
        _check_positive(f"max-{name}", getattr(limits, name), MS)
    _check_positive("price", request.usd_per_chip_hour)
    _check_positive("memory-limit", limits.memory)
    _check_positive("memory-fraction", limits.memory_fraction)
    check_memory(limits)
    check_prefix_hit("--prefix-hit", work.prefix_hit)
    _check_arrivals(request)
    if work.speculation is not None:
        check_tokens("--spec-tokens", work.speculation.tokens)
        check_accept("--spec-accept", work.speculation.accept)
    for name, text in {"weights": work.weights, "kv-cache": work.kv_cache, "slice": request.slice}.items():
        if text is not None and not isinstance(text, str):
            raise InputError(f"--{name} must be a text, found {text!r}")
    _check_filters(request.filters)
    words = {
        "objective": (request.objective, OBJECTIVES),
        "schedule": (work.schedule, SCHEDULES),
        "arrivals": (work.arrivals, ARRIVALS),
    }
    for name, (word, allowed) in words.items():
        if word not in allowed and not (word is None and name != "objective"):
            raise InputError(f"--{name}: expected one of {', '.join(allowed)}, found {word!r}")
    if request.fewest and request.pareto and work.arrival_rate is not None:
        raise InputError("--pareto over several numbers of chips has no arrival rate; say how many with --gpus")
    if work.osl < 2 and (request.objective == "tpot" or request.pareto):
        goal = "--pareto" if request.pareto else "--objective tpot"
        raise InputError(f"{goal} needs answers of at least 2 tokens, --osl is {work.osl}")
    check_lengths(request)


def _check_arrivals(request: Request) -> None:
    """Refuses a rate that no steady state has."""
    work = request.workload
    _check_positive("arrival-rate", work.arrival_rate)
    if work.arrival_rate is not None and work.concurrency is not None:
        raise InputError("--arrival-rate and --concurrency both say how many requests are in flight; give one of them")
    if work.arrival_rate is not None and (work.schedule or request.engine.scheduler.schedule) == "static":
        raise InputError(
            "--arrival-rate: a static batch starts when it is full, which no steady rate describes; "
            "use --schedule continuous, or --concurrency"
        )


def check_lengths(request: Request) -> None:
    """Refuses lengths that a model or a schedule cannot have.

    Raises:
        InputError: a context beyond the model's, or lengths that differ in a static batch.
    """
    work = request.workload
    if work.lengths is not None and (work.schedule or request.engine.scheduler.schedule) == "static":
        raise InputError(
            "lengths that differ: a static batch waits for its longest answer, which is not modelled; "
            "use --schedule continuous, or one length"
        )
    if work.lengths is None:
        check_context(request.model, work.isl, work.osl, work.max_context)
    elif not work.max_context and (work.isl + work.osl) * work.lengths.longest > request.model.max_context:
        raise InputError(
            f"the longest request has {(work.isl + work.osl) * work.lengths.longest:.0f} tokens, more than "
            f"{request.model.name}'s context of {request.model.max_context}; shorten them, or give --max-context "
            "if the deployment extends it"
        )


def check_number(name: str, value: Any) -> None:
    """Refuses what is no number, which Python would only notice in the middle of a formula.

    Raises:
        InputError: a text, a truth value, or anything else.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"--{name} must be a number, found {value!r}")


def check_prefix_hit(name: str, value: Any) -> None:
    """Refuses what is no share of a prompt; `name` is how the user knows it.

    Raises:
        InputError: no number, or none from 0 to 1.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{name} must be a number, found {value!r}")
    if not 0 <= float(value) <= 1:
        raise InputError(f"{name} must be from 0 to 1, the share of a prompt that is cached, found {float(value):g}")


def check_memory(limits: Limits) -> None:
    """Refuses two limits on the same memory.

    Raises:
        InputError: both a size and a fraction.
    """
    if limits.memory is not None and limits.memory_fraction is not None:
        raise InputError("--memory-limit and --memory-fraction limit the same memory; give one of them")


def _check_positive(name: str, value: Any, unit: float = 1.0) -> None:
    if value is None:
        return
    check_number(name, value)
    if not 0 < value < math.inf:
        raise InputError(f"--{name} must be above 0, found {value / unit:g}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_filters(filters: Any) -> None:
    if not isinstance(filters, Filters):
        raise InputError(f"filters must be Filters, as Filters(tp=(4, 8)), found {filters!r}")
    for name, values in filters._asdict().items():
        if name == "grid":
            _check_grids(values)
            continue
        allowed = LAYOUTS.get(name)
        if isinstance(values, Sequence) and not isinstance(values, str):
            wrong = [
                value for value in values if not (value in allowed if allowed else _is_whole(value) and value >= 1)
            ]
            if not wrong:
                continue
        expected = f"words out of {', '.join(allowed)}" if allowed else "whole numbers of at least 1"
        raise InputError(f"filter {name}: expected a tuple of {expected}, found {values!r}")


def _check_grids(values: Any) -> None:
    if not isinstance(values, tuple) or not all(isinstance(value, str) for value in values):
        raise InputError(f"filter grid: expected a tuple of texts, as ('4x16',), found {values!r}")
    for value in filter(None, values):
        grid_axes(value)


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
