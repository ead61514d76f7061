"""The picture of `plan diagnose`: a chip's roofline with the phases on it."""

from __future__ import annotations

from planner.diagnosing.framework import Diagnosis
from planner.report.figures import short
from planner.report.plot import GREY, MARKERS, PALETTE, SIZE, _drawn, _figure, _plain_ticks
from planner.units import GB, TERA


def roofline_plot(found: Diagnosis, target: str) -> bytes:
    """A chip's roofline with the phases of a diagnosis on it: what they reach at their intensity.

    Args:
        found: the diagnosis.
        target: the file; its name says the kind.
    """
    chip = found.hardware.chip
    peak, bandwidth = chip.peak(chip.native_dtype), chip.memory_bandwidth
    ridge = peak / bandwidth
    spots = [spot.intensity for spot in found.spots]
    low, high = min(0.5, *spots) / 2, max(4 * ridge, *spots) * 2
    with _figure(*SIZE) as figure:
        axes = figure.subplots()
        axes.plot(
            [low, ridge, high], [low * bandwidth / TERA, peak / TERA, peak / TERA], color="#444444", linewidth=1.2,
            label=f"{found.hardware.name}: {short(peak / TERA)} TFLOP/s, {short(bandwidth / GB)} GB/s",
        )  # fmt: skip
        axes.axvline(ridge, color=GREY, linewidth=0.8, linestyle="--", label=f"ridge {short(ridge, 3)} FLOP/B")
        for index, spot in enumerate(found.spots):
            axes.plot(
                [spot.intensity], [spot.flops / spot.seconds / TERA], linestyle="", marker=MARKERS[index],
                markersize=8, color=PALETTE[index],
                label=f"{spot.phase} ({spot.plan}): {short(spot.intensity, 3)} FLOP/B",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte moved", ylabel="TFLOP/s of a chip")
        axes.set_title(f"{found.model} on {found.hardware.name}, {found.engine}; {found.what}")
        _plain_ticks(axes, "xy")
        axes.grid(which="both", color="#eeeeee", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", frameon=False)
        return _drawn(figure, target)
