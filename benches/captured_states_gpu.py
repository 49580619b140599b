"""`generate` of models whose layers keep a state: eager steps, and steps captured with `custom_generate=captured`.

    python benches/captured_states_gpu.py            # a text of 4,096 tokens, 24 layers of 2,048 in bfloat16
    python benches/captured_states_gpu.py --small    # tiny models, on a CPU too, to see that it works

The models have random weights and a `TikvCache` with `max_cache_len=`. A token's time is the difference of two calls
that write 9 and 73 tokens, divided by 64, each the fastest of three, without the capture. Layers with a state run by
transformers' code in torch if the packages with kernels for them are not installed.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

import environment
import torch
import transformers
from gpu import Table, ratio

from tikv.integrations.transformers import TikvCache, captured

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import whole_model

SHORT, LONG = 9, 73
WAYS = {"eager": {"disable_compile": True}, "captured": {"custom_generate": captured}}


def configurations(small):
    """A configuration of each family, by its name."""
    hidden, layers, heads, kv_heads, width = (64, 4, 4, 2, 16) if small else (2048, 24, 16, 4, 128)
    size = {
        "vocab_size": 256 if small else 32000,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    linear = {
        "linear_num_value_heads": 4 if small else 32,
        "linear_num_key_heads": 2 if small else 16,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "num_experts": 0,
        "mlp_only_layers": list(range(layers)),
    }
    scan = {
        "mamba_d_ssm": hidden,
        "mamba_n_heads": 4 if small else 32,
        "mamba_d_head": 16 if small else 64,
        "mamba_d_state": width,
    }
    return {
        "Qwen3-Next": transformers.Qwen3NextConfig(**size, head_dim=width, **linear),
        "FalconH1": transformers.FalconH1Config(**size, head_dim=width, **scan),
        "LFM2": transformers.Lfm2Config(**size, layer_types=["conv", "conv", "conv", "full_attention"] * (layers // 4)),
    }


def write(model, ids, tokens, how):
    """(seconds, the text) of a call with a new cache."""
    cache = TikvCache(model.config, max_cache_len=ids.shape[1] + 2 * LONG)
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    text = model.generate(ids, **{whole_model.CACHE: cache}, max_new_tokens=tokens, do_sample=False, **how)
    wait()
    return time.perf_counter() - start, text


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    small = parser.parse_args().small
    if not small and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU was found; --small runs tiny models on the CPU")
    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    print(environment.line(environment.environment([device])), flush=True)
    table = Table("family", "eager, ms", "captured, ms", "captured / eager", "same text")
    for family, config in configurations(small).items():
        with table.attempt(family):
            torch.manual_seed(0)
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
            model.set_attn_implementation("tikv")
            ids = torch.randint(2, 200, (1, 64 if small else 4096), device=device)
            token, text = {}, {}
            for way, how in WAYS.items():
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", "TikvCache")  # a step that is not captured
                    for _ in range(2):
                        write(model, ids, 12, how)
                    short, long = (min(write(model, ids, n, how)[0] for _ in range(3)) for n in (SHORT, LONG))
                    token[way], text[way] = (long - short) / (LONG - SHORT) * 1e3, write(model, ids, 32, how)[1]
            same = "yes" if torch.equal(text["eager"], text["captured"]) else "no"
            table.row(family, token["eager"], token["captured"], ratio(token["captured"], token["eager"]), same)


if __name__ == "__main__":
    main()
