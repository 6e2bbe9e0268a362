"""audiollm: look inside audio language models, from a notebook."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from .lazy import lazy_names

if TYPE_CHECKING:
    from .batch import AudioEmbedding, AudioSlot, PreparedBatch, TokenRow
    from .errors import ArgumentError, AudioError, AudioLLMError, RequestError, SessionBusyError, SnapshotError
    from .generation import Generation
    from .loading import load_model
    from .request import Request, Waveform
    from .session import Session

__version__ = "0.1.0"

# Where each public name lives; modules load when a name is first used, so that `import audiollm` stays light.
_HOME = {
    "ArgumentError": "errors",
    "AudioEmbedding": "batch",
    "AudioError": "errors",
    "AudioLLMError": "errors",
    "AudioSlot": "batch",
    "Generation": "generation",
    "PreparedBatch": "batch",
    "Request": "request",
    "RequestError": "errors",
    "Session": "session",
    "SessionBusyError": "errors",
    "SnapshotError": "errors",
    "TokenRow": "batch",
    "Waveform": "request",
    "load_model": "loading",
}

__all__ = [
    "ArgumentError",
    "AudioEmbedding",
    "AudioError",
    "AudioLLMError",
    "AudioSlot",
    "Generation",
    "PreparedBatch",
    "Request",
    "RequestError",
    "Session",
    "SessionBusyError",
    "SnapshotError",
    "TokenRow",
    "Waveform",
    "load_model",
]


__getattr__, __dir__ = lazy_names(__name__, _HOME)


# In a source checkout the folders `widgets`, `vendor` and `notebooks` lie beside this one; let their names resolve
# without an installation. In a wheel they are real subpackages and this does nothing.
_ROOT = pathlib.Path(__file__).resolve().parent.parent
if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "vendor" / "__init__.py").is_file():
    __path__.append(str(_ROOT))
