"""The cost of a cache in a whole `generate`: milliseconds per token, memory, and whether the text is the same.

    python examples/whole_model.py                                  a small Llama with random weights, in a minute
    python examples/whole_model.py --prompt 4096 --formats model int8
    python examples/whole_model.py --batch 8 --window 256           also a window of 256 tokens with 4 sinks
    python examples/whole_model.py --size medium                    8 layers 512 wide; the default on a GPU is
                                                                    "large", 16 layers 2,048 wide
    python examples/whole_model.py path/to/checkpoint               any causal model on disk
    python examples/whole_model.py --json runs.json                 also add the run to a file with earlier runs;
                                                                    benches/whole_models.py draws it

Each row is one cache: transformers' DynamicCache; on a GPU its StaticCache, which `generate` compiles; and TikvCache
with attention "tikv", in each format. `--caches` chooses rows. All write the same number of tokens from the same random
prompt, in alternation; the table has medians. The columns:

    first call     seconds of the first `generate`, compiling included
    prompt         milliseconds until the first token
    a token        milliseconds of each token after the first; on a GPU the second takes longer, since its step is
                   captured again for each new cache
    later          milliseconds of each token after the second, as in a long text
    peak           the most memory, without the model and what was in use before; on a CPU it is the memory of the
                   process, exact to a few megabytes, so small caches do not show
    cache          memory of keys, values and scales when the text is written
    as Dynamic     how many tokens equal those of DynamicCache, before the first difference
    as eager       the same, compared with this cache under torch's attention with nothing compiled

With float32, the whole text should be the same. With bfloat16 it may differ from a token on where two tokens are nearly
equally likely, and sooner with fewer bits. examples/formats.py measures the quality of each format.
"""

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import re
import statistics
import sys
import time
from pathlib import Path

import tikv
from tikv import extras

try:
    import torch
    import transformers

    from tikv.integrations.transformers import TikvCache
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error, 'transformers')}")

# The argument has this name since transformers 5.24.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
SIZES = {  # of the model; its prompt; dtype
    "small": ({"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "vocabulary": 4096}, 128, "float32"),
    "medium": ({"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "vocabulary": 4096}, 512, "float32"),
    "large": ({"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "vocabulary": 32000}, 4096, "bfloat16"),
}
FORMATS = {
    "model": None,
    "float16": "float16",
    "float8": "float8_e4m3fn",
    "int8": "int8",
    "q8_0": "q8_0",
    "4 bits": tikv.Quant(bits=4, group=32),
}
SINKS = 4
CACHES = {  # beside DynamicCache, to whose text all others are compared
    "static": "StaticCache, compiled",
    "tikv": "TikvCache",
    "window": "TikvCache with a window",
}
FORM = 1  # of the file; it grows when a reader of older ones would misread it


@dataclasses.dataclass
class Way:
    """A cache to be measured: `make` gives an empty one; `attention` and `eager` are how the model runs with it."""

    name: str
    make: object
    attention: str = "sdpa"
    eager: bool = False


@dataclasses.dataclass
class Row:
    """What was measured of it; None where this machine does not tell."""

    name: str
    first_call_s: float | None = None
    prompt_ms: float | None = None
    token_ms: float | None = None
    later_ms: float | None = None
    peak_mb: float | None = None
    cache_mb: float | None = None
    as_dynamic: int | None = None
    as_eager: int | None = None
    tokens: int = 0
    failed: str = ""


def model_of(size, device, dtype):
    """A Llama with random weights, so large that attention counts and the text does not repeat itself at once."""
    numbers = SIZES[size][0]
    config = transformers.LlamaConfig(
        vocab_size=numbers["vocabulary"],
        hidden_size=numbers["hidden"],
        intermediate_size=4 * numbers["hidden"],
        num_hidden_layers=numbers["layers"],
        num_attention_heads=numbers["heads"],
        num_key_value_heads=numbers["kv_heads"],
        head_dim=128 if size == "large" else 64,
        max_position_embeddings=131072,
        initializer_range=numbers["hidden"] ** -0.5,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


def ways_of(config, caches, names, most, window):
    """The rows of the table, in order: of TikvCache one for each format."""
    found = [Way("DynamicCache", lambda: transformers.DynamicCache(config=config))]
    if "static" in caches:
        found.append(Way(CACHES["static"], lambda: transformers.StaticCache(config=config, max_cache_len=most)))
    for name in names:
        dtype = FORMATS[name]
        title = "TikvCache" if dtype is None else f"TikvCache, {name}"
        made = {
            "tikv": (title, {"max_cache_len": most}),
            "window": (f"{title}, window {window:,}" if window else "", {"window": window, "sinks": SINKS}),
        }
        for title, options in (made[each] for each in made if each in caches):
            options["dtype"] = dtype
            found.append(Way(title, lambda options=options: TikvCache(config, **options), "tikv"))
    return found


class Memory:
    """How much memory is taken beyond what was there at `start`: of the GPU, or resident memory of a Linux process."""

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu
        self.before = 0

    def start(self):
        """From here on."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the highest so far
        self.before = self._status("VmRSS") or 0

    def peak(self):
        """Bytes, or None."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated() - self.before
        highest = self._status("VmHWM")
        return None if highest is None else max(0, highest - self.before)

    @staticmethod
    def _status(name):
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)


def bytes_of(cache):
    """Memory of keys, values and scales."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes
    arrays = [a for layer in cache.layers for a in (layer.keys, layer.values)]
    return sum(a.untyped_storage().nbytes() for a in arrays)


class SecondToken(transformers.StoppingCriteria):
    """Notes when the second token is there."""

    def __init__(self, wait):
        self.wait, self.tokens, self.at = wait, 0, None

    def __call__(self, input_ids, scores, **kwargs):
        """Never stop."""
        self.tokens += 1
        if self.tokens == 2:
            self.wait()
            self.at = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def generate(model, ids, way, tokens):
    """(the new tokens, seconds in all and after the second token, the cache)."""
    model.set_attn_implementation(way.attention)
    cache = way.make()
    options = {"disable_compile": True} if way.eager else {}
    wait = torch.cuda.synchronize if ids.is_cuda else lambda: None
    wait()
    second = SecondToken(wait)
    start = time.perf_counter()
    out = model.generate(
        ids, **{CACHE: cache}, max_new_tokens=tokens, do_sample=False, stopping_criteria=[second], **options
    )
    wait()
    end = time.perf_counter()
    return out[:, ids.shape[1] :], (end - start, end - (second.at or end)), cache


def same(text, other):
    """How many of the tokens, counted in the sequence where they are fewest, come before the first that differs."""
    alike = (text == other).int().cumprod(1)
    return int(alike.sum(1).min())


def measure(model, ids, ways, tokens, rounds, say):
    """A row for each way. Timed runs alternate, so that all meet the same machine."""
    rows, texts, times = [], {}, {}
    memory = Memory(ids.is_cuda)
    for way in ways:
        say(f"{way.name}: first call")
        row = Row(way.name, tokens=tokens)
        rows.append(row)
        try:
            if ids.is_cuda:
                torch._dynamo.reset()
            _, (row.first_call_s, _), _ = generate(model, ids, way, 4)
            memory.start()
            texts[way.name], _, cache = generate(model, ids, way, tokens)
            peak, row.cache_mb = memory.peak(), bytes_of(cache) / 1e6
            row.peak_mb = None if peak is None else peak / 1e6
            del cache
            row.as_dynamic = same(texts[way.name], texts.get(ways[0].name, texts[way.name]))
            own = dataclasses.replace(way, attention="sdpa", eager=True)
            row.as_eager = same(texts[way.name], generate(model, ids, own, tokens)[0])
            times[way.name] = [], [], []
        except (torch.OutOfMemoryError, tikv.CapacityError) as error:
            row.failed = f"does not fit: {str(error).splitlines()[0][:80]}"
    for turn in range(rounds):
        for way in ways:
            if way.name in times:
                say(f"{way.name}: round {turn + 1} of {rounds}")
                seconds = generate(model, ids, way, 1)[1][0], *generate(model, ids, way, tokens)[1]
                for found, each in zip(times[way.name], seconds, strict=True):
                    found.append(each)
    for row in rows:
        if row.name in times:
            first, whole, later = map(statistics.median, times[row.name])
            row.prompt_ms = 1000 * first
            row.token_ms = 1000 * max(0.0, whole - first) / (tokens - 1)
            row.later_ms = 1000 * later / (tokens - 2)
    return rows


def table(rows):
    """The rows as lines of text."""

    def number(value, digits):
        return "" if value is None else f"{value:,.{digits}f}"

    def share(row, value):
        return "" if value is None else f"{value} of {row.tokens}"

    head = (
        "cache",
        "first call, s",
        "prompt, ms",
        "a token, ms",
        "later, ms",
        "peak, MB",
        "cache, MB",
        "as Dynamic",
        "as eager",
    )
    lines = [head]
    for row in rows:
        times = (row.first_call_s, 1), (row.prompt_ms, 1), (row.token_ms, 2), (row.later_ms, 2)
        numbers = *times, (row.peak_mb, 1), (row.cache_mb, 1)
        cells = [number(*each) for each in numbers] + [share(row, row.as_dynamic), share(row, row.as_eager)]
        lines.append((row.name, *cells) if not row.failed else (row.name, row.failed, *[""] * 7))
    told = [line for line, row in zip(lines, (None, *rows), strict=True) if row is None or not row.failed]
    widths = [max(len(line[i]) for line in told) for i in range(len(head))]
    widths[0] = max(len(line[0]) for line in lines)
    found = []
    for line in lines:
        cells = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        found.append("  ".join((line[0].ljust(widths[0]), *cells)).rstrip())
    return found


def runs_of(path):
    """The runs of a file, which need not be there yet."""
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder")
    if not path.exists():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("form") != FORM or "runs" not in found:
        raise ValueError("it is not a file that --json wrote")
    return found["runs"]


def add(path, run):
    """Put a run into a file, in place of an older one of the same command."""
    runs = [each for each in runs_of(path) if each["command"] != run["command"]]
    path.write_text(json.dumps({"form": FORM, "runs": [*runs, run]}, indent=1) + "\n", encoding="utf-8")


def parsed():
    """The arguments, and the parser for what is found wrong later."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="a folder with a causal model")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--size", choices=SIZES, help="size of the random model (small on a CPU, large on a GPU)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the model (float32 on a CPU, bfloat16 on a GPU)",
    )
    parser.add_argument("--prompt", type=int, help="tokens in the prompt (small 128, medium 512, large 4096)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to write (default %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="texts at once (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs for the median (default %(default)s)")
    parser.add_argument(
        "--window", type=int, help=f"also run with a window of this many tokens, {SINKS} sinks included"
    )
    parser.add_argument("--caches", nargs="+", choices=CACHES, metavar="CACHE",
                        help=f"rows after DynamicCache, any of {', '.join(CACHES)}; window needs --window")  # fmt: skip
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT",
                        help=f"formats of TikvCache, any of {', '.join(FORMATS)}; "
                             "'model' is the model's dtype")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also add the run to this file")
    given = parser.parse_args()
    given.device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    given.size = given.size or ("large" if given.device == "cuda" else "small")
    given.dtype = given.dtype or SIZES["large" if given.device == "cuda" else "small"][2]
    given.prompt = SIZES[given.size][1] if given.prompt is None else given.prompt
    for name, least in (("prompt", 1), ("tokens", 3), ("batch", 1), ("rounds", 1)):
        if getattr(given, name) < least:
            parser.error(f"--{name} {getattr(given, name)}: must be at least {least}")
    if given.window is not None and given.window <= SINKS:
        parser.error(f"--window {given.window}: must be more than its {SINKS} sinks")
    given.caches = given.caches or ["static", "tikv", *(["window"] if given.window else [])]
    if "window" in given.caches and not given.window:
        parser.error("--caches window needs --window, the number of tokens")
    if given.json:
        try:
            runs_of(given.json)
        except (OSError, ValueError) as error:
            parser.error(f"--json {given.json}: {error}")
    return given, parser


def main():
    """Measure and print."""
    given, parser = parsed()
    tikv.init(given.device)
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, given.dtype)
    if given.checkpoint:
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                given.checkpoint, local_files_only=True, dtype=dtype
            )
        except (OSError, ValueError) as error:
            parser.error(f"{given.checkpoint}: {str(error).splitlines()[0]}")
        model = model.to(given.device).eval()
    else:
        model = model_of(given.size, given.device, dtype)
    model.generation_config.eos_token_id = None  # all texts are of one length
    text = model.config.get_text_config()
    torch.manual_seed(1)
    ids = torch.randint(1, text.vocab_size, (given.batch, given.prompt)).to(given.device)
    static_left_out = "static" in given.caches and not ids.is_cuda
    caches = [each for each in given.caches if each != "static" or ids.is_cuda]
    ways = ways_of(model.config, caches, dict.fromkeys(given.formats), given.prompt + given.tokens, given.window)

    def say(what):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)

    rows = measure(model, ids, ways, given.tokens, given.rounds, say)
    say("")
    run = {
        "command": re.sub(r" --json[ =]\S+", "", " ".join(["python examples/whole_model.py", *sys.argv[1:]])),
        "model": f"{type(model).__name__}, {text.num_hidden_layers} layers of {text.hidden_size}, {given.dtype}",
        "machine": tikv.info()["device"] + ("" if ids.is_cuda else f", {torch.get_num_threads()} threads"),
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, tikv)},
        "batch": given.batch,
        "prompt": given.prompt,
        "tokens": given.tokens,
        "rows": [{name: round(v, 6) if isinstance(v, float) else v for name, v in vars(row).items()} for row in rows],
    }
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    size = f"batch {given.batch}, prompt {given.prompt:,}, {given.tokens} tokens"
    print(f"{run['model']}; {size}; {run['machine']}; {versions}", *table(rows), sep="\n")
    if static_left_out:
        print("StaticCache, which generate compiles on a GPU alone, is left out.")
    if given.json:
        add(given.json, run)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
