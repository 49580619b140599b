"""The inputs of attention's kernels: compile-time choices, three vectors of numbers, and the types of the arrays."""

from typing import NamedTuple

from tikv.formats import GROUP_FORMATS
from tikv.kernels.address import index_array
from tikv.kernels.codec import ELEMENT, SIZE, element_array, scale_array, word_array
from tikv.kernels.groups import UNIT
from tikv.runtime import ti

LOG2E = 1.4426950408889634
MASKED = -3.4028234663852886e38  # the logit of a key that is not visible: finite, since a score may be -infinity
MASKED_BITS = 0xFF7FFFFF
LOWEST = -3.3e38  # other logits are larger, or -infinity, or NaN
INFINITY, MINUS_INFINITY, NAN = 0x7F800000, 0xFF800000, 0x7FC00000
NOT_STORED = 0xFFFFFFFF  # in the place of a part's log-sum-exp: it has no keys, and its results are not written
MAX_TOKENS = 1 << 30  # more tokens than a launch can see
HIDDEN = 0x7FFFFFFF  # the index of a key that does not exist


class StoredValues(NamedTuple):
    """How V is stored if it differs from K."""

    cache: str  # as in `Choices`
    bits: int
    scale: str


class Choices(NamedTuple):
    """Compile-time choices: how keys are found, what the words hold, which rows a task computes."""

    kind: str  # "linear", "ring" or "table"
    page: int  # slots of a page; 0 without a table
    sinks: bool
    cache: str  # dtype code of K and V, or the name of their format with groups
    bits: int  # of a word of K and V
    scale: str  # dtype code of the scales, or ""
    k_inner: tuple[int, int]  # (chunk, stride) in words of a row that lies in pieces; (0, 0) for one in one piece
    v_inner: tuple[int, int]
    query: str  # dtype code of q
    out: str  # dtype code of the result; "f32" for the parts of splits
    width: int
    width_v: int
    group: int  # query heads of a KV head
    rows: int  # query rows of a task
    causal: bool
    masked: bool  # whether queries of a task may see different keys
    softcap: bool
    lens_bits: int  # 0: one length for all sequences, `P.length`
    table_bits: int
    lens_by_head: bool = False  # a length for each KV head of a sequence
    table_by_head: bool = False  # a row of the table for each KV head, whose pages hold only that head
    sink_logits: bool = False  # one more logit for each query head, in the denominator only
    alibi: bool = False  # slopes of the distance between key and query
    two_sided: bool = False  # the distance counts for newer keys as it does for older ones
    block: int = 0  # consecutive tokens on one rank, if slopes also count the tokens of other ranks
    tree: bool = False  # an array says which new tokens a query sees
    values: StoredValues | None = None  # None: V is stored as K is
    starts: bool = False  # the first visible key of a sequence follows its length
    index_bits: int = 0  # bits of an entry of the array that says which tokens are read; 0 if all are read
    scored: bool = False  # K holds the products of queries and keys: a row for each query row, `k_block` apart
    eight: bool = False  # products take codes of 8 bits, see `sm90.eight`
    invariant: bool = False  # a row has the same bits whatever else is computed: see `ops.attention.invariance`

    @property
    def terms(self) -> bool:
        """Whether the kernels take arrays of terms: see the module `terms`."""
        return self.sink_logits or self.alibi or self.tree or self.index_bits > 0

    @property
    def gaps(self) -> bool:
        """Whether a key in the range of a task may be missing."""
        return self.kind == "table" or self.index_bits > 0 or self.invariant

    @property
    def of_values(self) -> "Choices":
        """The choices for reading V: K's are replaced by V's."""
        return self if self.values is None else self._replace(**self.values._asdict(), values=None)

    @property
    def groups(self) -> bool:
        """Whether K and V have a format with groups, each with its own scale."""
        return self.cache in GROUP_FORMATS

    @property
    def row_scale(self) -> bool:
        """Whether a key has one scale of K and one of V."""
        return self.scale != "" and not self.groups

    @property
    def unit(self) -> int:
        """Elements in a word of K and V, or codes that are read together."""
        if self.groups:
            return UNIT
        return self.bits // (SIZE[self.cache] * 8)


class AttentionStrides(NamedTuple):
    """Strides and first entries, counted in words for K and V, and in elements for all other arrays."""

    q_sequence: int = 0
    q_head: int = 0
    q_token: int = 0
    q_first: int = 0
    out_sequence: int = 0
    out_head: int = 0
    out_token: int = 0
    out_first: int = 0
    lse_sequence: int = 0
    lse_head: int = 0
    lse_token: int = 0
    k_sequence: int = 0
    k_block: int = 0
    k_token: int = 0
    k_head: int = 0
    k_first: int = 0
    v_sequence: int = 0
    v_block: int = 0
    v_token: int = 0
    v_head: int = 0
    v_first: int = 0
    scale_sequence: int = 0
    scale_block: int = 0
    scale_token: int = 0
    scale_head: int = 0
    k_scale_first: int = 0
    v_scale_first: int = 0
    lens_sequence: int = 0
    lens_first: int = 0
    table_sequence: int = 0
    table_block: int = 0
    table_first: int = 0


class AttentionParams(NamedTuple):
    """The other integers of a launch."""

    tasks: int = 0
    splits: int = 1
    heads: int = 0  # KV heads
    queries: int = 1
    row_blocks: int = 1  # tasks of a KV head and split
    length: int = 0  # of every sequence, if there is no array of lengths
    capacity: int = 0  # slots, which bound the lengths of a cache that is not a ring
    sinks: int = 0
    window: int = MAX_TOKENS  # tokens after the sinks that a query sees, including its own
    ring: int = 0  # slots after the sinks, which wrap
    ahead: int = 0  # tokens by which the newest query is newer than the newest key
    first_valid: int = 0  # oldest position after the sinks that is still stored
    blocks: int = 0  # of the pool
    lse_first: int = 0  # of the parts' log-sum-exps, or of the result's
    out_lse_first: int = 0  # of the result's, if parts are merged
    part_first: int = 0
    keys: int = 0  # upper bound of the visible keys of a KV head, if a thread has the mass of one; or chosen by a query
    batch: int = 1
    heads_per_task: int = 1  # KV heads; more than one on CPU only
    keys_per_pass: int = 0  # on CPU: keys of a head that are read before those of the next
    prefetch: int = 0  # on CPU: `cpu.attend.PREFETCH_TOKENS`, `PREFETCH_PAGES` or 0
    work_floats: int = 0  # of a worker
    work_first: int = 0  # of the workers; always 0, but with a constant LLVM would not vectorise a single worker's loop
    least_share: int = 0  # minimum number of keys in a split, or in the parts of a task: see `splits.Shares`
    lens_head: int = 0  # a stride for which Taichi's vectors have no more room: between the lengths of heads
    table_head: int = 0  # another: between their rows of the table
    indices_sequence: int = 0  # others: of the array that says which tokens are read
    indices_head: int = 0
    indices_query: int = 0
    indices_first: int = 0
    split_keys: int = 0  # positions of a split, where splits have one length
    later: int = 0  # queries of a sequence that come after those of this launch


class AttentionScalars(NamedTuple):
    """The real numbers of a launch."""

    logit_scale: float = 1.0  # with a soft cap, divided by it; otherwise times log2(e)
    softcap: float = 1.0  # times log2(e)
    lse_scale: float = 1.0  # from base 2 to the requested base
    value_scale: float = 1.0  # of the whole tensor V, which only some formats with groups have


class AttentionTerms(NamedTuple):
    """Strides and first entries of the arrays of terms, in elements; a vector for kernels that take such arrays."""

    sink_head: int = 0
    sink_first: int = 0
    slope_sequence: int = 0
    slope_head: int = 0
    slope_first: int = 0
    tree_first: int = 0
    tree_words: int = 0  # of a new token
    newer: int = 0  # tokens after its own that a query sees
    first_query: int = 0  # position of the first query, minus a round's tokens on ranks before this one
    others: int = 0  # tokens of other ranks between two blocks of this one


# The place of each number in its vector: strides[S.k_head], params[P.splits], scalars[X.softcap].
S = AttentionStrides(*range(len(AttentionStrides._fields)))
P = AttentionParams(*range(len(AttentionParams._fields)))
X = AttentionScalars(*range(len(AttentionScalars._fields)))
N = AttentionTerms(*range(len(AttentionTerms._fields)))
STRIDES = ti.types.vector(len(S), ti.i32)
PARAMS = ti.types.vector(len(P), ti.i32)
SCALARS = ti.types.vector(len(X), ti.f32)
TERMS = ti.types.vector(len(N), ti.i32)
BITS = ti.types.ndarray(dtype=ti.u32, ndim=1)  # log-sum-exps: the bits of float32
FLOATS = ti.types.ndarray(dtype=ti.f32, ndim=1)


def array_types(style, c):
    """The types of (q, K and V, lengths, table, scales, out); on CPU, words of K, V and scales are elements."""
    cache, scale = word_array(c.bits), scale_array(c.scale)
    if style == "cpu" and c.groups:
        scale = ti.types.ndarray(dtype=ELEMENT[c.scale], ndim=1)
    elif style == "cpu":
        cache, scale = (ti.types.ndarray(dtype=ELEMENT[code], ndim=1) for code in (c.cache, c.scale or "f32"))
    return (
        element_array(c.query),
        cache,
        index_array(c.lens_bits),
        index_array(c.table_bits),
        scale,
        element_array(c.out),
    )


def make_attend_kernel(attend_all, style, c):
    """attend(...): a kernel around attend_all(arrays, terms, strides, params, scalars), with terms or without."""
    Q, K, LENS, TABLE, KSC, OUT = array_types(style, c)
    _, V, _, _, VSC, _ = array_types(style, c.of_values)
    INDEX = index_array(c.index_bits)

    @ti.kernel
    def attend(q: Q, k: K, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
               strides: STRIDES, params: PARAMS, scalars: SCALARS):  # fmt: skip
        attend_all((q, k, v, lens, table, k_scale, v_scale, out, lse), (), strides, params, scalars)

    @ti.kernel
    def attend_with_terms(q: Q, k: K, v: V, lens: LENS, table: TABLE, k_scale: KSC, v_scale: VSC, out: OUT, lse: BITS,
                          sink_logits: FLOATS, slopes: FLOATS, tree: BITS, indices: INDEX, strides: STRIDES,
                          params: PARAMS, scalars: SCALARS, numbers: TERMS):  # fmt: skip
        terms = ti.static((sink_logits, slopes, tree, numbers))
        if ti.static(c.index_bits > 0):
            arrays = ti.static((q, k, v, lens, (table, indices), k_scale, v_scale, out, lse))
            attend_all(arrays, terms, strides, params, scalars)
        else:
            attend_all((q, k, v, lens, table, k_scale, v_scale, out, lse), terms, strides, params, scalars)

    return attend_with_terms if c.terms else attend
