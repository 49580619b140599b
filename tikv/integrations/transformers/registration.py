"""Registers attention "tikv" and its masks with transformers, for `generate` and for continuous batching."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from tikv.integrations.transformers.attention.attend import attend
from tikv.integrations.transformers.attention.masks import mask_for_attend
from tikv.integrations.transformers.batching import managers
from tikv.integrations.transformers.batching.attend import attend_batch
from tikv.integrations.transformers.names import ATTENTION

AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, mask_for_attend)
managers.install(attend_batch, mask_for_attend)
