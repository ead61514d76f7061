"""What a Markov chain of strategies proposes next: one operator's configuration, or one layout for several operators.

* single: a random operator takes another configuration, drawn evenly (FlexFlow, section 6.2): as likely back as forth.
* copied: a random operator takes the layout of a random neighbour in the graph. This is not symmetric: a layout that
  neighbours have is proposed more often than one that they do not. Both kinds together propose a configuration with
  a probability that is known (`Drawn.back` is what the Metropolis-Hastings rule needs of it), since the neighbours
  stay as they are.
* alike and near: a random operator draws another configuration evenly, and with it two layouts, its present one and
  the drawn one. In a set of operators, which depends on the operator and on fresh random numbers only, those that are
  laid out the one way are laid out the other way, and the other way about. Doing it again takes it back; the way back
  is drawn by the same operators with the same chances, since those that could draw this pair of layouts before are
  those that can draw it afterwards: symmetric. The set is all operators of the same kind (alike), or operators that
  are joined to the first one through the graph (near), of any number.

A layout says how dimensions are split, by their kind, and where tasks stand: "samples 2 ways, parameters 4 ways, on
chips 0-7" is one configuration of an operator at most. Operators that have no such configuration stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Literal, NamedTuple

import numpy as np

from planner.opgraph.graph import Degrees, Graph, Operator
from planner.opgraph.machine import Machine
from planner.opgraph.strategies import Config, has_collective, splits

Moves = Literal["mixed", "single"]
MOVES: tuple[Moves, ...] = ("mixed", "single")
"""single = the paper's chain."""
SINGLE, ALIKE = 0.5, 0.75
"""Of the mixture half is single or copied, a quarter each alike and near: bounds of a random number in [0, 1)."""
COPIED = 0.3
"""Of what changes one operator, the share that is copied, where a neighbour has a layout that it can have."""
_KINDS = ("sample", "attribute", "parameter")


class Layout(NamedTuple):
    """How an operator is split and placed, in words that other operators understand."""

    ways: tuple[Degrees, ...]
    """Degrees of Sample, of Attribute and of Parameter dimensions, ones at the end left out."""
    devices: tuple[int, ...]


def ways_of(operator: Operator, degrees: Degrees) -> tuple[Degrees, ...]:
    """The first half of a layout."""
    found = []
    for kind in _KINDS:
        own = [ways for dim, ways in zip(operator.dims, degrees, strict=True) if dim.kind == kind]
        while own and own[-1] == 1:
            own.pop()
        found.append(tuple(own))
    return tuple(found)


class Drawn(NamedTuple):
    """A proposal."""

    changes: dict[int, Config]
    """New configurations by operator; empty = the strategy stays."""
    back: float = 0.0
    """Logarithm of the probability of proposing the way back, over that of this proposal."""


class Layouts:
    """Layouts of all operators of a graph, and which operators stand together in it.

    Args:
        graph: the operators.
        machine: the devices.
    """

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self.types = graph.types
        self._degrees: dict[int, dict[tuple[Degrees, ...], Degrees]] = {}
        self._ways: dict[int, dict[Degrees, tuple[Degrees, ...]]] = {}
        for kind, operator in zip(graph.types, graph.operators, strict=True):
            if kind not in self._degrees:
                pairs = [
                    (degrees, ways_of(operator, degrees))
                    for degrees in splits(operator, machine.devices)
                    if has_collective(operator, degrees, machine)
                ]
                self._ways[kind] = dict(pairs)
                self._degrees[kind] = {ways: degrees for degrees, ways in pairs}
        self.alike = [[other for other, own in enumerate(graph.types) if own == kind] for kind in graph.types]
        self.near: list[list[int]] = [
            sorted({edge.source for edge in operator.inputs} | {reader for reader, _ in graph.readers[index]})
            for index, operator in enumerate(graph.operators)
        ]

    def of(self, operator: int, config: Config) -> Layout | None:
        """The layout of a configuration; none where it is split as no proposal would split it."""
        ways = self._ways[self.types[operator]].get(config.degrees)
        return None if ways is None else Layout(ways, config.devices)

    def configured(self, operator: int, layout: Layout) -> Config | None:
        """An operator in a layout; none where it has no such configuration."""
        degrees = self._degrees[self.types[operator]].get(layout.ways)
        return None if degrees is None else Config(degrees, layout.devices)

    def beside(self, operator: int, strategy: Sequence[Config]) -> list[Config]:
        """The operator in the layout of each of its neighbours, as far as it has it."""
        layouts = (self.of(other, strategy[other]) for other in self.near[operator])
        configs = (None if layout is None else self.configured(operator, layout) for layout in layouts)
        return [config for config in configs if config is not None]

    def together(self, operator: int, rng: np.random.Generator) -> list[int]:
        """Operators joined to this one, itself among them: as many as a number drawn evenly from two up."""
        size = 2 + int(rng.integers(max(1, len(self.near) - 1)))
        found, seen = [operator], {operator}
        border = [other for other in self.near[operator] if other not in seen]
        while border and len(found) < size:
            place = int(rng.integers(len(border)))
            border[place], border[-1] = border[-1], border[place]
            new = border.pop()
            if new in seen:
                continue
            found.append(new)
            seen.add(new)
            border += [other for other in self.near[new] if other not in seen]
        return found

    def exchanged(
        self, strategy: Sequence[Config], operators: Sequence[int], before: Layout, after: Layout
    ) -> dict[int, Config]:
        """New configurations of those of the operators that are in one of two layouts and have the other one."""
        found = {}
        for operator in operators:
            own = self.of(operator, strategy[operator])
            if own == before:
                other = self.configured(operator, after)
            elif own == after:
                other = self.configured(operator, before)
            else:
                continue
            if other is not None:
                found[operator] = other
        return found


def back_and_forth(before: Config, after: Config, beside: Sequence[Config], others: int) -> float:
    """`Drawn.back` of one operator's change where a share of `COPIED` is drawn from `beside`, the rest evenly.

    Args:
        before, after: its configurations.
        beside: configurations that could be copied, before and afterwards.
        others: configurations that it has beside the present one.
    """

    def chance(config: Config) -> float:
        return (1 - COPIED) / others + COPIED * beside.count(config) / len(beside)

    return log(chance(before) / chance(after)) if beside else 0.0
