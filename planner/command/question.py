"""A request from the options of the command line, for commands that ask several."""

from __future__ import annotations

from typing import cast

from planner.command import options as opt
from planner.plans.sharding import KNOWN, KNOWN_PREFILL
from planner.plans.space import Filters
from planner.request import Limits, Objective, Request
from planner.specs.catalog import load_machine, load_model
from planner.specs.drafts import speculation_of
from planner.specs.dtypes import kv_dtype, weight_dtype
from planner.specs.engine import FFN
from planner.specs.lengths import lengths_of
from planner.specs.workload import Arrivals, Schedule, Workload
from planner.units import MS, parse_bytes

Drafted = tuple[int | str | None, float | None, str | None]


def request_of(
    model: str,
    hardware: str,
    engine: str | None,
    chips: tuple[int, bool],
    workload: Workload,
    objective: str,
    limits: Limits,
    filters: Filters,
    price: float | None,
    slice_: str | None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    drafted: Drafted = (None, None, None),
) -> Request:
    """The request for one model on one machine; `chips` as `request.chips_for` says, `drafted` as the options do.

    Raises:
        InputError: an unknown name or dtype, a file that cannot be used, a limit that the engine cannot have, a draft
            that cannot draft.
    """
    machine, software = load_machine(hardware, engine)
    software = software.limited(max_num_seqs, max_num_batched_tokens)
    if workload.weights is not None:
        weight_dtype(workload.weights)
    if workload.kv_cache is not None:
        kv_dtype(workload.kv_cache)
    asked = cast(Objective, objective)
    target = load_model(model)
    workload = workload._replace(speculation=speculation_of(*drafted, target))
    return Request(
        target, machine, software, chips[0], workload, asked, limits, filters, price, slice_,
        fewest=chips[1],
    )  # fmt: skip


def workload_of(
    isl: str,
    osl: str,
    concurrency: int | None,
    schedule: str | None,
    weights: str | None,
    kv_cache: str | None,
    max_context: int | None,
    arrivals: str | None,
    prefix_hit: float = 0.0,
    arrival_rate: float | None = None,
    lengths: str | None = None,
) -> Workload:
    """The workload; its words are checked where the request is.

    Raises:
        InputError: lengths that cannot be, or a file of them that cannot be read.
    """
    found = lengths_of(isl, osl, lengths)
    return Workload(
        found.isl, found.osl, concurrency, cast("Schedule | None", schedule), weights, kv_cache, max_context,
        cast("Arrivals | None", arrivals), prefix_hit, opt.above_zero(arrival_rate, "--arrival-rate"),
        found.lengths,
    )  # fmt: skip


def limits_of(
    ttft: float | None, tpot: float | None, latency: float | None, memory: str | None, fraction: float | None
) -> Limits:
    """Limits in seconds and bytes, from ms and a size.

    Raises:
        InputError: not above zero, or no size.
    """
    times = {"ttft": ttft, "tpot": tpot, "latency": latency}
    kept = {name: opt.above_zero(value, f"--max-{name}") for name, value in times.items()}
    return Limits(
        **{name: value * MS for name, value in kept.items() if value is not None},
        memory=None if memory is None else parse_bytes(memory),
        memory_fraction=opt.above_zero(fraction, "--memory-fraction"),
    )


def filters_of(
    tp: str | None,
    pp: str | None,
    dp: str | None,
    ep: str | None,
    cp: str | None,
    attention: str | None,
    prefill_attention: str | None,
    ffn: str | None,
    prefill_ffn: str | None,
    grid: str | None,
) -> Filters:
    """Which plans to look at, from comma lists.

    Raises:
        InputError: something in a list that there is not.
    """
    return Filters(
        opt.numbers(tp, "--tp"),
        opt.numbers(pp, "--pp"),
        opt.numbers(dp, "--dp"),
        opt.numbers(ep, "--ep"),
        opt.numbers(cp, "--cp"),
        opt.choices(attention, "--attention", KNOWN),
        opt.choices(prefill_attention, "--prefill-attention", KNOWN_PREFILL),
        opt.choices(ffn, "--ffn", FFN),
        opt.choices(prefill_ffn, "--prefill-ffn", FFN),
        tuple(part.strip().lower() for part in grid.split(",")) if grid else (),
    )
