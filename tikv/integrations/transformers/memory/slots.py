"""The memory of a layer as decode attention reads it: all slots, with a number of first slots to attend over.

What `update` returns gets longer with each token. The memory does not, so a call over it has the same form as the
previous call, and most of the preparation can be reused.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tikv.arrays import ALIGNMENT, torch_guard
from tikv.integrations.transformers.names import ATTENTION_CALL
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS, ContiguousLayout
from tikv.ops.attention.request import AttendRequest
from tikv.runtime import require_alive

STEPS = 64  # the most steps for which a call is checked once


@functools.lru_cache
def request_of(scale: float | None, softcap: float | None, causal: bool) -> AttendRequest:
    """A model's request to attention; equal arguments give the same object."""
    return AttendRequest(scale=scale, softcap=softcap, causal=causal)


class CacheSlots:
    """Keys and values in place, with their scales; valid until the layer's memory is replaced.

    Args:
        k, v: (batch, heads, slots, width), or words of codes.
        k_scale, v_scale: as in a store; None without scales.
        formats: the formats of K and V, None for one that is not stored as groups of codes.
    """

    __slots__ = ("_again", "_length", "_places", "_request", "_slots", "_window", "caches")

    def __init__(self, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any, formats: Any) -> None:
        self.caches = Caches(CONTIGUOUS, k, v, 0, None, k_scale, v_scale, formats=formats)
        self._slots = k.shape[2]
        self._places = self._places_of(k, v)
        self._again: Again | None = None
        self._length: Any = None
        self._window: int | None = None
        self._request: tuple[Any, Any] = (None, None)

    def sees(self, length: Any, window: int | None = None, ring: int = 0) -> None:
        """Say what the newest token sees, if that is not each of the slots that `attend` is told.

        Args:
            length: the number of tokens if they go round a ring, or a tensor of those of each sequence; None if the
                newest token sees all slots.
            window: of a ring, how many of the newest tokens it sees.
            ring: how many slots tokens go round.
        """
        if window != self._window:
            self._again = None
            self.caches = self.caches._replace(layout=ContiguousLayout(ring or False))
        self._length, self._window = length, window

    @staticmethod
    def _places_of(k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        return k.data_ptr(), v.data_ptr(), k.stride(), v.stride(), k.dtype, v.dtype

    def are(self, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether these are views of the first slots, and not tensors that a model has made from them."""
        return self._places == self._places_of(key, value)

    def attend(self, query: torch.Tensor, length: int, request: AttendRequest) -> Any:
        """Attention of (batch, heads, T, width) queries over the first `length` slots, or over what `sees` said."""
        if self._length is not None:
            if self._window is None:
                return attend_contiguous(query, self.caches, self._length, request)
            if self._request[0] is not request:
                self._request = request, request._replace(window=self._window)
            length, request = self._length, self._request[1]
        again = self._again
        if again is not None and again.request is request and again.first <= length <= again.last:
            out = again.attend(query, length)
            if out is not None:
                return out
        if query.is_cpu and query.shape[2] == 1 and request.sink_logits is request.indices is None:
            last = length + STEPS if self._window else min(length + STEPS, self._slots)
            again = self._again = Again.of(self.caches, query, request, length, last)
            out = None if again is None else again.attend(query, length)
            if out is not None:
                return out
        return attend_contiguous(query, self.caches, length, request)


class Again:
    """A call of attention that can be repeated on the CPU, with queries of the same form over a few more tokens.

    Args:
        guard: recognises such queries.
        request: the request, from `request_of`.
        first, last: the lengths between which the launches serve.
        ready: the call, which is fully checked.
    """

    __slots__ = (
        "_from_out",
        "_from_q",
        "_guard",
        "_launches",
        "_live",
        "_shape",
        "_stored",
        "first",
        "last",
        "request",
    )

    def __init__(self, guard: Any, request: AttendRequest, first: int, last: int, ready: Any) -> None:
        self._guard, self.request, self.first, self.last = guard, request, first, last
        q, *stored, out = ready.arrays.values()
        self._launches, self._live = ready.launches, ready.launches.live
        self._stored = tuple(a.ptr for a in stored)
        self._from_q, self._from_out, self._shape = q.ptr % ALIGNMENT, out.ptr % ALIGNMENT, out.shape

    @classmethod
    def of(cls, caches: Caches, query: torch.Tensor, request: AttendRequest, first: int, last: int) -> Again | None:
        """A call for lengths from `first` on, up to `last` or as long as the keys are split in the same way."""
        guard = torch_guard((query,))
        if guard is None:
            return None
        call = attention_call(ATTENTION_CALL, query, caches._replace(lens=first), request)
        ready = call.prepare(query)
        if ready.launches is None:
            return None
        return cls(guard, request, first, call.plan.alike_until(first, last), ready)

    def attend(self, query: torch.Tensor, length: int) -> Any:
        """Attention over `length` tokens; None if the queries have another form."""
        if not self._live.alive:
            require_alive(self._live, ATTENTION_CALL)
        if not self._guard(query):
            return None
        out = query.new_empty(self._shape)
        at, to = query.data_ptr(), out.data_ptr()
        if at % ALIGNMENT != self._from_q or to % ALIGNMENT != self._from_out:
            return None
        return out if self._launches.attend_again((at, *self._stored, to), length) else None


def attend_contiguous(query: torch.Tensor, caches: Caches, length: Any, request: AttendRequest) -> Any:
    """Attention over the first `length` slots of caches, or of each sequence: (batch, heads, T, width of values)."""
    lengths: Any = length
    if not query.is_cpu and isinstance(length, int):
        lengths = torch.full((query.shape[0],), length, dtype=torch.int32, device=query.device)
    call = attention_call(ATTENTION_CALL, query, caches._replace(lens=lengths), request)
    return call.attend(query, impl="auto")
