"""What drafting won in published runs that say how much of it was accepted, against the model's word.

`speculation.csv` holds a speed-up a row: the same deployment with and without a draft, whose acceptance is given to the
planner as reported. No constant rests on these rows. Runs that speculate and keep their acceptance to themselves are no
evidence of what a step costs, and are not here (`LEFT_OUT`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.errors import InputError
from planner.estimating import estimate_points
from planner.evidence.comparison import Comparison, once
from planner.evidence.published import LeftOut, Row
from planner.specs.measurements import measurements

LEFT_OUT = (
    LeftOut(
        "TensorRT-LLM tech blogs 1 and 2", "DeepSeek-R1 on B200, 2.16 times", "nvfp4; acceptance stands in a figure"
    ),
    LeftOut(
        "vLLM 12755", "DeepSeek-R1, 1.63 and 1.18 times", "requests arrive at a rate; their lengths are not stated"
    ),
    LeftOut("SGLang on 96 H100", "decode with simulated acceptance", "the run did not draft: batches stood for it"),
    LeftOut("InferenceX", "runs named MTP", "acceptance is not stated"),
)
"""What was read besides, and why it is not here."""
_OPTIONS = ("model", "hardware", "engine", "plan", "weights", "isl", "osl", "concurrency")


@once
def comparisons(rows: Iterable[Row] | None = None) -> list[Comparison]:
    """Every published speed-up beside the model's, in the order of the table.

    Raises:
        InputError: a row of which one of the two runs cannot be priced, with the reason.
    """
    table = list(measurements("speculation") if rows is None else rows)
    if not table:
        return []
    twice = [row for row in table for _ in range(2)]  # without a draft, with one
    columns: dict[str, Sequence[str]] = {name: [row[name] for row in twice] for name in _OPTIONS}
    for name, option in (("draft", "draft"), ("spec_tokens", "tokens"), ("spec_accept", "accept")):
        columns[name] = [text for row in table for text in ("", row[option])]
    results = estimate_points(columns, len(twice))
    found = []
    for index, row in enumerate(table):
        plain, drafted = 2 * index, 2 * index + 1
        error = results.columns["error"][plain] or results.columns["error"][drafted]
        if error is not None:
            raise InputError(f"speculation.csv, case {row['case']}: {error}")
        rates = results.columns[row["metric"]]
        found.append(
            Comparison(
                check=f"{row['engine']} on {row['hardware']}: speed-up by {row['draft']}",
                case=row["case"],
                what=f"{row['weights']} {row['plan']}, batch {row['concurrency']}, {row['accept']} accepted",
                observed=float(row["value"]),
                predicted=float(rates[drafted] / rates[plain]),
                hardware=row["hardware"],
                engine=row["engine"],
                model=row["model"],
                unit="times",
                part="unseen",
                source=row["source"],
            )
        )
    return found
