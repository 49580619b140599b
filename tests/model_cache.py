"""Tiny transformers models in tests: their common options, prompts, and the argument by which they take a cache."""

import inspect

import torch
import transformers

import tikv

_parameters = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
NAME = "cache" if "cache" in _parameters else "past_key_values"  # `cache` since 5.24

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


WINDOW = 7
TWO = {"num_hidden_layers": 2}
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma3": {**HYBRID, "query_pre_attn_scalar": 8, "config": "Gemma3TextConfig"},
    "Gemma2": {**HYBRID, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "GptOss": {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma3n": {
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "config": "Gemma3nTextConfig",
    },
    "Qwen2": {},
    "Qwen3": {},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "Cohere": {},
    "Starcoder2": {"sliding_window": None},
    "Glm": {"partial_rotary_factor": 0.5},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Cohere2": HYBRID,
    "SmolLM3": {"no_rope_layers": [1, 0]},
}
OFTEN = ("Llama", "Mistral", "Gemma2", "GptOss", "Gemma3n")
FORMATS = [
    {"dtype": "int8"},
    {"dtype": "float16"},
    {"dtype": "float8_e4m3fn", "k_scale": [0.5, 2.0], "v_scale": 2.0},
    {"dtype": "q8_0"},
    {"dtype": tikv.Quant(bits=4, group=32)},
    {"dtype": "int8", "v_dtype": "float16"},
    {"dtype": "float16", "v_dtype": tikv.Quant(bits=4, group=32)},
]


def given(cache):
    """`model(ids, **given(cache))`."""
    return {NAME: cache}


def prompts(*lengths):
    """Left-padded prompts and their mask."""
    torch.manual_seed(1)
    longest = max(lengths)
    ids = torch.randint(2, 97, (len(lengths), longest))
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, cache, inputs, new_tokens=30, **options):
    torch.manual_seed(2)
    options = {"do_sample": False, **options}
    return model.generate(
        **inputs,
        **given(cache),
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def build(arch, family="Llama", **more):
    # So much weight that attention shows in the logits.
    options = {**BASE, **TWO, "initializer_range": 0.3, **FAMILIES[family], **more}
    config = getattr(transformers, options.pop("config", f"{family}Config"))(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(arch).eval()
    model.set_attn_implementation("tikv")
    return model


def inputs(arch, *lengths):
    return {name: a.to(arch) for name, a in prompts(*lengths).items()}


def compiling(arch, **options):
    """What has `generate` compile its steps."""
    config = transformers.CompileConfig(fullgraph=True, **({"backend": "eager", "mode": None} if arch == "cpu" else {}))
    config._compile_all_devices = True
    return {"compile_config": config, **options}
