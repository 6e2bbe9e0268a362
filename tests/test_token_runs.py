"""Runs of a prompt cover every position exactly once, and say of each what `batch.tokens` says."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from looking import FAMILIES, mixed_batch, noise

from audiollm import ArgumentError, Request, demo
from audiollm.token_runs import token_row, token_runs

SESSIONS = {family: demo.load(family) for family in demo.SNAPSHOTS}


def check(batch) -> None:
    for b in range(len(batch)):
        rows = [row for row in batch.tokens if row.sample_index == b]
        runs = token_runs(batch, b)
        assert [p for run in runs for p in range(run.first, run.last + 1)] == list(range(batch.width))
        for run in runs:
            for position in range(run.first, run.last + 1):
                row = rows[position]
                assert (row.role, row.source) == (run.role, run.source)
                assert row == token_row(batch, b, position)
        for left, right in pairwise(runs):
            assert (left.role, left.source) != (right.role, right.source), "runs are as long as can be"
        for run in runs:
            if run.role != "audio":
                assert run.start_s is None
                continue
            slot, timeline = batch.slots[run.slot], batch.timeline[run.slot]
            assert (slot.sample_index, slot.audio_index) == (b, run.source)
            assert run.last_token - run.first_token + 1 == len(run)
            assert timeline.token_to_position(run.first_token) == run.first
            assert (run.start_s, run.end_s) == (
                timeline.token_to_time(run.first_token)[0],
                timeline.token_to_time(run.last_token)[1],
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_of_mixed_requests_cover_every_position_once(family, request):
    check(mixed_batch(request.getfixturevalue(family)))


requests = st.lists(
    st.tuples(
        st.text("abc xyz\n", min_size=1).filter(str.strip),
        st.lists(st.integers(700, 120_000), max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


@given(family=st.sampled_from(demo.SNAPSHOTS), asked=requests)
@settings(max_examples=25)
def test_any_requests_round_trip(family, asked):
    made = []
    for prompt, lengths, marked in asked:
        text = prompt + "<audio>" * len(lengths) if marked else prompt
        made.append(Request(text, [noise(n, k) for k, n in enumerate(lengths)]))
    check(SESSIONS[family].prepare(made))


def test_runs_decode_nothing(monkeypatch):
    batch = SESSIONS["moss_music"].prepare([Request("x", [noise(16_000 * 60)])])
    object.__setattr__(batch, "decode_token", lambda token: pytest.fail("decoded"))
    assert len(token_runs(batch)) < 100


@pytest.mark.parametrize("which", [-1, 1, True, 0.0, "0"])
def test_requests_that_are_not_there_are_named(which):
    batch = SESSIONS["moss_music"].prepare([Request("x")])
    with pytest.raises(ArgumentError, match="not one of the batch's 1"):
        token_runs(batch, which)
    with pytest.raises(ArgumentError, match="not in the prompt of"):
        token_row(batch, 0, batch.width)
