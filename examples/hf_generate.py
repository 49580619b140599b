"""Generate with a Hugging Face model and tikv's cache, and check that the text is the same as with transformers' cache.

python examples/hf_generate.py                                   a tiny Llama with random weights
python examples/hf_generate.py path/to/checkpoint "Once upon"    any causal model on disk
"""

import argparse
import inspect
import sys
import time

from tikv import extras

try:
    import torch
    import transformers

    from tikv.integrations.transformers import TikvCache
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error, 'transformers')}")


# The argument has this name since transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"


def tiny_model():
    """A Llama that fits anywhere and says nothing."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)


def generate(model, ids, cache, tokens):
    """The new tokens, and the seconds that they took."""
    start = time.perf_counter()
    out = model.generate(ids, **{CACHE: cache}, max_new_tokens=tokens, do_sample=False)
    return out[0, ids.shape[1] :], time.perf_counter() - start


def main():
    """Generate twice, with either cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a folder with a causal model and its tokenizer")
    parser.add_argument("prompt", nargs="?", default="The key of a cache is", help="the beginning of the text")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to write (default %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16", "int8"),
        default=None,
        help="dtype in which K and V are stored (default: the model's)",
    )
    arguments = parser.parse_args()
    if arguments.tokens < 1:
        parser.error(f"--tokens {arguments.tokens}: must be at least 1")

    if arguments.checkpoint:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.checkpoint, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(arguments.checkpoint, local_files_only=True)
        except (OSError, ValueError) as error:
            parser.error(f"{arguments.checkpoint}: {error}")
        ids, text = tokenizer(arguments.prompt, return_tensors="pt").input_ids, tokenizer.decode
    else:
        model, ids = tiny_model(), torch.tensor([list(arguments.prompt.encode())])
        text = torch.Tensor.tolist
    model.eval()

    for cache in (transformers.DynamicCache(config=model.config), TikvCache(model.config, dtype=arguments.dtype)):
        generate(model, ids, cache, 4)  # what the first calls compile and allocate is not timed

    own, own_seconds = generate(model, ids, transformers.DynamicCache(config=model.config), arguments.tokens)
    cache = TikvCache(model.config, dtype=arguments.dtype)
    ours, seconds = generate(model, ids, cache, arguments.tokens)

    print(text(ours))
    print(f"same text as with transformers' own cache: {torch.equal(own, ours)}")
    print(f"seconds: {seconds:.2f} with TikvCache, {own_seconds:.2f} with DynamicCache")
    print(f"cached: {cache.get_seq_length()} tokens, {cache.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
