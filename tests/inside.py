"""What tests see of the inside of a `KVCacheStore`: memory and counts that no public call gives.

Tests reach into stores here alone, so that one file changes when the inside moves. Whatever `keys`, `values`, `scales`,
`positions`, `held`, `tokens` or `memory_version` say is better read there.
"""


def storage_of(store):
    """How a store keeps its layers; of one on the host, what keeps all of them."""
    return getattr(store._storage, "whole", store._storage)


def resident_storage_of(store):
    """The part of a store on the host that has the copies on the device."""
    return store._storage


def layers_of(store):
    """Each layer's counts and arrays, whether filled or not."""
    return storage_of(store).counts


def codes_of(store):
    """Each layer's codes, of a store of groups along tokens."""
    return storage_of(store).codes


def sharding_of(store):
    """Which tokens a rank's part of a sharded store has; None if it has all tokens of some heads."""
    return getattr(store._storage, "sharding", None)
