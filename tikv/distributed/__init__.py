"""Caches that several processes share through `torch.distributed`; torch is imported when one is created.

`sharded` is the store; `token_sharding` says which rank holds a token, and `token_shard` stores the tokens of one rank
and knows nothing of other processes. `ranks` communicates with them, `partials` is what they exchange, `saved` is what
they write, and `transfer` sends sequences.
"""

from tikv.distributed.sharded import ShardedKVCacheStore as ShardedKVCacheStore
from tikv.distributed.transfer import recv_sequence as recv_sequence
from tikv.distributed.transfer import send_sequence as send_sequence
