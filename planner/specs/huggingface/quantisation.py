"""What a config.json's `quantization_config` makes of the weights: a dtype of ours and what it applies to.

A dtype of ours has fixed bytes per weight, scales included (`dtypes.WEIGHTS`); a checkpoint whose own scales take
more or fewer than 1 % beside that is refused, as is one that keeps some layers' weights in 16 bit and not others'.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from planner.specs.dtypes import WEIGHTS, sparse_bytes
from planner.specs.huggingface.config import Config, brief, words

_TOLERANCE = 0.01
_PLAIN = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_DTYPES = {("float", 8): "fp8", ("int", 8): "int8", ("int", 4): "int4"}


class Stored(NamedTuple):
    """How a checkpoint holds its quantised weights."""

    kind: str
    """int or float."""
    bits: int
    key: str
    """The key to blame where the bytes do not fit."""
    group: float = math.inf
    """Weights that share a scale; inf = a channel or a tensor, whose scale does not count."""
    scale_bits: int = 0
    zero_bits: int = 0
    kept_keys: tuple[str, ...] = ("modules_to_not_convert",)
    """Keys that list the modules left in 16 bit."""
    notes: tuple[str, ...] = ()
    block: int = 0
    """Longer side of a block that shares a scale; 0 = the format has none."""
    sparse: bool = False
    """Whether two of every four weights are left out."""

    @property
    def bytes(self) -> float:
        """Bytes per weight, with its share of scale and zero point."""
        scales = (self.scale_bits + self.zero_bits) / self.group
        return sparse_bytes(self.bits, scales) if self.sparse else (self.bits + scales) / 8


def stored_weights(config: Config, raw: dict[str, Any], fallback: tuple[str, str] | None) -> dict[str, Any]:
    """`weights`, `quantised` and notes of our schema.

    Args:
        config: the file.
        raw: the model in our schema as read so far: layers, experts.
        fallback: (dtype, reason) where the file states none.

    Raises:
        SpecError: no dtype, or a quantisation that is not understood or that our schema cannot hold.
    """
    plain = _plain_dtype(config)
    if config.get("quantization_config") is None:
        if plain is None and fallback is None:
            raise config.refusal("torch_dtype", "missing; expected the dtype of the weights, as bfloat16")
        if plain is None and fallback is not None:
            config.assumed.append(f"torch_dtype is missing, taken as {fallback[0]}: {fallback[1]}")
            return {"weights": fallback[0]}
        return {"weights": plain}
    if plain == "fp32":
        raise config.refusal("torch_dtype", "found float32 beside quantised weights; what is not is taken as 16 bit")
    quantised = config.inside("quantization_config")
    method = quantised.text("quant_method")
    if method not in _METHODS:
        found = "missing" if method is None else f"found {method!r}"
        raise quantised.refusal("quant_method", f"{found}; understood are {', '.join(_METHODS)}")
    stored = _METHODS[method](quantised)
    unknown = sorted(set(quantised.raw) - quantised.read - _HARMLESS - set(stored.kept_keys))
    if unknown:
        raise quantised.refusal(unknown[0], f"is not understood for quant_method {method}")
    if stored.kind == "mx":
        return _microscaled(quantised, raw, stored)
    dtype = _DTYPES.get((stored.kind, stored.bits))
    if dtype is None:
        raise quantised.refusal(
            stored.key, f"found {stored.bits}-bit {stored.kind} weights; understood are fp8, int8, int4"
        )
    if stored.sparse:
        dtype = next(each.name for each in WEIGHTS.values() if each.dense == dtype)
    difference = stored.bytes / WEIGHTS[dtype].bytes - 1
    if abs(difference) > _TOLERANCE:
        sentence = (
            f"makes {stored.bytes:.4f} B per weight with its scales, but {dtype} here is {WEIGHTS[dtype].bytes:.4f} B"
        )
        raise quantised.refusal(stored.key, sentence)
    notes = list(stored.notes)
    if abs(difference) > _TOLERANCE / 10:
        notes.append(f"{stored.bytes:.4f} B per weight with its scales, counted as {WEIGHTS[dtype].bytes:.4f} B.")
    keys: dict[str, Any] = {
        "weights": dtype,
        "quantised": _applies_to(quantised, raw, stored.kept_keys),
        "notes": notes,
    }
    if stored.block:
        keys["weight_block"] = stored.block
    return keys


def _plain_dtype(config: Config) -> str | None:
    """What is not quantised: torch_dtype or, in newer files, dtype."""
    stated = [(name, value) for name in ("torch_dtype", "dtype") if (value := config.text(name)) not in (None, "auto")]
    found = [(name, _PLAIN.get(str(value).removeprefix("torch."))) for name, value in stated]
    for (name, dtype), (_, value) in zip(found, stated, strict=True):
        if dtype is None:
            raise config.refusal(name, f"found {value!r}, expected one of {', '.join(_PLAIN)}")
        if dtype != found[0][1]:
            raise config.refusal(name, f"found {value!r}, but {found[0][0]} is {stated[0][1]!r}")
    return found[0][1] if found else None


# --- the methods ------------------------------------------------------------------------------------------------------

_HARMLESS = words(  # how scales are found, how kernels pack, what was measured: nothing that changes the bytes
    "quant_method activation_scheme scale_fmt version quantization_status global_compression_ratio desc_act sym "
    "damp_percent damp_auto_increment true_sequential static_groups checkpoint_format pack_dtype model_name_or_path "
    "model_file_base_name backend do_fuse exllama_config fuse_max_seq_len meta dataset tokenizer batch_size "
    "module_name_preceding_first_block block_name_to_quantize model_seqlen pad_token_id use_cuda_fp16 use_exllama "
    "max_input_length cache_block_outputs is_marlin_format is_sym"
)


def _fp8(config: Config) -> Stored:
    """Block scales (DeepSeek-V3: fp32 per 128 x 128) or one scale a tensor or channel."""
    form = config.text("fmt")
    if form not in (None, "e4m3", "float8_e4m3fn"):
        raise config.refusal("fmt", f"found {form!r}, expected e4m3")
    kept = ("modules_to_not_convert", "ignored_layers")
    if config.get("weight_block_size") is None:
        return Stored("float", 8, "quant_method", kept_keys=kept)
    block = _blocks(config, "weight_block_size")
    key, group = "weight_block_size", math.prod(block)
    return Stored("float", 8, key, group, scale_bits=32, kept_keys=kept, block=max(block))


def _awq(config: Config) -> Stored:
    """A 16-bit scale and a zero point as wide as a weight, per group of inputs."""
    zero = config.flag("zero_point")
    names = [name for name in ("bits", "w_bit") if name in config.raw] or ["bits"]
    groups = [name for name in ("group_size", "q_group_size") if name in config.raw] or ["group_size"]
    bits = config.needed(names[0])
    return _grouped(config, "int", bits, names[0], groups[0], bits if zero is not False else 0)


def _gptq(config: Config) -> Stored:
    """As AWQ; zero points are stored even where they are all the same (`sym`)."""
    if config.flag("lm_head"):
        raise config.refusal(
            "lm_head", "found true: a quantised output matrix is not modelled, it stays in 16 bit here"
        )
    if config.get("dynamic"):
        raise config.refusal("dynamic", "gives modules bits of their own, which is not modelled")
    bits = config.needed("bits")
    return _grouped(config, "int", bits, "bits", "group_size", bits)


def _grouped(config: Config, kind: str, bits: int, bits_key: str, group_key: str, zero_bits: int) -> Stored:
    group = config.get(group_key)
    if group == -1 and not isinstance(group, bool):  # a scale for each output channel
        return Stored(kind, bits, group_key if bits == 4 else bits_key)
    size = config.needed(group_key)
    blame = group_key if (kind, bits) in _DTYPES else bits_key
    return Stored(kind, bits, blame, size, 16, zero_bits)


def _compressed_tensors(config: Config) -> Stored:
    """One scheme for all linear layers; formats and strategies of the compressed-tensors library."""
    form = config.text("format")
    if form not in ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized"):
        raise config.refusal("format", f"found {brief(form)}, which is not understood")
    sparse = _is_sparse(config.inside("sparsity_config")) if config.get("sparsity_config") else False
    if config.get("transform_config"):
        raise config.refusal("transform_config", "adds rotations between layers, which are not modelled")
    groups = config.inside("config_groups")
    if len(groups.raw) != 1:
        raise config.refusal("config_groups", f"holds {len(groups.raw)} schemes, expected one for all linear layers")
    group = groups.inside(next(iter(groups.raw)))
    if group.listing("targets") != ["Linear"]:
        raise group.refusal("targets", "expected Linear alone")
    if group.get("output_activations") is not None:
        raise group.refusal("output_activations", "is not understood")
    stored = _scheme(group.inside("weights"))
    notes = []
    if (stored.kind == "float") != (group.get("input_activations") is not None):
        arithmetic = "8-bit" if stored.kind == "float" else "16-bit"
        notes.append(f"input_activations: priced with {arithmetic} arithmetic, as {stored.kind} weights here are.")
    if config.get("kv_cache_scheme") is not None:
        notes.append("kv_cache_scheme: the file asks for a quantised KV cache; --kv-cache decides here.")
    return stored._replace(kept_keys=("ignore",), notes=tuple(notes), sparse=sparse)


def _is_sparse(config: Config) -> bool:
    """Whether two of every four weights are left out, and a mask says which: a bit for each weight."""
    form = config.text("format")
    if form in (None, "dense"):
        return False
    if form != "sparse-24-bitmask":
        raise config.refusal("format", f"found {brief(form)}; of sparse weights sparse-24-bitmask is modelled")
    if config.text("sparsity_structure") not in (None, "2:4"):
        raise config.refusal("sparsity_structure", "expected 2:4")
    if config.listing("ignore") not in (None, [], ["lm_head"]):
        raise config.refusal("ignore", "keeps modules dense, which is not modelled; expected lm_head alone")
    return True


def _scheme(weights: Config) -> Stored:
    """How the weights of a compressed-tensors scheme are stored."""
    bits, kind, strategy = weights.needed("num_bits"), weights.text("type"), weights.text("strategy")
    if kind not in ("int", "float"):
        raise weights.refusal("type", f"found {brief(kind)}, expected int or float")
    known = (kind, bits) in _DTYPES
    zero = 0 if weights.flag("symmetric") is not False else bits
    if strategy in ("tensor", "channel"):
        return Stored(kind, bits, weights.shown_key("strategy" if known else "num_bits"))
    if strategy == "group":
        size = weights.needed("group_size")
        return Stored(kind, bits, weights.shown_key("group_size" if known else "num_bits"), size, 16, zero)
    if strategy == "block":
        key = weights.shown_key("block_structure")
        block = _blocks(weights, "block_structure")
        return Stored(kind, bits, key, math.prod(block), 32, zero, block=max(block))
    raise weights.refusal("strategy", f"found {brief(strategy)}, expected tensor, channel, group or block")


def _blocks(config: Config, key: str) -> tuple[int, int]:
    """Rows and columns of a block that has one scale."""
    block = config.listing(key) or []
    if len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise config.refusal(key, "expected two whole numbers of at least 1")
    return block[0], block[1]


def _mxfp4(config: Config) -> Stored:
    return Stored("mx", 4, "quant_method", 32, 8)


_METHODS: dict[str, Callable[[Config], Stored]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}


# --- what it applies to -----------------------------------------------------------------------------------------------

_ALWAYS_PLAIN = re.compile(  # what stays in 16 bit here under every dtype; in_proj_ba: two columns a head
    r"lm_head|embed|norm|router|(^|[.*])gate(\.weight)?$|shared_expert_gate|e_score_correction_bias|conv1d|in_proj_ba"
    r"|sinks|vision|visual|multi_modal|projector|^mtp"
)
_BLOCK = re.compile(
    r"^[\w.*]*?(?:layers\.(\d+|\*)\.)?(self_attn|linear_attn|mlp|feed_forward)(?:\.(\w+|\*))?(?:\.\*)?$"
)
_BEHIND = re.compile(r"(?:^|\.)layers\.(\d{1,6})(?:\.|$)")
_WHOLE = (  # projections that together are all of an attention or a dense FFN
    {"q_proj", "k_proj", "v_proj", "o_proj"},
    {"qkv_proj", "o_proj"},
    {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
    {"in_proj_qkvz", "out_proj"},
    {"gate_proj", "up_proj", "down_proj"},
    {"gate_up_proj", "down_proj"},
)
_EVERY = "*"


def _applies_to(config: Config, raw: dict[str, Any], kept_keys: tuple[str, ...]) -> str:
    """`linears` where only what is never quantised is kept, `experts` where attention and dense FFNs are kept whole.

    Raises:
        SpecError: anything between, or an entry that is not understood.
    """
    layers, experts = int(raw["layers"]), raw.get("experts")
    kept: dict[tuple[str, int], set[str]] = {}
    blame = kept_keys[0]
    for name in kept_keys:
        for entry in config.listing(name) or []:
            for block, layer, projection in _kept(config, name, entry, layers):
                kept.setdefault((block, layer), set()).add(projection)
                blame = name
    if not kept:
        return "linears"
    attention = {layer for (block, layer), names in kept.items() if block == "attn" and _is_whole(names)}
    dense = {layer for (block, layer), names in kept.items() if block == "mlp" and _is_whole(names)}
    wanted = set() if experts is None else {
        layer
        for layer in range(layers)
        if layer < experts.get("first_dense", 0) or (layer + 1) % experts.get("every", 1)
    }  # fmt: skip
    if experts is not None and len(attention) == layers and dense == wanted and len(kept) == layers + len(wanted):
        return "experts"
    sentence = "keeps some projections in 16 bit and not others; modelled are all quantised, or experts alone"
    raise config.refusal(blame, sentence)


def _kept(config: Config, kept_key: str, entry: Any, layers: int) -> list[tuple[str, int, str]]:
    """(attn or mlp, layer, projection) of what an entry keeps; nothing where it is never quantised here."""
    if not isinstance(entry, str):
        raise config.refusal(kept_key, f"has an entry {brief(entry)}, expected names of modules")
    name = entry.removeprefix("re:").replace("\\", "").strip("^$").replace(".*", "*")
    behind = _BEHIND.search(name)  # a prediction module stands behind the last layer
    if _ALWAYS_PLAIN.search(name) or (behind and int(behind[1]) >= layers):
        return []
    match = _BLOCK.match(name.replace("*", ".*.").replace("..", ".").strip("."))
    if match is None:
        raise config.refusal(kept_key, f"keeps {entry!r} in 16 bit, which is not understood")
    index, block, projection = match.groups()
    block = "attn" if block.endswith("_attn") else "mlp"
    chosen = range(layers) if index in (None, _EVERY) else [int(index)]
    return [(block, layer, projection or _EVERY) for layer in chosen]


def _is_whole(names: set[str]) -> bool:
    return _EVERY in names or any(whole <= names for whole in _WHOLE)


def _microscaled(config: Config, raw: dict[str, Any], stored: Stored) -> dict[str, Any]:
    """mxfp4: transformers converts the experts and nothing else, whatever is listed."""
    if raw.get("experts") is None:
        raise config.refusal("quant_method", "found mxfp4 in a model without experts; it applies to experts alone")
    (name,) = stored.kept_keys
    for entry in config.listing(name) or []:
        if any(block == "mlp" for block, _, _ in _kept(config, name, entry, int(raw["layers"]))):
            raise config.refusal(name, f"keeps {entry!r} in 16 bit, which is not modelled under mxfp4")
    return {"weights": "mxfp4", "quantised": "experts"}
