"""What an answer assumes: the constants in use of chip, network, kernels, engine and model, each with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from planner.costs.layers import Formats
from planner.report.figures import significant
from planner.report.page.markup import Markup, element
from planner.report.page.ranked import plain
from planner.request import Request
from planner.specs.engine import Engine, Host
from planner.specs.fields import Provenance
from planner.specs.hardware import LATENT_KINDS, CollectiveKernel, Hardware, KernelConstants
from planner.specs.model import Model
from planner.units import TERA

UNSURE = frozenset(("assumed", "unverified", "no source"))
"""Of `Fact.status`: nobody measured or stated it, as far as its file knows."""
_DOUBTS = ("assum", "unverified")
_UNITS = {"us": "us", "gib": "GiB", "fraction": "share"}
_WORDS = {
    "memory_fraction": "share of memory bandwidth", "compute_fraction": "share of peak compute", "fixed_us": "floor",
    "item_us": "time of a work item", "depth_us": "time of a doubling of the context", "p": "exponent of the norm",
    "speed": "bandwidth against the kernel alone", "step_us": "time of a step", "per_sequence_us": "time of a sequence",
    "layer_us": "time of a layer", "prefill_layer_us": "time of a layer with a prompt",
    "request_us": "time of a request",
}  # fmt: skip
_SCHEDULER = {"chunk_tokens": "tokens", "max_sequences": "requests", "block_tokens": "tokens", "join_steps": "steps"}
_SHAPES = (
    ("layers", "layers"), ("hidden", "hidden"), ("attention heads", "heads"), ("KV heads", "kv_heads"),
    ("head size", "head_dim"), ("FFN width", "ffn"), ("vocabulary", "vocab"), ("longest context", "max_context"),
    ("tied embeddings", "tied"), ("own dtype of the weights", "weights"),
)  # fmt: skip
"""(what, word by which a file's list of unverified facts may name it)."""


class Fact(NamedTuple):
    """One constant."""

    part: str
    name: str
    value: str
    unit: str
    status: str
    """Of its provenance; `stated` where a file only names a source, `unverified` or `no source` where it says so."""
    source: str
    residual: float | None = None
    """Mean absolute relative error that was seen."""

    @property
    def sure(self) -> bool:
        """Whether somebody measured, derived or stated it."""
        return self.status not in UNSURE


def facts(request: Request, formats: Formats) -> list[Fact]:
    """The constants that price a request.

    Args:
        request: model, hardware and engine; a price of its own comes before the hardware's.
        formats: number formats, which decide the kernels.
    """
    hardware, engine = request.hardware, request.engine
    found = [*_chip(hardware, formats), *_network(hardware), *_kernels(request, formats)]
    found += [*_collectives(hardware, engine), *_engine(engine), *_model(request.model)]
    if request.usd_per_chip_hour is not None:
        found.append(Fact("price", "a chip", f"{request.usd_per_chip_hour:g}", "$/h", "stated", "--price"))
    elif hardware.price is not None:
        listed = hardware.price
        where = f"{listed.offer}, {listed.date}; {listed.source}"
        found.append(Fact("price", "a chip", f"{listed.usd_per_chip_hour:g}", "$/h", "stated", where))
    return found


def table(found: list[Fact]) -> Markup:
    """Facts as a table; what is assumed has another mark, another frame and a word."""
    rows: list[tuple[Any, ...]] = [
        (
            f"{fact.part}: {fact.name}",
            fact.value,
            fact.unit,
            _badge(fact),
            "" if fact.residual is None else (fact.residual, f"{fact.residual:.1%}"),
            element("span", fact.source, class_="source"),
        )
        for fact in found
    ]
    heads = (
        ("constant", False), ("value", False), ("unit", False), ("status", False), ("off by", True), ("source", False),
    )  # fmt: skip
    return plain("Constants in use", heads, rows, "facts")


def _badge(fact: Fact) -> Markup:
    words = fact.status if fact.sure else f"! {fact.status}"
    return element("span", words, class_="sure" if fact.sure else "unsure")


def _figure(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return significant(value, 4) if isinstance(value, float) and abs(value) != float("inf") else str(value)


def _stated(part: str, name: str, value: Any, unit: str, source: str | None) -> Fact:
    """A fact of which a file at most names the source."""
    if not source:
        return Fact(part, name, _figure(value), unit, "no source", "")
    doubt = next((word for word in _DOUBTS if word in source.lower()), None)
    status = {None: "stated", "assum": "assumed", "unverified": "unverified"}[doubt]
    return Fact(part, name, _figure(value), unit, status, source)


def _proven(part: str, name: str, value: str, unit: str, known: Provenance) -> Fact:
    source = f"{known.source} ({known.version})" if known.version else known.source
    return Fact(part, name, value, unit, known.status, source, known.residual)


def _unit(key: str) -> str:
    return _UNITS.get(key.rpartition("_")[2], "")


def _chip(hardware: Hardware, formats: Formats) -> Iterator[Fact]:
    chip, sources = hardware.chip, hardware.chip.sources
    for dtype in dict.fromkeys((formats.compute, formats.native)):
        key, what = ("compute_tflops", "dense") if dtype in chip.compute_tflops else ("sparse_factor", "zeros counted")
        yield _stated("chip", f"peak in {dtype}, {what}", chip.peak(dtype) / TERA, "TFLOP/s", sources.get(key))
    yield _stated("chip", "memory", chip.memory_gib, "GiB", sources.get("memory_gib"))
    bandwidth = chip.memory_bandwidth_gb_per_s
    yield _stated("chip", "memory bandwidth", bandwidth, "GB/s", sources.get("memory_bandwidth_gb_per_s"))
    if chip.tdp_w is not None:
        yield _stated("chip", "power", chip.tdp_w, "W", sources.get("tdp_w"))


def _network(hardware: Hardware) -> Iterator[Fact]:
    for level in hardware.network:
        what = "of a wire" if level.kind != "switch" else "of a NIC" if level.nics_per_node else "of a chip"
        source = level.sources.get("bandwidth_gb_per_s")
        yield _stated("network", f"{level.name}, {what}, one way", level.bandwidth_gb_per_s, "GB/s", source)
        if level.chips is not None:
            yield _stated("network", f"{level.name}, chips of a domain", level.chips, "chips", source)
        if level.nics_per_node is not None:
            nics = level.sources.get("nics_per_node", source)
            yield _stated("network", f"{level.name}, NICs of a node", level.nics_per_node, "", nics)


def _kernels(request: Request, formats: Formats) -> Iterator[Fact]:
    """Constants of the kernels that run in these formats, as they are in a step where that differs."""
    hardware = request.hardware
    decode, prefill = LATENT_KINDS if request.model.attention.latent else LATENT_KINDS.values()
    runs = [("gemm", formats.compute), ("gemm", formats.native), (decode, formats.kv.compute)]
    runs += [(prefill, formats.kv.compute), ("elementwise", formats.native)]
    runs += [("grouped_gemm", formats.compute)] if request.model.experts else []
    for kind, dtype in dict.fromkeys((kind, hardware.constants(kind, dtype)[0]) for kind, dtype in runs):
        _, held = hardware.constants(kind, dtype)
        name = f"{kind.replace('_', ' ')} ({dtype})"
        for key in KernelConstants._fields:
            value = getattr(held, key)
            if isinstance(value, int | float) and value and not (key == "fixed_us" and held.in_step):
                yield _proven("kernel", f"{name}, {_WORDS.get(key, key)}", _figure(value), _unit(key), held.provenance)
        if held.in_step is not None:
            for key in ("fixed_us", "speed"):
                value = getattr(held.in_step, key)
                yield _proven(
                    "kernel",
                    f"{name}, {_WORDS.get(key, key)} in a step",
                    _figure(value),
                    _unit(key),
                    held.in_step.provenance,
                )


def _collectives(hardware: Hardware, engine: Engine) -> Iterator[Fact]:
    """What the engine's rules may run, and what hands activations from stage to stage."""
    kernels: dict[str, set[str]] = {}
    for rule in engine.collectives:
        kernels.setdefault(rule.op, set()).update(rule.kernels)
    for row in hardware.collectives:
        if row.op == "send" or row.kernel in kernels.get(row.op, ()):
            name = f"{row.op.replace('_', '-')} over {row.level} ({row.kernel}, {row.algorithm.replace('_', ' ')})"
            latency, share = _collective(row)
            yield _proven("collective", f"{name}, latency", latency, "us", row.provenance)
            yield _proven("collective", f"{name}, share of the bandwidth", share, "share", row.provenance)


def _collective(row: CollectiveKernel) -> tuple[str, str]:
    """(latency, share of the bandwidth), by group size where they were measured so."""
    if row.ranks:
        by_size = sorted(row.ranks.items())
        return (
            "; ".join(f"{_figure(float(each.latency_us))} at {size}" for size, each in by_size),
            "; ".join(f"{_figure(float(each.bandwidth_fraction))} at {size}" for size, each in by_size),
        )
    base = f"{_figure(float(row.base_us))} + " if row.base_us else ""
    inner = "" if row.inner_hop_us is None else f", {_figure(float(row.inner_hop_us))} a step inside"
    return f"{base}{_figure(float(row.hop_us or 0.0))} a step{inner}", _figure(float(row.bandwidth_fraction))


def _engine(engine: Engine) -> Iterator[Fact]:
    for key in Host._fields:
        value = getattr(engine.host, key)
        if isinstance(value, int | float) and value:
            yield _proven("host", _WORDS.get(key, key), _figure(value), "us", engine.host.provenance)
    memory = engine.memory
    yield _proven("engine", "share of the memory it may fill", _figure(memory.fraction), "share", memory.provenance)
    for where, held in (("inside", memory.inside_gib), ("outside", memory.outside_gib)):
        if held:
            text = "; ".join(f"{_figure(float(value))} at {ranks}" for ranks, value in sorted(held.items()))
            yield _proven("engine", f"runtime memory {where} the budget", text, "GiB", memory.provenance)
    scheduler = engine.scheduler
    for key, unit in _SCHEDULER.items():
        value = getattr(scheduler, key)
        if value:
            yield _stated("engine", key.replace("_", " "), value, unit, scheduler.sources.get(key))
    for key in ("prefill", "kv_reservation", "schedule", "arrivals"):
        yield _stated("engine", key.replace("_", " "), getattr(scheduler, key), "", scheduler.sources.get(key))


def _model(model: Model) -> Iterator[Fact]:
    """Shapes; where a file says of something in words what was not verified, all that these words may mean is so."""
    attention = model.attention
    values = (
        model.layers, model.hidden, attention.heads, attention.kv_heads, attention.head_dim, model.ffn.hidden,
        model.vocab, model.max_context, model.tied_embeddings, model.weights,
    )  # fmt: skip
    doubts = [text.lower() for text in model.unverified]
    words = [word for _, word in _SHAPES]
    everything = any(not any(word in text for word in words) for text in doubts)
    source = "; ".join(model.sources)
    for (name, word), value in zip(_SHAPES, values, strict=True):
        if everything or any(word in text for text in doubts):
            yield Fact("model", name, _figure(value), "", "unverified", source)
        else:
            yield Fact("model", name, _figure(value), "", "stated" if source else "no source", source)
    for text in model.unverified:
        yield Fact("model", "not verified", text, "", "unverified", "its file says so")
    if model.published is not None:
        known = model.published
        status = "unverified" if known.unverified else "stated"
        yield Fact("model", "published parameters", f"{known.parameters:,}", "", status, known.source)
