"""Attention that also says how much weight each held token gets, for `TikvCache.replay`."""

from __future__ import annotations

from typing import Any

import torch

from tikv.errors import OptionError
from tikv.integrations.transformers.attention.keywords import causal_mask
from tikv.integrations.transformers.attention.prompts import PromptMask
from tikv.integrations.transformers.memory.slots import request_of
from tikv.integrations.transformers.memory.stored import in_rows
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.plan import Results


class HeldMass:
    """The mass of the tokens that a layer holds, which its calls of attention accumulate.

    Args:
        kind: "sum", "max" or "last".

    Attributes:
        mass: (batch, num_kv_heads, held) float32; None before the first call of attention.
        held: how many of the first keys of the next call are held tokens.
        is_due: whether keys were handed out that no attention has weighed yet.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.held, self.is_due = kind, 0, False
        self.mass: Any = None

    def add(self, mass: Any) -> None:
        """Accumulate the mass of all keys of a call."""
        new: Any = mass[..., : self.held]
        if self.mass is None or self.kind == "last":
            self.mass = new.clone()
        elif self.kind == "max":
            self.mass = torch.maximum(self.mass, new)
        else:
            self.mass = self.mass + new
        self.is_due = False


def attend_weighed(call: Any, weighing: HeldMass) -> Any:
    """Attention of new tokens that are not kept, by this library's kernels: (batch, T, heads, head_dim_v).

    Args:
        call: the call of `attend`; its mask may say no more than that queries are the newest tokens.
        weighing: what accumulates the mass.

    Raises:
        OptionError: the call has padding, keywords that change scores, dropout, or gradients.
    """
    mask = call.mask
    if call.traced or not call.served or call.said or not (mask is None or _is_causal(call)):
        raise OptionError(
            f"{ATTENTION_CALL}: return_mass of a replay needs attention without padding, dropout, gradients, "
            f"torch.compile or keywords that change scores{' ' if call.said else ''}{', '.join(call.said)}. Call the "
            "model under torch.no_grad(), with sequences of one length; or leave return_mass out."
        )
    request = request_of(call.scale, call.softcap, call.causal or mask is not None)
    request = request._replace(sink_logits=call.logits, window=mask.window if type(mask) is PromptMask else None)
    query, kind = in_rows(call.query), weighing.kind
    caches = Caches(CONTIGUOUS, in_rows(call.key), in_rows(call.value), call.held)
    weighed = attention_call(ATTENTION_CALL, query, caches, request, kind)
    results = Results(mass=Mass(kind, 1 if kind == "last" else None))
    out, mass = weighed.attend(query, results)
    weighing.add(mass)
    return out.transpose(1, 2)


def _is_causal(call: Any) -> bool:
    """Whether a mask says only that each query sees the keys up to its own, or a window of them."""
    mask = call.mask
    if type(mask) is PromptMask:
        return True
    return mask.dtype is torch.bool and bool((mask == causal_mask(call.query, call.key)).all())
