"""torch tensors are written and read in place: no copy in, no copy out.

python examples/from_torch.py
"""

import argparse
import sys

import tikv
from tikv import extras

try:
    import torch
except ImportError as error:
    sys.exit(f"{__doc__}\n{extras.missing('This example', error)}")


def main():
    """Write, read and change one cache from both sides."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    heads, width, capacity, window = 2, 4, 8, 6
    store = tikv.KVCacheStore(
        num_layers=1, num_kv_heads=heads, head_dim=width, capacity=capacity, dtype="bfloat16", window=window
    )

    # One projection gives queries, keys and values side by side; the slices go in as they are, strides and all.
    projected = torch.randn(10, (4 + 2 * heads) * width, dtype=torch.bfloat16)
    rows = projected.view(10, 4 + 2 * heads, width)
    store.append(0, rows[:, 4 : 4 + heads], rows[:, 4 + heads :])

    keys = store.keys(0).torch()
    print(f"the store's keys as torch sees them: {tuple(keys.shape)}, {keys.dtype}, at {hex(keys.data_ptr())}")
    print("slot 3 holds token 9, since 9 % 6 is 3:", torch.equal(keys[0, :, 3], rows[9, 4 : 4 + heads]))

    # The newest token attends to what the window still holds, read where it lies.
    out = store.attend(0, rows[9:, :4])
    k, v = (x.torch().float() for x in store.tokens(0))
    q = rows[9:, :4].float().view(1, 4, 1, width)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).view(1, 4, width)
    print("largest difference to torch's attention:", (torch.as_tensor(out).float() - want).abs().max().item())

    # The other way round: what torch writes, the store holds.
    keys[0, :, 3] = 0
    newest = store.tokens(0)[0].torch()[0, :, -1]
    print("zeroed from torch, read from the store:", newest.abs().sum().item())


if __name__ == "__main__":
    main()
