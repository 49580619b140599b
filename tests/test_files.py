"""Saved caches: every bit comes back, and whatever is not one of ours, or not whole, is refused."""

import json
import os

import numpy as np
import oracle
import pytest

import tikv
from tikv import files


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


def test_damage_is_refused(arch, rng, tmp_path):
    path = tmp_path / "cache.safetensors"
    filled(rng, dtype="float16").save(path)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = {
        "empty": b"",
        "truncated in the header": whole[:20],
        "truncated in the data": whole[:-1],
        "one bit of the data": whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:],
        "longer": whole + b"\0",
        "not safetensors": b"PK\x03\x04" + bytes(100),
        "no header": bytes(header) + whole[header:],
    }
    for what, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(tikv.CacheFileError):
            pytest.fail(f"{what} was loaded: {tikv.KVCacheStore.load(path)}")


def test_foreign_files_are_refused(arch, rng, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    with pytest.raises(tikv.CacheFileError, match="cannot read"):
        tikv.KVCacheStore.load(path)
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
