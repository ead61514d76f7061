"""What all tests share: the package from the checkout where none is installed, and an environment of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("planner") is None:  # `pytest` alone, unlike `python -m pytest`, does not look in the directory it runs in
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests change neither what is found nor how it is printed."""
    for name in ("PLAN_CONFIG_PATH", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fresh_catalog() -> Iterator[None]:
    """The catalogue as a new process finds it, before and after: it remembers the files that it has read."""
    from helpers import forget_files  # noqa: PLC0415 (the package may only now be importable)

    forget_files()
    yield
    forget_files()
