"""One source at a glance, all on one axis of seconds: waveform with the encoder's windows, tokens, norms by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis import LayerNorms
    from ..batch import AudioSlot
    from ..timeline import SourceTimeline

_BUCKETS = 1500
# Okabe and Ito's palette (2008), safe for colour-blind readers.
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


def overview(slot: AudioSlot, timeline: SourceTimeline, norms: LayerNorms) -> Figure:
    """Draw a source: what the model heard, its windows and tokens, and the norm of its states by layer over seconds.

    Returns a matplotlib Figure that belongs to no window (pyplot is not used).
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    wave, tokens, layers = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1, 4])
    _draw_waveform(wave, slot)
    _draw_tokens(tokens, timeline)
    _draw_norms(layers, norms)
    layers.set_xlabel("seconds of the source")
    layers.set_xlim(0, timeline.used_s)
    figure.suptitle(f"{slot.name}: {slot.used_s:.2f} s, {len(slot.windows)} windows, {timeline.n_tokens} audio tokens")
    return figure


def peaks(samples: np.ndarray, buckets: int = _BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest sample of each of at most `buckets` equal stretches: two arrays of the same length."""
    edges = np.linspace(0, len(samples), min(buckets, len(samples)) + 1).astype(int)[:-1]
    return np.minimum.reduceat(samples, edges), np.maximum.reduceat(samples, edges)


def _draw_waveform(axes: Axes, slot: AudioSlot) -> None:
    low, high = peaks(slot.waveform.numpy())
    seconds = np.linspace(0, slot.used_s, len(low), endpoint=False)
    axes.fill_between(seconds, low, high, color=_BLUE, linewidth=0)
    for window in slot.windows:
        axes.axvspan(window.start_s, window.end_s, facecolor=_ORANGE if window.index % 2 else _GREY, alpha=0.15)
        axes.axvline(window.start_s, color=_GREY, linewidth=0.8, linestyle="--")
        axes.annotate(f"window {window.index}", (window.start_s, 1), (3, -10), xycoords=("data", "axes fraction"),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_ylabel("sample")


def _draw_tokens(axes: Axes, timeline: SourceTimeline) -> None:
    starts = timeline.token_intervals()[:, 0]
    axes.plot(starts, np.arange(timeline.n_tokens), color=_BLUE, linewidth=1.5)
    axes.set_ylabel("token")


def _draw_norms(axes: Axes, norms: LayerNorms) -> None:
    edges = np.append(norms.intervals[:, 0], norms.intervals[-1, 1])
    rows = np.arange(len(norms.layers) + 1) - 0.5
    image = axes.pcolormesh(edges, rows, norms.values, cmap="cividis", rasterized=True)
    axes.set_yticks(range(len(norms.layers)), [str(k) for k in norms.layers])
    axes.set_ylabel("layer")
    axes.figure.colorbar(image, ax=axes, label="norm of the state", pad=0.01)
