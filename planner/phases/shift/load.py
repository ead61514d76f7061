"""A deployment that shifts under requests as they come, bursts and all, beside what it is compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.costs.serving import replica_of
from planner.phases.shift.shifting import Shifting, System, sequence_maker
from planner.plans.plan import Plan
from planner.simulating.fleets import Outcome, simulate
from planner.simulating.iterations import Clock, DecodeRow, IterationTime, Time
from planner.simulating.rooms import KvRoom, Rules
from planner.simulating.traces import Trace


class ShiftClock(NamedTuple):
    """Iterations of a replica that shifts: those of the base above a threshold of tokens, else those of the shift."""

    base: Clock
    shift: Clock
    threshold: int
    stages: int = 1

    def mixed(self, new: float, pairs: float, prior: float, decodes: float, contexts: float, prompts: int = 1) -> Time:
        """An iteration with prompt tokens."""
        clock = self.base if new + decodes > self.threshold else self.shift
        return clock.mixed(new, pairs, prior, decodes, contexts, prompts)

    def decoding(self, sequences: int) -> DecodeRow:
        """Pure decode steps of so many sequences."""
        clock = self.base if sequences > self.threshold else self.shift
        return clock.decoding(sequences)


class Served(NamedTuple):
    """What became of a trace under a system."""

    system: System
    outcome: Outcome

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and answer tokens per second, from the first arrival to the last token."""
        return float((self.outcome.isl + self.outcome.osl).sum() / self.outcome.span)

    def quantile(self, what: str, share: float) -> float:
        """Of `ttft`, with the wait, `tpot` or `latency`; seconds."""
        return float(np.nanquantile(getattr(self.outcome, what), share))


def clock_of(found: Shifting, system: System, tokens: float) -> Clock:
    """How long a system's iterations take, requests having so many tokens at most."""
    setting = system.setting
    if system.name != "shift":
        return IterationTime(setting, Plan(tp=system.tp), tokens, system.make)
    base = IterationTime(setting, Plan(tp=system.tp), tokens, sequence_maker(found.base))
    shift = IterationTime(setting, Plan(tp=system.chips), tokens, replica_of)
    return ShiftClock(base, shift, found.thresholds.chosen)


def served(found: Shifting, trace: Trace) -> list[Served]:
    """A trace through every system.

    Raises:
        ValueError: a request that a system cannot hold.
    """
    engine, longest = found.request.engine, float(np.max(trace.isl + trace.osl))
    block = engine.scheduler.block_tokens
    outcomes = []
    for system in found.systems:
        room = KvRoom(system.memory.tokens / block, block, whole=engine.scheduler.kv_reservation == "whole")
        rules = Rules.of(engine, Plan(tp=system.tp))
        clock = clock_of(found, system, longest)
        outcomes.append(Served(system, simulate(trace, clock, room, rules, system.replicas)))
    return outcomes
