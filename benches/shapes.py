"""Named models and the sizes at which they are timed, so that all benches use the same numbers."""

from typing import NamedTuple


class Model(NamedTuple):
    """What a KV cache needs to know about its model."""

    num_kv_heads: int
    head_dim: int
    num_layers: int


MODELS = {
    "8x128": Model(num_kv_heads=8, head_dim=128, num_layers=32),  # Llama 3 8B, Qwen3 8B and most of their size
    "2x64": Model(num_kv_heads=2, head_dim=64, num_layers=24),  # Qwen2 0.5B
}
SMOKE = Model(num_kv_heads=2, head_dim=16, num_layers=3)
# The formats that attention_gpu.py compares with float16.
FORMATS = ("int8", "float8_e4m3fn", "quant8_64", "q8_0", "quant4_64", "q4_0", "mxfp8", "mxfp4", "nvfp4")


class Sizes(NamedTuple):
    """Tokens of each phase on a back end."""

    prefill: int  # K and V together at least 64 MiB in 16 bits on the CPU, 1 GiB on a GPU
    context: int  # slots of the cache that single tokens are appended to
    short: int  # cached tokens before an append, twice: the cost has to be the same
    long: int
    calls: int  # appends between two looks at the clock


SIZES = {
    "cpu": Sizes(prefill=16384, context=4096, short=1_000, long=1_000_000, calls=200),
    "cuda": Sizes(prefill=131072, context=4096, short=1_000, long=1_000_000, calls=500),
    "vulkan": Sizes(prefill=16384, context=4096, short=1_000, long=100_000, calls=50),
    "metal": Sizes(prefill=65536, context=4096, short=1_000, long=1_000_000, calls=200),
    "amdgpu": Sizes(prefill=65536, context=4096, short=1_000, long=1_000_000, calls=200),
}
SMOKE_SIZES = Sizes(prefill=40, context=64, short=10, long=50, calls=2)


class Scatter(NamedTuple):
    """What a batch of sequences of different lengths writes at once."""

    sequences: int
    new: int  # rows a sequence of a ragged append
    tokens: int  # tokens of a slot-mapped write that is small enough for the call to show
    block: int  # slots of a page


SCATTER = Scatter(sequences=64, new=64, tokens=5_000, block=16)
SMOKE_SCATTER = Scatter(sequences=3, new=5, tokens=40, block=4)
