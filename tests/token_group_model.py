"""A store of groups along tokens and its model: all rows that came, and all bits that its codes' memory should have."""

import numpy as np
import oracle
from inside import codes_of

import tikv
from tikv import reference
from tikv.arrays import CacheArray, write_host

BATCH, HEADS, WIDTH, CAPACITY = 2, 2, 32, 150
Q_HEADS = 4


class Model:
    """A store, and for each layer all rows that came, and all bits that its codes' memory should have.

    `values` is what V is stored in: None as K's codes are, a `Quant`, or a dtype.
    """

    def __init__(self, rng, arch, quant, dtype, layers=1, values=None, window=None, sinks=0, capacity=CAPACITY):
        self.rng, self.arch, self.quant, self.dtype = rng, arch, quant, np.dtype(dtype)
        self.batch, self.window, self.sinks = BATCH, window, sinks
        self.values = quant if values is None else values
        form = {"num_layers": layers, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": capacity}
        form |= {"window": window, "sinks": sinks}
        self.store = tikv.KVCacheStore(
            **form, batch_size=BATCH, dtype=quant, v_dtype=values, scale_dtype=self.dtype.name
        )
        self.rows = [np.zeros((2, BATCH, HEADS, 0, WIDTH), np.float32) for _ in range(layers)]  # as the newest are
        self.coded, self.oldest = [0] * layers, [0] * layers  # behind the sinks; the first that is still seen
        self.places = [np.zeros((BATCH, HEADS, 0), int) for _ in range(layers)]  # of rows, among all that ever came
        self.ends = [0] * layers  # how many came
        self.bits = []
        for codes in codes_of(self.store):
            start = [oracle.random_bits(rng, a.shape, a.dtype.numpy) for a in codes.arrays]
            for a, host in zip(codes.arrays, start, strict=True):
                write_host(host, a)
            self.bits.append(start)

    def new(self, count, rows=None):
        """K and V of new tokens, and their queries, (batch, heads, count, width)."""
        k, v, q = (
            self.rng.standard_normal((self.batch, heads, count, WIDTH)).astype(np.float32)
            for heads in (HEADS, HEADS, Q_HEADS)
        )
        if rows is not None:
            k, v = rows
        stored = np.float32 if isinstance(self.values, tikv.Quant) else self.values
        rows = np.stack([k.astype(self.dtype).astype(np.float32), v.astype(stored).astype(np.float32)])
        if isinstance(self.values, tikv.Quant):
            rows[1] = v.astype(self.dtype)
        return [oracle.place(a, self.arch) for a in (k, v, q)], rows, q

    def grow(self, layer, rows):
        """Count one token after another; a group that is older than the ring has room for becomes codes first."""
        group, quant = self.quant.group, self.quant
        for t in range(rows.shape[3]):
            held = self.rows[layer].shape[3] - self.sinks - self.coded[layer]
            if held == quant.residual + group:
                self.encode(layer)
            self.rows[layer] = np.concatenate([self.rows[layer], rows[:, :, :, t : t + 1]], axis=3)
            place = np.full((*rows.shape[1:3], 1), self.ends[layer])
            self.places[layer] = np.concatenate([self.places[layer], place], axis=2)
            self.ends[layer] += 1
            if self.window:
                oldest = self.rows[layer].shape[3] - self.window + self.sinks
                self.oldest[layer] = max(self.oldest[layer], oldest)
            yield t

    def encode(self, layer):
        group, first = self.quant.group, self.sinks + self.coded[layer]
        k, v = self.rows[layer][:, :, :, first : first + group]
        k_codes, k_numbers, v_codes, *v_numbers = self.bits[layer]
        at = self.coded[layer] // group % k_codes.shape[2]
        by_channel = self.quantised(np.ascontiguousarray(k.swapaxes(2, 3)), self.quant)
        k_codes[:, :, at] = by_channel[0]
        k_numbers[:, :, at] = np.stack(by_channel[1:], axis=-1).reshape(k_numbers[:, :, at].shape)
        tokens = slice(at * group, at * group + group)
        if isinstance(self.values, tikv.Quant):
            by_token = self.quantised(np.ascontiguousarray(v), self.values)
            v_codes[:, :, tokens] = by_token[0]
            to = v_numbers[0][:, :, tokens]
            to[...] = np.stack(by_token[1:], axis=-1).reshape(to.shape)
        else:
            v_codes[:, :, tokens] = v.astype(v_codes.dtype)
        self.coded[layer] += group

    def quantised(self, rows, quant):
        rows = rows.astype(self.dtype)
        return reference.quantize_groups(rows, quant.bits, quant.group, "affine", self.dtype)

    def numbers(self, layer):
        """(K, V) of all tokens as attention reads them, (batch, heads, n, width) float32; what was overwritten is 0."""
        group, coded = self.quant.group, self.coded[layer]
        k, v = self.rows[layer].copy()
        k_codes, k_numbers, v_codes, *v_numbers = self.bits[layer]
        room = k_codes.shape[2]
        for g in range(coded // group):
            to, at = slice(self.sinks + g * group, self.sinks + (g + 1) * group), g % room
            if g < coded // group - room:
                k[:, :, to] = v[:, :, to] = 0
                continue
            of_k = k_codes[:, :, at], k_numbers[:, :, at, :, :1], k_numbers[:, :, at, :, 1:]
            k[:, :, to] = reference.dequantize_groups(*of_k, self.quant.bits, "affine").swapaxes(2, 3)
            tokens = slice(at * group, at * group + group)
            if isinstance(self.values, tikv.Quant):
                of_v = v_codes[:, :, tokens], v_numbers[0][:, :, tokens, 0::2], v_numbers[0][:, :, tokens, 1::2]
                v[:, :, to] = reference.dequantize_groups(*of_v, self.values.bits, "affine")
            else:
                v[:, :, to] = v_codes[:, :, tokens].astype(np.float32)
        return k, v

    def held(self, layer):
        """The positions that are held."""
        length = self.rows[layer].shape[3]
        return [*range(min(length, self.sinks)), *range(max(self.sinks, self.oldest[layer]), length)]

    def append(self, layer, count, rows=None):
        placed, rows, _ = self.new(count, rows)
        self.store.append(layer, *placed[:2], layout="head_major")
        for _ in self.grow(layer, rows):
            pass

    def extend(self, layer, count):
        (k, v, q), rows, queries = self.new(count)
        got = oracle.to_numpy(self.store.extend(layer, q, k, v, layout="head_major"))
        for t in self.grow(layer, rows):
            held = self.held(layer)
            check_attention(got[:, :, t], queries[:, :, t], *(a[:, :, held] for a in self.numbers(layer)))

    def trim(self, count):
        self.store.trim(count)
        for layer, end in enumerate(self.ends):
            self.cut(layer, end - count)

    def cut(self, layer, end):
        """Forget the newest tokens of a layer, to which no more than these ever came then."""
        left = self.rows[layer].shape[3] - (self.ends[layer] - end)
        self.rows[layer], self.places[layer] = self.rows[layer][:, :, :, :left], self.places[layer][:, :, :left]
        self.coded[layer] = min(self.coded[layer], max(0, left - self.sinks))
        self.oldest[layer], self.ends[layer] = min(self.oldest[layer], left), end

    def first_whole(self, layer):
        """From which token on no head of a layer lacks one."""
        rows = self.places[layer].reshape(self.batch * HEADS, self.length(layer))
        missing = [set(range(self.ends[layer])) - set(row) for row in rows]
        return 1 + max((number for row in missing for number in row), default=-1)

    def length(self, layer):
        return self.rows[layer].shape[3]

    def compact(self, layer, index):
        """Keep what `index` (batch, heads, n) names of the tokens held; groups whole, those of each head its own."""
        self.store.compact(layer, index)
        group, sinks, held = self.quant.group, self.sinks, np.array(self.held(layer), int)
        end = sinks + self.coded[layer]  # of codes
        groups, ranks = {}, {}
        for at in np.ndindex(*index.shape[:2]):
            kept = held[index[at]]
            coded = kept[(kept >= sinks) & (kept < end)]
            groups[at] = sorted({(n - sinks) // group for n in coded})
            whole = [n for g in groups[at] for n in range(sinks + g * group, sinks + (g + 1) * group)]
            ranks[at] = [*kept[kept < sinks], *whole, *kept[kept >= end]] if whole else [*kept]
            first = sinks + len(whole) - len(coded) if whole and len(coded) < len(whole) else 0
        for i, bits in enumerate(self.bits[layer]):
            each = 1 if i < 2 else group
            parts = bits.reshape(*bits.shape[:2], -1, each, *bits.shape[3:])
            before = parts.copy()
            for at, some in groups.items():
                for to, g in enumerate(some):
                    parts[at][to] = before[at][g % parts.shape[2]]
        order = np.array([*ranks.values()], int).reshape(*index.shape[:2], -1)
        self.rows[layer] = np.take_along_axis(self.rows[layer], order[None, ..., None], axis=3)
        self.places[layer] = np.take_along_axis(self.places[layer], order, axis=2)
        self.coded[layer], self.oldest[layer] = len(groups[0, 0]) * group, first

    def reorder(self, index, name="reorder"):
        """Sequences continue from others; memory that no token has come to may hold anything then."""
        getattr(self.store, name)(index)
        self.batch = len(index)
        self.rows = [rows[:, index] for rows in self.rows]
        self.places = [places[index] for places in self.places]
        group = self.quant.group
        for layer, codes in enumerate(codes_of(self.store)):
            coded = min(self.coded[layer], codes.room)
            for i, (a, bits) in enumerate(zip(codes.arrays, self.bits[layer], strict=True)):
                now, filled = CacheArray(a, self.store.runtime).copy_to_host(), coded // (group if i < 2 else 1)
                now[:, :, :filled] = bits[index][:, :, :filled]
                self.bits[layer][i] = now

    def check(self):
        for i, (codes, bits) in enumerate(zip(codes_of(self.store), self.bits, strict=True)):
            assert self.store.quantised(i) == self.coded[i]
            held = self.held(i)
            assert self.store.held(i) == len(held)
            assert self.store.layer_length(i) == self.ends[i]
            assert self.store.positions(i).tolist() == self.places[i][..., held].tolist()
            for a, want in zip(codes.arrays, bits, strict=True):
                oracle.assert_same_bits(CacheArray(a, self.store.runtime), want, what=f"layer {i}")
            for got, want in zip(self.store.tokens(i), self.numbers(i), strict=True):
                want = want[:, :, held].astype(got.copy_to_host().dtype)
                oracle.assert_same_bits(got, want, what=f"tokens of layer {i}")

    def attend(self, layer, queries=1, **options):
        """Attention of the newest tokens' queries; each sees the tokens up to its own."""
        _, _, q = self.new(queries)
        got = oracle.to_numpy(self.store.attend(layer, oracle.place(q, self.arch), layout="head_major", **options))
        k, v = self.numbers(layer)
        options.pop("missing", None)
        for t in range(queries):
            end = k.shape[2] - queries + t + 1
            seen = [n for n in self.held(layer) if n < end]
            if self.window:
                seen = [n for n in seen if n < self.sinks or n > end - 1 - (self.window - self.sinks)]
            check_attention(got[:, :, t], q[:, :, t], k[:, :, seen], v[:, :, seen], **options)


def check_attention(out, q, keys, values, softcap=None, sink_logits=None):
    for b in range(q.shape[0]):
        for h in range(Q_HEADS):
            at = b, h // (Q_HEADS // HEADS)
            scores = keys[at].astype(np.float64) @ q[b, h] * WIDTH**-0.5
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum() + (0 if sink_logits is None else np.exp(sink_logits[h]))
            np.testing.assert_allclose(out[b, h], weights @ values[at].astype(np.float64) / total, rtol=0, atol=3e-5)
