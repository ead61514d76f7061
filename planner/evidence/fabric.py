"""A cluster's collectives, fitted: runs of nccl-tests become rows of a hardware file.

Inside the innermost domain a row holds a latency and a bandwidth for each number of ranks. On levels further out it
holds a latency by steps, so that it says something of more nodes than were measured: the latency model of the file is
scaled by one factor, with a share of the bandwidth and p beside it. Where a file has several algorithms for one
operation the cheapest counts; the one that fits best is kept as it is, and no other is left cheaper than it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network, sent_bytes
from planner.costs.pnorm import pnorm
from planner.errors import InputError
from planner.evidence.comparison import Comparison
from planner.evidence.fitting import fit_ranks, on_edge
from planner.evidence.solver import least_squares
from planner.plans.placement import Placement
from planner.specs.engine import CollectiveRule, Engine
from planner.specs.fields import Provenance
from planner.specs.hardware import Algorithm, CollectiveKernel, CollectiveOp, Hardware, NetworkLevel, RankRow
from planner.specs.nccl_tests import CollectiveRun
from planner.units import GB, KIB, MIB, US

Array = NDArray[np.float64]

LIBRARY = "nccl"
"""The kernel that these tests measure, as hardware and engine files call it (RCCL's too)."""
ALGORITHMS: dict[CollectiveOp, Algorithm] = {
    "all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring", "all_to_all": "direct", "send": "direct",
}  # fmt: skip
"""Algorithm of an operation for which the hardware file has no row."""
FEWEST_SIZES, FEWEST_LARGE = 6, 3
"""Sizes from which latency and bandwidth are fitted, and bandwidth alone where all buffers are large."""
LARGEST_LATENCY, SMALLEST_BANDWIDTH = 256 * KIB, 8 * MIB
"""The smallest buffer must show the latency, the largest the bandwidth."""
LARGEST_HOST = 16
"""Accelerators that one host holds at most; only a larger domain, such as a rack of 72, can span hosts."""
TOO_FAST = 2.0
"""No kernel exceeds its link by this factor: reduction inside a switch comes to 1.1."""
_FIRST_HOP_US = 5.0
"""Of a level that the hardware file has no row for."""
_STEPS = {"latency": (0.2, 1e3), "fraction": (0.001, 1.49), "p": (0.3, 3.0)}
"""Range of the factor on the latency, of the share of the bandwidth and of p."""
_FRACTIONS = np.geomspace(0.005, 1.49, 1000)
_EVERY_SIZE = np.logspace(2, 10.5, 18)
_STARTS = tuple((fraction, p) for fraction in (0.9, 0.5, 0.2) for p in (0.5, 0.8, 1.2))
"""Of the share of the bandwidth and p; several, since a share too high to be the slowest wire has no gradient."""


class Fabric(NamedTuple):
    """The measurements of one operation on one level, and what they became."""

    op: CollectiveOp
    level: int
    name: str
    """Of the level."""
    runs: tuple[CollectiveRun, ...]
    rows: tuple[CollectiveKernel, ...]
    """What goes into the hardware file: they replace those of the same kernel, op, level and algorithm."""
    old: tuple[CollectiveKernel | None, ...]
    """The row that each of them replaces."""
    unused: str | None
    """What the engine runs instead, where it does not use these."""

    @property
    def group(self) -> str:
        """The measurements in words."""
        ranks = ", ".join(str(ranks) for ranks in sorted({run.ranks for run in self.runs}))
        return f"{self.op.replace('_', '-')} {self.name}, {ranks} ranks"


def fit_fabric(hardware: Hardware, engine: Engine, runs: Sequence[CollectiveRun]) -> tuple[Hardware, list[Fabric]]:
    """The hardware with the collectives that were measured, innermost level first, since outer ones build on inner.

    Raises:
        InputError: runs that no group of a plan is like, too few sizes, times faster than the wires, an operation for
            which the engine has no rule that names the library, constants that the sizes do not show.
    """
    groups: dict[tuple[int, CollectiveOp], list[CollectiveRun]] = {}
    for run in runs:
        groups.setdefault((level_of(hardware, run), run.op), []).append(run)
    found = []
    for level, op in sorted(groups, key=lambda key: key[0]):
        fabric = _fit_group(hardware, engine, level, op, groups[level, op])
        hardware = laid(hardware, fabric.rows)
        found.append(fabric)
    return hardware, found


def laid(hardware: Hardware, rows: Iterable[CollectiveKernel]) -> Hardware:
    """The hardware with rows in place of those of the same kernel, op, level and algorithm."""
    table = {(row.kernel, row.op, row.level, row.algorithm): row for row in (*hardware.collectives, *rows)}
    return hardware._replace(collectives=tuple(table.values()))


def compared(hardware: Hardware, engine: Engine, fabric: Fabric) -> tuple[Comparison, ...]:
    """Every measured size beside the library's time on this hardware, in microseconds."""
    found = []
    for run in fabric.runs:
        sizes = np.array([row.size for row in run.rows])
        predicted = _seconds(hardware, engine, fabric.op, fabric.level, run.ranks, sizes)
        found += [
            Comparison(
                fabric.group, f"{Path(run.file).name}: {row.place}", f"{run.ranks} ranks, {row.size:.0f} B",
                row.seconds / US, float(time) / US, hardware.name, engine.name, unit="us", source=Path(run.file).name,
            )
            for row, time in zip(run.rows, predicted, strict=True)
        ]  # fmt: skip
    return tuple(found)


def level_of(hardware: Hardware, run: CollectiveRun) -> int:
    """The network level that a run's group spans, as a plan would place it: nodes are filled.

    Raises:
        InputError: no group of a plan sits like this one.
    """
    if hardware.torus is not None:
        raise InputError(f"{run.file}: {hardware.name} is a torus, which these tests do not measure")
    network, nodes, each = hardware.network, len(run.hosts), run.hosts[0]
    if run.op == "send":
        return len(network) - 1 if nodes > 1 and not _inside(hardware, run) else 0
    level = int(Placement.of(hardware, run.ranks).span(np.asarray(run.ranks)))
    if nodes == 1:
        if level and level == len(network) - 1:
            raise InputError(
                f"{run.file}: {run.ranks} ranks on one host, but a node of {hardware.name} has "
                f"{network[level - 1].chips} chips: is --hardware right?"
            )
        return level
    if level == 0 and _inside(hardware, run):
        return level
    full = network[max(0, level - 1)].chips
    if level == 0 or any(ranks != full for ranks in run.hosts):
        raise InputError(
            f"{run.file}: {nodes} nodes of {each} ranks: a plan fills nodes before it crosses them, and a node of "
            f"{hardware.name} has {full} chips; run the test with all of them on each node"
        )
    return level


def _inside(hardware: Hardware, run: CollectiveRun) -> bool:
    """Whether several hosts share the innermost domain: it is larger than a host, and cards could not be this fast.

    A ring sends 2 (n-1)/n of an all-reduce's buffer over the cards; a tree over two hosts only the buffer itself.
    """
    if run.ranks > (hardware.domain or run.ranks) or len(hardware.network) == 1:
        return len(hardware.network) == 1
    if (hardware.domain or LARGEST_HOST + 1) <= LARGEST_HOST:
        return False
    cards = min(run.hosts) if run.op != "send" else 1
    tree = 2 * (run.ranks - 1) / run.ranks if run.op == "all_reduce" else 1.0
    return _fastest(run, hardware.network[0])[0] > 1.2 * tree * cards * hardware.network[1].link


def _fastest(run: CollectiveRun, level: NetworkLevel) -> tuple[float, str]:
    """(bytes per second of a rank's port at most, where in the file); of one wire's where the level is a mesh."""
    algorithm = ALGORITHMS[run.op]
    wires = run.ranks - 1 if level.kind == "mesh" else 1
    rates = [
        (float(sent_bytes(algorithm, run.op, run.ranks, row.size)) / row.seconds / wires, row.place) for row in run.rows
    ]
    return max(rates)


def _fit_group(
    hardware: Hardware, engine: Engine, level: int, op: CollectiveOp, runs: Sequence[CollectiveRun]
) -> Fabric:
    here = hardware.network[level]
    _check(hardware, level, op, runs)
    if not any(rule.op == op and LIBRARY in rule.kernels for rule in engine.collectives):
        raise InputError(
            f"engine {engine.name} never uses {LIBRARY} for {op}: constants from {runs[0].file} would change no plan"
        )
    existing = [row for row in hardware.collectives if (row.kernel, row.op, row.level) == (LIBRARY, op, here.name)]
    ranks = {run.ranks for run in runs}
    by_ranks = level == 0 and op != "send" and (len(ranks) > 1 or not existing or bool(existing[0].ranks))
    if by_ranks:
        old: list[CollectiveKernel | None] = [existing[0] if existing else None]
        rows = [_by_ranks(here, op, old[0], runs, hardware.name)]
    else:
        old = [*existing] or [None]
        rows = _by_steps(hardware, engine, level, op, existing, runs)
    return Fabric(
        op, level, here.name, tuple(runs), tuple(rows), tuple(old), _instead(hardware, engine, level, op, ranks)
    )


def _check(hardware: Hardware, level: int, op: CollectiveOp, runs: Sequence[CollectiveRun]) -> None:
    """Refuses sizes that cannot show latency and bandwidth, and times that the wires do not allow."""
    name = hardware.network[level].name
    known = hardware.collective(LIBRARY, op, name)
    for ranks in sorted({run.ranks for run in runs}):
        like = [run for run in runs if run.ranks == ranks]
        sizes = sorted({row.size for run in like for row in run.rows})
        latency_known = any(ranks in row.ranks if row.ranks else level or op == "send" for row in known)
        fewest = FEWEST_SIZES if _show_latency(like) or not latency_known else FEWEST_LARGE
        if len(sizes) < fewest or sizes[-1] < SMALLEST_BANDWIDTH or not (_show_latency(like) or latency_known):
            raise InputError(
                f"{like[0].file}: {op} over {ranks} ranks: {len(sizes)} sizes from {sizes[0]:.0f} to {sizes[-1]:.0f} B "
                f"do not show latency and bandwidth; expected at least {FEWEST_SIZES}, from 256 KiB or less to 8 MiB "
                "or more: run the test with -b 1K -e 1G -f 2"
            )
    for run in runs:
        here = hardware.network[level]
        link = here.link
        if level:  # a ring runs over all cards of a node
            link = max(link * (here.nics_per_node or 1), hardware.network[0].link)
        rate, place = _fastest(run, here)
        if rate > TOO_FAST * link:
            raise InputError(
                f"{run.file}: {place}: {op} over {run.ranks} ranks at {rate / GB:.4g} GB/s a rank, more than "
                f"{TOO_FAST:g} x the {link / GB:g} GB/s of {here.name}: {_unit_meant(rate / link)}"
            )


def _show_latency(runs: Iterable[CollectiveRun]) -> bool:
    return min(row.size for run in runs for row in run.rows) <= LARGEST_LATENCY


def _unit_meant(excess: float) -> str:
    """What to look at where times are this much too short."""
    if excess > 5e4:
        return "are the times in seconds, not us?"
    return "are the times in ms, not us?" if excess > 50 else "is --hardware right, and the number of ranks?"


def _by_ranks(
    level: NetworkLevel, op: CollectiveOp, old: CollectiveKernel | None, runs: Sequence[CollectiveRun], parent: str
) -> CollectiveKernel:
    """A row with measured constants for each number of ranks; those that were not measured stay."""
    algorithm = old.algorithm if old is not None else ALGORITHMS[op]
    found = {} if old is None else dict(old.ranks)
    measured, errors, rows, large = set(), [], 0, []
    for ranks in sorted({run.ranks for run in runs}):
        pairs = [(row.size, row.seconds) for run in runs if run.ranks == ranks for row in run.rows]
        sizes, seconds = (np.array(column) for column in zip(*pairs, strict=True))
        link = level.link * (ranks - 1 if level.kind == "mesh" else 1)
        if _show_latency(run for run in runs if run.ranks == ranks):
            fitted, residual = fit_ranks(op, algorithm, ranks, sizes, seconds, link)
        else:
            fitted, residual = _bandwidth_alone(
                found[ranks], np.asarray(sent_bytes(algorithm, op, ranks, sizes)) / link, seconds
            )
            large.append(str(ranks))
        _refuse_edges(on_edge(fitted), f"{runs[0].file}: {op} over {ranks} ranks")
        found[ranks] = fitted
        measured.add(ranks)
        errors.append(residual * len(pairs))
        rows += len(pairs)
    source = sources(runs)
    if kept := sorted(found.keys() - measured):
        source += f"; {', '.join(map(str, kept))} ranks as in {parent}"
    if large:
        source += f"; latency of {', '.join(large)} ranks as in {parent}"
    provenance = Provenance("fitted", source, _version(runs), round(sum(errors) / rows, 4))
    return CollectiveKernel(LIBRARY, op, level.name, algorithm, provenance, dict(sorted(found.items())))


def _bandwidth_alone(old: RankRow, wire: Array, seconds: Array) -> tuple[RankRow, float]:
    """The row with the share of the bandwidth that large buffers show (their median), and its error.

    Args:
        old: whose latency and p stay.
        wire: [rows] seconds at the whole bandwidth.
        seconds: [rows] measured.
    """
    latency = old.latency_us * US
    moving = np.maximum(seconds**old.p - latency**old.p, (seconds / 2) ** old.p) ** (1 / old.p)
    row = old._replace(bandwidth_fraction=_rounded(float(np.median(wire / moving))))
    predicted = np.asarray(pnorm([latency, wire / row.bandwidth_fraction], row.p))
    return row, float(np.mean(np.abs(predicted / seconds - 1)))


def _refuse_edges(edges: Sequence[str], what: str) -> None:
    """A share of the bandwidth at the edge of its range is no finding; a latency or p there changes little."""
    if "bandwidth_fraction" in edges:  # of RANK_BOUNDS
        raise InputError(f"{what}: the rows do not show a bandwidth that this hardware can have; is --hardware right?")


def _by_steps(
    hardware: Hardware,
    engine: Engine,
    level: int,
    op: CollectiveOp,
    existing: Sequence[CollectiveKernel],
    runs: Sequence[CollectiveRun],
) -> list[CollectiveKernel]:
    """Rows whose latency is that of the file's steps, scaled; in the order of `existing`."""
    name = hardware.network[level].name
    assumed = Provenance("assumed", "a first row")
    starts = list(existing) or [
        CollectiveKernel(LIBRARY, op, name, ALGORITHMS[op], assumed, hop_us=_FIRST_HOP_US, bandwidth_fraction=0.8)
    ]
    measured = [
        (run.ranks, np.array([row.size for row in run.rows]), np.array([row.seconds for row in run.rows]))
        for run in runs
    ]

    def alone(row: CollectiveKernel) -> Hardware:
        others = (each for each in hardware.collectives if (each.kernel, each.op, each.level) != (LIBRARY, op, name))
        return hardware._replace(collectives=(*others, row))

    def times(row: CollectiveKernel) -> Array:
        machine = alone(row)
        return np.concatenate([_seconds(machine, engine, op, level, ranks, sizes) for ranks, sizes, _ in measured])

    def everywhere(row: CollectiveKernel) -> Array:
        machine = alone(row)
        return np.concatenate([_seconds(machine, engine, op, level, ranks, _EVERY_SIZE) for ranks, *_ in measured])

    seconds = np.concatenate([each for *_, each in measured])
    latency = _show_latency(runs)
    fitted = [_fitted_steps(_with_steps(start), times, seconds, latency) for start in starts]
    errors = [float(np.mean(np.abs(times(row) / seconds - 1))) for row in fitted]
    best = int(np.argmin(errors))
    if fitted[best].bandwidth_fraction > 0.99 * _STEPS["fraction"][1]:
        _refuse_edges(("bandwidth_fraction",), f"{runs[0].file}: {op} on {name}")
    source, version = sources(runs), _version(runs)
    if not latency:
        source += f"; latency as in {hardware.name}"
    result = []
    for index, row in enumerate(fitted):
        said, kept = source, row
        if index != best:
            said += f"; no cheaper than the {fitted[best].algorithm} row, which fits better"
            kept = _no_cheaper(row, fitted[best], everywhere)
        residual = float(np.mean(np.abs(times(kept) / seconds - 1)))
        result.append(kept._replace(provenance=Provenance("fitted", said, version, min(10.0, round(residual, 4)))))
    return result


def _with_steps(row: CollectiveKernel) -> CollectiveKernel:
    """The row with a latency by steps to scale: one that has none, or one by ranks, begins at a hop's usual time."""
    if row.ranks or not (row.base_us or row.hop_us):
        return row._replace(ranks={}, hop_us=_FIRST_HOP_US, base_us=0.0)
    return row


def _scaled(row: CollectiveKernel, factor: float, fraction: float, p: float) -> CollectiveKernel:
    """The row with its latency multiplied, and this share of the bandwidth and p."""
    inner = row.inner_hop_us
    return row._replace(
        base_us=row.base_us * factor,
        hop_us=(row.hop_us or 0.0) * factor,
        inner_hop_us=None if inner is None else inner * factor,
        bandwidth_fraction=fraction,
        p=p,
    )


def _rounded_row(row: CollectiveKernel) -> CollectiveKernel:
    names = ("base_us", "hop_us", "inner_hop_us", "bandwidth_fraction", "p")
    changes: dict[str, Any] = {name: _rounded(value) for name in names if (value := getattr(row, name)) is not None}
    return row._replace(**changes)


def _fitted_steps(
    start: CollectiveKernel, times: Callable[[CollectiveKernel], Array], seconds: Array, latency: bool
) -> CollectiveKernel:
    """The row whose times are nearest the measured ones: relative errors, a robust loss.

    Args:
        start: whose latency is scaled.
        times: seconds [rows] of a row.
        seconds: [rows] measured.
        latency: whether the rows show it, and p; else the share of the bandwidth alone is fitted.
    """
    if not latency:
        rows = [_scaled(start, 1.0, float(fraction), start.p) for fraction in _FRACTIONS]
        return _rounded_row(min(rows, key=lambda row: float(np.mean(np.abs(np.log(times(row) / seconds))))))
    solve = least_squares()

    def residuals(point: Array) -> Array:
        return np.asarray(np.log(times(_scaled(start, *np.exp(point).tolist())) / seconds))

    low, high = (np.log([bounds[side] for bounds in _STEPS.values()]) for side in (0, 1))
    results = [
        solve(residuals, np.log([1.0, *begin]), bounds=(low, high), loss="soft_l1", f_scale=0.1) for begin in _STARTS
    ]
    best = min(results, key=lambda result: float(result.cost))
    return _rounded_row(_scaled(start, *np.exp(best.x).tolist()))


def _no_cheaper(
    row: CollectiveKernel, than: CollectiveKernel, times: Callable[[CollectiveKernel], Array]
) -> CollectiveKernel:
    """The row made slower until it takes at least as long as another, at every size."""
    for _ in range(20):
        excess = float(np.max(times(than) / times(row)))
        if excess <= 1.0:
            break
        row = _scaled(row, excess * 1.002, row.bandwidth_fraction / (excess * 1.002), row.p)
    return _rounded_row(row)


def _seconds(hardware: Hardware, engine: Engine, op: CollectiveOp, level: int, ranks: int, sizes: Array) -> Array:
    """Seconds [sizes] of the library's collective."""
    rules = (CollectiveRule(op, (LIBRARY,)), *(rule for rule in engine.collectives if rule.op != op))
    network = Network(Placement.of(hardware, ranks), engine._replace(collectives=rules))
    return network.send(sizes, level) if op == "send" else network.seconds(op, ranks, sizes)


def _instead(hardware: Hardware, engine: Engine, level: int, op: CollectiveOp, ranks: Iterable[int]) -> str | None:
    """The kernels that an engine runs for these groups where the library is none of them."""
    name, span = hardware.network[level].name, "across" if level else "inside"
    found: list[str] = []
    for members in ranks:
        for rule in engine.collectives:
            if rule.op != op or rule.span not in ("any", span) or (rule.ranks and members not in rule.ranks):
                continue
            here = [kernel for kernel in rule.kernels if hardware.collective(kernel, op, name)]
            if LIBRARY in rule.kernels:
                return None
            found += here
            if here and rule.max_kib is None:
                break
    return ", ".join(dict.fromkeys(found))


def doubt(hardware: Hardware, run: CollectiveRun) -> str | None:
    """A sentence where a run names another chip than the hardware's description; none where it says nothing."""
    words = [word for word in re.split(r"[^a-z0-9]+", run.device.lower()) if re.search(r"\d", word)]
    own = re.split(r"[^a-z0-9]+", f"{hardware.name} {hardware.description}".lower())
    if not words or words[0] in own:
        return None
    return f"{run.file} was measured on {run.device}, but --hardware is {hardware.name} ({hardware.description})"


def sources(rows: Iterable[CollectiveRun]) -> str:
    """`a.txt, 24 rows; b.txt, 30 rows`."""
    counts: dict[str, int] = {}
    for run in rows:
        name = Path(run.file).name
        counts[name] = counts.get(name, 0) + len(run.rows)
    return "; ".join(f"{name}, {count} rows" for name, count in counts.items())


def _version(runs: Iterable[CollectiveRun]) -> str | None:
    versions = sorted({run.version for run in runs if run.version})
    return f"library {', '.join(versions)}" if versions else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
