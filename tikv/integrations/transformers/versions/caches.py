"""What differs in the methods of caches.

- `lazy_initialization` is given the keys in 4.x, keys and values in 5.x.
- The capacity getter is `get_max_cache_shape`; from 5.13 on `get_max_length`, and later versions drop the old name.
- `crop(n)` with n < 0 drops -n tokens; n > 0 keeps n, and is refused from 5.16 on; 0 keeps nothing, from 5.14 on all.
- From 5.14 on `activate_past_recording` says that the next `crop` may go back beyond a window.
"""

from __future__ import annotations

from typing import Any

from transformers import cache_utils

from tikv.integrations.transformers.versions.installed import VERSION

CROP_IS_RELATIVE = VERSION >= (5, 14)  # the argument counts tokens to remove, as a negative number

CROP_REFUSES_POSITIVE = VERSION >= (5, 16)


def tokens_after_crop(n: int, length: int) -> int | None:
    """The length that `crop(n)` leaves in this version of transformers; None if it refuses this n."""
    if n < 0:
        return max(0, length + n)
    if CROP_IS_RELATIVE and n == 0:
        return length
    return None if CROP_REFUSES_POSITIVE else min(n, length)


def layer_without_keys() -> Any:
    """A placeholder for a layer that caches nothing."""
    return cache_utils.DummyLayer()
