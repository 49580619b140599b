"""The formats in which layers of a `TikvCache` store tokens, and the memory that they share with torch."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from tikv import dtypes, engines, runtime
from tikv.arrays import Array
from tikv.dtypes import APPENDED, DType
from tikv.errors import ArchError, DTypeError, OptionError
from tikv.formats import (
    GROUP_FORMATS,
    OR_FORMATS,
    OR_GROUPS,
    Aging,
    GroupFormat,
    Quant,
    TileFormat,
    parse_aging,
    parse_format,
)
from tikv.integrations.transformers.names import CACHE
from tikv.stores.row_format import appended, check_divided, values_of


class Storage(NamedTuple):
    """The formats of keys and of values, None for the model's dtype; and what they are divided by."""

    k: DType | GroupFormat | None
    v: DType | GroupFormat | None
    k_scale: Any = None
    v_scale: Any = None
    quant: Aging | None = None  # if only older tokens are codes
    sinks: int = 0  # how many first tokens of layers without a window are never codes, if `quant` is given


def storage_of(
    dtype: Any, v_dtype: Any = None, k_scale: Any = None, v_scale: Any = None, operation: str = CACHE
) -> Storage:
    """The storage that a user's ``dtype``, ``v_dtype`` and scales ask for.

    Raises:
        DTypeError: nothing can be stored in one of the dtypes.
        OptionError: a scale is given for keys or values that cannot have one.
    """
    quant = parse_aging(dtype)
    if isinstance(quant, TileFormat):
        if v_dtype is not None:
            raise OptionError(
                f"{operation}: v_dtype={v_dtype!r} does not apply to {quant}, which encodes keys and values. Leave it "
                "out."
            )
        k: DType | GroupFormat | None = quant.reported("keys")
        v: DType | GroupFormat | None = quant.reported("values")
    else:
        k = _stored_as(dtype, "dtype", operation) if quant is None else quant.by_tokens
        v = k if v_dtype is None else _stored_as(v_dtype, "v_dtype", operation)
        if isinstance(v, GroupFormat) and not (quant is not None and v is k):
            v = values_of(v, v_dtype, operation)
    check_divided((k, v), (k_scale, v_scale), operation)
    return Storage(k, v, k_scale, v_scale, quant, quant.sinks if isinstance(quant, Quant) else 0)


def _stored_as(dtype: Any, name: str, operation: str) -> DType | GroupFormat | None:
    if dtype is None:
        return None
    also = OR_FORMATS if name == "dtype" and operation == CACHE else OR_GROUPS
    format = parse_format(dtype) or dtypes.parse(dtype, operation, also)
    if isinstance(format, DType) and format.name not in APPENDED:
        raise DTypeError(
            f"{operation}: {name}={format.name} cannot be stored. Use None for the model's dtype, a tikv.Quant, or "
            f"one of {', '.join(APPENDED)}, q8_0, q4_0, mxfp8, mxfp4, nvfp4."
        )
    return format


def check_storage(name: str, storage: Storage, keys: Array, values: Array) -> None:
    """Check that keys and values of these dtypes and widths can be stored so; `name` is the layer's.

    Raises:
        DTypeError: they cannot.
        ShapeError: groups do not divide the width of a head.
    """
    for what, states, stored in (("keys", keys, storage.k), ("values", values, storage.v)):
        if stored is None:
            continue
        model = dtypes.parse(states.dtype, name)
        if model.name not in appended(stored):
            fit = [row for row, sources in APPENDED.items() if model.name in sources]
            named = [format for format in GROUP_FORMATS.values() if format.numbers == 1]
            fit += [format.name for format in named if model.name in appended(format)]
            raise DTypeError(
                f"{name}: {what} of {model.name} cannot be stored as {stored}. Use dtype=None, or one of "
                f"{', '.join(fit)}."
            )
        if isinstance(stored, GroupFormat) and not (stored is storage.k and storage.quant and what == "keys"):
            stored.groups(states.shape[3], f"a head of {what}", name)


def share_memory_with(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Make sure that Taichi runs on the device of the model's tensors; start it there if it does not run yet.

    Returns:
        A context in which memory is allocated on that device, since a model may be spread over several GPUs.

    Raises:
        ArchError: it runs elsewhere, or it cannot share the memory of the device.
    """
    engine = engines.that_shares_mps() if device.type == "mps" else None
    arch = engine.mps_arch if engine else {"cpu": "cpu", "cuda": "cuda"}.get(device.type)
    if arch is None:
        raise ArchError(f"{CACHE}: the model is on {device}. Move it to CPU, CUDA or MPS, whose memory tikv can share.")
    live = runtime.current() if runtime.is_started() else runtime.init(arch, engine.name if engine else "auto")
    if engine not in (None, live.engine):
        raise ArchError(
            f"{CACHE}: the model is on {device}, whose memory {live.engine.title} cannot share. Call "
            f"tikv.init({arch!r}, engine={engine.name!r}) in another process ({engine.remedy[:-1]}), or move the model."
        )
    if live.arch != arch:
        raise ArchError(
            f"{CACHE}: the model is on {device}, but {live.engine.title} runs on {live.arch}. Call "
            f"tikv.init(arch={arch!r}) before the first operation, or move the model."
        )
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
