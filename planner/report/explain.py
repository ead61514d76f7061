"""`plan explain` as tables and sentences, and as rows for CSV and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from planner.costs.roofline import BOUNDS
from planner.costs.serving import JOIN, OTHERS, OWN, STEP
from planner.costs.speculation import DRAFT
from planner.explaining.breakdown import Breakdown, Item, Times, floored, summed
from planner.explaining.changes import OPEN_TO_ALL, Effect
from planner.explaining.difference import Line, brought_together, lines
from planner.ranking import error_bar
from planner.report.figures import drafted, load, plural, prompt, short
from planner.report.placement import print_placement
from planner.report.table import COLOURS, Column, lay_out, paragraphs, show, width
from planner.report.why import batching, extrapolated
from planner.units import GIB, MS

LEAST = 0.005
"""Share of a time below which items are put together."""
SHOWN_CHANGES = 6
FAR = 100
SAME = 1e-9
BAR = 40
PHASES = {OTHERS: "other prompts' passes", JOIN: "request, step in flight"}
"""Phases that a table has as one row, and how they are called there."""
LIMITS = {
    "compute": "its arithmetic at the chip's peak",
    "memory": "reading its weights and KV once at the chip's peak",
    "network": "what it sends at the rate of the wires",
}


class Explanation(NamedTuple):
    """One plan explained."""

    plan: Breakdown
    place: int | None
    """Its place in the ranking; none where it is not in it."""
    plans: int
    """Plans of the ranking."""
    effects: list[Effect]
    """Changes, the most helpful first."""
    rival: Breakdown | None
    """The runner-up of the winner; of another plan the winner."""


ROW = (
    "section", "plan", "against", "phase", "item", "time_ms", "share", "bound", *(f"{bound}_ms" for bound in BOUNDS),
    "flops", "weight_bytes", "kv_bytes", "activation_bytes", "sent_bytes", "floor_ms", "floor_bound", "gib", "value",
    "other_value", "difference", "unit", "gain", "error",
)  # fmt: skip
"""Columns of CSV and JSON; `section` says which of them a row has."""


def rows(found: Explanation) -> list[dict[str, Any]]:
    """Every item of TTFT and TPOT, of the memory, every change, and the difference to the other plan."""
    plan = found.plan
    label = plan.plan.label
    made = []
    for section, times in (("ttft", plan.ttft), ("tpot", plan.tpot)):
        made += [{"section": section, "plan": label, **_item_row(item, times.total)} for item in times.items]
    made += [
        {"section": "memory", "plan": label, "item": what, "gib": held / GIB} for what, held in plan.memory.items()
    ]
    for effect in found.effects:
        refused = effect.value is None
        made.append(
            {
                "section": "change", "plan": effect.plan, "phase": effect.change.kind, "item": effect.change.name,
                "value": effect.value, "unit": plan.goal.unit, "gain": None if refused else effect.gain,
                "error": effect.error,
            }
        )  # fmt: skip
    if found.rival is not None:
        for line in lines([plan, found.rival]):
            made.append(
                {
                    "section": "difference", "plan": label, "against": found.rival.plan.label, "phase": line.phase,
                    "item": line.item, "value": line.values[0], "other_value": line.values[1],
                    "difference": line.differences[1], "unit": plan.goal.unit,
                }
            )  # fmt: skip
    return [dict.fromkeys(ROW) | row for row in made]


def _item_row(item: Item, total: float) -> dict[str, Any]:
    return {
        "phase": item.phase,
        "item": item.name,
        "time_ms": item.seconds / MS,
        "share": item.seconds / total if total else None,
        "bound": item.bound,
        **{f"{bound}_ms": item.parts[bound] / MS for bound in BOUNDS},
        **{name: item.work[name] for name in ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "sent_bytes")},
        "floor_ms": item.floor / MS,
        "floor_bound": item.floor_bound if item.floor > 0 else None,
    }


def print_explanation(found: Explanation) -> None:
    """Everything about one plan."""
    plan = found.plan
    show(paragraphs([headline(found), *extrapolated(plan.request.engine, plan.results)]))
    for name, times in (("TTFT", plan.ttft), ("TPOT", plan.tpot)):
        if not times.items:
            continue
        print(f"\n{name} {short(times.total / MS)} ms")
        _print_times(plan, times)
        if name == "TPOT" and plan.row["tokens_per_step"] is not None:
            show(paragraphs([_speculated(plan, times)]))
        show(paragraphs([floor_sentence(plan, floored(times))]))
    print("\nMemory of the fullest chip, GiB")
    _print_memory(plan)
    if found.effects:
        print()
        _print_effects(plan, found.effects)
    if found.rival is not None:
        print()
        _print_difference(plan, found.rival)
    print()
    print_placement(plan.setting.placement, plan.plan)


def headline(found: Explanation) -> str:
    """Which plan, for what, and what it takes, in a sentence."""
    plan, request, row = found.plan, found.plan.request, found.plan.row
    work = request.workload
    place = "" if found.place is None else f" (number {found.place} of {plural(found.plans, 'plan')})"
    made = f"TTFT {short(row['ttft_ms'])} ms"
    if row["tpot_ms"] is not None:
        made += f" + {work.osl - 1} x TPOT {short(row['tpot_ms'])} ms"
    goal = "" if request.objective == "latency" else f"; for {request.objective}: {_goal(plan)}"
    return (
        f"{request.model.name} {plan.plan.label}{place} on {request.gpus} x {request.hardware.name}, "
        f"{request.engine.name} {request.engine.version}, {row['weights']} weights, {row['kv_cache']} KV; "
        f"{prompt(work)}, {load(work, row['concurrency'])}, {batching(row)}{drafted(row, work.speculation)}: "
        f"{short(row['latency_ms'])} ms a request = {made}{goal}."
    )


def _goal(plan: Breakdown) -> str:
    return f"{short(plan.goal_value())} {plan.goal.unit}"


def shown_items(times: Times) -> list[Item]:
    """The items of the prompt's own passes or of a decode step, the largest first; other phases as one each."""
    own = [item for item in times.items if item.phase in (OWN, STEP)]
    kept = [item for item in own if item.seconds >= LEAST * times.total]
    rest = tuple(item for item in own if item.seconds < LEAST * times.total)
    found = sorted(kept, key=lambda item: -item.seconds)
    if rest:
        found.append(summed("", plural(len(rest), "other"), rest))
    for phase, text in PHASES.items():
        if phase in times.phases:
            found.append(summed(phase, text, times.phase(phase).items))
    return found


def floor_of(item: Item) -> float:
    """Seconds of an item's floor where it says something, as in the tables: else 0."""
    own = item.phase in ("", OWN, STEP)
    return item.floor if own and item.seconds < FAR * item.floor else 0.0


def _print_times(plan: Breakdown, times: Times) -> None:
    """A row for each of `shown_items`."""
    table = shown_items(times)
    records = [_record(item, times.total) for item in table]
    columns = [
        Column("item", lambda each: str(each["item"]), right=False),
        Column("ms", lambda each: str(each["ms"])),
        Column("share", lambda each: str(each["share"])),
        Column("bound", lambda each: str(each["bound"]), right=False, keep=7),
        Column("GFLOP", lambda each: str(each["gflop"]), keep=3),
        Column("MB read", lambda each: str(each["read"]), keep=4),
        Column("MB sent", lambda each: str(each["sent"]), keep=2),
        Column("floor ms", lambda each: str(each["floor"]), keep=5),
        Column("x floor", lambda each: str(each["ratio"]), keep=6),
    ]
    show(lay_out(columns, records, width()), ["bold underline", *(COLOURS.get(item.bound, "") for item in table)])


def _record(item: Item, total: float) -> dict[str, str]:
    work = item.work
    read = work["weight_bytes"] + work["kv_bytes"] + work["activation_bytes"]
    # of what others add only the time counts: it is a difference between passes
    plain = item.phase in ("", OWN, STEP)
    floor = item.floor if plain else 0.0
    return {
        "item": item.name,
        "ms": signed(item.seconds / MS),
        "share": f"{item.seconds / total:.1%}",
        "bound": item.bound if item.seconds else "-",
        "gflop": _or_dash(work["flops"] / 1e9, plain),
        "read": _or_dash(read / 1e6, plain),
        "sent": _or_dash(work["sent_bytes"] / 1e6, plain),
        "floor": _or_dash(floor / MS, plain),
        "ratio": _ratio(item.seconds, floor),
    }


def _speculated(plan: Breakdown, times: Times) -> str:
    """One sentence: what of a step is spent on drafts, what on verification, and what a step yields."""
    per_step, step = plan.row["tokens_per_step"], times.phase(STEP)
    spent = sum(item.seconds for item in step.items if item.name.startswith(DRAFT)) * per_step / MS
    whole, tokens = step.total * per_step / MS, plan.row["spec_tokens"]
    return (
        f"A step yields {short(per_step)} tokens of a request: {short(whole)} ms, of which {short(spent)} ms to draft "
        f"{plural(tokens, 'token')} and {short(whole - spent)} ms to verify {tokens + 1}; each item above is its share "
        "of one token."
    )


def _ratio(seconds: float, floor: float) -> str:
    """How many times its floor an item takes; a hundred times is no floor (activations could stay on the chip)."""
    if not 0 < floor <= seconds:
        return "-"
    return f"{seconds / floor:.1f}" if seconds < FAR * floor else f">{FAR}"


def _or_dash(value: float, known: bool) -> str:
    return short(value, 3) if known and value > 0 else "-"


def signed(value: float, digits: int = 4) -> str:
    """A figure that may be below 0."""
    return f"-{short(-value, digits)}" if value < 0 else short(value, digits)


def floor_sentence(plan: Breakdown, times: Times) -> str:
    """One sentence: what physics sets for a pass as a whole."""
    whole = times.whole
    what = "decode step" if times.phases == [STEP] else "prompt's own passes"
    if whole.floor <= 0:
        return f"Floor of the {what}: none."
    through = ""
    if plan.plan.pp > 1:
        batch, depth = plan.row["batch_per_replica"], plan.plan.pp
        cut = 1 if plan.request.engine.scheduler.microbatches == "whole" else min(depth, batch)
        micro = f" of one microbatch of {plural(-(-batch // cut), 'request')}" if what == "decode step" else ""
        through = f"{micro} through all {depth} stages"
    return (
        f"Floor of the {what}{through}: {short(whole.floor / MS)} ms, {LIMITS[whole.floor_bound]}; it takes "
        f"{short(times.total / MS)} ms, {short(times.total / whole.floor, 3)} times that."
    )


def _print_memory(plan: Breakdown) -> None:
    budget = plan.setting.budget.limit
    columns = [
        Column("part", lambda each: str(each["what"]), right=False),
        Column("GiB", lambda each: f"{each['held'] / GIB:.2f}"),
        Column("share of the budget", lambda each: str(each["bar"]), right=False, keep=1),
    ]
    records = [
        {"what": what, "held": held, "bar": f"{'#' * max(0, round(held / budget * BAR)):<{BAR}} {held / budget:6.1%}"}
        for what, held in plan.memory.items()
    ]
    show(lay_out(columns, records, width()), ["bold underline"])


def _print_effects(plan: Breakdown, tried: Sequence[Effect]) -> None:
    """The one change that helps most, and the table it heads."""
    goal = plan.goal
    known = [effect for effect in tried if effect.value is not None]
    if not known:
        return
    show(paragraphs([best_change(plan, tried)]))
    records = [
        {
            "change": effect.change.name,
            "goal": signed(effect.value or 0.0),
            "saves": f"{effect.gain:.1%}",
            "plan": str(effect.plan),
        }
        for effect in known[:SHOWN_CHANGES]
    ]
    columns = [
        Column("change", lambda each: each["change"], right=False),
        Column(goal.unit, lambda each: each["goal"]),
        Column("saves", lambda each: each["saves"]),
        Column("with plan", lambda each: each["plan"], right=False, keep=3),
    ]
    show(lay_out(columns, records, width()), ["bold underline"])


def best_change(plan: Breakdown, tried: Sequence[Effect]) -> str:
    """The change of the largest gain in a sentence, and, where it is nobody's to make, the best that is."""
    known = [effect for effect in tried if effect.value is not None]
    what, now = f"{plan.goal.what} ({plan.goal.unit})", signed(plan.goal_value())
    first = known[0]
    if first.gain <= 0:
        return f"None of {plural(len(known), 'change')} tried would lower the {what}, {now}."
    text = (
        f"Of {plural(len(known), 'change')} tried, {first.change.name} would help most: {what} {now} to "
        f"{signed(first.value or 0.0)}, {first.gain:.1%} less."
    )
    own = next((effect for effect in known if effect.change.kind in OPEN_TO_ALL), None)
    if first.change.kind not in OPEN_TO_ALL and own is not None and own.gain > 0:
        text += f" With this hardware: {own.change.name}, {own.gain:.1%} less."
    return text


def _print_difference(plan: Breakdown, rival: Breakdown) -> None:
    ours, theirs = plan.goal_value(), rival.goal_value()
    if abs(theirs - ours) <= SAME * ours:
        show(paragraphs([f"{rival.plan.label} takes as long ({signed(theirs)} {plan.goal.unit})."]))
        return
    ahead = theirs >= ours
    text = (
        f"{rival.plan.label}, {'the next' if ahead else 'the first'}, takes {short(abs(theirs / ours - 1) * 100, 3)} % "
        f"{'more' if ahead else 'less'} ({signed(theirs)} against {signed(ours)} {plan.goal.unit})"
    )
    loads = plan.row["concurrency"], rival.row["concurrency"]
    best = "best " if plan.request.searches else ""
    if loads[0] != loads[1]:
        text += f", each at its {best}load ({loads[1]} against {loads[0]} requests)"
    show(paragraphs([f"{text}.{tied(abs(theirs / ours - 1), plan)}"]))
    print_lines(brought_together(lines([plan, rival]), LEAST * ours), [plan.plan.label, rival.plan.label])


def tied(gap: float, plan: Breakdown) -> str:
    """A remark where a lead is within the error of the model."""
    bar = error_bar(plan.request)
    return f" That is a tie: the model is off by {bar:.0%}." if gap <= bar else ""


def print_lines(found: Sequence[Line], labels: Sequence[str]) -> None:
    """Items of several plans side by side with the difference to the first, and the sums."""
    totals = Line("", "all", tuple(sum(values) for values in zip(*(line.values for line in found), strict=True)))
    records = [
        {
            "phase": line.phase,
            "item": line.item,
            **{f"v{index}": signed(value) for index, value in enumerate(line.values)},
            **{f"d{index}": f"{'+' if each > 0 else ''}{signed(each)}" for index, each in enumerate(line.differences)},
        }
        for line in [*found, totals]
    ]

    def cell(key: str) -> Any:
        return lambda each: str(each[key])

    columns = [
        Column("phase", cell("phase"), right=False, keep=7),
        Column("item", cell("item"), right=False),
        *(Column(label, cell(f"v{index}"), keep=5 if index else 6) for index, label in enumerate(labels)),
    ]
    columns += [
        Column("difference" if len(labels) == 2 else f"{label} - {labels[0]}", cell(f"d{index}"), keep=8)
        for index, label in enumerate(labels)
        if index
    ]
    show(lay_out(columns, records, width()), ["bold underline"])
