"""Collectives: bytes and steps by algorithm (count), and their time on a network level (price).

K ranks, D bytes of the whole buffer; bytes are those that one rank sends. Exact (K-1)/K factors. Sources:
nccl-tests doc/PERFORMANCE.md for the factors, Pope et al. 2022 appendix A.1, the scaling book for the torus.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Transfer
from planner.costs.pnorm import pnorm
from planner.costs.teams import Groups, Team
from planner.costs.weights import Num
from planner.errors import InputError
from planner.plans.placement import Placement, TorusGroup
from planner.specs.engine import CollectiveRule
from planner.specs.hardware import CollectiveKernel, CollectiveOp
from planner.units import KIB, US

Array = NDArray[np.float64]


def sent_bytes(algorithm: str, op: str, ranks: Num, size: Num) -> Num:
    """Bytes that one rank sends in a collective of `size` bytes over `ranks` ranks.

    `size` is the reduced tensor, the gathered output, the scattered input, or what a rank holds before an
    all-to-all. A `hierarchical` all-reduce sends the same as a ring in all, divided over the levels.
    """
    share = (ranks - 1) / ranks
    if op == "send":
        return size
    if op != "all_reduce":
        return share * size
    if algorithm == "one_shot":
        return (ranks - 1) * size
    if algorithm == "in_switch":
        return np.where(np.asarray(ranks) > 1, size, 0.0)
    return 2 * share * size


def steps(algorithm: str, op: str, ranks: Num, domains: Num) -> tuple[Num, Num]:
    """(steps inside domains, steps that cross between domains) that follow one another.

    Over a single domain every chip is a domain of its own: `domains` = `ranks`, and all steps cross.
    """
    if algorithm == "ring":
        rounds = 2 if op == "all_reduce" else 1
        return rounds * (ranks - domains), rounds * (domains - 1)
    if algorithm == "tree":
        return 2 * (ranks / domains - 1), 2 * np.log2(domains)
    if algorithm == "two_shot":
        return 0.0, 2.0
    return 0.0, 1.0  # one shot, in-switch, direct: all ranks at once


class Software(Protocol):
    """What of an engine decides collectives."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    @property
    def collectives(self) -> tuple[CollectiveRule, ...]:
        """Which kernel runs what; the first rule that fits counts."""


class _Ruled(NamedTuple):
    """An engine's name with rules of another's making."""

    name: str
    collectives: tuple[CollectiveRule, ...]


class Network(NamedTuple):
    """A placement with the engine that uses it: prices transfers. Group sizes are few, so each is priced apart."""

    placement: Placement
    engine: Software

    def price(self, transfer: Transfer, groups: Groups) -> Num:
        """Seconds of a transfer's collectives, `times` of them, in groups of these sizes (one group a row)."""
        network = self.preferring(transfer.op, transfer.kernel) if transfer.kernel else self
        return transfer.times * network.over(transfer.op, groups, transfer.bytes)

    def preferring(self, op: CollectiveOp, kernel: str) -> Network:
        """The network whose engine runs an operation by this kernel wherever the hardware has it."""
        rules = (CollectiveRule(op, (kernel,)), *self.engine.collectives)
        return self._replace(engine=_Ruled(self.engine.name, rules))

    def seconds(self, op: str, ranks: Num, size: Num) -> Array:
        """Seconds of one collective; `ranks` and `size` are numbers or arrays that broadcast (see `over`)."""
        ranks, size = np.broadcast_arrays(np.asarray(ranks, dtype=int), np.asarray(size, dtype=float))
        return self.over(op, Groups.of(ranks.ravel()), size.ravel()).reshape(ranks.shape)

    def over(self, op: str, groups: Groups, size: Num) -> Array:
        """Seconds of one collective.

        Args:
            op: all_reduce, all_gather, reduce_scatter, all_to_all, or send: each to the next one of its group.
            groups: ranks of each row's group.
            size: bytes of the whole buffer (see `sent_bytes`).

        Raises:
            InputError: the engine names no kernel that the hardware has for this.
        """
        size = np.asarray(size, dtype=float)
        if len(groups.rows) == 1:
            return self._busy(op, groups.rows[0][0], np.broadcast_to(size, (groups.total,)))
        result = np.zeros(groups.total)
        for team, rows in groups.rows:
            if team.ranks > 1:
                result[rows] = self._busy(op, team, size[rows] if size.ndim else np.broadcast_to(size, rows.shape))
        return result

    def _busy(self, op: str, team: Team, size: Array) -> Array:
        """Seconds where there is something to send, else 0."""
        if team.ranks <= 1 or not size.any():
            return np.zeros(size.shape)
        if op == "send":
            found = self.hops(size, team)
        else:
            found = self._on_level(op, self.placement.level_of(team.ranks * team.stride), team, size)
        return found if size.all() else found * (size > 0)

    def send(self, size: Num, crossing: int) -> Array:
        """Seconds to send `size` bytes to the next stage.

        `crossing` is the outermost level whose wires it takes: 0 (False) inside the innermost domain, 1 (True)
        between such domains, 2 between those of the level above, and so on.
        """
        level = min(int(crossing), len(self.placement.hardware.network) - 1)
        return self._on_level("send", level, Team(2), np.atleast_1d(np.asarray(size, dtype=float)))

    def neighbours(self, size: float, stride: int, ranks: int) -> float:
        """`hops` of one buffer over `ranks` ranks, `stride` chips apart."""
        return float(self.hops(np.array([size], dtype=float), Team(ranks, stride=stride))[0])

    def hops(self, size: Array, team: Team) -> Array:
        """Seconds in which each chip of a team sends `size` bytes to the next one.

        Where that leaves a domain, as many streams as there are teams beside each other cross its boundary at once,
        over all cards that it has, and none is faster than a chip's own port.
        """
        ranks, stride = team.ranks, team.stride
        inner = self.send(size, 0)
        level = self.placement.level_of(ranks * stride)
        if level == 0 or self.placement.slice is not None:
            return inner
        network = self.placement.hardware.network
        below = network[level - 1].chips or 1
        share = 1.0 if network[level].nics_per_node is None else min(stride, below) / below
        return np.maximum(inner, self.send(size * share, level))

    def least(self, op: str, groups: Groups, size: Num) -> Array:
        """Seconds that the wires alone want for a collective (see `over`): no latency, every wire at its full rate.

        A switch that reduces sends a buffer once, where the hardware has one; else each rank sends (K-1)/K of it once,
        for an all-reduce twice. Across nodes only what must leave a node counts, over all cards of the smallest one.
        """
        size = np.broadcast_to(np.asarray(size, dtype=float), (groups.total,))
        result = np.zeros(groups.total)
        for team, rows in groups.rows:
            if team.ranks > 1:
                result[rows] = self._least(op, team, size[rows])
        return result

    def _least(self, op: str, team: Team, size: Array) -> Array:
        network, ranks = self.placement.hardware.network, team.ranks
        if op == "send":
            return self._least_hop(team, size)
        if self.placement.slice:
            group = team.box or self.placement.torus_groups[ranks]
            wires = size * group.exchange if op == "all_to_all" else sent_bytes("ring", op, ranks, size) / group.wires
            return np.asarray(wires / network[0].link)
        level = self.placement.level_of(ranks * team.stride)
        inside = min(ranks, max(1, (network[0].chips or ranks) // team.stride)) if level else ranks
        slowest = self._fewest_bytes(op, 0, inside, size) / self._port(inside) if inside > 1 else 0.0 * size
        if level and op != "all_reduce":
            slowest = 0.0 * size  # what stays in a node depends on the algorithm
        for here in range(1, level + 1):
            share, fewest = self._share(here), self._fewest(here, team)
            rate = network[here].link * (1.0 if share is None else share)
            if op == "all_to_all":
                slowest = np.maximum(slowest, size * (ranks - fewest) / ranks / rate)
            else:
                leaves = self._fewest_bytes(op, here, self._domains(here, team), size)
                slowest = np.maximum(slowest, leaves / (rate * fewest))
        return slowest

    def _least_hop(self, team: Team, size: Array) -> Array:
        """The least of `hops`: every stream over its share of the wires, no faster than a port."""
        least, network = self.least_send(size, 0), self.placement.hardware.network
        level = self.placement.level_of(team.ranks * team.stride)
        if level == 0 or self.placement.slice is not None:
            return least
        below = network[level - 1].chips or 1
        share = 1.0 if network[level].nics_per_node is None else min(team.stride, below) / below
        return np.maximum(least, self.least_send(size * share, level))

    def _fewest_bytes(self, op: str, level: int, ranks: int, size: Array) -> Array:
        """Bytes that one rank must send on a level.

        A ring of which more than its wires' rate was measured is one that the switch reduces for.
        """
        hardware = self.placement.hardware
        name = hardware.network[level].name
        rows = [row for row in hardware.collectives if (row.op, row.level) == (op, name)]
        reduces = op == "all_reduce" and any(
            row.algorithm == "in_switch"
            or max([row.bandwidth_fraction, *(each.bandwidth_fraction for each in row.ranks.values())]) > 1
            for row in rows
        )
        return np.asarray(sent_bytes("in_switch" if reduces else "ring", op, ranks, size))

    def least_send(self, size: Num, crossing: int) -> Array:
        """Seconds that the wires alone want for `send`."""
        network, size = self.placement.hardware.network, np.asarray(size, dtype=float)
        level = min(int(crossing), len(network) - 1)
        if level == 0:
            return np.asarray(size / self._port(2))
        rates = [network[here].link * (self._share(here) or 1.0) for here in range(1, level + 1)]
        return np.asarray(size / min(rates))

    def refusal(self, op: str, ranks: int) -> str | None:
        """Why this engine cannot run a collective over so many ranks here, in one sentence; none = it can.

        Buffers of 1 B to 10 GB are asked for, since rules may end at a size.
        """
        if ranks <= 1:
            return None
        groups = self.placement.torus_groups
        if op != "send" and groups and ranks not in groups:
            return f"collectives: {ranks} ranks do not tile the slice {self.placement.slice}"
        try:
            seconds = self.seconds(op, ranks, np.logspace(0, 10, 11))
        except InputError as error:
            return str(error)
        if np.all(np.isfinite(seconds)):
            return None
        return (
            f"collectives: engine {self.engine.name} has only hierarchical kernels for {op} on "
            f"{self.placement.hardware.name}, and {ranks} ranks leave a domain part full: add a ring"
        )

    def _on_level(self, op: str, level: int, team: Team, size: Array) -> Array:
        """Seconds by the engine's rules: the first that fits a size counts."""
        ranks = team.ranks
        hardware, span = self.placement.hardware, "across" if level else "inside"
        result = np.empty(size.shape)
        waiting: NDArray[np.bool_] = np.ones(size.shape, dtype=bool)
        for rule in self.engine.collectives:
            if rule.op != op or rule.span not in ("any", span) or (rule.ranks and ranks not in rule.ranks):
                continue
            rows = [
                row for kernel in rule.kernels for row in hardware.collective(kernel, op, hardware.network[level].name)
            ]
            if not rows:
                continue
            fits = waiting if rule.max_kib is None else waiting & (size <= rule.max_kib * KIB)
            if fits.all():
                return self._cheapest(rows, level, team, size)
            if fits.any():
                result[fits] = self._cheapest(rows, level, team, size[fits])
            waiting = waiting & ~fits
            if not waiting.any():
                return result
        raise InputError(
            f"collectives: engine {self.engine.name} names no kernel for {op} of {size.max():.0f} B over {ranks} ranks "
            f"that hardware {hardware.name} has on level {hardware.network[level].name}: add a row to either file"
        )

    def _cheapest(self, rows: list[CollectiveKernel], level: int, team: Team, size: Array) -> Array:
        times = [self._kernel(row, level, team, size) for row in rows]
        return times[0] if len(times) == 1 else np.min(times, axis=0)

    def _kernel(self, row: CollectiveKernel, level: int, team: Team, size: Array) -> Array:
        """Seconds of one kernel: || latency, bytes sent / bandwidth ||_p."""
        ranks = team.ranks
        if row.algorithm == "torus":
            return self._torus(row, team, size)
        if row.algorithm == "torus_by_axis":
            return self._by_axis(row, team, size)
        domains = self._domains(level, team)
        if row.algorithm == "hierarchical":
            return self._hierarchical(row, level, team, domains, size)
        latency, fraction, p = _constants(row, ranks, domains)
        return np.asarray(pnorm([latency, self._wire(row, level, team, size, fraction)], p))

    def _wire(self, row: CollectiveKernel, level: int, team: Team, size: Array, fraction: float) -> Array:
        """Seconds of the slowest wire: a chip's port inside its domain, or what joins the domains of a level.

        A level with `nics_per_node` joins them by network cards, each chip's share its own. A ring or tree runs as
        often as a node has cards, so the node with the fewest members paces all. Where each rank writes to each
        other one, what leaves the node goes over the rank's own share. Without `nics_per_node` a level is the
        textbook's: one link, which carries all that a rank sends.
        """
        ranks = team.ranks
        sent = sent_bytes(row.algorithm, row.op, ranks, size)
        if level == 0:
            return np.asarray(sent / (self._port(ranks) * fraction))
        pairwise = row.algorithm in ("direct", "one_shot", "two_shot") and row.op != "send"
        full = max(1, (self.placement.hardware.network[0].chips or 1) // team.stride)  # of this team in a whole domain
        slowest = 0.0 * sent
        if row.op != "send" and full > 1:
            stays = (full - 1) / (ranks - 1) if pairwise else 1.0
            slowest = sent * stays / (self._port(full) * self._inside_fraction(row, full))
        for here in range(1, level + 1):
            fewest = self._fewest(here, team)
            share = self._share(here)
            part, rate = sent, self.placement.hardware.network[here].link
            if share is not None and row.algorithm in ("ring", "tree"):
                rate *= share * fewest
            elif share is not None:
                rate *= share
                part = sent * ((ranks - fewest) / (ranks - 1) if pairwise else 1.0)
            slowest = np.maximum(slowest, part / (rate * fraction))
        return np.asarray(slowest)

    def _inside_fraction(self, row: CollectiveKernel, ranks: int) -> float:
        """Share of a port that the same kernel reaches inside a full innermost domain; the row's own if not given."""
        hardware = self.placement.hardware
        below = hardware.collective(row.kernel, row.op, hardware.network[0].name)
        return max((_constants(each, ranks, ranks)[1] for each in below), default=row.bandwidth_fraction)

    def _hierarchical(self, row: CollectiveKernel, level: int, team: Team, domains: int, size: Array) -> Array:
        """All-reduce in three phases: reduce-scatter inside, all-reduce of the shards across, all-gather inside.

        They follow one another, or, where the row is `pipelined`, run at once on chunks of the buffer, so that the
        slower of inside and across counts; a switch that reduces then does the inside in one. A group that leaves a
        domain part full cannot run so and costs infinity here.
        """
        network, ranks = self.placement.hardware.network, team.ranks
        if ranks * team.stride % (network[level - 1].chips or 1):
            return np.full(size.shape, np.inf)
        inside = ranks // domains
        phases = np.zeros(size.shape)
        if inside > 1:
            within = Team(inside, stride=team.stride)
            phases = self._on_level("reduce_scatter", level - 1, within, size)
            phases = phases + self._on_level("all_gather", level - 1, within, size)
        sent = sent_bytes("ring", "all_reduce", domains, size / inside)
        latency = (row.base_us + steps("ring", "all_reduce", domains, domains)[1] * (row.hop_us or 0.0)) * US
        share = self._share(level)
        across = sent / (network[level].link * (1.0 if share is None else share) * row.bandwidth_fraction)
        if not row.pipelined:
            return np.asarray(phases + pnorm([latency, across], row.p))
        in_one = self.placement.hardware.collective(row.kernel, "all_reduce", network[level - 1].name)
        if in_one and inside > 1:
            phases = np.minimum(phases, self._cheapest(list(in_one), level - 1, within, size))
        return np.asarray(pnorm([latency, np.maximum(phases, across)], row.p))

    def _torus(self, row: CollectiveKernel, team: Team, size: Array) -> Array:
        """Bidirectional rings over every axis of the group's box at once; a line has one wire where a ring has two.

        Gather or scatter: max(hops, bytes sent / all wires); an all-reduce is both; in an all-to-all every byte
        crosses each axis, a quarter of a ring on average, and the longest axis is the slowest (scaling book).
        """
        group = team.box or self.placement.torus_groups[team.ranks]
        rounds = 2 if row.op == "all_reduce" else 1
        if row.op == "all_to_all":
            per_wire = size * group.exchange
        else:
            per_wire = sent_bytes("ring", row.op, team.ranks, size) / group.wires
        bandwidth = self.placement.hardware.network[0].link * row.bandwidth_fraction
        latency = rounds * (row.base_us + group.hops * (row.hop_us or 0.0)) * US
        return np.asarray(pnorm([latency, per_wire / bandwidth], row.p))

    def _by_axis(self, row: CollectiveKernel, team: Team, size: Array) -> Array:
        """The same one axis after the other, each with a start of its own: only that axis's wires are busy.

        A gather begins along its slowest axis, where there is least to send; a scatter is a gather backwards. In an
        all-to-all all that a chip holds crosses every axis.
        """
        group = team.box or self.placement.torus_groups[team.ranks]
        bandwidth = self.placement.hardware.network[0].link * row.bandwidth_fraction
        rounds, time, before = (2 if row.op == "all_reduce" else 1), np.zeros(size.shape), 1
        for line in sorted(group.lines, key=lambda line: (line.ring, line.length)):
            alone = TorusGroup.of([line])
            if row.op == "all_to_all":
                per_wire = size * alone.exchange
            else:
                per_wire = rounds * size * (line.length - 1) * before / team.ranks / alone.wires
                before *= line.length
            latency = rounds * (row.base_us + alone.hops * (row.hop_us or 0.0)) * US
            time += pnorm([latency, per_wire / bandwidth], row.p)
        return time

    def _domains(self, level: int, team: Team) -> int:
        """Domains of the level below that a team spans; on the innermost level each chip is one."""
        below = self.placement.hardware.network[level - 1].chips if level else 1
        return min(team.ranks, -(-team.ranks * team.stride // (below or 1)))

    def _fewest(self, level: int, team: Team) -> int:
        """Members of a team in the domain of the level below that holds the fewest: 8 + 4 chips side by side has 4."""
        below = max(1, (self.placement.hardware.network[level - 1].chips or 1) // team.stride)
        return min(team.ranks, team.ranks % below or below)

    def _share(self, level: int) -> float | None:
        """Network cards of a level for each chip of the domains below, all of which communicate; none = no cards."""
        network = self.placement.hardware.network
        cards = network[level].nics_per_node
        return None if cards is None else cards / (network[level - 1].chips or 1)

    def _port(self, ranks: int) -> float:
        """Bytes per second of one rank on the innermost level, one direction, before the kernel's fraction."""
        here = self.placement.hardware.network[0]
        return here.link * (ranks - 1) if here.kind == "mesh" else here.link


_CONSTANTS: dict[tuple[int, int, int], tuple[CollectiveKernel, tuple[float, float, float]]] = {}
"""Constants by (id of the row, ranks, domains) with the row, so that the id stays its own: they are asked for often."""
_MOST_CONSTANTS = 10_000


def _constants(row: CollectiveKernel, ranks: int, domains: int) -> tuple[float, float, float]:
    """(latency in seconds, fraction of the bandwidth, p) at this group size.

    Measured rows are interpolated between group sizes; beyond the largest the latency goes on at its last slope.
    """
    key = (id(row), ranks, domains)
    if key not in _CONSTANTS:
        if len(_CONSTANTS) >= _MOST_CONSTANTS:  # a fit tries many rows
            _CONSTANTS.clear()
        _CONSTANTS[key] = row, _interpolated(row, ranks, domains)
    return _CONSTANTS[key][1]


def _interpolated(row: CollectiveKernel, ranks: int, domains: int) -> tuple[float, float, float]:
    if row.ranks:
        sizes = sorted(row.ranks)
        latency, fraction, p = (
            float(np.interp(ranks, sizes, [getattr(row.ranks[size], name) for size in sizes]))
            for name in ("latency_us", "bandwidth_fraction", "p")
        )
        if len(sizes) > 1 and ranks > sizes[-1]:
            last, before = sizes[-1], sizes[-2]
            slope = (row.ranks[last].latency_us - row.ranks[before].latency_us) / (last - before)
            latency += max(0.0, slope) * (ranks - last)
        return latency * US, fraction, p
    inside, across = steps(row.algorithm, row.op, ranks, domains)
    hop = row.hop_us or 0.0
    inner = hop if row.inner_hop_us is None else row.inner_hop_us
    return float(row.base_us + inside * inner + across * hop) * US, row.bandwidth_fraction, row.p
