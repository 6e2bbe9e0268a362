"""Attribution in seconds: occlusion and gradients against independent ways to the same numbers."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
from looking import hooks, mixed_requests, noise

from audiollm import ArgumentError, Request, Waveform, edits, load_model
from audiollm.analysis.answers import answer_scores
from audiollm.analysis.gradients import gradient_x_input, integrated_gradients
from audiollm.analysis.occlusion import occlusion
from audiollm.analysis.sweep import time_windows
from audiollm.plots.attribution import attribution_curve, occlusion_curve

ANSWER = "hello"


def gradients_wanted(session):
    return [p.requires_grad for p in session.model.parameters()]


def one(seed=0, n_samples=32_000):
    return Request("hello there", [noise(n_samples, seed)])


def score_of(session, request):
    return float(answer_scores(session, session.prepare([request]), ANSWER).total[0])


def breaking(session, after):
    """A hook of the user's on the head that raises at its `after`-th call."""
    calls = []

    def raising(module, args):
        calls.append(1)
        if len(calls) == after:
            raise RuntimeError("mine")

    return session._adapter.head().register_forward_pre_hook(raising)


# Gradients


def test_gradient_x_input_is_the_slope_of_scaling(session):
    """The sum of gradient x input over a source is the derivative of the score as that source is scaled."""
    batch = session.prepare([Request("what", [noise(32_000), noise(5_000, 2)])])
    found = gradient_x_input(session, batch, ANSWER)
    assert [len(result.values) for result in found] == [len(slot.token_positions) for slot in batch.slots]

    def scaled(factor):
        with session.edit({"projected": edits.scale(factor)}, source=1):
            return float(answer_scores(session, batch, ANSWER).total[0])

    slope = (scaled(1.01) - scaled(0.99)) / 0.02
    assert found[1].values.sum() == pytest.approx(slope, rel=0.02)
    assert found[1].values.sum() != pytest.approx(found[0].values.sum(), rel=0.1)
    assert found[0].score == pytest.approx(scaled(1.0), abs=1e-4) and np.isnan(found[0].delta)


def test_integrated_gradients_add_up(session):
    (found,) = integrated_gradients(session, one(), ANSWER, baseline="mean", steps=4)
    explained = found.score - found.baseline_score
    assert abs(explained) > 0.05 and abs(found.delta) < 0.01 * abs(explained)
    assert found.values.sum() == pytest.approx(explained, rel=0.01)
    assert found.score == pytest.approx(score_of(session, one()), abs=1e-4)
    assert found.n_forwards == 6 and found.forwards_per_s > 0
    assert found.intervals.shape == (len(found.values), 2) and found.intervals[-1, 1] == 2.0


def test_integrated_gradients_from_silence_add_up(session_moss):
    (found,) = integrated_gradients(session_moss, one(), ANSWER, baseline="silence", steps=60)
    assert abs(found.delta) < 0.01 * abs(found.score - found.baseline_score)


def test_requests_of_a_batch_do_not_mix(session_moss):
    batch = session_moss.prepare(mixed_requests())
    found = integrated_gradients(session_moss, batch, [ANSWER, "what", ANSWER], baseline="mean", steps=6)
    alone = integrated_gradients(session_moss, mixed_requests()[1], "what", baseline="mean", steps=6)
    assert [result.sample_index for result in found] == [0, 1, 1]
    for mine, its in zip(found[1:], alone, strict=True):
        assert np.allclose(mine.values, its.values, atol=1e-5)
        assert mine.answer == its.answer == "what" and mine.delta == pytest.approx(its.delta, abs=1e-4)


def test_deepstack_is_held_or_attributed_as_asked(session_moss):
    held = integrated_gradients(session_moss, one(), ANSWER, baseline="mean", steps=6)[0]
    every = integrated_gradients(session_moss, one(), ANSWER, baseline="mean", steps=6, deepstack=True)[0]
    with session_moss.edit({"projected": edits.mean()}):
        assert held.baseline_score == pytest.approx(score_of(session_moss, one()), abs=1e-4)
    streams = {f"deepstack[{k}]": edits.mean() for k in range(3)}
    with session_moss.edit({"projected": edits.mean(), **streams}):
        assert every.baseline_score == pytest.approx(score_of(session_moss, one()), abs=1e-4)
    assert abs(every.delta) < 0.01 * abs(every.score - every.baseline_score)
    assert not np.allclose(held.values, every.values, atol=1e-3)


def test_baselines_are_what_they_are_called(session_moss):
    request, d = one(), session_moss.model.config.get_text_config().hidden_size
    batch = session_moss.prepare([request])
    quiet = session_moss.prepare([Request(request.prompt, [Waveform(np.zeros(32_000, np.float32), 16_000)])])
    silence = session_moss.extract_audio_embeddings(quiet)[0].projected
    with pytest.warns(UserWarning, match="take more steps, or another baseline"):
        by_name = integrated_gradients(session_moss, batch, ANSWER, baseline="silence", steps=2)[0]
    with pytest.warns(UserWarning, match="misses up to"):
        by_tensor = integrated_gradients(session_moss, batch, ANSWER, baseline=silence, steps=2)[0]
    assert np.array_equal(by_name.values, by_tensor.values) and by_tensor.baseline == "given"
    with pytest.warns(UserWarning, match="more steps hardly help"):
        zeros = integrated_gradients(session_moss, batch, ANSWER, baseline="zeros", steps=2)[0]
    with pytest.warns(UserWarning, match="misses"):
        vector = integrated_gradients(session_moss, batch, ANSWER, baseline=torch.zeros(d), steps=2)[0]
    assert np.array_equal(zeros.values, vector.values)


def test_no_graph_of_the_encoder_is_kept(session):
    with session.observe("encoder.out") as seen:
        gradient_x_input(session, one(), ANSWER)
    assert not any(call["encoder.out"].values.requires_grad for call in seen.calls)


def test_after_an_error_within_gradients_all_is_as_before(session_moss):
    before, handle = hooks(session_moss), breaking(session_moss, 4)
    with pytest.raises(RuntimeError, match="mine"):
        integrated_gradients(session_moss, one(), ANSWER, steps=5)
    handle.remove()
    assert hooks(session_moss) == before and not session_moss._contexts and torch.is_grad_enabled()
    assert all(p.grad is None and p.requires_grad for p in session_moss.model.parameters())  # all of MOSS-Music's


def test_gradients_in_bfloat16(tiny_moss, session_moss):
    low = load_model(tiny_moss, device="cpu", dtype=torch.bfloat16)
    mine = integrated_gradients(low, one(), ANSWER, baseline="mean", steps=6)[0]
    full = integrated_gradients(session_moss, one(), ANSWER, baseline="mean", steps=6)[0]
    assert mine.values.dtype == np.float64 and np.corrcoef(mine.values, full.values)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("arguments", "source"),
    (
        ({"baseline": "quiet"}, "baseline"),
        ({"baseline": torch.zeros(7)}, "baseline"),
        ({"baseline": {"projected": "mean"}, "deepstack": True}, "baseline"),
        ({"steps": 0}, "steps"),
        ({"answer": ""}, "answers"),
        ({"batch": Request("no audio")}, "batch"),
        ({"batch": [one()]}, "batch"),
    ),
)
def test_what_gradients_refuse(session_moss, arguments, source):
    with pytest.raises(ArgumentError) as raised:
        integrated_gradients(session_moss, **{"batch": one(), "answer": ANSWER, "steps": 2, **arguments})
    assert raised.value.source == source


def test_deepstack_is_refused_where_there_is_none(session_mf):
    with pytest.raises(ArgumentError, match="has no DeepStack"):
        gradient_x_input(session_mf, one(), ANSWER, deepstack=True)


# Occlusion


@pytest.mark.parametrize(
    ("session", "fill"),
    (("session_mf", "silence"), ("session_moss", "silence"), ("session_moss", "noise")),
    indirect=["session"],
)
def test_a_window_of_the_waveform_by_hand(session, fill):
    batch = session.prepare([Request("what", [noise(8_000), noise(24_000, 1)])])
    found = occlusion(session, batch, ANSWER, window_s=1.0, source=1, fill=fill, seed=3)
    assert found.windows.tolist() == [[0.0, 1.0], [1.0, 1.5]] and found.slot is batch.slots[1]
    heard = found.heard(1)
    samples = noise(24_000, 1).samples
    assert np.array_equal(heard.samples[:16_000], samples[:16_000]) and len(heard.samples) == 24_000
    gone = heard.samples[16_000:]
    assert not gone.any() if fill == "silence" else gone.std() == pytest.approx(samples.std(), rel=0.05)
    by_hand = score_of(session, Request("what", [noise(8_000), heard]))
    assert found.score + found.change[1] == pytest.approx(by_hand, abs=1e-4)
    assert abs(found.change[1]) > 1e-3 and found.n_forwards == 3


@pytest.mark.parametrize("level", ("waveform", "embedding"))
def test_a_window_over_all_leaves_nothing_of_the_audio(session, level):
    """Silence over the whole source is the silent request, whichever way; for MOSS-Music by every way in."""
    found = occlusion(session, one(), ANSWER, window_s=2.0, level=level)
    quiet = Request("hello there", [Waveform(np.zeros(32_000, np.float32), 16_000)])
    assert found.score + found.change[0] == pytest.approx(score_of(session, quiet), abs=1e-4)
    assert abs(found.change[0]) > 0.1


@pytest.mark.parametrize("fill", ("silence", "mean", "noise"))
def test_a_window_of_the_embedding_by_hand(session_moss, fill):
    def request(first):
        return Request("hello there", [first, noise(32_000, 7)])

    session, batch = session_moss, session_moss.prepare([request(noise(32_000))])
    found = occlusion(session, batch, ANSWER, window_s=0.8, fill=fill, level="embedding", batch_size=2)
    assert found.windows.tolist() == [[0.0, 0.8], [0.8, 1.6], [1.6, 2.0]]
    (there, _) = session.extract_audio_embeddings(batch)
    quiet = session.prepare([request(Waveform(np.zeros(32_000, np.float32), 16_000))])
    (silent, _) = session.extract_audio_embeddings(quiet)
    streams = {"projected": (there.projected, silent.projected)}
    for k in range(3):
        streams[f"deepstack[{k}]"] = (there.deepstack_projected[k], silent.deepstack_projected[k])
    generator = torch.Generator().manual_seed(0)
    new = {}
    for point, (x, quiet_x) in streams.items():
        new[point] = x.mean(0).expand_as(x) if fill == "mean" else quiet_x
        if fill == "noise":
            new[point] = x.mean(0) + x.std(0, correction=0) * torch.randn(x.shape, generator=generator)
    in_place = {point: edits.replace(value[10:20]) for point, value in new.items()}
    with session.edit(in_place, seconds=(0.8, 1.6), source=0):
        assert found.score + found.change[1] == pytest.approx(score_of(session, request(noise(32_000))), abs=1e-4)


def test_noise_is_seeded_and_leaves_the_caller_s_stream_alone(session_moss):
    torch.manual_seed(5)
    before, of_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    for level in ("waveform", "embedding"):
        first, again, other = (
            occlusion(session_moss, one(), ANSWER, fill="noise", level=level, seed=seed).change for seed in (1, 1, 2)
        )
        assert np.array_equal(first, again) and not np.allclose(first, other, atol=1e-3)
    assert torch.equal(torch.get_rng_state(), before) and np.array_equal(np.random.get_state()[1], of_numpy)


@pytest.mark.parametrize("level", ("waveform", "embedding"))
def test_batches_and_neighbours_do_not_matter(session_moss, level):
    batch = session_moss.prepare(mixed_requests())
    settings = {"window_s": 1.0, "hop_s": 0.5, "level": level}
    found = occlusion(session_moss, batch, ANSWER, source=1, batch_size=3, **settings)
    alone = occlusion(session_moss, mixed_requests()[1], ANSWER, source=0, batch_size=8, **settings)
    assert len(found.change) == 8 and np.allclose(found.change, alone.change, atol=1e-4)
    assert found.windows[-1].tolist() == [3.5, 4.375] and found.intervals.shape == (55, 2)
    # each token has the mean of the windows over its centre: the one at 0.6 s lies in the first two
    assert found.curve[7] == pytest.approx(found.change[:2].mean()) and found.curve[0] == found.change[0]
    assert np.isfinite(found.curve).all()


def test_occlusion_stops_when_asked_and_says_what_it_costs(session_moss, caplog):
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 2

    with caplog.at_level(logging.INFO, logger="audiollm"):
        found = occlusion(session_moss, one(), ANSWER, window_s=0.4, batch_size=2, stop=stop)
    assert "occlusion: 6 forwards of" in caplog.text
    assert np.isfinite(found.change).tolist() == [True] * 4 + [False] and found.n_forwards == 5
    assert "1 windows were not measured" in found.describe() and np.isnan(found.curve[-1])
    del asked[:]
    found = occlusion(session_moss, one(), ANSWER, window_s=0.8, hop_s=0.4, batch_size=1, stop=stop)
    # the token at 1.0 s lies in a window that was measured, and in one that was not
    assert np.isfinite(found.change).tolist() == [True, True, False, False] and found.curve[12] == found.change[1]
    event = threading.Event()
    event.set()
    none = occlusion(session_moss, one(), ANSWER, window_s=0.4, stop=event)
    assert none.n_forwards == 1 and "Nothing was measured" in none.describe() and occlusion_curve(none)


@pytest.mark.parametrize("level", ("waveform", "embedding"))
def test_after_an_error_within_occlusion_the_hooks_are_as_before(session_moss, level):
    before, handle = hooks(session_moss), breaking(session_moss, 2)
    with pytest.raises(RuntimeError, match="mine"):
        occlusion(session_moss, one(), ANSWER, level=level)
    handle.remove()
    assert hooks(session_moss) == before and not session_moss._contexts


@pytest.mark.parametrize(
    ("arguments", "source", "word"),
    (
        ({"level": "mel"}, "level", "waveform"),
        ({"fill": "mean"}, "fill", "'silence', 'noise'"),
        ({"window_s": 1000}, "window_s", "milliseconds"),
        ({"window_s": 0}, "window_s", "positive"),
        ({"window_s": 0.05, "level": "embedding"}, "window_s", "no audio token"),
        ({"hop_s": 2.0}, "hop_s", "left out"),
        ({"source": 1}, "source", "1 source"),
        ({"source": True}, "source", "True"),
        ({"batch_size": 0}, "batch_size", "from 1"),
        ({"answer": ""}, "answers", "text"),
        ({"stop": 3}, "stop", "Event"),
        ({"request": "bass.wav"}, "request", "Request"),
    ),
)
def test_what_occlusion_refuses(session_moss, arguments, source, word, monkeypatch):
    monkeypatch.setattr(type(session_moss), "forward", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(ArgumentError, match=word) as raised:
        occlusion(session_moss, **{"request": one(), "answer": ANSWER, **arguments})
    assert raised.value.source == source


def test_windows_cover_the_source_once():
    assert time_windows(2.0, 0.5, None).tolist() == [[0.0, 0.5], [0.5, 1.0], [1.0, 1.5], [1.5, 2.0]]
    assert time_windows(1.1, 0.5, 0.2)[-1].tolist() == pytest.approx([0.6, 1.1])
    assert time_windows(0.3, 0.1, 0.1).tolist() == [pytest.approx([a, a + 0.1]) for a in (0.0, 0.1, 0.2)]


def test_words_and_pictures(session_moss):
    found = occlusion(session_moss, one(), ANSWER, window_s=0.5)
    again = occlusion(session_moss, one(), ANSWER, window_s=0.5)
    assert repr(found) == repr(again) and found.describe() == again.describe() and "nan" not in repr(found)
    k = int(np.argmin(found.change))
    if found.change[k] < 0:
        assert f"without {0.5 * k:.2f}-{0.5 * k + 0.5:.2f} s" in found.describe()
    figure = occlusion_curve(found)
    bars = [line for line in figure.axes[1].lines if line.get_linewidth() == 3]
    assert [bar.get_ydata()[0] for bar in bars] == found.change.tolist()
    assert "seconds" in figure.axes[1].get_xlabel() and figure.axes[1].get_xlim() == (0, 2)
    results = gradient_x_input(session_moss, mixed_requests()[1], ANSWER)
    figure = attribution_curve(results)
    assert [len(axes.patches) for axes in figure.axes] == [55, 4]
    assert figure.axes[0].patches[3].get_height() == pytest.approx(results[0].values[3])
    assert figure.axes[0].patches[3].get_x() == pytest.approx(0.24)
    assert results[0].name in results[0].describe() and "seconds" in figure.axes[1].get_xlabel()
    with pytest.raises(ValueError, match="no attribution"):
        attribution_curve([])
    with pytest.raises(ArgumentError, match="waveform"):
        occlusion(session_moss, one(), ANSWER, level="embedding").heard(0)


def test_a_source_beside_a_longer_one_is_occluded(session):
    request = Request("two", [noise(20_000), noise(8_000, 1)])
    both = occlusion(session, request, "x", window_s=0.25, source=1, level="embedding", fill="mean")
    assert np.isfinite(both.change).all() and len(both.change) == 2
