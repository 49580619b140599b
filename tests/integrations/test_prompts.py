"""Prompts of models under attention "tikv": masks that are made when they are read, and kernels that need none."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from model_cache import BASE, generate, given  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention import attend as by_name  # noqa: E402
from tikv.integrations.transformers.attention import prompts  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402
from tikv.integrations.transformers.versions.masks import MASKS_BY_VMAP  # noqa: E402

pytestmark = [
    pytest.mark.archs("cpu", "cuda"),
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_thread"),
]

WINDOW = 12
CACHES = {  # model, options of its cache
    "full": ("Llama", {}),
    "limited": ("Llama", {"max_cache_len": 64}),
    "streamed": ("Llama", {"window": WINDOW, "sinks": 3}),
    "sliding": ("Mistral", {}),
    "sliding and limited": ("Mistral", {"max_cache_len": 64}),
    "codes": ("Llama", {"dtype": "int8"}),
}
SOFT_CAP = ("Gemma2", {})
SINK_LOGITS = ("GptOss", {})
PIECES = (17, 1, 5, 20)


needs_masks_made_late = pytest.mark.skipif(MASKS_BY_VMAP, reason="this transformers makes masks by vmap")


def build(arch, family, dtype=torch.float32, **more):
    slides = {"sliding_window": WINDOW}
    both = {**slides, "layer_types": ["sliding_attention", "full_attention"]}
    own = {
        "Mistral": slides,
        "Gemma2": {**both, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        "GptOss": {**both, "num_local_experts": 2, "num_experts_per_tok": 1},
    }
    options = {**BASE, "num_hidden_layers": 2, "initializer_range": 0.3, **own.get(family, {}), **more}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(arch, dtype).eval()


@torch.no_grad()
def fed(model, cache, ids, pieces=PIECES):
    """Logits of a text that comes in pieces."""
    found = []
    for piece in ids.split(pieces, 1):
        found.append(model(piece, **given(cache)).logits)
    return torch.cat(found, 1)


@pytest.fixture
def attended(monkeypatch):
    """Have this library's kernels serve prompts on every device; what they returned."""
    results, original = [], by_name.attend_prompt

    def serve(query, key, value, mask, request, always):
        results.append(original(query, key, value, mask, request, True))
        return results[-1]

    monkeypatch.setattr(by_name, "attend_prompt", serve)
    return results


@needs_masks_made_late
@pytest.mark.parametrize(
    ("family", "options"), [*CACHES.values(), SOFT_CAP, SINK_LOGITS], ids=[*CACHES, "cap", "sinks"]
)
def test_prompts_by_kernels_are_those_of_torch(arch, family, options, attended):
    model = build(arch, family)
    ids = torch.randint(2, 97, (2, sum(PIECES))).to(arch)
    model.set_attn_implementation("eager" if (family, options) in (SOFT_CAP, SINK_LOGITS) else "sdpa")
    want = fed(model, TikvCache(model.config, **options), ids)
    assert not attended
    model.set_attn_implementation("tikv")
    got = fed(model, TikvCache(model.config, **options), ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    # Torch serves a prompt that sees itself alone, without a window, soft cap or sinks; with sinks it needs no mask.
    first = {"GptOss": 1, "Gemma2": 2, "Mistral": 2}.get(family, 2 * ("window" in options))
    assert len(attended) == 4 + first
    assert all(a is not None for a in attended)


def masks(monkeypatch, model, cache, ids, pieces=PIECES):
    """The masks that attention "tikv" got of each piece, for the first layer."""
    seen = []
    original = by_name.attend

    def look(module, query, key, value, attention_mask, **kwargs):
        if module.layer_idx == 0:
            seen.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, "tikv", look)
    model.set_attn_implementation("tikv")
    fed(model, cache, ids, pieces)
    return seen


@needs_masks_made_late
@pytest.mark.parametrize(("family", "options"), CACHES.values(), ids=CACHES)
def test_a_mask_has_the_bools_of_torchs(arch, family, options, monkeypatch):
    """Each piece's mask, made when it is read, is the one that attention "sdpa" gets."""
    model = build(arch, family)
    ids = torch.randint(2, 97, (2, sum(PIECES))).to(arch)
    made = []
    original = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def make(*args, **kwargs):
        made.append(original(*args, **kwargs))
        return made[-1]

    found = masks(monkeypatch, model, TikvCache(model.config, **options), ids)
    lazy = [mask for mask in found if type(mask) is prompts.PromptMask]
    assert len(lazy) == {"full": 2, "limited": 2, "codes": 2}.get(next(n for n in CACHES if CACHES[n][1] is options), 3)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", make)
    model.set_attn_implementation("sdpa")
    fed(model, TikvCache(model.config, **options), ids)
    several = [mask for mask in made if mask is not None and mask.shape[2] > 1]
    for ours, theirs in zip(lazy, several, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours & True, theirs)
        assert torch.equal(torch.where(ours, 0.0, -1.0), torch.where(theirs, 0.0, -1.0))


@needs_masks_made_late
def test_padding_and_packed_texts_get_a_mask_that_is_made(arch, monkeypatch, attended):
    """Queries that are not simply the newest tokens: their mask says more, and torch's attention reads it."""
    model = build(arch, "Mistral")
    model.set_attn_implementation("tikv")
    ids = torch.randint(2, 97, (2, 20)).to(arch)
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    with torch.no_grad():
        model(ids, attention_mask=padding, **given(TikvCache(model.config)))
        assert not attended
        if VERSION >= (5, 0):
            positions = torch.cat((torch.arange(12), torch.arange(8)))[None].to(arch)
            model(ids[:1], position_ids=positions, use_cache=False)
            assert not attended
        model(ids, attention_mask=torch.ones_like(ids), **given(TikvCache(model.config)))
        assert len(attended) == 2


def test_a_model_in_training_has_gradients(arch, attended):
    model = build(arch, "Mistral")
    model.set_attn_implementation("tikv")
    ids = torch.randint(2, 97, (2, 20)).to(arch)
    model(ids, use_cache=False).logits.sum().backward()
    assert not attended
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    "options", [{"window": WINDOW, "sinks": 3}, {"max_cache_len": 80}], ids=["streamed", "limited"]
)
def test_a_prompt_that_generate_gives_in_chunks(arch, options):
    """Compiled or not, `generate` passes masks on from where they were made."""
    model = build(arch, "Llama")
    model.set_attn_implementation("tikv")
    ids = torch.randint(2, 97, (2, 45)).to(arch)
    want = generate(model, TikvCache(model.config, **options), {"input_ids": ids}, 5, disable_compile=True)
    config = transformers.CompileConfig(**({"backend": "eager", "mode": None} if arch == "cpu" else {}))
    config._compile_all_devices = True
    for more in ({"disable_compile": True}, {"compile_config": config}):
        cache = TikvCache(model.config, **options)
        got = generate(model, cache, {"input_ids": ids}, 5, prefill_chunk_size=20, **more)
        assert torch.equal(got.sequences, want.sequences)


@needs_masks_made_late
@pytest.mark.archs("cuda")
@pytest.mark.parametrize(
    ("family", "options"), [*CACHES.values(), SOFT_CAP, SINK_LOGITS], ids=[*CACHES, "cap", "sinks"]
)
def test_warpgroups_serve_prompts(arch, family, options, monkeypatch):
    """In bfloat16, with heads of 64: logits as near to those of float32 as torch's are."""
    from tikv import launch, runtime

    if launch.why_no_warpgroups(runtime.running()):
        pytest.skip(launch.why_no_warpgroups(runtime.running()))
    served, original = [], by_name.attend_prompt
    monkeypatch.setattr(by_name, "attend_prompt", lambda *a: served.append(original(*a)) or served[-1])
    options = {name: 256 if name == "max_cache_len" else value for name, value in options.items()}
    pieces, ids = (170, 1, 70), torch.randint(2, 97, (2, 241)).to(arch)
    found = {}
    for name, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("tikv", torch.bfloat16)):
        model = build(arch, family, dtype, head_dim=64, initializer_range=0.1)
        model.set_attn_implementation(name)
        found[name, dtype] = fed(model, TikvCache(model.config, **options), ids, pieces).float()
    assert len(served) == 2 + {"GptOss": 1, "Gemma2": 2, "Mistral": 2}.get(family, 2 * ("window" in options))
    assert all(a is not None for a in served)
    exact = found["eager", torch.float32]
    errors = [(found[name, torch.bfloat16] - exact).abs().mean() for name in ("tikv", "eager")]
    assert errors[0] <= 1.3 * errors[1]
