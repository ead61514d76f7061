"""The first plan of a ranking and its rivals, to be priced again with changed constants.

Constants of kernels and of the host may differ from row to row, so that all their variations are one pricing; those
of collectives and of memory are priced one variation at a time, and only where an estimate says that they can matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.layers import Pass, Transfer, causal_pairs
from planner.costs.layouts import resting_bytes
from planner.costs.memory import cached_tokens
from planner.costs.rows import Rows, structure_of
from planner.costs.scheduling import budget_of
from planner.costs.serving import Fit, Setting, fit, price, replica_of
from planner.costs.speculation import columns_of
from planner.costs.step import Replica
from planner.costs.weights import Num
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.ranking import Ranking
from planner.results import Results
from planner.sensitivity.constants import PHASES, Constant, scaled
from planner.specs.hardware import Hardware
from planner.units import MS

Array = NDArray[np.float64]
Variation = tuple[Constant, float]
"""A constant and the factor that it is multiplied by."""
ALLOWANCE = 1.5
"""How many times its estimated share of the goal a collective is taken to have before it is left out."""
_DIFFERENT = 1e-9


class _Column(np.ndarray[Any, np.dtype[np.float64]]):
    """A constant that differs from row to row, in the place of a number: `x or 1.0` and `if x` ask whether any is."""

    def __bool__(self) -> bool:
        return bool(np.any(np.asarray(self)))


class Example(NamedTuple):
    """What a collective's constant means: one such collective, now and with the constant changed."""

    bytes: float
    """Of the whole buffer."""
    ranks: int
    now: float
    then: float
    """Seconds."""


class _Group(NamedTuple):
    """The plans in question that share a structure: their places among all of them, and what prices them."""

    places: NDArray[np.intp]
    setting: Setting
    rows: Rows
    fitted: Fit

    def of(self, mask: NDArray[np.bool_]) -> _Group:
        """Those of some places."""
        kept = mask[self.places]
        if kept.all():
            return self
        rows, fitted = Rows(*(column[kept] for column in self.rows)), Fit(*(column[kept] for column in self.fitted))
        return _Group(self.places[kept], self.setting, rows, fitted)


class Field(NamedTuple):
    """The first plan and its rivals; goals are what the ranking minimises, but for a factor that all plans share."""

    ranking: Ranking
    groups: tuple[_Group, ...]
    goals: Array
    traffic: tuple[_Traffic, ...]
    """Collectives of a decode step, then those of a prompt."""
    full: NDArray[np.bool_]
    """Plans whose searched load is all that memory holds."""

    @classmethod
    def of(cls, ranking: Ranking, index: NDArray[np.intp]) -> Field:
        """The plans at these rows of a ranking, the first plan first."""
        results, request = ranking.results.take(index), ranking.request
        plans = [Plan.parse(label) for label in results["plan"]]
        structures = [structure_of(plan) for plan in plans]
        groups: list[_Group] = []
        traffic: list[_Traffic] = []
        full = np.zeros(len(index), dtype=bool)
        searched = request.searches
        for structure in dict.fromkeys(structures):
            places = np.flatnonzero([each == structure for each in structures])
            setting = setting_of(request, ranking.placement, structure)
            rows = Rows.of_plans(
                [plans[place] for place in places],
                **{name: results[name][places] for name in ("isl", "osl", "concurrency")},
                max_context=request.workload.max_context or 0,
                prefix_hit=request.workload.prefix_hit,
                **columns_of(request.workload.speculation),
            )
            fitted = fit(setting, rows, clip=False)
            groups.append(_Group(places, setting, rows, fitted))
            traffic += _traffic(groups[-1], results.take(places), request.objective)
            full[places] = searched & (rows.concurrency == fitted.by_memory)
        times = {name: results[f"{name}_ms"] * MS for name in ("latency", "ttft", "tpot")}
        goals = times.get(request.objective, 1.0 / results["requests_per_s"])
        return cls(ranking, tuple(groups), np.asarray(goals, dtype=float), tuple(traffic), full)

    @property
    def gaps(self) -> Array:
        """How far each rival is behind the first plan, relative to it."""
        return _behind(self.goals)

    def calls(self) -> set[tuple[str, int]]:
        """(operation, level of the network) of the collectives that run here."""
        return {(each.op, int(level)) for each in self.traffic for level in each.level[each.share > 0]}

    def together(self, variations: Sequence[Variation]) -> Array:
        """Gaps of the rivals [variations, rivals], for constants of kernels and of the host: one pricing for all."""
        many = len(variations)
        goals = np.empty((many, len(self.goals)))
        for group in self.groups:
            hardware, engine = group.setting.hardware, group.setting.engine
            size = group.rows.length
            for constant in dict.fromkeys(constant for constant, _ in variations):
                factors = [factor if each == constant else 1.0 for each, factor in variations]
                hardware, engine = scaled(hardware, engine, constant.path, np.repeat(factors, size).view(_Column))
            setting = group.setting._replace(hardware=hardware, engine=engine)
            rows = Rows(*(np.tile(column, many) for column in group.rows))
            fitted = Fit(*(np.tile(column, many) for column in group.fitted))
            goals[:, group.places] = self._priced(setting, rows, fitted).reshape(many, size)
        return _behind(goals)

    def apart(self, variations: Sequence[Variation]) -> Array:
        """Gaps of the rivals [variations, rivals], for any constant: a pricing of the plans that use it for each."""
        goals = np.tile(self.goals, (len(variations), 1))
        for each, (constant, factor) in enumerate(variations):
            users = self._users(constant)
            for group in self.groups:
                own = group.of(users)
                if not len(own.places):
                    continue
                setting, rows, fitted = _changed(own.setting, constant, factor), own.rows, own.fitted
                if constant.path[0] == "memory":
                    most = fit(setting, rows, clip=False).max_concurrency
                    load = np.where(self.full[own.places], most, np.minimum(rows.concurrency, most))
                    rows = rows._replace(concurrency=np.maximum(load, 1.0))
                    fitted = fit(setting, rows, clip=True)  # a batch of 0 is priced as NaN
                goals[each, own.places] = self._priced(setting, rows, fitted)
        return _behind(goals)

    def _priced(self, setting: Setting, rows: Rows, fitted: Fit) -> Array:
        priced, objective = price(setting, rows, fitted), self.ranking.request.objective
        times = {"latency": priced.latency, "ttft": priced.ttft, "tpot": priced.tpot}
        goals = np.asarray(times.get(objective, 1.0 / priced.requests_per_s), dtype=float)
        return np.where(np.isfinite(goals), goals, np.inf)

    def _runs(self, constant: Constant, each: _Traffic) -> NDArray[np.bool_]:
        """For which plans these collectives may be run by a constant's kernel."""
        _, _, op, name, _ = constant.path
        level = self._level(name)
        runs = (each.level == level) & (each.op == op)
        if op in PHASES:
            runs = runs | (each.phased & (each.level > level))
        return np.asarray(runs & (each.share > 0))

    def _users(self, constant: Constant) -> NDArray[np.bool_]:
        """Which plans use a constant."""
        if constant.path[0] != "collectives":
            return np.ones(len(self.goals), dtype=bool)
        users = np.zeros(len(self.goals), dtype=bool)
        for each in self.traffic:
            users[each.places] |= self._runs(constant, each)
        return users

    def ends(self, constant: Constant) -> tuple[float, ...]:
        """The ends of a collective's range at which a rival may lead, by the share of the goal that its calls take.

        A dearer one closes a gap by no more than what the first plan spends on it, a cheaper one by no more than what
        the rival does; what the other of them spends is not set off, since it may run another kernel.
        """
        spent = np.zeros(len(self.goals))
        for each in self.traffic:
            spent[each.places] += np.where(self._runs(constant, each), each.share, 0.0)
        found = []
        for end in constant.ends():
            dearer = (end < 1) == constant.is_rate
            if np.any(ALLOWANCE * (spent[0] if dearer else spent[1:]) * (max(end, 1 / end) - 1) > self.gaps):
                found.append(end)
        return tuple(found)

    def example(self, constant: Constant, factor: float, rival: int) -> Example | None:
        """One collective that a constant prices: the new first plan's or else the old's, in a step or a prompt."""
        if constant.path[0] != "collectives":
            return None
        _, _, op, name, _ = constant.path
        level, setting = self._level(name), self.groups[0].setting
        changed = _changed(setting, constant, factor)
        for place in (rival + 1, 0):
            for each in self.traffic:
                for row in np.flatnonzero((each.places == place) & (each.level == level) & (each.op == op)):
                    ranks, size = int(each.ranks[row]), float(each.size[row])
                    now, then = (_seconds(one, op, level, ranks, size) for one in (setting, changed))
                    if abs(then - now) > _DIFFERENT * now:
                        return Example(size, ranks, now, then)
        return None

    def _level(self, name: str) -> int:
        return [each.name for each in self.ranking.request.hardware.network].index(name)


class _Traffic(NamedTuple):
    """One kind of collective of a decode step or of a prompt, for each plan of a group."""

    op: str
    prompt: bool
    places: NDArray[np.intp]
    level: NDArray[np.intp]
    ranks: NDArray[np.int_]
    size: Array
    """Bytes of the whole buffer."""
    share: Array
    """Of the goal's time, all its calls."""
    phased: NDArray[np.bool_]
    """Whether it runs in phases, some of them on the levels below."""


def _traffic(group: _Group, results: Results, objective: str) -> list[_Traffic]:
    """The collectives of a group's decode steps and passes of prompts, among which the network's time is divided."""
    setting, rows = group.setting, group.rows
    network, tp = Network(setting.placement, setting.engine), rows.width.astype(int)
    flat = Network(_without_phases(setting), setting.engine)
    nothing = np.zeros(rows.length)
    replica = replica_of(setting, rows)
    batch = np.maximum(group.fitted.batch, 1.0)
    micro = np.ceil(batch / np.minimum(rows.pp, batch))
    queries = 1.0 if setting.drafting is None else rows.spec_tokens + 1  # a draft's own collectives are left out
    decode = Pass(micro * queries, rows.isl + rows.osl / 2, queries=queries)
    scheduler, alone = setting.engine.scheduler, setting.schedule == "static"
    packed = np.maximum(1.0, micro if alone else micro / rows.osl)  # prompts that come in the time of one pass
    riding = np.maximum(0.0, micro - packed) if scheduler.prefill == "mixed" and not alone else nothing
    fresh = rows.isl - cached_tokens(setting.engine, rows.isl, rows.prefix_hit)
    budget = budget_of(scheduler, rows.attention_dp)
    most = np.inf if budget is None else budget * np.minimum(rows.attention_dp, packed)
    tokens = np.minimum(packed * fresh, np.maximum(1.0, most - riding))
    pairs, packed = tokens / fresh * causal_pairs(rows.isl), np.maximum(1.0, tokens / fresh)
    prompt = Pass(
        riding * queries, rows.isl + rows.osl / 2, tokens, pairs, nothing, packed, packed, queries=queries
    )  # fmt: skip
    ttft, tpot = results.ttft_parts, {bound: np.nan_to_num(part) for bound, part in results.tpot_parts.items()}
    firsts, answers = {"ttft": (1.0, 0.0), "tpot": (0.0, 1.0)}.get(objective, (1.0, rows.osl - 1))
    goal = firsts * sum(ttft.values()) + answers * sum(tpot.values())
    rest = firsts * ttft["network"] + answers * tpot["network"]  # seconds of the network not yet divided
    found: list[_Traffic] = []
    for work in (decode, prompt):
        times: list[tuple[str, Num, Num, Array, Array, Any]] = []
        for transfer, often in _calls(replica, work):
            groups = replica.groups(transfer.axes)
            ranks = groups.ranks
            level = setting.placement.span(groups.spread)
            size, once = np.broadcast_to(transfer.bytes, tp.shape), network.price(transfer, groups)
            crosses = transfer.op == "all_reduce" and np.any(level > 0)
            phased = flat.price(transfer, groups) > once * (1 + _DIFFERENT) if crosses else nothing > 0
            times.append((transfer.op, level, ranks, size, often * once, phased))
        size = resting_bytes(setting.model, tp, work, setting.structure, rows.cp)
        for crossed, boundaries in enumerate(_boundaries(setting, rows)):
            if np.any(boundaries):
                on, two = (np.full(tp.shape, number) for number in (crossed, 2))
                times.append(("send", on, two, size, boundaries * network.send(size, crossed), nothing > 0))
        whole = np.maximum(sum((seconds for *_, seconds, _ in times), nothing), 1e-300)
        here = rest if work is prompt else np.minimum(rest, answers * whole)
        rest = rest - here
        found += [
            _Traffic(op, work is prompt, group.places, on, ranks, size, time / whole * here / goal, phased)
            for op, on, ranks, size, time, phased in times
        ]
    return found


def _calls(replica: Replica, work: Pass) -> list[tuple[Transfer, float]]:
    """Collectives of a pass, with how many layers have each; those of the ends once."""
    kinds = replica.model.layer_kinds()
    found: list[tuple[Transfer, float]] = []
    for index, (experts, _) in enumerate(replica.layer_counts):
        often = sum(kind.experts == experts for kind in kinds)
        for transfer in replica.count(work, experts)[1]:
            if transfer.place == "layer":
                found.append((transfer, often))
            elif index == 0:
                found.append((transfer, 1))
    return found


def _boundaries(setting: Setting, rows: Rows) -> list[Array]:
    """Stage boundaries of a replica by the outermost level that they cross."""
    outer = range(len(setting.hardware.network) - 1)
    beyond = [setting.placement.crossings(rows.width, rows.pp, rows.dp, level) for level in outer]
    return [this - further for this, further in zip([rows.pp - 1, *beyond], [*beyond, 0.0], strict=True)]


def _seconds(setting: Setting, op: str, level: int, ranks: int, size: float) -> float:
    """Seconds of one collective; a send takes the wires of a level, others those that their ranks span."""
    network = Network(setting.placement, setting.engine)
    return float(network.send(size, level)[0] if op == "send" else network.seconds(op, ranks, size))


def _without_phases(setting: Setting) -> Placement:
    """The network with hierarchical collectives so slow that no other is dearer."""
    hardware = setting.hardware
    rows = tuple(
        row._replace(bandwidth_fraction=1e-30) if row.algorithm == "hierarchical" else row
        for row in hardware.collectives
    )
    return _placed(setting.placement, hardware._replace(collectives=rows))


def _changed(setting: Setting, constant: Constant, factor: float) -> Setting:
    """A setting with one constant changed, on its network too."""
    hardware, engine = scaled(setting.hardware, setting.engine, constant.path, factor)
    return setting._replace(hardware=hardware, engine=engine, placement=_placed(setting.placement, hardware))


def _placed(placement: Placement, hardware: Hardware) -> Placement:
    """The same chips with other constants; the groups of a slice, which do not depend on them, are kept."""
    changed = replace(placement, hardware=hardware)
    if placement.slice is not None:
        vars(changed)["torus_groups"] = placement.torus_groups
    return changed


def _behind(goals: Array) -> Array:
    """How far each rival [..., rivals] is behind the first of the goals [..., plans], relative to it."""
    with np.errstate(invalid="ignore"):
        gaps = goals[..., 1:] / goals[..., :1] - 1
    return np.where(np.isnan(gaps), np.inf, gaps)  # neither can run
