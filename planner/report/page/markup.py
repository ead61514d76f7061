"""HTML and SVG as text in which everything is escaped that is not marked as markup."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

VOID = frozenset(("br", "col", "input", "link", "meta"))
"""Elements of HTML without an end."""
SHAPES = frozenset(("circle", "line", "path", "polyline", "rect", "stop", "use"))
"""Elements of SVG that hold nothing here."""
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that XML does not have at all; a file's name may."""


class Markup(str):
    """A text that is markup already."""

    __slots__ = ()


def escaped(value: object) -> Markup:
    """A value as text that cannot be taken for markup, in an element or in an attribute."""
    if isinstance(value, Markup):
        return value
    return Markup(escape(_CONTROLS.sub("\ufffd", str(value)), quote=True))


def number(value: float) -> str:
    """A coordinate: hundredths, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".").replace("-0", "0") if abs(value) < 0.005 else f"{value:.6g}"


def joined(parts: Iterable[object]) -> Markup:
    """Several one after the other."""
    return Markup("".join(map(escaped, parts)))


def element(tag: str, /, *content: object, **attributes: Any) -> Markup:
    """An element.

    Args:
        tag: name of the element.
        content: what it holds; texts are escaped, what is none is left out.
        attributes: `class_` is class, an underscore a hyphen; what is none or false is left out, true has no value,
            floats are coordinates.
    """
    words = [tag]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        shown = "" if value is True else number(value) if isinstance(value, float) else escaped(value)
        words.append(f'{attribute}="{shown}"')
    start = " ".join(words)
    held = joined(part for part in content if part is not None)
    if tag in VOID:
        return Markup(f"<{start}>")
    if tag in SHAPES and not held:
        return Markup(f"<{start}/>")
    return Markup(f"<{start}>{held}</{tag}>")
