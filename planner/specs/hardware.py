"""What the silicon and the wires can do: chip, network levels, and the constants measured on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from planner.errors import InputError
from planner.specs.dtypes import ACTIVATION_BYTES, KV_CACHE, SPARSE, WEIGHTS
from planner.specs.fields import (
    Count,
    CountOrZero,
    Dollars,
    Factor,
    Fraction,
    GbPerS,
    Gib,
    MemoryGbPerS,
    Micros,
    Norm,
    Provenance,
    Tflops,
    Watts,
)
from planner.units import GB, GIB, TERA, US

KINDS = ("gemm", "attention_prefill", "attention_decode", "elementwise")
"""Kinds of kernels that every chip has constants of."""
LATENT_KINDS = {"attention_latent": "attention_decode", "attention_latent_prefill": "attention_prefill"}
"""Attention over a latent cache while decoding and over its expanded heads in prompts, and what stands for each where a
chip has no constants of it (`Hardware.constants`)."""
STAND_INS = {"grouped_gemm": "gemm"}
"""Kinds of kernel that a file may leave out, and whose constants, as an assumption, stand for them then."""
WIDE = frozenset(name for name, dtype in WEIGHTS.items() if dtype.bytes > ACTIVATION_BYTES)
"""Number formats that would lose precision in a chip's 16-bit arithmetic."""
_PRODUCTS = ("gemm", "grouped_gemm")
"""Kinds of kernels that multiply with weights, which may be sparse."""
SPARSE_SHARE = 0.85
"""Rate of a product with 2:4 weights against the dense one's, as a share of what the peaks promise: 1.7 times of 2 at
most (github:pytorch/ao@0021c2f torchao/sparsity/README.md). Stands where a hardware file has no such kernel."""
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
Algorithm = Literal[
    "ring", "one_shot", "two_shot", "tree", "in_switch", "direct", "hierarchical", "torus", "torus_by_axis"
]


class Chip(NamedTuple):
    """One accelerator, as a program sees it."""

    compute_tflops: dict[str, Tflops]
    """Dense peak by compute dtype."""
    memory_gib: Gib
    """What the driver reports, not the catalogue's figure (see `sources`)."""
    memory_bandwidth_gb_per_s: MemoryGbPerS
    sparse_factor: Factor | None = None
    """Rate of products with weights of which two of every four are zeros, these counted, against the dense peak: 2 by
    the data sheets; none = zeros are multiplied like all else."""
    tdp_w: Watts | None = None
    sources: dict[str, str] = {}

    @property
    def memory_bytes(self) -> float:
        """Bytes that a program may address."""
        return self.memory_gib * GIB

    @property
    def memory_bandwidth(self) -> float:
        """Peak bytes per second."""
        return self.memory_bandwidth_gb_per_s * GB

    def compute_dtype(self, wanted: str) -> str:
        """`wanted` where the chip computes in it, else its 16-bit type (weight-only quantisation).

        Sparse arithmetic is the dense one's where the chip has no peak of its own for it.

        Raises:
            InputError: the chip has no peak for a type wider than 16 bit, which would lose precision there.
        """
        if wanted in SPARSE:
            dense = self.compute_dtype(SPARSE[wanted])
            return self.sparse(dense) or dense
        if wanted in self.compute_tflops:
            return wanted
        if wanted in WIDE:
            has = ", ".join(self.compute_tflops)
            raise InputError(f"--weights {wanted}: needs a chip that computes in {wanted}, this one has {has}")
        return self.native_dtype

    def sparse(self, dense: str) -> str | None:
        """The sparse arithmetic beside a dense one; none = the chip skips no zeros there."""
        if self.sparse_factor is None:
            return None
        return next((name for name, own in SPARSE.items() if own == dense and own in self.compute_tflops), None)

    def computes(self, dtype: str) -> bool:
        """Whether the chip has this arithmetic, dense or sparse."""
        return self.sparse(SPARSE[dtype]) is not None if dtype in SPARSE else dtype in self.compute_tflops

    @property
    def native_dtype(self) -> str:
        """The 16-bit type of this chip."""
        return "bf16" if "bf16" in self.compute_tflops else next(iter(self.compute_tflops))

    def peak(self, dtype: str) -> float:
        """FLOP/s of a compute dtype; of a sparse one with the zeros counted."""
        if dtype in SPARSE:
            return self.compute_tflops[SPARSE[dtype]] * TERA * (self.sparse_factor or 1.0)
        return self.compute_tflops[dtype] * TERA


class Slice(NamedTuple):
    """The shape of a torus slice that may be rented, chips per axis."""

    axes: tuple[int, ...]

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        product = 1
        for axis in self.axes:
            product *= axis
        return product

    def __str__(self) -> str:
        return "x".join(map(str, self.axes))


class NetworkLevel(NamedTuple):
    """One level of the network; levels are listed innermost first.

    * `switch`: any chip of a domain reaches any other at full rate;
    * `mesh`: a wire between each pair, so a group of n chips has n - 1 of them;
    * `torus`: rings along axes; slices have shapes.
    """

    name: str
    kind: Literal["switch", "mesh", "torus"]
    bandwidth_gb_per_s: GbPerS
    """One direction: of a chip's port (switch), of one wire (mesh, torus), of one NIC where `nics_per_node`."""
    chips: Count | None = None
    """Chips of one domain; none = as many as are asked for."""
    nics_per_node: Count | None = None
    """Network cards of a domain of the level below, shared by its chips; none = the textbook's one link."""
    slices: tuple[str, ...] = ()
    """Legal shapes of a torus, as 4x4x4, in the order in which equally large ones are preferred."""
    wrap_multiple: CountOrZero = 0
    """An axis of a torus closes to a ring when its length is a multiple of this (0 = never)."""
    wrap_together: bool = False
    """Axes close only where all of them may: slices of whole cubes."""
    sources: dict[str, str] = {}

    @property
    def link(self) -> float:
        """Bytes per second of `bandwidth_gb_per_s`."""
        return self.bandwidth_gb_per_s * GB

    def contradictions(self, innermost: bool, last: bool) -> Iterator[tuple[str, str]]:
        """(key, sentence) of what cannot be at this place of the network."""
        if self.chips is None and not last:
            yield "chips", "missing; expected the chips of one domain, since a level follows"
        if self.kind != "torus":
            return
        if not (innermost and last):
            yield "kind", "a torus must be the only level"
        if not self.slices:
            yield "slices", "missing; expected the legal shapes of a torus, as [2x2, 4x4]"
        for shape in self.slices:
            if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", shape):
                yield "slices", f"found {shape!r}, expected chips per axis joined by x, as 4x4x4"

    def legal_slices(self) -> tuple[Slice, ...]:
        """The shapes that may be rented."""
        return tuple(Slice(tuple(int(axis) for axis in text.split("x"))) for text in self.slices)


class InStep(NamedTuple):
    """How a kernel runs inside an engine's step, where it differs from the same kernel alone in a loop.

    A step's kernels are replayed back to back from a graph: one fixed time then holds for all number formats, and
    weights stream on while kernels change. Fitted to serving measurements, not to the kernel's own.
    """

    provenance: Provenance
    fixed_us: Micros
    speed: Factor = 1.0
    """Bytes per second against those of the kernel alone."""


class KernelConstants(NamedTuple):
    """Constants of one kind of operation in one dtype (DESIGN section 4).

    t = fixed + depth_us log2(1 + context/64)
          + || flops / (compute_fraction F), bytes / (memory_fraction BW), item_us items ||_p
    """

    provenance: Provenance
    fixed_us: Micros = 0.0
    compute_fraction: Fraction | None = None
    """Share of the peak reached by large shapes; none = this kind of operation is never compute-bound here."""
    memory_fraction: Fraction | None = None
    item_us: Micros = 0.0
    """Cost of a work item: a KV head of a request in decode attention, a head of a token in the norm of queries and
    keys, whose rows are too short to fill the memory's bandwidth."""
    depth_us: Micros = 0.0
    p: Norm = 1.0
    in_step: InStep | None = None
    """none = as alone."""

    @property
    def fixed(self) -> float:
        """Seconds paid whenever the kernel runs in a step."""
        return (self.fixed_us if self.in_step is None else self.in_step.fixed_us) * US


class RankRow(NamedTuple):
    """Measured constants of a collective at one group size."""

    latency_us: Micros
    bandwidth_fraction: Fraction
    p: Norm = 1.0


class CollectiveKernel(NamedTuple):
    """One implementation of a collective on one network level.

    Either `ranks` gives measured constants per group size (latency as a whole), or `hop_us` gives the textbook's
    latency per step. `hierarchical` prices its inner phases with the rows of the level below.
    """

    kernel: str
    op: CollectiveOp
    level: str
    algorithm: Algorithm
    provenance: Provenance
    ranks: dict[int, RankRow] = {}
    base_us: Micros = 0.0
    hop_us: Micros | None = None
    inner_hop_us: Micros | None = None
    """Latency of the steps inside the domains below; none = `hop_us` for every step (the flat ring)."""
    bandwidth_fraction: Fraction = 1.0
    p: Norm = 1.0
    pipelined: bool = False
    """hierarchical: the phases run at once on chunks of the buffer, the slower of inside and across counts."""


class Price(NamedTuple):
    """The list price that stands for this chip."""

    usd_per_chip_hour: Dollars
    offer: str
    date: str
    source: str


class Devices(NamedTuple):
    """How programs see the chips: what they run on, and how those of one host are counted and chosen."""

    platform: str = "cuda"
    """What an engine must have been built for (its `launch.platforms`): cuda, rocm, gaudi, tpu, neuron."""
    per_host: Count | None = None
    """Chips of one host; none = those of the innermost domain."""
    variable: str | None = "CUDA_VISIBLE_DEVICES"
    """The environment variable that says which chips of its host a process sees; none = it sees all."""
    source: str | None = None


class Hardware(NamedTuple):
    """A kind of machine: `configs/hardware/*.yaml`."""

    name: str
    description: str
    engine: str
    """The engine that stands for this hardware when none is named."""
    chip: Chip
    network: tuple[NetworkLevel, ...]
    kernels: dict[str, dict[str, KernelConstants]]
    """By kind (KINDS, and those of LATENT_KINDS and STAND_INS that were measured), then dtype (bf16, fp8)."""
    collectives: tuple[CollectiveKernel, ...]
    aliases: tuple[str, ...] = ()
    like: str | None = None
    """The hardware whose measurements of engines and hosts stand for this one too: the same machine, with constants of
    its own. Not handed on to a file that extends this one; none = no other's."""
    roofline: Literal["per_op", "per_step"] = "per_op"
    """per_step: one maximum over a stage's summed FLOPs and bytes, weights and KV only (the textbook's)."""
    price: Price | None = None
    kv_cache: dict[str, str] = {}
    """Dtype of the KV cache by dtype of the weights, over the engine's own rule; set by engines under `chips`."""
    notes: tuple[str, ...] = ()
    devices: Devices = Devices()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """(key path, sentence) wherever keys are missing that others need, or cannot hold together."""
        if not self.chip.compute_tflops:
            yield "chip.compute_tflops", "is empty, expected the dense peak of at least one dtype, as bf16: 989"
            return
        native = self.chip.native_dtype
        sparse = self.chip.sparse_factor
        if sparse is not None and not 1 <= sparse <= 2:
            yield "chip.sparse_factor", f"found {sparse:g}, expected from 1 to 2: two of every four weights are skipped"
        yield from self._incomplete(native)
        for weights in (weights for weights, dtype in self.kv_cache.items() if dtype not in KV_CACHE):
            yield f"kv_cache.{weights}", f"found {self.kv_cache[weights]!r}, expected one of {', '.join(KV_CACHE)}"
        if not self.network:
            yield "network", "is empty, expected at least one level"
        for index, level in enumerate(self.network):
            for key, problem in level.contradictions(innermost=index == 0, last=index + 1 == len(self.network)):
                yield f"network.{index}.{key}", problem
        yield from self._likeness()
        names = [level.name for level in self.network]
        for index, row in enumerate(self.collectives):
            if row.level not in names:
                yield f"collectives.{index}.level", f"found {row.level!r}, expected one of {', '.join(names)}"
            if not row.ranks and row.hop_us is None:
                yield f"collectives.{index}", "has neither ranks nor hop_us; expected one of them for the latency"

    def _incomplete(self, native: str) -> Iterator[tuple[str, str]]:
        """Constants of kernels that are missing, or of none that there is."""
        for kind in KINDS:
            if native not in self.kernels.get(kind, {}):
                yield f"kernels.{kind}.{native}", "missing; expected the constants of this kind of kernel"
        for dtype in WIDE & self.chip.compute_tflops.keys() - self.kernels.get("gemm", {}).keys():
            yield f"kernels.gemm.{dtype}", "missing; without its constants it would be priced as the 16-bit type"
        known = (*KINDS, *LATENT_KINDS, *STAND_INS)
        for kind in self.kernels.keys() - set(known):
            yield f"kernels.{kind}", f"unknown kind of kernel; expected one of {', '.join(known)}"
        for kind in LATENT_KINDS.keys() & self.kernels.keys():
            if native not in self.kernels[kind]:
                yield f"kernels.{kind}.{native}", "missing; expected the constants of this kind of kernel"

    def _likeness(self) -> Iterator[tuple[str, str]]:
        if self.like is not None and (not self.like.strip() or self.like == self.name):
            yield "like", f"found {self.like!r}, expected the name of another hardware file, or nothing"

    def within(self, machines: Sequence[str]) -> bool:
        """Whether what was measured on some machines, by name, stands for this one."""
        return self.name in machines or self.like in machines

    @property
    def alone(self) -> Hardware:
        """The same hardware with its kernels as they run alone in a loop, which is how they are measured."""
        kernels = {
            kind: {dtype: constants._replace(in_step=None) for dtype, constants in by_dtype.items()}
            for kind, by_dtype in self.kernels.items()
        }
        return self._replace(kernels=kernels)

    @property
    def domain(self) -> int | None:
        """Chips of the innermost domain; none = no boundary."""
        return self.network[0].chips

    @property
    def host_chips(self) -> int | None:
        """Chips of one host; none = all of a deployment are in one."""
        return self.devices.per_host or self.domain

    @property
    def torus(self) -> NetworkLevel | None:
        """The torus that the chips sit on, if they do."""
        return self.network[0] if self.network[0].kind == "torus" else None

    def constants(self, kind: str, dtype: str) -> tuple[str, KernelConstants]:
        """(arithmetic, constants) of an operation: the 16-bit type's where the dtype has none of its own.

        Latent attention that was not measured on a chip takes the constants of plain attention, as an assumption.
        Decoding it multiplies as prefill does, many rows of queries by the same keys, so its share of the compute peak
        is that of prefill attention. Any other kind that was not measured in this dtype takes the constants of the kind
        that stands in for it (STAND_INS), marked as assumed. So do products with sparse weights: the dense ones', with
        SPARSE_SHARE of their share of the peak.
        """
        if dtype in SPARSE and dtype not in self.kernels.get(kind, {}):
            found, dense = self.constants(kind, SPARSE[dtype])
            sparse = self.chip.sparse(found) if kind in _PRODUCTS else None
            return (found, dense) if sparse is None else (sparse, _as_sparse(kind, dense))
        if kind in STAND_INS and not (dtype in self.kernels.get(kind, {}) and self.chip.computes(dtype)):
            found, constants = self.constants(STAND_INS[kind], dtype)
            return found, constants._replace(provenance=_as_assumed(STAND_INS[kind], constants.provenance))
        by_dtype = self.kernels.get(kind)
        if by_dtype is None:
            name, like = self.constants(LATENT_KINDS[kind], dtype)
            share = like.compute_fraction or self.constants("attention_prefill", name)[1].compute_fraction
            return name, like._replace(
                provenance=Provenance("assumed", f"as {LATENT_KINDS[kind]}: latent attention was not measured here"),
                compute_fraction=share,
            )
        if dtype in by_dtype and self.chip.computes(dtype):
            return dtype, by_dtype[dtype]
        native = self.chip.native_dtype
        return native, by_dtype[native]

    def collective(self, kernel: str, op: str, level: str) -> tuple[CollectiveKernel, ...]:
        """The rows of a kernel for an operation on a level; several = the cheapest counts."""
        rows, found = _COLLECTIVES.get(id(self.collectives), (None, {}))
        if rows is None:
            if len(_COLLECTIVES) >= _MOST_INDEXED:
                _COLLECTIVES.clear()
            for row in self.collectives:
                key = (row.kernel, row.op, row.level)
                found[key] = (*found.get(key, ()), row)
            _COLLECTIVES[id(self.collectives)] = self.collectives, found
        return found.get((kernel, op, level), ())


_COLLECTIVES: dict[int, tuple[tuple[CollectiveKernel, ...], dict[tuple[str, str, str], tuple[CollectiveKernel, ...]]]]
_COLLECTIVES = {}
"""Rows by kernel, operation and level, by the id of all rows, with these, so that the id stays theirs."""
_MOST_INDEXED = 256


def _as_assumed(kind: str, known: Provenance) -> Provenance:
    return Provenance("assumed", f"as {kind}: {known.source}", known.version)


def _as_sparse(kind: str, dense: KernelConstants) -> KernelConstants:
    share = None if dense.compute_fraction is None else dense.compute_fraction * SPARSE_SHARE
    source = f"as {kind} with dense weights, at most {2 * SPARSE_SHARE:g} times as fast: {dense.provenance.source}"
    return dense._replace(compute_fraction=share, provenance=Provenance("assumed", source, dense.provenance.version))
