"""Tables for people: at most 100 columns, coloured on a terminal by what bounds a plan.

The layout is made here, as text; rich colours it on a terminal and is not even imported where there is none, since
its import costs as much time as planning.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from planner.costs.scheduling import sequences_of
from planner.plans.plan import Plan
from planner.plans.space import Refused
from planner.ranking import Ranking
from planner.report.figures import plural, short
from planner.report.why import bounds, caption, extrapolated, unmeasured
from planner.results import Results
from planner.specs.engine import Engine
from planner.units import MS

WIDTH = 100
LEAST_SHARE = 0.001
"""Parts of a time below this share of it are left out."""
LEAST_ROOM = 20
"""Columns that a wrapped last column has at least, if it needs them; more where a word of it is longer."""
LONGEST_WORD = 36
"""A word of more characters, an address say, is broken where it must be."""
GAP = "  "
COLOURS = {"compute": "green", "memory": "cyan", "network": "magenta", "overhead": "yellow", "bubble": "red"}

Row = dict[str, Any]


class Column(NamedTuple):
    """One column of a table; those of a low `keep` are left out first where the terminal is narrow."""

    heading: str
    cell: Callable[[Row], str]
    right: bool = True
    keep: int = 9


def width() -> int:
    """Columns to print: the terminal's, or what COLUMNS says, up to WIDTH; WIDTH where there is neither."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if is_limited() else WIDTH


def is_limited() -> bool:
    """Whether somebody said how wide a line may be: a terminal, or COLUMNS."""
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def _columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that say something about these rows."""
    loads = len({row["concurrency"] for row in rows}) > 1 or any(row["concurrency"] != 1 for row in rows)
    arrives = any(row["utilisation"] is not None for row in rows)
    priced = any(row["usd_per_mtok"] is not None for row in rows)
    columns = [
        Column("#", lambda row: f"{'~' if row['tie'] else ''}{row['rank'] or ''}"),
        Column("plan", lambda row: str(row["plan"]), right=False),
        Column("chips", lambda row: str(row["gpus"])) if len({row["gpus"] for row in rows}) > 1 else None,
        Column("load", lambda row: str(row["concurrency"]), keep=8) if loads else None,
        Column("TTFT ms", lambda row: short(row["ttft_ms"]), keep=7),
        Column("queue ms", lambda row: short(row["queue_ms"], 3), keep=7) if arrives else None,
        Column("TPOT ms", lambda row: short(row["tpot_ms"])),
        Column("latency ms", lambda row: short(row["latency_ms"]), keep=4),
        Column("of most", lambda row: f"{row['utilisation']:.0%}", keep=6) if arrives else None,
        Column("tok/s", lambda row: short(row["tokens_per_s"]), keep=6),
        Column("/chip", lambda row: short(row["tokens_per_s_per_gpu"]), keep=2),
        Column("$/Mtok", lambda row: short(row["usd_per_mtok"], 3), keep=3) if priced else None,
        Column("GiB/chip", lambda row: f"{row['memory_gib']:.1f}", keep=1),
        Column("max load", lambda row: str(row["max_concurrency"]), keep=0),
        Column("bound", lambda row: row["bottleneck"] or "-", right=False, keep=5),
    ]
    return [column for column in columns if column is not None]


def lay_out(columns: Sequence[Column], rows: Sequence[Row], limit: int) -> list[str]:
    """A heading and a line for each row, in at most `limit` columns where that can be done.

    Columns of a low `keep` are left out first; if that is not enough, texts are wrapped, the widest column first, and a
    row is then several lines joined by line breaks.
    """
    cells = {column.heading: [column.cell(row) for row in rows] for column in columns}
    widths = {heading: max([len(heading), *map(len, column)]) for heading, column in cells.items()}
    kept = list(columns)
    while (
        sum(widths[column.heading] + len(GAP) for column in kept) - len(GAP) > limit and min(c.keep for c in kept) < 9
    ):
        kept.remove(min(kept, key=lambda column: column.keep))

    over = sum(widths[column.heading] + len(GAP) for column in kept) - len(GAP) - limit
    for column in sorted((column for column in kept if not column.right), key=lambda each: -widths[each.heading]):
        least = min(LEAST_ROOM // 2, widths[column.heading])
        less = max(0, min(over, widths[column.heading] - least))
        widths[column.heading] -= less
        over -= less

    def lines(texts: Sequence[str]) -> str:
        wrapped = [
            textwrap.wrap(text, widths[column.heading], break_on_hyphens=False)
            if len(text) > widths[column.heading]
            else [text]
            for text, column in zip(texts, kept, strict=True)
        ]
        return "\n".join(map(line, zip_longest(*wrapped, fillvalue="")))

    def line(texts: Sequence[str]) -> str:
        padded = [
            text.rjust(widths[column.heading]) if column.right else text.ljust(widths[column.heading])
            for text, column in zip(texts, kept, strict=True)
        ]
        return GAP.join(padded).rstrip()

    return [
        lines([column.heading for column in kept]),
        *(lines([cells[column.heading][index] for column in kept]) for index in range(len(rows))),
    ]


def results_lines(results: Results) -> tuple[list[str], list[str]]:
    """(lines of the table, the style of each)."""
    rows = results.rows()
    lines = lay_out(_columns(rows), rows, width())
    return lines, ["bold underline", *(COLOURS.get(row["bottleneck"] or "", "") for row in rows)]


def show(lines: Sequence[str], styles: Sequence[str] = ()) -> None:
    """Prints lines, styled where stdout is a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415 (see the module's text)
        from rich.text import Text  # noqa: PLC0415

        console = Console(highlight=False, soft_wrap=True)
        for index, line in enumerate(lines):
            console.print(Text(line, style=styles[index] if index < len(styles) else ""))
    else:
        print("\n".join(lines))


def paragraphs(texts: Sequence[str]) -> list[str]:
    """Sentences as lines of the printing width."""
    return [line for text in texts for line in textwrap.wrap(text, width(), break_on_hyphens=False)]


def print_results(results: Results) -> None:
    """Rows as a table."""
    show(*results_lines(results))


def print_ranking(ranking: Ranking, shown: Results) -> None:
    """A ranking's first rows and its caption."""
    print_results(shown)
    texts = caption(ranking)
    if len(shown) < len(ranking.results):
        noun = "row" if ranking.request.pareto else "plan"  # a frontier has a plan at several loads
        texts = [f"... {plural(len(ranking.results) - len(shown), f'more {noun}')} (--top 0 shows all).", *texts]
    show(paragraphs(texts))


def print_estimate(results: Results, engine: Engine) -> None:
    """One priced plan: its row, where the time of a token goes, and the memory of the fullest chip."""
    print_results(results)
    row = results.row(0)
    texts = []
    if row["tpot_ms"] is not None:
        tpot = {bound: column[0] / MS for bound, column in results.tpot_parts.items()}
        parts = [f"{bound} {short(ms, 3)} ms" for bound, ms in tpot.items() if ms >= LEAST_SHARE * sum(tpot.values())]
        texts.append(f"TPOT: {', '.join(parts)}.")
    texts.append(
        f"Fullest chip: weights {row['weights_gib']:.2f} + KV {row['kv_gib']:.2f} + other {row['other_gib']:.2f} = "
        f"{row['memory_gib']:.2f} of {row['memory_limit_gib']:.2f} GiB; "
        f"a replica holds {row['kv_capacity_tokens']} tokens."
    )
    if row["batch_per_replica"] * row["dp"] < row["concurrency"]:
        most = int(sequences_of(engine.scheduler, Plan.parse(row["plan"]).sharding.batch))
        why = (
            f"run: {engine.name} takes at most {most} sequences a replica"
            if row["max_concurrency"] == row["dp"] * most
            else "fit"
        )
        texts.append(
            f"Only {row['max_concurrency']} of {row['concurrency']} requests {why}; the figures are for those."
        )
    texts += [*bounds(engine), *extrapolated(engine, results), *unmeasured(results)]
    show(paragraphs(texts))


def print_rejected(refused: Sequence[Refused]) -> None:
    """The refused plans with the reason that binds each."""
    print_rows(["refused", "by", "reason"], [[one.plan.label, one.limit, one.reason] for one in refused])


def print_rows(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[str] = frozenset(),
    keep: Mapping[str, int] | None = None,
) -> None:
    """A plain table of texts, those of `right` aligned there; a last column of text is wrapped to what room is left.

    Columns of a low `keep` are left out first where the terminal is narrow, as in `lay_out`.
    """
    columns = [
        Column(name, partial(_at, name=name), right=name in right, keep=(keep or {}).get(name, 9)) for name in header
    ]
    records = [dict(zip(header, row, strict=True)) for row in rows]
    if header[-1] in right:
        show(lay_out(columns, records, width()), ["bold underline"])
        return
    last = [header[-1], *(row[-1] for row in rows)]
    longest = max(len(word) for text in last for word in text.split() or [""])
    least = max(min(LEAST_ROOM, max(map(len, last))), min(longest, LONGEST_WORD))
    starts = lay_out(columns[:-1], records, width() - len(GAP) - least)
    indent = max(len(line) for start in starts for line in start.split("\n")) + len(GAP)
    lines = []
    for start, text in zip(starts, last, strict=True):
        wrapped = textwrap.wrap(text, max(least, width() - indent), break_on_hyphens=False)
        pairs = zip_longest(start.split("\n"), wrapped, fillvalue="")
        lines += [(before.ljust(indent) + after).rstrip() for before, after in pairs]
    show(lines, ["bold underline"])


def _at(row: Row, name: str) -> str:
    return str(row[name])
