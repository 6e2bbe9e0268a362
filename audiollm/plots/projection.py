"""A source's states in two dimensions, coloured by time or by an annotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection

    from ..analysis.labels import TokenLabels
    from ..analysis.projection import Projection

# Okabe and Ito's palette (2008), safe for colour-blind readers; labels also differ in marker.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_MARKERS = "os^Dv*P"
_GREY, _RING = "#999999", "#777777"


def projection(
    result: Projection, labels: TokenLabels | None = None, selection: Sequence[float] | None = None, title: str = ""
) -> Figure:
    """Draw a projection, each token a point, joined in order of time.

    Colours are seconds, or `labels`: words get a colour and a marker each (the seven that last longest, the rest is grey),
    decimal numbers a scale; tokens without a label are small and grey. Tokens whose centre lies in `selection`, (start_s,
    end_s), are ringed and the others pale. Returns a matplotlib Figure that belongs to no window; `result.describe()` and
    `labels.describe()` say it in words.

    >>> import numpy as np
    >>> from audiollm.analysis.projection import project
    >>> starts = np.arange(50) * 0.08
    >>> states = np.random.default_rng(0).normal(size=(50, 4))
    >>> figure = projection(project(states, np.stack([starts, starts + 0.08], axis=1)))
    >>> figure.axes[1].get_ylabel()
    'seconds of the source'
    """
    figure = Figure(figsize=(8, 5.6))
    axes = figure.add_axes((0.1, 0.11, 0.66, 0.82))
    axes.plot(*result.points.T, color=_GREY, linewidth=0.5, alpha=0.5, zorder=1)
    chosen = np.ones(len(result.points), dtype=bool)
    if selection:
        centres = result.intervals.mean(axis=1)
        chosen = (centres >= selection[0]) & (centres < selection[1])
    alpha = np.where(chosen, 0.9, 0.25)
    if labels is None:
        _scale(
            axes, result, np.arange(len(result.points)), result.intervals.mean(axis=1), alpha, "seconds of the source"
        )
    else:
        rest = np.setdiff1d(np.arange(len(result.points)), labels.tokens)
        if len(rest):
            told = f"no label ({len(rest)})"
            _dots(
                axes,
                result,
                rest,
                s=6,
                color=_GREY,
                alpha=alpha[rest],
                label=told,
                zorder=2,
            )
        if labels.labels.dtype.kind == "f":
            _scale(axes, result, labels.tokens, labels.labels, alpha, "label")
        else:
            _words(axes, result, labels, alpha)
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False, title="tokens")
    if selection:
        _dots(
            axes,
            result,
            chosen,
            s=60,
            facecolor="none",
            edgecolor=_RING,
            linewidth=1.5,
            zorder=4,
        )
    for name, share, axis in zip(("first", "second"), result.explained, (axes.xaxis, axes.yaxis), strict=True):
        axis.set_label_text(f"{name} component, {share:.1%} of the variance")
    axes.set_title(title, fontsize=10)
    return figure


def _dots(axes: Axes, result: Projection, which: np.ndarray, **look: Any) -> PathCollection:
    """The points of some tokens, by their numbers or as a mask."""
    return axes.scatter(result.points[which, 0], result.points[which, 1], **look)


def _scale(
    axes: Axes, result: Projection, tokens: np.ndarray, values: np.ndarray, alpha: np.ndarray, label: str
) -> None:
    """Points whose colour is a number."""
    points = _dots(
        axes,
        result,
        tokens,
        c=values,
        s=20,
        cmap="viridis",
        alpha=alpha[tokens],
        zorder=3,
        edgecolor=_GREY,
        linewidth=0.4,
    )
    shown = axes.figure.add_axes((0.79, 0.11, 0.02, 0.82))
    bar = axes.figure.colorbar(points, cax=shown, label=label)
    if bar.solids is not None:
        bar.solids.set_alpha(1)


def _words(axes: Axes, result: Projection, labels: TokenLabels, alpha: np.ndarray) -> None:
    """Points whose colour and marker is a word, those that last longest first."""
    lengths = np.diff(labels.intervals, axis=1)[:, 0]
    order = sorted(labels.classes, key=lambda name: -round(float(lengths[labels.labels == name].sum()), 6))
    for name, colour, marker in zip(order, _COLOURS, _MARKERS, strict=False):
        tokens = labels.tokens[labels.labels == name]
        told = f"{name} ({len(tokens)})"
        _dots(
            axes,
            result,
            tokens,
            s=22,
            color=colour,
            marker=marker,
            alpha=alpha[tokens],
            label=told,
            zorder=3,
        )
    others = labels.tokens[np.isin(labels.labels, order[len(_COLOURS) :])]
    if len(others):
        told = f"{len(order) - len(_COLOURS)} other labels ({len(others)})"
        _dots(
            axes,
            result,
            others,
            s=14,
            color=_GREY,
            marker="x",
            alpha=alpha[others],
            label=told,
            zorder=2,
        )
