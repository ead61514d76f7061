"""How attention and its KV cache are divided over a stage's chips: heads x batch x sequence, a word in every plan.

`heads` is Megatron's: every chip has some heads of every request. `batch` is that of Pope et al.: projections by heads,
attention by requests, with all-to-alls between. A product says how many parts each: `heads4xbatch8` is data-parallel
attention, eight groups of four chips, each with all projections (divided over its four) and the cache of its own
requests; `heads2xseq4` is decode-context parallelism, every request's cache in four parts by tokens.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from planner.errors import InputError
from planner.specs.engine import PROMPT_CONTEXT

WORDS = ("heads", "batch")
"""Shardings that say no numbers: over all chips of a stage."""
ALONG = PROMPT_CONTEXT
"""How the groups of context parallelism share the attention of a prompt whose tokens are divided over them: keys and
values go round (Ring Attention), are gathered by all, or tokens are exchanged for heads (DeepSpeed-Ulysses)."""
_PART = re.compile(r"(heads|batch|seq)([1-9][0-9]*)")


class Sharding(NamedTuple):
    """Parts that a stage's chips are the product of."""

    heads: int
    """Chips that divide a request's heads."""
    batch: int = 1
    """Groups with requests of their own."""
    sequence: int = 1
    """Parts of a request's cache, by tokens."""

    @property
    def chips(self) -> int:
        """Chips of the stage."""
        return self.heads * self.batch * self.sequence

    @property
    def word(self) -> str:
        """As `heads4xbatch8`: ones left out; `heads1` where all are."""
        parts = [f"{name}{size}" for name, size in zip(("heads", "batch", "seq"), self, strict=True) if size > 1]
        return "x".join(parts) or "heads1"

    @property
    def prefill(self) -> Sharding:
        """How prompts are processed under the same storage of projections: no part of a sequence waits elsewhere."""
        return Sharding(self.heads * self.sequence, self.batch)


@lru_cache(maxsize=4096)  # thousands of plans have few words
def implied_prefill(word: str) -> str:
    """How prompts are processed where a plan says only how it decodes: under the same storage of projections."""
    if word in WORDS:
        return "heads"
    prefill = sharding_of(word, 0).prefill
    return prefill.word if prefill.batch > 1 else "heads"


def implied_along(word: str) -> str:
    """How context parallelism processes prompts where a plan says only how it decodes: as it leaves the cache."""
    return "ulysses" if word == "heads" else "ring"


def is_sharding(word: str) -> bool:
    """Whether a word is one of attention's."""
    return word in WORDS or word in ALONG or all(_PART.fullmatch(part) for part in word.split("x"))


class _Words(tuple[str, ...]):
    """The words of attention as a list to print, which holds every product."""

    __slots__ = ()

    def __contains__(self, word: object) -> bool:
        return isinstance(word, str) and is_sharding(word)


KNOWN = _Words((*WORDS, "a product as heads4xbatch2"))
"""What `--attention` takes."""
KNOWN_PREFILL = _Words((*WORDS, *ALONG, "a product as heads4xbatch2"))
"""What `--prefill-attention` takes."""


@lru_cache(maxsize=4096)
def sharding_of(word: str, chips: int) -> Sharding:
    """The parts of a word over so many chips; of `heads` and `batch` all are heads, which is how projections are.

    Raises:
        InputError: not a word of attention, or a dimension twice.
    """
    if word in WORDS:
        return Sharding(chips)
    found: dict[str, int] = {}
    for part in word.split("x"):
        match = _PART.fullmatch(part)
        if match is None or match[1] in found:
            raise InputError(
                f"{word!r} is no sharding of attention: expected heads, batch, or a product, as heads4xbatch8 or "
                "heads2xseq4"
            )
        found[match[1]] = int(match[2])
    return Sharding(found.get("heads", 1), found.get("batch", 1), found.get("seq", 1))
