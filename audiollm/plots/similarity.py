"""Similarity: CKA between layers or models, a source with itself over seconds, and a mix with its stems over seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from ..analysis.cka import CKAMatrix
    from ..analysis.similarity import SelfSimilarity, StemRetrieval

# Okabe and Ito's palette (2008), safe for colour-blind readers; stems also differ in marker.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_MARKERS = "os^Dv*"
_GREY = "#777777"
_MANY = 12  # names or cells beyond which not every one is written


def cka_heatmap(matrix: CKAMatrix, row_name: str = "layer", column_name: str = "layer") -> Figure:
    """Draw a CKA matrix on a scale from 0 to 1, with its numbers where there is room; crosses mark what is not defined.

    Returns a matplotlib Figure that belongs to no window (pyplot is not used). `matrix.describe()` says it in words.

    >>> import numpy as np
    >>> from audiollm.analysis.cka import cka
    >>> from audiollm.plots.similarity import cka_heatmap
    >>> x = np.random.default_rng(0).normal(size=(100, 4))
    >>> cka_heatmap(cka({0: x, 1: x**2})).axes[0].get_ylabel()
    'layer'
    """
    figure = Figure(figsize=(6.5, 5.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix.values, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for axis, names in ((axes.xaxis, matrix.columns), (axes.yaxis, matrix.rows)):
        step = -(-len(names) // (2 * _MANY))
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    if matrix.values.size <= _MANY**2:
        for (r, c), value in np.ndenumerate(matrix.values):
            text = "x" if np.isnan(value) else f"{value:.2f}"
            colour = "white" if value < 0.5 else "black"  # not a number is drawn on white
            axes.text(c, r, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_ylabel(row_name)
    axes.set_xlabel(column_name)
    figure.colorbar(image, ax=axes, label="debiased linear CKA", extend="both")
    seconds = "" if matrix.tokens_s is None else f", {matrix.tokens_s:.1f} s"
    axes.set_title(f"{matrix.n_tokens} tokens{seconds}", fontsize=10)
    return figure


def self_similarity_matrix(result: SelfSimilarity) -> Figure:
    """Draw a self-similarity matrix with seconds on both axes, blue for unlike and red for alike moments.

    Returns a matplotlib Figure that belongs to no window. `result.describe()` says it in words.

    >>> import numpy as np
    >>> from audiollm.analysis.similarity import self_similarity
    >>> from audiollm.plots.similarity import self_similarity_matrix
    >>> starts = np.arange(50) * 0.08
    >>> states = np.random.default_rng(0).normal(size=(50, 4))
    >>> figure = self_similarity_matrix(self_similarity(states, np.stack([starts, starts + 0.08], axis=1)))
    >>> figure.axes[0].get_xlabel()
    'seconds of the source'
    """
    figure = Figure(figsize=(6.5, 5.5), layout="constrained")
    axes = figure.subplots()
    edges = np.append(result.intervals[:, 0], result.intervals[-1, 1])
    image = axes.pcolormesh(edges, edges, result.values, vmin=-1, vmax=1, cmap="RdBu_r", rasterized=True)
    axes.set_aspect("equal")
    axes.set_xlabel("seconds of the source")
    axes.set_ylabel("seconds of the source")
    what = "cosine of what differs from the mean" if result.centered else "cosine"
    figure.colorbar(image, ax=axes, label=what)
    return figure


def stem_retrieval_curve(result: StemRetrieval) -> Figure:
    """Draw, over seconds, how alike each stem is to the mix, and which second of the mix each stem's second finds.

    In the lower panel right finds lie on the diagonal. Returns a matplotlib Figure that belongs to no window.
    `result.describe()` says it in words.

    >>> import numpy as np
    >>> from audiollm.analysis.similarity import stem_retrieval
    >>> from audiollm.plots.similarity import stem_retrieval_curve
    >>> starts = np.arange(50) * 0.08
    >>> mix, drums = np.random.default_rng(0).normal(size=(2, 50, 4))
    >>> result = stem_retrieval(mix, {"drums": drums}, np.stack([starts, starts + 0.08], axis=1))
    >>> stem_retrieval_curve(result).axes[1].get_xlabel()
    'seconds'
    """
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 3])
    centres = result.intervals.mean(axis=1)
    start, end = result.intervals[0, 0], result.intervals[-1, 1]
    recall = result.recall()
    for s, name in enumerate(result.stems):
        colour, marker = _COLOURS[s % len(_COLOURS)], _MARKERS[s % len(_MARKERS)]
        above.plot(centres, result.similarity[s], color=colour, marker=marker, markersize=4, label=name)
        label = f"{name}: {recall[s]:.0%} right (chance {result.chance[0]:.0%})"
        below.plot(centres, result.nearest_s[s], color=colour, marker=marker, ls="none", alpha=0.7, label=label)
    above.axhline(0, color=_GREY, linewidth=0.8)
    above.set_ylabel("cosine with the mix")
    below.plot([start, end], [start, end], color=_GREY, ls="--", linewidth=1, label="the same second")
    below.set_ylabel("nearest second of the mix")
    below.set_xlabel("seconds")
    below.set_xlim(start, end)
    below.set_ylim(start, end)
    for axes in (above, below):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return figure
