"""Probes: a planted signal is found, nothing else is, and no care against leakage can be taken away unseen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from audiollm import Request, Waveform
from audiollm.analysis.extraction import probe_session
from audiollm.analysis.labels import label_tokens
from audiollm.analysis.probing import probe, t_interval
from audiollm.analysis.samples import gather
from audiollm.analysis.splits import fold_fault, grouped_folds, shuffled_targets
from audiollm.errors import ArgumentError
from audiollm.plots.probing import probe_curve, probe_timeline

TOKEN_S = 0.04


def seconds(n):
    edges = np.arange(n + 1) * TOKEN_S
    return np.stack([edges[:-1], edges[1:]], axis=1)


def planted(n_clips=8, n_tokens=60, width=6, seed=0):
    """Clips with a label in runs of ten tokens, and states that show it at layer 1 only."""
    rng = np.random.default_rng(seed)
    labels, states = [], []
    for _ in range(n_clips):
        y = np.repeat(rng.permutation([0, 1, 2] * 2), n_tokens // 6)
        noise = rng.normal(size=(2, n_tokens, width))
        directions = np.eye(3, width) * 5
        labels.append(np.array(["verse", "chorus", "bridge"])[y])
        states.append({0: torch.tensor(noise[0]), 1: torch.tensor(noise[1] + directions[y])})
    return states, labels


def signature(labels, n_tokens=40, seed=0):
    """Clips whose every frame says which clip it is, exactly, and nothing else."""
    rng = np.random.default_rng(seed)
    marks = rng.normal(size=(len(labels), 16)) * 10
    states = [{0: mark + rng.normal(size=(n_tokens, 16)) * 0.1} for mark in marks]
    return states, list(labels)


# What a probe finds.


def test_a_planted_signal_is_found_at_its_layer():
    states, labels = planted()
    result = probe(states, labels, n_folds=4, n_shuffles=3)
    there, elsewhere = result.rows[1], result.rows[0]
    assert there.score > 0.97 and result.best.layer == 1
    assert abs(elsewhere.score - 1 / 3) < 0.1
    assert abs(there.shuffled - 1 / 3) < 0.1  # the very same states, labels of others
    assert there.selectivity == pytest.approx(there.score - there.shuffled, abs=1e-12)
    assert (result.task, result.metric, result.classes) == ("classification", "accuracy", ("bridge", "chorus", "verse"))


def test_a_planted_number_is_found_by_ridge():
    rng = np.random.default_rng(0)
    w = rng.normal(size=5)
    states = [{3: rng.normal(size=(50, 5)), 4: rng.normal(size=(50, 5))} for _ in range(6)]
    labels = [mine[4] @ w * 20 + 100 + rng.normal(size=50) for mine in states]
    result = probe(states, labels, n_folds=3, n_shuffles=4)
    assert (result.task, result.metric, result.chance, result.classes) == ("regression", "R^2", 0.0, None)
    assert result.rows[1].score > 0.98 and result.rows[0].score < 0.1
    assert -0.3 < result.rows[1].shuffled < 0.1


def test_a_clip_level_probe_reads_the_mean_over_tokens():
    rng = np.random.default_rng(0)
    genres = ["rock", "jazz"] * 8
    # Single tokens drown in noise; their mean over 400 does not.
    states = [{0: rng.normal(size=(400, 3)) * 5 + (1.5 if g == "rock" else -1.5)} for g in genres]
    result = probe(states, genres, level="clip", n_folds=4)
    assert result.best.score > 0.9 and result.n_samples == 16
    by_hand = np.stack([mine[0].mean(axis=0) for mine in states])
    samples = gather(states, genres, "clip", None, None, None)
    assert np.allclose(samples.features(states, 0), by_hand, atol=1e-6)


# What must not help a probe.


def test_a_clip_s_signature_does_not_lift_the_score():
    """Each frame says which clip it is. With frames of a clip on both sides that alone would answer everything."""
    scores = []
    for seed in range(4):
        states, labels = signature(["a", "b"] * 8, seed=seed)
        x, y = np.concatenate([mine[0] for mine in states]), np.repeat(labels, 40)
        assert cross_val_score(LogisticRegression(), x, y, cv=KFold(4, shuffle=True, random_state=0)).mean() == 1.0
        scores.append(probe(states, labels, n_folds=4, n_shuffles=0).best.score)
    assert np.mean(scores) < 0.65


def test_sources_of_one_group_stay_on_one_side():
    """Song signatures, two sources a song: without groups they leak, with groups they do not."""
    leaky, grouped = [], []
    for seed in range(4):
        songs = [song for song in signature(["a", "b"] * 5, seed=seed)[0] for _ in range(2)]
        labels = [label for label in ["a", "b"] * 5 for _ in range(2)]
        keys = [f"song {k // 2}" for k in range(20)]
        leaky.append(probe(songs, labels, n_folds=5, n_shuffles=0).best.score)
        result = probe(songs, labels, groups=keys, n_folds=5, n_shuffles=0)
        grouped.append(result.best.score)
        assert result.n_groups == 10
    assert np.mean(grouped) < 0.65 < 0.8 < np.mean(leaky)


def test_standardisation_is_inside_the_fold():
    """One clip of another scale moves the mean and deviation of everything; training must not know its test clip."""
    rng = np.random.default_rng(0)
    states = [{0: rng.normal(size=(30, 4)) * (50 if k == 0 else 1)} for k in range(6)]
    labels = [np.sign(mine[0][:, 0]) + rng.normal(size=30) for mine in states]
    result = probe(states, labels, n_folds=3, n_shuffles=0, penalty=20.0)
    x, y, clip = np.concatenate([m[0] for m in states]), np.concatenate(labels), np.repeat(np.arange(6), 30)
    folds = grouped_folds(y, clip, 3, classify=False)

    def scores(scaler):
        for train, test in folds:
            fitted = scaler if scaler is not None else StandardScaler().fit(x[train])
            ridge = Ridge(alpha=20.0).fit(fitted.transform(x[train]), y[train])
            yield r2_score(y[test], ridge.predict(fitted.transform(x[test])))

    assert np.allclose(result.scores[0], list(scores(None)), atol=1e-9)
    assert not np.allclose(result.scores[0], list(scores(StandardScaler().fit(x))), atol=1e-3)


@pytest.mark.parametrize("classify", (True, False))
def test_no_group_is_on_both_sides(classify):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(9), rng.integers(5, 30, 9))
    targets = rng.integers(0, 3, len(groups)) if classify else rng.normal(size=len(groups))
    folds = grouped_folds(targets, groups, 4, classify)
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(len(groups)))
    for train, test in folds:
        assert not set(groups[train]) & set(groups[test]) and len(train) + len(test) == len(groups)


# Shuffled labels.


def shuffle_of(labels, groups=None, seed=0):
    labels = [np.asarray(y) for y in labels]
    source = np.repeat(np.arange(len(labels)), [len(y) for y in labels])
    group = source if groups is None else np.asarray(groups)[source]
    targets = np.concatenate(labels)
    folds = grouped_folds(targets, group, 2, classify=True)
    flat = shuffled_targets(targets, source, group, folds, classify=True, seed=seed)
    return np.split(flat, np.cumsum([len(y) for y in labels])[:-1])


def test_labels_constant_in_a_clip_are_exchanged_between_clips():
    labels = [np.full(length, k % 2) for k, length in enumerate((5, 9, 7, 5, 6, 8))]
    moved = 0
    for seed in range(5):
        found = shuffle_of(labels, seed=seed)
        assert all(len(set(y)) == 1 for y in found)  # frame by frame would mix every clip, an easier task
        assert sorted(y[0] for y in found) == [0, 0, 0, 1, 1, 1]
        moved += any(y[0] != k % 2 for k, y in enumerate(found))
    assert moved


def test_labels_that_change_keep_their_pace():
    rng = np.random.default_rng(0)
    labels = [np.repeat(rng.integers(0, 2, 5), 20) for _ in range(6)]
    for seed in range(5):
        for y in shuffle_of(labels, seed=seed):
            assert np.count_nonzero(np.diff(y)) <= 5  # runs stay runs; a frame-wise shuffle makes about 50 changes


def test_a_position_in_the_clip_does_not_survive_the_shuffle():
    """All clips have the same form; were sequences passed on unturned, time since the start would predict them."""
    form = np.repeat([0, 1, 0, 1, 1, 0], 10)
    found = np.stack([y for seed in range(10) for y in shuffle_of([form] * 8, seed=seed)])
    assert abs((found == form).mean() - 0.5) < 0.12


def test_sources_of_one_group_stay_in_step():
    rng = np.random.default_rng(0)
    pairs = [rng.integers(0, 2, 30) for _ in range(5)]
    labels = [y for y in pairs for _ in range(2)]  # a mix and its stem carry the same chords
    found = shuffle_of(labels, groups=np.repeat(np.arange(5), 2))
    assert all(np.array_equal(found[2 * k], found[2 * k + 1]) for k in range(5))


def test_a_shuffle_that_cannot_be_scored_is_drawn_again():
    """Two clips of each label in two folds: a shuffle may leave one class to learn from; that one is not used."""
    groups = np.repeat(np.arange(4), 3)
    targets = groups % 2
    folds = [
        (np.flatnonzero(groups > 1), np.flatnonzero(groups < 2)),
        (np.flatnonzero(groups < 2), np.flatnonzero(groups > 1)),
    ]
    for seed in range(20):
        assert not fold_fault(shuffled_targets(targets, groups, groups, folds, True, seed), folds, True)
    with pytest.raises(ArgumentError, match="no shuffle of the labels"):
        shuffled_targets(np.zeros(12, int), groups, groups, folds, True)


# Numbers of the result.


def test_intervals_over_folds_are_student_s():
    scores = np.random.default_rng(0).normal(size=(3, 5))
    for row, found in zip(scores, t_interval(scores, 0.9), strict=True):
        assert np.allclose(found, stats.t.interval(0.9, 4, row.mean(), stats.sem(row)))
    states, labels = planted()
    result = probe(states, labels, n_folds=4, confidence=0.8)
    low, high = t_interval(result.scores, 0.8)[0]
    assert (result.rows[0].low, result.rows[0].high) == (low, high) and low < result.rows[0].score < high


def test_chance_is_the_most_frequent_class():
    rng = np.random.default_rng(0)
    labels = [np.array([7] * 30 + [9] * 10) for _ in range(4)]
    assert probe([{0: rng.normal(size=(40, 2))} for _ in labels], labels, n_folds=2).chance == 0.75


def test_predictions_are_of_probes_that_never_saw_the_group():
    states, labels = planted()
    result = probe(states, labels, n_folds=4)
    truth = np.concatenate(result.truth)
    said = np.concatenate(result.predictions, axis=1)
    assert [len(y) for y in result.truth] == [60] * 8 and truth.tolist() == np.concatenate(labels).tolist()
    codes = np.unique(truth, return_inverse=True)[1]
    for k, (train, test) in enumerate(grouped_folds(codes, np.repeat(np.arange(8), 60), 4, True)):
        assert result.scores[0, k] == accuracy_score(truth[test], said[0][test])
        x = np.concatenate([mine[0].float().numpy() for mine in states])
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, max_iter=1000)).fit(x[train], truth[train])
        assert (model.predict(x[test]) == said[0][test]).mean() > 0.99


def test_the_random_weights_control_is_scored_on_the_same_folds():
    states, labels = planted()
    rng = np.random.default_rng(5)
    control = [{k: torch.tensor(rng.normal(size=v.shape)) for k, v in mine.items()} for mine in states]
    result = probe(states, labels, n_folds=4, control=control)
    assert result.rows[1].random_weights < 0.5 < result.rows[1].score
    itself = probe(states, labels, n_folds=4, control=states)
    assert np.array_equal(itself.random_weights, itself.scores)
    for wrong in (
        control[:-1],
        [{0: mine[0]} for mine in control],
        [{k: v[1:] for k, v in m.items()} for m in control],
    ):
        with pytest.raises(ArgumentError, match="control does not have"):
            probe(states, labels, control=wrong)


def test_labelled_tokens_bring_their_seconds():
    states, _ = planted(n_clips=4)
    labels = [label_tokens(seconds(60), [(0, 1.0, "A"), (1.2, 2.0, "B")], margin_s=0.05) for _ in states]
    result = probe(states, labels, n_folds=2)
    assert result.n_samples == 4 * len(labels[0]) and np.array_equal(result.intervals[2], labels[2].intervals)
    assert result.labelled_s == pytest.approx(4 * len(labels[0]) * TOKEN_S)
    # The states of the dropped tokens are not looked at.
    for mine in states:
        mine[0][26:29] = np.nan
    assert np.array_equal(probe(states, labels, n_folds=2).scores[1], result.scores[1])
    given = probe(planted()[0], planted()[1], n_folds=4, intervals=[seconds(60)] * 8)
    assert given.labelled_s == pytest.approx(8 * 60 * TOKEN_S)
    assert probe(*planted(), n_folds=4).labelled_s is None


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_any_float_dtype_and_tensors_with_a_graph(dtype):
    states, labels = planted()
    exact = probe(states, labels, n_folds=4)
    rounded = [{k: v.to(dtype).requires_grad_() for k, v in mine.items()} for mine in states]
    assert np.abs(probe(rounded, labels, n_folds=4).scores - exact.scores).max() < 0.05


def test_an_estimator_of_one_s_own_is_cloned():
    states, labels = planted()
    mine = make_pipeline(StandardScaler(), LogisticRegression(C=0.1))
    a, b = probe(states, labels, estimator=mine, n_folds=4), probe(states, labels, penalty=10.0, n_folds=4)
    assert np.array_equal(a.scores, b.scores) and not hasattr(mine[-1], "coef_")


def test_same_call_same_result_and_silence(capfd):
    states, labels = planted()
    a, b = (probe(states, labels, n_folds=4, n_shuffles=2, seed=3) for _ in range(2))
    assert np.array_equal(a.scores, b.scores) and np.array_equal(a.shuffled, b.shuffled)
    assert repr(a) == repr(b) and a._repr_html_() == b._repr_html_()
    assert capfd.readouterr() == ("", "")  # no terminal, no bar


def test_words_and_table():
    states, labels = planted()
    result = probe(states, labels, n_folds=4, control=states, intervals=[seconds(60)] * 8)
    assert repr(result).startswith(
        "ProbeResult(classification, frame level, 480 samples in 8 groups, 4 folds; best layer 1"
    )
    said = result.describe()
    for part in (
        "3 classes",
        "480 samples (19.20 s) in 8 groups",
        "95 % interval",
        "chance is 0.333",
        "selectivity",
        "random",
    ):
        assert part in said
    html = result._repr_html_()
    assert html.count("<tr>") == 3 and "selectivity" in html and "0x" not in html
    bare = probe(states, labels, n_folds=4, n_shuffles=0)
    assert bare.selectivity is None and np.isnan(bare.rows[0].selectivity) and "shuffled" not in bare.describe()


STATES, LABELS = planted()


@pytest.mark.parametrize(
    "states, labels, options, message",
    [
        (STATES, LABELS[:-1], {}, "labels has 7 entries and states 8"),
        (STATES, [*LABELS[:-1], LABELS[0][:-1]], {}, r"labels\[7\] has shape \[59\]"),
        (STATES, ["x"] * 8, {}, "all labels are the same"),
        (STATES, list("abcdefgh"), {}, "0 occur"),
        (STATES, [*"abababa", "c"], {"n_folds": 9}, "8 group"),
        (STATES, LABELS, {"n_folds": 1}, "n_folds is 1"),
        (STATES, LABELS, {"groups": ["song"] * 8}, "1 group"),
        (STATES[:1], LABELS[:1], {}, "1 group"),
        (STATES, LABELS, {"groups": list("abc")}, "groups has 3 entries"),
        (STATES, [*LABELS[:-1], np.zeros(60)], {}, "all strings or all numbers"),
        (STATES, [np.full(60, np.nan)] * 8, {}, "NaN"),
        (STATES, LABELS, {"task": "regression"}, "needs numbers"),
        (STATES, LABELS, {"task": "ranking"}, "task is"),
        (STATES, LABELS, {"level": "song"}, "level is"),
        (STATES, LABELS, {"level": "clip"}, "changes within the source"),
        (STATES, LABELS, {"intervals": [seconds(59)] * 8}, r"intervals\[0\] has 59"),
        (STATES, LABELS, {"penalty": 0}, "penalty"),
        (STATES, LABELS, {"confidence": 95}, "confidence"),
        (STATES, LABELS, {"n_shuffles": -1}, "n_shuffles"),
        (STATES, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], {"n_folds": 8}, "single value"),
        (STATES[0], LABELS, {}, "list with one dict"),
        ([*STATES[:-1], {0: STATES[0][0]}], LABELS, {}, "same layers"),
        ([*STATES[:-1], {0: STATES[0][0], 1: STATES[0][1][:-1]}], LABELS, {}, "number of tokens"),
        ([*STATES[:-1], {k: v[:, :3] for k, v in STATES[0].items()}], LABELS, {}, "3 wide"),
        ([*STATES[:-1], {k: v * np.nan for k, v in STATES[0].items()}], LABELS, {}, "NaN or infinity"),
        ([{0: v[0][:, 0]} for v in STATES], LABELS, {}, "has shape"),
    ],
)
def test_what_is_refused(states, labels, options, message):
    with pytest.raises(ArgumentError, match=message) as error:
        probe(states, labels, **options)
    assert error.value.code == "bad_argument" and error.value.source


def test_faults_are_told_before_the_first_fit(monkeypatch):
    monkeypatch.setattr("audiollm.analysis.probing._held_out", lambda *a: pytest.fail("a fit began"))
    with pytest.raises(ArgumentError, match="n_folds"):
        probe(STATES, LABELS, n_folds=9)
    with pytest.raises(ArgumentError, match="control"):
        probe(STATES, LABELS, n_folds=4, control=STATES[:-1])


# From a session.


@pytest.fixture(params=("session_mf", "session_moss"))
def session(request):
    return request.getfixturevalue(request.param)


def clip(seed, length_s=2.0, level=0.1):
    noise = np.random.default_rng(seed).normal(size=int(length_s * 16_000)) * level
    return Waveform(noise.astype(np.float32), 16_000)


HALVES = ([[0.0, 1.0], [1.0, 2.0]], ["first", "second"])


def test_a_session_is_probed_as_its_states_are(session):
    """Several sources a request, batches of two, labels as intervals, rows and TokenLabels: as by hand."""
    requests = [Request("One.", [clip(0), clip(1)]), Request("Two.", [clip(2)]), Request("Three.", [clip(3), clip(4)])]
    batch = session.prepare(requests)
    by_hand = [label_tokens(timeline, *HALVES, margin_s=0.1) for timeline in batch.timeline]
    rows = [(*span, label) for span, label in zip(*HALVES, strict=True)]
    labels = [HALVES, rows, by_hand[2], HALVES, (np.array(HALVES[0]), HALVES[1])]
    result = probe_session(
        session, requests, labels, (0, 2, -1), margin_s=0.1, batch_requests=2, n_folds=3, n_shuffles=0
    )
    states = session.extract_contextual_embeddings(batch, (0, 2, -1))
    wanted = probe(states, by_hand, groups=[0, 0, 1, 2, 2], n_folds=3, n_shuffles=0)
    assert result.layers == (0, 2, -1) and result.n_groups == 3
    # A request's states depend on its padding in the last digits only, so few frames can change sides.
    assert np.abs(result.scores - wanted.scores).max() < 0.03
    assert all(np.array_equal(a, b) for a, b in zip(result.intervals, wanted.intervals, strict=True))


def test_clips_and_objects_with_intervals(session_moss):
    class Sections:  # as mirdata's SectionData
        intervals, labels = np.array([[0.0, 2.0]]), ["x"]

    requests = [Request("x", [clip(seed, level=0.02 + 0.2 * (seed % 2))]) for seed in range(6)]
    loud = ["loud" if seed % 2 else "quiet" for seed in range(6)]
    session, options = session_moss, {"level": "clip", "n_folds": 3, "n_shuffles": 0}
    result = probe_session(session, requests, loud, (0, -1), **options)
    assert result.n_samples == 6 and result.intervals[0].shape == (1, 2)
    states = session.extract_contextual_embeddings(session.prepare(requests), (0, -1))
    assert np.abs(result.scores - probe(states, loud, **options).scores).max() < 0.2
    Sections.labels = ["y"]
    with pytest.raises(ArgumentError, match="all labels are the same"):
        probe_session(session, requests, [Sections] * 6)


def test_equal_audio_and_one_request_are_one_group(session_moss):
    same = clip(0)
    requests = [Request("a", [same]), Request("b", [same]), Request("c", [clip(1), clip(2)]), Request("d", [clip(3)])]
    options = {"layers": (0,), "n_folds": 2, "n_shuffles": 0}
    assert probe_session(session_moss, requests, [HALVES] * 5, **options).n_groups == 3
    assert (
        probe_session(session_moss, requests, [HALVES] * 5, groups=["s", "t", "u", "v", "u"], **options).n_groups == 2
    )
    silent = [Request("x", [clip(k), clip(9, level=0)]) for k in range(3)]
    assert probe_session(session_moss, silent, [HALVES] * 6, **options).n_groups == 3  # silence relates nobody


@pytest.mark.parametrize(
    "labels, options, message",
    [
        ([HALVES], {}, "labels has 1 entries for 3"),
        ([HALVES] * 3, {"groups": "ab"}, "groups has 2"),
        ([HALVES] * 3, {"layers": (99,)}, "layer 99"),
        ([HALVES] * 3, {"layers": ()}, "layers is empty"),
        ([HALVES] * 3, {"n_folds": 4}, "n_folds is 4"),
        ([HALVES] * 3, {"level": "clip"}, "changes within"),
        ([HALVES] * 3, {"level": "x"}, "level"),
        ([HALVES] * 3, {"max_gib": 1e-5}, "GiB of memory"),
        ([HALVES] * 3, {"batch_requests": 0}, "batch_requests"),
        ([HALVES] * 3, {"control": "same"}, r"pass random_control"),
        ([([[5000, 9000]], ["A"])] * 3, {}, "milliseconds"),
        ([np.zeros(7)] * 3, {}, "shape"),
        (["x"] * 3, {}, "all labels are the same"),
    ],
)
def test_a_session_refuses_before_anything_is_decoded(session_mf, monkeypatch, labels, options, message):
    monkeypatch.setattr(type(session_mf._adapter), "_hear", lambda *a: pytest.fail("a file was decoded"))
    requests = [Request("x", [clip(seed)]) for seed in range(3)]
    if options.get("control") == "same":
        options = {"control": session_mf}
    with pytest.raises(ArgumentError, match=message):
        probe_session(session_mf, requests, labels, **{"n_folds": 3, **options})
    with pytest.raises(ArgumentError, match="no audio"):
        probe_session(session_mf, [Request("x")], [])


# Drawing.


def test_the_layer_curve_shows_the_table():
    states, labels = planted()
    result = probe(states, labels, n_folds=4, control=states)
    axes = probe_curve(result).axes[0]
    drawn = {line.get_label().split(",")[0]: line.get_ydata() for line in axes.get_lines()}
    assert np.allclose(drawn["probe"], [row.score for row in result.rows])
    assert np.allclose(drawn["shuffled labels"], [row.shuffled for row in result.rows])
    assert np.allclose(drawn["random weights"], [row.random_weights for row in result.rows])
    assert np.allclose(drawn["chance"], result.chance)
    assert axes.get_xlabel() == "layer" and "accuracy" in axes.get_ylabel()


def test_predictions_are_drawn_over_seconds():
    states, labels = planted()
    result = probe(states, labels, n_folds=4, intervals=[seconds(60)] * 8)
    axes = probe_timeline(result, source=3).axes[0]
    assert axes.get_xlabel() == "seconds of the source" and axes.get_xlim() == (0, pytest.approx(60 * TOKEN_S))
    assert {t.get_text() for t in axes.get_yticklabels()} == {"bridge", "chorus", "verse"}
    number = probe(states, [mine[0][:, 0].numpy() for mine in states], n_folds=4, intervals=[seconds(60)] * 8)
    assert "error" in probe_timeline(number, 0, 1).axes[0].get_title()
    for options, message in (({"source": 8}, "source 8"), ({"layer": 7}, "layer 7")):
        with pytest.raises(ArgumentError, match=message):
            probe_timeline(result, **options)
    with pytest.raises(ArgumentError, match="no seconds"):
        probe_timeline(probe(states, labels, n_folds=4, n_shuffles=0))
