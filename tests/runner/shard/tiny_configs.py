"""A config.json for each type of model that can be split, small enough to compute whole and split in a test.

CONFIG is what most types agree on; OF_TYPE what one adds or changes. Windows are shorter than the tests' prompts,
and every kind of layer a type can have is there.
"""

from __future__ import annotations

from typing import Any, Final

LAYERS: Final = 5
VOCABULARY: Final = 259
END: Final = 256

_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS: Final = [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL]
_ROPE: Final = {"rope_theta": 10000.0, "rope_type": "default"}
_EXPERTS: Final = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_SHARED_EXPERT: Final = {**_EXPERTS, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPS: Final = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "topk_method": "noaux_tc"}
_SIGMOID: Final = {**_SHARED_EXPERT, **_GROUPS, "scoring_func": "sigmoid", "moe_layer_freq": 1}
_LATENT: Final = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEX: Final = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
_YARN: Final = {
    "type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
_GPT2: Final = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512, "n_ctx": 512}

_MAMBA2: Final = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "attention_bias": False,
}
_CONVOLVED: Final = {
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", _FULL, "conv", "conv", _FULL],
}

CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": END,
}

OF_TYPE: Final[dict[str, dict[str, Any]]] = {
    "Klear": {**_SHARED_EXPERT, "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    "afmoe": {**_EXPERTS, "layer_types": _KINDS, "sliding_window": 4, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True, "mlp_bias": False, "attention_bias": False},
    "bailing_moe": _SHARED_EXPERT,
    "bailing_moe_v3": {
        **_SIGMOID,
        **_LATENT,
        "moe_shared_expert_intermediate_size": 32,
        "layer_group_size": 2,
        "short_conv_kernel_size": 4,
    },
    "cohere": {"layer_norm_eps": 1e-5, "logit_scale": 0.25},
    "cohere2": {"layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window": 4, "sliding_window_pattern": 3},
    "deepseek": {**_SHARED_EXPERT, "moe_layer_freq": 1},
    "deepseek_v2": {
        **_SHARED_EXPERT,
        **_GROUPS,
        **_LATENT,
        "rope_scaling": _YARN,
        "topk_method": "greedy",
        "moe_layer_freq": 1,
    },
    "deepseek_v3": {**_SIGMOID, **_LATENT},
    "deepseek_v32": {**_SIGMOID, **_LATENT, **_INDEX},
    "dots1": {**_SIGMOID, "attention_bias": False},
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_capacity": [0],
        "moe_num_shared_experts": 1,
    },
    "exaone": {"num_layers": LAYERS, "layer_norm_epsilon": 1e-5},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": "LLG", "rope_scaling": {"type": "default"}},
    "exaone_moe": {
        **_SHARED_EXPERT,
        "layer_types": _KINDS,
        "sliding_window": 4,
        "is_moe_layer": [False, True, True, True, True],
    },
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "gemma2": {
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 128,
    },
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window": 4, "sliding_window_pattern": 3},
    "glm": {"attention_bias": False},
    "glm4": {"attention_bias": False, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        **_SIGMOID,
        "use_qk_norm": True,
        "attention_bias": False,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
    },
    "glm4_moe_lite": {**_SIGMOID, **_LATENT},
    "glm_moe_dsa": {**_SIGMOID, **_LATENT, **_INDEX, "rope_parameters": _ROPE, "attention_bias": False},
    "granitemoehybrid": {
        **_MAMBA2,
        **_EXPERTS,
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 96,
    },
    "jamba": {
        **_EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 3,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_linear": {
        **_SHARED_EXPERT,
        **_LATENT,
        "linear_attn_config": {"kda_layers": [1, 3, 4], "full_attn_layers": [2, 5], "num_heads": 4, "head_dim": 16},
        "model_max_length": 512,
        "num_experts_per_token": 2,
    },
    "lfm2": {
        **_CONVOLVED,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 96,
    },
    "lfm2_moe": {**_CONVOLVED, **_EXPERTS, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba": {
        "intermediate_size": 128,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "mamba2": {
        "num_heads": 4,
        "state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": 4,
    },
    "qwen3_next": {
        **_EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "recurrent_gemma": {
        "attention_bias": False,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": 4,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "gpt_bigcode": {**_GPT2, "n_inner": 96, "layer_norm_epsilon": 1e-5},
    "gpt2": {**_GPT2, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {**_EXPERTS, "layer_types": _KINDS, "sliding_window": 4},
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "granitemoe": {
        **_EXPERTS,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
    },
    "helium": {"attention_bias": False, "mlp_bias": False},
    "hunyuan_v1_dense": {"attention_bias": False, "use_qk_norm": True, "rope_scaling": None},
    "internlm2": {"bias": False},
    "internlm3": {"bias": False, "qkv_bias": False},
    "laguna": {
        **_EXPERTS,
        "layer_types": [_FULL, *_KINDS[1:]],
        "sliding_window": 4,
        "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5,
    },
    "lille-130m": {**_GPT2, "block_size": 512, "n_kv_heads": 2, "layer_norm_eps": 1e-5},
    "mistral": {"layer_types": [_FULL, _SLIDING, _SLIDING, _FULL, _SLIDING], "sliding_window": 4},
    "longcat_flash": {
        **_LATENT,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "num_layers": LAYERS,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "routed_scaling_factor": 1.5,
        "attention_bias": False,
    },
    "mellum": {
        **_EXPERTS,
        "layer_types": _KINDS,
        "sliding_window": 4,
        "rope_parameters": {_FULL: _ROPE, _SLIDING: _ROPE},
    },
    "mimo": {"num_nextn_predict_layers": 0},
    "mimo_v2_flash": {
        **_SIGMOID,
        "hybrid_layer_pattern": [0, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": 4,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "v_head_dim": 16,
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"tie_word_embeddings": False, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 12.0},
    "minicpm3": {
        **_LATENT,
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 12.0,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 512,
        },
    },
    "minimax": {**_EXPERTS, "shared_intermediate_size": 32, "rotary_dim": 8},
    "ministral3": {
        "layer_types": _KINDS,
        "sliding_window": 4,
        "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 4},
    },
    "mistral4": {
        **_SIGMOID,
        **_LATENT,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral": _EXPERTS,
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "olmo3": {"layer_types": _KINDS, "sliding_window": 4},
    "olmoe": _EXPERTS,
    "phi": {"tie_word_embeddings": False, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "phi3": {"partial_rotary_factor": 1.0},
    "phimoe": {
        "tie_word_embeddings": False,
        **_EXPERTS,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
            "original_max_position_embeddings": 512,
        },
    },
    "qwen": {"kv_channels": 16, "num_key_value_heads": 4, "layer_norm_epsilon": 1e-5},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1]},
    "solar_open": {**_SIGMOID, "partial_rotary_factor": 0.5},
    "spark2_5": {
        "layer_types": _KINDS,
        "sliding_window": 4,
        "rope_parameters": {_FULL: _ROPE, _SLIDING: _ROPE},
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "starcoder2": {"norm_epsilon": 1e-5},
    "step3p5": {
        **_EXPERTS,
        "num_attention_groups": 2,
        "layer_types": _KINDS,
        "sliding_window": 4,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2,3,4",
        "rope_theta": [10000.0] * LAYERS,
        "partial_rotary_factors": [0.5] * LAYERS,
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 16},
    },
    "youtu_llm": _LATENT,
}

ALIKE: Final = {
    "falcon_mamba": "mamba",
    "iquestcoder": "mistral",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "xverse": "mistral",
}
"""Types that the runtime computes as it does another."""


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json of `model_type`."""
    alike = ALIKE.get(model_type, model_type)
    return {**CONFIG, "model_type": model_type, **OF_TYPE.get(alike, {}), **changes}
