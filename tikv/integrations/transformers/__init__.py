"""A transformers `Cache` over this library's layers, and its decode attention under the name "tikv".

from tikv.integrations.transformers import TikvCache
model.generate(**inputs, cache=TikvCache(model.config))  # past_key_values= before transformers 5.24

The folders, from the top: `loop` has `captured`, `cache` has `TikvCache`, `layers` its layers; `batching` is for
`generate_batch`; `attention` is what models call; `memory` holds what all of them read and write. `versions` has
everything in which versions of transformers differ, and `registration` makes the attention known to transformers.
"""

from tikv import extras

try:
    import torch  # without torch, transformers can be imported, but fails when it is used
    import transformers

    extras.require_version(torch)
    extras.require_version(transformers)
except ImportError as error:
    raise extras.missing("tikv.integrations.transformers", error, "transformers") from None

from tikv.integrations.transformers import registration as registration
from tikv.integrations.transformers.batching.page_formats import pages
from tikv.integrations.transformers.cache.cache import TikvCache
from tikv.integrations.transformers.cache.snapshots import TikvSnapshot
from tikv.integrations.transformers.layers.layer import TikvLayer
from tikv.integrations.transformers.loop.custom_generate import captured

__all__ = ["TikvCache", "TikvLayer", "TikvSnapshot", "captured", "pages"]
