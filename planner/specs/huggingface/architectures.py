"""The architectures that a config.json may name: for each, which key gives which field of our schema.

One table per `model_type`. Defaults are those of the architecture's configuration class in the transformers library
(`models/<type>/configuration_<type>.py`, 4.31 to 4.57), and only where real files rely on them: a size that every
file of the architecture states is required. What a class fixes in code (a bias on the queries, a norm of the keys) is
a constant here, read from `modeling_<type>.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.specs.huggingface import rules
from planner.specs.huggingface.config import Key, Rule, flag, key, text, words, zero
from planner.specs.huggingface.pattern import Pattern

Fields = dict[str, Any]
"""By key path of our schema: a Key, a Rule, or the value itself."""


class Architecture(NamedTuple):
    """How to read the config.json of one model_type."""

    classes: tuple[str, ...]
    """What `architectures` may say: the classes with a language model's head."""
    fields: Fields
    pattern: Pattern = Pattern()
    expected: dict[str, tuple[Any, ...]] = {}
    """Keys of which only these values are understood."""
    harmless: frozenset[str] = frozenset()
    """Keys that change no shape, beside those of every architecture."""
    nested: tuple[str, ...] = ()
    """Mappings whose keys belong to this table, as `attn_config.kv_n_heads`."""
    text: tuple[str, ...] = ()
    """The model_types of the `text_config` that holds the language model's keys."""
    dtype: tuple[str, str] | None = None
    """(dtype, reason) where torch_dtype is missing: what the checkpoint is known to hold."""
    notes: tuple[str, ...] = ()


def prediction(default: int, own_ends: bool, assumed: str = "") -> Fields:
    """Multi-token prediction: layers behind the last one, as many as the key says."""
    modules = zero("num_nextn_predict_layers", default=default, assumed=assumed)
    return {"prediction.modules": modules, "prediction.own_ends": own_ends}


def _rms(per_layer: int = 2) -> Fields:
    return {"norm.kind": "rmsnorm", "norm.per_layer": per_layer}


def _layernorm(per_layer: int | Rule = 2, bias: bool = True) -> Fields:
    return {"norm.kind": "layernorm", "norm.per_layer": per_layer, "norm.bias": bias}


# --- dense, with rotary embeddings, RMSNorm and a gated FFN -----------------------------------------------------------

_BASE: Fields = {
    "layers": key("num_hidden_layers"),
    "hidden": key("hidden_size"),
    "attention.heads": key("num_attention_heads"),
    "attention.kv_heads": key("num_key_value_heads"),
    "attention.head_dim": key("head_dim", default=rules.head_dim()),
    "ffn.hidden": key("intermediate_size"),
    "ffn.gated": True,
    "ffn.activation": text("hidden_act", default="silu"),
    "vocab": key("vocab_size"),
    "tied_embeddings": flag("tie_word_embeddings", default=False),
    "max_context": rules.context("max_position_embeddings"),
    **_rms(),
}
_BIASED = {name: flag("attention_bias", default=False) for name in ("attention.qkv_bias", "attention.out_bias")}
_LLAMA = _BASE | _BIASED | {
    "attention.kv_heads": key("num_key_value_heads", default=rules.same("num_attention_heads")),
    "ffn.bias": flag("mlp_bias", default=False),
}  # fmt: skip
_QWEN3 = _BASE | _BIASED | {"attention.qk_norm": "head_dim"}
_GEMMA = _BASE | _BIASED | _rms(per_layer=4) | {
    "ffn.activation": text("hidden_activation", default="gelu_pytorch_tanh"),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
}  # fmt: skip
_GEMMA3 = _GEMMA | {  # google's own files leave out what equals Gemma3TextConfig
    "attention.heads": key("num_attention_heads", default=8),
    "attention.kv_heads": key("num_key_value_heads", default=4),
    "attention.head_dim": key("head_dim", default=256),
    "attention.qk_norm": "head_dim",
    "vocab": key("vocab_size", default=262_208),
    "max_context": rules.context("max_position_embeddings", default=131_072),
}

# --- mixtures of experts ----------------------------------------------------------------------------------------------

_MIXTRAL = _BASE | {
    "experts.routed": key("num_local_experts"),
    "experts.top_k": key("num_experts_per_tok"),
    "experts.hidden": key("intermediate_size"),
}
_QWEN3_MOE = _QWEN3 | {
    "experts.routed": key("num_experts"),
    "experts.top_k": key("num_experts_per_tok"),
    "experts.hidden": key("moe_intermediate_size"),
    "experts.first_dense": rules.first_sparse,
    "experts.every": key("decoder_sparse_step", default=1),
}
_QWEN3_NEXT = _QWEN3_MOE | {
    "attention.output_gate": True,
    "linear.kind": "gated_deltanet",
    "linear.key_heads": key("linear_num_key_heads"),
    "linear.value_heads": key("linear_num_value_heads"),
    "linear.key_dim": key("linear_key_head_dim"),
    "linear.value_dim": key("linear_value_head_dim"),
    "linear.conv_kernel": key("linear_conv_kernel_dim"),
    "experts.shared_hidden": zero("shared_expert_intermediate_size"),
    "experts.shared_gate": True,
    **prediction(1, own_ends=False, assumed="the released checkpoints hold one module (mtp.*)"),
}
_DEEPSEEK_V2 = _BASE | {
    "attention.kv_heads": key("num_key_value_heads", default=rules.same("num_attention_heads")),
    "attention.head_dim": lambda config: config.needed("qk_nope_head_dim") + config.needed("qk_rope_head_dim"),
    "attention.latent.kv_rank": key("kv_lora_rank"),
    "attention.latent.rope_dim": key("qk_rope_head_dim"),
    "attention.latent.nope_dim": key("qk_nope_head_dim"),
    "attention.latent.value_dim": key("v_head_dim"),
    "attention.latent.query_rank": Key(("q_lora_rank",), nullable=True),
    "experts.routed": key("n_routed_experts"),
    "experts.top_k": key("num_experts_per_tok"),
    "experts.hidden": key("moe_intermediate_size"),
    "experts.shared_hidden": rules.shared_experts,
    "experts.first_dense": zero("first_k_dense_replace"),
    "experts.groups": key("n_group", default=1),
    "experts.top_groups": key("topk_group", default=1),
    "experts.router_bias": rules.correction_bias(unsaid=False),
}
_DEEPSEEK_V3 = _DEEPSEEK_V2 | {
    "experts.router_bias": rules.correction_bias(unsaid=True),
    **prediction(0, own_ends=True),
}
_AS_RELEASED = "as GLM-4.5 has it"
_GLM4_MOE = _BASE | {
    "attention.qkv_bias": flag("attention_bias", default=True, assumed=_AS_RELEASED),
    "attention.qk_norm": flag("use_qk_norm", default=True, assumed=_AS_RELEASED, then="head_dim"),
    "experts.routed": key("n_routed_experts"),
    "experts.top_k": key("num_experts_per_tok"),
    "experts.hidden": key("moe_intermediate_size"),
    "experts.shared_hidden": rules.shared_experts,
    "experts.first_dense": zero("first_k_dense_replace"),
    "experts.router_bias": True,
    **prediction(1, own_ends=True, assumed=_AS_RELEASED),
}
_GPT_OSS = _BASE | {
    "attention.qkv_bias": flag("attention_bias", default=True),
    "attention.out_bias": flag("attention_bias", default=True),
    "attention.sinks": True,
    "ffn.activation": "swiglu_clamped",
    "experts.routed": key("num_local_experts", "num_experts"),
    "experts.top_k": key("num_experts_per_tok", "experts_per_token"),
    "experts.hidden": key("intermediate_size"),
    "experts.router_bias": True,
    "experts.bias": True,
}
_MINIMAX_M2 = _MIXTRAL | {
    "attention.qk_norm": flag("use_qk_norm", then="heads"),
    "experts.router_bias": flag("use_routing_bias"),
}
_LLAMA4 = _BASE | _BIASED | {
    "ffn.hidden": key("intermediate_size_mlp"),
    "experts.routed": key("num_local_experts"),
    "experts.top_k": key("num_experts_per_tok"),
    "experts.hidden": key("intermediate_size"),
    "experts.shared_hidden": key("intermediate_size"),
    "experts.every": rules.interleaved,
}  # fmt: skip
_DBRX: Fields = {
    "layers": key("n_layers"),
    "hidden": key("d_model"),
    "attention.heads": key("n_heads"),
    "attention.kv_heads": key("attn_config.kv_n_heads"),
    "attention.head_dim": rules.head_dim(("d_model",), ("n_heads",)),
    "ffn.hidden": key("ffn_config.ffn_hidden_size"),
    "ffn.gated": True,
    "ffn.activation": "silu",
    "experts.routed": key("ffn_config.moe_num_experts"),
    "experts.top_k": key("ffn_config.moe_top_k"),
    "experts.hidden": key("ffn_config.ffn_hidden_size"),
    "vocab": key("vocab_size"),
    "tied_embeddings": flag("tie_word_embeddings", default=False),
    "max_context": rules.context("max_seq_len"),
    **_layernorm(bias=False),
}

# --- LayerNorm, parallel blocks, learned positions --------------------------------------------------------------------

_COHERE = _BASE | _BIASED | _layernorm(per_layer=1, bias=False) | {
    "attention.kv_heads": key("num_key_value_heads", default=rules.same("num_attention_heads")),
    "attention.qk_norm": flag("use_qk_norm", default=False, then="heads"),
    "parallel_block": True,
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "max_context": rules.context("model_max_length", "max_position_embeddings"),  # vLLM prefers the former as well
}  # fmt: skip


def _falcon(variant: rules.Falcon) -> Fields:
    bias = flag("bias", default=False)
    return {
        "layers": key("num_hidden_layers", "n_layer"),
        "hidden": key("hidden_size"),
        "attention.heads": key("num_attention_heads", "n_head"),
        "attention.kv_heads": variant.kv_heads,
        "attention.head_dim": rules.head_dim(heads=("num_attention_heads", "n_head")),
        "attention.qkv_bias": bias,
        "attention.out_bias": bias,
        "ffn.hidden": key("ffn_hidden_size", default=rules.times(4, "hidden_size")),
        "ffn.gated": False,
        "ffn.activation": text("activation", default="gelu"),
        "ffn.bias": bias,
        "vocab": key("vocab_size"),
        "tied_embeddings": flag("tie_word_embeddings", default=True),
        "parallel_block": flag("parallel_attn", default=True),
        "max_context": rules.context("max_position_embeddings", default=2048, assumed="FalconConfig's default"),
        **_layernorm(per_layer=variant.norms),
    }


_BIASES: Fields = {"attention.qkv_bias": True, "attention.out_bias": True, "ffn.bias": True}
_BLOOM: Fields = _BIASES | _layernorm() | {
    "layers": key("num_hidden_layers", "n_layer"),
    "hidden": key("hidden_size", "n_embed"),
    "attention.heads": key("num_attention_heads", "n_head"),
    "attention.kv_heads": key("num_attention_heads", "n_head"),
    "attention.head_dim": rules.head_dim(("hidden_size", "n_embed"), ("num_attention_heads", "n_head")),
    "ffn.hidden": lambda config: 4 * rules.bloom_hidden(config),
    "ffn.gated": False,
    "ffn.activation": "gelu",
    "vocab": key("vocab_size"),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "max_context": rules.context("seq_length", default=2048, assumed="the length that BLOOM was trained on"),
    "extra": rules.embedding_norm,
}  # fmt: skip
_GPT2: Fields = _BIASES | _layernorm() | {
    "layers": key("n_layer"),
    "hidden": key("n_embd"),
    "attention.heads": key("n_head"),
    "attention.kv_heads": key("n_head"),
    "attention.head_dim": rules.head_dim(("n_embd",), ("n_head",)),
    "ffn.hidden": key("n_inner", default=rules.times(4, "n_embd")),
    "ffn.gated": False,
    "ffn.activation": text("activation_function", default="gelu_new"),
    "vocab": key("vocab_size"),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "learned_positions": key("n_positions"),
    "max_context": key("n_positions"),
}  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------------

_MISTRAL_WINDOWS = Pattern(size="sliding_window", unit=("window",))
_ALL_WINDOWS = _MISTRAL_WINDOWS._replace(optional=True)
_QWEN_WINDOWS = Pattern(size="sliding_window", enabled="use_sliding_window", after="max_window_layers")
_ALTERNATE = Pattern(size="sliding_window", unit=("window", "full"))
_ROUTING = words(
    "aux_loss_alpha ep_size n_group norm_topk_prob router_aux_loss_coef router_jitter_noise routed_scaling_factor "
    "scoring_func seq_aux topk_group output_router_logits rope_interleave qk_head_dim"
)
_SAMPLING = words("attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar")
_QWEN = frozenset({"max_window_layers", "use_mrope"})
_GPT = words("attn_pdrop embd_pdrop resid_pdrop n_ctx scale_attn_weights reorder_and_upcast_attn") | words(
    "scale_attn_by_inverse_layer_idx attention_softmax_in_fp32 scale_attention_softmax_in_fp32"
)
_REFINED_WEB = ("RWForCausalLM", "FalconForCausalLM")
_FALCON_KEYS = frozenset({"alibi", "apply_residual_connection_post_layernorm"})
_DEEPSEEK = {"attention_bias": (False,), "moe_layer_freq": (1,)}
_WRAPPER = words("boi_token_index eoi_token_index image_token_index mm_tokens_per_image")
_GEMMA3_PATTERN = Pattern(size="sliding_window", interval=(("sliding_window_pattern", "_sliding_window_pattern"), 6))
_LLAMA4_PATTERN = Pattern(
    size="attention_chunk_size",
    interval=(("no_rope_layer_interval",), 4),
    lists=("layer_types", "no_rope_layers"),
    blocks=True,
)
_LLAMA4_KEYS = _ROUTING | words(
    "use_qk_norm attn_temperature_tuning attn_scale floor_scale for_llm_compressor "
    "boi_token_index eoi_token_index image_token_index"
)  # use_qk_norm: an L2 norm without weights
_GEMMA3_KEYS = _SAMPLING | _WRAPPER | {"rope_local_base_freq", "hidden_act"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(("LlamaForCausalLM",), _LLAMA),
    "mistral": Architecture(("MistralForCausalLM",), _BASE, _MISTRAL_WINDOWS),
    "mixtral": Architecture(("MixtralForCausalLM",), _MIXTRAL, _ALL_WINDOWS, harmless=_ROUTING),
    "qwen2": Architecture(
        ("Qwen2ForCausalLM",), _BASE | {"attention.qkv_bias": True}, _QWEN_WINDOWS, {"qkv_bias": (True,)}, _QWEN
    ),
    "qwen3": Architecture(("Qwen3ForCausalLM",), _QWEN3, _QWEN_WINDOWS, harmless=_QWEN),
    "qwen3_moe": Architecture(
        ("Qwen3MoeForCausalLM",),
        _QWEN3_MOE,
        expected={
            "use_sliding_window": (False,),  # releases of transformers differ in which layers it means
            "qkv_bias": (False,),
            "use_qk_norm": (True,),
            "shared_expert_intermediate_size": (0,),
        },
        harmless=_ROUTING | _QWEN | {"sliding_window"},
    ),
    "qwen3_next": Architecture(
        ("Qwen3NextForCausalLM",),
        _QWEN3_NEXT,
        Pattern(other="linear", interval=(("full_attention_interval",), 4)),
        {"use_sliding_window": (False,)},
        _ROUTING | _QWEN | {"sliding_window"},
    ),
    "deepseek_v2": Architecture(
        ("DeepseekV2ForCausalLM",), _DEEPSEEK_V2, expected=_DEEPSEEK, harmless=_ROUTING | {"head_dim"}
    ),
    "deepseek_v3": Architecture(
        ("DeepseekV3ForCausalLM",), _DEEPSEEK_V3, expected=_DEEPSEEK, harmless=_ROUTING | {"head_dim"}
    ),
    "kimi_k2": Architecture(
        ("DeepseekV3ForCausalLM",), _DEEPSEEK_V3, expected=_DEEPSEEK, harmless=_ROUTING | {"head_dim"}
    ),
    "glm4_moe_lite": Architecture(  # DeepseekV3Attention with Glm4MoeMoE
        ("Glm4MoeLiteForCausalLM",),
        _DEEPSEEK_V3
        | {"experts.router_bias": True}
        | prediction(1, own_ends=True, assumed="GLM-4.7-Flash's checkpoint holds one module (layer 47)"),
        expected=_DEEPSEEK | {"topk_method": ("noaux_tc",)},
        harmless=_ROUTING | {"head_dim"},
    ),
    "glm4_moe": Architecture(("Glm4MoeForCausalLM",), _GLM4_MOE, harmless=_ROUTING),
    "gpt_oss": Architecture(
        ("GptOssForCausalLM",),
        _GPT_OSS,
        _ALTERNATE,
        harmless=_ROUTING | words("initial_context_length swiglu_limit hidden_act"),
    ),
    "gemma2": Architecture(("Gemma2ForCausalLM",), _GEMMA, _ALTERNATE, harmless=_SAMPLING | {"hidden_act"}),
    "gemma3": Architecture(
        ("Gemma3ForConditionalGeneration",), _GEMMA3, _GEMMA3_PATTERN, harmless=_GEMMA3_KEYS, text=("gemma3_text",)
    ),
    "gemma3_text": Architecture(("Gemma3ForCausalLM",), _GEMMA3, _GEMMA3_PATTERN, harmless=_GEMMA3_KEYS),
    "llama4": Architecture(
        ("Llama4ForConditionalGeneration",), _LLAMA4, _LLAMA4_PATTERN, harmless=_LLAMA4_KEYS, text=("llama4_text",)
    ),
    "llama4_text": Architecture(("Llama4ForCausalLM",), _LLAMA4, _LLAMA4_PATTERN, harmless=_LLAMA4_KEYS),
    "phi3": Architecture(
        ("Phi3ForCausalLM",),
        _LLAMA,
        _ALL_WINDOWS,
        {"attention_bias": (False,), "mlp_bias": (False,)},
        frozenset({"embd_pdrop", "resid_pdrop"}),
    ),
    "minimax_m2": Architecture(
        ("MiniMaxM2ForCausalLM",),
        _MINIMAX_M2,
        Pattern(lists=("layer_types", "attn_type_list")),
        {"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,), "sliding_window": ()},
        _ROUTING
        | words("rotary_dim use_mtp mtp_transformer_layers num_mtp_modules mlp_intermediate_size shared_moe_mode")
        | words("layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta"),
        notes=("Prediction modules (num_mtp_modules) are not in the released checkpoints and not counted.",),
    ),
    "dbrx": Architecture(
        ("DbrxForCausalLM",),
        _DBRX,
        harmless=_ROUTING
        | words("emb_pdrop resid_pdrop ffn_config.ffn_act_fn ffn_config.model_type ffn_config.moe_jitter_eps")
        | words("attn_config.clip_qkv attn_config.model_type attn_config.rope_theta attn_config.attn_pdrop")
        | words("ffn_config.moe_loss_weight ffn_config.moe_normalize_expert_weights")
        | words("ffn_config.uniform_expert_assignment"),
        nested=("attn_config", "ffn_config"),
    ),
    "cohere": Architecture(("CohereForCausalLM",), _COHERE, harmless=frozenset({"logit_scale"})),
    "falcon": Architecture(("FalconForCausalLM",), _falcon(rules.Falcon()), harmless=_FALCON_KEYS),
    "RefinedWeb": Architecture(_REFINED_WEB, _falcon(rules.Falcon(True)), harmless=_FALCON_KEYS),
    "RefinedWebModel": Architecture(_REFINED_WEB, _falcon(rules.Falcon(False)), harmless=_FALCON_KEYS),
    "bloom": Architecture(
        ("BloomForCausalLM",),
        _BLOOM,
        harmless=_FALCON_KEYS | _GPT | words("masked_softmax_fusion slow_but_exact offset_alibi"),
        dtype=("bf16", "the checkpoint of bigscience/bloom holds 2 bytes a parameter"),
    ),
    "gpt2": Architecture(
        ("GPT2LMHeadModel",), _GPT2, harmless=_GPT, dtype=("fp32", "transformers' dtype where none is stated")
    ),
    "gpt_bigcode": Architecture(
        ("GPTBigCodeForCausalLM",),
        _GPT2 | {"attention.kv_heads": rules.bigcode_kv_heads},
        harmless=_GPT
        | words("runner_max_sequence_length inference_runner validate_runner_input pre_allocate_kv_cache")
        | words("max_sequence_length max_batch_size"),
    ),
}
