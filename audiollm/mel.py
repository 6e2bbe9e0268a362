"""The mel spectrogram that a model gets for one source of a batch, taken from the batch's inputs.

Conventions: log-mel of 128 bands as the family's feature extractor scales it (Whisper's: log10, at most 8 below the
loudest, then (x + 4) / 4); frame f covers `clock.samples_per_frame` samples from `f * samples_per_frame` on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import ArgumentError

if TYPE_CHECKING:
    from .batch import PreparedBatch


def mel(batch: PreparedBatch, number: int) -> np.ndarray:
    """Log-mel [128, F] float32 of source `number` of `batch.slots`, F its mel frames, without padding.

    Music Flamingo's windows of 30 s are put side by side; each was scaled by its own loudest moment. Raises: ArgumentError
    for a source that the batch does not have.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
    >>> mel(batch, 0).shape, batch.timeline[0].n_frames
    ((128, 1200), 1200)
    """
    if not 0 <= number < len(batch.slots):
        raise ArgumentError(
            f"source {number} is not one of the batch's {len(batch.slots)} source(s)",
            code="bad_argument",
            source="number",
        )
    frames = batch.timeline[number].n_frames
    if "audio_data" in batch.inputs:
        return batch.inputs["audio_data"][number, :, :frames].float().cpu().numpy()
    counts = [-(-each.n_samples // each.clock.samples_per_window) for each in batch.timeline]
    first = sum(counts[:number])
    windows = batch.inputs["input_features"][first : first + counts[number]].float().cpu().numpy()
    return np.concatenate(list(windows), axis=1)[:, :frames]
