"""Attribution over seconds: what occlusion and gradients say about an answer, below what the model heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from .overview import peaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis.gradients import Attribution
    from ..analysis.occlusion import Occlusion

# Okabe and Ito's palette (2008), safe for colour-blind readers: blue speaks for the answer, orange against it.
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


def occlusion_curve(result: Occlusion) -> Figure:
    """Draw an Occlusion: the waveform, and below it the change of each window as a bar and their mean at every token.

    Returns a matplotlib Figure that belongs to no window (pyplot is not used). `result.describe()` says it in words.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    wave, change = figure.subplots(2, 1, sharex=True, height_ratios=[1, 2])
    low, high = peaks(result.slot.waveform.numpy())
    seconds = np.linspace(0, result.slot.used_s, len(low), endpoint=False)
    wave.fill_between(seconds, low, high, color=_GREY, linewidth=0)
    wave.set_ylabel("sample")
    for (start_s, end_s), value in zip(result.windows, result.change, strict=True):
        if np.isfinite(value):
            change.plot([start_s, end_s], [value, value], color=_colour(-value), linewidth=3, alpha=0.6)
    centres = result.intervals.mean(axis=1)
    change.plot(centres, result.curve, color="black", linewidth=1, label="mean of the windows over each token")
    _finish(change, "change in log-probability (nats)", float(result.intervals[-1, 1]))
    change.legend(loc="best", fontsize=8)
    figure.suptitle(
        f"{result.name}: what occlusion with {result.fill} ({result.level} level) does to {result.answer!r} "
        f"(log-probability {result.score:.3f})"
    )
    return figure


def attribution_curve(results: Attribution | Sequence[Attribution]) -> Figure:
    """Draw Attributions, one panel a source: each audio token's attribution as a bar over its seconds.

    Blue bars speak for the answer, orange ones against it; panels share the vertical scale. Returns a matplotlib
    Figure that belongs to no window. `result.describe()` says each panel in words. Raises: ValueError for none.
    """
    listed = list(results) if isinstance(results, Sequence) else [results]
    if not listed:
        raise ValueError("there is no attribution to draw; pass what gradient_x_input or integrated_gradients returned")
    figure = Figure(figsize=(11, 1.2 + 2.2 * len(listed)), layout="constrained")
    panels = figure.subplots(len(listed), 1, squeeze=False, sharey=True)[:, 0]
    for axes, result in zip(panels, listed, strict=True):
        starts, ends = result.intervals.T
        colours = [_colour(value) for value in result.values]
        axes.bar(starts, result.values, width=ends - starts, align="edge", color=colours, linewidth=0)
        _finish(axes, "attribution (nats)", float(ends[-1]))
        axes.set_title(
            f"request {result.sample_index}, {result.name}: {result.values.sum():+.3f} in all for {result.answer!r}",
            fontsize=9,
        )
    against = f", baseline {listed[0].baseline}" if listed[0].baseline else ""
    figure.suptitle(f"{listed[0].method} at the projected audio{against}")
    return figure


def _colour(value: float) -> str:
    return _BLUE if value >= 0 else _ORANGE


def _finish(axes: Axes, label: str, end_s: float) -> None:
    axes.axhline(0, color=_GREY, linewidth=0.8)
    axes.set_ylabel(label)
    axes.set_xlabel("seconds of the source")
    axes.set_xlim(0, end_s)
