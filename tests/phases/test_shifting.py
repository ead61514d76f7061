"""Shift parallelism: the layout by moving data, the prices against formulas, and what was published."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from asking import request
from phases.sharing import Chips, Layer, Sizes

from planner import InputError, NoPlanError, Request
from planner.costs.context import context_transfers
from planner.costs.layers import Operation, Pass
from planner.costs.rows import Rows
from planner.costs.serving import Setting, replica_of
from planner.costs.weights import Shard
from planner.phases.shift import layout, shifting
from planner.phases.shift.layout import Base
from planner.phases.shift.load import served
from planner.phases.shift.shifting import Shifting
from planner.report.shifting import worst
from planner.simulating.traces import Trace
from planner.units import MS

ACT = 2


def test_ranks_and_heads_of_the_paper() -> None:
    """Rajbhandari et al. 2025, section 3.3.2, and arctic_inference/vllm/ulysses.py: SP = 3, TP = 2."""
    base = Base(3, 2)
    assert base.shift_order == (0, 2, 4, 1, 3, 5)
    assert base.tp_groups == ((0, 1), (2, 3), (4, 5))
    assert base.sp_groups == ((0, 2, 4), (1, 3, 5))
    assert base.blocks == (0, 3, 1, 4, 2, 5)
    assert [base.blocks[rank] for rank in (2, 3)] == [1, 4]
    assert layout.moved(base, base.shift_order, 6, 6) == []
    assert layout.moved(base, range(6), 6, 6) == [1, 2, 3, 4]


@pytest.mark.parametrize("chips", [2, 4, 6, 8, 16])
def test_the_order_keeps_every_head_in_place_and_no_other_does(chips: int) -> None:
    random = np.random.default_rng(chips)
    for base in layout.bases(chips):
        heads = 2 * chips
        assert layout.moved(base, base.shift_order, heads, heads) == []
        assert sorted(base.shift_order) == list(range(chips))
        order = random.permutation(chips).tolist()
        assert bool(layout.moved(base, order, heads, heads)) == (tuple(order) != base.shift_order)
        assert Base.parse(base.label) == base


@pytest.mark.parametrize(
    ("base", "sizes"),
    [
        (Base(3, 2), Sizes(6, 6)),
        (Base(4, 2), Sizes(8, 8)),
        (Base(8, 1), Sizes(16, 8)),
        (Base(2, 2), Sizes(8, 2)),
        (Base(4, 2), Sizes(16, 2)),
        (Base(4, 1), Sizes(8, 1)),
    ],
)
def test_base_and_shift_give_the_same_on_one_cache(base: Base, sizes: Sizes) -> None:
    """A prompt in the base, answers in the shift, the base again: as one device does it, to 1e-9."""
    alone, shared = Layer(sizes, 1), Layer(sizes, 1)
    chips, random = Chips(shared, base), np.random.default_rng(2)
    for count, runs in ((13, "base"), (1, "shift"), (2, "shift"), (5, "base"), (1, "base"), (3, "shift")):
        tokens = random.normal(size=(count, sizes.width))
        found = chips.sequence_pass(tokens) if runs == "base" else chips.tensor_pass(tokens, base.shift_order)
        np.testing.assert_allclose(found, alone(tokens), rtol=0, atol=1e-9)
        for (first, last), keys in zip(chips.kv_held, chips.keys, strict=True):
            np.testing.assert_allclose(keys, alone.keys[:, first:last], atol=1e-9)


def test_ranks_in_their_own_order_would_read_other_heads() -> None:
    base, sizes = Base(3, 2), Sizes(6, 6)
    alone, shared = Layer(sizes, 1), Layer(sizes, 1)
    chips, tokens = Chips(shared, base), np.random.default_rng(2).normal(size=(9, sizes.width))
    chips.sequence_pass(tokens)
    alone(tokens)
    assert np.abs(chips.tensor_pass(tokens[:1], range(6)) - alone(tokens[:1])).max() > 1e-3


@pytest.mark.parametrize(("base", "sizes"), [(Base(4, 2), Sizes(8, 8)), (Base(4, 2), Sizes(16, 2))])
def test_what_is_sent_is_what_is_priced(base: Base, sizes: Sizes) -> None:
    chips, n = Chips(Layer(sizes, 1), base), 32
    chips.sequence_pass(np.random.default_rng(1).normal(size=(n, sizes.width)))
    model = setting().model
    attention = model.attention._replace(heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
    model = model._replace(layers=1, hidden=sizes.width, attention=attention)
    shard = Shard.of(model, base.chips, cp=base.sp)
    found = context_transfers(model, shard, shifting.prompt(float(n)), setting().formats, shifting.ULYSSES)
    sent = {each.name: float(each.bytes) / ACT for each in found if each.axes == "context"}
    leaves = (base.sp - 1) / base.sp
    buffers = [leaves * sent[f"{way} (prefill)"] for way in ("tokens to heads", "heads to tokens")]
    np.testing.assert_allclose(chips.exchanged, np.tile(buffers, (base.chips, 1)))
    (reduced,) = (float(each.bytes) / ACT for each in found if each.op == "all_reduce")
    assert chips.reduced == pytest.approx(2 * 2 * (base.tp - 1) / base.tp * reduced)  # attention's and the FFN's


def asked(
    model: str = "llama3.1-70b", hardware: str = "h200", gpus: int = 8, isl: int = 4096, osl: int = 250
) -> Request:
    return request(model, gpus, hardware, work={"isl": isl, "osl": osl, "weights": "fp8"})


@cache
def published() -> Shifting:
    return shifting.shifting(asked(), base=Base(8))


def setting() -> Setting:
    return published().systems[0].setting


@pytest.mark.parametrize("base", [Base(8, 1), Base(4, 2), Base(2, 4)])
def test_a_pass_counts_the_work_of_the_model_over_all_chips(base: Base) -> None:
    rows = Rows.of(tp=base.tp, pp=1, dp=1, isl=1, osl=1, concurrency=1)
    work = shifting.prompt(np.array([4096.0]))
    own, transfers = shifting.sequence_maker(base)(setting(), rows).count(work, experts=False)
    whole, _ = replica_of(setting(), rows._replace(tp=np.ones(1), y=np.ones(1))).count(work, experts=False)

    def layer(operations: list[Operation]) -> float:
        return float(sum(np.ravel(each.flops * each.times)[0] for each in operations if each.place == "layer"))

    assert layer(own) * base.chips == pytest.approx(layer(whole))
    model, sent = setting().model, {each.name: float(np.ravel(each.bytes)[0]) for each in transfers}
    dh, each = model.attention.head_dim, 4096 / base.sp
    heads, kv = model.attention.heads / base.tp, model.attention.kv_heads / base.tp
    assert sent["tokens to heads (prefill)"] == each * (heads + 2 * kv) * dh * ACT
    assert sent["heads to tokens (prefill)"] == each * heads * dh * ACT
    assert sent["attention all-reduce"] == sent["all-reduce in the group"] == each * model.hidden * ACT


def test_tokens_are_padded_to_the_groups() -> None:
    make = shifting.sequence_maker(Base(8))
    nine, sixteen = (shifting.passes(setting(), make, 1, shifting.prompt(n))[0] for n in (9.0, 16.0))
    gemms = [
        next(op for op in make(setting(), Rows.of(tp=1, pp=1, dp=1, isl=1, osl=1, concurrency=1))
             .count(shifting.prompt(np.array([n])), experts=False)[0] if op.name == "gate_up").flops
        for n in (9.0, 16.0)
    ]  # fmt: skip
    assert gemms[0] == gemms[1]
    assert nine <= sixteen


def test_the_threshold_is_where_both_take_equally_long() -> None:
    found, base = published(), Base(8)

    sequence = shifting.sequence_maker(Base(8))
    for limit, work in (
        (found.thresholds.prompts, shifting.prompt),
        (found.thresholds.decodes, lambda n: Pass(n, 4096 + 125)),
    ):
        assert limit is not None
        sizes = np.array([limit, limit + 1.0])
        large = shifting.passes(setting(), sequence, 1, work(sizes))
        small = shifting.passes(setting(), replica_of, base.chips, work(sizes))
        assert large[0] >= small[0]
        assert large[1] < small[1]
    shift = found.systems[0]
    for tokens in (1.0, 700.0, 719.0, 720.0, 5000.0):
        large, small = (
            shifting.passes(setting(), make, tp, shifting.prompt(tokens))[0]
            for make, tp in ((sequence, 1), (replica_of, 8))
        )
        mine = shifting.passes(setting(), shift.make, 1, shifting.prompt(tokens))[0]
        assert mine == (large if tokens > found.thresholds.chosen else small)


def test_the_second_copy_of_the_weights_is_one_part_in_sp() -> None:
    memory = published().systems[0].memory
    assert memory.shift / memory.base == pytest.approx(1 / 8, rel=1e-3)
    for base in layout.bases(8):
        memory = shifting.memory_of(setting(), base, sequence=True, shift=True)
        assert memory.shift / memory.base == pytest.approx(1 / base.sp, rel=1e-3)
        alone = shifting.memory_of(setting(), base, sequence=True, shift=False)
        assert alone.tokens > memory.tokens


def test_the_published_row_of_eight_h200_comes_out_in_order() -> None:
    """Rajbhandari et al. 2025, figure 12c: Llama-70B in fp8, 4,096 tokens in, 250 out; DP, TP, SP, shift."""
    found = published()
    columns = {system.name: (estimates, peak) for system, estimates, peak in
               zip(found.systems, found.estimates, found.peak, strict=True)}  # fmt: skip
    names = ("DP8", "TP8", "SP8", "shift")
    ttft, tpot = ([float(getattr(columns[name][0], what)[0]) / MS for name in names] for what in ("ttft", "tpot"))
    served = [float(columns[name][1].requests_per_s[0]) * 4346 / 1e3 for name in names]
    assert ttft[0] > ttft[1] > ttft[2] >= ttft[3]
    assert tpot[1] <= tpot[3] < tpot[0] < tpot[2]
    assert served[0] > served[2] > served[1]
    assert served[0] > served[3] > served[1]
    for mine, theirs, off in ((ttft, (614, 159, 103, 102), 0.2), (served, (45.9, 24.7, 37.2, 37.4), 0.2)):
        assert mine == pytest.approx(theirs, rel=off)
    assert tpot == pytest.approx((22.5, 9.34, 32.5, 10.1), rel=0.35)


def test_whoever_shifts_is_never_far_behind() -> None:
    """What a deployment that changes is for: each of the others is far behind at one end of the load."""
    losses = worst(published())
    assert losses["shift"] < 0.15
    assert min(loss for name, loss in losses.items() if name != "shift") > 0.5


def test_the_published_row_of_another_model_comes_out_in_order() -> None:
    """The same figure: Qwen-32B; its dtype is not said, 16 bit fits (fp8 would be twice as fast)."""
    asked_of = request("qwen2.5-32b", 8, "h200", work={"isl": 4096, "osl": 250, "weights": "bf16"})
    found = shifting.shifting(asked_of, base=Base(8))
    columns = {system.name: (estimates, peak) for system, estimates, peak in
               zip(found.systems, found.estimates, found.peak, strict=True)}  # fmt: skip
    names = ("DP8", "TP8", "SP8", "shift")
    ttft, tpot = ([float(getattr(columns[name][0], what)[0]) / MS for name in names] for what in ("ttft", "tpot"))
    served = [float(columns[name][1].requests_per_s[0]) * 4346 / 1e3 for name in names]
    assert ttft[0] > ttft[1] > max(ttft[2:])
    assert tpot[1] <= tpot[3] < tpot[0] < tpot[2]
    assert served[0] > max(served[2:]) > min(served[2:]) > served[1]
    assert ttft == pytest.approx((385, 113, 79.8, 86.41), rel=0.2)
    assert tpot == pytest.approx((18.8, 8.68, 24.4, 9.48), rel=0.35)
    assert served == pytest.approx((70.1, 38.3, 52.3, 53.8), rel=0.2)


def test_alone_a_request_takes_in_the_simulation_what_the_formula_says() -> None:
    found = published()
    alone = Trace(np.arange(3) * 30.0, np.full(3, 4096.0), np.full(3, 250.0))
    for each, estimates in zip(served(found, alone), found.estimates, strict=True):
        assert each.outcome.ttft == pytest.approx(float(estimates.ttft[0]), rel=0.01)
        assert each.outcome.tpot == pytest.approx(float(estimates.tpot[0]), rel=0.01)


@pytest.mark.parametrize(
    ("question", "options", "error", "sentence"),
    [
        (asked("mixtral-8x7b"), {}, InputError, "only dense models with plain attention"),
        (asked(), {"base": Base(4, 1), "chips": 8}, InputError, "--base SP4 has 4 chips, the replica 8"),
        (asked(gpus=16), {"chips": 16}, InputError, "leaves the 8 that h200-sxm joins directly"),
        (asked(gpus=4), {"chips": 8}, InputError, "--gpus is 4"),
        (asked(osl=1), {}, InputError, "--osl must be at least 2"),
        (asked("llama3.1-405b", "h100"), {}, NoPlanError, "SP8: weights"),
        (asked("llama3.1-70b", gpus=6), {}, NoPlanError, "64 query heads do not divide over 6 chips"),
    ],
)
def test_what_cannot_shift(question: Request, options: dict, error: type[Exception], sentence: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=sentence):
        shifting.shifting(question, **options)
