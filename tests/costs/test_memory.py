"""What the fullest chip holds, and how many tokens and requests a replica has room for."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Engine, Hardware, Model, estimate, load_engine, load_machine, load_model
from planner.costs.layers import Formats, Structure
from planner.costs.memory import Budget, Room, activation_bytes, held_tokens, needed_tokens, room
from planner.costs.serving import formats_of
from planner.costs.weights import Shard, Stages, embedding_elements, head_elements, layer_weights

GIB = 2.0**30
HEADS, BATCH = Structure("heads"), Structure("batch")
some = settings(derandomize=True, deadline=None, max_examples=60)


def space_of(
    model: Model, hardware: Hardware, engine: Engine, tp: int, pp: int, structure: Structure = HEADS, **budget: float
) -> Room:
    formats = formats_of(model, hardware, engine, None, None)
    shard, stages = Shard.of(model, tp, engine.vocabulary_multiple), Stages.of(model, pp)
    return room(model, engine, shard, stages, formats, structure, Budget.of(hardware, engine, **budget))


class Stage(NamedTuple):
    """One pipeline stage of a replica, per chip."""

    weights: float
    kv_token: float

    def tokens(self, limit: float, other: float, block: int) -> float:
        """Whole blocks of tokens beside weights and runtime."""
        if self.kv_token == 0:
            return math.inf
        return max(0.0, limit - self.weights - other) // self.kv_token // block * block


def stages_of(model: Model, engine: Engine, formats: Formats, tp: int, pp: int, by_heads: bool) -> list[Stage]:
    """Every stage on its own: layers dealt one by one, ends where they belong."""
    dealt = [model.layers // pp] * pp
    for extra in range(model.layers % pp):
        dealt[-2 - extra] += 1
    shard = Shard.of(model, tp, engine.vocabulary_multiple)
    elements = layer_weights(model, shard)
    layer = float(elements.matrices * formats.weights.bytes + elements.vectors * formats.weights.plain_bytes)
    kv_heads = max(1, -(-model.attention.kv_heads // tp)) if by_heads else model.attention.kv_heads
    kv_layer = 2 * kv_heads * model.attention.head_dim * formats.kv.bytes
    stages = []
    for index, count in enumerate(dealt):
        weights = count * layer
        if index == 0:
            weights += 2.0 * float(embedding_elements(model, shard))
        if index == pp - 1:
            weights += 2.0 * model.norm.final * model.norm.vectors * model.hidden
            # one matrix serves both ends where they are tied and on one stage
            weights += 0.0 if model.tied_embeddings and pp == 1 else 2.0 * float(head_elements(model, shard))
        if engine.memory.rotary_tables and not model.learned_positions:
            weights += 2.0 * model.max_context * model.attention.head_dim
        stages.append(Stage(weights, count * kv_layer))
    return stages


@some
@given(
    st.sampled_from(["llama3-8b", "llama3-70b", "opt-13b", "palm-62b", "falcon-180b", "qwen2.5-7b"]),
    st.sampled_from([("h200-sxm", "vllm"), ("b200-sxm", "sglang"), ("mi300x", "ideal"), ("h100-lecture", "lecture")]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 20),
    st.integers(1, 100),
    st.sampled_from([HEADS, BATCH]),
    st.sampled_from([None, "int4"]),
    st.integers(1, 600),
    st.integers(1, 5000),
)
def test_capacity_and_the_fullest_chip_are_those_of_all_stages_one_by_one(
    name: str, machine: tuple[str, str], tp: int, pp: int, layers: int, structure: Structure, weights: str | None,
    requests: int, tokens: int,
) -> None:  # fmt: skip
    model = load_model(name)._replace(layers=max(layers, pp))
    hardware, engine = load_machine(*machine)
    formats = formats_of(model, hardware, engine, weights, None)
    budget = Budget.of(hardware, engine)
    shard = Shard.of(model, tp, engine.vocabulary_multiple)
    space = room(model, engine, shard, Stages.of(model, pp), formats, structure, budget)
    block = engine.scheduler.block_tokens
    held = -(-tokens // block) * block

    stages = stages_of(model, engine, formats, tp, pp, structure == HEADS)
    others = [float(space.other[0 if index == 0 else 2 if index == pp - 1 else 1]) for index in range(pp)]
    chip_tokens = min(stage.tokens(budget.limit, other, block) for stage, other in zip(stages, others, strict=True))
    holders = 1 if structure == HEADS else tp
    assert space.holders == holders
    assert float(space.chip_tokens) == chip_tokens
    assert float(space.capacity_tokens) == holders * chip_tokens
    assert float(space.requests(held)) == holders * (chip_tokens // held)

    on_chip = -(-requests // holders) * held
    totals = [stage.weights + stage.kv_token * on_chip + other for stage, other in zip(stages, others, strict=True)]
    fullest_weights, fullest_kv, fullest_other = space.fullest(held, requests)
    assert float(fullest_weights + fullest_kv + fullest_other) == pytest.approx(max(totals), rel=1e-12)
    assert any(
        float(fullest_weights) == pytest.approx(stage.weights, rel=1e-12)
        and float(fullest_kv) == pytest.approx(stage.kv_token * on_chip, rel=1e-12)
        for stage in stages
    )


def test_many_depths_at_once_are_those_of_each() -> None:
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h200-sxm")
    depths = np.arange(1, 12)
    formats = formats_of(model, hardware, engine, None, None)
    shard = Shard.of(model, np.full(len(depths), 4), engine.vocabulary_multiple)
    together = room(model, engine, shard, Stages.of(model, depths), formats, HEADS, Budget.of(hardware, engine))
    weights, kv, other = together.fullest(np.full(len(depths), 2048.0), np.full(len(depths), 9.0))
    for index, pp in enumerate(depths.tolist()):
        alone = space_of(model, hardware, engine, 4, pp)
        assert together.capacity_tokens[index] == alone.capacity_tokens
        assert (weights[index], kv[index], other[index]) == alone.fullest(2048.0, 9.0)


# --- KV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "structure", "on_holder", "average"),
    [
        (1, HEADS, 327680, 327680),
        (8, HEADS, 40960, 40960),
        (16, HEADS, 40960, 40960),
        (8, BATCH, 327680, 40960),
        (16, BATCH, 327680, 20480),
    ],
)
def test_kv_of_a_token_of_llama_3_70b(tp: int, structure: Structure, on_holder: int, average: int) -> None:
    """Beyond its eight KV heads, heads save nothing while the batch still divides."""
    space = space_of(load_model("llama3-70b"), *load_machine("h100-lecture"), tp, 1, structure)
    assert sum(space.kv_token) == on_holder
    assert sum(space.kv_token) / space.holders == average


def test_kv_divides_over_stages_by_their_layers() -> None:
    space = space_of(load_model("llama3-70b"), *load_machine("h100-lecture"), 8, 3)
    assert [kv / 40960 * 80 for kv in space.kv_token] == [27, 27, 26]


def test_an_8_bit_cache_takes_half() -> None:
    row = {"hardware": "h100-sxm", "tp": 4, "concurrency": 16}
    full, half = estimate("llama3-70b", **row), estimate("llama3-70b", **row, kv_cache="fp8")
    assert half["kv_gib"] == pytest.approx(full["kv_gib"] / 2, rel=1e-12)
    assert half["kv_capacity_tokens"] == pytest.approx(2 * full["kv_capacity_tokens"], abs=32)


def test_over_heads_every_chip_holds_a_part_and_over_the_batch_whole_requests() -> None:
    """Sixteen chips of the lecture: eight copies of each head pair against sixteen different requests."""
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h100-lecture")
    heads, batch = (space_of(model, hardware, engine, 16, 1, structure) for structure in (HEADS, BATCH))
    assert float(batch.capacity_tokens / heads.capacity_tokens) == pytest.approx(2.0, rel=1e-4)
    # one request of 1,024 tokens more than sixteen needs a second one on some chip
    weights, kv_of_16, _ = batch.fullest(1024.0, 16.0)
    assert float(kv_of_16) == 1024 * 327680
    assert float(batch.fullest(1024.0, 17.0)[1]) == 2 * 1024 * 327680
    assert float(batch.fullest(1024.0, 1.0)[1]) == 1024 * 327680
    assert float(heads.fullest(1024.0, 17.0)[1]) == 17 * 1024 * 40960
    assert weights == heads.fullest(1024.0, 16.0)[0]
    # a request does not straddle two chips
    assert float(batch.requests(1024.0)) == 16 * (batch.chip_tokens // 1024)


# --- blocks and reservations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "isl", "osl", "max_context", "needed", "held"),
    [
        ("vllm", 1000, 100, 0, 1104, 1056),  # blocks of 16: 1,100 tokens need 69, 1,050 on average hold 66
        ("vllm", 1024, 256, 0, 1280, 1152),
        ("vllm", 1, 1, 0, 16, 16),
        ("vllm", 1000, 100, 4096, 4096, 1056),  # room must be found for more, held is what runs
        ("vllm", 1000, 100, 500, 1104, 1056),
        ("trtllm", 1000, 100, 0, 1120, 1056),
        ("sglang", 1000, 101, 0, 1101, 1051),
        ("lecture", 1000, 100, 0, 1100, 1100),
        ("lecture", 1000, 100, 4096, 4096, 4096),  # the whole room is reserved from the start
    ],
)
def test_a_request_needs_room_in_whole_blocks(
    engine: str, isl: int, osl: int, max_context: int, needed: int, held: int
) -> None:
    software = load_engine(engine)
    assert needed_tokens(software, isl, osl, max_context) == needed
    assert held_tokens(software, isl, osl, max_context) == held


def test_a_larger_context_to_be_held_changes_room_and_nothing_else() -> None:
    options = {"hardware": "h100-sxm", "tp": 8, "concurrency": 8}
    plain, roomy = estimate("llama3-70b", **options), estimate("llama3-70b", **options, max_context=8192)
    changed = {name for name in plain if plain[name] != roomy[name]}
    assert changed == {"max_concurrency"}
    assert roomy["max_concurrency"] == roomy["kv_capacity_tokens"] // 8192
    longer = estimate("llama3-70b", **options, isl=9000, max_context=9256)
    assert longer["ttft_ms"] > plain["ttft_ms"]


def test_max_concurrency_is_tokens_over_need_up_to_the_engines_sequences() -> None:
    many = estimate("llama3-8b", hardware="h100-sxm", isl=1000, osl=100, dp=3)
    assert many["max_concurrency"] == 3 * (many["kv_capacity_tokens"] // 1104)
    assert many["kv_capacity_tokens"] % 16 == 0
    short = estimate("llama3-8b", hardware="h100-sxm", isl=10, osl=10, dp=3)
    assert short["kv_capacity_tokens"] // 32 > 1024
    assert short["max_concurrency"] == 3 * 1024


# --- the budget -----------------------------------------------------------------------------------------------------


def test_the_budget_is_a_fraction_of_what_the_driver_reports_or_a_limit() -> None:
    hardware, engine = load_machine("h100-sxm")
    assert Budget.of(hardware, engine) == (pytest.approx(0.9 * 79.2 * GIB), 79.2 * GIB)
    assert Budget.of(hardware, engine, fraction=0.5).limit == pytest.approx(39.6 * GIB)
    assert Budget.of(hardware, engine, limit=10 * GIB, fraction=0.5).limit == 10 * GIB
    assert estimate("llama3-8b", memory_limit="40GiB")["memory_limit_gib"] == pytest.approx(40)
    assert estimate("llama3-8b", memory_limit="40GB")["memory_limit_gib"] == pytest.approx(40e9 / GIB)
    assert estimate("llama3-8b", memory_fraction=0.5)["memory_limit_gib"] == pytest.approx(39.6)


def test_activations_are_the_samplers_rows_or_the_widest_layer() -> None:
    vllm, sglang, lecture = (load_engine(name) for name in ("vllm", "sglang", "lecture"))
    wide_vocabulary, model = load_model("llama3-70b"), load_model("llama2-70b")
    one, eight = Shard.of(model, 1), Shard.of(model, 8)
    assert activation_bytes(wide_vocabulary, vllm, Shard.of(wide_vocabulary, 8)) == 3952.6 * 128256 * 4
    # gate, up and their product, and six rows of the residual width, in 16 bit
    assert activation_bytes(model, sglang, one) == 8192 * (3 * 28672 + 6 * 8192) * 2
    assert activation_bytes(model, sglang, eight) == 8192 * (3 * 28672 / 8 + 6 * 8192) * 2
    assert activation_bytes(model, lecture, one) == 0.0


@pytest.mark.parametrize(
    ("tp", "inside", "outside"), [(1, 0.25, 1.41), (2, 2.07, 3.03), (8, 2.2, 3.03), (32, 2.2, 3.03)]
)
def test_runtime_memory_follows_the_size_of_the_group(tp: int, inside: float, outside: float) -> None:
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h100-sxm")
    space = space_of(model, hardware, engine, tp, 1)
    peak = activation_bytes(model, engine, Shard.of(model, tp))
    assert float(space.other[0]) == pytest.approx(peak + inside * GIB, rel=1e-12)
    assert float(space.outside) == pytest.approx(outside * GIB, rel=1e-12)
    # between measured sizes: a straight line
    if tp == 1:
        between = space_of(model, hardware, engine, 6, 1)
        assert float(between.other[0] - activation_bytes(model, engine, Shard.of(model, 6))) == pytest.approx(
            2.175 * GIB
        )


def test_weights_that_leave_no_room_hold_no_request() -> None:
    space = space_of(load_model("llama3-70b"), *load_machine("h100-sxm"), 1, 1)
    assert float(space.capacity_tokens) == 0.0
    assert float(space.requests(16.0)) == 0.0


def test_tied_embeddings_weigh_at_both_ends_of_a_pipeline() -> None:
    """OPT 13B on two stages: the matrix of 50,272 x 5,120 stands on the first and on the last chip."""
    model, (hardware, engine) = load_model("opt-13b"), load_machine("h100-lecture")
    matrix = 2.0 * 50272 * 5120
    (alone, _, _), (first, middle, last) = (space_of(model, hardware, engine, 1, pp).weights for pp in (1, 2))
    assert float(first + last - alone) == matrix
    assert float(middle) == 0.0
    assert float(first - last) == 2.0 * 2050 * 5120 - 2.0 * 2 * 5120  # positions against the final norm
