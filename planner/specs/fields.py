"""The kinds of value a specification may hold, each with the range in which its unit makes sense.

The ranges are wide enough for any machine that exists and narrow enough that a value in the wrong unit (bytes
where GiB belong, TB/s where GB/s belong) falls outside and is refused with the expected unit.
`annotated_types` comes with pydantic, which reads these constraints.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Le

Tflops = Annotated[float, Ge(1), Le(1e6), "TFLOP/s, dense"]
GbPerS = Annotated[float, Ge(0.5), Le(1e5), "GB/s (10^9 B), one direction"]
MemoryGbPerS = Annotated[float, Ge(20), Le(1e5), "GB/s (10^9 B)"]
Gib = Annotated[float, Gt(0), Le(4096), "GiB (2^30 B)"]
GibOrZero = Annotated[float, Ge(0), Le(4096), "GiB (2^30 B)"]
Micros = Annotated[float, Ge(0), Le(1e6), "microseconds"]
Fraction = Annotated[float, Gt(0), Le(1.5), "a fraction, about 1 at most"]
Factor = Annotated[float, Gt(0), Le(10), "a factor"]
Ratio = Annotated[float, Ge(0), Le(10), "a number of times"]
Share = Annotated[float, Gt(0), Le(1), "a share of the whole"]
Norm = Annotated[float, Gt(0), "the exponent of the p-norm; .inf is the textbook maximum"]
Dollars = Annotated[float, Gt(0), Le(1000), "US dollars per chip and hour"]
Watts = Annotated[float, Ge(1), Le(1e5), "watts"]
Count = Annotated[int, Ge(1), Le(10**7), "whole number"]
CountOrZero = Annotated[int, Ge(0), Le(10**7), "whole number"]
Tokens = Annotated[int, Ge(1), Le(10**9), "tokens"]
Kib = Annotated[float, Gt(0), Le(1e9), "KiB (2^10 B)"]
Residual = Annotated[float, Ge(0), Le(10), "mean absolute relative error, 0.05 = 5 %"]


class Provenance(NamedTuple):
    """Where a group of constants comes from and how far it has been seen to be off.

    `fitted` and `measured` carry a residual where one is known; `assumed` never looks like them.
    """

    status: Literal["fitted", "measured", "datasheet", "derived", "textbook", "assumed"]
    source: str
    version: str | None = None
    residual: Residual | None = None
