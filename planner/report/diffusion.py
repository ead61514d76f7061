"""`plan` and `plan explain` of diffusion transformers: tables and the sentences below them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.costs.roofline import BOUNDS
from planner.diffusion.counting import volumes
from planner.diffusion.crossing import Crossing
from planner.diffusion.job import grid_of
from planner.diffusion.plan import Split
from planner.diffusion.ranking import COLUMNS, Priced, Ranking, Refused, Request, value_of
from planner.diffusion.weights import parameters
from planner.report.figures import plural, short
from planner.report.table import COLOURS, Column, Row, lay_out, paragraphs, print_rows, show, width
from planner.specs.dtypes import ACTIVATION_BYTES
from planner.units import GIB, MS

_PLAIN = {
    "compute": "computing", "memory": "reading memory", "network": "communication", "overhead": "fixed overhead",
    "bubble": "waiting for other stages",
}  # fmt: skip
_METHODS = {
    "tp": "TP",
    "distrifusion": "DistriFusion",
    "ring": "Ring",
    "ulysses": "Ulysses",
    "pipefusion": "PipeFusion",
}
FEW_STEPS = 0.1
"""Share of the steps above which a warm-up is worth a word."""


def _columns(rows: Sequence[Row], video: bool) -> list[Column]:
    columns = [
        Column("#", lambda row: f"{'~' if row['tie'] else ''}{row['rank'] or ''}"),
        Column("plan", lambda row: f"{row['plan']}{'*' if row['stale'] else ''}", right=False),
        Column("latency s", lambda row: short(row["latency_ms"] * MS)),
        Column("step ms", lambda row: short(row["step_ms"]), keep=6),
        Column("speed-up", lambda row: f"{row['speedup']:.2f}" if row["speedup"] else "-", keep=7),
        Column("image/s", lambda row: short(row["images_per_s"]), keep=5)
        if not video
        else Column("video s/s", lambda row: short(row["video_s_per_s"]), keep=5),
        Column("$/image" if not video else "$/video", lambda row: short(row["usd_per_image"], 3), keep=4)
        if any(row["usd_per_image"] is not None for row in rows)
        else None,
        Column("network %", lambda row: f"{100 * row['network_ms'] / row['latency_ms']:.1f}", keep=3),
        Column("hidden %", lambda row: f"{100 * row['hidden_network_ms'] / row['latency_ms']:.1f}", keep=2),
        Column("pipe %", lambda row: f"{100 * row['efficiency']:.1f}" if row["pipefusion"] > 1 else "-", keep=3),
        Column("GiB/chip", lambda row: f"{row['memory_gib']:.1f}", keep=4),
        Column("bound", lambda row: row["bottleneck"], right=False, keep=5),
    ]
    return [column for column in columns if column is not None]


def print_ranking(ranking: Ranking, shown: Sequence[Row]) -> None:
    """The first rows and their caption."""
    lines = lay_out(_columns(shown, ranking.request.model.is_video), shown, width())
    show(lines, ["bold underline", *(COLOURS.get(row["bottleneck"], "") for row in shown)])
    texts = caption(ranking)
    if len(shown) < len(ranking.rows):
        texts = [f"... {plural(len(ranking.rows) - len(shown), 'more plan')} (--top 0 shows all).", *texts]
    show(paragraphs(texts))


def caption(ranking: Ranking) -> list[str]:
    """What was asked, why the first wins, what stale plans cost in quality, and what is assumed."""
    request = ranking.request
    refused: dict[str, int] = {}
    for one in ranking.refused:
        refused[one.rule] = refused.get(one.rule, 0) + 1
    by = ", ".join(f"{count} by {rule}" for rule, count in sorted(refused.items(), key=lambda item: -item[1]))
    texts = [
        what(request, ranking.setting.weights),
        f"{plural(ranking.plans, 'plan')}: {len(ranking.rows)} ranked, {len(ranking.refused)} refused"
        + (f" ({by}; --rejected says why)" if by else "") + ".",
        winner(ranking),
    ]  # fmt: skip
    texts += stale_words(request, [row for row in ranking.rows if row["stale"]])
    texts.append(
        "~ = within 10% of the row above: a tie (measured: see plan validate --diffusion). "
        + assumed(request, ranking.setting.formats.compute)
    )
    return texts


def what(request: Request, weights: str) -> str:
    """One sentence: model, machine, size, steps, goal."""
    model, job = request.model, request.job
    grid = grid_of(model, job)
    frames = f"x{job.frames} frames" if model.is_video else ""
    passes = "two passes a step (guidance)" if model.guidance else "one pass a step"
    return (
        f"{model.name} ({short(parameters(model) / 1e9, 3)}B, {weights}) on {request.gpus} x {request.hardware.name}, "
        f"engine {request.sampler.name} {request.sampler.version}; {job.width}x{job.height}{frames}: {grid.tokens} "
        f"tokens and {model.text_tokens} of text; {plural(job.steps, 'step')}, {passes}; for {request.objective}."
    )


def winner(ranking: Ranking) -> str:
    """Why the first plan comes first."""
    first, request = ranking.rows[0], ranking.request
    reached = f"{short(first['latency_ms'] * MS)} s"
    if request.objective != "latency":
        reached = f"{short(first['images_per_s'])} {'videos' if request.model.is_video else 'images'}/s"
    if len(ranking.rows) == 1:
        return f"{first['plan']} is the only plan left: {reached}, most of it {_PLAIN[first['bottleneck']]}."
    second = ranking.rows[1]
    margin = value_of(request, second) / value_of(request, first) - 1
    if margin < 5e-4:
        return f"{first['plan']} comes first ({reached}), as good as {second['plan']}."
    saved = max(BOUNDS, key=lambda bound: second[f"{bound}_ms"] - first[f"{bound}_ms"])
    ours, theirs = short(first[f"{saved}_ms"], 3), short(second[f"{saved}_ms"], 3)
    why = f", for less {_PLAIN[saved]} ({ours} against {theirs} ms)"
    if second[f"{saved}_ms"] <= first[f"{saved}_ms"]:
        why = ""
    return f"{first['plan']} comes first: {reached}, {margin:.1%} ahead of {second['plan']}{why}."


def stale_words(request: Request, stale: Sequence[Row]) -> list[str]:
    """The quality risk of methods that reuse activations of the step before."""
    if not stale:
        return []
    known = request.model.stale_limit or f"no figures are known to us for {request.model.name}"
    text = (
        f"* attends to keys and values that are partly one step old, so the picture is not the model's own. Quality: "
        f"{known}. --exact leaves these out."
    )
    job = request.job
    if job.warmup / job.steps > FEW_STEPS:
        text += (
            f" With {plural(job.steps, 'step')} there is little to reuse: {job.warmup / job.steps:.0%} of them are "
            "warm-up, and successive steps differ more."
        )
    return [text]


def assumed(request: Request, compute: str) -> str:
    """What of the machine and the model is assumed; `compute` is the arithmetic of products with the weights."""
    found = []
    if request.sampler.host.provenance.status == "assumed":
        found.append(f"{request.sampler.name}'s host time")
    native = request.hardware.chip.native_dtype
    found += [
        kind for kind, dtype in (("gemm", compute), ("attention_prefill", native), ("elementwise", native))
        if request.hardware.constants(kind, dtype)[1].provenance.status == "assumed"
    ]  # fmt: skip
    if any(row.provenance.status == "assumed" for row in request.hardware.collectives):
        found.append("some collectives")
    found += ["text encoders", "VAE"]
    text = f"Assumed, not measured: {', '.join(found)}."
    if request.price is not None:
        text += f" $ at {request.price:g} per chip-hour."
    return text


def print_rejected(refused: Sequence[Refused]) -> None:
    """The refused plans with the reason that binds each."""
    print_rows(["refused", "by", "reason"], [[one.plan.label, one.rule, one.reason] for one in refused])


def item_rows(request: Request, priced: Priced) -> list[dict[str, Any]]:
    """What one plan's time and memory are made of, as CSV and JSON have it."""
    rows: list[dict[str, Any]] = []
    total = priced.latency.total
    for name, parts in sorted(priced.latency.items.items(), key=lambda item: -float(item[1].total)):
        figures = {f"{bound}_ms": float(value) / MS for bound, value in zip(BOUNDS, parts, strict=True)}
        rows.append(
            {"plan": priced.split.label, "part": "time", "item": name, "ms": float(parts.total) / MS,
             "share": float(parts.total) / total, **figures, "gib": None}
        )  # fmt: skip
    memory = priced.memory
    for name, size in memory._asdict().items():
        rows.append(
            {"plan": priced.split.label, "part": "memory", "item": name, "ms": None,
             "share": size / memory.total if memory.total else 0.0, **{f"{bound}_ms": None for bound in BOUNDS},
             "gib": size / GIB}
        )  # fmt: skip
    return rows


def print_explanation(request: Request, ranking: Ranking | None, priced: Priced, weights: str) -> None:
    """Where one plan's time and memory go, what each method would send, and what comes first instead."""
    latency, memory = priced.latency, priced.memory
    columns = [
        Column("item", lambda row: str(row["item"]), right=False),
        Column("ms", lambda row: short(row["ms"])),
        Column("share", lambda row: f"{row['share']:.1%}"),
        *(Column(bound, lambda row, bound=bound: _figure(row[f"{bound}_ms"]), keep=5) for bound in BOUNDS),  # type: ignore[misc]
    ]
    rows = [row for row in item_rows(request, priced) if row["part"] == "time" and row["share"] >= 1e-3]
    print(f"{priced.split.label}: {short(latency.total)} s")
    show(lay_out(columns, rows, width()), ["bold underline"])
    texts = [what(request, weights)]
    text = f"A step takes {short(latency.step / MS)} ms"
    if priced.split.pipefusion > 1:
        text += f"; the pipeline works {latency.efficiency:.1%} of the time (M S / (M S + N - 1)) after the warm-up"
    if latency.hidden:
        text += f"; {short(latency.hidden / MS, 3)} ms of communication hide behind computing"
    texts.append(f"{text}. A chip sends {short(latency.sent / 1e9, 3)} GB a step.")
    parts = {name: size / GIB for name, size in memory._asdict().items() if size / GIB >= 0.005}
    texts.append(
        f"Fullest chip: {' + '.join(f'{name} {size:.2f}' for name, size in parts.items())}; the decoder runs when the "
        f"activations are gone, so {memory.total / GIB:.2f} GiB at the most."
    )
    show(paragraphs(texts))
    print()
    _print_volumes(request, priced.split)
    if ranking is not None and ranking.rows and ranking.rows[0]["plan"] != priced.split.label:
        first = ranking.rows[0]
        behind = latency.total / (first["latency_ms"] * MS) - 1
        show(paragraphs([f"{first['plan']} comes first here: {short(first['latency_ms'] * MS)} s; this takes "
                         f"{behind:.1%} longer."]))  # fmt: skip
    if priced.split.is_stale:
        show(paragraphs(stale_words(request, [{}])))


_VARIES = {"image": "pixels of a side", "frames": "frames", "steps": "steps", "gpus": "chips"}


def crossing_rows(found: Crossing) -> list[dict[str, Any]]:
    """A row for each stretch: what varies, its ends, the next plan, then the plan's columns at the lower end."""
    return [
        {
            "vary": found.axis, "from": each.low, "to": each.high, "next_plan": each.next, "next_behind": each.behind,
            "latency_ms_to": None if each.last is None else each.last["latency_ms"],
            **(dict.fromkeys(COLUMNS) if each.first is None else each.first), "plan": each.plan,
        }
        for each in found.stretches
    ]  # fmt: skip


def print_crossing(found: Crossing) -> None:
    """The stretches as a table and a caption."""
    table = crossing_rows(found)
    columns = [
        Column("from", lambda row: str(row["from"])),
        Column("to", lambda row: str(row["to"])),
        Column("plan", lambda row: str(row["plan"] or "no plan runs"), right=False),
        Column("latency s at from", lambda row: "-" if row["plan"] is None else short(row["latency_ms"] * MS)),
        Column("at to", lambda row: "-" if row["plan"] is None else short(row["latency_ms_to"] * MS)),
        Column("next at to", lambda row: "-" if row["next_behind"] is None else f"+{row['next_behind']:.1%}", keep=5),
        Column("bound", lambda row: row["bottleneck"] or "-", right=False, keep=3),
    ]
    show(lay_out(columns, table, width()), ["bold underline"])
    request, changes = found.request, len([each for each in found.stretches if each.plan]) - 1
    text = (
        f"{request.model.name} on {request.hardware.name}, engine {request.sampler.name}: the best plan for "
        f"{request.objective} by {_VARIES[found.axis]}, patches and copies aside. {plural(changes, 'change')} found "
        f"among {', '.join(map(str, found.values))}."
    )
    show(paragraphs([text]))


def _print_volumes(request: Request, split: Split) -> None:
    """What each method alone would send and hold over these chips: the paper's table with figures."""
    model = request.model
    chips = max(2, split.tp * split.sequence * split.pipefusion * split.distrifusion)
    tokens = grid_of(model, request.job).tokens + (model.text_tokens if model.in_stream else 0)
    passes = 2 if model.guidance and split.cfg == 1 else 1
    each = ACTIVATION_BYTES * passes
    rows = [
        [
            _METHODS[name], f"{each * volume.communication / 1e9:.3f}", volume.overlaps, f"{volume.parameters:.3g}",
            f"{each * 2 * tokens * model.hidden * volume.buffers / GIB:.2f}", "fresh" if volume.fresh else "stale",
        ]
        for name, volume in volumes(tokens, model.hidden, model.depth, chips).items()
    ]  # fmt: skip
    print_rows(
        [f"alone over {chips} chips", "GB a step", "hides behind", "weights", "KV GiB", "attention sees"], rows,
        right=frozenset({"GB a step", "weights", "KV GiB"}),
    )  # fmt: skip


def _figure(value: float | None) -> str:
    return short(value, 3) if value else ""
