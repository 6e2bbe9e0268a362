"""Steering: the vector by hand, what applying it does at every step, and a report that few requests cannot flatter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from looking import hooks, mixed_requests, noise

from audiollm import ArgumentError, Request
from audiollm.analysis.separation import separation
from audiollm.analysis.steering import steering_trace, steering_vector
from audiollm.plots.steering import steering_report


def asked(*prompts, seed=0):
    return [Request(prompt, [noise(16_000, seed + k)]) for k, prompt in enumerate(prompts)]


POSITIVES = asked("hello", "hello there you")
NEGATIVES = asked("what", seed=4)


def test_the_vector_by_hand(session):
    """Each request by itself, by the core's own hidden states, against batches with padding."""
    found = steering_vector(session, POSITIVES, NEGATIVES, "resid[2]", "last", batch_size=3)

    def last(request):
        return session.forward(session.prepare([request]), output_hidden_states=True).hidden_states[2][0, -1].double()

    wanted = torch.stack([last(r) for r in POSITIVES]).mean(0) - last(NEGATIVES[0])
    assert found.vector.dtype == torch.float32 and torch.allclose(found.vector.double(), wanted, atol=1e-4)
    assert found.norm == pytest.approx(float(wanted.norm()), rel=1e-3) and found.n_forwards == 3
    assert found.forwards_per_s > 0 and str(found.forwards_per_s) not in repr(found)


@pytest.mark.parametrize(("point", "pool"), (("resid[1]", "audio"), ("projected", "audio"), ("projected", "all"),
                                             ("mlp_out[0]", "text"), ("embed", "all")))  # fmt: skip
def test_pools_are_means_of_their_rows(session_moss, point, pool):
    found = steering_vector(session_moss, POSITIVES, NEGATIVES, point, pool, batch_size=2)
    tokens = None if pool == "all" else pool

    def mean(request):
        batch = session_moss.prepare([request])
        return session_moss.capture(batch, point, tokens=tokens)[point].values.double().mean(0)

    wanted = torch.stack([mean(r) for r in POSITIVES]).mean(0) - mean(NEGATIVES[0])
    assert torch.allclose(found.vector.double(), wanted, atol=1e-4) and found.point == point


def test_applying_adds_the_vector_at_every_position_and_step(session):
    found = steering_vector(session, POSITIVES, NEGATIVES, "resid[1]")
    request = asked("hello there", seed=9)
    with session.observe(["resid[0]", "resid[1]"]) as plain:
        untouched = session.generations(request, max_new_tokens=3)
    with found.apply(session, 0.0), session.observe("resid[1]") as seen:
        assert session.generations(request, max_new_tokens=3)[0].token_ids == untouched[0].token_ids
    with found.apply(session, 3.0), session.observe(["resid[0]", "resid[1]"]) as seen:
        session.generations(request, max_new_tokens=3)
    # the prompt's rows before the first steered step are those of the plain run, plus the vector
    assert torch.allclose(
        seen["resid[1]"].prompt.values, plain["resid[1]"].prompt.values + 3.0 * found.vector, atol=1e-4
    )
    with found.apply(session, 3.0, steps=None), session.observe("resid[1]") as prompt_only:
        session.generations(request, max_new_tokens=3)
    first, only = seen["resid[1]"].generated, prompt_only["resid[1]"].generated
    if torch.equal(seen["resid[0]"].generated.values[:1], plain["resid[0]"].generated.values[:1]):
        assert torch.allclose(first.values[0] - only.values[0], 3.0 * found.vector, atol=1e-3)
    assert first.rows.step.tolist() == [1, 2] and not torch.allclose(first.values, only.values, atol=0.1)


def test_a_selection_is_steered_alone_and_an_error_leaves_no_hook(session_moss):
    found = steering_vector(session_moss, POSITIVES, NEGATIVES, "resid[1]")
    batch = session_moss.prepare(mixed_requests())
    plain = session_moss.capture(batch, "resid[1]")["resid[1]"]
    with found.apply(session_moss, seconds=(0.5, 1.0), source=1, steps=None):
        seen = session_moss.capture(batch, "resid[1]")["resid[1]"]
    moved = (seen.values != plain.values).any(dim=1).numpy()
    centre = (plain.rows.start_s + plain.rows.end_s) / 2
    assert moved.any() and (moved == ((plain.rows.source == 1) & (centre >= 0.5) & (centre < 1.0))).all()
    before = hooks(session_moss)
    with pytest.raises(RuntimeError, match="mine"), found.apply(session_moss):
        raise RuntimeError("mine")
    assert hooks(session_moss) == before and not session_moss._contexts


# The report


def test_few_requests_in_many_dimensions_are_not_flattered():
    """Sets that do not differ: the direction of all separates them perfectly, held-out requests are at chance or below."""
    rng, accuracies = np.random.default_rng(0), []
    for _ in range(40):
        found = separation(rng.normal(size=(4, 500)), rng.normal(size=(4, 500)))
        assert (found.positives > 0).all() and (found.negatives < 0).all()
        accuracies.append(found.accuracy)
    assert np.mean(accuracies) < 0.55


def test_sets_that_differ_are_found_to():
    rng = np.random.default_rng(1)
    shift = np.zeros(50)
    shift[0] = 20.0
    found = separation(rng.normal(size=(6, 50)) + shift, rng.normal(size=(3, 50)))
    assert found.accuracy == 1.0 and found.n_tested == 9
    assert found.positives.mean() == pytest.approx(-found.negatives.mean()) and found.positives.mean() > 9
    assert "9 of 9" in found.describe() and "67%" in found.describe()


def test_the_interval_is_wilson_s():
    """8 of 10: 0.490 to 0.943, as tables of the score interval have it."""
    rng = np.random.default_rng(2)
    while True:
        found = separation(rng.normal(size=(5, 3)) + 0.9, rng.normal(size=(5, 3)))
        if found.n_right == 8:
            break
    assert found.interval == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_what_cannot_be_held_out_is_not_claimed():
    one = separation(np.ones((1, 4)), np.zeros((1, 4)))
    assert one.n_tested == 0 and np.isnan(one.accuracy) and "not known" in one.describe()
    two = separation(np.arange(8.0).reshape(2, 4), np.zeros((1, 4)))
    assert two.n_tested == 2 and np.isnan(two.held_out_negatives).all()


def test_pairs_are_held_out_together():
    """What a pair shares tells its partner: alone, each is recognised by it; together they are not."""
    rng = np.random.default_rng(3)
    positives, negatives = rng.normal(size=(2, 3, 5))
    rest = [np.delete(s, 1, axis=0).mean(0) for s in (positives, negatives)]
    towards = rest[0] - rest[1]
    wanted = (positives[1] - (rest[0] + rest[1]) / 2) @ towards / np.linalg.norm(towards)
    paired = separation(positives, negatives, paired=True)
    assert paired.held_out_positives[1] == pytest.approx(wanted)
    assert separation(positives, negatives).held_out_positives[1] != pytest.approx(wanted)


# Over seconds, words and pictures


def test_a_trace_by_hand(session_moss):
    found = steering_vector(session_moss, POSITIVES, NEGATIVES, "resid[2]", "audio")
    batch = session_moss.prepare(mixed_requests())
    traces = steering_trace(session_moss, batch, found)
    states = session_moss.extract_contextual_embeddings(batch, layers=(2,))
    assert [(t.sample_index, t.audio_index) for t in traces] == [(0, 0), (1, 0), (1, 1)]
    for trace, mine in zip(traces, states, strict=True):
        wanted = (mine[2].double() @ found.vector.double()).numpy() / found.norm - found.offset
        assert np.allclose(trace.values, wanted, atol=1e-4) and trace.intervals.shape == (len(wanted), 2)
    one = steering_trace(session_moss, POSITIVES[0], found)[0]
    assert one.values.mean() == pytest.approx(found.separation.positives[0], abs=1e-4)


def test_words_and_pictures(session_moss):
    found = steering_vector(session_moss, POSITIVES, NEGATIVES, "resid[2]", "audio")
    again = steering_vector(session_moss, POSITIVES, NEGATIVES, "resid[2]", "audio")
    assert repr(found) == repr(again) and found.describe() == again.describe()
    assert "2 positive minus mean of 1 negative" in found.describe() and "resid[2]" in found.describe()
    traces = steering_trace(session_moss, session_moss.prepare(mixed_requests()), found)
    figure = steering_report(found, traces)
    assert len(figure.axes) == 4 and all("seconds" in axes.get_xlabel() for axes in figure.axes[1:])
    drawn = figure.axes[2].patches[0].get_data()
    assert np.allclose(drawn.values, traces[1].values) and drawn.edges[-1] == pytest.approx(4.375)
    k = int(np.argmax(traces[1].values))
    assert f"{traces[1].intervals[k, 0]:.2f}-{traces[1].intervals[k, 1]:.2f} s" in traces[1].describe()
    dots = next(line for line in figure.axes[0].lines if line.get_label() == "positives")
    assert np.array_equal(dots.get_xdata(), found.separation.held_out_positives, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "source"),
    (
        ({"positives": []}, "positives"),
        ({"negatives": POSITIVES[0]}, "negatives"),
        ({"positives": ["clip.wav"]}, "positives"),
        ({"negatives": [Request("no audio")], "pool": "audio"}, "negatives"),
        ({"negatives": [Request("no audio")], "point": "projected", "pool": "all"}, "negatives"),
        ({"point": "resid"}, "points"),
        ({"point": "resid*"}, "point"),
        ({"point": "language_model"}, "point"),
        ({"point": "projected"}, "pool"),
        ({"pool": "mean"}, "pool"),
        ({"paired": True}, "paired"),
        ({"batch_size": 0}, "batch_size"),
    ),
)
def test_what_is_refused_before_the_model_runs(session_moss, arguments, source, monkeypatch):
    monkeypatch.setattr(type(session_moss), "capture", lambda *a, **k: pytest.fail("the model ran"))
    with pytest.raises(ArgumentError) as raised:
        steering_vector(
            session_moss, **{"positives": POSITIVES, "negatives": NEGATIVES, "point": "resid[1]", **arguments}
        )
    assert raised.value.source == source


def test_what_cannot_be_applied_is_refused(session_moss, session_mf):
    found = steering_vector(session_moss, POSITIVES, NEGATIVES, "resid[1]")
    for factor in (float("nan"), "2", True):
        with pytest.raises(ArgumentError, match="finite number"):
            found.apply(session_moss, factor)
    with pytest.raises(ArgumentError, match="32 dimensions"):
        found.apply(session_mf)
    with pytest.raises(ArgumentError, match="32 dimensions"):
        steering_trace(session_mf, POSITIVES[0], found)
    with pytest.raises(ArgumentError, match="no audio"):
        steering_trace(session_moss, Request("no audio"), found)
