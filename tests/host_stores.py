"""Stores in the host's memory: on CUDA the true ones, on CPU such whose copies are made by NumPy, early or late."""

import functools

import tikv
from tikv import runtime
from tikv.stores.layers import STORAGES
from tikv.stores.layers.host import HostLayers
from tikv.stores.layers.residents import CopiedByNumPy
from tikv.stores.layers.storage import StoreConfig

ROWS = {"head_dim_v": None, "v_dtype": None, "scale_dtype": "float16", "k_scale": None, "v_scale": None}


def host_store(arch, late=True, **form):
    """A store of these arguments with ``place="host"``."""
    if arch != "cpu":
        return tikv.KVCacheStore(**form, place="host")
    config = StoreConfig.checked("KVCacheStore", **{**ROWS, "dtype": "float16", **form}, place="host")
    kind = next(storage for storage in STORAGES if storage.serves(config.rows["dtype"]))
    whole = kind(runtime.current(), config)
    return tikv.KVCacheStore.over(config, HostLayers(config, whole, functools.partial(CopiedByNumPy, late=late)))
