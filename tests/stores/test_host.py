"""Stores in the host's memory beside plain ones: the same calls give the same bits, and so do their copies."""

import copy
import gc
import random
import weakref

import numpy as np
import oracle
import pytest
from host_stores import host_store
from inside import resident_storage_of, storage_of

import tikv
from tikv.stores.layers.host import HostLayers
from tikv.stores.layers.residents import CopiedByNumPy, Frame, Residents

LAYERS, HEADS, Q_HEADS, BATCH = 5, 2, 4, 2
ARCHS = pytest.mark.archs("cpu", "cuda")
FORMS = {
    "float32 linear": {"dtype": "float32", "head_dim": 16, "capacity": 40},
    "float16 windows": {
        "dtype": "float16",
        "head_dim": 16,
        "capacity": 40,
        "window": [8, None, 8, 8, None],
        "sinks": 2,
    },
    "int8": {"dtype": "int8", "head_dim": 16, "capacity": 40},
    "4 bits": {"dtype": tikv.Quant(4, 32), "head_dim": 32, "capacity": 40},
    "groups along tokens": {"dtype": tikv.Quant(4, 32, "tokens", 32), "head_dim": 32, "capacity": 160},
    "groups with windows": {
        "dtype": tikv.Quant(4, 32, "tokens", 32),
        "head_dim": 32,
        "capacity": 160,
        "window": [98, None, 98, 98, None],
        "sinks": 2,
    },
}


class Both:
    """A plain store and one on the host, of which every call is asked the same."""

    def __init__(self, arch, form, late=True, resident_layers=2, seed=0, layers=LAYERS):
        form = {"num_layers": layers, "num_kv_heads": HEADS, "batch_size": BATCH, **form}
        self.arch, self.rng, self.layers = arch, np.random.default_rng(seed), layers
        self.plain = tikv.KVCacheStore(**form)
        self.host = host_store(arch, late, **form, resident_layers=resident_layers)
        # Tokens of a prompt and of a step, and how many are enough: with groups along tokens some have to become codes.
        along_tokens = getattr(form["dtype"], "axis", "") == "tokens"
        self.prompt, self.most, self.tokens = (100, 130, (1, 9, 31)) if along_tokens else (7, 30, (1, 1, 2))

    def new(self, tokens, layers=None):
        """q, k and v of new tokens."""
        batch, width = self.plain.batch_size, self.plain.head_dim
        lead = (batch,) if layers is None else (layers, batch)
        return [
            oracle.place(self.rng.standard_normal((*lead, tokens, heads, width)).astype(np.float32), self.arch)
            for heads in (Q_HEADS, HEADS, HEADS)
        ]

    def call(self, method, *given, **options):
        """The results of both, which have the same bits; or what both refuse in the same words."""
        found = []
        for store in (self.plain, self.host):
            try:
                result = getattr(store, method)(*given, **options)
            except tikv.TikvError as error:
                result = f"{type(error).__name__}: {error}"
            found.append(result)
        if isinstance(found[0], str):
            assert found[0] == found[1]
        elif found[0] is not None:
            for one, other in zip(*(a if isinstance(a, tuple) else (a,) for a in found), strict=True):
                oracle.assert_same_bits(other, oracle.to_numpy(one), what=method)
        return found[1]

    def step(self, layer, tokens=1):
        q, k, v = self.new(tokens)
        if self.rng.random() < 0.5:
            return self.call("extend", layer, q, k, v)
        self.call("append", layer, k, v)
        return self.call("attend", layer, q, missing="ignore")

    def check(self):
        """Counts, every bit that is held on the host, and every bit of a copy that is there."""
        plain, host = storage_of(self.plain), resident_storage_of(self.host)
        assert isinstance(host, HostLayers)
        for layer in range(self.layers):
            for name in ("layer_length", "held", "positions", "next_position"):
                np.testing.assert_array_equal(getattr(self.host, name)(layer), getattr(self.plain, name)(layer))
            frame = host.residents[host.config.windows[layer]].frame_of(layer)
            if frame is not None:
                host._ready(layer, frame)
            held = np.s_[:]
            if plain.counts[layer].head_lengths is not None:  # shorter heads have slots that nobody has written
                slots = plain.counts[layer].held_rows().slots
                held = (slots[..., None] == np.arange(plain.filled(layer)[0][1])).any(axis=2)
            of_copy = [] if frame is None else [frame.content.filled(0)]
            for one in (host.whole.filled(layer), *of_copy):
                for (a, count), (wanted, wanted_count) in zip(one, plain.filled(layer), strict=True):
                    assert count == wanted_count
                    got, want = (filled(x, count, self.plain.runtime)[held] for x in (a, wanted))
                    oracle.assert_same_bits(got, want, what=f"layer {layer}")


def filled(a, count, live):
    from tikv.arrays import read_host

    return read_host(a, live)[:, :, :count]


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.thorough)], ids=["late copies", "early copies"])
def late(request, arch):
    if arch != "cpu" and not request.param:
        pytest.skip("the driver copies when it does")
    return request.param


@pytest.mark.thorough
@ARCHS
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_steps_have_the_bits_of_a_plain_store(arch, form, late):
    both = Both(arch, form, late)
    for layer in range(LAYERS):
        both.call("extend", layer, *both.new(both.prompt))
    for _ in range(6):
        for layer in range(LAYERS):
            both.step(layer)
    both.check()
    assert both.host.place == "host"
    assert both.host.nbytes == both.plain.nbytes


@ARCHS
@pytest.mark.parametrize("resident_layers", [1, 3, 5, 9])
def test_any_number_of_layers_may_be_resident(arch, resident_layers, late):
    both = Both(arch, FORMS["float32 linear"], late, resident_layers)
    for _ in range(3):
        for layer in range(LAYERS):
            both.step(layer)
    both.check()
    assert both.host.resident_layers == min(resident_layers, LAYERS)
    assert both.host.resident_nbytes * LAYERS == both.host.nbytes * min(resident_layers, LAYERS)
    assert both.plain.resident_layers == LAYERS
    assert both.plain.resident_nbytes == both.plain.nbytes


@ARCHS
def test_layers_may_be_used_in_any_order(arch, late):
    both = Both(arch, FORMS["float16 windows"], late)
    chance = random.Random(3)
    for _ in range(40):
        both.step(chance.randrange(LAYERS), chance.choice((1, 1, 3)))
        if chance.random() < 0.2:
            both.check()
    both.check()


OTHERS = ["append_all", "trim", "reset", "compact", "compact_all", "reorder", "select", "repeat", "commit", "snapshot"]


def change(both, chance, name):
    """One call that is neither `append` nor `extend`, of both."""
    batch = both.plain.batch_size
    if name == "append_all":
        both.call("append_all", *both.new(2, LAYERS)[1:])
    elif name == "trim":
        both.call("trim", chance.randrange(4))
    elif name == "compact":
        layer = chance.randrange(LAYERS)
        held = both.plain.held(layer)
        if isinstance(held, int) and held:
            mask = both.rng.random((batch, HEADS, held)) < 0.7
            both.call("compact", layer, mask if chance.random() < 0.5 else mask[:, :1].repeat(HEADS, 1))
    elif name == "compact_all":
        held = [both.plain.held(layer) for layer in range(LAYERS)]
        if all(isinstance(n, int) and n > 2 for n in held):
            both.call("compact_all", [np.tile([0, 2], (batch, 1))] * LAYERS)
    elif name == "reorder":
        both.call("reorder", [chance.randrange(batch) for _ in range(batch)])
    elif name == "select":
        both.call("select", [chance.randrange(batch) for _ in range(BATCH)])
    elif name == "repeat" and batch <= BATCH:
        both.call("repeat", 2)
    elif name == "commit":
        both.call("commit", [[1]] * batch, 2)
    elif name == "reset" and chance.random() < 0.3:
        both.call("reset")
    elif name == "snapshot":
        for store in (both.plain, both.host):
            both.saved = [*getattr(both, "saved", []), store.snapshot()][-2:]
        both.step(0)
        for store, snapshot in zip((both.plain, both.host), both.saved, strict=True):
            store.restore(snapshot)


OF_ONE_KIND = ("int8", "4 bits")  # of storages that others of these have, which the copies do not tell apart


@pytest.mark.thorough
@ARCHS
@pytest.mark.parametrize(
    "form", [pytest.param(FORMS[n], id=n, marks=pytest.mark.full if n in OF_ONE_KIND else ()) for n in FORMS]
)
def test_what_changes_tokens_reaches_the_copies(arch, form, late):
    """Random calls, each followed by a step over some layers; copies that were not told have other bits."""
    both, chance = Both(arch, form, late, seed=7), random.Random(11)
    for turn in range(24):
        for layer in range(LAYERS):
            if both.plain.layer_length(layer) < both.most and chance.random() < 0.8:
                both.step(layer, chance.choice(both.tokens))
        change(both, chance, OTHERS[turn % len(OTHERS)])
        both.check()


def steps_between_changes(arch):
    both, chance = Both(arch, FORMS["float32 linear"], seed=7), random.Random(11)
    for turn in range(6):
        for layer in range(LAYERS):
            both.step(layer)
        change(both, chance, ("reorder", "compact_all")[turn % 2])
        both.check()


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (CopiedByNumPy, "wait", lambda self: None),
        (Residents, "drop", lambda self, layer=None: None),
        (HostLayers, "_ready", lambda self, layer, frame: frame.transfer.wait()),
        (Residents, "frame_of", lambda self, layer: self.frames[0]),
    ],
    ids=["nobody waits", "copies stay after a change", "counts are those of before", "another layer's copy"],
)
def test_what_is_forgotten_is_seen(arch, monkeypatch, owner, name, instead):
    steps_between_changes(arch)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises((AssertionError, tikv.PositionError)):
        steps_between_changes(arch)


def test_layers_come_one_ahead_and_as_few_as_may_be():
    """In order each use finds its layer on the way; of n layers and r frames n - r + 2 are copied in a round."""
    for count, places in ((5, 2), (6, 3), (8, 5), (4, 4)):
        fetched = []
        frames = [Frame(None, None) for _ in range(places)]
        some, fetch = Residents(range(count), count, frames), lambda layer, frame, to=fetched: to.append(layer)
        for turn in range(4):
            before = len(fetched)
            for layer in range(count):
                assert turn == layer == 0 or some.frame_of(layer) is not None, "it was not on its way"
                some.bring(layer, fetch)
                some.bring_next(layer, fetch)
                assert some.frame_of(layer) is not None
        assert len(fetched) - before <= (count - places + 2 if places < count else 0)


@ARCHS
def test_a_store_is_saved_loaded_and_copied_between_places(arch, tmp_path):
    both = Both(arch, FORMS["4 bits"])
    for layer in range(LAYERS):
        both.step(layer, 5)
    path = tmp_path / "host.safetensors"
    both.host.save(path)
    plain = tikv.KVCacheStore.load(path)
    assert plain.place == "device"
    both.plain, before = plain, both.plain
    both.check()
    back = tikv.KVCacheStore.load(path, place="host", resident_layers=3)
    assert (back.place, back.resident_layers) == (("host", 3) if arch == "cuda" else ("device", LAYERS))
    both.plain = before
    for source, to in ((both.plain, both.host), (both.host, both.plain)):
        snapshot = source.snapshot()
        both.step(1)
        to.restore(snapshot)
        source.restore(snapshot)
        both.check()
    twin = copy.deepcopy(both.host)
    both.step(0)
    assert twin.layer_length(0) == both.host.layer_length(0) - 1
    assert twin.place == "host"
    assert twin.lock is resident_storage_of(twin).lock
    both.host, both.plain = twin, copy.deepcopy(before)
    both.plain.restore(snapshot)
    both.check()
    for layer in range(LAYERS):
        both.step(layer)
    both.check()


@ARCHS
def test_what_a_graph_would_need_is_refused_by_name(arch):
    both = Both(arch, FORMS["float32 linear"])
    both.step(0)
    q, k, v = both.new(1)
    positions = oracle.place(np.zeros(BATCH, np.int32), arch)
    calls = [
        lambda s: s.append(0, k, v, positions=positions),
        lambda s: s.append_all(*both.new(1, LAYERS)[1:], positions=positions),
        lambda s: s.positions_on_device(),
        lambda s: s.advance(1),
        lambda s: s.keys(0),
        lambda s: s.values(0),
        lambda s: s.scales(0),
        lambda s: s.attend(0, q, seq_lens=positions),
        lambda s: tikv.compile_step(s, layers=0).run(k, v, q),
    ]
    for call in calls:
        with pytest.raises(tikv.OptionError, match="a store in the host's memory does not support"):
            call(both.host)
    both.check()


CALLS = {
    "append": lambda both, store: store.append(0, *both.new(1)[1:]),
    "append_all": lambda both, store: store.append_all(*both.new(1, LAYERS)[1:]),
    "attend": lambda both, store: store.attend(0, both.new(1)[0]),
    "extend": lambda both, store: store.extend(0, *both.new(1)),
}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_asks_first_whether_a_graph_is_captured(arch, monkeypatch, call):
    both = Both(arch, FORMS["float32 linear"])
    both.call("append_all", *both.new(3, LAYERS)[1:])

    def captured(live, operation, what, remedy):
        raise tikv.ArchError(f"{operation}: {what}. {remedy}")

    monkeypatch.setattr("tikv.launch.refuse_during_capture", captured)
    with pytest.raises(
        tikv.ArchError, match=r"a layer's copy is now\. Use place='device' for layers that a graph captures"
    ):
        call(both, both.host)
    both.check()


@pytest.mark.archs("cuda")
def test_a_captured_graph_is_refused(arch):
    import torch

    both = Both(arch, FORMS["float32 linear"])
    both.call("append_all", *both.new(3, LAYERS)[1:])
    q = both.new(1)[0]
    both.call("attend", 0, q)
    torch.cuda.synchronize()
    captured = torch.zeros(1, device="cuda")  # torch warns of a graph in which nothing is captured
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured += 1
        with pytest.raises(tikv.ArchError, match="Use place='device' for layers that a graph captures"):
            both.host.attend(0, q)
    torch.cuda.synchronize()
    both.check()


@ARCHS
def test_what_is_refused_changes_nothing(arch):
    both = Both(arch, FORMS["float32 linear"])
    for layer in range(LAYERS):
        both.step(layer, 3)
    q, k, v = both.new(38)
    both.call("append", 1, k, v)
    both.call("extend", 1, q, k, v)
    both.call("append", 1, k[:, :, :1], v)
    both.call("attend", 2, q[..., :4])
    both.call("append_all", k, v)
    both.call("trim", 9)
    both.call("reorder", [0, 7])
    both.call("select", [])
    both.call("compact", 0, [[5, 1]] * BATCH)
    both.check()


@pytest.mark.archs("cpu")
def test_memory_goes_with_the_last_name_of_a_store(arch):
    both = Both(arch, FORMS["float32 linear"])
    both.call("append_all", *both.new(3, LAYERS)[1:])
    both.call("attend", 0, both.new(1)[0])
    storage = resident_storage_of(both.host)
    frame = storage.residents[None].frames[0]
    memory = [weakref.ref(storage.memory.layers[0].k.owner), weakref.ref(frame.content.memory.layers[0].k.owner)]
    gc.disable()
    try:
        del both, storage, frame
        assert [one() for one in memory] == [None, None]
    finally:
        gc.enable()


def test_a_plain_store_says_that_it_is_one(arch):
    if arch == "cuda":
        pytest.skip("there a store on the host is one")
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=4, place="host")
    assert (store.place, store.resident_layers, store.resident_nbytes) == ("device", 2, store.nbytes)
    assert f"place='host' makes an ordinary store: {arch} computes in the host's memory" in repr(store)
    assert "place" not in repr(tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=4))
    assert store.keys(0).shape == (1, 1, 4, 8)
    assert tikv.info()["place_host"] == f"plain: {arch} computes in the host's memory"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"place": "disk"}, tikv.OptionError, "unknown place 'disk'"),
        ({"place": None}, tikv.OptionError, "unknown place None"),
        ({"place": "host", "resident_layers": 0}, tikv.PositionError, "resident_layers=0"),
        ({"place": "host", "resident_layers": 1.5}, tikv.DTypeError, "resident_layers is 1.5"),
    ],
)
def test_wrong_places_are_refused(arch, given, error, words, tmp_path):
    with pytest.raises(error, match=words):
        tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=4, **given)
    store = tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=4)
    store.save(tmp_path / "a.safetensors")
    with pytest.raises(error, match=words):
        tikv.KVCacheStore.load(tmp_path / "a.safetensors", **given)


def test_a_device_with_memory_of_its_own_and_no_way_to_the_host_refuses(arch, monkeypatch):
    monkeypatch.setattr("tikv.runtime.shares_memory", lambda *given: False)
    if arch == "cuda":
        monkeypatch.setattr("tikv.launch.launcher_report", lambda live: {"launcher": "direct"})
    with pytest.raises(tikv.ArchError, match=r"place='host' (works on CUDA|needs the native launcher)"):
        tikv.KVCacheStore(num_layers=2, num_kv_heads=1, head_dim=8, capacity=4, place="host")
