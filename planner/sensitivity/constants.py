"""The constants that a decision may hang on, how far off each may be, and hardware and engine with one of them changed.

Plausible range of a constant: a factor u either way, from its provenance (`slack`).

* With a residual r: u = 1 + 2 r, at least 1.1. r is a mean absolute error, and nine tenths of a normal distribution
  lie within twice that; what was measured on one machine differs by a tenth on another or in another version.
* Measured, fitted or from a datasheet, without a residual: u = 1.25, twice the error of a usual fit.
* Derived: u = 1.5. Assumed or from a textbook: u = 2.

A share of a peak stays physical: at most 1, or 1.5 in a law whose p is below 1 and makes it no share of a time.
Figures of datasheets are not varied themselves: the shares are fitted against them, so that an error cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.costs.layers import Formats
from planner.costs.weights import Num
from planner.specs.engine import Engine, Host
from planner.specs.fields import Provenance
from planner.specs.hardware import LATENT_KINDS, CollectiveKernel, Hardware, KernelConstants

_LEAST, _UNKNOWN = 1.1, 1.25
_SLACK = {"assumed": 2.0, "textbook": 2.0, "derived": 1.5}
_SHARE = "_fraction"
_KINDS = {
    "gemm": "GEMM",
    "grouped_gemm": "grouped GEMM",
    "attention_prefill": "prefill attention",
    "attention_decode": "decode attention",
    "attention_latent": "latent decode attention",
    "attention_latent_prefill": "latent prefill attention",
    "elementwise": "element-wise",
}
_FIELDS = {
    "fixed_us": "floor",
    "memory_fraction": "share of memory bandwidth",
    "compute_fraction": "share of peak compute",
    "item_us": "time per head",
    "depth_us": "time per doubling of the context",
    "step_us": "host time per step",
    "per_sequence_us": "host time per sequence",
    "layer_us": "host time per layer",
    "prefill_layer_us": "host time per layer with a prompt",
    "request_us": "host time per request",
    "speed": "bandwidth against the kernel alone",
}
PHASES = ("all_reduce", "all_gather", "reduce_scatter")
"""Operations that a hierarchical all-reduce runs on the levels below its own."""


class Constant(NamedTuple):
    """One constant."""

    path: tuple[str, ...]
    """Where it stands: kernels, kind, dtype, key; host, key; memory, key; or collectives, kernel, op, level, latency or
    bandwidth: all algorithms and group sizes of the kernel, which share wires and a library."""
    name: str
    value: float | None
    """As in its file; none for collectives, whose rows have a value each."""
    unit: str
    """us, GiB, or "" for a share."""
    status: str
    """Of its provenance; of several rows the least certain."""
    slack: float
    """u of its plausible range, value / u to value x u."""
    most: float = np.inf
    """Factor at which a share stops being physical."""

    @property
    def is_rate(self) -> bool:
        """Whether more of it means less time: shares of a peak."""
        return self.path[-1] in ("bandwidth", "speed") or self.path[-1].endswith(_SHARE)

    def ends(self) -> tuple[float, ...]:
        """The factors at the ends of the plausible range, where there is room."""
        return tuple(factor for factor in (1 / self.slack, min(self.slack, self.most)) if factor != 1)


def slack(provenance: Provenance) -> float:
    """The factor u within which a constant is plausible, from where it comes (see the module's text)."""
    known = None if provenance.residual is None else max(_LEAST, 1 + 2 * provenance.residual)
    if provenance.status in _SLACK:
        return max(_SLACK[provenance.status], known or 1.0)
    return known or _UNKNOWN


def kernel_constants(
    hardware: Hardware, formats: Formats, latent: bool = False, experts: bool = False
) -> Iterator[Constant]:
    """Constants of the kernels that run in these formats, of plain or latent attention: every number but p.

    Those of grouped products where a model has experts and the chip was measured with them.
    """
    decode, prefill = LATENT_KINDS if latent else LATENT_KINDS.values()
    runs = [("gemm", formats.compute), ("gemm", formats.native), (decode, formats.kv.compute)]
    runs += [(prefill, formats.kv.compute), ("elementwise", formats.native)]
    if experts and formats.compute in hardware.kernels.get("grouped_gemm", {}):
        runs.append(("grouped_gemm", formats.compute))
    for kind, dtype in dict.fromkeys((kind, hardware.constants(kind, dtype)[0]) for kind, dtype in runs):
        _, constants = hardware.constants(kind, dtype)
        in_step = constants.in_step
        speed = 1.0
        if in_step is not None:  # its fixed time stands for the kernel's own
            speed = in_step.speed
            for key, unit, most in (("fixed_us", "us", np.inf), ("speed", "", _headroom(speed, constants.p))):
                yield Constant(
                    ("kernels", kind, dtype, "in_step", key),
                    f"{_KINDS.get(kind, kind)} {_FIELDS.get(key, key)} in a step ({dtype})",
                    getattr(in_step, key),
                    unit,
                    in_step.provenance.status,
                    slack(in_step.provenance),
                    most,
                )
        for key in KernelConstants._fields:
            value = getattr(constants, key)
            dead = key == "p" or (key == "fixed_us" and in_step is not None)
            if not dead and isinstance(value, int | float) and value:
                share = key.endswith(_SHARE)
                yield Constant(
                    ("kernels", kind, dtype, key),
                    f"{_KINDS.get(kind, kind)} {_FIELDS.get(key, key)} ({dtype})",
                    value,
                    "" if share else "us",
                    constants.provenance.status,
                    slack(constants.provenance),
                    _headroom(value * (speed if key == "memory_fraction" else 1.0), constants.p) if share else np.inf,
                )


def host_constants(engine: Engine) -> Iterator[Constant]:
    """The engine's host times."""
    known = engine.host.provenance
    for key in Host._fields:
        value = getattr(engine.host, key)
        if isinstance(value, int | float) and value:
            yield Constant(("host", key), _FIELDS.get(key, key), value, "us", known.status, slack(known))


def memory_constants(engine: Engine) -> Iterator[Constant]:
    """The engine's runtime memory inside the budget; the value is that of its largest group."""
    known, inside = engine.memory.provenance, engine.memory.inside_gib
    if any(inside.values()):
        ranks = max(inside)
        name = f"{engine.name} runtime memory (at {ranks} ranks)"
        yield Constant(("memory", "inside_gib"), name, inside[ranks], "GiB", known.status, slack(known))


def collective_constants(hardware: Hardware, engine: Engine, calls: Iterable[tuple[str, int]]) -> Iterator[Constant]:
    """Latency and bandwidth of every kernel that the engine's rules may run for (operation, level) of the network."""
    asked = set(calls)
    asked |= {(op, below) for used, level in asked if used == "all_reduce" for below in range(level) for op in PHASES}
    wanted: dict[tuple[str, str, str], None] = {}
    for rule in engine.collectives:
        for op, level in sorted(asked):
            if rule.op == op and rule.span in ("any", "across" if level else "inside"):
                wanted |= dict.fromkeys((kernel, op, hardware.network[level].name) for kernel in rule.kernels)
    for kernel, op, name in wanted:
        rows = hardware.collective(kernel, op, name)
        if not rows:
            continue
        least = max((row.provenance for row in rows), key=slack)
        shares = [
            (each.bandwidth_fraction, each.p) for row in rows for each in (row.ranks.values() if row.ranks else (row,))
        ]
        for what, most in (("latency", np.inf), ("bandwidth", min(_headroom(share, p) for share, p in shares))):
            yield Constant(
                ("collectives", kernel, op, name, what),
                f"{kernel} {op.replace('_', '-')} over {name} {what}",
                None,
                "us",
                least.status,
                slack(least),
                most,
            )


def _headroom(share: float, p: float) -> float:
    """Factor up to which a share of a peak stays physical."""
    return max(1.0, (1.0 if p >= 1 else 1.5) / share)


def scaled(hardware: Hardware, engine: Engine, path: tuple[str, ...], factor: Num) -> tuple[Hardware, Engine]:
    """Hardware and engine with the constant at `path` multiplied by a factor.

    For kernels and host it may be a column of factors, one for each row that is priced.
    """
    place, *keys = path
    if place == "host":
        return hardware, engine._replace(host=engine.host._replace(**_times(engine.host, keys, factor)))
    if place == "memory":
        inside = {ranks: gib * factor for ranks, gib in engine.memory.inside_gib.items()}
        return hardware, engine._replace(memory=engine.memory._replace(inside_gib=inside))
    if place == "kernels":
        kind, dtype, *nested, key = keys
        _, changed = hardware.constants(kind, dtype)
        if nested:
            changed = changed._replace(in_step=changed.in_step._replace(**_times(changed.in_step, [key], factor)))  # type: ignore[union-attr]
        else:
            changed = changed._replace(**_times(changed, [key], factor))
        by_dtype = hardware.kernels.get(kind, {}) | {dtype: changed}
        return hardware._replace(kernels=hardware.kernels | {kind: by_dtype}), engine
    *row, what = keys
    parts = ["latency_us", "base_us", "hop_us", "inner_hop_us"] if what == "latency" else ["bandwidth_fraction"]

    def with_factor(kernel: CollectiveKernel) -> CollectiveKernel:
        ranks = {size: each._replace(**_times(each, parts, factor)) for size, each in kernel.ranks.items()}
        return kernel._replace(ranks=ranks, **_times(kernel, parts, factor))

    return hardware._replace(
        collectives=tuple(
            with_factor(each) if [each.kernel, each.op, each.level] == row else each for each in hardware.collectives
        )
    ), engine


def _times(record: Any, keys: Sequence[str], factor: Num) -> dict[str, Any]:
    """Those of the keys that a record has a number for, multiplied."""
    values = {key: getattr(record, key, None) for key in keys}
    return {key: value * factor for key, value in values.items() if value is not None}
