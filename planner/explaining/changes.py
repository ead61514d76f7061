"""What would help: the request asked again with one input changed, for each of a list of changes.

Nothing is derived from what bounds a plan: every change makes another request, which is ranked as any other is. Plans
may change with it, unless one is pinned; then it stays, but where the number of chips changes or it is itself the
change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from planner.costs.serving import formats_of
from planner.errors import InputError, NoPlanError
from planner.explaining.breakdown import pinned
from planner.explaining.goal import goal_value
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.ranking import rank
from planner.request import Request
from planner.specs.dtypes import KV_CACHE, WEIGHTS
from planner.specs.engine import Engine
from planner.specs.hardware import CollectiveKernel, Hardware, KernelConstants

Machine = tuple[Hardware, Engine]
LATENCIES = ("latency_us", "base_us", "hop_us", "inner_hop_us")
OPEN_TO_ALL = ("formats", "chips", "engine", "plan", "prompt")
"""Kinds of changes that need no other silicon or wires, and no software that nobody has."""


class Change(NamedTuple):
    """One input changed."""

    name: str
    """In words, as `twice the memory bandwidth`."""
    kind: str
    """hardware, overhead, formats, chips, engine, plan or prompt."""
    apply: Callable[[Request], Request | None]
    """The changed request; none where there is nothing to change."""


class Effect(NamedTuple):
    """What a change does to the goal."""

    change: Change
    value: float | None
    """The goal with it, in the goal's unit; none where no plan is left."""
    gain: float
    """Share of the goal that it saves; below 0 it costs."""
    plan: str | None
    """The plan that comes first with it."""
    error: str | None = None


def changes(machines: Sequence[Machine] = ()) -> list[Change]:
    """Every change that is tried.

    Args:
        machines: the same chip under other engines, each with its overrides of the chip's file.
    """
    return [
        Change("twice the memory bandwidth", "hardware", partial(_chip, key="memory_bandwidth_gb_per_s", factor=2.0)),
        Change("twice the compute", "hardware", partial(_compute, factor=2.0)),
        Change("twice the memory per chip", "hardware", partial(_chip, key="memory_gib", factor=2.0)),
        Change("links inside a node twice as fast, at half the latency", "hardware", partial(_links, across=False)),
        Change("links between nodes twice as fast, at half the latency", "hardware", partial(_links, across=True)),
        Change("no host time", "overhead", _no_host),
        Change("no launch time of kernels", "overhead", _no_launches),
        *(Change(f"{name} weights", "formats", partial(_weights, name=name)) for name in ("fp8", "int4")),
        Change("fp8 KV cache", "formats", partial(_kv, name="fp8")),
        Change("fp8 weights and KV cache", "formats", _both),
        Change("twice the chips", "chips", partial(_chips, factor=2.0)),
        Change("half the chips", "chips", partial(_chips, factor=0.5)),
        Change("half the prompt", "prompt", _prompt),
        Change("the best plan of these chips", "plan", lambda request: request),
        *(
            Change(f"engine {engine.name}", "engine", partial(_engine, machine=(hardware, engine)))
            for hardware, engine in machines
        ),
    ]


def effects(request: Request, now: float, tried: Sequence[Change], only: Plan | None = None) -> list[Effect]:
    """Every change that applies, the most helpful first.

    Args:
        request: what is asked.
        now: its goal as it is, in the goal's unit.
        tried: of `changes`.
        only: the plan that is explained, where it is given; none = the winner of the ranking.
    """
    found = []
    for change in tried:
        if change.kind == "plan" and only is None:
            continue
        changed = change.apply(request)
        if changed is None:
            continue
        if only is not None:
            free = change.kind in ("chips", "plan")
            changed = changed._replace(filters=Filters()) if free else pinned(changed, only)
        found.append(_effect(change, changed, now))
    return sorted(found, key=lambda effect: -effect.gain)


def _effect(change: Change, changed: Request, now: float) -> Effect:
    try:
        ranking = rank(changed)
    except (NoPlanError, InputError) as error:
        return Effect(change, None, float("-inf"), None, str(error))
    value = goal_value(ranking.results, 0, changed.objective)
    return Effect(change, value, 1 - value / now, str(ranking.results["plan"][0]))


def _chip(request: Request, key: str, factor: float) -> Request:
    chip = request.hardware.chip
    changed = chip._replace(**{key: getattr(chip, key) * factor})
    return request._replace(hardware=request.hardware._replace(chip=changed))


def _compute(request: Request, factor: float) -> Request:
    chip = request.hardware.chip
    peaks = {dtype: peak * factor for dtype, peak in chip.compute_tflops.items()}
    return request._replace(hardware=request.hardware._replace(chip=chip._replace(compute_tflops=peaks)))


def _links(request: Request, across: bool) -> Request | None:
    """All levels behind the innermost one, or that one: double rate, half the latency of their kernels."""
    hardware = request.hardware
    changed = {level.name for place, level in enumerate(hardware.network) if (place > 0) == across}
    if not changed or (across and request.gpus <= (hardware.domain or request.gpus)):
        return None
    network = tuple(
        level._replace(bandwidth_gb_per_s=level.bandwidth_gb_per_s * 2) if level.name in changed else level
        for level in hardware.network
    )
    kernels = tuple(_quicker(row) if row.level in changed else row for row in hardware.collectives)
    return request._replace(hardware=hardware._replace(network=network, collectives=kernels))


def _quicker(row: CollectiveKernel) -> CollectiveKernel:
    ranks = {size: each._replace(latency_us=each.latency_us / 2) for size, each in row.ranks.items()}
    times = {key: value / 2 for key in LATENCIES if (value := getattr(row, key, None)) is not None}
    return row._replace(ranks=ranks, **times)


def _no_host(request: Request) -> Request | None:
    host = request.engine.host
    spent = [key for key, value in host._asdict().items() if isinstance(value, int | float) and value]
    if not spent:
        return None
    none: dict[str, Any] = dict.fromkeys(spent, 0.0)
    return request._replace(engine=request.engine._replace(host=host._replace(**none)))


def _no_launches(request: Request) -> Request | None:
    """Kernels that take no longer than their work, as in one fused program."""
    kernels: dict[str, dict[str, KernelConstants]] = {}
    spent = False
    for kind, by_dtype in request.hardware.kernels.items():
        kernels[kind] = {}
        for dtype, constants in by_dtype.items():
            spent |= constants.fixed > 0
            in_step = None if constants.in_step is None else constants.in_step._replace(fixed_us=0.0)
            kernels[kind][dtype] = constants._replace(fixed_us=0.0, in_step=in_step)
    return request._replace(hardware=request.hardware._replace(kernels=kernels)) if spent else None


def _weights(request: Request, name: str) -> Request | None:
    now = request.workload.weights or request.model.weights
    if WEIGHTS[name].bytes >= WEIGHTS[now].bytes:
        return None
    # the cache keeps its format: an engine's rule may choose it by the weights'
    cache = _formats(request)
    return request._replace(workload=request.workload._replace(weights=name, kv_cache=cache))


def _kv(request: Request, name: str) -> Request | None:
    if KV_CACHE[name].bytes >= KV_CACHE[_formats(request)].bytes:
        return None
    return request._replace(workload=request.workload._replace(kv_cache=name))


def _both(request: Request) -> Request | None:
    weights = _weights(request, "fp8")
    return None if weights is None else _kv(weights, "fp8")


def _formats(request: Request) -> str:
    """Dtype of the KV cache as it is."""
    work = request.workload
    return formats_of(request.model, request.hardware, request.engine, work.weights, work.kv_cache).kv.name


def _chips(request: Request, factor: float) -> Request | None:
    chips = int(request.gpus * factor)
    if chips < 1 or request.slice is not None:
        return None
    filters = request.filters._replace(dp=())  # as many replicas as they hold
    return request._replace(gpus=chips, filters=filters)


def _prompt(request: Request) -> Request | None:
    work = request.workload
    return None if work.isl < 2 else request._replace(workload=work._replace(isl=work.isl // 2))


def _engine(request: Request, machine: Machine) -> Request | None:
    hardware, engine = machine
    if engine.name == request.engine.name and engine.version == request.engine.version:
        return None
    return request._replace(hardware=hardware, engine=engine)
