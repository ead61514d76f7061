"""Reading what was measured: the package's own tables, with the models that only they need."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from planner.errors import InputError
from planner.specs.catalog import DIFFUSION, MODELS, load_diffusion, load_model, names
from planner.specs.diffusion import Diffusion
from planner.specs.model import Model

FOLDER = Path(__file__).resolve().parent.parent / "evidence"


@cache
def measurements(name: str) -> tuple[dict[str, str], ...]:
    """Rows of `planner/evidence/<name>.csv`.

    Raises:
        InputError: the installation lacks the file.
    """
    path = FOLDER / f"{name}.csv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(csv.DictReader(file))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; is the installation whole?") from None


def measured_model(name: str) -> Model:
    """A model of the catalogue, or one that stands beside the measurements only.

    Raises:
        InputError: in neither.
    """
    beside = FOLDER / "models" / f"{name}.yaml"
    return load_model(beside if beside.is_file() and name not in names(MODELS) else name)


def measured_diffusion(name: str) -> Diffusion:
    """The same of diffusion transformers.

    Raises:
        InputError: in neither.
    """
    beside = FOLDER / "models" / f"{name}.yaml"
    return load_diffusion(beside if beside.is_file() and name not in names(DIFFUSION) else name)
