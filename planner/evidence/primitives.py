"""Measured kernels and transfers, and the model's price of each: the lowest rung of the validation.

The rows stand in `planner/evidence/kernels/` (its README says where each comes from, and under which licence). A row
is priced as a plan's would be: constants of its hardware with its engine's overrides, `price_operation` for a kernel
(as it runs alone), `Network` for a transfer. What a kernel computes and moves is counted as `costs.layers` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from planner.costs.collectives import Network
from planner.costs.latent import absorbed, latent_decode, latent_prefill
from planner.costs.layers import Kind, Operation, causal_pairs
from planner.costs.roofline import price_operation
from planner.evidence.comparison import Comparison, once
from planner.plans.placement import Placement
from planner.specs.catalog import load_hardware, load_machine
from planner.specs.dtypes import ACTIVATION_BYTES as ACT
from planner.specs.dtypes import WEIGHTS
from planner.specs.engine import CollectiveRule, Engine
from planner.specs.hardware import CollectiveOp, Hardware
from planner.specs.measurements import measurements
from planner.specs.model import LatentAttention
from planner.units import US

Array = NDArray[np.float64]
Row = dict[str, str]

HEAD_DIM = 128
"""Of every measured kernel of plain attention."""
LATENT = LatentAttention(kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128)
"""Of every measured kernel of latent attention: DeepSeek-V3's widths."""
SOURCES = {
    "AIC": "AIConfigurator 0.12.0's measured tables (github:ai-dynamo/aiconfigurator@095f58a, Apache-2.0)",
    "INFERSIM": "InferSim's bench_data (github:alibaba/InferSim@f2293da, Apache-2.0)",
    "INFERSIM-H800": "InferSim's bench_data (github:alibaba/InferSim@f2293da, Apache-2.0), H800",
    "VIDUR": "vidur's profiles (github:microsoft/vidur@7d47513, MIT)",
    "DEEPEP": "DeepEP's own tables (github:deepseek-ai/DeepEP@dd758ca, MIT)",
}


OPERATIONS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)
MEASURED_WITH_ENGINES = {"custom_one_shot", "custom_two_shot", "nccl"}
"""The engines' own all-reduce, and what they turn to where it does not serve."""


FITTED, UNSEEN = "fitted", "unseen"
"""Whether constants rest on the table that rows are from (often on more of its rows than are carried), or not."""


class Format(NamedTuple):
    """A number format of a measured GEMM."""

    check: str
    weights: str
    """How weights are stored: a name of `specs.dtypes`."""
    fitted: bool = False
    """Constants were fitted to this format: fp8's rest on static scales, weight-only formats have none."""


FORMATS = {
    "bf16": Format("GEMM bf16", "bf16", fitted=True),
    "fp8-dynamic": Format("GEMM fp8, dynamic scales", "fp8"),
    "fp8-block": Format("GEMM fp8, scales by block", "fp8"),
    "int8": Format("GEMM int8 weights", "int8"),
    "int4": Format("GEMM int4 weights", "int4"),
}


class Run(NamedTuple):
    """Where rows were measured, and with what."""

    hardware: str
    engine: str
    """Whose kernels ran; "" = a library's, whatever the engine."""
    source: str
    """Key of SOURCES."""
    version: str
    not_used: str
    """Why these rows are no evidence; "" = they are."""

    @property
    def said(self) -> str:
        """The source with the version, for a table."""
        return ", ".join(part for part in (SOURCES[self.source], self.version) if part)

    def machine(self) -> tuple[Hardware, Engine]:
        """The hardware under this run's engine, and the engine; the hardware's own where the run has none."""
        return _machine(self.hardware, self.engine or None)


@cache
def _machine(hardware: str, engine: str | None) -> tuple[Hardware, Engine]:
    return load_machine(hardware, engine)


class Kernels(NamedTuple):
    """Rows of one run that one set of constants prices."""

    check: str
    run: Run
    operation: Operation
    """Its quantities are arrays over the rows."""
    seconds: Array
    rows: tuple[tuple[str, str], ...]
    """(case, what) of each."""
    part: str = FITTED

    def predicted(self) -> Array:
        """Seconds [rows] by the model."""
        return np.asarray(price_operation(self.run.machine()[0].alone, self.operation).total, dtype=float)


class Transfers(NamedTuple):
    """Rows of one run of one operation over one number of ranks."""

    check: str
    run: Run
    op: str
    ranks: int
    sizes: Array
    """Bytes of the whole buffer."""
    seconds: Array
    rows: tuple[tuple[str, str], ...]
    kernel: str = ""
    """A kernel of the hardware file; "" = the engine's own, by its rules."""
    across: bool = False
    """A send that leaves the innermost domain."""
    part: str = FITTED

    def predicted(self) -> Array:
        """Seconds [rows] by the model."""
        hardware, engine = self.run.machine()
        if self.run.engine:  # its rules for the kernels measured here; it may run others first, fused with what follows
            rules = tuple(rule for rule in engine.collectives if MEASURED_WITH_ENGINES & set(rule.kernels))
            engine = engine._replace(collectives=rules)
        else:  # for every operation: a hierarchical all-reduce has phases of other kinds
            engine = engine._replace(collectives=tuple(CollectiveRule(op, (self.kernel,)) for op in OPERATIONS))
        network = Network(Placement.of(hardware, self.ranks), engine)
        if self.op == "send":
            return network.send(self.sizes, int(self.across))
        return network.seconds(self.op, self.ranks, self.sizes)


@once
def comparisons() -> list[Comparison]:
    """Every measured row that is evidence, beside the model's price of it, in microseconds."""
    found: list[Comparison] = []
    cases: list[Kernels | Transfers] = [*kernels(), *transfers()]
    for case in cases:
        times = zip(case.rows, case.seconds.tolist(), case.predicted().tolist(), strict=True)
        run = case.run
        found += [
            Comparison(
                case.check,
                row,
                what,
                measured / US,
                priced / US,
                run.hardware,
                run.engine,
                unit="us",
                part=case.part,
                source=run.said,
            )
            for (row, what), measured, priced in times
        ]
    return found


def kernels() -> list[Kernels]:
    """All measured kernels: GEMM, plain and grouped, decode and context attention, plain and latent, element-wise."""
    plain = [*_gemms(), *_grouped_gemms(), *_decode_attention(), *_context_attention(), *_elementwise()]
    return [*plain, *_latent_decode(), *_latent_context(), *_latent_absorb()]


def transfers() -> list[Transfers]:
    """All measured transfers: collectives, sends, exchanges between experts."""
    return [*_collectives(), *_sends(), *_expert_exchange()]


def runs(table: str) -> dict[str, Run]:
    """The runs of a table, by their name in its rows."""
    return {
        row["run"]: Run(row["hardware"], row["engine"], row["source"], row["version"], row["not_used"])
        for row in measurements("kernels/runs")
        if row["table"] == table
    }


def distinct_destinations(choices: Array | float, destinations: int) -> Array:
    """Different destinations that a token goes to, expected, when it makes `choices` of them uniformly.

    K (1 - (1 - 1/K)^k): an exchange that sends one copy of a token to a destination, however many of its experts
    live there, moves this many copies instead of k.
    """
    return np.asarray(destinations * (1 - (1 - 1 / destinations) ** np.asarray(choices, dtype=float)))


class _Table(NamedTuple):
    """Rows of one run that agree in some columns, with the number of the line of each."""

    run: Run
    key: tuple[str, ...]
    lines: tuple[tuple[int, Row], ...]

    def column(self, name: str) -> Array:
        return np.array([float(row[name]) for _, row in self.lines])

    def labels(self, table: str, what: Callable[[Row], str]) -> tuple[tuple[str, str], ...]:
        return tuple((f"{table}.csv:{line}", what(row)) for line, row in self.lines)


def _tables(table: str, by: Sequence[str]) -> Iterable[_Table]:
    """The rows of a table that are evidence, by run and by these columns."""
    known = runs(table)
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for line, row in enumerate(measurements(f"kernels/{table}"), start=2):
        groups.setdefault((row["run"], *(row[name] for name in by)), []).append((line, row))
    for (run, *key), lines in groups.items():
        if not known[run].not_used:
            yield _Table(known[run], tuple(key), tuple(lines))


def _gemms() -> Iterable[Kernels]:
    for table in _tables("gemm", ["format"]):
        form = FORMATS[table.key[0]]
        weights = WEIGHTS[form.weights]
        m, n, k = (table.column(name) for name in ("m", "n", "k"))
        compute = load_hardware(table.run.hardware).chip.compute_dtype(weights.compute)
        operation = Operation(
            form.check,
            "gemm",
            compute,
            flops=2 * m * n * k,
            weight_bytes=n * k * weights.bytes,
            activation_bytes=m * (n + k) * ACT,
        )
        alone = table.run.source == "AIC"
        yield Kernels(
            form.check if alone else f"{form.check} in layers",
            table.run,
            operation,
            table.column("us") * US,
            table.labels("gemm", lambda row: f"{row['m']} x {row['k']} x {row['n']}"),
            FITTED if alone and form.fitted else UNSEEN,
        )


def _grouped_gemms() -> Iterable[Kernels]:
    """Products of experts: m rows in all, spread over those of a rank's experts that have any (`groups`)."""
    for table in _tables("grouped_gemm", ["layout"]):
        groups, m, n, k = (table.column(name) for name in ("groups", "m", "n", "k"))
        operation = Operation(
            "grouped GEMM",
            "grouped_gemm",
            "fp8",
            flops=2 * m * n * k,
            weight_bytes=groups * n * k * WEIGHTS["fp8"].bytes,
            activation_bytes=m * (n + k) * ACT,
        )
        yield Kernels(
            f"grouped GEMM fp8, {table.key[0]}",
            table.run,
            operation,
            table.column("us") * US,
            table.labels("grouped_gemm", lambda row: f"{row['groups']} experts, {row['m']} x {row['k']} x {row['n']}"),
        )


def _decode_attention() -> Iterable[Kernels]:
    for table in _tables("decode_attention", ["kv"]):
        kv = WEIGHTS[table.key[0]]
        heads, kv_heads, batch, context = (table.column(name) for name in ("heads", "kv_heads", "batch", "context"))
        operation = Operation(
            "attention (decode)",
            "attention_decode",
            kv.compute,
            flops=4 * HEAD_DIM * heads * batch * context,
            kv_bytes=batch * context * kv_heads * 2 * HEAD_DIM * kv.bytes,
            activation_bytes=batch * heads * HEAD_DIM * 2 * ACT,
            items=batch * kv_heads,
            context=context,
        )
        yield Kernels(
            f"decode attention {kv.name} KV",
            table.run,
            operation,
            table.column("us") * US,
            table.labels("decode_attention", lambda row: f"{_heads(row)}, {row['batch']} x {row['context']} tokens"),
        )


def _context_attention() -> Iterable[Kernels]:
    for table in _tables("context_attention", ["dtype"]):
        dtype = WEIGHTS[table.key[0]]
        heads, kv_heads, batch, tokens = (table.column(name) for name in ("heads", "kv_heads", "batch", "tokens"))
        operation = Operation(
            "attention (prefill)",
            "attention_prefill",
            dtype.compute,
            flops=4 * HEAD_DIM * heads * batch * causal_pairs(tokens),
            activation_bytes=batch * tokens * 2 * (heads + kv_heads) * HEAD_DIM * ACT,
        )
        check = "context attention" if dtype.bytes == ACT else f"context attention {dtype.name}"
        yield Kernels(
            check,
            table.run,
            operation,
            table.column("us") * US,
            table.labels("context_attention", lambda row: f"{_heads(row)}, {row['batch']} x {row['tokens']} tokens"),
        )


def _latent_decode() -> Iterable[Kernels]:
    """Heads over the latent cache (absorbed); FlashMLA on H800 is held against constants of FlashAttention-3."""
    for table in _tables("latent_decode", ["kv"]):
        kv = WEIGHTS[table.key[0]]
        heads, batch, context = (table.column(name) for name in ("heads", "batch", "context"))
        part, suffix = _rests_on(table.run)
        yield Kernels(
            f"latent decode attention {kv.name} KV{suffix}",
            table.run,
            latent_decode(LATENT, heads, batch, context, kv),
            table.column("us") * US,
            table.labels(
                "latent_decode", lambda row: f"{row['heads']} heads, {row['batch']} x {row['context']} tokens"
            ),
            part,
        )


def _latent_context() -> Iterable[Kernels]:
    for table in _tables("latent_context", ["dtype"]):
        dtype = WEIGHTS[table.key[0]]
        heads, batch, tokens = (table.column(name) for name in ("heads", "batch", "tokens"))
        part, suffix = _rests_on(table.run)
        yield Kernels(
            f"latent context attention {dtype.name}{suffix}",
            table.run,
            latent_prefill(LATENT, heads, batch * tokens, batch * causal_pairs(tokens), 0.0, dtype),
            table.column("us") * US,
            table.labels(
                "latent_context", lambda row: f"{row['heads']} heads, {row['batch']} x {row['tokens']} tokens"
            ),
            part,
        )


def _latent_absorb() -> Iterable[Kernels]:
    """What decoding absorbs of the expansion, priced as one GEMM: no constant rests on these."""
    for table in _tables("latent_absorb", ["weights", "side"]):
        weights, keys = WEIGHTS[table.key[0]], table.key[1] == "keys"
        inner, outer = (LATENT.nope_dim, LATENT.kv_rank) if keys else (LATENT.kv_rank, LATENT.value_dim)
        rows, heads = table.column("tokens"), table.column("heads")
        yield Kernels(
            f"latent absorption {weights.name}",
            table.run,
            absorbed(f"absorb {table.key[1]}", rows, heads, inner, outer, weights.bytes, weights.compute),
            table.column("us") * US,
            table.labels("latent_absorb", lambda row: f"{row['side']}, {row['heads']} heads, {row['tokens']} tokens"),
            UNSEEN,
        )


def _rests_on(run: Run) -> tuple[str, str]:
    """(part, end of the check's name): rows of a chip without a file of its own only check the constants of another."""
    return (UNSEEN, f", {run.version}") if run.source == "INFERSIM-H800" else (FITTED, "")


def _elementwise() -> Iterable[Kernels]:
    kind: Kind = "elementwise"
    for table in _tables("elementwise", ["kernel"]):
        moved = table.column("tokens") * table.column("width") * table.column("values") * ACT
        yield Kernels(
            "element-wise, launched one by one",
            table.run,
            Operation(table.key[0], kind, "bf16", activation_bytes=moved),
            table.column("us") * US,
            table.labels("elementwise", lambda row: f"{row['kernel']}, {row['tokens']} x {row['width']}"),
            UNSEEN,
        )


def _collectives() -> Iterable[Transfers]:
    for table in _tables("collectives", ["kernel", "op", "ranks"]):
        kernel, op, ranks = table.key
        library = kernel.upper() if table.run.source == "AIC" else f"{kernel.upper()} of 2023"
        check = f"{op.replace('_', '-')} {kernel if table.run.engine else library}"
        if int(ranks) > (load_hardware(table.run.hardware).domain or int(ranks)):
            check += " across nodes"
        yield Transfers(
            check,
            table.run,
            op,
            int(ranks),
            table.column("bytes"),
            table.column("us") * US,
            table.labels("collectives", lambda row: f"{row['ranks']} ranks, {row['bytes']} B"),
            kernel="" if table.run.engine else kernel,
            part=FITTED if table.run.source == "AIC" else UNSEEN,
        )


def _sends() -> Iterable[Transfers]:
    for table in _tables("point_to_point", ["across"]):
        across = table.key[0] == "yes"
        yield Transfers(
            "send across nodes" if across else "send",
            table.run,
            "send",
            2,
            table.column("bytes"),
            table.column("us") * US,
            table.labels("point_to_point", lambda row: f"{row['bytes']} B"),
            kernel="nccl",
            across=across,
        )


MODES = {"low_latency": "deepep_low_latency", "normal": "deepep"}
"""Kernel of a hardware file by mode of DeepEP."""
_SCALED_FP8 = 1 + 4 / 128
"""Bytes of a value that is dispatched: fp8, with a 32-bit scale to 128 values."""


def _expert_exchange() -> Iterable[Transfers]:
    """Dispatch (fp8) and combine (16 bit), each an all-to-all of what a rank holds for others.

    The low-latency mode sends a copy to every expert chosen, the normal one a copy to every rank inside a node or to
    every node (`distinct_destinations`), with its notification beforehand.
    """
    for table in _tables("expert_exchange", ["mode", "ranks"]):
        mode, ranks = table.key[0], int(table.key[1])
        copies = table.column("top_k")
        nodes = -(-ranks // (load_hardware(table.run.hardware).domain or ranks))
        once = table.lines[0][1]["dispatch_notify_us"] != ""
        if once:
            copies = distinct_destinations(copies, nodes if nodes > 1 else ranks)
        for phase, each in (("dispatch", _SCALED_FP8), ("combine", ACT)):
            time = table.column(f"{phase}_us")
            if once:
                time = time + table.column(f"{phase}_notify_us")
            yield Transfers(
                f"all-to-all DeepEP {mode.replace('_', ' ')}",
                table.run,
                "all_to_all",
                ranks,
                table.column("tokens") * copies * table.column("hidden") * each,
                time * US,
                tuple((case, f"{phase}, {what}") for case, what in table.labels("expert_exchange", _tokens)),
                kernel=MODES[mode],
            )


def _heads(row: Row) -> str:
    return f"{row['heads']} heads, {row['kv_heads']} of KV"


def _tokens(row: Row) -> str:
    return f"{row['ranks']} ranks, {row['tokens']} tokens to {row['top_k']} of {row['experts']} experts"
