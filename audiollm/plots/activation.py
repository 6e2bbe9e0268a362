"""What one place computed over one source: the length of its state, and the dimensions that vary most, by second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from .lens import seconds_edges

if TYPE_CHECKING:
    from ..observe import Activation

_BLUE = "#0072B2"


def activation(seen: Activation, n_dimensions: int = 24) -> Figure:
    """Draw an Activation of one source: Euclidean norm, and the `n_dimensions` of largest variance, standardised.

    Returns a matplotlib Figure that belongs to no window. Raises: ArgumentError where the rows are of several sources
    (take `seen.source(k)`), of text, or not known.

    >>> from audiollm import Request, demo
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> activation(session.capture(batch, "resid[3]", source=0)["resid[3]"]).axes[1].get_xlabel()
    'seconds of the source'
    """
    rows = seen.known_rows()
    edges = seconds_edges(rows.source, rows.start_s, rows.end_s)
    values = seen.values.detach().float().cpu().numpy().reshape(len(rows), -1)
    chosen = np.argsort(-values.var(0), kind="stable")[:n_dimensions]
    deviation = values[:, chosen].std(0)
    standard = (values[:, chosen] - values[:, chosen].mean(0)) / np.where(deviation > 0, deviation, 1)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    norm, states = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    norm.stairs(np.linalg.norm(values, axis=1), edges, color=_BLUE, baseline=None)
    norm.set_ylabel("norm")
    image = states.pcolormesh(
        edges, np.arange(len(chosen) + 1) - 0.5, standard.T, cmap="coolwarm", vmin=-3, vmax=3, rasterized=True
    )
    states.set_yticks(range(len(chosen)), [str(d) for d in chosen], fontsize=6)
    states.set_ylabel("dimension, most variance first")
    states.set_xlabel("seconds of the source")
    figure.colorbar(image, ax=states, label="deviations from its mean", pad=0.01)
    figure.suptitle(seen.describe(), fontsize=9)
    return figure
