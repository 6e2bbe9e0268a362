"""Layers over time: norms, similarity of moments, of layers and of sources, and states in two dimensions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from ..analysis.labels import label_tokens
from ..errors import ArgumentError
from . import layer_views as views
from .figure_view import FigureView
from .job import Job
from .layer_cache import LIMIT_BYTES, LayerStates
from .panel import Panel
from .selection import checked_selection, checked_source, same_batch
from .static_view import StaticView, Table

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session
    from .timeline_panel import TimelinePanel


class LayerPanel(Panel):
    """What the layers of a model hold of a batch's sources. Made as `LayerPanel(session, batch)`.

    Controls, whose `value` may be set from a cell: `view`, a key of `layer_views.VIEWS` ("norms", "map", "self", "cross",
    "projection"); `source` and `other_source`, numbers in `batch.slots`; `layers`, a tuple, for "norms" and "map"; `layer` and
    `other_layer`; `colour`, "time" or a name of `annotations`; `centered`, whether cosines are of what differs from the mean over
    time; `only_selection`, whether just the selected seconds are looked at.

    Traits: `annotations` maps a name to (intervals [n, 2] in seconds, n labels), as `mir_eval.io.load_labeled_intervals` returns
    them, or to {source: such a pair}; `selection`, () or (source, start_s, end_s), is marked; `cursor`, () or (source,
    second). `follow(timeline)` takes both from a timeline, and clicking a point or a column seeks it. `result` is what is
    shown: LayerNorms, SelfSimilarity, CrossSimilarity or Projection.

    Only the layers that are shown are computed, on a thread, and their states are kept on the CPU, the least recently used let
    go first, at most `cache_bytes`. Where all layers together need at most `layer_cache.AHEAD_BYTES` (16 MiB) the first
    prefill keeps them all. `compute_anew()` forgets them, as after an edit of the model.

    Raises: ArgumentError for a batch of another model or without sources, and `too_large` where two layers need more than
    `cache_bytes`.
    """

    heading = "Layers"
    annotations = traitlets.Dict()
    selection = traitlets.Tuple()
    cursor = traitlets.Tuple()

    def __init__(
        self,
        session: Session,
        batch: PreparedBatch,
        annotations: Mapping[str, Any] | None = None,
        cache_bytes: int = LIMIT_BYTES,
    ) -> None:
        self.states = LayerStates(session, batch, cache_bytes)
        if not len(batch.slots):
            raise _bad("the batch has no audio to show; prepare a Request with at least one source", "batch")
        self.session, self.batch = session, batch
        self.result: Any = None
        self._shown: views.Asked | None = None
        self._labels: Any = None
        self._timeline: TimelinePanel | None = None
        self._stale = False
        self._make_controls()
        super().__init__(self._rows())
        self._wire()
        self.annotations = dict(annotations or {})
        self._refresh()

    def _make_controls(self) -> None:
        n, sources = self.session.n_layers, [(f"{k}: {s.name}", k) for k, s in enumerate(self.batch.slots)]
        last = sources[-1][1]
        choices = [(text, key) for key, text in views.VIEWS.items()]
        self.view = ipywidgets.Dropdown(description="view", options=choices, layout=_wide())
        self.source = ipywidgets.Dropdown(description="source", options=sources, layout=_wide())
        self.layer = _slider("layer", n, n // 2)
        self.other_source = ipywidgets.Dropdown(description="with source", options=sources, value=last, layout=_wide())
        self.other_layer = _slider("with layer", n, n if last == 0 else n // 2)
        self.layers = ipywidgets.SelectMultiple(
            description="layers", options=range(n + 1), value=tuple(range(n + 1)), rows=5, layout=_wide()
        )
        self.colour = ipywidgets.Dropdown(description="colour by", options=["time"], layout=_wide())
        self.centered = ipywidgets.Checkbox(True, description="less the mean over time", layout=_wide())
        self.only_selection = ipywidgets.Checkbox(False, description="selection only", layout=_wide())
        self.anew_button = ipywidgets.Button(
            description="Compute anew", tooltip="Forget the states that were kept, and compute what is shown again"
        )
        self.figure = FigureView()
        self.note = ipywidgets.HTML()
        self.note.add_class("audiollm-note")

    def _rows(self) -> list[ipywidgets.Widget]:
        self._controls = (self.view, *(getattr(self, name) for name in _NAMES), self.only_selection)
        controls = ipywidgets.HBox(self._controls, layout=ipywidgets.Layout(flex_flow="row wrap"))
        return [controls, self.figure, self.note, self.anew_button]

    def _wire(self) -> None:
        for control in self._controls:
            self.on_change(control, "value", self._refresh)
        self.on_change(self, "annotations", self._offer)
        self.on_change(self, "selection", self._selected)
        self.on_change(self, "cursor", self._move)
        self.on_change(self.skin, "dark", self._draw)
        self.on_click(self.anew_button, self.compute_anew)
        self.figure.on_point(self.guarded(self._clicked))

    # Traits

    @traitlets.validate("annotations")
    def _check_annotations(self, proposal: Any) -> dict:
        if "time" in proposal.value:
            raise _bad("an annotation may not be called 'time'; choose another name", "annotations")
        for name, given in proposal.value.items():
            pairs = given if isinstance(given, Mapping) else {None: given}
            for source, pair in pairs.items():
                self._check_pair(name, source, pair)
        return dict(proposal.value)

    def _check_pair(self, name: str, source: Any, pair: Any) -> None:
        """Refuse what is no annotation, or labels no token of the source it is for (of any source, for None)."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _bad(f"annotation {name!r} must be (intervals [n, 2] in seconds, n labels)", "annotations")
        numbers = (
            range(len(self.batch.slots)) if source is None else [checked_source(self.batch, source, "annotations")]
        )
        refused = None
        for number in numbers:
            try:
                label_tokens(self.batch.timeline[number], *pair)
                return
            except ArgumentError as error:
                refused = error
        raise _bad(f"annotation {name!r}: {refused}", "annotations") from refused

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> tuple:
        return checked_selection(self.batch, proposal.value)

    @traitlets.validate("cursor")
    def _check_cursor(self, proposal: Any) -> tuple:
        value = tuple(proposal.value)
        if value and len(value) != 2:
            raise _bad(f"cursor is {value!r}; pass (source, second), or ()", "cursor")
        if value:
            self.batch.timeline[checked_source(self.batch, value[0], "cursor")].at(value[1])
        return value

    # Computing

    def asked(self) -> views.Asked:
        """What the controls say. Raises: ArgumentError for no layer, or a selection that is asked for and is not there."""
        if self.view.value in ("norms", "map") and not self.layers.value:
            raise _bad("no layer is chosen; mark one or more", "layers")
        only: tuple = ()
        if self.only_selection.value:
            if not self.selection:
                raise _bad("nothing is selected; drag over the timeline, or set panel.selection", "selection")
            only = self.selection
            if self.batch.timeline[only[0]].tokens_within(*only[1:]) is None:
                raise _bad("the selection holds no token's centre; select more", "selection")
        return views.Asked(
            self.view.value,
            self.source.value,
            self.layer.value,
            self.other_source.value,
            self.other_layer.value,
            tuple(sorted(self.layers.value)),
            self.colour.value,
            self.centered.value,
            only,
        )

    def _refresh(self) -> None:
        """Show what the controls say: at once where it is quick, else when a thread has computed it."""
        for name in _NAMES:
            getattr(self, name).layout.display = "" if name in views.USES[self.view.value] else "none"
        asked = self.asked()
        if self.busy:
            self._stale = True  # shown once the work that runs has ended
        elif self.states.is_quick(asked.needed):
            self.failure = None
            self._take(asked, views.computed(asked, self.states))
            self.say("")
        else:

            def work(job: Job) -> Any:
                with job.watching(self.session):
                    return views.computed(asked, self.states)

            self.start(work, lambda result: self._take(asked, result))

    def compute_anew(self) -> None:
        """Forget the states that were kept, and compute what is shown. Nothing while work is under way."""
        if not self.busy:
            self.states.cache.clear()
            self._refresh()

    def _ended(self) -> None:
        with self._lock:
            super()._ended()
            stale, self._stale = self._stale, False
            if stale and not self._closed:
                self.guarded(self._refresh)()

    def cancel(self) -> None:
        """As `Panel.cancel`; the last picture stays."""
        self._stale = False
        super().cancel()

    def wait(self, timeout: float | None = None) -> LayerPanel:
        """Until what the controls say is shown, was cancelled or has failed; see `Panel.wait`."""
        end = None if timeout is None else time.monotonic() + timeout
        job = None
        while self._job is not job and not (self._job is not None and self._job.is_mine):
            job = self._job
            try:
                super().wait(None if end is None else max(0.0, end - time.monotonic()))
            except KeyboardInterrupt:
                self._stale = False
                raise
        return self

    def _take(self, asked: views.Asked, result: Any) -> None:
        self._labels = views.labels_of(asked, result, self.annotations)
        self._shown, self.result = asked, result
        self._draw()

    # Showing

    def _draw(self) -> None:
        if self._shown is None:
            return
        figure, seconds, track = views.drawn(self._shown, self.result, self.batch, self._labels, self.selection)
        self.figure.show(figure, self._words(), self.skin.dark, seconds, track)
        cache = self.states.cache
        kept = f"{cache.nbytes / 2**20:.1f} of at most {cache.limit_bytes / 2**20:,.0f} MiB of states are kept"
        self.note.value = f"{escape(self._words())}<br>{kept}".replace("\n", "<br>")
        self._move()

    def _selected(self) -> None:
        if self.only_selection.value and not self.selection:
            self.only_selection.value = False  # which draws as well
        elif self.only_selection.value:
            self._refresh()
        else:
            self._draw()

    def _offer(self) -> None:
        now, names = self.colour.value, ["time", *self.annotations]
        if tuple(names) != tuple(self.colour.options):
            self.colour.options = names
            self.colour.value = now if now in names else "time"
        if now != "time" and now in names:
            self._refresh()  # the same name may mean other labels now

    def _move(self) -> None:
        """The cursor, on the axes that are seconds of its source."""
        if self._shown is None:
            return
        source, second = self.cursor or (None, None)
        if self._shown.view == "projection":
            self.figure.cursor_s = second if source == self._shown.source else None
            return
        runs = "" if source is None else views.along(self._shown, source)
        boxes = [{**box, "along": runs} for box in self.figure.boxes]
        if boxes != self.figure.boxes:
            self.figure.boxes = boxes
        self.figure.cursor_s = second if runs else None

    def _clicked(self, axes: int, x: float, y: float) -> None:
        if axes or self._shown is None or self.is_away:
            return  # a scale of colours
        playing = self.cursor[0] if self.cursor else None
        source, second = views.place(self._shown, self.result, x, y, playing)
        second = min(max(second, 0.0), self.batch.timeline[source].used_s)
        if self._timeline is not None:
            self._timeline.seek(second, source)
        self.cursor = (source, second)

    def follow(self, timeline: TimelinePanel) -> LayerPanel:
        """Take cursor, source and selection of a timeline of the same batch, and seek it where the picture is clicked.

        Raises: ArgumentError for a timeline of another batch.
        """
        same_batch(self.batch, timeline)
        self._timeline = timeline
        self.follow_trait(timeline, "cursor_s", lambda _: self._follow_cursor())
        self.follow_trait(timeline, "source", self._follow_source)
        self.follow_trait(timeline, "selection", lambda selection: setattr(self, "selection", selection))
        self.selection = timeline.selection
        self._follow_cursor()
        return self

    def _follow_cursor(self) -> None:
        timeline = self._timeline
        if timeline is not None and timeline.cursor_s <= self.batch.timeline[timeline.source].used_s:
            self.cursor = (timeline.source, timeline.cursor_s)

    def _follow_source(self, number: int) -> None:
        if self._shown is None or number not in self._shown.sources:
            self.source.value = number
        self._follow_cursor()

    # Words, twin, code

    def _words(self) -> str:
        if self._shown is None:
            return "nothing is shown yet"
        words = f"{self._shown.title(self.batch)}. {self.result.describe()}"
        if self._labels is not None:
            words += f" Coloured by {self._labels.describe()}"
        return words

    def _told(self) -> str:
        lines = [f"{self.heading}: {self._words()}"]
        if self.selection:
            source, start_s, end_s = self.selection
            only = ", nothing else is looked at" if self._shown is not None and self._shown.only else ""
            lines.append(f"  selected: source {source}, {start_s:.3f}-{end_s:.3f} s{only}")
        if self.cursor:
            lines.append(f"  cursor: source {self.cursor[0]}, {self.cursor[1]:.3f} s")
        return "\n".join(lines)

    def describe(self) -> str:
        """What is shown, selected and where the cursor is, once its work has ended."""
        self.wait()
        return self._told()

    def static(self) -> StaticView:
        """The picture, and the numbers behind it as a table."""
        self.wait()
        return self._twin()

    def _twin(self) -> StaticView:
        if self._shown is None:
            return StaticView(self._told())
        caption, head, rows = views.table(self._shown, self.result, self._labels)
        return StaticView(self._told(), (self.figure.picture,), (Table(caption, head, tuple(rows)),))

    def code(self) -> str:
        """Lines that compute and draw the same from `session`, `batch` and `annotations`."""
        return views.code(self.asked(), self.batch, self.annotations, self.selection)

    def close(self) -> None:
        """As every panel's, and forget the states."""
        if not self._closed:  # what the constructor refused is closed as well, and has no states
            super().close()
            self.states.cache.clear()


_NAMES = ("source", "layer", "other_source", "other_layer", "layers", "colour", "centered")


def _slider(name: str, deepest: int, value: int) -> ipywidgets.IntSlider:
    return ipywidgets.IntSlider(value, 0, deepest, description=name, continuous_update=False, layout=_wide())


def _wide() -> ipywidgets.Layout:
    """A layout of a control's own, which may be hidden."""
    return ipywidgets.Layout(width="320px")


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
