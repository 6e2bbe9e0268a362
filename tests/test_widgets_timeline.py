"""The timeline panel without a browser: traits both ways, what is sent, files, words, and that closing frees all."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import soundfile
from audiollm.widgets import TimelinePanel
from audiollm.widgets.track import audio, detail, track
from hypothesis import given, settings
from hypothesis import strategies as st
from ipywidgets.widgets.widget import _instances
from looking import noise

from audiollm import ArgumentError, Request, Waveform, demo
from audiollm.mel import mel
from audiollm.plots.overview import peaks


@pytest.fixture(scope="module")
def batch():
    session = demo.load("moss_music")
    return session.prepare([Request("Compare.", [noise(70_000), noise(5_000, 1)]), Request("And", [noise(32_000, 2)])])


@pytest.fixture
def panel(batch):
    panel = TimelinePanel(batch)
    yield panel
    panel.close()


def from_browser(widget, **state) -> None:
    widget._handle_msg({"content": {"data": {"method": "update", "state": state, "buffer_paths": []}}, "buffers": []})


@pytest.mark.parametrize("family", demo.SNAPSHOTS)
def test_mel_is_what_the_model_gets_source_by_source(family):
    session = demo.load(family)
    together = session.prepare([Request("a", [noise(480_005), noise(20_000, 1)]), Request("b", [noise(9_000, 2)])])
    for number, source in enumerate((noise(480_005), noise(20_000, 1), noise(9_000, 2))):
        alone = session.prepare([Request("a", [source])])
        assert mel(together, number).shape == (128, together.timeline[number].n_frames)
        np.testing.assert_array_equal(mel(together, number), mel(alone, 0))
    with pytest.raises(ArgumentError, match="source 3 is not one of"):
        mel(together, 3)


@given(second=st.floats(0, 1), which=st.integers(0, 2))
@settings(max_examples=60)
def test_a_moment_agrees_with_the_single_clocks(batch, second, which):
    timeline = batch.timeline[which]
    moment = timeline.at(second * timeline.used_s)
    assert moment.token == timeline.time_to_token(second * timeline.used_s)
    if moment.token is not None:
        assert moment.position == timeline.token_to_position(moment.token)
        first, end = timeline.token_to_frames(moment.token)
        assert moment.frame is None or first <= moment.frame < end
        window = timeline.windows()[moment.window]
        assert window.first_token <= moment.token <= window.last_token


@given(a=st.integers(0, 53), b=st.integers(0, 53))
@settings(max_examples=40)
def test_tokens_to_seconds_and_back(batch, a, b):
    timeline = batch.timeline[0]
    first, last = sorted((a, b))
    start_s, end_s = timeline.token_to_time(first)[0], timeline.token_to_time(last)[1]
    assert timeline.tokens_within(start_s, end_s) == (first, last)


def test_a_selection_in_seconds_is_one_in_tokens_and_the_other_way(panel):
    panel.select(0, 1.0, 2.0)
    assert panel.selected_tokens == (0, 12, 24)
    assert panel.view.selection == [0, 1.0, 2.0]
    panel.select_tokens(2, 3, 10)
    assert panel.selection == (2, pytest.approx(0.24), pytest.approx(0.88))
    assert panel.selected_tokens == (2, 3, 10)
    panel.select(0, 1.001, 1.002)
    assert panel.selected_tokens == (), "no token has its centre there"
    assert panel.selection == (0, 1.001, 1.002)
    panel.clear()
    assert panel.selected_tokens == () and panel.view.selection == []


def test_what_the_browser_says_reaches_the_traits_once(panel):
    told = []
    panel.observe(lambda change: told.append((change.name, change.new)), ["source", "cursor_s", "selection"])
    from_browser(panel.view, source=1, cursor_s=0.2)
    from_browser(panel.view, selection=[1, 0.1, 0.3])
    assert told == [("source", 1), ("cursor_s", 0.2), ("selection", (1, 0.1, 0.3))]
    from_browser(panel.view, cursor_s=99.0)
    assert panel.cursor_s == panel.batch.timeline[1].used_s, "held within the source"


def test_the_cursor_stays_within_a_shorter_source(panel):
    panel.seek(4.0)
    panel.source = 1
    assert panel.cursor_s == panel.batch.timeline[1].used_s == 0.3125
    assert "source 1, 0.312 s" in panel.describe()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda p: p.seek(99), r"99 s is outside \[0, 4.375000\]"),
        (lambda p: p.seek(0, 7), "source 7 is not one of the batch's 3"),
        (lambda p: p.select(0, 1000, 2000), "did you pass milliseconds"),
        (lambda p: p.select(0, 2, 1), "0 <= start_s < end_s"),
        (lambda p: p.select_tokens(0, 50, 60), "tokens 50..60 are not in source 0, which has 55"),
        (lambda p: setattr(p, "selection", (1, 2)), r"pass \(source, start_s, end_s\)"),
        (lambda p: p.export(), "nothing is selected"),
    ],
)
def test_wrong_places_are_named(panel, act, message):
    with pytest.raises(ArgumentError, match=message):
        act(panel)
    assert panel.selection == () and panel.cursor_s == 0


def test_a_batch_without_audio_is_refused(batch):
    with pytest.raises(ArgumentError, match="no audio to show"):
        TimelinePanel(demo.load("moss_music").prepare([Request("only text")]))


def test_export_writes_what_the_model_heard_and_nothing_over(panel, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    panel.select(0, 1.0, 1.5)
    panel.export_button.click()
    (path,) = tmp_path.glob("*.wav")
    samples, rate = soundfile.read(path, dtype="float32")
    np.testing.assert_array_equal(samples, panel.batch.slots[0].waveform[16_000:24_000].numpy())
    assert rate == 16_000 and path.name in panel.message.value
    panel.export_button.click()
    assert len(list(tmp_path.glob("*.wav"))) == 2
    with pytest.raises(ArgumentError, match="exists already"):
        panel.export(path)
    panel.clear()
    panel.export_button.click()
    assert 'role="alert"' in panel.message.value and "nothing is selected" in panel.message.value


def test_slices_of_audio_are_the_samples_at_their_true_level(batch):
    heard = batch.slots[0].waveform.numpy()
    got = np.frombuffer(audio(batch, 0, 100, 1000), "<i2") / 32767
    assert np.abs(got - heard[100:1100]).max() < 1 / 32767
    assert len(np.frombuffer(audio(batch, 0, 69_990, 1000), "<i2")) == 10
    assert audio(batch, 0, 999_999, 10) == b""
    loud = demo.load("moss_music").prepare([Request("x", [Waveform(np.full(16_000, 1.5, np.float32), 16_000)])])
    assert set(np.frombuffer(audio(loud, 0, 0, 100), "<i2")) == {32767}, "clipped, not wrapped and not scaled"


def test_the_browser_gets_slices_and_finer_pictures(panel, monkeypatch):
    sent = []
    monkeypatch.setattr(panel.view, "send", lambda content, buffers=None: sent.append((content, buffers)))
    ask = panel.view._handle_custom_msg
    ask({"event": "audio", "source": 0, "first": 16_000, "count": 160}, [])
    ask({"event": "detail", "source": 0, "first": 16_001, "end": 20_000}, [])
    ask({"event": "audio", "source": 9, "first": 0, "count": 1}, [])
    ask({"event": "what"}, [])
    (slice_, drawn) = sent
    assert slice_[0] == {"event": "audio", "source": 0, "first": 16_000} and len(slice_[1][0]) == 320
    assert drawn[0]["first"] == 16_000 and drawn[0]["end"] == 20_000, "whole mel frames"
    assert len(drawn[1][1]) == 128 * drawn[0]["mel_columns"] == 128 * 25


def test_peaks_and_mel_of_a_stretch_are_those_of_the_whole(batch):
    whole, part = track(batch, 0), detail(batch, 0, 0, 70_000)
    assert part["mel"] == whole["mel"] and (part["first"], part["end"]) == (0, 437 * 160)
    low, high = np.frombuffer(whole["peaks"], "<f4").reshape(-1, 2).T
    heard = batch.slots[0].waveform.numpy()
    assert low.min() == heard.min() and high.max() == heard.max()
    assert np.frombuffer(whole["mel"], np.uint8).max() == 255


def test_ten_minutes_are_small_to_send():
    samples = np.random.default_rng(0).normal(0, 0.1, 16_000 * 600).astype(np.float32)
    batch = demo.load("moss_music").prepare([Request("x", [Waveform(samples, 16_000)])])
    panel = TimelinePanel(batch)
    assert panel.view.nbytes < 1_000_000
    assert len(peaks(samples, 4000)[0]) == 4000
    panel.close()


def test_words_picture_table_and_code(panel):
    panel.select(0, 1.0, 2.0).seek(1.5)
    text = panel.describe()
    assert "source 0 waveform 1: 4.375 s, 437 mel frames, 2 windows of 4 s, 55 tokens of 0.08 s" in text
    assert "cursor: source 0, 1.500 s, mel frame 150, window 0, token 18, prompt position" in text
    assert "selected: source 0, 1.000-2.000 s, tokens 12-24" in text
    twin = panel.static()
    assert repr(panel) == text and repr(twin) == text
    assert twin.pictures[0].png.startswith(b"\x89PNG") and twin.tables[0].rows[1][:3] == ("0", "waveform 1", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == text and "image/png" in bundle
    names = {"batch": panel.batch}
    exec(panel.code(), names)
    assert (names["first"], names["last"]) == (12, 24) and len(names["heard"]) == 16_000
    panel.code_button.click()
    assert "tokens_within" in panel.code_view.value


def test_close_frees_everything(batch):
    gc.collect()
    before = len(_instances)
    panel = TimelinePanel(batch)
    panel.select(0, 1.0, 2.0)
    gone, view = weakref.ref(panel), weakref.ref(panel.view)
    panel.close()
    panel.close()
    del panel
    gc.collect()
    assert len(_instances) == before and gone() is None and view() is None
