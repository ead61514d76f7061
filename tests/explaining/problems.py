"""Random problems: requests that make sense, over machines, models, loads and goals."""

from __future__ import annotations

from random import Random

from planner import Filters, Request, Workload, load_machine, load_model
from planner.request import Objective

MACHINES = (
    ("h100-sxm", "vllm"), ("h100-sxm", "sglang"), ("h100-sxm", "trtllm"), ("a100-80gb-sxm", "fastertransformer"),
    ("b200-sxm", "trtllm"), ("l40s", "vllm"), ("mi300x", "vllm"), ("tpu-v5e", "vllm"), ("h100-lecture", None),
)  # fmt: skip
MODELS = ("llama3-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "llama3.2-1b", "opt-13b")
GOALS: tuple[Objective, ...] = ("latency", "ttft", "tpot", "throughput", "cost")


def problem(seed: int, chips: tuple[int, ...] = (1, 2, 4), few: bool = False) -> Request:
    """The request of a seed, always the same one; with `few` only plans of one stage with attention over heads."""
    draw = Random(seed)
    hardware, engine = draw.choice(MACHINES)
    machine, software = load_machine(hardware, engine)
    goal = draw.choice(GOALS)
    load = draw.choice([1, 3, 8, 40])
    work = Workload(
        isl=draw.choice([1, 60, 700, 1500]),
        osl=draw.choice([2, 33, 256]),
        concurrency=None if goal in ("throughput", "cost") and draw.random() < 0.5 else load,
        schedule=draw.choice(["continuous", "continuous", "static"]),
        weights=draw.choice([None, None, "fp8"]),
        arrivals=draw.choice([None, "steady", "waves"]),
    )
    filters = Filters(pp=(1,), attention=("heads",)) if few else Filters()
    return Request(load_model(draw.choice(MODELS)), machine, software, draw.choice(chips), work, goal, filters=filters)
