"""What scikit-learn and mir_eval users already know works on a Session: a Pipeline on embeddings, intervals as labels."""

from __future__ import annotations

import mir_eval
import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from audiollm import Request, Waveform
from audiollm.analysis.extraction import probe_session
from audiollm.analysis.labels import label_tokens
from audiollm.analysis.probing import probe
from audiollm.analysis.splits import grouped_folds

LAB = "0.0\t1.0\tC:maj\n1.0\t2.5\tN\n2.5\t4.0\tC:maj\n"


def clip(seed):
    """Four seconds of noise in which a tone sounds wherever the annotation says C."""
    t = np.arange(4 * 16_000) / 16_000
    noise = np.random.default_rng(seed).normal(size=t.size) * 0.02
    return Waveform((noise + 0.4 * np.sin(2 * np.pi * 440 * t) * ((t < 1) | (t >= 2.5))).astype(np.float32), 16_000)


@pytest.fixture(params=("session_mf", "session_moss"))
def session(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def annotation(tmp_path):
    path = tmp_path / "chords.lab"
    path.write_text(LAB)
    return mir_eval.io.load_labeled_intervals(str(path))


def test_mir_eval_s_intervals_are_labels(session, annotation):
    intervals, labels = annotation
    timeline = session.prepare([Request("Listen.", [clip(0)])]).timeline[0]
    found = label_tokens(timeline, intervals, labels, margin_s=0.05)
    # mir_eval's own way to sample an annotation, at the tokens' centres.
    centres = found.intervals.mean(axis=1)
    assert found.labels.tolist() == mir_eval.util.interpolate_intervals(intervals, labels, centres)
    assert found.n_ambiguous > 0 and found.classes == ("C:maj", "N")


def test_a_pipeline_on_embeddings(session, annotation):
    """The plain scikit-learn way, and ours with the same Pipeline, give the same scores."""
    requests = [Request("Listen.", [clip(seed)]) for seed in range(4)]
    batch = session.prepare(requests)
    x, y, group = [], [], []
    for k, embedding in enumerate(session.extract_audio_embeddings(batch)):
        found = label_tokens(batch.timeline[k], *annotation)
        x.append(embedding.projected.float().numpy()[found.tokens])
        y.append(found.labels)
        group.append(np.full(len(found), k))
    pipeline = make_pipeline(StandardScaler(), PCA(8), LogisticRegression(max_iter=500))
    x, y, group = np.concatenate(x), np.concatenate(y), np.concatenate(group)
    folds = grouped_folds(np.unique(y, return_inverse=True)[1], group, 4, classify=True)
    plain = cross_val_score(pipeline, x, y, cv=folds)
    states = [{"projected": e.projected} for e in session.extract_audio_embeddings(batch)]
    labels = [label_tokens(timeline, *annotation) for timeline in batch.timeline]
    ours = probe(states, labels, estimator=pipeline, n_folds=4)
    assert np.allclose(ours.scores[0], plain, atol=1e-12)
    assert ours.best.score > ours.chance + 0.1  # the tone is heard, even by random weights


def test_mir_eval_judges_held_out_predictions(session, annotation):
    """Predictions come back as intervals that mir_eval evaluates."""
    requests = [Request("Listen.", [clip(seed)]) for seed in range(4)]
    result = probe_session(session, requests, [annotation] * 4, layers=(1,), n_folds=4)
    said, seconds = result.predictions[0][0], result.intervals[0]
    score = mir_eval.chord.evaluate(*annotation, seconds, said.tolist())["root"]
    lengths = np.diff(seconds, axis=1)[:, 0]
    assert abs(score - lengths[said == result.truth[0]].sum() / lengths.sum()) < 0.03
    assert accuracy_score(result.truth[0], said) > 0.8


def test_embeddings_need_no_grad_and_no_float32(session):
    batch = session.prepare([Request("Listen.", [clip(seed)]) for seed in range(2)])
    states = session.extract_contextual_embeddings(batch, (0,), grad=True)
    assert states[0][0].requires_grad
    half = [{0: mine[0].to(torch.bfloat16)} for mine in states]
    labels = [np.arange(len(mine[0])) % 2 for mine in states]
    assert np.isfinite(probe(half, labels, n_folds=2).scores).all()
