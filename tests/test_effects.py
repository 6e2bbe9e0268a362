"""What an edit changes: states, probabilities and answers against the session's own, by hand; and the figures of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from looking import mixed_requests

from audiollm import ArgumentError, edits
from audiollm.analysis import edit_effect
from audiollm.plots import effect_map, next_token_bars


def doubled(session, **where):
    return session.edit({"resid[1]": edits.scale(2.0)}, **where)


@pytest.fixture
def effect(session, batch):
    return edit_effect(session, batch, doubled(session, source=1))


def test_states_are_those_of_the_two_runs(session, batch, effect):
    plain = session.forward(batch, output_hidden_states=True).hidden_states
    with doubled(session, source=1):
        after = session.forward(batch, output_hidden_states=True).hidden_states
    assert effect.layers == tuple(range(session.n_layers + 1))
    rows = effect.rows
    assert len(rows) == int(batch.inputs["attention_mask"].sum())
    for k in effect.layers:
        was, now = (states[k][rows.sample_index, rows.position] for states in (plain, after))
        np.testing.assert_allclose(effect.norms_before[k], was.norm(dim=-1), rtol=1e-4)
        np.testing.assert_allclose(effect.norms_after[k], now.norm(dim=-1), rtol=1e-4)
        np.testing.assert_allclose(effect.cosine[k], torch.cosine_similarity(was, now), atol=1e-5)
    mine = effect.source(1)
    np.testing.assert_allclose(mine.norms_after[1], 2 * mine.norms_before[1], rtol=1e-5)
    assert (mine.rows.source == 1).all() and len(mine.rows) == batch.timeline[1].n_tokens
    assert (effect.source(0).rows.sample_index == 0).all() and (mine.rows.sample_index == 1).all()


def test_only_what_depends_on_the_rows_changes(effect):
    """Request 0 and 2 are of no concern, and in request 1 nothing before the source is: attention is causal."""
    samples, positions = effect.rows.sample_index, effect.rows.position
    first = effect.source(1).rows.position[0]
    still = (samples != 1) | (positions < first)
    np.testing.assert_allclose(effect.cosine[:, still], 1, atol=1e-5)
    assert effect.cosine[-1, ~still].min() < 0.999
    assert effect.divergence[1] > 1e-6 > max(effect.divergence[0], effect.divergence[2])


def test_probabilities_and_divergence_by_hand(session, batch, effect):
    before = session.forward(batch).logits[:, -1].double().softmax(-1)
    with doubled(session, source=1):
        after = session.forward(batch).logits[:, -1].double().softmax(-1)
    wanted = torch.nn.functional.kl_div(after.log(), before, reduction="none").sum(-1)
    np.testing.assert_allclose(effect.divergence, wanted, atol=1e-6)
    for b, tokens in enumerate(effect.next_tokens):
        assert {token.id for token in tokens} == {
            *before[b].topk(10).indices.tolist(),
            *after[b].topk(10).indices.tolist(),
        }
        for token in tokens:
            assert token.before == pytest.approx(float(before[b, token.id]), rel=1e-3)
            assert token.after == pytest.approx(float(after[b, token.id]), rel=1e-3)
            assert token.text == session.processor.tokenizer.decode([token.id])
        most = [max(token.before, token.after) for token in tokens]
        assert most == sorted(most, reverse=True)
    assert len(edit_effect(session, batch, doubled(session), top_k=1).next_tokens[0]) in (1, 2)


def test_answers_are_those_of_the_two_generations(session, batch, effect):
    assert effect.answers_before == effect.answers_after == ()
    told = edit_effect(session, batch, doubled(session, steps="all"), max_new_tokens=3)
    plain = session.generations(mixed_requests(), max_new_tokens=3)
    with doubled(session, steps="all"):
        after = session.generations(mixed_requests(), max_new_tokens=3)
    assert [a.token_ids for a in told.answers_before] == [a.token_ids for a in plain]
    assert [a.token_ids for a in told.answers_after] == [a.token_ids for a in after]
    assert len(told.rows) == len(effect.rows), "generated tokens are no rows of the prompt"
    prefill = edit_effect(session, batch, doubled(session))
    np.testing.assert_allclose(told.norms_after, prefill.norms_after, rtol=1e-4)
    np.testing.assert_allclose(told.divergence, prefill.divergence, atol=1e-5)


def test_nothing_changes_without_a_block_and_blocks_nest_in_order(session, batch):
    nothing = edit_effect(session, batch, [])
    assert (nothing.norms_before == nothing.norms_after).all() and not nothing.divergence.any()
    assert "no state changed" in nothing.describe()
    one = session.edit({"resid[1]": edits.zero()}, source=0)
    two = session.edit({"resid[1]": edits.add(np.ones(session.points("resid[1]")[0].width))}, source=0)
    norms = edit_effect(session, batch, [one, two]).source(0).norms_after[1]
    np.testing.assert_allclose(norms, session.points("resid[1]")[0].width[0] ** 0.5, rtol=1e-5)
    assert not edit_effect(session, batch, [two, one]).source(0).norms_after[1].any()


def test_a_state_of_zero_has_no_cosine(session, batch):
    effect = edit_effect(session, batch, session.edit({"resid[2]": edits.zero()}, source=0), layers=(2,))
    assert np.isnan(effect.source(0).cosine).all() and not np.isnan(effect.source(1).cosine).any()
    assert "no cosine is defined; the state is 0 at 50 of 50 places" in effect.describe().replace(
        "25 of 25", "50 of 50"
    )
    assert effect_map(effect, 0).axes[2].collections[0].get_array().mask.all()


def test_layers_are_those_asked_once_each(session, batch):
    n = session.n_layers
    effect = edit_effect(session, batch, doubled(session), layers=(-1, 1, n, 0))
    assert effect.layers == (n, 1, 0) and effect.cosine.shape[0] == 3
    assert f"layers {n}, 1, 0" in effect.describe()
    whole = edit_effect(session, batch, doubled(session))
    np.testing.assert_array_equal(effect.norms_after[0], whole.norms_after[n])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": (99,)}, "layer"),
        ({"layers": 3}, "layers is 3; pass a sequence"),
        ({"layers": ()}, "layers is empty"),
        ({"top_k": 0}, "top_k is 0; pass 1.."),
        ({"top_k": 10**9}, "top_k is"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; pass a whole number"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"limit_bytes": 1000}, "this would keep .* the limit is"),
        ({"max_new_tokens": 2, "profile": "wild"}, "profile 'wild' is not one of"),
    ],
)
def test_arguments_are_refused_before_the_model_runs(session, batch, monkeypatch, how, message):
    monkeypatch.setattr(session.model, "forward", None)
    with pytest.raises(ArgumentError, match=message):
        edit_effect(session, batch, doubled(session), **how)


def test_places_that_are_not_there_are_named(effect):
    with pytest.raises(ArgumentError, match="source 3 is not one of the 3"):
        effect.source(3)
    with pytest.raises(ArgumentError, match="request 5 is not one of the 3"):
        effect.last(5)
    with pytest.raises(ArgumentError, match="source -1 is not one of"):
        effect_map(effect, -1)
    with pytest.raises(ArgumentError, match="request 9"):
        next_token_bars(effect, 9)


def test_an_error_inside_the_block_leaves_no_hook(session, batch):
    """The fixture compares the session's hooks."""
    with pytest.raises(ArgumentError, match="returned"):
        edit_effect(session, batch, session.edit({"resid[1]": lambda values, rows: values[:1]}))


def test_words(session, batch):
    effect = edit_effect(session, batch, doubled(session, source=1), max_new_tokens=2)
    text = effect.describe()
    assert f"Effect of the block on 3 request(s), layers 0..{session.n_layers}" in text
    assert "source 0 waveform 1: no state changed" in text and "source 1 waveform 1: mean cosine" in text
    assert "request 2, last position: no state changed" in text and "request 2, answer: " in text
    assert "either way" in text.splitlines()[-1]
    assert repr(effect).startswith(f"EditEffect({session.n_layers + 1} layers at Rows(")


def test_a_part_of_a_character_is_told_with_its_id(effect):
    token = dataclasses.replace(effect.next_tokens[0][0], id=7, text="\ufffd", before=0.25, after=0.5)
    assert repr(token) == "'\ufffd' 7 0.250 -> 0.500"
    assert repr(dataclasses.replace(token, text=" a")) == "' a' 0.250 -> 0.500"


def test_figures_show_the_numbers(effect):
    figure = effect_map(effect, 1)
    mine, last = effect.source(1), effect.last(1)
    for axes, values in zip(figure.axes[:3], (mine.norms_before, mine.norms_after, mine.cosine), strict=True):
        np.testing.assert_array_equal(axes.collections[0].get_array(), values)
        assert axes.get_xlim() == (0, pytest.approx(mine.rows.end_s[-1]))
    norm, cosine = figure.axes[-2:]
    np.testing.assert_array_equal(norm.lines[0].get_xdata(), last.norms_before[:, 0])
    np.testing.assert_array_equal(norm.lines[1].get_xdata(), last.norms_after[:, 0])
    np.testing.assert_array_equal(cosine.lines[0].get_xdata(), last.cosine[:, 0])
    assert figure.axes[0].collections[0].get_clim() == figure.axes[1].collections[0].get_clim(), (
        "one scale for both norms"
    )
    (norm, _) = effect_map(effect, None, 2).axes
    np.testing.assert_array_equal(norm.lines[0].get_xdata(), effect.last(2).norms_before[:, 0])


def test_bars_show_the_probabilities(effect):
    axes = next_token_bars(effect, 1, count=5).axes[0]
    tokens = effect.next_tokens[1][:5]
    before, after = axes.containers
    assert [bar.get_width() for bar in before] == [token.before for token in tokens]
    assert [bar.get_width() for bar in after] == [token.after for token in tokens]
    assert [label.get_text() for label in axes.get_yticklabels()] == [token.label for token in tokens]
    assert before[0].get_hatch() != after[0].get_hatch(), "told apart without colour"
