"""The language model: transformers' own Qwen3 decoder, with two things looked after around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Model

# The decoder's own name for the cache: past_key_values, and from transformers 5.24 on cache (which then takes both).
_DECODER_TAKES_CACHE = "cache" in inspect.signature(Qwen3Model.forward).parameters


class MossMusicLanguageModel(Qwen3Model):
    """transformers' Qwen3 decoder, with rotary frequencies that stay float32 through `.to(dtype)` and `.half()`."""

    def recompute_buffers(self, device: torch.device | str | None = None) -> None:
        """Compute every non-persistent buffer anew, in float32, on `device` (default: where each buffer is)."""
        with torch.device("cpu"):
            fresh = type(self.rotary_emb)(config=self.config)
        for name, buffer in fresh.named_buffers():
            place = getattr(self.rotary_emb, name).device if device is None else device
            setattr(self.rotary_emb, name, buffer.to(place))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MossMusicLanguageModel:
        super()._apply(fn, recurse)
        self.recompute_buffers()
        return self


def cached_length(cache: Any) -> int:
    """Positions that a cache holds; 0 for None."""
    return 0 if cache is None else int(cache.get_seq_length())


def cache_arguments(past_key_values: Any, cache: Any) -> dict[str, Any]:
    """The cache for the decoder, under the name it came with, or under the only name this release's decoder knows."""
    if cache is not None and not _DECODER_TAKES_CACHE:
        return {"past_key_values": cache}
    return {"past_key_values": past_key_values, "cache": cache}
