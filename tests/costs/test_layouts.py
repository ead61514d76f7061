"""Layouts over a grid of chips: what real arrays on virtual chips move and multiply is what is counted, to the byte."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from grid import GATHERED, Grid
from helpers import every
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Array, Fabric, ring_all_reduce
from test_sharded_transformer import FORMATS, PLAIN, Weights, activated, exactly, prompts, whole_logits

from planner.costs.collectives import sent_bytes
from planner.costs.layers import Formats, Operation, Pass, Structure, Transfer
from planner.costs.layouts import count
from planner.costs.memory import gathered_bytes
from planner.costs.weights import Shard, Stages, layer_weights, stage_weight_bytes
from planner.specs.catalog import load_engine
from planner.specs.dtypes import WEIGHTS
from planner.specs.model import Attention, FeedForward, Model, Norm

some = settings(derandomize=True, deadline=None, max_examples=25)
Sizes = tuple[int, int, int]
PROMPT = 3


def small(name: str, kv_heads: int, parallel: bool = False, heads: int = 8, gated: bool = True) -> Model:
    return PLAIN._replace(
        name=name,
        layers=1,
        attention=Attention(heads, kv_heads, 8),
        ffn=FeedForward(hidden=64, gated=gated, activation="silu"),
        norm=Norm(kind="layernorm", per_layer=1) if parallel else Norm(kind="rmsnorm", per_layer=2),
        parallel_block=parallel,
    )


MODELS = {
    model.name: model
    for model in (
        small("MHA", 8),
        small("GQA", 4),
        small("GQA 2", 2, gated=False),
        small("MQA", 1, parallel=True),
        small("MQA padded", 1, parallel=True, heads=6),
    )
}
CASES = [
    (name, sizes, layouts, attention)
    for name, sizes, layouts in (
        ("MHA", (2, 2, 2), ("2d", "2d")),
        ("MHA", (2, 4, 1), ("2d", "wg-x")),
        ("MHA", (2, 2, 2), ("2d", "wg-xyz")),
        ("GQA", (2, 2, 2), ("2d", "wg-xy")),
        ("GQA", (4, 2, 1), ("2d", "wg-x")),
        ("GQA", (4, 2, 1), ("2d", "2d")),
        ("GQA", (1, 8, 1), ("wg-xyz", "wg-xyz")),
        ("GQA 2", (2, 2, 2), ("2d", "wg-x")),
        ("GQA 2", (2, 2, 2), ("2d", "wg-xyz")),
        ("GQA 2", (8, 1, 1), ("2d", "wg-xyz")),
        ("MQA", (2, 2, 2), ("2d", "2d")),
        ("MQA", (2, 2, 2), ("wg-x", "wg-xy")),
        ("MQA", (4, 2, 1), ("2d", "wg-xyz")),
        ("MQA padded", (2, 2, 2), ("2d", "wg-xyz")),
        ("MQA padded", (2, 4, 1), ("2d", "wg-x")),
    )
    for attention in (("heads", "heads"), ("batch", "heads"), ("batch", "batch"))
]
every_case = every(
    ("name", "sizes", "layouts", "attention"),
    CASES,
)


class PassLog(NamedTuple):
    """A pass of a grid: logits, bytes (sent, received) by chip and name, elements of weights read, what is counted."""

    logits: Array
    moved: dict[int, dict[str, tuple[float, float]]]
    read: dict[int, int]
    work: Pass


@cache
def ran(
    name: str, sizes: Sizes, layouts: tuple[str, str], attention: tuple[str, str], requests: int = 8
) -> tuple[PassLog, PassLog]:
    """(prefill, decode) of the same requests on the same chips."""
    model = MODELS[name]
    grid = Grid(model, Weights.of(model), sizes, layouts, attention)
    tokens, logs = tokens_of(model, requests), []
    for decoding, work in ((False, prompts(requests, PROMPT)), (True, Pass(requests, PROMPT + 1))):
        logits = grid.forward(*((tokens[:, PROMPT:], PROMPT) if decoding else (tokens[:, :PROMPT], 0)), decoding)
        logs.append(PassLog(logits, grid.moved(), dict(grid.read), work))
    return logs[0], logs[1]


def tokens_of(model: Model, requests: int) -> Array:
    return np.random.default_rng(3).integers(0, model.vocab, (requests, PROMPT + 1))


def ranks(sizes: Sizes, axes: str) -> int:
    return int(np.prod([size for size, name in zip(sizes, "xyz", strict=True) if name in axes]))


def counted(
    model: Model, sizes: Sizes, structure: Structure, work: Pass, formats: Formats = FORMATS, engine: str = "pope"
) -> tuple[list[Operation], list[Transfer]]:
    software = load_engine(engine)
    shard = Shard.for_engine(model, software, formats.weights.name, int(np.prod(sizes)), x=sizes[0], y=sizes[1])
    return count(model, software, shard, work, formats, structure)


def sent(sizes: Sizes, transfers: list[Transfer]) -> dict[str, float]:
    """Bytes that the fullest chip sends, by the name of the transfer; those that move nothing are left out."""
    found: dict[str, float] = {}
    for transfer in transfers:
        each = float(sent_bytes("ring", transfer.op, ranks(sizes, transfer.axes), transfer.bytes))
        if each:
            found[transfer.name] = found.get(transfer.name, 0.0) + transfer.times * each
    return found


def moved_by(log: PassLog, transfers: list[Transfer]) -> dict[str, float]:
    """Bytes of the fullest chip by name: what it sends, in an all-to-all what it receives where that is more."""
    exchanges = {transfer.name for transfer in transfers if transfer.op == "all_to_all"}
    found: dict[str, float] = {}
    for chip in log.moved.values():
        for name, (out, into) in chip.items():
            found[name] = max(found.get(name, 0.0), out, into if name in exchanges else 0.0)
    return found


@every_case
def test_logits_on_a_grid_equal_the_unsharded_ones(
    name: str, sizes: Sizes, layouts: tuple[str, str], attention: tuple[str, str]
) -> None:
    model = MODELS[name]
    prefill, decode = ran(name, sizes, layouts, attention)
    expected = whole_logits(model, Weights.of(model), tokens_of(model, 8))
    np.testing.assert_allclose(prefill.logits, expected[:, PROMPT - 1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(decode.logits, expected[:, PROMPT], rtol=0, atol=1e-9)


@every_case
def test_chips_of_a_grid_send_the_counted_bytes(
    name: str, sizes: Sizes, layouts: tuple[str, str], attention: tuple[str, str]
) -> None:
    structure = Structure(*attention, *layouts)
    for log in ran(name, sizes, layouts, attention):
        _, transfers = counted(MODELS[name], sizes, structure, log.work)
        assert sent(sizes, transfers) == exactly(moved_by(log, transfers))


@every_case
def test_chips_of_a_grid_multiply_what_is_counted(
    name: str, sizes: Sizes, layouts: tuple[str, str], attention: tuple[str, str]
) -> None:
    for log, layout in zip(ran(name, sizes, layouts, attention), reversed(layouts), strict=True):
        operations, _ = counted(MODELS[name], sizes, Structure(*attention, *layouts), log.work)
        products = [one for one in operations if one.kind == "gemm" and one.place == "layer"]
        (elements,) = set(log.read.values())
        assert sum(one.weight_bytes for one in products) == exactly(elements * 2)
        rows = log.work.tokens / ranks(sizes, GATHERED[layout])
        assert sum(one.flops for one in products) == exactly(2 * rows * elements)


# ---------------------------------------------------------------------------------------- requests that do not divide


@every("requests", [1, 3, 5])
@every("layout", ["2d", "wg-x", "wg-xyz"])
@every("attention", [("heads", "heads"), ("batch", "heads"), ("batch", "batch")])
def test_requests_that_do_not_divide_fill_the_port_of_the_fullest_chip(
    requests: int, layout: str, attention: tuple[str, str]
) -> None:
    # An all-to-all ends when the chip with the most requests has sent or received all of theirs.
    sizes = (2, 2, 1)
    model = MODELS["MHA"]
    expected = whole_logits(model, Weights.of(model), tokens_of(model, requests))
    prefill, decode = ran("MHA", sizes, (layout, layout), attention, requests)
    np.testing.assert_allclose(prefill.logits, expected[:, PROMPT - 1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(decode.logits, expected[:, PROMPT], rtol=0, atol=1e-9)
    for log in (prefill, decode):
        operations, transfers = counted(model, sizes, Structure(*attention, layout, layout), log.work)
        alike = [one for one in transfers if one.op == "all_to_all" or one.name in ("inputs", "outputs", "weights")]
        found = moved_by(log, transfers)
        assert sent(sizes, alike) == exactly({one.name: found[one.name] for one in alike if one.name in found})
        products = [one for one in operations if one.kind == "gemm" and one.place == "layer"]
        most = -(-requests // ranks(sizes, GATHERED[layout])) * (log.work.tokens / requests)
        assert sum(one.flops for one in products) == exactly(2 * most * log.read[0])


# ---------------------------------------------------------------------------------------------------- the FFN by itself


def ffn_only(width: int, hidden: int, gated: bool = False) -> Model:
    """A layer whose attention has no columns at all: what moves is the FFN's."""
    return PLAIN._replace(
        layers=1,
        hidden=width,
        attention=Attention(heads=64, kv_heads=1, head_dim=0),
        ffn=FeedForward(hidden=hidden, gated=gated, activation="silu"),
        norm=Norm(kind="rmsnorm", per_layer=1),
        parallel_block=True,
    )


def volume(model: Model, sizes: Sizes, layout: str, tokens: int, formats: Formats = FORMATS) -> float:
    """Bytes that the fullest chip sends for the matrices of a layer, its tokens being requests of their own."""
    work = Pass(0.0, 1.0, tokens, tokens, 0.0, tokens, 0.0, tokens)
    _, transfers = counted(model, sizes, Structure("batch", "batch", layout, layout), work, formats)
    moved = [one for one in transfers if one.place == "layer" and one.name != "norm sums"]
    return sum(sent(sizes, moved).values())


GOLDEN = {  # elements a chip sends for an FFN of two matrices: E = 64, F = 256, BL = 32
    ((1, 4, 1), "1d"): 3072,
    ((1, 4, 1), "2d"): 3072,
    ((1, 16, 1), "1d"): 3840,
    ((2, 8, 1), "2d"): 2816,
    ((1, 64, 1), "1d"): 4032,
    ((4, 16, 1), "2d"): 1728,
    ((4, 4, 4), "2d"): 1728,
}


@every(("case", "elements"), GOLDEN.items())
@every("gated", [False, True])
def test_an_ffn_on_a_grid_equals_the_unsharded_one_and_sends_what_is_counted(
    case: tuple[Sizes, str], elements: int, gated: bool
) -> None:
    sizes, layout = case
    model = ffn_only(64, 256, gated)
    x = np.random.default_rng(5).normal(size=(32, 1, 64))
    expected, bytes_sent = ffn_of(model, sizes, layout, x)
    (x_size, ways) = sizes[0], sizes[1] * sizes[2]
    third = 0 if layout == "1d" or not gated else 32 * 256 / ways * (x_size - 1) / x_size
    assert bytes_sent == exactly(2 * (elements + third))
    assert volume(model, sizes, layout, 32) == exactly(bytes_sent)
    np.testing.assert_allclose(expected, unsharded_ffn(model, x), rtol=0, atol=1e-10)


@every("layout", ["wg-x", "wg-xy", "wg-xyz"])
@every("sizes", [(2, 2, 1), (2, 2, 4), (2, 4, 2)])
def test_an_ffn_that_gathers_its_weights_sends_what_the_paper_says(layout: str, sizes: Sizes) -> None:
    if layout == "wg-xy" and sizes[2] == 1:
        return
    model, tokens = ffn_only(64, 256), 32
    x = np.random.default_rng(5).normal(size=(tokens, 1, 64))
    result, bytes_sent = ffn_of(model, sizes, layout, x)
    np.testing.assert_allclose(result, unsharded_ffn(model, x), rtol=0, atol=1e-10)
    n, gathered = int(np.prod(sizes)), ranks(sizes, GATHERED[layout])
    rest = n // gathered
    # appendix A.2.2 with exact factors: weights over N chips, activations of BL / N tokens over the others
    exact = 2 * 64 * 256 / rest * (gathered - 1) / gathered + 2 * tokens / gathered * 64 * (rest - 1) / rest
    assert bytes_sent == exactly(2 * exact)
    assert volume(model, sizes, layout, tokens) == exactly(bytes_sent)


def ffn_of(model: Model, sizes: Sizes, layout: str, x: Array) -> tuple[Array, float]:
    """(the FFN's output, bytes that a chip sends), on virtual chips that all send alike."""
    weights = Weights.of(model)
    if layout == "1d":
        fabric, n = Fabric(2), int(np.prod(sizes))
        parts = {}
        for chip, columns in enumerate(np.array_split(np.arange(model.ffn.hidden), n)):
            own = {name: weights.layers[0][name][:, columns] for name in ("gate", "up") if name in weights.layers[0]}
            up, gate = x @ own["up"], x @ own["gate"] if "gate" in own else None
            parts[chip] = (activated(model, up, gate) @ weights.layers[0]["down"][columns]).ravel()
        (sums,) = ring_all_reduce(fabric, parts)
        return sums[0].reshape(x.shape), fabric.sent(0)
    grid = Grid(model, weights, sizes, (layout, layout))
    result = grid.ffn(x)
    totals = {chip: sum(out for out, _ in own.values()) for chip, own in grid.moved().items()}
    assert len({round(total, 6) for total in totals.values()}) == 1
    return result, totals[0]


def unsharded_ffn(model: Model, x: Array) -> Array:
    layer = Weights.of(model).layers[0]
    return activated(model, x @ layer["up"], x @ layer["gate"] if model.ffn.gated else None) @ layer["down"]


def test_two_dimensions_against_one_and_the_papers_approximation() -> None:
    model = ffn_only(64, 256)
    assert volume(model, (2, 8, 1), "2d", 32) / volume(model, (1, 16, 1), "1d", 32) == pytest.approx(0.7333, abs=1e-4)
    approximate = 2 * 32 * (64 / 1 + 256 / 4)  # without (K - 1) / K, at X = 1 and YZ = 4
    assert approximate / (volume(model, (1, 4, 1), "2d", 32) / 2) == pytest.approx(2.67, abs=0.005)


def crossover(model: Model, sizes: Sizes, before: str, after: str) -> int:
    """Tokens from which on the second layout sends no more than the first, by bisection over whole rounds of chips."""
    chips = int(np.prod(sizes))

    def pays(rounds: int) -> bool:
        first, second = (volume(model, sizes, layout, rounds * chips) for layout in (before, after))
        return second <= first * (1 + 1e-12)

    low, high = 1, 2**16
    assert not pays(low)
    assert pays(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high * chips


def test_crossovers_of_the_layouts_are_where_the_lecture_has_them() -> None:
    model, cube = ffn_only(16384, 65536), (4, 4, 4)
    assert crossover(model, cube, "2d", "wg-x") == 16_384
    assert crossover(model, cube, "wg-x", "wg-xy") == 65_536
    assert crossover(model, cube, "wg-xy", "wg-xyz") == 1_048_576
    assert crossover(ffn_only(8192, 28672), cube, "2d", "wg-x") == 8_192  # exercise 5
    # with int8 weights the crossovers come at half the tokens: activations stay in 16 bit
    eight = FORMATS._replace(weights=WEIGHTS["int8"])
    for tokens, before, after in ((16_384, "2d", "wg-x"), (65_536, "wg-x", "wg-xy"), (1_048_576, "wg-xy", "wg-xyz")):
        first, second = (volume(model, cube, layout, tokens // 2, eight) for layout in (before, after))
        assert second == exactly(first)


# ----------------------------------------------------------------------------------------------------------- invariants

shapes = st.sampled_from([(2, 2, 2), (4, 2, 2), (2, 4, 1), (4, 4, 4), (8, 4, 2)])
kinds = st.builds(
    lambda kv, parallel, gated, kind: small("any", kv, parallel, 64, gated)._replace(
        hidden=512,
        ffn=FeedForward(hidden=1024, gated=gated, activation="silu"),
        norm=Norm(kind=kind, per_layer=1 if parallel else 2),
    ),
    st.sampled_from([1, 4, 8, 64]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["layernorm", "rmsnorm"]),
)
passes = st.one_of(
    st.builds(lambda rows, context: Pass(float(rows), float(context)), st.integers(1, 300), st.integers(1, 5000)),
    st.builds(prompts, st.integers(1, 200), st.integers(1, 500)),
)
sharding = st.sampled_from([("heads", "heads"), ("batch", "heads"), ("batch", "batch")])
gathering = st.sampled_from(["wg-x", "wg-xy", "wg-xyz"])


@some
@given(kinds, st.sampled_from([2, 4, 8, 64]), st.integers(1, 300), sharding)
def test_two_dimensions_with_one_chip_along_x_send_what_one_dimension_sends(
    model: Model, tp: int, rows: int, attention: tuple[str, str]
) -> None:
    """An all-reduce is a reduce-scatter and an all-gather; in a decode step all rows need logits."""
    sizes, work = (1, tp, 1), Pass(float(rows), 100.0)
    (one_ops, one), (two_ops, two) = (
        counted(model, sizes, Structure(*attention, layout, layout), work) for layout in ("1d", "2d")
    )
    assert sum(sent(sizes, two).values()) == exactly(sum(sent(sizes, one).values()))
    for kind in ("gemm", "attention_decode"):
        for field in ("flops", "weight_bytes", "kv_bytes"):
            first, second = (
                sum(getattr(each, field) for each in ops if each.kind == kind) for ops in (one_ops, two_ops)
            )
            assert second == exactly(first)


@some
@given(kinds, shapes, gathering, passes, sharding)
def test_gathered_bytes_halve_with_the_weights_and_activations_do_not(
    model: Model, sizes: Sizes, layout: str, work: Pass, attention: tuple[str, str]
) -> None:
    structure = Structure(*attention, layout, layout)
    full, half = (
        sent(sizes, counted(model, sizes, structure, work, FORMATS._replace(weights=WEIGHTS[name]))[1])
        for name in ("bf16", "int8")
    )
    assert half.pop("weights") == exactly(full.pop("weights") / 2)
    assert half == full


@some
@given(kinds, shapes, passes)
def test_whole_requests_with_gathered_weights_send_nothing_else_in_a_layer(
    model: Model, sizes: Sizes, work: Pass
) -> None:
    _, transfers = counted(model, sizes, Structure("batch", "batch", "wg-xyz", "wg-xyz"), work)
    inside = [one for one in transfers if one.place == "layer"]
    assert set(sent(sizes, inside)) == {"weights"}
    n = int(np.prod(sizes))
    whole = layer_weights(model, Shard.of(model, 1)).matrices * 2
    assert sent(sizes, inside)["weights"] == exactly(whole * (n - 1) / n)


@some
@given(kinds, shapes, st.sampled_from(["2d", "wg-x", "wg-xy", "wg-xyz"]), sharding, st.integers(1, 500), st.booleans())
def test_more_tokens_never_move_or_multiply_less(
    model: Model, sizes: Sizes, layout: str, attention: tuple[str, str], requests: int, decoding: bool
) -> None:
    structure = Structure(*attention, layout, layout)
    fewer, more = (
        counted(model, sizes, structure, Pass(float(n), 100.0) if decoding else prompts(n, 64))
        for n in (requests, requests + 1)
    )
    for first, second in zip([*fewer[0], *fewer[1]], [*more[0], *more[1]], strict=True):
        assert first.name == second.name
        for before, after in zip(first, second, strict=True):
            if not isinstance(before, str):
                assert np.all(np.asarray(before) <= np.asarray(after) * (1 + 1e-12)), first.name


def test_a_chip_writes_the_keys_and_values_that_it_keeps() -> None:
    """One KV head: over heads every chip has all of it, over the batch that of its requests, which may not divide."""
    model, sizes = MODELS["MQA"], (2, 2, 2)
    for requests in (8, 13):
        written = {}
        for attention in (("heads", "heads"), ("batch", "heads")):
            operations, _ = counted(model, sizes, Structure(*attention, "2d", "2d"), Pass(float(requests), 100.0))
            (written[attention[0]],) = (one.activation_bytes for one in operations if one.name == "rope, KV write")
        queries = requests * 8 * 2 * 2  # a head of 8 columns, read and written in 16 bit
        assert written["heads"] == exactly(queries + requests * 8 * 2 * 2 * 2)  # keys turned, keys and values written
        assert written["batch"] == exactly(queries + -(-requests // 8) * 8 * 2 * 2 * 2)


@some
@given(kinds, shapes)
def test_switching_between_layouts_of_a_grid_moves_no_weights(model: Model, sizes: Sizes) -> None:
    """What a chip stores does not depend on the layout, and what gathered weights take is all the others have."""
    n = int(np.prod(sizes))
    shard = Shard.of(model, n, x=sizes[0], y=sizes[1])
    own = float(layer_weights(model, shard).matrices) * 2
    (stored,) = {float(stage_weight_bytes(model, shard, Stages.of(model, 1), WEIGHTS["bf16"])[0])}
    assert stored >= own
    whole = float(layer_weights(model, Shard.of(model, 1)).matrices) * 2
    for pair in (("2d", "wg-xyz"), ("wg-xyz", "2d"), ("wg-x", "wg-xyz")):
        extra = gathered_bytes(model, shard, FORMATS, Structure("heads", "heads", *pair))
        assert float(extra) == exactly(whole - own)
    assert float(np.max(gathered_bytes(model, shard, FORMATS, Structure("heads", "heads", "2d", "2d")))) == 0
    for pair in (("2d", "wg-x"), ("2d", "wg-xy")):
        assert 0 <= float(gathered_bytes(model, shard, FORMATS, Structure("heads", "heads", *pair))) <= whole - own


@some
@given(kinds, shapes, gathering, passes, sharding)
def test_counts_of_arrays_of_grids_are_those_of_their_elements(
    model: Model, sizes: Sizes, layout: str, work: Pass, attention: tuple[str, str]
) -> None:
    grids = np.array([sizes, (2, 2, 2), (1, 8, 1)])
    tp = grids.prod(axis=1)
    structure = Structure(*attention, layout, layout)
    shard = Shard.of(model, tp, x=grids[:, 0], y=grids[:, 1])
    together = count(model, load_engine("pope"), shard, work, FORMATS, structure)
    for index, grid in enumerate(grids.tolist()):
        alone = counted(model, tuple(grid), structure, work)
        for many, one in zip([*together[0], *together[1]], [*alone[0], *alone[1]], strict=True):
            assert many.name == one.name
            for field, value in zip(many._fields, many, strict=True):
                if isinstance(value, np.ndarray):
                    mine = value.ravel()[index % value.size]
                    assert mine == exactly(float(np.asarray(getattr(one, field)).item()))
