"""`pages`: what the pages of transformers' continuous batching hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tikv.errors import OptionError
from tikv.integrations.transformers.batching import managers, page_memory
from tikv.integrations.transformers.memory.storage import storage_of
from tikv.integrations.transformers.names import PAGES
from tikv.stores.row_format import SCALES


@contextlib.contextmanager
def pages(*, dtype: Any = None, v_dtype: Any = None, k_scale: Any = None, v_scale: Any = None) -> Iterator[None]:
    """Within this context, pages of continuous batching for models with attention "tikv" hold another format.

    It applies to the managers that are made within it: by `generate_batch`, `init_continuous_batching` or the context
    manager of transformers. As many more tokens fit in the same memory as they need fewer bytes.

    Args:
        dtype, v_dtype, k_scale, v_scale: as in `TikvCache`, except groups along tokens, KVarN's tiles and unquantised
            tokens. None for ``dtype`` is the model's dtype.

    Raises:
        DTypeError: there is no such format.
        OptionError: groups along tokens; a scale for a format that has none; this version of transformers has no pages
            that can be replaced; or a manager with other pages runs, or is kept by its model.

    Examples:
        >>> with pages(dtype="int8"):
        ...     pass  # model.generate_batch(prompts, generation_config=...)
    """
    storage = storage_of(dtype, v_dtype, k_scale, v_scale, PAGES)
    if storage.quant is not None:
        raise OptionError(
            f"{PAGES}: dtype={dtype!r} is not supported: a page can end within a group of tokens. Use a tikv.Quant of "
            "groups along 'head_dim', without sinks and recent."
        )
    scales = {name: getattr(storage, name) for name in SCALES}
    lists: dict[str, Any] = {
        name: None if x is None else np.asarray(x, np.float64).tolist() for name, x in scales.items()
    }
    asked = None if storage == page_memory.PLAIN else storage._replace(**lists)  # lists can be compared
    managers.check_enters(asked)
    with page_memory.using(asked):
        yield
