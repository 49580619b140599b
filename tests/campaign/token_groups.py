"""KVCacheStore of keys by channel over groups of tokens against rows in NumPy: codes, tokens, counts and attention."""

import copy
import random
from typing import Any

import numpy as np
from inside import codes_of
from token_group_model import BATCH, HEADS, WIDTH, Model

import tikv
from campaign.unfinished import goes_on, refuses

LAYERS = 2
FORMS: list[dict[str, Any]] = [  # few of them, since each compiles its own kernels
    {},
    {"window": 100, "sinks": 4},
    {"values": "float16"},
    {"values": tikv.Quant(8, 32), "window": 70},
]


class TokenGroups:
    """A store and its model."""

    def __init__(self, rng, arch, number, folder):
        self.rng, self.path = rng, folder / "groups.safetensors"
        self.chance = random.Random(int(rng.integers(2**63)))
        form = FORMS[number % len(FORMS)]
        self.name, self.doing = f"KVCacheStore of groups along tokens {form}", "making it"
        quant = tikv.Quant(4, 32, "tokens", self.chance.choice((32, 33, 50)))
        self.model = Model(rng, arch, quant, np.float16, LAYERS, **form, capacity=300)
        self.saved: Any = None
        names = {self.append: 40, self.extend: 6, self.attend: 10, self.trim: 12, self.compact: 8,
                 self.reset: 1, self.reorder: 4, self.select: 2, self.snapshot: 3, self.restore: 3, self.save: 1,
                 self.refused: 5}  # fmt: skip
        self.calls, self.weights = list(names), list(names.values())

    def step(self) -> None:
        self.doing = "choosing"
        self.chance.choices(self.calls, self.weights)[0]()
        self.model.check()

    def goes_on(self, layer: int, tokens: int) -> bool:
        """As `unfinished.goes_on`."""
        placed, _, _ = self.model.new(tokens)
        call = lambda: self.model.store.append(layer, *placed[:2], layout="head_major")  # noqa: E731
        return goes_on(self.model.ends, layer, tokens, call, self.align)

    def align(self) -> None:
        """All layers to one length; or nothing changes, as older tokens became codes or are gone: a reset."""
        model, target = self.model, min(self.model.ends)
        self.doing += f", align() to {target}"
        try:
            assert model.store.align() == target
        except tikv.PositionError:
            self.reset()
            return
        if target == 0:
            self.forget()
            return
        for layer, length in enumerate(model.ends):
            model.cut(layer, min(length, target))

    def append(self) -> None:
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 1, 2, 7, 32, 65))
        self.doing = f"append(layer {layer}, {tokens} tokens)"
        if not self.goes_on(layer, tokens):
            return
        if self.model.window is None and self.model.length(layer) + tokens > 300:
            placed, _, _ = self.model.new(tokens)
            refuses(tikv.CapacityError, lambda: self.model.store.append(layer, *placed[:2], layout="head_major"))
            self.reset()
            return
        self.model.append(layer, tokens)

    def extend(self) -> None:
        layer, tokens = self.chance.randrange(LAYERS), self.chance.choice((1, 5, 40))
        self.doing = f"extend(layer {layer}, {tokens} tokens)"
        if not self.goes_on(layer, tokens):
            return
        if self.model.window is None and self.model.length(layer) + tokens > 300:
            return
        self.model.extend(layer, tokens)

    def attend(self) -> None:
        layer = self.chance.randrange(LAYERS)
        self.doing = f"attend(layer {layer})"
        if self.model.length(layer):
            self.model.attend(layer)

    def trim(self) -> None:
        model, lengths = self.model, self.model.ends
        if not goes_on(lengths, 0, 0, lambda: model.store.trim(0), self.align):
            return
        longest = max(lengths)
        n = self.chance.choice((1, 3, 20, longest % 32, longest % 32 + 32, longest))
        self.doing = f"trim({n}) of {lengths}"
        target, group = longest - n, model.quant.group
        wrong = n > longest
        for layer, length in enumerate(lengths):
            if length <= target or n == longest:
                continue
            left = model.length(layer) - (length - target)
            wrong |= target < model.first_whole(layer)
            behind = left - model.sinks
            wrong |= model.coded[layer] > 0 and 0 < behind < model.coded[layer] and behind % group > 0
            wrong |= model.sinks < left < model.oldest[layer]
        if wrong:
            refuses(tikv.PositionError, lambda: model.store.trim(n))
            return
        model.store.trim(n)
        if n == longest:
            self.forget()
            return
        for layer, length in enumerate(lengths):
            model.cut(layer, min(length, target))

    def compact(self) -> None:
        """Of each head as many groups and new tokens, but its own; now and then a part of a group, which is refused."""
        model, layer = self.model, self.chance.randrange(LAYERS)
        held, sinks, end = np.array(model.held(layer), int), model.sinks, model.sinks + model.coded[layer]
        group_of = (held - sinks) // model.quant.group
        codes = (held >= sinks) & (held < end)
        groups, fixed, new = np.unique(group_of[codes]), np.flatnonzero(held < sinks), np.flatnonzero(held >= end)
        some = self.chance.randint(0, len(groups))
        if some == 0:
            fixed = fixed[self.rng.random(len(fixed)) < 0.7]
        with_oldest = some and (some == len(groups) or self.chance.random() < 0.5)
        count, heads = self.chance.randint(0, len(new)), []
        for _ in range(model.batch * HEADS):
            others = self.rng.permutation(groups[1:])[: some - with_oldest] if some else groups[:0]
            chosen = np.isin(group_of, [*others, *groups[: int(with_oldest)]]) & codes
            heads.append([*fixed, *np.flatnonzero(chosen), *np.sort(self.rng.permutation(new)[:count])])
        index = np.array(heads, int).reshape(model.batch, HEADS, -1)
        self.doing = f"compact(layer {layer}, {some} of {len(groups)} groups, {count} of {len(new)} new tokens)"
        whole = [i for i in np.flatnonzero(codes) if (group_of == group_of[i]).sum() > 1]
        if whole and self.chance.random() < 0.3:
            parted = [[[i for i in range(len(held)) if i != whole[-1]]] * HEADS] * model.batch
            refuses(tikv.PositionError, lambda: model.store.compact(layer, parted))
            return
        model.compact(layer, index)

    def forget(self) -> None:
        for layer in range(LAYERS):
            self.model.cut(layer, self.model.ends[layer] - self.model.length(layer))
            self.model.oldest[layer] = self.model.ends[layer] = 0

    def reset(self) -> None:
        self.doing += ", reset()"
        self.model.store.reset()
        self.forget()

    def reorder(self) -> None:
        index = [self.chance.randrange(self.model.batch) for _ in range(self.model.batch)]
        self.doing = f"reorder({index})"
        self.model.reorder(index)

    def select(self) -> None:
        index = [self.chance.randrange(self.model.batch) for _ in range(self.chance.randint(1, 2))]
        self.doing = f"select({index})"
        self.model.reorder(index, "select")

    def state(self) -> list[Any]:
        model = self.model
        state = model.rows, model.coded, model.oldest, model.places, model.ends, model.bits
        return [model.batch, *copy.deepcopy(state)]

    def snapshot(self) -> None:
        self.doing = "snapshot()"
        self.saved = self.model.store.snapshot(), self.state()

    def restore(self) -> None:
        self.doing = "restore()"
        if self.saved is None:
            return
        snapshot, (batch, *state) = self.saved
        self.model.store.restore(snapshot)
        model = self.model
        model.batch = batch
        model.rows, model.coded, model.oldest, model.places, model.ends, bits = copy.deepcopy(state)
        self.settle(bits)

    def settle(self, bits: Any) -> None:
        """What is filled must be right, what is not is as it is; of a window all slots are, once groups went round."""
        model = self.model
        model.bits = [
            [a.copy_to_host() for a in (tikv.arrays.CacheArray(x, model.store.runtime) for x in codes.arrays)]
            for codes in codes_of(model.store)
        ]
        for layer, codes in enumerate(codes_of(model.store)):
            for a, was, (_, filled) in zip(model.bits[layer], bits[layer], codes.filled, strict=True):
                a[:, :, :filled] = was[:, :, :filled]

    def save(self) -> None:
        self.doing = "save() and load()"
        bits = self.state()[-1]
        self.model.store.save(self.path)
        self.model.store = tikv.KVCacheStore.load(self.path)
        self.settle(bits)

    def refused(self) -> None:
        store, rows = self.model.store, np.ones((self.model.batch, 1, HEADS, WIDTH), np.float32)
        calls = {
            "append: narrower rows": lambda: store.append(0, rows[..., :2], rows),
            "append: other heads": lambda: store.append(0, rows[:, :, :1], rows[:, :, :1]),
            "append: positions": lambda: store.append(0, rows, rows, positions=np.zeros(BATCH, np.int32)),
            "compact: rope": lambda: store.compact(0, [[]] * self.model.batch, rope=tikv.Rope(np.ones(WIDTH // 2))),
            "compact: outside": lambda: store.compact(0, [[10**6]] * self.model.batch),
            "commit": lambda: store.commit([0]),
            "trim: too many": lambda: store.trim(store.length + 1),
            "reorder: outside": lambda: store.reorder([self.model.batch] * self.model.batch),
        }
        what = self.chance.choice(list(calls))
        self.doing = f"refused {what}"
        refuses(tikv.TikvError, calls[what])
