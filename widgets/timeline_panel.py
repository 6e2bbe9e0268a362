"""The timeline: what the model hears of each source, in seconds, mel frames, windows, tokens and prompt positions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets
import soundfile
import traitlets

from ..errors import ArgumentError
from ..plots import timeline as draw
from ..timeline import Moment
from .figure_view import rendered
from .panel import Panel
from .selection import checked_selection, checked_source
from .static_view import Picture, StaticView, Table
from .timeline_view import TimelineView

if TYPE_CHECKING:
    from ..batch import PreparedBatch

_KEYS = (
    "Space plays and stops, arrows skip 1 s (with Shift 5 s) and choose the source, Home and End, + and − zoom, 0 shows "
    "all, L loops the selection, Esc clears it. Click to seek, drag to select, Ctrl+wheel to zoom."
)


class TimelinePanel(Panel):
    """All sources of a batch on one axis of seconds, with playback. Made as `TimelinePanel(batch)`.

    `source`, the number in `batch.slots` that is played and moved in; `cursor_s`, seconds of it; `selection`, () or (source,
    start_s, end_s); `selected_tokens`, () or (source, first, last), the tokens whose centre lies in the selection. All are
    traits, may be set from a cell, and are followed by other panels. Other panels read `batch`.

    Raises: ArgumentError for a batch without sources.
    """

    heading = "Timeline"
    source = traitlets.Int(0)
    cursor_s = traitlets.Float(0.0)
    selection = traitlets.Tuple()
    selected_tokens = traitlets.Tuple()

    def __init__(self, batch: PreparedBatch) -> None:
        if not len(batch.slots):
            raise ArgumentError(
                "the batch has no audio to show; prepare a Request with at least one source",
                code="bad_argument",
                source="batch",
            )
        self.batch = batch
        self.view = TimelineView(batch)
        self.where = ipywidgets.HTML()
        self.where.add_class("audiollm-note")
        self.export_button = ipywidgets.Button(
            description="Export WAV", tooltip="Write the selection as a WAV file beside the notebook"
        )
        self.export_folder = Path()
        note = ipywidgets.HTML(f'<span class="audiollm-note">{_KEYS}</span>')
        super().__init__([self.view, ipywidgets.HBox([self.export_button, self.where]), note])
        self.on_change(self.view, ["source", "cursor_s", "selection"], self._from_view)
        self.on_change(self, ["source", "cursor_s"], self._moved)
        self.on_change(self, "selection", self._selected)
        self.on_change(self, "selected_tokens", self._tokens_selected)
        self.on_click(self.export_button, self._export_click)
        self._tell()

    # Moving and selecting

    def seek(self, second: float, source: int | None = None) -> TimelinePanel:
        """Put the cursor at a second of a source. Raises: ArgumentError outside the source."""
        number = self.source if source is None else source
        self._timeline(number).at(second)
        with self.hold_trait_notifications():
            self.source, self.cursor_s = number, float(second)
        return self

    def select(self, source: int, start_s: float, end_s: float) -> TimelinePanel:
        """Select seconds of a source. Raises: ArgumentError outside the source, or where they do not ascend."""
        self.selection = (source, float(start_s), float(end_s))
        return self

    def select_tokens(self, source: int, first: int, last: int) -> TimelinePanel:
        """Select the tokens first..last, inclusive, of a source. Raises: ArgumentError for tokens it does not have."""
        self.selected_tokens = (source, first, last)
        return self

    def clear(self) -> TimelinePanel:
        """Select nothing."""
        self.selection = ()
        return self

    def play(self) -> TimelinePanel:
        """Play in the browser from the cursor, or the selection."""
        self.view.playing = True
        return self

    def pause(self) -> TimelinePanel:
        """Stop playing."""
        self.view.playing = False
        return self

    def at(self, second: float, source: int | None = None) -> Moment:
        """A second in every unit: mel frame, window, token, prompt position. Raises: ArgumentError outside the source."""
        return self._timeline(self.source if source is None else source).at(second)

    @traitlets.validate("source")
    def _check_source(self, proposal: Any) -> int:
        self._timeline(proposal.value)
        return proposal.value

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> tuple:
        return checked_selection(self.batch, proposal.value)

    @traitlets.validate("selected_tokens")
    def _check_tokens(self, proposal: Any) -> tuple:
        value = tuple(proposal.value)
        if not value:
            return ()
        if len(value) != 3:
            raise _bad(f"selected_tokens is {value!r}; pass (source, first, last), or ()", "selected_tokens")
        number, first, last = value
        timeline = self._timeline(number)
        if not 0 <= first <= last < timeline.n_tokens:
            raise _bad(
                f"tokens {first}..{last} are not in source {number}, which has {timeline.n_tokens}", "selected_tokens"
            )
        return int(number), int(first), int(last)

    def _timeline(self, number: Any) -> Any:
        return self.batch.timeline[checked_source(self.batch, number)]

    # Keeping the two sides alike

    def _from_view(self) -> None:
        view = self.view
        with self.hold_trait_notifications():
            self.source = view.source
            self.cursor_s = min(max(view.cursor_s, 0.0), self._timeline(view.source).used_s)
            self.selection = tuple(view.selection)

    def _moved(self) -> None:
        longest = self._timeline(self.source).used_s
        if not 0 <= self.cursor_s <= longest:
            self.cursor_s = min(max(self.cursor_s, 0.0), longest)
        self.view.source, self.view.cursor_s = self.source, self.cursor_s
        self._tell()

    def _selected(self) -> None:
        self.view.selection = list(self.selection)
        tokens = None
        if self.selection:
            number, start_s, end_s = self.selection
            tokens = self.batch.timeline[number].tokens_within(start_s, end_s)
        self.selected_tokens = () if tokens is None else (self.selection[0], *tokens)
        self._tell()

    def _tokens_selected(self) -> None:
        """Seconds for tokens that were set, unless the selection already means just these."""
        if self.selected_tokens:
            number, first, last = self.selected_tokens
            timeline = self.batch.timeline[number]
            mine = (
                timeline.tokens_within(*self.selection[1:]) if self.selection and self.selection[0] == number else None
            )
            if mine != (first, last):
                self.selection = (number, timeline.token_to_time(first)[0], timeline.token_to_time(last)[1])

    # Words, pictures, files

    def describe(self) -> str:
        """Every source with its windows and tokens, where the cursor is and what is selected."""
        lines = [f"{self.heading}: {len(self.batch.slots)} source(s)"]
        for number, (slot, timeline) in enumerate(zip(self.batch.slots, self.batch.timeline, strict=True)):
            lines.append(
                f"  source {number} {slot.name}: {timeline.used_s:.3f} s, {timeline.n_frames} mel frames, "
                f"{len(slot.windows)} windows of {timeline.clock.window_s:g} s, {timeline.n_tokens} tokens of "
                f"{timeline.clock.token_s:g} s"
            )
        return "\n".join([*lines, f"  {self._cursor_words()}", f"  {self._selection_words()}"])

    def _cursor_words(self) -> str:
        moment = self.at(self.cursor_s)
        return (
            f"cursor: source {self.source}, {moment.second:.3f} s, mel frame {_or_none(moment.frame)}, window "
            f"{_or_none(moment.window)}, token {_or_none(moment.token)}, prompt position {_or_none(moment.position)}"
        )

    def _selection_words(self) -> str:
        if not self.selection:
            return "nothing is selected"
        number, start_s, end_s = self.selection
        told = f"selected: source {number}, {start_s:.3f}-{end_s:.3f} s"
        if not self.selected_tokens:
            return told + ", no token's centre"
        _, first, last = self.selected_tokens
        timeline = self.batch.timeline[number]
        frames = timeline.token_to_frames(first)[0], timeline.token_to_frames(last)[1] - 1
        positions = timeline.token_to_position(first), timeline.token_to_position(last)
        return (
            f"{told}, tokens {first}-{last}, mel frames {frames[0]}-{frames[1]}, prompt positions "
            f"{positions[0]}-{positions[1]}"
        )

    def _tell(self) -> None:
        self.where.value = f"{self._cursor_words()}<br>{self._selection_words()}"

    def static(self) -> StaticView:
        """Waveforms, mel, windows and selection as a picture, and the windows as a table."""
        figure = draw(self.batch, self.selection or None, self.cursor_s)
        rows = tuple(
            (str(number), slot.name, str(w.index), f"{w.start_s:.2f}", f"{w.end_s:.2f}", _tokens_of(w))
            for number, slot in enumerate(self.batch.slots)
            for w in slot.windows
        )
        table = Table("Encoder windows", ("source", "name", "window", "start (s)", "end (s)", "tokens"), rows)
        return StaticView(self.describe(), (Picture(rendered(figure), self.describe()),), (table,))

    def code(self) -> str:
        """Lines that find the same seconds and tokens from `batch`."""
        number = self.selection[0] if self.selection else self.source
        lines = [
            f"timeline, slot = batch.timeline[{number}], batch.slots[{number}]",
            f"timeline.at({self.cursor_s!r})  # mel frame, window, token, prompt position",
        ]
        if self.selection:
            _, start_s, end_s = self.selection
            lines += [
                f"first, last = timeline.tokens_within({start_s!r}, {end_s!r})",
                f"heard = slot.waveform[round({start_s!r} * slot.sample_rate) : round({end_s!r} * slot.sample_rate)]",
            ]
        lines += ["from audiollm.plots import timeline as draw_timeline"]
        lines += [f"draw_timeline(batch, {self.selection or None!r}, {self.cursor_s!r})"]
        return "\n".join(lines)

    def export(self, path: str | Path | None = None) -> Path:
        """Write the selection, as the model heard it, as 32-bit float WAV; returns where.

        By default beside the notebook, named after the source and the seconds; an existing file is never written over.
        Raises: ArgumentError where nothing is selected, or `path` exists.
        """
        if not self.selection:
            raise _bad("nothing is selected; drag over the timeline, or set panel.selection", "selection")
        number, start_s, end_s = self.selection
        slot = self.batch.slots[number]
        if path is None:
            stem = f"{Path(slot.name).stem}_{start_s:.3f}-{end_s:.3f}s"
            path = _free(Path(self.export_folder), stem)
        elif Path(path).exists():
            raise _bad(f"{path} exists already; pass another path", "path")
        first, end = round(start_s * slot.sample_rate), round(end_s * slot.sample_rate)
        soundfile.write(path, slot.waveform[first:end].numpy(), slot.sample_rate, format="WAV", subtype="FLOAT")
        return Path(path)

    def _export_click(self) -> None:
        self.say(f"wrote {self.export()}")


def _free(folder: Path, stem: str) -> Path:
    """The first of stem.wav, stem-2.wav, ... that does not exist."""
    path, number = folder / f"{stem}.wav", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.wav"
    return path


def _tokens_of(window: Any) -> str:
    return "none" if window.first_token is None else f"{window.first_token}-{window.last_token}"


def _or_none(value: int | None) -> str:
    return "none" if value is None else str(value)


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
