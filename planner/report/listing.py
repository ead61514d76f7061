"""What the catalogue holds: rows for `plan models`, `plan hardware`, `plan engines`, and one file in full."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from typing import Any

from planner.costs.weights import active_parameters, published_parameters
from planner.diffusion.weights import parameters
from planner.specs.catalog import (
    DIFFUSION,
    ENGINES,
    HARDWARE,
    MODELS,
    SAMPLERS,
    load_diffusion,
    load_engine,
    load_hardware,
    load_model,
    load_sampler,
    names,
)
from planner.specs.dtypes import ACTIVATION_BYTES


def models() -> list[dict[str, Any]]:
    """Every model: shapes, derived counts, KV bytes per token in 16 bit; of diffusion transformers their backbone."""
    rows = []
    for name in names(MODELS):
        model = load_model(name)
        rows.append(
            {
                "name": model.name,
                "parameters": published_parameters(model),
                "active_parameters": active_parameters(model),
                "kv_bytes_per_token": int(model.kv_elements_per_token * ACTIVATION_BYTES),
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.attention.heads,
                "kv_heads": model.attention.kv_heads,
                "max_context": model.max_context,
                "weights": model.weights,
                "aliases": " ".join((*model.aliases, *model.hf_ids)),
                "kind": "language",
            }
        )
    for name in names(DIFFUSION):
        shape = load_diffusion(name)
        own = {
            "name": shape.name,
            "parameters": parameters(shape),
            "active_parameters": parameters(shape),
            "layers": shape.depth,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "weights": shape.weights,
            "aliases": " ".join((*shape.aliases, *shape.hf_ids)),
            "kind": "diffusion",
        }
        rows.append(dict.fromkeys(rows[0]) | own)
    return sorted(rows, key=lambda row: str(row["name"]))


def hardware() -> list[dict[str, Any]]:
    """Every kind of hardware: the chip and its innermost network."""
    rows = []
    for name in names(HARDWARE):
        machine = load_hardware(name)
        chip, inner = machine.chip, machine.network[0]
        rows.append(
            {
                "name": machine.name,
                "tflops_16bit": chip.compute_tflops[chip.native_dtype],
                "memory_gib": chip.memory_gib,
                "memory_gb_per_s": chip.memory_bandwidth_gb_per_s,
                "network": f"{inner.kind} {inner.name}",
                "domain_chips": inner.chips,
                "link_gb_per_s": inner.bandwidth_gb_per_s,
                "tdp_w": chip.tdp_w,
                "usd_per_chip_hour": machine.price.usd_per_chip_hour if machine.price else None,
                "engine": machine.engine,
                "aliases": " ".join(machine.aliases),
            }
        )
    return rows


def engines() -> list[dict[str, Any]]:
    """Every engine: version and scheduling."""
    rows = []
    for name in names(ENGINES):
        engine = load_engine(name)
        rows.append(
            {
                "name": engine.name,
                "version": engine.version,
                "prefill": engine.scheduler.prefill,
                "chunk_tokens": engine.scheduler.chunk_tokens,
                "max_sequences": engine.scheduler.max_sequences,
                "attention": " ".join(engine.attention),
                "memory_fraction": engine.memory.fraction,
                "description": engine.description,
                "kind": "language",
            }
        )
    for name in names(SAMPLERS):
        sampler = load_sampler(name)
        own = {
            "name": sampler.name,
            "version": sampler.version,
            "memory_fraction": sampler.memory.fraction,
            "description": sampler.description,
            "kind": "diffusion",
        }
        rows.append(dict.fromkeys(rows[0]) | own)
    return sorted(rows, key=lambda row: str(row["name"]))


def outline(value: Any, indent: int = 0) -> Iterator[str]:
    """A specification as indented lines, `key: value`, defaults that say nothing left out."""
    pad = "  " * indent
    items = value.items() if isinstance(value, dict) else zip(value._fields, value, strict=True)
    for key, item in items:
        if item is None or item in ((), {}):
            continue
        if hasattr(item, "_fields") or isinstance(item, dict):
            yield f"{pad}{key}:"
            yield from outline(item, indent + 1)
        elif isinstance(item, tuple) and hasattr(item[0], "_fields"):
            yield f"{pad}{key}:"
            for element in item:
                lines = list(outline(element, indent + 2))
                yield f"{pad}  - {lines[0].strip()}"
                yield from lines[1:]
        elif isinstance(item, tuple):
            yield f"{pad}{key}: {', '.join(map(str, item))}"
        else:
            yield f"{pad}{key}: {str(item).lower() if isinstance(item, bool) else item}"


def print_outline(spec: Any) -> None:
    """The outline of a specification, wrapped to a terminal; not in a pipe, where lines are searched."""
    from planner.report import table  # noqa: PLC0415 (lists need no table)

    for line in outline(spec):
        room, indent = table.width(), " " * (len(line) - len(line.lstrip()) + 4)
        if len(line) > room and table.is_limited():
            wrapped = textwrap.wrap(line.strip(), room - len(indent), break_on_hyphens=False, break_long_words=False)
            print(textwrap.indent("\n".join(wrapped), indent).removeprefix(" " * 4))
        else:
            print(line)


def nested(value: Any) -> Any:
    """A specification as plain mappings and lists, for JSON; infinity as a text."""
    if hasattr(value, "_fields"):
        return {key: nested(item) for key, item in zip(value._fields, value, strict=True)}
    if isinstance(value, dict):
        return {str(key): nested(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [nested(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """A specification as key paths and values, for CSV."""
    if hasattr(value, "_fields"):
        items: Any = zip(value._fields, value, strict=True)
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    else:
        return {prefix: value}
    rows: dict[str, Any] = {}
    for key, item in items:
        rows |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return rows
