"""Train the small language model of examples/generate.py on the source of Python's own standard library.

    pip install 'torch>=2.9' 'taichi-kv[examples]'
    python examples/train.py --steps 200 --out /tmp/m # a quick try; python examples/generate.py --model /tmp/m
    python examples/train.py                          # 20 minutes on one core
    python examples/train.py --device cuda --batch 64 --seconds 170 --tests 0.2 --dropout 0.05

The command that trained the shipped weights is "command" in examples/model/training.json.

Torch is needed here and nowhere else: generate.py runs the result in NumPy. The files that are written follow Hugging
Face's layout for a Qwen3 model (config.json, model.safetensors), with the vocabulary as one more key of config.json.
"""

import argparse
import collections
import itertools
import json
import math
import os
import platform
import random
import re
import sys
import sysconfig
import time
from pathlib import Path

from shared.model import FILE_START, OTHER, Tokenizer

try:
    import torch
    import torch.nn.functional as F
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from safetensors.torch import save as serialize
    from torch import nn
except ImportError as error:
    how = "pip install 'torch>=2.9' 'taichi-kv[examples]'; in a clone pip install 'torch>=2.9' -e '.[examples]'"
    sys.exit(f"{__doc__}\nThis program needs {error.name}: {how}")

LIBRARY = Path(sysconfig.get_path("stdlib"))
# Tests and tables outweigh the library itself and read alike: a small model would learn little else.
TESTS = {"test", "tests", "idlelib", "lib2to3"}
LEFT_OUT = {"encodings", "pydoc_data", "site-packages", "dist-packages"}
WORDS = re.compile(r"\n *| ?[^\W\d_]+|_+|\d| ?[^\w\s]+|\s")


def sources(root: Path, seed: int, tests: bool = False) -> list[str]:
    """The Python sources below `root`, the library's or its tests', in an order that depends on the seed alone.

    They are ASCII only.
    """
    below = [(path, set(path.relative_to(root).parts)) for path in sorted(root.rglob("*.py"))]
    paths = [path for path, parts in below if not LEFT_OUT & parts and bool(TESTS & parts) == tests]
    texts = [Tokenizer.clean(path.read_text(encoding="utf-8", errors="replace")) for path in paths if path.is_file()]
    random.Random(seed).shuffle(texts)
    return [text for text in texts if text.strip()]


def learn_vocabulary(texts: list[str], size: int) -> list[str]:
    """Byte-pair encoding over words: every character, then always the most frequent neighbours as one more piece."""
    counts = collections.Counter(word for text in texts for word in WORDS.findall(text))
    words = [(list(word), n) for word, n in counts.most_common(12_000)]
    pieces = [FILE_START, OTHER, "\n", *map(chr, range(32, 127))]
    known = set(pieces)
    where: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    pairs: collections.Counter = collections.Counter()
    for i, (symbols, n) in enumerate(words):
        for pair in itertools.pairwise(symbols):
            pairs[pair] += n
            where[pair].add(i)
    while len(pieces) < size and pairs:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merged = "".join(best)
        if merged not in known:
            known.add(merged)
            pieces.append(merged)
        for i in where.pop(best):
            symbols, n = words[i]
            for pair in itertools.pairwise(symbols):
                pairs[pair] -= n
            j = 0
            while j < len(symbols) - 1:
                if (symbols[j], symbols[j + 1]) == best:
                    symbols[j : j + 2] = [merged]
                j += 1
            for pair in itertools.pairwise(symbols):
                pairs[pair] += n
                where[pair].add(i)
        del pairs[best]
    return pieces


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head, rotated by position."""

    def __init__(self, config: dict, kind: str):
        super().__init__()
        width, dim = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.window = config["sliding_window"] if kind == "sliding_attention" else None
        self.q_proj = nn.Linear(width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, width, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=config["rms_norm_eps"])
        self.k_norm = nn.RMSNorm(dim, eps=config["rms_norm_eps"])

    def forward(self, x, cos, sin, masks):
        """X (batch, length, width), cos and sin (length, 1, dim / 2), a mask (length, length) by window."""
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.heads, self.dim).float())
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.dim).float())
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.dim)
        q, k, v = (rows.transpose(1, 2) for rows in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v.float(), attn_mask=masks[self.window], enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, cos, sin):
    """Half-split rotation: element i turns together with element i + dim / 2. x (batch, length, heads, dim)."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        """X (batch, length, width)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind its norm and added to the stream."""

    def __init__(self, config: dict, kind: str, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.self_attn = Attention(config, kind)
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        self.mlp = MLP(config)

    def forward(self, x, cos, sin, masks):
        """Arguments as for `Attention.forward`."""
        x = x + self.thinned(self.self_attn(self.input_layernorm(x), cos, sin, masks))
        return x + self.thinned(self.mlp(self.post_attention_layernorm(x)))

    def thinned(self, x):
        """X, of which a share is zero while training."""
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class TorchModel(nn.Module):
    """`shared.model`'s model in torch, for training. ids (batch, length) in, logits (batch, length, vocabulary) out."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, kind, dropout) for kind in config["layer_types"])
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=config["initializer_range"])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)

    def forward(self, ids):
        """Ids (batch, length)."""
        length, dim = ids.shape[1], self.config["head_dim"]
        at = torch.arange(length, device=ids.device)
        turns = at[:, None] / self.config["rope_theta"] ** (torch.arange(0, dim, 2, device=ids.device) / dim)
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        back = at[:, None] - at
        window = self.config["sliding_window"]
        masks = {None: back >= 0, window: (back >= 0) & (back < window)}
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, masks)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def save(model: TorchModel, config: dict, training: dict, out: Path) -> None:
    """Write the three files beside their final names first, so that a run that dies leaves the old ones whole."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.detach().half().cpu().contiguous() for name, value in model.named_parameters()}
    files = {name: out / f".{name}.{os.getpid()}" for name in ("model.safetensors", "config.json", "training.json")}
    try:
        files["model.safetensors"].write_bytes(serialize(weights, metadata={"format": "pt"}))
        files["config.json"].write_text(json.dumps(config, indent=1) + "\n")
        files["training.json"].write_text(json.dumps(training, indent=1) + "\n")
        for name, path in files.items():
            path.replace(out / name)
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)


def stretches(ids: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """The stretches of `ids` that begin there, (starts, length), where `ids` lie."""
    return ids[(starts[:, None] + torch.arange(length)).to(ids.device)]


@torch.no_grad()
def validation_loss(model: TorchModel, ids: torch.Tensor, context: int, batches: int, batch: int) -> float:
    """Mean loss in nats per token, over evenly spread stretches of the files that were held out."""
    starts = torch.linspace(0, len(ids) - context - 1, batches * batch).long()
    losses = []
    model.eval()
    for group in starts.split(batch):
        x = stretches(ids, group, context + 1)
        losses.append(F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).item())
    model.train()
    return sum(losses) / len(losses)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The weights with the least validation loss are kept. Ctrl-C measures the loss once more and ends. "
        "On a CPU, the same seed, threads and interpreter give the same weights.",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, mps (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1800, help="optimiser steps (default %(default)s)")
    parser.add_argument("--seconds", type=float, help="train for this many seconds, whatever the number of steps")
    parser.add_argument("--batch", type=int, default=8, help="excerpts of text per step (default %(default)s)")
    parser.add_argument("--context", type=int, default=320, help="tokens per excerpt (default %(default)s)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for the matrices (default %(default)s)")
    parser.add_argument(
        "--weight-decay", type=float, default=0.05, help="weight decay for the matrices (default %(default)s)"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="dropout rate of each layer's output (default %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=64, help="tokens that the sliding layers see (default %(default)s)"
    )
    parser.add_argument("--vocabulary", type=int, default=1024, help="size of the vocabulary (default %(default)s)")
    parser.add_argument("--library", type=Path, default=LIBRARY, metavar="FOLDER",
                        help="Python sources to learn from (default: this interpreter's standard library)")  # fmt: skip
    parser.add_argument("--tests", type=float, metavar="SHARE",
                        help="learn from the library's tests too, except in the last SHARE of training")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the order (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--save-every", type=int, default=250, help="steps between checkpoints (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "model", help="folder to write (default: examples/model)"
    )
    return parser.parse_args()


def main() -> int:
    """Read the corpus, train, save. Exit status 130 after Ctrl-C."""
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    texts = sources(args.library, args.seed)
    if len(texts) < 20:
        sys.exit(f"--library {args.library}: {len(texts)} Python sources there, which are too few to learn from")
    held_out = len(texts) // 20
    characters = sum(map(len, texts))
    print(f"{len(texts)} files of {args.library}, {characters:,} characters; {held_out} files held out", flush=True)
    pieces = learn_vocabulary(texts[held_out:], args.vocabulary)
    tokenizer = Tokenizer(pieces)
    val_text = "".join(FILE_START + text for text in texts[:held_out])
    train_text = "".join(FILE_START + text for text in texts[held_out:])
    val_ids, train_ids = torch.tensor(tokenizer.encode(val_text)), torch.tensor(tokenizer.encode(train_text))
    characters_per_token = len(val_text) / len(val_ids)
    library_tokens = len(train_ids)
    if args.tests is not None:
        more = "".join(FILE_START + text for text in sources(args.library, args.seed, tests=True))
        train_ids = torch.cat([train_ids, torch.tensor(tokenizer.encode(more), dtype=torch.long)])
    val_ids, train_ids = val_ids.to(args.device), train_ids.to(args.device)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(pieces),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": args.window,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": args.context,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": None,
        "torch_dtype": "float16",
        "vocabulary": pieces,
    }
    model = TorchModel(config, args.dropout).to(args.device)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters; {len(train_ids):,} tokens of {characters_per_token:.2f} characters, "
          f"{library_tokens:,} of them of the library itself", flush=True)  # fmt: skip

    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=args.lr / 4, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started, step, losses = time.monotonic(), 0, collections.deque(maxlen=50)
    best: dict = {}
    version = platform.python_version()

    def recent() -> float:
        return sum(map(float, losses)) / max(1, len(losses))

    def keep(steps: int) -> float:
        """Save the model if none was better; its validation loss."""
        nonlocal best
        loss = validation_loss(model, val_ids, args.context, batches=16, batch=4)
        if best and not loss < best["validation_loss_nats_per_token"]:
            return loss
        best = {
            "validation_loss_nats_per_token": round(loss, 4),
            "validation_bits_per_character": round(loss / math.log(2) / characters_per_token, 4),
            "training_loss_nats_per_token": round(recent(), 4),
            "parameters": parameters,
            "steps": steps,
            "tokens_seen": steps * args.batch * args.context,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "command": " ".join(["python examples/train.py", *sys.argv[1:]]),
            "corpus": args.library.name if args.library != LIBRARY else f"standard library of CPython {version}",
            "files": len(texts),
            "files_held_out": held_out,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if val_ids.is_cuda else args.device,
        }
        save(model, config, best, args.out)
        return loss

    def left(step: int) -> float:
        """What is left of the training before a step, from 1 to 0."""
        if args.seconds is None:
            return (args.steps - step + 1) / args.steps
        return 1 - (time.monotonic() - started) / args.seconds

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    interrupted = False
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=args.steps if args.seconds is None else round(args.seconds))
        try:
            for step in itertools.count(1):
                share = left(step)
                if share <= 0:
                    step -= 1
                    break
                # Up in a moment, level, then down to nothing over the last half.
                level = min(1.0, step / 40, 2 * share)
                groups = [group for optimizer in optimizers for group in optimizer.param_groups]
                for group, peak in zip(groups, peaks, strict=True):
                    group["lr"] = peak * level
                among = len(train_ids) if share > (args.tests or 0.0) else library_tokens
                x = stretches(train_ids, torch.randint(among - args.context - 1, (args.batch,)), args.context + 1)
                with torch.autocast(val_ids.device.type, torch.bfloat16):
                    logits = model(x[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(others, 1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.detach())
                if args.device == "cpu" or step % 50 == 0:  # what is printed waits for the device
                    rate = step * args.batch * args.context / (time.monotonic() - started)
                    done = step if args.seconds is None else time.monotonic() - started
                    progress.update(task, completed=done, description=f"loss {recent():.3f}, {rate:,.0f} tokens/s")
                if step % args.save_every == 0 and step != args.steps:
                    progress.print(f"step {step}: training loss {recent():.3f}, validation loss {keep(step):.4f}")
        except KeyboardInterrupt:
            interrupted = True
    print(f"after step {step}: validation loss {keep(step):.4f}")
    print(json.dumps(best, indent=1))
    print(f"saved in {args.out}" + (f", after Ctrl-C at step {step}" if interrupted else ""))
    return 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
