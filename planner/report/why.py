"""Sentences: why the first plan wins, what the figures stand for, and what they are not sure of."""

from __future__ import annotations

from typing import Any

from planner.costs.roofline import BOUNDS
from planner.ranking import MEASURED_ERROR, Ranking, error_bar, metric
from planner.report.figures import drafted, load, plural, prompt, short
from planner.request import TIMES
from planner.results import Results
from planner.sensitivity.constants import Constant
from planner.sensitivity.flips import Flip, Sensitivity, buffer
from planner.specs.engine import Engine
from planner.units import GIB, MS

_UNITS = {
    "latency": ("latency_ms", "{} ms", "ms a request"),
    "ttft": ("ttft_ms", "{} ms to the first token", "ms of TTFT"),
    "tpot": ("tpot_ms", "{} ms a token", "ms a token"),
    "throughput": ("tokens_per_s", "{} tokens/s", "chip-ms a token"),
    "cost": ("usd_per_mtok", "${} per million tokens", "$/Mtok"),
}
_COST_WITHOUT_PRICE = ("gpu_s_per_token", "{} chip-s a token", "chip-ms a token")
_REFUSED_BY = {
    "rule": "rule", "memory": "memory", "slo": "limits on time", "rate": "the arrival rate", "chips": "number of chips",
}  # fmt: skip
_FLIPS = 2  # constants that the caption names
_PLAIN = {
    "compute": "computing",
    "memory": "reading memory",
    "network": "communication",
    "overhead": "fixed overhead",
    "bubble": "waiting for other stages",
}


def parts_of(ranking: Ranking, index: int) -> dict[str, float]:
    """What a row's goal is made of, by bound: ms of a request or token, chip-ms per output token, $ per million."""
    results, objective = ranking.results, ranking.request.objective
    row = results.row(index)
    answers = max(0, row["osl"] - 1)
    parts = {}
    for bound in BOUNDS:
        ttft, tpot = results.ttft_parts[bound][index] / MS, results.tpot_parts[bound][index] / MS
        if objective == "ttft":
            parts[bound] = ttft
        elif objective == "tpot":
            parts[bound] = tpot
        else:
            parts[bound] = ttft + answers * tpot
            if objective in ("throughput", "cost"):
                parts[bound] *= row["gpus"] / ((row["in_flight"] or row["concurrency"]) * row["osl"])
            if objective == "cost" and row["usd_per_mtok"] is not None:
                parts[bound] *= MS * row["usd_per_mtok"] / row["gpu_s_per_token"]
    return {bound: float(value) for bound, value in parts.items()}


def winner(ranking: Ranking) -> str:
    """One sentence: what the first plan does better than the second, and by how much."""
    results, objective = ranking.results, ranking.request.objective
    first = results.row(0)
    unpriced = objective == "cost" and first["usd_per_mtok"] is None
    column, shown, unit = _COST_WITHOUT_PRICE if unpriced else _UNITS[objective]
    reached = shown.format(short(first[column]))
    if len(results) == 1:
        return f"{first['plan']} is the only plan left: {reached}, most of it {_PLAIN[first['bottleneck']]}."
    second = results.row(1)
    values = metric(results, objective)
    margin = (values[1] / values[0] - 1) * 100
    ours, theirs = parts_of(ranking, 0), parts_of(ranking, 1)
    if margin < 0.05:
        tie_break = (
            f"holds {first['max_concurrency']} requests against {second['max_concurrency']}"
            if first["max_concurrency"] != second["max_concurrency"]
            else "uses no more chips"
        )
        return f"{first['plan']} comes first ({reached}): as fast as {second['plan']}, and {tie_break}."
    saved = max(BOUNDS, key=lambda bound: theirs[bound] - ours[bound])
    return (
        f"{first['plan']} comes first: {reached}, {margin:.1f} % ahead of {second['plan']}, "
        f"for less {_PLAIN[saved]} ({short(ours[saved], 3)} against {short(theirs[saved], 3)} {unit})."
    )


def firmness(found: Sensitivity, ranking: Ranking) -> str:
    """What would put another plan first: the nearest constants, and how many there are; or that none does."""
    head = "Sensitivity at these loads" if _searched(ranking) else "Sensitivity"
    if not found.flips:
        nothing = f"{head}: no single constant within its uncertainty changes the first place"
        if found.nearest is None:
            return f"{nothing}."
        constant, factor, plan, gap = found.nearest
        return f"{nothing}; closest: {_at(constant, factor)} leaves {plan} {gap:.1%} behind.".replace("%", " %")
    named = found.flips[:_FLIPS]
    others = len({flip.constant.path for flip in found.flips} - {flip.constant.path for flip in named})
    more = f"{others} more" if others else "No other"
    looked = plural(found.constants, "constant")
    return f"{head}: {'; '.join(map(_flip, named))}. {more} of {looked} would, each within its uncertainty."


def _flip(flip: Flip) -> str:
    """`PLAN comes first if CONSTANT is above VALUE`; of a collective, how long one takes."""
    constant, up = flip.constant, flip.factor > 1
    first = f"{flip.plan} comes first if"
    if flip.values is None:
        return f"{first} {constant.name} is {'above' if up else 'below'} x{flip.factor:.3g} ({constant.status})"
    now, then, unit = flip.values
    values = [f"{value:.3g} {unit}".rstrip() for value in (now, then)]
    if flip.example is None:
        return (
            f"{first} {constant.name} is {'above' if up else 'below'} {values[1]} ({values[0]} here, {constant.status})"
        )
    _, kernel, op, level, what = constant.path
    return (
        f"{first} one {op.replace('_', '-')} over {level} ({kernel}) takes {'more' if then > now else 'less'} than "
        f"{values[1]} for {buffer(flip.example)} ({values[0]} here, {constant.status}; {what} x{flip.factor:.3g})"
    )


def _at(constant: Constant, factor: float) -> str:
    if constant.value is None:
        return f"{constant.name} x{factor:.3g}"
    now, then = (f"{value:.3g} {constant.unit}".rstrip() for value in (constant.value, constant.value * factor))
    return f"{constant.name} at {then} ({now} here)"


def _searched(ranking: Ranking) -> bool:
    return ranking.request.searches


def question(ranking: Ranking) -> str:
    """What was asked, in a sentence."""
    request, results = ranking.request, ranking.results
    work, first = request.workload, results.row(0)
    at = "concurrency searched" if _searched(ranking) else load(work, first["concurrency"])
    goal = "the Pareto frontier" if request.pareto else request.objective
    where = (
        f"up to {request.gpus} x {request.hardware.name}"
        if request.pareto and request.fewest
        else f"slice {ranking.placement.slice} of {request.hardware.name}"
        if ranking.placement.slice
        else f"{request.gpus} x {request.hardware.name}{_nodes(ranking)}"
    )
    return (
        f"{request.model.name} ({first['weights']} weights, {first['kv_cache']} KV) on {where}, engine "
        f"{request.engine.name} {request.engine.version}; {prompt(work)}, {at}, "
        f"{batching(first)}{drafted(first, work.speculation)}; for {goal}."
    )


def answer(ranking: Ranking) -> str:
    """Which plan, by how much and why, in a sentence."""
    if ranking.request.pareto:
        return "Pareto: no other plan has both a lower TPOT and more tokens/s per chip."
    return _fewest(ranking) if ranking.request.fewest else winner(ranking)


def caption(ranking: Ranking) -> list[str]:
    """The lines below a ranked table: workload, limits, how many plans, why, how sure."""
    lines = [question(ranking), f"{counts(ranking)}; {kept(ranking)}.", answer(ranking), *meaning(ranking)]
    return [*lines, *idle(ranking), " ".join([*_ties(ranking), *notes(ranking)])]


def meaning(ranking: Ranking) -> list[str]:
    """What the figures of a load that comes, and of lengths that differ, stand for."""
    return [*_arriving(ranking), *_differing(ranking)]


def notes(ranking: Ranking) -> list[str]:
    """What the figures are not sure of, and where they come from, beside what counts as a tie."""
    request, results = ranking.request, ranking.results
    first = results.row(0)
    found = [*_loaded_ttft(ranking), *extrapolated(request.engine, results)]
    found += bounds(request.engine)
    found += unmeasured(results)
    if request.model.unverified or (request.model.published and request.model.published.unverified):
        found.append(f"Facts of {request.model.name} marked unverified: see `plan show {request.model.name}`.")
    if request.objective == "cost" and first["usd_per_mtok"] is None:
        found.append(f"No price for {request.hardware.name}: ranked by chip-seconds per token (--price gives one).")
    elif request.hardware.price and request.usd_per_chip_hour is None:
        listed = request.hardware.price
        found.append(f"$ at {listed.usd_per_chip_hour:g} per chip-hour ({listed.offer}, {listed.date}).")
    return found


def _nodes(ranking: Ranking) -> str:
    """How many whole nodes the chips of the first plan are, where their number was sought."""
    domain = ranking.request.hardware.domain
    if not ranking.request.fewest or domain is None or ranking.request.hardware.torus is not None:
        return ""
    return f" ({plural(-(-ranking.request.gpus // domain), 'node')} of {domain})"


def _fewest(ranking: Ranking) -> str:
    """One sentence: how many chips suffice for what, and what the next plan needs."""
    request, results = ranking.request, ranking.results
    first, work = results.row(0), request.workload
    if work.arrival_rate is not None:
        what = f"serve {short(work.arrival_rate)} requests/s"
    elif work.concurrency is not None:
        what = f"run {plural(work.concurrency, 'request')} at once"
    else:
        what = "are the smallest deployment (no --arrival-rate or --concurrency: one request must keep the limits)"
    text = f"{plural(first['gpus'], 'chip')} {what}, as {first['plan']}"
    others = [row for row in results.rows()[1:] if row["gpus"] > first["gpus"]]
    if others:
        text += f"; {others[0]['plan']} needs {others[0]['gpus']}"
    if len(results) > 1 and results.row(1)["gpus"] == first["gpus"]:
        text += f". On as many chips {results.row(1)['plan']} does too: the better for {request.objective} stands first"
    return f"{text}."


def _arriving(ranking: Ranking) -> list[str]:
    """What an arrival rate means for the first plan, and what its wait is."""
    rate, first = ranking.request.workload.arrival_rate, ranking.results.row(0)
    if rate is None:
        return []
    limited = any(getattr(ranking.request.limits, name) is not None for name in TIMES)
    most = f"{short(rate / first['utilisation'])} requests/s" + (" within the limits" if limited else "")
    queue = "M/D/1" if ranking.request.workload.lengths is None else "M/G/1"
    return [
        f"{first['plan']}: {short(first['in_flight'])} requests in flight on average, as many as come in the time of "
        f"one; it sustains at most {most}, of which this is {first['utilisation']:.0%}. Queue: the mean wait for "
        f"earlier prompts ({queue}: Poisson arrivals, prompts take {first['prefill_utilisation']:.0%} of a replica's "
        "time), beside TTFT and latency; --max-ttft and --max-latency hold with it. Percentiles, and waiting for KV "
        "room when more are in flight than on average, are not in it."
    ]


def _differing(ranking: Ranking) -> list[str]:
    """What the times stand for where lengths differ."""
    work, first = ranking.request.workload, ranking.results.row(0)
    if work.lengths is None:
        return []
    text = "Times are means over the lengths"
    if first["ttft_p90_ms"] is not None:
        longer = short(work.isl * work.lengths.p90)
        text += f"; TTFT of {first['plan']} is {short(first['ttft_p90_ms'])} ms for a prompt of {longer} tokens"
    return [f"{text}; decodes are met at the context of long answers, which stay longer."]


def counts(ranking: Ranking, where: str = "; --rejected says why") -> str:
    """How many plans there are and what became of them; the parts add up to the whole; `where` the reasons stand."""
    limits = [refused.limit for refused in ranking.refused]
    refused = len(limits)
    total = ranking.plans + limits.count("rule")  # what a rule refuses is not priced
    text = plural(total, "plan")
    if ranking.points > ranking.plans - limits.count("memory"):
        text += f" (priced at {ranking.points} loads in all)"
    text += f": {total - refused} {'compared' if ranking.request.pareto else 'ranked'}"
    if refused:
        kinds = ", ".join(f"{limits.count(kind)} by {word}" for kind, word in _REFUSED_BY.items() if kind in limits)
        text += f", {refused} refused ({kinds}{where})"
    return text


def _ties(ranking: Ranking) -> list[str]:
    """What the mark of a tie means; rows of a frontier are not in an order of which neighbours could be ties."""
    if ranking.request.pareto or not any(tie is not None for tie in ranking.results["tie"]):
        return []
    engine, bar = ranking.request.engine, error_bar(ranking.request)
    if engine.calibrated is None and bar == MEASURED_ERROR:
        known = f"error assumed: nobody can measure {engine.name}"
    elif bar == MEASURED_ERROR:
        known = "measured: see plan validate"
    else:
        known = "error assumed: nothing like it was measured"
    if ranking.request.objective == "ttft" and bar == MEASURED_ERROR:
        known = f"{known}; TTFT at light load is off by as much"
    return [f"~ = within {bar:.0%} of the row above: a tie ({known})."]


def unmeasured(results: Results) -> list[str]:
    """Groups of constants behind some of these rows that nobody measured."""
    names = dict.fromkeys(name for text in results["assumed"] for name in (text or "").split(", ") if name)
    return [f"Assumed, not measured: {', '.join(names)}."] if names else []


def bounds(engine: Engine) -> list[str]:
    """What the figures of an engine are that stands for no software."""
    if engine.calibrated is not None or engine.host.step_us or engine.host.per_sequence_us:
        return []
    return [f"Engine {engine.name} has no host time: the figures are bounds that no product reaches."]


def batching(row: dict[str, Any]) -> str:
    """How requests are batched, and arrive, as a row has it."""
    if row["schedule"] == "static":
        return "static batching"
    return f"continuous batching{', requests in waves' if row['arrivals'] == 'waves' else ''}"


def extrapolated(engine: Engine, results: Results) -> list[str]:
    """What of these rows lies beyond the measurements behind the engine's constants, and in how many of them."""
    within = engine.calibrated
    counts: dict[str, int] = {}
    for text in results["extrapolates"]:
        for name in (text or "").split(", "):
            if name:
                counts[name] = counts.get(name, 0) + 1
    if within is None or not counts:
        return []
    stages = "one stage" if within.pp == 1 else f"to {within.pp} stages"
    reach = (
        f"{', '.join(within.hardware)}; TP to {within.tp}, {stages}, batches to {within.batch}, prompts to {within.isl}"
    )
    found = ", ".join(name if count == len(results) else f"{name} in {count}" for name, count in counts.items())
    rows = "this plan" if len(results) == 1 else f"{len(results)} rows"
    other = "" if within.same_version else ", of another version"
    return [f"Extrapolated: {engine.name}'s constants were measured on {reach}{other}; beyond it ({rows}): {found}."]


def _loaded_ttft(ranking: Ranking) -> list[str]:
    """What TTFT leaves out, where something was decided by it at a load at which that counts."""
    request = ranking.request
    decides = request.objective == "ttft" or request.limits.ttft is not None
    if not decides or not (ranking.results["concurrency"] > 1).any():
        return []
    if request.workload.arrival_rate is not None:
        return ["TTFT is not calibrated under load."]
    return ["TTFT leaves out waiting in a queue and is not calibrated under load."]


def kept(ranking: Ranking) -> str:
    """The limits that every ranked plan keeps."""
    limits = ranking.request.limits
    budget, chip = ranking.results.row(0)["memory_limit_gib"], ranking.request.hardware.chip.memory_bytes / GIB
    texts = [f"{budget:.1f} of {chip:.1f} GiB per chip"]
    texts += [
        f"{name} <= {getattr(limits, name) / MS:g} ms"
        for name in ("ttft", "tpot", "latency")
        if getattr(limits, name) is not None
    ]
    return "limits: " + ", ".join(texts)


def idle(ranking: Ranking) -> list[str]:
    """A sentence where chips of the first plan have nothing to do."""
    first = ranking.results.row(0)
    replicas = min(first["dp"], first["concurrency"])
    busy = replicas * first["tp"] * first["pp"] * first["cp"]
    if busy >= first["gpus"]:
        return []
    reason = (
        f"{plural(first['concurrency'], 'request')} in flight can keep only {replicas} of {first['dp']} replicas busy"
        if replicas < first["dp"]
        else f"{first['plan']} leaves {first['idle_gpus']} of {first['gpus']} chips idle, which are paid for"
    )
    return [f"{reason}: {busy} chips suffice for this."]
