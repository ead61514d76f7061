"""Plans with what simulates them, for tests."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from planner.costs.rows import structure_of
from planner.costs.serving import Setting
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.request import Request
from planner.simulating.iterations import IterationTime
from planner.simulating.rooms import KvRoom, Rules
from planner.specs.catalog import load_machine, load_model
from planner.specs.workload import Workload


class Problem(NamedTuple):
    """A plan on a machine."""

    setting: Setting
    plan: Plan
    clock: IterationTime
    kv: KvRoom
    rules: Rules


@cache
def problem(
    model: str, hardware: str, engine: str | None, label: str, tokens: int | None = None, weights: str | None = None
) -> Problem:
    """A plan; `tokens` is another token budget of iterations, `weights` another dtype."""
    machine, software = load_machine(hardware, engine)
    software, plan = software.limited(None, tokens), Plan.parse(label)
    request = Request(load_model(model), machine, software, plan.chips, Workload(weights=weights))
    placement = Placement.of(machine, plan.chips, None)
    setting = setting_of(request, placement, structure_of(plan))
    clock = IterationTime.of(setting, plan)
    return Problem(setting, plan, clock, KvRoom.of(setting, plan), Rules.of(software, plan))
