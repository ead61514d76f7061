"""Fitting constants to measured times: the code that made the shipped ones and that `plan calibrate` runs.

The model that is fitted is the one that prices: `price_operation` with candidate constants laid over a hardware's,
and the collectives' || latency, bytes / bandwidth ||_p. Errors are relative (differences of logarithms), so that a
kernel of 5 us counts as much as one of 5 ms; the loss is robust (soft L1 beyond 10 %), so that a few odd rows do not
move the rest. Constants are positive and are searched by their logarithms within the bounds below, from several
starts, since exponents make local minima.

Needs scipy, which is the optional extra `calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import sent_bytes
from planner.costs.layers import Operation
from planner.costs.pnorm import pnorm
from planner.costs.roofline import price_operation
from planner.errors import InputError
from planner.evidence.solver import least_squares
from planner.specs.fields import Provenance
from planner.specs.hardware import Hardware, KernelConstants, RankRow
from planner.units import US

Array = NDArray[np.float64]

KERNEL_BOUNDS = {
    "fixed_us": (0.05, 1e4),
    "compute_fraction": (0.005, 1.49),
    "memory_fraction": (0.005, 1.49),
    "item_us": (1e-5, 10.0),
    "depth_us": (1e-4, 100.0),
    "p": (0.5, 8.0),
}
"""Range of every constant of a kernel; a fit that ends on an edge did not find its value (see `on_edge`)."""
RANK_BOUNDS = {"latency_us": (0.1, 1e5), "bandwidth_fraction": (0.001, 1.49), "p": (0.3, 3.0)}
"""The same for a collective at one group size."""
FEWEST = 4
"""Distinct sizes or shapes below which constants are not fitted."""
_SCALE = 0.1  # relative error from which the loss grows linearly
_EXPONENTS = (0.7, 1.2, 2.5)
_DIGITS = 4
_FRACTION = 0.75  # where a search for a share of the peak begins if nothing better is known
_STATES = {
    "fixed_us": 5.0,
    "compute_fraction": _FRACTION,
    "memory_fraction": _FRACTION,
    "item_us": 0.02,
    "depth_us": 0.5,
}


def fit_kernel(
    hardware: Hardware,
    operation: Operation,
    seconds: Array,
    *,
    source: str,
    version: str | None = None,
    fixed_us: float | None = None,
    start: KernelConstants | None = None,
) -> KernelConstants:
    """The constants of a kind of kernel that explain measured times best.

    Fitted are those that the rows can show: a share of the compute peak where there are FLOPs (except in decode
    attention, which is priced by its traffic and its items), the cost of an item where there are items, of depth
    where the contexts differ, and p where two resources compete. p of prefill attention and of element-wise
    operations stays that of `start`: their phases follow one another. That of latent attention stays too: few of its
    rows have both resources at work, and any p from 1.2 to 6 fits. So does a constant to which the rows do not answer:
    if all are large, the floor. Kernels are priced as they run alone (`Hardware.alone`).

    Args:
        hardware: chip whose peaks the shares refer to; an engine's overrides may be applied.
        operation: kind and dtype, and quantities as numbers or arrays [rows]; `times` counts kernels a row.
        seconds: [rows] measured.
        source: of the rows, for the provenance.
        version: of the software that ran them.
        fixed_us: holds the floor at this value (one floor for all dtypes of a chip).
        start: where the search begins, and the constants that the rows do not show; none = the hardware's own.

    Returns:
        Constants to 4 significant digits; `provenance.residual` is their mean absolute relative error on the rows.

    Raises:
        InputError: fewer than FEWEST distinct shapes, or fewer than constants; times or quantities that are not
            positive and finite; no scipy.
    """
    hardware = hardware.alone
    dtype, first = _begin(hardware, operation, start)
    first = first._replace(in_step=None)
    table = _quantities(operation, seconds)
    free = _free(operation, table, first)
    if fixed_us is not None:
        first = first._replace(fixed_us=fixed_us)
        free.pop("fixed_us", None)
    shapes = np.unique(np.column_stack([table[name] for name in _SHAPE]), axis=0)
    needed = max(FEWEST, len(free))
    if len(shapes) < needed:
        raise InputError(
            f"{operation.kind} {dtype}: {len(shapes)} different shapes are too few to fit {len(free)} constants "
            f"({', '.join(free)}): measure at least {needed}, from the smallest that you run to the largest"
        )
    measured = np.asarray(seconds, dtype=float)

    def constants(values: Array) -> KernelConstants:
        chosen: dict[str, Any] = dict(zip(free, map(float, values), strict=True))
        return first._replace(**chosen)

    def predicted(candidate: KernelConstants) -> Array:
        laid = {**hardware.kernels, operation.kind: {**hardware.kernels.get(operation.kind, {}), dtype: candidate}}
        return np.asarray(price_operation(hardware._replace(kernels=laid), operation).total, dtype=float)

    def residuals(values: Array) -> Array:
        return np.asarray(np.log(predicted(constants(values)) / measured))

    values = _search(residuals, free, KERNEL_BOUNDS)
    unseen = [name for name in _unseen(residuals, values, list(free)) if getattr(first, name)]
    if unseen:  # nothing in the rows speaks against what was known
        free = {name: starts for name, starts in free.items() if name not in unseen}
        values = _search(residuals, free, KERNEL_BOUNDS)
    found = constants(values)
    residual = _mean_error(predicted(found), measured)
    return found._replace(provenance=Provenance("fitted", source, version, _rounded(residual, 3)))


def fit_ranks(
    op: str,
    algorithm: str,
    ranks: int,
    sizes: Array,
    seconds: Array,
    link: float,
    *,
    bandwidth_fraction: float | None = None,
) -> tuple[RankRow, float]:
    """Latency, share of the bandwidth and p of a collective at one group size.

    Args:
        op: all_reduce, all_gather, reduce_scatter, all_to_all or send.
        algorithm: ring, one_shot, ...: decides the bytes that a rank sends (`costs.collectives.sent_bytes`).
        ranks: in the group.
        sizes: [rows] bytes of the whole buffer, as `sent_bytes` counts it.
        seconds: [rows] measured.
        link: bytes per second of a rank's port, one direction (in a mesh: of all its wires in the group).
        bandwidth_fraction: holds the share at this value, where buffers are too small to show it.

    Returns:
        The row to 4 significant digits, and its mean absolute relative error on what was measured.

    Raises:
        InputError: fewer than FEWEST distinct sizes, sizes that do not show the latency or the bandwidth, sizes or
            times that are not positive and finite, or no scipy.
    """
    size, measured = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    what = f"{op} over {ranks} ranks"
    if size.shape != measured.shape or size.ndim != 1:
        raise InputError(f"{what}: {size.size} sizes and {measured.size} times; expected as many of each")
    _check_positive(f"{what}: sizes", size)
    _check_positive(f"{what}: times", measured)
    distinct = len(np.unique(size))
    if ranks < 2 or distinct < FEWEST:
        raise InputError(
            f"{what}: {distinct} different sizes; expected at least 2 ranks and {FEWEST} sizes, from a few KiB "
            "(latency) to hundreds of MiB (bandwidth)"
        )
    wire = np.asarray(sent_bytes(algorithm, op, ranks, size), dtype=float) / link

    def predicted(latency_us: float, p: float, fraction: float = bandwidth_fraction or 1.0) -> Array:
        return np.asarray(pnorm([latency_us * US, wire / fraction], p), dtype=float)

    reached = wire[size.argmax()] / measured[size.argmax()]
    begin = {
        "latency_us": [float(measured.min()) / US],
        "p": [0.5, 0.8, 1.2],
        "bandwidth_fraction": [float(reached)],
    }
    if bandwidth_fraction is not None:
        begin.pop("bandwidth_fraction")

    def residuals(values: Array) -> Array:
        return np.asarray(np.log(predicted(*map(float, values)) / measured))

    values = _search(residuals, begin, RANK_BOUNDS)
    for name in _unseen(residuals, values, list(begin)):
        if name in _WANTED:
            raise InputError(
                f"{what}: buffers of {size.min():,.0f} to {size.max():,.0f} B do not show the {_WANTED[name]}"
            )
    latency_us, p, *share = map(float, values)
    found = RankRow(latency_us, share[0] if share else bandwidth_fraction or 1.0, p)
    return found, _mean_error(predicted(found.latency_us, found.p, found.bandwidth_fraction), measured)


def on_edge(found: KernelConstants | RankRow) -> tuple[str, ...]:
    """Constants of a fit that ended at the edge of their range: the rows do not show them.

    A caller that writes a file should say so, and fix or drop the constant.
    """
    bounds = RANK_BOUNDS if isinstance(found, RankRow) else KERNEL_BOUNDS
    at = []
    for name, (low, high) in bounds.items():
        value = getattr(found, name)
        if value and math.isfinite(value) and (value <= low * 1.01 or value >= high * 0.99):
            at.append(name)
    return tuple(at)


_WANTED = {
    "latency_us": "latency: measure smaller ones too, from a few KiB",
    "bandwidth_fraction": "bandwidth: measure larger ones too, to hundreds of MiB",
}
_VISIBLE = 0.02  # change of the times, root mean square, against that of a constant: below, rows do not show it
_SHAPE = ("flops", "bytes", "items", "context")


def _begin(hardware: Hardware, operation: Operation, start: KernelConstants | None) -> tuple[str, KernelConstants]:
    """(arithmetic that the kernel is priced in, constants to begin with)."""
    chip = hardware.chip
    dtype = operation.dtype if operation.dtype in chip.compute_tflops else chip.native_dtype
    if start is None:
        start = hardware.constants(operation.kind, dtype)[1]
    return dtype, start


def _quantities(operation: Operation, seconds: Array) -> dict[str, Array]:
    """FLOPs, bytes, items and context [rows], checked; `seconds` gives the rows."""
    measured = np.asarray(seconds, dtype=float)
    if measured.ndim != 1:
        raise InputError(f"{operation.kind}: expected one time a row, found an array of shape {measured.shape}")
    _check_positive(f"{operation.kind}: times", measured)
    traffic = operation.weight_bytes + operation.kv_bytes + operation.activation_bytes
    given = {"flops": operation.flops, "bytes": traffic, "items": operation.items, "context": operation.context}
    try:
        table = {name: np.broadcast_to(np.asarray(value, dtype=float), measured.shape) for name, value in given.items()}
    except ValueError:
        raise InputError(f"{operation.kind}: {measured.size} times, but quantities of another number of rows") from None
    _check_positive(f"{operation.kind}: bytes", table["bytes"])
    for name, column in table.items():
        if not np.all(np.isfinite(column)) or np.any(column < 0):
            raise InputError(f"{operation.kind}: {name} must be finite and not negative")
    return table


def _free(operation: Operation, table: dict[str, Array], start: KernelConstants) -> dict[str, list[float]]:
    """Starting values of the constants that the rows show."""
    names = ["fixed_us", "memory_fraction"]
    if operation.kind != "attention_decode" and np.all(table["flops"] > 0):
        names.append("compute_fraction")
    if np.all(table["items"] > 0):
        names.append("item_us")
    if len(np.unique(table["context"])) > 1:
        names.append("depth_us")
    free = {name: [getattr(start, name) or _STATES[name]] for name in names}
    if operation.kind in ("gemm", "grouped_gemm", "attention_decode") and len(names) > 2:
        free["p"] = [start.p, *_EXPONENTS] if math.isfinite(start.p) else list(_EXPONENTS)
    return free


def _search(residuals: Callable[[Array], Array], begin: dict[str, list[float]], bounds: dict[str, Any]) -> Array:
    """Values of least robust loss, in the order of `begin`, which lists where each may start."""
    solve = least_squares()
    low = np.log([bounds[name][0] for name in begin])
    high = np.log([bounds[name][1] for name in begin])
    inside = 1e-6 * (high - low)
    exponential = _exponential(residuals)
    best: tuple[float, Array] | None = None
    for turn in range(max(len(starts) for starts in begin.values())):
        first = np.log([starts[turn % len(starts)] for starts in begin.values()])
        first = np.clip(first, low + inside, high - inside)
        result = solve(exponential, first, bounds=(low, high), loss="soft_l1", f_scale=_SCALE)
        if best is None or result.cost < best[0]:
            best = (float(result.cost), np.exp(result.x))
    assert best is not None
    return np.array([_rounded(value, _DIGITS) for value in best[1]])


def _unseen(residuals: Callable[[Array], Array], values: Array, names: list[str]) -> list[str]:
    """Constants that hardly change the times: d log t / d log c below _VISIBLE."""
    found, step = [], 0.1
    at = residuals(values)
    for index, name in enumerate(names):
        moved = values.copy()
        moved[index] *= math.exp(step)
        if np.sqrt(np.mean((residuals(moved) - at) ** 2)) / step < _VISIBLE:
            found.append(name)
    return found


def _exponential(residuals: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The residuals as a function of the constants' logarithms."""

    def of_logarithms(point: Array) -> Array:
        return residuals(np.exp(point))

    return of_logarithms


def _check_positive(what: str, values: Sequence[float] | Array) -> None:
    column = np.asarray(values, dtype=float)
    wrong = np.flatnonzero(~np.isfinite(column) | (column <= 0))
    if len(wrong):
        raise InputError(f"{what} must be finite and above 0; row {wrong[0] + 1} has {column[wrong[0]]:g}")


def _mean_error(predicted: Array, measured: Array) -> float:
    return float(np.mean(np.abs(predicted / measured - 1)))


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
