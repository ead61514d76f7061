"""The benchmark runs from a checkout, wherever it is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from helpers import ROOT

# a rate over few runs, without the processes that it starts for its ratios
SCRIPT = """
import runpy
bench = runpy.run_path({path!r}, run_name="speed")
import planner
print(planner.__file__)
print(bench["points_rate"](1))
"""


def test_the_benchmark_measures_the_checkout_from_any_directory(tmp_path: Path) -> None:
    path = ROOT / "benchmarks" / "speed.py"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(path=str(path))],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    file, rates = done.stdout.splitlines()
    assert Path(file).is_relative_to(ROOT)
    assert re.fullmatch(r" *[\d,]+ rows/s, [\d,]+ by process time", rates)
