"""Prefill and decode on chips of their own: every pair of plans, the rate it serves within limits, how many of each.

DistServe (OSDI 2024) finds the plan of each phase that serves most within its limit, and as many replicas of both as
the rate needs; where wires between nodes are slow, both phases of an instance share its nodes. Splitwise (ISCA 2024)
gives each phase the machine that suits it. Here all pairs are priced by the cost engine, since what is left of the
transfer of KV lengthens the answers of one and depends on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.arriving import queue_wait
from planner.phases.disaggregated.matching import ALMOST, Match, for_counts, for_rate, packs, within_chips
from planner.phases.disaggregated.pairing import Pairs, Site, pairs_of
from planner.phases.disaggregated.pools import Answers, Prompts, Segmented, answers_of, prompts_of
from planner.phases.disaggregated.question import BUSY, MOST_NODES, Affinity, Question
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.rules import refusal
from planner.plans.space import Refused, enumerate_plans
from planner.request import Request

Array = NDArray[np.float64]
POINTS = 24
"""Times per token for which the frontier is asked."""
_LISTED = 400
"""Pairs, best first, whose replicas are seated in nodes one by one."""


class Deployment(NamedTuple):
    """Two pools at a rate; times in seconds, bytes, chips."""

    prefill: Plan
    """With its replicas as dp."""
    decode: Plan
    affinity: Affinity
    prefill_hardware: str
    decode_hardware: str
    prefill_chips: int
    decode_chips: int
    gpus: int
    """Paid for: those that stand idle too."""
    rate: float
    """Requests per second that are served."""
    highest: float
    """The most that could be within the limits."""
    first: float
    """Mean over prompts of the time to the first token without any wait."""
    queue: float
    transfer: float
    """Seconds of a prompt's KV on the wires."""
    visible: float
    """... that are left when the prompt is done."""
    kv_bytes: float
    step: float
    """A decode step of the mean batch."""
    tpot: float
    batch: float
    """Mean requests in flight on a decode replica."""
    most: float
    """Requests that it holds."""
    prefill_busy: float
    wires_busy: float
    binds: str
    """prefill, decode, wires, or memory (the KV room of decode replicas): what serves no more."""
    prefill_memory: float
    decode_memory: float
    prefill_limit: float
    decode_limit: float
    nodes: int = 0
    """With low affinity, nodes of one unit; else 0."""
    dollars: float = np.nan
    """Per hour, of the chips that are paid for."""
    answers: float = 1.0
    """Tokens of an answer behind its first."""

    @property
    def ttft(self) -> float:
        """From arrival to first token: with the wait."""
        return self.first + self.queue

    @property
    def latency(self) -> float:
        """From arrival to last token."""
        return self.ttft + self.answers * self.tpot

    @property
    def used(self) -> int:
        """Chips that work."""
        return self.prefill_chips + self.decode_chips

    @property
    def label(self) -> str:
        """`TP2xDP3 -> TP4`."""
        return f"{self.prefill.label} -> {self.decode.label}"


class Search(NamedTuple):
    """Pairs of plans in order, and what was refused."""

    question: Question
    deployments: list[Deployment]
    refused: list[tuple[str, Refused]]
    """(phase, plan with its reason)."""
    pairs: int
    """Pairs that were priced."""
    best_ttft: float
    """The least time to first token of any prefill plan, nobody waiting; infinite where none fits."""
    best_tpot: float


def disaggregate(question: Question, listed: Sequence[Site] | None = None) -> Search:
    """Pairs of plans, the one that serves most first; with a rate, the one on the fewest chips.

    Args:
        question: has been checked.
        listed: where replicas may stand; none = `sites`.
    """
    places = list(sites(question)) if listed is None else listed
    found: list[Deployment] = []
    refused: list[tuple[str, Refused]] = []
    count, first, step = 0, np.inf, np.inf
    for site in places:
        for split in question.splits:
            pairs = pairs_of(split, site)
            found += _in_nodes(split, site, pairs) if site.nodes else _anywhere(split, pairs)
            if split.prefill_share is None:  # the same pairs each time
                count += pairs.transfer.size
        refused += [("prefill", each) for each in site.prompts.refused]
        refused += [("decode", each) for each in site.answers.refused]
        first = min(first, float(np.min(site.prompts.mean_through, initial=np.inf)))
        step = min(step, float(np.min(site.answers.steps, initial=np.inf)))
    return Search(question, sorted(_once(found), key=_order(question)), refused, count, first, step)


def frontier(question: Question) -> Search:
    """Without limits: pairs that no other beats in both time per token and rate per chip, the fastest first.

    Prefill replicas work BUSY of their time, so that their wait is bounded; for each of POINTS times per token, the
    pair that serves most.

    Args:
        question: has been checked, has no limits and no rate.
    """
    places = list(sites(question))
    steps = [site.answers.steps for site in places if site.answers.steps.size]
    if not steps:
        return disaggregate(question, places)
    least, most = min(float(each.min()) for each in steps), max(float(each.max()) for each in steps)
    found: list[Deployment] = []
    search = None
    for limit in np.geomspace(least * 1.02, most, POINTS):
        limits = question.prefill.limits._replace(tpot=float(limit))
        search = disaggregate(question._replace(prefill=question.prefill._replace(limits=limits)), places)
        found += search.deployments[:1]
    assert search is not None
    best: list[Deployment] = []
    for each in sorted(found, key=lambda each: (each.tpot, -each.rate / each.gpus)):
        if not best or each.rate / each.gpus > best[-1].rate / best[-1].gpus * (1 + ALMOST):
            best.append(each)
    return search._replace(question=question, deployments=best)


def _order(question: Question) -> Callable[[Deployment], tuple[float, ...]]:
    """By requests per chip that is paid for (per $ where chips differ and have prices); of equals the faster."""

    def key(each: Deployment) -> tuple[float, ...]:
        weight = each.dollars if question.mixed and np.isfinite(each.dollars) else float(each.gpus)
        return (-float(f"{each.rate / weight:.9e}"), each.used, each.latency)

    return key


def _once(deployments: Iterable[Deployment]) -> list[Deployment]:
    """Each pair of plans on so many chips once: as it can serve most."""
    found: dict[tuple[str, int], Deployment] = {}
    for each in deployments:
        key = (each.label, each.gpus)
        if key not in found or each.highest > found[key].highest * (1 + ALMOST):
            found[key] = each
    return list(found.values())


def sites(question: Question) -> Iterator[Site]:
    """Where replicas may stand: in units of so many nodes that hold both phases, and anywhere."""
    domain, low = question.prefill.hardware.domain, "low" in question.affinity and question.shares_nodes
    if low:
        for nodes in range(1, MOST_NODES + 1):
            if nodes == 1 or nodes * (domain or 0) <= question.chips:
                yield from site_in_nodes(question, nodes)
    one_node = question.chips <= (domain or 0) and question.rate is None
    if "high" in question.affinity and not (low and one_node):  # in one node both are the same
        yield site_anywhere(question)


def site_anywhere(question: Question) -> Site:
    """High affinity: any prefill replica feeds any decode replica, over the wires that span all of them.

    A replica spans MOST_NODES nodes at most, unless the pools are given.
    """
    chips, requests = question.chips, (question.prefill, question.decode)
    sizes = question.pools or tuple(min(chips, MOST_NODES * (each.hardware.domain or chips)) for each in requests)
    places = [Placement.of(each.hardware, size) for each, size in zip(requests, sizes, strict=True)]
    outermost = max(len(each.hardware.network) for each in requests) - 1
    level = outermost if question.mixed else int(places[0].span(np.asarray(chips)))
    return Site(prompts_of(question.prefill, places[0]), answers_of(question.decode, places[1]), level)


def site_in_nodes(question: Question, nodes: int) -> Iterator[Site]:
    """Low affinity: units of so many nodes, each of which holds an equal part of the stages of every replica of both.

    None where no pipeline divides over several.

    Args:
        question: asks for one kind of machine, which has nodes.
        nodes: of a unit, and so parts of every pipeline.
    """
    domain = question.prefill.hardware.domain or 1
    room = domain if nodes > 1 or question.rate is not None else min(domain, question.chips)
    place = Segmented(question.prefill.hardware, nodes * room, None, nodes)
    plans, refused = _segments(question.prefill, place, nodes, room)
    others, dropped = _segments(question.decode, place, nodes, room)
    if nodes == 1 or (plans and others):
        prompts, answers = prompts_of(question.prefill, place, plans), answers_of(question.decode, place, others)
        prompts = prompts._replace(refused=refused + prompts.refused)
        yield Site(prompts, answers._replace(refused=dropped + answers.refused), 0, nodes, room)


def _segments(request: Request, place: Placement, nodes: int, room: int) -> tuple[list[Plan], list[Refused]]:
    """Plans whose stages divide over the nodes and leave room for another replica in each."""
    deep, weights = request.filters.pp, request.workload.weights
    node = Placement.of(request.hardware, room)
    filters = request.filters._replace(dp=(1,), pp=())
    parts, refused = enumerate_plans(request.model, request.engine, node, filters, weights)
    whole = [plan._replace(pp=plan.pp * nodes) for plan in parts if plan.replica_chips < room]
    whole = [plan for plan in whole if not deep or plan.pp in deep]
    kept = [plan for plan in whole if refusal(request.model, request.engine, place, plan, weights) is None]
    return kept, refused if nodes == 1 else []


def _anywhere(question: Question, pairs: Pairs) -> Iterator[Deployment]:
    """Every pair of `site_anywhere` that serves anything."""
    pools = question.pools
    if question.rate is not None:
        match = for_rate(pairs.rates, question.rate)
    elif pools is not None:
        held = _held(pairs.prompts)[:, None], _held(pairs.answers)[None, :]
        match = for_counts(pairs.rates, held)
    else:
        match = within_chips(pairs.rates, pairs.chips, question.chips)
    for row, column in _best_first(pairs, match, question.rate is not None):
        counts = int(match.prefill[row, column]), int(match.decode[row, column])
        seated = (*counts, sum(pools)) if pools is not None else _seated(question, pairs, row, column, counts)
        if seated is not None:
            yield _deployment(question, pairs, (row, column), seated[:2], seated[2])


def _in_nodes(question: Question, site: Site, pairs: Pairs) -> Iterator[Deployment]:
    """Every pair of `site_in_nodes` that serves anything: the best ratio of what a unit holds."""
    nodes, room, chips = site.nodes, site.room, question.chips
    own, other = (size / nodes for size in pairs.chips)
    match = within_chips(pairs.rates, (own, other), room)
    units = chips // (nodes * room)
    for row, column in _best_first(pairs, match, False):
        counts, rate = (int(match.prefill[row, column]), int(match.decode[row, column])), match.rate[row, column]
        used = int(counts[0] * own[row, 0] + counts[1] * other[0, column])
        paid = chips
        if question.rate is not None:
            units = int(np.ceil(question.rate / rate * (1 - ALMOST)))
            paid = (units * nodes - 1) * room + used
        if units and paid <= chips:
            yield _deployment(question, pairs, (row, column), (counts[0] * units, counts[1] * units), paid, nodes)


def _held(pool: Prompts | Answers) -> NDArray[np.int_]:
    """Replicas of each plan that a pool's chips hold."""
    return np.array([pool.placement.replicas(plan.tp, plan.pp, plan.cp) for plan in pool.plans], dtype=int)


def _best_first(pairs: Pairs, match: Match, fewest: bool) -> list[tuple[int, int]]:
    """Places of at most _LISTED pairs that serve anything: by chips where the `fewest` count, else by rate."""
    own, other = pairs.chips
    used = match.prefill * own + match.decode * other
    chosen = np.argwhere(match.rate > 0)
    rate, chips = match.rate[tuple(chosen.T)], used[tuple(chosen.T)]
    order = np.lexsort((rate, chips)) if fewest else np.lexsort((chips, -rate))
    return [(int(row), int(column)) for row, column in chosen[order[:_LISTED]]]


def _seated(
    question: Question, pairs: Pairs, row: int, column: int, counts: tuple[int, int]
) -> tuple[int, int, int] | None:
    """(prefill replicas, decode replicas, chips that are paid for) as nodes hold them; none where they hold too few."""
    domain = None if question.mixed else question.prefill.hardware.domain
    plans = pairs.prompts.plans[row], pairs.answers.plans[column]

    def fits(prefill: int, decode: int, chips: int) -> bool:
        groups = [(plan.stage_chips, plan.pp * count) for plan, count in zip(plans, (prefill, decode), strict=True)]
        return packs(groups, chips, domain)

    used = sum(plan.replica_chips * count for plan, count in zip(plans, counts, strict=True))
    if question.rate is not None:
        if question.mixed:
            requests = (question.prefill, question.decode)
            used = sum(
                Placement.of(each.hardware, 1).fewest(plan.tp, plan.pp, count, plan.cp)
                for each, plan, count in zip(requests, plans, counts, strict=True)
            )
        most = min(question.chips, 2 * used + (domain or 0))
        return next(((*counts, chips) for chips in range(used, most + 1) if fits(*counts, chips)), None)
    if question.mixed:
        return (*counts, used)
    if fits(*counts, question.chips):
        return (*counts, question.chips)
    rates = pairs.prefill_rate[row, column], pairs.decode_rate[row, column]
    fewer = [(x, y) for x in range(1, counts[0] + 1) for y in range(1, counts[1] + 1) if fits(x, y, question.chips)]
    if not fewer:
        return None
    best = max(fewer, key=lambda each: (min(each[0] * rates[0], each[1] * rates[1]), -each[0], -each[1]))
    return (*best, question.chips)


def _deployment(
    question: Question,
    pairs: Pairs,
    place: tuple[int, int],
    counts: tuple[int, int],
    gpus: int,
    nodes: int = 0,
) -> Deployment:
    """A pair of plans with so many replicas, at the rate that is asked or at the highest."""
    row, column = place
    prompts, answers = pairs.prompts, pairs.answers
    limits = counts[0] * pairs.prefill_rate[place], counts[1] * pairs.decode_rate[place]
    highest = float(min(limits))
    rate = highest if question.rate is None else question.rate
    own, other = rate / counts[0], rate / counts[1]
    service, through = float(prompts.mean_service[row]), float(prompts.mean_through[row])
    batch = float(answers.batch_at(column, other))
    step = float(answers.step(column, max(1.0, batch)))
    wires = max(own * pairs.sending[place], other * pairs.receiving[place])
    phase = "prefill" if limits[0] <= limits[1] else "decode"
    full = phase == "decode" and batch >= answers.most[column] * (1 - ALMOST)
    binds = "wires" if wires > BUSY * (1 - 1e-6) else "memory" if full else phase
    chosen = prompts.plans[row], answers.plans[column]
    plans = [plan._replace(dp=count) for plan, count in zip(chosen, counts, strict=True)]
    return Deployment(
        prefill=plans[0],
        decode=plans[1],
        affinity="low" if nodes else "high",
        prefill_hardware=question.prefill.hardware.name,
        decode_hardware=question.decode.hardware.name,
        prefill_chips=plans[0].chips,
        decode_chips=plans[1].chips,
        gpus=gpus,
        rate=rate,
        highest=highest,
        first=through,
        queue=float(queue_wait(np.asarray(own), np.asarray(service), prompts.variation[row])),
        transfer=float(pairs.transfer[place]),
        visible=float(pairs.visible[place]),
        kv_bytes=float(answers.cache.total[column]),
        step=step,
        tpot=step + float(pairs.visible[place]) / answers.answers,
        batch=batch,
        most=float(answers.most[column]),
        prefill_busy=own * service,
        wires_busy=float(wires),
        binds=binds,
        prefill_memory=float(prompts.memory[row]),
        decode_memory=float(answers.memory[column]),
        prefill_limit=prompts.limit,
        decode_limit=answers.limit,
        nodes=nodes,
        dollars=_dollars(question, plans, gpus),
        answers=answers.answers,
    )


def _dollars(question: Question, plans: Sequence[Plan], gpus: int) -> float:
    """Per hour: of one kind of chips all that are paid for, of two those of each pool; NaN without a price."""
    prices = []
    for request in (question.prefill, question.decode):
        listed = request.hardware.price
        given = request.usd_per_chip_hour
        prices.append(given if given is not None else (listed.usd_per_chip_hour if listed else np.nan))
    if not question.mixed:
        return prices[0] * gpus
    chips = question.pools or [plan.chips for plan in plans]
    return float(sum(price * count for price, count in zip(prices, chips, strict=True)))
