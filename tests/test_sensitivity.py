"""Sensitivity: at the value that it names two plans are equal, beyond it the other leads; and it says so in words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import run

from planner import COLUMNS, Filters, Plan, Ranking, Request, Workload, load_machine, load_model, rank
from planner.costs.collectives import Network
from planner.ranking import metric
from planner.report.why import firmness
from planner.sensitivity import flips as search
from planner.sensitivity.constants import Constant, kernel_constants, memory_constants, scaled, slack
from planner.sensitivity.field import Array, Example, Field, Variation
from planner.sensitivity.flips import Flip, Sensitivity, mark, sensitivity
from planner.specs.fields import Provenance

ACROSS = ("collectives", "nccl", "all_reduce", "infiniband", "latency")


def ask(
    model: str = "llama3-70b", hardware: str = "h100", gpus: int = 16, engine: str | None = None, **options: Any
) -> Request:
    machine, software = load_machine(hardware, engine)
    return Request(load_model(model), machine, software, gpus, **options)


def changed(request: Request, path: tuple[str, ...], factor: float) -> Request:
    hardware, engine = scaled(request.hardware, request.engine, path, factor)
    return request._replace(hardware=hardware, engine=engine)


def goal(request: Request, plan: str, load: int) -> float:
    """What the ranking minimises, of one plan at one load, through the whole of `rank`."""
    own = Plan.parse(plan)
    names = ("tp", "pp", "dp", "attention", "prefill_attention")
    request = request._replace(
        workload=request.workload._replace(concurrency=load),
        filters=Filters(**{name: (getattr(own, name),) for name in names}),
    )
    found = rank(request).results
    (row,) = np.flatnonzero(found["plan"] == plan)
    return float(metric(found, request.objective)[row])


def close_calls() -> list[Request]:
    """Requests in which some constant decides, on every kind of hardware and for every kind of goal."""
    dense = ask()
    return [
        *(changed(dense, ACROSS, factor) for factor in (0.5, 0.8)),
        ask(objective="throughput", workload=Workload(4096, 512)),
        ask("llama3-8b", gpus=8, objective="cost", workload=Workload(1024, 256)),
        ask("qwen3-32b", gpus=8, objective="tpot", workload=Workload(1024, 256, 64)),
        ask("qwen3-32b", "tpu-v5e", 16, workload=Workload(1024, 256, 32)),  # a torus
        ask("llama3-8b", "tpu-v5e", 32, workload=Workload(1024, 256, 32)),
        ask("llama3-70b", "h100-lecture", 16, objective="throughput"),
        ask("llama3-8b", "h100-lecture", 8, workload=Workload(512, 64, 16, "static")),
        ask("llama3-70b", "h100-lecture", 16, "ideal", objective="ttft", workload=Workload(4096, 1)),
    ]


CLOSE = close_calls()
NAMES = [f"{each.hardware.name}-{each.gpus}-{each.objective}-{index}" for index, each in enumerate(CLOSE)]


@pytest.fixture(scope="module")
def answered() -> list[tuple[Ranking, Sensitivity]]:
    found = []
    for request in CLOSE:
        ranking = rank(request)
        firm = sensitivity(ranking)
        assert firm is not None
        found.append((ranking, firm))
    return found


# --- exactness ------------------------------------------------------------------------------------------------------


def test_the_close_calls_are_close_in_every_way(answered: list[tuple[Ranking, Sensitivity]]) -> None:
    """Guards the tests below against saying nothing: constants of every place, both ways, on most requests."""
    all_flips = [flip for _, firm in answered for flip in firm.flips]
    assert sum(bool(firm.flips) for _, firm in answered) >= len(CLOSE) // 2
    assert {flip.constant.path[0] for flip in all_flips} >= {"kernels", "collectives"}
    assert {flip.factor > 1 for flip in all_flips} == {True, False}


@pytest.mark.parametrize("index", range(len(CLOSE)), ids=NAMES)
def test_at_the_value_two_plans_are_equal_and_beyond_it_their_order_is_reversed(
    index: int, answered: list[tuple[Ranking, Sensitivity]]
) -> None:
    ranking, firm = answered[index]
    request, results = ranking.request, ranking.results
    for flip in firm.flips[:3]:
        if flip.constant.path[0] == "memory":
            continue  # whole requests: see below
        plans = [(results["plan"][row], int(results["concurrency"][row])) for row in (0, flip.row)]

        def gap(factor: float, plans: Sequence[tuple[str, int]] = plans, flip: Flip = flip) -> float:
            first, other = (goal(changed(request, flip.constant.path, factor), *plan) for plan in plans)
            return other / first - 1

        assert flip.plan == plans[1][0] != plans[0][0]
        assert gap(1.0) > 0
        assert gap(flip.factor) == pytest.approx(0, abs=1e-6)
        way = math.copysign(1e-3, flip.factor - 1)
        assert gap(flip.factor * (1 + way)) < 0 < gap(flip.factor * (1 - way)), flip.text


@pytest.mark.parametrize("index", range(len(CLOSE)), ids=NAMES)
def test_just_beyond_the_value_no_third_plan_leads(index: int, answered: list[tuple[Ranking, Sensitivity]]) -> None:
    """Of the plans looked at: the flip is the first change of the lead on the way to the end of the range."""
    ranking, firm = answered[index]
    rows = np.arange(min(1 + search.RIVALS, len(ranking.results)))
    field = Field.of(ranking, rows)
    for flip in firm.flips:
        if flip.constant.path[0] != "memory":
            steps = [float(flip.factor**share) for share in np.linspace(0.05, 0.95, 7)]
            assert (field.apart([(flip.constant, step) for step in steps]) > -1e-9).all(), flip.text


def test_the_nearest_value_comes_first_and_all_are_within_their_ranges(
    answered: list[tuple[Ranking, Sensitivity]],
) -> None:
    for _, firm in answered:
        deviations = [flip.deviation for flip in firm.flips]
        assert deviations == sorted(deviations)
        assert all(0 < deviation <= 1 + 1e-9 for deviation in deviations)
        assert all(flip.row > 0 for flip in firm.flips)
        assert (firm.nearest is None) or not firm.flips


def test_the_same_question_has_the_same_answer(answered: list[tuple[Ranking, Sensitivity]]) -> None:
    for ranking, firm in answered[:3]:
        assert sensitivity(ranking) == firm


@pytest.mark.parametrize("index", range(len(CLOSE)), ids=NAMES)
def test_what_is_left_out_would_not_have_changed_anything(
    index: int, answered: list[tuple[Ranking, Sensitivity]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives that an estimate leaves out, priced all the same, flip nothing."""
    ranking, firm = answered[index]
    monkeypatch.setattr(Field, "ends", lambda _, constant: constant.ends())
    everything = sensitivity(ranking)
    assert everything is not None
    assert [(flip.constant, flip.plan) for flip in everything.flips] == [
        (flip.constant, flip.plan) for flip in firm.flips
    ]


@pytest.mark.parametrize("index", range(len(CLOSE)), ids=NAMES)
def test_many_variations_in_one_pricing_are_those_priced_one_by_one(
    index: int, answered: list[tuple[Ranking, Sensitivity]]
) -> None:
    """Together at both ends of every constant; one by one at either end, in turn over constants and questions."""
    ranking = answered[index][0]
    field = Field.of(ranking, np.arange(min(4, len(ranking.results))))
    kinds = kernel_constants(ranking.request.hardware, field.groups[0].setting.formats)
    variations = [(constant, end) for constant in kinds for end in constant.ends()]
    ends, together = iter(range(len(variations))), field.together(variations)
    places = [
        own[(index + turn) % len(own)] for turn, own in enumerate([next(ends) for _ in each.ends()] for each in kinds)
    ]
    apart = field.apart([variations[place] for place in places])
    np.testing.assert_allclose(together[places], apart, rtol=0, atol=1e-11)
    assert np.ptp(together, axis=0).max() > 1e-6, "they make a difference"


# --- the example of the tie between one node and two ----------------------------------------------------------------


def test_the_latency_across_nodes_decides_between_16_and_8_chips() -> None:
    """TP16 leads where one all-reduce of a token's activations takes less than some 20 to 30 us."""
    request = changed(ask(), ACROSS, 1.2)
    ranking = rank(request)
    firm = sensitivity(ranking)
    assert firm is not None
    (flip,) = (each for each in firm.flips if each.constant.path == ACROSS)
    assert ranking.results["tp"][0] == 8
    assert flip.plan == "TP16"
    assert flip.constant.status == "assumed"
    assert flip.example is not None
    assert (flip.example.bytes, flip.example.ranks) == (2 * 8192, 16)
    for seconds, factor in ((flip.example.now, 1.0), (flip.example.then, flip.factor)):
        case = rank(changed(request, ACROSS, factor))
        assert seconds == float(Network(case.placement, request.engine).seconds("all_reduce", 16, 2 * 8192))
    assert 18e-6 < flip.example.then < 30e-6


# --- ranges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "residual", "expected"),
    [
        ("fitted", 0.01, 1.1),
        ("fitted", 0.05, 1.1),
        ("fitted", 0.1, 1.2),
        ("measured", 0.3, 1.6),
        ("measured", None, 1.25),
        ("datasheet", None, 1.25),
        ("derived", None, 1.5),
        ("textbook", None, 2.0),
        ("assumed", None, 2.0),
        ("assumed", 0.05, 2.0),
        ("assumed", 0.75, 2.5),
    ],
)
def test_how_far_off_a_constant_may_be_follows_from_where_it_comes(
    status: Any, residual: float | None, expected: float
) -> None:
    assert slack(Provenance(status, "a test", None, residual)) == pytest.approx(expected)


def test_a_share_of_a_peak_stays_physical() -> None:
    constant = Constant(("kernels", "gemm", "bf16", "memory_fraction"), "a share", 0.8, "", "assumed", 2.0, 1.25)
    assert constant.ends() == (0.5, 1.25)
    assert constant._replace(most=1.0).ends() == (0.5,)
    request = ask()
    for constant in kernel_constants(request.hardware, _formats(request)):
        if constant.is_rate:
            assert constant.value is not None
            assert constant.value * max(constant.ends()) <= max(1.0, constant.value) * (1 + 1e-12)


def _formats(request: Request) -> Any:
    ranking = rank(request)
    return Field.of(ranking, np.arange(1)).groups[0].setting.formats


def test_a_changed_constant_changes_nothing_else() -> None:
    request = ask()
    hardware, engine = scaled(request.hardware, request.engine, ACROSS, 0.5)
    assert engine == request.engine
    for old, new in zip(request.hardware.collectives, hardware.collectives, strict=True):
        if (old.kernel, old.op, old.level) == ("nccl", "all_reduce", "infiniband"):
            assert (new.hop_us, new.base_us) == (old.hop_us and old.hop_us / 2, old.base_us / 2)
            assert new._replace(hop_us=old.hop_us, base_us=old.base_us, inner_hop_us=old.inner_hop_us) == old
        else:
            assert new == old
    hardware, engine = scaled(request.hardware, request.engine, ("host", "step_us"), 3.0)
    assert hardware == request.hardware
    assert engine == request.engine._replace(host=request.engine.host._replace(step_us=3 * request.engine.host.step_us))


# --- the search for equality ----------------------------------------------------------------------------------------

TIME = Constant(("host", "step_us"), "a time", 1.0, "us", "assumed", 4.0)
RATE = TIME._replace(path=("kernels", "gemm", "bf16", "memory_fraction"))


@pytest.mark.parametrize(
    ("constant", "end", "rivals", "expected", "rival", "most"),
    [
        (TIME, 4.0, [lambda x: (2 - x) / 10], 2.0, 0, 2),  # linear in time: at once
        (RATE, 0.25, [lambda x: (x - 0.5) / 5], 0.5, 0, 12),
        (RATE, 0.25, [lambda x: 3 - 1 / x], 1 / 3, 0, 2),
        (TIME, 0.25, [lambda x: max(0.1, x) - 0.5], 0.5, 0, 4),
        (TIME, 0.25, [lambda x: x**9 - 0.1], 0.1 ** (1 / 9), 0, 20),
        (TIME, 4.0, [lambda x: 0.02 if x < 3 else 0.02 - (x - 3)], 3.02, 0, 20),  # flat, then a kink
        (TIME, 4.0, [lambda x: 10 - 3 * x, lambda x: 1 - x / 2], 2.0, 1, 6),  # the second leads first
        (TIME, 4.0, [lambda x: 1.0, lambda x: 3 - x], 3.0, 1, 2),
    ],
)
def test_equality_is_found_exactly_and_of_several_rivals_the_first_to_lead(
    constant: Constant, end: float, rivals: list[Callable[[float], float]], expected: float, rival: int, most: int
) -> None:
    asked: list[float] = []

    def evaluate(variations: Sequence[Variation]) -> Array:
        asked.extend(factor for _, factor in variations)
        return np.array([[each(factor) for each in rivals] for _, factor in variations])

    start, at_end = evaluate([(constant, 1.0)])[0], evaluate([(constant, end)])[0]
    asked.clear()
    ((_, factor, who),) = search._equal(evaluate, [((constant, end), at_end)], start, 1e-13)
    assert factor == pytest.approx(expected, rel=1e-7)
    assert who == rival
    assert len(asked) <= most
    assert all(min(1, end) <= factor <= max(1, end) for factor in asked)


def test_where_whole_requests_make_steps_the_factor_is_where_the_lead_changes() -> None:
    def evaluate(variations: Sequence[Variation]) -> Array:
        return np.array([[0.1 - 0.25 * math.floor(factor * 2 - 2)] for _, factor in variations])

    start, at_end = evaluate([(TIME, 1.0)])[0], evaluate([(TIME, 4.0)])[0]
    ((_, factor, _),) = search._equal(evaluate, [((TIME, 4.0), at_end)], start, 1e-4)
    assert factor == pytest.approx(1.5, abs=2e-4)
    assert evaluate([(TIME, factor)])[0, 0] < 0, "just beyond it"


def with_runtime(gib: float, **options: Any) -> Request:
    """The lecture's machine, whose constants are fixed, under an engine that keeps so much memory, as it is assumed."""
    request = ask(
        "mistral-large-2", "h100-lecture", 8, objective="throughput", filters=Filters(attention=("heads",)), **options
    )
    memory = request.engine.memory._replace(
        provenance=Provenance("assumed", "a test"), inside_gib={1: gib / 2, 2: gib, 8: gib}
    )
    return request._replace(engine=request.engine._replace(memory=memory))


def test_runtime_memory_decides_where_it_limits_the_load() -> None:
    """A searched load that fills the memory follows it: below 3.26 GiB one plan leads, above it the other."""
    leads = {}
    for gib in (2.0, 6.0):
        ranking = rank(with_runtime(gib, workload=Workload(4096, 512, max_context=9999)))
        firm = sensitivity(ranking)
        assert firm is not None
        (flip,) = (each for each in firm.flips if each.constant.path[0] == "memory")
        assert flip.values is not None
        assert (flip.values[0], flip.values[2]) == (gib, "GiB")
        leads[flip.values[1]] = (ranking.results["plan"][0], flip.plan)
        field = Field.of(ranking, np.array([0, flip.row]))
        way = math.copysign(5e-4, flip.factor - 1)
        before, beyond = field.apart([(flip.constant, flip.factor * (1 + step)) for step in (-way, way)])[:, 0]
        assert beyond < 0 < before
    below, above = leads
    assert below == pytest.approx(above, rel=0.01)
    assert leads[below] == leads[above][::-1], "the same change of the lead, seen from either side"


def test_a_load_that_was_asked_for_does_not_follow_the_memory() -> None:
    ranking = rank(with_runtime(2.0, workload=Workload(4096, 512, 16, max_context=9999)))
    firm = sensitivity(ranking)
    assert firm is not None
    assert not any(flip.constant.path[0] == "memory" for flip in firm.flips)
    (constant,) = memory_constants(ranking.request.engine)
    assert constant.value == 2.0


# --- nothing to say -------------------------------------------------------------------------------------------------


def test_where_no_constant_changes_the_first_place_the_closest_is_named() -> None:
    request = ask(gpus=8)
    sure = Provenance("measured", "a test", None, 0.0)
    hardware = request.hardware._replace(
        kernels={
            kind: {dtype: each._replace(provenance=sure) for dtype, each in by_dtype.items()}
            for kind, by_dtype in request.hardware.kernels.items()
        },
        collectives=tuple(row._replace(provenance=sure) for row in request.hardware.collectives),
    )
    engine = request.engine._replace(host=request.engine.host._replace(provenance=sure))
    ranking = rank(request._replace(hardware=hardware, engine=engine))
    first, second = ranking.results["latency_ms"][:2]
    assert second > 1.2 * first, "a tenth of anything cannot close this"
    firm = sensitivity(ranking)
    assert firm is not None
    assert firm.flips == ()
    assert firm.nearest is not None
    assert firm.nearest.factor in (1.1, 1 / 1.1)
    assert 0 < firm.nearest.gap < second / first - 1
    said = firmness(firm, ranking)
    assert said.startswith("Sensitivity: no single constant within its uncertainty changes the first place; closest: ")
    assert said.endswith(f"leaves {firm.nearest.plan} {firm.nearest.gap * 100:.1f} % behind.")
    assert set(firm.column(5)) == {None}


def test_a_frontier_and_a_single_plan_have_no_first_place_to_lose() -> None:
    assert sensitivity(rank(ask(gpus=8, pareto=True))) is None
    only = rank(ask("llama3-8b", gpus=1))
    assert len(only.results) == 1
    assert mark(only) is None
    assert only.results["flips_if"].tolist() == [None]
    one_left = rank(ask(gpus=8, filters=Filters(tp=(8,), pp=(1,))))
    assert sensitivity(one_left) is None


def test_plans_that_are_equal_are_no_rivals_of_each_other() -> None:
    """Replicas that stand idle change nothing: TP2 and TP2xDP2 answer one request alike, whatever the constants."""
    ranking = rank(ask("llama3-8b", gpus=4))
    twice = ranking._replace(results=ranking.results.take(np.array([0, 0, 1])))
    firm = sensitivity(twice)
    assert firm is not None
    assert all(flip.row == 2 for flip in firm.flips)


def test_a_rival_too_far_behind_is_passed_over_without_an_answer_left_out() -> None:
    ranking = rank(ask(gpus=8))
    rows = [0, int(np.flatnonzero(ranking.results["latency_ms"] > 1.6 * ranking.results["latency_ms"][0])[0])]
    firm = sensitivity(ranking._replace(results=ranking.results.take(np.array(rows))))
    assert firm is not None
    assert firm.flips == ()


# --- in words and in columns ----------------------------------------------------------------------------------------

TEXT = re.compile(r".+ x\d*\.?\d+(e-\d+)?( \((.+ over \d+ ranks: )?[\d.e+]+( us| GiB)? -> [\d.e+]+( us| GiB)?\))?")


def test_a_flip_is_told_in_a_column_of_text(answered: list[tuple[Ranking, Sensitivity]]) -> None:
    for ranking, firm in answered:
        column = firm.column(len(ranking.results))
        assert len(column) == len(ranking.results)
        assert column[0] is None
        assert {row for row, text in enumerate(column) if text is not None} == {flip.row for flip in firm.flips}
        for text in column:
            assert text is None or TEXT.fullmatch(text), text


def test_the_figures_of_a_text_are_those_of_the_constant() -> None:
    flip = Flip(TIME._replace(name="host time per step", value=100.0), 0.5, 1, "TP2", None)
    assert flip.text == "host time per step x0.5 (100 us -> 50 us)"
    wires = TIME._replace(path=ACROSS, name="nccl all-reduce over infiniband latency", value=None)
    one = Example(16384.0, 16, 25.93e-6, 22.21e-6)
    assert Flip(wires, 0.855, 2, "TP16", one).text == (
        "nccl all-reduce over infiniband latency x0.855 (16 KiB over 16 ranks: 25.9 us -> 22.2 us)"
    )
    assert Flip(wires, 0.855, 2, "TP16", None).text == "nccl all-reduce over infiniband latency x0.855"
    assert search.buffer(one._replace(bytes=1.5 * 2**20)) == "1.5 MiB over 16 ranks"


def test_the_caption_names_the_nearest_constants_and_counts_the_others() -> None:
    ranking = rank(ask(gpus=8))
    one = Flip(TIME._replace(name="host time per step", value=100.0), 0.5, 1, "TP4xDP2", None)
    other = Flip(RATE._replace(name="GEMM share", unit="", value=0.8, status="fitted"), 1.1, 2, "TP2xDP4", None)
    example = Example(16384.0, 16, 25e-6, 20e-6)
    wires = Flip(TIME._replace(path=ACROSS, name="-", value=None), 0.75, 1, "TP4xDP2", example)
    assert firmness(Sensitivity((one,), None, 20), ranking) == (
        "Sensitivity: TP4xDP2 comes first if host time per step is below 50 us (100 us here, assumed). No other of 20 "
        "constants would, each within its uncertainty."
    )
    said = firmness(Sensitivity((other, wires, one), None, 20), ranking)
    assert said == (
        "Sensitivity: TP2xDP4 comes first if GEMM share is above 0.88 (0.8 here, fitted); TP4xDP2 comes first if one "
        "all-reduce over infiniband (nccl) takes less than 20 us for 16 KiB over 16 ranks (25 us here, assumed; "
        "latency x0.75). 1 more of 20 constants would, each within its uncertainty."
    )
    searched = rank(ask(gpus=8, objective="throughput"))
    assert firmness(Sensitivity((), None, 20), searched) == (
        "Sensitivity at these loads: no single constant within its uncertainty changes the first place."
    )


CASES = (
    *("--model", "llama3-8b", "--hardware", "h100-lecture", "--gpus", "8"),
    *("--isl", "512", "--osl", "64", "--concurrency", "16", "--schedule", "static"),
)


def test_json_has_it_and_csv_only_beside_json() -> None:
    rows = json.loads(run(*CASES, "--json", "-", "--top", "0").out)
    table = run(*CASES, "--csv", "-", "--top", "0").rows
    assert tuple(rows[0]) == tuple(table[0]) == COLUMNS
    assert {row["flips_if"] for row in table} == {""}  # scripts that sweep need not wait for it
    said = [row["flips_if"] for row in rows]
    assert said[0] is None
    assert any(said)
    ranking = rank(ask("llama3-8b", "h100-lecture", 8, workload=Workload(512, 64, 16, "static")))
    firm = mark(ranking)
    assert firm is not None
    assert ranking.results["flips_if"].tolist() == said


def test_a_table_ends_with_it_and_a_frontier_does_not_have_it() -> None:
    lines = run(*CASES, "--top", "2").out.splitlines()
    assert any(line.startswith("Sensitivity: ") for line in lines)
    assert max(map(len, lines)) <= 100
    frontier = ("--model", "llama3-8b", "--gpus", "4", "--pareto")
    assert "Sensitivity" not in run(*frontier).out
    assert {row["flips_if"] for row in json.loads(run(*frontier, "--json", "-").out)} == {None}


def test_it_is_not_worked_out_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Ranking) -> None:
        raise AssertionError("worked out")

    monkeypatch.setattr("planner.command.rank.mark", refuse)
    assert run(*CASES, "--quiet").status == 0
    assert run(*CASES, "--csv", "-").rows[0]["flips_if"] == ""
    assert json.loads(run(*CASES, "--json", "-", "--top", "1").out)[0]["flips_if"] is None
    assert run(*CASES).status == 1, "a table says it"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "ideal", "lecture"])
@pytest.mark.parametrize(
    "options",
    [
        ("--osl", "1", "--objective", "ttft"),
        ("--isl", "7000", "--objective", "tpot", "--concurrency", "64"),
        ("--schedule", "static", "--concurrency", "8"),
        ("--objective", "cost", "--hardware", "h100-lecture"),
        ("--objective", "throughput", "--max-tpot", "40", "--weights", "fp8"),
    ],
    ids=" ".join,
)
def test_every_engine_and_goal_has_an_answer(engine: str, options: tuple[str, ...]) -> None:
    done = run("--model", "llama3-8b", "--gpus", "4", "--engine", engine, *options)  # warnings of numpy are errors here
    assert done.status == 0, done.err
    assert "Sensitivity" in done.out
