"""How long the state of each audio token is, layer by layer.

Conventions: layers as in `Session.extract_contextual_embeddings`; seconds are of the source; the norm is Euclidean,
taken in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..batch import AudioSlot, PreparedBatch
    from ..session import Session
    from ..timeline import SourceTimeline


@dataclass(frozen=True, eq=False)
class LayerNorms:
    """Norms of one source's states: `values` [n_layers, U_i] float32, `layers` as asked, `intervals` [U_i, 2] seconds."""

    sample_index: int
    audio_index: int
    name: str
    layers: tuple[int, ...]
    values: np.ndarray
    intervals: np.ndarray

    def describe(self) -> str:
        """What a picture of them shows, in words."""
        centres = self.intervals.mean(axis=1)
        lines = [f"Norm of the state of {len(centres)} audio tokens of {self.name}, {len(self.layers)} layer(s)."]
        for layer, row in zip(self.layers, self.values, strict=True):
            low, high = int(row.argmin()), int(row.argmax())
            lines.append(
                f"  layer {layer}: mean {row.mean():.3g}, least {row[low]:.3g} at {centres[low]:.2f} s, greatest "
                f"{row[high]:.3g} at {centres[high]:.2f} s"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        means = ", ".join(f"{k}: {row.mean():.3g}" for k, row in zip(self.layers, self.values, strict=True))
        return (
            f"LayerNorms(request {self.sample_index}, audio {self.audio_index}, {self.name!r}; mean by layer {means})"
        )


def layer_norms(session: Session, batch: PreparedBatch, layers: Sequence[int] | None = None) -> tuple[LayerNorms, ...]:
    """The norm of every audio token's state at each asked layer (all of them by default), one result a source.

    Runs one prefill up to the deepest asked layer and keeps `batch.nbytes(layers)` bytes while it works.
    Raises: ArgumentError for a layer out of range.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> (norms,) = layer_norms(session, session.prepare([Request("Listen.", [demo.clips()["bass"]])]), layers=(0, -1))
    >>> norms.values.shape
    (2, 150)
    """
    layers = tuple(range(session.n_layers + 1)) if layers is None else tuple(layers)
    states = session.extract_contextual_embeddings(batch, layers)
    return tuple(
        norms_of(slot, timeline, {k: mine[k].float().norm(dim=-1).cpu().numpy() for k in layers})
        for slot, timeline, mine in zip(batch.slots, batch.timeline, states, strict=True)
    )


def norms_of(slot: AudioSlot, timeline: SourceTimeline, norms: Mapping[int, np.ndarray]) -> LayerNorms:
    """Norms that were taken already, layer -> [U_i], as the LayerNorms of a source."""
    values = np.stack([norms[k] for k in norms])
    return LayerNorms(slot.sample_index, slot.audio_index, slot.name, tuple(norms), values, timeline.token_intervals())
