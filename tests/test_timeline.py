"""The timeline: every round trip, for any lengths, file rates, and numbers of sources and requests."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from audiollm import ArgumentError, Request, Session, Waveform
from audiollm.timeline import Clock, SourceTimeline, Timeline

COUNTS = json.loads((Path(__file__).parent / "data/music_flamingo/cases/token_counts.json").read_text())["rows"]
MF = Clock(16_000, 160, 640, 480_000, counts_started_frames=True, token_sees="its window")
WINDOW = MF.samples_per_window
WHOLE_FRAMES = Clock(22_050, 147, 1_176, 35_280, counts_started_frames=False, token_sees="its chunk")
CLOCKS = {"started_frames_count": MF, "whole_frames_count": WHOLE_FRAMES}


def mf_tokens(n_samples: int) -> int:
    """The rule of token_counts.json, window by window."""
    windows, tail = divmod(n_samples, WINDOW)
    frames = -(-tail // 160)
    conv = (frames - 1) // 2 + 1
    return 750 * windows + ((conv - 2) // 2 + 1 if tail else 0)


# Whole windows, and tails from one sample to several tokens before and after a window's edge.
lengths = st.one_of(
    st.integers(321, 2 * WINDOW),
    st.builds(lambda tokens: 640 * tokens, st.integers(1, 40 * 750)),
    st.builds(lambda w, d: w * WINDOW + d, st.integers(1, 40), st.integers(-1_300, 1_300)),
    st.builds(lambda w, d: w * WINDOW + d, st.integers(1, 40), st.integers(1, 320)),
)
rates = st.one_of(
    st.sampled_from([1_000, 8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 768_000]),
    st.integers(1_000, 768_000),
)


@st.composite
def timelines(draw: st.DrawFn) -> SourceTimeline:
    n_samples, first = draw(lengths), draw(st.integers(0, 500))
    n_tokens = mf_tokens(n_samples)
    return SourceTimeline(
        0, 0, "clip", MF, n_samples, n_tokens, draw(rates), np.arange(first, first + n_tokens, dtype=np.int64)
    )


@st.composite
def tokens_of(draw: st.DrawFn) -> tuple[SourceTimeline, int]:
    timeline = draw(timelines())
    k = draw(st.one_of(st.integers(0, timeline.n_tokens - 1), st.sampled_from([0, timeline.n_tokens - 1])))
    return timeline, k


@pytest.mark.parametrize("row", COUNTS, ids=lambda row: str(row["samples"]))
def test_token_counts_are_the_published_ones(row: dict, session_mf: Session) -> None:
    family = session_mf._adapter
    assert family.n_tokens(row["samples"]) == row["tokens"] == mf_tokens(row["samples"])
    assert family.n_tokens(7 * WINDOW + row["samples"]) == 7 * 750 + row["tokens"]


@given(lengths)
def test_token_counts_follow_the_rule_at_any_length(session_mf: Session, n_samples: int) -> None:
    assert session_mf._adapter.n_tokens(n_samples) == mf_tokens(n_samples)


def test_the_shortest_source_has_one_token(session_mf: Session) -> None:
    family = session_mf._adapter
    assert family.n_tokens(family.shortest()) == 1
    assert family.n_tokens(family.shortest() - 1) == 0


def test_the_clock_is_the_published_one(session_mf: Session) -> None:
    clock = session_mf._adapter.clock
    assert (clock.sample_rate, clock.samples_per_frame, clock.samples_per_token, clock.samples_per_window) == (
        16_000,
        160,
        640,
        WINDOW,
    )
    assert (clock.token_s, clock.window_s, clock.tokens_per_window) == (0.04, 30.0, 750)


@given(timelines())
def test_intervals_are_sorted_apart_and_clipped(timeline: SourceTimeline) -> None:
    intervals = timeline.token_intervals()
    assert intervals.shape == (timeline.n_tokens, 2)
    assert intervals.dtype == np.float64
    assert (intervals[:, 0] < intervals[:, 1]).all()
    assert np.array_equal(intervals[1:, 0], intervals[:-1, 1])
    assert intervals[0, 0] == 0
    assert intervals[-1, 1] <= timeline.used_s
    assert np.allclose(intervals[:, 0], 0.04 * np.arange(timeline.n_tokens), rtol=0, atol=1e-9)


@given(tokens_of(), st.floats(0, 1, exclude_max=True))
def test_token_time_token(pair: tuple[SourceTimeline, int], within: float) -> None:
    timeline, k = pair
    start_s, end_s = timeline.token_to_time(k)
    assert (start_s, end_s) == tuple(timeline.token_intervals()[k])
    assert timeline.time_to_token(start_s) == k
    assert timeline.time_to_token(min(start_s + within * (end_s - start_s), math.nextafter(end_s, 0))) == k
    after = timeline.time_to_token(end_s)
    assert after == (k + 1 if k + 1 < timeline.n_tokens else k if end_s == timeline.used_s else None)


@given(tokens_of())
def test_token_samples_token(pair: tuple[SourceTimeline, int]) -> None:
    timeline, k = pair
    first, end = timeline.token_to_samples(k)
    assert (first, end) == (640 * k, min(640 * (k + 1), timeline.n_samples))
    assert timeline.sample_to_token(first) == timeline.sample_to_token(end - 1) == k
    assert k == 0 or timeline.sample_to_token(first - 1) == k - 1
    assert timeline.token_to_time(k) == (first / 16_000, end / 16_000)


@given(timelines(), st.data())
def test_sample_token_samples(timeline: SourceTimeline, data: st.DataObject) -> None:
    sample = data.draw(
        st.one_of(st.integers(0, timeline.n_samples), st.integers(max(0, timeline.n_samples - 400), timeline.n_samples))
    )
    token = timeline.sample_to_token(sample)
    if token is None:
        assert sample >= 640 * timeline.n_tokens
    else:
        first, end = timeline.token_to_samples(token)
        assert first <= sample < end or sample == end == timeline.n_samples
    assert timeline.time_to_token(sample / 16_000) == token


@given(timelines(), st.floats(0, 1))
def test_any_second_lies_in_its_token(timeline: SourceTimeline, part: float) -> None:
    second = min(part * timeline.used_s, timeline.used_s)
    token = timeline.time_to_token(second)
    if token is None:
        assert second >= timeline.token_intervals()[-1, 1]
    else:
        start_s, end_s = timeline.token_to_time(token)
        assert start_s <= second < end_s or second == end_s == timeline.used_s


@given(tokens_of())
def test_token_frames_token(pair: tuple[SourceTimeline, int]) -> None:
    timeline, k = pair
    first, end = timeline.token_to_frames(k)
    assert first == 4 * k
    assert end == min(4 * k + 4, timeline.n_frames)
    assert timeline.n_frames == -(-timeline.n_samples // 160)
    assert {timeline.frame_to_token(frame) for frame in range(first, end)} == {k}


@given(timelines())
def test_the_last_frame_is_inside(timeline: SourceTimeline) -> None:
    token = timeline.frame_to_token(timeline.n_frames - 1)
    assert token in (None, timeline.n_tokens - 1)
    with pytest.raises(ArgumentError):
        timeline.frame_to_token(timeline.n_frames)


@given(tokens_of())
def test_token_file_samples_token(pair: tuple[SourceTimeline, int]) -> None:
    timeline, k = pair
    first, end = timeline.token_to_file_samples(k)
    start_s, end_s = timeline.token_to_time(k)
    assert (first - 1) / timeline.file_rate < start_s <= first / timeline.file_rate
    assert (end - 1) / timeline.file_rate < end_s <= end / timeline.file_rate
    if first < end:
        assert timeline.file_sample_to_token(first) == timeline.file_sample_to_token(end - 1) == k
    assert k == 0 or first == 0 or timeline.file_sample_to_token(first - 1) < k
    assert k == 0 or timeline.token_to_file_samples(k - 1)[1] == first


@given(timelines(), st.floats(0, 1))
def test_file_sample_token_file_samples(timeline: SourceTimeline, part: float) -> None:
    count = -(-timeline.n_samples * timeline.file_rate // 16_000)
    sample = int(part * count)
    token = timeline.file_sample_to_token(sample)
    if token is None:
        assert sample / timeline.file_rate >= timeline.token_intervals()[-1, 1]
    else:
        first, end = timeline.token_to_file_samples(token)
        assert first <= sample < end or (sample in (count, count - 1) and token == timeline.n_tokens - 1)
    assert timeline.file_sample_to_token(count) in (None, timeline.n_tokens - 1)
    with pytest.raises(ArgumentError):
        timeline.file_sample_to_token(count + 1)


@given(timelines())
def test_windows_partition_the_tokens(timeline: SourceTimeline) -> None:
    windows = timeline.windows()
    assert [w.index for w in windows] == list(range(-(-timeline.n_samples // WINDOW)))
    assert [w.start_s for w in windows] == [30.0 * w.index for w in windows]
    assert [w.end_s for w in windows] == [*(w.start_s for w in windows[1:]), timeline.used_s]
    tokens = [k for w in windows if w.n_tokens for k in range(w.first_token, w.last_token + 1)]
    assert tokens == list(range(timeline.n_tokens))
    assert all(w.n_tokens == 750 for w in windows[:-1])
    for w in windows:
        if w.n_tokens:
            assert timeline.token_to_time(w.first_token)[0] == w.start_s
            assert timeline.token_to_time(w.last_token)[1] <= w.end_s
        else:
            assert w.first_token is w.last_token is None
            assert timeline.n_samples - WINDOW * w.index <= 320


def test_a_window_says_what_its_tokens_see(session_mf: Session, mf_wave) -> None:
    batch = session_mf.prepare([Request("hi", [mf_wave("w2s")])])
    assert "30 s window" in batch.slots[0].windows[0].sees
    assert batch.slots[0].windows == batch.timeline[0].windows()


@given(timelines(), st.integers(1, 10**9))
def test_outside_is_refused_naming_the_range(timeline: SourceTimeline, far: int) -> None:
    for call, end in (
        (timeline.token_to_time, timeline.n_tokens),
        (timeline.token_to_samples, timeline.n_tokens),
        (timeline.token_to_frames, timeline.n_tokens),
        (timeline.token_to_file_samples, timeline.n_tokens),
        (timeline.token_to_position, timeline.n_tokens),
        (timeline.sample_to_token, timeline.n_samples + 1),
    ):
        for value in (-far, end - 1 + far):
            with pytest.raises(ArgumentError, match=rf"{value} is outside \[0, {end}\) of clip"):
                call(value)
    for second in (
        -1e-9,
        -float(far),
        math.nextafter(timeline.used_s, math.inf),
        timeline.used_s + far,
        math.nan,
        math.inf,
    ):
        with pytest.raises(ValueError, match=r"outside \[0, .*of clip"):
            timeline.time_to_token(second)


@pytest.mark.parametrize("value", [1.0, "1", None, np.float64(1)])
def test_a_token_number_is_whole(value: object) -> None:
    timeline = SourceTimeline(0, 0, "clip", MF, 32_000, 50, 16_000, np.arange(50))
    with pytest.raises(ArgumentError, match="not a whole number"):
        timeline.token_to_time(value)
    assert timeline.token_to_time(np.int64(1)) == (0.04, 0.08)


def test_milliseconds_are_guessed() -> None:
    timeline = SourceTimeline(0, 0, "clip", MF, 32_000, 50, 16_000, np.arange(50))
    with pytest.raises(ArgumentError, match="milliseconds"):
        timeline.time_to_token(1_500)


def test_a_timeline_is_frozen() -> None:
    timeline = SourceTimeline(0, 0, "clip", MF, 32_000, 50, 16_000, np.arange(50))
    with pytest.raises(FrozenInstanceError):
        timeline.n_tokens = 3


@given(st.sampled_from(list(CLOCKS)), st.integers(0, 10**6), st.integers(0, 40))
def test_arithmetic_holds_for_any_clock(name: str, missing: int, windows: int) -> None:
    clock = CLOCKS[name]
    n_samples = windows * clock.samples_per_window + 1 + missing % clock.samples_per_window
    n_tokens = -(-n_samples // clock.samples_per_token)
    timeline = SourceTimeline(0, 0, "clip", clock, n_samples, n_tokens, 44_100, np.arange(n_tokens))
    for k in {0, n_tokens // 2, n_tokens - 1}:
        start_s, end_s = timeline.token_to_time(k)
        assert timeline.time_to_token(start_s) == timeline.time_to_token(math.nextafter(end_s, 0)) == k
    assert timeline.time_to_token(timeline.used_s) == n_tokens - 1


@given(
    st.one_of(st.integers(147, 200_000), st.builds(lambda w, d: 35_280 * w + d, st.integers(1, 9), st.integers(0, 160)))
)
def test_a_frame_that_is_only_begun_counts_where_the_clock_says_so(n_samples: int) -> None:
    n_frames = n_samples // 147
    timeline = SourceTimeline(0, 0, "clip", WHOLE_FRAMES, n_samples, -(-n_frames // 8), 44_100, np.arange(n_frames))
    assert timeline.n_frames == n_frames
    assert timeline.token_to_frames(timeline.n_tokens - 1)[1] == n_frames
    windows = timeline.windows()
    assert all(w.n_tokens for w in windows)
    assert sum(w.n_tokens for w in windows) == timeline.n_tokens


# Whole batches: any requests, any numbers of sources, any rates.

clips = st.builds(lambda n, rate: (n, rate), st.integers(900, 9_000), st.sampled_from([8_000, 16_000, 22_050, 44_100]))
batches = st.lists(
    st.tuples(st.text("ab \n", min_size=1, max_size=9), st.lists(clips, max_size=3)), min_size=1, max_size=4
)


@given(batches)
@example([("a", []), ("b", [(321, 16_000)] * 5), ("a b", [(480_320, 16_000), (961, 16_000)]), ("a", [])])
@settings(max_examples=10)
def test_positions_in_padded_mixed_batches(session_mf: Session, asked: list) -> None:
    requests = [
        Request(f"q{text}", [Waveform(np.full(n, 0.1), rate) for n, rate in sources]) for text, sources in asked
    ]
    batch = session_mf.prepare(requests)
    assert [(s.sample_index, s.audio_index) for s in batch.slots] == [
        (b, k) for b, r in enumerate(requests) for k in range(len(r.audios))
    ]
    assert len(batch.timeline) == len(batch.slots)
    owner = np.full(batch.inputs["input_ids"].shape, -1)
    for i, (slot, timeline) in enumerate(zip(batch.slots, batch.timeline, strict=True)):
        check_slot(batch, i, slot, timeline)
        owner[slot.sample_index, slot.token_positions] = i
    for b in range(len(requests)):
        for position in range(owner.shape[1]):
            place = batch.timeline.position_to_source(b, position)
            assert (place is None) == (owner[b, position] < 0)
    audio = (batch.inputs["input_ids"] == session_mf.processor.audio_token_id).numpy()
    assert np.array_equal(audio, owner >= 0)


def check_slot(batch, i: int, slot, timeline: SourceTimeline) -> None:
    n_samples = len(slot.waveform)
    assert timeline.n_samples == n_samples
    assert timeline.used_s == slot.used_s == n_samples / 16_000
    assert timeline.n_tokens == len(slot.token_positions) == mf_tokens(n_samples)
    assert timeline.file_rate == batch.requests[slot.sample_index].audios[slot.audio_index].sample_rate
    positions = slot.token_positions.tolist()
    assert slot.token_positions.dtype == torch.int64
    assert positions == list(range(positions[0], positions[0] + timeline.n_tokens))
    for k in (0, timeline.n_tokens - 1):
        assert timeline.token_to_position(k) == positions[k]
        assert timeline.position_to_token(positions[k]) == k
        place = batch.timeline.position_to_source(slot.sample_index, positions[k])
        assert place == (slot.audio_index, k, *timeline.token_to_time(k))
        row = batch.tokens[slot.sample_index * batch.width + positions[k]]
        assert (row.sample_index, row.position, row.role, row.source) == (
            slot.sample_index,
            positions[k],
            "audio",
            slot.audio_index,
        )
    assert timeline.position_to_token(positions[0] - 1) is None
    assert timeline.position_to_token(positions[-1] + 1) is None
    assert batch.timeline[i] is timeline


def test_a_position_of_another_request_is_not_mixed_up() -> None:
    sources = [SourceTimeline(b, 0, "clip", MF, 1_280, 2, 16_000, np.array([5 + b, 6 + b])) for b in range(2)]
    timeline = Timeline(tuple(sources))
    assert timeline.position_to_source(0, 7) is None
    assert timeline.position_to_source(1, 7) == (0, 1, 0.04, 0.08)
    assert timeline.position_to_source(2, 7) is None


def test_a_tail_without_a_token_has_no_time(session_mf: Session, mf_wave) -> None:
    batch = session_mf.prepare([Request("hi", [mf_wave("w30t", 0, 480_320), mf_wave("w2s")])])
    first, second = batch.timeline
    assert first.time_to_token(30.0) is None
    assert first.time_to_token(30.02) is None
    assert first.time_to_token(math.nextafter(30.0, 0)) == 749
    assert [w.n_tokens for w in first.windows()] == [750, 0]
    assert second.token_to_time(0) == (0.0, 0.04)
