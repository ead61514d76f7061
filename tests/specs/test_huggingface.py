"""A Hugging Face config.json gives the numbers of our own file of that model, or is refused by the key that it has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, run

from planner import Model, SpecError, load_model
from planner.costs.weights import active_parameters, parameters, prediction_parameters
from planner.specs.catalog import ENGINES, HARDWARE, MODELS, as_yaml, load, names
from planner.specs.huggingface import model_from_config
from planner.specs.huggingface.architectures import ARCHITECTURES
from planner.specs.huggingface.pattern import shortest

GOLDEN = ROOT / "tests" / "golden" / "huggingface"
FILES = sorted(path.stem for path in GOLDEN.glob("*.json"))
OURS = [name for name in FILES if name in names(MODELS)]
REFUSED = {
    "deepseek-v3.2": "index_topk",
    "glm-5": "index_topk",
    "gpt-bigcode": "torch_dtype",
    "llama3.3-nemotron-super-49b": "block_configs",
    "nemotron-3-nano-30b-a3b": "hybrid_override_pattern",
    "nemotron-h-56b": "hybrid_override_pattern",
}


@cache
def _text(name: str) -> str:
    return (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A golden file; a change of `...` takes the key away."""
    raw = json.loads(_text(name)) | changes
    return {key: value for key, value in raw.items() if value is not ...}


def nested(name: str, above: str, **changes: Any) -> dict[str, Any]:
    """A golden file with changes below a key."""
    raw = config(name)
    inner = raw[above] | changes
    return raw | {above: {key: value for key, value in inner.items() if value is not ...}}


def imported(name: str, **changes: Any) -> Model:
    return model_from_config(config(name, **changes), f"{name}.json")


def refusal(raw: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        model_from_config(raw, "some/config.json")
    assert caught.value.path == "some/config.json"
    assert len(caught.value.problem) > 10
    return caught.value


# --- the same numbers as ours -----------------------------------------------------------------------------------------


def test_the_files_are_those_of_the_facts() -> None:
    assert len(FILES) == 61
    assert len(OURS) == 47
    assert all(json.loads(_text(name))["_source"].startswith("github:") for name in FILES)


@pytest.mark.parametrize("name", OURS)
def test_an_import_gives_the_numbers_of_our_own_file(name: str) -> None:
    ours, theirs = load_model(name), imported(name)
    assert parameters(theirs) == parameters(ours)
    assert active_parameters(theirs) == active_parameters(ours)
    assert theirs.kv_elements_per_token == ours.kv_elements_per_token
    assert (theirs.weights, theirs.quantised) == (ours.weights, ours.quantised)
    assert prediction_parameters(theirs) == prediction_parameters(ours)


OTHERWISE: dict[str, dict[str, Any]] = {
    "glm-4.5": {"max_context": 202752},  # the file is GLM-4.7's: same shapes, longer context
    "phi-3-mini": {"max_context": 131072, "attention_pattern": ("full",)},  # Phi-3.5's: the window never cuts anything
}


@pytest.mark.parametrize("name", OURS)
def test_an_import_has_every_shape_of_our_own_file(name: str) -> None:
    def shapes(model: Model) -> Model:
        return model._replace(
            name="", sources=(), notes=(), hf_ids=(), aliases=(), published=None, unverified=(), extra=()
        )

    ours = shapes(load_model(name))._replace(**OTHERWISE.get(name, {}))
    if name == "phi-3-mini":
        ours = ours._replace(attention=ours.attention._replace(window=None))
    assert shapes(imported(name)) == ours


def test_what_stands_beside_the_language_model_is_counted_where_the_file_says_it_all() -> None:
    for name in ("gemma-3-27b", "bloom-176b"):
        (theirs,), (ours,) = imported(name).extra, load_model(name).extra
        assert theirs.parameters == ours.parameters
    scout = imported("llama4-scout")  # the file has no vision_config
    assert scout.extra == ()
    assert "vision_config" in scout.notes[0]
    tower = {"model_type": "llama4_vision_model", "hidden_size": 1408}
    scout = imported("llama4-scout", vision_config=tower)
    assert scout.extra == ()
    assert scout.notes == ("vision_config: its parameters do not follow from the file and are not counted.",)


def test_what_the_file_leaves_open_is_said() -> None:
    assert [fact.split()[0] for fact in imported("bloom-176b").unverified] == ["seq_length", "torch_dtype"]
    keys = [fact.split()[0] for fact in imported("glm-4.5").unverified]
    assert keys == ["attention_bias", "use_qk_norm", "num_nextn_predict_layers"]
    assert imported("llama3-8b").unverified == ()
    air = imported("glm-4.5", attention_bias=True, use_qk_norm=False, num_nextn_predict_layers=0)
    assert (air.attention.qkv_bias, air.attention.qk_norm, air.prediction, air.unverified) == (True, None, None, ())
    assert "num_mtp_modules" in imported("minimax-m2.5").notes[0]


# --- the files whose model is not in the catalogue --------------------------------------------------------------------

PUBLISHED = {
    "aya-23-8b-cohere": 8_028_033_024,  # aya-expanse-8b, of the same shapes, in a public table
    "codellama-34b": 33_743_970_304,  # Phind-CodeLlama-34B, of the same shapes, in a public table
    "gpt2": 12 * (12 * 768**2 + 13 * 768) + (50_257 + 1024) * 768 + 2 * 768,  # 124,439,808, GPT-2 small
    "mixtral-8x22b-wizardlm2": 140_620_634_112,  # total_size 281,241,268,224 of its index / 2 bytes
    "qwen2-7b": 7_615_616_512,  # Qwen2-7B has the shapes of Qwen2.5-7B
    "qwen2.5-7b-instruct": 7_615_616_512,
    "qwen3-1.7b": 1_720_574_976,  # general.parameter_count of its GGUF file
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_another_import_has_the_published_count(name: str, count: int) -> None:
    model = imported(name)
    assert parameters(model) == count
    assert model.weights == {"aya-23-8b-cohere": "fp16", "gpt2": "fp32"}.get(name, "bf16")


def test_glm_flash_has_the_count_of_an_independent_formula() -> None:
    """Latent attention and experts, written out; with the module behind layer 46: 31.2 B."""
    d, heads, vocab = 2048, 20, 154_880
    attention = d * 768 + 768 + 768 * heads * 256 + d * (512 + 64) + 512 + 512 * heads * (192 + 256) + heads * 256 * d
    dense, sparse = 3 * d * 10_240, 65 * 3 * d * 1536 + 64 * d + 64
    main = 47 * (attention + 2 * d) + dense + 46 * sparse + 2 * vocab * d + d
    model = imported("glm-4.7-flash")
    assert parameters(model) == main == 29_943_393_920
    module = attention + 2 * d + sparse + 2 * d * d + 3 * d + 2 * vocab * d
    assert prediction_parameters(model) == module == 31_221_488_576 - main
    assert active_parameters(model) == main - 46 * 60 * 3 * d * 1536


@pytest.mark.parametrize(("name", "key"), REFUSED.items())
def test_what_our_schema_cannot_hold_is_refused_by_its_key(name: str, key: str) -> None:
    assert refusal(config(name)).key == key


def test_every_file_is_imported_or_refused() -> None:
    assert set(FILES) == {*OURS, *PUBLISHED, "glm-4.7-flash", *REFUSED}


def test_santacoder_is_imported_once_its_dtype_is_stated() -> None:
    """SantaCoder, written out: multi-query, learned positions, tied; 1.1 B by its name."""
    d, ffn = 2048, 8192
    layer = (d * (d + 256) + d + 256) + (d * d + d) + (2 * d * ffn + ffn + d) + 4 * d
    model = imported("gpt-bigcode", torch_dtype="float32")
    assert parameters(model) == 24 * layer + 49_280 * d + 2048 * d + 2 * d == 1_124_886_528
    assert model.kv_elements_per_token == 24 * 2 * 128
    assert imported("gpt-bigcode", torch_dtype="float32", multi_query=False).attention.kv_heads == 16


# --- variants of the architectures ------------------------------------------------------------------------------------


def test_falcon_is_read_under_its_old_and_new_keys() -> None:
    old = {
        "model_type": "RefinedWebModel", "n_layer": 32, "n_head": 71, "hidden_size": 4544, "multi_query": True,
        "parallel_attn": True, "bias": False, "alibi": False, "vocab_size": 65024, "torch_dtype": "bfloat16",
    }  # fmt: skip
    new = {key: value for key, value in old.items() if not key.startswith("n_")} | {
        "model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "num_kv_heads": 71,
        "new_decoder_architecture": False,
    }  # fmt: skip
    ours = load_model("falcon-7b")
    for raw in (old, new):
        model = model_from_config(raw, "falcon/config.json")
        assert parameters(model) == parameters(ours) == 6_921_720_704
        assert (model.attention, model.norm, model.parallel_block) == (ours.attention, ours.norm, True)
    serial = model_from_config(new | {"parallel_attn": False, "multi_query": False, "bias": True}, "x/config.json")
    assert (serial.norm.per_layer, serial.attention.kv_heads, serial.ffn.bias) == (2, 71, True)
    shared = model_from_config(config("falcon-180b", num_ln_in_parallel_attn=1, ffn_hidden_size=1024), "x/config.json")
    assert (shared.norm.per_layer, shared.ffn.hidden) == (1, 1024)


def test_google_leaves_out_what_equals_the_library() -> None:
    left_out = dict.fromkeys(
        ["vocab_size", "max_position_embeddings", "attention_bias", "layer_types", "hidden_activation"], ...
    )
    short = model_from_config(nested("gemma-3-27b", "text_config", **left_out), "gemma-3-27b.json")
    assert short == imported("gemma-3-27b")
    alone = config("gemma-3-27b")["text_config"]
    assert parameters(model_from_config(alone, "x/config.json")) == parameters(short)


def test_the_lists_of_llama_4_agree_with_its_intervals() -> None:
    def maverick(**changes: Any) -> Model:
        return model_from_config(nested("llama4-maverick", "text_config", **changes), "llama4-maverick.json")

    rope, odd = [1, 1, 1, 0] * 12, list(range(1, 48, 2))
    assert maverick(no_rope_layers=rope, moe_layers=odd) == maverick(no_rope_layers=[]) == maverick()
    kinds = ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"] * 12
    assert maverick(layer_types=kinds, no_rope_layers=rope) == maverick()
    assert maverick(attention_chunk_size=None).attention_pattern == ("full",)
    for key, value in (("moe_layers", [0, 1]), ("no_rope_layers", [1] * 47), ("no_rope_layers", [2] * 48)):
        assert refusal(nested("llama4-maverick", "text_config", **{key: value})).key == f"text_config.{key}"
    both = nested("llama4-maverick", "text_config", layer_types=kinds, no_rope_layers=[0] * 48)
    assert refusal(both).key == "text_config.no_rope_layers"


def test_windows_of_qwen_begin_where_the_file_says() -> None:
    model = imported("qwen2.5-7b", use_sliding_window=True, sliding_window=4096, max_window_layers=21)
    assert model.attention.window == 4096
    assert model.attention_pattern == ("full",) * 21 + ("window",) * 7
    assert (
        imported("qwen2.5-7b", use_sliding_window=True, sliding_window=4096, max_window_layers=28).attention.window
        is None
    )
    assert imported("qwen2.5-7b", use_sliding_window=True, sliding_window=None).attention_pattern == ("full",)
    listed = imported("qwen3-8b", layer_types=["full_attention"] * 36, use_sliding_window=False)
    assert listed == imported("qwen3-8b")
    assert refusal(config("qwen2.5-7b", use_sliding_window=True, sliding_window=9, max_window_layers=...)).key == (
        "max_window_layers"
    )
    assert refusal(config("qwen3-30b-a3b", use_sliding_window=True)).key == "use_sliding_window"


def test_a_window_is_stated_or_the_file_is_refused() -> None:
    assert imported("mistral-7b", sliding_window=None).attention_pattern == ("full",)
    assert imported("mistral-7b", sliding_window=32768).attention.window is None  # as long as the context
    assert imported("mixtral-8x7b", sliding_window=4096).attention_pattern == ("window",)
    assert refusal(config("mistral-7b", sliding_window=...)).key == "sliding_window"
    assert refusal(config("gpt-oss-20b", sliding_window=...)).key == "sliding_window"
    listed = ["sliding_attention"] * 32
    assert refusal(config("llama3-8b", layer_types=listed)).key == "layer_types"
    assert refusal(config("mixtral-8x7b", layer_types=listed)).key == "sliding_window"
    assert refusal(config("mistral-7b", layer_types=["linear_attention"] * 32)).key == "layer_types"
    assert refusal(config("mistral-7b", layer_types=["mamba"] * 32)).key == "layer_types"
    assert refusal(config("mistral-7b", layer_types=[["mamba"]] * 32)).key == "layer_types"
    assert "31 entries" in refusal(config("mistral-7b", layer_types=listed[:31])).problem
    assert refusal(config("minimax-m2.5", attn_type_list=[0] * 62)).key == "attn_type_list"
    assert imported("minimax-m2.5", attn_type_list=[1] * 62) == imported("minimax-m2.5")


def test_a_list_of_layers_may_stand_beside_the_interval_that_it_came_from() -> None:
    google = nested("gemma-3-27b", "text_config", _sliding_window_pattern=6)
    assert model_from_config(google, "gemma-3-27b.json") == imported("gemma-3-27b")
    kinds = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert imported("qwen3-next-80b-a3b", layer_types=kinds) == imported("qwen3-next-80b-a3b")
    assert imported("qwen3-next-80b-a3b", full_attention_interval=2).attention_pattern == ("linear", "full")
    assert imported("qwen3-next-80b-a3b", full_attention_interval=10**9).attention_pattern == ("linear",)
    assert refusal(config("qwen3-next-80b-a3b", full_attention_interval=0)).key == "full_attention_interval"


def test_a_pattern_is_told_as_shortly_as_it_can_be() -> None:
    assert shortest(["a", "b", "a", "b", "a"]) == ["a", "b"]
    assert shortest(["a", "a"]) == ["a"]
    assert shortest(["a", "b", "b"]) == ["a", "b", "b"]


def test_experts_may_begin_late_but_only_in_a_run() -> None:
    model = imported("qwen3-30b-a3b", mlp_only_layers=[0, 1])
    assert [kind.experts for kind in model.layer_kinds()[:3]] == [False, False, True]
    assert refusal(config("qwen3-30b-a3b", mlp_only_layers=[5])).key == "mlp_only_layers"
    assert imported("qwen3-30b-a3b", decoder_sparse_step=2).experts.every == 2  # type: ignore[union-attr]
    assert refusal(config("deepseek-v3", moe_layer_freq=2)).key == "moe_layer_freq"


def test_the_router_bias_of_deepseek_follows_its_method() -> None:
    def bias(name: str, method: Any) -> bool:
        experts = imported(name, topk_method=method).experts
        assert experts is not None
        return experts.router_bias

    assert [bias("deepseek-v3", method) for method in ("noaux_tc", "greedy", ...)] == [True, False, True]
    assert [bias("deepseek-v2-lite", method) for method in ("noaux_tc", "greedy", ...)] == [True, False, False]
    assert refusal(config("deepseek-v3", topk_method="other")).key == "topk_method"
    assert refusal(config("deepseek-v3", q_lora_rank=...)).key == "q_lora_rank"
    assert refusal(config("deepseek-v3", n_shared_experts=...)).key == "n_shared_experts"
    assert imported("deepseek-v3", num_nextn_predict_layers=0).prediction is None


def test_biases_tied_ends_and_head_widths_are_read() -> None:
    model = imported("llama3-8b", attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=64)
    assert (model.attention.qkv_bias, model.attention.out_bias, model.ffn.bias) == (True, True, True)
    assert (model.tied_embeddings, model.attention.head_dim) == (True, 64)
    assert imported("llama3-8b", num_key_value_heads=...).attention.kv_heads == 32
    assert imported("llama3-8b", head_dim=None, num_key_value_heads=None).attention.head_dim == 128
    assert imported("aya-23-8b-cohere", use_qk_norm=True).attention.qk_norm == "heads"
    assert imported("gpt2", n_inner=1000).ffn.hidden == 1000
    assert refusal(config("llama3-8b", num_attention_heads=30, num_key_value_heads=30)).key == "num_attention_heads"


def test_the_context_is_what_yarn_makes_of_it() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert imported("qwen2.5-7b-instruct").max_context == 32768
    assert imported("qwen2.5-7b-instruct", rope_scaling=yarn).max_context == 131072
    renamed = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert imported("qwen2.5-7b-instruct", rope_parameters=renamed).max_context == 131072
    other = {"type": "dynamic", "factor": 4.0}
    for rope in (other, {"type": "yarn"}, {"type": "yarn", "factor": "4"}, yarn | {"factor": float("inf")}):
        assert imported("qwen2.5-7b-instruct", rope_scaling=rope).max_context == 32768
    assert imported("aya-23-8b-cohere", model_max_length=131072).max_context == 131072


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "path", "name"),
    [
        ("meta-llama/Llama-3-8B", "x/config.json", "Llama-3-8B"),
        ("checkpoints/step_100/", "x/config.json", "step_100"),
        ("", "models/mine/config.json", "mine"),
        (None, "models/mine.json", "mine"),
        (None, "hub/models--owner--some-name/snapshots/0123abcd/config.json", "some-name"),
    ],
)
def test_a_model_is_named_by_itself_or_by_where_it_lies(stated: Any, path: str, name: str) -> None:
    model = model_from_config(config("llama3-8b", _name_or_path=stated), Path(path))
    assert model.name == name
    assert "model_type llama" in model.sources[0]


# --- dtype and quantisation -------------------------------------------------------------------------------------------


def test_the_dtype_is_read_under_both_names_and_never_guessed() -> None:
    assert imported("llama3-8b", torch_dtype="float16").weights == "fp16"
    assert imported("llama3-8b", torch_dtype="torch.float32").weights == "fp32"
    assert imported("llama3-8b", torch_dtype=..., dtype="bfloat16").weights == "bf16"
    assert refusal(config("llama3-8b", torch_dtype=...)).key == "torch_dtype"
    assert refusal(config("llama3-8b", torch_dtype="auto")).key == "torch_dtype"
    assert refusal(config("llama3-8b", torch_dtype="int3")).key == "torch_dtype"
    assert refusal(config("llama3-8b", dtype="float16")).key == "dtype"


def packed(form: str = "pack-quantized", activations: Any = None, **weights: Any) -> dict[str, Any]:
    """A scheme of compressed-tensors."""
    scheme = {"targets": ["Linear"], "input_activations": activations, "output_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", "sparsity_config": {},
    }  # fmt: skip


EIGHT = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "damp_percent": 0.1}
MASKED = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "global_sparsity": 0.5, "ignore": ["lm_head"]}
SYMMETRIC = {"type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("quantisation", "weights"),
    [
        (FP8, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "fp8"),
        (AWQ | {"modules_to_not_convert": None}, "int4"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}, "int4"),
        (GPTQ | {"checkpoint_format": "gptq", "lm_head": False, "dynamic": {}, "meta": {"quantizer": "x"}}, "int4"),
        (GPTQ | {"bits": 8, "group_size": -1}, "int8"),
        (packed("float-quantized", EIGHT, num_bits=8, type="float", strategy="channel"), "fp8"),
        (
            packed("float-quantized", EIGHT, num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            "fp8",
        ),
        (packed("int-quantized", EIGHT | {"type": "int"}, num_bits=8, type="int", strategy="channel"), "int8"),
        (packed(num_bits=8, type="int", strategy="channel"), "int8"),
        (packed(num_bits=4, **SYMMETRIC), "int4"),
        (packed(num_bits=4, **SYMMETRIC | {"symmetric": False}), "int4"),
        (
            packed("float-quantized", EIGHT, num_bits=8, type="float", strategy="channel")
            | {"sparsity_config": MASKED},
            "fp8-2:4",
        ),
        (packed(num_bits=4, **SYMMETRIC) | {"sparsity_config": MASKED}, "int4-2:4"),
        (packed(num_bits=4, **SYMMETRIC) | {"sparsity_config": {"format": "dense"}}, "int4"),
    ],
)
def test_a_quantised_checkpoint_has_our_dtype(quantisation: dict[str, Any], weights: str) -> None:
    model = imported("llama3-8b", quantization_config=quantisation)
    assert (model.weights, model.quantised) == (weights, "linears")
    assert parameters(model) == parameters(load_model("llama3-8b"))


def test_what_is_priced_otherwise_than_stored_is_said() -> None:
    symmetric = imported("llama3-8b", quantization_config=packed(num_bits=4, **SYMMETRIC))
    assert symmetric.notes == ("0.5156 B per weight with its scales, counted as 0.5195 B.",)
    eight = packed("int-quantized", EIGHT | {"type": "int"}, num_bits=8, type="int", strategy="channel")
    assert "16-bit arithmetic" in imported("llama3-8b", quantization_config=eight).notes[0]
    assert imported("llama3-8b", quantization_config=AWQ).notes == ()
    kv = packed("float-quantized", EIGHT, num_bits=8, type="float", strategy="tensor") | {"kv_cache_scheme": EIGHT}
    assert "--kv-cache" in imported("llama3-8b", quantization_config=kv).notes[0]


@pytest.mark.parametrize(
    ("quantisation", "key"),
    [
        ({"bits": 4}, "quant_method"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method"),
        ({"quant_method": "mxfp4"}, "quant_method"),  # a model without experts
        ("fp8", ""),
        (FP8 | {"fmt": "e5m2"}, "fmt"),
        (FP8 | {"weight_block_size": [1, 32]}, "weight_block_size"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size"),
        (FP8 | {"weight_block_size": ["128", 128]}, "weight_block_size"),
        (FP8 | {"something": True}, "something"),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}, "modules_to_not_convert"),
        (FP8 | {"ignored_layers": ["model.layers.3.mlp"]}, "ignored_layers"),
        (FP8 | {"modules_to_not_convert": ["what"]}, "modules_to_not_convert"),
        (FP8 | {"modules_to_not_convert": [3]}, "modules_to_not_convert"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        (AWQ | {"bits": 3}, "bits"),
        (AWQ | {"bits": "4"}, "bits"),
        (AWQ | {"group_size": 64}, "group_size"),
        (AWQ | {"group_size": 32}, "group_size"),
        (AWQ | {"group_size": -1}, "group_size"),
        (AWQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"bits": 8}, "group_size"),  # scales that int8 here does not count
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"dynamic": {"+:down": {"bits": 8}}}, "dynamic"),
        (packed(num_bits=4, **SYMMETRIC | {"group_size": 32}), "config_groups.group_0.weights.group_size"),
        (packed(num_bits=3, **SYMMETRIC), "config_groups.group_0.weights.num_bits"),
        (packed(num_bits=4, type="float", strategy="tensor"), "config_groups.group_0.weights.num_bits"),
        (packed(num_bits=4, type="int", strategy="channel"), "config_groups.group_0.weights.strategy"),
        (packed(num_bits=8, type="float", strategy="odd"), "config_groups.group_0.weights.strategy"),
        (packed(num_bits=8, type="what", strategy="tensor"), "config_groups.group_0.weights.type"),
        (packed(num_bits=8, type="float", strategy="block"), "config_groups.group_0.weights.block_structure"),
        (packed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="group"), "format"),
        (packed(num_bits=4, **SYMMETRIC) | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format"),
        (
            packed(num_bits=4, **SYMMETRIC) | {"sparsity_config": MASKED | {"sparsity_structure": "1:4"}},
            "sparsity_config.sparsity_structure",
        ),
        (packed(num_bits=4, **SYMMETRIC) | {"sparsity_config": MASKED | {"ignore": ["q"]}}, "sparsity_config.ignore"),
        (packed(num_bits=4, **SYMMETRIC) | {"transform_config": {"a": 1}}, "transform_config"),
        (packed(num_bits=4, **SYMMETRIC) | {"config_groups": {}}, "config_groups"),
        (packed(num_bits=4, **SYMMETRIC) | {"config_groups": {"a": {"targets": ["x"]}}}, "config_groups.a.targets"),
    ],
)
def test_another_quantisation_is_refused_by_its_key(quantisation: Any, key: str) -> None:
    found = refusal(config("llama3-8b", quantization_config=quantisation)).key
    assert found == (f"quantization_config.{key}" if key else "quantization_config")


def test_quantised_weights_beside_float32_are_refused() -> None:
    assert refusal(config("llama3-8b", torch_dtype="float32", quantization_config=FP8)).key == "torch_dtype"


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERY_LAYER = [f"model.layers.{layer}.self_attn.{name}" for layer in range(48) for name in ATTENTION]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(48)]


@pytest.mark.parametrize(
    ("kept", "applies_to"),
    [
        ([], "linears"),
        (["lm_head", "model.embed_tokens", "model.layers.0.input_layernorm", *ROUTERS], "linears"),
        (["gate", "e_score_correction_bias", "lm_head", "re:.*mlp\\.gate$", "re:.*router.*"], "linears"),
        (["model.layers.48.eh_proj", "mtp.fc", "re:visual.*"], "linears"),
        (["self_attn"], "experts"),
        (["re:.*self_attn.*", "lm_head"], "experts"),
        (["model.layers.*.self_attn"], "experts"),
        (EVERY_LAYER, "experts"),
        (EVERY_LAYER[1:], None),
        (["model.layers.0.self_attn"], None),
        (["self_attn", "model.layers.0.mlp.gate_proj"], None),
        (["mlp"], None),
        (["re:.*shared_expert.*"], None),
    ],
)
def test_what_is_kept_in_16_bit_decides_what_the_dtype_applies_to(kept: list[str], applies_to: str | None) -> None:
    raw = config("qwen3-30b-a3b", quantization_config=FP8 | {"modules_to_not_convert": kept})
    if applies_to is None:
        assert refusal(raw).key == "quantization_config.modules_to_not_convert"
    else:
        assert model_from_config(raw, "x/config.json").quantised == applies_to


def test_dense_layers_are_kept_as_well_where_the_dtype_is_of_experts_alone() -> None:
    dense = [f"model.layers.0.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    for kept, fits in ((["self_attn", *dense], True), (["self_attn", *dense[:2]], False), (["self_attn"], False)):
        raw = config("deepseek-v2-lite", quantization_config=FP8 | {"modules_to_not_convert": kept})
        if fits:
            assert model_from_config(raw, "x/config.json").quantised == "experts"
        else:
            assert "16 bit" in refusal(raw).problem


def test_mxfp4_is_of_experts_and_nothing_else() -> None:
    listed = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    assert (
        refusal(config("gpt-oss-20b", quantization_config=listed)).key == "quantization_config.modules_to_not_convert"
    )
    listed["modules_to_not_convert"] = ["model.layers.0.mlp"]
    assert (
        refusal(config("gpt-oss-20b", quantization_config=listed)).key == "quantization_config.modules_to_not_convert"
    )
    assert imported("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"}) == imported("gpt-oss-20b")
    plain = imported("gpt-oss-20b", quantization_config=..., dtype="bfloat16")
    assert (plain.weights, plain.quantised) == ("bf16", "linears")


# --- what is not understood -------------------------------------------------------------------------------------------

LIBRARY = {  # what transformers wrote of every configuration before 4.40, and what MLC adds
    "pruned_heads": {}, "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False,
    "cross_attention_hidden_size": None, "chunk_size_feed_forward": 0, "num_beam_groups": 1, "top_k": 50,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0}, "task_specific_params": None,
    "bad_words_ids": None, "no_repeat_ngram_size": 0, "transformers_version": "4.38.0", "eos_token_id": [1, 2],
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "auto_map": {"AutoConfig": "x"}, "use_cache": False,
    "sliding_window_size": 4096, "_attn_implementation_autoset": True, "_commit_hash": "abc", "max_length": 20,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*FILES} - {*REFUSED}))
def test_what_every_architecture_may_say_changes_nothing(name: str) -> None:
    expected = imported(name)
    version = f"{expected.sources[0]}, transformers 4.38.0"
    raw = config(name) | {key: value for key, value in LIBRARY.items() if key not in config(name)}
    assert model_from_config(raw, f"{name}.json") == expected._replace(sources=(version,))


def test_unknown_scalars_that_say_nothing_of_shapes_are_noted() -> None:
    model = imported("llama3-8b", unsloth_fixed=True, is_llama_config=True, logits_scaling=8.0, vendor="me", off=False)
    assert model.notes == (
        "not understood, taken to be harmless: is_llama_config, logits_scaling, off, unsloth_fixed, vendor",
    )
    assert parameters(model) == parameters(load_model("llama3-8b"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_memory_tokens", 8),
        ("v_head_dim", 64),
        ("qkv_bias", True),
        ("mamba_d_state", 16),
        ("moe_num_experts", 8),
        ("layer_layout", ["a", "b"]),
        ("tower", {"anything": 1}),
        ("attention_kind", "sparse"),
        ("index_topk", 2048),
        ("block_configs", [{}]),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("kv_lora_rank", 512),
        ("vision_tower_layers", 3),
    ],
)
def test_unknown_keys_that_may_change_shapes_are_refused(key: str, value: Any) -> None:
    assert refusal(config("llama3-8b", **{key: value})).key == key


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama3-8b", "model_type", ...),
        ("llama3-8b", "model_type", "qwen9"),
        ("llama3-8b", "model_type", 3),
        ("llama3-8b", "architectures", ["LlamaForSequenceClassification"]),
        ("llama3-8b", "architectures", "LlamaForCausalLM"),
        ("llama3-8b", "architectures", [None]),
        ("llama3-8b", "hidden_size", ...),
        ("llama3-8b", "hidden_size", "4096"),
        ("llama3-8b", "hidden_size", 4096.0),
        ("llama3-8b", "hidden_size", True),
        ("llama3-8b", "hidden_size", 0),
        ("llama3-8b", "hidden_size", 10**30),
        ("llama3-8b", "num_hidden_layers", -1),
        ("llama3-8b", "num_hidden_layers", 10**9),
        ("llama3-8b", "intermediate_size", [1, 2]),
        ("llama3-8b", "num_key_value_heads", 7),
        ("llama3-8b", "num_key_value_heads", [8] * 32),
        ("llama3-8b", "tie_word_embeddings", "yes"),
        ("llama3-8b", "tie_word_embeddings", 1),
        ("llama3-8b", "max_position_embeddings", ...),
        ("llama3-8b", "max_position_embeddings", 10**12),
        ("llama3-8b", "hidden_act", 3),
        ("llama3-8b", "vocab_size", None),
        ("mistral-7b", "num_key_value_heads", ...),
        ("mistral-7b", "sliding_window", "4096"),
        ("mixtral-8x7b", "num_local_experts", 0),
        ("mixtral-8x7b", "num_experts_per_tok", 9),
        ("gpt-oss-20b", "experts_per_token", 2),
        ("qwen3-next-80b-a3b", "linear_num_key_heads", ...),
        ("qwen3-coder-480b-a35b", "shared_expert_intermediate_size", 512),
        ("deepseek-v3", "attention_bias", True),
        ("minimax-m2.5", "qk_norm_type", "per_head"),
        ("minimax-m2.5", "shared_intermediate_size", 64),
        ("minimax-m2.5", "use_qk_norm", ...),
        ("dbrx", "attn_config", 3),
        ("dbrx", "attn_config", ...),
        ("gemma-3-27b", "text_config", ...),
        ("gemma-3-27b", "tie_word_embeddings", "x"),
        ("bloom-176b", "n_embed", 100),
    ],
)
def test_a_missing_or_impossible_value_is_refused_by_its_key(name: str, key: str, value: Any) -> None:
    found = refusal(config(name, **{key: value})).key
    assert found in (key, {"bloom-176b": "num_attention_heads"}.get(name))


def test_keys_inside_others_are_told_with_their_path() -> None:
    assert refusal(nested("gemma-3-27b", "text_config", hidden_size=-1)).key == "text_config.hidden_size"
    assert refusal(nested("gemma-3-27b", "text_config", hidden_size=...)).key == "text_config.hidden_size"
    assert refusal(nested("gemma-3-27b", "text_config", index_topk=3)).key == "text_config.index_topk"
    assert refusal(nested("gemma-3-27b", "text_config", model_type="other")).key == "text_config.model_type"
    assert refusal(nested("gemma-3-27b", "text_config") | {"vocab_size": 5}).key == "text_config.vocab_size"
    assert refusal(nested("gemma-3-27b", "vision_config", patch_size="x")).key == "vision_config.patch_size"
    assert refusal(nested("dbrx", "attn_config", kv_n_heads=5)).key == "attn_config.kv_n_heads"
    assert refusal(nested("dbrx", "ffn_config", moe_shared_experts=5)).key == "ffn_config.moe_shared_experts"


@pytest.mark.parametrize(
    "name", ["llama3-8b", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b", "falcon-40b", "dbrx"]
)
def test_any_change_of_a_value_gives_a_model_or_a_sentence(name: str) -> None:
    def changed(raw: dict[str, Any], put: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        for key, value in raw.items():
            for other in (None, "x", -1, 0, 1, 3.5, True, [], [1], {}, {"a": 1}, 10**18, float("nan")):
                with suppress(SpecError):
                    assert isinstance(model_from_config(put(raw | {key: other}), "x/config.json"), Model)
            if isinstance(value, dict):
                changed(value, lambda inner, key=key: put(raw | {key: inner}))  # type: ignore[misc]

    changed(config(name), lambda raw: raw)


def test_each_architecture_is_reached_by_a_file() -> None:
    reached = {json.loads(_text(name))["model_type"] for name in FILES} | {"RefinedWebModel", "gemma3_text"}
    assert set(ARCHITECTURES) - reached == {"llama4_text"}
    text = config("llama4-scout")["text_config"]
    assert parameters(model_from_config(text, "x/config.json")) == parameters(load_model("llama4-scout"))


# --- in the catalogue and at the command line -------------------------------------------------------------------------


def written(folder: Path, name: str, **changes: Any) -> Path:
    """A config.json in a folder of its own."""
    path = folder / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config(name, **changes), indent="\t"))
    return path


def test_a_config_is_a_model_to_every_command(tmp_path: Path) -> None:
    path = written(tmp_path, "llama3-8b", rms_norm_eps=1e-05)
    model = load_model(path)
    assert (model.name, parameters(model)) == ("llama3-8b", 8_030_261_248)
    theirs, ours = (run("-m", name, "--gpus", 2, "--csv", "-") for name in (path, "llama3-8b"))
    assert (theirs.status, theirs.err, theirs.out) == (0, "", ours.out)


def test_a_file_of_ours_may_extend_a_config(tmp_path: Path) -> None:
    written(tmp_path, "llama3-8b")
    path = tmp_path / "mine.yaml"
    path.write_text("extends: llama3-8b/config.json\nname: mine\nweights: fp8\n")
    assert (load_model(path).name, load_model(path).weights, load_model(path).layers) == ("mine", "fp8", 32)


def test_show_prints_what_was_understood(tmp_path: Path) -> None:
    done = run("show", written(tmp_path, "gpt-oss-20b"))
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "name: gpt-oss-20b"
    assert {"weights: mxfp4", "quantised: experts", "attention_pattern: window, full", "  window: 128"} <= set(lines)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v3", "bloom-176b"])
def test_show_yaml_is_a_file_that_loads_to_the_same(name: str, tmp_path: Path) -> None:
    source = written(tmp_path, name)
    done = run("show", source, "--yaml")
    assert (done.status, done.err) == (0, "")
    path = tmp_path / "mine.yaml"
    path.write_text(done.out)
    assert load_model(path) == load_model(source)


@pytest.mark.parametrize("family", [MODELS, HARDWARE, ENGINES], ids=lambda family: str(family.folder))
def test_yaml_of_shipped_files_loads_to_the_same(family: Any, tmp_path: Path) -> None:
    known = names(family)
    for name in known[:: 1 if family is MODELS else 5]:
        path = tmp_path / f"{name}.yaml"
        path.write_text(as_yaml(load(family, name)))
        assert repr(load(family, path)) == repr(load(family, name))
        assert "&id" not in path.read_text()


def test_show_yaml_stands_alone() -> None:
    done = run("show", "llama3-8b", "--yaml", "--csv", "-")
    assert (done.status, done.out) == (2, "")
    assert "--yaml" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama",\n}', "not valid JSON: line 2"),
        ("", "is empty"),
        ("[1]", "holds a list"),
        ("[" * 100_000, "JSON|deeply"),
        (f'{{"model_type": "llama", "hidden_size": {"9" * 5000}}}', "too long a number"),
        ('{"temperature": 0.6}', "model_type: missing"),
        ('{"model_type": "qwen9"}', "model_type: found 'qwen9'"),
        ('{"architectures": ["X"]}', "model_type: missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for words in (("-m", path, "--gpus", "8"), ("show", path)):
        done = run(*words)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
        assert any(part in done.err for part in said.split("|"))
        assert str(path) in done.err


def test_its_tables_are_read_only_where_a_config_is() -> None:
    code = "import sys; from planner import load_model; load_model('llama3-8b'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "planner.specs.catalog" in done.stdout.split()
    assert "planner.specs.huggingface" not in done.stdout.split()
