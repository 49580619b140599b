"""The arguments of `tikv.warmup`, and the calls that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tikv import dtypes
from tikv.dtypes import DType
from tikv.errors import OptionError, ShapeError
from tikv.ops import checks

OPERATION = "warmup"
QUERIES = ("float32", "float16", "bfloat16")  # dtypes of queries
FEW = 8  # up to so many new tokens are tried at all lengths: a prompt's time grows with the tokens held


class Asked(NamedTuple):
    """What the caller wants to compile, checked."""

    query_heads: int | None
    tokens: list[int]
    formats: list[DType] | None
    steps: bool

    @classmethod
    def checked(cls, query_heads: Any, tokens: Any, formats: Any, steps: Any) -> Asked:
        """Check a caller's arguments."""
        if query_heads is not None:
            query_heads = checks.integer(query_heads, "query_heads", OPERATION, low=1)
        numbers = list(tokens) if isinstance(tokens, (list, tuple, range)) else [tokens]
        if not numbers:
            raise OptionError(
                f"{OPERATION}: tokens={tokens!r} is empty. Pass one number of new tokens, or several numbers."
            )
        numbers = [checks.integer(n, "tokens", OPERATION, low=1) for n in numbers]
        names = list(formats) if isinstance(formats, (list, tuple)) else None if formats is None else [formats]
        parsed = names and [dtypes.parse(name, OPERATION) for name in names]
        for dtype in parsed or ():
            checks.option(dtype.name, "formats", OPERATION, QUERIES)
        return cls(query_heads, sorted(set(numbers), reverse=True), parsed or None, bool(steps))

    def formats_of(self, stored: Any) -> list[DType]:
        """The dtypes of queries, keys and values for a store of this dtype."""
        return self.formats or [stored if getattr(stored, "name", None) in QUERIES else dtypes.float32]

    def heads_over(self, kv_heads: int) -> int:
        """The number of query heads for so many KV heads."""
        if self.query_heads is None:
            raise OptionError(f"{OPERATION}: query_heads is missing. Pass the number of heads of the model's queries.")
        if self.query_heads % kv_heads:
            raise ShapeError(
                f"{OPERATION}: query_heads={self.query_heads} cannot be divided evenly among {kv_heads} KV heads. "
                "Use a multiple."
            )
        return self.query_heads


class Job(NamedTuple):
    """Calls that compile some kernels, and a title that says which, for the progress that is shown."""

    title: str
    run: Callable[[], None]


def require_empty(target: Any, held: int, what: str = "tokens") -> None:
    """Refuse a store that holds something.

    Raises:
        OptionError: it does.
    """
    if held:
        raise OptionError(
            f"{OPERATION}: the {type(target).__name__} holds {held} {what}, and warmup writes to it. Warm up "
            "before the first token, or pass another one of the same form."
        )


def lengths_held(tokens: int, most: int, windows: Sequence[int] = ()) -> list[int]:
    """Numbers of tokens held, up to `most`, at which calls with `tokens` new ones may need different kernels."""
    usual = [0, 1, 64, *(4**n for n in range(4, 16))]
    around = [n for window in windows for n in (window - 1, window, 2 * window)]
    lengths = sorted({n for n in (*usual, *around, most) if 0 <= n <= most})
    return lengths if tokens <= FEW else [n for n in lengths if n <= 64 or n in around]


def title_of(dtype: DType, tokens: int, held: int, window: int | None = None) -> str:
    """A description of a call, for people who wait."""
    slides = f" in a window of {window}" if window else ""
    return f"{dtype.name}, {tokens} new token{'s' * (tokens != 1)} after {held}{slides}"
