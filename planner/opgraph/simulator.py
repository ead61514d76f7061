"""The execution simulator: a strategy becomes a graph of tasks, and the tasks a timeline (FlexFlow, section 5).

Tasks are the parts of operators, each on its device; transfers of what a part needs from a part on another device,
on the sender's link; and the collective behind an operator whose parameters are split, on its group's own lane. Every
lane runs its tasks in the order in which they become ready (ties: earlier operators first), so that a strategy has one
timeline, whatever way it is computed:

* full simulation (Algorithm 1): all tasks, from a heap by ready time;
* delta simulation (Algorithm 2): operators change their configurations, one or several. Only their tasks and the
  transfers from and to them are made anew; the timeline stands up to the moment when the first task that goes away or
  comes in is ready, and is computed again from there. The paper sends changes through the old timeline until nothing
  changes any more; going on from the first change visits every task once at most, gives the same timeline, and was
  faster wherever both were measured (docs/search.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf, prod
from typing import NamedTuple

from planner.opgraph.graph import Graph
from planner.opgraph.machine import Machine, Prices
from planner.opgraph.strategies import Config, Strategy, coordinates, pieces

_TRANSFER, _COMPUTE, _COLLECTIVE = 0, 1, 2
KINDS = ("transfer", "compute", "collective")


class Span(NamedTuple):
    """A task on the timeline; times in seconds."""

    operator: int
    kind: str
    """transfer (into the operator), compute or collective (behind it)."""
    number: int
    lane: int
    ready: float
    start: float
    end: float


class _Parts(NamedTuple):
    """The tasks of one operator in one configuration, before they have places in a timeline."""

    seconds: float
    closings: tuple[tuple[int, float, tuple[int, ...]], ...]
    """(lane, seconds, tasks) of each collective."""


class _Links(NamedTuple):
    """What joins an operator to one that reads it, by indices of their tasks."""

    direct: tuple[tuple[int, int], ...]
    transfers: tuple[tuple[int, int, int, float], ...]
    """(holder, reader, lane, seconds)."""


class Templates:
    """Tasks of operators and transfers between them, each kind made once; shared by all simulations of a graph."""

    def __init__(self, graph: Graph, machine: Machine, prices: Prices | None = None) -> None:
        self.graph, self.machine = graph, machine
        self.prices = Prices(graph, machine) if prices is None else prices
        self._parts: dict[tuple[int, Config], _Parts] = {}
        self._links: dict[tuple[int, Config, Config], _Links] = {}

    def parts(self, operator: int, config: Config) -> _Parts:
        """The tasks of an operator."""
        key = (self.graph.types[operator], config)
        found = self._parts.get(key)
        if found is None:
            found = self._parts[key] = self._made(operator, config)
        return found

    def _made(self, index: int, config: Config) -> _Parts:
        operator = self.graph.operators[index]
        seconds = self.prices.task(index, config.degrees)
        closed = [place for place in operator.closed if config.degrees[place] > 1]
        if not closed or operator.dims[closed[0]].closed_by == "nothing":
            return _Parts(seconds, ())
        groups: dict[tuple[int, ...], list[int]] = {}
        for task, part in enumerate(coordinates(config.degrees)):
            groups.setdefault(tuple(0 if place in closed else own for place, own in enumerate(part)), []).append(task)
        size = operator.element_bytes * prod(
            operator.dims[place].size / (1 if place in closed else config.degrees[place]) for place in operator.output
        )
        op = str(operator.dims[closed[0]].closed_by)
        closings = []
        for tasks in groups.values():
            lane, taken = self.machine.collective(op, tuple(config.devices[task] for task in tasks), size)
            closings.append((lane, taken, tuple(tasks)))
        return _Parts(seconds, tuple(closings))

    def links(self, reader: int, place: int, have: Config, want: Config) -> _Links:
        """What joins an operator's input to its source."""
        key = (self.graph.edge_types[reader, place], have, want)
        found = self._links.get(key)
        if found is None:
            operators = self.graph.operators
            edge = operators[reader].inputs[place]
            direct, transfers = [], []
            for piece in pieces(operators[edge.source], operators[reader], edge, have, want, self.machine):
                if piece.size:
                    ends = have.devices[piece.holder], want.devices[piece.reader]
                    transfers.append((piece.holder, piece.reader, *self.machine.transfer(*ends, piece.size)))
                else:
                    direct.append((piece.holder, piece.reader))
            found = self._links[key] = _Links(tuple(direct), tuple(transfers))
        return found


class _Undo(NamedTuple):
    """What `Simulation.change` has replaced."""

    operators: list[tuple[int, Config, list[int], list[int], list[int]]]
    """(operator, configuration, own tasks, outputs, closings) of each that was changed."""
    transfers: dict[tuple[int, int], list[int]]
    neighbours: list[tuple[int, list[int], list[int]]]
    made: list[int]
    redone: list[int]
    ready: list[float]
    end: list[float]
    """Tasks behind the cut and their times."""
    idle: list[float]
    lengths: dict[int, int]
    """Tasks that the lanes of new ones had."""
    cut: list[tuple[int, int, list[int]]]
    """(lane, how many tasks it kept, those that it lost)."""
    cost: float


class Simulation:
    """The timeline of a strategy, which one operator after the other may change.

    Args:
        templates: of the graph on its machine.
        strategy: a configuration for every operator.
    """

    def __init__(self, templates: Templates, strategy: Strategy) -> None:
        self.templates, self.graph = templates, templates.graph
        self.strategy: list[Config] = list(strategy)
        self._lane: list[int] = []
        self._seconds: list[float] = []
        self._key: list[int] = []
        self._before: list[list[int]] = []
        self._after: list[list[int]] = []
        self._ready: list[float] = []
        self._end: list[float] = []
        self._waiting: list[int] = []
        self._free: list[int] = []
        self._own: list[list[int]] = [[] for _ in strategy]
        self._outputs: list[list[int]] = [[] for _ in strategy]
        self._closings: list[list[int]] = [[] for _ in strategy]
        self._transfers: dict[tuple[int, int], list[int]] = {}
        self._order: list[list[int]] = []
        self._idle: list[float] = []
        """When the last task of each lane ends."""
        self._undo: _Undo | None = None
        for operator in range(len(strategy)):
            self._make(operator)
        for reader, place in self.graph.edge_types:
            self._join(reader, place)
        self._lanes()
        for task, before in enumerate(self._before):
            self._waiting[task] = len(before)
        self.cost = self._run([task for task, before in enumerate(self._before) if not before])
        """Seconds until the last task ends."""

    def _task(self, lane: int, seconds: float, key: int, before: list[int]) -> int:
        if self._free:
            task = self._free.pop()
            self._lane[task], self._seconds[task], self._key[task] = lane, seconds, key
            self._before[task], self._after[task] = before, []
            self._ready[task] = 0.0
        else:
            task = len(self._lane)
            self._lane.append(lane)
            self._seconds.append(seconds)
            self._key.append(key)
            self._before.append(before)
            self._after.append([])
            self._ready.append(0.0)
            self._end.append(0.0)
            self._waiting.append(0)
        return task

    def _make(self, operator: int) -> list[int]:
        """The tasks of an operator and the collectives behind them; their numbers."""
        config = self.strategy[operator]
        parts, base = self.templates.parts(operator, config), operator << 28
        key = base + (_COMPUTE << 24)
        own = [self._task(device, parts.seconds, key + index, []) for index, device in enumerate(config.devices)]
        outputs, closings = list(own), []
        key = base + (_COLLECTIVE << 24)
        for index, (lane, seconds, tasks) in enumerate(parts.closings):
            members = [own[task] for task in tasks]
            closing = self._task(lane, seconds, key + index, members)
            for task in tasks:
                self._after[own[task]].append(closing)
                outputs[task] = closing
            closings.append(closing)
        self._own[operator], self._outputs[operator], self._closings[operator] = own, outputs, closings
        return own + closings

    def _join(self, reader: int, place: int) -> list[int]:
        """The transfers of an input, and the order in which its two operators run; their numbers."""
        source = self.graph.operators[reader].inputs[place].source
        links = self.templates.links(reader, place, self.strategy[source], self.strategy[reader])
        outputs, own, before, after = self._outputs[source], self._own[reader], self._before, self._after
        for holder, task in links.direct:
            first, second = outputs[holder], own[task]
            after[first].append(second)
            before[second].append(first)
        key, made = (reader << 28) + (_TRANSFER << 24) + (place << 16), []
        for index, (holder, task, lane, seconds) in enumerate(links.transfers):
            first, second = outputs[holder], own[task]
            transfer = self._task(lane, seconds, key + index, [first])
            after[first].append(transfer)
            after[transfer].append(second)
            before[second].append(transfer)
            made.append(transfer)
        self._transfers[reader, place] = made
        return made

    def _lanes(self) -> None:
        while len(self._order) < len(self.templates.machine.lanes):
            self._order.append([])
            self._idle.append(0.0)

    def _run(self, first: list[int]) -> float:
        """Algorithm 1 over the tasks that wait for nothing but one another, from those that wait for none."""
        ready, end, keys, seconds = self._ready, self._end, self._key, self._seconds
        lanes, after, waiting, order = self._lane, self._after, self._waiting, self._order
        heap = [(ready[task], keys[task], task) for task in first]
        heapify(heap)
        free = self._idle
        while heap:
            at, _, task = heappop(heap)
            lane = lanes[task]
            start = free[lane]
            if start < at:  # noqa: PLR1730
                start = at
            done = start + seconds[task]
            free[lane] = end[task] = done
            order[lane].append(task)
            for other in after[task]:
                if ready[other] < done:  # noqa: PLR1730 (a call of max takes three times as long)
                    ready[other] = done
                if waiting[other] == 1:
                    heappush(heap, (ready[other], keys[other], other))
                else:
                    waiting[other] -= 1
        return max(free, default=0.0)

    def change(self, operator: int, config: Config) -> float:
        """`change_all` of one operator."""
        return self.change_all({operator: config})

    def change_all(self, changes: Mapping[int, Config]) -> float:
        """Algorithm 2: gives operators other configurations; `undo` takes the last such change back.

        Returns:
            Seconds until the last task ends.
        """
        self._settle()
        graph, ready, end = self.graph, self._ready, self._end
        edges: list[tuple[int, int]] = []
        changed, gone = [], set[int]()
        for operator in changes:
            own, closings = self._own[operator], self._closings[operator]
            changed.append((operator, self.strategy[operator], own, self._outputs[operator], closings))
            gone.update(own, closings)
            edges += [(operator, place) for place in range(len(graph.operators[operator].inputs))]
            edges += [edge for edge in graph.readers[operator] if edge[0] not in changes]
        transfers = {edge: self._transfers[edge] for edge in edges}
        gone.update(*transfers.values())
        neighbours = self._detach(edges, gone)
        made: list[int] = []
        for operator, config in changes.items():
            self.strategy[operator] = config
            made += self._make(operator)
        for edge in edges:
            made += self._join(*edge)
        self._lanes()
        lengths = {lane: len(self._order[lane]) for lane in {self._lane[task] for task in made}}
        first = min([ready[task] for task in gone])
        for task in made:
            end[task] = inf
        for task in made:  # those that wait for others of them are not ready before these
            latest = 0.0
            for other in self._before[task]:
                if end[other] >= first:
                    break
                latest = max(latest, end[other])
            else:
                first = latest
        idle = self._idle.copy()
        cut, redone = self._cut(first)
        old = redone, list(map(ready.__getitem__, redone)), list(map(end.__getitem__, redone)), idle
        self._undo = _Undo(changed, transfers, neighbours, made, *old, lengths, cut, self.cost)
        self.cost = self._again([task for task in redone if task not in gone] + made)
        return self.cost

    def _detach(self, edges: Iterable[tuple[int, int]], gone: set[int]) -> list[tuple[int, list[int], list[int]]]:
        """Takes tasks that go away out of the lists of their neighbours; (neighbour, its lists as they were)."""
        near: set[int] = set()
        for reader, place in edges:
            near.update(self._outputs[self.graph.operators[reader].inputs[place].source], self._own[reader])
        neighbours = []
        for task in near - gone:
            before, after = self._before[task], self._after[task]
            neighbours.append((task, before, after))
            self._before[task] = [other for other in before if other not in gone]
            self._after[task] = [other for other in after if other not in gone]
        return neighbours

    def _again(self, tasks: list[int]) -> float:
        """Runs tasks behind the cut; those before it have ended."""
        end, ready, waiting, before, starts = self._end, self._ready, self._waiting, self._before, []
        for task in tasks:
            end[task] = inf
        for task in tasks:
            latest, count = 0.0, 0
            for other in before[task]:
                done = end[other]
                if done == inf:
                    count += 1
                elif done > latest:
                    latest = done
            ready[task], waiting[task] = latest, count
            if not count:
                starts.append(task)
        return self._run(starts)

    def _cut(self, first: float) -> tuple[list[tuple[int, int, list[int]]], list[int]]:
        """Takes tasks that are ready at a moment or later from the timeline; (as `_Undo.cut`, all of them)."""
        ready, order, idle = self._ready, self._order, self._idle
        cut, redone = [], list[int]()
        for lane in [lane for lane, end in enumerate(idle) if end >= first]:
            tasks = order[lane]
            place = len(tasks)
            while place and ready[tasks[place - 1]] >= first:
                place -= 1
            if place < len(tasks):
                tail = tasks[place:]
                del tasks[place:]
                cut.append((lane, place, tail))
                redone += tail
                idle[lane] = self._end[tasks[-1]] if place else 0.0
        return cut, redone

    def undo(self) -> None:
        """Takes the last change back, with its timeline.

        Raises:
            ValueError: there is none, or it was taken back.
        """
        undo = self._undo
        if undo is None:
            raise ValueError("no change to take back")
        self._undo = None
        for lane, kept in undo.lengths.items():
            del self._order[lane][kept:]
        for lane, kept, tail in undo.cut:
            self._order[lane][kept:] = tail
        ready, end = self._ready, self._end
        for task, at, done in zip(undo.redone, undo.ready, undo.end, strict=True):
            ready[task], end[task] = at, done
        self._idle[: len(undo.idle)] = undo.idle
        for task, before, after in undo.neighbours:
            self._before[task], self._after[task] = before, after
        for operator, config, own, outputs, closings in undo.operators:
            self.strategy[operator] = config
            self._own[operator], self._outputs[operator], self._closings[operator] = own, outputs, closings
        self._transfers.update(undo.transfers)
        self._free += undo.made
        self.cost = undo.cost

    def _settle(self) -> None:
        """Gives the numbers of tasks that went away with the last change to new ones."""
        if self._undo is not None:
            for _, _, own, _, closings in self._undo.operators:
                self._free += own + closings
            for tasks in self._undo.transfers.values():
                self._free += tasks
            self._undo = None

    def spans(self) -> list[Span]:
        """All tasks by operator, kind and index."""
        found = []
        for operator in range(len(self.strategy)):
            places = range(len(self.graph.operators[operator].inputs))
            incoming = [task for place in places for task in self._transfers[operator, place]]
            groups = ((KINDS[0], incoming), (KINDS[1], self._own[operator]), (KINDS[2], self._closings[operator]))
            for kind, tasks in groups:
                for index, task in enumerate(tasks):
                    end, seconds = self._end[task], self._seconds[task]
                    start = end - seconds
                    found.append(Span(operator, kind, index, self._lane[task], self._ready[task], start, end))
        return found

    def busy(self) -> dict[int, float]:
        """Seconds in which each lane that has tasks is busy."""
        found: dict[int, float] = {}
        for lane, tasks in enumerate(self._order):
            if tasks:
                found[lane] = sum(self._seconds[task] for task in tasks)
        return found

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return sum(map(len, self._order))


def simulate(templates: Templates, strategy: Strategy) -> Simulation:
    """Full simulation of a strategy."""
    return Simulation(templates, strategy)
