"""How fast: 100,000 points through the engine, and `plan` as a whole process: on few chips, and the widest of spaces.

    python benchmarks/speed.py

Machines differ and are noisy: read the ratios. Each figure is the median of several runs; `plan` on few chips and the
imports are timed in turn. Have Python keep what it compiled (no PYTHONDONTWRITEBYTECODE), as installed programs do.
Rates are given by the wall clock and by this process's own time, which other programs on the machine do not stretch.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.costs.layers import Structure
from planner.costs.memory import Budget
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit, formats_of, price
from planner.estimating import estimate_points
from planner.plans.placement import Placement
from planner.specs.catalog import load_machine, load_model

POINTS = 100_000
ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = "import typer, pydantic, yaml, rich, numpy"
PLAN = [sys.executable, str(ROOT / "cli.py"), "--model", "llama3-70b", "--gpus", "16", "--objective", "latency"]
LARGE = [sys.executable, str(ROOT / "cli.py"), "--model", "deepseek-v3", "--hardware", "h200", "--gpus", "512"]
ENGINES = ("ideal", "vllm", "sglang", "trtllm")


def columns() -> dict[str, Any]:
    """Points of one model on one machine: degrees, lengths and loads vary."""
    random = np.random.default_rng(0)
    return {
        "tp": 2 ** random.integers(1, 4, POINTS),
        "pp": random.integers(1, 3, POINTS),
        "isl": random.integers(100, 4000, POINTS),
        "osl": random.integers(10, 500, POINTS),
        "concurrency": random.integers(1, 100, POINTS),
    }


class Rate(NamedTuple):
    """Rows per second."""

    wall: float
    process: float

    def __str__(self) -> str:
        return f"{self.wall:>12,.0f} rows/s, {self.process:,.0f} by process time"


def rate(work: Callable[[], object], runs: int) -> Rate:
    """The rate at which `work` does POINTS rows."""
    walls, processes = [], []
    for _ in range(runs):
        wall, process = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processes.append(time.process_time() - process)
    return Rate(POINTS / statistics.median(walls), POINTS / statistics.median(processes))


def engine_rate(runs: int = 7) -> Rate:
    """Rate of counting, memory and pricing."""
    hardware, engine = load_machine("h100")
    model = load_model("llama3-70b")
    setting = Setting(
        model,
        hardware,
        engine,
        Placement.of(hardware, 16),
        formats_of(model, hardware, engine, None, None),
        Structure(),
        Budget.of(hardware, engine),
    )
    rows = Rows.of(dp=1, **columns())
    return rate(lambda: price(setting, rows, fit(setting, rows, clip=True)), runs)


def points_rate(runs: int = 5) -> Rate:
    """Rate of the whole of `estimate_points`: reading columns, rules, engine, result columns."""
    points = {"model": ["llama3-70b"], **{name: column.tolist() for name, column in columns().items()}}
    return rate(lambda: estimate_points(points, POINTS), runs)


def process_seconds(command: list[str]) -> float:
    """Wall time of one run of a command."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def process_ratio(runs: int = 15) -> tuple[float, float, float]:
    """(median seconds of `plan`, of the imports, median of the paired ratios)."""
    imports = [sys.executable, "-c", DEPENDENCIES]
    process_seconds(PLAN), process_seconds(imports)
    pairs = [(process_seconds(PLAN), process_seconds(imports)) for _ in range(runs)]
    ours, theirs = zip(*pairs, strict=True)
    return statistics.median(ours), statistics.median(theirs), statistics.median(a / b for a, b in pairs)


def large_seconds(engine: str, runs: int = 5) -> float:
    """Median seconds of `plan` for a model with experts and latent attention on 512 chips."""
    return statistics.median(process_seconds([*LARGE, "--engine", engine]) for _ in range(runs))


def main() -> None:
    """Prints all figures."""
    engine, points = engine_rate(), points_rate()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ours, theirs, ratio = process_ratio()
    print(f"engine, {POINTS:,} points    {engine}   (target 500,000)")
    print(f"estimate_points           {points}   (with reading, rules and result columns)")
    print(f"peak memory               {peak:>12.2f} GiB      (target below 1)")
    print(f"plan, whole process       {ours * 1e3:>12.0f} ms")
    print(f"importing dependencies    {theirs * 1e3:>12.0f} ms")
    print(f"ratio, paired             {ratio:>12.2f}          (target at most 1.5)")
    for engine_name in ENGINES:
        print(f"512 chips, {engine_name:<14} {large_seconds(engine_name) * 1e3:>12.0f} ms        (target below 2,000)")


if __name__ == "__main__":
    main()
