"""What all panels share: callbacks that show their errors, long work with progress and Cancel, a static twin, close.

A panel is a box of ipywidgets around plain functions of the engine. Its state is traits, so that a cell can set them and
read `panel.describe()`; callbacks may run on another thread than the cell (JupyterLab from 4.4 on), so each holds the
panel's lock and none uses pyplot or an Output widget.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets
import traitlets

from ..errors import AudioLLMError
from .job import Job
from .skin import Skin
from .static_view import StaticView
from .tree import close_tree

# How long a cell that shows a panel waits for work that is running, so that what is stored has its result.
_FIRST_WAIT_S = 5.0

log = logging.getLogger(__name__)


class Panel(ipywidgets.VBox):
    """Base of the panels. `busy`, whether work is under way; `failure`, what went wrong last, or None.

    A subclass passes its children, wires its controls with `on_click` and `on_change`, starts long work with `start`, and
    answers `describe`, `static` and `code`. A panel that was on a page and is no more (`is_away`) ignores the panels it
    follows, so that a cell run twice does not work twice.
    """

    busy = traitlets.Bool(False)
    failure = traitlets.Instance(Exception, allow_none=True)
    heading = ""
    _closed = True  # until it is made: ipywidgets also closes what its constructor refused

    def __init__(self, children: Sequence[ipywidgets.Widget]) -> None:
        self._lock = threading.RLock()
        self._job: Job | None = None
        self._links: list[tuple[traitlets.HasTraits, Callable, Any]] = []
        self._was_shown = False
        self._closed = False
        self.skin = Skin()
        self.message = ipywidgets.HTML()
        self.progress = ipywidgets.FloatProgress(
            min=0, max=1, description="progress", layout=ipywidgets.Layout(display="none")
        )
        self.cancel_button = ipywidgets.Button(
            description="Cancel", tooltip="Stop the work that is running", layout=ipywidgets.Layout(display="none")
        )
        self.code_button = ipywidgets.Button(description="Show code", tooltip="Show the lines that do the same")
        self.code_view = ipywidgets.HTML(layout=ipywidgets.Layout(display="none"))
        title = ipywidgets.HTML(f'<span class="audiollm-heading">{escape(self.heading)}</span>')
        foot = ipywidgets.HBox([self.code_button, self.cancel_button, self.progress, self.message])
        super().__init__([title, *children, foot, self.code_view, self.skin])
        self.add_class("audiollm-panel")
        self._view_count = 0  # ask the frontend to count the places that show this
        self.on_click(self.cancel_button, self.cancel)
        self.on_click(self.code_button, self._toggle_code)
        self.on_change(self, "_view_count", self._count_views)

    # What a subclass answers

    def describe(self) -> str:
        """What the panel shows, in words, once its work has ended."""
        self.wait()
        return self.heading

    def static(self) -> StaticView:
        """The panel's twin of text, pictures and tables, which survives in a saved notebook."""
        return StaticView(self.describe())

    def code(self) -> str:
        """Python lines that do the same without the panel."""
        return ""

    # Callbacks

    def guarded(self, act: Callable[..., Any]) -> Callable[..., None]:
        """`act` with the panel's lock held and its errors shown in the panel."""

        @functools.wraps(act)
        def run(*given: Any) -> None:
            if self._closed:
                return
            with self._lock:
                try:
                    act(*given)
                except Exception as error:  # noqa: BLE001  the panel's door: ipywidgets would swallow it unseen
                    self.fail(error)

        return run

    def on_click(self, button: ipywidgets.Button, act: Callable[[], Any]) -> None:
        """Call `act()` when a button is pressed."""
        button.on_click(self.guarded(lambda _: act()))

    def on_change(self, widget: traitlets.HasTraits, name: str | Sequence[str], act: Callable[[], Any]) -> None:
        """Call `act()` when a trait of the panel's own controls changes."""
        names = [name] if isinstance(name, str) else list(name)
        widget.observe(self.guarded(lambda _: act()), names)

    def follow_trait(self, other: traitlets.HasTraits, name: str, act: Callable[[Any], Any]) -> None:
        """Call `act(value)` when a trait of another panel changes, until either is closed."""

        def changed(change: Any) -> None:
            if not self.is_away:
                act(change.new)

        handler = self.guarded(changed)
        other.observe(handler, name)
        self._links.append((other, handler, name))

    @property
    def is_away(self) -> bool:
        """Whether the panel was on a page and is on none now: the cell that showed it was run again, or cleared."""
        return self._closed or (self._was_shown and not self._view_count)

    # Words

    def say(self, text: str) -> None:
        """Show a line of state."""
        self.message.value = f'<span role="status">{escape(text)}</span>'

    def fail(self, error: Exception) -> None:
        """Show an error: the engine's own message, or for others their type as well."""
        self.failure = error
        told = str(error) if isinstance(error, AudioLLMError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, AudioLLMError):
            log.error("in a callback of %s", type(self).__name__, exc_info=error)
        self.message.value = f'<span role="alert">{escape(told)}</span>'

    # Work

    def start(self, work: Callable[[Job], Any], done: Callable[[Any], None]) -> bool:
        """Run `work(job)` on a thread, then `done(result)` under the lock. False, and nothing done, while another runs."""
        with self._lock:
            if self.busy or self._closed:
                return False
            self.failure = None
            self.busy = True
            self.progress.value = 0
            self.progress.layout.display = self.cancel_button.layout.display = ""
            self.say("working")

            def finish(result: Any) -> None:
                with self._lock:
                    self.say("done")
                    done(result)

            self._job = Job(
                work, finish, self.fail, lambda: self.say("cancelled"), self._ended, self._show_progress
            ).start()
            return True

    def cancel(self) -> None:
        """Ask the work that is running to stop; it does at its next step."""
        if self._job is not None:
            self._job.stop.set()

    def wait(self, timeout: float | None = None) -> Panel:
        """Until the work that is running has ended; an interrupt of the cell that waits cancels it. Returns the panel."""
        job = self._job
        if job is not None:
            try:
                job.wait(timeout)
            except KeyboardInterrupt:
                job.stop.set()
                raise
        return self

    def _ended(self) -> None:
        self.busy = False
        self.progress.layout.display = self.cancel_button.layout.display = "none"

    def _show_progress(self, fraction: float, text: str) -> None:
        self.progress.value = fraction
        if text:
            self.say(text)

    # Showing, and closing

    def _toggle_code(self) -> None:
        shown = self.code_view.layout.display != "none"
        self.code_view.value = "" if shown else f"<pre>{escape(self.code())}</pre>"
        self.code_view.layout.display = "none" if shown else ""
        self.code_button.description = "Show code" if shown else "Hide code"

    def _count_views(self) -> None:
        self._was_shown = self._was_shown or bool(self._view_count)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget with its twin; at once, with Cancel, where its work takes longer than a few seconds."""
        bundle = super()._repr_mimebundle_(**kwargs)  # asks for repr, which waits for the first seconds
        twin = StaticView(bundle["text/plain"]) if self.busy or self._closed else self.static()
        return {**bundle, **twin.bundle()}

    def __repr__(self) -> str:
        if self._closed:
            return f"{type(self).__name__}(closed)"
        self.wait(_FIRST_WAIT_S)
        return f"{self.heading}: work is under way" if self.busy else self.describe()

    def close(self) -> None:
        """Cancel what runs, let go of the panels it follows, and free every model of the panel."""
        if self._closed:
            return
        self.cancel()
        self.wait(30)
        self._closed = True
        for other, handler, name in self._links:
            other.unobserve(handler, name)
        self._links.clear()
        close_tree(self)
