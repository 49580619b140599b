"""Which blocks of a pool are free, who holds the others, and which hold a prompt prefix that another may share.

This is bookkeeping on the host: no data moves here. A block is held by any number of sequences; without a holder it is
free. A full block may be registered under the digest of all tokens up to its end, and is found by it even after it was
freed, until it is taken for something else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tikv.arrays import Host
from tikv.errors import CapacityError, DTypeError

MOST_SALT = 1024  # bytes; it is kept with each sequence and in files


def salt_bytes(salt: Any, operation: str) -> bytes:
    r"""A user's salt as bytes, different for different salts, also for 1, "1" and b"1". None gives no bytes.

    Raises:
        DTypeError: it is not a str, bytes or int.
        CapacityError: it is longer than `MOST_SALT`.

    Examples:
        >>> salt_bytes(None, "example"), salt_bytes("a", "example"), salt_bytes(-1, "example")
        (b'', b'sa', b'i\xff')
    """
    if salt is None:
        return b""
    if isinstance(salt, str):
        encoded = b"s" + salt.encode("utf-8", "surrogatepass")
    elif isinstance(salt, bytes):
        encoded = b"b" + salt
    elif isinstance(salt, int | np.integer) and not isinstance(salt, bool):
        number = int(salt)
        bits = (number if number >= 0 else ~number).bit_length()
        encoded = b"i" + number.to_bytes(bits // 8 + 1, "little", signed=True)
    else:
        raise DTypeError(f"{operation}: salt is {salt!r}, a {type(salt).__name__}. Use a str, bytes or an int.")
    if len(encoded) > MOST_SALT:
        raise CapacityError(
            f"{operation}: salt has {len(encoded)} bytes; at most {MOST_SALT} are kept. Give a hash of it."
        )
    return encoded


def chained_digests(token_ids: Sequence[int] | Host, block_size: int, salt: bytes = b"") -> list[bytes]:
    """A digest for each full block of a token list, which depends on all tokens up to the block's end.

    Args:
        token_ids: integers of at most 64 bits.
        block_size: tokens of a block; a last block that is not full has no digest.
        salt: as `salt_bytes` gives it; digests of different salts are never equal.

    Returns:
        SHA-256 of the previous block's digest and this block's tokens: equal digests mean equal prefixes. The first
        block is preceded by a digest of the salt, if there is one.

    Cost: about 1 us per block.

    Examples:
        >>> a, b = chained_digests([1, 2, 3, 4, 5], 2), chained_digests([9, 2, 3, 4], 2)
        >>> len(a), a[1] == b[1], a[1] == chained_digests([1, 2, 3, 4], 2)[1]
        (2, False, True)
        >>> a[0] == chained_digests([1, 2], 2, b"tenant")[0]
        False
    """
    ids = np.asarray(token_ids, np.int64)
    digest, digests = b"", []
    if salt:
        # It hashes 36 bytes. A block's bytes are a multiple of 8, so a salt cannot be mistaken for tokens.
        digest = hashlib.sha256(hashlib.sha256(salt).digest() + b"salt").digest()
    for end in range(block_size, len(ids) + 1, block_size):
        digest = hashlib.sha256(digest + ids[end - block_size : end].astype("<i8").tobytes()).digest()
        digests.append(digest)
    return digests


def slots_of(block_table: Sequence[int], positions: Host, block_size: int) -> Host:
    """The slot in the pool of each position of a sequence whose blocks are ``block_table``.

    Examples:
        >>> slots_of([3, 1], np.array([0, 4, 5]), 4).tolist()
        [12, 4, 5]
    """
    slots: Host = np.asarray(block_table, np.int32)[positions // block_size] * block_size + positions % block_size
    return slots


class BlockPool:
    """Reference counts and free lists of ``num_blocks`` blocks.

    A full block may be registered under a digest, a hash of all tokens up to its end, by which it is found again. At
    first, blocks are taken in order from block 0 on; freed blocks are taken again before them, last in, first out.
    Blocks that are the only ones registered under a digest are taken last, the longest unused first, and then lose
    their digest.

    Args:
        num_blocks: the number of blocks.

    Examples:
        >>> import tikv
        >>> pool = tikv.BlockPool(4)
        >>> a = pool.allocate(2)
        >>> pool.acquire(a[:1])
        >>> a, pool.holders(0), pool.num_free, pool.num_shared
        ([0, 1], 2, 2, 1)
        >>> pool.register(1, b"prefix")
        >>> pool.release(a)
        >>> pool.num_free, pool.find(b"prefix"), pool.allocate(2)
        (3, 1, [2, 3])
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: dict[int, None] = {}  # free, but still found by digest; the longest unused first
        self._blocks_of: dict[bytes, dict[int, None]] = {}  # in the order they were registered
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """How many blocks have no holder."""
        return len(self._free) + len(self._idle)

    @property
    def num_shared(self) -> int:
        """Blocks that more than one sequence holds."""
        return sum(n > 1 for n in self._holders)

    def holders(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._holders[block]

    def allocate(
        self, n: int, operation: str = "BlockPool.allocate", lost: dict[int, bytes] | None = None
    ) -> list[int]:
        """Take ``n`` free blocks, each with one holder, or raise CapacityError if fewer are free.

        The digests under which they were registered are put into ``lost``, for `give_back`.
        """
        if n > self.num_free:
            raise CapacityError(
                f"{operation}: {n} blocks are needed and {self.num_free} of {self.num_blocks} are free. Free, truncate "
                f"or swap out a sequence, or make the pool larger."
            )
        taken = self._free[-n:][::-1] if n else []
        del self._free[len(self._free) - len(taken) :]
        for _ in range(n - len(taken)):
            block = next(iter(self._idle))
            del self._idle[block]
            if lost is not None:
                lost[block] = self._digest_of[block]
            self.forget(block)
            taken.append(block)
        for block in taken:
            self._holders[block] = 1
        return taken

    def give_back(self, blocks: Sequence[int], lost: dict[int, bytes]) -> None:
        """Undo an `allocate`: the blocks in ``lost``, not written since, get back their digests and their order."""
        for block, digest in lost.items():
            self.register(block, digest)
        self.release(blocks)
        self._idle = {block: None for block in lost if block in self._idle} | self._idle

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add one holder to each block; a registered block without holders is in use again."""
        holders = self._holders
        for block in blocks:
            if holders[block] == 0:
                del self._idle[block]
            holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one holder from each block of a sequence, given in its order; blocks without holders are then free.

        The last block is freed first. Registered blocks are taken again in the order in which they were freed, so a
        prefix stays longer than what follows it. Other blocks are taken again in the opposite order.
        """
        holders = self._holders
        for block in reversed(blocks):
            holders[block] = remaining = holders[block] - 1
            if remaining == 0:
                digest = self._digest_of.get(block)
                if digest is not None and len(self._blocks_of[digest]) == 1:
                    self._idle[block] = None
                    continue
                if digest is not None:
                    self.forget(block)  # another block has the same tokens
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Make a full, held block findable by its digest, unless it has a digest already."""
        if block not in self._digest_of:
            self._blocks_of.setdefault(digest, {})[block] = None
            self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """Make a held block whose data is about to change no longer findable by its digest."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            same = self._blocks_of[digest]
            del same[block]
            if not same:
                del self._blocks_of[digest]

    def find(self, digest: bytes) -> int | None:
        """A block registered under a digest, a held one if there is any; `acquire` it before anything is allocated."""
        same = self._blocks_of.get(digest)
        if same is None:
            return None
        return next((block for block in same if self._holders[block]), next(iter(same)))

    def prefix(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks registered under these digests, up to the first digest under which no block is registered."""
        blocks = []
        for digest in digests:
            block = self.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks
