"""How fast: a diagram over two options, a deployment that shifts over the load, requests through elastic instances.

    python benchmarks/phases.py

Each figure is the median of several runs of the library in one process, by the wall clock and by this process's own
time, which other programs on the machine do not stretch.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.phases.elastic.comparison import elastic, mixed
from planner.phases.region.diagram import diagram
from planner.phases.region.surface import dimension
from planner.phases.shift.layout import Base
from planner.phases.shift.load import served
from planner.phases.shift.shifting import shifting
from planner.request import Request
from planner.simulating.traces import requests
from planner.specs.catalog import load_machine, load_model
from planner.specs.workload import Workload

RUNS = 3
REQUESTS = 500


def median(work: Callable[[], object]) -> tuple[float, float]:
    """(seconds of the wall clock, of this process)."""
    walls, processes = [], []
    for _ in range(RUNS):
        wall, process = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processes.append(time.process_time() - process)
    return statistics.median(walls), statistics.median(processes)


def told(name: str, work: Callable[[], object], count: int = 0, what: str = "") -> None:
    """Prints a figure; with a count also the rate by process time."""
    wall, process = median(work)
    rate = f", {count / process:,.0f} {what}/s" if count else ""
    print(f"{name:45} {wall:7.2f} s, {process:6.2f} s of this process{rate}")


def main() -> None:
    """Runs all of it."""
    asked = Request(load_model("llama3.1-70b"), *load_machine("h100"), 8)
    both = dimension("concurrency"), dimension("isl")
    points = diagram(asked, both, (None, None), (1024, 16384)).points
    told(
        "diagram, load x prompt, 14 plans", lambda: diagram(asked, both, (None, None), (1024, 16384)), points, "points"
    )
    arriving = dimension("arrival_rate"), dimension("isl")
    points = diagram(asked, arriving, (0.1, None), (40, 16384)).points
    told("diagram, rate x prompt", lambda: diagram(asked, arriving, (0.1, None), (40, 16384)), points, "points")

    wide = Workload(isl=4096, osl=250, weights="fp8")
    shifts = Request(load_model("llama3.1-70b"), *load_machine("h200"), 8, wide)
    told("shift, all bases over the load", lambda: shifting(shifts))
    found = shifting(shifts, base=Base(8))
    population = mixed(4096, 4096, 0.0, 250)
    trace = requests(population, REQUESTS).faster(5.0)
    told("shift, requests through four systems", lambda: served(found, trace), 4 * REQUESTS, "requests")

    population = mixed(500, 100_000, 0.1, 200)
    elastic_request = Request(load_model("lwm-7b"), *load_machine("a100-80gb-sxm"), 8)
    told("elastic, tables and forms", lambda: elastic(elastic_request, 2, 2048, population.longest))
    systems = elastic(elastic_request, 2, 2048, population.longest)
    for rate in (1.0, 4.0):
        trace = requests(population, REQUESTS).faster(rate)
        told(f"elastic, {rate:g} requests/s", lambda trace=trace: systems.esp(trace), REQUESTS, "requests")  # type: ignore[misc]


if __name__ == "__main__":
    main()
