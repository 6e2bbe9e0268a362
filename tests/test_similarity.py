"""CKA against formulas written out here, cosines in time, and the random-weights control."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from audiollm import Request, Waveform
from audiollm.analysis import similarity
from audiollm.analysis.cka import CKASums, cka, linear_cka, linear_cka_streamed, minibatches
from audiollm.analysis.comparison import aligned, session_cka
from audiollm.analysis.control import random_control
from audiollm.analysis.hsic import PairSums, u_centred
from audiollm.analysis.similarity import average_over, self_similarity, stem_retrieval
from audiollm.errors import ArgumentError
from audiollm.plots.similarity import cka_heatmap, self_similarity_matrix, stem_retrieval_curve


def hsic_1(x, y):
    """Song et al. 2012, eq. 5, as printed, on whole kernels in float64."""
    n = len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    one = np.ones(n)
    sums = np.trace(k @ l) + (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ l @ one)
    return sums / (n * (n - 3))


def direct_cka(x, y):
    return hsic_1(x, y) / np.sqrt(hsic_1(x, x) * hsic_1(y, y))


def related(n=90, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 7)) + 3
    return x, x @ rng.normal(size=(7, 5)) + rng.normal(size=(n, 5)) * 2


def seconds(n, token_s=0.08):
    edges = np.arange(n + 1) * token_s
    return np.stack([edges[:-1], edges[1:]], axis=1)


# The estimator.


def test_hsic_is_the_mean_over_all_quadruples():
    """The U-statistic itself: no formula for it is shared with what is tested."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 3)), rng.normal(size=(7, 2)) + 1
    k, l = x @ x.T, y @ y.T  # noqa: E741
    terms = [k[i, j] * (l[i, j] + l[q, r] - 2 * l[i, q]) for i, j, q, r in itertools.permutations(range(7), 4)]
    pair = PairSums()
    pair.update(torch.tensor(x), torch.tensor(y))
    flat, _ = u_centred({"x": x, "y": y})
    assert pair.hsic() == pytest.approx(np.mean(terms), rel=1e-12)
    assert float(flat[0] @ flat[1]) / (7 * 4) == pytest.approx(np.mean(terms), rel=1e-12)
    assert hsic_1(x, y) == pytest.approx(np.mean(terms), rel=1e-12)


def test_every_way_equals_the_direct_formula():
    x, y = related()
    wanted = direct_cka(x, y)
    assert 0.2 < wanted < 0.95
    assert linear_cka(x, y) == pytest.approx(wanted, abs=1e-12)
    chunks = [(x[a:b], y[a:b]) for a, b in ((0, 1), (1, 40), (40, 90))]
    assert linear_cka_streamed(iter(chunks)) == pytest.approx(wanted, abs=1e-12)
    whole = cka({"x": x, "y": y})
    assert whole.n_minibatches == 1 and whole.values[0, 1] == pytest.approx(wanted, abs=1e-12)
    assert np.allclose(np.diag(whole.values), 1, atol=1e-12) and np.allclose(whole.values, whole.values.T, atol=1e-12)
    assert cka({"x": x}, {"y": y}).values[0, 0] == pytest.approx(wanted, abs=1e-12)


def test_minibatches_average_hsic_not_cka():
    x, y = related(n=103)
    parts = minibatches(103, 25, seed=4)
    assert sorted(np.concatenate(parts)) == list(range(103)) and {len(p) for p in parts} == {25, 26}
    sums = [sum(len(p) * hsic_1(a[p], b[p]) for p in parts) for a, b in ((x, y), (x, x), (y, y))]
    found = cka({"x": x, "y": y}, minibatch=25, seed=4)
    assert found.n_minibatches == 4 and found.n_tokens == 103
    assert found.values[0, 1] == pytest.approx(sums[0] / np.sqrt(sums[1] * sums[2]), abs=1e-12)
    assert found.values[0, 1] == pytest.approx(direct_cka(x, y), abs=0.05)


def test_tokens_are_dealt_at_random():
    """In order, minibatches of sources one after the other would miss everything that tells sources apart."""
    rng = np.random.default_rng(0)
    marks_x, marks_y = rng.normal(size=(2, 8, 4)) * 5
    sources = [
        {"x": mx + rng.normal(size=(50, 4)), "y": my + rng.normal(size=(50, 4))}
        for mx, my in zip(marks_x, marks_y, strict=True)
    ]
    whole = cka(sources, minibatch=400).values[0, 1]
    assert cka(sources, minibatch=50).values[0, 1] == pytest.approx(whole, abs=0.05) and whole > 0.2
    assert np.array_equal(cka(sources, minibatch=50, seed=2).values, cka(sources, minibatch=50, seed=2).values)


def test_sources_are_put_end_to_end():
    x, y = related()
    parts = [{"x": x[:20], "y": y[:20]}, {"x": x[20:], "y": y[20:]}]
    assert cka(parts).values[0, 1] == pytest.approx(direct_cka(x, y), abs=1e-12)


def test_invariances():
    x, y = related()
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(7, 7)))[0]
    value = linear_cka(x, y)
    for other in (x @ turn, x * 1e-3, x + 1e5, (x @ turn) * 40 - 7):
        assert linear_cka(x, other) == pytest.approx(1, abs=1e-9)
        assert linear_cka(other, y) == pytest.approx(value, abs=1e-9)
        assert cka({"a": other}, {"b": y}).values[0, 0] == pytest.approx(value, abs=1e-9)
    assert linear_cka(x, x * [1, 1, 1, 1, 1, 1, 30]) < 0.9  # but not to any linear map
    assert linear_cka(y, x) == pytest.approx(value, abs=1e-12)


def test_independent_noise_is_zero_also_where_tokens_are_few():
    """Without debiasing 40 tokens of width 200 are alike whatever they are: 0.8."""
    rng = np.random.default_rng(0)
    noise = [(rng.normal(size=(40, 200)), rng.normal(size=(40, 200))) for _ in range(20)]
    centred = [(x - x.mean(0), y - y.mean(0)) for x, y in noise]
    biased = [np.sum((x.T @ y) ** 2) / np.sqrt(np.sum((x.T @ x) ** 2) * np.sum((y.T @ y) ** 2)) for x, y in centred]
    assert np.mean(biased) > 0.7
    values = [linear_cka(x, y) for x, y in noise]
    assert abs(np.mean(values)) < 0.05 and min(values) < 0 < max(values)


def test_streaming_does_not_lose_a_small_signal_on_a_large_offset():
    """States share a direction that is thousands of times what differs between tokens."""
    x, y = related(n=600)
    wanted = direct_cka(x, y)
    assert linear_cka(x + 1e6, y - 1e6) == pytest.approx(wanted, abs=1e-6)
    assert cka({"x": x + 1e6, "y": y - 1e6}, minibatch=600).values[0, 1] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_any_float_dtype(dtype):
    x, y = (torch.tensor(a).to(dtype).requires_grad_() for a in related())
    exact = direct_cka(x.detach().double().numpy(), y.detach().double().numpy())
    assert linear_cka(x, y) == pytest.approx(exact, abs=1e-12)
    assert cka({"x": x}, {"y": y}).values[0, 0] == pytest.approx(exact, abs=1e-12)


def test_what_does_not_vary_is_not_defined():
    x, _ = related()
    flat = np.ones((90, 3)) * 0.1
    matrix = cka({"x": x, "flat": flat})
    assert np.isnan(matrix.values[1]).all() and np.isnan(matrix.values[:, 1]).all()
    assert matrix.values[0, 0] == pytest.approx(1) and "flat: do not vary enough over the tokens" in matrix.describe()
    for pair in ((x, flat), (flat, x)):
        with pytest.raises(ArgumentError, match="does not vary enough over the tokens"):
            linear_cka(*pair)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, y: linear_cka(x, y[:-1]), "90 tokens and y 89"),
        (lambda x, y: linear_cka(x[:3], y[:3]), "4 tokens or more"),
        (lambda x, y: linear_cka(x, y * np.nan), "NaN"),
        (lambda x, y: linear_cka(x[:, 0], y), "shape"),
        (lambda x, y: linear_cka_streamed([]), "4 tokens or more"),
        (lambda x, y: linear_cka_streamed([(x, y[:-1])]), "comes with 89"),
        (lambda x, y: cka({}), "dict of name"),
        (lambda x, y: cka([{0: x}, {1: x}]), "same names"),
        (lambda x, y: cka({0: x, 1: y[:-1]}), "differ in their number"),
        (lambda x, y: cka({0: x}, {0: y[:-1]}), "different sources or numbers"),
        (lambda x, y: cka({0: x[:3]}), "4 or more"),
        (lambda x, y: cka({0: x}, minibatch=3), "minibatch"),
        (lambda x, y: CKASums().update({0: x[:3]}), "4 or more"),
        (lambda x, y: CKASums().update({0: x}, {0: y[:-1]}), "a has 90 tokens and b 89"),
        (lambda x, y: CKASums().result(), "no minibatch"),
        (lambda x, y: [s.update({k: x}) for s in [CKASums()] for k in "ab"], "other names"),
    ],
)
def test_what_cka_refuses(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(*related())


def test_words_of_cka():
    x, y = related()
    matrix = cka({0: x, 1: x + y @ np.ones((5, 7)), 2: y})
    assert repr(matrix).startswith("CKAMatrix(3 x 3, 90 tokens in 1 minibatch(es)")
    assert "Most alike are" in matrix.describe() and matrix._repr_html_().count("<tr>") == 4
    figure = cka_heatmap(matrix)
    assert np.allclose(figure.axes[0].images[0].get_array(), matrix.values)
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["0", "1", "2"]


# From sessions.


def noise(seed, length_s=3.0):
    samples = np.random.default_rng(seed).normal(size=int(length_s * 16_000)) * 0.1
    return Waveform(samples.astype(np.float32), 16_000)


@pytest.fixture(params=("session_mf", "session_moss"))
def session(request):
    return request.getfixturevalue(request.param)


def test_session_cka_is_cka_of_its_states(session):
    requests = [Request("One.", [noise(0), noise(1, 1.5)]), Request("Two.", [noise(2)])]
    states = [
        mine for r in requests for mine in session.extract_contextual_embeddings(session.prepare([r]), (0, 2, -1))
    ]
    found = session_cka(session, requests, (0, 2, -1), minibatch=2048)
    assert np.allclose(found.values, cka(states, minibatch=2048).values, atol=1e-9)
    assert found.tokens_s == pytest.approx(7.5, abs=0.1) and found.rows == (0, 2, -1)
    control = random_control(session)
    beside = session_cka(session, requests[1:], None, control, (0,), minibatch=2048)
    theirs = control.extract_contextual_embeddings(control.prepare(requests[1:]), (0,))
    every = session.extract_contextual_embeddings(session.prepare(requests[1:]), range(session.n_layers + 1))
    assert np.allclose(beside.values, cka(every, theirs, minibatch=2048).values, atol=1e-9)


def test_long_inputs_are_dealt_out_as_they_come(session_moss):
    requests = [Request("x", [noise(seed, 4.0)]) for seed in range(4)]
    found = session_cka(session_moss, requests, (0, -1), minibatch=16, pool=2)
    assert found.n_tokens == 200 and found.n_minibatches == 12
    states = session_moss.extract_contextual_embeddings(session_moss.prepare(requests), (0, -1))
    assert found.values[0, 1] == pytest.approx(cka(states).values[0, 1], abs=0.1)


def test_models_of_another_token_length_are_compared_by_seconds(session_mf, session_moss):
    requests = [Request("x", [noise(0)])]
    found = session_cka(session_mf, requests, (0,), session_moss, (1, 2))
    assert found.n_tokens == 37 or found.n_tokens == 38
    mine = session_mf.extract_contextual_embeddings(session_mf.prepare(requests), (0,))[0]
    theirs = session_moss.extract_contextual_embeddings(session_moss.prepare(requests), (1, 2))[0]
    pairs = mine[0][:74].double().reshape(37, 2, -1).mean(1)  # 80 ms are two tokens of 40 ms
    values = [direct_cka(pairs.numpy(), theirs[k][:37].double().numpy()) for k in (1, 2)]
    a, b, spans = aligned(mine, seconds(75, 0.04), theirs, seconds(len(theirs[1]), 0.08))
    assert np.allclose(a[0][:37], pairs.numpy(), atol=1e-6) and len(a[0]) == len(b[1]) == len(spans)
    assert np.allclose(found.values[0], values, atol=0.05)


def test_seconds_that_one_model_does_not_hear_are_left_out():
    fine, coarse = {0: np.ones((10, 2))}, {5: np.arange(8.0).reshape(8, 1)}  # 0.4 s and 0.64 s
    a, b, spans = aligned(fine, seconds(10, 0.04), coarse, seconds(8, 0.08))
    assert a[0].tolist() == [[1.0, 1.0]] * 5 and b[5].ravel().tolist() == [0, 1, 2, 3, 4]
    assert np.allclose(spans, seconds(5, 0.08))


@pytest.mark.parametrize("options", ({"minibatch": 2}, {"pool": 0}, {"layers": (77,)}, {"batch_requests": 0}))
def test_session_cka_refuses_before_it_starts(session_mf, monkeypatch, options):
    monkeypatch.setattr(type(session_mf), "extract_contextual_embeddings", lambda *a: pytest.fail("the model ran"))
    with pytest.raises(ArgumentError):
        session_cka(session_mf, [Request("x", [noise(0)])], **options)


# Averages over time.


def test_averages_are_weighed_by_shared_seconds():
    rng = np.random.default_rng(0)
    values, fine = rng.normal(size=(50, 3)), seconds(50, 0.04)
    onto = np.sort(rng.uniform(-0.1, 2.2, 14)).reshape(7, 2)
    found, covered = average_over(values, fine, onto)
    for row, length, (start, end) in zip(found, covered, onto, strict=True):
        shares = np.clip(np.minimum(fine[:, 1], end) - np.maximum(fine[:, 0], start), 0, None)
        assert length == pytest.approx(shares.sum(), abs=1e-12)
        assert np.allclose(row, shares @ values / max(shares.sum(), 1e-300), atol=1e-9)


def test_long_inputs_are_averaged_in_pieces(monkeypatch):
    values, fine = np.random.default_rng(0).normal(size=(97, 3)), seconds(97)
    whole = average_over(values, fine, seconds(20, 0.4))[0]
    monkeypatch.setattr(similarity, "_CHUNK", 10)
    assert np.allclose(average_over(values, fine, seconds(20, 0.4))[0], whole, atol=1e-12)


# A source with itself.


def test_self_similarity_is_the_cosine_by_hand():
    states, spans = np.random.default_rng(0).normal(size=(30, 6)) + 4, seconds(30)
    for centered in (True, False):
        x = states - states.mean(0) if centered else states
        wanted = (x @ x.T) / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(x, axis=1))
        found = self_similarity(torch.tensor(states), spans, centered=centered)
        assert np.allclose(found.values, wanted, atol=1e-12) and np.array_equal(found.intervals, spans)
    assert self_similarity(states, spans, centered=False).values.min() > 0.3  # the common direction
    assert self_similarity(states, spans).values.min() < -0.3


def test_bins_hold_whole_tokens_or_seconds():
    states = np.random.default_rng(0).normal(size=(95, 4))
    found = self_similarity(states, seconds(95), max_bins=20)
    assert len(found.values) == 19 and np.allclose(found.intervals[0], [0, 5 * 0.08])
    by_seconds = self_similarity(states, seconds(95), bin_s=1.0)
    assert len(by_seconds.values) == 8 and by_seconds.intervals[-1].tolist() == [7.0, pytest.approx(7.6)]
    assert found.values.max() <= 1 and np.array_equal(found.values, found.values.T)


def test_words_and_drawing_of_self_similarity():
    rng = np.random.default_rng(0)
    verse, chorus, bridge = rng.normal(size=(3, 16))
    spans = seconds(100)
    parts = np.stack([verse, chorus, bridge, verse])[np.minimum(spans[:, 0] // 2, 3).astype(int)]
    states = parts + rng.normal(size=(100, 16)) * 0.1
    result = self_similarity(states, spans, bin_s=2.0)
    assert "1.00 s and 7.00 s are most alike" in result.describe() and "from 0.00 to 8.00 s" in result.describe()
    assert repr(result).startswith("SelfSimilarity(4 bins of 2.000 s, 0.000-8.000 s")
    axes = self_similarity_matrix(result).axes[0]
    assert axes.get_xlabel() == axes.get_ylabel() == "seconds of the source"
    assert axes.get_xlim() == (0, 8) and np.allclose(axes.collections[0].get_array(), result.values)


# A mix with its stems.


def test_a_stem_that_is_the_mix_is_found_everywhere():
    mix = np.random.default_rng(0).normal(size=(100, 12))
    result = stem_retrieval(
        mix, {"same": mix, "noise": np.random.default_rng(1).normal(size=(100, 12))}, seconds(100), window_s=0.4
    )
    assert result.intervals.shape == (20, 2) and np.allclose(result.similarity[0], 1)
    assert result.recall()[0] == 1 and result.mean_reciprocal_rank[0] == 1 and (result.nearest_stem == 0).all()
    assert np.allclose(result.nearest_s[0], result.intervals.mean(axis=1))
    assert result.recall()[1] < 0.4 and result.ranks[1].mean() == pytest.approx(10.5, abs=4)
    assert result.chance == (1 / 20, pytest.approx(np.mean(1 / np.arange(1, 21))))


def test_a_delayed_stem_is_found_where_it_went():
    mix = np.random.default_rng(0).normal(size=(100, 12))
    result = stem_retrieval(mix, {"late": np.roll(mix, 5, axis=0)}, seconds(100), window_s=0.4)
    assert np.allclose(result.nearest_s[0, 1:], result.intervals.mean(axis=1)[1:] - 0.4)
    assert result.recall()[0] == 0


def test_ties_are_no_finds():
    """A stem that never changes is as near to every second; first among equals would be right."""
    rng = np.random.default_rng(0)
    mix = np.repeat(rng.normal(size=(1, 6)), 100, axis=0)
    result = stem_retrieval(mix, {"other": rng.normal(size=(100, 6))}, seconds(100), window_s=0.4)
    assert (result.ranks == 10.5).all() and result.recall(5)[0] == 0


def test_the_common_direction_is_taken_off():
    rng = np.random.default_rng(0)
    mix, stem = rng.normal(size=(2, 50, 8)) + 20
    plain = stem_retrieval(mix, {"s": stem}, seconds(50), window_s=0.4, centered=False)
    assert (
        plain.similarity.min() > 0.9
        and abs(stem_retrieval(mix, {"s": stem}, seconds(50), window_s=0.4).similarity.mean()) < 0.3
    )


def test_a_shorter_stem_ends_the_comparison(monkeypatch):
    mix = np.random.default_rng(0).normal(size=(100, 12))
    result = stem_retrieval(mix, {"a": mix, "b": torch.tensor(mix[:61]).bfloat16()}, seconds(100), window_s=1.0)
    assert result.intervals[-1].tolist() == [3.0, 4.0]  # 61 tokens are 4.88 s
    monkeypatch.setattr(similarity, "_CHUNK", 3)
    again = stem_retrieval(mix, {"a": mix, "b": torch.tensor(mix[:61]).bfloat16()}, seconds(100), window_s=1.0)
    assert np.array_equal(again.ranks, result.ranks)


def test_words_and_drawing_of_retrieval():
    mix = np.random.default_rng(0).normal(size=(100, 12))
    result = stem_retrieval(mix, {"drums": mix, "bass": -mix}, seconds(100))
    assert repr(result) == "StemRetrieval(8 windows; recall at 1: drums 1.000, bass 0.000; chance 0.125)"
    assert "8 windows from 0.00 to 8.00 s" in result.describe() and result._repr_html_().count("<tr>") == 3
    above, below = stem_retrieval_curve(result).axes
    assert below.get_xlabel() == "seconds" and "second" in below.get_ylabel() and below.get_xlim() == (0, 8)
    assert np.allclose(above.get_lines()[0].get_ydata(), result.similarity[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, s: self_similarity(x, s[:-1]), "50 states and 49"),
        (lambda x, s: self_similarity(x, s, bin_s=0), "bin_s"),
        (lambda x, s: self_similarity(x, s, bin_s=0.001), "more than 1500"),
        (lambda x, s: self_similarity(x, s, max_bins=0), "max_bins"),
        (lambda x, s: self_similarity(x * 0 + 2, s), "same at all times"),
        (lambda x, s: self_similarity(x * np.nan, s), "NaN"),
        (lambda x, s: stem_retrieval(x, {}, s), "at least one stem"),
        (lambda x, s: stem_retrieval(x, [x], s), "at least one stem"),
        (lambda x, s: stem_retrieval(x[:40], {"a": x}, s[:40]), "stem 'a'"),
        (lambda x, s: stem_retrieval(x, {"a": x[:, :2]}, s), "stem 'a'"),
        (lambda x, s: stem_retrieval(x, {"a": x}, s, window_s=3.0), "fewer than 2 windows"),
        (lambda x, s: stem_retrieval(x, {"a": x}, s, window_s="1"), "window_s"),
        (lambda x, s: stem_retrieval(x[:-1], {"a": x[:-1]}, s), "49 states and 50"),
    ],
)
def test_what_similarity_refuses(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(np.random.default_rng(0).normal(size=(50, 4)), seconds(50))


# The random-weights control.


def tensors(model):
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.fixture(params=("session_mf", "session_moss", "session_mf_eager"))
def any_session(request):
    return request.getfixturevalue(request.param)


def test_the_control_has_the_shape_and_none_of_the_values(any_session):
    before, state = tensors(any_session.model), torch.get_rng_state()
    control = random_control(any_session, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    after, redrawn = tensors(any_session.model), tensors(control.model)
    assert before.keys() == after.keys() == redrawn.keys() and all(torch.equal(before[k], after[k]) for k in before)
    assert repr(control) == repr(any_session) and control.processor is any_session.processor
    assert control.model.config._attn_implementation == any_session.model.config._attn_implementation
    assert not control.model.training
    fixed = set(dict(any_session.model.named_buffers())) | {n for n in before if "embed_positions" in n}
    for name, old in before.items():
        new = redrawn[name]
        assert (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)
        if name in fixed:
            assert torch.equal(new, old), name
            continue
        std = old.std(correction=0).item()
        assert std == 0 or not (new == old).any(), name
        if old.numel() > 400:
            assert new.mean().item() == pytest.approx(old.mean().item(), abs=5 * std / old.numel() ** 0.5 + 1e-7), name
            assert new.std().item() == pytest.approx(std, rel=0.2), name
    assert not {p.data_ptr() for p in control.model.parameters()} & {
        p.data_ptr() for p in any_session.model.parameters()
    }


def test_the_control_is_seeded_and_runs(session):
    requests = [Request("x", [noise(0, 1.0)])]
    batch = session.prepare(requests)
    learned = session.extract_contextual_embeddings(batch, (0, -1))[0]
    same, again, other = (
        random_control(session, seed=s).extract_contextual_embeddings(batch, (0, -1))[0] for s in (0, 0, 1)
    )
    for layer in (0, -1):
        assert torch.equal(same[layer], again[layer]) and torch.isfinite(same[layer]).all()
        assert not torch.allclose(same[layer], other[layer]) and not torch.allclose(same[layer], learned[layer])
    control = random_control(session)
    assert len(control.generate(requests, max_new_tokens=2)) == 1


def test_hooks_are_not_taken_over_and_tied_tensors_stay_tied(session_moss):
    called = []
    handle = session_moss.model.get_input_embeddings().register_forward_hook(lambda *a: called.append(1))
    head = session_moss.model.get_output_embeddings()
    own = head.weight
    try:
        head.weight = session_moss.model.get_input_embeddings().weight
        control = random_control(session_moss)
    finally:
        head.weight = own
        handle.remove()
    control.forward(control.prepare([Request("x", [noise(0, 1.0)])]))
    assert not called
    assert control.model.get_output_embeddings().weight is control.model.get_input_embeddings().weight


def test_what_the_control_refuses(session_moss):
    with pytest.raises(ArgumentError, match="seed"):
        random_control(session_moss, seed=0.5)
    blocks = session_moss._adapter.blocks()
    blocks[0].adapter = torch.nn.Linear(2, 2)
    try:
        with pytest.raises(ArgumentError, match="merge adapters"):
            random_control(session_moss)
    finally:
        del blocks[0].adapter


@pytest.mark.parametrize("n", (60, 1000))
def test_one_row_that_differs_is_not_enough(n):
    """The kernels are constant beside the diagonal, so HSIC is 0 and CKA 0 / 0: no number, least of all one past 1."""
    for at in range(3):
        x, y = np.full((n, 4), 0.3), np.full((n, 4), 0.7)
        x[at] += [1.0, 2.0, 3.0, 4.0]
        y[at] += [4.0, -2.0, 3.0, 1.0]
        with pytest.raises(ArgumentError, match="does not vary enough"):
            linear_cka(x, y)
        assert np.isnan(cka({"x": x, "y": y}).values).all()
        rich = np.random.default_rng(at).normal(size=(n, 4))
        assert cka({"x": rich}).values[0, 0] == pytest.approx(1) and linear_cka(rich, rich) == pytest.approx(1)


def test_intervals_that_overlap_are_refused():
    tokens = np.stack([np.arange(4) * 0.08, np.arange(1, 5) * 0.08], axis=1)
    with pytest.raises(ArgumentError, match="overlap"):
        average_over(np.arange(4.0)[:, None], tokens, np.array([[0, 0.16], [0.08, 0.24]]))
