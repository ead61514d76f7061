"""Pricing plans that are given, one or a table of them: no search, order kept, a bad row says what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.costs.roofline import BOUNDS
from planner.costs.rows import PLAN_COLUMNS, Rows, structure_of
from planner.costs.serving import Setting, fit, price
from planner.errors import InputError, NoPlanError, PlannerError
from planner.plans.placement import Placement
from planner.plans.plan import Plan, grid_axes, grid_text, layouts_of
from planner.plans.rules import draft_refusal, refusal
from planner.plans.space import default_grid
from planner.points import CHOICES, DEFAULTS, DEGREES, NUMBERS, Points, alike, check_names, distinct
from planner.pricing import memory_reasons, setting_of
from planner.request import Limits, Request, check_context, check_lengths, check_memory
from planner.results import COLUMNS, Column, Results, results_of, texts
from planner.specs.catalog import load_machine, load_model
from planner.specs.drafts import draft_of
from planner.specs.lengths import Spread, lengths_from
from planner.specs.speculation import Speculation
from planner.specs.workload import Workload
from planner.units import parse_bytes

Array = NDArray[np.float64]


def estimate_points(points: Mapping[str, Sequence[Any]], count: int) -> Results:
    """The results of `count` points.

    Args:
        points: columns of OPTIONS; a column of one value stands for all rows; None or "" = not given.
        count: rows.

    Returns:
        Results in the points' order; a row that cannot be priced has `error` and no figures.

    Raises:
        InputError: a column that is no option.
    """
    return _estimated(Points.of(points, count))


def estimate_one(options: Mapping[str, Any]) -> Results:
    """The result of one point, given by option.

    Raises:
        InputError: something given cannot be used.
        NoPlanError: the plan cannot run.
    """
    check_names(options, "option")
    table = Points.of({name: [value] for name, value in options.items()}, 1)
    results = _estimated(table)
    if table.errors[0] is not None:
        raise table.errors[0]
    return results


def _estimated(table: Points) -> Results:
    parts: list[tuple[NDArray[np.intp], Results]] = []
    for key, whole in table.groups():
        parts.append((whole, _price_group(table, key, whole)))
    if len(parts) == 1:
        return parts[0][1]
    joined = Results.joined([part for _, part in parts])
    back = np.empty(table.count, dtype=int)
    back[np.concatenate([index for index, _ in parts])] = np.arange(table.count)
    return joined.take(back)


def _price_group(table: Points, key: dict[str, str | None], index: NDArray[np.intp]) -> Results:
    """Results of rows that share all texts."""
    key = dict(key)
    key["ffn"], key["prefill_ffn"] = layouts_of(key["ffn"], key["prefill_ffn"])
    try:
        setting = _setting(table, key, index)
    except (InputError, NoPlanError) as error:
        table.fail(index, error)
        return _unpriced(table, key, index)
    columns = {name: table.numbers[name][index] for name in NUMBERS}
    for name in DEGREES:
        columns[name] = np.where(np.isnan(columns[name]), 1.0, columns[name])
    product = np.prod([columns[name] for name in ("tp", "pp", "dp", "cp")], axis=0)
    gpus = np.where(np.isnan(columns["gpus"]), product, columns["gpus"])
    concurrency = np.where(np.isnan(columns["concurrency"]), 1.0, columns["concurrency"])
    max_context = np.where(np.isnan(columns["max_context"]), 0.0, columns["max_context"])
    plans, which = _plans(setting, columns, key)
    _check(table, setting, key, index, columns, gpus, max_context)
    each = Rows.of_plans(plans, isl=0, osl=0, concurrency=0)
    rows = Rows.of(
        **{name: getattr(each, name)[which] for name in PLAN_COLUMNS},
        isl=columns["isl"], osl=columns["osl"], concurrency=concurrency, max_context=max_context,
        prefix_hit=columns["prefix_hit"],
        spec_tokens=np.nan_to_num(columns["spec_tokens"]), spec_accept=np.nan_to_num(columns["spec_accept"]),
    )  # fmt: skip
    _check_speculation(table, setting, index, columns)
    sound = np.array([table.errors[row] is None for row in index])
    rows = _safe(rows, sound)
    fitted = fit(setting, rows, clip=True)
    unmet = np.where(fitted.batch < 1, rows.concurrency, 0.0)  # a batch that is cut to what fits is no error
    for place, reason in enumerate(memory_reasons(setting, fitted, unmet)):
        if reason is not None and sound[place]:
            table.fail(index[[place]], NoPlanError(reason))
    with np.errstate(invalid="ignore", divide="ignore"):
        priced = price(setting, rows, fitted)
    results = results_of(setting, plans, which, gpus, key["objective"] or DEFAULTS["objective"], rows, fitted, priced)
    return _marked(table, results, index)


def _setting(table: Points, key: dict[str, str | None], index: NDArray[np.intp]) -> Setting:
    def get(name: str) -> Any:
        value = key[name]
        return DEFAULTS.get(name) if value is None else value

    for name, allowed in CHOICES.items():
        if key[name] is not None and key[name] not in allowed:
            raise InputError(f"{name} must be one of {', '.join(allowed)}, found {key[name]!r}")
    if get("model") is None:
        raise InputError("no model: give --model or a column `model`")
    if key["grid"] is not None:
        grid_axes(key["grid"])
    model = load_model(get("model"))
    hardware, engine = load_machine(get("hardware"), get("engine"))
    engine = engine.limited(*(_whole(key, name) for name in ("max_num_seqs", "max_num_batched_tokens")))
    gpus = table.numbers["gpus"][index]
    product = np.prod([np.nan_to_num(table.numbers[name][index], nan=1.0) for name in ("tp", "pp", "dp", "cp")], axis=0)
    chips = int(np.max(np.where(np.isnan(gpus), product, gpus)))
    placement = Placement.of(hardware, chips, key["slice"])
    spread = _lengths(table, key, index)
    limits = Limits(
        memory=_positive(key, "memory_limit", parse_bytes), memory_fraction=_positive(key, "memory_fraction", float)
    )
    check_memory(limits)
    request = Request(
        model,
        hardware,
        engine,
        chips,
        Workload(
            schedule=get("schedule"),
            arrivals=get("arrivals"),
            weights=key["weights"],
            kv_cache=key["kv_cache"],
            lengths=spread.lengths,
        ),
        limits=limits,
        usd_per_chip_hour=_positive(key, "price", float),
        slice=key["slice"],
    )
    if spread.lengths is not None:
        extended = bool(np.all(table.numbers["max_context"][index] > 0))
        work = request.workload._replace(isl=spread.isl, osl=spread.osl, max_context=1 if extended else None)
        check_lengths(request._replace(workload=work))
    tokens = np.nan_to_num(table.numbers["spec_tokens"][index])
    if tokens.any():  # then all of the group draft
        drafted = Speculation(int(np.max(tokens)), None, draft_of(key["draft"], model))
        request = request._replace(workload=request.workload._replace(speculation=drafted))
    # all of the group spread experts, or none; all divide prompts over groups, or none
    ep, cp = (int(np.max(np.nan_to_num(table.numbers[name][index], nan=1.0))) for name in ("ep", "cp"))
    return setting_of(request, placement, structure_of(_words(key, cp)._replace(ep=ep)))


def _words(key: dict[str, str | None], cp: int) -> Plan:
    """The words of a plan, whatever its other degrees."""
    bare = Plan(cp=cp, attention=key["attention"] or "heads")
    return bare._replace(
        prefill_attention=key["prefill_attention"] or bare.implied,
        ffn=key["ffn"] or "1d",
        prefill_ffn=key["prefill_ffn"] or "1d",
        grid=grid_text(key["grid"]) if key["grid"] else "",
    )


def _lengths(table: Points, key: dict[str, str | None], index: NDArray[np.intp]) -> Spread:
    """How lengths differ; their means take the place of the rows' own."""
    if key["lengths"] is None:
        return Spread(0, 0, None)
    spread = lengths_from(key["lengths"])
    table.numbers["isl"][index], table.numbers["osl"][index] = spread.isl, spread.osl
    return spread


def _check_speculation(table: Points, setting: Setting, index: NDArray[np.intp], columns: Mapping[str, Array]) -> None:
    """Marks rows of which it is said only in part what they draft."""
    tokens, accept = columns["spec_tokens"], columns["spec_accept"]
    if setting.drafting is not None:
        missing = "spec_accept is missing: the share of drafted tokens that are accepted, from 0 to 1"
        table.fail(index[np.isnan(accept)], InputError(missing))
        return
    idle = "spec_accept says nothing without spec_tokens, the tokens drafted a step"
    table.fail(index[np.isnan(tokens) & ~np.isnan(accept)], InputError(idle))


def _positive(key: dict[str, str | None], name: str, read: Callable[[str], float]) -> float | None:
    text = key[name]
    if text is None:
        return None
    try:
        value = read(text)
    except ValueError:
        raise InputError(f"{name} must be a number, found {text!r}") from None
    if not value > 0:
        raise InputError(f"{name} must be above 0, found {text}")
    return value


def _whole(key: dict[str, str | None], name: str) -> int | None:
    text = key[name]
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not value.is_integer():  # nor are infinity and NaN
        raise InputError(f"{name} must be a whole number of at least 1, found {text!r}")
    return int(value)


def _check(
    table: Points,
    setting: Setting,
    key: dict[str, str | None],
    index: NDArray[np.intp],
    columns: dict[str, Array],
    gpus: Array,
    max_context: Array,
) -> None:
    """Marks rows that break a rule; each distinct plan and each distinct length is looked at once."""
    chosen = [*(columns[name] for name in DEGREES), gpus]
    for rows in alike(distinct(chosen)[1]):
        values: list[Any] = [int(column[rows[0]]) for column in chosen]
        try:
            plan = _plan(setting, key, values[:-1])
            placement = Placement.of(setting.hardware, values[-1], key["slice"])
            reason = refusal(setting.model, setting.engine, placement, plan, setting.formats.weights.name)
            if setting.drafting is not None:
                reason = reason or draft_refusal(setting.drafting.draft, setting.engine, plan)
            if reason:
                raise NoPlanError(reason)
        except PlannerError as error:
            table.fail(index[rows], error)
    isl, osl = columns["isl"], columns["osl"]
    long = np.flatnonzero((isl + osl > setting.model.max_context) & (max_context == 0))
    for rows in alike(distinct([isl[long], osl[long]])[1]):
        try:
            check_context(setting.model, isl[long[rows[0]]], osl[long[rows[0]]], None)
        except InputError as error:
            table.fail(index[long[rows]], error)


def _safe(rows: Rows, sound: NDArray[np.bool_]) -> Rows:
    """Rows with harmless numbers where something is wrong, so that the others can be priced beside them."""
    if sound.all():
        return rows
    fallback = {
        "isl": 1.0,
        "osl": 1.0,
        "concurrency": 1.0,
        "max_context": 0.0,
        "prefix_hit": 0.0,
        "spec_tokens": 0.0,
        "spec_accept": 0.0,
    }
    return Rows(*(np.where(sound, getattr(rows, name), fallback.get(name, 1.0)) for name in Rows._fields))


def _plans(
    setting: Setting, columns: dict[str, Array], key: dict[str, str | None]
) -> tuple[list[Plan], NDArray[np.intp]]:
    """(the distinct plans, index of each row's plan)."""
    degrees = [columns[name] for name in DEGREES]
    first, which = distinct(degrees)
    values = zip(*(column[first].astype(int).tolist() for column in degrees), strict=True)
    return [_plan(setting, key, value) for value in values], which


def _plan(setting: Setting, key: dict[str, str | None], degrees: Sequence[int]) -> Plan:
    """The plan of some degrees; a layout that needs a grid gets the best one where none is named."""
    tp, pp, dp, ep, cp = degrees
    plan = _words(key, cp)._replace(tp=tp, pp=pp, dp=dp, ep=ep)
    if not plan.grid and "1d" not in (plan.ffn, plan.prefill_ffn):
        return plan._replace(grid=default_grid(setting.model, setting.placement, plan.tp))
    return plan


def _marked(table: Points, results: Results, index: NDArray[np.intp]) -> Results:
    """Errors into their column; rows with one keep what was asked and lose every figure."""
    errors = _texts_of(table, index)
    results.columns["error"] = errors
    failed = np.array([error is not None for error in errors])
    if failed.any():
        asked = {name: table.numbers[name][index] for name in NUMBERS}
        for name in (
            COLUMNS[COLUMNS.index("idle_gpus") : COLUMNS.index("error")]
            + COLUMNS[COLUMNS.index("usd_per_mtok_input") :]
        ):
            column = results.columns[name]
            blank = None if column.dtype == object else np.nan
            column = column.copy()
            column[failed] = asked[name][failed] if name in asked else blank
            results.columns[name] = column
        for name in ("gpus", *DEGREES):
            column = results.columns[name].copy()
            column[failed] = asked[name][failed]
            results.columns[name] = column
        label = results.columns["plan"].copy()
        label[failed] = None
        results.columns["plan"] = label
    return results


def _texts_of(table: Points, index: NDArray[np.intp]) -> Column:
    errors = [table.errors[row] for row in index]
    return texts([None if error is None else str(error) for error in errors], len(errors))


def _unpriced(table: Points, key: dict[str, str | None], index: NDArray[np.intp]) -> Results:
    """Rows of a group that cannot be priced at all: what was asked, and the error."""
    count = len(index)
    columns: dict[str, Column] = {}
    numeric = set(NUMBERS)
    for name in COLUMNS:
        if name in numeric:
            columns[name] = table.numbers[name][index]
        elif name in key and name != "plan":
            columns[name] = texts(key[name] if key[name] is not None else DEFAULTS.get(name), count)
        elif name in ("plan", "bottleneck", "tie", "flips_if", "engine_version", "extrapolates"):
            columns[name] = texts(None, count)
        else:
            columns[name] = np.full(count, np.nan)
    columns["error"] = _texts_of(table, index)
    empty = {bound: np.full(count, np.nan) for bound in BOUNDS}
    return Results(columns, empty, dict(empty))
