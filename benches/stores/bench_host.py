"""A step over layers in the host's memory, beside torch's copy of as many bytes of page-locked memory to the GPU."""

import pytest

import tikv

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'taichi-kv[bench]'")

pytestmark = pytest.mark.archs("cuda")
LAYERS, HEADS, WIDTH, BATCH = 8, 8, 128, 8


@pytest.mark.parametrize("peer", ["tikv", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "quant4_64"])
def bench_a_step_over_the_host(arch, dtype, peer, smoke, timed):
    tokens = 128 if smoke else 16384
    stored = tikv.Quant(4, 64) if dtype == "quant4_64" else dtype
    form = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": WIDTH, "batch_size": BATCH, "capacity": tokens}
    store = tikv.KVCacheStore(**form, dtype=stored, place="host")
    rows = torch.randn(BATCH, tokens, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(BATCH, 1, 4 * HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)
    plain = tikv.KVCacheStore(**(form | {"num_layers": 1}), dtype=stored)
    plain.append(0, rows, rows)
    want = plain.attend(0, q)
    for layer in range(LAYERS):
        store.append(layer, rows, rows)
        assert torch.equal(store.attend(layer, q), want)

    def step():
        for layer in range(LAYERS):
            store.attend(layer, q)

    call = step
    if peer == "torch":
        host = torch.empty(store.nbytes // 4, dtype=torch.uint8).pin_memory()
        there = torch.empty_like(host, device="cuda")

        def call():
            for _ in range(4):
                there.copy_(host, non_blocking=True)

    op, case = "KVCacheStore.attend", f"{LAYERS} layers on the host, {dtype}, {BATCH} x {tokens:,}"
    timed(call, op=op, peer=peer, case=case, bytes_moved=store.nbytes, calls=1, rounds=5)
