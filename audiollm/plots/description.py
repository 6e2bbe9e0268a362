"""A figure in words and numbers, for readers who cannot see it and for tests: what is drawn on which axes, and its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 6  # things of one kind that are told one by one


def description(figure: Figure) -> str:
    """Title, axes, and of every line, image and group of bars or points how many values, least, greatest and mean.

    Numbers have 3 significant digits; the same figure gives the same text everywhere.

    >>> from matplotlib.figure import Figure
    >>> figure = Figure()
    >>> axes = figure.subplots()
    >>> _ = axes.plot([0, 1, 2], [3, 5, 4], label="loud")
    >>> print(description(figure))
    Figure with 1 axes
      axes 0, x 0..2, y 3..5
        line 'loud': 3 values, 3..5, mean 4
    """
    title = f" {_quoted(figure.get_suptitle())}" if figure.get_suptitle() else ""
    lines = [f"Figure{title} with {len(figure.axes)} axes"]
    for number, axes in enumerate(figure.axes):
        lines.append(f"  axes {number}{_named(axes)}")
        for kind in (_lines(axes), _images(axes), _bars(axes), _groups(axes)):
            told = list(kind)
            lines += [f"    {each}" for each in told[:_MOST]]
            if len(told) > _MOST:
                lines.append(f"    and {len(told) - _MOST} more")
    return "\n".join(lines)


def _named(axes: Axes) -> str:
    title = f" {_quoted(axes.get_title())}" if axes.get_title() else ""
    across = f" {_quoted(axes.get_xlabel())}" if axes.get_xlabel() else ""
    up = f" {_quoted(axes.get_ylabel())}" if axes.get_ylabel() else ""
    return f"{title}, x{across} {_span(_shown(axes, 'x'))}, y{up} {_span(_shown(axes, 'y'))}"


def _shown(axes: Axes, along: str) -> np.ndarray:
    """What an axis spans: its data where matplotlib chose the limits, whose margins are of no interest, else the limits."""
    if axes.get_autoscalex_on() if along == "x" else axes.get_autoscaley_on():
        limits = axes.dataLim.intervalx if along == "x" else axes.dataLim.intervaly
        if np.isfinite(limits).all():
            return limits
    return np.asarray(axes.get_xlim() if along == "x" else axes.get_ylim())


def _lines(axes: Axes) -> Iterator[str]:
    for line in axes.lines:
        yield f"line{_label(line)}: {_values(line.get_ydata())}"


def _images(axes: Axes) -> Iterator[str]:
    for image in axes.images:
        array = _filled(image.get_array())
        yield f"image {' x '.join(map(str, array.shape))}: {_values(array)}"


def _bars(axes: Axes) -> Iterator[str]:
    for bars in axes.containers:
        if hasattr(bars, "datavalues") and bars.datavalues is not None:
            yield f"bars{_label(bars)}: {_values(bars.datavalues)}"


def _groups(axes: Axes) -> Iterator[str]:
    """Meshes, scattered points and filled areas."""
    for group in axes.collections:
        array = group.get_array()
        offsets = _filled(group.get_offsets())
        if array is not None:
            yield f"{_kind(group)}{_label(group)}: {_values(_filled(array))}"
        elif len(offsets) > 1:
            yield f"{_kind(group)}{_label(group)}: {len(offsets)} points, y {_values(offsets[:, 1])}"
        else:
            vertices = [np.asarray(path.vertices) for path in group.get_paths()]
            corners = [each[:, 1] for each in vertices if len(each)]
            if corners:
                yield f"{_kind(group)}{_label(group)}: {_values(np.concatenate(corners))}"


def _filled(given: Any) -> np.ndarray:
    """Numbers, with NaN for what is masked."""
    return np.asarray(np.ma.filled(np.ma.asarray(given, dtype=float), np.nan))


def _kind(group: Any) -> str:
    return {"QuadMesh": "mesh", "PathCollection": "points"}.get(type(group).__name__, "area")


def _label(thing: Any) -> str:
    label = str(thing.get_label() or "")
    return "" if label.startswith("_") or not label else f" {_quoted(label)}"


def _values(given: Any) -> str:
    values = np.asarray(given, dtype=float).ravel()
    seen = values[np.isfinite(values)]
    gaps = f", {len(values) - len(seen)} missing" if len(seen) < len(values) else ""
    if not len(seen):
        return f"0 values{gaps}"
    return f"{len(seen)} values, {_span(np.array([seen.min(), seen.max()]))}, mean {_short(seen.mean())}{gaps}"


def _span(limits: np.ndarray) -> str:
    return f"{_short(limits[0])}..{_short(limits[1])}"


def _short(value: float) -> str:
    """3 significant digits; what is 0 but for rounding is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def _quoted(text: str) -> str:
    return repr(" ".join(text.split()))
