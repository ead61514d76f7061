"""Figures for people: about four digits, no exponents."""

from __future__ import annotations


def short(value: float | None, digits: int = 4) -> str:
    """A figure of `digits` digits, large ones whole, then as k and M; none as a dash."""
    if value is None:
        return "-"
    if value >= 1e7:
        return f"{value / 1e6:.3g}M"
    if value >= 1e5:
        return f"{value / 1e3:.3g}k"
    return f"{value:.{digits}g}" if value < 10**digits else f"{value:.0f}"
