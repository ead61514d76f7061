"""How far a deployment stands on measurements: what lies beyond those behind its engines, and what is assumed."""

from __future__ import annotations

import numpy as np

from planner.costs.rows import structure_of
from planner.extrapolation import beyond, unmeasured
from planner.phases.disaggregated.colocated import Colocated
from planner.phases.disaggregated.disaggregation import Deployment
from planner.phases.disaggregated.question import Question
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import rows_of, setting_of
from planner.request import Request


def standing(question: Question, each: Deployment | Colocated) -> tuple[str | None, str | None]:
    """(what lies beyond the measurements behind the engines, constants that nobody measured), joined by commas."""
    if isinstance(each, Deployment):
        parts = [(question.prefill, each.prefill, 1.0), (question.decode, each.decode, each.batch)]
    else:
        request = question.prefill if question.prefill.hardware.name == each.hardware else question.decode
        parts = [(request, each.plan, each.batch)]
    found = [_of(request, plan, batch) for request, plan, batch in parts]
    beyonds, assumed = (dict.fromkeys(word for part in found for word in part[place]) for place in (0, 1))
    return ", ".join(beyonds) or None, ", ".join(assumed) or None


def _of(request: Request, plan: Plan, batch: float) -> tuple[list[str], list[str]]:
    place = Placement.of(request.hardware, plan.chips) if request.hardware.torus is None else None
    setting = setting_of(request, place or Placement.of(request.hardware, request.gpus), structure_of(plan))
    rows = rows_of(request, [plan], np.array([0]), batch)
    texts = beyond(setting, rows, np.array([max(1.0, batch)]))[0], unmeasured(setting, rows)[0]
    words = [(text or "").split(", ") if text else [] for text in texts]
    return words[0], words[1]
