"""Choosing: every plan priced, those that break a limit refused with the reason, the rest ranked for a goal."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.advice import why_none
from planner.costs.serving import formats_of
from planner.errors import InputError, NoPlanError
from planner.extrapolation import stands_on_measurements
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.space import Refused
from planner.pricing import price_all, within
from planner.request import TIMES, Limits, Request, check
from planner.results import Results
from planner.sizing import size_all
from planner.specs.hardware import Hardware
from planner.specs.speculation import AUTO, SEARCHED_TOKENS, Speculation
from planner.units import MS

MEASURED_ERROR = 0.10
"""Within which two plans are a tie: nine tenths of the TPOTs on unseen groups of serving runs are less than 11 % off,
and of measured pairs of plans further apart than this 99.7 % were ordered right (`plan validate`)."""
ASSUMED_ERROR = 0.25
"""The same where host time or kernels stand for another chip, or another version of the engine (assumed)."""
MOST_TRIED = 8
"""Drafted tokens of a step that are tried where they are searched."""
Array = NDArray[np.float64]


class Ranking(NamedTuple):
    """Plans in order, the refused ones, and how many were looked at."""

    request: Request
    placement: Placement
    results: Results
    refused: list[Refused]
    plans: int
    points: int
    """Plans times batch sizes that were priced."""


class NoneLeftError(NoPlanError):
    """No plan of a request is left; `refused` has all of them, each with its reason."""

    def __init__(self, text: str, refused: list[Refused]) -> None:
        self.refused = refused
        super().__init__(text)


def rank(request: Request) -> Ranking:
    """All plans of a request, ranked; of those on the fewest chips first, where chips are to be counted.

    Where drafted tokens are searched, the request of the ranking has their number.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: no plan satisfies it; says which limit, the numbers and what would do (as NoneLeftError
            unless it is not even known what there is to refuse).
    """
    speculation = request.workload.speculation
    if speculation is not None and speculation.tokens == SEARCHED_TOKENS:
        return _best_drafted(request, speculation)
    if request.fewest and request.pareto:
        return _frontier(request)
    if request.fewest and request.hardware.torus is not None:
        return _smallest_slice(request)
    priced = size_all(request) if request.fewest else price_all(request)
    if priced.results is None:
        raise NoneLeftError(why_none(request, priced), priced.refused)
    results, dropped = _within(priced.results, request.limits)
    refused = priced.refused + dropped
    if not len(results):
        raise NoneLeftError(why_none(request, priced), refused)
    results = _pareto(results) if request.pareto else _best_of_each(results, request.objective)
    if request.fewest:
        results = results.take(np.argsort(results["gpus"], kind="stable"))
    results.columns["rank"] = np.arange(1, len(results) + 1, dtype=float)
    if not request.pareto:  # of a frontier no row is better than another
        results.columns["tie"] = _ties(results, request.objective, error_bar(request))
    placement = priced.placement
    if request.fewest:
        request = request._replace(gpus=int(results["gpus"][0]))
        placement = Placement.of(request.hardware, request.gpus)
    return Ranking(request, placement, results, refused, priced.plans, len(priced.results))


def chip_counts(hardware: Hardware, most: int) -> list[int]:
    """Numbers of chips to look at: the slices of a torus; elsewhere powers of two, and the most itself."""
    if hardware.torus is not None:
        return sorted({shape.chips for shape in hardware.torus.legal_slices() if shape.chips <= most})
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _frontier(request: Request) -> Ranking:
    """The frontier over batches and numbers of chips: rows that none beats on any number of them.

    Raises:
        InputError: the request makes no sense.
        NoPlanError: no plan satisfies it on the most chips, nor on fewer.
    """
    check(request)
    found: list[Ranking] = []
    failure: NoPlanError | None = None
    for chips in chip_counts(request.hardware, request.gpus):
        try:
            found.append(rank(request._replace(gpus=chips, fewest=False)))
        except NoPlanError as error:
            failure = error
    if not found:
        raise failure or NoPlanError(f"{request.hardware.name} has no slice of up to {request.gpus} chips")
    results = _pareto(Results.joined([each.results for each in found]))
    results.columns["rank"] = np.arange(1, len(results) + 1, dtype=float)
    plans, points = (sum(getattr(each, name) for each in found) for name in ("plans", "points"))
    refused = [one for each in found for one in each.refused]
    return Ranking(request, found[-1].placement, results, refused, plans, points)


def _smallest_slice(request: Request) -> Ranking:
    """The ranking on the smallest slice of a torus on which any plan satisfies a request."""
    check(request)
    sizes = chip_counts(request.hardware, request.gpus)
    failure: NoPlanError | None = None
    for chips in sizes:
        try:
            return _on_slice(request, chips)
        except NoPlanError as error:
            failure = error
    if failure is None:
        return rank(request._replace(fewest=False))  # says what the smallest slice has
    raise failure


def _on_slice(request: Request, chips: int) -> Ranking:
    ranking = rank(request._replace(gpus=chips, fewest=False))
    return ranking._replace(request=ranking.request._replace(fewest=True))


def _best_drafted(request: Request, speculation: Speculation) -> Ranking:
    """The ranking of those drafted tokens, of 1 to MOST_TRIED, whose first plan is best; of equals the fewest.

    Raises:
        InputError: a frontier, of which no row is better than another.
        NoPlanError: as `rank`, for one drafted token.
    """
    if request.pareto:
        raise InputError(f"--spec-tokens {AUTO} needs a goal, and --pareto has none; give a number")
    best: Ranking | None = None
    failed: NoPlanError | None = None
    for tokens in range(1, MOST_TRIED + 1):
        work = request.workload._replace(speculation=speculation._replace(tokens=tokens))
        try:
            found = rank(request._replace(workload=work))
        except NoPlanError as error:
            failed = failed or error
            continue
        if best is None or metric(found.results, request.objective)[0] < metric(best.results, request.objective)[0]:
            best = found
    if best is None:
        assert failed is not None
        raise failed
    return best


def tradeoff(request: Request) -> tuple[Results, Results]:
    """(every plan at every load within the limits, those rows that none beats in both TPOT and tokens/s per chip).

    Args:
        request: a load that it names is the only one.

    Raises:
        InputError, NoPlanError: as `rank`.
    """
    counts = chip_counts(request.hardware, request.gpus) if request.fewest and request.pareto else [request.gpus]
    request = request._replace(pareto=True, fewest=False)
    found: list[Results] = []
    for chips in counts:
        priced = price_all(request._replace(gpus=chips))
        results = None if priced.results is None else _within(priced.results, request.limits)[0]
        if results is not None and len(results):
            found.append(results)
        elif len(counts) == 1:
            raise NoneLeftError(why_none(request, priced), priced.refused)
    every = Results.joined(found)
    return every, _pareto(every)


def _within(results: Results, limits: Limits) -> tuple[Results, list[Refused]]:
    """Rows that keep the limits on time; plans of which no row does, with how close they come."""
    keeps = within(limits, {name: results[f"{name}_ms"] for name in TIMES})
    wanted = {f"{name}_ms": getattr(limits, name) for name in TIMES}
    refused = []
    codes: dict[str, int] = {}
    which = np.array([codes.setdefault(label, len(codes)) for label in results["plan"]])
    kept = np.bincount(which, weights=keeps, minlength=len(codes)) > 0
    for label, code in codes.items():
        if not kept[code]:
            own = which == code
            least = {column: float(np.min(results[column][own], initial=np.inf)) for column in wanted}
            parts = [
                f"{column.removesuffix('_ms')} {least[column]:.4g} ms > {limit / MS:g} ms"
                for column, limit in wanted.items()
                if limit is not None and limit / MS < least[column] < np.inf
            ]
            reason = ", ".join(parts) or "no batch size keeps all limits at once"
            refused.append(Refused(Plan.parse(label), reason, "slo"))
    return results.take(np.flatnonzero(keeps)), refused


def metric(results: Results, objective: str) -> Array:
    """What is minimised: a time in ms, or the inverse of a throughput."""
    if objective == "throughput":
        return np.asarray(1.0 / results["tokens_per_s"].astype(float))
    if objective == "cost":
        dollars = results["usd_per_mtok"].astype(float)
        return dollars if np.isfinite(dollars).all() else results["gpu_s_per_token"].astype(float)
    column = results[f"{objective}_ms"].astype(float)
    return np.where(np.isfinite(column), column, np.inf)


def _order(results: Results, objective: str) -> NDArray[np.intp]:
    """Best first; equals by higher max_concurrency, fewer used chips, smaller tp, then the plan's text.

    Values are compared to 30 bits, so that two ways of adding the same numbers stay equal.
    """
    mantissa, exponent = np.frexp(metric(results, objective))
    value = np.ldexp(np.round(mantissa * 2**30), exponent)
    used = results["gpus"] - results["idle_gpus"]
    text = results["plan"].astype(str)
    return np.lexsort((text, results["tp"], used, -results["max_concurrency"], value))


def _best_of_each(results: Results, objective: str) -> Results:
    """The best row of every plan: its best batch size."""
    order = _order(results, objective)
    first: dict[str, int] = {}
    for row in order.tolist():
        first.setdefault(results["plan"][row], row)
    return results.take(np.array(list(first.values())))


def _pareto(results: Results) -> Results:
    """Rows that no other beats in both TPOT and tokens per second and chip, fastest answers first."""
    tpot, rate = results["tpot_ms"].astype(float), results["tokens_per_s_per_gpu"].astype(float)
    order = np.lexsort((results["plan"].astype(str), -rate, tpot))
    best = np.maximum.accumulate(np.concatenate([[-np.inf], rate[order][:-1]]))
    return results.take(order[(rate[order] > best) & np.isfinite(tpot[order])])


def error_bar(request: Request) -> float:
    """The share by which two plans must differ to be told apart: wider where nothing of the kind was measured."""
    work = request.workload
    formats = formats_of(request.model, request.hardware, request.engine, work.weights, work.kv_cache)
    known = stands_on_measurements(request.hardware, request.engine, formats.compute)
    return MEASURED_ERROR if known and work.speculation is None else ASSUMED_ERROR


def _ties(results: Results, objective: str, error: float) -> NDArray[np.object_]:
    """Whether a row is within the error of the row above; none for the first."""
    value = metric(results, objective)
    ties = np.empty(len(value), dtype=object)
    for index in range(1, len(value)):
        same = results["gpus"][index] == results["gpus"][index - 1]  # more chips for the same load are no tie
        ties[index] = bool(same and value[index] <= value[index - 1] * (1 + error))
    return ties
