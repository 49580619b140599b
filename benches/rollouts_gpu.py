"""transformers' continuous batching on a GPU: whole calls of `generate_batch`, decode steps and prompts.

    python benches/rollouts_gpu.py            a Llama of 16 layers of 2048 in bfloat16 with random weights, two minutes
    python benches/rollouts_gpu.py --small    tiny sizes, on a CPU too, to see that it works

A step is what each further token of all sequences takes: the difference of two calls with different numbers of new
tokens. Prompts are 64 of 1,024 tokens with one new token each, beside the model's own forward pass over 8 x 8,192.
"""

import argparse
import time

import torch
import transformers
from transformers.generation.continuous_batching import continuous_api

from tikv.integrations.transformers import pages

FORMS = {"sdpa": {}, "tikv": {}, "tikv, int8": {"dtype": "int8"}}


class Clock:
    """Seconds that managers of continuous batching spend in their loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("prepare_next_batch", "update_batch", "_generation_step"):
            self._watch(continuous_api.ContinuousBatchProcessor, name)

    def _watch(self, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, watched)


class Bench:
    """A model, and prompts for it."""

    def __init__(self, small: bool) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        wide = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
        tiny = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        few = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
        sizes = {**tiny, **few} if small else {**wide, **heads}
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=65536, pad_token_id=0, eos_token_id=None)
        with torch.device(self.device):
            model = transformers.LlamaForCausalLM(config).eval()
        self.model = model if self.device == "cpu" else model.to(torch.bfloat16)
        self.small, self.drawn = small, torch.Generator().manual_seed(1)

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        """Random prompts of these lengths."""
        most = self.model.config.vocab_size
        return [torch.randint(5, most, (n,), generator=self.drawn).tolist() for n in lengths]

    def mixed(self, count: int) -> list[list[int]]:
        """Prompts of 128 to 1,023 tokens."""
        least, most = (8, 64) if self.small else (128, 1024)
        return self.prompts(torch.randint(least, most, (count,), generator=self.drawn).tolist())

    def call(self, inputs: list[list[int]], tokens: int, form: str) -> float:
        """Seconds of a whole `generate_batch`."""
        self.model.set_attn_implementation(form.partition(",")[0])
        greedy = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = {"num_blocks": 8 * len(inputs), "max_batch_tokens": 256} if self.small else {"max_memory_percent": 0.4}
        config = transformers.ContinuousBatchingConfig(**room, auto_switch_to_flash=False)
        start = time.perf_counter()
        with pages(**FORMS[form]):
            results = self.model.generate_batch(
                inputs, generation_config=greedy, continuous_batching_config=config, progress_bar=False
            )
        seconds = time.perf_counter() - start
        errors = [result.error for result in results.values() if result.error]
        assert not errors, errors[0]
        return seconds

    def steps(self, form: str, count: int, few: int, many: int) -> None:
        """Print the first call, a later one, and what each further token takes."""
        inputs = self.mixed(count)
        first = self.call(inputs, few, form)
        warm, long = self.call(inputs, few, form), self.call(inputs, many, form)
        step = (long - warm) / (many - few)
        print(
            f"{form}, {count} sequences: the first call of {few} new tokens {first:.2f} s, a later one {warm:.2f} s; "
            f"{step * 1e3:.2f} ms a step, {count / step:,.0f} tokens/s",
            flush=True,
        )

    def prompt_rate(self, clock: Clock) -> None:
        """Print tokens a second of prompts: in batches, and by the model alone."""
        length, count = (32, 8) if self.small else (1024, 64)
        for name, graphs in (("with graphs", None), ("without graphs for prompts", (False, True))):
            inputs, clock.seconds = self.prompts([length] * count), 0.0
            self.model.set_attn_implementation("tikv")
            room = {"num_blocks": 8 * count, "max_batch_tokens": 256} if self.small else {"max_memory_percent": 0.4}
            one = transformers.GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
            config = transformers.ContinuousBatchingConfig(**room, use_cuda_graph=graphs)
            self.model.generate_batch(inputs, generation_config=one, continuous_batching_config=config)
            print(f"prompts {name}: {length * count / clock.seconds:,.0f} tokens/s", flush=True)
        shape = (2, 64) if self.small else (8, 8192)
        ids = torch.randint(5, self.model.config.vocab_size, shape, device=self.device)
        seconds = []
        with torch.no_grad():
            for _ in range(4):
                start = time.perf_counter()
                float(self.model(ids, logits_to_keep=1, use_cache=True).logits.sum())  # it waits
                seconds.append(time.perf_counter() - start)
        print(f"prompts of {shape[0]} x {shape[1]} by the model alone: {ids.numel() / min(seconds):,.0f} tokens/s")


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    bench = Bench(parser.parse_args().small)
    clock = Clock()
    small = bench.small
    bench.steps("tikv", *((4, 2, 4) if small else (64, 128, 512)))
    bench.prompt_rate(clock)
    for form in ("tikv", "tikv, int8"):
        bench.steps(form, *((8, 2, 4) if small else (256, 32, 160)))
    bench.steps("sdpa", *((4, 2, 4) if small else (64, 4, 24)))


if __name__ == "__main__":
    main()
