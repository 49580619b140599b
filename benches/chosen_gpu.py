"""Device time of attention over chosen tokens on an NVIDIA GPU; float16, 8 KV heads of 128, 4 query heads per KV head.

    python benches/chosen_gpu.py tokens     # 2,048 of 131,072 tokens, 8 sequences: contiguous, and pages of 16
    python benches/chosen_gpu.py quest      # the same chosen by scores of pages of 16: scores, choice and attention
    python benches/chosen_gpu.py latent     # 2,048 of 32,768 latents of 576, 128 query heads, 64 sequences

For comparison there are attention over all tokens, attention over as many consecutive tokens, and torch, which gathers
the chosen rows and attends over the copy. benches/gpu.py says how time is measured.
"""

import functools

import torch
from attention_gpu import STORAGES
from gpu import HEADS, PAGE, WIDTH, Table, check_attention, ratio, started

import tikv

GROUP = 4
SIZES = {False: (8, 131072, 2048), True: (2, 256, 32)}  # sequences, tokens of each, chosen tokens; of small runs
LATENT = {False: (64, 32768, 2048), True: (1, 128, 32)}
torch_attention = torch.nn.functional.scaled_dot_product_attention


def rows_of(machine, *shape, tokens, chosen):
    """Different tokens in random order, (*shape, 1, chosen)."""
    drawn = torch.rand(*shape, tokens, device=machine.device).topk(chosen, dim=-1).indices
    return drawn[..., None, :].int()


def gathered(q, k, v, indices):
    """Attention by torch over a copy of the rows of indices (B, 1, K) or (B, H, 1, K)."""
    at = indices if indices.ndim == 4 else indices[:, None]
    at = at[:, :, 0, :, None].long().expand(-1, k.shape[1], -1, k.shape[3])
    return torch_attention(q[:, :, None], k.gather(2, at), v.gather(2, at), enable_gqa=True)


def tokens(machine):
    """Chosen at random, for a sequence or for each KV head."""
    batch, length, chosen = SIZES[machine.small]
    table = Table(
        "tokens that a query reads", "storage", "us", "GB/s", "times that of as many in a row", "of all", "torch, us"
    )
    q = machine.randn(batch, HEADS * GROUP, WIDTH)
    indices = {
        "chosen for a sequence": rows_of(machine, batch, tokens=length, chosen=chosen),
        "chosen for each KV head": rows_of(machine, batch, HEADS, tokens=length, chosen=chosen),
    }
    for kind in STORAGES:
        name, storage, few = kind.__name__.lower(), kind(machine, batch, length), kind(machine, batch, chosen)
        caches, few_caches = ([machine.randn(*each.shape) for _ in "kv"] for each in (storage, few))
        base = {}
        for what, call, count in (
            (f"all {length:,}", functools.partial(storage.call, q, caches), length),
            (f"{chosen:,} in a row", functools.partial(few.call, q, few_caches), chosen),
            *((f"{chosen:,} {key}", functools.partial(storage.call, q, caches, indices=at), chosen)
              for key, at in indices.items()),
        ):  # fmt: skip
            with table.attempt(what, name):
                us, at, by_torch = machine.us(call), call.keywords.get("indices"), ""
                if at is not None:
                    some = at[0, 0].long() if at.ndim == 3 else at[0, :, 0].long()
                    first = [storage.sequence(a) for a in caches]
                    k, v = (
                        a[:, some] if at.ndim == 3 else torch.stack([*map(torch.Tensor.__getitem__, a, some)])
                        for a in first
                    )
                    seen = torch.ones(1, chosen, dtype=torch.bool, device=machine.device)
                    check_attention(call()[0][:, None], q[0][:, None], k, v, seen)
                    if name == "contiguous":
                        by_torch = machine.peer_us(functools.partial(gathered, q, *caches, at))
                else:
                    base[count] = us
                rate = 4 * batch * count * HEADS * WIDTH / us / 1e3
                table.row(
                    what, name, us, rate, ratio(us, base.get(chosen, "")), ratio(us, base.get(length, "")), by_torch
                )


def quest(machine):
    """The pages whose summaries promise most, in contiguous caches and in pools."""
    batch, length, chosen = SIZES[machine.small]
    table = Table("work", "storage", "us", "of attention over all tokens")
    q = machine.randn(batch, HEADS * GROUP, WIDTH)
    for kind in STORAGES:
        name, storage = kind.__name__.lower(), kind(machine, batch, length)
        caches = [machine.randn(*storage.shape) for _ in "kv"]
        with table.attempt(name):
            keys = torch.stack([storage.sequence(caches[0], n) for n in range(batch)])
            least, greatest = tikv.summarize_pages(keys, length, page=PAGE)
            del keys
            score = functools.partial(tikv.page_scores, q, least, greatest, storage.lens, page=PAGE)
            choose = functools.partial(tikv.select, score(), chosen // PAGE, page=PAGE, recent=1, valid=storage.lens)
            attend = functools.partial(storage.call, q, caches, indices=choose())

            def all_three(score=score, storage=storage, caches=caches):
                at = tikv.select(score(), chosen // PAGE, page=PAGE, recent=1, valid=storage.lens)
                return storage.call(q, caches, indices=at)

            dense = machine.us(functools.partial(storage.call, q, caches))
            table.row("attention over all tokens", name, dense, "")
            steps = {"scores of pages": score, "choice": choose, "attention over the chosen": attend}
            for what, call in (*steps.items(), (f"all three, {chosen:,} of {length:,} tokens", all_three)):
                us = machine.us(call)
                table.row(what, name, us, ratio(us, dense))


def latent(machine):
    """One latent head whose first 512 columns are the values."""
    batch, length, chosen = LATENT[machine.small]
    width, width_v, heads = 576, 512, 16 if machine.small else 128
    table = Table("tokens that a query reads", "us", "GB/s", "TFLOP/s", "times that of as many in a row")
    k, q, lens = machine.randn(batch, 1, length, width), machine.randn(batch, heads, width), machine.lens(batch, length)
    few, few_lens = k[:, :, :chosen].contiguous(), machine.lens(batch, chosen)
    at = rows_of(machine, batch, tokens=length, chosen=chosen)
    attend = functools.partial(tikv.decode_attention, q, v_cache=None, head_dim_v=width_v)
    calls = {
        f"{chosen:,} in a row": functools.partial(attend, k_cache=few, seq_lens=few_lens),
        f"{chosen:,} chosen of {length:,}": functools.partial(attend, k_cache=k, seq_lens=lens, indices=at),
    }
    base = ""
    for what, call in calls.items():
        with table.attempt(what):
            rows = k[0][:, at[0, 0].long()] if "indices" in call.keywords else few[0]
            seen = torch.ones(1, chosen, dtype=torch.bool, device=machine.device)
            check_attention(call()[0][:, None], q[0][:, None], rows, rows[..., :width_v], seen)
            us = machine.us(call)
            base = base if "indices" in call.keywords else us
            rates = (2 * batch * chosen * width / 1e3, 2 * batch * heads * chosen * (width + width_v) / 1e6)
            table.row(what, us, *(rate / us for rate in rates), ratio(us, base))


if __name__ == "__main__":
    programs = {each.__name__: each for each in (tokens, quest, latent)}
    what, machine = started(__doc__, programs)
    programs[what](machine)
