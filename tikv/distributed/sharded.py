"""ShardedKVCacheStore: a cache that several processes hold together, sharded by heads, by tokens, or by both."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tikv import dtypes
from tikv.arrays import (
    Array,
    Arrays,
    ArrayView,
    describe,
    is_followed,
    new_like,
    refuse_backward,
    runtime_of,
    view,
    write_host,
)
from tikv.distributed import saved
from tikv.distributed.partials import Partials, StorePartials
from tikv.distributed.ranks import Ranks
from tikv.distributed.token_shard import TokenShardLayers
from tikv.distributed.token_sharding import TokenSharding
from tikv.errors import CacheFileError, OptionError, PositionError, ShapeError, TikvError
from tikv.ops import checks
from tikv.ops.attention.mass import Mass
from tikv.ops.attention.merge import merge_parts
from tikv.ops.attention.request import AttendRequest, AttentionScale
from tikv.ops.attention.terms import check_scores
from tikv.stores import files
from tikv.stores.files import replacing
from tikv.stores.files.contiguous import layers_of
from tikv.stores.layers.attempt import attempt
from tikv.stores.layers.attend import last_queries, results_of
from tikv.stores.layers.queries import attend_queries, with_tokens
from tikv.stores.layers.storage import StoreConfig
from tikv.stores.store import KVCacheStore

SHARDS = ("heads", "tokens")
# The attributes and methods of `KVCacheStore` that mean the same where tokens are sharded.
COUNTS = ("held", "layer_length", "length", "memory_version", "nbytes", "num_layers", "seq_lens")
FORM = ("capacity", "dtype", "head_dim", "head_dim_v", "scale_dtype", "sinks", "v_dtype", "windows")
STATE = ("batch_size", "lock", "runtime")
CHANGES = ("advance", "positions_on_device", "repeat", "reorder", "reset", "restore", "select", "snapshot", "trim")
ALIKE = frozenset(COUNTS + FORM + STATE + CHANGES)


class NotSharedError(OptionError, AttributeError):
    """A method of `KVCacheStore` that a cache sharded by tokens does not have."""


class ShardedKVCacheStore:
    """The keys and values of a model's layers, sharded over the processes of a `torch.distributed` group.

    Every process creates the store with the sizes of the whole model and makes the same calls in the same order. If it
    is sharded by heads, each rank holds some of the KV heads; k, v, q and results have only these heads, and no call
    communicates. If it is sharded by tokens, every rank takes k, v and q with all tokens, and returns their results.
    Each rank stores its share of the tokens, in blocks of ``interleave``, and attends over those; one all_gather of
    small tensors merges the partial results by their log-sum-exps. A two-dimensional mesh does both.

    Args:
        group_or_mesh: a process group, a device mesh of one or two dimensions, or None for all processes.
        shard: "heads" or "tokens"; for a two-dimensional mesh, a pair of both, in the order of the mesh's dimensions.
        interleave: tokens per block; of the ranks that share tokens, rank ``p // interleave % world`` holds position
            p. Small blocks spread short caches evenly; prompts are processed in pieces of as many queries, at most 256.
        **form: the arguments of `KVCacheStore`, for the whole model: ``num_kv_heads`` counts the heads of all ranks,
            and ``capacity`` and ``window`` count all tokens; ``k_scale`` and ``v_scale`` are numbers.

    Attributes:
        num_kv_heads: the KV heads of all ranks, as given.
        heads: the KV heads of this rank, a range.
        local: a `KVCacheStore` with this rank's heads and tokens.

    Raises:
        GroupError: torch.distributed was not started, the group does not exist, or this process is not in it.
        MissingPackageError: torch is not installed.
        OptionError, ShapeError: ``shard`` is unknown or does not fit the mesh, or the ranks do not divide the KV heads.
        TikvError: as `KVCacheStore` raises it.

    If it is sharded by heads, it has all methods of `KVCacheStore`. If it is sharded by tokens, it has these: `append`,
    `append_all`, `attend`, `extend`, `trim`, `align`, `reset`, `positions_on_device`, `advance`, `reorder`, `select`,
    `repeat`, `snapshot`, `restore`, `save`, `load` and counts such as `length` and `held`; ``local`` has the others.

    Exactness: it stores the bits that a `KVCacheStore` would store. Attention over sharded tokens sums in a different
        order, in float32, with one rounding at the end.
    Cost: an append is one launch on the token's rank and nothing on the others. Attention over sharded tokens sends ``4
    * batch * Hq * T * (head_dim_v + 1)`` bytes from each rank to each other rank.
    Processes: if one ends, or makes different calls, others wait or raise, as [When processes
    disagree][when-processes-disagree] (docs/tutorials/processes.md) says.

    Examples:
        >>> import numpy as np, tempfile, torch.distributed as dist
        >>> from tikv.distributed import ShardedKVCacheStore
        >>> file = tempfile.NamedTemporaryFile()
        >>> dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        >>> form = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4, "capacity": 8, "dtype": "float32"}
        >>> store = ShardedKVCacheStore(None, shard="tokens", interleave=2, **form)
        >>> k = np.ones((3, 2, 4), np.float32)
        >>> store.append(0, k, 2 * k)
        >>> store.attend(0, np.ones((1, 2, 4), np.float32))[0, 0].tolist(), store.length
        ([2.0, 2.0, 2.0, 2.0], 3)
        >>> dist.destroy_process_group()
    """

    local: KVCacheStore

    def __init__(self, group_or_mesh: Any, *, shard: Any, interleave: int = 64, **form: Any) -> None:
        operation = "ShardedKVCacheStore"
        interleave = checks.integer(interleave, "interleave", operation, low=1)
        groups = _groups(group_or_mesh, shard, operation)
        self.ranks: dict[str, Ranks] = {name: Ranks(group, operation) for name, group in groups.items()}
        self.interleave = interleave
        self.num_kv_heads = checks.integer(form.pop("num_kv_heads", None), "num_kv_heads", operation, low=1)
        by_heads = self.ranks.get("heads")
        rank, world = (by_heads.rank, by_heads.world) if by_heads else (0, 1)
        if self.num_kv_heads % world:
            raise ShapeError(
                f"{operation}: num_kv_heads={self.num_kv_heads} cannot be divided evenly among {world} ranks. Use "
                "a number of ranks that divides them, or shard by tokens."
            )
        for name in ("k_scale", "v_scale"):
            if hasattr(form.get(name), "__len__"):
                raise OptionError(
                    f"{operation}: {name} has a number for each head, and heads may lie on other ranks. Use one number "
                    f"for all."
                )
        share = self.num_kv_heads // world
        self.heads = range(rank * share, (rank + 1) * share)
        by_tokens = self.ranks.get("tokens")
        self._shard: TokenShardLayers | None = None
        if by_tokens is None:
            self.local = KVCacheStore(num_kv_heads=share, **form)
        else:
            sharding = TokenSharding(by_tokens.rank, by_tokens.world, interleave)
            of_all = StoreConfig.checked(operation, num_kv_heads=share, **form)
            self._shard = TokenShardLayers(runtime_of(), of_all, sharding)
            self.local = KVCacheStore.over(of_all, self._shard)
        self._debug = self.local.runtime.debug
        self._partials = StorePartials(self.local.runtime, self.local.head_dim_v, by_tokens.world if by_tokens else 1)
        self._agree(operation, shard, interleave, *(f"{name}={value}" for name, value in sorted(form.items())))

    def append(
        self, layer: int, k: Array, v: Array, *, layout: str = "token_major", positions: Array | None = None
    ) -> None:
        """Append new tokens to one layer: all tokens, with this rank's heads. See `KVCacheStore.append`.

        Where tokens are sharded, a call with ``positions`` must have one token per sequence.

        Raises:
            As `KVCacheStore.append`. Nothing is written.
        """
        self._agree("ShardedKVCacheStore.append", layer, k, v, layout)
        with self._of_rank():
            self.local.append(layer, k, v, layout=layout, positions=positions)

    def append_all(self, k: Array, v: Array, *, layout: str = "token_major", positions: Array | None = None) -> None:
        """Append new tokens to all layers: all tokens, with this rank's heads. See `KVCacheStore.append_all`.

        Raises:
            As `KVCacheStore.append_all`. Nothing is written.
        """
        self._agree("ShardedKVCacheStore.append_all", k, v, layout)
        with self._of_rank():
            self.local.append_all(k, v, layout=layout, positions=positions)

    def attend(
        self,
        layer: int,
        q: Array,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        return_lse: bool = False,
        softcap: float | None = None,
        out: Array | None = None,
        missing: str = "raise",
        seq_lens: Array | int | None = None,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        **options: Any,
    ) -> Arrays:
        """Attention of the newest tokens' queries over the tokens of all ranks. See `KVCacheStore.attend`.

        Args:
            layer: its index.
            q: as in `KVCacheStore.attend`, with the query heads that read this rank's KV heads.
            layout, scale, return_lse, softcap, out, missing, seq_lens, sink_logits, alibi_slopes: as in
                `KVCacheStore.attend`; logits and slopes are for q's heads. Where tokens are sharded, a call with
                ``seq_lens`` must have one query per sequence and no slopes, and the window of its layer, without the
                sinks, must be a multiple of the number of ranks times ``interleave``.
            return_mass, mass_queries: as in `KVCacheStore.attend`; every rank gets the mass of the tokens of all ranks,
                for its own heads. Where tokens are sharded, this takes one more collective.
            **options: the other options, which are supported only where just the heads are sharded.

        Returns:
            As `KVCacheStore.attend`: for this rank's heads, over all tokens.

        Raises:
            As `KVCacheStore.attend`. GroupError: another process is gone, or in debug mode makes a different call.
        """
        operation = "ShardedKVCacheStore.attend"
        request = AttendRequest(
            layout=layout, scale=scale, softcap=softcap, return_lse=return_lse, out=out, seq_lens=seq_lens,
            missing=missing, sink_logits=sink_logits, alibi_slopes=alibi_slopes, return_mass=return_mass,
            mass_queries=mass_queries,
        )  # fmt: skip
        added = sink_logits, alibi_slopes
        self._agree(operation, layer, q, layout, missing, scale, softcap, *added, return_mass, mass_queries)
        self._refuse("attend", options)
        store = self._shard
        with self._of_rank():
            if store is None:
                return self.local.attend(layer, q, **_keywords(request) | options)
            request = request.checked(operation)
            scores = request.scores
            request.check_choices(operation)
            checks.integer(layer, "layer", operation, high=self.local.num_layers - 1)
            form = store.batch_size, len(self.heads), self.local.head_dim
            q_view = view(q, "q", operation)
            queries = attend_queries(operation, q_view, layout, *form, store.runtime)
            query = with_tokens(queries.as_read(q_view), 4)
            sinks, slopes = self._terms(operation, request, *query.shape[:2])
            mass = request.asked_mass(operation)
            with store.lock:
                if seq_lens is None:
                    queries.refuse_more_than(operation, store.counts[layer].length, len(self.heads))
                result, to = queries.result(operation, q, out, self.local.head_dim_v, store.runtime)
                checks.disjoint([("q", q_view, False), ("out", to, True)], operation)
                partials = self._partials.of(query.shape[:3], self._device_of(q))
                lse, to_lse = None, partials.lse_view
                if request.return_lse or mass:
                    lse = queries.new_lse(q, store.runtime)
                    to_lse = with_tokens(queries.as_read(view(lse, "lse", operation)), 3)
                store.attend_own(operation, layer, query, partials.local_view, scores, missing, seq_lens, slopes)
                self._merge(operation, partials, with_tokens(queries.as_read(to), 4), to_lse, sinks)
                weights = self._mass(operation, layer, q, query, to_lse, mass, scores) if mass else None
        results = results_of(result, lse if request.return_lse else None, weights)
        return refuse_backward(results, q, followed=self.local._followed)

    def extend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        layout: str = "token_major",
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
        sink_logits: Array | None = None,
        alibi_slopes: Array | None = None,
        return_mass: bool | str = False,
        mass_queries: int | None = None,
        **options: Any,
    ) -> Arrays:
        """Append new tokens, and attend with their queries over the tokens of all ranks and the new ones.

        Args:
            layer, layout, scale, softcap, return_lse: as in `KVCacheStore.extend`.
            sink_logits, alibi_slopes, return_mass, mass_queries: as in `attend`.
            q, k, v: all new tokens, with this rank's heads.
            **options: the other options, which are supported only where just the heads are sharded.

        Returns:
            As `KVCacheStore.extend`.

        Raises:
            As `append` and `attend`. The lengths are then unchanged, even if a process was lost meanwhile. New tokens
            of a sliding layer may already have overwritten older ones.

        Cost: where tokens are sharded, one collective, however long the prompt; one launch serves the queries of a
            block, at most 256 of them.
        """
        operation = "ShardedKVCacheStore.extend"
        request = AttendRequest(
            layout=layout, scale=scale, softcap=softcap, return_lse=return_lse, sink_logits=sink_logits,
            alibi_slopes=alibi_slopes, return_mass=return_mass, mass_queries=mass_queries,
        )  # fmt: skip
        added = sink_logits, alibi_slopes
        self._agree(operation, layer, q, k, v, layout, scale, softcap, *added, return_mass, mass_queries)
        self._refuse("extend", options)
        store = self._shard
        with self._of_rank():
            if store is None:
                return self.local.extend(layer, q, k, v, **_keywords(request) | options)
            request = request.checked(operation)
            scores = request.scores
            checks.integer(layer, "layer", operation, high=self.local.num_layers - 1)
            mass = request.asked_mass(operation)
            with store.lock:
                self.local._check_write(operation, layer, view(k, "k", operation), request.layout)
                queries, query, rows = store.extension(operation, layer, (q, k, v), layout, scores)
                sinks, slopes = self._terms(operation, request, *query.shape[:2])
                result, out = queries.result(operation, q, None, self.local.head_dim_v, store.runtime)
                lse = queries.new_lse(q, store.runtime)
                to, to_lse = queries.as_read(out), queries.as_read(view(lse, "lse", operation))
                with attempt(operation, [store.counts[layer], store.local.counts[layer]]):
                    if query.shape[2]:
                        partials = self._partials.of(query.shape[:3], self._device_of(q))
                        store.extend_own(operation, layer, rows, layout, query, partials.local_view, scores, slopes)
                        self._merge(operation, partials, to, to_lse, sinks)
                    weights = self._mass(operation, layer, q, query, to_lse, mass, scores) if mass else None
        results = results_of(result, lse if request.return_lse else None, weights)
        self.local._followed |= is_followed(k, v)
        return refuse_backward(results, q, k, v, followed=self.local._followed)

    def trim(self, n: int) -> None:
        """Drop the ``n`` newest tokens of every layer. See `KVCacheStore.trim`.

        Raises:
            PositionError: ``n`` is more than `length`, or goes further back than a ring still holds. Nothing is
                changed.
        """
        self._agree("ShardedKVCacheStore.trim", n)
        self.local.trim(n)

    def align(self) -> int:
        """Bring every layer of every rank back to the length of the shortest. See `KVCacheStore.align`.

        If Ctrl-C ended a step on some ranks only, those have fewer tokens than others: call this on all of them.

        Raises:
            PositionError: a layer of any rank cannot go back; all ranks raise it, and nothing is changed.
            GroupError: a process is gone.

        Cost: two small collectives, also if only heads are sharded.
        """
        operation = "ShardedKVCacheStore.align"
        local = self.local
        shortest = min(map(local.layer_length, range(local.num_layers)))
        length: int = min(self._of_all(shortest, operation))
        with self._failing_together(operation, PositionError):
            local.refuse_align(operation, length)
        local.align_to(operation, length)
        return length

    def reset(self) -> None:
        """Forget all tokens. The memory and its contents stay."""
        self._agree("ShardedKVCacheStore.reset")
        self.local.reset()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the cache: one file per rank, and an index that names them, written last.

        Args:
            path: the index's path, which ends in ``.json``. The files are put beside it, so all ranks must see that
                folder. The files that an older index at this path named are removed.

        Raises:
            CacheFileError: the path has the wrong ending, or the system refuses to write, on any rank; all ranks raise
                it. An older save stays.
            GroupError: a process is gone.

        Exactness: every bit is kept. Cost: each rank copies its tokens once to the host and once to the disk; three
            small collectives.
        """
        operation = "ShardedKVCacheStore.save"
        groups = list(self.ranks.values())
        number = sum(ranks.rank * stride for ranks, stride in zip(groups, self._strides(), strict=True))
        count = math.prod(ranks.world for ranks in groups)
        save = self._of_all(secrets.token_hex(4), operation)[0]  # tells the files of one save from those of others
        with self._failing_together(operation):
            target = replacing.target_of(path, operation, saved.SUFFIX)
            with self.local.lock:
                layers = self.local.host_layers()
                of_all = [layer for layer, _ in layers] if self._shard is None else self._shard.counts
                name = saved.file_name(target, number, count, save)
                saved.write_share(target.parent / name, self._shared(), self._form(), of_all, layers, save)
        with self._failing_together(operation):
            if number == 0:
                saved.write_index(target, [saved.file_name(target, i, count, save) for i in range(count)], save)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], group_or_mesh: Any, *, shard: Any, interleave: int = 64
    ) -> ShardedKVCacheStore:
        """A new store with the arguments, counts and contents of a saved one, sharded as these processes ask.

        Args:
            path: the index that `save` wrote, perhaps with a different number of ranks and a different sharding.
            group_or_mesh, shard, interleave: as for the class.

        Raises:
            CacheFileError: the index or a file is missing, damaged, or not one that `save` wrote.
            GroupError: a process is gone, or could not load it.
            TikvError: as the class raises it.

        Cost: every rank reads every file.
        """
        operation = "ShardedKVCacheStore.load"
        cache = saved.Saved(Path(path), operation)
        with files.understanding(path, operation):
            store = cls(group_or_mesh, shard=shard, interleave=interleave, **cache.form)
            with store._failing_together(operation):
                store._take_over(cache, operation)
        return store

    @property
    def length(self) -> int:
        """Tokens appended to every layer since `reset`, less those trimmed; reading it does not communicate."""
        return self.local.length

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales on this rank."""
        return self.local.nbytes

    def held(self, layer: int) -> Any:
        """The number of tokens that a layer holds, over all ranks. See `KVCacheStore.held`."""
        return self.local.held(layer)

    def __getattr__(self, name: str) -> Any:
        # Python asks for what is not defined above. `KVCacheStore` gives it, if it means the same here.
        if name.startswith("_") or (not hasattr(KVCacheStore, name) and name not in ALIKE):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        if self._shard is not None and name not in ALIKE:
            raise NotSharedError(
                f"ShardedKVCacheStore.{name}: a cache sharded by tokens does not have it, since no rank holds all "
                f"tokens. This is {self._share()}. Use `local.{name}` for this rank's tokens, or shard by heads."
            )
        return getattr(self.local, name)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"ShardedKVCacheStore({self._share()}: {self.local!r})"

    # --- internals

    def _shared(self) -> saved.Share:
        """This rank's share, as files record it."""
        sharding = TokenSharding(0, 1, 1) if self._shard is None else self._shard.sharding
        return saved.Share(self.heads.start, self.heads.stop, sharding)

    def _form(self) -> dict[str, Any]:
        """The arguments of a store that holds what all ranks hold, in JSON's types."""
        names = ("num_layers", "head_dim", "head_dim_v", "capacity", "batch_size", "sinks")
        form = {name: getattr(self.local, name) for name in names}
        dtypes_ = {name: getattr(self.local, name).name for name in ("dtype", "v_dtype", "scale_dtype")}
        scales = zip(("k_scale", "v_scale"), self.local.divisors, strict=True)
        divisors = {name: numbers[0] for name, numbers in scales if numbers is not None}
        return {**form, **dtypes_, **divisors, "num_kv_heads": self.num_kv_heads, "window": self.local.windows}

    def _take_over(self, cache: saved.Saved, operation: str) -> None:
        """Hold this rank's part of a saved cache."""
        local, counts = self.local, cache.counts
        rank_counts = counts if self._shard is None else self._shard.take_counts(counts)
        layers = [copy.copy(layer) for layer, _ in local.host_layers()]
        for layer, (length, valid_from) in zip(layers, rank_counts, strict=True):
            layer.length, layer.valid_from = length, valid_from
        of_all = layers_of(cache.form, counts)
        local.take_over(rank_counts, cache.slots_for(self._shared(), of_all, layers, local.batch_size), operation)

    def _strides(self) -> list[int]:
        """How far apart, in ranks of all processes, neighbours in each group are."""
        worlds = [ranks.world for ranks in self.ranks.values()]
        return [math.prod(worlds[i + 1 :]) for i in range(len(worlds))]

    def _of_all(self, mine: Any, operation: str) -> list[Any]:
        """A small object from each process, ordered so that the last group's ranks are adjacent."""
        objects = [mine]
        for ranks in reversed(self.ranks.values()):
            objects = [each for part in ranks.gather_objects(objects, operation) for each in part]
        return objects

    @contextlib.contextmanager
    def _failing_together(self, operation: str, kind: type[TikvError] = CacheFileError) -> Iterator[None]:
        """A context at whose end all processes raise an error of this kind if one of them did."""
        failed = ""
        try:
            yield
        except kind as error:
            failed = str(error)
        if failures := [each for each in self._of_all(failed, operation) if each]:
            raise kind(failed or f"{operation}: another process failed: {failures[0]}")

    def _share(self) -> str:
        """What this rank holds, for messages."""
        parts = []
        if (by := self.ranks.get("heads")) is not None:
            parts.append(
                f"rank {by.rank} of {by.world}: KV heads {self.heads[0]}..{self.heads[-1]} of {self.num_kv_heads}"
            )
        if (by := self.ranks.get("tokens")) is not None:
            parts.append(f"rank {by.rank} of {by.world}: tokens in blocks of {self.interleave}")
        return ", ".join(parts)

    @contextlib.contextmanager
    def _of_rank(self) -> Iterator[None]:
        """A context that adds to a ShapeError what this rank takes."""
        try:
            yield
        except ShapeError as error:
            raise ShapeError(
                f"{error} This is {self._share()}. k, v and q must have the heads of this "
                f"rank{'' if self._shard is None else ', with all tokens'}."
            ) from None

    def _refuse(self, name: str, options: dict[str, Any]) -> None:
        """Raise OptionError for options of `KVCacheStore` that are not supported where tokens are sharded."""
        if options and self._shard is not None and options != {"impl": "auto"}:
            raise OptionError(
                f"ShardedKVCacheStore.{name}: {', '.join(options)} is not supported where tokens are sharded. Leave "
                f"it out, or shard by heads."
            )

    def _agree(self, operation: str, *call: Any) -> None:
        """In debug mode, raise GroupError if not all ranks make this call."""
        if self._debug:
            values = tuple(_comparable(value, operation) for value in call)
            for ranks in self.ranks.values():
                ranks.require_agreement(operation, (operation, *values, f"length={self.local.length}"))

    def _device_of(self, q: Array) -> Any:
        """The device on which torch makes tensors to use with q."""
        import torch

        live = self.local.runtime
        return q.device if isinstance(q, torch.Tensor) else live.device if live.is_cuda else "cpu"

    def _terms(
        self, operation: str, request: AttendRequest, batch: int, heads: int
    ) -> tuple[ArrayView | None, dict[str, ArrayView]]:
        """What is added to the scores of this rank's query heads: sink logits, which the merge counts, and slopes."""
        terms = request.terms.views(operation)
        check_scores(operation, terms, batch, heads, self.local.runtime)
        return terms.pop("sink_logits", None), terms

    def _merge(self, operation: str, parts: Partials, out: ArrayView, lse: ArrayView, sinks: ArrayView | None) -> None:
        """Gather the partial results of all ranks, and write their merge, which counts the sink logits once."""
        self.ranks["tokens"].gather(parts.local, operation, parts.all)
        merge_parts(operation, parts.all_view, out, lse, sinks)

    def _mass(
        self,
        operation: str,
        layer: int,
        like: Any,
        q: ArrayView,
        lse: ArrayView,
        asked: Mass,
        scores: AttentionScale,
    ) -> Any:
        """The mass of each token on any rank, as it is asked for.

        `q` and `lse` are (batch, Hq, T, D) and (batch, Hq, T), over the keys of all ranks; the result is an array of
        the same kind as `like`.
        """
        import torch

        store = self._shard
        assert store is not None
        where, counts = store.sharding.places(store.held_positions(layer))
        shape = store.batch_size, len(self.heads), max(counts)
        rank_mass = torch.zeros(shape, dtype=torch.float32, device=self._device_of(like))
        total = rank_mass
        if rank_mass.shape[2]:
            store.weigh_own(operation, layer, *last_queries(q, lse, asked.queries), rank_mass, scores, asked.kind)
            ranks, places = (torch.from_numpy(a).to(rank_mass.device) for a in where)
            total = self.ranks["tokens"].gather(rank_mass, operation)[ranks, :, :, places].permute(1, 2, 0).contiguous()
        if isinstance(like, torch.Tensor):
            return total
        mass = new_like(like, total.shape, dtypes.float32, store.runtime)
        write_host(total.cpu().numpy(), view(mass, "mass", operation))
        return mass


def _groups(group_or_mesh: Any, shard: Any, operation: str) -> dict[str, Any]:
    """The process groups by what they shard, heads or tokens; or OptionError if `shard` is unclear."""
    names = (shard,) if isinstance(shard, str) else tuple(shard) if isinstance(shard, (tuple, list)) else ()
    mesh = group_or_mesh if hasattr(group_or_mesh, "mesh") and hasattr(group_or_mesh, "get_group") else None
    dimensions = 1 if mesh is None else mesh.ndim
    if not names or any(name not in SHARDS for name in names) or len(set(names)) < len(names):
        raise OptionError(
            f"{operation}: shard={shard!r} is unknown. Use 'heads' or 'tokens'; for a two-dimensional mesh, a pair "
            f"of both in the order of its dimensions."
        )
    if len(names) != dimensions:
        raise OptionError(
            f"{operation}: shard={shard!r} is for {len(names)} dimension{'s' * (len(names) != 1)}, but the "
            f"{'group' if mesh is None else 'mesh'} has {dimensions}. Name what each dimension shards."
        )
    if mesh is None:
        return {names[0]: group_or_mesh}
    return {name: mesh.get_group(i) for i, name in enumerate(names)}


def _keywords(request: AttendRequest) -> dict[str, Any]:
    """The options of a request that were given, by name."""
    defaults = AttendRequest._field_defaults
    return {name: value for name, value in request._asdict().items() if value is not defaults[name]}


def _comparable(value: Any, operation: str) -> str:
    """How the ranks compare a value of a call: an array by its form, never by its numbers."""
    if value is None or isinstance(value, (str, int, float, tuple)):
        return repr(value)
    array = view(value, "an array", operation)
    return f"{describe(array)} on {array.device.partition(':')[0]}"
