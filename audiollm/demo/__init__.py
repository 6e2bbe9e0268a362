"""Embedded small snapshots and clips, for a first look without a model or a GPU.

The snapshots have the published architectures and file layouts at small width and **random weights**: they show how
the tool works, and what they say is nonsense. The clips are short real recordings of a piece of our own; see
`clips/README.md`.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from ..session import Session

SNAPSHOTS = ("music_flamingo", "moss_music")
CLIPS = ("mix", "drums", "bass", "keys", "long_mix")


def snapshot(name: str = "music_flamingo") -> Path:
    """The folder of an embedded snapshot. Raises: ArgumentError naming those there are."""
    if name not in SNAPSHOTS:
        raise ArgumentError(
            f"{name!r} is not one of {', '.join(map(repr, SNAPSHOTS))}", code="bad_argument", source="name"
        )
    return _folder() / name


def load(
    name: str = "music_flamingo",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    weights: str = "snapshot",
) -> Session:
    """Load an embedded snapshot, on the CPU in float32 where nothing else is asked.

    With `weights="random"` it is the snapshot's twin: the same shape and tokenizer, every weight drawn at random at the
    scale that it has, the same at every call; the control for probing. Raises: ArgumentError for another word.
    """
    import torch

    from ..loading import load_model
    from .twin import forget

    if weights not in ("snapshot", "random"):
        raise ArgumentError(f"weights={weights!r}; pass 'snapshot' or 'random'", code="bad_argument", source="weights")
    session = load_model(snapshot(name), device=device, dtype=torch.float32 if dtype is None else dtype)
    if weights == "random":
        forget(session.model)
    return session


def clips() -> dict[str, Path]:
    """The embedded clips by name: `mix` (12 s) with its stems `drums`, `bass`, `keys`, and `long_mix` (36 s)."""
    return {name: _folder() / "clips" / f"{name}.flac" for name in CLIPS}


def _folder() -> Path:
    return Path(str(resources.files(__name__)))
