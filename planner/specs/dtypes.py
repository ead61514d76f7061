"""Number formats: what a value takes in storage and which arithmetic it is computed in."""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from planner.errors import InputError


class Dtype(NamedTuple):
    """A storage format.

    `bytes` counts the scales that belong to it: int4 with a 16-bit scale and zero per group of 128 is
    4 bit + 20/128 bit = 0.5195 B; mxfp4 with an 8-bit scale per 32 is 0.531 B.
    """

    name: str
    bytes: float
    compute: str
    """The arithmetic it wants; weight-only formats want the chip's 16-bit type."""
    dense: str | None = None
    """The format whose weights these are, two of every four left out; none = all weights are stored."""

    @property
    def plain_bytes(self) -> float:
        """Bytes of what is not quantised: embeddings, head, norms and biases stay in 16 bit."""
        return max(self.bytes, 2.0)


SPARSE = {"bf16-2:4": "bf16", "fp8-2:4": "fp8"}
"""Arithmetic on weights of which two of every four are zeros, which tensor cores skip, and the one on all of them."""


def sparse_bytes(bits: float, scale_bits: float = 0.0, kept: int = 2, of: int = 4) -> float:
    """Bytes per weight, zeros counted, where `kept` of every `of` weights are stored, each with its place among them.

    16 bit at 2:4 is 16/2 + 2/2 = 9 bit, 0.5625 of the dense (as a mask of a bit per weight would be too). torchao's
    Llama 3 8B in 4 bit with a 16-bit scale per 64 is 4/2 + 2/2 + 16/64 = 3.25 bit: 3.05 GB, as it reports.

    Args:
        bits: of a stored value.
        scale_bits: of scales, per weight.
        kept: weights of a group that are stored.
        of: weights of a group.
    """
    return (bits * kept / of + log2(of) * kept / of + scale_bits) / 8


WEIGHTS = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp32", 4, "fp32"),
        Dtype("bf16", 2, "bf16"),
        Dtype("fp16", 2, "bf16"),
        Dtype("fp8", 1, "fp8"),
        Dtype("int8", 1, "bf16"),
        Dtype("int4", (4 + 20 / 128) / 8, "bf16"),
        Dtype("mxfp4", (4 + 8 / 32) / 8, "bf16"),
        Dtype("bf16-2:4", sparse_bytes(16), "bf16-2:4", "bf16"),
        Dtype("fp16-2:4", sparse_bytes(16), "bf16-2:4", "fp16"),
        Dtype("fp8-2:4", sparse_bytes(8), "fp8-2:4", "fp8"),
        Dtype("int8-2:4", sparse_bytes(8), "bf16-2:4", "int8"),
        Dtype("int4-2:4", sparse_bytes(4, 16 / 128), "bf16-2:4", "int4"),  # kernels for it know no zero points
    )
}
KV_CACHE = {name: WEIGHTS[name] for name in ("fp32", "bf16", "fp16", "fp8", "int8")}
ACTIVATION_BYTES = 2.0


def weight_dtype(name: str) -> Dtype:
    """The storage format of weights.

    Raises:
        InputError: not one of WEIGHTS.
    """
    return _lookup(name, WEIGHTS, "--weights")


def kv_dtype(name: str) -> Dtype:
    """The storage format of the KV cache.

    Raises:
        InputError: not one of KV_CACHE.
    """
    return _lookup(name, KV_CACHE, "--kv-cache")


def _lookup(name: str, table: dict[str, Dtype], option: str) -> Dtype:
    if name not in table:
        raise InputError(f"{option}: unknown dtype {name!r}; expected one of {', '.join(table)}")
    return table[name]
