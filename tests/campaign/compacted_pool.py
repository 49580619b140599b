"""PagedKVCacheStore with compactions against lists: for each sequence and layer the tokens that it holds, in order."""

import copy
import random
from collections import Counter

import numpy as np
import oracle

import tikv
from campaign.unfinished import common, is_left_out, is_path, path_of, refuses, tree_of
from tikv import reference

LAYERS, HEADS, WIDTH, BLOCKS, SIZE = 2, 2, 4, 14, 4
FORMS = [("float32", "NHD"), ("int8", "HND"), ("int8", "NHD"), ("float32", "HND")]
MOST = 5  # sequences; then one is freed
ROPE = tikv.Rope([1.0, 0.1])


class CompactedPool:
    """A pool whose layers keep now these, now those of their tokens, and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "compacted_pool.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        self.dtype, layout = FORMS[number % len(FORMS)]
        self.name, self.doing = f"compacted PagedKVCacheStore {self.dtype} {layout}", "making it"
        self.store = tikv.PagedKVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=BLOCKS, block_size=SIZE,
            dtype=self.dtype, layout=layout,
        )  # fmt: skip
        self.held = {}  # of each sequence and layer: (position, k, v) of each token
        self.came, self.next, self.since = (
            {},
            {},
            {},
        )  # tokens that came; the next one's position; `came` when compacted
        self.swapped, self.settled = set(), {}  # of which tokens a commit has decided
        self.prompt = list(range(2 * SIZE + self.chance.choice((0, 1))))
        self.known = [self.rows(len(self.prompt)) for _ in range(LAYERS)]
        self.calls = [self.add] * 2 + [self.append] * 6 + [self.compact] * 6 + [self.truncate, self.fork, self.free]
        self.calls += [self.swap, self.save, self.commit, self.commit, self.tree, self.tree]

    def rows(self, tokens):
        """New K and V, and what the store makes of them."""
        rows = [self.rng.standard_normal((tokens, HEADS, WIDTH), np.float32) for _ in "kv"]
        stored = [reference.dequantize(*reference.quantize(a)) for a in rows] if self.dtype == "int8" else rows
        return [oracle.place(a, self.arch) for a in rows], stored

    def sequences(self):
        return [seq for seq in self.came if seq not in self.swapped]

    # --- operations

    def step(self):
        (self.chance.choice(self.calls) if self.sequences() else self.add)()
        self.check()

    def add(self):
        if len(self.came) >= MOST:
            self.free()
            return
        known = self.chance.random() < 0.6
        self.doing = f"add({'the prompt' if known else ''})"
        seq = self.store.add(self.prompt if known else None)
        there = self.store.length(seq)
        assert there in ((0, SIZE, min(2 * SIZE, len(self.prompt) - 1)) if known else (0,))
        self.held[seq] = [[(i, *(a[i] for a in stored)) for i in range(there)] for _, stored in self.known]
        self.came[seq], self.next[seq], self.since[seq] = [there] * LAYERS, [there] * LAYERS, [0] * LAYERS
        self.settled[seq] = 0
        if not known or there == len(self.prompt):
            return
        for layer, (given, stored) in enumerate(self.known):
            self.put(layer, seq, [a[there:] for a in given], [a[there:] for a in stored])

    def append(self):
        seq, layer, tokens = (
            self.chance.choice(self.sequences()),
            self.chance.randrange(LAYERS),
            self.chance.choice((1, 1, 3, 6)),
        )
        self.doing = f"append(layer {layer}, sequence {seq}, {tokens} tokens)"
        self.put(layer, seq, *self.rows(tokens))

    def put(self, layer, seq, given, stored, tree=None):
        """Append rows; with parents of a tree, by `extend`. Whether they were written."""
        tokens = len(stored[0])
        call = lambda: self.store.append(layer, *given, [seq], [0, tokens])  # noqa: E731
        if is_left_out([(self.came[seq], layer, tokens)], call):
            self.align(seq)
            return False
        try:
            if tree is None:
                self.store.append(layer, *given, [seq], [0, tokens])
            else:
                q = oracle.place(self.rng.standard_normal((tokens, HEADS, WIDTH), np.float32), self.arch)
                parents = oracle.place(np.array([tree], np.int32), self.arch)
                self.store.extend(layer, q, *given, [seq], [0, tokens], parents=parents)
        except tikv.CapacityError:
            assert self.store.num_free_blocks < tokens // SIZE + 2
            return False
        for t in range(tokens):
            self.held[seq][layer].append((self.next[seq][layer] + t, *(a[t] for a in stored)))
        self.came[seq][layer] += tokens
        self.next[seq][layer] += tokens
        return True

    def align(self, seq):
        """Its layers to one length; or nothing changes, since one was compacted since, and it is freed."""
        n = min(self.came[seq])
        self.doing += f", align([{seq}]) to {n}"
        if any(since > n < came for since, came in zip(self.since[seq], self.came[seq], strict=True)):
            refuses(tikv.PositionError, lambda: self.store.align([seq]))
            self.free(seq)
            return
        assert self.store.align([seq]).tolist() == [n]
        self.cut(seq, n)

    def tree(self):
        """Draft a tree in every layer of a sequence, and keep a path of it; other tokens of it are refused."""
        seq, tree = self.chance.choice(self.sequences()), tree_of(self.chance, self.chance.choice((2, 5)))
        if len({*self.came[seq]}) > 1:
            self.align(seq)
            return
        self.doing = f"a draft of {tree} for sequence {seq}"
        for layer in range(LAYERS):
            if not self.put(layer, seq, *self.rows(len(tree)), tree):
                return
        wrong, path = [i for i in range(len(tree)) if self.chance.random() < 0.5], path_of(self.chance, tree)
        self.doing += f", commit({wrong}), commit({path})"
        if not is_path(tree, wrong):
            refuses(tikv.PositionError, lambda: self.store.commit([seq], wrong))
        try:
            self.store.commit([seq], path)
        except tikv.CapacityError:
            return
        self.keep(seq, path, len(tree))
        refuses(tikv.PositionError, lambda: self.store.commit([seq], [0]))

    def compact(self):
        seq, layer = self.chance.choice(self.sequences()), self.chance.randrange(LAYERS)
        held = self.held[seq][layer]
        mask = self.rng.random(len(held)) < self.chance.choice((0.2, 0.7, 0.9, 1.0))
        if self.chance.random() < 0.3:
            mask = np.sort(mask)[::-1]
        turned = self.dtype != "int8" and self.chance.random() < 0.3
        self.doing = f"compact(layer {layer}, sequence {seq}, {int(mask.sum())} of {len(held)}{', turned' * turned})"
        try:
            self.store.compact(layer, seq, np.flatnonzero(mask), rope=ROPE if turned else None)
        except tikv.CapacityError:
            # Each block that stays may be shared, and then needs a copy.
            assert self.store.num_free_blocks < -(-int(mask.sum()) // SIZE)
            return
        kept = [row for row, stays in zip(held, mask, strict=True) if stays]
        self.since[seq][layer] = self.came[seq][layer]
        if turned:
            self.next[seq][layer] = len(kept)
            if kept:
                stood = np.array([row[0] for row in kept])
                k = np.stack([row[1] for row in kept]).swapaxes(0, 1)[None]
                moved = np.broadcast_to(np.arange(len(kept)) - stood, k.shape[:3])
                k = reference.rotate(k, moved, ROPE.inv_freq)[0].swapaxes(0, 1).astype(np.float32)
                kept = [(i, k[i], row[2]) for i, row in enumerate(kept)]
        self.held[seq][layer] = kept

    def truncate(self):
        seq = self.chance.choice(self.sequences())
        length = common(self.came[seq])
        n = length - self.chance.randint(0, min(4, length))
        self.doing = f"truncate({seq}, {n})"
        if any(self.since[seq][layer] > n for layer in range(LAYERS)):
            refuses(tikv.PositionError, lambda: self.store.truncate(seq, n))
            return
        self.store.truncate(seq, n)
        self.cut(seq, n)

    def cut(self, seq, n):
        self.settled[seq] = min(self.settled[seq], n)
        for layer in range(LAYERS):
            drop = max(0, self.came[seq][layer] - n)
            del self.held[seq][layer][len(self.held[seq][layer]) - drop :]
            self.came[seq][layer] -= drop
            self.next[seq][layer] -= drop

    def commit(self):
        seqs = self.chance.sample(self.sequences(), self.chance.randint(1, min(2, len(self.sequences()))))
        drafted = self.chance.randint(0, 6)
        paths = [[i for i in range(drafted) if self.chance.random() < 0.6] for _ in seqs]
        self.doing = f"commit({seqs}, {paths}, {drafted})"
        for seq in seqs:
            came, since = self.came[seq], [max(n, self.settled[seq]) for n in self.since[seq]]
            if len(set(came)) > 1 or any(came[layer] - since[layer] < drafted for layer in range(LAYERS)):
                refuses(tikv.PositionError, lambda: self.store.commit(seqs, paths, drafted))
                return
        try:
            self.store.commit(seqs, paths, drafted)
        except tikv.CapacityError:
            assert self.store.num_free_blocks < 2 * SIZE
            return
        for seq, path in zip(seqs, paths, strict=True):
            self.keep(seq, path, drafted)

    def keep(self, seq, path, drafted):
        for layer in range(LAYERS):
            held = self.held[seq][layer]
            first, less = len(held) - drafted, drafted - len(path)
            stand = [row[0] for row in held]
            chosen = [held[first + i] for i in path]
            held[first:] = [(stand[first + n], *row[1:]) for n, row in enumerate(chosen)]
            self.came[seq][layer] -= less
            self.next[seq][layer] -= less
        self.settled[seq] = self.came[seq][0]

    def fork(self):
        if len(self.came) >= MOST:
            return
        seq = self.chance.choice(self.sequences())
        self.doing = f"fork({seq})"
        found = self.store.fork(seq)
        for of_sequences in (self.held, self.came, self.next, self.since, self.settled):
            of_sequences[found] = copy.deepcopy(of_sequences[seq])

    def free(self, seq=None):
        seq = self.chance.choice(list(self.came)) if seq is None else seq
        self.doing = f"free({seq})"
        self.store.free(seq)
        self.swapped.discard(seq)
        for of_sequences in (self.held, self.came, self.next, self.since, self.settled):
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

    def save(self):
        self.doing = "save() and load(), or copy.deepcopy()"
        if self.chance.random() < 0.7:
            self.store.save(self.path)
            self.store = tikv.PagedKVCacheStore.load(self.path)
            self.settled = dict.fromkeys(self.settled, 0)
        else:
            self.store = copy.deepcopy(self.store)

    # --- the comparison

    def check(self):
        assert self.store.sequences == list(self.came)
        assert self.store.context_lens.tolist() == [common(came) for came in self.came.values()]
        owners = Counter()
        for seq in self.sequences():
            table = self.store.block_table(seq).tolist()
            assert len(set(table)) == len(table) == -(-max(map(len, self.held[seq])) // SIZE)
            owners.update(table)
        assert self.store.num_free_blocks == BLOCKS - len(owners), "a block is lost"
        for seq in self.sequences():
            for layer, held in enumerate(self.held[seq]):
                assert self.store.held(layer, seq) == len(held)
                assert self.store.layer_length(layer, seq) == self.came[seq][layer]
                assert self.store.next_position(layer, seq) == self.next[seq][layer]
                assert self.store.positions(layer, seq).tolist() == [[row[0] for row in held]] * HEADS
        if self.sequences():
            seq, layer = self.chance.choice(self.sequences()), self.chance.randrange(LAYERS)
            for i, got in enumerate(self.store.tokens(layer, seq)):
                want = np.array([row[1 + i] for row in self.held[seq][layer]], np.float32).reshape(-1, HEADS, WIDTH)
                oracle.assert_same_bits(oracle.to_numpy(got), want, what=f"{'kv'[i]} of sequence {seq}, layer {layer}")
