"""Which chip holds which heads, when a replica changes between sequence and tensor parallelism from pass to pass.

P = SP x TP chips; rank r = s TP + t has the columns of block t of TP of the projections, and of a pass's tokens part s
of SP. After the all-to-all among the ranks of equal t, rank r attends with part s of those columns: block t SP + s of
the P blocks of heads. Pure tensor parallelism over P ranks keeps the KV cache where it is if and only if its i-th rank
is the one that holds block i (Rajbhandari et al. 2025, section 3.3.1): (0, 2, 4, 1, 3, 5) for SP = 3, TP = 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planner.errors import InputError

_LABEL = re.compile(r"(?:SP([1-9][0-9]*))?x?(?:TP([1-9][0-9]*))?", re.IGNORECASE)
Range = tuple[int, int]
"""Heads from, and below which."""


class Base(NamedTuple):
    """Sequence parallelism over `sp` groups of `tp` chips each."""

    sp: int
    tp: int = 1

    @property
    def chips(self) -> int:
        """P."""
        return self.sp * self.tp

    @property
    def label(self) -> str:
        """`SP4xTP2`, `SP8`."""
        return f"SP{self.sp}" + (f"xTP{self.tp}" if self.tp > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Base:
        """The base of a label.

        Raises:
            InputError: not a label.
        """
        match = _LABEL.fullmatch(text.strip())
        if match is None or not any(match.groups()):
            raise InputError(f"{text!r} is no base: expected sequence and tensor parallelism, as SP8 or SP4xTP2")
        sp, tp = (int(value or 1) for value in match.groups())
        return cls(sp, tp)

    def rank(self, s: int, t: int) -> int:
        """The rank that has part `s` of the tokens and block `t` of the weights."""
        return s * self.tp + t

    @property
    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that reduce among each other: neighbours."""
        return tuple(tuple(self.rank(s, t) for t in range(self.tp)) for s in range(self.sp))

    @property
    def sp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that exchange tokens for heads."""
        return tuple(tuple(self.rank(s, t) for s in range(self.sp)) for t in range(self.tp))

    @property
    def shift_order(self) -> tuple[int, ...]:
        """The ranks of the tensor-parallel group of all P chips, in the order that leaves the KV cache in place."""
        return tuple(rank for group in self.sp_groups for rank in group)

    @property
    def blocks(self) -> tuple[int, ...]:
        """[rank] the block of P of the heads that it attends with in the base."""
        return tuple(t * self.sp + s for s in range(self.sp) for t in range(self.tp))


def heads_in_base(base: Base, heads: int) -> list[Range]:
    """[rank] the heads that it attends with in the base: its part, along s, of the columns of its block t."""
    wide, narrow = heads // base.tp, heads // base.chips
    starts = [t * wide + s * narrow for s in range(base.sp) for t in range(base.tp)]
    return [(start, start + narrow) for start in starts]


def heads_in_shift(order: Sequence[int], heads: int) -> list[Range]:
    """[rank] the heads that it attends with under tensor parallelism, the ranks of the group in this order."""
    narrow, place = heads // len(order), {rank: index for index, rank in enumerate(order)}
    return [(place[rank] * narrow, (place[rank] + 1) * narrow) for rank in sorted(place)]


def kv_heads_of(held: Range, heads: int, kv_heads: int) -> Range:
    """The KV heads that query heads attend to: each serves heads / kv_heads of them."""
    group = heads // kv_heads
    return held[0] // group, (held[1] - 1) // group + 1


def moved(base: Base, order: Sequence[int], heads: int, kv_heads: int) -> list[int]:
    """Ranks whose part of the KV cache is not where tensor parallelism in this order looks for it; none = invariant."""
    before, after = heads_in_base(base, heads), heads_in_shift(order, heads)
    return [
        rank for rank, (held, wanted) in enumerate(zip(before, after, strict=True))
        if held != wanted or kv_heads_of(held, heads, kv_heads) != kv_heads_of(wanted, heads, kv_heads)
    ]  # fmt: skip


def bases(chips: int) -> Iterator[Base]:
    """Every base of so many chips with a sequence to cut, most sequence parallelism first."""
    for tp in range(1, chips):
        if chips % tp == 0:
            yield Base(chips // tp, tp)


def refusal(base: Base, heads: int, kv_heads: int) -> str | None:
    """Why heads cannot be laid out so, or none."""
    if heads % base.chips:
        return f"{heads} query heads do not divide over {base.chips} chips"
    if kv_heads % base.chips and base.chips % kv_heads:
        return f"{base.chips} chips neither divide the {kv_heads} KV heads nor are a multiple of them"
    return None
