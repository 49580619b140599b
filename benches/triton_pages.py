"""Decode attention over pages by a Triton kernel with `tl.dot`, split over the keys: a peer of attention_gpu.py."""

import torch
import triton
import triton.language as tl

SETTINGS = [(64, 4, 3), (32, 4, 4), (128, 8, 2), (64, 4, 2)]  # keys at a time, warps, stages


@triton.jit
def parts_of_pages(
    Q, K, V, TABLE, LENS, PART, LSE, scale, SPLITS, BLOCKS, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One sequence, KV head and split: M rows of which G count, N keys at a time."""
    b, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.load(LENS + b)
    share = tl.cdiv(tl.cdiv(n, SPLITS), N) * N
    begin = s * share
    end = tl.minimum(n, begin + share)
    d, g, r = tl.arange(0, D), tl.arange(0, M), tl.arange(0, N)
    q = tl.load(Q + ((b * H + h) * G + g)[:, None] * D + d[None], mask=(g < G)[:, None], other=0.0)
    m, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for at in range(begin, end, N):
        key = at + r
        ok = key < end
        page = tl.load(TABLE + b * BLOCKS + key // PAGE, mask=ok, other=0)
        row = ((page.to(tl.int64) * PAGE + key % PAGE) * H + h) * D
        k = tl.load(K + row[None] + d[:, None], mask=ok[None], other=0.0)
        v = tl.load(V + row[:, None] + d[None], mask=ok[:, None], other=0.0)
        x = tl.where(ok[None], tl.dot(q, k) * scale, -1e30)
        top = tl.maximum(m, tl.max(x, 1))
        fade, p = tl.exp2(m - top), tl.exp2(x - top[:, None])
        total, m = total * fade + tl.sum(p, 1), top
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
    at = ((b * H + h) * G + g) * SPLITS + s
    tl.store(PART + at[:, None] * D + d[None], acc / tl.maximum(total, 1e-30)[:, None], mask=(g < G)[:, None])
    tl.store(LSE + at, m + tl.log2(tl.maximum(total, 1e-30)), mask=g < G)


@triton.jit
def merge_parts(PART, LSE, OUT, SPLITS, D: tl.constexpr):
    """A row of the result from those of its splits."""
    r, d = tl.program_id(0), tl.arange(0, D)
    m, total, acc = -1e30, 0.0, tl.zeros([D], tl.float32)
    for s in range(SPLITS):
        x = tl.load(LSE + r * SPLITS + s)
        top = tl.maximum(m, x)
        fade, weight = tl.exp2(m - top), tl.exp2(x - top)
        acc = acc * fade + weight * tl.load(PART + (r * SPLITS + s) * D + d)
        total, m = total * fade + weight, top
    tl.store(OUT + r * D + d, (acc / total).to(tl.float16))


def attend(q, k, v, table, lens, setting):
    """A call of the kernel over pools (blocks, page, heads, width)."""
    keys, warps, stages = setting
    (batch, heads, width), (_, page, kv_heads, _) = q.shape, k.shape
    length, tasks = table.shape[1] * page, batch * kv_heads
    splits = max(1, min(64, -(-1056 // tasks), length // 256)) if tasks < 256 else max(1, min(length // 256, 4))
    part = torch.empty(batch * heads * splits, width, device=q.device)
    lse, out = torch.empty(batch * heads * splits, device=q.device), torch.empty_like(q)

    def call():
        parts_of_pages[(batch, kv_heads, splits)](
            q, k, v, table, lens, part, lse, width**-0.5 * 1.4426950408889634, splits, table.shape[1], kv_heads,
            heads // kv_heads, width, page, keys, 16, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        merge_parts[(batch * heads,)](part, lse, out, splits, width, num_warps=4)
        return out

    return call
