"""Pope et al. 2022 through the planner: what fits (table 1), what is read and exchanged (lecture), what is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner import (
    Filters,
    Request,
    Workload,
    estimate,
    load_engine,
    load_hardware,
    load_machine,
    load_model,
)
from planner.costs.collectives import Network, sent_bytes
from planner.costs.layers import Pass, Structure, Transfer
from planner.costs.layouts import count
from planner.costs.memory import Budget
from planner.costs.serving import formats_of
from planner.costs.teams import Groups
from planner.costs.weights import Shard, layer_weights, parameters
from planner.plans.placement import Placement
from planner.plans.plan import Plan
from planner.ranking import rank
from planner.startup import Start
from planner.units import GIB, US

POPE, TPU = load_engine("pope"), load_hardware("tpu-v4")
CHIP = TPU.chip.memory_bytes


def start(model: str, label: str, limit: float = CHIP, **more: Any) -> Start:
    return Start.of(load_model(model), POPE, Plan.parse(label), Budget(limit, CHIP), **more)


def longest_context(model: str, label: str, batch: int) -> int:
    """Tokens that each of so many requests can have where KV may take 30 % of the chips' memory, by bisection."""
    whole = start(model, label)
    room = start(model, label, float(whole.room.weights[0] + whole.room.other[0]) + 0.3 * CHIP).room
    assert float(room.free[0]) == pytest.approx(0.3 * CHIP)
    low, high = 1, 2**20
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if float(np.min(room.requests(middle))) >= batch else (low, middle)
    return low


@pytest.mark.parametrize(
    ("model", "label", "batch", "published"),
    [
        ("palm-540b-multihead", "TP64", 128, 1320),
        ("palm-540b-multihead", "TP64", 512, 330),
        ("palm-540b-multihead", "TP64/2d:4x16", 512, 330),
        ("palm-540b-padded", "TP64", 128, 660),
        ("palm-540b-padded", "TP64", 512, 165),
        ("palm-540b", "TP64/2d:4x16", 512, 165),
        ("palm-540b-padded", "TP64/batch", 128, 43_000),
        ("palm-540b-padded", "TP64/batch", 512, 10_700),
        ("palm-540b", "TP64/batch/2d:4x16", 128, 43_000),
        ("palm-540b", "TP64/batch/2d:4x16/wg-xyz", 512, 10_700),
    ],
)
def test_the_longest_contexts_of_table_1(model: str, label: str, batch: int, published: int) -> None:
    assert longest_context(model, label, batch) == pytest.approx(published, rel=0.015)


def test_contexts_of_table_1_are_found_where_the_limit_on_contexts_is_lifted() -> None:
    """By the command's own road: 128 requests of 40,000 tokens fit over the batch and not over heads."""
    limit = f"{float(start('palm-540b', 'TP64').room.weights[0]) / GIB + 0.3 * CHIP / GIB:.4f}GiB"
    shared: dict[str, Any] = {
        "hardware": "tpu-v4", "gpus": 64, "isl": 40_000, "osl": 64, "concurrency": 128, "max_context": 40_064,
        "memory_limit": limit, "schedule": "static",
    }  # fmt: skip
    found = estimate("palm-540b", plan="TP64/batch/2d:4x16", **shared)
    assert 128 <= found["max_concurrency"] < 192
    assert estimate("palm-540b", plan="TP64/2d:4x16", **shared)["max_concurrency"] == 2


def lecture_exchanges(layout: str) -> tuple[Network, Groups, list[Transfer]]:
    """The all-to-alls of a decode step: 512 requests of PaLM 540B with 64 heads on 64 chips, lecture's constants."""
    machine, engine = load_machine("tpu-v4-lecture", None)
    model = load_model("palm-540b-padded")
    grid = (4, 16) if layout == "2d" else (1, 64)
    shard = Shard.for_engine(model, engine, "bf16", np.array([64]), x=np.array([grid[0]]), y=np.array([grid[1]]))
    structure = Structure("batch", "heads", layout, layout)
    formats = formats_of(model, machine, engine, None, None)
    _, transfers = count(model, engine, shard, Pass(512.0, 2048.0), formats, structure)
    network = Network(Placement.of(machine, 64), engine)
    return (
        network,
        Groups.of(np.array([64])),
        [one for one in transfers if one.op == "all_to_all" and np.any(one.bytes)],
    )


@pytest.mark.parametrize("layout", ["1d", "2d"])
def test_sharding_over_the_batch_costs_two_exchanges_a_layer(layout: str) -> None:
    """532,224 B and 6.5 us; the lecture lets K and V travel back with the output, 8,064 B that need not."""
    network, groups, (there, back) = lecture_exchanges(layout)
    sent = [float(sent_bytes("direct", one.op, 64, one.bytes).item()) for one in (there, back)]
    assert 2 * sent[0] == pytest.approx(532_224)
    assert sum(sent) == pytest.approx(532_224 - 8_064)
    seconds = float(sum(network.price(one, groups) for one in (there, back))[0])
    assert seconds / US == pytest.approx(6.5, abs=0.1)
    assert float(2 * network.price(there, groups)[0]) / US == pytest.approx(6.5, abs=0.05)


def test_padded_heads_are_stored() -> None:
    """48 heads to 64 on 64 chips: 18 B parameters more (section 4)."""
    plain, padded = load_model("palm-540b"), load_model("palm-540b-padded")
    more = parameters(padded) - parameters(plain)
    assert more == pytest.approx(18e9, rel=0.02)
    for label in ("TP64", "TP64/2d:4x16"):
        own, whole = (float(start(model, label).room.weights[0]) for model in ("palm-540b", "palm-540b-padded"))
        assert own == whole
    fewer = float(start("palm-540b", "TP16").room.weights[0]) * 16  # 48 heads on 16 chips want no padding
    assert own * 64 - fewer == pytest.approx(2 * more, rel=0.06)  # and copies of what every chip has
    # an engine that does not pad stores the heads over YZ as they are
    shards = [Shard.for_engine(plain, load_engine(name), "bf16", 64, x=4, y=16) for name in ("pope", "ideal")]
    assert [float(shard.stored_heads) for shard in shards] == [4, 3]
    assert [float(shard.heads) for shard in shards] == [1, 1]


def test_layouts_of_a_grid_store_alike_and_gathered_weights_take_room() -> None:
    plain = start("palm-540b", "TP64/2d:4x16")
    stored = {
        label: start("palm-540b", label)
        for label in ("TP64/2d:4x16/wg-x", "TP64/2d:4x16/wg-xyz", "TP64/wg-xyz:4x16", "TP64/2d:4x4x4/wg-xy")
    }
    model = load_model("palm-540b")
    shard = Shard.for_engine(model, POPE, "bf16", 64, x=4, y=16)
    own = float(layer_weights(model, shard).matrices) * 2
    padded = load_model("palm-540b-padded")
    whole = float(layer_weights(padded, Shard.of(padded, 1)).matrices) * 2
    for label, found in stored.items():
        assert found.room.weights == plain.room.weights, label
        more = float(found.room.other[0] - plain.room.other[0])
        share = {"wg-x": 1 / 16, "wg-xy": 1 / 4, "wg-xyz": 1}[label.split("/")[-1].split(":")[0]]
        # K and V, which one head has, are whole on every chip as soon as X is gathered
        keys = 2 * 18432 * 256 * 2 * (1 - share)
        assert more == pytest.approx(whole * share + keys - own, rel=1e-9), label
    assert float(stored["TP64/2d:4x16/wg-xyz"].free[0]) < float(plain.free[0])


def test_what_is_printed_is_what_is_priced_at_each_grid() -> None:
    """A ranking over grids and layouts gives each the price that it has when it is asked for alone."""
    machine, engine = load_machine("tpu-v4", None)
    work = Workload(isl=1984, osl=64, concurrency=64, weights="int8", schedule="static")
    request = Request(
        load_model("palm-540b"), machine, engine, 64, work, "latency", filters=Filters(tp=(16, 64), pp=(1, 2))
    )
    rows = rank(request).results
    assert len({row for row in rows["grid"] if row}) >= 3
    for index in range(0, len(rows), 3):
        row = rows.row(index)
        alone = estimate(
            "palm-540b", hardware="tpu-v4", gpus=64, plan=row["plan"], isl=1984, osl=64, concurrency=64,
            weights="int8", schedule="static",
        )  # fmt: skip
        for name in ("latency_ms", "ttft_ms", "tpot_ms", "memory_gib", "max_concurrency", "grid"):
            assert alone[name] == (pytest.approx(row[name], rel=1e-12) if name != "grid" else row[name])
