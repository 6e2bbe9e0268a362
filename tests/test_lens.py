"""Logit lens and attention over time against independent ways to the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from looking import mixed_batch, mixed_requests, noise, positions

from audiollm import ArgumentError, Request, Waveform, plots
from audiollm.analysis.answers import answer_scores, answered
from audiollm.analysis.attention import attention_over_time, row_weights
from audiollm.analysis.lens import logit_lens

# Lens.


def test_the_lens_is_norm_and_head_by_hand(session, batch):
    lens = logit_lens(session, batch, words=["piano", 5], top_k=3)
    names = [f"resid[{k}]" for k in lens.layers]
    seen = session.capture(batch, names, tokens="audio")
    for k, name in enumerate(names):
        with torch.no_grad():
            logits = session._adapter.head()(session._adapter.final_norm()(seen[name].values)).double()
        probs = logits.softmax(-1)
        assert np.allclose(lens.entropy[k], -(probs * probs.log()).sum(-1), atol=1e-4)
        top = probs.topk(3)
        assert np.allclose(lens.top_probs[k], top.values, atol=1e-5)
        for w, token in enumerate(lens.word_ids):
            assert np.allclose(lens.word_probs[k, :, w], probs[:, token], atol=1e-6)
            assert (lens.word_ranks[k, :, w] == (logits > logits[:, token, None]).sum(-1).numpy()).all()
    assert (lens.top_ids[..., 0][lens.word_ranks[..., 1] == 0] == 5).all()


def test_the_last_layer_is_what_the_model_predicts(session, batch):
    lens = logit_lens(session, batch, layers=[-1], tokens="last")
    assert lens.top_ids[0, :, 0].tolist() == session.forward(batch).logits[:, 0].argmax(-1).tolist()


@pytest.mark.parametrize("chunk_bytes", (1, 40_000))
def test_chunks_change_nothing(session, batch, chunk_bytes):
    whole, parts = (logit_lens(session, batch, ["a"], chunk_bytes=size) for size in (256 << 20, chunk_bytes))
    for name in ("top_ids", "word_ranks"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert np.allclose(whole.entropy, parts.entropy, atol=1e-5)


def test_the_lens_sees_edits_and_knows_its_seconds(session, batch):
    from audiollm import edits

    plain = logit_lens(session, batch, source=1)
    with session.edit({"resid[1]": edits.zero()}, source=1):
        changed = logit_lens(session, batch, source=1)
    assert np.array_equal(plain.entropy[0], changed.entropy[0]) and not np.allclose(
        plain.entropy[1], changed.entropy[1]
    )
    assert np.array_equal(plain.rows.intervals, batch.timeline[1].token_intervals())
    assert len(logit_lens(session, batch).source(2).rows) == batch.timeline[2].n_tokens
    assert f"Layer {session.n_layers}" in plain.describe() and "LogitLens(layers 0" in repr(plain)


@pytest.mark.parametrize(
    "wrong", ({"words": "piano"}, {"words": [""]}, {"words": [10**9]}, {"layers": []}, {"layers": [99]}, {"top_k": 0})
)
def test_lens_refusals(session, batch, wrong):
    with pytest.raises(ArgumentError):
        logit_lens(session, batch, **wrong)


def test_the_lens_has_a_limit(session, batch):
    with pytest.raises(ArgumentError, match="limit"):
        logit_lens(session, batch, limit_bytes=100)


# Attention.


@pytest.mark.parametrize("family", ("mf", "moss"))
@pytest.mark.parametrize("attention", ("sdpa", "eager"))
def test_rows_equal_a_full_eager_run(request, family, attention):
    """Against the library's own [L, L] weights, with padding on the left and grouped keys."""
    eager = request.getfixturevalue(f"session_{family}_eager")
    session = eager if attention == "eager" else request.getfixturevalue(f"session_{family}")
    batch = mixed_batch(session)
    with torch.no_grad():
        full = eager.model(**batch.inputs, position_ids=positions(batch), output_attentions=True).attentions
    for found in attention_over_time(session, batch, queries=[-1, -5]):
        mine = [t.positions for t in batch.timeline if t.sample_index == found.sample_index]
        audio = np.concatenate(mine) if mine else np.zeros(0, int)
        for k, layer in enumerate(found.layers):
            rows = full[layer][found.sample_index][:, list(found.queries)].numpy()
            assert np.allclose(found.weights[k], rows[..., audio], atol=1e-5)
        assert np.allclose(found.weights.sum(-1) + found.text, 1, atol=1e-5)


def test_each_word_of_an_answer(session, batch):
    answers = ["a b", "xyz", [3, 4]]
    found = attention_over_time(session, batch, answers)
    longer = answered(session, batch, answers)
    for b, one in enumerate(found):
        n = len(one.labels)
        again = attention_over_time(session, longer, queries=[-k - 1 for k in range(n, 0, -1)])[b]
        assert np.array_equal(one.weights, again.weights) and one.queries == again.queries
    first = attention_over_time(session, batch)[0]
    assert np.allclose(found[0].weights[:, :, 0], first.weights[:, :, 0], atol=1e-5)  # the last prompt token
    assert found[1].labels == tuple("xyz")


def test_sums_by_source_and_by_seconds(session, batch):
    two = attention_over_time(session, batch, layers=[-1, 0])[1]
    assert two.layers == (session.n_layers - 1, 0)
    assert np.allclose(two.by_source().sum(-1), two.weights.sum(-1), atol=1e-6)
    edges, sums = two.by_seconds(0.5, source=1)
    assert np.allclose(sums.sum(-1), two.by_source()[..., 0], atol=1e-6)
    assert edges[0] == 0 and edges[-1] == pytest.approx(batch.timeline[1].token_intervals()[-1, 1])
    for wrong in ({"step_s": 0}, {"step_s": 1, "source": 0}):
        with pytest.raises(ArgumentError):
            two.by_seconds(**wrong)


def test_only_the_blocks_that_are_asked_run(session, batch):
    ran = []
    handles = [b.register_forward_hook(lambda *_, k=k: ran.append(k)) for k, b in enumerate(session._adapter.blocks())]
    attention_over_time(session, batch, layers=[1])
    for handle in handles:
        handle.remove()
    assert max(ran) <= 1


def test_attention_refusals(session, batch):
    for wrong in ({"queries": [batch.width]}, {"queries": [0]}, {"queries": []}, {"layers": [9]}, {"layers": []},
                  {"queries": [-1], "answers": "x"}, {"limit_bytes": 10}):  # fmt: skip
        with pytest.raises(ArgumentError):
            attention_over_time(session, batch, **wrong)


def test_an_error_inside_leaves_no_hook(session, batch):
    def fail(*_):
        raise KeyboardInterrupt

    handle = session._adapter.blocks()[1].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        attention_over_time(session, batch)
    handle.remove()


# Answers.


def test_scores_are_the_log_probabilities_of_the_tokens(session, batch):
    answers = ["a", "abc def", [1, 2]]
    scores = answer_scores(session, batch, answers)
    longer = answered(session, batch, answers)
    with torch.no_grad():
        logits = session.model(**longer.inputs, position_ids=positions(longer)).logits.double().log_softmax(-1)
    for b, ids in enumerate(scores.token_ids):
        columns = range(longer.width - len(ids) - 1, longer.width - 1)
        wanted = [float(logits[b, c, t]) for c, t in zip(columns, ids, strict=True)]
        assert np.allclose(scores.tokens[b], wanted, atol=1e-4)
        alone = answer_scores(session, session.prepare([mixed_requests()[b]]), [answers[b]])
        assert float(alone.total[0]) == pytest.approx(sum(wanted), abs=1e-3)


def test_an_answer_moves_the_timeline_along(session, batch):
    longer = answered(session, batch, ["a", "abc def", "b"])
    for slot, timeline, before in zip(longer.slots, longer.timeline, batch.timeline, strict=True):
        assert slot.token_positions.tolist() == timeline.positions.tolist()
        row = longer.inputs["input_ids"][slot.sample_index]
        assert (
            row[timeline.positions.tolist()] == batch.inputs["input_ids"][slot.sample_index][before.positions.tolist()]
        ).all()
        assert {longer.tokens[slot.sample_index * longer.width + p].role for p in timeline.positions} == {"audio"}
    generated = session.generations(mixed_requests(), max_new_tokens=3)
    greedy = answer_scores(session, batch, [g.token_ids for g in generated])
    best = [max(session.forward(batch).logits[b, 0].float().log_softmax(-1)) for b in range(3)]
    assert [float(t[0]) for t in greedy.tokens] == pytest.approx([float(v) for v in best], abs=1e-4)


@pytest.mark.parametrize("wrong", ("", ["a"], ["a", "b", ""], ["a", "b", [10**9]], [[], [], []]))
def test_answers_that_do_not_fit_are_refused(session, batch, wrong):
    with pytest.raises(ArgumentError, match="answer"):
        answer_scores(session, batch, wrong)


def test_an_answer_past_the_context_is_refused(session):
    short = session.prepare([Request("x", [noise(3_000)])])
    with pytest.raises(Exception, match="context holds") as caught:
        answered(session, short, [[1] * session.context])
    assert caught.value.code == "too_long"


# What a breaker and a reviewer found.


def test_seconds_are_where_they_are_said_to_be(session, batch):
    two = attention_over_time(session, batch, layers=[1])[1]
    edges, sums = two.by_seconds(0.5, source=1)
    wanted = np.zeros_like(sums)
    for token, (start, end) in enumerate(batch.timeline[1].token_intervals()):
        wanted[..., min(int((start + end) / 2 / 0.5), len(edges) - 2)] += two.weights[..., two.sources == 1][..., token]
    assert np.allclose(sums, wanted, atol=1e-6) and (sums[0, 0, 0] > 0).sum() > 3


@pytest.mark.parametrize("window", (None, 1, 4, 100))
def test_row_weights_are_a_dense_masked_softmax(window):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn((20, 6, 8), generator=generator), torch.randn((20, 2, 8), generator=generator)
    cos, sin = torch.ones(20, 8), torch.zeros(20, 8)
    found = row_weights(query, key, cos, sin, [19, 7], first=3, window=window)
    row, column = torch.arange(20)[:, None], torch.arange(20)
    seen = (column <= row) & (column >= 3) & (row - column < (window or 99))
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(3, dim=1)) / 8**0.5
    dense = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    assert torch.allclose(found, dense[:, [19, 7]], atol=1e-6)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak resident size from /proc")
def test_a_row_over_30_000_tokens_at_music_flamingo_s_width_fits_in_2_gb():
    """One layer, made up: 28 heads of 128 over 30,200 positions, 4 key groups."""
    shapes = ((30_200, 28, 128), (30_200, 4, 128), (30_200, 128), (30_200, 128))
    query, key, cos, sin = (torch.randn(shape).to(torch.bfloat16) for shape in shapes)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    weights = row_weights(query, key, cos, sin, [30_199])
    assert _resident("VmHWM") - before < 2e9
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-4)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_the_head_receives_no_more_rows_than_the_limit_allows(session, batch):
    rows = []
    handle = session._adapter.head().register_forward_pre_hook(lambda m, args: rows.append(args[0].shape[1]))
    size = session.model.config.get_text_config().vocab_size
    logit_lens(session, batch, chunk_bytes=4 * 4 * size * 10)
    handle.remove()
    assert max(rows) == 10


def test_other_hooks_of_the_last_block_fire(session, batch):
    with session.observe([f"attn_out[{session.n_layers - 1}]", f"mlp_out[{session.n_layers - 1}]"]) as seen:
        attention_over_time(session, batch)
    assert len(seen) == 2


def test_attention_is_of_the_outermost_pass(session, batch):
    inner = session.prepare([Request("other words")])
    plain = attention_over_time(session, batch)[1].weights

    def nosy(module, args):
        handle.remove()
        with torch.no_grad():
            session.model(**inner.inputs)

    handle = session._adapter.blocks()[1].register_forward_pre_hook(nosy)
    assert np.array_equal(attention_over_time(session, batch)[1].weights, plain)


def test_the_lens_is_drawn_over_its_seconds(session, batch):
    found = logit_lens(session, batch, ["a"])
    for word in (None, 0):
        axes, bar = plots.lens(found.source(1), word).axes
        assert axes.get_xlabel() == "seconds of the source" and axes.get_xlim()[1] == pytest.approx(
            batch.timeline[1].token_intervals()[-1, 1]
        )
        drawn = axes.collections[0].get_array()
        assert np.allclose(drawn, found.source(1).entropy if word is None else found.source(1).word_probs[..., 0])
        assert bar.get_ylabel() == ("entropy (nats)" if word is None else "probability of 'a'")
    for wrong in (lambda: plots.lens(found), lambda: plots.lens(found.source(1), 5)):
        with pytest.raises(ArgumentError):
            wrong()


def test_attention_is_drawn_over_its_seconds(session, batch):
    two = attention_over_time(session, batch, answers="ab")[1]
    figure = plots.attention(two, query=1, step_s=0.5)
    first, bars, second = figure.axes[:3]
    assert first.get_title(loc="left") == two.names[0] and second.get_xlabel() == "seconds of the source"
    assert np.allclose(first.collections[0].get_array(), two.by_seconds(0.5, 1)[1][:, :, 1].mean(1))
    assert [bar.get_width() for bar in bars.patches] == pytest.approx(list(two.by_source()[:, :, 1, 0].mean(1)))
    for wrong in (
        lambda: plots.attention(two, query=2),
        lambda: plots.attention(attention_over_time(session, batch)[2]),
    ):
        with pytest.raises(ArgumentError):
            wrong()


@pytest.mark.parametrize("wrong", ([True, False, True], ["a", "b", ["d"]], ["a", "b", None]))
def test_answers_that_are_no_answers(session, batch, wrong):
    with pytest.raises(ArgumentError, match="answer"):
        answer_scores(session, batch, wrong)


def test_a_prompt_as_wide_as_a_window_has_frames(session_mf):
    """The mask of the mel [W, 3000] is none of the prompt's, though it may have its shape."""

    def ask(width: int, wave: Waveform) -> Request:
        prompt = "a " * ((width - 300) // 2)
        while session_mf.prepare([Request(prompt, [wave])]).width < width:
            prompt += "z "
        while session_mf.prepare([Request(prompt, [wave])]).width > width:
            prompt = prompt[:-1]
        return Request(prompt, [wave])

    requests = [ask(3_000, noise(32_000)), ask(2_997, noise(32_000, 1))]
    both = session_mf.prepare(requests)
    assert both.width == 3_000 and both.inputs["input_features_mask"].shape == both.inputs["input_ids"].shape
    longer = answered(session_mf, both, ["ab", "ab"])
    assert torch.equal(longer.inputs["input_features_mask"], both.inputs["input_features_mask"])
    scores = answer_scores(session_mf, both, "ab").total
    alone = [float(answer_scores(session_mf, session_mf.prepare([r]), "ab").total[0]) for r in requests]
    assert scores.tolist() == pytest.approx(alone, abs=1e-4)
