"""Every argument of the peers' functions wrong in turn: one of our errors each time, and all memory as it was."""

import inspect

import numpy as np
import oracle
import pytest

import tikv
from tikv.compat import flash_attn, flash_attn_interface, flashinfer, vllm

F32 = np.float32


class Unreadable:
    """An object that is not an array."""


def rows(*shape):
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=F32).reshape(shape)


def starts(*values):
    return np.array(values, np.int32)


FLASH = {
    "q": rows(2, 1, 4, 16),
    "k_cache": rows(2, 8, 2, 16),
    "v_cache": rows(2, 8, 2, 16),
    "k": rows(2, 1, 2, 16),
    "v": rows(2, 1, 2, 16),
    "rotary_cos": rows(8, 4),
    "rotary_sin": rows(8, 4),
    "cache_seqlens": starts(3, 5),
    "cache_batch_idx": starts(1, 0),
    "cache_leftpad": starts(1, 0),
    "softmax_scale": 0.5,
    "causal": True,
    "window_size": (3, 0),
    "softcap": 2.0,
    "rotary_interleaved": True,
    "num_splits": 1,
    "return_softmax_lse": True,
}
RAGGED = FLASH | {
    "q": rows(3, 4, 16),
    "k": rows(2, 2, 16),
    "v": rows(2, 2, 16),
    "cu_seqlens_q": starts(0, 1, 3),
    "cu_seqlens_k_new": starts(0, 1, 2),
    "max_seqlen_q": 2,
    "rotary_seqlens": starts(3, 5),
    "attention_chunk": 4,
    "page_table": starts(0, 1).reshape(2, 1),
}
PAGES = {"kv_indices": starts(2, 0, 1), "kv_indptr": starts(0, 1, 3), "kv_last_page_len": starts(3, 2)}
STATE = {"v": rows(2, 2, 8), "s": rows(2, 2), "v_other": rows(2, 2, 8), "s_other": rows(2, 2)}
BLOCKS = {"block_table": starts(2, 0, 1, 2).reshape(2, 2), "cu_seq_lens": starts(0, 3, 5)}
ROWS = {
    "q": rows(3, 4, 16),
    "k": rows(5, 2, 16),
    "v": rows(5, 2, 16),
    "cu_seqlens_q": starts(0, 1, 3),
    "cu_seqlens_k": starts(0, 2, 5),
    "max_seqlen_q": 2,
    "max_seqlen_k": 3,
    "softmax_scale": 0.5,
    "causal": True,
    "window_size": (3, 0),
    "softcap": 2.0,
    "deterministic": False,
    "return_attn_probs": True,
}
DENSE = {name: value for name, value in ROWS.items() if "seqlen" not in name}
DENSE |= {name: rows(2, 3, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
OPTIONS = {name: value for name, value in DENSE.items() if name not in "qkv"} | {"dropout_p": 0.0}
CALLS = {
    "flash_attn_func": (flash_attn.flash_attn_func, DENSE | {"dropout_p": 0.0, "alibi_slopes": rows(4)}),
    "flash_attn_varlen_func": (flash_attn.flash_attn_varlen_func, ROWS | {"dropout_p": 0.0, "alibi_slopes": rows(4)}),
    "flash_attn_varlen_func of pages": (
        flash_attn.flash_attn_varlen_func,
        ROWS | {"k": rows(2, 4, 2, 16), "v": rows(2, 4, 2, 16), "block_table": starts(0, 1).reshape(2, 1)},
    ),
    "flash_attn_func 3": (flash_attn_interface.flash_attn_func, DENSE | {"num_splits": 1, "sm_margin": 0}),
    "flash_attn_varlen_func 3": (
        flash_attn_interface.flash_attn_varlen_func,
        ROWS | {"num_splits": 1, "pack_gqa": True, "seqused_k": starts(2, 1)},
    ),
    "flash_attn_func 3 with qv": (
        flash_attn_interface.flash_attn_func,
        DENSE | {"qv": rows(2, 3, 4, 16), "attention_chunk": 2},
    ),
    "flash_attn_varlen_func 3 with qv": (
        flash_attn_interface.flash_attn_varlen_func,
        ROWS | {"qv": rows(3, 4, 16), "attention_chunk": 2, "seqused_q": starts(1, 2)},
    ),
    "flash_attn_qkvpacked_func": (
        flash_attn.flash_attn_qkvpacked_func,
        OPTIONS | {"qkv": rows(2, 3, 3, 2, 16), "alibi_slopes": rows(2)},
    ),
    "flash_attn_varlen_kvpacked_func": (
        flash_attn.flash_attn_varlen_kvpacked_func,
        {name: value for name, value in ROWS.items() if name not in "kv"} | {"kv": rows(5, 2, 2, 16)},
    ),
    "flash_attn_qkvpacked_func 3": (
        flash_attn_interface.flash_attn_qkvpacked_func,
        {name: value for name, value in OPTIONS.items() if name != "dropout_p"}
        | {"qkv": rows(2, 3, 8, 16), "num_heads_q": 4, "sm_margin": 0},
    ),
    "flash_attn": (flash_attn.flash_attn_with_kvcache, FLASH | {"alibi_slopes": rows(4)}),
    "flash_attn of pages": (flash_attn.flash_attn_with_kvcache, FLASH | {"block_table": starts(0, 1).reshape(2, 1)}),
    "flash_attn 3": (flash_attn_interface.flash_attn_with_kvcache, RAGGED),
    "append_paged_kv_cache": (
        flashinfer.append_paged_kv_cache,
        {
            "append_key": rows(2, 1, 8),
            "append_value": rows(2, 1, 8),
            "batch_indices": starts(0, 1),
            "positions": starts(2, 4),
            "paged_kv_cache": (rows(3, 4, 1, 8), rows(3, 4, 1, 8)),
            **PAGES,
            "kv_layout": "NHD",
        },
    ),
    "append_paged_mla_kv_cache": (
        flashinfer.append_paged_mla_kv_cache,
        {
            "append_ckv": rows(2, 8),
            "append_kpe": rows(2, 4),
            "batch_indices": starts(0, 1),
            "positions": starts(2, 4),
            "ckv_cache": rows(3, 4, 8),
            "kpe_cache": rows(3, 4, 4),
            **PAGES,
        },
    ),
    "batch_decode": (
        flashinfer.batch_decode_with_paged_kv_cache,
        {
            "q": rows(2, 2, 2, 8),
            "paged_kv_cache": (rows(3, 4, 1, 8), rows(3, 4, 1, 8)),
            **{f"paged_{name}": a for name, a in PAGES.items()},
            "window_left": 3,
            "logits_soft_cap": 3.0,
            "sm_scale": 0.5,
            "q_scale": 2.0,
            "sinks": rows(2),
            "out": rows(2, 2, 2, 8),
        },
    ),
    "single_decode": (
        flashinfer.single_decode_with_kv_cache,
        {
            "q": rows(4, 16),
            "k": rows(5, 2, 16),
            "v": rows(5, 2, 16),
            "kv_layout": "NHD",
            "pos_encoding_mode": "ROPE_LLAMA",
            "use_tensor_cores": False,
            **dict.fromkeys(("q_scale", "k_scale", "v_scale", "rope_scale", "rope_theta", "sm_scale"), 2.0),
            "window_left": 3,
            "logits_soft_cap": 3.0,
            "return_lse": True,
        },
    ),
    "single_prefill": (
        flashinfer.single_prefill_with_kv_cache,
        {
            "q": rows(2, 4, 16),
            "k": rows(5, 2, 16),
            "v": rows(5, 2, 16),
            "custom_mask": np.ones((2, 5), bool),
            "causal": False,
            "kv_layout": "NHD",
            "pos_encoding_mode": "NONE",
            "sm_scale": 0.5,
            "window_left": 3,
            "logits_soft_cap": 3.0,
            "backend": "fa2",
            "return_lse": True,
        },
    ),
    "get_batch_indices_positions": (
        flashinfer.get_batch_indices_positions,
        {
            "append_indptr": starts(0, 1, 3),
            "seq_lens": starts(4, 2),
            "nnz": 3,
            "batch_indices": starts(9, 9, 9),
            "positions": starts(9, 9, 9),
        },
    ),
    "get_seq_lens": (
        flashinfer.get_seq_lens,
        {"kv_indptr": starts(0, 1, 3), "kv_last_page_len": starts(3, 2), "page_size": 4},
    ),
    "merge_state_in_place": (flashinfer.merge_state_in_place, STATE | {"mask": np.array([True, False])}),
    "merge_state": (
        flashinfer.merge_state,
        dict(zip(("v_a", "s_a", "v_b", "s_b"), STATE.values(), strict=True)),
    ),
    "merge_states": (flashinfer.merge_states, {"v": rows(2, 3, 2, 8), "s": rows(2, 3, 2)}),
    "reshape_and_cache_flash": (
        vllm.reshape_and_cache_flash,
        {
            "key": rows(2, 1, 8),
            "value": rows(2, 1, 8),
            "key_cache": rows(2, 4, 1, 8),
            "value_cache": rows(2, 4, 1, 8),
            "slot_mapping": starts(3, -1),
            "kv_cache_dtype": "auto",
        },
    ),
    "concat_and_cache_mla": (
        vllm.concat_and_cache_mla,
        {
            "kv_c": rows(2, 6),
            "k_pe": rows(2, 2),
            "kv_cache": rows(2, 4, 8),
            "slot_mapping": starts(3, -1),
            "kv_cache_dtype": "auto",
            "skip_scale": False,
        },
    ),
    "gather_and_maybe_dequant_cache": (
        vllm.gather_and_maybe_dequant_cache,
        {
            "src_cache": rows(3, 4, 8),
            "dst": rows(5, 8),
            **BLOCKS,
            "token_to_seq": starts(0, 0, 0, 1, 1),
            "num_tokens": 5,
            "kv_cache_dtype": "auto",
            "seq_starts": starts(1, 0),
        },
    ),
    "cp_gather_cache": (
        vllm.cp_gather_cache,
        {"src_cache": rows(3, 4, 8), "dst": rows(5, 8), **BLOCKS, "batch_size": 2, "seq_starts": starts(1, 0)},
    ),
    "copy_blocks": (
        vllm.copy_blocks,
        {
            "key_caches": [rows(3, 2, 1, 8), rows(3, 2, 1, 8)],
            "value_caches": [rows(3, 2, 1, 8), rows(3, 2, 1, 8)],
            "block_mapping": starts(0, 2).reshape(1, 2),
        },
    ),
    "swap_blocks": (
        vllm.swap_blocks,
        {
            "src": rows(3, 2, 1, 8),
            "dst": rows(3, 2, 1, 8),
            "block_size_in_bytes": 64,
            "block_mapping": starts(0, 2).reshape(1, 2),
        },
    ),
}
REQUIRED = {  # arguments that may not be None, beside those without a default
    "flash_attn 3": {"max_seqlen_q", "k", "v", "rotary_cos", "rotary_sin"},
    "flash_attn": {"k", "v", "rotary_cos", "rotary_sin"},
    "flash_attn of pages": {"k", "v", "rotary_cos", "rotary_sin"},
}
# Beyond what each kind of value may not be: of the values of index arrays, and of options.
OTHERS = {
    "cache_seqlens": [starts(3, 8), starts(-1, 5), starts(3), 99, -1, 1.5, True],
    "cache_batch_idx": [starts(0, 2), starts(-1, 0)],
    "cache_leftpad": [starts(9, 0), starts(-1, 0)],
    "block_table": [starts(0, 5).reshape(2, 1), starts(0, -1).reshape(2, 1)],
    "page_table": [starts(0, 5).reshape(2, 1)],
    "cu_seqlens_q": [starts(0, 1, 4), starts(1, 2, 3), starts(0, 2, 1), starts(0, 3), starts(), starts(0, 0, 3)],
    "cu_seqlens_k_new": [starts(0, 1, 3), starts(0, 2, 1), starts(0, 2)],
    "max_seqlen_q": [-1, 1, 1.5],
    "cu_seqlens_k": [starts(0, 1, 6), starts(1, 2, 3), starts(0, 2, 1), starts(0, 3), starts(), starts(0, 0, 4)],
    "max_seqlen_k": [-1, 1, 1.5],
    "seqused_q": [starts(2, 1), starts(-1, 1), starts(1)],
    "seqused_k": [starts(3, 1), starts(-1, 1), starts(1)],
    "dropout_p": [0.5, "x", float("nan")],
    "pack_gqa": [2],
    "sm_margin": [1, -1, 1.5],
    "rotary_seqlens": [starts(3, 99), starts(-1, 0)],
    "window_size": [(1,), (1, 2, 3), (1.0, 2.0), "ab", np.array([0.5, 1.0]), (True, False)],
    "softmax_scale": ["x", float("nan"), float("inf"), [1, 2]],
    "softcap": [-1.0, "x", float("nan")],
    "num_splits": [-1, 1.5, 9999],
    "attention_chunk": [-1, 1.5],
    "positions": [starts(2, 99)],
    "batch_indices": [starts(0, 7)],
    "kv_indices": [starts(2, 0), starts(9, 0, 1)],
    "paged_kv_indices": [starts(9, 0, 1), starts(2, 0)],
    "paged_kv_indptr": [starts(0, 1, 9), starts(0, 1), starts(0, 3, 1)],
    "paged_kv_last_page_len": [starts(3, 9), starts(3, 0), starts(3)],
    "paged_kv_cache": [(rows(3, 4, 1, 8),), rows(3, 4, 1, 8), (rows(3, 4, 1, 8), rows(2, 4, 1, 8)), (1, 2)],
    "logits_soft_cap": [-1.0, "x"],
    "sm_scale": ["x", float("nan")],
    "q_scale": ["x", float("nan")],
    "window_left": ["x", 1.5, None],
    "nnz": [-1, 1.5],
    "page_size": [0, -1, 1.5],
    "mask": [np.array([1, 0]), np.array([True])],
    "kv_layout": ["XYZ"],
    "kv_cache_dtype": ["fp8_ds_mla", "int4"],
    "slot_mapping": [starts(3, 99), starts(1, 2, 3)],
    "block_mapping": [starts(0, 9).reshape(1, 2), starts(0, 1, 0, 1).reshape(2, 2), starts(1, 2, 3)],
    "block_size_in_bytes": [63, 1.5, -64],
    "num_tokens": [-1, 6, 1.5],
    "batch_size": [-1, 3, 1.5],
    "token_to_seq": [starts(0, 0, 0, 1, 2), starts(0, 0, 0, 1, -1), starts(0, 1)],
    "cu_seq_lens": [starts(0, 3, 9), starts(0, 3), starts(0, 3, 2), starts(2, 3, 5)],
    "seq_starts": [starts(9, 0), starts(-9, 0), starts(1)],
    "key_caches": [[rows(3, 2, 1, 8)], [rows(3, 2, 1, 8), rows(2, 2, 1, 8)], [rows(3, 2, 1, 8), "x"], rows(3)],
    "value_caches": [[rows(3, 2, 1, 8), None], [rows(3, 2, 1, 8), rows(3)]],
}
# More rows than are read: padding, rows that no table names or no sequence has.
MORE = {
    "batch_indices", "block_table", "cu_seq_lens", "dst", "k_pe", "key", "kv_c", "kv_cache", "kv_indices", "kv_indptr",
    "page_table", "paged_kv_indices", "positions", "seq_starts", "src", "src_cache", "token_to_seq", "value",
}  # fmt: skip
# Calls whose `v` or `qkv` may be narrower.
NARROWER = {
    "single_prefill",
    "merge_states",
    *(name for name in CALLS if name.startswith("flash_attn_") and "func" in name),
}
MORE_OF_CALLS = {("flash_attn 3", "q"), ("flash_attn_varlen_func", "q"), ("flash_attn_varlen_func of pages", "q")}
MORE_OF_CALLS |= {("flash_attn_varlen_func 3", "q")}
MORE_OF_CALLS |= {("flash_attn_varlen_kvpacked_func", name) for name in ("q", "kv")}
MORE_OF_CALLS |= {(name, "qkv") for name in ("flash_attn_qkvpacked_func", "flash_attn_qkvpacked_func 3")}
UNREAD = {"kv_last_page_len": ("append_paged_kv_cache", "append_paged_mla_kv_cache")}  # page lengths follow from others
WRITTEN = {"k_cache", "v_cache", "out", "key_cache", "value_cache", "kv_cache", "dst", "ckv_cache", "kpe_cache"}
FILLED = {"batch_indices", "positions"}  # by `get_batch_indices_positions`


def wrong_values(call, name, value):
    """Values that this argument may not have: other kinds, dtypes, shapes; and those of `OTHERS`."""
    yield Unreadable()
    if isinstance(value, bool):
        yield from ("yes", 2, np.array([True, False]))
    if value is not None and not isinstance(value, str):
        yield "x"
    if isinstance(value, np.ndarray):
        yield value.astype(np.complex64)
        yield value[None]
        yield value[..., 0] if value.ndim > 1 else value.reshape(-1, 1)
        if name not in MORE and (call, name) not in MORE_OF_CALLS:
            yield np.concatenate([value, value[:1]])  # one more along the first axis
        if value.dtype == F32:
            yield value.astype(np.int32)
            yield value.astype(np.float64)
            if value.ndim > 1 and not (name in ("v", "qkv") and call in NARROWER):
                yield value[..., :-1]
        else:
            yield value.astype(F32)
            yield value.astype(np.int32) if value.dtype == bool else value > 0
        if name in WRITTEN or (name in FILLED and call == "get_batch_indices_positions"):
            locked = value.copy()
            locked.flags.writeable = False
            yield locked
    yield from OTHERS.get(name, ())


def cases():
    for name, (function, given) in CALLS.items():
        parameters = inspect.signature(function).parameters
        for argument in given:
            if name not in UNREAD.get(argument, ()):
                yield pytest.param(name, argument, parameters[argument].default, id=f"{name}-{argument}")


def copies(value):
    """The argument with memory of its own, and what of it may be written."""
    if isinstance(value, np.ndarray):
        found = value.copy()
        found.flags.writeable = value.flags.writeable
        return found
    if isinstance(value, tuple | list) and any(isinstance(a, np.ndarray) for a in value):
        return type(value)(copies(a) for a in value)
    return value


def arrays_of(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple | list):
        return [a for each in value for a in arrays_of(each)]
    return []


LAYER = {"q": rows(2, 4, 16), "k": rows(2, 2, 16), "v": rows(2, 2, 16), "layout": "token_major", "window": 3}
LAYER |= {"scale": 0.5, "softcap": 2.0, "sink_logits": rows(4), "mass_queries": 1}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("argument", LAYER)
def test_a_layer_that_refuses_is_as_it_was(arch, kind, argument):
    """`extend` of the layers writes, counts and attends: keys, values and `len` after each call that it refuses."""
    if kind == "contiguous":
        layer = tikv.ContiguousKVLayer(8, 2, 16, dtype="float32")
    else:
        layer = tikv.PagedKVLayer(2, 4, 2, 16, dtype="float32")
        layer.paged_block_indices = [1, 0]
    layer.extend(**LAYER, return_mass=True)
    memory = layer if kind == "contiguous" else layer.pool
    before = [oracle.to_numpy(a).copy() for a in (memory.keys, memory.values)]
    wrong = list(wrong_values("extend", argument, LAYER[argument]))
    wrong += {"mass_queries": [-1, 1.5], "window": [0, -1, 1.5], "scale": [float("nan")], "softcap": [-1.0]}.get(
        argument, []
    )
    for value in wrong:
        with pytest.raises(tikv.TikvError):
            layer.extend(**LAYER | {argument: value}, return_mass=True)
        assert len(layer) == 2
        for array, then in zip((memory.keys, memory.values), before, strict=True):
            oracle.assert_same_bits(array, then, what=f"{argument}={value!r}")


@pytest.mark.archs("cpu", "vulkan")
@pytest.mark.parametrize("name", CALLS)
def test_the_call_itself_is_right(arch, name):
    """What the others change one argument of is taken."""
    function, given = CALLS[name]
    function(**{argument: copies(value) for argument, value in given.items()})


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("name", "argument", "default"), [*cases()])
def test_a_wrong_argument_is_refused_and_nothing_written(arch, name, argument, default):
    function, given = CALLS[name]
    missing = argument in REQUIRED.get(name, ()) or default is inspect.Parameter.empty
    values = list(wrong_values(name, argument, given[argument])) + ([None] if missing else [])
    taken = []
    for value in values:
        call = {key: copies(each) for key, each in given.items()} | {argument: copies(value)}
        before = {key: copies(each) for key, each in call.items()}
        try:
            function(**call)
        except tikv.TikvError:
            pass
        except Exception as error:
            raise AssertionError(f"{argument}={value!r}: {type(error).__name__}: {error}") from error
        else:
            taken.append(value)
            continue
        for key, each in call.items():
            for now, then in zip(arrays_of(each), arrays_of(before[key]), strict=True):
                oracle.assert_same_bits(now, then, what=f"{key} after {argument}={value!r}")
    shown = [f"{type(v).__name__} {getattr(v, 'dtype', '')} {getattr(v, 'shape', v)}" for v in taken]
    assert not taken, shown
