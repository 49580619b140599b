"""Each argument of the functions that write into arrays wrong in turn: a `TikvError`, and all arrays are as before."""

import numpy as np
import oracle
import pytest
from wrong_arguments import (
    FLAG,
    HEADS,
    NO_ARRAY,
    NO_INTEGER,
    NO_LAYOUT,
    NO_NUMBER,
    Q_HEADS,
    WIDTH,
    Scene,
    but,
    destination,
    index,
    integers,
    problems_of,
    rows,
)

import tikv

TOKENS = 3
INT32 = np.int32


def some(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def placed(arch, *arrays):
    return tuple(oracle.place(a, arch) for a in arrays)


WINDOW = {**but(NO_INTEGER, "None"), "zero": 0, "negative": -1, "beyond the cache": 13}
RANGE = {"num_tokens": but(integers(0, TOKENS), "None"), "src_offset": integers(0, TOKENS)}
LAYOUTS = {
    name: {**NO_LAYOUT, "the other": other}
    for name, other in (("src_layout", "head_major"), ("cache_layout", "token_major"))
}


def copy(arch, rng):
    src, cache = placed(arch, some(rng, TOKENS, HEADS, WIDTH), some(rng, HEADS, 12, WIDTH))
    wrong = {"src": rows(oracle.to_numpy(src), arch, heads=1), "cache": destination(cache, arch)}
    return Scene(
        tikv.copy,
        {"src": src, "cache": cache, "position": 5},
        [cache],
        wrong | RANGE | LAYOUTS | {"position": integers(0, 9), "window": WINDOW},
    )


def copy_kv(arch, rng):
    k, v = placed(arch, *some(rng, 2, TOKENS, HEADS, WIDTH))
    k_cache, v_cache = placed(arch, *some(rng, 2, HEADS, 12, WIDTH))
    wrong = {name: rows(oracle.to_numpy(k), arch, heads=1, tokens=0) for name in "kv"}
    wrong |= {name: destination(k_cache, arch) for name in ("k_cache", "v_cache")}
    right = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "position": 5}
    return Scene(
        tikv.copy_kv,
        right,
        [k_cache, v_cache],
        wrong | RANGE | LAYOUTS | {"position": integers(0, 9), "window": WINDOW},
    )


def copy_codes(arch, rng):
    """Into groups of codes."""
    cache = tikv.quantize(oracle.place(some(rng, HEADS, 12, 32), arch), "q8_0")
    src = oracle.place(some(rng, TOKENS, HEADS, 32), arch)
    wrong = {"src": rows(oracle.to_numpy(src), arch, heads=1), "cache": but(NO_ARRAY)}
    return Scene(
        tikv.copy,
        {"src": src, "cache": cache, "position": 5},
        [cache.codes, cache.scales],
        wrong | {"position": integers(0, 9), "window": WINDOW},
    )


def linearize(arch, rng):
    cache, out = placed(arch, some(rng, HEADS, 12, WIDTH), some(rng, HEADS, 7, WIDTH))
    wrong = {
        "cache": rows(oracle.to_numpy(cache), arch, heads=0),
        "out": destination(out, arch),
        "length": integers(0),
        "cache_layout": LAYOUTS["cache_layout"],
    }
    return Scene(tikv.linearize, {"cache": cache, "out": out, "length": 7}, [out], wrong)


def append_ragged(arch, rng):
    k_new, v_new = placed(arch, *some(rng, 2, 2, HEADS, TOKENS, WIDTH))
    k_cache, v_cache = placed(arch, *some(rng, 2, 2, HEADS, 12, WIDTH))
    offsets = np.array([4, 7], INT32)
    wrong = {name: rows(oracle.to_numpy(k_new), arch, heads=1, tokens=2) for name in ("k_new", "v_new")}
    wrong |= {name: destination(k_cache, arch) for name in ("k_cache", "v_cache")}
    right = {"k_new": k_new, "v_new": v_new, "k_cache": k_cache, "v_cache": v_cache, "cache_offsets": offsets}
    return Scene(
        tikv.append_ragged,
        right,
        [k_cache, v_cache],
        wrong | {"cache_offsets": {**index(offsets), "a number": 3, "None": None, "short": [4]}},
    )


SLOTS = np.array([9, -1, 3], INT32)
WRONG_SLOTS = {**index(SLOTS, 32), "a number": 3, "None": None, "short": SLOTS[:2]}


def write_slots(arch, rng, layout="NHD", dtype=np.float16):
    shape = (8, 4, HEADS, WIDTH) if layout == "NHD" else (8, HEADS, 4, WIDTH)
    k, v = placed(arch, *some(rng, 2, TOKENS, HEADS, WIDTH))
    k_pool, v_pool = placed(arch, *(some(rng, 2, *shape) * 9).astype(dtype))
    wrong = {name: rows(oracle.to_numpy(k), arch, heads=1, tokens=0) for name in "kv"}
    wrong |= {name: destination(k_pool, arch) for name in ("k_pool", "v_pool")}
    right = {"k": k, "v": v, "k_pool": k_pool, "v_pool": v_pool, "slot_mapping": SLOTS, "layout": layout}
    wrong |= {"slot_mapping": WRONG_SLOTS, "layout": NO_LAYOUT}
    changes = [k_pool, v_pool]
    if dtype == np.int8:
        scales = placed(arch, *some(rng, 2, 8, 4, HEADS))
        right |= dict(zip(("k_scale", "v_scale"), scales, strict=True))
        wrong |= {name: destination(scales[0], arch) for name in ("k_scale", "v_scale")}
        changes += scales
    else:
        wrong |= {
            name: {"a number": 0.5, "an array": np.ones((8, 4, HEADS), np.float32)} for name in ("k_scale", "v_scale")
        }
    return Scene(tikv.write_slots, right, changes, wrong)


def write_slots_of_int8(arch, rng):
    return write_slots(arch, rng, dtype=np.int8)


def write_slots_hnd(arch, rng):
    return write_slots(arch, rng, layout="HND")


def write_slots_of_float8(arch, rng):
    """Whose rows are divided by a number, which is finite and not 0."""
    import ml_dtypes

    scene = write_slots(arch, rng, dtype=ml_dtypes.float8_e4m3fn)
    scales = {
        "NaN": float("nan"),
        "infinite": float("inf"),
        "zero": 0.0,
        "a string": "1",
        "None": None,
        "NaNs": np.full(HEADS, np.nan, np.float32),
    }
    scales |= {
        "long": np.ones(HEADS + 1, np.float32),
        "an axis more": np.ones((1, HEADS), np.float32),
        "negative": -1.0,
    }
    return scene._replace(
        arguments=scene.arguments | {"k_scale": 0.5, "v_scale": 0.25},
        wrong=scene.wrong | {"k_scale": scales, "v_scale": scales},
    )


def gather_paged(arch, rng):
    pool, out = placed(arch, some(rng, 8, 4, HEADS, WIDTH), some(rng, 6, HEADS, WIDTH))
    table = np.array([5, 2], INT32)
    wrong = {
        "pool": rows(oracle.to_numpy(pool), arch, heads=2),
        "out": but(destination(out, arch), "None"),
        "layout": NO_LAYOUT,
    }
    wrong |= {
        "block_table": {**but(index(table, 8), "too long"), "a number": 3, "None": None, "short": table[:1]},
        "length": integers(0, 8),
    }
    wrong |= {"scale": {"a number": 0.5, "an array": np.ones((8, 4, HEADS), np.float32)}}
    return Scene(tikv.gather_paged, {"pool": pool, "block_table": table, "length": 6, "out": out}, [out], wrong)


def rope(rng, positions=16, width=WIDTH):
    cos, sin = some(rng, 2, positions, width // 2)
    return tikv.NormRope(mode="half", cos=cos, sin=sin)


def write_qkv(arch, rng):
    """Into caches."""
    qkv = oracle.place(some(rng, TOKENS, (Q_HEADS + 2 * HEADS) * WIDTH), arch)
    k, v = placed(arch, *some(rng, 2, HEADS, 12, WIDTH))
    out = oracle.place(some(rng, TOKENS, Q_HEADS, WIDTH), arch)
    right = {
        "qkv": qkv,
        "k_dst": k,
        "v_dst": v,
        "num_q_heads": Q_HEADS,
        "norm_rope": rope(rng),
        "position": 5,
        "out": out,
    }
    wrong = {"qkv": rows(oracle.to_numpy(qkv), arch), "k_dst": destination(k, arch), "v_dst": destination(v, arch)}
    wrong |= {
        "num_q_heads": {**integers(1), "other": 3},
        "out": but(destination(out, arch), "None"),
        "position": integers(0, 9),
        "window": WINDOW,
    }
    wrong |= {
        "norm_rope": {**but(NO_ARRAY, "None"), "short": rope(rng, 7), "narrow": rope(rng, 16, WIDTH - 2)},
        "layout": {**NO_LAYOUT, "the other": "token_major"},
    }
    positions = np.array([1, 2, 3], INT32)
    wrong |= {"q_layout": {**NO_LAYOUT, "the other": "head_major"}, "slot_mapping": {"beside a position": SLOTS}}
    wrong |= {"rope_positions": {**index(positions, 16), "negative": positions - 2, "a number": 3}}
    wrong |= {name: {"a number": 0.5, "an array": np.ones((HEADS, 12), np.float32)} for name in ("k_scale", "v_scale")}
    return Scene(tikv.write_qkv, right, [k, v, out], wrong)


def write_qkv_into_pools(arch, rng):
    qkv = oracle.place(some(rng, TOKENS, (Q_HEADS + 2 * HEADS) * WIDTH), arch)
    k, v = placed(arch, *(some(rng, 2, 8, 4, HEADS, WIDTH) * 9).astype(np.int8))
    scales = placed(arch, *some(rng, 2, 8, 4, HEADS))
    positions = np.array([1, 2, 3], INT32)
    right = {
        "qkv": qkv,
        "k_dst": k,
        "v_dst": v,
        "num_q_heads": Q_HEADS,
        "norm_rope": rope(rng),
        "slot_mapping": SLOTS,
        "rope_positions": positions,
    }
    right |= {"k_scale": scales[0], "v_scale": scales[1], "layout": "NHD"}
    wrong = {"qkv": rows(oracle.to_numpy(qkv), arch), "k_dst": destination(k, arch), "v_dst": destination(v, arch)}
    wrong |= {
        "slot_mapping": WRONG_SLOTS,
        "rope_positions": {**index(positions, 16), "negative": positions - 2, "None": None},
        "layout": NO_LAYOUT,
    }
    wrong |= {name: destination(scales[0], arch) for name in ("k_scale", "v_scale")} | {
        "position": {"beside slots": 3},
        "window": {"beside slots": 3},
    }
    return Scene(tikv.write_qkv, right, [k, v, *scales], wrong)


def write_qkv_into_codes(arch, rng):
    qkv = oracle.place(some(rng, TOKENS, (Q_HEADS + 2 * HEADS) * 32), arch)
    k, v = (tikv.quantize(oracle.place(some(rng, HEADS, 12, 32), arch), "q8_0") for _ in "kv")
    out = oracle.place(some(rng, TOKENS, Q_HEADS, 32), arch)
    right = {
        "qkv": qkv,
        "k_dst": k,
        "v_dst": v,
        "num_q_heads": Q_HEADS,
        "norm_rope": rope(rng, width=32),
        "position": 5,
        "out": out,
    }
    other = tikv.quantize(oracle.place(some(rng, HEADS, 12, 32), arch), "q4_0")
    wrong = {
        "qkv": rows(oracle.to_numpy(qkv), arch),
        "k_dst": {**NO_ARRAY, "other": other},
        "v_dst": {**NO_ARRAY, "other": other},
    }
    wrong |= {
        "num_q_heads": {**integers(1), "other": 3},
        "out": but(destination(out, arch), "None"),
        "position": integers(0, 9),
        "window": WINDOW,
    }
    wrong |= {
        "norm_rope": {**but(NO_ARRAY, "None"), "short": rope(rng, 7, 32), "narrow": rope(rng)},
        "layout": {**NO_LAYOUT, "the other": "token_major"},
    }
    wrong |= {"q_layout": {**NO_LAYOUT, "the other": "head_major"}}
    return Scene(tikv.write_qkv, right, [k.codes, k.scales, v.codes, v.scales, out], wrong)


def norm_rope(arch, rng):
    x, out = placed(arch, *some(rng, 2, TOKENS, HEADS, WIDTH))
    positions = np.array([1, 2, 3], INT32)
    wrong = {
        "x": rows(oracle.to_numpy(x), arch),
        "how": {**NO_ARRAY, "short": rope(rng, 3)},
        "out": but(destination(out, arch), "None"),
    }
    wrong |= {
        "rope_positions": {**index(positions, 16), "negative": positions - 2, "None": None, "a number": 3},
        "layout": NO_LAYOUT,
        "weight": {**NO_LAYOUT, "v": "v"},
    }
    return Scene(tikv.norm_rope, {"x": x, "how": rope(rng), "rope_positions": positions, "out": out}, [out], wrong)


def dequantize(arch, rng):
    codes, scale = tikv.quantize(oracle.place(some(rng, TOKENS, HEADS, WIDTH), arch))
    codes, scale = oracle.place(oracle.to_numpy(codes), arch), oracle.place(oracle.to_numpy(scale), arch)
    out = oracle.place(some(rng, TOKENS, HEADS, WIDTH), arch)
    wrong = {
        "q": but(rows(oracle.to_numpy(codes), arch), "integers") | {"floats": out},
        "scale": {**NO_ARRAY, "short": oracle.to_numpy(scale)[:2], "integers": oracle.to_numpy(scale).astype(INT32)},
    }
    return Scene(
        tikv.dequantize,
        {"q": codes, "scale": scale, "out": out},
        [out],
        wrong | {"out": but(destination(out, arch), "None")},
    )


def quantize(arch, rng):
    """It writes new arrays alone, so what it is given must not change."""
    x = oracle.place(some(rng, TOKENS, HEADS, 32), arch)
    found = []
    wrong = {
        "x": rows(oracle.to_numpy(x), arch),
        "format": {**but(NO_LAYOUT, "None"), "of tokens": tikv.Quant(4, 32, "tokens", 32)},
        "scale_dtype": {"unknown": "float12", "a list": [1], "integers": "int32"},
    }
    wrong["x"] = but(wrong["x"], "an axis more", "two axes", "narrower", "wider")
    return Scene(lambda **given: found.append(tikv.quantize(**given)[0]), {"x": x}, [x, found], wrong)


PAIRS = np.array([[0, 3], [1, 4]], np.int64)
WRONG_PAIRS = {**but(index(PAIRS, 8), "too long"), "a number": 3, "None": None, "threes": np.array([[0, 1, 2]])}


def copy_blocks(arch, rng):
    k, v = placed(arch, *some(rng, 2, 8, 4, HEADS, WIDTH))
    of_pool = but(destination(k, arch), "narrower", "wider", "integers", "short", "bools", "complex")  # bits are moved
    wrong = {"k_pool": of_pool, "v_pool": of_pool, "pairs": WRONG_PAIRS}
    return Scene(tikv.copy_blocks, {"k_pool": k, "v_pool": v, "pairs": PAIRS}, [k, v], wrong)


def swap_blocks(arch, rng):
    src, dst = placed(arch, *some(rng, 2, 8, 4, HEADS, WIDTH))
    wrong = {"src_pool": rows(oracle.to_numpy(src), arch), "dst_pool": destination(dst, arch), "pairs": WRONG_PAIRS}
    return Scene(tikv.swap_blocks, {"src_pool": src, "dst_pool": dst, "pairs": PAIRS}, [dst], wrong)


def compact(arch, rng):
    cache = oracle.place(some(rng, 2, HEADS, 9, WIDTH), arch)
    keep = np.array([[[0, 2, 5]] * HEADS] * 2)
    wrong = {
        **index(keep, 9),
        "falling": keep[..., ::-1].copy(),
        "negative": keep - 1,
        "None": None,
        "a number": 3,
        "a short mask": np.ones((2, HEADS, 8), bool),
    }
    lengths = {
        **index(np.array([6, 6], INT32), 10),
        "negative": np.array([-1, 6]),
        "a string": "66",
        "short": np.array([5, 6]),
    }
    return Scene(
        tikv.compact,
        {"cache": cache, "keep": keep},
        [cache],
        {
            "cache": but(destination(cache, arch), "narrower", "wider", "integers", "short"),
            "keep": wrong,
            "lengths": lengths,
        },
    )


def compact_into(arch, rng):
    cache, out = placed(arch, some(rng, 2, HEADS, 9, WIDTH), some(rng, 2, HEADS, 3, WIDTH))
    keep = np.array([[[0, 2, 5]] * HEADS] * 2)
    wrong = {"cache": rows(oracle.to_numpy(cache), arch, heads=1), "out": but(destination(out, arch), "None")}
    return Scene(tikv.compact, {"cache": cache, "keep": keep, "out": out}, [out], wrong)


def rotate(arch, rng):
    k = oracle.place(some(rng, 2, HEADS, 5, WIDTH), arch)
    before, after = np.arange(5), np.array([0, 1, 4, 5, 9])
    how = tikv.Rope(inv_freq=np.geomspace(1, 1e-3, WIDTH // 2).astype(np.float32))
    wrong = {
        "k": but(destination(k, arch), "wider"),
        "rope": {**NO_ARRAY, "wide": tikv.Rope(np.ones(WIDTH, np.float32))},
        "scale": {"an array": np.ones((2, HEADS, 5), np.float32)},
    }
    positions = {**index(before), "None": None, "a number": 3, "short": before[:4]}
    wrong |= {"from_positions": positions, "to_positions": positions}
    return Scene(tikv.rotate, {"k": k, "from_positions": before, "to_positions": after, "rope": how}, [k], wrong)


def of_attention(arch, tokens):
    ones = lambda *shape: oracle.place(np.ones(shape, np.float32), arch)  # noqa: E731
    found = {
        "scale": NO_NUMBER,
        "softcap": {**NO_NUMBER, "zero": 0.0, "negative": -1.0},
        "window": {**but(NO_INTEGER, "None"), "zero": 0, "negative": -1},
    }
    found |= {"num_splits": {**but(NO_INTEGER, "None"), "zero": 0, "huge": 10**6}, "impl": NO_LAYOUT}
    found |= dict.fromkeys(("causal", "lse_base2", "return_lse"), FLAG)
    found |= {
        "sink_logits": {**but(NO_ARRAY, "None"), "short": ones(3)},
        "alibi_slopes": {**but(NO_ARRAY, "None"), "short": ones(3), "another batch": ones(3, Q_HEADS)},
    }
    found |= {
        "mask": {
            **but(NO_ARRAY, "None"),
            "another batch": np.ones((3, tokens, tokens), bool),
            "floats": np.ones((2, tokens, tokens), np.float32),
        }
    }
    found |= {"indices": {**index(np.zeros((2, tokens, 3), INT32), 20), "-2": np.full((2, tokens, 3), -2)}}
    return found | {
        "parents": {
            **but(NO_ARRAY, "None"),
            "later": np.full((2, tokens), tokens, INT32),
            "floats": np.zeros((2, tokens), np.float32),
            "uneven": [[0], [0, 1]],
        }
    }


def lengths(right, high):
    found = {
        **but(index(right, high), "an axis more"),
        "negative": right - 20,
        "None": None,
        "a string": "78",
        "fraction": 1.5,
    }
    return found | {"fewer than queries": np.array([1, 7])}


def decode_attention(arch, rng):
    q = oracle.place(some(rng, 2, Q_HEADS, TOKENS, WIDTH), arch)
    k, v = placed(arch, *some(rng, 2, 2, HEADS, 12, WIDTH))
    out, lens = oracle.place(some(rng, 2, Q_HEADS, TOKENS, WIDTH), arch), np.array([7, 8])
    wrong = {
        "q": rows(oracle.to_numpy(q), arch, heads=1),
        "k_cache": rows(oracle.to_numpy(k), arch, heads=1, tokens=2),
        "seq_lens": lengths(lens, 13),
    }
    wrong |= {
        "v_cache": rows(oracle.to_numpy(v), arch, heads=1, tokens=2),
        "out": but(destination(out, arch), "None"),
        "ring": FLAG,
        "sinks": integers(0),
    }
    wrong |= {
        "first_valid": but(integers(0), "None"),
        "head_dim_v": {**but(integers(1), "None"), "beside values": 3},
        "return_mass": FLAG,
    }
    wrong |= {
        name: {"a number": 0.5, "an array": np.ones((2, HEADS, 12), np.float32)} for name in ("k_scale", "v_scale")
    }
    return Scene(
        tikv.decode_attention,
        {"q": q, "k_cache": k, "v_cache": v, "seq_lens": lens, "out": out},
        [out],
        wrong | of_attention(arch, TOKENS),
    )


def paged_decode_attention(arch, rng):
    q = oracle.place(some(rng, 2, Q_HEADS, TOKENS, WIDTH), arch)
    k, v = placed(arch, *some(rng, 2, 8, 4, HEADS, WIDTH))
    out, lens, table = (
        oracle.place(some(rng, 2, Q_HEADS, TOKENS, WIDTH), arch),
        np.array([7, 8]),
        np.array([[5, 0], [2, 7]], INT32),
    )
    wrong = {
        "q": rows(oracle.to_numpy(q), arch, heads=1),
        "k_pool": rows(oracle.to_numpy(k), arch, heads=2),
        "context_lens": lengths(lens, 13),
        "layout": NO_LAYOUT,
    }
    wrong |= {
        "v_pool": rows(oracle.to_numpy(v), arch, heads=2),
        "out": but(destination(out, arch), "None"),
        "head_dim_v": {**but(integers(1), "None"), "beside values": 3},
    }
    wrong |= {
        "block_tables": {**index(table, 8), "None": None, "a number": 3, "negative": table - 1, "short": table[:, :1]}
    }
    wrong |= {
        name: {"a number": 0.5, "an array": np.ones((8, 4, HEADS), np.float32)} for name in ("k_scale", "v_scale")
    }
    right = {"q": q, "k_pool": k, "v_pool": v, "block_tables": table, "context_lens": lens, "out": out}
    return Scene(tikv.paged_decode_attention, right, [out], wrong | of_attention(arch, TOKENS))


def merge_states(arch, rng):
    """It writes new arrays alone."""
    (a, b), (x, y) = placed(arch, *some(rng, 2, 2, Q_HEADS, WIDTH)), placed(arch, *some(rng, 2, 2, Q_HEADS))
    found = []
    wrong = {name: rows(oracle.to_numpy(a), arch, heads=1) for name in ("out_a", "out_b")} | {
        name: rows(oracle.to_numpy(x), arch) for name in ("lse_a", "lse_b")
    }
    for name in ("lse_a", "lse_b"):
        wrong[name] = but(wrong[name], "columns apart")
    return Scene(
        lambda **given: found.append(tikv.merge_states(**given)),
        {"out_a": a, "lse_a": x, "out_b": b, "lse_b": y},
        [a, b, x, y, found],
        wrong | {"lse_base2": FLAG},
    )


def graph(arch, rng):
    """A write and attention, run together."""
    builder = tikv.GraphBuilder()
    builder.copy_kv("k", "v", "k_rows", "v_rows", position="position")
    builder.decode_attention("q", "k_cache", "v_cache", "length", out="out")
    compiled = builder.compile()
    k, v = placed(arch, *some(rng, 2, 1, HEADS, WIDTH))
    caches = placed(arch, *some(rng, 2, 1, HEADS, 12, WIDTH))
    right = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1], "k_rows": caches[0][0], "v_rows": caches[1][0]}
    right |= {"q": oracle.place(some(rng, 1, Q_HEADS, WIDTH), arch), "position": 5, "length": 6}
    wrong = {name: rows(oracle.to_numpy(k), arch, heads=1, tokens=0) for name in "kv"} | {
        "q": rows(oracle.to_numpy(right["q"]), arch)
    }
    wrong |= {name: destination(caches[0][0], arch) for name in ("k_rows", "v_rows")} | {
        "position": integers(0, 11),
        "length": but(integers(0, 12), "a list"),
    }
    wrong |= {"another": {"name": 1}}
    return Scene(lambda **given: compiled.run(given), right, list(caches), wrong)


SCENES = {
    make.__name__: make
    for make in (
        copy, copy_kv, copy_codes, linearize, append_ragged, write_slots, write_slots_of_int8, write_slots_hnd,
        write_slots_of_float8, gather_paged, write_qkv, write_qkv_into_pools, write_qkv_into_codes, norm_rope,
        dequantize, quantize, copy_blocks, swap_blocks, compact, compact_into, rotate, decode_attention,
        paged_decode_attention, merge_states, graph,
    )
}  # fmt: skip


@pytest.mark.archs("cpu", "cuda")
@pytest.mark.parametrize("name", SCENES)
def test_a_wrong_argument_changes_nothing(arch, name):
    assert problems_of(lambda: SCENES[name](arch, np.random.default_rng(0))) == []
