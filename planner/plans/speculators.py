"""What an engine is told so that it speculates: its words for a kind of draft, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.errors import NoPlanError
from planner.plans.plan import Plan
from planner.plans.rules import draft_refusal
from planner.specs.engine import Engine
from planner.specs.hardware import Hardware
from planner.specs.launch import Launch, Speculator
from planner.specs.speculation import KINDS, Speculation
from planner.specs.workload import Workload

_NO_DRAFT = "DRAFT-MODEL"


def speculator_of(
    launch: Launch, engine: Engine, hardware: Hardware, plan: Plan, workload: Workload
) -> Speculator | None:
    """What makes the engine speculate as asked; none where nothing is drafted.

    Raises:
        NoPlanError: it cannot, or not with this plan.
    """
    if workload.speculation is None:
        return None
    draft = workload.speculation.draft
    if reason := draft_refusal(draft, engine, plan, priced=False):
        raise NoPlanError(f"{plan.label}: {reason}")
    found = launch.speculation.get(draft.kind)
    cannot = f"engine {engine.name} cannot speculate with {KINDS[draft.kind]}"
    if found is None:
        has = ", ".join(launch.speculation) or "none"
        raise NoPlanError(f"{cannot}: its file has no words for it (launch.speculation has {has})")
    if found.platforms and hardware.devices.platform not in found.platforms:
        raise NoPlanError(f"{cannot} on {hardware.devices.platform}: it does on {', '.join(found.platforms)}")
    return found


def speculating(launch: Launch, speculator: Speculator) -> Launch:
    """The engine's words with those of a draft, and its file with what says the same there."""
    files = {name: {**content, **speculator.content} for name, content in launch.files.items()}
    return launch._replace(arguments={**launch.arguments, "speculation": speculator.words}, files=files)


def placeholders(speculation: Speculation | None) -> dict[str, Any]:
    """What placeholders about drafts stand for."""
    if speculation is None:
        return {}
    values: dict[str, Any] = {"spec_tokens": speculation.tokens, "spec_rows": speculation.tokens + 1}
    if speculation.draft.kind == "model":
        values["draft"] = _draft_id(speculation)
    return values


def _draft_id(speculation: Speculation) -> str:
    """The id of a draft model as it was asked for, else its first; a name in capitals where its file has none."""
    model = speculation.draft.model
    assert model is not None
    ids = {each.lower(): each for each in model.hf_ids}
    return ids.get(speculation.draft.asked.lower(), next(iter(model.hf_ids), _NO_DRAFT))


def notes_of(speculation: Speculation | None, speculator: Speculator | None) -> Iterator[str]:
    """What must be known of a draft."""
    if speculation is None or speculator is None:
        return
    if speculation.draft.kind == "model" and _draft_id(speculation) == _NO_DRAFT:
        yield f"{_NO_DRAFT} stands for a Hugging Face id or path: the file of {speculation.draft.label} names none"
    if speculator.note is not None:
        yield speculator.note
