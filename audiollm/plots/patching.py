"""A patching sweep as a map: place by seconds, coloured by how much of the metric came back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis.patching import PatchGrid


def patching_map(grid: PatchGrid) -> Figure:
    """Draw a PatchGrid: places upwards, seconds to the right, and the other columns as a strip beside.

    The colour is the share recovered, white at 0 and the same strength both ways, on a scale of its own for windows and for
    other columns; cells not measured are grey, and where windows overlap each is drawn up to the next one's start. If both
    runs score the same, the colour is the metric minus the corrupted run's. Returns a matplotlib Figure that belongs to no
    window. `grid.describe()` says it in words.
    """
    figure = Figure(figsize=(11, max(2.6, 1.6 + 0.28 * len(grid.points))), layout="constrained")
    defined = grid.clean != grid.corrupted
    label = "recovered" if defined else "change of the metric"
    values = grid.recovered if defined else grid.values - grid.corrupted
    others = grid.also_recovered if defined else grid.also_values - grid.corrupted
    widths = [max(6, len(grid.windows)), len(grid.also)] if grid.also else [1]
    panels = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    edges = np.append(grid.windows[:, 0], grid.windows[-1, 1])
    _draw(panels[0], edges, values, label)
    panels[0].set_yticks(range(len(grid.points)), list(grid.points), fontsize=8)
    panels[0].set_xlabel("seconds of the source")
    if grid.also:
        _draw(panels[1], np.arange(len(grid.also) + 1) - 0.5, others, label)
        panels[1].set_xticks(range(len(grid.also)), list(grid.also), rotation=45, fontsize=8)
        panels[1].set_yticks([])
        panels[1].set_xlabel("positions")
    figure.suptitle(
        f"{grid.names[0]} into {grid.names[1]}: {grid.metric}, clean {grid.clean:.3f}, corrupted {grid.corrupted:.3f}",
        fontsize=10,
    )
    return figure


def _draw(axes: Axes, edges: np.ndarray, values: np.ndarray, label: str) -> None:
    limit = max(float(np.nanmax(np.abs(values))), 1e-9) if np.isfinite(values).any() else 1.0
    axes.set_facecolor("#bbbbbb")
    rows = np.arange(len(values) + 1) - 0.5
    image = axes.pcolormesh(
        edges, rows, np.ma.masked_invalid(values), cmap="RdBu", vmin=-limit, vmax=limit, rasterized=True
    )
    axes.figure.colorbar(image, ax=axes, label=label, pad=0.01)
