"""Tiny random models of every causal LM type that Transformers knows.

A type's default config is shrunk field by field (`SMALL`), lists that run over layers are cut, and what then still
does not fit together is mended in one table (`FIXES`). That names layers as well, where a default lacks a kind of
layer that models of the type may have: a row speaks of a model with all of them, or a variant does of the rest.
Windows, chunks and selections get a size (`FAR`) between the longest sequence of the scorer's probe and those of the
sweep, so that a rule that bites only on long sequences bites in the sweep and not in the probe.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 96
LAYERS = 4
FAR = 100  # tokens
_KINDS = frozenset(ALLOWED_LAYER_TYPES)

_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size", "attention_hidden_size",
           "adapter_in_dim", "adapter_out_dim", "adapter_input_size")  # fmt: skip
_INNER = (
    "intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "moe_intermediate_size", "ffn_hidden_size", "dff",
    "expert_ffn_hidden_size", "shared_expert_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp",
    "dense_intermediate_size", "moe_shared_expert_intermediate_size", "dim_ff", "lm_head_hidden_size",
)  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "num_layers", "num_decoder_layers")
_FAR = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "attention_chunk_size",
        "local_attention", "index_topk", "keep_window_size")  # fmt: skip
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(_WIDTHS, 32),
    **dict.fromkeys(_INNER, 48),
    **dict.fromkeys(_DEPTHS, LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim", "mamba_d_state", "state_size"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(_FAR, FAR),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "n_group"), 2),
    "topk_group": 1,
    "hidden_size_per_layer_input": 8,
    **{"logit_scale": 0.75, "logits_scaling": 2.5, "lm_head_multiplier": 1.25},  # by default often 1: no test at all
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 1),
}
TYPES: dict[str, str] = dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))
_MLA = {"num_key_value_heads": 4, "head_dim": 4}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": FAR}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
FIXES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "longcat_flash", "youtu", "glm4_moe_lite", "sarvam_mla", "minicpm3"), _MLA),
    **dict.fromkeys(("axk2", "deepseek_v2", "deepseek_v32", "glm_moe_dsa", "bailing_hybrid"), _MLA),
    **dict.fromkeys(("laguna", "mellum"), _WINDOWS),
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "hunyuan_v1_moe": {"head_dim": 8},
    "kimi_linear": {**_MLA, "linear_num_heads": 4, "linear_head_dim": 8},
    "ministral": {**_WINDOWS, "head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
    },
    "deepseek_v2": {**_MLA, "topk_method": "greedy", "n_group": 1, "num_experts_per_tok": 2},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ]
    },
    "dots1": {
        **_WINDOWS,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
    },
    "dots3_note_text": {
        **_MLA,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
        "swa_head_dim": 12,
    },
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "qwen4_exp_text": {
        "ple_layer_ids": [],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zaya": {
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": FAR,
    },
}
# Words for kinds of layers that stand in a type's code for something else: a mask's or a module's name, an older word.
OTHER_MEANINGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("big_bird", "blt"), ("dense",)),
    **dict.fromkeys(("dots3_note", "dots3_note_text", "qwen4_exp", "qwen4_exp_text"), ("full_attention",)),
    **dict.fromkeys(
        ("inkling_text", "inkling2_text", "inkling2_loop_text"),
        ("full_attention", "linear_attention", "sliding_attention"),
    ),
    **dict.fromkeys(("zamba", "zamba2"), ("full_attention",)),
    "falcon_h1": ("full_attention", "linear_attention"),
    "zaya": ("conv",),
}


# The same types under settings that change how they attend: name -> (type, overrides).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert, decoder": ("bert", {"is_decoder": True}),
    "roberta, decoder": ("roberta", {"is_decoder": True}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True}),
    "gemma3, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "phi3, longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0, 3.0, 4.0, 5.0],
            },
            "original_max_position_embeddings": 128,
        },
    ),
    **{
        f"{name}, windows": (name, {**_WINDOWS, "use_sliding_window": True})
        for name in ("qwen2", "qwen2_moe", "qwen3", "smollm3")
    },
}


class NotBuiltError(Exception):
    """No tiny model of a type could be made; the message says why."""


def small_config(cls: type[PreTrainedConfig], default: PreTrainedConfig | None = None) -> dict[str, Any]:
    """Arguments of a config class that make it tiny, from the fields that its default has."""
    default = default if default is not None else cls()
    with_values = default.to_dict()
    found: dict[str, Any] = {}
    for name, value in SMALL.items():
        name = cls.attribute_map.get(name, name)
        if with_values.get(name) is not None:
            found[name] = value
    for name, value in with_values.items():
        layers = getattr(default, "num_hidden_layers", None)
        by_layer = isinstance(value, list) and len(value) in (layers, len(with_values.get("layer_types") or ()))
        if by_layer and value and name not in found:
            kinds = list(dict.fromkeys(value)) if isinstance(value[0], str) else value
            found[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    for name in cls.sub_configs:
        nested = getattr(default, name, None)
        if isinstance(nested, PreTrainedConfig):
            found[name] = {**small_config(type(nested), nested), **FIXES.get(nested.model_type, {})}
    return found


def tiny_config(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The config of a type's tiny model."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**{**small_config(cls), **FIXES.get(model_type, {}), **overrides})


def kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    """Every kind of layer that the decoder of a config has."""
    decoder = config.get_text_config(decoder=True)
    lists = (getattr(decoder, name, None) or () for name in ("layer_types", "mlp_layer_types", "layers_block_type"))
    return {kind for kinds in lists for kind in kinds}


def kinds_in_code(config: PreTrainedConfig) -> set[str]:
    """Every kind of layer, as Transformers calls them, that the code of the decoder and of its config names."""
    module = type(config.get_text_config(decoder=True)).__module__
    found: set[str] = set()
    for name in (module, module.replace("configuration_", "modeling_")):
        if importlib.util.find_spec(name) is None:  # its models are another type's
            continue
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        found |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in _KINDS}
    return found


def tiny(model_type: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model in eval mode; attention is far from uniform, no norm, bias or sink is neutral."""
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides))
        model(torch.full((1, 3), 5), use_cache=False)
    except Exception as error:  # whatever a config or a constructor trips over
        raise NotBuiltError(f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}") from error
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.ndim < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)
        embeddings = model.get_input_embeddings().weight
        embeddings.copy_(torch.randn(embeddings.shape))
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default, grouped products, knows no float64
    return model.to(dtype).eval()
