"""What a loop in place of `generate`'s own has to do as `generate` does.

- `generate` prefills by `_prefill` in 5.x, within its loop in 4.x; before 5.24 it calls a cache `past_key_values`.
- `generate` gives a callable `custom_generate` its streamer in 4.x, and not in 5.x, where its frame is read.
- `prepare_inputs_for_generation` looks at `cache_position` on the host in 4.x.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from tikv.errors import OptionError


def call_of_generate() -> dict[str, Any]:
    """What was passed to the `generate` that calls, by name: its streamer, its assistant and ``synced_gpus``.

    New versions give them to their own loops alone.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_globals.get("__name__") == "transformers.generation.utils":
            names = ("streamer", "assistant_model", "synced_gpus")
            return {name: frame.f_locals[name] for name in names if frame.f_locals.get(name) is not None}
        frame = frame.f_back
    return {}


def usual_loop(
    model: Any, mode: Any, ids: Any, processors: Any, criteria: Any, config: Any, call: dict[str, Any], streamer: Any,
    synced_gpus: bool, kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """What `generate` does in this mode by its own loop.

    Raises:
        OptionError: this version of transformers has no such loop, or keeps it within `generate`.
    """
    from transformers.generation import GenerationMode

    loops = {
        GenerationMode.SAMPLE: "_sample",
        GenerationMode.GREEDY_SEARCH: "_sample",
        GenerationMode.BEAM_SEARCH: "_beam_search",
        GenerationMode.BEAM_SAMPLE: "_beam_search",
        GenerationMode.ASSISTED_GENERATION: "_assisted_decoding",
    }
    loop = getattr(model, loops.get(mode, ""), None)
    names = inspect.signature(loop).parameters if loop is not None else {}
    if loop is None or "candidate_generator" in names:
        raise OptionError(
            f"captured: {mode.value.replace('_', ' ')} is not supported, and this version of transformers has no loop "
            f"for it that another could call. Leave custom_generate out."
        )
    options = {"streamer": streamer, "assistant_model": call.get("assistant_model"), "inputs_tensor": ids}
    return loop(
        ids, logits_processor=processors, stopping_criteria=criteria, generation_config=config,
        synced_gpus=synced_gpus, **{name: option for name, option in options.items() if name in names}, **kwargs,
    )  # fmt: skip


def prompt(model: Any, ids: Any, config: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The outputs of a prompt as `generate` computes it, without a compiler, and the arguments of the next step."""
    compiles, config.disable_compile = config.disable_compile, True
    try:
        if hasattr(model, "_prefill"):
            outputs = model._prefill(ids, config, kwargs)
        else:
            kwargs = model._get_initial_cache_position(ids.shape[1], ids.device, kwargs)
            if config.prefill_chunk_size is not None:
                kwargs = model._prefill_chunking(ids, config, **kwargs)
            outputs = model(**model.prepare_inputs_for_generation(ids, **kwargs), return_dict=True)
    finally:
        config.disable_compile = compiles
    return outputs, model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)


def why_no_steps(model: Any) -> str:
    """Why steps of a model cannot be told their position by a tensor; empty if they can."""
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    names = inspect.signature(model.forward).parameters
    return "" if "position_ids" in names else f"{type(model).__name__} takes no position_ids"


def kwargs_of_steps(model: Any, kwargs: dict[str, Any], held: int, more: int) -> dict[str, Any]:
    """The arguments of each of at most `more` steps, of which the first comes after `held` tokens.

    ``position_ids`` and ``cache_position`` are to be increased after each step. The mask covers all steps.
    """
    made = {name: a for name, a in kwargs.items() if name not in ("inputs_embeds", "next_sequence_length")}
    padding, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    device = model.device
    if padding is not None:
        made["attention_mask"] = torch.nn.functional.pad(padding.bool(), (0, more), value=True)
    if positions is not None:
        made["position_ids"] = positions[..., -1:].clone()
    elif padding is not None:
        made["position_ids"] = padding.long().sum(-1, keepdim=True) - 1
    else:
        made["position_ids"] = torch.full((1, 1), held, device=device)
    if "cache_position" in kwargs:
        made["cache_position"] = torch.full((1,), held, device=device)
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if kwargs.get(name) is not None:
            made[name] = kwargs[name][..., -1:].clone()
    return made


def inputs_of_step(model: Any, token: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model for one token of each row, without a look at numbers of the device."""
    if hasattr(model, "_cache_dependant_input_preparation"):  # which compares positions on the host
        return {"input_ids": token, **kwargs}
    return model.prepare_inputs_for_generation(token, **kwargs)  # type: ignore[no-any-return]


def generated(text: Any, scores: Any, logits: Any, cache: Any) -> Any:
    """What `generate` returns with ``return_dict_in_generate``."""
    from transformers.generation import GenerateDecoderOnlyOutput

    name = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    return GenerateDecoderOnlyOutput(sequences=text, scores=scores, logits=logits, **{name: cache})
