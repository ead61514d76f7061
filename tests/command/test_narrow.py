"""The commands about phases and diagnoses on a narrow terminal."""

from __future__ import annotations

import pytest
from helpers import run


@pytest.mark.parametrize(
    "words",
    [
        "diagnose -m llama3.1-8b --gpus 2",
        "diagnose -m flux.1-dev --gpus 2",
        "shift -m llama3.1-8b --gpus 4 --arrival-rate 3 --requests 30",
        "goodput -m llama3-8b --plan TP1 --arrival-rate 3 --max-ttft 200 --requests 30",
        "disaggregate -m llama3-8b --gpus 4 --max-ttft 200 --max-tpot 20 --tp 1 --pp 1",
    ],
)
def test_sixty_columns_are_enough(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    done = run(*words.split())
    assert done.status == 0
    assert max(map(len, done.out.splitlines())) <= 60
