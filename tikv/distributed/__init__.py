"""Caches over several processes, on `torch.distributed`; torch is imported when one is made."""

from tikv.distributed.sharded import ShardedKVCacheStore as ShardedKVCacheStore
from tikv.distributed.transfer import recv_sequence as recv_sequence
from tikv.distributed.transfer import send_sequence as send_sequence
