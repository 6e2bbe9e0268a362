"""Grouped folds and shuffled labels for probes: what a fair test of generalisation needs.

Conventions: N samples, S sources, G groups. A group is what must stay on one side of a split: one clip, or one song
with its stems. Groups and targets are whole numbers or floats [N], sample after sample, source after source.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

from ..errors import ArgumentError

Fold = tuple[np.ndarray, np.ndarray]
_TRIES = 200


def grouped_folds(targets: np.ndarray, groups: np.ndarray, n_folds: int, classify: bool, seed: int = 0) -> list[Fold]:
    """(train, test) sample numbers of each fold, arrays of int64; no group is on both sides of one.

    Classification keeps the classes' shares alike in all folds as far as groups allow (scikit-learn's
    StratifiedGroupKFold, shuffled with `seed`), regression keeps the folds' sizes alike (GroupKFold).

    Raises: ArgumentError for fewer groups than folds, fewer than two classes, fewer than two classes that occur in two
    groups, and folds that cannot be fitted or scored.

    >>> import numpy as np
    >>> from audiollm.analysis.splits import grouped_folds
    >>> clip = np.repeat(np.arange(6), 10)
    >>> folds = grouped_folds(clip % 2, clip, n_folds=3, classify=True)
    >>> [(len(test), len(set(clip[test]) & set(clip[train]))) for train, test in folds]
    [(20, 0), (20, 0), (20, 0)]
    """
    n_groups = len(np.unique(groups))
    if isinstance(n_folds, bool) or not isinstance(n_folds, (int, np.integer)) or not 2 <= n_folds <= n_groups:
        raise ArgumentError(
            f"n_folds is {n_folds!r} and there are {n_groups} group(s) (clips, or requests that share audio); pass 2 to "
            f"{n_groups} folds, and at least 2 groups: frames of one clip cannot test what was learned from it",
            code="bad_argument",
            source="n_folds",
        )
    if classify:
        _check_classes(targets, groups)
        # Stratifying needs n_folds samples of some class, and clips can be fewer.
        most = np.unique(targets, return_counts=True)[1].max()
        splitter = (
            StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed) if most >= n_folds else GroupKFold(n_folds)
        )
    else:
        splitter = GroupKFold(n_folds)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The least populated class", category=UserWarning)
        folds = [(train, test) for train, test in splitter.split(np.empty((len(targets), 0)), targets, groups)]
    fault = fold_fault(targets, folds, classify)
    if fault:
        raise ArgumentError(
            f"{fault}; pass fewer folds or more clips of each label", code="bad_argument", source="n_folds"
        )
    return folds


def fold_fault(targets: np.ndarray, folds: Sequence[Fold], classify: bool) -> str:
    """Why these targets cannot be fitted or scored on these folds, or an empty string."""
    for k, (train, test) in enumerate(folds):
        if not len(test):
            return f"fold {k} has no sample to test"
        if classify and len(np.unique(targets[train])) < 2:
            return f"fold {k} learns from one class only"
        if not classify and np.ptp(targets[test]) == 0:
            return f"fold {k} tests a single value, {targets[test][0]:g}, so its R^2 is not defined"
    return ""


def shuffled_targets(
    targets: np.ndarray, source: np.ndarray, groups: np.ndarray, folds: Sequence[Fold], classify: bool, seed: int = 0
) -> np.ndarray:
    """Targets [N] that say nothing about their samples but look like the real ones: the control task of a probe.

    Groups exchange their label sequences: every source gets the targets of a source of another group (groups are
    permuted as a whole), from a random place on and around in a circle. So a label that is constant in a clip stays
    constant in every clip, one that changes keeps its pace, and sources of one group stay in step. Shuffling frames
    one by one would instead give each clip a mixture of labels, an easier and more even task than the real one.

    Parameters: `source` and `groups` [N], which source and group a sample is of. Deterministic for a `seed`.
    Raises: ArgumentError where no shuffle of 200 can be fitted and scored on the folds.

    >>> import numpy as np
    >>> from audiollm.analysis.splits import grouped_folds, shuffled_targets
    >>> clip = np.repeat(np.arange(6), 4)
    >>> folds = grouped_folds(clip % 2, clip, n_folds=3, classify=True)
    >>> shuffled = shuffled_targets(clip % 2, clip, clip, folds, classify=True).reshape(6, 4)
    >>> bool((shuffled == shuffled[:, :1]).all())  # every clip still has one label
    True
    """
    rng = np.random.default_rng(seed)
    members = [[np.flatnonzero(source == s) for s in np.unique(source[groups == g])] for g in np.unique(groups)]
    fault = ""
    for _ in range(_TRIES):
        shuffled = np.empty_like(targets)
        for mine, donor in zip(members, rng.permutation(len(members)), strict=True):
            turn = rng.random()
            for k, rows in enumerate(mine):
                given = targets[members[donor][k % len(members[donor])]]
                shuffled[rows] = given[(int(turn * len(given)) + np.arange(len(rows))) % len(given)]
        fault = fold_fault(shuffled, folds, classify)
        if not fault:
            return shuffled
    raise ArgumentError(
        f"no shuffle of the labels can be tested on these folds ({fault}); pass fewer folds, or n_shuffles=0",
        code="bad_argument",
        source="n_shuffles",
    )


def _check_classes(targets: np.ndarray, groups: np.ndarray) -> None:
    classes = np.unique(targets)
    if len(classes) < 2:
        raise ArgumentError(
            "all labels are the same; a probe needs at least two classes", code="bad_argument", source="labels"
        )
    spread = sum(len(np.unique(groups[targets == c])) > 1 for c in classes)
    if spread < 2:
        raise ArgumentError(
            f"of {len(classes)} classes {spread} occur(s) in more than one group; a class that is only in one clip is "
            "never both learned and tested: add clips, merge classes, or predict something that clips share",
            code="bad_argument",
            source="labels",
        )
