"""The page as a whole: what is in it, in which order, and a head that forbids every request."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from planner._version import __version__
from planner.explaining.breakdown import Breakdown, breakdown, plan_of
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.plans.seats import seats
from planner.plans.space import Refused
from planner.ranking import MEASURED_ERROR, Ranking, error_bar
from planner.report.explain import Explanation, best_change, headline, signed, tied
from planner.report.figures import plural, short
from planner.report.page import bars
from planner.report.page.facts import facts, table
from planner.report.page.frontier import frontier
from planner.report.page.markup import Markup, element, joined
from planner.report.page.ranked import plain, ranked
from planner.report.page.script import SCRIPT
from planner.report.page.seating import seating, title_of
from planner.report.page.style import STYLE
from planner.report.placement import captions
from planner.report.why import answer, counts, extrapolated, firmness, idle, kept, notes, question, unmeasured
from planner.request import Request
from planner.sensitivity.flips import Sensitivity

Section = tuple[str, str, Sequence[object]]
"""(id, heading, what is in it)."""


def ranking_page(ranking: Ranking, firm: Sensitivity | None, asked: str) -> str:
    """A ranking as a page: every plan, the frontier, where the first one's time goes, what was refused and assumed.

    Args:
        ranking: with all its rows.
        firm: what would change its first place.
        asked: the command that gives it.
    """
    request, results = ranking.request, ranking.results
    first = breakdown(request, plan_of(results, 0), results.row(0)["concurrency"])
    sections: list[Section] = [
        ("plans", "Plans", (_paragraphs(_sentences(ranking, firm)), ranked(results))),
        ("tradeoff", "Latency against throughput per chip", (_frontier(ranking),)),
        ("time", f"Where the time of {first.plan.label} goes", (bars.times(first),)),
        ("memory", "Memory", (bars.memory(first),)),
        _placed(ranking.placement, first.plan),
        _refused(ranking.refused),
        *_basis(request, first, notes(ranking)),
        _made(asked),
    ]
    label = str(results["plan"][0])
    title = f"{request.model.name} on {_chips(request)}: {label if not request.pareto else 'the Pareto frontier'}"
    return _page(title, answer(ranking), [question(ranking), *idle(ranking)], _tiles(results.row(0)), sections)


def explanation_page(found: Explanation, asked: str) -> str:
    """One plan as a page: where its time and memory go, what would help, what the next does, what is assumed.

    Args:
        found: the plan, explained.
        asked: the command that gives it.
    """
    plan = found.plan
    request = plan.request
    sections: list[Section] = [("time", "Where the time goes", (bars.times(plan),))]
    sections.append(("memory", "Memory", (bars.memory(plan),)))
    known = [effect for effect in found.effects if effect.value is not None]
    if known:
        rows = [
            (effect.change.name, (effect.value, signed(effect.value or 0.0)), (effect.gain, f"{effect.gain:.1%}"),
             str(effect.plan))
            for effect in known
        ]  # fmt: skip
        heads = (("change", False), (plan.goal.unit, True), ("saves", True), ("with plan", False))
        sections.append(
            ("changes", "What would help", (plain("Changes tried, one at a time", heads, rows, "effects"),))
        )
    if found.rival is not None:
        gap = found.rival.goal_value() / plan.goal_value() - 1
        text = (
            f"{found.rival.plan.label} takes {signed(found.rival.goal_value())} {plan.goal.unit}, {plan.plan.label} "
            f"{signed(plan.goal_value())}.{tied(abs(gap), plan)}"
        )
        held = (element("p", text), bars.difference(plan, found.rival))
        sections.append(("difference", f"Against {found.rival.plan.label}", held))
    sections += [_placed(plan.setting.placement, plan.plan), *_basis(request, plan, _unsure(plan)), _made(asked)]
    title = f"{request.model.name} {plan.plan.label} on {_chips(request)}, explained"
    said = best_change(plan, found.effects) if known else headline(found)
    return _page(title, said, [headline(found)] if known else [], _tiles(plan.row), sections)


def _page(
    title: str, said: str, below: Sequence[str], tiles: Markup, sections: Sequence[Section]
) -> str:  # fmt: skip
    """The document. Its policy allows its own script and style, by their hashes, and nothing else from anywhere."""
    style, script = Markup(STYLE), Markup(SCRIPT)
    policy = f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", style),
    )
    links = [element("a", heading, href=f"#{name}") for name, heading, _ in sections]
    held = [element("section", element("h2", heading), *parts, id=name) for name, heading, parts in sections]
    main = element(
        "main",
        element("h1", title),
        element("p", said, class_="answer"),
        *(element("p", text) for text in below),
        tiles,
        element("nav", *links, aria_label="Sections"),
        *held,
    )
    body = element("body", main, element("script", script))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    """What a policy calls an inline script or style."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _paragraphs(texts: Sequence[str]) -> Markup:
    return joined(element("p", text) for text in texts)


def _sentences(ranking: Ranking, firm: Sensitivity | None) -> list[str]:
    """How many plans, which limits, how firm."""
    found = [f"{counts(ranking, '; the reasons are below')}; {kept(ranking)}."]
    return [*found, firmness(firm, ranking)] if firm is not None else found


def _frontier(ranking: Ranking) -> Markup:
    if ranking.request.workload.osl == 1:
        return element("p", "Answers of one token have no TPOT, so there is nothing to draw.")
    return frontier(ranking)


def _tiles(row: dict[str, Any]) -> Markup:
    """The figures of a plan that are looked at first."""
    shown = (
        (row["plan"], f"plan, load {row['concurrency']}"),
        (f"{short(row['ttft_ms'])} ms", "TTFT"),
        (None if row["tpot_ms"] is None else f"{short(row['tpot_ms'])} ms", "TPOT"),
        (f"{short(row['latency_ms'])} ms", "latency"),
        (short(row["tokens_per_s"]), "tokens/s"),
        (short(row["tokens_per_s_per_gpu"]), "tokens/s per chip"),
        (None if row["usd_per_mtok"] is None else f"${short(row['usd_per_mtok'], 3)}", "per million tokens out"),
        (f"{row['memory_gib']:.1f} GiB", f"of {row['memory_limit_gib']:.1f} GiB a chip"),
    )
    tiles = [element("li", element("b", value), element("span", what)) for value, what in shown if value is not None]
    return element("ul", *tiles, class_="tiles")


def _chips(request: Request) -> str:
    return f"{request.gpus} x {request.hardware.name}"


def _placed(placement: Placement, plan: Plan) -> Section:
    found = seats(placement, plan)
    caption = element("figcaption", f"{title_of(placement, plan)}. {' '.join(captions(placement, plan, found))}")
    picture = element("div", seating(placement, plan), class_="scroll", tabindex="0", role="region", aria_label="Chips")
    return "placement", f"Which chip does what in {plan.label}", (element("figure", picture, caption),)


def _refused(refused: Sequence[Refused]) -> Section:
    if not refused:
        return "refused", "Refused", (element("p", "No plan was refused."),)
    kinds = {"rule": "rule", "memory": "memory", "slo": "limit on time"}
    rows = [(one.plan.label, kinds.get(one.limit, one.limit), one.reason) for one in refused]
    held = plain("Plans that were refused", (("plan", False), ("by", False), ("reason", False)), rows, "refusals")
    return "refused", f"Refused: {plural(len(refused), 'plan')}", (held,)


def _unsure(plan: Breakdown) -> list[str]:
    return [*extrapolated(plan.request.engine, plan.results), *unmeasured(plan.results)]


def _basis(request: Request, plan: Breakdown, more: Sequence[str]) -> list[Section]:
    """What the figures stand on: the measured error, and every constant."""
    known = facts(request, plan.setting.formats)
    doubtful = sum(not fact.sure for fact in known)
    bar = error_bar(request)
    within = request.engine.calibrated
    if within is None and bar == MEASURED_ERROR:
        basis = f"Nobody can measure {request.engine.name}; plans within {bar:.0%} of each other count as a tie (~)."
    elif bar == MEASURED_ERROR:
        basis = (
            f"Plans within {bar:.0%} of each other count as a tie (~): nine tenths of measured times of tokens on runs "
            "that no constant was fitted to are less than 11 % off (plan validate has all of them)."
        )
    else:
        basis = f"Plans within {bar:.0%} of each other count as a tie (~): nothing quite like this was measured."
    count = (
        f"{plural(len(known), 'constant')} in use; {doubtful} of them assumed, unverified or without a source, marked "
        "with ! and a dashed frame. `off by` is the mean error that was seen where a constant was fitted or measured."
    )
    box = element("input", type="checkbox", id="only")
    only = element("label", box, "only what is assumed or unverified", class_="only")
    return [
        ("error", "How far off it may be", (_paragraphs([basis, *more]),)),
        ("assumptions", "What is assumed", (element("p", count), only, table(known))),
    ]


def _made(asked: str) -> Section:
    version = element(
        "p", f"plan {__version__}, without any request to a network; the same command gives the same page."
    )
    return "made", "How this page was made", (element("p", element("code", asked)), version)
