"""Budgets, profiles and what reaches the library's generate."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from looking import FAMILIES

from audiollm import ArgumentError, Request, RequestError, SessionBusyError, Waveform, load_model
from audiollm.generation import GREEDY as REFERENCE
from audiollm.generation import Watcher, budget, library_config, profile_of

TEXT = Request("Say something.")


def noise(n_samples: int) -> Waveform:
    return Waveform(np.random.default_rng(0).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


def test_the_reference_profile_is_greedy_without_penalty():
    config = library_config(REFERENCE.settings(7, end_id=1, pad_id=2))
    assert (config.do_sample, config.num_beams, config.repetition_penalty, config.max_new_tokens) == (False, 1, 1.0, 7)
    assert (config.eos_token_id, config.pad_token_id, config.use_cache) == (1, 2, True)
    assert REFERENCE.max_new_tokens == 16_384


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(ArgumentError, match="'paper_reference'"):
        profile_of("greedy", {"paper_reference": REFERENCE})


@pytest.mark.parametrize("asked", (0, -1, 1.5, True, "8"))
def test_a_budget_must_be_a_positive_whole_number(asked):
    with pytest.raises(ArgumentError, match="max_new_tokens"):
        budget(REFERENCE, asked, 10, 100)


def test_a_budget_that_fits_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert budget(REFERENCE, 90, 10, 100) == 90
        assert budget(REFERENCE, None, 10, 20_000) == 16_384


@pytest.mark.parametrize("asked", (91, None))
def test_less_than_asked_warns_once(asked):
    with pytest.warns(UserWarning, match="only 90 of") as caught:
        assert budget(REFERENCE, asked, 10, 100) == 90
    assert len(caught) == 1


def test_no_room_at_all_says_to_send_the_request_alone():
    with pytest.raises(RequestError, match="alone") as caught:
        budget(REFERENCE, 1, 100, 100)
    assert caught.value.code == "too_long"


@pytest.fixture
def short_context(mf_copy):
    """A session whose context is just as wide as TEXT's prompt and four tokens."""
    config = json.loads((mf_copy / "config.json").read_text())
    width = load_model(mf_copy, "cpu", torch.float32).prepare([TEXT]).width
    config["text_config"]["max_position_embeddings"] = width + 4
    (mf_copy / "config.json").write_text(json.dumps(config))
    return load_model(mf_copy, "cpu", torch.float32), width


def test_generate_keeps_to_the_context(short_context):
    session, width = short_context
    with pytest.warns(UserWarning, match="only 4 of"):
        text = session.generate([TEXT])
    assert text == session.generate([TEXT], max_new_tokens=4)
    with pytest.raises(RequestError, match="context holds") as caught:
        session.prepare([Request("Say something much longer than that.")])
    assert caught.value.code == "too_long"
    assert str(width + 4) in str(caught.value)


def test_generate_stops_at_the_family_s_end_token(session_mf, monkeypatch):
    batch = session_mf.prepare([TEXT])
    with torch.no_grad():
        first = int(session_mf.model(**batch.inputs).logits[0, -1].argmax())
    monkeypatch.setattr(type(session_mf._adapter), "end_id", first)
    assert session_mf.generate([TEXT], max_new_tokens=8) == [session_mf.processor.tokenizer.decode([first])]


def test_the_end_token_is_the_tokenizer_s_im_end(session_mf):
    assert session_mf.processor.tokenizer.decode([session_mf._adapter.end_id]) == "<|im_end|>"


def test_nothing_is_inherited_from_the_snapshots_generation_config(mf_copy, session_mf):
    settings = json.loads((mf_copy / "generation_config.json").read_text())
    settings |= {
        "do_sample": True,
        "temperature": 9.0,
        "repetition_penalty": 5.0,
        "max_new_tokens": 1,
        "no_repeat_ngram_size": 1,
    }
    (mf_copy / "generation_config.json").write_text(json.dumps(settings))
    changed = load_model(mf_copy, "cpu", torch.float32)
    assert changed.generate([TEXT], max_new_tokens=12) == session_mf.generate([TEXT], max_new_tokens=12)
    assert changed.model.generation_config.to_diff_dict().keys() <= {
        "transformers_version",
        "eos_token_id",
        "pad_token_id",
    }


def test_no_false_reminder_about_a_length_of_1200(session_mf, caplog):
    with caplog.at_level(logging.WARNING):
        session_mf.generate([Request("x", [noise(960_000)])], max_new_tokens=2)
    assert not [r for r in caplog.records if "predefined maximum length" in r.getMessage()]
    assert not logging.getLogger("transformers.generation.stopping_criteria").filters


# Both families: sampling, streaming, stopping, one call at a time.


@pytest.fixture(scope="module", params=("mf", "moss"))
def session(request, session_mf, session_moss):
    return {"mf": session_mf, "moss": session_moss}[request.param]


REQUESTS = (Request("Say <audio> it.", [noise(16_000)]), Request("Text alone, rather longer."))


def test_sampling_follows_the_family(session):
    numbers = {"music_flamingo": (0.7, 0.9), "moss_music": (1.0, 0.8)}[session.family]
    settings = session.generations([TEXT], "generic_sampled", 2)[0].settings
    assert (settings["temperature"], settings["top_p"]) == numbers
    assert (settings["top_k"], settings["seed"], settings["do_sample"]) == (50, 3407, True)


def test_sampling_repeats_itself_and_gives_the_random_state_back(session):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = session.generate(REQUESTS, "generic_sampled", 12)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert session.generate(REQUESTS, "generic_sampled", 12) == first
    assert session.generate(REQUESTS, max_new_tokens=12) != first


def test_one_stream_a_call_is_torch_s_own(session):
    """The profile equals the library's sampling after manual_seed(3407), so results carry over to plain scripts."""
    batch = session.prepare(REQUESTS)
    wanted = session.generations(REQUESTS, "generic_sampled", 8)
    settings = {k: v for k, v in wanted[0].settings.items() if k != "seed"}
    state = torch.get_rng_state()
    torch.manual_seed(3407)
    ids = session.model.generate(**batch.inputs, **settings)[:, batch.width :]
    torch.set_rng_state(state)
    for answer, row in zip(wanted, ids.tolist(), strict=True):
        assert list(answer.token_ids) == row[: len(answer.token_ids)]


@pytest.mark.parametrize("error", (RuntimeError, KeyboardInterrupt))
def test_random_state_and_hooks_come_back_after_an_error(session, error):
    calls = []

    def fail(row: int, text: str) -> None:
        calls.append(text)
        if len(calls) == 3:
            raise error("inside")

    def hooks() -> list:
        return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in session.model.modules()]

    before, was = torch.get_rng_state(), hooks()
    wanted = session.generate(REQUESTS, "generic_sampled", 12)
    with pytest.raises(error):
        session.generations(REQUESTS, "generic_sampled", 40, on_text=fail)
    assert torch.equal(before, torch.get_rng_state()) and hooks() == was
    assert session.generate(REQUESTS, "generic_sampled", 12) == wanted


@pytest.mark.parametrize("profile", ("paper_reference", "generic_sampled"))
def test_streamed_text_adds_up_to_the_answer(session, profile):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    answers = session.generations(REQUESTS, profile, 24, on_text=lambda row, text: pieces[row].append(text))
    for row, answer in enumerate(answers):
        assert "".join(pieces[row]) == answer.text


def test_streaming_sends_whole_characters():
    sent: list[str] = []
    words = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"\xf0\x9f", 5: b"\x8e\xb5", 6: b"\xff"}
    decode = lambda ids: b"".join(words[i] for i in ids).decode(errors="replace")  # noqa: E731
    watcher = Watcher(2, 9, decode, lambda row, text: sent.append(text), None)
    row = [0, 0]
    for token in (1, 2, 3, 4, 5, 6, 9, 1, 1):
        row.append(token)
        watcher(torch.tensor([row]), None)
    watcher.finish()
    assert sent == ["a", "é", "🎵", "�"]  # nothing after the end token 9, and the broken byte once it is sure


def test_a_stop_function_is_asked_after_every_token(session):
    asked = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 3

    answers = session.generations(REQUESTS, max_new_tokens=40, stop=stop)
    assert [(len(a.token_ids), a.finish_reason) for a in answers] == [(3, "stopped")] * 2


def test_a_stop_event_from_another_thread(session):
    event = threading.Event()
    answers = session.generations([TEXT], max_new_tokens=2_000, on_text=lambda *_: event.set(), stop=event)
    assert answers[0].finish_reason == "stopped" and len(answers[0].token_ids) < 100


def test_finish_reasons_and_widths(session, monkeypatch):
    batch = session.prepare(REQUESTS)
    answers = session.generations(REQUESTS, max_new_tokens=3)
    assert [a.finish_reason for a in answers] == ["length"] * 2
    assert [a.prompt_width for a in answers] == [batch.width] * 2
    assert [a.prompt_tokens for a in answers] == batch.inputs["attention_mask"].sum(1).tolist()
    monkeypatch.setattr(type(session._adapter), "end_id", answers[0].token_ids[1])
    ended = session.generations(REQUESTS[:1], max_new_tokens=30)[0]
    assert ended.finish_reason == "stop" and ended.token_ids == answers[0].token_ids[:2]


def test_settings_cannot_be_changed_afterwards(session):
    answer = session.generations([TEXT], max_new_tokens=1)[0]
    with pytest.raises(TypeError):
        answer.settings["temperature"] = 2.0


def test_a_second_call_meanwhile_is_refused(session):
    batch = session.prepare([TEXT])
    calls = (
        lambda: session.generate([TEXT], max_new_tokens=1),
        lambda: session.forward(batch),
        lambda: session.extract_audio_embeddings(batch),
        lambda: session.forward(batch, output_hidden_states=True),
        lambda: session.extract_contextual_embeddings(session.prepare(REQUESTS), (1,)),
    )
    refused = []

    def inside(*args) -> None:
        for call in calls:
            with pytest.raises(SessionBusyError) as caught:
                call()
            refused.append(caught.value.code)

    handle = session._adapter.blocks()[0].register_forward_pre_hook(inside)
    session.forward(batch)
    handle.remove()
    assert refused == ["busy"] * len(calls)
    other = threading.Thread(target=lambda: refused.append(session.generate([TEXT], max_new_tokens=1)))
    other.start()
    other.join()
    assert isinstance(refused[-1], list)  # free again, from any thread


def test_beams_and_several_sequences_are_refused_with_audio(session):
    inputs = session.prepare(REQUESTS).inputs
    for asked in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ValueError, match="repeat the request"):
            session.model.generate(**inputs, max_new_tokens=2, **asked)
    assert len(session.model.generate(**session.prepare([TEXT]).inputs, max_new_tokens=2, num_beams=2)) == 1


@pytest.mark.parametrize("arguments", ({"on_text": "print"}, {"stop": True}))
def test_callbacks_must_be_callable(session, arguments):
    with pytest.raises(ArgumentError):
        session.generations([TEXT], max_new_tokens=1, **arguments)


def test_two_sessions_that_sample_at_once_draw_as_alone(session_mf, session_moss):
    sessions = (session_mf, session_moss)
    alone = [s.generate([TEXT], "generic_sampled", 24) for s in sessions]
    before, found = torch.get_rng_state(), {}
    threads = [
        threading.Thread(target=lambda k=k: found.__setitem__(k, sessions[k].generate([TEXT], "generic_sampled", 24)))
        for k in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[k] for k in range(2)] == alone
    assert torch.equal(before, torch.get_rng_state())


def test_the_random_state_comes_back_though_that_is_interrupted(session, monkeypatch):
    before, put_back, calls = torch.get_rng_state(), torch.set_rng_state, []

    def interrupted(state):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        put_back(state)

    monkeypatch.setattr(torch, "set_rng_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate([TEXT], "generic_sampled", 2)
    monkeypatch.undo()
    assert torch.equal(before, torch.get_rng_state())
    assert session.generate([TEXT], max_new_tokens=1)  # free again


def test_an_answer_can_be_stored(session):
    answer = session.generations([TEXT], max_new_tokens=2)[0]
    for again in (pickle.loads(pickle.dumps(answer)), copy.deepcopy(answer)):
        assert (again.text, again.token_ids, dict(again.settings)) == (
            answer.text,
            answer.token_ids,
            dict(answer.settings),
        )


def test_a_callback_may_sample_from_another_session(session_mf, session_moss):
    wanted = session_mf.generate([TEXT], "generic_sampled", 4)
    inner: list[list[str]] = []
    found = session_mf.generations(
        [TEXT],
        "generic_sampled",
        4,
        on_text=lambda *_: inner.append(session_moss.generate([TEXT], "generic_sampled", 2)),
    )
    assert [a.text for a in found] == wanted
    assert all(texts == session_moss.generate([TEXT], "generic_sampled", 2) for texts in inner)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_of_ones_own_is_another_stream_and_the_same_every_time(family, request):
    session = request.getfixturevalue(family)
    ask = [Request("hello there")]
    own, again = (session.generations(ask, "generic_sampled", 6, seed=11)[0] for _ in range(2))
    assert own.token_ids == again.token_ids and own.settings["seed"] == 11
    assert own.token_ids != session.generations(ask, "generic_sampled", 6)[0].token_ids
    assert session.generate(ask, "generic_sampled", 6, seed=11) == [own.text]


@pytest.mark.parametrize(
    ("seed", "profile"),
    [(-1, "generic_sampled"), (2**63, "generic_sampled"), (1.5, "generic_sampled"), (3, "paper_reference")],
)
def test_a_seed_that_cannot_be_is_refused(session_moss, seed, profile):
    with pytest.raises(ArgumentError, match="seed"):
        session_moss.generations([Request("hello there")], profile, 2, seed=seed)
