"""Writes and reads of what a `TikvLayer` stores, as torch operators: one signature for every storage format.

The places and the number of tokens are in tensors, so that one compiled program serves all steps.
"""

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Optional

import torch
from torch import Tensor

from tikv import dtypes, formats
from tikv.arrays import new_like, runtime_of, view_all
from tikv.errors import ArchError
from tikv.launch.cuda import driver
from tikv.ops.append_at import append_at
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import ContiguousLayout, contiguous_cache
from tikv.ops.attention.request import AttendRequest
from tikv.ops.layouts import Rows
from tikv.ops.row_copy import bind_copy

# torch reads these signatures, like those of `torch_ops`.
OPERATION = "TikvCache.update"


def name_of(format: Any) -> str:
    """An operator's name for a format of groups, followed by any scale of the whole tensor; empty for plain numbers."""
    if format is None:
        return ""
    return f"{format}" if format.tensor_scale == 1.0 else f"{format}/{format.tensor_scale!r}"


def _formats(*names: str) -> Any:
    return tuple(_format_of(name) for name in names)


def _format_of(named: str) -> Any:
    name, _, scale = named.partition("/")
    parsed = formats.parse_format(name) if name else None
    return parsed.scaled(float(scale)) if parsed is not None and scale else parsed


def _refuse_capture_by_hand(cache: Tensor) -> None:
    """Refuse CUDA graphs that neither torch's compiler nor `capture_is_counted` captures.

    Torch's compiler checks the addresses of a cache before each replay, and the cache counts each of its steps.

    Raises:
        ArchError: other code captures a CUDA graph, whose replays would do neither.
    """
    if _captured(cache) and not (_counted.get() or _by_compiler()):
        raise ArchError(
            f"{OPERATION}: a CUDA graph is being captured by hand. Its replays would add tokens that the cache does "
            f'not count, and use memory that it has released. Let torch.compile(mode="reduce-overhead") capture, as '
            f"generate does; or use a tikv.KVCacheStore with positions_on_device()."
        )


_counted: ContextVar[bool] = ContextVar("tikv_capture_is_counted", default=False)


@contextlib.contextmanager
def capture_is_counted() -> Iterator[None]:
    """A graph that is captured meanwhile belongs to a loop that counts its replays and knows if the cache changes."""
    token = _counted.set(True)
    try:
        yield
    finally:
        _counted.reset(token)


def _captured(cache: Tensor) -> bool:
    """Whether launches over a cache are captured now."""
    return cache.is_cuda and driver.capturing(cache.device.index)


def _by_compiler() -> bool:
    """Whether torch's compiler is the one that captures; called only while a graph is captured, which is rare."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    frame = sys._getframe()
    while trees is not None and frame is not None:
        if frame.f_code.co_filename == trees.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# `append` and `attend` are the operators' work; code that is not traced saves the time that an operator takes to call.


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    positions: Tensor,
    ring: int,
    sinks: int,
    k_format: str,
    v_format: str,
) -> None:
    """`append_at`.

    Raises:
        ArchError: a CUDA graph is being captured, but not by torch's compiler.
    """
    _refuse_capture_by_hand(k_cache)
    append_at(
        OPERATION, (k, v), (k_cache, v_cache), (k_scale, v_scale), positions, formats=_formats(k_format, v_format),
        ring=ring, sinks=sinks,
    )  # fmt: skip


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    lens: Tensor,
    sink_logits: Optional[Tensor],  # noqa: UP045
    scale: Optional[float],  # noqa: UP045
    softcap: Optional[float],  # noqa: UP045
    width_v: int,
    k_format: str,
    v_format: str,
    starts: Optional[Tensor] = None,  # noqa: UP045
    ring: int = 0,
    window: int = 0,
) -> Tensor:
    """Attention of one query per sequence to its first `lens` slots, from `starts` on: (B, Hq, 1, width_v).

    With `ring`, the tokens, `lens` in all, went round so many slots, and the query sees the newest `window` of them.
    """
    rows, both = _formats(k_format, v_format), starts is not None
    if starts is not None:
        lens = torch.stack((lens, starts), 1).flatten()
    caches = Caches(
        ContiguousLayout(ring or False, starts=both), k_cache, v_cache, lens, None, k_scale, v_scale, formats=rows
    )
    request = AttendRequest(scale=scale, softcap=softcap, sink_logits=sink_logits, window=window or None)
    out: Tensor = attention_call("decode_attention", q, caches, request).attend(q, impl="taichi")
    return out


append_stored = torch.library.custom_op(
    "tikv::append_stored", append, mutates_args=("k_cache", "v_cache", "k_scale", "v_scale")
)
attend_stored = torch.library.custom_op("tikv::attend_stored", attend, mutates_args=())


@torch.library.custom_op("tikv::decode_stored", mutates_args=())  # type: ignore[untyped-decorator]
def decode_stored(cache: Tensor, scale: Optional[Tensor], width: int, format: str) -> Tensor:  # noqa: UP045
    """The numbers of all slots, (B, H, slots, width) float32."""
    live = runtime_of(cache)
    tensors = {"cache": cache} if scale is None else {"cache": cache, "scale": scale}
    stored, *scales = view_all(tuple(tensors.values()), tuple(tensors), OPERATION)
    out: Tensor = new_like(cache, (*stored.shape[:3], width), dtypes.float32, live)
    (to,) = view_all((out,), ("out",), OPERATION)
    (row,) = _formats(format)
    arrays = {"k": stored, "v": stored} | dict(zip(("k_scale",), scales, strict=False))
    batch, heads, slots, _ = stored.shape
    bind_copy(
        live, OPERATION, src=[contiguous_cache(arrays, formats=(row, row)).k],
        dst=[Rows(to, sequence=to.strides[0], head=to.strides[1], token=to.strides[2])], widths=[width], heads=heads,
        tokens=slots, groups=batch,
    ).bound.launch()  # fmt: skip
    return out


def note_use(state: Tensor, uses: Tensor) -> None:
    """Add 1 to `uses`, before a state is read or written: compiled programs keep the order of what may change it."""
    uses.add_(1)


note_use_of_state = torch.library.custom_op("tikv::note_use_of_state", note_use, mutates_args=("state", "uses"))


@note_use_of_state.register_fake
def _(state, uses):  # type: ignore[no-untyped-def]
    return None


@append_stored.register_fake
def _(k, v, *_):  # type: ignore[no-untyped-def]
    return None


@attend_stored.register_fake
def _(q, k_cache, v_cache, k_scale, v_scale, lens, sink_logits, scale, softcap, width_v, *_):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:-1], width_v))


@decode_stored.register_fake
def _(cache, scale, width, format):  # type: ignore[no-untyped-def]
    return cache.new_empty((*cache.shape[:3], width), dtype=torch.float32)
