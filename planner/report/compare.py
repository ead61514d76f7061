"""`plan compare` as tables and sentences, and as rows for CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from planner.explaining.breakdown import Breakdown
from planner.explaining.comparison import Candidate, Contest, Flip, Room
from planner.explaining.difference import brought_together, lines
from planner.report.explain import LEAST, print_lines, signed, tied
from planner.report.figures import load, plural, prompt, short
from planner.report.table import Column, lay_out, paragraphs, show, width
from planner.report.why import extrapolated
from planner.request import Request
from planner.results import Results

FLIPS = 3
"""Flips that a sentence names."""
HEADINGS = 36
"""Characters that the labels of all candidates may have as headings of a table."""
_WORDS = {"kv_cache": "KV cache", "gpus": "chips"}


class Comparison(NamedTuple):
    """Candidates, each itemised, what each holds, and where the order of two flips."""

    candidates: list[Candidate]
    plans: list[Breakdown]
    rooms: list[Room]
    contests: list[Contest]


ROW = (
    "section", "candidate", "against", "phase", "item", "value", "difference", "unit", "axis", "low", "high", "at",
    "leads", "refused",
)  # fmt: skip
"""Columns of CSV and JSON; `section` says which of them a row has. Of a room `phase` is what ends it."""
_RESULTS = (
    "concurrency", "batch_per_replica", "ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s", "tokens_per_s_per_gpu",
    "usd_per_mtok", "memory_gib", "memory_limit_gib", "kv_capacity_tokens", "max_concurrency",
)  # fmt: skip


def rows(found: Comparison) -> list[dict[str, Any]]:
    """Results of every candidate, every item of its goal, its room, and every flip."""
    names = [one.label for one in found.candidates]
    made: list[dict[str, Any]] = []
    for name, plan in zip(names, found.plans, strict=True):
        row = plan.row
        made += [{"section": "result", "candidate": name, "item": item, "value": row[item]} for item in _RESULTS]
    for line in lines(found.plans):
        for name, value, difference in zip(names, line.values, line.differences, strict=True):
            made.append(
                {
                    "section": "term", "candidate": name, "against": names[0], "phase": line.phase, "item": line.item,
                    "value": value, "difference": difference, "unit": found.plans[0].goal.unit,
                }
            )  # fmt: skip
    for name, each in zip(names, found.rooms, strict=True):
        ended = "memory" if each.memory_ends else "sequences"
        held, longest = {"item": "requests", "phase": ended}, {"item": "isl", "phase": each.ends}
        made.append({"section": "room", "candidate": name, **held, "value": each.requests})
        made.append({"section": "room", "candidate": name, **longest, "value": each.isl})
    for contest in found.contests:
        first, second = (names[index] for index in contest.pair)
        base = {
            "section": "flip", "candidate": first, "against": second, "axis": contest.axis, "low": contest.low,
            "high": contest.high,
        }  # fmt: skip
        leader = None if contest.leader is None else names[contest.leader]
        made.append(base | {"at": contest.low, "leads": leader})
        made += [base | {"at": flip.at, "leads": names[flip.after], "refused": flip.refused} for flip in contest.flips]
    return [dict.fromkeys(ROW) | row for row in made]


def print_comparison(found: Comparison) -> None:
    """Everything about the candidates."""
    show(paragraphs([_headline(found)]))
    print()
    _print_results(found)
    print()
    show(paragraphs([_verdict(found)]))
    print()
    unit = found.plans[0].goal.unit
    show(paragraphs([f"Where it goes ({found.plans[0].goal.what}, {unit}):"]))
    values = [plan.goal_value() for plan in found.plans]
    print_lines(brought_together(lines(found.plans), LEAST * min(values)), _headings(found))
    print()
    engines = {plan.request.engine.name: plan.request.engine for plan in found.plans}
    notes = [
        note
        for name, engine in engines.items()
        for note in extrapolated(
            engine, Results.joined([plan.results for plan in found.plans if plan.request.engine.name == name])
        )
    ]
    show(paragraphs([*(_contest(found, each) for each in found.contests), _rooms(found), *notes]))


def _headline(found: Comparison) -> str:
    requests = [one.request for one in found.candidates]
    first = requests[0]
    work = first.workload

    def each(name: Callable[[Any], str]) -> str:
        return ", ".join(dict.fromkeys(name(request) for request in requests))

    one = found.candidates[0]
    speculation = next(filter(None, (each.workload.speculation for each in requests)), None)
    drafts = "" if speculation is None else f"; drafts by {speculation.draft.label}"
    asked = "the best load of each" if one.searches else load(work, one.concurrency)
    return (
        f"{each(lambda request: request.model.name)} on "
        f"{each(lambda request: f'{request.gpus} x {request.hardware.name}')}, "
        f"{each(lambda request: f'{request.engine.name} {request.engine.version}')}; "
        f"{prompt(work)}, {asked}, {each(_schedule)} "
        f"batching{drafts}; for {first.objective}."
    )


def _schedule(request: Request) -> str:
    return request.workload.schedule or request.engine.scheduler.schedule


def _print_results(found: Comparison) -> None:
    """Figures as rows, candidates as columns."""
    table: list[tuple[str, list[str]]] = []

    def add(name: str, cells: list[str]) -> None:
        if any(cell != "-" for cell in cells):
            table.append((name, cells))

    facts = [plan.row for plan in found.plans]
    for name in ("plan", "model", "hardware", "engine", "weights", "kv_cache", "gpus"):
        cells = [str(row[name]) for row in facts]
        if name == "plan" or len(set(cells)) > 1:
            add(_WORDS.get(name, name), cells)
    add("load", [str(row["concurrency"]) for row in facts])
    for name, column in (
        ("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms"), ("latency ms", "latency_ms"), ("tok/s", "tokens_per_s"),
        ("tok/s per chip", "tokens_per_s_per_gpu"), ("$/Mtok", "usd_per_mtok"),
    ):  # fmt: skip
        add(name, [short(row[column]) for row in facts])
    add("GiB of a chip", [f"{row['memory_gib']:.1f} of {row['memory_limit_gib']:.1f}" for row in facts])
    add("requests that fit", [str(each.requests) for each in found.rooms])
    add("longest prompt", [str(each.isl) for each in found.rooms])
    add("bound", [row["bottleneck"] or "-" for row in facts])
    records = [{"": name, **{f"c{index}": cell for index, cell in enumerate(cells)}} for name, cells in table]

    def at(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda record: str(record[key])

    stub = Column("", at(""), right=False)
    columns = [Column(heading, at(f"c{index}")) for index, heading in enumerate(_headings(found))]
    while columns:  # as many candidates beside each other as fit, at least one
        many = len(columns)
        while many > 1 and max(map(len, lay_out([stub, *columns[:many]], records, width()))) > width():
            many -= 1
        show(lay_out([stub, *columns[:many]], records, width()), ["bold underline"])
        columns = columns[many:]
        if columns:
            print()


def _headings(found: Comparison) -> list[str]:
    """Labels as headings of columns, or letters where they would not fit."""
    labels = [one.label for one in found.candidates]
    return labels if sum(map(len, labels)) <= HEADINGS else list("ABCD"[: len(labels)])


def _verdict(found: Comparison) -> str:
    """Who leads, by how much, and which item it owes that to most."""
    values = [plan.goal_value() for plan in found.plans]
    order = sorted(range(len(values)), key=lambda index: values[index])
    best, second = order[0], order[1]
    names = [one.label for one in found.candidates]
    unit = found.plans[best].goal.unit
    gap = values[second] / values[best] - 1
    if gap < 1e-9:
        return f"{names[best]} and {names[second]} take the same: {signed(values[best])} {unit}."
    line = max(lines([found.plans[best], found.plans[second]]), key=lambda each: each.differences[1])
    return (
        f"{names[best]} leads: {signed(values[best])} {unit}, {names[second]} takes {more(gap)}; most of that is "
        f"{line.item} ({line.phase}), {signed(line.values[0])} against {signed(line.values[1])}."
        f"{tied(gap, found.plans[best])}"
    )


def _contest(found: Comparison, contest: Contest) -> str:
    """Who leads over a range, in a sentence."""
    names = [one.label for one in found.candidates]
    first, second = (names[index] for index in contest.pair)
    work = found.candidates[0].request.workload
    if contest.axis == "concurrency":
        head = f"Load, {contest.low} to {contest.high} requests of {work.isl} + {work.osl} tokens"
        noun = "request"
    else:
        one = found.candidates[contest.pair[0]]
        at = "the best load of each" if one.searches else f"{_in_flight(one)}"
        head = f"Context, prompts of {contest.low} to {contest.high} tokens at {at}"
        noun = "token"
    head = f"{head}, {first} against {second}"
    if contest.leader is None:
        return f"{head}: neither runs." if not np.isfinite(contest.ahead[0]) else f"{head}: they take the same."
    if not contest.flips:
        ours = contest.leader == contest.pair[0]
        leads = (each if ours else 1 / (1 + each) - 1 for each in contest.ahead if np.isfinite(each) and each > -1)
        ends = list(leads)
        gap = f"; at the ends the other takes {' and '.join(map(more, ends))}" if len(ends) == 2 else ""
        return f"{head}: {names[contest.leader]} throughout{gap}."
    text = f"{head}: {names[contest.leader]} leads first"
    few = len(contest.flips) <= FLIPS
    for flip in contest.flips if few else contest.flips[:1]:
        text += f"; {_flip(flip, names, noun)}"
    if not few:
        text += f"; it changes {len(contest.flips) - 1} more times, at last {_flip(contest.flips[-1], names, noun)}"
    return f"{text}."


def more(gap: float) -> str:
    """By how much one is behind: `12.5% more`, from twice on `4.1 times as much`."""
    return f"{gap:.1%} more" if gap < 1 else f"{short(gap + 1, 3)} times as much"


def _flip(flip: Flip, names: Sequence[str], noun: str) -> str:
    why = f" ({names[flip.before]} cannot run there)" if flip.refused else ""
    return f"from {plural(flip.at, noun)} on {names[flip.after]}{why}"


def _rooms(found: Comparison) -> str:
    """Who runs out of memory first."""
    names = [one.label for one in found.candidates]
    fewest = min(each.requests for each in found.rooms)
    least = [name for name, each in zip(names, found.rooms, strict=True) if each.requests == fewest]
    verb = "runs" if len(least) == 1 else "run"
    memory = all(each.memory_ends for each in found.rooms if each.requests == fewest)
    text = f"Room: {_listed(least)} {verb} out first with load, beyond {plural(fewest, 'request')}"
    if len(least) == len(names):
        text = f"Room: each holds {plural(fewest, 'request')}"
    text += "" if memory else " (the engine's limit of sequences, not memory)"
    shortest = min(each.isl for each in found.rooms)
    short_of = [
        name for name, each in zip(names, found.rooms, strict=True) if each.isl == shortest and each.ends == "memory"
    ]
    if short_of:
        one = found.candidates[0]
        at = "1 request in flight" if one.searches else _in_flight(one)
        text += f"; {_listed(short_of)} first with context, beyond prompts of {plural(shortest, 'token')} ({at})"
    else:
        text += "; with context the model's own end comes before that of any memory"
    return f"{text}."


def _in_flight(one: Candidate) -> str:
    """The load of a candidate; under an arrival rate each has its own."""
    rate = one.request.workload.arrival_rate
    return f"{plural(one.concurrency, 'request')} in flight" if rate is None else "the load of each"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names)
