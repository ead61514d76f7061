"""What `extends: NAME` and an engine's `chips` mean: one file's keys over another's."""

from __future__ import annotations

from typing import Any

_KERNEL = ("kernel", "op", "level", "algorithm")  # what makes two rows of a hardware file the same


def merge(base: dict[str, Any], over: dict[str, Any], file: str = "") -> dict[str, Any]:
    """`over` laid on `base`: mappings are merged key by key, anything else is replaced.

    Rows of a hardware file's `collectives` replace their like (same kernel, op, level and algorithm) and are added to
    the rest; an engine's are rules in an order, and replaced whole. A source goes with the value that it stood for:
    where `over` changes constants and does not say where they are from, they are `file`'s.
    """
    result = dict(base)
    if isinstance(base.get("sources"), dict):
        result["sources"] = {key: source for key, source in base["sources"].items() if key not in over}
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merge(result[key], value, file)
        elif key == "collectives" and _are_kernels(value) and _are_kernels(result.get(key)):
            rows = {tuple(row[part] for part in _KERNEL): row for row in [*result[key], *value]}
            result[key] = list(rows.values())
        else:
            result[key] = value
    changed = {key for key in over if result[key] != base.get(key)}
    if file and changed:
        own = _own_source(base, changed, f"set in {file}")
        result |= {key: value for key, value in own.items() if key not in over}
    return result


def _own_source(base: dict[str, Any], changed: set[str], source: str) -> dict[str, Any]:
    """What takes the place of the source of `base`, if it has one, when these keys of it are changed."""
    if isinstance(base.get("provenance"), dict):
        return {"provenance": {"status": "assumed", "source": source}}
    if "usd_per_chip_hour" in base and "usd_per_chip_hour" in changed:
        return {"offer": source, "date": "undated", "source": source}
    return {}


def _are_kernels(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) and set(_KERNEL) <= row.keys() for row in rows)
