"""Intervals of an annotation -> one label a token, at its centre."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from audiollm import Request, Waveform
from audiollm.analysis.labels import label_tokens
from audiollm.errors import ArgumentError

# 25 tokens of 40 ms; centres 0.02, 0.06, ... 0.98 s.
EDGES = np.arange(26) * 0.04
TOKENS = np.stack([EDGES[:-1], EDGES[1:]], axis=1)


def test_each_token_takes_the_label_at_its_centre():
    found = label_tokens(TOKENS, [(0.0, 0.5, "A"), (0.5, 1.0, "B")])
    # Token 12 covers 0.48-0.52 s, its centre 0.50 is where B begins: intervals are half-open.
    assert found.labels.tolist() == ["A"] * 12 + ["B"] * 13
    assert found.tokens.tolist() == list(range(25)) and found.n_unlabelled == 0
    assert np.array_equal(found.intervals, TOKENS)


def test_tokens_without_a_label_are_dropped():
    found = label_tokens(TOKENS, [(0.6, 0.8, "B"), (0.1, 0.3, "A")])  # in any order, with gaps
    assert found.tokens.tolist() == [2, 3, 4, 5, 6, 15, 16, 17, 18, 19]
    assert found.labels.tolist() == ["A"] * 5 + ["B"] * 5
    assert (found.n_tokens, found.n_unlabelled, found.n_ambiguous) == (25, 15, 0)


def test_ambiguous_edges_are_dropped_within_the_margin():
    found = label_tokens(TOKENS, [(0.0, 0.5, "A"), (0.5, 1.0, "B")], margin_s=0.05)
    assert sorted(set(range(25)) - set(found.tokens.tolist())) == [11, 12, 13]  # centres 0.46, 0.50, 0.54
    assert found.n_ambiguous == 3
    gap = label_tokens(TOKENS, [(0.2, 0.4, "A"), (0.6, 0.8, "B")], margin_s=0.05)
    assert gap.tokens.tolist() == [6, 7, 8, 16, 17, 18]  # both sides of both


def test_only_a_change_of_label_within_the_source_is_an_edge():
    same = label_tokens(TOKENS, [(0.0, 0.5, "A"), (0.5, 1.0, "A")], margin_s=0.1)
    assert len(same) == 25  # neither where A goes on, nor at 0 s, nor at the source's end
    longer = label_tokens(TOKENS, [(-1.0, 30.0, "A")], margin_s=0.1)
    assert len(longer) == 25


def test_a_millisecond_of_overlap_is_rounding():
    found = label_tokens(TOKENS, [(0.0, 0.5004, "A"), (0.5, 1.0, "B")])
    assert found.labels.tolist() == ["A"] * 12 + ["B"] * 13


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from("AB")), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.integers(0, 3),
)
def test_it_does_what_a_slow_loop_does(points, margin):
    """Grid times in hundredths of a second, so that neither way meets a tie by rounding; margins in 0.033 s."""
    points = sorted(points)
    spans = [(s / 40 + 0.003, s / 40 + 0.017, label) for s, label in points]
    margin_s = margin * 0.0331

    def at(t):
        return next((label for s, e, label in spans if s <= t < e), None)

    edges = [t for s, e, _ in spans for t in (s, e) if 0.001 < t < 0.999]
    wanted = {}
    for k, c in enumerate(TOKENS.mean(axis=1)):
        if at(c) is not None and all(abs(c - t) >= margin_s for t in edges):
            wanted[k] = at(c)
    if not wanted:
        with pytest.raises(ArgumentError, match="no token of source gets a label"):
            label_tokens(TOKENS, spans, margin_s=margin_s)
    else:
        found = label_tokens(TOKENS, spans, margin_s=margin_s)
        assert dict(zip(found.tokens.tolist(), found.labels.tolist(), strict=True)) == wanted


@pytest.mark.parametrize("family", ("session_mf", "session_moss"))
def test_on_a_model_s_timeline(family, request):
    session = request.getfixturevalue(family)
    noise = np.random.default_rng(0).normal(size=5 * 16_000).astype(np.float32) * 0.1
    timeline = session.prepare([Request("x", [Waveform(noise, 16_000)])]).timeline[0]
    found = label_tokens(timeline, np.array([[0, 2], [2, 5]]), [120.0, 90.0])
    assert found.labels.dtype == np.float64 and len(found) == timeline.n_tokens
    for token, label in zip(found.tokens, found.labels, strict=True):
        assert label == (120.0 if sum(timeline.token_to_time(int(token))) / 2 < 2 else 90.0)


def test_words():
    found = label_tokens(TOKENS, [(0.0, 0.4, "A"), (0.6, 1.0, "B")], margin_s=0.05)
    assert repr(found) == (
        "TokenLabels('source': 18 of 25 tokens, 2 different labels; dropped: 5 without a label, 2 near an edge)"
    )
    assert "0.72 s in 18 of 25 tokens are labelled: A 0.36 s, B 0.36 s" in found.describe()
    assert "values from 90 to 120" in label_tokens(TOKENS, [(0, 0.5, 120.0), (0.5, 1, 90.0)]).describe()


@pytest.mark.parametrize(
    "intervals, labels, options, message",
    [
        ([], None, {}, "no intervals"),
        ([(0, 1)], None, {}, "rows"),
        ("0 1 A", None, {}, "rows"),
        ([[0, 1]], ["A", "B"], {}, "1 intervals and 2 labels"),
        ([[0, 1, 2]], ["A"], {}, r"\[n, 2\]"),
        ([[0, np.nan]], ["A"], {}, "finite"),
        ([[0.5, 0.5]], ["A"], {}, "does not end after it starts"),
        ([[0, 0.6], [0.5, 1]], ["A", "B"], {}, "overlap"),
        ([[0, 0.5], [0.5, 1]], ["A", 1], {}, "all strings or all numbers"),
        ([[0, 0.5], [0.5, 1]], [1.0, np.nan], {}, "NaN"),
        ([[0, 1]], ["A"], {"margin_s": -0.1}, "margin_s"),
        ([[0, 1]], ["A"], {"margin_s": "0.1"}, "margin_s"),
        ([[2000, 5000]], ["A"], {}, "did you pass milliseconds"),
    ],
)
def test_what_is_refused(intervals, labels, options, message):
    with pytest.raises(ArgumentError, match=message) as error:
        label_tokens(TOKENS, intervals, labels, **options)
    assert error.value.code == "bad_argument" and error.value.source


@pytest.mark.parametrize("source", (np.zeros((0, 2)), np.zeros(4), [[1.0, 0.5]], [[0.5, 1.0], [0.0, 0.5]]))
def test_a_source_that_has_no_seconds(source):
    with pytest.raises(ArgumentError, match=r"ascending|\[n, 2\]"):
        label_tokens(source, [(0, 1, "A")])
