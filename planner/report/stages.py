"""`plan search --method stages` and `sharding`: a pipeline's stages beside equal ones, and shardings on a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import Any

from planner.opgraph.cluster import EVEN, Cluster, Placed, total_of
from planner.opgraph.sharding import CHOICES, OnMesh
from planner.opgraph.stages import Form
from planner.report.figures import plural, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.units import GIB, MS


def rows(cluster: Cluster, stages: Sequence[Placed]) -> list[dict[str, Any]]:
    """A row for each stage."""
    made = []
    for number, stage in enumerate(stages, start=1):
        kind = cluster.kinds[stage.kind]
        operators = kind.graph.operators
        sharded = cluster.times[stage.kind].shardings(stage.shape, stage.first, stage.last)
        made.append(
            {
                "stage": number,
                "first": operators[stage.first].name,
                "last": operators[stage.last].name,
                "operators": stage.last - stage.first + 1,
                "hardware": kind.hardware.name,
                "mesh": str(stage.shape),
                "chips": stage.shape.total,
                "grid": f"{stage.intra.view.first}x{stage.intra.view.second}",
                "stage_ms": stage.intra.seconds / MS,
                "chip_gib": stage.intra.bytes / GIB,
                "shardings": " ".join(choice.text for choice in sharded.choices),
            }
        )
    return made


def print_stages(cluster: Cluster, stages: Sequence[Placed], form: Form, microbatches: int, work: str) -> None:
    """The stages as a table and what they are beside others."""
    table = rows(cluster, stages)
    columns = [
        Column("stage", lambda row: str(row["stage"])),
        Column("operators", lambda row: f"{row['first']} - {row['last']}", right=False),
        Column("mesh", lambda row: row["mesh"]),
        Column("of", lambda row: row["hardware"], right=False, keep=3),
        Column("grid", lambda row: row["grid"]),
        Column("shardings", _shardings, right=False, keep=5),
        Column("ms", lambda row: short(row["stage_ms"])),
        Column("GiB/chip", lambda row: short(row["chip_gib"], 3), keep=4),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    kinds = " and ".join(f"{kind.nodes * kind.chips} x {kind.hardware.name}" for kind in cluster.kinds)
    own = total_of(stages, form, microbatches)
    formula = (
        f"sum + ({microbatches} - 1) x slowest stage" if form == "training" else f"{len(stages)} stages x the slowest"
    )
    texts = [
        f"{cluster.kinds[0].graph.name} on {kinds}: {plural(microbatches, 'microbatch').replace('hs', 'hes')}{work} "
        f"each, without host time and sends between stages. Grid: the mesh as rows x columns, axes 0 and 1; S: samples "
        "divided over an axis, P: parameters.",
        f"T = {formula} = {short(own / MS)} ms.",
        _others(cluster, own, form, microbatches),
    ]
    show(paragraphs(texts))


def _shardings(row: Row) -> str:
    """The most frequent choices with their counts."""
    counts = Counter(row["shardings"].split(" ")).most_common(2)
    rest = row["operators"] - sum(count for _, count in counts)
    return ", ".join([*(f"{name} ({count})" for name, count in counts), *([f"{rest} more"] if rest else [])])


def _others(cluster: Cluster, own: float, form: Form, microbatches: int) -> str:
    texts = []
    whole = cluster.whole(form, microbatches)
    kind = " of one kind" if len(cluster.kinds) > 1 else ""
    texts.append(f"one stage on all chips{kind} {_longer(whole, own)}")
    for by in EVEN:
        stages = cluster.even(by, form, microbatches)
        if stages is None:
            texts.append(f"as many {by} on as many chips: nothing fits")
            continue
        value = total_of(stages, form, microbatches)
        texts.append(f"as many {by} in each of {plural(len(stages), 'stage')} {_longer(value, own)}")
    return f"Against it: {'; '.join(texts)}."


def _longer(value: float, own: float) -> str:
    if not isfinite(value):
        return "does not fit"
    if value <= own * (1 + 1e-9):
        return f"takes the same, {short(value / MS)} ms"
    return f"takes {short(value / MS)} ms, {short(100 * (value / own - 1), 3)} % longer"


def sharding_rows(found: OnMesh) -> list[dict[str, Any]]:
    """A row for each operator: its choice, and what that and the resharding in front of it take."""
    graph, options = found.options.graph, found.options
    picked = [CHOICES.index(choice) for choice in found.sharded.choices]
    made = []
    for index, operator in enumerate(graph.operators):
        before = sum(
            float(options.edge(index, place)[picked[edge.source], picked[index]])
            for place, edge in enumerate(operator.inputs)
        )
        seconds, held = options.node(index)
        made.append(
            {
                "operator": operator.name,
                "sharding": found.sharded.choices[index].text,
                "grid": f"{found.view.first}x{found.view.second}",
                "operator_ms": float(seconds[picked[index]]) / MS,
                "resharding_ms": before / MS,
                "chip_mib": float(held[picked[index]]) / 2**20,
                "total_ms": found.sharded.seconds / MS,
            }
        )
    return made


def print_sharding(found: OnMesh, what: str) -> None:
    """The choices, alike ones in one row, and the grids that were looked at."""
    table: dict[tuple[Any, ...], Row] = {}
    for row in sharding_rows(found):
        key = (row["sharding"], row["operator_ms"], row["resharding_ms"], row["operator"].split(" ")[-1])
        table.setdefault(key, {**row, "count": 0})["count"] += 1
    columns = [
        Column("operator", lambda row: row["operator"], right=False),
        Column("times", lambda row: str(row["count"])),
        Column("sharding", lambda row: row["sharding"], right=False),
        Column("us", lambda row: short(1e3 * row["operator_ms"])),
        Column("resharding us", lambda row: short(1e3 * row["resharding_ms"])),
        Column("MiB", lambda row: short(row["chip_mib"]), keep=3),
    ]
    show(lay_out(columns, list(table.values()), width()), ["bold underline"])
    grids = [f"{view.first}x{view.second} {_or_not(seconds)}" for view, seconds in found.others]
    texts = [
        what,
        f"Shardings on a grid of {found.view.first} x {found.view.second} chips, by an integer linear programme: "
        f"{short(found.sharded.seconds / MS)} ms, one operator after the other; {short(found.sharded.bytes / GIB, 3)} "
        f"GiB a chip. By grid, in ms: {', '.join(grids)}.",
        "S: samples divided over an axis of the grid, P: parameters, R: neither.",
    ]
    show(paragraphs(texts))


def _or_not(seconds: float) -> str:
    return short(seconds / MS) if isfinite(seconds) else "does not fit"
