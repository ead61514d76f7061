"""Elastic sequence parallelism: passes against formulas, batches against brute force, requests against rules."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from asking import request

from planner import InputError, NoPlanError
from planner.costs.layers import Pass, Structure, causal_pairs
from planner.costs.rows import Rows, structure_of
from planner.costs.serving import Setting, replica_of
from planner.costs.step import Replica
from planner.costs.teams import Groups
from planner.phases.elastic import batching
from planner.phases.elastic.batching import Fitted, divide
from planner.phases.elastic.comparison import NAMES, Elastic, _kv_bytes, elastic, mixed, score
from planner.phases.elastic.esp import Cluster
from planner.phases.elastic.instances import Decodes, Job, Prefill
from planner.phases.elastic.rings import ElasticReplica, elastic_replica
from planner.phases.shift.shifting import passes, prompt
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.pricing import setting_of
from planner.simulating.iterations import Maker
from planner.simulating.traces import Trace, requests
from planner.units import GIB

POPULATION = mixed(500, 60_000, 0.1, 100)


@cache
def question() -> Elastic:
    return elastic(request("lwm-7b", 8, "a100-80gb-sxm"), 2, 2048, POPULATION.longest)


def setting() -> Setting:
    asked = question().request
    return setting_of(asked, Placement.of(asked.hardware, asked.gpus, None), Structure())


def over(degree: int, masters: int | None = None) -> Maker:
    def make(of: Setting, rows: Rows) -> Replica:
        return elastic_replica(of, rows, degree, masters)

    return make


def trace(count: int, rate: float, seed: int = 1) -> Trace:
    return requests(POPULATION, count, seed=seed).faster(rate)


def test_one_instance_is_plain_tensor_parallelism() -> None:
    for work in (prompt(777.0), Pass(17.0, 900.0), Pass(1.0, 50_000.0)):
        assert passes(setting(), over(1), 2, work)[0] == pytest.approx(
            passes(setting(), replica_of, 2, work)[0], rel=1e-12
        )


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_instances_share_the_work_of_one(degree: int) -> None:
    rows = Rows.of(tp=2, pp=1, dp=1, isl=1, osl=1, concurrency=1)
    for work in (prompt(np.array([12_000.0])), Pass(np.array([24.0]), 12_000.0)):
        shared, _ = elastic_replica(setting(), rows, degree).count(work, experts=False)
        whole, _ = replica_of(setting(), rows).count(work, experts=False)
        for mine, one in zip(
            [each for each in shared if each.name != "sums of blocks, attention (prefill)"], whole, strict=True
        ):
            assert mine.name == one.name
            if mine.place == "layer":
                assert mine.flops * mine.times * degree == pytest.approx(one.flops * one.times)
                assert mine.kv_bytes * mine.times * degree == pytest.approx(one.kv_bytes * one.times)


def test_keys_and_values_go_round_behind_attention_or_are_waited_for() -> None:
    """Ring attention hides its hops from 4 d c^2 / F >= 4 c d / B on, c tokens a chip (Liu et al. 2023, section 3)."""
    replica = elastic_replica(setting(), Rows.of(tp=2, pp=1, dp=1, isl=1, osl=1, concurrency=1), 4)
    assert isinstance(replica, ElasticReplica)
    model = replica.model
    for tokens, hidden in ((400.0, False), (200_000.0, True)):
        size = tokens / 4 * 2 * model.attention.kv_heads / 2 * model.attention.head_dim * 2
        assert replica._hop(prompt(np.array([tokens])))[0] == pytest.approx(replica.network.send(size, 0)[0])
        one, four = (passes(setting(), over(d), 2, prompt(tokens))[0] for d in (1, 4))
        assert (four < 0.26 * one) == hidden


@pytest.mark.parametrize("degree", [2, 4])
def test_rings_of_plans_take_as_long(degree: int) -> None:
    """Context parallelism as plans have it, whose requests decode in one of the groups each."""
    plan = Plan(tp=2, cp=degree, attention=f"heads2xbatch{degree}", prefill_attention="ring")
    asked = question().request
    own = setting_of(asked, Placement.of(asked.hardware, asked.gpus, None), structure_of(plan))

    def make(of: Setting, rows: Rows) -> Replica:
        return replica_of(own, rows._replace(cp=rows.tp * 0 + degree))

    for work in (prompt(np.array([1000.0, 10_000.0, 100_000.0])), Pass(np.array([64.0, 256.0]), 1000.0)):
        assert passes(setting(), over(degree), 2, work) == pytest.approx(passes(own, make, 2, work), rel=0.02)


def test_a_hop_across_nodes_shares_their_cards() -> None:
    replica = elastic_replica(setting(), Rows.of(tp=2, pp=1, dp=1, isl=1, osl=1, concurrency=1), 4)
    inside, across = (
        replica.network.over("send", Groups.of(np.array([ranks]), np.array([2])), np.array([1e6])) for ranks in (4, 8)
    )
    assert across[0] >= inside[0] == replica.network.send(1e6, 0)[0]


def test_masters_share_projections_and_all_share_the_cache() -> None:
    work = Pass(np.array([64.0]), 20_000.0)
    rows = Rows.of(tp=2, pp=1, dp=1, isl=1, osl=1, concurrency=1)
    counted = {
        masters: {
            each.name: each for each in elastic_replica(setting(), rows, 2, masters).count(work, experts=False)[0]
        }
        for masters in (1, 2, 4)
    }
    for masters, found in counted.items():
        assert found["gate_up"].flops * masters == pytest.approx(counted[1]["gate_up"].flops)
        assert found["attention (decode)"].kv_bytes == counted[1]["attention (decode)"].kv_bytes
    times = [passes(setting(), over(2, masters), 2, Pass(256.0, 200.0))[0] for masters in (1, 2, 4)]
    assert times == sorted(times, reverse=True)


def test_the_fitted_form_is_as_near_as_the_paper_says() -> None:
    """Wu et al. 2024, section 5.5: within a tenth."""
    found = question()
    assert len(found.fits) == found.instances == 4
    for degree, form in enumerate(found.fits, 1):
        assert min(form.a, form.b, form.c) >= 0
        assert form.residual < 0.1
        lengths = np.array([300.0, 5000.0, 40_000.0])
        own = passes(setting(), over(degree), 2, Pass(0.0, 0.0, lengths, causal_pairs(lengths), 0.0, 1.0, 1.0))
        assert form.seconds(lengths, lengths**2) == pytest.approx(own, rel=0.12)
        for several in ([40_000.0], [300.0, 5000.0], [100.0] * 9):
            tokens, pairs = sum(several), sum(each * (each + 1) / 2 for each in several)
            exact = passes(setting(), over(degree), 2, Pass(0.0, 0.0, tokens, pairs, 0.0, 1.0, 1.0))[0]
            assert found.costs.prefill(several, degree) == pytest.approx(exact, rel=0.005)


def test_the_form_of_the_golden_row() -> None:
    assert Fitted(0.01, 1e-5, 1e-9, 0, 0).seconds(3000, 1000**2 + 2000**2) == pytest.approx(0.045, abs=1e-12)


def test_a_fit_finds_the_constants_that_made_it() -> None:
    made = batching.fitted(lambda counts, lengths: 0.01 + 1e-5 * counts * lengths + 1e-9 * counts * lengths**2, 1e5)
    assert made[:3] == pytest.approx((0.01, 1e-5, 1e-9), rel=1e-6)
    flat = batching.fitted(lambda counts, lengths: 0.01 + 1e-5 * counts * lengths - 1e-13 * counts * lengths**2, 1e5)
    assert flat.c == 0


def brute(lengths: list[float], needs: list[float], room: list[float], times: list[Fitted]) -> float:
    """Every way to cut the sorted requests into neighbours and to give each part neighbouring instances, in order."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    n, m, best = len(lengths), len(room), float("inf")
    for parts in range(1, min(n, m) + 1):
        for cuts in combinations(range(1, n), parts - 1):
            groups = [order[i:j] for i, j in zip((0, *cuts), (*cuts, n), strict=True)]
            for ends in combinations(range(2 * m + 1), 2 * parts):  # begin and end of each, gaps allowed
                spans = [(ends[2 * p], ends[2 * p + 1]) for p in range(parts)]
                if any(begin % 2 or end % 2 for begin, end in spans):
                    continue
                best = min(best, spent(groups, [(b // 2, e // 2) for b, e in spans], lengths, needs, room, times))
            for stops in combinations(range(m + 1), parts + 1):  # without gaps
                spans = list(pairwise(stops))
                best = min(best, spent(groups, spans, lengths, needs, room, times))
    return best


def spent(groups: Any, spans: Any, lengths: Any, needs: Any, room: Any, times: Any) -> float:
    total = 0.0
    for group, (begin, end) in zip(groups, spans, strict=True):
        if sum(needs[place] for place in group) > sum(room[begin:end]) * (1 + 1e-12):
            return float("inf")
        own = [lengths[place] for place in group]
        seconds = times[end - begin - 1].seconds(sum(own), sum(each**2 for each in own))
        total += seconds * sum(1 / each for each in own)
    return total


@pytest.mark.parametrize("seed", range(25))
def test_batches_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    n, m = int(random.integers(1, 7)), int(random.integers(1, 5))
    lengths = np.round(np.exp(random.uniform(3, 12, n))).tolist()
    needs = [each + 100 for each in lengths]
    room = (random.uniform(0.2, 1.5, m) * sum(needs) / m).tolist()
    times = [Fitted(0.01, 3e-5 / d ** random.uniform(0.5, 1), 7e-10 / d, 0, 0) for d in range(1, m + 1)]
    found = divide(lengths, needs, room, times)
    assert found.cost == pytest.approx(brute(lengths, needs, room, times), rel=1e-12)
    if np.isfinite(found.cost):
        assert sorted(place for each in found.batches for place in each.requests) == list(range(n))
        used = [place for each in found.batches for place in each.instances]
        assert used == sorted(set(used))
        spans = [(each.instances[0], each.instances[-1] + 1) for each in found.batches]
        own = spent([each.requests for each in found.batches], spans, lengths, needs, room, times)
        assert own == pytest.approx(found.cost, rel=1e-12)
    else:
        assert not found.batches


class Watched(Cluster):
    """Notes what runs where."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spans: list[tuple[int, float, float]] = []

    def _launch(self, jobs: Any, instances: Any, claimed: Any, at: float) -> None:
        super()._launch(jobs, instances, claimed, at)
        end = max(event[0] for event in self._events if isinstance(event[2], Prefill) and event[2].jobs == jobs)
        self.spans += [(instance, at, end) for instance in instances]
        assert min(self.left) >= -1e-6

    def _decode(self, batch: Decodes, now: float) -> None:
        super()._decode(batch, now)
        if batch.runs:
            self.spans += [(instance, now, batch.end) for instance in (*batch.instances, *batch.lent)]


@pytest.mark.parametrize(
    ("rate", "seed", "fixed"), [(0.5, 1, False), (3.0, 2, False), (12.0, 3, False), (3.0, 1, True)]
)
def test_no_request_is_lost_and_no_instance_does_two_things_at_once(rate: float, seed: int, fixed: bool) -> None:
    found, given = question(), trace(60, rate, seed)
    room = [found.systems[0].tokens / 4] * 4
    cluster = Watched(room, found.costs, fixed)
    done = cluster.run(given)
    assert np.all(done.start >= given.arrival + found.costs.before - 1e-9)
    assert np.all(done.first > done.start)
    assert np.all(done.finish >= done.first)
    assert cluster.left == pytest.approx(room)
    assert sum(done.degrees.values()) <= len(given.arrival)
    for instance in range(4):
        own = sorted((begin, end) for place, begin, end in cluster.spans if place == instance)
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))
    assert done.finish == pytest.approx(Cluster(room, found.costs, fixed).run(given).finish)
    if fixed:
        assert set(done.degrees) == {4}


def test_a_request_alone_runs_on_all_instances_and_decodes_on_one() -> None:
    found = question()
    alone = Trace(np.array([0.0, 500.0]), np.array([60_000.0, 300.0]), np.array([50.0, 50.0]))
    done = found.esp(alone)
    assert done.degrees.get(4, 0) >= 1
    assert done.down >= 1
    seconds = found.costs.prefill([60_000.0], 4) * (1 + found.costs.scale)
    assert done.first[0] - done.start[0] == pytest.approx(seconds)
    steps = sum(found.costs.decoding(1, 1, 1).at(60_001.0 + step).whole for step in range(49))
    assert done.finish[0] - done.first[0] <= steps * 1.01


@pytest.mark.parametrize(("count", "more"), [(2, False), (400, True)])
def test_decodes_take_idle_instances_as_masters_where_that_is_faster(count: int, more: bool) -> None:
    found = question()
    cluster = Cluster([found.systems[0].tokens / 4] * 4, found.costs)
    jobs = [Job(key, 0.0, 30.0, 100.0) for key in range(count)]
    for job in jobs:
        job.emitted = 1
        cluster._keep(job, job.needs, [0])
    batch = Decodes(jobs, [0])
    cluster.decodes.append(batch)
    cluster._schedule(0.0)
    assert bool(batch.lent) == more
    assert 0 not in batch.lent
    alone = found.costs.decoding(count, 1, 1).steps(31.0 + 1, 99).sum()
    assert batch.steps == 99
    assert batch.end < 0.95 * alone if more else batch.end == pytest.approx(alone)
    assert cluster._idle() == [each for each in (1, 2, 3) if each not in batch.lent]


def test_what_does_not_fit_is_said() -> None:
    found = question()
    with pytest.raises(ValueError, match="does not fit"):
        Cluster([1000.0] * 4, found.costs).run(trace(5, 1.0))


def test_gains_are_in_the_order_of_the_paper() -> None:
    """Wu et al. 2024, section 7.2, mixed lengths: 5.81 over disaggregation, 4.64 over static TP8, 3.85 over chunks."""
    population = mixed(1000, 100_000, 0.3, 100)
    wide = elastic(question().request, 2, 512, population.longest)
    given = requests(population, 60, seed=1).faster(0.3)
    rates = {system.name: score(wide, system, given, 25.0, 0.9).rate for system in wide.systems}
    own, whole, chunked, apart, ring, replicas = (rates[name] for name in NAMES)
    assert own / apart > own / whole > own / chunked > 1.5
    assert own > max(ring, replicas)  # the paper's ablation: 1.5 to 2.3 over parallelism that is fixed


def test_short_prompts_pass_a_long_one_in_chunks_side_by_side_and_wait_behind_whole_ones() -> None:
    long, short = 100_000.0, 1000.0
    given = Trace(np.array([0.0, 0.1, 0.2]), np.array([long, short, short]), np.array([50.0, 50.0, 50.0]))
    found = elastic(question().request, 2, 512, long + 50)
    whole, chunked = (found.systems[NAMES.index(name)].serve(given) for name in ("whole prompts", "chunked prompts"))
    assert (whole.first[1:] > whole.first[0]).all()
    assert (chunked.first[1:] - given.arrival[1:] < 0.2 * whole.first[1:]).all()
    assert whole.first[0] < chunked.first[0] < 2 * whole.first[0]  # what that costs the long one


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (("mixtral-8x7b", 8, 2), InputError, "only dense models"),
        (("gemma-2-9b", 8, 2), InputError, "attention to all tokens"),
        (("lwm-7b", 8, 3), InputError, "8 chips are no two or more instances of 3"),
        (("lwm-7b", 8, 8), InputError, "no two or more instances"),
        (("llama3-70b", 8, 1), NoPlanError, "hold 0 tokens"),
        (("lwm-7b", 16, 2), InputError, "leave the 8"),
    ],
)
def test_what_cannot_be_elastic(options: tuple[str, int, int], error: type[Exception], sentence: str) -> None:
    model, gpus, tp = options
    with pytest.raises(error, match=sentence):
        elastic(request(model, gpus, "a100-80gb-sxm"), tp, 2048, 1000.0)


def test_short_requests_are_put_together_to_free_instances_for_prompts() -> None:
    """Where every instance decodes, the one with the least KV is freed, and its batch joins another one."""
    found, given = question(), Trace(np.linspace(0, 2, 80), np.full(80, 700.0), np.full(80, 60.0))
    room = [found.systems[0].tokens / 4] * 4
    cluster = Watched(room, found.costs)
    done = cluster.run(given)
    assert done.merged > 0
    assert done.moved > 0
    assert cluster.left == pytest.approx(room)
    assert not cluster.decodes
    stays = found.costs._replace(move=lambda tokens: np.inf)
    assert np.mean(done.first - given.arrival) < 0.5 * np.mean(Unmoved(room, stays).run(given).first - given.arrival)


class Unmoved(Cluster):
    """Frees no instance."""

    def _least_move(self, candidates: Any, room: float) -> None:
        return None


def test_a_million_tokens_of_the_model_take_the_gib_of_the_paper() -> None:
    assert _kv_bytes(setting(), 1) * 1e6 / GIB == pytest.approx(488, abs=0.5)
