"""Pools request by request, against the closed forms, a queue by hand, and themselves."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from asking import request

from planner import Filters, InputError, Limits
from planner.phases.disaggregated.colocated import best_colocated
from planner.phases.disaggregated.disaggregation import Deployment, disaggregate
from planner.phases.disaggregated.question import Question
from planner.phases.disaggregated.rehearsal import Pools, pools_of, rehearse, rehearse_together
from planner.simulating.queueing import waits
from planner.simulating.traces import Stream, Trace
from planner.specs.lengths import population_of

LIMITS = Limits(ttft=0.5, tpot=0.03)
ISL, OSL = 1024, 128
STREAM = Stream(population=population_of(str(ISL), str(OSL), None), seed=5)
TRACE = STREAM.take(1200)
FEW = TRACE.part(np.arange(300))


def question(share: float | None = None, tp: int = 4) -> Question:
    work, filters = {"isl": ISL, "osl": OSL, "schedule": "continuous"}, Filters(tp=(tp,), pp=(1,))
    asked = request(gpus=8, work=work, limits=LIMITS, filters=filters)
    return Question(asked, asked, share=share)


@cache
def pair(share: float | None = None) -> Deployment:
    return disaggregate(question(share)).deployments[0]


@cache
def pools() -> Pools:
    return pools_of(question(), pair(), ISL + OSL)


@pytest.mark.parametrize("busy", [0.4, 0.75])
def test_requests_wait_and_decode_as_the_closed_forms_say(busy: float) -> None:
    """One replica of each: TTFT within the noise of the queue, TPOT within 2 %."""
    found = pair()
    service = found.prefill_busy / found.rate
    rate = busy / service
    here = Question(*(each._replace(workload=each.workload._replace(arrival_rate=rate)) for each in question()[:2]))
    closed = next(each for each in disaggregate(here).deployments if each.label == found.label)
    run = pools().run(TRACE.faster(rate / TRACE.rate))
    counted = slice(120, 1100)  # neither while pools fill nor while they empty
    assert run.ttft[counted].mean() == pytest.approx(
        closed.first + waits(run.arrival, service)[counted].mean(), rel=0.01
    )
    assert run.ttft[counted].mean() == pytest.approx(closed.ttft, rel=0.15)
    assert run.tpot[counted].mean() == pytest.approx(closed.tpot, rel=0.02)


def test_no_request_is_lost_and_none_is_answered_before_its_kv_is_there() -> None:
    found = pair()
    run = pools().run(FEW.faster(5.0))
    assert np.array_equal(run.osl, FEW.osl)
    assert len(run.finish) == FEW.length
    assert np.all(run.start >= run.arrival)
    assert np.all(run.first > run.start)
    assert np.all(run.finish >= run.first + pools().visible + (OSL - 1) * found.step * 0.5)
    again = pools().run(FEW.faster(5.0))
    assert np.array_equal(run.finish, again.finish)


def test_slow_wires_delay_the_second_token_by_what_they_take() -> None:
    """One request every ten seconds: all that shows of a transfer lies between its first and its second token."""
    apart = Trace(np.arange(4) * 10.0, np.full(4, float(ISL)), np.full(4, float(OSL)))
    usual = pools().run(apart)
    slow = pools()._replace(transfer=1.5, visible=1.5).run(apart)
    assert np.allclose(slow.first, usual.first)
    assert np.allclose(slow.finish - usual.finish, 1.5 - pools().visible)
    together = Trace(np.zeros(3), np.full(3, float(ISL)), np.full(3, float(OSL)))
    queued = pools()._replace(transfer=1.5, visible=0.1).run(together)  # one prompt's KV after the other
    assert queued.finish.max() >= queued.first.min() + 0.1 + 2 * 1.5


def at_rate(share: float, rate: float) -> Question:
    asked = question(share)
    work = asked.prefill.workload._replace(arrival_rate=rate)
    return asked._replace(prefill=asked.prefill._replace(workload=work))


def test_the_share_that_closed_forms_promise_is_kept_and_little_more_would_be() -> None:
    """At the rate of the closed forms for nine tenths of requests, two points less at most, and a fifth beyond it."""
    found, steps = pair(share=0.9), []
    at, over = (
        rehearse(at_rate(0.9, rate), found, STREAM._replace(rate=rate), lambda: steps.append(1), 1200)
        for rate in (found.rate, 1.2 * found.rate)
    )
    assert len(steps) == 2
    assert at.rate == pytest.approx(found.rate)
    assert at.attained >= 0.88
    assert over.attained < 0.9


def test_the_highest_rate_is_searched() -> None:
    found = pair(share=0.9)
    fared = rehearse(question(share=0.9), found, STREAM, count=200)
    assert fared.attained >= 0.9
    most = found.rate / found.prefill_busy  # two hundred requests tell little: above the closed form, below all of it
    assert 0.9 * found.rate < fared.rate < most
    together = rehearse(question(share=0.9), best_colocated(question().prefill)[0], STREAM, count=60)
    assert together.attained >= 0.9


def test_replicas_are_added_where_means_promised_too_little() -> None:
    """Sized by means for a rate at its limit, TP4 keeps both limits for too few; so many more replicas do, no more."""
    rate = best_colocated(question().prefill)[0].rate * 0.999
    asked = at_rate(0.9, rate)
    asked = asked._replace(prefill=asked.prefill._replace(gpus=64))
    (sized,) = best_colocated(asked.prefill)
    stream = STREAM._replace(rate=rate)
    before = rehearse(asked, sized, stream, count=300)
    larger, after = rehearse_together(asked, sized, stream, count=300)
    assert before.attained < 0.9 <= after.attained
    assert larger.plan.dp == sized.plan.dp + 1
    assert larger.gpus == sized.gpus + 4
    assert larger.rate == sized.rate == after.rate


def test_a_request_that_no_replica_holds_is_refused() -> None:
    long = STREAM._replace(population=population_of("500000", "500000", None), rate=1.0)
    with pytest.raises(InputError, match="does not fit"):
        rehearse(at_rate(0.9, 1.0), pair(), long, count=20)
