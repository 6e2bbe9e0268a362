"""One adapter a model family: prompts, mel, positions, and where a tensor lives in that model."""

from __future__ import annotations

from .base import Family

__all__ = ["Family", "for_model_type", "known_model_types"]


def _families() -> tuple[type[Family], ...]:
    from .moss_music import MossMusic
    from .music_flamingo import MusicFlamingo

    return (MusicFlamingo, MossMusic)


def for_model_type(model_type: str) -> type[Family] | None:
    """The family of a config.json's `model_type`, or None."""
    return next((family for family in _families() if model_type in family.model_types), None)


def known_model_types() -> tuple[str, ...]:
    """Every `model_type` that loads."""
    return tuple(name for family in _families() for name in family.model_types)
