"""Plans how to split a large model over accelerators.

The public surface, pinned by `tests/test_api.py`:

    from planner import plan
    best = plan("llama3-70b", gpus=16, objective="latency")[0]
    print(best["plan"], best["tpot_ms"])
"""

from __future__ import annotations

from planner._version import __version__
from planner.api import estimate, plan
from planner.errors import InputError, NoPlanError, PlannerError, SpecError
from planner.estimating import estimate_points
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.ranking import Limits, Ranking, Request, rank
from planner.results import COLUMNS, Results
from planner.specs.catalog import load_engine, load_hardware, load_machine, load_model
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.model import Model
from planner.specs.workload import Workload

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
