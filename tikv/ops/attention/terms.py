"""What a caller adds to the scores beside q.k: sink logits and ALiBi's slopes, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tikv import dtypes, runtime
from tikv.arrays import ArrayView, describe, view
from tikv.errors import DTypeError, OptionError, ShapeError
from tikv.ops import checks


class Terms(NamedTuple):
    """The arrays as a caller gave them; None for those that it did not."""

    sink_logits: Any = None
    alibi_slopes: Any = None

    def views(self, operation: str) -> dict[str, ArrayView]:
        """A view of each array that was given, by its name."""
        given = zip(self._fields, self, strict=True)
        return {name: view(array, name, operation) for name, array in given if array is not None}

    def part(self, first: int, end: int) -> Terms:
        """The terms, which are views, of sequences `first` to `end`."""
        slopes = self.alibi_slopes
        return self._replace(alibi_slopes=slopes.part(0, first, end)) if slopes and slopes.ndim == 2 else self


NO_TERMS = Terms()


def check_terms(
    operation: str, arrays: Mapping[str, ArrayView], batch: int, heads: int, mass: bool, live: runtime.Runtime
) -> None:
    """The terms among the arrays fit so many sequences and query heads.

    Raises:
        ShapeError, DTypeError, ArchError, OptionError: one does not.
    """
    fitting: dict[str, tuple[str, list[tuple[int, ...]]]] = {
        "sink_logits": ("(Hq,)", [(heads,)]),
        "alibi_slopes": ("(Hq,) or (B, Hq)", [(heads,), (batch, heads)]),
    }
    for name, (axes, shapes) in fitting.items():
        a = arrays.get(name)
        if a is None:
            continue
        checks.on_device([(name, a)], live, operation)
        if a.dtype is not dtypes.float32:
            raise DTypeError(f"{operation}: {name} is {describe(a)}; it is float32.")
        if mass and name == "alibi_slopes":
            raise OptionError(f"{operation}: return_mass counts no alibi_slopes. Ask for one of the two.")
        if a.shape not in shapes:
            needed = " or ".join(map(str, shapes))
            raise ShapeError(f"{operation}: {name} is {describe(a)} where {axes} = {needed} is needed.")


def term_numbers(arrays: dict[str, ArrayView]) -> tuple[int, ...]:
    """Where the terms lie, as `AttentionTerms`."""
    from tikv.kernels.attention.parameters import AttentionTerms

    sinks, slopes = arrays.get("sink_logits"), arrays.get("alibi_slopes")
    found = AttentionTerms()
    if sinks is not None:
        found = found._replace(sink_head=sinks.strides[0], sink_first=sinks.offset // 4)
    if slopes is not None:
        sequence = slopes.strides[0] if slopes.ndim == 2 else 0
        found = found._replace(slope_sequence=sequence, slope_head=slopes.strides[-1], slope_first=slopes.offset // 4)
    return tuple(found)
