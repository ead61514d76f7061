"""What lies beyond the measurements behind an engine's constants is said, row by row."""

from __future__ import annotations

from typing import Any

import pytest

from planner import estimate, load_engine
from planner.estimating import estimate_points
from planner.specs.catalog import ENGINES, HARDWARE, names


@pytest.mark.parametrize(
    ("options", "beyond"),
    [
        ({"tp": 8}, None),
        ({"tp": 8, "pp": 2}, "pp"),
        ({"tp": 16}, "tp"),
        ({"tp": 4, "hardware": "a100"}, "hardware"),
        ({"tp": 8, "isl": 8000}, "isl"),
        ({"tp": 8, "concurrency": 200}, "batch"),
        ({"tp": 8, "dp": 2, "concurrency": 200}, None),  # 100 a replica
        ({"tp": 16, "hardware": "a100", "isl": 8000, "concurrency": 200}, "hardware, tp, batch, isl"),
        ({"tp": 8, "engine": "vllm-0.6"}, "version"),
        ({"tp": 8, "prefix_hit": 0.5}, "prefix"),
        ({"tp": 8, "spec_tokens": 2, "spec_accept": 0.5, "draft": "ngram"}, "speculation"),
        ({"tp": 8, "spec_tokens": 0, "spec_accept": 0.5, "draft": "ngram"}, None),
        ({"tp": 16, "pp": 2, "engine": "ideal"}, None),
        ({"tp": 8, "hardware": "h100-lecture"}, None),
        ({"tp": 8, "weights": "int4"}, "weights"),
        ({"tp": 8, "engine": "sglang"}, "batch"),  # nothing below 16 in flight was measured
        ({"tp": 8, "engine": "trtllm-0.9", "schedule": "continuous"}, "schedule"),
        ({"tp": 8, "engine": "trtllm-0.9"}, None),  # whose schedule is static
    ],
)
def test_what_lies_beyond_the_calibration(options: dict[str, Any], beyond: str | None) -> None:
    row = estimate("llama3.1-70b", **options)
    assert row["extrapolates"] == beyond
    assert row["engine_version"] == load_engine(row["engine"]).version


def test_each_row_has_its_own() -> None:
    found = estimate_points({"model": ["llama3.1-70b"], "tp": [8, 16, 8], "concurrency": [1, 1, 200]}, 3)
    assert found["extrapolates"].tolist() == [None, "tp", "batch"]


@pytest.mark.parametrize("name", names(ENGINES))
def test_an_engine_says_what_it_stands_on_or_is_a_bound(name: str) -> None:
    engine = load_engine(name)
    if engine.calibrated is None:
        assert name in {"ideal", "lecture"}
    else:
        assert set(engine.calibrated.hardware) <= set(names(HARDWARE))
        assert engine.host.provenance.status == "fitted" or name in {"jetstream", "gpt-fast", "pope", "sglang-ep"}
