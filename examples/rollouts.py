"""Many prompts at once with transformers' own scheduler: tokens a second with sdpa, "tikv", and pages of int8.

    python examples/rollouts.py                            a small Llama with random weights and 32 prompts, in a minute
    python examples/rollouts.py --prompts 256 --tokens 128
    python examples/rollouts.py --sample                   also texts that are drawn, not only the most probable ones
    python examples/rollouts.py path/to/checkpoint         any causal model on disk

`generate_batch` serves prompts of different lengths together. With "sdpa", transformers gathers the keys of all
requests in each step, and masks those of the other requests. With "tikv", attention reads each request's pages where
they lie. The columns:

    first call     seconds of the first `generate_batch`, compiling included
    later          seconds of the fastest of the later ones
    tokens/s       new tokens a second in that call
    as generate    how many texts equal those that `generate` writes one by one; drawn texts are not compared

With float32, all texts should be the same, except with int8. With bfloat16 some differ, where two tokens are nearly
equally likely.
"""

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable

from tikv import extras

try:
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from tikv.integrations.transformers import pages  # which also registers attention "tikv"
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error, 'transformers')}")

ATTENTIONS = ("sdpa", "tikv", "tikv_int8")  # the last one with pages of int8
PAGE = 256  # tokens of a page
BATCH = 512  # tokens of a step


@dataclasses.dataclass
class Row:
    """What was measured with one attention."""

    attention: str
    drawn: bool
    seconds: list[float]  # of each call
    tokens: int
    equal: str = "-"


def model_of(path: str | None, device: str) -> transformers.PreTrainedModel:
    """The checkpoint, or a small Llama with random weights."""
    if path is not None:
        return transformers.AutoModelForCausalLM.from_pretrained(path).to(device).eval()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device).eval()


def prompts_of(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Random prompts of different lengths."""
    drawn = random.Random(1)
    lengths = [drawn.randint(max(1, longest // 8), longest) for _ in range(count)]
    return [[drawn.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


def one_by_one(
    model: transformers.PreTrainedModel, prompts: list[list[int]], config: object, step: Callable[[str], None]
) -> list[list[int]]:
    """The texts of `generate`."""
    model.set_attn_implementation("sdpa")
    texts = []
    for prompt in prompts:
        step("generate, one by one")
        ids = torch.tensor([prompt], device=model.device)
        texts.append(model.generate(ids, generation_config=config)[0, len(prompt) :].tolist())
    return texts


def measure(
    model: transformers.PreTrainedModel, attention: str, prompts: list[list[int]], config: object, rounds: int,
    step: Callable[[str], None],
) -> tuple[Row, list[list[int]]]:  # fmt: skip
    """A row of the table, and the texts of the last call."""
    name, _, dtype = attention.partition("_")
    model.set_attn_implementation(name)
    blocks = sum(-(-(len(prompt) + config.max_new_tokens) // PAGE) for prompt in prompts)
    # The same memory for each attention; by itself, transformers gives sdpa less, since masks need some.
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=blocks + 8, page_size=PAGE, max_batch_tokens=BATCH, auto_switch_to_flash=False
    )
    seconds, texts = [], []
    for _ in range(rounds + 1):
        step(attention)
        start = time.perf_counter()
        with pages(dtype=dtype or None):
            results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        seconds.append(time.perf_counter() - start)
        errors = [result.error for result in results.values() if result.error]
        if errors:
            sys.exit(f"{attention}: {errors[0]}")
        by_prompt = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
        texts = [by_prompt[tuple(prompt)] for prompt in prompts]
    return Row(attention, bool(config.do_sample), seconds, sum(map(len, texts))), texts


def table(rows: list[Row]) -> list[str]:
    """The lines of the table."""
    lines = [f"{'attention':14}{'first call':>12}{'later':>10}{'tokens/s':>10}{'as generate':>14}"]
    for row in rows:
        name, least = row.attention + (", drawn" if row.drawn else ""), min(row.seconds[1:])
        lines.append(f"{name:14}{row.seconds[0]:>10.2f} s{least:>8.2f} s{row.tokens / least:>10,.0f}{row.equal:>14}")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a folder with a model of transformers")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each text")
    parser.add_argument("--rounds", type=int, default=1, help="calls after the first one")
    parser.add_argument("--sample", action="store_true", help="also measure texts that are drawn")
    parser.add_argument("--attention", nargs="+", default=list(ATTENTIONS), help="names of attention to compare")
    given = parser.parse_args()
    if min(given.prompts, given.longest, given.tokens, given.rounds) < 1:
        parser.error("--prompts, --longest, --tokens and --rounds must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(given.checkpoint, device)
    prompts = prompts_of(given.prompts, given.longest, model.config.get_text_config().vocab_size)
    options = {"max_new_tokens": given.tokens, "pad_token_id": 0}
    kinds = (False, True)[: 1 + given.sample]  # of texts: the most probable ones, and drawn ones
    calls = len(prompts) + len(kinds) * len(given.attention) * (given.rounds + 1)
    rows = []
    columns = TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=calls, completed=-1)

        def step(name: str) -> None:
            progress.update(bar, description=name, advance=1)

        texts = one_by_one(model, prompts, transformers.GenerationConfig(do_sample=False, **options), step)
        for drawn in kinds:
            config = transformers.GenerationConfig(do_sample=drawn, eos_token_id=-1, **options)  # no text ends early
            for attention in given.attention:
                row, batched = measure(model, attention, prompts, config, given.rounds, step)
                if not drawn:
                    row.equal = f"{sum(map(list.__eq__, batched, texts))} of {len(texts)}"
                rows.append(row)
    print(f"{given.prompts} prompts of up to {given.longest} tokens, {given.tokens} new tokens each, {model.dtype}")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
