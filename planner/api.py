"""The two questions most programs ask, by keyword: rank all plans, or price one. `Request` and `rank` say more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.errors import InputError
from planner.estimating import estimate_one
from planner.plans.space import Filters
from planner.ranking import rank
from planner.request import MOST_CHIPS, Limits, Objective, Request, check_number
from planner.specs.catalog import load_machine, load_model
from planner.specs.drafts import speculation_of
from planner.specs.lengths import Spread, lengths_from
from planner.specs.workload import Arrivals, Schedule, Workload
from planner.units import MS, parse_bytes


def plan(
    model: str | Path,
    gpus: int | None = None,
    *,
    hardware: str | Path = "h100",
    engine: str | Path | None = None,
    objective: Objective = "latency",
    isl: int = 1024,
    osl: int = 256,
    concurrency: int | None = None,
    schedule: Schedule | None = None,
    arrivals: Arrivals | None = None,
    weights: str | None = None,
    kv_cache: str | None = None,
    max_context: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    prefix_hit: float = 0.0,
    spec_tokens: int | str | None = None,
    spec_accept: float | None = None,
    draft: str | None = None,
    max_ttft_ms: float | None = None,
    max_tpot_ms: float | None = None,
    max_latency_ms: float | None = None,
    memory_limit: str | float | None = None,
    memory_fraction: float | None = None,
    price: float | None = None,
    filters: Filters | None = None,
    slice: str | None = None,
    pareto: bool = False,
    arrival_rate: float | None = None,
    max_gpus: int | None = None,
    lengths: str | None = None,
) -> list[dict[str, Any]]:
    """All plans, best first, as rows with the keys of `planner.COLUMNS` (None = not applicable).

    The arguments are the command's options; times in milliseconds, `memory_limit` as "72GiB" or a number of bytes,
    `price` in dollars per chip and hour. Without `gpus` the fewest chips are looked for, up to `max_gpus` (1024), that
    carry `arrival_rate`, or `concurrency` or one request, within the limits.

    `lengths` as --lengths, a file or "1000,3000/256", takes the place of `isl` and `osl`.

    Raises:
        InputError: something given cannot be used.
        NoPlanError: no plan satisfies the request.
    """
    spread = Spread(isl, osl, None) if lengths is None else lengths_from(lengths)
    if gpus is not None and max_gpus is not None:
        raise InputError("gpus says how many chips there are, max_gpus how many to look at; give one of them")
    machine, software = load_machine(hardware, engine)
    target = load_model(model)
    speculation = speculation_of(spec_tokens, spec_accept, draft, target)

    def seconds(name: str, value: float | None) -> float | None:
        if value is None:
            return None
        check_number(name, value)
        return value * MS

    return rank(
        Request(
            target,
            machine,
            software.limited(max_num_seqs, max_num_batched_tokens),
            (max_gpus or MOST_CHIPS) if gpus is None else gpus,
            Workload(
                spread.isl,
                spread.osl,
                concurrency,
                schedule,
                weights,
                kv_cache,
                max_context,
                arrivals,
                prefix_hit,
                arrival_rate,
                spread.lengths,
                speculation,
            ),
            objective,
            Limits(
                seconds("max-ttft", max_ttft_ms),
                seconds("max-tpot", max_tpot_ms),
                seconds("max-latency", max_latency_ms),
                parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit,
                memory_fraction,
            ),
            Filters() if filters is None else filters,
            price,
            slice,
            pareto,
            fewest=gpus is None,
        )
    ).results.rows()


def estimate(model: str | Path, **options: Any) -> dict[str, Any]:
    """One given plan, priced: a row with the keys of `planner.COLUMNS`. Never searches.

    Args:
        model: name, Hugging Face id or path.
        options: any of `planner.points.OPTIONS`, as `tp=8`, `plan="TP8xPP2"`, `concurrency=64`.

    Raises:
        InputError: an option that does not exist, or a value that cannot be used.
        NoPlanError: the plan cannot run; the reason is its text.
    """
    return estimate_one({"model": str(model), **options}).row(0)
