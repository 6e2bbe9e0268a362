"""Every entry of data/odd_inputs/manifest.json does what it says there.

A row of `FAMILIES` is a family's session fixture, its name in `tokens`, and its name in `by_family`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm import AudioError, PreparedBatch, Request, RequestError, Session, SnapshotError, Waveform, load_model
from audiollm.audio import Decoded, decode
from audiollm.weights import read_entries

ODD = Path(__file__).parent / "data" / "odd_inputs"
ENTRIES = json.loads((ODD / "manifest.json").read_text(encoding="utf-8"))["inputs"]
BY_ID = {entry["id"]: entry for entry in ENTRIES}
FAMILIES = [("session_mf", "music_flamingo", "music_flamingo"), ("session_moss", "moss", "moss_music")]
QUICK_S = 2.0
# What `message` asks for in words, as a pattern.
SAYS = {
    "size_0": r"streamed_size_zero\.wav.*declares no samples.*16,044 bytes",
    "m4a": r"phone_memo\.m4a.*MP4.*convert.*WAV or FLAC",
}
# Entries whose rule leaves a choice, and the choice made here; "either" entries that are not listed may do both.
CHOSEN = {"arr_f16": "accept", "srate_0": "accept", "tilde": "accept", "text_6": "accept", "text_1": "reject"}


def of_kind(*kinds: str) -> list:
    return [pytest.param(entry, id=entry["id"]) for entry in ENTRIES if entry["kind"] in kinds]


@pytest.fixture(params=FAMILIES, ids=[tokens for _, tokens, _ in FAMILIES], scope="module")
def family(request: pytest.FixtureRequest) -> tuple[Session, str, str]:
    fixture, tokens, name = request.param
    return request.getfixturevalue(fixture), tokens, name


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Path]:
    """Entries that no archive holds: the folder and the links."""
    paths = {
        "dir": tmp_path / "directory.wav",
        "link_ok": tmp_path / "link.wav",
        "link_broken": tmp_path / "broken.wav",
        "link_loop": tmp_path / "loop.wav",
    }
    paths["dir"].mkdir()
    paths["link_ok"].symlink_to(ODD / BY_ID["u8_8k"]["file"])
    paths["link_broken"].symlink_to(tmp_path / "missing")
    paths["link_loop"].symlink_to(paths["link_loop"])
    return paths


def source_of(entry: dict, made: dict[str, Path]) -> str:
    if entry["id"] in made:
        return str(made[entry["id"]])
    if "file" in entry:
        return str(ODD / entry["file"])
    path = entry["path"]
    return str(ODD / path) if path.startswith("audio/") else path


def heard(session: Session, audio: str | Path | Waveform) -> tuple[PreparedBatch, Decoded]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        batch = session.prepare([Request("What is this?", [audio])])
        return batch, decode(audio, batch.slots[0].sample_rate)


def refused(session: Session, audio: str | Path | Waveform) -> AudioError:
    start = time.perf_counter()
    with pytest.raises(AudioError) as caught:
        session.prepare([Request("What is this?", [audio])])
    assert time.perf_counter() - start < QUICK_S
    return caught.value


def check_refusal(error: Exception, entry: dict) -> None:
    expect = entry["expect"]
    assert error.code in (expect["error"], *expect.get("also", ()))
    assert error.source
    if "message" in expect:
        assert re.search(SAYS[entry["id"]], str(error), re.DOTALL)


def check_heard(batch: PreparedBatch, decoded: Decoded, entry: dict, tokens: str) -> None:
    expect, waveform = entry["expect"], batch.slots[0].waveform.numpy()
    assert waveform.dtype == np.float32
    assert is_same(waveform, decoded.samples)
    for key, found in {
        "frames": decoded.header.frames,
        "sr": decoded.header.sample_rate,
        "channels": decoded.header.channels,
    }.items():
        assert found == expect.get("native", {}).get(key, found)
    mono = expect.get("mono16k", {})
    assert len(waveform) == mono.get("n_samples", len(waveform))
    assert batch.slots[0].sample_rate == mono.get("sr", 16_000)
    if tokens in expect.get("tokens", {}):
        assert len(batch.slots[0].token_positions) == expect["tokens"][tokens]
    check_stats(waveform, entry)
    features = [t for t in batch.inputs.values() if t.is_floating_point()]
    assert features
    assert all(bool(torch.isfinite(t).all()) for t in features)


def is_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal but for the last bit: the MP3 decoder rounds by where its buffer lies."""
    return a.shape == b.shape and bool(np.abs(a - b).max() <= 5e-7)


def check_stats(waveform: np.ndarray, entry: dict) -> None:
    stats = dict(entry["expect"].get("stats", {}))
    tolerance = stats.pop("tolerance", 0.0)
    for name, wanted in stats.items():
        if name == "first_native_samples_zero":
            native = native_of(entry)
            assert not native[:wanted].any()
            assert native[wanted:].any()
        elif name == "exact_zero":
            assert not waveform.any()
        elif name == "peak_ratio_to_left":
            left = native_of(entry)[:, 0]
            assert np.array_equal(waveform, left * np.float32(wanted))
        else:
            found = {
                "mid_value": waveform[len(waveform) // 2],
                "min": waveform.min(),
                "max": waveform.max(),
                "peak": np.abs(waveform).max(),
                "abs_max": np.abs(waveform).max(),
                "mean": waveform.mean(),
            }[name]
            assert abs(float(found) - wanted) <= tolerance


def native_of(entry: dict) -> np.ndarray:
    import soundfile

    return soundfile.read(ODD / entry["file"], dtype="float32", always_2d=True)[0]


def array_of(entry: dict) -> np.ndarray:
    names = {"a": np.load(ODD / entry["file"])}
    return eval(entry.get("make", "a"), {}, names)  # our own manifest's words, such as a[::-1]


def test_files_are_the_ones_of_the_manifest() -> None:
    for entry in ENTRIES:
        if "file" in entry and "sha256" in entry:
            assert hashlib.sha256((ODD / entry["file"]).read_bytes()).hexdigest().startswith(entry["sha256"]), entry[
                "id"
            ]


@pytest.mark.parametrize("kind", [str, Path], ids=["str", "Path"])
@pytest.mark.parametrize("entry", of_kind("audio"))
def test_audio(entry: dict, kind: type, family, made, monkeypatch, tmp_path) -> None:
    session, tokens, _ = family
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "clip.wav").symlink_to(ODD / "audio/UPPER.WAV")
    outcome = CHOSEN.get(entry["id"], entry["expect"]["outcome"])
    audio = kind(source_of(entry, made))
    if outcome == "by_model":
        outcome = "accept" if entry["expect"]["tokens"][tokens] else "reject"
        entry = {**entry, "expect": {"error": "too_short", **entry["expect"]}}
    if outcome == "either":
        entry = {**entry, "expect": {**entry["expect"], "error": "corrupt", "also": ["unsupported"]}}
        try:
            check_heard(*heard(session, audio), entry, tokens)
        except AudioError as error:
            check_refusal(error, entry)
    elif outcome == "reject":
        check_refusal(refused(session, audio), entry)
    else:
        batch, decoded = heard(session, audio)
        check_heard(batch, decoded, entry, tokens)
        if "same_samples_as" in entry["expect"]:
            twin = decode(source_of(BY_ID[entry["expect"]["same_samples_as"]], made), 16_000)
            assert is_same(decoded.samples, twin.samples)


def test_mp3_length_is_what_was_decoded() -> None:
    decoded = decode(ODD / BY_ID["mp3"]["file"], 16_000)
    assert decoded.header.frames == len(native_of(BY_ID["mp3"]))
    assert abs(decoded.header.frames - 44_100) <= 2_304


@pytest.mark.filterwarnings("ignore:mp3_cut")
def test_a_cut_mp3_gives_about_half() -> None:
    whole, half = (decode(ODD / BY_ID[name]["file"], 16_000) for name in ("mp3", "mp3_cut"))
    assert 0.4 < len(half.samples) / len(whole.samples) < 0.6


def test_a_link_gives_what_it_points_to(made: dict[str, Path]) -> None:
    assert np.array_equal(decode(made["link_ok"], 16_000).samples, decode(ODD / BY_ID["u8_8k"]["file"], 16_000).samples)


def test_silence_gives_the_lowest_mel_everywhere(session_mf: Session) -> None:
    batch, _ = heard(session_mf, ODD / BY_ID["silence"]["file"])
    assert bool((batch.inputs["input_features"] == -1.5).all())


def test_a_misaligned_header_gives_what_libsndfile_decodes() -> None:
    entry = BY_ID["hdr_align"]
    try:
        decoded = decode(ODD / entry["file"], 16_000)
    except AudioError as error:
        assert error.code == "corrupt"
    else:
        assert np.array_equal(decoded.samples, native_of(entry).mean(axis=1))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [e["id"] for e in ENTRIES if "memory" in e["expect"]])
def test_a_declared_size_is_never_allocated(name: str, session_mf: Session) -> None:
    audio = source_of(BY_ID[name], {})
    tracemalloc.start()
    try:
        if BY_ID[name]["expect"]["outcome"] == "accept":
            decode(audio, 16_000)
        else:
            refused(session_mf, audio)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_a_pipe_is_refused_without_waiting(session_mf: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    assert refused(session_mf, tmp_path / "pipe.wav").code == "not_a_file"


@pytest.mark.parametrize("entry", of_kind("array"))
@pytest.mark.filterwarnings("error")
def test_array(entry: dict, family) -> None:
    session, tokens, _ = family
    outcome = CHOSEN.get(entry["id"], entry["expect"]["outcome"])
    array = array_of(entry)
    if outcome == "reject":
        with pytest.raises(AudioError) as caught:
            Waveform(array, entry["sample_rate"])
        check_refusal(caught.value, entry)
        return
    before = array.copy()
    batch, decoded = heard(session, Waveform(array, entry["sample_rate"]))
    check_heard(batch, decoded, entry, tokens)
    assert np.array_equal(batch.slots[0].waveform.numpy(), before.astype(np.float32))
    assert np.array_equal(array, before)
    if "same_samples_as" in entry["expect"]:
        assert np.array_equal(decoded.samples, array_of(BY_ID[entry["expect"]["same_samples_as"]]))


@pytest.mark.parametrize("entry", of_kind("rate"))
def test_rate(entry: dict, family) -> None:
    session, tokens, _ = family
    rate = eval(entry["sample_rate_expr"], {"np": np})
    if CHOSEN.get(entry["id"], entry["expect"]["outcome"]) == "accept":
        waveform = Waveform(array_of(entry), rate)
        assert type(waveform.sample_rate) is int
        assert waveform.sample_rate == rate
        check_heard(*heard(session, waveform), entry, tokens)
    else:
        with pytest.raises(AudioError) as caught:
            Waveform(array_of(entry), rate)
        check_refusal(caught.value, entry)


@pytest.mark.parametrize("with_source", [False, True], ids=["without", "with"])
@pytest.mark.parametrize("entry", of_kind("prompt"))
def test_prompt(entry: dict, with_source: bool, family, mf_wave) -> None:
    session, _, name = family
    audios = [mf_wave("w2s", 0, 400)] if with_source else []
    expect, given = entry["expect"], eval(entry["text_expr"]) if "text_expr" in entry else entry["text"]
    outcome = CHOSEN.get(entry["id"], expect["outcome"])
    if outcome == "by_family":
        outcome = expect[name]
    if outcome == "by_sources" or (entry["id"] == "text_1" and with_source):  # white space is treated as no text
        outcome = {**expect, "with": "accept", "without": "reject"}["with" if with_source else "without"]
    for text in given if isinstance(given, list) else [given]:
        if outcome == "accept":
            batch = session.prepare([Request(text, audios)])
            assert batch.requests[0].prompt == text
        else:
            start = time.perf_counter()
            with pytest.raises(RequestError) as caught:
                session.prepare([Request(text, audios)])
            assert time.perf_counter() - start < QUICK_S
            check_refusal(caught.value, entry)


def test_a_control_token_is_named_with_its_offset(session_mf: Session) -> None:
    with pytest.raises(RequestError, match=r"'<\|im_end\|>' at character 8") as caught:
        session_mf.prepare([Request(BY_ID["inject_0"]["text"])])
    assert caught.value.source == "requests[0].prompt[8]"


def test_a_long_prompt_says_how_many_tokens_of_how_many(session_mf: Session) -> None:
    with pytest.raises(RequestError, match=r"takes 60,\d\d\d tokens and the context holds 32,768"):
        session_mf.prepare([Request("a " * 60_000)])


def test_both_spellings_of_an_accent_give_the_same_ids(session_mf: Session) -> None:
    nfd, nfc = (session_mf.prepare([Request(text)]).inputs["input_ids"] for text in ("cafe\u0301", "caf\u00e9"))
    assert torch.equal(nfd, nfc)


def test_text_is_not_cut_at_a_nul(session_mf: Session) -> None:
    ids = session_mf.prepare([Request("a\0b")]).inputs["input_ids"][0]
    assert "a\0b" in session_mf.processor.tokenizer.decode(ids)


@pytest.mark.parametrize("entry", of_kind("weights"))
def test_weights(entry: dict, mf_copy: Path) -> None:
    target = mf_copy / "model.safetensors"
    target.write_bytes((ODD / entry["file"]).read_bytes())
    if entry["expect"]["outcome"] == "readable":
        assert [e.shape for e in read_entries(target).values()] == [(2, 2)]
        return
    start = time.perf_counter()
    with pytest.raises(SnapshotError) as caught:
        load_model(mf_copy, device="cpu", dtype=torch.float32)
    assert time.perf_counter() - start < QUICK_S
    check_refusal(caught.value, entry)
    assert str(target) in str(caught.value)
    assert caught.value.source == str(target)
    assert ("LFS" in str(caught.value)) == (entry["id"] == "st_lfs")
