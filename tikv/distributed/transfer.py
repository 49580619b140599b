"""Move sequences of a paged store between processes: one calls `send_sequence`, the other `recv_sequence`.

The sender says what it has, the receiver answers what it lacks, and the blocks follow. K and V of each layer are one
tensor each: part of the pool's memory if the blocks are adjacent, otherwise gathered by one launch for all layers.
Each process prepares what it can while it waits for the other's message.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tikv import launch, runtime
from tikv.arrays import ArrayView, CudaBytes, host_bytes, new_array, to_device
from tikv.distributed.ranks import Ranks
from tikv.errors import CapacityError, GroupError, OptionError, ShapeError
from tikv.ops import blocks, checks
from tikv.ops.indices import host_integers
from tikv.stores.pool import PagedKVCacheStore
from tikv.stores.pools.config import HostArray, in_full
from tikv.stores.pools.sequences import SequenceState

ByLayer: TypeAlias = Iterable[list[Any]]  # each layer's arrays, as tensors of bytes
FIRST = 1 << 14  # bytes of a message's first part
# Tensors in a batch. The tensors of a batch share NCCL's links, and a batch takes the host 50 us. Between two H200, 64
# tensors of 67 MB take 12.7, 12.4, 12.1 and 12.7 ms in batches of 1, 2, 8 and 64; one tensor of as many bytes takes
# 11.7 ms. The whole of `send_sequence` takes 14.1 ms with batches of 2 or 8, 13.7 with 16 and 13.9 with 32.
TOGETHER = 16


def send_sequence(pool: PagedKVCacheStore, seq: int | Sequence[int], dst: int, group: Any = None) -> None:
    """Send a sequence with all its layers to another process, which calls `recv_sequence`.

    Args:
        pool: the `PagedKVCacheStore` that holds the sequence, and keeps it.
        seq: the sequence's number, or the numbers of several sequences, whose common blocks are sent once.
        dst: the receiver's rank in the group.
        group: a process group, or None for all processes.

    Raises:
        PositionError: a sequence does not exist, is swapped out or is named twice; or the rank does not exist.
        OptionError: the pool is ``per_head``, or is another kind of store.
        GroupError: the receiver refused, for the reason given, or is gone. Its pool is unchanged.

    Exactness: every bit is kept. Cost: the blocks that the receiver lacks are sent once, layer by layer; blocks that
        are scattered in the pool are first read and written once more. With groups along tokens
        (``tikv.Quant(axis="tokens")``), the newest tokens of each sequence, which are stored outside the blocks, are
        sent through the host.

    Example: see `recv_sequence`.
    """
    operation = "send_sequence"
    _require_pool(operation, pool)
    peer = _Peer(dst, "dst", group, operation, pool.runtime)
    ids = [checks.integer(seq, "seq", operation)] if isinstance(seq, int | np.integer) else None
    ids = host_integers(seq, "seq", operation, pool.runtime) if ids is None else ids
    with pool.lock:
        states = pool._pages.sequences.distinct(ids, operation, "Send it once.")
        is_held = np.zeros(pool._pages.pools.config.num_blocks, bool)
        blocks_of = [np.array(state.blocks, np.int64) for state in states]
        for table in blocks_of:
            is_held[table] = True
        index_of = np.cumsum(is_held, dtype=np.int32) - 1  # each held block's index among the held ones
        beside, more = pool._pages.beside(states)
        entries = [
            {
                **one,
                "swapped": False,
                "blocks": index_of[table],
                "lengths": list(state.lengths),
                "token_ids": state.token_ids,
                "salt": state.salt,
                "left": state.histories,
            }
            for state, table, one in zip(states, blocks_of, more, strict=True)
        ]
        held = np.flatnonzero(is_held)
        peer.tell({"form": _form(pool), "count": len(held), "sequences": entries, "beside": beside})
        answer_of = peer.listen()
        exchange = _Exchange(pool, peer)
        answer = answer_of()
        if "refused" in answer:
            raise GroupError(f"{operation}: rank {dst} refused: {answer['refused']}")
        exchange.send(held[answer["lacking"]].tolist())


def recv_sequence(pool: PagedKVCacheStore, src: int, group: Any = None) -> Any:
    """Receive what another process sends with `send_sequence`.

    Args:
        pool: a `PagedKVCacheStore` created with the sender's arguments; only ``num_blocks`` and ``page_summaries`` may
            differ.
        src: the sender's rank in the group.
        group: a process group, or None for all processes.

    Returns:
        The number of the new sequence, or a list of numbers if several were sent together. They share blocks as they
        did in the sender's pool. If token ids were passed to `PagedKVCacheStore.add`, a prefix of these tokens that is
        already in this pool is shared, not sent.

    Raises:
        ShapeError: the pools were created with different arguments. CapacityError: too few blocks are free. In both
            cases the sender raises as well.
        OptionError: the pool is ``per_head``, or is another kind of store.
        GroupError: the sender is gone.
        PositionError: the rank does not exist. After any error, the pool is unchanged.

    Exactness, cost: as `send_sequence`. On CUDA it may return before the blocks have arrived, as torch's own `recv`
        does; work launched later on torch's current stream comes after them.

    Examples:
        Each of two processes calls this:

        >>> def prefill_and_decode(pool, rank):
        ...     from tikv.distributed import recv_sequence, send_sequence
        ...     if rank == 0:
        ...         seq = pool.add()  # and append the prompt
        ...         send_sequence(pool, seq, dst=1)
        ...     else:
        ...         seq = recv_sequence(pool, src=0)  # and go on from there
    """
    operation = "recv_sequence"
    _require_pool(operation, pool)
    peer = _Peer(src, "src", group, operation, pool.runtime)
    with pool.lock:
        exchange = _Exchange(pool, peer)
        header = peer.hear()
        sequences, entries = pool._pages.sequences, header["sequences"]
        try:
            _require_form(pool, header["form"], src, operation)
            states, known = _known_states(pool, entries)
            is_lacking = np.ones(header["count"], bool)
            is_lacking[[*known]] = False
            lacking = np.flatnonzero(is_lacking)
            sequences.blocks.acquire(list(known.values()))
            try:
                fresh = sorted(sequences.blocks.allocate(len(lacking), operation))
            except CapacityError:
                sequences.blocks.release(list(known.values()))
                raise
        except (ShapeError, CapacityError) as error:
            peer.tell({"refused": str(error)})
            raise
        taken = [*known.values(), *fresh]
        try:
            peer.tell({"lacking": lacking})
            here = np.empty(header["count"], np.int64)
            here[lacking], here[[*known]] = fresh, [*known.values()]
            for state, sent in zip(states, entries, strict=True):
                state.blocks = here[sent["blocks"]].tolist()
            exchange.receive(fresh)
            pool._pages.bring(range(sequences.next, sequences.next + len(states)), header["beside"], entries)
            numbers = sequences.adopt(states)
        finally:
            sequences.blocks.release(taken)  # their sequences hold them now
    return numbers[0] if len(numbers) == 1 else numbers


def _require_pool(operation: str, pool: Any) -> None:
    """Raise OptionError unless this is a pool whose sequences can be sent."""
    if not isinstance(pool, PagedKVCacheStore):
        raise OptionError(f"{operation}: {type(pool).__name__} has no sequences to send. Pass a PagedKVCacheStore.")
    pool._pages.refuse_per_head(operation, "a sequence is sent with one block table")
    runtime.require_alive(pool.runtime, operation)


def _known_states(pool: PagedKVCacheStore, entries: list[dict[str, Any]]) -> tuple[list[SequenceState], dict[int, int]]:
    """The states of the sent sequences without their blocks, and the sent blocks that this pool already has."""
    sequences, states, known = pool._pages.sequences, [], dict[int, int]()
    for sent in entries:
        ids, digests = sequences.known(sent["token_ids"], sent["salt"])
        full = min(sent["lengths"]) // sequences.block_size
        prefix = sequences.blocks.prefix(digests[:full])
        for i, block in zip(sent["blocks"][: len(prefix)].tolist(), prefix, strict=True):
            known.setdefault(i, block)
        states.append(SequenceState([], list(sent["lengths"]), ids, sent["salt"], digests, len(prefix)))
        states[-1].histories = list(sent["left"])
    return states, known


def _form(pool: PagedKVCacheStore) -> dict[str, Any]:
    """The arguments that two pools must share to exchange blocks; page summaries may differ."""
    form = in_full(pool._pages.pools.arguments())
    return {name: value for name, value in form.items() if name not in ("num_blocks", "page_summaries")}


def _require_form(pool: PagedKVCacheStore, theirs: dict[str, Any], src: int, operation: str) -> None:
    """Raise ShapeError if the sender's pool was created with different arguments from this one."""
    ours = _form(pool)
    if other := [name for name in ours if theirs.get(name) != ours[name]]:
        said = ", ".join(f"{name}={theirs.get(name)!r} there and {ours[name]!r} here" for name in other)
        raise ShapeError(
            f"{operation}: the pool of rank {src} has {said}. Create both with the same {', '.join(other)}."
        )


class _Peer:
    """The other process of an exchange: its rank, and messages to it and from it, each a dict."""

    def __init__(self, number: int, name: str, group: Any, operation: str, live: runtime.Runtime) -> None:
        self.ranks = Ranks(group, operation)
        self.operation = operation
        number = checks.integer(number, name, operation, high=self.ranks.world - 1)
        import torch.distributed as dist

        with self.ranks.understanding(operation):
            self.rank = dist.get_global_rank(self.ranks.group, number)
            self.by_host = dist.get_backend(self.ranks.group) == "gloo"
        # The device on which the group's backend takes the tensor of a message.
        self.device = live.device if live.is_cuda and not self.by_host else "cpu"

    def tell(self, message: dict[str, Any]) -> None:
        """Send an object, as its length and its bytes: in one message if it is short."""
        import torch
        import torch.distributed as dist

        said = pickle.dumps(message)
        whole = np.zeros(max(FIRST, 8 + len(said)), np.uint8)
        whole[:8] = np.frombuffer(len(said).to_bytes(8, "little"), np.uint8)
        whole[8 : 8 + len(said)] = np.frombuffer(said, np.uint8)
        with self.ranks.understanding(self.operation):
            for part in (whole[:FIRST], whole[FIRST:]):
                if part.size:
                    dist.send(torch.from_numpy(part).to(self.device), self.rank, group=self.ranks.group)

    def hear(self) -> dict[str, Any]:
        """Receive an object."""
        return self.listen()()

    def listen(self) -> Callable[[], dict[str, Any]]:
        """Begin to receive an object, and return a function that waits for it."""
        first = self._receiving(FIRST)

        def message() -> dict[str, Any]:
            whole = first()
            length = 8 + int.from_bytes(whole[:8], "little")
            if length > FIRST:
                whole += self._receiving(length - FIRST)()
            content: dict[str, Any] = pickle.loads(whole[8:length])
            return content

        return message

    def _receiving(self, count: int) -> Callable[[], bytes]:
        import torch
        import torch.distributed as dist

        buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
        with self.ranks.understanding(self.operation):
            request = dist.irecv(buffer, self.rank, group=self.ranks.group)

        def received() -> bytes:
            with self.ranks.understanding(self.operation):
                request.wait()
                return bytes(buffer.cpu().numpy())

        return received

    def exchange(self, operation: Callable[..., Any], layers: ByLayer) -> None:
        """Send or receive these tensors in batches, and wait for all.

        Tensors are sent layer by layer, since the two sides may group their layers differently: a pool's groups depend
        on its size.
        """
        import torch.distributed as dist

        requests: list[Any] = []
        waiting = (each for tensors in layers for each in tensors if each.numel())
        sizes = itertools.chain([2], itertools.repeat(TOGETHER))  # the first are sent while the next are listed
        with self.ranks.understanding(self.operation):
            while batch := list(itertools.islice(waiting, next(sizes))):
                listed = [dist.P2POp(operation, each, self.rank, self.ranks.group) for each in batch]
                requests += dist.batch_isend_irecv(listed)
            for request in requests:
                request.wait()


class _Exchange:
    """Sends or receives blocks of a pool, for all layers, as tensors of bytes."""

    def __init__(self, pool: PagedKVCacheStore, peer: _Peer) -> None:
        self.pools = pool._pages.pools
        self.live = pool.runtime
        self.peer = peer
        # Whether torch sees the pool's memory and the group's backend takes it.
        self.direct = self.live.is_cpu or (self.live.is_cuda and not peer.by_host)
        self.live.synchronize()

    def send(self, block_ids: list[int]) -> None:
        """Send these blocks."""
        import torch.distributed as dist

        if not block_ids:
            return
        if self.direct and _side_by_side(block_ids):
            by_layer = self._in_place(block_ids)
        elif self.direct:
            apart = self._apart(len(block_ids))
            _held = self._move(block_ids, apart, out_of_pool=True)
            self.live.synchronize()
            by_layer = self._by_layer(apart)
        else:
            by_layer = self._by_layer(self.pools.read_blocks(block_ids))
        self.peer.exchange(dist.isend, by_layer)

    def receive(self, block_ids: list[int]) -> None:
        """Receive these blocks, in place or through a buffer."""
        import torch.distributed as dist

        if not block_ids:
            return
        n = len(block_ids)
        if not self.direct:
            host = self.pools.host_blocks(n)
            self.peer.exchange(dist.irecv, self._by_layer(host))
            self.pools.write_blocks(host, range(n), block_ids)
            return
        if _side_by_side(block_ids):
            self.peer.exchange(dist.irecv, self._in_place(block_ids))
        else:
            apart = self._apart(n)
            self.peer.exchange(dist.irecv, self._by_layer(apart))
            _held = self._move(block_ids, apart, out_of_pool=False)
        self._settle()
        self.pools.summarize_blocks(block_ids)

    def _move(self, block_ids: list[int], apart: list[list[ArrayView]], out_of_pool: bool) -> list[ArrayView]:
        """Copy these blocks to separate memory, or back. Keep what this returns until the copy is done."""
        n, size, held = len(block_ids), self.pools.config.num_blocks, []
        for group, arrays in zip(self.pools.groups, apart, strict=True):
            sides = (block_ids, range(n), size, n) if out_of_pool else (range(n), block_ids, n, size)
            held.append(to_device(group.pairs(*sides), self.live))
            for pair in zip(group.arrays, arrays, strict=True):
                src, dst = pair if out_of_pool else pair[::-1]
                blocks.swap_chosen(src, dst, held[-1], self.live)
        return held

    def _settle(self) -> None:
        """Wait until the blocks have arrived, if launches do not wait for work on torch's stream."""
        if self.live.is_cuda and launch.launcher_report(self.live)["launcher"] != "native":
            import torch

            self.live.synchronize()
            torch.cuda.current_stream(self.live.device).synchronize()

    def _in_place(self, block_ids: list[int]) -> ByLayer:
        """Adjacent blocks, in the pool's own memory."""
        first, n, size = block_ids[0], len(block_ids), self.pools.config.num_blocks
        for group in self.pools.groups:
            memory = [(_bytes(a), a.nbytes // a.shape[0]) for a in group.arrays]
            for start in range(first, group.layers * size, size):
                yield [whole[start * block : (start + n) * block] for whole, block in memory]

    def _apart(self, n: int) -> list[list[ArrayView]]:
        """Memory for `n` blocks: the arrays of each group, with its layers one after the other."""
        return [
            [new_array((group.layers * n, *a.shape[1:]), a.dtype, self.live) for a in group.arrays]
            for group in self.pools.groups
        ]

    def _by_layer(self, apart: list[list[Any]]) -> ByLayer:
        """The bytes of memory like that of `_apart`, layer by layer, on the device or on the host."""
        for group, arrays in zip(self.pools.groups, apart, strict=True):
            yield from map(list, zip(*(_bytes(a).chunk(group.layers) for a in arrays), strict=True))


def _side_by_side(block_ids: list[int]) -> bool:
    return block_ids[-1] - block_ids[0] + 1 == len(block_ids)


def _bytes(array: ArrayView | HostArray) -> Any:
    """The bytes of a contiguous array, as a tensor; the caller keeps the memory alive."""
    import torch

    if isinstance(array, np.ndarray):
        return torch.from_numpy(array.reshape(-1).view(np.uint8))
    if array.device == "cpu":
        return torch.from_numpy(host_bytes(array.ptr, array.nbytes))
    return torch.as_tensor(CudaBytes(array.ptr, array.nbytes), device=array.device)
