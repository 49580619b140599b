"""A store that several ranks share and the one store that it must equal, given the same random operations."""

import numpy as np
import oracle
from inside import sharding_of

import tikv
from tikv.distributed.token_sharding import TokenSharding

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
CAPACITY = 48
WRITES = ("append", "extend", "extend", "attend", "attend", "trim")
OPERATIONS = (*WRITES, "append_all", "batch", "undo")  # which copy the memory too, and compile more for it


class Twins:
    """`shared`, cut by heads or tokens, beside `one`; each operation is made on both and compared.

    Args:
        shared: a `ShardedKVCacheStore`.
        form: what both were made of.
        rng: the same numbers on all ranks.
        queries: dtype of queries.
        sharding: how tokens are sharded; None: they are not.
        layouts: of the arrays that come.
        terms: names of what is added to the scores: "sink_logits", "alibi_slopes".
    """

    def __init__(self, shared, form, rng, queries="float32", sharding=None, layouts=("token_major",), terms=()):
        self.shared, self.form, self.rng, self.queries, self.layouts = shared, form, rng, queries, layouts
        self.sharding = sharding or TokenSharding(0, 1, 1)
        self.heads = shared.heads
        self.one = tikv.KVCacheStore(**form)
        self.width, self.width_v = self.one.head_dim, self.one.head_dim_v
        self.group = 4  # query heads of a KV head
        logits = rng.standard_normal(self.one.num_kv_heads * self.group).astype(np.float32)
        logits[::3] = -np.inf
        slopes = 2.0 ** -rng.uniform(0, 5, (self.one.batch_size, logits.size))
        added = {"sink_logits": logits, "alibi_slopes": slopes.astype(np.float32)}
        self.terms = {name: added[name] for name in terms}
        # Memory as it must be, from random bits on; slots that nobody wrote keep theirs.
        own = np.random.default_rng(self.sharding.rank)
        self.memory = [[oracle.random_bits(own, a.shape, a.dtype) for a in arrays] for arrays in self.arrays()]
        for arrays, bits in zip(self.arrays(), self.memory, strict=True):
            for a, found in zip(arrays, bits, strict=True):
                a.view(np.uint8)[...] = found.view(np.uint8)

    def arrays(self):
        """This rank's memory of each layer, where it lies: K, V and the scales of int8."""
        local = self.shared.local
        scales = local.dtype.name == "int8"
        return [
            [a.numpy() for a in (local.keys(i), local.values(i), *(local.scales(i) if scales else ()))]
            for i in range(local.num_layers)
        ]

    def step(self, kinds=OPERATIONS):
        """One operation on both, and what it left compared."""
        getattr(self, kinds[self.rng.integers(len(kinds))])()
        assert self.shared.length == self.one.length
        for layer in range(self.one.num_layers):
            assert self.shared.held(layer) == self.one.held(layer)
            assert self.shared.layer_length(layer) == self.one.layer_length(layer)

    def both(self, call):
        """Make a call on both: what they return, or None where both refuse it alike."""
        results = []
        for store in (self.one, self.shared):
            try:
                results.append((call(store), ""))
            except tikv.TikvError as error:
                results.append((None, type(error)))
        assert results[0][1] == results[1][1], results
        return None if results[0][1] else [result for result, _ in results]

    def rows(self, *shape):
        dtype = "float32" if self.form["dtype"] == "int8" else self.form["dtype"]
        numpy = tikv.dtypes.parse(dtype, "").numpy
        return [self.rng.standard_normal((*shape, w)).astype(numpy) for w in (self.width, self.width_v)]

    def layout(self):
        return self.layouts[self.rng.integers(len(self.layouts))]

    def own(self, a, layout, group=1):
        """The part of this rank's heads, of an array whose axes end in heads or tokens and the width."""
        axis = a.ndim - (2 if layout == "token_major" else 3)
        return a.take(range(self.heads[0] * group, (self.heads[-1] + 1) * group), axis)

    def append(self):
        """New tokens of one layer after the other, as a model's step brings them."""
        tokens, layout = int(self.rng.choice([1, 1, 2, 3, 7, 20])), self.layout()
        for layer in range(self.one.num_layers):
            lead = (tokens, self.one.num_kv_heads) if layout == "token_major" else (self.one.num_kv_heads, tokens)
            k, v = self.rows(self.one.batch_size, *lead)
            if not self.both(
                lambda s, k=k, v=v, layer=layer: s.append(layer, *self.of(s, layout, k, v), layout=layout)
            ):
                return
            self.write(layer, tokens)

    def append_all(self):
        tokens, layout = int(self.rng.choice([1, 2, 5])), self.layout()
        lead = (tokens, self.one.num_kv_heads) if layout == "token_major" else (self.one.num_kv_heads, tokens)
        k, v = self.rows(self.one.num_layers, self.one.batch_size, *lead)
        if self.both(lambda s: s.append_all(*self.of(s, layout, k, v), layout=layout)):
            for layer in range(self.one.num_layers):
                self.write(layer, tokens)

    def of(self, store, layout, *arrays):
        return arrays if store is self.one else [self.own(a, layout) for a in arrays]

    def write(self, layer, tokens):
        """What `one` now holds of the newest tokens, where this rank must have it; all memory compared."""
        one, length = self.one, self.one.layer_length(layer)
        whole = [a.numpy() for a in (one.keys(layer), one.values(layer))]
        if one.dtype.name == "int8":
            whole += [a.numpy() for a in one.scales(layer)]
        window = one.windows[layer]
        first = max(0, length - tokens)
        sinks, held = one.sinks if window else 0, one.positions(layer)[0, 0]
        for p in range(first, length):
            if p not in held:
                continue  # `one` has lost it
            if self.sharding.owns(p):
                slot = p if not window or p < sinks else sinks + (p - sinks) % (window - sinks)
                for mine, a in zip(self.memory[layer], whole, strict=True):
                    mine[:, :, self.slot(layer, p)] = a[:, self.heads[0] : self.heads[-1] + 1, slot]
        self.compare_memory(layer, window, sinks, length)

    def slot(self, layer, p):
        index, window, sinks = self.sharding.count(p), self.one.windows[layer], self.sharding.count(self.one.sinks)
        if not window or index < sinks:
            return index
        return sinks + (index - sinks) % (self.memory[layer][0].shape[2] - sinks)

    def compare_memory(self, layer, window, sinks, length):
        found = self.arrays()[layer]
        for mine, a in zip(self.memory[layer], found, strict=True):
            if window:  # slots between two windows hold tokens that nobody sees any more
                low = max(sinks, length - (window - sinks))
                seen = {
                    self.slot(layer, p)
                    for p in (*range(sinks), *range(low, length))
                    if p < length and self.sharding.owns(p)
                }
                others = {self.slot(layer, p) for p in range(length) if self.sharding.owns(p)} - seen
                mine[:, :, sorted(others)] = a[:, :, sorted(others)]
            oracle.assert_same_bits(a, mine)

    def extend(self):
        tokens, layout = int(self.rng.choice([1, 2, 4, 9, 21])), self.layout()
        h, hq = self.one.num_kv_heads, self.one.num_kv_heads * self.group
        for layer in range(self.one.num_layers):
            lead = (tokens, h) if layout == "token_major" else (h, tokens)
            k, v = self.rows(self.one.batch_size, *lead)
            lead = (tokens, hq) if layout == "token_major" else (hq, tokens)
            q = self.q(self.one.batch_size, *lead)

            def call(s, layer=layer, q=q, k=k, v=v):
                some = q if s is self.one else self.own(q, layout, self.group)
                return s.extend(layer, some, *self.of(s, layout, k, v), layout=layout, return_lse=True, **self.added(s))

            found = self.both(call)
            if not found:
                return
            (want, want_lse), got = found
            self.close(
                got, self.own(want, layout, self.group), self.own(want_lse[..., None], layout, self.group)[..., 0]
            )
            self.write(layer, tokens)

    def q(self, *shape):
        numpy = tikv.dtypes.parse(self.queries, "").numpy
        return self.rng.standard_normal((*shape, self.width)).astype(numpy)

    def added(self, store):
        """What is added to scores, of the query heads that a store's rank has."""
        of = slice(None) if store is self.one else slice(self.heads[0] * self.group, (self.heads[-1] + 1) * self.group)
        return {name: a[..., of] for name, a in self.terms.items()}

    def attend(self):
        layer, tokens = int(self.rng.integers(self.one.num_layers)), int(self.rng.choice([0, 1, 2, 6]))
        layout, heads = self.layout() if tokens else "token_major", self.one.num_kv_heads * self.group
        of_tokens = (tokens, heads) if layout == "token_major" else (heads, tokens)
        q = self.q(self.one.batch_size, *(of_tokens if tokens else (heads,)))
        missing = ("raise", "ignore")[self.rng.integers(2)]

        def own(a):
            return self.own(a, layout, self.group) if tokens else self.own(a[:, None], "token_major", self.group)[:, 0]

        def call(s):
            some = q if s is self.one else np.ascontiguousarray(own(q))
            return s.attend(layer, some, layout=layout, missing=missing, return_lse=True, **self.added(s))

        found = self.both(call)
        if found:
            (want, want_lse), got = found
            self.close(got, own(want), own(want_lse[..., None])[..., 0])

    def close(self, got, want, want_lse):
        out, lse = got
        tolerance = TOLERANCE[self.queries]
        np.testing.assert_allclose(out.astype(np.float32), want.astype(np.float32), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(lse, want_lse, rtol=2e-6, atol=2e-6)

    def trim(self):
        n = int(self.rng.choice([0, 1, 2, 5, 60]))
        if self.one.length + n > CAPACITY or self.rng.integers(8) == 0:
            self.both(lambda s: s.reset())
        else:
            self.both(lambda s: s.trim(n))

    def batch(self):
        kind = self.rng.integers(3)
        index = [int(b) for b in self.rng.integers(0, self.one.batch_size, self.one.batch_size)]
        if kind == 0:
            self.both(lambda s: s.reorder(index))
        elif kind == 1 or self.one.batch_size > 2:
            self.both(lambda s: s.select(index[:1]))
        else:
            self.both(lambda s: s.repeat(2))
        # New memory holds what was filled alone.
        self.memory = [[np.array(a) for a in arrays] for arrays in self.arrays()]
        for layer in range(self.one.num_layers):
            self.reread(layer)

    def undo(self):
        before = self.both(lambda s: s.snapshot())
        self.append()
        for store, snapshot in zip((self.one, self.shared), before, strict=True):
            store.restore(snapshot)
        self.memory = [[np.array(a) for a in arrays] for arrays in self.arrays()]
        for layer in range(self.one.num_layers):
            self.reread(layer)

    def reread(self, layer):
        """Compare every token that `one` holds, where this rank must have it."""
        one = self.one
        held = min(one.held(layer), one.layer_length(layer))
        if one.windows[layer] is None:
            self.write(layer, held)
        else:
            self.write(layer, one.layer_length(layer))

    def beside(self, shared):
        """The same one store beside another shared store, which must hold the same."""
        found = object.__new__(Twins)
        vars(found).update(vars(self))
        found.shared, found.heads = shared, shared.heads
        found.sharding = sharding_of(shared.local) or TokenSharding(0, 1, 1)
        found.memory = [[np.array(a) for a in arrays] for arrays in found.arrays()]
        return found

    def reread_all(self):
        """All that is held, compared."""
        assert self.shared.length == self.one.length
        for layer in range(self.one.num_layers):
            self.reread(layer)

    def check(self):
        """The same, and attention over it."""
        self.reread_all()
        self.attend()
