"""The logit lens of one source: layer by second, coloured by a word's probability or by entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..analysis.lens import LogitLens


def lens(result: LogitLens, word: int | None = None) -> Figure:
    """Draw a lens over one source's seconds: entropy in nats, or the probability of `result.words[word]`.

    Returns a matplotlib Figure that belongs to no window. Raises: ArgumentError where rows are of several sources (take
    `result.source(k)`) or of none, or the word is not one of the result's.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis import logit_lens
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> lens(logit_lens(session, batch, words=["bass"]), word=0).axes[0].get_xlabel()
    'seconds of the source'
    """
    edges = seconds_edges(result.rows.source, result.rows.start_s, result.rows.end_s)
    if word is not None and not 0 <= word < len(result.words):
        raise ArgumentError(
            f"word {word} is not one of the lens's {len(result.words)}", code="bad_argument", source="word"
        )
    values = result.entropy if word is None else result.word_probs[..., word]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(result.layers) + 1) - 0.5
    image = axes.pcolormesh(edges, rows, values, cmap="cividis", rasterized=True)
    label = "entropy (nats)" if word is None else f"probability of {result.words[word]!r}"
    figure.colorbar(image, ax=axes, label=label, pad=0.01)
    axes.set_yticks(range(len(result.layers)), [str(layer) for layer in result.layers])
    axes.set_ylabel("layer")
    axes.set_xlabel("seconds of the source")
    axes.set_title("logit lens")
    return figure


def seconds_edges(source: np.ndarray, start_s: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    """Edges [R + 1] in seconds of one source's rows. Raises: ArgumentError for rows of several sources or of text."""
    if len(source) == 0 or (source != source[0]).any() or source[0] < 0:
        raise ArgumentError(
            "the rows are of several sources or of text; choose one, as in result.source(0)",
            code="bad_argument",
            source="result",
        )
    return np.append(start_s, end_s[-1])
