"""Request and Waveform: what is taken, copied and refused before a file is opened."""

from __future__ import annotations

import unicodedata
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audiollm import AudioError, AudioLLMError, Request, RequestError, Session, Waveform
from audiollm.request import MAX_RATE, MIN_RATE

RAMP = np.linspace(-1, 1, 1000)


def test_samples_are_copied_to_read_only_float32() -> None:
    mine = RAMP.astype(np.float32)
    waveform = Waveform(mine, 16_000)
    assert waveform.samples.dtype == np.float32
    assert not waveform.samples.flags.writeable
    assert not np.shares_memory(waveform.samples, mine)
    mine[:] = 0
    assert waveform.samples[0] == -1
    with pytest.raises(ValueError, match="read-only"):
        waveform.samples[0] = 0


def test_a_tensor_is_copied_not_shared() -> None:
    mine = torch.tensor(RAMP, dtype=torch.float32)
    waveform = Waveform(mine, 16_000)
    mine.zero_()
    assert waveform.samples[0] == -1


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f2", ">f4", ">f8"])
def test_every_float_width_and_byte_order_is_taken(dtype: str) -> None:
    samples = Waveform(RAMP.astype(dtype), 16_000).samples
    assert np.array_equal(samples, RAMP.astype(dtype).astype(np.float32))
    assert samples.dtype.isnative


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_tensor_is_taken(dtype: torch.dtype) -> None:
    tensor = torch.tensor(RAMP).to(dtype)
    assert np.array_equal(Waveform(tensor, 16_000).samples, tensor.float().numpy())


@pytest.mark.parametrize("step", [slice(None, None, -1), slice(None, None, 3), slice(5, 900, 7)])
def test_strides_are_followed(step: slice) -> None:
    assert np.array_equal(Waveform(RAMP[step], 16_000).samples, RAMP[step].astype(np.float32))
    if (step.step or 1) > 0:
        assert np.array_equal(Waveform(torch.tensor(RAMP)[step], 16_000).samples, RAMP[step].astype(np.float32))


def test_a_tensor_with_a_graph_is_taken() -> None:
    tensor = torch.tensor(RAMP, requires_grad=True)
    assert np.array_equal(Waveform(tensor * 2, 16_000).samples, (RAMP * 2).astype(np.float32))


@pytest.mark.parametrize(
    ("samples", "code", "cure"),
    [
        (RAMP.astype(np.int16), "bad_dtype", r"x / 32768"),
        (RAMP > 0, "bad_dtype", "floats"),
        (RAMP.astype(complex), "bad_dtype", "floats"),
        (RAMP.astype(object), "bad_dtype", "floats"),
        (RAMP.astype(np.longdouble), "bad_dtype", "floats"),
        (torch.zeros(9, dtype=torch.int16), "bad_dtype", r"x / 32768"),
        (torch.zeros(9, dtype=torch.complex64), "bad_dtype", "floats"),
        (torch.zeros(9).to(torch.float8_e4m3fn), "bad_dtype", "float"),
        (torch.zeros(9).to_sparse(), "bad_dtype", "dense"),
        (torch.zeros(9, device="meta"), "bad_dtype", "meta"),
        (RAMP.tolist(), "bad_dtype", "numpy"),
        ("clip.wav", "bad_dtype", "path"),
        (None, "bad_dtype", "numpy"),
        (RAMP[None], "bad_shape", r"x\[0\]"),
        (np.array(1, dtype=np.float32), "bad_shape", r"\[N\]"),
        (np.zeros((0, 2)), "bad_shape", r"\[N\]"),
        (RAMP[:0], "empty", "no samples"),
    ],
    ids=[
        *(
            "int16",
            "bool",
            "complex",
            "object",
            "longdouble",
            "torch_int16",
            "torch_complex",
            "float8",
            "sparse",
            "meta",
        ),
        *("list", "str", "None", "one_row", "no_axis", "no_rows", "empty"),
    ],
)
def test_other_samples_are_refused_with_the_cure(samples: object, code: str, cure: str) -> None:
    with pytest.raises(AudioError, match=cure) as caught:
        Waveform(samples, 16_000)
    assert caught.value.code == code
    assert caught.value.source == "Waveform(samples)"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 617, 999])
def test_a_non_finite_sample_is_named_by_its_index(bad: float, at: int) -> None:
    samples = RAMP.copy()
    samples[at:] = bad
    with pytest.raises(AudioError, match=rf"\[{at}\] is .*{1000 - at} non-finite of 1000") as caught:
        Waveform(samples, 44_100)
    assert caught.value.code == "non_finite"


def test_a_value_past_float32_is_named() -> None:
    samples = RAMP.copy()
    samples[7] = 1e300
    with pytest.raises(AudioError, match=r"\[7\] is 1e\+300, past float32") as caught:
        Waveform(samples, 16_000)
    assert caught.value.code == "non_finite"


@pytest.mark.parametrize("rate", [MIN_RATE, MAX_RATE, 16_000.0, np.float32(44_100), np.uint16(44_100)])
def test_whole_rates_are_taken_as_int(rate: object) -> None:
    found = Waveform(RAMP, rate).sample_rate
    assert type(found) is int
    assert found == rate


@pytest.mark.parametrize(
    "rate", [MIN_RATE - 1, MAX_RATE + 1, 44.1, True, np.True_, "44100", None, float("nan"), -8000], ids=str
)
def test_other_rates_are_refused(rate: object) -> None:
    with pytest.raises(AudioError) as caught:
        Waveform(RAMP, rate)
    assert caught.value.code == "bad_rate"


def test_a_rate_past_every_float_is_refused() -> None:
    with pytest.raises(AudioError) as caught:
        Waveform(RAMP, 10**400)
    assert caught.value.code == "bad_rate"


def test_kilohertz_are_guessed() -> None:
    with pytest.raises(AudioError, match="Hz, not kHz"):
        Waveform(RAMP, 48)


def test_paths_and_waveforms_are_kept_in_order() -> None:
    audios = ["a.wav", Path("b.wav"), Waveform(RAMP, 8000)]
    assert Request("Compare.", audios).audios == tuple(audios)
    assert Request("Compare.", tuple(audios)).audios == tuple(audios)


def test_a_request_is_frozen() -> None:
    request = Request("hi", [Waveform(RAMP, 8000)])
    with pytest.raises(FrozenInstanceError):
        request.prompt = "ho"
    with pytest.raises(FrozenInstanceError):
        request.audios[0].sample_rate = 1


def test_later_changes_of_the_list_change_nothing() -> None:
    audios = ["a.wav"]
    request = Request("hi", audios)
    audios.append("b.wav")
    assert request.audios == ("a.wav",)


def test_five_sources_are_taken_and_six_refused() -> None:
    assert len(Request("hi", ["a.wav"] * 5).audios) == 5
    with pytest.raises(RequestError, match=r"6 sources.*at most 5") as caught:
        Request("hi", ["a.wav"] * 6)
    assert caught.value.code == "too_many_sources"


@pytest.mark.parametrize(
    "audios", ["a.wav", Path("a.wav"), Waveform(RAMP, 8000), 3, None, {"a.wav"}, (a for a in ["a.wav"])]
)
def test_a_source_outside_a_list_is_refused_with_the_cure(audios: object) -> None:
    with pytest.raises(RequestError, match=r"Request\(prompt, \[source\]\)") as caught:
        Request("hi", audios)
    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize("audio", [RAMP, b"a.wav", None, 3])
def test_a_source_that_is_neither_path_nor_waveform_is_named(audio: object) -> None:
    with pytest.raises(RequestError, match=r"audios\[1\]") as caught:
        Request("hi", ["a.wav", audio])
    assert caught.value.source == "audios[1]"


@pytest.mark.parametrize(
    "url", ["https://x.invalid/a.wav", "s3://bucket/a.wav", "file:///a.wav", "data:audio/wav;base64,AA"]
)
@pytest.mark.parametrize("kind", [str, Path])
def test_a_url_is_refused_before_anything_is_opened(url: str, kind: type) -> None:
    with pytest.raises(AudioError, match=r"URL.*nothing is fetched") as caught:
        Request("hi", [kind(url)])
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("path", ["", "a\0b.wav"], ids=["empty", "nul"])
def test_what_is_no_path_is_refused_before_anything_is_opened(path: str) -> None:
    with pytest.raises(AudioError, match="no path") as caught:
        Request("hi", [path])
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("path", ["C:/music/a.wav", "a:b.wav", "mix (final): take 2.wav"])
def test_a_colon_makes_no_url(path: str) -> None:
    assert Request("hi", [path]).audios == (path,)


@pytest.mark.parametrize("n_markers", [1, 3])
def test_a_marker_count_that_differs_is_refused(n_markers: int) -> None:
    with pytest.raises(RequestError, match=f"{n_markers} <audio> marker.* 2 source") as caught:
        Request("<audio>" * n_markers, ["a.wav", "b.wav"])
    assert caught.value.code == "bad_prompt"


def test_a_marker_without_sources_is_refused() -> None:
    with pytest.raises(RequestError, match="0 source"):
        Request("What is <audio>?")


def test_an_empty_prompt_needs_a_source() -> None:
    assert Request("", ["a.wav"]).prompt == ""
    for prompt in ("", " \n\t"):
        with pytest.raises(RequestError) as caught:
            Request(prompt)
        assert caught.value.code == "bad_prompt"


def test_a_lone_surrogate_is_named_with_its_offset() -> None:
    with pytest.raises(RequestError, match="character 3") as caught:
        Request("abc\udc80def")
    assert caught.value.source == "prompt[3]"


def test_one_source_goes_before_the_prompt(session_mf: Session, mf_wave) -> None:
    assert user_turn(session_mf, Request("Describe.", [mf_wave("w2s", 0, 400)])) == "<sound>\nDescribe."


def test_several_sources_get_numbered_lines(session_mf: Session, mf_wave) -> None:
    turn = user_turn(session_mf, Request("Compare.", [mf_wave("w2s", 0, 400)] * 3))
    assert turn == "Audio 1: <sound>\nAudio 2: <sound>\nAudio 3: <sound>\nCompare."


def test_explicit_markers_stay_where_they_are(session_mf: Session, mf_wave) -> None:
    prompt = "Mix <audio>, then\r\n  drums:<audio>!"
    turn = user_turn(session_mf, Request(prompt, [mf_wave("w2s", 0, 400)] * 2))
    assert turn == prompt.replace("<audio>", "<sound>")


@pytest.mark.parametrize("before", ["", "<audio>\n", "x <audio> y"])
def test_a_control_token_is_placed_in_the_users_own_text(before: str, session_mf: Session, mf_wave) -> None:
    audios = [mf_wave("w2s", 0, 400)] * before.count("<audio>")
    with pytest.raises(RequestError, match=rf"'<sound>' at character {len(before) + 2}\b") as caught:
        session_mf.prepare([Request("hi"), Request(before + "a <sound>", audios)])
    assert caught.value.code == "control_token"
    assert caught.value.source == f"requests[1].prompt[{len(before) + 2}]"


def test_every_added_token_of_the_tokenizer_is_refused(session_mf: Session) -> None:
    for token in session_mf.processor.tokenizer.get_added_vocab():
        with pytest.raises(RequestError) as caught:
            session_mf.prepare([Request(f"say {token}")])
        assert caught.value.code == "control_token"


def test_a_family_marker_is_refused_where_the_tokenizer_does_not_know_it(session_mf: Session, monkeypatch) -> None:
    monkeypatch.setattr(type(session_mf._adapter), "_reserved_ids", lambda self: set())
    for token in ("<sound>", "<|sound_bos|>", "<|sound_eos|>"):
        with pytest.raises(RequestError, match="character 4"):
            session_mf.prepare([Request(f"say {token}")])


@given(st.text())
def test_any_text_is_asked_as_it_is_or_refused_by_us(session_mf: Session, text: str) -> None:
    try:
        batch = session_mf.prepare([Request(text)])
    except AudioLLMError:
        return
    row = batch.inputs["input_ids"][0]
    decoded = session_mf.processor.tokenizer.decode(row, clean_up_tokenization_spaces=False)
    assert unicodedata.normalize("NFC", text) in unicodedata.normalize("NFC", decoded)


def user_turn(session: Session, request: Request) -> str:
    """The user's turn as the model sees it, one `<sound>` a source."""
    rows = session.prepare([request]).tokens
    ids, last = [], None
    for row in rows:
        if row.role == "user" or (row.role == "audio" and row.source != last):
            ids.append(row.id)
        last = row.source if row.role == "audio" else last
    text = session.processor.tokenizer.decode(ids)
    return text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
