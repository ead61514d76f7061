"""Rules: which splits of a model and image there are, and the sentence that refuses one.

Those of xDiT (xfuser/config, docs/methods): degrees multiply to the chips, Ulysses divides the heads, CFG has two
halves, sequence degrees divide a side of the token grid, patches its rows, stale methods need steps after the warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from planner.diffusion.job import grid_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Setting

PATCHES = (2, 4, 8, 16, 32)
"""Numbers of patches that are looked at besides as many as stages (the paper's search)."""
LARGEST_REPLICA = 64
"""Chips over which one image is cut at most; the rest are copies."""
_WORDS = {
    "cfg": "CFG parallelism", "tp": "tensor parallelism", "ulysses": "Ulysses", "ring": "ring attention",
    "pipefusion": "PipeFusion", "distrifusion": "DistriFusion",
}  # fmt: skip


class Filters(NamedTuple):
    """Degrees to look at; () = all."""

    cfg: tuple[int, ...] = ()
    tp: tuple[int, ...] = ()
    ulysses: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()
    pipefusion: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    distrifusion: tuple[int, ...] = ()
    dp: tuple[int, ...] = ()
    exact: bool = False
    """Without methods that use stale activations."""

    def keep(self, split: Split) -> bool:
        """Whether a split is one to look at."""
        if self.exact and split.is_stale:
            return False
        return all(not getattr(self, name) or getattr(split, name) in getattr(self, name) for name in Split._fields)


def splits(setting: Setting, gpus: int, filters: Filters) -> Iterator[Split]:
    """Every split of `gpus` chips into replicas, each with as many copies as fit, in a fixed order."""
    for chips in range(1, min(gpus, LARGEST_REPLICA) + 1):
        for split in _of_replica(chips, filters.patches):
            copies = split._replace(dp=gpus // chips)
            if filters.keep(copies):
                yield copies
            elif filters.dp:
                for dp in filters.dp:
                    if dp * chips <= gpus and filters.keep(split._replace(dp=dp)):
                        yield split._replace(dp=dp)


def _of_replica(chips: int, patches: tuple[int, ...]) -> Iterator[Split]:
    for cfg in (1, 2):
        if chips % cfg:
            continue
        rest = chips // cfg
        if rest > 1:
            yield Split(cfg=cfg, distrifusion=rest)
        for stages in _divisors(rest):
            for tp in _divisors(rest // stages):
                for ulysses in _divisors(rest // stages // tp):
                    ring = rest // stages // tp // ulysses
                    if stages == 1:
                        yield Split(cfg, tp, ulysses, ring)
                        continue
                    for count in sorted({stages, *(patches or PATCHES)}):
                        if count >= stages or count in patches:
                            yield Split(cfg, tp, ulysses, ring, stages, count)


def refusal(setting: Setting, split: Split) -> tuple[str, str] | None:
    """(rule, sentence) why a split cannot be; none = it can, as far as memory allows."""
    return next(_broken(setting, split), None)


def _broken(setting: Setting, split: Split) -> Iterator[tuple[str, str]]:
    """The rules that a split breaks."""
    model, job = setting.model, setting.job
    for method, word in _WORDS.items():
        if getattr(split, method) > 1 and method == "cfg" and not model.guidance:
            yield "cfg", f"{model.name} runs one pass a step (no classifier-free guidance): nothing to split"
        elif getattr(split, method) > 1 and not setting.sampler.has(method, model.name):
            yield "engine", f"{setting.sampler.name} has no {word} for {model.name}"
    if split.cfg > 2:
        yield "cfg", f"guidance has two halves, not {split.cfg}"
    if split.pipefusion > 1:
        yield from _patch_rules(setting, split)
    yield from _shape_rules(setting, split)
    if split.is_stale and job.warmup >= job.steps:
        yield "steps", f"all {job.steps} steps are warm-up (--warmup {job.warmup})"
    if split.distrifusion > 1 and split.tp * split.sequence * split.pipefusion > 1:
        yield "distrifusion", "DistriFusion stands beside CFG and copies only"
    yield from _network_rules(setting, split)


def _patch_rules(setting: Setting, split: Split) -> Iterator[tuple[str, str]]:
    model, rows = setting.model, grid_of(setting.model, setting.job).rows
    if split.pipefusion > model.depth:
        yield "pipefusion", f"{split.pipefusion} stages, but {model.name} has {model.depth} blocks"
    if split.patches < 2:
        yield "patches", "a pipeline needs at least 2 patches"
    elif rows % split.patches:
        yield "patches", f"{split.patches} patches do not divide {rows} rows of tokens ({setting.job.height} pixels)"


def _shape_rules(setting: Setting, split: Split) -> Iterator[tuple[str, str]]:
    model, grid = setting.model, grid_of(setting.model, setting.job)
    heads = split.tp * split.ulysses
    if model.heads % heads:
        name = "tp" if split.tp > 1 else "ulysses"
        what = "TP x Ulysses" if min(split.tp, split.ulysses) > 1 else _WORDS[name]
        yield name, f"{what} over {heads} chips does not divide {model.heads} heads"
    if split.tp > 1 and any(block.ffn % split.tp for block in model.blocks):
        yield "tp", f"an FFN of {model.blocks[0].ffn} does not divide by {split.tp}"
    cut = split.sequence * split.distrifusion
    rows = grid.rows // split.patches
    if cut > 1 and rows % cut and grid.columns % cut:
        yield (
            "sequence",
            (
                f"{cut} chips divide neither the {rows} rows nor the {grid.columns} columns of tokens"
                + (" of a patch" if split.patches > 1 else "")
            ),
        )


def _network_rules(setting: Setting, split: Split) -> Iterator[tuple[str, str]]:
    groups = [
        ("all_reduce", split.tp),
        ("all_to_all", split.ulysses),
        ("all_gather", split.distrifusion),
        ("send", min(2, split.pipefusion * split.ring * split.cfg)),
    ]
    for op, ranks in groups:
        if (op, ranks) not in setting.known:
            setting.known[op, ranks] = setting.network.refusal(op, ranks)
        reason = setting.known[op, ranks]
        if reason is not None:
            yield "network", reason


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
