"""Plans how to split a large model over accelerators.

    from planner import plan
    best = plan("llama3-70b", gpus=16, objective="latency")[0]
    print(best["plan"], best["tpot_ms"])

The public surface is `__all__`, pinned by a test; each name is imported when it is first used, so that the command
starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner._version import __version__

if TYPE_CHECKING:
    from planner.api import estimate, plan
    from planner.errors import InputError, NoPlanError, PlannerError, SpecError
    from planner.estimating import estimate_points
    from planner.plans.plan import Plan
    from planner.plans.space import Filters
    from planner.ranking import Ranking, rank
    from planner.request import Limits, Request
    from planner.results import COLUMNS, Results
    from planner.specs.catalog import load_engine, load_hardware, load_machine, load_model
    from planner.specs.engine import Engine
    from planner.specs.hardware import Hardware
    from planner.specs.model import Model
    from planner.specs.workload import Workload

_HOME = {
    "COLUMNS": "results",
    "Engine": "specs.engine",
    "Filters": "plans.space",
    "Hardware": "specs.hardware",
    "InputError": "errors",
    "Limits": "request",
    "Model": "specs.model",
    "NoPlanError": "errors",
    "Plan": "plans.plan",
    "PlannerError": "errors",
    "Ranking": "ranking",
    "Request": "request",
    "Results": "results",
    "SpecError": "errors",
    "Workload": "specs.workload",
    "estimate": "api",
    "estimate_points": "estimating",
    "load_engine": "specs.catalog",
    "load_hardware": "specs.catalog",
    "load_machine": "specs.catalog",
    "load_model": "specs.catalog",
    "plan": "api",
    "rank": "ranking",
}

__all__ = [
    "COLUMNS",
    "Engine",
    "Filters",
    "Hardware",
    "InputError",
    "Limits",
    "Model",
    "NoPlanError",
    "Plan",
    "PlannerError",
    "Ranking",
    "Request",
    "Results",
    "SpecError",
    "Workload",
    "__version__",
    "estimate",
    "estimate_points",
    "load_engine",
    "load_hardware",
    "load_machine",
    "load_model",
    "plan",
    "rank",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"planner.{_HOME[name]}"), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")
