"""The diagnosis on ten models: where their phases stand, and verdicts that agree with the engine's own best plan."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from asking import request as asked

from planner import load_model
from planner import rank as rank_language
from planner.diagnosing import denoising, language
from planner.diagnosing.contest import along, best, candidates, contest, ways
from planner.diagnosing.framework import Diagnosis, Length, Verdict
from planner.diffusion.job import job_of
from planner.diffusion.ranking import Request, rank
from planner.errors import InputError
from planner.plans.plan import Plan
from planner.plans.space import Filters
from planner.request import Request as LanguageRequest
from planner.specs.catalog import load_diffusion, load_hardware, load_sampler

LANGUAGE = {
    "llama3-70b": (2048, 256), "llama3-8b": (2048, 256), "qwen2.5-72b": (8192, 256), "mistral-7b": (131072, 256),
    "gemma-3-27b": (65536, 256), "lwm-7b": (1_000_000, 256), "opt-66b": (1024, 256),
}  # fmt: skip
EXPERTS = {"mixtral-8x7b": 8, "gpt-oss-20b": 2, "qwen3-30b-a3b": 4, "deepseek-v3": 16}
"""Models with experts, and latent attention, over so many chips; prompts of 2,048."""
IMAGES = {"flux.1-dev": "h100", "sd3-medium": "l40", "hunyuanvideo": "h20"}
assert len(LANGUAGE) + len(IMAGES) == 10


def question(model: str, gpus: int = 8, hardware: str = "h100-sxm", **work: Any) -> LanguageRequest:
    return asked(model, gpus, hardware, work={"concurrency": 1, **work})


@cache
def of_language(name: str, gpus: int = 8, concurrency: int = 1) -> Diagnosis:
    isl, osl = LANGUAGE.get(name, (2048, 256))
    gpus = EXPERTS.get(name, gpus)
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


def test_patterns_are_named_and_placed() -> None:
    """Full causal, sliding window, hybrid, block-local."""
    why = {name: of_language(name).dependencies[0].why for name in ("llama3-70b", "mistral-7b", "gemma-3-27b")}
    assert "causal, full" in why["llama3-70b"]
    assert "causal, over a sliding window of 4,096 tokens" in why["mistral-7b"]
    assert "83% of the layers over a sliding window of 1,024 tokens, the others full" in why["gemma-3-27b"]
    hybrid = language.diagnose(question("llama4-scout", isl=131072)).dependencies[0]
    assert (hybrid.range, hybrid.divisible) == ("mixed", "possible")
    assert hybrid.share == pytest.approx(0.25 + 0.75 * 8193 / 2 / 131072)
    asked = question("mistral-7b", isl=131072)
    blocks = asked.model._replace(attention=asked.model.attention._replace(blocks=True))
    local = language.diagnose(asked._replace(model=blocks)).dependencies
    assert [(each.range, each.divisible) for each in local] == [("local", "natural"), ("local", "hard")]
    assert "in blocks of 4,096 tokens" in local[0].why


def of_check(found: Diagnosis, item: str) -> dict[str, float]:
    return {name: value for name, value, _ in next(check for check in found.checks if check.item == item).figures}


def test_a_million_tokens_fill_memory_and_must_be_divided() -> None:
    """One request of LWM holds the KV of more than six chips, which some split has to divide: heads, tokens, layers."""
    found = of_language("lwm-7b")
    assert found.spots[1].quadrant == ("low", "high")
    assert found.spots[0].quadrant == ("high", "high")
    assert found.spots[1].filled > 0.9
    assert of_check(found, "KV cost")["KV held"] > 6 * found.hardware.chip.memory_gib
    assert of_check(found, "room") == {"chips, by heads": 8, "chips, by tokens": 8, "chips, by layers": 8}
    assert "no single chip" in next(check.says for check in found.checks if check.item == "room")
    request = question("lwm-7b", gpus=4, isl=1_000_000)
    for phase in ("prefill", "decode"):
        assert not any(each.fits[0] for each in contest(request, phase, [1_000_000]))


def test_what_fits_on_one_chip_need_not_be_divided() -> None:
    found = of_language("llama3-8b")
    assert of_check(found, "room")["chips, by heads"] == 1
    assert "fit on one chip" in next(check.says for check in found.checks if check.item == "room")


def test_beyond_the_kv_heads_only_a_cut_of_the_sequence_fits() -> None:
    """32 KV heads of LWM go over 32 chips: six requests of a million tokens want more, and so the sequence cut."""
    request = question("lwm-7b", gpus=64, isl=1_000_000)
    found = contest(request, "decode", [1_000_000], 6)
    assert best(found, 0, cut=False) is None
    cut = best(found, 0, cut=True)
    assert cut is not None
    assert cut.chips == 64
    by = {each.by: each for each in ways(request, 1_000_000, 6)}
    assert by["heads"].plan is None
    assert by["tokens"].chips == 64
    four = {each.by: each.chips for each in ways(request, 1_000_000, 4)}
    assert (four["heads"], four["tokens"]) == (32, 32)  # as far as there are heads, they do


def test_eight_kv_heads_want_the_sequence_cut_sooner() -> None:
    request = question("llama3-70b", gpus=16, isl=1_048_576, osl=2, concurrency=2)
    verdict = language.diagnose(request).verdicts[1]
    assert verdict.asked.whole is None
    assert verdict.asked.cut is not None
    assert verdict.asked.cut[0] == "TP16/heads8xseq2"
    assert verdict.asked.pays
    assert verdict.crossover is not None


@pytest.mark.parametrize("name", [*LANGUAGE, *EXPERTS])
def test_decode_steps_without_a_cut_are_those_of_the_ranking(name: str) -> None:
    """The planner ranks the same plans by TPOT: the diagnosis has its best one, at the same time."""
    isl, osl = LANGUAGE.get(name, (2048, 256))
    found = of_language(name).verdicts[1].asked.whole
    assert found is not None
    work = {"isl": isl, "osl": osl, "max_context": isl + osl}
    request = question(name, gpus=EXPERTS.get(name, 8), **work)._replace(filters=Filters(pp=(1,), dp=(1,)))
    rows = [row for row in rank_language(request).results.rows() if not along(Plan.parse(row["plan"]))]
    least = min(rows, key=lambda row: float(row["tpot_ms"]))
    assert found[1] * 1e3 == pytest.approx(least["tpot_ms"], rel=1e-3)
    assert found[0] in {row["plan"] for row in rows if row["tpot_ms"] <= least["tpot_ms"] * 1.001}


@pytest.mark.parametrize("name", LANGUAGE)
def test_verdicts_on_language_models_are_the_fastest_plans(name: str) -> None:
    isl, _ = LANGUAGE[name]
    prefill, decode = of_language(name).verdicts
    found = contest(question(name, isl=isl, max_context=isl + 256), "prefill", [isl])
    whole, cut = best(found, 0, cut=False), best(found, 0, cut=True)
    assert whole is not None
    assert cut is not None
    fastest = min((each for each in found if each.fits[0]), key=lambda each: float(each.seconds[0]))
    assert prefill.asked.whole == (whole.label, pytest.approx(float(whole.seconds[0])))
    assert prefill.asked.pays == (fastest.cut and prefill.asked.gain is not None and prefill.asked.gain >= 1.05)
    assert not decode.asked.pays  # autoregressive: hardly ever
    assert decode.crossover is None


@pytest.mark.parametrize("name", EXPERTS)
def test_models_with_experts_and_latents_are_diagnosed(name: str) -> None:
    found = of_language(name)
    prefill, decode = found.verdicts
    assert prefill.asked.cut is not None
    assert prefill.asked.gain is not None
    assert 0.7 < prefill.asked.gain < 2
    assert decode.asked.cut is not None
    assert decode.asked.gain is not None
    assert 0.5 < decode.asked.gain < 1.05  # at 2,048 tokens no cut pays
    assert found.spots[1].intensity < 4 < found.spots[0].intensity
    assert of_check(found, "KV cost")["KV of a token"] == 2 * load_model(name).kv_elements_per_token


def test_experts_read_less_than_the_model_holds() -> None:
    """A token of Mixtral goes to two of eight experts, so a step reads about 13 of 47 GB a byte of 16 bit each."""
    decode = of_language("mixtral-8x7b").spots[1]
    assert decode.bytes * 2 == pytest.approx(2 * 12.9e9, rel=0.05)  # over two chips


def test_a_latent_is_one_for_all_heads_so_long_contexts_are_cut() -> None:
    """DeepSeek-V3 over sixteen chips: tensor parallelism copies the latent, a cut by tokens does not."""
    verdict = of_language("deepseek-v3").verdicts[1]
    assert verdict.crossover is not None
    assert 16384 < verdict.crossover <= 131072
    asked = question("deepseek-v3", gpus=16, isl=1_000_000, max_context=1_100_000)
    found = contest(asked, "decode", [1_000_000])
    assert best(found, 0, cut=False) is None
    assert best(found, 0, cut=True) is not None
    assert {each.by: each.plan is None for each in ways(asked, 1_000_000, 1)}["heads"]


def test_every_plan_stands_in_a_contest_once() -> None:
    for name in ("llama3-70b", "mixtral-8x7b"):
        for phase in ("prefill", "decode"):
            found = candidates(question(name), phase)
            assert len(found) == len(set(found))
            assert all(each.chips <= 8 and each.pp == each.dp == 1 for each in found)
            assert {Plan(8), Plan(1)} <= set(found)
            assert any(map(along, found))
            assert all(each.cp == 1 for each in found if phase == "decode")


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


@pytest.mark.parametrize("name", [*LANGUAGE, *EXPERTS, *IMAGES])
def test_the_checklist_is_whole_and_has_figures(name: str) -> None:
    found = of_images(name) if name in IMAGES else of_language(name)
    assert [check.item for check in found.checks if check.item != "room"][:5] == [
        "KV cost", "dependencies", "topology", "precision", "messages",
    ]  # fmt: skip
    assert any(check.item == "room" for check in found.checks) == (name not in IMAGES)
    assert all(check.figures and check.says for check in found.checks)


def test_cuts_that_the_engine_does_not_run_say_so() -> None:
    """vLLM divides no prompt over groups, and a cache by tokens only where it would be copied."""
    prefill, decode = of_language("llama3-70b").verdicts
    assert "vllm does not divide a prompt's tokens" in str(prefill.refused)
    assert "copies of a KV head" in str(decode.refused)
    assert of_language("deepseek-v3").verdicts[1].refused is None  # one latent is copied to every chip
    ideal = asked("llama3-8b", 2, "h100-sxm", "ideal", {"concurrency": 1, "isl": 4096})
    assert [each.refused for each in language.diagnose(ideal).verdicts] == [None, None]


def test_a_crossover_is_where_the_rest_pays() -> None:
    def at(length: int, whole: float | None, cut: float | None) -> Length:
        return Length(length, None if whole is None else ("TP1", whole), None if cut is None else ("CP2", cut))

    lengths = (at(1, 1.0, 2.0), at(2, 1.0, 0.9), at(3, 1.0, 0.99), at(4, 2.0, 1.0), at(5, None, 1.0), at(6, None, None))
    assert Verdict("x", "tokens", lengths, lengths[0]).crossover == 4
    assert Verdict("x", "tokens", lengths[:3], lengths[0]).crossover is None
    assert [each.pays for each in lengths] == [False, True, False, True, True, False]


def test_the_checklist_prices_formats_of_fewer_bytes() -> None:
    for name, formats in (("llama3-70b", ["int4", "bf16-2:4"]), ("deepseek-v3", ["int4", "fp8-2:4"]),
                          ("gpt-oss-20b", ["int4"])):  # fmt: skip
        found = of_check(of_language(name), "precision")
        assert list(found) == [
            f"{what}{form}{end}" for form in formats for what, end in (("with ", " weights"), ("times, ", ""))
        ]
        assert all(value > 1 for key, value in found.items() if key.startswith("times"))


def test_models_that_are_not_priced_yet_say_so() -> None:
    with pytest.raises(InputError, match="plan diagnose: qwen3-next-80b-a3b has linear attention"):
        language.diagnose(question("qwen3-next-80b-a3b", gpus=8))
