"""The version of transformers that is installed, and what other modules ask of it."""

from __future__ import annotations

import transformers

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

MODELS_UPDATE_PAGES = VERSION >= (5, 24)  # and masks are not made in continuous batching
