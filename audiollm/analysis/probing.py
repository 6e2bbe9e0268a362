"""Linear probes over layers: what can be read from the states, and what of it is chance, memory or architecture.

Conventions. A probe is a linear classifier (score: accuracy) or ridge regression (score: R^2, scikit-learn's
`r2_score`) on one layer's states, standardised with the mean and deviation of its training samples. It is scored on
groups that it never saw: frames of one clip, of sources of one request, and of equal audio stay on one side. Chance is
the share of the most frequent class, or R^2 = 0. Selectivity (Hewitt and Liang 2019, "Designing and interpreting
probes with control tasks") is the score minus that of the same probe on shuffled labels. Intervals are Student's t over
folds; folds share training data, so take them as a lower bound of the uncertainty (Bengio and Grandvalet 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm.auto import tqdm

from ..errors import ArgumentError
from .samples import Samples, States, gather
from .splits import Fold, grouped_folds, shuffled_targets

_HEAD = ("layer", "score", "low", "high", "shuffled", "selectivity", "random weights", "chance")


class ProbeRow(NamedTuple):
    """One layer's line of the table: mean score over folds with its interval, and what to hold it against.

    `shuffled`, `selectivity` and `random_weights` are NaN where that control was not run.
    """

    layer: int
    score: float
    low: float
    high: float
    shuffled: float
    selectivity: float
    random_weights: float
    chance: float


@dataclass(frozen=True, eq=False, repr=False)
class ProbeResult:
    """Scores of one probe a layer, and its held-out predictions.

    `scores` [n_layers, n_folds] float64 on held-out groups; `shuffled` the same on shuffled labels, mean over shuffles,
    and `random_weights` the same on the control model's states (None where not run); `chance`; `classes` or None.
    `truth` and `predictions` hold each source's labels [K_i] and, by layer, what the probes that never saw its group
    said of it [n_layers, K_i]; `intervals` those samples' seconds [K_i, 2], or None where they were not given.
    """

    task: str
    level: str
    layers: tuple[int, ...]
    scores: np.ndarray
    shuffled: np.ndarray | None
    random_weights: np.ndarray | None
    chance: float
    confidence: float
    classes: tuple[Any, ...] | None
    n_groups: int
    truth: tuple[np.ndarray, ...]
    predictions: tuple[np.ndarray, ...]
    intervals: tuple[np.ndarray, ...] | None

    @property
    def metric(self) -> str:
        """The score's name: "accuracy" or "R^2"."""
        return "R^2" if self.classes is None else "accuracy"

    @property
    def n_samples(self) -> int:
        """Labelled tokens (level "frame") or sources (level "clip")."""
        return sum(len(mine) for mine in self.truth)

    @property
    def labelled_s(self) -> float | None:
        """Seconds of all samples together, or None where no seconds were given."""
        return None if self.intervals is None else float(sum(np.diff(mine, axis=1).sum() for mine in self.intervals))

    @property
    def selectivity(self) -> np.ndarray | None:
        """Score minus score on shuffled labels, fold by fold [n_layers, n_folds], or None without shuffles."""
        return None if self.shuffled is None else self.scores - self.shuffled

    @property
    def rows(self) -> tuple[ProbeRow, ...]:
        """The table, one row a layer."""
        bounds = t_interval(self.scores, self.confidence)
        missing = np.full(len(self.layers), np.nan)
        means = [
            missing if a is None else a.mean(axis=1) for a in (self.shuffled, self.selectivity, self.random_weights)
        ]
        columns = (self.scores.mean(axis=1), bounds[:, 0], bounds[:, 1], *means)
        return tuple(
            ProbeRow._make((layer, *values.tolist(), self.chance))
            for layer, values in zip(self.layers, np.stack(columns, axis=1), strict=True)
        )

    @property
    def best(self) -> ProbeRow:
        """The row of the highest score; chosen on the test folds, so a little too good."""
        return max(self.rows, key=lambda row: row.score)

    def __repr__(self) -> str:
        best = self.best
        return (
            f"ProbeResult({self.task}, {self.level} level, {self.n_samples} samples in {self.n_groups} groups, "
            f"{self.scores.shape[1]} folds; best layer {best.layer}: {self.metric} {best.score:.3f} "
            f"[{best.low:.3f}, {best.high:.3f}], chance {self.chance:.3f})"
        )

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + f"<td>{row.layer}</td>" + "".join(f"<td>{value:.3f}</td>" for value in row[1:]) + "</tr>"
            for row in self.rows
        )
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        return f"<p>{escape(self.describe())}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def describe(self) -> str:
        """What the layer curve shows, in words."""
        best, seconds = self.best, self.labelled_s
        what = f"{len(self.classes)} classes" if self.classes is not None else "a number"
        length = "" if seconds is None else f" ({seconds:.2f} s)"
        text = (
            f"Linear {self.task} of {what} at the {self.level} level over {len(self.layers)} layer(s): {self.n_samples} "
            f"samples{length} in {self.n_groups} groups, {self.scores.shape[1]} folds. The {self.metric} is highest at "
            f"layer {best.layer}, {best.score:.3f} ({100 * self.confidence:g} % interval {best.low:.3f} to "
            f"{best.high:.3f}); chance is {self.chance:.3f}."
        )
        if self.shuffled is not None:
            text += f" On shuffled labels it is {best.shuffled:.3f} there: selectivity {best.selectivity:.3f}."
        if self.random_weights is not None:
            text += f" The random-weights control reaches {best.random_weights:.3f} there."
        return text


def probe(
    states: States,
    labels: Sequence[Any],
    *,
    level: str = "frame",
    task: str | None = None,
    groups: Sequence[Hashable] | None = None,
    control: States | None = None,
    intervals: Sequence[Any] | None = None,
    n_folds: int = 5,
    n_shuffles: int = 1,
    penalty: float = 1.0,
    estimator: Any = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> ProbeResult:
    """Fit and score a linear probe at every layer of the states; `probe_session` extracts them for you.

    Parameters: `states`, one dict a source of layer -> [U_i, D], as `extract_contextual_embeddings` returns them;
    `labels`, for each source what `label_tokens` returns, one value a token [U_i] or one for the whole source;
    `level` "frame", or "clip" for the mean over tokens; `task` "classification" or "regression", by default by whether
    labels are floats; `groups`, one key a source, by default each source its own: **give sources of one song, or of
    one request, the same key**; `control`, the same states from `random_control`; `intervals`, token seconds a source,
    where `labels` do not bring them; `penalty`, the L2 weight (Ridge's alpha, 1/C of LogisticRegression);
    `estimator`, a scikit-learn estimator or Pipeline in place of ours, cloned for each fold.

    Cost: layers x folds x (1 + n_shuffles + control) fits, and one layer of all samples in memory at a time, about
    three times over (float32, 4 N D bytes; a regression float64).

    Raises: ArgumentError for lists of different lengths, states or labels that are not finite, too few groups, one
    class only, and folds that cannot be scored; all before the first fit, but for states that are not finite.

    >>> import numpy as np
    >>> from audiollm.analysis.probing import probe
    >>> rng = np.random.default_rng(0)
    >>> labels = [rng.integers(0, 2, 40) for _ in range(6)]  # six clips of 40 tokens
    >>> noise = [rng.normal(size=(40, 8)) for _ in labels]
    >>> states = [{0: x, 1: x + 3 * y[:, None]} for x, y in zip(noise, labels)]
    >>> result = probe(states, labels, n_folds=3)
    >>> result.n_groups, result.best.layer, round(result.best.score, 2), round(result.chance, 2)
    (6, 1, 1.0, 0.55)
    """
    _check_options(n_shuffles, penalty, confidence)
    samples = gather(states, labels, level, task, groups, intervals)
    if control is not None:
        _check_control(states, control, samples.layers)
    classify = samples.classes is not None
    folds = grouped_folds(samples.targets, samples.group, n_folds, classify, seed)
    shuffles = [
        shuffled_targets(samples.targets, samples.source, samples.group, folds, classify, seed + k)
        for k in range(n_shuffles)
    ]
    model = _default(classify, penalty) if estimator is None else estimator
    score: Score = accuracy_score if classify else r2_score
    runs: list[Any] = []
    fits = len(samples.layers) * len(folds) * (1 + n_shuffles + (control is not None))
    with tqdm(total=fits, desc="probe", unit="fit", disable=None, leave=False) as bar:
        for layer in samples.layers:
            x = samples.features(states, layer)
            scores, predictions = _held_out(model, x, samples.targets, folds, score, bar)
            shuffled = [_held_out(model, x, targets, folds, score, bar)[0] for targets in shuffles]
            random = None
            if control is not None:
                random = _held_out(model, samples.features(control, layer), samples.targets, folds, score, bar)[0]
            runs.append((scores, predictions, np.mean(shuffled, axis=0) if shuffles else None, random))
    predicted = _named(np.stack([run[1] for run in runs]), samples.classes)
    cuts = np.cumsum(np.bincount(samples.source))[:-1]
    return ProbeResult(
        task="classification" if classify else "regression",
        level=level,
        layers=samples.layers,
        scores=np.stack([run[0] for run in runs]),
        shuffled=np.stack([run[2] for run in runs]) if shuffles else None,
        random_weights=np.stack([run[3] for run in runs]) if control is not None else None,
        chance=float(np.bincount(samples.targets).max() / len(samples.targets)) if classify else 0.0,
        confidence=confidence,
        classes=samples.classes,
        n_groups=len(np.unique(samples.group)),
        truth=tuple(np.split(_named(samples.targets, samples.classes), cuts)),
        predictions=tuple(np.split(predicted, cuts, axis=1)),
        intervals=samples.intervals,
    )


def t_interval(scores: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Student's t interval of the mean over the last axis: scores [..., n] -> array [..., 2], low and high.

    >>> import numpy as np
    >>> from audiollm.analysis.probing import t_interval
    >>> t_interval(np.array([0.7, 0.8, 0.9])).round(3)
    array([0.552, 1.048])
    """
    n = scores.shape[-1]
    half = stats.t.ppf((1 + confidence) / 2, n - 1) * scores.std(axis=-1, ddof=1) / np.sqrt(n)
    mean = scores.mean(axis=-1)
    return np.stack([mean - half, mean + half], axis=-1)


Score = Callable[[np.ndarray, np.ndarray], float]


def _default(classify: bool, penalty: float) -> Any:
    last = LogisticRegression(C=1 / penalty, max_iter=1000) if classify else Ridge(alpha=penalty)
    return make_pipeline(StandardScaler(), last)


def _held_out(
    model: Any, x: np.ndarray, targets: np.ndarray, folds: Sequence[Fold], score: Score, bar: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Score of each fold, and for every sample what the model that never saw its group says."""
    scores, predictions = [], np.empty(len(targets), dtype=targets.dtype)
    for train, test in folds:
        fitted = clone(model).fit(x[train], targets[train])
        predictions[test] = fitted.predict(x[test])
        scores.append(score(targets[test], predictions[test]))
        bar.update()
    return np.array(scores, dtype=np.float64), predictions


def _named(targets: np.ndarray, classes: tuple[Any, ...] | None) -> np.ndarray:
    return targets if classes is None else np.array(classes)[targets]


def _check_options(n_shuffles: int, penalty: float, confidence: float) -> None:
    if isinstance(n_shuffles, bool) or not isinstance(n_shuffles, int) or n_shuffles < 0:
        raise _bad(f"n_shuffles is {n_shuffles!r}; pass a whole number, 0 or more", "n_shuffles")
    if not 0 < penalty < np.inf:
        raise _bad(f"penalty is {penalty!r}; pass a positive number", "penalty")
    if not 0 < confidence < 1:
        raise _bad(f"confidence is {confidence!r}; pass a share between 0 and 1, such as 0.95", "confidence")


def _check_control(states: States, control: States, layers: tuple[int, ...]) -> None:
    """The control's states must belong to the same tokens."""
    same = len(control) == len(states) and all(
        layer in theirs and len(theirs[layer]) == len(mine[layer])
        for mine, theirs in zip(states, control, strict=True)
        for layer in layers
    )
    if not same:
        raise _bad("control does not have the sources, layers and tokens of states; extract both alike", "control")


def _bad(message: str, source: str) -> ArgumentError:
    return ArgumentError(message, code="bad_argument", source=source)


__all__ = ["ProbeResult", "ProbeRow", "Samples", "probe", "t_interval"]
