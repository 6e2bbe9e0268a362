"""The MOSS-Music definition against golden values, and everything that must not break it.

Golden values: tests/data/moss_music (tiny random weights in the published layout, float32). Tolerances are absolute.
"""

import copy
import json
import shutil
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from audiollm.vendor.moss_music import (
    AudioTokenIds,
    MossAudioConfig,
    MossMusicConfig,
    MossMusicForConditionalGeneration,
    MossMusicProcessor,
    audio_span,
    deepstack,
    log_mel,
    n_frames,
    n_tokens,
    plan_chunks,
    sinusoid_positions,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional

DATA = Path(__file__).parent / "data" / "moss_music"
SPAN = "<|audio_bos|><|AUDIO|><|audio_eos|>"
CASES = ["a_0p5s", "b_5p3s", "c1_400f", "c2_401f", "c3_399f", "d_two", "f_text", "g_short"]
HEARD = [name for name in CASES if name != "f_text"]
ATTENTIONS = ["sdpa", "eager"]
PAD = 300

AUDIO_TOLERANCE = 2e-5
HIDDEN_TOLERANCE = 1e-4


def read_config(**changes):
    content = json.loads((DATA / "tiny" / "config.json").read_text())
    content.update(changes)
    return content


def build(attention="sdpa", content=None):
    """A fresh model: no hook of an earlier test, and none of transformers' recorders, is on it."""
    config = MossMusicConfig.from_dict(content or read_config(), attn_implementation=attention)
    model = MossMusicForConditionalGeneration(config).eval()
    model.load_state_dict(load_file(DATA / "tiny" / "model.safetensors"), strict=True)
    return model


@pytest.fixture(scope="module")
def processor():
    return MossMusicProcessor.from_snapshot(DATA / "tiny")


@pytest.fixture(scope="module", params=ATTENTIONS)
def model(request):
    return build(request.param)


def read_case(name):
    facts = json.loads((DATA / "cases" / f"{name}.json").read_text())
    tensors = load_file(DATA / "cases" / f"{name}.safetensors")
    return SimpleNamespace(name=name, facts=facts, tokens=facts.get("tokens_per_source") or [], **tensors)


@pytest.fixture(scope="module")
def cases():
    return {name: read_case(name) for name in CASES}


def pieces_of(case):
    """The user turn of `prompt_fed` as ordered pieces: text, and token counts where spans stand."""
    user = case.facts["prompt_fed"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
    texts = user.split(SPAN)
    assert len(texts) == len(case.tokens) + 1
    pieces = [texts[0]]
    for count, text in zip(case.tokens, texts[1:], strict=True):
        pieces += [count, text]
    return [piece for piece in pieces if piece != ""]


def batch_of(*rows):
    """Left-padded model inputs of golden cases."""
    width = max(len(row.input_ids) for row in rows)
    mels, seqlens, groups, lengths = [], [], [], []
    inputs = {
        "input_ids": torch.full((len(rows), width), PAD),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.long),
        "audio_input_mask": torch.zeros(len(rows), width, dtype=torch.bool),
    }
    for number, row in enumerate(rows):
        pad = width - len(row.input_ids)
        inputs["input_ids"][number, pad:] = row.input_ids
        inputs["attention_mask"][number, pad:] = 1
        inputs["audio_input_mask"][number, pad + row.audio_positions] = True
        groups.append(len(row.tokens))
        lengths += row.tokens
        for source in range(len(row.tokens)):
            seqlens.append(int(row.mel_lengths[source]))
            mels.append(row.mel[source, :, : seqlens[-1]])
    frames = max(seqlens, default=0)
    padded = [functional.pad(mel, (0, frames - mel.shape[1]), value=7.0) for mel in mels]  # padding must not be read
    inputs["audio_data"] = torch.stack(padded) if padded else torch.zeros(0, 128, 0)
    inputs["audio_data_seqlens"] = torch.tensor(seqlens, dtype=torch.long)
    inputs["audio_token_lengths"] = torch.tensor(lengths, dtype=torch.long)
    inputs["audio_group_sizes"] = torch.tensor(groups, dtype=torch.long)
    return inputs


def run(model, inputs, **options):
    with torch.no_grad():
        return model(**inputs, **options)


def greedy(model, inputs, **options):
    out = model.generate(**inputs, do_sample=False, max_new_tokens=16, eos_token_id=None, pad_token_id=PAD, **options)
    return out[:, inputs["input_ids"].shape[1] :]


def close(left, right, tolerance):
    assert left.shape == right.shape
    if left.numel():
        assert (left.float() - right.float()).abs().max().item() <= tolerance


def hook_counts(model):
    return {name: len(module._forward_hooks) for name, module in model.named_modules()}


# The processor


@pytest.mark.parametrize("name", CASES)
def test_ids_and_positions(processor, cases, name):
    case = cases[name]
    prompt = processor.build_prompt(pieces_of(case))
    assert list(prompt.ids) == case.input_ids.tolist()
    assert list(prompt.audio_positions) == case.audio_positions.tolist()
    for span, facts in zip(prompt.spans, case.facts["spans"], strict=True):
        assert (span.start, span.end, len(span.audio_positions)) == (facts["bos"], facts["eos"], facts["n_audio"])
        assert [[place, prompt.ids[place]] for place in span.marker_positions] == facts["markers"]
        assert list(span.marker_seconds) == [2 * (1 + number) for number in range(len(facts["markers"]))]


def test_ids_come_from_the_snapshot_or_are_the_published_ones(processor, tmp_path):
    assert (processor.ids.audio, processor.ids.start, processor.ids.end) == (303, 306, 307)
    published = AudioTokenIds()
    assert (published.audio, published.start, published.end) == (151654, 151669, 151670)
    assert published.digits == processor.ids.digits == tuple(range(15, 25))
    folder = shutil.copytree(DATA / "tiny", tmp_path / "snapshot")
    (folder / "preprocessor_config.json").write_text('{"processor_class": "MossMusicProcessor", "auto_map": {}}')
    assert MossMusicProcessor.from_snapshot(folder).ids == published
    (folder / "preprocessor_config.json").unlink()
    assert MossMusicProcessor.from_snapshot(folder).ids == published


def test_a_snapshot_is_read_without_network_and_without_its_code(tmp_path, monkeypatch):
    folder = shutil.copytree(DATA / "tiny", tmp_path / "snapshot")
    (folder / "evil.py").write_text("raise SystemExit('code of the snapshot ran')\n")
    settings_path = folder / "tokenizer_config.json"
    content = json.loads(settings_path.read_text())
    content["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", None]}
    settings_path.write_text(json.dumps(content))

    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(MossMusicProcessor.from_snapshot(folder).tokenizer) == 308


def test_a_wrong_snapshot_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder"):
        MossMusicProcessor.from_snapshot(tmp_path / "nowhere")
    folder = shutil.copytree(DATA / "tiny", tmp_path / "snapshot")
    settings_path = folder / "preprocessor_config.json"
    for content, message in [
        ({"mel_config": {"mel_hop_length": 320}}, "mel_hop_length"),
        ({"enable_time_marker": False}, "time markers"),
    ]:
        settings_path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            MossMusicProcessor.from_snapshot(folder)
    (folder / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match="merges"):
        MossMusicProcessor.from_snapshot(folder)


@pytest.mark.parametrize("token", ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_end|>"])
def test_control_tokens_in_text_are_refused(processor, token):
    with pytest.raises(ValueError, match="control token"):
        processor.build_prompt([7, f"what is {token} here?"])


@given(count=st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_spans(count):
    ids = AudioTokenIds(audio=-1, start=-2, end=-3)
    span = audio_span(count, ids)
    assert (span.ids[0], span.ids[-1]) == (-2, -3)
    assert len(span.audio_offsets) == count
    assert all(span.ids[offset] == -1 for offset in span.audio_offsets)
    seconds = sorted(set(span.marker_seconds))
    assert seconds == [2 * (number + 1) for number in range(count // 25)]
    for second in seconds:
        places = [o for o, s in zip(span.marker_offsets, span.marker_seconds, strict=True) if s == second]
        assert "".join(str(ids.digits.index(span.ids[place])) for place in places) == str(second)
        assert sum(offset < places[0] for offset in span.audio_offsets) == second // 2 * 25
    assert len(span.ids) == 2 + count + len(span.marker_offsets)
    if count % 25 == 0:
        assert span.marker_offsets[-1] == len(span.ids) - 2


def test_a_span_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        audio_span(0, AudioTokenIds())


# Mel


@pytest.mark.parametrize("name", HEARD)
def test_mel(processor, cases, name):
    case = cases[name]
    for source, frames in enumerate(case.mel_lengths.tolist()):
        mel = processor.log_mel(getattr(case, f"waveform_{source}"))
        assert mel.dtype == torch.float32
        assert mel.shape == (128, frames)
        close(mel, case.mel[source, :, :frames], 1e-5)
        assert n_tokens(frames) == case.tokens[source]


def test_mel_is_clamped_over_the_whole_source():
    """A loud start lifts the floor of the silence 6 s later, in another chunk, to exactly 8 decades below it."""
    loud = np.random.default_rng(5).standard_normal(16_000)
    mel = log_mel(np.concatenate([loud, 1e-6 * loud, np.zeros(96_000)]))
    floor = mel[:, 700:]
    assert floor.min() == floor.max() == mel.min()
    assert abs((mel.max() - floor.max()).item() - 2.0) < 1e-6


def test_mel_takes_arrays_and_tensors_and_refuses_the_rest():
    noise = np.random.default_rng(6).standard_normal(1000).astype(np.float32)
    assert torch.equal(log_mel(noise), log_mel(torch.from_numpy(noise)))
    assert n_frames(159) == 0
    with pytest.raises(ValueError, match="160"):
        log_mel(noise[:159])
    with pytest.raises(ValueError, match="mono"):
        log_mel(np.stack([noise, noise]))


def test_a_long_mel_does_not_depend_on_blocks(monkeypatch):
    noise = np.random.default_rng(7).standard_normal(16_000 * 3)
    whole = log_mel(noise)
    monkeypatch.setattr("audiollm.vendor.moss_music.mel._BLOCK", 37)
    close(log_mel(noise), whole, 1e-6)


# Chunks and the encoder


def test_chunks_share_a_width_within_a_request_only():
    chunks = plan_chunks([463, 125, 50, 9], [2, 0, 1, 1], 400)
    assert [(c.source, c.start, c.frames, c.width) for c in chunks] == [
        (0, 0, 400, 400),
        (0, 400, 63, 400),
        (1, 0, 125, 400),
        (2, 0, 50, 50),
        (3, 0, 9, 9),
    ]
    with pytest.raises(ValueError, match="add up"):
        plan_chunks([50], [2], 400)
    with pytest.raises(ValueError, match="without a mel frame"):
        plan_chunks([0], [1], 400)


@pytest.mark.parametrize("name", HEARD)
def test_audio_tensors(model, cases, name):
    case = cases[name]
    with torch.no_grad():
        sources = model.get_audio_features(case.mel, case.mel_lengths, [len(case.tokens)])
    assert [len(source.raw) for source in sources] == case.tokens
    close(torch.cat([source.raw for source in sources]), case.encoder_raw, AUDIO_TOLERANCE)
    close(torch.cat([source.projected for source in sources]), case.adapter_projected, AUDIO_TOLERANCE)
    assert len(sources[0].deepstack_raw) == len(sources[0].deepstack_projected) == 3
    for tap in range(3):
        raw = torch.cat([source.deepstack_raw[tap] for source in sources])
        close(raw, getattr(case, f"deepstack_raw_{tap}"), AUDIO_TOLERANCE)
        projected = torch.cat([source.deepstack_projected[tap] for source in sources])
        close(projected, getattr(case, f"deepstack_projected_{tap}"), AUDIO_TOLERANCE)


def test_conv_chunksize_changes_nothing(model, cases):
    case = cases["d_two"]
    other = copy.deepcopy(model)
    other.audio_encoder.config.conv_chunksize = 1
    with torch.no_grad():
        close(other.get_audio_features(case.mel, case.mel_lengths)[0].raw, case.encoder_raw[:58], AUDIO_TOLERANCE)


def test_key_masks(model):
    encoder = copy.deepcopy(model.audio_encoder)
    like = torch.zeros(2, 3, 24, dtype=torch.bfloat16)
    assert encoder.key_mask([3, 3], like) is None
    mask = encoder.key_mask([3, 1], like)
    assert (list(mask.shape), mask.dtype) == ([2, 1, 1, 3], torch.bfloat16)
    low = torch.finfo(torch.bfloat16).min
    assert mask.flatten(1).tolist() == [[0, 0, 0], [0, low, low]]
    encoder.config._attn_implementation_internal = "flash_attention_2"
    assert encoder.key_mask([3, 1], like).tolist() == [[True, True, True], [True, False, False]]


def test_no_source_is_no_feature(model):
    assert model.get_audio_features(torch.zeros(0, 128, 0), [], [0, 0]) == ()


def test_gradients_reach_the_mel(model, cases):
    case = cases["g_short"]
    mel = case.mel.clone().requires_grad_()
    source = model.get_audio_features(mel, case.mel_lengths)[1]
    (source.projected.sum() + source.deepstack_projected[2].sum()).backward()
    assert mel.grad[1].abs().sum() > 0
    assert mel.grad[0].abs().sum() == 0
    inputs = batch_of(case) | {"audio_data": mel}
    mel.grad = None
    labels = inputs["input_ids"].masked_fill(inputs["audio_input_mask"], -100)
    out = model(**inputs, labels=labels)
    logits = out.logits[:, :-1].flatten(0, 1)
    close(out.loss, functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100), 1e-5)
    out.loss.backward()
    assert mel.grad.abs().sum() > 0


# The language model with DeepStack


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_and_logits_on_first_and_later_calls(cases, name, attention):
    model = build(attention)
    assert model.audio_encoder.config._attn_implementation == attention
    assert model.language_model.config._attn_implementation == attention
    for _ in range(3):
        out = run(model, batch_of(cases[name]), output_hidden_states=True)
        assert len(out.hidden_states) == 6
        close(torch.cat(out.hidden_states), cases[name].hidden_states_post, HIDDEN_TOLERANCE)
        close(out.logits[0, -4:], cases[name].logits_last4, HIDDEN_TOLERANCE)
        assert "past_key_values" in out or "cache" in out


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_is_chosen_through_the_config_or_later(attention):
    config = MossMusicConfig.from_dict(read_config())
    config._attn_implementation = attention
    model = MossMusicForConditionalGeneration(config)
    layers = [model.audio_encoder.layers[0].self_attn, model.language_model.layers[0].self_attn]
    assert [layer.config._attn_implementation for layer in layers] == [attention] * 2
    model.set_attn_implementation("eager" if attention == "sdpa" else "sdpa")
    assert attention not in [layer.config._attn_implementation for layer in layers]
    assert MossMusicForConditionalGeneration(MossMusicConfig.from_dict(read_config())).config._attn_implementation == (
        "sdpa"
    )


def test_attention_weights_of_the_language_model(cases):
    out = run(build("eager"), batch_of(cases["g_short"]), output_attentions=True)
    assert [list(weights.shape) for weights in out.attentions] == [[1, 4, 36, 36]] * 5


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids(model, cases, name):
    assert greedy(model, batch_of(cases[name]))[0].tolist() == cases[name].greedy_ids.tolist()


def test_a_mixed_batch_equals_single_requests(model, cases):
    rows = [cases[name] for name in ("a_0p5s", "f_text", "d_two", "g_short", "b_5p3s", "c2_401f")]
    out = run(model, batch_of(*rows), output_hidden_states=True)
    width = out.logits.shape[1]
    for number, row in enumerate(rows):
        pad = width - len(row.input_ids)
        alone = run(model, batch_of(row), output_hidden_states=True)
        for states, single in zip(out.hidden_states, alone.hidden_states, strict=True):
            close(states[number, pad:], single[0], AUDIO_TOLERANCE)
        close(out.logits[number, pad:], alone.logits[0], AUDIO_TOLERANCE)
        close(torch.stack(out.hidden_states)[:, number, pad:], row.hidden_states_post, HIDDEN_TOLERANCE)
        close(out.logits[number, -4:], row.logits_last4, HIDDEN_TOLERANCE)
        assert torch.isfinite(torch.stack(out.hidden_states)).all()


def test_zero_to_five_sources_a_row_equal_single_requests(model, cases, processor):
    """Short and long tails of many lengths, five of them in one request, beside requests with none, one and two."""
    mel = cases["b_5p3s"].mel[0]
    rows = [cases["f_text"]]
    for frames in ([530, 20, 30, 7, 40], [33], [410, 402], [1, 2, 3]):
        tokens = [n_tokens(count) for count in frames]
        prompt = processor.build_prompt([*(piece for count in tokens for piece in ("x ", count)), "?"])
        padded = torch.zeros(len(frames), 128, max(frames))
        for number, count in enumerate(frames):
            padded[number, :, :count] = mel[:, :count]
        ids, positions = torch.tensor(prompt.ids), torch.tensor(prompt.audio_positions)
        rows.append(
            SimpleNamespace(
                tokens=tokens, mel=padded, mel_lengths=torch.tensor(frames), input_ids=ids, audio_positions=positions
            )
        )
    out = run(model, batch_of(*rows), output_hidden_states=True)
    for number, row in enumerate(rows):
        alone = run(model, batch_of(row), output_hidden_states=True)
        length = len(row.input_ids)
        close(torch.stack(out.hidden_states)[:, number, -length:], torch.cat(alone.hidden_states), AUDIO_TOLERANCE)
        close(out.logits[number, -length:], alone.logits[0], AUDIO_TOLERANCE)


def test_a_mixed_batch_generates_the_golden_ids(model, cases):
    rows = [cases[name] for name in CASES]
    found = greedy(model, batch_of(*rows))
    for number, row in enumerate(rows):
        assert found[number].tolist() == row.greedy_ids.tolist(), row.name
    assert not any(isinstance(h, deepstack.Injection) for m in model.modules() for h in m._forward_hooks.values())


def test_generation_without_a_cache_equals_golden(model, cases):
    rows = [cases["g_short"], cases["a_0p5s"]]
    found = greedy(model, batch_of(*rows), use_cache=False)
    assert found.tolist() == [row.greedy_ids.tolist() for row in rows]


def test_audio_is_encoded_and_injected_at_prefill_only(cases, monkeypatch):
    model = build()
    encoded, injected, widths = [], [], []
    model.audio_encoder.register_forward_hook(lambda *_: encoded.append(1))
    model.language_model.layers[0].register_forward_hook(lambda m, a, out: widths.append(out.shape[1]))
    handed = []
    model.register_forward_pre_hook(lambda m, a, given: handed.append("audio_data" in given), with_kwargs=True)
    whole = deepstack.Injection.__call__
    monkeypatch.setattr(
        deepstack.Injection, "__call__", lambda self, *a: (injected.append(a[2].shape[1]), whole(self, *a))[1]
    )
    greedy(model, batch_of(cases["d_two"]))
    assert encoded == [1]
    assert widths == [137] + [1] * 15
    assert injected == [137] * 3
    assert handed == [True] + [False] * 15


@pytest.mark.parametrize("cache_name", ["past_key_values", "cache"])
def test_decode_steps_by_hand_take_the_cache_by_either_name(model, cases, cache_name):
    case = cases["d_two"]
    inputs = batch_of(case)
    out = run(model, inputs, use_cache=True)
    found = []
    mask = inputs["attention_mask"]
    for _ in range(6):
        field = "cache" if "cache" in out.keys() else "past_key_values"  # noqa: SIM118  the fields of an output
        token = out.logits[:, -1:].argmax(-1)
        found.append(token.item())
        mask = functional.pad(mask, (0, 1), value=1)
        kept = getattr(out, field)
        plain = {"input_ids": token, "attention_mask": mask, cache_name: copy.deepcopy(kept), "use_cache": True}
        audio = {key: value for key, value in inputs.items() if key.startswith("audio_")}
        repeated = run(model, plain | audio)  # audio handed in again behind a filled cache must change nothing
        out = run(model, plain | {cache_name: kept})
        assert torch.equal(out.logits, repeated.logits)
        longer = inputs | {"input_ids": torch.cat([inputs["input_ids"], torch.tensor([found])], 1)}
        longer["attention_mask"] = mask
        longer["audio_input_mask"] = functional.pad(inputs["audio_input_mask"], (0, len(found)))
        close(out.logits[:, -1], run(model, longer).logits[:, -1], HIDDEN_TOLERANCE)
    assert found == case.greedy_ids[:6].tolist()


def test_audio_behind_a_filled_cache_is_refused(model, cases):
    out = run(model, batch_of(cases["f_text"]), use_cache=True)
    field = "cache" if "cache" in out.keys() else "past_key_values"  # noqa: SIM118
    with pytest.raises(ValueError, match="filled cache"):
        run(model, batch_of(cases["g_short"]) | {"attention_mask": None, field: out[field]})


def test_logits_to_keep(model, cases):
    inputs = batch_of(cases["a_0p5s"], cases["g_short"])
    everything = run(model, inputs).logits
    close(run(model, inputs, logits_to_keep=1).logits, everything[:, -1:], AUDIO_TOLERANCE)
    close(run(model, inputs, logits_to_keep=torch.tensor([3, 40])).logits, everything[:, [3, 40]], AUDIO_TOLERANCE)
    assert isinstance(run(model, inputs, return_dict=False), tuple)


def test_position_ids_follow_the_padding(model, cases):
    seen = []
    handle = model.language_model.rotary_emb.register_forward_pre_hook(lambda m, args: seen.append(args[1]))
    try:
        run(model, batch_of(cases["d_two"], cases["a_0p5s"]))
    finally:
        handle.remove()
    assert seen[0][0].tolist() == list(range(137))
    assert seen[0][1].tolist() == [0] * 89 + list(range(48))


# Hooks


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_users_hooks_see_the_value_after_injection(cases, attention, when):
    case = cases["d_two"]
    inputs = batch_of(case)
    model = build(attention)
    outputs, taken_in = {}, {}

    def attach():
        for number, layer in enumerate(model.language_model.layers):
            layer.register_forward_hook(lambda m, a, out, number=number: outputs.update({number: out}))
            layer.register_forward_pre_hook(lambda m, args, number=number: taken_in.update({number: args[0]}))

    if when == "before":
        attach()
    run(model, inputs, output_hidden_states=True)
    if when == "after":
        attach()
    for _ in range(2):
        out = run(model, inputs, output_hidden_states=True)
        for layer in range(4):
            close(outputs[layer][0], case.hidden_states_post[layer + 1], HIDDEN_TOLERANCE)
            assert torch.equal(outputs[layer], out.hidden_states[layer + 1])
            assert torch.equal(outputs[layer], taken_in[layer + 1])


def test_a_users_prepended_hook_and_edit_come_after_injection(cases):
    case = cases["a_0p5s"]
    model = build()
    seen = []
    model.language_model.layers[1].register_forward_hook(lambda m, a, out: seen.append(out), prepend=True)
    model.language_model.layers[1].register_forward_hook(lambda m, a, out: out * 0)
    inside = []
    model.language_model.layers[2].register_forward_pre_hook(lambda m, args: inside.append(args[0]))
    run(model, batch_of(case))
    close(seen[0][0], case.hidden_states_post[2], HIDDEN_TOLERANCE)
    assert inside[0].abs().max() == 0


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize(
    "place", ["language_model.layers.1", "language_model.norm", "audio_encoder.layers.2", "lm_head"]
)
def test_no_hook_is_left_after_an_error(cases, error, place):
    model = build()
    inputs = batch_of(cases["d_two"], cases["g_short"])
    expected = run(model, inputs, output_hidden_states=True)
    before = hook_counts(model)

    def fail(*_):
        raise error

    handle = model.get_submodule(place).register_forward_hook(fail)
    for call in (lambda: run(model, inputs), lambda: greedy(model, inputs)):
        with pytest.raises(error):
            call()
    handle.remove()
    assert hook_counts(model) == before
    after = run(model, inputs, output_hidden_states=True)
    assert torch.equal(torch.stack(after.hidden_states), torch.stack(expected.hidden_states))
    assert torch.equal(after.logits, expected.logits)


def test_no_hook_is_left_by_an_interrupt_at_any_line(cases):
    """A KeyboardInterrupt at each line in turn that runs while hooks are put on, live, or taken off."""
    model = build()
    inputs = batch_of(cases["g_short"])
    expected = run(model, inputs).logits
    before = hook_counts(model)
    files = (deepstack.__file__, sys.modules[torch.nn.Module.__module__].__file__)
    reached = 0

    class Tracer:
        def __init__(self, fuse):
            self.fuse = fuse
            self.live = False

        def __call__(self, frame, event, arg):
            name, file = frame.f_code.co_name, frame.f_code.co_filename
            if file != files[0] and not (file == files[1] and name == "register_forward_hook"):
                return None
            if event == "line":
                self.fuse -= 1
                if self.fuse == 0:
                    raise KeyboardInterrupt
            return self

    for fuse in range(1, 2000):
        tracer = Tracer(fuse)
        previous = sys.gettrace()
        sys.settrace(tracer)
        try:
            run(model, inputs)
        except KeyboardInterrupt:
            reached = fuse
        finally:
            sys.settrace(previous)
        assert hook_counts(model) == before, fuse
        if tracer.fuse > 0:
            break
    assert reached > 30
    assert torch.equal(run(model, inputs).logits, expected)


def test_a_call_from_inside_a_hook_and_another_thread_are_both_right(cases):
    model = build()
    outer, inner = batch_of(cases["d_two"]), batch_of(cases["a_0p5s"])
    expected = run(model, outer).logits, run(model, inner).logits
    nested = []

    def call(*_):
        if not nested:
            nested.append(None)
            nested.append(run(model, inner).logits)
            worker = threading.Thread(target=lambda: nested.append(run(model, inner).logits))
            worker.start()
            worker.join()

    model.language_model.layers[0].register_forward_hook(call)
    assert torch.equal(run(model, outer).logits, expected[0])
    close(nested[1], expected[1], AUDIO_TOLERANCE)
    close(nested[2], expected[1], AUDIO_TOLERANCE)


# Refusals


def test_gradient_checkpointing_in_training_is_refused(cases):
    model = build()
    inputs = batch_of(cases["g_short"])
    expected = run(model, inputs).logits
    model.gradient_checkpointing_enable()
    assert torch.equal(run(model, inputs).logits, expected)
    model.train()
    with pytest.raises(ValueError, match="backward pass"):
        model(**inputs)
    model.gradient_checkpointing_disable()
    model(**inputs).logits.sum().backward()


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_beams_and_return_sequences_are_refused_with_audio(model, cases, options):
    with pytest.raises(ValueError, match="repeat the request"):
        model.generate(**batch_of(cases["d_two"]), max_new_tokens=2, pad_token_id=PAD, **options)
    text = batch_of(cases["f_text"])
    text = {name: text[name] for name in ("input_ids", "attention_mask")}
    assert len(model.generate(**text, max_new_tokens=2, pad_token_id=PAD, **options)) >= 1


def test_inputs_that_do_not_fit_are_refused(model, cases):
    good = batch_of(cases["d_two"], cases["a_0p5s"])
    bad = [
        ({"audio_group_sizes": None}, "audio_group_sizes is missing"),
        ({"audio_group_sizes": torch.tensor([1, 1])}, "one entry"),
        ({"audio_group_sizes": torch.tensor([1, 2])}, r"audio_input_mask\[0\]"),
        ({"audio_group_sizes": torch.tensor([3])}, "one entry"),
        ({"audio_data_seqlens": None}, "needs audio_data_seqlens"),
        ({"audio_data_seqlens": torch.tensor([463, 133, 50])}, "ceil"),
        ({"audio_data_seqlens": torch.tensor([464, 125, 50]), "audio_token_lengths": None}, "464 frames"),
        ({"audio_token_lengths": torch.tensor([58, 16, 8])}, "ceil"),
        ({"audio_input_mask": good["audio_input_mask"][:, 1:]}, "as wide as the prompt"),
        ({"audio_input_mask": good["audio_input_mask"].roll(1, 0)}, r"audio_input_mask\[0\]"),
        ({"audio_data": good["audio_data"][:, :64]}, "log-mel"),
        ({"audio_data": good["audio_data"][:2]}, "log-mel"),
        ({"audio_data": None}, "holds no source"),
        ({"input_ids": None}, "exactly one"),
        ({"cache": object(), "past_key_values": object()}, "once"),
        ({"labels": good["input_ids"], "logits_to_keep": 1}, "labels"),
    ]
    before = hook_counts(model)
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            run(model, good | change)
    with pytest.raises(TypeError, match="output_hidden_states"):
        run(model, good, output_hidden_states=[1])
    assert hook_counts(model) == before


# Sizes, configuration, dtypes


def test_the_full_model_has_the_published_tensors():
    names = json.loads((DATA / "real_state_dict_keys.json").read_text())
    config = MossMusicConfig.from_dict(json.loads((DATA / "real_config.json").read_text()))
    with torch.device("meta"):
        model = MossMusicForConditionalGeneration(config)
    assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == names
    assert len(names) == 901
    assert sum(parameter.numel() for parameter in model.parameters()) == 9_052_463_488
    assert config.get_text_config() is config.get_text_config(decoder=True) is config.language_config
    assert config.audio_config.chunk_frames == 400
    model.recompute_buffers("cpu")
    assert all(buffer.device.type == "cpu" for buffer in model.buffers())


@pytest.mark.parametrize("empty", ["absent", "null"])
def test_keys_that_may_be_absent(cases, empty):
    content = read_config()
    audio = content["audio_config"]
    for part, name in [(audio, "n_window"), (audio, "conv_chunksize"), (content, "deepstack_num_inject_layers")]:
        if empty == "absent":
            del part[name]
        else:
            part[name] = None
    model = build(content=content)
    assert (model.config.audio_config.chunk_frames, model.config.audio_config.conv_chunksize) == (400, 64)
    assert model.config.n_injected == 3
    close(run(model, batch_of(cases["d_two"])).logits[0, -4:], cases["d_two"].logits_last4, HIDDEN_TOLERANCE)


def test_fewer_injected_layers(cases):
    case = cases["d_two"]
    out = run(build(content=read_config(deepstack_num_inject_layers=1)), batch_of(case), output_hidden_states=True)
    close(out.hidden_states[1][0], case.hidden_states_post[1], HIDDEN_TOLERANCE)
    assert (out.hidden_states[2][0] - case.hidden_states_post[2]).abs().max() > 0.1


def test_model_types():
    content = read_config(model_type="moss_audio")
    config = MossMusicConfig.from_dict(content)
    assert type(config) is MossAudioConfig
    assert config.to_dict()["model_type"] == "moss_audio"
    assert content == read_config(model_type="moss_audio")
    build(content=content)
    with pytest.raises(ValueError, match="moss_talk"):
        MossMusicConfig.from_dict(read_config(model_type="moss_talk"))


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("audio_config", "downsample_rate", 4, "downsample_rate"),
        ("audio_config", "output_dim", 30, "projection"),
        ("audio_config", "activation_function", "relu", "relu"),
        ("audio_config", "deepstack_encoder_layer_indexes", [1, 6, 3], "rising"),
        ("audio_config", "encoder_attention_heads", 5, "multiple"),
        ("audio_config", "n_window", 7000, "max_source_positions"),
        ("audio_config", "conv_chunksize", 0, "at least 1"),
        ("language_config", "model_type", "llama", "qwen3"),
        (None, "deepstack_num_inject_layers", 4, "3 taps"),
        (None, "vocab_size", 5, "vocab_size"),
    ],
)
def test_configs_that_ask_for_something_else_are_refused(part, name, value, message):
    content = read_config()
    (content[part] if part else content)[name] = value
    with pytest.raises(ValueError, match=message):
        MossMusicConfig.from_dict(content)


def test_a_saved_config_reads_back(tmp_path):
    config = MossMusicConfig.from_dict(read_config())
    config.save_pretrained(tmp_path)
    assert MossMusicConfig.from_dict(json.loads((tmp_path / "config.json").read_text())).to_dict() == config.to_dict()


def expected_inv_freq():
    return 1.0 / 1e6 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_stay_float32_whatever_the_model_is_cast_to(cases, dtype):
    model = build().to(dtype)
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert torch.equal(model.language_model.rotary_emb.inv_freq, expected_inv_freq())
    with torch.inference_mode(), torch.device("meta"):
        table = sinusoid_positions(50, 24)
    assert (table.dtype, table.device.type) == (torch.float32, "cpu")
    steps = torch.arange(12, dtype=torch.float64) * (-np.log(1e4) / 11)
    angles = torch.arange(50, dtype=torch.float64)[:, None] * steps.exp()
    close(table.double(), torch.cat([angles.sin(), angles.cos()], 1), 1e-5)
    back = model.float()
    back.load_state_dict(load_file(DATA / "tiny" / "model.safetensors"), strict=True)
    assert torch.equal(run(back, batch_of(cases["d_two"])).logits, run(build(), batch_of(cases["d_two"])).logits)


def test_half_leaves_the_tables_alone(cases):
    for cast in (lambda m: m.half(), lambda m: m.language_model.half(), lambda m: m.bfloat16(), lambda m: m.double()):
        model = build()
        cast(model)
        assert torch.equal(model.language_model.rotary_emb.inv_freq, expected_inv_freq())


def test_a_model_filled_from_the_meta_device_equals_one_built_on_the_cpu(cases):
    with torch.device("meta"):
        model = MossMusicForConditionalGeneration(MossMusicConfig.from_dict(read_config())).eval()
    weights = load_file(DATA / "tiny" / "model.safetensors")
    assert sorted(weights) == sorted(model.state_dict())
    for name, tensor in weights.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    model.recompute_buffers("cpu")
    inputs = batch_of(cases["d_two"])
    assert torch.equal(run(model, inputs).logits, run(build(), inputs).logits)
    with torch.device("meta"):
        other = MossMusicForConditionalGeneration(MossMusicConfig.from_dict(read_config())).eval()
    other.to_empty(device="cpu").load_state_dict(weights, strict=True)
    assert torch.equal(run(other, inputs).logits, run(build(), inputs).logits)


def test_bfloat16_runs_end_to_end_with_float32_mel(model, cases):
    case = cases["d_two"]
    small = copy.deepcopy(model).to(torch.bfloat16)
    inputs = batch_of(case, cases["a_0p5s"])
    assert inputs["audio_data"].dtype == torch.float32
    with torch.no_grad():
        source = small.get_audio_features(case.mel, case.mel_lengths)[0]
    assert source.raw.dtype == source.projected.dtype == torch.bfloat16
    error = (source.raw.float() - case.encoder_raw[:58]).norm() / case.encoder_raw[:58].norm()
    assert error < 0.03
    out = run(small, inputs, output_hidden_states=True)
    assert {states.dtype for states in out.hidden_states} == {torch.bfloat16}
    assert torch.isfinite(out.logits).all()
    alone = run(small, batch_of(case), output_hidden_states=True).hidden_states[-1][0]
    cosine = functional.cosine_similarity(alone.float(), case.hidden_states_post[-1], dim=-1)
    assert cosine.mean() > 0.99
    assert greedy(small, inputs).shape == (2, 16)
