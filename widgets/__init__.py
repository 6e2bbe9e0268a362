"""Panels for JupyterLab, each a thin skin on the engine: choose audio, see windows and tokens, plot layers, edit, ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .audio_picker import AudioPicker
    from .explorer import Explorer, explore
    from .generate_panel import GeneratePanel
    from .hook_panel import HookPanel
    from .layer_panel import LayerPanel
    from .timeline_panel import TimelinePanel
    from .token_table import TokenTable

_HOME = {
    "AudioPicker": "audio_picker",
    "Explorer": "explorer",
    "GeneratePanel": "generate_panel",
    "HookPanel": "hook_panel",
    "LayerPanel": "layer_panel",
    "TimelinePanel": "timeline_panel",
    "TokenTable": "token_table",
    "explore": "explorer",
}

__all__ = [
    "AudioPicker",
    "Explorer",
    "GeneratePanel",
    "HookPanel",
    "LayerPanel",
    "TimelinePanel",
    "TokenTable",
    "explore",
]

__getattr__, __dir__ = lazy_names(__name__, _HOME)
