"""Shift parallelism: sequence parallelism for large iterations, tensor parallelism of the same chips for small ones.

Both keep the KV cache alike (`layout`), so that a replica changes between two passes for nothing but a second copy of
its share of the weights: w / TP of the base and w / (SP TP) of the shift, 1 / SP more. A pass of n tokens runs in the
base where n is above a threshold, else in the shift (Rajbhandari et al. 2025, algorithm 2). Where the two take equally
long is found here by pricing both, for decode steps and for prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Pass, Structure, causal_pairs
from planner.costs.memory import needed_tokens, room
from planner.costs.rows import Rows, structure_of
from planner.costs.serving import Estimates, Setting, price_on, replica_of
from planner.costs.step import PassTime, Replica
from planner.costs.weights import Shard, Stages, stage_weight_bytes
from planner.errors import InputError, NoPlanError
from planner.phases.shift.layout import Base, bases, refusal
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import tp_allowed
from planner.pricing import setting_of
from planner.request import Request
from planner.simulating.iterations import Maker
from planner.specs.model import Model
from planner.units import GIB

Array = NDArray[np.float64]
LEAST, MOST = 1, 1 << 17
"""Tokens of a pass between which the threshold is looked for."""
ULYSSES = structure_of(Plan(tp=2, cp=2, prefill_attention="ulysses"))
"""Work of a base: tokens divided over its SP groups, attention over the heads of all (`costs.context`)."""


@dataclass(frozen=True, eq=False)
class ShiftReplica(Replica):
    """Replicas whose passes run in the base above a threshold of tokens, else over the tensor-parallel group of all."""

    threshold: float = 0.0

    @cached_property
    def shifted(self) -> Replica:
        """The same chips as one tensor-parallel group."""
        shared: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Replica)}
        return Replica(**shared | {"structure": Structure(), "cp": None, "y": None})

    def pass_time(self, work: Pass) -> PassTime:
        """One pass, as the number of its tokens says."""
        large, small = super().pass_time(work), self.shifted.pass_time(work)
        runs = np.asarray(work.tokens) > self.threshold
        pairs = (getattr(large, name).where(runs, getattr(small, name)) for name in ("whole", "slowest"))
        return PassTime(*pairs)


class Memory(NamedTuple):
    """Bytes of a chip, and the tokens that a replica holds."""

    base: float
    """Weights of the base; 0 where there is none."""
    shift: float
    """Weights of the shift, likewise; together with the base's where both run."""
    other: float
    limit: float
    tokens: float
    """KV tokens of a replica, in whole blocks; below 0 where not even the weights fit."""

    @property
    def weights(self) -> float:
        """Of both."""
        return self.base + self.shift


class System(NamedTuple):
    """One way to use the chips at every load."""

    name: str
    """`shift`, or a label: `DP8`, `TP8`, `SP8`."""
    tp: int
    """Ranks that divide the projections."""
    replicas: int
    chips: int
    """Of one replica."""
    setting: Setting
    make: Maker
    memory: Memory

    def rows(self, isl: float, osl: float, concurrency: Array | float) -> Rows:
        """Loads of the whole deployment."""
        return Rows.of(tp=self.tp, pp=1, dp=self.replicas, isl=isl, osl=osl, concurrency=concurrency)

    def most(self, isl: float, osl: float) -> int:
        """Requests of the deployment that fit."""
        each = self.memory.tokens // float(needed_tokens(self.setting.engine, isl, osl, 0.0))
        return self.replicas * int(min(each, self.setting.engine.scheduler.max_sequences))

    def price(self, isl: float, osl: float, loads: Array) -> Estimates:
        """At loads; NaN where they do not fit."""
        rows = self.rows(isl, osl, loads)
        batch = np.ceil(rows.concurrency / rows.dp)
        batch = np.where(rows.concurrency <= self.most(isl, osl), batch, 0.0)
        found = price_on(self.setting, rows, batch, self.make(self.setting, rows))
        served = found.requests_per_s * rows.concurrency / np.maximum(found.running, 1.0)  # no more than there are
        return found._replace(requests_per_s=served)


class Thresholds(NamedTuple):
    """Tokens of a pass above which the base is the faster; none = at no size that is looked at."""

    decodes: int | None
    """Of decode steps at the context of the workload."""
    prompts: int | None
    """Of one prompt's passes without decodes."""
    chosen: int
    """What a pass is compared with: the one given, or that of prompts, of which large passes are made."""


class Shifting(NamedTuple):
    """A deployment that shifts, and what it is compared with."""

    request: Request
    base: Base
    """Of one replica."""
    replicas: int
    thresholds: Thresholds
    systems: tuple[System, ...]
    """Shift first; those that fit."""
    left_out: dict[str, str]
    """Systems that do not, with the reason; and bases that were not chosen."""
    loads: tuple[int, ...]
    estimates: tuple[Estimates, ...]
    """Of each system at the loads."""
    peak: tuple[Estimates, ...]
    """Of each system at the load of its own at which it serves most."""


def passes(setting: Setting, make: Maker, tp: int, work: Pass) -> Array:
    """Seconds of passes of one replica; the columns of `work` broadcast."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(column, dtype=float)) for column in work))
    rows = Rows.of(tp=np.full(len(columns[0]), tp), pp=1, dp=1, isl=1, osl=1, concurrency=1)
    return np.asarray(make(setting, rows).pass_time(Pass(*columns)).whole.total)


def prompt(tokens: Array | float) -> Pass:
    """One prompt by itself."""
    return Pass(0.0, 0.0, tokens, causal_pairs(tokens), 0.0, 1.0, 1.0)


def memory_of(setting: Setting, base: Base, *, sequence: bool, shift: bool) -> Memory:
    """What a chip holds.

    Args:
        setting: model, engine, machine and formats.
        base: of one replica; its P chips share the KV heads.
        sequence: whether the weights of the base are there.
        shift: whether those of tensor parallelism over all P chips are.
    """
    model, engine, stored = setting.model, setting.engine, setting.formats.weights
    stages = Stages.of(model, np.ones(1, dtype=int))

    def bytes_of(tp: int) -> float:
        shard = Shard.for_engine(model, engine, stored.name, np.array([float(tp)]))
        return float(np.ravel(stage_weight_bytes(model, shard, stages, stored)[0])[0])

    shard = Shard.for_engine(model, engine, stored.name, np.array([float(base.chips)]))
    space = room(model, engine, shard, stages, setting.formats, Structure(), setting.budget)
    first = [float(np.ravel(each)[0]) for each in (space.other[0], space.kv_token[0], space.tables[0])]
    other, token, tables = first
    large, small = bytes_of(base.tp) * sequence, bytes_of(base.chips) * shift
    free = space.limit - large - small - other - tables
    blocks = np.floor(free / token / space.block * (1 + 1e-12))
    return Memory(large, small, other + tables, space.limit, float(blocks * space.block))


def thresholds(setting: Setting, base: Base, context: float, given: int | None = None) -> Thresholds:
    """Where base and shift take equally long.

    Args:
        setting: model, engine, machine and formats.
        base: of one replica.
        context: tokens that decodes attend to.
        given: the threshold that is used; none = that of prompts (never, where the base is never faster).
    """

    def behind(work: Callable[[Array], Pass]) -> Callable[[Array], Array]:
        def slower(tokens: Array) -> Array:
            large = passes(setting, sequence_maker(base), base.tp, work(tokens))
            return large - passes(setting, replica_of, base.chips, work(tokens))

        return slower

    decodes = _last_slower(behind(lambda tokens: Pass(tokens, context)))
    prompts = _last_slower(behind(prompt))
    return Thresholds(decodes, prompts, given if given is not None else prompts if prompts is not None else MOST)


def _last_slower(slower: Callable[[Array], Array]) -> int | None:
    """The greatest size at which the base is no faster, the base being faster at all greater sizes looked at."""
    sizes = np.unique(np.round(np.geomspace(LEAST, MOST, 120)))
    found = np.flatnonzero(slower(sizes) >= 0)
    if not len(found):
        return 0
    if found[-1] == len(sizes) - 1:
        return None
    low, high = int(sizes[found[-1]]), int(sizes[found[-1] + 1])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if slower(np.array([float(middle)]))[0] >= 0 else (low, middle)
    return low


def sequence_maker(base: Base) -> Maker:
    """Replicas that stay in the base: rows have its TP as their own."""

    def make(setting: Setting, rows: Rows) -> Replica:
        if base.sp == 1:
            return replica_of(setting, rows)
        return replica_of(setting._replace(structure=ULYSSES), rows._replace(cp=np.full_like(rows.tp, base.sp)))

    return make


def shift_maker(base: Base, threshold: int) -> Maker:
    """Replicas that shift: rows have the base's TP as their own."""

    def make(setting: Setting, rows: Rows) -> ShiftReplica:
        own = sequence_maker(base)(setting, rows)
        shared = {each.name: getattr(own, each.name) for each in fields(Replica)}
        return ShiftReplica(**shared, threshold=float(threshold))

    return make


def is_plain(model: Model) -> bool:
    """Whether all layers are dense and attend to all tokens, with keys and values of their own."""
    attention = model.attention
    return model.experts is None and model.linear is None and attention.latent is None and attention.window is None


def check(request: Request) -> None:
    """Refuses what is not priced.

    Raises:
        InputError: experts, latent or windowed attention, another schedule, drafts, lengths that differ.
    """
    model, work = request.model, request.workload
    if not is_plain(model):
        raise InputError(
            f"shift parallelism of {model.name}: only dense models with plain attention to all tokens are priced"
        )
    if (work.schedule or request.engine.scheduler.schedule) == "static":
        raise InputError(
            f"shift parallelism is about continuous batching, and engine {request.engine.name} runs static batches; "
            "give another --engine"
        )
    if work.lengths is not None:
        raise InputError("shift parallelism is about requests of one length; give one --isl and one --osl, or --trace")
    if work.osl < 2:
        raise InputError(
            f"shift parallelism weighs prompts against answers: --osl must be at least 2, it is {work.osl}"
        )
    if work.speculation is not None:
        raise InputError("shift parallelism is not priced with drafted tokens")


def shifting(
    request: Request, chips: int | None = None, base: Base | None = None, threshold: int | None = None
) -> Shifting:
    """A deployment that shifts beside tensor parallelism, data parallelism and sequence parallelism alone.

    Args:
        request: model, machine, engine, lengths; its concurrency, if any, is the only load.
        chips: of one replica; none = as many as the innermost domain has, up to the request's.
        base: none = of those that fit, the one that serves most.
        threshold: tokens of a pass above which the base runs; none = where the two take equally long.

    Raises:
        InputError: a model or workload that is not priced, or a base that is none of these chips.
        NoPlanError: no base fits, with the reason of each.
    """
    check(request)
    domain = request.hardware.domain or request.gpus
    chips = chips or (base.chips if base else min(domain, request.gpus))
    if base is not None and base.chips != chips:
        raise InputError(f"--base {base.label} has {base.chips} chips, the replica {chips}")
    if chips > request.gpus:
        raise InputError(f"a replica of {chips} chips: --gpus is {request.gpus}")
    if chips > domain:
        raise InputError(
            f"a replica of {chips} chips leaves the {domain} that {request.hardware.name} joins directly: its "
            "all-to-alls of every layer would cross the slower network, which is not priced; give fewer chips"
        )
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    setting = setting_of(request, placement, Structure())
    replicas = request.gpus // chips
    isl, osl = request.workload.isl, request.workload.osl
    found: list[tuple[Base, Thresholds, System]] = []
    left_out: dict[str, str] = {}
    for each in [base] if base is not None else bases(chips):
        reason = _refused(request, setting, each)
        if reason is not None:
            left_out[each.label] = reason
            continue
        limits = thresholds(setting, each, isl + osl / 2, threshold)
        memory = memory_of(setting, each, sequence=True, shift=True)
        system = System("shift", each.tp, replicas, chips, setting, shift_maker(each, limits.chosen), memory)
        if system.most(isl, osl) < 1:
            left_out[each.label] = _full(memory, isl + osl)
        else:
            found.append((each, limits, system))
    if not found:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in left_out.items()) or "one chip has nothing to cut"
        raise NoPlanError(f"no base of {chips} chips can shift: {reasons}{_fewer(request, setting, chips)}")
    peaks = [_peak(system, isl, osl) for _, _, system in found]
    best = max(range(len(found)), key=lambda place: float(peaks[place].requests_per_s[0]))
    for place, (each, _, _) in enumerate(found):
        if place != best:
            rate = float(peaks[place].requests_per_s[0])
            left_out[each.label] = f"serves at most {rate:.4g} requests/s"
    chosen, limits, system = found[best]
    systems = [system, *_others(setting, chosen, replicas, isl, osl, left_out)]
    loads = _loads(request, max(each.most(isl, osl) for each in systems))
    return Shifting(
        request, chosen, replicas, limits, tuple(systems), left_out, loads,
        tuple(each.price(isl, osl, np.array(loads, dtype=float)) for each in systems),
        tuple(_peak(each, isl, osl) for each in systems),
    )  # fmt: skip


def _fewer(request: Request, setting: Setting, chips: int) -> str:
    """How many chips of a replica some base divides the heads over, where these are not."""

    def divides(count: int) -> bool:
        return any(_refused(request, setting, base) is None for base in bases(count))

    fewer = None if divides(chips) else next((count for count in range(chips - 1, 1, -1) if divides(count)), None)
    return f"; --replica {fewer} would do" if fewer else ""


def _refused(request: Request, setting: Setting, base: Base) -> str | None:
    attention = request.model.attention
    reason = refusal(base, attention.heads, attention.kv_heads)
    for ranks in (base.tp, base.chips):
        reason = reason or tp_allowed(request.model, request.engine, ranks, setting.formats.weights.name)
    return reason


def _full(memory: Memory, tokens: float) -> str:
    if memory.tokens < 0:
        return (
            f"weights {memory.weights / GIB:.1f} GiB + runtime {memory.other / GIB:.1f} GiB exceed the limit of "
            f"{memory.limit / GIB:.1f} GiB per chip"
        )
    return f"KV room for {memory.tokens:.0f} tokens, a request has {tokens:.0f}"


def _others(
    setting: Setting, base: Base, replicas: int, isl: float, osl: float, left_out: dict[str, str]
) -> list[System]:
    """Tensor parallelism of the same chips, data parallelism of all, the base alone."""
    chips, every = base.chips, base.chips * replicas
    single = Base(1, 1)
    candidates = [
        System(f"TP{chips}", chips, replicas, chips, setting, replica_of,
               memory_of(setting, Base(1, chips), sequence=False, shift=True)),
        System(f"DP{every}", 1, every, 1, setting, replica_of, memory_of(setting, single, sequence=False, shift=True)),
        System(base.label, base.tp, replicas, chips, setting, sequence_maker(base),
               memory_of(setting, base, sequence=True, shift=False)),
    ]  # fmt: skip
    found = []
    for each in candidates:
        if each.most(isl, osl) < 1:
            left_out[each.name] = _full(each.memory, isl + osl)
        else:
            found.append(each)
    return found


def _loads(request: Request, most: int) -> tuple[int, ...]:
    given = request.workload.concurrency
    if given is not None:
        return (given,)
    return tuple(4**power for power in range(12) if 4**power <= most)


def _peak(system: System, isl: float, osl: float) -> Estimates:
    """At the load at which it serves most: one row."""
    most = system.most(isl, osl)
    loads = np.unique(np.round(np.geomspace(min(most, system.replicas), most, 40)))
    found = system.price(isl, osl, loads)
    best = int(np.nanargmax(found.requests_per_s))
    return system.price(isl, osl, loads[best : best + 1])
