"""Device time of attention on an NVIDIA GPU, beside torch, Triton and FlashAttention-3; float16, 8 KV heads of 128.

    python benches/attention_gpu.py decode          # GB/s of K and V
    python benches/attention_gpu.py prompts         # TFLOP/s over 8,192 keys, 4 query heads per KV head
    python benches/attention_gpu.py visible         # windows and trees: the time against the number of visible keys
    python benches/attention_gpu.py codes           # each format beside float16 in tikv: one token
    python benches/attention_gpu.py code_prompts    # the same for prompts of 2,048 and 8,192 tokens
    python benches/attention_gpu.py code_prompts --attention-bits 8 --formats int8 float8_e4m3fn
    python benches/attention_gpu.py dequantize      # each format back to float16, beside the device's copy
    python benches/attention_gpu.py latent          # keys of 576 whose first 512 columns are the values

Decoding: tikv reads pages of 16 in random order and contiguous caches. Its peers are a Triton kernel over the same
pages at the fastest of a few settings, torch's own attention over contiguous caches, and FlashAttention-3 over both
if it is installed. A rate is the bytes of K and V divided by the time.

Prompts: the newest tokens of a sequence attend, each under its causal mask, over pages and contiguous caches. torch's
flash attention has the same mask, over K and V that were repeated beforehand; its cuDNN attention sees all keys
without a mask, and its rate counts them all.

Codes: the same sequences in contiguous caches and in pages of each format, beside float16 in the same storage; for 4
bits also beside dequantising all of K and V for torch's attention.

benches/gpu.py says how time is measured.
"""

import functools
import itertools

import flash_attention_3
import torch
from gpu import HEADS, PAGE, WIDTH, Table, check, check_attention, ratio, started
from shapes import FORMATS
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import tikv

GROUP = 4  # query heads per KV head, of prompts
SHAPES = {False: [(32, 8192), (1, 32768), (128, 1024)], True: [(2, 64), (1, 4096)]}  # sequences, tokens; of small runs
PROMPTS = {False: (8192, (64, 512, 2048, 8192)), True: (128, (32,))}  # keys, new tokens
torch_attention = torch.nn.functional.scaled_dot_product_attention


class Contiguous:
    """Sequences of one length; each head of a sequence is in one piece."""

    def __init__(self, machine, batch, length):
        self.shape = batch, HEADS, length, WIDTH
        self.lens = machine.lens(batch, length)

    def call(self, q, caches, out=None, **options):
        """Attention of the newest tokens."""
        return tikv.decode_attention(q, *caches, self.lens, out=out, impl="taichi", **options)

    def sequence(self, numbers, n=0):
        """K or V of a sequence, (heads, tokens, width)."""
        return numbers[n]


class Pages(Contiguous):
    """The same in pages, which lie in random order."""

    def __init__(self, machine, batch, length):
        super().__init__(machine, batch, length)
        blocks = batch * length // PAGE
        self.shape = blocks, PAGE, HEADS, WIDTH
        self.table = torch.randperm(blocks, device=machine.device).int().reshape(batch, -1).contiguous()

    def call(self, q, caches, out=None, **options):
        return tikv.paged_decode_attention(q, *caches, self.table, self.lens, out=out, **options)

    def sequence(self, numbers, n=0):
        return numbers[self.table[n].long()].flatten(0, 1).transpose(0, 1)


STORAGES = (Contiguous, Pages)


def shapes_of(machine):
    """Sequences and tokens of each: the CPU tries the first shape alone."""
    return SHAPES[machine.small][: None if machine.on_gpu else 1]


def sets_of(machine, storage, batch):
    """(K, V) of a storage; several pairs if one would fit into the L2 cache."""
    return [[machine.randn(*storage.shape) for _ in "kv"] for _ in range(4 if batch == 1 and machine.on_gpu else 1)]


def fastest_by_triton(machine, q, sets, storage):
    """Microseconds of the Triton kernel over pages, at the fastest of its settings."""
    try:
        import triton_pages
    except ImportError:
        return "not installed"
    calls = [
        [triton_pages.attend(q, *kv, storage.table, storage.lens, s) for kv in sets] for s in triton_pages.SETTINGS
    ]
    check_attention(calls[0][0]()[0][:, None], q[0][:, None], *(storage.sequence(a) for a in sets[0]))
    return min(machine.us(*each) for each in calls)


def decode(machine):
    """GB/s over several shapes."""
    cases = [(*shape, group) for shape in shapes_of(machine) for group in (8, 4, 1)]
    flash = iter(flash_attention_3.times([(b, 1, n, g, p) for b, n, g in cases for p in (0, PAGE)]))
    head = "tikv, GB/s | of the device's read rate | Triton | torch | FlashAttention-3 | times the best peer's speed"
    table = Table("sequences x tokens, query heads per KV head", "storage", "us", *head.split(" | "))
    for batch, length, group in cases:
        for kind in STORAGES:
            name, fa3 = (f"{batch} x {length:,}, {group}", kind.__name__.lower()), next(flash)
            with table.attempt(*name):
                storage, q = kind(machine, batch, length), machine.randn(batch, HEADS * group, WIDTH)
                sets, out = sets_of(machine, storage, batch), torch.empty_like(q)
                calls = [functools.partial(storage.call, q, kv, out) for kv in sets]
                check_attention(calls[0]()[0][:, None], q[0][:, None], *(storage.sequence(a) for a in sets[0]))
                us, triton, torch_us = machine.us(*calls), "", ""
                if kind is Pages:
                    triton = fastest_by_triton(machine, q, sets, storage)
                else:
                    by_torch = functools.partial(torch_attention, q[:, :, None], enable_gqa=True)
                    torch_us = machine.peer_us(*[functools.partial(by_torch, key=k, value=v) for k, v in sets])
                peers = [each for each in (triton, torch_us, fa3) if not isinstance(each, str)]
                nbytes = sum(a.nbytes for a in sets[0])
                rates = [each if isinstance(each, str) else nbytes / each / 1e3 for each in (us, triton, torch_us, fa3)]
                share = ratio(rates[0], machine.read_rate)
                table.row(*name, us, rates[0], share, *rates[1:], ratio(min(peers), us) if peers else "")


def operations(new, keys, group=GROUP):
    """Multiplications and additions of what causal masks leave of a prompt."""
    return 4 * HEADS * group * WIDTH * (new * (keys - new) + new * (new + 1) // 2)


def prompts(machine):
    """TFLOP/s of what the causal masks leave."""
    keys, counts = PROMPTS[machine.small]
    flash = iter(flash_attention_3.times([(1, new, keys, GROUP, p) for new in counts for p in (0, PAGE)]))
    head = "FlashAttention-3 | times its speed | torch, flash | torch, cuDNN, no mask | times torch flash's speed"
    table = Table("new tokens", "storage", "us", "tikv, TFLOP/s", *head.split(" | "))
    for new in counts:
        for kind in STORAGES:
            name, fa3 = (f"{new:,}", kind.__name__.lower()), next(flash)
            with table.attempt(*name):
                storage, q = kind(machine, 1, keys), machine.randn(1, HEADS * GROUP, new, WIDTH)
                caches, out = [machine.randn(*storage.shape) for _ in "kv"], torch.empty_like(q)
                plain = [storage.sequence(a) for a in caches]
                call = functools.partial(storage.call, q, caches, out)
                check_attention(call()[0], q[0], *plain)
                us, (by_flash, by_cudnn) = machine.us(call), torch_prompts(machine, q, plain)
                work, whole = operations(new, keys), 4 * HEADS * GROUP * WIDTH * new * keys
                timed = [(work, us), (work, fa3), (work, by_flash), (whole, by_cudnn)]
                rates = [each if isinstance(each, str) else n / each / 1e6 for n, each in timed]
                table.row(*name, us, rates[0], rates[1], ratio(fa3, us), *rates[2:], ratio(by_flash, us))


def torch_prompts(machine, q, plain):
    """Microseconds of torch's flash attention with the causal mask, and of cuDNN's without any."""
    k, v = (a[None] for a in plain)
    repeated = [a.repeat_interleave(GROUP, 1) for a in (k, v)]
    causal = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        by_flash = machine.peer_us(functools.partial(torch_attention, q, *repeated, attn_mask=causal))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return by_flash, machine.peer_us(functools.partial(torch_attention, q, k, v, enable_gqa=True))


def visible(machine):
    """Whether a window and a tree of drafts take the time of the keys that are seen."""
    small, (keys, _) = machine.small, PROMPTS[machine.small]
    many, few, drafts, window, sinks = (32, 16, 8, 16, 4) if small else (2048, 512, 64, 1024, 4)
    at = torch.arange(keys, device=machine.device)
    parents = (torch.arange(drafts, device=machine.device) - 1) // 2  # a binary tree
    parents[0] = -1
    ancestors = torch.eye(drafts, dtype=torch.bool, device=machine.device)
    for i in range(1, drafts):
        ancestors[i] |= ancestors[parents[i]]

    def causal(new):
        return at <= (keys - new + torch.arange(new, device=machine.device))[:, None]

    def in_window(new, first=0):
        oldest = keys - new - window + first + torch.arange(new, device=machine.device)
        return causal(new) & ((at > oldest[:, None]) | (at < first))

    tree = causal(drafts)
    tree[:, keys - drafts :] = ancestors
    cases = {  # seen keys of each query, options; those of the same new tokens are compared
        f"{many:,} new tokens, causal": (causal(many), {}),
        f"the same, window {window:,}": (in_window(many), {"window": window}),
        f"the same, window {window:,} with {sinks} sinks": (in_window(many, sinks), {"window": window, "sinks": sinks}),
        f"{few} new tokens, causal": (causal(few), {}),
        f"{few} new tokens, window {window:,}": (in_window(few), {"window": window}),
        f"{drafts} new tokens, causal": (causal(drafts), {}),
        f"the same as a tree of {drafts}": (tree, {"parents": parents[None]}),
    }
    table = Table("work", "storage", "keys that a query sees", "us", "ns per query and key", "times that of causal")
    for kind in STORAGES:
        storage, base = kind(machine, 1, keys), {}
        caches = [machine.randn(*storage.shape) for _ in "kv"]
        for name, (seen, options) in cases.items():
            if kind is Pages and "sinks" in options:
                continue
            with table.attempt(name, kind.__name__.lower()):
                q = machine.randn(1, HEADS * GROUP, len(seen), WIDTH)
                call = functools.partial(storage.call, q, caches, torch.empty_like(q), **options)
                check_attention(call()[0], q[0], *(storage.sequence(a) for a in caches), seen)
                us, pairs = machine.us(call), int(seen.sum())
                each = 1e3 * us / pairs
                if name.endswith("causal"):
                    base[len(seen)] = each
                table.row(
                    name, kind.__name__.lower(), pairs / len(seen), us, each, ratio(each, base.get(len(seen), ""))
                )


def coded(name, k, v):
    """(K and V as codes of a format, what attention takes beside them, the bytes of all)."""
    if name == "float16":
        return [k, v], {}, k.nbytes + v.nbytes
    if name.startswith("float8"):
        found = [a.to(getattr(torch, name)) for a in (k, v)]
        return found, {}, sum(a.nbytes for a in found)
    found = [tikv.quantize(a, name) for a in (k, v)]
    if name != "int8":
        return found, {}, sum(a.nbytes for a in found)
    scales = dict(zip(("k_scale", "v_scale"), (scale for _, scale in found), strict=True))
    return [codes for codes, _ in found], scales, sum(a.nbytes for pair in found for a in pair)


def numbers_of(name, caches, scales):
    """The numbers that K and V stand for, in their caches' order."""
    if name.startswith("float"):
        return [a.float() for a in caches]
    if name != "int8":
        return [torch.from_dlpack(tikv.dequantize(a)) for a in caches]
    return [
        torch.from_dlpack(a) * torch.from_dlpack(b)[..., None].float()
        for a, b in zip(caches, scales.values(), strict=True)
    ]


def codes(machine):
    """The speed of a token over each format, as a multiple of float16's in the same storage."""
    columns = ("query heads per KV head", "storage", "format", "us", "GB/s", "times float16's speed")
    (batch, length), *_ = shapes_of(machine)
    table = Table(f"{batch} x {length:,}: {columns[0]}", *columns[1:])
    for kind in STORAGES:
        queries = {f"{group}": machine.randn(batch, HEADS * group, WIDTH) for group in (1, 4, 8)}
        over_formats(machine, table, kind(machine, batch, length), queries)


def over_formats(machine, table, storage, queries):
    """The rows of a storage: each set of queries, by name, over each format."""
    kind, base = type(storage).__name__.lower(), {}
    k, v = (machine.randn(*storage.shape) for _ in "kv")
    for name in ("float16", *(machine.formats if machine.on_gpu else machine.formats[::3])):
        numbers = None
        with table.attempt("", kind, name):
            caches, scales, nbytes = coded(name, k, v)
            numbers = [storage.sequence(a) for a in numbers_of(name, caches, scales)]
        if numbers is None:
            continue
        for what, q in queries.items():
            with table.attempt(what, kind, name):
                call = functools.partial(storage.call, q, caches, torch.empty_like(q), **scales)
                rows = ((a[0] if a.ndim == 4 else a[0][:, None]) for a in (call(), q))
                check_attention(*rows, *numbers, most=machine.most_error)
                us = machine.us(call)
                if name == "float16":
                    base[what] = us
                rate = nbytes / us / 1e3 if q.ndim == 3 else operations(q.shape[2], int(storage.lens[0])) / us / 1e6
                table.row(what, kind, name, us, rate, ratio(base.get(what, ""), us))
    if kind == "contiguous" and "quant4_64" in machine.formats:
        with table.attempt("", kind, "quant4_64"):
            caches, what, q = coded("quant4_64", k, v)[0], *next(iter(queries.items()))
            wide, q = [torch.empty_like(k) for _ in "kv"], q if q.ndim == 4 else q[:, :, None]
            us = machine.us(functools.partial(dequantise_and_attend, q, caches, wide))
            table.row(what, kind, "quant4_64, dequantised for torch's attention", us, "", ratio(base.get(what, ""), us))


def code_prompts(machine):
    """TFLOP/s of a prompt over each format."""
    keys, prompts = (128, (32,)) if machine.small else (8192, (2048, 8192))
    table = Table("new tokens", "storage", "format", "us", "TFLOP/s", "times float16's speed")
    for kind in STORAGES:
        queries = {f"{new:,}": machine.randn(1, HEADS * GROUP, new, WIDTH) for new in prompts}
        over_formats(machine, table, kind(machine, 1, keys), queries)


def dequantise_and_attend(q, caches, wide):
    """All of K and V as float16, then torch's attention, which sees all."""
    for a, to in zip(caches, wide, strict=True):
        tikv.dequantize(a, out=to)
    return torch_attention(q, *wide, enable_gqa=True)


def dequantize(machine):
    """Every number of a cache of each format as float16, beside the device's own copy."""
    numbers = machine.randn(1 << (8 if machine.small else 21), WIDTH)
    out = torch.empty_like(numbers)
    copied = 2 * out.nbytes / machine.us(functools.partial(out.copy_, numbers)) / 1e3
    table = Table("format", "us", "GB/s read and written", "of the device's copy")
    for name in machine.formats:
        if name.startswith("float8"):
            continue  # floats, which dtypes convert
        with table.attempt(name):
            found = tikv.quantize(numbers, name)
            arrays = found if name == "int8" else (found,)
            us = machine.us(functools.partial(tikv.dequantize, *arrays, out=out))
            check(out, numbers, 0.5)
            rate = (sum(a.nbytes for a in arrays) + out.nbytes) / us / 1e3
            table.row(name, us, rate, ratio(rate, copied))


def latent(machine):
    """Attention to values that are columns of the keys, and to those in an array of their own."""
    width, width_v = 576, 512
    columns = "query heads | values | us | GB/s | of the device's read rate | TFLOP/s | torch, two arrays, us"
    table = Table("sequences x tokens", *columns.split(" | "))
    for (batch, length), heads in itertools.product(shapes_of(machine)[:2], (16, 128)):
        k, q = machine.randn(batch, 1, length, width), machine.randn(batch, heads, width)
        v, lens = k[..., :width_v].contiguous(), machine.lens(batch, length)
        by_torch = machine.peer_us(functools.partial(torch_attention, q[:, :, None], k, v, enable_gqa=True))
        own = functools.partial(tikv.decode_attention, q, k, v, lens, impl="taichi")
        of_keys = functools.partial(tikv.decode_attention, q, k, None, lens, head_dim_v=width_v)
        for values, call, nbytes in (
            ("columns of the keys", of_keys, k.nbytes),
            ("an array of their own", own, k.nbytes + v.nbytes),
        ):
            name = f"{batch} x {length:,}", f"{heads}", values
            with table.attempt(*name):
                check_attention(call()[0][:, None], q[0][:, None], k[0], v[0])
                us = machine.us(call)
                rate, work = nbytes / us / 1e3, 2 * batch * heads * length * (width + width_v)
                table.row(*name, us, rate, ratio(rate, machine.read_rate), work / us / 1e6, by_torch)


if __name__ == "__main__":
    programs = {each.__name__: each for each in (decode, prompts, visible, codes, code_prompts, dequantize, latent)}
    what, machine = started(__doc__, programs, FORMATS)
    programs[what](machine)
