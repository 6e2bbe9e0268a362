"""All sources of a batch on one axis of seconds: waveform, mel, encoder windows, token starts, time markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from ..mel import mel
from .overview import peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..batch import PreparedBatch

_BLUE, _ORANGE, _GREY, _RED = "#0072B2", "#E69F00", "#777777", "#D55E00"
_COLUMNS = 1500
# Token starts are drawn where they can be told apart.
_MOST_TICKS = 300


def timeline(
    batch: PreparedBatch, selection: tuple[int, float, float] | None = None, cursor_s: float | None = None
) -> Figure:
    """Draw every source of a batch; `selection` (source, start_s, end_s) is shaded, `cursor_s` a line through all.

    Returns a matplotlib Figure that belongs to no window.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Compare.", [demo.clips()["bass"], demo.clips()["drums"]])])
    >>> len(timeline(batch, selection=(0, 1.0, 2.5)).axes)
    4
    """
    count = max(1, len(batch.slots))
    figure = Figure(figsize=(11, 0.6 + 2.2 * count), layout="constrained")
    rows = figure.subplots(2 * count, 1, sharex=True, height_ratios=[2, 3] * count, squeeze=False)[:, 0]
    for number in range(len(batch.slots)):
        wave, spectrum = rows[2 * number], rows[2 * number + 1]
        _draw_wave(wave, batch, number)
        _draw_mel(spectrum, batch, number)
        for axes in (wave, spectrum):
            if selection is not None and selection[0] == number:
                axes.axvspan(*selection[1:], color=_ORANGE, alpha=0.35)
            if cursor_s is not None:
                axes.axvline(cursor_s, color=_RED, linewidth=1.5)
    if len(batch.slots):
        rows[-1].set_xlim(0, max(each.used_s for each in batch.timeline))
    rows[-1].set_xlabel("seconds of the source")
    return figure


def _draw_wave(axes: Axes, batch: PreparedBatch, number: int) -> None:
    slot, clock = batch.slots[number], batch.timeline[number]
    low, high = peaks(slot.waveform.numpy(), _COLUMNS)
    seconds = np.linspace(0, slot.used_s, len(low), endpoint=False)
    axes.fill_between(seconds, low, high, color=_BLUE, linewidth=0)
    for window in slot.windows:
        axes.axvspan(window.start_s, window.end_s, facecolor=_ORANGE if window.index % 2 else _GREY, alpha=0.12)
        axes.axvline(window.start_s, color=_GREY, linewidth=0.8, linestyle="--")
    if clock.n_tokens <= _MOST_TICKS:
        axes.plot(clock.token_intervals()[:, 0], np.zeros(clock.n_tokens), "|", color=_GREY, markersize=4,
                  transform=axes.get_xaxis_transform(), clip_on=False)  # fmt: skip
    for second in marker_seconds(batch, number):
        axes.plot(second, 1, "v", color=_RED, markersize=5, transform=axes.get_xaxis_transform(), clip_on=False)
    axes.set_ylabel("sample")
    axes.set_title(f"source {number}: {slot.name}", fontsize=9, loc="left")


def _draw_mel(axes: Axes, batch: PreparedBatch, number: int) -> None:
    values = column_maxima(mel(batch, number), _COLUMNS)
    axes.imshow(
        values, origin="lower", aspect="auto", cmap="cividis", extent=(0, batch.timeline[number].used_s, 0, len(values))
    )
    axes.set_ylabel("mel band")


def column_maxima(values: np.ndarray, columns: int) -> np.ndarray:
    """[M, F] -> [M, at most `columns`]: the largest of each of so many equal stretches of F."""
    edges = np.linspace(0, values.shape[1], min(columns, values.shape[1]) + 1).astype(int)[:-1]
    return np.maximum.reduceat(values, edges, axis=1)


def marker_seconds(batch: PreparedBatch, number: int) -> list[float]:
    """The seconds that the time markers of one source say, ascending; none for Music Flamingo."""
    slot = batch.slots[number]
    prompt = batch.prompts[slot.sample_index]
    said = {
        second
        for second, source in zip(prompt.marker_s, prompt.sources, strict=True)
        if second is not None and source == slot.audio_index
    }
    return sorted(said)
