"""`plan sweep`: a line for each row, the axes that vary in front, and what has no plan below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.report.figures import plural, short
from planner.report.table import COLOURS, Column, Row, lay_out, paragraphs, show, width
from planner.sweeping import COLUMN_OF

_HEADINGS = {
    "concurrency": "load",
    "kv_cache": "KV",
    "objective": "for",
    "arrival_rate": "req/s",
    "spec_tokens": "drafted",
    "spec_accept": "accepted",
}
_NUMBERS = frozenset(("gpus", "isl", "osl", "concurrency", "arrival_rate", "spec_tokens", "spec_accept"))


def _columns(rows: Sequence[Row], varying: Sequence[str]) -> list[Column]:
    def axis(name: str) -> Column:
        right = name in _NUMBERS
        return Column(_HEADINGS.get(name, name), lambda row: _text(_axis(row, name)), right=right, keep=8)

    def figure(heading: str, name: str, keep: int, digits: int = 4) -> Column:
        return Column(heading, lambda row: short(row[name], digits), keep=keep)

    columns = [axis(name) for name in varying]
    if "gpus" not in varying and len({row["gpus"] for row in rows}) > 1:
        columns.append(Column("chips", lambda row: _text(row["gpus"]), keep=8))
    columns.append(Column("plan", lambda row: _text(row["plan"]), right=False))
    if "concurrency" not in varying and any(row["concurrency"] not in (None, 1) for row in rows):
        columns.append(Column("load", lambda row: _text(row["concurrency"]), keep=5))
    columns += [figure("TTFT ms", "ttft_ms", 4), figure("TPOT ms", "tpot_ms", 6), figure("latency ms", "latency_ms", 3)]
    if any(row["utilisation"] is not None for row in rows):
        columns.append(figure("queue ms", "queue_ms", 4, 3))
    columns += [figure("tok/s", "tokens_per_s", 5), figure("/chip", "tokens_per_s_per_gpu", 2)]
    if any(row["usd_per_mtok"] is not None for row in rows):
        columns.append(figure("$/Mtok", "usd_per_mtok", 5, 3))
    columns.append(
        Column("GiB/chip", lambda row: "-" if row["memory_gib"] is None else f"{row['memory_gib']:.1f}", keep=1)
    )
    columns.append(Column("bound", lambda row: _text(row["bottleneck"]), right=False, keep=0))
    return columns


def _axis(row: Row, name: str) -> Any:
    """The value of an axis in a row: a whole number without a point."""
    value = row[COLUMN_OF.get(name, name)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


class Counts(NamedTuple):
    """How much a sweep has of what; its table has less where a file has all."""

    points: int
    rows: int
    failed: int


def print_sweep(
    rows: Sequence[Row], failures: Sequence[Row], counts: Counts, varying: Sequence[str], file: str | None
) -> None:
    """The rows of a sweep and a caption.

    Args:
        rows: with the keys of COLUMNS_OF_SWEEP: all, or the first of them where a file has all.
        failures: the first points without a plan.
        counts: of the whole sweep.
        varying: the axes of several values.
        file: where all rows are, if there is such a place.
    """
    lines = lay_out(_columns(rows, varying), rows, width())
    show(lines, ["bold underline", *(COLOURS.get(row["bottleneck"] or "", "") for row in rows)])
    texts = [] if len(rows) == counts.rows else [f"... {plural(counts.rows - len(rows), 'more row')} in {file}."]
    first = rows[0]
    fixed = [
        f"{_HEADINGS.get(name, name)} {first[name]}"
        for name in ("model", "hardware", "engine", "gpus", "isl", "osl", "objective")
        if name not in varying and len({row[name] for row in rows}) == 1
    ]
    texts.append(
        f"{plural(counts.points, 'point')}, each ranked on its own: {', '.join(fixed) or 'everything varies'}."
    )
    if counts.failed:
        texts.append(f"No plan at {counts.failed} of them:")
        texts += [f"{_where(row, varying)}: {row['error'].rstrip('.')}." for row in failures]
        if counts.failed > len(failures):
            texts.append(f"... {counts.failed - len(failures)} more: see `error`.")
    show(paragraphs(texts))


def _where(row: Row, varying: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_text(_axis(row, name))}" for name in varying) or "the only point"
