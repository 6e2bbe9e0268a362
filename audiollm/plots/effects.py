"""What a block changed: norm and cosine by layer and second of a source, and at the prompt's last position; what comes next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from .lens import seconds_edges

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis.effects import EditEffect

# Okabe and Ito's palette (2008), safe for colour-blind readers; before and after also differ in dashes and hatching.
_BLUE, _ORANGE, _GREY = "#0072B2", "#E69F00", "#777777"


def effect_map(effect: EditEffect, source: int | None = 0, sample_index: int | None = None) -> Figure:
    """Draw an EditEffect: for one source, layer by second, the norm before and after and the cosine of both.

    At the right, or alone where `source` is None, is the last position of request `sample_index`, by default the source's own.
    Hatched is where a state is 0 and has no cosine. Returns a matplotlib Figure that belongs to no window;
    `effect.describe()` says it in words.
    Raises: ArgumentError for a source or request that the effect does not have.

    >>> from audiollm import Request, demo, edits
    >>> from audiollm.analysis import edit_effect
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> effect = edit_effect(session, batch, session.edit({"resid[3]": edits.zero()}, seconds=(1, 2)))
    >>> [axes.get_xlabel() for axes in effect_map(effect).axes[:3]]
    ['', '', 'seconds of the source']
    """
    if source is None:
        last = effect.last(sample_index or 0)
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        norm, cosine = figure.subplots(1, 2, sharey=True)
        _draw_last(norm, cosine, last)
        norm.set_ylabel("layer")
        return figure
    mine = effect.source(source)
    last = effect.last(int(mine.rows.sample_index[0]) if sample_index is None else sample_index)
    edges = seconds_edges(mine.rows.source, mine.rows.start_s, mine.rows.end_s)
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    grid = figure.add_gridspec(3, 2, width_ratios=[4, 1])
    maps: list[Axes] = []
    for k in range(3):
        shared = {"sharex": maps[0], "sharey": maps[0]} if maps else {}
        maps.append(figure.add_subplot(grid[k, 0], **shared))
    high = float(max(mine.norms_before.max(), mine.norms_after.max()))
    for axes, values, title in (
        (maps[0], mine.norms_before, "norm before"),
        (maps[1], mine.norms_after, "norm after"),
    ):
        _draw_map(axes, edges, values, title, effect.layers, vmin=0, vmax=high)
    _draw_map(maps[2], edges, mine.cosine, "cosine of before and after", effect.layers, **_cosine_scale(mine.cosine))
    for axes in maps[:2]:
        axes.tick_params(labelbottom=False)
    maps[2].set_xlabel("seconds of the source")
    norm = figure.add_subplot(grid[:2, 1])
    cosine = figure.add_subplot(grid[2, 1])
    _draw_last(norm, cosine, last)
    figure.suptitle(f"source {source}: {effect.names[source]}", fontsize=10)
    return figure


def next_token_bars(effect: EditEffect, sample_index: int = 0, count: int = 12) -> Figure:
    """Draw the probabilities of the first new token before and after, of the `count` most probable ones.

    Returns a matplotlib Figure that belongs to no window. Raises: ArgumentError for a request that is not there.

    >>> from audiollm import Request, demo, edits
    >>> from audiollm.analysis import edit_effect
    >>> session = demo.load("moss_music")
    >>> batch = session.prepare([Request("Which instrument?", [demo.clips()["bass"]])])
    >>> effect = edit_effect(session, batch, session.edit({"resid[3]": edits.zero()}, tokens="last"))
    >>> next_token_bars(effect).axes[0].get_xlabel()
    'probability of the next token'
    """
    effect.last(sample_index)
    tokens = effect.next_tokens[sample_index][:count]
    figure = Figure(figsize=(7, 1 + 0.32 * len(tokens)), layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(tokens))
    axes.barh(rows - 0.2, [token.before for token in tokens], 0.38, color=_BLUE, label="before")
    axes.barh(
        rows + 0.2, [token.after for token in tokens], 0.38, color=_ORANGE, hatch="//", edgecolor="black", label="after"
    )
    axes.set_yticks(rows, [token.label for token in tokens], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("probability of the next token")
    axes.set_title(f"request {sample_index}: divergence {effect.divergence[sample_index]:.4g} nats", fontsize=10)
    axes.legend(loc="lower right")
    return figure


def _draw_map(axes: Axes, edges: np.ndarray, values: np.ndarray, title: str, layers: tuple, **scale: Any) -> None:
    """Values [N, R] over edges [R + 1] in seconds."""
    axes.patch.set(hatch="////", edgecolor=_GREY)
    rows = np.arange(len(layers) + 1) - 0.5
    image = axes.pcolormesh(edges, rows, np.ma.masked_invalid(values), cmap="cividis", rasterized=True, **scale)
    axes.figure.colorbar(image, ax=axes, pad=0.01)
    step = max(1, len(layers) // 8)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=9, loc="left")


def _draw_last(norm: Axes, cosine: Axes, last: EditEffect) -> None:
    """The one position of `last`: norms and cosine against the layer's place in the list."""
    heights = np.arange(len(last.layers))
    norm.plot(last.norms_before[:, 0], heights, "o-", color=_BLUE, linewidth=3, markersize=6, label="before")
    norm.plot(last.norms_after[:, 0], heights, "s--", color=_ORANGE, markersize=3, label="after")
    norm.set_xlabel("norm")
    norm.legend(fontsize=7)
    cosine.plot(last.cosine[:, 0], heights, "o-", color=_BLUE, markersize=3)
    scale = _cosine_scale(last.cosine)
    room = 0.05 * (scale["vmax"] - scale["vmin"])
    cosine.set_xlim(scale["vmin"] - room, scale["vmax"] + room)
    cosine.set_xlabel("cosine")
    step = max(1, len(last.layers) // 8)
    for axes in (norm, cosine):
        axes.set_ylim(-0.5, len(last.layers) - 0.5)
        axes.set_yticks(heights[::step], [str(layer) for layer in last.layers[::step]])
    norm.set_title("last position", fontsize=9, loc="left")


def _cosine_scale(cosine: np.ndarray) -> dict[str, float]:
    """From the lowest cosine to 1; from 0 where nothing changed."""
    defined = cosine[~np.isnan(cosine)]
    low = float(defined.min()) if len(defined) else 0.0
    return {"vmin": low if low < 1 - 1e-4 else 0.0, "vmax": 1.0}
