"""What turns products of queries and keys into scores, and weighted values into results, in FlashInfer's words."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tikv import dtypes
from tikv.arrays import Array, CacheArray, view, write_host
from tikv.compat.indices import flag, library_of, refuse_option
from tikv.compat.kvcache import Sight
from tikv.compat.ragged_rows import rotated, wide
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks
from tikv.ops.attention.options import real
from tikv.ops.quantized_arrays import Quantized

SCALED = (*dtypes.FLOATS8, dtypes.int8)  # dtypes of pools whose scales attention multiplies by as it reads
MODES = ("NONE", "ROPE_LLAMA", "ALIBI")
ROPE_THETA = 1e4  # FlashInfer's, if none is passed


class Scores(NamedTuple):
    """The options of a plan that say how scores are made, and which keys a query sees; checked by `scores_of`."""

    mode: str
    sight: Sight
    softcap: float | None
    scale: float | None  # None: by the head width
    rope_scale: float
    rope_theta: float


class Scales(NamedTuple):
    """The scales of one run: of the scores, None for that of the head width; of codes; and of the result."""

    scale: float | None
    of_codes: dict[str, Any]
    of_result: float | None


def scores_of(
    operation: str, mode: Any, window_left: Any, causal: Any, softcap: Any, scale: Any, rope: tuple[Any, Any]
) -> Scores:
    """The options of a plan, checked; `rope` is (rope_scale, rope_theta).

    Raises:
        OptionError: one is not a number or a mode, or FlashInfer defines two of them together in a way of its own.
    """
    if not isinstance(mode, str) or mode not in MODES:
        refuse_option(operation, pos_encoding_mode=(mode, "'NONE', 'ROPE_LLAMA' or 'ALIBI'"))
    before = checks.integer(window_left, "window_left", operation, low=-1)
    right = 0 if flag(causal, "causal", operation) else -1
    cap = real(softcap, "logits_soft_cap", operation) or None
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        refuse_option(operation, logits_soft_cap=(softcap, "None, 0 or a positive number"))
    if cap is not None and mode == "ALIBI":
        raise OptionError(
            f"{operation}: logits_soft_cap={softcap} with pos_encoding_mode='ALIBI' is not supported. Pass one of them."
        )
    numbers = []
    for name, value, default in zip(("rope_scale", "rope_theta"), rope, (1.0, ROPE_THETA), strict=True):
        number = real(value, name, operation)
        if number is not None and not (math.isfinite(number) and number > 0):
            refuse_option(operation, **{name: (value, "None or a positive number")})
        numbers.append(default if number is None else number)
    return Scores(mode, Sight(before, right, 0), cap, finite(real(scale, "sm_scale", operation), "sm_scale", operation),
                  *numbers)  # fmt: skip


def scales_of(
    operation: str, pools: tuple[Any, Any], width: int, scale: float | None, by_name: dict[str, Any],
    read_scales: bool = True,
) -> Scales:  # fmt: skip
    """How `q_scale`, `k_scale` and `v_scale` enter attention over these pools, or views of keys and values.

    Codes and 8-bit floats are multiplied as they are read if `read_scales`; otherwise, and in wider dtypes, the scores
    and the result are.

    Raises:
        OptionError: a scale is not a number, or not finite.
    """
    k_scale, v_scale, of_codes, of_result = by_name.get("k_scale"), by_name.get("v_scale"), dict[str, Any](), None
    of_scores = [real(by_name.get("q_scale"), "q_scale", operation)]
    if read_scales and all(not isinstance(pool, Quantized) and pool.dtype in SCALED for pool in pools):
        if k_scale is not None or v_scale is not None:
            of_codes = {"k_scale": 1.0 if k_scale is None else k_scale, "v_scale": 1.0 if v_scale is None else v_scale}
    else:
        of_scores.append(real(k_scale, "k_scale", operation))  # nvfp4's scale of all keys too
        of_result = finite(real(v_scale, "v_scale", operation), "v_scale", operation)
    for factor in of_scores:
        if factor is not None:
            scale = (width**-0.5 if scale is None else scale) * factor
    return Scales(scale, of_codes, of_result)


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """(heads,) float32: the slopes of ALiBi, powers of two; beyond a power of two, heads take those between."""
    n = 2 ** int(math.log2(max(1, heads)))
    exponents = [-8 * (i + 1) / n for i in range(n)] + [-4 * (2 * i + 1) / n for i in range(heads - n)]
    return np.exp2(exponents).astype(np.float32)


def turns_of(scores: Scores, width: int) -> np.ndarray[Any, Any]:
    """(width / 2,) float64: the angles by which ROPE_LLAMA turns pairs (i, i + width / 2), from token to token."""
    pairs = width // 2
    turns: np.ndarray[Any, Any] = scores.rope_theta ** (-np.arange(pairs) / max(1, pairs)) / scores.rope_scale
    return turns


def rotated_rows(x: Array, positions: Array, turns: Array) -> Array:
    """Rows x (n, H, D) at positions (n,), rotated by `turns_of`; float32, with angles in float64."""
    library = library_of(x)
    if library is np:
        angles = np.asarray(positions, np.float64)[:, None] * turns
        rows = np.arange(len(angles))
        tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    else:
        angles = library.as_tensor(positions, device=x.device).to(library.float64)[:, None]
        angles = angles * library.as_tensor(turns, device=x.device)
        rows = library.arange(angles.shape[0], device=x.device)
        tables = angles.cos().float(), angles.sin().float()
    return rotated(wide(x), rows, *tables, False)


def check_rotated(width: int, operation: str) -> None:
    """Check that rows of this width have pairs.

    Raises:
        ShapeError: they have not.
    """
    if width % 2:
        raise ShapeError(f"{operation}: pos_encoding_mode='ROPE_LLAMA' needs an even head width, and it is {width}.")


def finite(number: float | None, name: str, operation: str) -> float | None:
    """The number, or None.

    Raises:
        OptionError: it is not finite.
    """
    if number is not None and not math.isfinite(number):
        raise OptionError(f"{operation}: {name}={number} is not a finite number.")
    return number


def multiplied(result: Any, factor: float | None) -> Any:
    """The result times a number, rounded to its dtype: in place, unless its library's arrays are immutable."""
    if factor is None or factor == 1.0:
        return result
    if isinstance(result, CacheArray):
        seen = view(result, "out", "multiply")
        write_host(multiplied(result.copy_to_host(), factor), seen)
    elif isinstance(result, np.ndarray):
        result[...] = (result.astype(np.float32) * np.float32(factor)).astype(result.dtype)
    elif library_of(result) is not np:
        result.detach().mul_(factor)
    else:
        result = result * factor
    return result
