"""Caches that several processes share through `torch.distributed`; torch is imported when one is created."""

from tikv.distributed.sharded import ShardedKVCacheStore as ShardedKVCacheStore
from tikv.distributed.transfer import recv_sequence as recv_sequence
from tikv.distributed.transfer import send_sequence as send_sequence
