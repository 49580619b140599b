"""NormRope: the RMS norm and the rotation of Q and K before they are stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import Array, ArrayView, describe, read_host, to_device, view
from tikv.errors import DTypeError, OptionError, PositionError, ShapeError
from tikv.ops import checks

# mode: (how pairs lie, whether a norm comes first)
MODES = {
    "none": ("", False),
    "norm_half": ("half", True),
    "half": ("half", False),
    "interleaved": ("interleaved", False),
    "norm_interleaved": ("interleaved", True),
}


class Transform(NamedTuple):
    """How pairs lie, the number of rotated elements and the norm's epsilon: see `kernels.write_qkv.NormRopeChoices`."""

    pairs: str
    rope_dim: int
    eps: float | None


@dataclass(frozen=True, eq=False)
class NormRope:
    """The transform of Q and K before they are stored: an RMS norm over the head width, and a rotation (RoPE).

    In float32: ``x_i * (w_i / sqrt(mean(x**2) + eps))``. Then pair ``j`` at position ``p``, ``(a, b)``, becomes
    ``(a * cos[p, j] - b * sin[p, j], b * cos[p, j] + a * sin[p, j])``. Elements from ``rope_dim`` on are normalised but
    not rotated. Each product, sum, quotient and root is rounded on its own, and squares are added in a fixed order
    (`tikv.reference.sum_of_squares`), so every back end and launcher gives the same bits. On a device that flushes
    subnormals, squares below 1e-38 count as zero, which matters if ``eps`` is about as small.

    Args:
        mode: "none"; "half" rotates pairs (j, j + rope_dim / 2), "interleaved" pairs (2j, 2j + 1); "norm_half" and
            "norm_interleaved" normalise first.
        eps: added to the mean of squares.
        q_weight, k_weight: (D,) float32 weights of the norm; None for 1.
        cos, sin: (positions, rope_dim / 2) float32 tables; a row for each position.
        rope_dim: elements rotated, even, at most D; None for all D.

    The arrays are read in place at every use; do not resize them. If a device cannot see them, they are copied to it
    once, and later changes have no effect.

    Raises:
        OptionError: an unknown mode; an array that the mode does not use, or a missing one that it needs.
        ShapeError, DTypeError: arrays of the wrong shape or dtype; an odd ``rope_dim``.
        PositionError: a negative ``eps``.

    Source: ``split_qkv_norm_rope_into_paged_cache`` with ``qk_mode`` 0 to 3, and its partial-rotary form with
        ``qk_mode`` 3.

    Examples:
        >>> import numpy as np, tikv
        >>> angle = np.arange(16, dtype=np.float32)[:, None] / 10.0 ** np.arange(2, dtype=np.float32)
        >>> tikv.NormRope(mode="half", cos=np.cos(angle), sin=np.sin(angle)).max_positions
        16
    """

    mode: str = "norm_half"
    eps: float = 1e-6
    q_weight: Array | None = None
    k_weight: Array | None = None
    cos: Array | None = None
    sin: Array | None = None
    rope_dim: int | None = None
    _in_runtime: dict[tuple[int, str], Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        operation = "NormRope"
        checks.option(self.mode, "mode", operation, tuple(MODES))
        pairs, normed = MODES[self.mode]
        if normed and not 0 <= self.eps < float("inf"):
            raise PositionError(f"{operation}: eps={self.eps} is not a small number. Use one such as 1e-6.")
        used = {"cos": pairs != "", "sin": pairs != "", "q_weight": normed, "k_weight": normed}
        for name, needed in used.items():
            present = getattr(self, name) is not None
            if needed and not present and not name.endswith("weight"):
                raise OptionError(
                    f"{operation}: mode {self.mode!r} needs {name}. Pass (positions, rope_dim / 2) float32."
                )
            if present and not needed:
                raise OptionError(
                    f"{operation}: mode {self.mode!r} does not use {name}. Leave it out or change the mode."
                )
        views = self._views(operation)
        for name, axes in (("cos", 2), ("sin", 2), ("q_weight", 1), ("k_weight", 1)):
            array = views.get(name)
            if array is not None:
                checks.rank(array, (axes,), name, "(positions, rope_dim / 2)" if axes == 2 else "(D,)", operation)
                checks.readable(array, name, operation)
                if array.dtype is not dtypes.float32:
                    raise DTypeError(
                        f"{operation}: {name} is {describe(array)}; it must be float32, as the arithmetic is."
                    )
        if pairs and views["cos"].shape != views["sin"].shape:
            raise ShapeError(
                f"{operation}: cos is {describe(views['cos'])} and sin {describe(views['sin'])}; both must have "
                "the same shape."
            )
        if self.rope_dim is not None:
            rope_dim = checks.integer(self.rope_dim, "rope_dim", operation, low=2)
            if not pairs:
                raise OptionError(f"{operation}: mode {self.mode!r} does not rotate; leave rope_dim={rope_dim} out.")
            if rope_dim % 2:
                raise ShapeError(f"{operation}: rope_dim={rope_dim} is odd; a rotation needs pairs. Use an even one.")

    def __reduce__(self) -> Any:  # without `_in_runtime`, which views this object's arrays
        return NormRope, (self.mode, self.eps, self.q_weight, self.k_weight, self.cos, self.sin, self.rope_dim)

    @property
    def max_positions(self) -> int:
        """The number of positions that can be rotated, which is the tables' number of rows; 0 without tables."""
        return 0 if self.cos is None else int(self._views("NormRope")["cos"].shape[0])

    def _views(self, operation: str) -> dict[str, ArrayView]:
        names = ("cos", "sin", "q_weight", "k_weight")
        return {n: view(getattr(self, n), n, operation) for n in names if getattr(self, n) is not None}

    def tables_in(self, live: runtime.Runtime, operation: str) -> tuple[tuple[Any, ...], dict[str, ArrayView]]:
        """(the key of a launch, the arrays where the device sees them), kept for the live runtime."""
        entry = self._in_runtime.get((live.epoch, live.device))
        if entry is None:
            arrays = self._views(operation)
            checks.on_device(list(arrays.items()), live, operation)
            if not live.is_cpu:
                arrays = {n: to_device(read_host(a, live), live) if a.is_staged else a for n, a in arrays.items()}
            form = (self.mode, self.eps, self.rope_dim, *[(n, a.key) for n, a in arrays.items()])
            for epoch, device in [*self._in_runtime]:
                if epoch != live.epoch:
                    del self._in_runtime[epoch, device]
            entry = self._in_runtime[live.epoch, live.device] = (form, arrays)
        return entry

    def transform_of(self, width: int, operation: str) -> Transform:
        """The transform of rows of `width`; also checks the arrays against that width."""
        pairs, normed = MODES[self.mode]
        eps = float(self.eps) if normed else None
        arrays = self._views(operation)
        for name in ("q_weight", "k_weight"):
            if name in arrays:
                checks.extent(arrays[name].shape[0], width, f"the length of {name}", operation, f"head_dim={width}")
        if not pairs:
            return Transform(pairs, 0, eps)
        if width % 2:
            raise ShapeError(
                f"{operation}: head_dim={width} is odd, and mode {self.mode!r} rotates pairs. "
                f"Use an even head_dim or mode 'none'."
            )
        rope_dim = width if self.rope_dim is None else int(self.rope_dim)
        if rope_dim > width:
            raise ShapeError(f"{operation}: rope_dim={rope_dim} exceeds head_dim={width}. Use at most {width}.")
        detail = f"rope_dim={rope_dim}, cos: {describe(arrays['cos'])}"
        checks.extent(arrays["cos"].shape[1], rope_dim // 2, "the number of columns of cos and sin", operation, detail)
        return Transform(pairs, rope_dim, eps)


UNCHANGED = NormRope(mode="none")
