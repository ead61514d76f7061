"""Elastic sequence parallelism, request by request: each pass on as many instances as it is worth (Wu et al. 2024).

Instances are tensor-parallel groups with all weights. A batch of prompts takes a group of them for one pass and leaves
its KV on the fewest that have room; a batch of decodes runs on those. Whenever something ends or arrives, four steps
decide (section 5 of the paper):

1. **dispatch**, first come first served, what finds room for all of its tokens, so that nothing is evicted later, until
   a pass is past the size from which more tokens take as much longer; instances of decodes are taken for it (which then
   stand still) where Gain > Cost,

       Gain = sum over the dispatched of max(0, mean time of decoding - least time the batch has decoded) / tokens in
       Cost = sum over the batch of T(dispatched, instances) / tokens out so far;

2. **instances**: the one of decodes with the least KV is freed, its KV moved to the others of its batch, or to another
   batch which it then joins, while what the pass gains, per token in, is more than the move takes; where there is no
   instance at all, any move is worth it;
3. **batches**: dispatched prompts and instances are divided by `batching.divide`;
4. **scaling**: KV is left on the fewest instances with room, where decodes are that want company if possible (no
   transfer: it passes by in the ring); decodes take idle instances as further masters where that is faster by a
   twentieth.

Requests' lengths out are taken as known where room is kept for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

import numpy as np

from planner.phases.elastic.batching import divide
from planner.phases.elastic.instances import NEVER, Costs, Decodes, Freed, Job, Merge, Move, Outcome, Prefill
from planner.simulating.iterations import DecodeRow
from planner.simulating.traces import Trace

MOST_WAITING = 32
"""Requests at the head of the queue that are looked at."""
BEARABLE = 1.5
"""Times that a decode step may take longer for a batch that takes another one in."""
STRIDE = 4
"""Decode steps between two looks at the queue while somebody waits (the engine looks at every one)."""
WORTH = 0.95
"""A further master is taken where a decode step then takes less than this share."""


class Cluster:
    """Instances under one scheduler.

    Args:
        room: [instances] tokens of KV that each holds.
        costs: what passes take.
        fixed: every pass runs on all instances, prompts before decodes, and KV lies on all of them: sequence
            parallelism that stands still.

    Raises:
        ValueError: a request that all instances together cannot hold (by `run`).
    """

    def __init__(self, room: Sequence[float], costs: Costs, fixed: bool = False) -> None:
        self.room, self.costs, self.count, self.fixed = list(room), costs, len(room), fixed
        self.left = list(room)
        """Tokens that each instance has room for now."""
        self.busy = [False] * self.count  # in a pass over prompts
        self.waiting: deque[Job] = deque()
        self.decodes: list[Decodes] = []
        self._events: list[tuple[float, int, Prefill | Decodes | Merge]] = []
        self._number = 0
        self._coming: list[Job] = []
        self._next = 0
        self._decoded = [0.0, 0]  # seconds of decoding, requests
        self.degrees: dict[int, int] = {}
        self.down = self.up = self.pauses = self.merged = 0
        self.moved = 0.0

    def run(self, trace: Trace) -> Outcome:
        """Every request of a trace, until the last one is done."""
        columns = zip(trace.arrival.tolist(), trace.isl.tolist(), trace.osl.tolist(), strict=True)
        self._coming = [Job(key, *each) for key, each in enumerate(columns)]
        longest = max(job.needs for job in self._coming)
        if longest > sum(self.room):
            raise ValueError(f"a request of {longest:.0f} tokens does not fit {sum(self.room):.0f} of all instances")
        while self._events or self._next < len(self._coming):
            arrival = self._arrival()
            now = min(arrival, self._events[0][0] if self._events else NEVER)
            while self._events and self._events[0][0] <= now:
                _, _, what = heappop(self._events)
                if isinstance(what, Prefill):
                    self._answered(what, now)
                elif isinstance(what, Merge):
                    self._joined(what)
                else:
                    self._stepped(what, now)
            while self._arrival() <= now:
                self.waiting.append(self._coming[self._next])
                self._next += 1
            self._schedule(now)
        columns_of = {
            name: np.array([getattr(job, name) for job in self._coming])
            for name in ("arrival", "start", "first", "finish")
        }
        return Outcome(
            **columns_of,
            degrees=self.degrees,
            down=self.down,
            up=self.up,
            paused=self.pauses,
            merged=self.merged,
            moved=self.moved,
        )

    def _arrival(self) -> float:
        """When the scheduler sees the next request."""
        if self._next == len(self._coming):
            return NEVER
        return self._coming[self._next].arrival + self.costs.before

    # --- what has ended -------------------------------------------------------------------------------------------

    def _answered(self, done: Prefill, now: float) -> None:
        """Prompts are through: each has its first token, and decodes where its KV is."""
        for instance in done.instances:
            self.busy[instance] = False
        going = []
        for job in done.jobs:
            job.first, job.began, job.emitted = now, now, 1
            if job.osl <= 1:
                self._finish(job, now)
            else:
                going.append(job)
        for batch in done.paused:
            batch.claimed -= 1
        if not going:
            return
        homes = [batch for batch in done.paused if set(batch.instances) & set(done.stays)]
        jobs = [job for batch in homes for job in batch.jobs] + going
        instances = sorted({*done.stays, *(each for batch in homes for each in batch.instances)})
        merged = Decodes(jobs, instances)
        merged.claimed = sum(batch.claimed for batch in homes)
        self.decodes = [batch for batch in self.decodes if batch not in homes] + [merged]
        for _, _, what in self._events:  # passes that have claimed one of them release the whole
            if isinstance(what, Prefill):
                what.paused[:] = [merged if batch in homes else batch for batch in what.paused]

    def _stepped(self, batch: Decodes, now: float) -> None:
        steps = batch.steps
        batch.end, batch.lent = NEVER, []
        batch.context += steps * len(batch.jobs)
        left = []
        for job in batch.jobs:
            job.emitted += steps
            if job.emitted >= job.osl:
                batch.context -= job.isl + job.emitted
                self._finish(job, now)
            else:
                left.append(job)
        batch.jobs = left
        if not left:
            self.decodes.remove(batch)
            return
        held = {instance for job in left for instance in job.held}
        batch.instances = sorted(held)  # the others keep nothing of it: they are free without any move

    def _finish(self, job: Job, now: float) -> None:
        job.finish = now
        for instance, tokens in job.held.items():
            self.left[instance] += tokens
        self._decoded[0] += now - job.began
        self._decoded[1] += 1

    # --- what begins ----------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> None:
        if self.waiting:
            self._prefill(now)
        for batch in self.decodes:
            if not batch.runs and not batch.claimed:
                self._decode(batch, now)

    def _idle(self) -> list[int]:
        """Instances that nothing runs on or waits for."""
        taken = {instance for batch in self.decodes for instance in (*batch.instances, *batch.lent)}
        return [each for each in range(self.count) if not self.busy[each] and each not in taken]

    def _prefill(self, now: float) -> None:
        """Steps 1 to 4 for what waits."""
        if self.fixed:
            self._prefill_on_all(now)
            return
        group = self._idle()
        chosen = self._dispatched(group)
        paused: list[Decodes] = []
        candidates = [batch for batch in self.decodes if not batch.claimed and not self._overlaps(batch)]
        for batch in sorted(candidates, key=lambda each: len(each.jobs)):
            wider = group + batch.instances
            more = self._dispatched(wider)
            if len(more) > len(chosen) and self._gain(more[len(chosen) :], batch, now) > self._cost(more, wider, batch):
                group, chosen = wider, more
                paused.append(batch)
        movable = [batch for batch in candidates if batch not in paused]
        freed: list[Freed] = []
        if not group:  # without an instance a pass never ends: any move is worth it
            move = self._least_move(movable, self.waiting[0].needs)
            if move is not None:
                freed = [self._free(move, movable, now)]
                chosen = self._dispatched([move.instance])
        if not chosen:
            return
        group += [each.instance for each in freed]
        more_freed = self._freed(group, chosen, movable, now)
        group += [each.instance for each in more_freed]
        waits = [batch.end for batch in paused if batch.runs] + [each.at for each in (*freed, *more_freed)]
        starts = max([now, *waits])
        group.sort()
        division = divide(
            [job.isl for job in chosen], [job.needs for job in chosen], [self.left[each] for each in group],
            self.costs.fits,
        )  # fmt: skip
        for each in division.batches:
            self._launch(
                [chosen[place] for place in each.requests], [group[place] for place in each.instances], paused, starts
            )
        if division.batches:
            for _ in chosen:
                self.waiting.popleft()

    def _prefill_on_all(self, now: float) -> None:
        every = list(range(self.count))
        chosen = [] if any(self.busy) else self._dispatched(every)
        if chosen:
            paused = list(self.decodes)
            self._launch(chosen, every, paused, max([now, *(batch.end for batch in paused if batch.runs)]))
            for _ in chosen:
                self.waiting.popleft()

    def _overlaps(self, batch: Decodes) -> bool:
        return any(self.busy[instance] for instance in batch.instances)

    def _dispatched(self, group: Sequence[int]) -> list[Job]:
        """The requests at the head of the queue that fit on instances and are worth one pass."""
        room, tokens = sum(self.left[each] for each in group), 0.0
        found: list[Job] = []
        if room < self.waiting[0].needs:
            return []
        for job in islice(self.waiting, MOST_WAITING):
            room -= job.needs
            if room < 0 or (found and tokens + job.isl > self.costs.enough * len(group)):
                break
            found.append(job)
            tokens += job.isl
        return found

    def _seconds(self, jobs: Sequence[Job], degree: int) -> float:
        """What the scheduler takes a pass to last."""
        form = self.costs.fits[degree - 1]
        return form.a + sum(form.b * job.isl + form.c * job.isl * job.isl for job in jobs)

    def _gain(self, jobs: Sequence[Job], batch: Decodes, now: float) -> float:
        seconds, count = self._decoded
        mean = seconds / count if count else NEVER
        least = min(now - job.began for job in batch.jobs)
        return sum(max(0.0, mean - least) / job.isl for job in jobs)

    def _cost(self, jobs: Sequence[Job], group: Sequence[int], batch: Decodes) -> float:
        seconds = self._seconds(jobs, len(group))
        return sum(seconds / job.emitted for job in batch.jobs)

    def _freed(self, group: list[int], jobs: Sequence[Job], candidates: list[Decodes], now: float) -> list[Freed]:
        """Instances more, while what the pass gains, per token in, is more than the move takes (step 2)."""
        found: list[Freed] = []
        weight = sum(1 / job.isl for job in jobs)
        while len(group) + len(found) < self.count:
            degree = len(group) + len(found)
            move = self._least_move(candidates, 0.0)
            if move is None:
                break
            saved = self._seconds(jobs, degree) - self._seconds(jobs, degree + 1)
            if saved * weight <= self.costs.move(move.tokens) * weight:
                break
            found.append(self._free(move, candidates, now))
        return found

    def _least_move(self, candidates: list[Decodes], room: float) -> Move | None:
        """The instance of decodes with the least KV that has somewhere to go, so much room being left behind it.

        To the other instances of its batch; a batch on one instance to another batch, as long as a step of both takes
        not much longer than the slower of the two does now.
        """
        best: Move | None = None
        for batch in candidates:
            for instance in batch.instances:
                held = sum(job.held.get(instance, 0.0) for job in batch.jobs)
                if self.left[instance] + held < room:
                    continue
                tokens = sum(job.held.get(instance, 0.0) * (job.isl + job.emitted) / job.needs for job in batch.jobs)
                if best is not None and tokens >= best.tokens:
                    continue
                target = batch if len(batch.instances) > 1 else self._company(batch, held, candidates)
                if target is None:
                    continue
                others = sum(self.left[each] for each in target.instances if each != instance)
                if held <= others:
                    best = Move(batch, instance, target, tokens)
        return best

    def _company(self, batch: Decodes, held: float, candidates: list[Decodes]) -> Decodes | None:
        """The batch with the most room that another one can join."""
        fits = [
            each for each in candidates
            if each is not batch and sum(self.left[one] for one in each.instances) >= held and self._bears(each, batch)
        ]  # fmt: skip
        return max(fits, key=lambda each: sum(self.left[one] for one in each.instances), default=None)

    def _bears(self, one: Decodes, other: Decodes) -> bool:
        steps = [
            self.costs.decoding(len(each.jobs), len(each.instances), len(each.instances)).at(each.mean).whole
            for each in (one, other)
        ]
        count, degree = len(one.jobs) + len(other.jobs), len(one.instances)
        mean = (one.context + other.context) / count + 1
        return self.costs.decoding(count, degree, degree).at(mean).whole <= BEARABLE * max(steps)

    def _free(self, move: Move, candidates: list[Decodes], now: float) -> Freed:
        """Moves the KV of an instance away; where it goes to another batch, that one decodes both once both stand."""
        batch, target = move.batch, move.target
        ends = batch.end if batch.runs else now
        at = ends + self.costs.move(move.tokens)
        batch.instances = [each for each in batch.instances if each != move.instance]
        for job in batch.jobs:
            held = job.held.pop(move.instance, 0.0)
            if held:
                self.left[move.instance] += held
                self._keep(job, held, target.instances)
        self.moved += move.tokens
        if target is not batch:
            batch.claimed += 1
            target.claimed += 1
            self.merged += 1
            for each in (batch, target):
                candidates.remove(each)
            self._push(max(at, target.end if target.runs else now), Merge(batch, target))
        return Freed(move.instance, at)

    def _joined(self, merge: Merge) -> None:
        """Two batches stand: they go on as one."""
        batch, target = merge
        for each in merge:
            each.claimed -= 1
        if batch not in self.decodes:  # its last answers ended meanwhile
            return
        self.decodes.remove(batch)
        if target not in self.decodes:
            self.decodes.append(target)
        target.jobs = target.jobs + batch.jobs
        target.context += batch.context
        target.instances = sorted({instance for job in target.jobs for instance in job.held})

    def _launch(self, jobs: list[Job], instances: list[int], claimed: Sequence[Decodes], at: float) -> None:
        """One pass over prompts, whose KV is left on the fewest instances with room."""
        paused = [batch for batch in claimed if set(batch.instances) & set(instances)]
        stays = self._stays(sum(job.needs for job in jobs), instances, paused)
        degree = len(instances)
        seconds = self.costs.prefill([job.isl for job in jobs], degree)
        if len(stays) < degree:
            seconds *= 1 + self.costs.scale
            self.down += 1
        for job in jobs:
            job.start = at
            self._keep(job, job.needs, stays)
        for instance in instances:
            self.busy[instance] = True
        for batch in paused:
            batch.claimed += 1
            self.pauses += 1
        self.degrees[degree] = self.degrees.get(degree, 0) + 1
        self._push(at + seconds, Prefill(jobs, instances, stays, paused))

    def _stays(self, needs: float, instances: Sequence[int], paused: Sequence[Decodes]) -> list[int]:
        if self.fixed:
            return list(instances)
        homes = {instance for batch in paused for instance in batch.instances}
        alone = [each for each in instances if self.left[each] >= needs]
        if alone:
            return [min(alone, key=lambda each: (each not in homes, -self.left[each]))]
        found: list[int] = []
        for each in sorted(instances, key=lambda each: -self.left[each]):
            found.append(each)
            if sum(self.left[one] for one in found) >= needs * (1 - 1e-12):
                break
        return sorted(found)

    def _keep(self, job: Job, tokens: float, instances: Sequence[int]) -> None:
        """Keeps room for a request, on each instance in proportion to what that has left."""
        rooms = [max(0.0, self.left[each]) for each in instances]
        total = sum(rooms)
        for instance, room in zip(instances, rooms, strict=True):
            share = tokens * room / total if total > 0 else tokens / len(rooms)
            if share > 0:
                job.held[instance] = job.held.get(instance, 0.0) + share
                self.left[instance] -= share

    def _decode(self, batch: Decodes, now: float) -> None:
        """Steps of a batch: until an answer ends, a few where somebody waits, else until somebody comes."""
        if self._overlaps(batch):
            return
        requests, mean, degree = len(batch.jobs), batch.mean, len(batch.instances)
        row = self.costs.decoding(requests, degree, degree)
        if not self.waiting and not self.fixed:
            row = self._with_masters(batch, row, mean)
        steps = int(min(job.osl - job.emitted for job in batch.jobs))
        first = row.at(mean).whole
        horizon = NEVER if self.waiting else self._horizon(batch)
        if self.waiting:
            steps = min(steps, STRIDE)
        elif horizon < NEVER:
            steps = min(steps, 1 + int(max(0.0, horizon - now) / first))
        if steps <= 1:
            steps, seconds = 1, first
        else:
            each = row.steps(mean, steps)
            if horizon < NEVER:
                starts = now + np.cumsum(each) - each
                steps = max(1, int(np.searchsorted(starts, horizon)))
            seconds = float(each[:steps].sum())
        batch.steps, batch.end = steps, now + seconds
        self._push(batch.end, batch)

    def _horizon(self, batch: Decodes) -> float:
        """When something may happen that concerns a batch: an arrival, or prompts that end and may be left with it."""
        ends = [at for at, _, what in self._events if isinstance(what, Prefill)]
        return min([self._arrival(), *ends])

    def _with_masters(self, batch: Decodes, row: DecodeRow, mean: float) -> DecodeRow:
        """Steps with idle instances as further masters, where that pays; until the next time it is asked."""
        idle, degree = self._idle(), len(batch.instances)
        alone = sum(not each.runs and not each.claimed for each in self.decodes)
        for more in range(1, len(idle) // max(1, alone) + 1):
            other = self.costs.decoding(len(batch.jobs), degree, degree + more)
            if other.at(mean).whole >= WORTH * row.at(mean).whole:
                break
            row, batch.lent = other, idle[:more]
        self.up += bool(batch.lent)
        return row

    def _push(self, at: float, what: Prefill | Decodes | Merge) -> None:
        self._number += 1
        heappush(self._events, (at, self._number, what))
