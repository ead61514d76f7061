"""Serving measurements of dense models: a load, its TTFT and TPOT, beside what the planner says of the same.

Rows are runs at a constant number of requests in flight on one replica. `part` says whether constants were fitted on
the row's group (model, weights, hardware, engine, isl, osl): the other half of the groups is only reported. Which half
was decided before any fit, by the parity of an MD5 over the group as the source spells it. How requests arrived is the
engine's, by its version: that SGLang 0.5.1 ran in waves and 0.5.6 did not was seen in the TTFTs of all its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Structure
from planner.costs.memory import Budget
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit, formats_of, price
from planner.evidence.comparison import Comparison
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import memory_reasons
from planner.specs.catalog import load_machine, load_model
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.measurements import measurements
from planner.specs.workload import Arrivals
from planner.units import MS

Array = NDArray[np.float64]
Machine = Callable[[str, str], tuple[Hardware, Engine]]
"""Hardware and engine of their names or paths."""
LIGHT = 4
"""Requests in flight up to which an engine is lightly loaded."""
SOURCE = (
    "serving measurements that stand beside AIConfigurator's predictions (github:ai-dynamo/aiconfigurator, Apache-2.0)"
)


class ServingPoint(NamedTuple):
    """One run: what was served, how it was split, at which load, and what was measured (none = not stated)."""

    model: str
    hardware: str
    engine: str
    isl: int
    osl: int
    concurrency: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    weights: str | None = None
    kv_cache: str | None = None
    arrivals: Arrivals | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    version: str = ""
    case: str = ""
    part: str = ""
    peer_tpot_ms: float | None = None

    @property
    def group(self) -> tuple[str, ...]:
        """What rows that differ only in plan and load have in common."""
        return (
            self.model, str(self.weights), self.hardware, self.engine, self.version, str(self.isl), str(self.osl),
        )  # fmt: skip

    @property
    def what(self) -> str:
        """The run in words."""
        plan = Plan(self.tp, self.pp, self.dp).label
        return f"{plan}, {self.isl} in, {self.osl} out, {self.concurrency} in flight".strip()

    @property
    def residence_ms(self) -> float | None:
        """Mean time of a request, R = TTFT + (osl - 1) TPOT."""
        if self.ttft_ms is None or self.tpot_ms is None:
            return None
        return self.ttft_ms + (self.osl - 1) * self.tpot_ms


class Served(NamedTuple):
    """What the planner says of some points, arrays over them: ms, and requests per replica."""

    ttft: Array
    tpot: Array
    decode: Array
    """One decode step, D(b)."""
    batch: Array
    osl: Array

    @property
    def residence(self) -> Array:
        """R = TTFT + (osl - 1) TPOT."""
        return self.ttft + (self.osl - 1) * self.tpot

    @property
    def prefill(self) -> Array:
        """E, what one prefill adds, out of R = b E + (osl - 1) D(b)."""
        return (self.residence - (self.osl - 1) * self.decode) / self.batch


def points(rows: Iterable[dict[str, str]] | None = None) -> list[ServingPoint]:
    """The package's rows but those that are marked as excluded, with the reason, in the file."""

    def number(text: str) -> float | None:
        return float(text) if text else None

    return [
        ServingPoint(
            row["model"], row["hardware"], row["engine"], int(row["isl"]), int(row["osl"]), int(row["concurrency"]),
            tp=int(row["tp"]), weights=row["weights"] or None,
            ttft_ms=number(row["ttft_ms"]),
            tpot_ms=number(row["tpot_ms"]), version=row["engine_version"], case=row["case"], part=row["part"],
            peer_tpot_ms=number(row["peer_tpot_ms"]),
        )
        for row in (measurements("serving") if rows is None else rows)
        if not row["excluded"]
    ]  # fmt: skip


def predictions(runs: Sequence[ServingPoint], machine: Machine = load_machine) -> Served:
    """What the planner says of each run; a batch that does not fit is cut to the one that does, as `estimate` does.

    Args:
        runs: any number, in any order.
        machine: gives hardware and engine for their names; another one than the catalogue's lays other constants in.

    Raises:
        InputError: an unknown name.
    """
    columns = {name: np.full(len(runs), np.nan) for name in ("ttft", "tpot", "decode", "batch")}
    groups: dict[tuple[str | None, ...], list[int]] = {}
    for index, run in enumerate(runs):
        key = (run.model, run.hardware, run.engine, run.weights, run.kv_cache, run.arrivals)
        groups.setdefault(key, []).append(index)
    for places in groups.values():
        own = [runs[place] for place in places]
        setting = _setting(own[0], max(run.tp * run.pp * run.dp for run in own), machine)
        rows = Rows.of(
            **{
                name: np.array([getattr(run, name) for run in own], dtype=float)
                for name in ("tp", "pp", "dp", "isl", "osl", "concurrency")
            }
        )
        fitted = fit(setting, rows, clip=True)
        with np.errstate(invalid="ignore", divide="ignore"):  # a batch of 0 comes out as NaN
            priced = price(setting, rows, fitted)
            decode = price(setting._replace(schedule="static"), rows, fitted).tpot
        for name, values in {"ttft": priced.ttft, "tpot": priced.tpot, "decode": decode}.items():
            columns[name][places] = values / MS
        columns["batch"][places] = fitted.batch
    return Served(**columns, osl=np.array([run.osl for run in runs], dtype=float))


def misfits(runs: Sequence[ServingPoint], machine: Machine = load_machine) -> list[str | None]:
    """Why not one request of each run fits in memory, as a sentence; none where one does."""
    reasons: list[str | None] = []
    for run in runs:
        setting = _setting(run, run.tp * run.pp * run.dp, machine)
        columns = {name: np.array([getattr(run, name)], dtype=float) for name in ("tp", "pp", "dp", "isl", "osl")}
        fitted = fit(setting, Rows.of(**columns, concurrency=np.array([float(run.concurrency)])), clip=True)
        reasons += memory_reasons(setting, fitted, np.where(fitted.batch < 1, float(run.concurrency), 0.0))
    return reasons


def _setting(run: ServingPoint, chips: int, machine: Machine) -> Setting:
    model = load_model(run.model)
    hardware, engine = machine(run.hardware, run.engine)
    return Setting(
        model,
        hardware,
        engine,
        Placement.of(hardware, chips),
        formats_of(model, hardware, engine, run.weights, run.kv_cache),
        Structure(),
        Budget.of(hardware, engine),
        arrivals=run.arrivals or engine.scheduler.arrivals,
    )


def lightly_loaded(runs: Sequence[ServingPoint], served: Served) -> NDArray[np.bool_]:
    """Runs whose TTFT says how long a prefill takes, not how many stood in line.

    At most LIGHT requests in flight, steady arrivals, and a mean TTFT of less than what half of the batch's prefills
    take beside what a request pays alone: above that, prompts came together.
    """
    light = np.array([run.concurrency <= LIGHT for run in runs])
    measured = np.array([np.nan if run.ttft_ms is None else run.ttft_ms for run in runs])
    return light & (measured < served.ttft + served.prefill * (served.batch - 1) / 2)


def comparisons(
    runs: Sequence[ServingPoint] | None = None, served: Served | None = None, machine: Machine = load_machine
) -> list[Comparison]:
    """TPOT and residence time of every run, TTFT of those that are lightly loaded."""
    runs = points() if runs is None else runs
    served = predictions(runs, machine) if served is None else served
    light = lightly_loaded(runs, served)
    found = []
    for place, run in enumerate(runs):
        quantities = {
            "TPOT": (run.tpot_ms, served.tpot[place], run.peer_tpot_ms),
            "residence": (run.residence_ms, served.residence[place], None),
            "TTFT, light load": (run.ttft_ms if light[place] else None, served.ttft[place], None),
        }
        found += [
            Comparison(
                check, run.case, f"{run.what}, {run.version}".strip(", "), observed, float(predicted), run.hardware,
                run.engine, run.model, "ms", run.part, SOURCE, peer,
            )
            for check, (observed, predicted, peer) in quantities.items()
            if observed is not None
        ]  # fmt: skip
    return found
