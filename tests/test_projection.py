"""Two components of a layer, and two sequences of states against each other: what they are by definition, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audiollm import ArgumentError
from audiollm.analysis import LayerNorms, cross_similarity, label_tokens, linear_cka, project, self_similarity
from audiollm.plots import description, norm_curves, norm_map, projection, similarity_map


def seconds(n: int, step: float = 0.08) -> np.ndarray:
    starts = np.arange(n) * step
    return np.stack([starts, starts + step], axis=1)


def states(n: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, width)) * np.linspace(3, 1, width)


@given(st.integers(2, 40), st.integers(1, 12), st.integers(0, 5))
def test_it_is_the_singular_value_decomposition(n, width, seed):
    values = states(n, width, seed)
    result = project(values, seconds(n))
    centred = values - values.mean(axis=0)
    _, s, right = np.linalg.svd(centred, full_matrices=False)
    expected = np.zeros((n, 2))
    expected[:, : len(s[:2])] = np.abs(centred @ right[:2].T)
    np.testing.assert_allclose(np.abs(result.points), expected, atol=1e-8)
    np.testing.assert_allclose(result.explained[: len(s[:2])], s[:2] ** 2 / (s**2).sum(), atol=1e-10)


def test_the_sign_is_chosen_by_the_largest_entry():
    values = states(30, 6)
    once = project(values, seconds(30))
    np.testing.assert_array_equal(once.points, project(torch.from_numpy(values), seconds(30)).points)
    np.testing.assert_allclose(once.points[::-1], project(values[::-1], seconds(30)).points, atol=1e-9)
    rising = np.zeros((30, 6))
    rising[:, 2] = np.arange(30)
    assert (np.diff(project(rising, seconds(30)).points[:, 0]) > 0).all(), "towards larger values of that dimension"
    assert (np.diff(project(-rising, seconds(30)).points[:, 0]) < 0).all()
    assert "first correlates 1.00 with time" in project(rising, seconds(30)).describe()


def test_many_tokens_and_dimensions_are_the_same_and_touch_no_random_state():
    values = states(450, 420)
    values[:, :2] *= 5
    before = np.random.get_state()[1].copy()
    result = project(values, seconds(450))
    assert (np.random.get_state()[1] == before).all()
    np.testing.assert_array_equal(result.points, project(values, seconds(450)).points)
    _, s, right = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
    signed = right[:2] * np.sign(right[np.arange(2), np.abs(right[:2]).argmax(axis=1)])[:, None]
    np.testing.assert_allclose(result.points, (values - values.mean(axis=0)) @ signed.T, atol=1e-6)
    np.testing.assert_allclose(result.explained, s[:2] ** 2 / (s**2).sum(), atol=1e-9)


def test_the_nearest_point_counts_in_spans_of_the_picture():
    result = project(states(10, 4), seconds(10))
    assert [result.nearest(*point) for point in result.points + 1e-6] == list(range(10))
    flat = np.zeros((3, 2))
    flat[:, 0], flat[1, 1] = [0, 500, 1000], 1.0
    long = project(flat, seconds(3))
    middle = long.points[1]
    assert long.nearest(middle[0] + 300 * np.sign(long.points[2, 0] - middle[0]), middle[1]) == 1


@pytest.mark.parametrize(
    ("values", "spans", "said"),
    [
        (states(1, 4), seconds(1), "needs 2 or more"),
        (states(9, 4), seconds(8), "there are 8 token intervals"),
        (np.ones((9, 4)), seconds(9), "do not change over time"),
        (np.full((9, 4), np.nan), seconds(9), "NaN"),
    ],
)
def test_states_without_components_are_refused(values, spans, said):
    with pytest.raises(ArgumentError, match=said):
        project(values, spans)


def test_words_get_a_colour_each_and_the_rest_is_grey():
    result = project(states(100, 4), seconds(100))
    names = [chr(ord("a") + k) for k in range(9)]
    spans = np.array([[k * 0.8, (k + 1) * 0.8] for k in range(9)])
    labels = label_tokens(result.intervals, spans, names)
    shown = [text.get_text() for text in projection(result, labels).axes[0].get_legend().get_texts()]
    assert shown == ["no label (10)", *[f"{name} (10)" for name in names[:7]], "2 other labels (20)"]
    numbers = label_tokens(result.intervals, spans, np.arange(9) / 2)
    assert projection(result, numbers).axes[1].get_ylabel() == "label"
    marked = projection(result, labels, (1.02, 2.02))
    assert len(marked.axes[0].collections[-1].get_offsets()) == 12, "the tokens within are ringed"


def test_a_source_against_itself_is_its_self_similarity():
    values = states(50, 8)
    crossed = cross_similarity(values, seconds(50), values, seconds(50))
    np.testing.assert_allclose(crossed.values, self_similarity(values, seconds(50)).values, atol=1e-9)
    assert crossed.cka == pytest.approx(1)


@given(st.integers(2, 20), st.integers(2, 20), st.booleans())
def test_it_is_the_cosine_of_each_pair(n, m, centered):
    one, two = states(n, 6), states(m, 6, 1)
    result = cross_similarity(one, seconds(n), two, seconds(m), centered=centered)
    same = min(n, m)
    assert np.isnan(result.cka) == (same < 4)
    if same >= 4:
        assert result.cka == pytest.approx(linear_cka(one[:same], two[:same]), abs=1e-6)
    if centered:
        one, two = one - one.mean(axis=0), two - two.mean(axis=0)
    lengths = np.linalg.norm(one, axis=1)[:, None] * np.linalg.norm(two, axis=1)
    np.testing.assert_allclose(result.values, one @ two.T / lengths, atol=1e-9)


def test_only_tokens_of_the_same_second_enter_the_cka():
    values = states(50, 8)
    part = cross_similarity(values, seconds(50), values[20:], seconds(50)[20:])
    assert part.cka == pytest.approx(1), "rows are matched by their seconds, not by their number"
    assert np.isnan(cross_similarity(values[:20], seconds(50)[:20], values[20:], seconds(50)[20:]).cka)


def test_long_sources_are_binned_and_their_seconds_kept():
    result = cross_similarity(states(100, 4), seconds(100), states(30, 4), seconds(30), max_bins=25)
    assert result.values.shape == (25, 15)
    assert result.rows[-1, 1] == pytest.approx(8) and result.columns[-1, 1] == pytest.approx(2.4)
    axes = similarity_map(result).axes[0]
    assert axes.get_xlim() == pytest.approx((0, 2.4)) and axes.get_ylim() == pytest.approx((0, 8))


def test_other_widths_are_refused():
    with pytest.raises(ArgumentError, match="of one model"):
        cross_similarity(states(9, 4), seconds(9), states(9, 5), seconds(9))
    with pytest.raises(ArgumentError, match="max_bins"):
        cross_similarity(states(9, 4), seconds(9), states(9, 4), seconds(9), max_bins=0)


def test_a_last_token_that_is_cut_is_drawn_as_long_as_it_is():
    spans = seconds(10)
    spans[-1, 1] -= 0.06
    axes = similarity_map(self_similarity(states(10, 4), spans)).axes[0]
    assert axes.get_xlim() == pytest.approx((0, 0.74))
    assert axes.images[0].get_extent() == pytest.approx([0, 0.8, 0, 0.8]), "the grid stays where the others are"


@pytest.mark.parametrize("n", [2, 30])
def test_norms_are_drawn_over_seconds(n):
    values = np.abs(states(n, 50)) + 0.01
    norms = LayerNorms(0, 0, "bass", tuple(range(n)), values.astype(np.float32), seconds(50))
    curves, shown = norm_curves(norms, (1.0, 2.0)), norm_map(norms, (1.0, 2.0))
    assert f"image {n} x 50" in description(shown) and curves.axes[0].get_xlim() == pytest.approx((0, 4))
    assert sum(line.get_label().startswith("layer") for line in curves.axes[0].lines) == n
    assert (curves.axes[0].get_legend() is None) == (n > 10)
    assert norms.describe().count("\n") == n
