"""The cache of layers: never above its limit, what was used last stays; and as few prefills as its limit allows."""

from __future__ import annotations

import numpy as np
import pytest
from audiollm.widgets.layer_cache import LayerCache, LayerStates, groups
from hypothesis import given
from hypothesis import strategies as st
from looking import noise

from audiollm import ArgumentError, Request
from audiollm.analysis import layer_norms


@pytest.fixture
def batch(session_moss):
    return session_moss.prepare([Request("hello", [noise(32_000), noise(70_000, 1)])])


@pytest.fixture
def asked(session_moss, monkeypatch):
    """The layers of every prefill."""
    extract, calls = session_moss.extract_contextual_embeddings, []

    def counted(batch, layers):
        calls.append(list(layers))
        return extract(batch, layers)

    monkeypatch.setattr(session_moss, "extract_contextual_embeddings", counted)
    return calls


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.sampled_from(["put", "get"]), st.integers(0, 6), st.integers(0, 50)), max_size=40),
)
def test_it_holds_what_was_used_last_within_its_limit(limit, steps):
    cache, model = LayerCache(limit), {}  # the model is a dict in the order of use
    for act, key, size in steps:
        if act == "put":
            cache.put(key, size, size)
            model.pop(key, None)
            if size <= limit:
                model[key] = size
            while sum(model.values()) > limit:
                del model[next(iter(model))]
        else:
            assert cache.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        assert {k for k in range(7) if k in cache} == set(model) and len(cache) == len(model)
        assert cache.nbytes == sum(model.values()) <= limit
    cache.clear()
    assert cache.nbytes == len(cache) == 0


@pytest.mark.parametrize("limit", [-1, 1.5, True, None])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ArgumentError, match="whole number of bytes"):
        LayerCache(limit)


@given(st.sets(st.integers(0, 30)), st.integers(1, 9))
def test_groups_are_all_layers_once_in_order(layers, at_once):
    found = groups(list(layers), at_once)
    assert [k for group in found for k in group] == sorted(layers)
    assert all(len(group) <= at_once for group in found) and len(found) == -(-len(layers) // at_once)


def test_a_small_batch_is_computed_once_for_all_layers(session_moss, batch, asked):
    states = LayerStates(session_moss, batch)
    assert states.keeps_all and not states.is_quick((1,))
    first = states.states((1,))
    assert states.is_quick(range(session_moss.n_layers + 1))
    states.states((0, 3))
    states.norms(1, range(session_moss.n_layers + 1))
    assert asked == [list(range(session_moss.n_layers + 1))]
    assert [part.shape[0] for part in first[1]] == [timeline.n_tokens for timeline in batch.timeline]


def test_a_large_batch_is_computed_layer_by_layer_as_asked(session_moss, batch, asked):
    states = LayerStates(session_moss, batch, ahead_bytes=0)
    states.states((2,))
    states.states((2, 1))
    states.states((1, 2))
    assert asked == [[2], [1]] and not states.is_quick((1,))
    assert states.cache.nbytes == batch.nbytes((1, 2))


def test_the_limit_holds_and_norms_are_those_of_the_analysis(session_moss, batch, asked):
    every, one = range(session_moss.n_layers + 1), batch.nbytes((0,))
    states = LayerStates(session_moss, batch, limit_bytes=2 * one, ahead_bytes=0)
    found = states.norms(1, every)
    assert states.cache.nbytes <= 2 * one
    assert asked == groups(list(every), 2), "two layers fit at once"
    np.testing.assert_allclose(found, layer_norms(session_moss, batch)[1].values, rtol=1e-6)


def test_norms_come_from_states_that_are_kept(session_moss, batch, asked):
    states = LayerStates(session_moss, batch, ahead_bytes=0)
    states.states((2,))
    states.norms(0, (2,))
    states.norms(1, (2,))
    assert asked == [[2]]


def test_a_limit_below_two_layers_is_refused(session_moss, session_mf, batch):
    with pytest.raises(ArgumentError, match="pass a larger limit_bytes") as caught:
        LayerStates(session_moss, batch, limit_bytes=2 * batch.nbytes((0,)) - 1)
    assert caught.value.code == "too_large"
    with pytest.raises(ArgumentError, match="prepare the requests with this session"):
        LayerStates(session_mf, batch)
