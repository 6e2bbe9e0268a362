"""The front door: the six panels in one tabbed view, linked, for one session and up to five sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from .. import demo
from ..errors import ArgumentError
from .audio_picker import AudioPicker
from .generate_panel import GeneratePanel
from .hook_panel import HookPanel
from .layer_panel import LayerPanel
from .panel import Panel
from .static_view import StaticView
from .timeline_panel import TimelinePanel
from .token_table import TokenTable

if TYPE_CHECKING:
    from ..batch import PreparedBatch
    from ..session import Session

TABS = ("Audio", "Timeline", "Layers", "Hooks", "Generate")
_EMPTY = "Nothing is prepared yet: choose audio and press Prepare."


class Explorer(Panel):
    """Choose audio and a prompt, prepare them, and look: timeline with tokens, layers, hooks, generation, linked.

    `session`, from `load_model` or `demo.load`; `audios`, paths or Waveforms to start with, prepared at once; `prompt`, what is
    asked. `batch`, a trait, is what was prepared last, or None. The panels are `picker`, `timeline`, `tokens`, `layers`, `hooks`
    and `generator`; those of a batch are None until there is one, and are made anew for each. `layers` and `hooks` are made
    when their tab is first opened, or when they are asked for. `show("Layers")` opens a tab.

    Raises: as AudioPicker for audios that cannot be read.
    """

    heading = "Explorer"
    batch = traitlets.Any(None, allow_none=True)

    def __init__(
        self, session: Session, audios: Sequence[Any] | None = None, prompt: str = "Describe the music."
    ) -> None:
        self.session = session
        self.picker = AudioPicker(session=session)
        self.generator = GeneratePanel(session)
        self.timeline: TimelinePanel | None = None
        self.tokens: TokenTable | None = None
        self._layers: LayerPanel | None = None
        self._hooks: HookPanel | None = None
        self.prompt = ipywidgets.Textarea(
            value=prompt, description="prompt", tooltip="What the model is asked", layout=ipywidgets.Layout(width="60%")
        )
        self.prepare_button = ipywidgets.Button(
            description="Prepare", button_style="primary", tooltip="Read the audio and lay out windows and tokens"
        )
        self.state = ipywidgets.HTML(_EMPTY)
        first = ipywidgets.VBox([self.picker, ipywidgets.HBox([self.prompt, self.prepare_button]), self.state])
        self._rooms = {name: ipywidgets.VBox([ipywidgets.HTML(_EMPTY)]) for name in TABS[1:-1]}
        self.tabs = ipywidgets.Tab([first, *self._rooms.values(), self.generator], titles=TABS, selected_index=0)
        super().__init__([self.tabs])
        self.generator.follow(self.picker)
        self._one_prompt = traitlets.link((self.prompt, "value"), (self.generator.prompt, "value"))
        self.on_click(self.prepare_button, self.prepare)
        self.on_change(self.tabs, "selected_index", self._opened)
        self.follow_trait(self.picker, "audios", lambda _: self._tell())
        self.on_change(self.prompt, "value", self._tell)
        if audios is not None:
            self.picker.audios = tuple(audios)
            self.prepare()

    # Work

    def prepare(self) -> bool:
        """Prepare the picker's sources and the prompt, on a thread; False, and nothing done, while one is under way."""
        request = self.picker.request(self.prompt.value)
        if not request.audios:
            raise ArgumentError(
                "no source is chosen; add a file or a demo clip in the Audio tab", code="bad_argument", source="audios"
            )
        return self.start(lambda job: self.session.prepare([request]), self._take)

    def show(self, tab: str) -> Explorer:
        """Open a tab by its name. Raises: ArgumentError naming those there are."""
        if tab not in TABS:
            raise ArgumentError(
                f"there is no tab {tab!r}; pass one of {', '.join(map(repr, TABS))}", code="bad_argument", source="tab"
            )
        self.tabs.selected_index = TABS.index(tab)
        return self

    @property
    def layers(self) -> LayerPanel | None:
        """The panel of layers for the present batch, made on first use."""
        if self._layers is None and self.batch is not None and self.timeline is not None:
            self._layers = self._placed("Layers", LayerPanel(self.session, self.batch).follow(self.timeline))
        return self._layers

    @property
    def hooks(self) -> HookPanel | None:
        """The panel of hooks for the present batch, made on first use."""
        if self._hooks is None and self.batch is not None and self.timeline is not None:
            self._hooks = self._placed("Hooks", HookPanel(self.session, self.batch).follow(self.timeline))
        return self._hooks

    def _take(self, batch: PreparedBatch) -> None:
        """Panels of a new batch in the place of those of the last."""
        self._let_go()
        self.batch = batch
        self.timeline = TimelinePanel(batch)
        self.tokens = TokenTable(batch).follow(self.timeline)
        self._rooms["Timeline"].children = [self.timeline, self.tokens]
        self._opened()
        self._tell()

    def _opened(self) -> None:
        """Make the panel of the tab that is open, if it is of those made on first use."""
        name = TABS[self.tabs.selected_index or 0]
        if name == "Layers":
            _ = self.layers
        elif name == "Hooks":
            _ = self.hooks

    def _placed(self, room: str, panel: Any) -> Any:
        self._replace(room, [panel])
        return panel

    def _replace(self, room: str, panels: list[ipywidgets.Widget]) -> None:
        """Put panels into a tab, and free what stood there."""
        old = [child for child in self._rooms[room].children if child not in panels]
        self._rooms[room].children = panels
        for child in old:
            child.close()

    def _let_go(self) -> None:
        """Close the panels of the last batch, those that follow first."""
        self._layers = self._hooks = self.tokens = self.timeline = None
        for room in reversed(self._rooms):
            self._replace(room, [ipywidgets.HTML(_EMPTY)])

    # Words

    def _tell(self) -> None:
        if self.batch is None:
            self.state.value = _EMPTY
            return
        names = ", ".join(slot.name for slot in self.batch.slots)
        now = f"Prepared: {names}; {self.batch.width} tokens. Open the other tabs."
        (made,) = self.batch.requests
        changed = tuple(self.picker.audios) != tuple(made.audios) or self.prompt.value != made.prompt
        self.state.value = now + (" Sources or prompt have changed since: press Prepare." if changed else "")

    def describe(self) -> str:
        """Every panel that is there, in words."""
        self.wait()
        lines = [f"{self.heading}: {self.session.family}, {TABS[self.tabs.selected_index or 0]} is open"]
        return "\n".join([*lines, *(panel.describe() for panel in self.panels)])

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels that have been made, in the order of the tabs."""
        every = (self.picker, self.timeline, self.tokens, self._layers, self._hooks, self.generator)
        return tuple(panel for panel in every if panel is not None)

    def static(self) -> StaticView:
        """The twins of all panels that have been made, one after the other."""
        twins = [panel.static() for panel in self.panels]
        pictures = tuple(picture for twin in twins for picture in twin.pictures)
        tables = tuple(table for twin in twins for table in twin.tables)
        return StaticView(self.describe(), pictures, tables)

    def code(self) -> str:
        """Lines that prepare the same batch, and do what each panel shows."""
        made = self.picker.request(self.prompt.value) if self.batch is None else self.batch.requests[0]
        lines = [
            "from audiollm import Request",
            f"request = Request({made.prompt!r}, {[_named(audio) for audio in made.audios]!r})",
            "batch = session.prepare([request])",
        ]
        shown = [panel for panel in self.panels if panel not in (self.picker, self.generator)]
        return "\n\n".join(["\n".join(lines), *(code for panel in shown if (code := panel.code()))])

    def close(self) -> None:
        """Close every panel, those that follow others first."""
        if self._closed:
            return
        self.cancel()
        self.wait(30)
        self._one_prompt.unlink()
        for panel in reversed(self.panels):
            panel.close()
        super().close()


def _named(audio: Any) -> Any:
    return str(audio) if not hasattr(audio, "samples") else audio


def explore(name: str = "music_flamingo") -> Explorer:
    """The Explorer on an embedded small model and two embedded clips: a first look, without a GPU or a model of one's own.

    `name`, "music_flamingo" or "moss_music". Raises: ArgumentError for another name.

    >>> from audiollm.widgets import explore
    >>> explorer = explore("moss_music")
    >>> explorer.describe().splitlines()[0]
    'Explorer: moss_music, Audio is open'
    >>> explorer.close()
    """
    clips = demo.clips()
    return Explorer(demo.load(name), [clips["mix"], clips["bass"]], "Which instruments play in these two?")
