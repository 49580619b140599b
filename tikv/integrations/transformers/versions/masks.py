"""How masks are made, and what the functions that make them know of new tokens.

- `get_mask_sizes` is given the cache positions of the new tokens up to 5.3, their number from 5.4 on.
- Masks are made by `vmap` in 4.x, and only if a caller asks for it in 5.x.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from transformers import masking_utils

# Whether prompts always get a mask if the cache's steps may be compiled; newer versions have a keyword for that.
MASKS_PROMPTS_OF_COMPILED = "allow_is_causal_skip" not in inspect.signature(masking_utils.create_causal_mask).parameters

# Whether `vmap` makes masks, which does not work while torch handles an operation on a subclass of its tensors.
MASKS_BY_VMAP = "use_vmap" not in inspect.signature(masking_utils.sdpa_mask).parameters


def query_length(queries: torch.Tensor) -> int:
    """The number of new tokens, from the argument of `get_mask_sizes`: that number or their positions."""
    return queries if isinstance(queries, int) else int(queries.shape[0])


def said_of_tokens(queries: torch.Tensor) -> tuple[Any, Any]:
    """The attention_mask (batch, n) and the position_ids that the caller of `get_mask_sizes` has.

    Either is None if the caller has none of this form. transformers passes neither to a cache, and from 5.4 on not even
    the positions that `queries` were before. So they are read from the frames of the mask functions, which call it.
    """
    frame, names = sys._getframe(1), {}
    for _ in range(6):
        if frame.f_globals.get("__name__") == masking_utils.__name__:
            names = frame.f_locals
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    padding, positions = names.get("attention_mask"), names.get("position_ids")
    if not isinstance(queries, int):
        positions = queries[None]
    return tuple(a if isinstance(a, torch.Tensor) and a.ndim == 2 else None for a in (padding, positions))  # type: ignore[return-value]
