"""Pairs of plans: what a prefill replica and a decode replica serve within the limits when one feeds the other.

    rate of a prefill replica   the wait of an M/G/1 queue fits between the prompt's own time and the limit on TTFT
    rate of a decode replica    b / ((osl - 1) D(b)) at the largest batch b with D(b) + visible / (osl - 1) in TPOT

The first token is the prefill's; what shows of the transfer is the second token's, and so in TPOT.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.phases.disaggregated.pools import Answers, Prompts, network_of
from planner.phases.disaggregated.question import BUSY, Question
from planner.phases.disaggregated.queueing import batch_quantile, rate_of_share, rate_within
from planner.phases.disaggregated.transfer import visible_seconds, wire_seconds

Array = NDArray[np.float64]
KEPT = 40
"""Plans of each phase that are paired: those that serve most per chip, and all that serve most on so few chips."""


class Site(NamedTuple):
    """Where replicas of both phases stand, with all that they can be."""

    prompts: Prompts
    answers: Answers
    level: int
    """The network level that KV crosses; 0 = it stays inside a node."""
    nodes: int = 0
    """Nodes of a unit that holds both phases (low affinity); 0 = anywhere."""
    room: int = 0
    """Chips of a unit in each of its nodes."""


class Pairs(NamedTuple):
    """Every pair of plans of two pools: arrays [prefill plans, decode plans], seconds and requests per second."""

    prompts: Prompts
    answers: Answers
    transfer: Array
    visible: Array
    sending: Array
    """Seconds of a transfer on the wires of a prefill replica."""
    receiving: Array
    prefill_rate: Array
    """Requests per second of one prefill replica within its limit."""
    decode_rate: Array

    @property
    def chips(self) -> tuple[Array, Array]:
        """Of one replica: [prefill plans, 1] and [1, decode plans]."""
        return self.prompts.chips[:, None], self.answers.chips[None, :]

    @property
    def rates(self) -> tuple[Array, Array]:
        """Requests per second of one replica of each."""
        return self.prefill_rate, self.decode_rate


def pairs_of(question: Question, site: Site) -> Pairs:
    """All pairs of the plans of a site that may lead."""
    prompts, answers = _promising(question, site.prompts, site.answers)
    own, other = prompts.cache, answers.cache
    shape = (len(prompts.plans), len(answers.plans))
    total = np.broadcast_to(other.total, shape)
    leaves = total * np.broadcast_to((own.chip / own.total)[:, None], shape)
    arrives = np.broadcast_to(other.chip, shape)
    layers = own.layers[:, None] if question.overlapped else np.ones((shape[0], 1))

    def seconds(part: Array | float) -> tuple[Array, Array]:
        def of(pool: Prompts | Answers, share: Array) -> Array:
            found = wire_seconds(network_of(pool), (share * part).ravel(), (total * part).ravel(), site.level)
            return found.reshape(shape)

        return of(prompts, leaves), of(answers, arrives)

    sending, receiving = seconds(1.0)
    transfer, piece = np.maximum(sending, receiving), np.maximum(*seconds(1.0 / layers))
    visible = visible_seconds(transfer, piece, prompts.mean_service[:, None], layers)
    prefill_rate = _prefill_rates(question, prompts)[:, None]
    kept = prompts.held[:, None] / (prompts.mean_through[:, None] + transfer)  # Little: what KV room lets be under way
    prefill_rate = np.minimum(np.minimum(prefill_rate, kept), BUSY / sending)
    decode_rate = np.minimum(_decode_rates(question, answers, visible), BUSY / receiving)
    return Pairs(prompts, answers, transfer, visible, sending, receiving, prefill_rate, decode_rate)


def _prefill_rates(question: Question, prompts: Prompts) -> Array:
    """[plans] the highest rate of one replica within the limit on TTFT: of means, or of a share of the prompts."""
    limit, service, shares = question.prefill.limits.ttft, prompts.mean_service, question.shares
    if limit is None:
        return np.asarray(BUSY / service)
    if shares is not None:
        return rate_of_share(np.full(len(service), limit), prompts.through, prompts.service, prompts.weights, shares[0])
    return rate_within(limit - prompts.mean_through, service, prompts.variation)


def _decode_rates(question: Question, answers: Answers, visible: Array) -> Array:
    """[prefill plans, decode plans] at the largest mean batch within the limit; 0 where one request breaks it.

    For a share of the requests it is not the mean batch that keeps the limit, but the one that they see at most.
    """
    rates = np.zeros(visible.shape)
    limit, shares = question.prefill.limits.tpot, question.shares
    deviations = 0.0 if shares is None else NormalDist().inv_cdf(shares[1])
    for index in range(len(answers.plans)):
        steps = np.maximum.accumulate(answers.steps[index])
        left = np.full(len(visible), np.inf) if limit is None else limit - visible[:, index] / answers.answers
        batch = np.interp(left, steps, answers.batches[index])
        if deviations:
            means = answers.batches[index] * np.linspace(1e-3, 1.0, len(steps))  # from next to none to all that fit
            means = np.sort(np.concatenate([means, answers.batches[index]]))
            seen = np.maximum.accumulate(batch_quantile(means, _elasticity(answers, index, means), deviations))
            batch = np.where(batch >= seen[0], np.interp(batch, seen, means), 0.0)
        slow = np.maximum(1.0, batch)  # below one request in flight a step takes what it takes for one
        served = batch / (answers.answers * answers.step(index, slow))
        rates[:, index] = np.where(left >= steps[0], served, 0.0)
    return rates


def _elasticity(answers: Answers, index: int, batch: Array) -> Array:
    """By how many per cent a step grows where the batch grows by one."""
    more, here = np.maximum(1.0, batch) * 1.02, np.maximum(1.0, batch)
    grown = answers.step(index, more) / answers.step(index, here)
    return np.where(batch >= answers.batches[index][-1] / 1.02, 0.0, np.log(grown) / np.log(1.02)) * (batch > 1)


def _promising(question: Question, prompts: Prompts, answers: Answers) -> tuple[Prompts, Answers]:
    """The plans of each phase that may lead: see KEPT."""
    prompts, answers = prompts.take(_distinct(prompts)), answers.take(_distinct(answers))
    alone = _prefill_rates(question, prompts)
    other = _decode_rates(question, answers, np.zeros((1, len(answers.plans))))[0]
    return prompts.take(_kept(alone, prompts.chips)), answers.take(_kept(other, answers.chips))


def _distinct(pool: Prompts | Answers) -> NDArray[np.intp]:
    """Plans without those that differ only in what the other phase does: the one that holds most, in fewest words."""
    times = pool.mean_through if isinstance(pool, Prompts) else pool.steps[:, 0]
    most = pool.held if isinstance(pool, Prompts) else pool.most
    best: dict[tuple[float, ...], int] = {}
    for index, plan in enumerate(pool.plans):
        key = (plan.tp, plan.pp, plan.ep, plan.cp, float(f"{times[index]:.9e}"))
        other = best.setdefault(key, index)
        if (most[index], -len(plan.label)) > (most[other], -len(pool.plans[other].label)):
            best[key] = index
    return np.array(list(best.values()), dtype=np.intp)


def _kept(rates: Array, chips: Array) -> NDArray[np.intp]:
    per_chip = np.argsort(-rates / chips, kind="stable")[:KEPT]
    by_chips = np.lexsort((-rates, chips))
    leading = by_chips[np.diff(np.maximum.accumulate(rates[by_chips]), prepend=0.0) > 0]
    chosen = np.unique(np.concatenate([per_chip, leading]))
    return np.asarray(chosen[rates[chosen] > 0])
