"""A plan: how one model is split over chips. Its label `TP8xPP2xDP2` is printed and read back."""

from __future__ import annotations

import re
from typing import NamedTuple

from planner.errors import InputError
from planner.specs.engine import ATTENTION

FFN = ("1d",)

_DEGREES = ("tp", "pp", "dp", "ep", "cp")
_TOKEN = re.compile(r"(TP|PP|DP|EP|CP)([1-9][0-9]*)")


class Plan(NamedTuple):
    """One choice for each dimension. A replica is tp x pp x cp chips; dp copies stand side by side.

    `attention` shards attention and its KV cache over heads or over the batch while decoding,
    `prefill_attention` while prefilling; `ffn` and `prefill_ffn` are the layouts of Pope et al.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    attention: str = "heads"
    prefill_attention: str = "heads"
    ffn: str = "1d"
    prefill_ffn: str = "1d"

    @property
    def replica_chips(self) -> int:
        """Chips of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def chips(self) -> int:
        """Chips of all replicas."""
        return self.replica_chips * self.dp

    @property
    def label(self) -> str:
        """`TP8xPP2xDP2`: ones left out, `TP1` for a single chip, `/batch` behind where attention is not over heads.

        A second `/batch` says the same of prefill.
        """
        parts = [f"{name.upper()}{getattr(self, name)}" for name in _DEGREES if getattr(self, name) > 1]
        text = "x".join(parts) or "TP1"
        if (self.attention, self.prefill_attention) != ("heads", "heads"):
            text += f"/{self.attention}"
        if self.prefill_attention != "heads":
            text += f"/{self.prefill_attention}"
        return text

    def __str__(self) -> str:
        return self.label

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan of a label.

        Raises:
            InputError: not a label.
        """
        head, *sharding = text.strip().split("/")
        found: dict[str, int] = {}
        for token in head.upper().split("X"):
            match = _TOKEN.fullmatch(token)
            if match is None or match[1].lower() in found:
                raise InputError(f"{text!r} is not a plan: expected degrees joined by x, each once, as in TP8xPP2xDP2")
            found[match[1].lower()] = int(match[2])
        if len(sharding) > 2 or not set(sharding) <= set(ATTENTION):
            raise InputError(
                f"{text!r} is not a plan: behind the degrees expected /heads or /batch, a second one for prefill"
            )
        return cls(**found, **dict(zip(("attention", "prefill_attention"), sharding, strict=False)))  # type: ignore[arg-type]
