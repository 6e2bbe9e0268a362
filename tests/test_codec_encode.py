"""From a recording to codes: rates, channels, lengths."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
import torch
from codec_cases import DATA, gguf_model, snapshot_model

from audiollm import Waveform, codec
from audiollm.codec.clip import load_clip
from audiollm.errors import ArgumentError, AudioError

WAV = np.load(DATA / "cases" / "encode_wav.npy").T  # [6240, 2] at 4800 Hz
CODES = np.load(DATA / "cases" / "encode_codes.npy")


@pytest.fixture(scope="module")
def model() -> codec.Model:
    return snapshot_model("tiny")


def test_every_form_of_a_clip_gives_the_same_codes(model, tmp_path):
    soundfile.write(tmp_path / "clip.wav", WAV, 4800, subtype="FLOAT")
    for clip, rate in (
        (tmp_path / "clip.wav", None),
        (str(tmp_path / "clip.wav"), None),
        (codec.Audio(WAV.reshape(-1), 4800, 2), None),
        (WAV, 4800),
        (WAV.astype(np.float64), 4800.0),
        (torch.from_numpy(WAV.copy()), 4800),
        (np.asfortranarray(WAV), 4800),
    ):
        np.testing.assert_array_equal(model.speech2codes.infer(clip, sample_rate=rate), CODES)


def test_one_channel_is_duplicated(model):
    mono = WAV[:, 0]
    both = model.speech2codes.infer(np.stack([mono, mono], axis=1), sample_rate=4800)
    for clip, rate in ((mono, 4800), (mono[:, None], 4800), (Waveform(mono, 4800), None)):
        np.testing.assert_array_equal(model.speech2codes.infer(clip, sample_rate=rate), both)


def test_more_channels_are_refused_with_the_cure(model, tmp_path):
    soundfile.write(tmp_path / "six.wav", np.zeros((4800, 6)), 4800)
    for clip, rate in ((tmp_path / "six.wav", None), (np.zeros((2, 4800)), 4800)):
        with pytest.raises(AudioError, match="fold them down") as error:
            model.speech2codes.infer(clip, sample_rate=rate)
        assert error.value.code == "unsupported"


@pytest.mark.parametrize("rate", [1000, 4000, 4800, 11025, 44100, 48000])
def test_any_rate_becomes_the_codecs(rate):
    """A tone keeps its pitch and level, and each channel its side."""
    seconds = np.arange(rate) / rate
    stereo = np.stack([0.5 * np.sin(2 * np.pi * 100 * seconds), np.zeros(rate)], axis=1)
    samples = load_clip(stereo, 4800, 2, rate).reshape(-1, 2)
    assert len(samples) == 4800 and samples.dtype == np.float32
    spectrum = np.abs(np.fft.rfft(samples[:, 0] * np.hanning(4800)))
    assert spectrum.argmax() == 100
    assert abs(np.abs(samples[480:-480, 0]).max() - 0.5) < 0.02 and np.abs(samples[:, 1]).max() == 0


@pytest.mark.parametrize(("samples", "frames"), [(384, 1), (767, 1), (768, 2), (6240, 16)])
def test_the_length_is_the_published_one(model, samples, frames):
    assert model.speech2codes.infer(WAV[:samples], sample_rate=4800).shape == (frames, 32)


@pytest.mark.parametrize(
    ("clip", "rate", "code"),
    [
        (WAV[:383], 4800, "too_short"),
        (np.full((4800, 2), np.nan), 4800, "non_finite"),
        (np.zeros((0, 2)), 4800, "bad_shape"),
        (np.zeros((2, 4800, 2)), 4800, "bad_shape"),
        (np.zeros((4800, 2), dtype=np.int16), 4800, "bad_dtype"),
        (WAV, 0, "bad_rate"),
        (WAV, 44099, "bad_rate"),
        ("nowhere.wav", None, "not_found"),
        (WAV, None, "bad_argument"),
        ([0.0] * 4800, 4800, "bad_argument"),
        (7, None, "bad_argument"),
    ],
)
def test_a_clip_that_cannot_be_heard_is_refused(model, clip, rate, code):
    with pytest.raises((AudioError, ArgumentError)) as error:
        model.speech2codes.infer(clip, sample_rate=rate)
    assert error.value.code == code


def test_a_file_that_is_no_sound_is_refused(model, tmp_path):
    (tmp_path / "page.wav").write_text("<html>")
    with pytest.raises(AudioError):
        model.speech2codes.infer(tmp_path / "page.wav")


def test_a_gguf_names_the_model_that_encodes():
    with pytest.raises(codec.UnsupportedTask, match="snapshot folder"):
        gguf_model().speech2codes.infer(WAV, sample_rate=48000)
    with pytest.raises(codec.CodecError):
        gguf_model().encoder  # noqa: B018


def test_unknown_keywords_are_refused(model):
    with pytest.raises(codec.KeywordError, match="did you mean sample_rate"):
        model.speech2codes.infer(WAV, samplerate=4800)
