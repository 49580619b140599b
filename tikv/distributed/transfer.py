"""Sequences of a paged store from one process to another: `send_sequence` there, `recv_sequence` here.

Two messages, what is sent and what the receiver lacks of it, then the blocks. Of each layer K and V are one tensor
each, straight from the pool's memory where the blocks lie side by side, else gathered by a launch for all layers.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tikv import runtime
from tikv.arrays import CacheArray, new_like, to_device, view
from tikv.distributed.ranks import Ranks
from tikv.errors import CapacityError, GroupError, ShapeError
from tikv.ops import blocks, checks
from tikv.stores.layer_pools import LayerGroup
from tikv.stores.paged import PagedKVCacheStore
from tikv.stores.pool_form import HostArray, in_full
from tikv.stores.sequences import SequenceState

Parts: TypeAlias = Iterable[list[Any]]  # of each layer its arrays: tensors of bytes
FIRST = 1 << 16  # bytes of a message's first part


def send_sequence(pool: PagedKVCacheStore, seq: int | Sequence[int], dst: int, group: Any = None) -> None:
    """Send a sequence with all its layers to another process, which calls `recv_sequence`.

    Args:
        pool: a `PagedKVCacheStore` that holds it. It keeps it.
        seq: its number, or those of several, whose common blocks are sent once.
        dst: rank of the receiver in the group.
        group: a process group, or None for all processes.

    Raises:
        PositionError: a sequence is none, is swapped out or is named twice; or there is no such rank.
        GroupError: the receiver refused, with its reason, or is gone. Its pool is as it was.

    Exactness: every bit. Cost: the blocks that the receiver lacks, once over the wire, layer by layer; blocks that lie
        scattered in the pool are read and written once more before.

    Example: see `recv_sequence`.
    """
    operation = "send_sequence"
    runtime.require_alive(pool.runtime, operation)
    peer = _Peer(dst, "dst", group, operation, pool.runtime)
    ids = [seq] if isinstance(seq, (int, np.integer)) else list(seq)
    with pool.lock:
        states = pool._sequences.distinct(ids, operation, "Send it once.")
        held = np.unique(np.array([block for state in states for block in state.blocks], np.int64))
        told = [
            {
                "blocks": np.searchsorted(held, state.blocks).astype(np.int32),
                "lengths": list(state.lengths),
                "token_ids": state.token_ids,
                "salt": state.salt,
                "left": state.left,
            }
            for state in states
        ]
        peer.tell({"form": _form(pool), "count": len(held), "sequences": told})
        answer = peer.hear()
        if "refused" in answer:
            raise GroupError(f"{operation}: rank {dst} did not take it: {answer['refused']}")
        _Exchange(pool, peer, held[answer["lacking"]].tolist()).send()


def recv_sequence(pool: PagedKVCacheStore, src: int, group: Any = None) -> Any:
    """Receive what another process sends by `send_sequence`.

    Args:
        pool: a `PagedKVCacheStore` of the same form as the sender's; the number of blocks may be another.
        src: rank of the sender in the group.
        group: a process group, or None for all processes.

    Returns:
        The number of the new sequence, or a list of those of several that were sent together. They share blocks as they
        did there. Prefixes of known tokens that are in this pool already are shared, and not sent.

    Raises:
        ShapeError: the pools are of different forms. CapacityError: too few blocks are free. The sender raises too.
        GroupError: the sender is gone.
        PositionError: there is no such rank. Whatever is raised, the pool is as it was.

    Exactness, cost: as `send_sequence` says.

    Example, in each of two processes:
        >>> def prefill_and_decode(pool, rank):
        ...     from tikv.distributed import recv_sequence, send_sequence
        ...     if rank == 0:
        ...         seq = pool.add()  # and append the prompt
        ...         send_sequence(pool, seq, dst=1)
        ...     else:
        ...         seq = recv_sequence(pool, src=0)  # and go on from there
    """
    operation = "recv_sequence"
    runtime.require_alive(pool.runtime, operation)
    peer = _Peer(src, "src", group, operation, pool.runtime)
    with pool.lock:
        header = peer.hear()
        sequences, told = pool._sequences, header["sequences"]
        try:
            _require_form(pool, header["form"], src, operation)
            states, known = _known_states(pool, told)
            lacking = np.setdiff1d(np.arange(header["count"]), np.array([*known], np.int64))
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
            for state, sent in zip(states, told, strict=True):
                state.blocks = here[sent["blocks"]].tolist()
            _Exchange(pool, peer, fresh).receive()
            numbers = list(range(sequences.next, sequences.next + len(states)))
            sequences.restore(dict(zip(numbers, states, strict=True)))
            sequences.next += len(numbers)
        finally:
            sequences.blocks.release(taken)  # their sequences hold them now
    return numbers[0] if len(numbers) == 1 else numbers


def _known_states(pool: PagedKVCacheStore, told: list[dict[str, Any]]) -> tuple[list[SequenceState], dict[int, int]]:
    """The states of sequences without their blocks, and of those sent the blocks that are here already."""
    sequences, states, known = pool._sequences, [], dict[int, int]()
    for sent in told:
        ids, digests = sequences.known(sent["token_ids"], sent["salt"])
        full = min(sent["lengths"]) // sequences.block_size
        found = sequences.blocks.prefix(digests[:full])
        for i, block in zip(sent["blocks"][: len(found)].tolist(), found, strict=True):
            known.setdefault(i, block)
        states.append(SequenceState([], list(sent["lengths"]), ids, sent["salt"], digests, len(found)))
        states[-1].left = list(sent["left"])
    return states, known


def _form(pool: PagedKVCacheStore) -> dict[str, Any]:
    """What two pools have in common that exchange blocks."""
    return {name: fact for name, fact in in_full(pool._pools.facts()).items() if name != "num_blocks"}


def _require_form(pool: PagedKVCacheStore, theirs: dict[str, Any], src: int, operation: str) -> None:
    """The sender's pool has the form of this one.

    Raises:
        ShapeError: it has not.
    """
    ours = _form(pool)
    if other := [name for name in ours if theirs.get(name) != ours[name]]:
        said = ", ".join(f"{name}={theirs.get(name)!r} there and {ours[name]!r} here" for name in other)
        raise ShapeError(f"{operation}: the pool of rank {src} has {said}. Create both with the same sizes.")


class _Peer:
    """The other process of an exchange."""

    def __init__(self, number: int, name: str, group: Any, operation: str, live: runtime.Runtime) -> None:
        self.ranks = Ranks(group, operation)
        self.operation = operation
        number = checks.integer(number, name, operation, high=self.ranks.world - 1)
        import torch.distributed as dist

        with self.ranks.understanding(operation):
            self.rank = dist.get_global_rank(self.ranks.group, number)
            self.by_host = dist.get_backend(self.ranks.group) == "gloo"
        # Where the backend wants the tensor that a message is.
        self.device = "cuda" if live.is_cuda and not self.by_host else "cpu"

    def tell(self, message: dict[str, Any]) -> None:
        """Send an object: its length and its bytes in one message, if it is short."""
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
        whole = self._received(FIRST)
        length = 8 + int.from_bytes(whole[:8], "little")
        if length > FIRST:
            whole += self._received(length - FIRST)
        message: dict[str, Any] = pickle.loads(whole[8:length])
        return message

    def _received(self, count: int) -> bytes:
        import torch
        import torch.distributed as dist

        with self.ranks.understanding(self.operation):
            found = torch.empty(count, dtype=torch.uint8, device=self.device)
            dist.recv(found, self.rank, group=self.ranks.group)
            return bytes(found.cpu().numpy())

    def exchange(self, operation: Callable[..., Any], layers: Parts) -> None:
        """Send or receive these tensors, those of a layer in one batch, and wait for all.

        Layers come in turn whatever groups they lie in, which depends on the size of each pool.
        NCCL shares the links out among the tensors of a batch: 64 of them at once took 7 % longer than two at a time.
        """
        import torch.distributed as dist

        requests: list[Any] = []
        with self.ranks.understanding(self.operation):
            for tensors in layers:
                batch = [dist.P2POp(operation, each, self.rank, self.ranks.group) for each in tensors if each.numel()]
                requests += dist.batch_isend_irecv(batch) if batch else []
            for request in requests:
                request.wait()


class _Exchange:
    """The blocks of a pool that are sent or received, of all layers, as tensors of bytes."""

    def __init__(self, pool: PagedKVCacheStore, peer: _Peer, chosen: list[int]) -> None:
        self.pools = pool._pools
        self.live = pool.runtime
        self.peer = peer
        self.chosen = chosen
        # Memory that torch sees, and that the group's backend takes.
        self.direct = self.live.is_cpu or (self.live.is_cuda and not peer.by_host)
        self.together = bool(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen)

    def send(self) -> None:
        """Send the blocks."""
        import torch.distributed as dist

        if not self.chosen:
            return
        self.live.synchronize()
        if self.direct and self.together:
            found = [self._in_place(group) for group in self.pools.groups]
        elif self.direct:
            found, n, held = [], len(self.chosen), []  # a launch keeps no memory alive
            for group in self.pools.groups:
                apart = self._apart(group)
                pairs = to_device(group.pairs(self.chosen, range(n), self.pools.form.num_blocks, n), self.live)
                for array, to in zip(group.arrays, apart, strict=True):
                    blocks.swap_chosen(array, view(to, "blocks", self.peer.operation), pairs, self.live)
                found.append(self._by_layer(apart, group))
                held.append(pairs)
            self._wait()
        else:
            host = self.pools.read_blocks(self.chosen)
            found = [self._host(arrays, group) for group, arrays in zip(self.pools.groups, host, strict=True)]
        self.peer.exchange(dist.isend, itertools.chain.from_iterable(found))

    def receive(self) -> None:
        """Receive the blocks, in place or to be written where they belong."""
        import torch.distributed as dist

        if not self.chosen:
            return
        self.live.synchronize()
        n = len(self.chosen)
        if self.direct and self.together:
            self.peer.exchange(dist.irecv, itertools.chain.from_iterable(map(self._in_place, self.pools.groups)))
            self._wait()
        elif self.direct:
            apart = [self._apart(group) for group in self.pools.groups]
            found = [self._by_layer(a, group) for group, a in zip(self.pools.groups, apart, strict=True)]
            self.peer.exchange(dist.irecv, itertools.chain.from_iterable(found))
            held = []
            for group, arrays in zip(self.pools.groups, apart, strict=True):
                pairs = to_device(group.pairs(range(n), self.chosen, n, self.pools.form.num_blocks), self.live)
                for array, given in zip(group.arrays, arrays, strict=True):
                    blocks.swap_chosen(view(given, "blocks", self.peer.operation), array, pairs, self.live)
                held.append(pairs)
            self.live.synchronize()
            self._wait()
        else:
            host = [
                [np.empty((group.layers * n, *a.shape[1:]), a.dtype.numpy) for a in group.arrays]
                for group in self.pools.groups
            ]
            found = [self._host(arrays, group) for group, arrays in zip(self.pools.groups, host, strict=True)]
            self.peer.exchange(dist.irecv, itertools.chain.from_iterable(found))
            self.pools.write_blocks(host, range(n), self.chosen)

    def _wait(self) -> None:
        """Until what was launched on torch's stream is done, which another launcher does not wait for."""
        if self.live.is_cuda:
            import torch

            torch.cuda.current_stream().synchronize()

    def _in_place(self, group: LayerGroup) -> Parts:
        """The blocks, which lie side by side, in the pool's own memory."""
        first, n, size = self.chosen[0], len(self.chosen), self.pools.form.num_blocks
        rows = [CacheArray(a, self.live).torch() for a in group.arrays]
        starts = [layer * size + first for layer in range(group.layers)]
        return ([_bytes(a[start : start + n]) for a in rows] for start in starts)

    def _apart(self, group: LayerGroup) -> list[Any]:
        """Memory for the blocks of these layers, one after the other."""
        like = CacheArray(group.arrays[0], self.live).torch()
        n = group.layers * len(self.chosen)
        return [new_like(like, (n, *a.shape[1:]), a.dtype, self.live) for a in group.arrays]

    def _by_layer(self, apart: list[Any], group: LayerGroup) -> Parts:
        """Parts of such memory."""
        return [[_bytes(a) for a in arrays] for arrays in zip(*(a.chunk(group.layers) for a in apart), strict=True)]

    def _host(self, arrays: list[HostArray], group: LayerGroup) -> Parts:
        """The same of memory on the host."""
        import torch

        return self._by_layer([torch.from_numpy(a.reshape(-1).view(np.uint8)) for a in arrays], group)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.reshape(-1).view(torch.uint8)
