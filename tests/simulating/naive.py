"""A replica in the plainest way: one iteration after the other, every request looked at each time, KV counted anew.

Nothing here is shared with `planner.simulating` but what a request is; it is what that room is held against.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Seconds = Callable[[int, float, float, int, float, int], float]
"""(prompt tokens, their pairs, prior tokens, decodes, sum of their contexts, prompts) -> seconds."""


@dataclass
class Request:
    """One request."""

    arrival: float
    isl: int
    osl: int
    tokens: int = 0  # that have KV
    target: int = 0  # tokens to have KV of before it decodes
    emitted: int = 0
    start: float = math.nan
    first: float = math.nan
    finish: float = math.nan
    preempted: int = 0

    @property
    def decodes(self) -> bool:
        """Whether its prompt is done."""
        return self.tokens >= self.target


@dataclass
class Engine:
    """What a replica has and how it fills iterations."""

    seconds: Seconds
    mixed: bool = True
    budget: int | None = None
    sequences: int = 10**9
    blocks: int = 10**9
    block: int = 16
    whole: bool = False
    piece: int = 10**9

    def held(self, request: Request, ahead: int = 0) -> int:
        """Blocks that a running request takes."""
        if self.whole:
            return math.ceil((request.isl + request.osl) / self.block)
        return math.ceil(max(request.target, request.tokens + ahead) / self.block)


def simulate(engine: Engine, arriving: list[tuple[float, int, int]]) -> list[Request]:
    """All requests (arrival, isl, osl), until the last one is done."""
    requests = [Request(*each) for each in arriving]
    coming, waiting, running = list(requests), [], []
    for request in requests:
        request.target = request.isl
    now = 0.0
    while coming or waiting or running:
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        if not waiting and not running:
            now = coming[0].arrival
            continue
        now += _iteration(engine, now, waiting, running)
    return requests


def _iteration(engine: Engine, now: float, waiting: list[Request], running: list[Request]) -> float:
    """Runs one iteration; its seconds."""
    starved = engine.mixed and _make_room(engine, waiting, running)
    decoding = [request for request in running if request.decodes]
    chunks = _chunks(engine, now, waiting, running, len(decoding) if engine.mixed else 0, starved)
    if chunks and not engine.mixed:
        decoding = []
    if not chunks and not engine.mixed:
        _make_room(engine, waiting, running)
        decoding = [request for request in running if request.decodes]
    new = sum(tokens for _, tokens in chunks)
    pairs = sum(range_pairs(request.tokens, tokens) for request, tokens in chunks)
    prior = sum(request.tokens for request, _ in chunks)
    contexts = sum(request.tokens + 1 for request in decoding)
    spent = engine.seconds(new, pairs, prior, len(decoding), contexts, len(chunks))
    end = now + spent
    for request in decoding:
        request.tokens += 1
        request.emitted += 1
    for request, tokens in chunks:
        request.tokens += tokens
        if request.decodes:
            request.emitted += 1
            if math.isnan(request.first):
                request.first = end
    for request in [request for request in running if request.decodes and request.emitted >= request.osl]:
        request.finish = end
        running.remove(request)
    return spent


def range_pairs(prior: int, new: int) -> float:
    """Query-key pairs, token by token."""
    return float(sum(prior + place + 1 for place in range(new)))


def _chunks(
    engine: Engine, now: float, waiting: list[Request], running: list[Request], riding: int, starved: bool
) -> list[tuple[Request, int]]:
    left = math.inf if engine.budget is None else engine.budget - riding
    chunks = []
    for request in running:
        if not request.decodes:
            tokens = int(min(request.target - request.tokens, left, engine.piece))
            if tokens <= 0:
                break
            chunks.append((request, tokens))
            left -= tokens
    alone = engine.budget is None and not engine.mixed
    while waiting and not starved and left > 0 and len(running) < engine.sequences and not (alone and chunks):
        request = waiting[0]
        used = sum(engine.held(each, 1 if engine.mixed and each.decodes else 0) for each in running)
        if running and used + engine.held(request) > engine.blocks:
            break
        running.append(waiting.pop(0))
        if math.isnan(request.start):
            request.start = now
        tokens = int(min(request.target, left, engine.piece))
        chunks.append((request, tokens))
        left -= tokens
    return chunks


def _make_room(engine: Engine, waiting: list[Request], running: list[Request]) -> bool:
    """Gives up the request admitted last until the next decode step has its blocks."""
    starved = False
    while len(running) > 1:
        if sum(engine.held(each, 1 if each.decodes else 0) for each in running) <= engine.blocks:
            break
        request = running.pop()
        request.target, request.tokens = request.isl + request.emitted, 0
        request.preempted += 1
        waiting.insert(0, request)
        starved = True
    return starved
