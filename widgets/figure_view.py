"""A matplotlib figure in the browser: its picture, its description, a cursor in seconds over it, and clicks back.

The picture is drawn once in Python; the cursor is drawn over it in the browser, so that it can follow playback.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anywidget
import numpy as np
import traitlets
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from .skin import asset
from .static_view import Picture

_DPI = 100
_DARK, _LIGHT = "#1e1e1e", "#f0f0f0"


@dataclass(frozen=True)
class SecondsAxis:
    """Axes of a figure with seconds on one or both of its axes ("x", "y" or "xy"); `source`, the number they are of."""

    axes: Axes
    along: str = "x"
    source: int | None = None


class FigureView(anywidget.AnyWidget):
    """Shows a figure. `cursor_s` draws a line at these seconds on every seconds axis, or moves the dot of `show(track=)`.

    `on_point(act)`: `act(axes number, x, y)` in data coordinates of the figure's k-th axes where it was clicked. Without our
    JavaScript there is no view; `picture` is what it shows.
    """

    _esm = asset("figure.js")
    _css = asset("figure.css")
    png = traitlets.Bytes(b"").tag(sync=True)
    alt = traitlets.Unicode("").tag(sync=True)
    boxes = traitlets.List().tag(sync=True)
    track = traitlets.Bytes(b"").tag(sync=True)
    cursor_s = traitlets.Float(None, allow_none=True).tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.limits: list[tuple[float, ...]] = []
        self._acts: list[Callable[[int, float, float], Any]] = []
        self.on_msg(self._take)

    @property
    def picture(self) -> Picture:
        """The picture that is shown."""
        return Picture(self.png, self.alt)

    def show(
        self,
        figure: Figure,
        alt: str,
        dark: bool = False,
        seconds: Sequence[SecondsAxis] = (),
        track: tuple[Axes, np.ndarray] | None = None,
    ) -> None:
        """Draw a figure with its description `alt`, and set where its seconds are.

        `track` is axes and an array [U, 3] of (start in seconds, x, y) in their data: a dot there stands for the cursor.
        """
        with self.hold_sync():
            self.png = rendered(figure, dark)
            self.alt = alt
            self.boxes = [_seconds_box(each) for each in seconds]
            self.track = b"" if track is None else _track(*track)
            self.limits = [_limits(axes) for axes in figure.axes]

    def on_point(self, act: Callable[[int, float, float], Any]) -> None:
        """Call `act(axes number, x, y)` when a place within axes is clicked."""
        self._acts.append(act)

    def _take(self, widget: Any, content: dict, buffers: list) -> None:
        if content.get("event") != "click":
            return
        fx, fy = float(content["x"]), float(content["y"])
        for number, (left, right, bottom, top, x0, x1, y0, y1) in enumerate(self.limits):
            if left <= fx <= right and bottom <= fy <= top:
                x = x0 + (fx - left) / (right - left) * (x1 - x0)
                y = y0 + (fy - bottom) / (top - bottom) * (y1 - y0)
                for act in self._acts:
                    act(number, x, y)
                return

    def __repr__(self) -> str:
        return f"FigureView({self.alt})"


def rendered(figure: Figure, dark: bool = False) -> bytes:
    """A figure as PNG at 100 dots an inch, without pyplot; with `dark` on a dark ground."""
    if dark:
        _darken(figure)
    canvas = FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    canvas.print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _darken(figure: Figure) -> None:
    """Dark ground and light lettering; colours of data stay."""
    figure.set_facecolor(_DARK)
    for axes in figure.axes:
        axes.set_facecolor(_DARK)
        axes.tick_params(colors=_LIGHT, which="both")
        for spine in axes.spines.values():
            spine.set_edgecolor(_LIGHT)
        legend = axes.get_legend()
        if legend is not None:
            legend.get_frame().set_facecolor(_DARK)
    for text in figure.findobj(Text):
        if text.get_color() in ("black", "k", "#000000"):
            text.set_color(_LIGHT)


def _box(axes: Axes) -> tuple[float, float, float, float]:
    """Left, right, bottom, top of axes as fractions of the figure, from its lower left corner."""
    box = axes.get_position()
    return box.x0, box.x1, box.y0, box.y1


def _limits(axes: Axes) -> tuple[float, ...]:
    return (*_box(axes), *map(float, axes.get_xlim()), *map(float, axes.get_ylim()))


def _seconds_box(each: SecondsAxis) -> dict[str, Any]:
    left, right, bottom, top = _box(each.axes)
    return {
        "left": left,
        "right": right,
        "bottom": bottom,
        "top": top,
        "along": each.along,
        "x": list(map(float, each.axes.get_xlim())),
        "y": list(map(float, each.axes.get_ylim())),
    }


def _track(axes: Axes, rows: np.ndarray) -> bytes:
    """(seconds, x, y) in data -> (seconds, x, y) in fractions of the figure, float32."""
    placed = axes.figure.transFigure.inverted().transform(axes.transData.transform(rows[:, 1:]))
    return np.column_stack([rows[:, 0], placed]).astype("<f4").tobytes()
