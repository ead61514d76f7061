"""One forward pass: its operations and transfers, laid over the stages of a pipeline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Engine, Hardware, Model, load_machine, load_model
from planner.costs.collectives import Network
from planner.costs.layers import Pass, Structure, count
from planner.costs.roofline import BOUNDS, price_operation, resources
from planner.costs.serving import formats_of
from planner.costs.step import PassTime, Replica, pass_time
from planner.costs.weights import Shard
from planner.plans.placement import Placement

US = 1e-6
HEADS = Structure()
some = settings(derandomize=True, deadline=None, max_examples=40)
MACHINES = (("h100-sxm", "vllm"), ("h100-lecture", "lecture"), ("b200-sxm", "sglang"), ("h100-sxm", "ideal"))


def replica(
    model: Model, hardware: Hardware, engine: Engine, tp: object, pp: object, dp: object = 1,
    structure: Structure = HEADS,
) -> Replica:  # fmt: skip
    degrees = np.broadcast_arrays(*(np.atleast_1d(np.asarray(degree, dtype=int)) for degree in (tp, pp, dp)))
    network = Network(Placement.of(hardware, 4096), engine)
    formats = formats_of(model, hardware, engine, None, None)
    return Replica(model, hardware, engine, network, formats, structure, *degrees)


def dealt(layers: int, pp: int) -> list[int]:
    stages = [layers // pp] * pp
    for extra in range(layers % pp):
        stages[-2 - extra] += 1
    return stages


def stage_seconds(one: Replica, work: Pass, tp: int, pp: int) -> list[float]:
    """Seconds of every stage on its own: each of its operations and collectives, then the host."""
    hardware, engine = one.hardware, one.engine
    shard = Shard.of(one.model, tp, engine.vocabulary_multiple)
    operations, transfers = count(one.model, engine, shard, work, one.formats, one.structure)
    seconds = []
    for index, layers in enumerate(dealt(one.model.layers, pp)):
        times = {"layer": layers, "first": int(index == 0), "last": int(index == pp - 1)}
        network = sum(times[t.place] * t.times * float(one.network.seconds(t.op, tp, t.bytes)) for t in transfers)
        if hardware.roofline == "per_op":
            work_seconds = sum(times[o.place] * float(price_operation(hardware, o).total) for o in operations)
        else:  # one maximum over the whole stage
            needs = [[times[o.place] * o.times * float(x) for x in resources(hardware, o)[:2]] for o in operations]
            work_seconds = max(sum(compute for compute, _ in needs), sum(memory for _, memory in needs))
        own = engine.host
        host = (own.step_us + own.per_sequence_us * float(work.decode_rows)) * US
        host += layers * (own.layer_us + own.prefill_layer_us * float(work.prefill_tokens > 0)) * US
        seconds.append(work_seconds + network + host)
    return seconds


@some
@given(
    st.sampled_from(["llama3-8b", "opt-13b", "palm-8b", "qwen2.5-7b"]),
    st.sampled_from(MACHINES),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 9),
    st.integers(0, 14),
    st.integers(0, 40),
    st.integers(0, 600),
    st.booleans(),
)
def test_whole_is_the_sum_of_all_stages_and_sends_and_slowest_the_maximum(
    name: str, machine: tuple[str, str], tp: int, pp: int, more: int, rows: int, prefill: int, over_batch: bool
) -> None:
    model = load_model(name)._replace(layers=pp + more)
    hardware, engine = load_machine(*machine)
    rows = max(rows, int(prefill == 0))
    structure = Structure("batch") if over_batch and "batch" in engine.attention else HEADS
    work = Pass(
        float(rows), 700.0, float(prefill), prefill * (prefill + 1) / 2, 0.0, float(prefill > 0), float(prefill > 0)
    )
    one = replica(model, hardware, engine, tp, pp, structure=structure)
    time = pass_time(one, Pass(*(np.full(1, value) for value in work)))
    stages = stage_seconds(one, work, tp, pp)
    # one replica lies contiguously from the start of a domain
    per_domain = hardware.domain // tp  # type: ignore[operator]
    crossing = -(-pp // per_domain) - 1
    size = (rows + prefill) * model.hidden * 2.0
    sends = crossing * float(one.network.send(size, True)[0]) + (pp - 1 - crossing) * float(
        one.network.send(size, False)[0]
    )
    assert float(time.whole.total[0]) == pytest.approx(sum(stages) + sends, rel=1e-9)
    assert float(time.slowest.total[0]) == pytest.approx(max(stages), rel=1e-9)


def decode(one: Replica, rows: float = 1.0, context: float = 1024.0) -> PassTime:
    ones = np.ones(len(one.tp))
    return pass_time(one, Pass(rows * ones, context * ones))


def test_a_single_stage_is_the_whole() -> None:
    time = decode(replica(load_model("llama3-8b"), *load_machine("h100-sxm"), 2, 1))
    assert time.whole.total == time.slowest.total
    assert float(np.sum(time.whole.bubble)) == 0.0


@pytest.mark.parametrize("machine", MACHINES)
def test_many_degrees_at_once_are_those_of_each(machine: tuple[str, str]) -> None:
    model, (hardware, engine) = load_model("llama3-70b"), load_machine(*machine)
    tp, pp = np.array([1, 2, 4, 8, 16, 8, 2, 4]), np.array([1, 1, 3, 7, 2, 1, 80, 12])
    together = decode(replica(model, hardware, engine, tp, pp), 5.0)
    for index in range(len(tp)):
        alone = decode(replica(model, hardware, engine, tp[index], pp[index]), 5.0)
        for kind in ("whole", "slowest"):
            for bound in BOUNDS:
                part = np.broadcast_to(getattr(getattr(together, kind), bound), len(tp))[index]
                own = np.broadcast_to(getattr(getattr(alone, kind), bound), 1)[0]
                assert part == pytest.approx(own, rel=1e-12), f"{kind} {bound}"


def test_the_host_is_paid_by_every_stage_and_every_sequence() -> None:
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h100-sxm")
    idle = engine._replace(host=engine.host._replace(step_us=0.0, per_sequence_us=0.0))
    for pp in (1, 2, 5):
        with_host, without = (decode(replica(model, hardware, e, 4, pp), 10.0) for e in (engine, idle))
        step = (engine.host.step_us + 10 * engine.host.per_sequence_us) * US
        assert float((with_host.whole.total - without.whole.total)[0]) == pytest.approx(pp * step, rel=1e-9)
        assert float((with_host.slowest.total - without.slowest.total)[0]) == pytest.approx(step, rel=1e-9)


def test_the_lecture_pays_half_a_millisecond_a_stage() -> None:
    time = decode(replica(load_model("llama3-70b"), *load_machine("h100-lecture"), 2, 4))
    assert float(time.whole.overhead[0]) == pytest.approx(4 * 0.5e-3, rel=1e-12)


def test_prefill_tokens_are_not_sequences_of_the_host() -> None:
    model, (hardware, engine) = load_model("llama3-8b"), load_machine("h100-sxm")
    slow = engine._replace(host=engine.host._replace(step_us=0.0, per_sequence_us=1e4))
    none = engine._replace(host=engine.host._replace(step_us=0.0, per_sequence_us=0.0))
    chunk = Pass(*(np.full(1, value) for value in (0.0, 1.0, 512.0, 512 * 513 / 2, 0.0, 1.0, 1.0)))
    priced = [pass_time(replica(model, hardware, e, 1, 1), chunk).whole.total[0] for e in (slow, none)]
    assert priced[0] == priced[1]


def test_per_step_takes_one_maximum_over_a_stage() -> None:
    """512 requests of the lecture's 8B at TP8: summed FLOPs against summed bytes, not kernel by kernel."""
    model, (hardware, engine) = load_model("llama3-8b"), load_machine("h100-lecture")
    for rows, context in ((512.0, 100.0), (512.0, 2048.0), (4000.0, 1.0)):
        time = decode(replica(model, hardware, engine, 8, 1), rows, context)
        compute, memory = float(time.whole.compute[0]), float(time.whole.memory[0])
        assert (compute == 0.0) != (memory == 0.0), "one of them binds, the other is hidden"
        matrices = 32 * 218103808 + 128256 * 4096
        flops = (2 * matrices + 4 * 32 * 32 * 128 * context) * rows / 8
        read = (2 * matrices / 8 + 2 * 65 * 4096) + 131072 * context * rows / 8
        expected = max(flops / (0.7 * 989e12), read / (0.8 * 3.35e12))
        assert compute + memory == pytest.approx(expected, rel=1e-9)


def test_stages_across_domains_send_over_the_slower_network() -> None:
    """TP8 fills a node, so each boundary crosses; four groups of TP2 share one, so one boundary in four crosses."""
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h100-lecture")
    size = 8192 * 2.0
    inside, across = 2 * US + size / 360e9, 5 * US + size / 40e9

    def sends(tp: int, pp: int, dp: int = 1) -> float:
        staged = decode(replica(model, hardware, engine, tp, pp, dp)).whole.network
        alone = decode(replica(model, hardware, engine, tp, 1, dp)).whole.network
        return float((staged - alone)[0])

    assert sends(8, 4) == pytest.approx(3 * across, rel=1e-9)
    assert sends(2, 4) == pytest.approx(3 * inside, rel=1e-9)
    assert sends(2, 8) == pytest.approx(6 * inside + across, rel=1e-9)
    assert sends(16, 2) == pytest.approx(across, rel=1e-9)
    # the second replica of three stages in nodes of four lies across a boundary: the worst placed one counts
    assert sends(2, 3) == pytest.approx(2 * inside, rel=1e-9)
    assert sends(2, 3, 2) == pytest.approx(inside + across, rel=1e-9)


def test_more_requests_or_context_never_make_a_step_faster() -> None:
    model, (hardware, engine) = load_model("llama3-70b"), load_machine("h100-sxm")
    one = replica(model, hardware, engine, np.full(40, 8), 2)
    rows = np.arange(1.0, 41.0) ** 2
    by_rows = pass_time(one, Pass(rows, np.full(40, 1024.0))).whole.total
    by_context = pass_time(one, Pass(np.full(40, 16.0), rows * 50)).whole.total
    assert np.all(np.diff(by_context) >= 0)
    # an all-reduce may change its kernel between two sizes, and the next one may be a little cheaper
    assert np.all(np.diff(by_rows) >= -0.02 * by_rows[1:])
    assert by_rows[-1] > 2 * by_rows[0]
