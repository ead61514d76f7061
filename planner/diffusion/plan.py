"""A way to split a diffusion transformer over chips. Its label `CFG2xU2xPF4:8` is printed and read back."""

from __future__ import annotations

import re
from typing import NamedTuple

from planner.errors import InputError

_PREFIXES = {
    "cfg": "CFG",
    "tp": "TP",
    "ulysses": "U",
    "ring": "R",
    "pipefusion": "PF",
    "distrifusion": "DF",
    "dp": "DP",
}
_TOKEN = re.compile(r"(CFG|TP|U|R|PF|DF|DP)([1-9][0-9]*)(?::([1-9][0-9]*))?")
FIELDS = {prefix: name for name, prefix in _PREFIXES.items()}


class Split(NamedTuple):
    """Degrees of each method. A replica is their product without dp; dp copies stand side by side.

    On the network tensor-parallel ranks lie innermost, then Ulysses', then the ring's, the pipeline's, CFG's, copies.
    """

    cfg: int = 1
    """2: one half of the chips runs the pass with the prompt, the other the one without."""
    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    pipefusion: int = 1
    """Stages of blocks through which patches of the image move."""
    patches: int = 1
    """Of the image under PipeFusion (M)."""
    distrifusion: int = 1
    dp: int = 1

    @property
    def sequence(self) -> int:
        """Chips over which the tokens of a patch are cut: Ulysses times ring (USP)."""
        return self.ulysses * self.ring

    @property
    def replica_chips(self) -> int:
        """Chips that make one image."""
        return self.cfg * self.tp * self.sequence * self.pipefusion * self.distrifusion

    @property
    def chips(self) -> int:
        """Chips of all replicas."""
        return self.replica_chips * self.dp

    @property
    def is_stale(self) -> bool:
        """Whether attention sees keys and values of the step before: the image differs from the model's own."""
        return self.pipefusion > 1 or self.distrifusion > 1

    @property
    def label(self) -> str:
        """`CFG2xU2xPF4:8`: ones left out, U1 for a single chip; behind PF its patches where they are not as many."""
        parts = [f"{prefix}{getattr(self, name)}" for name, prefix in _PREFIXES.items() if getattr(self, name) > 1]
        text = "x".join(parts) or "U1"
        if self.pipefusion > 1 and self.patches != self.pipefusion:
            text = text.replace(f"PF{self.pipefusion}", f"PF{self.pipefusion}:{self.patches}")
        return text

    @classmethod
    def parse(cls, text: str) -> Split:
        """The plan of a label.

        Raises:
            InputError: not a label.
        """
        found: dict[str, int] = {}
        for token in text.strip().upper().split("X"):
            match = _TOKEN.fullmatch(token)
            name = None if match is None else FIELDS[match[1]]
            if match is None or name is None or name in found or (match[3] is not None and name != "pipefusion"):
                raise InputError(
                    f"{text!r} is not a plan of a diffusion transformer: expected degrees joined by x, each once, as "
                    "CFG2xU2xPF4 or PF4:8 (8 patches); CFG, TP, U (Ulysses), R (ring), PF (PipeFusion), DF "
                    "(DistriFusion), DP"
                )
            found[name] = int(match[2])
            if match[3] is not None:
                found["patches"] = int(match[3])
        if found.get("pipefusion", 1) > 1:
            found.setdefault("patches", found["pipefusion"])
        elif "patches" in found:
            raise InputError(f"{text!r}: patches belong to a pipeline of at least two stages, as PF4:8")
        return cls(**found)
