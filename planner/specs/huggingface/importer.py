"""From a Hugging Face config.json to a model of our schema: the same numbers as a file of ours, or a refusal.

A key that would change the result is never guessed. What is understood stands in `architectures` (one table per
model_type) and `quantisation`; what is known to be harmless is listed there and here; anything else is either a
scalar that by its name says nothing of shapes, and is noted, or an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.specs.huggingface.architectures import ARCHITECTURES, Architecture
from planner.specs.huggingface.config import Config, Key, brief, words
from planner.specs.huggingface.pattern import attention_pattern
from planner.specs.huggingface.quantisation import stored_weights
from planner.specs.model import Model
from planner.specs.structure import validated

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu2": "squared_relu"}
_MOST_LAYERS = 10_000  # lists of as many are made; no model comes near
_MODALITIES = ("vision_config", "audio_config")
_FOREIGN = {
    "block_configs": "gives each layer shapes of its own, which is not modelled",
    "hybrid_override_pattern": "mixes in state-space layers, which are not modelled",
    "layers_block_type": "mixes in layers of other kinds, which are not modelled",
    "attn_layer_period": "mixes in state-space layers, which are not modelled",
    "ssm_state_size": "is of state-space layers, which are not modelled",
    "index_topk": "is of sparse attention, whose indexer has weights and a cache of its own that are not modelled",
    "encoder_layers": "is of an encoder; modelled are decoders",
}
"""Keys of architectures that our schema cannot hold, said before the model_type is: they name the reason."""
_EXPECTED: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
}
_HARMLESS = words(
    # tokens, text, bookkeeping
    "model_type architectures auto_map transformers_version bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id tokenizer_class prefix name_or_path num_labels finetuning_task task_specific_params "
    "problem_type id2label label2id return_dict torchscript use_bfloat16 tf_legacy_loss output_attentions "
    "output_hidden_states is_decoder tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward use_cache "
    "gradient_checkpointing classifier_dropout summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj "
    # sampling
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "cache_implementation begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    # training and arithmetic
    "attention_dropout hidden_dropout initializer_range rms_norm_eps layer_norm_eps layer_norm_epsilon pretraining_tp "
    "rope_theta rope_scaling rope_parameters partial_rotary_factor rotary_emb_base original_max_position_embeddings "
    "_attn_implementation_autoset _flash_attn_2_enabled attn_implementation use_flash_attention use_flash_attn "
    # what MLC adds
    "context_window_size prefill_chunk_size sliding_window_size tensor_parallel_shards max_batch_size"
)
_SHAPES = re.compile(
    r"(^|_)(n|num|size|dims?|ranks?|layers?|heads?|experts?|kernel|width|hidden|intermediate|bias|norm|moe|mlp|ffn|attn|"
    r"attention|window|sliding|pattern|types?|interval|freq|period|step|groups?|conv|ssm|mamba|state|lora|vocab|positions?|"
    r"embed|embd|embeddings?|tie|tied|shared?|blocks?|kv|q|k|v|qkv|latent|mtp|nextn|predict|quant|quantization|bits|gate|"
    r"router|adapter)(_|$)"
)


def is_config(raw: Mapping[str, Any], path: Path) -> bool:
    """Whether a mapping is a Hugging Face config.json rather than a file of our own schema."""
    if raw.keys() & {"extends", "layers", "name"}:
        return False
    return bool(raw.keys() & {"model_type", "architectures"}) or path.suffix == ".json"


def model_from_config(config: dict[str, Any], path: Path | str) -> Model:
    """The model that a config.json describes.

    Args:
        config: its keys and values.
        path: where it lies: for errors, and for the name where `_name_or_path` gives none.

    Raises:
        SpecError: with the key: an architecture or a value that is not understood, a missing or impossible value.
    """
    model_type, architecture, read = _opened(config, Path(path))
    flat: dict[str, Any] = {}
    came: dict[str, str] = {}
    for field, entry in architecture.fields.items():
        if isinstance(entry, Key):
            flat[field], came[field] = entry.of(read)
        else:
            flat[field] = entry(read) if callable(entry) else entry
    _check(flat, came, read)
    pattern, window = attention_pattern(read, architecture.pattern, flat["layers"], flat["max_context"])
    flat |= {"attention_pattern": pattern, "attention.window": window}
    flat |= {"attention.blocks": True} if architecture.pattern.blocks and window is not None else {}
    activation = flat["ffn.activation"]
    flat["ffn.activation"] = _ACTIVATIONS.get(activation, activation)
    raw = _nested(flat)
    stored = stored_weights(read, raw, architecture.dtype)
    notes = [*architecture.notes, *stored.pop("notes", []), *_towers(read, raw, bool(architecture.text))]
    unknown = _unknown(read, architecture, model_type)
    if unknown:
        notes.append(f"not understood, taken to be harmless: {', '.join(unknown)}")
    where = Path(path)
    version = read.raw.get("transformers_version")
    raw |= stored | {
        "name": _name(read, where),
        "sources": [
            f"Hugging Face {where.name} of {_name(read, where)}, model_type {model_type}"
            + (f", transformers {version}" if isinstance(version, str) else "")
        ],
        "unverified": read.assumed,
        "notes": notes,
    }
    try:
        return validated(Model, raw, path)
    except SpecError as error:  # our key says less to whoever wrote the file than theirs
        name = came.get(error.key, error.key)
        raise SpecError(path, read.shown_key(name), error.problem) from None


def _opened(config: dict[str, Any], path: Path) -> tuple[str, Architecture, Config]:
    """(model_type, its table, the keys with nested ones lifted out)."""
    raw = {str(key): value for key, value in config.items()}
    text = raw.get("text_config")
    for keys, above in ((raw, ""), (text if isinstance(text, dict) else {}, "text_config.")):
        for key, sentence in _FOREIGN.items():
            if keys.get(key) is not None:
                raise SpecError(path, above + key, sentence)
    outer = Config(raw, path)
    model_type = outer.text("model_type")
    if model_type is None:
        raise outer.refusal("model_type", "missing; expected the architecture: is this a model's config.json?")
    if model_type not in ARCHITECTURES:
        raise outer.refusal("model_type", f"found {model_type!r}; understood are {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    for name in outer.listing("architectures") or []:
        if name not in architecture.classes:
            expected = " or ".join(architecture.classes)
            raise outer.refusal("architectures", f"found {brief(name)}, of {model_type} expected {expected}")
    shown: dict[str, str] = {}
    for above in architecture.nested:
        inner = outer.inside(above)
        shown |= {f"{above}.{name}": inner.shown[name] for name in inner.raw}
        raw |= {f"{above}.{name}": value for name, value in inner.raw.items()}
        del raw[above]
    if architecture.text:
        inner = outer.inside("text_config")
        if inner.text("model_type") not in (None, *architecture.text):
            raise inner.refusal("model_type", f"found {inner.raw['model_type']!r}, expected {architecture.text[0]}")
        for name in sorted(inner.raw.keys() & raw.keys() - _HARMLESS):
            if inner.raw[name] != raw[name] and None not in (inner.raw[name], raw[name]):
                raise inner.refusal(name, f"found {brief(inner.raw[name])}, but {brief(raw[name])} outside text_config")
        del raw["text_config"]
        lifted = {name: value for name, value in inner.raw.items() if value is not None or name not in raw}
        raw, shown = raw | lifted, shown | {name: inner.shown[name] for name in lifted}
    return model_type, architecture, Config(raw, path, shown, "text_config." if architecture.text else "")


def _check(flat: dict[str, Any], came: dict[str, str], read: Config) -> None:
    """What our schema takes for granted, said with the file's own keys."""
    if flat["layers"] > _MOST_LAYERS:
        raise read.refusal(came["layers"], f"found {flat['layers']}, expected at most {_MOST_LAYERS}")
    heads, kv_heads = flat["attention.heads"], flat["attention.kv_heads"]
    if heads % kv_heads:
        name = came.get("attention.kv_heads", came["attention.heads"])
        raise read.refusal(name, f"found {kv_heads}, expected a divisor of {came['attention.heads']} = {heads}")
    if "experts.routed" in flat and flat["experts.top_k"] > flat["experts.routed"]:
        sentence = (
            f"found {flat['experts.top_k']}, expected at most {came['experts.routed']} = {flat['experts.routed']}"
        )
        raise read.refusal(came["experts.top_k"], sentence)


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Key paths as mappings in mappings; what is None is left out, and prediction of no modules."""
    raw: dict[str, Any] = {}
    for path, value in flat.items():
        *above, last = path.split(".")
        if value is not None:
            place = raw
            for part in above:
                place = place.setdefault(part, {})
            place[last] = value
    if not raw.get("prediction", {}).get("modules", 1):
        del raw["prediction"]
    return raw


def _towers(read: Config, raw: dict[str, Any], multimodal: bool) -> list[str]:
    """Adds the vision tower to `extra` where its count follows from the file, says so in a note where it does not."""
    notes = []
    described = [name for name in _MODALITIES if read.get(name) is not None]
    if multimodal and not described:
        notes.append("vision_config is missing: the tower's parameters are not known and not counted.")
    for name in described:
        tower = read.inside(name)
        if tower.get("model_type") == "siglip_vision_model" and tower.get("vision_use_head") is False:
            raw["extra"] = [_siglip(tower, int(raw["hidden"]))]
        else:
            notes.append(f"{name}: its parameters do not follow from the file and are not counted.")
    return notes


def _siglip(tower: Config, hidden: int) -> dict[str, Any]:
    """SigLIP's encoder and Gemma 3's projector (modeling_siglip.py, modeling_gemma3.py)."""
    d, ffn, layers = (tower.needed(name) for name in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    patch, channels = tower.needed("patch_size"), tower.count("num_channels") or 3
    positions = (tower.needed("image_size") // patch) ** 2
    embeddings = channels * patch * patch * d + d + positions * d
    layer = 4 * (d * d + d) + (2 * d * ffn + ffn + d) + 4 * d
    parameters = embeddings + layers * layer + 2 * d + d * hidden + d
    return {"what": "SigLIP vision tower and projector", "parameters": parameters, "source": "vision_config"}


def _unknown(read: Config, architecture: Architecture, model_type: str) -> list[str]:
    """Names of keys that no table knows and whose values cannot change shapes, sorted.

    Raises:
        SpecError: a key whose value can, or one of which another value is understood.
    """
    for name, allowed in (_EXPECTED | architecture.expected).items():
        value = read.get(name)
        if value is not None and value not in allowed:
            known = " or ".join(map(brief, allowed)) or "null"
            raise read.refusal(name, f"found {brief(value)}; of {model_type} only {known} is understood")
    left = []
    for name, value in sorted(read.raw.items()):
        if name in read.read | _HARMLESS | architecture.harmless or (name.startswith("_") and isinstance(value, str)):
            continue
        if value in (None, "", [], {}):
            continue  # says nothing
        if isinstance(value, dict | list) or (value and _SHAPES.search(name)):
            sentence = f"found {brief(value)}, which is not understood of {model_type} and may change shapes"
            raise read.refusal(name, sentence)
        left.append(name)
    return left


def _name(read: Config, path: Path) -> str:
    stated = read.raw.get("_name_or_path")
    last = stated.rstrip("/").split("/")[-1] if isinstance(stated, str) else ""
    folder = path.absolute().parent
    if folder.parent.name == "snapshots":  # the cache of the Hub: models--owner--name/snapshots/commit
        folder = folder.parent.parent
    return last or (folder.name.split("--")[-1] if path.stem == "config" else path.stem) or path.stem
