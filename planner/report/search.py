"""`plan search`: the strategy that was found, operator by operator, and what it gains over the best template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.opgraph.comparing import Comparison, Spent
from planner.opgraph.graph import Operator
from planner.opgraph.problem import Devices
from planner.opgraph.strategies import Config, shown
from planner.report.figures import plural, short
from planner.report.table import Column, Row, lay_out, paragraphs, show, width
from planner.units import GIB, MS

SAME = 1e-9
"""Relative difference of two steps that are the same."""


def split(operator: Operator, config: Config) -> str:
    """`requests 2, heads 8`; `whole` where nothing is split."""
    pairs = zip(operator.dims, config.degrees, strict=True)
    return ", ".join(f"{dim.name} {ways}" for dim, ways in pairs if ways > 1) or "whole"


def rows(found: Comparison) -> list[dict[str, Any]]:
    """A row for each operator, in their order."""
    simulation = found.simulation()
    graph, problem = found.problem.graph, found.problem
    begin: dict[int, float] = {}
    end: dict[int, float] = {}
    for span in simulation.spans():
        if span.kind != "transfer":
            begin[span.operator] = min(begin.get(span.operator, span.start), span.start)
            end[span.operator] = max(end.get(span.operator, 0.0), span.end)
    template = found.template
    made = []
    for index, operator in enumerate(graph.operators):
        config = found.found.strategy[index]
        own = None if template is None else template.strategy[index]
        made.append(
            {
                "operator": operator.name,
                "split": split(operator, config),
                "tasks": len(config.devices),
                "devices": " ".join(map(str, config.devices)),
                "task_ms": problem.templates.prices.task(index, config.degrees) / MS,
                "start_ms": begin[index] / MS,
                "end_ms": end[index] / MS,
                "device_mib": max(problem.held(index, config).values()) / 2**20,
                "template_split": None if own is None else split(operator, own),
                "template_devices": None if own is None else " ".join(map(str, own.devices)),
                "step_ms": found.found.cost / MS,
                "template": None if template is None else template.label,
                "template_step_ms": None if template is None else template.cost / MS,
            }
        )
    return made


def print_search(found: Comparison, what: str, devices: Devices, seed: int) -> None:
    """The strategy as a table, operators that are alike in one row, and a caption."""
    table = _table(found)
    columns = [
        Column("operator", lambda row: row["name"], right=False),
        Column("split", lambda row: row["split"], right=False),
        Column("chips", lambda row: row["chips"], right=False),
        Column("task us", lambda row: short(row["task_us"])),
        Column("MiB", lambda row: short(row["mib"]), keep=2),
        Column("template", lambda row: row["template"], right=False, keep=4),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    show(paragraphs([what, *_searched(found, devices, seed), _verdict(found), *_use(found)]))


def _table(found: Comparison) -> list[Row]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    template = found.template
    for index, config in enumerate(found.found.strategy):
        own = None if template is None else template.strategy[index]
        groups.setdefault((found.problem.graph.types[index], config, own), []).append(index)
    table = []
    for (_, config, own), places in groups.items():
        operator = found.problem.graph.operators[places[0]]
        table.append(
            {
                "name": _name([found.problem.graph.operators[place].name for place in places]),
                "split": split(operator, config),
                "chips": shown(config.devices),
                "task_us": found.problem.templates.prices.task(places[0], config.degrees) / 1e-6,
                "mib": max(found.problem.held(places[0], config).values()) / 2**20,
                "template": "-" if own is None else "the same" if own == config else _other(operator, own),
            }
        )
    return table


def _other(operator: Operator, config: Config) -> str:
    return f"{split(operator, config)} on {shown(config.devices)}"


def _name(names: Sequence[str]) -> str:
    """`0-3 attention` for `0 attention` ... `3 attention`; else the names, the first of many."""
    parts = [name.partition(" ") for name in names]
    if len(names) > 1 and len({rest for _, _, rest in parts}) == 1 and all(first.isdigit() for first, _, _ in parts):
        return f"{shown([int(first) for first, _, _ in parts])} {parts[0][2]}"
    return ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"


def _searched(found: Comparison, devices: Devices, seed: int) -> list[str]:
    outcome, size = found.found, found.problem.size
    amount = short(size) if size < 1e7 else f"10^{len(str(size)) - 1}"
    if outcome.method == "exhaustive":
        least, middle, most = (short(float(value) / MS) for value in np.quantile(outcome.costs, (0.0, 0.5, 1.0)))
        text = (
            f"All {amount} strategies looked at: {outcome.feasible} fit; this one is the best of them. They take "
            f"{least} to {most} ms, half of them less than {middle}."
        )
        return [text if outcome.complete else f"Stopped: the best of {outcome.feasible} that fit, of {amount}."]
    ends = [f"{chain.name} {short(chain.best_cost / MS)}" for chain in outcome.chains]
    space = f"some 10^{len(str(size)) - 1} on blocks of chips" if devices == "blocks" else "all placements"
    return [
        f"{'' if outcome.complete else 'Stopped early. '}{plural(len(outcome.chains), 'Markov chain')} of strategies "
        f"({space}), {plural(outcome.evaluations, 'evaluation')}, seed {seed}; the best of each in ms, by its start: "
        f"{', '.join(ends)}."
    ]


def _verdict(found: Comparison) -> str:
    template, own = found.template, short(found.found.cost / MS)
    if template is None or found.gain is None:
        return f"Step: {own} ms. None of {plural(found.templates, 'template')} fits in memory."
    many = plural(found.templates, "template")
    if found.gain < SAME:
        return f"Step: {own} ms, the same as the best of {many}, {template.label}: the template is not beaten here."
    mine, theirs = found.spent()
    assert theirs is not None
    return (
        f"Step: {own} ms, {short(100 * found.gain, 3)} % shorter than the best of {many}, {template.label} "
        f"({short(template.cost / MS)} ms), because {_why(mine, theirs)}."
    )


def _why(own: Spent, template: Spent) -> str:
    """The parts that became shorter, the largest change first; else that more goes on at once."""
    names = {
        "compute": "the busiest chip computes",
        "collectives": "the busiest group's collectives take",
        "transfers": "the busiest link sends",
    }
    gains = sorted(((getattr(template, name) - getattr(own, name), name) for name in names), reverse=True)
    texts = [
        f"{names[name]} {short(getattr(own, name) / MS, 3)} instead of {short(getattr(template, name) / MS, 3)} ms"
        for gain, name in gains
        if gain > 0.1 * (template.step - own.step)
    ]
    return " and ".join(texts) or "more of it runs at once"


def _use(found: Comparison) -> list[str]:
    simulation = found.simulation()
    busy, names = simulation.busy(), found.problem.machine.lanes
    chips = [busy.get(device, 0.0) for device in range(found.problem.machine.devices)]
    cost = simulation.cost or 1.0
    loads = found.problem.loads(found.found.strategy)
    rest = {names[lane]: seconds for lane, seconds in busy.items() if lane >= len(chips)}
    text = f"Chips are busy {short(100 * sum(chips) / len(chips) / cost, 3)} % of the step on average"
    if rest:
        name = max(rest, key=lambda key: rest[key])
        text += f"; of links and groups most {name}, {short(100 * rest[name] / cost, 3)} %"
    limit = found.problem.memory
    memory = f"; the fullest chip holds {_gib(max(loads))}"
    return [f"{text}{memory} of {_gib(limit)}." if limit < float("inf") else f"{text}{memory}."]


def _gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB / 2 else f"{value / 2**20:.1f} MiB"
