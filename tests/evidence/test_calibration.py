"""Fitting a user's own cluster: constants that were put in come out, and what cannot be fitted is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from helpers import ROOT

from planner.costs.collectives import Network
from planner.costs.layers import Operation
from planner.costs.roofline import price_operation
from planner.errors import InputError
from planner.evidence.calibration import Fit, calibrated_hardware, calibrated_host, doubtful, refuse_worse
from planner.evidence.comparison import Comparison
from planner.evidence.fabric import compared, fit_fabric, level_of
from planner.evidence.serving import ServingPoint, predictions
from planner.plans.placement import Placement
from planner.specs.benchmarks import GemmRow, read_collectives, read_gemm
from planner.specs.catalog import load_machine, plain
from planner.specs.engine import Engine
from planner.specs.hardware import CollectiveKernel, Hardware, RankRow
from planner.specs.measurements import measurements
from planner.specs.merging import merge
from planner.specs.nccl_tests import CollectiveRow, CollectiveRun
from planner.specs.structure import validated
from planner.units import US

DATA = ROOT / "tests" / "data"
SIZES = [2.0**power for power in range(10, 31)]
MACHINE = load_machine("h100", "vllm")


def alike(value: float, expected: float, within: float) -> bool:
    return value == pytest.approx(expected, rel=within)


def run(
    hardware: Hardware, op: str, *hosts: int, sizes: Sequence[float] = SIZES, engine: Engine = MACHINE[1]
) -> CollectiveRun:
    """A run whose times are exactly those of a hardware's library."""
    rules = tuple(rule for rule in engine.collectives if "nccl" in rule.kernels)
    network = Network(Placement.of(hardware, max(sum(hosts), 2)), engine._replace(collectives=rules))
    if op == "send":
        times = network.send(np.array(sizes), int(len(hosts) > 1))
    else:
        times = network.seconds(op, sum(hosts), np.array(sizes))
    pairs = enumerate(zip(sizes, times.tolist(), strict=True), 9)
    rows = tuple(CollectiveRow(size, time, f"line {line}") for line, (size, time) in pairs)
    return CollectiveRun(f"{op}.txt", op, hosts, rows)  # type: ignore[arg-type]


def with_row(hardware: Hardware, op: str, level: str, algorithm: str, **changes: object) -> Hardware:
    """The hardware with a row of its library changed."""
    key = ("nccl", op, level, algorithm)
    return hardware._replace(
        collectives=tuple(
            row._replace(**changes) if (row.kernel, row.op, row.level, row.algorithm) == key else row  # type: ignore[arg-type]
            for row in hardware.collectives
        )
    )


def row_of(hardware: Hardware, op: str, level: str, algorithm: str) -> CollectiveKernel:
    (row,) = (row for row in hardware.collective("nccl", op, level) if row.algorithm == algorithm)
    return row


def products(scale: float = 1.0, dtype: str = "bf16", tokens: Sequence[int] = (1, 8, 64, 512, 4096)) -> list[GemmRow]:
    """Products whose times are exactly those of 4.9 us, 0.76 of the bandwidth, 0.68 of the peak and p = 2.1."""
    gemm = (
        MACHINE[0]
        .kernels["gemm"]["bf16"]
        ._replace(fixed_us=4.9, memory_fraction=0.76, compute_fraction=0.68, p=2.1, in_step=None)
    )
    hardware = MACHINE[0]._replace(kernels={**MACHINE[0].kernels, "gemm": {"bf16": gemm}})
    found = []
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336)):
        for m in tokens:
            moved = {"weight_bytes": n * k * 2.0, "activation_bytes": m * (n + k) * 2.0}
            seconds = price_operation(hardware, Operation("x", "gemm", "bf16", flops=2.0 * m * n * k, **moved)).total
            found.append(GemmRow("gemm.csv", len(found) + 2, m, n, k, dtype, float(seconds) * scale, "us"))
    return found


# --- matrix products --------------------------------------------------------------------------------------------------


def test_constants_of_products_that_were_put_in_come_out() -> None:
    fitted, (fit,), raw = calibrated_hardware(*MACHINE, [], products())
    found = raw["kernels"]["gemm"]["bf16"]
    for name, value in {"fixed_us": 4.9, "memory_fraction": 0.76, "compute_fraction": 0.68, "p": 2.1}.items():
        assert alike(found[name], value, 0.01), name
    assert found["provenance"]["status"] == "fitted"
    assert found["provenance"]["source"] == "gemm.csv, 15 rows"
    assert found["provenance"]["residual"] < 0.002
    before, after = fit.summaries()
    assert before is not None
    assert before.mean > 0.05
    assert after.mean < 0.002
    assert [change.key for change in fit.changes] == [
        f"kernels.gemm.bf16.{name}" for name in ("fixed_us", "memory_fraction", "compute_fraction", "p")
    ]
    assert fitted.kernels["gemm"]["fp8"] == MACHINE[0].kernels["gemm"]["fp8"]
    assert fitted.kernels["gemm"]["bf16"].in_step == MACHINE[0].kernels["gemm"]["bf16"].in_step


def test_both_16_bit_types_are_one_and_others_stand_apart() -> None:
    half = [row._replace(dtype="fp16") for row in products()]
    assert calibrated_hardware(*MACHINE, [], half)[2] == calibrated_hardware(*MACHINE, [], products())[2]
    both = read_gemm(str(DATA / "gemm.csv"))
    _, fits, raw = calibrated_hardware(*MACHINE, [], both)
    assert list(raw["kernels"]["gemm"]) == ["bf16", "fp8"]
    assert [fit.group for fit in fits] == ["GEMM bf16", "GEMM fp8"]
    for fit in fits:
        before, after = fit.summaries()
        assert before is not None
        assert after.mean < 0.03 < before.mean
        assert after.cases == 28


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (products(1e-3), r"gemm\.csv: line 2: 1 x 4096 x 4096 at .* TFLOP/s, .*: are the times in ms, not us\?"),
        (products(1e3), "are the times in ns, not us"),
        (products(1e-6), "are the times in s, not us"),
        (products(0.4), r"line 5: 512 x 4096 x 4096 at 1\d\d\d TFLOP/s, the peak of h100-sxm in bf16 is 989"),
        (products(tokens=(1, 2, 4)), "of which 0 wait for arithmetic"),
        (products(tokens=(4096, 8192, 16384)), "of which 0 wait for memory"),
        (products(tokens=(1, 4096))[:5], "5 shapes, are too few to fit"),
        (products(dtype="int8"), "line 2: no plan computes in int8"),
        (products(dtype="fp32"), "h100-sxm does not compute in fp32"),
    ],
)
def test_products_that_cannot_be_fitted_are_refused(rows: list[GemmRow], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        calibrated_hardware(*MACHINE, [], rows)


def test_a_chip_that_is_eight_times_as_slow_is_no_mistake_of_the_unit() -> None:
    raw = calibrated_hardware(*MACHINE, [], products(8.0))[2]
    assert alike(raw["kernels"]["gemm"]["bf16"]["compute_fraction"], 0.68 / 8, 0.02)


def test_a_fit_that_is_worse_than_what_was_there_is_refused() -> None:
    def errors(off: float) -> tuple[Comparison, ...]:
        return tuple(Comparison("x", "", "", 100.0, 100.0 * (1 + sign * off)) for sign in (-1, 1, 1))

    refuse_worse([Fit("x", errors(0.02), errors(0.02), ()), Fit("x", (), errors(0.25), ())])
    refuse_worse([Fit("x", errors(0.02), errors(0.5), (), judged=False)])
    with pytest.raises(InputError, match=r"x: the best fit is off by 50% on average, more than 30%.*off: .*-50%"):
        refuse_worse([Fit("x", errors(0.6), errors(0.5), ())])
    with pytest.raises(InputError, match=r"x: the fit is off by 3\.0% on average, the constants there are by 2\.0%"):
        refuse_worse([Fit("x", errors(0.05), errors(0.01), ()), Fit("x", errors(0.02), errors(0.03), ())])


def test_a_fit_that_explains_little_is_doubted() -> None:
    off = [
        Fit(name, (), (Comparison(name, "", "", 1.0, 1.0 + error),), (), judged=judged)
        for name, error, judged in (("a", 0.14, True), ("b", 0.2, True), ("c", 0.5, False))
    ]
    assert doubtful(off) == ["b: the fit is off by 20% on average, more than 15%; do not lean on it"]


# --- collectives ------------------------------------------------------------------------------------------------------


def test_constants_of_a_node_that_were_put_in_come_out_and_the_others_stay() -> None:
    hardware, engine = MACHINE
    old = row_of(hardware, "all_gather", "nvlink", "ring")
    slower = RankRow(15.0, 0.66, 0.8)
    machine = with_row(hardware, "all_gather", "nvlink", "ring", ranks={**old.ranks, 8: slower})
    fitted, (fabric,) = fit_fabric(hardware, engine, [run(machine, "all_gather", 8)])
    found = row_of(fitted, "all_gather", "nvlink", "ring")
    for name in RankRow._fields:
        assert alike(getattr(found.ranks[8], name), getattr(slower, name), 0.02)
    assert {ranks: found.ranks[ranks] for ranks in (2, 4)} == {ranks: old.ranks[ranks] for ranks in (2, 4)}
    assert found.provenance.source == "all_gather.txt, 21 rows; 2, 4 ranks as in h100-sxm"
    assert fabric.unused is None
    errors = [abs(each.error) for each in compared(fitted, engine, fabric)]
    assert max(errors) < 0.01 < min(abs(each.error) for each in compared(hardware, engine, fabric))
    others = [row for row in hardware.collectives if row is not old]
    assert [row for row in fitted.collectives if row is not found] == others


def test_constants_across_nodes_are_found_and_say_something_of_more_nodes() -> None:
    hardware, engine = MACHINE
    old = row_of(hardware, "all_gather", "infiniband", "ring")
    slow = {"base_us": 4 * old.base_us, "hop_us": 4 * (old.hop_us or 0), "inner_hop_us": 4 * (old.inner_hop_us or 0)}
    machine = with_row(hardware, "all_gather", "infiniband", "ring", **slow, bandwidth_fraction=0.6, p=0.7)
    fitted, (fabric,) = fit_fabric(hardware, engine, [run(machine, "all_gather", 8, 8)])
    found = row_of(fitted, "all_gather", "infiniband", "ring")
    assert alike(found.hop_us or 0, slow["hop_us"], 0.03)
    assert alike(found.bandwidth_fraction, 0.6, 0.03)
    assert alike(found.p, 0.7, 0.05)
    truth, guess = (run(each, "all_gather", 8, 8, 8, 8) for each in (machine, fitted))
    for real, predicted in zip(truth.rows, guess.rows, strict=True):
        assert alike(predicted.seconds, real.seconds, 0.05)
    assert fabric.name == "infiniband"


def test_of_several_algorithms_none_is_left_cheaper_than_the_one_that_fits() -> None:
    hardware, engine = MACHINE
    runs = read_collectives(str(DATA / "nccl_nodes.txt"))
    fitted, (fabric,) = fit_fabric(hardware, engine, runs)
    assert {row.algorithm for row in fabric.rows} == {"tree", "hierarchical", "ring"}
    (best,) = (row for row in fabric.rows if "no cheaper" not in row.provenance.source)
    assert best.provenance.residual is not None
    assert best.provenance.residual < 0.06
    errors = [abs(each.error) for each in compared(fitted, engine, fabric)]
    assert np.mean(errors) == pytest.approx(best.provenance.residual, abs=0.002)
    assert np.mean(errors) < np.mean([abs(each.error) for each in compared(hardware, engine, fabric)]) / 3


@pytest.mark.parametrize(("ranks", "level"), [((8,), "nvlink"), ((8, 8), "infiniband")])
def test_large_buffers_alone_show_the_bandwidth_and_leave_the_latency(ranks: tuple[int, ...], level: str) -> None:
    hardware, engine = MACHINE
    old = row_of(hardware, "all_gather", level, "ring")
    slower = {8: old.ranks[8]._replace(bandwidth_fraction=0.55)} if old.ranks else {}
    machine = with_row(hardware, "all_gather", level, "ring", ranks=slower, bandwidth_fraction=0.55)
    fitted, _ = fit_fabric(hardware, engine, [run(machine, "all_gather", *ranks, sizes=SIZES[-4:])])
    found = row_of(fitted, "all_gather", level, "ring")
    assert "latency" in found.provenance.source
    if old.ranks:
        assert found.ranks[8] == pytest.approx(slower[8], rel=0.005)
        return
    assert (found.base_us, found.hop_us, found.p) == (old.base_us, old.hop_us, old.p)
    assert alike(found.bandwidth_fraction, 0.55, 0.005)


def test_a_send_is_fitted_inside_a_node_and_across() -> None:
    hardware, engine = MACHINE
    machine = with_row(hardware, "send", "nvlink", "direct", hop_us=15.0, bandwidth_fraction=0.5)
    machine = with_row(machine, "send", "infiniband", "direct", hop_us=30.0, bandwidth_fraction=0.4)
    fitted, found = fit_fabric(hardware, engine, [run(machine, "send", 1, 1), run(machine, "send", 8)])
    assert [fabric.name for fabric in found] == ["nvlink", "infiniband"]
    assert alike(row_of(fitted, "send", "nvlink", "direct").hop_us or 0, 15.0, 0.02)
    assert alike(row_of(fitted, "send", "infiniband", "direct").bandwidth_fraction, 0.4, 0.02)


def test_a_mesh_counts_the_wires_of_a_group() -> None:
    hardware, engine = load_machine("mi300x")
    (measured,) = read_collectives(str(DATA / "rccl_alltoall.txt"))
    fitted, (fabric,) = fit_fabric(hardware, engine, [measured])
    errors = [abs(each.error) for each in compared(fitted, engine, fabric)]
    assert np.mean(errors) < 0.03
    (row,) = fabric.rows
    assert 0.5 < row.ranks[8].bandwidth_fraction < 0.75


def test_what_the_engine_does_not_use_is_said() -> None:
    reduce, gather = read_collectives(str(DATA / "nccl_node.txt"))
    _, fits, _ = calibrated_hardware(*MACHINE, [reduce, gather], [])
    assert fits[0].notes == (
        "vllm runs custom_one_shot, custom_two_shot for all-reduce on nvlink: the constants of nccl change none of its "
        "plans there.",
    )
    assert fits[1].notes == ()


def hosts(*ranks: int, op: str = "all_reduce", us: float = 1000.0, size: float = 2.0**28) -> CollectiveRun:
    return CollectiveRun("x.txt", op, ranks, (CollectiveRow(size, us * US, "line 9"),))  # type: ignore[arg-type]


def test_groups_are_placed_as_plans_place_them() -> None:
    hardware = MACHINE[0]
    assert [level_of(hardware, hosts(*ranks)) for ranks in ((8,), (2,), (8, 8), (8, 8, 8))] == [0, 0, 1, 1]
    assert [level_of(hardware, hosts(*ranks, op="send", us=9000.0)) for ranks in ((8,), (1, 1), (8, 8))] == [0, 1, 1]
    rack = load_machine("gb200")[0]  # several hosts in one domain: no network card is this fast
    assert level_of(rack, hosts(4, 4, us=700.0)) == 0
    with pytest.raises(InputError, match="a plan fills nodes"):  # 400 GB/s: what a tree reaches over four cards each
        level_of(rack, hosts(4, 4, us=2.0**28 / 200e9 * 1e6))


@pytest.mark.parametrize(
    ("machine", "ranks", "sentence"),
    [
        ("h100", (16,), r"x\.txt: 16 ranks on one host, but a node of h100-sxm has 8 chips: is --hardware right\?"),
        ("h100", (1, 1), r"x\.txt: 2 nodes of 1 ranks: a plan fills nodes before it crosses them.* has 8 chips"),
        ("h100", (4, 4), "2 nodes of 4 ranks"),
        ("h100", (8, 4), "2 nodes of 8 ranks"),
        ("h100 fast", (4, 4), "2 nodes of 4 ranks"),  # a domain of one node is never on two hosts, however fast
        ("tpu-v5e", (8,), "is a torus"),
    ],
)
def test_groups_that_no_plan_has_are_refused(machine: str, ranks: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        level_of(
            load_machine(machine.removesuffix(" fast"))[0], hosts(*ranks, us=1500.0 if "fast" in machine else 30000.0)
        )


def scaled(measured: CollectiveRun, factor: float) -> CollectiveRun:
    return measured._replace(rows=tuple(row._replace(seconds=row.seconds * factor) for row in measured.rows))


NODE = run(MACHINE[0], "all_gather", 8)


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        (run(MACHINE[0], "all_gather", 8, sizes=SIZES[::8]), "3 sizes from 1024 to 67108864 B do not show latency and"),
        (run(MACHINE[0], "all_gather", 8, sizes=SIZES[:8]), "8 sizes from 1024 to 131072 B do not show latency and"),
        (run(MACHINE[0], "all_gather", 6, sizes=SIZES[12:]), "9 sizes from 4194304 to 1073741824 B"),
        (run(MACHINE[0], "all_gather", 8, sizes=SIZES[-2:]), "2 sizes from 536870912 to 1073741824 B"),
        (scaled(NODE, 1e-3), r"all_gather\.txt: line 29: .* more than 2 x the 450 GB/s of nvlink: are the times in ms"),
        (scaled(NODE, 1e-6), "are the times in seconds, not us"),
        (scaled(NODE, 0.2), "is --hardware right, and the number of ranks"),
    ],
)
def test_runs_that_cannot_be_fitted_are_refused(measured: CollectiveRun, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        calibrated_hardware(*MACHINE, [measured], [])


def test_an_engine_that_never_uses_the_library_is_refused() -> None:
    hardware, engine = load_machine("h100-lecture")
    rules = tuple(rule for rule in engine.collectives if "nccl" not in rule.kernels)
    with pytest.raises(InputError, match="never uses nccl for all_gather"):
        calibrated_hardware(hardware, engine._replace(collectives=rules), [NODE], [])


def test_what_is_written_is_a_valid_file_over_the_old_one() -> None:
    hardware, engine = MACHINE
    runs = [each for name in ("nccl_node.txt", "nccl_nodes.txt") for each in read_collectives(str(DATA / name))]
    fitted, fits, raw = calibrated_hardware(hardware, engine, runs, read_gemm(str(DATA / "gemm.csv")))
    assert set(raw) == {"kernels", "collectives"}
    assert len(fits) == 5
    again = validated(Hardware, merge(plain(hardware), raw), "mine.yaml")
    assert {row[:4]: row for row in again.collectives} == {row[:4]: row for row in fitted.collectives}
    assert again.kernels == fitted.kernels


# --- the host ---------------------------------------------------------------------------------------------------------


def served(loads: Sequence[int], unit: float = 1.0, **host: float) -> list[ServingPoint]:
    """Runs whose times are exactly those of a host with these constants."""
    hardware, engine = MACHINE
    slow = engine._replace(host=engine.host._replace(**host))
    runs = [ServingPoint("llama3-8b", "h100", "vllm", 1024, 256, load, case="bench.json") for load in loads]
    found = predictions(runs, lambda *_: (hardware, slow))
    return [
        each._replace(tpot_ms=float(tpot) * unit, ttft_ms=float(ttft) * unit)
        for each, tpot, ttft in zip(runs, found.tpot, found.ttft, strict=True)
    ]


def test_constants_of_a_host_that_were_put_in_come_out() -> None:
    runs = served([1, 4, 16, 64, 128], step_us=900.0, per_sequence_us=11.0)
    hardware, engine = MACHINE
    fits, raw = calibrated_host(hardware, hardware, engine, runs)
    assert alike(raw["host"]["step_us"], 900.0, 0.05)
    assert alike(raw["host"]["per_sequence_us"], 11.0, 0.1)
    assert raw["host"]["provenance"]["source"] == "bench.json, 5 runs"
    tpot, ttft = fits
    before, after = tpot.summaries()
    assert before is not None
    assert after.mean < 0.005 < before.mean
    assert (tpot.group, ttft.group, tpot.judged, ttft.judged) == ("serving TPOT", "serving TTFT", True, False)
    assert {change.key for change in tpot.changes} >= {"host.step_us", "host.per_sequence_us"}
    again = validated(Engine, merge(plain(engine), raw), "mine.yaml")
    assert again.host.step_us == raw["host"]["step_us"]


def test_the_host_is_fitted_beside_the_new_kernels() -> None:
    """Slower products explain a slower step: the host need not."""
    hardware, engine = MACHINE
    slower, _, _ = calibrated_hardware(hardware, engine, [], products(1.3))
    runs = [ServingPoint("llama3-8b", "h100", "vllm", 512, 256, load, case="x.json") for load in (1, 8, 32, 96)]
    found = predictions(runs, lambda *_: (slower, engine))
    runs = [each._replace(tpot_ms=float(tpot)) for each, tpot in zip(runs, found.tpot, strict=True)]
    _, beside = calibrated_host(hardware, slower, engine, runs)
    _, alone = calibrated_host(hardware, hardware, engine, runs)
    assert beside["host"]["step_us"] == pytest.approx(engine.host.step_us, abs=40)
    assert alone["host"]["step_us"] > engine.host.step_us + 200


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        (served([1, 8, 64]), r"bench\.json, 3 runs: 3 with a TPOT are too few to fit a host, expected at least 4"),
        (
            served([1, 4, 16, 64], unit=1e-3),
            r"bench\.json: a TPOT of 0\.00\d+ ms is 0\.001 times .* are the times in s",
        ),
        (served([1, 4, 16, 64], unit=1e3), "is 1e\\+03 times what TP1, .* are the times in us, not ms"),
        ([run._replace(tp=3) for run in served([1, 4, 16, 64])], r"bench\.json: .*32 query heads"),
    ],
)
def test_runs_that_cannot_show_a_host_are_refused(runs: list[ServingPoint], sentence: str) -> None:
    hardware, engine = MACHINE
    with pytest.raises(InputError, match=sentence):
        calibrated_host(hardware, hardware, engine, runs)


def test_one_load_shows_the_time_of_a_step_only() -> None:
    hardware, engine = MACHINE
    runs = [each._replace(isl=length) for each, length in zip(served([8] * 4), (256, 512, 1024, 2048), strict=True)]
    fits, raw = calibrated_host(hardware, hardware, engine, runs)
    assert raw["host"]["per_sequence_us"] == engine.host.per_sequence_us
    assert "cannot show what a sequence costs" in " ".join(fits[0].notes)


# --- on what others measured ------------------------------------------------------------------------------------------


def test_half_of_a_measured_table_says_the_other_half() -> None:
    """NCCL on H100 as the package's tables have it: fitted on every second size, off by 8 % on the rest at most."""
    hardware, engine = MACHINE
    tables: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in measurements("kernels/collectives"):
        if row["run"] == "h100" and row["kernel"] == "nccl":
            tables.setdefault((row["op"], int(row["ranks"])), []).append((float(row["bytes"]), float(row["us"]) * US))
    assert len(tables) >= 12
    errors = []
    for (op, ranks), table in tables.items():
        halves = [
            CollectiveRun(
                "t.txt", op, (ranks,), tuple(CollectiveRow(*pair, f"line {at}") for at, pair in enumerate(sorted(half)))
            )  # type: ignore[arg-type]
            for half in (sorted(table)[::2], sorted(table)[1::2])
        ]  # fmt: skip
        fitted, (fabric,) = fit_fabric(hardware, engine, halves[:1])
        errors += [abs(each.error) for each in compared(fitted, engine, fabric._replace(runs=(halves[1],)))]
    assert np.mean(errors) < 0.08


def test_sixty_measured_products_say_the_others() -> None:
    table = [row for row in measurements("kernels/gemm") if row["run"] == "h100" and row["format"] == "bf16"]
    rows = [
        GemmRow("t.csv", line, int(row["m"]), int(row["n"]), int(row["k"]), "bf16", float(row["us"]) * US, "us")
        for line, row in enumerate(table, 2)
    ]
    order = np.random.default_rng(3).permutation(len(rows))
    some, others = ([rows[index] for index in part] for part in (order[:60], order[60:]))
    assert len(others) > 100
    fitted, _, _ = calibrated_hardware(*MACHINE, [], some)
    moved = [(row.m, row.n, row.k) for row in others]
    m, n, k = (np.array(column, dtype=float) for column in zip(*moved, strict=True))
    operation = Operation(
        "x", "gemm", "bf16", flops=2 * m * n * k, weight_bytes=2 * n * k, activation_bytes=2 * m * (n + k)
    )
    predicted = price_operation(fitted.alone, operation).total
    assert np.mean(np.abs(predicted / np.array([row.seconds for row in others]) - 1)) < 0.07
