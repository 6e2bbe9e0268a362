"""Embeddings of many files, resumable, on one machine or many: `extract` writes a run, `open_run` reads it.

Names load when they are first used: the processes that prepare audio start from this package and need little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .arrays import Arrays
    from .errors import ManifestError, RunError, UnknownClipError
    from .extraction import extract
    from .reading import Clip, Run, open_run

_HOME = {
    "Arrays": "arrays",
    "Clip": "reading",
    "ManifestError": "errors",
    "Run": "reading",
    "RunError": "errors",
    "UnknownClipError": "errors",
    "extract": "extraction",
    "open_run": "reading",
}

__all__ = ["Arrays", "Clip", "ManifestError", "Run", "RunError", "UnknownClipError", "extract", "open_run"]


__getattr__, __dir__ = lazy_names(__name__, _HOME)
