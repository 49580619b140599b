"""Five operations as torch custom operators, `torch.ops.tikv.*`, which `torch.compile` keeps in its graph as they are.

Call the functions here in compiled code; in eager code the functions of `tikv` do the same with less overhead. Each
operator has a fake implementation, so that shapes are known while tracing, and declares which arguments it writes to.
For lengths, ``k_scale`` and ``v_scale``, the operators take only tensors, where the functions of `tikv` also take
numbers. Gradients do not flow: backward through attention raises `tikv.OptionError`, and writes to a cache carry no
gradient.
"""

from typing import Any, Optional

from tikv import extras

try:
    import torch
    from torch import Tensor

    extras.require_version(torch)
except ImportError as error:
    raise extras.missing("tikv.torch_ops", error) from None

from tikv.errors import OptionError
from tikv.ops import attention, copy, paged, ragged

# torch reads these signatures. torch 2.4 does not take annotations as strings, so this module does without
# `from __future__ import annotations` and `... | None`.


@torch.library.custom_op("tikv::copy_kv", mutates_args=("k_cache", "v_cache"))  # type: ignore[untyped-decorator]
def _copy_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    position: int,
    window: Optional[int],  # noqa: UP045
    num_tokens: Optional[int],  # noqa: UP045
    src_offset: int,
    src_layout: str,
    cache_layout: str,
) -> None:
    copy.copy_kv(
        k,
        v,
        k_cache,
        v_cache,
        position=position,
        window=window,
        num_tokens=num_tokens,
        src_offset=src_offset,
        src_layout=src_layout,
        cache_layout=cache_layout,
    )


@torch.library.custom_op("tikv::append_ragged", mutates_args=("k_cache", "v_cache"))  # type: ignore[untyped-decorator]
def _append_ragged(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_offsets: Tensor) -> None:
    ragged.append_ragged(k_new, v_new, k_cache, v_cache, cache_offsets)


@torch.library.custom_op("tikv::write_slots", mutates_args=("k_pool", "v_pool", "k_scale", "v_scale"))  # type: ignore[untyped-decorator]
def _write_slots(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    layout: str,
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
) -> None:
    paged.write_slots(k, v, k_pool, v_pool, slot_mapping, layout=layout, k_scale=k_scale, v_scale=v_scale)


@torch.library.custom_op("tikv::decode_attention", mutates_args=())  # type: ignore[untyped-decorator]
def _decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    scale: Optional[float],  # noqa: UP045
    causal: bool,
    window: Optional[int],  # noqa: UP045
    ring: bool,
    sinks: int,
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    softcap: Optional[float],  # noqa: UP045
    indices: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    results = attention.decode_attention(
        q,
        k_cache,
        v_cache,
        seq_lens,
        scale=scale,
        causal=causal,
        window=window,
        ring=ring,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        softcap=softcap,
        return_lse=True,
        indices=indices,
    )
    return results[0], results[1]


@torch.library.custom_op("tikv::paged_decode_attention", mutates_args=())  # type: ignore[untyped-decorator]
def _paged_decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    layout: str,
    scale: Optional[float],  # noqa: UP045
    window: Optional[int],  # noqa: UP045
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    causal: bool,
    softcap: Optional[float],  # noqa: UP045
    indices: Optional[Tensor] = None,  # noqa: UP045
) -> tuple[Tensor, Tensor]:
    results = attention.paged_decode_attention(
        q,
        k_pool,
        v_pool,
        block_tables,
        context_lens,
        layout=layout,
        scale=scale,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        causal=causal,
        softcap=softcap,
        return_lse=True,
        indices=indices,
    )
    return results[0], results[1]


@_decode_attention.register_fake
def _(q, k_cache, v_cache, *_):  # type: ignore[no-untyped-def]
    return _attended(q, v_cache.shape[3])


@_paged_decode_attention.register_fake
def _(q, k_pool, v_pool, block_tables, context_lens, layout, *_):  # type: ignore[no-untyped-def]
    return _attended(q, v_pool.shape[2 if layout == "VLLM" else 3])


def _refuse_backward(ctx: Any, *grads: Any) -> Any:
    raise OptionError(
        "torch_ops: gradients do not flow through attention over a cache. Call it under torch.no_grad(), or train with "
        "torch's own attention."
    )


_decode_attention.register_autograd(_refuse_backward)
_paged_decode_attention.register_autograd(_refuse_backward)


def _attended(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Empty tensors of the shapes and dtypes that attention returns."""
    return q.new_empty((*q.shape[:-1], width)), q.new_empty(q.shape[:-1], dtype=torch.float32)


def copy_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    position: int,
    window: int | None = None,
    num_tokens: int | None = None,
    src_offset: int = 0,
    src_layout: str = "token_major",
    cache_layout: str = "head_major",
) -> None:
    """`tikv.copy_kv` on torch tensors, as a custom operator: same arguments, errors, exactness and cost.

    Examples:
        >>> import torch
        >>> from tikv import torch_ops
        >>> k_cache, v_cache = torch.zeros(2, 1, 4, 2)
        >>> torch_ops.copy_kv(torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0), k_cache, v_cache, position=3)
        >>> k_cache[0, :, 0].tolist(), v_cache[0, :, 0].tolist()
        ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 2.0])
    """
    _copy_kv(k, v, k_cache, v_cache, position, window, num_tokens, src_offset, src_layout, cache_layout)


def append_ragged(k_new: Tensor, v_new: Tensor, k_cache: Tensor, v_cache: Tensor, cache_offsets: Tensor) -> None:
    """`tikv.append_ragged` on torch tensors, as a custom operator: same arguments, errors, exactness and cost.

    Since ``cache_offsets`` here and ``seq_lens`` in `decode_attention` are tensors, a decode step is one graph for all
    positions.

    Examples:
        >>> import torch
        >>> from tikv import torch_ops
        >>> k_cache, v_cache = torch.zeros(2, 2, 1, 4, 1)
        >>> new = torch.ones(2, 1, 1, 1)
        >>> torch_ops.append_ragged(new, new, k_cache, v_cache, torch.tensor([1, 3]))
        >>> k_cache.reshape(2, 4).tolist()
        [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    _append_ragged(k_new, v_new, k_cache, v_cache, cache_offsets)


def write_slots(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`tikv.write_slots` on torch tensors, as a custom operator: same arguments, errors, exactness and cost.

    Examples:
        >>> import torch
        >>> from tikv import torch_ops
        >>> k_pool, v_pool = torch.zeros(2, 2, 3, 1, 1)
        >>> torch_ops.write_slots(torch.ones(2, 1, 1), torch.ones(2, 1, 1), k_pool, v_pool, torch.tensor([4, -1]))
        >>> k_pool.flatten().tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    _write_slots(k, v, k_pool, v_pool, slot_mapping, layout, k_scale, v_scale)


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    ring: bool = False,
    sinks: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    softcap: float | None = None,
    indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tikv.decode_attention` on torch tensors, as a custom operator: same errors, exactness and cost.

    The arguments listed above mean the same. The other arguments of `tikv.decode_attention`, such as
    ``sink_logits``, ``mask`` and ``return_mass``, are not supported.

    Examples:
        >>> import torch
        >>> from tikv import torch_ops
        >>> keys, values = torch.zeros(1, 1, 4, 2), torch.arange(8.0).reshape(1, 1, 4, 2)
        >>> torch_ops.decode_attention(torch.ones(1, 1, 2), keys, values, torch.tensor([3])).tolist()
        [[[2.0, 3.0]]]
    """
    out, lse = _decode_attention(
        q, k_cache, v_cache, seq_lens, scale, causal, window, ring, sinks, k_scale, v_scale, softcap, indices
    )
    return (out, lse) if return_lse else out


def paged_decode_attention(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    layout: str = "NHD",
    scale: float | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    causal: bool = True,
    softcap: float | None = None,
    indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tikv.paged_decode_attention` on torch tensors, as a custom operator: same errors, exactness and cost.

    The arguments listed above mean the same. The other arguments of `tikv.paged_decode_attention`, such as
    ``sink_logits``, ``mask`` and ``impl``, are not supported.

    Examples:
        >>> import torch
        >>> from tikv import torch_ops
        >>> pool = torch.arange(4.0).reshape(2, 2, 1, 1)
        >>> table, length = torch.tensor([[1, 0]]), torch.tensor([3])
        >>> out = torch_ops.paged_decode_attention(torch.zeros(1, 1, 1), pool, pool, table, length)
        >>> round(out.item(), 4)  # the mean of 2, 3 and 0
        1.6667
    """
    out, lse = _paged_decode_attention(
        q, k_pool, v_pool, block_tables, context_lens, layout, scale, window, k_scale, v_scale, causal, softcap, indices
    )
    return (out, lse) if return_lse else out
