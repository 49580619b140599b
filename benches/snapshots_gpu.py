"""`TikvCache.snapshot()` and `restore()` of models whose layers keep a state, beside torch's copies of the states.

    python benches/snapshots_gpu.py            # 8 texts, 24 layers of 2,048 in bfloat16
    python benches/snapshots_gpu.py --small    # tiny models, on a CPU too, to see that it works

Full layers are not copied, so their length does not count; they hold `--prompt` tokens (1,024). A time is that of the
host until the device has done everything: the median of 21 calls.
"""

import argparse
import statistics
import time

import captured_states_gpu
import environment
import torch
import transformers
from gpu import Table, ratio

from tikv.integrations.transformers import TikvCache

TEXTS, CALLS = 8, 21


def milliseconds(call, on_gpu):
    """Of a call until the device has done everything."""
    wait, times = torch.cuda.synchronize if on_gpu else lambda: None, []
    for _ in range(CALLS):
        wait()
        start = time.perf_counter()
        kept = call()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
        del kept
    return statistics.median(times)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that the cache holds (%(default)s)")
    options = parser.parse_args()
    if not options.small and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU was found; --small runs tiny models on the CPU")
    device, dtype = ("cpu", torch.float32) if options.small else ("cuda", torch.bfloat16)
    print(environment.line(environment.environment([device])), flush=True)
    table = Table("family", "states, MB", "snapshot, ms", "clones, ms", "ratio", "restore, ms", "copies, ms", "ratio")
    for family, config in captured_states_gpu.configurations(options.small).items():
        with table.attempt(family), torch.no_grad():
            with torch.device(device):
                model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
            model.set_attn_implementation("tikv")
            length = 64 if options.small else options.prompt
            cache = TikvCache(model.config, max_cache_len=length + 8)
            ids = torch.randint(2, 200, (TEXTS, length), device=device)
            model(ids, **{captured_states_gpu.whole_model.CACHE: cache}, use_cache=True, logits_to_keep=1)
            states = [state for layer in cache.layers if hasattr(layer, "states") for state in layer.states()]
            snapshot, clones = cache.snapshot(), [state.clone() for state in states]
            on_gpu = device == "cuda"
            taken, cloned = (
                milliseconds(cache.snapshot, on_gpu),
                milliseconds(lambda states=states: [state.clone() for state in states], on_gpu),
            )
            restored = milliseconds(lambda cache=cache, snapshot=snapshot: cache.restore(snapshot), on_gpu)
            copied = milliseconds(
                lambda states=states, clones=clones: [a.copy_(b) for a, b in zip(states, clones, strict=True)], on_gpu
            )
            size = sum(state.nbytes for state in states) / 1e6
            table.row(family, size, taken, cloned, ratio(taken, cloned), restored, copied, ratio(restored, copied))


if __name__ == "__main__":
    main()
