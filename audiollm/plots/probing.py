"""Probes: the curve over layers, and what held-out probes say over the seconds of a source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from ..errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..analysis.probing import ProbeResult

# Okabe and Ito's palette (2008), safe for colour-blind readers; lines also differ in style and marker.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#777777"


def probe_curve(result: ProbeResult) -> Figure:
    """Draw score by layer with its interval, beside shuffled labels, the random-weights control and chance.

    Returns a matplotlib Figure that belongs to no window (pyplot is not used). `result.describe()` says it in words.

    >>> import numpy as np
    >>> from audiollm.analysis.probing import probe
    >>> from audiollm.plots.probing import probe_curve
    >>> rng = np.random.default_rng(0)
    >>> states = [{0: rng.normal(size=(20, 4)), 1: rng.normal(size=(20, 4))} for _ in range(4)]
    >>> probe_curve(probe(states, [rng.integers(0, 2, 20) for _ in states], n_folds=2)).axes[0].get_ylabel()
    'accuracy on held-out groups'
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = result.rows
    where = np.arange(len(rows))
    axes.fill_between(where, [r.low for r in rows], [r.high for r in rows], color=_BLUE, alpha=0.2, linewidth=0)
    width = f"{100 * result.confidence:g} % interval over {result.scores.shape[1]} folds"
    axes.plot(where, [r.score for r in rows], color=_BLUE, marker="o", label=f"probe, {width}")
    if result.random_weights is not None:
        axes.plot(where, [r.random_weights for r in rows], color=_GREEN, marker="^", ls="-.", label="random weights")
    if result.shuffled is not None:
        axes.plot(where, [r.shuffled for r in rows], color=_ORANGE, marker="s", ls="--", label="shuffled labels")
    axes.axhline(result.chance, color=_GREY, ls=":", label=f"chance, {result.chance:.2f}")
    axes.set_xticks(where, [str(layer) for layer in result.layers])
    axes.set_xlabel("layer")
    axes.set_ylabel(f"{result.metric} on held-out groups".replace("R^2", "$R^2$"))
    axes.legend(fontsize=8)
    seconds = "" if result.labelled_s is None else f", {result.labelled_s:.1f} s"
    axes.set_title(f"{result.n_samples} {result.level}s in {result.n_groups} groups{seconds}", fontsize=10)
    return figure


def probe_timeline(result: ProbeResult, source: int = 0, layer: int | None = None) -> Figure:
    """Draw one source's labels and what the probe that never saw its group says, over seconds.

    `layer` is one of `result.layers`, by default the best. Returns a matplotlib Figure that belongs to no window.
    Raises: ArgumentError for a source or layer that is not in the result, and for a result without seconds.

    >>> import numpy as np
    >>> from audiollm.analysis.labels import label_tokens
    >>> from audiollm.analysis.probing import probe
    >>> from audiollm.plots.probing import probe_timeline
    >>> starts = np.arange(50) * 0.04
    >>> tokens = np.stack([starts, starts + 0.04], axis=1)
    >>> labels = [label_tokens(tokens, [(0, 1, "A"), (1, 2, "B")]) for _ in range(4)]
    >>> states = [{3: np.random.default_rng(k).normal(size=(50, 4))} for k in range(4)]
    >>> probe_timeline(probe(states, labels, n_folds=2), source=1).axes[0].get_xlabel()
    'seconds of the source'
    """
    layer = result.best.layer if layer is None else layer
    if layer not in result.layers:
        raise _bad(f"layer {layer!r} was not probed; there are {', '.join(map(str, result.layers))}", "layer")
    if result.intervals is None:
        raise _bad("the result has no seconds; give labels from label_tokens, or intervals, to the probe", "result")
    if isinstance(source, bool) or not isinstance(source, int) or not 0 <= source < len(result.truth):
        raise _bad(f"source {source!r} is not one of 0..{len(result.truth) - 1}", "source")
    seconds, truth = result.intervals[source], result.truth[source]
    said = result.predictions[source][result.layers.index(layer)]
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    axes = figure.subplots()
    if result.classes is None:
        error = np.sqrt(np.mean((truth - said) ** 2))
        _draw_values(axes, seconds, truth, said)
        axes.set_title(f"source {source}, layer {layer}: root mean square error {error:.3g}", fontsize=10)
    else:
        _draw_classes(axes, seconds, truth, said, result.classes)
        right = f"{np.mean(truth == said):.0%} of {len(truth)} {result.level}(s) right"
        axes.set_title(f"source {source}, layer {layer}: {right}", fontsize=10)
    axes.set_xlabel("seconds of the source")
    axes.set_xlim(seconds[0, 0], seconds[-1, 1])
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return figure


def _draw_values(axes: Axes, seconds: np.ndarray, truth: np.ndarray, said: np.ndarray) -> None:
    starts, ends = seconds.T
    axes.hlines(truth, starts, ends, color=_GREY, linewidth=4, label="label")
    axes.hlines(said, starts, ends, color=_BLUE, linewidth=1.5, label="held-out probe")
    axes.set_ylabel("value")


def _draw_classes(
    axes: Axes, seconds: np.ndarray, truth: np.ndarray, said: np.ndarray, classes: tuple[Any, ...]
) -> None:
    """One row a class: labels as grey bars, right predictions blue and wrong ones orange within them."""
    starts, ends = seconds.T
    shown = [c for c in classes if (truth == c).any() or (said == c).any()]
    row = {c: k for k, c in enumerate(shown)}
    at, told, right = (
        np.array([row[c] for c in truth.tolist()]),
        np.array([row[c] for c in said.tolist()]),
        truth == said,
    )
    axes.hlines(at, starts, ends, color=_GREY, alpha=0.5, linewidth=14, label="label")
    for name, which, colour in (("right", right, _BLUE), ("wrong", ~right, _ORANGE)):
        axes.hlines(told[which], starts[which], ends[which], color=colour, linewidth=5, label=f"probe, {name}")
    axes.set_yticks(range(len(shown)), [str(c) for c in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_ylabel("class")


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
