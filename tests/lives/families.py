"""Tiny random models of a dozen families, and which tokens each of their layers sees."""

import functools
import sys
from typing import Any, NamedTuple

import torch
import transformers
from model_cache import BASE

import tikv.integrations.transformers  # noqa: F401 - it registers attention "tikv"

WINDOW = 7
WIDTH = 32  # of a head: as many numbers as most formats of groups need

COMMON = {
    **BASE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": WIDTH,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # so large that attention shows in the logits
}
FULL, SLIDING, CHUNKED, STATE = "full", "sliding", "chunked", "state"
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


class Family(NamedTuple):
    """A model: the beginning of its classes' names, what each layer sees, its options, its configuration's name."""

    name: str
    layers: tuple[str, ...]
    options: dict[str, Any]
    config: str = ""


FAMILIES = {
    "llama": Family("Llama", (FULL, FULL), {}),
    "mistral": Family("Mistral", (SLIDING, SLIDING), {"sliding_window": WINDOW}),
    "gemma2": Family("Gemma2", (SLIDING, FULL), {**HYBRID, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": Family("Gemma3", (SLIDING, FULL), {**HYBRID, "query_pre_attn_scalar": 16}, "Gemma3TextConfig"),
    # Each token goes to all experts: a choice among them would turn a last bit into another result.
    "gpt_oss": Family("GptOss", (SLIDING, FULL), {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "cohere2": Family("Cohere2", (SLIDING, FULL), HYBRID),
    "olmo3": Family("Olmo3", (SLIDING, FULL), HYBRID),
    "qwen3": Family("Qwen3", (FULL, FULL), {}),
    "phi3": Family("Phi3", (FULL, FULL), {"hidden_size": 64}),
    "llama4": Family(
        "Llama4",
        (CHUNKED, FULL),
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [],
            "intermediate_size_mlp": 48,
        },
        "Llama4TextConfig",
    ),
    "deepseek": Family(
        "DeepseekV3",
        (FULL, FULL),
        {
            "num_key_value_heads": 2,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "kv_lora_rank": WIDTH,
            "qk_rope_head_dim": WIDTH,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "lfm2": Family("Lfm2", (STATE, FULL), {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "qwen3_next": Family(
        "Qwen3Next",
        (STATE, FULL),
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 0,
            "mlp_only_layers": [0, 1],
        },
    ),
}


class Models(NamedTuple):
    """Models with the same weights: the one that is given a cache, and the one that never is."""

    cached: Any
    plain: Any


def offered() -> list[str]:
    """The families that the installed transformers has and gives its common cache, and no class of their own."""
    return [name for name, family in FAMILIES.items() if _takes_a_cache(family.name)]


def _takes_a_cache(name: str) -> bool:
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    module = vars(sys.modules[kind.__module__]) if kind is not None else {}
    return kind is not None and not any(key.startswith(name) and key.endswith("Cache") for key in module)


@functools.cache
def models(name: str) -> Models:
    """The models of a family; made once."""
    family = FAMILIES[name]
    kind = getattr(transformers, f"{family.name}ForCausalLM")
    made = []
    for attention in ("tikv", "eager"):
        config = getattr(transformers, family.config or f"{family.name}Config")(**{**COMMON, **family.options})
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1 and parameter.numel() > 1 and bool((parameter == 0).all()):
                    parameter.normal_(std=0.3)
        model.set_attn_implementation(attention)
        made.append(model)
    return Models(*made)


def decoder_layers(model: Any) -> list[Any]:
    """The modules of a model's layers."""
    return list(model.model.layers)
