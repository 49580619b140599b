"""The forms of calls whose kernels are made beforehand: what models do with stores, with pools and with a `TikvCache`.

The layers of a `TikvCache` call operations that need no torch. `cache` makes these calls in the same order.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tikv import runtime
from tikv.arrays import ArrayView, CacheArray, new_array
from tikv.dtypes import DType, int32, int64, parse
from tikv.errors import OptionError
from tikv.formats import Quant
from tikv.ops.append_at import append_at
from tikv.ops.attention.call import Caches, attention_call
from tikv.ops.attention.contiguous import CONTIGUOUS
from tikv.ops.attention.request import AttendRequest
from tikv.stores.layers.growing import GrowingLayer
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.store import KVCacheStore
from tikv.tools import warmup
from tikv.tools.kernels.stand_in import OPERATION

STORED = ("same", "int8", "float8_e4m3fn", "quant4_32", "quant4_64")  # the dtype of queries, or a format
TOKENS = {"token": 1, "few": 4, "prompt": 512}
KV_HEADS = 8  # compiled into kernels that copy rows, and into those of prompts on compute capability 9.0
CAPACITY = 16384  # of a store, and of a pool: longer ones need no other kernels
PROMPTS = (64, 512, 4096)  # new tokens after others
CAPACITIES = (256, 1024, 4096, CAPACITY)  # of a layer: how many slots it has decides how attention is shared out


class KernelForm(NamedTuple):
    """Calls of one kind: of a holder, with queries of a dtype over rows of a format, and so many new tokens.

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
        """Make the calls, on an empty store, pool or layer."""
        stored: str | Quant = self.queries if self.stored == "same" else self.stored
        if self.stored.startswith("quant"):
            bits, group = self.stored.removeprefix("quant").split("_")
            stored = Quant(int(bits), int(group))
        if self.holder == "cache":
            for batch, capacity in itertools.product((1, 4), CAPACITIES):
                call_as_cache(self, stored, batch, capacity)
            return
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


def call_as_cache(form: KernelForm, stored: str | Quant, batch: int, capacity: int) -> None:
    """What a layer of a `TikvCache` and attention "tikv" do with new tokens, if the layer has so many slots."""
    live, dtype, tokens = runtime.current(), parse(form.queries, OPERATION), TOKENS[form.tokens]

    def array(dtype: DType, *shape: int) -> ArrayView:
        return new_array(shape, dtype, live, zeroed=True)

    def rows(n: int, heads: int) -> CacheArray:
        """(batch, heads, n, head_dim), transposed as models give them."""
        made = array(dtype, batch, n, heads, form.head_dim)
        a, b, c, d = made.strides
        return CacheArray(made.restrided((batch, heads, n, form.head_dim), (a, c, b, d)), live)

    def attend(q: CacheArray, caches: Caches) -> None:
        attention_call(OPERATION, q, caches, AttendRequest(causal=True)).attend(q, impl="auto")

    k, width = rows(tokens, KV_HEADS), form.head_dim
    layer = GrowingLayer(
        num_kv_heads=KV_HEADS, head_dim=width, capacity=max(tokens, capacity // 2), batch_size=batch,
        dtype=stored, v_dtype=stored,
    )  # fmt: skip
    layer.append(k, k)
    layer.make_room(capacity=max(2 * tokens, capacity))
    layer.append(k, k)
    if form.stored != "same":
        layer.decoded(0, dtype)
    if tokens > 1:  # torch serves the first prompt, and later ones unless warpgroups do
        numbers = layer.keys if form.stored == "same" else CacheArray(array(dtype, *layer.keys.shape[:3], width), live)
        for n in [tokens] if tokens < min(PROMPTS) else [n for n in PROMPTS if n < layer.capacity]:
            q = rows(n, KV_HEADS * form.group)
            caches = Caches(CONTIGUOUS, numbers, numbers, layer.capacity)
            if attention_call(OPERATION, q, caches, AttendRequest(causal=True)).plan.family.in_warpgroups:
                attend(q, caches)
        return
    q = rows(1, KV_HEADS * form.group)
    stored_as = Caches(CONTIGUOUS, layer.keys, layer.values, 0, None, *layer.scales, formats=layer.rows.formats)
    for integers in (int32, int64):  # lengths of a call, and those of a step that is compiled or captured
        attend(q, stored_as._replace(lens=CacheArray(array(integers, batch), live)))
    where = CacheArray(array(int64, batch), live)
    append_at(OPERATION, (k, k), (layer.keys, layer.values), layer.scales, where, formats=layer.rows.formats)


FORMS = tuple(
    KernelForm(*values)
    for values in itertools.product(
        ("store", "pool", "cache"), ("bfloat16", "float16"), STORED, (64, 128, 256), (1, 4, 8), TOKENS
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
