"""Whole blocks of latent attention as engines run them, and the sum of what is counted: no constant rests on them.

A block is everything between a layer's norm and its all-reduce, for one rank's heads of DeepSeek-V3. That its kernels
are the right ones, in the right number, shows here: each alone is checked by `evidence.primitives`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.costs.latent import latent_operations
from planner.costs.layers import Formats, Operation, Pass, Structure, causal_pairs
from planner.costs.roofline import price_operation
from planner.costs.weights import Shard
from planner.evidence.comparison import Comparison, once
from planner.evidence.primitives import UNSEEN, Row, Run, runs
from planner.specs.catalog import load_model
from planner.specs.dtypes import WEIGHTS
from planner.specs.measurements import measurements
from planner.units import US

TABLE = "latent_block"
MODEL = "deepseek-v3"


class Block(NamedTuple):
    """Rows of one run with the same formats, phase and heads: arrays over batches and lengths."""

    run: Run
    phase: str
    """decode or prefill."""
    formats: Formats
    heads: int
    rows: tuple[tuple[int, Row], ...]
    """(line of the table, row)."""

    def _column(self, name: str) -> NDArray[np.float64]:
        return np.array([float(row[name]) for _, row in self.rows])

    def operations(self) -> list[Operation]:
        """What one layer's attention runs, with quantities over the rows."""
        model, batch, tokens = load_model(MODEL), self._column("batch"), self._column("tokens")
        engine, shard = self.run.machine()[1], Shard.of(model, model.attention.heads / self.heads)
        work = Pass(batch, tokens)
        if self.phase == "prefill":
            none = np.zeros_like(batch)
            work = Pass(none, none, batch * tokens, batch * causal_pairs(tokens), none, batch, batch)
        return latent_operations(model, shard, work, self.formats, Structure(), engine.memory.latent_copies)

    def predicted(self) -> NDArray[np.float64]:
        """Seconds [rows] by the model, kernels as they run alone."""
        hardware = self.run.machine()[0].alone
        total = sum(price_operation(hardware, operation).total for operation in self.operations())
        return np.broadcast_to(np.asarray(total, dtype=float), (len(self.rows),))


def blocks() -> list[Block]:
    """All measured blocks."""
    known = runs(TABLE)
    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for line, row in enumerate(measurements(f"kernels/{TABLE}"), start=2):
        key = tuple(row[name] for name in ("run", "phase", "weights", "kv", "heads"))
        groups.setdefault(key, []).append((line, row))
    found = []
    for (run, phase, weights, kv, heads), rows in groups.items():
        native = known[run].machine()[0].chip.native_dtype
        formats = Formats(WEIGHTS[weights], WEIGHTS[kv], WEIGHTS[weights].compute, native)
        found.append(Block(known[run], phase, formats, int(heads), tuple(rows)))
    return found


@once
def comparisons() -> list[Comparison]:
    """Every measured block beside the model's price of it, in microseconds."""
    found = []
    for block in blocks():
        for (line, row), priced in zip(block.rows, block.predicted().tolist(), strict=True):
            what = f"{row['heads']} heads, {row['kv']} KV, {row['batch']} x {row['tokens']} tokens"
            found.append(
                Comparison(
                    f"latent block {row['weights']}, {block.phase}",
                    f"{TABLE}.csv:{line}",
                    what,
                    float(row["us"]),
                    priced / US,
                    block.run.hardware,
                    block.run.engine,
                    unit="us",
                    part=UNSEEN,
                    source=block.run.said,
                )
            )
    return found
