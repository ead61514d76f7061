"""Published runs of diffusion transformers: sound rows, a fixed split, and errors within what is claimed."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Late

from planner.diffusion.plan import Split
from planner.evidence import diffusion
from planner.specs.catalog import load_hardware, load_sampler
from planner.specs.measurements import measured_diffusion, measurements

RATIO = "speed-up over one chip"
FOUND = Late(diffusion.comparisons)


@pytest.mark.parametrize("table", ["diffusion", "diffusion_picks"])
def test_rows_name_what_there_is_and_where_it_is_from(table: str) -> None:
    rows = measurements(table)
    assert len({row["case"] for row in rows}) == len(rows)
    for row in rows:
        assert row["source"].startswith(("github:xdit-project/xDiT@", "arXiv "))
        load_hardware(row["hardware"], load_sampler(row["engine"]))
        measured_diffusion(row["model"])
        for label in [row.get("plan", ""), *row.get("best", "").split(), *row.get("candidates", "").split()]:
            if label:
                Split.parse(label)


def test_the_reports_own_figures_are_carried_over() -> None:
    rows = {row["case"]: row for row in measurements("diffusion")}

    def ratio(group: str, label: str) -> float:
        return float(rows[f"{group}-U1"]["seconds"]) / float(rows[f"{group}-{label}"]["seconds"])

    assert ratio("flux-h100-eager", "U4") == pytest.approx(1.58, abs=0.01)
    assert ratio("flux-h100-compiled", "U4") == pytest.approx(2.64, abs=0.01)
    assert ratio("hunyuanvideo-720p-h100-sxm", "U8") == pytest.approx(5.64, abs=0.01)
    assert ratio("sana-4096-a100", "CFG2xU2xR2") == pytest.approx(4.4, abs=0.05)
    large = {label: float(rows[f"pixart-4096-l40-{label}"]["seconds"]) for label in ("U2xR4", "PF8")}
    assert large["U2xR4"] / large["PF8"] == pytest.approx(1.16, abs=0.005)


def test_half_of_the_cases_is_only_reported() -> None:
    parts = [each.part for each in FOUND]
    assert 0.4 < parts.count("unseen") / len(parts) < 0.6


@pytest.mark.parametrize("part", ["fitted", "unseen"])
def test_ratios_to_one_chip_are_within_a_fifth_in_the_median(part: str) -> None:
    errors = [abs(each.error) for each in FOUND if each.check == RATIO and each.part == part]
    assert len(errors) > 20
    assert np.median(errors) < 0.08
    assert np.quantile(errors, 0.9) < 0.20


def test_the_residuals_of_the_engines_are_those_of_the_unseen_half() -> None:
    for name in ("xdit", "xdit-eager"):
        errors = [
            abs(each.error) for each in FOUND if each.check == RATIO and each.part == "unseen" and each.engine == name
        ]
        assert load_sampler(name).host.provenance.residual == pytest.approx(np.mean(errors), abs=0.006)


def test_the_published_winner_is_chosen_in_four_of_five_cases() -> None:
    found = diffusion.picks()
    assert len(found) > 40
    assert sum(each.right for each in found) >= 0.8 * len(found)
    assert sum(each.right or each.behind < diffusion.CLOSE for each in found) >= 0.95 * len(found)
    assert all(each.behind >= 0 for each in found)
