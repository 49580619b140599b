"""`generate` with `custom_generate=captured` on an NVIDIA GPU, beside transformers' compiled StaticCache.

    python benches/captured_gpu.py short      # a text of 4,096 tokens
    python benches/captured_gpu.py long       # 8 texts of 16,384 tokens
    python benches/captured_gpu.py prompt     # the prompt of a text of 4,096 tokens, three rounds of each cache
    python benches/captured_gpu.py first      # the first answer of a new process on a machine that has compiled nothing

The model is that of examples/whole_model.py: 16 layers of 2,048, 32 query heads, 8 KV heads of 128, bfloat16, random
weights. A call writes 32 tokens from a new cache, greedily. "a token" is the time of the 31 after the first, with the
capture of each new cache; "later" that of the 32 after them. "compiled" says that torch.compile's forward is inside the
graph (`compile=True`).
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time

import environment
import torch
import transformers
from gpu import COMPILED, Table, printed_by, ratio

from tikv.integrations.transformers import TikvCache, captured

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
import whole_model

TOKENS, ROUNDS, WINDOW = 32, 3, 1024
SIZES = {"short": (1, 4096), "long": (8, 16384), "prompt": (1, 4096), "first": (1, 4096)}
DYNAMIC, STATIC = "DynamicCache", "StaticCache, compiled"
WAYS = {  # what the cache is; whether steps are captured, and with a compiled forward
    DYNAMIC: (None, None),
    STATIC: ("static", None),
    "TikvCache, compiled by generate": ({"max_cache_len": None}, None),
    "captured": ({"max_cache_len": None}, False),
    "captured, int8": ({"max_cache_len": None, "dtype": "int8"}, False),
    "captured, 4 bits": ({"max_cache_len": None, "dtype": whole_model.FORMATS["4 bits"]}, False),
    f"captured, window {WINDOW:,}": ({"window": WINDOW, "sinks": 4}, False),
    "captured, compiled": ({"max_cache_len": None}, True),
    "captured, compiled, int8": ({"max_cache_len": None, "dtype": "int8"}, True),
    "captured, compiled, 4 bits": ({"max_cache_len": None, "dtype": whole_model.FORMATS["4 bits"]}, True),
}
PROMPTS = {  # caches whose prompts are timed
    DYNAMIC: None,
    "TikvCache, fixed memory": {"max_cache_len": None},
    "TikvCache, int8": {"max_cache_len": None, "dtype": "int8"},
    f"TikvCache, window {WINDOW:,}": {"window": WINDOW, "sinks": 4},
}
FIRST = (DYNAMIC, "captured", "captured, int8")


class Texts:
    """A model and the prompts from which it writes."""

    def __init__(self, what, small):
        size = "small" if small else "large"
        batch, prompt = (1, 24) if small else SIZES[what]
        self.device = "cpu" if small else "cuda"
        self.model = whole_model.model_of(size, self.device, torch.float32 if small else torch.bfloat16)
        self.ids = torch.randint(5, self.model.config.vocab_size, (batch, prompt), device=self.device)
        self.most = prompt + 2 * TOKENS + 8

    def cache(self, options):
        """A new cache, and the attention that the model then has."""
        config = self.model.config
        if options is None:
            return transformers.DynamicCache(config=config), "sdpa"
        if options == "static":
            return transformers.StaticCache(config=config, max_cache_len=self.most), "sdpa"
        if "max_cache_len" in options:
            options = {**options, "max_cache_len": self.most}
        return TikvCache(config, **options), "tikv"

    def wait(self):
        """Until the device has done everything."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def write(self, way, tokens):
        """(seconds, the text)."""
        options, compiled = WAYS[way]
        cache, attention = self.cache(options)
        self.model.set_attn_implementation(attention)
        how = {} if compiled is None else {"custom_generate": captured.with_options(compile=compiled)}
        self.wait()
        start = time.perf_counter()
        text = self.model.generate(
            self.ids, **{whole_model.CACHE: cache}, max_new_tokens=tokens, do_sample=False, eos_token_id=None, **how
        )
        self.wait()
        return time.perf_counter() - start, text[:, self.ids.shape[1] :]

    def prompt(self, options):
        """Seconds of a forward of the whole prompt into a new cache."""
        self.wait()
        start = time.perf_counter()
        cache, attention = self.cache(options)
        if self.model.config._attn_implementation != attention:
            self.model.set_attn_implementation(attention)
            return self.prompt(options)
        with torch.no_grad():
            self.model(self.ids, **{whole_model.CACHE: cache}, use_cache=True, logits_to_keep=1)
        self.wait()
        return time.perf_counter() - start


def steps(texts, rounds, names):
    """The table of whole calls."""
    table = Table(
        "cache",
        "first call, s",
        "prompt, ms",
        "a token, ms",
        "times StaticCache's",
        "later, ms",
        "tokens as DynamicCache",
    )
    _, like = texts.write(DYNAMIC, TOKENS)
    of_static = ""
    for way in names:
        with table.attempt(way):
            gc.collect()
            first, text = texts.write(way, TOKENS)
            texts.write(way, TOKENS)
            times = [[texts.write(way, n)[0] for n in (1, TOKENS, 2 * TOKENS)] for _ in range(rounds)]
            prompt, one, two = (statistics.median(column) for column in zip(*times, strict=True))
            token, later = 1e3 * (one - prompt) / (TOKENS - 1), 1e3 * (two - one) / TOKENS
            of_static = token if way == STATIC else of_static
            same = f"{whole_model.same(text, like)} of {TOKENS}"
            table.row(way, first, 1e3 * prompt, token, ratio(token, of_static), later, same)


def prompts(texts, rounds):
    """The table of prompts; caches alternate."""
    table = Table("cache", *(f"round {i + 1}, ms" for i in range(rounds)), "times DynamicCache's (each round)")
    for options in PROMPTS.values():
        for _ in range(3):
            texts.prompt(options)
    times = {name: [] for name in PROMPTS}
    for _ in range(rounds):
        for name, options in PROMPTS.items():
            times[name].append(1e3 * statistics.median(texts.prompt(options) for _ in range(5)))
    for name, row in times.items():
        each = ", ".join(ratio(a, b) for a, b in zip(row, times[DYNAMIC], strict=True))
        table.row(name, *row, each)


def first_answers(small):
    """The table of first answers: of a process that finds nothing compiled, and of a second one after it.

    A process before all others, which is not shown, reads the libraries' files from disk for the first time.
    """
    table = Table(
        "cache",
        "first answer, s",
        "more than DynamicCache's, s",
        "in a second process, s",
        "more than DynamicCache's there, s",
        "a later answer, s",
    )
    command = [__file__, "first", *(["--small"] if small else []), "--way"]
    with table.attempt(DYNAMIC):
        printed_by([*command, DYNAMIC], COMPILED)
    of_dynamic = None
    for way in FIRST:
        with table.attempt(way), tempfile.TemporaryDirectory() as folder:
            printed = [printed_by([*command, way], COMPILED, folder) for _ in range(2)]
            (first, _), (second, later) = (json.loads(text.strip().splitlines()[-1]) for text in printed)
            of_dynamic = of_dynamic or (first, second)
            table.row(way, first, first - of_dynamic[0], second, second - of_dynamic[1], later)


def answer_of(way, small):
    """Print the seconds of a process's first answer and of its next."""
    texts = Texts("first", small)
    texts.wait()
    print(json.dumps([texts.write(way, TOKENS)[0] for _ in range(2)]))


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=SIZES)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--rows", nargs="+", choices=WAYS, help="rows beside DynamicCache (all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of timed calls (%(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.small and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU was found; --small runs a small model on the CPU")
    if given.way:
        answer_of(given.way, given.small)
        return
    print(environment.line(environment.environment(["cpu" if given.small else "cuda"])), flush=True)
    if given.what == "first":
        first_answers(given.small)
        return
    texts, rounds = Texts(given.what, given.small), 1 if given.small else given.rounds
    if given.what == "prompt":
        prompts(texts, rounds)
        return
    names = given.rows or list(WAYS)
    if given.small:
        names = [
            name for name in names if name not in (STATIC, "TikvCache, compiled by generate") and not WAYS[name][1]
        ]
    steps(texts, rounds, names)


if __name__ == "__main__":
    main()
