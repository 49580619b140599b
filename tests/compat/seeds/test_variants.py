"""Every row of `spec.VARIANTS`, without a line of its own: what a name fixes is read from the table."""

import inspect

import numpy as np
import oracle
import pytest

import tikv
from tikv import arrays, dtypes, reference
from tikv.compat.seeds import variants
from tikv.compat.seeds.spec import VARIANTS

HEADS, WIDTH, CAPACITY = 3, 8, 7
SPECS = list(VARIANTS.values())
MAPPED = {mapping: [s for s in SPECS if s.mapping == mapping] for mapping in ("flag", "slot", "ring")}


def by_name(specs):
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: spec.name)


class Call:
    """A variant's arrays, full of bits, and what the oracle makes of them."""

    def __init__(self, rng, arch, spec, tokens=1, flat_token=False):
        given, self.keywords = variants.example_arrays(spec, tokens=tokens, heads=HEADS, width=WIDTH, capacity=CAPACITY)
        self.spec, self.arch = spec, arch
        self.sources = [oracle.random_bits(rng, a.shape, a.dtype) for a in given[: spec.streams]]
        self.before = [oracle.random_bits(rng, a.shape, a.dtype) for a in given[spec.streams :]]
        if spec.converts:
            for a in self.sources:
                a.reshape(-1)[::2] = oracle.numbers(rng, a.reshape(-1)[::2].shape, a.dtype)
        sources = [a.reshape(-1) if flat_token else a for a in self.sources]
        self.given = [oracle.place(a.copy(), arch) for a in [*sources, *self.before]]

    def run(self, **keywords):
        getattr(tikv.variants, self.spec.name)(*self.given, **keywords)

    def expect(self, position, *, window=None, num_tokens=None, src_offset=0):
        """Compare the whole caches with the oracle; the sources are as they were."""
        for i, (src, before) in enumerate(zip(self.sources, self.before, strict=True)):
            cache = self.given[self.spec.streams + i]
            if self.spec.mapping == "flag":
                rows, old = src[:, None, :], before[:, None, :]
            else:
                rows, old = (src[None] if self.spec.tokens == "one" else src), before
            want = reference.copy(
                rows,
                old,
                position=position,
                window=window,
                num_tokens=num_tokens,
                src_offset=src_offset,
                src_layout=self.spec.src_layout,
                cache_layout=self.spec.cache_layout,
            )
            oracle.assert_same_bits(cache, want.reshape(before.shape), what="kv"[i], any_nan=self.spec.converts)
            oracle.assert_same_bits(oracle.to_numpy(self.given[i]).reshape(src.shape), src, what="source")

    def unchanged(self):
        for i, before in enumerate(self.before):
            oracle.assert_same_bits(self.given[self.spec.streams + i], before, what="refused")


def test_there_are_twelve():
    assert len(VARIANTS) == 12
    assert all(name == spec.name for name, spec in VARIANTS.items())


@by_name(SPECS)
def test_its_signature_is_arrays_then_keywords(spec):
    parameters = inspect.signature(getattr(tikv.variants, spec.name)).parameters.values()
    arrays = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = ["src", "cache"] if spec.streams == 1 else ["src_k", "src_v", "cache_k", "cache_v"]
    assert arrays == names
    keywords = {
        "flag": ["write_pos", "is_sliding", "n_new"],
        "slot": ["seq_pos"],
        "ring": ["seq_pos_start", "n_tokens", "src_tok_offset"],
    }
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == keywords[spec.mapping]


@by_name(MAPPED["flag"])
@pytest.mark.parametrize(("tokens", "n_new", "position"), [(1, None, 0), (7, None, 0), (5, 2, 5), (0, None, 7)])
def test_rows_of_a_linear_cache(arch, rng, spec, tokens, n_new, position):
    call = Call(rng, arch, spec, tokens)
    call.run(write_pos=position, n_new=n_new)
    call.expect(position, num_tokens=n_new)


@by_name(MAPPED["flag"])
@pytest.mark.parametrize(
    ("tokens", "n_new", "position"),
    [(1, None, 6), (3, None, 6), (7, None, 3), (8, None, 0), (17, None, 12), (20, 9, 2**31), (4, None, 2**32 - 2)],
)
def test_rows_of_a_sliding_cache(arch, rng, spec, tokens, n_new, position):
    """More rows than slots keep the newest, and a position counts past 32 bits."""
    call = Call(rng, arch, spec, tokens)
    call.run(write_pos=position, is_sliding=True, n_new=n_new)
    call.expect(position, window=CAPACITY, num_tokens=n_new)


@by_name(MAPPED["flag"])
@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"write_pos": 5}, tikv.CapacityError, r"write_pos=5 \+ n_new=3 > capacity=7\). .* or is_sliding=True"),
        ({"write_pos": 0, "n_new": 4}, tikv.PositionError, r"src_offset=0 \+ n_new=4 exceeds the 3 tokens given"),
        ({"write_pos": -1}, tikv.PositionError, "write_pos=-1 is outside"),
    ],
)
def test_rows_that_do_not_fit_are_refused(arch, rng, spec, keywords, error, message):
    call = Call(rng, arch, spec, 3)
    with pytest.raises(error, match=f"^{spec.name}: .*{message}"):
        call.run(**keywords)
    call.unchanged()


@by_name(MAPPED["slot"])
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
@pytest.mark.parametrize("seq_pos", [0, 3, CAPACITY - 1])
def test_a_token_goes_to_its_slot(arch, rng, spec, seq_pos, flat):
    call = Call(rng, arch, spec, flat_token=flat)
    call.run(seq_pos=seq_pos)
    call.expect(seq_pos)


@by_name(MAPPED["slot"])
@pytest.mark.parametrize("seq_pos", [CAPACITY, CAPACITY + 1, 2**40, -1])
def test_a_slot_that_is_none_is_refused(arch, rng, spec, seq_pos):
    """The seed writes into the next head's rows here."""
    call = Call(rng, arch, spec)
    with pytest.raises(tikv.PositionError, match=f"^{spec.name}: seq_pos={seq_pos} is "):
        call.run(seq_pos=seq_pos)
    call.unchanged()


@by_name(MAPPED["ring"])
@pytest.mark.parametrize(
    ("tokens", "start", "n_tokens", "offset"),
    [
        (0, 3, None, 0),
        (1, 0, None, 0),
        (1, CAPACITY - 1, None, 0),
        (4, CAPACITY - 2, None, 0),
        (CAPACITY, 0, None, 0),
        (CAPACITY + 1, 5, None, 0),
        (2 * CAPACITY + 3, 2, None, 0),
        (9, 3, 4, 5),
        (30, 1, 20, 7),
        (9, 2**32 - 3, None, 1),
        (9, 2**40 + 1, 3, 0),
    ],
)
def test_a_sequence_wraps(arch, rng, spec, tokens, start, n_tokens, offset):
    call = Call(rng, arch, spec, tokens)
    call.run(seq_pos_start=start, n_tokens=n_tokens, src_tok_offset=offset)
    call.expect(start, window=CAPACITY, num_tokens=n_tokens, src_offset=offset)


@by_name(MAPPED["ring"])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"seq_pos_start": 0, "n_tokens": 4}, r"src_tok_offset=0 \+ n_tokens=4 exceeds the 3 tokens given"),
        ({"seq_pos_start": 0, "src_tok_offset": 4}, r"src_tok_offset=4 \+ n_tokens=0 exceeds the 3 tokens given"),
        (
            {"seq_pos_start": 0, "n_tokens": 2, "src_tok_offset": 2},
            r"src_tok_offset=2 \+ n_tokens=2 exceeds the 3",
        ),
        ({"seq_pos_start": -1}, "seq_pos_start=-1 is outside"),
        ({"seq_pos_start": 2**63 - 1}, r"seq_pos_start \+ n_tokens=\d+ is outside"),
        ({"seq_pos_start": 0, "src_tok_offset": -1}, "src_tok_offset=-1 is outside"),
    ],
)
def test_a_range_past_the_source_is_refused(arch, rng, spec, keywords, message):
    """Token-major or head-major; the seed's head-major form reads the next head's rows here."""
    call = Call(rng, arch, spec, 3)
    with pytest.raises(tikv.PositionError, match=f"^{spec.name}: .*{message}"):
        call.run(**keywords)
    call.unchanged()


@by_name(SPECS)
def test_another_dtype_is_refused(arch, rng, spec):
    call = Call(rng, arch, spec)
    call.given[0] = oracle.place(np.zeros(call.sources[0].shape, np.float16), arch)
    with pytest.raises(
        tikv.DTypeError,
        match=rf"^{spec.name}: {'src' if spec.streams == 1 else 'src_k'} is .*; this variant takes {spec.src_dtype}",
    ):
        call.run(**call.keywords)
    call.unchanged()


@by_name(SPECS)
def test_another_rank_is_refused(arch, rng, spec):
    call = Call(rng, arch, spec)
    call.given[spec.streams] = call.given[spec.streams][0]
    with pytest.raises(tikv.ShapeError, match=f"^{spec.name}: "):
        call.run(**call.keywords)
    oracle.assert_same_bits(call.given[spec.streams], call.before[0][0])


@by_name([spec for spec in SPECS if spec.streams == 2])
def test_k_and_v_that_disagree_are_refused(arch, rng, spec):
    call = Call(rng, arch, spec, 2)
    call.given[-1] = call.given[-1][:, :-1]
    with pytest.raises(tikv.ShapeError, match=f"^{spec.name}: the capacity of cache_v is 6 where 7 is needed"):
        call.run(**call.keywords)
    oracle.assert_same_bits(call.given[2], call.before[0])


def test_a_plan_that_another_operation_made_does_not_lend_its_words(arch):
    k, cache = (oracle.place(np.zeros(shape, np.float32), arch) for shape in ((2, HEADS, WIDTH), (HEADS, 4, WIDTH)))
    other = oracle.place(np.zeros((HEADS, 4, WIDTH), np.float32), arch)
    tikv.copy_kv(k, k, cache, other, position=0, window=4)
    with pytest.raises(tikv.ShapeError, match=r"^kv_cache_copy_seq_f32_dual: cache_k .* and cache_v .* overlap"):
        tikv.variants.kv_cache_copy_seq_f32_dual(k, k, cache, cache, seq_pos_start=0)


def test_warmup_compiles_every_kernel_a_decode_step_needs(arch):
    """After it, calls of the same heads and width compile nothing."""
    assert tikv.warmup(num_kv_heads=HEADS, head_dim=WIDTH) == list(VARIANTS)
    live = arrays.runtime_of()
    compiled = len(live.kernels)
    for name, spec in VARIANTS.items():
        given, keywords = variants.example_arrays(spec, tokens=1, heads=HEADS, width=WIDTH, capacity=5)
        getattr(tikv.variants, name)(*(oracle.place(a, arch) for a in given), **keywords)
    assert len(live.kernels) == compiled


def test_warmup_of_some_names(arch):
    assert tikv.warmup("kv_cache_copy_f32", "kv_cache_copy", num_kv_heads=1, head_dim=4) == [
        "kv_cache_copy_f32",
        "kv_cache_copy",
    ]
    with pytest.raises(tikv.OptionError, match=r"warmup: unknown variant 'nothing'. Use one of kv_cache_copy, "):
        tikv.warmup("nothing")


@by_name(SPECS)
def test_the_table_names_real_dtypes(spec):
    for name in (spec.src_dtype, spec.cache_dtype):
        assert dtypes.parse(name, "test").name == name
