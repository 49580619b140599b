"""Tiny random models of a dozen families, and which tokens each of their layers sees."""

import copy
import functools
import sys
from typing import Any, NamedTuple

import torch
import transformers
from model_cache import BASE
from model_cache import FAMILIES as OF_STEPS

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
OF_BOTH = {key: COMMON[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
FULL, SLIDING, CHUNKED, STATE = "full", "sliding", "chunked", "state"
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CAPPED = {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}


class Family(NamedTuple):
    """A model.

    Attributes:
        name: the beginning of its classes' names.
        layers: what each layer sees, or each of the decoder's.
        options: of its configuration.
        config: the configuration's name, if it does not begin with `name` alone.
        shared: how many of the last layers read the keys of an earlier layer of their kind.
        encoder: whether the layers also read what an encoder gave.
        beside: whether each layer keeps a state beside its keys.
    """

    name: str
    layers: tuple[str, ...]
    options: dict[str, Any]
    config: str = ""
    shared: int = 0
    encoder: bool = False
    beside: bool = False

    @property
    def states(self) -> bool:
        """Whether layers keep a state."""
        return self.beside or STATE in self.layers

    @property
    def with_memory(self) -> int:
        """How many layers, the first ones, have keys or a state of their own."""
        return len(self.layers) - self.shared

    def source(self, layer: int) -> int:
        """The layer whose keys a layer reads."""
        if layer < self.with_memory:
            return layer
        return max(i for i in range(self.with_memory) if self.layers[i] == self.layers[layer])


FAMILIES = {
    "llama": Family("Llama", (FULL, FULL), {}),
    "mistral": Family("Mistral", (SLIDING, SLIDING), {"sliding_window": WINDOW}),
    "gemma2": Family("Gemma2", (SLIDING, FULL), {**HYBRID, **CAPPED}),
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
    "gemma3n": Family(
        "Gemma3n",
        (SLIDING, FULL, SLIDING, FULL),
        {name: value for name, value in OF_STEPS["Gemma3n"].items() if name != "config"},
        "Gemma3nTextConfig",
        shared=2,
    ),
    "t5": Family(
        "T5",
        (FULL, FULL),
        {**OF_BOTH, "d_model": 64, "d_kv": WIDTH, "d_ff": 48, "num_layers": 2, "num_heads": 2},
        encoder=True,
    ),
    "bart": Family(
        "Bart",
        (FULL, FULL),
        {
            **OF_BOTH,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "init_std": 0.3,
        },
        encoder=True,
    ),
    "t5gemma": Family(
        "T5Gemma",
        (SLIDING, FULL),
        {**OF_BOTH, **{part: {**COMMON, **HYBRID, **CAPPED} for part in ("encoder", "decoder")}},
        encoder=True,
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
    "falcon_h1": Family(
        "FalconH1",
        (FULL, FULL),
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
        beside=True,
    ),
}


class Models(NamedTuple):
    """Models with the same weights: the one that is given a cache, and the one that never is."""

    cached: Any
    plain: Any


def offered() -> list[str]:
    """The families that the installed transformers has and gives its common cache, and no class of their own."""
    return [name for name, family in FAMILIES.items() if _takes_a_cache(family)]


def _class_of(family: Family) -> Any:
    what = "ConditionalGeneration" if family.encoder else "CausalLM"
    return getattr(transformers, f"{family.name}For{what}", None)


def _takes_a_cache(family: Family) -> bool:
    kind = _class_of(family)
    module = vars(sys.modules[kind.__module__]) if kind is not None else {}
    return kind is not None and not any(key.startswith(family.name) and key.endswith("Cache") for key in module)


@functools.cache
def models(name: str, dtype: str = "float32") -> Models:
    """The models of a family; made once. The plain one has the same weights as float32.

    In float64, eager attention of transformers makes NaN of queries that see no key.
    """
    family = FAMILIES[name]
    options = family.options if family.encoder else {**COMMON, **family.options}
    made: list[Any] = []
    for attention, numbers in (("tikv", dtype), ("eager", "float32")):
        config = getattr(transformers, family.config or f"{family.name}Config")(**copy.deepcopy(options))
        torch.manual_seed(0)
        model = _class_of(family)._from_config(config, dtype=getattr(torch, numbers)).eval()
        if made:
            model.load_state_dict(made[0].state_dict())
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1 and parameter.numel() > 1 and bool((parameter == 0).all()):
                        parameter.normal_(std=0.3)
        model.set_attn_implementation(attention)
        made.append(model)
    return Models(*made)


def decoder_layers(model: Any) -> list[Any]:
    """The modules of a model's layers, or of its decoder's."""
    if not model.config.is_encoder_decoder:
        return list(model.model.layers)
    decoder = model.get_decoder()
    return list(decoder.block if hasattr(decoder, "block") else decoder.layers)


def cross_attention(layer: Any) -> Any:
    """The module of a decoder's layer that reads what the encoder gave."""
    if hasattr(layer, "encoder_attn"):
        return layer.encoder_attn
    return layer.cross_attn if hasattr(layer, "cross_attn") else layer.layer[1].EncDecAttention


def self_attention(layer: Any) -> Any:
    """The module of a layer that reads the layer's own keys."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.layer[0].SelfAttention
