"""`captured`, which `generate` calls in place of its own loop: a step is a CUDA graph that also chooses the token."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from transformers.generation import GenerationMode

from tikv.errors import OptionError
from tikv.integrations.transformers.cache.cache import TikvCache
from tikv.integrations.transformers.loop.loop import Loop, Options
from tikv.integrations.transformers.names import CACHE
from tikv.integrations.transformers.versions import generate


class CapturedLoop:
    """The loop of ``generate(custom_generate=captured)``.

    The prompt is computed as usual. Then each step, from the append to the choice of the next token, is a replay of one
    CUDA graph, and the host looks at the tokens of several steps at once. On a CPU the same steps are calls.

    The text is the one of `generate` in eager mode: greedy, or sampled with the same random numbers, with any logits
    processors, stopping criteria and streamer. So is the cache afterwards: what was computed after the end of a text is
    taken back. Processors that are not known to work on the device alone run between the graphs.

    It serves a `TikvCache` whose steps may be compiled (with ``max_cache_len=`` or ``window=``, attention "tikv").
    Other caches, beams, assisted decoding and what returns attentions or hidden states go on by `generate`'s own loop;
    a warning says why, once.

    Examples:
        >>> import torch
        >>> from tikv.integrations.transformers import TikvCache, captured
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
        >>> model = LlamaForCausalLM(config).eval()
        >>> model.set_attn_implementation("tikv")
        >>> cache = TikvCache(model.config, max_cache_len=16)
        >>> text = model.generate(torch.tensor([[1, 2, 3]]), cache=cache, custom_generate=captured, max_new_tokens=4,
        ...                       do_sample=False, eos_token_id=None)  # cache= is past_key_values= before 5.24
        >>> text.shape, cache.get_seq_length()
        (torch.Size([1, 7]), 6)
    """

    def __init__(self, options: Options = Options()) -> None:  # noqa: B008
        self._options = options

    def with_options(self, compile: bool = False, check_every: int = 8, streamer: Any = None) -> CapturedLoop:
        """The same loop with other options.

        Args:
            compile: have torch.compile compile the model's forward, which the graph then holds. The first call waits
                for the compiler; the options are those of ``compile_config=``, without CUDA graphs of torch's own.
            check_every: how many steps run between two looks at their tokens. The result does not depend on it.
            streamer: a streamer of transformers; new versions do not pass the one of `generate` on.

        Raises:
            OptionError: `check_every` is not a positive integer.
        """
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 1:
            raise OptionError(
                f"captured: check_every={check_every!r} is not supported. Use an integer of at least 1, or leave it "
                f"out for {Options().check_every}."
            )
        return CapturedLoop(Options(bool(compile), check_every, streamer))

    def __call__(
        self, model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """What `generate` calls; the arguments are those of transformers' own loops."""
        call = generate.call_of_generate()
        synced_gpus = synced_gpus or bool(call.get("synced_gpus"))
        streamer = call.get("streamer") if streamer is None else streamer
        if streamer is None and self._options.streamer is not None:
            streamer = self._options.streamer
            streamer.put(input_ids.cpu())  # which `generate` does for one that it knows
        cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        mode = generation_config.get_generation_mode(call.get("assistant_model"))
        why = _why_not(model, input_ids, cache, mode, stopping_criteria, generation_config, model_kwargs)
        if synced_gpus:
            why = "synced_gpus=True has all processes wait for each other at each token"
        if why:
            _warn_once(f"{CACHE}: generate goes on without captured, because {why}.")
            return generate.usual_loop(
                model, mode, input_ids, logits_processor, stopping_criteria, generation_config, call, streamer,
                synced_gpus, model_kwargs,
            )  # fmt: skip
        options = self._options._replace(streamer=streamer)
        return Loop(
            model, cache, input_ids, logits_processor, stopping_criteria, generation_config, options, model_kwargs
        ).run()

    def __repr__(self) -> str:
        return f"captured.with_options({', '.join(f'{k}={v!r}' for k, v in self._options._asdict().items())})"


captured = CapturedLoop()


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _why_not(
    model: Any, ids: Any, cache: Any, mode: Any, criteria: Any, config: Any, kwargs: dict[str, Any]
) -> str:  # fmt: skip
    """Why the loop cannot serve a text; empty if it can."""
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        return f"this is {mode.value.replace('_', ' ')}"
    if not isinstance(cache, TikvCache):
        return f"the cache is {'none' if cache is None else 'a ' + type(cache).__name__}, and not a TikvCache"
    if why := cache.why_not_compiled():
        return why
    if not kwargs.get("use_cache", True):
        return "use_cache is False"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states are returned"
    if any(layer.record_past for layer in cache.layers_with_keys):
        return "sliding layers record the past"
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        return "the model is on several devices"
    if ids.device != model.device:
        return f"the text is on {ids.device} and the model on {model.device}"
    if all(not hasattr(each, "max_length") for each in criteria):
        return "no stopping criterion limits the length"
    return generate.why_no_steps(model)
