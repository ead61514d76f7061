"""A plan: how one model is split over chips. Its label `TP8xPP2xDP2` is printed and read back."""

from __future__ import annotations

import re
from typing import NamedTuple

from planner.errors import InputError
from planner.plans.sharding import ALONG, Sharding, implied_along, implied_prefill, is_sharding, sharding_of
from planner.specs.engine import FFN

_DEGREES = ("tp", "pp", "dp", "ep", "cp")
_TOKEN = re.compile(r"(TP|PP|DP|EP|CP)([1-9][0-9]*)")
_GRID = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*){1,2}")


class Plan(NamedTuple):
    """One choice for each dimension. A replica is tp x pp x cp chips; dp copies stand side by side.

    `attention` shards attention and its KV cache over heads or over the batch while decoding,
    `prefill_attention` while prefilling; `ffn` and `prefill_ffn` are the layouts of Pope et al. With cp > 1 a stage is
    cp groups of tp chips, each with all weights, between which the tokens of a pass are divided; `prefill_attention`
    then says how a prompt's attention reaches across them (`sharding.ALONG`), `attention` where its cache lies.
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
    grid: str = ""
    """`4x16` or `4x4x4`: the ranks of a tensor-parallel group as X x YZ or X x Y x Z chips, each weight matrix being
    stored in X x YZ pieces; "" where every layout keeps the weights in slices of the FFN's width (X = 1)."""

    @property
    def axes(self) -> tuple[int, int, int]:
        """X, Y and Z; the line 1 x tp x 1 where there is no grid."""
        return grid_axes(self.grid) if self.grid else (1, self.tp, 1)

    @property
    def sharding(self) -> Sharding:
        """How attention is divided over a stage's chips while decoding."""
        return sharding_of(self.attention, self.stage_chips)

    @property
    def stage_chips(self) -> int:
        """Chips of one pipeline stage."""
        return self.tp * self.cp

    @property
    def implied(self) -> str:
        """What `prefill_attention` is where only `attention` is said."""
        return implied_along(self.attention) if self.cp > 1 else implied_prefill(self.attention)

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

        A second word says the same of prefill, where decode's does not imply it. Layouts of the FFN other than 1d
        follow: `/2d:4x16` with the grid, `/2d:4x16/wg-xyz` where prefill has another.
        """
        parts = [f"{name.upper()}{getattr(self, name)}" for name in _DEGREES if getattr(self, name) > 1]
        text = "x".join(parts) or "TP1"
        alike = self.prefill_attention == self.implied
        if self.attention != "heads" or not alike:
            text += f"/{self.attention}"
        if not alike:
            text += f"/{self.prefill_attention}"
        if (self.ffn, self.prefill_ffn) != ("1d", "1d"):
            text += f"/{self.ffn}" + (f":{self.grid}" if self.grid else "")
        if self.prefill_ffn != self.ffn:
            text += f"/{self.prefill_ffn}"
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
        words = [word.partition(":") for word in sharding]
        attention = [name for name, _, _ in words if is_sharding(name)]
        layouts = [name for name, _, _ in words if name in FFN]
        grids = [grid for name, colon, grid in words if colon and name in FFN]
        if (
            [name for name, _, _ in words] != attention + layouts
            or max(len(attention), len(layouts)) > 2
            or len(grids) > 1
            or any(colon for name, colon, _ in words if is_sharding(name))
        ):
            raise InputError(
                f"{text!r} is not a plan: behind the degrees expected /heads, /batch or a product as /heads4xbatch2, "
                "a second one for prefill, then the same of the FFN's layout with its grid, as /2d:4x16/wg-xyz"
            )
        layouts += layouts[-1:] if len(layouts) == 1 else []
        attention = attention or ["heads"]
        if len(attention) == 1:
            attention.append(cls(cp=found.get("cp", 1), attention=attention[0]).implied)
        if attention[0] in ALONG:
            raise InputError(
                f"{text!r} is not a plan: {attention[0]} says how prompts are processed; before it goes "
                "where the cache lies, as in TP4xCP2/heads4xseq2/ring"
            )
        named = dict(zip(("attention", "prefill_attention"), attention, strict=False))
        named |= dict(zip(("ffn", "prefill_ffn"), layouts, strict=False))
        return cls(**found, **named, grid=grid_text(grids[0]) if grids else "")  # type: ignore[arg-type]


def grid_axes(text: str) -> tuple[int, int, int]:
    """X, Y and Z of a grid, as `4x4x4`, or `4x16` where Y and Z are not told apart.

    Raises:
        InputError: not a grid.
    """
    if _GRID.fullmatch(text.lower()) is None:
        raise InputError(f"{text!r} is not a grid: expected chips as X x YZ or X x Y x Z, as 4x16 or 4x4x4")
    x, y, *z = map(int, text.lower().split("x"))
    return x, y, z[0] if z else 1


def grid_text(text: str) -> str:
    """A grid as it is printed: `4x16x1` is `4x16`.

    Raises:
        InputError: not a grid.
    """
    x, y, z = grid_axes(text)
    return f"{x}x{y}" if z == 1 else f"{x}x{y}x{z}"


def layouts_of(ffn: str | None, prefill_ffn: str | None) -> tuple[str, str]:
    """Layouts where one or both are not said: 1d; or prefill's like decode's; or decode's 2d, which gathers nothing."""
    if ffn is None:
        ffn = "1d" if prefill_ffn in (None, "1d") else "2d"
    return ffn, prefill_ffn or ffn
