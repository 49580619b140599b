"""Write text with a KV cache in several processes: split by heads, split by tokens, or sent from prefill to decode.

    python examples/many_processes.py                     # starts two processes by itself
    torchrun --standalone --nproc-per-node 2 examples/many_processes.py --tokens 100

Each of these three ways writes the text that one process writes with its own cache. The processes communicate through
gloo, which works on any laptop.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

# The matrices are small: a second BLAS thread costs more than it brings, and takes a core from the other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from generate import Chooser, cached, report
from shared.memory import PagedMemory, StoreMemory, pool_for
from shared.model import FILE_START, Model

import tikv
from tikv import extras
from tikv.distributed import ShardedKVCacheStore, recv_sequence, send_sequence

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error)}")

PROMPT = 'class Cache:\n    """Keys and values of the tokens so far."""\n\n    def __init__(self, size):\n'


class SharedMemory:
    """Keys and values in a `ShardedKVCacheStore`; each process runs the whole model. A `model.Memory`."""

    def __init__(self, model: Model, shard: str, capacity: int):
        self.store = ShardedKVCacheStore(
            None,
            shard=shard,
            interleave=16,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype="float32",
            window=model.windows,
        )
        self.by_heads = shard == "heads"
        self.group = model.num_heads // model.num_kv_heads

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Append the rows and attend. Shapes as in `model.Memory`."""
        if not self.by_heads:
            return self.store.extend(layer, q, k, v)
        # A model cut by heads would compute its own q, k and v alone, and add up what its heads bring to the output.
        first, end = self.store.heads.start, self.store.heads.stop
        own = self.store.extend(layer, q[:, first * self.group : end * self.group], k[:, first:end], v[:, first:end])
        parts = [torch.empty(own.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.from_numpy(own))
        return torch.cat(parts, 1).numpy()


def written(model: Model, prompt: list[int], memory: object, tokens: int) -> list[int]:
    """The tokens that follow a prompt."""
    choose = Chooser(prompt, no_repeat=5)
    return [token for token, _ in zip(cached(model, prompt, memory, choose), range(tokens), strict=False)]


def prefill_and_decode(model: Model, prompt: list[int], tokens: int, rank: int) -> list[int]:
    """The same, the prompt run by process 0 and the tokens written by process 1; what process 1 wrote."""
    blocks = -(-(len(prompt) + tokens) // 16)
    pool = pool_for(model, blocks)
    found: list[list[int]] = [[]]
    if rank == 0:
        seq = pool.add()
        logits = model.forward(prompt, 0, PagedMemory(model, pool, [seq]))[-1]
        send_sequence(pool, seq, dst=1)
        dist.send(torch.from_numpy(logits.copy()), 1)
    elif rank == 1:
        memory = PagedMemory(model, pool, [recv_sequence(pool, src=0)], "tikv")
        logits = torch.empty(len(model.embedding))
        dist.recv(logits, 0)
        choose = Chooser(prompt, no_repeat=5)
        found[0] = [choose(logits.numpy())]
        while len(found[0]) < tokens:
            found[0].append(choose(model.forward(found[0][-1:], len(prompt) + len(found[0]) - 1, memory)[-1]))
    dist.broadcast_object_list(found, 1)
    return found[0]


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=60, help="tokens to write (default %(default)s)")
    parser.add_argument(
        "--processes", type=int, default=2, help="processes to start, without torchrun (default %(default)s)"
    )
    parser.add_argument(
        "--model", type=Path, default=Path(__file__).parent / "model", help="folder that train.py wrote"
    )
    args = parser.parse_args()
    if args.tokens < 1:
        parser.error(f"--tokens {args.tokens}: must be at least 1")
    if args.processes < 2:
        parser.error(f"--processes {args.processes}: must be at least 2")
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there; examples/train.py writes one")
    return args


def main() -> int:
    """Write the text in each way."""
    args = arguments()
    if "RANK" not in os.environ:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
        os.execv(sys.executable, [sys.executable, *start, *sys.argv])
    tikv.init(arch="cpu", cpu_max_num_threads=1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model.load(args.model)
    prompt = model.tokenizer.encode(FILE_START + model.tokenizer.clean(args.prompt))
    capacity = len(prompt) + args.tokens
    ways: dict[str, Callable[[], list[int]]] = {
        "split by tokens": lambda: written(model, prompt, SharedMemory(model, "tokens", capacity), args.tokens),
        "prefill in one process, decode in another": lambda: prefill_and_decode(model, prompt, args.tokens, rank),
    }
    if model.num_kv_heads % world == 0:
        ways["split by heads"] = lambda: written(model, prompt, SharedMemory(model, "heads", capacity), args.tokens)
    alone = written(model, prompt, StoreMemory(model, capacity), args.tokens)
    if rank == 0:
        print(args.prompt + model.tokenizer.decode(alone))
        report(f"\n{world} processes, {len(prompt)} tokens of prompt and {args.tokens} more")
    wrong = 0
    for name, way in ways.items():
        same = way() == alone
        wrong += not same
        if rank == 0:
            report(f"{name}: {'the same text' if same else 'ANOTHER TEXT'}")
    dist.barrier()
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit(130)
