"""The forms of calls whose kernels are made beforehand: what models do with stores and with pools."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tikv.errors import OptionError
from tikv.formats import Quant
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.store import KVCacheStore
from tikv.tools import warmup

OPERATION = "kernels build"
STORED = ("same", "int8", "float8_e4m3fn", "quant4_32", "quant4_64")  # the dtype of queries, or a format
TOKENS = {"token": 1, "few": 4, "prompt": 512}
KV_HEADS = 8  # compiled into kernels that copy rows, and into those of prompts on compute capability 9.0
CAPACITY = 16384  # of a store, and of a pool: longer ones need no other kernels


class KernelForm(NamedTuple):
    """Calls of one kind: on a store or a pool, with queries of a dtype over rows of a format, and so many new tokens.

    `group` is the number of query heads per KV head.
    """

    holder: str
    queries: str
    stored: str
    head_dim: int
    group: int
    tokens: str

    @property
    def name(self) -> str:
        """Its name for `--only`."""
        return f"{self.holder}-{self.queries}-{self.stored}-d{self.head_dim}-g{self.group}-{self.tokens}"

    def call(self) -> None:
        """Make the calls, on an empty store or pool."""
        stored: str | Quant = self.queries if self.stored == "same" else self.stored
        if self.stored.startswith("quant"):
            bits, group = self.stored.removeprefix("quant").split("_")
            stored = Quant(int(bits), int(group))
        holders: list[KVCacheStore | PagedKVCacheStore]
        if self.holder == "store":
            form: dict[str, Any] = {
                "num_layers": 1,
                "num_kv_heads": KV_HEADS,
                "head_dim": self.head_dim,
                "dtype": stored,
            }
            # A batch is copied by another kernel; how many sequences it has, and the capacity, change nothing.
            holders = [KVCacheStore(**form, capacity=CAPACITY // n, batch_size=n) for n in (1, 4)]
        else:
            holders = [
                PagedKVCacheStore(
                    num_layers=1,
                    num_blocks=CAPACITY // 16,
                    block_size=16,
                    num_kv_heads=KV_HEADS,
                    head_dim=self.head_dim,
                    dtype=stored,
                )
            ]
        for holder in holders:
            warmup.warmup(
                holder,
                query_heads=KV_HEADS * self.group,
                tokens=TOKENS[self.tokens],
                formats=self.queries,
                quiet=True,
            )


FORMS = tuple(
    KernelForm(*values)
    for values in itertools.product(
        ("store", "pool"), ("bfloat16", "float16"), STORED, (64, 128, 256), (1, 4, 8), TOKENS
    )
)


def chosen(patterns: Sequence[str] = ()) -> list[KernelForm]:
    """The forms whose names match any of these patterns; all, if there are no patterns.

    Raises:
        OptionError: a pattern matches no form.
    """
    names = [form.name for form in FORMS]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise OptionError(
                f"{OPERATION}: --only {pattern!r} matches no form. A form is, for example, {names[0]!r}; `*` stands "
                "for any text."
            )
    return [form for form in FORMS if not patterns or any(fnmatch.fnmatchcase(form.name, p) for p in patterns)]
