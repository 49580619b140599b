"""transformers' continuous batching with attention "tikv": the texts of `generate`, and pages read where they lie."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from lives import families  # noqa: E402

import tikv  # noqa: E402
from tikv.integrations.transformers.batching import attend  # noqa: E402
from tikv.integrations.transformers.batching import managers as batching  # noqa: E402
from tikv.integrations.transformers.versions.installed import MODELS_UPDATE_PAGES, VERSION  # noqa: E402

pytestmark = [pytest.mark.archs("cpu"), pytest.mark.usefixtures("one_thread")]
if VERSION < batching.FIRST:
    pytest.skip("this version's continuous batching is refused", allow_module_level=True)

from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching import cache as pages  # noqa: E402
from transformers.generation.continuous_batching import continuous_api  # noqa: E402

LENGTHS = (3, 1, 19, 2, 25)  # longer and shorter than windows of 7, pages of 4 and batches of 16
TOKENS = 9
SERVED = ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "cohere2", "olmo3", "qwen3", "phi3"]
OTHERS = {  # families that only these tests know, and heads of other widths
    "mixtral": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {}),
    "wide": ("Llama", {"head_dim": 256}),
    "groups": ("Llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}),
}


EXPERTS = ("mixtral", "gpt_oss")  # in float32 they cannot be captured by themselves


@functools.cache
def model_of(name, arch="cpu"):
    if arch != "cpu":
        return copy.deepcopy(model_of(name)).to(arch)
    if name in families.FAMILIES:
        return families.models(name).cached
    start, options = OTHERS[name]
    config = getattr(transformers, f"{start}Config")(**{**families.COMMON, **options})
    torch.manual_seed(0)
    return getattr(transformers, f"{start}ForCausalLM")(config).eval()


@functools.cache
def prompts():
    torch.manual_seed(1)
    return tuple(tuple(torch.randint(3, 60, (n,)).tolist()) for n in LENGTHS)


def greedy(tokens=TOKENS, **options):
    return transformers.GenerationConfig(
        **{"max_new_tokens": tokens, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    )


@functools.cache
def texts(name, arch="cpu"):
    """The texts of `generate`, one by one, without this library."""
    model = model_of(name, arch)
    model.set_attn_implementation("eager")
    made = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=arch)
        made.append(model.generate(ids, generation_config=greedy())[0, len(prompt) :].tolist())
    return made


def config(**options):
    return ContinuousBatchingConfig(**{"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, **options})


def batched(name, inputs=None, generation=None, attention="tikv", arch="cpu", **options):
    """The texts of `generate_batch`, in the order of the prompts."""
    model = model_of(name, arch)
    model.set_attn_implementation(attention)
    inputs = [list(p) for p in (prompts() if inputs is None else inputs)]
    results = model.generate_batch(
        inputs, generation_config=generation or greedy(), continuous_batching_config=config(**options)
    )
    assert model.config._attn_implementation == attention
    errors = [result.error for result in results.values() if result.error]
    assert not errors, errors
    by_prompt = {tuple(r.prompt_ids): r.generated_tokens for r in results.values()}
    return [by_prompt[tuple(p)] for p in inputs]


@pytest.mark.parametrize("name", [*SERVED, *OTHERS])
def test_texts_are_those_of_generate(arch, name):
    """Prompts, chunks of them and decoded tokens in one batch of at most 16 tokens."""
    want = texts(name)
    assert batched(name) == want


@pytest.mark.archs("cuda")
@pytest.mark.full
@pytest.mark.parametrize("name", [*SERVED, *OTHERS])
def test_texts_on_a_gpu(arch, name):
    """Batches that overlap, captured in CUDA graphs and without them."""
    want = texts(name, arch)
    assert batched(name, arch=arch, use_cuda_graph=name not in EXPERTS, use_async_batching=True) == want
    assert batched(name, arch=arch, use_cuda_graph=False, use_async_batching=False) == want


@pytest.mark.archs("cuda")
@pytest.mark.full
def test_batches_wait_for_the_memory_to_be_zeroed(arch, monkeypatch):
    """It is zeroed on another stream than the one on which batches are computed."""
    want, original = texts("qwen3", arch), continuous_api.ContinuousBatchingManager._create_batch_processor

    def late(manager):
        torch.cuda._sleep(2_000_000_000)  # about a second
        return original(manager)

    monkeypatch.setattr(continuous_api.ContinuousBatchingManager, "_create_batch_processor", late)
    for overlapping in (True, False):
        assert batched("qwen3", arch=arch, use_cuda_graph=False, use_async_batching=overlapping) == want


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "gpt_oss", "cohere2"])
@pytest.mark.parametrize("path", ["indices", "tiles", "whole"])
def test_each_path_gives_the_same_texts(arch, name, path, as_on_a_device):
    """Without block tables; the code for devices, which never waits for one; and prompts that fit a batch."""
    want = texts(name)
    if path == "tiles":
        as_on_a_device()
    options = {"max_batch_tokens": 64} if path == "whole" else {"max_blocks_per_request": 0}
    assert batched(name, **options) == want


@pytest.mark.parametrize(
    ("name", "dtype"), [("mistral", None), ("gemma2", "int8"), ("gpt_oss", None), ("cohere2", None), ("qwen3", None)]
)
def test_tiles_give_the_results_of_single_requests(arch, name, dtype, as_on_a_device):
    """The code for devices after each step of each layer, also where a wrong result does not change a text."""
    single, tiles, seen = attend.by_request, attend.by_tiles, []

    def both(q, k, v, layer, batch, request):
        before = {part: a.clone() for part, a in layer.pages.arrays.items()}
        got = tiles(q, k, v, layer, batch, request)
        bits = {part: a.clone() for part, a in layer.pages.arrays.items()}
        for part, a in layer.pages.arrays.items():
            a.copy_(before[part])
        want, used = single(q, k, v, layer, batch, request), int(batch.starts[-1])
        torch.testing.assert_close(got[:used], want[:used], rtol=1e-5, atol=1e-5)
        for part, a in layer.pages.arrays.items():
            a, b = (
                x.view(torch.uint8).flatten(0, 1)[torch.arange(x.shape[0] * x.shape[1]) != layer.trash]
                for x in (a, bits[part])
            )
            assert torch.equal(a, b)
        seen.append(batch.lengths.tolist())
        return want

    as_on_a_device(both)
    with tikv.integrations.transformers.pages(**({"dtype": dtype} if dtype else {})):
        made = batched(name)
    assert dtype or made == texts(name)
    assert any(length > 7 for lengths in seen for length in lengths)


def test_nothing_is_gathered_and_no_mask_is_made(arch, monkeypatch):
    from transformers.generation.continuous_batching import input_outputs

    want = texts("llama")

    def refuse(*args, **kwargs):
        raise AssertionError("transformers' own path was taken")

    monkeypatch.setattr(pages.FullAttentionCacheAllocator, "update", refuse)
    monkeypatch.setattr(input_outputs, "build_attention_mask", refuse)
    monkeypatch.setattr(torch, "index_select", refuse)
    assert batched("llama") == want


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_another_attention_before_and_afterwards(arch, name):
    want = texts(name)
    for attention in ("sdpa", "tikv", "sdpa"):
        assert batched(name, attention=attention) == want


def test_a_shared_prefix_is_computed_once(arch, monkeypatch):
    start = list(prompts()[4])[:12]
    inputs = [[*start, 5, 6], [*start, 7], [*start, 8, 9, 10]]
    model = model_of("llama")
    model.set_attn_implementation("eager")
    want = [model.generate(torch.tensor([p]), generation_config=greedy())[0, len(p) :].tolist() for p in inputs]
    matches = []
    original = pages.PagedAttentionCache.search_prefix_match

    def search(self, *args):
        matches.append(original(self, *args))
        return matches[-1]

    monkeypatch.setattr(pages.PagedAttentionCache, "search_prefix_match", search)
    assert batched("llama", inputs, max_requests_per_batch=1) == want
    assert sorted(matches)[-2:] == [12, 12]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_forks(arch, name):
    """Several texts of one prompt, of which only the most probable token is ever drawn."""
    want = texts(name)[2]
    model = model_of(name)
    model.set_attn_implementation("tikv")
    sampled = greedy(do_sample=True, top_k=1, num_return_sequences=3)
    results = model.generate_batch(
        [list(prompts()[2])], generation_config=sampled, continuous_batching_config=config(max_batch_tokens=64)
    )
    assert [r.error for r in results.values()] == [None] * 3
    assert [r.generated_tokens for r in results.values()] == [want] * 3
    with pytest.raises(ValueError, match="num_return_sequences"):  # transformers' own
        model.generate_batch([[3, 4]], generation_config=greedy(num_return_sequences=2))


def test_a_cancelled_request_leaves_the_others_right(arch):
    want = texts("gemma2")
    model = model_of("gemma2")
    model.set_attn_implementation("tikv")
    manager = model.init_continuous_batching(greedy(), continuous_batching_config=config())
    manager.start()
    try:
        dropped = manager.add_request(list(prompts()[4]), max_new_tokens=64)
        other = manager.add_request(list(prompts()[2]))
        manager.cancel_request(dropped)
        result = manager.get_result(other, timeout=60)
    finally:
        manager.stop(block=True)
    assert result is not None
    assert result.generated_tokens == want[2]
    assert model.config._attn_implementation == "tikv"


def test_little_room_preempts_requests_and_texts_stay_right(arch):
    assert batched("llama", num_blocks=12) == texts("llama")


def test_a_manager_that_is_kept_has_one_attention(arch):
    want = texts("llama")
    model = model_of("llama")
    model.set_attn_implementation("tikv")
    inputs = [list(p) for p in prompts()]
    options = {"generation_config": greedy(), "continuous_batching_config": config(), "persistent_manager": True}
    try:
        for _ in range(2):
            results = model.generate_batch(inputs, **options)
            assert sorted(r.generated_tokens for r in results.values()) == sorted(want)
        model.set_attn_implementation("sdpa")
        with pytest.raises(tikv.OptionError, match="destroy_cached_continuous_batching_manager"):
            model.generate_batch(inputs, **options)
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_attention_that_is_changed_while_a_manager_runs(arch):
    model = model_of("llama")
    model.set_attn_implementation("tikv")
    manager = model.init_continuous_batching(greedy(), continuous_batching_config=config())
    manager.start()
    try:
        first = manager.get_result(manager.add_request([3, 4, 5]), timeout=60)
        model.set_attn_implementation("sdpa")
        second = manager.get_result(manager.add_request([3, 4, 5]), timeout=60)
    finally:
        manager.stop(block=True)
    assert first.error is None
    assert 'was changed to "sdpa" while a manager' in second.error


@pytest.mark.skipif(not MODELS_UPDATE_PAGES, reason="this version makes no masks then")
def test_the_model_is_called_while_a_manager_runs(arch):
    model = model_of("gemma2")
    model.set_attn_implementation("eager")
    ids = torch.tensor([prompts()[2]])
    with torch.no_grad():
        want = model(ids).logits
        model.set_attn_implementation("tikv")
        manager = model.init_continuous_batching(greedy(), continuous_batching_config=config())
        assert model.config._attn_implementation == batching.IN_PAGES
        torch.testing.assert_close(model(ids).logits, want)
        manager.start()
        manager.stop(block=True)
    assert model.config._attn_implementation == "tikv"


@pytest.mark.parametrize(("name", "words"), [("llama4", "chunked_attention"), ("lfm2", "conv")])
def test_what_transformers_refuses_stays_refused(arch, name, words):
    model = model_of(name)
    model.set_attn_implementation("tikv")
    with pytest.raises(ValueError, match=f"Invalid layer type: {words}"):
        model.generate_batch([[3, 4]], generation_config=greedy(), continuous_batching_config=config())


def test_latents_are_refused(arch):
    model = model_of("deepseek")
    model.set_attn_implementation("tikv")
    results = model.generate_batch([[3, 4]], generation_config=greedy(), continuous_batching_config=config())
    assert all("keys are (2, 48)" in result.error for result in results.values())
