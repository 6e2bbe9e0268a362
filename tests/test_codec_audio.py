"""Decoded audio: shape, level, the WAV it becomes."""

from __future__ import annotations

import base64
import io
import re
import wave

import numpy as np
import pytest
from codec_cases import gguf_codes, gguf_model

from audiollm.codec import Audio
from audiollm.codec.audio import PLAYER_SECONDS, pcm16
from audiollm.errors import AudioLLMError

LOUD = [0.0, 0.5, -0.5, 1.0, -1.0, 1.7, -1.7, 1e-5, -1e-5, 0.99999]


def door_samples(values):
    """What the loom door writes: int(s * 32767) of the clipped sample."""
    return [int(max(-1.0, min(1.0, float(np.float32(v)))) * 32767.0) for v in values]


def test_samples_are_a_read_only_float32_array():
    audio = gguf_model().codes2speech.infer(gguf_codes("T5"))
    assert audio.samples.dtype == np.float32 and audio.samples.shape == (38400,)
    assert (len(audio), audio.duration, audio.sample_rate, audio.channels) == (38400, 0.4, 48000, 2)
    assert np.asarray(audio).shape == (19200, 2)
    np.testing.assert_array_equal(np.asarray(audio)[:, 1], audio.samples[1::2])
    with pytest.raises(ValueError):
        audio.samples[0] = 0
    assert np.abs(audio.samples).max() > 1  # nothing is clamped


def test_arrays_can_be_other_dtypes_and_copies():
    audio = Audio(LOUD, 48000, 2)
    assert np.asarray(audio, dtype=np.float64).dtype == np.float64
    assert np.array(audio, copy=True).flags.writeable
    assert np.asarray(Audio([0.0, 1.0], 8000)).shape == (2,)
    assert Audio(LOUD, 0).duration == 0.0


def test_a_saved_wav_is_clipped_and_truncated_as_the_door_does(tmp_path):
    Audio(LOUD, 48000, 2).save(tmp_path / "out.wav")
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (2, 2, 48000, 5)
        stored = np.frombuffer(file.readframes(5), "<i2")
    assert stored.tolist() == door_samples(LOUD)
    assert max(stored) == 32767 and min(stored) == -32767


def test_pcm_of_many_values_is_the_doors():
    values = np.random.default_rng(1).uniform(-1.2, 1.2, 10_000).astype(np.float32)
    assert pcm16(values).tolist() == door_samples(values)


@pytest.mark.parametrize(("audio", "code"), [(Audio([np.nan], 8000), "non_finite"), (Audio([0.0], 0), "bad_rate")])
def test_what_cannot_be_sound_is_not_saved(tmp_path, audio, code):
    with pytest.raises(AudioLLMError) as error:
        audio.save(tmp_path / "out.wav")
    assert error.value.code == code


def test_more_than_a_wav_can_hold_is_refused_before_writing(tmp_path):
    from audiollm.codec.audio import WavWriter

    with pytest.raises(AudioLLMError) as error:
        WavWriter(tmp_path / "out.wav", 48000, 2, expected=2**31)
    assert error.value.code == "unsupported" and not (tmp_path / "out.wav").exists()


@pytest.mark.parametrize(("samples", "channels"), [([[0.0]], 1), ([0.0, 0.0, 0.0], 2), ([0.0], 0)])
def test_samples_that_are_no_interleaved_row_are_refused(samples, channels):
    with pytest.raises(AudioLLMError):
        Audio(samples, 48000, channels)


def test_the_player_plays_at_the_level_of_the_samples():
    quiet = Audio(np.full(960, 0.01, dtype=np.float32), 48000, 2)
    page = quiet._repr_html_()
    assert page == quiet._repr_html_() and "http" not in page
    data = base64.b64decode(re.search(r"base64,([^\"]+)", page)[1])
    with wave.open(io.BytesIO(data)) as file:
        assert set(np.frombuffer(file.readframes(480), "<i2").tolist()) == {327}
    assert "0.01 of full scale" in page
    assert "clipped" in Audio([2.0, 2.0], 48000, 2)._repr_html_()
    assert "audio" not in Audio([], 48000)._repr_html_()


def test_a_long_player_holds_only_its_beginning():
    long = Audio(np.zeros((PLAYER_SECONDS + 5) * 1000, dtype=np.float32), 1000)
    page = long._repr_html_()
    assert f"first {PLAYER_SECONDS} s" in page
    assert len(page) < (PLAYER_SECONDS + 1) * 1000 * 2 * 4 / 3 + 2000
