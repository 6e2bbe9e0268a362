"""Attention over time of one request: for each query, which second of which source it looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..analysis.attention import AttentionOverTime

_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


def attention(result: AttentionOverTime, query: int = 0, step_s: float = 0.25) -> Figure:
    """Draw one query: by layer, the attention to each stretch of `step_s` seconds (mean over heads), and source shares.

    Returns a matplotlib Figure that belongs to no window, one panel a source. Raises: ArgumentError for a request
    without audio, or a query that is not there.

    >>> from audiollm import Request, demo
    >>> from audiollm.analysis import attention_over_time
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> len(attention(attention_over_time(session, batch, "bass")[0]).axes)
    3
    """
    if not len(result.sources):
        raise ArgumentError(
            f"request {result.sample_index} has no audio to look at", code="bad_argument", source="result"
        )
    if not 0 <= query < len(result.queries):
        raise ArgumentError(f"query {query} is not one of {len(result.queries)}", code="bad_argument", source="query")
    numbers = np.unique(result.sources)
    figure = Figure(figsize=(11, 2.5 + 2.2 * len(numbers)), layout="constrained")
    panels = figure.subplots(len(numbers), 2, width_ratios=[5, 1], squeeze=False)
    shares = result.by_source()[:, :, query].mean(1)  # [layers, sources]
    found = [result.by_seconds(step_s, int(number)) for number in numbers]
    top = max(float(sums[:, :, query].mean(1).max()) for _, sums in found)
    rows = np.arange(len(result.layers) + 1) - 0.5
    for k, (edges, sums) in enumerate(found):
        axes, bars = panels[k]
        image = axes.pcolormesh(
            edges, rows, sums[:, :, query].mean(1), cmap="cividis", vmin=0, vmax=top, rasterized=True
        )
        axes.set_yticks(range(len(result.layers)), [str(layer) for layer in result.layers])
        axes.set_ylabel("block")
        axes.set_title(result.names[k], loc="left", fontsize=10)
        bars.barh(range(len(result.layers)), shares[:, k], color=_BLUE)
        bars.set_ylim(rows[0], rows[-1])
        bars.set_xlim(0, 1)
        bars.set_xlabel("share of this source")
    panels[-1][0].set_xlabel("seconds of the source")
    figure.colorbar(image, ax=[row[0] for row in panels], label=f"attention in {step_s:g} s", pad=0.01)
    text = float(result.text[:, :, query].mean())
    figure.suptitle(f"where {result.labels[query]!r} looks; text takes {text:.2f} on average")
    return figure
