"""What models say to attention by the name "tikv", by keyword and by mask: all of it is honoured, or refused."""

import ast
import pathlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import BASE, generate, given, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention import keywords  # noqa: E402
from tikv.integrations.transformers.attention.attend import attend  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

# Arguments of attention functions that are not keywords of models': arrays, and what paged and flash functions pass on.
POSITIONAL = {"module", "query", "key", "value", "attention_mask", "query_states", "key_states", "value_states"}
OF_FLASH = {
    *("query_length", "softmax_scale", "use_top_left_mask", "target_dtype", "attn_implementation", "implementation"),
    *("q", "k", "v", "cache", "block_table", "block_tables", "k_cache", "v_cache", "max_seqlen_q", "max_seqlen_k"),
    # ModernBert before 5.0 has functions of its own, by another interface.
    *("qkv", "rotary_emb", "local_attention", "bs", "dim", "sliding_window_mask", "cu_seqlens", "max_seqlen"),
}


def sources():
    """(name, text) of each Python file of the installed transformers in which attention is called or defined."""
    root = pathlib.Path(transformers.__file__).parent
    paths = [*root.glob("models/*/modeling_*.py"), *root.glob("integrations/*.py"), *root.glob("*.py")]
    for path in sorted(paths):
        text = path.read_text(encoding="utf-8")
        if "attention_interface(" in text or "attention_forward(" in text:
            yield path.stem, text


def bracketed(text, start):
    """From `start` on, to the end of the first brackets there."""
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, start):
        depth += 1 if mark.group() == "(" else -1
        if depth == 0:
            return text[start : mark.end()]
    raise AssertionError("a bracket that does not close")


def names_said(text):
    """The keywords of calls of attention, and the parameters of attention functions, in a file; and how many calls."""
    calls = [bracketed(text, found.start()) for found in re.finditer(r"(?<![\w.])attention_interface\(", text)]
    names = {keyword.arg for call in calls for keyword in ast.parse(call, mode="eval").body.keywords if keyword.arg}
    for found in re.finditer(r"^ *def (\w*attention_forward\()", text, re.MULTILINE):
        arguments = ast.parse(f"def {bracketed(text, found.start(1))}: ...").body[0].args
        names |= {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
    return names, len(calls)


def asks_for_names(text):
    """Whether a class that calls attention asks whether its name is "eager" or "sdpa".

    Where it asks with `output_attentions` it means that torch's function gives no weights, which `attend` does.
    """
    classes = [part for part in re.split(r"^(?=class )", text, flags=re.MULTILINE) if "attention_interface(" in part]
    asked = re.compile(r"_attn_implementation (?:==|in|not in) [^\n]*\"(?:eager|sdpa)\"(?! and .*output_attentions)")
    return any(asked.search(part) for part in classes)


# Attention modules that ask for the name of the attention, and what they do for another than "eager" and "sdpa".
ASKING = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "hy_v4_vl", "mistral_large4"), "indices="
    ),
    "minimax_m3_vl": "block_indices=",
    "glm5_next": "a mask to add, for bools",
    "gpt2": "nothing: only eager upcasts",
    "decision_transformer": "nothing: only eager upcasts",
    "llama4": "nothing: in 4.56 only which function is called",
}


def test_every_keyword_of_the_installed_transformers_is_in_the_table(arch):
    """Of its attention functions, and of models' calls of them; and no module asks for a name that is not known."""
    said, asking, calls = {}, set(), 0
    for stem, text in sources():
        names, count = names_said(text)
        said.update(dict.fromkeys(names, stem))
        calls += count
        if asks_for_names(text):
            asking.add(stem.removeprefix("modeling_"))
    new = {name: stem for name, stem in said.items() if name not in {*keywords.KEYWORDS, *POSITIONAL, *OF_FLASH}}
    assert new == {}, "find who honours it, and add it to KEYWORDS"
    assert asking <= ASKING.keys(), "see what it does under the name 'tikv'"
    assert calls > 150
    assert {"dropout", "scaling", "softcap", "is_causal", "s_aux", "sliding_window"} <= said.keys()


def test_a_new_keyword_or_name_would_be_found(arch):
    text = """
class Attention(nn.Module):
    def forward(self, x):
        if self.config._attn_implementation in ("flash", "sdpa"):
            x = x + 1
        return attention_interface(self, (x, 1), scaling=self.scale(2),
                                   new_one=f(3), **kwargs)

def own_eager_attention_forward(module, query, tilt: tuple[int] = (3, 4), *, turn=None): ...
"""
    assert names_said(text) == ({"scaling", "new_one", "module", "query", "tilt", "turn"}, 1)
    assert asks_for_names(text)
    assert not asks_for_names(text.replace('"sdpa"', '"other"'))


def numbers(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


def expected(q, k, v, hidden, bias=0.0, softcap=None, sinks=None):
    """Attention in float64, from what is hidden and what is added to the scores; zeros where nothing is seen."""
    q, k, v = (a.double() for a in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    seen = torch.where(hidden, 0.0, (scores + bias).exp())
    share = 0.0 if sinks is None else sinks.double().exp().reshape(1, -1, 1, 1)
    total = seen.sum(-1, keepdim=True) + share
    return (torch.where(total == 0, 0.0, seen / total) @ v).transpose(1, 2).float()


FORMS = ["none", "bool", "two axes", "heads", "added", "least", "a row", "nothing seen"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_masks_of_every_form(arch, rng, form, tokens):
    """With and without a soft cap, sinks, a bias and chosen keys; none of them may be dropped."""
    batch, heads, held = 2, 4, 9
    q, k, v = numbers(rng, batch, heads, tokens, 8), *(numbers(rng, batch, 2, held, 8) for _ in "kv")
    causal = torch.ones(tokens, held, dtype=torch.bool).tril(held - tokens)
    sees = {
        "none": causal,
        "two axes": causal & (torch.arange(held) > 1),
        "heads": causal & torch.from_numpy(rng.random((batch, heads, tokens, held)) < 0.7) | (torch.arange(held) == 2),
        "a row": (torch.arange(held) > 2)[None, None, None],
        "nothing seen": causal & (torch.arange(batch) > 0)[:, None, None, None],
    }.get(form, causal & (torch.arange(held) > torch.tensor([[[[1]]], [[[3]]]])))
    mask = None if form == "none" else sees
    if form in ("added", "least"):
        least = float("-inf") if form == "added" else torch.finfo(torch.float32).min
        mask = torch.where(sees, numbers(rng, batch, 1, tokens, held), least)
    added = torch.where(sees, mask, 0.0) if form in ("added", "least") else torch.zeros(())
    bias, sinks = numbers(rng, 1, heads, tokens, held), numbers(rng, heads)
    chosen = torch.from_numpy(rng.integers(-1, held, (batch, tokens, 4)))
    chosen[..., 0] = torch.arange(held - tokens, held)
    picked = (chosen[..., None] == torch.arange(held)).any(-2)[:, None]
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    for said, of in (
        ({}, {}),
        ({"softcap": 0.7}, {"softcap": 0.7}),
        ({"s_aux": sinks}, {"sinks": sinks}),
        ({"position_bias": bias}, {"bias": added + bias}),
        ({"position_bias": bias, "softcap": 0.7}, {"bias": added + bias, "softcap": 0.7}),
        ({"indices": chosen}, {"hidden": ~(sees & picked)}),
        ({"sliding_window": 3, "output_attentions": False}, {}),
    ):
        got, weights = attend(module, q, k, v, mask, **said)
        want = expected(q, k, v, **{"hidden": ~sees, "bias": added, **of})
        assert weights is None
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text, said=said: f"{list(said)}: {text}")


@pytest.mark.parametrize("said", [{"softcap": 0.7}, {"s_aux": torch.zeros(4)}, {}])
def test_what_is_hidden_does_not_count_and_a_nan_that_is_seen_does(arch, rng, said):
    """In padded batches, where whole rows may see nothing; a number that is none is not hidden either."""
    q, k, v = numbers(rng, 2, 4, 5, 8), *(numbers(rng, 2, 2, 5, 8) for _ in "kv")
    sees = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5) & torch.tensor([3, 0])[:, None, None, None].le(
        torch.arange(5)
    )
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    want = attend(module, q, k, v, sees, **said)[0]
    assert not want.isnan().any()
    assert (want[0, :3] == 0).all()
    for which, padded in ((0, True), (1, True), (0, False), (1, False)):
        arrays = [k.clone(), v.clone()]
        arrays[which][0, 0, 1 if padded else 3] = torch.nan
        got = attend(module, q, *arrays, sees, **said)[0]
        if padded and said:
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        elif not padded:
            assert got[0, 3:, :2].isnan().all()
            assert not got[1].isnan().any()
    q[0, 1, 4] = torch.nan
    got = attend(module, q, k, v, sees, **said)[0]
    assert got[0, 4, 1].isnan().all()
    assert got.isnan().sum() == 8


def test_masks_of_integers_are_refused(arch, rng):
    q, k, v = (numbers(rng, 1, 2, 3, 8) for _ in "qkv")
    with pytest.raises(tikv.DTypeError, match=r"the mask is torch\.int64"):
        attend(torch.nn.Module(), q, k, v, torch.ones(1, 1, 3, 3, dtype=torch.int64), softcap=1.0)


def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, tilt=0.0, **kwargs):
    scores = query @ key.transpose(2, 3) * scaling + attention_mask + tilt * torch.arange(float(key.shape[2]))
    if kwargs.get("position_bias") is not None:
        raise AssertionError("it is in the mask, and would count twice")
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.softmax(-1)


class Tilted(torch.nn.Module):
    """An attention whose scores depend on a keyword that nobody else knows."""

    def forward(self, q, k, v, mask, **kwargs):
        function = ALL_ATTENTION_FUNCTIONS["tikv"] if kwargs.pop("by_name", True) else eager_attention_forward
        return function(self, q, k, v, mask, scaling=0.5, **kwargs)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_keyword_that_is_not_known_goes_to_the_models_own_function(arch, rng, tokens, masked, compiled):
    q, k, v = numbers(rng, 2, 2, tokens, 8), *(numbers(rng, 2, 2, 6, 8) for _ in "kv")
    sees = torch.ones(tokens, 6, dtype=torch.bool).tril(6 - tokens)[None, None]
    sees = sees & (torch.arange(6) > 1) if masked else sees
    module = Tilted()
    torch.compiler.reset()
    call = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    bias = numbers(rng, 1, 2, tokens, 6)
    added = torch.where(sees, bias, float("-inf"))
    want = module(q, k, v, added, tilt=0.3, by_name=False)
    got = call(q, k, v, sees if masked else None, tilt=0.3, position_bias=bias)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    plain = call(q, k, v, sees if masked else None, tilt=None, position_bias=bias)[0]
    assert (plain - got[0]).abs().max() > 1e-2
    weights = call(q, k, v, sees if masked else None, output_attentions=True)[1]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, tokens))


def test_a_keyword_that_nobody_knows_is_refused(arch, rng):
    q, k, v = (numbers(rng, 1, 2, 1, 8) for _ in "qkv")
    with pytest.raises(
        tikv.OptionError, match="Module passes tilt, which only an attention function of its own would understand"
    ):
        attend(torch.nn.Module(), q, k, v, None, tilt=0.3, use_cache=True)
    with pytest.raises(tikv.OptionError, match="block_indices"):
        attend(torch.nn.Module(), q, k, v, None, block_indices=torch.zeros(1, 2, 1, 1, dtype=torch.long))


def logits(model, cache, inputs, attention, tokens=8):
    model.set_attn_implementation(attention)
    return torch.stack(generate(model, cache, inputs, tokens).logits)


@pytest.mark.parametrize("family", ["T5", "UMT5"])
def test_a_position_bias_is_honoured(arch, family):
    """T5 adds what it has learned of positions to the scores of prompts and of single tokens."""
    if VERSION < (5, 0):
        pytest.skip("caches of an encoder-decoder take no configuration, and T5's attention has no name")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    torch.manual_seed(1)
    source, target = torch.randint(2, 61, (2, 11)), torch.randint(2, 61, (2, 9))
    mask = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    found = {}
    for attention in ("eager", "tikv"):
        model.set_attn_implementation(attention)
        cache = transformers.EncoderDecoderCache(TikvCache(config), TikvCache(config))
        with torch.no_grad():
            parts = [
                model(input_ids=source, attention_mask=mask, decoder_input_ids=part, use_cache=True, **given(cache))
                for part in target.split([4, 1, 1, 3], 1)
            ]
        found[attention] = torch.cat([part.logits for part in parts], 1)
    torch.testing.assert_close(found["tikv"], found["eager"], rtol=0, atol=1e-5)


EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
CAPPED = {
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5},
    "GptOss": {**EXPERTS, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", CAPPED)
@pytest.mark.parametrize("dtype", [None, "int8", torch.float16])
def test_padded_batches_with_a_soft_cap_or_sinks(arch, family, dtype):
    """Each prompt's logits are those of the prompt alone, without padding and without a cache."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **CAPPED[family], "num_hidden_layers": 2})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    inputs = prompts(3, 9, 1)
    model.set_attn_implementation("eager")
    alone = []
    for ids, mask in zip(*inputs.values(), strict=True):
        own = {"input_ids": ids[None, mask.bool()], "attention_mask": mask[None, mask.bool()]}
        alone.append(torch.cat(generate(model, None, own, 8, use_cache=False).logits))
    want = torch.stack(alone, 1)
    half = dtype == torch.float16
    model = model.half() if half else model
    for cache in (DynamicCache(config=config), TikvCache(config, dtype=None if half else dtype)):
        got = logits(model, cache, inputs, "tikv").float()
        assert not got.isnan().any()
        tolerance = 1e-5 if dtype is None or (dtype == "int8" and isinstance(cache, DynamicCache)) else 1e-2
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["Llama", *CAPPED])
def test_a_prompt_into_transformers_static_cache(arch, family):
    """Whose memory has room behind the prompt, for which transformers' own mask function would give no mask."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**BASE, **CAPPED.get(family, {}), "num_hidden_layers": 2})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    inputs = prompts(4)
    want = logits(model, None, inputs, "eager")
    found = []
    for name in ("eager", "tikv"):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        with torch.no_grad():
            out = model(**inputs, cache_position=torch.arange(4), **given(cache)).logits[:, -1]
        found.append(out)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0], want[0], rtol=0, atol=1e-5)


def test_only_the_last_queries_of_a_prompt(arch):
    """Gemma 4 hands layers that share keys the queries whose logits are asked for, and no mask: they are the newest."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **BASE, global_head_dim=8, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16, vocab_size_per_layer_input=97, hidden_size_per_layer_input=8,
    )  # fmt: skip
    model = transformers.Gemma4ForCausalLM(config).eval()
    ids = prompts(9)["input_ids"]
    with torch.no_grad():
        want = model(ids).logits[:, -3:]
        model.set_attn_implementation("tikv")
        for cache in (DynamicCache(config=config), TikvCache(config)):
            got = model(ids, logits_to_keep=3, **given(cache)).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
INDEXED = {
    "DeepseekV32": {
        **{name: value for name, value in BASE.items() if name != "head_dim"},
        **LATENT,
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16},
        **{"num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3},
    },
    "MiniMaxM3VLText": {
        **BASE,
        **EXPERTS,
        **{"dense_intermediate_size": 48, "shared_intermediate_size": 16, "rotary_dim": 4, "index_local_blocks": 1},
        **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2},
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
}


@pytest.mark.parametrize("family", INDEXED)
def test_keys_that_an_indexer_chose(arch, family):
    """Models leave them to attention where its name is neither eager nor sdpa."""
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**INDEXED[family] | {"num_hidden_layers": 2})
    config.initializer_range = 0.5
    name = family.removesuffix("Text") + "ForCausalLM"
    found = getattr(transformers, name, None) or transformers.AutoModelForCausalLM.from_config(config).__class__
    model = found(config).eval()
    inputs = prompts(12)
    want = logits(model, None, inputs, "sdpa")
    torch.testing.assert_close(logits(model, None, inputs, "tikv"), want, rtol=1e-5, atol=1e-4)


def test_a_model_with_no_attention_but_its_own_is_refused(arch):
    """It declares so, and its masks are for its own function: attention by another would see the future."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    config = transformers.BigBirdPegasusConfig(
        vocab_size=97, d_model=32, pad_token_id=0, eos_token_id=None, decoder_start_token_id=2, bos_token_id=1,
        encoder_ffn_dim=48, decoder_ffn_dim=48, attention_type="original_full", **heads,
    )  # fmt: skip
    model = transformers.BigBirdPegasusForConditionalGeneration(config).eval()
    model.set_attn_implementation("tikv")
    assert model.config._attn_implementation == "tikv"
    why = "BigBirdPegasusPreTrainedModel supports only its own attention"
    with pytest.raises(tikv.OptionError, match=why):
        TikvCache(model.config)
    with pytest.raises(tikv.OptionError, match=why):
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)
    model.set_attn_implementation("eager")
    cache = TikvCache(model.config)
    model.set_attn_implementation("tikv")
    with pytest.raises(tikv.OptionError, match=why):
        cache.update(torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8), 0)
    assert cache.layers[0].store is None
