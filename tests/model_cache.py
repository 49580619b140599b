"""The argument by which a transformers model takes its cache: `cache` since 5.24, `past_key_values` before."""

import inspect

import transformers

_parameters = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
NAME = "cache" if "cache" in _parameters else "past_key_values"


def given(cache):
    """`model(ids, **given(cache))`."""
    return {NAME: cache}
