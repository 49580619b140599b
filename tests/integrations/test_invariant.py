"""Models of transformers under ``tikv.init(invariant=True)``: attention "tikv" reads prompts, with the same bits."""

import numpy as np
import pytest
from invariance import invariant, same

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from model_cache import given  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from tikv.integrations.transformers import TikvCache  # noqa: E402
from tikv.integrations.transformers.attention.attend import attend  # noqa: E402
from tikv.integrations.transformers.attention.trained import Read, TrainedAttention  # noqa: E402
from tikv.integrations.transformers.batching.managers import FIRST  # noqa: E402
from tikv.integrations.transformers.memory import stored_ops  # noqa: E402
from tikv.integrations.transformers.versions.installed import VERSION  # noqa: E402
from tikv.ops.attention.request import AttendRequest  # noqa: E402

pytestmark = [pytest.mark.archs("cpu", "cuda"), pytest.mark.filterwarnings("default")]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def model(arch):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)).to(arch).eval()


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 40}, {"dtype": "q8_0"}], ids=["grows", "fixed", "codes"])
def test_torch_attends_to_no_prompt(arch, model, monkeypatch, options):
    """A prompt, a second chunk of it and a token."""
    if options.get("dtype") and model.config.head_dim % 32:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"head_dim": 32}, **HEADS)).to(arch)
    ids = torch.randint(2, 97, (2, 18), generator=torch.Generator().manual_seed(1)).to(arch)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
        model.set_attn_implementation("tikv")

        def refuse(*arguments, **options):
            raise AssertionError("torch attends")

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)
        with invariant():
            cache, found = TikvCache(model.config, **options), []
            for first, end in ((0, 12), (12, 17), (17, 18)):
                found.append(model(ids[:, first:end], past_key_values=cache).logits)
    tolerance = 0.1 if options.get("dtype") else 1e-4
    np.testing.assert_allclose(torch.cat(found, 1).cpu(), want.cpu(), atol=tolerance)


def test_chunks_of_a_prompt_and_compiled_steps(arch, model, rng):
    """The function that models call, and the operator of a compiled step."""
    module = model.model.layers[0].self_attn
    q, k, v = (torch.from_numpy(rng.standard_normal((2, h, 40, 8)).astype(np.float32)).to(arch) for h in (4, 2, 2))
    with invariant(128), torch.no_grad():
        whole = attend(module, q, k, v, None)[0]
        for first, end in ((0, 25), (25, 40), (39, 40)):
            part = attend(module, q[:, :, first:end], k[:, :, :end], v[:, :, :end], None)[0]
            same(part, whole[:, first:end])
        lens = torch.tensor([40, 31], dtype=torch.int32, device=arch)
        asked = torch.stack([q[0, :, 39], q[1, :, 30]])[:, :, None]
        step = stored_ops.attend_stored(asked, k, v, None, None, lens, None, None, None, 8, "", "")
        same(step[:, :, 0], torch.stack([whole[0, 39], whole[1, 30]]))


class RowByRow(torch.nn.Module):
    """A layer that takes one row of numbers at a time, so that its bits do not depend on how many there are."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        rows = [self.layer(row[None]) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)


def row_by_row(model):
    """The model, with each layer but attention taken one row at a time."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            inside = isinstance(module, RowByRow) or type(module).__name__.endswith("MLP")
            if not inside and type(child).__name__.endswith(("MLP", "RMSNorm", "Linear")):
                setattr(module, name, RowByRow(child))
    return model


def trained_model(kind, arch):
    """A tiny model without windows: of sliding layers a cache keeps the newest tokens, and parts begin elsewhere."""
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM, transformers.LlamaConfig, {}
    full = {"layer_types": ["full_attention"] * 2}
    gemma = transformers.Gemma2ForCausalLM, transformers.Gemma2Config, full | {"attn_logit_softcapping": 5.0}
    of, config, options = gemma if kind == "softcap" else llama
    return row_by_row(of(config(**SIZES, **HEADS, **options)).to(arch).eval())


@pytest.mark.parametrize("kind", ["llama", "softcap"])
def test_a_training_step_has_the_bits_of_generating(arch, kind):
    """As in GRPO: the log-probabilities of a text that was generated, and of the training step over it."""
    model = trained_model(kind, arch)
    ids = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(1)).to(arch)
    model.set_attn_implementation("tikv")
    with invariant(8):
        options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        text = model.generate(ids, **given(TikvCache(model.config)), **options)
        model.train()
        logits = model(text.sequences, use_cache=False).logits
        assert logits.requires_grad
        same(logits[:, 10:-1].detach(), torch.stack(text.logits, 1))
        log_probs = torch.log_softmax(logits[:, 10:-1], -1).gather(2, text.sequences[:, 11:, None])
        log_probs.sum().backward()
    got = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = None
    model.double().set_attn_implementation("eager")
    want = torch.log_softmax(model(text.sequences, use_cache=False).logits[:, 10:-1], -1)
    want.gather(2, text.sequences[:, 11:, None]).sum().backward()
    for a, p in zip(got, model.parameters(), strict=True):
        np.testing.assert_allclose(a.cpu(), p.grad.cpu(), rtol=1e-3, atol=1e-5 * p.grad.abs().max().item())


def test_continuous_batching_has_the_bits_of_a_training_step(arch):
    """Each row of logits of the training step is one that the batches computed, bit for bit."""
    if VERSION < FIRST:
        pytest.skip("this version's continuous batching is refused")
    model, rows = trained_model("llama", arch), set()
    model.set_attn_implementation("tikv")
    hook = model.lm_head.register_forward_hook(
        lambda module, args, logits: rows.update(row.numpy().tobytes() for row in logits.cpu().reshape(-1, 97))
    )
    prompts = [[5, 9, 2, 33, 4], [7, 8, 60, 3, 2, 11, 12, 13, 14], [90, 2]]
    with invariant(8):
        options = transformers.GenerationConfig(max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
        seen = transformers.ContinuousBatchingConfig(
            num_blocks=64, use_cuda_graph=False
        )  # no hook is called by a graph
        batch = model.generate_batch(prompts, generation_config=options, continuous_batching_config=seen)
        hook.remove()
        assert len(rows) >= 27
        model.train()
        for request in batch.values():
            ids = torch.tensor([[*request.prompt_ids, *request.generated_tokens]]).to(arch)
            logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
            assert logits.requires_grad
            assert len(logits) == 9
            assert [row.numpy().tobytes() in rows for row in logits.detach().cpu()] == [True] * 9


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("tokens", [1, 6, 20])
def test_gradients_of_a_training_step_are_those_of_float64(arch, rng, tokens, window, softcap):
    shapes = [(2, 4, tokens, 8), (2, 2, 20, 8), (2, 2, 20, 16), (4,)]
    given_arrays = [torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(arch) for shape in shapes]
    weights = torch.from_numpy(rng.standard_normal((2, 4, tokens, 16))).to(arch)
    found, want = ([a.clone().to(dtype).requires_grad_() for a in given_arrays] for dtype in (None, torch.float64))
    request = AttendRequest(scale=0.3, softcap=softcap, window=window)
    with invariant(8):
        out = TrainedAttention.apply(*found, Read(request))
    (out.double() * weights).sum().backward()
    q, k, v, sinks = want
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(20, device=arch)[None] - torch.arange(20 - tokens, 20, device=arch)[:, None]
    hidden = (ahead > 0) | (ahead <= -(window or 99))
    scores = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks[None, :, None, None].expand(2, 4, tokens, 1)], -1)
    exact = torch.softmax(scores, -1)[..., :20] @ v.repeat_interleave(2, 1)
    (exact * weights).sum().backward()
    np.testing.assert_allclose(out.detach().cpu(), exact.detach().cpu(), rtol=1e-5, atol=1e-5)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a.grad.cpu(), b.grad.cpu(), rtol=1e-5, atol=1e-5 * b.grad.abs().max().item())
