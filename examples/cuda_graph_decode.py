"""Decode with a torch model whose whole step, cache writes and attention included, is captured in one CUDA graph.

    python examples/cuda_graph_decode.py [--tokens 256] [--layers 16]

The model is untrained: only the work matters, which is the same in each step, at the next position. Everything that a
step changes is in device memory: the token, the position, the keys and values. So the graph is captured once and
replayed. Without an NVIDIA GPU, the same step runs on the CPU, one call after another.
"""

import argparse
import sys
import time

import tikv
from tikv import extras

try:
    import torch
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error)}")


class Model(torch.nn.Module):
    """A decoder with grouped-query attention; `step` appends to the cache and attends over it."""

    def __init__(self, layers, width, heads, kv_heads, vocabulary):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        rows = (heads + 2 * kv_heads) * self.head_dim
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(width, rows, bias=False) for _ in range(layers))
        self.out = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(3 * width, width, bias=False) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)


class Decoder:
    """A model, its cache, and the buffers that a step reads and writes in place."""

    def __init__(self, model, capacity):
        self.model = model
        weight = model.embedding.weight
        self.store = tikv.KVCacheStore(
            num_layers=len(model.qkv),
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            capacity=capacity,
            dtype=weight.dtype,
        )
        self.caches = [(self.store.keys(i).torch(), self.store.values(i).torch()) for i in range(len(model.qkv))]
        self.positions = self.store.positions_on_device().torch()
        self.lengths = torch.zeros_like(self.positions)
        self.token = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self.attended = weight.new_empty(1, model.heads, model.head_dim)
        self.written = torch.zeros(capacity, dtype=torch.int64, device=weight.device)

    def step(self):
        """One token: reads `token` at `positions`, leaves the next one in `token` and in `written`."""
        model, norm = self.model, torch.nn.functional.rms_norm
        self.lengths.copy_(self.positions + 1)
        x = model.embedding(self.token)
        for i, (keys, values) in enumerate(self.caches):
            rows = model.qkv[i](norm(x, x.shape[-1:])).view(1, -1, model.head_dim)
            q, k, v = rows.split((model.heads, model.kv_heads, model.kv_heads), dim=1)
            self.store.append(i, k, v, positions=self.positions)
            tikv.decode_attention(q.contiguous(), keys, values, self.lengths, out=self.attended)
            x = x + model.out[i](self.attended.view(1, -1))
            x = x + model.down[i](torch.nn.functional.silu(model.up[i](norm(x, x.shape[-1:]))))
        self.token.copy_(model.head(norm(x, x.shape[-1:])).argmax(-1))
        self.written.index_copy_(0, self.positions.long(), self.token)
        self.positions.add_(1)

    def rewind(self):
        """Start again from the first position; the memory stays where the graph expects it."""
        self.store.reset()
        self.positions.zero_()
        self.token.zero_()


def decode(decoder, step, tokens):
    """(tokens written, tokens a second) of so many steps from the first position."""
    decoder.rewind()
    synchronize = torch.cuda.synchronize if decoder.token.is_cuda else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(tokens):
        step()
    synchronize()
    seconds = time.perf_counter() - start
    decoder.store.advance(tokens)  # what the device has counted, the store learns now
    return decoder.written[:tokens].tolist(), tokens / seconds


def main():
    """Decode eagerly, then by replaying the graph; both must write the same tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens to decode (default %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="layers of the model (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=1024, help="width of the model, a multiple of 16 (default %(default)s)"
    )
    arguments = parser.parse_args()
    for name in ("tokens", "layers"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: must be at least 1")
    if arguments.width < 16 or arguments.width % 16:
        parser.error(f"--width {arguments.width}: must be a multiple of 16, the number of heads")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tikv.init(device)
    torch.manual_seed(0)
    with torch.device(device), torch.inference_mode():
        model = Model(arguments.layers, arguments.width, heads=16, kv_heads=8, vocabulary=4096)
        decoder = Decoder(model.half() if device == "cuda" else model, arguments.tokens)
        decoder.step()  # compiles
        eager, speed = decode(decoder, decoder.step, arguments.tokens)
        print(f"eager:    {speed:8.1f} tokens/s")
        if device == "cpu":
            print("captured: needs an NVIDIA GPU")
            return
        step = tikv.capture(decoder.step, decoder.store)
        decoder.rewind()
        for _ in range(min(2, arguments.tokens)):  # the first runs as it is, the second is captured
            step()
        captured, speed = decode(decoder, step, arguments.tokens)
        print(f"captured: {speed:8.1f} tokens/s")
        assert captured == eager, "the replayed steps wrote other tokens"
        print(f"both wrote the same {len(eager)} tokens")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
