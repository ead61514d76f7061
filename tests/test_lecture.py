"""The lecture's printed numbers come out of the planner's own counts and prices, by data: `h100-lecture`."""

import csv
import gc
import io
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import Filters, NoPlanError, estimate, load_hardware, load_machine, load_model, plan
from planner.command import main
from planner.costs.collectives import Network, sent_bytes
from planner.costs.layers import Operation, Pass, Structure, Transfer, count
from planner.costs.memory import Budget, Room, room
from planner.costs.roofline import Parts, resources
from planner.costs.serving import _pipelined, formats_of
from planner.costs.step import PassTime, Replica, pass_time
from planner.costs.weights import Shard, Stages, parameters, stage_weight_bytes
from planner.estimating import estimate_points
from planner.plans.placement import Placement
from planner.results import Results
from planner.specs.dtypes import ACTIVATION_BYTES, WEIGHTS, kv_dtype
from planner.specs.model import Model

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden" / "lecture.csv"
LECTURE = "h100-lecture"
MIB_64 = 64 * 2**20
MS, US = 1e-3, 1e-6


def golden_rows() -> list[dict[str, str]]:
    with GOLDEN.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --- what the planner says ------------------------------------------------------------------------------------------


def network(hardware: str = LECTURE, gpus: int = 16) -> Network:
    machine, engine = load_machine(hardware)
    return Network(Placement.of(machine, gpus), engine)


def counted(
    model: Model, tp: int, work: Pass, structure: Structure, hardware: str
) -> tuple[list[Operation], list[Transfer]]:
    machine, engine = load_machine(hardware)
    return count(model, engine, Shard.of(model, tp), work, formats_of(model, machine, engine, None, None), structure)


def all_reduce(model: Model, tp: int, tokens: int) -> Transfer:
    _, transfers = counted(model, tp, Pass(0.0, 1.0, float(tokens), prompts=1.0), Structure(), LECTURE)
    return next(transfer for transfer in transfers if transfer.op == "all_reduce")


def weight_bytes(model: str) -> float:
    spec = load_model(model)
    first, _, _ = stage_weight_bytes(spec, Shard.of(spec, 1), Stages.of(spec, 1), WEIGHTS["bf16"])
    return float(first)


def kv_bytes(model: str) -> float:
    return load_model(model).kv_elements_per_token * kv_dtype("bf16").bytes


def kv_room(tp: int, structure: Structure) -> Room:
    machine, engine = load_machine(LECTURE)
    model = load_model("llama3-70b")
    formats = formats_of(model, machine, engine, None, None)
    shard, stages = Shard.of(model, tp), Stages.of(model, 1)
    return room(model, engine, shard, stages, formats, structure, Budget.of(machine, engine))


def multiquery_read(structure: Structure) -> Operation:
    """Decode attention of one layer of PaLM 540B with 64 heads over 64 chips: batch 512, context 2048."""
    operations, _ = counted(load_model("palm-540b-padded"), 64, Pass(512.0, 2048.0), structure, "tpu-v4-lecture")
    return next(operation for operation in operations if operation.kind == "attention_decode")


def memory_seconds(operation: Operation) -> float:
    return float(resources(load_hardware("tpu-v4-lecture"), operation)[1])


@cache
def decode(model: str, tp: int, batch: int = 1, pp: int = 1, context: int = 1024) -> Results:
    """One replica that only decodes at this context: isl + osl/2 with an answer of two tokens."""
    columns = {"model": model, "hardware": LECTURE, "schedule": "static", "isl": context - 1, "osl": 2}
    columns |= {"tp": tp, "pp": pp, "concurrency": batch}
    results = estimate_points({name: [value] for name, value in columns.items()}, 1)
    assert results["error"][0] is None, results["error"][0]
    assert results["batch_per_replica"][0] == batch, "the batch of the lecture does not fit"
    return results


def step_ms(model: str, tp: int, batch: int = 1, pp: int = 1, context: int = 1024) -> float:
    return float(decode(model, tp, batch, pp, context)["tpot_ms"][0])


def evenly_divided_step_ms(model: str, tp: int) -> float:
    """The step of one request at context 1024 as if eight KV heads divided over more chips than eight.

    The lecture divides all weights and KV by tp; the planner replicates KV heads and their projections beyond their
    number, 0.2 ms of 57.8 ms for 405B over 16 chips.
    """
    machine, engine = load_machine(LECTURE)
    spec = load_model(model)
    ones = np.ones(1, dtype=int)
    formats = formats_of(spec, machine, engine, None, None)
    replica = Replica(spec, machine, engine, network(), formats, Structure(), ones * tp, ones, ones)
    real = replica.shard
    even = real._replace(
        kv_heads=spec.attention.kv_heads / tp, stored_kv_heads=spec.attention.kv_heads / tp, layer=None
    )
    vars(replica)["shard"] = even
    return float(pass_time(replica, Pass(np.ones(1), np.full(1, 1024.0))).whole.total[0] / MS)


def decode_part_ms(part: str, tp: int) -> float:
    return float(decode("llama3-70b", tp).tpot_parts[part][0] / MS)


@cache
def prefill(tp: int, hardware: str = LECTURE) -> Results:
    """A prompt of 2048 tokens on Llama 3 70B, one answer token to come out of it."""
    columns = {"model": "llama3-70b", "hardware": hardware, "isl": 2048, "osl": 1, "tp": tp}
    return estimate_points({name: [value] for name, value in columns.items()}, 1)


def ttft_ms(tp: int) -> float:
    return float(prefill(tp)["ttft_ms"][0])


def capacity(model: str, tp: int, isl: int, osl: int) -> int:
    return int(estimate(model, hardware=LECTURE, tp=tp, isl=isl, osl=osl)["max_concurrency"])


def full_throughput(tp: int, batch: int) -> float:
    """Tokens per second of eight chips with `batch` requests a replica at context 2048, decoding only."""
    return 8 // tp * batch / (step_ms("llama3-8b", tp, batch, context=2048) * MS)


def tiny_all_reduce(tokens: int) -> float:
    """Bytes sent by a rank in fp32 for a model of width 64 on four ranks."""
    tiny = load_model("llama3-8b")._replace(hidden=64)
    return float(sent_bytes("ring", "all_reduce", 4, all_reduce(tiny, 4, tokens).bytes) * 4 / ACTIVATION_BYTES)


def busy(stages: int, microbatches: int) -> float:
    """Share of the time that a stage works, of equal stages without sends."""
    step = _pipelined(PassTime(Parts(memory=float(stages)), Parts(memory=1.0)), np.float64(microbatches))
    return float(microbatches / step.total)


FROM_OURS: dict[str, Callable[[], float]] = {
    **{
        f"ring_all_reduce_sent_{ranks}_ranks": lambda ranks=ranks: sent_bytes("ring", "all_reduce", ranks, MIB_64) / 1e6
        for ranks in (2, 4, 8, 16)
    },
    "everyone_to_everyone_sent_16_ranks": lambda: sent_bytes("one_shot", "all_reduce", 16, MIB_64) / 1e9,
    "busbw_factor_all_reduce_8_ranks": lambda: sent_bytes("ring", "all_reduce", 8, 1.0),
    "busbw_factor_all_to_all_8_ranks": lambda: sent_bytes("direct", "all_to_all", 8, 1.0),
    "one_shot_read_8_ranks_256_kib": lambda: sent_bytes("one_shot", "all_reduce", 8, 256 * 2**10),
    "two_shot_read_8_ranks_256_kib": lambda: sent_bytes("two_shot", "all_reduce", 8, 256 * 2**10),
    "70b_all_reduces_of_a_token_tp8": lambda: layers_of_all_reduces("llama3-70b", 8) / MS,
    "70b_all_reduce_of_2048_tokens_across_nodes": lambda: across_nodes_all_reduce() / MS,
    "8b_all_reduce_of_a_token_tp4": lambda: one_all_reduce("llama3-8b", 4, 1) / US,
    "8b_all_reduces_of_a_token_tp4": lambda: layers_of_all_reduces("llama3-8b", 4) / MS,
    "70b_decode_network_tp2": lambda: decode_part_ms("network", 2),
    "70b_decode_network_tp8": lambda: decode_part_ms("network", 8),
    "70b_prefill_2048_network_tp8": lambda: prefill(8).ttft_parts["network"][0] / MS,
    "llama3_70b_parameters": lambda: parameters(load_model("llama3-70b")),
    "llama3_8b_parameters": lambda: parameters(load_model("llama3-8b")),
    "llama31_405b_parameters": lambda: parameters(load_model("llama3.1-405b")),
    "70b_weights": lambda: weight_bytes("llama3-70b") / 1e9,
    "405b_weights": lambda: weight_bytes("llama3.1-405b") / 1e9,
    "8b_weights": lambda: weight_bytes("llama3-8b") / 1e9,
    "70b_kv_of_a_token": lambda: kv_bytes("llama3-70b"),
    "405b_kv_of_a_token": lambda: kv_bytes("llama3.1-405b"),
    "70b_kv_of_a_token_on_a_chip_tp8": lambda: kv_room(8, Structure("heads")).kv_token[0],
    "70b_kv_of_a_token_on_a_chip_tp16": lambda: kv_room(16, Structure("heads")).kv_token[0],
    "70b_kv_of_a_token_on_a_chip_over_batch_16": lambda: (
        kv_room(16, Structure("batch")).kv_token[0] / kv_room(16, Structure("batch")).holders
    ),
    "lwm_kv_of_1m_tokens": lambda: kv_bytes("llama2-7b") * 1e6 / 2**30,
    "opt_66b_kv_of_512_tokens": lambda: kv_bytes("opt-66b") * 512 / 2**30,
    "multiquery_kv_read_every_chip_by_heads": lambda: multiquery_read(Structure("heads")).kv_bytes / 1e9,
    "multiquery_kv_read_time_by_heads": lambda: memory_seconds(multiquery_read(Structure("heads"))) / MS,
    "multiquery_kv_read_every_chip_over_batch_64": lambda: multiquery_read(Structure("batch")).kv_bytes / 1e6,
    "multiquery_kv_read_time_over_batch_64": lambda: memory_seconds(multiquery_read(Structure("batch"))) / US,
    **{f"70b_decode_read_tp{tp}": lambda tp=tp: decode_part_ms("memory", tp) for tp in (2, 4, 8)},
    "8b_requests_of_2048_tokens_tp1": lambda: capacity("llama3-8b", 1, 1792, 256),
    "8b_requests_of_2048_tokens_tp2": lambda: capacity("llama3-8b", 2, 1792, 256),
    "70b_requests_of_1024_tokens_tp2": lambda: capacity("llama3-70b", 2, 768, 256),
    **{f"70b_ttft_2048_tp{tp}": lambda tp=tp: ttft_ms(tp) for tp in (2, 4, 8)},
    "70b_prefill_chip_seconds_tp2_of_tp8": lambda: 100 * 2 * ttft_ms(2) / (8 * ttft_ms(8)),
    "8b_full_step_tp8": lambda: step_ms("llama3-8b", 8, 512, context=2048),
    "8b_full_step_tp1": lambda: step_ms("llama3-8b", 1, 208, context=2048),
    **{f"8b_step_of_one_tp{tp}": lambda tp=tp: step_ms("llama3-8b", tp, context=2048) for tp in (1, 2, 4, 8)},
    "8b_full_throughput_tp1_dp8": lambda: full_throughput(1, 208),
    "8b_full_throughput_tp2_dp4": lambda: full_throughput(2, 476),
    "8b_full_throughput_tp4_dp2": lambda: full_throughput(4, 512),
    "8b_full_throughput_tp8": lambda: full_throughput(8, 512),
    "405b_latency_tp16_over_tp8_pp2": lambda: step_ms("llama3.1-405b", 16) / step_ms("llama3.1-405b", 8, pp=2),
    # the lecture keeps a pipeline of two stages full with two requests a step time, against one in TP16
    "405b_throughput_tp8_pp2_over_tp16": lambda: (
        (2 * 1 / step_ms("llama3.1-405b", 8, pp=2)) / (1 / evenly_divided_step_ms("llama3.1-405b", 16))
    ),
    "tiny_model_all_reduce_of_a_token": lambda: tiny_all_reduce(1),
    "tiny_model_all_reduce_of_54_tokens": lambda: tiny_all_reduce(54) / 1e3,
    "tiny_model_stage_to_stage_54_tokens": lambda: sent_bytes("direct", "send", 2, 54 * 64 * 4) / 1e3,
    "busy_fraction_4_stages_2_microbatches": lambda: busy(4, 2),
}


def one_all_reduce(model: str, tp: int, tokens: int) -> float:
    return float(network().seconds("all_reduce", tp, all_reduce(load_model(model), tp, tokens).bytes))


def layers_of_all_reduces(model: str, tp: int) -> float:
    transfer = all_reduce(load_model(model), tp, 1)
    return transfer.times * load_model(model).layers * one_all_reduce(model, tp, 1)


def across_nodes_all_reduce() -> float:
    """The flat ring over eight chips of two nodes with four each: every step at the slowest link."""
    machine, engine = load_machine(LECTURE)
    small = machine._replace(network=(machine.network[0]._replace(chips=4), *machine.network[1:]))
    buffer = all_reduce(load_model("llama3-70b"), 8, 2048).bytes
    return float(Network(Placement.of(small, 8), engine).seconds("all_reduce", 8, buffer))


NEEDS_A_FILE = ("70b_prefill_2048_network_tp8_across_nodes", "70b_ttft_2048_tp8_across_nodes")


def agrees(value: float, row: dict[str, str]) -> bool:
    kind, tolerance = row["tolerance"].split(":")
    allowed = float(tolerance) * (abs(float(row["expected"])) if kind == "rel" else 1.0)
    # the comparison's own rounding must not decide the rows that allow nothing
    return abs(value - float(row["expected"])) <= allowed + 1e-12 * abs(float(row["expected"]))


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: row["name"])
def test_the_lectures_number_comes_out(row: dict[str, str], request: pytest.FixtureRequest) -> None:
    if row["name"] in NEEDS_A_FILE:
        results = prefill(8, request.getfixturevalue("four_chip_nodes"))
        network_ms = results.ttft_parts["network"][0] / MS
        value = results["ttft_ms"][0] if "ttft" in row["name"] else network_ms
    else:
        value = FROM_OURS[row["name"]]()
    assert agrees(float(value), row), f"{row['name']}: {value} {row['unit']}, the lecture has {row['expected']}"


def test_every_row_of_the_file_is_computed_and_nothing_else() -> None:
    names = [row["name"] for row in golden_rows()]
    assert sorted(names) == sorted([*FROM_OURS, *NEEDS_A_FILE])
    assert all(row["source"] and row["unit"] for row in golden_rows())


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (4, 1), (4, 3), (4, 4), (8, 6)])
def test_equal_stages_are_busy_min_m_pp_over_pp(stages: int, microbatches: int) -> None:
    assert busy(stages, microbatches) == pytest.approx(min(microbatches, stages) / stages, rel=1e-12)


def test_a_deep_pipeline_is_busy_in_proportion_to_its_requests() -> None:
    """The same of a real model: throughput grows with the requests in flight until every stage has one."""
    rates = [
        estimate("llama3-70b", hardware=LECTURE, schedule="static", tp=2, pp=4, isl=1023, osl=2, concurrency=m)
        for m in (1, 2, 3, 4)
    ]
    decoding = [m / rate["tpot_ms"] for m, rate in enumerate(rates, start=1)]
    # the last stage also has the head, which costs 4 % where it decides the pace
    assert [rate / decoding[-1] for rate in decoding] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=0.05)
    assert decoding == sorted(decoding)


# --- what the API and the command say -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_chip_nodes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The lecture's hardware with four chips a node, as a user's file."""
    path = tmp_path_factory.mktemp("hardware") / "h100-lecture-4.yaml"
    path.write_text(
        "extends: h100-lecture\n"
        "name: h100-lecture-4\n"
        "network:\n"
        "  - {name: nvlink, kind: switch, chips: 4, bandwidth_gb_per_s: 450}\n"
        "  - {name: infiniband, kind: switch, bandwidth_gb_per_s: 50}\n",
        encoding="utf-8",
    )
    return str(path)


def command(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    """The rows that the command writes to stdout."""
    with pytest.raises(SystemExit) as stop:
        main([*words, "--csv", "-"])
    gc.enable()  # the command switches the collector off, which suits a short process but not this one
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    return list(csv.DictReader(io.StringIO(out)))


def process(*words: str) -> list[dict[str, str]]:
    """The same of the command as a process of its own, which says nothing else."""
    line = [sys.executable, "cli.py", *words, "--csv", "-"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return list(csv.DictReader(io.StringIO(done.stdout)))


def lecture(name: str) -> dict[str, str]:
    return next(row for row in golden_rows() if row["name"] == name)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_command_prints_the_ttft_of_2048_tokens(tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama3-70b", "--hardware", LECTURE, "--tp", str(tp), "--isl", "2048", "--osl", "256")
    (row,) = command(capsys, "estimate", *words)
    assert agrees(float(row["ttft_ms"]), lecture(f"70b_ttft_2048_tp{tp}"))
    assert row["bottleneck"] == "memory", "the bottleneck is that of decoding unless TTFT is the goal"


def test_the_command_ranks_by_that_ttft(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama3-70b", "--hardware", LECTURE, "--gpus", "8", "--pp", "1", "--isl", "2048")
    rows = command(capsys, *words, "--objective", "ttft", "--attention", "heads")
    assert [row["plan"] for row in rows] == ["TP8", "TP4xDP2", "TP2xDP4"]
    assert [float(row["ttft_ms"]) for row in rows] == pytest.approx([82.71, 128.03, 222.53], abs=0.0051)
    assert rows[0]["bottleneck"] == "compute"


def test_the_command_as_a_process_prices_the_ring_across_nodes(four_chip_nodes: str) -> None:
    (row,) = process("estimate", "-m", "llama3-70b", "-H", four_chip_nodes, "--plan", "TP8", "--isl", "2048")
    assert agrees(float(row["ttft_ms"]), lecture("70b_ttft_2048_tp8_across_nodes"))
    assert row["hardware"] == "h100-lecture-4"


def test_tp4_stays_inside_a_node_of_four(four_chip_nodes: str) -> None:
    row = estimate("llama3-70b", hardware=four_chip_nodes, tp=4, isl=2048, osl=2)
    assert agrees(row["ttft_ms"], lecture("70b_ttft_2048_tp4"))


@pytest.mark.parametrize(("tp", "milliseconds"), [(2, 0.65), (8, 4.51)])
def test_decode_communication_is_the_network_part_of_tpot(tp: int, milliseconds: float) -> None:
    """The lecture's decode step: isl 896 + osl/2 128 = context 1024; the context does not move the network."""
    for isl, osl in ((896, 256), (100, 50)):
        columns = {"model": "llama3-70b", "hardware": LECTURE, "tp": tp, "isl": isl, "osl": osl}
        results = estimate_points({name: [value] for name, value in columns.items()}, 1)
        assert results.tpot_parts["network"][0] / MS == pytest.approx(milliseconds, abs=0.005)


def test_eight_requests_of_context_1024_fit_70b_on_two_chips() -> None:
    asked: dict[str, Any] = {"hardware": LECTURE, "isl": 768, "osl": 256, "filters": Filters(tp=(2,))}
    (row, *_) = plan("llama3-70b", 2, **asked, concurrency=8)
    assert row["plan"] == "TP2"
    assert row["max_concurrency"] == 8
    with pytest.raises(NoPlanError, match="room for 8 requests of 1024 tokens, 9 asked"):
        plan("llama3-70b", 2, **asked, concurrency=9)


@pytest.mark.parametrize(("tp", "requests"), [(1, 208), (2, 476)])
def test_8b_holds_the_lectures_requests_per_replica(tp: int, requests: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-m", "llama3-8b", "-H", LECTURE, "--gpus", "8", "--tp", str(tp), "--pp", "1", "--isl", "1024")
    rows = command(capsys, *words, "--osl", "1024", "--attention", "heads")
    assert [int(row["max_concurrency"]) for row in rows] == [requests * 8 // tp]


def test_8b_decodes_fastest_on_four_of_eight_chips() -> None:
    words = ("--model", "llama3-8b", "--hardware", LECTURE, "--gpus", "8", "--isl", "1920", "--osl", "256")
    rows = process(*words, "--objective", "tpot", "--top", "0")
    assert rows[0]["plan"] == "TP4xDP2"
    assert float(rows[0]["tpot_ms"]) == pytest.approx(2.70, abs=0.006)
    fastest = {int(row["tp"]): float(row["tpot_ms"]) for row in reversed(rows) if row["pp"] == "1"}
    assert sorted(fastest, key=lambda tp: fastest[tp])[:3] == [4, 8, 2]


def test_decode_alone_at_full_load_is_best_as_tp2_by_dp4(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-m", "llama3-8b", "-H", LECTURE, "--gpus", "8", "--schedule", "static", "--isl", "1", "--osl", "2047")
    rows = command(capsys, *words, "--objective", "throughput", "--top", "0")
    assert rows[0]["plan"] == "TP2xDP4"
    assert int(rows[0]["batch_per_replica"]) == 476
    rates = {row["plan"]: float(row["tokens_per_s"]) for row in rows}
    assert rates["TP2xDP4"] > max(rates["DP8"], rates["TP4xDP2"])
    assert rates["TP8"] == min(rates[label] for label in ("DP8", "TP2xDP4", "TP4xDP2", "TP8"))


def test_405b_on_sixteen_chips_is_faster_as_two_stages_than_across_nodes() -> None:
    """The lecture's 2N in flight against N: pp requests a step time of a full pipeline against one."""
    rows = {
        row["plan"]: row
        for row in plan(
            "llama3.1-405b",
            16,
            hardware=LECTURE,
            isl=896,
            osl=256,
            objective="tpot",
            filters=Filters(attention=("heads",)),
        )
    }
    wide, deep = rows["TP16"], rows["TP8xPP2"]
    assert wide["tpot_ms"] / deep["tpot_ms"] == pytest.approx(1.26, abs=0.005)
    assert deep["pp"] * 1 / deep["tpot_ms"] > 2.5 * wide["pp"] * 1 / wide["tpot_ms"]
    assert list(rows).index("TP8xPP2") < list(rows).index("TP16")
