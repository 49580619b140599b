"""Stores and pools that keep summaries of pages: random sequences of appends, trims, compactions, forks and attention.

The model is the rows of each head, in order: of a contiguous layer by sequence and head, of a pool by sequence and
layer. After each operation all summaries have the bits of `reference.summarize_pages` of the rows that are held now.
"""

import copy
import random

import numpy as np
import oracle

import tikv
from campaign.unfinished import common, goes_on, is_left_out, refuses
from tikv import reference

LAYERS, HEADS, WIDTH, PAGE, CAPACITY, BLOCKS, SIZE, MOST = 2, 2, 4, 4, 26, 14, 4, 4
TOLERANCE = 2e-5
QUERIES = 2  # heads of a KV head


class Rows:
    """New rows, and what a store makes of them."""

    def __init__(self, rng, arch, dtype):
        self.rng, self.arch, self.dtype = rng, arch, dtype

    def new(self, *lead):
        rows = [self.rng.standard_normal((*lead, HEADS, WIDTH)).astype(np.float32) for _ in "kv"]
        rows[0] = np.where(self.rng.random(rows[0].shape) < 0.2, rows[0] * 0, rows[0])  # zeros of both signs
        if self.dtype == "int8":
            stored = [reference.dequantize(*reference.quantize(a)) for a in rows]
        else:
            stored = [reference.encode(a, np.dtype(self.dtype)) for a in rows]
        return [oracle.place(a, self.arch) for a in rows], stored

    def compare(self, got, held, what):
        """Least and greatest of one head, against the rows that it holds: an array (n, WIDTH)."""
        pages = -(-len(held) // PAGE)
        for a, want, name in zip(
            got, reference.summarize_pages(held, len(held), PAGE), ("least", "greatest"), strict=True
        ):
            oracle.assert_same_bits(a[:pages], want[:pages], what=f"{name} of {what}")


class SummarizedStore:
    """A contiguous store, float32, float16 or int8, of one sequence or two."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "summarized.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        self.dtype, self.batch = [("float32", 1), ("float16", 2), ("int8", 1)][number % 3]
        self.name, self.doing = f"KVCacheStore {self.dtype} with summaries", "making it"
        self.rows = Rows(rng, arch, self.dtype)
        self.store = tikv.KVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, capacity=CAPACITY, batch_size=self.batch,
            dtype=self.dtype, page_summaries=PAGE,
        )  # fmt: skip
        self.held = [[[[] for _ in range(HEADS)] for _ in range(self.batch)] for _ in range(LAYERS)]
        self.length = [0] * LAYERS
        self.calls = [self.append] * 6 + [self.append_all, self.trim, self.trim, self.compact, self.attend, self.attend]
        self.calls += [self.reorder, self.copies, self.reset]

    def step(self):
        self.chance.choice(self.calls)()
        self.check()

    def most(self, layer):
        return max(len(held) for heads in self.held[layer] for held in heads)

    def take(self, layer, stored, tokens):
        for b, h in np.ndindex(self.batch, HEADS):
            for t in range(tokens):
                self.held[layer][b][h].append((self.length[layer] + t, *(a[b, t, h] for a in stored)))
        self.length[layer] += tokens

    def append(self):
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 1, 1, 2, 5, 9))
        self.doing = f"append(layer {layer}, {tokens} tokens)"
        given, stored = self.rows.new(self.batch, tokens)
        if not goes_on(self.length, layer, tokens, lambda: self.store.append(layer, *given), self.align):
            return
        if self.most(layer) + tokens > CAPACITY:
            refuses(tikv.CapacityError, lambda: self.store.append(layer, *given))
            return
        self.store.append(layer, *given)
        self.take(layer, stored, tokens)

    def append_all(self):
        tokens = self.chance.choice((1, 3))
        self.doing = f"append_all({tokens} tokens)"
        given, stored = self.rows.new(LAYERS, self.batch, tokens)
        if not goes_on(self.length, None, tokens, lambda: self.store.append_all(*given), self.align):
            return
        if any(self.most(layer) + tokens > CAPACITY for layer in range(LAYERS)):
            refuses(tikv.CapacityError, lambda: self.store.append_all(*given))
            return
        self.store.append_all(*given)
        for layer in range(LAYERS):
            self.take(layer, [a[layer] for a in stored], tokens)

    def trim(self):
        if not goes_on(self.length, 0, 0, lambda: self.store.trim(0), self.align):
            return
        n = self.chance.randint(0, min(5, max(self.length)))
        self.doing, target = f"trim({n})", max(self.length) - n
        try:
            self.store.trim(n)
        except tikv.PositionError:
            return
        self.cut(target)

    def align(self):
        """All layers to one length; or nothing changes, and all is forgotten."""
        target = min(self.length)
        self.doing += f", align() to {target}"
        try:
            assert self.store.align() == target
        except tikv.PositionError:
            self.store.reset()
            target = 0
        self.cut(target)

    def cut(self, target):
        for layer in range(LAYERS):
            self.length[layer] = min(self.length[layer], target)
            for heads in self.held[layer]:
                for held in heads:
                    held[:] = [row for row in held if row[0] < target]

    def compact(self):
        layer = self.chance.randrange(LAYERS)
        most, even = self.most(layer), self.chance.random() < 0.6
        self.doing = f"compact(layer {layer}, {'even' if even else 'by head'}, of {most})"
        counts = np.array([[len(held) for held in heads] for heads in self.held[layer]])
        mask = self.rng.random((self.batch, HEADS, most)) < self.chance.choice((0.3, 0.7, 1.0))
        if even:
            mask[:] = mask[:1, :1]
        mask &= np.arange(most) < counts[..., None]
        self.store.compact(layer, mask)
        for b, h in np.ndindex(self.batch, HEADS):
            held = self.held[layer][b][h]
            held[:] = [row for row, kept in zip(held, mask[b, h], strict=False) if kept]

    def attend(self):
        """A query reads the pages that score highest by what is kept; or all, where heads differ."""
        layer = self.chance.randrange(LAYERS)
        counts = {len(held) for heads in self.held[layer] for held in heads}
        (n, *others) = counts
        self.doing = f"attend(layer {layer}, to chosen pages)"
        if others or n == 0:
            return
        q = self.rng.standard_normal((self.batch, QUERIES * HEADS, WIDTH)).astype(np.float32)
        placed = oracle.place(q, self.arch)
        scores = tikv.page_scores(placed, *self.store.page_summaries(layer), n, page=PAGE)
        chosen = tikv.select(scores, 2, page=PAGE, recent=1, valid=n)
        got, at = oracle.to_numpy(self.store.attend(layer, placed, indices=chosen)), oracle.to_numpy(chosen)
        for b, g in np.ndindex(self.batch, QUERIES * HEADS):
            held = self.held[layer][b][g // QUERIES]
            there = [i for i in at[b, g // QUERIES, 0].tolist() if i >= 0]
            k, v = (np.array([held[i][stream] for i in there]) for stream in (1, 2))
            want, _ = reference.attention(q[b, g], k, v, scale=WIDTH**-0.5)
            np.testing.assert_allclose(got[b, g], want, rtol=0, atol=TOLERANCE)

    def reorder(self):
        index = [self.chance.randrange(self.batch) for _ in range(self.batch)]
        self.doing = f"reorder({index})"
        self.store.reorder(index)
        self.held = [[copy.deepcopy(heads[b]) for b in index] for heads in self.held]

    def copies(self):
        self.doing = "save() and load(), copy.deepcopy() or snapshot() and restore()"
        chance = self.chance.random()
        if chance < 0.2:
            self.store.save(self.path)
            self.store = tikv.KVCacheStore.load(self.path)
        elif chance < 0.5:
            self.store = copy.deepcopy(self.store)
        else:
            snapshot = self.store.snapshot()
            self.store.reset()
            self.store.restore(snapshot)

    def reset(self):
        self.doing = "reset()"
        if self.chance.random() < 0.3:
            self.store.reset()
            self.held = [[[[] for _ in range(HEADS)] for _ in range(self.batch)] for _ in range(LAYERS)]
            self.length = [0] * LAYERS

    def check(self):
        for layer in range(LAYERS):
            got = [oracle.to_numpy(a) for a in self.store.page_summaries(layer)]
            for b, h in np.ndindex(self.batch, HEADS):
                held = np.array([row[1] for row in self.held[layer][b][h]], got[0].dtype).reshape(-1, WIDTH)
                self.rows.compare([a[b, h] for a in got], held, f"layer {layer}, sequence {b}, head {h}")


class SummarizedPool:
    """A pool, whose forks share blocks; of float32, float16 or int8, in both layouts, heads together or apart."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "summarized_pool.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        forms = [("float32", "NHD", False), ("float16", "HND", False), ("int8", "NHD", False), ("float32", "HND", True)]
        self.dtype, layout, self.per_head = forms[number % len(forms)]
        self.name = f"PagedKVCacheStore {self.dtype} {layout}{' per head' * self.per_head} with summaries"
        self.doing, self.rows = "making it", Rows(rng, arch, self.dtype)
        blocks = BLOCKS * (HEADS if self.per_head else 1)
        self.store = tikv.PagedKVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=blocks, block_size=SIZE,
            dtype=self.dtype, layout=layout, per_head=self.per_head, page_summaries=PAGE,
        )  # fmt: skip
        self.held = {}  # of each sequence, layer and head: (number, k, v) of each token
        self.came, self.since, self.swapped = {}, {}, set()
        self.settled = {}  # how many tokens of each a commit has decided about
        self.calls = [self.add] * 2 + [self.append] * 7 + [self.compact] * 2 + [self.truncate] * 2
        self.calls += [self.free, self.commit, self.attend, self.copies]
        self.calls += [] if self.per_head else [self.fork, self.fork, self.swap]

    def sequences(self):
        return [seq for seq in self.came if seq not in self.swapped]

    def step(self):
        (self.chance.choice(self.calls) if self.sequences() else self.add)()
        self.check()

    def add(self):
        if len(self.came) >= MOST:
            self.free()
            return
        self.doing = "add()"
        seq = self.store.add()
        self.held[seq] = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
        self.came[seq], self.since[seq], self.settled[seq] = [0] * LAYERS, [0] * LAYERS, 0

    def append(self):
        seqs = self.chance.sample(self.sequences(), self.chance.randint(1, min(2, len(self.sequences()))))
        layers = range(LAYERS) if self.chance.random() < 0.7 else [self.chance.randrange(LAYERS)]
        counts = [self.chance.choice((0, 1, 1, 2, 3, 6)) for _ in seqs]
        self.doing = f"append(layers {list(layers)}, sequences {seqs}, {counts} tokens)"
        bounds = np.cumsum([0, *counts]).tolist()
        for layer in layers:
            given, stored = self.rows.new(bounds[-1])
            writes = [(self.came[seq], layer, count) for seq, count in zip(seqs, counts, strict=True)]
            if is_left_out(writes, lambda: self.store.append(layer, *given, seqs, bounds)):  # noqa: B023
                self.align(seqs)
                return
            try:
                self.store.append(layer, *given, seqs, bounds)
            except tikv.CapacityError:
                return
            for i, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
                for t, h in np.ndindex(count, HEADS):
                    row = (self.came[seq][layer] + t, *(a[bounds[i] + t, h] for a in stored))
                    self.held[seq][layer][h].append(row)
                self.came[seq][layer] += count

    def compact(self):
        seq, layer = self.chance.choice(self.sequences()), self.chance.randrange(LAYERS)
        heads = self.held[seq][layer]
        most = max(map(len, heads))
        mask = self.rng.random((HEADS, most)) < self.chance.choice((0.3, 0.7, 1.0))
        if not self.per_head:
            mask[:] = mask[0]
        mask &= np.arange(most) < np.array([len(held) for held in heads])[:, None]
        self.doing = f"compact(layer {layer}, sequence {seq}, {mask.sum(axis=1).tolist()} of {most})"
        try:
            self.store.compact(layer, seq, mask if self.per_head else mask[0])
        except tikv.CapacityError:
            return
        self.since[seq][layer] = self.came[seq][layer]
        for held, kept in zip(heads, mask, strict=True):
            held[:] = [row for row, stays in zip(held, kept, strict=False) if stays]

    def truncate(self):
        seq = self.chance.choice(self.sequences())
        n = common(self.came[seq]) - self.chance.randint(0, min(5, common(self.came[seq])))
        self.doing = f"truncate({seq}, {n})"
        if any(self.since[seq][layer] > n for layer in range(LAYERS)):
            refuses(tikv.PositionError, lambda: self.store.truncate(seq, n))
            return
        self.store.truncate(seq, n)
        self.cut(seq, n)

    def align(self, seqs):
        """Their layers to one length; or nothing changes, since one was compacted since, and they are freed."""
        wanted = [min(self.came[seq]) for seq in seqs]
        self.doing += f", align({seqs}) to {wanted}"
        if any(since > n < came for seq, n in zip(seqs, wanted, strict=True)
               for since, came in zip(self.since[seq], self.came[seq], strict=True)):  # fmt: skip
            refuses(tikv.PositionError, lambda: self.store.align(seqs))
            for seq in seqs:
                self.free(seq)
            return
        assert self.store.align(seqs).tolist() == wanted
        for seq, n in zip(seqs, wanted, strict=True):
            self.cut(seq, n)

    def cut(self, seq, n):
        self.settled[seq] = min(self.settled[seq], n)
        for layer in range(LAYERS):
            self.came[seq][layer] = min(self.came[seq][layer], n)
            for held in self.held[seq][layer]:
                held[:] = [row for row in held if row[0] < n]

    def commit(self):
        seq = self.chance.choice(self.sequences())
        came, drafted = self.came[seq], self.chance.randint(0, 6)
        path = [i for i in range(drafted) if self.chance.random() < 0.6]
        self.doing = f"commit([{seq}], {path}, {drafted})"
        since = [max(n, self.settled[seq]) for n in self.since[seq]]
        if len(set(came)) > 1 or any(came[layer] - since[layer] < drafted for layer in range(LAYERS)):
            refuses(tikv.PositionError, lambda: self.store.commit([seq], path, drafted))
            return
        try:
            self.store.commit([seq], path, drafted)
        except tikv.CapacityError:
            return
        for layer in range(LAYERS):
            first = came[layer] - drafted
            for held in self.held[seq][layer]:
                at = len(held) - drafted
                kept = [held[at + i] for i in path]
                held[at:] = [(first + n, *row[1:]) for n, row in enumerate(kept)]
            came[layer] -= drafted - len(path)
        self.settled[seq] = came[0]

    def fork(self):
        if len(self.came) >= MOST:
            return
        seq = self.chance.choice(self.sequences())
        self.doing = f"fork({seq})"
        found = self.store.fork(seq)
        for of_sequences in (self.held, self.came, self.since, self.settled):
            of_sequences[found] = copy.deepcopy(of_sequences[seq])

    def free(self, seq=None):
        seq = self.chance.choice(list(self.came)) if seq is None else seq
        self.doing = f"free({seq})"
        self.store.free(seq)
        self.swapped.discard(seq)
        for of_sequences in (self.held, self.came, self.since, self.settled):
            del of_sequences[seq]

    def swap(self):
        if self.swapped:
            seq = self.swapped.pop()
            self.doing = f"swap_in({seq})"
            try:
                self.store.swap_in(seq)
            except tikv.CapacityError:
                self.swapped.add(seq)
            return
        seq = self.chance.choice(self.sequences())
        self.doing = f"swap_out({seq})"
        self.store.swap_out(seq)
        self.swapped.add(seq)

    def attend(self):
        """A query reads the pages that score highest by what is kept."""
        seq, layer = self.chance.choice(self.sequences()), self.chance.randrange(LAYERS)
        (n, *others) = {len(held) for held in self.held[seq][layer]}
        self.doing = f"attend(layer {layer}, sequence {seq}, to chosen pages)"
        if others or n == 0:
            return
        q = self.rng.standard_normal((1, QUERIES * HEADS, WIDTH)).astype(np.float32)
        placed = oracle.place(q, self.arch)
        scores = tikv.page_scores(placed, *self.store.page_summaries(layer, [seq]), n, page=PAGE)
        chosen = tikv.select(scores, 2, page=PAGE, recent=1, valid=n)
        got, at = oracle.to_numpy(self.store.attend(layer, placed, [seq], indices=chosen)), oracle.to_numpy(chosen)
        for g in range(QUERIES * HEADS):
            held = self.held[seq][layer][g // QUERIES]
            there = [i for i in at[0, g // QUERIES, 0].tolist() if i >= 0]
            k, v = (np.array([held[i][stream] for i in there]) for stream in (1, 2))
            want, _ = reference.attention(q[0, g], k, v, scale=WIDTH**-0.5)
            np.testing.assert_allclose(got[0, g], want, rtol=0, atol=TOLERANCE)

    def copies(self):
        self.doing = "save() and load(), or copy.deepcopy()"
        if self.chance.random() < 0.3 and not self.per_head:
            self.store.save(self.path)
            self.store = tikv.PagedKVCacheStore.load(self.path)
            self.settled = dict.fromkeys(self.settled, 0)
        else:
            self.store = copy.deepcopy(self.store)

    def check(self):
        seqs = self.sequences()
        for layer in range(LAYERS) if seqs else ():
            got = [oracle.to_numpy(a) for a in self.store.page_summaries(layer, seqs)]
            for (b, seq), h in ((pair, h) for pair in enumerate(seqs) for h in range(HEADS)):
                held = np.array([row[1] for row in self.held[seq][layer][h]], got[0].dtype).reshape(-1, WIDTH)
                self.rows.compare([a[b, h] for a in got], held, f"layer {layer}, sequence {seq}, head {h}")
