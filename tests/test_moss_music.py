"""MOSS-Music through a Session against the published values; the model itself is tested in test_moss_music_model.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from audiollm import Request, RequestError, Waveform, load_model

MOSS = Path(__file__).parent / "data" / "moss_music"
CASES = sorted(path.stem for path in (MOSS / "cases").glob("*.safetensors"))
MEL, AUDIO, STATES = 1e-5, 2e-5, 1e-4


@pytest.fixture(scope="module", params=("sdpa", "eager"))
def session(request, session_moss, session_moss_eager):
    return session_moss if request.param == "sdpa" else session_moss_eager


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A golden case as a Request: the user's turn as fed, each native span as a marker."""
    tensors = load_file(MOSS / "cases" / f"{request.param}.safetensors")
    fed = json.loads((MOSS / "cases" / f"{request.param}.json").read_text())["prompt_fed"]
    user = re.search(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", fed, re.DOTALL).group(1)
    prompt = re.sub(r"<\|audio_bos\|>.*?<\|audio_eos\|>", "<audio>", user, flags=re.DOTALL)
    waves = [tensors[name] for name in sorted(tensors) if name.startswith("waveform_")]
    return tensors, Request(prompt, [Waveform(wave, 16_000) for wave in waves])


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def test_every_golden_case_is_here():
    assert len(CASES) == 8


def test_ids_positions_and_mel(session_moss, case):
    golden, request = case
    batch = session_moss.prepare([request])
    assert torch.equal(batch.inputs["input_ids"].flatten(), golden["input_ids"].flatten())
    if not request.audios:
        assert set(batch.inputs) == {"input_ids", "attention_mask"}
        return
    positions = torch.cat([slot.token_positions for slot in batch.slots])
    assert torch.equal(positions, golden["audio_positions"].flatten())
    assert torch.equal(batch.inputs["audio_input_mask"][0].nonzero().flatten(), positions)
    assert differ(batch.inputs["audio_data"], golden["mel"]) <= MEL
    assert batch.inputs["audio_data"].dtype == torch.float32
    assert torch.equal(batch.inputs["audio_data_seqlens"], golden["mel_lengths"].flatten().long())


def test_audio_embeddings(session, case):
    golden, request = case
    found = session.extract_audio_embeddings(session.prepare([request]))
    if not request.audios:
        assert found == []
        return
    assert differ(torch.cat([e.raw for e in found]), golden["encoder_raw"]) <= AUDIO
    assert differ(torch.cat([e.projected for e in found]), golden["adapter_projected"]) <= AUDIO
    for k in range(3):
        assert differ(torch.cat([e.deepstack_raw[k] for e in found]), golden[f"deepstack_raw_{k}"]) <= AUDIO
        assert differ(torch.cat([e.deepstack_projected[k] for e in found]), golden[f"deepstack_projected_{k}"]) <= AUDIO


def golden_states(golden: dict, width: int) -> torch.Tensor:
    states = golden["hidden_states_post"]
    return states.reshape(len(states), width, states.shape[-1])


@pytest.mark.parametrize("call", ("first", "later"))
def test_states_and_logits(session, tiny_moss, case, call):
    golden, request = case
    batch = session.prepare([request])
    if call == "later":
        session.model(**batch.inputs, output_hidden_states=True)
    out = session.forward(batch, output_hidden_states=True)
    assert differ(torch.cat(out.hidden_states), golden_states(golden, batch.width)) <= STATES
    logits = golden["logits_last4"].reshape(-1, out.logits.shape[-1])
    assert differ(out.logits[0], logits[-1:]) <= STATES
    with torch.no_grad():
        direct = session.model(**batch.inputs, output_hidden_states=True)
    assert differ(direct.logits[0, -len(logits) :], logits) <= STATES
    assert differ(torch.cat(direct.hidden_states), golden_states(golden, batch.width)) <= STATES


def test_contextual_embeddings_are_seen_after_deepstack(session, case):
    golden, request = case
    batch = session.prepare([request])
    layers = range(session.n_layers + 1)
    states = golden_states(golden, batch.width)
    for slot, found in zip(batch.slots, session.extract_contextual_embeddings(batch, layers), strict=True):
        for k in layers:
            assert differ(found[k], states[k, slot.token_positions]) <= STATES


@pytest.mark.parametrize("registered", ("before", "after"))
def test_a_user_s_hook_sees_the_state_after_injection(tiny_moss, case, registered):
    golden, request = case
    session = load_model(tiny_moss, "cpu", torch.float32)
    batch = session.prepare([request])
    seen: dict[int, torch.Tensor] = {}

    def watch() -> list:
        return [
            block.register_forward_hook(lambda m, a, out, k=k: seen.__setitem__(k + 1, out))
            for k, block in enumerate(session._adapter.blocks()[:-1])
        ]

    if registered == "before":
        handles = watch()
        session.forward(batch)
    else:
        session.model(**batch.inputs, output_hidden_states=True)
        handles = watch()
    session.forward(batch)
    for handle in handles:
        handle.remove()
    states = golden_states(golden, batch.width)
    for k, state in seen.items():
        assert differ(state[0], states[k]) <= STATES


def test_greedy_ids(session, case):
    golden, request = case
    wanted = golden["greedy_ids"].flatten().tolist()
    answer = session.generations([request], max_new_tokens=len(wanted))[0]
    assert list(answer.token_ids) == wanted


# Prompts and time.


def noise(n_samples: int) -> Waveform:
    return Waveform(np.random.default_rng(n_samples).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


def user_text(session, request: Request) -> str:
    rows = session.prepare([request]).tokens
    return "".join("@" if r.role == "audio" else r.text for r in rows if r.role in ("user", "audio", "marker"))


def test_missing_markers_are_numbered_also_for_one_source(session_moss):
    one = user_text(session_moss, Request("Name it.", [noise(1280)]))
    assert one == "<|im_start|>user\nAudio 1: <|audio_bos|>@<|audio_eos|>\nName it.<|im_end|>\n"
    two = user_text(session_moss, Request("Name it.", [noise(1280)] * 2))
    assert two.count("Audio 2: <|audio_bos|>@<|audio_eos|>\n") == 1


def test_time_markers_are_known_to_tokens_and_skipped_by_positions(session_moss):
    batch = session_moss.prepare([Request("<audio>", [noise(16_000 * 12)])])
    rows = [r for r in batch.tokens if r.role == "marker" and r.marker_s is not None]
    assert [(r.text, r.marker_s) for r in rows] == [
        ("2", 2.0), ("4", 4.0), ("6", 6.0), ("8", 8.0), ("1", 10.0), ("0", 10.0), ("1", 12.0), ("2", 12.0),
    ]  # fmt: skip
    assert not {r.position for r in rows} & set(batch.slots[0].token_positions.tolist())
    for row in rows:  # a marker stands right after the tokens of the seconds it tells
        before = batch.timeline[0].position_to_token(min(r.position for r in rows if r.marker_s == row.marker_s) - 1)
        assert batch.timeline[0].token_to_time(before)[1] == row.marker_s


@pytest.mark.parametrize("text", ("<|AUDIO|>", "a <|audio_bos|> b", "<|audio_eos|>"))
def test_native_spans_are_refused_in_text(session_moss, text):
    with pytest.raises(RequestError) as caught:
        session_moss.prepare([Request(text, [noise(1280)])])
    assert caught.value.code == "control_token"


def test_windows_are_chunks_and_a_tail_without_a_frame_makes_none(session_moss):
    timeline = session_moss.prepare([Request("x", [noise(64_100)])]).timeline[0]
    assert [(w.start_s, w.end_s, w.n_tokens) for w in timeline.windows()] == [(0.0, 4.0, 50)]
    assert timeline.time_to_token(4.0) is None and timeline.n_frames == 400
    timeline = session_moss.prepare([Request("x", [noise(64_160)])]).timeline[0]
    assert [w.n_tokens for w in timeline.windows()] == [50, 1]
    assert timeline.token_to_frames(50) == (400, 401)


def test_moss_audio_has_the_same_layout(tiny_moss, tmp_path, session_moss):
    for path in tiny_moss.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tiny_moss / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "moss_audio"}))
    other = load_model(tmp_path, "cpu", torch.float32)
    batch = other.prepare([Request("x", [noise(9_000)])])
    assert other.family == "moss_music"
    assert torch.equal(other.forward(batch).logits, session_moss.forward(batch).logits)


def test_buffers_after_loading_equal_those_of_a_model_built_on_the_cpu(tiny_moss):
    built = type(load_model(tiny_moss, "cpu", torch.float32).model)
    loaded = load_model(tiny_moss, "cpu", torch.bfloat16).model
    fresh = built(loaded.config)
    names = dict(fresh.named_buffers())
    assert names and set(names) == set(dict(loaded.named_buffers()))
    for name, buffer in loaded.named_buffers():
        assert buffer.dtype == torch.float32 and torch.equal(buffer, names[name])
