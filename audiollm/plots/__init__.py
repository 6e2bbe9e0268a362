"""Matplotlib figures of what the engine and `audiollm.analysis` compute; computing and drawing are apart."""

from __future__ import annotations

from .overview import overview

__all__ = ["overview"]
