"""Published end-to-end figures, of dense models and of experts, against the model's word on the same deployment.

`published.csv` holds one figure a row, with its conditions, grade and source. Grade A: all conditions are stated or
follow from the script that ran; B: one is implied, the note says which. `metric` names a result column (METRICS says
which): `latency` is a batch from its prompts to its last token, `tokens_per_s` counts output tokens of all chips,
`tokens_per_s_per_gpu` those of one. A static row prefills and decodes its whole batch together. Tokens per second and
node of units that only prefill or only decode are carried as the time of that pass (`ttft`, `tpot`): the tokens of a
node's chips over the rate, the figure itself in the note.

Constants of the engines `fastertransformer`, `gpt-fast`, `trtllm-0.*`, `vllm-rocm*` and `vllm-v0` were fitted to these
rows: to those that `part` calls fitted, by least squares of log(predicted / observed) with a soft L1 loss beyond 10 %,
in one fit per engine over all its models at once; what `trtllm-0.9` and `vllm` have of experts' kernels and `sglang-ep`
of two-batch overlap likewise, one constant each. No constant belongs to a model. Each engine file says which of its
constants were free; residuals there are mean errors on all rows of the engine and chip.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple
from zlib import crc32

from planner.errors import InputError
from planner.estimating import estimate_points
from planner.evidence.comparison import Comparison, once
from planner.plans.plan import Plan
from planner.specs.catalog import MODELS, names
from planner.specs.measurements import FOLDER, measurements

Row = dict[str, str]
METRICS = {
    "latency": "latency_ms",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_per_gpu": "tokens_per_s_per_gpu",
}
"""The result column that each metric is compared with."""
LOWER_IS_BETTER = frozenset(("latency", "ttft", "tpot"))
_OPTIONS = (
    "hardware", "engine", "weights", "kv_cache", "schedule", "arrivals", "tp", "pp", "dp", "ep", "isl", "osl",
    "max_context", "concurrency",
)  # fmt: skip
_CONDITION = ("engine", "hardware", "model", "weights")


class LeftOut(NamedTuple):
    """Figures that were read and are not compared."""

    source: str
    what: str
    reason: str


LEFT_OUT = (
    LeftOut("FasterTransformer, bert_guide", "forward of a 6B encoder", "attention sees both ways; no decoder"),
    LeftOut("FasterTransformer, gpt_guide", "Megatron-LM column", "an eager baseline, no engine of ours"),
    LeftOut("gpt-fast", "achieved GB/s", "the tokens/s of the same runs times the bytes of the weights"),
    LeftOut("gpt-fast", "Mixtral as of February 2024", "a tenth to two fifths below the same page later: kernels"),
    LeftOut("TensorRT-LLM 0.14, 0.20, 1.0, 1.2", "highest throughput", "how many requests ran is not stated"),
    LeftOut("Shift Parallelism", "SP8 and mixed rows, highest throughput", "sequence parallelism; load not stated"),
    LeftOut("ROCm vLLM", "throughput of thousands of prompts", "requests queue; whether input counts is not stated"),
    LeftOut("dstack", "TP8 on H100 from 64 requests on, TP4 on MI300X with 32k prompts", "requests wait for KV room"),
    LeftOut(
        "JetStream", "runs of March 2024", "each step reads whole slots of 2048 or 1280 tokens, not what they hold"
    ),
    LeftOut("JetStream", "Gemma 7B", "not in the catalogue"),
    LeftOut("TPU recipes", "TTFT at 64 and 128 requests", "a budget of 512 tokens, set by hand, and a queue"),
    LeftOut("transformers-bloom-inference, Gaudi blog", "BLOOM on DeepSpeed", "no engine of ours launches so"),
    LeftOut("LMDeploy, MLC, llama.cpp, exllama", "all", "no engine of ours has their kernels"),
    LeftOut("Splitwise, MLC's vLLM column", "vLLM of 2023", "bound by launches from Python; no constants for it"),
    LeftOut(
        "tt-inference-server", "DeepSeek-R1 on 8 and 16 H100", "plans not stated; as TP8 and TP16 about half is priced"
    ),
    LeftOut("GPUStack", "all", "a thousand prompts of all lengths at once: the load falls from all of them to none"),
    LeftOut("InferenceX", "Qwen3.5, DeepSeek-V3.2, GLM-5", "linear or sparse attention, which is not priced"),
    LeftOut("SGLang cookbook", "all", "lengths are drawn from a range, and its ends are not stated"),
    LeftOut("dstack", "gpt-oss, TTFT and throughput of prefill and decode units", "units that share a queue"),
    LeftOut("TensorRT-LLM blogs and 5929", "DeepSeek-R1 on B200", "nvfp4 is not a dtype of ours"),
    LeftOut("SGLang pipelines", "128k prompts on H20", "a board with 141 GB, and a context beyond the model's own"),
    LeftOut("SGLang 14194", "Kimi-K2 on H20 with 141 GB", "the board is not in the catalogue"),
    LeftOut("DeepSeek-V3 AWQ", "8 H100 or H200", "which of the two is not stated"),
    LeftOut("Pope et al. 2022", "curves of its figures", "read off by eye; MT-NLG on TPU: its batch is not stated"),
    LeftOut("MLPerf, AWS Neuron, ml-engineering", "all", "rules of attribution or share-alike licences"),
)
"""What was read besides, and why it is not here."""


def part(row: Row) -> str:
    """`fitted` or `unseen`, by a rule fixed before any fit: CRC-32 of the condition, plans left out, even = fitted.

    Plans of one condition so fall into one part. `fit` says whether an engine's constants on that chip were fitted
    to these rows at all: to one half, to none or, where there are two rows, to all.
    """
    if row["fit"] != "half":
        return "fitted" if row["fit"] == "all" else "unseen"
    condition = " ".join(row[name] for name in _CONDITION)
    even = crc32(f"{condition} {row['isl']}/{row['osl']} {row['concurrency']}".encode()) % 2 == 0
    return "fitted" if even else "unseen"


@once
def comparisons(rows: Iterable[Row] | None = None) -> list[Comparison]:
    """Every published figure beside the model's, in the order of the table.

    `check` names engine, version, chip and metric; `model` the catalogue's name.

    Raises:
        InputError: a row that cannot be priced, with the reason.
    """
    table = list(measurements("published") if rows is None else rows)
    if not table:
        return []
    columns = {name: [row[name] for row in table] for name in _OPTIONS}
    columns |= {"model": [model_option(row["model"]) for row in table], "plan": [_label(row) for row in table]}
    results = estimate_points(columns, len(table))
    found = []
    for index, row in enumerate(table):
        error = results.columns["error"][index]
        if error is not None:
            raise InputError(f"published.csv, case {row['case']}: {error}")
        running = float(results.columns["batch_per_replica"][index]) * int(row["dp"])
        found.append(
            Comparison(
                check=f"{row['engine']} {row['engine_version']} on {row['hardware']}: {row['metric']}",
                case=row["case"],
                what=_what(row, running),
                observed=float(row["value"]),
                predicted=float(results.columns[METRICS[row["metric"]]][index]),
                hardware=row["hardware"],
                engine=row["engine"],
                model=row["model"],
                unit=row["unit"],
                part=part(row),
                source=row["source"],
            )
        )
    return found


@cache
def model_option(name: str) -> str:
    """What names a model to the planner: the catalogue's name, or the file that stands beside the measurements."""
    return name if name in names(MODELS) else str(FOLDER / "models" / f"{name}.yaml")


def plan_of(row: Row) -> Plan:
    """The plan of a row."""
    return Plan.parse(_label(row))


def _label(row: Row) -> str:
    """Degrees, then how attention and the projections are sharded, as plans print."""
    return Plan(int(row["tp"]), int(row["pp"]), int(row["dp"]), int(row["ep"])).label + row["sharding"]


def _what(row: Row, running: float) -> str:
    text = f"{row['weights']} {plan_of(row).label}, {row['isl']} + {row['osl']}, batch {row['concurrency']}"
    return text if running >= float(row["concurrency"]) else f"{text} ({running:.0f} fit)"
