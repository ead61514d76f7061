"""What is counted as sent is what leaves a device where data really move; the published table and its corollaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moving import BYTES, Pipeline, Wires, all_gather, all_reduce, attention, ring, ulysses
from toys import setting, toy

from planner.diffusion.counting import (
    Rows,
    count_block,
    latent_bytes,
    patch_bytes,
    pipeline_efficiency,
    ring_bytes,
    rows_of,
    volumes,
)
from planner.diffusion.job import grid_of
from planner.diffusion.plan import Split
from planner.diffusion.pricing import latency_of, pass_of, stages_of

RANDOM = np.random.default_rng(7)
HERE = setting(toy())
TOKENS, WIDTH, HEADS, LAYERS = 128, 64, 8, 8
IMAGE = RANDOM.standard_normal((TOKENS, HEADS, WIDTH // HEADS)).astype(np.float16)


def counted(split: Split) -> float:
    """Bytes that a rank sends to others of its stage in one pass over one patch."""
    (stage, *_) = stages_of(HERE.model, split.pipefusion)
    return pass_of(HERE, split, stage, rows_of(HERE.model, HERE.job, split)).sent


def cut(devices: int) -> list[np.ndarray]:
    return np.split(IMAGE, devices)


def test_the_toy_is_the_one_that_is_simulated() -> None:
    assert grid_of(HERE.model, HERE.job).tokens == TOKENS
    assert (HERE.model.hidden, HERE.model.heads, HERE.model.depth) == (WIDTH, HEADS, LAYERS)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_ulysses_sends_what_a_simulation_sends_and_computes_the_same(devices: int) -> None:
    wires, parts = Wires(devices), cut(devices)
    out = ulysses(wires, parts, parts, parts)
    assert np.allclose(np.concatenate(out), attention(IMAGE, IMAGE, IMAGE), atol=2e-3)
    assert set(wires.sent) == {round(counted(Split(ulysses=devices)) / LAYERS)}


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_ring_sends_what_a_simulation_sends_and_computes_the_same(devices: int) -> None:
    wires, parts = Wires(devices), cut(devices)
    out = ring(wires, parts, parts, parts)
    assert np.allclose(np.concatenate(out), attention(IMAGE, IMAGE, IMAGE), atol=2e-3)
    assert set(wires.sent) == {round(counted(Split(ring=devices)) / LAYERS)}
    rows = rows_of(HERE.model, HERE.job, Split(ring=devices))
    assert wires.sent[0] == (devices - 1) * ring_bytes(HERE.model, rows, Split(ring=devices))


@pytest.mark.parametrize(("heads_over", "tokens_over"), [(2, 2), (2, 4), (4, 2)])
def test_both_together_send_what_a_simulation_of_both_sends(heads_over: int, tokens_over: int) -> None:
    """USP: Ulysses inside groups of neighbours, rings between the groups' like members."""
    devices = heads_over * tokens_over
    wires, parts, share = Wires(devices), cut(devices), HEADS // heads_over
    rows = TOKENS // tokens_over
    heads: list[np.ndarray] = []
    for group in range(tokens_over):
        members = range(group * heads_over, (group + 1) * heads_over)
        for _ in range(3):  # queries, keys, values
            heads_of = [
                np.concatenate(
                    [wires.move(source, target, parts[source][:, place * share : (place + 1) * share])
                     for source in members]
                )
                for place, target in enumerate(members)
            ]  # fmt: skip
        heads += heads_of
    assert heads[0].shape == (rows, share, WIDTH // HEADS)
    for place in range(heads_over):
        own = Wires(tokens_over)
        mine = [heads[group * heads_over + place] for group in range(tokens_over)]
        ring(own, mine, mine, mine)
        for group in range(tokens_over):
            wires.sent[group * heads_over + place] += own.sent[group]
    back = (heads_over - 1) * (rows // heads_over) * share * WIDTH // HEADS * BYTES
    split = Split(ulysses=heads_over, ring=tokens_over)
    assert {sent + back for sent in wires.sent} == {round(counted(split) / LAYERS)}


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_tensor_parallelism_sends_two_all_reduces_a_block(devices: int) -> None:
    wires = Wires(devices)
    parts = [RANDOM.standard_normal(IMAGE.shape) for _ in range(devices)]
    out = all_reduce(wires, parts)
    assert all(np.allclose(each, np.sum(parts, axis=0)) for each in out)
    assert set(wires.sent) == {round(counted(Split(tp=devices)) / LAYERS / 2)}


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_distrifusion_gathers_all_keys_and_values(devices: int) -> None:
    wires, parts = Wires(devices), cut(devices)
    assert all(np.array_equal(each, IMAGE) for each in all_gather(wires, parts))
    all_gather(wires, parts)
    assert latency_of(HERE, Split(distrifusion=devices)).sent == pytest.approx(LAYERS * wires.sent[0])


@pytest.mark.parametrize(("stages", "patches"), [(2, 2), (2, 4), (4, 4), (4, 8), (8, 8)])
def test_pipefusion_sends_patches_keeps_whole_kv_and_fills_as_the_formula_says(stages: int, patches: int) -> None:
    steps = 6
    run = Pipeline(stages, LAYERS, patches, IMAGE)
    run.run(steps)
    split = Split(pipefusion=stages, patches=patches)
    rows = rows_of(HERE.model, HERE.job, split)
    assert run.wires.sent[0] == steps * patches * patch_bytes(HERE.model, rows)
    assert run.wires.sent[0] / steps / BYTES == TOKENS * WIDTH  # p x hs: what the table counts twice, in and out
    assert run.ticks == patches * steps + stages - 1
    assert set(run.busy) == {patches * steps}
    assert run.busy[0] / run.ticks == pytest.approx(pipeline_efficiency(patches, steps, stages))
    assert run.kv_elements == TOKENS * WIDTH * LAYERS // stages


@pytest.mark.parametrize(("stages", "patches"), [(2, 4), (8, 8)])
def test_text_runs_once_a_step_or_with_every_patch(stages: int, patches: int) -> None:
    """xDiT hands the blocks the text of a step with each patch; what a patch computes is what it is joined to."""
    here = setting("flux.1-dev")
    split, image, text = Split(pipefusion=stages, patches=patches), 4096, 512
    once, again = (rows_of(here.model, here.job, split, repeated=repeated) for repeated in (False, True))
    block = here.model.blocks[0]
    assert block.kind == "double"

    def flops(rows: Rows, prefix: str) -> float:
        """Of a step's projections and attention on the text's or the image's rows."""
        found = count_block(here.model, block, rows, split, here.formats, 1.0).operations
        return patches * sum(
            float(each.flops) * each.times
            for each in found
            if each.kind == "gemm" and each.name.startswith("text ") == bool(prefix) and each.name != "modulation"
        )

    assert once.all * patches == image + text
    assert again.all * patches == image + patches * text
    assert flops(again, "") == pytest.approx(flops(once, ""))
    assert flops(again, "text ") == pytest.approx(patches * flops(once, "text "))
    assert flops(once, "text ") / flops(once, "") == pytest.approx(text / image)
    assert patch_bytes(here.model, once) == patch_bytes(here.model, again)  # the next stage gets the text once
    whole = rows_of(here.model, here.job, split, patches=1, repeated=True)
    assert whole.all == image + text  # the warm-up takes all at once


def test_the_engine_says_how_text_runs() -> None:
    """FLUX.1-dev over eight L40: 3.42 times one card as reported, with the text of 512 tokens beside patches of 512."""
    here = setting("flux.1-dev", "l40", engine="xdit-eager", steps=28, warmup=0)
    ratio = {}
    for repeated in (True, False):
        asked = replace(here, sampler=here.sampler._replace(text_with_patches=repeated))
        one, cut = (latency_of(asked, each) for each in (Split(), Split(pipefusion=8, patches=8)))
        ratio[repeated] = (one.total - one.text - one.vae) / (cut.total - cut.text - cut.vae)
    assert here.sampler.text_with_patches
    assert ratio[True] == pytest.approx(3.42, rel=0.05)
    assert ratio[False] > 5


def test_a_pipeline_with_too_few_patches_waits_each_step() -> None:
    run = Pipeline(4, LAYERS, 2, IMAGE)
    run.run(10)
    assert run.busy[0] / run.ticks == pytest.approx(pipeline_efficiency(2, 10, 4), rel=0.05)


def test_nothing_is_stale_where_the_image_does_not_change() -> None:
    """Attention over equal tokens is the identity, so old keys are as good as new ones."""
    same = np.ones_like(IMAGE)
    run = Pipeline(4, LAYERS, 4, same)
    run.run(3)
    assert np.allclose(run.image, 1.0)


def test_the_halves_of_guidance_exchange_their_latents() -> None:
    guided = setting(toy(guidance=True))
    assert latent_bytes(guided.model, guided.job) == 128 // 8 * 256 // 8 * 4 * BYTES
    alone = latency_of(guided, Split(cfg=2))
    assert alone.sent == latent_bytes(guided.model, guided.job)


# --- the published table ----------------------------------------------------------------------------------------------


@given(st.integers(16, 10**6), st.integers(64, 8192), st.integers(1, 100), st.integers(2, 512))
def test_the_table_of_the_paper(tokens: int, width: int, layers: int, chips: int) -> None:
    """arXiv 2405.14430, table 1, and: PipeFusion sends less than Ulysses exactly where N < 2 L."""
    found, whole = volumes(tokens, width, layers, chips), tokens * width
    assert {name: each.communication for name, each in found.items()} == pytest.approx({
        "tp": 4 * whole * layers, "distrifusion": 2 * whole * layers, "ring": 2 * whole * layers,
        "ulysses": 4 / chips * whole * layers, "pipefusion": 2 * whole,
    })  # fmt: skip
    assert {name: each.parameters for name, each in found.items()} == pytest.approx(
        {"tp": 1 / chips, "distrifusion": 1, "ring": 1, "ulysses": 1, "pipefusion": 1 / chips}
    )
    assert {name: each.buffers for name, each in found.items()} == pytest.approx(
        {"tp": 1 / chips, "distrifusion": layers, "ring": 1 / chips, "ulysses": 1 / chips, "pipefusion": layers / chips}
    )
    if chips != 2 * layers:
        assert (found["pipefusion"].communication < found["ulysses"].communication) == (chips < 2 * layers)
    assert not found["pipefusion"].fresh
    assert not found["distrifusion"].fresh
    assert found["ulysses"].fresh


def test_golden_figures_of_the_paper() -> None:
    assert 100 * pipeline_efficiency(4, 50, 4) == pytest.approx(98.5, abs=0.05)  # section 3.3
    found = volumes(4096, 1536, 38, 8)
    assert found["ulysses"].communication / found["pipefusion"].communication == pytest.approx(9.5)


def test_ulysses_per_link_as_deepspeed_states_it() -> None:
    """4 N h / P elements a layer and link: 131,072 tokens of 8,192 over 64."""
    assert volumes(131072, 8192, 1, 64)["ulysses"].communication == 67_108_864
