"""What a time is made of, by operation and transfer: the same sums as `roofline.Parts`, with a ledger beside them.

A `Terms` is a `Parts` that remembers what went into it. Every step of pricing adds, multiplies and chooses parts, so
that the code that prices a plan itemises it too where it is handed terms instead of parts: there is no second formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.costs.roofline import Parts, averaged, plus
from planner.costs.weights import Num

Key = tuple[str, str]
"""(phase, item): `("decode step", "qkv")`; the phase is "" until what the pass was for is known."""


class Work(NamedTuple):
    """What an item computes and moves, and the seconds that the data sheet alone would want for it. All add up."""

    flops: Num = 0.0
    weight_bytes: Num = 0.0
    kv_bytes: Num = 0.0
    activation_bytes: Num = 0.0
    sent_bytes: Num = 0.0
    """Bytes of the buffers that collectives work on, and of what is handed to the next stage."""
    least_compute: Num = 0.0
    """FLOPs / peak of their arithmetic, seconds."""
    least_memory: Num = 0.0
    """(weights + KV) / peak bandwidth, seconds."""
    least_network: Num = 0.0
    """Bytes that must leave a chip or a node / rate of the wires, seconds."""

    @property
    def floor(self) -> Num:
        """Seconds that no kernel gets below, were everything that can overlap to overlap."""
        return np.maximum(np.maximum(self.least_compute, self.least_memory), np.maximum(self.least_network, 0.0))


class Term(NamedTuple):
    """One item: its seconds by what is waited for, and its work."""

    parts: Parts
    work: Work = Work()

    def plus(self, other: Term) -> Term:
        """The sum."""
        return Term(self.parts + other.parts, Work(*map(plus, self.work, other.work)))

    def times(self, factor: Num) -> Term:
        """The product."""
        return Term(self.parts * factor, Work(*(value * factor for value in self.work)))

    def where(self, mask: Num, other: Term) -> Term:
        """Self where the mask holds, other elsewhere."""
        work = (np.where(mask, mine, theirs) for mine, theirs in zip(self.work, other.work, strict=True))
        return Term(self.parts.where(mask, other.parts), Work(*work))


_NOTHING = Term(Parts())


class Terms(Parts):
    """Parts with their ledger: `items` add up to them, up to the rounding of a sum in another order."""

    items: dict[Key, Term]

    @classmethod
    def of(cls, parts: Parts, items: dict[Key, Term]) -> Terms:
        """Parts that consist of these items."""
        made = cls(*parts)
        made.items = items
        return made

    @classmethod
    def single(cls, name: str, parts: Parts, work: Work) -> Terms:
        """Parts that are one item."""
        return cls.of(parts, {("", name): Term(parts, work)})

    def _merged(self, other: Parts, parts: Parts, how: Callable[[Term, Term], Term]) -> Terms:
        theirs = other.items if isinstance(other, Terms) else {}
        keys = dict.fromkeys([*self.items, *theirs])
        return Terms.of(parts, {key: how(self.items.get(key, _NOTHING), theirs.get(key, _NOTHING)) for key in keys})

    def __add__(self, other: Parts) -> Terms:  # type: ignore[override]
        return self._merged(other, Parts.__add__(self, other), Term.plus)

    def __radd__(self, other: Parts) -> Terms:
        """`Parts + Terms`: Python asks the more special of the two first."""
        return self._merged(other, Parts.__add__(other, self), Term.plus)

    def __mul__(self, factor: Num) -> Terms:
        return Terms.of(Parts.__mul__(self, factor), {key: term.times(factor) for key, term in self.items.items()})

    def where(self, mask: Num, other: Parts) -> Terms:
        """Self where the mask holds, other elsewhere."""
        return self._merged(other, Parts.where(self, mask, other), lambda mine, theirs: mine.where(mask, theirs))

    def settled(self) -> Terms:
        """One roofline over all items: of each only what the sum waits for counts (see `Parts.settled`)."""
        bound = self.compute > self.memory
        return Terms.of(
            Parts.settled(self),
            {key: term._replace(parts=term.parts.of_bound(bound)) for key, term in self.items.items()},
        )

    def overlapped(self, fraction: float) -> Terms:
        """The network's part of every item shortened alike (see `Parts.overlapped`)."""
        seen = self.seen(fraction)

        def shortened(parts: Parts) -> Parts:
            return Parts(*parts)._replace(network=parts.network * seen)

        items = {key: term._replace(parts=shortened(term.parts)) for key, term in self.items.items()}
        return Terms.of(shortened(self), items)

    def adding(self, name: str, more: Parts) -> Terms:
        """The sum, with what is added as an item of its own."""
        return self + Terms.single(name, more, Work())

    def within(self, phase: str) -> Terms:
        """The same with all items in one phase."""
        return Terms.of(self, {(phase, name): term for (_, name), term in self.items.items()})

    def averaged(self, weights: Num) -> Terms:
        """Weighted means of every number, which must be arrays (see `over`)."""
        items = {
            key: Term(term.parts.averaged(weights), Work(*(averaged(value, weights) for value in term.work)))
            for key, term in self.items.items()
        }
        return Terms.of(Parts.averaged(self, weights), items)

    def over(self, rows: int) -> Terms:
        """Every number as an array over so many rows."""
        items = {
            key: Term(term.parts.over(rows), Work(*(_spread(value, rows) for value in term.work)))
            for key, term in self.items.items()
        }
        return Terms.of(Parts.over(self, rows), items)


def _spread(value: Num, rows: int) -> Num:
    return np.broadcast_to(np.asarray(value, dtype=float), (rows,))
