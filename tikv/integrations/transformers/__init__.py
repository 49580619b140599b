"""A transformers `Cache` over this library's layers, and its decode attention under the name "tikv".

from tikv.integrations.transformers import TikvCache
model.generate(**inputs, cache=TikvCache(model.config))  # past_key_values= before transformers 5.24

`cache` has `TikvCache`, and `_layer` there chooses the class of each layer; `layer` has the class of most, from which
the others are derived. `attention` is what models call. `custom_generate` has `captured`, whose steps are in `loop`.
`shim` has everything in which versions of transformers differ.
"""

from tikv import extras

try:
    import torch  # without torch, transformers can be imported, but fails when it is used
    import transformers

    extras.require_version(torch)
    extras.require_version(transformers)
except ImportError as error:
    raise extras.missing("tikv.integrations.transformers", error, "transformers") from None

from tikv.integrations.transformers.cache import TikvCache
from tikv.integrations.transformers.custom_generate import captured
from tikv.integrations.transformers.layer import TikvLayer
from tikv.integrations.transformers.page_formats import pages
from tikv.integrations.transformers.snapshots import TikvSnapshot

__all__ = ["TikvCache", "TikvLayer", "TikvSnapshot", "captured", "pages"]
