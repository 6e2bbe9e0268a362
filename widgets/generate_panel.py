"""Asking: a prompt and sources, a profile and a budget; the answer streams in and can be stopped."""

from __future__ import annotations

import threading
import time
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from ..generation import SEED, Generation
from ..request import Request
from .job import Job
from .panel import Panel
from .static_view import StaticView, Table

if TYPE_CHECKING:
    from ..session import Session

ENDED = {"stop": "the model ended it", "length": "the budget ended it", "stopped": "it was stopped"}
_EVERY_S = 0.1  # how often text that streams in is sent to the browser


class GeneratePanel(Panel):
    """Answers of a model, as they come. Made as `GeneratePanel(session)`.

    `audios`, paths or Waveforms in order, set from a cell or taken from an AudioPicker by `follow`; `prompt`, `profile`,
    `budget` and `seed` are controls whose `value` may be set. `text` is what has come so far, `answer` the last Generation or
    None. A stop keeps what was said. The seed counts only where the profile samples.
    """

    heading = "Generate"
    audios = traitlets.Tuple()
    text = traitlets.Unicode("")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.answer: Generation | None = None
        self._request: Request | None = None
        self._stop = threading.Event()
        wide = ipywidgets.Layout(width="60%")
        self.prompt = ipywidgets.Textarea(
            description="prompt", tooltip="What the model is asked", continuous_update=False, layout=wide
        )
        self.profile = ipywidgets.Dropdown(description="profile", options=list(session._adapter.profiles))
        self.budget = ipywidgets.BoundedIntText(
            256, 1, 16_384, description="budget", tooltip="The most new tokens an answer may have"
        )
        self.seed = ipywidgets.BoundedIntText(SEED, 0, 2**53, description="seed", tooltip="Seed of the sampling")
        self.left = ipywidgets.HTML()
        self.generate_button = ipywidgets.Button(
            description="Generate", button_style="primary", tooltip="Ask, and show the answer as it comes"
        )
        self.stop_button = ipywidgets.Button(description="Stop", tooltip="Stop, and keep what was said", disabled=True)
        self.shown = ipywidgets.HTML()
        self.settings = ipywidgets.HTML()
        for note in (self.left, self.settings):
            note.add_class("audiollm-note")
        super().__init__(
            [
                self.prompt,
                ipywidgets.HBox([self.profile, self.budget, self.seed], layout=ipywidgets.Layout(flex_flow="row wrap")),
                self.left,
                ipywidgets.HBox([self.generate_button, self.stop_button]),
                self.shown,
                self.settings,
            ]
        )
        self.on_click(self.generate_button, self.run)
        self.on_click(self.stop_button, self.stop)
        self.on_change(self, "audios", self._count)
        for control in (self.prompt, self.profile, self.budget):
            self.on_change(control, "value", self._count)
        self.on_change(self, "text", self._show)
        self.on_change(self, "busy", self._show_busy)
        self._count()
        self._show()

    def follow(self, picker: Any) -> GeneratePanel:
        """Take the sources of an AudioPicker, now and whenever they change. Returns the panel."""
        self.follow_trait(picker, "audios", lambda value: self.set_trait("audios", tuple(value)))
        self.audios = tuple(picker.audios)
        return self

    @traitlets.validate("audios")
    def _check_audios(self, proposal: Any) -> tuple:
        return Request("?", list(proposal.value)).audios

    # Asking

    def request(self) -> Request:
        """What would be asked now. Raises: RequestError for an empty prompt without sources."""
        return Request(self.prompt.value, list(self.audios))

    def run(self) -> bool:
        """Ask, on a thread; False, and nothing done, while an answer is coming."""
        if self.busy:
            return False
        request, settings = self.request(), self._arguments()
        room = self.session.count_tokens(request).left
        settings["max_new_tokens"] = min(settings["max_new_tokens"], room) if room > 0 else settings["max_new_tokens"]
        self._request, self.answer, self.text = request, None, ""
        self._stop.clear()

        def work(job: Job) -> Generation:
            stream = _Stream(self)
            (answer,) = self.session.generations(
                [request], on_text=stream, stop=lambda: self._stop.is_set() or job.stop.is_set(), **settings
            )
            return answer

        return self.start(work, self._take)

    def stop(self) -> None:
        """Stop after the token that is under way; what was said stays."""
        self._stop.set()

    def cancel(self) -> None:
        """As `stop`."""
        self.stop()

    def _arguments(self) -> dict[str, Any]:
        given = {"profile": self.profile.value, "max_new_tokens": self.budget.value}
        return given | ({"seed": self.seed.value} if self._samples else {})

    @property
    def _samples(self) -> bool:
        return self.session._adapter.profiles[self.profile.value].sampling is not None

    def _take(self, answer: Generation) -> None:
        self.answer, self.text = answer, answer.text
        self.say(f"{len(answer.token_ids)} tokens; {ENDED[answer.finish_reason]}")
        self._show()

    # Showing

    def _show_busy(self) -> None:
        self.generate_button.disabled = self.busy
        self.stop_button.disabled = not self.busy

    def _count(self) -> None:
        """What is left of the context, from the headers of the sources."""
        self.seed.disabled = not self._samples
        if not self.prompt.value.strip() and not self.audios:
            self.left.value = "Write a prompt."
            return
        count = self.session.count_tokens(self.request())
        told = f"prompt {count.prompt:,} of {count.context:,} tokens, {max(count.left, 0):,} left for the answer"
        short = count.left < self.budget.value
        self.left.value = told + ("; that is less than the budget" if short else "")

    def _show(self) -> None:
        self.shown.value = f'<pre role="log" aria-label="answer">{escape(self.text)}</pre>'
        self.settings.value = "" if self.answer is None else escape(self._settings_words())

    def _settings_words(self) -> str:
        settings = {} if self.answer is None else self.answer.settings
        return ", ".join(f"{name} {value}" for name, value in sorted(settings.items()))

    def describe(self) -> str:
        """The prompt, the sources and the last answer with why it ended, once it has."""
        self.wait()
        lines = [f"{self.heading}: profile {self.profile.value}, at most {self.budget.value} new tokens"]
        if self._request is None:
            return f"{lines[0]}; nothing was asked yet"
        lines.append(f"  asked: {self._request.prompt!r} of {len(self._request.audios)} source(s)")
        if self.answer is None:
            lines.append(f"  no whole answer; so far {self.text!r}")
        else:
            lines.append(f"  answer: {self.answer.text!r}, {len(self.answer.token_ids)} tokens")
            lines.append(f"  ended: {ENDED[self.answer.finish_reason]}; {self._settings_words()}")
        return "\n".join(lines)

    def static(self) -> StaticView:
        """The answer in words, and the settings that made it as a table."""
        words = self.describe()
        if self.answer is None:
            return StaticView(words)
        rows = tuple((name, str(value)) for name, value in sorted(self.answer.settings.items()))
        return StaticView(words, (), (Table("Settings", ("setting", "value"), rows),))

    def code(self) -> str:
        """Lines that ask the same of `session`; sources in memory are `panel.audios`."""
        audios = [
            f"panel.audios[{k}]" if hasattr(audio, "samples") else repr(str(audio))
            for k, audio in enumerate(self.audios)
        ]
        asked = "".join(f", {name}={value!r}" for name, value in self._arguments().items())
        return "\n".join(
            [
                "from audiollm import Request",
                f"request = Request({self.prompt.value!r}, [{', '.join(audios)}])",
                f"(answer,) = session.generations([request]{asked})",
                "answer.text, answer.finish_reason",
            ]
        )


class _Stream:
    """Takes text as it comes, and shows it a few times a second."""

    def __init__(self, panel: GeneratePanel) -> None:
        self.panel, self.said, self.sent_s = panel, "", 0.0

    def __call__(self, number: int, text: str) -> None:
        self.said += text
        now = time.monotonic()
        if now - self.sent_s >= _EVERY_S:
            self.sent_s = now
            self.panel.text = self.said
