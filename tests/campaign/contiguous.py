"""KVCacheStore against slots in NumPy: every bit of its memory, what `tokens` gives, and its counts."""

import copy
import functools
import random
from typing import Any, NamedTuple

import numpy as np
import oracle
from host_stores import host_store
from inside import layers_of

import tikv
from campaign.unfinished import common, goes_on, is_path, path_of, refuses, tree_of
from tikv import arrays, reference, runtime

LAYERS, HEADS, CAPACITY = 2, 2, 12
COMPARED_ON_GPU = 0.25  # of the steps, where a comparison takes longer than a call; what is wrong stays until then
LAYOUTS = ("token_major", "head_major")
TOLERANCE = 2e-5  # of attention in float32 over values around 1


class Form(NamedTuple):
    """A store: few of them, since each compiles its own kernels."""

    name: str
    dtype: str
    source: str
    widths: tuple[int, int]
    window: Any = None
    sinks: int = 0
    batch: int = 1
    attends: bool = False
    on_host: bool = False


FORMS = [
    Form("float32 linear", "float32", "float32", (4, 4), attends=True),
    Form("float16 ring", "float16", "float16", (8, 8), window=5, batch=2),
    Form("float16 of float32 with sinks", "float16", "float32", (8, 8), window=[6, None], sinks=2),
    Form("int8 of float32 with sinks", "int8", "float32", (8, 4), window=[7, 4], sinks=1, batch=2, attends=True),
    Form("float32 on the host", "float32", "float32", (4, 4), window=[6, None], sinks=2, attends=True, on_host=True),
]


class Slots:
    """One layer: its memory, and which position each slot holds."""

    def __init__(self, form: Form, layer: int, memory: list[np.ndarray]):
        window = form.window[layer] if isinstance(form.window, list) else form.window
        self.int8, self.memory, self.window = form.dtype == "int8", memory, window
        self.sinks = form.sinks if window is not None else 0
        self.holds = [-1] * (CAPACITY if window is None else window)
        self.length = 0

    @property
    def filled(self) -> int:
        return min(self.length, len(self.holds))

    @property
    def positions(self) -> list[int]:
        """Those that are still there, in order."""
        return sorted(p for p in self.holds if p >= 0)

    @property
    def oldest(self) -> int:
        """The first position behind the sinks from which all are there."""
        return min((p for p in self.positions if p >= self.sinks), default=self.length)

    def fits(self, tokens: int) -> bool:
        return self.window is not None or self.length + tokens <= CAPACITY

    def append(self, rows: list[np.ndarray]) -> None:
        """K and V, (batch, T, heads, width) of the source's dtype."""
        tokens = rows[0].shape[1]
        slots = reference.slots(self.length, tokens, CAPACITY, self.window, self.sinks)
        if self.int8:
            pairs = [reference.quantize(a) for a in rows]
            rows = [pair[i] for i in range(2) for pair in pairs]
        for memory, new in zip(self.memory, rows, strict=True):
            new = reference.encode(new, memory.dtype)
            for t, slot in enumerate(slots):
                memory[:, :, slot] = new[:, t]
        for t, slot in enumerate(slots):
            self.holds[slot] = self.length + t
        self.length += tokens

    def rewrite(self, start: int, rows: list[np.ndarray]) -> None:
        """`append` to the places of the tokens from `start` on."""
        length, self.length = self.length, start
        self.append(rows)
        self.length = length

    def has(self, target: int) -> bool:
        """Whether all is there that a token at this position sees."""
        first = 0 if self.window is None else max(self.sinks, target + 1 - (self.window - self.sinks))
        return {*range(first, target), *range(min(target, self.sinks))} <= {*self.holds}

    def keep(self, start: int, paths: list[list[int]]) -> None:
        """Of the tokens of each sequence from `start` on only these, moved together."""
        slots = reference.slots(start, self.length - start, CAPACITY, self.window, self.sinks)
        for b, path in enumerate(paths):
            for to, at in enumerate(path):
                for a in self.memory:
                    a[b, :, slots[to]] = a[b, :, slots[at]]
        self.trim(start + len(paths[0]))

    def trim(self, target: int) -> None:
        if self.length > target:
            self.length = target
            self.holds = [p if p < target else -1 for p in self.holds]

    def read(self) -> list[np.ndarray]:
        """K and V as `tokens` gives them."""
        index = [self.holds.index(p) for p in self.positions]
        found = [a[:, :, index] for a in self.memory]
        return found if not self.int8 else [reference.dequantize(found[i], found[2 + i]) for i in range(2)]


class Contiguous:
    """A store and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "store.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        self.form = form = FORMS[number % len(FORMS)]
        self.name, self.doing = f"KVCacheStore {form.name}", "making it"
        self.any_bits = form.dtype == form.source and self.chance.random() < 0.5
        self.attends = form.attends and not self.any_bits
        self.saved: tuple[Any, list[Slots]] | None = None
        make = functools.partial(host_store, arch, resident_layers=1) if form.on_host else tikv.KVCacheStore
        self.store = make(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=form.widths[0], head_dim_v=form.widths[1],
            capacity=CAPACITY, batch_size=form.batch, dtype=form.dtype, window=form.window, sinks=form.sinks,
        )  # fmt: skip
        self.fill()
        self.views: dict[int, list[np.ndarray]] = {}
        self.seen = -1
        self.layers = [Slots(form, layer, self.memory_of(layer, copied=True)) for layer in range(LAYERS)]
        names = {self.append: 40, self.append_all: 20, self.trim: 9, self.reset: 2, self.reorder: 4, self.select: 2,
                 self.repeat: 2, self.snapshot: 3, self.restore: 3, self.save: 0.3, self.deepcopy: 0.5, self.align: 4,
                 self.rewrite: 3, self.refused: 12}  # fmt: skip
        if self.attends:
            names[self.extend] = 1.5
            names[self.tree] = 1.5
        self.calls, self.weights = list(names), list(names.values())

    def fill(self) -> None:
        """Let every bit of the memory be a random one; on a GPU, where rows can be appended only, of rows."""
        if self.arch == "cpu":
            for layer in layers_of(self.store):
                for a in layer.arrays:
                    arrays.write_host(oracle.random_bits(self.rng, a.shape, a.dtype.numpy), a)
            return
        for layer in range(LAYERS):
            self.store.append(layer, *self.given(self.rows(CAPACITY), "token_major"))
        self.store.reset()

    # --- what it gives and reads

    def rows(self, tokens: int, layers: int | None = None) -> list[np.ndarray]:
        """New K and V: any bits where they are only copied."""
        lead = (self.store.batch_size,) if layers is None else (layers, self.store.batch_size)
        shapes = [(*lead, tokens, HEADS, width) for width in self.form.widths]
        if self.any_bits:
            return [oracle.random_bits(self.rng, shape, self.form.source) for shape in shapes]
        return [self.rng.standard_normal(shape, np.float32).astype(self.form.source) for shape in shapes]

    def given(self, rows: list[np.ndarray], layout: str) -> list[Any]:
        if layout == "head_major":
            rows = [np.ascontiguousarray(a.swapaxes(-3, -2)) for a in rows]
        return [oracle.place(a, self.arch) for a in rows]

    def memory_of(self, layer: int, copied: bool = False) -> list[np.ndarray]:
        """All memory of a layer: on the CPU where it lies, from elsewhere a copy."""
        if self.arch == "cpu" and self.seen != self.store.memory_version:
            self.views, self.seen = {}, self.store.memory_version
        found = self.views.get(layer)
        if found is None:
            found = contents([layers_of(self.store)[layer].arrays], self.arch)[0]
            if self.arch == "cpu":
                self.views[layer] = found
        return [a.copy() for a in found] if copied else found

    def step(self) -> None:
        self.doing = "choosing"
        self.chance.choices(self.calls, self.weights)[0]()
        self.check()

    def check(self) -> None:
        for number, layer in enumerate(self.layers):
            assert self.store.layer_length(number) == layer.length
        assert self.store.length == common(self.lengths)
        if self.arch != "cpu" and self.chance.random() >= COMPARED_ON_GPU:
            return
        if self.arch == "cpu":
            memory = [self.memory_of(number) for number in range(LAYERS)]
        else:
            memory = contents([layer.arrays for layer in layers_of(self.store)], self.arch)
        for number, layer in enumerate(self.layers):
            for name, got, want in zip(("k", "v", "k_scale", "v_scale"), memory[number], layer.memory, strict=False):
                if got.tobytes() != want.tobytes():
                    oracle.assert_same_bits(got, want, what=f"memory, {name} of layer {number}")
        number = self.chance.randrange(LAYERS)
        found = self.store.tokens(number)
        for name, got, want in zip("kv", found, self.layers[number].read(), strict=True):
            oracle.assert_same_bits(got, want, what=f"tokens, {name} of layer {number}")

    def settle(self) -> None:
        """After memory was made anew: what is filled must be right, what is not is as it is."""
        for number, layer in enumerate(self.layers):
            found = self.memory_of(number, copied=True)
            for got, want in zip(found, layer.memory, strict=True):
                oracle.assert_same_bits(got[:, :, : layer.filled], want[:, :, : layer.filled], what="filled slots")
            layer.memory = found

    @property
    def lengths(self) -> list[int]:
        return [layer.length for layer in self.layers]

    # --- operations

    def align(self) -> None:
        """Or nothing changes, since a ring has overwritten what it would need: then all is forgotten."""
        target = min(self.lengths)
        self.doing += f", align() to {target}"
        can = all(layer.has(target) for layer in self.layers if layer.length > target)
        try:
            assert self.store.align() == target
        except tikv.PositionError:
            assert not can, "refused, though all is there"
            self.reset()
            return
        for layer in self.layers:
            layer.trim(target)

    def tree(self) -> None:
        """Draft a tree in every layer, and keep a path of it; another set of its tokens is refused."""
        if len({*self.lengths}) > 1:
            self.align()
        tokens, start = self.chance.choice((2, 4)), self.lengths[0]
        if any(layer.window is not None and tokens > layer.window - layer.sinks for layer in self.layers):
            tokens = 2  # a ring would overwrite tokens of the tree
        trees = [tree_of(self.chance, tokens) for _ in range(self.store.batch_size)]
        self.doing = f"a draft of {trees} at {start}"
        if not all(layer.fits(tokens) for layer in self.layers):
            return
        parents = oracle.place(np.array(trees, np.int32), self.arch)
        for number, layer in enumerate(self.layers):
            rows = self.rows(tokens)
            q = self.rng.standard_normal((self.store.batch_size, tokens, 2 * HEADS, self.form.widths[0]), np.float32)
            given = [oracle.place(q, self.arch), *self.given(rows, "token_major")]
            self.store.extend(number, *given, parents=parents)
            layer.append(rows)
        paths = [path_of(self.chance, tree) for tree in trees]
        wrong = [[i for i in range(tokens) if self.chance.random() < 0.5] for _ in trees]
        most = min(map(len, paths))
        paths = [path[:most] for path in paths]
        self.doing += f", commit({wrong}), commit({paths})"
        if len({*map(len, wrong)}) == 1 and not all(map(is_path, trees, wrong)):
            refuses(tikv.PositionError, lambda: self.store.commit(wrong))
        if any(layer.window is not None and layer.length > layer.window for layer in self.layers) and most < tokens:
            refuses(tikv.PositionError, lambda: self.store.commit(paths))
            return
        self.store.commit(paths)
        for layer in self.layers:
            layer.keep(start, paths)
        refuses(tikv.PositionError, lambda: self.store.commit([[0]] * len(trees)))

    def append(self) -> None:
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((0, 1, 1, 1, 2, 5, 13))
        layout = self.chance.choice(LAYOUTS)
        self.doing = f"append(layer {layer}, {tokens} tokens, {layout})"
        rows = self.rows(tokens)
        call = functools.partial(self.store.append, layer, *self.given(rows, layout), layout=layout)
        if not goes_on(self.lengths, layer, tokens, call, self.align):
            return
        if self.layers[layer].fits(tokens):
            self.store.append(layer, *self.given(rows, layout), layout=layout)
            self.layers[layer].append(rows)
        else:
            refuses(tikv.CapacityError, lambda: self.store.append(layer, *self.given(rows, layout), layout=layout))

    def rewrite(self) -> None:
        number, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 2, 4))
        layer, start = self.layers[number], self.chance.randint(0, CAPACITY)
        self.doing = f"rewrite(layer {number}, {tokens} tokens from {start})"
        rows, layout = self.rows(tokens), self.chance.choice(LAYOUTS)
        call = functools.partial(self.store.rewrite, number, start, *self.given(rows, layout), layout=layout)
        whole = layer.window is None or layer.oldest <= layer.sinks
        first = 0 if whole else max(layer.oldest, layer.sinks)
        if start + tokens <= layer.length and (start >= first or start + tokens <= layer.sinks):
            call()
            layer.rewrite(start, rows)
        else:
            refuses(tikv.PositionError, call)

    def append_all(self) -> None:
        tokens, layout = self.chance.choice((1, 1, 2, 5)), self.chance.choice(LAYOUTS)
        self.doing = f"append_all({tokens} tokens, {layout})"
        rows = self.rows(tokens, LAYERS)
        call = functools.partial(self.store.append_all, *self.given(rows, layout), layout=layout)
        if not goes_on(self.lengths, None, tokens, call, self.align):
            return
        if all(layer.fits(tokens) for layer in self.layers):
            self.store.append_all(*self.given(rows, layout), layout=layout)
            for number, layer in enumerate(self.layers):
                layer.append([a[number] for a in rows])
        else:
            refuses(tikv.CapacityError, lambda: self.store.append_all(*self.given(rows, layout), layout=layout))

    def extend(self) -> None:
        number, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 2, 5))
        self.doing = f"extend(layer {number}, {tokens} tokens)"
        layer, rows = self.layers[number], self.rows(tokens)
        q = self.rng.standard_normal((self.store.batch_size, tokens, 2 * HEADS, self.form.widths[0]), np.float32)
        call = [number, oracle.place(q, self.arch), *self.given(rows, "token_major")]
        if not goes_on(self.lengths, number, tokens, lambda: self.store.extend(*call), self.align):
            return
        if not layer.fits(tokens):
            refuses(tikv.CapacityError, lambda: self.store.extend(*call))
            return
        held, old, first = layer.positions, layer.read(), layer.length
        got = oracle.to_numpy(self.store.extend(*call))
        layer.append(rows)
        new = [a.swapaxes(1, 2) for a in rows]
        if self.form.dtype == "int8":
            new = [reference.dequantize(*reference.quantize(a)) for a in new]
        k, v = (np.concatenate(pair, 2) for pair in zip(old, new, strict=True))
        there = [*held, *range(first, first + tokens)]
        for b, t, head in np.ndindex(q.shape[:3]):
            last = first + t
            since = -1 if layer.window is None else last - (layer.window - layer.sinks)
            index = [i for i, p in enumerate(there) if p <= last and (p < layer.sinks or p > since)]
            kv = head // 2
            want, _ = reference.attention(q[b, t, head], k[b, kv, index], v[b, kv, index], scale=q.shape[3] ** -0.5)
            np.testing.assert_allclose(got[b, t, head], want, rtol=0, atol=TOLERANCE)

    def trim(self) -> None:
        if not goes_on(self.lengths, 0, 0, lambda: self.store.trim(0), self.align):
            return
        length = max(self.lengths)
        n = self.chance.randint(0, min(length, self.chance.choice((1, 3, 13))))
        self.doing = f"trim({n})"
        target = length - n
        if any(layer.sinks < target < layer.oldest for layer in self.layers if layer.window is not None):
            refuses(tikv.PositionError, lambda: self.store.trim(n))
            return
        self.store.trim(n)
        for layer in self.layers:
            layer.trim(target)

    def reset(self) -> None:
        self.doing = "reset()"
        self.store.reset()
        for layer in self.layers:
            layer.trim(0)

    def reorder(self) -> None:
        index = [self.chance.randrange(self.store.batch_size) for _ in range(self.store.batch_size)]
        self.doing = f"reorder({index})"
        self.store.reorder(index)
        for layer in self.layers:
            for a in layer.memory:
                a[:, :, : layer.filled] = a[index][:, :, : layer.filled]

    def choose(self, index: list[int]) -> None:
        for layer in self.layers:
            layer.memory = [a[index] for a in layer.memory]
        self.settle()

    def select(self) -> None:
        batch = self.store.batch_size
        index = [self.chance.randrange(batch) for _ in range(self.chance.randint(1, 2))]
        self.doing = f"select({index})"
        self.store.select(index)
        self.choose(index)

    def repeat(self) -> None:
        n = 2 if self.store.batch_size == 1 else 1
        self.doing = f"repeat({n})"
        index = [b for b in range(self.store.batch_size) for _ in range(n)]
        self.store.repeat(n)
        self.choose(index)

    def snapshot(self) -> None:
        self.doing = "snapshot()"
        self.saved = self.store.snapshot(), copy.deepcopy(self.layers)

    def restore(self) -> None:
        self.doing = "restore()"
        if self.saved is None:
            refuses(tikv.OptionError, lambda: self.store.restore(None))
            return
        snapshot, old = self.saved
        same_batch = len(old[0].memory[0]) == self.store.batch_size
        self.store.restore(snapshot)
        for layer, was in zip(self.layers, old, strict=True):
            layer.length, layer.holds = was.length, list(was.holds)
            if same_batch:
                for a, b in zip(layer.memory, was.memory, strict=True):
                    a[:, :, : layer.filled] = b[:, :, : layer.filled]
            else:
                layer.memory = [a.copy() for a in was.memory]
        if not same_batch:
            self.settle()

    def save(self) -> None:
        self.doing = "save() and load()"
        self.store.save(self.path)
        self.take(tikv.KVCacheStore.load(self.path))

    def deepcopy(self) -> None:
        self.doing = "copy.deepcopy()"
        self.take(copy.deepcopy(self.store))

    def take(self, store) -> None:
        """Go on with another store of the same contents."""
        self.store, self.seen = store, -1
        self.settle()

    def refused(self) -> None:
        rows = self.rows(1)
        store, (k, v) = self.store, self.given(rows, "token_major")
        length, batch = store.length, store.batch_size
        calls = {
            "append: fewer heads": lambda: store.append(0, k[:, :, :1], v[:, :, :1]),
            "append: narrower rows": lambda: store.append(0, k[..., :2], v),
            "append: other tokens": lambda: store.append(0, k, v[:, :0]),
            "append: other dtype": lambda: store.append(0, np.zeros(k.shape, np.int32), np.zeros(v.shape, np.int32)),
            "append: no layer": lambda: store.append(LAYERS, k, v),
            "append: no layout": lambda: store.append(0, k, v, layout="rows"),
            "append_all: no layers": lambda: store.append_all(k, v),
            "append: other batch": lambda: store.append(0, *(np.zeros((3, *a.shape[1:]), a.dtype) for a in rows)),
            "trim: too many": lambda: store.trim(length + 1),
            "trim: below 0": lambda: store.trim(-1),
            "reorder: too many": lambda: store.reorder([0] * (batch + 1)),
            "reorder: outside": lambda: store.reorder([batch] * batch),
            "select: none": lambda: store.select([]),
            "repeat: none": lambda: store.repeat(0),
            "restore: nothing": lambda: store.restore("snapshot"),
            "save: no name": lambda: store.save(self.path.with_suffix(".txt")),
        }
        what = self.chance.choice(list(calls))
        self.doing = f"refused {what}"
        refuses(tikv.TikvError, calls[what])


def contents(layers: list[list[Any]], arch: str) -> list[list[np.ndarray]]:
    """All bits of arrays: on the CPU where they lie; elsewhere copies, of which each piece of memory gives one."""
    if arch == "cpu":
        return [[arrays.as_numpy(a) for a in layer] for layer in layers]
    if arch == "cuda":
        return [[arrays.read_host(a, runtime.current()) for a in layer] for layer in layers]
    blocks: dict[int, np.ndarray] = {}
    for layer in layers:
        for a in layer:
            if id(a.owner) not in blocks:
                blocks[id(a.owner)] = a.owner.block.to_numpy().view(np.uint8)
    return [
        [blocks[id(a.owner)][a.offset : a.offset + a.nbytes].view(a.dtype.numpy).reshape(a.shape) for a in layer]
        for layer in layers
    ]
