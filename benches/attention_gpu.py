"""Attention on an NVIDIA GPU, device time alone, beside torch and Triton; float16, 8 KV heads of width 128.

    python benches/attention_gpu.py decode
    python benches/attention_gpu.py prompts --tokens 64 512      # TFLOP/s over 8,192 keys, 4 query heads a KV head
    python benches/attention_gpu.py codes                        # int8 and groups of 8 and 4 bits beside own float16
    python benches/attention_gpu.py dequantize                   # each format back to float16, beside the device's copy
    python benches/attention_gpu.py latent                       # keys of 576 whose first 512 columns are the values

Decoding: tikv reads pages of 16 in random order and contiguous caches; beside it stand a Triton kernel with `tl.dot`
over the same pages, split over the keys, at the fastest of a few settings, and torch's own attention over contiguous
caches. Rates are the bytes of K and V over the time.

Prompts: the newest tokens of a sequence attend, each by its causal mask; beside them torch's flash attention with the
same mask over K and V that were gathered and repeated before.

Codes: the same sequences in contiguous caches and in pages of each format; beside them own float16 in the same storage,
and for 4 bits dequantising all of K and V for torch's attention.

The L2 cache is flushed before each call, the host queues the call while the device sleeps; medians of 16.
"""

import argparse
import functools
import statistics

import environment
import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import tikv

HEADS, WIDTH, PAGE, ROUNDS = 8, 128, 16, 16
DEQUANTISED = 1 << 21  # rows of a head
SHAPES = [(32, 8192), (1, 32768), (128, 1024)]  # sequences, tokens of each
PROMPT_KEYS, PROMPT_GROUP = 8192, 4
FORMATS = ("int8", "quant8_64", "q8_0", "quant4_64", "q4_0")
SETTINGS = [(64, 4, 3), (32, 4, 4), (128, 8, 2), (64, 4, 2)]  # of Triton: keys at a time, warps, stages


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


def by_triton(q, k, v, table, lens, out, setting):
    """A call of the Triton kernel."""
    keys, warps, stages = setting
    batch, heads, width = q.shape
    length, tasks = table.shape[1] * PAGE, batch * HEADS
    splits = max(1, min(64, -(-1056 // tasks), length // 256)) if tasks < 256 else max(1, min(length // 256, 4))
    part = torch.empty(batch * heads * splits, width, device=q.device)
    lse = torch.empty(batch * heads * splits, device=q.device)

    def call():
        parts_of_pages[(batch, HEADS, splits)](
            q, k, v, table, lens, part, lse, width**-0.5 * 1.4426950408889634, splits, table.shape[1], HEADS,
            heads // HEADS, width, PAGE, keys, 16, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        merge_parts[(batch * heads,)](part, lse, out, splits, width, num_warps=4)
        return out

    return call


def time_of(calls, flushed):
    """The median device time of a call in microseconds; the calls differ in their arrays and take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(ROUNDS):
        flushed.fill_(i & 1)
        torch.cuda._sleep(400_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        calls[i % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Work:
    """Sequences of one length: K and V in pages and in one piece, several sets where one would fit the cache."""

    def __init__(self, batch, length):
        blocks, self.like = batch * length // PAGE, {"device": "cuda", "dtype": torch.float16}
        sets = 4 if batch == 1 else 1
        self.pools = [[torch.randn(blocks, PAGE, HEADS, WIDTH, **self.like) for _ in "kv"] for _ in range(sets)]
        self.table = torch.randperm(blocks, device="cuda").int().reshape(batch, -1).contiguous()
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        rows = self.table.reshape(-1).long()
        shape = batch, length, HEADS, WIDTH
        self.plain = [[a[rows].reshape(shape).transpose(1, 2).contiguous() for a in kv] for kv in self.pools]
        self.bytes = 4 * batch * length * HEADS * WIDTH

    def rates(self, group, flushed):
        """Of tikv's pages, Triton, tikv's contiguous caches and torch, for so many query heads a KV head."""
        q = torch.randn(len(self.lens), HEADS * group, WIDTH, **self.like)
        out, table, lens = torch.empty_like(q), self.table, self.lens

        def by_torch(k, v):
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

        def pages(k, v):
            return tikv.paged_decode_attention(q, k, v, table, lens, out=out)

        def contiguous(k, v):
            return tikv.decode_attention(q, k, v, lens, out=out, impl="taichi")

        want = by_torch(*self.plain[0]).double()

        def rate(calls):
            out.fill_(7)
            assert ((calls[0]().double() - want).norm() / want.norm()).item() < 2e-3
            return self.bytes / time_of(calls, flushed) / 1e3

        def over(call, caches):
            return rate([functools.partial(call, *kv) for kv in caches])

        peer = max(rate([by_triton(q, *kv, table, lens, out, s) for kv in self.pools]) for s in SETTINGS)
        return over(pages, self.pools), peer, over(contiguous, self.plain), over(by_torch, self.plain)


def decode(flushed):
    """Rates over several shapes."""
    numbers = torch.empty(1 << 28, device="cuda").uniform_()
    print(f"reading 1 GiB: {(1 << 30) / time_of([numbers.sum], flushed) / 1e3:.0f} GB/s")
    del numbers
    print("| sequences x tokens, query heads a KV head | tikv, pages | Triton | tikv, contiguous | torch |")
    print("| --- | --- | --- | --- | --- |")
    for batch, length in SHAPES:
        work = Work(batch, length)
        for group in (8, 4, 1):
            rates = " | ".join(f"{rate:.0f}" for rate in work.rates(group, flushed))
            print(f"| {batch} x {length}, {group} | {rates} |", flush=True)


def prompts(tokens, flushed):
    """TFLOP/s of what the causal masks leave."""
    work, heads = Work(1, PROMPT_KEYS), HEADS * PROMPT_GROUP
    (k_pool, v_pool), (k, v), attention = work.pools[0], work.plain[0], torch.nn.functional.scaled_dot_product_attention
    repeated = [a.repeat_interleave(PROMPT_GROUP, 1) for a in (k, v)]
    print("| new tokens | tikv, pages | tikv, contiguous | torch, flash |\n| --- | --- | --- | --- |")
    for count in tokens:
        q = torch.randn(1, heads, count, WIDTH, **work.like)
        mask = torch.ones(count, PROMPT_KEYS, dtype=torch.bool, device="cuda").tril(PROMPT_KEYS - count)
        want = attention(q.float(), *(a.float() for a in repeated), attn_mask=mask)
        out, causal = torch.empty_like(q), causal_lower_right(count, PROMPT_KEYS)
        calls = [
            functools.partial(tikv.paged_decode_attention, q, k_pool, v_pool, work.table, work.lens, out=out),
            functools.partial(tikv.decode_attention, q, k, v, work.lens, out=out, impl="taichi"),
            functools.partial(attention, q, *repeated, attn_mask=causal),
        ]
        operations = 4 * heads * WIDTH * (count * (PROMPT_KEYS - count) + count * (count + 1) // 2)
        found = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for call in calls:
                assert ((call().float() - want).norm() / want.norm()).item() < 2e-3
                found.append(f"{operations / time_of([call], flushed) / 1e6:.0f}")
        print(f"| {count} | {' | '.join(found)} |", flush=True)


def coded(name, k, v):
    """K, V and scales as codes of a format, and the bytes of all."""
    found = [tikv.quantize(a, name) for a in (k, v)]
    if name != "int8":
        return found, {}, sum(a.nbytes for a in found)
    scales = dict(zip(("k_scale", "v_scale"), (scale for _, scale in found), strict=True))
    return [codes for codes, _ in found], scales, sum(a.nbytes for pair in found for a in pair)


def numbers_of(caches, scales):
    """The numbers that K and V stand for, in their caches' order."""
    if not scales:
        return [torch.from_dlpack(tikv.dequantize(a)) for a in caches]
    return [
        torch.from_dlpack(a) * torch.from_dlpack(b)[..., None].float()
        for a, b in zip(caches, scales.values(), strict=True)
    ]


def check_first(out, q, k, v):
    """Fail unless the first sequence's result is what float64 gives of its K and V."""
    grouped = q[0].double().reshape(HEADS, -1, WIDTH)
    weights = torch.softmax(grouped @ k.double().transpose(-1, -2) * WIDTH**-0.5, dim=-1)
    want = (weights @ v.double()).reshape(-1, WIDTH)
    assert ((out[0].double() - want).norm() / want.norm()).item() < 2e-3


class Contiguous:
    """Sequences of one length, each head of each in one piece."""

    def __init__(self, batch, length):
        self.shape = batch, HEADS, length, WIDTH
        self.lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def call(self, q, caches, scales, out):
        """One step of attention."""
        return tikv.decode_attention(q, *caches, self.lens, out=out, impl="taichi", **scales)

    def first(self, numbers):
        """K or V of the first sequence."""
        return numbers[0]


class Pages(Contiguous):
    """The same in pages, which lie in random order."""

    def __init__(self, batch, length):
        super().__init__(batch, length)
        blocks = batch * length // PAGE
        self.shape = blocks, PAGE, HEADS, WIDTH
        self.table = torch.randperm(blocks, device="cuda").int().reshape(batch, -1).contiguous()

    def call(self, q, caches, scales, out):
        return tikv.paged_decode_attention(q, *caches, self.table, self.lens, out=out, **scales)

    def first(self, numbers):
        return numbers[self.table[0].long()].flatten(0, 1).transpose(0, 1)


def codes(flushed):
    """The speed over each format, as times own float16's in the same storage."""
    print("| sequences x tokens, query heads a KV head | storage | format | us | GB/s | tokens/s, times float16's |")
    print("| --- | --- | --- | --- | --- | --- |")
    for batch, length in SHAPES:
        for storage in (Contiguous(batch, length), Pages(batch, length)):
            codes_in(storage, batch, f"{batch} x {length}", flushed)


def codes_in(storage, batch, shape, flushed):
    """The rows of one storage."""
    like, kind = {"device": "cuda", "dtype": torch.float16}, type(storage).__name__.lower()
    k, v = (torch.randn(storage.shape, **like) for _ in "kv")
    queries, plain = {group: torch.randn(batch, HEADS * group, WIDTH, **like) for group in (1, 4)}, {}
    for name in ("float16", *FORMATS):
        caches, scales, nbytes = ([k, v], {}, k.nbytes + v.nbytes) if name == "float16" else coded(name, k, v)
        numbers = [storage.first(a) for a in ((k, v) if name == "float16" else numbers_of(caches, scales))]
        for group, q in queries.items():
            out = torch.empty_like(q)
            call = functools.partial(storage.call, q, caches, scales, out)
            call()
            check_first(out, q, *numbers)
            time = time_of([call], flushed)
            plain.setdefault(group, time)
            rates = f"{time:.1f} | {nbytes / time / 1e3:.0f} | {plain[group] / time:.2f}"
            print(f"| {shape}, {group} | {kind} | {name} | {rates} |", flush=True)
            if name.startswith("quant4") and kind == "contiguous" and batch == SHAPES[0][0]:
                wide = [torch.empty_like(k) for _ in "kv"]
                time = time_of([functools.partial(dequantise_and_attend, q, caches, wide)], flushed)
                print(f"| | | dequantised for torch's attention | {time:.1f} | | |", flush=True)


def dequantize(flushed):
    """Every number of a cache of each format as float16, beside the device's own copy."""
    numbers = torch.randn(DEQUANTISED, WIDTH, device="cuda", dtype=torch.float16)
    out = torch.empty_like(numbers)
    copied = 2 * out.nbytes / time_of([functools.partial(out.copy_, numbers)], flushed) / 1e3
    print("| format | us | GB/s read and written | share of the device's copy |\n| --- | --- | --- | --- |")
    for name in FORMATS:
        found = tikv.quantize(numbers, name)
        arrays = found if name == "int8" else (found,)
        time = time_of([functools.partial(tikv.dequantize, *arrays, out=out)], flushed)
        rate = (sum(a.nbytes for a in arrays) + out.nbytes) / time / 1e3
        print(f"| {name} | {time:.1f} | {rate:.0f} | {rate / copied:.2f} |", flush=True)


def dequantise_and_attend(q, caches, wide):
    """All of K and V as float16, then torch's attention."""
    for a, to in zip(caches, wide, strict=True):
        tikv.dequantize(a, out=to)
    return torch.nn.functional.scaled_dot_product_attention(q[:, :, None], *wide, enable_gqa=True)


def latent(flushed):
    """Microseconds where the values are columns of the keys, and where they are an array of their own."""
    width, width_v, heads = 576, 512, 16
    print("| sequences x tokens | tikv, columns of the keys | tikv, two arrays | torch, two arrays |")
    print("| --- | --- | --- | --- |")
    for batch, length in SHAPES[:2]:
        like = {"device": "cuda", "dtype": torch.float16}
        k, q = torch.randn(batch, 1, length, width, **like), torch.randn(batch, heads, width, **like)
        v, out = k[..., :width_v].contiguous(), torch.empty(batch, heads, width_v, **like)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        weights = torch.softmax(q[0].double() @ k[0, 0].double().T * width**-0.5, dim=-1)
        want = weights @ v[0, 0].double()
        calls = [
            functools.partial(tikv.decode_attention, q, k, None, lens, head_dim_v=width_v, out=out),
            functools.partial(tikv.decode_attention, q, k, v, lens, out=out, impl="taichi"),
        ]
        found = []
        for call in calls:
            out.fill_(7)
            call()
            assert ((out[0].double() - want).norm() / want.norm()).item() < 2e-3
            found.append(time_of([call], flushed))
        attention = torch.nn.functional.scaled_dot_product_attention
        found.append(time_of([functools.partial(attention, q[:, :, None], k, v, enable_gqa=True)], flushed))
        print(f"| {batch} x {length} | {' | '.join(f'{time:.1f}' for time in found)} |", flush=True)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["decode", "prompts", "codes", "dequantize", "latent"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512, 2048], help="of prompts")
    given = parser.parse_args()
    tikv.init("cuda")
    print(f"{environment.line(environment.environment(['cuda']))}, triton {triton.__version__}\n")
    torch.manual_seed(0)
    flushed = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    if given.what == "decode":
        decode(flushed)
    elif given.what == "codes":
        codes(flushed)
    elif given.what == "dequantize":
        dequantize(flushed)
    elif given.what == "latent":
        latent(flushed)
    else:
        prompts(given.tokens, flushed)


if __name__ == "__main__":
    main()
