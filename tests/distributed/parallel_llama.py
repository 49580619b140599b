"""A small random Llama cut over the processes by transformers, writing with a `TikvCache`; see test_transformers_tp.py.

python -m torch.distributed.run --standalone --nproc-per-node 2 parallel_llama.py FOLDER, with tests/ on the path
"""

import sys

import torch
import torch.distributed as dist
from model_cache import given
from transformers import LlamaConfig, LlamaForCausalLM

import tikv
from tikv.integrations.transformers import TikvCache

CONFIG = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip


def written(model, cache):
    prompt = torch.arange(3, 15)[None]
    found = model.generate(prompt, **given(cache), max_new_tokens=16, do_sample=False)
    return found[0].tolist()


def main(folder):
    torch.set_num_threads(1)
    tikv.init(arch="cpu", cpu_max_num_threads=1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    dist.barrier()
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    alone = written(whole, None)
    cut = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    for attention in ("sdpa", "tikv"):
        cut.set_attn_implementation(attention)
        cache = TikvCache(cut.config)
        assert written(cut, cache) == alone, (attention, written(cut, TikvCache(cut.config)), alone)
        heads = cache.layers[0].keys.shape[1]
        assert heads == CONFIG["num_key_value_heads"] // dist.get_world_size(), heads
    if dist.get_rank() == 0:
        print("the same text")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
