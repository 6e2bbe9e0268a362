"""Annotations as intervals -> one label an audio token, taken at the token's centre.

Conventions. An annotation is what mir_eval and mirdata hand out: `intervals` [n, 2] in seconds of the source and
`labels`, n of them; or n rows (start_s, end_s, label). Intervals are half-open, [start_s, end_s), sorted here, and may
leave gaps; they may not overlap by more than a millisecond. Token k has the label of the interval that its centre lies
in; a token whose centre lies in none has no label and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from ..timeline import SourceTimeline
    from .extraction import SourceHeader

# Annotation files round their seconds: what touches within this counts as touching.
_TOUCH_S = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class TokenLabels:
    """The labelled tokens of one source.

    `labels` [K]; `tokens` [K] int64, which of the source's U_i tokens they belong to, ascending; `intervals` [K, 2]
    float64, those tokens' seconds; `n_tokens`, U_i; `n_unlabelled` tokens had no label, `n_ambiguous` lay within the
    margin of an edge.
    """

    name: str
    labels: np.ndarray
    tokens: np.ndarray
    intervals: np.ndarray
    n_tokens: int
    n_unlabelled: int
    n_ambiguous: int

    @property
    def classes(self) -> tuple[Any, ...]:
        """The different labels, sorted."""
        return tuple(np.unique(self.labels).tolist())

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return (
            f"TokenLabels({self.name!r}: {len(self)} of {self.n_tokens} tokens, {len(self.classes)} different labels; "
            f"dropped: {self.n_unlabelled} without a label, {self.n_ambiguous} near an edge)"
        )

    def describe(self) -> str:
        """How many seconds carry which label, in words."""
        lengths = np.diff(self.intervals, axis=1)[:, 0]
        if self.labels.dtype.kind == "f":
            parts = f"values from {self.labels.min():g} to {self.labels.max():g}"
        else:
            parts = ", ".join(f"{label} {lengths[self.labels == label].sum():.2f} s" for label in self.classes)
        return (
            f"{self.name}: {lengths.sum():.2f} s in {len(self)} of {self.n_tokens} tokens are labelled: {parts}. "
            f"{self.n_unlabelled} tokens have no label and {self.n_ambiguous} are too near an edge."
        )


def label_tokens(
    source: SourceTimeline | SourceHeader | np.ndarray,
    intervals: Any,
    labels: Sequence[Any] | None = None,
    *,
    margin_s: float = 0.0,
) -> TokenLabels:
    """Give each audio token the label at its centre.

    Parameters: `source`, a source's timeline (`batch.timeline[i]`) or its tokens' seconds [U_i, 2]; `intervals` [n, 2] in
    seconds with `labels`, n strings or n numbers, as `mir_eval.io.load_labeled_intervals` returns them, or rows
    (start_s, end_s, label) without `labels`. Tokens whose centre lies nearer than `margin_s` seconds to an edge are
    dropped; an edge is where the label changes, to another label or to none, within the source. Cost: sorting n
    intervals.

    Raises: ArgumentError for intervals that are empty, not finite, not ascending or overlapping, labels of another
    number or of mixed kinds, a margin below 0, and where no token gets a label.

    >>> import numpy as np
    >>> from audiollm.analysis.labels import label_tokens
    >>> starts = np.arange(50) * 0.04
    >>> tokens = np.stack([starts, starts + 0.04], axis=1)
    >>> label_tokens(tokens, [(0.0, 1.0, "C"), (1.0, 1.6, "G:7")], margin_s=0.1)
    TokenLabels('source': 33 of 50 tokens, 2 different labels; dropped: 10 without a label, 7 near an edge)
    """
    seconds, name = token_seconds(source)
    spans, values = _annotation(intervals, labels)
    if not isinstance(margin_s, (int, float, np.floating)) or not 0 <= margin_s < np.inf:
        raise ArgumentError(
            f"margin_s is {margin_s!r}; pass seconds, 0 or more", code="bad_argument", source="margin_s"
        )
    centres = seconds.mean(axis=1)
    at = np.searchsorted(spans[:, 0], centres, side="right") - 1
    labelled = (at >= 0) & (centres < spans[at, 1])
    near = _distance(centres, _edges(spans, values, seconds[0, 0], seconds[-1, 1])) < margin_s
    kept = np.flatnonzero(labelled & ~near)
    if not len(kept):
        raise ArgumentError(
            f"no token of {name} gets a label: its tokens lie in {seconds[0, 0]:.3f}-{seconds[-1, 1]:.3f} s, the "
            f"intervals in {spans[0, 0]:.3f}-{spans[-1, 1]:.3f} s, the margin is {margin_s:g} s (did you pass "
            "milliseconds, or another song's annotation?)",
            code="bad_argument",
            source="intervals",
        )
    return TokenLabels(
        name=name,
        labels=values[at[kept]],
        tokens=kept,
        intervals=seconds[kept],
        n_tokens=len(seconds),
        n_unlabelled=int((~labelled).sum()),
        n_ambiguous=int((labelled & near).sum()),
    )


def token_seconds(source: Any, name: str = "source") -> tuple[np.ndarray, str]:
    """A source's token intervals as an array [U_i, 2] of seconds, and its name.

    Raises: ArgumentError for anything but a timeline or ascending finite intervals [U_i, 2].
    """
    if hasattr(source, "token_intervals"):
        return source.token_intervals(), source.name
    seconds = _numbers(source, "source")
    if not len(seconds) or not (np.diff(seconds, axis=1) > 0).all() or not (np.diff(seconds, axis=0) >= 0).all():
        raise ArgumentError(
            "the tokens' seconds are not ascending intervals; pass batch.timeline[i] or its token_intervals()",
            code="bad_argument",
            source="source",
        )
    return seconds, name


def _annotation(intervals: Any, labels: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Checked spans [n, 2] and labels [n], sorted by start."""
    if labels is None:
        rows = list(intervals)
        if any(isinstance(row, (str, float, int)) or len(row) != 3 for row in rows):
            raise ArgumentError(
                "intervals without labels must be rows (start_s, end_s, label); or pass the labels as well",
                code="bad_argument",
                source="intervals",
            )
        intervals, labels = [row[:2] for row in rows], [row[2] for row in rows]
    spans, values = _numbers(intervals, "intervals"), _values(labels)
    if len(spans) != len(values):
        raise ArgumentError(
            f"{len(spans)} intervals and {len(values)} labels; pass one label an interval",
            code="bad_argument",
            source="labels",
        )
    if not len(spans):
        raise ArgumentError(
            "there are no intervals; leave out a source that is not annotated", code="bad_argument", source="intervals"
        )
    order = np.argsort(spans[:, 0], kind="stable")
    spans, values = spans[order], values[order]
    for start, end in spans[spans[:, 0] >= spans[:, 1]]:
        raise ArgumentError(
            f"the interval {start:g}-{end:g} s does not end after it starts (did you pass durations instead of ends?)",
            code="bad_argument",
            source="intervals",
        )
    for k in np.flatnonzero(spans[1:, 0] < spans[:-1, 1] - _TOUCH_S):
        raise ArgumentError(
            f"the intervals {spans[k, 0]:g}-{spans[k, 1]:g} s and {spans[k + 1, 0]:g}-{spans[k + 1, 1]:g} s overlap; a "
            "token takes one label: split the annotation into one a voice",
            code="bad_argument",
            source="intervals",
        )
    return spans, values


def _numbers(pairs: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(pairs, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.size == 0:
        array = array.reshape(0, 2)
    if array.ndim != 2 or array.shape[1] != 2 or not np.isfinite(array).all():
        raise ArgumentError(f"{what} must be [n, 2] finite numbers, in seconds", code="bad_argument", source=what)
    return array


def _values(labels: Sequence[Any]) -> np.ndarray:
    """Labels as an array of strings, whole numbers or floats; a mixture would silently become strings."""
    values = list(labels)
    array = np.asarray(values)
    mixed = array.dtype.kind == "U" and not all(isinstance(v, str) for v in values)
    if len(values) and (mixed or array.ndim != 1 or array.dtype.kind not in "Uiufb"):
        raise ArgumentError(
            "labels must be all strings or all numbers, one an interval", code="bad_argument", source="labels"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ArgumentError(
            "labels hold NaN or infinity; leave those intervals out", code="bad_argument", source="labels"
        )
    return array


def _edges(spans: np.ndarray, values: np.ndarray, first_s: float, last_s: float) -> np.ndarray:
    """Seconds within (first_s, last_s) at which the label changes."""
    touching = spans[1:, 0] - spans[:-1, 1] <= _TOUCH_S
    changing = values[1:] != values[:-1]
    edges = np.concatenate(
        [
            spans[1:, 0][changing | ~touching],
            spans[:-1, 1][~touching],
            [spans[0, 0], spans[-1, 1]],
        ]
    )
    return np.sort(edges[(edges > first_s + _TOUCH_S) & (edges < last_s - _TOUCH_S)])


def _distance(centres: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Seconds from each centre to the nearest edge; infinite where there is none."""
    walled = np.concatenate([[-np.inf], edges, [np.inf]])
    right = np.searchsorted(walled, centres)
    return np.minimum(centres - walled[right - 1], walled[right] - centres)
