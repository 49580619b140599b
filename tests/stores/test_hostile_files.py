"""Files whose checksums are right and which lie: each is a `CacheFileError`, within a second and within memory."""

import contextlib
import json
import math
import os
import random
import socket
import threading
import time
import tracemalloc

import numpy as np
import oracle
import pytest

import tikv
from tikv.arrays import memory
from tikv.compat import mlx
from tikv.stores import files
from tikv.stores.files import tensor_file

SIZE, HEADS, WIDTH = 2, 1, 4
PROMPT = [5, 6, 7, 8, 9, 10, 11]
POOL = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 12, "block_size": SIZE}
SECONDS, BYTES = 1.0, 64e6  # what a refusal may take


@contextlib.contextmanager
def quick_and_small():
    """What is within takes less than a second of this process, and no memory to speak of."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        yield
    finally:
        seconds, (_, most) = time.process_time() - begin, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (seconds < SECONDS, most < BYTES) == (True, True), f"{seconds:.2f} s, {most} bytes"


def rows(mark, tokens, layers=2):
    """K or V of so many tokens, which name their layer and position."""
    found = np.arange(layers * tokens * HEADS * WIDTH, dtype=np.float16).reshape(layers, tokens, HEADS, WIDTH)
    return found + np.float16(mark)


def fill(pool, seq, mark, tokens):
    """Append rows behind what a sequence shares."""
    k = rows(mark, tokens)
    for layer in range(2):
        new = oracle.place(np.ascontiguousarray(k[layer, pool.layer_length(layer, seq) :]), pool.runtime.arch)
        pool.append(layer, new, new, [seq], [0, new.shape[0]])


def pool_with(mark, ids=PROMPT, salt=None, **form):
    pool = tikv.PagedKVCacheStore(**POOL | form)
    seq = pool.add(ids, salt)
    fill(pool, seq, mark, len(PROMPT))
    return pool, seq


def first_rows(pool, seq):
    return oracle.to_numpy(pool.tokens(0, seq)[0])[:SIZE]


def store_file(path):
    """A contiguous store, a layer of which is a ring; made without a device."""
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "head_dim_v": 2, "capacity": 24, "batch_size": 1}
    form |= {"dtype": "float16", "window": [5, None], "sinks": 1, "scale_dtype": "float16"}
    tensors = {
        f"layers.{i}.{name}": np.ones((1, 2, n, width), np.float16)
        for i, n in enumerate((5, 12))
        for name, width in (("k", 4), ("v", 2))
    }
    facts = {"form": form, "counts": [[12, 8], [12, 0]]}
    files.write(path, "KVCacheStore", tensors, facts, "test")
    return tensors, facts


def pool_file(path):
    """Two sequences of a pool with known tokens, one swapped out; made without a device."""
    form = {**POOL, "head_dim_v": WIDTH, "dtype": "float16", "scale_dtype": "float16", "layout": "NHD"}
    tensors = {f"layers.{i}.{name}": np.ones((6, SIZE, HEADS, WIDTH), np.float16) for i in range(2) for name in "kv"}
    tensors["token_ids"] = np.array([*PROMPT[:6], *PROMPT[:4]], np.int64)
    sequences = [
        {"seq": 0, "blocks": [0, 1, 2, 3], "lengths": [7, 7], "token_ids": 6, "salt": "", "swapped": False},
        {"seq": 3, "blocks": [4, 5], "lengths": [4, 3], "token_ids": 4, "salt": "7361", "swapped": True},
    ]
    facts = {"form": form, "next": 4, "sequences": sequences}
    files.write(path, "PagedKVCacheStore", tensors, facts, "test")
    return tensors, facts


def groups_pool_file(path):
    """Two sequences of a pool of groups along tokens, one swapped out; made without a device."""
    quant = {"bits": 8, "group": 32, "axis": "tokens", "residual": 32, "rotate": None, "seed": 0}
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "head_dim_v": 32, "num_blocks": 6, "block_size": 32}
    form |= {"dtype": quant, "scale_dtype": "float16", "layout": "NHD"}
    tensors = {
        "layers.0.k_codes": np.ones((4, 1, 1, 32, 8), np.uint32),
        "layers.0.k_numbers": np.ones((4, 1, 1, 32, 2), np.float16),
        "layers.0.v_codes": np.ones((4, 32, 1, 8), np.uint32),
        "layers.0.v_numbers": np.ones((4, 32, 1, 2), np.float16),
        **{f"new.0.{name}": np.ones((48, 1, 32), np.float16) for name in "kv"},
    }
    sequences = [
        {"seq": 0, "blocks": [0, 1, 2], "lengths": [70], "coded": [32], "token_ids": 0, "salt": "", "swapped": False},
        {"seq": 3, "blocks": [3], "lengths": [10], "coded": [0], "token_ids": 0, "salt": "", "swapped": True},
    ]
    facts = {"form": form, "next": 4, "sequences": sequences}
    files.write(path, "PagedKVCacheStore", tensors, facts, "test")
    return tensors, facts


def mlx_file(path):
    """A prompt cache with a layer that rotates, in the form since 0.32; made without a device."""
    from safetensors.numpy import save

    tensors = {f"{i}.{j}": np.ones((1, 2, 6, 4), np.float16) for i in range(2) for j in range(2)}
    numbers = {"0.2": 9, "0.3": 1, "0.4": 6, "0.5": 3, "1.2": 6}
    tensors |= {name: np.array(value, np.int32) for name, value in numbers.items()}
    metadata = {"0.model": "tiny", "1.0": "RotatingKVCache", "1.1": "KVCache", "2.0": ""}
    path.write_bytes(save(tensors, metadata))


KINDS = {
    "store": (store_file, tikv.KVCacheStore.load),
    "pool": (pool_file, tikv.PagedKVCacheStore.load),
    "pool of groups along tokens": (groups_pool_file, tikv.PagedKVCacheStore.load),
    "mlx": (mlx_file, mlx.load_prompt_cache),
}
LOADERS = [load for _, load in KINDS.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_that_are_made_to_lie_are_whole(arch, tmp_path, kind):
    make, load = KINDS[kind]
    make(tmp_path / "cache.safetensors")
    load(tmp_path / "cache.safetensors")


def places(value, way=()):
    """The way to everything in JSON."""
    yield way
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*way, key))


def changed(value, way, new):
    """A copy of JSON, with something else in one place."""
    if not way:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[way[0]] = changed(value[way[0]], way[1:], new)
    return copied


LIES = [10**9, 2**70, -1, math.inf, -math.inf, math.nan, True, 1.5, "3", [], [10**9] * 3, {}, [None] * 100]


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("kind", ["store", "pool", "pool of groups along tokens"])
def test_no_fact_is_believed(arch, tmp_path, kind, lie):
    """Each fact and each list of them is replaced, and the checksums are right."""
    path = tmp_path / "cache.safetensors"
    make, load = KINDS[kind]
    tensors, facts = make(path)
    named = files.read(path, load.__self__.__name__, "test")[1] == facts and load.__self__.__name__
    load(path)  # what is started once is no cost of a refusal
    for way in places(facts):
        if lie == 10**9 and way in (("next",), ("sequences", 0, "seq"), ("sequences", 1, "seq")):
            continue  # any number will do
        if lie is True and way[-1:] == ("swapped",):
            continue
        files.write(path, named, tensors, changed(facts, way, lie), "test")
        with quick_and_small(), pytest.raises(tikv.CacheFileError):
            pytest.fail(f"{way} was {lie}: {load(path)}")


@pytest.mark.parametrize("lie", ["1000000000", "-1", "inf", "nan", "9" * 5000, "", "0x10", "1.5"])
@pytest.mark.parametrize("name", ["0.0.0", "0.0.1", "0.0.2", "0.0.3"])
def test_no_number_of_a_prompt_cache_is_believed(arch, tmp_path, name, lie):
    """Of the older form, whose numbers are strings: keep, max_size, offset and idx."""
    from safetensors.numpy import save

    path = tmp_path / "cache.safetensors"
    facts = {"0.0.0": "1", "0.0.1": "6", "0.0.2": "9", "0.0.3": "3", "2.0": "RotatingKVCache"}
    tensors = {name: np.ones((1, 2, 6, 4), np.float16) for name in ("0.0", "0.1")}
    path.write_bytes(save(tensors, facts | {name: lie}))
    if (name, lie) == ("0.0.2", "1000000000"):  # so many tokens may have gone through a ring
        assert mlx.load_prompt_cache(path).length == 10**9
        return
    with quick_and_small(), pytest.raises(tikv.CacheFileError, match=r"damaged: in layer 0, (keep=|number)"):
        pytest.fail(str(mlx.load_prompt_cache(path)))


MLX_LIES = {
    "a count beyond the keys": {"1.2": np.array(10**9, np.int32)},
    "no length": {"0.2": np.array(np.inf, np.float32)},
    "a length that is a list": {"1.2": np.array([6, 6], np.int32)},
    "a window of 10^9": {"0.4": np.array(10**9, np.int32)},
    "no heads": {"0.0": np.ones((1, 0, 6, 4), np.float16), "0.1": np.ones((1, 0, 6, 4), np.float16)},
    "layers of other heads": {"1.0": np.ones((1, 3, 6, 4), np.float16), "1.1": np.ones((1, 3, 6, 4), np.float16)},
    "an innocent dtype": {f"{i}.{j}": np.ones((1, 2, 6, 4), np.int32) for i in range(2) for j in range(2)},
    "two dtypes": {"0.1": np.ones((1, 2, 6, 4), np.float32)},
    "values of fewer tokens": {"1.1": np.ones((1, 2, 5, 4), np.float16)},
}


@pytest.mark.parametrize("what", MLX_LIES)
def test_no_array_of_a_prompt_cache_is_believed(arch, tmp_path, what):
    from safetensors.numpy import load_file, save

    path = tmp_path / "cache.safetensors"
    mlx_file(path)
    with tensor_file.opened(path, "test") as file:
        metadata = file.metadata
    path.write_bytes(save(load_file(path) | MLX_LIES[what], metadata))
    with quick_and_small(), pytest.raises(tikv.CacheFileError, match=r"mlx\.load_prompt_cache: "):
        pytest.fail(str(mlx.load_prompt_cache(path)))


def test_a_capacity_that_is_too_small_is_the_callers_error(arch, tmp_path):
    mlx_file(tmp_path / "cache.safetensors")
    with pytest.raises(tikv.CapacityError, match=r"capacity=5, but .* needs 6\. Use at least that") as caught:
        mlx.load_prompt_cache(tmp_path / "cache.safetensors", capacity=5)
    assert not isinstance(caught.value, tikv.CacheFileError)


# --- below the facts


def crafted(header, data=bytes(32)):
    """A file of this description, as text or as what JSON is made of."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype="F32", shape=(8,), span=(0, 32)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


HEADERS = {
    "a shape beyond the file": {"a": tensor(shape=[10**9])},
    "a shape of no bytes": {"a": tensor(shape=[2**40, 2**40, 0])},
    "a shape below zero": {"a": tensor(shape=[-2, -4])},
    "a shape that is true": {"a": tensor(shape=[True, 8])},
    "a shape of halves": {"a": tensor(shape=[8.0])},
    "too many axes": {"a": tensor(shape=[1] * 10**5 + [8])},
    "places beyond the file": {"a": tensor(shape=[16], span=[0, 64])},
    "places of 10^18": {"a": tensor(shape=[2], span=[10**18, 10**18 + 8])},
    "places below zero": {"a": tensor(span=[-32, 0])},
    "the end before the start": {"a": tensor(span=[32, 0])},
    "three places": {"a": tensor(span=[0, 16, 32])},
    "a gap": {"a": tensor(shape=[2], span=[0, 8]), "b": tensor(shape=[2], span=[24, 32])},
    "one piece for a thousand tensors": {f"{i}": tensor() for i in range(1000)},
    "no dtype": {"a": {"shape": [8], "data_offsets": [0, 32]}},
    "a dtype that is a list": {"a": tensor(dtype=[])},
    "a tensor that is a number": {"a": 1},
    "metadata that are a list": {"__metadata__": [], "a": tensor()},
    "metadata that are numbers": {"__metadata__": {"tikv": 1}, "a": tensor()},
    "a list": [],
    "null": None,
    "infinity": '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 32]}}',
    "1e999": '{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 32]}}',
    "a number of 100000 digits": '{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 32]}}' % ("9" * 100000),
    "JSON that goes down for ever": "[" * 400_000,
    "objects that go down for ever": '{"a":' * 90_000,
    "eight million brackets": "[" * (2**23 - 1),
    "a million lists": "[" + "[]," * 10**6 + "0]",
    "a million names": json.dumps(dict.fromkeys(map(str, range(600_000)), 1)),
    "a million numbers": "[" + "1.5," * 10**6 + "0]",
    "a megabyte too many": json.dumps({"__metadata__": {"a": " " * 2**23}}),
    "no end": '{"a": {"dtype": "F32"',
    "half a character": '{"a\\ud800": 1}',
}


@pytest.mark.parametrize("what", HEADERS)
def test_no_description_is_believed(arch, tmp_path, what):
    path = tmp_path / "cache.safetensors"
    data = crafted(HEADERS[what])
    path.write_bytes(data)

    def look(path):
        with tensor_file.opened(path, "test") as file:
            return file.entries

    for load in (look, *LOADERS):
        with quick_and_small(), pytest.raises(tikv.CacheFileError, match=r"cannot read .* as safetensors") as caught:
            pytest.fail(str(load(path)))
        assert len(str(caught.value)) < 1000 + len(str(path))


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", '{"a": Infinity}', "[" * 10**5, "1" * 10**4, "[1,]"], ids=len)
def test_json_is_strict(text):
    with pytest.raises(ValueError, match=r"."):
        tensor_file.parsed(text)


@pytest.mark.parametrize("name", ["facts", "crc32"])
@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "[]," * 10**6 + "0]", "NaN", "[]", "{}", "1", '"', ""], ids=len)
def test_no_text_within_is_believed(arch, tmp_path, name, text):
    path = tmp_path / "cache.safetensors"
    metadata = {"tikv": "KVCacheStore", "version": "1", "facts": "{}", "crc32": "{}"} | {name: text}
    path.write_bytes(crafted({"__metadata__": metadata}, b""))
    with quick_and_small(), pytest.raises(tikv.CacheFileError, match=r"damaged|cannot read"):
        pytest.fail(str(tikv.KVCacheStore.load(path)))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "C64", "I128", "x" * 5000, ""])
def test_unknown_dtypes_are_refused_in_innocent_files_too(arch, tmp_path, dtype):
    path = tmp_path / "cache.safetensors"
    into = tikv.PagedKVCacheStore(**POOL)
    for metadata in ({}, {"tikv": "KVCacheStore", "version": "1"}, {"0.0": "", "2.0": "KVCache"}):
        entries = {"0.0": tensor(dtype, [1, 1, 4, 4], [0, 16]), "0.1": tensor(dtype, [1, 1, 4, 4], [16, 32])}
        path.write_bytes(crafted({"__metadata__": metadata, **entries}))
        for load in (*LOADERS, into.load_sequences):
            with quick_and_small(), pytest.raises(tikv.CacheFileError):
                pytest.fail(str(load(path)))
    form = store_file(path)[1]["form"]
    facts = json.dumps(
        {"form": form | {"num_layers": 1, "window": None, "sinks": 0, "dtype": dtype}, "counts": [[4, 0]]}
    )
    checksums = {"": files._checksum_of_text(facts), "layers.0.k": 0, "layers.0.v": 0}
    metadata = {"tikv": "KVCacheStore", "version": "1", "facts": facts, "crc32": json.dumps(checksums)}
    entries = {f"layers.0.{name}": entry for name, entry in zip("kv", entries.values(), strict=True)}
    path.write_bytes(crafted({"__metadata__": metadata, **entries}))
    with pytest.raises(tikv.CacheFileError, match=r"does not describe a store: dtype .* is not stored; float32"):
        pytest.fail(str(tikv.KVCacheStore.load(path)))


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_what_is_no_file_is_refused_at_once(arch, tmp_path, kind):
    path = tmp_path / "cache.safetensors"
    held = None
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        held = socket.socket(socket.AF_UNIX)
        here = os.getcwd()
        os.chdir(tmp_path)  # the name of a socket is short
        held.bind(path.name)
        os.chdir(here)
    else:
        path.symlink_to("/dev/zero")
    found = []

    def load_all():
        for load in LOADERS:
            try:
                found.append(load(path))
            except Exception as error:
                found.append(error)

    waiting = threading.Thread(target=load_all, daemon=True)
    waiting.start()
    waiting.join(3 * SECONDS)
    if kind == "pipe" and waiting.is_alive():
        os.close(os.open(path, os.O_RDWR))  # let it go
    if held is not None:
        held.close()
    assert [type(each) for each in found] == [tikv.CacheFileError] * len(LOADERS), found


def test_a_store_larger_than_the_machine_is_refused_before_memory_is_taken(arch, tmp_path, monkeypatch):
    """It may be right on another machine, so it is a CapacityError as well."""
    path = tmp_path / "cache.safetensors"
    for kind, (make, load) in KINDS.items():
        make(path)
        with monkeypatch.context() as patch:
            patch.setattr(files.runtime, "memory_bytes", lambda *_: 600)
            for error in (tikv.CacheFileError, tikv.CapacityError):
                with pytest.raises(error, match=r"describes a store of \d+ bytes, and \w+ has 600 in all"):
                    pytest.fail(f"{kind}: {load(path)}")
        with monkeypatch.context() as patch:
            patch.setattr(memory.Memory, "__init__", raising(MemoryError))
            with pytest.raises(tikv.CacheFileError, match="there is no memory for the store that"):
                pytest.fail(f"{kind}: {load(path)}")


def raising(error):
    def refuse(*_):
        raise error

    return refuse


def test_the_blocks_of_a_pool_are_not_made_because_a_file_says_so(arch, tmp_path):
    path = tmp_path / "cache.safetensors"
    tensors, facts = pool_file(path)
    files.write(path, "PagedKVCacheStore", tensors, changed(facts, ("form", "num_blocks"), 2**23), "test")
    with pytest.raises(tikv.CacheFileError, match=r"a pool of 8388608 blocks\. .* Give num_blocks"):
        tikv.PagedKVCacheStore.load(path)
    assert tikv.PagedKVCacheStore.load(path, num_blocks=6).num_free_blocks == 2
    files.write(path, "PagedKVCacheStore", tensors, changed(facts, ("form", "num_blocks"), 3), "test")
    with pytest.raises(tikv.CacheFileError, match="in a pool of 3"):
        tikv.PagedKVCacheStore.load(path)


def test_a_block_that_is_swapped_out_has_one_owner(arch, tmp_path):
    """A thousand sequences of one block would each get a copy of it."""
    path = tmp_path / "cache.safetensors"
    tensors, facts = pool_file(path)
    twin = facts["sequences"][1] | {"seq": 8, "token_ids": 0}
    for others in ([twin], [twin | {"swapped": False}]):
        files.write(path, "PagedKVCacheStore", tensors, facts | {"sequences": facts["sequences"] + others}, "test")
        with pytest.raises(tikv.CacheFileError, match="shares a block with a sequence that is swapped out"):
            tikv.PagedKVCacheStore.load(path)


def test_what_could_not_be_read_again_is_not_saved(tmp_path):
    path = tmp_path / "cache.safetensors"
    with pytest.raises(tikv.CacheFileError, match=r"description of what is saved takes .* Save fewer sequences"):
        files.write(path, "PagedKVCacheStore", {}, {"sequences": [[]] * tensor_file.HEADER_PARTS}, "test")
    assert not path.exists()


JUNK = [*LIES, None, 0, 1, 2, 7, "", "k", "float16", "\u202e", [[]], [0, 32], -(2**63), 10**400, {"a": 1}]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_at_random_is_refused_or_harmless(arch, tmp_path, kind):
    """Of the description and of the facts in it, whose checksum is made right again."""
    chance = random.Random(f"damage to a {kind}")
    path = tmp_path / "cache.safetensors"
    make, load = KINDS[kind]
    make(path)
    whole = path.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:first])
    facts = json.loads(header["__metadata__"].get("facts", "null"))
    loaded, others, longest, begin = 0, 0, 0, time.perf_counter()
    for _ in range(150):
        new = json.loads(json.dumps(header))
        if facts is not None and chance.random() < 0.7:
            wrong = facts
            for _ in range(chance.randint(1, 2)):
                wrong = changed(wrong, chance.choice(list(places(wrong))), chance.choice(JUNK))
            text = json.dumps(wrong)
            checksums = json.loads(new["__metadata__"]["crc32"]) | {"": files._checksum_of_text(text)}
            new["__metadata__"] |= {"facts": text, "crc32": json.dumps(checksums)}
        else:
            new = changed(new, chance.choice(list(places(new))), chance.choice(JUNK))
        text = json.dumps(new).encode()
        if chance.random() < 0.3:
            at = chance.randrange(len(text))
            text = text[:at] + bytes(chance.randrange(256) for _ in range(chance.randint(0, 3))) + text[at + 1 :]
        data = len(text).to_bytes(8, "little") + text + whole[first:]
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.1 else data)
        try:
            load(path)
            loaded += 1
        except tikv.CacheFileError as error:
            longest = max(longest, len(str(error)))
        except tikv.OptionError:
            others += 1
    assert (longest < 1000, loaded < 50) == (True, True)
    assert others == 0 or kind == "mlx", "a layer of another kind, by its name"
    assert time.perf_counter() - begin < 30


# --- prefixes


def test_a_file_gives_its_rows_to_the_tokens_that_it_carries(arch, tmp_path):
    """Digests in it are not looked at, be they of a prompt that everybody knows."""
    path = tmp_path / "pool.safetensors"
    pool, seq = pool_with(1)
    pool.save(path, [seq])
    tensors, facts = files.read(path, "PagedKVCacheStore", "test")
    assert tensors["token_ids"].tolist() == PROMPT[:6]
    others = [n + 100 for n in PROMPT]
    wanted = [digest.hex() for digest in pool._pages.sequences.known(others, b"")[1]]
    facts["sequences"][0]["digests"] = wanted
    files.write(path, "PagedKVCacheStore", tensors, facts, "test")
    for loaded in (tikv.PagedKVCacheStore.load(path), into_empty(path)):
        assert [loaded.length(loaded.add(ids)) for ids in (others, PROMPT)] == [0, 6]
    del tensors["token_ids"], facts["sequences"][0]["token_ids"], facts["sequences"][0]["salt"]  # as files once were
    files.write(path, "PagedKVCacheStore", tensors, facts, "test")
    for loaded in (tikv.PagedKVCacheStore.load(path), into_empty(path)):
        assert loaded.length(loaded.sequences[0]) == 7
        assert [loaded.length(loaded.add(ids)) for ids in (others, PROMPT)] == [0, 0]


def into_empty(path, **options):
    pool = tikv.PagedKVCacheStore(**POOL)
    pool.load_sequences(path, **options)
    return pool


@pytest.mark.parametrize("state", ["held", "free", "made room"])
def test_a_file_takes_nobodys_place(arch, tmp_path, state):
    """A prefix that the pool has goes on to be its own: while it is held, when it is free, and after it made room."""
    path = tmp_path / "pool.safetensors"
    theirs, seq = pool_with(500)
    theirs.save(path, [seq])
    pool, own = pool_with(1, num_blocks=12 if state != "made room" else 5)
    mine = first_rows(pool, own).copy()
    if state != "held":
        pool.free(own)
    (loaded,) = pool.load_sequences(path)
    assert not np.array_equal(first_rows(pool, loaded), mine)
    if state == "made room":
        assert pool.length(pool.add(PROMPT)) < 6
        found = [
            block for block in pool.block_table(loaded).tolist() if block in pool._pages.sequences.blocks._digest_of
        ]
        assert found == []
        return
    again = pool.add(PROMPT)
    assert pool.length(again) == 6
    oracle.assert_same_bits(first_rows(pool, again), mine)
    assert set(pool.block_table(again).tolist()).isdisjoint(pool.block_table(loaded).tolist())
    fork = pool.fork(loaded)
    pool.swap_out(fork)
    pool.swap_in(fork)
    for each in pool.sequences:
        if each not in (loaded, fork):
            pool.free(each)
    oracle.assert_same_bits(first_rows(pool, pool.add(PROMPT)), mine)


def test_what_a_file_is_continued_with_takes_nobodys_place_either(arch, tmp_path):
    """Its sequence knows tokens that it had no rows of, and gets them after the pool has its own."""
    path = tmp_path / "pool.safetensors"
    theirs = tikv.PagedKVCacheStore(**POOL)
    seq = theirs.add(PROMPT)
    fill(theirs, seq, 500, SIZE)
    theirs.save(path)
    pool = tikv.PagedKVCacheStore(**POOL)
    (loaded,) = pool.load_sequences(path)
    own = pool.add(PROMPT)
    fill(pool, own, 1, 7)
    mine = pool.block_table(own)[:3].tolist()
    pool.free(own)
    fill(pool, loaded, 500, 7)
    assert pool.block_table(loaded)[0] == mine[0]
    assert pool.block_table(pool.add(PROMPT)).tolist() == mine


def test_prefixes_of_a_file_are_not_shared_where_that_is_said(arch, tmp_path):
    path = tmp_path / "pool.safetensors"
    theirs, _ = pool_with(500)
    swapped = theirs.add(PROMPT)
    fill(theirs, swapped, 500, 7)
    theirs.swap_out(swapped)
    theirs.save(path)
    for pool in (tikv.PagedKVCacheStore.load(path, share_prefixes=False), into_empty(path, share_prefixes=False)):
        assert [pool.length(s) for s in pool.sequences] == [7, 7]
        assert pool.length(pool.add(PROMPT)) == 0
        own = pool.add(PROMPT)
        fill(pool, own, 1, 7)
        pool.swap_in(swapped)
        assert set(pool.block_table(own).tolist()).isdisjoint(pool.block_table(swapped).tolist())
        assert pool.length(pool.add(PROMPT)) == 6
        assert pool.length(pool.fork(swapped)) == 7
    again = into_empty(path)
    assert again.length(again.add(PROMPT)) == 6


SALTS = ["a", b"a", 97, "", b"", 0, "97", -1, 255, 2**70, np.int64(5), "\ud800", "\0a", b"sa"]


def test_sequences_of_different_salts_never_share(arch, tmp_path):
    path = tmp_path / "pool.safetensors"
    pool = tikv.PagedKVCacheStore(**POOL | {"num_blocks": 8 * (len(SALTS) + 1)})
    for mark, salt in enumerate([None, *SALTS]):
        seq = pool.add(PROMPT, salt=salt)
        assert pool.length(seq) == 0, f"{salt!r} found another's blocks"
        fill(pool, seq, mark, 7)
    pool.swap_out(3)
    pool.swap_in(3)
    pool.fork(4)
    pool.save(path)
    for each in (pool, tikv.PagedKVCacheStore.load(path)):
        for mark, salt in enumerate([None, *SALTS]):
            seq = each.add(PROMPT, salt)
            assert each.length(seq) == 6
            oracle.assert_same_bits(first_rows(each, seq), rows(mark, SIZE)[0])
            each.free(seq)
        assert each.length(each.add(PROMPT, "nobody's")) == 0


def test_a_strangers_file_stays_under_its_salt(arch, tmp_path):
    path = tmp_path / "pool.safetensors"
    theirs, _ = pool_with(500, salt="the victim's")
    theirs.save(path)
    pool = into_empty(path, salt="the stranger's")
    found = [pool.length(pool.add(PROMPT, salt)) for salt in (None, "the victim's", "the stranger's")]
    assert found == [0, 0, 6]
    own = pool.add(PROMPT, "the victim's")
    fill(pool, own, 1, 7)
    oracle.assert_same_bits(first_rows(pool, pool.add(PROMPT, "the victim's")), rows(1, SIZE)[0])
    pool.save(path)
    again = tikv.PagedKVCacheStore.load(path)
    assert [again.length(again.add(PROMPT, salt)) for salt in (None, "the victim's", "the stranger's")] == [0, 6, 6]


@pytest.mark.parametrize(
    ("salt", "error"), [(1.5, "DTypeError"), (True, "DTypeError"), ([1], "DTypeError"), (b"a" * 2000, "CapacityError")]
)
def test_what_is_no_salt_is_refused(arch, tmp_path, salt, error):
    pool, seq = pool_with(1)
    pool.save(tmp_path / "pool.safetensors")
    for call in (lambda: pool.add(PROMPT, salt), lambda: pool.load_sequences(tmp_path / "pool.safetensors", salt=salt)):
        with pytest.raises(getattr(tikv, error), match="salt"):
            call()
    assert pool.sequences == [seq]


def test_what_truncate_and_fork_keep_of_known_tokens_is_saved(arch, tmp_path):
    path = tmp_path / "pool.safetensors"
    pool, seq = pool_with(1, salt="a")
    ahead = pool.add([*PROMPT, 1, 2], "a")  # whose tokens are known before they are there
    fork = pool.fork(seq)
    pool.truncate(seq, 5)
    for chosen, known in ((seq, 4), (fork, 6), (ahead, 8)):
        pool.save(path, [chosen])
        tensors, facts = files.read(path, "PagedKVCacheStore", "test")
        assert tensors["token_ids"].tolist() == [*PROMPT, 1, 2][:known]
        assert facts["sequences"][0]["token_ids"] == known
    loaded = tikv.PagedKVCacheStore.load(path)
    fill_rest = rows(1, 9)
    for layer in range(2):
        new = oracle.place(np.ascontiguousarray(fill_rest[layer, 6:]), arch)
        loaded.append(layer, new, new, [ahead], [0, 3])
    assert loaded.length(loaded.add([*PROMPT, 1, 2], "a")) == 8
