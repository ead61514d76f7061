"""What all tests share: the package from the checkout where none is installed, and an environment of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Before numpy is loaded, and for the workers and processes that are started: their matrices are small, and threads of
# every worker would wait for each other's cores.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402

if find_spec("planner") is None:  # `pytest` alone, unlike `python -m pytest`, does not look in the directory it runs in
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure(config: pytest.Config) -> None:
    """Where no bytecode is to stand beside the sources, it stands with pytest's own cache.

    Else the many processes that tests start, and every worker for every module of tests, would compile all they
    import each time.
    """
    if sys.dont_write_bytecode and hasattr(config, "cache"):  # no cache = none is wanted at all
        kept = str(config.cache.mkdir("bytecode"))  # type: ignore[union-attr]
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = kept
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode = False


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
