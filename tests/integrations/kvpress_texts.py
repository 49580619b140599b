"""What kvpress's methods leave of a `TikvCache` and of transformers' own cache, and the text that follows; as JSON.

python kvpress_texts.py ORDER [METHOD ...]: `tikv` or `kvpress` is imported first.
"""

import importlib
import json
import sys

import torch
import transformers

PROMPT, NEW = 301, 12
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


def methods(kvpress):
    return {
        "knorm": kvpress.KnormPress(0.5),
        "keydiff": kvpress.KeyDiffPress(0.6),
        "snapkv": kvpress.SnapKVPress(0.5, window_size=16),
        "tova": kvpress.TOVAPress(0.4),
        "expected": kvpress.ExpectedAttentionPress(0.5),
        "streaming": kvpress.StreamingLLMPress(0.7),
        "pyramid": kvpress.PyramidKVPress(0.5, window_size=16),
        "lag": kvpress.LagKVPress(0.5),
        "think": kvpress.ThinKPress(0.5, window_size=16),
        "chunks": kvpress.ChunkKVPress(kvpress.KnormPress(0.5)),
        "rerotated": kvpress.KeyRerotationPress(kvpress.KnormPress(0.5)),
        "by head": kvpress.AdaKVPress(kvpress.KnormPress(0.5)),
        "decoding": kvpress.DecodingPress(kvpress.KnormPress(), compression_interval=4, target_size=40),
    }


def text_after(model, press, cache, ids):
    """Tokens that follow a prompt whose keys `press` compressed."""
    found, start = [], ids.shape[1]
    with torch.no_grad(), press(model):
        logits = model(ids, past_key_values=cache).logits
        held = [layer.keys.shape[2] for layer in cache.layers]
        for i in range(NEW):
            found.append(logits[:, -1].argmax(-1))
            where = torch.full((1, 1), start + i)
            logits = model(
                found[-1][:, None], past_key_values=cache, position_ids=where, cache_position=where[0]
            ).logits
    return torch.stack(found, 1).tolist(), held


def main(order, names):
    first, second = ("tikv.integrations.transformers", "kvpress")[:: 1 if order == "tikv" else -1]
    importlib.import_module(first)
    importlib.import_module(second)
    kvpress, ours = sys.modules["kvpress"], sys.modules["tikv.integrations.transformers"]
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).eval()
    ids = torch.randint(2, 97, (1, PROMPT))
    report = []
    for name in names or methods(kvpress):
        for attention in ("sdpa", "tikv"):
            model.set_attn_implementation("sdpa")
            want = text_after(model, methods(kvpress)[name], transformers.DynamicCache(config=model.config), ids)
            model.set_attn_implementation(attention)
            cache = ours.TikvCache(model.config)
            got = text_after(model, methods(kvpress)[name], cache, ids)
            report.append([name, attention, got == want, want[1], [layer.store.capacity for layer in cache.layers]])
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
