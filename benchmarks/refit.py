"""Fits the engines' constants again, as they were fitted, and prints them beside those of the files. Takes a minute.

python benchmarks/refit.py              on the fitted half of the serving runs
python benchmarks/refit.py h100-sxm     on the runs of one chip (what `planner/evidence/transfer.csv` holds)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from planner import load_engine, load_machine
from planner.evidence.comparison import summarised
from planner.evidence.hosts import FITTED, Constants, fit_constants, lay
from planner.evidence.serving import comparisons, points

ENGINES = ("vllm", "sglang", "trtllm")


def main() -> None:
    chip = sys.argv[1] if len(sys.argv) > 1 else None
    runs = points()
    hardware = load_machine(chip or "h100-sxm", "vllm")[0]
    in_step = hardware.kernels["gemm"]["bf16"].in_step
    assert in_step is not None
    start = Constants(
        {name: load_engine(name).host for name in ENGINES},
        hardware.kernels["elementwise"]["bf16"].item_us,
        in_step.speed,
    )
    used = [run for run in runs if (run.hardware == chip if chip else run.part == "fitted")]
    found = fit_constants(used, start)
    for name in ENGINES:
        for constant in (*FITTED, "request_us"):
            now, then = getattr(start.hosts[name], constant), getattr(found.hosts[name], constant)
            print(f"{name:8} {constant:18} {now:10.4g} -> {then:.4g}")
    print(f"all      item_us            {start.item_us:10.4g} -> {found.item_us:.4g}")
    print(f"all      speed              {start.speed:10.4g} -> {found.speed:.4g}")
    others = [run for run in runs if run not in used]
    for what, own in (("fitted on", used), ("others", others)):
        for each in summarised(comparisons(own, machine=lay(found)), ["check"]):
            print(f"{what:10} {each.key[0]:18} {each.cases:4} cases, mean {each.mean:.1%}, median {each.median:.1%}")


if __name__ == "__main__":
    main()
