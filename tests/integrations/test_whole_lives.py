"""Whole lives of a `TikvCache`: random operations in any order, after each of which it is compared with no cache.

`python tests/campaign/run.py lives` tries as many as there is time for. Here are a few for each family, the same each
time, and faults that are planted, which they have to find.
"""

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

if VERSION < (5, 19):
    pytest.skip("the families and `crop` of newer versions of transformers", allow_module_level=True)

from lives import chosen, expected, families, life, traced  # noqa: E402

from tikv.formats import parse_aging  # noqa: E402
from tikv.integrations.transformers import TikvCache, TikvLayer  # noqa: E402
from tikv.integrations.transformers.attention import attend as by_name  # noqa: E402
from tikv.integrations.transformers.cache.encoder_decoder import OfEncoderDecoder  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

LIVES = 6  # of each family
FORMATS = ("float16", "int8", "q8_0", "quant4_32", "nvfp4")  # each needs kernels of its own


@pytest.fixture(autouse=True)
def without_a_compiler():
    yield
    traced.uninstall()


@pytest.fixture(autouse=True)
def memory_of_nan():
    """Memory that nobody wrote is full of NaN: who reads it is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def lives(family, count=LIVES):
    return [
        chosen.choose(np.random.default_rng([0, number]), only=(family,), formats=FORMATS) for number in range(count)
    ]


def fails(it, folder):
    try:
        it.live(folder)
    except life.Wrong as error:
        return str(error.args[0])
    return ""


LIVED = ("llama", "gemma3", "gpt_oss", "t5", "deepseek")  # the others in the weekly run


@pytest.mark.full(unless=lambda case: case["family"] in LIVED)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_life(arch, family, tmp_path):
    if family not in families.offered():
        pytest.skip(f"this transformers has no {family}")
    for it in lives(family):
        if why := fails(it, tmp_path):
            it = chosen.shortest(it, lambda other: bool(fails(other, tmp_path)))
            pytest.fail(f"{why}\n{it!r}.live(folder)\n{fails(it, tmp_path)}")


# Each was wrong once, but for the life of codes, which has formats that no other life here has.
SLOTS_MOVED = [("begin", 67, [0], 0), ("compiled", 5, False, 0), ("crop", 1), ("compiled", 1, True, 0)]
BY_ANOTHER_NAME = [
    ("begin", 2, [0], 1), ("attention", "eager"), ("compiled", 1, False, 1), ("attention", "tikv"),
    ("compiled", 1, False, 1),
]  # fmt: skip
RECORDED_IN_A_RING = [("begin", 1, [0], 1), ("steps", 1, 1), ("record",), ("compiled", 6, False, 1)]
ONE_LAYER_READY = [("begin", 1, [0], 0), ("interrupt", 0, True, 1, 1), ("compiled", 1, True, 0)]
AFTER_AN_INTERRUPT = [
    ("begin", 1, [0], 0), ("tokens", 71, 0), ("interrupt", 0, False, 1, 0), ("crop", 1), ("compiled", 1, True, 0)
]  # fmt: skip
CODES_OF_AN_INTERRUPT = [
    ("begin", 70, [3, 0], 1), ("interrupt", 0, True, 9, 1), ("tokens", 40, 2), ("crop", 2), ("steps", 30, 2),
    ("save",), ("tokens", 90, 1), ("snapshot",), ("steps", 8, 1), ("restore",), ("repeat", 2), ("tokens", 5, 1),
]  # fmt: skip
BETWEEN_MASK_AND_LAYER = [
    ("begin", 5, [0], 1), ("compiled", 2, False, 1), ("interrupt", 0, False, 2, 1), ("compiled", 1, True, 1)
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "options", "operations"),
    [
        ("gemma3", {"max_cache_len": 300}, SLOTS_MOVED),
        ("mistral", {"max_cache_len": 40}, BETWEEN_MASK_AND_LAYER),
        ("gemma2", {"dtype": "kvarn_k4v2_g64", "sinks": 4}, CODES_OF_AN_INTERRUPT),
        ("gemma2", {"dtype": "older4_32"}, CODES_OF_AN_INTERRUPT),
        ("mistral", {"max_cache_len": 300}, AFTER_AN_INTERRUPT),
        ("deepseek", {"window": 8, "sinks": 2}, ONE_LAYER_READY),
        ("mistral", {"max_cache_len": 40}, RECORDED_IN_A_RING),
        ("deepseek", {"max_cache_len": 300}, BY_ANOTHER_NAME),
        ("llama", {"max_cache_len": 300}, BY_ANOTHER_NAME),
        ("gemma2", {"window": 12, "sinks": 4}, [("begin", 77, [0], 1), ("begin", 12, [8, 7], 1)]),
        # After a crop of the keys, the state's own crop asked again whether they could be cropped, and was refused.
        (
            "falcon_h1",
            {"window": 8, "sinks": 0, "record_states": 8},
            [("interrupt", 1, True, 5, 1), ("steps", 4, 1), ("crop", 1)],
        ),
        # The same after `align`: a state took tokens beyond max_cache_len before they were refused.
        (
            "falcon_h1",
            {"max_cache_len": 150, "record_states": 40},
            [("begin", 1, [0], 1), ("interrupt", 1, False, 1, 1), ("beyond", 1, 1), ("steps", 1, 1)],
        ),
        # A state took tokens that a layer with keys then refused: in a cache that is new, loaded or restored.
        ("qwen3_next", {"max_cache_len": 300}, [("begin", 1, [0], 1), ("save",), ("beyond", 1, 1)]),
        # Slots that compiled steps reach for the longest row stay empty in others, where attention read NaN.
        (
            "deepseek",
            {"window": 40, "sinks": 4},
            [("begin", 16, [8, 0, 3], 472), ("compiled", 3, False, 912), ("steps", 3, 815)],
        ),
    ],
)
def test_a_life_that_was_wrong(arch, family, options, operations, tmp_path):
    assert not fails(chosen.Chosen(family, options, operations), tmp_path)


def rolled(crop, layers):
    """A `crop` after which the slots of layers have moved on by one."""

    def planted(cache, tokens_to_remove):
        crop(cache, tokens_to_remove)
        for layer in cache.layers[layers]:
            for a in (layer.store.keys.torch(), layer.store.values.torch()):
                a.copy_(a.roll(1, 2))

    return planted


def one_wrong(update):
    """An `update` that gets the 20th of 50 tokens a second time, instead of the 21st."""

    def planted(cache, key, value, *args, **options):
        if key.shape[2] == 50:
            key, value = (torch.cat((rows[:, :, :20], rows[:, :, 19:20], rows[:, :, 21:]), 2) for rows in (key, value))
        return update(cache, key, value, *args, **options)

    return planted


def plant(what, monkeypatch):
    if what == "a mask that is left out":
        attend = by_name.attend
        unmasked = lambda module, q, k, v, mask, *a, **o: attend(module, q, k, v, None, *a, **o)  # noqa: E731
        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "tikv", unmasked)
        return
    faults = {
        "slots that move on at a crop": (TikvCache, "crop", rolled(TikvCache.crop, slice(None))),
        "slots that move on where other layers read the keys": (TikvCache, "crop", rolled(TikvCache.crop, slice(1))),
        "no reorder": (TikvCache, "reorder_cache", lambda *_: None),
        "what the encoder gave stays in its order": (
            OfEncoderDecoder,
            "batch_select_indices",
            lambda cache, index: cache.self_attention_cache.batch_select_indices(index),
        ),
        "a copy that shares its memory": (TikvLayer, "__deepcopy__", lambda layer, memo: layer),
        "another format": (life.expected, "as_stored", lambda rows, *_: rows),
        "one wrong token": (TikvCache, "update", one_wrong(TikvCache.update)),
    }
    monkeypatch.setattr(*faults[what])


@pytest.mark.parametrize(
    ("what", "family"),
    [
        ("slots that move on at a crop", "qwen3"),
        ("no reorder", "qwen3"),
        ("a copy that shares its memory", "qwen3"),
        ("another format", "qwen3"),
        ("a mask that is left out", "qwen3"),
        ("slots that move on where other layers read the keys", "gemma3n"),
        ("what the encoder gave stays in its order", "bart"),
    ],
)
def test_what_is_planted_is_found(arch, tmp_path, monkeypatch, what, family):
    """By one of a few lives, which is right without it."""
    with monkeypatch.context() as planted:
        plant(what, planted)
        finder = next((it for it in lives(family, 3 * LIVES) if fails(it, tmp_path)), None)
    assert finder is not None
    assert not fails(finder, tmp_path)


@pytest.mark.parametrize("numbers", chosen.NARROW)
@pytest.mark.parametrize("attention", life.ATTENTIONS)
def test_one_wrong_token_is_found_in_half_precision(arch, tmp_path, monkeypatch, numbers, attention):
    """Of fifty: by what attention gives, and by the logits alone."""
    it = chosen.Chosen("llama", {"model": numbers}, [("begin", 50, [0], 1), ("attention", attention), ("steps", 1, 1)])
    assert not fails(it, tmp_path)
    plant("one wrong token", monkeypatch)
    assert "attention" in fails(it, tmp_path)
    monkeypatch.setitem(life.OFF, numbers, torch.inf)
    assert "logits" in fails(it, tmp_path)


SCALED = ("float8_e4m3fn", "float8_e5m2", "nvfp4")
CODES_OF_130 = {"tokens2_32": 96, "tokens4_32": 96, "older4_32": 68, "kvarn_k4v2_g64": 64, "kvarn_k4v4_g64": 64}


@pytest.mark.parametrize(
    ("name", "scale"), [*((name, None) for name in (None, *chosen.FORMATS)), *itertools.product(SCALED, (0.11,))]
)
def test_what_a_format_stores(arch, name, scale):
    """As the library's own functions encode and decode it, or its stores."""
    rows = torch.randn(1, 2, 130, families.WIDTH, generator=torch.Generator().manual_seed(3))
    config = families.models("llama").cached.config
    cache = TikvCache(config, dtype=expected.format_of(name), k_scale=scale, v_scale=scale)
    cache.layers[0].update(rows, rows)
    aging = parse_aging(expected.format_of(name))
    if aging is not None:
        end = expected.end_of_codes(aging, aging.sinks, 0, 0, rows.shape[2])
        assert end == CODES_OF_130[name]
        codes = slice(aging.sinks, end)
        keys, values = (expected.with_codes(rows, aging, codes, keys=keys) for keys in (True, False))
    else:
        keys, values = (expected.as_stored(rows, name, scale, keys=keys) for keys in (True, False))
    torch.testing.assert_close(cache.layers[0].keys, keys, rtol=0, atol=0)
    torch.testing.assert_close(cache.layers[0].values, values, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", families.FAMILIES)
def test_masks_and_attention_here_are_those_of_the_model(arch, family, monkeypatch, tmp_path):
    """What attention is compared with is what the model's own attention gives, with padding, without a cache."""
    if family not in families.offered():
        pytest.skip(f"this transformers has no {family}")
    it = life.Life(family, {}, tmp_path)
    it.model.set_attn_implementation("eager")
    it.start([5, 0], 1)
    starts, count = it.text.starts, 30
    seen, attend = [], transformers.AttentionInterface.get_interface

    def interface(self, name, default):
        def attention(module, query, key, value, mask, **options):
            out = attend(self, name, default)(module, query, key, value, mask, **options)[0]
            sees = it.sights[module.layer_idx].mask(starts, torch.arange(count), count)
            if module in it.cross:
                sees = it.text.source[1].bool()[:, None].expand(-1, count, -1)
            scale, sinks = options.get("scaling"), options.get("s_aux")
            sinks = getattr(module, "sinks", None) if sinks is None else sinks
            bias = it.position_bias(module, count, count)
            want = expected.attention(query, key, value, sees, scale, options.get("softcap"), sinks, bias)
            real = torch.arange(count)[None] >= starts[:, None]
            torch.testing.assert_close(out.double()[real], want[real], rtol=0, atol=1e-4)
            seen.append(module.layer_idx)
            return out, None

        return attention

    monkeypatch.setattr(transformers.AttentionInterface, "get_interface", interface)
    ids = torch.randint(2, 97, (2, count), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(count)[None] >= starts[:, None]).long()
    ids, positions = ids * mask, (mask.cumsum(1) - 1).clamp(min=0)
    text = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    it.model(**(it.of_both(ids, mask, positions, it.text) if it.cross else text), use_cache=False)
    layers = [i for i, kind in enumerate(it.family.layers) if kind != families.STATE]
    assert seen == (sorted(layers * 2) if it.cross else layers)
