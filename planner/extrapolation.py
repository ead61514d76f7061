"""How far a row stands on measurements: what lies beyond those behind the engine, and which constants are assumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.rows import Rows
from planner.costs.serving import Setting
from planner.specs.engine import Engine
from planner.specs.hardware import LATENT_KINDS, STAND_INS, Hardware
from planner.specs.model import Model

BEYOND = (
    "hardware", "version", "weights", "schedule", "tp", "pp", "batch", "isl", "prefix", "speculation",
    "experts", "latent", "sharding",
)  # fmt: skip
"""What may lie beyond: machine, version of the engine, dtype of the weights, batching, a degree, requests per replica,
length of a prompt; cached prompts, drafted tokens, experts, latent attention and attention in groups or by parts of a
sequence, none of which any engine's constants were held against."""
Column = NDArray[Any]


def beyond(setting: Setting, rows: Rows, batch: NDArray[np.float64]) -> Column:
    """What of each row lies beyond the engine's calibration, as `tp, batch`; none = nothing, or there is none.

    Args:
        setting: hardware is within by its name or by that of what it is `like`; any other file that extends one is a
            machine of its own.
        rows: to look at.
        batch: [rows] requests per replica.
    """
    within = setting.engine.calibrated
    if within is None:
        return np.full(rows.length, None, dtype=object)

    def everywhere(mask: bool) -> NDArray[np.bool_]:
        return np.full(rows.length, mask)

    return _worded(
        rows.length,
        BEYOND,
        (
            everywhere(not setting.hardware.within(within.hardware)),
            everywhere(not within.same_version),
            everywhere(setting.formats.weights.name not in within.weights),
            everywhere(within.schedule not in (None, setting.schedule)),
            rows.tp > within.tp,
            rows.pp > within.pp,
            (batch > within.batch) | (batch < within.least_batch),
            rows.isl > within.isl,
            rows.prefix_hit > 0,
            everywhere(False) if setting.drafting is None else rows.spec_tokens > 0,
            everywhere(setting.model.experts is not None),
            everywhere(setting.model.attention.latent is not None),
            (rows.attention_dp > 1) | (rows.sequence > 1) | (rows.cp > 1),
        ),
    )


def unmeasured(setting: Setting, rows: Rows) -> Column:
    """Groups of constants behind each row that nobody measured, as `elementwise, collectives over infiniband`."""
    hardware, engine, chips = setting.hardware, setting.engine, rows.width * rows.pp
    other = set(LATENT_KINDS.values() if setting.model.attention.latent else LATENT_KINDS)
    if setting.model.experts is None:
        other |= STAND_INS.keys()
    kinds = [kind for kind in dict.fromkeys((*hardware.kernels, *LATENT_KINDS, *STAND_INS)) if kind not in other]
    kernels = [kind for kind in kinds if _of(hardware, kind, setting.formats.compute) == "assumed"]
    names = [kind.replace("_", " ") for kind in kernels]
    if engine.host.provenance.status == "assumed":
        names.append("host time")
    if engine.memory.provenance.status == "assumed":
        names.append("memory that the engine keeps")
    masks = [np.ones(rows.length, dtype=bool)] * len(names)
    domains = [1, *(level.chips or 1 for level in hardware.network[:-1])]
    for level, domain in zip(hardware.network, domains, strict=True):
        here = _assumed_collectives(hardware, engine, level.name)
        if here:
            names.append(f"{here} over {level.name}")
            masks.append(chips > domain)
    return _worded(rows.length, names, masks)


def _assumed_collectives(hardware: Hardware, engine: Engine, level: str) -> str:
    """The operations on a level for which the engine may run a kernel that nobody measured, "" for none.

    `collectives` where all-reduce is among them, since every plan of several ranks has one. Out on the last level
    nothing scatters: a reduce-scatter is a phase inside the domains of the level above.
    """
    kernels = {"send": {row.kernel for row in hardware.collectives}}  # no rule says what sends
    for rule in engine.collectives:
        kernels.setdefault(rule.op, set()).update(rule.kernels)
    unsure = dict.fromkeys(
        row.op
        for row in hardware.collectives
        if row.level == level and row.provenance.status == "assumed" and row.kernel in kernels.get(row.op, ())
    )
    if "all_reduce" in unsure:
        return "collectives"
    if level == hardware.network[-1].name:
        unsure.pop("reduce_scatter", None)
    return " and ".join(op.replace("_", "-") for op in unsure)


def stands_on_measurements(model: Model, hardware: Hardware, engine: Engine, compute: str) -> bool:
    """Whether matrix products and attention were measured on this chip, and the engine, if it is one, with it.

    No engine was with experts or latent attention.
    """
    if model.experts is not None or model.attention.latent is not None:
        return False
    within = engine.calibrated
    known = within is None or (hardware.within(within.hardware) and within.same_version)
    kernels = ("gemm", "attention_decode", "attention_prefill")
    return known and all(_of(hardware, kind, compute) != "assumed" for kind in kernels)


def _of(hardware: Hardware, kind: str, dtype: str) -> str:
    return hardware.constants(kind, dtype)[1].provenance.status


def _worded(rows: int, names: Sequence[str], masks: Sequence[NDArray[np.bool_]]) -> Column:
    """The names whose mask holds, row by row, joined; none where no mask does."""
    texts: Column = np.full(rows, None, dtype=object)
    if not any(mask.any() for mask in masks):
        return texts
    code = np.zeros(rows, dtype=np.int64)
    for place, mask in enumerate(masks):
        code |= mask.astype(np.int64) << place
    for number in sorted(set(code.tolist())):  # np.unique would import numpy.ma, which takes longer than all of this
        words = ", ".join(name for place, name in enumerate(names) if number >> place & 1)
        texts[code == number] = words or None
    return texts
