"""Fitting the constants of a user's own cluster to what was measured on it, with the errors before and after.

Kernels and collectives go into a hardware file, the host's time of a step into an engine file. What comes out states
only what was fitted, each group with its provenance. A fit that is worse than what was there before is refused, and so
are rows that cannot be in their unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers import Operation
from planner.costs.roofline import price_operation
from planner.errors import InputError
from planner.evidence import fabric as network
from planner.evidence.comparison import Comparison, Summary, summary
from planner.evidence.fitting import fit_kernel, on_edge
from planner.evidence.hosts import FEWEST, fit_host
from planner.evidence.serving import Served, ServingPoint, misfits, predictions
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal
from planner.specs.benchmarks import GemmRow
from planner.specs.catalog import load_model, plain
from planner.specs.dtypes import ACTIVATION_BYTES, WEIGHTS
from planner.specs.engine import Engine
from planner.specs.hardware import CollectiveKernel, Hardware, KernelConstants
from planner.specs.nccl_tests import CollectiveRun
from planner.units import TERA, US

Array = NDArray[np.float64]

FEWEST_SHAPES = 6
EACH_BOUND = 2
"""Shapes that must wait mostly for memory, and as many that must wait mostly for arithmetic."""
WORSE = (0.03, 0.001)
"""Before a fit counts as worse, its mean error may rise by this share of itself and this much more."""
POOR, DOUBTFUL = 0.30, 0.15
"""Mean error after a fit above which it means nothing and is refused, and above which it is warned of."""
_WORST = 3  # rows that a refusal names
_TOO_FAST, _TOO_SLOW, _ROW_TOO_SLOW = 1.05, 10.0, 100.0  # by the chip's peak; by the shipped constants, median and row
_A_UNIT = 8.0  # times that a factor may be off a unit's for the unit to be named
_OF_PRODUCTS = ("fixed_us", "memory_fraction", "compute_fraction", "p")
_OF_A_HOST = ("step_us", "per_sequence_us")
_FAR = 20.0  # times that a TPOT may differ from what the shipped constants say
_COMPUTED = frozenset(dtype.compute for dtype in WEIGHTS.values())


class Change(NamedTuple):
    """One constant: its place in the file, what it was (none = it was not there), what it is."""

    key: str
    old: float | None
    new: float


class Fit(NamedTuple):
    """One group of measurements: how far off the model was before and is after, and what changed for it."""

    group: str
    before: tuple[Comparison, ...]
    """Empty where the files had nothing to say of it."""
    after: tuple[Comparison, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()
    judged: bool = True
    """Whether a larger error after than before refuses the fit: it was fitted on these very quantities."""

    def summaries(self) -> tuple[Summary | None, Summary]:
        """Errors before (none = nothing was there) and after."""
        errors = [[each.error for each in found] for found in (self.before, self.after)]
        return summary((self.group,), errors[0]) if errors[0] else None, summary((self.group,), errors[1])


class Calibration(NamedTuple):
    """Everything that was fitted, as the keys of a hardware file and of an engine file ({} = nothing)."""

    fits: tuple[Fit, ...]
    hardware: dict[str, Any]
    engine: dict[str, Any]


def calibrated_hardware(
    hardware: Hardware, engine: Engine, runs: Sequence[CollectiveRun], products: Sequence[GemmRow]
) -> tuple[Hardware, list[Fit], dict[str, Any]]:
    """(the hardware with what was fitted, the fits, the keys of its file).

    Args:
        hardware: as it stands, under its engine.
        engine: decides which collectives are used at all.
        runs: of nccl-tests.
        products: matrix products.

    Raises:
        InputError: too few rows, rows in another unit than they say, a fit that is worse than before.
    """
    fits: list[Fit] = []
    raw: dict[str, Any] = {}
    if products:
        hardware, found, kernels = _products(hardware, products)
        fits += found
        raw["kernels"] = {"gemm": kernels}
    if runs:
        before = hardware
        hardware, fabrics = network.fit_fabric(hardware, engine, runs)
        fits += [_collective_fit(before, hardware, engine, fabric) for fabric in fabrics]
        raw["collectives"] = [plain(row) for fabric in fabrics for row in fabric.rows]
    refuse_worse(fits)
    return hardware, fits, raw


def refuse_worse(fits: Sequence[Fit]) -> None:
    """Refuses fits that are no better than what was there, or that explain nothing.

    Raises:
        InputError: with both errors of the first such group, or its error and the rows that are furthest off.
    """
    for fit in fits:
        before, after = fit.summaries()
        if fit.judged and before is not None and after.mean > before.mean * (1 + WORSE[0]) + WORSE[1]:
            raise InputError(
                f"{fit.group}: the fit is off by {after.mean:.1%} on average, the constants there are by "
                f"{before.mean:.1%}: they stay, and nothing is written"
            )
    for fit in fits:
        after = fit.summaries()[1]
        if fit.judged and after.mean > POOR:
            worst = sorted(fit.after, key=lambda each: -abs(np.log(each.predicted / each.observed)))[:_WORST]
            named = "; ".join(f"{each.case} ({each.what}): {each.error:+.0%}" for each in worst)
            raise InputError(
                f"{fit.group}: the best fit is off by {after.mean:.0%} on average, more than {POOR:.0%}: these rows "
                f"are not of one machine as it is described, and nothing is written; furthest off: {named}"
            )


def doubtful(fits: Sequence[Fit]) -> list[str]:
    """A sentence for each fit that is written but explains its rows badly."""
    return [
        f"{fit.group}: the fit is off by {after.mean:.0%} on average, more than {DOUBTFUL:.0%}; do not lean on it"
        for fit in fits
        if fit.judged and (after := fit.summaries()[1]).mean > DOUBTFUL
    ]


def reach(hardware: str, runs: Sequence[ServingPoint]) -> dict[str, Any]:
    """The engine's `calibrated` as some runs reached it, on a machine of that name."""
    return {
        "hardware": [hardware],
        "tp": max(run.tp for run in runs),
        "pp": max(run.pp for run in runs),
        "batch": max(_batch(run) for run in runs),
        "isl": max(run.isl for run in runs),
        "same_version": True,
    }


def _batch(run: ServingPoint) -> int:
    """Requests of a replica."""
    return -(-run.concurrency // run.dp)


def fields(constants: Any, names: Sequence[str]) -> dict[str, Any]:
    """Constants as keys of a file that lays them over others, in whose place a version that is not known stands too."""
    return {"provenance": constants.provenance._asdict(), **{name: getattr(constants, name) for name in names}}


# --- matrix products --------------------------------------------------------------------------------------------------


def _products(hardware: Hardware, rows: Sequence[GemmRow]) -> tuple[Hardware, list[Fit], dict[str, Any]]:
    """Fits the constants of `gemm` for each arithmetic that was measured."""
    by_dtype: dict[str, list[GemmRow]] = {}
    for row in rows:
        by_dtype.setdefault(_arithmetic(hardware, row), []).append(row)
    fits, raw = [], {}
    for dtype, like in by_dtype.items():
        operation, seconds = _operation(dtype, like), np.array([row.seconds for row in like])
        old = hardware.kernels["gemm"].get(dtype)
        before = _priced(hardware, operation)
        _check_units(hardware, dtype, like, before)
        _check_bounds(hardware, dtype, like, operation)
        found = fit_kernel(hardware.alone, operation, seconds, source=_source(like))
        if edges := set(on_edge(found)) & {"memory_fraction", "compute_fraction"}:
            raise InputError(
                f"{like[0].file}: {dtype}: {', '.join(sorted(edges))} ends at the edge of what a chip can have: is "
                f"--hardware {hardware.name} what ran this?"
            )
        in_step = None if old is None else old.in_step  # what an engine's step makes of a kernel is not measured here
        gemm = {**hardware.kernels["gemm"], dtype: found._replace(in_step=in_step)}
        hardware = hardware._replace(kernels={**hardware.kernels, "gemm": gemm})
        group = f"GEMM {dtype}"
        after = _priced(hardware, operation)
        compared = [_compared_products(group, hardware, like, times) for times in (before, after)]
        changes = _changes(
            f"kernels.gemm.{dtype}", old, found, ("fixed_us", "memory_fraction", "compute_fraction", "p")
        )
        fits.append(Fit(group, compared[0], compared[1], changes, _product_notes(hardware, group, old)))
        raw[dtype] = fields(found, _OF_PRODUCTS)
    return hardware, fits, raw


def _product_notes(hardware: Hardware, group: str, old: KernelConstants | None) -> tuple[str, ...]:
    """What a benchmark of products alone does not change."""
    if old is None:
        return (f"{group} had no constants of its own: it was priced as 16 bit.",)
    if old.in_step is None:
        return ()
    return (
        f"{group} inside an engine's step: its fixed time stays {old.in_step.fixed_us:g} us and its bandwidth "
        f"{old.in_step.speed:g} x that of the product alone, as {hardware.name} has them from serving.",
    )


def _arithmetic(hardware: Hardware, row: GemmRow) -> str:
    """The arithmetic that a row's constants belong to: both 16-bit types have those of the chip's."""
    chip = hardware.chip
    stored = WEIGHTS[row.dtype]
    if stored.bytes == ACTIVATION_BYTES:
        return chip.native_dtype
    if row.dtype not in chip.compute_tflops:
        raise InputError(
            f"{row.file}: line {row.line}: {hardware.name} does not compute in {row.dtype}; it does in "
            f"{', '.join(name for name in chip.compute_tflops if name in _COMPUTED)}"
        )
    if row.dtype not in _COMPUTED:
        raise InputError(
            f"{row.file}: line {row.line}: no plan computes in {row.dtype} (such weights are multiplied in 16 bit): "
            "leave these rows out"
        )
    return row.dtype


def _operation(dtype: str, rows: Sequence[GemmRow]) -> Operation:
    """The products counted as those of a layer: weights in their format, what comes in and goes out in 16 bit."""
    m, n, k = (np.array([getattr(row, name) for row in rows], dtype=float) for name in "mnk")
    each = np.array([WEIGHTS[row.dtype].bytes for row in rows])
    return Operation(
        "product",
        "gemm",
        dtype,
        flops=2 * m * n * k,
        weight_bytes=n * k * each,
        activation_bytes=m * (n + k) * ACTIVATION_BYTES,
    )


def _priced(hardware: Hardware, operation: Operation) -> Array:
    """Seconds of kernels that run alone, as a benchmark runs them."""
    return np.asarray(price_operation(hardware.alone, operation).total, dtype=float)


def _check_units(hardware: Hardware, dtype: str, rows: Sequence[GemmRow], priced: Array) -> None:
    """Refuses times above the chip's peak, and such as are many times slower than anything else."""
    seconds = np.array([row.seconds for row in rows])
    slower = float(np.median(seconds / priced))
    peak = hardware.chip.peak(dtype)
    for row, own in zip(rows, (seconds / priced).tolist(), strict=True):
        rate = 2.0 * row.m * row.n * row.k / row.seconds
        if rate > _TOO_FAST * peak:
            raise InputError(
                f"{row.file}: line {row.line}: {row.m} x {row.k} x {row.n} at {rate / TERA:.4g} TFLOP/s, the peak of "
                f"{hardware.name} in {dtype} is {peak / TERA:g}: {_meant(row.unit, 1 / slower)}"
            )
        if own > _ROW_TOO_SLOW >= slower:
            raise InputError(
                f"{row.file}: line {row.line}: {row.m} x {row.k} x {row.n} takes {own:.3g} times what {hardware.name} "
                f"is said to need, the other rows {slower:.3g} times: measure it again or take it out"
            )
    if slower > _TOO_SLOW:
        raise InputError(
            f"{rows[0].file}: {dtype}: the products take {slower:.4g} times what {hardware.name} is said to need: "
            f"{_meant(rows[0].unit, 1 / slower)}"
        )


def _meant(unit: str, factor: float) -> str:
    """Which unit was probably meant where times must be multiplied by about `factor`."""
    sizes = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    if unit in sizes:
        near = min(sizes, key=lambda each: abs(np.log(sizes[each] / sizes[unit] / factor)))
        if near != unit and 1 / _A_UNIT < sizes[near] / sizes[unit] / factor < _A_UNIT:
            return f"are the times in {near}, not {unit}?"
    return "are the unit, the dtype and --hardware right?"


def _check_bounds(hardware: Hardware, dtype: str, rows: Sequence[GemmRow], operation: Operation) -> None:
    """Refuses rows that cannot show both resources."""
    shapes = {(row.m, row.n, row.k) for row in rows}
    bytes_moved = operation.weight_bytes + operation.activation_bytes
    compute, memory = operation.flops / hardware.chip.peak(dtype), bytes_moved / hardware.chip.memory_bandwidth
    waits = {"memory (m of 16 or less)": memory > 2 * compute, "arithmetic (m of 4096 or more)": compute > 2 * memory}
    lacking = [f"{int(np.sum(mask))} wait for {name}" for name, mask in waits.items() if np.sum(mask) < EACH_BOUND]
    if len(shapes) < FEWEST_SHAPES or lacking:
        found = ", of which ".join([f"{len(shapes)} shapes", *lacking[:1]])
        raise InputError(
            f"{rows[0].file}: {dtype}: {found}, are too few to fit; expected at least {FEWEST_SHAPES}, {EACH_BOUND} of "
            f"which wait for memory (m of 16 or less) and {EACH_BOUND} for arithmetic (m of 4096 or more)"
        )


def _source(rows: Sequence[GemmRow]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[Path(row.file).name] = counts.get(Path(row.file).name, 0) + 1
    return "; ".join(f"{name}, {count} rows" for name, count in counts.items())


def _compared_products(
    group: str, hardware: Hardware, rows: Sequence[GemmRow], priced: Array
) -> tuple[Comparison, ...]:
    return tuple(
        Comparison(
            group, f"{Path(row.file).name}: line {row.line}", f"{row.m} x {row.k} x {row.n}", row.seconds / US,
            float(time) / US, hardware.name, unit="us", source=Path(row.file).name,
        )
        for row, time in zip(rows, priced, strict=True)
    )  # fmt: skip


def _changes(key: str, old: Any, new: Any, names: Sequence[str]) -> tuple[Change, ...]:
    return tuple(
        Change(f"{key}.{name}", None if old is None else getattr(old, name), getattr(new, name)) for name in names
    )


# --- collectives ------------------------------------------------------------------------------------------------------


def _collective_fit(before: Hardware, after: Hardware, engine: Engine, fabric: network.Fabric) -> Fit:
    changes: list[Change] = []
    for row, old in zip(fabric.rows, fabric.old, strict=True):
        key = f"{row.kernel} {row.op} {row.level} {row.algorithm}"
        changes += _rank_changes(key, row, old) if row.ranks else _step_changes(key, row, old)
    known = any(old is not None for old in fabric.old)
    notes = []
    if fabric.unused:
        notes.append(
            f"{engine.name} runs {fabric.unused} for {fabric.op.replace('_', '-')} on {fabric.name}: the constants of "
            f"{network.LIBRARY} change none of its plans there."
        )
    return Fit(
        fabric.group,
        network.compared(before, engine, fabric) if known else (),
        network.compared(after, engine, fabric),
        tuple(changes),
        tuple(notes),
    )


def _rank_changes(key: str, row: CollectiveKernel, old: CollectiveKernel | None) -> list[Change]:
    found: list[Change] = []
    for ranks, constants in row.ranks.items():
        was = old.ranks.get(ranks) if old is not None else None
        if was != constants:
            found += _changes(f"{key}, {ranks} ranks:", was, constants, constants._fields)
    return [change._replace(key=change.key.replace(":.", ": ")) for change in found]


def _step_changes(key: str, row: CollectiveKernel, old: CollectiveKernel | None) -> list[Change]:
    names = [name for name in ("base_us", "hop_us", "inner_hop_us") if getattr(row, name)]
    found = _changes(f"{key}:", old, row, (*names, "bandwidth_fraction", "p"))
    return [change._replace(key=change.key.replace(":.", ": ")) for change in found]


# --- the host ---------------------------------------------------------------------------------------------------------


def calibrated_host(
    before: Hardware, after: Hardware, engine: Engine, runs: Sequence[ServingPoint]
) -> tuple[list[Fit], dict[str, Any]]:
    """(the fits, the keys of the engine's file) of serving runs.

    The host's constants are fitted on the hardware as it is after its own fit; the errors before are those of
    hardware and host as they were.

    Args:
        before: the hardware as it stood.
        after: with what was fitted of it.
        engine: whose host is fitted.
        runs: of this engine on this hardware.

    Raises:
        InputError: too few runs, plans that cannot run, times in another unit than ms, a fit that is worse.
    """
    _check_runs(after, engine, runs)
    _check_room(after, engine, runs)
    was = predictions(runs, lambda *_: (before, engine))
    _check_ms(runs, was)
    version = ", ".join(sorted({run.version for run in runs if run.version})) or None
    host = fit_host(runs, after, engine, source=_run_source(runs), version=version)
    now = predictions(runs, lambda *_: (after, engine._replace(host=host)))
    fits = []
    for name, judged in (("tpot", True), ("ttft", False)):
        measured = [getattr(run, f"{name}_ms") for run in runs]
        group = f"serving {name.upper()}"
        compared = [
            tuple(
                Comparison(
                    group, run.case, run.what, each, float(time), before.name, engine.name, run.model, "ms",
                    source=run.case,
                )
                for run, each, time in zip(runs, measured, getattr(found, name), strict=True)
                if each is not None and np.isfinite(time)
            )
            for found in (was, now)
        ]  # fmt: skip
        if compared[1]:
            fits.append(Fit(group, compared[0], compared[1], (), judged=judged))
    others = set(host._fields) - {"provenance", *_OF_A_HOST}
    numbers = [*_OF_A_HOST, *sorted(key for key in others if getattr(host, key) != getattr(engine.host, key))]
    notes = []
    if not any(getattr(host, key) for key in ("step_us", "per_sequence_us")):
        notes.append("The host's time came out as 0: something else is slower here than it runs; fit kernels too.")
    if len({run.concurrency for run in runs}) == 1:
        notes.append(
            "All runs have one load, which cannot show what a sequence costs: only the step's time was fitted."
        )
    fits[0] = fits[0]._replace(changes=_changes("host", engine.host, host, numbers), notes=tuple(notes))
    refuse_worse(fits)
    return fits, {"host": fields(host, numbers)}


def taken(engine: Engine, runs: Sequence[ServingPoint]) -> tuple[list[ServingPoint], list[str]]:
    """(the runs whose batch the engine takes, a sentence for each other: there requests waited in a queue).

    Raises:
        InputError: too few are left.
    """
    most = engine.scheduler.max_sequences
    kept = [run for run in runs if _batch(run) <= most]
    beyond = [
        f"{run.case}: left out: {_batch(run)} requests a replica, but {engine.name} takes at most {most} "
        f"sequence{'s' if most > 1 else ''}"
        for run in runs
        if _batch(run) > most
    ]
    if beyond and len(kept) < FEWEST:
        left = f"of {len(runs)} runs {len(kept)} remain, expected at least {FEWEST}"
        raise InputError(f"{beyond[0]}; {left}: is --engine right?")
    return kept, beyond


def _check_room(hardware: Hardware, engine: Engine, runs: Sequence[ServingPoint]) -> None:
    """Refuses runs of which not one request fits in the machine's memory."""
    for run, reason in zip(runs, misfits(runs, lambda *_: (hardware, engine)), strict=True):
        if reason is not None:
            raise InputError(f"{run.case}: {run.what}, does not fit on {hardware.name}: {reason}")


def _check_runs(hardware: Hardware, engine: Engine, runs: Sequence[ServingPoint]) -> None:
    """Refuses too few runs, and plans that this machine cannot run."""
    timed = [run for run in runs if run.tpot_ms is not None]
    if len(timed) < FEWEST:
        raise InputError(
            f"{_run_source(runs)}: {len(timed)} with a TPOT are too few to fit a host, expected at least {FEWEST}: "
            "several loads, from 1 request in flight to as many as fit"
        )
    for run in runs:
        model, plan = load_model(run.model), Plan(run.tp, run.pp, run.dp)
        reason = refusal(model, engine, Placement.of(hardware, plan.chips), plan, run.weights)
        if reason is not None:
            raise InputError(f"{run.case}: {reason}")


def _check_ms(runs: Sequence[ServingPoint], was: Served) -> None:
    """Refuses TPOTs that are many times off: another unit, plan or model."""
    for run, priced in zip(runs, was.tpot, strict=True):
        if run.tpot_ms is None or not np.isfinite(priced):
            continue
        ratio = run.tpot_ms / float(priced)
        if not 1 / _FAR < ratio < _FAR:
            meant = _meant("ms", 1 / ratio)
            raise InputError(
                f"{run.case}: a TPOT of {run.tpot_ms:g} ms is {ratio:.3g} times what {run.what} needs "
                f"({float(priced):.3g} ms): {meant}"
            )


def _run_source(runs: Sequence[ServingPoint]) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        name = run.case.partition(":")[0]
        counts[name] = counts.get(name, 0) + 1
    return "; ".join(f"{name}, {count} run{'' if count == 1 else 's'}" for name, count in counts.items())
