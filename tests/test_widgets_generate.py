"""The panel that asks: text streams in, stop keeps it, the budget and the seed count, errors are shown, nothing stays."""

from __future__ import annotations

import itertools
import threading

import pytest
from audiollm.widgets import GeneratePanel
from audiollm.widgets.panel import Panel
from ipywidgets.widgets.widget import _instances
from looking import hooks, noise

from audiollm import ArgumentError, AudioError, Request, RequestError


@pytest.fixture
def panel(session):
    panel = GeneratePanel(session)
    panel.prompt.value = "what is this"
    panel.audios = (noise(8_000),)
    panel.budget.value = 12
    yield panel
    panel.close()


@pytest.fixture
def paused(monkeypatch, session):
    """A gate that the generation waits at after its second token; `paused.gate.set()` lets it go on."""

    class Paused:
        gate, reached = threading.Event(), threading.Event()

    real = session.generations

    def generations(requests, on_text=None, stop=None, **given):
        asked = 0

        def held() -> bool:
            nonlocal asked
            asked += 1
            if asked == 2:
                Paused.reached.set()
                assert Paused.gate.wait(30)
            return stop()

        return real(requests, on_text=on_text, stop=held, **given)

    monkeypatch.setattr(session, "generations", generations)
    Paused.gate.clear()
    Paused.reached.clear()
    yield Paused
    Paused.gate.set()


def test_it_answers_as_the_engine_does(panel, session):
    panel.generate_button.click()
    panel.wait()
    (wanted,) = session.generations([Request("what is this", [noise(8_000)])], max_new_tokens=12)
    assert panel.answer == wanted and panel.text == wanted.text
    assert repr(wanted.text) in panel.describe() and "the budget ended it" in panel.describe()


def test_text_streams_in(panel, monkeypatch):
    monkeypatch.setattr("audiollm.widgets.generate_panel._EVERY_S", 0.0)
    seen: list[str] = []
    panel.observe(lambda change: seen.append(change.new), "text")
    panel.run()
    panel.wait()
    grown = [text for text in seen if text]
    assert len(grown) > 3 and all(later.startswith(sooner) for sooner, later in itertools.pairwise(grown))
    assert panel.shown.value.startswith('<pre role="log" aria-label="answer">')


@pytest.mark.parametrize("way", ["stop_button", "cancel_button"])
def test_a_stop_keeps_what_was_said(panel, paused, way):
    panel.run()
    assert paused.reached.wait(30) and panel.busy
    assert panel.generate_button.disabled and not panel.stop_button.disabled
    assert not panel.run(), "a second click while an answer is coming does nothing"
    getattr(panel, way).click()
    paused.gate.set()
    panel.wait()
    assert panel.answer.finish_reason == "stopped" and len(panel.answer.token_ids) == 2
    assert panel.text == panel.answer.text and "it was stopped" in panel.describe()
    assert panel.stop_button.disabled and not panel.generate_button.disabled
    panel.run()
    panel.wait()
    assert panel.answer.finish_reason == "length", "the last stop does not stop the next answer"


def test_an_interrupt_of_the_waiting_cell_ends_it(panel, paused, monkeypatch, session):
    before = hooks(session)
    panel.run()
    assert paused.reached.wait(30)
    job = panel._job
    monkeypatch.setattr(job, "wait", lambda timeout=None: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        panel.wait()
    paused.gate.set()
    job._thread.join(30)
    assert not panel.busy and panel.answer is None and hooks(session) == before


def test_the_seed_counts_where_the_profile_samples(panel, session):
    assert panel.seed.disabled and "seed" not in panel.code()
    panel.profile.value = "generic_sampled"
    assert not panel.seed.disabled
    texts = []
    for seed in (1, 2, 1):
        panel.seed.value = seed
        panel.run()
        panel.wait()
        texts.append(panel.text)
    assert texts[0] == texts[2] != texts[1]


def test_what_is_left_of_the_context_is_told(panel, session):
    count = session.count_tokens(Request("what is this", [noise(8_000)]))
    assert f"{count.prompt:,} of {count.context:,}" in panel.left.value and f"{count.left:,} left" in panel.left.value
    panel.prompt.value, panel.audios = "", ()
    assert panel.left.value == "Write a prompt."


def test_code_asks_the_same(panel, session):
    panel.run()
    panel.wait()
    names = {"session": session, "panel": panel}
    exec(panel.code(), names)
    assert names["answer"] == panel.answer


def test_errors_are_shown_in_the_engine_s_words(panel, tmp_path):
    panel.prompt.value, panel.audios = " ", ()
    panel.generate_button.click()
    assert isinstance(panel.failure, RequestError) and 'role="alert"' in panel.message.value
    panel.prompt.value, panel.audios = "x", (tmp_path / "none.wav",)
    assert isinstance(panel.failure, AudioError) and "none.wav" in panel.message.value, "told before anything runs"
    with pytest.raises(RequestError):
        panel.audios = tuple(noise(8_000) for _ in range(6))
    assert not panel.busy


def test_it_follows_a_picker(session):
    import traitlets

    class Picker(traitlets.HasTraits):
        audios = traitlets.Tuple()

    picker = Picker(audios=(noise(100),))
    panel = GeneratePanel(session).follow(picker)
    assert len(panel.audios) == 1
    picker.audios = (noise(100), noise(200))
    assert len(panel.audios) == 2
    panel.close()
    picker.audios = ()
    assert len(panel.audios) == 2, "a closed panel follows nothing"


def test_closing_frees_every_model_and_stops_the_answer(session, paused):
    before = set(_instances)
    panel = GeneratePanel(session)
    panel.prompt.value, panel.budget.value = "hello", 12
    panel.run()
    assert paused.reached.wait(30)
    threading.Timer(0.2, paused.gate.set).start()
    panel.close()
    assert set(_instances) == before and not panel.busy
    assert isinstance(panel, Panel) and repr(panel) == "GeneratePanel(closed)"


def test_the_twin_has_the_settings(panel):
    assert panel.static().tables == () and "nothing was asked yet" in panel.describe()
    panel.run()
    panel.wait()
    (table,) = panel.static().tables
    assert ("max_new_tokens", "12") in table.rows


def test_the_constructor_takes_a_session_only():
    with pytest.raises((ArgumentError, AttributeError)):
        GeneratePanel(None)
