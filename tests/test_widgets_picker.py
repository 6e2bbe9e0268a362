"""Choosing audio without a browser: files, clips, paths, uploads; order; previews at their level; tokens from the headers."""

from __future__ import annotations

import gc
import io
import os
import sys
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

import ipywidgets
import numpy as np
import pytest
import soundfile
from audiollm.widgets import AudioPicker
from audiollm.widgets import audio_picker as module
from audiollm.widgets.audio_files import entries, preview, readable_suffixes
from audiollm.widgets.skin import Skin
from ipywidgets.widgets.widget import _instances
from looking import noise

from audiollm import ArgumentError, AudioError, Request, RequestError, Waveform, audio, demo

RATE = 8_000


@pytest.fixture
def music(tmp_path):
    """A folder with three files of audio, one that only says so, a text, a hidden file and a folder."""
    for k, name in enumerate(("b.wav", "A.FLAC", "c.ogg")):
        soundfile.write(
            tmp_path / name, np.full((RATE * (k + 1), k % 2 + 1), 0.1), RATE, format=name[-3:].replace("LAC", "FLAC")
        )
    (tmp_path / "liar.wav").write_text("no audio in here")
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / ".hidden.wav").write_bytes(b"RIFF")
    (tmp_path / "inner").mkdir()
    soundfile.write(tmp_path / "inner" / "d.wav", np.zeros(RATE), RATE)
    return tmp_path


@pytest.fixture
def picker(music):
    picker = AudioPicker(music)
    yield picker
    picker.close()


def listed(picker: AudioPicker) -> list[str]:
    return [label for label, _ in picker.files.options]


def mark(picker: AudioPicker, label: str) -> None:
    picker.files.index = listed(picker).index(label)


def alert(picker: AudioPicker) -> str:
    assert 'role="alert"' in picker.message.value, picker.message.value
    return picker.message.value


def names(picker: AudioPicker) -> list[str]:
    return [Path(each).name for each in picker.audios]


def sent(*files: tuple[str, bytes]) -> tuple[dict, ...]:
    return tuple(
        {
            "name": name,
            "type": "audio/wav",
            "size": len(data),
            "content": memoryview(data),
            "last_modified": datetime(2026, 1, 1, tzinfo=UTC),
        }
        for name, data in files
    )


def wav(seconds: float = 0.5) -> bytes:
    target = io.BytesIO()
    soundfile.write(target, np.zeros(int(seconds * RATE)), RATE, format="WAV")
    return target.getvalue()


# Browsing


def test_the_endings_are_those_that_soundfile_reads(monkeypatch):
    assert {".wav", ".flac", ".mp3", ".ogg", ".opus", ".aif", ".aiff"} <= set(readable_suffixes())
    assert ".raw" not in readable_suffixes(), "a headerless file says neither rate nor channels"
    monkeypatch.setattr(soundfile, "available_formats", lambda: {"WAV": "WAV", "RAW": "RAW"})
    assert readable_suffixes() == (".bwf", ".wav", ".wave")


def test_a_folder_lists_folders_then_what_can_be_read(music, picker):
    assert listed(picker) == ["../", "inner/", "A.FLAC", "b.wav", "c.ogg", "liar.wav"]
    assert picker.files.index is None, "nothing is marked before somebody marks it"
    assert "4 audio file(s), 1 folder(s)" in picker.where.value
    picker.filter.value = " A"
    assert listed(picker) == ["../", "A.FLAC", "b.wav", "liar.wav"]
    assert entries(music, "OGG") == ((), (music / "c.ogg",))


def test_folders_open_and_files_are_added(music, picker):
    mark(picker, "inner/")
    picker.open_button.click()
    assert picker.folder == music / "inner" and listed(picker) == ["../", "d.wav"]
    mark(picker, "d.wav")
    picker.open_button.click()
    assert picker.audios == (music / "inner" / "d.wav",)
    mark(picker, "../")
    picker.open_button.click()
    assert picker.folder == music
    picker.open_button.click()
    assert "nothing is marked in the folder" in alert(picker)


def test_the_topmost_folder_has_none_above(picker):
    picker.folder = Path(music_root := Path.cwd().anchor)
    assert "../" not in listed(picker) and picker.folder == Path(music_root)


def test_refresh_sees_new_files(music, picker):
    soundfile.write(music / "new.wav", np.zeros(RATE), RATE)
    assert "new.wav" not in listed(picker)
    picker.refresh_button.click()
    assert "new.wav" in listed(picker)


def test_a_folder_of_very_many_files_is_cut_with_a_word(music, picker, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LISTED", 3)
    picker.refresh_button.click()
    assert len(listed(picker)) == 4 and "the first 3 shown: use the filter" in picker.where.value


@pytest.mark.parametrize("folder", ["nowhere", "b.wav", 3, "a\0b"])
def test_what_is_no_folder_is_refused(music, picker, folder):
    wrong = music / folder if isinstance(folder, str) else folder
    with pytest.raises(ArgumentError, match="folder"):
        picker.folder = wrong
    assert picker.folder == music
    with pytest.raises(ArgumentError, match="folder"):
        AudioPicker(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="names that are no UTF-8")
def test_names_that_are_no_text_reach_the_browser_as_question_marks(music, picker):
    os.rename(music / "b.wav", os.fsencode(music) + b"/b\xff.wav")
    picker.refresh_button.click()
    mark(picker, "b?.wav")
    picker.open_button.click()
    picker.play_button.click()
    assert picker.failure is None and "b?.wav" in picker.describe()
    for shown in (picker.describe(), picker.heard.value, picker.chosen.options[0][0], picker.code()):
        shown.encode("utf-8")
    exec(picker.code(), space := {})
    assert soundfile.info(os.fsencode(space["request"].audios[0])).frames == RATE


# Clips, paths, uploads


def test_clips_are_added(picker):
    picker.clip.value = "bass"
    picker.clip_button.click()
    assert picker.audios == (demo.clips()["bass"],)


def test_the_path_box_takes_files_and_folders_from_the_folder_or_absolute(music, picker):
    for typed in ("inner", str(music), ' "c.ogg" ', str(music / "b.wav"), "inner/d.wav"):
        picker.path.value = typed
        picker.path_button.click()
        assert picker.path.value == "" and picker.failure is None
    assert picker.folder == music and picker.audios == (music / "c.ogg", music / "b.wav", music / "inner" / "d.wav")


def test_enter_in_the_path_box_adds(picker):
    picker.path.value = "b.wav"
    picker.path._handle_custom_msg({"event": "other"}, [])
    assert not picker.audios
    picker.path._handle_custom_msg({"event": "submit"}, [])
    assert names(picker) == ["b.wav"]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (" ", "the path box is empty"),
        ("nowhere.wav", "cannot be found"),
        ("https://example.org/a.wav", "nothing is fetched here"),
        ("liar.wav", "is not in a format that can be read"),
        ("a\0b", "which is no path"),
    ],
)
def test_paths_that_cannot_be_used_are_refused_in_the_engines_words(picker, typed, told):
    picker.path.value = typed
    picker.path_button.click()
    assert told in alert(picker) and picker.audios == () and picker.path.value == typed


def test_an_error_goes_with_the_next_success(picker):
    picker.path_button.click()
    assert picker.failure is not None
    picker.clip_button.click()
    assert picker.failure is None and "alert" not in picker.message.value


def test_uploads_are_files_until_the_panel_is_closed(music):
    picker = AudioPicker(music)
    picker.upload.value = sent(
        ("one.wav", wav()), ("../../one.wav", wav(1)), (r"C:\x\...", wav()), ("n" * 300 + ".wav", wav())
    )
    assert [audio.duration_s for audio in picker.headers] == [0.5, 1, 0.5, 0.5] and picker.failure is None
    assert names(picker)[:3] == ["one.wav", "one.wav", "upload"] and picker.upload.value == (), "the bytes are let go"
    assert names(picker)[3].endswith("n.wav") and len(names(picker)[3]) == 100
    room = Path(picker._uploads.name)
    assert all(room in Path(path).parents for path in picker.audios) and not list(music.glob("one*"))
    picker.close()
    assert not room.exists()


def test_uploads_come_all_or_none(picker):
    picker.upload.value = sent(("one.wav", wav()), ("text.wav", b"no audio"))
    assert "is not in a format that can be read" in alert(picker) and picker.audios == ()
    assert picker.upload.value == () and not list(Path(picker._uploads.name).iterdir()), "nothing stays behind"


def test_the_note_about_uploads_is_always_there(picker):
    assert "10 MB" in picker.upload_note.value and "200 MB" in picker.upload_note.value
    assert "audiollm lab" in picker.upload_note.value and "path box" in picker.upload_note.value
    assert picker.upload_note.layout.display is None and ".flac" in picker.upload.accept


# The list


def test_order_is_changed_and_the_mark_goes_along(music, picker):
    picker.audios = [music / "b.wav", str(music / "c.ogg"), music / "A.FLAC"]
    assert isinstance(picker.audios, tuple) and picker.chosen.value == 0
    picker.up_button.click()
    assert names(picker) == ["b.wav", "c.ogg", "A.FLAC"], "the first stays"
    picker.down_button.click()
    picker.down_button.click()
    picker.down_button.click()
    assert names(picker) == ["c.ogg", "A.FLAC", "b.wav"] and picker.chosen.value == 2
    picker.up_button.click()
    assert names(picker) == ["c.ogg", "b.wav", "A.FLAC"] and picker.chosen.value == 1
    picker.remove_button.click()
    assert names(picker) == ["c.ogg", "A.FLAC"] and picker.chosen.value == 1
    picker.remove_button.click()
    assert picker.chosen.value == 0
    picker.remove_button.click()
    assert picker.audios == () and picker.chosen.value is None and picker.failure is None
    for button in (picker.up_button, picker.down_button, picker.remove_button, picker.play_button):
        button.click()
        assert "no source is marked" in alert(picker)


def test_the_list_tells_label_length_rate_and_channels(music, picker):
    picker.audios = [music / "A.FLAC", Waveform(np.zeros(12_000, np.float32), 16_000)]
    assert [label for label, _ in picker.chosen.options] == [
        "0 A.FLAC: 2.00 s, 8,000 Hz, 2 channels",
        "1 waveform 2: 0.75 s, 16,000 Hz, mono",
    ]
    assert picker.describe() == (
        "Audio: 2 of 5 source(s)\n  source 0 A.FLAC: 2.00 s, 8,000 Hz, 2 channels\n  source 1 waveform 2: 0.75 s, 16,000 Hz, mono"
    )
    (table,) = picker.static().tables
    assert table.rows[1] == ("1", "waveform 2", "0.75 s", "16,000 Hz", "mono", "")
    assert "<table>" in picker._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        (["liar.wav"], AudioError, "is not in a format"),
        (["b.wav", "inner"], AudioError, "is a folder"),
        ([3], RequestError, "audios\\[0\\] is a int"),
        ("b.wav", RequestError, "audios is a str"),
        (["b.wav"] * 6, RequestError, "6 sources; a request holds at most 5"),
    ],
)
def test_wrong_audios_are_refused_and_the_old_ones_stay(music, picker, wrong, error, told):
    picker.audios = [music / "b.wav"]
    if isinstance(wrong, list):
        wrong = [music / each if isinstance(each, str) else each for each in wrong]
    with pytest.raises(error, match=told):
        picker.audios = wrong
    assert names(picker) == ["b.wav"] and len(picker.headers) == len(picker.chosen.options) == 1


def test_no_more_than_max_sources(music):
    picker = AudioPicker(music, max_sources=2)
    for _ in range(3):
        picker.clip_button.click()
    assert "3 sources; this picker holds at most 2" in alert(picker) and len(picker.audios) == 2
    picker.close()
    for wrong in (0, 6, 2.0, True):
        with pytest.raises(ArgumentError, match="max_sources"):
            AudioPicker(music, max_sources=wrong)


def test_audios_are_followed(music, picker):
    seen = []
    picker.observe(lambda change: seen.append((len(change.new), len(picker.headers))), "audios")
    picker.audios = [music / "b.wav"]
    picker.add(music / "c.ogg")
    picker.remove()
    assert seen == [(1, 1), (2, 2), (1, 1)], "who follows finds the headers already there"


# Listening


def heard(data: bytes, **how) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(data), **how)


def test_a_preview_keeps_the_level_and_clips(tmp_path):
    quiet, _ = preview(Waveform(np.full(100, 0.001, np.float32), RATE))
    assert heard(quiet)[0] == pytest.approx(0.001, abs=2e-5), "never normalised"
    loud, _ = preview(Waveform(np.array([0.25, 3.0, -3.0], np.float32), RATE))
    assert heard(loud)[0] == pytest.approx([0.25, 32767 / 32768, -1.0]), "clipped, not scaled or wrapped"
    pcm = np.arange(-32768, 32768, 7).astype(np.int16)
    soundfile.write(tmp_path / "all.wav", pcm, RATE)
    same, _ = preview(tmp_path / "all.wav")
    assert np.array_equal(heard(same, dtype="int16")[0], pcm), "16-bit files come through bit by bit"
    assert soundfile.info(io.BytesIO(same)).subtype == "PCM_16"


def test_a_preview_is_the_asked_stretch_of_at_most_30_s(tmp_path):
    ramp = np.linspace(-0.9, 0.9, 100 * RATE, dtype=np.float32)
    soundfile.write(tmp_path / "ramp.wav", ramp, RATE, subtype="FLOAT")
    for source in (tmp_path / "ramp.wav", Waveform(ramp, RATE)):
        samples, length_s = heard(preview(source, 50.0)[0])[0], preview(source, 50.0)[1]
        assert length_s == 30 and samples == pytest.approx(ramp[50 * RATE : 80 * RATE], abs=2e-5)
        assert preview(source, 90)[1] == 10 and preview(source, 10, 2.5)[1] == 2.5
        for start_s in (-1, 100, float("nan")):
            with pytest.raises(ArgumentError, match="does not lie in"):
                preview(source, start_s)


def test_a_preview_keeps_two_channels_averages_more_and_stays_small(tmp_path):
    for channels, kept in ((1, 1), (2, 2), (6, 1)):
        soundfile.write(tmp_path / "x.wav", np.tile(np.arange(channels) / 10, (RATE, 1)), RATE)
        samples, rate = heard(preview(tmp_path / "x.wav")[0], always_2d=True)
        assert samples.shape == (RATE, kept) and rate == RATE
    assert samples == pytest.approx(0.25, abs=1e-4)
    wide = Waveform(np.zeros(768_000 * 20, np.float32), 768_000)
    data, length_s = preview(wide)
    assert len(data) < 12.1 * 2**20 and 8 < length_s < 9


def test_a_preview_of_what_is_broken_says_so(tmp_path):
    bad = np.zeros(RATE, np.float32)
    bad[10] = np.nan
    soundfile.write(tmp_path / "nan.wav", bad, RATE, subtype="FLOAT")
    with pytest.raises(AudioError, match="NaN") as told:
        preview(tmp_path / "nan.wav")
    assert told.value.code == "non_finite"
    soundfile.write(tmp_path / "cut.flac", np.random.default_rng(0).normal(0, 0.1, RATE * 20), RATE)
    whole = (tmp_path / "cut.flac").read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[: len(whole) // 4])
    with pytest.raises(AudioError) as told:
        preview(tmp_path / "cut.flac", 15.0)
    assert told.value.code == "corrupt"


def test_play_shows_what_plays_until_it_is_removed(music, picker):
    picker.audios = [music / "b.wav", music / "A.FLAC"]
    assert picker.player.layout.display == "none"
    picker.chosen.value, picker.start_s.value = 1, 0.5
    picker.play_button.click()
    assert picker.player.layout.display == "" and "A.FLAC, 0.50-2.00 s" in picker.heard.value
    assert heard(picker.player.value)[0] == pytest.approx(0.1, abs=1e-4)
    picker.add(music / "c.ogg")
    assert picker.player.value, "it goes on while others are added"
    picker.start_s.value = 99
    picker.chosen.value = 1
    picker.play_button.click()
    assert "second 99 does not lie in A.FLAC" in alert(picker)
    picker.remove_button.click()
    assert picker.player.value == b"" and picker.player.layout.display == "none" and picker.heard.value == ""


# Paths, not bytes; tokens


def test_an_hour_opens_at_once_from_its_header(tmp_path, session_moss, monkeypatch):
    path = tmp_path / "hour.wav"
    with soundfile.SoundFile(path, "w", 44_100, 2, "PCM_16") as file:
        for _ in range(60):
            file.write(np.zeros((60 * 44_100, 2), np.int16))

    def no_reading(*_, **__):
        raise AssertionError("samples were read")

    for name in ("read", "buffer_read", "blocks"):
        monkeypatch.setattr(soundfile.SoundFile, name, no_reading)
    monkeypatch.setattr(audio, "_blocks", no_reading)
    picker = AudioPicker(tmp_path, session=session_moss)
    started = time.process_time()
    picker.audios = [path]
    assert time.process_time() - started < 1
    assert picker.headers[0].duration_s == 3600 and picker.count.sources == (45_000,)
    picker.close()


def test_tokens_are_those_that_prepare_makes(session, music):
    picker = AudioPicker(music, session=session)
    assert picker.count is None
    picker.audios = [music / "b.wav", noise(70_000), demo.clips()["bass"]]
    batch = session.prepare([picker.request("")])
    assert picker.count.sources == tuple(timeline.n_tokens for timeline in batch.timeline)
    assert picker.count.prompt == batch.width and picker.count.left == session.context - batch.width
    assert f"{picker.count.left:,} of the context's {session.context:,} left" in picker.describe()
    assert f"{picker.count.left:,} of the context&#x27;s" in picker.told.value
    tokens = [f"{n:,} tokens" for n in picker.count.sources]
    assert [row[-1] for row in picker.static().tables[0].rows] == tokens
    assert all(label.endswith(told) for (label, _), told in zip(picker.chosen.options, tokens, strict=True))
    picker.audios = ()
    assert picker.count is None
    picker.close()


def test_what_is_too_long_for_the_context_is_said_not_refused(music, session_moss, monkeypatch):
    monkeypatch.setattr(session_moss._adapter, "context", 20)
    picker = AudioPicker(music, session=session_moss)
    picker.clip_button.click()
    assert len(picker.audios) == 1
    assert f"too long by {picker.count.prompt - 20:,}: the context holds 20" in picker.describe()
    picker.close()


def test_a_rate_that_the_model_cannot_take_is_refused(tmp_path, session_moss):
    soundfile.write(tmp_path / "odd.wav", np.zeros(50_000), 47_989)
    picker = AudioPicker(tmp_path, session=session_moss)
    with pytest.raises(AudioError, match="filter would have"):
        picker.audios = [tmp_path / "odd.wav"]
    assert picker.audios == ()
    picker.close()


def test_another_thing_than_a_session_is_refused(music):
    with pytest.raises(ArgumentError, match="session is a str"):
        AudioPicker(music, session="moss_music")


# Request, code, closing


def test_the_request_is_the_engines(music, picker):
    assert picker.request("Only text.").audios == ()
    picker.audios = [music / "b.wav", str(music / "c.ogg")]
    request = picker.request("<audio> or <audio>?")
    assert request.audios == picker.audios and request.prompt == "<audio> or <audio>?"
    with pytest.raises(RequestError, match="1 <audio> marker"):
        picker.request("<audio>?")


def test_the_code_runs_and_makes_the_same(music, session_moss):
    picker = AudioPicker(music, session=session_moss)
    picker.audios = [music / "b.wav", noise(16_000)]
    exec(picker.code(), space := {"picker": picker, "session": session_moss})
    request = space["request"]
    assert isinstance(request, Request) and request.audios == (str(music / "b.wav"), picker.audios[1])
    assert session_moss.count_tokens(request).sources == picker.count.sources
    picker.close()


def test_every_control_has_a_name(picker):
    unnamed = (ipywidgets.HTML, ipywidgets.Box, ipywidgets.Audio, Skin)  # the line above the player says what it plays
    for widget in vars(picker).values():
        if isinstance(widget, ipywidgets.DOMWidget) and not isinstance(widget, unnamed):
            assert getattr(widget, "description", "") or widget.tooltip, widget


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_close_frees_everything_also_after_a_refusal(music, session_moss):
    gc.collect()
    before = len(_instances)
    for wrong in ({"folder": music / "nowhere"}, {"max_sources": 9}, {"session": 3}):
        with pytest.raises(ArgumentError):
            AudioPicker(**wrong)
    gc.collect()
    assert len(_instances) == before
    picker = AudioPicker(music, session=session_moss)
    picker.clip_button.click()
    picker.play_button.click()
    picker.upload.value = sent(("one.wav", wav()))
    gone = weakref.ref(picker)
    picker.close()
    picker.close()
    picker.clip_button.click()
    assert repr(picker) == "AudioPicker(closed)" and len(picker.audios) == 2
    del picker
    gc.collect()
    assert len(_instances) == before and gone() is None
