"""The twelve named copies as rows of one table, which tests, benches and `tikv variants` iterate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CopySpec:
    """One of the named copies: from which layout and dtype to which, and how it finds its slots.

    Attributes:
        name: its public name in `tikv.variants`.
        src_layout, cache_layout: "token_major" or "head_major".
        tokens: "many" takes (T, ...) rows, "one" a single token's (H, D).
        src_dtype, cache_dtype: storage dtypes.
        streams: 1 for K or V alone, 2 for both in one launch.
        mapping: "flag": linear, or a ring if `is_sliding`; "slot": the caller gives a slot; "ring": modulo capacity.
    """

    name: str
    src_layout: str
    cache_layout: str
    tokens: str
    src_dtype: str
    cache_dtype: str
    streams: int
    mapping: str

    @property
    def converts(self) -> bool:
        """Whether values change dtype on the way."""
        return self.src_dtype != self.cache_dtype


def _row(name: str, layouts: str, tokens: str, dtypes: str, streams: int, mapping: str) -> CopySpec:
    (src_layout, cache_layout), (src_dtype, cache_dtype) = layouts.split(">"), dtypes.split(">")
    return CopySpec(
        name, f"{src_layout}_major", f"{cache_layout}_major", tokens, src_dtype, cache_dtype, streams, mapping
    )


_F32, _F16, _BF16 = "float32>float32", "float32>float16", "bfloat16>bfloat16"

VARIANTS = {
    row.name: row
    for row in (
        _row("kv_cache_copy", "token>token", "many", _BF16, 1, "flag"),
        _row("kv_cache_copy_f32", "token>token", "many", _F32, 1, "flag"),
        _row("kv_cache_copy_batch_f32", "token>head", "one", _F32, 1, "slot"),
        _row("kv_cache_copy_batch_f32_to_f16", "token>head", "one", _F16, 1, "slot"),
        _row("kv_cache_copy_batch_f32_kv_dual", "token>head", "one", _F32, 2, "slot"),
        _row("kv_cache_copy_batch_f32_to_f16_kv_dual", "token>head", "one", _F16, 2, "slot"),
        _row("kv_cache_copy_seq_f32", "token>head", "many", _F32, 1, "ring"),
        _row("kv_cache_copy_seq_f32_to_f16", "token>head", "many", _F16, 1, "ring"),
        _row("kv_cache_copy_seq_bf16", "token>head", "many", "bfloat16>float32", 1, "ring"),
        _row("kv_cache_copy_seq_f32_dual", "token>head", "many", _F32, 2, "ring"),
        _row("kv_cache_copy_seq_f32_to_f16_dual", "token>head", "many", _F16, 2, "ring"),
        _row("kv_cache_copy_seq_bf16_to_bf16_head_major", "head>head", "many", _BF16, 1, "ring"),
    )
}
