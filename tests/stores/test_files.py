"""Saved caches: every bit comes back, and whatever is not one of ours, or not whole, is refused."""

import json
import os
import stat

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv.ops import blocks
from tikv.stores import files, limits
from tikv.stores.pools.memory import LayerPools

pytestmark = pytest.mark.full(each_value=True)


def filled(rng, **form):
    """A store with a wrapped ring, sinks and a linear layer, and its saved form's path-independent facts."""
    form = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_dim": 6,
        "head_dim_v": 4,
        "capacity": 24,
        "window": [5, None],
    } | form
    store = tikv.KVCacheStore(**form)
    for tokens in (3, 8, 1):
        shape = (form["num_layers"], form.get("batch_size", 1), tokens, 2)
        store.append_all(oracle.numbers(rng, (*shape, 6), np.float32), oracle.numbers(rng, (*shape, 4), np.float32))
    return store


def assert_same_store(got, want):
    assert repr(got) == repr(want)
    for layer in range(want.num_layers):
        for name, a, b in zip("kv", got.tokens(layer), want.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b, what=f"layer {layer} {name}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("form", [{}, {"sinks": 2, "batch_size": 3}], ids=["plain", "sinks_batch3"])
def test_a_saved_store_comes_back(arch, rng, tmp_path, dtype, form):
    store = filled(rng, dtype=dtype, **form)
    store.trim(2)
    store.save(tmp_path / "cache.safetensors")
    loaded = tikv.KVCacheStore.load(tmp_path / "cache.safetensors")
    assert_same_store(loaded, store)
    shape = (2, form.get("batch_size", 1), 2, 2)
    k, v = oracle.numbers(rng, (*shape, 6), np.float32), oracle.numbers(rng, (*shape, 4), np.float32)
    store.append_all(k, v)
    loaded.append_all(k, v)
    assert_same_store(loaded, store)


def test_saving_replaces_in_one_step_and_leaves_nothing_beside_it(arch, rng, tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    store = filled(rng, dtype="float32")
    store.save(path)
    before = path.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]

    def refuse(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(tikv.CacheFileError, match="no space left"):
        store.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_a_file_has_the_permissions_of_any_other(arch, rng, tmp_path):
    (tmp_path / "other").touch()
    filled(rng, dtype="float32").save(tmp_path / "cache.safetensors")
    assert (tmp_path / "cache.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) != 0o600


def test_the_ending_is_refused_before_anything_is_read(arch, rng, tmp_path, monkeypatch):
    store, pool = filled(rng, dtype="float32"), several(rng, "float32")[0]
    monkeypatch.setattr(tikv.KVCacheStore, "host_layers", None)
    monkeypatch.setattr(LayerPools, "read_blocks", None)
    for each in (store, pool):
        with pytest.raises(tikv.CacheFileError, match=r"cache\.bin' does not end in \.safetensors"):
            each.save(tmp_path / "cache.bin")
    assert not list(tmp_path.iterdir())


def saved(rng, tmp_path, kind):
    """A file of either kind of store, and how to load it."""
    path = tmp_path / "cache.safetensors"
    if kind == "contiguous":
        filled(rng, dtype="float16").save(path)
        return path, tikv.KVCacheStore.load
    several(rng, "int8")[0].save(path)
    return path, tikv.PagedKVCacheStore.load


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_damage_is_refused(arch, rng, tmp_path, kind):
    path, load = saved(rng, tmp_path, kind)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "no data": whole[:header],
        "truncated in the header": whole[:20],
        "truncated in the data": whole[:-1],
        "longer": whole + b"\0",
        "not safetensors": b"PK\x03\x04" + bytes(100),
        "a pickle": b"\x80\x04K\x01.",
        "no header": bytes(header) + whole[header:],
        "a huge header": b"\xff" * 8 + whole[8:],
        "other data": whole[:header] + bytes(len(whole) - header),
        "data out of order": whole[:header] + whole[: header - 1 : -1],
    }
    for what, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(tikv.CacheFileError):
            pytest.fail(f"{what} was loaded: {load(path)}")


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_one_wrong_bit_anywhere_is_refused(arch, rng, tmp_path, kind):
    """In the header, whose text says what the data mean, and in the data."""
    path, load = saved(rng, tmp_path, kind)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(header), *range(header, len(whole), 31), len(whole) - 1]
    for place in places:
        bit = int(rng.integers(8))
        data = bytearray(whole)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(tikv.CacheFileError):
            pytest.fail(f"bit {bit} of byte {place} of {len(whole)} ({header} of header) was loaded: {load(path)}")
    path.write_bytes(whole)
    load(path)


def test_a_header_that_tells_another_story_is_refused(arch, rng, tmp_path):
    """Well-formed JSON whose dtype, shape, length or form is not the one saved."""
    path, _ = saved(rng, tmp_path, "contiguous")
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    text = whole[8:header].decode()
    assert '"F16"' in text
    for old, new in {
        '"F16"': '"I16"',
        '"F16","shape":[1,2,5,6]': '"F16","shape":[1,2,6,5]',
        '\\"sinks\\": 0': '\\"sinks\\": 1',
        '\\"counts\\": [[12, 7]': '\\"counts\\": [[12, 8]',
        '"layers.0.k"': '"layers.0.x"',
        '"version":"1"': '"version":"2"',
    }.items():
        assert old in text, old
        changed = text.replace(old, new, 1).encode()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[header:])
        with pytest.raises(tikv.CacheFileError):
            pytest.fail(f"{new} was read: {files.read(path, 'KVCacheStore', 'test')}")


def test_foreign_files_are_refused(arch, rng, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    with pytest.raises(tikv.CacheFileError, match=r"there is no file .* Give the path of a file that save wrote"):
        tikv.KVCacheStore.load(path)
    with pytest.raises(tikv.CacheFileError, match="3 is not a path"):
        tikv.KVCacheStore.load(3)
    save_file({"a": np.ones(3, np.float32)}, path)
    with pytest.raises(tikv.CacheFileError, match="no cache of this library"):
        tikv.KVCacheStore.load(path)
    files.write(path, "Another", {"a": np.ones(3, np.float32)}, {}, "test")
    with pytest.raises(tikv.CacheFileError, match="holds Another"):
        tikv.KVCacheStore.load(path)
    save_file({}, path, {"tikv": "KVCacheStore", "version": "99"})
    with pytest.raises(tikv.CacheFileError, match="version 99"):
        tikv.KVCacheStore.load(path)
    files.write(path, "KVCacheStore", {}, {"form": {"num_layers": 1}, "counts": []}, "test")
    with pytest.raises(tikv.CacheFileError, match="does not describe a store"):
        tikv.KVCacheStore.load(path)
    save_file({}, path, {"tikv": "KVCacheStore", "version": "1", "facts": "{", "crc32": json.dumps({})})
    with pytest.raises(tikv.CacheFileError, match="damaged"):
        tikv.KVCacheStore.load(path)
    with pytest.raises(tikv.CacheFileError, match="does not end in"):
        filled(rng, dtype="float32").save(tmp_path / "cache.bin")
    with pytest.raises(tikv.CacheFileError, match="3 is not a path"):
        filled(rng, dtype="float32").save(3)
    with pytest.raises(tikv.CacheFileError, match=r"there is no folder .*missing'. Make it"):
        filled(rng, dtype="float32").save(tmp_path / "missing" / "cache.safetensors")


def test_an_unknown_dtype_is_told_those_that_are_stored():
    stored = r"float32, float16, bfloat16, float64, float8_e4m3fn, float8_e5m2, int8"
    with pytest.raises(tikv.DTypeError, match=rf"Use one of {stored}\."):
        tikv.dtypes.parse("foo", "test")


# --- sequences

HEADS, SIZE = 2, 4
PROMPT = list(range(100, 110))


def pool_of(dtype, **form):
    form = {"num_layers": 2, "head_dim": 16, "head_dim_v": 8, "num_blocks": 24} | form
    return tikv.PagedKVCacheStore(num_kv_heads=HEADS, block_size=SIZE, dtype=dtype, **form)


def extend(rng, pool, seqs, counts, layers=None):
    """Append random rows: any bits, but to int8 numbers."""
    made = oracle.numbers if pool.dtype.name == "int8" else oracle.random_bits
    dtype = np.float32 if pool.dtype.name == "int8" else pool.dtype.numpy
    bounds = np.cumsum([0, *counts])
    for layer in range(pool.num_layers) if layers is None else layers:
        k, v = (made(rng, (bounds[-1], HEADS, width), dtype) for width in (pool.head_dim, pool.head_dim_v))
        pool.append(layer, oracle.place(k, pool.runtime.arch), oracle.place(v, pool.runtime.arch), seqs, bounds)


def several(rng, dtype, **form):
    """A pool with used blocks that are free again, and sequences by what is special about them."""
    pool = pool_of(dtype, **form)
    freed = pool.add()
    extend(rng, pool, [freed], [30])
    made = {"prompt": pool.add(PROMPT)}
    extend(rng, pool, [made["prompt"]], [10])
    made["same prefix"] = pool.add([*PROMPT[:9], 7])
    made["fork"] = pool.fork(made["prompt"])
    extend(rng, pool, [made["same prefix"], made["fork"]], [5, 3])
    made["shorter fork"] = pool.fork(made["fork"])
    pool.truncate(made["shorter fork"], 11)
    made["empty"] = pool.add()
    made["half a step"] = pool.add()
    extend(rng, pool, [made["half a step"]], [6])
    extend(rng, pool, [made["half a step"]], [3], layers=[0])
    made["swapped"] = pool.add()
    extend(rng, pool, [made["swapped"]], [7])
    pool.swap_out(made["swapped"])
    pool.free(freed)
    return pool, made


def held(pool, seqs):
    """What sequences hold: for each its lengths and the bits of all layers; those swapped out by their length."""
    found = []
    for seq in seqs:
        if pool._pages.sequences.states[seq].swapped is not None:
            found.append(("swapped out", pool.length(seq)))
            continue
        lengths = [pool.layer_length(layer, seq) for layer in range(pool.num_layers)]
        rows = [oracle.to_numpy(a).tobytes() for layer in range(pool.num_layers) for a in pool.tokens(layer, seq)]
        found.append((lengths, rows))
    return found


def sharing(pool, seqs):
    """Which blocks are the same, whatever their numbers."""
    tables = [[] if pool._pages.sequences.states[s].swapped is not None else pool.block_table(s).tolist() for s in seqs]
    names = {}
    return [[names.setdefault(block, len(names)) for block in table] for table in tables]


def bookkeeping(pool):
    return (
        pool.sequences,
        held(pool, pool.sequences),
        sharing(pool, pool.sequences),
        pool.num_free_blocks,
        pool.num_shared_blocks,
        pool._pages.sequences.next,
    )


@pytest.mark.parametrize("layout", ["NHD", "HND", "VLLM"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_saved_sequences_come_back(arch, rng, tmp_path, dtype, layout):
    pool, made = several(rng, dtype, layout=layout, scale_dtype="float32")
    path = tmp_path / "pool.safetensors"
    pool.save(path)
    loaded = tikv.PagedKVCacheStore.load(path)
    assert bookkeeping(loaded) == bookkeeping(pool)
    assert repr(loaded) == repr(pool)
    if dtype == "int8":
        for mine, theirs in zip(scales(pool, made["prompt"]), scales(loaded, made["prompt"]), strict=True):
            oracle.assert_same_bits(mine, theirs)
    for each in (pool, loaded):
        each.swap_in(made["swapped"])
        same = np.random.default_rng(1)
        extend(same, each, [made["half a step"]], [3], layers=[1])
        extend(same, each, [made[name] for name in ("fork", "shorter fork", "swapped")], [1, 2, 9])
        assert each.length(each.add([*PROMPT, 1, 2])) == 8
    assert bookkeeping(loaded) == bookkeeping(pool)


def scales(pool, seq):
    """The filled part of an int8 sequence's scales."""
    table, length = pool.block_table(seq), pool.length(seq)
    return [
        oracle.to_numpy(a)[table].reshape(-1, HEADS)[:length]
        for layer in range(pool.num_layers)
        for a in pool.scales(layer)
    ]


def test_layers_in_several_pieces_of_memory_are_saved(arch, rng, tmp_path, monkeypatch):
    path = tmp_path / "pool.safetensors"
    monkeypatch.setitem(limits.BLOCK_BYTES, arch, 2 * pool_of("float16").config.bytes_of_layer)
    pool, _ = several(rng, "float16", num_layers=5)
    assert [group.layers for group in pool._pages.pools.groups] == [2, 2, 1]
    pool.save(path)
    monkeypatch.undo()
    assert bookkeeping(tikv.PagedKVCacheStore.load(path)) == bookkeeping(pool)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("layout", "other"), [("NHD", "VLLM"), ("VLLM", "HND"), ("HND", "NHD")])
def test_sequences_are_added_to_another_pool(arch, rng, tmp_path, dtype, layout, other):
    """Of another layout and size, with sequences of its own, which stay as they are."""
    pool, made = several(rng, dtype, layout=layout)
    path = tmp_path / "some.safetensors"
    chosen = [made[name] for name in ("fork", "prompt", "swapped")]
    pool.save(path, chosen)
    into = pool_of(dtype, layout=other, num_blocks=10)
    own = into.add([1, 2, 3, 4])
    extend(rng, into, [own], [9])
    before = held(into, [own]), into.block_table(own).tolist()
    added = into.load_sequences(path)
    assert (into.sequences, added) == ([own, *added], [1, 2, 3])
    assert held(into, added) == held(pool, chosen)
    assert sharing(into, added) == sharing(pool, chosen)
    assert (held(into, [own]), into.block_table(own).tolist()) == before
    assert into.num_free_blocks == 10 - 3 - len({block for table in sharing(pool, chosen) for block in table})
    for each, seq in ((pool, made["swapped"]), (into, added[2])):
        each.swap_in(seq)
    assert held(into, added) == held(pool, chosen)
    again = into.add(PROMPT)
    assert (into.length(again), into.length(into.add([1, 2, 3, 4, 5]))) == (8, 4)
    for seq in into.sequences:
        into.free(seq)
    assert into.num_free_blocks == 10


def test_a_block_is_saved_once_and_nothing_that_is_not_asked_for(arch, rng, tmp_path):
    """Slots that were another sequence's before, and tokens that only a longer fork has, stay out of the file."""
    pool = pool_of("float32", num_blocks=4, layout="HND")
    old = pool.add()
    mark = np.full((16, HEADS, 16), 0.7071, np.float32)
    for layer in range(2):
        pool.append(layer, oracle.place(mark, arch), oracle.place(mark[..., :8].copy(), arch), [old], [0, 16])
    pool.free(old)
    a = pool.add()
    extend(rng, pool, [a], [6])
    b = pool.fork(a)
    pool.truncate(a, 5)
    path = tmp_path / "some.safetensors"
    pool.save(path, [a])
    tensors, facts = files.read(path, "PagedKVCacheStore", "test")
    assert mark[0, 0, 0].tobytes() not in path.read_bytes()
    assert {name: a.shape for name, a in tensors.items()} == {
        f"layers.{layer}.{name}": (2, SIZE, HEADS, width) for layer in range(2) for name, width in (("k", 16), ("v", 8))
    }
    assert [saved["seq"] for saved in facts["sequences"]] == [a]
    for layer in range(2):
        k = tensors[f"layers.{layer}.k"].reshape(-1, HEADS, 16)
        oracle.assert_same_bits(k[:5], oracle.to_numpy(pool.tokens(layer, a)[0]))
        assert not k[5:].any()
    pool.save(path, [b, a])
    tensors, _ = files.read(path, "PagedKVCacheStore", "test")
    assert len(tensors["layers.0.k"]) == 2
    oracle.assert_same_bits(tensors["layers.0.k"].reshape(-1, HEADS, 16)[:6], oracle.to_numpy(pool.tokens(0, b)[0]))


def test_a_pool_of_another_size_is_made(arch, rng, tmp_path):
    pool, _ = several(rng, "float16")
    path = tmp_path / "pool.safetensors"
    pool.save(path)
    used = pool.num_blocks - pool.num_free_blocks
    small = tikv.PagedKVCacheStore.load(path, num_blocks=used)
    assert (small.num_blocks, small.num_free_blocks) == (used, 0)
    assert held(small, small.sequences) == held(pool, pool.sequences)
    with pytest.raises(
        tikv.CapacityError, match=f"load: {used} blocks are needed and {used - 1} of {used - 1} are free"
    ):
        tikv.PagedKVCacheStore.load(path, num_blocks=used - 1)
    with pytest.raises(tikv.PositionError, match="num_blocks=0"):
        tikv.PagedKVCacheStore.load(path, num_blocks=0)


def test_a_pool_without_sequences_is_saved(arch, tmp_path):
    path = tmp_path / "pool.safetensors"
    pool = pool_of("bfloat16")
    pool.free(pool.add())
    pool.save(path)
    loaded = tikv.PagedKVCacheStore.load(path)
    assert (repr(loaded), loaded.add()) == (repr(pool), 1)
    assert loaded.load_sequences(path) == []


def test_what_cannot_be_loaded_leaves_the_pool_as_it_was(arch, rng, tmp_path, monkeypatch):
    pool, made = several(rng, "float16")
    path = tmp_path / "some.safetensors"
    pool.save(path, [made["prompt"], made["swapped"]])
    into, _ = several(rng, "float16")
    before = bookkeeping(into)

    def refused(error, match, to=into):
        with pytest.raises(error, match=match):
            to.load_sequences(path)
        assert bookkeeping(into) == before

    def fail(*_):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "swap_blocks", fail)
        refused(RuntimeError, "the device is lost")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + b"abc")
    refused(tikv.CacheFileError, r"damaged: the bytes of layers\.\d\.\w+ are not those saved")
    path.write_bytes(whole)
    full = into.add()
    extend(rng, into, [full], [SIZE * (into.num_free_blocks - 2)])
    before = bookkeeping(into)
    refused(tikv.CapacityError, "load_sequences: 3 blocks are needed and 2 of 24 are free")
    match = "the pool of .* had head_dim_v=8, this one has 16. Use PagedKVCacheStore.load, or a pool of that form"
    refused(tikv.ShapeError, match, pool_of("float16", head_dim_v=16))
    refused(tikv.DTypeError, "had dtype=float16, this one has bfloat16", pool_of("bfloat16"))
    path.unlink()
    refused(tikv.CacheFileError, "there is no file")


def test_what_cannot_be_saved_leaves_no_file(arch, rng, tmp_path):
    pool, made = several(rng, "float16")
    path = tmp_path / "some.safetensors"
    with pytest.raises(tikv.PositionError, match=r"save: sequence 1 is named twice in seqs\. Name it once"):
        pool.save(path, [made["prompt"]] * 2)
    with pytest.raises(tikv.PositionError, match="save: sequence 99 was never added"):
        pool.save(path, [99])
    assert not list(tmp_path.iterdir())
    with pytest.raises(tikv.CacheFileError, match="save: there is no folder"):
        pool.save(tmp_path / "no" / "some.safetensors")


CONTRADICTIONS = {
    "a block beyond the file": lambda facts, tensors: facts["sequences"][0]["blocks"].__setitem__(0, 3),
    "a negative block": lambda facts, tensors: facts["sequences"][0]["blocks"].__setitem__(0, -1),
    "a block twice": lambda facts, tensors: facts["sequences"][0].update(blocks=[0, 0, 1]),
    "a number that is none": lambda facts, tensors: facts["sequences"][0].update(seq="0"),
    "one number twice": lambda facts, tensors: facts["sequences"].append(facts["sequences"][0]),
    "too many tokens": lambda facts, tensors: facts["sequences"][0].update(lengths=[13, 10]),
    "too few tokens": lambda facts, tensors: facts["sequences"][0].update(lengths=[8, 8]),
    "a length below zero": lambda facts, tensors: facts["sequences"][0].update(lengths=[10, -1]),
    "a layer too few": lambda facts, tensors: facts["sequences"][0].update(lengths=[10]),
    "no digest": lambda facts, tensors: facts["sequences"][0].update(digests=["zz"]),
    "no form": lambda facts, tensors: facts.pop("form"),
    "an unknown argument": lambda facts, tensors: facts["form"].update(colour="green"),
    "no layer": lambda facts, tensors: facts["form"].update(num_layers=0),
    "no sequences": lambda facts, tensors: facts.pop("sequences"),
    "a tensor missing": lambda facts, tensors: tensors.pop("layers.1.v"),
    "another width": lambda facts, tensors: tensors.update({"layers.1.v": tensors["layers.1.k"]}),
    "another dtype": lambda facts, tensors: tensors.update(
        {"layers.1.v": tensors["layers.1.v"].view(ml_dtypes.bfloat16)}
    ),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(arch, rng, tmp_path, what):
    """Whole, with right checksums, and yet not what `save` writes."""
    pool, made = several(rng, "float16")
    path = tmp_path / "some.safetensors"
    pool.save(path, [made["prompt"]])
    tensors, facts = files.read(path, "PagedKVCacheStore", "test")
    CONTRADICTIONS[what](facts, tensors)
    files.write(path, "PagedKVCacheStore", tensors, facts, "test")
    with pytest.raises(tikv.CacheFileError, match="does not describe"):
        tikv.PagedKVCacheStore.load(path)
    before = bookkeeping(pool)
    # A pool that is there has a form, and gives numbers of its own.
    if "number" not in what and what != "an unknown argument":
        with pytest.raises((tikv.CacheFileError, tikv.ShapeError)):
            pool.load_sequences(path)
    assert bookkeeping(pool) == before


@pytest.mark.parametrize("counts", [[[12, 7], [-1, 0]], [[12, 13], [12, 0]], [[12, 0], [12, 0]], [[12, 7], [99, 0]]])
def test_counts_that_cannot_be_are_refused(arch, rng, tmp_path, counts):
    path = tmp_path / "cache.safetensors"
    filled(rng, dtype="float16").save(path)
    tensors, facts = files.read(path, "KVCacheStore", "test")
    assert facts["counts"] == [[12, 7], [12, 0]]
    files.write(path, "KVCacheStore", tensors, facts | {"counts": counts}, "test")
    with pytest.raises(tikv.CacheFileError, match="does not describe a store"):
        tikv.KVCacheStore.load(path)


def test_one_kind_of_store_is_not_read_as_the_other(arch, rng, tmp_path):
    pool, store = several(rng, "float16")[0], filled(rng, dtype="float16")
    path = tmp_path / "cache.safetensors"
    pool.save(path)
    with pytest.raises(tikv.CacheFileError, match="holds PagedKVCacheStore, not a KVCacheStore"):
        tikv.KVCacheStore.load(path)
    store.save(path)
    for load in (tikv.PagedKVCacheStore.load, pool.load_sequences):
        with pytest.raises(tikv.CacheFileError, match="holds KVCacheStore, not a PagedKVCacheStore"):
            load(path)
