"""Speed-ups by the model's own prediction modules, where the acceptance is published."""

from __future__ import annotations

import re

import pytest

from planner.errors import InputError
from planner.evidence import speculated
from planner.evidence.comparison import summary
from planner.specs.measurements import measurements

ROWS = measurements("speculation")
FOUND = speculated.comparisons()


def test_every_row_says_where_it_is_written_and_what_is_implied() -> None:
    assert len(ROWS) == len({row["case"] for row in ROWS}) == 4
    for row in ROWS:
        assert re.match(r"https://github\.com/\S+/(issues|pull)/\d+$", row["source"])
        assert row["grade"] == "A" or row["note"]
        counts = re.match(r"(\d+) of (\d+) drafted tokens accepted", row["note"])
        if counts:
            assert float(row["accept"]) == pytest.approx(int(counts[1]) / int(counts[2]), abs=5e-4)
    assert all(each.source and each.what and each.reason for each in speculated.LEFT_OUT)


def test_drafting_wins_what_it_was_measured_to_win() -> None:
    """DeepSeek-R1 drafts one token: 1.76 times at one request, 1.35 at 128; at most 1 + a, which is 1.9."""
    assert all(1 < each.predicted < 1.9 for each in FOUND)
    assert max(abs(each.error) for each in FOUND) < 0.12
    assert summary((), [each.error for each in FOUND]).mean < 0.08


def test_a_row_that_cannot_draft_is_named_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"speculation.csv, case MTP-SGL\S+: .*prediction modules"):
        speculated.comparisons([{**ROWS[0], "model": "llama3-8b", "plan": "TP8"}])
    assert speculated.comparisons([]) == []
