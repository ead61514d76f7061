"""`plan validate`: measured beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.evidence.comparison import Comparison
from planner.evidence.diffusion import CLOSE, Pick
from planner.evidence.memory import Verdict
from planner.evidence.picks import Order
from planner.evidence.rankings import Report
from planner.evidence.validation import PEER, Choices, Errors, grouped
from planner.report.figures import plural, short
from planner.report.table import Column, lay_out, paragraphs, print_rows, show, width

_COLUMNS = (
    "table", "check", "case", "what", "hardware", "engine", "model", "part", "unit", "observed", "predicted", "error",
    "right", "planner_says", "source", "peer",
)  # fmt: skip
_FIGURES = ("n", "bias", "mean", "median", "p90", "worst", "peer")
_RIGHT = frozenset(_FIGURES)
_KEEP = {"n": 5, "median": 4, "p90": 6, "worst": 3, "peer": 7}  # what a narrow terminal leaves out, lowest first


def error_rows(
    tables: Sequence[Errors],
    starts: Sequence[Verdict],
    said: Sequence[Report],
    chosen: Sequence[Choices] = (),
    fastest: Sequence[Pick] = (),
) -> list[dict[str, Any]]:
    """Every comparison, start-up, report of a ranking and figure of a choice as CSV and JSON have them."""
    rows = [
        _row(table=table.name, unit=each.unit or None, **_common(each), error=each.error)
        for table in tables
        for each in table.found
    ]
    rows += [
        _row(
            table="memory", check="starts", case=each.case, what=each.what,
            observed="ran" if each.ran else each.reason, right=each.right if each.decidable else None,
            planner_says=each.refusal or "starts",
        )
        for each in starts
    ]  # fmt: skip
    rows += [
        _row(
            table="ranking", check=f"better in {each.metric}", case=each.report, what=each.what, unit="times",
            observed=each.observed, predicted=each.predicted, right=each.agrees, planner_says=each.why,
            source=each.source,
        )
        for each in said
    ]  # fmt: skip
    rows += [
        _row(
            table="diffusion", check="fastest split", case=each.case, hardware=each.hardware, model=each.model,
            what=f"{each.chips} chips", unit="times", observed=" or ".join(each.best), predicted=1 + each.behind,
            right=each.right, planner_says=each.chosen, source=each.source,
        )
        for each in fastest
    ]  # fmt: skip
    for each in chosen:
        figures = {
            "throughput lost": (each.ours.lost, each.peer.lost),
            "throughput lost, with nothing found": (each.ours.lost_with_none, each.peer.lost_with_none),
            "limit missed": (each.ours.missed, each.peer.missed),
            "pairs in order": (each.order.share, each.peer_order.share),
        }
        rows += [
            _row(table="ranking", check=check, what=each.what, unit="share", predicted=ours, peer=theirs)
            for check, (ours, theirs) in figures.items()
        ]
    return rows


def _common(each: Comparison) -> dict[str, Any]:
    names = ("check", "case", "what", "hardware", "engine", "model", "part", "observed", "predicted", "source", "peer")
    return {name: getattr(each, name) if getattr(each, name) != "" else None for name in names}


def _row(**given: Any) -> dict[str, Any]:
    return dict.fromkeys(_COLUMNS) | given


def print_errors(table: Errors, by: Sequence[str]) -> None:
    """The errors of every group, sorted; the peer's mean over the cases that it predicts stands beside, if any."""
    groups = grouped(table.found, by)
    peers = any(peer is not None for _, peer in groups)
    header = [*by, *(name for name in _FIGURES if peers or name != "peer")]
    rows = []
    for found, peer in groups:
        figures = [str(found.cases), _percent(found.bias, "+")]
        figures += [_percent(value) for value in (found.mean, found.median, found.p90, found.worst)]
        rows.append([*found.key, *figures, *(["" if peer is None else _percent(peer)] if peers else [])])
    print_rows(header, rows, right=_RIGHT, keep=_KEEP)
    if peers:
        show(paragraphs([f"peer: mean error of {PEER} on the rows that it predicts."]))


def _percent(share: float, sign: str = "") -> str:
    """A share in percent, to two significant digits below one percent."""
    digits = 1 if abs(share) >= 0.01 or not share else 2 if abs(share) >= 0.001 else 3
    return f"{share:{sign}.{digits}%}"


def print_worst(table: Errors, count: int) -> None:
    """The cases that the planner misses most, with their sources."""
    worst = sorted(table.found, key=lambda each: -abs(each.error))[:count]
    print(f"{table.title}: the largest {plural(len(worst), 'error')}")
    rows = [
        [
            f"{each.error:+.1%}", short(each.observed), short(each.predicted), each.unit,
            f"{each.case}: {_words(each)}, {each.what}" + (f" [{each.source}]" if each.source else ""),
        ]
        for each in worst
    ]  # fmt: skip
    print_rows(
        ["error", "measured", "said", "unit", "what"],
        rows,
        right=frozenset({"error", "measured", "said"}),
        keep={"measured": 7, "said": 6, "unit": 5},
    )


def _words(each: Comparison) -> str:
    """Check, chip, engine and model, none of them twice."""
    return " ".join(
        [each.check, *(word for word in (each.hardware, each.engine, each.model) if word not in each.check)]
    )


def print_starts(verdicts: Sequence[Verdict]) -> None:
    """What starts, what does not, and what is wrong or not decided."""
    decided = [each for each in verdicts if each.decidable]
    ran, stopped = [each for each in decided if each.ran], [each for each in decided if not each.ran]
    text = (
        f"Starts: {sum(each.right for each in ran)} of {len(ran)} that ran are not refused; "
        f"{sum(each.right for each in stopped)} of {len(stopped)} that failed are refused for their reason."
    )
    show(paragraphs([text]))
    for each in decided:
        if not each.right:
            show(paragraphs([f"wrong: {each.case} {each.what}: {each.refusal or 'starts'}"]))
    for each in verdicts:
        if not each.decidable:
            show(paragraphs([f"not decided: {each.case} {each.what} ({each.open_question})"]))


def print_picks(found: Sequence[Pick]) -> None:
    """Which split was the fastest, by reports and by the planner."""
    right, close = sum(each.right for each in found), sum(each.right or each.behind < CLOSE for each in found)
    text = (
        f"Fastest split: {right} of {len(found)} as reported; in {close} the reported one is at most {CLOSE:.0%} "
        "slower by the planner's word."
    )
    show(paragraphs([text]))
    for each in found:
        if not each.right:
            words = f"{each.case}: {' or '.join(each.best)} reported, {each.chosen} chosen, {each.behind:.1%} apart"
            show(paragraphs([f"differs: {words}"]))


def print_ranking(choices: Sequence[Choices], tables: Order, said: Sequence[Report], unpriced: int) -> None:
    """What choosing by the planner costs, and what others reported of two plans."""
    show(
        paragraphs(
            [
                "Choosing plan and load among serving runs under a limit on TPOT of 10, 20, 30, 50 ms: throughput "
                "lost, limits missed, nothing found; pairs of plans in the measured order"
            ]
        )
    )
    columns = [
        Column("of", lambda row: str(row["of"]), right=False),
        Column("choices", lambda row: str(row["regret"].choices), keep=5),
        Column("lost", lambda row: f"{row['regret'].lost:.1%}"),
        Column("missed", lambda row: f"{row['regret'].missed:.1%}"),
        Column("none", lambda row: str(row["regret"].none), keep=3),
        Column("lost with none", lambda row: f"{row['regret'].lost_with_none:.1%}", keep=4),
        Column("in order", lambda row: f"{row['order'].share:.1%} of {row['order'].pairs}", keep=6),
    ]
    rows: list[dict[str, Any]] = []
    for each in choices:
        rows.append({"of": each.what, "regret": each.ours, "order": each.order})
        rows.append({"of": f"{each.what}, the peer", "regret": each.peer, "order": each.peer_order})
    show(lay_out(columns, rows, width()), ["bold underline"])
    agreed = sum(each.agrees for each in said)
    show(
        paragraphs(
            [
                f"Published tables: {tables.right} of {tables.pairs} pairs of plans more than 10 % apart are in order.",
                f"Reports of which of two plans was better: {agreed} of {len(said)} ordered as reported; "
                f"{unpriced} more cannot be priced (models, chips or engines that are not modelled).",
            ]
        )
    )
    for report in said:
        if not report.agrees:
            ratio = "without figures" if report.observed is None else f"{report.observed:.2f} times"
            ours = "one cannot run" if report.predicted is None else f"{report.predicted:.2f} times"
            text = f"{report.report} {report.what}: {report.better} over {report.other}, reported {ratio}, said {ours}"
            show(paragraphs([f"differs: {text}{'; ' + report.miss if report.miss else ''}"]))
