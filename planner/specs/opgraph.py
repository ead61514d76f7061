"""An operator graph of one's own: `configs/graphs/*.yaml`. Operators, the dimensions that may be split, what they read.

A dimension is of a sample (Sample), inside a sample without touching weights (Attribute), or of the weights
(Parameter), as in FlexFlow (Jia et al. 2019, section 4); `whole` is never split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Gt, Le

from planner.specs.fields import Count

DimKind = Literal["sample", "attribute", "parameter", "whole"]
Closing = Literal["all_reduce", "all_gather", "nothing"]
Amount = Annotated[float, Ge(0), Le(1e21), "a number, 0 or more"]


class DimSpec(NamedTuple):
    """One dimension of an operator: of its output, or (closed by an all-reduce) one that is summed over."""

    name: str
    size: Count
    kind: DimKind = "whole"
    closed_by: Closing | None = None
    """The collective that follows where this dimension is split, after which every task of the group holds the whole:
    `all_reduce` (partial sums: the dimension is no part of the output), `all_gather` (slices), or `nothing` (no part of
    the output, and nothing to be sent)."""


class InputSpec(NamedTuple):
    """What an operator reads of another one's output."""

    operator: str
    needs: dict[str, str] = {}
    """By dimension of that output, the own dimension that selects a part of it; dimensions not named are read whole."""


class OperatorSpec(NamedTuple):
    """One operator; the amounts are those of all of it."""

    name: str
    dims: tuple[DimSpec, ...]
    kernel: Literal["gemm", "attention_prefill", "attention_decode", "elementwise"] = "gemm"
    """Whose constants of the hardware file price it."""
    flops: Amount = 0.0
    weight_bytes: Amount = 0.0
    inputs: tuple[InputSpec, ...] = ()

    @property
    def output(self) -> dict[str, int]:
        """Sizes of the output's dimensions."""
        return {dim.name: dim.size for dim in self.dims if dim.closed_by not in ("all_reduce", "nothing")}


class OperatorGraph(NamedTuple):
    """Operators that read each other's outputs."""

    name: str
    operators: tuple[OperatorSpec, ...]
    description: str = ""
    dtype: str = "bf16"
    """The arithmetic of its kernels, one that the chip has."""
    element_bytes: Annotated[float, Gt(0), Le(16), "bytes of an element of an output"] = 2.0
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever names are unknown or twice there, sizes do not go together, or reading goes in
        a circle."""
        if not self.operators:
            yield "operators", "is empty, expected at least one operator"
        known: dict[str, OperatorSpec] = {}
        for index, operator in enumerate(self.operators):
            if operator.name in known:
                yield f"operators.{index}.name", f"{operator.name!r} is there twice; expected a name for each operator"
            known[operator.name] = operator
        for index, operator in enumerate(self.operators):
            for key, problem in _dims(operator):
                yield f"operators.{index}.{key}", problem
            for key, problem in _inputs(operator, known):
                yield f"operators.{index}.{key}", problem
        circle = _circle(known)
        if circle:
            index = next(place for place, each in enumerate(self.operators) if each.name == circle[0])
            yield f"operators.{index}.inputs", f"go in a circle: {' reads '.join(circle)}; expected none"


def _dims(operator: OperatorSpec) -> Iterator[tuple[str, str]]:
    names = [dim.name for dim in operator.dims]
    if not names:
        yield "dims", "is empty, expected the dimensions of the output, as [{name: rows, size: 64, kind: sample}]"
    closings = set()
    for place, dim in enumerate(operator.dims):
        if dim.name in names[:place]:
            yield f"dims.{place}.name", f"{dim.name!r} is there twice"
        if dim.closed_by is not None:
            closings.add(dim.closed_by)
            if dim.kind != "parameter":
                yield f"dims.{place}.closed_by", f"stands with kind {dim.kind!r}, expected kind parameter"
    if len(closings) > 1:
        yield "dims", f"are closed by {' and '.join(sorted(closings))}; expected one kind of collective per operator"


def _inputs(operator: OperatorSpec, known: Mapping[str, OperatorSpec]) -> Iterator[tuple[str, str]]:
    own = {dim.name: dim.size for dim in operator.dims}
    for place, read in enumerate(operator.inputs):
        key = f"inputs.{place}"
        if read.operator not in known:
            yield f"{key}.operator", f"unknown operator {read.operator!r}; expected one of {', '.join(known)}"
            continue
        output = known[read.operator].output
        for theirs, mine in read.needs.items():
            if theirs not in output:
                yield f"{key}.needs.{theirs}", f"no dimension of the output of {read.operator} ({', '.join(output)})"
            elif mine not in own:
                yield f"{key}.needs.{theirs}", f"found {mine!r}, expected one of {', '.join(own)}"
            elif own[mine] % output[theirs] and output[theirs] % own[mine]:
                sizes = f"{theirs} of {read.operator} has {output[theirs]}, {mine} here has {own[mine]}"
                yield f"{key}.needs.{theirs}", f"{sizes}: expected that one divides the other"


def _circle(known: Mapping[str, OperatorSpec]) -> list[str]:
    """Names along a circle, the first again at the end; empty where there is none."""
    reads = {name: [each.operator for each in spec.inputs if each.operator in known] for name, spec in known.items()}
    left = dict(reads)
    while free := [name for name, sources in left.items() if not any(source in left for source in sources)]:
        for name in free:
            del left[name]
    if not left:
        return []
    trail = [next(iter(left))]  # whoever is left reads somebody who is left
    while trail.count(trail[-1]) < 2:
        trail.append(next(source for source in left[trail[-1]] if source in left))
    return trail[trail.index(trail[-1]) :]
