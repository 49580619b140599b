"""mlx-lm's prompt-cache files, both ways."""

import ml_dtypes
import numpy as np
import oracle
import pytest

import tikv
from tikv.compat import mlx

BF16 = np.dtype(ml_dtypes.bfloat16)


class MlxRotating:
    """mlx-lm's RotatingKVCache, one token at a time, from its description: keep, max_size, offset, idx."""

    def __init__(self, keep, max_size):
        self.keep, self.max_size, self.offset, self.idx, self.rows = keep, max_size, 0, 0, []

    def append(self, row):
        if self.idx == self.max_size:
            self.idx = self.keep
        if self.idx == len(self.rows):
            self.rows.append(row)
        else:
            self.rows[self.idx] = row
        self.idx += 1
        self.offset += 1


@pytest.mark.parametrize("tokens", [3, 6, 7, 15])
def test_mlx_files_both_ways(arch, rng, tmp_path, tokens):
    from safetensors import safe_open
    from safetensors.numpy import save_file

    keep, window, heads, width = 2, 6, 2, 4
    k, v = (oracle.numbers(rng, (2, tokens, heads, width), np.float16) for _ in "kv")
    rotating = [MlxRotating(keep, window) for _ in "kv"]
    for t in range(tokens):
        for cache, rows in zip(rotating, (k, v), strict=True):
            cache.append(rows[0, t])
    stacked = [np.stack(cache.rows).swapaxes(0, 1)[None] for cache in rotating]
    tensors = {"0.0": stacked[0], "0.1": stacked[1]}
    tensors |= {"1.0": k[1].swapaxes(0, 1)[None], "1.1": v[1].swapaxes(0, 1)[None]}
    state = (keep, window, rotating[0].offset, rotating[0].idx)
    facts = {f"0.0.{j}": str(x) for j, x in enumerate(state)} | {"0.1": "", "1.model": "tiny"}
    facts |= {"2.0": "RotatingKVCache", "2.1": "KVCache"}
    theirs = tmp_path / "theirs.safetensors"
    save_file({name: np.ascontiguousarray(a) for name, a in tensors.items()}, theirs, facts)
    store, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    form = {"num_layers": 2, "num_kv_heads": heads, "head_dim": width, "capacity": store.capacity, "dtype": "float16"}
    own = tikv.KVCacheStore(**form, window=[window, None], sinks=keep)
    for layer in range(2):
        own.append(layer, k[layer], v[layer])
        for a, b in zip(store.tokens(layer), own.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)
    extra = [oracle.numbers(rng, (2, heads, width), np.float16) for _ in "kv"]
    for s in (store, own):
        s.append(0, *extra)
    for a, b in zip(store.tokens(0), own.tokens(0), strict=True):
        oracle.assert_same_bits(a, b)
    again = mlx.load_prompt_cache(theirs)
    ours = tmp_path / "ours.safetensors"
    mlx.save_prompt_cache(ours, again, {"model": "tiny"}, since="0.6")
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        for name, a in tensors.items():
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(a), what=name)

    # The form since 0.32: numbers are arrays, and arrays may have room for more tokens.
    numbers = {"0.2": state[2], "0.3": keep, "0.4": window, "0.5": state[3], "1.2": tokens}
    facts = {"0.model": "tiny", "1.0": "RotatingKVCache", "1.1": "KVCache", "2.0": ""}
    for n, name in enumerate(numbers, 1):
        facts |= {f"2.{n}.0": name, f"2.{n}.1": "scalar"}
    mlx.save_prompt_cache(ours, again, {"model": "tiny"})
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        assert {name: int(file.get_tensor(name)) for name in numbers} == numbers
        for name, a in tensors.items():
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(a), what=name)
    roomy = {name: np.concatenate([a, np.full_like(a[:, :, :1], np.nan)], 2) for name, a in tensors.items()}
    if tokens >= window:  # what rotates has no room
        roomy |= {"0.0": tensors["0.0"], "0.1": tensors["0.1"]}
    arrays = {name: np.ascontiguousarray(a) for name, a in roomy.items()}
    save_file(arrays | {name: np.array(value, np.int32) for name, value in numbers.items()}, theirs, facts)
    newer, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    for layer in range(2):
        for a, b in zip(newer.tokens(layer), again.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)


def through_files_of_mlx_lm(cache, theirs, store, folder):
    """Save mlx-lm's caches and the store that equals them, and load each by the other; what mlx-lm then has."""
    cache.save_prompt_cache(str(folder / "theirs.safetensors"), theirs, {"model": "tiny"})
    loaded, metadata = mlx.load_prompt_cache(folder / "theirs.safetensors", return_metadata=True)
    assert metadata == {"model": "tiny"}
    for layer in range(store.num_layers):
        for a, b in zip(loaded.tokens(layer), store.tokens(layer), strict=True):
            oracle.assert_same_bits(a, b)
    mlx.save_prompt_cache(folder / "ours.safetensors", store, {"model": "tiny"})
    again, metadata = cache.load_prompt_cache(str(folder / "ours.safetensors"), return_metadata=True)
    assert metadata == {"model": "tiny"}
    return again


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("steps", [(3,), (8,), (9, 1, 1), (4, *[1] * 30)])
def test_mlx_lm_itself_reads_and_writes(arch, rng, tmp_path, steps):
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    import mlx.core as mx

    theirs = [cache.RotatingKVCache(max_size=8, keep=2), cache.KVCache()]
    store = tikv.KVCacheStore(
        num_layers=2, num_kv_heads=2, head_dim=4, capacity=64, dtype="float16", window=[8, None], sinks=2
    )
    for n in steps:
        k, v = (oracle.numbers(rng, (n, 2, 4), np.float16) for _ in "kv")
        for layer, own in enumerate(theirs):
            own.update_and_fetch(*(mx.array(a.swapaxes(0, 1)[None]) for a in (k, v)))
            store.append(layer, k, v)
    again = through_files_of_mlx_lm(cache, theirs, store, tmp_path)
    assert [each.offset for each in again] == [sum(steps)] * 2
    row = mx.array(oracle.numbers(rng, (1, 2, 1, 4), np.float16))
    for one, other in zip(again, theirs, strict=True):  # and both go on alike, whatever the order of their rows
        for a, b in zip(one.update_and_fetch(row, row), other.update_and_fetch(row, row), strict=True):
            assert sorted(np.array(a)[0, 0].tolist()) == sorted(np.array(b)[0, 0].tolist())


def mlx_parts(cache):
    """Words, scales and biases of a `Quantized`, by the names that mlx-lm's files end with."""
    return {str(n): oracle.to_numpy(part) for n, part in enumerate(cache[:3])}


@pytest.mark.archs("cpu")
@pytest.mark.parametrize("since", mlx.SINCE)
def test_mlx_files_of_quantised_caches_both_ways(arch, rng, tmp_path, since):
    """Keys of 128 columns and values of 64; arrays with room for more; scales of bfloat16 become float32."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    heads, tokens, widths, quant = 2, 5, (128, 64), tikv.Quant(bits=4, group=64)
    form = {"num_layers": 2, "num_kv_heads": heads, "head_dim": 128, "head_dim_v": 64, "dtype": quant}
    store = tikv.KVCacheStore(**form, capacity=16, scale_dtype="float32")
    rows = [[rng.standard_normal((tokens, heads, w)).astype(np.float32) for w in widths] for _ in range(2)]
    for layer, (k, v) in enumerate(rows):
        store.append(layer, k, v)
    ours = tmp_path / "ours.safetensors"
    mlx.save_prompt_cache(ours, store, {"model": "tiny"}, since=since)
    with safe_open(ours, "np") as file:
        facts, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = {f"{i}.{j}" for i in range(2) for j in (2, 3, 4)} if since == "0.32" else set()
    assert set(found) == names | {f"{i}.{j}.{n}" for i in range(2) for j in range(2) for n in range(3)}
    for i, layer in enumerate(rows):
        for j, a in enumerate(layer):
            for n, want in mlx_parts(tikv.quantize(np.ascontiguousarray(a.swapaxes(0, 1)[None]), quant)).items():
                oracle.assert_same_bits(found[f"{i}.{j}.{n}"], want)
    state = {"0.2": 5, "0.3": 64, "0.4": 4} if since == "0.32" else {"0.0.0": "5", "0.0.1": "64", "0.0.2": "4"}
    assert {name: int(found[name]) if since == "0.32" else facts[name] for name in state} == state

    theirs = tmp_path / "theirs.safetensors"
    parts = {name: a for name, a in found.items() if name.count(".") == 2}
    if since == "0.32":
        parts = {name: np.concatenate([a, a[:, :, :2]], axis=2) for name, a in parts.items()}
    parts = {name: a.astype(BF16) if name[-1] != "0" else a for name, a in parts.items()}
    save_file({**found, **{name: np.ascontiguousarray(a) for name, a in parts.items()}}, theirs, facts)
    loaded, metadata = mlx.load_prompt_cache(theirs, return_metadata=True)
    assert metadata == {"model": "tiny"}
    assert (loaded.dtype.name, loaded.scale_dtype.name, loaded.length) == ("quant4_64", "float32", tokens)
    mlx.save_prompt_cache(ours, loaded, {"model": "tiny"}, since=since)
    with safe_open(ours, "np") as file:
        assert file.metadata() == facts
        for name, a in parts.items():
            want = a[:, :, :tokens] if name[-1] == "0" else a[:, :, :tokens].astype(np.float32)
            oracle.assert_same_bits(file.get_tensor(name), np.ascontiguousarray(want), what=name)
    loaded.append(0, *rows[1])
    assert loaded.held(0) == 2 * tokens


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 64, np.float16), (8, 32, np.float32)])
def test_mlx_lm_itself_reads_and_writes_quantised_caches(arch, rng, tmp_path, bits, group, dtype):
    """It has the bits that the store has, from rows of its own dtype, and both go on alike."""
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    import mlx.core as mx

    theirs = [cache.QuantizedKVCache(group_size=group, bits=bits) for _ in range(2)]
    form = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "capacity": 64}
    scales = np.dtype(dtype).name
    store = tikv.KVCacheStore(**form, dtype=tikv.Quant(bits=bits, group=group), scale_dtype=scales)
    for n in (4, 1):
        k, v = (rng.standard_normal((n, 2, 64)).astype(dtype) for _ in "kv")
        for layer, own in enumerate(theirs):
            own.update_and_fetch(*(mx.array(a.swapaxes(0, 1)[None]) for a in (k, v)))
            store.append(layer, k, v)
    again = through_files_of_mlx_lm(cache, theirs, store, tmp_path)
    assert [(each.offset, each.group_size, each.bits) for each in again] == [(5, group, bits)] * 2
    row = mx.array(rng.standard_normal((1, 2, 1, 64)).astype(dtype))
    for one, other in zip(again, theirs, strict=True):
        for mine, his in zip(one.update_and_fetch(row, row), other.update_and_fetch(row, row), strict=True):
            for a, b in zip(mine, his, strict=True):
                oracle.assert_same_bits(np.array(a), np.array(b))


@pytest.mark.archs("cpu")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"0.2": np.array(9, np.int32)}, tikv.CacheFileError, "there should be 9 tokens"),
        ({"0.4": np.array(5, np.int32)}, tikv.OptionError, "layer 0 has 5 bits in groups of 32"),
        ({"0.3": np.array(48, np.int32)}, tikv.OptionError, "groups of 48"),
        ({"0.3": np.array(64, np.int32)}, tikv.CacheFileError, "the scales of keys are .* does not fit"),
        ({"0.4": np.array(8, np.int32)}, tikv.CacheFileError, "the scales of keys are .* does not fit"),
        ({"0.0.0": np.ones((1, 1, 2, 8), np.float32)}, tikv.CacheFileError, "words of keys"),
        ({"0.1.2": np.ones((1, 1, 2, 2), np.float16)}, tikv.CacheFileError, "the biases of values are F16, but"),
        ({"0.1.2": np.ones((1, 1, 3, 2), np.float32)}, tikv.CacheFileError, "the biases of values are .* does not fit"),
        ({"0.1.0": np.ones((1, 1, 2), np.uint32)}, tikv.CacheFileError, "the words of values are .* does not fit"),
        ({"0.1.1": None}, tikv.CacheFileError, r"0\.1\.1"),
    ],
)
def test_mlx_files_of_quantised_caches_that_cannot_be(arch, tmp_path, change, error, match):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=64, capacity=8, dtype=tikv.Quant(4, 32))
    facts = {"1.0": "QuantizedKVCache", "2.0": ""}
    tensors = {"0.2": np.array(2, np.int32), "0.3": np.array(32, np.int32), "0.4": np.array(4, np.int32)}
    for j in range(2):
        tensors[f"0.{j}.0"] = np.ones((1, 1, 2, 8), np.uint32)
        tensors |= {f"0.{j}.{n}": np.ones((1, 1, 2, 2), np.float32) for n in (1, 2)}
    save_file(tensors, path, facts)
    assert mlx.load_prompt_cache(path).length == 2
    wrong = {name: a for name, a in (tensors | change).items() if a is not None}
    save_file(wrong, path, facts)
    with pytest.raises(error, match=match):
        mlx.load_prompt_cache(path)
    save_file(tensors, path, facts | {"1.1": "KVCache"})
    with pytest.raises(tikv.OptionError, match="some layers are quantised and others are not"):
        mlx.load_prompt_cache(path)
    ring = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=64, capacity=8, dtype=store.dtype, window=4)
    with pytest.raises(tikv.OptionError, match="a window over quant4_32"):
        mlx.save_prompt_cache(path, ring)
    form = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "capacity": 8}
    with pytest.raises(tikv.OptionError, match="dtype='q8_0' is not supported"):
        mlx.save_prompt_cache(path, tikv.KVCacheStore(**form, dtype="q8_0"))
    with pytest.raises(tikv.OptionError, match="v_dtype='float16' differ"):
        mlx.save_prompt_cache(path, tikv.KVCacheStore(**form, dtype=store.dtype, v_dtype="float16"))


@pytest.mark.parametrize(
    ("shape", "state"),
    [
        ((2, 6, 4), (2, 6, 9, 5)),
        ((1, 2, 6, 4), (2, 6, 9, 99)),
        ((1, 2, 6, 4), (2, 6, 9, -3)),
        ((1, 2, 6, 4), (0, 0, 9, 5)),
        ((1, 2, 6, 4), (6, 6, 9, 6)),
        ((1, 2, 6, 4), (2, 6, 3, 5)),
        ((1, 2, 3, 4), (2, 6, 50, 3)),
        ((1, 2, 6, 4), (2, 6, "x", 5)),
        ((1, 2, 6, 4), (2, 6, 9)),
    ],
)
def test_mlx_files_whose_state_cannot_be_are_refused(arch, tmp_path, shape, state):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    facts = {f"0.0.{j}": str(x) for j, x in enumerate(state)} | {"2.0": "RotatingKVCache"}
    save_file({name: np.ones(shape, np.float32) for name in ("0.0", "0.1")}, path, facts)
    with pytest.raises(tikv.CacheFileError, match="damaged: in layer 0, "):
        mlx.load_prompt_cache(path)


def test_mlx_refusals(arch, rng, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "cache.safetensors"
    save_file({"0.0": np.ones((1, 1, 2, 4), np.float32)}, path, {"0.0": "", "2.0": "ChunkedKVCache"})
    with pytest.raises(tikv.TikvError, match="ChunkedKVCache"):
        mlx.load_prompt_cache(path)
    save_file({name: np.ones((1, 1, 2, 4), np.float32) for name in ("0.0", "0.1")}, path, {"0.0": "", "2.0": "KVCache"})
    for capacity in (0, 1):
        with pytest.raises(tikv.TikvError, match=r"mlx\.load_prompt_cache|capacity=0"):
            mlx.load_prompt_cache(path, capacity=capacity)
    save_file({"a": np.ones(2, np.float32)}, path)
    with pytest.raises(tikv.CacheFileError, match="not a prompt cache"):
        mlx.load_prompt_cache(path)
    store = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="int8")
    with pytest.raises(tikv.TikvError, match="dtype='int8'"):
        mlx.save_prompt_cache(path, store)
    ring = tikv.KVCacheStore(num_layers=1, num_kv_heads=1, head_dim=4, capacity=8, dtype="float32", window=4)
    rows = np.ones((6, 1, 4), np.float32)
    ring.append(0, rows, rows)
    ring.trim(1)
    with pytest.raises(tikv.TikvError, match="trimmed"):
        mlx.save_prompt_cache(path, ring)
