"""A whole `generate` on an NVIDIA GPU beside transformers' own caches: examples/whole_model.py.

    python benches/generate_gpu.py short        # a text of 4,096 tokens
    python benches/generate_gpu.py long         # 8 texts of 16,384 tokens, a window of 1,024 with 4 sinks too
    python benches/generate_gpu.py exact        # float32: the tokens with each format, compared with its eager text

`short` and `long` use bfloat16 and a model with 16 layers of 2,048, 32 query heads, 8 KV heads of 128 and random
weights. Each cache runs in its own process, with DynamicCache again beside it. Nothing was compiled before, so first
calls are those of a new machine. `exact` uses a small model, whose times mean nothing. `--json FILE` also keeps the
rows of all processes as one run, as the example's own --json does: a row that ran several times has the least and the
greatest of its figures.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import environment
import torch
from gpu import COMPILED, Table, printed_by, ratio

EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "whole_model.py"
sys.path.append(str(EXAMPLE.parent))
from whole_model import add  # noqa: E402

MODEL = ["--formats", "model"]
CACHES = [  # what compiles has a process of its own, in which nothing is compiled twice
    ["--caches", "static"],
    ["--caches", "tikv", *MODEL],
    ["--caches", "window", "--window", "1024", *MODEL],
    ["--caches", "tikv", "--formats", "int8"],
    ["--caches", "tikv", "--formats", "4 bits"],
]
PROCESSES = {  # the arguments of each
    "short": [["--prompt", "4096", "--rounds", "2", *cache] for cache in CACHES],
    "long": [["--batch", "8", "--prompt", "16384", "--rounds", "2", *cache] for cache in CACHES],
    "exact": [["--size", "small", "--dtype", "float32", "--prompt", "512", "--tokens", "64", "--rounds", "1"]],
}
SMALL = ["--device", "cpu", "--size", "small", "--batch", "1", "--prompt", "24", "--tokens", "3", "--rounds", "1"]


def run_of(arguments, small):
    """What a process measured, as the example saves it; its first row is DynamicCache."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "runs.json"
        command = [str(EXAMPLE), *arguments, *(SMALL if small else []), "--json", str(file)]
        printed_by(command, () if small else COMPILED)
        (run,) = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return run


def together(runs, command):
    """The runs of several processes as one."""
    rows = {}
    for row in (row for run in runs for row in run["rows"]):
        rows.setdefault(row["name"], []).append(row)
    return {**runs[0], "command": command, "rows": [merged(found) for found in rows.values()]}


def merged(rows):
    """Rows of one cache as one: (least, greatest) of figures with a point, the least count of equal tokens."""
    one = dict(rows[0])
    for field, figure in one.items():
        figures = sorted(row[field] for row in rows if row[field] is not None)
        if isinstance(figure, float) and len(figures) > 1:
            one[field] = [figures[0], figures[-1]]
        elif isinstance(figure, int):
            one[field] = figures[0]
    return one


def generations(processes, small):
    """Times, memory and text of each cache; what the processes saved."""
    head = "first call, s | prompt, ms | times DynamicCache's"
    token = "a token, ms | times DynamicCache's | times StaticCache's | later, ms"
    memory = ("peak, MB", "cache, MB", "tokens as DynamicCache", "as eager")
    table, static, runs = Table("cache", *head.split(" | "), *token.split(" | "), *memory), "", []
    for arguments in processes:
        with table.attempt(" ".join(arguments)):
            runs.append(run_of(arguments, small))
            base, *rows = runs[-1]["rows"]
            for row in (base, *rows):
                if row["failed"]:
                    table.row(row["name"], row["failed"])
                    continue
                if row["name"].startswith("StaticCache"):
                    static = row["token_ms"]
                times = (row["first_call_s"], row["prompt_ms"], ratio(row["prompt_ms"], base["prompt_ms"]))
                times += (row["token_ms"], ratio(row["token_ms"], base["token_ms"]), ratio(row["token_ms"], static))
                peak = "" if row["peak_mb"] is None else row["peak_mb"]
                same = (f"{row[each]} of {row['tokens']}" for each in ("as_dynamic", "as_eager"))
                table.row(row["name"], *times, row["later_ms"], peak, row["cache_mb"], *same)
    return runs


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PROCESSES)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also add the run to this file")
    given = parser.parse_args()
    if not given.small and not torch.cuda.is_available():
        raise SystemExit("no NVIDIA GPU was found; --small runs a small model on the CPU")
    print(environment.line(environment.environment(["cpu" if given.small else "cuda"])), flush=True)
    runs = generations(PROCESSES[given.what], given.small)
    if given.json and runs:
        add(given.json, together(runs, f"python benches/generate_gpu.py {given.what}"))


if __name__ == "__main__":
    main()
