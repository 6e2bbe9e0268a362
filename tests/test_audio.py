"""decode: golden values, the cap, blocks, and files that are cut, damaged or lie."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy.signal import resample_poly

import audiollm.audio
from audiollm import AudioError, Request, RequestError, Session, Waveform
from audiollm.audio import MAX_FILTER_TAPS, decode, read_header, resample_ratio, resampled_length

GOLDEN = Path(__file__).parent / "data" / "music_flamingo" / "cases" / "decode"
RESULTS = json.loads((GOLDEN.parent / "decode.json").read_text())["files"]
NOISE = np.random.default_rng(7).uniform(-0.5, 0.5, 60_000)


@pytest.fixture
def written(tmp_path: Path):
    """`written(name, samples, rate, **how)`: a sound file for this test."""

    def write(name: str, samples: np.ndarray, rate: int = 16_000, **how: str) -> Path:
        soundfile.write(tmp_path / name, samples, rate, **how)
        return tmp_path / name

    return write


def whole_way(path: Path, rate: int) -> np.ndarray:
    """The contract, written once more in one line each."""
    native, native_rate = soundfile.read(path, dtype="float32", always_2d=True)
    common = math.gcd(rate, native_rate)
    return resample_poly(native.mean(axis=1), rate // common, native_rate // common)


@pytest.mark.parametrize("name", RESULTS)
def test_golden_files(name: str) -> None:
    wanted, golden = RESULTS[name], load_file(GOLDEN / f"{name}.safetensors")
    decoded = decode(GOLDEN / name, 16_000)
    assert decoded.header.sample_rate == wanted["sr"]
    assert decoded.header.frames == wanted["n_in"]
    assert decoded.samples.dtype == np.float32
    assert decoded.samples.shape == (wanted["n_out"],)
    assert np.abs(decoded.samples - golden["expected_16k"]).max() <= 1e-6
    assert np.array_equal(decoded.samples, whole_way(GOLDEN / name, 16_000))


def test_nothing_is_clipped_normalised_or_centred(written) -> None:
    loud = np.stack([NOISE * 7 + 3, NOISE * 7 + 3], axis=1).astype(np.float32)
    samples = decode(written("loud.wav", loud, subtype="FLOAT"), 16_000).samples
    assert np.array_equal(samples, loud[:, 0])


def test_channels_are_averaged_with_equal_weights(written) -> None:
    channels = np.tile(np.arange(6, dtype=np.float32) / 10, (5000, 1))
    samples = decode(written("six.wav", channels, subtype="FLOAT"), 16_000).samples
    assert np.allclose(samples, 0.25, atol=1e-7)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_loud_channels_whose_sum_overflows_are_not_heard_as_infinity(written, session_mf: Session) -> None:
    path = written("huge.wav", np.full((4000, 2), 3e38, dtype=np.float32), subtype="FLOAT")
    check_finite_or_refused(session_mf, path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_samples_whose_mel_overflows_are_refused(session_mf: Session) -> None:
    check_finite_or_refused(session_mf, Waveform(NOISE * 1e25, 16_000))


def check_finite_or_refused(session: Session, audio: Path | Waveform) -> None:
    try:
        batch = session.prepare([Request("hi", [audio])])
    except AudioError as error:
        assert error.code == "non_finite"
    else:
        assert bool(torch.isfinite(batch.slots[0].waveform).all())
        assert bool(torch.isfinite(batch.inputs["input_features"]).all())


@pytest.mark.parametrize("block", [301, 4096])
@pytest.mark.parametrize("name", [*RESULTS])
def test_block_reading_equals_whole_reading(name: str, block: int, monkeypatch) -> None:
    whole = decode(GOLDEN / name, 16_000).samples
    monkeypatch.setattr(audiollm.audio, "_BLOCK_SAMPLES", block)
    assert np.array_equal(decode(GOLDEN / name, 16_000).samples, whole)


@pytest.mark.parametrize("name", ["a.mp3", "a.ogg", "a.flac"])
def test_block_reading_of_compressed_files_equals_whole_reading(name: str, written, monkeypatch) -> None:
    path = written(name, NOISE, 48_000)
    monkeypatch.setattr(audiollm.audio, "_BLOCK_SAMPLES", 5_000)
    samples, wanted = decode(path, 16_000).samples, whole_way(path, 16_000)
    assert samples.shape == wanted.shape
    assert np.abs(samples - wanted).max() <= 1e-6  # the MP3 decoder rounds by where its buffer lies


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("cap_s", [0.1, 0.25, 0.333])
def test_a_cut_equals_resampling_the_whole_and_cutting(rate: int, cap_s: float, written) -> None:
    path = written("long.wav", np.stack([NOISE, NOISE[::-1]], axis=1), rate, subtype="FLOAT")
    wanted = whole_way(path, 16_000)[: round(cap_s * 16_000)]
    with pytest.warns(UserWarning, match=r"long\.wav"):
        assert np.array_equal(decode(path, 16_000, cap_s).samples, wanted)
    with pytest.warns(UserWarning, match="waveform"):
        mono = Waveform(soundfile.read(path, dtype="float32", always_2d=True)[0].mean(axis=1), rate)
        assert np.array_equal(decode(mono, 16_000, cap_s).samples, wanted)


@pytest.mark.filterwarnings("error")
def test_a_source_as_long_as_the_cap_is_not_cut(written) -> None:
    decoded = decode(written("full.wav", NOISE[:16_000]), 16_000, max_s=1.0)
    assert decoded.used_s == decoded.duration_s == 1.0


def test_a_cut_names_the_file_and_both_lengths(written) -> None:
    with pytest.warns(UserWarning, match=r"long\.wav: 3\.75 s .* first 1\.5 s"):
        decoded = decode(written("long.wav", NOISE), 16_000, max_s=1.5)
    assert (decoded.duration_s, decoded.used_s) == (3.75, 1.5)


def test_a_slot_records_both_lengths_and_the_cap_comes_from_the_processor(
    session_mf: Session, written, monkeypatch
) -> None:
    assert session_mf._adapter.max_s == session_mf.processor.max_audio_len == 1_200
    monkeypatch.setattr(session_mf._adapter, "max_s", 2.0)
    with pytest.warns(UserWarning, match=r"long\.wav"):
        batch = session_mf.prepare([Request("hi", [written("long.wav", NOISE)])])
    slot = batch.slots[0]
    assert (slot.duration_s, slot.used_s, len(slot.waveform)) == (3.75, 2.0, 32_000)
    assert len(slot.token_positions) == 50
    assert "2.000 s of 3.750 s" in repr(slot)


def test_only_the_part_before_the_cap_is_read(written, monkeypatch) -> None:
    path, read = written("long.flac", np.zeros(2_000_000)), []
    read_frames = soundfile.SoundFile.read

    def counting(self, frames=-1, **how):
        block = read_frames(self, frames, **how)
        read.append(len(block))
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", counting)
    with pytest.warns(UserWarning):
        decoded = decode(path, 16_000, max_s=1.0)
    assert sum(read) < 17_000
    assert decoded.duration_s == 125.0


def test_a_damaged_end_past_the_cap_does_no_harm(written) -> None:
    path = written("long.wav", np.r_[np.zeros(50_000), np.full(9_000, np.nan)], subtype="FLOAT")
    with pytest.warns(UserWarning, match="first 1 s"):
        assert decode(path, 16_000, max_s=1.0).used_s == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_long_file_costs_its_cap_in_memory(written) -> None:
    """Five minutes in 8 channels are 77 MB decoded; a cap of 10 s needs a few blocks."""
    path = written("long.flac", np.zeros((300 * 8_000, 8), dtype=np.int16), 8_000)
    code = (
        "import resource, sys, warnings; warnings.simplefilter('ignore'); from audiollm.audio import decode;"
        "import soundfile, scipy.signal; decode(sys.argv[1], 16000, 0.1);"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; decode(sys.argv[1], 16000, 10.0);"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=60)


@pytest.mark.parametrize(("frame", "channel"), [(0, 1), (5_000, 0), (59_999, 1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_sample_of_a_file_is_named_by_its_native_frame(frame, channel, bad, written, monkeypatch) -> None:
    monkeypatch.setattr(audiollm.audio, "_BLOCK_SAMPLES", 4_096)
    samples = np.stack([NOISE, NOISE], axis=1)
    samples[frame, channel] = bad
    with pytest.raises(AudioError, match=rf"bad\.wav holds (nan|inf) at frame {frame}, channel {channel}") as caught:
        decode(written("bad.wav", samples, 44_100, subtype="FLOAT"), 16_000)
    assert caught.value.code == "non_finite"


def test_non_finite_samples_that_cancel_are_still_refused(written) -> None:
    samples = np.stack([NOISE, NOISE], axis=1)
    samples[9] = (np.inf, -np.inf)
    with pytest.raises(AudioError, match="frame 9"):
        decode(written("bad.wav", samples, subtype="FLOAT"), 16_000)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_cut_wav_warns_with_what_is_missing(keep: float, written) -> None:
    path = written("cut.wav", NOISE[:20_000])
    path.write_bytes(path.read_bytes()[: 44 + int(keep * 40_000)])
    with pytest.warns(UserWarning, match=rf"cut\.wav: {40_000 - int(keep * 40_000):,} bytes .* missing"):
        decoded = decode(path, 16_000)
    assert decoded.header.frames == int(keep * 20_000)


def test_a_cut_mp3_warns_with_both_lengths(written) -> None:
    path = written("cut.mp3", NOISE, 48_000)
    path.write_bytes(path.read_bytes()[:4_000])
    with pytest.warns(UserWarning, match=r"cut\.mp3: the header declares .* frames and .* could be decoded"):
        decoded = decode(path, 16_000)
    assert len(decoded.samples) == -(-decoded.header.frames // 3)
    assert decoded.duration_s == decoded.header.frames / 48_000 < 1.0


@pytest.mark.filterwarnings("error")
def test_whole_files_do_not_warn(written) -> None:
    for name in ("a.wav", "a.flac", "a.mp3", "a.ogg", "a.aiff"):
        decode(written(name, NOISE, 48_000), 16_000)


def test_a_flac_cut_in_the_middle_is_corrupt(written) -> None:
    path = written("cut.flac", NOISE)
    path.write_bytes(path.read_bytes()[:40_000])
    with pytest.raises(AudioError, match=r"cut\.flac cannot be decoded") as caught:
        decode(path, 16_000)
    assert caught.value.code == "corrupt"


@pytest.mark.parametrize("declared", [10 * len(NOISE), 2**35], ids=["some", "terabytes"])
def test_a_flac_that_declares_too_many_frames_is_refused(declared: int, written) -> None:
    path = written("lies.flac", NOISE)
    declare_frames(path, declared)
    with pytest.raises(AudioError) as caught:
        decode(path, 16_000)
    assert caught.value.code == "corrupt"


@pytest.mark.parametrize("copies", [1, 2])
def test_a_streamed_flac_of_unknown_length_is_not_called_too_long(copies: int, written, session_mf: Session) -> None:
    """An encoder that writes to a pipe leaves 0 for the number of frames, and libsndfile makes 2**63 - 1 of it."""
    path = written("streamed.flac", NOISE)
    declare_frames(path, 0)
    try:
        batch = session_mf.prepare([Request("hi", [path] * copies)])
    except AudioError as error:
        assert error.code in ("corrupt", "empty", "unsupported")
    else:
        assert len(batch.slots[0].waveform) == len(NOISE)


def declare_frames(path: Path, frames: int) -> None:
    """Write a number of frames into a FLAC's STREAMINFO: 36 bits at byte 21 and a half."""
    data = bytearray(path.read_bytes())
    assert data[:4] == b"fLaC"
    data[21] = (data[21] & 0xF0) | (frames >> 32)
    data[22:26] = struct.pack(">I", frames & 0xFFFFFFFF)
    path.write_bytes(data)


def test_too_long_is_decided_from_the_header(session_mf: Session, written, monkeypatch) -> None:
    monkeypatch.setattr(session_mf._adapter, "context", 150)
    monkeypatch.setattr("audiollm.families.base.decode", lambda *args: pytest.fail("decoded"))
    with pytest.raises(RequestError, match=r"request 1 takes 1[0-9]{2} tokens and the context holds 150") as caught:
        session_mf.prepare([Request("hi"), Request("hi", [written("long.wav", NOISE)])])
    assert caught.value.code == "too_long"


def test_the_shortest_source_is_said(session_mf: Session) -> None:
    with pytest.raises(AudioError, match=r"320 sample\(s\).*321 samples \(20\.1 ms\)") as caught:
        session_mf.prepare([Request("hi", [Waveform(NOISE[:320], 16_000)])])
    assert caught.value.code == "too_short"
    assert caught.value.source == "requests[0].audios[0]"


@pytest.mark.parametrize("rate", [999, 768_001])
def test_a_file_rate_outside_the_range_is_refused(rate: int, written) -> None:
    with pytest.raises(AudioError, match=rf"odd\.wav is {rate} Hz") as caught:
        read_header(written("odd.wav", NOISE[:1000], rate))
    assert caught.value.code == "bad_rate"


@pytest.mark.parametrize("rate", [44_101, 9_999])
def test_a_ratio_with_a_filter_too_long_is_refused_before_decoding(rate: int, written, session_mf, monkeypatch) -> None:
    monkeypatch.setattr("audiollm.families.base.decode", lambda *args: pytest.fail("decoded"))
    with pytest.raises(AudioError, match=rf"odd\.wav: {rate} Hz to 16000 Hz.*taps.*44100") as caught:
        session_mf.prepare([Request("hi", [written("odd.wav", NOISE[:1000], rate)])])
    assert caught.value.code == "bad_rate"


@given(st.integers(1_000, 768_000))
def test_every_ratio_is_reduced_and_its_filter_bounded(rate: int) -> None:
    header = read_header(Waveform(np.zeros(4), rate))
    try:
        up, down = resample_ratio(header, 16_000)
    except AudioError as error:
        assert error.code == "bad_rate"
        assert 20 * max(16_000, rate) // math.gcd(16_000, rate) + 1 > MAX_FILTER_TAPS
    else:
        assert math.gcd(up, down) == 1
        assert up * rate == down * 16_000
        assert 20 * max(up, down) + 1 <= MAX_FILTER_TAPS


@given(st.integers(1, 3_000), st.sampled_from([8_000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000, 96_000]))
def test_the_resampled_length_is_known_before(frames: int, rate: int) -> None:
    waveform = Waveform(np.zeros(frames), rate)
    assert len(decode(waveform, 16_000).samples) == resampled_length(
        frames, *resample_ratio(read_header(waveform), 16_000)
    )


def test_a_tilde_is_the_home_folder(written, monkeypatch, tmp_path) -> None:
    written("clip.wav", NOISE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert decode("~/clip.wav", 16_000).header.path == tmp_path / "clip.wav"
    assert decode(Path("~/clip.wav"), 16_000).header.path == tmp_path / "clip.wav"


@pytest.mark.parametrize("name", ["~nobody-of-this-name/clip.wav", "~draft.wav"])
def test_a_tilde_of_nobody_is_refused_by_us(name: str) -> None:
    with pytest.raises(AudioError) as caught:
        read_header(name)
    assert caught.value.code == "not_found"


def test_a_file_called_tilde_something_is_found(written, monkeypatch, tmp_path) -> None:
    written("~draft.wav", NOISE)
    monkeypatch.chdir(tmp_path)
    assert read_header("~draft.wav").frames == len(NOISE)


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file names are Unicode there")
def test_a_name_that_is_not_utf8_is_read(written, tmp_path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.wav")
    written("ok.wav", NOISE).rename(name)
    assert read_header(name).frames == len(NOISE)
    assert len(decode(name, 16_000).samples) == len(NOISE)


@pytest.mark.parametrize("path", ["a" * 300, "clip.wav/inside"], ids=["long", "inside"])
def test_an_impossible_path_is_not_found(path: str, written, monkeypatch, tmp_path) -> None:
    written("clip.wav", NOISE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AudioError) as caught:
        read_header(path)
    assert caught.value.code == "not_found"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_file_is_refused(written) -> None:
    path = written("mine.wav", NOISE)
    path.chmod(0)
    with pytest.raises(AudioError, match="permission"):
        read_header(path)


def test_a_file_of_0_bytes_is_empty(tmp_path) -> None:
    (tmp_path / "nothing.wav").touch()
    with pytest.raises(AudioError, match=r"nothing\.wav is a file of 0 bytes") as caught:
        read_header(tmp_path / "nothing.wav")
    assert caught.value.code == "empty"


@pytest.mark.parametrize("name", ["notes.wav", "notes.mp3", "notes"])
def test_an_unsupported_file_is_told_what_can_be_read(name: str, tmp_path) -> None:
    (tmp_path / name).write_text("hello, this is no audio at all, it is text")
    with pytest.raises(AudioError, match=r"convert it to WAV or FLAC.*Readable: .*FLAC.*MP3.*WAV") as caught:
        read_header(tmp_path / name)
    assert caught.value.code == "unsupported"


def test_decoding_warns_of_nothing_else(written) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(Waveform(NOISE, 44_100), 16_000, max_s=100.0)
        decode(written("a.wav", NOISE, 44_100), 16_000, max_s=100.0)
