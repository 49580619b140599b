"""Blocks that neighbours share are read once for all of them: against float64, and against each read alone."""

import numpy as np
import oracle
import pytest
from invariance import invariant
from ops.test_attention import TOLERANCE

import tikv
from tikv import reference
from tikv.stores.pools import shared_prefix

HEADS, GROUP, WIDTH, SIZE = 2, 2, 16, 4
SINKS = np.array([0.5, -1, 3, -np.inf], np.float32)


@pytest.fixture
def taken(monkeypatch):
    """Which stretches of neighbours were attended over together, call by call; any sharing is worth it."""
    found, attend = [], shared_prefix.SharedAttention.attend
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 1)

    def noted(self, *arguments):
        found.append([tuple(run) for run in self.runs])
        attend(self, *arguments)

    monkeypatch.setattr(shared_prefix.SharedAttention, "attend", noted)
    return found


class Branches:
    """A pool whose sequences are forks of a prompt, another prompt's, and one alone; and what it holds."""

    def __init__(self, rng, arch, **config):
        self.rng, self.arch = rng, arch
        sizes = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 120, "block_size": SIZE}
        self.pool = tikv.PagedKVCacheStore(**sizes, **{"dtype": "float32", **config})
        self.seqs = []
        for prompt, forks in ((43, 3), (9, 1), (30, 2)):
            first = self.pool.add()
            self.append(first, prompt)
            others = [self.pool.fork(first) for _ in range(forks - 1)]
            self.seqs += [first, *others]
        for n, seq in enumerate(self.seqs):
            self.append(seq, 3 + 2 * n)

    def append(self, seq, tokens):
        k, v = self.rng.standard_normal((2, tokens, HEADS, WIDTH)).astype(np.float32)
        self.pool.append(0, oracle.place(k, self.arch), oracle.place(v, self.arch), [seq], [0, tokens])

    def queries(self, tokens=None, dtype=np.float32):
        lead = (len(self.seqs),) if tokens is None else (len(self.seqs), tokens)
        return self.rng.standard_normal((*lead, HEADS * GROUP, WIDTH)).astype(dtype)

    def attend(self, q, **options):
        options = {n: oracle.place(a, self.arch) if isinstance(a, np.ndarray) else a for n, a in options.items()}
        got = self.pool.attend(0, oracle.place(q, self.arch), self.seqs, **options)
        return [oracle.to_numpy(a) for a in (got if isinstance(got, tuple) else (got,))]

    def expected(self, q, seqs=None, sinks=None, softcap=None):
        """(out, lse) of (B, T, Hq, D) queries in float64."""
        out, lse = np.zeros(q.shape), np.zeros(q.shape[:-1])
        for b, seq in enumerate(self.seqs if seqs is None else seqs):
            k, v = (oracle.to_numpy(a).astype(np.float64) for a in self.pool.tokens(0, seq))
            for t, h in np.ndindex(*q.shape[1:3]):
                end = len(k) - q.shape[1] + 1 + t
                more = {} if sinks is None else {"sink_logit": float(sinks[h])}
                out[b, t, h], lse[b, t, h] = reference.attention(
                    q[b, t, h], k[:end, h // GROUP], v[:end, h // GROUP], scale=WIDTH**-0.5, softcap=softcap, **more
                )
        return out, lse


@pytest.mark.parametrize(
    ("config", "queries", "options"),
    [
        ({}, None, {}),
        ({"dtype": "float16", "layout": "HND"}, 3, {"sink_logits": SINKS}),
        ({"dtype": "int8", "layout": "VLLM"}, None, {"softcap": 5.0}),
        ({"dtype": "int8", "v_dtype": "float16"}, 2, {}),
    ],
    ids=["float32", "float16", "int8", "two"],
)
def test_shared_blocks_are_read_once(arch, rng, taken, config, queries, options):
    """Each of two prompts by its forks; the last block of a prompt is written to by each fork, and so is its own."""
    case = Branches(rng, arch, **config)
    q = case.queries(queries)
    out, lse = case.attend(q, return_lse=True, **options)
    assert taken == [[(0, 3, 10), (3, 4, 0), (4, 6, 7)]]
    known = {name: options[of] for name, of in (("sinks", "sink_logits"), ("softcap", "softcap")) if of in options}
    rows = q if q.ndim == 4 else q[:, None]
    want = [a if q.ndim == 4 else a[:, 0] for a in case.expected(rows, **known)]
    alone = case.attend(q, return_lse=True, shared_prefix="off", **options)
    assert len(taken) == 1
    for got, expected, other in zip((out, lse), want, alone, strict=True):
        np.testing.assert_allclose(got, expected, atol=TOLERANCE["float32"] * 4, rtol=1e-5)
        np.testing.assert_allclose(got, other, atol=TOLERANCE["float32"] * 4, rtol=1e-5)


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_into_an_array_in_the_dtype_of_the_queries(arch, rng, taken, layout):
    """Several queries with heads first do not lie one after another, and are read alone."""
    case = Branches(rng, arch)
    q = case.queries(2, np.float16)
    given = np.ascontiguousarray(q.swapaxes(1, 2)) if layout == "head_major" else q
    to = oracle.place(np.full_like(given, 7), arch)
    got = case.pool.attend(0, oracle.place(given, arch), case.seqs, layout=layout, out=to)
    assert got is to
    assert len(taken) == (layout == "token_major")
    got = oracle.to_numpy(got)
    got = got.swapaxes(1, 2) if layout == "head_major" else got
    np.testing.assert_allclose(got, case.expected(q.astype(np.float64))[0], atol=TOLERANCE["float16"])
    same = oracle.place(given, arch)
    with pytest.raises(tikv.TikvError, match="overlap"):
        case.pool.attend(0, same, case.seqs, layout=layout, out=same)


def test_extend(arch, rng, taken):
    """Forks with as many new tokens each, in one call with a prompt of another length."""
    case = Branches(rng, arch)
    seqs, starts = [*case.seqs[:3], case.seqs[3], *case.seqs[4:]], [0, 2, 4, 6, 11, 13, 15]
    q = rng.standard_normal((15, HEADS * GROUP, WIDTH)).astype(np.float32)
    k, v = rng.standard_normal((2, 15, HEADS, WIDTH)).astype(np.float32)
    place = lambda a: oracle.place(a, arch)  # noqa: E731
    out, lse = case.pool.extend(0, place(q), place(k), place(v), seqs, starts, return_lse=True)
    assert taken == [[(0, 3, 10)], [(0, 2, 7)]]
    for n, seq in enumerate(seqs):
        some = slice(starts[n], starts[n + 1])
        want = case.expected(q[None, some], [seq])
        for got, expected in zip((out, lse), want, strict=True):
            np.testing.assert_allclose(oracle.to_numpy(got)[some], expected[0], atol=4e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 20},
        {"alibi_slopes": SINKS[:3].repeat(2)[:4]},
        {"indices": np.arange(9).repeat(6).reshape(9, 6).T[:, None].copy()},
        {"return_mass": True},
        {"shared_prefix": "off"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_counts_tokens_of_a_sequence_is_read_alone(arch, rng, taken, options):
    case = Branches(rng, arch)
    q = case.queries()
    got, want = case.attend(q, **options), case.attend(q, **{**options, "shared_prefix": "off"})
    assert taken == []
    for a, b in zip(got, want, strict=True):
        oracle.assert_same_bits(a, b)


def test_not_under_invariant(arch, rng, taken):
    case = Branches(rng, arch)
    with invariant():
        case.attend(case.queries())
    assert taken == []


def test_not_where_little_is_saved(arch, rng, taken, monkeypatch):
    """10 blocks of 1,024 bytes that 3 sequences share need not be read twice, 7 that 2 share once."""
    case = Branches(rng, arch)
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 7 * 1024 + 1)
    case.attend(case.queries())
    assert taken == [[(0, 3, 10), (3, 6, 0)]]
    monkeypatch.setattr(shared_prefix, "LEAST_SAVED", 20 * 1024 + 1)
    case.append(case.seqs[0], 1)
    case.attend(case.queries())
    assert len(taken) == 1


def test_another_word_is_refused(arch, rng):
    case = Branches(rng, arch)
    with pytest.raises(tikv.OptionError, match="unknown shared_prefix 'on'"):
        case.attend(case.queries(), shared_prefix="on")
