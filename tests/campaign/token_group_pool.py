"""PagedKVCacheStore whose older tokens are codes against groups and rows in NumPy: every bit of codes, every block."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle

import tikv
from campaign.contiguous import TOLERANCE
from campaign.unfinished import common, is_left_out, refuses
from tikv import reference
from tikv.arrays import CacheArray

LAYERS, HEADS, WIDTH, BLOCKS, SIZE, GROUP = 2, 2, 32, 24, 64, 32
ALONG_TOKENS, ALONG_ROWS = {"axis": "tokens", "residual": (32, 33, 50)}, {"recent": (1, 32, 45)}
FORMS: list[tuple[Any, Any, Any]] = [  # groups of keys, sinks, and the format of values
    (ALONG_TOKENS, 0, None),
    (ALONG_TOKENS, 0, "float16"),
    (ALONG_TOKENS, 0, tikv.Quant(8, 32)),
    (ALONG_ROWS, 4, None),
    (ALONG_ROWS, 0, "float16"),
    (ALONG_ROWS, 3, tikv.Quant(8, 32)),
    (ALONG_TOKENS, 40, None),
]
MOST = 5  # sequences; then one is freed


@dataclass
class Held:
    """What a layer of a sequence holds.

    Attributes:
        fixed: rows of sinks, (K and V, heads, width) each.
        groups: of each group of codes what the pool's arrays have, (heads, 1 or tokens, ...).
        new: rows of newer tokens.
        positions: of all of them.
        came: tokens that were appended.
        end: tokens that had come when it was compacted.
    """

    fixed: list[np.ndarray] = field(default_factory=list)
    groups: list[list[np.ndarray]] = field(default_factory=list)
    new: list[np.ndarray] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    came: int = 0
    end: int = 0

    @property
    def coded(self) -> int:
        return GROUP * len(self.groups)

    def copy(self) -> "Held":
        return Held(list(self.fixed), list(self.groups), list(self.new), list(self.positions), self.came, self.end)


class TokenGroupPool:
    """A pool and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.arch, self.path = rng, arch, folder / "groups.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        form, self.sinks, self.values = FORMS[number % len(FORMS)]
        form = {name: self.chance.choice(x) if isinstance(x, tuple) else x for name, x in form.items()}
        self.quant = tikv.Quant(4, GROUP, **form, sinks=self.sinks)
        self.name, self.doing = f"PagedKVCacheStore of {self.quant}, values {self.values}", "making it"
        self.store = tikv.PagedKVCacheStore(
            num_layers=LAYERS, num_kv_heads=HEADS, head_dim=WIDTH, num_blocks=BLOCKS, block_size=SIZE,
            dtype=self.quant, v_dtype=self.values,
        )  # fmt: skip
        for pools in (self.store._pages.pools, self.store._pages.new.pools):
            for a in (a for group in pools.groups for a in group.arrays):
                tikv.arrays.write_host(oracle.random_bits(rng, a.shape, a.dtype.numpy), a)
        self.model: dict[int, list[Held]] = {}
        self.away: set[int] = set()
        names = {self.append: 40, self.extend: 6, self.attend: 8, self.add: 5, self.fork: 7, self.truncate: 9,
                 self.compact: 12, self.swap: 5, self.free: 2, self.save: 2, self.refused: 5}  # fmt: skip
        self.calls, self.weights = list(names), list(names.values())

    # --- the model

    def encode(self, held: Held) -> None:
        """The oldest rows become a group of codes."""
        k, v = np.array(held.new[:GROUP]).transpose(1, 2, 0, 3)  # (heads, group, width) each
        codes, *numbers = self.quantised(k.swapaxes(1, 2) if self.quant.axis == "tokens" else k, self.quant)
        found = [codes, np.stack(numbers, axis=-1).reshape(HEADS, GROUP, -1)]
        if self.quant.axis == "tokens":
            found = [codes[:, None], np.stack(numbers, axis=-1).reshape(HEADS, 1, WIDTH, 2)]
        if self.values == "float16":
            found.append(v.astype(np.float16))
        else:
            codes, *numbers = self.quantised(v, self.values or self.quant)
            found += [codes, np.stack(numbers, axis=-1).reshape(HEADS, GROUP, -1)]
        held.groups.append(found)
        del held.new[:GROUP]

    def quantised(self, rows: np.ndarray, quant: tikv.Quant) -> Any:
        rows = np.ascontiguousarray(rows, np.float16)
        return reference.quantize_groups(rows, quant.bits, quant.group, "affine", np.float16)

    def numbers(self, held: Held) -> tuple[np.ndarray, np.ndarray]:
        """K and V as they are read, (n, heads, width) float32."""
        keys, values = [np.empty((0, HEADS, WIDTH), np.float32)], [np.empty((0, HEADS, WIDTH), np.float32)]
        if held.fixed:
            rows = np.array(held.fixed)
            keys.append(rows[:, 0])
            values.append(rows[:, 1])
        for k, k_numbers, v, *v_numbers in held.groups:
            if self.quant.axis == "tokens":
                of_k = k[:, 0], k_numbers[:, 0, :, :1], k_numbers[:, 0, :, 1:]
                keys.append(reference.dequantize_groups(*of_k, self.quant.bits, "affine").transpose(2, 0, 1))
            else:
                of_k = k, k_numbers[..., 0::2], k_numbers[..., 1::2]
                keys.append(reference.dequantize_groups(*of_k, self.quant.bits, "affine").swapaxes(0, 1))
            if v_numbers:
                of_v = v, v_numbers[0][..., 0::2], v_numbers[0][..., 1::2]
                v = reference.dequantize_groups(*of_v, (self.values or self.quant).bits, "affine")
            values.append(v.swapaxes(0, 1))
        if held.new:
            rows = np.array(held.new)
            keys.append(rows[:, 0])
            values.append(rows[:, 1])
        return np.concatenate(keys).astype(np.float32), np.concatenate(values).astype(np.float32)

    def grow(self, held: Held, row: np.ndarray) -> None:
        if len(held.new) == self.quant.newest + GROUP:
            self.encode(held)
        (held.new if len(held.fixed) == self.sinks else held.fixed).append(row)
        held.positions.append(held.came)
        held.came += 1

    # --- steps

    def step(self) -> None:
        self.doing = "choosing"
        if len(self.model) >= MOST:
            self.free()
        else:
            call = self.chance.choices(self.calls, self.weights)[0]
            (call if self.here() else self.add)()
        self.check()

    def here(self) -> list[int]:
        return [seq for seq in self.model if seq not in self.away]

    def table(self, seq: int) -> list[int]:
        return self.store.block_table(seq).tolist()

    def check(self) -> None:
        store, pages = self.store, self.store._pages
        assert store.sequences == list(self.model)
        owners = Counter(block for seq in self.here() for block in self.table(seq))
        assert store.num_free_blocks == BLOCKS - len(owners), "a block is lost"
        assert store.num_shared_blocks == sum(n > 1 for n in owners.values())
        memory = [[CacheArray(a, store.runtime).copy_to_host() for a in layer] for layer in pages.pools.layers]
        for seq, layers in self.model.items():
            assert store.length(seq) == common([held.came for held in layers])
            for i, held in enumerate(layers):
                what = f"layer {i} of sequence {seq}"
                assert store.layer_length(i, seq) == held.came, what
                assert store.positions(i, seq)[0].tolist() == held.positions, what
                assert pages.coded[seq][i] == held.coded, what
                if seq in self.away:
                    continue
                table = self.table(seq)
                for g, group in enumerate(held.groups):
                    for a, want in zip(memory[i], group, strict=True):
                        each = a.shape[2] * GROUP // SIZE  # entries of a group
                        at = g * GROUP % SIZE // GROUP * each
                        got = a[table[g * GROUP // SIZE], :, at : at + each]
                        assert got.tobytes() == want.astype(a.dtype).tobytes(), f"group {g} of {what}"
        if self.here():
            seq, i = self.chance.choice(self.here()), self.chance.randrange(LAYERS)
            for got, want in zip(store.tokens(i, seq), self.numbers(self.model[seq][i]), strict=True):
                want = want.astype(got.copy_to_host().dtype)
                oracle.assert_same_bits(got, want, what=f"tokens of layer {i} of sequence {seq}")

    def rows(self, tokens: int, heads: int = HEADS) -> np.ndarray:
        return self.rng.standard_normal((tokens, heads, WIDTH)).astype(np.float16)

    def some(self) -> tuple[list[int], list[int]]:
        """Some sequences, and how many tokens each gets."""
        seqs = self.chance.sample(self.here(), self.chance.randint(1, min(3, len(self.here()))))
        return seqs, [self.chance.choice((0, 1, 1, 2, 7, 33, 70)) for _ in seqs]

    def append(self) -> None:
        self.put(*self.some())

    def extend(self) -> None:
        self.put(*self.some(), by_extend=True)

    def put(self, seqs: list[int], counts: list[int], by_extend: bool = False) -> None:
        layer, starts, total = self.chance.randrange(LAYERS), np.cumsum([0, *counts]).tolist(), sum(counts)
        self.doing = f"{'extend' if by_extend else 'append'}(layer {layer}, sequences {seqs}, {counts} tokens)"
        k, v, q = self.rows(total), self.rows(total), self.rows(total, 2 * HEADS).astype(np.float32)
        before, free = {seq: self.table(seq) for seq in seqs}, self.store.num_free_blocks
        k_, v_, q_ = (oracle.place(a, self.arch) for a in (k, v, q))
        came = [[held.came for held in self.model[seq]] for seq in seqs]
        writes = [(lengths, layer, count) for lengths, count in zip(came, counts, strict=True)]
        if is_left_out(writes, lambda: self.store.append(layer, k_, v_, seqs, starts)):
            self.align(seqs)
            return
        try:
            if by_extend:
                out = oracle.to_numpy(self.store.extend(layer, q_, k_, v_, seqs, starts))
            else:
                self.store.append(layer, k_, v_, seqs, starts)
        except tikv.CapacityError:
            held = [len(self.model[seq][layer].positions) for seq in seqs]
            most = sum(-(-(n + m) // SIZE) - max(0, n - self.sinks) // SIZE for n, m in zip(held, counts, strict=True))
            assert most > free, f"refused, though {free} blocks are free and at most {most} are needed"
            assert {seq: self.table(seq) for seq in seqs} == before
            return
        for seq, first, end in zip(seqs, starts, starts[1:], strict=False):
            for t in range(first, end):
                held = self.model[seq][layer]
                self.grow(held, np.stack([k[t], v[t]]))
                if by_extend:
                    self.check_attention(out[t], q[t], held, len(held.positions))

    def attend(self) -> None:
        seqs, layer = self.some()[0], self.chance.randrange(LAYERS)
        layers = [self.model[seq][layer] for seq in seqs]
        fresh = [min(len(x.new) + (0 if x.groups else len(x.fixed)), x.came - x.end) for x in layers]
        tokens = self.chance.randint(1, max(1, min(3, *fresh, 3)))
        self.doing = f"attend(layer {layer}, sequences {seqs}, {tokens} queries)"
        q = self.rng.standard_normal((len(seqs), tokens, 2 * HEADS, WIDTH)).astype(np.float32)
        placed = oracle.place(q, self.arch)
        came = {seq: [held.came for held in self.model[seq]] for seq in seqs}
        if any(each[layer] == 0 < max(each) for each in came.values()):
            refuses(tikv.PositionError, lambda: self.store.attend(layer, placed, seqs))
            return
        got = oracle.to_numpy(self.store.attend(layer, placed, seqs))
        for b, seq in enumerate(seqs):
            held = self.model[seq][layer]
            for t in range(tokens):
                self.check_attention(got[b, t], q[b, t], held, len(held.positions) - tokens + t + 1)

    def check_attention(self, out: np.ndarray, q: np.ndarray, held: Held, end: int) -> None:
        k, v = (a[: max(0, end)] for a in self.numbers(held))
        for head in range(2 * HEADS):
            want, _ = reference.attention(q[head], k[:, head // 2], v[:, head // 2], scale=WIDTH**-0.5)
            np.testing.assert_allclose(out[head], want, rtol=0, atol=TOLERANCE)

    # --- what changes sequences

    def add(self) -> None:
        self.doing = "add()"
        self.model[self.store.add()] = [Held() for _ in range(LAYERS)]

    def fork(self) -> None:
        seq = self.chance.choice(self.here())
        self.doing = f"fork({seq})"
        self.model[self.store.fork(seq)] = [held.copy() for held in self.model[seq]]

    def free(self) -> None:
        seq = self.chance.choice(list(self.model))
        self.doing = f"free({seq})"
        self.store.free(seq)
        self.away.discard(seq)
        del self.model[seq]

    def align(self, seqs: list[int]) -> None:
        """Their layers to one length; or nothing changes, since one was compacted or has more codes, and all go."""
        wanted = [min(held.came for held in self.model[seq]) for seq in seqs]
        self.doing += f", align({seqs}) to {wanted}"
        try:
            assert self.store.align(seqs).tolist() == wanted
        except tikv.PositionError:
            for seq in seqs:
                self.store.free(seq)
                del self.model[seq]
            return
        for seq, n in zip(seqs, wanted, strict=True):
            self.cut(seq, n)

    def cut(self, seq: int, n: int) -> None:
        for held in self.model[seq]:
            left = min(len(held.positions), n - held.came + len(held.positions))
            held.came = min(held.came, n)
            held.positions = held.positions[:left]
            held.fixed, left = held.fixed[:left], max(0, left - self.sinks)
            held.groups = held.groups[: left // GROUP]
            held.new = held.new[: left - held.coded]

    def truncate(self) -> None:
        seq = self.chance.choice(self.here())
        layers = self.model[seq]
        longest = common([held.came for held in layers])
        whole = (longest - self.sinks) // GROUP * GROUP + self.sinks
        n = self.chance.choice((longest, longest - 1, longest - 20, whole, whole - GROUP, longest // 2, self.sinks, 0))
        self.doing = f"truncate({seq}, {n})"
        kept = [min(len(x.positions), n - x.came + len(x.positions)) - self.sinks for x in layers]
        parted = any(0 < m < x.coded and m % GROUP for x, m in zip(layers, kept, strict=True))
        if not 0 <= n <= longest or any(n < x.end for x in layers) or parted:
            refuses(tikv.TikvError, lambda: self.store.truncate(seq, n))
            return
        self.store.truncate(seq, n)
        self.cut(seq, n)

    def compact(self) -> None:
        seq, layer = self.chance.choice(self.here()), self.chance.randrange(LAYERS)
        held = self.model[seq][layer]
        groups = [g for g in range(len(held.groups)) if self.chance.random() < 0.6]
        new = [n for n in range(len(held.new)) if self.chance.random() < 0.8]
        of_fixed = [n for n in range(len(held.fixed)) if groups or self.chance.random() < 0.8]
        fixed = len(held.fixed)
        keep = of_fixed + [fixed + g * GROUP + i for g in groups for i in range(GROUP)]
        keep += [fixed + held.coded + n for n in new]
        self.doing = f"compact(layer {layer}, {seq}, groups {groups} and {len(new)} of {len(held.new)} new tokens)"
        if groups and self.chance.random() < 0.2:
            del keep[self.chance.randrange(fixed + GROUP * len(groups))]
            refuses(tikv.PositionError, lambda: self.store.compact(layer, seq, keep))
            return
        free = self.store.num_free_blocks
        try:
            self.store.compact(layer, seq, keep)
        except tikv.CapacityError:
            assert -(-len(keep) // SIZE) > free, "refused, though there is room"
            return
        rows = [held.fixed[n] for n in of_fixed] + [held.new[n] for n in new]
        held.groups = [held.groups[g] for g in groups]
        held.fixed, held.new = rows[: self.sinks], rows[self.sinks :]
        held.positions, held.end = [held.positions[i] for i in keep], held.came

    def swap(self) -> None:
        if self.away:
            seq = self.chance.choice(sorted(self.away))
            self.doing = f"swap_in({seq})"
            try:
                self.store.swap_in(seq)
            except tikv.CapacityError:
                return
            self.away.discard(seq)
        else:
            seq = self.chance.choice(self.here())
            self.doing = f"swap_out({seq})"
            self.store.swap_out(seq)
            self.away.add(seq)

    def save(self) -> None:
        """Save some, and load them into this pool, or all of them into a new one."""
        if self.chance.random() < 0.5:
            self.doing = "save() and load()"
            self.store.save(self.path)
            self.store = tikv.PagedKVCacheStore.load(self.path)
            return
        seqs = self.chance.sample(list(self.model), min(2, len(self.model)))
        self.doing = f"save({seqs}) and load_sequences()"
        self.store.save(self.path, seqs)
        try:
            loaded = self.store.load_sequences(self.path)
        except tikv.CapacityError:
            return
        for seq, number in zip(seqs, loaded, strict=True):
            self.model[number] = [held.copy() for held in self.model[seq]]
            self.away |= {number} if seq in self.away else set()

    def refused(self) -> None:
        store, seq, rows = self.store, self.chance.choice(self.here()), np.ones((1, HEADS, WIDTH), np.float16)
        calls = {
            "append: narrower rows": lambda: store.append(0, rows[..., :2], rows, [seq]),
            "append: other heads": lambda: store.append(0, rows[:, :1], rows[:, :1], [seq]),
            "append: twice": lambda: store.append(0, np.ones((2, HEADS, WIDTH)), np.ones((2, HEADS, WIDTH)), [seq] * 2),
            "commit": lambda: store.commit([seq], [0]),
            "compact: rope": lambda: store.compact(0, seq, [], rope=tikv.Rope(np.ones(WIDTH // 2))),
            "compact: outside": lambda: store.compact(0, seq, [10**6]),
            "truncate: too many": lambda: store.truncate(seq, store.length(seq) + 1),
            "window": lambda: store.attend(0, np.ones((1, 2 * HEADS, WIDTH), np.float32), [seq], window=4),
            "free: none such": lambda: store.free(max(self.model) + 10),
        }
        what = self.chance.choice(list(calls))
        self.doing = f"refused {what}"
        refuses(tikv.TikvError, calls[what])
