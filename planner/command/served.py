"""Serving runs of a user's own as options: what the command line gives, completed by what the result says."""

from __future__ import annotations

from typing import Any

from planner.errors import InputError
from planner.specs.benchmarks import ServingRun, load_of, where
from planner.specs.catalog import ENGINES, load_model, names

DEGREES = ("tp", "pp", "dp")
_AGREES = 0.1  # by which a length that was asked for may differ from the mean over the requests


def server_of(run: ServingRun) -> str | None:
    """The catalogue's engine that a result names; none where it names none, as `openai` does."""
    server = (run.server or "").partition("-")[0]
    return server if server in names(ENGINES) else None


def doubt(run: ServingRun, engine: str) -> str | None:
    """A sentence where a result names another of the catalogue's engines than the one that is asked for."""
    server = server_of(run)
    if server is None or engine not in names(ENGINES) or engine.partition("-")[0] == server:
        return None
    return f"{run.file} is a run of {server}, but the engine is {engine}: --engine {server}?"


def options_of(run: ServingRun, given: dict[str, Any]) -> dict[str, Any]:
    """Options that describe a run.

    Args:
        run: a result.
        given: options by name; None = not given.

    Returns:
        `given` with model, lengths, load and degrees.

    Raises:
        InputError: something that neither gives, or that they give differently.
    """
    asked = dict(given)
    if asked.get("model") is None:
        if run.model is None:
            raise InputError(f"{where(run)}: no model: the result names none; give --model")
        try:
            load_model(run.model)
        except InputError as error:
            raise InputError(f"{where(run)}: {error}; --model says which of them it is, --weights its format") from None
        asked["model"] = run.model
    for name in ("isl", "osl"):
        measured = getattr(run, name)
        if asked.get(name) is None:
            asked[name] = measured
        elif abs(asked[name] / measured - 1) > _AGREES:
            raise InputError(
                f"--{name} {asked[name]} contradicts {where(run)}, whose requests have {measured} tokens on average: "
                "leave it out"
            )
    if asked.get("concurrency") is None:
        if run.concurrency is None:
            raise InputError(f"{where(run)}: {load_of(run)}; give --concurrency")
        asked["concurrency"] = run.concurrency
    elif run.concurrency not in (None, asked["concurrency"]):
        raise InputError(
            f"--concurrency {asked['concurrency']} contradicts {where(run)}, which ran {run.concurrency}: leave it out"
        )
    if asked.get("plan") is None and all(asked.get(name) is None for name in DEGREES):
        asked |= {name: getattr(run, name) for name in DEGREES}
    return asked
