"""Calls that between them launch every kernel: for Metal's source of each, and to compare what it computes.

A group takes `values(shape, dtype)`, which makes an array, and yields the name of each call with the arrays to compare
after it: what it returned, and what it wrote to, whole.
"""

import ml_dtypes
import numpy as np

import tikv
from tikv import runtime
from tikv.arrays import view
from tikv.distributed.token_shard import TokenShardLayers
from tikv.distributed.token_sharding import TokenSharding
from tikv.formats import FORMATS
from tikv.ops.attention.by_channel import ChannelKeys, ScoredValues, channel_scores, scored_plan
from tikv.ops.attention.launches import AttendedTokens
from tikv.ops.attention.merge import merge_parts
from tikv.ops.attention.request import AttentionScale
from tikv.ops.attention.terms import Terms
from tikv.ops.layouts import Rows
from tikv.ops.local_positions import local_positions
from tikv.ops.write_pages import write_pages
from tikv.stores.layers.storage import StoreConfig

BF16 = np.dtype(ml_dtypes.bfloat16)
F32, F16, I8 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int8)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def copies(values):
    for src, cache in ((F32, F32), (F16, F16), (F32, F16), (F32, BF16), (BF16, F32), (F32, E4M3)):
        for width in (8, 3):
            for window in (None, 5):
                k, v = (values((2, 3, width), src) for _ in "kv")
                caches = [values((3, 5, width), cache) for _ in "kv"]
                tikv.copy(k, caches[0], position=2, window=window)
                yield "copy", caches
                tikv.copy_kv(k, v, *caches, position=0, window=window)
                yield "copy_kv", caches
    ring, found = (values((3, 5, 8), F16) for _ in range(2))
    tikv.linearize(ring, found, length=9)
    yield "linearize", [found]
    for dtype, width in ((F16, 8), (F32, 40)):
        cache = values((2, 3, 40, width), dtype)
        tikv.compact(cache, np.arange(40) % np.array([[[2]], [[3]]]) == 1 + np.zeros((1, 3, 1)))
        yield "compact", [cache]
        k = values((2, 3, 5, width), dtype)
        tikv.rotate(k, np.arange(5), np.arange(5) // 2, tikv.Rope([1.0, 0.1], interleaved=width == 40))
        yield "rotate", [k]
    q, scale = values((2, 3, 5, 8), I8), np.full((2, 3, 5), 0.5, F16)
    tikv.rotate(q, np.arange(5), np.arange(5) // 2, tikv.Rope([1.0, 0.1, 0.01]), scale=scale)
    yield "rotate", [q, scale]
    tikv.rotate(q, np.arange(5), np.arange(5) // 2, tikv.Rope([1.0, 0.1, 0.01, 0.001]), scale=scale)
    yield "rotate", [q, scale]


def stores(values):
    for dtype, window, batch in (
        ("float16", None, 1),
        ("bfloat16", 5, 2),
        ("int8", [4, None], 1),
        ("int8", 4, 2),
        ("float32", [None, 3], 2),
    ):
        store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=2, head_dim=8, capacity=6, dtype=dtype, window=window, batch_size=batch
        )

        def held(store=store):
            return [array for layer in range(2) for array in store.tokens(layer)]

        src = BF16 if dtype == "bfloat16" else F32
        k, v, newer = (values((2, batch, 1, 2, 8), src) for _ in range(3))
        store.append_all(k, v)
        yield "append_all", held()
        for layer in range(2):
            store.append(layer, v[layer], k[layer])
        yield "append", held()
        snapshot = store.snapshot()
        store.append_all(newer, k)
        store.reorder(range(batch)[::-1])
        yield "reorder", held()
        store.restore(snapshot)
        yield "restore", held()
        step = tikv.compile_step(store, layers=0, attend=False)
        step.run(newer[0], v[0])
        yield "step", [*held(), step.positions]
    merging = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, capacity=6, dtype="int8")
    merging.append(0, *(values((6, 2, 8), F32) for _ in "kv"))
    keep, to = np.arange(6) % 2 == np.zeros((1, 2, 1)), np.array([[[-1, 0, -1, 0, -1, 4], [-1, 2, -1, 2, -1, -1]]])
    merging.compact(0, keep, merge=(to, values((1, 2, 6), F32)))
    yield "merge", list(merging.tokens(0))


def scattered(values):
    k, v = (values((3, 2, 8), F16) for _ in "kv")
    tokens = [np.array(a, np.int32) for a in ([0, 1, -1], [2, 0, 0], [3, 1, 0], [0, 2, 3])]
    pools = [values((4, 2, 2, 8), F16) for _ in "kv"]
    write_pages("write_pages", k, v, *pools, *tokens, "NHD")
    yield "write_pages", pools
    slots = np.array([0, 5, -1], np.int32)
    for layout, shape in (("NHD", (4, 2, 2, 8)), ("HND", (4, 2, 2, 8))):
        pools = [values(shape, F16) for _ in "kv"]
        tikv.write_slots(k, v, *pools, slots, layout=layout)
        yield "write_slots", pools
        yield "gather_paged", [tikv.gather_paged(pools[0], np.array([1, 0], np.int32), 3, layout=layout)]
    pools = [values((4, 2, 1, 2, 8), F16), values((4, 2, 8, 2), F16)]
    tikv.write_slots(k, v, *pools, slots.astype(np.int64), layout="VLLM")
    yield "write_slots", pools
    pools, scales = [values((4, 2, 2, 8), I8) for _ in "kv"], [np.ones((4, 2, 2), F16) for _ in "kv"]
    tikv.write_slots(k, v, *pools, slots, k_scale=scales[0], v_scale=scales[1])
    yield "write_slots", [*pools, *scales]
    yield "gather_paged", [tikv.gather_paged(pools[0], np.array([1, 0], np.int32), 3, scale=scales[0])]
    pools = [values((4, 2, 2, 8), F16) for _ in "kv"]
    tikv.copy_blocks(*pools, np.array([[0, 1]], np.int32))
    yield "copy_blocks", pools
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=8, num_blocks=4, block_size=4, dtype="int8")
    seq, (k, v) = pool.add(), (values((9, 2, 8), F16) for _ in "kv")
    pool.append(0, k, v, [seq], cu_seqlens=[0, 9])
    pool.commit([seq], [0, 2, 3, 7])
    yield "commit", [a.copy_to_host() for a in pool.tokens(0, seq)]
    caches = [values((2, 2, 6, 8), F16), values((2, 2, 6, 4), F16)]
    tikv.append_ragged(values((2, 2, 3, 8), F16), values((2, 2, 3, 4), F16), *caches, np.array([0, -1], np.int32))
    yield "append_ragged", caches
    for scale in ("float16", "float32"):
        quantized = tikv.quantize(values((4, 8), F32), scale)
        yield "quantize", quantized
        yield "dequantize", [tikv.dequantize(*quantized)]
    turned = tikv.Quant(4, rotate="hadamard"), "q4_0_hadamard2"
    for format in (tikv.Quant(3, 32), tikv.Quant(8), "q8_0", "q4_0", "mxfp8", "mxfp4", "nvfp4", *turned):
        groups = tikv.quantize(values((4, 64), F32), format)
        yield "quantize", [a for a in groups[:3] if a is not None]
        yield "dequantize", [tikv.dequantize(groups)]
    for of in ("keys", "values"):
        tiles = tikv.quantize(values((64, 32), F32), "kvarn_k4v2_g64", of=of)
        yield "quantize", tiles[:4]
        yield "dequantize", [tikv.dequantize(tiles)]


def fused(values):
    cos, sin = (values((16, 4), F32) for _ in range(2))
    weights = [values((8,), F32) for _ in "qk"]
    for mode in ("none", "norm_half", "half", "interleaved", "norm_interleaved"):
        turns = {} if mode == "none" else {"cos": cos, "sin": sin}
        norms = {"q_weight": weights[0], "k_weight": weights[1]} if "norm" in mode else {}
        for src, dst in ((F32, F16), (F16, F16))[mode != "norm_half" :]:
            caches = [values((2, 6, 8), dst) for _ in "kv"]
            q = tikv.write_qkv(
                values((2, 8 * 8), src), *caches, num_q_heads=4,
                norm_rope=tikv.NormRope(mode=mode, **turns, **norms), position=1,
            )  # fmt: skip
            yield "write_qkv", [q, *caches]
    pools, scales = [values((4, 2, 2, 8), I8) for _ in "kv"], [np.ones((4, 2, 2), F16) for _ in "kv"]
    q = tikv.write_qkv(
        values((2, 8 * 8), F16), *pools, num_q_heads=4, layout="NHD", k_scale=scales[0], v_scale=scales[1],
        norm_rope=tikv.NormRope(mode="norm_half", q_weight=weights[0], k_weight=weights[1], cos=cos, sin=sin),
        slot_mapping=np.array([3, 0], np.int32), rope_positions=np.array([1, 2], np.int32),
    )  # fmt: skip
    yield "write_qkv", [q, *pools, *scales]


def wide_norms(values):
    """Norms of which a GPU's lane adds up several squares in a row."""
    cos, sin = (values((16, 4), F32) for _ in range(2))
    how = tikv.NormRope(mode="norm_half", q_weight=values((384,), F32), cos=cos, sin=sin, rope_dim=8)
    yield "norm_rope", [tikv.norm_rope(values((5, 3, 384), F32), how, position=1)]


def attention(values):
    for dtype in (F32, F16, BF16):
        yield from attend(values, dtype, [values((1, 2, 6, 32), dtype) for _ in "kv"])
    yield from attend_in_parts(values, F32)
    yield from attend_with_terms(values)
    yield from scores_by_channel(values)
    yield from tiles(values)
    yield from chosen_tokens(values)
    yield from turned_keys(values)
    yield from attend_in_order(values)


def attend_in_order(values):
    """Under ``tikv.init(invariant=True)``, in splits of 512."""
    live = tikv.runtime.current()
    live.plans.clear()
    live.invariant = True
    try:
        yield from attend(values, F32, [values((1, 2, 600, 32), F32) for _ in "kv"])
    finally:
        live.invariant = False
        live.plans.clear()


def turned_keys(values):
    """Queries turned before they meet keys that are."""
    formats = tikv.Quant(4, rotate="hadamard"), tikv.Quant(4)
    caches = [tikv.quantize(values((1, 2, 6, 64), F32), format) for format in formats]
    yield "decode_attention", [tikv.decode_attention(values((1, 4, 64), F32), *caches, 6)]


def attention_in_parts(values):
    yield from attend_in_parts(values, F16)
    yield from attend_in_parts(values, BF16)


def attend(values, dtype, caches):
    keys = np.array([caches[0].shape[2]], np.int32)
    yield "decode_attention", tikv.decode_attention(values((1, 4, 32), dtype), *caches, keys, return_lse=True)


def attend_in_parts(values, dtype):
    caches = [values((1, 2, 4096, 32), dtype) for _ in "kv"]
    yield from attend(values, dtype, caches)
    lens, q = np.array([4096], np.int32), values((1, 4, 2, 32), dtype)
    yield "decode_attention", tikv.decode_attention(q, *caches, lens, num_splits=2, return_mass=True)
    pools = [values((4, 2, 2, 32), dtype) for _ in "kv"]
    tables, lens = np.array([[2, 0, 1, 3]], np.int32), np.array([7], np.int32)
    yield "paged_decode_attention", [tikv.paged_decode_attention(values((1, 4, 32), dtype), *pools, tables, lens)]
    caches, lens = [values((1, 2, 600, 32), dtype) for _ in "kv"], np.array([[600, 9]], np.int32)
    yield "decode_attention", tikv.decode_attention(values((1, 4, 32), dtype), *caches, lens, num_splits=2,
                                                    return_lse=True)  # fmt: skip
    pools, lens = [values((4, 2, 1, 32), dtype) for _ in "kv"], np.array([[3, 1]], np.int32)
    tables = np.array([[[2, 0], [3, -1]]], np.int32)
    yield "paged_decode_attention", [tikv.paged_decode_attention(values((1, 4, 32), dtype), *pools, tables, lens)]
    states = [array for _ in range(2) for array in (values((1, 4, 32), dtype), values((1, 4), F32))]
    yield "merge_states", tikv.merge_states(*states)
    parts, merged, lse = values((3, 1, 4, 2, 33), F32), values((1, 4, 2, 32), dtype), values((1, 4, 2), F32)
    merge_parts("merge_parts", *(view(a, "a", "merge_parts") for a in (parts, merged, lse)))
    yield "merge_parts", [merged, lse]
    found = np.zeros(4, np.int32)
    for counts in (False, True):
        lengths = np.array([-1, 0, 9, 1000])
        arrays = (view(a, "a", "local_positions") for a in (lengths, found))
        local_positions(runtime.current(), "local_positions", *arrays, (1, 3, 4), counts)
        yield "local_positions", [found.copy()]


def attend_with_terms(values):
    q, caches = values((1, 4, 2, 32), F32), [values((1, 2, 6, 32), F32) for _ in "kv"]
    terms = {"sink_logits": values((4,), F32), "alibi_slopes": values((4,), F32)}
    yield "decode_attention", tikv.decode_attention(q, *caches, 6, return_lse=True, **terms)
    for tree in ({"parents": [[-1, 0]]}, {"mask": np.eye(2, dtype=bool)[None]}, {"mask": np.uint8([[[1], [2]]])}):
        yield "decode_attention", [tikv.decode_attention(q, *caches, 6, **terms, **tree)]

    form = StoreConfig.checked("KVCacheStore", num_layers=1, num_kv_heads=2, head_dim=32, capacity=12, window=8,
                               sinks=1, dtype="float32")  # fmt: skip
    share = TokenShardLayers(runtime.current(), form, TokenSharding(1, 2, 2))
    tikv.KVCacheStore.over(form, share).append(0, *(values((9, 2, 32), F32) for _ in "kv"))
    one, out, slopes = values((1, 4, 1, 32), F32), values((1, 4, 1, 33), F32), Terms(None, terms["alibi_slopes"])
    queries, parts = (view(a, "a", "attend_own") for a in (one, out))
    share.attend_own(
        "attend_own", 0, queries, parts, AttentionScale(None, None), "raise", None, slopes.views("attend_own")
    )
    yield "attend_own", [out]


def scores_by_channel(values):
    codes = np.arange(2 * 2 * 32 * 4, dtype=np.uint32).reshape(1, 2, 2, 32, 4) * np.uint32(2654435761)
    live, scores = runtime.current(), values((1, 2, 4, 64), F32)
    arrays = values((1, 4, 2, 32), F16) / F16.type(64), codes, values((1, 2, 2, 32, 2), F16), scores
    q, words, numbers, products = (view(a, "a", "channel_scores") for a in arrays)
    keys = ChannelKeys(words, numbers, FORMATS["quant4_32"])
    channel_scores(live, "channel_scores", q, keys, products, 2)
    yield "channel_scores", [scores]
    v = view(values((1, 2, 64, 32), F16), "v", "channel_scores")
    rows = Rows(v, sequence=v.strides[0], head=v.strides[1], token=v.strides[2])
    attended = AttendedTokens(60, 3, 1)
    for ring, span in ((0, None), (64, 50)):
        plan = scored_plan(
            live,
            "channel_scores",
            {"q": q, "k": products, "v": v},
            ScoredValues(rows, 32, 64, ring, span),
            AttentionScale(None, None),
        )
        yield "scored attention", [plan.attend(arrays[0], {"q": q, "k": products, "v": v}, attended)]


def tiles(values):
    """KVarN's tiles: read in place by few queries, by more as numbers; in a ring, and in the blocks of a pool."""
    form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 32, "dtype": "kvarn_k4v2_g64"}
    for window, softcap in ((None, None), (100, 5.0)):
        store = tikv.KVCacheStore(capacity=200, window=window, **form)
        store.append(0, *(values((130, 2, 32), F16) for _ in "kv"))
        for count in (1, 12):
            q, k, v = values((count, 4, 32), F16), *(values((count, 2, 32), F16) for _ in "kv")
            yield "extend", [store.extend(0, q, k, v, softcap=softcap)]
    pool = tikv.PagedKVCacheStore(num_blocks=4, block_size=64, **form)
    seqs = [pool.add(), pool.add()]
    pool.append(0, *(values((140, 2, 32), F32) for _ in "kv"), seqs, [0, 70, 140])
    pool.append(0, *(values((2, 2, 32), F32) for _ in "kv"), seqs, [0, 1, 2])
    for mass in ("sum", "max"):
        yield "attend", pool.attend(0, values((2, 4, 32), F32), seqs, return_mass=mass)


def chosen_tokens(values):
    keys, q = values((1, 2, 40, 32), F32), values((1, 4, 2, 32), F32)
    least, greatest = tikv.summarize_pages(keys, np.array([37]), page=8)
    yield "summarize_pages", [least, greatest]
    yield "page_scores", [tikv.page_scores(q, least, greatest, np.array([37]), page=8)]
    for valid in (None, np.array([[700, 3]])):
        yield "select", [tikv.select(values((1, 2, 2, 700), F32), 130, sinks=2, recent=5, valid=valid)]
    yield "budget", [tikv.budget(values((2, 3, 300), F32), 200, least=20, sinks=2, recent=5)]
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8"):
        store = tikv.KVCacheStore(num_layers=1, num_kv_heads=2, head_dim=32, capacity=16, dtype=dtype, page_summaries=4)
        for tokens in (9, 1):
            store.append(0, *(values((tokens, 2, 32), F32) for _ in "kv"))
        store.trim(3)
        yield "page_summaries", [a.copy_to_host()[:, :, :2] for a in store.page_summaries(0)]
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=2, head_dim=32, num_blocks=4, page_summaries=8)
    seq = pool.add()
    pool.append(0, *(values((21, 2, 32), F32) for _ in "kv"), [seq], [0, 21])
    yield "page_summaries", list(pool.page_summaries(0, [seq]))
    indices = np.array([[[3, 0, 36, -1, 17], [35, 1, 9, 8, 7]]])
    yield "decode_attention", tikv.decode_attention(q, keys, keys, 37, indices=indices, return_mass=True)


GROUPS = {f.__name__: f for f in (copies, stores, scattered, fused, wide_norms, attention, attention_in_parts)}
