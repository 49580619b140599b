"""`tikv.capture`: a step of a torch model that is called again and again, on NVIDIA GPUs as one CUDA graph."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import tikv  # noqa: E402

pytestmark = pytest.mark.archs("cpu", "cuda")

HEADS, WIDTH, ROOM = 2, 8, 24


class Decoder:
    """Layers that append rows made of the newest token, and attend; a step leaves the next token in `token`."""

    def __init__(self, arch, window=None):
        self.store = tikv.KVCacheStore(
            num_layers=2, num_kv_heads=HEADS, head_dim=WIDTH, capacity=ROOM, window=window, dtype="float32"
        )
        numbers = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(31, 3, HEADS, WIDTH, generator=numbers).to(arch)
        self.head = torch.randn(HEADS * WIDTH, 31, generator=numbers).to(arch)
        self.positions = self.store.positions_on_device().torch()
        self.lengths = torch.zeros_like(self.positions)
        self.token = torch.full((1,), 3, device=arch)
        self.runs = 0

    def step(self):
        self.runs += 1
        self.lengths.copy_(self.positions + 1)
        x = 0
        for layer in range(2):
            q, k, v = self.embedding[self.token].unbind(1)
            self.store.append(layer, k + layer, v, positions=self.positions)
            x = x + self.store.attend(layer, q, seq_lens=self.lengths).view(1, -1)
        logits = x @ self.head
        self.token.copy_(logits.argmax(-1))
        self.positions.add_(1)
        return logits

    def text(self, step, tokens):
        made = []
        for _ in range(tokens):
            logits = step()
            made.append((int(self.token), logits.cpu().numpy().copy()))
            self.store.advance(1)
        return made

    def rows(self):
        arrays = [a for layer in range(2) for a in (self.store.keys(layer), self.store.values(layer))]
        return [a.copy_to_host()[:, :, : self.store.length].tobytes() for a in arrays]


@pytest.mark.parametrize("window", [None, 5])
def test_each_call_is_one_step(arch, window):
    eager, captured = Decoder(arch, window), Decoder(arch, window)
    want = eager.text(eager.step, 12)
    step = tikv.capture(captured.step, captured.store)
    assert "to be captured" in repr(step) or arch == "cpu"
    got = captured.text(step, 12)
    assert [token for token, _ in got] == [token for token, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert captured.store.length == eager.store.length == 12
    assert captured.rows() == eager.rows()
    assert captured.runs == (12 if arch == "cpu" else 2)
    assert ("called each time" if arch == "cpu" else ", captured") in repr(step)


def test_it_goes_on_after_a_prompt_and_a_reset(arch):
    it = Decoder(arch)
    step = tikv.capture(it.step, it.store)
    first = it.text(step, 6)
    it.store.reset()
    it.positions.zero_()
    it.token.fill_(3)
    again = it.text(step, 6)
    assert [token for token, _ in first] == [token for token, _ in again]
    rows = torch.zeros(4, HEADS, WIDTH, device=arch)
    for layer in range(2):
        it.store.extend(layer, rows, rows, rows)
    it.positions.fill_(it.store.length)
    it.text(step, 2)
    assert it.store.length == 12


def test_other_memory_is_refused_and_nothing_is_written(arch):
    it = Decoder(arch)
    step = tikv.capture(it.step, it.store)
    it.text(step, 3)
    it.store.repeat(2)
    before, runs = it.rows(), it.runs
    with pytest.raises(tikv.PositionError, match=r"memory was allocated for store 0.*call tikv\.capture again"):
        step()
    assert (it.rows(), it.runs) == (before, runs)


def test_a_step_that_fails_is_not_taken_for_one_that_ran(arch):
    it, fails = Decoder(arch), [True]

    def step():
        if fails:
            raise ValueError("not yet")
        return it.step()

    captured = tikv.capture(step, it.store)
    with pytest.raises(ValueError, match="not yet"):
        captured()
    fails.clear()
    it.text(captured, 2)
    fails.append(True)
    if arch == "cuda":
        it.text(captured, 1)  # replayed: Python does not run
    else:
        with pytest.raises(ValueError, match="not yet"):
            captured()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((7,), "step is 7; it must be a function"),
        ((len,), "no store was passed"),
        ((len, "store"), "store 0 is a str; it must be a KVCacheStore"),
    ],
)
def test_what_is_refused(arch, arguments, said):
    with pytest.raises(tikv.OptionError, match=said):
        tikv.capture(*arguments)


def test_a_pool_is_refused(arch):
    pool = tikv.PagedKVCacheStore(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=2, block_size=4)
    with pytest.raises(tikv.OptionError, match="store 0 is a PagedKVCacheStore"):
        tikv.capture(len, pool)
