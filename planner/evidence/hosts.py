"""Host constants of engines, fitted to serving runs: the code behind the shipped ones and behind `plan calibrate`.

What a kernel's own measurement cannot show is fitted here: the host's time a step, a sequence and a layer of a prefill,
what a request pays before its first token, and how kernels run inside a step. Errors are relative (differences of
logarithms) of TPOT and, at a quarter of the weight, of residence time; the loss is robust (soft L1 beyond 5 %).

Needs scipy, which is the optional extra `calibrate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import InputError
from planner.evidence.serving import Machine, Served, ServingPoint, lightly_loaded, predictions
from planner.evidence.solver import least_squares
from planner.specs.catalog import load_machine
from planner.specs.engine import Engine, Host
from planner.specs.fields import Provenance
from planner.specs.hardware import Hardware
from planner.specs.measurements import measurements

Array = NDArray[np.float64]
FITTED = ("step_us", "per_sequence_us", "prefill_layer_us")
"""Constants of a host that TPOT and residence time show."""
SCALES = {"step_us": 500.0, "per_sequence_us": 20.0, "prefill_layer_us": 50.0, "item_us": 0.002, "speed": 1.0}
"""Sizes near which each is searched, which condition the search."""
FEWEST = 4
"""Runs below which a host is not fitted."""
_ROUNDS = 2
_RESIDENCE = 0.25  # weight of the error of R beside that of TPOT
_SCALE = 0.05


class Constants(NamedTuple):
    """Constants that serving runs decide: of every engine, and those that all engines share on all chips."""

    hosts: dict[str, Host]
    """By engine."""
    item_us: float
    """Of the element-wise kernels: norm of one head of a token's queries or keys."""
    speed: float
    """Of the GEMMs of a step: bytes per second against those of the kernel alone."""


def lay(constants: Constants, machine: Machine = load_machine) -> Machine:
    """The machines of another `Machine` with these constants in place of their own."""

    def laid(hardware: str, engine: str) -> tuple[Hardware, Engine]:
        chip, software = machine(hardware, engine)
        gemm = {
            dtype: own._replace(in_step=own.in_step._replace(speed=constants.speed)) if own.in_step else own
            for dtype, own in chip.kernels["gemm"].items()
        }
        elementwise = {
            dtype: own._replace(item_us=constants.item_us) for dtype, own in chip.kernels["elementwise"].items()
        }
        kernels = {**chip.kernels, "gemm": gemm, "elementwise": elementwise}
        host = constants.hosts.get(_base(engine), software.host)
        return chip._replace(kernels=kernels), software._replace(host=host)

    return laid


def _base(engine: str) -> str:
    """`sglang` of `sglang-0.5.6`: versions of an engine share the constants that are fitted here."""
    return engine.rpartition("-")[0] if engine[-1].isdigit() and "-" in engine else engine


def fit_constants(runs: Sequence[ServingPoint], start: Constants, machine: Machine = load_machine) -> Constants:
    """The shared constants and every engine's host that explain some runs best.

    Args:
        runs: of any engines in `start`; those without TPOT are left out.
        start: where the search begins; its hosts name the engines.
        machine: hardware and engines whose other constants hold.

    Returns:
        `start` with what was fitted, to four significant digits; provenances are the start's.

    Raises:
        InputError: fewer than FEWEST runs of an engine, or no scipy.
    """
    runs = [run for run in runs if run.tpot_ms is not None]
    names = list(start.hosts)
    for name in names:
        count = sum(_base(run.engine) == name for run in runs)
        if count < FEWEST:
            raise InputError(f"engine {name}: {count} runs are too few to fit its host, expected at least {FEWEST}")
    scales = np.array([*(SCALES[constant] for _ in names for constant in FITTED), SCALES["item_us"], SCALES["speed"]])

    def constants(values: Array, hosts: dict[str, Host]) -> Constants:
        real = iter((values * scales).tolist())
        fitted = {}
        for name in names:
            own: dict[str, Any] = {constant: next(real) for constant in FITTED}
            fitted[name] = hosts[name]._replace(**own)
        return Constants(fitted, next(real), next(real))

    found = start
    for _ in range(_ROUNDS):
        hosts = found.hosts
        first = [*(getattr(hosts[name], constant) for name in names for constant in FITTED), found.item_us, found.speed]
        values = _search(
            lambda each, hosts=hosts: predictions(runs, lay(constants(each, hosts), machine)),  # type: ignore[misc]
            runs,
            np.array(first) / scales,
        )
        found = constants(values, hosts)
        served = predictions(runs, lay(found, machine))
        for name in names:
            own = np.array([_base(run.engine) == name for run in runs])
            request = _request_us(runs, served, own, found.hosts[name])
            if request is not None:
                found.hosts[name] = found.hosts[name]._replace(request_us=request)
    rounded = {name: _rounded(host) for name, host in found.hosts.items()}
    return Constants(rounded, _digits(found.item_us), _digits(found.speed))


def fit_host(
    runs: Sequence[ServingPoint], hardware: Hardware, engine: Engine, *, source: str, version: str | None = None
) -> Host:
    """The host of one engine on one kind of machine that explains a user's own runs best.

    The time a sequence takes is fitted where batches differ, what a request pays where some run is lightly loaded;
    the rest stays the engine's.

    Args:
        runs: on this machine; those without TPOT are left out.
        hardware: with the engine's overrides applied.
        engine: where the search begins.
        source: of the runs, for the provenance.
        version: of the engine that ran.

    Returns:
        Constants to four significant digits; `provenance.residual` is the mean absolute relative error of TPOT.

    Raises:
        InputError: fewer than FEWEST runs, runs that cannot be priced, or no scipy.
    """
    runs = [run for run in runs if run.tpot_ms is not None]
    if len(runs) < FEWEST:
        raise InputError(f"{len(runs)} runs with a TPOT are too few to fit a host, expected at least {FEWEST}")
    several = len({run.concurrency for run in runs}) > 1
    free = FITTED[: 2 if several else 1]
    scales = np.array([SCALES[constant] for constant in free])

    def laid(host: Host) -> Machine:
        return lambda *_: (hardware, engine._replace(host=host))

    def host_of(values: Array) -> Host:
        own: dict[str, Any] = dict(zip(free, (values * scales).tolist(), strict=True))
        return engine.host._replace(**own)

    first = np.array([getattr(engine.host, constant) for constant in free]) / scales
    host = host_of(_search(lambda each: predictions(runs, laid(host_of(each))), runs, first))
    request = _request_us(runs, predictions(runs, laid(host)), np.ones(len(runs), dtype=bool), host)
    host = _rounded(host if request is None else host._replace(request_us=request))
    error = np.abs(predictions(runs, laid(host)).tpot / _measured(runs)[0] - 1)
    return host._replace(provenance=Provenance("fitted", source, version, round(float(error.mean()), 3)))


def transferred() -> Constants:
    """The constants as fitted on H100 runs alone, for saying how far they carry (`transfer.csv`)."""
    rows = measurements("transfer")
    hosts = {}
    for row in rows:
        values: dict[str, Any] = {name: float(row[name]) for name in (*FITTED, "request_us")}
        hosts[row["engine"]] = Host(Provenance("fitted", f"runs on {row['fitted_on']} alone"), **values)
    return Constants(hosts, float(rows[0]["item_us"]), float(rows[0]["speed"]))


def _measured(runs: Sequence[ServingPoint]) -> tuple[Array, Array]:
    """(TPOT, residence time) in ms; NaN where not stated."""
    residence = [np.nan if run.residence_ms is None else run.residence_ms for run in runs]
    return np.array([run.tpot_ms for run in runs], dtype=float), np.array(residence)


def _search(predict: Callable[[Array], Served], runs: Sequence[ServingPoint], first: Array) -> Array:
    """Non-negative values whose predictions have the least errors."""
    tpot, residence = _measured(runs)
    if not np.isfinite(predict(first).tpot).all():
        raise InputError("some runs cannot be priced on this machine: their batch does not fit in its memory")

    def errors(values: Array) -> Array:
        served = predict(values)
        whole = np.nan_to_num(np.log(served.residence / residence))
        return np.concatenate([np.log(served.tpot / tpot), _RESIDENCE * whole])

    found = least_squares()(
        errors, first, bounds=(0, np.inf), x_scale=np.maximum(first, 0.5), loss="soft_l1", f_scale=_SCALE,
        diff_step=1e-3, xtol=1e-6, ftol=1e-6,
    )  # fmt: skip
    return np.asarray(found.x, dtype=float)


def _request_us(runs: Sequence[ServingPoint], served: Served, own: NDArray[np.bool_], host: Host) -> float | None:
    """Median of what lightly loaded requests wait beyond the rest of their TTFT; none without such runs."""
    light = lightly_loaded(runs, served) & own
    if not light.any():
        return None
    measured = np.array([run.ttft_ms or np.nan for run in runs])
    beyond = np.median((measured - served.ttft)[light]) * 1e3
    return max(0.0, float(beyond) + host.request_us)


def _rounded(host: Host) -> Host:
    """Four digits; below a nanosecond there is nothing."""
    values = {name: getattr(host, name) for name in (*FITTED, "request_us")}
    rounded: dict[str, Any] = {name: _digits(value) if value > 1e-3 else 0.0 for name, value in values.items()}
    return host._replace(**rounded)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
