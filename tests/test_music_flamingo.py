"""Music Flamingo against the values of the published code: ids, mel, tower, projector, states, logits, greedy text."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from audiollm import Request, SnapshotError, Waveform, load_model
from audiollm.families.music_flamingo import MusicFlamingo

MF = Path(__file__).parent / "data" / "music_flamingo"
CASES = sorted(path.stem for path in (MF / "cases").glob("*.safetensors"))
ATTENTION = ("sdpa", "eager")
MEL, AUDIO, STATES = 1e-5, 1e-4, 1e-4


@pytest.fixture(scope="module", params=ATTENTION)
def session(request, session_mf, session_mf_eager):
    return session_mf if request.param == "sdpa" else session_mf_eager


@pytest.fixture(scope="module", params=CASES)
def case(request, mf_case, mf_requests):
    described, tensors = mf_case(request.param)
    return described, {name: torch.from_numpy(array) for name, array in tensors.items()}, mf_requests(described)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def test_every_golden_case_is_here():
    assert len(CASES) == 10


def test_ids_masks_and_positions_are_equal(session_mf, case):
    _, golden, requests = case
    batch = session_mf.prepare(requests)
    assert torch.equal(batch.inputs["input_ids"], golden["input_ids"])
    assert torch.equal(batch.inputs["attention_mask"], golden["attention_mask"])
    for k, slot in enumerate(batch.slots):
        assert torch.equal(slot.token_positions, golden[f"token_positions.{k}"])


def test_mel_is_the_published_one(session_mf, case):
    _, golden, requests = case
    inputs = session_mf.prepare(requests).inputs
    if "mel_grid" not in golden:
        assert "input_features" not in inputs
        return
    mel = inputs["input_features"]
    assert differ(mel[:, ::16, ::60], golden["mel_grid"]) <= MEL
    assert differ(mel[:, :, :8], golden["mel_head"]) <= MEL
    assert torch.equal(inputs["input_features_mask"].sum(-1).long(), golden["mask_frames"])
    assert inputs["input_features_mask"].dtype == torch.int32


def test_audio_embeddings_are_the_published_ones(session, case):
    _, golden, requests = case
    embeddings = session.extract_audio_embeddings(session.prepare(requests))
    for k, embedding in enumerate(embeddings):
        assert differ(embedding.raw, golden[f"encoder_raw.{k}"]) <= AUDIO
        assert differ(embedding.projected, golden[f"projected.{k}"]) <= AUDIO
    assert f"projected.{len(embeddings)}" not in golden


def test_states_and_logits_are_the_published_ones(session, case):
    _, golden, requests = case
    batch = session.prepare(requests)
    out = session.forward(batch, output_hidden_states=True)
    assert differ(out.logits[:, 0], golden["logits_last"]) <= STATES
    real = batch.inputs["attention_mask"].bool()
    for k, states in enumerate(out.hidden_states):
        if f"hidden.{k}" in golden:
            assert differ(states[real], golden[f"hidden.{k}"][real]) <= STATES
        else:
            rows = golden["sel_row_pos"]
            assert differ(states[rows[:, 0], rows[:, 1]], golden[f"hidden_sel.{k}"]) <= STATES


def test_contextual_embeddings_are_the_published_states(session_mf, case):
    _, golden, requests = case
    batch = session_mf.prepare(requests)
    asked = (0, 1, 2, 3, -1)
    found = session_mf.extract_contextual_embeddings(batch, layers=asked)
    for slot, states in zip(batch.slots, found, strict=True):
        assert tuple(states) == asked
        for k, layer in enumerate(asked):
            mine = states[layer]
            if f"hidden.{k}" in golden:
                want = golden[f"hidden.{k}"][slot.sample_index, slot.token_positions]
            else:
                rows = golden["sel_row_pos"].tolist()
                at = [
                    i
                    for i, (b, p) in enumerate(rows)
                    if b == slot.sample_index and p in set(slot.token_positions.tolist())
                ]
                column = {int(p): i for i, p in enumerate(slot.token_positions)}
                mine = mine[[column[rows[i][1]] for i in at]]
                want = golden[f"hidden_sel.{k}"][at]
            assert differ(mine, want) <= STATES


def test_greedy_text_is_the_published_one(session, case):
    described, _, requests = case
    assert session.generate(requests, max_new_tokens=16) == described["greedy"]["text"]


def test_direct_model_calls_give_the_published_logits(session_mf, case):
    _, golden, requests = case
    with torch.no_grad():
        logits = session_mf.model(**session_mf.prepare(requests).inputs).logits
    assert differ(logits[:, -1], golden["logits_last"]) <= STATES


def test_the_real_model_has_the_published_names_and_shapes():
    config = json.loads((MF / "real_config.json").read_text())
    published = json.loads((MF / "real_state_dict_keys.json").read_text())["tensors"]
    with torch.device("meta"):
        model = MusicFlamingo.build(config, "sdpa")
    assert {n: list(t.shape) for n, t in model.state_dict().items()} == {n: t["shape"] for n, t in published.items()}
    assert sum(p.numel() for p in model.parameters()) == 8_267_215_360


# A window too short for a token, the last of its source, must shift nothing that comes after it.

TAILS = (480_001, 480_160, 480_320, 960_320)


def noise(n_samples: int, seed: int = 0) -> Waveform:
    return Waveform(np.random.default_rng(seed).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


@pytest.mark.parametrize("n_samples", TAILS)
def test_a_tail_without_tokens_shifts_no_neighbour(session_mf, n_samples):
    other = noise(16_800, 1)
    alone = session_mf.prepare([Request("x", [other])])
    same_prompt = session_mf.prepare([Request("x", [noise(n_samples), other])])
    next_request = session_mf.prepare([Request("x", [noise(n_samples)]), Request("x", [other])])
    want = session_mf.extract_audio_embeddings(alone)[0]
    for batch in (same_prompt, next_request):
        found = session_mf.extract_audio_embeddings(batch)[-1]
        assert differ(found.projected, want.projected) < 1e-5
        assert differ(found.raw, want.raw) < 1e-5


@pytest.mark.parametrize("n_samples", TAILS)
def test_a_tail_without_tokens_changes_nothing_in_its_own_source(session_mf, n_samples):
    whole = noise(n_samples)
    tokens = n_samples // 480_000 * 480_000
    cut = Waveform(whole.samples[:tokens], 16_000)
    found, want = (
        session_mf.extract_audio_embeddings(session_mf.prepare([Request("x", [w])]))[0] for w in (whole, cut)
    )
    assert differ(found.projected, want.projected) < 1e-5


@pytest.mark.parametrize("n_samples", TAILS[:2])
def test_direct_calls_with_whole_mel_equal_calls_without_the_empty_windows(session_mf, n_samples):
    requests = [Request("Audio 1: <audio>\nAudio 2: <audio>\nx", [noise(n_samples), noise(16_800, 1)]), Request("y")]
    inputs = dict(session_mf.prepare(requests).inputs)
    with torch.no_grad():
        whole = session_mf.model(**inputs).logits
        some = (inputs["input_features_mask"].sum(-1) + 1) // 4 > 0
        assert not some.all()
        for name in ("input_features", "input_features_mask"):
            inputs[name] = inputs[name][some]
        dropped = session_mf.model(**inputs).logits
    assert differ(whole, dropped) < 1e-5


def test_the_library_class_stays_untouched(session_mf, tiny_mf):
    kind = type(session_mf.model.model)
    assert "_build_audio_timestamps" in vars(session_mf.model.model)
    assert vars(kind)["_build_audio_timestamps"].__module__.startswith("transformers.")
    assert "_build_audio_timestamps" not in vars(kind(session_mf.model.config))


def test_inputs_of_two_batches_are_refused_by_the_model(session_mf):
    one, two = (session_mf.prepare([Request("x", [noise(n)])]).inputs for n in (16_000, 32_000))
    with pytest.raises(ValueError, match="audio tokens"):
        session_mf.model(input_ids=one["input_ids"], **{k: two[k] for k in ("input_features", "input_features_mask")})


def test_rotary_time_restarts_at_each_source(session_mf):
    clip = noise(32_000)
    batch = session_mf.prepare([Request("x", [clip, clip]), Request("x", [clip])])
    first, *others = session_mf.extract_audio_embeddings(batch)
    for other in others:
        assert differ(other.projected, first.projected) < 1e-5


# Prompts.


def user_text(session, request: Request) -> str:
    rows = session.prepare([request]).tokens
    return "".join("@" if r.role == "audio" else r.text for r in rows if r.role in ("user", "audio", "marker"))


def test_missing_markers_of_one_source(session_mf):
    text = user_text(session_mf, Request("Name it.", [noise(400)]))
    assert text == "<|im_start|>user\n<|sound_bos|>@<|sound_eos|>\nName it.<|im_end|>\n"


def test_missing_markers_of_several_sources(session_mf):
    text = user_text(session_mf, Request("Name it.", [noise(400), noise(400)]))
    assert text == (
        "<|im_start|>user\nAudio 1: <|sound_bos|>@<|sound_eos|>\nAudio 2: <|sound_bos|>@<|sound_eos|>\nName it.<|im_end|>\n"
    )


def test_explicit_markers_stay_as_written(session_mf):
    text = user_text(session_mf, Request("  A:<audio>\tand <audio><audio> ", [noise(400)] * 3))
    span = "<|sound_bos|>@<|sound_eos|>"
    assert text == f"<|im_start|>user\n  A:{span}\tand {span}{span} <|im_end|>\n"


def test_an_empty_prompt_with_a_source(session_mf):
    assert (
        user_text(session_mf, Request("", [noise(400)]))
        == "<|im_start|>user\n<|sound_bos|>@<|sound_eos|>\n<|im_end|>\n"
    )


def test_roles_of_a_whole_prompt(session_mf):
    requests = [Request("<audio> hm", [noise(400)]), Request("a much longer prompt of text alone, to make padding")]
    rows = session_mf.prepare(requests).tokens
    assert len(rows) == 2 * session_mf.prepare(requests).width
    order = [r.role for r in rows if r.sample_index == 0]
    assert list(dict.fromkeys(order)) == ["padding", "system", "user", "marker", "audio", "assistant"]
    assert [r.source for r in rows if r.role in ("audio", "marker")] == [0, 0, 0]
    assert {r.source for r in rows if r.role not in ("audio", "marker")} == {None}
    assert "".join(r.text for r in rows if r.role == "assistant" and r.sample_index == 1) == "<|im_start|>assistant\n"


def test_a_template_that_changes_the_text_is_refused(mf_copy):
    template = mf_copy / "chat_template.jinja"
    template.write_text(template.read_text().replace("{{ turn.content }}", "{{ turn.content | trim }}"))
    session = load_model(mf_copy, "cpu", torch.float32)
    with pytest.raises(SnapshotError, match="template changes"):
        session.prepare([Request(" spaced ")])


def test_an_audio_id_that_differs_from_the_tokenizer_is_refused(mf_copy):
    config = json.loads((mf_copy / "config.json").read_text())
    (mf_copy / "config.json").write_text(json.dumps(config | {"audio_token_id": 5}))
    with pytest.raises(SnapshotError, match="audio_token_id"):
        load_model(mf_copy, "cpu", torch.float32)


def test_the_memory_of_a_model_goes_with_its_last_reference(tiny_mf):
    """Without waiting for the garbage collector: a mended model must not hold itself."""
    session = load_model(tiny_mf, "cpu", torch.float32)
    watched = weakref.ref(session.model.lm_head.weight)
    gc.disable()
    try:
        del session
        assert watched() is None
    finally:
        gc.enable()


def test_a_model_is_copied_and_pickled_with_what_was_mended(session_mf, mf_requests, mf_case):
    case, _ = mf_case("c_zero_mid")
    batch = session_mf.prepare(mf_requests(case))
    wanted = session_mf.model(**batch.inputs, logits_to_keep=1).logits
    for other in (copy.deepcopy(session_mf.model), pickle.loads(pickle.dumps(session_mf.model))):
        assert torch.equal(other(**batch.inputs, logits_to_keep=1).logits, wanted)
        other.to(torch.bfloat16)
        assert other.model.pos_emb.inv_freq.dtype == torch.float32 == session_mf.model.model.pos_emb.inv_freq.dtype
