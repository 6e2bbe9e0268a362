"""A steering vector: where its held-out requests lie, and where in time sources lie along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis.separation import Separation
    from ..analysis.steering import SteeringTrace, SteeringVector

# Okabe and Ito's palette (2008), safe for colour-blind readers.
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


def steering_report(steering: SteeringVector, traces: Sequence[SteeringTrace] = ()) -> Figure:
    """Draw a SteeringVector: held-out projections of both sets, and below, by trace, the projection of each second.

    0 is the midpoint of the two sets. Returns a matplotlib Figure that belongs to no window. `steering.describe()` and
    each trace's `describe()` say it in words.
    """
    figure = Figure(figsize=(11, 2.2 + 1.8 * len(traces)), layout="constrained")
    panels = figure.subplots(1 + len(traces), 1, squeeze=False)[:, 0]
    _draw_sets(panels[0], steering.separation)
    for axes, trace in zip(panels[1:], traces, strict=True):
        edges = np.append(trace.intervals[:, 0], trace.intervals[-1, 1])
        axes.stairs(trace.values, edges, color=_BLUE, baseline=None)
        axes.axhline(0, color=_GREY, linewidth=0.8)
        axes.set_xlim(0, edges[-1])
        axes.set_ylabel("projection")
        axes.set_title(f"request {trace.sample_index}, {trace.name}", fontsize=9)
        axes.set_xlabel("seconds of the source")
    figure.suptitle(f"steering vector at {steering.point}, norm {steering.norm:.3g}, {steering.pool} positions")
    return figure


def _draw_sets(axes: Axes, separation: Separation) -> None:
    held = (separation.held_out_positives, separation.held_out_negatives)
    plain = (separation.positives, separation.negatives)
    for row, (name, own, all_, colour) in enumerate(
        zip(("positives", "negatives"), held, plain, (_BLUE, _ORANGE), strict=True)
    ):
        axes.plot(all_, np.full(len(all_), row), "|", color=_GREY, markersize=14)
        axes.plot(own, np.full(len(own), row), "o", color=colour, label=name)
    axes.axvline(0, color=_GREY, linewidth=0.8)
    axes.set_yticks([0, 1], ["positives", "negatives"])
    axes.set_ylim(1.6, -0.6)
    axes.set_xlabel("projection on the vector (dots: held out; ticks: on the direction of all)")
    axes.set_title(separation.describe(), fontsize=9)
