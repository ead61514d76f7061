"""A prompt's KV cache on its way from the chips that prefilled it to those that decode: bytes, seconds, what shows.

A layer's keys and values leave as soon as it is done (Splitwise, ISCA 2024, section 4.3; DistServe sends them once the
prompt is done). Of n layers of a stage that take C seconds in all and whose KV takes T seconds on the wires,

    visible = max(T_1, T - C (n - 1) / n)

is left when the last one is done: the KV of that layer, T_1, or the rest, where wires are slower than computing. Stages
of a pipeline send over wires of their own, and all but the last are done a stage's time before. KV is counted in the
engine's dtype and in whole blocks, as engines hand it over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.rows import Rows
from planner.costs.serving import Setting, fit
from planner.plans.placement import Placement
from planner.plans.plan import Plan

Array = NDArray[np.float64]


class Cache(NamedTuple):
    """The KV of one prompt as plans hold it; arrays over plans."""

    total: Array
    """Bytes that the replica's chips hold together: copies of KV heads counted as often as they are held."""
    chip: Array
    """Bytes of the chip that holds most."""
    layers: Array
    """Layers of the fullest stage."""

    def join(self, other: Cache) -> Cache:
        """Those of further plans behind these."""
        return Cache(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def cache_of(setting: Setting, plans: list[Plan], isl: float) -> Cache:
    """The KV of a prompt under plans of one structure.

    Args:
        setting: what they share.
        plans: their dp is not looked at.
        isl: tokens of the prompt.
    """
    alone = setting._replace(lengths=None, drafting=None)
    rows = Rows.of_plans(plans, isl=float(np.ceil(isl)), osl=0.0, concurrency=1.0)._replace(dp=np.ones(len(plans)))
    chip = fit(alone, rows, clip=False).kv
    whole = fit(alone, rows._replace(pp=np.ones(rows.length)), clip=False).kv
    groups = np.array([each.stage_chips if each.attention == "batch" else each.sharding.batch for each in plans])
    holding = np.array([each.stage_chips for each in plans]) / groups  # chips of a stage that hold parts of a request
    return Cache(whole * holding, chip, np.ceil(setting.model.layers / rows.pp))


def wire_seconds(network: Network, share: Array, total: Array, level: int) -> Array:
    """Seconds that one end of a transfer wants on its own wires.

    On a torus the other pool is the neighbouring slice, and what joins them is the smallest face: one wire of each of
    its chips.

    Args:
        network: of this end.
        share: bytes of the chip that sends or receives most.
        total: bytes of all of its chips.
        level: the outermost network level that is crossed; beyond the machine's own it is its outermost.
    """
    place: Placement = network.placement
    if place.slice is not None:
        axes = sorted(place.slice.axes)
        face = axes[0] * axes[1]
        return network.send(np.maximum(share, total / face), 0)
    return network.send(share, level)


def visible_seconds(whole: Array, piece: Array, compute: Array, pieces: Array) -> Array:
    """Seconds of a transfer that are left when its prompt's last layer is done; arrays that broadcast.

    Args:
        whole: seconds of all KV of the last stage on the wires.
        piece: those of one layer's.
        compute: seconds in which the stage computes.
        pieces: layers of the stage; 1 = nothing is sent before the prompt is done.
    """
    return np.asarray(np.maximum(np.minimum(piece, whole), whole - compute * (pieces - 1) / pieces))
