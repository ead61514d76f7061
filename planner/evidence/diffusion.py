"""Published runs of diffusion transformers against the model's word: speed-ups over one chip, seconds, and which won.

`diffusion.csv` holds a latency or a speed-up a row, `diffusion_picks.csv` which split was the fastest of some. Rows of
`scope` backbone leave out text encoders and VAE. Cases are halved by the CRC-32 of their name: even = fitted (the
engines' host and traffic, attention's share of the peak, the link between sockets, the video decoder), odd = unseen,
only reported. Halves of whole groups, tried first, left the host's constants to one model; the one-chip run of a group
now stands in the speed-ups of both parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple
from zlib import crc32

from planner.diffusion.job import job_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import Setting, latency_of
from planner.diffusion.ranking import Priced, Request, priced_or_refused
from planner.diffusion.rules import Filters, splits
from planner.errors import InputError
from planner.evidence.comparison import Comparison, once
from planner.plans.placement import Placement
from planner.specs.catalog import load_hardware, load_sampler
from planner.specs.measurements import measured_diffusion, measurements

Row = dict[str, str]
CLOSE = 0.05
"""Within which two published or predicted latencies are one: runs of five differ by as much."""


class Pick(NamedTuple):
    """Which split was the fastest, and what the planner takes."""

    case: str
    model: str
    hardware: str
    chips: int
    best: tuple[str, ...]
    """The published winner, or several where reports differ or are within 1 %."""
    chosen: str
    behind: float
    """How much longer the winner takes than the chosen one, by the planner's word: 0 where they are the same."""
    source: str

    @property
    def right(self) -> bool:
        """Whether the planner takes the published winner."""
        return self.chosen in self.best


def part(case: str) -> str:
    """`fitted` or `unseen`."""
    return "fitted" if crc32(case.encode()) % 2 == 0 else "unseen"


def setting_of(row: Row, chips: int) -> Setting:
    """The machine and the job of a row."""
    return _setting(chips, *(row[name] for name in _CONDITION))


_CONDITION = ("model", "hardware", "engine", "width", "height", "frames", "steps", "warmup", "scope")


@cache
def _setting(
    chips: int, model: str, hardware: str, engine: str, width: str, height: str, frames: str, steps: str, warmup: str,
    scope: str,
) -> Setting:  # fmt: skip
    sampler = load_sampler(engine)
    machine, shapes = load_hardware(hardware, sampler), measured_diffusion(model)
    job = job_of(shapes, (int(width), int(height)), int(frames), int(steps), int(warmup))
    placement = Placement.of(machine, chips)
    return Setting(shapes, machine, sampler, placement, job, shapes.weights, parallel_vae=scope == "backbone")


def seconds(row: Row, label: str) -> float:
    """What the planner says of a row's case under a split, in the row's scope; the best number of patches."""
    splits = [Split.parse(label)]
    if splits[0].pipefusion > 1 and ":" not in label:
        stages = splits[0].pipefusion
        splits = [splits[0]._replace(patches=count) for count in (stages, 2 * stages, 4 * stages)]
    found = [latency_of(setting_of(row, split.chips), split) for split in splits]
    without = 1.0 if row.get("scope") == "backbone" else 0.0
    return min(each.total - without * (each.text + each.vae) for each in found)


@once
def comparisons(rows: Iterable[Row] | None = None) -> list[Comparison]:
    """Speed-ups over one chip of all rows, and seconds of those that state them."""
    table = list(measurements("diffusion") if rows is None else rows)
    ones = {row["group"]: row for row in table if row["plan"] == "U1"}
    predicted: dict[str, float] = {}
    found = []
    for row in table:
        group, label = row["group"], row["plan"]
        if group not in predicted:
            predicted[group] = seconds(row, "U1")
        ours = predicted[group] if label == "U1" else seconds(row, label)

        def say(check: str, observed: float, value: float, unit: str, row: Row = row) -> Comparison:
            return Comparison(
                check=check, case=row["case"],
                what=f"{row['plan']}, {row['width']}x{row['height']}"
                + (f"x{row['frames']}" if row["frames"] != "1" else "") + f", {row['steps']} steps",
                observed=observed, predicted=value, hardware=row["hardware"], engine=row["engine"], model=row["model"],
                unit=unit, part=part(row["case"]), source=row["source"],
            )  # fmt: skip

        if label != "U1":
            stated = float(row["speedup"]) if row["speedup"] else float(ones[group]["seconds"]) / float(row["seconds"])
            found.append(say("speed-up over one chip", stated, predicted[group] / ours, "x"))
        if row["seconds"]:
            found.append(say("seconds of an image or video", float(row["seconds"]), ours, "s"))
    return found


def picks() -> list[Pick]:
    """What the planner takes where reports say which split was the fastest."""
    return list(_picks())


@cache
def _picks() -> tuple[Pick, ...]:
    found = []
    for row in measurements("diffusion_picks"):
        chips, best = int(row["chips"]), tuple(row["best"].split())
        times = _times(row, chips)
        chosen = min(times, key=lambda label: times[label])
        winner = min(times.get(label, float("inf")) for label in best)
        found.append(
            Pick(row["case"], row["model"], row["hardware"], chips, best, chosen, winner / times[chosen] - 1,
                 row["source"])
        )  # fmt: skip
    return tuple(found)


def _times(row: Row, chips: int) -> dict[str, float]:
    """Seconds by label without patches: of the splits that were compared, or of all that there are."""
    if row["candidates"]:
        return {label: seconds(row, label) for label in row["candidates"].split()}
    setting = setting_of(row, chips)
    alone = row["scope"] == "backbone"  # images so large were measured without their decoder
    request = Request(setting.model, setting.hardware, setting.sampler, chips, setting.job, parallel_vae=alone)
    times: dict[str, float] = {}
    for split in splits(setting, chips, Filters(dp=(1,))):
        found = priced_or_refused(request, setting, split) if split.chips == chips else None
        if isinstance(found, Priced):
            label = _bare(split)
            time = found.latency.total - (found.latency.text + found.latency.vae if alone else 0.0)
            times[label] = min(time, times.get(label, float("inf")))
    if not times:
        raise InputError(f"diffusion_picks.csv, case {row['case']}: no split fits")
    return times


def _bare(split: Split) -> str:
    """A label without its number of patches."""
    return split._replace(patches=split.pipefusion).label
