"""Elastic sequence parallelism beside deployments whose parallelism stands still, on prompts short and long.

The same requests, one by one, through six systems on the same chips: the instances of `esp`; one tensor-parallel group
of all chips where prompts run first and whole; the same with chunks that ride with decodes, one of each prompt under
way; two groups of half the chips each, for prompts and for decodes, between which KV goes over the wires; the instances
in one ring for every pass; and each of them a replica of its own. A system's highest rate is that at which so many
requests are no slower than a multiple of what they take alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure, causal_pairs
from planner.costs.rows import Rows
from planner.costs.serving import Setting, replica_of
from planner.costs.step import Replica
from planner.errors import InputError, NoPlanError
from planner.phases.elastic.batching import Fitted, PromptTable, fitted
from planner.phases.elastic.esp import Cluster
from planner.phases.elastic.instances import Costs, Outcome
from planner.phases.elastic.rings import elastic_replica
from planner.phases.shift.layout import Base
from planner.phases.shift.shifting import is_plain, memory_of, passes
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import tp_allowed
from planner.pricing import setting_of
from planner.request import Request
from planner.simulating.fleets import outcome as fleet_outcome
from planner.simulating.iterations import DecodeRow, IterationTime, Maker
from planner.simulating.replicas import Job
from planner.simulating.replicas import Replica as Server
from planner.simulating.rooms import KvRoom, Rules
from planner.simulating.traces import Trace
from planner.specs.lengths import Population
from planner.units import US

Array = NDArray[np.float64]
NAMES = ("elastic", "whole prompts", "chunked prompts", "disaggregated", "fixed ring", "replicas")
"""Of the systems."""
NEAR = 1.05
"""Ratio of two rates between which the highest one is not looked for."""
SLOWEST, FASTEST = 2.0**-8, 2.0**8
"""Times the rate of a trace between which its highest rate is looked for."""
KINDS = 64
"""Lengths that stand for a kind of prompt."""
ABREAST = 16
"""Chunks of an iteration at most, each of another prompt: the default of LightLLM, on which the paper's baseline with
chunks runs. Its prompts go on side by side, so that a short one does not wait for a long one that came before; a budget
that the first prompt fills alone (Sarathi-Serve, vLLM) leaves it waiting."""


class Served(NamedTuple):
    """When requests had their first token and their last; arrays in the order of arrival, seconds."""

    first: Array
    finish: Array


class System(NamedTuple):
    """One way to serve."""

    name: str
    label: str
    serve: Callable[[Trace], Served]
    """Raises ValueError where a request does not fit."""
    tokens: float
    """Of KV that a request may take: of the group for answers, or of one replica, where these are apart."""


class Elastic(NamedTuple):
    """What is compared."""

    request: Request
    tp: int
    """Chips of an instance."""
    instances: int
    costs: Costs
    fits: tuple[Fitted, ...]
    """[d - 1] the form of prompts' passes."""
    systems: tuple[System, ...]
    alone: Callable[[Array, Array], Array]
    """(isl, osl) -> seconds of a request alone on one tensor-parallel group of all chips."""
    esp: Callable[[Trace], Outcome]
    """What the elastic system did."""


class Score(NamedTuple):
    """What a system makes of requests."""

    rate: float
    """Requests per second at which so many keep the limit; 0 where none is low enough or it cannot hold them, infinite
    where they do even if all come at once."""
    per_token: float
    """Mean seconds per token, prompt and answer, at the rate that was asked; NaN where it cannot hold them."""
    per_input: float
    """Mean seconds to the first token per token of the prompt."""
    per_output: float
    """Mean seconds per token of the answer after the first."""
    attained: float
    """Share of requests within the limit at that rate."""
    least: float = np.nan
    """Where the rate is 0: the scale that so many requests would keep at the lowest rate that was tried."""


def mixed(short: int, long: int, share: float, osl: int) -> Population:
    """Prompts of two kinds, each spread evenly in ratio from half to twice its length; answers likewise.

    Args:
        short: tokens of the one.
        long: tokens of the other.
        share: of requests that are long.
        osl: tokens of an answer.
    """
    spread = np.geomspace(0.5, 2.0, KINDS)
    isl = np.round(np.concatenate([short * spread, long * spread]))
    answers = np.round(osl * spread[np.random.default_rng(0).permutation(KINDS)])
    weight = np.repeat([1 - share, share], KINDS)
    return Population(isl, np.maximum(2.0, np.concatenate([answers, answers])), weight)


def elastic(request: Request, tp: int, chunk: int, longest: float) -> Elastic:
    """Systems for one question.

    Args:
        request: model, machine, engine, chips.
        tp: chips of an instance.
        chunk: tokens that each prompt has of an iteration, in the system with chunks.
        longest: tokens of the longest request.

    Raises:
        InputError: a model or engine that is not priced, or chips that instances do not divide.
        NoPlanError: an instance does not hold the weights, or all of them not the longest request.
    """
    model, engine = request.model, request.engine
    if not is_plain(model):
        raise InputError(
            f"elastic parallelism of {model.name}: only dense models with plain attention to all tokens are priced"
        )
    if engine.scheduler.schedule == "static":
        raise InputError(
            f"engine {engine.name} runs static batches, whose requests do not come one by one; give another --engine"
        )
    if request.gpus % tp or request.gpus // tp < 2:
        raise InputError(f"--tp {tp}: {request.gpus} chips are no two or more instances of {tp}")
    domain = request.hardware.domain or request.gpus
    if request.gpus > domain:
        raise InputError(
            f"{request.gpus} chips leave the {domain} that {request.hardware.name} joins directly, and static tensor "
            "parallelism over them is no match; give fewer chips"
        )
    placement = Placement.of(request.hardware, request.gpus, request.slice)
    setting = setting_of(request, placement, Structure())
    for ranks in (tp, request.gpus):
        reason = tp_allowed(model, engine, ranks, setting.formats.weights.name)
        if reason is not None:
            raise NoPlanError(f"TP{ranks}: {reason}")
    instances = request.gpus // tp
    room = _tokens(setting, tp)
    if room * instances < longest:
        raise NoPlanError(
            f"{instances} instances of TP{tp} hold {max(0.0, room * instances):.0f} tokens, the longest request has "
            f"{longest:.0f}; give more chips, or shorter prompts"
        )
    costs = _costs(setting, tp, instances, longest)

    def run(trace: Trace) -> Outcome:
        return Cluster([room] * instances, costs).run(trace)

    def serve(trace: Trace) -> Served:
        found = run(trace)
        return Served(found.first, found.finish)

    def fixed(trace: Trace) -> Served:
        found = Cluster([room] * instances, costs, fixed=True).run(trace)
        return Served(found.first, found.finish)

    every = request.gpus
    systems = (
        System(NAMES[0], f"{instances} x TP{tp}", serve, room * instances),
        _static(setting, every, NAMES[1], None, longest),
        _static(setting, every, NAMES[2], chunk, longest),
        _disaggregated(setting, every // 2, longest),
        System(NAMES[4], f"SP{instances} of TP{tp}", fixed, room * instances),
        _replicated(setting, tp, instances, longest),
    )
    return Elastic(request, tp, instances, costs, costs.fits, systems, _alone(setting, every), run)


def _tokens(setting: Setting, tp: int) -> float:
    return memory_of(setting, Base(1, tp), sequence=False, shift=True).tokens


def _costs(setting: Setting, tp: int, instances: int, longest: float) -> Costs:
    def maker(degree: int, masters: int | None = None) -> Maker:
        def make(of: Setting, rows: Rows) -> Replica:
            return elastic_replica(of, rows, degree, masters)

        return make

    def seconds(degree: int) -> Callable[[Array, Array], Array]:
        def of(counts: Array, lengths: Array) -> Array:
            work = Pass(0.0, 0.0, counts * lengths, counts * causal_pairs(lengths), 0.0, counts, counts)
            return passes(setting, maker(degree), tp, work)

        return of

    @cache
    def table(degree: int) -> PromptTable:
        def pass_of(tokens: Array, keys: Array) -> Array:
            return passes(setting, maker(degree), tp, Pass(0.0, 0.0, tokens, tokens * keys, 0.0, 1.0, 1.0))

        return PromptTable.of(pass_of, longest * instances)

    def prefill(lengths: Sequence[float], degree: int) -> float:
        tokens = sum(lengths)
        return table(degree).seconds(tokens, sum(length * (length + 1) for length in lengths) / (2 * tokens))

    @cache
    def clock(degree: int, masters: int) -> IterationTime:
        return IterationTime(setting, Plan(tp=tp), longest, maker(degree, masters))

    @cache
    def decoding(requests: int, degree: int, masters: int) -> DecodeRow:
        return clock(degree, masters).decoding(requests)

    fits = tuple(fitted(seconds(degree), longest) for degree in range(1, instances + 1))
    network = Network(setting.placement, setting.engine)
    per_token = _kv_bytes(setting, tp)
    return Costs(
        prefill,
        fits,
        decoding,
        lambda tokens: float(network.send(np.array([tokens * per_token]), 0)[0]),
        fits[0].a / fits[0].b if fits[0].b > 0 else np.inf,
        setting.engine.host.request_us * US,
    )


def _kv_bytes(setting: Setting, tp: int) -> float:
    """Bytes of KV of a token on a chip."""
    attention = setting.model.attention
    heads = max(1.0, np.ceil(attention.kv_heads / tp))
    return float(setting.model.layers * 2 * heads * attention.head_dim * setting.formats.kv.bytes)


def _server(setting: Setting, tp: int, chunk: int | None, longest: float, most: float) -> Callable[[], Server]:
    """What makes one tensor-parallel group that serves, its prompts in chunks side by side, or whole."""
    budget = None if chunk is None else chunk * ABREAST
    scheduler = setting.engine.scheduler._replace(chunk_tokens=budget)
    own = setting._replace(engine=setting.engine._replace(scheduler=scheduler))
    clock = IterationTime(own, Plan(tp=tp), longest)
    block = scheduler.block_tokens
    tokens = _tokens(setting, tp)
    room = KvRoom(max(0.0, tokens // block), block, whole=scheduler.kv_reservation == "whole")
    rules = Rules.of(setting.engine, Plan(tp=tp))
    rules = rules._replace(mixed=chunk is not None, budget=float(budget or most), piece=chunk)
    return lambda: Server(clock, room, rules)


def _static(setting: Setting, tp: int, name: str, chunk: int | None, longest: float) -> System:
    make = _server(setting, tp, chunk, longest, longest)

    def serve(trace: Trace) -> Served:
        server, jobs = make(), _jobs(trace)
        for job in jobs:
            server.submit(job)
        server.advance()
        found = fleet_outcome(jobs, [server], np.zeros(len(jobs), dtype=int))
        return Served(found.first, found.finish)

    label = f"TP{tp}" + (f", chunks of {chunk} side by side" if chunk is not None else ", prompts first")
    return System(name, label, serve, _tokens(setting, tp))


def _replicated(setting: Setting, tp: int, replicas: int, longest: float) -> System:
    """The instances as replicas, each request on the one with the fewest."""
    make = _server(setting, tp, None, longest, longest)

    def serve(trace: Trace) -> Served:
        fleet, jobs = [make() for _ in range(replicas)], _jobs(trace)
        for job in jobs:
            for server in fleet:
                server.advance(job.arrival)
            min(fleet, key=lambda server: server.outstanding).submit(job)
        for server in fleet:
            server.advance()
        found = fleet_outcome(jobs, fleet, np.zeros(len(jobs), dtype=int))
        return Served(found.first, found.finish)

    return System(NAMES[5], f"{replicas} x TP{tp}, each alone", serve, _tokens(setting, tp))


def _jobs(trace: Trace) -> list[Job]:
    columns = zip(trace.arrival.tolist(), trace.isl.tolist(), trace.osl.tolist(), strict=True)
    return [Job(key, *each) for key, each in enumerate(columns)]


def _disaggregated(setting: Setting, tp: int, longest: float) -> System:
    """Prompts on one group; then their KV over the wires, every chip its part; answers on the other."""
    make = _server(setting, tp, None, longest, longest)
    network, per_token = Network(setting.placement, setting.engine), _kv_bytes(setting, tp)

    def serve(trace: Trace) -> Served:
        prompts = [Job(job.key, job.arrival, job.isl, 1) for job in _jobs(trace)]
        server = make()
        for job in prompts:
            server.submit(job)
        server.advance()
        first = np.array([job.finish for job in prompts])
        there = first + network.send(trace.isl * per_token, 0)
        decodes, server = [], make()
        for key in np.argsort(there, kind="stable").tolist():
            isl = float(trace.isl[key])
            decodes.append(Job(key, float(there[key]), isl, float(trace.osl[key]), isl, 1))
            server.submit(decodes[-1])
        server.advance()
        finish = np.empty(trace.length)
        for job in decodes:
            finish[job.key] = job.finish
        return Served(first, finish)

    return System(NAMES[3], f"TP{tp} for prompts, TP{tp} for answers", serve, _tokens(setting, tp))


def _alone(setting: Setting, tp: int) -> Callable[[Array, Array], Array]:
    def seconds(isl: Array, osl: Array) -> Array:
        prompts = passes(setting, replica_of, tp, Pass(0.0, 0.0, isl, causal_pairs(isl), 0.0, 1.0, 1.0))
        steps = passes(setting, replica_of, tp, Pass(np.ones_like(isl), isl + osl / 2))
        return np.asarray(setting.engine.host.request_us * US + prompts + (osl - 1) * steps)

    return seconds


def score(found: Elastic, system: System, trace: Trace, scale: float, share: float) -> Score:
    """How a system does at the rate of a trace, and up to which rate so many of its requests keep the limit.

    Args:
        found: has what requests take alone.
        system: which.
        trace: the requests; they come in the same order at any rate.
        scale: of the time that a request takes alone, its limit.
        share: of requests that must keep it.
    """
    alone, times = found.alone(trace.isl, trace.osl), np.zeros(0)

    def attained(at: Trace) -> tuple[float, Served]:
        nonlocal times
        served = system.serve(at)
        times = (served.finish - at.arrival) / alone
        return float(np.mean(times <= scale)), served

    try:
        now, served = attained(trace)
    except ValueError:
        return Score(0.0, np.nan, np.nan, np.nan, 0.0)
    latency, ttft = served.finish - trace.arrival, served.first - trace.arrival
    after = np.maximum(trace.osl - 1, 1.0)
    per_token, per_input = float(np.mean(latency / (trace.isl + trace.osl))), float(np.mean(ttft / trace.isl))
    here = Score(0.0, per_token, per_input, float(np.mean((served.finish - served.first) / after)), now)
    low, high = 1.0, 1.0
    good = now >= share
    while good == (now >= share) and SLOWEST < high < FASTEST:
        low, high = high, high * (2 if good else 0.5)
        now = attained(trace.faster(high))[0]
    if good == (now >= share):  # even all at once, or not even one by one
        if good:
            return here._replace(rate=np.inf)
        return here._replace(least=float(np.quantile(times, share, method="higher")))
    low, high = min(low, high), max(low, high)
    while high / low > NEAR:
        middle = float(np.sqrt(low * high))
        if attained(trace.faster(middle))[0] >= share:
            low = middle
        else:
            high = middle
    return here._replace(rate=trace.rate * low)
