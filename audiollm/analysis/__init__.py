"""Plain functions that look inside a model; each returns a frozen result with its seconds."""

from __future__ import annotations

from .norms import LayerNorms, layer_norms

__all__ = ["LayerNorms", "layer_norms"]
