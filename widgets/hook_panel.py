"""Hooks: choose a place and what to do there, for which tokens; run, and see what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from ..analysis.effects import EditEffect, edit_effect
from ..attachments import ACTS, Attached, Attachment, Firings
from ..errors import ArgumentError
from ..modules import KINDS, Place, places
from ..observe import Observation
from ..plots.effects import effect_map, next_token_bars
from .figure_view import FigureView, SecondsAxis
from .job import Job
from .panel import Panel
from .selection import checked_selection, same_batch
from .static_view import StaticView, Table

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session
    from .timeline_panel import TimelinePanel

_TOKENS = (
    ("all", "all"),
    ("audio", "audio"),
    ("text", "text"),
    ("last of the prompt", "last"),
    ("generated ones only", "steps"),
    ("the selection", "selection"),
)

_STEPPING = ("zero", "scale", "add")  # what generated tokens can be edited by


class HookPanel(Panel):
    """What is attached to a model while it answers a batch, and what that changes. Made as `HookPanel(session, batch)`.

    `attachments`, what is attached, a tuple of `audiollm.attachments.Attachment`; `vectors`, arrays [D] or SteeringVectors
    to add, and `batches`, batches to swap with, by name; `selection`, () or (source, start_s, end_s), which `follow` takes
    from a timeline; `layers` that are compared, () for all. All are traits and may be set from a cell, as may the `value`
    of `filter`, `kind`, `place`, `act`, `factor`, `vector`, `donor`, `other`, `tokens`, `source`, `steps`, `new_tokens`,
    `profile` and `shown`. Nothing is registered on the model but during a run, which leaves `effect`, an EditEffect, and
    `seen`, an Observation or None for each attachment.

    Raises: ArgumentError for a batch that another model prepared.
    """

    heading = "Hooks and edits"
    attachments = traitlets.Tuple()
    vectors = traitlets.Dict()
    batches = traitlets.Dict()
    selection = traitlets.Tuple()
    layers = traitlets.Tuple()
    _attached: Attached | None = None  # of the last run

    def __init__(
        self,
        session: Session,
        batch: PreparedBatch,
        vectors: Mapping[str, Any] | None = None,
        batches: Mapping[str, PreparedBatch] | None = None,
    ) -> None:
        session._check_batch(batch)
        self.session, self.batch = session, batch
        self.effect: EditEffect | None = None
        self.seen: tuple[Observation | None, ...] = ()
        self._make_controls()
        super().__init__(self._rows())
        self._wire()
        self.vectors, self.batches = dict(vectors or {}), dict(batches or {})
        self._filter()
        self._choose()
        self._tell()

    def _make_controls(self) -> None:
        sources = [(f"source {k}: {slot.name}", k) for k, slot in enumerate(self.batch.slots)]
        self.filter = ipywidgets.Text(description="filter", placeholder="resid, *q_proj", layout=_wide())
        self.kind = ipywidgets.Dropdown(description="show", options=KINDS, layout=_wide())
        self.place = ipywidgets.Select(description="place", rows=11, layout=_wide())
        self.place_note = _note()
        self.act = ipywidgets.Dropdown(description="do", options=ACTS, layout=_wide())
        self.factor = ipywidgets.FloatText(1.0, description="factor", layout=_wide())
        self.vector = ipywidgets.Dropdown(description="vector", layout=_wide())
        self.donor = ipywidgets.Dropdown(description="rows from", options=sources, layout=_wide())
        self.other = ipywidgets.Dropdown(description="batch", layout=_wide())
        self.tokens = ipywidgets.Dropdown(description="tokens", options=_TOKENS, layout=_wide())
        self.source = ipywidgets.Dropdown(description="of", options=[("all sources", "all"), *sources], layout=_wide())
        self.steps = ipywidgets.Checkbox(description="generated tokens as well", indent=False, layout=_wide())
        self.selection_note = _note()
        self.attach_button = ipywidgets.Button(
            description="Attach", tooltip="Add this to the list of what is attached", button_style="primary"
        )
        self.listed = ipywidgets.Select(description="attached", rows=4, layout=_wide())
        self.remove_button = ipywidgets.Button(description="Remove", tooltip="Remove the one that is marked")
        self.clear_button = ipywidgets.Button(description="Remove all", tooltip="Remove everything that is attached")
        self.new_tokens = ipywidgets.BoundedIntText(16, 0, 16_384, description="new tokens")
        self.profile = ipywidgets.Dropdown(description="profile", options=list(self.session._adapter.profiles))
        self.run_button = ipywidgets.Button(
            description="Run", tooltip="Run without and with what is attached, and compare", button_style="primary"
        )
        asked = {slot.sample_index for slot in self.batch.slots}
        silent = [b for b in range(len(self.batch)) if b not in asked]
        self._views: list[tuple[int | None, int]] = [(k, s.sample_index) for k, s in enumerate(self.batch.slots)]
        self._views += [(None, b) for b in silent]
        labels = [name for name, _ in sources] + [f"request {b}, without audio" for b in silent]
        self.shown = ipywidgets.Dropdown(
            description="see", options=list(zip(labels, range(len(labels)), strict=True)), layout=_wide()
        )
        self.map, self.bars, self.answers = FigureView(), FigureView(), ipywidgets.HTML()

    def _rows(self) -> list[ipywidgets.Widget]:
        def column(width: str, *parts: ipywidgets.Widget) -> ipywidgets.VBox:
            return ipywidgets.VBox(parts, layout=ipywidgets.Layout(width=width))

        self.results = ipywidgets.VBox(
            [self.shown, self.map, self.bars, self.answers], layout=ipywidgets.Layout(display="none")
        )
        where = column("56%", self.filter, self.kind, self.place, self.place_note)
        what = (self.act, self.factor, self.vector, self.donor, self.other, self.tokens, self.source, self.steps)
        how = column("44%", *what, self.selection_note, self.attach_button)
        buttons = ipywidgets.HBox([self.remove_button, self.clear_button])
        run = ipywidgets.HBox([self.new_tokens, self.profile, self.run_button])
        return [ipywidgets.HBox([where, how]), self.listed, buttons, run, self.results]

    def _wire(self) -> None:
        self.on_change(self.filter, "value", self._filter)
        self.on_change(self.kind, "value", self._filter)
        self.on_change(self.place, "value", self._tell_place)
        self.on_change(self.act, "value", self._choose)
        self.on_change(self.tokens, "value", self._choose)
        self.on_change(self, "vectors", lambda: _offer(self.vector, self.vectors))
        self.on_change(self, "batches", lambda: _offer(self.other, self.batches))
        self.on_change(self, "selection", self._tell)
        self.on_change(self, "attachments", self._name_all)
        self.on_change(self.shown, "value", self._draw)
        self.on_change(self.skin, "dark", self._draw)
        self.on_click(self.attach_button, self.attach)
        self.on_click(self.remove_button, lambda: self.remove(self._marked()))
        self.on_click(self.clear_button, self.clear)
        self.on_click(self.run_button, self.run)

    # What is attached

    def attachment(self) -> Attachment:
        """What the controls say. Raises: ArgumentError where it does not fit the model or the batch."""
        tokens, source, seconds = self.tokens.value, self.source.value, None
        if tokens == "selection":
            if not self.selection:
                raise _bad("nothing is selected; drag over the timeline, or set panel.selection", "selection")
            source, seconds = self.selection[0], self.selection[1:]
        if self.place.value is None:
            raise _bad("no place is chosen; empty the filter and choose one", "place")
        act = self.act.value
        found = Attachment(
            self.place.value,
            act,
            tokens=None if tokens in ("all", "selection") else tokens,
            seconds=seconds,
            source=None if source == "all" else source,
            steps="all" if self.steps.value and act in _STEPPING else None,
            factor=self.factor.value if act in ("scale", "add") else 1.0,
            vector=self.vectors.get(self.vector.value) if act == "add" else None,
            other=self.batches.get(self.other.value) if act == "swap" else None,
            donor=self.donor.value if act == "replace" else None,
        )
        return found.check(self.session, self.batch)

    def attach(self, attachment: Attachment | None = None) -> HookPanel:
        """Attach what the controls say, or this. Raises: ArgumentError where it does not fit, before the model runs."""
        self.attachments = (*self.attachments, self.attachment() if attachment is None else attachment)
        return self

    def remove(self, number: int) -> HookPanel:
        """Remove one, by its number in the list. Raises: ArgumentError where there is none."""
        if not 0 <= number < len(self.attachments):
            raise _bad(f"attachment {number!r} is not one of the {len(self.attachments)}", "number")
        self.attachments = (*self.attachments[:number], *self.attachments[number + 1 :])
        return self

    def clear(self) -> HookPanel:
        """Remove all."""
        self.attachments = ()
        return self

    def firings(self) -> tuple[Firings | None, ...]:
        """How often each attachment fired in the last run; None for those that were in none."""
        ran = (
            {} if self._attached is None else dict(zip(self._attached.attachments, self._attached.firings, strict=True))
        )
        return tuple(ran.get(attachment) for attachment in self.attachments)

    @traitlets.validate("attachments")
    def _check_attachments(self, proposal: Any) -> tuple:
        for attachment in proposal.value:
            if not isinstance(attachment, Attachment):
                raise _bad(f"{attachment!r} is no audiollm.attachments.Attachment", "attachments")
            if attachment not in self.attachments:
                attachment.check(self.session, self.batch)
        return proposal.value

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> tuple:
        value = checked_selection(self.batch, proposal.value)
        if value:
            Attachment("embed", source=value[0], seconds=value[1:]).check(self.session, self.batch)
        return value

    def follow(self, timeline: TimelinePanel) -> HookPanel:
        """Take the selection and the cursor of a timeline of the same batch, and seek it where the map is clicked.

        Raises: ArgumentError for a timeline of another batch.
        """
        same_batch(self.batch, timeline)
        self._take_selection(timeline.selection)
        self.follow_trait(timeline, "selection", self._take_selection)
        self.follow_trait(timeline, "cursor_s", lambda _: self._move_cursor(timeline))
        self.follow_trait(timeline, "source", lambda _: self._move_cursor(timeline))
        self.on_change(self.shown, "value", lambda: self._move_cursor(timeline))

        def seek(axes: int, second: float, layer: float) -> None:
            source = self._views[self.shown.value][0]
            if source is not None and axes < 3 and not self.is_away:
                timeline.seek(min(max(second, 0.0), self.batch.timeline[source].used_s), source)

        self.map.on_point(self.guarded(seek))
        self._move_cursor(timeline)
        return self

    def _take_selection(self, selection: tuple) -> None:
        if selection and self.batch.timeline[selection[0]].tokens_within(*selection[1:]) is None:
            selection = ()  # less than a token
        self.selection = selection

    def _move_cursor(self, timeline: TimelinePanel) -> None:
        mine = self._views[self.shown.value][0] == timeline.source
        self.map.cursor_s = timeline.cursor_s if mine else None

    # Running

    def run(self) -> HookPanel:
        """Start a run without and one with what is attached; `wait()` until `effect` is there. While busy, nothing.

        Raises: ArgumentError where nothing is attached.
        """
        if not self.attachments:
            raise _bad("nothing is attached; choose a place and what to do there, and press Attach", "attachments")
        attached = Attached(self.session, self.batch, self.attachments)
        layers, new_tokens, profile = self.layers or None, self.new_tokens.value, self.profile.value

        def work(job: Job) -> EditEffect:
            self._attached = attached
            with job.watching(self.session):
                return edit_effect(self.session, self.batch, attached, layers, new_tokens, profile)

        self.start(work, self._take)
        return self

    def _take(self, effect: EditEffect) -> None:
        assert self._attached is not None
        self.effect, self.seen = effect, self._attached.seen
        self.results.layout.display = ""
        self._draw()

    def _ended(self) -> None:
        super()._ended()
        if not self._closed:
            self._list()

    def close(self) -> None:
        """As every panel's; and every hook is off the model, also of a run that has not ended by then."""
        try:
            super().close()
        finally:
            if self._attached is not None:
                self._attached.close()

    # Showing

    def _filter(self) -> None:
        found = places(self.session, self.filter.value, self.kind.value)
        before, self._places = self.place.value, {place.name: place for place in found}
        is_tree = not self.filter.value.strip()
        self.place.options = [(_label(place, is_tree), place.name) for place in found]
        self.place.value = before if before in self._places else None
        self._tell_place()

    def _tell_place(self) -> None:
        place = self._places.get(self.place.value)
        if place is None:
            self.place_note.value = "choose a place" if self._places else "no place is called so"
        else:
            self.place_note.value = escape(place.describe())

    def _choose(self) -> None:
        """Show the controls that this act has."""
        act = self.act.value
        takers = {self.factor: ("scale", "add"), self.vector: ("add",), self.donor: ("replace",), self.other: ("swap",)}
        takers[self.steps] = _STEPPING
        for control, acts in takers.items():
            control.layout.display = "" if act in acts else "none"
        self.source.layout.display = "none" if self.tokens.value == "selection" else ""

    def _name_all(self) -> None:
        """Vectors and batches of attachments that a cell made get names, by which `code` calls them."""
        for trait, name, kind in (("vectors", "vector", "vector"), ("batches", "other", "batch")):
            known = dict(getattr(self, trait))
            for value in (getattr(attachment, name) for attachment in self.attachments):
                if value is not None and not any(value is one for one in known.values()):
                    known[_free(kind, known)] = value
            setattr(self, trait, known)
        self._list()

    def _list(self) -> None:
        marked = self.listed.index
        told = zip(self.attachments, self.firings(), strict=True)
        options = [(f"{k}. {self._words_of(a)} ({_fired(f)})", k) for k, (a, f) in enumerate(told)]
        self.listed.options = options
        if options:
            self.listed.index = min(marked or 0, len(options) - 1)

    def _marked(self) -> int:
        return -1 if self.listed.value is None else self.listed.value

    def _tell(self) -> None:
        if not self.selection:
            self.selection_note.value = "nothing is selected on a timeline"
        else:
            source, start_s, end_s = self.selection
            self.selection_note.value = f"selected: source {source}, {start_s:.3f}-{end_s:.3f} s"

    def _draw(self) -> None:
        if self.effect is None:
            return
        source, request = self._views[self.shown.value]
        dark = self.skin.dark
        figure = effect_map(self.effect, source, request)
        seconds = [] if source is None else [SecondsAxis(axes, source=source) for axes in figure.axes[:3]]
        self.map.show(figure, self.effect.describe(), dark, seconds)
        bars = next_token_bars(self.effect, request)
        likely = ", ".join(map(repr, self.effect.next_tokens[request][:6]))
        self.bars.show(bars, f"Probability of the next token, before -> after: {likely}", dark)
        self.answers.value = "".join(table.html() for table in self._answer_tables())

    def _answer_tables(self) -> list[Table]:
        if self.effect is None or not self.effect.answers_before:
            return []
        pairs = zip(self.effect.answers_before, self.effect.answers_after, strict=True)
        rows = tuple((str(b), was.text, now.text) for b, (was, now) in enumerate(pairs))
        return [Table("Generated text", ("request", "before", "after"), rows)]

    def describe(self) -> str:
        """What is attached with its firings, and what the last run changed and saw."""
        self.wait()
        count = len(self.attachments)
        lines = [f"{self.heading}: {count} attached" if count else f"{self.heading}: nothing is attached"]
        lines += [f"  {self._words_of(a)} ({_fired(f)})" for a, f in zip(self.attachments, self.firings(), strict=True)]
        if self.effect is None or self._attached is None:
            return "\n".join([*lines, "no run yet"])
        if self._attached.attachments != self.attachments:
            lines.append("what follows is of a run with other attachments")
        lines.append(self.effect.describe())
        lines += [f"  seen: {seen[name].describe()}" for seen in self.seen if seen is not None for name in seen]
        return "\n".join(lines)

    def static(self) -> StaticView:
        """The map and the probabilities as pictures; what is attached, the next tokens and the answers as tables."""
        text = self.describe()
        told = zip(self.attachments, self.firings(), strict=True)
        tables = [Table("Attached", ("what", "firings"), tuple((self._words_of(a), _fired(f)) for a, f in told))]
        if self.effect is None:
            return StaticView(text, (), tuple(tables))
        request = self._views[self.shown.value][1]
        tokens = tuple((t.label, f"{t.before:.4f}", f"{t.after:.4f}") for t in self.effect.next_tokens[request])
        tables.append(Table(f"Next token of request {request}", ("token", "before", "after"), tokens))
        return StaticView(text, (self.map.picture, self.bars.picture), (*tables, *self._answer_tables()))

    def code(self) -> str:
        """Lines that attach, run and compare the same from `session`, `batch`, `vectors` and `batches`."""
        blocks = [f"    {self._code_of(attachment)}," for attachment in self.attachments]
        observing = [k for k, attachment in enumerate(self.attachments) if attachment.act == "observe"]
        source, request = self._views[self.shown.value]
        more = f"layers={self.layers!r}, " if self.layers else ""
        lines = [
            "from audiollm import edits",
            "from audiollm.analysis import edit_effect",
            "from audiollm.plots import effect_map, next_token_bars",
            "",
            *(["blocks = [", *blocks, "]"] if blocks else ["blocks = []"]),
            f"effect = edit_effect(session, batch, blocks, {more}max_new_tokens={self.new_tokens.value}, "
            f"profile={self.profile.value!r})",
            *([f"seen = [blocks[k].result() for k in {observing}]"] if observing else []),
            f"effect_map(effect, {source}, {request})",
            f"next_token_bars(effect, {request})",
        ]
        return "\n".join(lines)

    def _code_of(self, attachment: Attachment) -> str:
        vector, other = self._names_of(attachment)
        return attachment.code(self.session, f"vectors[{vector!r}]", f"batches[{other!r}]")

    def _words_of(self, attachment: Attachment) -> str:
        return attachment.describe(*self._names_of(attachment))

    def _names_of(self, attachment: Attachment) -> tuple[str, str]:
        """What its vector and its other batch are called here."""
        vector = next((name for name, value in self.vectors.items() if value is attachment.vector), "")
        other = next((name for name, value in self.batches.items() if value is attachment.other), "")
        return vector, other


def _label(place: Place, is_tree: bool) -> str:
    """A line of the list: a point, or a module, indented by its depth where the whole tree is shown."""
    told = place.describe()
    if not is_tree or place.is_point:
        return told
    return "\u00a0\u00a0" * place.depth + told.removeprefix(place.name.rpartition(".")[0] + ".")


def _fired(firings: Firings | None) -> str:
    if firings is None:
        return "not run yet"
    return f"fired {firings!r}" if firings.prompt or firings.steps else "never fired"


def _offer(control: ipywidgets.Dropdown, named: Mapping[str, Any]) -> None:
    """Offer names, and keep the one that is chosen, or choose the first."""
    before = control.value
    control.options = list(named)
    control.value = before if before in named else next(iter(named), None)


def _free(kind: str, known: Mapping[str, Any]) -> str:
    number = 1
    while f"{kind} {number}" in known:
        number += 1
    return f"{kind} {number}"


def _wide() -> ipywidgets.Layout:
    """A layout of a control's own, which may be hidden."""
    return ipywidgets.Layout(width="97%")


def _note() -> ipywidgets.HTML:
    note = ipywidgets.HTML()
    note.add_class("audiollm-note")
    return note


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)
