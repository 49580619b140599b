"""A small random Llama cut over the processes by transformers, writing with a `TikvCache`; see test_transformers_tp.py.

python -m torch.distributed.run --standalone --nproc-per-node 2 parallel_llama.py FOLDER [cuda], with tests/ on the path
"""

import importlib.util
import os
import sys

import torch
import torch.distributed as dist
import transformers
from model_cache import given
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import tikv
from tikv.integrations.transformers import TikvCache
from tikv.integrations.transformers.batching.managers import FIRST
from tikv.integrations.transformers.versions.installed import VERSION

CONFIG = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "pad_token_id": 0, "max_position_embeddings": 64,
}  # fmt: skip
PROMPTS = [[5, 9, 2, 33, 4], [7, 8, 60, 3, 2, 11, 12, 13, 14], [90, 2]]


def written(model, cache):
    prompt = torch.arange(3, 15, device=model.device)[None]
    found = model.generate(prompt, **given(cache), max_new_tokens=16, do_sample=False)
    return found[0].tolist()


def alone_after(model, prompt):
    ids = torch.tensor([prompt], device=model.device)
    text = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return text[0, len(prompt) :].tolist()


def batched(model, graphs):
    """The texts of `generate_batch`, where this version of transformers cuts it over processes; else None."""
    if VERSION < FIRST or importlib.util.find_spec("transformers.generation.continuous_batching.distributed") is None:
        return None
    generation = GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(
        num_blocks=32, max_batch_tokens=32, use_cuda_graph=graphs, use_async_batching=graphs
    )
    results = model.generate_batch(PROMPTS, generation_config=generation, continuous_batching_config=config)
    if failed := [each.error for each in results.values() if each.error]:
        raise RuntimeError(failed)
    return [each.generated_tokens for each in results.values()]


def main(folder, arch="cpu"):
    torch.set_num_threads(1)
    if arch == "cpu":
        tikv.init(arch="cpu", cpu_max_num_threads=1)
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        tikv.init(arch=arch)
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    dist.barrier()
    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if arch != "cpu":
        whole.to("cuda")
    alone = written(whole, None)
    cut = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    for attention in ("sdpa", "tikv"):
        cut.set_attn_implementation(attention)
        cache = TikvCache(cut.config)
        assert written(cut, cache) == alone, (attention, written(cut, TikvCache(cut.config)), alone)
        heads = cache.layers[0].keys.shape[1]
        assert heads == CONFIG["num_key_value_heads"] // dist.get_world_size(), heads
    want = [alone_after(whole, prompt) for prompt in PROMPTS]
    for graphs in (False, True)[: 1 + (arch != "cpu")]:
        texts = batched(cut, graphs)
        assert texts in (None, want), (texts, want, graphs)
    if dist.get_rank() == 0:
        print("the same text")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
