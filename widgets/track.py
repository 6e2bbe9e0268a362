"""What the browser needs of one source: its clocks as whole numbers, peaks and mel small enough to send, audio by slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..mel import mel
from ..plots.overview import peaks
from ..plots.timeline import column_maxima, marker_seconds

if TYPE_CHECKING:
    from ..batch import PreparedBatch

COLUMNS = 2000
# Mel values lie within 2 of the loudest (log10, floor 8 below, divided by 4).
_MEL_RANGE = 2.0
# The most samples that one message of audio holds, 20 s at 16 kHz.
MOST_SAMPLES = 320_000


def track(batch: PreparedBatch, number: int) -> dict[str, Any]:
    """Source `number` for the browser: names, whole-number clocks, `peaks` (float32 pairs), `mel` (bytes, [128, C])."""
    slot, timeline = batch.slots[number], batch.timeline[number]
    clock = timeline.clock
    values = mel(batch, number)
    return {
        "name": slot.name,
        "request": slot.sample_index,
        "used_s": timeline.used_s,
        "sample_rate": clock.sample_rate,
        "n_samples": timeline.n_samples,
        "n_frames": timeline.n_frames,
        "n_tokens": timeline.n_tokens,
        "n_windows": len(slot.windows),
        "samples_per_frame": clock.samples_per_frame,
        "samples_per_token": clock.samples_per_token,
        "samples_per_window": clock.samples_per_window,
        "positions": timeline.positions.astype("<i4").tobytes(),
        "markers": marker_seconds(batch, number),
        "mel_bands": len(values),
        "mel_top": float(values.max()),
        **picture(slot.waveform.numpy(), values, float(values.max())),
    }


def picture(samples: np.ndarray, values: np.ndarray, top: float) -> dict[str, Any]:
    """Peaks of samples [N] and a mel picture of values [M, F], each of at most `COLUMNS` columns; `top` is white."""
    low, high = peaks(samples, COLUMNS)
    columns = column_maxima(values, COLUMNS)
    grey = np.clip((columns - (top - _MEL_RANGE)) / _MEL_RANGE * 255, 0, 255).astype(np.uint8)
    return {
        "peaks": np.stack([low, high], axis=1).astype("<f4").tobytes(),
        "mel": grey.tobytes(),
        "mel_columns": grey.shape[1],
    }


def detail(batch: PreparedBatch, number: int, first: int, end: int) -> dict[str, Any]:
    """A stretch of samples [first, end) drawn finer, widened to whole mel frames; with the `first` and `end` it has."""
    timeline = batch.timeline[number]
    per = timeline.clock.samples_per_frame
    first_frame = max(0, min(first // per, timeline.n_frames - 1))
    end_frame = max(first_frame + 1, min(-(-end // per), timeline.n_frames))
    first, end = first_frame * per, min(end_frame * per, timeline.n_samples)
    values = mel(batch, number)
    drawn = picture(
        batch.slots[number].waveform[first:end].numpy(), values[:, first_frame:end_frame], float(values.max())
    )
    return {"first": first, "end": end, **drawn}


def audio(batch: PreparedBatch, number: int, first: int, count: int) -> bytes:
    """Samples [first, first + count) of what the model heard, as 16-bit little-endian, at their true level."""
    count = max(0, min(count, MOST_SAMPLES))
    samples = batch.slots[number].waveform[max(0, first) : max(0, first) + count].numpy()
    return np.clip(np.round(samples * 32767), -32768, 32767).astype("<i2").tobytes()
