"""Tiny transformers models in tests: their common options, prompts, and the argument by which they take a cache."""

import inspect

import torch
import transformers

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
