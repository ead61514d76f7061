"""One replica, iteration by iteration: continuous batching as engines do it, with KV that runs out.

Requests come in order and wait. An iteration starts as soon as the first stage is free:

    mixed      all decodes take part; what is left of the token budget is filled with chunks of prompts, first those
               begun, then those that wait (stall-free batching: Agrawal et al. 2024, Sarathi-Serve, algorithm 3);
               with a limit on each prompt's chunk, several go on side by side (LightLLM)
    separate   as long as a prompt can run, prompts run, and decodes stand still (Orca, the first vLLM)

A prompt is admitted, first come first served, where sequences and blocks of KV allow it. Decodes take a block when
they need one; if none is free, the request that was admitted last gives up all of its own, goes back to the head of
the queue and is computed again later, prompt and answer so far (vLLM's preemption by recompute).

Decodes go in step, each one token an iteration, so that between two events (an arrival that can be admitted, the end
of an answer, a block too few) all iterations are taken at once: their times are a straight line over the context, a
request's end is an iteration's number, and how many blocks are taken is a sum over residues. A pipeline of S stages
has S parts of its batch in flight, one behind the other; a part's next iteration starts when its last one has left the
last stage, a chunk of a prompt when the first stage is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from planner.simulating.iterations import Clock
from planner.simulating.jobs import GapLog, Gaps, Job, Slot
from planner.simulating.rooms import KvRoom, Rules

Array = NDArray[np.float64]
__all__ = ["Job", "Replica"]
NEVER = float("inf")


class Replica:
    """A replica that requests are sent to in the order of their arrival.

    Args:
        clock: how long its iterations take.
        kv: its room for KV.
        rules: how its iterations are filled.
        on_finish: told of each job when it is known to end, before anything later happens; it may submit others.
    """

    def __init__(self, clock: Clock, kv: KvRoom, rules: Rules, on_finish: Callable[[Job], None] | None = None) -> None:
        self.clock, self.kv, self.rules, self.on_finish = clock, kv, rules, on_finish
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}
        """By the number of its admission, in that order: those that decode, and those whose prompt is under way."""
        self.busy = 0.0
        """Seconds in which the first stage works."""
        self.iterations = 0
        self.prefilled = 0.0
        """Prompt tokens computed, those computed again included."""
        self.decoded = 0
        """Tokens of decode steps."""
        self.preemptions = 0
        self.used = 0.0
        """Blocks of KV taken."""
        self.peak = 0.0
        self._claimed = 0.0  # blocks that the decodes of the iteration at hand take before any prompt does
        self._admissions = 0
        self._filling: list[tuple[int, Job]] = []
        self._joining: deque[tuple[float, int, Job]] = deque()
        self._free = 0.0  # when the first stage is
        self._left = 0.0  # when the last iteration leaves the last stage
        self._slots = [Slot(kv.block) for _ in range(max(1, min(clock.stages, rules.microbatches)))]
        self._piped = clock.stages > 1 and len(self._slots) > 1
        self._under_way: deque[float] = deque([0.0] * len(self._slots), len(self._slots))  # when the last ones end
        self._gaps = GapLog()

    @property
    def outstanding(self) -> int:
        """Requests that are here and not done."""
        return len(self.waiting) + len(self.running)

    def submit(self, job: Job) -> None:
        """A request arrives, not before any that came earlier.

        Raises:
            ValueError: it needs more KV than there is, so that it would wait for ever.
        """
        if self.kv.most(job.isl, job.osl) > self.kv.blocks:
            raise ValueError(f"a request of {job.isl:.0f} + {job.osl:.0f} tokens does not fit the replica's KV")
        if job.emitted >= job.osl:
            job.start = job.arrival
            self._finish(job, job.arrival)
            return
        job.entered = job.arrival + (0.0 if job.emitted else self.rules.before)
        self.waiting.append(job)

    def advance(self, until: float = NEVER) -> None:
        """Runs all iterations that start before a moment; without one, until nothing is left to do."""
        while (at := self._next()) < until:
            self._iterate(at, until)

    def gaps(self) -> Gaps:
        """Times between tokens so far."""
        return self._gaps.gaps()

    # --- what runs next -------------------------------------------------------------------------------------------

    def _next(self) -> float:
        """When the next iteration starts; never, where there is nothing to do."""
        at = NEVER
        for slot in self._slots:
            if slot.size and slot.ready < at:
                at = slot.ready
        if self._joining:
            at = min(at, self._turn(self._joining[0][0]))
        if self._filling:
            at = min(at, self._free)
        elif self.waiting and self.waiting[0].entered < at and self._admits(self.waiting[0]):
            at = self.waiting[0].entered
        return max(at, self._free)

    def _turn(self, since: float) -> float:
        """When a request that may decode since a moment can join the fewest others."""
        slot = min(self._slots, key=lambda each: each.size)
        return max(since, slot.ready) if slot.size else since

    def _admits(self, job: Job) -> bool:
        if len(self.running) >= self.rules.sequences:
            return False
        return self.used + self._claimed + self._asked(job) <= self.kv.blocks or not self.running

    def _asked(self, job: Job) -> float:
        return self.kv.most(job.isl, job.osl) if self.kv.whole else self.kv.held(job.target)

    def _iterate(self, at: float, until: float) -> None:
        slot = self._slot_at(at)
        starved = slot is not None and self.rules.mixed and self._make_room(slot)
        self._claimed = slot.pages[slot.count % self.kv.block] if slot is not None and self.rules.mixed else 0.0
        chunks = self._chunks(at, slot, admit=not starved)
        self._claimed = 0.0
        if chunks:
            self._run_prompts(at, slot if self.rules.mixed else None, chunks)
            return
        slot = self._slot_at(at)  # with those just admitted whose KV is there already
        if slot is not None and not self.rules.mixed:
            self._make_room(slot)
        if slot is not None and slot.size:
            self._run_decodes(at, slot, until)

    def _slot_at(self, at: float) -> Slot | None:
        """The requests whose turn it is to decode, with those that join them."""
        if self._joining:
            self._join(at)
        ready = [slot for slot in self._slots if slot.size and slot.ready <= at]
        return min(ready, key=lambda slot: slot.ready) if ready else None

    def _join(self, at: float) -> None:
        """Requests whose prompts have left the pipeline decode with the fewest others, at these others' turn."""
        while self._joining and self._joining[0][0] <= at:
            slot = min(self._slots, key=lambda each: each.size)
            if slot.size and slot.ready > at:  # it is under way
                return
            if not slot.size:
                slot.ready = at
            since, number, job = self._joining.popleft()
            job.slot, job.joined = slot, slot.count
            slot.size += 1
            slot.context += job.target
            slot.fresh[number] = since
            pace = self.kv.pace(job.target)
            slot.pages[int(slot.count - job.target) % self.kv.block] += pace
            slot.weight += pace
            heappush(slot.ends, (slot.count + int(job.osl - job.emitted), number, job.epoch, job))

    # --- prompts --------------------------------------------------------------------------------------------------

    def _chunks(self, at: float, slot: Slot | None, admit: bool) -> list[tuple[int, Job, float]]:
        """(admission, job, tokens) of the prompts that take part in an iteration."""
        rules = self.rules
        found: list[tuple[int, Job, float]] = []
        budget = rules.budget
        riding = slot.size if slot is not None and rules.mixed else 0
        left = [NEVER if budget is None else max(0.0, budget - riding / rules.groups)] * rules.groups
        alone = budget is None and not rules.mixed  # one prompt at a time
        piece = NEVER if rules.piece is None else rules.piece
        for number, job in self._filling:
            group = len(found) % rules.groups
            tokens = min(job.target - job.done, left[group] // 1, piece)
            if tokens <= 0:
                break
            left[group] -= tokens
            found.append((number, job, tokens))
        while admit and self.waiting and self.waiting[0].entered <= at and self._admits(self.waiting[0]):
            group = len(found) % rules.groups
            job = self.waiting[0]
            tokens = min(job.target - job.done, left[group] // 1, piece)
            if job.target > job.done and (tokens <= 0 or (alone and found)):
                break
            self.waiting.popleft()
            number = self._admit(job, at)
            if job.target <= job.done:
                self._joining.append((at, number, job))
                continue
            left[group] -= tokens
            self._filling.append((number, job))
            found.append((number, job, tokens))
        return found

    def _admit(self, job: Job, at: float) -> int:
        self._admissions += 1
        job.held = self._asked(job)
        self.used += job.held
        self.peak = max(self.peak, self.used)
        self.running[self._admissions] = job
        if job.start != job.start:  # NaN: for the first time
            job.start = at
        return self._admissions

    def _run_prompts(self, at: float, slot: Slot | None, chunks: list[tuple[int, Job, float]]) -> None:
        """One iteration with prompt tokens, and the decodes of a slot if there is one."""
        new = pairs = prior = 0.0
        for _, job, tokens in chunks:
            new += tokens
            pairs += tokens * job.done + tokens * (tokens + 1) / 2
            prior += job.done
            job.done += tokens
        decodes, contexts = (slot.size, slot.context + slot.size) if slot is not None else (0, 0.0)
        time = self.clock.mixed(new, pairs, prior, decodes, contexts, len(chunks))
        end = self._occupy(at, time.whole, time.slowest)
        self.prefilled += new
        if slot is not None:
            self._step(slot, end)
        if any(job.done >= job.target for _, job, _ in chunks):
            self._filling = [(number, job) for number, job in self._filling if job.done < job.target]
            for number, job, _ in chunks:
                if job.done >= job.target:
                    self._answered(number, job, end)

    def _answered(self, number: int, job: Job, end: float) -> None:
        """A prompt is done: its last iteration yields a token."""
        job.emitted += 1
        if job.paused == job.paused:  # not NaN: it is computed again
            self._gaps.note(end - job.paused, 1.0)
            job.paused = float("nan")
        elif job.first != job.first:  # NaN: it was not computed before
            job.first = end
        if job.emitted >= job.osl:
            self._leave(number, job, job.held)
            self._finish(job, end)
        else:
            self._joining.append((end, number, job))

    def _occupy(self, at: float, whole: float, slowest: float) -> float:
        """The end of an iteration that starts now; the pipeline's stages are behind it."""
        end = at + whole
        if self._piped:
            end = max(end, self._left + slowest)
            self._under_way.append(end)
            self._free = max(at + slowest, self._under_way[0])
            self.busy += slowest
        else:
            self._free = end
            self.busy += whole
        self._left = end
        self.iterations += 1
        return end

    # --- decodes --------------------------------------------------------------------------------------------------

    def _run_decodes(self, at: float, slot: Slot, until: float) -> None:
        """Pure decode steps of a slot: as many as nothing comes between, or one where others are in the pipeline."""
        row = self.clock.decoding(slot.size)
        context = slot.context / slot.size + 1
        horizon = until
        if self.waiting and self.waiting[0].entered > at:
            horizon = min(horizon, self.waiting[0].entered)
        if self._piped and len(self.running) > slot.size:
            if not self._run_rounds(at, horizon):
                time = row.at(context)
                self._step(slot, self._occupy(at, time.whole, time.slowest))
            return
        steps = min(self._next_end(slot) - slot.count, self._steps_in_room(slot))
        first = row.at(context)
        if horizon < NEVER:
            steps = min(steps, 1 + int(max(0.0, horizon - at) / first.whole))
        if steps <= 1:
            self._step(slot, self._occupy(at, first.whole, first.slowest))
            return
        ends = at + np.cumsum(row.steps(context, steps))
        if horizon < NEVER:  # an iteration that starts before it is still run
            ends = ends[: 1 + int(np.searchsorted(ends[:-1], horizon))]
        more, end = len(ends) - 1, float(ends[-1])
        self._occupy(at, end - at, end - at)
        if self._piped:  # there is nothing else in it
            self.busy += first.slowest * (more + 1) - (end - at)
        self.iterations += more
        self._step(slot, float(ends[0]), ends[1:])

    def _run_rounds(self, at: float, horizon: float) -> bool:
        """Pure decode steps of all microbatches in turn, as many rounds as nothing comes between.

        Returns:
            False where something may: nothing was run then.
        """
        slots = sorted((slot for slot in self._slots if slot.size), key=lambda slot: slot.ready)
        rounds = min(self._next_end(slot) - slot.count for slot in slots)
        growth = sum(slot.weight for slot in slots) * (rounds // self.kv.block + 1)
        if self._filling or self._joining or rounds < 2 or self.used + growth > self.kv.blocks:
            return False
        rows = [self.clock.decoding(slot.size) for slot in slots]
        contexts = [slot.context / slot.size + 1 for slot in slots]
        if horizon < NEVER:
            rounds = min(rounds, 2 + int(max(0.0, horizon - at) / rows[0].at(contexts[0]).whole))
        whole, slowest = (
            [row.steps(context, rounds, end).tolist() for row, context in zip(rows, contexts, strict=True)]
            for end in (False, True)
        )
        ends: list[list[float]] = [[] for _ in slots]
        ready, free, left, busy = [slot.ready for slot in slots], self._free, self._left, 0.0
        for number in range(rounds):
            for place, over in enumerate(ready):
                start = free if free > over else over
                if start >= horizon:
                    break
                spent = slowest[place][number]
                left = max(start + whole[place][number], left + spent)
                free = start + spent
                busy += spent
                ready[place] = left
                ends[place].append(left)
            else:
                continue
            break
        self._free, self._left, self.busy = free, left, self.busy + busy
        self._under_way.extend(sorted(end for found in ends for end in found[-len(slots) :])[-len(slots) :])
        self._free = max(free, self._under_way[0])
        for slot, found in zip(slots, ends, strict=True):
            self.iterations += len(found)
            if found:
                self._step(slot, found[0], np.array(found[1:]))
        return True

    def _next_end(self, slot: Slot) -> int:
        """The number of the iteration that ends the next answer."""
        ends = slot.ends
        while ends[0][2] != ends[0][3].epoch:  # given up since
            heappop(ends)
        return ends[0][0]

    def _steps_in_room(self, slot: Slot) -> int:
        """Steps for which there are blocks; at least the one that room was made for."""
        free, weight, block = self.kv.blocks - self.used, slot.weight, self.kv.block
        if weight <= 0:
            return 1 << 62
        rounds = int(free // weight) if free < NEVER else 1 << 40
        left, steps = free - rounds * weight, rounds * block
        for ahead in range(block):
            left -= slot.pages[(slot.count + ahead) % block]
            if left < -1e-9:
                break
            steps += 1
        return max(1, steps)

    def _step(self, slot: Slot, end: float, further: Array | None = None) -> None:
        """Lets a slot's requests emit a token in an iteration that ends then, and in further ones that follow it.

        Those that have all of their tokens leave: no answer ends before the last of these iterations.
        """
        steps = 1 if further is None else 1 + len(further)
        if slot.weight > 0:
            block = self.kv.block
            rounds, rest = divmod(steps, block)
            taken = rounds * slot.weight + sum(slot.pages[(slot.count + ahead) % block] for ahead in range(rest))
            self.used += taken
            self.peak = max(self.peak, self.used)
        self._note_gaps(slot, end, further)
        if further is not None and steps > 1:
            end = float(further[-1])
        slot.count += steps
        slot.context += steps * slot.size
        slot.ready = slot.last = end
        self.decoded += steps * slot.size
        ends = slot.ends
        while ends and (ends[0][0] <= slot.count or ends[0][2] != ends[0][3].epoch):
            _, number, epoch, job = heappop(ends)
            if epoch == job.epoch:
                self._withdraw(slot, number, job)
                job.emitted = job.osl
                self._finish(job, end)

    def _note_gaps(self, slot: Slot, end: float, further: Array | None) -> None:
        old = slot.size - len(slot.fresh)
        if slot.fresh:
            for since in slot.fresh.values():
                self._gaps.note(end - since, 1.0)
            slot.fresh.clear()
        if old > 0:
            self._gaps.note(end - slot.last, float(old))
        if further is not None and len(further):
            self._gaps.note_run(np.diff(further, prepend=end), slot.size)

    # --- leaving --------------------------------------------------------------------------------------------------

    def _withdraw(self, slot: Slot, number: int, job: Job) -> None:
        """Takes a request that decodes out of its slot, and gives its blocks back."""
        steps = slot.count - job.joined
        slot.size -= 1
        slot.context -= job.target + steps
        pace, block = self.kv.pace(job.target), self.kv.block
        slot.pages[int(job.joined - job.target) % block] -= pace
        slot.weight -= pace
        if not slot.size:
            slot.weight, slot.pages = 0.0, [0.0] * block
        job.slot = None
        grown = -(-(job.target + steps) // block) - -(-job.target // block)
        self._leave(number, job, job.held + pace * grown)

    def _leave(self, number: int, job: Job, held: float) -> None:
        del self.running[number]
        self.used -= held

    def _finish(self, job: Job, end: float) -> None:
        job.finish = end
        if self.on_finish is not None:
            self.on_finish(job)

    def _make_room(self, slot: Slot) -> bool:
        """Sends requests back to the queue until a slot's next iteration has its blocks; whether any had to go."""
        starved = False
        while slot.size > 1 or self._filling:
            needed = slot.pages[slot.count % self.kv.block]
            if self.used + needed <= self.kv.blocks + 1e-9:
                break
            number = next((each for each in reversed(self.running) if self._may_go(self.running[each], slot)), None)
            if number is None:
                break
            self._preempt(number)
            starved = True
        return starved

    def _may_go(self, job: Job, slot: Slot) -> bool:
        """Whether a request can be given up now: those of other microbatches are under way."""
        return job.slot is slot or (job.slot is None and job.done < job.target)

    def _preempt(self, number: int) -> None:
        job = self.running[number]
        if job.slot is not None:
            slot = job.slot
            emitted = slot.count - job.joined
            job.paused = slot.fresh.pop(number, slot.last)
            self._withdraw(slot, number, job)
            job.emitted += emitted
        else:
            self._filling = [each for each in self._filling if each[0] != number]
            self._leave(number, job, job.held)
        job.epoch += 1
        job.preempted += 1
        self.preemptions += 1
        job.target, job.done = job.isl + job.emitted, 0.0
        self.waiting.appendleft(job)
