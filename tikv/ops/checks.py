"""All preconditions of operations, checked on the host before any write. Messages give operation, values, way out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes, engines, launch, runtime
from tikv.arrays import (
    ALIGNMENT,
    TRACED,
    ArrayView,
    StagedNdarray,
    describe,
    host_bytes,
    is_protected,
    is_traced,
)
from tikv.errors import ArchError, CapacityError, DTypeError, OptionError, PositionError, ShapeError
from tikv.formats import Format

MAX_POSITION = 2**63 - 1
LAYOUTS = ("token_major", "head_major")


def integer(value: Any, name: str, operation: str, *, low: int = 0, high: int = MAX_POSITION) -> int:
    """`value` as an int, checked to be a host integer within [low, high].

    Raises:
        PositionError: it is outside.
        DTypeError: it is not an integer.
    """
    if type(value) is not int:
        if isinstance(value, bool):
            raise DTypeError(f"{operation}: {name} is {value!r}, not an integer. Pass an int.")
        try:
            value = operator.index(value)
        except TypeError:
            said = TRACED if is_traced(value) else f"is {value!r}, not an integer. Pass an int."
            raise DTypeError(f"{operation}: {name} {said}") from None
    if value < low and high == MAX_POSITION:
        raise PositionError(f"{operation}: {name}={value} is outside the range. Use {low} or more.")
    if not low <= value <= high:
        raise PositionError(f"{operation}: {name}={value} is outside {low}..{high}.")
    return int(value)


def integer_or_none(value: Any, name: str, operation: str) -> int | None:
    """An option that is part of a plan's key: any host integer as an int, or None.

    Raises:
        As `integer` does.
    """
    return value if value is None or type(value) is int else integer(value, name, operation)


def option(value: Any, name: str, operation: str, choices: Sequence[str]) -> str:
    """`value`, checked to be one of the choices.

    Raises:
        OptionError: it is not one of them.
    """
    if not isinstance(value, str) or value not in choices:
        raise OptionError(f"{operation}: unknown {name} {value!r}. Use one of {', '.join(map(repr, choices))}.")
    return str(value)


def name(value: Any, name: str, operation: str, choices: Sequence[str]) -> str:
    """A name that is part of a plan's key: any string, which `option` checks when the plan is made.

    Raises:
        OptionError: it is not a string.
    """
    return value if type(value) is str else option(value, name, operation, choices)


def flag(value: Any, name: str, operation: str) -> bool:
    """`value` as a bool: True, False, their NumPy forms, 1 or 0.

    Raises:
        OptionError: it is something else.
    """
    if value is True or value is False:
        return bool(value)
    if isinstance(value, np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise OptionError(f"{operation}: {name} is {value!r}. Use True or False.")


def rank(array: ArrayView, ndims: Sequence[int], name: str, shape: str, operation: str) -> None:
    """Check that the array has one of these numbers of axes.

    Raises:
        ShapeError: it has not.
    """
    if array.ndim not in ndims:
        raise ShapeError(f"{operation}: {name} is {describe(array)}, with {array.ndim} axes; it must be {shape}.")


def readable(array: ArrayView, name: str, operation: str) -> None:
    """Check that rows can be read in place: the last axis is contiguous and no stride is negative.

    Raises:
        ShapeError: they cannot.
    """
    shape, strides = array.shape, array.strides
    if 0 in shape:
        return  # there is nothing to reach; the strides of an empty array mean nothing
    if shape and shape[-1] > 1 and strides[-1] != 1:
        raise ShapeError(
            f"{operation}: the last axis of {name} is not contiguous ({describe(array)}, strides {strides} elements); "
            f"rows are moved as words. Pass a copy with a contiguous last axis."
        )
    ascending(array, name, operation)


def ascending(array: ArrayView, name: str, operation: str) -> None:
    """Check that elements can be read in place, one by one: no stride is negative.

    Raises:
        ShapeError: one is.
    """
    if any(s < 0 and n > 1 for n, s in zip(array.shape, array.strides, strict=True)):
        raise ShapeError(f"{operation}: {name} has negative strides {array.strides}. Pass a copy.")


def writable(array: ArrayView, name: str, operation: str) -> None:
    """Check that a destination can be written, element by element.

    Raises:
        ShapeError: it is read-only, some of its elements share memory, or its rows are not contiguous.

    Torch and DLPack do not tell whether memory is read-only. `disjoint` finds pages that the system protects; other
    memory, such as the bytes given to `torch.frombuffer`, cannot be checked.
    """
    if not array.writable:
        raise ShapeError(
            f"{operation}: the destination {name} ({describe(array)}) is read-only. Pass a writable array."
        )
    readable(array, name, operation)
    if 0 not in array.shape and any(s == 0 and n > 1 for n, s in zip(array.shape, array.strides, strict=True)):
        raise ShapeError(
            f"{operation}: the destination {name} ({describe(array)}) is broadcast; its elements share memory. Pass an "
            "array with memory for each element."
        )
    if _overlaps_itself(array):
        raise ShapeError(
            f"{operation}: the destination {name} ({describe(array)}, strides {array.strides} elements) overlaps "
            f"itself; some of its elements share memory. Pass an array whose elements lie apart."
        )


def _overlaps_itself(array: ArrayView) -> bool:
    """Whether two elements lie at one address: exact, if no stride is negative."""
    axes = sorted((s, n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)
    end = 0  # where the elements within one step of the axis end
    for stride, n in axes:
        if stride <= end:
            break
        end += stride * (n - 1)
    else:
        return False
    if 0 in array.shape or array.span > 2**35:  # `addressable` refuses arrays as large as this
        return False
    # Two indices of one address differ along some axis; move both back until one is 0 there and the other is not.
    strides = array.strides
    for i, n in enumerate(array.shape):
        if n > 1:
            first = array.restrided((*array.shape[:i], 1, *array.shape[i + 1 :]), strides)
            others = array.restrided((*array.shape[:i], n - 1, *array.shape[i + 1 :]), strides, strides[i])
            if _share_elements(first, 0, others, strides[i] * array.dtype.itemsize):
                return True
    return False


def on_device(arrays: Sequence[tuple[str, ArrayView]], live: runtime.Runtime, operation: str) -> None:
    """Check that every array lies on the host or on the runtime's device, and that the device can launch kernels.

    Raises:
        ArchError: an array lies elsewhere, or nothing can be launched there.
        DTypeError: an array is float64, which the arch lacks.
    """
    launch.require_native(live, operation)
    for name, array in arrays:
        device = array.device
        if device == "mps":
            _refuse_unless_shared(array, live, name, operation)
        elif device != "cpu" and device.partition(":")[0] != live.arch:
            raise ArchError(
                f"{operation}: {name} is on {device}, but {live.engine.title} runs on {live.arch}. Call "
                f"tikv.init({device.partition(':')[0]!r}) first, or move the array."
            )
        elif device not in ("cpu", live.device):
            raise ArchError(
                f"{operation}: {name} is on {device}, but the arrays that it is used with are on {live.device}. "
                "Move one of them. A store stays on the GPU that was torch's current one when it was made; make "
                f"it under `with torch.cuda.device({device!r})`."
            )
        if array.dtype is dtypes.float64 and not live.has_float64:
            raise DTypeError(
                f"{operation}: {name} is float64, which {live.arch} does not have. Use float32, CPU or CUDA."
            )


def _refuse_unless_shared(array: ArrayView, live: runtime.Runtime, name: str, operation: str) -> None:
    """Check that kernels can be given a tensor on MPS.

    Raises:
        ArchError: the engine, or the arch that it runs on, does not share memory with PyTorch.
    """
    if live.engine.mps_arch == live.arch:
        return
    if live.engine.mps_arch is None:
        other = engines.that_shares_mps()
        why = f"{live.engine.title} cannot share memory with PyTorch, but {other.title} can"
        way = f"tikv.init({other.mps_arch!r}, engine={other.name!r}) in another process ({other.remedy[:-1]})"
    else:
        why = f"{live.engine.title} runs on {live.arch}"
        way = f"tikv.init({live.engine.mps_arch!r}) before the first operation"
    raise ArchError(
        f"{operation}: {name} is a torch tensor on mps, and {why}. Call {way}, or pass {name}.cpu(), which waits "
        f"for the GPU and copies {array.nbytes:,} bytes each time; results have to be copied back the same way."
    )


def convertible(src: ArrayView, dst: ArrayView, src_name: str, dst_name: str, operation: str) -> None:
    """Check that a copy converts this pair of dtypes.

    Raises:
        DTypeError: it does not.
    """
    allowed = dtypes.CONVERSIONS[src.dtype.name]
    if dst.dtype.name not in allowed:
        raise DTypeError(
            f"{operation}: cannot copy {src.dtype.name} into {dst.dtype.name} ({src_name}: {describe(src)}, "
            f"{dst_name}: {describe(dst)}). From {src.dtype.name} the destination may be: {', '.join(allowed)}."
        )


def same_dtype(a: ArrayView, b: ArrayView, a_name: str, b_name: str, operation: str) -> None:
    """Check that two arrays have the same dtype.

    Raises:
        DTypeError: they differ.
    """
    if a.dtype is not b.dtype:
        raise DTypeError(
            f"{operation}: {a_name} is {describe(a)} and {b_name} is {describe(b)}; both must have the same dtype."
        )


def scales(array: ArrayView, name: str, format: Format, operation: str) -> None:
    """Check that an array of scales or biases has one of the dtypes that the format allows.

    Raises:
        DTypeError: it has another.
    """
    if array.dtype not in format.scale_dtypes:
        offered = " or ".join(row.name for row in format.scale_dtypes)
        raise DTypeError(f"{operation}: {name} is {describe(array)}; scales of {format} must be {offered}.")


def extent(actual: int, expected: int, what: str, operation: str, detail: str = "", remedy: str = "") -> None:
    """Check that an axis has the expected length; `remedy` is a sentence that says what to do if it has not.

    Raises:
        ShapeError: it has another.
    """
    if actual != expected:
        raise ShapeError(
            f"{operation}: {what} is {actual} where {expected} is needed{f' ({detail})' if detail else ''}."
            + f" {remedy}" * bool(remedy)
        )


def indices(array: ArrayView, name: str, operation: str) -> None:
    """Check that an index array is int32 or int64 with a contiguous last axis.

    Raises:
        DTypeError: it has the wrong dtype.
    """
    if array.dtype not in dtypes.INDICES:
        raise DTypeError(f"{operation}: {name} is {describe(array)}; indices must be int32 or int64.")
    readable(array, name, operation)


def window_of(window: Any, capacity: int, operation: str) -> int | None:
    """The window as an int, checked to be at least one slot and at most the capacity; None for a linear cache.

    Raises:
        CapacityError: it is larger than the capacity.
        PositionError: it is less than one.
    """
    if window is None:
        return None
    window = integer(window, "window", operation, low=1)
    if window > capacity:
        raise CapacityError(
            f"{operation}: window={window} exceeds capacity={capacity}. "
            f"Use a window of at most {capacity}, or a larger cache."
        )
    return int(window)


class RangeNames(NamedTuple):
    """The caller's names for the numbers that say which rows go where, for messages."""

    position: str = "position"
    num_tokens: str = "num_tokens"
    src_offset: str = "src_offset"
    sliding: str = "window={}"  # how a cache of {} slots is made to slide
    after: str = ""  # a sentence that says how else to make room


RANGE_NAMES = RangeNames()
STORE_NAMES = RangeNames(after=" reset() forgets an earlier text.")


def fits_linear(position: int, tokens: int, capacity: int, operation: str, names: RangeNames = RANGE_NAMES) -> None:
    """Check that a linear cache has room for these tokens.

    Raises:
        CapacityError: it has not; nothing was written.
    """
    if position + tokens > capacity:
        raise CapacityError(
            f"{operation}: the linear cache is full ({names.position}={position} + {names.num_tokens}={tokens} > "
            f"capacity={capacity}). Use capacity >= {position + tokens}, or {names.sliding.format(capacity)} to keep "
            f"only the newest tokens.{names.after}"
        )


def source_range(
    src_offset: Any, num_tokens: Any, available: int, operation: str, names: RangeNames = RANGE_NAMES
) -> tuple[int, int]:
    """(offset, tokens) of the rows to copy, checked to be inside the source.

    Raises:
        PositionError: the range leaves the source.
    """
    offset = integer(src_offset, names.src_offset, operation)
    tokens = available - offset if num_tokens is None else integer(num_tokens, names.num_tokens, operation)
    if offset > available or offset + tokens > available:
        raise PositionError(
            f"{operation}: the source range {names.src_offset}={offset} + {names.num_tokens}={max(tokens, 0)} exceeds "
            f"the {available} tokens given. Copy at most {max(0, available - offset)} tokens from there."
        )
    return offset, tokens


def disjoint(named: Sequence[tuple[str, ArrayView, bool]], operation: str) -> None:
    """Check that no destination (a flagged array) shares an element with another array, or is known to be read-only.

    Raises:
        ShapeError: two arrays overlap, or the system would end the process at the first write.
    """
    places = [_place_of(array) for _, array, _ in named]
    for i, (name, array, is_destination) in enumerate(named):
        if not is_destination:
            continue
        if array.device == "cpu" and array.span and is_protected(array.ptr, array.span):
            raise ShapeError(
                f"{operation}: the destination {name} ({describe(array)}) is read-only memory, such as a file mapped "
                f"for reading. Pass a writable array, or a copy."
            )
        memory, start = places[i]
        end = start + array.span
        for j, (other_memory, other_start) in enumerate(places):
            if other_start >= end or memory is not other_memory or j == i:
                continue
            other = named[j][1]
            if start < other_start + other.span and _share_elements(array, start, other, other_start):
                first, second = (f"{named[n][0]} ({describe(named[n][1])})" for n in sorted((i, j)))
                raise ShapeError(
                    f"{operation}: {first} and {second} overlap in memory, and one of them is written. Pass arrays "
                    f"that share no element."
                )


def _place_of(array: ArrayView) -> tuple[Any, int]:
    """(memory, bytes): the object that holds an array, None for the address space; and its first element's offset."""
    if isinstance(array.owner, StagedNdarray):
        return array.owner.array, array.ptr - array.owner.host.ctypes.data
    return array.handle, array.ptr + array.offset


def _share_elements(a: ArrayView, a_start: int, b: ArrayView, b_start: int) -> bool:
    """Whether two strided arrays share a byte: exact, and computed from addresses, without touching the memory."""

    def shadow(array: ArrayView, start: int) -> np.ndarray[Any, Any]:
        itemsize = array.dtype.itemsize
        strides = [s * itemsize for s in array.strides]
        flat = host_bytes(start + ALIGNMENT, array.span)  # both are shifted, since NumPy takes no array at address 0
        return np.lib.stride_tricks.as_strided(flat, (*array.shape, itemsize), (*strides, 1))

    return bool(np.shares_memory(shadow(a, a_start), shadow(b, b_start)))


def addressable(array: ArrayView, word_bytes: int, live: runtime.Runtime, name: str, operation: str) -> None:
    """Check that the index of every word of an array fits the kernel's 32 bits.

    Raises:
        CapacityError: the array is too large for one launch on this arch.
    """
    end = array.offset + array.span
    limit, what = (2**32, "4 GiB") if live.is_spirv else (2**31 * word_bytes, f"2**31 words of {word_bytes} bytes")
    if end > limit:
        raise CapacityError(
            f"{operation}: {name} ({describe(array)}) spans {end} bytes, more than {what} that a launch on {live.arch} "
            f"addresses. Split the cache, for instance by layer or by sequence."
        )


MAX_ITERATIONS = 2**31 - 2**17  # 31 bits, less the stride that a loop adds past its last iteration


def countable(iterations: int, operation: str) -> None:
    """Check that the iterations of one launch can be counted in 32 bits.

    Raises:
        CapacityError: there are more.
    """
    if iterations > MAX_ITERATIONS:
        raise CapacityError(
            f"{operation}: {iterations} pieces of work (tokens x heads x words) are more than the {MAX_ITERATIONS} "
            f"that one launch counts. Split the call, for instance by tokens."
        )
