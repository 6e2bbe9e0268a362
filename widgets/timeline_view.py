"""The browser's part of the timeline: tracks, a cursor that runs with playback, a selection, zoom."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import anywidget
import matplotlib
import numpy as np
import traitlets

from . import track
from .skin import asset

if TYPE_CHECKING:
    from ..batch import PreparedBatch


class TimelineView(anywidget.AnyWidget):
    """Draws a batch's sources and plays them; answers the browser's requests for finer pictures and slices of audio.

    `tracks`, see `audiollm.widgets.track`; `source`, `cursor_s` and `selection` ([] or [source, start_s, end_s]) go both ways;
    `view` [start_s, end_s], what is shown; `playing` and `loop`, which also start and stop it from a cell.
    """

    _esm = asset("timeline.js")
    _css = asset("timeline.css")
    tracks = traitlets.List().tag(sync=True)
    colours = traitlets.Bytes(b"").tag(sync=True)
    source = traitlets.Int(0).tag(sync=True)
    cursor_s = traitlets.Float(0.0).tag(sync=True)
    selection = traitlets.List().tag(sync=True)
    view = traitlets.List().tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    loop = traitlets.Bool(False).tag(sync=True)
    key = traitlets.Unicode("").tag(sync=True)

    def __init__(self, batch: PreparedBatch, **traits: Any) -> None:
        self._batch: PreparedBatch | None = batch
        colours = matplotlib.colormaps["cividis"](np.arange(256), bytes=True)[:, :3].tobytes()
        longest = max((each.used_s for each in batch.timeline), default=1.0)
        tracks = [track.track(batch, number) for number in range(len(batch.slots))]
        super().__init__(key=uuid.uuid4().hex, tracks=tracks, colours=colours, view=[0.0, longest], **traits)
        self.on_msg(self._answer)

    @property
    def nbytes(self) -> int:
        """Bytes that opening it sends to the browser."""
        texts = len(self._esm) + len(self._css)
        return texts + sum(len(each[key]) for each in self.tracks for key in ("peaks", "mel", "positions"))

    def _answer(self, widget: Any, asked: dict, buffers: list) -> None:
        """A stretch drawn finer, or a slice of audio; anything else is not ours."""
        batch, number = self._batch, asked.get("source")
        if batch is None or not isinstance(number, int) or not 0 <= number < len(batch.slots):
            return
        if asked.get("event") == "detail":
            drawn = track.detail(batch, number, int(asked["first"]), int(asked["end"]))
            told = {key: drawn[key] for key in ("first", "end", "mel_columns")}
            self.send({"event": "detail", "source": number, **told}, [drawn["peaks"], drawn["mel"]])
        elif asked.get("event") == "audio":
            first, count = int(asked["first"]), int(asked["count"])
            self.send({"event": "audio", "source": number, "first": first}, [track.audio(batch, number, first, count)])

    def close(self) -> None:
        """Free the model, and let go of the batch."""
        self._batch = None
        super().close()

    def __repr__(self) -> str:
        return f"TimelineView({len(self.tracks)} sources, cursor {self.cursor_s:.3f} s)"
