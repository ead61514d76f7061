"""Diffusion transformers as models: parameters against published counts, tokens, sizes, labels, wrong files."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import TOY, toy

from planner.diffusion.job import grid_of, job_of, parse_size
from planner.diffusion.plan import Split
from planner.diffusion.pricing import stages_of
from planner.diffusion.weights import parameters
from planner.errors import InputError, SpecError
from planner.specs.catalog import DIFFUSION, is_diffusion, load_diffusion, load_model, names

PARAMETERS = {
    "flux.1-dev": 11_901_408_320,
    "flux.1-schnell": 11_891_178_560,
    "sd3-medium": 2_028_328_000,
    "sd3.5-large": 8_056_627_520,
    "sd3.5-medium": 2_243_171_520,
    "pixart-alpha-xl2-1024": 611_349_152,
    "pixart-sigma-xl2": 610_856_096,
    "hunyuanvideo": 12_821_012_544,
    "cogvideox-5b": 5_570_283_072,
    "cogvideox-2b": 1_693_783_872,
    "wan2.1-t2v-14b": 14_288_491_584,
    "wan2.1-t2v-1.3b": 1_418_996_800,
}
"""Counted from the modules themselves, tensor by tensor."""
TOKENS = {
    ("flux.1-dev", (512, 512), 1): 1024,
    ("flux.1-dev", (1024, 1024), 1): 4096,
    ("pixart-sigma-xl2", (2048, 2048), 1): 16384,
    ("pixart-alpha-xl2-1024", (4096, 4096), 1): 65536,
    ("cogvideox-5b", (720, 480), 49): 17550,
    ("wan2.1-t2v-1.3b", (832, 480), 81): 32760,
    ("wan2.1-t2v-14b", (1280, 720), 81): 75600,
    ("hunyuanvideo", (1280, 720), 129): 118800,
}


def test_all_thirteen_are_there() -> None:
    assert set(PARAMETERS) | {"hunyuandit-v1.2"} == set(names(DIFFUSION))


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_derived_to_the_last_one(name: str, count: int) -> None:
    assert parameters(load_diffusion(name)) == count


@pytest.mark.parametrize("name", names(DIFFUSION))
def test_parameters_agree_with_what_is_published(name: str) -> None:
    model = load_diffusion(name)
    if model.published is not None:
        exact = model.published.precision == "exact"
        assert parameters(model) == pytest.approx(model.published.parameters, rel=1e-12 if exact else 0.02)
    assert model.sources
    assert model.decoder.provenance.source


@pytest.mark.parametrize(("case", "tokens"), TOKENS.items())
def test_pixels_and_frames_become_tokens(case: tuple[str, tuple[int, int], int], tokens: int) -> None:
    name, size, frames = case
    model = load_diffusion(name)
    assert grid_of(model, job_of(model, size, frames)).tokens == tokens


def test_names_say_which_kind_of_model_it_is() -> None:
    assert is_diffusion("flux.1-dev")
    assert is_diffusion("black-forest-labs/FLUX.1-dev")
    assert not is_diffusion("llama3-8b")
    assert not is_diffusion("no-such-model")
    with pytest.raises(InputError, match="flux is a diffusion transformer"):
        load_model("flux")
    with pytest.raises(InputError, match="llama3-8b is a language model"):
        load_diffusion("llama3-8b")


@given(
    st.sampled_from([1, 2]), st.integers(1, 8), st.integers(1, 16), st.integers(1, 16), st.integers(1, 16),
    st.integers(2, 32), st.integers(1, 16), st.integers(1, 9),
)  # fmt: skip
def test_a_label_is_read_back(
    cfg: int, tp: int, ulysses: int, ring: int, stages: int, patches: int, distri: int, dp: int
) -> None:
    split = Split(cfg, tp, ulysses, ring, stages, patches if stages > 1 else 1, distri, dp)
    assert Split.parse(split.label) == split
    assert split.chips == cfg * tp * ulysses * ring * stages * distri * dp


@pytest.mark.parametrize("text", ["", "U", "U0", "PP4", "U2xU2", "U2:3", "PF1:4", "CFG2 x"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"plan of a diffusion transformer|patches belong"):
        Split.parse(text)


@given(st.integers(1, 57))
def test_stages_hold_every_block_once_and_differ_by_one(stages: int) -> None:
    model = load_diffusion("flux.1-dev")
    found = stages_of(model, stages)
    sizes = [sum(count for _, count in stage) for stage in found]
    assert sum(sizes) == model.depth
    assert max(sizes) - min(sizes) <= 1
    kinds = [block.kind for stage in found for block, count in stage for _ in range(count)]
    assert kinds == ["double"] * 19 + ["single"] * 38


def test_sizes_are_read() -> None:
    assert parse_size("1024") == (1024, 1024)
    assert parse_size("1280x720") == (1280, 720)


@pytest.mark.parametrize("text", ["", "x", "0", "-4", "1024x", "1e3", "1x2x3", "999999999999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--image: expected pixels"):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "job", "says"),
    [
        ("flux.1-dev", {"size": (1000, 1000)}, "try 992 or 1008"),
        ("flux.1-dev", {"size": (8, 8)}, "multiples of 16"),
        ("flux.1-dev", {"frames": 9}, "makes single images"),
        ("hunyuanvideo", {"frames": 128}, "try 125 or 129"),
        ("hunyuanvideo", {"frames": 0}, "at least 1"),
        ("flux.1-dev", {"steps": 0}, "--steps must be"),
        ("flux.1-dev", {"warmup": -1}, "--warmup must be"),
        ("flux.1-dev", {"batch": 0}, "at once"),
    ],
)
def test_jobs_that_cannot_be_are_refused(name: str, job: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        job_of(load_diffusion(name), **job)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": "wide"}, "hidden: .*whole number"),
        ({"layers": 3}, "layers: unknown key"),
        ({"head_dim": 9}, "head_dim: found 9, expected hidden / heads = 8"),
        ({"weights": "fp5"}, "weights: found 'fp5'"),
        ({"blocks": []}, "blocks: is empty"),
        ({"blocks": [{"kind": "triple", "layers": 1, "ffn": 8}]}, r"blocks\.0\.kind: found 'triple'"),
        ({"blocks": [{"kind": "joint", "layers": 1, "ffn": 8, "skips": 2}]}, r"blocks\.0\.skips: found 2"),
        ({"blocks": [{"kind": "joint", "layers": 1, "ffn": 8, "linear": True}]}, r"blocks\.0\.linear: belongs to"),
        ({"blocks": [{"kind": "joint", "layers": 1, "ffn": 8, "text_ends": True}]}, r"blocks\.0\.text_ends"),
        ({"size": {"width": 64, "height": 64, "frames": 5}}, r"size\.fps: missing"),
        ({"embedders": [{"what": "x", "widths": [4]}]}, r"embedders\.0\.widths"),
        ({"steps": 0}, "steps: found 0, expected at least 1"),
    ],
)
def test_a_file_that_is_wrong_says_which_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=rf"toy\.yaml: {says}"):
        toy(**change)


def test_keys_that_are_missing_are_named() -> None:
    from planner.specs.diffusion import Diffusion  # noqa: PLC0415
    from planner.specs.structure import validated  # noqa: PLC0415

    with pytest.raises(SpecError, match="latent: missing"):
        validated(Diffusion, {key: value for key, value in TOY.items() if key != "latent"}, "toy.yaml")
