"""The processes that share a cache: a torch process group, and this process's place in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tikv import extras
from tikv.arrays import Array
from tikv.errors import GroupError


class Ranks:
    """A process group, with the collectives that a cache needs.

    Args:
        group: a process group of `torch.distributed`, or None for all processes.
        operation: for messages.

    Attributes:
        group: torch's process group.
        rank: this process's rank in the group.
        world: the number of ranks.

    Raises:
        GroupError: torch.distributed is not started, the group is gone, or this process is not in it.
        MissingPackageError: torch is not installed.
    """

    def __init__(self, group: Any, operation: str) -> None:
        dist = distributed(operation)
        if not dist.is_initialized():
            raise GroupError(
                f"{operation}: torch.distributed has not been started in this process. Call "
                f"torch.distributed.init_process_group() first, and start the processes with torchrun."
            )
        self.group = dist.group.WORLD if group is None else group
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13
        with self.understanding(operation):
            self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise GroupError(
                f"{operation}: process {dist.get_rank()} is not in the group that was passed. Create the store "
                f"only in the processes of the group."
            )

    def gather(self, mine: Any, operation: str, out: Array | None = None) -> Any:
        """The tensors of all ranks, stacked in `out` or in new memory by one collective; or GroupError."""
        import torch

        if out is None:
            out = mine.new_empty((self.world, *mine.shape))
        with self.understanding(operation):
            if self.group is not torch.distributed.group.WORLD:
                torch.distributed.get_rank(self.group)  # notices a destroyed group, which a collective may not
            self._gather(out.view(-1), mine.view(-1), group=self.group)
        return out

    def gather_objects(self, mine: Any, operation: str) -> list[Any]:
        """A small object from each rank, in order; or GroupError. This is slow: use it once per store."""
        import torch

        objects: list[Any] = [None] * self.world
        with self.understanding(operation):
            torch.distributed.all_gather_object(objects, mine, group=self.group)
        return objects

    def require_agreement(self, operation: str, call: tuple[Any, ...]) -> None:
        """Raise GroupError on all ranks unless they make the same call; the message shows each rank's call."""
        calls = self.gather_objects(call, operation)
        if any(other != calls[0] for other in calls):
            said = "; ".join(f"rank {i}: {' '.join(map(str, other))}" for i, other in enumerate(calls))
            raise GroupError(
                f"{operation}: the ranks disagree: {said}. Make the same calls on all of them, in the same order."
            )

    @contextlib.contextmanager
    def understanding(self, operation: str) -> Iterator[None]:
        """A context in which errors of torch.distributed become `GroupError`."""
        try:
            yield
        except (RuntimeError, ValueError, AttributeError) as error:
            if isinstance(error, GroupError):
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            process = f"rank {self.rank} of {self.world}" if hasattr(self, "world") else "this process"
            raise GroupError(
                f"{operation}: {process} lost the other processes ({reason}). One of them has ended, or "
                f"destroy_process_group() was called. Start all processes again."
            ) from error


def distributed(operation: str) -> Any:
    """The module torch.distributed, or GroupError where torch is missing or was built without it."""
    dist = extras.need("torch.distributed", operation)
    if not dist.is_available():
        raise GroupError(f"{operation}: this torch was built without torch.distributed. Install one that has it.")
    return dist
