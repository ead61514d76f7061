"""The diagnosis on ten models: where their phases stand, and verdicts that agree with the engine's own best plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from asking import request as asked

from planner.diagnosing import denoising, language
from planner.diagnosing.framework import PAYS, Diagnosis, Length, Verdict
from planner.diffusion.job import job_of
from planner.diffusion.ranking import Request, rank
from planner.errors import InputError
from planner.request import Request as LanguageRequest
from planner.sequence import best, cuts, timed
from planner.specs.catalog import load_diffusion, load_hardware, load_sampler

LANGUAGE = {
    "llama3-70b": (2048, 256), "llama3-8b": (2048, 256), "qwen2.5-72b": (8192, 256), "mistral-7b": (131072, 256),
    "gemma-3-27b": (65536, 256), "lwm-7b": (1_000_000, 256), "opt-66b": (1024, 256),
}  # fmt: skip
IMAGES = {"flux.1-dev": "h100", "sd3-medium": "l40", "hunyuanvideo": "h20"}
assert len(LANGUAGE) + len(IMAGES) == 10


def question(model: str, gpus: int = 8, hardware: str = "h100-sxm", **work: Any) -> LanguageRequest:
    return asked(model, gpus, hardware, work={"concurrency": 1, **work})


@cache
def of_language(name: str, gpus: int = 8, concurrency: int = 1) -> Diagnosis:
    isl, osl = LANGUAGE[name]
    return language.diagnose(question(name, gpus=gpus, isl=isl, osl=osl, concurrency=concurrency))


@cache
def of_images(name: str) -> Diagnosis:
    return denoising.diagnose(ask(name))


def ask(name: str) -> Request:
    sampler, model = load_sampler("xdit"), load_diffusion(name)
    return Request(model, load_hardware(IMAGES[name], sampler), sampler, 8, job_of(model), parallel_vae=True)


@pytest.mark.parametrize("name", LANGUAGE)
def test_prompts_compute_and_decode_steps_read(name: str) -> None:
    prefill, decode = of_language(name).spots
    assert prefill.intensity > prefill.ridge > decode.intensity
    assert prefill.quadrant[0] == "high"
    assert decode.quadrant == ("low", "high")
    assert decode.phase == "decode step"
    assert "fewer bytes" in decode.advice


def test_llama3_70b_at_batch_1_is_the_textbook_case() -> None:
    prefill, decode = of_language("llama3-70b").spots
    assert prefill.quadrant == ("high", "low")
    assert decode.intensity == pytest.approx(1.0, abs=0.1)  # two FLOPs for each weight of two bytes
    cost = next(check for check in of_language("llama3-70b").checks if check.item == "KV cost")
    assert {name: value for name, value, _ in cost.figures}["KV of a token"] == 2 * 80 * 8 * 128 * 2


def test_a_batch_moves_a_decode_step_towards_the_ridge() -> None:
    assert of_language("llama3-8b", concurrency=64).spots[1].intensity > 5 * of_language("llama3-8b").spots[1].intensity


def test_ranges_come_from_the_attention_pattern() -> None:
    reach = {name: of_language(name).dependencies[0] for name in LANGUAGE}
    assert {name: each.range for name, each in reach.items()} == {
        "llama3-70b": "global", "llama3-8b": "global", "qwen2.5-72b": "global", "opt-66b": "global",
        "lwm-7b": "global", "mistral-7b": "local", "gemma-3-27b": "local",
    }  # fmt: skip
    assert reach["mistral-7b"].share == pytest.approx(4096 / 131072)
    assert reach["gemma-3-27b"].share == pytest.approx((5 * 1024 / 65536 + 1) / 6, rel=0.05)
    for name in LANGUAGE:
        assert [each.divisible for each in of_language(name).dependencies] == ["possible", "hard"]


def test_a_million_tokens_fill_memory_and_must_be_cut() -> None:
    """One request of LWM holds the KV of more than six chips; fewer chips hold it in no way."""
    found = of_language("lwm-7b")
    assert found.spots[1].quadrant == ("low", "high")
    assert found.spots[0].quadrant == ("high", "high")
    assert found.spots[1].filled > 0.9
    small = language.diagnose(question("lwm-7b", gpus=4, isl=1_000_000, osl=256))
    assert small.verdicts[0].asked.whole is None
    assert small.verdicts[0].asked.cut is None


def test_beyond_the_kv_heads_only_a_cut_of_the_sequence_fits() -> None:
    request = question("llama3-70b", gpus=16, isl=1_048_576, osl=2, concurrency=2)
    verdict = language.diagnose(request).verdicts[1]
    assert verdict.asked.whole is None
    assert verdict.asked.cut is not None
    assert verdict.asked.cut[0] == "TP8xCP2"
    assert verdict.asked.pays
    assert verdict.crossover is not None


@pytest.mark.parametrize("name", LANGUAGE)
def test_verdicts_on_language_models_are_the_engines_best_plans(name: str) -> None:
    isl, _ = LANGUAGE[name]
    request = question(name, gpus=8, isl=isl, osl=256)
    request = request._replace(workload=request.workload._replace(max_context=isl + 256))
    prefill, decode = of_language(name).verdicts
    found = [timed(request, "prefill", cut, isl) for cut in cuts(request)]
    fastest = min((each for each in found if each.fits), key=lambda each: each.seconds)
    whole = best(found, False)
    assert whole is not None
    assert prefill.asked.pays == (fastest.cut.cp > 1 and whole.seconds >= (1 + PAYS) * fastest.seconds)
    assert not decode.asked.pays  # autoregressive: hardly ever
    assert decode.crossover is None


@pytest.mark.parametrize("name", IMAGES)
def test_denoising_is_local_divisible_and_pays_from_two_chips(name: str) -> None:
    found = of_images(name)
    (reach,), (sizes, chips) = found.dependencies, found.verdicts
    assert (reach.range, reach.divisible) == ("local", "natural")
    assert found.spots[0].quadrant[0] == "high"
    assert found.spots[0].intensity > found.spots[0].ridge
    assert sizes.axis == ("frames" if load_diffusion(name).is_video else "pixels of a side")
    own = 4 if load_diffusion(name).guidance else 2  # two chips take the halves of guidance
    assert chips.crossover is not None
    assert chips.crossover <= own


@pytest.mark.parametrize("name", IMAGES)
def test_verdicts_on_images_are_the_engines_best_plans(name: str) -> None:
    first = rank(ask(name)).rows[0]
    cut = first["ulysses"] * first["ring"] * first["pipefusion"] * first["distrifusion"] > 1
    assert of_images(name).verdicts[1].asked.pays == cut


@pytest.mark.parametrize("name", [*LANGUAGE, *IMAGES])
def test_the_checklist_is_whole_and_has_figures(name: str) -> None:
    found = of_language(name) if name in LANGUAGE else of_images(name)
    assert [check.item for check in found.checks][:5] == [
        "KV cost", "dependencies", "topology", "precision", "messages",
    ]  # fmt: skip
    assert all(check.figures and check.says for check in found.checks)


def test_a_crossover_is_where_the_rest_pays() -> None:
    def at(length: int, whole: float | None, cut: float | None) -> Length:
        return Length(length, None if whole is None else ("TP1", whole), None if cut is None else ("CP2", cut))

    lengths = (at(1, 1.0, 2.0), at(2, 1.0, 0.9), at(3, 1.0, 0.99), at(4, 2.0, 1.0), at(5, None, 1.0), at(6, None, None))
    assert Verdict("x", "tokens", lengths, lengths[0]).crossover == 4
    assert Verdict("x", "tokens", lengths[:3], lengths[0]).crossover is None
    assert [each.pays for each in lengths] == [False, True, False, True, True, False]


def test_models_that_are_not_priced_yet_say_so() -> None:
    with pytest.raises(InputError, match="gpt-oss-20b has experts"):
        language.diagnose(question("gpt-oss-20b", gpus=8))
