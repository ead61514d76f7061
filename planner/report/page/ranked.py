"""Tables of a page that sort: the ranked plans with every result column, and plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.report.figures import short
from planner.report.page.markup import Markup, element, joined
from planner.results import COLUMNS, TEXTS, WHOLE, Results

HEADS: dict[str, tuple[str, str]] = {
    "rank": ("#", ""),
    "plan": ("plan", ""),
    "weights": ("dtype of weights", ""),
    "kv_cache": ("dtype of the KV cache", ""),
    "gpus": ("chips", ""),
    "tp": ("TP", "chips"),
    "pp": ("PP", "stages"),
    "dp": ("DP", "replicas"),
    "ep": ("EP", "chips"),
    "cp": ("CP", "chips"),
    "prefill_attention": ("attention in prefill", ""),
    "ffn": ("FFN", ""),
    "prefill_ffn": ("FFN in prefill", ""),
    "idle_gpus": ("idle", "chips"),
    "concurrency": ("load", "requests"),
    "batch_per_replica": ("batch of a replica", "requests"),
    "isl": ("prompt", "tokens"),
    "osl": ("answer", "tokens"),
    "ttft_ms": ("TTFT", "ms"),
    "queue_ms": ("queue", "ms"),
    "tpot_ms": ("TPOT", "ms"),
    "latency_ms": ("latency", "ms"),
    "tokens_per_s": ("output", "tokens/s"),
    "total_tokens_per_s": ("input + output", "tokens/s"),
    "tokens_per_s_per_gpu": ("per chip", "tokens/s"),
    "requests_per_s": ("requests", "1/s"),
    "usd_per_mtok": ("cost", "$/Mtok"),
    "usd_per_mtok_input": ("cost of input", "$/Mtok in"),
    "usd_per_mtok_output": ("cost of output", "$/Mtok out"),
    "wh_per_mtok": ("energy", "Wh/Mtok out"),
    "gpu_s_per_token": ("chip time", "chip-s/token"),
    "mfu_prefill": ("MFU of prefill", "share"),
    "mfu_decode": ("MFU of decode", "share"),
    "weights_gib": ("stored weights", "GiB a chip"),
    "kv_gib": ("KV", "GiB a chip"),
    "other_gib": ("other", "GiB a chip"),
    "memory_gib": ("memory", "GiB a chip"),
    "memory_limit_gib": ("limit", "GiB a chip"),
    "kv_capacity_tokens": ("KV room of a replica", "tokens"),
    "max_concurrency": ("most load", "requests"),
    "bottleneck": ("bound", ""),
    "flips_if": ("comes first if", ""),
    "tie": ("tie", "~ = with the row above"),
    "engine_version": ("engine version", ""),
    "prefix_hit": ("cached prompt", "share"),
}
"""(heading, unit) of result columns; one that is not here has its own name."""
SHOWN = frozenset((
    "rank", "plan", "concurrency", "ttft_ms", "tpot_ms", "latency_ms", "tokens_per_s", "tokens_per_s_per_gpu",
    "usd_per_mtok", "memory_gib", "max_concurrency", "bottleneck",
))  # fmt: skip
"""Columns that are seen at first; the others are a click away."""


def heading(name: str) -> str:
    """A result column in words, with its unit."""
    words, unit = HEADS.get(name, (name.replace("_", " "), ""))
    return f"{words}, {unit}" if unit else words


def ranked(results: Results) -> Markup:
    """The ranked rows as a table that sorts, and below it what all rows share.

    Args:
        results: all rows, in order. A column that has the same value in all of several rows is named once.
    """
    rows = results.rows()
    names = [name for name in COLUMNS if name in SHOWN or len({row[name] for row in rows}) > 1]
    names = [name for name in names if any(row[name] is not None for row in rows)]
    shared = [name for name in COLUMNS if name not in names]
    heads = []
    for name in names:
        words, unit = HEADS.get(name, (name.replace("_", " "), ""))
        heads.append(_head(words, unit, _is_number(name), hidden=name not in SHOWN, name=name))
    body = [element("tr", *(_cell(name, row[name], bool(row["tie"])) for name in names)) for row in rows]
    table = element(
        "table",
        element("caption", "Plans, the best first"),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        class_="sorts",
        id="ranking",
    )
    same = [(name, rows[0][name]) for name in shared if rows[0][name] is not None]
    empty = [heading(name) for name in shared if rows[0][name] is None]
    facts = [
        element("div", element("dt", heading(name)), element("dd", _text(name, value))) for name, value in same
    ]  # fmt: skip
    return joined(
        (
            element("div", class_="columns", data_for="ranking"),
            element("div", table, class_="scroll", tabindex="0", role="region", aria_label="Ranked plans"),
            element(
                "details",
                element("summary", f"The same in all rows ({len(same)}), and not applicable ({len(empty)})"),
                element("dl", *facts, class_="facts"),
                element("p", f"Not applicable: {'; '.join(empty)}.") if empty else None,
            ),
        )
    )


def plain(
    caption: str, heads: Sequence[tuple[str, bool | None]], rows: Sequence[Sequence[Any]], name: str, sorts: bool = True
) -> Markup:
    """A table of cells, texts or markup.

    Args:
        caption: what it shows.
        heads: (heading, whether its cells are figures); none where a column is no order to sort by.
        rows: of as many cells; (value to sort by, text) for a figure, "" for an empty cell.
        name: its id.
        sorts: whether a click on a heading sorts.
    """
    body = []
    for row in rows:
        cells: list[Markup] = []
        for (_, figure), cell in zip(heads, row, strict=True):
            value, text = cell if isinstance(cell, tuple) else (None, cell)
            tag = "th" if not cells else "td"
            scope = "row" if tag == "th" else None
            cells.append(element(tag, text, class_="n" if figure else None, data_v=_raw(value), scope=scope))
        body.append(element("tr", *cells))
    top = [
        _bare(words, bool(figure)) if figure is None or not sorts else _head(words, "", figure)
        for words, figure in heads
    ]
    table = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *top)),
        element("tbody", *body),
        class_="sorts" if sorts else None,
        id=name,
    )
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _head(words: str, unit: str, figure: bool, hidden: bool = False, name: str | None = None) -> Markup:
    """A heading that is a button; the script gives it its work."""
    label = element("button", words, element("small", unit) if unit else None, type="button")
    return element(
        "th", label, scope="col", class_="n" if figure else None, data_kind="number" if figure else "text",
        data_name=name, data_more=hidden,
    )  # fmt: skip


def _bare(words: str, figure: bool) -> Markup:
    return element("th", words, scope="col", class_="n" if figure else None)


def _is_number(name: str) -> bool:
    return name not in TEXTS and name != "tie"


def _cell(name: str, value: Any, tie: bool) -> Markup:
    figure = _is_number(name)
    kind = f"bound {value}" if name == "bottleneck" and value else "n" if figure else None
    if name == "plan":
        return element("th", _text(name, value), scope="row", data_v=value)
    if name == "rank":
        return element("td", f"{'~' if tie else ''}{_text(name, value)}", class_="n", data_v=_raw(value))
    return element("td", _text(name, value), class_=kind, data_v=_raw(value) if figure else None)


def _raw(value: Any) -> str | None:
    """A figure to sort by."""
    return None if value is None else repr(value)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "~" if value else ""
    if name in WHOLE or isinstance(value, str):
        return str(value)
    return short(float(value))
