"""Layers of one source over seconds: norms as curves and as a map, and cosines as a matrix with seconds on both axes.

These are drawn at fixed places of the figure and as images, so that a slider can redraw them many times a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogFormatter, NullFormatter

from ..analysis.similarity import SelfSimilarity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from ..analysis.cross_similarity import CrossSimilarity
    from ..analysis.norms import LayerNorms

# Okabe and Ito's palette (2008), safe for colour-blind readers and seen on white and on black; curves also differ in dashes.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_ORANGE = "#E69F00"
_DASHES = ("-", "--", "-.", ":")
_FEW = 10  # layers up to which each has its own line of the legend
_SPREAD = 10.0  # ratio of norms from which they are drawn on a logarithmic scale
Span = Sequence[float]


def norm_curves(norms: LayerNorms, selection: Span | None = None) -> Figure:
    """Draw the norms of one source over seconds, a curve a layer; of more than ten layers the last are the lightest.

    `selection`, (start_s, end_s), is marked. Returns a matplotlib Figure that belongs to no window; `norms.describe()` says
    it in words.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis import layer_norms
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
    >>> norm_curves(layer_norms(session, batch)[0]).axes[0].get_xlabel()
    'seconds of the source'
    """
    figure = Figure(figsize=(10, 4))
    axes = figure.add_axes((0.075, 0.14, 0.80, 0.78))
    many, n = len(norms.layers) > _FEW, len(norms.layers)
    shades = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.3, 0.95, 256)))
    colours = shades(np.linspace(0, 1, n)) if many else [_COLOURS[k % len(_COLOURS)] for k in range(n)]
    edges = np.append(norms.intervals[:, 0], norms.intervals[-1, 1])
    for k, (layer, row) in enumerate(zip(norms.layers, norms.values, strict=True)):
        axes.plot(edges, np.append(row, row[-1]), drawstyle="steps-post", color=colours[k], linewidth=1.2,
                  linestyle=_DASHES[0 if many else k % len(_DASHES)], label=f"layer {layer}")  # fmt: skip
    if many:
        depth = ScalarMappable(Normalize(norms.layers[0], norms.layers[-1]), shades)
        figure.colorbar(depth, cax=figure.add_axes((0.89, 0.14, 0.015, 0.78)), label="layer")
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), fontsize=8, frameon=False)
    if _is_spread(norms.values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_log_labels())
        axes.yaxis.set_minor_formatter(_log_labels())
    axes.set_ylabel("norm of the state")
    _seconds(axes, norms.intervals, selection, shade=0.2)
    axes.set_title(norms.name, fontsize=10)
    return figure


def norm_map(norms: LayerNorms, selection: Span | None = None) -> Figure:
    """Draw the norms of one source as a map, layer by second; parameters and result as `norm_curves`.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis import layer_norms
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Listen.", [demo.clips()["bass"]])])
    >>> norm_map(layer_norms(session, batch)[0]).axes[0].get_ylabel()
    'layer'
    """
    figure = Figure(figsize=(10, 4))
    axes = figure.add_axes((0.075, 0.14, 0.80, 0.78))
    spread = _is_spread(norms.values)
    scale = LogNorm(norms.values.min(), norms.values.max()) if spread else Normalize()
    n = len(norms.layers)
    image = _image(axes, norms.values, norms.intervals, (-0.5, n - 0.5), norm=scale, cmap="cividis")
    axes.set_ylim(-0.5, n - 0.5)
    step = -(-n // 20)
    axes.set_yticks(range(0, n, step), [str(layer) for layer in norms.layers[::step]])
    axes.set_ylabel("layer")
    bar = figure.colorbar(image, cax=figure.add_axes((0.89, 0.14, 0.015, 0.78)), label="norm of the state")
    if spread:
        is_wide = norms.values.max() > 300 * norms.values.min()
        bar.ax.yaxis.set_major_formatter(_log_labels())
        bar.ax.yaxis.set_minor_formatter(NullFormatter() if is_wide else _log_labels())
    _seconds(axes, norms.intervals, selection)
    axes.set_title(norms.name, fontsize=10)
    return figure


def similarity_map(
    result: SelfSimilarity | CrossSimilarity,
    row_name: str = "",
    column_name: str = "",
    row_selection: Span | None = None,
    column_selection: Span | None = None,
) -> Figure:
    """Draw cosines of moments with moments, seconds on both axes, blue for unlike and red for alike.

    `row_name` and `column_name` say what each side is; selections, (start_s, end_s) of either side, are outlined. Returns a
    matplotlib Figure that belongs to no window; `result.describe()` says it in words.

    >>> import numpy as np
    >>> from audiollm.analysis import self_similarity
    >>> starts = np.arange(50) * 0.08
    >>> states = np.random.default_rng(0).normal(size=(50, 4))
    >>> figure = similarity_map(self_similarity(states, np.stack([starts, starts + 0.08], axis=1)), "bass", "bass")
    >>> figure.axes[0].get_xlabel()
    'bass, seconds'
    """
    if isinstance(result, SelfSimilarity):
        rows = columns = result.intervals
    else:
        rows, columns = result.rows, result.columns
    figure = Figure(figsize=(7, 5.6))
    axes = figure.add_axes((0.12, 0.11, 0.68, 0.85))
    image = _image(axes, result.values, columns, (rows[0, 0], _full_end(rows)), vmin=-1, vmax=1, cmap="RdBu_r")
    axes.set_xlim(columns[0, 0], columns[-1, 1])
    axes.set_ylim(rows[0, 0], rows[-1, 1])
    axes.set_xlabel(f"{column_name}, seconds" if column_name else "seconds of the source")
    axes.set_ylabel(f"{row_name}, seconds" if row_name else "seconds of the source")
    if column_selection:
        _outline(axes, column_selection, axes.get_ylim(), swap=False)
    if row_selection:
        _outline(axes, row_selection, axes.get_xlim(), swap=True)
    what = "cosine of what differs from the mean" if result.centered else "cosine"
    figure.colorbar(image, cax=figure.add_axes((0.83, 0.11, 0.022, 0.85)), label=what)
    return figure


def _log_labels() -> LogFormatter:
    return LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5))


def _is_spread(values: np.ndarray) -> bool:
    return bool(values.min() > 0 and values.max() > _SPREAD * values.min())


def _full_end(intervals: np.ndarray) -> float:
    """Where the last interval would end, were it as long as the first; what is beyond its true end is cut by the limits."""
    return float(intervals[0, 0] + len(intervals) * (intervals[0, 1] - intervals[0, 0]))


def _image(axes: Axes, values: np.ndarray, intervals: np.ndarray, up: Span, **how: Any) -> AxesImage:
    """Columns of equal length from the first interval on, rows from bottom to top."""
    extent = (float(intervals[0, 0]), _full_end(intervals), float(up[0]), float(up[1]))
    return axes.imshow(values, extent=extent, origin="lower", aspect="auto", interpolation="nearest", **how)


def _seconds(axes: Axes, intervals: np.ndarray, selection: Span | None, shade: float = 0.0) -> None:
    axes.set_xlim(intervals[0, 0], intervals[-1, 1])
    axes.set_xlabel("seconds of the source")
    if selection:
        if shade:
            axes.axvspan(*selection, facecolor=_ORANGE, alpha=shade, edgecolor="none")
        for edge in selection:
            axes.axvline(edge, color=_ORANGE, linewidth=2)


def _outline(axes: Axes, span: Span, across: Span, swap: bool) -> None:
    corner, size = (span[0], across[0]), (span[1] - span[0], across[1] - across[0])
    if swap:
        corner, size = corner[::-1], size[::-1]
    axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=_ORANGE, linewidth=2))
