"""KVCacheStore with compactions against lists: for each layer, sequence and head the tokens that it holds, in order."""

import copy
import random

import numpy as np
import oracle

import tikv
from campaign.unfinished import goes_on, path_of, refuses, tree_of
from tikv import reference

LAYERS, HEADS, WIDTH, CAPACITY = 2, 2, 4, 24
TOLERANCE = 2e-5
# name: (dtype, window, sinks, batch)
FORMS = {
    "float32 linear": ("float32", None, 0, 1),
    "float32 ring with sinks": ("float32", [6, None], 2, 2),
    "int8 ring": ("int8", [None, 5], 0, 1),
}


class Compacted:
    """A store whose layers keep now these, now those of their tokens, and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "compacted.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        form = list(FORMS)[number % len(FORMS)]
        self.dtype, window, self.sinks, self.batch = FORMS[form]
        self.windows = window if isinstance(window, list) else [window] * LAYERS
        self.name, self.doing = f"compacted KVCacheStore {form}", "making it"
        self.store = tikv.KVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, capacity=CAPACITY, batch_size=self.batch,
            dtype=self.dtype, window=window, sinks=self.sinks,
        )  # fmt: skip
        self.forget()
        self.calls = [self.append] * 5 + [self.extend] * 2 + [self.compact] * 4 + [self.trim] * 2
        self.calls += [self.reorder, self.copies, self.restore, self.reset]
        if self.windows == [None] * LAYERS:  # `Contiguous` has drafts in rings
            self.calls.append(self.tree)
        self.saved = self.store.snapshot(), copy.deepcopy(self.state())

    # --- the model

    def forget(self):
        self.held = [[[[] for _ in range(HEADS)] for _ in range(self.batch)] for _ in range(LAYERS)]
        self.length = [0] * LAYERS

    def state(self):
        return self.held, self.length

    def rows(self, tokens):
        """New K and V, and what the store makes of them."""
        rows = [self.rng.standard_normal((self.batch, tokens, HEADS, WIDTH), np.float32) for _ in "kv"]
        stored = [reference.dequantize(*reference.quantize(a)) for a in rows] if self.dtype == "int8" else rows
        return [oracle.place(a, self.arch) for a in rows], stored

    def take(self, layer, stored, t):
        """One more token takes a free slot, or that of the oldest behind the sinks."""
        for b in range(self.batch):
            for h, held in enumerate(self.held[layer][b]):
                if len(held) == self.windows[layer]:
                    del held[self.sinks]
                held.append((self.length[layer], *(a[b, t, h] for a in stored)))
        self.length[layer] += 1

    def most(self, layer):
        return max(len(held) for heads in self.held[layer] for held in heads)

    def fits(self, layer, tokens):
        return self.windows[layer] is not None or self.most(layer) + tokens <= CAPACITY

    # --- operations

    def step(self):
        self.doing = ""
        self.chance.choice(self.calls)()
        self.check()

    def append(self):
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 1, 2, 5))
        self.doing = f"append(layer {layer}, {tokens} tokens)"
        given, stored = self.rows(tokens)
        if not goes_on(self.length, layer, tokens, lambda: self.store.append(layer, *given), self.align):
            return
        if not self.fits(layer, tokens):
            refuses(tikv.CapacityError, lambda: self.store.append(layer, *given))
            return
        self.store.append(layer, *given)
        for t in range(tokens):
            self.take(layer, stored, t)

    def extend(self):
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 3))
        self.doing = f"extend(layer {layer}, {tokens} tokens)"
        if not self.fits(layer, tokens):
            return
        given, stored = self.rows(tokens)
        q = self.rng.standard_normal((self.batch, tokens, 2 * HEADS, WIDTH), np.float32)
        call = [layer, oracle.place(q, self.arch), *given]
        if not goes_on(self.length, layer, tokens, lambda: self.store.extend(*call), self.align):
            return
        got = oracle.to_numpy(self.store.extend(layer, oracle.place(q, self.arch), *given))
        for t in range(tokens):
            self.take(layer, stored, t)
            for b, g in np.ndindex(self.batch, 2 * HEADS):
                held = self.held[layer][b][g // 2]
                k, v = (np.array([row[i] for row in held]) for i in (1, 2))
                want, _ = reference.attention(q[b, t, g], k, v, scale=WIDTH**-0.5)
                np.testing.assert_allclose(got[b, t, g], want, rtol=0, atol=TOLERANCE)

    def compact(self):
        layer = self.chance.randrange(LAYERS)
        most, even = self.most(layer), self.chance.random() < 0.5
        self.doing = f"compact(layer {layer}, {'even' if even else 'by head'}, of {most})"
        counts = np.array([[len(held) for held in heads] for heads in self.held[layer]])
        mask = self.rng.random((self.batch, HEADS, most)) < self.chance.choice((0.2, 0.7, 1.0))
        if even:
            mask[:] = mask[:1, :1]
        mask &= np.arange(most) < counts[..., None]
        self.store.compact(layer, mask)
        for b, h in np.ndindex(self.batch, HEADS):
            held = self.held[layer][b][h]
            held[:] = [row for row, kept in zip(held, mask[b, h], strict=False) if kept]

    def tree(self):
        """Draft a tree in every layer, and keep a path of it; refused where heads hold unequal numbers."""
        if len({*self.length}) > 1:
            self.align()
        tokens = self.chance.choice((2, 4))
        if not all(self.fits(layer, tokens) for layer in range(LAYERS)):
            return
        trees = [tree_of(self.chance, tokens) for _ in range(self.batch)]
        paths = [path_of(self.chance, tree) for tree in trees]
        paths = [path[: min(map(len, paths))] for path in paths]
        self.doing += f", a draft of {trees}, commit({paths})"
        for layer in range(LAYERS):
            given, stored = self.rows(tokens)
            q = self.rng.standard_normal((self.batch, tokens, 2 * HEADS, WIDTH), np.float32)
            parents = oracle.place(np.array(trees, np.int32), self.arch)
            self.store.extend(layer, oracle.place(q, self.arch), *given, parents=parents)
            for t in range(tokens):
                self.take(layer, stored, t)
        if len({len(held) for layer in self.held for heads in layer for held in heads}) > 1:
            refuses(tikv.PositionError, lambda: self.store.commit(paths))
            return
        self.store.commit(paths)
        for layer, sequences in enumerate(self.held):
            for path, heads in zip(paths, sequences, strict=True):
                for held in heads:
                    stand, rows = [row[0] for row in held[-tokens:]], [held[i - tokens] for i in path]
                    held[-tokens:] = [(at, *row[1:]) for at, row in zip(stand, rows, strict=False)]
            self.length[layer] -= tokens - len(paths[0])

    def trim(self):
        """Back to a length that all heads of all layers have whole, or nothing changes."""
        if not goes_on(self.length, 0, 0, lambda: self.store.trim(0), self.align):
            return
        length = max(self.length)
        n = self.chance.randint(0, min(3, length))
        self.doing = f"trim({n})"
        target = length - n
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
            self.forget()
            return
        self.cut(target)

    def cut(self, target):
        for layer in range(LAYERS):
            if self.length[layer] > target:
                self.length[layer] = target
                for heads in self.held[layer]:
                    for held in heads:
                        held[:] = [row for row in held if row[0] < target]

    def reorder(self):
        index = [self.chance.randrange(self.batch) for _ in range(self.batch)]
        self.doing = f"reorder({index})"
        self.store.reorder(index)
        self.held = [[copy.deepcopy(heads[b]) for b in index] for heads in self.held]

    def copies(self):
        self.doing = "save() and load(), or copy.deepcopy()"
        if self.chance.random() < 0.5:
            self.store.save(self.path)
            self.store = tikv.KVCacheStore.load(self.path)
        else:
            self.store = copy.deepcopy(self.store)
        self.saved = self.store.snapshot(), copy.deepcopy(self.state())

    def restore(self):
        self.doing = "restore()"
        snapshot, state = self.saved
        self.store.restore(snapshot)
        self.held, self.length = copy.deepcopy(state)

    def reset(self):
        self.doing = "reset()"
        if self.chance.random() < 0.3:
            self.store.reset()
            self.forget()

    def check(self):
        for layer in range(LAYERS):
            got = self.store.layer_length(layer)
            assert got == self.length[layer], f"layer {layer}: length {got}, expected {self.length[layer]}"
        layer = self.chance.randrange(LAYERS)
        counts = np.array([[len(held) for held in heads] for heads in self.held[layer]])
        got = np.broadcast_to(self.store.held(layer), counts.shape).tolist()
        assert got == counts.tolist(), f"layer {layer}: held {got}, expected {counts.tolist()} (sequences, heads)"
        positions = self.store.positions(layer)
        tokens = [oracle.to_numpy(a) for a in self.store.tokens(layer)]
        for b, h in np.ndindex(self.batch, HEADS):
            held = self.held[layer][b][h]
            where = f"layer {layer}, sequence {b}, head {h}"
            got = positions[b, h].tolist()
            want = [row[0] for row in held] + [-1] * (positions.shape[2] - len(held))
            assert got == want, f"{where}: positions {got}, expected {want}"
            for i, got in enumerate(tokens):
                want = np.zeros(got.shape[2:], got.dtype)
                for j, row in enumerate(held):
                    want[j] = row[1 + i]
                oracle.assert_same_bits(got[b, h], want, what=f"{'kv'[i]} of {where}")
