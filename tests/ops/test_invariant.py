"""``tikv.init(invariant=True)``: the same bits for a row over random cuts of the same work, and values as before."""

import collections
import itertools

import ml_dtypes
import numpy as np
import oracle
import pytest
from invariance import invariant, same
from ops.test_attention import random_rows

import tikv
from tikv import arrays, launch, reference
from tikv.formats import GROUP_FORMATS
from tikv.launch import launcher
from tikv.ops.attention import invariance
from tikv.ops.quantize import Quantized

pytestmark = pytest.mark.thorough

KEYS = 128  # of a split, so that short sequences have several
PAGE = 8
WIDTH = 64
HALF = {"dtype": "float16", "query_dtype": np.float16}
CODES = ["int8", "float8_e4m3fn", "float8_e5m2", "quant8_64", "quant4_32", "quant4_64", "q8_0", "q4_0"]
CODES += ["mxfp8", "mxfp4", "nvfp4"]
WARPGROUPS = "tikv.ops.attention.families.warpgroups"
CODES_OF_WARPGROUPS = ["int8", "float8_e4m3fn", "quant8_64", "quant4_64", "q8_0", "q4_0"]


def coded(rows, dtype):
    """The codes of rows in a format with groups, and the numbers of the groups; empty for another dtype."""
    if dtype not in GROUP_FORMATS:
        return []
    made = tikv.quantize(oracle.place(rows, arrays.runtime_of().arch), dtype)
    numbers = [oracle.to_numpy(a) for a in (made.scales, made.biases) if a is not None]
    return [oracle.to_numpy(made.codes), np.stack(numbers, axis=-1)]


def spoil(rng, dtype, scales):
    """Give some groups of V scales that are NaN or infinite, and at the ends of sequences scales that are far apart."""
    if dtype in ("mxfp8", "mxfp4", "nvfp4"):
        bits = scales.view(np.uint8)
        bits[:, :, 30, 0], far = 0xFF if dtype != "nvfp4" else 0x7F, bits[:, :, -9::2, 0]
        far[...] = rng.integers(*((60, 190) if dtype != "nvfp4" else (0, 120)), far.shape)
    else:
        scales[:, 0, 30, 0], scales[:, 1, 20, -1], scales[:, :, -9::3, 0] = np.nan, np.inf, 400


class Work:
    """Sequences whose every token has a query, some of it computed at a time."""

    def __init__(
        self,
        rng,
        *,
        dtype="float32",
        group=2,
        lens=(300, 150, 41),
        query_dtype=np.float32,
        width=WIDTH,
        page=PAGE,
        **options,
    ):
        self.rng, self.lens, self.heads, self.group, self.page, self.dtype = rng, lens, 2, group, page, dtype
        shape = (len(lens), self.heads, max(lens), width)
        kept = "float16" if dtype in GROUP_FORMATS else dtype
        self.k, self.k_scale, self.k_real = random_rows(rng, shape, kept)
        self.v, self.v_scale, self.v_real = random_rows(rng, shape, kept)
        self.coded = [*coded(self.k, dtype), *coded(self.v, dtype)]
        # Some queries see these, and those before do not.
        if self.coded:
            spoil(rng, dtype, self.coded[-1][..., 0])
        elif dtype == "int8":
            self.v_scale[:, 0, 30], self.v_scale[:, 1, 20] = np.nan, np.inf
            self.v_scale[:, :, -9::3] = 400
        else:
            self.v[:, 0, 30, 3], self.v[:, 1, 20, 5] = np.nan, np.inf
        self.q = rng.standard_normal((len(lens), self.heads * group, max(lens), width)).astype(query_dtype)
        self.options = options

    def run(self, arch, seqs, ends, tokens, pages=False, **more):
        """(out, lse) of the queries of `tokens` tokens before `ends` of some sequences, each (B, Hq, T, ...)."""
        place = lambda a: oracle.place(np.ascontiguousarray(a), arch)  # noqa: E731
        q = np.stack([self.q[s, :, e - tokens : e] for s, e in zip(seqs, ends, strict=True)])
        q = q[:, :, 0] if tokens == 1 and self.rng.integers(2) else q
        scales = [a for a in (self.k_scale, self.v_scale) if a is not None]
        arrays = self.coded or [self.k, self.v, *scales]
        lens = place(np.array(ends, np.int32))
        options = {**self.options, **more, "return_lse": True}
        if (slopes := options.pop("slopes", None)) is not None:
            options["alibi_slopes"] = place(slopes)
        if (logits := options.pop("sink_logits", None)) is not None:
            options["sink_logits"] = place(logits)
        if pages:
            table, stored = self.in_pages(arrays, seqs, ends)
            k, v, *scales = self.as_given(list(map(place, stored)))
            options.pop("sinks", None)
            call = lambda **kw: tikv.paged_decode_attention(place(q), k, v, place(table), lens, **options, **kw)  # noqa: E731
        else:
            room = max(ends) + int(self.rng.integers(1, 40))
            stored = []
            for a in arrays:
                cache = np.full((len(seqs), self.heads, room, *a.shape[3:]), 77, a.dtype)
                for i, (s, e) in enumerate(zip(seqs, ends, strict=True)):
                    cache[i, :, :e] = a[s, :, :e]
                stored.append(cache)
            k, v, *scales = self.as_given(list(map(place, stored)))
            call = lambda **kw: tikv.decode_attention(place(q), k, v, lens, **options, **kw)  # noqa: E731
        out, lse = map(oracle.to_numpy, call(**dict(zip(("k_scale", "v_scale"), scales, strict=False))))
        return out.reshape(*q.shape[:2], tokens, -1), lse.reshape(*q.shape[:2], tokens)

    def as_given(self, stored):
        """Arrays as calls get them: codes with their numbers in one."""
        if not self.coded:
            return stored
        parts = [(stored[n], [stored[n + 1][..., i] for i in range(stored[n + 1].shape[-1])]) for n in (0, 2)]
        shape = (*stored[0].shape[:-1], self.q.shape[-1])
        return [Quantized(codes, *[*numbers, None][:2], GROUP_FORMATS[self.dtype], shape) for codes, numbers in parts]

    def in_pages(self, arrays, seqs, ends):
        """(block table, pools): the first tokens of sequences in pages of random order."""
        counts = [-(-e // self.page) for e in ends]
        order = iter(self.rng.permutation(sum(counts) + 3))
        table = np.full((len(seqs), max(counts)), -1, np.int32)
        pools = [np.full((sum(counts) + 3, self.page, self.heads, *a.shape[3:]), 77, a.dtype) for a in arrays]
        for i, (s, e) in enumerate(zip(seqs, ends, strict=True)):
            for n in range(counts[i]):
                table[i, n] = next(order)
                first, end = n * self.page, min(e, (n + 1) * self.page)
                for pool, a in zip(pools, arrays, strict=True):
                    pool[table[i, n], : end - first] = np.moveaxis(a[s, :, first:end], 0, 1)
        return table, pools

    def whole(self, arch, first=0):
        """(out, lse) of every token from `first` on, from prompts of 64 tokens one sequence at a time."""
        out = np.zeros(self.q.shape, self.q.dtype)
        lse = np.zeros(self.q.shape[:3], np.float32)
        for s, length in enumerate(self.lens):
            for begin in range(first, length, 64):
                end = min(length, begin + 64)
                out[s, :, begin:end], lse[s, :, begin:end] = (a[0] for a in self.run(arch, [s], [end], end - begin))
        return out, lse

    def cut(self, tokens, first=0):
        """Random sequences in random order, up to which tokens, and how many of each, from `tokens`, after `first`.

        Where queries see all keys, a piece ends where one of the prompts of `whole` does: those see no later keys.
        """
        tokens = int(self.rng.choice(tokens))
        seqs = self.rng.permutation(len(self.lens))[: self.rng.integers(1, len(self.lens) + 1)]
        if self.options.get("causal", True):
            return seqs, [int(self.rng.integers(first + tokens, self.lens[s] + 1)) for s in seqs], tokens
        pieces = [[(n, min(n + 64, self.lens[s])) for n in range(first, self.lens[s], 64)] for s in seqs]
        ends = [[end for begin, end in piece if end - begin >= tokens] for piece in pieces]
        return seqs, [int(self.rng.choice(each)) for each in ends], tokens

    def check(self, arch, cuts, pages=(False, True), tokens=(1, 1, 2, 5, 33), first=0, **options):
        """Fail unless random cuts of the work have the bits of the whole, in tokens from `first` on."""
        out, lse = self.whole(arch, first)
        asked = tokens
        for n in range(cuts):
            seqs, ends, tokens = self.cut(asked, first)
            paged = pages[n % len(pages)] and "sinks" not in self.options
            got = self.run(arch, seqs, ends, tokens, paged, **options)
            for i, (s, e) in enumerate(zip(seqs, ends, strict=True)):
                what = f"sequence {s}, {tokens} tokens before {e}, {'pages' if paged else 'contiguous'}"
                same((got[0][i], got[1][i]), (out[s, :, e - tokens : e], lse[s, :, e - tokens : e]), what)


SLOPES, SINKS = np.array([0.5, 0.25, 0.1, 0.02], np.float32), np.array([0.5, -1, 3, -np.inf], np.float32)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"group": 1}, id="plain"),
        pytest.param({"causal": False, "dtype": "float16", "query_dtype": np.float16}, id="all-keys"),
        *(
            pytest.param(options, id=name)
            for name, options in {
                "window-sinks": {
                    "dtype": "float16",
                    "group": 3,
                    "window": 140,
                    "sinks": 3,
                    "query_dtype": np.float16,
                },
                "slopes-logits": {"dtype": "int8", "slopes": SLOPES, "sink_logits": SINKS, "softcap": 20.0},
                "logits-window": {"dtype": "int8", "sink_logits": SINKS, "window": 30},
                "groups": {"dtype": "quant4_64", "group": 4, "query_dtype": np.float16},
                "floats": {"dtype": "float8_e4m3fn", "query_dtype": np.float16, "window": 140},
            }.items()
        ),
    ],
)
def test_a_row_has_the_same_bits_however_the_work_is_cut(arch, rng, options):
    """Batches, neighbours, prompts in chunks or one token at a time, pages in random order, contiguous memory."""
    work = Work(rng, **options)
    with invariant(KEYS):
        work.check(arch, 16)


@pytest.mark.archs("cuda")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tokens": (1, 33)}, id="plain"),
        pytest.param({"width": 128, "group": 4, "far": 30.0, "tokens": (1, 2, 5, 33)}, id="zeros"),
    ],
)
def test_tensor_cores_divide_the_work_without_changing_a_bit(arch, rng, tiles, options):
    """Few rows, whose warps exchange logits, have the bits of prompts, whose warps have rows of their own."""
    form = {**HALF, **options}
    far, tokens = form.pop("far", 1.0), form.pop("tokens")
    work = Work(rng, **form)
    work.q *= work.q.dtype.type(far)  # so that most weights are 0, and maxima grow in many tiles
    with invariant(KEYS):
        work.check(arch, 24, pages=(False,), tokens=tokens)
    assert {tile.shared_out for tile in tiles} == {"exchange", "rows"}


@pytest.mark.archs("cuda")
@pytest.mark.parametrize(
    ("options", "pages"),
    [
        pytest.param({}, True, id="small-pages"),
        pytest.param({"width": 128, "group": 4, "page": 16}, True, id="pages"),
        pytest.param({"group": 1, "width": 256, "page": 16}, True, id="one-head"),
        pytest.param({"group": 12, "width": 128, "softcap": 20.0}, False, id="many-heads"),
        pytest.param({"group": 3, "window": 140}, False, id="window"),
        pytest.param({"group": 3, "window": 140}, True, id="window-pages"),
        pytest.param({"width": 512}, False, id="wide"),
        pytest.param({"width": 128, "dtype": "bfloat16", "query_dtype": ml_dtypes.bfloat16}, False, id="bfloat16"),
    ],
)
def test_tensor_cores_of_other_forms_divide_the_work(arch, rng, tiles, options, pages):
    """In tokens from the second split on, whose kernels write parts."""
    work = Work(rng, lens=(300, 190, 165), **HALF | options)
    with invariant(KEYS):
        work.check(arch, 24, pages=(pages,), tokens=(1, 33), first=KEYS)
    ways = {"columns"} if work.q.shape[-1] == 512 else {"exchange", "rows"}
    assert {tile.shared_out for tile in tiles} == ways


@pytest.mark.archs("cuda")
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"width": 128, "group": 4, "page": 16}, id="pages"),
        pytest.param({"width": 128, "group": 8, "page": 64, "window": 140, "softcap": 20.0}, id="window"),
        pytest.param({"width": 128, "group": 12, "window": 140, "sinks": 3}, id="sinks"),
        pytest.param({"group": 1}, id="small-pages"),
    ],
)
def test_tensor_cores_over_codes(arch, rng, tiles, dtype, options):
    """Tiles that are copied and tiles that are not, in every number of rows."""
    work = Work(rng, **{**HALF, "dtype": dtype, **options})
    with invariant(KEYS):
        work.check(arch, 24)
    assert {tile.shared_out for tile in tiles} == {"keys"}
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@pytest.mark.archs("cuda")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"width": 128, "group": 4, "page": 16}, id="plain"),
        pytest.param({"width": 128, "group": 4, "far": 30.0}, id="zeros"),
        pytest.param({"width": 64, "group": 1}, id="one-head"),
        pytest.param({"width": 96, "group": 12, "softcap": 20.0}, id="many-heads"),
        pytest.param({"width": 128, "group": 3, "window": 140}, id="window"),
        pytest.param({"width": 128, "group": 3, "window": 140, "sinks": 3}, id="sinks"),
        pytest.param({"width": 128, "causal": False}, id="all-keys"),
        pytest.param({"width": 128, "dtype": "bfloat16", "query_dtype": ml_dtypes.bfloat16}, id="bfloat16"),
        *(
            pytest.param({"width": 128, "group": 4, "page": 16, "dtype": dtype}, id=dtype)
            for dtype in CODES_OF_WARPGROUPS
        ),
        pytest.param(
            {"width": 128, "group": 4, "page": 16, "dtype": "int8", "window": 140, "sinks": 3}, id="int8-sinks"
        ),
    ],
)
def test_warpgroups_merge_parts_here_or_later(arch, rng, warpgroups, monkeypatch, options):
    """Tasks of 64 rows and of 128, which merge the parts of their keys themselves or leave them to a kernel.

    Over codes a task of the latter has any number of parts.
    """
    form = {**HALF, **options}
    far = form.pop("far", 1.0)
    work = Work(rng, **form)
    work.q *= work.q.dtype.type(far)
    run, ways = work.run, collections.Counter()

    def run_one_way(*args, **more):
        way = float(rng.choice([0, 2]))
        ways[way] += 1
        monkeypatch.setattr(f"{WARPGROUPS}.LEAST_FILLED", way)
        monkeypatch.setattr(f"{WARPGROUPS}.fewest_splits", lambda tasks, most, *_: int(rng.integers(1, most + 1)))
        tikv.runtime.current().plans.clear()
        return run(*args, **more)

    work.run = run_one_way
    with invariant(KEYS):
        work.check(arch, 24, tokens=(1, 1, 2, 5, 33, 40))
    assert min(ways.values()) > 4
    assert launch.launcher_report(arrays.runtime_of())["fallbacks"] == {}


@pytest.mark.archs("cuda")
def test_values_of_warpgroups_are_those_of_the_oracle(arch, rng, warpgroups, monkeypatch):
    work = Work(rng, lens=(1000, 41), width=128, group=4, **HALF)
    work.v[~np.isfinite(work.v)] = 1.0
    for way, tokens in itertools.product((0.0, 2.0), (1, 33)):
        monkeypatch.setattr(f"{WARPGROUPS}.LEAST_FILLED", way)
        with invariant(KEYS):
            out, lse = work.run(arch, [0, 1], [1000, 41], tokens)
        for b, h, t in itertools.product(range(2), range(8), {0, tokens - 1}):
            at = reference.visible_positions(work.lens[b], t, tokens)
            q, k, v = work.q[b, h, work.lens[b] - tokens + t], work.k[b, h // 4, at], work.v[b, h // 4, at]
            want = reference.attention(q, k, v.astype(np.float64), scale=128**-0.5)
            np.testing.assert_allclose(out[b, h, t].astype(np.float64), want[0], atol=2e-3)
            np.testing.assert_allclose(lse[b, h, t], want[1], atol=1e-3, rtol=1e-4)


@pytest.mark.archs("cuda")
def test_a_captured_graph_has_the_bits_of_prompts(arch, rng, tiles):
    """A token of each sequence by the tensor cores, as the sequences grow from launch to launch."""
    torch = pytest.importorskip("torch")
    if launch.launcher_report(arrays.runtime_of())["launcher"] != "native":
        pytest.skip("a CUDA graph captures what the native launcher launches")
    work = Work(rng, width=128, group=4, **HALF)
    with invariant(KEYS):
        out, lse = work.whole(arch)
        q = torch.zeros((3, 8, 128), dtype=torch.float16, device="cuda")
        k, v = (oracle.place(a, arch) for a in (work.k, work.v))
        lens = torch.tensor([1, 1, 1], dtype=torch.int32, device="cuda")
        step = lambda: tikv.decode_attention(q, k, v, lens, return_lse=True)  # noqa: E731
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        for ends in ([300, 150, 41], [7, 149, 1], [257, 128, 16]):
            q.copy_(oracle.place(np.stack([work.q[s, :, e - 1] for s, e in enumerate(ends)]), arch))
            lens.copy_(torch.tensor(ends, dtype=torch.int32))
            graph.replay()
            torch.cuda.synchronize()
            for s, e in enumerate(ends):
                same((found[0][s], found[1][s]), (out[s, :, e - 1], lse[s, :, e - 1]), f"{e} tokens")


@pytest.mark.archs("cuda")
def test_without_the_native_launcher_the_plain_kernel_attends(arch, rng, monkeypatch):
    """Other launchers may fuse products with sums, in one kernel of the tensor cores otherwise than in the next."""
    monkeypatch.setattr(launcher, "_selected", "direct")
    work = Work(rng, lens=(70, 41), **HALF)
    with invariant(KEYS) as live:
        work.check(arch, 6, tokens=(1, 33))
        plans = [plan for plan in live.plans.values() if hasattr(plan, "family")]
    assert plans
    assert not any(plan.family.on_tensor_cores for plan in plans)


def test_without_it_the_bits_differ_somewhere(arch, rng):
    """So the comparison can fail."""
    work = Work(rng, lens=(1100, 300), group=4)
    with pytest.raises(AssertionError, match="elements differ"):
        work.check(arch, 40)


@pytest.mark.parametrize("options", [{"window": 140, "sinks": 3}, {"softcap": 20.0}, {"causal": False}])
def test_values_are_those_of_the_oracle(arch, rng, options):
    work = Work(rng, lens=(300, 41), **options)
    work.v[~np.isfinite(work.v)] = 1.0
    with invariant(KEYS):
        out, lse = work.run(arch, [0, 1], [300, 41], 33)
    seen = {name: value for name, value in options.items() if name in ("window", "causal")}
    for b, h, t in itertools.product(range(2), range(4), (0, 7, 32)):
        at = reference.visible_positions(work.lens[b], t, 33, sinks=options.get("sinks", 0), **seen)
        q, k, v = work.q[b, h, work.lens[b] - 33 + t], work.k[b, h // 2, at], work.v[b, h // 2, at].astype(np.float64)
        want = reference.attention(q, k, v, scale=WIDTH**-0.5, softcap=options.get("softcap"))
        np.testing.assert_allclose(out[b, h, t], want[0], atol=1e-5)
        np.testing.assert_allclose(lse[b, h, t], want[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("options", [{}, HALF], ids=["float32", "float16"])
def test_a_choice_of_all_rows_is_dense_attention(arch, rng, by_head, pages, options):
    work = Work(rng, group=3, **options)
    ends, tokens = [290, 1, 41], 1
    indices = np.full((3, 1, max(ends) + 5), -1)
    for row, end in zip(indices, ends, strict=True):
        row[:, :end] = np.arange(end)
    if by_head:
        indices = np.repeat(indices[:, None], 2, 1)
    with invariant(KEYS):
        dense = work.run(arch, range(3), ends, tokens, pages)
        same(work.run(arch, range(3), ends, tokens, pages, indices=oracle.place(indices, arch)), dense)


def test_queries_of_several_launches(arch, rng, monkeypatch):
    """Parts that would take too much memory are merged before the next queries attend."""
    work = Work(rng, window=200)
    with invariant(KEYS):
        out, lse = work.run(arch, [0, 1], [300, 150], 50)
        monkeypatch.setattr(invariance, "MOST_PARTS", 2 * 4 * 3 * WIDTH * 20)
        tikv.runtime.current().plans.clear()
        same(work.run(arch, [0, 1], [300, 150], 50), (out, lse))
        plans = [p for p in tikv.runtime.current().plans.values() if hasattr(p, "by_split")]
    assert [found.of_launch for p in plans for found in p.by_split.values()] == [16]


@pytest.mark.parametrize(
    ("option", "why"), [({"num_splits": 2}, "num_splits=2"), ({"impl": "torch"}, "depend on the batch")]
)
def test_what_has_other_bits_is_refused(arch, rng, option, why):
    with invariant(), pytest.raises(tikv.OptionError, match=rf"{why}.*|invariant=True"):
        Work(rng).run(arch, [0], [300], 1, **option)


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("option", "usual", "set_to", "wrong", "allowed"),
    [
        ("invariant", False, True, 1, "True, False or None"),
        ("attention_bits", 16, 8, 4, "16, 8 or None"),
        ("attention_bits", 16, 8, True, "16, 8 or None"),
    ],
)
def test_it_is_said_at_the_start(python, option, usual, set_to, wrong, allowed):
    """One value for what runs: another is refused, with the way out; a start without it keeps what is set."""
    told = python(
        "import tikv\n"
        f"print(tikv.info()['{option}'], tikv.init('cpu', {option}={set_to}).{option}, tikv.info()['{option}'])\n"
        f"print(tikv.init('cpu').{option})\n"
        f"try: tikv.init('cpu', {option}={usual})\n"
        "except tikv.OptionError as error: print(error)\n"
        f"try: tikv.init('cpu', {option}={wrong})\n"
        "except tikv.OptionError as error: print(error)\n"
        f"print(tikv.runtime.current().{option})\n"
        "tikv.runtime.ti.reset()\n"
        f"print(tikv.init('cpu').{option})\n"
    ).stdout.splitlines()
    assert told[:2] == [f"{usual} {set_to} {set_to}", str(set_to)]
    assert f"{option}={usual}" in told[2]
    assert ".reset()" in told[2]
    assert told[3] == f"init: {option}={wrong} is not {allowed}."
    assert told[4:] == [str(set_to), str(usual)]
