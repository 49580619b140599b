"""PagedKVCacheStore against lists of rows: what each sequence holds, every bit of the pools, and every block."""

import random
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import oracle

import tikv
from campaign.contiguous import COMPARED_ON_GPU, TOLERANCE, contents
from campaign.unfinished import common, is_left_out, is_path, path_of, refuses, tree_of
from tikv import arrays, reference

LAYERS, HEADS, WIDTH, BLOCKS, SIZE = 2, 2, 16, 10, 4
FORMS = [("float32", "float32", "NHD"), ("float16", "float16", "VLLM"), ("int8", "float32", "HND")]
SALTS = (None, None, "a", b"a", 97)
MOST = 6  # sequences; then one is freed


class Sequence(NamedTuple):
    """What one should hold.

    Attributes:
        ids: of the tokens that were announced.
        salt: whom they belong to.
        held: for each layer its rows, (K and V, heads, width) each.
        swapped: None, or the bits of its blocks.
    """

    ids: tuple[int, ...]
    salt: Any
    held: list[list[np.ndarray]]
    swapped: list[list[np.ndarray]] | None = None

    @property
    def length(self) -> int:
        return common([len(layer) for layer in self.held])

    @property
    def most(self) -> int:
        return max(map(len, self.held))


class Paged:
    """A pool and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "pool.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        self.dtype, self.source, self.layout = FORMS[number % len(FORMS)]
        self.name, self.doing = f"PagedKVCacheStore {self.dtype} {self.layout}", "making it"
        self.any_bits = self.dtype == self.source and self.chance.random() < 0.5
        self.model: dict[int, Sequence] = {}
        self.known: dict[Any, np.ndarray] = {}  # rows by the tokens up to theirs, as a model would compute them
        self.store = self.make()
        self.views: list[list[np.ndarray]] | None = None
        for group in self.store._pages.pools.groups:
            for a in group.arrays:
                arrays.write_host(oracle.random_bits(rng, a.shape, a.dtype.numpy), a)
        self.pools = self.memory(copied=True)
        names = {self.add: 8, self.append: 45, self.fork: 7, self.truncate: 7, self.free: 5, self.swap_out: 4,
                 self.draft: 4, self.align: 4, self.swap_in: 8, self.save: 0.4, self.refused: 10}  # fmt: skip
        self.attends = not self.any_bits and self.dtype == "float32"
        if self.attends:
            names[self.extend] = 1.5
        self.calls, self.weights = list(names), list(names.values())

    def make(self):
        return tikv.PagedKVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=BLOCKS, block_size=SIZE,
            dtype=self.dtype, layout=self.layout,
        )  # fmt: skip

    # --- what it reads

    def memory(self, copied: bool = False) -> list[list[np.ndarray]]:
        """Of each layer K, V and scales: on the CPU where they lie, from elsewhere copies."""
        found = self.views
        if found is None:
            found = contents(self.store._pages.pools.layers, self.arch)
            if self.arch == "cpu":
                self.views = found
        return [[a.copy() for a in layer] for layer in found] if copied else found

    def step(self) -> None:
        self.doing = "choosing"
        if len(self.model) >= MOST:
            self.free()
        else:
            call = self.chance.choices(self.calls, self.weights)[0]
            (call if self.model else self.add)()
        self.check()

    def check(self) -> None:
        compared = self.arch == "cpu" or self.chance.random() < COMPARED_ON_GPU
        for number, (found, wanted) in enumerate(zip(self.memory() if compared else (), self.pools, strict=compared)):
            for name, got, want in zip(("k", "v", "k_scale", "v_scale"), found, wanted, strict=False):
                if got.tobytes() != want.tobytes():
                    oracle.assert_same_bits(got, want, what=f"pool, {name} of layer {number}")
        assert self.store.sequences == list(self.model)
        assert self.store.context_lens.tolist() == [found.length for found in self.model.values()]
        tables = [self.table(seq) for seq in self.present()]
        owners = Counter(block for table in tables for block in table)
        assert all(len(set(table)) == len(table) for table in tables), "a block twice in one sequence"
        assert self.store.num_free_blocks == BLOCKS - len(owners), "a block is lost"
        assert self.store.num_shared_blocks == sum(n > 1 for n in owners.values())
        for seq, table in zip(self.present(), tables, strict=True):
            assert len(table) == -(-self.model[seq].most // SIZE)
        if self.model and compared:
            self.check_rows(self.chance.choice(list(self.model)))

    def check_rows(self, seq: int) -> None:
        if self.model[seq].swapped is not None:
            return
        layer = self.chance.randrange(LAYERS)
        held = self.model[seq].held[layer]
        wanted = np.array(held, np.float32 if self.dtype == "int8" else self.source).reshape(-1, 2, HEADS, WIDTH)
        for stream, got in enumerate(self.store.tokens(layer, seq)):
            want = wanted[:, stream]
            if self.dtype == "int8":
                want = reference.dequantize(*self.quantized(want))
            oracle.assert_same_bits(got, want, what=f"rows of sequence {seq}, layer {layer}")

    def quantized(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `reference.quantize`, each row once for all times that it is compared."""
        q, scale = np.zeros(rows.shape, np.int8), np.zeros(rows.shape[:2], np.float16)
        for i, row in enumerate(rows):
            key = ("q", row.tobytes())
            if key not in self.known:
                self.known[key] = reference.quantize(row)
            q[i], scale[i] = self.known[key]
        return q, scale

    def table(self, seq: int) -> list[int]:
        return self.store.block_table(seq).tolist()

    def present(self) -> list[int]:
        return [seq for seq, found in self.model.items() if found.swapped is None]

    def some(self) -> int | None:
        """A sequence that is not swapped out."""
        present = self.present()
        if not present:
            self.add()
        return self.chance.choice(present) if present else None

    def row(self, seq: int, layer: int, position: int) -> np.ndarray:
        """Of a known token always the same; else anything."""
        ids, salt = self.model[seq].ids, self.model[seq].salt
        key = (layer, salt.__class__, salt, ids[: position + 1]) if position < len(ids) else None
        if key is None or key not in self.known:
            shape = (2, HEADS, WIDTH)
            if self.any_bits:
                new = oracle.random_bits(self.rng, shape, self.source)
            else:
                new = self.rng.standard_normal(shape, np.float32).astype(self.source)
            if key is None:
                return new
            self.known[key] = new
        return self.known[key]

    def written(self, layer: int, slots: list[int], k: np.ndarray, v: np.ndarray) -> None:
        """Rows in these slots of the model's pools."""
        streams = [k, v]
        if self.dtype == "int8":
            pairs = [self.quantized(a) for a in streams]
            streams = [pair[0] for pair in pairs]
            for memory, (_, scale) in zip(self.pools[layer][2:], pairs, strict=True):
                memory.reshape(-1, HEADS)[slots] = scale
        for i, rows in enumerate(streams):
            self.pools[layer][i] = reference.write_slots(rows, self.pools[layer][i], slots, layout=self.layout)

    # --- operations

    def add(self) -> None:
        salt = self.chance.choice(SALTS)
        ids = tuple(self.chance.randrange(2) for _ in range(self.chance.choice((0, 3, 4, 5, 8, 9))))
        leave = self.chance.choice((0, 1, 1, 1, 3, 5))
        self.doing = f"add({list(ids)}, salt={salt!r}, leave={leave})"
        seq = self.store.add(list(ids) or None, salt, **{} if leave == 1 else {"leave": leave})
        assert seq not in self.model
        there = self.store.length(seq)
        assert there <= max(0, len(ids) - leave)
        assert there % SIZE == 0 or there == len(ids) - leave
        self.model[seq] = Sequence(ids, salt, [[] for _ in range(LAYERS)])
        for layer in range(LAYERS):
            self.model[seq].held[layer] += [self.row(seq, layer, p) for p in range(there)]

    def chosen(self) -> tuple[list[int], list[int]]:
        """Some sequences, and how many tokens each gets."""
        present = self.present()
        seqs = self.chance.sample(present, self.chance.randint(1, min(3, len(present)))) if present else []
        return seqs, [self.chance.choice((0, 1, 1, 1, 2, 4)) for _ in seqs]

    def append(self) -> None:
        seqs, counts = self.chosen()
        if seqs:
            for layer in self.chance.choice(([0, 1], [1, 0], [0], [1])):
                self.put(layer, seqs, counts, None)

    def extend(self) -> None:
        seqs, counts = self.chosen()
        if seqs:
            q = self.rng.standard_normal((sum(counts), 2 * HEADS, WIDTH), np.float32)
            self.put(self.chance.randrange(LAYERS), seqs, counts, q)

    def draft(self) -> None:
        """Append a draft to every layer of a sequence, where it can be by `extend` as a tree, and keep a path of it."""
        if (seq := self.some()) is None:
            return
        found = self.model[seq]
        if len({*map(len, found.held)}) > 1 or found.most < len(found.ids):  # tokens that were announced are no draft
            self.align([seq])
            return
        start, tokens = found.most, self.chance.choice((2, 4))
        tree = tree_of(self.chance, tokens) if self.attends else None
        for layer in range(LAYERS):
            q = self.rng.standard_normal((tokens, 2 * HEADS, WIDTH), np.float32) if tree else None
            self.put(layer, [seq], [tokens], q, tree)
            if len(found.held[layer]) == start:  # no room
                return
        path = path_of(self.chance, tree) if tree else [i for i in range(tokens) if self.chance.random() < 0.6]
        wrong, before = [i for i in range(tokens) if self.chance.random() < 0.5], self.table(seq)
        self.doing += f", of a draft {tree} commit({wrong}), commit({path})"
        if self.layout == "VLLM":
            refuses(tikv.OptionError, lambda: self.store.commit([seq], path))
            return
        if tree and not is_path(tree, wrong):
            refuses(tikv.PositionError, lambda: self.store.commit([seq], wrong))
        self.store.commit([seq], path)
        assert self.table(seq) == before[: -(-(start + len(path)) // SIZE)]
        for layer, pools in enumerate(self.pools):
            for to, at in enumerate(path):
                (block, slot), (new, there) = (divmod(start + n, SIZE) for n in (at, to))
                for i, a in enumerate(pools):
                    of_heads = np.s_[:,] if self.layout == "HND" and i < 2 else ()
                    a[(before[new], *of_heads, there)] = a[(before[block], *of_heads, slot)]
            found.held[layer][start:] = [found.held[layer][start + i] for i in path]
        refuses(tikv.PositionError, lambda: self.store.commit([seq], [0]))

    def put(
        self, layer: int, seqs: list[int], counts: list[int], q: np.ndarray | None, tree: list[int] | None = None
    ) -> None:
        """Append new rows of several sequences to a layer; with queries, by `extend`, or those of one as a tree."""
        new = []
        for seq, count in zip(seqs, counts, strict=True):
            start = len(self.model[seq].held[layer])
            new.append([self.row(seq, layer, p) for p in range(start, start + count)])
        rows = np.array([row for found in new for row in found], self.source).reshape(-1, 2, HEADS, WIDTH)
        k, v = (np.ascontiguousarray(rows[:, i]) for i in range(2))
        bounds = None if set(counts) == {1} else np.cumsum([0, *counts])
        self.doing = f"{'append' if q is None else 'extend'}(layer {layer}, sequences {seqs}, {counts} tokens)"
        before, free = {seq: self.table(seq) for seq in seqs}, self.store.num_free_blocks
        given = [oracle.place(a, self.arch) for a in (k, v)]
        held = [[len(x) for x in self.model[seq].held] for seq in seqs]
        writes = [(lengths, layer, count) for lengths, count in zip(held, counts, strict=True)]
        if is_left_out(writes, lambda: self.store.append(layer, *given, seqs, bounds)):
            self.align(seqs)
            return
        try:
            if q is None:
                self.store.append(layer, *given, seqs, bounds)
            else:
                parents = None if tree is None else oracle.place(np.array([tree], np.int32), self.arch)
                call = layer, oracle.place(q, self.arch), *given, seqs, bounds
                out = oracle.to_numpy(self.store.extend(*call, parents=parents))
        except tikv.CapacityError:
            most = sum(
                -(-(len(self.model[seq].held[layer]) + count) // SIZE) - len(self.model[seq].held[layer]) // SIZE
                for seq, count in zip(seqs, counts, strict=True)
            )
            assert most > free, f"refused, though {free} blocks are free and at most {most} are needed"
            assert {seq: self.table(seq) for seq in seqs} == before
            return
        for seq in seqs:  # shared blocks that were written into were copied, whole and in all layers
            for old, now in zip(before[seq], self.table(seq), strict=False):
                if old != now:
                    for pools in self.pools:
                        for a in pools:
                            a[now] = a[old]
        slots = []
        for seq, found in zip(seqs, new, strict=True):
            held, table = self.model[seq].held[layer], self.table(seq)
            slots += [table[p // SIZE] * SIZE + p % SIZE for p in range(len(held), len(held) + len(found))]
            held += found
        self.written(layer, slots, k, v)
        if q is not None and tree is None:
            self.check_attention(layer, seqs, counts, q, out)

    def check_attention(self, layer: int, seqs: list[int], counts: list[int], q: np.ndarray, out: np.ndarray) -> None:
        row = 0
        for seq, count in zip(seqs, counts, strict=True):
            held = np.array(self.model[seq].held[layer], np.float32).reshape(-1, 2, HEADS, WIDTH)
            k, v = held[:, 0], held[:, 1]
            if self.dtype == "int8":
                k, v = (reference.dequantize(*self.quantized(a)) for a in (k, v))
            for t in range(count):
                end = len(held) - count + 1 + t
                for head in range(2 * HEADS):
                    kv = head // 2
                    want, _ = reference.attention(q[row, head], k[:end, kv], v[:end, kv], scale=WIDTH**-0.5)
                    np.testing.assert_allclose(out[row, head], want, rtol=0, atol=TOLERANCE)
                row += 1

    def align(self, seqs: list[int] | None = None) -> None:
        """All that are not swapped out, or these."""
        seqs = self.present() if seqs is None else seqs
        self.doing += f", align({seqs})"
        wanted = [min(map(len, self.model[seq].held)) for seq in seqs]
        assert self.store.align(seqs).tolist() == wanted
        for seq, n in zip(seqs, wanted, strict=True):
            self.cut(seq, n)

    def cut(self, seq: int, n: int) -> None:
        found = self.model[seq]
        if found.most > n:
            self.model[seq] = Sequence(found.ids[:n], found.salt, [layer[:n] for layer in found.held])

    def fork(self) -> None:
        if (seq := self.some()) is None:
            return
        self.doing = f"fork({seq})"
        found = self.model[seq]
        known = min(map(len, found.held)) // SIZE * SIZE  # it may go another way
        self.model[self.store.fork(seq)] = Sequence(found.ids[:known], found.salt, [list(x) for x in found.held])

    def truncate(self) -> None:
        if (seq := self.some()) is None:
            return
        found = self.model[seq]
        n = self.chance.randint(max(0, found.length - self.chance.choice((2, 2, 30))), found.length)
        self.doing = f"truncate({seq}, {n})"
        self.store.truncate(seq, n)
        self.model[seq] = Sequence(found.ids[:n], found.salt, [layer[:n] for layer in found.held])

    def free(self) -> None:
        seq = self.chance.choice(list(self.model))
        self.doing = f"free({seq})"
        self.store.free(seq)
        del self.model[seq]

    def swap_out(self) -> None:
        if (seq := self.some()) is None:
            return
        self.doing = f"swap_out({seq})"
        table = self.table(seq)
        bits = [[a[table].copy() for a in pools] for pools in self.pools]
        self.store.swap_out(seq)
        self.model[seq] = self.model[seq]._replace(swapped=bits)

    def swap_in(self) -> None:
        out = [seq for seq, found in self.model.items() if found.swapped is not None]
        if not out:
            self.doing = "swap_in of one that is here"
            refuses(tikv.PositionError, lambda: self.store.swap_in(self.chance.choice(list(self.model))))
            return
        seq = self.chance.choice(out)
        self.doing, free = f"swap_in({seq})", self.store.num_free_blocks
        try:
            self.store.swap_in(seq)
        except tikv.CapacityError:
            assert -(-self.model[seq].most // SIZE) > free, "refused, though there is room"
            return
        table, bits = self.table(seq), self.model[seq].swapped or []
        for pools, saved in zip(self.pools, bits, strict=True):
            for a, b in zip(pools, saved, strict=True):
                a[table] = b  # those found by their prefix hold the same
        self.model[seq] = self.model[seq]._replace(swapped=None)

    def save(self) -> None:
        """Save some, and load them into this pool or all of them into a new one."""
        if self.chance.random() < 0.5:
            self.doing = "save() and load()"
            self.store.save(self.path)
            tables = {seq: len(self.table(seq)) for seq in self.present()}
            self.store, self.views = tikv.PagedKVCacheStore.load(self.path), None
            assert {seq: len(self.table(seq)) for seq in self.present()} == tables
            self.pools = self.memory(copied=True)
            self.rows_of(list(self.model))
            for seq, found in self.model.items():  # of one that is swapped out only filled slots were saved
                if found.swapped is not None:
                    self.model[seq] = found._replace(swapped=None)
                    self.store.free(seq)
            self.model = {seq: self.model[seq] for seq in self.store.sequences}
            return
        seqs = self.chance.sample(present := self.present(), min(2, len(present)))
        self.doing, free = f"save({seqs}) and load_sequences()", self.store.num_free_blocks
        self.store.save(self.path, seqs)
        blocks = len({block for seq in seqs for block in self.table(seq)})
        try:
            loaded = self.store.load_sequences(self.path)
        except tikv.CapacityError:
            assert blocks > free, "refused, though there is room"
            return
        now, fresh = self.memory(copied=True), {block for seq in loaded for block in self.table(seq)}
        assert len(fresh) == blocks
        for found, wanted in zip(now, self.pools, strict=True):
            others = [block for block in range(BLOCKS) if block not in fresh]
            for got, want in zip(found, wanted, strict=True):
                oracle.assert_same_bits(got[others], want[others], what="blocks of others")
        self.pools = now
        for seq, copy in zip(seqs, loaded, strict=True):
            self.model[copy] = self.model[seq]._replace(held=[list(x) for x in self.model[seq].held])
        self.rows_of(loaded)

    def rows_of(self, seqs: list[int]) -> None:
        for seq in seqs:
            for _ in range(2):
                self.check_rows(seq)

    def refused(self) -> None:
        store, k = self.store, oracle.place(np.ones((1, HEADS, WIDTH), self.source), self.arch)
        if (seq := self.some()) is None:
            return
        length = store.length(seq)
        wide = oracle.place(np.ones((2 * BLOCKS * SIZE, HEADS, WIDTH), self.source), self.arch)
        calls = {
            "append: no such sequence": lambda: store.append(0, k, k, [max(self.model) + 10]),
            "append: twice the same": lambda: store.append(0, wide[:2], wide[:2], [seq, seq]),
            "append: no layer": lambda: store.append(LAYERS, k, k, [seq]),
            "append: bounds beyond the rows": lambda: store.append(0, k, k, [seq], [0, 2]),
            "append: bounds from 1": lambda: store.append(0, k, k, [seq], [1, 1]),
            "append: fewer heads": lambda: store.append(0, k[:, :1], k[:, :1], [seq]),
            "append: narrower rows": lambda: store.append(0, k[..., :8], k, [seq]),
            "append: other dtype": lambda: store.append(0, *[np.ones(k.shape, np.int32)] * 2, [seq]),
            "append: more than there is": lambda: store.append(0, wide, wide, [seq], [0, len(wide)]),
            "truncate: to more": lambda: store.truncate(seq, length + 1),
            "free: no such sequence": lambda: store.free(max(self.model) + 10),
            "swap_in: is here": lambda: store.swap_in(seq),
            "fork: below 0": lambda: store.fork(-1),
            "add: halves": lambda: store.add([0.5]),
            "add: no salt": lambda: store.add([1], salt=1.5),
            "add: leaves fewer than none": lambda: store.add([1], leave=-1),
            "save: twice the same": lambda: store.save(self.path, [seq, seq]),
        }
        what = self.chance.choice(list(calls))
        self.doing = f"refused {what}"
        refuses(tikv.TikvError, calls[what])
