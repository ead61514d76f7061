"""How fast requests are simulated, and published capacities: `python benchmarks/goodput.py`, about a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout is measured, whatever is installed

from planner.costs.rows import structure_of
from planner.costs.serving import Setting
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.request import Request
from planner.simulating.goodput import Deployment, Goal, highest
from planner.simulating.traces import requests
from planner.specs.catalog import load_machine, load_model
from planner.specs.lengths import population_of

CASES = (
    ("llama3-8b", "h100", "TP1", 12.0),
    ("llama3-70b", "h100", "TP8", 2.0),
    ("llama3-70b", "h100", "TP8", 8.0),
    ("llama3-70b", "h100", "TP4xDP2", 8.0),
    ("llama3-70b", "h100", "TP4xPP2", 4.0),
    ("deepseek-v3", "h200", "TP8", 2.0),
)
"""(model, hardware, plan, requests per second)"""
COUNT = 2000
LENGTHS = population_of("1024,2000", "256,500", None)


CHAT = population_of("2000,4400", "400,830", None)
"""Lengths like a chat's: assumed, after the description of the published workload."""
SPLIT = str(Path(__file__).resolve().parent.parent / "tests" / "files" / "a100-4-ethernet.yaml")
PUBLISHED = (
    ("mistral-7b", "a100", "TP1", "TP1", 0.1, 2.6),
    ("yi-34b", "a100", "TP2", "TP2", 0.2, 3.7),
    ("falcon-180b", SPLIT, "TP4xPP2", "TP4xPP2", 1.0, 3.6),
    ("falcon-180b", SPLIT, "TP4xPP2", "TP8", 1.0, 4.3),
    ("llama2-70b", "a100", "TP4xPP2", "TP4xPP2", 1.0, 6.3),
)
"""(model, hardware, plan with chunks, plan with prompts first, limit on gaps, how many times the requests)."""


def setting(model: str, hardware: str, label: str, tokens: int | None = None) -> tuple[Setting, Plan]:
    machine, engine = load_machine(hardware, None if tokens is None else "vllm")
    engine, plan = engine.limited(None if tokens is None else 128, tokens), Plan.parse(label)
    request = Request(load_model(model), machine, engine, plan.chips)
    return setting_of(request, Placement.of(machine, plan.chips, None), structure_of(plan)), plan


def simulations() -> Iterator[str]:
    """Tables of iteration times, and requests through a deployment."""
    yield f"{'model':12} {'plan':9} {'req/s':>6} {'tables ms':>9} {'iterations':>10} {'simulated/s':>11}"
    coming = requests(LENGTHS, COUNT)
    for model, hardware, label, rate in CASES:
        known = setting(model, hardware, label)
        begin = time.process_time()
        made = Deployment.of(*known, longest=8192)
        made.clock.mixed(100, 5050, 0, 4, 4000)  # the tables with prompts are made when they are needed
        tables = time.process_time() - begin
        begin = time.process_time()
        outcome = made.run(coming.faster(rate))
        spent = time.process_time() - begin
        yield (f"{model:12} {label:9} {rate:6g} {tables * 1e3:9.0f} {outcome.iterations:10d} {COUNT / spent:11.0f}")


def searches() -> Iterator[str]:
    """The highest rate of a plan with 1000 requests."""
    coming = requests(LENGTHS, 1000)
    for model, hardware, label, _ in CASES[:1] + CASES[2:5]:
        made = Deployment.of(*setting(model, hardware, label), longest=8192)
        begin = time.process_time()
        found = highest(made, coming, Goal(0.5, 0.03))
        rate = 0.0 if found.best is None else found.best.rate
        spent = time.process_time() - begin
        yield f"{model} {label}: {rate:.3g} requests/s in {spent:.1f} s, {found.tried} rates tried"


def capacities() -> Iterator[str]:
    """Sarathi-Serve (Agrawal et al. 2024): requests with chunks beside decodes against those with prompts first."""
    coming = requests(CHAT, 300)
    for model, hardware, plan, first, limit, published in PUBLISHED:
        for loose in (1, 5):
            rates = {}
            for label, tokens in ((first, 8192), (plan, 512), (plan, 2048)):
                made = Deployment.of(*setting(model, hardware, label, tokens), longest=16384)
                made = made._replace(rules=made.rules._replace(mixed=tokens < 8192))
                best = highest(made, coming, Goal(gap=limit * loose)).best
                rates[tokens] = 0.0 if best is None else best.rate
            ratio = max(rates[512], rates[2048]) / rates[8192]
            figures = ", ".join(f"{tokens}: {rate:.3g}" for tokens, rate in rates.items())
            against = f"{ratio:.1f} times, published {published}" if loose == 1 else f"{ratio:.1f} times"
            yield f"{model} {plan} against {first}, {limit * loose:g} s: requests/s by budget {figures}; {against}"


def main() -> None:
    for part in (simulations, searches, capacities):
        print(f"{(part.__doc__ or '').strip()}")
        for line in part():
            print(line)
        print()


if __name__ == "__main__":
    main()
