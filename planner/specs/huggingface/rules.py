"""Fields of our schema that several keys of a config.json give together, or that follow from another field."""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.specs.huggingface.config import Config, Key, Rule, key

_MOST_TOKENS = 10**9  # of our schema


def head_dim(hidden: tuple[str, ...] = ("hidden_size",), heads: tuple[str, ...] = ("num_attention_heads",)) -> Rule:
    """The width of a head where no key states it: the model's over its heads. Each key under all its names."""

    def rule(config: Config) -> int:
        (size, whole), (count, parts) = key(*hidden).of(config), key(*heads).of(config)
        if size % count:
            raise config.refusal(parts, f"found {count}, which does not divide {whole} = {size}; head_dim is missing")
        return int(size // count)

    return rule


def same(name: str) -> Rule:
    """The value of another key that must be there."""
    return lambda config: config.needed(name)


def times(factor: int, name: str) -> Rule:
    """A multiple of another key that must be there."""
    return lambda config: factor * config.needed(name)


def shared_experts(config: Config) -> int:
    """The FFN width of all shared experts together (DeepSeek: a number of experts of the routed ones' width)."""
    experts = Key(("n_shared_experts",), kind="count_or_zero", nullable=True).of(config)[0]
    return (experts or 0) * config.needed("moe_intermediate_size")


def correction_bias(unsaid: bool) -> Rule:
    """Whether the router holds a bias that balances the experts: `noaux_tc` alone has one (DeepSeek-V3).

    `unsaid` is what holds without topk_method: DeepseekV3 always has the bias in transformers, DeepseekV2 never.
    """

    def rule(config: Config) -> bool:
        method = config.text("topk_method")
        if method not in (None, "noaux_tc", "greedy", "group_limited_greedy"):
            raise config.refusal("topk_method", f"found {method!r}, expected noaux_tc, greedy or group_limited_greedy")
        return unsaid if method is None else method == "noaux_tc"

    return rule


def first_sparse(config: Config) -> int:
    """Qwen3-MoE: the layers of `mlp_only_layers` are dense; only a run from the first one fits our schema."""
    dense = config.listing("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise config.refusal("mlp_only_layers", "lists dense layers that are not the first ones, which is not modelled")
    return len(dense)


def interleaved(config: Config) -> int:
    """Llama 4: experts in every n-th layer; a list of the layers must say the same."""
    step, layers = config.count("interleave_moe_layer_step") or 1, config.needed("num_hidden_layers")
    listed = config.listing("moe_layers")
    if listed is not None and listed != list(range(step - 1, layers, step)):
        raise config.refusal("moe_layers", f"lists other layers than every {step}. (interleave_moe_layer_step)")
    return step


def yarn_context(config: Config) -> int | None:
    """Tokens that YaRN extends the context to: original length times factor (vLLM takes the same)."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if isinstance(rope, dict) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            length, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
            if isinstance(length, int) and isinstance(factor, int | float) and 0 < length * factor <= _MOST_TOKENS:
                return int(length * factor)
    return None


def context(*names: str, default: int | None = None, assumed: str = "") -> Rule:
    """The longest context: the first of the keys that is there, or what YaRN makes of it."""

    def rule(config: Config) -> int:
        stated = next((value for value in [config.count(name) for name in names] if value is not None), default)
        if stated is None:
            raise config.refusal(names[0], "missing; expected a whole number (tokens)")
        if stated > _MOST_TOKENS:
            raise config.refusal(names[0], f"found {stated}, expected at most {_MOST_TOKENS} (tokens)")
        if assumed and not any(config.get(name) for name in names):
            config.assumed.append(f"{names[0]} is missing, taken as {stated}: {assumed}")
        return max(stated, yarn_context(config) or 0)

    return rule


class Falcon(NamedTuple):
    """Falcon's variants; `new_decoder` where the model_type decides what new_decoder_architecture does elsewhere."""

    new_decoder: bool | None = None

    def is_new(self, config: Config) -> bool:
        """Whether attention is grouped and the block has two norms (40B and 180B)."""
        return bool(config.flag("new_decoder_architecture")) if self.new_decoder is None else self.new_decoder

    def kv_heads(self, config: Config) -> int:
        """One for multi-query, else as stated, else as many as heads."""
        heads = key("num_attention_heads", "n_head").of(config)[0]
        stated = key("num_kv_heads", "n_head_kv", default=heads).of(config)[0]
        return 1 if config.flag("multi_query") is not False and not self.is_new(config) else int(stated)

    def norms(self, config: Config) -> int:
        """A parallel block of the old decoder shares one norm."""
        count = config.count("num_ln_in_parallel_attn")
        if config.flag("parallel_attn") is False:
            return 2
        return (count or 2) if self.is_new(config) else 1


def bigcode_kv_heads(config: Config) -> int:
    """GPT-BigCode: multi-query unless it says otherwise."""
    return 1 if config.flag("multi_query") is not False else config.needed("n_head")


def bloom_hidden(config: Config) -> int:
    """BLOOM's width under either of its names."""
    return int(key("hidden_size", "n_embed").of(config)[0])


def embedding_norm(config: Config) -> list[dict[str, Any]]:
    """BLOOM normalises what the embedding gives: a weight and a bias."""
    parameters = 2 * bloom_hidden(config)
    return [{"what": "word_embeddings_layernorm", "parameters": parameters, "source": "modeling_bloom.py"}]
