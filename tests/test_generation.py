"""Budgets, profiles and what reaches the library's generate."""

from __future__ import annotations

import json
import logging
import warnings

import numpy as np
import pytest
import torch

from audiollm import ArgumentError, Request, RequestError, Waveform, load_model
from audiollm.generation import PROFILES, budget, profile_of

REFERENCE = PROFILES["paper_reference"]
TEXT = Request("Say something.")


def noise(n_samples: int) -> Waveform:
    return Waveform(np.random.default_rng(0).normal(0, 0.1, n_samples).astype(np.float32), 16_000)


def test_the_reference_profile_is_greedy_without_penalty():
    config = REFERENCE.config(7, end_id=1, pad_id=2)
    assert (config.do_sample, config.num_beams, config.repetition_penalty, config.max_new_tokens) == (False, 1, 1.0, 7)
    assert (config.eos_token_id, config.pad_token_id, config.use_cache) == (1, 2, True)
    assert REFERENCE.max_new_tokens == 16_384


def test_an_unknown_profile_names_those_there_are():
    with pytest.raises(ArgumentError, match="'paper_reference'"):
        profile_of("greedy")


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
    assert changed.model.generation_config.to_diff_dict().keys() <= {"transformers_version"}


def test_no_false_reminder_about_a_length_of_1200(session_mf, caplog):
    with caplog.at_level(logging.WARNING):
        session_mf.generate([Request("x", [noise(960_000)])], max_new_tokens=2)
    assert not [r for r in caplog.records if "predefined maximum length" in r.getMessage()]
    assert not logging.getLogger("transformers.generation.stopping_criteria").filters
