"""Requests of tests, by what differs from the usual one."""

from __future__ import annotations

from typing import Any

from planner import NoPlanError, Request, Results, Workload, load_machine, load_model, rank


def request(
    model: str = "llama3-70b",
    gpus: int = 16,
    hardware: str = "h100-sxm",
    engine: str | None = None,
    work: dict[str, Any] | None = None,
    **options: Any,
) -> Request:
    return Request(load_model(model), *load_machine(hardware, engine), gpus, Workload(**(work or {})), **options)


def by_plan(results: Results) -> dict[str, dict[str, Any]]:
    return {row["plan"]: row for row in results.rows()}


def works(asked: Request) -> bool:
    try:
        return len(rank(asked).results) > 0
    except NoPlanError:
        return False
