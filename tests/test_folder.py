"""Folders of audio files, and the preview of one at its true level."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from audiollm import ArgumentError, AudioError, Waveform
from audiollm.folder import MOST_LISTED, audio_endings, look_in, preview


def test_a_folder_lists_what_soundfile_reads_by_ending(tmp_path):
    for name in ("b.WAV", "a.flac", "c.mp3", "d.txt", ".hidden.wav", "e.opus", "data.mat", "x.raw"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "sub.wav").mkdir()
    (tmp_path / ".git").mkdir()
    seen = look_in(tmp_path)
    assert [p.name for p in seen.files] == ["a.flac", "b.WAV", "c.mp3", "e.opus"]
    assert [p.name for p in seen.folders] == ["sub.wav"] and seen.left_out == 0
    assert [p.name for p in look_in(tmp_path, "*.wav").files] == ["b.WAV"]
    assert [p.name for p in look_in(tmp_path, "A.F").files] == ["a.flac"]
    assert {"wav", "aif", "flac", "ogg"} <= audio_endings()


def test_brackets_in_a_name_stand_for_themselves(tmp_path):
    (tmp_path / "take [1].wav").write_bytes(b"")
    assert len(look_in(tmp_path, "[1]").files) == 1


def test_a_huge_folder_is_cut_and_says_so(tmp_path):
    for k in range(MOST_LISTED + 3):
        (tmp_path / f"{k:05}.wav").touch()
    seen = look_in(tmp_path)
    assert len(seen.files) == MOST_LISTED and seen.left_out == 3


@pytest.mark.parametrize("folder", ["nowhere/at/all", "a.wav", None])
def test_no_folder_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.wav").touch()
    with pytest.raises(ArgumentError, match="folder"):
        look_in(folder)


def heard(wav: bytes) -> tuple[np.ndarray, int]:
    return soundfile.read(io.BytesIO(wav), dtype="int16", always_2d=True)


def test_a_preview_is_never_normalised():
    quiet = Waveform(np.full(16_000, 1e-3, np.float32), 16_000)
    samples, rate = heard(preview(quiet))
    assert rate == 16_000 and set(samples[:, 0]) == {33}
    assert set(heard(preview(Waveform(np.full(16_000, -1.5, np.float32), 16_000)))[0][:, 0]) == {-32767}, "clipped"


def test_a_preview_reads_only_its_own_seconds_and_keeps_two_channels(tmp_path):
    path = tmp_path / "long.wav"
    ramp = np.linspace(-0.5, 0.5, 8_000 * 100)
    soundfile.write(path, np.stack([ramp, -ramp], 1), 8_000, subtype="FLOAT")
    samples, rate = heard(preview(path, start_s=50.0))
    assert samples.shape == (240_000, 2) and rate == 8_000
    np.testing.assert_allclose(samples[:, 0] / 32767, ramp[400_000:640_000], atol=1 / 32767)
    assert len(heard(preview(path, start_s=99.5))[0]) == 4_000
    soundfile.write(path, np.stack([ramp] * 4, 1), 8_000)
    assert heard(preview(path, max_s=1.0))[0].shape == (8_000, 1)


@pytest.mark.parametrize(("start_s", "max_s"), [(-1, 1), (2, 1), (0, 0), (float("nan"), 1)])
def test_seconds_outside_are_refused(start_s, max_s):
    with pytest.raises(ArgumentError, match="no place in waveform"):
        preview(Waveform(np.zeros(16_000, np.float32), 16_000), start_s, max_s)


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(AudioError, match="cannot be found"):
        preview(tmp_path / "none.wav")
