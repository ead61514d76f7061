"""`plan diagnose`: where a model's phases stand, whether cutting the sequence pays, and what to look at."""

from __future__ import annotations

from typing import Any

from planner.diagnosing.framework import PAYS, Diagnosis, Length, Verdict
from planner.report.figures import short
from planner.report.table import paragraphs, print_rows, show, width
from planner.units import MS

COLUMNS = ("model", "hardware", "engine", "gpus", "section", "phase", "item", "value", "unit", "says")
"""Of the long table that CSV and JSON have: one figure a row."""
NARROW = 80
"""Columns up to which headings are short."""
_RIGHT = frozenset({"tokens", "FLOP/B", "ridge", "compute", "memory", "KV fills", "ms", "cut ms", "times", "looks at"})


def rows(found: Diagnosis) -> list[dict[str, Any]]:
    """Every figure and word as a row."""
    common = {
        "model": found.model, "hardware": found.hardware.name, "engine": found.engine, "gpus": found.gpus,
    }  # fmt: skip
    made: list[dict[str, Any]] = []

    def add(section: str, phase: str | None, item: str, value: Any, unit: str | None = None, says: Any = None) -> None:
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            value = None
        made.append(
            {**common, "section": section, "phase": phase, "item": item, "value": value, "unit": unit, "says": says}
        )

    for spot in found.spots:
        for item, value, unit in (
            ("tokens", spot.tokens, "tokens"), ("flops", spot.flops, "FLOP"), ("bytes", spot.bytes, "B"),
            ("seconds", spot.seconds, "s"), ("intensity", spot.intensity, "FLOP/B"), ("ridge", spot.ridge, "FLOP/B"),
            ("compute share", spot.compute, "share"), ("memory share", spot.memory, "share"),
            ("KV fills", spot.filled, "share"),
        ):  # fmt: skip
            add("roofline", spot.phase, item, value, unit, spot.plan)
        compute, memory = spot.quadrant
        add("spectrum", spot.phase, "quadrant", None, None, f"{compute} compute, {memory} memory")
        add("spectrum", spot.phase, "advice", None, None, spot.advice)
    for each in found.dependencies:
        add("dependencies", each.phase, "range", each.share, "share", each.range)
        add("dependencies", each.phase, "divisible", None, None, each.divisible)
    for verdict in found.verdicts:
        for length in verdict.lengths:
            for name, best in (("whole", length.whole), ("cut", length.cut)):
                add(
                    "verdict", verdict.phase, f"{name} at {length.length} {verdict.axis}",
                    None if best is None else best[1], "s", None if best is None else best[0],
                )  # fmt: skip
        add("verdict", verdict.phase, f"crossover, {verdict.axis}", verdict.crossover, None, sentence(verdict))
    for check in found.checks:
        for name, value, unit in check.figures:
            add("checklist", None, f"{check.item}: {name}", value, unit or None, check.says)
    return made


def print_diagnosis(found: Diagnosis) -> None:
    """The diagnosis as tables and sentences."""
    show([*paragraphs([f"{found.model} on {found.gpus} x {found.hardware.name}, {found.engine}: {found.what}"]), ""])
    print_rows(
        ["phase", "share of", "tokens", "FLOP/B", "ridge", "compute", "memory", "KV fills", "quadrant"],
        [
            [
                spot.phase, spot.plan, short(spot.tokens), short(spot.intensity, 3), short(spot.ridge, 3),
                f"{spot.compute:.0%}", f"{spot.memory:.0%}", f"{spot.filled:.0%}" if spot.filled < 10 else "over",
                "{} compute, {} memory".format(*spot.quadrant),
            ]
            for spot in found.spots
        ],
        right=_RIGHT,
        keep={"share of": 5, "ridge": 6, "KV fills": 4, "FLOP/B": 7},
    )  # fmt: skip
    show(paragraphs([f"{spot.phase}: {spot.advice}." for spot in found.spots]))
    print()
    print_rows(
        ["phase", "looks at", "range", "divisible", "why"],
        [[each.phase, f"{each.share:.0%}", each.range, each.divisible, each.why] for each in found.dependencies],
        right=_RIGHT,
    )
    for verdict in found.verdicts:
        print()
        heading = (
            f"{verdict.phase}: {verdict.axis}" if width() > NARROW else verdict.axis
        )  # its sentence names the phase
        print_rows(
            [heading, "whole", "ms", "sequence cut", "cut ms", "times"],
            [_line(length) for length in verdict.lengths],
            right=_RIGHT | {heading},
            keep={"times": 5},
        )
        show(paragraphs([sentence(verdict)]))
    print()
    print_rows(["check", "finding"], [[check.item, check.says] for check in found.checks])


def _line(length: Length) -> list[str]:
    cells = [f"{length.length:,}"]
    for best in (length.whole, length.cut):
        cells += ["nothing fits", "-"] if best is None else [best[0], short(best[1] / MS)]
    return [*cells, "-" if length.gain is None else f"{length.gain:.2f}"]


def sentence(verdict: Verdict) -> str:
    """The verdict in words."""
    asked, phase = verdict.asked, verdict.phase
    if verdict.crossover is None:
        text = f"{phase}: cutting the sequence does not pay at the long end of this range"
    elif verdict.crossover == verdict.lengths[0].length:
        text = f"{phase}: cutting the sequence pays over the whole range, from {verdict.crossover:,} {verdict.axis} on"
    else:
        text = f"{phase}: cutting the sequence pays from {verdict.crossover:,} {verdict.axis} on"
    if asked.whole is None and asked.cut is None:
        return f"{text}; nothing fits at {asked.length:,}."
    if asked.cut is None:
        return f"{text}; at {asked.length:,} no cut fits."
    worth = "" if verdict.refused is None else f" Hypothetical: {verdict.refused.partition(';')[0]}."
    if asked.whole is None:
        return f"{text}; at {asked.length:,} nothing but {asked.cut[0]} fits.{worth}"
    assert asked.gain is not None
    word = "pays" if asked.pays else "does not"
    return (
        f"{text}; at {asked.length:,} it {word}: {asked.cut[0]} is {asked.gain:.3f} times as fast as {asked.whole[0]} "
        f"(worth it from {1 + PAYS:.2f} on).{worth}"
    )
